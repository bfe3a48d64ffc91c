// SPDX-License-Identifier: MIT
/*
 * Tokenizers: bytes, and SentencePiece BPE against the slow way of saying it;
 * every text comes back, whatever its bytes; bad files are refused.
 */
#include <check.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "engines/ref/engine.h"
#include "lib/rounds.h"
#include "lib/weightfile.h"

static const struct ref_config byte_config = { .vocab = 260, .bos = 256, .n_eos = 1, .eos = { 257 } };

/* <unk>, BOS, EOS, 256 bytes, then these; the score falls with the id, but for two that are equal. */
static const char *const words[] = { " ", "a", "b", "c", "\xc3\xa9", "ab", " a", "bc", "abc", " ab", "cc", "  ", "" };

#define WORDS (sizeof(words) / sizeof(words[0]))
#define VOCAB (259 + WORDS)

static const struct ref_config piece_config = { .vocab = VOCAB, .bos = 1, .n_eos = 1, .eos = { 2 } };

static float score(uint32_t id)
{
	return id < 259 ? 0 : id == 259 + 7 ? -(float)(id - 1) : -(float)id;
}

static void piece(uint32_t id, char text[16])
{
	static const char *const special[] = { "<unk>", "<s>", "</s>" };

	if (id < 3)
		snprintf(text, 16, "%s", special[id]);
	else if (id < 259)
		snprintf(text, 16, "<0x%02X>", id - 3);
	else
		snprintf(text, 16, "%s", words[id - 259]);
}

static const char *bin_file(const char *name)
{
	struct bytes b = { 0 };
	char text[16];
	float f;

	put_u32(&b, 16);
	for (uint32_t id = 0; id < VOCAB; id++) {
		piece(id, text);
		f = score(id);
		put(&b, &f, 4);
		put_u32(&b, (uint32_t)strlen(text));
		put_text(&b, text);
	}
	return write_bytes(name, &b);
}

/* As SentencePiece writes them: U+2581 for a space. */
static const char *json_file(const char *name)
{
	struct bytes b = { 0 };
	char text[16], line[64];

	put_text(&b, "{\"tokens\":[");
	for (uint32_t id = 0; id < VOCAB; id++) {
		piece(id, text);
		put_text(&b, id ? ",\"" : "\"");
		for (const char *s = text; *s; s++) {
			snprintf(line, sizeof(line), "%c", *s);
			put_text(&b, *s == ' ' ? "\\u2581" : line);
		}
		put_text(&b, "\"");
	}
	put_text(&b, "],\"scores\":[");
	for (uint32_t id = 0; id < VOCAB; id++) {
		snprintf(line, sizeof(line), "%s%.1f", id ? "," : "", (double)score(id));
		put_text(&b, line);
	}
	put_text(&b, "],\"types\":[");
	for (uint32_t id = 0; id < VOCAB; id++) {
		snprintf(line, sizeof(line), "%s%d", id ? "," : "", id == 0 ? 2 : id < 3 ? 3 : id < 259 ? 6 : 1);
		put_text(&b, line);
	}
	put_text(&b, "]}");
	return write_bytes(name, &b);
}

static struct ref_tokenizer *load(const char *path, const struct ref_config *c)
{
	struct ref_tokenizer *t;

	ck_assert_msg(ref_tokenizer_load(path, c, &t) == 0, "%s", kvt_last_error());
	return t;
}

static void check_round_trip(const struct ref_tokenizer *t, const char *text, size_t bytes)
{
	uint32_t *ids, n, at = 0;
	char *back = malloc(bytes + 1);
	size_t len;

	ck_assert_int_eq(ref_encode(t, text, bytes, &ids, &n), 0);
	for (uint32_t i = 1; i < n; i++) {
		const char *s = ref_decode(t, ids[i - 1], ids[i], &len);

		ck_assert(at + len <= bytes);
		memcpy(back + at, s, len);
		at += (uint32_t)len;
	}
	ck_assert_uint_eq(at, bytes);
	ck_assert_mem_eq(back, text, bytes);
	free(ids);
	free(back);
}

