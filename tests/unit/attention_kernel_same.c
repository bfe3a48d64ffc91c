// SPDX-License-Identifier: MIT
/*
 * A row's bytes do not depend on what must not matter: the instruction set, the
 * rows and KV heads that share its call, where buffers are aligned, what invisible
 * positions hold, what is in the scratch, where its first split begins, and the
 * floating-point modes of the calling thread.
 */
#include <check.h>
#include <fenv.h>
#include <stdlib.h>
#include <string.h>

#include "lib/attn_case.h"
#include "lib/rounds.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define ALL (ATTN_BIAS | ATTN_SPREAD | ATTN_SPECIAL)

static float *run(const struct kvt_attn_kernels *kernels, const struct attn_case *c, uint32_t row, uint32_t m,
		  unsigned shift)
{
	float *out = malloc((size_t)m * c->shape.v_dim * sizeof(float));

	ck_assert(attn_case_run(kernels, c, row, m, shift, out));
	return out;
}

static void same(const float *a, const float *b, const struct attn_case *c, uint32_t m, uint64_t seed, const char *what)
{
	for (size_t i = 0; i < (size_t)m * c->shape.v_dim; i++)
		ck_assert_msg(!memcmp(a + i, b + i, sizeof(float)), "%s, seed %lu: row %zu dim %zu: %a and %a", what, seed,
			      i / c->shape.v_dim, i % c->shape.v_dim, a[i], b[i]);
}

START_TEST(instruction_sets)
{
	static const char *const isas[] = { "neon", "avx2", "avx512" };
	const struct kvt_attn_kernels *base = kvt_attn_kernels("portable");

	for (uint64_t seed = 0; seed < test_rounds(150, 75, 15); seed++) {
		struct attn_case c;
		float *want;

		attn_case_make(&c, seed, ALL);
		want = run(base, &c, 0, c.m, 0);
		for (unsigned i = 0; i < sizeof(isas) / sizeof(*isas); i++) {
			const struct kvt_attn_kernels *kernels = kvt_attn_kernels(isas[i]);
			float *got;

			if (!kernels)
				continue;
			got = run(kernels, &c, 0, c.m, 0);
			same(want, got, &c, c.m, seed, isas[i]);
			free(got);
		}
		free(want);
		attn_case_free(&c);
	}
}
END_TEST

/* Each row alone, at another alignment, with other bytes wherever it may not look. */
START_TEST(alone)
{
	const struct kvt_attn_kernels *kernels = kvt_attn_kernels(NULL);

	for (uint64_t seed = 0; seed < test_rounds(100, 50, 10); seed++) {
		struct attn_case c;
		float *want;

		attn_case_make(&c, seed, ALL);
		want = run(kernels, &c, 0, c.m, 0);
		for (uint32_t i = 0; i < c.m; i++) {
			struct attn_case garbage;
			float *got;

			attn_case_make_sized(&garbage, seed, ALL, c.shape.k_dim, c.shape.v_dim, c.m, c.n, c.shape.k_codec,
					     c.shape.v_codec);
			for (uint64_t j = 0; j < c.n; j++) {
				if (!attn_case_sees(&c, i, j))
					attn_case_fill_position(&garbage, j, i % 2 ? 0xff : 0x7f); /* NaN, or huge */
			}
			got = run(kernels, &garbage, i, 1, 1 + i % 15);
			same(want + (size_t)i * c.shape.v_dim, got, &c, 1, seed, "alone");
			free(got);
			attn_case_free(&garbage);
		}
		free(want);
		attn_case_free(&c);
	}
}
END_TEST

/* One call for several KV heads, and one for each: few rows, and many; a short last tile, ragged ranges, rows of NaN. */
START_TEST(heads)
{
	static const uint32_t rows[] = { 1, 2, 3, 4, 5, 7, 8, 9, 30 }, dims[] = { 8, 9, 31, 64, 80, 100, 128 };
	const struct kvt_attn_kernels *kernels = kvt_attn_kernels(NULL);
	const uint8_t *k[KVT_SPLIT], *v[KVT_SPLIT];

	for (uint64_t seed = 0; seed < test_rounds(200, 100, 20); seed++) {
		uint32_t m = rows[seed % 9], n_heads = 1 + (uint32_t)(seed / 9) % 10, n = 1 + seed * 37 % KVT_SPLIT;
		uint32_t dim = dims[seed % 7], codec = (uint32_t)seed % 3, all = m * n_heads;
		size_t size = dim * (codec == KVT_F32 ? 4ul : 2ul), floats = (size_t)all * (dim + 2);
		const struct kvt_attn_shape shape = { .k_dim = dim, .v_dim = dim, .k_codec = codec, .v_codec = codec,
						      .scale = 0.125f };
		float *together = malloc(floats * sizeof(float)), *apart = malloc(floats * sizeof(float));
		struct kvt_attn_state st = { together, together + all, together + 2 * all };
		void *scratch = aligned_alloc(64, (kernels->scratch_bytes(&shape, all) + 63) / 64 * 64);
		uint64_t *lo = malloc(all * sizeof(*lo)), *hi = malloc(all * sizeof(*hi)), r = seed;
		const float **q = malloc(all * sizeof(*q));
		float *queries = malloc((size_t)all * dim * sizeof(float));
		uint8_t *data = malloc(2 * n * n_heads * size);
		struct kvt_split_rows s = { .n = n, .heads = n_heads, .k = k, .v = v };
		struct kvt_query_rows qs = { .m = all, .q = q, .lo = lo, .hi = hi };

		for (size_t i = 0; i < 2ul * n * n_heads * dim; i++)
			attn_encode(data, codec, i, attn_normal(&r));
		for (size_t i = 0; i < (size_t)all * dim; i++)
			queries[i] = attn_normal(&r);
		for (uint32_t i = 0; seed % 3 == 0 && i < all; i++)
			if (attn_random(&r) % 8 == 0)
				queries[(size_t)i * dim] = NAN;
		for (uint32_t j = 0; j < n; j++) {
			k[j] = data + j * n_heads * size;
			v[j] = data + (n + j) * n_heads * size;
		}
		for (uint32_t i = 0; i < all; i++) {
			q[i] = queries + (size_t)i * dim;
			lo[i] = seed % 2 ? 0 : attn_random(&r) % n;
			hi[i] = seed % 2 ? n : attn_random(&r) % (n + 1);
		}
		kernels->split(&shape, &s, &qs, &st, scratch);
		for (uint32_t h = 0; h < n_heads; h++) {
			const uint32_t at = (uint32_t)(h * size);
			const struct kvt_split_rows one = { .n = n, .heads = 1, .k = k, .v = v, .k_offset = at,
							    .v_offset = at };
			const struct kvt_query_rows of = { .m = m, .q = q + h * m, .lo = lo + h * m, .hi = hi + h * m };
			struct kvt_attn_state part = { apart + h * m, apart + all + h * m,
						       apart + 2 * all + (size_t)h * m * dim };

			kernels->split(&shape, &one, &of, &part, scratch);
		}
		ck_assert_msg(!memcmp(together, apart, floats * sizeof(float)), "seed %lu: %u rows of %u heads", seed, m, n_heads);
		free(together);
		free(apart);
		free(scratch);
		free(lo);
		free(hi);
		free(q);
		free(queries);
		free(data);
	}
}
END_TEST

