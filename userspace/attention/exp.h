/* SPDX-License-Identifier: MIT */
/*
 * The exponential and the hyperbolic tangent of the exact kernel family: one
 * sequence of correctly rounded operations, the same on every instruction set.
 */
#ifndef KVT_ATTENTION_EXP_H
#define KVT_ATTENTION_EXP_H

#include <math.h>

#include "base/simd.h"

/*
 * e^x for x <= 0, within 1 unit in the last place; 1 for either zero. Below
 * KVT_EXP_MIN it is 0: no result is denormal. NaN is not handled.
 *
 * x = n ln 2 + r, |r| <= ln 2 / 2; e^r = 1 + r + r^2 P(r) (least squares at
 * Chebyshev nodes, 1.0e-8 relative); 2^n is added to the exponent.
 * Step by step for all of @n vectors, at most 4, a constant: one by one, the
 * steps would wait for each other.
 */
#define KVT_EXP_MIN (-87.0f)

VF_INLINE void vf_exp_each(const unsigned n, vf *x)
{
	static const float c[] = { 0x1.120c1ep-7f, 0x1.5555p-5f, 0x1.5554dcp-3f, 0.5f, 1.0f, 1.0f };
	const vf magic = vf_set1(0x1.8p23f); /* adding it rounds to an integer, left in the low bits */
	vf t[4], r[4], p[4];

	KVT_UNROLL
	for (unsigned i = 0; i < n; i++)
		t[i] = vf_fma(x[i], vf_set1(0x1.715476p+0f), magic);
	KVT_UNROLL
	for (unsigned i = 0; i < n; i++)
		r[i] = vf_fma(vf_sub(t[i], magic), vf_set1(-0x1.62e4p-1f), x[i]);
	KVT_UNROLL
	for (unsigned i = 0; i < n; i++) {
		r[i] = vf_fma(vf_sub(t[i], magic), vf_set1(-0x1.7f7d1cp-20f), r[i]);
		p[i] = vf_set1(0x1.6d3078p-10f);
	}
	KVT_UNROLL
	for (unsigned k = 0; k < sizeof(c) / sizeof(c[0]); k++) {
		KVT_UNROLL
		for (unsigned i = 0; i < n; i++)
			p[i] = vf_fma(p[i], r[i], vf_set1(c[k]));
	}
	KVT_UNROLL
	for (unsigned i = 0; i < n; i++) {
		p[i] = vi_floats(vi_add(vf_bits(p[i]), vi_shl(vf_bits(t[i]), 23)));
		x[i] = vf_select(vf_lt(x[i], vf_set1(KVT_EXP_MIN)), vf_zero(), p[i]);
	}
}

VF_INLINE vf vf_exp(vf x)
{
	vf_exp_each(1, &x);
	return x;
}

/*
 * Odd, within 3 units in the last place, also near 0; NaN stays NaN.
 * |x| < 0.625: x + x^3 P(x^2) (2.8e-8 relative); else (1 - e) / (1 + e), e = e^-2|x|.
 */
VF_INLINE vf vf_tanh(vf x)
{
	vf a = vf_abs(x), z = vf_mul(x, x), e = vf_exp(vf_mul(a, vf_set1(-2.0f))), one = vf_set1(1.0f);
	vf p = vf_set1(-0x1.857a3ap-8f), far;

	p = vf_fma(p, z, vf_set1(0x1.564656p-6f));
	p = vf_fma(p, z, vf_set1(-0x1.b8f746p-5f));
	p = vf_fma(p, z, vf_set1(0x1.110d6ap-3f));
	p = vf_fma(p, z, vf_set1(-0x1.555552p-2f));
	p = vf_fma(vf_mul(p, z), x, x);
	far = vf_or(vf_div(vf_sub(one, e), vf_add(one, e)), vf_sign(x));
	/* a NaN is in neither range; its polynomial is NaN */
	return vf_select(vf_lt(vf_set1(0.625f), a), far, p);
}

/* One value, by the same operations. */
VF_INLINE float kvt_exp1(float x)
{
	float f[KVT_VW];

	vf_store(f, vf_exp(vf_set1(x)));
	return f[0];
}

#endif
