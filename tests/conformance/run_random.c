// SPDX-License-Identifier: MIT
/*
 * Random models of every head layout, head size and cache type: all logits have
 * the same bits whatever the budgets, blocks, threads, chunks, I/O path, tiers
 * and instruction set.
 */
#include <check.h>
#include <errno.h>
#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/cpu.h"
#include "gpu/mock.h"
#include "lib/ref_run.h"
#include "lib/rounds.h"
#include "lib/weightfile.h"
#include "runtime/loader.h"

#ifndef __has_feature
#define __has_feature(x) 0
#endif
/* a sanitizer's allocator is its own */
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && !__has_feature(address_sanitizer) && \
	!__has_feature(thread_sanitizer)
#define COUNTS_ALLOCATIONS 1
static atomic_ulong allocations;

void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t n, size_t bytes);
void *__libc_realloc(void *p, size_t bytes);

void *malloc(size_t bytes)
{
	atomic_fetch_add(&allocations, 1);
	return __libc_malloc(bytes);
}

void *calloc(size_t n, size_t bytes)
{
	atomic_fetch_add(&allocations, 1);
	return __libc_calloc(n, bytes);
}

void *realloc(void *p, size_t bytes)
{
	atomic_fetch_add(&allocations, 1);
	return __libc_realloc(p, bytes);
}
#endif

#define VOCAB 257
#define HIDDEN 48
#define INTER 72
#define LAYERS 2
#define PROMPT 300 /* more than a split, and no multiple of anything */
#define NEW 4

static const uint32_t dims[] = { 8, 64, 80, 128, 256 };
static const uint32_t heads[][2] = { { 8, 2 }, { 14, 2 }, { 4, 4 }, { 6, 1 } };

static uint32_t seed;

static uint32_t next(void)
{
	seed = seed * 1664525u + 1013904223u;
	return seed >> 8;
}

/* Of one file; @file is its number in an index. */
struct tensors {
	struct bytes header, data;
	uint32_t file;
};

static struct bytes index_text;

static void add_tensor(struct tensors *t, const char *name, uint32_t rows, uint32_t columns)
{
	const float size = rows ? 1.7f / sqrtf((float)columns) : 1;
	char text[256], shape[32];
	float f;

	snprintf(shape, sizeof(shape), rows ? "[%u,%u]" : "[%.0u%u]", rows, columns);
	snprintf(text, sizeof(text), "%s\"%s\":{\"dtype\":\"F32\",\"shape\":%s,\"data_offsets\":[%zu,%zu]}",
		 t->header.n > 1 ? "," : "", name, shape, t->data.n, t->data.n + (rows ? rows : 1) * columns * sizeof(f));
	put_text(&t->header, text);
	snprintf(text, sizeof(text), "%s\"%s\":\"model-%u.safetensors\"", index_text.n ? "," : "{\"weight_map\":{", name, t->file);
	put_text(&index_text, text);
	for (uint32_t i = 0; i < (rows ? rows : 1) * columns; i++) {
		f = size * ((float)next() / (float)(1 << 23) - 1);
		put(&t->data, &f, sizeof(f));
	}
}

static void write_shard(struct tensors *t, const char *name)
{
	struct bytes file = { 0 };

	put_text(&t->header, "}");
	put(&t->header, "", 1);
	put_safetensors(&file, (const char *)t->header.p, t->data.p, t->data.n);
	write_bytes(name, &file);
	free(t->header.p);
	free(t->data.p);
}

