// SPDX-License-Identifier: MIT
/* config.json: what is read, and each thing that is wrong or not supported alone, refused by its name. */
#include <check.h>
#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engines/ref/engine.h"
#include "lib/weightfile.h"

static const char good[] =
	"{\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\",\"vocab_size\":260,\"hidden_size\":256,"
	"\"intermediate_size\":704,\"num_hidden_layers\":6,\"num_attention_heads\":4,\"num_key_value_heads\":2,"
	"\"head_dim\":64,\"hidden_act\":\"silu\",\"max_position_embeddings\":32768,\"rms_norm_eps\":1e-05,"
	"\"rope_theta\":500000.0,\"rope_scaling\":null,\"tie_word_embeddings\":true,\"attention_bias\":false,"
	"\"bos_token_id\":256,\"eos_token_id\":257,\"torch_dtype\":\"bfloat16\"}";

/* @good with @key set to the JSON @value, or without it where @value is NULL. */
static int parse_with(const char *key, const char *value, struct ref_config *c)
{
	json_t *o = json_loads(good, 0, NULL);
	char *text;
	int err;

	if (value)
		json_object_set_new(o, key, json_loads(value, JSON_DECODE_ANY, NULL));
	else
		json_object_del(o, key);
	text = json_dumps(o, JSON_COMPACT);
	err = ref_config_parse(text, strlen(text), c);
	free(text);
	json_decref(o);
	return err;
}

START_TEST(all_fields)
{
	struct ref_config c;

	ck_assert_int_eq(ref_config_parse(good, strlen(good), &c), 0);
	ck_assert_uint_eq(c.vocab, 260);
	ck_assert_uint_eq(c.hidden, 256);
	ck_assert_uint_eq(c.inter, 704);
	ck_assert_uint_eq(c.layers, 6);
	ck_assert_uint_eq(c.heads, 4);
	ck_assert_uint_eq(c.kv_heads, 2);
	ck_assert_uint_eq(c.head_dim, 64);
	ck_assert_uint_eq(c.context, 32768);
	ck_assert(c.eps == 1e-5f);
	ck_assert(c.rope_theta == 500000);
	ck_assert(c.rope == REF_ROPE_PLAIN);
	ck_assert(c.tied);
	ck_assert_int_eq(c.bos, 256);
	ck_assert_uint_eq(c.n_eos, 1);
	ck_assert_uint_eq(c.eos[0], 257);
}
END_TEST

START_TEST(defaults)
{
	struct ref_config c;

	ck_assert_int_eq(parse_with("head_dim", NULL, &c), 0);
	ck_assert_uint_eq(c.head_dim, 64);
	ck_assert_int_eq(parse_with("num_key_value_heads", NULL, &c), 0);
	ck_assert_uint_eq(c.kv_heads, 4);
	ck_assert_int_eq(parse_with("rope_theta", NULL, &c), 0);
	ck_assert(c.rope_theta == 10000);
	ck_assert_int_eq(parse_with("tie_word_embeddings", NULL, &c), 0);
	ck_assert(!c.tied);
	ck_assert_int_eq(parse_with("bos_token_id", "null", &c), 0);
	ck_assert_int_eq(c.bos, -1);
	ck_assert_int_eq(parse_with("eos_token_id", "[3,4]", &c), 0);
	ck_assert_uint_eq(c.n_eos, 2);
	ck_assert(ref_is_eos(&c, 4) && !ref_is_eos(&c, 257));
	ck_assert_int_eq(parse_with("torch_dtype", NULL, &c), 0);
	ck_assert_int_eq(parse_with("architectures", NULL, &c), 0);
}
END_TEST

START_TEST(rope)
{
	struct ref_config c;

	ck_assert_int_eq(parse_with("rope_scaling", "{\"rope_type\":\"linear\",\"factor\":2.5}", &c), 0);
	ck_assert(c.rope == REF_ROPE_LINEAR && c.rope_factor == 2.5);
	ck_assert_int_eq(parse_with("rope_scaling", "{\"rope_type\":\"llama3\",\"factor\":8,\"low_freq_factor\":1,"
				    "\"high_freq_factor\":4,\"original_max_position_embeddings\":8192}", &c), 0);
	ck_assert(c.rope == REF_ROPE_LLAMA3 && c.rope_low == 1 && c.rope_high == 4 && c.rope_context == 8192);
	ck_assert_int_eq(parse_with("rope_parameters", "{\"rope_type\":\"default\",\"rope_theta\":7e4}", &c), 0);
	ck_assert(c.rope == REF_ROPE_PLAIN && c.rope_theta == 7e4);
}
END_TEST

