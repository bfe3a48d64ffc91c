// SPDX-License-Identifier: MIT
/*
 * For cyclic reads: each step of decoding reads every block in the same order.
 * What was just used is then what will be used last, so it goes first; the rest
 * stays, is found there on the next round, and only what does not fit streams.
 *
 * A block that has not been used for two rounds is not part of the cycle any
 * more, and goes before all. A round is the longest time between two uses of a
 * block that was seen lately. What was fetched ahead and not used yet goes last.
 */
#include <stdlib.h>

#include "policy/list.h"

#define LISTS (KVT_TIERS * 3)
#define FORGET_SHIFT 8 /* how slowly a longest time is forgotten */

enum { USED, AHEAD, DIRTY };

struct scan {
	struct kvt_policy policy;
	uint64_t turn;
	uint64_t round; /* turns, in 1 / 2^FORGET_SHIFT */
	struct list list[LISTS];
	struct node node[];
};

static struct scan *scan_of(struct kvt_policy *p)
{
	return (struct scan *)p;
}

static uint64_t scan_bytes(const struct kvt_policy_params *p)
{
	return sizeof(struct scan) + (uint64_t)p->blocks * sizeof(struct node);
}

static struct kvt_policy *scan_create(const struct kvt_policy_params *p)
{
	struct scan *s = calloc(1, scan_bytes(p));

	if (!s)
		return NULL;
	s->policy.ops = &kvt_policy_scan;
	s->turn = 1;
	lists_init(s->list, LISTS, s->node, p->blocks);
	return &s->policy;
}

static void scan_destroy(struct kvt_policy *p)
{
	free(p);
}

static void scan_describe(struct kvt_policy *p, uint32_t block, const struct kvt_content *content)
{
	(void)p;
	(void)block;
	(void)content;
}

/* node.hits: a dirty block that is in use keeps its place, but is no candidate */
static void put(struct scan *s, uint32_t block, uint32_t list)
{
	list_remove(s->list, s->node, block);
	list_insert(s->list, s->node, list, block, list % 3 == DIRTY ? BY_WRITE : BY_TOUCH);
}

/* node.class: USED or AHEAD */
static void scan_touch(struct kvt_policy *p, uint32_t block, enum kvt_use use)
{
	struct scan *s = scan_of(p);
	struct node *n = &s->node[block];
	uint64_t age = (s->turn - n->stamp) << FORGET_SHIFT;

	if (use != KVT_USE_AHEAD && n->stamp && age)
		s->round = age > s->round ? age : s->round - ((s->round - age) >> FORGET_SHIFT);
	if (use == KVT_USE_AHEAD) {
		n->class = AHEAD;
		if (!n->stamp)
			n->stamp = s->turn;
	} else {
		n->class = USED;
		n->stamp = s->turn;
	}
	if (use == KVT_USE_WRITE)
		n->written = (uint32_t)s->turn;
	if (n->list == NO_LIST)
		return;
	if (n->list % 3 != DIRTY)
		put(s, block, n->list / 3 * 3 + n->class);
	else if (use == KVT_USE_WRITE)
		put(s, block, n->list);
}

static void scan_turn(struct kvt_policy *p)
{
	scan_of(p)->turn++;
}

static void scan_idle(struct kvt_policy *p, uint32_t block, enum kvt_tier tier, bool clean)
{
	struct scan *s = scan_of(p);
	uint32_t list = (uint32_t)tier * 3 + (clean ? s->node[block].class : DIRTY);

	if (clean || s->node[block].list != list)
		put(s, block, list);
	s->node[block].hits = 0;
}

static void leave(struct scan *s, uint32_t block)
{
	list_remove(s->list, s->node, block);
	s->node[block].hits = 0;
}

static void scan_busy(struct kvt_policy *p, uint32_t block)
{
	struct node *n = &scan_of(p)->node[block];

	if (n->list != NO_LIST && n->list % 3 == DIRTY)
		n->hits = 1;
	else
		leave(scan_of(p), block);
}

/* The one of @tiers' lists of @kind that is first, or last, in its order. */
static uint32_t end_of(struct scan *s, uint32_t tiers, uint32_t kind, bool first)
{
	enum order order = kind == DIRTY ? BY_WRITE : BY_TOUCH;
	uint32_t best = NONE;

	for (uint32_t t = 0; t < KVT_TIERS; t++) {
		const struct list *l = &s->list[t * 3 + kind];
		uint32_t i;

		if (!(tiers & (1u << t)))
			continue;
		while (kind == DIRTY && l->head != NONE && s->node[l->head].hits)
			leave(s, l->head);
		i = first ? l->head : l->tail;
		if (i == NONE)
			continue;
		if (best == NONE || node_after(&s->node[first ? best : i], &s->node[first ? i : best], order))
			best = i;
	}
	return best;
}

static uint32_t scan_victim(struct kvt_policy *p, uint32_t tiers, bool clean)
{
	struct scan *s = scan_of(p);
	uint32_t block;

	if (!clean)
		return end_of(s, tiers, DIRTY, true);
	for (uint32_t kind = USED; kind <= AHEAD; kind++) {
		block = end_of(s, tiers, kind, true);
		if (block != NONE && s->round && (s->turn - s->node[block].stamp) << FORGET_SHIFT > 2 * s->round)
			return block;
	}
	block = end_of(s, tiers, USED, false);
	return block != NONE ? block : end_of(s, tiers, AHEAD, false);
}

static void scan_forget(struct kvt_policy *p, uint32_t block)
{
	leave(scan_of(p), block);
	scan_of(p)->node[block].stamp = 0;
	scan_of(p)->node[block].class = USED;
}

const struct kvt_policy_ops kvt_policy_scan = {
	.name = "scan",
	.bytes = scan_bytes,
	.create = scan_create,
	.destroy = scan_destroy,
	.describe = scan_describe,
	.touch = scan_touch,
	.turn = scan_turn,
	.idle = scan_idle,
	.busy = scan_busy,
	.victim = scan_victim,
	.forget = scan_forget,
};
