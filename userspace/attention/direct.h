/* SPDX-License-Identifier: MIT */
/*
 * Few query rows: K and V are read where they are, a few positions at a time, of
 * all KV heads of the call. What comes next is asked for meanwhile, a cache line
 * in each step and strictly in the order of memory, whatever the order of use:
 * processors drop requests that come many at once.
 *
 * A score's eight partial sums are the lanes of one v8, so K needs no transpose;
 * the output's lanes are dimensions, so V needs no copy.
 */
#ifndef KVT_ATTENTION_DIRECT_H
#define KVT_ATTENTION_DIRECT_H

#include "attention/panel.h"

#define DIRECT_AT_ONCE 8 /* positions: of scores, */
#define DIRECT_STEPS 16	 /* and of output */
#define DIRECT_GROUP 4	 /* query rows whose sums the registers hold */

/*
 * Positions a pass for n rows of scores, vectors a pass for n rows of output: at least 8 sums, if the registers allow.
 * More rows than positions, or vectors, would cost loads, of which a cycle has two as it has two multiply-adds.
 */
#define DIRECT_POSITIONS(n) ((n) == 1 ? 8 : (n) == 4 ? 2 : 4)
#define DIRECT_VECS(n) ((n) == 1 ? 8 : (n) == 4 && KVT_VW == 8 ? 3 : 4)

/* A head's slices of some rows. */
struct direct_rows {
	const uint8_t *const *row;
	uint32_t offset;
};

/* What is asked for: @bytes bytes of each of @n rows, from @offset on; @at of the first one's are asked for. */
struct direct_ahead {
	const uint8_t *const *row;
	unsigned n;
	uint32_t offset, bytes, at;
};

/* Where the next @bytes bytes are. They may run on behind a row, where mostly the next one is. */
static inline const uint8_t *direct_ask(struct direct_ahead *a, uint32_t bytes)
{
	const uint8_t *p = *a->row + a->offset + a->at;

	for (a->at += bytes; a->at >= a->bytes && a->n > 1; a->at -= a->bytes) {
		a->row++;
		a->n--;
	}
	return p;
}

/* For the second-level cache, which has room for them; the first level's sets have not. */
VF_INLINE void direct_ask_for(const uint8_t *p, const uint32_t bytes)
{
	KVT_UNROLL
	for (uint32_t b = 0; b < bytes; b += LINE)
		__builtin_prefetch(p + b, 0, 2);
}

VF_INLINE v8 direct_widen(const uint32_t codec, const uint8_t *p)
{
	switch (codec) {
	case KVT_F16:
		return v8_load_f16(p);
	case KVT_BF16:
		return v8_load_bf16(p);
	default:
		return v8_load((const float *)p);
	}
}

/* c[row][position] += q * k over PARTS dimensions from @d on, of @n positions. */
VF_INLINE void direct_scores_step(const uint32_t codec, const unsigned rows, const unsigned n, v8 *c, const float *const *q,
				  const uint8_t *const *at, size_t d)
{
	const uint32_t e = panel_element(codec);
	v8 x[DIRECT_AT_ONCE], y[DIRECT_GROUP];

	/* held: the fewer */
	KVT_UNROLL
	for (unsigned p = 0; n < rows && p < n; p++)
		x[p] = direct_widen(codec, at[p] + d * e);
	KVT_UNROLL
	for (unsigned i = 0; n >= rows && i < rows; i++)
		y[i] = v8_load_once(q[i] + d);
	KVT_UNROLL
	for (unsigned i = 0; i < rows * n; i++) {
		unsigned row = n < rows ? i / n : i % rows, p = n < rows ? i % n : i / rows;

		if (n < rows && p == 0)
			y[row] = v8_load_once(q[row] + d);
		if (n >= rows && row == 0)
			x[p] = direct_widen(codec, at[p] + d * e);
		c[row * n + p] = v8_fma(y[row], x[p], c[row * n + p]);
	}
}

