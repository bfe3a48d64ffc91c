// SPDX-License-Identifier: MIT
/*
 * Attention over blocks.
 *
 * The splits that a pass must see are taken in groups. A group is as many
 * consecutive splits as a small share of the host frames holds, at least one:
 * what one group holds, and the next while it loads, does not stay for the next
 * round of what is read in a cycle. What is in memory already needs no loading
 * meanwhile, and comes in larger groups. A group's work is cut into units:
 * either a block of one KV head's query rows over all the group's splits, merged
 * into the running state at once; or, where that gives too few units for the
 * threads (decoding), query rows of as many KV heads as a kernel call takes over
 * a few splits, kept as parts and merged afterwards. Either way a row meets the
 * same splits in the same order through the same formula, so its bits are the
 * same.
 */
#include "attention/attend.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "codec/codec.h"

#define UNIT_ROWS 128	   /* query rows of a unit */
#define PART_TOKENS 64	   /* query tokens x splits whose parts are kept */
#define RUN_MAX 16	   /* splits */
#define STREAM_SHARE 16	   /* of the host frames, for a group; as much is for the next one */
#define RESIDENT_SHARE 4   /* the same for a group that is in memory */
#define GROUP_BLOCKS 8192u /* the most blocks of a group */
#define ALIGN 64

struct group {
	uint64_t first, end;   /* splits [first, end) */
	uint64_t k0, v0;       /* first block of each plane */
	uint32_t n_k, n_v;     /* n_v is 0 where V's rows lie in K's */
	uint32_t v_at;	       /* V's first view */
	uint32_t *blocks;      /* [n_k] then [n_v] */
};

struct kvt_attend {
	struct kvt_store *store;
	struct kvt_workers *workers;
	const struct kvt_attn_kernels *kernels;
	uint32_t max_tokens, max_v_dim;
	uint32_t window, resident; /* blocks of a group, and of one that is in memory */
	uint32_t capacity; /* of the arrays below */
	pthread_mutex_t turn;
	struct group group[2];
	struct kvt_view *views;
	struct kvt_attn_state run, part;
	uint8_t *scratch; /* [workers][scratch_bytes] */
	size_t scratch_bytes, wide_bytes;
};

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

/* A pass: some query tokens of a call over its groups. */
struct pass {
	struct kvt_attend *a;
	const struct kvt_attend_call *c;
	const struct group *g;
	uint32_t t0, tokens; /* query tokens [t0, t0 + tokens) */
	uint32_t group_heads; /* query heads of a KV head */
	uint32_t rows;	     /* of one KV head: tokens * group_heads */
	uint32_t row_blocks; /* of one KV head */
	bool parts, last; /* the group is the pass's last */
	uint32_t run, long_runs; /* splits that a unit takes one after the other, with parts: so many units; one, the others */
	uint32_t heads; /* KV heads of a unit; 1 if they have several row blocks */
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
	uint64_t blocks[2], views, run, part, scratch, total;
	uint32_t capacity;
	size_t scratch_bytes, wide_bytes;
};

static uint64_t state_bytes(uint64_t rows, uint32_t v_dim)
{
	return round_up(rows * (v_dim + 2ull) * sizeof(float), ALIGN);
}

static struct layout layout_of(const struct kvt_attend_params *p)
{
	const struct kvt_attn_shape shape = { .k_dim = p->max_k_dim, .v_dim = p->max_v_dim };
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
	l.run = at = round_up(at, ALIGN);
	at += state_bytes((uint64_t)p->max_query_rows * p->max_query_heads, p->max_v_dim);
	l.part = at;
	at += state_bytes((uint64_t)PART_TOKENS * p->max_query_heads, p->max_v_dim);
	/* the kernel's scratch, and a part's accumulator, which merge() reads */
	l.scratch_bytes = round_up(sizeof(struct rows), ALIGN) + state_bytes(UNIT_ROWS, p->max_v_dim) +
			  round_up(kvt_attn_kernels(NULL)->scratch_bytes(&shape, UNIT_ROWS), ALIGN);
	l.wide_bytes = p->widen ? KVT_SPLIT * (p->max_k_dim + p->max_v_dim) * sizeof(float) : 0;
	l.scratch_bytes += l.wide_bytes;
	l.scratch = at;
	l.total = at + l.scratch_bytes * p->threads;
	return l;
}

