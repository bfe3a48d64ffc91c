// SPDX-License-Identifier: MIT
/*
 * Attention's bits are a function of what it sees alone: the same random
 * sequence through caches of every budget, block size, thread count, I/O path,
 * chunking and tier gives the same bytes; and so do a fork, and a raw plane
 * under a mask that says the same.
 */
#include <check.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvtier.h"
#include "lib/rounds.h"
#include "lib/store_model.h"

#define TOKENS 600

struct geometry {
	const char *name;
	uint32_t heads, kv_heads, k_dim, v_dim, codec;
};

static const struct geometry geometries[] = {
	{ "8/2 x 64 f16", 8, 2, 64, 64, KVT_F16 },    { "14/2 x 64 f16", 14, 2, 64, 64, KVT_F16 },
	{ "MHA 4 x 80 bf16", 4, 4, 80, 80, KVT_BF16 }, { "MQA 6/1 x 128 f32", 6, 1, 128, 128, KVT_F32 },
	{ "2/1 x 256 f16", 2, 1, 256, 256, KVT_F16 },  { "8/4 x 8 f32", 8, 4, 8, 8, KVT_F32 },
	{ "K 96, V 40, bf16", 4, 2, 96, 40, KVT_BF16 }, { "8/2 x 64 q8_0", 8, 2, 64, 64, KVT_Q8_0 },
	{ "K 96, V 32, 6/3 q4_0", 6, 3, 96, 32, KVT_Q4_0 },
};

struct setting {
	uint64_t gpu, pinned, disk;
	uint32_t ram_frames; /* beyond the least; 0: everything in RAM */
	uint32_t block, threads, chunk, io;
	uint32_t query_rows;
};

static const struct setting settings[] = {
	{ .block = 65536, .threads = 1, .chunk = TOKENS },
	{ .block = 4096, .threads = 2, .chunk = 1 },
	{ .block = 65536, .threads = 3, .chunk = 7, .disk = 64 << 20, .ram_frames = 1 },
	{ .block = 4096, .threads = 7, .chunk = 64, .disk = 64 << 20, .ram_frames = 3 },
	{ .block = 1 << 20, .threads = 2, .chunk = 512, .disk = 64 << 20, .ram_frames = 1 },
	{ .block = 8192, .threads = 2, .chunk = 333, .disk = 64 << 20, .ram_frames = 8, .io = KVT_IO_THREADS },
	{ .block = 16384, .threads = 1, .chunk = 64, .disk = 64 << 20, .ram_frames = 2, .pinned = 8 * 16384 },
	{ .block = 65536, .threads = 2, .chunk = 64, .disk = 64 << 20, .ram_frames = 2, .gpu = 1 << 20 },
	{ .block = 4096, .threads = 2, .chunk = TOKENS, .query_rows = 5 },
	{ .block = 4096, .threads = 2, .chunk = 200, .disk = 64 << 20, .ram_frames = 1, .gpu = 4 << 20 },
};

static float *random_floats(uint64_t seed, size_t n)
{
	float *f = malloc(n * sizeof(*f));

	for (size_t i = 0; i < n; i++)
		f[i] = (float)((double)(model_random(&seed) >> 11) / (1ull << 53) * 4 - 2);
	return f;
}

static struct kvt_cache *make_cache(const struct geometry *g, const struct setting *s, uint64_t raw_rows)
{
	struct kvt_plane_params planes[2] = { KVT_INIT(planes[0]), KVT_INIT(planes[1]) };
	struct kvt_cache_params p = KVT_INIT(p);
	struct kvt_cache *cache;
	int64_t least;

	for (int i = 0; i < 2; i++) {
		planes[i].codec = g->codec;
		planes[i].heads = g->kv_heads;
		planes[i].head_dim = i ? g->v_dim : g->k_dim;
		planes[i].rows = raw_rows;
	}
	p.planes = planes;
	p.n_planes = 2;
	p.block_bytes = s->block;
	p.threads = s->threads;
	p.max_seqs = 3;
	p.max_tokens = TOKENS + 64;
	p.max_query_rows = s->query_rows ? s->query_rows : 128;
	p.gpu_bytes = g->codec < KVT_Q8_0 ? s->gpu : 0; /* the gpu tier has no such planes */
	p.pinned_bytes = s->pinned;
	p.disk_bytes = s->disk;
	p.io = s->io;
	least = kvt_cache_min_ram(&p);
	ck_assert_msg(least > 0, "%s", kvt_last_error());
	/* bookkeeping for a few more frames is less than a block */
	p.ram_bytes = s->ram_frames ? (uint64_t)least + s->ram_frames * (s->block + 4096ull) : (uint64_t)least + (32 << 20);
	ck_assert_msg(!kvt_cache_create(&p, &cache), "%s: %s", g->name, kvt_last_error());
	return cache;
}

