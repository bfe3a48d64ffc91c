/* SPDX-License-Identifier: MIT */
/* Inside the engine: the pass on a GPU, as forward.c calls it. */
#ifndef KVT_REF_FORWARD_GPU_H
#define KVT_REF_FORWARD_GPU_H

#include "engines/ref/engine.h"

struct ref_gpu;

/* As ref_engine_create() with @on_gpu. */
int ref_gpu_create(const struct ref_engine_params *params, struct ref_gpu **gpu);
void ref_gpu_free(struct ref_gpu *gpu);

/* ref_forward(), whose arguments have been checked; @first: tokens before these. */
int ref_gpu_forward(struct ref_gpu *gpu, struct kvt_seq *seq, uint32_t first, const uint32_t *tokens, uint32_t n,
		    uint32_t n_logits, const float **logits);

/* Sequences are free for other calls. */
void ref_gpu_rest(struct ref_gpu *gpu);

#endif
