/* SPDX-License-Identifier: MIT */
/*
 * A radix tree over token ids with a fixed stride: a node is a chunk of
 * @chunk tokens, or at a leaf a tail of fewer. It knows no blocks and no I/O.
 *
 * A node is what its tokens and its ancestors' are. Whole chunks are found
 * through a table of hashes of the path down to them, keyed for each tree: a hash only finds
 * candidates, the parent and the tokens decide. Siblings also stand in a treap
 * in token order: the neighbours of where a query would stand share its longest prefix with it.
 *
 * A pin holds a node and all above it. free + evictable + pinned == capacity.
 * A hold, for who works on a node for a moment, keeps it alone.
 *
 * A node is in the fastest tier that has some of its blocks, as its owner says.
 * It may leave that tier when nothing behind it is there or in a faster one, and
 * the tree when nothing is behind it at all: what is behind a node is never used
 * without it. Which of those that may leave should is the policy's to say. Pinned
 * nodes stay in its lists until it names them, so that a match costs no list work.
 *
 * Everything is allocated at creation. Not locked: its owner does that.
 */
#ifndef KVT_CACHE_TREE_H
#define KVT_CACHE_TREE_H

#include <stdbool.h>

#include "kvtier.h"
#include "policy/policy.h"

#define KVT_TREE_NONE UINT32_MAX
#define KVT_ROOT_PART 64 /* bytes of an adapter's or a salt's name */

enum {
	KVT_NODE_LISTED = 1 << 0, /* the policy has it as a candidate */
	KVT_NODE_BAD = 1 << 1,	  /* its bytes are lost: it is not found until they are computed again */
	KVT_NODE_SAVED = 1 << 2,  /* its record is in the log */
	KVT_NODE_QUEUED = 1 << 3, /* to be saved */
	KVT_NODE_NEW = 1 << 4,	  /* not used yet: it stays */
};

struct kvt_tree_node {
	uint64_t hash;	   /* of the path down to here; whole chunks are found by it */
	uint64_t id;	   /* in the log */
	uint32_t root;
	uint32_t parent;   /* NONE: the root */
	uint32_t n;	   /* tokens; 0: the node is free */
	uint32_t pins;	   /* of it and of what is below */
	uint32_t holds;
	uint32_t children; /* the treap's top */
	uint32_t left, right;
	uint32_t next;	   /* of the same bucket; free list */
	uint32_t ns;	   /* a token's cost */
	uint32_t snapshot; /* the owner's, or NONE */
	uint32_t before, after; /* the owner's: in the queue of those to be saved */
	uint32_t behind[KVT_TIERS]; /* children, by tier */
	uint32_t passed;   /* the next of those that a search has passed over */
	uint16_t flags;	   /* KVT_NODE_* */
	uint16_t tier;
};

/* Each field has its own place and length, so that no two roots have one key. */
struct kvt_root_key {
	uint8_t model[KVT_FINGERPRINT];
	uint8_t adapter_bytes, salt_bytes;
	uint8_t adapter[KVT_ROOT_PART], salt[KVT_ROOT_PART]; /* zeros behind their end */
};

struct kvt_tree_root {
	struct kvt_root_key key;
	uint64_t id;   /* in the log; 0: not there */
	uint64_t hash;
	uint32_t children;
	uint32_t nodes; /* and holds; 0: free */
	uint32_t next;
};

struct kvt_tree {
	uint32_t chunk, capacity, n_roots, n_buckets, root_buckets;
	struct kvt_tree_node *nodes;
	struct kvt_tree_root *roots;
	uint32_t *tokens;  /* [capacity][chunk] */
	uint32_t *key;	   /* [chunk] secret words of the hash */
	uint32_t *buckets, *root_heads; /* first of its chain, plus 1 */
	const struct kvt_policy_ops *ops;
	struct kvt_policy *policy;
	uint32_t free_node, free_root;
	uint32_t fresh_node, fresh_root; /* from here on never used */
	uint32_t used, pinned, roots_used; /* nodes */
	uint64_t used_tokens;
	void *map;
	uint64_t map_bytes;
};

