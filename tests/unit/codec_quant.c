// SPDX-License-Identifier: MIT
/*
 * q8_0 and q4_0 on every instruction set: the bytes that a plain transcription
 * of the format's definition gives, and those of the published blocks in
 * KVT_INPUTS; decoding exact; what the definition leaves open, as codec.h says.
 */
#include <check.h>
#include <fenv.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fpenv.h"
#include "base/half.h"
#include "codec/codec.h"
#include "codec/internal.h"
#include "lib/rounds.h"

static struct {
	const char *name;
	kvt_codec_convert_fn *convert;
} variants[KVT_ISAS + 1];

static int n_variants;

static const struct {
	uint32_t codec, bytes;
} types[] = { { KVT_Q8_0, 34 }, { KVT_Q4_0, 18 } };

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

/* ---- the definition, an element at a time; f32 arithmetic as the format prescribes ---- */

static void put_scale(uint8_t *block, float scale)
{
	uint16_t h = kvt_f16_narrow(kvt_bits_of(scale));

	memcpy(block, &h, 2);
}

static float get_scale(const uint8_t *block)
{
	uint16_t h;

	memcpy(&h, block, 2);
	return kvt_float_of(kvt_f16_widen(h));
}

static void ref_q8_0(uint8_t *block, const float *x)
{
	float most = 0, scale, inverse;

	for (int j = 0; j < 32; j++)
		most = fabsf(x[j]) > most ? fabsf(x[j]) : most;
	scale = most / 127.0f;
	inverse = scale ? 1.0f / scale : 0.0f;
	put_scale(block, scale);
	for (int j = 0; j < 32; j++)
		block[2 + j] = (uint8_t)(int8_t)roundf(x[j] * inverse);
}

static void ref_q4_0(uint8_t *block, const float *x)
{
	float most = 0, with_sign = 0, scale, inverse;

	for (int j = 0; j < 32; j++)
		if (fabsf(x[j]) > most) {
			most = fabsf(x[j]);
			with_sign = x[j];
		}
	scale = with_sign / -8.0f;
	inverse = scale ? 1.0f / scale : 0.0f;
	put_scale(block, scale);
	for (int j = 0; j < 16; j++) {
		int code[2];

		for (int half = 0; half < 2; half++) {
			code[half] = (int8_t)(x[j + 16 * half] * inverse + 8.5f);
			code[half] = code[half] > 15 ? 15 : code[half];
		}
		block[2 + j] = (uint8_t)(code[0] | code[1] << 4);
	}
}

static void ref_encode(uint32_t codec, uint8_t *block, const float *x)
{
	if (codec == KVT_Q8_0)
		ref_q8_0(block, x);
	else
		ref_q4_0(block, x);
}

static double ref_decode(uint32_t codec, const uint8_t *block, int j)
{
	int code = codec == KVT_Q8_0 ? (int8_t)block[2 + j] : (block[2 + j % 16] >> (j / 16 * 4) & 15) - 8;

	return (double)get_scale(block) * code;
}

static uint64_t rng = 0x9E3779B97F4A7C15ull;

static uint32_t rnd(void)
{
	rng ^= rng << 13;
	rng ^= rng >> 7;
	rng ^= rng << 17;
	return (uint32_t)(rng >> 32);
}

/* Groups in which rounding turns: ties, neighbours of ties, equal extremes of both signs, many scales. */
static void make_group(float *x, int how)
{
	float scale = ldexpf(1 + (float)(rnd() % 1000) / 1000, (int)(rnd() % 60) - 40);

	for (int j = 0; j < 32; j++) {
		float tie = (float)((int)(rnd() % 255) - 127) + 0.5f;

		switch (how % 4) {
		case 0:
			x[j] = scale * ((float)(int32_t)rnd() / 2147483648.0f);
			break;
		case 1: /* ties of q8_0 at scale 1 */
			x[j] = j ? tie : 127;
			break;
		case 2:
			x[j] = j ? nextafterf(tie, rnd() & 1 ? 200 : -200) : -127;
			break;
		default: /* ties of q4_0, both extremes */
			x[j] = scale * ((float)(int)(rnd() % 33) - 16) / 2;
		}
	}
}

enum { GROUPS = 37 };

