/* SPDX-License-Identifier: MIT */
/*
 * Few query rows: K and V are read where they are, in the order in which they lie
 * in memory: a few positions at a time, of all KV heads of the call, so that
 * memory sees whole rows; each head's slice is used from the cache.
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

/* Positions a pass for n rows of scores, vectors a pass for n rows of output: at least 8 sums if the registers allow. */
#define DIRECT_POSITIONS(n) ((n) == 1 ? 8 : (n) == 2 ? 4 : 2)
#define DIRECT_VECS(n) ((n) == 1 ? 8 : (n) == 4 ? 2 : 4)

/* Ask for the lines of @bytes at @p; the second-level cache has room for them, the first level's sets do not. */
VF_INLINE void direct_ahead(const uint8_t *p, uint32_t bytes)
{
	for (uint32_t at = 0; at < bytes; at += LINE)
		__builtin_prefetch(p + at, 0, 2);
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

/*
 * Scores of @rows rows at the eight positions @k; the slices at @ahead, if any,
 * are asked for meanwhile. @codec and @rows are constants.
 */
VF_INLINE void direct_scores_of(const uint32_t codec, const unsigned rows, float *const *s, const float *const *q,
				const uint8_t *const *k, const uint8_t *const *ahead, uint32_t dims)
{
	const unsigned n = DIRECT_POSITIONS(rows);
	const uint32_t e = panel_element(codec), whole = dims / PARTS * PARTS;
	v8 lanes[DIRECT_GROUP][DIRECT_AT_ONCE];

	for (unsigned j = 0; j < DIRECT_AT_ONCE; j += n) {
		v8 c[DIRECT_AT_ONCE];

		for (unsigned p = 0; ahead && p < n; p++)
			direct_ahead(ahead[j + p], dims * e);
		KVT_UNROLL
		for (unsigned i = 0; i < rows * n; i++)
			c[i] = v8_zero();
		for (uint32_t d = 0; d < whole; d += PARTS) {
			v8 x[DIRECT_AT_ONCE];

			KVT_UNROLL
			for (unsigned p = 0; p < n; p++)
				x[p] = direct_widen(codec, k[j + p] + d * e);
			KVT_UNROLL
			for (unsigned i = 0; i < rows; i++) {
				v8 y = v8_load(q[i] + d);

				KVT_UNROLL
				for (unsigned p = 0; p < n; p++)
					c[i * n + p] = v8_fma(y, x[p], c[i * n + p]);
			}
		}
		if (whole < dims) {
			float y[DIRECT_GROUP][PARTS] = { 0 };

			for (unsigned i = 0; i < rows; i++)
				memcpy(y[i], q[i] + whole, (dims - whole) * sizeof(float));
			KVT_UNROLL
			for (unsigned p = 0; p < n; p++) {
				uint8_t tail[PARTS * sizeof(float)] = { 0 };
				v8 x;

				memcpy(tail, k[j + p] + whole * e, (dims - whole) * e);
				x = direct_widen(codec, tail);
				KVT_UNROLL
				for (unsigned i = 0; i < rows; i++)
					c[i * n + p] = v8_fma(v8_load(y[i]), x, c[i * n + p]);
			}
		}
		KVT_UNROLL
		for (unsigned i = 0; i < rows; i++) {
			KVT_UNROLL
			for (unsigned p = 0; p < n; p++)
				lanes[i][j + p] = c[i * n + p];
		}
	}
	for (unsigned i = 0; i < rows; i++)
		v8_fold(s[i], lanes[i]);
}

/* acc = acc * alpha + sum of p * v over @steps positions, dimensions [d, d + vecs * KVT_VW). */
VF_INLINE void direct_output_pass(const uint32_t codec, const unsigned rows, const unsigned vecs, float *const *acc,
				  const float *alpha, const float *const *p, const uint8_t *const *v, uint32_t d,
				  unsigned steps)
{
	const uint32_t e = panel_element(codec);
	vf c[DIRECT_GROUP * 4];

	KVT_UNROLL
	for (unsigned i = 0; i < rows; i++) {
		KVT_UNROLL
		for (unsigned l = 0; l < vecs; l++)
			c[i * vecs + l] = vf_mul(vf_load(acc[i] + d + l * KVT_VW), vf_set1(alpha[i]));
	}
	for (unsigned s = 0; s < steps; s++) {
		vf y[DIRECT_GROUP];

		KVT_UNROLL
		for (unsigned i = 0; i < rows; i++)
			y[i] = vf_set1(p[i][s]);
		KVT_UNROLL
		for (unsigned l = 0; l < vecs; l++) {
			vf x = panel_widen(codec, v[s] + (d + l * KVT_VW) * e, KVT_VW);

			KVT_UNROLL
			for (unsigned i = 0; i < rows; i++)
				c[i * vecs + l] = vf_fma(y[i], x, c[i * vecs + l]);
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
VF_INLINE void direct_output_of(const uint32_t codec, const unsigned rows, float *const *acc, const float *alpha,
				const float *const *p, const uint8_t *const *v, const uint8_t *const *ahead,
				uint32_t dims, unsigned steps)
{
	const uint32_t e = panel_element(codec), whole = dims / KVT_VW * KVT_VW, n = dims - whole;
	const unsigned vecs = DIRECT_VECS(rows);
	uint32_t d = 0;

	for (; d + vecs * KVT_VW <= whole; d += vecs * KVT_VW) {
		for (unsigned s = 0; ahead && s < steps && d * e % LINE == 0; s++)
			direct_ahead(ahead[s] + d * e, vecs * KVT_VW * e);
		direct_output_pass(codec, rows, vecs, acc, alpha, p, v, d, steps);
	}
	for (; d < whole; d += KVT_VW)
		direct_output_pass(codec, rows, 1, acc, alpha, p, v, d, steps);
	if (!n)
		return;
	for (unsigned i = 0; i < rows; i++) {
		vf c = vf_mul(vf_load_part(acc[i] + whole, n), vf_set1(alpha[i]));

		for (unsigned s = 0; s < steps; s++)
			c = vf_fma(vf_set1(p[i][s]), panel_widen(codec, v[s] + whole * e, n), c);
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

static inline void direct_scores(uint32_t codec, unsigned rows, float *const *s, const float *const *q,
				 const uint8_t *const *k, const uint8_t *const *ahead, uint32_t dims)
{
	DIRECT_CALL(direct_scores_of, codec, rows, s, q, k, ahead, dims);
}

static inline void direct_output(uint32_t codec, unsigned rows, float *const *acc, const float *alpha,
				 const float *const *p, const uint8_t *const *v, const uint8_t *const *ahead,
				 uint32_t dims, unsigned steps)
{
	DIRECT_CALL(direct_output_of, codec, rows, acc, alpha, p, v, ahead, dims, steps);
}

#endif
