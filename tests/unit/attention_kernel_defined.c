// SPDX-License-Identifier: MIT
/* Each result that is defined rather than computed, on every instruction set. */
#include <check.h>
#include <math.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/half.h"
#include "lib/attn_case.h"

#define DIM 40
#define ROWS 7
#define POSITIONS 600
#define NOT_A_NUMBER 0x7fc00000u

static const char *const isas[] = { "portable", "neon", "avx2", "avx512" };
#define ISAS (int)(sizeof(isas) / sizeof(*isas))

static struct attn_case c;
static float mask[ROWS][POSITIONS], sinks[ROWS], slope[ROWS], out[ROWS][DIM];

/* Unit normal rows that see everything. */
static void setup(void)
{
	attn_case_make_sized(&c, 7, ATTN_PLAIN, DIM, DIM, ROWS, POSITIONS, KVT_F32, KVT_F32);
	memset(mask, 0, sizeof(mask));
	for (int i = 0; i < ROWS; i++) {
		c.lo[i] = 0;
		c.hi[i] = POSITIONS;
		c.pos[i] = POSITIONS - 1;
		sinks[i] = -INFINITY;
		slope[i] = 0;
	}
	c.shape.mask_type = KVT_F32;
}

static void teardown(void)
{
	attn_case_free(&c);
}

static const struct kvt_attn_kernels *kernels_of(int isa)
{
	return kvt_attn_kernels(isas[isa]);
}

static void run(int isa)
{
	ck_assert(attn_case_run(kernels_of(isa), &c, 0, ROWS, 0, out[0]));
}

static void is_all(int row, uint32_t bits)
{
	for (int d = 0; d < DIM; d++)
		ck_assert_msg(kvt_bits_of(out[row][d]) == bits, "row %d dim %d: %08x", row, d, kvt_bits_of(out[row][d]));
}

static void is_finite(int row)
{
	for (int d = 0; d < DIM; d++)
		ck_assert_msg(isfinite(out[row][d]) && out[row][d] != 0, "row %d dim %d: %g", row, d, out[row][d]);
}

static void k_set(int position, int dim, float f)
{
	attn_encode(c.k + position * c.k_row + c.k_offset, KVT_F32, dim, f);
}

static void v_set(int position, int dim, float f)
{
	attn_encode(c.v + position * c.v_row + c.v_offset, KVT_F32, dim, f);
}

START_TEST(sees_nothing)
{
	if (!kernels_of(_i))
		return;
	c.lo[0] = c.hi[0] = 0; /* empty */
	c.lo[1] = 300, c.hi[1] = 200;
	c.lo[2] = c.hi[2] = POSITIONS;
	c.lo[3] = POSITIONS, c.hi[3] = POSITIONS + 1000; /* beyond */
	c.mask = (uint8_t *)mask;
	for (int j = 0; j < POSITIONS; j++)
		mask[4][j] = -INFINITY;
	run(_i);
	for (int i = 0; i < 5; i++)
		is_all(i, 0);
	is_finite(5);
	c.sinks = sinks; /* whatever the sink is */
	sinks[0] = 5;
	sinks[1] = NAN;
	sinks[2] = INFINITY;
	run(_i);
	for (int i = 0; i < 5; i++)
		is_all(i, 0);
}
END_TEST

START_TEST(one_position)
{
	if (!kernels_of(_i))
		return;
	c.lo[0] = 63, c.hi[0] = 64;
	c.lo[1] = 64, c.hi[1] = 65;
	c.lo[2] = 599, c.hi[2] = 5000;
	run(_i);
	ck_assert_mem_eq(out[0], c.v + 63 * c.v_row + c.v_offset, DIM * 4);
	ck_assert_mem_eq(out[1], c.v + 64 * c.v_row + c.v_offset, DIM * 4);
	ck_assert_mem_eq(out[2], c.v + 599 * c.v_row + c.v_offset, DIM * 4);
	is_finite(3);
}
END_TEST

