// SPDX-License-Identifier: MIT
/*
 * kvtier sample: the sampler on a file of cases. What is wrong with one case is
 * that case's result; what is wrong with the list is an error of the whole.
 */
#include "tools/sample.h"

#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "engines/ref/engine.h"
#include "kvtier-sampler.h"
#include "tools/tools.h"

#define MAX_FILE_BYTES (64u << 20)
#define FLOAT_MAX 0x1.fffffep127

/* One case, read. Arrays are one allocation each. */
struct sample_case {
	struct kvt_sampler_params params;
	float *logits;
	uint32_t vocab;
	uint32_t *history;
	uint32_t n_history;
	struct kvt_logit_bias *bias;
	uint64_t sequence, position;
};

/* A number, or one of the three that JSON cannot write. */
static int read_number(const json_t *value, const char *what, double *x)
{
	const char *text = json_string_value(value);

	if (json_is_number(value))
		*x = json_number_value(value);
	else if (text && !strcmp(text, "nan"))
		*x = NAN;
	else if (text && !strcmp(text, "inf"))
		*x = INFINITY;
	else if (text && !strcmp(text, "-inf"))
		*x = -INFINITY;
	else
		return kvt_fail(-EINVAL, "%s: a number, \"nan\", \"inf\" or \"-inf\" is needed", what);
	return 0;
}

static int read_float(const json_t *value, const char *what, float *x)
{
	double d;
	int err = read_number(value, what, &d);

	if (err)
		return err;
	if (isfinite(d) && fabs(d) > FLOAT_MAX)
		return kvt_fail(-EINVAL, "%s: %g is more than a float holds", what, d);
	*x = d;
	return 0;
}

static int read_whole(const json_t *value, const char *what, uint64_t max, uint64_t *x)
{
	json_int_t i = json_integer_value(value);

	if (!json_is_integer(value) || i < 0 || (uint64_t)i > max)
		return kvt_fail(-EINVAL, "%s: a whole number from 0 to %llu is needed", what, (unsigned long long)max);
	*x = i;
	return 0;
}

static int read_u32(const json_t *value, const char *what, uint32_t *x)
{
	uint64_t wide = 0;
	int err = read_whole(value, what, UINT32_MAX, &wide);

	if (!err)
		*x = wide;
	return err;
}

/* All of 64 bits; what jansson's integers do not hold is written as text. */
static int read_u64(const json_t *value, const char *what, uint64_t *x)
{
	const char *text = json_string_value(value);

	return text ? tool_number(what, text, 0, UINT64_MAX, x) : read_whole(value, what, INT64_MAX, x);
}

static int read_logits(const json_t *list, struct sample_case *c)
{
	char what[40];
	int err = 0;

	if (!json_is_array(list))
		return kvt_fail(-EINVAL, "logits: a list is needed");
	c->vocab = json_array_size(list);
	c->logits = malloc(c->vocab * sizeof(float) + 1);
	if (!c->logits)
		return kvt_fail(-ENOMEM, "no memory for %u logits", c->vocab);
	for (uint32_t i = 0; !err && i < c->vocab; i++) {
		snprintf(what, sizeof(what), "logits[%u]", i);
		err = read_float(json_array_get(list, i), what, &c->logits[i]);
	}
	return err;
}

/* Any whole numbers: what is no token of the vocabulary is for the sampler to ignore. */
static int read_history(const json_t *list, struct sample_case *c)
{
	if (c->history)
		return kvt_fail(-EINVAL, "history: given twice, in the case and in params");
	if (!json_is_array(list))
		return kvt_fail(-EINVAL, "history: a list is needed");
	c->n_history = json_array_size(list);
	c->history = malloc(c->n_history * sizeof(uint32_t) + 1);
	if (!c->history)
		return kvt_fail(-ENOMEM, "no memory for a history of %u tokens", c->n_history);
	for (uint32_t i = 0; i < c->n_history; i++) {
		const json_t *value = json_array_get(list, i);
		json_int_t token = json_integer_value(value);

		if (!json_is_integer(value))
			return kvt_fail(-EINVAL, "history[%u]: a token id is needed", i);
		c->history[i] = token < 0 || token > UINT32_MAX ? UINT32_MAX : token;
	}
	return 0;
}

/* {"token id": bias, ...} */
static int read_bias(json_t *object, struct sample_case *c)
{
	const char *key;
	json_t *value;
	int err;

	if (!json_is_object(object))
		return kvt_fail(-EINVAL, "logit_bias: an object of token ids and numbers is needed");
	c->bias = malloc(json_object_size(object) * sizeof(*c->bias) + 1);
	if (!c->bias)
		return kvt_fail(-ENOMEM, "no memory for %zu biases", json_object_size(object));
	json_object_foreach(object, key, value) {
		struct kvt_logit_bias *b = &c->bias[c->params.n_bias];
		uint64_t token;

		err = tool_number("logit_bias", key, 0, UINT32_MAX, &token);
		if (!err)
			err = read_float(value, "logit_bias", &b->bias);
		if (err)
			return err;
		b->token = token;
		c->params.n_bias++;
	}
	c->params.bias = c->bias;
	return 0;
}

