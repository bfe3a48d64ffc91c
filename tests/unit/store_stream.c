// SPDX-License-Identifier: MIT
/*
 * Streaming: every step reads all blocks of all layers in the same order, with
 * less memory than that takes. By the store's counters, what is read from disk
 * in a step is what does not fit, within the few frames that the stream itself
 * takes; an LRU reads everything. And the bytes are the right ones.
 */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "lib/host_fault.h"
#include "lib/scratch.h"
#include "store/store.h"

#define ROW 256
#define BLOCK 4096
#define ROWS (BLOCK / ROW)
#define LAYERS 4
#define PER_LAYER 24 /* blocks */
#define ALL (LAYERS * PER_LAYER)
#define FRAMES 40
#define GROUP 4 /* blocks that are borrowed at once; the next such are fetched meanwhile */
#define STEPS 40
#define MEASURED 10 /* the last steps */

struct rig {
	struct kvt_budget budget[KVT_TIERS];
	struct kvt_host *host;
	struct kvt_store *store;
	uint32_t block[ALL];
};

static void rig_open(struct rig *r, const struct kvt_policy_ops *policy)
{
	struct kvt_plane_geom geom = { .codec = KVT_F32, .elems = ROW / 4, .row_bytes = ROW, .block_rows = ROWS };
	struct kvt_host_params host = { .depth = 64, .frame_bytes = BLOCK, .budget = &r->budget[KVT_TIER_RAM] };
	struct kvt_store_params p = {
		.planes = &geom, .n_planes = 1, .block_bytes = BLOCK, .frames = { 0, 0, FRAMES, 2 * ALL },
		.headroom = 2 * GROUP, .budget = r->budget, .disk_dir = test_scratch(), .numa_node = -1, .policy = policy,
	};
	struct kvt_host *inner;

	memset(r, 0, sizeof(*r));
	for (uint32_t t = 0; t < KVT_TIERS; t++)
		r->budget[t].limit = 1ull << 30;
	ck_assert_msg(!kvt_host_open(&host, &inner), "%s", kvt_last_error());
	ck_assert_msg(!kvt_host_fault_open(inner, &(struct kvt_fault){ .kind = KVT_FAULT_NONE }, &r->host), "%s",
		      kvt_last_error());
	p.host = r->host;
	ck_assert_msg(!kvt_store_create(&p, &r->store), "%s", kvt_last_error());
}

static void rig_close(struct rig *r)
{
	ck_assert_msg(!kvt_store_check(r->store), "%s", kvt_last_error());
	kvt_store_destroy(r->store);
	kvt_host_close(r->host);
}

static float value(uint32_t block, uint32_t row, uint32_t i)
{
	return (float)(block * 1000 + row * 10 + i % 7);
}

static void write_row(struct rig *r, uint32_t block, uint32_t row)
{
	float data[ROW / 4];
	struct kvt_rows rows = { .data = data, .stride = ROW, .type = KVT_F32 };

	for (uint32_t i = 0; i < ROW / 4; i++)
		data[i] = value(block, row, i);
	ck_assert_msg(!kvt_store_write(r->store, r->block[block], row, 1, &rows), "%s", kvt_last_error());
}

static uint64_t reads(struct rig *r)
{
	struct kvt_stats st = KVT_INIT(st);

	kvt_store_stats(r->store, &st);
	return st.disk_read_bytes;
}

static void check_bytes(const struct kvt_view *view, uint32_t block)
{
	const float *data = (const float *)view->data;

	for (uint32_t row = 0; row < view->rows; row++)
		ck_assert(data[row * ROW / 4 + 3] == value(block, row, 3));
}

/* One step, as attention makes it: a group is borrowed while the next one loads. @ahead: the next layer's first group too. */
static void step(struct rig *r, bool ahead)
{
	struct kvt_view views[GROUP];

	kvt_store_borrow_begin(r->store, r->block, GROUP);
	for (uint32_t at = 0; at < ALL; at += GROUP) {
		uint32_t next = (at + GROUP) % ALL;

		ck_assert_msg(!kvt_store_borrow_wait(r->store, r->block + at, GROUP, views), "%s", kvt_last_error());
		if (next % PER_LAYER) {
			kvt_store_borrow_begin(r->store, r->block + next, GROUP);
		} else if (ahead) {
			kvt_store_borrow_begin(r->store, r->block + next, GROUP);
			kvt_store_borrow_drop(r->store, r->block + next, GROUP);
		}
		for (uint32_t i = 0; i < GROUP; i++)
			check_bytes(&views[i], at + i);
		kvt_store_return(r->store, r->block + at, GROUP);
		if (!(next % PER_LAYER) && next)
			kvt_store_borrow_begin(r->store, r->block + next, GROUP);
	}
}

