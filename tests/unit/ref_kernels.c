// SPDX-License-Identifier: MIT
/*
 * The reference engine's kernels: close to float64, and the same bits however a
 * product is cut into rows and panels and on every instruction set.
 */
#include <check.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/cpu.h"
#include "engines/ref/engine.h"

#define GUARD 1234.5f

static uint32_t seed = 1;

static float random_float(void)
{
	seed = seed * 1664525u + 1013904223u;
	return (float)(int32_t)seed / 2147483648.0f;
}

static float *random_floats(size_t n)
{
	float *f = malloc(n * sizeof(*f));

	for (size_t i = 0; i < n; i++)
		f[i] = random_float();
	return f;
}

static const struct ref_kernels *kernels(int isa)
{
	return ref_kernels(kvt_isa_name((enum kvt_isa)isa));
}

static uint32_t panels_of(uint32_t n)
{
	return (n + REF_PANEL - 1) / REF_PANEL;
}

/* rows, outputs, k: whole tiles and none, one of everything, tails of every kind */
static const uint32_t shapes[][3] = {
	{ 1, 1, 1 }, { 1, 33, 7 }, { 2, 31, 64 }, { 3, 32, 5 }, { 5, 8, 100 }, { 6, 260, 256 }, { 7, 64, 704 },
	{ 12, 65, 172 }, { 13, 172, 64 }, { 29, 97, 33 }, { 97, 40, 31 },
};

START_TEST(gemm_against_float64)
{
	const uint32_t rows = shapes[_i][0], n = shapes[_i][1], k = shapes[_i][2];
	float *w = random_floats((size_t)n * k), *x = random_floats((size_t)rows * k);
	float *want = malloc(((size_t)rows * n + 1) * sizeof(*want)), *y = malloc(((size_t)rows * n + 1) * sizeof(*y));
	struct ref_matrix m;

	ck_assert_int_eq(ref_matrix_alloc(&m, n, k), 0);
	for (uint32_t j = 0; j < n; j++)
		ref_matrix_set(&m, j, w + (size_t)j * k);
	for (uint32_t i = 0; i < k * REF_PANEL; i++)
		if (n - n / REF_PANEL * REF_PANEL <= i % REF_PANEL && n % REF_PANEL)
			ck_assert(m.panels[(size_t)(n / REF_PANEL) * k * REF_PANEL + i] == 0);
	for (uint32_t r = 0; r < rows; r++) {
		for (uint32_t j = 0; j < n; j++) {
			double sum = 0, size = 0;
			float chain = 0;

			for (uint32_t i = 0; i < k; i++) {
				double term = (double)x[(size_t)r * k + i] * (double)w[(size_t)j * k + i];

				sum += term;
				size += fabs(term);
				chain = fmaf(x[(size_t)r * k + i], w[(size_t)j * k + i], chain);
			}
			want[(size_t)r * n + j] = chain;
			ck_assert_double_le(fabs((double)chain - sum), k * 0x1p-24 * size + 1e-30);
		}
	}
	for (int isa = 0; isa < KVT_ISAS; isa++) {
		if (!kernels(isa))
			continue;
		for (uint32_t step = 1; step <= rows; step += step < 7 ? 1 : rows) {
			for (size_t i = 0; i <= (size_t)rows * n; i++)
				y[i] = GUARD;
			for (uint32_t r = 0; r < rows; r += step)
				for (uint32_t p = 0; p < panels_of(n); p++)
					kernels(isa)->gemm(&m, p, 1, x + (size_t)r * k, k, rows - r < step ? rows - r : step,
							   y + (size_t)r * n, n);
			ck_assert_mem_eq(y, want, (size_t)rows * n * sizeof(*y));
			ck_assert(y[(size_t)rows * n] == GUARD);
		}
		kernels(isa)->gemm(&m, 0, panels_of(n), x, k, rows, y, n);
		ck_assert_mem_eq(y, want, (size_t)rows * n * sizeof(*y));
	}
	for (uint32_t j = 0; j < n; j++) {
		ref_matrix_row(&m, j, x);
		ck_assert_mem_eq(x, w + (size_t)j * k, k * sizeof(*x));
	}
	ref_matrix_free(&m);
	free(w);
	free(x);
	free(want);
	free(y);
}
END_TEST

/* A NaN or an infinity in one row stays in that row, and in the outputs that multiply it. */
START_TEST(gemm_keeps_rows_apart)
{
	const uint32_t rows = 14, n = 70, k = 40;
	float *w = random_floats((size_t)n * k), *x = random_floats((size_t)rows * k), y[14 * 70], want[14 * 70];
	struct ref_matrix m;

	ck_assert_int_eq(ref_matrix_alloc(&m, n, k), 0);
	for (uint32_t j = 0; j < n; j++)
		ref_matrix_set(&m, j, w + (size_t)j * k);
	for (int isa = 0; isa < KVT_ISAS; isa++) {
		if (!kernels(isa))
			continue;
		kernels(isa)->gemm(&m, 0, panels_of(n), x, k, rows, want, n);
		x[5 * k + 3] = NAN;
		kernels(isa)->gemm(&m, 0, panels_of(n), x, k, rows, y, n);
		x[5 * k + 3] = 0.5f;
		for (uint32_t j = 0; j < n; j++) {
			ck_assert(isnan(y[5 * n + j]));
			y[5 * n + j] = want[5 * n + j];
		}
		ck_assert_mem_eq(y, want, sizeof(y));
	}
	ref_matrix_free(&m);
	free(w);
	free(x);
}
END_TEST

