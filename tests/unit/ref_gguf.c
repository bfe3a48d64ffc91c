// SPDX-License-Identifier: MIT
/* Configuration and tokenizer from GGUF metadata: what is read, and each key missing or wrong alone, named. */
#include <check.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engines/ref/engine.h"
#include "lib/weightfile.h"
#include "runtime/weights.h"

#define VOCAB 262
#define HIDDEN 16

enum { U32 = 4, I32 = 5, F32 = 6, STRING = 8, ARRAY = 9 };

struct meta {
	const char *key;
	uint32_t type;
	double number;
	const char *text;
};

static const struct meta good[] = {
	{ "general.architecture", STRING, 0, "llama" },
	{ "llama.context_length", U32, 512, NULL },
	{ "llama.embedding_length", U32, HIDDEN, NULL },
	{ "llama.feed_forward_length", U32, 24, NULL },
	{ "llama.block_count", U32, 3, NULL },
	{ "llama.attention.head_count", U32, 2, NULL },
	{ "llama.attention.layer_norm_rms_epsilon", F32, 1e-5, NULL },
	{ "tokenizer.ggml.model", STRING, 0, "llama" },
	{ "tokenizer.ggml.bos_token_id", U32, 1, NULL },
	{ "tokenizer.ggml.eos_token_id", U32, 2, NULL },
};

#define GOOD (sizeof(good) / sizeof(good[0]))

static void put_meta(struct bytes *b, const struct meta *m)
{
	float f = (float)m->number;

	put_gguf_text(b, m->key);
	put_u32(b, m->type);
	if (m->type == STRING)
		put_gguf_text(b, m->text);
	else if (m->type == F32)
		put(b, &f, 4);
	else
		put_u32(b, (uint32_t)(int64_t)m->number);
}

static void put_array(struct bytes *b, const char *key, uint32_t type, uint64_t n)
{
	put_gguf_text(b, key);
	put_u32(b, ARRAY);
	put_u32(b, type);
	put_u64(b, n);
}

/* The good file, with @other in place of the key it names, or added; type 0: without the key. @tokens: how many. */
static struct kvt_weights *make(const struct meta *other, uint32_t tokens, const char *embed)
{
	const uint32_t scores = tokens == VOCAB - 1 ? VOCAB : tokens; /* one less: of the tokens alone */
	uint32_t n = 0, drop = 0;
	struct kvt_weights *w;
	struct bytes b = { 0 };
	char text[16];
	float zero = 0;

	for (uint32_t i = 0; other && i < GOOD; i++)
		drop += !strcmp(good[i].key, other->key);
	n = GOOD - drop + (other && other->type) + 3;
	put_text(&b, "GGUF");
	put_u32(&b, 3);
	put_u64(&b, 1);
	put_u64(&b, n);
	for (uint32_t i = 0; i < GOOD; i++)
		if (!other || strcmp(good[i].key, other->key))
			put_meta(&b, &good[i]);
	if (other && other->type)
		put_meta(&b, other);
	put_array(&b, "tokenizer.ggml.tokens", STRING, tokens);
	for (uint32_t i = 0; i < tokens; i++) {
		snprintf(text, sizeof(text), i < 3 ? "<%u>" : i < 259 ? "<0x%02X>" : "\xe2\x96\x81%u", i - (i < 3 ? 0 : 3));
		put_gguf_text(&b, text);
	}
	put_array(&b, "tokenizer.ggml.scores", F32, scores);
	for (uint32_t i = 0; i < scores; i++)
		put(&b, &zero, 4);
	put_array(&b, "tokenizer.ggml.token_type", I32, scores);
	for (uint32_t i = 0; i < scores; i++)
		put_u32(&b, i < 3 ? 3 : i < 259 ? 6 : 1);
	put_gguf_text(&b, embed);
	put_u32(&b, 2);
	put_u64(&b, HIDDEN);
	put_u64(&b, VOCAB);
	put_u32(&b, 0);
	put_u64(&b, 0);
	while (b.n % 32)
		put(&b, "", 1);
	put_pattern(&b, VOCAB * HIDDEN * 4, 1);
	ck_assert_msg(kvt_weights_open(write_bytes("model.gguf", &b), &w) == 0, "%s", kvt_last_error());
	return w;
}

START_TEST(all)
{
	struct kvt_weights *w = make(NULL, VOCAB, "token_embd.weight");
	struct ref_tokenizer *t;
	struct ref_config c;
	uint32_t *ids, n;

	ck_assert_msg(ref_gguf_config(w, &c) == 0, "%s", kvt_last_error());
	ck_assert_uint_eq(c.vocab, VOCAB);
	ck_assert_uint_eq(c.hidden, HIDDEN);
	ck_assert_uint_eq(c.inter, 24);
	ck_assert_uint_eq(c.layers, 3);
	ck_assert_uint_eq(c.heads, 2);
	ck_assert_uint_eq(c.kv_heads, 2);
	ck_assert_uint_eq(c.head_dim, 8);
	ck_assert_uint_eq(c.context, 512);
	ck_assert(c.eps == 1e-5f && c.rope_theta == 10000 && c.rope == REF_ROPE_PLAIN && c.tied);
	ck_assert_int_eq(c.bos, 1);
	ck_assert(ref_is_eos(&c, 2) && c.n_eos == 1);
	ck_assert_msg(ref_gguf_tokenizer(w, &c, &t) == 0, "%s", kvt_last_error());
	ck_assert_int_eq(ref_encode(t, "a", 1, &ids, &n), 0);
	ck_assert_uint_eq(n, 3); /* BOS, the space, a */
	ck_assert_uint_eq(ids[2], 3 + 'a');
	free(ids);
	ref_tokenizer_free(t);
	kvt_weights_close(w);
}
END_TEST

