// SPDX-License-Identifier: MIT
/*
 * Every instruction set's conversions against one written with doubles and no
 * tricks: all 16-bit patterns upwards, and downwards every exponent with the
 * mantissas at which rounding turns, and 2^24 random ones.
 */
#include <check.h>
#include <fenv.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codec/codec.h"
#include "codec/internal.h"
#include "lib/rounds.h"

static struct {
	const char *name;
	kvt_codec_convert_fn *convert;
} variants[KVT_ISAS + 1];

static int n_variants;

static void find_variants(void)
{
	variants[n_variants].name = "dispatched";
	variants[n_variants++].convert = kvt_codec_convert;
	for (enum kvt_isa isa = 0; isa < KVT_ISAS; isa++)
		if (kvt_isa_usable(isa)) {
			variants[n_variants].name = kvt_isa_name(isa);
			variants[n_variants++].convert = kvt_codec_converts[isa];
		}
}

/* ---- the reference: a 16-bit format of @mant mantissa bits and least exponent @emin ---- */

struct format {
	uint32_t codec;
	int mant, emin, emax;
	bool quiets; /* widening quiets a NaN, as the hardware does; a shift keeps all bits */
};

static const struct format f16 = { KVT_F16, 10, -14, 15, true };
static const struct format bf16 = { KVT_BF16, 7, -126, 127, false };

static uint32_t bits_of(float f)
{
	uint32_t b;

	memcpy(&b, &f, 4);
	return b;
}

static uint32_t ref_widen(const struct format *f, uint16_t h)
{
	uint32_t sign = (uint32_t)(h >> 15) << 31, mag = h & 0x7fff, top = mag >> f->mant;
	uint32_t mant = mag & ((1u << f->mant) - 1);

	if (top == (0x7fffu >> f->mant)) /* inf, NaN */
		return sign | 0x7f800000 | mant << (23 - f->mant) | (mant && f->quiets ? 0x400000 : 0);
	if (!top)
		return sign | bits_of((float)ldexp(mant, f->emin - f->mant));
	return sign | bits_of((float)ldexp(mant + (1u << f->mant), f->emin + (int)top - 1 - f->mant));
}

static uint16_t ref_narrow(const struct format *f, uint32_t x)
{
	uint32_t inf = (0x7fffu >> f->mant) << f->mant;
	uint16_t sign = x >> 16 & 0x8000;
	float value;
	double v, q;
	int e;

	memcpy(&value, &x, 4);
	if (isnan(value))
		return sign | inf | 1u << (f->mant - 1) | (x & 0x7fffff) >> (23 - f->mant);
	v = fabs((double)value);
	if (isinf(v))
		return sign | inf;
	e = v ? ilogb(v) : f->emin;
	if (e < f->emin)
		e = f->emin;
	q = rint(ldexp(v, f->mant - e)); /* to nearest even, by the default mode */
	if (q == ldexp(1, f->mant + 1)) {
		q /= 2;
		e++;
	}
	if (e > f->emax)
		return sign | inf;
	if (q < ldexp(1, f->mant))
		return sign | (uint16_t)q;
	return sign | (uint16_t)((e - f->emin + 1) << f->mant) | ((uint16_t)q - (1u << f->mant));
}

/* ---- the floats to narrow ---- */

static uint64_t rng = 0x9E3779B97F4A7C15ull;

static uint32_t rnd(void)
{
	rng ^= rng << 13;
	rng ^= rng >> 7;
	rng ^= rng << 17;
	return rng >> 32;
}

#define CHUNK 4096

static uint32_t chunk[CHUNK];
static uint16_t expect[2][CHUNK], got[CHUNK];
static uint32_t n_chunk;

static void check_chunk(void)
{
	for (int k = 0; k < 2; k++) {
		const struct format *f = k ? &bf16 : &f16;

		for (uint32_t i = 0; i < n_chunk; i++)
			expect[k][i] = ref_narrow(f, chunk[i]);
		for (int v = 0; v < n_variants; v++) {
			memset(got, 0xa5, sizeof(got));
			variants[v].convert(got, f->codec, chunk, KVT_F32, n_chunk);
			for (uint32_t i = 0; i < n_chunk; i++)
				if (got[i] != expect[k][i])
					ck_abort_msg("%s: f32 %08x to %s: %04x, not %04x", variants[v].name, chunk[i],
						     kvt_codec_name(f->codec), got[i], expect[k][i]);
		}
	}
	n_chunk = 0;
}

