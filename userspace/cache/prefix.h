/* SPDX-License-Identifier: MIT */
/*
 * A cache's prefix tree: nodes of tree.h, each with references to the blocks of
 * its tokens' rows, and recurrent-state snapshots that hang on them.
 *
 * prefix->lock guards the tree. It is held over bookkeeping alone, never over
 * I/O: who reads or moves a node's blocks pins or holds the node and lets go. The blocks
 * of such a node stay the same. The store's lock is taken with it held.
 */
#ifndef KVT_CACHE_PREFIX_H
#define KVT_CACHE_PREFIX_H

#include "cache/cache.h"
#include "cache/tree.h"

#define KVT_PREFIX_CHUNKS (UINT32_MAX / 2) /* the most of a tree */

struct kvt_snapshot {
	uint32_t node;	 /* NONE: free */
	uint32_t tokens; /* from the root on */
	uint64_t session, bytes, used;
};

/* What it takes, from a cache's checked parameters and planes. */
struct kvt_prefix_plan {
	uint32_t chunk;		/* tokens; 0: no tree */
	uint32_t chunk_blocks;	/* of all planes */
	uint32_t capacity;	/* chunks */
	uint32_t snapshots, session_snapshots;
	uint32_t snapshot_blocks, snapshot_plane; /* of one; and the plane whose blocks they are */
	uint64_t snapshot_bytes;
	const struct kvt_policy_ops *policy;
	bool kept; /* in a directory */
};

struct kvt_keeper;
struct kvt_dir;

struct kvt_prefix {
	struct kvt_cache *cache;
	struct kvt_prefix_plan plan;
	struct kvt_tree *tree;
	uint32_t *blocks; /* [capacity][chunk_blocks]; KVT_NO_BLOCK behind a tail's end */
	struct kvt_snapshot *snapshots;
	uint32_t *snapshot_blocks; /* [snapshots][snapshot_blocks] */
	uint8_t *row;		   /* one, for a state's last bytes; under row_lock */
	pthread_mutex_t row_lock;
	uint64_t clock;		   /* of snapshot use */
	enum kvt_tier home;	   /* where what is used is loaded to */
	bool asked;		   /* a match has begun a turn, and what it computes belongs to it */
	struct kvt_keeper *keeper; /* or NULL: nothing outlives the process */

	pthread_mutex_t lock;
	struct kvt_prefix_stats st;
};

/* Fill @plan from @params; planes and policy are those of the cache. -EINVAL, -ENOMEM. */
int kvt_prefix_plan(struct kvt_prefix_plan *plan, const struct kvt_cache_params *params, const struct kvt_plane *planes,
		    const struct kvt_policy_ops *policy);
uint64_t kvt_prefix_plan_bytes(const struct kvt_prefix_plan *plan, uint32_t capacity);

int kvt_prefix_create(struct kvt_cache *cache, const struct kvt_prefix_plan *plan, struct kvt_prefix **prefix);
void kvt_prefix_destroy(struct kvt_prefix *prefix);

/* Find and pin. Not a use: nothing is counted. */
int kvt_prefix_pin(struct kvt_prefix *prefix, const struct kvt_prefix_root *root, const uint32_t *tokens, uint32_t n,
		   struct kvt_prefix_match *match);

/* With the lock: a node's chunk is used, by a prompt that has @behind more chunks behind it. */
void kvt_prefix_use(struct kvt_prefix *prefix, uint32_t node, uint32_t behind);

/* Drop the chunk that is needed least, to make room for other blocks. False: none would. Without the lock. */
bool kvt_prefix_reclaim(struct kvt_prefix *prefix);

/* Drop up to @chunks leaves that have blocks in @tier. Returns how many. Without the lock. */
uint32_t kvt_prefix_drop_from(struct kvt_prefix *prefix, enum kvt_tier tier, uint32_t chunks);

/* With the lock: a leaf that is not pinned goes. */
void kvt_prefix_drop(struct kvt_prefix *prefix, uint32_t node);

static inline uint32_t *kvt_prefix_blocks(const struct kvt_prefix *p, uint32_t node)
{
	return p->blocks + (uint64_t)node * p->plan.chunk_blocks;
}

/* Blocks of @plane in a chunk. */
static inline uint32_t kvt_prefix_per_chunk(const struct kvt_prefix *p, const struct kvt_plane *plane)
{
	return plane->rows ? 0 : p->plan.chunk / plane->geom.block_rows;
}

/* Checked; -EINVAL. */
int kvt_prefix_key(const struct kvt_prefix_root *root, struct kvt_root_key *key);

/* snapshot.c. With the lock: */
uint32_t kvt_snapshot_above(const struct kvt_prefix *prefix, uint32_t node, uint32_t tokens); /* the deepest, or NONE */
void kvt_snapshot_drop(struct kvt_prefix *prefix, uint32_t snapshot);

/* keeper.c. Bytes that it takes, of the directory's those that are the log's, and with how many of these there is a slot. */
uint64_t kvt_keeper_bytes(const struct kvt_prefix_plan *plan, uint32_t capacity);
uint64_t kvt_keeper_log_max(const struct kvt_prefix_plan *plan, uint64_t disk_bytes, uint64_t block_bytes);
uint64_t kvt_keeper_disk_least(const struct kvt_prefix_plan *plan, uint64_t block_bytes);

/* Read @dir, whose slot file has @n_slots, into the empty tree, and keep it from now on. After an error, stop. */
int kvt_keeper_start(struct kvt_prefix *prefix, struct kvt_dir *dir, uint32_t n_slots, uint64_t log_max);
void kvt_keeper_stop(struct kvt_prefix *prefix); /* when all is written down */
void kvt_keeper_flush(struct kvt_prefix *prefix);

/* With the lock: a node has new blocks; or is about to go. */
void kvt_keeper_added(struct kvt_prefix *prefix, uint32_t node);
void kvt_keeper_dropped(struct kvt_prefix *prefix, uint32_t node);

/* The tree and its books, for tests: 0 or -EUCLEAN with a message. */
int kvt_prefix_check(struct kvt_cache *cache);

#endif
