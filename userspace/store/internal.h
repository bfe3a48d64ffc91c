/* SPDX-License-Identifier: MIT */
/*
 * Inside the store.
 *
 * One lock, s->lock, guards everything below that is not said to be constant.
 * It is held for bookkeeping only: never over I/O, a copy or a digest. s->cond
 * is broadcast whenever a block changes state or a frame or slot comes free.
 *
 * A block at rest (B_IDLE) may be borrowed, written, moved or evicted. While it
 * is loading or changing place (B_LOADING, B_MOVING) others wait. A hold keeps
 * a block in its frame. Write-back (writing) reads the frame beside borrowers,
 * where nothing else makes room; who wants to change the block waits for it. A block whose last reference went
 * while it was in use is dead, and is freed by the last who used it.
 *
 * What moves, and who publishes it:
 *   disk -> host     queued by anyone; the mover verifies and publishes
 *   memory -> disk   the mover: to a fresh slot, read back, verify, publish
 *   memory <-> memory the caller of the move: copy, verify, publish, release
 */
#ifndef KVT_STORE_INTERNAL_H
#define KVT_STORE_INTERNAL_H

#include <pthread.h>

#include "store/store.h"

#define NONE UINT32_MAX
#define IO_DEPTH 1024 /* loads and stores alive; the host takes fewer at once, the rest are queued */
#define MOVER_STACK (256u << 10)
#define STAGING_MAX 8		 /* bounce frames of write-back, */
#define STAGING_BYTES (1u << 20) /* or about so many bytes of them */
#define SLOT_RESERVE_MAX 8	 /* slots that only a block with a slot may take: where its new content goes first */
#define WRITE_ERRORS_MAX 16	 /* failed write-backs in a row after which the disk tier takes no more */
#define AHEAD_SHARE 16		 /* of the blocks that memory does not hold: so many may wait prefetched */
#define HOST_TIERS (1u << KVT_TIER_PINNED | 1u << KVT_TIER_RAM)
#define MEMORY_TIERS (HOST_TIERS | 1u << KVT_TIER_GPU)

enum { B_FREE, B_IDLE, B_LOADING, B_MOVING };

struct block {
	uint64_t digest; /* of rows [0, rows) */
	uint64_t content_rev;
	uint64_t key; /* name in a warm pool; 0: none */
	uint32_t place_rev;
	uint32_t plane;
	uint32_t rows;
	uint32_t refs;
	uint32_t holds;
	uint32_t pins;	/* those of the holds that kernels read through: the frame stays, whoever else wants the block */
	uint32_t frame; /* in .tier, or NONE */
	uint32_t slot;	/* or NONE */
	uint32_t next;	/* free list */
	uint32_t move;	/* the last one that asked for it, by kvt_store.last_move */
	int16_t error;	/* of the last load; taken by who waits for it */
	uint8_t tier;	/* KVT_TIER_DISK: not in memory */
	uint8_t state;
	bool dirty;	/* the slot, if any, holds older content */
	bool writing;
	bool changing; /* held by one that changes it: not to be written back */
	bool dead;
	bool lost; /* nothing holds the content any more */
	bool unproven; /* what the slot holds was not read since the process began */
	bool loose; /* its frame was let go of: the kernel may take it */
	uint8_t ahead;
};

/* block.ahead: loaded, or being loaded, for a hint, and not used since; or not wanted any more before it came. */
enum { AHEAD_NOT, AHEAD_WANTED, AHEAD_UNWANTED };

/* A stack of free frame or slot numbers. Slots never used yet lie at its bottom. */
struct free_list {
	uint32_t *item;
	uint32_t n, total;
};

enum { IO_LOAD, IO_STORE, IO_VERIFY };

struct io {
	uint32_t block;
	uint32_t kind;
	uint32_t tier, frame; /* the block's, or where it is being loaded to */
	uint32_t slot;
	uint32_t bounce; /* staging frame of a write-back, or NONE */
	uint32_t rows;
	uint32_t tries;
	uint64_t digest;
	uint32_t next; /* free list, or the queue of what is to be submitted */
};

struct kvt_store {
	/* constant after creation */
	struct kvt_plane_geom *planes;
	uint32_t n_planes, n_blocks, flags;
	uint64_t block_bytes;
	uint32_t device_tiers; /* whose frames kernels read and write */
	struct kvt_budget *budget;
	uint64_t overhead, gpu_overhead;
	uint32_t budget_frames[KVT_TIERS]; /* charged for */
	struct kvt_host *host;
	struct kvt_gpu *gpu;
	struct kvt_file *file;
	struct kvt_pool *pool[KVT_TIERS]; /* pinned, ram */
	struct kvt_pool *staging;
	const struct kvt_policy_ops *policy_ops;
	struct kvt_device *device;
	uint8_t *zeros; /* a block of zeros, read only */
	struct warm_record *records; /* of a warm pool's frames, or NULL */
	void *user_area;
	uint64_t rate;	/* background write-back, bytes/s; 0: no cap */
	int wake;	/* eventfd: the mover should look */
	pthread_t mover;

