// SPDX-License-Identifier: MIT
/*
 * Attention of kvtier bench gpu: paged rows in blocks of 64 KiB in a scattered
 * order, each call of a captured graph on its own memory. Every work's result is
 * held against another path's, by bytes, before it is timed.
 */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "codec/codec.h"
#include "gpu/attend.h"
#include "tools/bench_gpu.h"

#define BLOCK (64u << 10)
#define SETS_MAX 64

static const struct shape {
	const char *name;
	uint32_t n_seqs, heads, kv_heads, dim, rows, tokens, sets;
	double wanted; /* of the reading rate where one token is attended for, else TFLOP/s */
	uint32_t family;
} shapes[] = {
	{ "decode 1 x 128K", 1, 32, 8, 128, 131072, 1, 4, 0.92, KVT_ATTN_EXACT },
	{ "decode 32 x 8K", 32, 32, 8, 128, 8192, 1, 2, 0.92, KVT_ATTN_EXACT },
	{ "decode 1 x 32K", 1, 32, 8, 128, 32768, 1, 8, 0, KVT_ATTN_EXACT },
	{ "decode 1 x 4K, 14/2 heads of 64", 1, 14, 2, 64, 4096, 1, 64, 0, KVT_ATTN_EXACT },
	{ "prefill 16K", 1, 32, 8, 128, 16384, 16384, 1, 350, KVT_ATTN_EXACT },
	{ "prefill 16K, fast", 1, 32, 8, 128, 16384, 16384, 1, 600, KVT_ATTN_FAST },
	{ "chunk 512 on 32K", 1, 32, 8, 128, 32768, 512, 4, 0, KVT_ATTN_EXACT },
	{ "chunk 512 on 32K, fast", 1, 32, 8, 128, 32768, 512, 4, 600, KVT_ATTN_FAST },
	{ "prefill 4K, 14/2 heads of 64", 1, 14, 2, 64, 4096, 4096, 4, 0, KVT_ATTN_EXACT },
};

struct call {
	struct kvt_attend_args args;
	struct kvt_attend_recipe recipe;
};

struct work {
	struct shape shape;
	uint32_t calls;
	struct call call[SETS_MAX];
	kvt_dptr slab, tables, rows, tokens, q, out, parts, again;
	uint64_t out_bytes;
};

static uint64_t kv_bytes(const struct shape *s)
{
	return 4ull * s->n_seqs * s->rows * s->kv_heads * s->dim;
}

static int launch(struct gb *g, struct call *c)
{
	void *args[] = { &c->args };
	kvt_kernel kernel;
	int ret = 0;

	for (uint32_t i = 0; i < c->recipe.n && !ret; i++) {
		const struct kvt_attend_step *step = &c->recipe.step[i];

		ret = g->ops->kernel(g->gpu, "attend", step->function, &kernel);
		if (!ret)
			ret = g->ops->launch_early(g->gpu, kernel, step->grid, step->block, step->shared_bytes, g->stream,
						   args, 1);
	}
	return ret;
}

static int launch_all(struct gb *g, void *arg)
{
	struct work *w = arg;
	int ret = 0;

	for (uint32_t i = 0; i < w->calls && !ret; i++)
		ret = launch(g, &w->call[i]);
	return ret;
}

/* Finite elements about 0, the same everywhere that is a multiple of a piece apart. */
static int fill(struct gb *g, kvt_dptr at, uint64_t bytes)
{
	enum { PIECE = 16 << 20 };
	uint16_t *piece = malloc(PIECE);
	uint64_t z = 1;
	int ret = 0;

	if (!piece)
		return kvt_fail(-ENOMEM, "no memory for %d bytes of rows", PIECE);
	for (uint32_t i = 0; i < PIECE / 2; i++) {
		float f;

		z = z * 6364136223846793005ull + 1442695040888963407ull;
		f = (float)(int32_t)(z >> 32) / 2147483648.0f;
		kvt_codec_convert(&piece[i], KVT_F16, &f, KVT_F32, 1);
	}
	for (uint64_t done = 0; done < bytes && !ret; done += PIECE)
		ret = g->ops->copy_h2d(g->gpu, at + done, piece, bytes - done < PIECE ? bytes - done : PIECE);
	free(piece);
	return ret;
}

/* Tables of all calls: K's blocks, then V's, scattered over a call's part of the slab. */
static int put_tables(struct gb *g, struct work *w)
{
	const uint64_t blocks = kv_bytes(&w->shape) / BLOCK, half = blocks / 2;
	uint64_t *table = malloc(w->calls * blocks * sizeof(*table));
	int ret;

	if (!table)
		return kvt_fail(-ENOMEM, "no memory for %llu addresses", (unsigned long long)(w->calls * blocks));
	for (uint64_t i = 0; i < w->calls * blocks; i++)
		table[i] = w->slab + i / half * half * BLOCK + i % half * 977 % half * BLOCK;
	ret = g->ops->copy_h2d(g->gpu, w->tables, table, w->calls * blocks * sizeof(*table));
	free(table);
	return ret;
}

