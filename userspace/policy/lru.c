// SPDX-License-Identifier: MIT
/*
 * Least recently used: the candidate that was touched longest ago goes first.
 *
 * A candidate is in one list: its tier's, of clean or of dirty blocks, oldest at
 * the head. A block that turns clean keeps its age: it is put in by its stamp,
 * searched from the old end (write-back works from there) over at most
 * WALK_MAX steps, so that the call stays O(1).
 */
#include "policy/policy.h"

#include <stdlib.h>
#include <string.h>

#define NONE KVT_POLICY_NONE
#define LISTS (KVT_TIERS * 2)
#define NO_LIST LISTS
#define WALK_MAX 64

struct node {
	uint64_t stamp; /* of the last touch */
	uint32_t prev, next;
	uint32_t list;
};

struct lru {
	struct kvt_policy policy;
	uint64_t clock;
	uint32_t head[LISTS], tail[LISTS]; /* oldest, newest */
	struct node node[];
};

static struct lru *lru_of(struct kvt_policy *p)
{
	return (struct lru *)p;
}

static uint32_t list_of(enum kvt_tier tier, bool clean)
{
	return (uint32_t)tier * 2 + clean;
}

static void unlink_node(struct lru *l, uint32_t block)
{
	struct node *n = &l->node[block];

	if (n->list == NO_LIST)
		return;
	if (n->prev != NONE)
		l->node[n->prev].next = n->next;
	else
		l->head[n->list] = n->next;
	if (n->next != NONE)
		l->node[n->next].prev = n->prev;
	else
		l->tail[n->list] = n->prev;
	n->list = NO_LIST;
}

/* Put @block behind @after, or first if that is NONE. */
static void link_node(struct lru *l, uint32_t block, uint32_t list, uint32_t after)
{
	struct node *n = &l->node[block];

	n->list = list;
	n->prev = after;
	n->next = after == NONE ? l->head[list] : l->node[after].next;
	if (n->prev != NONE)
		l->node[n->prev].next = block;
	else
		l->head[list] = block;
	if (n->next != NONE)
		l->node[n->next].prev = block;
	else
		l->tail[list] = block;
}

static uint64_t lru_bytes(uint32_t blocks)
{
	return sizeof(struct lru) + (uint64_t)blocks * sizeof(struct node);
}

static struct kvt_policy *lru_create(uint32_t blocks)
{
	struct lru *l = calloc(1, lru_bytes(blocks));

	if (!l)
		return NULL;
	l->policy.ops = &kvt_policy_lru;
	for (uint32_t i = 0; i < LISTS; i++)
		l->head[i] = l->tail[i] = NONE;
	for (uint32_t i = 0; i < blocks; i++)
		l->node[i].list = NO_LIST;
	return &l->policy;
}

static void lru_destroy(struct kvt_policy *p)
{
	free(p);
}

static void lru_touch(struct kvt_policy *p, uint32_t block)
{
	struct lru *l = lru_of(p);
	uint32_t list = l->node[block].list;

	l->node[block].stamp = ++l->clock;
	if (list == NO_LIST)
		return;
	unlink_node(l, block);
	link_node(l, block, list, l->tail[list]);
}

static void lru_idle(struct kvt_policy *p, uint32_t block, enum kvt_tier tier, bool clean)
{
	struct lru *l = lru_of(p);
	uint32_t list = list_of(tier, clean), after = NONE, next;
	uint64_t stamp = l->node[block].stamp;

	unlink_node(l, block);
	if (l->tail[list] != NONE && l->node[l->tail[list]].stamp < stamp) {
		link_node(l, block, list, l->tail[list]);
		return;
	}
	next = l->head[list];
	for (int i = 0; i < WALK_MAX && next != NONE && l->node[next].stamp < stamp; i++) {
		after = next;
		next = l->node[next].next;
	}
	link_node(l, block, list, after);
}

static void lru_busy(struct kvt_policy *p, uint32_t block)
{
	unlink_node(lru_of(p), block);
}

static uint32_t lru_victim(const struct kvt_policy *p, uint32_t tiers, bool clean)
{
	const struct lru *l = (const struct lru *)p;
	uint32_t best = NONE;

	for (uint32_t t = 0; t < KVT_TIERS; t++) {
		uint32_t head = l->head[list_of(t, clean)];

		if (!(tiers & (1u << t)) || head == NONE)
			continue;
		if (best == NONE || l->node[head].stamp < l->node[best].stamp)
			best = head;
	}
	return best;
}

static void lru_forget(struct kvt_policy *p, uint32_t block)
{
	struct lru *l = lru_of(p);

	unlink_node(l, block);
	l->node[block].stamp = 0;
}

const struct kvt_policy_ops kvt_policy_lru = {
	.name = "lru",
	.bytes = lru_bytes,
	.create = lru_create,
	.destroy = lru_destroy,
	.touch = lru_touch,
	.idle = lru_idle,
	.busy = lru_busy,
	.victim = lru_victim,
	.forget = lru_forget,
};