START_TEST(bytes)
{
	struct ref_tokenizer *t = load(NULL, &byte_config);
	uint32_t *ids, n;
	char all[256];
	size_t len;

	for (int i = 0; i < 256; i++)
		all[i] = (char)i;
	ck_assert_int_eq(ref_encode(t, all, 256, &ids, &n), 0);
	ck_assert_uint_eq(n, 257);
	ck_assert_uint_eq(ids[0], 256);
	for (uint32_t i = 0; i < 256; i++)
		ck_assert_uint_eq(ids[i + 1], i);
	free(ids);
	check_round_trip(t, all, 256);
	ck_assert_int_eq(ref_encode(t, "", 0, &ids, &n), 0);
	ck_assert_uint_eq(n, 1);
	free(ids);
	ref_decode(t, 0, 257, &len);
	ck_assert_uint_eq(len, 0);
	ref_decode(t, 0, UINT32_MAX, &len);
	ck_assert_uint_eq(len, 0);
	ref_tokenizer_free(t);
}
END_TEST

/* The piece with this text; VOCAB if there is none. */
static uint32_t word(const char *text, size_t bytes)
{
	uint32_t id = 259;

	while (id < VOCAB && (strlen(words[id - 259]) != bytes || memcmp(words[id - 259], text, bytes)))
		id++;
	return id;
}

/* The definition: while a neighbouring pair is a piece, join the best-scored, the leftmost of equals. */
static uint32_t slow_encode(const char *bare, size_t bytes, uint32_t *ids)
{
	size_t begin[129], at = 0;
	uint32_t n = 0, out = 0, best, best_id, id;
	char text[128] = " ";

	memcpy(text + 1, bare, bytes++);
	for (; at < bytes; at += 1 + !memcmp(text + at, "\xc3\xa9", 2))
		begin[n++] = at;
	begin[n] = bytes;
	do {
		best = UINT32_MAX;
		best_id = 0;
		for (uint32_t i = 0; i + 1 < n; i++) {
			id = word(text + begin[i], begin[i + 2] - begin[i]);
			if (id < VOCAB && (best == UINT32_MAX || score(id) > score(best_id))) {
				best = i;
				best_id = id;
			}
		}
		if (best != UINT32_MAX)
			memmove(begin + best + 1, begin + best + 2, (n-- - best - 1) * sizeof(begin[0]));
	} while (best != UINT32_MAX);
	for (uint32_t i = 0; i < n; i++) {
		id = word(text + begin[i], begin[i + 1] - begin[i]);
		if (id < VOCAB)
			ids[out++] = id;
		for (at = begin[i]; id == VOCAB && at < begin[i + 1]; at++)
			ids[out++] = 3 + (uint8_t)text[at];
	}
	return out;
}

START_TEST(pieces_as_defined)
{
	static const char *const letters[] = { "a", "b", "c", " ", "\xc3\xa9", "x" };
	struct ref_tokenizer *bin = load(bin_file("t.bin"), &piece_config), *json = load(json_file("t.json"), &piece_config);
	uint32_t want[256], *ids, n, seed = 7;
	char text[128];

	for (uint32_t round = test_rounds(3000, 1500, 300); round; round--) {
		size_t len = 0;

		for (uint32_t letter = 0; letter < 1 + seed % 30; letter++) {
			seed = seed * 1664525u + 1013904223u;
			len += (size_t)sprintf(text + len, "%s", letters[(seed >> 16) % 6]);
		}
		want[0] = 1;
		ck_assert_int_eq(ref_encode(bin, text, len, &ids, &n), 0);
		ck_assert_uint_eq(n, 1 + slow_encode(text, len, want + 1));
		ck_assert_mem_eq(ids, want, n * sizeof(*ids));
		free(ids);
		ck_assert_int_eq(ref_encode(json, text, len, &ids, &n), 0);
		ck_assert_mem_eq(ids, want, n * sizeof(*ids));
		free(ids);
		check_round_trip(bin, text, len);
	}
	ref_tokenizer_free(bin);
	ref_tokenizer_free(json);
}
END_TEST

