// SPDX-License-Identifier: MIT
/* Loads and multiply-adds, as fast as this instruction set has them. */
#include "tools/peak.h"

#include "base/simd.h"

#define CHAINS 12

static float read_all(const void *data, size_t bytes)
{
	const float *p = data, *end = p + bytes / sizeof(*p);
	vf sum[4] = { vf_zero(), vf_zero(), vf_zero(), vf_zero() };
	float out[KVT_VW];

	for (; p < end; p += 4 * KVT_VW) {
		KVT_UNROLL
		for (int i = 0; i < 4; i++)
			sum[i] = vf_or(sum[i], vf_load(p + i * KVT_VW));
	}
	vf_store(out, vf_or(vf_or(sum[0], sum[1]), vf_or(sum[2], sum[3])));
	return out[0];
}

static double fma_all(uint64_t rounds, float *result)
{
	vf c[CHAINS], a = vf_set1(0.999f), b = vf_set1(0.001f), all = vf_zero();
	float out[KVT_VW];

	KVT_UNROLL
	for (int i = 0; i < CHAINS; i++)
		c[i] = vf_set1((float)i);
	for (uint64_t r = 0; r < rounds; r++) {
		KVT_UNROLL
		for (int i = 0; i < CHAINS; i++)
			c[i] = vf_fma(c[i], a, b);
	}
	KVT_UNROLL
	for (int i = 0; i < CHAINS; i++)
		all = vf_add(all, c[i]);
	vf_store(out, all);
	*result = out[0];
	return (double)rounds * CHAINS * KVT_VW * 2;
}

extern const struct peak_ops KVT_SIMD(peak);
const struct peak_ops KVT_SIMD(peak) = { .read = read_all, .fma = fma_all };