/* A Hugging Face directory "model", with one file or two. */
static void write_model(uint32_t n_heads, uint32_t kv_heads, uint32_t dim, bool tied, bool shards)
{
	static const char *const names[] = { "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
					     "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj" };
	const uint32_t shapes[7][2] = { { n_heads * dim, HIDDEN }, { kv_heads * dim, HIDDEN }, { kv_heads * dim, HIDDEN },
					{ HIDDEN, n_heads * dim }, { INTER, HIDDEN }, { INTER, HIDDEN }, { HIDDEN, INTER } };
	struct tensors t[2] = { { .file = 0 }, { .file = 1 } }, *first = &t[0];
	char text[512];

	index_text.n = 0;
	mkdir(scratch("model"), 0755);
	snprintf(text, sizeof(text),
		 "{\"architectures\":[\"LlamaForCausalLM\"],\"vocab_size\":%u,\"hidden_size\":%u,\"intermediate_size\":%u,"
		 "\"num_hidden_layers\":%u,\"num_attention_heads\":%u,\"num_key_value_heads\":%u,\"head_dim\":%u,"
		 "\"hidden_act\":\"silu\",\"max_position_embeddings\":4096,\"rms_norm_eps\":1e-5,\"rope_theta\":10000,"
		 "\"tie_word_embeddings\":%s,\"bos_token_id\":256}",
		 VOCAB, HIDDEN, INTER, LAYERS, n_heads, kv_heads, dim, tied ? "true" : "false");
	write_file("model/config.json", text, strlen(text));
	put_text(&t[0].header, "{");
	put_text(&t[1].header, "{");
	add_tensor(first, "model.embed_tokens.weight", VOCAB, HIDDEN);
	if (!tied)
		add_tensor(first, "lm_head.weight", VOCAB, HIDDEN);
	add_tensor(first, "model.norm.weight", 0, HIDDEN);
	for (uint32_t layer = 0; layer < LAYERS; layer++) {
		struct tensors *at = shards ? &t[layer % 2] : first;

		snprintf(text, sizeof(text), "model.layers.%u.input_layernorm.weight", layer);
		add_tensor(at, text, 0, HIDDEN);
		snprintf(text, sizeof(text), "model.layers.%u.post_attention_layernorm.weight", layer);
		add_tensor(at, text, 0, HIDDEN);
		for (uint32_t i = 0; i < 7; i++) {
			snprintf(text, sizeof(text), "model.layers.%u.%s.weight", layer, names[i]);
			add_tensor(at, text, shapes[i][0], shapes[i][1]);
		}
	}
	put_text(&index_text, "}}");
	if (!shards) {
		write_shard(&t[0], "model/model.safetensors");
		free(t[1].header.p);
		return;
	}
	unlink(scratch("model/model.safetensors"));
	write_shard(&t[0], "model/model-0.safetensors");
	write_shard(&t[1], "model/model-1.safetensors");
	write_bytes("model/model.safetensors.index.json", &index_text);
}

static struct ref_model *load_model(const struct kvt_load_params *how)
{
	struct ref_model *m;

	ck_assert_msg(ref_model_load(scratch("model"), NULL, how, &m) == 0, "%s", kvt_last_error());
	return m;
}

static struct ref_model *make_model(uint32_t n_heads, uint32_t kv_heads, uint32_t dim, bool tied)
{
	write_model(n_heads, kv_heads, dim, tied, false);
	return load_model(NULL);
}

static const struct ref_how hows[] = {
	{ .name = "smallest budget", .ram = -1, .disk = 64 << 20, .block = 16384, .chunk = 64 },
	{ .name = "little of both", .pinned = 128 << 10, .ram = 64 << 10, .disk = 64 << 20, .block = 8192, .chunk = 100 },
	{ .name = "threads for I/O", .ram = 256 << 10, .disk = 64 << 20, .block = 16384, .io = KVT_IO_THREADS },
	{ .name = "blocks of 1M", .block = 1 << 20, .threads = 3, .chunk = 7 },
	{ .name = "gpu tier", .gpu = 1 << 20, .ram = 128 << 10, .disk = 64 << 20, .block = 16384, .threads = 1 },
	{ .name = "one token a step, one thread", .chunk = 1, .threads = 1 },
	{ .name = "seven threads", .threads = 7, .chunk = 128 },
};

#define HOWS (sizeof(hows) / sizeof(hows[0]))

