// SPDX-License-Identifier: MIT
/*
 * kvtier sample on cases: every shared case with its expectation (where the
 * inputs are), the form of the results, and texts that must be refused.
 */
#include <check.h>
#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvtier-sampler.h"
#include "kvtier.h"
#include "tools/sample.h"

static double number(const json_t *value)
{
	const char *text = json_string_value(value);

	if (!text)
		return json_number_value(value);
	return !strcmp(text, "inf") ? INFINITY : !strcmp(text, "-inf") ? -INFINITY : NAN;
}

/* An expectation against a result; members beside these are notes. */
static void check_case(const char *name, json_t *expect, json_t *result)
{
	json_t *kept = json_object_get(expect, "kept"), *after = json_object_get(expect, "logits_after");
	json_t *got = json_object_get(result, "logits_after"), *probs = json_object_get(result, "probs");
	const char *error = json_string_value(json_object_get(result, "error"));
	double sum = 0;

	if (json_object_get(expect, "error")) {
		ck_assert_msg(error && *error, "%s: no error", name);
		ck_assert_uint_eq(json_object_size(result), 2);
		return;
	}
	ck_assert_msg(!error, "%s: %s", name, error);
	ck_assert_uint_eq(json_object_size(result), 5);
	if (kept)
		ck_assert_msg(json_equal(kept, json_object_get(result, "kept")), "%s: kept", name);
	if (json_object_get(expect, "token"))
		ck_assert_msg(json_equal(json_object_get(expect, "token"), json_object_get(result, "token")), "%s: token", name);
	for (size_t i = 0; i < json_array_size(probs); i++)
		sum += number(json_array_get(probs, i));
	ck_assert_msg(fabs(sum - 1) < 1e-12, "%s: the probabilities sum to %.17g", name, sum);
	ck_assert_uint_eq(json_array_size(probs), json_array_size(json_object_get(result, "kept")));
	for (size_t i = 0; i < json_array_size(after); i++) {
		double want = number(json_array_get(after, i)), x = number(json_array_get(got, i));

		ck_assert_msg(x == want || fabs(x - want) < 1e-12, "%s: logit %zu is %.17g, not %.17g", name, i, x, want);
	}
}

START_TEST(shared_cases)
{
	const char *inputs = getenv("KVT_INPUTS");
	json_t *cases, *results;
	char path[4096], *text, *made;

	snprintf(path, sizeof(path), "%s/vectors/sampler_cases.json", inputs ? inputs : "../shared/inputs");
	cases = json_load_file(path, JSON_REJECT_DUPLICATES, NULL);
	if (!cases) {
		printf("SKIP: shared_cases: %s is not there (KVT_INPUTS names its folder)\n", path);
		return;
	}
	text = json_dumps(cases, 0);
	ck_assert_msg(tool_sample_cases(text, strlen(text), &made) == 0, "%s", kvt_last_error());
	results = json_loads(made, 0, NULL);
	ck_assert_uint_gt(json_array_size(cases), 40);
	ck_assert_uint_eq(json_array_size(cases), json_array_size(results));
	for (size_t i = 0; i < json_array_size(cases); i++) {
		json_t *c = json_array_get(cases, i), *r = json_array_get(results, i);

		ck_assert(json_equal(json_object_get(c, "name"), json_object_get(r, "name")));
		check_case(json_string_value(json_object_get(c, "name")), json_object_get(c, "expect"), r);
	}
	json_decref(results);
	json_decref(cases);
	free(made);
	free(text);
}
END_TEST

