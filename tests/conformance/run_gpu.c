// SPDX-License-Identifier: MIT
/*
 * The engine on a GPU, and on what stands for one: its bits do not depend on
 * where blocks are or how a prompt is cut; without attention they are the
 * CPU's; a token in steady state waits once and allocates nothing.
 */
#include <check.h>
#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cache/batch.h"
#include "gpu/mock.h"
#include "lib/gpu_backends.h"
#include "lib/ref_run.h"
#include "lib/rounds.h"

#define OK(call) ck_assert_msg((call) == 0, "%s: %s", #call, kvt_last_error())
#define DEMO_VOCAB 260

static int n_backends;
static struct kvt_gpu *gpu;

/* ---- a model of random weights ---- */

static uint32_t seed;

static uint32_t next(void)
{
	seed = seed * 1664525u + 1013904223u;
	return seed >> 8;
}

static void randomize(float *f, size_t n, float size)
{
	for (size_t i = 0; i < n; i++)
		f[i] = size * ((float)next() / (float)(1 << 23) - 1);
}

static void random_matrix(struct ref_matrix *m, uint32_t n, uint32_t k)
{
	float *row = malloc(k * sizeof(*row));

	ck_assert_int_eq(ref_matrix_alloc(m, n, k), 0);
	for (uint32_t j = 0; j < n; j++) {
		randomize(row, k, 1.7f / sqrtf((float)k));
		ref_matrix_set(m, j, row);
	}
	free(row);
}

static float *random_vector(uint32_t n)
{
	float *f = malloc(n * sizeof(*f));

	randomize(f, n, 1);
	return f;
}

/* heads, KV heads, elements of a head */
static const uint32_t layouts[][3] = { { 8, 2, 16 }, { 8, 4, 8 }, { 6, 1, 64 }, { 4, 1, 128 } };

static struct ref_model *make_model(const uint32_t *layout, bool tied)
{
	struct ref_model *m = calloc(1, sizeof(*m));
	struct ref_config *c = &m->config;

	seed = layout[0] * 1000 + layout[2];
	*c = (struct ref_config){ .vocab = 77, .hidden = 48, .inter = 72, .layers = 2, .heads = layout[0],
				  .kv_heads = layout[1], .head_dim = layout[2], .context = 4096, .eps = 1e-5f, .tied = tied };
	m->layers = calloc(c->layers, sizeof(*m->layers));
	m->frequency = calloc(c->head_dim / 2, sizeof(*m->frequency));
	for (uint32_t i = 0; i < c->head_dim / 2; i++)
		m->frequency[i] = pow(10000, -2.0 * i / c->head_dim);
	random_matrix(&m->embed, c->vocab, c->hidden);
	if (!tied)
		random_matrix(&m->head, c->vocab, c->hidden);
	m->norm = random_vector(c->hidden);
	for (uint32_t i = 0; i < c->layers; i++) {
		struct ref_layer *l = &m->layers[i];

		l->attn_norm = random_vector(c->hidden);
		l->mlp_norm = random_vector(c->hidden);
		random_matrix(&l->qkv, (c->heads + 2 * c->kv_heads) * c->head_dim, c->hidden);
		random_matrix(&l->out, c->hidden, c->heads * c->head_dim);
		random_matrix(&l->gate_up, 2 * c->inter, c->hidden);
		random_matrix(&l->down, c->hidden, c->inter);
	}
	return m;
}

/* ---- bits ---- */

#define PROMPT 70
#define NEW 4

static float *run(const struct ref_model *m, struct ref_how how, const uint32_t *ids, uint32_t n, uint32_t n_new)
{
	how.codec = KVT_F16;
	how.tier = gpu;
	how.on_gpu = true;
	return ref_run(m, &how, ids, n, n_new, NULL, NULL);
}

static double distance(const float *a, const float *b, size_t n)
{
	double most = 0;

	for (size_t i = 0; i < n; i++) {
		ck_assert(isfinite(a[i]) && isfinite(b[i]));
		most = fmax(most, fabs((double)a[i] - (double)b[i]));
	}
	return most;
}