static void same(const struct ref_model *m, struct ref_how how, const uint32_t *ids, uint32_t n, const float *want)
{
	const size_t rows = n + NEW - 1;
	float *got = ref_run(m, &how, ids, n, NEW, NULL, NULL);

	for (size_t i = 0; i < rows; i++)
		ck_assert_msg(!memcmp(got + i * VOCAB, want + i * VOCAB, VOCAB * sizeof(*got)),
			      "%s, %s: the logits behind token %zu have other bits", how.name,
			      kvt_codec_name((enum kvt_codec)how.codec), i);
	free(got);
}

/* Loop index: head layout x head size. */
START_TEST(same_bits)
{
	const uint32_t *h = heads[_i % 4], dim = dims[_i / 4];
	struct ref_how plain = { .name = "untiered", .threads = 2 };
	uint32_t ids[PROMPT] = { 256 };
	struct ref_model *m;
	float *want;

	if (_i % test_rounds(1, 7, 11))
		return; /* some layouts and sizes: it is slow there */
	seed = (uint32_t)_i + 1;
	m = make_model(h[0], h[1], dim, _i % 2);
	for (uint32_t i = 1; i < PROMPT; i++)
		ids[i] = next() % VOCAB;
	for (plain.codec = 0; plain.codec <= KVT_BF16; plain.codec++) {
		want = ref_run(m, &plain, ids, PROMPT, NEW, NULL, NULL);
		for (size_t i = 0; i < (size_t)(PROMPT + NEW - 1) * VOCAB; i++)
			ck_assert(isfinite(want[i]));
		/* each way with each type at some head size; all of them would be minutes */
		for (size_t i = 0; i < HOWS; i++) {
			struct ref_how how = hows[i];

			how.codec = plain.codec;
			if (((size_t)_i + i + plain.codec) % 3 == 0)
				same(m, how, ids, PROMPT, want);
		}
		free(want);
	}
	ref_model_free(m);
}
END_TEST

START_TEST(same_bits_on_every_isa)
{
	struct ref_how how = { .name = "isa", .codec = KVT_F16, .chunk = 33 };
	uint32_t ids[40] = { 256 };
	struct ref_model *m;
	float *want = NULL, *got;

	seed = 99;
	m = make_model(8, 2, 80, true);
	for (uint32_t i = 1; i < 40; i++)
		ids[i] = next() % VOCAB;
	for (int isa = 0; isa < KVT_ISAS; isa++) {
		how.isa = kvt_isa_name((enum kvt_isa)isa);
		if (!kvt_isa_usable((enum kvt_isa)isa))
			continue;
		got = ref_run(m, &how, ids, 40, NEW, NULL, NULL);
		if (!want)
			want = got;
		ck_assert_msg(!memcmp(got, want, (40 + NEW - 1) * VOCAB * sizeof(*got)), "%s: other bits", how.isa);
		if (got != want)
			free(got);
	}
	free(want);
	ref_model_free(m);
}
END_TEST

static void same_matrix(const struct ref_matrix *a, const struct ref_matrix *b)
{
	ck_assert_uint_eq(a->n, b->n);
	ck_assert_mem_eq(a->panels, b->panels, ref_matrix_bytes(a->n, a->k));
}

static void same_model(const struct ref_model *a, const struct ref_model *b)
{
	ck_assert_uint_eq(a->bytes, b->bytes);
	same_matrix(&a->embed, &b->embed);
	same_matrix(&a->head, &b->head);
	ck_assert_mem_eq(a->norm, b->norm, HIDDEN * sizeof(float));
	for (uint32_t i = 0; i < LAYERS; i++) {
		ck_assert_mem_eq(a->layers[i].attn_norm, b->layers[i].attn_norm, HIDDEN * sizeof(float));
		ck_assert_mem_eq(a->layers[i].mlp_norm, b->layers[i].mlp_norm, HIDDEN * sizeof(float));
		same_matrix(&a->layers[i].qkv, &b->layers[i].qkv);
		same_matrix(&a->layers[i].out, &b->layers[i].out);
		same_matrix(&a->layers[i].gate_up, &b->layers[i].gate_up);
		same_matrix(&a->layers[i].down, &b->layers[i].down);
	}
}