struct inputs {
	float *q, *k, *v, *sinks, *slopes;
};

static void run(struct kvt_cache *cache, const struct geometry *g, const struct inputs *in, struct kvt_seq *seq,
		const struct kvt_attn *attn, uint32_t from, uint32_t chunk, float *out)
{
	for (uint32_t t = from, n; t < TOKENS; t += n) {
		struct kvt_rows k = { .data = in->k + (size_t)t * g->kv_heads * g->k_dim, .type = KVT_F32 };
		struct kvt_rows v = { .data = in->v + (size_t)t * g->kv_heads * g->v_dim, .type = KVT_F32 };
		struct kvt_attn_item item = { .seq = seq, .first = t, .q = in->q + (size_t)t * g->heads * g->k_dim,
					      .out = out + (size_t)t * g->heads * g->v_dim };

		n = TOKENS - t < chunk ? TOKENS - t : chunk;
		item.n = n;
		ck_assert_msg(!kvt_seq_append(seq, NULL, n), "%s", kvt_last_error());
		ck_assert_msg(!kvt_seq_write(seq, 0, t, n, &k), "%s", kvt_last_error());
		ck_assert_msg(!kvt_seq_write(seq, 1, t, n, &v), "%s", kvt_last_error());
		ck_assert_msg(!kvt_attend(cache, attn, &item, 1), "%s", kvt_last_error());
	}
}

static void compare(const float *a, const float *b, size_t n, const char *what, const char *name, int setting)
{
	for (size_t i = memcmp(a, b, n * sizeof(float)) ? 0 : n; i < n; i++)
		if (memcmp(&a[i], &b[i], sizeof(float)))
			ck_abort_msg("%s, %s, setting %d: element %zu is %a, not %a", what, name, setting, i, (double)b[i],
				     (double)a[i]);
}

static struct inputs make_inputs(const struct geometry *g, uint64_t seed)
{
	return (struct inputs){
		.q = random_floats(seed, (size_t)TOKENS * g->heads * g->k_dim),
		.k = random_floats(seed + 1, (size_t)TOKENS * g->kv_heads * g->k_dim),
		.v = random_floats(seed + 2, (size_t)TOKENS * g->kv_heads * g->v_dim),
		.sinks = random_floats(seed + 3, g->heads),
		.slopes = random_floats(seed + 4, g->heads),
	};
}

static void free_inputs(struct inputs *in)
{
	free(in->q);
	free(in->k);
	free(in->v);
	free(in->sinks);
	free(in->slopes);
}

static struct kvt_attn attn_of(int kind, const struct inputs *in)
{
	struct kvt_attn a = KVT_INIT(a);

	a.flags = KVT_ATTN_CAUSAL;
	a.v_plane = 1;
	if (kind == 1) {
		a.window = 100;
		a.sinks = in->sinks;
	} else if (kind == 2) {
		a.alibi = in->slopes;
		a.softcap = 5;
	}
	return a;
}

