// SPDX-License-Identifier: MIT
/*
 * The exact kernel family on the CPU. Query rows pass over a tile's K and V a
 * batch at a time: scores, soft-max, output. Many rows of a head read panels, to
 * which K and V are unpacked once (panel.h); few read them in place (direct.h).
 * Rows only share loads: no row's arithmetic depends on the others, nor on how
 * many there are.
 *
 * What a row sees of a tile is a word of 64 bits. Rows of a batch may differ in
 * it: the output is accumulated over runs of positions within which no row's
 * bit changes.
 */
#include "attention/internal.h"

#include "attention/batch.h"
#include "attention/direct.h"
#include "attention/exp.h"
#include "attention/panel.h"
#include "attention/softmax.h"
#include "base/fpenv.h"

#define GROUP 6	 /* query rows whose sums the registers hold */
#define PANEL_BATCH 24 /* query rows that use a panel while it is in the first-level cache */
#define AHEAD_BYTES (32u << 10) /* how far ahead of their use rows are asked for */
#define TILE_PANELS (KVT_TILE / PANEL)
#define NOINLINE __attribute__((noinline))

/* Panels a pass for n rows: enough independent sums to hide an fma's latency, no more than registers. */
#if KVT_VW == 16
#define PANELS_OF(n) 4
#elif KVT_VW == 8
#define PANELS_OF(n) ((n) == 1 ? 4 : (n) <= 3 ? 2 : 1)
#else
#define PANELS_OF(n) ((n) == 1 ? 4 : (n) == 2 ? 2 : 1)
#endif

_Static_assert(KVT_TILE == 64 && KVT_SPLIT % KVT_TILE == 0, "a tile's visibility is one 64-bit word");
_Static_assert(PANEL_BATCH <= BATCH && BATCH <= 32, "rows of a batch are bits of a 32-bit word");

/* Floats from panel to panel: odd in cache lines, so that panels do not share cache sets. */
static size_t panel_stride(uint32_t steps)
{
	return (size_t)steps * PANEL + LINE / sizeof(float);
}

static uint32_t q_stride(uint32_t k_dim)
{
	return (k_dim + PANEL - 1) / PANEL * PANEL;
}

static size_t scratch_bytes(const struct kvt_attn_shape *shape, uint32_t m)
{
	size_t k = TILE_PANELS * panel_stride(shape->k_dim);
	size_t v = (shape->v_dim + PANEL - 1) / PANEL * panel_stride(KVT_TILE);
	size_t q = BATCH * q_stride(shape->k_dim);

	(void)m;
	return (sizeof(struct batch) + LINE - 1) / LINE * LINE + (k + v > q ? k + v : q) * sizeof(float);
}

/* What stands for positions that the tile does not have is not seen, so the last one does. */
static const uint8_t *k_row(const struct tile *t, unsigned j)
{
	return t->k_rows[j < t->n ? j : t->n - 1];
}

static void pack(struct tile *t)
{
	for (unsigned p = 0; p < TILE_PANELS; p++) {
		const uint8_t *rows[PANEL];

		for (unsigned i = 0; i < PANEL; i++)
			rows[i] = k_row(t, p * PANEL + i) + t->k_offset;
		panel_k(t->shape->k_codec, t->k + p * t->k_stride, rows, t->shape->k_dim);
	}
	for (unsigned j = 0; j < t->n; j++)
		panel_v(t->shape->v_codec, t->v + j * PANEL, t->v_stride, t->v_rows[j] + t->v_offset, t->shape->v_dim);
	t->packed = true;
}

/* Mask elements [from, to) of a vector's lanes, the others 0 and not read. */
static vf mask_lanes(uint32_t type, const void *mask, uint64_t at, unsigned from, unsigned to)
{
	const uint8_t *p = (const uint8_t *)mask + at * panel_element(type);
	uint8_t lanes[KVT_VW * 4] = { 0 };
	uint32_t e = panel_element(type);

	memcpy(lanes + from * e, p + from * e, (to - from) * e);
	return panel_widen(type, lanes, KVT_VW);
}

