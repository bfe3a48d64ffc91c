/* SPDX-License-Identifier: MIT */
/*
 * Scores of a tile become weights. All of a tile's 64 positions are taken, also
 * those that no row sees: they weigh 0. What is the same work for each row (its
 * largest score, its sum, the factor of what it has) is done for several rows
 * side by side.
 */
#ifndef KVT_ATTENTION_SOFTMAX_H
#define KVT_ATTENTION_SOFTMAX_H

#include <math.h>
#include <string.h>

#include "attention/batch.h"
#include "attention/exp.h"

/* Distances of the vector's positions from the row's own, as floats: exact below 2^24, rounded above. */
static vf distance(uint64_t first, uint64_t pos)
{
	int64_t d = (int64_t)(first - pos);
	int32_t near = d > INT32_MAX - KVT_VW ? INT32_MAX - KVT_VW : d < INT32_MIN ? INT32_MIN : (int32_t)d;

	return vf_of_int(vi_add(vi_set1(near), vi_iota()));
}

/* Where everything is seen, scores are scaled; leaves the largest of each lane. False if any is not finite. */
static bool scale_all(struct batch *g, unsigned i, float by)
{
	const vf scale = vf_set1(by), inf = vf_set1(INFINITY);
	vf max[PANEL_VECS];
	vm finite = vm_of_bits(~0u);

	KVT_UNROLL
	for (unsigned v = 0; v < PANEL_VECS; v++)
		max[v] = vf_set1(-INFINITY);
	for (unsigned j = 0; j < KVT_TILE; j += PANEL) {
		KVT_UNROLL
		for (unsigned v = 0; v < PANEL_VECS; v++) {
			vf s = vf_mul(vf_load(g->s[i] + j + v * KVT_VW), scale);

			vf_store(g->s[i] + j + v * KVT_VW, s);
			finite = vm_and(finite, vf_lt(vf_abs(s), inf));
			max[v] = vf_max(max[v], s);
		}
	}
	KVT_UNROLL
	for (unsigned v = 0; v < PANEL_VECS; v++)
		vf_store(g->lane[i] + v * KVT_VW, max[v]);
	return !vm_bits(vm_not(finite));
}

/*
 * Scores from dot products: scale, soft-cap, bias. Positions that have no
 * weight, not seen or scored -inf, become -inf and leave *seen. Leaves the
 * largest of each lane; false if any score that is seen is NaN or +inf.
 */
static bool weigh(struct batch *g, unsigned i, const struct tile *t, float by)
{
	const struct kvt_attn_shape *shape = t->shape;
	const struct kvt_query_rows *r = t->rows;
	const vf ninf = vf_set1(-INFINITY), scale = vf_set1(by);
	uint64_t seen = g->seen[i], weight = 0;
	vf max[PANEL_VECS];
	vm fine = vm_of_bits(~0u);

	KVT_UNROLL
	for (unsigned v = 0; v < PANEL_VECS; v++)
		max[v] = ninf;
	for (unsigned j = 0; j < KVT_TILE; j += KVT_VW) {
		vf s = vf_mul(vf_load(g->s[i] + j), scale);

		if (shape->softcap != 0) {
			vf cap = vf_set1(shape->softcap);

			s = vf_mul(cap, vf_tanh(vf_div(s, cap)));
		}
		if (r->slope) {
			vf bias = r->mask ? vf_load(g->bias[i] + j) : distance(t->first + j, r->pos[g->row[i]]);

			s = vf_fma(vf_set1(r->slope[g->row[i]]), bias, s);
		} else if (r->mask) {
			s = vf_add(s, vf_load(g->bias[i] + j));
		}
		s = vf_select(vm_of_bits((uint32_t)(seen >> j)), s, ninf);
		vf_store(g->s[i] + j, s);
		fine = vm_and(fine, vf_lt(s, vf_set1(INFINITY)));
		weight |= (uint64_t)vm_bits(vf_lt(ninf, s)) << j;
		max[0] = vf_max(max[0], s);
	}
	g->seen[i] = weight;
	KVT_UNROLL
	for (unsigned v = 0; v < PANEL_VECS; v++)
		vf_store(g->lane[i] + v * KVT_VW, max[v]);
	return !vm_bits(vm_not(fine));
}