uint64_t kvt_attend_bytes(const struct kvt_attend_params *p)
{
	return layout_of(p).total;
}

static void set_state(struct kvt_attn_state *st, void *memory, uint64_t rows)
{
	st->max = memory;
	st->sum = st->max + rows;
	st->acc = st->sum + rows;
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
		.store = store, .workers = workers, .kernels = kvt_attn_kernels(NULL),
		.max_tokens = p->max_query_rows, .max_v_dim = p->max_v_dim, .capacity = l.capacity,
		.views = (struct kvt_view *)(memory + l.views),
		.scratch = memory + l.scratch, .scratch_bytes = l.scratch_bytes, .wide_bytes = l.wide_bytes,
	};
	for (int i = 0; i < 2; i++)
		a->group[i].blocks = (uint32_t *)(memory + l.blocks[i]);
	set_state(&a->run, memory + l.run, (uint64_t)p->max_query_rows * p->max_query_heads);
	set_state(&a->part, memory + l.part, (uint64_t)PART_TOKENS * p->max_query_heads);
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

/* ---- which rows a query token may see ---- */

static void visible(const struct kvt_attend_call *c, uint32_t token, uint64_t *lo, uint64_t *hi)
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

/* ---- units ---- */

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

	for (uint32_t j = 0; j < n; view++, row = 0) {
		const uint8_t *at = view->data + (uint64_t)row * g->row_bytes;

		for (; j < n && row < g->block_rows; row++, at += g->row_bytes)
			rows[j++] = at;
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

/* @next: the split that this thread will likely take afterwards. */
static void point_at_split(const struct pass *p, uint64_t split, uint64_t next, uint32_t head, uint32_t heads,
			   struct rows *r, float *wide, struct kvt_split_rows *s)
{
	const struct kvt_attend_call *c = p->c;
	uint64_t first = split * KVT_SPLIT;
	uint32_t n = split_rows(c, split), more = 0;

	point_at_rows(p->a->views, p->g->k0, c->k_geom, first, n, r->k);
	if (next < p->g->end && kvt_codec_group(c->k_geom->codec) == 1) {
		more = split_rows(c, next) < KVT_TILE ? split_rows(c, next) : KVT_TILE;
		point_at_rows(p->a->views, p->g->k0, c->k_geom, next * KVT_SPLIT, more, r->k + n);
	}
	point_at_rows(p->a->views + p->g->v_at, p->g->v0, c->v_geom, first, n, r->v);
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
		visible(c, token, &r->lo[i], &r->hi[i]);
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

static uint32_t runs_of(const struct pass *p)
{
	return p->parts ? (uint32_t)(p->g->end - p->g->first) - p->long_runs * (p->run - 1) : 1;
}

static uint64_t run_begin(const struct pass *p, uint32_t i)
{
	return p->g->first + i + (uint64_t)(i < p->long_runs ? i : p->long_runs) * (p->run - 1);
}

static struct kvt_attn_state part_at(const struct pass *p, uint64_t split, uint64_t row)
{
	uint64_t all = (uint64_t)p->c->kv_heads * p->rows;

	return state_at(&p->a->part, (split - p->g->first) * all + row, p->c->shape.v_dim);
}

static void unit(void *arg, uint32_t worker, uint32_t i)
{
	const struct pass *p = arg;
	struct kvt_attend *a = p->a;
	const struct kvt_attend_call *c = p->c;
	uint8_t *scratch = a->scratch + worker * a->scratch_bytes;
	struct rows *r = (struct rows *)scratch;
	float *acc = (float *)(scratch + round_up(sizeof(*r), ALIGN));
	void *kernel_scratch = (uint8_t *)acc + state_bytes(UNIT_ROWS, a->max_v_dim);
	float *wide = (float *)(scratch + a->scratch_bytes - a->wide_bytes);
	uint32_t v_dim = c->shape.v_dim, runs = runs_of(p);
	uint32_t head = i / (runs * p->row_blocks) * p->heads, block = i / runs % p->row_blocks;
	uint32_t heads = c->kv_heads - head < p->heads ? c->kv_heads - head : p->heads;
	uint32_t row = head * p->rows + block * UNIT_ROWS, left = heads * p->rows - block * UNIT_ROWS;
	uint32_t m = left < UNIT_ROWS ? left : UNIT_ROWS;
	uint64_t first = p->parts ? run_begin(p, i % runs) : p->g->first;
	uint64_t end = p->parts ? run_begin(p, i % runs + 1) : p->g->end;
	uint64_t next = end + (kvt_workers_count(a->workers) - 1) * (end - first); /* threads take units in turns */
	struct kvt_attn_state part = { r->max, r->sum, acc }, run = state_at(&a->run, row, v_dim);
	struct kvt_split_rows s;
	struct kvt_query_rows q;
	uint64_t from, to;

	point_at_queries(p, row, m, r, &q, &from, &to);
	for (uint64_t split = first; p->parts && split < end; split++) {
		part = part_at(p, split, row);
		if (split < from || split >= to)
			kvt_attn_state_clear(&part, m, v_dim);
	}
	from = from < first ? first : from;
	to = to > end ? end : to;
	for (uint64_t split = from; split < to; split++) {
		if (p->parts)
			part = part_at(p, split, row);
		point_at_split(p, split, split + 1 < to ? split + 1 : next, head, heads, r, wide, &s);
		a->kernels->split(&c->shape, &s, &q, &part, kernel_scratch);
		if (!p->parts)
			a->kernels->merge(&run, &part, m, v_dim);
	}
}

static void finish(void *arg, uint32_t worker, uint32_t i)
{
	const struct pass *p = arg;
	const struct kvt_attend_call *c = p->c;
	struct rows *r = (struct rows *)(p->a->scratch + worker * p->a->scratch_bytes);
	uint32_t head = i / p->row_blocks, row = i % p->row_blocks * UNIT_ROWS, v_dim = c->shape.v_dim;
	uint32_t m = p->rows - row < UNIT_ROWS ? p->rows - row : UNIT_ROWS;
	struct kvt_attn_state run = state_at(&p->a->run, (uint64_t)head * p->rows + row, v_dim);

	for (uint32_t j = 0; j < m; j++) {
		uint32_t token = p->t0 + (row + j) / p->group_heads;
		uint32_t h = head * p->group_heads + (row + j) % p->group_heads;

		r->out[j] = c->out + token * c->out_stride + (uint64_t)h * v_dim;
		r->sink[j] = c->sinks ? c->sinks[h] : 0;
	}
	p->a->kernels->finish(&run, m, v_dim, c->sinks ? r->sink : NULL, r->out);
}

/* A head's parts into its running state; after the last group, its output. */
static void merge_parts(void *arg, uint32_t worker, uint32_t head)
{
	const struct pass *p = arg;
	uint32_t v_dim = p->c->shape.v_dim;
	uint64_t row = (uint64_t)head * p->rows;
	struct kvt_attn_state run = state_at(&p->a->run, row, v_dim);

	for (uint64_t split = p->g->first; split < p->g->end; split++) {
		struct kvt_attn_state part = part_at(p, split, row);

		p->a->kernels->merge(&run, &part, p->rows, v_dim);
	}
	for (uint32_t i = 0; p->last && i < p->row_blocks; i++)
		finish(arg, worker, head * p->row_blocks + i);
}

/* ---- groups ---- */

static uint32_t blocks_of(uint64_t first_row, uint64_t end_row, uint32_t block_rows)
{
	return (uint32_t)((end_row + block_rows - 1) / block_rows - first_row / block_rows);
}

/* The group of at most @window blocks that begins at split @first and ends at most at @end. */
static void cut_group(const struct kvt_attend_call *c, uint64_t first, uint64_t end, uint64_t most, uint32_t window,
		      struct group *g)
{
	uint64_t row0 = first * KVT_SPLIT, e = first;
	uint32_t nk = 0, nv = 0;

	while (e < end && e - first < most) {
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
		       uint64_t most, struct group *g)
{
	cut_group(c, first, end, most, a->resident, g);
	if (kvt_store_missing(a->store, g->blocks, g->n_k + g->n_v))
		cut_group(c, first, end, most, a->window, g);
}

/* Start what the next call will likely read first; its holds are given back at once. */
static void look_ahead(struct kvt_attend *a, const struct kvt_attend_call *c, uint64_t first, struct group *g)
{
	struct kvt_attend_call next = *c;

	next.k_geom = c->next_k_geom;
	next.v_geom = c->next_v_geom;
	next.k_table = c->next_k_table;
	next.v_table = c->next_v_table;
	cut_group(&next, first, (c->n_rows + KVT_SPLIT - 1) / KVT_SPLIT, UINT64_MAX, a->window, g);
	kvt_store_borrow_begin(a->store, g->blocks, g->n_k + g->n_v);
	kvt_store_borrow_drop(a->store, g->blocks, g->n_k + g->n_v);
}

static int run_pass(struct pass *p)
{
	struct kvt_attend *a = p->a;
	const struct kvt_attend_call *c = p->c;
	uint64_t lo = UINT64_MAX, hi = 0, from, to, most;
	struct group *now = &a->group[0], *next = &a->group[1], *swap;
	struct kvt_attn_state run = a->run;
	uint32_t units;
	int ret;

	for (uint32_t t = p->t0; t < p->t0 + p->tokens; t++) {
		uint64_t l, h;

		visible(c, t, &l, &h);
		if (l < h) {
			lo = l < lo ? l : lo;
			hi = h > hi ? h : hi;
		}
	}
	p->last = false;
	kvt_attn_state_clear(&run, c->kv_heads * p->rows, c->shape.v_dim);
	from = lo < hi ? lo / KVT_SPLIT : 0;
	to = lo < hi ? (hi + KVT_SPLIT - 1) / KVT_SPLIT : 0;
	p->parts = p->rows <= KVT_FEW_ROWS || (c->kv_heads * p->row_blocks < 4 * kvt_workers_count(a->workers) &&
					       p->tokens <= PART_TOKENS / 2);
	p->heads = p->parts && p->rows <= KVT_FEW_ROWS && !c->widen ? KVT_HEADS_ROWS / p->rows : 1;
	most = p->parts ? PART_TOKENS / p->tokens : UINT64_MAX;
	if (from < to) {
		make_group(a, c, from, to, most, now);
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
			make_group(a, c, from, to, most, next);
			kvt_store_borrow_begin(a->store, next->blocks, next->n_k + next->n_v);
		} else if (c->next_k_table) {
			look_ahead(a, c, lo / KVT_SPLIT, next);
		}
		/* long runs cost less; short ones at the end keep all threads busy */
		units = (c->kv_heads + p->heads - 1) / p->heads * p->row_blocks;
		p->run = (uint32_t)((now->end - now->first) * units / (8 * kvt_workers_count(a->workers)));
		p->run = p->run < 1 ? 1 : p->run > RUN_MAX ? RUN_MAX : p->run;
		p->long_runs = (uint32_t)(now->end - now->first) * 3 / 4 / p->run;
		kvt_workers_run(a->workers, units * runs_of(p), unit, p);
		if (p->parts)
			kvt_workers_run(a->workers, c->kv_heads, merge_parts, p);
		kvt_store_return(a->store, now->blocks, now->n_k + now->n_v);
		swap = now;
		now = next;
		next = swap;
	}
	if (!p->parts || !p->last)
		kvt_workers_run(a->workers, c->kv_heads * p->row_blocks, finish, p);
	return 0;
}

int kvt_attend_run(struct kvt_attend *a, const struct kvt_attend_call *c)
{
	struct pass p = { .a = a, .c = c, .group_heads = c->heads / c->kv_heads };
	int ret = 0;

	pthread_mutex_lock(&a->turn);
	for (p.t0 = 0; p.t0 < c->n && !ret; p.t0 += p.tokens) {
		p.tokens = c->n - p.t0 < a->max_tokens ? c->n - p.t0 : a->max_tokens;
		p.rows = p.tokens * p.group_heads;
		p.row_blocks = (p.rows + UNIT_ROWS - 1) / UNIT_ROWS;
		ret = run_pass(&p);
	}
	pthread_mutex_unlock(&a->turn);
	return ret;
}
