/* SPDX-License-Identifier: MIT */
/* The loader's reads: a few slots in flight on io_uring or threads, or copied from a mapping. */
#ifndef KVT_RUNTIME_LOAD_IO_H
#define KVT_RUNTIME_LOAD_IO_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <liburing.h>

#include "gpu/gpu.h"

#define KVT_LOAD_DEPTH_MAX 64
#define KVT_LOAD_STACK	   (64u << 10)

/* A staging buffer and the read, or the copies out of it, that it is busy with. */
struct kvt_load_slot {
	uint8_t *buf;	/* its staging */
	uint8_t *into;	/* where the read goes: @buf, or straight to its destination */
	uint32_t shard;
	uint32_t first;	 /* the first span that the piece covers */
	uint64_t offset; /* in the file */
	uint64_t want;	 /* bytes that the file has there */
	uint64_t ask;	 /* bytes of the read: @want rounded up for O_DIRECT */
	uint64_t got;	 /* bytes read so far */
	kvt_event copied;
	bool copying;
	bool cached; /* the read is a copy from the page cache */
	int fd;
	int64_t result;
	struct kvt_load_slot *next;
};

/* Slots in a line; the thread fallback's work and its results. */
struct kvt_load_queue {
	struct kvt_load_slot *head, **tail;
};

struct kvt_load_io {
	bool uring;
	struct io_uring ring;
	uint32_t in_flight, n_threads;
	pthread_t threads[KVT_LOAD_DEPTH_MAX];
	pthread_mutex_t lock;
	pthread_cond_t work, finished;
	struct kvt_load_queue todo, done;
	bool stop;
};

/* @kind: enum kvt_io_kind. -EPERM, -ENOSYS, -ENOMEM, -EAGAIN. */
int kvt_load_io_open(struct kvt_load_io *io, uint32_t kind, uint32_t depth);

/* Waits for what is in flight. */
void kvt_load_io_close(struct kvt_load_io *io);

/* Read slot->ask - slot->got bytes behind the first slot->got. */
int kvt_load_io_submit(struct kvt_load_io *io, struct kvt_load_slot *slot);

/* The next slot whose read has ended (slot->result: bytes, or a negative errno). Something must be in flight. */
struct kvt_load_slot *kvt_load_io_wait(struct kvt_load_io *io);

/*
 * Copy @bytes of a mapping. Where the file has ended meanwhile a load from the
 * mapping would be SIGBUS; the kernel copies for us and says -EFAULT.
 */
int kvt_load_mapped(void *dst, const void *src, uint64_t bytes);

#endif
