// SPDX-License-Identifier: MIT
/*
 * Policies in a whole cache: attention gives the same bits whichever is chosen,
 * in memory that holds a part of the rows, and reads from disk about what does not fit.
 */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvtier.h"
#include "lib/rounds.h"

#define HEADS 2
#define DIM 64
#define ROW (HEADS * DIM)
#define LAYERS 6
#define STEPS 24
#define TOKENS_MAX 2048

static uint32_t tokens;

static float number(uint32_t seed)
{
	seed = (seed ^ seed >> 16) * 0x45d9f3bu;
	return (float)(int32_t)(seed ^ seed >> 16) * 0x1p-31f;
}

static void write_token(struct kvt_seq *seq, uint32_t at, uint32_t n, uint32_t layer)
{
	static float data[TOKENS_MAX * ROW];
	struct kvt_rows rows = { .data = data, .type = KVT_F32 };

	for (uint32_t v = 0; v < 2; v++) {
		for (uint32_t i = 0; i < n * ROW; i++)
			data[i] = number((at * ROW + i) * 100 + layer * 2 + v);
		ck_assert_msg(!kvt_seq_write(seq, layer * 2 + v, at, n, &rows), "%s", kvt_last_error());
	}
}

/* Decode STEPS tokens. @ram: 0: all of it. Returns blocks read from disk a step, over the last half of them. */
static double decode(uint32_t policy, uint64_t ram, float *out)
{
	struct kvt_plane_params planes[2 * LAYERS];
	struct kvt_cache_params p = {
		.size = sizeof(p), .ram_bytes = ram ? ram : 64 << 20, .disk_bytes = 32 << 20, .block_bytes = 4096,
		.planes = planes, .n_planes = 2 * LAYERS, .threads = 1, .max_seqs = 1, .max_tokens = tokens + STEPS,
		.max_query_rows = 1, .policy = policy,
	};
	struct kvt_attn attn = { .size = sizeof(attn), .flags = KVT_ATTN_CAUSAL, .n_heads = HEADS };
	struct kvt_stats half = KVT_INIT(half), end = KVT_INIT(end);
	float q[ROW];
	struct kvt_attn_item item = { .n = 1, .q = q };
	struct kvt_cache *cache;

	for (uint32_t i = 0; i < 2 * LAYERS; i++)
		planes[i] = (struct kvt_plane_params){ .size = sizeof(planes[i]), .codec = KVT_F16, .heads = HEADS,
						       .head_dim = DIM, .layer = i / 2 };
	ck_assert_msg(!kvt_cache_create(&p, &cache), "%s", kvt_last_error());
	ck_assert(!kvt_seq_create(cache, &item.seq));
	ck_assert(!kvt_seq_append(item.seq, NULL, tokens));
	for (uint32_t layer = 0; layer < LAYERS; layer++)
		write_token(item.seq, 0, tokens, layer);
	for (uint32_t s = 0; s < STEPS; s++) {
		if (s == STEPS / 2)
			ck_assert(!kvt_cache_stats(cache, &half));
		ck_assert(!kvt_seq_append(item.seq, NULL, 1));
		item.first = tokens + s;
		for (uint32_t layer = 0; layer < LAYERS; layer++) {
			write_token(item.seq, tokens + s, 1, layer);
			for (uint32_t i = 0; i < ROW; i++)
				q[i] = number(s * 1000 + layer * 10 + i);
			attn.k_plane = layer * 2;
			attn.v_plane = layer * 2 + 1;
			item.out = out + (s * LAYERS + layer) * ROW;
			ck_assert_msg(!kvt_attend(cache, &attn, &item, 1), "%s", kvt_last_error());
		}
	}
	ck_assert(!kvt_cache_stats(cache, &end));
	kvt_cache_destroy(cache);
	return (double)(end.disk_reads - half.disk_reads) / (STEPS - STEPS / 2);
}

static float want[STEPS * LAYERS * ROW], got[STEPS * LAYERS * ROW];

START_TEST(bits_do_not_depend_on_the_policy)
{
	struct kvt_plane_params plane = { .size = sizeof(plane), .codec = KVT_F16, .heads = HEADS, .head_dim = DIM };
	struct kvt_cache_params p = {
		.size = sizeof(p), .disk_bytes = 32 << 20, .block_bytes = 4096, .planes = &plane, .n_planes = 1, .threads = 1,
		.max_seqs = 1, .max_tokens = tokens + STEPS, .max_query_rows = 1,
	};
	const uint32_t blocks = 2 * LAYERS * (tokens / (4096 / (ROW * 2)) + 1);
	int64_t least;
	double reads, all;

	p.policy = (uint32_t)_i;
	least = kvt_cache_min_ram(&p);
	ck_assert_int_gt(least, 0);
	all = decode((uint32_t)_i, 0, want);
	ck_assert(all == 0);
	reads = decode((uint32_t)_i, (uint64_t)least + blocks / 2 * 4096, got);
	printf("policy %d: %.1f of %u blocks a step\n", _i, reads, blocks);
	ck_assert_mem_eq(want, got, sizeof(want));
	if (_i == KVT_POLICY_AUTO || _i == KVT_POLICY_SCAN)
		ck_assert_msg(reads < 0.6 * blocks, "%.1f of %u blocks", reads, blocks);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("cache_policy");
	TCase *c = tcase_create("cache_policy");
	SRunner *r = srunner_create(s);
	int failed;

	tokens = test_rounds(TOKENS_MAX, 1024, 1024);
	tcase_add_loop_test(c, bits_do_not_depend_on_the_policy, 0, KVT_POLICIES);
	suite_add_tcase(s, c);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed ? 1 : 0;
}