static const uint32_t lengths[] = { 1, 3, 4, 5, 8, 15, 16, 17, 31, 64, 100, 172, 256, 704 };

static void check_close(float got, double want, double relative)
{
	ck_assert_msg(fabs((double)got - want) <= relative * fabs(want) + 1e-30, "%.9g, not %.9g", (double)got, want);
}

START_TEST(ops_against_float64)
{
	const uint32_t n = lengths[_i];
	float *x = random_floats(n), *z = random_floats(n), first[3][704], y[705];
	bool have = false;
	double square = 0;

	for (uint32_t i = 0; i < n; i++) {
		x[i] *= 20;
		square += (double)x[i] * (double)x[i];
	}
	for (int isa = 0; isa < KVT_ISAS; isa++) {
		if (!kernels(isa))
			continue;
		y[n] = GUARD;
		kernels(isa)->rmsnorm(y, x, z, n, 1e-5f);
		for (uint32_t i = 0; i < n; i++)
			check_close(y[i], (double)x[i] / sqrt(square / n + (double)1e-5f) * (double)z[i], 1e-6);
		if (have)
			ck_assert_mem_eq(y, first[0], n * sizeof(*y));
		memcpy(first[0], y, n * sizeof(*y));
		kernels(isa)->silu_mul(y, x, z, n);
		for (uint32_t i = 0; i < n; i++)
			check_close(y[i], (double)x[i] / (1 + exp(-(double)x[i])) * (double)z[i], 5e-7);
		if (have)
			ck_assert_mem_eq(y, first[1], n * sizeof(*y));
		memcpy(first[1], y, n * sizeof(*y));
		memcpy(y, x, n * sizeof(*y));
		kernels(isa)->add(y, z, n);
		for (uint32_t i = 0; i < n; i++)
			ck_assert(y[i] == x[i] + z[i]);
		ck_assert(y[n] == GUARD);
		have = true;
	}
	free(x);
	free(z);
}
END_TEST

START_TEST(silu_far_out)
{
	const float gate[] = { -1000, -100, -88, -30, -0.0f, 0, 30, 88, 100, 1000 };
	float up[10], y[10];

	for (uint32_t i = 0; i < 10; i++)
		up[i] = 1;
	for (int isa = 0; isa < KVT_ISAS; isa++) {
		if (!kernels(isa))
			continue;
		kernels(isa)->silu_mul(y, gate, up, 10);
		for (uint32_t i = 0; i < 10; i++)
			ck_assert(fabs((double)y[i] - (double)gate[i] / (1 + exp(-(double)gate[i]))) <=
				  1e-6 * fabs((double)gate[i]) * (gate[i] > 0) + 1e-12);
	}
}
END_TEST

START_TEST(rope_against_float64)
{
	static const uint32_t halves[] = { 4, 5, 8, 20, 32, 40, 64, 128, 256 };
	const uint32_t half = halves[_i];
	float *x = random_floats(2 * half), *angles = malloc(2 * half * sizeof(*angles)), first[512], y[512];
	bool have = false;

	for (uint32_t i = 0; i < half; i++) {
		angles[i] = cosf((float)i);
		angles[half + i] = sinf((float)i);
	}
	for (int isa = 0; isa < KVT_ISAS; isa++) {
		if (!kernels(isa))
			continue;
		kernels(isa)->rope(y, x, angles, half);
		for (uint32_t i = 0; i < half; i++) {
			double c = (double)angles[i], s = (double)angles[half + i], a = (double)x[i], b = (double)x[half + i];

			ck_assert_double_le(fabs((double)y[i] - (a * c - b * s)), 2e-7);
			ck_assert_double_le(fabs((double)y[half + i] - (b * c + a * s)), 2e-7);
		}
		if (have)
			ck_assert_mem_eq(y, first, 2 * half * sizeof(*y));
		memcpy(first, y, 2 * half * sizeof(*y));
		memcpy(y, x, 2 * half * sizeof(*y));
		kernels(isa)->rope(y, y, angles, half);
		ck_assert_mem_eq(y, first, 2 * half * sizeof(*y));
		have = true;
	}
	free(x);
	free(angles);
}
END_TEST

START_TEST(argmax)
{
	ck_assert_uint_eq(ref_argmax((const float[]){ 1, 3, 3, 2 }, 4), 1);
	ck_assert_uint_eq(ref_argmax((const float[]){ -INFINITY, -5 }, 2), 1);
	ck_assert_uint_eq(ref_argmax((const float[]){ 7 }, 1), 0);
}
END_TEST

START_TEST(by_name)
{
	ck_assert_ptr_nonnull(ref_kernels(NULL));
	ck_assert_ptr_nonnull(ref_kernels("portable"));
	ck_assert_ptr_null(ref_kernels("sse1"));
}
END_TEST

int main(void)
{
	Suite *s = suite_create("ref_kernels");
	TCase *t = tcase_create("kernels");
	SRunner *r = srunner_create(s);
	int failed;

	tcase_add_loop_test(t, gemm_against_float64, 0, sizeof(shapes) / sizeof(shapes[0]));
	tcase_add_test(t, gemm_keeps_rows_apart);
	tcase_add_loop_test(t, ops_against_float64, 0, sizeof(lengths) / sizeof(lengths[0]));
	tcase_add_test(t, silu_far_out);
	tcase_add_loop_test(t, rope_against_float64, 0, 9);
	tcase_add_test(t, argmax);
	tcase_add_test(t, by_name);
	suite_add_tcase(s, t);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed != 0;
}