static int read_stage(const json_t *value, uint8_t *stage)
{
	const char *text = json_string_value(value);

	for (uint8_t i = 1; text && i < KVT_STAGES; i++)
		if (!strcmp(text, kvt_sampler_stage_name(i))) {
			*stage = i;
			return 0;
		}
	return kvt_fail(-EINVAL, "order: \"%s\" is no stage of the sampler", text ? text : "");
}

static int read_order(const json_t *list, struct sample_case *c)
{
	size_t n = json_array_size(list);
	int err = 0;

	if (!json_is_array(list) || !n || n >= sizeof(c->params.order))
		return kvt_fail(-EINVAL, "order: a list of 1 to %zu stages is needed", sizeof(c->params.order) - 1);
	for (size_t i = 0; !err && i < n; i++)
		err = read_stage(json_array_get(list, i), &c->params.order[i]);
	return err;
}

/* -1 is "off" to those who write it so. */
static int read_top_k(const json_t *value, uint32_t *k)
{
	if (json_is_integer(value) && json_integer_value(value) == -1) {
		*k = 0;
		return 0;
	}
	return read_u32(value, "top_k", k);
}

static int read_param(const char *key, json_t *value, struct sample_case *c)
{
	struct kvt_sampler_params *p = &c->params;
	const struct {
		const char *name;
		double *x;
	} numbers[] = {
		{ "temperature", &p->temperature },
		{ "top_p", &p->top_p },
		{ "min_p", &p->min_p },
		{ "top_n_sigma", &p->top_n_sigma },
		{ "repetition_penalty", &p->repetition_penalty },
		{ "presence_penalty", &p->presence_penalty },
		{ "frequency_penalty", &p->frequency_penalty },
	};

	for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++)
		if (!strcmp(key, numbers[i].name))
			return read_number(value, key, numbers[i].x);
	if (!strcmp(key, "top_k"))
		return read_top_k(value, &p->top_k);
	if (!strcmp(key, "penalty_last_n"))
		return read_u32(value, key, &p->penalty_last_n);
	if (!strcmp(key, "seed"))
		return read_u64(value, key, &p->seed);
	if (!strcmp(key, "sequence"))
		return read_u64(value, key, &c->sequence);
	if (!strcmp(key, "position"))
		return read_u64(value, key, &c->position);
	if (!strcmp(key, "history"))
		return read_history(value, c);
	if (!strcmp(key, "logit_bias"))
		return read_bias(value, c);
	if (!strcmp(key, "order"))
		return read_order(value, c);
	if (!strcmp(key, "adaptive")) {
		if (!json_is_boolean(value))
			return kvt_fail(-EINVAL, "adaptive: true or false is needed");
		p->flags |= json_is_true(value) ? KVT_SAMPLER_ADAPTIVE : 0;
		return 0;
	}
	return kvt_fail(-EINVAL, "\"%s\" is no parameter of the sampler", key);
}

/* Members that are not the sampler's ("expect", notes) are passed over; parameters that it lacks are errors. */
static int read_case(json_t *object, struct sample_case *c)
{
	json_t *params = json_object_get(object, "params"), *history = json_object_get(object, "history"), *value;
	const char *key;
	int err;

	c->params = (struct kvt_sampler_params)KVT_SAMPLER_PARAMS_INIT;
	err = read_logits(json_object_get(object, "logits"), c);
	if (!err && history)
		err = read_history(history, c);
	if (!err && params && !json_is_object(params))
		err = kvt_fail(-EINVAL, "params: an object is needed");
	if (err)
		return err;
	json_object_foreach(params, key, value) {
		err = read_param(key, value, c);
		if (err)
			return err;
	}
	return 0;
}

static void free_case(struct sample_case *c)
{
	free(c->logits);
	free(c->history);
	free(c->bias);
}

static json_t *number(double x)
{
	if (isfinite(x))
		return json_real(x);
	return json_string(isnan(x) ? "nan" : x > 0 ? "inf" : "-inf");
}

static int put_result(json_t *result, const struct kvt_sample *row, uint32_t vocab, const uint32_t *ids,
		      const double *probs, const double *after)
{
	json_t *kept = json_array(), *p = json_array(), *l = json_array();
	int bad = 0;

	for (uint32_t i = 0; i < row->kept; i++) {
		bad |= json_array_append_new(kept, json_integer(ids[i]));
		bad |= json_array_append_new(p, json_real(probs[i]));
	}
	for (uint32_t i = 0; i < vocab; i++)
		bad |= json_array_append_new(l, number(after[i]));
	bad |= json_object_set_new(result, "kept", kept);
	bad |= json_object_set_new(result, "probs", p);
	bad |= json_object_set_new(result, "logits_after", l);
	bad |= json_object_set_new(result, "token", json_integer(row->token));
	return bad ? kvt_fail(-ENOMEM, "no memory for a result of %u tokens", vocab) : 0;
}

