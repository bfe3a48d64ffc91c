/* SPDX-License-Identifier: MIT */
/* Whether the backends that a test goes through have a GPU among them. */
#ifndef KVT_TEST_GPU_THERE_H
#define KVT_TEST_GPU_THERE_H

#include <stdbool.h>

/*
 * GPU 0 opens, or fails with more than -ENODEV, which is the cases' to find; says which one it is, or why there is none.
 * Asked in a child: CUDA does not survive the fork() that comes before each case.
 */
bool gpu_is_there(void);

#endif
