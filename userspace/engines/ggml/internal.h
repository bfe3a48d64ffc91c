/* SPDX-License-Identifier: MIT */
/* What buffer.c and the operations share: KV tensors, their cache, and rows of either kind of memory. */
#ifndef KVT_ENGINES_GGML_INTERNAL_H
#define KVT_ENGINES_GGML_INTERNAL_H

#include "engines/ggml/plugin.h"

/* A cache and the buffers that share it. */
struct kg_cache {
	struct kvt_cache *cache;
	uint32_t buffers;
	bool failed; /* bytes were lost: operations are refused until a buffer is cleared */
	uint8_t *scratch; /* of operations; grows, and is used by one at a time */
	uint64_t scratch_bytes;
	uint64_t attention_calls;
};

struct kg_buffer {
	uint8_t *base;
	uint64_t bytes, mapped;
	struct kg_tensor *tensors;
	struct kg_cache *cache; /* NULL: not yet */
	struct kg_buffer *next; /* of all buffers */
	bool ready;		/* all its tensors are there */
};

struct kg_tensor {
	struct kg_buffer *buffer;
	struct kg_tensor *next;
	char name[64];
	uint32_t codec;
	uint64_t elements, rows, planes; /* of a row; of a plane; of the tensor */
	uint64_t row_bytes, bytes;
	uint32_t first_plane;
	uint32_t heads, query_heads; /* 0: unknown */
};

/* The tensor's cache, created if need be; NULL: a message says why. */
struct kg_cache *kg_open(struct kg_tensor *tensor);

/* @bytes of scratch; NULL: no memory. */
void *kg_scratch(struct kg_cache *cache, uint64_t bytes);

/* Rows [first, first + n) of all planes in order, decoded, @elements apart. */
int kg_rows_read(struct kg_tensor *tensor, uint64_t first, uint32_t n, float *data);
int kg_rows_write(struct kg_tensor *tensor, uint64_t first, uint32_t n, const float *data);

/* Row and byte within it of a view's element (0, i1, i2, i3). */
static inline uint64_t kg_at(const struct kg_view *v, int64_t i1, int64_t i2, int64_t i3)
{
	return v->at + (uint64_t)i1 * v->nb[1] + (uint64_t)i2 * v->nb[2] + (uint64_t)i3 * v->nb[3];
}

#endif
