// SPDX-License-Identifier: MIT
/*
 * perplexity MODEL TEXT TOKENS DEVICE TYPE_K TYPE_V [MORE]: by llama.cpp's
 * library, over one context of the text's first TOKENS; DEVICE "-" is none.
 * Prints the perplexity of the second half, and a digest of all its logits'
 * bits; then the likeliest MORE tokens that follow.
 */
#include <llama.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void quiet(enum ggml_log_level level, const char *text, void *user)
{
	(void)user;
	if (level >= GGML_LOG_LEVEL_ERROR)
		fputs(text, stderr);
}

static enum ggml_type type_of(const char *name)
{
	for (int t = 0; t < GGML_TYPE_COUNT; t++)
		if (ggml_type_name((enum ggml_type)t) && !strcmp(ggml_type_name((enum ggml_type)t), name))
			return (enum ggml_type)t;
	fprintf(stderr, "no type %s\n", name);
	exit(2);
}

/* The likeliest token, and on from it. */
static void go_on(struct llama_context *ctx, const struct llama_vocab *vocab, int more)
{
	for (; more; more--) {
		const float *l = llama_get_logits_ith(ctx, -1);
		llama_token best = 0;
		char piece[64];
		int n;

		for (int v = 1; v < llama_vocab_n_tokens(vocab); v++)
			best = l[v] > l[best] ? v : best;
		n = llama_token_to_piece(vocab, best, piece, sizeof(piece), 0, false);
		fwrite(piece, 1, n > 0 ? (size_t)n : 0, stdout);
		if (llama_decode(ctx, llama_batch_get_one(&best, 1))) {
			fprintf(stderr, "not decoded\n");
			exit(1);
		}
	}
	putchar('\n');
}

int main(int argc, char **argv)
{
	enum { BATCH = 512 };
	struct llama_model_params mp = llama_model_default_params();
	struct llama_context_params cp = llama_context_default_params();
	ggml_backend_dev_t devices[2] = { NULL, NULL };
	int tokens = argc >= 7 ? atoi(argv[3]) : 0, more = argc > 7 ? atoi(argv[7]) : 0, n, scored = 0;
	uint64_t digest = 14695981039346656037ull;
	static char text[1 << 20];
	llama_token *token;
	struct llama_context *ctx;
	struct llama_model *model;
	double sum = 0;
	FILE *f;

	if (tokens < 2 || !(f = fopen(argv[2], "r")))
		return fprintf(stderr, "usage: perplexity MODEL TEXT TOKENS DEVICE TYPE_K TYPE_V [MORE]\n"), 2;
	text[fread(text, 1, sizeof(text) - 1, f)] = '\0';
	fclose(f);
	llama_log_set(quiet, NULL);
	ggml_backend_load_all();
	if (strcmp(argv[4], "-") && !(devices[0] = ggml_backend_dev_by_name(argv[4])))
		return fprintf(stderr, "no device %s\n", argv[4]), 1;
	mp.devices = devices;
	mp.n_gpu_layers = devices[0] ? 99 : 0;
	model = llama_model_load_from_file(argv[1], mp);
	if (!model)
		return 1;
	cp.n_ctx = (uint32_t)(tokens + more);
	cp.n_batch = cp.n_ubatch = BATCH;
	cp.n_threads = cp.n_threads_batch = 1;
	cp.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
	cp.type_k = type_of(argv[5]);
	cp.type_v = type_of(argv[6]);
	ctx = llama_init_from_model(model, cp);
	if (!ctx)
		return 1;
	token = malloc(sizeof(*token) * (size_t)(strlen(text) + 8));
	n = llama_tokenize(llama_model_get_vocab(model), text, (int32_t)strlen(text), token, (int32_t)strlen(text) + 8, true,
			   false);
	if (n < tokens)
		return fprintf(stderr, "the text is %d tokens\n", n), 2;
	n = llama_vocab_n_tokens(llama_model_get_vocab(model));
	for (int at = 0; at < tokens; at += BATCH) {
		int part = tokens - at < BATCH ? tokens - at : BATCH;
		struct llama_batch b = llama_batch_init(part, 0, 1);

		b.n_tokens = part;
		for (int i = 0; i < part; i++) {
			b.token[i] = token[at + i];
			b.pos[i] = at + i;
			b.n_seq_id[i] = 1;
			b.seq_id[i][0] = 0;
			b.logits[i] = at + i >= tokens / 2;
		}
		if (llama_decode(ctx, b))
			return fprintf(stderr, "not decoded\n"), 1;
		for (int i = 0; i < part; i++) {
			const float *l = b.logits[i] ? llama_get_logits_ith(ctx, i) : NULL;
			double top = -INFINITY, all = 0;

			for (size_t byte = 0; l && byte < (size_t)n * sizeof(float); byte++)
				digest = (digest ^ ((const uint8_t *)l)[byte]) * 1099511628211ull;
			if (!l || at + i + 1 >= tokens)
				continue;
			for (int v = 0; v < n; v++)
				top = fmax(top, (double)l[v]);
			for (int v = 0; v < n; v++)
				all += exp((double)l[v] - top);
			sum += log(all) + top - (double)l[token[at + i + 1]];
			scored++;
		}
		llama_batch_free(b);
	}
	printf("%.5f %016llx\n", exp(sum / scored), (unsigned long long)digest);
	if (more > 0)
		go_on(ctx, llama_model_get_vocab(model), more);
	llama_free(ctx);
	llama_model_free(model);
	free(token);
	return 0;
}