START_TEST(encode_random)
{
	static float x[GROUPS * 32];
	static uint8_t want[GROUPS * 34], got[GROUPS * 34 + 16];

	for (uint32_t round = 0; round < test_rounds(500, 60, 8); round++)
		for (int t = 0; t < 2; t++) {
			uint32_t bytes = types[t].bytes;

			for (int g = 0; g < GROUPS; g++) {
				make_group(x + g * 32, (int)round + g);
				ref_encode(types[t].codec, want + g * bytes, x + g * 32);
			}
			for (int v = 0; v < n_variants; v++) {
				memset(got, 0xa5, sizeof(got));
				variants[v].convert(got, types[t].codec, x, KVT_F32, GROUPS * 32);
				for (int g = 0; g < GROUPS; g++)
					if (memcmp(got + g * bytes, want + g * bytes, bytes))
						ck_abort_msg("%s: %s: group %d of round %u", variants[v].name,
							     kvt_codec_name(types[t].codec), g, round);
				for (size_t i = GROUPS * bytes; i < sizeof(got); i++)
					ck_assert_uint_eq(got[i], 0xa5);
			}
		}
}
END_TEST

/* Every scale, and every code in every place: the product is exact, so f32 equals f64. */
START_TEST(decode_all)
{
	uint8_t block[34];
	float x[32];

	for (uint32_t scale = 0; scale < 65536; scale += test_rounds(1, 7, 61))
		for (int t = 0; t < 2; t++) {
			uint16_t h = (uint16_t)scale;

			memcpy(block, &h, 2);
			for (int j = 0; j < 32; j++)
				block[2 + j] = (uint8_t)(scale * 7 + (uint32_t)j * 37);
			for (int v = 0; v < n_variants; v++) {
				variants[v].convert(x, KVT_F32, block, types[t].codec, 32);
				for (int j = 0; j < 32; j++) {
					double want = ref_decode(types[t].codec, block, j);

					if (isnan(want) ? !isnan(x[j]) : (double)x[j] != want)
						ck_abort_msg("%s: %s: scale %04x, element %d: %g, not %g", variants[v].name,
							     kvt_codec_name(types[t].codec), scale, j, (double)x[j], want);
				}
			}
		}
}
END_TEST

START_TEST(not_finite)
{
	static const float bad[] = { NAN, -NAN, INFINITY, -INFINITY };
	float x[96], back[96];
	uint8_t got[3 * 34];

	for (int t = 0; t < 2; t++)
		for (int b = 0; b < 4; b++)
			for (int at = 0; at < 32; at++)
				for (int v = 0; v < n_variants; v++) {
					for (int j = 0; j < 96; j++)
						x[j] = (float)j;
					x[32 + at] = bad[b];
					variants[v].convert(got, types[t].codec, x, KVT_F32, 96);
					variants[v].convert(back, KVT_F32, got, types[t].codec, 96);
					for (int j = 0; j < 96; j++)
						ck_assert_int_eq(isnan(back[j]) != 0, j / 32 == 1);
					ck_assert_uint_eq(got[types[t].bytes], 0x00);
					ck_assert_uint_eq(got[types[t].bytes + 1], 0x7e);
					for (uint32_t i = 2; i < types[t].bytes; i++)
						ck_assert_uint_eq(got[types[t].bytes + i], 0);
				}
}
END_TEST

/* So small that 1 / scale overflows; so large that the f16 scale does. */
START_TEST(extremes)
{
	static const float most[] = { 0x1p-149f, 0x1p-140f, 1e-38f, 3.6e-37f, 3.8e-37f, 8e6f, 8.4e6f, 1e30f, 3e38f };
	float x[32], back[32];
	uint8_t got[34], want[34];

	for (size_t m = 0; m < sizeof(most) / sizeof(most[0]); m++)
		for (int t = 0; t < 2; t++)
			for (int v = 0; v < n_variants; v++) {
				float scale = most[m] / (types[t].codec == KVT_Q8_0 ? 127 : 8);
				bool tiny = isinf(1 / scale);

				for (int j = 0; j < 32; j++)
					x[j] = most[m] * ((float)(j - 16) / 16);
				/* the variants are called in the default environment */
				variants[v].convert(got, types[t].codec, x, KVT_F32, 32);
				if (!tiny) {
					ref_encode(types[t].codec, want, x);
					ck_assert_msg(!memcmp(got, want, types[t].bytes), "%s: %g", variants[v].name,
						      (double)most[m]);
					continue;
				}
				variants[v].convert(back, KVT_F32, got, types[t].codec, 32);
				for (int j = 0; j < 32; j++)
					ck_assert(back[j] == 0);
			}
}
END_TEST

