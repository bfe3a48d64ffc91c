// SPDX-License-Identifier: MIT
/*
 * Prefetch is a hint: it starts reads, and nothing else depends on it. It takes
 * frames only of clean blocks that nobody holds and that were not prefetched
 * themselves; a borrow gets whatever frame it needs. Each block is read once,
 * errors are for who borrows, and the counters add up in every state.
 */
#include <check.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/err.h"
#include "lib/host_fault.h"
#include "lib/scratch.h"
#include "store/store.h"

#define ROW 256
#define BLOCK 4096
#define ROWS (BLOCK / ROW)
#define ALL 64
#define FRAMES 16
#define READS (1 << KVT_XFER_READ)

struct rig {
	struct kvt_budget budget[KVT_TIERS];
	struct kvt_host *host;
	struct kvt_store *store;
	uint32_t block[ALL];
	struct kvt_view views[ALL];
};

static const struct kvt_fault no_fault, late = { .delay = 3000, .reorder = true, .seed = 3 };

static float value(uint32_t block, uint32_t row, uint32_t i)
{
	return (float)(block * 1000 + row * 10 + i % 7);
}

static void write_block(struct rig *r, uint32_t block)
{
	float data[BLOCK / 4];
	struct kvt_rows rows = { .data = data, .stride = ROW, .type = KVT_F32 };

	for (uint32_t i = 0; i < BLOCK / 4; i++)
		data[i] = value(block, i / (ROW / 4), i % (ROW / 4));
	ck_assert_msg(!kvt_store_write(r->store, r->block[block], 0, ROWS, &rows), "%s", kvt_last_error());
}

static int borrow(struct rig *r, uint32_t first, uint32_t n)
{
	kvt_store_borrow_begin(r->store, r->block + first, n);
	return kvt_store_borrow_wait(r->store, r->block + first, n, r->views);
}

static void check_bytes(struct rig *r, uint32_t first, uint32_t n)
{
	for (uint32_t k = 0; k < n; k++)
		for (uint32_t i = 0; i < BLOCK / 4; i++)
			ck_assert(((const float *)r->views[k].data)[i] == value(first + k, i / (ROW / 4), i % (ROW / 4)));
}

static void read_back(struct rig *r, uint32_t first, uint32_t n)
{
	ck_assert_msg(!borrow(r, first, n), "%s", kvt_last_error());
	check_bytes(r, first, n);
	kvt_store_return(r->store, r->block + first, n);
}

/* All blocks written, and the last FRAMES in memory, clean. */
static void rig_open(struct rig *r, const struct kvt_policy_ops *policy)
{
	struct kvt_plane_geom geom = { .codec = KVT_F32, .elems = ROW / 4, .row_bytes = ROW, .block_rows = ROWS };
	struct kvt_host_params host = { .depth = 64, .frame_bytes = BLOCK, .budget = &r->budget[KVT_TIER_RAM] };
	struct kvt_store_params p = {
		.planes = &geom, .n_planes = 1, .block_bytes = BLOCK, .frames = { 0, 0, FRAMES, 2 * ALL }, .headroom = 4,
		.budget = r->budget, .disk_dir = test_scratch(), .numa_node = -1, .policy = policy,
	};
	struct kvt_host *inner;

	memset(r, 0, sizeof(*r));
	for (uint32_t t = 0; t < KVT_TIERS; t++)
		r->budget[t].limit = 1ull << 30;
	ck_assert_msg(!kvt_host_open(&host, &inner), "%s", kvt_last_error());
	ck_assert_msg(!kvt_host_fault_open(inner, &no_fault, &r->host), "%s", kvt_last_error());
	p.host = r->host;
	ck_assert_msg(!kvt_store_create(&p, &r->store), "%s", kvt_last_error());
	for (uint32_t i = 0; i < ALL; i++) {
		ck_assert_msg(!kvt_store_alloc(r->store, 0, &r->block[i]), "%s", kvt_last_error());
		write_block(r, i);
	}
	ck_assert_int_eq(kvt_store_move(r->store, r->block, ALL, KVT_TIER_DISK), ALL);
	read_back(r, ALL - FRAMES, FRAMES);
}

