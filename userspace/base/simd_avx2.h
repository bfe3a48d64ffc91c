/* SPDX-License-Identifier: MIT */
/* base/simd.h on AVX2, FMA and F16C: 8 lanes. */
#ifndef KVT_BASE_SIMD_AVX2_H
#define KVT_BASE_SIMD_AVX2_H

#include <immintrin.h>

#define KVT_VW 8
typedef __m256 vf;
typedef __m256i vi;
typedef __m256 vm;

VF_INLINE vf vf_zero(void) { return _mm256_setzero_ps(); }
VF_INLINE vf vf_set1(float f) { return _mm256_set1_ps(f); }
VF_INLINE vf vf_load(const float *p) { return _mm256_loadu_ps(p); }
VF_INLINE void vf_store(float *p, vf v) { _mm256_storeu_ps(p, v); }
VF_INLINE vf vf_add(vf a, vf b) { return _mm256_add_ps(a, b); }
VF_INLINE vf vf_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
VF_INLINE vf vf_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
VF_INLINE vf vf_div(vf a, vf b) { return _mm256_div_ps(a, b); }
VF_INLINE vf vf_max(vf a, vf b) { return _mm256_max_ps(a, b); }
VF_INLINE vf vf_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
VF_INLINE vf vf_abs(vf v) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v); }
VF_INLINE vf vf_sign(vf v) { return _mm256_and_ps(_mm256_set1_ps(-0.0f), v); }
VF_INLINE vf vf_or(vf a, vf b) { return _mm256_or_ps(a, b); }
VF_INLINE vm vf_lt(vf a, vf b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
VF_INLINE vm vf_eq(vf a, vf b) { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
VF_INLINE vm vm_and(vm a, vm b) { return _mm256_and_ps(a, b); }
VF_INLINE vm vm_or(vm a, vm b) { return _mm256_or_ps(a, b); }
VF_INLINE vm vm_not(vm a) { return _mm256_xor_ps(a, _mm256_castsi256_ps(_mm256_set1_epi32(-1))); }
VF_INLINE uint32_t vm_bits(vm m) { return (uint32_t)_mm256_movemask_ps(m); }
VF_INLINE vf vf_select(vm m, vf a, vf b) { return _mm256_blendv_ps(b, a, m); }
VF_INLINE vi vf_bits(vf v) { return _mm256_castps_si256(v); }
VF_INLINE vf vi_floats(vi i) { return _mm256_castsi256_ps(i); }
VF_INLINE vi vi_set1(int32_t n) { return _mm256_set1_epi32(n); }
VF_INLINE vi vi_iota(void) { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
VF_INLINE vi vi_load(const void *p) { return _mm256_loadu_si256(p); }
VF_INLINE void vi_store(void *p, vi i) { _mm256_storeu_si256(p, i); }
VF_INLINE vi vi_add(vi a, vi b) { return _mm256_add_epi32(a, b); }
VF_INLINE vi vi_and(vi a, vi b) { return _mm256_and_si256(a, b); }
VF_INLINE vi vi_or(vi a, vi b) { return _mm256_or_si256(a, b); }
VF_INLINE vi vi_shl(vi a, int n) { return _mm256_slli_epi32(a, n); }
VF_INLINE vi vi_shr(vi a, int n) { return _mm256_srli_epi32(a, n); }
VF_INLINE vf vf_of_int(vi i) { return _mm256_cvtepi32_ps(i); }

VF_INLINE vm vm_of_bits(uint32_t n)
{
	const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);

	return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int)n), lane), lane));
}

VF_INLINE __m256i vf_part_mask(unsigned n)
{
	return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), vi_iota());
}

VF_INLINE vf vf_load_part(const float *p, unsigned n) { return _mm256_maskload_ps(p, vf_part_mask(n)); }
VF_INLINE void vf_store_part(float *p, vf v, unsigned n) { _mm256_maskstore_ps(p, vf_part_mask(n), v); }

VF_INLINE vf vf_load_f16(const void *p) { return _mm256_cvtph_ps(_mm_loadu_si128(p)); }

VF_INLINE void vf_store_f16(void *p, vf v)
{
	_mm_storeu_si128(p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

VF_INLINE vf vf_of_bf16(__m128i h)
{
	return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}

VF_INLINE vf vf_load_bf16(const void *p) { return vf_of_bf16(_mm_loadu_si128(p)); }

VF_INLINE void vf_store_bf16(void *p, vf v)
{
	__m256i b = _mm256_castps_si256(v), high = _mm256_srli_epi32(b, 16);
	__m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
	__m256i round = _mm256_srli_epi32(_mm256_add_epi32(b, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
	__m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));

	round = _mm256_blendv_epi8(round, _mm256_or_si256(high, _mm256_set1_epi32(0x40)), nan);
	_mm_storeu_si128(p, _mm_packus_epi32(_mm256_castsi256_si128(round), _mm256_extracti128_si256(round, 1)));
}

VF_INLINE void vf_transpose(vf *v)
{
	vf a[8], b[8];

	KVT_UNROLL
	for (int i = 0; i < 4; i++) {
		a[2 * i] = _mm256_unpacklo_ps(v[2 * i], v[2 * i + 1]);
		a[2 * i + 1] = _mm256_unpackhi_ps(v[2 * i], v[2 * i + 1]);
	}
	KVT_UNROLL
	for (int i = 0; i < 8; i += 4) {
		b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
		b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
		b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
		b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xee);
	}
	KVT_UNROLL
	for (int i = 0; i < 4; i++) {
		v[i] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
		v[i + 4] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
	}
}

#endif
