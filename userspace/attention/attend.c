// SPDX-License-Identifier: MIT
/*
 * Attention over blocks.
 *
 * The splits that a pass must see are taken in groups. A group is as many
 * consecutive splits as a small share of the host frames holds, at least one:
 * what one group holds, and the next while it loads, does not stay for the next
 * round of what is read in a cycle. What is in memory already needs no loading
 * meanwhile, and comes in larger groups. What comes after the group that loads, in
 * this pass and in the one that will likely follow it, is prefetched, so that the
 * disk always has enough to do, also between two calls. units.h has a group's work.
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
#define AHEAD_BYTES (2u << 20) /* of blocks that are prefetched, but no more than half of the host frames */
#define ALIGN 64

/* A block that was prefetched, and the first split that needs it. */
struct asked {
	uint32_t block, split;
};

/* The splits of a pass: those of [first, next) were prefetched. */
struct ahead {
	const uint32_t *k_table, *v_table;
	const struct kvt_plane_geom *k_geom, *v_geom;
	uint64_t n_rows, first, next, end;
};

struct kvt_attend {
	struct kvt_store *store;
	uint32_t max_tokens;
	uint32_t window, resident; /* blocks of a group, and of one that is in memory */
	uint32_t capacity; /* of the arrays below */
	uint32_t least, ahead, room; /* blocks that may be prefetched: always, at most, and in this pass; */
	uint32_t n_asked, n_here; /* those that are, and of them those that this pass needs */
	bool guessed;	/* this pass was expected: so the guess at what follows is worth reading for */
	pthread_mutex_t turn;
	struct ahead here, there; /* this pass, and the one that will likely follow it */
	struct asked *asked; /* [ahead], in the order of their use */
	uint32_t *list;	     /* [ahead], for a call */
	struct group group[2];
	struct kvt_view *views;
	struct kvt_units units;
};

uint32_t kvt_split_blocks(uint32_t block_rows)
{
	if (block_rows % KVT_SPLIT == 0)
		return 1;
	return (KVT_SPLIT + block_rows - 1) / block_rows + (KVT_SPLIT % block_rows != 0);
}

/* ---- memory ---- */

struct layout {
	uint64_t blocks[2], views, asked, list, units, total;
	uint32_t capacity, ahead;
};

static struct layout layout_of(const struct kvt_attend_params *p)
{
	struct layout l = { .capacity = p->frames < GROUP_BLOCKS ? p->frames : GROUP_BLOCKS };
	uint64_t at = sizeof(struct kvt_attend);

	if (l.capacity < p->split_blocks)
		l.capacity = p->split_blocks;
	for (int i = 0; i < 2; i++) {
		l.blocks[i] = at = kvt_round_up(at, ALIGN);
		at += l.capacity * sizeof(uint32_t);
	}
	l.views = at = kvt_round_up(at, ALIGN);
	at += l.capacity * sizeof(struct kvt_view);
	l.ahead = AHEAD_BYTES / p->block_bytes < p->frames / 2 ? (uint32_t)(AHEAD_BYTES / p->block_bytes) : p->frames / 2;
	if (l.ahead < p->split_blocks)
		l.ahead = p->split_blocks;
	l.asked = at = kvt_round_up(at, ALIGN);
	at += l.ahead * sizeof(struct asked);
	l.list = at;
	at += l.ahead * sizeof(uint32_t);
	l.units = at = kvt_round_up(at, ALIGN);
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
	uint8_t *memory = aligned_alloc(ALIGN, kvt_round_up(l.total, ALIGN));
	struct kvt_attend *a = (struct kvt_attend *)memory;

