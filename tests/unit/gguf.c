// SPDX-License-Identifier: MIT
/*
 * The GGUF reader: metadata of every type, tensors of the types it decodes
 * against published blocks, a real model, and files that lie: each count,
 * length, offset, alignment and nesting alone, with an otherwise right file.
 */
#include <check.h>
#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvtier.h"
#include "lib/weightfile.h"
#include "runtime/weights.h"

enum { U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 };

static struct kvt_weights *open_ok(const char *path)
{
	struct kvt_weights *w;

	ck_assert_msg(kvt_weights_open(path, &w) == 0, "%s", kvt_last_error());
	return w;
}

static void refuse(struct bytes *b, const char *words)
{
	struct kvt_weights *w;

	ck_assert_int_eq(kvt_weights_open(write_bytes("bad.gguf", b), &w), -EINVAL);
	ck_assert_msg(strstr(kvt_last_error(), words) != NULL, "\"%s\" lacks \"%s\"", kvt_last_error(), words);
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "bad.gguf"));
}

static void head(struct bytes *b, uint32_t version, uint64_t n_tensors, uint64_t n_meta)
{
	put_text(b, "GGUF");
	put_u32(b, version);
	put_u64(b, n_tensors);
	put_u64(b, n_meta);
}

static void key(struct bytes *b, const char *name, uint32_t type)
{
	put_gguf_text(b, name);
	put_u32(b, type);
}

static void tensor(struct bytes *b, const char *name, uint32_t rank, const uint64_t *dims, uint32_t type, uint64_t offset)
{
	put_gguf_text(b, name);
	put_u32(b, rank);
	put(b, dims, rank * sizeof(*dims));
	put_u32(b, type);
	put_u64(b, offset);
}

static void pad(struct bytes *b, size_t alignment)
{
	while (b->n % alignment)
		put(b, "", 1);
}

static uint64_t uint_of(const struct kvt_weights *w, const char *name, uint64_t index)
{
	uint64_t u = 0;

	ck_assert_int_eq(kvt_weights_uint(w, name, index, &u), 0);
	return u;
}

static double number_of(const struct kvt_weights *w, const char *name, uint64_t index)
{
	double d = 0;

	ck_assert_int_eq(kvt_weights_number(w, name, index, &d), 0);
	return d;
}