/* The project's own cases: name, logits, params, what must come (see check_case). */
static const char own_cases[] =
	"[{\"name\": \"history beside params\", \"logits\": [2, 1], \"history\": [0],"
	"  \"params\": {\"presence_penalty\": 1.5, \"temperature\": 0}, \"expect\": {\"token\": 1, \"logits_after\": [0.5, 1]}},"
	" {\"name\": \"bias\", \"logits\": [1, 2, 3], \"params\": {\"logit_bias\": {\"2\": \"-inf\", \"0\": 0.5}},"
	"  \"expect\": {\"kept\": [0, 1], \"logits_after\": [1.5, 2, \"-inf\"]}},"
	" {\"name\": \"no params\", \"logits\": [1, \"inf\"], \"expect\": {\"kept\": [1], \"logits_after\": [1, \"inf\"]}},"
	" {\"name\": \"top_k -1 is off\", \"logits\": [1, 2], \"params\": {\"top_k\": -1}, \"expect\": {\"kept\": [0, 1]}},"
	" {\"name\": \"order\", \"logits\": [0, 0.5], \"params\": {\"temperature\": 100, \"min_p\": 0.9,"
	"  \"order\": [\"temperature\", \"min_p\"]}, \"expect\": {\"kept\": [0, 1]}},"
	" {\"name\": \"draw\", \"logits\": [0, 0, 0], \"params\": {\"seed\": 7, \"sequence\": 1, \"position\": 2, \"adaptive\": true},"
	"  \"expect\": {\"kept\": [0, 1, 2]}},"
	" {\"name\": \"misspelt\", \"logits\": [1], \"params\": {\"top-k\": 3}, \"expect\": {\"error\": 1}},"
	" {\"name\": \"two histories\", \"logits\": [1], \"history\": [], \"params\": {\"history\": []}, \"expect\": {\"error\": 1}},"
	" {\"name\": \"history of text\", \"logits\": [1], \"history\": [\"0\"], \"expect\": {\"error\": 1}},"
	" {\"name\": \"logit beyond float\", \"logits\": [1e39], \"expect\": {\"error\": 1}},"
	" {\"name\": \"logit of null\", \"logits\": [null], \"expect\": {\"error\": 1}},"
	" {\"name\": \"logit of text\", \"logits\": [\"Infinity\"], \"expect\": {\"error\": 1}},"
	" {\"name\": \"no logits\", \"params\": {}, \"expect\": {\"error\": 1}},"
	" {\"name\": \"params of a list\", \"logits\": [1], \"params\": [], \"expect\": {\"error\": 1}},"
	" {\"name\": \"top_k of half\", \"logits\": [1], \"params\": {\"top_k\": 0.5}, \"expect\": {\"error\": 1}},"
	" {\"name\": \"top_k of -2\", \"logits\": [1], \"params\": {\"top_k\": -2}, \"expect\": {\"error\": 1}},"
	" {\"name\": \"top_k of 2^32\", \"logits\": [1], \"params\": {\"top_k\": 4294967296}, \"expect\": {\"error\": 1}},"
	" {\"name\": \"bias for no token\", \"logits\": [1], \"params\": {\"logit_bias\": {\"one\": 1}}, \"expect\": {\"error\": 1}},"
	" {\"name\": \"bias twice\", \"logits\": [1], \"params\": {\"logit_bias\": {\"0\": 1, \"00\": 1}}, \"expect\": {\"error\": 1}},"
	" {\"name\": \"bias of inf\", \"logits\": [1], \"params\": {\"logit_bias\": {\"0\": \"inf\"}}, \"expect\": {\"error\": 1}},"
	" {\"name\": \"bias of a list\", \"logits\": [1], \"params\": {\"logit_bias\": [1]}, \"expect\": {\"error\": 1}},"
	" {\"name\": \"order of one unknown\", \"logits\": [1], \"params\": {\"order\": [\"typical_p\"]}, \"expect\": {\"error\": 1}},"
	" {\"name\": \"order of eight\", \"logits\": [1], \"params\": {\"order\": [\"bias\", \"bias\", \"bias\", \"bias\", \"bias\","
	"  \"bias\", \"bias\", \"bias\"]}, \"expect\": {\"error\": 1}},"
	" {\"name\": \"order of none\", \"logits\": [1], \"params\": {\"order\": []}, \"expect\": {\"error\": 1}},"
	" {\"name\": \"adaptive of 1\", \"logits\": [1], \"params\": {\"adaptive\": 1}, \"expect\": {\"error\": 1}},"
	" {\"name\": \"seed below 0\", \"logits\": [1], \"params\": {\"seed\": -1}, \"expect\": {\"error\": 1}},"
	" {\"name\": \"seed of 2^64\", \"logits\": [1], \"params\": {\"seed\": \"18446744073709551616\"}, \"expect\": {\"error\": 1}},"
	" {\"name\": \"seed of text\", \"logits\": [1], \"params\": {\"seed\": \"one\"}, \"expect\": {\"error\": 1}}]";

START_TEST(own)
{
	json_t *cases = json_loads(own_cases, 0, NULL), *results;
	char *made;

	ck_assert_int_eq(tool_sample_cases(own_cases, strlen(own_cases), &made), 0);
	results = json_loads(made, 0, NULL);
	ck_assert_uint_eq(json_array_size(results), json_array_size(cases));
	ck_assert_uint_gt(json_array_size(cases), 20);
	for (size_t i = 0; i < json_array_size(cases); i++) {
		json_t *c = json_array_get(cases, i), *r = json_array_get(results, i);

		ck_assert(json_equal(json_object_get(c, "name"), json_object_get(r, "name")));
		check_case(json_string_value(json_object_get(c, "name")), json_object_get(c, "expect"), r);
	}
	json_decref(results);
	json_decref(cases);
	free(made);
}
END_TEST