	pthread_mutex_t lock;
	pthread_cond_t cond;
	struct block *blocks;
	struct kvt_policy *policy;
	struct free_list frames[KVT_TIERS]; /* on KVT_TIER_DISK: slots */
	struct free_list bounces;
	uint32_t free_block, free_io;
	uint32_t queue_head, queue_tail;
	uint32_t loads, stores;	 /* ios alive */
	uint64_t loading_since;	 /* ns, if there are loads */
	uint32_t working;	 /* calls that hold blocks for a bounded time and do not sleep */
	uint32_t asleep;	 /* calls that do, until the next wake-up makes them working again */
	uint64_t wakeups;
	uint32_t last_move;	 /* moves to memory that began */
	bool stuck;		 /* all sleep, and nothing is in flight: who can fail must */
	uint32_t urgent;	 /* calls that wait for a frame */
	uint32_t flushing;	 /* calls that wait for dirty blocks to become clean */
	uint32_t dirty;		 /* blocks */
	uint32_t changing;	 /* blocks that are held to be changed, or bring what is dirty to a host frame */
	uint32_t dirty_host;	 /* those in host frames, */
	uint32_t dirty_max;	 /* and how many there may be, so that frames stay for reading */
	uint32_t slot_high;	 /* slots from here on were never used */
	uint32_t slot_reserve;
	bool cleaning;		 /* in the background, since there were too many dirty blocks */
	uint32_t errors_in_row;	 /* of write-back */
	uint64_t write_errors;	 /* all of them, for who waits for one */
	int disk_error;		 /* why the disk tier takes no more writes; 0: it does */
	bool adopting; /* slots are being taken over from an earlier process: none is to be had */
	bool gpu_lost; /* the device is gone: its tier takes and gives nothing any more */
	bool shrunk; /* the disk gave less than its budget, and that was said */
	bool stop;
	struct io io[IO_DEPTH];
	struct kvt_stats st;
	uint64_t tier_blocks[KVT_TIERS];
};

static inline uint64_t rows_bytes(const struct kvt_store *s, const struct block *b, uint32_t rows)
{
	return (uint64_t)rows * s->planes[b->plane].row_bytes;
}

/* place.c: frames, slots, and who is a candidate for eviction. With the lock. */
uint8_t *kvt_store_host_frame(const struct kvt_store *s, uint32_t tier, uint32_t frame);
void kvt_store_settle(struct kvt_store *s, uint32_t block); /* after any change: tell the policy, free the dead, wake */
void kvt_store_place(struct kvt_store *s, uint32_t block, uint32_t tier, uint32_t frame);
void kvt_store_unplace(struct kvt_store *s, uint32_t block); /* gives its frame back */
void kvt_store_set_dirty(struct kvt_store *s, uint32_t block, bool dirty);
void kvt_store_set_slot(struct kvt_store *s, uint32_t block, uint32_t slot); /* NONE; gives the old one back */
int kvt_store_take_slot(struct kvt_store *s, uint32_t block, uint32_t *slot);
bool kvt_store_retire_slot(struct kvt_store *s, uint32_t slot);
void kvt_store_lose(struct kvt_store *s, uint32_t block);
/* Is the block in the frame of a gpu that is gone? Then forget the frame: the content is in its slot, or lost. */
bool kvt_store_drop_gone(struct kvt_store *s, uint32_t block);
/* The gpu is gone: drop what nobody uses; who uses the rest drops it when done. False if that was known. */
bool kvt_store_gpu_gone(struct kvt_store *s);
/* Give a frame, or on KVT_TIER_DISK a slot, back that no block has. */
void kvt_store_give(struct kvt_store *s, uint32_t tier, uint32_t frame);
/*
 * The frame that a block at rest is in is going to be used: if it was let go of
 * and taken meanwhile, the block has none any more, and is to be loaded.
 */
void kvt_store_grasp(struct kvt_store *s, uint32_t block);
/* Without the lock: memory for a frame that was free. -ENOMEM: the kernel took it, and has none to give. */
int kvt_store_ready(struct kvt_store *s, uint32_t tier, uint32_t frame);
/* A free frame of @tiers, the fastest first. -EAGAIN: there is none. */
int kvt_store_take_free(struct kvt_store *s, uint32_t tiers, uint32_t *tier, uint32_t *frame);
/* The same, or else a clean block's. */
int kvt_store_take_frame(struct kvt_store *s, uint32_t tiers, uint32_t *tier, uint32_t *frame);
void kvt_store_evict(struct kvt_store *s, uint32_t block); /* a clean one that nobody uses leaves memory */
/* A block that may have been prefetched is used, or its frame is lost to it. */
void kvt_store_end_ahead(struct kvt_store *s, uint32_t block, bool used);
/* Can one more block become dirty, and frames still be left for reading? */
bool kvt_store_may_dirty(const struct kvt_store *s);
/* A call ends or turns to something unbounded: who slept because it worked must look again. */
void kvt_store_end_work(struct kvt_store *s);
/* For a working call: wait for a change. */
void kvt_store_wait_change(struct kvt_store *s);
/* The same for want of room. -ENOSPC, with the reason, if none can come. @since: write_errors when waiting began. */
int kvt_store_wait_room(struct kvt_store *s, uint64_t since);
void kvt_store_wake(struct kvt_store *s);

