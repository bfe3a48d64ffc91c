// SPDX-License-Identifier: MIT
/*
 * The block digest: published test values of XXH3, equal on every instruction
 * set, composed from rows, and changed by whatever may happen to rows.
 */
#include <check.h>
#include <stdlib.h>
#include <string.h>

#include "codec/codec.h"
#include "codec/internal.h"

#define ROWS 40

static struct {
	const char *name;
	kvt_rows_digest_fn *digest;
} variants[KVT_ISAS + 1];

static int n_variants;

static void find_variants(void)
{
	variants[n_variants].name = "dispatched";
	variants[n_variants++].digest = kvt_rows_digest;
	for (enum kvt_isa isa = 0; isa < KVT_ISAS; isa++)
		if (kvt_isa_usable(isa)) {
			variants[n_variants].name = kvt_isa_name(isa);
			variants[n_variants++].digest = kvt_rows_digests[isa];
		}
}

static uint8_t data[ROWS * 4096 + 64];

static void fill(void)
{
	uint64_t x = 88172645463325252ull;

	for (size_t i = 0; i < sizeof(data); i++) {
		x ^= x << 13;
		x ^= x >> 7;
		x ^= x << 17;
		data[i] = x >> 24;
	}
}

static uint64_t mix(uint64_t xxh3, uint32_t row)
{
	uint64_t h = xxh3 + ((uint64_t)row + 1) * 0x9E3779B97F4A7C15ull;

	h = (h ^ h >> 33) * 0xC2B2AE3D27D4EB4Full;
	h = (h ^ h >> 29) * 0x165667B19E3779F9ull;
	return h ^ h >> 32;
}

/*
 * xxHash's own sanity values (XXH3_64bits, seed 0) over its test bytes: the top
 * bytes of a multiplicative generator.
 */
START_TEST(published_values)
{
	static const struct {
		uint32_t bytes;
		uint64_t hash;
	} known[] = {
		{ 1, 0xC44BDFF4074EECDBull },	{ 6, 0x27B56A84CD2D7325ull },	{ 12, 0xA713DAF0DFBB77E7ull },
		{ 24, 0xA3FE70BF9D3510EBull },	{ 48, 0x397DA259ECBA1F11ull },	{ 80, 0xBCDEFBBB2C47C90Aull },
		{ 195, 0xCD94217EE362EC3Aull }, { 403, 0xCDEB804D65C6DEA4ull }, { 512, 0x617E49599013CB6Bull },
		{ 2048, 0xDD59E2C3A5F038E0ull }, { 2240, 0x6E73A90539CF2948ull }, { 2367, 0xCB37AEB9E5D361EDull },
	};
	static uint8_t bytes[2367];
	uint64_t g = 2654435761u;

	for (size_t i = 0; i < sizeof(bytes); i++) {
		bytes[i] = g >> 56;
		g *= 11400714785074694797ull;
	}
	for (size_t k = 0; k < sizeof(known) / sizeof(known[0]); k++)
		for (int v = 0; v < n_variants; v++)
			ck_assert_msg(variants[v].digest(7, 1, bytes, known[k].bytes) == mix(known[k].hash, 7),
				      "%s, %u bytes", variants[v].name, known[k].bytes);
}
END_TEST

START_TEST(variants_agree)
{
	fill();
	for (uint32_t bytes = 1; bytes <= 1300; bytes++)
		for (int v = 1; v < n_variants; v++)
			ck_assert_msg(variants[v].digest(bytes, 5, data + bytes % 16, bytes) ==
					      kvt_rows_digest(bytes, 5, data + bytes % 16, bytes),
				      "%s, %u bytes", variants[v].name, bytes);
	for (uint32_t bytes = 1300; bytes <= 4096; bytes += 36)
		for (int v = 1; v < n_variants; v++)
			ck_assert_msg(variants[v].digest(3, ROWS, data, bytes) == kvt_rows_digest(3, ROWS, data, bytes),
				      "%s, %u bytes", variants[v].name, bytes);
}
END_TEST

START_TEST(composes)
{
	uint64_t sum = 0;

	fill();
	for (uint32_t r = 0; r < ROWS; r++) {
		sum += kvt_row_digest(r, data + r * 256, 256);
		ck_assert_uint_eq(sum, kvt_rows_digest(0, r + 1, data, 256));
		ck_assert_uint_eq(sum, kvt_rows_digest(0, r / 2, data, 256) +
					       kvt_rows_digest(r / 2, r + 1 - r / 2, data + r / 2 * 256, 256));
	}
	ck_assert_uint_eq(kvt_rows_digest(0, 0, data, 256), 0);
	for (uint32_t i = 0; i < 3; i++)
		memcpy(data + i * 256, data + 3 * 256, 256);
	ck_assert_uint_eq(kvt_equal_rows_digest(7, 4, kvt_row_hash(data, 256)), kvt_rows_digest(7, 4, data, 256));
}
END_TEST

