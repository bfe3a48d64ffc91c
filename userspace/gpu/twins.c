// SPDX-License-Identifier: MIT
/* The kernels in plain C: what kernels/ must give, bit for bit, and what runs where there is no GPU. */
#include <errno.h>
#include <string.h>

#include "base/err.h"
#include "codec/codec.h"
#include "gpu/attend.h"
#include "gpu/engine.h"
#include "gpu/gpu.h"
#include "gpu/kernels.h"

#define AT(address) ((void *)(uintptr_t)(address))

static int block_digest(struct kvt_dim3 grid, struct kvt_dim3 block, void *const *args)
{
	const struct kvt_digest_args *a = args[0];
	const uint64_t *blocks = AT(a->blocks);
	const uint32_t *rows = AT(a->rows), *first = AT(a->first);
	uint64_t *out = AT(a->out);

	(void)grid, (void)block;
	for (uint32_t i = 0; i < a->n; i++)
		out[i] = kvt_rows_digest(first ? first[i] : 0, rows[i], AT(blocks[i]), a->row_bytes);
	return 0;
}

static int block_verify(struct kvt_dim3 grid, struct kvt_dim3 block, void *const *args)
{
	const struct kvt_verify_args *a = args[0];
	const uint64_t *digests = AT(a->digests), *wanted = AT(a->wanted);
	uint64_t *bad = AT(a->bad);

	(void)grid, (void)block;
	for (uint32_t i = 0; i < a->n; i++)
		*bad += digests[i] != wanted[i];
	return 0;
}

static int block_copy(struct kvt_dim3 grid, struct kvt_dim3 block, void *const *args)
{
	const struct kvt_copy_args *a = args[0];
	const uint64_t *dst = AT(a->dst), *src = AT(a->src);
	const uint32_t *sizes = AT(a->sizes);

	(void)grid, (void)block;
	for (uint32_t i = 0; i < a->n; i++) {
		if (sizes && sizes[i] > a->bytes)
			return kvt_fail(-EINVAL, "copy: item %u has %u bytes, at most %u were said", i, sizes[i],
					a->bytes);
		memcpy(AT(dst[i]), AT(src[i]), sizes ? sizes[i] : a->bytes);
	}
	return 0;
}

static int block_append(struct kvt_dim3 grid, struct kvt_dim3 block, void *const *args)
{
	const struct kvt_append_args *a = args[0];
	uint64_t row_bytes = kvt_codec_bytes(a->dst_type, a->elements);
	const uint64_t *blocks = AT(a->blocks);
	const uint32_t *rows = AT(a->rows);

	(void)grid, (void)block;
	if (a->src_type > KVT_BF16 || a->dst_type > KVT_BF16)
		return kvt_fail(-EINVAL, "append: no codec %u or %u", a->src_type, a->dst_type);
	for (uint32_t i = 0; i < a->n; i++)
		kvt_codec_convert(AT(blocks[i] + rows[i] * row_bytes), a->dst_type, AT(a->src + i * a->src_stride),
				  a->src_type, a->elements);
	return 0;
}

/* The sequence that has token @t. */
static uint32_t seq_of(const uint32_t *tokens, uint32_t n_seqs, uint32_t t)
{
	uint32_t i = 0;

	while (i + 1 < n_seqs && t >= tokens[i + 1])
		i++;
	return i;
}

static int extend_plane(const struct kvt_extend_args *a, const struct kvt_extend_plane *p)
{
	uint32_t row_bytes = (uint32_t)kvt_codec_bytes(p->dst_type, p->elements);
	const uint64_t *blocks = AT(p->blocks);
	uint64_t *sums = AT(p->sums);
	const uint32_t *tokens = AT(a->tokens), *rows = AT(a->rows);

	if (p->src_type > KVT_BF16 || p->dst_type > KVT_BF16)
		return kvt_fail(-EINVAL, "extend: no codec %u or %u", p->src_type, p->dst_type);
	for (uint32_t t = 0; t < tokens[a->n_seqs]; t++) {
		uint32_t i = seq_of(tokens, a->n_seqs, t), position = rows[i] - (tokens[i + 1] - t);
		uint64_t at = (uint64_t)i * a->table_stride + position / p->block_rows;
		uint32_t row = position % p->block_rows;
		void *dst = AT(blocks[at] + (uint64_t)row * row_bytes);

		kvt_codec_convert(dst, p->dst_type, AT(p->src + t * p->src_stride), p->src_type, p->elements);
		sums[at] += kvt_row_digest(row, dst, row_bytes) - kvt_equal_rows_digest(row, 1, p->zeros_hash);
	}
	return 0;
}