START_TEST(metadata)
{
	static const int16_t shorts[] = { -3, 4 };
	static const float floats[] = { 0.5f, -2 };
	struct bytes b = { 0 };
	struct kvt_weights *w;
	struct kvt_text text;
	uint64_t u;
	double d;

	head(&b, 3, 0, 17);
	key(&b, "u8", U8), put(&b, "\xff", 1);
	key(&b, "i8", I8), put(&b, "\xff", 1);
	key(&b, "u16", U16), put(&b, "\xff\xff", 2);
	key(&b, "i16", I16), put(&b, "\xfe\xff", 2);
	key(&b, "u32", U32), put_u32(&b, UINT32_MAX);
	key(&b, "i32", I32), put_u32(&b, -7);
	key(&b, "f32", F32), put(&b, &floats[0], 4);
	key(&b, "bool", BOOL), put(&b, "\1", 1);
	key(&b, "string", STRING), put_gguf_text(&b, "llama");
	key(&b, "u64", U64), put_u64(&b, UINT64_MAX);
	key(&b, "i64", I64), put_u64(&b, INT64_MIN);
	key(&b, "f64", F64), put(&b, &(double){ 1e300 }, 8);
	key(&b, "strings", ARRAY), put_u32(&b, STRING), put_u64(&b, 3);
	put_gguf_text(&b, ""), put_gguf_text(&b, "ab"), put_u64(&b, 3), put(&b, "c\0d", 3);
	key(&b, "shorts", ARRAY), put_u32(&b, I16), put_u64(&b, 2), put(&b, shorts, 4);
	key(&b, "floats", ARRAY), put_u32(&b, F32), put_u64(&b, 2), put(&b, floats, 8);
	key(&b, "nested", ARRAY), put_u32(&b, ARRAY), put_u64(&b, 2);
	put_u32(&b, U8), put_u64(&b, 2), put(&b, "ab", 2);
	put_u32(&b, STRING), put_u64(&b, 1), put_gguf_text(&b, "deep");
	key(&b, "last", STRING), put_gguf_text(&b, "");
	w = open_ok(write_bytes("meta.gguf", &b));
	ck_assert_uint_eq(w->format, KVT_GGUF);
	ck_assert_uint_eq(w->version, 3);

	ck_assert_uint_eq(uint_of(w, "u8", 0), 255);
	ck_assert_double_eq(number_of(w, "i8", 0), -1);
	ck_assert_int_eq(kvt_weights_uint(w, "i8", 0, &u), -EINVAL);
	ck_assert_uint_eq(uint_of(w, "u16", 0), 65535);
	ck_assert_double_eq(number_of(w, "i16", 0), -2);
	ck_assert_uint_eq(uint_of(w, "u32", 0), UINT32_MAX);
	ck_assert_double_eq(number_of(w, "i32", 0), -7);
	ck_assert_double_eq(number_of(w, "f32", 0), 0.5);
	ck_assert_uint_eq(uint_of(w, "bool", 0), 1);
	ck_assert_uint_eq(uint_of(w, "u64", 0), UINT64_MAX);
	ck_assert_double_eq(number_of(w, "i64", 0), -0x1p63);
	ck_assert_double_eq(number_of(w, "f64", 0), 1e300);
	ck_assert_int_eq(kvt_weights_text(w, "string", 0, &text), 0);
	ck_assert_str_eq(text.s, "llama");
	ck_assert_int_eq(kvt_weights_count(w, "strings"), 3);
	ck_assert_int_eq(kvt_weights_text(w, "strings", 0, &text), 0);
	ck_assert_str_eq(text.s, "");
	ck_assert_int_eq(kvt_weights_text(w, "strings", 1, &text), 0);
	ck_assert_str_eq(text.s, "ab");
	ck_assert_int_eq(kvt_weights_text(w, "strings", 2, &text), 0);
	ck_assert_uint_eq(text.len, 3);
	ck_assert_mem_eq(text.s, "c\0d", 4);
	ck_assert_int_eq(kvt_weights_text(w, "strings", 3, &text), -ERANGE);
	ck_assert_double_eq(number_of(w, "shorts", 0), -3);
	ck_assert_uint_eq(uint_of(w, "shorts", 1), 4);
	ck_assert_double_eq(number_of(w, "floats", 1), -2);
	ck_assert_int_eq(kvt_weights_text(w, "floats", 0, &text), -EINVAL);
	ck_assert_int_eq(kvt_weights_number(w, "strings", 0, &d), -EINVAL);
	ck_assert_int_eq(kvt_weights_count(w, "nested"), 0); /* walked over */
	ck_assert_int_eq(kvt_weights_text(w, "last", 0, &text), 0);
	kvt_weights_close(w);
}
END_TEST

/* As many texts as a real vocabulary has: their table moves while it grows, and the header is read in parts. */
/* Found by the fuzzer under UBSan: arrays of strings, all of them empty. */
START_TEST(empty_arrays)
{
	struct bytes b = { 0 };
	struct kvt_weights *w;
	struct kvt_text text;
	double d;

	head(&b, 3, 0, 2);
	key(&b, "strings", ARRAY), put_u32(&b, STRING), put_u64(&b, 0);
	key(&b, "shorts", ARRAY), put_u32(&b, I16), put_u64(&b, 0);
	w = open_ok(write_bytes("empty.gguf", &b));
	ck_assert_int_eq(kvt_weights_count(w, "strings"), 0);
	ck_assert_int_eq(kvt_weights_text(w, "strings", 0, &text), -ERANGE);
	ck_assert_int_eq(kvt_weights_count(w, "shorts"), 0);
	ck_assert_int_eq(kvt_weights_number(w, "shorts", 0, &d), -ERANGE);
	kvt_weights_close(w);
}
END_TEST

START_TEST(vocabulary)
{
	struct bytes b = { 0 };
	struct kvt_weights *w;
	struct kvt_text text;
	char word[32];

	head(&b, 2, 0, 2);
	for (int k = 0; k < 2; k++) {
		key(&b, k ? "merges" : "tokens", ARRAY), put_u32(&b, STRING), put_u64(&b, 150000);
		for (int i = 0; i < 150000; i++) {
			sprintf(word, "%d-%d", k, i);
			put_gguf_text(&b, word);
		}
	}
	w = open_ok(write_bytes("vocabulary.gguf", &b));
	ck_assert_uint_eq(w->version, 2);
	for (int k = 0; k < 2; k++)
		for (int i = 0; i < 150000; i++) {
			sprintf(word, "%d-%d", k, i);
			ck_assert_int_eq(kvt_weights_text(w, k ? "merges" : "tokens", i, &text), 0);
			ck_assert_str_eq(text.s, word);
		}
	kvt_weights_close(w);
}
END_TEST

