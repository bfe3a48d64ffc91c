/* SPDX-License-Identifier: MIT */
/* base/simd.h in plain C with the compiler's vectors: 4 lanes. Slow where fmaf() is a call; the bits are the point. */
#ifndef KVT_BASE_SIMD_PORTABLE_H
#define KVT_BASE_SIMD_PORTABLE_H

#include <math.h>

#define KVT_VW 4
typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));
typedef int32_t vm __attribute__((vector_size(16)));

VF_INLINE vf vf_set1(float f) { return (vf){ f, f, f, f }; }
VF_INLINE vf vf_zero(void) { return vf_set1(0); }
VF_INLINE vf vf_add(vf a, vf b) { return a + b; }
VF_INLINE vf vf_sub(vf a, vf b) { return a - b; }
VF_INLINE vf vf_mul(vf a, vf b) { return a * b; }
VF_INLINE vf vf_div(vf a, vf b) { return a / b; }
VF_INLINE vi vf_bits(vf v) { return (vi)v; }
VF_INLINE vf vi_floats(vi i) { return (vf)i; }
VF_INLINE vi vi_set1(int32_t n) { return (vi){ n, n, n, n }; }
VF_INLINE vi vi_iota(void) { return (vi){ 0, 1, 2, 3 }; }
VF_INLINE vi vi_and(vi a, vi b) { return a & b; }
VF_INLINE vi vi_or(vi a, vi b) { return a | b; }
VF_INLINE vf vf_or(vf a, vf b) { return (vf)((vi)a | (vi)b); }
VF_INLINE vf vf_abs(vf v) { return (vf)((vi)v & INT32_MAX); }
VF_INLINE vf vf_sign(vf v) { return (vf)((vi)v & INT32_MIN); }
VF_INLINE vm vf_lt(vf a, vf b) { return a < b; }
VF_INLINE vm vf_eq(vf a, vf b) { return a == b; }
VF_INLINE vm vm_and(vm a, vm b) { return a & b; }
VF_INLINE vm vm_or(vm a, vm b) { return a | b; }
VF_INLINE vm vm_not(vm a) { return ~a; }
VF_INLINE uint32_t vm_bits(vm m) { return (m[0] & 1) | (m[1] & 2) | (m[2] & 4) | (m[3] & 8); }
VF_INLINE vm vm_of_bits(uint32_t n) { return (vi_set1((int32_t)n) & (vi){ 1, 2, 4, 8 }) != 0; }
VF_INLINE vf vf_select(vm m, vf a, vf b) { return (vf)((m & (vi)a) | (~m & (vi)b)); }
VF_INLINE vf vf_max(vf a, vf b) { return vf_select(a > b, a, b); }
VF_INLINE vf vf_of_int(vi i) { return __builtin_convertvector(i, vf); }

VF_INLINE vf vf_fma(vf a, vf b, vf c)
{
	return (vf){ fmaf(a[0], b[0], c[0]), fmaf(a[1], b[1], c[1]), fmaf(a[2], b[2], c[2]), fmaf(a[3], b[3], c[3]) };
}

/* Integers wrap, as in the vector units. */
typedef uint32_t vu_ __attribute__((vector_size(16)));
VF_INLINE vi vi_add(vi a, vi b) { return (vi)((vu_)a + (vu_)b); }
VF_INLINE vi vi_shl(vi a, int n) { return (vi)((vu_)a << n); }
VF_INLINE vi vi_shr(vi a, int n) { return (vi)((vu_)a >> n); }

VF_INLINE vf vf_load_part(const float *p, unsigned n)
{
	vf v = vf_zero();

	memcpy(&v, p, n * sizeof(*p));
	return v;
}

VF_INLINE void vf_store_part(float *p, vf v, unsigned n) { memcpy(p, &v, n * sizeof(*p)); }
VF_INLINE vf vf_load(const float *p) { return vf_load_part(p, KVT_VW); }
VF_INLINE void vf_store(float *p, vf v) { vf_store_part(p, v, KVT_VW); }

VF_INLINE vi vi_load(const void *p)
{
	vi i;

	memcpy(&i, p, sizeof(i));
	return i;
}

VF_INLINE void vi_store(void *p, vi i) { memcpy(p, &i, sizeof(i)); }

VF_INLINE vf vf_load_f16(const void *p)
{
	uint16_t h[4];

	memcpy(h, p, sizeof(h));
	return (vf)(vu_){ kvt_f16_widen(h[0]), kvt_f16_widen(h[1]), kvt_f16_widen(h[2]), kvt_f16_widen(h[3]) };
}

VF_INLINE vf vf_load_bf16(const void *p)
{
	uint16_t h[4];

	memcpy(h, p, sizeof(h));
	return (vf)(vu_){ kvt_bf16_widen(h[0]), kvt_bf16_widen(h[1]), kvt_bf16_widen(h[2]), kvt_bf16_widen(h[3]) };
}

VF_INLINE void vf_store_f16(void *p, vf v)
{
	uint16_t h[4];

	for (int i = 0; i < 4; i++)
		h[i] = kvt_f16_narrow(((vu_)v)[i]);
	memcpy(p, h, sizeof(h));
}

VF_INLINE void vf_store_bf16(void *p, vf v)
{
	uint16_t h[4];

	for (int i = 0; i < 4; i++)
		h[i] = kvt_bf16_narrow(((vu_)v)[i]);
	memcpy(p, h, sizeof(h));
}

VF_INLINE void vf_transpose(vf *v)
{
	vf t[4];

	for (int i = 0; i < 4; i++)
		t[i] = (vf){ v[0][i], v[1][i], v[2][i], v[3][i] };
	memcpy(v, t, sizeof(t));
}

#endif
