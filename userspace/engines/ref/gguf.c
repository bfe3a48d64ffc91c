// SPDX-License-Identifier: MIT
/* Configuration and tokenizer from the metadata of a GGUF file. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "engines/ref/engine.h"
#include "runtime/weights.h"

/* @fallback 0: the key must be there. */
static int get(const struct kvt_weights *w, const char *key, uint32_t max, uint32_t fallback, uint32_t *out)
{
	uint64_t value;
	int err;

	if (fallback && !kvt_weights_meta(w, key)) {
		*out = fallback;
		return 0;
	}
	err = kvt_weights_uint(w, key, 0, &value);
	if (err)
		return kvt_fail(-EINVAL, "%s: there is no whole number \"%s\"", w->path, key);
	if (value < 1 || value > max)
		return kvt_fail(-EINVAL, "%s: \"%s\" is %llu, not 1 to %u", w->path, key, (unsigned long long)value, max);
	*out = (uint32_t)value;
	return 0;
}

static int get_number(const struct kvt_weights *w, const char *key, double min, double max, double *out)
{
	if (kvt_weights_number(w, key, 0, out) || !(*out >= min) || !(*out <= max))
		return kvt_fail(-EINVAL, "%s: \"%s\" is not a number from %g to %g", w->path, key, min, max);
	return 0;
}

static int want_text(const struct kvt_weights *w, const char *key, const char *want)
{
	struct kvt_text text;
	char quoted[64];

	if (kvt_weights_text(w, key, 0, &text))
		return kvt_fail(-EINVAL, "%s: \"%s\" is missing", w->path, key);
	if (strcmp(text.s, want))
		return kvt_fail(-EINVAL, "%s: \"%s\" is %s; supported: \"%s\"", w->path, key,
				ref_quote(quoted, sizeof(quoted), text.s), want);
	return 0;
}

static int get_rope(const struct kvt_weights *w, struct ref_config *c)
{
	struct kvt_text type;
	char quoted[64];
	uint32_t dims;
	int err;

	c->rope_theta = 10000;
	if (kvt_weights_meta(w, "llama.rope.freq_base"))
		err = get_number(w, "llama.rope.freq_base", 1, 1e12, &c->rope_theta);
	else
		err = 0;
	if (!err)
		err = get(w, "llama.rope.dimension_count", 1 << 16, c->head_dim, &dims);
	if (!err && dims != c->head_dim)
		err = kvt_fail(-EINVAL, "%s: \"llama.rope.dimension_count\" is %u; supported: the whole head, %u", w->path,
			       dims, c->head_dim);
	if (err || kvt_weights_text(w, "llama.rope.scaling.type", 0, &type) || !strcmp(type.s, "none"))
		return err;
	if (strcmp(type.s, "linear"))
		return kvt_fail(-EINVAL, "%s: \"llama.rope.scaling.type\" is %s; supported: none, linear", w->path,
				ref_quote(quoted, sizeof(quoted), type.s));
	c->rope = REF_ROPE_LINEAR;
	return get_number(w, "llama.rope.scaling.factor", 1, 1e6, &c->rope_factor);
}

static int get_special(const struct kvt_weights *w, struct ref_config *c)
{
	static const char *const ends[] = { "tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id" };
	uint64_t id;

	c->bos = -1;
	if (!kvt_weights_uint(w, "tokenizer.ggml.bos_token_id", 0, &id)) {
		if (id >= c->vocab)
			return kvt_fail(-EINVAL, "%s: \"tokenizer.ggml.bos_token_id\" is %llu, of %u tokens", w->path,
					(unsigned long long)id, c->vocab);
		c->bos = (int32_t)id;
	}
	for (uint32_t i = 0; i < 2; i++) {
		if (kvt_weights_uint(w, ends[i], 0, &id))
			continue;
		if (id >= c->vocab)
			return kvt_fail(-EINVAL, "%s: \"%s\" is %llu, of %u tokens", w->path, ends[i], (unsigned long long)id,
					c->vocab);
		c->eos[c->n_eos++] = (uint32_t)id;
	}
	return 0;
}