static void rig_close(struct rig *r)
{
	kvt_store_destroy(r->store);
	kvt_host_close(r->host);
	for (uint32_t t = 0; t < KVT_TIERS; t++)
		ck_assert_uint_eq(r->budget[t].used, 0);
}

static struct kvt_stats stats(struct rig *r)
{
	struct kvt_stats st = KVT_INIT(st);

	ck_assert_msg(!kvt_store_check(r->store), "%s", kvt_last_error());
	kvt_store_stats(r->store, &st);
	return st;
}

/* Until no read that was started is under way. */
static struct kvt_stats at_rest(struct rig *r, uint64_t reads)
{
	struct kvt_stats st = stats(r);

	for (int i = 0; i < 5000 && st.disk_reads < reads; i++) {
		usleep(1000);
		st = stats(r);
	}
	ck_assert_uint_eq(st.disk_reads, reads);
	return st;
}

static const struct kvt_policy_ops *const policies[] = { &kvt_policy_lru, &kvt_policy_s3fifo, &kvt_policy_scan,
							 &kvt_policy_cost, &kvt_policy_auto };

/* Whether the reads are done or under way when the borrow comes: each block is read once. */
START_TEST(one_read_serves_hint_and_borrow)
{
	struct kvt_stats before, st;
	struct rig r;

	rig_open(&r, policies[_i % 5]);
	if (_i >= 5)
		kvt_host_fault_set(r.host, &late);
	before = stats(&r);
	ck_assert_uint_eq(kvt_store_prefetch(r.store, r.block, 8), 8);
	ck_assert_uint_eq(kvt_store_prefetch(r.store, r.block, 8), 8); /* they are on their way */
	st = stats(&r);
	ck_assert_uint_eq(st.prefetched, 8);
	ck_assert_uint_eq(st.hits + st.misses, before.hits + before.misses);
	if (_i < 5)
		at_rest(&r, before.disk_reads + 8);
	read_back(&r, 0, 8);
	st = stats(&r);
	ck_assert_uint_eq(st.disk_reads - before.disk_reads, 8);
	ck_assert_uint_eq(st.hits + st.misses - before.hits - before.misses, 8);
	ck_assert(_i >= 5 || st.misses == before.misses);
	ck_assert_uint_eq(st.prefetched, 8);
	ck_assert_uint_eq(st.prefetch_used, 8);
	ck_assert_uint_eq(st.prefetch_wasted, 0);
	rig_close(&r);
}
END_TEST

/* What is dirty, held or prefetched keeps its frame, and the hint ends where nothing else is left. */
START_TEST(it_takes_only_what_nobody_needs)
{
	enum { HELD = 5, DIRTY = 4, ROOM = FRAMES - HELD - DIRTY };
	struct kvt_stats before, st;
	enum kvt_tier tier;
	uint8_t *frames[DIRTY];
	struct rig r;

	rig_open(&r, policies[_i]);
	ck_assert_msg(!borrow(&r, 40, HELD), "%s", kvt_last_error());
	for (uint32_t i = 0; i < DIRTY; i++) {
		write_block(&r, 60 + i);
		frames[i] = kvt_store_frame(r.store, r.block[60 + i], &tier);
	}
	before = stats(&r);
	ck_assert_uint_eq(before.blocks_dirty, DIRTY);
	ck_assert_uint_eq(kvt_store_prefetch(r.store, r.block, 30), ROOM);
	at_rest(&r, before.disk_reads + ROOM);
	ck_assert_uint_eq(kvt_store_prefetch(r.store, r.block + 20, 10), 0); /* those before are not used yet */
	st = stats(&r);
	ck_assert_uint_eq(st.prefetched, ROOM);
	ck_assert_uint_eq(st.prefetch_wasted, 0);
	ck_assert_uint_eq(st.blocks_dirty, DIRTY);
	ck_assert_uint_eq(st.disk_writes, before.disk_writes);
	ck_assert_uint_eq(st.tier[KVT_TIER_RAM].frames_free, 0);
	for (uint32_t i = 0; i < DIRTY; i++)
		ck_assert_ptr_eq(kvt_store_frame(r.store, r.block[60 + i], &tier), frames[i]);
	check_bytes(&r, 40, HELD);
	kvt_store_return(r.store, r.block + 40, HELD);
	read_back(&r, 0, ROOM);
	ck_assert_uint_eq(stats(&r).prefetch_used, ROOM);
	ck_assert_uint_eq(kvt_store_prefetch(r.store, r.block + 20, 4), 4); /* now they are */
	for (uint32_t i = 0; i < DIRTY; i++)
		read_back(&r, 60 + i, 1);
	rig_close(&r);
}
END_TEST