static int put_lengths(struct gb *g, const struct work *w)
{
	uint32_t tokens[KVT_ATTEND_SEQS + 1], rows[KVT_ATTEND_SEQS];
	int ret;

	for (uint32_t i = 0; i <= w->shape.n_seqs; i++)
		tokens[i] = i * w->shape.tokens;
	for (uint32_t i = 0; i < w->shape.n_seqs; i++)
		rows[i] = w->shape.rows;
	ret = g->ops->copy_h2d(g->gpu, w->tokens, tokens, (w->shape.n_seqs + 1) * sizeof(uint32_t));
	return ret ? ret : g->ops->copy_h2d(g->gpu, w->rows, rows, w->shape.n_seqs * sizeof(uint32_t));
}

static int recipe(struct gb *g, const struct work *w, enum kvt_attend_path path, uint32_t tokens, struct call *c)
{
	const struct kvt_attend_device device = { g->gpu->sm, g->gpu->processors, g->gpu->shared_max };
	const struct kvt_attend_limits limits = { .tokens = w->shape.n_seqs * tokens, .seq_tokens = tokens,
						  .rows = (uint64_t)w->shape.n_seqs * w->shape.rows };

	return kvt_attend_recipe_path(&device, &limits, path, &c->args, &c->recipe);
}

static int make(struct gb *g, struct work *w)
{
	const struct shape *s = &w->shape;
	const uint32_t row = s->kv_heads * s->dim * 2, block_rows = BLOCK / row, stride = s->rows / block_rows;
	const uint64_t kv = kv_bytes(s), blocks = kv / BLOCK, q_row = s->heads * s->dim * 2ull;
	uint64_t scratch = 0;
	int ret;

	w->out_bytes = s->n_seqs * s->tokens * q_row;
	ret = g->ops->alloc(g->gpu, w->calls * kv, &w->slab);
	if (!ret)
		ret = g->ops->alloc(g->gpu, w->calls * blocks * sizeof(uint64_t), &w->tables);
	if (!ret)
		ret = g->ops->alloc(g->gpu, s->n_seqs * sizeof(uint32_t), &w->rows);
	if (!ret)
		ret = g->ops->alloc(g->gpu, (s->n_seqs + 1) * sizeof(uint32_t), &w->tokens);
	if (!ret)
		ret = g->ops->alloc(g->gpu, w->out_bytes, &w->q);
	if (!ret)
		ret = g->ops->alloc(g->gpu, w->out_bytes, &w->out);
	if (!ret)
		ret = g->ops->alloc(g->gpu, w->out_bytes, &w->again);
	if (!ret)
		ret = fill(g, w->slab, w->calls * kv);
	if (!ret)
		ret = fill(g, w->q, w->out_bytes);
	if (!ret)
		ret = put_tables(g, w);
	if (!ret)
		ret = put_lengths(g, w);
	for (uint32_t i = 0; i < w->calls && !ret; i++) {
		struct call *c = &w->call[i];

		c->args = (struct kvt_attend_args){
			.q = w->q, .out = w->out, .q_stride = q_row, .out_stride = q_row,
			.k_blocks = w->tables + i * blocks * sizeof(uint64_t),
			.v_blocks = w->tables + (i * blocks + blocks / 2) * sizeof(uint64_t),
			.tokens = w->tokens, .rows = w->rows, .n_seqs = s->n_seqs, .table_stride = stride,
			.heads = s->heads, .kv_heads = s->kv_heads, .k_dim = s->dim, .v_dim = s->dim,
			.k_block_rows = block_rows, .v_block_rows = block_rows, .k_row_bytes = row,
			.v_row_bytes = row, .codec = KVT_F16, .q_type = KVT_F16, .out_type = KVT_F16, .causal = 1,
			.scale = 1 / sqrtf((float)s->dim),
			.family = s->family,
		};
		ret = recipe(g, w, KVT_ATTEND_AUTO, s->tokens, c);
		if (!ret)
			ret = kvt_attend_slab(g->gpu, w->slab, w->calls * kv, &c->args);
		scratch = c->recipe.scratch_bytes > scratch ? c->recipe.scratch_bytes : scratch;
	}
	/* one token by decoding is what results are held against */
	if (!ret && scratch < 64ull << 20)
		scratch = 64ull << 20;
	if (!ret)
		ret = g->ops->alloc(g->gpu, scratch, &w->parts);
	for (uint32_t i = 0; i < w->calls; i++)
		w->call[i].args.parts = w->parts;
	return ret;
}

static void unmake(struct gb *g, struct work *w)
{
	const kvt_dptr all[] = { w->slab, w->tables, w->rows, w->tokens, w->q, w->out, w->again, w->parts };

	for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
		g->ops->free(g->gpu, all[i]);
}

