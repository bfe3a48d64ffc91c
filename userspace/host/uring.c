// SPDX-License-Identifier: MIT
/*
 * Transfers by io_uring. Any thread may submit and any may reap, so the two rings have a
 * mutex each. Neither ring can overflow: a request has one entry at a time, and there are
 * no more requests than entries.
 */
#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/err.h"
#include "host/size.h"
#include "host/user.h"

#define BATCH 64u
#define MAX_BUFS 256u
#define MAX_BUF_BYTES (1ull << 30) /* the kernel's limit for one registered buffer */
#define MAX_FILES 16u

struct uring {
	struct kvt_io io;
	struct io_uring ring;
	pthread_mutex_t sq_lock; /* the submission side of @ring */
	pthread_mutex_t cq_lock; /* its completion side; neither is taken inside the other */
	atomic_bool stuck;	 /* the kernel had no memory to take all entries */
	/* The kernel orders a submission before its completion; this says so to the C memory model. */
	atomic_uint handed;
	bool fixed_bufs, fixed_files;
	pthread_mutex_t buf_lock; /* @buf_used */
	uint8_t buf_used[MAX_BUFS];
};

static void prepare(struct uring *u, uint32_t id)
{
	const struct kvt_req *req = &u->io.reqs[id];
	const struct kvt_user_pool *pool = (const struct kvt_user_pool *)req->x.pool;
	const struct kvt_file *file = req->x.file;
	struct io_uring_sqe *sqe = io_uring_get_sqe(&u->ring);
	int fd = file->fixed >= 0 ? file->fixed : file->fd;
	unsigned int bytes = req->want - req->done;
	uint64_t offset = kvt_req_offset(req);
	void *data = kvt_req_data(req);
	int buf = pool->buf_first < 0 ? -1 : pool->buf_first + (int)(req->x.frame / pool->buf_frames);

	if (req->advising)
		io_uring_prep_fadvise(sqe, fd, req->x.slot * file->frame_bytes, (off_t)file->frame_bytes,
				      POSIX_FADV_DONTNEED);
	else if (req->x.op == KVT_XFER_READ && buf >= 0)
		io_uring_prep_read_fixed(sqe, fd, data, bytes, offset, buf);
	else if (req->x.op == KVT_XFER_READ)
		io_uring_prep_read(sqe, fd, data, bytes, offset);
	else if (buf >= 0)
		io_uring_prep_write_fixed(sqe, fd, data, bytes, offset, buf);
	else
		io_uring_prep_write(sqe, fd, data, bytes, offset);
	if (file->fixed >= 0)
		io_uring_sqe_set_flags(sqe, IOSQE_FIXED_FILE);
	io_uring_sqe_set_data64(sqe, id);
}

/* The kernel takes no more entries, ever (a seccomp filter that came late): they end with @err. */
static void withdraw(struct uring *u, int err)
{
	struct io_uring_sq *sq = &u->ring.sq;
	unsigned int head = *sq->khead, i;

	for (i = head; i != sq->sqe_tail; i++)
		kvt_io_end(&u->io, (uint32_t)sq->sqes[i & sq->ring_mask].user_data, err);
	sq->sqe_head = sq->sqe_tail = head;
	atomic_store_explicit((_Atomic unsigned int *)sq->ktail, head, memory_order_release);
}

/* With sq_lock. */
static void flush(struct uring *u)
{
	int ret;

	do {
		ret = io_uring_submit(&u->ring);
	} while (ret == -EINTR || (ret > 0 && io_uring_sq_ready(&u->ring)));
	if (ret < 0 && ret != -EAGAIN && ret != -EBUSY)
		withdraw(u, ret);
	atomic_store(&u->stuck, io_uring_sq_ready(&u->ring) != 0);
	if (atomic_load(&u->stuck))
		kvt_io_signal(&u->io); /* whoever waits tries again */
}