START_TEST(modes)
{
	static const int rounding[] = { FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO };
	const struct kvt_attn_kernels *kernels = kvt_attn_kernels(NULL);

	for (uint64_t seed = 0; seed < test_rounds(60, 30, 6); seed++) {
		struct attn_case c;
		float *want, *got;
		int mode;

		attn_case_make(&c, seed, ALL);
		want = run(kernels, &c, 0, c.m, 0);
		ck_assert(!fesetround(rounding[seed % 3]));
#if defined(__x86_64__)
		_mm_setcsr(_mm_getcsr() | 0x8040); /* denormals are zero, in and out */
#endif
		got = run(kernels, &c, 0, c.m, 0);
		mode = fegetround();
		fesetenv(FE_DFL_ENV);
		ck_assert_int_eq(mode, rounding[seed % 3]);
		same(want, got, &c, c.m, seed, "modes");
		free(want);
		free(got);
		attn_case_free(&c);
	}
}
END_TEST

/* K and V so small that every product is a denormal or less. */
START_TEST(denormals_count)
{
	const struct kvt_attn_kernels *kernels = kvt_attn_kernels(NULL);
	struct attn_case c;
	float *out;

	attn_case_make_sized(&c, 1, ATTN_PLAIN, 64, 64, 1, 3, KVT_F32, KVT_F32);
	c.lo[0] = 0;
	c.hi[0] = 3;
	for (uint64_t j = 0; j < 3; j++) {
		attn_case_fill_position(&c, j, 0);
		for (uint32_t d = 0; d < 64; d++)
			attn_encode(c.v + j * c.v_row + c.v_offset, KVT_F32, d, 0x1p-140f);
	}
#if defined(__x86_64__)
	_mm_setcsr(_mm_getcsr() | 0x8040);
#endif
	out = run(kernels, &c, 0, 1, 0);
	fesetenv(FE_DFL_ENV);
	for (uint32_t d = 0; d < 64; d++)
		ck_assert_msg(out[d] == 0x1p-140f, "%a", out[d]);
	free(out);
	attn_case_free(&c);
}
END_TEST

/* A merge into "nothing seen" is a copy, and of "nothing seen" nothing: -0 too. */
START_TEST(first_split)
{
	const struct kvt_attn_kernels *kernels = kvt_attn_kernels(NULL);
	float max[2] = { 3, 3 }, sum[2] = { 2, 2 }, acc[2][9], into_max[2], into_sum[2], into_acc[2][9];
	struct kvt_attn_state part = { max, sum, acc[0] }, into = { into_max, into_sum, into_acc[0] }, none;
	float none_max[2], none_sum[2], none_acc[2][9];

	none = (struct kvt_attn_state){ none_max, none_sum, none_acc[0] };
	kvt_attn_state_clear(&none, 2, 9);
	for (int d = 0; d < 18; d++)
		acc[d / 9][d % 9] = d % 2 ? -0.0f : 0x1p-149f;
	kvt_attn_state_clear(&into, 2, 9);
	kernels->merge(&into, &part, 2, 9);
	kernels->merge(&into, &none, 2, 9);
	ck_assert_mem_eq(into_acc, acc, sizeof(acc));
	ck_assert_mem_eq(into_max, max, sizeof(max));
	ck_assert_mem_eq(into_sum, sum, sizeof(sum));
}
END_TEST

int main(void)
{
	Suite *s = suite_create("attention_kernel_same");
	TCase *t = tcase_create("all");
	SRunner *r;
	int failed;

	tcase_set_timeout(t, 600);
	tcase_add_test(t, instruction_sets);
	tcase_add_test(t, alone);
	tcase_add_test(t, heads);
	tcase_add_test(t, modes);
	tcase_add_test(t, denormals_count);
	tcase_add_test(t, first_split);
	suite_add_tcase(s, t);
	r = srunner_create(s);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed != 0;
}
