// SPDX-License-Identifier: MIT
/*
 * Attention over blocks.
 *
 * The splits that a pass must see are taken in groups. A group is as many
 * consecutive splits as a small share of the host frames holds, at least one:
 * what one group holds, and the next while it loads, does not stay for the next
 * round of what is read in a cycle. What is in memory already needs no loading
 * meanwhile, and comes in larger groups. units.h has a group's work.
 */
#include "attention/units.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"

#define STREAM_SHARE 16	   /* of the host frames, for a group; as much is for the next one */
#define RESIDENT_SHARE 4   /* the same for a group that is in memory */
#define GROUP_BLOCKS 8192u /* the most blocks of a group */
#define ALIGN 64

struct kvt_attend {
	struct kvt_store *store;
	uint32_t max_tokens;
	uint32_t window, resident; /* blocks of a group, and of one that is in memory */
	uint32_t capacity; /* of the arrays below */
	pthread_mutex_t turn;
	struct group group[2];
	struct kvt_view *views;
	struct kvt_units units;
};

static uint64_t round_up(uint64_t n, uint64_t to)
{
	return (n + to - 1) / to * to;
}

uint32_t kvt_split_blocks(uint32_t block_rows)
{
	if (block_rows % KVT_SPLIT == 0)
		return 1;
	return (KVT_SPLIT + block_rows - 1) / block_rows + (KVT_SPLIT % block_rows != 0);
}

/* ---- memory ---- */

struct layout {
	uint64_t blocks[2], views, units, total;
	uint32_t capacity;
};

static struct layout layout_of(const struct kvt_attend_params *p)
{
	struct layout l = { .capacity = p->frames < GROUP_BLOCKS ? p->frames : GROUP_BLOCKS };
	uint64_t at = sizeof(struct kvt_attend);

	if (l.capacity < p->split_blocks)
		l.capacity = p->split_blocks;
	for (int i = 0; i < 2; i++) {
		l.blocks[i] = at = round_up(at, ALIGN);
		at += l.capacity * sizeof(uint32_t);
	}
	l.views = at = round_up(at, ALIGN);
	at += l.capacity * sizeof(struct kvt_view);
	l.units = at = round_up(at, ALIGN);
	l.total = at + kvt_units_bytes(p);
	return l;
}

uint64_t kvt_attend_bytes(const struct kvt_attend_params *p)
{
	return layout_of(p).total;
}

/* Blocks of a group of that share of the frames. */
static uint32_t share_of(const struct kvt_attend_params *p, const struct layout *l, uint32_t share)
{
	uint32_t blocks = p->frames / share;

	if (blocks < p->split_blocks)
		blocks = p->split_blocks;
	return blocks < l->capacity ? blocks : l->capacity;
}

int kvt_attend_create(const struct kvt_attend_params *p, struct kvt_store *store, struct kvt_workers *workers,
		      struct kvt_attend **attend)
{
	struct layout l = layout_of(p);
	uint8_t *memory = aligned_alloc(ALIGN, round_up(l.total, ALIGN));
	struct kvt_attend *a = (struct kvt_attend *)memory;

	if (!memory)
		return kvt_fail(-ENOMEM, "no memory for attention's scratch (%llu bytes)", (unsigned long long)l.total);
	*a = (struct kvt_attend){
		.store = store, .max_tokens = p->max_query_rows, .capacity = l.capacity,
		.views = (struct kvt_view *)(memory + l.views),
	};
	for (int i = 0; i < 2; i++)
		a->group[i].blocks = (uint32_t *)(memory + l.blocks[i]);
	kvt_units_init(&a->units, p, workers, memory + l.units);
	a->window = share_of(p, &l, STREAM_SHARE);
	a->resident = share_of(p, &l, RESIDENT_SHARE);
	pthread_mutex_init(&a->turn, NULL);
	*attend = a;
	return 0;
}

void kvt_attend_destroy(struct kvt_attend *a)
{
	if (!a)
		return;
	pthread_mutex_destroy(&a->turn);
	free(a);
}

/* ---- groups ---- */

static uint32_t blocks_of(uint64_t first_row, uint64_t end_row, uint32_t block_rows)
{
	return (uint32_t)((end_row + block_rows - 1) / block_rows - first_row / block_rows);
}

