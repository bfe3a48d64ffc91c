// SPDX-License-Identifier: MIT
/* Progress: a bar with its numbers on a terminal; elsewhere not one byte, or a line now and then where it is asked for. */
#include <check.h>
#include <fcntl.h>
#include <pty.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tools/tools.h"

/* Run a whole bar with stderr being @fd, then put stderr back. */
static void run_bar(int fd, enum tool_progress_mode mode)
{
	int saved = dup(STDERR_FILENO);
	struct tool_progress p;

	dup2(fd, STDERR_FILENO);
	tool_progress_start(&p, mode, "prefill", "tokens", 32760);
	tool_progress_update(&p, 16380);
	for (int i = 0; i < 100000; i++)
		tool_progress_update(&p, 16380);
	tool_progress_update(&p, 32760);
	tool_progress_end(&p);
	dup2(saved, STDERR_FILENO);
	close(saved);
}

static ssize_t read_all(int fd, char *buf, size_t bytes)
{
	size_t at = 0;
	ssize_t n;

	fcntl(fd, F_SETFL, O_NONBLOCK);
	while (at < bytes - 1 && (n = read(fd, buf + at, bytes - 1 - at)) > 0)
		at += n;
	buf[at] = 0;
	return at;
}

START_TEST(not_a_terminal)
{
	char buf[64];
	int ends[2];

	ck_assert_int_eq(pipe(ends), 0);
	setenv("CI", "true", 1);
	run_bar(ends[1], TOOL_PROGRESS_NEVER);
	run_bar(ends[1], TOOL_PROGRESS_AUTO); /* it is over before a line is due */
	run_bar(ends[1], TOOL_PROGRESS_ALWAYS);
	ck_assert_int_eq(read_all(ends[0], buf, sizeof(buf)), 0);
}
END_TEST

/* What is asked for where there is no terminal: a line every ten seconds, and one at the end. */
START_TEST(lines)
{
	static const struct {
		const char *ci;
		enum tool_progress_mode mode;
		bool lines;
	} cases[] = { { "", TOOL_PROGRESS_ALWAYS, true }, { "true", TOOL_PROGRESS_AUTO, true },
		      { "false", TOOL_PROGRESS_AUTO, false }, { "true", TOOL_PROGRESS_NEVER, false } };
	int saved = dup(STDERR_FILENO), ends[2];
	struct tool_progress p;
	char buf[512];

	ck_assert_int_eq(pipe(ends), 0);
	setenv("CI", cases[_i].ci, 1);
	dup2(ends[1], STDERR_FILENO);
	tool_progress_start(&p, cases[_i].mode, "prefill", "tokens", 32760);
	tool_progress_update(&p, 100);
	p.start -= 10.5; /* as if so much time had passed */
	p.last -= 10.5;
	tool_progress_update(&p, 16380);
	tool_progress_update(&p, 20000);
	tool_progress_update(&p, 32760);
	tool_progress_end(&p);
	dup2(saved, STDERR_FILENO);
	read_all(ends[0], buf, sizeof(buf));
	if (!cases[_i].lines) {
		ck_assert_str_eq(buf, "");
		return;
	}
	ck_assert_ptr_eq(strstr(buf, "prefill  50 %  16.4K/32.8K tokens"), buf);
	ck_assert_ptr_nonnull(strstr(buf, " s left\nprefill 100 %  32.8K/32.8K tokens"));
	ck_assert_ptr_null(strstr(buf, "20.0K"));
	ck_assert_ptr_null(strpbrk(buf, "\r\033"));
}
END_TEST

/*
 * Where each token takes longer than the one before, what is left is not taken for as fast as what was: 32768 tokens of
 * which the first @from were there already; n tokens take a x n + b x n^2.
 */
START_TEST(what_is_left_takes_longer)
{
	static const struct {
		double from, a, b, left; /* at 16384; in seconds */
		bool grows;
	} cases[] = { { 0, 0, 64.0 / (1 << 30), 48, true }, { 0, 64.0 / (1 << 15), 0, 32, true },
		      { 0, 32.0 / (1 << 15), 64.0 / (1 << 30), 64, true }, { 8192, 0, 64.0 / (1 << 30), 48, true },
		      { 0, 64.0 / (1 << 15), 0, 32, false }, { 8192, 64.0 / (1 << 15), 0, 32, false } };
	int saved = dup(STDERR_FILENO), ends[2];
	struct tool_progress p;
	char buf[512], *at;
	double begin;

	ck_assert_int_eq(pipe(ends), 0);
	dup2(ends[1], STDERR_FILENO);
	tool_progress_start(&p, TOOL_PROGRESS_ALWAYS, "prefill", "tokens", 32768);
	p.from = (uint64_t)cases[_i].from;
	p.grows = cases[_i].grows;
	begin = p.start;
	for (double n = cases[_i].from + 512; n <= 16384; n += 512) {
		p.start = begin - cases[_i].a * (n - cases[_i].from) - cases[_i].b * (n * n - cases[_i].from * cases[_i].from);
		p.last -= n == 16384 ? 11 : 0; /* a line is due */
		tool_progress_update(&p, (uint64_t)n);
	}
	dup2(saved, STDERR_FILENO);
	read_all(ends[0], buf, sizeof(buf));
	at = strstr(buf, "/s  ");
	ck_assert_msg(at != NULL, "%s", buf);
	ck_assert_double_eq_tol(atof(at + 4), cases[_i].left, 3);
}
END_TEST

START_TEST(terminal)
{
	static char buf[65536];
	int master, slave, drawn = 0;

	ck_assert_int_eq(openpty(&master, &slave, NULL, NULL, NULL), 0);
	run_bar(slave, TOOL_PROGRESS_AUTO);
	ck_assert_int_gt(read_all(master, buf, sizeof(buf)), 0);
	for (char *p = buf; (p = strstr(p, "\rprefill [")); p++)
		drawn++;
	/* the start, the end, and in between ten a second however often it is told */
	ck_assert_int_ge(drawn, 2);
	ck_assert_int_le(drawn, 20);
	ck_assert_ptr_nonnull(strstr(buf, "  0 %  0/32.8K tokens"));
	ck_assert_ptr_nonnull(strstr(buf, "100 %  32.8K/32.8K tokens"));
	ck_assert_str_eq(buf + strlen(buf) - 2, "\r\n");
}
END_TEST

int main(void)
{
	Suite *s = suite_create("tools_progress");
	TCase *t = tcase_create("bar");
	SRunner *r = srunner_create(s);
	int failed;

	tcase_add_test(t, not_a_terminal);
	tcase_add_loop_test(t, lines, 0, 4);
	tcase_add_loop_test(t, what_is_left_takes_longer, 0, 6);
	tcase_add_test(t, terminal);
	suite_add_tcase(s, t);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed ? 1 : 0;
}