	if (!memory)
		return kvt_fail(-ENOMEM, "no memory for attention's scratch (%llu bytes)", (unsigned long long)l.total);
	*a = (struct kvt_attend){
		.store = store, .max_tokens = p->max_query_rows, .capacity = l.capacity,
		.views = (struct kvt_view *)(memory + l.views), .least = p->split_blocks, .ahead = l.ahead,
		.asked = (struct asked *)(memory + l.asked), .list = (uint32_t *)(memory + l.list),
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

/* The splits [*from, *to) that the pass from query token @t0 on sees. Returns its tokens. */
static uint32_t pass_range(const struct kvt_attend *a, const struct kvt_attend_call *c, uint32_t t0, uint64_t *from,
			   uint64_t *to)
{
	uint32_t n = c->n - t0 < a->max_tokens ? c->n - t0 : a->max_tokens;
	uint64_t lo = UINT64_MAX, hi = 0;

	for (uint32_t t = t0; t < t0 + n; t++) {
		uint64_t l, h;

		kvt_attend_visible(c, t, &l, &h);
		if (l < h) {
			lo = l < lo ? l : lo;
			hi = h > hi ? h : hi;
		}
	}
	*from = lo < hi ? lo / KVT_SPLIT : 0;
	*to = lo < hi ? (hi + KVT_SPLIT - 1) / KVT_SPLIT : 0;
	return n;
}

/* ---- ahead of the groups ---- */

static struct ahead ahead_of(const struct kvt_attend *a, const struct kvt_attend_call *c, uint32_t t0)
{
	struct ahead w = { .k_table = c->k_table, .v_table = c->v_table, .k_geom = c->k_geom, .v_geom = c->v_geom,
			   .n_rows = c->n_rows };

	pass_range(a, c, t0, &w.first, &w.end);
	w.next = w.first;
	return w;
}

/* What was prefetched is not needed after all. */
static void drop_asked(struct kvt_attend *a)
{
	for (uint32_t i = 0; i < a->n_asked; i++)
		a->list[i] = a->asked[i].block;
	kvt_store_prefetch_drop(a->store, a->list, a->n_asked);
	a->n_asked = a->n_here = 0;
	a->there.k_table = NULL;
}

/*
 * What was prefetched for a pass that would follow is the beginning of this one, or
 * was a wrong guess. Two who attend in turns, each to its own, would always guess
 * wrong; so a guess is only read for where the one before it was right.
 */
static void begin_ahead(struct kvt_attend *a, const struct kvt_attend_call *c, uint32_t t0)
{
	const struct ahead *was = &a->there;

	a->here = ahead_of(a, c, t0);
	a->guessed = was->k_table == c->k_table && was->v_table == c->v_table && was->first == a->here.first &&
		     was->next <= a->here.end;
	if (a->guessed)
		a->here.next = was->next;
	else
		drop_asked(a);
	a->n_here = a->n_asked;
	a->there.k_table = NULL;
	a->room = kvt_store_prefetch_room(a->store);
	a->room = a->room < a->least ? a->least : a->room < a->ahead ? a->room : a->ahead;
}

/* To those asked for, and @n that are going to be, the blocks that the next split needs and none before it. False: too many. */
static bool add_blocks(struct kvt_attend *a, const struct ahead *w, const uint32_t *table, uint64_t block_rows, uint32_t *n)
{
	uint64_t row = w->next * KVT_SPLIT, end = row + KVT_SPLIT < w->n_rows ? row + KVT_SPLIT : w->n_rows;
	uint64_t b = w->next > w->first ? (row + block_rows - 1) / block_rows : row / block_rows;

	for (; b * block_rows < end; b++, (*n)++) {
		if (a->n_asked + *n >= a->room)
			return false;
		a->asked[a->n_asked + *n] = (struct asked){ table[b], (uint32_t)w->next };
		a->list[*n] = table[b];
	}
	return true;
}

/* Prefetch whole splits, as many as may be and the store has frames for. True: all of the pass's have been. */
static bool ask(struct kvt_attend *a, struct ahead *w)
{
	uint32_t n = 0, whole = 0, done;

	for (; w->next < w->end; w->next++, whole = n)
		if (!add_blocks(a, w, w->k_table, w->k_geom->block_rows, &n) ||
		    (w->v_table != w->k_table && !add_blocks(a, w, w->v_table, w->v_geom->block_rows, &n)))
			break;
	done = whole ? kvt_store_prefetch(a->store, a->list, whole) : 0;
	if (done < whole) {
		w->next = a->asked[a->n_asked + done].split;
		for (whole = done; whole && a->asked[a->n_asked + whole - 1].split == w->next;)
			whole--;
	}
	a->n_asked += whole;
	return w->next == w->end;
}

/* A group has begun: prefetch behind it. */
static void look_ahead(struct kvt_attend *a, const struct kvt_attend_call *c, uint32_t next_t0, const struct group *g)
{
	uint32_t begun = 0;

	while (begun < a->n_here && a->asked[begun].split < g->end)
		begun++;
	a->n_asked -= begun;
	a->n_here -= begun;
	memmove(a->asked, a->asked + begun, a->n_asked * sizeof(*a->asked));
	if (a->here.next < g->end)
		a->here.next = g->end;
	if (!a->there.k_table) {
		if (!ask(a, &a->here) || (next_t0 == c->n && !c->next)) {
			a->n_here = a->n_asked;
			return;
		}
		a->n_here = a->n_asked;
		a->there = next_t0 < c->n ? ahead_of(a, c, next_t0) : ahead_of(a, c->next, 0);
	}
	if (a->guessed)
		ask(a, &a->there);
}

static void begin_group(struct kvt_attend *a, const struct pass *p, uint64_t first, uint64_t end, struct group *g)
{
	make_group(a, p->c, first, end, g);
	kvt_store_borrow_begin(a->store, g->blocks, g->n_k + g->n_v);
	look_ahead(a, p->c, p->t0 + p->tokens, g);
}

static int run_pass(struct kvt_attend *a, struct pass *p)
{
	const struct kvt_attend_call *c = p->c;
	uint64_t from, to;
	struct group *now = &a->group[0], *next = &a->group[1], *swap;
	int ret;

	p->last = false;
	kvt_units_begin(p);
	pass_range(a, c, p->t0, &from, &to);
	if (from < to) {
		begin_ahead(a, c, p->t0);
		begin_group(a, p, from, to, now);
	}
	while (from < to) {
		ret = kvt_store_borrow_wait(a->store, now->blocks, now->n_k + now->n_v, a->views);
		if (ret) {
			drop_asked(a);
			return ret;
		}
		p->g = now;
		from = now->end;
		p->last = from >= to;
		if (!p->last)
			begin_group(a, p, from, to, next);
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