/* In quotes or not, a number is the same; and what only quotes can hold is the number that it says. */
START_TEST(whole_numbers_of_64_bits)
{
	static const char *const forms[] = { "\"seed\": %s", "\"seed\": 3, \"sequence\": %s", "\"seed\": 3, \"position\": %s" };
	static const char *const numbers[] = { "4611686018427387904", "\"4611686018427387904\"", "\"9223372036854775808\"",
					       "\"18446744073709551615\"" };
	static const uint64_t values[] = { 1ull << 62, 1ull << 62, 1ull << 63, UINT64_MAX };
	char text[400], params[100], zeros[2 * 63 + 1] = "", *made;
	struct kvt_sampler *sampler;
	float logits[64] = { 0 };
	json_t *results;

	for (size_t i = 0; i < 63; i++)
		strcat(zeros, ",0");
	ck_assert(!kvt_sampler_create(64, &sampler));
	for (size_t i = 0; i < 12; i++) {
		struct kvt_sampler_params p = KVT_SAMPLER_PARAMS_INIT;
		struct kvt_sample row = { .params = &p, .logits = logits };

		p.seed = i / 4 == 0 ? values[i % 4] : 3;
		row.sequence = i / 4 == 1 ? values[i % 4] : 0;
		row.position = i / 4 == 2 ? values[i % 4] : 0;
		ck_assert(!kvt_sampler_sample(sampler, &row, 1));
		snprintf(params, sizeof(params), forms[i / 4], numbers[i % 4]);
		snprintf(text, sizeof(text), "[{\"name\": \"a\", \"params\": {%s}, \"logits\": [0%s]}]", params, zeros);
		ck_assert_int_eq(tool_sample_cases(text, strlen(text), &made), 0);
		results = json_loads(made, 0, NULL);
		ck_assert_int_eq(json_integer_value(json_object_get(json_array_get(results, 0), "token")), row.token);
		json_decref(results);
		free(made);
	}
	kvt_sampler_destroy(sampler);
}
END_TEST

/* A case without a name fails, and no other. */
START_TEST(nameless)
{
	static const char text[] = "[1, {}, {\"name\": 3, \"logits\": [1]}, null, {\"name\": \"fine\", \"logits\": [1]}]";
	json_t *results, *r;
	char *made, part[16];

	ck_assert_int_eq(tool_sample_cases(text, strlen(text), &made), 0);
	results = json_loads(made, 0, NULL);
	ck_assert_uint_eq(json_array_size(results), 5);
	for (size_t i = 0; i < 4; i++) {
		r = json_array_get(results, i);
		snprintf(part, sizeof(part), "case %zu: ", i);
		ck_assert(json_is_null(json_object_get(r, "name")));
		ck_assert_ptr_nonnull(strstr(json_string_value(json_object_get(r, "error")), part));
		ck_assert_uint_eq(json_object_size(r), 2);
	}
	r = json_array_get(results, 4);
	ck_assert_str_eq(json_string_value(json_object_get(r, "name")), "fine");
	ck_assert_int_eq(json_integer_value(json_object_get(r, "token")), 0);
	json_decref(results);
	free(made);
}
END_TEST

START_TEST(refused)
{
	static const struct {
		const char *text, *part;
	} texts[] = {
		{ "", "line 1" },
		{ "{}", "a JSON list" },
		{ "[{\"name\": \"a\", \"name\": \"b\"}]", "duplicate" },
		{ "[{\"name\": \"a\", \"logits\": [1], \"params\": {\"top_k\": 1, \"top_k\": 2}}]", "duplicate" },
		{ "[{\"name\": \"a\", \"logits\": [1]}", "line 1" },
		{ "[] []", "end of file expected" },
		{ "[{\"name\": \"a\", \"logits\": [NaN]}]", "line 1" },
		{ "[{\"name\": \"a\", \"logits\": [1e999]}]", "overflow" },
		{ "[{\"name\": \"a\", \"logits\": [99999999999999999999]}]", "too big" },
		{ "[{\"name\": \"a\", \"logits\": [1], \"params\": {\"seed\": 18446744073709551615}}]", "written in quotes" },
		{ "[{\"name\": \"\xff\", \"logits\": [1]}]", "decode byte 0xff" },
	};
	char deep[5001], *made;

	for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++) {
		ck_assert_msg(tool_sample_cases(texts[i].text, strlen(texts[i].text), &made) == -EINVAL, "%s", texts[i].text);
		ck_assert_ptr_null(made);
		ck_assert_msg(strstr(kvt_last_error(), texts[i].part), "%s: %s", texts[i].text, kvt_last_error());
	}
	memset(deep, '[', sizeof(deep) - 1);
	ck_assert_int_eq(tool_sample_cases(deep, sizeof(deep) - 1, &made), -EINVAL);
	ck_assert_int_eq(tool_sample_cases("[]", 2, &made), 0);
	ck_assert_str_eq(made, "[]");
	free(made);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("sampler_cases");
	TCase *t = tcase_create("sampler_cases");
	SRunner *r = srunner_create(s);
	int failed;

	tcase_add_test(t, shared_cases);
	tcase_add_test(t, own);
	tcase_add_test(t, whole_numbers_of_64_bits);
	tcase_add_test(t, nameless);
	tcase_add_test(t, refused);
	suite_add_tcase(s, t);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed != 0;
}