START_TEST(same_bits_whatever_the_setting)
{
	const struct geometry *g = &geometries[_i];
	struct inputs in = make_inputs(g, 7 + (uint64_t)_i);
	size_t n = (size_t)TOKENS * g->heads * g->v_dim;
	float *want = malloc(n * sizeof(float)), *out = malloc(n * sizeof(float));

	/* a bias is the same to the threads */
	for (int kind = 0; kind < (int)test_rounds(3, 3, 1); kind++) {
		struct kvt_attn attn = attn_of(kind, &in);

		attn.n_heads = g->heads;
		for (size_t s = 0; s < sizeof(settings) / sizeof(settings[0]); s++) {
			struct kvt_cache *cache;
			struct kvt_stats st = KVT_INIT(st);
			struct kvt_seq *seq, *fork;

			if (kind && s % 3) /* windows, sinks and biases take the same ways */
				continue;
			cache = make_cache(g, &settings[s], 0);
			memset(out, 0xee, n * sizeof(float));
			ck_assert(!kvt_seq_create(cache, &seq));
			run(cache, g, &in, seq, &attn, 0, settings[s].chunk, out);
			if (!s)
				memcpy(want, out, n * sizeof(float));
			compare(want, out, n, "sequence", g->name, (int)s);

			/* a fork in the middle of a block, computed again from there */
			ck_assert(!kvt_seq_fork(seq, TOKENS / 2 + 3, &fork));
			run(cache, g, &in, fork, &attn, TOKENS / 2 + 3, 61, out);
			compare(want, out, n, "fork", g->name, (int)s);
			ck_assert(!kvt_cache_stats(cache, &st));
			for (int t = 0; t < KVT_TIERS; t++)
				ck_assert(st.tier[t].peak <= st.tier[t].budget);
			ck_assert(!st.digest_errors && !st.io_errors && !st.blocks_lost);
			if (s == 3 && _i == 3) /* twice as many blocks as frames: they have been to the disk and back */
				ck_assert(st.disk_reads && st.disk_writes);
			kvt_seq_free(fork);
			kvt_cache_destroy(cache);
		}
	}
	free(want);
	free(out);
	free_inputs(&in);
}
END_TEST

/* Raw planes filled in a scrambled order of writes; the mask says what the causal flag said. */
START_TEST(a_mask_gives_the_bits_of_causal)
{
	const struct geometry *g = &geometries[_i];
	struct inputs in = make_inputs(g, 77 + (uint64_t)_i);
	size_t n = (size_t)TOKENS * g->heads * g->v_dim;
	float *want = malloc(n * sizeof(float)), *out = malloc(n * sizeof(float));
	float *mask = malloc(sizeof(float) * TOKENS * TOKENS);
	struct kvt_attn attn = KVT_INIT(attn);
	struct kvt_attn_mask m = KVT_INIT(m);
	struct kvt_cache *cache = make_cache(g, &settings[0], 0);
	struct kvt_seq *seq;

	attn.flags = KVT_ATTN_CAUSAL;
	attn.v_plane = 1;
	attn.n_heads = g->heads;
	ck_assert(!kvt_seq_create(cache, &seq));
	run(cache, g, &in, seq, &attn, 0, TOKENS, want);
	kvt_cache_destroy(cache);

	attn.flags = 0;
	for (uint32_t i = 0; i < TOKENS; i++)
		for (uint32_t j = 0; j < TOKENS; j++)
			mask[i * TOKENS + j] = j <= i ? 0 : -INFINITY;
	for (size_t s = 2; s < 6; s++) {
		cache = make_cache(g, &settings[s], TOKENS + 9);
		for (uint32_t i = 0; i < TOKENS; i++) {
			uint64_t row = (i * 37ull) % TOKENS; /* 37 and 600 share no factor */
			struct kvt_rows k = { .data = in.k + row * g->kv_heads * g->k_dim, .type = KVT_F32 };
			struct kvt_rows v = { .data = in.v + row * g->kv_heads * g->v_dim, .type = KVT_F32 };

			ck_assert_msg(!kvt_plane_write(cache, 0, &row, 1, &k), "%s", kvt_last_error());
			ck_assert_msg(!kvt_plane_write(cache, 1, &row, 1, &v), "%s", kvt_last_error());
		}
		m.n = m.n_rows = m.mask_stride = TOKENS;
		m.mask = mask;
		m.q = in.q;
		m.out = out;
		ck_assert_msg(!kvt_attend_mask(cache, &attn, &m), "%s", kvt_last_error());
		compare(want, out, n, "mask", g->name, (int)s);
		kvt_cache_destroy(cache);
	}
	free(mask);
	free(want);
	free(out);
	free_inputs(&in);
}
END_TEST

