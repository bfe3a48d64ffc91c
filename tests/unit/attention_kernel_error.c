// SPDX-License-Identifier: MIT
/*
 * The kernels against float64. An output element is sum of p v; its error is
 * measured in units of u * W, u = 2^-24, W = sum of p |v|: what one rounding of
 * the sum costs. It grows with T, the sum of |terms| of the row's largest score,
 * because a score's rounding error moves its weight. The bounds hold for every
 * codec (f32, f16, bf16): the reference reads the encoded rows.
 *
 *   err <= (BASE + PER_TERM * T) * u * W
 */
#include <check.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "lib/attn_case.h"
#include "lib/rounds.h"

#define BASE 10.0
#define PER_TERM 2.0
#define FLUSHED 0x1p-110 /* weights below e^-87 of the largest are 0 */
#define NORM 2e-6

static const char *const isas[] = { "portable", "neon", "avx2", "avx512" };
static double worst; /* of the bound, in this process (each test has its own) */

static void compare(const struct kvt_attn_kernels *kernels, const struct attn_case *c, uint64_t seed)
{
	float *out = malloc((size_t)c->m * c->shape.v_dim * sizeof(float));
	struct attn_reference *ref = malloc(sizeof(*ref));

	ck_assert(attn_case_run(kernels, c, 0, c->m, 0, out));
	for (uint32_t i = 0; i < c->m; i++) {
		attn_case_reference(c, i, ref);
		for (uint32_t d = 0; d < c->shape.v_dim; d++) {
			float got = out[(size_t)i * c->shape.v_dim + d];
			double unit = 0x1p-24 * ref->weight[d], err = fabs(got - ref->out[d]);

			if (ref->nan) {
				ck_assert_msg(isnan(got), "seed %lu row %u: %g, NaN expected", seed, i, got);
			} else if (ref->nothing) {
				ck_assert_msg(got == 0, "seed %lu row %u: %g, 0 expected", seed, i, got);
			} else if (isfinite(ref->weight[d]) && isfinite(ref->terms)) {
				ck_assert_msg(err <= (BASE + PER_TERM * ref->terms) * unit + FLUSHED,
					      "%s seed %lu row %u dim %u: %.9g, %.9g expected: %g units, T %g", kernels->isa,
					      seed, i, d, got, ref->out[d], err / unit, ref->terms);
				if (unit > 0x1p-100 && err / unit / (BASE + PER_TERM * ref->terms) > worst)
					worst = err / unit / (BASE + PER_TERM * ref->terms);
			}
		}
	}
	free(ref);
	free(out);
}

static void sweep(unsigned what, uint64_t cases)
{
	cases /= test_rounds(1, 8, 40);
	for (unsigned i = 0; i < sizeof(isas) / sizeof(*isas); i++) {
		const struct kvt_attn_kernels *kernels = kvt_attn_kernels(isas[i]);

		/* portable is slow where it has no fma instruction, and its bits are those of the others */
		for (uint64_t seed = 0; kernels && seed < (i ? cases : cases / 8); seed++) {
			struct attn_case c;

			attn_case_make(&c, seed, what);
			compare(kernels, &c, seed);
			attn_case_free(&c);
		}
	}
	printf("at most %.2f of the bound\n", worst);
}

START_TEST(plain)
{
	sweep(ATTN_PLAIN, 200);
}
END_TEST

START_TEST(bias)
{
	sweep(ATTN_BIAS, 400);
}
END_TEST

START_TEST(spread)
{
	sweep(ATTN_BIAS | ATTN_SPREAD, 200);
}
END_TEST

START_TEST(special)
{
	sweep(ATTN_BIAS | ATTN_SPECIAL, 600);
}
END_TEST

/* What an engine meets: unit normal vectors. Here the plain relative error of a row's norm is stated too. */
START_TEST(normal_rows)
{
	static const uint32_t dims[] = { 8, 16, 24, 64, 72, 80, 96, 100, 112, 128, 192, 256, 512, 576 };
	const struct kvt_attn_kernels *kernels = kvt_attn_kernels(NULL);
	struct attn_reference *ref = malloc(sizeof(*ref));

	for (uint32_t codec = 0; codec <= KVT_BF16; codec++) {
		double most = 0;

		for (unsigned k = 0; k < sizeof(dims) / sizeof(*dims); k += test_rounds(1, 2, 20)) {
			uint32_t dim = dims[k];
			float *out = malloc(4 * dim * sizeof(float));
			struct attn_case c;

			attn_case_make_sized(&c, k, ATTN_PLAIN, dim, dim, 4, 1000, codec, codec);
			for (int i = 0; i < 4; i++) {
				c.lo[i] = 0;
				c.hi[i] = 1000;
			}
			attn_case_run(kernels, &c, 0, 4, 0, out);
			for (uint32_t i = 0; i < 4; i++) {
				double err = 0, norm = 0;

				attn_case_reference(&c, i, ref);
				for (uint32_t d = 0; d < dim; d++) {
					err += pow(out[i * dim + d] - ref->out[d], 2);
					norm += pow(ref->out[d], 2);
				}
				if (sqrt(err / norm) > most)
					most = sqrt(err / norm);
			}
			attn_case_free(&c);
			free(out);
		}
		printf("%s: relative error of a row's norm at most %.2g\n", kvt_codec_name(codec), most);
		ck_assert_msg(most < NORM, "%s: %g", kvt_codec_name(codec), most);
	}
	free(ref);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("attention_kernel_error");
	TCase *t = tcase_create("all");
	SRunner *r;
	int failed;

	tcase_set_timeout(t, 600);
	tcase_add_test(t, plain);
	tcase_add_test(t, bias);
	tcase_add_test(t, spread);
	tcase_add_test(t, special);
	tcase_add_test(t, normal_rows);
	suite_add_tcase(s, t);
	r = srunner_create(s);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed != 0;
}
