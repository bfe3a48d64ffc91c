// SPDX-License-Identifier: MIT
/* The GPU's XXH3, compiled for the CPU: every length gives what the library gives. */
#include <check.h>
#include <stdlib.h>

#include "../../kernels/xxh3.cuh"
#include "codec/codec.h"

#define MOST 5000

static uint64_t kernel_digest(uint32_t index, const uint8_t *row, uint32_t bytes)
{
	uint64_t h = bytes * XXH3_P64_1;

	if (bytes <= XXH3_LONG)
		return xxh3_row_digest(xxh3_short(row, bytes, xxh3_secret), index);
	for (uint32_t j = 0; j < 4; j++)
		h += xxh3_long_part(row, bytes, j, xxh3_secret);
	return xxh3_row_digest(xxh3_avalanche(h), index);
}

START_TEST(every_length)
{
	static uint8_t row[MOST];
	uint64_t x = 88172645463325252ull;

	for (uint32_t i = 0; i < MOST; i++) {
		x = x * 6364136223846793005ull + 1442695040888963407ull;
		row[i] = x >> 56;
	}
	for (uint32_t n = 0; n <= MOST; n++)
		if (kernel_digest(n * 7919, row, n) != kvt_row_digest(n * 7919, row, n))
			ck_abort_msg("a row of %u bytes", n);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("digest kernel");
	TCase *t = tcase_create("digest kernel");
	SRunner *r = srunner_create(s);
	int failed;

	tcase_add_test(t, every_length);
	suite_add_tcase(s, t);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed != 0;
}
