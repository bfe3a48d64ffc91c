// SPDX-License-Identifier: MIT
/*
 * Random work on a store against a plain-memory model, in every shape of
 * tiers: what is served is what was written, and free + used == total after
 * every operation.
 */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>

#include "lib/rounds.h"
#include "lib/store_model.h"

static const struct {
	const char *name;
	struct model_config c;
} shapes[] = {
	{ "ram alone", { .frames = { 0, 0, 64, 0 } } },
	{ "pinned and ram", { .frames = { 0, 16, 48, 0 } } },
	{ "ram and disk, io_uring", { .frames = { 0, 0, 8, 96 }, .io = KVT_IO_AUTO } },
	{ "ram and disk, threads", { .frames = { 0, 0, 8, 96 }, .io = KVT_IO_THREADS } },
	{ "pinned, ram and disk", { .frames = { 0, 4, 8, 128 } } },
	{ "four frames", { .frames = { 0, 0, 4, 64 } } },
	{ "gpu, ram and disk", { .frames = { 8, 0, 8, 96 } } },
	{ "all four", { .frames = { 8, 4, 8, 160 } } },
	{ "disk smaller than memory", { .frames = { 0, 0, 64, 16 } } },
	{ "64 KiB blocks", { .frames = { 0, 8, 8, 64 }, .block_bytes = 65536 } },
	{ "writes not read back", { .frames = { 0, 0, 8, 96 }, .flags = KVT_CACHE_NO_WRITE_VERIFY } },
	{ "write-back held to a rate", { .frames = { 0, 0, 16, 96 }, .rate = 1 << 20 } },
};

START_TEST(serves_what_was_written)
{
	struct model_config c = shapes[_i].c;
	struct model *m;

	c.seed = 1000 + (uint64_t)_i;
	ck_assert_msg(!model_create(&c, &m), "%s: %s", shapes[_i].name, kvt_last_error());
	ck_assert_msg(!model_run(m, test_rounds(6000, 3000, 1500)), "%s", shapes[_i].name);
	ck_assert_msg(!model_verify(m), "%s", shapes[_i].name);
	model_destroy(m);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("store_random");
	TCase *t = tcase_create("shapes");
	SRunner *r = srunner_create(s);
	int failed;

	tcase_set_timeout(t, 300);
	tcase_add_loop_test(t, serves_what_was_written, 0, sizeof(shapes) / sizeof(shapes[0]));
	suite_add_tcase(s, t);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
