/* SPDX-License-Identifier: MIT */
/*
 * Attention on a GPU backend: against float64, and against itself by bytes. The
 * same checks run the kernels (tests/gpu) and their twins (tests/unit).
 */
#ifndef KVT_TESTS_GPU_ATTEND_H
#define KVT_TESTS_GPU_ATTEND_H

#include "gpu/gpu.h"

/* Print what failed. Returns how many did. @for_gpu: sizes for a GPU; else for its twins. */
int gpu_attend_check(struct kvt_gpu *, uint64_t seed, bool for_gpu);

/* The same for family fast. */
int gpu_attend_check_fast(struct kvt_gpu *, uint64_t seed, bool for_gpu);

/* Changes of what must not matter little: each must change bytes. Returns how many went unseen. */
int gpu_attend_check_mutations(struct kvt_gpu *, uint64_t seed);

/* Print how fast it is; with @only, the works whose name has it. */
void gpu_attend_time(struct kvt_gpu *, const char *only);

#endif
