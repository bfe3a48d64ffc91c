// SPDX-License-Identifier: MIT
/* Sizes, and which variant of the conversions and of the digest this machine runs. */
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "codec/codec.h"

#include "base/fpenv.h"
#include "codec/internal.h"

kvt_codec_convert_fn *const kvt_codec_converts[KVT_ISAS] = KVT_ISA_TABLE(kvt_codec_convert);
kvt_rows_digest_fn *const kvt_rows_digests[KVT_ISAS] = KVT_ISA_TABLE(kvt_rows_digest);

static kvt_codec_convert_fn *convert;
static kvt_rows_digest_fn *digest;

__attribute__((constructor)) static void choose(void)
{
	convert = kvt_codec_converts[kvt_isa_best()];
	digest = kvt_rows_digests[kvt_isa_best()];
}

uint32_t kvt_codec_group(uint32_t codec)
{
	static const uint8_t group[KVT_CODECS] = { 1, 1, 1, KVT_GROUP, KVT_GROUP };

	return codec < KVT_CODECS ? group[codec] : 0;
}

uint64_t kvt_codec_bytes(uint32_t codec, uint64_t n)
{
	static const uint8_t bytes[KVT_CODECS] = { 4, 2, 2, 34, 18 };

	return codec < KVT_CODECS ? n / kvt_codec_group(codec) * bytes[codec] : 0;
}

void kvt_codec_convert(void *dst, uint32_t dst_type, const void *src, uint32_t src_type, uint64_t n)
{
	kvt_fpenv_t env;

	if (dst_type == src_type || (kvt_codec_group(dst_type) == 1 && kvt_codec_group(src_type) == 1)) {
		convert(dst, dst_type, src, src_type, n);
		return;
	}
	env = kvt_fpenv_enter(); /* quantising computes */
	convert(dst, dst_type, src, src_type, n);
	kvt_fpenv_leave(env);
}

uint64_t kvt_rows_digest(uint32_t first, uint32_t n, const void *rows, uint32_t row_bytes)
{
	return digest(first, n, rows, row_bytes);
}

uint64_t kvt_row_digest(uint32_t row_index, const void *row, uint32_t row_bytes)
{
	return digest(row_index, 1, row, row_bytes);
}

uint64_t kvt_row_hash(const void *row, uint32_t row_bytes)
{
	return XXH3_64bits(row, row_bytes);
}

uint64_t kvt_equal_rows_digest(uint32_t first, uint32_t n, uint64_t hash)
{
	uint64_t sum = 0, at = first;

	for (; n; n--)
		sum += kvt_digest_mix(hash, ++at);
	return sum;
}
