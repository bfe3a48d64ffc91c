// SPDX-License-Identifier: MIT
/*
 * Units of attention. A unit is either a block of one KV head's query rows over
 * all the group's splits, merged into the running state at once; or, where that
 * gives too few units for the threads (decoding), query rows of as many KV heads
 * as a kernel call takes over a few splits. Their parts are kept until those of
 * all splits before them are merged: whoever leaves the next part in turn merges
 * it, and what follows it. Either way a row meets the same splits in the same
 * order through the same formula, so its bits are the same.
 *
 * Units are dealt from one counter, ascending. A thread takes its next one while
 * it still has a split to do, and asks for its rows meanwhile; units are long at
 * first and short, then narrow, at the end, so that threads end together.
 */
#include "attention/units.h"

#include <stdatomic.h>
#include <sched.h>
#include <string.h>

#include "codec/codec.h"

#define PART_TOKENS 64 /* query tokens x splits whose parts are kept: bits of a word */
#define RUN_MAX 16     /* splits */
#define ALIGN 64

/* A worker's own: what one kernel call reads, then the kernel's scratch. */
struct rows {
	const uint8_t *k[KVT_SPLIT + KVT_TILE], *v[KVT_SPLIT];
	const float *q[UNIT_ROWS];
	const void *mask[UNIT_ROWS];
	uint64_t lo[UNIT_ROWS], hi[UNIT_ROWS], pos[UNIT_ROWS];
	float slope[UNIT_ROWS];
	float max[UNIT_ROWS], sum[UNIT_ROWS];
	float *out[UNIT_ROWS];
	float sink[UNIT_ROWS];
};

/* Query rows [first, first + n) of a KV head; what they have merged. */
struct merging {
	_Atomic uint64_t ready; /* slots whose part waits to be merged */
	_Atomic uint32_t next;	/* split of the group */
	atomic_bool busy;
} __attribute__((aligned(ALIGN)));

/* ---- memory ---- */

struct layout {
	uint64_t run, part, merging, scratch, total;
	size_t scratch_bytes, wide_bytes;
};

static uint64_t state_bytes(uint64_t rows, uint32_t v_dim)
{
	return kvt_round_up(rows * (v_dim + 2ull) * sizeof(float), ALIGN);
}

static struct layout layout_of(const struct kvt_attend_params *p)
{
	const struct kvt_attn_shape shape = { .k_dim = p->max_k_dim, .v_dim = p->max_v_dim };
	struct layout l = { 0 };

	l.part = state_bytes((uint64_t)p->max_query_rows * p->max_query_heads, p->max_v_dim);
	l.merging = l.part + state_bytes((uint64_t)PART_TOKENS * p->max_query_heads, p->max_v_dim);
	l.scratch = l.merging + p->max_query_heads * sizeof(struct merging);
	/* the kernel's scratch, and a part's accumulator, which merge() reads */
	l.scratch_bytes = kvt_round_up(sizeof(struct rows), ALIGN) + state_bytes(UNIT_ROWS, p->max_v_dim) +
			  kvt_round_up(kvt_attn_kernels(NULL)->scratch_bytes(&shape, UNIT_ROWS), ALIGN);
	l.wide_bytes = p->widen ? KVT_SPLIT * (p->max_k_dim + p->max_v_dim) * sizeof(float) : 0;
	l.scratch_bytes += l.wide_bytes;
	l.total = l.scratch + l.scratch_bytes * p->threads;
	return l;
}

uint64_t kvt_units_bytes(const struct kvt_attend_params *p)
{
	return layout_of(p).total;
}

static void set_state(struct kvt_attn_state *st, void *memory, uint64_t rows)
{
	st->max = memory;
	st->sum = st->max + rows;
	st->acc = st->sum + rows;
}

void kvt_units_init(struct kvt_units *u, const struct kvt_attend_params *p, struct kvt_workers *workers, void *memory)
{
	struct layout l = layout_of(p);
	uint8_t *at = memory;

	*u = (struct kvt_units){
		.workers = workers, .kernels = kvt_attn_kernels(NULL), .merging = (struct merging *)(at + l.merging),
		.scratch = at + l.scratch, .scratch_bytes = l.scratch_bytes, .wide_bytes = l.wide_bytes,
		.max_v_dim = p->max_v_dim,
	};
	memset(u->merging, 0, p->max_query_heads * sizeof(struct merging));
	set_state(&u->run, at + l.run, (uint64_t)p->max_query_rows * p->max_query_heads);
	set_state(&u->part, at + l.part, (uint64_t)PART_TOKENS * p->max_query_heads);
}