START_TEST(any_bytes_come_back)
{
	struct ref_tokenizer *t = load(bin_file("t.bin"), &piece_config);
	uint32_t seed = 3;
	char text[64];

	for (uint32_t round = test_rounds(3000, 1500, 300); round; round--) {
		size_t len = (seed >> 8) % sizeof(text);

		for (size_t i = 0; i < len; i++) {
			seed = seed * 1664525u + 1013904223u;
			text[i] = seed >> 31 ? (char)(seed >> 16) : "abc \xc3\xa9\xe2\x96\x81"[(seed >> 16) % 9];
		}
		seed = seed * 1664525u + 1013904223u;
		check_round_trip(t, text, len);
	}
	ref_tokenizer_free(t);
}
END_TEST

START_TEST(special_tokens_are_not_text)
{
	struct ref_tokenizer *t = load(json_file("t.json"), &piece_config);
	uint32_t *ids, n;
	size_t len;

	ck_assert_int_eq(ref_encode(t, "<s>", 3, &ids, &n), 0);
	ck_assert_uint_eq(n, 5);
	free(ids);
	for (uint32_t id = 0; id < 3; id++) {
		ref_decode(t, 300, id, &len);
		ck_assert_uint_eq(len, 0);
	}
	ref_decode(t, 300, VOCAB, &len);
	ck_assert_uint_eq(len, 0);
	ref_decode(t, 300, UINT32_MAX, &len);
	ck_assert_uint_eq(len, 0);
	ck_assert_int_eq(ref_encode(t, "", 0, &ids, &n), 0);
	ck_assert_uint_eq(n, 1);
	free(ids);
	ref_tokenizer_free(t);
}
END_TEST

/* A long prompt takes time in proportion: this would be hours if each join searched the whole text. */
START_TEST(long_prompt)
{
	struct ref_tokenizer *t = load(bin_file("t.bin"), &piece_config);
	const size_t bytes = 4 << 20;
	char *text = malloc(bytes);
	uint32_t *ids, n;

	for (size_t i = 0; i < bytes; i++)
		text[i] = "abcc "[i * i % 5];
	ck_assert_int_eq(ref_encode(t, text, bytes, &ids, &n), 0);
	ck_assert_uint_lt(n, bytes);
	free(ids);
	free(text);
	ref_tokenizer_free(t);
}
END_TEST

static void refuse(const char *path, const struct ref_config *c, int err, const char *say)
{
	struct ref_tokenizer *t;
	int got = ref_tokenizer_load(path, c, &t);

	ck_assert_msg(got == err, "%s: %d", path ? path : "bytes", got);
	ck_assert_msg(strstr(kvt_last_error(), say) != NULL, "\"%s\" lacks \"%s\"", kvt_last_error(), say);
	ck_assert_ptr_null(strchr(kvt_last_error(), '\n'));
}

static void refuse_text(const char *text, const char *say)
{
	refuse(write_file("bad.json", text, strlen(text)), &piece_config, -EINVAL, say);
}

START_TEST(bad_files)
{
	struct ref_config c = byte_config;

	refuse(scratch("none.json"), &piece_config, -ENOENT, "none.json");
	refuse_text("", "not JSON");
	refuse_text("{\"tokens\":\"\xff\"}", "not JSON");
	refuse_text("[]", "no \"tokens\" and \"scores\"");
	refuse_text("{\"model\":{\"type\":\"BPE\"}}", "only llama-spm JSON and llama2.c's .bin are supported");
	refuse_text("{\"tokens\":[\"a\"],\"scores\":[1]}", "1 tokens, 1 scores, 0 types, for a \"vocab_size\" of");
	c = piece_config;
	c.vocab++;
	refuse(json_file("t.json"), &c, -EINVAL, "\"vocab_size\" of");
	refuse(bin_file("t.bin"), &c, -EINVAL, "ends after");
	c.vocab -= 2;
	refuse(bin_file("t.bin"), &c, -EINVAL, "behind its");
	c.vocab = 1;
	refuse(write_file("few.json", "{\"tokens\":[\"a\"],\"scores\":[1]}", 29), &c, -EINVAL, "there is no token <0x00>");
	refuse(write_file("few.json", "{\"tokens\":[7],\"scores\":[1]}", 27), &c, -EINVAL, "token 0 is not a string");
	refuse(write_file("few.json", "{\"tokens\":[\"a\"],\"scores\":[1],\"types\":[6]}", 41), &c, -EINVAL,
	       "token 0 is of the byte type");
	c = byte_config;
	c.vocab = 255;
	refuse(NULL, &c, -EINVAL, "its 255 tokens are not bytes");
	c.vocab = 32000;
	refuse(NULL, &c, -EINVAL, "--tokenizer FILE");
	c.vocab = 260;
	c.bos = 1;
	refuse(NULL, &c, -EINVAL, "BOS above 255");
}
END_TEST

