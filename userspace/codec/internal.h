/* SPDX-License-Identifier: MIT */
/* The variants of codec.h's functions, one for each instruction set; for the dispatcher and for tests. */
#ifndef KVT_CODEC_INTERNAL_H
#define KVT_CODEC_INTERNAL_H

#include <stdint.h>

#include "base/cpu.h"

#define KVT_GROUP 32 /* elements that share a scale */

/* In q8_0's and q4_0's conversions denormals are kept and rounding is to nearest: the caller's to see to. */
typedef void kvt_codec_convert_fn(void *dst, uint32_t dst_type, const void *src, uint32_t src_type, uint64_t n);
typedef uint64_t kvt_rows_digest_fn(uint32_t first, uint32_t n, const void *rows, uint32_t row_bytes);

KVT_ISA_DECLARE(extern kvt_codec_convert_fn, kvt_codec_convert);
KVT_ISA_DECLARE(extern kvt_rows_digest_fn, kvt_rows_digest);

/* A row's share of its block's digest. @at: one more than its index. */
static inline uint64_t kvt_digest_mix(uint64_t hash, uint64_t at)
{
	uint64_t h = hash + at * 0x9E3779B97F4A7C15ull;

	h ^= h >> 33;
	h *= 0xC2B2AE3D27D4EB4Full;
	h ^= h >> 29;
	h *= 0x165667B19E3779F9ull;
	return h ^ h >> 32;
}

/* By enum kvt_isa; NULL where this build has none. */
extern kvt_codec_convert_fn *const kvt_codec_converts[KVT_ISAS];
extern kvt_rows_digest_fn *const kvt_rows_digests[KVT_ISAS];

#endif
