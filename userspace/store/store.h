/* SPDX-License-Identifier: MIT */
/*
 * The store: blocks, the tiers they live in, and the moves between them. It
 * knows no tokens and no attention.
 *
 * A block is up to block_rows encoded rows of one plane, and a digest of them.
 * It has at most one place in memory (gpu, pinned or ram) and at most one slot
 * on disk. It is clean when the slot holds its present content, verified. A
 * block with no rows needs no place: KVT_NO_BLOCK stands for it and reads as
 * zeros, as do the rows behind a block's last written one.
 *
 * Threads: every call from any thread. Writes to one block, and a write and
 * reads of it, are the caller's to order.
 */
#ifndef KVT_STORE_STORE_H
#define KVT_STORE_STORE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/budget.h"
#include "gpu/gpu.h"
#include "host/host.h"
#include "kvtier.h"
#include "policy/policy.h"

#define KVT_NO_BLOCK UINT32_MAX

struct kvt_store;

struct kvt_plane_geom {
	uint32_t codec;
	uint32_t elems;	    /* a row */
	uint32_t row_bytes; /* encoded */
	uint32_t block_rows;
};

/*
 * What a block's bytes are, wherever they lie: what it takes to believe a place
 * that outlived the process that filled it, or not to. The log keeps one for
 * each block; whatever else keeps blocks for a later process (a named pool) can keep the same.
 */
struct kvt_block_id {
	uint64_t digest;   /* of rows [0, rows) */
	uint64_t revision; /* of the content */
	uint64_t chunk;	   /* the log's number for the token range that it is part of */
	uint32_t plane;
	uint32_t rows;
};

/* A block on disk. */
struct kvt_block_entry {
	struct kvt_block_id id;
	uint32_t slot;
	uint32_t index; /* in its chunk: all planes' blocks, one plane after the other */
};

struct kvt_store_params {
	const struct kvt_plane_geom *planes; /* copied */
	uint32_t n_planes;
	uint32_t flags; /* KVT_CACHE_* */
	uint64_t block_bytes;
	uint32_t frames[KVT_TIERS]; /* frames, and slots on disk */
	uint32_t headroom;	    /* with a disk tier: host frames that dirty blocks leave for reading, fewer than all */
	struct kvt_budget *budget;  /* [KVT_TIERS]: charged with frames; overhead goes to KVT_TIER_RAM's */
	const char *disk_dir;
	const char *disk_name; /* the slot file's, which is kept: see kvt_store_adopt(); NULL: it has none, and is not */
	int32_t numa_node; /* or -1 */
	uint64_t writeback_bytes_per_s;
	struct kvt_host *host; /* owned by the caller */
	struct kvt_gpu *gpu;   /* likewise; NULL without a gpu tier */
	const struct kvt_policy_ops *policy;
	const char *warm;     /* the RAM tier lives in the host's pool of this name, which outlives the process; or NULL */
	uint64_t warm_id;     /* of what made the rows: another's are refused */
	uint64_t user_bytes;  /* kept with them, for the caller */
};

/* What the store allocates beside frames: against the RAM budget, and on the GPU. */
uint64_t kvt_store_overhead(const struct kvt_store_params *);
uint64_t kvt_store_gpu_overhead(const struct kvt_store_params *);

int kvt_store_create(const struct kvt_store_params *, struct kvt_store **);
void kvt_store_destroy(struct kvt_store *);

/* How many frames and slots there are too few for @blocks at the same time; a disk tier needs some to spare. */
uint64_t kvt_store_wanting(const struct kvt_store *, uint64_t blocks);

/* A new block of @plane with no rows and one reference. -ENOSPC: no block is free. */
int kvt_store_alloc(struct kvt_store *, uint32_t plane, uint32_t *block);
void kvt_store_get(struct kvt_store *, uint32_t block); /* one more reference */
void kvt_store_put(struct kvt_store *, uint32_t block); /* one less; the last frees it */
bool kvt_store_shared(struct kvt_store *, uint32_t block);
uint32_t kvt_store_rows(struct kvt_store *, uint32_t block);

/*
 * Write rows [first, first + n) of a block with one reference; rows between its
 * last and @first become zeros. On an error the block's content is the old one
 * or, where that is gone, the block is lost: never a mix.
 * -ENOSPC: no tier has room; or what reading the block's old content said.
 */
int kvt_store_write(struct kvt_store *, uint32_t block, uint32_t first, uint32_t n, const struct kvt_rows *src);

