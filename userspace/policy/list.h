/* SPDX-License-Identifier: MIT */
/* Lists of candidates, threaded through an array of nodes: what the policies have in common. */
#ifndef KVT_POLICY_LIST_H
#define KVT_POLICY_LIST_H

#include <stdint.h>

#include "policy/policy.h"

#define NONE KVT_POLICY_NONE
#define NO_LIST UINT16_MAX
#define WALK_MAX 64

struct node {
	uint64_t stamp; /* of the last touch, 0: none. Lists are sorted by it, the oldest first, */
	uint32_t written; /* or by when the last write was (its low bits) */
	uint32_t prev, next;
	uint16_t list;
	uint8_t hits;
	uint8_t class;
};

struct list {
	uint32_t head, tail; /* oldest, newest */
};

enum order { BY_TOUCH, BY_WRITE };

static inline void lists_init(struct list *lists, uint32_t n_lists, struct node *nodes, uint32_t n_nodes)
{
	for (uint32_t i = 0; i < n_lists; i++)
		lists[i].head = lists[i].tail = NONE;
	for (uint32_t i = 0; i < n_nodes; i++)
		nodes[i].list = NO_LIST;
}

static inline void list_remove(struct list *lists, struct node *nodes, uint32_t i)
{
	struct node *n = &nodes[i];
	struct list *l;

	if (n->list == NO_LIST)
		return;
	l = &lists[n->list];
	if (n->prev != NONE)
		nodes[n->prev].next = n->next;
	else
		l->head = n->next;
	if (n->next != NONE)
		nodes[n->next].prev = n->prev;
	else
		l->tail = n->prev;
	n->list = NO_LIST;
}

static inline bool node_after(const struct node *a, const struct node *b, enum order order)
{
	return order == BY_TOUCH ? a->stamp > b->stamp : (int32_t)(a->written - b->written) > 0;
}

/*
 * Put @i into @list, behind its equals. Its place is looked for from both ends
 * at once, over at most WALK_MAX steps: most come back newest, or, when others
 * have gone, oldest. One that is found by neither is put where the walk from the tail ended.
 */
static inline void list_insert(struct list *lists, struct node *nodes, uint32_t list, uint32_t i,
			       enum order order)
{
	struct list *l = &lists[list];
	uint32_t behind = l->tail, before = l->head;
	struct node *n = &nodes[i];

	for (int step = 0; behind != NONE && node_after(&nodes[behind], n, order) && step < WALK_MAX; step++) {
		if (node_after(&nodes[before], n, order)) {
			behind = nodes[before].prev;
			break;
		}
		before = nodes[before].next;
		behind = nodes[behind].prev;
	}
	n->list = (uint16_t)list;
	n->prev = behind;
	n->next = behind == NONE ? l->head : nodes[behind].next;
	if (n->prev != NONE)
		nodes[n->prev].next = i;
	else
		l->head = i;
	if (n->next != NONE)
		nodes[n->next].prev = i;
	else
		l->tail = i;
}

#endif