static int count_pieces(void *user, uint64_t done, uint64_t total)
{
	ck_assert_uint_le(done, total);
	*(uint64_t *)user += done == total;
	return 0;
}

/* The same weights by every way in, from one file and from shards. */
START_TEST(same_weights_by_every_way)
{
	struct ref_model *want, *got;
	uint64_t ended = 0;

	seed = 17;
	want = make_model(8, 2, 64, false);
	for (int shards = 0; shards < 2; shards++) {
		seed = 17;
		write_model(8, 2, 64, false, shards);
		for (uint32_t mode = 0; mode < KVT_LOAD_MODES; mode++)
			for (uint32_t io = KVT_IO_AUTO; io <= KVT_IO_THREADS; io += KVT_IO_THREADS) {
				const struct kvt_load_params how = { .size = sizeof(how), .mode = mode, .io = io,
								     .piece_bytes = 64 << 10, .progress = count_pieces,
								     .user = &ended };

				got = load_model(&how);
				same_model(want, got);
				ref_model_free(got);
			}
	}
	ck_assert_uint_eq(ended, 2 * KVT_LOAD_MODES * 2);
	ref_model_free(want);
}
END_TEST

static struct kvt_gpu *tier_gpu, *scratch_gpu;

static void forget_calls(void)
{
	kvt_mock_reset(tier_gpu);
	kvt_mock_reset(scratch_gpu);
}

static void expect_no_allocations(void)
{
	ck_assert_uint_gt(kvt_mock_count(tier_gpu, KVT_MOCK_launch) + kvt_mock_count(tier_gpu, KVT_MOCK_copy_h2d) +
			  kvt_mock_count(tier_gpu, KVT_MOCK_copy_h2d_async), 0);
	ck_assert_uint_eq(kvt_mock_allocs(tier_gpu), 0);
	ck_assert_uint_eq(kvt_mock_allocs(scratch_gpu), 0);
}

/* A whole run, its gpu tier and its scratch on mocks: after the start, neither is asked for memory. */
START_TEST(no_device_memory_after_start)
{
	const struct ref_how plain = { .name = "untiered", .codec = KVT_F16, .chunk = 64 };
	struct ref_how how = { .name = "mocks", .codec = KVT_F16, .gpu = 1 << 20, .ram = 64 << 10, .disk = 64 << 20,
			       .block = 8192, .chunk = 64, .started = forget_calls, .ended = expect_no_allocations };
	struct ref_engine_params params = { .tokens = 1 };
	struct ref_engine *engine;
	uint32_t ids[PROMPT] = { 256 };
	struct ref_model *m;
	float *want, *got;

	seed = 3;
	m = make_model(8, 2, 64, true);
	for (uint32_t i = 1; i < PROMPT; i++)
		ids[i] = next() % VOCAB;
	want = ref_run(m, &plain, ids, PROMPT, NEW, NULL, NULL);
	ck_assert_int_eq(kvt_mock_open(0, &tier_gpu), 0);
	ck_assert_int_eq(kvt_mock_open(0, &scratch_gpu), 0);
	/* memory that this engine cannot read is refused */
	params.model = m;
	params.gpu = scratch_gpu;
	ck_assert_int_eq(ref_engine_create(&params, &engine), -EINVAL);
	kvt_mock_readable(scratch_gpu);
	how.tier = tier_gpu;
	how.scratch = scratch_gpu;
	got = ref_run(m, &how, ids, PROMPT, NEW, NULL, NULL);
	ck_assert_mem_eq(got, want, (PROMPT + NEW - 1) * VOCAB * sizeof(*got));
	ck_assert_uint_eq(kvt_mock_alive(scratch_gpu), 0);
	ck_assert_uint_eq(kvt_mock_alive(tier_gpu), 0);
	ck_assert_str_eq(kvt_mock_fault(tier_gpu), "");
	tier_gpu->ops->close(tier_gpu);
	scratch_gpu->ops->close(scratch_gpu);
	free(want);
	free(got);
	ref_model_free(m);
}
END_TEST

