/* SPDX-License-Identifier: MIT */
/* What the machine can do at best: the ceilings that `kvtier bench` holds results against. */
#ifndef KVT_TOOLS_PEAK_H
#define KVT_TOOLS_PEAK_H

#include <stddef.h>
#include <stdint.h>

struct peak_ops {
	/* Read @bytes (a multiple of 1 KiB) with plain vector loads. The result only keeps it from being optimised away. */
	float (*read)(const void *data, size_t bytes);
	/* @rounds of independent chains of fused multiply-adds. Returns the number of floating-point operations. */
	double (*fma)(uint64_t rounds, float *result);
};

/* For the instruction set in use. */
const struct peak_ops *peak_ops(void);

#endif