/* @value NULL: the field is missing. @words must be in the message. */
static const struct {
	const char *key, *value, *words;
} refused[] = {
	{ "vocab_size", NULL, "\"vocab_size\" is missing" },
	{ "hidden_size", NULL, "\"hidden_size\" is missing" },
	{ "intermediate_size", NULL, "\"intermediate_size\" is missing" },
	{ "num_hidden_layers", NULL, "\"num_hidden_layers\" is missing" },
	{ "num_attention_heads", NULL, "\"num_attention_heads\" is missing" },
	{ "max_position_embeddings", NULL, "\"max_position_embeddings\" is missing" },
	{ "rms_norm_eps", NULL, "\"rms_norm_eps\" is missing" },
	{ "architectures", "[\"GPT2LMHeadModel\"]", "GPT2LMHeadModel" },
	{ "architectures", "[]", "LlamaForCausalLM" },
	{ "architectures", "[\"LlamaForCausalLM\",\"LlamaForCausalLM\"]", "\"architectures\" is" },
	{ "architectures", "\"LlamaForCausalLM\"", "\"architectures\" is" },
	{ "architectures", "[7]", "\"architectures\" is [7]" },
	{ "model_type", "\"mistral\"", "\"model_type\" is \"mistral\"; supported: llama" },
	{ "hidden_act", "\"gelu\"", "\"hidden_act\" is \"gelu\"; supported: silu" },
	{ "hidden_act", "\"a\\nb\\u001b[2J\"", "\"hidden_act\" is \"a\\nb\\u001B[2J\"" },
	{ "hidden_act", "\"\\u00e9\"", "\"hidden_act\" is \"\\u00E9\"" },
	{ "torch_dtype", "\"float8_e4m3fn\"", "\"torch_dtype\" is \"float8_e4m3fn\"; supported: float32, float16, bfloat16" },
	{ "dtype", "\"int8\"", "\"dtype\" is \"int8\"" },
	{ "attention_bias", "true", "\"attention_bias\" is true: not supported" },
	{ "mlp_bias", "true", "\"mlp_bias\" is true: not supported" },
	{ "mlp_bias", "0", "\"mlp_bias\" is 0, not true or false" },
	{ "tie_word_embeddings", "\"yes\"", "\"tie_word_embeddings\" is \"yes\"" },
	{ "quantization_config", "{}", "\"quantization_config\"" },
	{ "vocab_size", "0", "\"vocab_size\" is 0" },
	{ "vocab_size", "-1", "\"vocab_size\" is -1" },
	{ "vocab_size", "260.0", "\"vocab_size\" is 260.0" },
	{ "vocab_size", "4294967556", "\"vocab_size\" is 4294967556" },
	{ "vocab_size", "\"260\"", "\"vocab_size\" is \"260\"" },
	{ "vocab_size", "[260]", "\"vocab_size\" is [260]" },
	{ "vocab_size", "{\"a\":\"0123456789012345678901234567890123456789\",\"b\":1}",
	  "\"vocab_size\" is {\"a\":\"01234567890123456789012345678901234567..., not" },
	{ "hidden_size", "null", "\"hidden_size\" is null" },
	{ "hidden_size", "65537", "from 1 to 65536" },
	{ "num_hidden_layers", "1025", "from 1 to 1024" },
	{ "num_attention_heads", "5", "5 attention heads are not a multiple of 2" },
	{ "num_key_value_heads", "3", "4 attention heads are not a multiple of 3" },
	{ "num_key_value_heads", "0", "\"num_key_value_heads\" is 0" },
	{ "head_dim", "7", "a head of 7 elements" },
	{ "head_dim", "33", "a head of 33 elements" },
	{ "head_dim", "513", "\"head_dim\" is 513" },
	{ "max_position_embeddings", "9223372036854775807", "\"max_position_embeddings\" is 9223372036854775807" },
	{ "rms_norm_eps", "-1", "\"rms_norm_eps\" is -1" },
	{ "rms_norm_eps", "\"1e-5\"", "\"rms_norm_eps\" is \"1e-5\"" },
	{ "rope_theta", "0", "\"rope_theta\" is 0" },
	{ "rope_scaling", "7", "\"rope_scaling\" is 7" },
	{ "rope_scaling", "{\"factor\":2}", "\"rope_scaling\" has no \"rope_type\"" },
	{ "rope_scaling", "{\"type\":\"yarn\",\"factor\":2}", "type \"yarn\"; supported: default, linear, llama3" },
	{ "rope_scaling", "{\"type\":\"linear\"}", "\"factor\" is missing" },
	{ "rope_scaling", "{\"rope_type\":\"llama3\",\"factor\":8,\"low_freq_factor\":4,\"high_freq_factor\":4,"
			  "\"original_max_position_embeddings\":8192}", "\"high_freq_factor\" is 4, not above" },
	{ "bos_token_id", "260", "\"bos_token_id\" has 260, not a token id from 0 to 259" },
	{ "eos_token_id", "-1", "\"eos_token_id\" has -1" },
	{ "eos_token_id", "[257,\"x\"]", "\"eos_token_id\" has \"x\"" },
	{ "eos_token_id", "[1,2,3,4,5,6,7,8,9]", "lists 9 tokens" },
};

