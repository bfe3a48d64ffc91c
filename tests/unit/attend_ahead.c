// SPDX-License-Identifier: MIT
/*
 * Looking ahead, over raw planes as llama.cpp's plug-in has them: once the order
 * of layers is known, the next layer's first blocks are read while one is
 * attended to, before anybody asks for them; and the bits are the same.
 */
#include <check.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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

/* Blocks that the call, and what it looked ahead for, found to be elsewhere; and reads that were started for it. */
static uint64_t attend(struct rig *r, uint32_t layer, uint64_t *reads)
{
	struct kvt_stats before = KVT_INIT(before), after = KVT_INIT(after), still = KVT_INIT(still);
	struct kvt_host_calls calls, more;
	struct kvt_attn a = KVT_INIT(a);
	struct kvt_attn_mask m = KVT_INIT(m);

	kvt_cache_stats(r->cache, &before);
	kvt_host_fault_calls(r->host, &calls);
	a.k_plane = 2 * layer;
	a.v_plane = 2 * layer + 1;
	a.n_heads = 1;
	m.n = 1;
	m.n_rows = ROWS;
	m.q = r->q;
	m.out = r->out[layer];
	ck_assert_msg(!kvt_attend_mask(r->cache, &a, &m), "%s", kvt_last_error());
	do { /* until what is under way has come */
		kvt_cache_stats(r->cache, &after);
		usleep(20000);
		kvt_cache_stats(r->cache, &still);
	} while (still.disk_reads != after.disk_reads);
	kvt_host_fault_calls(r->host, &more);
	*reads = more.transfers - calls.transfers;
	return after.misses - before.misses;
}

START_TEST(the_next_layer_is_on_its_way)
{
	static struct rig r, all;
	uint64_t reads, cold, warm, blocks = 2 * ROWS * DIM * 2 / BLOCK;

	rig_open(&all, 8 * blocks, false);
	rig_open(&r, FRAMES, true);
	for (uint32_t layer = 0; layer < LAYERS; layer++)
		attend(&all, layer, &reads);
	for (int round = 0; round < 3; round++)
		for (uint32_t layer = 0; layer < LAYERS; layer++) {
			attend(&r, layer, &reads);
			ck_assert(!memcmp(r.out[layer], all.out[layer], sizeof(r.out[layer])));
		}
	cold = attend(&r, 1, &reads); /* out of turn: layer 0 was looked ahead for */
	for (int round = 0; round < 2; round++)
		for (uint32_t layer = 0; layer < LAYERS; layer++)
			attend(&r, layer, &reads);
	attend(&r, 0, &reads);
	ck_assert_uint_ge(reads, blocks);
	warm = attend(&r, 1, &reads); /* in turn */
	ck_assert_msg(warm + GROUP / 2 <= cold, "%llu blocks were missing, %llu when nothing was known", (unsigned long long)warm,
		      (unsigned long long)cold);
	ck_assert(!memcmp(r.out, all.out, sizeof(r.out)));
	rig_close(&r);
	rig_close(&all);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("attend_ahead");
	TCase *tc = tcase_create("attend_ahead");
	SRunner *r;
	int failed;

	tcase_add_test(tc, the_next_layer_is_on_its_way);
	suite_add_tcase(s, tc);
	r = srunner_create(s);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed ? 1 : 0;
}