/* The positions of the tile that row i may see; with a mask, also its elements there. */
static uint64_t see(const struct tile *t, uint32_t i, float *bias)
{
	const struct kvt_query_rows *r = t->rows;
	uint64_t lo = r->lo[i] > t->first ? r->lo[i] : t->first;
	uint64_t hi = r->hi[i] < t->first + t->n ? r->hi[i] : t->first + t->n;
	uint64_t seen, unmasked = 0;
	unsigned a, b;

	if (lo >= hi)
		return 0;
	a = (unsigned)(lo - t->first);
	b = (unsigned)(hi - t->first);
	seen = ~0ull >> (KVT_TILE - (b - a)) << a;
	if (!r->mask)
		return seen;
	for (unsigned j = 0; j < KVT_TILE; j += KVT_VW) {
		unsigned from = a > j ? a - j : 0, to = b > j ? b - j : 0;
		uint64_t at = t->first + j;
		vf m;

		if (to > KVT_VW)
			to = KVT_VW;
		if (from >= to)
			m = vf_zero();
		else if (to - from < KVT_VW)
			m = mask_lanes(t->shape->mask_type, r->mask[i], at, from, to);
		else
			m = panel_widen(t->shape->mask_type,
					(const uint8_t *)r->mask[i] + at * panel_element(t->shape->mask_type), KVT_VW);
		vf_store(bias + j, m);
		unmasked |= (uint64_t)vm_bits(vm_not(vf_eq(m, vf_set1(-INFINITY)))) << j;
	}
	return seen & unmasked;
}

/* s = q . k for @panels panels at @p, rows from @at */
VF_INLINE void scores_pass(const unsigned rows, const unsigned panels, struct batch *g, unsigned at,
			   const struct tile *t, unsigned p)
{
	static const uint8_t part[PARTS] = { 0, 4, 2, 6, 1, 5, 3, 7 };
	const unsigned vecs = panels * PANEL_VECS;
	const uint32_t dims = t->shape->k_dim;
	vf sum[4][GROUP * 4 * PANEL_VECS]; /* [level] folded 2^level parts; as a counter carries, levels are added */

	for (unsigned n = 0; n < PARTS; n++) {
		uint32_t first = panel_part(dims, part[n]), end = panel_part(dims, part[n] + 1);
		vf c[GROUP * 4 * PANEL_VECS];
		const float *q[GROUP];
		unsigned level = 0;

		KVT_UNROLL
		for (unsigned i = 0; i < rows; i++)
			q[i] = g->q[at + i] + part[n];
		KVT_UNROLL
		for (unsigned i = 0; i < rows * vecs; i++)
			c[i] = vf_zero();
		panel_multiply(PARTS, rows, panels, c, q, t->k + p * t->k_stride + first * PANEL, t->k_stride, end - first);
		for (; n >> level & 1; level++) {
			KVT_UNROLL
			for (unsigned i = 0; i < rows * vecs; i++)
				c[i] = vf_add(sum[level][i], c[i]);
		}
		KVT_UNROLL
		for (unsigned i = 0; i < rows * vecs; i++)
			sum[level][i] = c[i];
	}
	KVT_UNROLL
	for (unsigned i = 0; i < rows; i++) {
		KVT_UNROLL
		for (unsigned v = 0; v < vecs; v++)
			vf_store(g->s[at + i] + p * PANEL + v * KVT_VW, sum[3][i * vecs + v]);
	}
}

VF_INLINE void scores_of(const unsigned rows, struct batch *g, unsigned at, const struct tile *t, unsigned from,
			 unsigned to)
{
	for (; from + PANELS_OF(rows) <= to; from += PANELS_OF(rows))
		scores_pass(rows, PANELS_OF(rows), g, at, t, from);
	for (; PANELS_OF(rows) > 1 && from < to; from++)
		scores_pass(rows, 1, g, at, t, from);
}

