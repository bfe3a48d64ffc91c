// SPDX-License-Identifier: MIT
/* A list of memory ranges; gpu/ranges.h. Backends hold a few large ones, so a list does. */
#include "gpu/ranges.h"

#include <errno.h>
#include <stdlib.h>

#include "base/err.h"

const char *kvt_range_name(enum kvt_range_kind kind)
{
	static const char *const names[] = { "device memory", "pinned host memory", "a registered host range" };

	return names[kind];
}

int kvt_ranges_add(struct kvt_ranges *r, enum kvt_range_kind kind, uintptr_t base, uint64_t bytes)
{
	if (r->n == r->room) {
		uint32_t room = r->room ? r->room * 2 : 16;
		struct kvt_range *ranges = realloc(r->ranges, room * sizeof(*ranges));

		if (!ranges)
			return kvt_fail(-ENOMEM, "no memory to track %u ranges", room);
		r->ranges = ranges;
		r->room = room;
	}
	r->ranges[r->n++] = (struct kvt_range){ kind, base, bytes };
	return 0;
}

uint64_t kvt_ranges_remove(struct kvt_ranges *r, enum kvt_range_kind kind, uintptr_t base)
{
	for (uint32_t i = 0; i < r->n; i++)
		if (r->ranges[i].kind == kind && r->ranges[i].base == base) {
			uint64_t bytes = r->ranges[i].bytes;

			r->ranges[i] = r->ranges[--r->n];
			return bytes;
		}
	return 0;
}

const struct kvt_range *kvt_ranges_holding(const struct kvt_ranges *r, enum kvt_range_kind kind, uintptr_t p,
					   uint64_t bytes)
{
	for (uint32_t i = 0; i < r->n; i++) {
		const struct kvt_range *x = &r->ranges[i];

		if (x->kind == kind && p >= x->base && bytes <= x->bytes && p - x->base <= x->bytes - bytes)
			return x;
	}
	return NULL;
}

bool kvt_ranges_pinned(const struct kvt_ranges *r, uintptr_t p, uint64_t bytes)
{
	return kvt_ranges_holding(r, KVT_RANGE_HOST, p, bytes) || kvt_ranges_holding(r, KVT_RANGE_REGISTERED, p, bytes);
}

const struct kvt_range *kvt_ranges_overlap(const struct kvt_ranges *r, enum kvt_range_kind kind, uintptr_t p,
					   uint64_t bytes)
{
	for (uint32_t i = 0; i < r->n; i++) {
		const struct kvt_range *x = &r->ranges[i];

		if (x->kind == kind && (p < x->base ? x->base - p < bytes : p - x->base < x->bytes))
			return x;
	}
	return NULL;
}

int kvt_ranges_register(struct kvt_ranges *r, void *p, uint64_t bytes)
{
	const struct kvt_range *there;

	if (!p || !bytes)
		return kvt_fail(-EINVAL, "host_register: %llu bytes at %p", (unsigned long long)bytes, p);
	there = kvt_ranges_overlap(r, KVT_RANGE_REGISTERED, (uintptr_t)p, bytes);
	if (!there)
		there = kvt_ranges_overlap(r, KVT_RANGE_HOST, (uintptr_t)p, bytes);
	if (there)
		return kvt_fail(-EEXIST, "host_register: %llu bytes at %p overlap %s at %#lx",
				(unsigned long long)bytes, p, kvt_range_name(there->kind), (unsigned long)there->base);
	return kvt_ranges_add(r, KVT_RANGE_REGISTERED, (uintptr_t)p, bytes);
}

void kvt_ranges_free(struct kvt_ranges *r)
{
	free(r->ranges);
	*r = (struct kvt_ranges){ 0 };
}
