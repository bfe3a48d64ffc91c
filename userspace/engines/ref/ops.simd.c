// SPDX-License-Identifier: MIT
/* What a Llama layer does to single rows beside matrix products: RMSNorm, RoPE, SwiGLU, the residual. */
#include <math.h>

#include "attention/exp.h"
#include "base/simd.h"
#include "engines/ref/kernels.h"

#define LANES 16 /* of a sum, whatever the vector width */

VF_INLINE uint32_t lanes(uint32_t left)
{
	return left < KVT_VW ? left : KVT_VW;
}

static void rmsnorm(float *y, const float *x, const float *weight, uint32_t n, float eps)
{
	vf acc[LANES / KVT_VW];
	float sum[LANES], scale;

	for (uint32_t v = 0; v < LANES / KVT_VW; v++)
		acc[v] = vf_zero();
	for (uint32_t i = 0; i < n; i += LANES) {
		for (uint32_t v = 0; v < LANES / KVT_VW && i + v * KVT_VW < n; v++) {
			vf a = vf_load_part(x + i + v * KVT_VW, lanes(n - i - v * KVT_VW));

			acc[v] = vf_fma(a, a, acc[v]);
		}
	}
	for (uint32_t v = 0; v < LANES / KVT_VW; v++)
		vf_store(sum + v * KVT_VW, acc[v]);
	for (uint32_t half = LANES / 2; half; half /= 2)
		for (uint32_t i = 0; i < half; i++)
			sum[i] += sum[i + half];
	scale = 1.0f / sqrtf(sum[0] / (float)n + eps);
	for (uint32_t i = 0; i < n; i += KVT_VW) {
		uint32_t left = lanes(n - i);
		vf a = vf_mul(vf_load_part(x + i, left), vf_set1(scale));

		vf_store_part(y + i, vf_mul(a, vf_load_part(weight + i, left)), left);
	}
}

/* silu(g) = g / (1 + e^-g), by e^-|g|, which cannot overflow. */
static void silu_mul(float *y, const float *gate, const float *up, uint32_t n)
{
	const vf one = vf_set1(1);

	for (uint32_t i = 0; i < n; i += KVT_VW) {
		uint32_t left = lanes(n - i);
		vf g = vf_load_part(gate + i, left);
		vf e = vf_exp(vf_sub(vf_zero(), vf_abs(g)));
		vf sigmoid = vf_div(vf_select(vf_lt(g, vf_zero()), e, one), vf_add(one, e));

		vf_store_part(y + i, vf_mul(vf_mul(g, sigmoid), vf_load_part(up + i, left)), left);
	}
}

static void add(float *x, const float *y, uint32_t n)
{
	for (uint32_t i = 0; i < n; i += KVT_VW) {
		uint32_t left = lanes(n - i);

		vf_store_part(x + i, vf_add(vf_load_part(x + i, left), vf_load_part(y + i, left)), left);
	}
}

static void rope(float *y, const float *x, const float *angles, uint32_t half)
{
	for (uint32_t i = 0; i < half; i += KVT_VW) {
		uint32_t left = lanes(half - i);
		vf a = vf_load_part(x + i, left), b = vf_load_part(x + half + i, left);
		vf c = vf_load_part(angles + i, left), s = vf_load_part(angles + half + i, left);

		vf_store_part(y + i, vf_fma(a, c, vf_mul(b, vf_sub(vf_zero(), s))), left);
		vf_store_part(y + half + i, vf_fma(b, c, vf_mul(a, s)), left);
	}
}

const struct ref_kernels KVT_SIMD(ref_kernels) = {
	.gemm = KVT_SIMD(ref_gemm),
	.rmsnorm = rmsnorm,
	.silu_mul = silu_mul,
	.add = add,
	.rope = rope,
};