/* Call FUNCTION(rows, ...) with a constant. */
#ifdef KVT_COMPACT
#define WITH_ROWS(function, rows, ...) function(rows, __VA_ARGS__)
#else
#define WITH_ROWS(function, rows, ...)                     \
	switch (rows) {                                    \
	case 1: function(1, __VA_ARGS__); break;           \
	case 2: function(2, __VA_ARGS__); break;           \
	case 3: function(3, __VA_ARGS__); break;           \
	case 4: function(4, __VA_ARGS__); break;           \
	case 5: function(5, __VA_ARGS__); break;           \
	default: function(6, __VA_ARGS__);                 \
	}
#endif

static void scores(unsigned rows, struct batch *g, unsigned at, const struct tile *t, unsigned from, unsigned to)
{
	WITH_ROWS(scores_of, rows, g, at, t, from, to);
}

/* acc += sum of p * v over positions [j, j + steps), for @panels panels from dimension @d on. */
VF_INLINE void output_pass(const unsigned rows, const unsigned panels, float *const *acc, const struct batch *g,
			   unsigned at, const struct tile *t, uint32_t d, unsigned j, unsigned steps)
{
	const unsigned vecs = panels * PANEL_VECS;
	vf c[GROUP * 4 * PANEL_VECS];
	const float *p[GROUP];

	KVT_UNROLL
	for (unsigned i = 0; i < rows; i++) {
		p[i] = g->s[at + i] + j;
		KVT_UNROLL
		for (unsigned l = 0; l < vecs; l++)
			c[i * vecs + l] = vf_load(acc[i] + l * KVT_VW);
	}
	panel_multiply(1, rows, panels, c, p, t->v + d / PANEL * t->v_stride + j * PANEL, t->v_stride, steps);
	KVT_UNROLL
	for (unsigned i = 0; i < rows; i++) {
		KVT_UNROLL
		for (unsigned l = 0; l < vecs; l++)
			vf_store(acc[i] + l * KVT_VW, c[i * vecs + l]);
	}
}

/* Dimensions [d, to); @d is a multiple of PANEL, @to too or the last. */
VF_INLINE void output_of(const unsigned rows, const struct batch *g, unsigned at, const struct tile *t, uint32_t d,
			 uint32_t to, unsigned j, unsigned steps)
{
	float tail[GROUP][PANEL], *acc[GROUP];

	while (d + PANEL <= to) {
		bool wide = d + PANELS_OF(rows) * PANEL <= to;

		for (unsigned i = 0; i < rows; i++)
			acc[i] = g->acc[at + i] + d;
		if (wide)
			output_pass(rows, PANELS_OF(rows), acc, g, at, t, d, j, steps);
		else
			output_pass(rows, 1, acc, g, at, t, d, j, steps);
		d += wide ? PANELS_OF(rows) * PANEL : PANEL;
	}
	if (d == to)
		return;
	for (unsigned i = 0; i < rows; i++) {
		memset(tail[i], 0, sizeof(tail[i]));
		memcpy(tail[i], g->acc[at + i] + d, (to - d) * sizeof(float));
		acc[i] = tail[i];
	}
	output_pass(rows, 1, acc, g, at, t, d, j, steps);
	for (unsigned i = 0; i < rows; i++)
		memcpy(g->acc[at + i] + d, tail[i], (to - d) * sizeof(float));
}

static void output(unsigned rows, const struct batch *g, unsigned at, const struct tile *t, uint32_t d, uint32_t to,
		   unsigned j, unsigned steps)
{
	WITH_ROWS(output_of, rows, g, at, t, d, to, j, steps);
}

static unsigned group_at(const struct batch *g, unsigned at)
{
	return g->n - at < GROUP ? g->n - at : GROUP;
}

