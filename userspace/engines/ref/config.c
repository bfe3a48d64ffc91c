// SPDX-License-Identifier: MIT
/* config.json of a Hugging Face directory: what this engine can run, and by name what it cannot. */
#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "engines/ref/engine.h"

#define CONFIG_BYTES_MAX (4u << 20)

/* The value as one line of ASCII, cut. */
struct shown {
	char text[48];
};

static struct shown show(const json_t *value)
{
	char *line = json_dumps(value, JSON_COMPACT | JSON_ENSURE_ASCII | JSON_ENCODE_ANY);
	struct shown s;

	if (snprintf(s.text, sizeof(s.text), "%s", line ? line : "?") >= (int)sizeof(s.text))
		memcpy(s.text + sizeof(s.text) - 4, "...", 4);
	free(line);
	return s;
}

static int get_number(const json_t *o, const char *key, double min, double max, double *out)
{
	const json_t *v = json_object_get(o, key);

	if (!v)
		return kvt_fail(-EINVAL, "\"%s\" is missing", key);
	if (!json_is_number(v) || !(json_number_value(v) >= min) || !(json_number_value(v) <= max))
		return kvt_fail(-EINVAL, "\"%s\" is %s, not a number from %g to %g", key, show(v).text, min, max);
	*out = json_number_value(v);
	return 0;
}

static int get_u32(const json_t *o, const char *key, uint32_t max, uint32_t *out)
{
	const json_t *v = json_object_get(o, key);

	if (!v)
		return kvt_fail(-EINVAL, "\"%s\" is missing", key);
	if (!json_is_integer(v) || json_integer_value(v) < 1 || json_integer_value(v) > max)
		return kvt_fail(-EINVAL, "\"%s\" is %s, not a whole number from 1 to %u", key, show(v).text, max);
	*out = (uint32_t)json_integer_value(v);
	return 0;
}

/* Absent, or null, is false. */
static int get_bool(const json_t *o, const char *key, bool *out)
{
	const json_t *v = json_object_get(o, key);

	*out = json_is_true(v);
	if (v && !json_is_boolean(v) && !json_is_null(v))
		return kvt_fail(-EINVAL, "\"%s\" is %s, not true or false", key, show(v).text);
	return 0;
}

/* Must be false or absent. */
static int refuse_true(const json_t *o, const char *key)
{
	bool set;
	int err = get_bool(o, key, &set);

	if (!err && set)
		err = kvt_fail(-EINVAL, "\"%s\" is true: not supported", key);
	return err;
}

/* If it is there it must be one of the NULL-ended @names. */
static int check_name(const json_t *o, const char *key, const char *const *names)
{
	const json_t *v = json_object_get(o, key);
	char list[96] = "";

	if (!v || json_is_null(v))
		return 0;
	for (uint32_t i = 0; names[i]; i++) {
		if (json_is_string(v) && !strcmp(json_string_value(v), names[i]))
			return 0;
		snprintf(list + strlen(list), sizeof(list) - strlen(list), "%s%s", i ? ", " : "", names[i]);
	}
	return kvt_fail(-EINVAL, "\"%s\" is %s; supported: %s", key, show(v).text, list);
}

static int check_architecture(const json_t *o)
{
	static const char *const types[] = { "llama", NULL };
	const json_t *list = json_object_get(o, "architectures"), *first = json_array_get(list, 0);

	if (!list && !json_object_get(o, "model_type"))
		return kvt_fail(-EINVAL, "\"architectures\" is missing");
	if (list && (json_array_size(list) != 1 || !json_is_string(first) ||
		     strcmp(json_string_value(first), "LlamaForCausalLM")))
		return kvt_fail(-EINVAL, "\"architectures\" is %s; supported: [\"LlamaForCausalLM\"]", show(list).text);
	return check_name(o, "model_type", types);
}