START_TEST(tensors)
{
	static const uint64_t two[] = { 32, 2 }, odd[] = { 3 };
	static const uint16_t half[] = { 0x3c00, 0xc000, 0x7c00 };
	struct bytes b = { 0 };
	struct kvt_weights *w;
	const struct kvt_tensor *t;
	uint8_t q8[68];
	char type[24];
	float f[64];

	for (int i = 0; i < 68; i++)
		q8[i] = i % 34 == 0 ? 0 : i % 34 == 1 ? 0x38 : 256 - i; /* scale 0.5 */
	head(&b, 3, 4, 1);
	key(&b, "general.alignment", U32), put_u32(&b, 64);
	tensor(&b, "h", 1, odd, 1, 0);
	tensor(&b, "q", 2, two, 8, 64);
	tensor(&b, "strange", 2, two, 4711, 192);
	tensor(&b, "k", 1, (uint64_t[]){ 256 }, 12, 192);
	pad(&b, 64);
	put(&b, half, 6), pad(&b, 64);
	put(&b, q8, 68), pad(&b, 64);
	put_pattern(&b, 144, 1);
	w = open_ok(write_bytes("tensors.gguf", &b));
	t = kvt_weights_find(w, "q");
	ck_assert_uint_eq(t->dtype, KVT_DT_Q8_0);
	ck_assert_uint_eq(t->shape[0], 2); /* outermost first */
	ck_assert_uint_eq(t->shape[1], 32);
	ck_assert_uint_eq(t->bytes, 68);
	ck_assert_int_eq(kvt_tensor_read_f32(w, t, 0, 64, f), 0);
	for (int i = 0; i < 64; i++)
		ck_assert_float_eq(f[i], (int8_t)q8[i / 32 * 34 + 2 + i % 32] * 0.5f);
	ck_assert_int_eq(kvt_tensor_read_f32(w, t, 32, 32, f), 0);
	ck_assert_float_eq(f[0], (int8_t)q8[36] * 0.5f);
	ck_assert_int_eq(kvt_tensor_read_f32(w, t, 16, 32, f), -ERANGE);
	t = kvt_weights_find(w, "h");
	ck_assert_int_eq(kvt_tensor_read_f32(w, t, 0, 3, f), 0);
	ck_assert(f[0] == 1 && f[1] == -2 && isinf(f[2]));
	t = kvt_weights_find(w, "strange");
	ck_assert_uint_eq(t->bytes, 0);
	ck_assert_str_eq(kvt_tensor_type(t, type), "GGUF type 4711");
	ck_assert_int_eq(kvt_tensor_read_f32(w, t, 0, 64, f), -ENOTSUP);
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "\"strange\" is GGUF type 4711"));
	t = kvt_weights_find(w, "k");
	ck_assert_uint_eq(t->bytes, 144);
	ck_assert_int_eq(kvt_tensor_read_f32(w, t, 0, 256, f), -ENOTSUP);
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "\"k\" is Q4_K"));
	kvt_weights_close(w);
}
END_TEST

static const uint64_t eight[] = { 8 }, block_and_half[] = { 48 };

