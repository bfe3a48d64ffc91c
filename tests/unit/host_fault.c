// SPDX-License-Identifier: MIT
/* The faulty host goes wrong where it is told to, and nowhere else. */
#include <check.h>
#include <errno.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "host/host.h"
#include "lib/host_fault.h"
#include "lib/scratch.h"

#define FRAME 8192u
#define SLOTS 16u

static struct kvt_budget budget;
static struct kvt_host *host;
static struct kvt_pool *pool;
static struct kvt_file *file;

static void open_all(void)
{
	struct kvt_host_params params = { .io = KVT_IO_AUTO, .depth = SLOTS, .frame_bytes = FRAME, .budget = &budget };
	struct kvt_pool_params frames = { .n_frames = SLOTS, .node = -1 };
	struct kvt_file_params slots = { .dir = test_scratch(), .n_slots = SLOTS };
	struct kvt_fault none = { .kind = KVT_FAULT_NONE };
	struct kvt_host *inner;

	budget = (struct kvt_budget){ .limit = UINT64_MAX };
	ck_assert_int_eq(kvt_host_open(&params, &inner), 0);
	ck_assert_int_eq(kvt_host_fault_open(inner, &none, &host), 0);
	ck_assert_int_eq(kvt_pool_create(host, &frames, &pool), 0);
	ck_assert_int_eq(kvt_file_open(host, &slots, &file), 0);
}

static void close_all(void)
{
	kvt_host_drain(host);
	kvt_file_close(host, file);
	kvt_pool_destroy(host, pool);
	kvt_host_close(host);
	ck_assert_uint_eq(atomic_load(&budget.used), 0);
}

static uint8_t *frame(uint32_t i)
{
	return pool->base + (uint64_t)i * FRAME;
}

static void set(struct kvt_fault fault)
{
	kvt_host_fault_set(host, &fault);
}

static struct kvt_done wait_one(void)
{
	struct pollfd p = { .fd = kvt_host_eventfd(host), .events = POLLIN };
	struct kvt_done done;

	while (kvt_host_reap(host, &done, 1) != 1)
		ck_assert_msg(poll(&p, 1, 10000) == 1, "completions wait and the eventfd is silent");
	return done;
}

static int transfer(uint32_t op, uint32_t slot, uint32_t f)
{
	struct kvt_xfer x = { .op = op, .slot = slot, .file = file, .pool = pool, .frame = f, .bytes = FRAME, .user = slot };
	int ret = kvt_host_submit(host, &x, 1);

	if (ret < 0)
		return ret;
	ck_assert_int_eq(ret, 1);
	return wait_one().result;
}

static uint64_t bits_that_differ(const uint8_t *a, const uint8_t *b)
{
	uint64_t i, n = 0;

	for (i = 0; i < FRAME; i++)
		n += (uint64_t)__builtin_popcount(a[i] ^ b[i]);
	return n;
}

START_TEST(a_sweep_meets_every_event_once)
{
	struct kvt_pool_params frames = { .n_frames = 1, .node = -1 };
	struct kvt_file_params slots = { .dir = test_scratch(), .n_slots = 1 };
	struct kvt_pool *p;
	struct kvt_file *f;
	uint64_t at;
	int first, failures;

	open_all();
	for (at = 1;; at++) {
		set((struct kvt_fault){ .kind = KVT_FAULT_ERRNO, .err = -ENOSPC, .at = at });
		failures = first = 0;
#define EVENT(call) do { int r_ = (call); if (r_ < 0) { ck_assert_int_eq(r_, -ENOSPC); failures++; } first = r_; } while (0)
		EVENT(kvt_pool_create(host, &frames, &p));
		if (!first)
			kvt_pool_destroy(host, p);
		EVENT(kvt_file_open(host, &slots, &f));
		if (!first)
			kvt_file_close(host, f);
		EVENT(transfer(KVT_XFER_WRITE, 0, 0)); /* two events: the call and the transfer */
		EVENT(transfer(KVT_XFER_READ, 0, 0));
		if (kvt_host_fault_events(host) < at)
			break;
		ck_assert_int_eq(failures, 1);
		ck_assert_uint_eq(kvt_host_fault_hits(host), 1);
	}
	ck_assert_int_eq(failures, 0);
	ck_assert_uint_eq(at, 7);
	close_all();
}
END_TEST

START_TEST(torn_writes)
{
	open_all();
	memset(frame(0), 1, FRAME);
	ck_assert_int_eq(transfer(KVT_XFER_WRITE, 3, 0), 0);
	memset(frame(0), 2, FRAME);
	set((struct kvt_fault){ .kind = KVT_FAULT_TORN, .at = 2 });
	ck_assert_int_eq(transfer(KVT_XFER_WRITE, 3, 0), -EIO);
	ck_assert_int_eq(transfer(KVT_XFER_READ, 3, 1), 0);
	ck_assert_uint_eq(frame(1)[0], 2);
	ck_assert_uint_eq(frame(1)[FRAME / 2 - 1], 2);
	ck_assert_uint_eq(frame(1)[FRAME / 2], 1);
	close_all();
}
END_TEST

