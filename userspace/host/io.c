// SPDX-License-Identifier: MIT
/* Transfers in flight: see io.h. */
#include "host/io.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/err.h"

#define BATCH 64u /* requests handed to the engine at a time */
#define MAX_STALLS 16u

uint64_t kvt_io_bytes(uint32_t depth)
{
	return (uint64_t)depth * (sizeof(struct kvt_req) + 2 * sizeof(uint32_t));
}

int kvt_io_init(struct kvt_io *io, const struct kvt_io_ops *ops, uint32_t depth, int eventfd)
{
	uint32_t i;

	io->reqs = calloc(1, kvt_io_bytes(depth));
	if (!io->reqs)
		return kvt_fail(-ENOMEM, "transfers in flight: no memory for a table of %u", depth);
	io->ops = ops;
	io->eventfd = eventfd;
	io->depth = depth;
	io->free = (uint32_t *)(io->reqs + depth);
	io->ended = io->free + depth;
	for (i = 0; i < depth; i++)
		io->free[i] = depth - 1 - i;
	io->n_free = depth;
	io->ended_head = io->n_ended = io->n_busy = 0;
	pthread_mutex_init(&io->lock, NULL);
	pthread_cond_init(&io->idle, NULL);
	return 0;
}

void kvt_io_exit(struct kvt_io *io)
{
	pthread_cond_destroy(&io->idle);
	pthread_mutex_destroy(&io->lock);
	free(io->reqs);
}

void kvt_io_signal(struct kvt_io *io)
{
	/* Refused only where the counter is about to overflow: then it is readable already. */
	if (eventfd_write(io->eventfd, 1) < 0)
		return;
}

void kvt_io_end_locked(struct kvt_io *io, uint32_t id, int32_t result)
{
	io->reqs[id].result = result;
	io->reqs[id].busy = false;
	io->ended[(io->ended_head + io->n_ended++) % io->depth] = id;
	if (!--io->n_busy)
		pthread_cond_broadcast(&io->idle);
}

void kvt_io_end(struct kvt_io *io, uint32_t id, int32_t result)
{
	bool first;

	pthread_mutex_lock(&io->lock);
	first = !io->n_ended;
	kvt_io_end_locked(io, id, result);
	pthread_mutex_unlock(&io->lock);
	if (first)
		kvt_io_signal(io);
}

bool kvt_req_step(struct kvt_req *req, ssize_t ret)
{
	uint32_t align = req->x.file->info.direct ? req->x.file->info.offset_align : 1;
	uint32_t before = req->done;

	if (ret < 0) {
		/* Only some other thread's end or a busy moment: nothing has been said about the bytes. */
		if ((ret == -EINTR || ret == -EAGAIN || (ret == -ECANCELED && !req->cancel)) &&
		    ++req->stalls < MAX_STALLS)
			return true;
		req->result = (int32_t)ret;
		return false;
	}
	if ((uint64_t)ret >= req->want - req->done) {
		req->done = req->want;
		req->result = 0;
		return false;
	}
	/* A direct transfer goes on from the last aligned byte. */
	req->done = (uint32_t)((before + ret) / align * align);
	if (req->done > before)
		req->stalls = 0;
	else if (!ret || ++req->stalls >= MAX_STALLS) {
		req->result = -EIO;
		return false;
	}
	return true;
}

/* Returns how many entries of the table were taken and filled. */
static uint32_t take(struct kvt_io *io, const struct kvt_xfer *xfers, uint32_t n, uint32_t *ids)
{
	uint32_t i, align;

	pthread_mutex_lock(&io->lock);
	if (n > io->n_free)
		n = io->n_free;
	for (i = 0; i < n; i++) {
		struct kvt_req *req = &io->reqs[ids[i] = io->free[--io->n_free]];

		align = xfers[i].file->info.direct ? xfers[i].file->info.offset_align : 1;
		*req = (struct kvt_req){ .x = xfers[i], .busy = true };
		req->want = (xfers[i].bytes + align - 1) / align * align;
	}
	io->n_busy += n;
	pthread_mutex_unlock(&io->lock);
	return n;
}

/*
 * A write past RLIMIT_FSIZE raises SIGXFSZ, which by default ends the process, and a library
 * must not touch its host's signal dispositions. So such a write is never issued.
 */
static uint32_t refuse_beyond_limit(struct kvt_io *io, uint32_t *ids, uint32_t n)
{
	struct rlimit limit = { .rlim_cur = RLIM_INFINITY };
	uint32_t i, kept = 0;

	getrlimit(RLIMIT_FSIZE, &limit);
	if (limit.rlim_cur == RLIM_INFINITY)
		return n;
	for (i = 0; i < n; i++) {
		const struct kvt_req *req = &io->reqs[ids[i]];

		if (req->x.op == KVT_XFER_WRITE && kvt_req_offset(req) + req->want > limit.rlim_cur)
			kvt_io_end(io, ids[i], -EFBIG);
		else
			ids[kept++] = ids[i];
	}
	return kept;
}

int kvt_io_submit(struct kvt_io *io, const struct kvt_xfer *xfers, uint32_t n)
{
	uint32_t ids[BATCH], taken, started, total = 0;

	do {
		taken = take(io, xfers + total, n - total < BATCH ? n - total : BATCH, ids);
		started = refuse_beyond_limit(io, ids, taken);
		if (started)
			io->ops->start(io, ids, started);
		total += taken;
	} while (taken == BATCH && total < n);
	return (int)total;
}

static uint32_t take_ended(struct kvt_io *io, struct kvt_done *done, uint32_t n)
{
	uint32_t i, id;

	pthread_mutex_lock(&io->lock);
	for (i = 0; i < n && io->n_ended; i++) {
		id = io->ended[io->ended_head];
		io->ended_head = (io->ended_head + 1) % io->depth;
		io->n_ended--;
		done[i] = (struct kvt_done){ .user = io->reqs[id].x.user, .result = io->reqs[id].result };
		io->free[io->n_free++] = id;
	}
	pthread_mutex_unlock(&io->lock);
	return i;
}

static void signal_if_ended(struct kvt_io *io)
{
	bool any;

	pthread_mutex_lock(&io->lock);
	any = io->n_ended;
	pthread_mutex_unlock(&io->lock);
	if (any)
		kvt_io_signal(io);
}

int kvt_io_reap(struct kvt_io *io, struct kvt_done *done, uint32_t n)
{
	eventfd_t count;
	uint32_t got;

	io->ops->poll(io);
	got = take_ended(io, done, n);
	if (got < n && eventfd_read(io->eventfd, &count) == 0) {
		/* What ended before the eventfd was cleared is looked for once more. */
		io->ops->poll(io);
		got += take_ended(io, done + got, n - got);
	}
	signal_if_ended(io);
	return (int)got;
}

void kvt_io_drain(struct kvt_io *io)
{
	uint32_t busy;

	for (;;) {
		io->ops->poll(io);
		pthread_mutex_lock(&io->lock);
		busy = io->n_busy;
		pthread_mutex_unlock(&io->lock);
		if (!busy)
			break;
		io->ops->wait(io);
	}
	signal_if_ended(io);
}