/* How far a prompt is known. */
struct kvt_tree_path {
	uint32_t root;	 /* NONE: not known */
	uint32_t node;	 /* the deepest node that matched, wholly or in part; NONE: none */
	uint32_t parent; /* the deepest that matched wholly; NONE: none */
	uint32_t tokens; /* that matched */
	uint32_t chunks; /* nodes down to @node */
	uint32_t whole;	 /* tokens of them down to @parent */
};

/* Bytes that create() takes. */
uint64_t kvt_tree_bytes(uint32_t chunk, uint32_t capacity, const struct kvt_policy_ops *ops);

/* @seed keys the hash. @costs: tiers' sizes in chunks and what a chunk costs, as the policy is told. */
int kvt_tree_create(uint32_t chunk, uint32_t capacity, uint64_t seed, const struct kvt_policy_ops *ops,
		    const struct kvt_policy_params *costs, struct kvt_tree **tree);
void kvt_tree_destroy(struct kvt_tree *tree);

/* The root with this key, or NONE. */
uint32_t kvt_tree_root(struct kvt_tree *tree, const struct kvt_root_key *key);

/* The same, a new one where there is none, held until it is put back; then it goes if it has no nodes. NONE: no room. */
uint32_t kvt_tree_root_get(struct kvt_tree *tree, const struct kvt_root_key *key);
void kvt_tree_root_put(struct kvt_tree *tree, uint32_t root);

void kvt_tree_walk(struct kvt_tree *tree, uint32_t root, const uint32_t *tokens, uint32_t n, struct kvt_tree_path *path);

/* The chunk behind @parent with exactly these tokens, bad or not; NONE. */
uint32_t kvt_tree_child(struct kvt_tree *tree, uint32_t root, uint32_t parent, const uint32_t *tokens, uint32_t n);

/*
 * A new child. @n < chunk: a tail, which can have no children. NONE: no node is
 * free. The caller knows that there is no such child yet. It may not leave before it is used.
 */
uint32_t kvt_tree_add(struct kvt_tree *tree, uint32_t root, uint32_t parent, const uint32_t *tokens, uint32_t n,
		      enum kvt_tier tier);

/* A request uses a node; of its path, the deepest first. @what: is newly known of it, or NULL; its key 0: the path's hash. */
void kvt_tree_use(struct kvt_tree *tree, uint32_t node, const struct kvt_content *what);
void kvt_tree_turn(struct kvt_tree *tree); /* between two requests */

/* What adding the first KVT_TREE_FETCH of @n chunks behind @parent will touch, on its way to the processor. */
#define KVT_TREE_FETCH 16
void kvt_tree_fetch(struct kvt_tree *tree, uint32_t root, uint32_t parent, const uint32_t *tokens, uint32_t n);

/* A tail that a sibling's tokens begin with, not busy: it is of no more use. Or NONE. */
uint32_t kvt_tree_covered(struct kvt_tree *tree, uint32_t node);

void kvt_tree_hold(struct kvt_tree *tree, uint32_t node);
void kvt_tree_unhold(struct kvt_tree *tree, uint32_t node);

static inline bool kvt_tree_busy(const struct kvt_tree *tree, uint32_t node)
{
	return tree->nodes[node].pins || tree->nodes[node].holds;
}

/* A leaf that is not busy. */
void kvt_tree_remove(struct kvt_tree *tree, uint32_t node);

void kvt_tree_pin(struct kvt_tree *tree, uint32_t node);
void kvt_tree_unpin(struct kvt_tree *tree, uint32_t node);

void kvt_tree_place(struct kvt_tree *tree, uint32_t node, enum kvt_tier tier);

/* The node that should leave one of @tiers (mask of 1 << tier), or the leaf that should be dropped next, not busy; NONE. */
uint32_t kvt_tree_victim(struct kvt_tree *tree, uint32_t tiers);
uint32_t kvt_tree_leaf(struct kvt_tree *tree);

/* Another one is wanted, until this one is settled. */
void kvt_tree_skip(struct kvt_tree *tree, uint32_t node);
void kvt_tree_settle(struct kvt_tree *tree, uint32_t node);

static inline uint32_t *kvt_tree_tokens(const struct kvt_tree *tree, uint32_t node)
{
	return tree->tokens + (uint64_t)node * tree->chunk;
}

/* All of the above holds; for tests. 0 or -EUCLEAN with a message. */
int kvt_tree_check(const struct kvt_tree *tree);

#endif
