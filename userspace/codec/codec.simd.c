// SPDX-License-Identifier: MIT
/*
 * Conversions, a vector at a time: what f32, f16 and bf16 give is said in
 * base/half.h, q8_0 and q4_0 are in codec/quant.h. Other pairs meet in f32.
 */
#include "base/simd.h"
#include "codec/codec.h"
#include "codec/internal.h"
#include "codec/quant.h"

/* As the halves' are named. */
VF_INLINE vf vf_load_f32(const void *p) { return vf_load(p); }
VF_INLINE void vf_store_f32(void *p, vf v) { vf_store(p, v); }
VF_INLINE vf vf_load_f32_part(const void *p, unsigned int n) { return vf_load_part(p, n); }
VF_INLINE void vf_store_f32_part(void *p, vf v, unsigned int n) { vf_store_part(p, v, n); }

#define CONVERT(from, from_bytes, to, to_bytes)                                                                        \
	static void from##_to_##to(uint8_t *dst, const uint8_t *src, uint64_t n)                                       \
	{                                                                                                              \
		for (; n >= KVT_VW; n -= KVT_VW, src += KVT_VW * from_bytes, dst += KVT_VW * to_bytes)                 \
			vf_store_##to(dst, vf_load_##from(src));                                                       \
		if (n)                                                                                                 \
			vf_store_##to##_part(dst, vf_load_##from##_part(src, n), n);                                   \
	}

CONVERT(f16, 2, f32, 4)
CONVERT(bf16, 2, f32, 4)
CONVERT(f32, 4, f16, 2)
CONVERT(f32, 4, bf16, 2)
CONVERT(f16, 2, bf16, 2)
CONVERT(bf16, 2, f16, 2)

/* Between a quantised type and one that is not f32, through pieces of f32, which are exact. */
static void through_f32(uint8_t *dst, uint32_t dst_type, const uint8_t *src, uint32_t src_type, uint64_t n)
{
	float wide[8 * KVT_GROUP];
	uint64_t part;

	for (; n; n -= part, src += kvt_codec_bytes(src_type, part), dst += kvt_codec_bytes(dst_type, part)) {
		part = n < 8 * KVT_GROUP ? n : 8 * KVT_GROUP;
		KVT_SIMD(kvt_codec_convert)(wide, KVT_F32, src, src_type, part);
		KVT_SIMD(kvt_codec_convert)(dst, dst_type, wide, KVT_F32, part);
	}
}

void KVT_SIMD(kvt_codec_convert)(void *dst, uint32_t dst_type, const void *src, uint32_t src_type, uint64_t n)
{
	static void (*const convert[KVT_CODECS][KVT_CODECS])(uint8_t *, const uint8_t *, uint64_t) = {
		[KVT_F16][KVT_F32] = f16_to_f32,   [KVT_BF16][KVT_F32] = bf16_to_f32,
		[KVT_F32][KVT_F16] = f32_to_f16,   [KVT_F32][KVT_BF16] = f32_to_bf16,
		[KVT_F16][KVT_BF16] = f16_to_bf16, [KVT_BF16][KVT_F16] = bf16_to_f16,
		[KVT_F32][KVT_Q8_0] = f32_to_q8_0, [KVT_Q8_0][KVT_F32] = q8_0_to_f32,
		[KVT_F32][KVT_Q4_0] = f32_to_q4_0, [KVT_Q4_0][KVT_F32] = q4_0_to_f32,
	};

	if (src_type == dst_type)
		memcpy(dst, src, kvt_codec_bytes(src_type, n));
	else if (convert[src_type][dst_type])
		convert[src_type][dst_type](dst, src, n);
	else
		through_f32(dst, dst_type, src, src_type, n);
}