/* In every split and tile, before and after finite scores. */
START_TEST(score_nan_or_inf)
{
	static const uint32_t bad[] = { 0x7f800000, 0x7fc00000, 0xffc00001, 0x7f800001 };
	static const int at[] = { 0, 70, 256, 599 };

	if (!kernels_of(_i))
		return;
	c.mask = (uint8_t *)mask;
	for (int b = 0; b < 4; b++) {
		for (int a = 0; a < 4; a++) {
			mask[1][at[a]] = kvt_float_of(bad[b]);
			c.q[3 * DIM + 5] = NAN;
			run(_i);
			is_finite(0);
			is_all(1, NOT_A_NUMBER);
			is_finite(2);
			is_all(3, NOT_A_NUMBER);
			mask[1][at[a]] = 0;
		}
	}
	/* through K: +inf or -inf by the query's sign, NaN where it is 0 */
	k_set(100, 3, INFINITY);
	for (int i = 0; i < ROWS; i++)
		c.q[i * DIM + 3] = i % 2 ? 1 : -1;
	c.q[4 * DIM + 3] = 0;
	run(_i);
	is_finite(0);
	is_all(1, NOT_A_NUMBER);
	is_finite(2);
	is_all(4, NOT_A_NUMBER);
}
END_TEST

/* A score of -inf is as if the position were not seen, V's bytes included. */
START_TEST(score_minus_inf)
{
	float want[ROWS][DIM];

	if (!kernels_of(_i))
		return;
	for (int i = 0; i < ROWS; i++) {
		mask[i][100] = -INFINITY;
		c.q[i * DIM + 3] = 1;
	}
	c.mask = (uint8_t *)mask;
	run(_i);
	memcpy(want, out, sizeof(want));
	c.mask = NULL;
	k_set(100, 3, -INFINITY);
	for (int d = 0; d < DIM; d++)
		v_set(100, d, NAN);
	run(_i);
	ck_assert_mem_eq(out, want, sizeof(want));
	is_finite(0);
	/* all of them: zeros, with a sink too */
	for (int j = 0; j < POSITIONS; j++)
		k_set(j, 3, -INFINITY);
	c.sinks = sinks;
	sinks[1] = 3;
	run(_i);
	for (int i = 0; i < ROWS; i++)
		is_all(i, 0);
}
END_TEST

/* A NaN in V is one dimension's business, and comes out in one form. */
START_TEST(value_nan)
{
	if (!kernels_of(_i))
		return;
	v_set(100, 3, kvt_float_of(0xffc12345));
	v_set(100, 4, INFINITY);
	v_set(101, 4, -INFINITY);
	run(_i);
	for (int i = 0; i < ROWS; i++) {
		ck_assert_uint_eq(kvt_bits_of(out[i][3]), NOT_A_NUMBER);
		ck_assert_uint_eq(kvt_bits_of(out[i][4]), NOT_A_NUMBER);
		out[i][3] = out[i][4] = 1;
		is_finite(i);
	}
}
END_TEST

START_TEST(sink)
{
	float plain[ROWS][DIM];

	if (!kernels_of(_i))
		return;
	run(_i);
	memcpy(plain, out, sizeof(plain));
	c.sinks = sinks;
	sinks[1] = 1e30f; /* takes all */
	sinks[2] = NAN;
	sinks[3] = INFINITY;
	sinks[4] = -1e30f; /* takes nothing */
	sinks[5] = 4;
	run(_i);
	ck_assert_mem_eq(out[0], plain[0], sizeof(out[0]));
	for (int d = 0; d < DIM; d++)
		ck_assert(out[1][d] == 0);
	is_all(2, NOT_A_NUMBER);
	is_all(3, NOT_A_NUMBER);
	ck_assert_mem_eq(out[4], plain[4], sizeof(out[4]));
	for (int d = 0; d < DIM; d++)
		ck_assert(fabsf(out[5][d]) < fabsf(plain[5][d]));
}
END_TEST

/* -inf hides a position before the slope multiplies it, even by 0 or a negative slope; f16 masks too. */
START_TEST(mask_and_slope)
{
	uint8_t half[ROWS * POSITIONS * 2];
	float want[ROWS][DIM];

	if (!kernels_of(_i))
		return;
	for (int i = 0; i < ROWS; i++) {
		slope[i] = i % 2 ? 0 : -1;
		for (int j = 0; j < POSITIONS; j += 3)
			mask[i][j] = -INFINITY;
	}
	c.mask = (uint8_t *)mask;
	run(_i);
	memcpy(want, out, sizeof(want));
	c.slope = slope;
	run(_i);
	ck_assert_mem_eq(out, want, sizeof(want));
	is_finite(0);
	for (int j = 0; j < ROWS * POSITIONS; j++)
		attn_encode(half, KVT_F16, j, mask[j / POSITIONS][j % POSITIONS]);
	c.shape.mask_type = KVT_F16;
	c.mask = half;
	run(_i);
	ck_assert_mem_eq(out, want, sizeof(want));
}
END_TEST