/* A token that sees itself alone, with a score of 0, has an exact weight by any arithmetic: then all bits are the CPU's. */
static void clear_queries(struct ref_model *m)
{
	const struct ref_config *c = &m->config;
	float *zeros = calloc(c->hidden, sizeof(*zeros));

	for (uint32_t i = 0; i < c->layers; i++)
		for (uint32_t j = 0; j < c->heads * c->head_dim; j++)
			ref_matrix_set(&m->layers[i].qkv, j, zeros);
	free(zeros);
}

START_TEST(a_single_token_has_the_cpus_bits)
{
	const int backend = _i / 4;
	const struct ref_how cpu = { .name = "cpu", .codec = KVT_F16, .threads = 1 };
	const struct ref_how how = { .name = "gpu", .gpu = 64 << 10, .threads = 1, .block = 16384 };
	struct ref_model *m = make_model(layouts[_i % 4], _i % 2);
	const uint32_t vocab = m->config.vocab;

	clear_queries(m);
	OK(gpu_backend_open(backend, &gpu));
	for (uint32_t id = 0; id < vocab; id += test_rounds(9, 31, 31)) {
		float *want = ref_run(m, &cpu, &id, 1, 1, NULL, NULL), *got = run(m, how, &id, 1, 1);

		ck_assert_msg(!memcmp(got, want, vocab * sizeof(*got)), "token %u: the logits differ by %g", id,
			      distance(got, want, vocab));
		free(want);
		free(got);
	}
	ref_model_free(m);
	gpu_backend_close(backend, gpu);
}
END_TEST

static const struct ref_how hows[] = {
	{ .name = "all on the GPU, token by token", .gpu = 256 << 10, .chunk = 1, .block = 16384 },
	{ .name = "half of it pinned", .gpu = 96 << 10, .pinned = 512 << 10, .chunk = 7, .block = 16384 },
	{ .name = "one block on the GPU", .pinned = 512 << 10, .chunk = 64, .block = 16384 },
	{ .name = "large blocks", .gpu = 8 << 20, .chunk = 33, .block = 1 << 20 },
	{ .name = "pinned and a disk", .gpu = 32 << 10, .pinned = 1 << 20, .disk = 16 << 20, .block = 8192 },
};

#define HOWS (sizeof(hows) / sizeof(hows[0]))

/* Loop index: backend x layout. */
START_TEST(same_bits)
{
	const int backend = _i / 4;
	const struct ref_how cpu = { .name = "cpu", .codec = KVT_F16, .chunk = 33 };
	const struct ref_how plain = { .name = "the whole prompt at once", .gpu = 4 << 20 };
	struct ref_model *m = make_model(layouts[_i % 4], _i % 2);
	const size_t n = (size_t)(PROMPT + NEW - 1) * m->config.vocab;
	uint32_t ids[PROMPT];
	float *want, *got;

	OK(gpu_backend_open(backend, &gpu));
	for (uint32_t i = 0; i < PROMPT; i++)
		ids[i] = next() % m->config.vocab;
	want = run(m, plain, ids, PROMPT, NEW);
	got = ref_run(m, &cpu, ids, PROMPT, NEW, NULL, NULL);
	/* of the greedy tokens, too, where they are the same */
	printf("%s, heads of %u: logits differ from the CPU's by at most %.3g\n", gpu->ops->name, m->config.head_dim,
	       distance(got, want, (size_t)PROMPT * m->config.vocab));
	ck_assert_double_lt(distance(got, want, (size_t)PROMPT * m->config.vocab), 1e-3);
	free(got);
	for (size_t i = 0; i < HOWS; i++) {
		if ((i + (size_t)_i) % test_rounds(1, 3, 5))
			continue;
		got = run(m, hows[i], ids, PROMPT, NEW);
		ck_assert_msg(!memcmp(got, want, n * sizeof(*got)), "%s: other bits", hows[i].name);
		free(got);
	}
	free(want);
	ref_model_free(m);
	gpu_backend_close(backend, gpu);
}
END_TEST

/* ---- an engine by hand ---- */

struct rig {
	struct ref_model *m;
	struct kvt_cache *cache;
	struct kvt_seq *seq;
	struct ref_engine *engine;
};