/* A run of positions of which each row of the batch sees all (its bit of @rows is set) or nothing. */
static void panel_run(const struct batch *g, const struct tile *t, uint32_t rows, unsigned j, unsigned steps)
{
	const uint32_t dims = t->shape->v_dim;

	if (rows == (1u << g->n) - 1 && g->n > GROUP) {
		for (uint32_t d = 0; d < dims; d += PANELS_OF(GROUP) * PANEL) {
			uint32_t to = d + PANELS_OF(GROUP) * PANEL;

			for (unsigned at = 0; at < g->n; at += GROUP)
				output(group_at(g, at), g, at, t, d, to < dims ? to : dims, j, steps);
		}
		return;
	}
	for (unsigned at = 0; at < g->n; at += GROUP) {
		unsigned n = group_at(g, at);
		uint32_t all = (1u << n) - 1, some = rows >> at & all;

		if (some == all) {
			output(n, g, at, t, 0, dims, j, steps);
			continue;
		}
		for (unsigned i = 0; i < n; i++) {
			if (some >> i & 1)
				output(1, g, at + i, t, 0, dims, j, steps);
		}
	}
}

/* ---- in place ---- */

/* Rows [j, j + n) of @end; what stands for rows past the end is not seen, so the last one does. */
static const uint8_t *const *rows_at(const uint8_t *const *rows, unsigned j, unsigned n, unsigned end, const uint8_t **copy)
{
	if (j + n <= end)
		return rows + j;
	for (unsigned p = 0; p < n; p++)
		copy[p] = rows[j + p < end ? j + p : end - 1];
	return copy;
}

/* @n rows, t->ahead after row @j of the tile in the order of use: its K, its V, the next tile's K. */
static struct direct_ahead rows_ahead(const struct tile *t, unsigned j, unsigned n, const uint8_t **copy)
{
	bool v;

	j += t->ahead;
	v = j >= t->n && j < 2 * t->n;
	return (struct direct_ahead){
		.row = rows_at(v ? t->v_rows : t->k_rows, j < t->n ? j : j - t->n, n, v ? t->n : t->left + t->more, copy),
		.n = n,
		.offset = v ? t->v_offset : t->k_offset,
		.bytes = t->heads * (v ? t->v_bytes : t->k_bytes),
	};
}

/* Rows of one head, as few groups as the registers allow, of about the same size. */
static void make_spans(struct batch *g)
{
	unsigned end;

	g->spans = 0;
	for (unsigned at = 0; at < g->n; at = end) {
		unsigned groups;

		for (end = at + 1; end < g->n && g->head[end] == g->head[at];)
			end++;
		for (groups = (end - at + DIRECT_GROUP - 1) / DIRECT_GROUP; groups; groups--) {
			unsigned n = (end - at + groups - 1) / groups;

			g->span[g->spans++] = (struct span){ .at = at, .n = n, .head = g->head[at], .last = groups == 1 };
			at += n;
		}
	}
}

/* Scores at positions [from, to), multiples of DIRECT_AT_ONCE. */
static void direct_scores_at(struct batch *g, const struct tile *t, unsigned from, unsigned to)
{
	for (unsigned j = from; j < to; j += DIRECT_AT_ONCE) {
		const uint8_t *copy[DIRECT_AT_ONCE], *copy_ahead[DIRECT_AT_ONCE];
		struct direct_rows k = { .row = rows_at(t->k_rows, j, DIRECT_AT_ONCE, t->n, copy) };
		struct direct_ahead ahead = rows_ahead(t, j, DIRECT_AT_ONCE, copy_ahead);

		for (const struct span *n = g->span; n < g->span + g->spans; n++) {
			k.offset = t->k_offset + n->head * t->k_bytes;
			direct_scores(t->shape->k_codec, n->n, g->s[n->at] + j, g->q + n->at, &k, n->last ? &ahead : NULL,
				      t->shape->k_dim);
		}
	}
}

