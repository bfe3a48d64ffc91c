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
 *   #define SCRATCH(X) \
 *           X(x, 4 * hidden, EMBED, HEAD) \
 *           X(qkv, 4 * 3 * hidden, QKV, ATTEND)
 *   #define INDEX(name, bytes, first, last) KVT_ARENA_ENUM(BUF_, name),
 *   #define ENTRY(name, bytes, first, last) KVT_ARENA_BUFFER(name, bytes, first, last),
 *   #define CHECK(name, bytes, first, last) KVT_ARENA_CHECK(name, first, last);
 *   enum { SCRATCH(INDEX) BUFFERS };
 *   SCRATCH(CHECK)
 *   const struct kvt_arena_buffer buffers[BUFFERS] = { SCRATCH(ENTRY) };
 *
 * Threads: an arena is constant after its creation.
 */
#ifndef KVTIER_ARENA_H
#define KVTIER_ARENA_H

#include <stdint.h>

#include "kvtier.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- a GPU, for arenas and for kvt_load() --------------------------------- */

struct kvt_gpu;

/*
 * Open device @device of @backend (enum kvt_backend_kind; AUTO: a GPU if there
 * is one that this build can use, else the cpu backend). The cpu backend's
 * memory is the machine's and its addresses are pointers; it copies to what was
 * allocated through this handle alone. -EINVAL: no such backend; -ENODEV: no
 * such device, or a build without that backend; -ENOMEM.
 */
int kvt_gpu_open(uint32_t backend, uint32_t device, struct kvt_gpu **gpu);

/* What was allocated through it must have been destroyed. */
void kvt_gpu_close(struct kvt_gpu *gpu);

/* ---- arenas --------------------------------------------------------------- */

#define KVT_ARENA_ALIGN 256u /* bytes; of every buffer */
#define KVT_ARENA_BUFFERS 1024u

/* Used in steps [first, last], both included. Contents are undefined at @first. */
struct kvt_arena_buffer {
	const char *name; /* not copied: must outlive the arena */
	uint64_t bytes;
	uint32_t first, last;
};

#define KVT_ARENA_ENUM(prefix, name) prefix##name
#define KVT_ARENA_BUFFER(name, bytes, first, last) { #name, bytes, first, last }
#ifdef __cplusplus
#define KVT_ARENA_CHECK(name, first, last) static_assert((first) <= (last), "buffer " #name " ends before it begins")
#else
#define KVT_ARENA_CHECK(name, first, last) _Static_assert((first) <= (last), "buffer " #name " ends before it begins")
#endif

/*
 * All buffers, and the steps [loop_first, loop_last] that repeat (the layers; 0
 * and 0: none do). What lives on entry to the loop and ends within it is read
 * again in the next round: it is kept to the loop's end. struct kvt_arena_plan
 * plan = KVT_INIT(plan);
 */
struct kvt_arena_plan {
	uint32_t size;
	uint32_t n; /* 1 to KVT_ARENA_BUFFERS */
	const struct kvt_arena_buffer *buffers; /* [n], not kept */
	uint32_t loop_first, loop_last;
};

/* Bytes. */
struct kvt_arena_size {
	uint64_t bytes;	   /* what the layout takes */
	uint64_t bound;	   /* the most that is alive in one step: no layout takes less */
	uint64_t unshared; /* the sum of all buffers */
};

/*
 * Lay out without allocating: what an arena of @plan would take, to hold against
 * a budget. @offsets [n] (may be NULL) get each buffer's place. -EINVAL: the plan;
 * -EOVERFLOW: a buffer (named), or all of them, of more than 2^60 bytes; -E2BIG:
 * fields of @plan that this library does not know are set; -ENOMEM.
 */
int kvt_arena_layout(const struct kvt_arena_plan *plan, uint64_t *offsets, struct kvt_arena_size *size);

struct kvt_arena;

/*
 * Lay out, and allocate on @gpu, which must outlive the arena: once, here, and
 * never again. The errors of kvt_arena_layout(), or the GPU's.
 */
int kvt_arena_create(struct kvt_gpu *gpu, const struct kvt_arena_plan *plan, struct kvt_arena **arena);
void kvt_arena_destroy(struct kvt_arena *arena);

/*
 * The device address of @buffer (its index in the plan) for @bytes of it in
 * @step. The same address every time. -ENOSPC: more than was planned, naming
 * buffer and size; -EINVAL: no such buffer, or a step in which its bytes are another's.
 */
int kvt_arena_get(const struct kvt_arena *arena, uint32_t buffer, uint64_t bytes, uint32_t step, uint64_t *address);

struct kvt_arena_size kvt_arena_size(const struct kvt_arena *arena);

#ifdef __cplusplus
}
#endif
#endif
