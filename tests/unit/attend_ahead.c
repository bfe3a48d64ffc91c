// SPDX-License-Identifier: MIT
/*
 * Looking ahead, over raw planes as llama.cpp's plug-in has them and over
 * sequences: what a pass needs next, and once the order of layers is known what
 * the next layer needs first, is read before anybody asks for it. A wrong guess
 * costs what it read; the bits are the same.
 */
#include <check.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/err.h"
#include "cache/cache.h"
#include "lib/host_fault.h"

enum { LAYERS = 3, ROWS = 4096, DIM = 32, BLOCK = 4096, FRAMES = 48, GROUP = 2 * KVT_SPLIT * DIM * 2 / BLOCK };

struct rig {
	struct kvt_budget budget;
	struct kvt_host *host;
	struct kvt_cache *cache;
	float q[DIM], out[LAYERS][DIM];
};

static void rig_open(struct rig *r, uint64_t extra_frames, bool disk)
{
	struct kvt_plane_params planes[2 * LAYERS];
	struct kvt_host_params host = { .depth = 64, .frame_bytes = BLOCK, .budget = &r->budget };
	struct kvt_cache_params p = KVT_INIT(p);
	static float data[ROWS][DIM];
	static uint64_t index[ROWS];
	struct kvt_host *inner;
	int64_t least;

	r->budget.limit = 1 << 30;
	memset(planes, 0, sizeof(planes));
	for (int i = 0; i < 2 * LAYERS; i++) {
		planes[i].size = sizeof(planes[i]);
		planes[i].codec = KVT_F16;
		planes[i].heads = 1;
		planes[i].head_dim = DIM;
		planes[i].rows = ROWS;
	}
	p.planes = planes;
	p.n_planes = 2 * LAYERS;
	p.threads = 1;
	p.block_bytes = BLOCK;
	p.max_seqs = p.max_tokens = 1;
	p.max_query_rows = 4;
	p.disk_bytes = disk ? 16 << 20 : 0;
	p.policy = KVT_POLICY_LRU; /* nothing stays from one round to the next */
	least = kvt_cache_min_ram(&p);
	ck_assert_msg(least > 0, "%s", kvt_last_error());
	p.ram_bytes = (uint64_t)least + extra_frames * (BLOCK + 1024);
	ck_assert_msg(!kvt_host_open(&host, &inner), "%s", kvt_last_error());
	ck_assert_msg(!kvt_host_fault_open(inner, &(struct kvt_fault){ .kind = KVT_FAULT_NONE }, &r->host), "%s", kvt_last_error());
	ck_assert_msg(!kvt_cache_create_on(&p, r->host, NULL, &r->cache), "%s", kvt_last_error());
	for (int i = 0; i < 2 * LAYERS; i++) {
		struct kvt_rows rows = { .data = data, .type = KVT_F32 };

		for (int j = 0; j < ROWS; j++) {
			index[j] = (uint64_t)j;
			for (int d = 0; d < DIM; d++)
				data[j][d] = (float)((i * 31 + j * 7 + d * 3) % 64) / 64 - 0.5f;
		}
		ck_assert_msg(!kvt_plane_write(r->cache, (uint32_t)i, index, ROWS, &rows), "%s", kvt_last_error());
	}
	for (int d = 0; d < DIM; d++)
		r->q[d] = (float)(d % 5) - 2;
}

static void rig_close(struct rig *r)
{
	kvt_cache_destroy(r->cache);
	kvt_host_close(r->host);
}

static struct kvt_stats stats(struct rig *r)
{
	struct kvt_stats st = KVT_INIT(st), still = KVT_INIT(still);

	do { /* until what is under way has come */
		kvt_cache_stats(r->cache, &still);
		usleep(20000);
		kvt_cache_stats(r->cache, &st);
	} while (still.disk_reads != st.disk_reads);
	ck_assert_msg(!kvt_store_check(r->cache->store), "%s", kvt_last_error());
	return st;
}

static void attend(struct rig *r, uint32_t layer)
{
	struct kvt_attn a = KVT_INIT(a);
	struct kvt_attn_mask m = KVT_INIT(m);

	a.k_plane = 2 * layer;
	a.v_plane = 2 * layer + 1;
	a.n_heads = 1;
	m.n = 1;
	m.n_rows = ROWS;
	m.q = r->q;
	m.out = r->out[layer];
	ck_assert_msg(!kvt_attend_mask(r->cache, &a, &m), "%s", kvt_last_error());
}

/* Of the layer's first group, the blocks that are in memory. */
static uint32_t first_blocks(struct rig *r, uint32_t layer)
{
	stats(r);
	return kvt_store_count(r->cache->store, r->cache->planes[2 * layer].table, GROUP / 2, KVT_TIER_RAM) +
	       kvt_store_count(r->cache->store, r->cache->planes[2 * layer + 1].table, GROUP / 2, KVT_TIER_RAM);
}