START_TEST(bad_bins)
{
	const char *path = bin_file("t.bin");
	struct ref_tokenizer *t;
	uint32_t huge = 0x7fffffff, nan = 0x7fc00000;
	size_t bytes;
	char *data;

	ck_assert_int_eq(ref_read_file(path, 1 << 20, &data, &bytes), 0);
	for (size_t n = 0; n < bytes; n += 13) {
		path = write_file("cut.bin", data, n);
		ck_assert_int_eq(ref_tokenizer_load(path, &piece_config, &t), -EINVAL);
	}
	memcpy(data + 8, &huge, 4);
	refuse(write_file("cut.bin", data, bytes), &piece_config, -EINVAL, "token 0 has a length of 2147483647");
	huge = 0xffffffff;
	memcpy(data + 8, &huge, 4);
	refuse(write_file("cut.bin", data, bytes), &piece_config, -EINVAL, "token 0 has a length of -1");
	huge = 5;
	memcpy(data + 8, &huge, 4);
	memcpy(data + 4, &nan, 4);
	refuse(write_file("cut.bin", data, bytes), &piece_config, -EINVAL, "the score nan");
	free(data);
}
END_TEST

START_TEST(find_in_directory)
{
	char path[4096];

	mkdir(scratch("model"), 0755);
	ck_assert_int_eq(ref_tokenizer_find(scratch("model"), path, sizeof(path)), 0);
	ck_assert_str_eq(path, "");
	write_file("model/tokenizer_config.json", "{}", 2);
	write_file("model/tok512.json", "{}", 2);
	ck_assert_int_eq(ref_tokenizer_find(scratch("model"), path, sizeof(path)), 0);
	ck_assert_str_eq(path, scratch("model/tok512.json"));
	write_file("model/tokenizer.bin", "", 0);
	ck_assert_int_eq(ref_tokenizer_find(scratch("model"), path, sizeof(path)), -EINVAL);
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "choose with --tokenizer FILE"));
	ck_assert_int_eq(ref_tokenizer_find(scratch("none"), path, sizeof(path)), -ENOENT);
}
END_TEST

START_TEST(trained_vocabulary)
{
	struct ref_config c = { .vocab = 512, .bos = 1, .n_eos = 1, .eos = { 2 } };
	static const uint32_t want[] = { 1, 403, 407, 261, 378, 432, 383, 286, 261, 376, 298, 315, 421, 395, 317, 426 };
	static const char text[] = "Once upon a time, there was a little girl named Lily.";
	const char *path = input("trained_vocabulary", "models/stories260K-hf/tok512.json");
	struct ref_tokenizer *t;
	uint32_t *ids, n;

	if (!path)
		return;
	t = load(path, &c);
	ck_assert_int_eq(ref_encode(t, text, strlen(text), &ids, &n), 0);
	ck_assert_uint_eq(n, sizeof(want) / sizeof(want[0]));
	ck_assert_mem_eq(ids, want, sizeof(want));
	free(ids);
	check_round_trip(t, "Lily said: \"na\xc3\xafve \xf0\x9f\x90\xb1\"\n", 25);
	ref_tokenizer_free(t);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("ref_tokenizer");
	TCase *t = tcase_create("tokenizer");
	SRunner *r = srunner_create(s);
	int failed;

	tcase_add_test(t, bytes);
	tcase_add_test(t, pieces_as_defined);
	tcase_add_test(t, any_bytes_come_back);
	tcase_add_test(t, special_tokens_are_not_text);
	tcase_add_test(t, long_prompt);
	tcase_add_test(t, bad_files);
	tcase_add_test(t, bad_bins);
	tcase_add_test(t, find_in_directory);
	tcase_add_test(t, trained_vocabulary);
	suite_add_tcase(s, t);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed != 0;
}