/* Queries as a part of wider rows, as the product with W_qkv leaves them; and nothing is written between outputs. */
START_TEST(strides_change_no_bit)
{
	const struct geometry *g = &geometries[_i];
	const size_t q_row = (size_t)g->heads * g->k_dim, out_row = (size_t)g->heads * g->v_dim, q_gap = 7, out_gap = 13;
	struct inputs in = make_inputs(g, 177 + (uint64_t)_i);
	float *want = malloc(TOKENS * out_row * sizeof(float)), *q = calloc(TOKENS * (q_row + q_gap), sizeof(float));
	float *out = malloc(TOKENS * (out_row + out_gap) * sizeof(float));
	float *mask = calloc((size_t)TOKENS * TOKENS, sizeof(float));
	struct kvt_cache *cache = make_cache(g, &settings[0], 0);
	struct kvt_attn attn = attn_of(0, &in);
	struct kvt_attn_item item = { .n = TOKENS, .q = q, .out = out };
	struct kvt_attn_mask m = KVT_INIT(m);
	struct kvt_seq *seq;

	attn.n_heads = g->heads;
	ck_assert(!kvt_seq_create(cache, &seq));
	run(cache, g, &in, seq, &attn, 0, TOKENS, want);
	for (size_t t = 0; t < TOKENS; t++)
		memcpy(q + t * (q_row + q_gap), in.q + t * q_row, q_row * sizeof(float));
	memset(out, 0xee, TOKENS * (out_row + out_gap) * sizeof(float));
	item.seq = seq;
	attn.q_stride = q_row + q_gap;
	attn.out_stride = out_row + out_gap;
	ck_assert_msg(!kvt_attend(cache, &attn, &item, 1), "%s", kvt_last_error());
	for (size_t t = 0; t < TOKENS; t++) {
		const float *row = out + t * (out_row + out_gap);
		uint8_t gap[13 * sizeof(float)];

		compare(want + t * out_row, row, out_row, "strided", g->name, (int)t);
		memset(gap, 0xee, sizeof(gap));
		ck_assert_mem_eq(row + out_row, gap, sizeof(gap));
	}
	attn.q_stride = q_row - 1;
	ck_assert_int_eq(kvt_attend(cache, &attn, &item, 1), -EINVAL);
	attn.q_stride = 0;
	attn.out_stride = out_row - 1;
	ck_assert_int_eq(kvt_attend(cache, &attn, &item, 1), -EINVAL);
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "out_stride"));
	kvt_cache_destroy(cache);

	/* a mask over raw planes: the strided call against the plain one */
	cache = make_cache(g, &settings[0], TOKENS);
	for (uint64_t t = 0; t < TOKENS; t++) {
		struct kvt_rows k = { .data = in.k + t * g->kv_heads * g->k_dim, .type = KVT_F32 };
		struct kvt_rows v = { .data = in.v + t * g->kv_heads * g->v_dim, .type = KVT_F32 };

		ck_assert(!kvt_plane_write(cache, 0, &t, 1, &k) && !kvt_plane_write(cache, 1, &t, 1, &v));
	}
	attn.flags = 0;
	attn.out_stride = 0;
	m.n = m.n_rows = m.mask_stride = TOKENS;
	m.mask = mask;
	m.q = in.q;
	m.out = want;
	ck_assert_msg(!kvt_attend_mask(cache, &attn, &m), "%s", kvt_last_error());
	attn.q_stride = q_row + q_gap;
	attn.out_stride = out_row + out_gap;
	m.q = q;
	m.out = out;
	ck_assert_msg(!kvt_attend_mask(cache, &attn, &m), "%s", kvt_last_error());
	for (size_t t = 0; t < TOKENS; t++)
		compare(want + t * out_row, out + t * (out_row + out_gap), out_row, "strided mask", g->name, (int)t);
	kvt_cache_destroy(cache);
	free(mask);
	free(want);
	free(out);
	free(q);
	free_inputs(&in);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("attend");
	TCase *t = tcase_create("bits");
	/* under a sanitizer one, for the others take the same paths: for the threads the smallest */
	int n = sizeof(geometries) / sizeof(geometries[0]), first = (int)test_rounds(0, 0, 5), failed;
	SRunner *r = srunner_create(s);

	n = (int)test_rounds((uint32_t)n, 1, 6);
	tcase_set_timeout(t, 600);
	tcase_add_loop_test(t, same_bits_whatever_the_setting, first, n);
	tcase_add_loop_test(t, a_mask_gives_the_bits_of_causal, first, n);
	tcase_add_loop_test(t, strides_change_no_bit, first, n);
	suite_add_tcase(s, t);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
