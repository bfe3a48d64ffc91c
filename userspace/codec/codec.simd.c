// SPDX-License-Identifier: MIT
/* Conversions between f32, f16 and bf16, a vector at a time. What they give is said in base/half.h. */
#include "base/simd.h"
#include "codec/codec.h"
#include "codec/internal.h"

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

void KVT_SIMD(kvt_codec_convert)(void *dst, uint32_t dst_type, const void *src, uint32_t src_type, uint64_t n)
{
	static void (*const convert[KVT_CODECS][KVT_CODECS])(uint8_t *, const uint8_t *, uint64_t) = {
		[KVT_F16][KVT_F32] = f16_to_f32,   [KVT_BF16][KVT_F32] = bf16_to_f32,
		[KVT_F32][KVT_F16] = f32_to_f16,   [KVT_F32][KVT_BF16] = f32_to_bf16,
		[KVT_F16][KVT_BF16] = f16_to_bf16, [KVT_BF16][KVT_F16] = bf16_to_f16,
	};

	if (src_type == dst_type)
		memcpy(dst, src, kvt_codec_bytes(src_type, n));
	else
		convert[src_type][dst_type](dst, src, n);
}
