/* SPDX-License-Identifier: MIT */
/* How the reference engine's kernels (kernels.h) are launched, and their twins. */
#ifndef KVT_GPU_ENGINE_H
#define KVT_GPU_ENGINE_H

#include "gpu/gpu.h"
#include "gpu/kernels.h"

struct kvt_engine_step {
	const char *function;
	struct kvt_dim3 grid, block;
};

/* A product: the kernel and its grid. Either kernel gives the same bits. */
struct kvt_engine_step kvt_engine_gemm(const struct kvt_gemm_args *a);
struct kvt_engine_step kvt_engine_embed(const struct kvt_embed_args *a);
struct kvt_engine_step kvt_engine_rope(const struct kvt_rope_args *a);

/* engine_twin.c */
int kvt_engine_twin_embed(struct kvt_dim3 grid, struct kvt_dim3 block, void *const *args);
int kvt_engine_twin_gemm(struct kvt_dim3 grid, struct kvt_dim3 block, void *const *args);
int kvt_engine_twin_rope(struct kvt_dim3 grid, struct kvt_dim3 block, void *const *args);

#endif