/* More than a hundredth of what they are. */
static bool far_apart(const void *a, const void *b, uint64_t n)
{
	const uint16_t *x = a, *y = b;
	double apart = 0, size = 0;

	for (uint64_t i = 0; i < n; i++) {
		float p, q;

		kvt_codec_convert(&p, KVT_F32, &x[i], KVT_F16, 1);
		kvt_codec_convert(&q, KVT_F32, &y[i], KVT_F16, 1);
		apart += (p - q) * (p - q);
		size += q * q;
	}
	return !(apart <= 1e-4 * size);
}

/*
 * The first call's result by another path: that of one token by the one for
 * many, that of many tokens by decoding the last. Family fast gives other bits, near those.
 */
static int check(struct gb *g, struct work *w)
{
	const struct shape *s = &w->shape;
	const uint64_t row = s->heads * s->dim * 2ull, last = w->out_bytes - row;
	const uint32_t tokens[2] = { 0, 1 };
	struct call other = w->call[0];
	uint8_t *a = malloc(w->out_bytes), *b = malloc(w->out_bytes);
	uint64_t bytes = s->tokens == 1 ? w->out_bytes : row, from = s->tokens == 1 ? 0 : last;
	bool none = true;
	int ret;

	ret = a && b ? 0 : kvt_fail(-ENOMEM, "no memory for results");
	other.args.out = w->again;
	other.args.family = KVT_ATTN_EXACT;
	if (!ret)
		ret = launch(g, &w->call[0]);
	if (!ret)
		ret = g->ops->stream_sync(g->gpu, g->stream);
	if (!ret && s->tokens > 1) {
		other.args.q += last;
		ret = g->ops->copy_h2d(g->gpu, w->tokens, tokens, sizeof(tokens));
	}
	if (!ret)
		ret = recipe(g, w, s->tokens == 1 ? KVT_ATTEND_PREFILL : KVT_ATTEND_DECODE, 1, &other);
	if (!ret)
		ret = launch(g, &other);
	if (!ret)
		ret = g->ops->stream_sync(g->gpu, g->stream);
	if (!ret)
		ret = g->ops->copy_d2h(g->gpu, a, w->out + from, bytes);
	if (!ret)
		ret = g->ops->copy_d2h(g->gpu, b, w->again, bytes);
	if (!ret)
		ret = put_lengths(g, w);
	for (uint64_t i = 0; !ret && i < bytes; i++)
		none &= !a[i];
	if (!ret && (none || (s->family == KVT_ATTN_EXACT ? memcmp(a, b, bytes) != 0 : far_apart(a, b, bytes / 2))))
		ret = kvt_fail(-EBADMSG, "%s: two paths give different results: no figure of it would mean anything", s->name);
	free(a);
	free(b);
	return ret;
}

static int bench(struct gb *g, const struct shape *shape)
{
	static struct work w;
	char name[64];
	struct gb_row row = { .work = name };
	double seconds, pairs;
	int ret;

	w = (struct work){ .shape = *shape, .calls = shape->sets };
	while (w.calls > 1 && w.calls * kv_bytes(&w.shape) > g->free_bytes / 2)
		w.calls /= 2;
	while (w.shape.rows > 1024 && kv_bytes(&w.shape) > g->free_bytes / 2) {
		w.shape.rows /= 2;
		w.shape.tokens = w.shape.tokens > w.shape.rows ? w.shape.rows : w.shape.tokens;
	}
	snprintf(name, sizeof(name), "%s", shape->name);
	if (w.shape.rows != shape->rows)
		snprintf(name, sizeof(name), "%s, of %u rows for want of memory", shape->name, w.shape.rows);
	ret = make(g, &w);
	if (!ret)
		ret = check(g, &w);
	if (!ret)
		ret = gb_timed_graph(g, launch_all, &w, &seconds);
	unmake(g, &w);
	if (ret == -EOPNOTSUPP && shape->family == KVT_ATTN_FAST)
		return 0; /* for other devices there is none */
	if (ret)
		return ret;
	seconds /= w.calls;
	pairs = (double)w.shape.n_seqs * w.shape.heads * w.shape.tokens * (w.shape.rows - (w.shape.tokens - 1) / 2.0);
	if (w.shape.tokens == 1) {
		row.unit = "GB/s";
		row.value = kv_bytes(&w.shape) / seconds * 1e-9;
		row.limit = g->read_rate * 1e-9;
		row.limit_of = "HBM read";
		row.wanted = shape->wanted * row.limit;
	} else {
		row.unit = "TFLOP/s";
		row.value = 4 * pairs * w.shape.dim / seconds * 1e-12;
		row.wanted = shape->wanted;
	}
	gb_row(g, &row);
	return 0;
}

int gb_attention(struct gb *g)
{
	int ret = 0;

	for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]) && !ret; i++)
		ret = bench(g, &shapes[i]);
	return ret;
}