static int token_id(const json_t *v, const char *key, uint32_t vocab, uint32_t *id)
{
	if (!json_is_integer(v) || json_integer_value(v) < 0 || json_integer_value(v) >= vocab)
		return kvt_fail(-EINVAL, "\"%s\" has %s, not a token id from 0 to %u", key, show(v).text, vocab - 1);
	*id = (uint32_t)json_integer_value(v);
	return 0;
}

static int get_special(const json_t *o, struct ref_config *c)
{
	const json_t *bos = json_object_get(o, "bos_token_id"), *eos = json_object_get(o, "eos_token_id");
	uint32_t id = 0;
	int err;

	c->bos = -1;
	if (bos && !json_is_null(bos)) {
		err = token_id(bos, "bos_token_id", c->vocab, &id);
		if (err)
			return err;
		c->bos = (int32_t)id;
	}
	if (!eos || json_is_null(eos))
		return 0;
	if (!json_is_array(eos)) {
		c->n_eos = 1;
		return token_id(eos, "eos_token_id", c->vocab, &c->eos[0]);
	}
	if (json_array_size(eos) > REF_EOS_MAX)
		return kvt_fail(-EINVAL, "\"eos_token_id\" lists %zu tokens, at most %d are supported", json_array_size(eos),
				REF_EOS_MAX);
	for (; c->n_eos < json_array_size(eos); c->n_eos++) {
		err = token_id(json_array_get(eos, c->n_eos), "eos_token_id", c->vocab, &c->eos[c->n_eos]);
		if (err)
			return err;
	}
	return 0;
}

/* rope_scaling of old files; rope_parameters of newer ones, which may hold rope_theta too. */
static int get_rope(const json_t *o, struct ref_config *c)
{
	const char *key = json_object_get(o, "rope_parameters") ? "rope_parameters" : "rope_scaling";
	const json_t *s = json_object_get(o, key), *type;
	int err = 0;

	c->rope_theta = 10000;
	if (json_object_get(o, "rope_theta"))
		err = get_number(o, "rope_theta", 1, 1e12, &c->rope_theta);
	if (err || !s || json_is_null(s))
		return err;
	if (!json_is_object(s))
		return kvt_fail(-EINVAL, "\"%s\" is %s, not an object or null", key, show(s).text);
	if (json_object_get(s, "rope_theta"))
		err = get_number(s, "rope_theta", 1, 1e12, &c->rope_theta);
	if (err)
		return err;
	type = json_object_get(s, "rope_type");
	if (!type)
		type = json_object_get(s, "type");
	if (!json_is_string(type))
		return kvt_fail(-EINVAL, "\"%s\" has no \"rope_type\"", key);
	if (!strcmp(json_string_value(type), "default"))
		return 0;
	if (!strcmp(json_string_value(type), "linear")) {
		c->rope = REF_ROPE_LINEAR;
		return get_number(s, "factor", 1, 1e6, &c->rope_factor);
	}
	if (strcmp(json_string_value(type), "llama3"))
		return kvt_fail(-EINVAL, "\"%s\" has the type %s; supported: default, linear, llama3", key, show(type).text);
	c->rope = REF_ROPE_LLAMA3;
	err = get_number(s, "factor", 1, 1e6, &c->rope_factor);
	if (!err)
		err = get_number(s, "low_freq_factor", 1e-3, 1e6, &c->rope_low);
	if (!err)
		err = get_number(s, "high_freq_factor", 1e-3, 1e6, &c->rope_high);
	if (!err && !(c->rope_high > c->rope_low))
		err = kvt_fail(-EINVAL, "\"high_freq_factor\" is %g, not above \"low_freq_factor\" %g", c->rope_high,
			       c->rope_low);
	if (!err)
		err = get_number(s, "original_max_position_embeddings", 1, 1e9, &c->rope_context);
	return err;
}