/* Bytes read from disk in a step, on the average of the last ones. */
static double bytes_a_step(const struct kvt_policy_ops *policy, bool ahead)
{
	uint64_t before = 0;
	struct rig r;

	rig_open(&r, policy);
	for (uint32_t i = 0; i < ALL; i++)
		ck_assert_msg(!kvt_store_alloc(r.store, 0, &r.block[i]), "%s", kvt_last_error());
	/* prefill, layer by layer; the last block of each layer has room for a row a step */
	for (uint32_t i = 0; i < ALL; i++)
		for (uint32_t row = 0; row < ((i + 1) % PER_LAYER ? ROWS : 1); row++)
			write_row(&r, i, row);
	for (uint32_t s = 0; s < STEPS; s++) {
		if (s == STEPS - MEASURED)
			before = reads(&r);
		for (uint32_t layer = 0; layer < LAYERS && s + 1 < ROWS; layer++)
			write_row(&r, (layer + 1) * PER_LAYER - 1, s + 1);
		step(&r, ahead);
	}
	before = reads(&r) - before;
	rig_close(&r);
	return (double)before / MEASURED;
}

START_TEST(a_step_reads_what_does_not_fit)
{
	const struct kvt_policy_ops *policy = _i % 2 ? &kvt_policy_auto : &kvt_policy_scan;
	double bytes = bytes_a_step(policy, _i / 2);

	printf("%s: %.1f blocks of %u a step, with %u frames\n", policy->name, bytes / BLOCK, ALL, FRAMES);
	/* no policy reads less; what is held and what is on its way are the stream's */
	ck_assert_msg(bytes >= (ALL - FRAMES) * BLOCK, "%.1f blocks", bytes / BLOCK);
	ck_assert_msg(bytes <= (ALL - FRAMES + 3 * GROUP) * BLOCK, "%.1f blocks", bytes / BLOCK);
}
END_TEST

/* Blocks that get a row each step stay dirty; once full they are written down, while others are read without a pause. */
START_TEST(rows_are_written_down_once)
{
	enum { TAILS = FRAMES / 4 + 2 };
	struct kvt_stats before = KVT_INIT(before), st = KVT_INIT(st);
	struct rig r;

	rig_open(&r, &kvt_policy_auto);
	for (uint32_t i = 0; i < ALL; i++) {
		ck_assert_msg(!kvt_store_alloc(r.store, 0, &r.block[i]), "%s", kvt_last_error());
		for (uint32_t row = 0; row < ROWS && i >= TAILS; row++)
			write_row(&r, i, row);
	}
	ck_assert_msg(!kvt_store_flush(r.store), "%s", kvt_last_error());
	kvt_store_stats(r.store, &before);
	for (uint32_t row = 0; row < ROWS; row++) {
		kvt_store_stats(r.store, &st);
		ck_assert_uint_eq(st.disk_writes, before.disk_writes);
		if (row + 1 == ROWS) { /* from here on there is always one to come */
			kvt_host_fault_set(r.host, &(struct kvt_fault){ .delay = 3000, .seed = 1 });
			kvt_store_prefetch(r.store, r.block + TAILS, ALL - TAILS);
		}
		for (uint32_t i = 0; i < TAILS; i++)
			write_row(&r, i, row);
		for (uint32_t at = TAILS; at + GROUP <= ALL && row + 1 < ROWS; at += GROUP) {
			struct kvt_view views[GROUP];

			kvt_store_borrow_begin(r.store, r.block + at, GROUP);
			ck_assert_msg(!kvt_store_borrow_wait(r.store, r.block + at, GROUP, views), "%s", kvt_last_error());
			kvt_store_return(r.store, r.block + at, GROUP);
		}
	}
	for (uint32_t n = 0; n < 100000 && st.disk_writes == before.disk_writes; n++) {
		kvt_store_prefetch(r.store, r.block + TAILS, ALL - TAILS);
		kvt_store_prefetch_drop(r.store, r.block + TAILS, ALL - TAILS);
		kvt_store_stats(r.store, &st);
	}
	ck_assert_uint_gt(st.disk_writes, before.disk_writes);
	rig_close(&r);
}
END_TEST

START_TEST(lru_reads_everything)
{
	ck_assert_msg(bytes_a_step(&kvt_policy_lru, true) > 0.8 * ALL * BLOCK, "LRU is better than it was thought to be");
}
END_TEST

int main(void)
{
	Suite *s = suite_create("store_stream");
	TCase *c = tcase_create("store_stream");
	SRunner *r = srunner_create(s);
	int failed;

	tcase_add_loop_test(c, a_step_reads_what_does_not_fit, 0, 4);
	tcase_add_test(c, rows_are_written_down_once);
	tcase_add_test(c, lru_reads_everything);
	suite_add_tcase(s, c);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed ? 1 : 0;
}