/* ---- what a unit reads ---- */

void kvt_attend_visible(const struct kvt_attend_call *c, uint32_t token, uint64_t *lo, uint64_t *hi)
{
	uint64_t pos = c->first + token;

	*lo = 0;
	*hi = c->n_rows;
	if (c->mask)
		return;
	if (c->causal && pos + 1 < *hi)
		*hi = pos + 1;
	if (c->window && pos + 1 > c->window)
		*lo = pos + 1 - c->window;
	if (*lo > *hi)
		*lo = *hi;
}

static struct kvt_attn_state state_at(const struct kvt_attn_state *st, uint64_t row, uint32_t v_dim)
{
	return (struct kvt_attn_state){ st->max + row, st->sum + row, st->acc + row * v_dim };
}

/* Where rows [first, first + n) of a plane are, given the views of its blocks from @block0 on. */
static void point_at_rows(const struct kvt_view *views, uint64_t block0, const struct kvt_plane_geom *g, uint64_t first,
			  uint32_t n, const uint8_t **rows)
{
	const struct kvt_view *view = views + (first / g->block_rows - block0);
	uint32_t row = (uint32_t)(first % g->block_rows);

	for (const uint8_t **end = rows + n; rows < end; view++, row = 0) {
		const uint8_t *at = view->data + (uint64_t)row * g->row_bytes;
		uint32_t here = g->block_rows - row < end - rows ? g->block_rows - row : (uint32_t)(end - rows);

		for (uint32_t j = 0; j < here; j++)
			*rows++ = at + (size_t)j * g->row_bytes;
	}
}

/* Rows of groups with a scale become f32, which is exact: one head's, in @to. */
static void widen(const struct kvt_plane_geom *g, uint32_t kv_heads, uint32_t head, uint32_t n, const uint8_t **rows, float *to)
{
	uint32_t dim = g->elems / kv_heads, offset = head * (g->row_bytes / kv_heads);

	for (uint32_t j = 0; j < n; j++, to += dim) {
		kvt_codec_convert(to, KVT_F32, rows[j] + offset, g->codec, dim);
		rows[j] = (const uint8_t *)to;
	}
}

static uint32_t split_rows(const struct kvt_attend_call *c, uint64_t split)
{
	uint64_t left = c->n_rows - split * KVT_SPLIT;

	return left < KVT_SPLIT ? (uint32_t)left : KVT_SPLIT;
}

/* @next: the split that this thread takes afterwards, the group's end if none. */
static void point_at_split(const struct pass *p, uint64_t split, uint64_t next, uint32_t head, uint32_t heads,
			   struct rows *r, float *wide, struct kvt_split_rows *s)
{
	const struct kvt_attend_call *c = p->c;
	uint64_t first = split * KVT_SPLIT;
	uint32_t n = split_rows(c, split), more = 0;

	point_at_rows(p->views, p->g->k0, c->k_geom, first, n, r->k);
	if (next < p->g->end && kvt_codec_group(c->k_geom->codec) == 1) {
		more = split_rows(c, next) < KVT_TILE ? split_rows(c, next) : KVT_TILE;
		point_at_rows(p->views, p->g->k0, c->k_geom, next * KVT_SPLIT, more, r->k + n);
	}
	point_at_rows(p->views + p->g->v_at, p->g->v0, c->v_geom, first, n, r->v);
	*s = (struct kvt_split_rows){
		.first = first, .n = n, .heads = heads, .k = r->k, .v = r->v, .more = more,
		.k_offset = head * (c->k_geom->row_bytes / c->kv_heads),
		.v_offset = head * (c->v_geom->row_bytes / c->kv_heads),
	};
	if (kvt_codec_group(c->k_geom->codec) > 1) {
		widen(c->k_geom, c->kv_heads, head, n, r->k, wide);
		s->k_offset = 0;
	}
	if (kvt_codec_group(c->v_geom->codec) > 1) {
		widen(c->v_geom, c->kv_heads, head, n, r->v, wide + KVT_SPLIT * c->shape.k_dim);
		s->v_offset = 0;
	}
}

