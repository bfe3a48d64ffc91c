// SPDX-License-Identifier: MIT
/*
 * Latent attention: K and V of one plane, V the first elements of its one head.
 * The same bits as with a V plane of its own, from memory and through disk, for
 * one query and many; other shapes of it are refused.
 */
#include <check.h>
#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "kvtier.h"
#include "lib/rounds.h"

enum { TOKENS = 700, HEADS = 5, V_DIM = 512, K_DIM = 576 };

static float q[TOKENS * HEADS * K_DIM], k[TOKENS * K_DIM], v[TOKENS * V_DIM];
static float one[TOKENS * HEADS * V_DIM], two[TOKENS * HEADS * V_DIM];

static void fill(float *f, size_t n, uint32_t seed)
{
	for (size_t i = 0; i < n; i++) {
		seed = seed * 1664525 + 1013904223;
		f[i] = (float)(int32_t)seed / 1073741824.0f;
	}
}

static struct kvt_cache *make(uint32_t codec, uint32_t heads, bool disk)
{
	struct kvt_plane_params planes[2] = { KVT_INIT(planes[0]), KVT_INIT(planes[1]) };
	struct kvt_cache_params p = KVT_INIT(p);
	struct kvt_cache *c = NULL;
	int64_t least;

	for (int i = 0; i < 2; i++) {
		planes[i].codec = codec;
		planes[i].heads = heads;
		planes[i].head_dim = (i ? V_DIM : K_DIM) / heads;
	}
	p.planes = planes;
	p.n_planes = 2;
	p.threads = 2;
	p.block_bytes = 65536;
	p.max_seqs = 1;
	p.max_tokens = TOKENS;
	p.max_query_rows = 64;
	p.max_query_heads = HEADS;
	p.disk_bytes = disk ? 16 << 20 : 0;
	least = kvt_cache_min_ram(&p);
	ck_assert_msg(least > 0, "%s", kvt_last_error());
	p.ram_bytes = (uint64_t)least + (disk ? 0 : 16 << 20);
	ck_assert_msg(!kvt_cache_create(&p, &c), "%s", kvt_last_error());
	return c;
}

static struct kvt_seq *write_all(struct kvt_cache *c)
{
	struct kvt_rows rows[2] = { { .data = k, .type = KVT_F32 }, { .data = v, .type = KVT_F32 } };
	struct kvt_seq *seq;

	ck_assert_int_eq(kvt_seq_create(c, &seq), 0);
	ck_assert_int_eq(kvt_seq_append(seq, NULL, TOKENS), 0);
	for (uint32_t i = 0; i < 2; i++)
		ck_assert_msg(!kvt_seq_write(seq, i, 0, TOKENS, &rows[i]), "%s", kvt_last_error());
	return seq;
}

START_TEST(as_with_two_planes)
{
	static const uint32_t codecs[] = { KVT_F32, KVT_F16, KVT_Q8_0 };
	struct kvt_cache *c = make(codecs[_i % 3], 1, _i / 3);
	struct kvt_attn a = KVT_INIT(a);
	const uint32_t n = test_rounds(TOKENS, TOKENS / 4, 4), first = TOKENS - n;
	struct kvt_attn_item item = { .first = first, .n = n, .q = q + first * HEADS * K_DIM, .out = one };
	struct kvt_stats st = KVT_INIT(st);

	fill(q, TOKENS * HEADS * K_DIM, 1);
	fill(k, TOKENS * K_DIM, 2);
	for (int t = 0; t < TOKENS; t++)
		memcpy(v + t * V_DIM, k + t * K_DIM, V_DIM * sizeof(float));
	item.seq = write_all(c);
	a.n_heads = HEADS;
	a.flags = KVT_ATTN_CAUSAL;
	a.v_plane = 1;
	ck_assert_msg(!kvt_attend(c, &a, &item, 1), "%s", kvt_last_error());
	a.v_plane = 0;
	a.v_dim = V_DIM;
	item.out = two;
	ck_assert_msg(!kvt_attend(c, &a, &item, 1), "%s", kvt_last_error());
	ck_assert_msg(!memcmp(one, two, n * HEADS * V_DIM * sizeof(float)), "codec %u", codecs[_i % 3]);
	item.first = TOKENS - 1; /* decoding */
	item.n = 1;
	item.q = q + (TOKENS - 1) * HEADS * K_DIM;
	ck_assert_msg(!kvt_attend(c, &a, &item, 1), "%s", kvt_last_error());
	ck_assert(!memcmp(one + (n - 1) * HEADS * V_DIM, two, HEADS * V_DIM * sizeof(float)));
	kvt_cache_stats(c, &st);
	ck_assert(_i < 3 ? !st.disk_reads : st.disk_reads > (n < TOKENS ? 0 : 10));
	kvt_cache_destroy(c);
}
END_TEST

START_TEST(refuses)
{
	struct kvt_cache *c = make(KVT_F16, 1, false), *two_heads = make(KVT_F16, 2, false);
	struct kvt_attn a = KVT_INIT(a);
	struct kvt_attn_item item = { .n = 1, .q = q, .out = one };

	item.seq = write_all(c);
	a.n_heads = HEADS;
	a.v_dim = K_DIM + 1;
	ck_assert_int_eq(kvt_attend(c, &a, &item, 1), -EINVAL);
	a.v_dim = 7;
	ck_assert_int_eq(kvt_attend(c, &a, &item, 1), -EINVAL);
	a.v_dim = V_DIM;
	a.out_stride = HEADS * V_DIM - 1;
	ck_assert_int_eq(kvt_attend(c, &a, &item, 1), -EINVAL);
	a.out_stride = 0;
	a.family = 2;
	ck_assert_int_eq(kvt_attend(c, &a, &item, 1), -EINVAL);
	a.family = KVT_ATTN_EXACT;
	ck_assert_int_eq(kvt_attend(c, &a, &item, 1), 0);
	item.seq = write_all(two_heads);
	a.n_heads = 4;
	a.v_dim = K_DIM / 2 - 8;
	ck_assert_int_eq(kvt_attend(two_heads, &a, &item, 1), -EINVAL);
	kvt_cache_destroy(c);
	kvt_cache_destroy(two_heads);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("attend_latent");
	TCase *tc = tcase_create("attend_latent");
	SRunner *r;
	int failed;

	tcase_add_loop_test(tc, as_with_two_planes, 0, 6);
	tcase_add_test(tc, refuses);
	suite_add_tcase(s, tc);
	r = srunner_create(s);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed ? 1 : 0;
}
