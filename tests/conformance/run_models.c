// SPDX-License-Identifier: MIT
/*
 * Trained models give what independent float64 code gave for them: logits
 * within 1e-3 with an f32 cache, and the same greedy text. kvt-demo answers its
 * needle prompts.
 */
#include <check.h>
#include <jansson.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lib/ref_run.h"
#include "lib/rounds.h"
#include "lib/weightfile.h"

#define LIMIT 1e-3

static const char *data(const char *name)
{
	static char path[4][512];
	static unsigned int turn;
	const char *root = getenv("KVT_SOURCE");
	char *p = path[turn++ % 4];

	snprintf(p, sizeof(path[0]), "%s/tests/data/kvt-demo/%s", root ? root : ".", name);
	return p;
}

/* Under a sanitizer, which makes minutes of these seconds, the first of each kind will do. */
static bool skip(int i)
{
	return i && test_sanitized();
}

static struct ref_model *load(const char *path)
{
	struct ref_model *m;

	ck_assert_msg(ref_model_load(path, NULL, NULL, &m) == 0, "%s", kvt_last_error());
	return m;
}

static float *read_floats(const char *path, size_t n)
{
	size_t bytes;
	char *f;

	ck_assert_msg(ref_read_file(path, 1 << 24, &f, &bytes) == 0, "%s", kvt_last_error());
	ck_assert_uint_eq(bytes, n * sizeof(float));
	return (float *)(void *)f;
}

static double distance(const float *a, const float *b, size_t n)
{
	double most = 0;

	for (size_t i = 0; i < n; i++) {
		double d = fabs((double)a[i] - (double)b[i]);

		ck_assert(!isnan(d));
		most = d > most ? d : most;
	}
	return most;
}

/* What a file's reference was made with: 1e-3 for an f32 cache; a 16-bit one is held to the text alone. */
static const char *const references[] = { "reference_text", "reference_fact", "reference_wide" };

START_TEST(demo_references)
{
	struct ref_how how = { .name = references[_i], .codec = KVT_F32, .chunk = 100 };
	uint32_t ids[257], new_ids[64];
	float *want, *got;
	struct ref_model *m;
	char name[64];
	json_t *o;

	if (skip(_i))
		return;
	m = load(data(""));
	snprintf(name, sizeof(name), "%s.json", references[_i]);
	o = json_load_file(data(name), 0, NULL);
	ck_assert_ptr_nonnull(o);
	for (size_t i = 0; i < 257; i++)
		ids[i] = (uint32_t)json_integer_value(json_array_get(json_object_get(o, "input_ids"), i));
	snprintf(name, sizeof(name), "%s.f32", references[_i]);
	want = read_floats(data(name), 256 * 260);
	got = ref_run(m, &how, ids, 257, 64, new_ids, NULL);
	/* their row 0 is behind BOS and the first byte */
	printf("%s: the largest difference of logits is %.3g\n", references[_i], distance(got + 260, want, 256 * 260));
	ck_assert_double_lt(distance(got + 260, want, 256 * 260), LIMIT);
	for (size_t i = 0; i < 64; i++)
		ck_assert_uint_eq(new_ids[i], (uint32_t)json_integer_value(json_array_get(json_object_get(o, "greedy_ids"), i)));
	free(got);
	/* "wide" is for caches that round: its text holds for f16 and bf16 too */
	for (how.codec = KVT_F16; _i == 2 && how.codec <= KVT_BF16; how.codec++) {
		free(ref_run(m, &how, ids, 257, 64, new_ids, NULL));
		for (size_t i = 0; i < 64; i++)
			ck_assert_uint_eq(new_ids[i],
					  (uint32_t)json_integer_value(json_array_get(json_object_get(o, "greedy_ids"), i)));
	}
	free(want);
	json_decref(o);
	ref_model_free(m);
}
END_TEST

static const char *const stories[] = { "models/stories260K-hf", "models/stories260K.gguf" };

