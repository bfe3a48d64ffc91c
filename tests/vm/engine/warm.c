// SPDX-License-Identifier: MIT
/*
 * An engine that may be killed: warm PROMPT-FILE user|module NAME|- N OUT [die]
 *
 * No model, but the traffic of one: the bytes of the prompt are tokens, each makes K and V rows in every layer from what
 * the layer below attended to, and the last layer's output picks the next token. Writes the outputs of N tokens, and with
 * "die" ends by SIGKILL. With a NAME its RAM tier is a named pool: what the prompt has in common with what is found
 * there is not computed again. Says how many tokens that were, and what was read from disk.
 */
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kvtier.h"

enum { LAYERS = 4, HEADS = 2, DIM = 64, ROW = HEADS * DIM, CONTEXT = 2048 };

#define MUST(call)                                                                      \
	do {                                                                            \
		if (call) {                                                             \
			fprintf(stderr, "warm: %s: %s\n", #call, kvt_last_error());     \
			exit(1);                                                        \
		}                                                                       \
	} while (0)

/* A fixed mixing of numbers, in place of weights. */
static void project(float *y, const float *x, uint32_t seed)
{
	for (uint32_t i = 0; i < ROW; i++) {
		uint32_t h = (seed * ROW + i) * 2654435761u;
		float sum = 0;

		for (uint32_t j = 0; j < ROW; j += 8, h = h * 1664525u + 1013904223u)
			sum += x[(i + j) % ROW] * ((int32_t)h / 2147483648.0f);
		y[i] = sum;
	}
}

static struct kvt_cache *cache;
static struct kvt_seq *seq;

/* One token; @x is what the last layer gives. */
static void forward(uint32_t token, float *x)
{
	struct kvt_attn attn = KVT_INIT(attn);
	uint32_t at = kvt_seq_len(seq);
	float k[ROW], v[ROW], q[ROW];

	MUST(kvt_seq_append(seq, &token, 1));
	for (uint32_t i = 0; i < ROW; i++)
		x[i] = (int32_t)((token + 1) * 40503u * (i + 1) * 2654435761u) / 2147483648.0f;
	attn.flags = KVT_ATTN_CAUSAL;
	attn.n_heads = HEADS;
	for (uint32_t layer = 0; layer < LAYERS; layer++) {
		struct kvt_rows rows = { .type = KVT_F32 };
		struct kvt_attn_item item = { .seq = seq, .first = at, .n = 1, .q = q, .out = x };

		project(k, x, 3 * layer);
		project(v, x, 3 * layer + 1);
		project(q, x, 3 * layer + 2);
		rows.data = k;
		MUST(kvt_seq_write(seq, 2 * layer, at, 1, &rows));
		rows.data = v;
		MUST(kvt_seq_write(seq, 2 * layer + 1, at, 1, &rows));
		attn.k_plane = 2 * layer;
		attn.v_plane = 2 * layer + 1;
		MUST(kvt_attend(cache, &attn, &item, 1));
	}
}

int main(int argc, char **argv)
{
	struct kvt_plane_params planes[2 * LAYERS];
	struct kvt_cache_params p = KVT_INIT(p);
	struct kvt_stats st = KVT_INIT(st);
	static uint8_t text[CONTEXT / 2];
	static uint32_t ids[CONTEXT / 2];
	float x[ROW] = { 0 };
	uint32_t n, found, want;
	FILE *f;

	if (argc < 6 || !(f = fopen(argv[1], "r")))
		return 2;
	n = (uint32_t)fread(text, 1, sizeof(text), f);
	fclose(f);
	want = (uint32_t)atoi(argv[4]);
	for (uint32_t i = 0; i < n; i++)
		ids[i] = text[i];
	for (uint32_t i = 0; i < 2 * LAYERS; i++)
		planes[i] = (struct kvt_plane_params){ .size = sizeof(planes[i]), .codec = KVT_F16, .heads = HEADS,
						       .head_dim = DIM, .layer = i / 2 };
	p.planes = planes;
	p.n_planes = 2 * LAYERS;
	p.block_bytes = 16384;
	p.threads = 1;
	p.max_seqs = 2;
	p.max_tokens = CONTEXT;
	p.max_query_rows = 1;
	p.max_query_heads = HEADS;
	p.ram_bytes = 32 << 20;
	p.disk_bytes = 16 << 20;
	p.disk_dir = "/mnt";
	p.host = strcmp(argv[2], "module") ? KVT_HOST_USER : KVT_HOST_MODULE;
	p.warm_name = strcmp(argv[3], "-") ? argv[3] : NULL;
	p.warm_id = 1;
	MUST(kvt_cache_create(&p, &cache));
	if (!p.warm_name || kvt_seq_recover(cache, ids, n, &seq))
		MUST(kvt_seq_create(cache, &seq));
	/* the last token's output is wanted */
	if (kvt_seq_len(seq) == n)
		MUST(kvt_seq_truncate(seq, n - 1));
	found = kvt_seq_len(seq);
	for (uint32_t i = found; i < n; i++)
		forward(ids[i], x);
	f = fopen(argv[5], "w");
	if (!f)
		return 1;
	for (uint32_t i = 0; i < want; i++) {
		uint32_t bits;

		fwrite(x, sizeof(x), 1, f);
		memcpy(&bits, &x[i % ROW], sizeof(bits));
		forward(bits % 251, x);
	}
	fclose(f);
	MUST(kvt_cache_stats(cache, &st));
	printf("%u of %u tokens found, %llu bytes read from disk, %llu blocks verified\n", found, n,
	       (unsigned long long)st.disk_read_bytes, (unsigned long long)st.warm_blocks);
	fflush(stdout);
	if (argc > 6)
		kill(getpid(), SIGKILL);
	kvt_cache_destroy(cache);
	return 0;
}