START_TEST(flipped_bits)
{
	open_all();
	memset(frame(0), 0x33, FRAME);
	ck_assert_int_eq(transfer(KVT_XFER_WRITE, 3, 0), 0);
	set((struct kvt_fault){ .kind = KVT_FAULT_FLIP, .at = 2, .seed = 5 });
	ck_assert_int_eq(transfer(KVT_XFER_READ, 3, 1), 0);
	ck_assert_uint_eq(bits_that_differ(frame(0), frame(1)), 1);
	ck_assert_int_eq(transfer(KVT_XFER_READ, 3, 2), 0);
	ck_assert_uint_eq(bits_that_differ(frame(0), frame(2)), 0);
	/* The same seed and event, the same bit. */
	set((struct kvt_fault){ .kind = KVT_FAULT_FLIP, .at = 2, .seed = 5 });
	ck_assert_int_eq(transfer(KVT_XFER_READ, 3, 2), 0);
	ck_assert_uint_eq(bits_that_differ(frame(1), frame(2)), 0);
	/* In the file: the frame stays, the next read differs. */
	set((struct kvt_fault){ .kind = KVT_FAULT_FLIP, .at = 2, .only = 1u << KVT_XFER_WRITE });
	ck_assert_int_eq(transfer(KVT_XFER_WRITE, 3, 0), 0);
	ck_assert_uint_eq(frame(0)[0], 0x33);
	ck_assert_int_eq(transfer(KVT_XFER_READ, 3, 1), 0);
	ck_assert_uint_eq(bits_that_differ(frame(0), frame(1)), 1);
	ck_assert_int_eq(kvt_file_flip_bit(file, 3, FRAME * 8 - 1), 0);
	ck_assert_int_eq(transfer(KVT_XFER_READ, 3, 1), 0);
	ck_assert_uint_eq(bits_that_differ(frame(0), frame(1)), 2);
	ck_assert_uint_eq(frame(1)[FRAME - 1], 0x33 ^ 0x80);
	close_all();
}
END_TEST

START_TEST(lost_and_misplaced)
{
	open_all();
	memset(frame(0), 1, FRAME);
	memset(frame(1), 2, FRAME);
	ck_assert_int_eq(transfer(KVT_XFER_WRITE, 0, 0), 0);
	ck_assert_int_eq(transfer(KVT_XFER_WRITE, 1, 1), 0);
	set((struct kvt_fault){ .kind = KVT_FAULT_LOST, .at = 2 });
	ck_assert_int_eq(transfer(KVT_XFER_WRITE, 0, 1), 0);
	ck_assert_int_eq(transfer(KVT_XFER_READ, 0, 2), 0);
	ck_assert_uint_eq(frame(2)[0], 1);
	set((struct kvt_fault){ .kind = KVT_FAULT_MISPLACE, .at = 2 });
	ck_assert_int_eq(transfer(KVT_XFER_READ, 0, 2), 0);
	ck_assert_uint_eq(frame(2)[0], 2);
	close_all();
}
END_TEST

/* Every so many events, and only those of one kind. */
START_TEST(again_and_again)
{
	uint32_t i, failed = 0;

	open_all();
	set((struct kvt_fault){ .kind = KVT_FAULT_ERRNO, .at = 2, .every = 4, .only = 1u << KVT_XFER_READ });
	for (i = 0; i < 8; i++)
		failed += transfer(KVT_XFER_READ, i, i) == -EIO;
	ck_assert_uint_eq(failed, 4);
	for (i = 0; i < 8; i++)
		ck_assert_int_eq(transfer(KVT_XFER_WRITE, i, i), 0);
	ck_assert_uint_eq(kvt_host_fault_hits(host), 4);
	close_all();
}
END_TEST

START_TEST(late_and_out_of_order)
{
	struct kvt_done done[SLOTS];
	struct kvt_host_calls calls;
	uint64_t order[2][SLOTS];
	struct kvt_xfer x[SLOTS];
	uint32_t run, i, in_order = 0;
	int early, n;

	open_all();
	for (i = 0; i < SLOTS; i++)
		x[i] = (struct kvt_xfer){ .op = KVT_XFER_WRITE, .slot = i, .file = file, .pool = pool, .frame = i,
					  .bytes = FRAME, .user = 100 + i };
	for (run = 0; run < 2; run++) {
		set((struct kvt_fault){ .seed = 9, .reorder = true, .delay = 3 });
		ck_assert_int_eq(kvt_host_submit(host, x, SLOTS), SLOTS);
		ck_assert_int_eq(kvt_host_submit(host, x, 1), 0);
		kvt_host_drain(host);
		/* All have ended; some are held back, and the eventfd tells of them. */
		early = kvt_host_reap(host, done, SLOTS);
		ck_assert(early > 0 && early < (int)SLOTS);
		for (n = 0; n < early; n++)
			order[run][n] = done[n].user;
		for (; n < (int)SLOTS; n++)
			order[run][n] = wait_one().user;
		ck_assert_int_eq(kvt_host_reap(host, done, 1), 0);
	}
	kvt_host_fault_calls(host, &calls);
	ck_assert_mem_eq(order[0], order[1], sizeof(order[0]));
	for (i = 0; i < SLOTS; i++)
		in_order += order[0][i] == 100 + i;
	ck_assert_uint_lt(in_order, SLOTS / 2);
	ck_assert_uint_eq(calls.transfers, 2 * SLOTS);
	ck_assert_uint_eq(calls.transfer_bytes, 2 * SLOTS * FRAME);
	close_all();
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("host_fault");
	TCase *tc = tcase_create("fault");
	SRunner *runner;
	int failed;

	tcase_set_timeout(tc, 60);
	tcase_add_test(tc, a_sweep_meets_every_event_once);
	tcase_add_test(tc, torn_writes);
	tcase_add_test(tc, flipped_bits);
	tcase_add_test(tc, lost_and_misplaced);
	tcase_add_test(tc, again_and_again);
	tcase_add_test(tc, late_and_out_of_order);
	suite_add_tcase(suite, tc);
	runner = srunner_create(suite);
	srunner_run_all(runner, CK_ENV);
	failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return failed != 0;
}
