/* SPDX-License-Identifier: MIT */
/* Byte counts as people say them: exact, in the largest unit that divides them. */
#ifndef KVT_HOST_SIZE_H
#define KVT_HOST_SIZE_H

#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>

struct kvt_size_text {
	char s[32];
};

static inline struct kvt_size_text kvt_size_text(uint64_t bytes)
{
	static const char *const unit[] = { "bytes", "KiB", "MiB", "GiB", "TiB" };
	struct kvt_size_text t;
	unsigned int u = 0;

	while (u < 4 && bytes && bytes % 1024 == 0) {
		bytes /= 1024;
		u++;
	}
	snprintf(t.s, sizeof(t.s), "%" PRIu64 " %s", bytes, unit[u]);
	return t;
}

#endif