START_TEST(stories_text_and_logits)
{
	const char *path = input("stories_text_and_logits", stories[_i]), *piece;
	struct ref_how how = { .name = stories[_i], .codec = KVT_F32 };
	uint32_t bos = 1, new_ids[200], before = 1;
	float *want, *got;
	char *text, back[1024];
	size_t bytes, at = 0, len;
	struct ref_model *m;

	if (!path || skip(_i))
		return;
	m = load(path);
	ck_assert_int_eq(m->config.bos, 1);
	want = read_floats(input("stories", "models/stories260K.greedy200.logits.f32"), 200 * 512);
	ck_assert_int_eq(ref_read_file(input("stories", "models/stories260K.greedy200.text"), 1 << 20, &text, &bytes), 0);
	got = ref_run(m, &how, &bos, 1, 200, new_ids, NULL);
	printf("%s: the largest difference of logits is %.3g\n", stories[_i], distance(got, want, 200 * 512));
	ck_assert_double_lt(distance(got, want, 200 * 512), LIMIT);
	for (uint32_t i = 0; i < 200; before = new_ids[i++]) {
		piece = ref_decode(m->tokenizer, before, new_ids[i], &len);
		memcpy(back + at, piece, len);
		at += len;
	}
	/* the reference ends with a line feed that is not the model's */
	ck_assert_uint_eq(at + 1, bytes);
	ck_assert_mem_eq(back, text, at);
	free(want);
	free(got);
	free(text);
	ref_model_free(m);
}
END_TEST

/* Prompts @first to @last of a file. */
static void needles(const char *file, int first, int last, const struct ref_how *how)
{
	struct ref_model *m = load(data(""));
	char line[65536], path[512];
	uint32_t *ids, n, new_ids[7];
	FILE *f;

	snprintf(path, sizeof(path), "%s", data(file));
	f = fopen(path, "r");
	ck_assert_ptr_nonnull(f);
	for (int i = 0; i <= last && fgets(line, sizeof(line), f); i++) {
		json_t *o;
		const char *answer;

		if (i < first)
			continue;
		o = json_loads(line, 0, NULL);
		answer = json_string_value(json_object_get(o, "answer"));
		ck_assert_ptr_nonnull(answer);
		ck_assert_int_eq(ref_encode(m->tokenizer, json_string_value(json_object_get(o, "prompt")),
					    json_string_length(json_object_get(o, "prompt")), &ids, &n), 0);
		free(ref_run(m, how, ids, n, 7, new_ids, NULL));
		for (int d = 0; d < 6; d++)
			ck_assert_msg(new_ids[d] == (uint8_t)answer[d], "%s, line %d: digit %d of %s is %u", file, i + 1, d + 1,
				      answer, new_ids[d]);
		ck_assert_uint_eq(new_ids[6], '\n');
		free(ids);
		json_decref(o);
	}
	fclose(f);
	ref_model_free(m);
}

START_TEST(needles_4k)
{
	struct ref_how how = { .name = "4k", .codec = KVT_F16, .chunk = 512 };

	if (test_sanitized()) {
		if (!_i)
			printf("SKIP: needles_4k: a minute without a sanitizer\n");
		return;
	}
	needles("needle_4k.jsonl", 2 * _i, 2 * _i + 1, &how);
}
END_TEST

/* The cache is 96 MiB; it gets 8 MiB beside what the call's scratch takes. */
START_TEST(needle_32k_in_tiers)
{
	struct ref_how how = { .name = "32k", .codec = KVT_F16, .chunk = 512, .ram = 8 << 20, .disk = 112 << 20 };
	const char *all = getenv("KVT_TEST_LONG");
	int last = all && *all ? 11 : 0;

	if (test_sanitized()) {
		if (!_i)
			printf("SKIP: needle_32k_in_tiers: minutes without a sanitizer, an hour with one\n");
		return;
	}
	if (_i > last)
		return;
	if (!last)
		printf("SKIP: needle_32k_in_tiers: 11 of the 12 prompts, a minute or two each; KVT_TEST_LONG=1 runs them\n");
	needles("needle_32k.jsonl", _i, _i, &how);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("run_models");
	TCase *t = tcase_create("models"), *needle = tcase_create("needles");
	SRunner *r = srunner_create(s);
	int failed;

	tcase_add_loop_test(t, demo_references, 0, 3);
	tcase_add_loop_test(t, stories_text_and_logits, 0, 2);
	tcase_add_loop_test(needle, needles_4k, 0, 6);
	tcase_add_loop_test(needle, needle_32k_in_tiers, 0, 12);
	tcase_set_timeout(needle, 1200);
	suite_add_tcase(s, t);
	suite_add_tcase(s, needle);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed != 0;
}
