// SPDX-License-Identifier: MIT
/*
 * Compute threads. A run is published by its number of indices; each thread
 * takes one after the other until none is left, and the run is over when those
 * that were taken are done: a thread that the machine has no core for holds
 * nobody up. Threads look for the next run for a moment before they sleep,
 * since an engine's runs follow closely.
 */
#include "base/workers.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"

#define STACK_BYTES (256u << 10)
#define SPINS 2000

/* What the calling thread is inside of: a run from within a run is done by the caller alone. */
static _Thread_local const struct kvt_workers *inside;

struct worker {
	struct kvt_workers *all;
	pthread_t thread;
	uint32_t index;
};

struct kvt_workers {
	uint32_t count;
	pthread_mutex_t turn; /* one run at a time; taken before lock */
	pthread_mutex_t lock;
	pthread_cond_t start, done;
	/*
	 * Who lowers left has index n - left, and may read what is above it here: nothing of a run
	 * changes until pending is 0. Both are 0 between runs.
	 */
	uint32_t n;
	kvt_work_fn fn;
	void *arg;
	atomic_uint left, pending;
	uint32_t asleep;
	atomic_bool stop;
	struct worker worker[];
};

static void pause_cpu(void)
{
#if defined(__x86_64__)
	__builtin_ia32_pause();
#elif defined(__aarch64__)
	__asm__ volatile("yield");
#endif
}

static void finished(struct kvt_workers *w)
{
	if (atomic_fetch_sub(&w->pending, 1) != 1)
		return;
	pthread_mutex_lock(&w->lock);
	pthread_cond_signal(&w->done);
	pthread_mutex_unlock(&w->lock);
}

static void work(struct kvt_workers *w, uint32_t index)
{
	const struct kvt_workers *outer = inside;
	unsigned int left = atomic_load(&w->left);

	inside = w;
	while (left) {
		if (!atomic_compare_exchange_weak(&w->left, &left, left - 1))
			continue;
		w->fn(w->arg, index, w->n - left);
		finished(w);
		left = atomic_load(&w->left);
	}
	inside = outer;
}

static bool idle(struct kvt_workers *w)
{
	return !atomic_load(&w->left) && !atomic_load(&w->stop);
}

static void *worker_main(void *arg)
{
	struct worker *me = arg;
	struct kvt_workers *w = me->all;

	for (;;) {
		for (int i = 0; i < SPINS && idle(w); i++)
			pause_cpu();
		if (idle(w)) {
			pthread_mutex_lock(&w->lock);
			w->asleep++;
			while (idle(w))
				pthread_cond_wait(&w->start, &w->lock);
			w->asleep--;
			pthread_mutex_unlock(&w->lock);
		}
		if (atomic_load(&w->stop))
			return NULL;
		work(w, me->index);
	}
}

static void wake(struct kvt_workers *w)
{
	pthread_mutex_lock(&w->lock);
	if (w->asleep)
		pthread_cond_broadcast(&w->start);
	pthread_mutex_unlock(&w->lock);
}

/* All of it by the caller, who is inside meanwhile. */
static void run_alone(struct kvt_workers *w, uint32_t n, kvt_work_fn fn, void *arg)
{
	const struct kvt_workers *outer = inside;

	inside = w;
	for (uint32_t i = 0; i < n; i++)
		fn(arg, 0, i);
	inside = outer;
}

/* In turn. */
static void run(struct kvt_workers *w, uint32_t n, kvt_work_fn fn, void *arg)
{
	if (w->count == 1 || n <= 1) {
		run_alone(w, n, fn, arg);
		return;
	}
	w->n = n;
	w->fn = fn;
	w->arg = arg;
	atomic_store(&w->pending, n);
	atomic_store(&w->left, n);
	wake(w);
	work(w, 0);
	for (int i = 0; i < SPINS && atomic_load(&w->pending); i++)
		pause_cpu();
	if (atomic_load(&w->pending)) {
		pthread_mutex_lock(&w->lock);
		while (atomic_load(&w->pending))
			pthread_cond_wait(&w->done, &w->lock);
		pthread_mutex_unlock(&w->lock);
	}
}

void kvt_workers_run(struct kvt_workers *w, uint32_t n, kvt_work_fn fn, void *arg)
{
	if (inside == w) {
		run_alone(w, n, fn, arg);
		return;
	}
	pthread_mutex_lock(&w->turn);
	run(w, n, fn, arg);
	pthread_mutex_unlock(&w->turn);
}

void kvt_workers_run_now(struct kvt_workers *w, uint32_t n, kvt_work_fn fn, void *arg)
{
	if (inside == w || pthread_mutex_trylock(&w->turn)) {
		run_alone(w, n, fn, arg);
		return;
	}
	run(w, n, fn, arg);
	pthread_mutex_unlock(&w->turn);
}

uint32_t kvt_cores(void)
{
	cpu_set_t set;
	int n = sched_getaffinity(0, sizeof(set), &set) ? 1 : CPU_COUNT(&set);

	return n < 1 ? 1 : (uint32_t)n;
}

uint64_t kvt_workers_bytes(uint32_t threads)
{
	return sizeof(struct kvt_workers) + threads * sizeof(struct worker) + (threads - 1) * (uint64_t)STACK_BYTES;
}

static void stop(struct kvt_workers *w, uint32_t started)
{
	atomic_store(&w->stop, true);
	wake(w);
	for (uint32_t i = 1; i < started; i++)
		pthread_join(w->worker[i].thread, NULL);
	pthread_cond_destroy(&w->start);
	pthread_cond_destroy(&w->done);
	pthread_mutex_destroy(&w->lock);
	pthread_mutex_destroy(&w->turn);
	free(w);
}

int kvt_workers_create(uint32_t threads, struct kvt_workers **workers)
{
	struct kvt_workers *w = calloc(1, sizeof(*w) + threads * sizeof(w->worker[0]));
	pthread_attr_t attr;
	int err = 0;

	if (!w)
		return kvt_fail(-ENOMEM, "no memory for %u threads", threads);
	pthread_mutex_init(&w->turn, NULL);
	pthread_mutex_init(&w->lock, NULL);
	pthread_cond_init(&w->start, NULL);
	pthread_cond_init(&w->done, NULL);
	w->count = threads;
	pthread_attr_init(&attr);
	pthread_attr_setstacksize(&attr, STACK_BYTES);
	for (uint32_t i = 1; i < threads && !err; i++) {
		w->worker[i] = (struct worker){ .all = w, .index = i };
		err = pthread_create(&w->worker[i].thread, &attr, worker_main, &w->worker[i]);
		if (err) {
			stop(w, i);
			kvt_fail(-err, "thread %u of %u could not be started (%s): ask for fewer threads, or raise ulimit -u",
				 i + 1, threads, strerror(err));
		}
	}
	pthread_attr_destroy(&attr);
	if (err)
		return -err;
	*workers = w;
	return 0;
}

void kvt_workers_destroy(struct kvt_workers *w)
{
	if (w)
		stop(w, w->count);
}

uint32_t kvt_workers_count(const struct kvt_workers *w)
{
	return w->count;
}