static void uring_start(struct kvt_io *io, const uint32_t *ids, uint32_t n)
{
	struct uring *u = (struct uring *)io;
	uint32_t i;

	pthread_mutex_lock(&u->sq_lock);
	for (i = 0; i < n; i++)
		prepare(u, ids[i]);
	atomic_fetch_add_explicit(&u->handed, 1, memory_order_release);
	flush(u);
	pthread_mutex_unlock(&u->sq_lock);
}

/* Returns whether the request needs another entry. With io.lock. */
static bool settle(struct kvt_io *io, uint32_t id, int32_t res)
{
	struct kvt_req *req = &io->reqs[id];

	if (!req->advising && kvt_req_step(req, res))
		return true;
	if (req->x.file->drop_cache && !req->result && !req->advising) {
		req->advising = true;
		return true;
	}
	kvt_io_end_locked(io, id, req->result);
	return false;
}

static void uring_poll(struct kvt_io *io)
{
	struct uring *u = (struct uring *)io;
	struct io_uring_cqe *cqes[BATCH];
	uint32_t ids[BATCH], again;
	int32_t res[BATCH];
	unsigned int n, i;

	if (atomic_load(&u->stuck)) {
		pthread_mutex_lock(&u->sq_lock);
		flush(u);
		pthread_mutex_unlock(&u->sq_lock);
	}
	do {
		pthread_mutex_lock(&u->cq_lock);
		n = io_uring_peek_batch_cqe(&u->ring, cqes, BATCH);
		for (i = 0; i < n; i++) {
			ids[i] = (uint32_t)cqes[i]->user_data;
			res[i] = cqes[i]->res;
		}
		io_uring_cq_advance(&u->ring, n);
		pthread_mutex_unlock(&u->cq_lock);
		(void)atomic_load_explicit(&u->handed, memory_order_acquire);
		again = 0;
		pthread_mutex_lock(&io->lock);
		for (i = 0; i < n; i++)
			if (settle(io, ids[i], res[i]))
				ids[again++] = ids[i];
		pthread_mutex_unlock(&io->lock);
		if (again)
			uring_start(io, ids, again);
	} while (n == BATCH);
}

static void uring_wait(struct kvt_io *io)
{
	struct uring *u = (struct uring *)io;
	/* Bounded: another thread may take the completion that was waited for. */
	struct __kernel_timespec ts = { .tv_nsec = 10 * 1000 * 1000 };
	struct io_uring_getevents_arg arg = { .ts = (uintptr_t)&ts };

	if (io_uring_enter2((unsigned int)u->ring.ring_fd, 0, 1, IORING_ENTER_GETEVENTS | IORING_ENTER_EXT_ARG,
			    (sigset_t *)&arg, sizeof(arg)) == -EPERM)
		usleep(1000); /* as withdraw(): what is in flight still arrives */
}

static int uring_cancel(struct kvt_io *io, uint64_t user)
{
	struct uring *u = (struct uring *)io;
	int cancelled = 0;
	uint32_t id;
	bool match;

	for (id = 0; id < io->depth; id++) {
		struct io_uring_sync_cancel_reg reg = { .addr = id, .fd = -1 };

		pthread_mutex_lock(&io->lock);
		match = io->reqs[id].busy && io->reqs[id].x.user == user;
		if (match)
			io->reqs[id].cancel = true;
		pthread_mutex_unlock(&io->lock);
		/* Kernels before 6.0 do not know this: then it is past being cancelled. */
		if (match && !io_uring_register_sync_cancel(&u->ring, &reg))
			cancelled = 1;
	}
	return cancelled;
}

/* First fit of @n entries of the buffer table, or -1. With buf_lock. */
static int32_t find_bufs(const struct uring *u, uint32_t n)
{
	uint32_t i, run = 0;

	for (i = 0; i < MAX_BUFS; i++) {
		run = u->buf_used[i] ? 0 : run + 1;
		if (run == n)
			return (int32_t)(i + 1 - n);
	}
	return -1;
}

