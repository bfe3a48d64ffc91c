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

#include "attention/direct.h"
#include "attention/exp.h"
#include "attention/panel.h"
#include "base/fpenv.h"

#define GROUP 6	 /* query rows whose sums the registers hold */
#define PANEL_BATCH 24 /* query rows that use a panel while it is in the first-level cache */
#define BATCH KVT_HEADS_ROWS
#define AHEAD_BYTES (16u << 10) /* how far ahead of their use rows are asked for */
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

struct tile {
	const struct kvt_attn_shape *shape;
	const struct kvt_query_rows *rows;
	struct kvt_attn_state *out;
	uint64_t first; /* position of row 0 */
	unsigned n;
	const uint8_t *const *k_rows, *const *v_rows;
	uint32_t left;		     /* rows of the split from the tile's first on */
	uint32_t row, head_rows;     /* the first query row; how many a KV head has */
	uint32_t k_offset, v_offset; /* of that row's head */
	uint32_t k_bytes, v_bytes;   /* of a head in a row */
	bool direct;
	unsigned ahead;		   /* direct: rows, */
	float *q;		   /* and queries, aligned: a load across two lines costs two */
	uint32_t q_stride;
	float *k, *v;		   /* panels */
	size_t k_stride, v_stride; /* floats between panels */
	bool packed;		   /* the panels hold this tile */
};

/* Query rows that see something of the tile. */
struct batch {
	unsigned n;
	uint32_t row[BATCH];
	uint64_t seen[BATCH];
	const float *q[BATCH];
	float *acc[BATCH];
	float alpha[BATCH];
	float s[BATCH][KVT_TILE]; /* scores, then weights */
	float bias[BATCH][KVT_TILE];
};

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

/* Distances of the vector's positions from the row's own, as floats: exact below 2^24, rounded above. */
static vf distance(uint64_t first, uint64_t pos)
{
	int64_t d = (int64_t)(first - pos);
	int32_t near = d > INT32_MAX - KVT_VW ? INT32_MAX - KVT_VW : d < INT32_MIN ? INT32_MIN : (int32_t)d;

	return vf_of_int(vi_add(vi_set1(near), vi_iota()));
}

/*
 * Scores from dot products: scale, soft-cap, bias. Positions that have no
 * weight, not seen or scored -inf, become -inf and leave *seen. Returns the
 * largest, or NaN if any that is seen is NaN or +inf.
 */
VF_INLINE float weigh(const bool plain, struct batch *g, unsigned i, const struct tile *t, unsigned from, unsigned to)
{
	const struct kvt_attn_shape *shape = t->shape;
	const struct kvt_query_rows *r = t->rows;
	const vf ninf = vf_set1(-INFINITY), scale = vf_set1(shape->scale);
	uint64_t seen = g->seen[i], weight = 0;
	vf max = ninf;
	vm fine = vm_of_bits(~0u);
	float lanes[KVT_VW], top = -INFINITY;

	for (unsigned j = from; j < to; j += KVT_VW) {
		vf s = vf_mul(vf_load(g->s[i] + j), scale);
		vm see = vm_of_bits((uint32_t)(seen >> j));

		if (!plain) {
			if (shape->softcap != 0) {
				vf cap = vf_set1(shape->softcap);

				s = vf_mul(cap, vf_tanh(vf_div(s, cap)));
			}
			if (r->slope) {
				vf bias = r->mask ? vf_load(g->bias[i] + j) :
						    distance(t->first + j, r->pos[g->row[i]]);

				s = vf_fma(vf_set1(r->slope[g->row[i]]), bias, s);
			} else if (r->mask) {
				s = vf_add(s, vf_load(g->bias[i] + j));
			}
		}
		s = vf_select(see, s, ninf);
		vf_store(g->s[i] + j, s);
		fine = vm_and(fine, vf_lt(s, vf_set1(INFINITY)));
		weight |= (uint64_t)vm_bits(vf_lt(ninf, s)) << j;
		max = vf_max(max, s);
	}
	g->seen[i] = weight;
	if (vm_bits(vm_not(fine)))
		return NAN;
	vf_store(lanes, max);
	for (unsigned l = 0; l < KVT_VW; l++)
		top = top > lanes[l] ? top : lanes[l];
	return top;
}