/* A row written over: take its old digest away, add the new one. */
START_TEST(overwrite)
{
	uint64_t d;

	fill();
	d = kvt_rows_digest(0, ROWS, data, 256) - kvt_row_digest(9, data + 9 * 256, 256);
	memset(data + 9 * 256, 0, 256);
	ck_assert_uint_eq(d + kvt_row_digest(9, data + 9 * 256, 256), kvt_rows_digest(0, ROWS, data, 256));
}
END_TEST

static void swap_rows(uint32_t a, uint32_t b, uint32_t bytes)
{
	uint8_t tmp[4096];

	memcpy(tmp, data + a * bytes, bytes);
	memcpy(data + a * bytes, data + b * bytes, bytes);
	memcpy(data + b * bytes, tmp, bytes);
}

START_TEST(any_swap_shows)
{
	uint64_t d;

	fill();
	d = kvt_rows_digest(0, ROWS, data, 64);
	for (uint32_t a = 0; a < ROWS; a++)
		for (uint32_t b = a + 1; b < ROWS; b++) {
			swap_rows(a, b, 64);
			ck_assert_msg(kvt_rows_digest(0, ROWS, data, 64) != d, "rows %u and %u", a, b);
			swap_rows(a, b, 64);
		}
}
END_TEST

/* Rows one place up or down, one row fewer, rows of another size. */
START_TEST(any_shift_shows)
{
	uint64_t d;

	fill();
	d = kvt_rows_digest(0, ROWS - 1, data, 256);
	ck_assert(d != kvt_rows_digest(1, ROWS - 1, data, 256));
	ck_assert(d != kvt_rows_digest(0, ROWS - 1, data + 256, 256));
	ck_assert(d != kvt_rows_digest(0, ROWS - 2, data, 256));
	ck_assert(d != kvt_rows_digest(0, ROWS, data, 256));
	ck_assert(d != kvt_rows_digest(0, (ROWS - 1) / 3, data, 768));
}
END_TEST

/* Rows of zeros count: their number, their place and their size. */
START_TEST(zero_rows_show)
{
	static const uint8_t zeros[ROWS * 256];
	uint64_t seen[ROWS + 1];

	for (uint32_t n = 0; n <= ROWS; n++) {
		seen[n] = kvt_rows_digest(0, n, zeros, 256);
		for (uint32_t m = 0; m < n; m++)
			ck_assert(seen[m] != seen[n]);
	}
	ck_assert(kvt_row_digest(0, zeros, 256) != kvt_row_digest(1, zeros, 256));
	ck_assert(kvt_rows_digest(0, 4, zeros, 256) != kvt_rows_digest(0, 4, zeros, 128));
}
END_TEST

START_TEST(any_bit_shows)
{
	static const uint32_t sizes[] = { 8, 16, 64, 128, 200, 240, 256, 512, 1088, 2048 };

	fill();
	for (size_t k = 0; k < sizeof(sizes) / sizeof(sizes[0]); k++) {
		uint64_t d = kvt_rows_digest(0, 3, data, sizes[k]);

		for (uint32_t bit = 0; bit < 3 * sizes[k] * 8; bit++) {
			data[bit / 8] ^= 1u << bit % 8;
			ck_assert_msg(kvt_rows_digest(0, 3, data, sizes[k]) != d, "bit %u of 3 rows of %u bytes", bit,
				      sizes[k]);
			data[bit / 8] ^= 1u << bit % 8;
		}
	}
}
END_TEST

int main(void)
{
	Suite *s = suite_create("digest");
	TCase *t = tcase_create("digest");
	SRunner *r = srunner_create(s);
	int failed;

	find_variants();
	tcase_set_timeout(t, 60);
	tcase_add_test(t, published_values);
	tcase_add_test(t, variants_agree);
	tcase_add_test(t, composes);
	tcase_add_test(t, overwrite);
	tcase_add_test(t, any_swap_shows);
	tcase_add_test(t, any_shift_shows);
	tcase_add_test(t, zero_rows_show);
	tcase_add_test(t, any_bit_shows);
	suite_add_tcase(s, t);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed != 0;
}
