/* SPDX-License-Identifier: MIT */
/* Which memory a backend without a GPU has given out or been told of. The caller locks. */
#ifndef KVT_GPU_RANGES_H
#define KVT_GPU_RANGES_H

#include <stdbool.h>
#include <stdint.h>

enum kvt_range_kind { KVT_RANGE_DEVICE, KVT_RANGE_HOST, KVT_RANGE_REGISTERED };

struct kvt_range {
	enum kvt_range_kind kind;
	uintptr_t base;
	uint64_t bytes;
};

struct kvt_ranges {
	struct kvt_range *ranges;
	uint32_t n, room;
};

/* "device memory", ... */
const char *kvt_range_name(enum kvt_range_kind kind);

/* 0 or -ENOMEM. */
int kvt_ranges_add(struct kvt_ranges *r, enum kvt_range_kind kind, uintptr_t base, uint64_t bytes);

/* Forget the range that begins at @base: its size, or 0 if there is none. */
uint64_t kvt_ranges_remove(struct kvt_ranges *r, enum kvt_range_kind kind, uintptr_t base);

/* The range of @kind in which [p, p + bytes) lies, or NULL. */
const struct kvt_range *kvt_ranges_holding(const struct kvt_ranges *r, enum kvt_range_kind kind, uintptr_t p,
					   uint64_t bytes);

/* Does [p, p + bytes) lie in one range of host memory that the device reads? */
bool kvt_ranges_pinned(const struct kvt_ranges *r, uintptr_t p, uint64_t bytes);

/* A range of @kind that shares a byte with [p, p + bytes), or NULL. */
const struct kvt_range *kvt_ranges_overlap(const struct kvt_ranges *r, enum kvt_range_kind kind, uintptr_t p,
					   uint64_t bytes);

/* Note the caller's memory as registered: -EINVAL if it is none, -EEXIST if some of it is pinned already, -ENOMEM. */
int kvt_ranges_register(struct kvt_ranges *r, void *p, uint64_t bytes);

void kvt_ranges_free(struct kvt_ranges *r);

#endif