START_TEST(the_next_layer_is_on_its_way)
{
	struct kvt_stats before, st;
	static struct rig r, all;
	uint64_t blocks = 2 * ROWS * DIM * 2 / BLOCK;

	rig_open(&all, 8 * blocks, false);
	rig_open(&r, FRAMES, true);
	for (uint32_t layer = 0; layer < LAYERS; layer++)
		attend(&all, layer);
	for (uint32_t layer = 0; layer < LAYERS; layer++)
		attend(&r, layer);
	ck_assert_uint_eq(first_blocks(&r, 0), 0); /* nobody knows yet what follows the last layer */
	for (int round = 0; round < 3; round++)
		for (uint32_t layer = 0; layer < LAYERS; layer++) {
			attend(&r, layer);
			ck_assert(!memcmp(r.out[layer], all.out[layer], sizeof(r.out[layer])));
			if (round)
				ck_assert_uint_eq(first_blocks(&r, (layer + 1) % LAYERS), GROUP);
		}
	before = stats(&r);
	for (uint32_t layer = 0; layer < LAYERS; layer++)
		attend(&r, layer);
	st = stats(&r);
	ck_assert_uint_le(st.disk_reads - before.disk_reads, LAYERS * blocks + FRAMES); /* none twice, but layer 0 begun anew */
	ck_assert_uint_ge(st.prefetch_used - before.prefetch_used, LAYERS * blocks / 2);
	ck_assert_uint_eq(st.prefetch_wasted, before.prefetch_wasted);
	attend(&r, 1); /* out of turn: layer 0 was looked ahead for */
	st = stats(&r);
	ck_assert_uint_ge(st.prefetch_wasted - before.prefetch_wasted, GROUP);
	ck_assert_uint_eq(first_blocks(&r, 0), 0);
	ck_assert_uint_eq(first_blocks(&r, 2), 0); /* and the next guess may be as wrong, */
	attend(&r, 2);
	ck_assert_uint_eq(first_blocks(&r, 1), GROUP); /* but was not; it is 1 that followed last time */
	ck_assert(!memcmp(r.out, all.out, sizeof(r.out)));
	rig_close(&r);
	rig_close(&all);
}
END_TEST

/* Several sequences in a call: each is followed by the next one, the last by the first one's next layer. */
START_TEST(the_next_sequence_is_on_its_way)
{
	struct kvt_plane_params planes[2 * LAYERS];
	struct kvt_cache_params p = KVT_INIT(p);
	static float data[ROWS / 2 * DIM], out[2][DIM];
	struct kvt_rows rows = { .data = data, .type = KVT_F32 };
	struct kvt_attn_item items[2];
	struct kvt_stats before = { 0 };
	struct rig r = { 0 };
	int64_t least;

	memset(planes, 0, sizeof(planes));
	for (int i = 0; i < 2 * LAYERS; i++)
		planes[i] = (struct kvt_plane_params){ .size = sizeof(planes[i]), .codec = KVT_F16, .heads = 1, .head_dim = DIM,
						       .layer = (uint32_t)i / 2 };
	p.planes = planes;
	p.n_planes = 2 * LAYERS;
	p.threads = 1;
	p.block_bytes = BLOCK;
	p.max_seqs = 2;
	p.max_tokens = ROWS / 2;
	p.max_query_rows = 4;
	p.disk_bytes = 16 << 20;
	p.policy = KVT_POLICY_LRU;
	least = kvt_cache_min_ram(&p);
	ck_assert_msg(least > 0, "%s", kvt_last_error());
	p.ram_bytes = (uint64_t)least + FRAMES * (BLOCK + 1024);
	ck_assert_msg(!kvt_cache_create(&p, &r.cache), "%s", kvt_last_error());
	for (int i = 0; i < 2; i++) {
		struct kvt_seq *seq;

		ck_assert_msg(!kvt_seq_create(r.cache, &seq), "%s", kvt_last_error());
		ck_assert_msg(!kvt_seq_append(seq, NULL, ROWS / 2), "%s", kvt_last_error());
		for (uint32_t plane = 0; plane < 2 * LAYERS; plane++)
			ck_assert_msg(!kvt_seq_write(seq, plane, 0, ROWS / 2, &rows), "%s", kvt_last_error());
		items[i] = (struct kvt_attn_item){ .seq = seq, .first = ROWS / 2 - 1, .n = 1, .q = r.q, .out = out[i] };
	}
	ck_assert_msg(!kvt_cache_flush(r.cache), "%s", kvt_last_error());
	for (int round = 0; round < 3; round++) {
		before = stats(&r);
		for (uint32_t layer = 0; layer < LAYERS; layer++) {
			struct kvt_attn a = KVT_INIT(a);

			a.k_plane = 2 * layer;
			a.v_plane = 2 * layer + 1;
			a.n_heads = 1;
			ck_assert_msg(!kvt_attend(r.cache, &a, items, 2), "%s", kvt_last_error());
		}
	}
	ck_assert_uint_ge(stats(&r).prefetch_used - before.prefetch_used, LAYERS * ROWS * DIM * 2 / BLOCK);
	ck_assert_uint_eq(stats(&r).prefetch_wasted, before.prefetch_wasted);
	kvt_cache_destroy(r.cache);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("attend_ahead");
	TCase *tc = tcase_create("attend_ahead");
	SRunner *r;
	int failed;

	tcase_add_test(tc, the_next_layer_is_on_its_way);
	tcase_add_test(tc, the_next_sequence_is_on_its_way);
	suite_add_tcase(s, tc);
	r = srunner_create(s);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed ? 1 : 0;
}