static void add(uint32_t x)
{
	chunk[n_chunk++] = x;
	if (n_chunk == CHUNK)
		check_chunk();
}

START_TEST(narrow_structured)
{
	for (uint32_t top = 0; top < 512; top += test_rounds(1, 1, 16)) {
		for (uint32_t a = 0; a < 2048; a++)
			for (uint32_t d = 0; d < 3; d++)
				add(top << 23 | (((a << 12) + d - 1) & 0x7fffff));
		for (uint32_t k = 0; k < 23; k++) {
			add(top << 23 | (1u << k) | 1);
			add(top << 23 | (1u << k));
			add(top << 23 | ((1u << k) - 1));
			add(top << 23 | (0x7fffff ^ ((1u << k) - 1)));
		}
	}
	check_chunk();
}
END_TEST

START_TEST(narrow_random)
{
	for (uint32_t i = test_rounds(1u << 24, 1u << 22, 1u << 20); i; i--)
		add(rnd());
	check_chunk();
}
END_TEST

static uint16_t all[65536], back[65536];
static uint32_t wide[65536];

static void fill_all(void)
{
	for (uint32_t i = 0; i < 65536; i++)
		all[i] = i;
}

START_TEST(widen_all)
{
	fill_all();
	for (int k = 0; k < 2; k++) {
		const struct format *f = k ? &bf16 : &f16;

		for (int v = 0; v < n_variants; v++) {
			memset(wide, 0xa5, sizeof(wide));
			variants[v].convert(wide, KVT_F32, all, f->codec, 65536);
			for (uint32_t i = 0; i < 65536; i++)
				if (wide[i] != ref_widen(f, i))
					ck_abort_msg("%s: %s %04x to f32: %08x, not %08x", variants[v].name,
						     kvt_codec_name(f->codec), i, wide[i], ref_widen(f, i));
		}
	}
}
END_TEST

/* Up and down gives the same bits, but for a signalling NaN, which comes back quiet. */
START_TEST(round_trip)
{
	fill_all();
	for (int k = 0; k < 2; k++) {
		const struct format *f = k ? &bf16 : &f16;
		uint32_t inf = (0x7fffu >> f->mant) << f->mant;

		for (int v = 0; v < n_variants; v++) {
			variants[v].convert(wide, KVT_F32, all, f->codec, 65536);
			variants[v].convert(back, f->codec, wide, KVT_F32, 65536);
			for (uint32_t i = 0; i < 65536; i++) {
				uint32_t want = (i & 0x7fff) > inf ? i | 1u << (f->mant - 1) : i;

				if (back[i] != want)
					ck_abort_msg("%s: %s %04x came back as %04x", variants[v].name,
						     kvt_codec_name(f->codec), i, back[i]);
			}
		}
	}
}
END_TEST

/* f16 <-> bf16 is one rounding: that of the exact f32 between them. */
START_TEST(between_halves)
{
	fill_all();
	for (int k = 0; k < 2; k++) {
		const struct format *from = k ? &bf16 : &f16, *to = k ? &f16 : &bf16;

		for (int v = 0; v < n_variants; v++) {
			variants[v].convert(back, to->codec, all, from->codec, 65536);
			for (uint32_t i = 0; i < 65536; i++)
				if (back[i] != ref_narrow(to, ref_widen(from, i)))
					ck_abort_msg("%s: %s %04x gave %04x", variants[v].name,
						     kvt_codec_name(from->codec), i, back[i]);
		}
	}
}
END_TEST

