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

/* By enum kvt_isa; NULL where this build has none. */
extern kvt_codec_convert_fn *const kvt_codec_converts[KVT_ISAS];
extern kvt_rows_digest_fn *const kvt_rows_digests[KVT_ISAS];

#endif
