/* SPDX-License-Identifier: MIT */
/* Where a test's files go: TMPDIR, which scripts/run-test makes for each, or else a folder that is on a disk. */
#ifndef KVT_TESTS_SCRATCH_H
#define KVT_TESTS_SCRATCH_H

#include <stdlib.h>

static inline const char *test_scratch(void)
{
	const char *dir = getenv("TMPDIR");

	return dir ? dir : "/var/tmp";
}

#endif