/* block.c, with the lock */
void kvt_store_put_locked(struct kvt_store *s, uint32_t block);
/* block.c, for pin.c: with the lock, which waiting lets go. */
void kvt_store_hold(struct kvt_store *s, uint32_t block);
void kvt_store_unhold(struct kvt_store *s, uint32_t block);
int kvt_store_wait_frame(struct kvt_store *s, uint32_t tiers, uint32_t *tier, uint32_t *frame);
/* The same without waiting for anybody. -EAGAIN: there is none. */
int kvt_store_find_frame(struct kvt_store *s, uint32_t tiers, uint32_t *tier, uint32_t *frame);
/* Wait until a held block is in a frame of @tiers. */
int kvt_store_wait_resident(struct kvt_store *s, uint32_t block, uint32_t tiers);
/*
 * Hold a block for changing it: at rest, in a frame of @tiers, not being written back.
 * With @replace its old content is not needed: a block that is not in memory
 * gets a zeroed frame instead of being loaded, and *fresh says so. Dirty blocks
 * leave frames for reading: were all frames dirty and the disk full, nothing
 * could be read any more.
 */
int kvt_store_hold_to_change(struct kvt_store *s, uint32_t block, bool replace, uint32_t tiers, bool *fresh);

/* mover.c. load and store with the lock; they only queue. -EAGAIN: no frame, slot or io now. */
int kvt_store_mover_start(struct kvt_store *s);
void kvt_store_mover_stop(struct kvt_store *s);
void kvt_store_kick(struct kvt_store *s);
int kvt_store_load(struct kvt_store *s, uint32_t block, uint32_t tiers);
int kvt_store_store(struct kvt_store *s, uint32_t block);
void kvt_store_submit(struct kvt_store *s); /* without the lock: put the queue on its way */

/* warm.c, with the lock: a block's record follows block, frame and content. */
uint32_t kvt_warm_frames(const struct kvt_store_params *p); /* frames that records and user area take */
int kvt_warm_open(struct kvt_store *s, const struct kvt_store_params *p);
void kvt_warm_note(struct kvt_store *s, uint32_t block);
void kvt_warm_forget(struct kvt_store *s, uint32_t tier, uint32_t frame);

/* device.c: gpu frames. Without the lock. */
struct kvt_device;
uint64_t kvt_device_overhead(const struct kvt_store_params *p);
int kvt_device_create(struct kvt_store *s, uint32_t frames);
void kvt_device_destroy(struct kvt_store *s);
kvt_dptr kvt_device_frame(const struct kvt_store *s, uint32_t tier, uint32_t frame); /* of the device's tiers */
const uint8_t *kvt_device_host_view(const struct kvt_store *s, uint32_t frame); /* if the backend is host_readable */
int kvt_device_zero(struct kvt_store *s, uint32_t frame);
int kvt_device_zero_async(struct kvt_store *s, uint32_t tier, uint32_t frame, kvt_stream stream);
/* Encode and scatter rows into a frame whose rows behind @old are zeros; @delta is what that adds to the digest. */
int kvt_device_write(struct kvt_store *s, uint32_t frame, const struct kvt_plane_geom *g, uint32_t old,
		     uint32_t first, uint32_t n, const struct kvt_rows *src, uint64_t *delta);
/* Zero rows [rows, old). */
int kvt_device_cut(struct kvt_store *s, uint32_t frame, const struct kvt_plane_geom *g, uint32_t old, uint32_t rows,
		   uint64_t *delta);
/* Whole frames; a frame that arrives on the gpu is digested there. */
int kvt_device_load(struct kvt_store *s, uint32_t frame, const struct kvt_plane_geom *g, uint32_t rows,
		    const void *src, uint64_t *digest);
int kvt_device_save(struct kvt_store *s, void *dst, uint32_t frame);

/* Several frames between a host tier and the gpu at once. */
#define KVT_DEVICE_GROUP 64
struct kvt_device_move {
	uint32_t frame; /* on the gpu */
	uint32_t tier, host_frame;
	uint32_t plane, rows;
	uint64_t digest; /* of what arrived on the gpu; not set on the way down */
};
int kvt_device_move(struct kvt_store *s, struct kvt_device_move *moves, uint32_t n, bool up);

#endif