/* Scores of @rows rows at eight positions; as much is asked for of @ahead, if any. @codec and @rows are constants. */
VF_INLINE void direct_scores_of(const uint32_t codec, const unsigned rows, float *s, const float *const *q,
				const struct direct_rows *k, struct direct_ahead *ahead, uint32_t dims)
{
	const unsigned n = DIRECT_POSITIONS(rows);
	const uint32_t e = panel_element(codec), whole = dims / PARTS * PARTS, step = n * PARTS * e;
	/* where a pass has two positions, they are such that are folded together, and steps are short: two in a turn */
	const bool pair = n == 2;
	v8 lanes[DIRECT_GROUP][DIRECT_AT_ONCE];

	for (unsigned j = 0; j < DIRECT_AT_ONCE; j += n) {
		const uint8_t *at[DIRECT_AT_ONCE];
		const uint8_t *ask = ahead ? direct_ask(ahead, n * dims * e) : NULL;
		v8 c[DIRECT_GROUP * DIRECT_AT_ONCE];
		size_t d = 0;

		KVT_UNROLL
		for (unsigned p = 0; p < n; p++)
			at[p] = k->row[pair ? j / 2 + p * (DIRECT_AT_ONCE / 2) : j + p] + k->offset;
		KVT_UNROLL
		for (unsigned i = 0; i < rows * n; i++)
			c[i] = v8_zero();
		for (; pair && d + 2 * PARTS <= whole; d += 2 * PARTS) {
			if (ask) {
				direct_ask_for(ask, 2 * step);
				ask += 2 * step;
			}
			direct_scores_step(codec, rows, n, c, q, at, d);
			direct_scores_step(codec, rows, n, c, q, at, d + PARTS);
		}
		for (; d < whole; d += PARTS) {
			if (ask) {
				direct_ask_for(ask, step);
				ask += step;
			}
			direct_scores_step(codec, rows, n, c, q, at, d);
		}
		if (whole < dims) {
			float y[DIRECT_GROUP][PARTS] = { 0 };

			for (unsigned i = 0; i < rows; i++)
				memcpy(y[i], q[i] + whole, (dims - whole) * sizeof(float));
			KVT_UNROLL
			for (unsigned p = 0; p < n; p++) {
				uint8_t tail[PARTS * sizeof(float)] = { 0 };
				v8 x;

				memcpy(tail, at[p] + whole * e, (dims - whole) * e);
				x = direct_widen(codec, tail);
				KVT_UNROLL
				for (unsigned i = 0; i < rows; i++)
					c[i * n + p] = v8_fma(v8_load(y[i]), x, c[i * n + p]);
			}
		}
		KVT_UNROLL
		for (unsigned i = 0; i < rows; i++) {
			if (pair)
				lanes[i][j / 2] = v8_fold_pair(c[i * n], c[i * n + 1]);
			KVT_UNROLL
			for (unsigned p = 0; !pair && p < n; p++)
				lanes[i][j + p] = c[i * n + p];
		}
	}
	for (unsigned i = 0; i < rows; i++) {
		KVT_UNROLL
		for (unsigned p = 0; !pair && p < DIRECT_AT_ONCE / 2; p++)
			lanes[i][p] = v8_fold_pair(lanes[i][p], lanes[i][p + DIRECT_AT_ONCE / 2]);
		v8_fold_pairs(s + i * KVT_TILE, lanes[i]);
	}
}

/* acc += sum of p * v over @steps positions, dimensions [d, d + vecs * KVT_VW); as much is asked for of @ahead, if any. */
VF_INLINE void direct_output_pass(const uint32_t codec, const unsigned rows, const unsigned vecs, float *const *acc,
				  const float *p, const struct direct_rows *v, struct direct_ahead *ahead, uint32_t d,
				  unsigned steps)
{
	const uint32_t e = panel_element(codec), bytes = vecs * KVT_VW * e, offset = v->offset + d * e;
	const uint8_t *const *row = v->row, *ask = ahead ? direct_ask(ahead, steps * bytes) : NULL;
	vf c[DIRECT_GROUP * DIRECT_AT_ONCE];

	KVT_UNROLL
	for (unsigned i = 0; i < rows; i++) {
		KVT_UNROLL
		for (unsigned l = 0; l < vecs; l++)
			c[i * vecs + l] = vf_load(acc[i] + d + l * KVT_VW);
	}
	for (unsigned s = 0; s < steps; s++) {
		const uint8_t *at = row[s] + offset;
		vf x[DIRECT_AT_ONCE], y[DIRECT_GROUP];

		if (ask) {
			direct_ask_for(ask, bytes);
			ask += bytes;
		}
		/* held: the fewer */
		KVT_UNROLL
		for (unsigned l = 0; vecs < rows && l < vecs; l++)
			x[l] = panel_widen(codec, at + l * KVT_VW * e, KVT_VW);
		KVT_UNROLL
		for (unsigned i = 0; vecs >= rows && i < rows; i++)
			y[i] = vf_set1(p[i * KVT_TILE + s]);
		KVT_UNROLL
		for (unsigned i = 0; i < rows * vecs; i++) {
			unsigned r = vecs < rows ? i / vecs : i % rows, l = vecs < rows ? i % vecs : i / rows;

			if (vecs < rows && l == 0)
				y[r] = vf_set1(p[r * KVT_TILE + s]);
			if (vecs >= rows && r == 0)
				x[l] = panel_widen(codec, at + l * KVT_VW * e, KVT_VW);
			c[r * vecs + l] = vf_fma(y[r], x[l], c[r * vecs + l]);
		}
	}
	KVT_UNROLL
	for (unsigned i = 0; i < rows; i++) {
		KVT_UNROLL
		for (unsigned l = 0; l < vecs; l++)
			vf_store(acc[i] + d + l * KVT_VW, c[i * vecs + l]);
	}
}

