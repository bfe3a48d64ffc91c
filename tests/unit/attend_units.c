// SPDX-License-Identifier: MIT
/*
 * Division of attention's work: whichever thread does which splits, however many
 * parts wait to be merged and however wide units are, a row's bits are those of
 * the pass in which each row block takes all splits by itself. Nobody waits for
 * threads of which another's work waits for him.
 */
#include <check.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "kvtier.h"

enum { SPLITS = 70, TOKENS = SPLITS * 256 + 77, DIM = 8, MANY = 33 };

static const uint32_t threads[] = { 2, 7 };
static const struct {
	uint32_t heads, kv_heads;
} shapes[] = { { 4, 2 }, { 14, 2 }, { 40, 5 } }; /* the last: four KV heads in a unit, then one */

static float value(uint64_t i)
{
	return (float)((i * 0x9e3779b97f4a7c15ull >> 40) % 4001) * 0x1p-9f - 4;
}

/* The last @count tokens of MANY, @n in a pass, on @t threads. */
static void decode(int shape, uint32_t t, uint32_t count, uint32_t n, float *out)
{
	const uint32_t heads = shapes[shape].heads, kv_heads = shapes[shape].kv_heads, row = kv_heads * DIM;
	struct kvt_plane_params planes[2] = { KVT_INIT(planes[0]), KVT_INIT(planes[1]) };
	struct kvt_cache_params p = KVT_INIT(p);
	struct kvt_attn attn = KVT_INIT(attn);
	float *q = malloc(MANY * heads * DIM * sizeof(*q)), *data = malloc(256 * row * sizeof(*data));
	struct kvt_cache *cache;
	struct kvt_seq *seq;

	for (int i = 0; i < 2; i++) {
		planes[i].codec = KVT_F16;
		planes[i].heads = kv_heads;
		planes[i].head_dim = DIM;
	}
	p.planes = planes;
	p.n_planes = 2;
	p.threads = t;
	p.max_seqs = 1;
	p.max_tokens = TOKENS;
	p.max_query_rows = n;
	p.max_query_heads = heads;
	p.ram_bytes = 64 << 20;
	ck_assert_msg(!kvt_cache_create(&p, &cache), "%s", kvt_last_error());
	ck_assert_msg(!kvt_seq_create(cache, &seq) && !kvt_seq_append(seq, NULL, TOKENS), "%s", kvt_last_error());
	for (uint32_t at = 0; at < TOKENS; at += 256) {
		uint32_t rows = TOKENS - at < 256 ? TOKENS - at : 256;

		for (uint32_t plane = 0; plane < 2; plane++) {
			struct kvt_rows src = { .data = data, .type = KVT_F32 };

			for (uint32_t i = 0; i < rows * row; i++)
				data[i] = value((uint64_t)at * row + i + plane);
			ck_assert_msg(!kvt_seq_write(seq, plane, at, rows, &src), "%s", kvt_last_error());
		}
	}
	for (uint32_t i = 0; i < MANY * heads * DIM; i++)
		q[i] = value(i + 5000);
	attn.flags = KVT_ATTN_CAUSAL;
	attn.v_plane = 1;
	attn.n_heads = heads;
	for (uint32_t at = MANY - count; at < MANY; at += n) {
		struct kvt_attn_item item = { .seq = seq, .first = TOKENS - MANY + at, .n = MANY - at < n ? MANY - at : n,
					      .q = q + (size_t)at * heads * DIM, .out = out + (size_t)at * heads * DIM };

		ck_assert_msg(!kvt_attend(cache, &attn, &item, 1), "%s", kvt_last_error());
	}
	kvt_cache_destroy(cache);
	free(data);
	free(q);
}

