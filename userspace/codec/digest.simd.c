// SPDX-License-Identifier: MIT
/*
 * The digest of a run of rows: XXH3 of each row, tied to its index, summed.
 * xxHash picks its vector code by the compiler's target, so this file is
 * compiled once for each instruction set.
 */
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/simd.h"
#include "codec/internal.h"

uint64_t KVT_SIMD(kvt_rows_digest)(uint32_t first, uint32_t n, const void *rows, uint32_t row_bytes)
{
	const uint8_t *row = rows;
	uint64_t sum = 0, at = first;

	for (; n; n--, row += row_bytes)
		sum += kvt_digest_mix(XXH3_64bits(row, row_bytes), ++at);
	return sum;
}
