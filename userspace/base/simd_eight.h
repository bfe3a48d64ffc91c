/* SPDX-License-Identifier: MIT */
/*
 * Eight floats, on every instruction set: v8, for sums that are defined as eight
 * partial sums. Where vectors are shorter it is two of them, where they are
 * longer it is half of one. Included by base/simd.h.
 */
#ifndef KVT_BASE_SIMD_EIGHT_H
#define KVT_BASE_SIMD_EIGHT_H

#if KVT_VW >= 8

typedef __m256 v8;

VF_INLINE v8 v8_zero(void) { return _mm256_setzero_ps(); }
VF_INLINE v8 v8_load(const float *p) { return _mm256_loadu_ps(p); }
VF_INLINE v8 v8_load_f16(const void *p) { return _mm256_cvtph_ps(_mm_loadu_si128(p)); }
VF_INLINE v8 v8_fma(v8 a, v8 b, v8 c) { return _mm256_fmadd_ps(a, b, c); }

/* For several uses: compilers would rather load it again for each. */
VF_INLINE v8 v8_load_once(const float *p)
{
	v8 v = v8_load(p);

	__asm__("" : "+x"(v));
	return v;
}

VF_INLINE v8 v8_load_bf16(const void *p)
{
	return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(p)), 16));
}

VF_INLINE v8 v8_add(v8 a, v8 b) { return _mm256_add_ps(a, b); }
VF_INLINE v8 v8_max(v8 a, v8 b) { return _mm256_max_ps(a, b); }

/* Lanes i and i + 4 of a, then those of b. */
#define V8_FOLD_PAIR(op, a, b) op(_mm256_blend_ps(a, b, 0xf0), _mm256_permute2f128_ps(a, b, 0x21))

#define V8_FOLD(name, op)                                                                               \
	VF_INLINE v8 name##_pair(v8 a, v8 b) { return V8_FOLD_PAIR(op, a, b); }                         \
	VF_INLINE void name##_pairs(float *out, const v8 *a)                                            \
	{                                                                                               \
		v8 b[2];                                                                                \
	\
		KVT_UNROLL                                                                              \
		for (int i = 0; i < 2; i++)                                                             \
			b[i] = op(_mm256_blend_ps(a[2 * i], a[2 * i + 1], 0xcc),                        \
				  _mm256_shuffle_ps(a[2 * i], a[2 * i + 1], 0x4e));                     \
		_mm256_storeu_ps(out, op(_mm256_shuffle_ps(b[0], b[1], 0x88), _mm256_shuffle_ps(b[0], b[1], 0xdd))); \
	}

#else

typedef struct {
	vf low, high;
} v8;

VF_INLINE v8 v8_zero(void) { return (v8){ vf_zero(), vf_zero() }; }
VF_INLINE v8 v8_load(const float *p) { return (v8){ vf_load(p), vf_load(p + 4) }; }
VF_INLINE v8 v8_load_f16(const void *p) { return (v8){ vf_load_f16(p), vf_load_f16((const uint16_t *)p + 4) }; }
VF_INLINE v8 v8_load_bf16(const void *p) { return (v8){ vf_load_bf16(p), vf_load_bf16((const uint16_t *)p + 4) }; }
VF_INLINE v8 v8_fma(v8 a, v8 b, v8 c) { return (v8){ vf_fma(a.low, b.low, c.low), vf_fma(a.high, b.high, c.high) }; }

VF_INLINE v8 v8_load_once(const float *p) { return v8_load(p); }
VF_INLINE v8 v8_add(v8 a, v8 b) { return (v8){ vf_add(a.low, b.low), vf_add(a.high, b.high) }; }
VF_INLINE v8 v8_max(v8 a, v8 b) { return (v8){ vf_max(a.low, b.low), vf_max(a.high, b.high) }; }

#define V8_HALF_v8_add vf_add
#define V8_HALF_v8_max vf_max
#define V8_FOLD(name, op)                                                              \
	VF_INLINE v8 name##_pair(v8 a, v8 b)                                           \
	{                                                                              \
		return (v8){ V8_HALF_##op(a.low, a.high), V8_HALF_##op(b.low, b.high) }; \
	}                                                                              \
	VF_INLINE void name##_pairs(float *out, const v8 *v)                           \
	{                                                                              \
		for (int half = 0; half < 2; half++) {                                 \
			vf a[4];                                                       \
	\
			KVT_UNROLL                                                     \
			for (int i = 0; i < 4; i++)                                    \
				a[i] = half ? v[i].high : v[i].low;                    \
			vf_transpose(a);                                               \
			vf_store(out + half * 4, V8_HALF_##op(V8_HALF_##op(a[0], a[2]), V8_HALF_##op(a[1], a[3]))); \
		}                                                                      \
	}

#endif

/*
 * The sum, or the largest, of the lanes of eight v8, folded 4, 2, 1: first v[i] with v[i + 4], by name##_pair(), for i < 4;
 * then out[] from these four by name##_pairs().
 */
V8_FOLD(v8_fold, v8_add)
V8_FOLD(v8_fold_max, v8_max)

#endif
