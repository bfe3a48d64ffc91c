// SPDX-License-Identifier: MIT
/* Transfers by a few threads that read and write: for where io_uring is denied. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/err.h"
#include "host/io.h"

#define STACK_BYTES (128u << 10)

struct threads {
	struct kvt_io io;
	pthread_cond_t work; /* with io.lock, as all below */
	uint32_t *queue;     /* [depth] a ring of requests that have not started */
	uint32_t head, n_queued;
	bool stop;
	uint32_t n_workers;
	pthread_t worker[];
};

static void transfer(struct kvt_req *req)
{
	const struct kvt_file *file = req->x.file;
	ssize_t n;

	do {
		if (req->x.op == KVT_XFER_READ)
			n = pread(file->fd, kvt_req_data(req), req->want - req->done, (off_t)kvt_req_offset(req));
		else
			n = pwrite(file->fd, kvt_req_data(req), req->want - req->done, (off_t)kvt_req_offset(req));
	} while (kvt_req_step(req, n < 0 ? -errno : n));
	if (file->drop_cache && !req->result)
		posix_fadvise(file->fd, (off_t)(req->x.slot * file->frame_bytes), (off_t)file->frame_bytes,
			      POSIX_FADV_DONTNEED);
}

static void *work(void *arg)
{
	struct threads *t = arg;
	uint32_t id;

	pthread_mutex_lock(&t->io.lock);
	for (;;) {
		while (!t->n_queued && !t->stop)
			pthread_cond_wait(&t->work, &t->io.lock);
		if (!t->n_queued)
			break;
		id = t->queue[t->head];
		t->head = (t->head + 1) % t->io.depth;
		t->n_queued--;
		pthread_mutex_unlock(&t->io.lock);
		transfer(&t->io.reqs[id]);
		kvt_io_end(&t->io, id, t->io.reqs[id].result);
		pthread_mutex_lock(&t->io.lock);
	}
	pthread_mutex_unlock(&t->io.lock);
	return NULL;
}

static void threads_start(struct kvt_io *io, const uint32_t *ids, uint32_t n)
{
	struct threads *t = (struct threads *)io;
	uint32_t i;

	pthread_mutex_lock(&io->lock);
	for (i = 0; i < n; i++)
		t->queue[(t->head + t->n_queued++) % io->depth] = ids[i];
	pthread_mutex_unlock(&io->lock);
	if (n == 1)
		pthread_cond_signal(&t->work);
	else
		pthread_cond_broadcast(&t->work);
}

static void threads_poll(struct kvt_io *io)
{
	(void)io; /* the workers end their requests themselves */
}

static void threads_wait(struct kvt_io *io)
{
	pthread_mutex_lock(&io->lock);
	while (io->n_busy)
		pthread_cond_wait(&io->idle, &io->lock);
	pthread_mutex_unlock(&io->lock);
}

static int threads_cancel(struct kvt_io *io, uint64_t user)
{
	struct threads *t = (struct threads *)io;
	uint32_t i, id, kept = 0, n;

	pthread_mutex_lock(&io->lock);
	n = t->n_queued;
	for (i = 0; i < n; i++) {
		id = t->queue[(t->head + i) % io->depth];
		if (io->reqs[id].x.user == user)
			kvt_io_end_locked(io, id, -ECANCELED);
		else
			t->queue[(t->head + kept++) % io->depth] = id;
	}
	t->n_queued = kept;
	pthread_mutex_unlock(&io->lock);
	if (kept == n)
		return 0;
	kvt_io_signal(io);
	return 1;
}

static void ignore_pool(struct kvt_io *io, struct kvt_user_pool *pool)
{
	(void)io;
	(void)pool;
}

static void ignore_new_file(struct kvt_io *io, struct kvt_file *file, uint32_t index)
{
	(void)io;
	(void)file;
	(void)index;
}

static void ignore_old_file(struct kvt_io *io, struct kvt_file *file)
{
	(void)io;
	(void)file;
}

static void threads_close(struct kvt_io *io)
{
	struct threads *t = (struct threads *)io;
	uint32_t i;

	pthread_mutex_lock(&io->lock);
	t->stop = true;
	pthread_mutex_unlock(&io->lock);
	pthread_cond_broadcast(&t->work);
	for (i = 0; i < t->n_workers; i++)
		pthread_join(t->worker[i], NULL);
	pthread_cond_destroy(&t->work);
	free(t->queue);
	kvt_io_exit(io);
	free(t);
}

static const struct kvt_io_ops threads_ops = {
	.start = threads_start,
	.poll = threads_poll,
	.wait = threads_wait,
	.cancel = threads_cancel,
	.pool_added = ignore_pool,
	.pool_removed = ignore_pool,
	.file_added = ignore_new_file,
	.file_removed = ignore_old_file,
	.close = threads_close,
};

/* The host's signals are not for these threads: they start with all of them blocked. */
static int spawn(struct threads *t, uint32_t workers)
{
	pthread_attr_t attr;
	sigset_t all, before;
	int ret;

	pthread_attr_init(&attr);
	ret = pthread_attr_setstacksize(&attr, STACK_BYTES);
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	while (!ret && t->n_workers < workers) {
		ret = pthread_create(&t->worker[t->n_workers], &attr, work, t);
		if (!ret)
			t->n_workers++;
	}
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	pthread_attr_destroy(&attr);
	return -ret;
}

uint64_t kvt_threads_bytes(uint32_t depth, uint32_t workers)
{
	return sizeof(struct threads) + kvt_io_bytes(depth) + depth * sizeof(uint32_t) +
	       (uint64_t)workers * (sizeof(pthread_t) + STACK_BYTES);
}

int kvt_threads_open(uint32_t depth, uint32_t workers, int eventfd, struct kvt_io **io)
{
	struct threads *t = calloc(1, sizeof(*t) + workers * sizeof(t->worker[0]));
	int ret;

	if (!t)
		return kvt_fail(-ENOMEM, "I/O threads: no memory for %u", workers);
	ret = kvt_io_init(&t->io, &threads_ops, depth, eventfd);
	if (ret < 0)
		goto free_threads;
	t->queue = malloc(depth * sizeof(t->queue[0]));
	if (!t->queue) {
		ret = kvt_fail(-ENOMEM, "I/O threads: no memory for a queue of %u", depth);
		goto exit_io;
	}
	pthread_cond_init(&t->work, NULL);
	ret = spawn(t, workers);
	if (ret < 0) {
		kvt_fail(ret, "I/O threads: %u of %u started: %s: ulimit -u, or the cgroup's pids.max", t->n_workers,
			 workers, strerror(-ret));
		threads_close(&t->io);
		return ret;
	}
	*io = &t->io;
	return 0;

exit_io:
	kvt_io_exit(&t->io);
free_threads:
	free(t);
	return ret;
}