static int run_case(const struct sample_case *c, json_t *result)
{
	struct kvt_sample row = { .params = &c->params, .logits = c->logits, .history = c->history,
				  .n_history = c->n_history, .sequence = c->sequence, .position = c->position };
	uint64_t n = (uint64_t)c->vocab + 1;
	struct kvt_sampler *sampler;
	double *probs, *after;
	uint32_t *ids, token;
	int64_t kept;
	int err;

	err = kvt_sampler_create(c->vocab, &sampler);
	if (err)
		return err;
	ids = malloc(n * sizeof(*ids));
	probs = malloc(n * sizeof(*probs));
	after = malloc(n * sizeof(*after));
	if (!ids || !probs || !after) {
		err = kvt_fail(-ENOMEM, "no memory for a result of %u tokens", c->vocab);
		goto out_free;
	}
	kept = kvt_sampler_distribution(sampler, &row, ids, probs, after);
	err = kept < 0 ? kept : put_result(result, &row, c->vocab, ids, probs, after);
	if (err)
		goto out_free;
	/* the token again, by the call that engines use (and its adaptive path) */
	token = row.token;
	err = kvt_sampler_sample(sampler, &row, 1);
	if (!err && row.token != token)
		err = kvt_fail(-EPROTO, "sampling gives token %u and the distribution's draw %u", row.token, token);
out_free:
	free(after);
	free(probs);
	free(ids);
	kvt_sampler_destroy(sampler);
	return err;
}

/* What has no name gets null for one, and an error. */
static int add_case(json_t *results, size_t i, json_t *object)
{
	struct sample_case c = { .vocab = 0 };
	json_t *name = json_object_get(object, "name"), *result = json_object();
	const bool named = json_is_string(name);
	int err;

	if (json_array_append_new(results, result) ||
	    json_object_set_new(result, "name", named ? json_incref(name) : json_null()))
		return kvt_fail(-ENOMEM, "no memory for case %zu", i);
	err = named ? read_case(object, &c) : kvt_fail(-EINVAL, "case %zu: an object with a \"name\" is needed", i);
	if (!err)
		err = run_case(&c, result);
	free_case(&c);
	if (err) {
		json_object_clear(result);
		if (json_object_set_new(result, "name", named ? json_incref(name) : json_null()) ||
		    json_object_set_new(result, "error", json_string(kvt_last_error())))
			return kvt_fail(-ENOMEM, "no memory for case %zu", i);
	}
	return 0;
}

int tool_sample_cases(const char *text, size_t bytes, char **results)
{
	json_error_t error;
	json_t *cases, *list;
	int err = 0;

	*results = NULL;
	cases = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &error);
	if (!cases)
		return kvt_fail(-EINVAL, "line %d, column %d: %s%s", error.line, error.column, error.text,
				json_error_code(&error) == json_error_numeric_overflow ?
					" (seed, sequence and position above 2^63 - 1 are written in quotes)" : "");
	list = json_array();
	if (!json_is_array(cases))
		err = kvt_fail(-EINVAL, "a JSON list of cases is needed");
	for (size_t i = 0; !err && i < json_array_size(cases); i++)
		err = add_case(list, i, json_array_get(cases, i));
	if (!err) {
		*results = json_dumps(list, JSON_INDENT(1));
		if (!*results)
			err = kvt_fail(-ENOMEM, "no memory for the results");
	}
	json_decref(list);
	json_decref(cases);
	return err;
}

int cmd_sample(int argc, char **argv)
{
	char *text = NULL, *results = NULL;
	const char *path = NULL;
	size_t bytes = 0;
	int err;

	for (int i = 1; i < argc; i++) {
		if (strcmp(argv[i], "--cases"))
			return tool_usage_error("sample", "\"%s\" is not an option", argv[i]);
		if (path)
			return tool_usage_error("sample", "--cases is given twice");
		if (++i == argc || !*argv[i])
			return tool_usage_error("sample", "--cases needs a file");
		path = argv[i];
	}
	if (!path)
		return tool_usage_error("sample", "--cases FILE is needed");
	err = ref_read_file(path, MAX_FILE_BYTES, &text, &bytes);
	if (!err) {
		err = tool_sample_cases(text, bytes, &results);
		if (err)
			kvt_fail_more(err, "%s", path);
	}
	if (!err)
		puts(results);
	free(results);
	free(text);
	return err ? tool_failed("sample") : 0;
}
