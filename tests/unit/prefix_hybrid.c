// SPDX-License-Identifier: MIT
/*
 * A whole engine with attention and a recurrent layer between: what it says after a prefix that others have computed,
 * from the deepest snapshot at or above the match and a replay of the rest, has the bits of a cold run.
 */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cache/prefix.h"
#include "kvtier.h"

#define DIM 16
#define LAYERS 2 /* of attention; the recurrent one stands between them */
#define VOCAB 40
#define STATE 200 /* floats */
#define CHUNK 64  /* rows of f32 in a block of 4 KiB */
#define PROMPT (4 * CHUNK + 1)
#define NEW 6
#define SNAPSHOTS 3 /* of a session */

struct engine {
	struct kvt_cache *cache;
	struct kvt_prefix_root root;
	float state[STATE];
	uint32_t computed; /* tokens that went through it */
};

static float weight(uint32_t what, uint32_t i, uint32_t j)
{
	uint32_t h = (what * 1009 + i * 131 + j) * 0x9E3779B9u;

	h = (h ^ h >> 15) * 0x85EBCA6Bu;
	return (float)(int32_t)(h ^ h >> 13) * 0x1p-32f;
}

static void multiply(uint32_t what, const float *x, float *y)
{
	for (uint32_t i = 0; i < DIM; i++) {
		y[i] = 0;
		for (uint32_t j = 0; j < DIM; j++)
			y[i] += weight(what, i, j) * x[j];
	}
}

static void recur(float *state, float *x)
{
	for (uint32_t i = 0; i < STATE; i++)
		state[i] = state[i] * 0.97f + x[i % DIM] * weight(7, i, 0);
	for (uint32_t i = 0; i < DIM; i++)
		x[i] += state[i] + state[i + DIM];
}

/* Token @at of a sequence that has it. @write: its rows are new; else they are there, and only the state is wanted. */
static void forward(struct engine *e, struct kvt_seq *seq, uint32_t token, uint32_t at, bool write, float *logits)
{
	struct kvt_attn attn = { .size = sizeof(attn), .flags = KVT_ATTN_CAUSAL, .n_heads = 1 };
	float x[DIM], row[DIM], q[DIM], out[DIM];
	struct kvt_rows rows = { .data = row, .type = KVT_F32 };
	struct kvt_attn_item item = { .seq = seq, .first = at, .n = 1, .q = q, .out = out };

	for (uint32_t i = 0; i < DIM; i++)
		x[i] = weight(1, token, i);
	for (uint32_t layer = 0; layer < LAYERS; layer++) {
		for (uint32_t v = 0; v < 2 && write; v++) {
			multiply(10 + layer * 2 + v, x, row);
			ck_assert_msg(!kvt_seq_write(seq, layer * 2 + v, at, 1, &rows), "%s", kvt_last_error());
		}
		multiply(20 + layer, x, q);
		attn.k_plane = layer * 2;
		attn.v_plane = layer * 2 + 1;
		ck_assert_msg(!kvt_attend(e->cache, &attn, &item, 1), "%s", kvt_last_error());
		for (uint32_t i = 0; i < DIM; i++)
			x[i] += out[i];
		if (!layer)
			recur(e->state, x);
	}
	for (uint32_t t = 0; t < VOCAB; t++) {
		logits[t] = 0;
		for (uint32_t i = 0; i < DIM; i++)
			logits[t] += x[i] * weight(2, t, i);
	}
	e->computed++;
}

static uint32_t likeliest(const float *logits)
{
	uint32_t best = 0;

	for (uint32_t t = 1; t < VOCAB; t++)
		best = logits[t] > logits[best] ? t : best;
	return best;
}

/* Begin with what is cached of the prompt but for its last token. Returns the tokens of it; the state is that behind them. */
static uint32_t begin(struct engine *e, struct kvt_seq *seq, const uint32_t *tokens, uint32_t n, uint32_t *snapshot)
{
	struct kvt_prefix_match m;
	float logits[VOCAB];
	int64_t found;

	ck_assert(!kvt_prefix_match(e->cache, &e->root, tokens, n - 1, &m));
	found = kvt_prefix_attach(e->cache, &m, n, seq);
	ck_assert_int_eq(found, m.tokens);
	memset(e->state, 0, sizeof(e->state));
	if (m.snapshot)
		ck_assert_int_eq(kvt_snapshot_get(e->cache, &m, e->state, sizeof(e->state)), sizeof(e->state));
	*snapshot = m.snapshot;
	kvt_prefix_release(e->cache, &m);
	for (uint32_t t = *snapshot; t < (uint32_t)found; t++)
		forward(e, seq, tokens[t], t, false, logits);
	return (uint32_t)found;
}

/*
 * NEW tokens behind a prompt. @keep: for the next ones, with the state at the end of each chunk;
 * @cached: begin with what is. Returns the tokens that began it.
 */