static int block_extend(struct kvt_dim3 grid, struct kvt_dim3 block, void *const *args)
{
	const struct kvt_extend_args *a = args[0];
	int ret = 0;

	(void)grid, (void)block;
	for (uint32_t i = 0; i < a->n_planes && !ret; i++)
		ret = extend_plane(a, &a->plane[i]);
	return ret;
}

static int block_set(struct kvt_dim3 grid, struct kvt_dim3 block, void *const *args)
{
	const struct kvt_set_args *a = args[0];
	uint64_t *words = AT(a->words);

	(void)grid, (void)block;
	if (a->n > KVT_SET_MAX)
		return kvt_fail(-EINVAL, "set: %u words; %u at most", a->n, KVT_SET_MAX);
	for (uint32_t i = 0; i < a->n; i++)
		words[a->index[i]] = a->value[i];
	return 0;
}

static int block_advance(struct kvt_dim3 grid, struct kvt_dim3 block, void *const *args)
{
	const struct kvt_advance_args *a = args[0];
	const uint32_t *tokens = AT(a->tokens);
	uint32_t *rows = AT(a->rows);

	(void)grid, (void)block;
	for (uint32_t i = 0; i < a->n_seqs; i++)
		rows[i] += tokens[i + 1] - tokens[i];
	return 0;
}

static int measure_read(struct kvt_dim3 grid, struct kvt_dim3 block, void *const *args)
{
	const struct kvt_read_args *a = args[0];
	const uint64_t *from = AT(a->from);
	uint64_t *out = AT(a->out);

	(void)grid, (void)block;
	for (uint64_t i = 0; i < a->bytes / 16 * 2; i++)
		*out ^= from[i];
	return 0;
}

#define WAITS .waits = true
#define TWIN(module, function, ...) \
	{ #module, #function, 1, module##_##function, .arg_bytes = { sizeof(struct kvt_##function##_args) }, ##__VA_ARGS__ }
#define ENGINE(function, args, ...) \
	{ "engine", #function, 1, kvt_engine_twin_##args, .arg_bytes = { sizeof(struct kvt_##args##_args) }, ##__VA_ARGS__ }
#define ATTEND(function, twin, ...) \
	{ "attend", #function, 1, kvt_attend_twin_##twin, .arg_bytes = { sizeof(struct kvt_attend_args) }, ##__VA_ARGS__ }

const struct kvt_twin_entry kvt_twins[] = {
	TWIN(block, digest),
	TWIN(block, verify),
	TWIN(block, copy),
	TWIN(block, append, WAITS),
	TWIN(block, extend, WAITS),
	TWIN(block, set),
	TWIN(block, advance),
	TWIN(measure, read),
	ENGINE(embed, embed),
	ENGINE(gemm_row, gemm, WAITS),
	ENGINE(gemm_tile, gemm),
	ENGINE(rope, rope, WAITS),
	ATTEND(decode_f16_64, decode, WAITS),
	ATTEND(decode_f16_128, decode, WAITS),
	ATTEND(decode_f16_256, decode, WAITS),
	ATTEND(decode_f16_512, decode, WAITS),
	ATTEND(decode_bf16_64, decode, WAITS),
	ATTEND(decode_bf16_128, decode, WAITS),
	ATTEND(decode_bf16_256, decode, WAITS),
	ATTEND(decode_bf16_512, decode, WAITS),
	ATTEND(wide_f16_64, decode, WAITS),
	ATTEND(wide_f16_128, decode, WAITS),
	ATTEND(wide_bf16_64, decode, WAITS),
	ATTEND(wide_bf16_128, decode, WAITS),
	ATTEND(small_f16, decode, WAITS),
	ATTEND(small_bf16, decode, WAITS),
	ATTEND(merge, merge, WAITS),
	ATTEND(prefill_f16_64, prefill),
	ATTEND(prefill_f16_128, prefill),
	ATTEND(prefill_bf16_64, prefill),
	ATTEND(prefill_bf16_128, prefill),
	ATTEND(hopper_f16_64, prefill),
	ATTEND(hopper_f16_128, prefill),
	ATTEND(hopper_bf16_64, prefill),
	ATTEND(hopper_bf16_128, prefill),
	ATTEND(fast_f16_64, fast),
	ATTEND(fast_f16_128, fast),
	ATTEND(fast_bf16_64, fast),
	ATTEND(fast_bf16_128, fast),
	{ .module = NULL },
};
