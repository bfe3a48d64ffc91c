/* SPDX-License-Identifier: MIT */
/*
 * Scratch memory that never moves: every buffer is known before the start, with
 * the steps between which it lives; buffers that never live together share
 * bytes; the whole is one allocation. Addresses stay until the arena is
 * destroyed, so that graphs may hold them.
 *
 * Buffers come from a table with one row each,
 *   X(name, bytes, first step, last step)
 * from which KVT_ARENA_ENUM makes an index, KVT_ARENA_BUFFER an entry, and
 * KVT_ARENA_CHECK a check at compile time. There is no call that frees a
 * buffer: a row without the step behind which it is free does not compile.
 *
 * Threads: an arena is constant after its creation.
 */
#ifndef KVT_RUNTIME_ARENA_H
#define KVT_RUNTIME_ARENA_H

#include <stdint.h>

#include "base/budget.h"
#include "gpu/gpu.h"

#define KVT_ARENA_ALIGN 256u /* bytes; of every buffer */
#define KVT_ARENA_BUFFERS 1024u

/* Used in steps [first, last], both included. Contents are undefined at @first. */
struct kvt_arena_buffer {
	const char *name; /* not copied */
	uint64_t bytes;
	uint32_t first, last;
};

#define KVT_ARENA_ENUM(prefix, name) prefix##name
#define KVT_ARENA_BUFFER(name, bytes, first, last) { #name, bytes, first, last }
#define KVT_ARENA_CHECK(name, first, last) _Static_assert((first) <= (last), "buffer " #name " ends before it begins")

/*
 * All buffers, and the steps [loop_first, loop_last] that repeat (the layers; 1
 * and 0: none do). What lives on entry to the loop and ends within it is read
 * again in the next round: it is kept to the loop's end.
 */
struct kvt_arena_plan {
	const struct kvt_arena_buffer *buffers;
	uint32_t n; /* 1 to KVT_ARENA_BUFFERS */
	uint32_t loop_first, loop_last;
};

struct kvt_arena_size {
	uint64_t bytes;	   /* what the layout takes */
	uint64_t bound;	   /* the most that is alive in one step: no layout takes less */
	uint64_t unshared; /* the sum of all buffers */
};

/* a * b * c, or UINT64_MAX, which no plan takes. */
static inline uint64_t kvt_arena_product(uint64_t a, uint64_t b, uint64_t c)
{
	return __builtin_mul_overflow(a, b, &a) || __builtin_mul_overflow(a, c, &a) ? UINT64_MAX : a;
}

/* Lay out without allocating. @offsets [n] may be NULL. -EINVAL, -EOVERFLOW (naming the buffer), -ENOMEM. */
int kvt_arena_layout(const struct kvt_arena_plan *plan, uint64_t *offsets, struct kvt_arena_size *size);

struct kvt_arena;

/*
 * Lay out and allocate through gpu->ops->alloc, once. @budget (may be NULL) is
 * charged for it before, and must outlive the arena. The errors of
 * kvt_arena_layout(); -ENOMEM: the budget; the backend's.
 */
int kvt_arena_create(struct kvt_gpu *gpu, struct kvt_budget *budget, const struct kvt_arena_plan *plan,
		     struct kvt_arena **arena);
void kvt_arena_destroy(struct kvt_arena *arena);

/*
 * The address of @buffer for @bytes of it in @step. The same address every
 * time. -ENOSPC: more than was planned; -EINVAL: no such buffer, or a step in
 * which its bytes are another's.
 */
int kvt_arena_get(const struct kvt_arena *arena, uint32_t buffer, uint64_t bytes, uint32_t step, kvt_dptr *address);

struct kvt_arena_size kvt_arena_size(const struct kvt_arena *arena);

#endif