/* Without a mask the bias is slope * (j - pos), also far beyond 2^31. */
START_TEST(slope_distance)
{
	float want[ROWS][DIM];

	if (!kernels_of(_i))
		return;
	for (int i = 0; i < ROWS; i++) {
		slope[i] = 0.25f;
		c.pos[i] = 40 * i;
		for (int j = 0; j < POSITIONS; j++)
			mask[i][j] = (float)(j - 40 * i);
	}
	c.slope = slope;
	c.mask = (uint8_t *)mask;
	run(_i);
	memcpy(want, out, sizeof(want));
	c.mask = NULL;
	run(_i);
	ck_assert_mem_eq(out, want, sizeof(want));
	for (int i = 0; i < ROWS; i++)
		c.pos[i] = 1ull << 40; /* every score is the same to f32 */
	run(_i);
	for (int d = 0; d < DIM; d++) {
		double mean = 0;

		for (int j = 0; j < POSITIONS; j++)
			mean += attn_decode(c.v + j * c.v_row + c.v_offset, KVT_F32, d) / POSITIONS;
		ck_assert_msg(fabs(out[0][d] - mean) < 1e-5, "dim %d: %g, %g expected", d, out[0][d], mean);
	}
}
END_TEST

/* Mask elements outside [lo, hi) are not read: they lie on pages that cannot be. */
START_TEST(mask_edges)
{
	const size_t page = (size_t)sysconf(_SC_PAGESIZE);
	uint8_t *p = mmap(NULL, 3 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (!kernels_of(_i))
		return;
	ck_assert(p != MAP_FAILED);
	ck_assert(!mprotect(p, page, PROT_NONE));
	ck_assert(!mprotect(p + 2 * page, page, PROT_NONE));
	for (uint32_t type = KVT_F32; type <= KVT_F16; type++) {
		size_t e = type == KVT_F32 ? 4 : 2;

		c.shape.mask_type = type;
		c.lo[0] = 3;
		c.hi[0] = 597;
		c.mask = p + page - 3 * e;
		ck_assert(attn_case_run(kernels_of(_i), &c, 0, 1, 0, out[0]));
		is_finite(0);
		c.mask = p + 2 * page - 597 * e;
		ck_assert(attn_case_run(kernels_of(_i), &c, 0, 1, 0, out[0]));
		is_finite(0);
	}
	munmap(p, 3 * page);
}
END_TEST

/* A soft-cap bounds a score of +inf; near 0 it changes nothing. */
START_TEST(soft_cap)
{
	float plain[ROWS][DIM];

	if (!kernels_of(_i))
		return;
	run(_i);
	memcpy(plain, out, sizeof(plain));
	c.shape.softcap = 1e6f;
	run(_i);
	for (int i = 0; i < ROWS; i++) {
		for (int d = 0; d < DIM; d++)
			ck_assert(fabsf(out[i][d] - plain[i][d]) < 1e-5f);
	}
	c.shape.softcap = 5;
	for (int i = 0; i < ROWS; i++)
		c.q[i * DIM + 3] = 1;
	k_set(100, 3, INFINITY);
	k_set(101, 3, -INFINITY);
	c.q[2 * DIM + 7] = NAN;
	run(_i);
	is_finite(0);
	is_all(2, NOT_A_NUMBER);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("attention_kernel_defined");
	TCase *t = tcase_create("all");
	SRunner *r;
	int failed;

	tcase_add_checked_fixture(t, setup, teardown);
	tcase_add_loop_test(t, sees_nothing, 0, ISAS);
	tcase_add_loop_test(t, one_position, 0, ISAS);
	tcase_add_loop_test(t, score_nan_or_inf, 0, ISAS);
	tcase_add_loop_test(t, score_minus_inf, 0, ISAS);
	tcase_add_loop_test(t, value_nan, 0, ISAS);
	tcase_add_loop_test(t, sink, 0, ISAS);
	tcase_add_loop_test(t, mask_and_slope, 0, ISAS);
	tcase_add_loop_test(t, slope_distance, 0, ISAS);
	tcase_add_loop_test(t, mask_edges, 0, ISAS);
	tcase_add_loop_test(t, soft_cap, 0, ISAS);
	suite_add_tcase(s, t);
	r = srunner_create(s);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed != 0;
}