int ref_gguf_config(const struct kvt_weights *w, struct ref_config *config)
{
	const struct kvt_tensor *embed = kvt_weights_find(w, "token_embd.weight");
	struct ref_config c = { 0 };
	double eps;
	int err;

	err = want_text(w, "general.architecture", "llama");
	if (!err)
		err = get(w, "llama.context_length", 1u << 27, 0, &c.context);
	if (!err)
		err = get(w, "llama.embedding_length", 1u << 16, 0, &c.hidden);
	if (!err)
		err = get(w, "llama.feed_forward_length", 1u << 18, 0, &c.inter);
	if (!err)
		err = get(w, "llama.block_count", 1024, 0, &c.layers);
	if (!err)
		err = get(w, "llama.attention.head_count", 1024, 0, &c.heads);
	if (!err)
		err = get(w, "llama.attention.head_count_kv", 1024, c.heads, &c.kv_heads);
	if (!err && c.hidden % c.heads && !kvt_weights_meta(w, "llama.attention.key_length"))
		err = kvt_fail(-EINVAL, "%s: \"llama.embedding_length\" %u is not a multiple of \"llama.attention.head_count\" %u",
			       w->path, c.hidden, c.heads);
	if (!err)
		err = get(w, "llama.attention.key_length", 512, c.hidden / c.heads, &c.head_dim);
	if (!err)
		err = get_number(w, "llama.attention.layer_norm_rms_epsilon", 0, 1, &eps);
	if (!err && (!embed || embed->rank != 2 || embed->shape[0] < 1 || embed->shape[0] > 1u << 22))
		err = kvt_fail(-EINVAL, "%s: there is no tensor \"token_embd.weight\" of 1 to %u rows", w->path, 1u << 22);
	if (err)
		return err;
	c.eps = (float)eps;
	c.vocab = (uint32_t)embed->shape[0];
	c.tied = !kvt_weights_find(w, "output.weight");
	err = get_rope(w, &c);
	if (!err)
		err = get_special(w, &c);
	if (!err && ref_config_check(&c))
		err = kvt_fail_more(-EINVAL, "%s", w->path);
	if (!err)
		*config = c;
	return err;
}

int ref_gguf_tokenizer(const struct kvt_weights *w, const struct ref_config *c, struct ref_tokenizer **tokenizer)
{
	static const char tokens_key[] = "tokenizer.ggml.tokens", scores_key[] = "tokenizer.ggml.scores";
	static const char types_key[] = "tokenizer.ggml.token_type";
	int64_t n = kvt_weights_count(w, tokens_key), types = kvt_weights_count(w, types_key);
	const char **text = calloc(c->vocab, sizeof(*text));
	size_t *bytes = calloc(c->vocab, sizeof(*bytes));
	float *scores = calloc(c->vocab, sizeof(*scores));
	int32_t *kinds = calloc(c->vocab, sizeof(*kinds));
	struct kvt_text piece;
	uint64_t kind = 0;
	double score;
	int err;

	err = want_text(w, "tokenizer.ggml.model", "llama");
	if (err)
		goto free_lists;
	if (!text || !bytes || !scores || !kinds) {
		err = kvt_fail(-ENOMEM, "no memory for %u tokens", c->vocab);
		goto free_lists;
	}
	if (n != c->vocab || kvt_weights_count(w, scores_key) != n || (types >= 0 && types != n)) {
		err = kvt_fail(-EINVAL, "%s: \"%s\", its scores and types do not hold %u items, one for each row of "
			       "\"token_embd.weight\"", w->path, tokens_key, c->vocab);
		goto free_lists;
	}
	for (uint32_t i = 0; i < c->vocab; i++) {
		if (kvt_weights_text(w, tokens_key, i, &piece) || kvt_weights_number(w, scores_key, i, &score) ||
		    (types >= 0 && kvt_weights_uint(w, types_key, i, &kind))) {
			err = kvt_fail(-EINVAL, "%s: token %u has no text, score or type", w->path, i);
			goto free_lists;
		}
		text[i] = piece.s;
		bytes[i] = piece.len;
		scores[i] = (float)score;
		kinds[i] = (int32_t)(kind & 0xff);
	}
	err = ref_tokenizer_from(text, bytes, scores, types >= 0 ? kinds : NULL, c, tokenizer);
	if (err)
		kvt_fail_more(err, "%s", w->path);

free_lists:
	free(text);
	free(bytes);
	free(scores);
	free(kinds);
	return err;
}
