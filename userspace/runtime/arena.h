/* SPDX-License-Identifier: MIT */
/* What an arena's users within have beside include/kvtier-arena.h. */
#ifndef KVT_RUNTIME_ARENA_H
#define KVT_RUNTIME_ARENA_H

#include <stdint.h>

#include "base/budget.h"
#include "gpu/gpu.h"
#include "kvtier-arena.h"

/* a * b * c, or UINT64_MAX, which no plan takes. */
static inline uint64_t kvt_arena_product(uint64_t a, uint64_t b, uint64_t c)
{
	return __builtin_mul_overflow(a, b, &a) || __builtin_mul_overflow(a, c, &a) ? UINT64_MAX : a;
}

/* As kvt_arena_create(); @budget (may be NULL) is charged before, and must outlive the arena. -ENOMEM: the budget. */
int kvt_arena_create_charged(struct kvt_gpu *gpu, struct kvt_budget *budget, const struct kvt_arena_plan *plan,
			     struct kvt_arena **arena);

#endif
