/* SPDX-License-Identifier: MIT */
/*
 * q8_0 and q4_0: groups of 32 elements that share one f16 scale. Included by
 * codec.simd.c.
 *
 *   q8_0: scale f16, 32 x int8.                 x = scale * code
 *   q4_0: scale f16, 16 bytes: codes of elements j (low half) and j + 16.  x = scale * (code - 8)
 */
#ifndef KVT_CODEC_QUANT_H
#define KVT_CODEC_QUANT_H

#include <math.h>
#include <stdbool.h>

#include "base/simd.h"
#include "codec/internal.h"

#define Q8_BYTES 34
#define Q4_BYTES 18
#define GROUP_VECS (KVT_GROUP / KVT_VW)

/* The group's elements, |the largest|; false: one is NaN or infinite. */
VF_INLINE bool quant_load(const uint8_t *src, vf *x, float *most)
{
	vf max = vf_zero();
	vm fine = vm_of_bits(~0u);
	float lanes[KVT_VW];

	KVT_UNROLL
	for (unsigned i = 0; i < GROUP_VECS; i++) {
		vf a;

		x[i] = vf_load((const float *)src + i * KVT_VW);
		a = vf_abs(x[i]);
		fine = vm_and(fine, vf_lt(a, vf_set1(INFINITY)));
		max = vf_max(max, a);
	}
	if (vm_bits(vm_not(fine)))
		return false;
	vf_store(lanes, max);
	*most = 0;
	for (unsigned l = 0; l < KVT_VW; l++)
		*most = *most > lanes[l] ? *most : lanes[l];
	return true;
}

VF_INLINE void quant_scale(uint8_t *dst, float scale)
{
	uint16_t h = kvt_f16_narrow(kvt_bits_of(scale));

	memcpy(dst, &h, sizeof(h));
}

/* Nearest integer, ties away from zero, of |v| < 2^22, as the lanes of 1.5 * 2^23 + v. */
VF_INLINE vi quant_round(vf v)
{
	const vf big = vf_set1(12582912.0f), half = vf_set1(0.5f);
	vf r = vf_sub(vf_add(v, big), big), d = vf_sub(v, r); /* to even; d is exact */
	vf away = vf_or(vf_set1(1), vf_sign(v));
	vm tie = vm_and(vf_eq(vf_abs(d), half), vf_eq(vf_or(half, vf_sign(d)), vf_or(half, vf_sign(v))));

	return vf_bits(vf_add(vf_add(r, vf_select(tie, away, vf_zero())), big));
}

static void f32_to_q8_0(uint8_t *dst, const uint8_t *src, uint64_t n)
{
	for (; n; n -= KVT_GROUP, src += KVT_GROUP * 4, dst += Q8_BYTES) {
		uint32_t code[KVT_GROUP];
		vf x[GROUP_VECS];
		float most, scale, inverse;

		memset(dst, 0, Q8_BYTES);
		if (!quant_load(src, x, &most)) {
			quant_scale(dst, NAN);
			continue;
		}
		scale = most / 127;
		inverse = scale != 0 ? 1 / scale : 0;
		quant_scale(dst, scale);
		if (isinf(inverse))
			continue;
		KVT_UNROLL
		for (unsigned i = 0; i < GROUP_VECS; i++)
			vi_store(code + i * KVT_VW, quant_round(vf_mul(x[i], vf_set1(inverse))));
		for (unsigned j = 0; j < KVT_GROUP; j++)
			dst[2 + j] = (uint8_t)code[j];
	}
}

/* The element of the largest magnitude, the first of several, with its sign. */
static float quant_first(const uint8_t *src, float most)
{
	float f;

	for (unsigned j = 0; j < KVT_GROUP; j++) {
		memcpy(&f, src + j * 4, 4);
		if (fabsf(f) == most)
			break;
	}
	return f;
}

static void f32_to_q4_0(uint8_t *dst, const uint8_t *src, uint64_t n)
{
	for (; n; n -= KVT_GROUP, src += KVT_GROUP * 4, dst += Q4_BYTES) {
		float most, scale, inverse, code[KVT_GROUP];
		vf x[GROUP_VECS];

		memset(dst, 0, Q4_BYTES);
		if (!quant_load(src, x, &most)) {
			quant_scale(dst, NAN);
			continue;
		}
		scale = quant_first(src, most) / -8;
		inverse = scale != 0 ? 1 / scale : 0;
		quant_scale(dst, scale);
		if (isinf(inverse))
			inverse = 0; /* codes 8: zeros */
		KVT_UNROLL
		for (unsigned i = 0; i < GROUP_VECS; i++)
			vf_store(code + i * KVT_VW, vf_add(vf_mul(x[i], vf_set1(inverse)), vf_set1(8.5f)));
		for (unsigned j = 0; j < KVT_GROUP / 2; j++) {
			int low = (int)code[j], high = (int)code[j + KVT_GROUP / 2];

			dst[2 + j] = (uint8_t)((low < 15 ? low : 15) | (high < 15 ? high : 15) << 4);
		}
	}
}

/* Half a group: what the compiler makes of it is this instruction set's. */
typedef int8_t quant_codes __attribute__((vector_size(KVT_GROUP / 2)));
typedef float quant_floats __attribute__((vector_size(KVT_GROUP / 2 * 4)));

VF_INLINE float quant_scale_of(const uint8_t *group)
{
	uint16_t h;

	memcpy(&h, group, sizeof(h));
	return kvt_float_of(kvt_f16_widen(h));
}

static void q8_0_to_f32(uint8_t *dst, const uint8_t *src, uint64_t n)
{
	for (; n; n -= KVT_GROUP, src += Q8_BYTES, dst += KVT_GROUP * 4) {
		const float scale = quant_scale_of(src);

		KVT_UNROLL
		for (unsigned half = 0; half < 2; half++) {
			quant_codes code;
			quant_floats x;

			memcpy(&code, src + 2 + half * sizeof(code), sizeof(code));
			x = scale * __builtin_convertvector(code, quant_floats);
			memcpy(dst + half * sizeof(x), &x, sizeof(x));
		}
	}
}

static void q4_0_to_f32(uint8_t *dst, const uint8_t *src, uint64_t n)
{
	for (; n; n -= KVT_GROUP, src += Q4_BYTES, dst += KVT_GROUP * 4) {
		const float scale = quant_scale_of(src);
		quant_codes code;

		memcpy(&code, src + 2, sizeof(code));
		KVT_UNROLL
		for (unsigned half = 0; half < 2; half++) {
			quant_codes four = half ? code >> 4 & 15 : code & 15;
			quant_floats x = scale * (__builtin_convertvector(four, quant_floats) - 8);

			memcpy(dst + half * sizeof(x), &x, sizeof(x));
		}
	}
}

#endif