/* gpu_bytes beyond the least. */
static struct kvt_cache_params cache_params(const struct ref_model *m, struct kvt_plane_params *planes, uint64_t gpu_bytes,
					    uint64_t pinned_bytes, uint32_t tokens)
{
	const struct kvt_batch_params batch = { .size = sizeof(batch), .max_seqs = 1, .max_tokens = tokens };
	struct kvt_cache_params p = KVT_INIT(p);

	ref_planes(&m->config, KVT_F16, planes);
	p.planes = planes;
	p.n_planes = 4;
	p.block_bytes = 4096;
	p.max_seqs = 2;
	p.max_tokens = 600;
	p.threads = 1;
	p.max_query_heads = 8;
	p.pinned_bytes = pinned_bytes;
	p.gpu_scratch_bytes = (uint64_t)kvt_batch_scratch(&p, &batch, 8);
	p.gpu_bytes = (uint64_t)kvt_cache_min_gpu(&p) + gpu_bytes;
	p.ram_bytes = (uint64_t)kvt_cache_min_ram(&p) + (1 << 20);
	return p;
}

static int make(struct rig *r, uint64_t gpu_bytes, uint64_t pinned_bytes, uint32_t tokens)
{
	struct ref_engine_params params = { .tokens = tokens, .on_gpu = true };
	struct kvt_plane_params planes[4];
	struct kvt_cache_params p;
	int ret;

	*r = (struct rig){ .m = make_model(layouts[0], true) };
	p = cache_params(r->m, planes, gpu_bytes, pinned_bytes, tokens);
	params.model = r->m;
	ret = kvt_cache_create_on(&p, NULL, gpu, &r->cache);
	if (!ret)
		ret = kvt_seq_create(r->cache, &r->seq);
	params.cache = r->cache;
	if (!ret)
		ret = ref_engine_create(&params, &r->engine);
	return ret;
}

static void unmake(struct rig *r)
{
	ref_engine_free(r->engine);
	kvt_cache_destroy(r->cache);
	ref_model_free(r->m);
}

/* Decoding: one wait for the logits, no memory, and few launches; a step without logits does not wait. */
START_TEST(a_token_waits_once_and_allocates_nothing)
{
	const uint32_t rows = 4096 / (2 * 16 * 2); /* of a block */
	uint32_t ids[40] = { 1, 2, 3 };
	const float *logits;
	struct rig r;

	OK(gpu_backend_open(_i, &gpu));
	OK(make(&r, 64 * 4096, 0, 40));
	OK(ref_forward(r.engine, r.seq, ids, 40, 1, &logits));
	OK(ref_forward(r.engine, r.seq, ids, 1, 1, &logits)); /* captured */
	for (uint32_t i = 0; i < 2 * rows; i++) {
		kvt_mock_reset(gpu);
		OK(ref_forward(r.engine, r.seq, ids, 1, 1, &logits));
		ck_assert_uint_eq(kvt_mock_syncs(gpu), 1);
		ck_assert_uint_eq(kvt_mock_allocs(gpu), 0);
		ck_assert_uint_eq(kvt_mock_count(gpu, KVT_MOCK_graph_launch), 1);
		ck_assert_uint_eq(kvt_mock_count(gpu, KVT_MOCK_capture_begin), 0);
		ck_assert_uint_le(kvt_mock_count(gpu, KVT_MOCK_launch), 3); /* advance, embed, and a new block's address */
	}
	kvt_mock_reset(gpu);
	OK(ref_forward(r.engine, r.seq, ids, 20, 0, NULL));
	ck_assert_uint_eq(kvt_mock_syncs(gpu), 0);
	ck_assert_uint_eq(kvt_mock_allocs(gpu), 0);
	/* the step was of another size: launches may be, too */
	OK(ref_forward(r.engine, r.seq, ids, 1, 1, &logits));
	ck_assert_uint_eq(kvt_mock_count(gpu, KVT_MOCK_capture_begin), 1);
	ref_engine_rest(r.engine);
	unmake(&r);
	gpu_backend_close(_i, gpu);
}
END_TEST

