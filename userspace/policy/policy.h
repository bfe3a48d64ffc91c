/* SPDX-License-Identifier: MIT */
/*
 * Placement policy: counters in, decisions out. A policy is a pure function of
 * the calls made on it: no clock, no I/O, no global state, no allocation after
 * creation, every call O(1). It is not locked: its owner does that.
 *
 * The owner tells it which blocks are candidates for eviction from which tier
 * ("idle": readable there, not borrowed, not moving) and when they are used;
 * the policy says which candidate should go.
 */
#ifndef KVT_POLICY_POLICY_H
#define KVT_POLICY_POLICY_H

#include <stdbool.h>
#include <stdint.h>

#include "kvtier.h"

#define KVT_POLICY_NONE UINT32_MAX

struct kvt_policy;

struct kvt_policy_ops {
	const char *name; /* "lru" */
	/* bytes that create() will allocate for @blocks */
	uint64_t (*bytes)(uint32_t blocks);
	struct kvt_policy *(*create)(uint32_t blocks);
	void (*destroy)(struct kvt_policy *);
	/* the block was read or written */
	void (*touch)(struct kvt_policy *, uint32_t block);
	/* the block becomes / stops being a candidate in @tier; @clean: a verified copy lies below */
	void (*idle)(struct kvt_policy *, uint32_t block, enum kvt_tier tier, bool clean);
	void (*busy)(struct kvt_policy *, uint32_t block);
	/* the block that should leave one of @tiers (mask of 1 << tier), clean or not as asked; KVT_POLICY_NONE */
	uint32_t (*victim)(const struct kvt_policy *, uint32_t tiers, bool clean);
	/* the block's content is gone: forget what is known of it */
	void (*forget)(struct kvt_policy *, uint32_t block);
};

struct kvt_policy {
	const struct kvt_policy_ops *ops;
};

extern const struct kvt_policy_ops kvt_policy_lru;

#endif