/* Memory full of what was prefetched, or is about to be: a borrow of all that fits and a write succeed all the same. */
START_TEST(a_borrow_comes_first)
{
	struct kvt_stats st;
	struct rig r;

	rig_open(&r, policies[_i % 5]);
	if (_i >= 5)
		kvt_host_fault_set(r.host, &late);
	ck_assert_uint_eq(kvt_store_prefetch(r.store, r.block, ALL), FRAMES);
	read_back(&r, 30, FRAMES);
	st = stats(&r);
	ck_assert_uint_eq(st.prefetch_wasted, FRAMES);
	ck_assert_uint_eq(kvt_store_prefetch(r.store, r.block, ALL), FRAMES);
	write_block(&r, 50);
	read_back(&r, 50, 1);
	rig_close(&r);
}
END_TEST

/* Blocks that are there, have no rows or are none: seen to, and nothing is read. */
START_TEST(there_may_be_nothing_to_do)
{
	struct kvt_stats before;
	uint32_t blocks[3] = { KVT_NO_BLOCK };
	struct rig r;

	rig_open(&r, &kvt_policy_auto);
	read_back(&r, 3, 1);
	blocks[1] = r.block[3];
	kvt_store_put(r.store, r.block[0]);
	ck_assert(!kvt_store_alloc(r.store, 0, &blocks[2]));
	before = stats(&r);
	ck_assert_uint_eq(kvt_store_prefetch(r.store, blocks, 3), 3);
	kvt_store_prefetch_drop(r.store, blocks, 3);
	ck_assert_uint_eq(kvt_store_prefetch(r.store, blocks, 0), 0);
	ck_assert_uint_eq(stats(&r).prefetched, 0);
	ck_assert_uint_eq(stats(&r).disk_reads, before.disk_reads);
	ck_assert_uint_eq(stats(&r).evictions, before.evictions);
	rig_close(&r);
}
END_TEST

/* Few wait where more would push out what is used in turn: free frames, and some of what memory does not hold. */
START_TEST(there_is_room_for_some)
{
	struct rig r;

	rig_open(&r, &kvt_policy_auto);
	ck_assert_uint_eq(kvt_store_prefetch_room(r.store), (ALL - FRAMES) / 16);
	ck_assert_int_eq(kvt_store_move(r.store, r.block, ALL, KVT_TIER_DISK), ALL);
	ck_assert_uint_eq(kvt_store_prefetch_room(r.store), FRAMES + (ALL - FRAMES) / 16);
	for (uint32_t i = 0; i < ALL; i++)
		kvt_store_put(r.store, r.block[i]);
	ck_assert_uint_eq(kvt_store_prefetch_room(r.store), FRAMES);
	rig_close(&r);
}
END_TEST

/* A wrong guess: the frames are free again, those of reads under way when these end; and may be asked for anew. */
START_TEST(what_is_not_wanted_leaves)
{
	struct kvt_stats before, st;
	struct rig r;

	rig_open(&r, policies[_i % 5]);
	before = stats(&r);
	if (_i >= 5)
		kvt_host_fault_set(r.host, &late);
	ck_assert_uint_eq(kvt_store_prefetch(r.store, r.block, 8), 8);
	if (_i < 5)
		at_rest(&r, before.disk_reads + 8);
	kvt_store_prefetch_drop(r.store, r.block, 6);
	st = stats(&r);
	ck_assert_uint_eq(st.prefetch_wasted, 6);
	st = at_rest(&r, before.disk_reads + 8);
	ck_assert_uint_eq(st.tier[KVT_TIER_RAM].frames_free, 6);
	ck_assert_uint_eq(kvt_store_prefetch(r.store, r.block, 2), 2);
	kvt_store_prefetch_drop(r.store, r.block, 2);
	ck_assert_uint_eq(kvt_store_prefetch(r.store, r.block, 2), 2);
	read_back(&r, 0, 8);
	st = stats(&r);
	ck_assert_uint_eq(st.prefetch_used, 4);
	ck_assert_uint_eq(st.prefetched, st.prefetch_used + st.prefetch_wasted);
	rig_close(&r);
}
END_TEST