/* What is appended is the sequence's: it can be cut, moved and gone on with, and another one's turn comes between. */
START_TEST(sequences_take_turns)
{
	uint32_t ids[60], vocab;
	struct kvt_seq *other;
	const float *logits;
	float want[77];
	struct rig r;

	OK(gpu_backend_open(_i, &gpu));
	OK(make(&r, 64 * 4096, 64 * 4096, 60));
	vocab = r.m->config.vocab;
	for (uint32_t i = 0; i < 60; i++)
		ids[i] = next() % vocab;
	OK(kvt_seq_create(r.cache, &other));
	OK(ref_forward(r.engine, r.seq, ids, 60, 1, &logits));
	memcpy(want, logits, vocab * sizeof(*want));
	ck_assert_int_eq(kvt_seq_truncate(r.seq, 30), -EBUSY);
	OK(ref_forward(r.engine, other, ids + 5, 20, 1, &logits));
	OK(kvt_seq_truncate(r.seq, 30));
	ck_assert_int_ge((int)kvt_seq_move(r.seq, KVT_TIER_RAM), 0);
	OK(ref_forward(r.engine, r.seq, ids + 30, 29, 0, NULL));
	kvt_seq_free(other);
	OK(ref_forward(r.engine, r.seq, ids + 59, 1, 1, &logits));
	ck_assert_mem_eq(logits, want, vocab * sizeof(*want));
	ref_engine_rest(r.engine);
	ref_engine_rest(r.engine);
	ck_assert_uint_eq(kvt_seq_len(r.seq), 60);
	OK(kvt_seq_truncate(r.seq, 0));
	unmake(&r);
	gpu_backend_close(_i, gpu);
}
END_TEST

/* What the GPU cannot hold is refused before it is asked for; a cache that is full costs the step, not the sequence. */
START_TEST(what_does_not_fit_is_refused)
{
	struct ref_model *m = make_model(layouts[0], true);
	uint32_t ids[60] = { 0 }, len;
	struct kvt_plane_params planes[4];
	const float *logits;
	uint64_t memory;
	struct rig r;

	memory = cache_params(m, planes, 0, 0, 60).gpu_bytes + (uint64_t)ref_gpu_bytes(&m->config, 600, 60, 1) + 4096;
	ref_model_free(m);
	OK(kvt_mock_open(memory, &gpu)); /* the allocator's own rounding is in the 4096 */
	OK(make(&r, 0, 0, 60));
	unmake(&r);
	gpu_backend_close(1, gpu);
	OK(kvt_mock_open(memory - 16384, &gpu));
	ck_assert_int_eq(make(&r, 0, 0, 60), -ENOMEM);
	ck_assert_msg(strstr(kvt_last_error(), "the model takes ") && strstr(kvt_last_error(), "of weights"), "%s",
		      kvt_last_error());
	ck_assert_uint_eq(kvt_mock_count(gpu, KVT_MOCK_host_alloc), 0);
	unmake(&r);
	gpu_backend_close(1, gpu);
	OK(gpu_backend_open(GPU_MOCK, &gpu));
	OK(make(&r, 3 * 4096, 0, 60)); /* a block for each plane: 64 tokens */
	OK(ref_forward(r.engine, r.seq, ids, 60, 1, &logits));
	len = kvt_seq_len(r.seq);
	ck_assert_int_eq(ref_forward(r.engine, r.seq, ids, 30, 1, &logits), -ENOSPC);
	ck_assert_uint_eq(kvt_seq_len(r.seq), len);
	OK(ref_forward(r.engine, r.seq, ids, 4, 1, &logits));
	unmake(&r);
	gpu_backend_close(1, gpu);
}
END_TEST

