/* SPDX-License-Identifier: MIT */
/*
 * A ring of frames in GPU memory that the blocks of an attached batch in pinned
 * memory pass through, each plane's ahead of the launch that reads them.
 *
 * Decoding reads every block once a step, in the same order: what is resident
 * stays so, and all else is copied once a step, so that the bytes moved are
 * those that are not resident. Blocks that pass are full and change no more
 * while they are attached. Each has one place in the ring for as long, a plane
 * behind the one before, round and round, and the tables that kernels read
 * say those places: a step sets no table, and the host waits for nothing.
 *
 *	copying stream	 wait done() of planes with the same places, copies, here(p) ...
 *	reading stream	 wait here(p), digest, verify, launches that read p, done(p) ...
 *
 * What has arrived is digested on the device before it is read, and a digest
 * that is not its block's is counted there. Who waits for the reading stream takes
 * the count with kvt_ring_verdict() before any result is given out.
 *
 * Planes go in the order of their layers. A plane has at most half of the ring,
 * so that K and V, which are neighbours, are there together; what has no
 * place is read where it is. A plane is copied as soon as nobody has yet to read what
 * is in its places, else when it is asked for: an order that was not
 * expected costs time, not bits.
 *
 * Copies go by the engine, in runs of blocks that lie evenly in memory or many at once, or by
 * a kernel; whether any is faster than reading in place depends on the device,
 * its link and how blocks lie, and is tried with the first launch: kvt_ring_try().
 *
 * One thread at a time, as a batch.
 */
#ifndef KVT_CACHE_RING_H
#define KVT_CACHE_RING_H

#include "cache/cache.h"

struct kvt_ring;

/* Device and host bytes of a ring of @ring_bytes, for at most @most table entries (1 or more) of blocks in pinned memory. */
uint64_t kvt_ring_bytes(const struct kvt_cache *cache, uint64_t ring_bytes, uint32_t most);

/* -EINVAL: less than two frames. */
int kvt_ring_create(struct kvt_cache *cache, kvt_stream reader, uint64_t ring_bytes, uint32_t most, struct kvt_ring **ring);
void kvt_ring_destroy(struct kvt_ring *ring); /* stopped; NULL is none */

/*
 * With a batch attached: all blocks of pinned memory that may pass, then the
 * places. @word: what the caller calls the table entry. -ENOBUFS: they are more than the ring's lists hold.
 */
int kvt_ring_add(struct kvt_ring *ring, uint32_t plane, uint32_t word, const struct kvt_host_rows *rows);
int kvt_ring_lay_out(struct kvt_ring *ring);

/* The @i-th entry that passes; false: there are no more. */
bool kvt_ring_entry(const struct kvt_ring *ring, uint32_t i, uint32_t *plane, uint32_t *word, kvt_dptr *place);

/* Waits for what copies are under way: their sources may be unpinned. */
int kvt_ring_stop(struct kvt_ring *ring);

/* Blocks of two planes would pass, and whether they should is to be found out: until then tables say where they are. */
bool kvt_ring_undecided(const struct kvt_ring *ring, uint32_t k, uint32_t v);

/* Blocks pass, so tables are to say their places. */
bool kvt_ring_on(const struct kvt_ring *ring);
int kvt_ring_start(struct kvt_ring *ring);

/* Times launches that read two planes where they are, and copies of them, waiting for each: that decides. */
int kvt_ring_try(struct kvt_ring *ring, uint32_t k, uint32_t v, int (*in_place)(void *), void *arg);

/* Before and after launches that read two planes, or one. leave() also where a launch failed. */
int kvt_ring_enter(struct kvt_ring *ring, uint32_t k, uint32_t v);
int kvt_ring_leave(struct kvt_ring *ring, uint32_t k, uint32_t v);

/* After the reading stream was waited for. -EBADMSG: of what was read, something had not arrived as it should. */
int kvt_ring_verdict(struct kvt_ring *ring);

#endif