/* Weights of row i over [from, to) from its scores; returns their sum. */
static float exponentiate(float *s, float max, unsigned from, unsigned to)
{
	vf sum[PANEL_VECS];
	float lane[PANEL];

	KVT_UNROLL
	for (unsigned v = 0; v < PANEL_VECS; v++)
		sum[v] = vf_zero();
	for (unsigned j = from; j < to; j += PANEL) {
		KVT_UNROLL
		for (unsigned v = 0; v < PANEL_VECS; v++) {
			vf p = vf_exp(vf_sub(vf_load(s + j + v * KVT_VW), vf_set1(max)));

			vf_store(s + j + v * KVT_VW, p);
			sum[v] = vf_add(sum[v], p);
		}
	}
	KVT_UNROLL
	for (unsigned v = 0; v < PANEL_VECS; v++)
		vf_store(lane + v * KVT_VW, sum[v]);
	for (unsigned half = PANEL / 2; half; half /= 2) {
		for (unsigned l = 0; l < half; l++)
			lane[l] += lane[l + half];
	}
	return lane[0];
}

/* The group's scores become weights; rows that gain nothing, or are NaN from here on, leave it. */
static void soft_max(struct batch *g, const struct tile *t, unsigned from, unsigned to)
{
	const struct kvt_query_rows *r = t->rows;
	const bool plain = !r->mask && !r->slope && t->shape->softcap == 0;
	struct kvt_attn_state *out = t->out;
	unsigned n = 0;

	for (unsigned i = 0; i < g->n; i++) {
		uint32_t row = g->row[i];
		float top = plain ? weigh(true, g, i, t, from, to) : weigh(false, g, i, t, from, to), old, sum;

		if (top != top) {
			out->sum[row] = NAN;
			out->max[row] = 0; /* something was seen */
			continue;
		}
		if (!g->seen[i])
			continue;
		old = out->max[row];
		top = top > old ? top : old;
		sum = exponentiate(g->s[i], top, from, to);
		g->alpha[n] = kvt_exp1(old - top);
		out->max[row] = top;
		out->sum[row] = fmaf(out->sum[row], g->alpha[n], sum);
		g->seen[n] = g->seen[i];
		if (n != i)
			memcpy(g->s[n], g->s[i], sizeof(g->s[n]));
		g->acc[n] = out->acc + (size_t)row * t->shape->v_dim;
		n++;
	}
	g->n = n;
}

/* acc = acc * alpha + sum of p * v over positions [j, j + steps), for @panels panels from dimension @d on. */
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
			c[i * vecs + l] = vf_mul(vf_load(acc[i] + l * KVT_VW), vf_set1(g->alpha[at + i]));
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

/*
 * @n rows from @j on of the tile, in the order of use: its K, its V, the next tile's K. Returns the first head's
 * offset in them.
 */
static uint32_t rows_ahead(const struct tile *t, unsigned j, unsigned n, const uint8_t **rows, uint32_t *bytes)
{
	bool v = j >= t->n && j < 2 * t->n;
	uint32_t i = j < t->n ? j : j - t->n, end = v ? t->n : t->left;

	for (unsigned p = 0; p < n; p++, i++)
		rows[p] = (v ? t->v_rows : t->k_rows)[i < end ? i : end - 1];
	*bytes = v ? t->v_bytes : t->k_bytes;
	return v ? t->v_offset : t->k_offset;
}

static uint32_t head_of(const struct batch *g, const struct tile *t, unsigned at)
{
	return (g->row[at] - t->row) / t->head_rows;
}

/* Entries of the batch from @at on that are rows of one head: their end, at most DIRECT_GROUP. */
static unsigned head_end(const struct batch *g, const struct tile *t, unsigned at)
{
	unsigned end = at + 1;

	while (end < g->n && end < at + DIRECT_GROUP && head_of(g, t, end) == head_of(g, t, at))
		end++;
	return end;
}

/* Scores at positions [from, to), multiples of DIRECT_AT_ONCE. */
static void direct_scores_at(struct batch *g, const struct tile *t, unsigned from, unsigned to)
{
	for (unsigned j = from; j < to; j += DIRECT_AT_ONCE) {
		const uint8_t *rows[DIRECT_AT_ONCE], *ahead[DIRECT_AT_ONCE];
		uint32_t step, offset = rows_ahead(t, j + t->ahead, DIRECT_AT_ONCE, ahead, &step), last = UINT32_MAX;

		for (unsigned p = 0; p < DIRECT_AT_ONCE; p++)
			rows[p] = k_row(t, j + p);
		for (unsigned at = 0, end; at < g->n; at = end) {
			const uint8_t *k[DIRECT_AT_ONCE], *next[DIRECT_AT_ONCE];
			uint32_t head = head_of(g, t, at);
			float *s[DIRECT_GROUP];

			end = head_end(g, t, at);
			for (unsigned p = 0; p < DIRECT_AT_ONCE; p++) {
				k[p] = rows[p] + t->k_offset + head * t->k_bytes;
				next[p] = ahead[p] + offset + head * step;
			}
			for (unsigned i = at; i < end; i++)
				s[i - at] = g->s[i] + j;
			direct_scores(t->shape->k_codec, end - at, s, g->q + at, k, head == last ? NULL : next,
				      t->shape->k_dim);
			last = head;
		}
	}
}

