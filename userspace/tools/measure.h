/* SPDX-License-Identifier: MIT */
/* What progress and benchmarks need: a clock in seconds, and the median of what was measured. */
#ifndef KVT_TOOLS_MEASURE_H
#define KVT_TOOLS_MEASURE_H

#include <stdint.h>
#include <stdlib.h>
#include <time.h>

static inline double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static inline int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

/* Sorts @v. */
static inline double median(double *v, uint32_t n)
{
	qsort(v, n, sizeof(*v), by_value);
	return n % 2 ? v[n / 2] : (v[n / 2 - 1] + v[n / 2]) / 2;
}

#endif