static uint32_t serve(struct engine *e, const uint32_t *prompt, uint32_t n, bool cached, bool keep, float *logits,
		      uint32_t *snapshot)
{
	static float states[PROMPT / CHUNK + 1][STATE];
	uint32_t tokens[PROMPT + NEW], from = 0, last = n + NEW - 1;
	struct kvt_seq *seq;

	memcpy(tokens, prompt, n * sizeof(*tokens));
	memset(e->state, 0, sizeof(e->state));
	e->computed = 0;
	ck_assert(!kvt_seq_create(e->cache, &seq));
	if (cached)
		from = begin(e, seq, tokens, n, snapshot);
	for (uint32_t t = from; t < last; t++) {
		float *out = logits + (t < n ? 0 : t - n + 1) * VOCAB;

		ck_assert(!kvt_seq_append(seq, &tokens[t], 1));
		forward(e, seq, tokens[t], t, true, out);
		if (t + 1 >= n)
			tokens[t + 1] = likeliest(out);
		if ((t + 1) % CHUNK == 0 && t < n)
			memcpy(states[(t + 1) / CHUNK], e->state, sizeof(e->state));
	}
	if (keep) {
		ck_assert_int_eq(kvt_prefix_insert(e->cache, &e->root, seq, n, 1000000), n);
		for (uint32_t c = 1; c * CHUNK <= n; c++)
			ck_assert_msg(!kvt_snapshot_put(e->cache, &e->root, tokens, c * CHUNK, 1, states[c], sizeof(states[c])), "%s",
				      kvt_last_error());
	}
	kvt_seq_free(seq);
	return from;
}

static void open_engine(struct engine *e)
{
	struct kvt_plane_params planes[2 * LAYERS];
	struct kvt_cache_params p = {
		.size = sizeof(p), .disk_bytes = 4 << 20, .block_bytes = 4096, .planes = planes, .n_planes = 2 * LAYERS,
		.threads = 1, .max_seqs = 4, .max_tokens = PROMPT + NEW, .max_query_rows = 1, .snapshots = 8,
		.session_snapshots = SNAPSHOTS, .snapshot_bytes = STATE * sizeof(float),
	};

	for (uint32_t i = 0; i < 2 * LAYERS; i++)
		planes[i] = (struct kvt_plane_params){ .size = sizeof(planes[i]), .codec = KVT_F32, .heads = 1,
						       .head_dim = DIM };
	p.prefix_bytes = (uint64_t)kvt_prefix_bytes(&p, 40);
	p.ram_bytes = (uint64_t)kvt_cache_min_ram(&p) + 60 * 4096;
	memset(e, 0, sizeof(*e));
	e->root.size = sizeof(e->root);
	ck_assert_msg(!kvt_cache_create(&p, &e->cache), "%s", kvt_last_error());
	ck_assert_int_eq(kvt_prefix_tokens(e->cache), CHUNK);
}

/* Prompts of k chunks + {-1, 0, 1} tokens, cold and with what an earlier one has left, in memory and on disk. */
START_TEST(a_hybrid_engine_says_the_same)
{
	static float cold[NEW * VOCAB], warm[NEW * VOCAB];
	uint32_t prompt[PROMPT], snapshot, found, want;
	struct engine e;

	for (uint32_t i = 0; i < PROMPT; i++)
		prompt[i] = (i * i + i / 7) % VOCAB;
	open_engine(&e);
	serve(&e, prompt, PROMPT, false, true, cold, &snapshot);
	for (uint32_t n = CHUNK - 1; n <= PROMPT; n += n % CHUNK == 1 ? CHUNK - 2 : 1) {
		serve(&e, prompt, n, false, false, cold, &snapshot);
		ck_assert_uint_eq(e.computed, n + NEW - 1);
		if (_i)
			ck_assert_int_ge(kvt_prefix_evict(e.cache, KVT_TIER_RAM, 3), 1);
		found = serve(&e, prompt, n, true, false, warm, &snapshot);
		ck_assert_uint_eq(found, n - 1); /* the last one is computed again, for its logits */
		/* the session has the last three of its chunks' ends */
		want = found / CHUNK * CHUNK;
		ck_assert_uint_eq(snapshot, want >= 2 * CHUNK ? want : 0);
		ck_assert_uint_eq(e.computed, n + NEW - 1 - snapshot);
		ck_assert_msg(!memcmp(cold, warm, sizeof(cold)), "%u tokens, a snapshot of %u: other bits", n, snapshot);
	}
	ck_assert_msg(!kvt_prefix_check(e.cache), "%s", kvt_last_error());
	kvt_cache_destroy(e.cache);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("prefix_hybrid");
	TCase *c = tcase_create("prefix_hybrid");
	SRunner *r = srunner_create(s);
	int failed;

	tcase_add_loop_test(c, a_hybrid_engine_says_the_same, 0, 2);
	suite_add_tcase(s, c);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
