// SPDX-License-Identifier: MIT
/*
 * The exact kernel family on the CPU. A tile's K and V become panels once
 * (panel.h); query rows then pass over them a few at a time, as a group: scores,
 * soft-max, output. A group only shares loads: no row's arithmetic depends on
 * the others, nor on how many there are.
 *
 * What a row sees of a tile is a word of 64 bits. Rows of a group may differ in
 * it: the output is accumulated over runs of positions within which no row's
 * bit changes.
 */
#include "attention/internal.h"

#include "attention/exp.h"
#include "attention/panel.h"
#include "base/fpenv.h"

#define GROUP 6 /* query rows: as many sums as the registers hold */
#define TILE_PANELS (KVT_TILE / PANEL)
#define V_STRIDE ((KVT_TILE + 1) * PANEL) /* floats; odd in cache lines, or panels would share a cache set */
#define NOINLINE __attribute__((noinline))

/* Panels a pass for a group of n rows: enough independent sums to hide an fma's latency, no more than registers. */
#if KVT_VW == 16
#define PANELS_OF(n) 4
#elif KVT_VW == 8
#define PANELS_OF(n) ((n) == 1 ? 4 : (n) <= 3 ? 2 : 1)
#else
#define PANELS_OF(n) ((n) == 1 ? 4 : (n) == 2 ? 2 : 1)
#endif

_Static_assert(KVT_TILE == 64 && KVT_SPLIT % KVT_TILE == 0, "a tile's visibility is one 64-bit word");

struct tile {
	const struct kvt_attn_shape *shape;
	const struct kvt_query_rows *rows;
	struct kvt_attn_state *out;
	uint64_t first; /* position of row 0 */
	unsigned n;
	const uint8_t *const *k_rows, *const *v_rows;
	uint32_t k_offset, v_offset;
	float *k, *v; /* panels */
	size_t k_stride;
	bool packed;
};

struct group {
	unsigned n;
	uint32_t row[GROUP];
	uint64_t seen[GROUP];
	const float *q[GROUP];
	const float *p[GROUP]; /* weights */
	float *acc[GROUP];
	float alpha[GROUP];
	float s[GROUP][KVT_TILE]; /* scores, then weights */
	float bias[GROUP][KVT_TILE];
};

static float *align_up(void *p)
{
	return (float *)(((uintptr_t)p + 63) & ~(uintptr_t)63);
}

static size_t k_stride(const struct kvt_attn_shape *shape)
{
	return (size_t)(shape->k_dim + 1) * PANEL;
}

static size_t scratch_bytes(const struct kvt_attn_shape *shape, uint32_t m)
{
	size_t k = TILE_PANELS * k_stride(shape), v = (shape->v_dim + PANEL - 1) / PANEL * (size_t)V_STRIDE;

	(void)m;
	return (k + v) * sizeof(float) + (sizeof(struct group) + 63) / 64 * 64;
}