#ifdef COUNTS_ALLOCATIONS
static unsigned long before_start, after_end;

static void note_start(void)
{
	before_start = atomic_load(&allocations);
}

static void note_end(void)
{
	after_end = atomic_load(&allocations);
}

/* Nor is the C library, by any thread, though blocks go to the disk and come back. */
START_TEST(no_memory_after_start)
{
	const struct ref_how how = { .name = "tiers", .codec = KVT_F16, .pinned = 64 << 10, .ram = 64 << 10, .disk = 64 << 20,
				     .block = 8192, .chunk = 64, .threads = 2, .io = _i ? KVT_IO_THREADS : KVT_IO_AUTO,
				     .started = note_start, .ended = note_end };
	struct kvt_stats st = KVT_INIT(st);
	uint32_t ids[PROMPT] = { 256 };
	struct ref_model *m;

	seed = 4;
	m = make_model(8, 2, 64, true);
	for (uint32_t i = 1; i < PROMPT; i++)
		ids[i] = next() % VOCAB;
	free(ref_run(m, &how, ids, PROMPT, NEW, NULL, &st));
	ck_assert_uint_gt(st.disk_reads, 0);
	ck_assert_uint_gt(before_start, 0);
	ck_assert_uint_eq(after_end - before_start, 0);
	ref_model_free(m);
}
END_TEST
#endif

/* What a cache cannot hold, or a model not read, is refused, and the sequence goes on as if nothing had been. */
START_TEST(refusals_change_nothing)
{
	const struct ref_how plain = { .name = "untiered", .codec = KVT_F32 };
	struct kvt_plane_params planes[2 * LAYERS];
	struct kvt_cache_params p = KVT_INIT(p);
	uint32_t ids[PROMPT + 1] = { 256 }, fed = 0, at = 0, bad = VOCAB;
	const float *got;
	struct ref_engine_params params = { .tokens = 64, .logits = 64 };
	struct ref_engine *engine;
	float *want;
	struct kvt_cache *cache;
	struct ref_model *m;
	struct kvt_seq *seq;

	seed = 5;
	m = make_model(8, 2, 64, true);
	for (uint32_t i = 1; i < PROMPT; i++)
		ids[i] = next() % VOCAB;
	want = ref_run(m, &plain, ids, PROMPT, 1, NULL, NULL);
	ref_planes(&m->config, KVT_F32, planes);
	p.planes = planes;
	p.n_planes = 2 * LAYERS;
	p.block_bytes = 4096; /* 8 rows */
	p.max_seqs = 1;
	p.max_tokens = PROMPT + 1;
	p.max_query_rows = 64;
	p.max_query_heads = 8;
	/* frames for what attention holds at once and a little more: no room for the prompt */
	p.ram_bytes = (uint64_t)kvt_cache_min_ram(&p) + 20 * 4096;
	ck_assert_msg(kvt_cache_create(&p, &cache) == 0, "%s", kvt_last_error());
	ck_assert_int_eq(kvt_seq_create(cache, &seq), 0);
	params.model = m;
	params.cache = cache;
	params.isa = "mmx";
	ck_assert_int_eq(ref_engine_create(&params, &engine), -EINVAL);
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "no mmx kernels"));
	params.isa = NULL;
	params.tokens = UINT32_MAX;
	ck_assert_int_lt(ref_engine_create(&params, &engine), 0);
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "tokens of a pass"));
	params.tokens = 64;
	ck_assert_int_eq(ref_engine_create(&params, &engine), 0);
	ck_assert_int_eq(ref_forward(engine, seq, &bad, 1, 0, NULL), -EINVAL);
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "token id 257, the model has 257"));
	ck_assert_int_eq(ref_forward(engine, seq, ids, 65, 0, NULL), -EINVAL);
	ck_assert_int_eq(ref_forward(engine, seq, ids, 0, 0, NULL), -EINVAL);
	ck_assert_int_eq(ref_forward(engine, seq, ids, 1, 2, &got), -EINVAL);
	ck_assert_uint_eq(kvt_seq_len(seq), 0);
	for (uint32_t step = 64; step;) {
		int err = ref_forward(engine, seq, ids + at, step, step, &got);

		if (!err) {
			ck_assert_mem_eq(got, want + (size_t)at * VOCAB, (size_t)step * VOCAB * sizeof(*got));
			at += step;
			continue;
		}
		ck_assert_msg(err == -ENOSPC, "%d: %s", err, kvt_last_error());
		fed = at;
		ck_assert_uint_eq(kvt_seq_len(seq), at);
		step /= 2; /* a smaller step may still fit */
	}
	ck_assert_uint_gt(fed, 0);
	ck_assert_uint_lt(fed, PROMPT);
	/* room again: the rest is what it would have been */
	ck_assert_int_eq(kvt_seq_truncate(seq, 10), 0);
	ck_assert_msg(ref_forward(engine, seq, ids + 10, 50, 50, &got) == 0, "%s", kvt_last_error());
	ck_assert_mem_eq(got, want + 10 * VOCAB, 50 * VOCAB * sizeof(*got));
	ref_engine_free(engine);
	kvt_seq_free(seq);
	kvt_cache_destroy(cache);
	ref_model_free(m);
	free(want);
}
END_TEST