/* The caller's rounding direction and flush-to-zero modes change nothing. */
START_TEST(modes)
{
	static const int rounding[] = { FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO };
	static uint16_t want[CHUNK];

	fill_all();
	for (uint32_t i = 0; i < CHUNK; i++)
		chunk[i] = i < 1024 ? i * 0x100 : i < 2048 ? 0x33000000 + i * 0x2801 : rnd();
	for (int v = 0; v < n_variants; v++) {
		for (size_t r = 0; r < sizeof(rounding) / sizeof(rounding[0]); r++) {
			for (int k = 0; k < 2; k++) {
				const struct format *f = k ? &bf16 : &f16;

				for (uint32_t i = 0; i < CHUNK; i++)
					want[i] = ref_narrow(f, chunk[i]);
				fesetround(rounding[r]);
#if defined(__x86_64__)
				__builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | 0x8040);
#endif
				variants[v].convert(got, f->codec, chunk, KVT_F32, CHUNK);
				variants[v].convert(wide, KVT_F32, all, f->codec, 65536);
#if defined(__x86_64__)
				__builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() & ~0x8040u);
#endif
				fesetround(FE_TONEAREST);
				ck_assert_msg(!memcmp(got, want, sizeof(want)), "%s", variants[v].name);
				for (uint32_t i = 0; i < 65536; i++)
					if (wide[i] != ref_widen(f, i))
						ck_abort_msg("%s: %04x", variants[v].name, i);
			}
		}
	}
}
END_TEST

/* Every short length, from and to every alignment: the same bits as the whole, and not a byte beyond. */
START_TEST(lengths)
{
	static uint8_t src[512], dst[512], whole[512];

	for (int i = 0; i < 512; i++)
		src[i] = rnd();
	for (int v = 0; v < n_variants; v++)
		for (uint32_t st = 0; st <= KVT_BF16; st++)
			for (uint32_t dt = 0; dt <= KVT_BF16; dt++)
				for (uint32_t n = 0; n < 40; n++)
					for (uint32_t off = 0; off < 4; off++) {
						uint64_t bytes = kvt_codec_bytes(dt, n);

						for (uint32_t i = 0; i < n; i++)
							variants[v].convert(whole + kvt_codec_bytes(dt, i), dt,
									    src + off + kvt_codec_bytes(st, i), st, 1);
						memset(dst, 0xa5, sizeof(dst));
						variants[v].convert(dst + 16 + off, dt, src + off, st, n);
						ck_assert(!memcmp(dst + 16 + off, whole, bytes));
						for (uint64_t i = 0; i < sizeof(dst); i++)
							if ((i < 16 + off || i >= 16 + off + bytes) && dst[i] != 0xa5)
								ck_abort_msg("byte %d of %s", (int)i - 16 - (int)off,
									     variants[v].name);
					}
}
END_TEST

START_TEST(same_type_keeps_bits)
{
	fill_all();
	for (int v = 0; v < n_variants; v++)
		for (uint32_t t = 0; t <= KVT_BF16; t++) {
			memset(back, 0, sizeof(back));
			variants[v].convert(back, t, all, t, sizeof(all) / kvt_codec_bytes(t, 1));
			ck_assert(!memcmp(all, back, sizeof(all)));
		}
}
END_TEST

START_TEST(bytes)
{
	ck_assert_uint_eq(kvt_codec_bytes(KVT_F32, 1ull << 40), 1ull << 42);
	ck_assert_uint_eq(kvt_codec_bytes(KVT_F16, 3), 6);
	ck_assert_uint_eq(kvt_codec_bytes(KVT_BF16, 3), 6);
	ck_assert_uint_eq(kvt_codec_bytes(KVT_CODECS, 3), 0);
	ck_assert_uint_eq(kvt_codec_bytes(KVT_ENCODED, 3), 0);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("codec");
	TCase *t = tcase_create("codec");
	SRunner *r = srunner_create(s);
	int failed;

	find_variants();
	tcase_set_timeout(t, 120);
	tcase_add_test(t, widen_all);
	tcase_add_test(t, narrow_structured);
	tcase_add_test(t, narrow_random);
	tcase_add_test(t, round_trip);
	tcase_add_test(t, between_halves);
	tcase_add_test(t, modes);
	tcase_add_test(t, lengths);
	tcase_add_test(t, same_type_keeps_bits);
	tcase_add_test(t, bytes);
	suite_add_tcase(s, t);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed != 0;
}