START_TEST(lies)
{
	struct bytes b = { 0 };
	struct kvt_weights *w;

	/* the file that the others are made from is right */
	head(&b, 3, 1, 1);
	key(&b, "k", U8), put(&b, "", 1);
	tensor(&b, "t", 1, eight, 0, 0), pad(&b, 32), put_pattern(&b, 32, 1);
	w = open_ok(write_bytes("bad.gguf", &b));
	kvt_weights_close(w);

	put_text(&b, "GGU"), refuse(&b, "the magic");
	put_text(&b, "GGML"), put_pattern(&b, 64, 1), refuse(&b, "does not begin with \"GGUF\"");
	put_text(&b, "version https://git-lfs.github.com/spec/v1"), refuse(&b, "git lfs pull");
	head(&b, 1, 0, 0), refuse(&b, "GGUF version 1");
	head(&b, 4, 0, 0), refuse(&b, "GGUF version 4");
	head(&b, 0x03000000, 0, 0), refuse(&b, "big-endian");
	head(&b, 3, 0, UINT64_MAX), refuse(&b, "number of metadata entries");
	head(&b, 3, UINT64_MAX, 0), refuse(&b, "number of tensors");
	head(&b, 3, 1ull << 40, 0), put_pattern(&b, 100, 1), refuse(&b, "number of tensors");

	head(&b, 3, 1, 1), put_u64(&b, UINT64_MAX), put_pattern(&b, 64, 1), refuse(&b, "a metadata key (18446744073709551615)");
	head(&b, 3, 1, 1), key(&b, "k", 13), put_pattern(&b, 64, 1), refuse(&b, "no such value type: 13");
	head(&b, 3, 1, 1), key(&b, "k", STRING), put_u64(&b, 1000), put_pattern(&b, 64, 1), refuse(&b, "a string (1000)");
	head(&b, 3, 1, 1), key(&b, "k", ARRAY), put_u32(&b, STRING), put_u64(&b, 1ull << 61), put_pattern(&b, 64, 1);
	refuse(&b, "an array's length");
	head(&b, 3, 1, 1), key(&b, "k", ARRAY), put_u32(&b, U64), put_u64(&b, (1ull << 61) + 1), put_pattern(&b, 64, 1);
	refuse(&b, "an array's length"); /* x 8 wraps to 8 */
	head(&b, 3, 1, 1), key(&b, "k", ARRAY), put_u32(&b, 99), put_u64(&b, 1), put_pattern(&b, 64, 1);
	refuse(&b, "no such value type: 99");
	head(&b, 3, 1, 1), key(&b, "k", ARRAY);
	for (int i = 0; i < 6; i++)
		put_u32(&b, ARRAY), put_u64(&b, 1);
	put_pattern(&b, 64, 1), refuse(&b, "deeper than 4");
	head(&b, 3, 0, 2), key(&b, "k", U8), put(&b, "", 1), key(&b, "k", U8), put(&b, "", 1), refuse(&b, "\"k\" comes twice");

	for (int i = 0; i < 4; i++) {
		static const uint32_t alignments[] = { 0, 3, 48, 0x80000001 };

		head(&b, 3, 1, 1), key(&b, "general.alignment", U32), put_u32(&b, alignments[i]), put_pattern(&b, 64, 1);
		refuse(&b, "not a power of two");
	}
	head(&b, 3, 1, 1), key(&b, "general.alignment", U64), put_u64(&b, 32), put_pattern(&b, 64, 1), refuse(&b, "of type u32");

	head(&b, 3, 1, 0), put_gguf_text(&b, "t"), put_u32(&b, 5), put_pattern(&b, 100, 1), refuse(&b, "5 dimensions");
	head(&b, 3, 1, 0), tensor(&b, "t", 2, (uint64_t[]){ 1ull << 32, 1ull << 32 }, 0, 0), put_pattern(&b, 64, 1);
	refuse(&b, "2^64 elements");
	head(&b, 3, 1, 0), tensor(&b, "t", 1, (uint64_t[]){ 1ull << 62 }, 0, 0), put_pattern(&b, 64, 1), refuse(&b, "2^64 bytes");
	head(&b, 3, 1, 0), tensor(&b, "t", 1, block_and_half, 2, 0), put_pattern(&b, 64, 1), refuse(&b, "not whole blocks of 32");
	head(&b, 3, 1, 0), tensor(&b, "t", 1, eight, 0, 8), pad(&b, 32), put_pattern(&b, 64, 1);
	refuse(&b, "not a multiple of the alignment");
	head(&b, 3, 1, 0), tensor(&b, "t", 1, eight, 0, 32), pad(&b, 32), put_pattern(&b, 63, 1), refuse(&b, "cut off");
	head(&b, 3, 1, 0), tensor(&b, "t", 1, eight, 0, -32ull), pad(&b, 32), put_pattern(&b, 64, 1), refuse(&b, "cut off");
	head(&b, 3, 1, 0), tensor(&b, "t", 1, eight, 0, 0), refuse(&b, "cut off");
	head(&b, 3, 2, 0), tensor(&b, "t", 1, (uint64_t[]){ 9 }, 0, 0), tensor(&b, "u", 1, eight, 0, 32), pad(&b, 32);
	put_pattern(&b, 64, 1), refuse(&b, "\"u\": overlaps tensor \"t\"");
	head(&b, 3, 2, 0), tensor(&b, "t", 1, eight, 0, 0), tensor(&b, "t", 1, eight, 0, 32), pad(&b, 32);
	put_pattern(&b, 64, 1), refuse(&b, "\"t\": the name comes twice");
}
END_TEST

/* Every prefix of a right file is refused or, past its last tensor, accepted; none crashes. */
START_TEST(cut_everywhere)
{
	struct bytes b = { 0 }, cut = { 0 };
	struct kvt_weights *w;
	int err;

	head(&b, 3, 1, 2);
	key(&b, "s", ARRAY), put_u32(&b, STRING), put_u64(&b, 2), put_gguf_text(&b, "a"), put_gguf_text(&b, "bc");
	key(&b, "n", ARRAY), put_u32(&b, U16), put_u64(&b, 3), put(&b, "123456", 6);
	tensor(&b, "t", 1, eight, 0, 0), pad(&b, 32), put_pattern(&b, 32, 1);
	for (size_t n = 0; n <= b.n; n++) {
		put(&cut, b.p, n);
		err = kvt_weights_open(write_bytes("bad.gguf", &cut), &w);
		ck_assert_int_eq(err, n < b.n ? -EINVAL : 0);
		kvt_weights_close(w);
	}
	free(b.p);
}
END_TEST

