/* SPDX-License-Identifier: MIT */
/* base/simd.h on AArch64 Advanced SIMD: 4 lanes. */
#ifndef KVT_BASE_SIMD_NEON_H
#define KVT_BASE_SIMD_NEON_H

#include <arm_neon.h>

#define KVT_VW 4
typedef float32x4_t vf;
typedef int32x4_t vi;
typedef uint32x4_t vm;

VF_INLINE vf vf_zero(void) { return vdupq_n_f32(0); }
VF_INLINE vf vf_set1(float f) { return vdupq_n_f32(f); }
VF_INLINE vf vf_load(const float *p) { return vld1q_f32(p); }
VF_INLINE void vf_store(float *p, vf v) { vst1q_f32(p, v); }
VF_INLINE vf vf_add(vf a, vf b) { return vaddq_f32(a, b); }
VF_INLINE vf vf_sub(vf a, vf b) { return vsubq_f32(a, b); }
VF_INLINE vf vf_mul(vf a, vf b) { return vmulq_f32(a, b); }
VF_INLINE vf vf_div(vf a, vf b) { return vdivq_f32(a, b); }
VF_INLINE vf vf_max(vf a, vf b) { return vmaxq_f32(a, b); }
VF_INLINE vf vf_fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
VF_INLINE vi vf_bits(vf v) { return vreinterpretq_s32_f32(v); }
VF_INLINE vf vi_floats(vi i) { return vreinterpretq_f32_s32(i); }
VF_INLINE vi vi_set1(int32_t n) { return vdupq_n_s32(n); }
VF_INLINE vi vi_load(const void *p) { return vld1q_s32(p); }
VF_INLINE void vi_store(void *p, vi i) { vst1q_s32(p, i); }
VF_INLINE vi vi_add(vi a, vi b) { return vaddq_s32(a, b); }
VF_INLINE vi vi_and(vi a, vi b) { return vandq_s32(a, b); }
VF_INLINE vi vi_or(vi a, vi b) { return vorrq_s32(a, b); }
VF_INLINE vi vi_shl(vi a, int n) { return vshlq_s32(a, vdupq_n_s32(n)); }
VF_INLINE vi vi_shr(vi a, int n)
{
	return vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(a), vdupq_n_s32(-n)));
}
VF_INLINE vf vf_of_int(vi i) { return vcvtq_f32_s32(i); }
VF_INLINE vf vf_abs(vf v) { return vabsq_f32(v); }
VF_INLINE vf vf_sign(vf v) { return vi_floats(vi_and(vf_bits(v), vi_set1(INT32_MIN))); }
VF_INLINE vf vf_or(vf a, vf b) { return vi_floats(vi_or(vf_bits(a), vf_bits(b))); }
VF_INLINE vm vf_lt(vf a, vf b) { return vcltq_f32(a, b); }
VF_INLINE vm vf_eq(vf a, vf b) { return vceqq_f32(a, b); }
VF_INLINE vm vm_and(vm a, vm b) { return vandq_u32(a, b); }
VF_INLINE vm vm_or(vm a, vm b) { return vorrq_u32(a, b); }
VF_INLINE vm vm_not(vm a) { return vmvnq_u32(a); }
VF_INLINE vf vf_select(vm m, vf a, vf b) { return vbslq_f32(m, a, b); }

VF_INLINE vi vi_iota(void)
{
	static const int32_t lane[4] = { 0, 1, 2, 3 };

	return vld1q_s32(lane);
}

VF_INLINE uint32x4_t vm_lane_bit(void)
{
	static const uint32_t bit[4] = { 1, 2, 4, 8 };

	return vld1q_u32(bit);
}

VF_INLINE uint32_t vm_bits(vm m) { return vaddvq_u32(vandq_u32(m, vm_lane_bit())); }
VF_INLINE vm vm_of_bits(uint32_t n) { return vtstq_u32(vdupq_n_u32(n), vm_lane_bit()); }

VF_INLINE vf vf_load_part(const float *p, unsigned n)
{
	float f[4] = { 0 };

	memcpy(f, p, n * sizeof(*f));
	return vld1q_f32(f);
}

VF_INLINE void vf_store_part(float *p, vf v, unsigned n)
{
	float f[4];

	vst1q_f32(f, v);
	memcpy(p, f, n * sizeof(*f));
}

VF_INLINE vf vf_load_f16(const void *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
VF_INLINE void vf_store_f16(void *p, vf v) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(v))); }
VF_INLINE vf vf_load_bf16(const void *p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }

VF_INLINE void vf_store_bf16(void *p, vf v)
{
	uint32x4_t b = vreinterpretq_u32_f32(v), high = vshrq_n_u32(b, 16);
	uint32x4_t odd = vandq_u32(high, vdupq_n_u32(1));
	uint32x4_t round = vshrq_n_u32(vaddq_u32(b, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16);

	round = vbslq_u32(vceqq_f32(v, v), round, vorrq_u32(high, vdupq_n_u32(0x40)));
	vst1_u16(p, vmovn_u32(round));
}

VF_INLINE void vf_transpose(vf *v)
{
	float32x4x2_t a = vtrnq_f32(v[0], v[1]), b = vtrnq_f32(v[2], v[3]);

	v[0] = vcombine_f32(vget_low_f32(a.val[0]), vget_low_f32(b.val[0]));
	v[1] = vcombine_f32(vget_low_f32(a.val[1]), vget_low_f32(b.val[1]));
	v[2] = vcombine_f32(vget_high_f32(a.val[0]), vget_high_f32(b.val[0]));
	v[3] = vcombine_f32(vget_high_f32(a.val[1]), vget_high_f32(b.val[1]));
}

#endif
