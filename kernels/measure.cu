// SPDX-License-Identifier: MIT
/*
 * What memory gives at most: every byte of a range is read once, by as many
 * loads in flight as fit. Benchmarks hold other kernels against it.
 */
#include "gpu/kernels.h"

extern "C" __global__ void __launch_bounds__(512) measure_read(const struct kvt_read_args a)
{
	enum { LOADS = 8 };
	const uint4 *from = reinterpret_cast<const uint4 *>(a.from);
	const uint64_t n = a.bytes / sizeof(uint4), threads = (uint64_t)gridDim.x * blockDim.x;
	uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
	uint4 v[LOADS], x = { 0, 0, 0, 0 };
	uint64_t sum;

	for (; i + (LOADS - 1) * threads < n; i += LOADS * threads) {
#pragma unroll
		for (int k = 0; k < LOADS; k++)
			v[k] = __ldcs(from + i + k * threads);
#pragma unroll
		for (int k = 0; k < LOADS; k++) {
			x.x ^= v[k].x;
			x.y ^= v[k].y;
			x.z ^= v[k].z;
			x.w ^= v[k].w;
		}
	}
	for (; i < n; i += threads) {
		const uint4 y = __ldcs(from + i);

		x.x ^= y.x;
		x.y ^= y.y;
		x.z ^= y.z;
		x.w ^= y.w;
	}
	sum = ((uint64_t)(x.y ^ x.w) << 32) | (x.x ^ x.z);
	for (int d = 16; d; d /= 2)
		sum ^= __shfl_xor_sync(0xffffffffu, sum, d);
	if (threadIdx.x % 32 == 0 && sum)
		atomicXor(reinterpret_cast<unsigned long long *>(a.out), (unsigned long long)sum);
}