START_TEST(context_is_kept)
{
	struct ref_how how = { .name = "context", .codec = KVT_F16 };
	uint32_t ids[16] = { 256 };
	struct ref_engine_params params = { .tokens = 16 };
	struct ref_engine *engine;
	struct kvt_plane_params planes[2 * LAYERS];
	struct kvt_cache_params p = KVT_INIT(p);
	struct kvt_cache *cache;
	struct kvt_seq *seq;
	struct ref_model *m;

	seed = 6;
	m = make_model(4, 4, 8, false);
	m->config.context = 12;
	free(ref_run(m, &how, ids, 9, 4, NULL, NULL)); /* exactly full */
	ref_planes(&m->config, KVT_F16, planes);
	p.planes = planes;
	p.n_planes = 2 * LAYERS;
	p.ram_bytes = 64 << 20;
	p.max_tokens = 64;
	ck_assert_msg(kvt_cache_create(&p, &cache) == 0, "%s", kvt_last_error());
	ck_assert_int_eq(kvt_seq_create(cache, &seq), 0);
	params.model = m;
	params.cache = cache;
	ck_assert_int_eq(ref_engine_create(&params, &engine), 0);
	ck_assert_int_eq(ref_forward(engine, seq, ids, 13, 0, NULL), -ERANGE);
	ck_assert_int_eq(ref_forward(engine, seq, ids, 12, 0, NULL), 0);
	ck_assert_int_eq(ref_forward(engine, seq, ids, 1, 0, NULL), -ERANGE);
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "1 tokens behind 12: the model's context is 12"));
	ck_assert_uint_eq(kvt_seq_len(seq), 12);
	ref_engine_free(engine);
	kvt_seq_free(seq);
	kvt_cache_destroy(cache);
	ref_model_free(m);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("run_random");
	TCase *t = tcase_create("bits");
	SRunner *r = srunner_create(s);
	int failed;

	tcase_add_loop_test(t, same_bits, 0, 20);
	tcase_add_test(t, same_bits_on_every_isa);
	tcase_add_test(t, same_weights_by_every_way);
	tcase_add_test(t, no_device_memory_after_start);
#ifdef COUNTS_ALLOCATIONS
	tcase_add_loop_test(t, no_memory_after_start, 0, 2);
#endif
	tcase_add_test(t, refusals_change_nothing);
	tcase_add_test(t, context_is_kept);
	suite_add_tcase(s, t);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed != 0;
}
