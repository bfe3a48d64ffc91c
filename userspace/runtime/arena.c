// SPDX-License-Identifier: MIT
/*
 * Where buffers with known lifetimes go in one allocation. Greedy by size with
 * the best gap (Pisarchyk and Lee: "Efficient Memory Management for Deep Neural
 * Net Inference", 2020), by other orders too, and if none reaches the lower
 * bound, by exchanging pairs in the best order for a while. A function of
 * the plan alone.
 */
#include "runtime/arena.h"

#include <errno.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/params.h"
#include "runtime/philox.h"

#define MAX_BYTES (1ull << 60) /* of all buffers: no sum overflows */
#define SEARCH_WORK 4000000u   /* pairs of buffers looked at: some milliseconds */

struct item {
	uint64_t bytes, offset;
	uint32_t first, last;
};

struct layout {
	uint32_t n;
	struct item *items;
	uint32_t *order, *best, *by_offset; /* indices of items */
	uint64_t *offsets;		    /* of the best order */
	uint64_t bytes;
};

struct kvt_arena {
	struct kvt_gpu *gpu;
	struct kvt_budget *budget;
	kvt_dptr base;
	struct kvt_arena_size size;
	uint32_t n;
	struct slot {
		const char *name;
		uint64_t bytes, offset;
		uint32_t first, last;
	} slots[];
};

static bool together(const struct item *a, const struct item *b)
{
	return a->first <= b->last && b->first <= a->last;
}

/* Place all items in l->order, each in the smallest gap between those it lives with. Returns the bytes taken. */
static uint64_t place(struct layout *l)
{
	uint64_t total = 0;

	for (uint32_t placed = 0; placed < l->n; placed++) {
		struct item *x = &l->items[l->order[placed]];
		uint64_t end = 0, best = UINT64_MAX;
		uint32_t at = placed;

		for (uint32_t i = 0; i < placed; i++) {
			const struct item *y = &l->items[l->by_offset[i]];

			if (!together(x, y))
				continue;
			if (y->offset >= end + x->bytes && y->offset - end < best) {
				best = y->offset - end;
				x->offset = end;
			}
			if (y->offset + y->bytes > end)
				end = y->offset + y->bytes;
		}
		if (best == UINT64_MAX)
			x->offset = end;
		if (x->offset + x->bytes > total)
			total = x->offset + x->bytes;
		for (; at && l->items[l->by_offset[at - 1]].offset > x->offset; at--)
			l->by_offset[at] = l->by_offset[at - 1];
		l->by_offset[at] = l->order[placed];
	}
	return total;
}

static bool try_order(struct layout *l)
{
	uint64_t bytes = place(l);

	if (bytes > l->bytes)
		return false;
	l->bytes = bytes;
	memcpy(l->best, l->order, l->n * sizeof(*l->best));
	for (uint32_t i = 0; i < l->n; i++)
		l->offsets[i] = l->items[i].offset;
	return true;
}

static double rank(const struct item *x, uint32_t rule)
{
	double steps = (double)x->last - x->first + 1;

	switch (rule) {
	case 0:
		return x->bytes;
	case 1:
		return x->bytes * steps;
	case 2:
		return steps;
	default:
		return -(double)x->first;
	}
}

/* The largest rank first; the table's order among equals. */
static void sort_order(struct layout *l, uint32_t rule)
{
	for (uint32_t i = 0; i < l->n; i++) {
		uint32_t at = i;

		for (; at && rank(&l->items[l->order[at - 1]], rule) < rank(&l->items[i], rule); at--)
			l->order[at] = l->order[at - 1];
		l->order[at] = i;
	}
}