static void direct_run(struct batch *g, const struct tile *t, uint32_t run, unsigned j, unsigned steps)
{
	for (unsigned to = j + steps; j < to; j += steps) {
		const uint8_t *copy[DIRECT_STEPS];
		struct direct_rows v = { .row = t->v_rows + j };
		struct direct_ahead ahead = rows_ahead(t, t->n + j, DIRECT_STEPS, copy);

		steps = to - j < DIRECT_STEPS ? to - j : DIRECT_STEPS;
		for (const struct span *n = g->span; n < g->span + g->spans; n++) {
			uint32_t all = (1u << n->n) - 1, some = run >> n->at & all;

			v.offset = t->v_offset + n->head * t->v_bytes;
			if (some == all) {
				direct_output(t->shape->v_codec, n->n, g->acc + n->at, g->s[n->at] + j, &v,
					      n->last ? &ahead : NULL, t->shape->v_dim, steps);
				continue;
			}
			for (unsigned i = n->at; i < n->at + n->n; i++) {
				if (run >> i & 1)
					direct_output(t->shape->v_codec, 1, g->acc + i, g->s[i] + j, &v, NULL, t->shape->v_dim,
						      steps);
			}
		}
	}
}

/* The output, in runs of positions within which no row's bit changes. */
static void accumulate(struct batch *g, const struct tile *t)
{
	uint64_t left = 0;

	for (unsigned i = 0; i < g->n; i++)
		left |= g->seen[i];
	while (left) {
		unsigned j = (unsigned)__builtin_ctzll(left), end;
		uint64_t change = 0;
		uint32_t rows = 0;

		for (unsigned i = 0; i < g->n; i++) {
			uint64_t here = g->seen[i] >> j & 1;

			change |= g->seen[i] ^ -here;
			rows |= (uint32_t)here << i;
		}
		change &= ~0ull << j;
		end = change ? (unsigned)__builtin_ctzll(change) : KVT_TILE;
		if (t->direct)
			direct_run(g, t, rows, j, end - j);
		else
			panel_run(g, t, rows, j, end - j);
		left = end < KVT_TILE ? left & ~0ull << end : 0;
	}
}

static void take_batch(struct batch *g, struct tile *t)
{
	uint64_t any = 0;
	unsigned from, to, n; /* panels that some row sees */

	for (unsigned i = 0; i < g->n; i++)
		any |= g->seen[i];
	from = (unsigned)__builtin_ctzll(any) / PANEL;
	to = (63 - (unsigned)__builtin_clzll(any)) / PANEL + 1;
	if (t->direct) {
		make_spans(g);
		direct_scores_at(g, t, from * PANEL, to * PANEL);
	} else {
		from = from / PANELS_OF(GROUP) * PANELS_OF(GROUP);
		if (!t->packed)
			pack(t);
		for (unsigned p = from; p < to; p += PANELS_OF(GROUP)) {
			unsigned end = p + PANELS_OF(GROUP) < to ? p + PANELS_OF(GROUP) : to;

			for (unsigned at = 0; at < g->n; at += GROUP)
				scores(group_at(g, at), g, at, t, p, end);
		}
	}
	n = g->n;
	soft_max(g, t);
	if (t->direct && g->n < n)
		make_spans(g);
	accumulate(g, t);
	g->n = 0;
}