START_TEST(same_bits_however_divided)
{
	static const uint32_t n[] = { 1, 32 }; /* parts of 64 and of 2 splits are kept */
	const size_t bytes = MANY * shapes[_i].heads * DIM * sizeof(float);
	float *whole = malloc(bytes), *out = malloc(bytes);

	decode(_i, 1, MANY, MANY, whole);
	for (size_t t = 0; t < sizeof(threads) / sizeof(threads[0]); t++) {
		for (size_t k = 0; k < sizeof(n) / sizeof(n[0]); k++) {
			uint32_t count = n[k] == 1 ? 3 : n[k];

			memcpy(out, whole, bytes);
			memset((uint8_t *)out + bytes / MANY * (MANY - count), 0xff, bytes / MANY * count);
			decode(_i, threads[t], count, n[k], out);
			ck_assert_msg(!memcmp(out, whole, bytes), "%u threads, %u tokens at once", threads[t], n[k]);
		}
	}
	free(whole);
	free(out);
}
END_TEST

struct both {
	struct kvt_cache *cache;
	struct kvt_seq *seq;
	atomic_bool stop;
	atomic_uint failed;
};

static void attend_once(void *arg, uint32_t i)
{
	struct both *b = arg;
	struct kvt_attn attn = KVT_INIT(attn);
	float q[4 * DIM] = { 1 }, out[4 * DIM];
	struct kvt_attn_item item = { .seq = b->seq, .first = 2999, .n = 1, .q = q, .out = out };

	(void)i;
	attn.v_plane = 1;
	attn.n_heads = 4;
	attn.flags = KVT_ATTN_CAUSAL;
	b->failed += kvt_attend(b->cache, &attn, &item, 1) != 0;
}

static void *attend_on(void *arg)
{
	struct both *b = arg;

	while (!b->stop)
		attend_once(b, 0);
	return NULL;
}

/* One thread attends; another's work on the compute threads does too. */
START_TEST(within_parallel_work)
{
	struct kvt_plane_params planes[2] = { KVT_INIT(planes[0]), KVT_INIT(planes[1]) };
	struct kvt_cache_params p = KVT_INIT(p);
	struct both b = { 0 };
	pthread_t other;

	for (int i = 0; i < 2; i++) {
		planes[i].codec = KVT_F16;
		planes[i].heads = 2;
		planes[i].head_dim = DIM;
	}
	p.planes = planes;
	p.n_planes = 2;
	p.threads = 2;
	p.max_tokens = 3000;
	p.max_query_rows = 1;
	p.max_query_heads = 4;
	p.ram_bytes = 16 << 20;
	ck_assert_msg(!kvt_cache_create(&p, &b.cache), "%s", kvt_last_error());
	ck_assert_msg(!kvt_seq_create(b.cache, &b.seq) && !kvt_seq_append(b.seq, NULL, 3000), "%s", kvt_last_error());
	ck_assert_int_eq(pthread_create(&other, NULL, attend_on, &b), 0);
	for (int i = 0; i < 200; i++)
		kvt_cache_parallel(b.cache, 4, attend_once, &b);
	b.stop = true;
	ck_assert_int_eq(pthread_join(other, NULL), 0);
	ck_assert_uint_eq(b.failed, 0);
	kvt_cache_destroy(b.cache);
}
END_TEST

int main(void)
{
	TCase *tc = tcase_create("bits");
	Suite *s = suite_create("attend_units");
	SRunner *sr;
	int failed;

	tcase_set_timeout(tc, 120);
#ifdef __SANITIZE_THREAD__
	tcase_add_loop_test(tc, same_bits_however_divided, 0, 1); /* the others take minutes */
#else
	tcase_add_loop_test(tc, same_bits_however_divided, 0, sizeof(shapes) / sizeof(shapes[0]));
#endif
	tcase_add_test(tc, within_parallel_work);
	suite_add_tcase(s, tc);
	sr = srunner_create(s);
	srunner_run_all(sr, CK_NORMAL);
	failed = srunner_ntests_failed(sr);
	srunner_free(sr);
	return failed != 0;
}