static void clear_bufs(struct uring *u, int32_t first, uint32_t n)
{
	struct iovec none = { 0 };
	uint32_t i;

	for (i = 0; i < n; i++) {
		io_uring_register_buffers_update_tag(&u->ring, (unsigned int)first + i, &none, NULL, 1);
		u->buf_used[(uint32_t)first + i] = 0;
	}
}

/* Registered buffers spare the kernel a look-up of pages for each transfer. Where it refuses, plain ones serve. */
static void uring_pool_added(struct kvt_io *io, struct kvt_user_pool *pool)
{
	struct uring *u = (struct uring *)io;
	const uint64_t frame_bytes = pool->pool.frame_bytes;
	uint32_t i, n, left, frames = (uint32_t)(MAX_BUF_BYTES / frame_bytes);
	struct iovec iov;
	int32_t first;

	n = pool->pool.n_frames / frames + (pool->pool.n_frames % frames != 0);
	if (!u->fixed_bufs || !pool->pool.pinned || n > MAX_BUFS)
		return;
	pthread_mutex_lock(&u->buf_lock);
	first = find_bufs(u, n);
	for (i = 0; first >= 0 && i < n; i++) {
		left = pool->pool.n_frames - i * frames;
		iov.iov_base = pool->pool.base + i * frames * frame_bytes;
		iov.iov_len = (left < frames ? left : frames) * frame_bytes;
		if (io_uring_register_buffers_update_tag(&u->ring, (unsigned int)first + i, &iov, NULL, 1) < 0) {
			clear_bufs(u, first, i);
			first = -1;
		} else {
			u->buf_used[(uint32_t)first + i] = 1;
		}
	}
	pool->buf_first = first;
	pool->n_bufs = n;
	pool->buf_frames = frames;
	pthread_mutex_unlock(&u->buf_lock);
}

static void uring_pool_removed(struct kvt_io *io, struct kvt_user_pool *pool)
{
	struct uring *u = (struct uring *)io;

	if (pool->buf_first < 0)
		return;
	pthread_mutex_lock(&u->buf_lock);
	clear_bufs(u, pool->buf_first, pool->n_bufs);
	pthread_mutex_unlock(&u->buf_lock);
	pool->buf_first = -1;
}

static void uring_file_added(struct kvt_io *io, struct kvt_file *file, uint32_t index)
{
	struct uring *u = (struct uring *)io;

	if (u->fixed_files && index < MAX_FILES && io_uring_register_files_update(&u->ring, index, &file->fd, 1) == 1)
		file->fixed = (int32_t)index;
}

static void uring_file_removed(struct kvt_io *io, struct kvt_file *file)
{
	struct uring *u = (struct uring *)io;
	int none = -1;

	if (file->fixed >= 0)
		io_uring_register_files_update(&u->ring, (unsigned int)file->fixed, &none, 1);
	file->fixed = -1;
}

static void uring_close(struct kvt_io *io)
{
	struct uring *u = (struct uring *)io;

	/* By name: a child of fork() may keep the ring's descriptor alive. */
	if (u->fixed_bufs)
		io_uring_unregister_buffers(&u->ring);
	if (u->fixed_files)
		io_uring_unregister_files(&u->ring);
	io_uring_queue_exit(&u->ring);
	pthread_mutex_destroy(&u->buf_lock);
	pthread_mutex_destroy(&u->cq_lock);
	pthread_mutex_destroy(&u->sq_lock);
	kvt_io_exit(io);
	free(u);
}

static const struct kvt_io_ops uring_ops = {
	.start = uring_start,
	.poll = uring_poll,
	.wait = uring_wait,
	.cancel = uring_cancel,
	.pool_added = uring_pool_added,
	.pool_removed = uring_pool_removed,
	.file_added = uring_file_added,
	.file_removed = uring_file_removed,
	.close = uring_close,
};

