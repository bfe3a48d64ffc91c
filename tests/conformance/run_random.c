// SPDX-License-Identifier: MIT
/*
 * Random models of every head layout, head size and cache type: all logits have
 * the same bits whatever the budgets, blocks, threads, chunks, I/O path, tiers
 * and instruction set.
 */
#include <check.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/cpu.h"
#include "lib/ref_run.h"
#include "lib/weightfile.h"

#define VOCAB 257
#define HIDDEN 48
#define INTER 72
#define LAYERS 2
#define PROMPT 300 /* more than a split, and no multiple of anything */
#define NEW 4

static const uint32_t dims[] = { 8, 64, 80, 128, 256 };
static const uint32_t heads[][2] = { { 8, 2 }, { 14, 2 }, { 4, 4 }, { 6, 1 } };

static uint32_t seed;

static uint32_t next(void)
{
	seed = seed * 1664525u + 1013904223u;
	return seed >> 8;
}

struct tensors {
	struct bytes header, data;
};

static void add_tensor(struct tensors *t, const char *name, uint32_t rows, uint32_t columns)
{
	const float size = rows ? 1.7f / sqrtf((float)columns) : 1;
	char text[256], shape[32];
	float f;

	snprintf(shape, sizeof(shape), rows ? "[%u,%u]" : "[%.0u%u]", rows, columns);
	snprintf(text, sizeof(text), "%s\"%s\":{\"dtype\":\"F32\",\"shape\":%s,\"data_offsets\":[%zu,%zu]}",
		 t->header.n > 1 ? "," : "", name, shape, t->data.n, t->data.n + (rows ? rows : 1) * columns * sizeof(f));
	put_text(&t->header, text);
	for (uint32_t i = 0; i < (rows ? rows : 1) * columns; i++) {
		f = size * ((float)next() / (float)(1 << 23) - 1);
		put(&t->data, &f, sizeof(f));
	}
}

/* A Hugging Face directory. */
static struct ref_model *make_model(uint32_t n_heads, uint32_t kv_heads, uint32_t dim, bool tied)
{
	static const char *const names[] = { "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
					     "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj" };
	const uint32_t shapes[7][2] = { { n_heads * dim, HIDDEN }, { kv_heads * dim, HIDDEN }, { kv_heads * dim, HIDDEN },
					{ HIDDEN, n_heads * dim }, { INTER, HIDDEN }, { INTER, HIDDEN }, { HIDDEN, INTER } };
	struct tensors t = { 0 };
	struct bytes file = { 0 };
	struct ref_model *m;
	char text[512];

	mkdir(scratch("model"), 0755);
	snprintf(text, sizeof(text),
		 "{\"architectures\":[\"LlamaForCausalLM\"],\"vocab_size\":%u,\"hidden_size\":%u,\"intermediate_size\":%u,"
		 "\"num_hidden_layers\":%u,\"num_attention_heads\":%u,\"num_key_value_heads\":%u,\"head_dim\":%u,"
		 "\"hidden_act\":\"silu\",\"max_position_embeddings\":4096,\"rms_norm_eps\":1e-5,\"rope_theta\":10000,"
		 "\"tie_word_embeddings\":%s,\"bos_token_id\":256}",
		 VOCAB, HIDDEN, INTER, LAYERS, n_heads, kv_heads, dim, tied ? "true" : "false");
	write_file("model/config.json", text, strlen(text));
	put_text(&t.header, "{");
	add_tensor(&t, "model.embed_tokens.weight", VOCAB, HIDDEN);
	if (!tied)
		add_tensor(&t, "lm_head.weight", VOCAB, HIDDEN);
	add_tensor(&t, "model.norm.weight", 0, HIDDEN);
	for (uint32_t layer = 0; layer < LAYERS; layer++) {
		snprintf(text, sizeof(text), "model.layers.%u.input_layernorm.weight", layer);
		add_tensor(&t, text, 0, HIDDEN);
		snprintf(text, sizeof(text), "model.layers.%u.post_attention_layernorm.weight", layer);
		add_tensor(&t, text, 0, HIDDEN);
		for (uint32_t i = 0; i < 7; i++) {
			snprintf(text, sizeof(text), "model.layers.%u.%s.weight", layer, names[i]);
			add_tensor(&t, text, shapes[i][0], shapes[i][1]);
		}
	}
	put_text(&t.header, "}");
	put(&t.header, "", 1);
	put_safetensors(&file, (const char *)t.header.p, t.data.p, t.data.n);
	write_bytes("model/model.safetensors", &file);
	free(t.header.p);
	free(t.data.p);
	ck_assert_msg(ref_model_load(scratch("model"), NULL, &m) == 0, "%s", kvt_last_error());
	return m;
}