/* Query rows [t->row, end): all rows of one head, or a batch's of several. */
static void split_heads(struct tile *t, const struct kvt_split_rows *kv, uint32_t end, struct batch *g)
{
	const unsigned batch = t->direct ? BATCH : PANEL_BATCH;

	g->n = 0;
	for (uint32_t i = t->row; t->direct && i < end; i++)
		memcpy(t->q + (i - t->row) * t->q_stride, t->rows->q[i], t->shape->k_dim * sizeof(float));
	for (uint32_t at = 0; at < kv->n; at += KVT_TILE) {
		t->first = kv->first + at;
		t->left = kv->n - at;
		t->n = t->left < KVT_TILE ? t->left : KVT_TILE;
		t->k_rows = kv->k + at;
		t->v_rows = kv->v + at;
		t->packed = false;
		for (uint32_t i = t->row, head = 0, left = t->head_rows; i < end; i++, left--) {
			uint64_t seen;

			if (!left) {
				head++;
				left = t->head_rows;
			}
			if (t->out->sum[i] != t->out->sum[i])
				continue;
			seen = see(t, i, g->bias[g->n]);
			if (!seen)
				continue;
			g->row[g->n] = i;
			g->head[g->n] = head;
			g->seen[g->n] = seen;
			g->q[g->n] = t->direct ? t->q + (i - t->row) * t->q_stride : t->rows->q[i];
			if (++g->n == batch)
				take_batch(g, t);
		}
		if (g->n)
			take_batch(g, t);
	}
}

static NOINLINE void split_rows(const struct kvt_attn_shape *shape, const struct kvt_split_rows *kv,
				const struct kvt_query_rows *rows, struct kvt_attn_state *out, void *scratch)
{
	struct batch *g = scratch;
	struct tile t = {
		.shape = shape, .rows = rows, .out = out, .head_rows = rows->m / kv->heads, .more = kv->more
	};
	uint32_t heads = 1;

	t.k_bytes = shape->k_dim * panel_element(shape->k_codec);
	t.v_bytes = shape->v_dim * panel_element(shape->v_codec);
	t.k_stride = panel_stride(shape->k_dim);
	t.v_stride = panel_stride(KVT_TILE);
	t.k = (float *)scratch + (sizeof(*g) + LINE - 1) / LINE * (LINE / sizeof(float));
	t.v = t.k + TILE_PANELS * t.k_stride;
	t.q = t.k;
	t.q_stride = q_stride(shape->k_dim);
	t.direct = t.head_rows <= KVT_FEW_ROWS;
	if (t.direct) {
		heads = KVT_HEADS_ROWS / t.head_rows < kv->heads ? KVT_HEADS_ROWS / t.head_rows : kv->heads;
		t.ahead = AHEAD_BYTES / (heads * (t.k_bytes + t.v_bytes) / 2);
		t.ahead = t.ahead < DIRECT_AT_ONCE ? DIRECT_AT_ONCE : t.ahead > KVT_TILE ? KVT_TILE : t.ahead;
	}
	kvt_attn_state_clear(out, rows->m, shape->v_dim);
	for (uint32_t head = 0; head < kv->heads; head += heads) {
		uint32_t end = head + heads < kv->heads ? head + heads : kv->heads;

		t.heads = end - head;
		t.row = head * t.head_rows;
		t.k_offset = kv->k_offset + head * t.k_bytes;
		t.v_offset = kv->v_offset + head * t.v_bytes;
		split_heads(&t, kv, end * t.head_rows, g);
	}
}