static int denied(int err)
{
	struct rlimit limit = { .rlim_cur = RLIM_INFINITY };
	int level = 0;
	FILE *f;

	if (err == -ENOMEM) {
		/* Counted by user, not by process: rings since 6.13 and before 5.12, registered buffers always. */
		getrlimit(RLIMIT_MEMLOCK, &limit);
		return kvt_fail(err, "io_uring: %s for its rings; RLIMIT_MEMLOCK is %s for all of this user's: "
				"ulimit -l, or LimitMEMLOCK=, or io=threads", strerror(ENOMEM),
				limit.rlim_cur == RLIM_INFINITY ? "unlimited" : kvt_size_text(limit.rlim_cur).s);
	}
	if (err == -ENOSYS)
		return kvt_fail(err, "io_uring: this kernel has none, or seccomp hides it: io=threads");
	if (err != -EPERM && err != -EACCES)
		return kvt_fail(err, "io_uring: %s: io=threads", strerror(-err));
	f = fopen("/proc/sys/kernel/io_uring_disabled", "re");
	if (f && fscanf(f, "%d", &level) != 1)
		level = 0;
	if (f)
		fclose(f);
	if (level)
		return kvt_fail(-EPERM, "io_uring: kernel.io_uring_disabled is %d: sysctl kernel.io_uring_disabled=0, "
				"or io=threads", level);
	return kvt_fail(-EPERM, "io_uring: denied by seccomp: a container's profile that allows io_uring_*, or io=threads");
}

static uint32_t ring_entries(uint32_t depth)
{
	uint32_t n = 1;

	while (n < depth)
		n *= 2;
	return n;
}

static uint64_t whole_pages(uint64_t bytes)
{
	return (bytes + 4095) / 4096 * 4096;
}

/* The rings as the kernel lays them out: entries; then heads and tails, completions (twice as many), indices. */
static uint64_t ring_bytes(uint32_t entries)
{
	return whole_pages(entries * sizeof(struct io_uring_sqe)) +
	       whole_pages(512 + 2 * (uint64_t)entries * sizeof(struct io_uring_cqe) + entries * sizeof(uint32_t));
}

uint64_t kvt_uring_bytes(uint32_t depth)
{
	return sizeof(struct uring) + kvt_io_bytes(depth) + ring_bytes(ring_entries(depth));
}

int kvt_uring_open(uint32_t depth, int eventfd, struct kvt_io **io)
{
	struct uring *u = calloc(1, sizeof(*u));
	int ret;

	if (!u)
		return kvt_fail(-ENOMEM, "io_uring: no memory");
	ret = kvt_io_init(&u->io, &uring_ops, depth, eventfd);
	if (ret < 0)
		goto free_uring;
	ret = io_uring_queue_init(ring_entries(depth), &u->ring, 0);
	if (ret < 0) {
		ret = denied(ret);
		goto exit_io;
	}
	if (!(u->ring.features & IORING_FEAT_EXT_ARG)) {
		ret = kvt_fail(-ENOSYS, "io_uring: needs Linux 5.11: io=threads");
		goto exit_ring;
	}
	ret = io_uring_ring_dontfork(&u->ring);
	if (!ret)
		ret = io_uring_register_eventfd(&u->ring, eventfd);
	if (ret < 0) {
		ret = denied(ret);
		goto exit_ring;
	}
	u->fixed_bufs = !io_uring_register_buffers_sparse(&u->ring, MAX_BUFS);
	u->fixed_files = !io_uring_register_files_sparse(&u->ring, MAX_FILES);
	pthread_mutex_init(&u->sq_lock, NULL);
	pthread_mutex_init(&u->cq_lock, NULL);
	pthread_mutex_init(&u->buf_lock, NULL);
	*io = &u->io;
	return 0;

exit_ring:
	io_uring_queue_exit(&u->ring);
exit_io:
	kvt_io_exit(&u->io);
free_uring:
	free(u);
	return ret;
}