/* Rows [row, row + m) of all KV heads': their queries, and the splits [from, to) that any of them sees. */
static void point_at_queries(const struct pass *p, uint32_t row, uint32_t m, struct rows *r, struct kvt_query_rows *q,
			     uint64_t *from, uint64_t *to)
{
	const struct kvt_attend_call *c = p->c;
	uint64_t lo = UINT64_MAX, hi = 0, element = c->shape.mask_type == KVT_F16 ? 2 : 4;

	for (uint32_t i = 0; i < m; i++) {
		uint32_t head = (row + i) / p->rows, at = (row + i) % p->rows;
		uint32_t token = p->t0 + at / p->group_heads, h = head * p->group_heads + at % p->group_heads;

		r->q[i] = c->q + token * c->q_stride + (uint64_t)h * c->shape.k_dim;
		r->pos[i] = c->first + token;
		kvt_attend_visible(c, token, &r->lo[i], &r->hi[i]);
		if (r->lo[i] < r->hi[i]) {
			lo = r->lo[i] < lo ? r->lo[i] : lo;
			hi = r->hi[i] > hi ? r->hi[i] : hi;
		}
		if (c->slopes)
			r->slope[i] = c->slopes[h];
		if (c->mask)
			r->mask[i] = (const uint8_t *)c->mask + token * c->mask_stride * element;
	}
	*q = (struct kvt_query_rows){
		.m = m, .q = r->q, .lo = r->lo, .hi = r->hi, .pos = r->pos,
		.mask = c->mask ? r->mask : NULL, .slope = c->slopes ? r->slope : NULL,
	};
	*from = lo < hi ? lo / KVT_SPLIT : 0;
	*to = lo < hi ? (hi + KVT_SPLIT - 1) / KVT_SPLIT : 0;
}

/* Row blocks are counted through all KV heads. */
static uint32_t first_row(const struct pass *p, uint32_t i)
{
	return i / p->row_blocks * p->rows + i % p->row_blocks * UNIT_ROWS;
}

static uint32_t rows_of(const struct pass *p, uint32_t i)
{
	uint32_t left = p->rows - i % p->row_blocks * UNIT_ROWS;

	return left < UNIT_ROWS ? left : UNIT_ROWS;
}

/* A worker's share of the scratch. */
struct mine {
	struct rows *rows;
	float *acc, *wide;
	void *kernel;
};

static struct mine mine_of(const struct kvt_units *u, uint32_t worker)
{
	uint8_t *at = u->scratch + worker * u->scratch_bytes;
	struct mine m = { .rows = (struct rows *)at, .wide = (float *)(at + u->scratch_bytes - u->wide_bytes) };

	at += kvt_round_up(sizeof(struct rows), ALIGN);
	m.acc = (float *)at;
	m.kernel = at + state_bytes(UNIT_ROWS, u->max_v_dim);
	return m;
}

/* A row block's output. */
static void finish(void *arg, uint32_t worker, uint32_t i)
{
	const struct pass *p = arg;
	const struct kvt_attend_call *c = p->c;
	struct rows *r = mine_of(p->u, worker).rows;
	uint32_t head = i / p->row_blocks, row = i % p->row_blocks * UNIT_ROWS, v_dim = c->shape.v_dim, m = rows_of(p, i);
	struct kvt_attn_state run = state_at(&p->u->run, (uint64_t)head * p->rows + row, v_dim);

	for (uint32_t j = 0; j < m; j++) {
		uint32_t token = p->t0 + (row + j) / p->group_heads;
		uint32_t h = head * p->group_heads + (row + j) % p->group_heads;

		r->out[j] = c->out + token * c->out_stride + (uint64_t)h * v_dim;
		r->sink[j] = c->sinks ? c->sinks[h] : 0;
	}
	p->u->kernels->finish(&run, m, v_dim, c->sinks ? r->sink : NULL, r->out);
}

/* ---- units over all splits ---- */

static void whole_unit(void *arg, uint32_t worker, uint32_t i)
{
	struct pass *p = arg;
	struct kvt_units *u = p->u;
	struct mine m = mine_of(u, worker);
	uint32_t row = first_row(p, i), n = rows_of(p, i);
	struct kvt_attn_state part = { m.rows->max, m.rows->sum, m.acc }, run = state_at(&u->run, row, p->c->shape.v_dim);
	struct kvt_split_rows s;
	struct kvt_query_rows q;
	uint64_t from, to;

	point_at_queries(p, row, n, m.rows, &q, &from, &to);
	from = from < p->g->first ? p->g->first : from;
	to = to > p->g->end ? p->g->end : to;
	for (uint64_t split = from; split < to; split++) {
		point_at_split(p, split, split + 1 < to ? split + 1 : p->g->end, i / p->row_blocks, 1, m.rows, m.wide, &s);
		u->kernels->split(&p->c->shape, &s, &q, &part, m.kernel);
		u->kernels->merge(&run, &part, n, p->c->shape.v_dim);
	}
	if (p->last)
		finish(p, worker, i);
}