static void search(struct layout *l, uint64_t bound)
{
	uint32_t rounds = SEARCH_WORK / (l->n * l->n) + 1;

	for (uint32_t rule = 0; rule < 4; rule++) {
		sort_order(l, rule);
		try_order(l);
	}
	memcpy(l->order, l->best, l->n * sizeof(*l->order));
	for (uint32_t i = 0; i < rounds && l->bytes > bound; i++) {
		const uint32_t counter[4] = { i }, key[2] = { 0 };
		uint32_t draw[4], a, b, t;

		kvt_philox4x32_10(counter, key, draw);
		a = draw[0] % l->n;
		b = draw[1] % l->n;
		t = l->order[a];
		l->order[a] = l->order[b];
		l->order[b] = t;
		if (!try_order(l))
			memcpy(l->order, l->best, l->n * sizeof(*l->order));
	}
}

/* Live bytes are most where some buffer begins. */
static uint64_t most_alive(const struct layout *l)
{
	uint64_t most = 0;

	for (uint32_t i = 0; i < l->n; i++) {
		uint64_t alive = 0;

		for (uint32_t j = 0; j < l->n; j++)
			if (l->items[j].first <= l->items[i].first && l->items[j].last >= l->items[i].first)
				alive += l->items[j].bytes;
		most = alive > most ? alive : most;
	}
	return most;
}

static int read_plan(const struct kvt_arena_plan *plan, struct layout *l, uint64_t *sum)
{
	*sum = 0;
	for (uint32_t i = 0; i < plan->n; i++) {
		const struct kvt_arena_buffer *b = &plan->buffers[i];
		struct item *x = &l->items[i];

		if (b->first > b->last)
			return kvt_fail(-EINVAL, "scratch buffer %s lives from step %u to %u", b->name, b->first, b->last);
		if (b->bytes > MAX_BYTES || *sum + b->bytes > MAX_BYTES)
			return kvt_fail(-EOVERFLOW, "scratch buffer %s of %" PRIu64 " bytes: more than any machine has", b->name,
					b->bytes);
		*x = (struct item){ .first = b->first, .last = b->last };
		x->bytes = (b->bytes + KVT_ARENA_ALIGN - 1) / KVT_ARENA_ALIGN * KVT_ARENA_ALIGN;
		if (x->first < plan->loop_first && x->last >= plan->loop_first && x->last < plan->loop_last)
			x->last = plan->loop_last;
		*sum += x->bytes;
	}
	return 0;
}

static void layout_free(struct layout *l)
{
	free(l->items);
	free(l->order);
	free(l->offsets);
}

/* On success @plan, l->items, l->offsets and @size are set; free with layout_free(), also on failure. */
static int lay_out(const struct kvt_arena_plan *theirs, struct kvt_arena_plan *plan, struct layout *l,
		   struct kvt_arena_size *size)
{
	int err;

	*l = (struct layout){ .bytes = UINT64_MAX };
	err = kvt_params_copy(plan, sizeof(*plan), sizeof(*plan), theirs, "arena plan");
	if (err)
		return err;
	l->n = plan->n;
	if (!plan->n || plan->n > KVT_ARENA_BUFFERS)
		return kvt_fail(-EINVAL, "a plan of %u scratch buffers: 1 to %u are allowed", plan->n, KVT_ARENA_BUFFERS);
	if (!plan->buffers || !size)
		return kvt_fail(-EINVAL, "a plan of %u scratch buffers: %s is NULL", plan->n, size ? "buffers" : "the size to fill");
	if (plan->loop_first > plan->loop_last)
		return kvt_fail(-EINVAL, "a plan of scratch buffers: its loop runs from step %u to %u", plan->loop_first,
				plan->loop_last);
	l->items = calloc(plan->n, sizeof(*l->items));
	l->order = calloc(plan->n, 3 * sizeof(*l->order));
	l->offsets = calloc(plan->n, sizeof(*l->offsets));
	if (!l->items || !l->order || !l->offsets)
		return kvt_fail(-ENOMEM, "no memory to lay out %u scratch buffers", plan->n);
	l->best = l->order + plan->n;
	l->by_offset = l->best + plan->n;
	err = read_plan(plan, l, &size->unshared);
	if (err)
		return err;
	size->bound = most_alive(l);
	search(l, size->bound);
	size->bytes = l->bytes;
	return 0;
}