static NOINLINE void merge_rows(struct kvt_attn_state *into, const struct kvt_attn_state *part, uint32_t m,
				uint32_t v_dim)
{
	float factor[2][KVT_VW]; /* of so many rows */

	for (uint32_t i = 0; i < m; i++) {
		float *acc = into->acc + (size_t)i * v_dim, a, b;
		const float *other = part->acc + (size_t)i * v_dim;

		if (i % KVT_VW == 0) {
			unsigned n = m - i < KVT_VW ? m - i : KVT_VW;
			vf x[2] = { vf_load_part(into->max + i, n), vf_load_part(part->max + i, n) }, max = vf_max(x[0], x[1]);

			x[0] = vf_sub(x[0], max);
			x[1] = vf_sub(x[1], max);
			vf_exp_each(2, x);
			vf_store(factor[0], x[0]);
			vf_store(factor[1], x[1]);
		}
		if (into->sum[i] != into->sum[i] || part->max[i] == -INFINITY)
			continue;
		if (into->max[i] == -INFINITY) { /* bit for bit: where a row's splits begin makes no difference */
			into->max[i] = part->max[i];
			into->sum[i] = part->sum[i];
			memcpy(acc, other, v_dim * sizeof(float));
			continue;
		}
		a = factor[0][i % KVT_VW];
		b = factor[1][i % KVT_VW];
		into->max[i] = into->max[i] > part->max[i] ? into->max[i] : part->max[i];
		into->sum[i] = fmaf(part->sum[i], b, into->sum[i] * a);
		for (uint32_t d = 0; d < v_dim; d += KVT_VW) {
			unsigned n = v_dim - d < KVT_VW ? v_dim - d : KVT_VW;
			vf x = n < KVT_VW ? vf_load_part(acc + d, n) : vf_load(acc + d);
			vf y = n < KVT_VW ? vf_load_part(other + d, n) : vf_load(other + d);

			x = vf_fma(y, vf_set1(b), vf_mul(x, vf_set1(a)));
			if (n < KVT_VW)
				vf_store_part(acc + d, x, n);
			else
				vf_store(acc + d, x);
		}
	}
}

static NOINLINE void finish_rows(const struct kvt_attn_state *state, uint32_t m, uint32_t v_dim, const float *sinks,
				 float *const *out)
{
	const vf nan = vi_floats(vi_set1(0x7fc00000));

	for (uint32_t i = 0; i < m; i++) {
		const float *acc = state->acc + (size_t)i * v_dim;
		float max = state->max[i], sum = state->sum[i], a = 1;

		if (max == -INFINITY) {
			memset(out[i], 0, v_dim * sizeof(float));
			continue;
		}
		if (sinks && sinks[i] != -INFINITY) {
			float top = sinks[i] > max ? sinks[i] : max;

			a = kvt_exp1(max - top);
			/* not a number for a sink of NaN or +inf, as for any other score */
			sum = sinks[i] < INFINITY ? fmaf(sum, a, kvt_exp1(sinks[i] - top)) : NAN;
		}
		for (uint32_t d = 0; d < v_dim; d += KVT_VW) {
			unsigned n = v_dim - d < KVT_VW ? v_dim - d : KVT_VW;
			vf x = n < KVT_VW ? vf_load_part(acc + d, n) : vf_load(acc + d);

			x = vf_div(vf_mul(x, vf_set1(a)), vf_set1(sum));
			x = vf_select(vf_eq(x, x), x, nan);
			if (n < KVT_VW)
				vf_store_part(out[i] + d, x, n);
			else
				vf_store(out[i] + d, x);
		}
	}
}

static void split(const struct kvt_attn_shape *shape, const struct kvt_split_rows *kv, const struct kvt_query_rows *rows,
		  struct kvt_attn_state *out, void *scratch)
{
	kvt_fpenv_t env = kvt_fpenv_enter();

	split_rows(shape, kv, rows, out, scratch);
	kvt_fpenv_leave(env);
}

static void merge(struct kvt_attn_state *into, const struct kvt_attn_state *part, uint32_t m, uint32_t v_dim)
{
	kvt_fpenv_t env = kvt_fpenv_enter();

	merge_rows(into, part, m, v_dim);
	kvt_fpenv_leave(env);
}

static void finish(const struct kvt_attn_state *state, uint32_t m, uint32_t v_dim, const float *sinks,
		   float *const *out)
{
	kvt_fpenv_t env = kvt_fpenv_enter();

	finish_rows(state, m, v_dim, sinks, out);
	kvt_fpenv_leave(env);
}

#define STRING2(x) #x
#define STRING(x) STRING2(x)

const struct kvt_attn_kernels KVT_SIMD(kvt_attn) = {
	.isa = STRING(KVT_ISA),
	.scratch_bytes = scratch_bytes,
	.split = split,
	.merge = merge,
	.finish = finish,
};
