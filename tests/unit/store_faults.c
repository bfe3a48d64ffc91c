// SPDX-License-Identifier: MIT
/*
 * Every call and every transfer of the host fails once, in every way: the
 * store serves what was written, or an explicit error, and never a mix. A run
 * that the fault no longer reaches ends the sweep.
 */
#include <check.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lib/host_fault.h"
#include "lib/rounds.h"
#include "lib/store_model.h"

#define OPERATIONS 150

static const struct {
	const char *name;
	struct kvt_fault fault;
	bool lossless; /* no call may fail and nothing may be lost */
} ways[] = {
	{ "EIO", { .kind = KVT_FAULT_ERRNO, .err = -EIO }, false },
	{ "ENOSPC", { .kind = KVT_FAULT_ERRNO, .err = -ENOSPC, .only = 1 << KVT_XFER_WRITE }, false },
	{ "torn transfers", { .kind = KVT_FAULT_TORN, .err = -EIO }, false },
	{ "torn writes", { .kind = KVT_FAULT_TORN, .err = -EIO, .only = 1 << KVT_XFER_WRITE }, true },
	{ "flipped bits on reading", { .kind = KVT_FAULT_FLIP, .only = 1 << KVT_XFER_READ }, true },
	{ "flipped bits on writing", { .kind = KVT_FAULT_FLIP, .only = 1 << KVT_XFER_WRITE }, true },
	{ "lost writes", { .kind = KVT_FAULT_LOST, .only = 1 << KVT_XFER_WRITE }, true },
	{ "misplaced writes", { .kind = KVT_FAULT_MISPLACE, .only = 1 << KVT_XFER_WRITE }, false },
	{ "misplaced reads", { .kind = KVT_FAULT_MISPLACE, .only = 1 << KVT_XFER_READ }, true },
	{ "delayed and reordered", { .kind = KVT_FAULT_NONE, .delay = 4, .reorder = true }, true },
};

/* One run with the fault at event @at. Returns how many events it had. */
static uint64_t run(int way, uint64_t at, uint64_t every, uint64_t operations)
{
	struct kvt_budget budget = { .limit = UINT64_MAX };
	struct kvt_host_params hp = { .kind = KVT_HOST_USER, .io = KVT_IO_AUTO, .depth = 64, .frame_bytes = 4096,
				      .budget = &budget };
	struct model_config c = { .frames = { 0, 2, 5, 64 }, .slots = 40, .seed = 11 + at,
				  .errors_allowed = !ways[way].lossless || every };
	struct kvt_fault fault = ways[way].fault;
	struct kvt_host *inner, *host;
	struct model *m;
	uint64_t events;
	int ret;

	fault.at = at;
	fault.every = every;
	fault.seed = at * 31;
	ck_assert_msg(!kvt_host_open(&hp, &inner), "%s", kvt_last_error());
	ck_assert_msg(!kvt_host_fault_open(inner, &fault, &host), "%s", kvt_last_error());
	c.host = host;
	ret = model_create(&c, &m);
	if (ret) { /* a pool or the file was refused: an error, and nothing is left behind */
		ck_assert_int_lt(ret, 0);
	} else {
		ck_assert_msg(!model_run(m, operations), "%s at event %llu", ways[way].name, (unsigned long long)at);
		ck_assert_msg(!model_verify(m), "%s at event %llu", ways[way].name, (unsigned long long)at);
		model_destroy(m);
	}
	events = kvt_host_fault_events(host);
	kvt_host_close(host);
	ck_assert_uint_eq(budget.used, 0);
	return events;
}

START_TEST(once_at_every_event)
{
	uint64_t at = 1, late = test_rounds(4, 13, 13);

	/* each of the first: the start and the first blocks' first ways. Later ones go the same ways. */
	while (run(_i, at, 0, OPERATIONS) >= at)
		at += at < 40 && late == 4 ? 1 : late;
	ck_assert_uint_gt(at, 20);
}
END_TEST

START_TEST(again_and_again)
{
	run(_i, 5, 3, 2000);
	run(_i, 9, 17, 2000);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("store_faults");
	TCase *t = tcase_create("sweep");
	int n = sizeof(ways) / sizeof(ways[0]), failed;
	SRunner *r = srunner_create(s);

	tcase_set_timeout(t, 600);
	tcase_add_loop_test(t, once_at_every_event, 0, n);
	tcase_add_loop_test(t, again_and_again, 0, n);
	suite_add_tcase(s, t);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