/* A read that fails is nobody's error unless a borrow waits for it; the next borrow reads anew. */
START_TEST(errors_are_for_who_borrows)
{
	struct kvt_fault eio = { .kind = KVT_FAULT_ERRNO, .err = -EIO, .at = 1, .every = 1, .only = READS };
	struct kvt_stats before, st;
	struct rig r;
	int ret;

	rig_open(&r, &kvt_policy_auto);
	before = stats(&r);
	kvt_host_fault_set(r.host, &eio);
	ck_assert_uint_eq(kvt_store_prefetch(r.store, r.block, 4), 4);
	st = at_rest(&r, before.disk_reads + 4);
	ck_assert_uint_eq(st.io_errors - before.io_errors, 4);
	ck_assert_uint_eq(st.prefetch_wasted, 4);
	ck_assert_uint_eq(kvt_store_prefetch(r.store, r.block, 4), 4); /* not again and again */
	ck_assert_uint_eq(stats(&r).disk_reads, st.disk_reads);
	ck_assert_int_eq(borrow(&r, 0, 4), -EIO); /* the disk still fails */
	eio.delay = 3000;
	kvt_host_fault_set(r.host, &eio);
	kvt_store_prefetch(r.store, r.block + 8, 4);
	ret = borrow(&r, 8, 4);
	ck_assert_int_eq(ret, -EIO);
	kvt_host_fault_set(r.host, &no_fault);
	at_rest(&r, stats(&r).disk_reads);
	while ((ret = borrow(&r, 0, 4)) == -EIO) /* an error that nobody has taken yet */
		;
	ck_assert_msg(!ret, "%s", kvt_last_error());
	check_bytes(&r, 0, 4);
	kvt_store_return(r.store, r.block, 4);
	rig_close(&r);
}
END_TEST

/* Blocks are freed, written to, and the store is destroyed, while reads for a hint are under way. */
START_TEST(it_may_be_too_late)
{
	struct kvt_stats st;
	struct rig r;

	rig_open(&r, policies[_i]);
	kvt_host_fault_set(r.host, &late);
	ck_assert_uint_eq(kvt_store_prefetch(r.store, r.block, 12), 12);
	for (uint32_t i = 0; i < 4; i++)
		kvt_store_put(r.store, r.block[i]);
	write_block(&r, 4);
	read_back(&r, 4, 1);
	for (int i = 0; i < 5000 && stats(&r).blocks > ALL - 4; i++)
		usleep(1000);
	st = stats(&r);
	ck_assert_uint_eq(st.blocks, ALL - 4);
	ck_assert_uint_eq(st.prefetch_wasted, 4);
	ck_assert_uint_eq(st.prefetch_used, 1);
	ck_assert_uint_eq(kvt_store_prefetch(r.store, r.block + 12, 2), 2);
	rig_close(&r);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("store_prefetch");
	TCase *c = tcase_create("store_prefetch");
	SRunner *r = srunner_create(s);
	int failed;

	tcase_add_loop_test(c, one_read_serves_hint_and_borrow, 0, 10);
	tcase_add_loop_test(c, it_takes_only_what_nobody_needs, 0, 5);
	tcase_add_loop_test(c, a_borrow_comes_first, 0, 10);
	tcase_add_test(c, there_may_be_nothing_to_do);
	tcase_add_test(c, there_is_room_for_some);
	tcase_add_loop_test(c, what_is_not_wanted_leaves, 0, 10);
	tcase_add_test(c, errors_are_for_who_borrows);
	tcase_add_loop_test(c, it_may_be_too_late, 0, 5);
	suite_add_tcase(s, c);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed ? 1 : 0;
}