/* ---- units over a few, with parts ---- */

/* Splits [first, end) of KV heads [head, head + heads); or of one block of one head's rows, if there are several. */
struct unit {
	uint64_t first, end;
	uint32_t head, heads, block;
};

static struct unit unit_at(const struct pass *p, uint64_t i)
{
	uint32_t wide = (p->c->kv_heads + p->heads - 1) / p->heads * p->row_blocks;
	uint64_t runs = p->long_runs + p->short_runs, run = i / wide;
	uint32_t heads = p->heads, at = (uint32_t)(i % wide);
	struct unit t;

	if (run >= runs) {
		wide = (p->c->kv_heads + p->narrow - 1) / p->narrow * p->row_blocks;
		i -= runs * ((p->c->kv_heads + p->heads - 1) / p->heads * p->row_blocks);
		run = runs + i / wide;
		heads = p->narrow;
		at = (uint32_t)(i % wide);
	}
	t.first = p->g->first + run + (run < p->long_runs ? run : p->long_runs) * (p->run - 1);
	t.end = t.first + (run < p->long_runs ? p->run : 1);
	t.head = at / p->row_blocks * heads;
	t.heads = p->c->kv_heads - t.head < heads ? p->c->kv_heads - t.head : heads;
	t.block = at % p->row_blocks;
	return t;
}

static void cut_units(struct pass *p)
{
	uint32_t threads = kvt_workers_count(p->u->workers), splits = (uint32_t)(p->g->end - p->g->first);
	uint32_t wide = (p->c->kv_heads + p->heads - 1) / p->heads * p->row_blocks;

	/* long runs cost less; short ones at the end keep all threads busy */
	p->run = splits * wide / (8 * threads);
	p->run = p->run < p->slots / threads ? p->run : p->slots / threads;
	p->run = p->run < 1 ? 1 : p->run > RUN_MAX ? RUN_MAX : p->run;
	p->long_runs = splits * 3 / 4 / p->run;
	p->short_runs = splits - p->long_runs * p->run;
	p->narrow = (p->heads + 3) / 4;
	p->narrow_runs = p->narrow == p->heads ? 0 : p->short_runs < threads ? p->short_runs : threads;
	p->short_runs -= p->narrow_runs;
	p->units = (uint64_t)(p->long_runs + p->short_runs) * wide +
		   (uint64_t)p->narrow_runs * ((p->c->kv_heads + p->narrow - 1) / p->narrow * p->row_blocks);
	atomic_store(&p->next, 0);
	for (uint32_t i = 0; i < p->c->kv_heads * p->row_blocks; i++) {
		atomic_store(&p->u->merging[i].ready, 0);
		atomic_store(&p->u->merging[i].next, 0);
	}
}

static struct kvt_attn_state part_at(const struct pass *p, uint64_t split, uint64_t row)
{
	uint64_t all = (uint64_t)p->c->kv_heads * p->rows;

	return state_at(&p->u->part, (split - p->g->first) % p->slots * all + row, p->c->shape.v_dim);
}

/* The bit of a split of the group. */
static uint64_t slot_bit(const struct pass *p, uint32_t split)
{
	return 1ull << split % p->slots;
}

/* A row block's parts, as far as they are there without a gap, into its running state; after the last, its output. */
static void merge_ready(struct pass *p, uint32_t worker, uint32_t i)
{
	struct merging *m = &p->u->merging[i];
	uint32_t splits = (uint32_t)(p->g->end - p->g->first), row = first_row(p, i), n = rows_of(p, i), next;
	struct kvt_attn_state run = state_at(&p->u->run, row, p->c->shape.v_dim);

	do {
		if (atomic_exchange(&m->busy, true))
			return; /* who is at it looks again when it is no longer busy */
		next = atomic_load(&m->next);
		while (next < splits && atomic_load(&m->ready) & slot_bit(p, next)) {
			struct kvt_attn_state part = part_at(p, p->g->first + next, row);

			p->u->kernels->merge(&run, &part, n, p->c->shape.v_dim);
			atomic_fetch_and(&m->ready, ~slot_bit(p, next));
			atomic_store(&m->next, ++next);
			if (next == splits && p->last)
				finish(p, worker, i);
		}
		atomic_store(&m->busy, false);
	} while (next < splits && atomic_load(&m->ready) & slot_bit(p, next));
}