/* Quantised blocks against the values that ggml's definition gives for them. */
START_TEST(published_blocks)
{
	const char *path = input("published_blocks", "vectors/ggml_q4_0_q8_0_blocks.tsv");
	char line[4096];
	int n[2] = { 0 };
	FILE *f;

	if (!path)
		return;
	f = fopen(path, "r");
	ck_assert_ptr_nonnull(f);
	while (fgets(line, sizeof(line), f)) {
		bool q8 = !strncmp(line, "q8_0\t", 5);
		size_t bytes = q8 ? 34 : 18;
		uint8_t block[34];
		float x[32], most = 0, d;
		char *at;

		if (line[0] == '#')
			continue;
		for (size_t i = 0; i < bytes; i++)
			ck_assert_int_eq(sscanf(line + 5 + 2 * i, "%2hhx", &block[i]), 1);
		kvt_tensor_decode(q8 ? KVT_DT_Q8_0 : KVT_DT_Q4_0, block, 32, x);
		kvt_tensor_decode(KVT_DT_F16, block, 1, &d);
		at = line + 5 + 2 * bytes + 1;
		for (int i = 0; i < 32; i++) {
			int q = q8 ? (int8_t)block[2 + i] : (i < 16 ? block[2 + i] & 15 : block[2 + i - 16] >> 4) - 8;
			float in = strtof(at, &at);

			at++; /* the comma */
			ck_assert(x[i] == q * d);
			most = fmaxf(most, fabsf(in - x[i]));
		}
		/*
		 * Half a step, and what the scale loses in f16 (all of it below 2^-25); q4_0's largest positive value
		 * may be a whole step off.
		 */
		ck_assert_msg(most <= fabsf(d) * (q8 ? 0.56f : 1.01f) + 128 * 0x1p-25f, "%s: off by %a, a step is %a", line, most, d);
		n[q8]++;
	}
	fclose(f);
	ck_assert_int_gt(n[0], 5);
	ck_assert_int_gt(n[1], 5);
}
END_TEST

START_TEST(real_model)
{
	const char *path = input("real_model", "models/stories260K.gguf");
	struct kvt_weights *w, *hf;
	const struct kvt_tensor *t, *u;
	struct kvt_text text;
	uint64_t layers;
	float a[64], b[64];

	if (!path)
		return;
	w = open_ok(path);
	ck_assert_int_eq(kvt_weights_text(w, "general.architecture", 0, &text), 0);
	ck_assert_str_eq(text.s, "llama");
	ck_assert_int_eq(kvt_weights_uint(w, "llama.block_count", 0, &layers), 0);
	ck_assert_uint_eq(layers, 5);
	ck_assert_int_eq(kvt_weights_count(w, "tokenizer.ggml.tokens"), 512);
	hf = open_ok(input("real_model", "models/stories260K-hf/model.safetensors"));
	t = kvt_weights_find(w, "token_embd.weight");
	u = kvt_weights_find(hf, "model.embed_tokens.weight");
	ck_assert(t && u && t->rank == 2 && u->rank == 2);
	ck_assert_uint_eq(t->shape[0], u->shape[0]);
	ck_assert_uint_eq(t->shape[1], u->shape[1]);
	for (uint64_t i = 0; i < t->elements; i += 64) {
		ck_assert_int_eq(kvt_tensor_read_f32(w, t, i, 64, a), 0);
		ck_assert_int_eq(kvt_tensor_read_f32(hf, u, i, 64, b), 0);
		ck_assert_mem_eq(a, b, sizeof(a));
	}
	kvt_weights_close(w);
	kvt_weights_close(hf);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("gguf");
	TCase *t = tcase_create("gguf");
	SRunner *r = srunner_create(s);
	int failed;

	scratch_dir();
	tcase_set_timeout(t, 60);
	tcase_add_test(t, metadata);
	tcase_add_test(t, empty_arrays);
	tcase_add_test(t, vocabulary);
	tcase_add_test(t, tensors);
	tcase_add_test(t, lies);
	tcase_add_test(t, cut_everywhere);
	tcase_add_test(t, published_blocks);
	tcase_add_test(t, real_model);
	suite_add_tcase(s, t);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed != 0;
}
