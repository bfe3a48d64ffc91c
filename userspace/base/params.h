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

#endif
