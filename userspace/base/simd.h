/* SPDX-License-Identifier: MIT */
/*
 * A vector of floats, the same on every instruction set. A *.simd.c file is
 * compiled once for each (KVT_ISA: portable, avx2, avx512, neon) and exports
 * its functions through KVT_SIMD(name); base/cpu.h chooses one at run time.
 *
 * The bits do not depend on the instruction set because nothing here depends on
 * the vector's width: kernels put independent results side by side in a vector
 * and never add across it, and each operation is one IEEE-754 operation
 * (multiply-add is always fused). What still differs is a NaN's sign and
 * payload, and which zero max() returns: results that leave a kernel must not
 * carry them. Widening and narrowing are those of base/half.h, NaNs included.
 *
 * vf: KVT_VW floats. vi: as many 32-bit integers. vm: one truth value a lane.
 * Memory operands need no alignment beyond their element's.
 */
#ifndef KVT_BASE_SIMD_H
#define KVT_BASE_SIMD_H

#include <stdint.h>
#include <string.h>

#include "base/half.h"

#define KVT_SIMD_PASTE2(a, b) a##_##b
#define KVT_SIMD_PASTE(a, b) KVT_SIMD_PASTE2(a, b)
#define KVT_SIMD(name) KVT_SIMD_PASTE(name, KVT_ISA)

/*
 * Before a loop of constant count over an array of vectors: unrolled, the array
 * lives in registers. Where speed is not what counts, in portable code and under
 * a sanitizer, loops stay loops (KVT_COMPACT): unrolled, they take a compiler minutes.
 */
#if defined(KVT_ISA_portable) || defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define KVT_COMPACT 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define KVT_COMPACT 1
#endif
#endif
#ifdef KVT_COMPACT
#define KVT_UNROLL
#else
#define KVT_UNROLL _Pragma("GCC unroll 16")
#endif

#define VF_INLINE static inline __attribute__((always_inline, unused))

#if defined(KVT_ISA_avx512)
#include "base/simd_avx512.h"
#elif defined(KVT_ISA_avx2)
#include "base/simd_avx2.h"
#elif defined(KVT_ISA_neon)
#include "base/simd_neon.h"
#elif defined(KVT_ISA_portable)
#include "base/simd_portable.h"
#else
#error "a *.simd.c file: compile it with -DKVT_ISA=x -DKVT_ISA_x=1"
#endif

/*
 * Each of the above defines
 *
 *   KVT_VW, vf, vi, vm
 *   vf_zero() vf_set1(f)  vf_load(p) vf_store(p, v)
 *   vf_load_part(p, n) vf_store_part(p, v, n)     n lanes, 0 to KVT_VW; others read as 0 and are not touched
 *   vf_load_f16(p) vf_load_bf16(p) vf_store_f16(p, v) vf_store_bf16(p, v)
 *   vf_add vf_sub vf_mul vf_div vf_max vf_fma(a, b, c) = a * b + c
 *   vf_abs(v) vf_sign(v) = v's sign bit  vf_or(a, b)
 *   vf_lt(a, b) vf_eq(a, b)                       false where either is NaN
 *   vm_and vm_or vm_not  vm_bits(m) vm_of_bits(n) lane i is bit i
 *   vf_select(m, a, b) = m ? a : b
 *   vf_bits(v) vi_floats(i)                       the same bits
 *   vi_set1 vi_iota() vi_add vi_and vi_or vi_shl(i, n) vi_shr(i, n) (logical)  vi_load vi_store
 *   vf_of_int(i)                                  convert, rounding to nearest even
 *   vf_transpose(v)                               vf v[KVT_VW]: rows to columns
 *
 * and base/simd_eight.h, v8: eight floats, v8_zero v8_load v8_load_f16 v8_load_bf16 v8_fma v8_fold
 */

#include "base/simd_eight.h"

VF_INLINE vf vf_load_f16_part(const void *p, unsigned n)
{
	uint16_t h[KVT_VW] = { 0 };

	memcpy(h, p, n * sizeof(*h));
	return vf_load_f16(h);
}

VF_INLINE vf vf_load_bf16_part(const void *p, unsigned n)
{
	uint16_t h[KVT_VW] = { 0 };

	memcpy(h, p, n * sizeof(*h));
	return vf_load_bf16(h);
}

VF_INLINE void vf_store_f16_part(void *p, vf v, unsigned n)
{
	uint16_t h[KVT_VW];

	vf_store_f16(h, v);
	memcpy(p, h, n * sizeof(*h));
}

VF_INLINE void vf_store_bf16_part(void *p, vf v, unsigned n)
{
	uint16_t h[KVT_VW];

	vf_store_bf16(h, v);
	memcpy(p, h, n * sizeof(*h));
}

#endif