/* Weights from scores; leaves the sums of j mod 16. */
static void exponentiate(float *s, float *lane, float max)
{
	vf sum[PANEL_VECS];

	KVT_UNROLL
	for (unsigned v = 0; v < PANEL_VECS; v++)
		sum[v] = vf_zero();
	for (unsigned j = 0; j < KVT_TILE; j += 4 * KVT_VW) {
		vf p[4];

		KVT_UNROLL
		for (unsigned v = 0; v < 4; v++)
			p[v] = vf_sub(vf_load(s + j + v * KVT_VW), vf_set1(max));
		vf_exp_each(4, p);
		KVT_UNROLL
		for (unsigned v = 0; v < 4; v++) {
			vf_store(s + j + v * KVT_VW, p[v]);
			sum[v % PANEL_VECS] = vf_add(sum[v % PANEL_VECS], p[v]);
		}
	}
	KVT_UNROLL
	for (unsigned v = 0; v < PANEL_VECS; v++)
		vf_store(lane + v * KVT_VW, sum[v]);
}

/* out[i] = lane[i] folded 8, 4, 2, 1, eight rows at a time: by sums, or by the larger. */
VF_INLINE void fold_lanes(const bool max, float *out, float (*lane)[PANEL], unsigned n)
{
	for (unsigned at = 0; at < n; at += 8) {
		v8 x[8];

		KVT_UNROLL
		for (unsigned i = 0; i < 8; i++) {
			v8 low = v8_load(lane[at + i]), high = v8_load(lane[at + i] + 8);

			x[i] = max ? v8_max(low, high) : v8_add(low, high);
		}
		KVT_UNROLL
		for (unsigned i = 0; i < 4; i++)
			x[i] = max ? v8_fold_max_pair(x[i], x[i + 4]) : v8_fold_pair(x[i], x[i + 4]);
		if (max)
			v8_fold_max_pairs(out + at, x);
		else
			v8_fold_pairs(out + at, x);
	}
}

static void scale_by(float *acc, float alpha, uint32_t dims)
{
	uint32_t d = 0;

	for (; d + KVT_VW <= dims; d += KVT_VW)
		vf_store(acc + d, vf_mul(vf_load(acc + d), vf_set1(alpha)));
	vf_store_part(acc + d, vf_mul(vf_load_part(acc + d, dims - d), vf_set1(alpha)), dims - d);
}

/* The batch's scores become weights; rows that gain nothing, or are NaN from here on, leave it. */
static void soft_max(struct batch *g, const struct tile *t)
{
	const struct kvt_query_rows *r = t->rows;
	const bool plain = !r->mask && !r->slope && t->shape->softcap == 0;
	struct kvt_attn_state *out = t->out;
	float top[BATCH], sum[BATCH];
	unsigned n = 0;

	for (unsigned i = 0; i < g->n; i++) {
		bool all = plain && g->seen[i] == ~0ull;

		if (all && scale_all(g, i, t->shape->scale))
			continue;
		if (!weigh(g, i, t, all ? 1 : t->shape->scale)) {
			out->sum[g->row[i]] = NAN;
			out->max[g->row[i]] = 0; /* something was seen */
			g->seen[i] = 0;
		}
	}
	fold_lanes(true, top, g->lane, g->n);
	for (unsigned i = 0; i < g->n; i++) {
		uint32_t row = g->row[i];
		float old = out->max[row];

		if (!g->seen[i])
			continue;
		top[n] = top[i] > old ? top[i] : old;
		g->alpha[n] = old - top[n];
		g->seen[n] = g->seen[i];
		g->row[n] = row;
		g->head[n] = g->head[i];
		if (n != i)
			memcpy(g->s[n], g->s[i], sizeof(g->s[n]));
		g->acc[n] = out->acc + (size_t)row * t->shape->v_dim;
		n++;
	}
	g->n = n;
	for (unsigned i = 0; i < n; i += KVT_VW)
		vf_store(g->alpha + i, vf_exp(vf_load(g->alpha + i)));
	for (unsigned i = 0; i < n; i++)
		exponentiate(g->s[i], g->lane[i], top[i]);
	fold_lanes(false, sum, g->lane, n);
	for (unsigned i = 0; i < n; i++) {
		out->max[g->row[i]] = top[i];
		out->sum[g->row[i]] = fmaf(out->sum[g->row[i]], g->alpha[i], sum[i]);
		if (g->alpha[i] != 1)
			scale_by(g->acc[i], g->alpha[i], t->shape->v_dim);
	}
}

#endif