START_TEST(refuse_field)
{
	struct ref_config c;

	memset(&c, 0x5a, sizeof(c));
	ck_assert_int_eq(parse_with(refused[_i].key, refused[_i].value, &c), -EINVAL);
	ck_assert_msg(strstr(kvt_last_error(), refused[_i].words) != NULL, "\"%s\" lacks \"%s\"", kvt_last_error(),
		      refused[_i].words);
	ck_assert_ptr_null(strchr(kvt_last_error(), '\n'));
	ck_assert_uint_eq(c.vocab, 0x5a5a5a5a);
}
END_TEST

START_TEST(head_dim_not_whole)
{
	struct ref_config c;
	static const char text[] = "{\"architectures\":[\"LlamaForCausalLM\"],\"vocab_size\":9,\"hidden_size\":100,"
				   "\"intermediate_size\":4,\"num_hidden_layers\":1,\"num_attention_heads\":3,"
				   "\"max_position_embeddings\":8,\"rms_norm_eps\":1e-5}";

	ck_assert_int_eq(ref_config_parse(text, strlen(text), &c), -EINVAL);
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "\"hidden_size\" 100 is not a multiple"));
}
END_TEST

/* Not JSON at all, in all the ways. */
static const struct {
	const char *text;
	size_t bytes;
} broken[] = {
#define TEXT(s) { s, sizeof(s) - 1 }
	TEXT(""), TEXT(" "), TEXT("{"), TEXT("[]"), TEXT("7"), TEXT("null"), TEXT("{}x"), TEXT("{\"vocab_size\":}"),
	TEXT("{\"a\":\"\xff\xfe\"}"), TEXT("\xff\xfe{\0}\0"),
	TEXT("{\"a\":1e999}"), TEXT("{\"a\":99999999999999999999}"), TEXT("{\"a\":\"\\u0000\"}"), TEXT("{\"a\":NaN}"),
};

START_TEST(refuse_text)
{
	struct ref_config c;

	ck_assert_int_eq(ref_config_parse(broken[_i].text, broken[_i].bytes, &c), -EINVAL);
	ck_assert_ptr_null(strchr(kvt_last_error(), '\n'));
}
END_TEST

START_TEST(refuse_duplicate)
{
	struct ref_config c;
	char text[1024];

	snprintf(text, sizeof(text), "%.*s,\"vocab_size\":260}", (int)strlen(good) - 1, good);
	ck_assert_int_eq(ref_config_parse(text, strlen(text), &c), -EINVAL);
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "duplicate"));
}
END_TEST

START_TEST(refuse_every_truncation)
{
	struct ref_config c;

	for (size_t n = 0; n < strlen(good); n++)
		ck_assert_int_eq(ref_config_parse(good, n, &c), -EINVAL);
}
END_TEST

START_TEST(refuse_depth)
{
	const size_t n = 1 << 20;
	char *text = malloc(n);
	struct ref_config c;

	memset(text, '[', n);
	ck_assert_int_eq(ref_config_parse(text, n, &c), -EINVAL);
	free(text);
}
END_TEST

START_TEST(files)
{
	const char *path = write_file("config.json", "{}", 2);
	struct ref_config c;

	ck_assert_int_eq(ref_config_load(path, &c), -EINVAL);
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), path));
	ck_assert_int_eq(ref_config_load(scratch("none.json"), &c), -ENOENT);
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "none.json"));
	ck_assert_int_eq(ref_config_load(scratch_dir(), &c), -EISDIR);
	ck_assert_int_eq(truncate(path, 5 << 20), 0);
	ck_assert_int_eq(ref_config_load(path, &c), -EFBIG);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("ref_config");
	TCase *t = tcase_create("config");
	SRunner *r = srunner_create(s);
	int failed;

	tcase_add_test(t, all_fields);
	tcase_add_test(t, defaults);
	tcase_add_test(t, rope);
	tcase_add_loop_test(t, refuse_field, 0, sizeof(refused) / sizeof(refused[0]));
	tcase_add_test(t, head_dim_not_whole);
	tcase_add_loop_test(t, refuse_text, 0, sizeof(broken) / sizeof(broken[0]));
	tcase_add_test(t, refuse_duplicate);
	tcase_add_test(t, refuse_every_truncation);
	tcase_add_test(t, refuse_depth);
	tcase_add_test(t, files);
	suite_add_tcase(s, t);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed != 0;
}