static void direct_run(struct batch *g, const struct tile *t, uint32_t run, unsigned j, unsigned steps)
{
	for (unsigned to = j + steps; j < to; j += steps) {
		const uint8_t *ahead[DIRECT_STEPS];
		uint32_t step, offset = rows_ahead(t, t->n + j + t->ahead, DIRECT_STEPS, ahead, &step), last = UINT32_MAX;

		steps = to - j < DIRECT_STEPS ? to - j : DIRECT_STEPS;
		for (unsigned at = 0, end; at < g->n; at = end) {
			const uint8_t *v[DIRECT_STEPS], *next[DIRECT_STEPS];
			uint32_t head = head_of(g, t, at);
			const float *p[DIRECT_GROUP];
			float *acc[DIRECT_GROUP], alpha[DIRECT_GROUP];
			unsigned n = 0;

			end = head_end(g, t, at);
			for (unsigned i = at; i < end; i++) {
				if (!(run >> i & 1))
					continue;
				p[n] = g->s[i] + j;
				acc[n] = g->acc[i];
				alpha[n++] = g->alpha[i];
				g->alpha[i] = 1;
			}
			if (!n)
				continue;
			for (unsigned s = 0; s < steps; s++) {
				v[s] = t->v_rows[j + s] + t->v_offset + head * t->v_bytes;
				next[s] = ahead[s] + offset + head * step;
			}
			direct_output(t->shape->v_codec, n, acc, alpha, p, v, head == last ? NULL : next, t->shape->v_dim,
				      steps);
			last = head;
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
		for (unsigned i = 0; i < g->n; i++) {
			if (rows >> i & 1)
				g->alpha[i] = 1;
		}
		left = end < KVT_TILE ? left & ~0ull << end : 0;
	}
}

static void take_batch(struct batch *g, struct tile *t)
{
	uint64_t any = 0;
	unsigned from, to; /* panels that some row sees */

	for (unsigned i = 0; i < g->n; i++)
		any |= g->seen[i];
	from = (unsigned)__builtin_ctzll(any) / PANEL;
	to = (63 - (unsigned)__builtin_clzll(any)) / PANEL + 1;
	if (t->direct) {
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
	soft_max(g, t, from * PANEL, to * PANEL);
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
		for (uint32_t i = t->row; i < end; i++) {
			uint64_t seen;

			if (t->out->sum[i] != t->out->sum[i])
				continue;
			seen = see(t, i, g->bias[g->n]);
			if (!seen)
				continue;
			g->row[g->n] = i;
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
	struct tile t = { .shape = shape, .rows = rows, .out = out, .head_rows = rows->m / kv->heads };
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

		t.row = head * t.head_rows;
		t.k_offset = kv->k_offset + head * t.k_bytes;
		t.v_offset = kv->v_offset + head * t.v_bytes;
		split_heads(&t, kv, end * t.head_rows, g);
	}
}

static NOINLINE void merge_rows(struct kvt_attn_state *into, const struct kvt_attn_state *part, uint32_t m,
				uint32_t v_dim)
{
	for (uint32_t i = 0; i < m; i++) {
		float *acc = into->acc + (size_t)i * v_dim, max, a, b;
		const float *other = part->acc + (size_t)i * v_dim;

		if (into->sum[i] != into->sum[i] || part->max[i] == -INFINITY)
			continue;
		if (into->max[i] == -INFINITY) { /* bit for bit: where a row's splits begin makes no difference */
			into->max[i] = part->max[i];
			into->sum[i] = part->sum[i];
			memcpy(acc, other, v_dim * sizeof(float));
			continue;
		}
		max = into->max[i] > part->max[i] ? into->max[i] : part->max[i];
		a = kvt_exp1(into->max[i] - max);
		b = kvt_exp1(part->max[i] - max);
		into->max[i] = max;
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