static void pack(struct tile *t)
{
	const struct kvt_attn_shape *s = t->shape;

	for (unsigned p = 0; p * PANEL < t->n; p++)
		panel_k(s->k_codec, t->k + p * t->k_stride, t->k_rows + p * PANEL, t->k_offset,
			t->n - p * PANEL < PANEL ? t->n - p * PANEL : PANEL, s->k_dim);
	for (unsigned j = 0; j < t->n; j++)
		panel_v(s->v_codec, t->v + j * PANEL, V_STRIDE, t->v_rows[j] + t->v_offset, s->v_dim);
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

/* s = q . k for panels [from, to) */
VF_INLINE void scores_of(const unsigned rows, struct group *g, const struct tile *t, unsigned from, unsigned to)
{
	const unsigned step = PANELS_OF(rows);
	unsigned p = from;

	for (; p + step <= to; p += step) {
		vf c[GROUP * 4 * PANEL_VECS];

		KVT_UNROLL
		for (unsigned i = 0; i < rows * step * PANEL_VECS; i++)
			c[i] = vf_zero();
		panel_multiply(rows, step, c, g->q, t->k + p * t->k_stride, t->k_stride, t->shape->k_dim);
		KVT_UNROLL
		for (unsigned i = 0; i < rows; i++) {
			KVT_UNROLL
			for (unsigned v = 0; v < step * PANEL_VECS; v++)
				vf_store(g->s[i] + p * PANEL + v * KVT_VW, c[i * step * PANEL_VECS + v]);
		}
	}
	for (; p < to; p++) {
		vf c[GROUP * PANEL_VECS];

		KVT_UNROLL
		for (unsigned i = 0; i < rows * PANEL_VECS; i++)
			c[i] = vf_zero();
		panel_multiply(rows, 1, c, g->q, t->k + p * t->k_stride, 0, t->shape->k_dim);
		KVT_UNROLL
		for (unsigned i = 0; i < rows; i++) {
			KVT_UNROLL
			for (unsigned v = 0; v < PANEL_VECS; v++)
				vf_store(g->s[i] + p * PANEL + v * KVT_VW, c[i * PANEL_VECS + v]);
		}
	}
}

static void scores(struct group *g, const struct tile *t, unsigned from, unsigned to)
{
	switch (g->n) {
	case 1: scores_of(1, g, t, from, to); break;
	case 2: scores_of(2, g, t, from, to); break;
	case 3: scores_of(3, g, t, from, to); break;
	case 4: scores_of(4, g, t, from, to); break;
	case 5: scores_of(5, g, t, from, to); break;
	default: scores_of(6, g, t, from, to);
	}
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
VF_INLINE float weigh(const bool plain, struct group *g, unsigned i, const struct tile *t, unsigned from, unsigned to)
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
static void soft_max(struct group *g, const struct tile *t, unsigned from, unsigned to)
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
			continue;
		}
		if (!g->seen[i])
			continue;
		old = out->max[row];
		top = (top > old ? top : old) + 0.0f; /* not -0 */
		sum = exponentiate(g->s[i], top, from, to);
		g->alpha[n] = kvt_exp1(old - top);
		out->max[row] = top;
		out->sum[row] = fmaf(out->sum[row], g->alpha[n], sum);
		g->seen[n] = g->seen[i];
		g->p[n] = g->s[i];
		g->acc[n] = out->acc + (size_t)row * t->shape->v_dim;
		n++;
	}
	g->n = n;
}

/* acc = acc * alpha + sum over positions [j, j + steps) of p * v, dimensions of @panels panels at @d */
VF_INLINE void output_panels(const unsigned rows, const unsigned panels, const bool whole, float *const *acc,
			     const float *alpha, const float *const *p, const float *v, uint32_t d, uint32_t dims,
			     uint32_t steps)
{
	vf c[GROUP * 4 * PANEL_VECS];

	KVT_UNROLL
	for (unsigned i = 0; i < rows; i++) {
		KVT_UNROLL
		for (unsigned l = 0; l < panels * PANEL_VECS; l++) {
			uint32_t at = d + l * KVT_VW, have = at < dims ? dims - at : 0;
			vf a = whole || have >= KVT_VW ? vf_load(acc[i] + at) :
			       have		       ? vf_load_part(acc[i] + at, have) :
							 vf_zero();

			c[i * panels * PANEL_VECS + l] = vf_mul(a, vf_set1(alpha[i]));
		}
	}
	panel_multiply(rows, panels, c, p, v, V_STRIDE, steps);
	KVT_UNROLL
	for (unsigned i = 0; i < rows; i++) {
		KVT_UNROLL
		for (unsigned l = 0; l < panels * PANEL_VECS; l++) {
			uint32_t at = d + l * KVT_VW, have = at < dims ? dims - at : 0;

			if (whole || have >= KVT_VW)
				vf_store(acc[i] + at, c[i * panels * PANEL_VECS + l]);
			else if (have)
				vf_store_part(acc[i] + at, c[i * panels * PANEL_VECS + l], have);
		}
	}
}

VF_INLINE void output_of(const unsigned rows, const struct tile *t, float *const *acc, float *alpha,
			 const float *const *weights, unsigned j, unsigned steps)
{
	const uint32_t dims = t->shape->v_dim, step = PANELS_OF(rows) * PANEL;
	const float *v = t->v + j * PANEL, *p[GROUP];
	uint32_t d = 0;

	KVT_UNROLL
	for (unsigned i = 0; i < rows; i++)
		p[i] = weights[i] + j;
	for (; d + step <= dims; d += step, v += step / PANEL * V_STRIDE)
		output_panels(rows, PANELS_OF(rows), true, acc, alpha, p, v, d, dims, steps);
	for (; d + PANEL <= dims; d += PANEL, v += V_STRIDE)
		output_panels(rows, 1, true, acc, alpha, p, v, d, dims, steps);
	if (d < dims)
		output_panels(rows, 1, false, acc, alpha, p, v, d, dims, steps);
	KVT_UNROLL
	for (unsigned i = 0; i < rows; i++)
		alpha[i] = 1;
}