static const struct ref_how hows[] = {
	{ .name = "smallest budget", .ram = -1, .disk = 64 << 20, .block = 16384, .chunk = 64 },
	{ .name = "little of both", .pinned = 128 << 10, .ram = 64 << 10, .disk = 64 << 20, .block = 8192, .chunk = 100 },
	{ .name = "threads for I/O", .ram = 256 << 10, .disk = 64 << 20, .block = 16384, .io = KVT_IO_THREADS },
	{ .name = "blocks of 1M", .block = 1 << 20, .threads = 3, .chunk = 7 },
	{ .name = "gpu tier", .gpu = 1 << 20, .ram = 128 << 10, .disk = 64 << 20, .block = 16384, .threads = 1 },
	{ .name = "one token a step, one thread", .chunk = 1, .threads = 1 },
	{ .name = "seven threads", .threads = 7, .chunk = 128 },
};

#define HOWS (sizeof(hows) / sizeof(hows[0]))

static void same(const struct ref_model *m, struct ref_how how, const uint32_t *ids, uint32_t n, const float *want)
{
	const size_t rows = n + NEW - 1;
	float *got = ref_run(m, &how, ids, n, NEW, NULL, NULL);

	for (size_t i = 0; i < rows; i++)
		ck_assert_msg(!memcmp(got + i * VOCAB, want + i * VOCAB, VOCAB * sizeof(*got)),
			      "%s, %s: the logits behind token %zu have other bits", how.name,
			      kvt_codec_name((enum kvt_codec)how.codec), i);
	free(got);
}

/* Loop index: head layout x head size. */
START_TEST(same_bits)
{
	const uint32_t *h = heads[_i % 4], dim = dims[_i / 4];
	struct ref_how plain = { .name = "untiered", .threads = 2 };
	uint32_t ids[PROMPT] = { 256 };
	struct ref_model *m;
	float *want;

	seed = (uint32_t)_i + 1;
	m = make_model(h[0], h[1], dim, _i % 2);
	for (uint32_t i = 1; i < PROMPT; i++)
		ids[i] = next() % VOCAB;
	for (plain.codec = 0; plain.codec < KVT_CODECS; plain.codec++) {
		want = ref_run(m, &plain, ids, PROMPT, NEW, NULL, NULL);
		for (size_t i = 0; i < (size_t)(PROMPT + NEW - 1) * VOCAB; i++)
			ck_assert(isfinite(want[i]));
		/* each way with each type at some head size; all of them would be minutes */
		for (size_t i = 0; i < HOWS; i++) {
			struct ref_how how = hows[i];

			how.codec = plain.codec;
			if (((size_t)_i + i + plain.codec) % 3 == 0)
				same(m, how, ids, PROMPT, want);
		}
		free(want);
	}
	ref_model_free(m);
}
END_TEST

START_TEST(same_bits_on_every_isa)
{
	struct ref_how how = { .name = "isa", .codec = KVT_F16, .chunk = 33 };
	uint32_t ids[40] = { 256 };
	struct ref_model *m;
	float *want = NULL, *got;

	seed = 99;
	m = make_model(8, 2, 80, true);
	for (uint32_t i = 1; i < 40; i++)
		ids[i] = next() % VOCAB;
	for (int isa = 0; isa < KVT_ISAS; isa++) {
		how.isa = kvt_isa_name((enum kvt_isa)isa);
		if (!kvt_isa_usable((enum kvt_isa)isa))
			continue;
		got = ref_run(m, &how, ids, 40, NEW, NULL, NULL);
		if (!want)
			want = got;
		ck_assert_msg(!memcmp(got, want, (40 + NEW - 1) * VOCAB * sizeof(*got)), "%s: other bits", how.isa);
		if (got != want)
			free(got);
	}
	free(want);
	ref_model_free(m);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("run_random");
	TCase *t = tcase_create("bits");
	SRunner *r = srunner_create(s);
	int failed;

	tcase_add_loop_test(t, same_bits, 0, 20);
	tcase_add_test(t, same_bits_on_every_isa);
	suite_add_tcase(s, t);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed != 0;
}
