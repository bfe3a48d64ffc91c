/* SPDX-License-Identifier: MIT */
/* Random attention problems for the split kernels, a float64 reference, and a runner with redzones. */
#ifndef KVT_TESTS_ATTN_CASE_H
#define KVT_TESTS_ATTN_CASE_H

#include "attention/kernel.h"
#include "kvtier.h"

struct attn_case {
	struct kvt_attn_shape shape;
	uint32_t m, n;		   /* query rows; positions */
	uint32_t k_offset, v_offset; /* of the head in a row */
	size_t k_row, v_row;	   /* bytes */
	uint8_t *k, *v;
	float *q; /* [m][k_dim] */
	uint64_t *lo, *hi, *pos;
	uint8_t *mask; /* [m][n] or NULL */
	float *slope, *sinks; /* [m] or NULL */
	void *memory;
};

uint64_t attn_random(uint64_t *state);
float attn_normal(uint64_t *state);

/* What may appear in a case. */
#define ATTN_PLAIN 0u
#define ATTN_BIAS 1u	/* masks, slopes, soft-cap, sinks */
#define ATTN_SPREAD 2u	/* scores up to 1e4 */
#define ATTN_SPECIAL 4u /* NaN, infinities, denormals and zeros in q, K, V, the mask and the sinks */

void attn_case_make(struct attn_case *, uint64_t seed, unsigned what);

/* The same with the given sizes. @m, @n at least 1. */
void attn_case_make_sized(struct attn_case *, uint64_t seed, unsigned what, uint32_t k_dim, uint32_t v_dim,
			  uint32_t m, uint32_t n, uint32_t k_codec, uint32_t v_codec);
void attn_case_free(struct attn_case *);

/* Encode @f into element @index of an array of @codec. */
void attn_encode(uint8_t *array, uint32_t codec, size_t index, float f);
float attn_decode(const uint8_t *array, uint32_t codec, size_t index);

bool attn_case_sees(const struct attn_case *, uint32_t row, uint64_t position);

/* Fill K's and V's bytes of @position's row, all heads, with @byte. */
void attn_case_fill_position(struct attn_case *, uint64_t position, int byte);

/*
 * Rows [row, row + m) in one batch: all splits, merged and finished. @out is [m][v_dim].
 * @shift moves every buffer by so many elements from its alignment. Returns
 * false if a byte outside what the kernel owns was written.
 */
bool attn_case_run(const struct kvt_attn_kernels *, const struct attn_case *, uint32_t row, uint32_t m, unsigned shift,
		   float *out);

struct attn_reference {
	bool nan;	/* the whole row */
	bool nothing;	/* no position has weight */
	double out[KVT_HEAD_MAX];
	double weight[KVT_HEAD_MAX]; /* sum of p |v| / sum of p */
	double terms; /* the largest visible sum of |terms| of a score: what its rounding errors scale with */
};

void attn_case_reference(const struct attn_case *, uint32_t row, struct attn_reference *);

#endif