START_TEST(optional)
{
	struct kvt_weights *w;
	struct ref_config c;

	w = make(&(struct meta){ "llama.attention.head_count_kv", U32, 1, NULL }, VOCAB, "token_embd.weight");
	ck_assert_int_eq(ref_gguf_config(w, &c), 0);
	ck_assert_uint_eq(c.kv_heads, 1);
	kvt_weights_close(w);
	w = make(&(struct meta){ "llama.rope.freq_base", F32, 5e5, NULL }, VOCAB, "token_embd.weight");
	ck_assert_int_eq(ref_gguf_config(w, &c), 0);
	ck_assert(c.rope_theta == 5e5);
	kvt_weights_close(w);
	w = make(&(struct meta){ "llama.attention.key_length", U32, 32, NULL }, VOCAB, "token_embd.weight");
	ck_assert_int_eq(ref_gguf_config(w, &c), 0);
	ck_assert_uint_eq(c.head_dim, 32);
	kvt_weights_close(w);
}
END_TEST

static const struct {
	struct meta other;
	const char *words;
} refused[] = {
	{ { "general.architecture", STRING, 0, "mamba" }, "\"general.architecture\" is \"mamba\"; supported: \"llama\"" },
	{ { "general.architecture", STRING, 0, "a\nb" }, "is \"a?b\"" },
	{ { "general.architecture", 0, 0, NULL }, "\"general.architecture\" is missing" },
	{ { "llama.context_length", 0, 0, NULL }, "there is no whole number \"llama.context_length\"" },
	{ { "llama.context_length", STRING, 0, "many" }, "there is no whole number \"llama.context_length\"" },
	{ { "llama.context_length", U32, 0, NULL }, "\"llama.context_length\" is 0, not 1 to" },
	{ { "llama.embedding_length", U32, 65537, NULL }, "\"llama.embedding_length\" is 65537, not 1 to 65536" },
	{ { "llama.embedding_length", U32, 17, NULL }, "17 is not a multiple of \"llama.attention.head_count\" 2" },
	{ { "llama.feed_forward_length", I32, -1, NULL }, "\"llama.feed_forward_length\"" },
	{ { "llama.block_count", U32, 1025, NULL }, "\"llama.block_count\" is 1025" },
	{ { "llama.attention.head_count_kv", U32, 3, NULL }, "2 attention heads are not a multiple of 3" },
	{ { "llama.attention.key_length", U32, 6, NULL }, "a head of 6 elements" },
	{ { "llama.attention.layer_norm_rms_epsilon", F32, -1, NULL }, "\"llama.attention.layer_norm_rms_epsilon\"" },
	{ { "llama.rope.freq_base", F32, 0, NULL }, "\"llama.rope.freq_base\"" },
	{ { "llama.rope.dimension_count", U32, 4, NULL }, "\"llama.rope.dimension_count\" is 4; supported: the whole head, 8" },
	{ { "llama.rope.scaling.type", STRING, 0, "yarn" }, "\"llama.rope.scaling.type\" is \"yarn\"; supported: none, linear" },
	{ { "llama.rope.scaling.type", STRING, 0, "linear" }, "\"llama.rope.scaling.factor\"" },
	{ { "tokenizer.ggml.bos_token_id", U32, VOCAB, NULL }, "\"tokenizer.ggml.bos_token_id\" is 262, of 262 tokens" },
	{ { "tokenizer.ggml.eot_token_id", U32, VOCAB, NULL }, "\"tokenizer.ggml.eot_token_id\" is 262, of 262 tokens" },
};

static void says(int got, const char *words)
{
	ck_assert_int_eq(got, -EINVAL);
	ck_assert_msg(strstr(kvt_last_error(), words) != NULL, "\"%s\" lacks \"%s\"", kvt_last_error(), words);
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "model.gguf"));
	ck_assert_ptr_null(strchr(kvt_last_error(), '\n'));
}

START_TEST(refuse_key)
{
	struct kvt_weights *w = make(&refused[_i].other, VOCAB, "token_embd.weight");
	struct ref_config c;

	says(ref_gguf_config(w, &c), refused[_i].words);
	kvt_weights_close(w);
}
END_TEST

START_TEST(refuse_rest)
{
	struct kvt_weights *w = make(NULL, VOCAB, "other.weight");
	struct ref_tokenizer *t;
	struct ref_config c;

	says(ref_gguf_config(w, &c), "there is no tensor \"token_embd.weight\"");
	kvt_weights_close(w);
	for (uint32_t fewer = 1; fewer <= 2; fewer++) {
		w = make(NULL, VOCAB - fewer, "token_embd.weight");
		ck_assert_int_eq(ref_gguf_config(w, &c), 0);
		says(ref_gguf_tokenizer(w, &c, &t), "do not hold 262 items");
		kvt_weights_close(w);
	}
	w = make(&(struct meta){ "tokenizer.ggml.model", STRING, 0, "gpt2" }, VOCAB, "token_embd.weight");
	ck_assert_int_eq(ref_gguf_config(w, &c), 0);
	says(ref_gguf_tokenizer(w, &c, &t), "\"tokenizer.ggml.model\" is \"gpt2\"; supported: \"llama\"");
	kvt_weights_close(w);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("ref_gguf");
	TCase *t = tcase_create("gguf");
	SRunner *r = srunner_create(s);
	int failed;

	tcase_add_test(t, all);
	tcase_add_test(t, optional);
	tcase_add_loop_test(t, refuse_key, 0, sizeof(refused) / sizeof(refused[0]));
	tcase_add_test(t, refuse_rest);
	suite_add_tcase(s, t);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed != 0;
}
