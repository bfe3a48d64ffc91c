// SPDX-License-Identifier: MIT
/* The kernels in plain C: what kernels/ must give, bit for bit, and what runs where there is no GPU. */
#include <errno.h>
#include <string.h>

#include "base/err.h"
#include "codec/codec.h"
#include "gpu/attend.h"
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

#define TWIN(module, function) { #module, #function, 1, module##_##function, { sizeof(struct kvt_##function##_args) } }
#define ATTEND(function, twin) { "attend", #function, 1, kvt_attend_twin_##twin, { sizeof(struct kvt_attend_args) } }

const struct kvt_twin_entry kvt_twins[] = {
	TWIN(block, digest),
	TWIN(block, copy),
	TWIN(block, append),
	ATTEND(decode_f16_64, decode),
	ATTEND(decode_f16_128, decode),
	ATTEND(decode_f16_256, decode),
	ATTEND(decode_f16_512, decode),
	ATTEND(decode_bf16_64, decode),
	ATTEND(decode_bf16_128, decode),
	ATTEND(decode_bf16_256, decode),
	ATTEND(decode_bf16_512, decode),
	ATTEND(merge, merge),
	ATTEND(prefill_f16_64, prefill),
	ATTEND(prefill_f16_128, prefill),
	ATTEND(prefill_bf16_64, prefill),
	ATTEND(prefill_bf16_128, prefill),
	ATTEND(hopper_f16_64, prefill),
	ATTEND(hopper_f16_128, prefill),
	ATTEND(hopper_bf16_64, prefill),
	ATTEND(hopper_bf16_128, prefill),
	{ .module = NULL },
};
