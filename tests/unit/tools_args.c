// SPDX-License-Identifier: MIT
/* Sizes and numbers on the command line: what is read, and that everything else is refused with words. */
#include <check.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kvtier.h"
#include "tools/tools.h"

static const struct {
	const char *text;
	uint64_t bytes;
} sizes[] = {
	{ "0", 0 },
	{ "1", 1 },
	{ "4096", 4096 },
	{ "64K", 65536 },
	{ "64k", 65536 },
	{ "64KiB", 65536 },
	{ "1GiB", 1 << 30 },
	{ "1gib", 1 << 30 },
	{ "1M", 1 << 20 },
	{ "1.5G", 3ull << 29 },
	{ "0.25K", 256 },
	{ "2T", 2ull << 40 },
	{ "007", 7 },
	{ "9223372036854775807", INT64_MAX },
	{ "8388607T", 8388607ull << 40 },
};

START_TEST(size_read)
{
	uint64_t bytes = 99;

	ck_assert_int_eq(tool_size(sizes[_i].text, &bytes), 0);
	ck_assert_uint_eq(bytes, sizes[_i].bytes);
}
END_TEST

static const char *const not_sizes[] = {
	"", "K", "-1", "+1", " 1", "1 ", "1 K", "64KB", "64KK", "1.5", "1.", ".5K", "1..5K", "0x10", "1e3", "64Ki", "nan",
	"9223372036854775808", "8388608T", "99999999999999999999", "1.0000000001G", "64P",
};

START_TEST(size_refused)
{
	uint64_t bytes = 99;

	ck_assert_int_eq(tool_size(not_sizes[_i], &bytes), -EINVAL);
	ck_assert_uint_eq(bytes, 99);
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), not_sizes[_i]));
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "K, M, G or T"));
}
END_TEST

/* 10^9 or 2^30? Nobody is left to guess. */
START_TEST(ambiguous_units)
{
	uint64_t bytes;

	ck_assert_int_eq(tool_size("1GB", &bytes), -EINVAL);
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "units are powers of 1024, K or KiB"));
	ck_assert_int_eq(tool_size("1gb", &bytes), -EINVAL);
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "units are powers of 1024, K or KiB"));
	ck_assert_int_eq(tool_size("1GiBs", &bytes), -EINVAL);
	ck_assert_ptr_null(strstr(kvt_last_error(), "powers"));
}
END_TEST

START_TEST(real)
{
	static const char *const wrong[] = { "", " 1", "1 ", "0x10", "nan", "inf", "infinity", "1e999", "1,5", "e", "-", "--1" };
	double x = 99;

	for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
		ck_assert_msg(tool_real("--top-p", wrong[i], &x) == -EINVAL, "%s", wrong[i]);
		ck_assert_ptr_nonnull(strstr(kvt_last_error(), "--top-p"));
	}
	ck_assert_int_eq(tool_real("--top-p", "0.25", &x), 0);
	ck_assert(x == 0.25);
	ck_assert_int_eq(tool_real("--top-p", "-1e-3", &x), 0);
	ck_assert(x == -1e-3);
	ck_assert_int_eq(tool_real("--top-p", "-inf", &x), 0);
	ck_assert(x == -INFINITY);
}
END_TEST

/* The library's words become the command's, where they are words. */
START_TEST(messages)
{
	static const struct tool_word words[] = { { "ram_bytes", "--ram-bytes" }, { "a disk budget", "--disk-bytes" }, { 0 } };
	char buf[64], small[16];

	ck_assert_str_eq(tool_message("raise ram_bytes", buf, sizeof(buf)), "raise ram_bytes");
	tool_words = words;
	ck_assert_str_eq(tool_message("ram_bytes is 0: raise ram_bytes, or give a disk budget", buf, sizeof(buf)),
			 "--ram-bytes is 0: raise --ram-bytes, or give --disk-bytes");
	ck_assert_str_eq(tool_message("(ram_bytes) my_ram_bytes ram_bytes_2 /ram_bytes", buf, sizeof(buf)),
			 "(--ram-bytes) my_ram_bytes ram_bytes_2 /ram_bytes");
	ck_assert_str_eq(tool_message("1234567890 ram_bytes is", small, sizeof(small)), "1234567890 --ra");
	ck_assert_str_eq(tool_message("123456789012345678", small, sizeof(small)), "123456789012345");
	tool_words = NULL;
}
END_TEST

START_TEST(number)
{
	static const char *const wrong[] = { "", "0", "1025", "-1", "7x", "1.0", "2.5", "1K", "99999999999999999999" };
	uint64_t n = 99;

	for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
		ck_assert_int_eq(tool_number("--threads", wrong[i], 1, 1024, &n), -EINVAL);
		ck_assert_uint_eq(n, 99);
		ck_assert_ptr_nonnull(strstr(kvt_last_error(), "--threads"));
		ck_assert_ptr_nonnull(strstr(kvt_last_error(), "1 to 1024"));
	}
	ck_assert_int_eq(tool_number("--threads", "1", 1, 1024, &n), 0);
	ck_assert_uint_eq(n, 1);
	ck_assert_int_eq(tool_number("--threads", "1024", 1, 1024, &n), 0);
	ck_assert_uint_eq(n, 1024);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("tools_args");
	TCase *t = tcase_create("args");
	SRunner *r = srunner_create(s);
	int failed;

	tcase_add_loop_test(t, size_read, 0, sizeof(sizes) / sizeof(sizes[0]));
	tcase_add_loop_test(t, size_refused, 0, sizeof(not_sizes) / sizeof(not_sizes[0]));
	tcase_add_test(t, ambiguous_units);
	tcase_add_test(t, number);
	tcase_add_test(t, real);
	tcase_add_test(t, messages);
	suite_add_tcase(s, t);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed ? 1 : 0;
}
