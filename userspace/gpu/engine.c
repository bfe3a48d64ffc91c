// SPDX-License-Identifier: MIT
/* On what grids the reference engine's kernels are launched. */
#include "gpu/engine.h"

#define ROWS_FEW 8 /* to which a block for each panel of each row takes less time than tiles do */
#define TILE_ROWS 64 /* kernels/engine.cu */
#define TILE_THREADS 128
#define THREADS 256

static struct kvt_dim3 grid_of(uint64_t blocks)
{
	return (struct kvt_dim3){ blocks < 1 ? 1 : blocks < INT32_MAX ? (uint32_t)blocks : INT32_MAX, 1, 1 };
}

struct kvt_engine_step kvt_engine_gemm(const struct kvt_gemm_args *a)
{
	const uint64_t panels = ((uint64_t)a->n + KVT_PANEL - 1) / KVT_PANEL;

	if (a->rows <= ROWS_FEW)
		return (struct kvt_engine_step){ "gemm_row", grid_of(panels * a->rows), { THREADS, 1, 1 } };
	return (struct kvt_engine_step){ "gemm_tile", grid_of(panels * (((uint64_t)a->rows + TILE_ROWS - 1) / TILE_ROWS)),
					 { TILE_THREADS, 1, 1 } };
}

struct kvt_engine_step kvt_engine_embed(const struct kvt_embed_args *a)
{
	return (struct kvt_engine_step){ "embed", grid_of(((uint64_t)a->n * a->k + THREADS - 1) / THREADS), { THREADS, 1, 1 } };
}

struct kvt_engine_step kvt_engine_rope(const struct kvt_rope_args *a)
{
	const uint64_t pairs = (uint64_t)a->n * (a->heads + a->kv_heads) * (a->dim / 2);

	return (struct kvt_engine_step){ "rope", grid_of((pairs + THREADS - 1) / THREADS), { THREADS, 1, 1 } };
}
