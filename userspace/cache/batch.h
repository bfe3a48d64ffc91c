/* SPDX-License-Identifier: MIT */
/* A batch inside: what an engine in this tree that launches kernels of its own needs to know of it. */
#ifndef KVT_CACHE_BATCH_H
#define KVT_CACHE_BATCH_H

#include "cache/cache.h"

/* The stream that everything of the batch is put on, and its backend. */
kvt_stream kvt_batch_stream(const struct kvt_batch *batch);
struct kvt_gpu *kvt_batch_gpu(const struct kvt_batch *batch);

/* Device arrays as kernels take them: tokens [n + 1] u32, rows [n] u32 (gpu/kernels.h). */
kvt_dptr kvt_batch_tokens(const struct kvt_batch *batch);
kvt_dptr kvt_batch_rows(const struct kvt_batch *batch);

/*
 * The gpu_scratch_bytes that a batch of a cache of @params takes, whose planes
 * are all alike, with attention of @n_heads query heads; block_bytes and what the
 * batch has at most are not 0. -EINVAL: the GPU has no such attention, and why.
 */
int64_t kvt_batch_scratch(const struct kvt_cache_params *params, const struct kvt_batch_params *batch, uint32_t n_heads);

#endif
