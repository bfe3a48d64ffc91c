// SPDX-License-Identifier: MIT
/* Compute threads: each index once, by one thread at a time; a run waits for its work, not for threads without a core. */
#include <check.h>
#include <dirent.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/workers.h"
#include "lib/rounds.h"

#define THREADS 7
#define MOST 64

struct sheet {
	struct kvt_workers *w;
	uint32_t done[MOST];
	atomic_bool at[THREADS]; /* a thread is in fn by this name */
	atomic_uint wrong, by_others;
};

static void mark(void *arg, uint32_t worker, uint32_t i)
{
	struct sheet *s = arg;

	if (worker >= THREADS || atomic_exchange(&s->at[worker], true))
		s->wrong++;
	s->done[i]++; /* of one thread alone */
	s->by_others += worker > 0;
	atomic_store(&s->at[worker], false);
}

/* From within: the caller does it all. */
static void mark_all(void *arg, uint32_t worker, uint32_t i)
{
	struct sheet *s = arg;
	struct sheet inner = { .w = s->w };

	mark(s, worker, i);
	kvt_workers_run(s->w, 5, mark, &inner);
	for (uint32_t k = 0; k < 5; k++)
		s->wrong += inner.done[k] != 1;
	s->wrong += inner.by_others > 0;
}

static void *many_runs(void *arg)
{
	struct kvt_workers *w = arg;
	uintptr_t wrong = 0;

	for (uint32_t round = 0; round < test_rounds(20000, 4000, 2000); round++) {
		struct sheet s = { .w = w };
		uint32_t n = round * 7919 % (MOST + 1);

		kvt_workers_run(w, n, round % 16 ? mark : mark_all, &s);
		for (uint32_t i = 0; i < MOST; i++)
			wrong += s.done[i] != (i < n);
		wrong += s.wrong;
	}
	return (void *)wrong;
}

START_TEST(each_index_once)
{
	struct kvt_workers *w;
	pthread_t other;
	void *wrong;

	ck_assert_int_eq(kvt_workers_create(THREADS, &w), 0);
	ck_assert_uint_eq(kvt_workers_count(w), THREADS);
	ck_assert_int_eq(pthread_create(&other, NULL, many_runs, w), 0);
	ck_assert_ptr_null(many_runs(w));
	ck_assert_int_eq(pthread_join(other, &wrong), 0);
	ck_assert_ptr_null(wrong);
	kvt_workers_destroy(w);
}
END_TEST

static int gate[2];
static atomic_uint held;

static void hold(int signal)
{
	char byte;

	(void)signal;
	held++;
	while (read(gate[0], &byte, 1) < 0)
		;
}

/* Every thread but the caller stands still, as where others have all cores; the work is done all the same. */
START_TEST(threads_without_a_core_hold_nobody_up)
{
	pid_t self = (pid_t)syscall(SYS_gettid);
	struct sheet s = { 0 };
	struct kvt_workers *w;
	struct dirent *e;
	uint32_t sent = 0;
	DIR *tasks;

	ck_assert_int_eq(pipe(gate), 0);
	signal(SIGUSR1, hold);
	ck_assert_int_eq(kvt_workers_create(THREADS, &w), 0);
	tasks = opendir("/proc/self/task");
	ck_assert_ptr_nonnull(tasks);
	while ((e = readdir(tasks))) {
		pid_t task = atoi(e->d_name);

		if (task > 0 && task != self)
			sent += !syscall(SYS_tgkill, getpid(), task, SIGUSR1);
	}
	closedir(tasks);
	ck_assert_uint_ge(sent, THREADS - 1); /* a sanitizer has one of its own */
	while (held < THREADS - 1)
		usleep(1000);
	for (int round = 0; round < 3; round++)
		kvt_workers_run(w, MOST, mark, &s);
	ck_assert_uint_eq(s.by_others, 0);
	for (uint32_t i = 0; i < MOST; i++)
		ck_assert_uint_eq(s.done[i], 3);
	close(gate[1]);
	kvt_workers_destroy(w);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("workers");
	TCase *t = tcase_create("runs");
	SRunner *r = srunner_create(s);
	int failed;

	tcase_add_test(t, each_index_once);
	tcase_add_test(t, threads_without_a_core_hold_nobody_up);
	suite_add_tcase(s, t);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
