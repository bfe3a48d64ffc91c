// SPDX-License-Identifier: MIT
/* Least recently used: the candidate that was touched longest ago goes first. */
#include <stdlib.h>

#include "policy/list.h"

#define LISTS (KVT_TIERS * 2)

struct lru {
	struct kvt_policy policy;
	uint64_t clock; /* touches */
	struct list list[LISTS];
	struct node node[];
};

static struct lru *lru_of(struct kvt_policy *p)
{
	return (struct lru *)p;
}

static uint64_t lru_bytes(const struct kvt_policy_params *p)
{
	return sizeof(struct lru) + (uint64_t)p->blocks * sizeof(struct node);
}

static struct kvt_policy *lru_create(const struct kvt_policy_params *p)
{
	struct lru *l = calloc(1, lru_bytes(p));

	if (!l)
		return NULL;
	l->policy.ops = &kvt_policy_lru;
	lists_init(l->list, LISTS, l->node, p->blocks);
	return &l->policy;
}

static void lru_destroy(struct kvt_policy *p)
{
	free(p);
}

static void lru_describe(struct kvt_policy *p, uint32_t block, const struct kvt_content *content)
{
	(void)p;
	(void)block;
	(void)content;
}

static void lru_touch(struct kvt_policy *p, uint32_t block, enum kvt_use use)
{
	struct lru *l = lru_of(p);
	uint32_t list = l->node[block].list;

	(void)use;
	list_remove(l->list, l->node, block);
	l->node[block].stamp = ++l->clock;
	if (list != NO_LIST)
		list_insert(l->list, l->node, list, block, BY_TOUCH);
}

static void lru_turn(struct kvt_policy *p)
{
	(void)p;
}

static void lru_idle(struct kvt_policy *p, uint32_t block, enum kvt_tier tier, bool clean)
{
	struct lru *l = lru_of(p);

	list_remove(l->list, l->node, block);
	list_insert(l->list, l->node, (uint32_t)tier * 2 + clean, block, BY_TOUCH);
}

static void lru_busy(struct kvt_policy *p, uint32_t block)
{
	list_remove(lru_of(p)->list, lru_of(p)->node, block);
}

static uint32_t lru_victim(struct kvt_policy *p, uint32_t tiers, bool clean)
{
	struct lru *l = lru_of(p);
	uint32_t best = NONE;

	for (uint32_t t = 0; t < KVT_TIERS; t++) {
		uint32_t head = l->list[t * 2 + clean].head;

		if (!(tiers & (1u << t)) || head == NONE)
			continue;
		if (best == NONE || l->node[head].stamp < l->node[best].stamp)
			best = head;
	}
	return best;
}

static void lru_forget(struct kvt_policy *p, uint32_t block)
{
	lru_busy(p, block);
	lru_of(p)->node[block].stamp = 0;
}

const struct kvt_policy_ops kvt_policy_lru = {
	.name = "lru",
	.bytes = lru_bytes,
	.create = lru_create,
	.destroy = lru_destroy,
	.describe = lru_describe,
	.touch = lru_touch,
	.turn = lru_turn,
	.idle = lru_idle,
	.busy = lru_busy,
	.victim = lru_victim,
	.forget = lru_forget,
};
