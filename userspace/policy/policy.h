/* SPDX-License-Identifier: MIT */
/*
 * Placement policy: counters in, decisions out. A policy is a pure function of
 * the calls made on it: no clock, no I/O, no global state, no allocation after
 * creation, every call O(1) (amortised, where it learns). It is not locked: its
 * owner does that.
 *
 * The owner tells it which blocks are candidates for eviction from which tier
 * ("idle": readable there, not borrowed, not moving) and when they are used;
 * the policy says which candidate should go. Time is counted in turns: what is
 * touched between two calls of turn() was used together, by one request or one
 * pass over the cache.
 */
#ifndef KVT_POLICY_POLICY_H
#define KVT_POLICY_POLICY_H

#include <stdbool.h>
#include <stdint.h>

#include "kvtier.h"

#define KVT_POLICY_NONE UINT32_MAX
#define KVT_POLICY_BLOCK_BYTES 64 /* bytes() grows by at most so much a block */

struct kvt_policy;

struct kvt_policy_params {
	uint32_t blocks; /* numbered from 0 */
	uint32_t frames[KVT_TIERS];
	bool keyed; /* describe() will be called: content is known again after its block was forgotten */
	/* ns to bring a block from a tier to where it is used, and to compute it anew; all 0: unknown, and alike */
	uint32_t reload_ns[KVT_TIERS];
	uint32_t recompute_ns;
};

enum kvt_use {
	KVT_USE_READ,
	KVT_USE_WRITE,
	KVT_USE_AHEAD, /* not used yet, but soon: it is being fetched */
};

#define KVT_POLICY_KINDS 8

/* What the owner knows of a block's content. */
struct kvt_content {
	uint64_t key; /* of the content, the same whenever it comes back; not 0 */
	uint32_t recompute_ns; /* 0: as the parameters say */
	uint32_t kind; /* below KVT_POLICY_KINDS: what may set apart how likely a reuse is; learned for each kind */
};

struct kvt_policy_ops {
	const char *name;
	/* bytes that create() will allocate */
	uint64_t (*bytes)(const struct kvt_policy_params *);
	struct kvt_policy *(*create)(const struct kvt_policy_params *);
	void (*destroy)(struct kvt_policy *);
	/* before the touch: what the block holds from now on, or what is newly known of it */
	void (*describe)(struct kvt_policy *, uint32_t block, const struct kvt_content *);
	void (*touch)(struct kvt_policy *, uint32_t block, enum kvt_use);
	void (*turn)(struct kvt_policy *);
	/* the block becomes / stops being a candidate in @tier; @clean: a verified copy lies below */
	void (*idle)(struct kvt_policy *, uint32_t block, enum kvt_tier tier, bool clean);
	void (*busy)(struct kvt_policy *, uint32_t block);
	/*
	 * The clean block that should leave one of @tiers (mask of 1 << tier), or the
	 * dirty one that should be written down next; KVT_POLICY_NONE: no candidate.
	 */
	uint32_t (*victim)(struct kvt_policy *, uint32_t tiers, bool clean);
	/* the block's content is gone from it */
	void (*forget)(struct kvt_policy *, uint32_t block);
};

struct kvt_policy {
	const struct kvt_policy_ops *ops;
};

extern const struct kvt_policy_ops kvt_policy_lru, kvt_policy_s3fifo, kvt_policy_scan, kvt_policy_cost, kvt_policy_auto;

/* "auto", "cost", "scan", "s3fifo", "lru"; NULL: no such name. */
const struct kvt_policy_ops *kvt_policy_find(const char *name);

/* ---- tiers.c: where what leaves a tier goes, and when it should leave ---- */

/*
 * The next tier below @tier that has frames and from which loading costs less
 * than computing anew (@recompute_ns; 0: as the parameters say). KVT_TIERS: none, drop it.
 */
uint32_t kvt_policy_below(const struct kvt_policy_params *, uint32_t tier, uint32_t recompute_ns);

/*
 * Work that begins when @level rises above @high and ends when it is down to
 * @low: *on remembers which. Between the two nothing starts and nothing stops,
 * so that a level that moves about one mark does not switch it at every step.
 */
bool kvt_policy_between(bool *on, uint64_t level, uint64_t low, uint64_t high);

#endif
