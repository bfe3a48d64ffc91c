/* SPDX-License-Identifier: MIT */
/*
 * How often a test does a thing. A sanitizer looks at the code and not at chance, and takes ten times as long: under
 * AddressSanitizer fewer rounds do. ThreadSanitizer sees only what threads do to each other: where a test has one
 * thread, as many rounds as go every way once.
 */
#ifndef KVT_TESTS_ROUNDS_H
#define KVT_TESTS_ROUNDS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* scripts/check says which sanitizer there is. */
static inline bool test_sanitized(void)
{
	return getenv("KVT_TEST_SANITIZER") != NULL;
}

static inline uint32_t test_rounds(uint32_t plain, uint32_t asan, uint32_t tsan)
{
	const char *sanitizer = getenv("KVT_TEST_SANITIZER");

	return !sanitizer ? plain : !strcmp(sanitizer, "tsan") ? tsan : asan;
}

#endif
