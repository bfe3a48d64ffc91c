/* SPDX-License-Identifier: MIT */
/*
 * The arithmetic of the reference engine's kernels, for a GPU and for its C
 * twin: the operations of engines/ref/ops.simd.c in their order, each rounded
 * once, so that CPU and GPU give the same bits.
 */
#ifndef KVT_GPU_ENGINE_MATH_H
#define KVT_GPU_ENGINE_MATH_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__ /* what nvcc would fuse by itself is named */
#define KVT_MATH static __device__ __forceinline__
#define KVT_FMA(a, b, c) __fmaf_rn(a, b, c)
#define KVT_MUL(a, b) __fmul_rn(a, b)
#define KVT_ADD(a, b) __fadd_rn(a, b)
#define KVT_SUB(a, b) __fsub_rn(a, b)
#define KVT_DIV(a, b) __fdiv_rn(a, b)
#define KVT_SQRT(a) __fsqrt_rn(a)
#define KVT_BITS(f) __float_as_uint(f)
#define KVT_FLOAT(bits) __uint_as_float(bits)
#else
#include "base/half.h"
#define KVT_MATH static inline
#define KVT_FMA(a, b, c) fmaf(a, b, c)
#define KVT_MUL(a, b) ((a) * (b))
#define KVT_ADD(a, b) ((a) + (b))
#define KVT_SUB(a, b) ((a) - (b))
#define KVT_DIV(a, b) ((a) / (b))
#define KVT_SQRT(a) sqrtf(a)
#define KVT_BITS(f) kvt_bits_of(f)
#define KVT_FLOAT(bits) kvt_float_of(bits)
#endif

/* e^x for x <= 0: attention/exp.h. */
KVT_MATH float kvt_math_exp(float x)
{
	const float magic = 0x1.8p23f, t = KVT_FMA(x, 0x1.715476p+0f, magic), n = KVT_SUB(t, magic);
	const float r = KVT_FMA(n, -0x1.7f7d1cp-20f, KVT_FMA(n, -0x1.62e4p-1f, x));
	float p = KVT_FMA(0x1.6d3078p-10f, r, 0x1.120c1ep-7f);

	p = KVT_FMA(p, r, 0x1.5555p-5f);
	p = KVT_FMA(p, r, 0x1.5554dcp-3f);
	p = KVT_FMA(p, r, 0.5f);
	p = KVT_FMA(p, r, 1.0f);
	p = KVT_FMA(p, r, 1.0f);
	return x < -87.0f ? 0.0f : KVT_FLOAT(KVT_BITS(p) + (KVT_BITS(t) << 23));
}

KVT_MATH float kvt_math_silu_mul(float gate, float up)
{
	const float e = kvt_math_exp(KVT_SUB(0.0f, fabsf(gate)));

	return KVT_MUL(KVT_MUL(gate, KVT_DIV(gate < 0 ? e : 1.0f, KVT_ADD(1.0f, e))), up);
}

/* @sum: of @n squares, in 16 lanes, i mod 16, folded 8, 4, 2, 1. */
KVT_MATH float kvt_math_norm_scale(float sum, uint32_t n, float eps)
{
	return KVT_DIV(1.0f, KVT_SQRT(KVT_ADD(KVT_DIV(sum, (float)n), eps)));
}

KVT_MATH float kvt_math_norm(float x, float scale, float weight)
{
	return KVT_MUL(KVT_MUL(x, scale), weight);
}

/* The pair (*a, *b), turned. */
KVT_MATH void kvt_math_rope(float *a, float *b, float cosine, float sine)
{
	const float turned = KVT_FMA(*a, cosine, KVT_MUL(*b, KVT_SUB(0.0f, sine)));

	*b = KVT_FMA(*b, cosine, KVT_MUL(*a, sine));
	*a = turned;
}

#endif
