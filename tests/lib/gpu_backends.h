/* SPDX-License-Identifier: MIT */
/* The GPU backends that a test goes through, one after the other. */
#ifndef KVT_TEST_GPU_BACKENDS_H
#define KVT_TEST_GPU_BACKENDS_H

#include <stdbool.h>

#include "gpu/gpu.h"

/* The late mock does nothing before it must, and in another order. */
enum gpu_backend { GPU_CPU, GPU_MOCK, GPU_LATE_MOCK, GPU_CUDA };

/*
 * That GPU opens, or fails with more than -ENODEV, which is the cases' to find; says which one it is, or why there is none.
 * Asked in a child: CUDA does not survive the fork() that comes before each case.
 */
bool gpu_is_there(uint32_t device);

/* How many of the above there are here: all, or all but the last. */
int gpu_backends(void);

int gpu_backend_open(int backend, struct kvt_gpu **gpu);

/* Of a mock, nothing was done wrong and nothing is left. */
void gpu_backend_close(int backend, struct kvt_gpu *gpu);

static inline bool gpu_backend_is_mock(int backend)
{
	return backend == GPU_MOCK || backend == GPU_LATE_MOCK;
}

#endif
