/* SPDX-License-Identifier: MIT */
/*
 * Row codecs and the block digest.
 *
 * Conversions are exact upwards and round to nearest even downwards; NaN stays
 * NaN (quieted, top payload bits kept, as F16C and ARM do; widening bf16 is a
 * shift and keeps even a signalling one), overflow is inf. Every instruction
 * set gives the same bits, whatever rounding and denormal modes the caller set.
 *
 * q8_0 and q4_0 are encoded byte for byte as ggml's reference quantisers do,
 * where those are defined. Where they are not: a group with a NaN or an
 * infinity becomes all NaN (scale 0x7e00, codes 0), and a group whose largest
 * element is too small for 1 / scale to be finite becomes zeros. Decoding is exact.
 */
#ifndef KVT_CODEC_CODEC_H
#define KVT_CODEC_CODEC_H

#include <stdint.h>

#include "kvtier.h"

/* Elements that are encoded together: @n below is a multiple of it. 0 for an unknown codec. */
uint32_t kvt_codec_group(uint32_t codec);

/* Bytes of @n elements; 0 for an unknown codec. */
uint64_t kvt_codec_bytes(uint32_t codec, uint64_t n);

/* @n elements of @src_type to @dst_type; they may be equal. Buffers do not overlap; any alignment. */
void kvt_codec_convert(void *dst, uint32_t dst_type, const void *src, uint32_t src_type, uint64_t n);

/*
 * The digest of a block composes from its rows, so that an append costs one
 * row: digest(rows 0..n) = sum over r of kvt_row_digest(r, row) mod 2^64.
 *   kvt_row_digest(r, row) = avalanche(XXH3_64bits(row) + (r + 1) * 0x9E3779B97F4A7C15)
 * avalanche is XXH64's. XXH3: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
 */
uint64_t kvt_row_digest(uint32_t row_index, const void *row, uint32_t row_bytes);

/* Digest of rows [first, first + n), row_bytes apart, the first at @rows. Run-time dispatched. */
uint64_t kvt_rows_digest(uint32_t first, uint32_t n, const void *rows, uint32_t row_bytes);

/* The same of @n equal rows, of which XXH3_64bits() is @hash: no row is read. */
uint64_t kvt_row_hash(const void *row, uint32_t row_bytes);
uint64_t kvt_equal_rows_digest(uint32_t first, uint32_t n, uint64_t hash);

#endif
