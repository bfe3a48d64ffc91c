/* SPDX-License-Identifier: MIT */
/* What the loader's users within have beside include/kvtier-weights.h: budgets, and a whole model at once. */
#ifndef KVT_RUNTIME_LOADER_H
#define KVT_RUNTIME_LOADER_H

#include "base/budget.h"
#include "gpu/gpu.h"
#include "runtime/weights.h"

/*
 * As kvt_load(), with staging and stacks charged to @budget (may be NULL): with
 * a small one, fewer and smaller reads. -ENOMEM: not even one fits.
 */
int kvt_load_charged(const struct kvt_weights *w, const struct kvt_load_item *items, uint32_t n,
		     const struct kvt_load_params *params, struct kvt_budget *budget, struct kvt_load_report *report);

/* All tensors of a model in host memory. */
struct kvt_load_image {
	uint8_t *base; /* huge pages where there are some */
	uint64_t bytes;
	struct kvt_load_item *items; /* [w->n_tensors], as w->tensors */
	struct kvt_budget *budget;
};

/*
 * Check that they fit (kvt_load_fits(), and @budget, which is charged), allocate
 * the block, lay it out and load. -ENOMEM, or as kvt_load().
 */
int kvt_load_image(const struct kvt_weights *w, const struct kvt_load_params *params, struct kvt_budget *budget,
		   struct kvt_load_image *image, struct kvt_load_report *report);
void kvt_load_image_free(struct kvt_load_image *image); /* a zeroed one too */

#endif
