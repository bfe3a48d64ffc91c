/* SPDX-License-Identifier: MIT */
/* base/simd.h on AVX-512 F, BW, DQ and VL: 16 lanes. */
#ifndef KVT_BASE_SIMD_AVX512_H
#define KVT_BASE_SIMD_AVX512_H

#include <immintrin.h>

#define KVT_VW 16
typedef __m512 vf;
typedef __m512i vi;
typedef __mmask16 vm;

VF_INLINE vf vf_zero(void) { return _mm512_setzero_ps(); }
VF_INLINE vf vf_set1(float f) { return _mm512_set1_ps(f); }
VF_INLINE vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
VF_INLINE void vf_store(float *p, vf v) { _mm512_storeu_ps(p, v); }
VF_INLINE vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
VF_INLINE vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
VF_INLINE vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
VF_INLINE vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
VF_INLINE vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
VF_INLINE vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
VF_INLINE vf vf_abs(vf v) { return _mm512_andnot_ps(_mm512_set1_ps(-0.0f), v); }
VF_INLINE vf vf_sign(vf v) { return _mm512_and_ps(_mm512_set1_ps(-0.0f), v); }
VF_INLINE vf vf_or(vf a, vf b) { return _mm512_or_ps(a, b); }
VF_INLINE vm vf_lt(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
VF_INLINE vm vf_eq(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
VF_INLINE vm vm_and(vm a, vm b) { return a & b; }
VF_INLINE vm vm_or(vm a, vm b) { return a | b; }
VF_INLINE vm vm_not(vm a) { return (vm)~a; }
VF_INLINE uint32_t vm_bits(vm m) { return m; }
VF_INLINE vm vm_of_bits(uint32_t n) { return (vm)n; }
VF_INLINE vf vf_select(vm m, vf a, vf b) { return _mm512_mask_blend_ps(m, b, a); }
VF_INLINE vi vf_bits(vf v) { return _mm512_castps_si512(v); }
VF_INLINE vf vi_floats(vi i) { return _mm512_castsi512_ps(i); }
VF_INLINE vi vi_set1(int32_t n) { return _mm512_set1_epi32(n); }
VF_INLINE vi vi_iota(void) { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
VF_INLINE vi vi_load(const void *p) { return _mm512_loadu_si512(p); }
VF_INLINE void vi_store(void *p, vi i) { _mm512_storeu_si512(p, i); }
VF_INLINE vi vi_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
VF_INLINE vi vi_and(vi a, vi b) { return _mm512_and_si512(a, b); }
VF_INLINE vi vi_or(vi a, vi b) { return _mm512_or_si512(a, b); }
VF_INLINE vi vi_shl(vi a, int n) { return _mm512_slli_epi32(a, (unsigned)n); }
VF_INLINE vi vi_shr(vi a, int n) { return _mm512_srli_epi32(a, (unsigned)n); }
VF_INLINE vf vf_of_int(vi i) { return _mm512_cvtepi32_ps(i); }

VF_INLINE vf vf_load_part(const float *p, unsigned n) { return _mm512_maskz_loadu_ps((vm)((1u << n) - 1), p); }
VF_INLINE void vf_store_part(float *p, vf v, unsigned n) { _mm512_mask_storeu_ps(p, (vm)((1u << n) - 1), v); }

VF_INLINE vf vf_load_f16(const void *p) { return _mm512_cvtph_ps(_mm256_loadu_si256(p)); }

VF_INLINE void vf_store_f16(void *p, vf v)
{
	_mm256_storeu_si256(p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

VF_INLINE vf vf_load_bf16(const void *p)
{
	return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p)), 16));
}

VF_INLINE void vf_store_bf16(void *p, vf v)
{
	__m512i b = _mm512_castps_si512(v), high = _mm512_srli_epi32(b, 16);
	__m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
	__m512i round = _mm512_srli_epi32(_mm512_add_epi32(b, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
	__mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);

	round = _mm512_mask_or_epi32(round, nan, high, _mm512_set1_epi32(0x40));
	_mm256_storeu_si256(p, _mm512_cvtepi32_epi16(round));
}

VF_INLINE void vf_transpose(vf *v)
{
	vf a[16], b[16];

	KVT_UNROLL
	for (int i = 0; i < 16; i += 2) {
		a[i] = _mm512_unpacklo_ps(v[i], v[i + 1]);
		a[i + 1] = _mm512_unpackhi_ps(v[i], v[i + 1]);
	}
	KVT_UNROLL
	for (int i = 0; i < 16; i += 4) { /* b[i + c], 128-bit lane l: rows i..i+3 of column 4l + c */
		b[i] = _mm512_shuffle_ps(a[i], a[i + 2], 0x44);
		b[i + 1] = _mm512_shuffle_ps(a[i], a[i + 2], 0xee);
		b[i + 2] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0x44);
		b[i + 3] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0xee);
	}
	KVT_UNROLL
	for (int c = 0; c < 4; c++) {
		vf even0 = _mm512_shuffle_f32x4(b[c], b[4 + c], 0x88), odd0 = _mm512_shuffle_f32x4(b[c], b[4 + c], 0xdd);
		vf even1 = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0x88);
		vf odd1 = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0xdd);

		v[c] = _mm512_shuffle_f32x4(even0, even1, 0x88);
		v[4 + c] = _mm512_shuffle_f32x4(odd0, odd1, 0x88);
		v[8 + c] = _mm512_shuffle_f32x4(even0, even1, 0xdd);
		v[12 + c] = _mm512_shuffle_f32x4(odd0, odd1, 0xdd);
	}
}

#endif