/* Keep the first @rows of a block with one reference. */
int kvt_store_cut(struct kvt_store *, uint32_t block, uint32_t rows);

/* A new block with the first @rows of @block. */
int kvt_store_copy(struct kvt_store *, uint32_t block, uint32_t rows, uint32_t *copy);

/* ---- borrow: begin takes the holds and starts loads without waiting; wait makes all of them readable ---- */

struct kvt_view {
	const uint8_t *data;
	uint32_t rows;
	uint32_t tier;
	uint32_t place_rev;
	uint64_t content_rev;
};

void kvt_store_borrow_begin(struct kvt_store *, const uint32_t *blocks, uint32_t n);

/* Whether begin would have something to load. */
bool kvt_store_missing(struct kvt_store *, const uint32_t *blocks, uint32_t n);

/*
 * After begin, for the same blocks. Until the return, the caller counts as at
 * work, and who waits for a frame waits for it: an unbounded hold says so with
 * kvt_store_work(false), and true before the return. On an error every hold is given back.
 * -ENOMEM: more blocks than memory can hold at once; -EIO, -EBADMSG: the content cannot be had.
 */
int kvt_store_borrow_wait(struct kvt_store *, const uint32_t *blocks, uint32_t n, struct kvt_view *views);
void kvt_store_return(struct kvt_store *, const uint32_t *blocks, uint32_t n);

/* Instead of wait and return: the loads that begin has started go on. */
void kvt_store_borrow_drop(struct kvt_store *, const uint32_t *blocks, uint32_t n);

void kvt_store_work(struct kvt_store *, bool begin);

/*
 * A hint: these blocks will be borrowed soon, in this order. Loads of what is
 * elsewhere are started, without holds, to free frames and those of clean
 * blocks; never to the frame of one that was prefetched and is not used yet, nor
 * while a call waits for a frame. Where there is no frame the hint ends, and
 * nothing fails. Returns how many of the first blocks have been seen to.
 *
 * A borrow finds the load done, or waits for it. What goes wrong with it is told
 * to the borrow that waits; without one, the next borrow reads anew.
 */
uint32_t kvt_store_prefetch(struct kvt_store *, const uint32_t *blocks, uint32_t n);

/*
 * How many blocks may wait prefetched: frames that are free, and a sixteenth of the
 * blocks that memory does not hold. What is read in a cycle keeps its place from one
 * round to the next but for these, so hardly more is read than does not fit.
 */
uint32_t kvt_store_prefetch_room(struct kvt_store *);

/* Those of @blocks that were prefetched and are not used yet will not be: their frames are given back. */
void kvt_store_prefetch_drop(struct kvt_store *, const uint32_t *blocks, uint32_t n);

/*
 * ---- a warm RAM tier: what a process leaves there, the next one finds ----
 *
 * A block that has a name (any number but 0; its own) and is in the RAM tier is
 * found again, verified by its digest, if the store is opened anew. Found are
 * blocks 0 to kvt_store_found() - 1, each with one reference, the caller's.
 */
uint32_t kvt_store_found(const struct kvt_store *);
uint64_t kvt_store_named(struct kvt_store *, uint32_t block, uint32_t *plane);
void kvt_store_name(struct kvt_store *, uint32_t block, uint64_t key);
void kvt_store_unname(struct kvt_store *, uint32_t block, uint64_t key); /* if that is its name */
void *kvt_store_user_area(struct kvt_store *); /* zeros at first */

/* ---- pins (pin.c): blocks that kernels read, and append to, at their addresses until they are unpinned ---- */

/*
 * Bring blocks to frames that the device reads (gpu, and pinned if it is
 * registered) and keep them there: at[i] is block i's address, 0 for one
 * without rows. Nobody can move them, nor read them on the CPU where it cannot
 * read their frames (-EBUSY). Errors as for a borrow, and -ENODEV; then nothing is pinned.
 */
int kvt_store_pin(struct kvt_store *, const uint32_t *blocks, uint32_t n, uint64_t *at);

/* Of a pinned block: does it have rows, and lie in host memory? Then where, and what they are. */
struct kvt_host_rows {
	uint64_t at, digest;
	uint32_t rows;
};
bool kvt_store_on_host(struct kvt_store *, uint32_t block, struct kvt_host_rows *);

/* @n blocks did not reach the device as they should. */
void kvt_store_count_bad(struct kvt_store *, uint64_t n);

/* After what was launched on them. */
void kvt_store_unpin(struct kvt_store *, const uint32_t *blocks, uint32_t n);