/* The caller's rounding direction and flush-to-zero modes change nothing. */
START_TEST(modes)
{
	static const int rounding[] = { FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO };
	static float x[GROUPS * 32];
	static uint8_t want[GROUPS * 34], got[GROUPS * 34];

	for (int t = 0; t < 2; t++) {
		for (int g = 0; g < GROUPS; g++) {
			make_group(x + g * 32, g);
			if (g % 5 == 0)
				for (int j = 0; j < 32; j++)
					x[g * 32 + j] = ldexpf(x[g * 32 + j], -110); /* denormals */
		}
		kvt_codec_convert(want, types[t].codec, x, KVT_F32, GROUPS * 32);
		for (size_t r = 0; r < sizeof(rounding) / sizeof(rounding[0]); r++) {
			fesetround(rounding[r]);
#if defined(__x86_64__)
			__builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | 0x8040);
#endif
			kvt_codec_convert(got, types[t].codec, x, KVT_F32, GROUPS * 32);
#if defined(__x86_64__)
			__builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() & ~0x8040u);
#endif
			ck_assert_int_eq(fegetround(), rounding[r]);
			fesetround(FE_TONEAREST);
			ck_assert(!memcmp(got, want, GROUPS * types[t].bytes));
		}
	}
}
END_TEST

/* f16 and bf16 to a quantised type, and between the two quantised ones, is what going through f32 gives. */
START_TEST(through_f32)
{
	static float x[GROUPS * 32], wide[GROUPS * 32];
	static uint8_t from[GROUPS * 32 * 4], want[GROUPS * 32 * 4], got[GROUPS * 32 * 4];

	for (int g = 0; g < GROUPS; g++)
		make_group(x + g * 32, g);
	for (uint32_t a = 0; a < KVT_CODECS; a++)
		for (uint32_t b = 0; b < KVT_CODECS; b++)
			for (int v = 0; v < n_variants; v++) {
				uint64_t bytes = kvt_codec_bytes(b, GROUPS * 32);

				if (a == b)
					continue;
				variants[v].convert(from, a, x, KVT_F32, GROUPS * 32);
				variants[v].convert(wide, KVT_F32, from, a, GROUPS * 32);
				variants[v].convert(want, b, wide, KVT_F32, GROUPS * 32);
				variants[v].convert(got, b, from, a, GROUPS * 32);
				ck_assert(!memcmp(got, want, bytes));
			}
}
END_TEST

static int hex(int c)
{
	return c <= '9' ? c - '0' : c - 'a' + 10;
}

START_TEST(published_blocks)
{
	const char *inputs = getenv("KVT_INPUTS");
	char path[4096], line[4096];
	int n = 0;
	FILE *f;

	snprintf(path, sizeof(path), "%s/vectors/ggml_q4_0_q8_0_blocks.tsv", inputs ? inputs : "");
	f = inputs ? fopen(path, "r") : NULL;
	if (!f) {
		printf("SKIP: published_blocks: no ggml_q4_0_q8_0_blocks.tsv under KVT_INPUTS\n");
		return;
	}
	while (fgets(line, sizeof(line), f)) {
		int t = !strncmp(line, "q4_0\t", 5);
		uint8_t want[34], got[34];
		char *p = line + 5;
		float x[32];

		if (line[0] != 'q')
			continue;
		for (uint32_t i = 0; i < types[t].bytes; i++, p += 2)
			want[i] = (uint8_t)(hex(p[0]) << 4 | hex(p[1]));
		for (int j = 0; j < 32; j++)
			x[j] = strtof(p + 1, &p);
		for (int v = 0; v < n_variants; v++) {
			variants[v].convert(got, types[t].codec, x, KVT_F32, 32);
			ck_assert_msg(!memcmp(got, want, types[t].bytes), "%s: block %d", variants[v].name, n);
		}
		n++;
	}
	fclose(f);
	ck_assert_int_gt(n, 10);
}
END_TEST

START_TEST(sizes)
{
	ck_assert_uint_eq(kvt_codec_bytes(KVT_Q8_0, 64), 68);
	ck_assert_uint_eq(kvt_codec_bytes(KVT_Q4_0, 1ull << 40), (1ull << 35) * 18);
	ck_assert_uint_eq(kvt_codec_group(KVT_F16), 1);
	ck_assert_uint_eq(kvt_codec_group(KVT_Q4_0), 32);
	ck_assert_uint_eq(kvt_codec_group(KVT_CODECS), 0);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("codec_quant");
	TCase *t = tcase_create("codec_quant");
	SRunner *r = srunner_create(s);
	int failed;

	find_variants();
	tcase_set_timeout(t, 120);
	tcase_add_test(t, encode_random);
	tcase_add_test(t, decode_all);
	tcase_add_test(t, not_finite);
	tcase_add_test(t, extremes);
	tcase_add_test(t, modes);
	tcase_add_test(t, through_f32);
	tcase_add_test(t, published_blocks);
	tcase_add_test(t, sizes);
	suite_add_tcase(s, t);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed != 0;
}