/* All dimensions, of at most DIRECT_STEPS positions. */
VF_INLINE void direct_output_of(const uint32_t codec, const unsigned rows, float *const *acc, const float *p,
				const struct direct_rows *v, struct direct_ahead *ahead, uint32_t dims, unsigned steps)
{
	const uint32_t e = panel_element(codec), whole = dims / KVT_VW * KVT_VW, n = dims - whole;
	const unsigned vecs = DIRECT_VECS(rows);
	uint32_t d = 0;

	while (d < whole) {
		uint32_t left = (whole - d) / KVT_VW, now = left >= vecs && left != vecs + 1 ? vecs : left >= 2 ? 2 : 1;

		if (now == vecs)
			direct_output_pass(codec, rows, vecs, acc, p, v, ahead, d, steps);
		else if (now == 2)
			direct_output_pass(codec, rows, 2, acc, p, v, ahead, d, steps);
		else
			direct_output_pass(codec, rows, 1, acc, p, v, ahead, d, steps);
		d += now * KVT_VW;
	}
	if (!n)
		return;
	for (unsigned i = 0; i < rows; i++) {
		vf c = vf_load_part(acc[i] + whole, n);

		for (unsigned s = 0; s < steps; s++)
			c = vf_fma(vf_set1(p[i * KVT_TILE + s]), panel_widen(codec, v->row[s] + v->offset + whole * e, n), c);
		vf_store_part(acc[i] + whole, c, n);
	}
}

#ifdef KVT_COMPACT
#define DIRECT_CALL(function, codec, rows, ...) function(codec, rows, __VA_ARGS__)
#else
#define DIRECT_ROWS_CALL(function, codec, rows, ...)             \
	switch (rows) {                                          \
	case 1: function(codec, 1, __VA_ARGS__); break;          \
	case 2: function(codec, 2, __VA_ARGS__); break;          \
	case 3: function(codec, 3, __VA_ARGS__); break;          \
	default: function(codec, 4, __VA_ARGS__);                \
	}
/* FUNCTION(codec, rows, ...) with both as constants. */
#define DIRECT_CALL(function, codec, rows, ...)                                \
	switch (codec) {                                                       \
	case KVT_F16: DIRECT_ROWS_CALL(function, KVT_F16, rows, __VA_ARGS__) break;   \
	case KVT_BF16: DIRECT_ROWS_CALL(function, KVT_BF16, rows, __VA_ARGS__) break; \
	default: DIRECT_ROWS_CALL(function, KVT_F32, rows, __VA_ARGS__)        \
	}
#endif

static inline void direct_scores(uint32_t codec, unsigned rows, float *s, const float *const *q,
				 const struct direct_rows *k, struct direct_ahead *ahead, uint32_t dims)
{
	DIRECT_CALL(direct_scores_of, codec, rows, s, q, k, ahead, dims);
}

static inline void direct_output(uint32_t codec, unsigned rows, float *const *acc, const float *p,
				 const struct direct_rows *v, struct direct_ahead *ahead, uint32_t dims, unsigned steps)
{
	DIRECT_CALL(direct_output_of, codec, rows, acc, p, v, ahead, dims, steps);
}

#endif
