// SPDX-License-Identifier: MIT
/*
 * One digest of many random attention outputs for each instruction set that this
 * CPU has. Needs nothing but the C library, so that a static build of it can be
 * carried to a machine with other instruction sets (scripts/check-isas): equal
 * digests there and here are equal bits.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lib/attn_case.h"

static uint64_t digest(const struct kvt_attn_kernels *kernels, uint64_t cases, bool *good)
{
	static const unsigned what[] = { ATTN_PLAIN, ATTN_BIAS, ATTN_BIAS | ATTN_SPREAD, ATTN_BIAS | ATTN_SPECIAL };
	uint64_t hash = 0xcbf29ce484222325;

	for (uint64_t seed = 0; seed < cases; seed++) {
		struct attn_case c;
		size_t bytes;
		uint8_t *out;

		attn_case_make(&c, 1000 + seed, what[seed % 4]);
		bytes = (size_t)c.m * c.shape.v_dim * sizeof(float);
		out = malloc(bytes);
		*good &= attn_case_run(kernels, &c, 0, c.m, 0, (float *)out);
		for (size_t i = 0; i < bytes; i++)
			hash = (hash ^ out[i]) * 0x100000001b3;
		free(out);
		attn_case_free(&c);
	}
	return hash;
}

int main(int argc, char **argv)
{
	static const char *const isas[] = { "portable", "neon", "avx2", "avx512" };
	uint64_t cases = argc > 1 ? strtoull(argv[1], NULL, 10) : 200, first = 0;
	bool same = true, good = true;

	for (unsigned i = 0; i < sizeof(isas) / sizeof(*isas); i++) {
		const struct kvt_attn_kernels *kernels = kvt_attn_kernels(isas[i]);
		uint64_t d;

		if (!kernels)
			continue;
		d = digest(kernels, cases, &good);
		printf("%s %016lx\n", kernels->isa, (unsigned long)d);
		if (!i)
			first = d;
		same &= d == first;
	}
	if (!same)
		fputs("instruction sets differ\n", stderr);
	if (!good)
		fputs("bytes outside the buffers were written\n", stderr);
	return !same || !good;
}
