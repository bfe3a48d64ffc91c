/* SPDX-License-Identifier: MIT */
/*
 * How attention is launched on a GPU: which kernels, on what grids. Few query
 * rows are divided over the splits of their KV: each split leaves a part in
 * scratch, and "merge" joins them ("decode"; "wide", which reads several KV
 * heads at once, where there is much and nothing is added to scores; "small",
 * whose last block merges itself, where there is little). Many are divided
 * among thread blocks, each of which goes through all splits ("prefill";
 * "hopper" on sm_90, likewise). All give the same bits for a row. Family fast is
 * one kernel for any number of rows, with bits of its own.
 *
 *	struct kvt_attend_args a = { ... };
 *	struct kvt_attend_recipe r;
 *
 *	kvt_attend_recipe(&device, &limits, &a, &r);	sets a.part_rows
 *	a.parts = scratch;				r.scratch_bytes, if any; its first
 *							KVT_ATTEND_COUNTERS words are 0
 *	for (i = 0; i < r.n; i++) {
 *		kernel(gpu, "attend", r.step[i].function, &k);
 *		launch_early(gpu, k, r.step[i].grid, r.step[i].block, r.step[i].shared_bytes, stream, args, 1);
 *	}
 *
 * Steps are ordered on one stream, with nothing between them. A recipe serves every call within its
 * limits: the arrays that its arguments point to may change, also in a graph.
 * Launches that may run at the same time need scratch of their own. They leave
 * its counters at 0, whatever recipe is next.
 */
#ifndef KVT_GPU_ATTEND_H
#define KVT_GPU_ATTEND_H

#include "gpu/gpu.h"
#include "gpu/kernels.h"

struct kvt_attend_device {
	uint32_t sm; /* compute capability: 90 for 9.0. 0: twins */
	uint32_t processors;
	uint32_t shared_max; /* bytes of shared memory that a thread block may have, opted in */
};

/* The most that the arrays in device memory will say. */
struct kvt_attend_limits {
	uint32_t tokens;     /* query tokens of all sequences together */
	uint32_t seq_tokens; /* of one sequence */
	uint64_t rows;	     /* KV rows of all sequences together */
};

enum kvt_attend_path {
	KVT_ATTEND_AUTO,
	KVT_ATTEND_DECODE,
	KVT_ATTEND_WIDE,
	KVT_ATTEND_SMALL,
	KVT_ATTEND_PREFILL,
	KVT_ATTEND_HOPPER,
	KVT_ATTEND_PATHS
};

struct kvt_attend_step {
	const char *function;
	struct kvt_dim3 grid, block;
	uint32_t shared_bytes;
};

struct kvt_attend_recipe {
	uint32_t n;
	struct kvt_attend_step step[2];
	uint64_t scratch_bytes;
};

/*
 * -EINVAL: arguments out of range (named), or more than the device's shared memory.
 * -EOPNOTSUPP: family fast has no kernel for this device or these arguments.
 */
int kvt_attend_recipe(const struct kvt_attend_device *, const struct kvt_attend_limits *, struct kvt_attend_args *,
		      struct kvt_attend_recipe *);

/* The same by a path of the caller's choice, for tests: the bits do not depend on it. Family fast has one path. */
int kvt_attend_recipe_path(const struct kvt_attend_device *, const struct kvt_attend_limits *, enum kvt_attend_path,
			   struct kvt_attend_args *, struct kvt_attend_recipe *);

/*
 * Blocks in [slab, slab + bytes), device memory, may from now on be copied by the copy engine of sm_90, where @args
 * are of family fast and their rows lie as it needs. Bits are the same; blocks elsewhere are copied otherwise.
 * 0 bytes, or a device that has no such engine: none is.
 */
int kvt_attend_slab(struct kvt_gpu *, kvt_dptr slab, uint64_t bytes, struct kvt_attend_args *args);

/* Parts that args->parts must have room for. */
uint64_t kvt_attend_part_bytes(const struct kvt_attend_args *);

/* The twins (attend_twin.c). */
int kvt_attend_twin_decode(struct kvt_dim3 grid, struct kvt_dim3 block, void *const *args);
int kvt_attend_twin_merge(struct kvt_dim3 grid, struct kvt_dim3 block, void *const *args);
int kvt_attend_twin_prefill(struct kvt_dim3 grid, struct kvt_dim3 block, void *const *args);
int kvt_attend_twin_fast(struct kvt_dim3 grid, struct kvt_dim3 block, void *const *args);

#endif
