// SPDX-License-Identifier: MIT
/* Output files: whole or not there, over what had the name before; a write that failed is never forgotten. */
#include <check.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kvtier.h"
#include "lib/weightfile.h"
#include "tools/outfile.h"

static void holds(const char *path, const char *want)
{
	char got[64] = "";
	FILE *f = fopen(path, "r");

	ck_assert_ptr_nonnull(f);
	ck_assert_uint_eq(fread(got, 1, sizeof(got) - 1, f), strlen(want));
	ck_assert_str_eq(got, want);
	fclose(f);
}

START_TEST(whole_or_not)
{
	const char *path = write_file("out", "old", 3);
	struct outfile o;

	ck_assert_int_eq(outfile_open(&o, path), 0);
	fputs("new", o.f);
	fflush(o.f);
	holds(path, "old");
	outfile_abort(&o);
	outfile_abort(&o);
	holds(path, "old");
	ck_assert_int_eq(outfile_open(&o, path), 0);
	fputs("newer", o.f);
	ck_assert_int_eq(outfile_commit(&o), 0);
	holds(path, "newer");
	outfile_abort(&o);
	holds(path, "newer");
}
END_TEST

START_TEST(refused)
{
	struct outfile o;

	ck_assert_int_eq(outfile_open(&o, scratch("none/out")), -ENOENT);
	ck_assert_ptr_null(o.f);
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "none/out"));
	ck_assert_int_eq(outfile_open(&o, scratch_dir()), -EISDIR);
}
END_TEST

/* A pipe, like a device, is written, not replaced. (Not tried on /dev/null: a failure would cost the machine its own.) */
START_TEST(pipes_stay)
{
	const char *path = scratch("pipe");
	char got[8] = "";
	struct outfile o;
	struct stat st;
	int fd;

	ck_assert_int_eq(mkfifo(path, 0600), 0);
	fd = open(path, O_RDONLY | O_NONBLOCK);
	ck_assert_int_ge(fd, 0);
	ck_assert_int_eq(outfile_open(&o, path), 0);
	fputs("gone", o.f);
	ck_assert_int_eq(outfile_commit(&o), 0);
	ck_assert_int_eq(read(fd, got, sizeof(got)), 4);
	ck_assert_str_eq(got, "gone");
	ck_assert_int_eq(stat(path, &st), 0);
	ck_assert(S_ISFIFO(st.st_mode));
	close(fd);
}
END_TEST

/* A write fails, then there is room again: what is missing in the middle must not pass for a whole file. */
START_TEST(error_in_the_middle)
{
	struct rlimit limit = { 4096, RLIM_INFINITY };
	const char *path = scratch("torn");
	char data[65536] = { 0 };
	struct outfile o;

	signal(SIGXFSZ, SIG_IGN);
	ck_assert_int_eq(outfile_open(&o, path), 0);
	ck_assert_int_eq(setrlimit(RLIMIT_FSIZE, &limit), 0);
	fwrite(data, 1, sizeof(data), o.f);
	limit.rlim_cur = RLIM_INFINITY;
	ck_assert_int_eq(setrlimit(RLIMIT_FSIZE, &limit), 0);
	fwrite(data, 1, 10, o.f);
	/* for the reason it had then, whatever errno is by now */
	errno = ENOTTY;
	ck_assert_int_eq(outfile_commit(&o), -EFBIG);
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), strerror(EFBIG)));
	ck_assert_int_ne(access(path, F_OK), 0);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("tools_outfile");
	TCase *t = tcase_create("outfile");
	SRunner *r = srunner_create(s);
	int failed;

	tcase_add_test(t, whole_or_not);
	tcase_add_test(t, refused);
	tcase_add_test(t, pipes_stay);
	tcase_add_test(t, error_in_the_middle);
	suite_add_tcase(s, t);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed != 0;
}