int kvt_arena_layout(const struct kvt_arena_plan *plan, uint64_t *offsets, struct kvt_arena_size *size)
{
	struct kvt_arena_plan ours;
	struct layout l;
	int err = lay_out(plan, &ours, &l, size);

	if (!err && offsets)
		memcpy(offsets, l.offsets, l.n * sizeof(*offsets));
	layout_free(&l);
	return err;
}

static int charge(struct kvt_budget *budget, uint64_t bytes)
{
	if (!budget || !kvt_budget_charge(budget, bytes))
		return 0;
	return kvt_fail(-ENOMEM, "scratch needs %" PRIu64 " bytes; %" PRIu64 " of a budget of %" PRIu64
				 " are in use: raise it, or lower the maximum batch or tokens of a pass",
			bytes, (uint64_t)budget->used, budget->limit);
}

static int take_memory(struct kvt_arena *a)
{
	int err = charge(a->budget, a->size.bytes);

	if (err)
		return err;
	err = a->gpu->ops->alloc(a->gpu, a->size.bytes, &a->base);
	if (err && a->budget)
		kvt_budget_release(a->budget, a->size.bytes);
	if (err)
		kvt_fail(err, "%s: no %" PRIu64 " bytes of scratch (error %d): lower the maximum batch or tokens of a pass",
			 a->gpu->ops->name, a->size.bytes, err);
	return err;
}

int kvt_arena_create_charged(struct kvt_gpu *gpu, struct kvt_budget *budget, const struct kvt_arena_plan *theirs,
			     struct kvt_arena **arena)
{
	struct kvt_arena_plan plan;
	struct kvt_arena *a = NULL;
	struct kvt_arena_size size;
	struct layout l;
	int err;

	*arena = NULL;
	err = lay_out(theirs, &plan, &l, &size);
	if (err)
		goto out_layout;
	a = calloc(1, sizeof(*a) + plan.n * sizeof(a->slots[0]));
	if (!a) {
		err = kvt_fail(-ENOMEM, "no memory for %u scratch buffers", plan.n);
		goto out_layout;
	}
	a->gpu = gpu;
	a->budget = budget;
	a->size = size;
	if (!a->size.bytes)
		a->size.bytes = KVT_ARENA_ALIGN; /* only empty buffers: still an address */
	a->n = plan.n;
	for (uint32_t i = 0; i < plan.n; i++)
		a->slots[i] = (struct slot){ plan.buffers[i].name, plan.buffers[i].bytes, l.offsets[i],
					     l.items[i].first, l.items[i].last };
	err = take_memory(a);
	if (err)
		free(a);
	else
		*arena = a;
out_layout:
	layout_free(&l);
	return err;
}

int kvt_arena_create(struct kvt_gpu *gpu, const struct kvt_arena_plan *plan, struct kvt_arena **arena)
{
	return kvt_arena_create_charged(gpu, NULL, plan, arena);
}

void kvt_arena_destroy(struct kvt_arena *a)
{
	if (!a)
		return;
	a->gpu->ops->free(a->gpu, a->base);
	if (a->budget)
		kvt_budget_release(a->budget, a->size.bytes);
	free(a);
}

int kvt_arena_get(const struct kvt_arena *a, uint32_t buffer, uint64_t bytes, uint32_t step, kvt_dptr *address)
{
	const struct slot *s;

	if (buffer >= a->n)
		return kvt_fail(-EINVAL, "scratch buffer %u: the plan has %u", buffer, a->n);
	s = &a->slots[buffer];
	if (bytes > s->bytes)
		return kvt_fail(-ENOSPC, "scratch buffer %s: %" PRIu64 " bytes asked, %" PRIu64
					 " planned: raise the maximum batch or tokens of a pass",
				s->name, bytes, s->bytes);
	if (step < s->first || step > s->last)
		return kvt_fail(-EINVAL, "scratch buffer %s in step %u: it lives from %u to %u", s->name, step, s->first, s->last);
	*address = a->base + s->offset;
	return 0;
}

struct kvt_arena_size kvt_arena_size(const struct kvt_arena *a)
{
	return a->size;
}
