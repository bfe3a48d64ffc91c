/* SPDX-License-Identifier: MIT */
/* Size-first structs from callers with an older or newer header. */
#ifndef KVT_BASE_PARAMS_H
#define KVT_BASE_PARAMS_H

#include <errno.h>
#include <stdint.h>
#include <string.h>

#include "base/err.h"

/*
 * Copy a caller's struct, whose first member is its uint32_t size, into ours of
 * @bytes. What an older one lacks is zero; a newer one's tail must be zero.
 * @least: the size of the first published version.
 */
static inline int kvt_params_copy(void *ours, uint32_t bytes, uint32_t least, const void *theirs, const char *what)
{
	uint32_t size;

	if (!theirs)
		return kvt_fail(-EINVAL, "%s: NULL", what);
	memcpy(&size, theirs, sizeof(size));
	if (size < least)
		return kvt_fail(-EINVAL, "%s: size is %u, at least %u expected: begin with KVT_INIT()", what, size, least);
	for (uint32_t i = bytes; i < size; i++)
		if (((const uint8_t *)theirs)[i])
			return kvt_fail(-E2BIG, "%s: byte %u is set, but this library knows only %u: it is older than the header",
					what, i, bytes);
	memset(ours, 0, bytes);
	memcpy(ours, theirs, size < bytes ? size : bytes);
	memcpy(ours, &bytes, sizeof(bytes));
	return 0;
}

/* A struct to be filled for the caller, which begins with its size; NULL: not wanted. */
static inline int kvt_result_check(const void *theirs, const char *what)
{
	uint32_t size = sizeof(size);

	if (theirs)
		memcpy(&size, theirs, sizeof(size));
	if (size < sizeof(size))
		return kvt_fail(-EINVAL, "%s: size is %u: begin with KVT_INIT()", what, size);
	return 0;
}

/* Fill it from ours of @bytes: what an older one lacks is left out, a newer one's tail is zero. */
static inline void kvt_result_copy(void *theirs, const void *ours, uint32_t bytes)
{
	uint32_t size;

	memcpy(&size, theirs, sizeof(size));
	memset(theirs, 0, size);
	memcpy(theirs, ours, size < bytes ? size : bytes);
	memcpy(theirs, &size, sizeof(size));
}

#endif
