/* SPDX-License-Identifier: MIT */
/*
 * Elements of rows to and from f32 bits, as userspace/base/half.h has them. The
 * GPU's own conversions round the same way but make every NaN one NaN, so a
 * NaN is made by hand.
 */
#ifndef KVT_KERNELS_HALF_CUH
#define KVT_KERNELS_HALF_CUH

#include <cuda_fp16.h>
#include <stdint.h>

enum { ROW_F32, ROW_F16, ROW_BF16 }; /* enum kvt_codec */

static __device__ __forceinline__ uint32_t f16_widen(uint16_t h)
{
	uint32_t bits = __float_as_uint(__half2float(__ushort_as_half(h)));

	return (h & 0x7fff) > 0x7c00 ? (uint32_t)(h & 0x8000) << 16 | 0x7fc00000 | (uint32_t)(h & 0x3ff) << 13 : bits;
}

static __device__ __forceinline__ uint16_t f16_narrow(uint32_t f)
{
	uint16_t h = __half_as_ushort(__float2half_rn(__uint_as_float(f)));

	return (f & 0x7fffffff) > 0x7f800000 ? (f >> 16 & 0x8000) | 0x7e00 | (f >> 13 & 0x3ff) : h;
}

static __device__ __forceinline__ uint32_t bf16_widen(uint16_t h)
{
	return (uint32_t)h << 16;
}

static __device__ __forceinline__ uint16_t bf16_narrow(uint32_t f)
{
	return (f & 0x7fffffff) > 0x7f800000 ? f >> 16 | 0x40 : (f + 0x7fff + (f >> 16 & 1)) >> 16;
}

#endif