/* The group of at most @window blocks that begins at split @first and ends at most at @end. */
static void cut_group(const struct kvt_attend_call *c, uint64_t first, uint64_t end, uint32_t window, struct group *g)
{
	uint64_t row0 = first * KVT_SPLIT, e = first;
	uint32_t nk = 0, nv = 0;

	while (e < end) {
		uint64_t row1 = (e + 1) * KVT_SPLIT < c->n_rows ? (e + 1) * KVT_SPLIT : c->n_rows;
		uint32_t k = blocks_of(row0, row1, c->k_geom->block_rows);
		uint32_t v = c->v_table == c->k_table ? 0 : blocks_of(row0, row1, c->v_geom->block_rows);

		if (e > first && k + v > window)
			break;
		nk = k;
		nv = v;
		e++;
	}
	g->first = first;
	g->end = e;
	g->k0 = row0 / c->k_geom->block_rows;
	g->v0 = row0 / c->v_geom->block_rows;
	g->n_k = nk;
	g->n_v = nv;
	g->v_at = c->v_table == c->k_table ? 0 : nk;
	memcpy(g->blocks, c->k_table + g->k0, nk * sizeof(uint32_t));
	memcpy(g->blocks + nk, c->v_table + g->v0, nv * sizeof(uint32_t));
}

/* The larger one, if it is in memory as a whole: a part to be loaded would hold up all of it. */
static void make_group(const struct kvt_attend *a, const struct kvt_attend_call *c, uint64_t first, uint64_t end,
		       struct group *g)
{
	cut_group(c, first, end, a->resident, g);
	if (kvt_store_missing(a->store, g->blocks, g->n_k + g->n_v))
		cut_group(c, first, end, a->window, g);
}

/* Start what the next call will likely read first; its holds are given back at once. */
static void look_ahead(struct kvt_attend *a, const struct kvt_attend_call *c, uint64_t first, struct group *g)
{
	struct kvt_attend_call next = *c;

	next.k_geom = c->next_k_geom;
	next.v_geom = c->next_v_geom;
	next.k_table = c->next_k_table;
	next.v_table = c->next_v_table;
	cut_group(&next, first, (c->n_rows + KVT_SPLIT - 1) / KVT_SPLIT, a->window, g);
	kvt_store_borrow_begin(a->store, g->blocks, g->n_k + g->n_v);
	kvt_store_borrow_drop(a->store, g->blocks, g->n_k + g->n_v);
}

static int run_pass(struct kvt_attend *a, struct pass *p)
{
	const struct kvt_attend_call *c = p->c;
	uint64_t lo = UINT64_MAX, hi = 0, from, to;
	struct group *now = &a->group[0], *next = &a->group[1], *swap;
	int ret;

	for (uint32_t t = p->t0; t < p->t0 + p->tokens; t++) {
		uint64_t l, h;

		kvt_attend_visible(c, t, &l, &h);
		if (l < h) {
			lo = l < lo ? l : lo;
			hi = h > hi ? h : hi;
		}
	}
	p->last = false;
	kvt_units_begin(p);
	from = lo < hi ? lo / KVT_SPLIT : 0;
	to = lo < hi ? (hi + KVT_SPLIT - 1) / KVT_SPLIT : 0;
	if (from < to) {
		make_group(a, c, from, to, now);
		kvt_store_borrow_begin(a->store, now->blocks, now->n_k + now->n_v);
	}
	while (from < to) {
		ret = kvt_store_borrow_wait(a->store, now->blocks, now->n_k + now->n_v, a->views);
		if (ret)
			return ret;
		p->g = now;
		from = now->end;
		p->last = from >= to;
		if (!p->last) {
			make_group(a, c, from, to, next);
			kvt_store_borrow_begin(a->store, next->blocks, next->n_k + next->n_v);
		} else if (c->next_k_table) {
			look_ahead(a, c, lo / KVT_SPLIT, next);
		}
		kvt_units_group(p);
		kvt_store_return(a->store, now->blocks, now->n_k + now->n_v);
		swap = now;
		now = next;
		next = swap;
	}
	if (!p->last)
		kvt_units_nothing(p);
	return 0;
}

int kvt_attend_run(struct kvt_attend *a, const struct kvt_attend_call *c)
{
	struct pass p = { .u = &a->units, .c = c, .views = a->views };
	int ret = 0;

	pthread_mutex_lock(&a->turn);
	for (p.t0 = 0; p.t0 < c->n && !ret; p.t0 += p.tokens) {
		p.tokens = c->n - p.t0 < a->max_tokens ? c->n - p.t0 : a->max_tokens;
		ret = run_pass(a, &p);
	}
	pthread_mutex_unlock(&a->turn);
	return ret;
}