/* Each call of the device fails once, or the device is gone from it on: an error, and no wrong bit. */
START_TEST(each_call_fails_once)
{
	const uint64_t step_by = test_rounds(7, 61, 61);
	uint32_t ids[30] = { 5, 6, 7 };
	const float *logits = NULL;
	float want[77] = { 0 };
	bool failed = true;
	uint64_t runs = 0;
	struct rig r;

	for (uint64_t at = 0; failed; at += at ? step_by : 1) {
		uint32_t fed = 0;
		int ret;

		OK(gpu_backend_open(GPU_MOCK, &gpu));
		kvt_mock_fail_at(gpu, at, _i ? -ENODEV : -EIO); /* 0: never */
		ret = make(&r, 16 * 4096, 0, 30);
		for (int step = 0; !ret && step < 3; step++) {
			ret = ref_forward(r.engine, r.seq, ids + fed, step ? 1 : 28, step > 0, &logits);
			fed += ret ? 0 : step ? 1 : 28;
		}
		failed = !at || kvt_mock_failed(gpu);
		if (!at)
			memcpy(want, logits, r.m->config.vocab * sizeof(*want));
		if (!ret)
			ck_assert_mem_eq(logits, want, r.m->config.vocab * sizeof(*want));
		else
			ck_assert_msg(ret == (_i ? -ENODEV : -EIO), "%d: %s", ret, kvt_last_error());
		ck_assert(!ret || failed);
		if (ret && r.engine && !_i && fed)
			ck_assert_uint_eq(kvt_seq_len(r.seq), fed);
		runs += ret != 0;
		unmake(&r);
		gpu_backend_close(1, gpu);
	}
	ck_assert_uint_gt(runs * step_by, 60);
}
END_TEST

/* ---- the demo model ---- */

static const char *data(const char *name)
{
	static char path[512];
	const char *root = getenv("KVT_SOURCE");

	snprintf(path, sizeof(path), "%s/tests/data/kvt-demo/%s", root ? root : ".", name);
	return path;
}

static struct ref_model *load_demo(void)
{
	struct ref_model *m;

	OK(ref_model_load(data(""), NULL, NULL, &m));
	return m;
}

/* The text that float64 code gave; its logits within what queries and rows of 16 bits cost. On a GPU, or its stand-in. */
START_TEST(demo_reference)
{
	const int backend = n_backends > GPU_CUDA ? GPU_CUDA : GPU_CPU;
	const struct ref_how how = { .name = "demo", .codec = KVT_F16, .chunk = 100, .gpu = 8 << 20, .on_gpu = true };
	struct ref_how there = how;
	uint32_t ids[257], new_ids[64];
	struct ref_model *m;
	size_t bytes;
	float *got;
	char *want;
	json_t *o;

	if (test_sanitized())
		return; /* half a minute without */
	OK(gpu_backend_open(backend, &gpu));
	there.tier = gpu;
	m = load_demo();
	o = json_load_file(data("reference_wide.json"), 0, NULL);
	ck_assert_ptr_nonnull(o);
	for (size_t i = 0; i < 257; i++)
		ids[i] = (uint32_t)json_integer_value(json_array_get(json_object_get(o, "input_ids"), i));
	OK(ref_read_file(data("reference_wide.f32"), 1 << 24, &want, &bytes));
	ck_assert_uint_eq(bytes, 256 * DEMO_VOCAB * sizeof(float));
	got = ref_run(m, &there, ids, 257, 64, new_ids, NULL);
	/* their row 0 is behind BOS and the first byte */
	printf("%s: the largest difference of logits from float64's is %.3g\n", gpu->ops->name,
	       distance(got + DEMO_VOCAB, (const float *)(const void *)want, 256 * DEMO_VOCAB));
	ck_assert_double_lt(distance(got + DEMO_VOCAB, (const float *)(const void *)want, 256 * DEMO_VOCAB), 0.1);
	for (size_t i = 0; i < 64; i++)
		ck_assert_uint_eq(new_ids[i], (uint32_t)json_integer_value(json_array_get(json_object_get(o, "greedy_ids"), i)));
	free(got);
	free(want);
	json_decref(o);
	ref_model_free(m);
	gpu_backend_close(backend, gpu);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("run_gpu");
	TCase *t = tcase_create("engine");
	SRunner *r = srunner_create(s);
	int failed;

	n_backends = gpu_backends();
	tcase_set_timeout(t, 300);
	tcase_add_loop_test(t, a_single_token_has_the_cpus_bits, 0, 4 * n_backends);
	tcase_add_loop_test(t, same_bits, 0, 4 * n_backends);
	tcase_add_loop_test(t, a_token_waits_once_and_allocates_nothing, 1, 3);
	tcase_add_loop_test(t, sequences_take_turns, 0, n_backends);
	tcase_add_test(t, what_does_not_fit_is_refused);
	tcase_add_loop_test(t, each_call_fails_once, 0, 2);
	tcase_add_test(t, demo_reference);
	suite_add_tcase(s, t);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
