/* SPDX-License-Identifier: MIT */
/* What the sampler's parts and tests share beside include/kvtier-sampler.h. */
#ifndef KVT_RUNTIME_SAMPLER_H
#define KVT_RUNTIME_SAMPLER_H

#include <stdbool.h>
#include <stdint.h>

#include "base/cpu.h"
#include "kvtier-sampler.h"

#define KVT_SAMPLER_BLOCK 64u /* tokens; one word of a bitmap */
#define KVT_SAMPLER_LANES 8u  /* partial sums: fixed, whatever the vector's width */

/* Sums of the differences to the first finite logit, so that equal logits give a sigma of exactly 0. */
struct kvt_sampler_spread {
	double shift;
	double n[KVT_SAMPLER_LANES], sum[KVT_SAMPLER_LANES], square[KVT_SAMPLER_LANES];
	bool any;
};

struct kvt_sampler_ops {
	/* the largest of a block's logits; *nan: one is NaN (it does not count) */
	float (*scan)(const float *x, bool *nan);
	/* add a block's finite logits, logit i to lane i % KVT_SAMPLER_LANES */
	void (*spread)(struct kvt_sampler_spread *, const float *x);
	/*
	 * w[i] = e^((v[i] - max) / t) for v[i] <= max, within 2 ulp of e^ of the rounded quotient; 1 for 0; 0 below
	 * e^-700, so that no subnormal number is made. @w may be @v.
	 */
	void (*exp_scaled)(double *w, const double *v, uint32_t n, double max, double t);
};

KVT_ISA_DECLARE(extern const struct kvt_sampler_ops, kvt_sampler_ops);

/* As kvt_sampler_create(), on an instruction set. -ENOTSUP: not in this build or CPU. */
int kvt_sampler_create_isa(uint32_t vocab, enum kvt_isa isa, struct kvt_sampler **sampler);

/* Logits that the passes over the vocabulary have read since the sampler was created. */
uint64_t kvt_sampler_logits_read(const struct kvt_sampler *sampler);

/* The uniform number in [0, 1) of (seed, sequence, position). */
double kvt_sampler_uniform(uint64_t seed, uint64_t sequence, uint64_t position);

/* ln x for x in (0, 1], within a few ulp; 0 for 1; -690 below e^-690. */
double kvt_sampler_ln(const struct kvt_sampler_ops *ops, double x);

#endif