/*
 * Pin a block with one reference for rows that kernels append behind its last.
 * Its frame reads as zeros behind them, in @stream's order; its content is
 * unknown until kvt_store_seal(). *digest is that of the rows it has.
 */
int kvt_store_open(struct kvt_store *, uint32_t block, kvt_stream stream, uint64_t *at, uint64_t *digest);

/* What kernels made of an open block: @rows, whose digest is *digest (NULL: unknown, so the block is lost). Unpins it. */
void kvt_store_seal(struct kvt_store *, uint32_t block, uint32_t rows, const uint64_t *digest);

/* How a call on the device ended: if it is gone, the gpu tier closes. Returns @ret, with @what before the message. */
int kvt_store_device_ended(struct kvt_store *, int ret, const char *what);

/* Frames that blocks can be loaded to: so many blocks can be held at once wherever they were. */
uint32_t kvt_store_host_frames(const struct kvt_store *);

/* Blocks of @blocks that are in @tier afterwards (as many as fit). */
int64_t kvt_store_move(struct kvt_store *, const uint32_t *blocks, uint32_t n, enum kvt_tier tier);

/* Write back what is dirty of @blocks, and keep it in memory. 0: all are clean; -ENOSPC, -EIO: some are not. */
int kvt_store_save(struct kvt_store *, const uint32_t *blocks, uint32_t n);

/* ---- many blocks that stay as they are (shared, or of an earlier process) ---- */

/* References taken or given back. @bytes [KVT_TIERS]: what of them is where, is added; NULL: nobody asks. */
void kvt_store_get_all(struct kvt_store *, const uint32_t *blocks, uint32_t n, uint64_t *bytes);
void kvt_store_put_all(struct kvt_store *, const uint32_t *blocks, uint32_t n);

/* Blocks of @blocks that have a place in @tier. */
uint32_t kvt_store_count(struct kvt_store *, const uint32_t *blocks, uint32_t n, enum kvt_tier tier);

/* Has one of @blocks no other reference than the caller's? */
bool kvt_store_alone(struct kvt_store *, const uint32_t *blocks, uint32_t n);

/* What a clean block is and where it lies; false: it is not clean. */
bool kvt_store_entry(struct kvt_store *, uint32_t block, struct kvt_block_entry *entry);

/*
 * Before any other use: a block that an earlier process left in a slot of the
 * file; each slot once, each entry within the planes' geometry. It is read
 * and verified before the first use. After the last one, adopted: until then a
 * store whose slot file has a name writes nothing.
 */
uint32_t kvt_store_adopt(struct kvt_store *, const struct kvt_block_entry *entry);
void kvt_store_adopted(struct kvt_store *);

/*
 * Read and verify those of @blocks that were adopted and not read yet. Returns how many
 * of the first are what they should be; or a negative errno: none can be told.
 */
int64_t kvt_store_prove(struct kvt_store *, const uint32_t *blocks, uint32_t n);

/* Write back every dirty block; 0 or the first error. */
int kvt_store_flush(struct kvt_store *);

void kvt_store_stats(struct kvt_store *, struct kvt_stats *);

/* A block of zeros. */
const uint8_t *kvt_store_zeros(const struct kvt_store *);

/* How blocks move between pinned memory and the gpu, found out at the start; [0] down, [1] up. */
struct kvt_device_rates {
	bool kernel[2]; /* by a kernel, else by the copy engine */
	double bytes_per_s[2]; /* 0: not tried */
	uint64_t micros;       /* that it took to find out */
};
void kvt_store_gpu_rates(const struct kvt_store *, struct kvt_device_rates *);

/* Where the gpu tier's frames lie in device memory, and their bytes; 0: there is none. */
uint64_t kvt_store_gpu_slab(const struct kvt_store *, kvt_dptr *base);

/* Host and file in words, for stats. */
void kvt_store_io_info(struct kvt_store *, struct kvt_file_info *info);

/* free + used == total in every tier, lists and counters agree; for tests. Aborts nothing: 0 or -EUCLEAN with a message. */
int kvt_store_check(struct kvt_store *);

/* For tests that corrupt and watch: the slot file and a block's slot (KVT_NO_BLOCK: none), its frame, its tier. */
int kvt_store_fd(struct kvt_store *);
uint32_t kvt_store_slot(struct kvt_store *, uint32_t block);
const uint8_t *kvt_store_pool(const struct kvt_store *, enum kvt_tier tier); /* all frames of a host tier; NULL: none */
uint8_t *kvt_store_frame(struct kvt_store *, uint32_t block, enum kvt_tier *tier);

#endif