/* Until the unit's slots are free. Whoever has the first split that is not merged does not wait. */
static void wait_for_slots(struct pass *p, const struct unit *t)
{
	for (uint32_t h = t->head; h < t->head + t->heads; h++) {
		struct merging *m = &p->u->merging[h * p->row_blocks + t->block];

		while (t->end - p->g->first > atomic_load(&m->next) + (uint64_t)p->slots)
			sched_yield();
	}
}

/* Returns the next unit. */
static uint64_t do_unit(struct pass *p, uint32_t worker, uint64_t i)
{
	struct kvt_units *u = p->u;
	struct mine m = mine_of(u, worker);
	struct unit t = unit_at(p, i);
	uint32_t row = first_row(p, t.head * p->row_blocks + t.block);
	uint32_t n = p->row_blocks > 1 ? rows_of(p, t.head * p->row_blocks + t.block) : t.heads * p->rows;
	uint64_t from, to, bits = 0, next = 0;
	struct kvt_split_rows s;
	struct kvt_query_rows q;

	point_at_queries(p, row, n, m.rows, &q, &from, &to);
	wait_for_slots(p, &t);
	for (uint64_t split = t.first; split < t.end; split++) {
		struct kvt_attn_state part = part_at(p, split, row);
		uint64_t then = split + 1;

		bits |= slot_bit(p, (uint32_t)(split - p->g->first));
		if (then == t.end) {
			next = atomic_fetch_add(&p->next, 1);
			then = next < p->units ? unit_at(p, next).first : p->g->end;
		}
		if (split < from || split >= to) {
			kvt_attn_state_clear(&part, n, p->c->shape.v_dim);
			continue;
		}
		point_at_split(p, split, then, t.head, t.heads, m.rows, m.wide, &s);
		u->kernels->split(&p->c->shape, &s, &q, &part, m.kernel);
	}
	for (uint32_t h = t.head; h < t.head + t.heads; h++) {
		uint32_t k = h * p->row_blocks + t.block;

		atomic_fetch_or(&u->merging[k].ready, bits);
		merge_ready(p, worker, k);
	}
	return next;
}

static void deal(void *arg, uint32_t worker, uint32_t i)
{
	struct pass *p = arg;
	uint64_t next = atomic_fetch_add(&p->next, 1);

	(void)i;
	while (next < p->units)
		next = do_unit(p, worker, next);
}

/* ---- a pass ---- */

void kvt_units_begin(struct pass *p)
{
	const struct kvt_attend_call *c = p->c;
	struct kvt_attn_state run = p->u->run;

	p->group_heads = c->heads / c->kv_heads;
	p->rows = p->tokens * p->group_heads;
	p->row_blocks = (p->rows + UNIT_ROWS - 1) / UNIT_ROWS;
	p->parts = p->rows <= KVT_FEW_ROWS || (c->kv_heads * p->row_blocks < 4 * kvt_workers_count(p->u->workers) &&
					       p->tokens <= PART_TOKENS / 2);
	p->heads = p->parts && p->rows <= KVT_FEW_ROWS && !c->widen ? KVT_HEADS_ROWS / p->rows : 1;
	p->heads = p->heads < c->kv_heads ? p->heads : c->kv_heads;
	p->slots = PART_TOKENS / p->tokens;
	kvt_attn_state_clear(&run, c->kv_heads * p->rows, c->shape.v_dim);
}

void kvt_units_group(struct pass *p)
{
	if (p->parts) {
		cut_units(p);
		kvt_workers_run_now(p->u->workers, kvt_workers_count(p->u->workers), deal, p);
	} else {
		kvt_workers_run_now(p->u->workers, p->c->kv_heads * p->row_blocks, whole_unit, p);
	}
}

void kvt_units_nothing(struct pass *p)
{
	kvt_workers_run_now(p->u->workers, p->c->kv_heads * p->row_blocks, finish, p);
}
