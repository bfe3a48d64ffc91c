// SPDX-License-Identifier: MIT
/*
 * kill -9 at any instant leaves no file, no disk space and no locked memory.
 * Runs alone: others' space and locked memory would count.
 */
#include <check.h>
#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include "lib/rounds.h"
#include "lib/scratch.h"
#include "lib/store_model.h"

static char dir[512];

static uint64_t used_space(void)
{
	struct statvfs v;

	ck_assert(!statvfs(dir, &v));
	return (uint64_t)(v.f_blocks - v.f_bfree) * v.f_frsize;
}

static unsigned int files(void)
{
	unsigned int n = 0;
	DIR *d = opendir(dir);

	while (readdir(d))
		n++;
	closedir(d);
	return n - 2;
}

/* /proc/meminfo's count of locked kB: all processes' */
static long locked(void)
{
	char line[128];
	long kb = -1;
	FILE *f = fopen("/proc/meminfo", "r");

	while (f && fgets(line, sizeof(line), f) && sscanf(line, "Mlocked: %ld", &kb) != 1)
		;
	if (f)
		fclose(f);
	return kb;
}

#define FRAME 65536u

static void busy_child(uint64_t seed)
{
	struct model_config c = { .frames = { 4, 16, 16, 512 }, .block_bytes = FRAME, .slots = 300, .dir = dir, .seed = seed };
	struct model *m;

	if (!model_create(&c, &m))
		model_run(m, UINT64_MAX / 2);
	_exit(1);
}

START_TEST(nothing_stays_behind)
{
	int rounds = (int)test_rounds(25, 5, 5), status;
	uint64_t random = 4242, before, after;
	long locked_before = locked();

	snprintf(dir, sizeof(dir), "%s/kvtier-kill-XXXXXX", test_scratch());
	ck_assert_ptr_nonnull(mkdtemp(dir));
	before = used_space();
	for (int i = 0; i < rounds; i++) {
		pid_t child = fork();

		if (!child)
			busy_child((uint64_t)i);
		usleep((useconds_t)(model_random(&random) % 80000));
		ck_assert(!kill(child, SIGKILL));
		ck_assert_int_eq(waitpid(child, &status, 0), child);
		ck_assert_msg(WIFSIGNALED(status), "the child ended by itself: %x", status);
		ck_assert_uint_eq(files(), 0);
	}
	/* other processes write meanwhile: but not as much as all the children would have left */
	after = used_space();
	ck_assert_msg(after < before + (uint64_t)rounds * 32 * FRAME, "%llu bytes more are used", (unsigned long long)(after - before));
	ck_assert_int_le(locked(), locked_before + (long)(16 * FRAME / 1024) * 2);
	ck_assert(!rmdir(dir));
}
END_TEST

int main(void)
{
	Suite *s = suite_create("cache_kill");
	TCase *t = tcase_create("kill");
	SRunner *r = srunner_create(s);
	int failed;

	tcase_set_timeout(t, 120);
	tcase_add_test(t, nothing_stays_behind);
	suite_add_tcase(s, t);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