static void output(unsigned rows, const struct tile *t, float *const *acc, float *alpha, const float *const *p,
		   unsigned j, unsigned steps)
{
	switch (rows) {
	case 1: output_of(1, t, acc, alpha, p, j, steps); break;
	case 2: output_of(2, t, acc, alpha, p, j, steps); break;
	case 3: output_of(3, t, acc, alpha, p, j, steps); break;
	case 4: output_of(4, t, acc, alpha, p, j, steps); break;
	case 5: output_of(5, t, acc, alpha, p, j, steps); break;
	default: output_of(6, t, acc, alpha, p, j, steps);
	}
}

/* Over runs of positions within which each row sees all or nothing. */
static void accumulate(struct group *g, const struct tile *t)
{
	uint64_t left = 0;

	for (unsigned i = 0; i < g->n; i++)
		left |= g->seen[i];
	while (left) {
		unsigned j = (unsigned)__builtin_ctzll(left), end;
		uint64_t change = 0, all = 1;

		for (unsigned i = 0; i < g->n; i++) {
			uint64_t here = g->seen[i] >> j & 1;

			change |= g->seen[i] ^ -here;
			all &= here;
		}
		change &= ~0ull << j;
		end = change ? (unsigned)__builtin_ctzll(change) : KVT_TILE;
		if (all) {
			output(g->n, t, g->acc, g->alpha, g->p, j, end - j);
		} else {
			for (unsigned i = 0; i < g->n; i++) {
				if (g->seen[i] >> j & 1)
					output(1, t, g->acc + i, g->alpha + i, g->p + i, j, end - j);
			}
		}
		left = end < KVT_TILE ? left & ~0ull << end : 0;
	}
}

static void take_group(struct group *g, struct tile *t)
{
	uint64_t any = 0;
	unsigned from, to; /* panels that some row sees */

	if (!t->packed)
		pack(t);
	for (unsigned i = 0; i < g->n; i++)
		any |= g->seen[i];
	from = (unsigned)__builtin_ctzll(any) / PANEL;
	to = (63 - (unsigned)__builtin_clzll(any)) / PANEL + 1;
	scores(g, t, from, to);
	soft_max(g, t, from * PANEL, to * PANEL);
	accumulate(g, t);
	g->n = 0;
}

static NOINLINE void split_rows(const struct kvt_attn_shape *shape, const struct kvt_split_rows *kv,
				const struct kvt_query_rows *rows, struct kvt_attn_state *out, void *scratch)
{
	struct group *g = scratch;
	struct tile t = { .shape = shape, .rows = rows, .out = out };

	t.k_offset = kv->k_offset;
	t.v_offset = kv->v_offset;
	t.k_stride = k_stride(shape);
	t.k = align_up(g + 1);
	t.v = t.k + TILE_PANELS * t.k_stride;
	g->n = 0;
	kvt_attn_state_clear(out, rows->m, shape->v_dim);
	for (uint32_t at = 0; at < kv->n; at += KVT_TILE) {
		t.first = kv->first + at;
		t.n = kv->n - at < KVT_TILE ? kv->n - at : KVT_TILE;
		t.k_rows = kv->k + at;
		t.v_rows = kv->v + at;
		t.packed = false;
		for (uint32_t i = 0; i < rows->m; i++) {
			uint64_t seen;

			if (out->sum[i] != out->sum[i])
				continue;
			seen = see(&t, i, g->bias[g->n]);
			if (!seen)
				continue;
			g->row[g->n] = i;
			g->seen[g->n] = seen;
			g->q[g->n] = rows->q[i];
			if (++g->n == GROUP)
				take_group(g, &t);
		}
		if (g->n)
			take_group(g, &t);
	}
	for (uint32_t i = 0; i < rows->m; i++) {
		if (out->sum[i] != out->sum[i])
			kvt_attn_state_spoil(out, i, shape->v_dim);
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
		if (part->sum[i] != part->sum[i]) {
			kvt_attn_state_spoil(into, i, v_dim);
			continue;
		}
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
