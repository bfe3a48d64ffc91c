/* SPDX-License-Identifier: MIT */
/* A hard byte budget: charged before memory is taken, never exceeded, with its peak. */
#ifndef KVT_BASE_BUDGET_H
#define KVT_BASE_BUDGET_H

#include <errno.h>
#include <stdatomic.h>
#include <stdint.h>

struct kvt_budget {
	uint64_t limit; /* bytes */
	_Atomic uint64_t used;
	_Atomic uint64_t peak;
};

/* Charge @bytes. Returns 0, or -ENOMEM with nothing changed. Any thread. */
static inline int kvt_budget_charge(struct kvt_budget *b, uint64_t bytes)
{
	uint64_t used = atomic_load(&b->used), peak;

	do {
		if (bytes > b->limit || used > b->limit - bytes)
			return -ENOMEM;
	} while (!atomic_compare_exchange_weak(&b->used, &used, used + bytes));
	used += bytes;
	peak = atomic_load(&b->peak);
	while (used > peak && !atomic_compare_exchange_weak(&b->peak, &peak, used))
		;
	return 0;
}

static inline void kvt_budget_release(struct kvt_budget *b, uint64_t bytes)
{
	atomic_fetch_sub(&b->used, bytes);
}

#endif