int ref_config_check(const struct ref_config *c)
{
	if (c->heads % c->kv_heads)
		return kvt_fail(-EINVAL, "%u attention heads are not a multiple of %u key-value heads", c->heads, c->kv_heads);
	if (c->head_dim < 8 || c->head_dim > 512 || c->head_dim % 2)
		return kvt_fail(-EINVAL, "a head of %u elements; supported: an even number from 8 to 512", c->head_dim);
	return 0;
}

static int parse(const json_t *o, struct ref_config *c)
{
	static const char *const acts[] = { "silu", NULL };
	static const char *const dtypes[] = { "float32", "float16", "bfloat16", NULL };
	static const char *const refused[] = { "attention_bias", "mlp_bias", "use_sliding_window" };
	double eps;
	int err;

	err = check_architecture(o);
	if (!err)
		err = check_name(o, "hidden_act", acts);
	if (!err)
		err = check_name(o, "torch_dtype", dtypes);
	if (!err)
		err = check_name(o, "dtype", dtypes);
	for (uint32_t i = 0; !err && i < sizeof(refused) / sizeof(refused[0]); i++)
		err = refuse_true(o, refused[i]);
	if (!err && json_object_get(o, "quantization_config"))
		err = kvt_fail(-EINVAL, "\"quantization_config\" is there: quantised weights are not supported");
	if (!err)
		err = get_u32(o, "vocab_size", 1u << 22, &c->vocab);
	if (!err)
		err = get_u32(o, "hidden_size", 1u << 16, &c->hidden);
	if (!err)
		err = get_u32(o, "intermediate_size", 1u << 18, &c->inter);
	if (!err)
		err = get_u32(o, "num_hidden_layers", 1024, &c->layers);
	if (!err)
		err = get_u32(o, "num_attention_heads", 1024, &c->heads);
	if (!err)
		err = get_u32(o, "max_position_embeddings", 1u << 27, &c->context);
	if (!err)
		err = get_number(o, "rms_norm_eps", 0, 1, &eps);
	if (err)
		return err;
	c->eps = (float)eps;
	c->kv_heads = c->heads;
	if (json_object_get(o, "num_key_value_heads"))
		err = get_u32(o, "num_key_value_heads", 1024, &c->kv_heads);
	if (err)
		return err;
	if (json_object_get(o, "head_dim") && !json_is_null(json_object_get(o, "head_dim"))) {
		err = get_u32(o, "head_dim", 512, &c->head_dim);
	} else if (c->hidden % c->heads) {
		err = kvt_fail(-EINVAL, "\"hidden_size\" %u is not a multiple of \"num_attention_heads\" %u, and there is no "
			       "\"head_dim\"", c->hidden, c->heads);
	} else {
		c->head_dim = c->hidden / c->heads;
	}
	if (!err)
		err = get_rope(o, c);
	if (!err)
		err = get_bool(o, "tie_word_embeddings", &c->tied);
	if (!err)
		err = get_special(o, c);
	return err ? err : ref_config_check(c);
}

int ref_config_parse(const char *text, size_t bytes, struct ref_config *config)
{
	struct ref_config c = { 0 };
	json_error_t error;
	char quoted[96];
	json_t *o;
	int err;

	o = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &error);
	if (!o)
		return kvt_fail(-EINVAL, "not JSON, line %d: %s", error.line, ref_quote(quoted, sizeof(quoted), error.text));
	if (!json_is_object(o))
		err = kvt_fail(-EINVAL, "not a JSON object");
	else
		err = parse(o, &c);
	json_decref(o);
	if (!err)
		*config = c;
	return err;
}

int ref_config_load(const char *path, struct ref_config *config)
{
	size_t bytes;
	char *text;
	int err;

	err = ref_read_file(path, CONFIG_BYTES_MAX, &text, &bytes);
	if (err)
		return err;
	err = ref_config_parse(text, bytes, config);
	free(text);
	return err ? kvt_fail_more(err, "%s", path) : 0;
}
