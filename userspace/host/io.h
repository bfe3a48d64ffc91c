/* SPDX-License-Identifier: MIT */
/*
 * Transfers in flight: a fixed table of requests, and the ring of those that have
 * ended and wait to be reaped. An engine (uring.c, threads.c) moves the bytes.
 *
 * A request is free, then the engine's from submit until kvt_io_end(), then ended
 * until it is reaped. The table has `depth` entries, so nothing here can overflow
 * and nothing is allocated after start.
 *
 * The eventfd is readable whenever an ended request waits: who makes the ring
 * non-empty, or leaves it so, signals; who clears the eventfd looks once more.
 *
 * Lock order: an engine's own locks, then kvt_io.lock. None is held over a wait
 * for the disk.
 */
#ifndef KVT_HOST_IO_H
#define KVT_HOST_IO_H

#include <pthread.h>
#include <sys/types.h>

#include "host/file.h"
#include "host/host.h"

struct kvt_io;
struct kvt_user_pool;

struct kvt_req {
	struct kvt_xfer x;
	uint32_t want;	/* bytes, rounded up to the file's alignment */
	uint32_t done;	/* of these */
	int32_t result; /* once ended */
	uint8_t stalls; /* attempts in a row that moved nothing */
	bool busy;	/* the engine's */
	bool cancel;	/* asked for: -ECANCELED is an answer */
	bool advising;	/* its bytes are there; the page cache is being told */
};

struct kvt_io_ops {
	/* Take over requests @ids. Cannot fail: what goes wrong is each request's result. */
	void (*start)(struct kvt_io *, const uint32_t *ids, uint32_t n);
	/* End the requests whose bytes have arrived, without waiting. */
	void (*poll)(struct kvt_io *);
	/* Wait a while for something to poll. */
	void (*wait)(struct kvt_io *);
	int (*cancel)(struct kvt_io *, uint64_t user);
	/* Optional speed-ups: remember a pool's buffers, or a file. */
	void (*pool_added)(struct kvt_io *, struct kvt_user_pool *);
	void (*pool_removed)(struct kvt_io *, struct kvt_user_pool *);
	void (*file_added)(struct kvt_io *, struct kvt_file *, uint32_t index);
	void (*file_removed)(struct kvt_io *, struct kvt_file *);
	void (*close)(struct kvt_io *); /* nothing is in flight */
};

struct kvt_io {
	const struct kvt_io_ops *ops;
	int eventfd; /* the host's */
	uint32_t depth;
	pthread_mutex_t lock; /* all below */
	pthread_cond_t idle;  /* n_busy became 0 */
	struct kvt_req *reqs; /* [depth] */
	uint32_t *free;	      /* [depth] a stack */
	uint32_t *ended;      /* [depth] a ring */
	uint32_t n_free, ended_head, n_ended, n_busy;
};

/* Bytes that kvt_io_init() allocates. */
uint64_t kvt_io_bytes(uint32_t depth);
int kvt_io_init(struct kvt_io *io, const struct kvt_io_ops *ops, uint32_t depth, int eventfd);
void kvt_io_exit(struct kvt_io *io);

int kvt_io_submit(struct kvt_io *io, const struct kvt_xfer *xfers, uint32_t n);
int kvt_io_reap(struct kvt_io *io, struct kvt_done *done, uint32_t n);
void kvt_io_drain(struct kvt_io *io);

/* For engines. */

/* A request's turn in the engine is over. Any thread, without kvt_io.lock. */
void kvt_io_end(struct kvt_io *io, uint32_t id, int32_t result);
void kvt_io_end_locked(struct kvt_io *io, uint32_t id, int32_t result); /* and then kvt_io_signal() */
void kvt_io_signal(struct kvt_io *io);

/*
 * Account for what one read or write returned (bytes or a negative errno).
 * Returns true when the rest is to be tried; else req->result is final.
 */
bool kvt_req_step(struct kvt_req *req, ssize_t ret);

static inline uint64_t kvt_req_offset(const struct kvt_req *req)
{
	return req->x.slot * req->x.file->frame_bytes + req->done;
}

static inline uint8_t *kvt_req_data(const struct kvt_req *req)
{
	return req->x.pool->base + req->x.frame * req->x.pool->frame_bytes + req->done;
}

/* The two engines. *@io is freed by ops->close. Errors: -ENOMEM, and for io_uring why it is denied. */
uint64_t kvt_uring_bytes(uint32_t depth);
int kvt_uring_open(uint32_t depth, int eventfd, struct kvt_io **io);
uint64_t kvt_threads_bytes(uint32_t depth, uint32_t workers);
int kvt_threads_open(uint32_t depth, uint32_t workers, int eventfd, struct kvt_io **io);

#endif
