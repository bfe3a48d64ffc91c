// SPDX-License-Identifier: MIT
/* Attention on a GPU backend; gpu_attend.h. */
#include "lib/gpu_attend.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu/attend.h"
#include "kvtier.h"
#include "lib/attn_case.h"
#include "lib/rounds.h"

#define POISON 0xa5
#define REDZONE 256 /* bytes before and behind an output */
#define ITEMS_MAX 64

static struct kvt_gpu *g;
static bool large; /* sizes for a GPU */
static uint32_t family;
static uint64_t rng;
static int failures;

static void fail(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

static void fail(const char *fmt, ...)
{
	va_list ap;

	failures++;
	printf("FAIL attend: ");
	va_start(ap, fmt);
	vprintf(fmt, ap);
	va_end(ap);
	printf("\n");
}

#define OK(call) ok(call, #call)

static void ok(int err, const char *what)
{
	if (!err)
		return;
	printf("%s: %s\n", what, kvt_last_error());
	exit(1);
}

static uint32_t below(uint32_t n)
{
	return (uint32_t)(attn_random(&rng) >> 33) % n;
}

static uint32_t size_of(uint32_t type)
{
	return type == KVT_F32 ? 4 : 2;
}

/* ---- what is attended to: sequences with K, V and queries for every position ---- */

struct world {
	struct kvt_attend_args shape; /* everything but addresses and arrays */
	uint32_t n_seqs;
	uint32_t rows[ITEMS_MAX];
	uint8_t *k[ITEMS_MAX], *v[ITEMS_MAX]; /* [rows][kv_heads][dim], encoded */
	uint8_t *q[ITEMS_MAX];		      /* [rows][heads][k_dim] of q_type */
	float *slopes, *sinks;		      /* [heads] or NULL */
	uint8_t *mask;			      /* [rows][rows] of mask_type or NULL: of sequence 0 alone */
};

static uint8_t *random_elements(uint32_t type, uint64_t n, float scale)
{
	uint8_t *p = malloc(n * size_of(type));

	for (uint64_t i = 0; i < n; i++)
		attn_encode(p, type, i, attn_normal(&rng) * scale);
	return p;
}

static void world_make(struct world *w, uint32_t n_seqs, const uint32_t *rows)
{
	struct kvt_attend_args *a = &w->shape;

	w->n_seqs = n_seqs;
	for (uint32_t i = 0; i < n_seqs; i++) {
		w->rows[i] = rows[i];
		w->k[i] = random_elements(a->codec, (uint64_t)rows[i] * a->kv_heads * a->k_dim, 1);
		w->v[i] = random_elements(a->codec, (uint64_t)rows[i] * a->kv_heads * a->v_dim, 1);
		w->q[i] = random_elements(a->q_type, (uint64_t)rows[i] * a->heads * a->k_dim, 1);
	}
}

static void world_free(struct world *w)
{
	for (uint32_t i = 0; i < w->n_seqs; i++) {
		free(w->k[i]);
		free(w->v[i]);
		free(w->q[i]);
	}
	free(w->slopes);
	free(w->sinks);
	free(w->mask);
}

/* Features by bits: window, soft-cap, slopes, sinks, mask, negative scale. Family fast has windows and sinks. */
static void world_features(struct world *w, uint32_t bits)
{
	struct kvt_attend_args *a = &w->shape;
	uint32_t n = w->rows[0];

	if (a->family == KVT_ATTN_FAST)
		bits &= 1 | 8;
	a->causal = 1;
	a->scale = 1 / sqrtf((float)a->k_dim);
	/* so steep that fast's references change in later tiles, too; queries that are rounded would be off by as much */
	if (a->family == KVT_ATTN_FAST && a->q_type == a->codec)
		a->scale *= 16;
	if (bits & 1)
		a->window = 1 + below(n);
	if (bits & 2)
		a->softcap = below(2) ? 30 : 1.5f;
	if (bits & 4) {
		w->slopes = malloc(a->heads * sizeof(float));
		for (uint32_t h = 0; h < a->heads; h++)
			w->slopes[h] = ldexpf(1, -1 - (int)below(8));
	}
	if (bits & 8) {
		w->sinks = malloc(a->heads * sizeof(float));
		for (uint32_t h = 0; h < a->heads; h++)
			w->sinks[h] = below(5) ? attn_normal(&rng) * 2 : -INFINITY;
	}
	if (bits & 16) {
		a->causal = below(2);
		a->mask_type = below(2) ? KVT_F16 : KVT_F32;
		w->mask = malloc((uint64_t)n * n * size_of(a->mask_type));
		for (uint64_t i = 0; i < (uint64_t)n * n; i++)
			attn_encode(w->mask, a->mask_type, i, below(5) ? attn_normal(&rng) : -INFINITY);
	}
	if (bits & 32)
		a->scale = -a->scale;
}

/* ---- where it lies ---- */

enum where { ON_GPU, PINNED, MIXED };

struct place {
	uint32_t k_block_rows, v_block_rows, stride;
	kvt_dptr k_table, v_table, slab;
	uint64_t slab_bytes;
	void *pinned;
};

/* One plane of all sequences into blocks in a random order; rows behind a sequence's last are NaN. */
static void put_plane(const struct world *w, uint8_t *const *planes, uint32_t row, uint32_t block_rows, enum where where,
		      uint32_t stride, uint64_t slab, uint8_t *pinned, uint64_t *at, kvt_dptr *table)
{
	uint64_t block = (uint64_t)block_rows * row, *entries = calloc((uint64_t)w->n_seqs * stride, 8);
	uint8_t *bytes = malloc(block);

	for (uint32_t i = 0; i < w->n_seqs; i++) {
		uint32_t n = (w->rows[i] + block_rows - 1) / block_rows, swap = n > 1 ? below(n - 1) : 0;

		for (uint32_t b = 0; b < n; b++) {
			uint32_t index = b == swap && n > 1 ? b + 1 : b == swap + 1 && n > 1 ? b - 1 : b;
			uint64_t from = (uint64_t)index * block, all = (uint64_t)w->rows[i] * row;
			uint64_t some = all - from < block ? all - from : block;

			memset(bytes, 0xff, block);
			memcpy(bytes, planes[i] + from, some);
			if (where == PINNED || (where == MIXED && below(2))) {
				memcpy(pinned + *at, bytes, block);
				entries[(uint64_t)i * stride + index] = (uintptr_t)(pinned + *at);
			} else {
				OK(g->ops->copy_h2d(g, slab + *at, bytes, block));
				entries[(uint64_t)i * stride + index] = slab + *at;
			}
			*at += block;
		}
	}
	OK(g->ops->alloc(g, (uint64_t)w->n_seqs * stride * 8, table));
	OK(g->ops->copy_h2d(g, *table, entries, (uint64_t)w->n_seqs * stride * 8));
	free(entries);
	free(bytes);
}

static void place_put(const struct world *w, uint32_t k_block_rows, uint32_t v_block_rows, enum where where, struct place *p)
{
	uint32_t k_row = w->shape.kv_heads * w->shape.k_dim * 2, v_row = w->shape.kv_heads * w->shape.v_dim * 2;
	uint64_t bytes = 0, at = 0;

	*p = (struct place){ .k_block_rows = k_block_rows, .v_block_rows = v_block_rows };
	for (uint32_t i = 0; i < w->n_seqs; i++) {
		uint32_t least = k_block_rows < v_block_rows ? k_block_rows : v_block_rows, n = w->rows[i] / least + 1;

		bytes += (uint64_t)(w->rows[i] + k_block_rows) * k_row + (uint64_t)(w->rows[i] + v_block_rows) * v_row;
		p->stride = n > p->stride ? n : p->stride;
	}
	OK(g->ops->alloc(g, bytes, &p->slab));
	p->slab_bytes = bytes;
	OK(g->ops->host_alloc(g, where == ON_GPU ? 64 : bytes, &p->pinned));
	put_plane(w, w->k, k_row, k_block_rows, where, p->stride, p->slab, p->pinned, &at, &p->k_table);
	put_plane(w, w->v, v_row, v_block_rows, where, p->stride, p->slab, p->pinned, &at, &p->v_table);
}

static void place_free(struct place *p)
{
	g->ops->free(g, p->slab);
	g->ops->free(g, p->k_table);
	g->ops->free(g, p->v_table);
	g->ops->host_free(g, p->pinned);
}

/* ---- a call ---- */

struct item {
	uint32_t seq, first, n, rows; /* query tokens [first, first + n) of a sequence, of which @rows rows are there */
};

struct call {
	struct kvt_attend_args args;
	struct kvt_attend_limits limits;
	kvt_dptr memory[10];
	uint64_t out_bytes;
	struct kvt_attend_recipe recipe;
};

static kvt_dptr upload(struct call *c, uint32_t slot, const void *p, uint64_t bytes)
{
	OK(g->ops->alloc(g, bytes ? bytes : 1, &c->memory[slot]));
	if (p)
		OK(g->ops->copy_h2d(g, c->memory[slot], p, bytes));
	return c->memory[slot];
}

static struct kvt_attend_device device(void)
{
	return (struct kvt_attend_device){ .sm = g->sm, .processors = g->processors, .shared_max = g->shared_max };
}

static void call_make(struct call *c, const struct world *w, const struct place *p, const struct item *items, uint32_t n,
		      enum kvt_attend_path path, uint32_t more_rows)
{
	struct kvt_attend_args *a = &c->args;
	uint32_t tokens[ITEMS_MAX + 1] = { 0 }, rows[ITEMS_MAX], first[ITEMS_MAX];
	uint64_t q_token = (uint64_t)w->shape.heads * w->shape.k_dim * size_of(w->shape.q_type), mask_row = 0;
	uint64_t entries = p->stride * 8ull;
	const struct kvt_attend_device d = device();
	uint64_t *k = malloc(n * entries), *v = malloc(n * entries);
	uint8_t *q, *mask = NULL;

	*c = (struct call){ .args = w->shape };
	for (uint32_t i = 0; i < n; i++) {
		const struct item *it = &items[i];

		tokens[i + 1] = tokens[i] + it->n;
		rows[i] = it->rows;
		first[i] = it->first;
		c->limits.rows += it->rows + more_rows;
		if (it->n > c->limits.seq_tokens)
			c->limits.seq_tokens = it->n;
		OK(g->ops->copy_d2h(g, (uint8_t *)k + i * entries, p->k_table + it->seq * entries, entries));
		OK(g->ops->copy_d2h(g, (uint8_t *)v + i * entries, p->v_table + it->seq * entries, entries));
	}
	c->limits.tokens = tokens[n];
	q = malloc(tokens[n] * q_token);
	if (w->mask) {
		mask_row = (uint64_t)w->rows[0] * size_of(a->mask_type);
		mask = malloc(tokens[n] * mask_row);
	}
	for (uint32_t i = 0; i < n; i++) {
		const struct item *it = &items[i];

		memcpy(q + tokens[i] * q_token, w->q[it->seq] + it->first * q_token, it->n * q_token);
		if (mask)
			memcpy(mask + tokens[i] * mask_row, w->mask + it->first * mask_row, it->n * mask_row);
	}
	a->q = upload(c, 0, q, tokens[n] * q_token);
	a->q_stride = q_token;
	a->tokens = upload(c, 1, tokens, (n + 1) * 4);
	a->rows = upload(c, 2, rows, n * 4);
	a->first = upload(c, 3, first, n * 4);
	a->k_blocks = upload(c, 4, k, n * entries);
	a->v_blocks = upload(c, 5, v, n * entries);
	a->table_stride = p->stride;
	a->n_seqs = n;
	a->k_block_rows = p->k_block_rows;
	a->v_block_rows = p->v_block_rows;
	a->k_row_bytes = a->kv_heads * a->k_dim * 2;
	a->v_row_bytes = a->kv_heads * a->v_dim * 2;
	if (w->slopes)
		a->slopes = upload(c, 6, w->slopes, a->heads * 4);
	if (w->sinks)
		a->sinks = upload(c, 7, w->sinks, a->heads * 4);
	if (mask) {
		a->mask = upload(c, 8, mask, tokens[n] * mask_row);
		a->mask_stride = w->rows[0];
	}
	a->out_stride = (uint64_t)a->heads * a->v_dim * size_of(a->out_type);
	c->out_bytes = tokens[n] * a->out_stride;
	OK(g->ops->alloc(g, c->out_bytes + 2 * REDZONE, &c->memory[9]));
	a->out = c->memory[9] + REDZONE;
	OK(kvt_attend_recipe_path(&d, &c->limits, path, a, &c->recipe));
	/* all of it, half, or none by the copy engine: which must not matter */
	OK(kvt_attend_slab(g, p->slab, p->slab_bytes / (1 + below(2)) * (below(4) > 0), a));
	if (c->recipe.scratch_bytes) {
		OK(g->ops->alloc(g, c->recipe.scratch_bytes, &a->parts));
		OK(g->ops->memset_async(g, a->parts, 0xff, c->recipe.scratch_bytes, 0));
		OK(g->ops->memset_async(g, a->parts, 0, 4 * KVT_ATTEND_COUNTERS, 0));
		OK(g->ops->stream_sync(g, 0));
	}
	free(k);
	free(v);
	free(q);
	free(mask);
}

static void call_free(struct call *c)
{
	uint32_t *counters = malloc(4 * KVT_ATTEND_COUNTERS), set = 0;

	if (c->recipe.scratch_bytes)
		OK(g->ops->copy_d2h(g, counters, c->args.parts, 4 * KVT_ATTEND_COUNTERS));
	for (uint32_t i = 0; c->recipe.scratch_bytes && i < KVT_ATTEND_COUNTERS; i++)
		set += counters[i] != 0;
	if (set)
		fail("%u of scratch's counters were left set", set);
	free(counters);
	for (int i = 0; i < 10; i++)
		g->ops->free(g, c->memory[i]);
	g->ops->free(g, c->args.parts);
}

/* @grid blocks instead of the recipe's; 0: the recipe's. */
static void launch(struct kvt_attend_args *a, const struct kvt_attend_recipe *r, uint32_t grid, kvt_stream stream)
{
	void *args[] = { a };
	kvt_kernel kernel;

	for (uint32_t i = 0; i < r->n; i++) {
		struct kvt_dim3 dim = r->step[i].grid;

		if (grid && i == 0)
			dim.x = a->family == KVT_ATTN_FAST ? 2 * grid : grid; /* clusters of two */
		OK(g->ops->kernel(g, "attend", r->step[i].function, &kernel));
		OK(g->ops->launch_early(g, kernel, dim, r->step[i].block, r->step[i].shared_bytes, stream, args, 1));
	}
}

static void poison(const struct call *c, kvt_stream stream)
{
	OK(g->ops->memset_async(g, c->memory[9], POISON, c->out_bytes + 2 * REDZONE, stream));
}

/* The output; checks that what is around it was left alone. */
static uint8_t *fetch(const struct call *c, const char *what)
{
	uint8_t *all = malloc(c->out_bytes + 2 * REDZONE), *out = malloc(c->out_bytes);
	bool around = true;

	OK(g->ops->copy_d2h(g, all, c->memory[9], c->out_bytes + 2 * REDZONE));
	for (int i = 0; i < REDZONE; i++)
		around &= all[i] == POISON && all[REDZONE + c->out_bytes + i] == POISON;
	if (!around)
		fail("%s: bytes around the output were written", what);
	memcpy(out, all + REDZONE, c->out_bytes);
	free(all);
	return out;
}

static uint8_t *run(const struct world *w, const struct place *p, const struct item *items, uint32_t n,
		    enum kvt_attend_path path, uint32_t grid, const char *what)
{
	struct call c;
	uint8_t *out;

	call_make(&c, w, p, items, n, path, 0);
	poison(&c, 0);
	launch(&c.args, &c.recipe, grid, 0);
	OK(g->ops->stream_sync(g, 0));
	out = fetch(&c, what);
	call_free(&c);
	return out;
}

/* ---- float64 ---- */

/*
 * Query head @h of position @pos: out [v_dim], or false if it sees nothing. @terms: the sum of squares of what is added up,
 * to which independent roundings of weights are in proportion, and which no cancellation makes small.
 */
static bool reference(const struct world *w, const struct item *it, uint32_t pos, uint32_t h, double *out, double *terms)
{
	const struct kvt_attend_args *a = &w->shape;
	uint32_t kv_head = h / (a->heads / a->kv_heads), to = a->causal && pos + 1 < it->rows ? pos + 1 : it->rows;
	uint32_t from = a->window && pos + 1 > a->window ? pos + 1 - a->window : 0;
	double *s = malloc((to + 1) * sizeof(*s)), max = -INFINITY, sum = 0;

	for (uint32_t j = from; j < to; j++) {
		double dot = 0, bias;

		for (uint32_t d = 0; d < a->k_dim; d++)
			dot += (double)attn_decode(w->q[it->seq], a->q_type, ((uint64_t)pos * a->heads + h) * a->k_dim + d) *
			       attn_decode(w->k[it->seq], a->codec, ((uint64_t)j * a->kv_heads + kv_head) * a->k_dim + d);
		dot *= a->scale;
		if (a->softcap != 0)
			dot = a->softcap * tanh(dot / a->softcap);
		if (w->mask) {
			bias = attn_decode(w->mask, a->mask_type, (uint64_t)pos * w->rows[0] + j);
			dot += w->slopes && bias != -INFINITY ? w->slopes[h] * bias : bias;
		} else if (w->slopes) {
			dot += w->slopes[h] * ((double)j - pos);
		}
		s[j] = dot;
		max = dot > max ? dot : max;
	}
	memset(out, 0, a->v_dim * sizeof(*out));
	*terms = 0;
	if (max == -INFINITY) {
		free(s);
		return false;
	}
	if (w->sinks && w->sinks[h] > max)
		max = w->sinks[h];
	if (w->sinks)
		sum = exp(w->sinks[h] - max);
	for (uint32_t j = from; j < to; j++) {
		uint64_t at = ((uint64_t)j * a->kv_heads + kv_head) * a->v_dim;
		double e = exp(s[j] - max);

		sum += e;
		for (uint32_t d = 0; d < a->v_dim && e > 0; d++) {
			double term = e * attn_decode(w->v[it->seq], a->codec, at + d);

			out[d] += term;
			*terms += term * term;
		}
	}
	*terms /= sum * sum;
	for (uint32_t d = 0; d < a->v_dim; d++)
		out[d] /= sum;
	free(s);
	return true;
}

/* The largest ||out - reference||, to the larger of ||reference|| and terms, of some rows of an item, whose output is @out. */
static double error_of(const struct world *w, const struct item *it, const uint8_t *out, uint32_t some)
{
	const struct kvt_attend_args *a = &w->shape;
	double ref[KVT_ATTEND_V_MAX], worst = 0;

	for (uint32_t i = 0; i < some; i++) {
		uint32_t t = i < 2 ? i * (it->n - 1) : below(it->n), h = below(a->heads);
		double e = 0, norm = 0, terms;
		bool seen = reference(w, it, it->first + t, h, ref, &terms);

		for (uint32_t d = 0; d < a->v_dim; d++) {
			double x = attn_decode(out, a->out_type, ((uint64_t)t * a->heads + h) * a->v_dim + d) - ref[d];

			e += x * x;
			norm += ref[d] * ref[d];
		}
		e = seen ? sqrt(e / (norm > terms ? norm : terms)) : sqrt(e);
		if (!(e <= worst))
			worst = e;
	}
	return worst;
}

/* ---- checks ---- */

static const struct {
	uint32_t k, v;
} dims[] = { { 128, 128 }, { 64, 64 }, { 128, 128 }, { 64, 64 }, { 80, 80 }, { 96, 96 }, { 112, 112 }, { 192, 192 },
	     { 256, 256 }, { 192, 128 }, { 64, 256 }, { 576, 512 }, { 16, 16 }, { 8, 8 },
	     { 72, 40 }, { 24, 136 } };

static const struct {
	uint32_t heads, kv_heads;
} groups[] = { { 8, 2 }, { 14, 2 }, { 4, 4 }, { 6, 1 }, { 20, 1 }, { 24, 8 }, { 64, 4 } };

#define N_OF(array) (sizeof(array) / sizeof((array)[0]))

static const uint32_t block_rows[] = { 16, 32, 48, 64, 128, 512, 1024 };

static void random_shape(struct world *w)
{
	struct kvt_attend_args *a = &w->shape;
	uint32_t d = below(N_OF(dims)), h = below(N_OF(groups));

	*w = (struct world){ 0 };
	/* small ones on a GPU: some that all kernels take */
	a->k_dim = large || (g->sm && d < 4) ? dims[d].k : 8 + d % 3 * 16;
	a->v_dim = large || (g->sm && d < 4) ? dims[d].v : 8 + d % 4 * 8;
	a->heads = groups[h].heads;
	a->kv_heads = groups[h].kv_heads;
	a->codec = below(2) ? KVT_F16 : KVT_BF16;
	a->q_type = below(3);
	a->out_type = below(3);
	a->family = family;
	if (family == KVT_ATTN_FAST)
		a->k_dim = a->v_dim = below(2) ? 64 : 128;
}

static const char *describe(const struct world *w, const struct place *p)
{
	static char text[256];
	const struct kvt_attend_args *a = &w->shape;

	snprintf(text, sizeof(text), "%s, %s to %s, %u/%u heads of %u/%u, blocks of %u/%u,%s%s%s%s%s%s scale %g, %u rows",
		 kvt_codec_name(a->codec), kvt_codec_name(a->q_type), kvt_codec_name(a->out_type), a->heads, a->kv_heads,
		 a->k_dim, a->v_dim, p->k_block_rows, p->v_block_rows, a->causal ? " causal," : "", a->window ? " window," : "",
		 a->softcap != 0 ? " softcap," : "", w->slopes ? " slopes," : "", w->sinks ? " sinks," : "",
		 w->mask ? " mask," : "", (double)a->scale, w->rows[0]);
	return text;
}

/* Roundings of queries, weights and outputs: a few units of the narrowest type's last place. */
static double tolerance(const struct world *w)
{
	double t = w->shape.codec == KVT_BF16 ? 8e-3 : 1e-3;

	if (w->shape.out_type == KVT_BF16)
		t += 4e-3;
	return w->shape.scale < 0 || w->slopes ? 2 * t : t;
}

static double worst_error[2]; /* f16, bf16 */

/* Whether a path is one of its own for such a problem. Family fast has one, whatever is asked for. */
static bool takes(enum kvt_attend_path path, const struct world *w)
{
	const struct kvt_attend_args *a = &w->shape;
	bool plain = a->k_dim == a->v_dim && (a->k_dim == 64 || a->k_dim == 128) && a->softcap == 0 && !w->slopes && !w->mask &&
		     a->scale > 0;

	if (a->family == KVT_ATTN_FAST)
		return path == KVT_ATTEND_DECODE;
	if (path == KVT_ATTEND_HOPPER)
		return plain && g->sm == 90;
	if (path == KVT_ATTEND_WIDE)
		return plain && a->kv_heads % 4 == 0;
	return path != KVT_ATTEND_SMALL || (a->k_dim <= 128 && a->v_dim <= 128);
}

static const char *const path_names[] = { "auto", "decode", "wide", "small", "prefill", "hopper" };

/* A random problem through all paths: right, and the same. */
static void check_case(uint32_t largest)
{
	struct world w;
	struct place p;
	uint32_t rows = 1 + below(below(3) ? largest / 4 : largest), n;
	struct item it;
	uint8_t *out[KVT_ATTEND_PATHS] = { NULL };
	uint64_t bytes;

	random_shape(&w);
	world_make(&w, 1, &rows);
	world_features(&w, below(4) ? below(64) & below(64) : 0);
	place_put(&w, block_rows[below(N_OF(block_rows))], block_rows[below(N_OF(block_rows))], below(3), &p);
	n = below(3) ? 1 + below(4) : 1 + below(150);
	n = n < rows ? n : rows;
	it = (struct item){ .first = rows - n, .n = n, .rows = rows };
	bytes = (uint64_t)n * w.shape.heads * w.shape.v_dim * size_of(w.shape.out_type);
	for (int path = KVT_ATTEND_DECODE; path < KVT_ATTEND_PATHS; path++) {
		double e, limit = tolerance(&w);

		if (!takes(path, &w))
			continue;
		out[path] = run(&w, &p, &it, 1, path, below(2) ? 1 + below(200) : 0, describe(&w, &p));
		e = error_of(&w, &it, out[path], 6);
		if (w.shape.out_type == KVT_F32 && e > worst_error[w.shape.codec == KVT_BF16])
			worst_error[w.shape.codec == KVT_BF16] = e;
		if (!(e <= limit))
			fail("error %g of %s, at most %g: %s, %u tokens", e, path_names[path], limit, describe(&w, &p), n);
		if (memcmp(out[KVT_ATTEND_DECODE], out[path], bytes))
			fail("decode and %s differ: %s, %u tokens", path_names[path], describe(&w, &p), n);
		free(path == KVT_ATTEND_DECODE ? NULL : out[path]);
	}
	free(out[KVT_ATTEND_DECODE]);
	place_free(&p);
	world_free(&w);
}

/* Everything that must not matter, by bytes, on one sequence. */
static void check_exact(const struct world *w)
{
	static const uint32_t chunks[] = { 1, 16, 64, 511 };
	const struct kvt_attend_args *a = &w->shape;
	uint32_t rows = w->rows[0], blocks[2] = { 32, 32 };
	uint64_t token = (uint64_t)a->heads * a->v_dim * size_of(a->out_type);
	struct item all = { .n = rows, .rows = rows };
	struct place p;
	uint8_t *want, *got;
	double e;

	place_put(w, 32, 32, ON_GPU, &p);
	want = run(w, &p, &all, 1, KVT_ATTEND_AUTO, 0, "the whole prompt");
	e = error_of(w, &all, want, large ? 40 : 6);
	if (!(e <= tolerance(w)))
		fail("error %g of a whole prompt: %s", e, describe(w, &p));

	for (uint32_t k = 0; k < N_OF(chunks); k += test_rounds(1, 1, 3))
		for (uint32_t at = 0; at < rows; at += chunks[k]) {
			struct item it = { .first = at, .n = chunks[k] < rows - at ? chunks[k] : rows - at };

			if (chunks[k] == 1)
				at += below(large ? 61 : 300);
			it.rows = a->causal ? it.first + it.n : rows;
			got = run(w, &p, &it, 1, KVT_ATTEND_AUTO, 0, "a chunk");
			if (memcmp(got, want + it.first * token, it.n * token))
				fail("chunk of %u from %u differs: %s", it.n, it.first, describe(w, &p));
			free(got);
		}
	place_free(&p);

	for (uint32_t k = 0; k < N_OF(block_rows) + 3; k += test_rounds(1, 1, 3)) {
		struct item it = { .first = rows - 3, .n = 3, .rows = rows };
		enum kvt_attend_path path = KVT_ATTEND_DECODE + below(3);

		if (k < N_OF(block_rows))
			blocks[0] = block_rows[k], blocks[1] = block_rows[N_OF(block_rows) - 1 - k];
		place_put(w, blocks[0], blocks[1], k < N_OF(block_rows) ? MIXED : (enum where)(k - N_OF(block_rows)), &p);
		got = run(w, &p, &all, 1, k % 2 ? KVT_ATTEND_PREFILL : KVT_ATTEND_AUTO, k % 2 ? 1 + below(40) : 0, "a whole prompt elsewhere");
		if (memcmp(got, want, rows * token))
			fail("a whole prompt elsewhere differs: %s", describe(w, &p));
		free(got);
		got = run(w, &p, &it, 1, takes(path, w) ? path : KVT_ATTEND_DECODE, k % 2 ? 0 : 1 + below(40),
			  "decoding elsewhere");
		if (memcmp(got, want + it.first * token, 3 * token))
			fail("decoding elsewhere differs: %s", describe(w, &p));
		free(got);
		place_free(&p);
	}
	free(want);
}

/*
 * What a row may not see does not touch it, infinities and NaNs included: rows before the first such, and rows that a
 * mask keeps from all of them, are as they were; the others are the same by every path.
 */
static void check_unseen(uint32_t rows)
{
	static const uint16_t patterns[2][4] = { { 0x7c00, 0xfc00, 0x7e01, 0xffff }, { 0x7f80, 0xff80, 0x7fc1, 0xffff } };
	struct world w;
	struct place p;
	uint32_t bad[4], seen = 0;
	uint64_t token;
	struct item all = { .n = rows, .rows = rows };
	uint8_t *want, *got[KVT_ATTEND_PATHS] = { NULL };

	random_shape(&w);
	w.shape.codec = below(2) ? KVT_F16 : KVT_BF16;
	world_make(&w, 1, &rows);
	world_features(&w, (uint32_t[]){ 0, 0, 16, 1, 8 }[below(5)]);
	w.shape.causal = 1;
	token = (uint64_t)w.shape.heads * w.shape.v_dim * size_of(w.shape.out_type);
	place_put(&w, 32, 64, ON_GPU, &p);
	want = run(&w, &p, &all, 1, KVT_ATTEND_PREFILL, 0, "finite");
	place_free(&p);
	for (int i = 0; i < 4; i++) {
		uint32_t dim = i % 2 ? w.shape.k_dim : w.shape.v_dim;

		bad[i] = rows / 2 + below(rows / 2);
		for (uint32_t e = 0; e < w.shape.kv_heads * dim; e++)
			if (below(3))
				memcpy((i % 2 ? w.k : w.v)[0] + ((uint64_t)bad[i] * w.shape.kv_heads * dim + e) * 2,
				       &patterns[w.shape.codec == KVT_BF16][below(4)], 2);
	}
	place_put(&w, 32, 64, ON_GPU, &p);
	for (int path = KVT_ATTEND_DECODE; path < KVT_ATTEND_PATHS; path++) {
		if (!takes(path, &w))
			continue;
		got[path] = run(&w, &p, &all, 1, path, 0, "not finite");
		if (memcmp(got[KVT_ATTEND_DECODE], got[path], rows * token))
			fail("%s of rows that are not finite differs from decoding: %s", path_names[path], describe(&w, &p));
	}
	for (uint32_t t = 0; t < rows; t++) {
		bool sees = false;

		for (int i = 0; i < 4; i++)
			sees |= t >= bad[i] && !(w.shape.window && t >= w.shape.window + bad[i]) &&
				!(w.mask && attn_decode(w.mask, w.shape.mask_type, (uint64_t)t * rows + bad[i]) == -INFINITY);
		seen += sees;
		if (!sees && memcmp(want + t * token, got[KVT_ATTEND_DECODE] + t * token, token)) {
			fail("a row that sees only finite rows is touched by others, token %u: %s", t, describe(&w, &p));
			break;
		}
	}
	if (!seen)
		fail("no token saw a row that is not finite");
	for (int i = 0; i < KVT_ATTEND_PATHS; i++)
		free(got[i]);
	free(want);
	place_free(&p);
	world_free(&w);
}

/* Each of 64 strangers alone and all together; one to three tokens each. */
static void check_batch(uint32_t largest)
{
	uint32_t rows[ITEMS_MAX];
	struct item items[ITEMS_MAX];
	struct world w;
	struct place p;
	uint8_t *batch, *one;
	uint64_t token, at = 0;

	random_shape(&w);
	for (uint32_t i = 0; i < ITEMS_MAX; i++)
		rows[i] = 4 + below(i % 8 ? largest / 8 : largest);
	world_make(&w, ITEMS_MAX, rows);
	world_features(&w, below(16));
	place_put(&w, 48, 64, MIXED, &p);
	token = (uint64_t)w.shape.heads * w.shape.v_dim * size_of(w.shape.out_type);
	for (uint32_t i = 0; i < ITEMS_MAX; i++)
		items[i] = (struct item){ .seq = i, .n = 1 + below(3), .rows = rows[i] };
	for (uint32_t i = 0; i < ITEMS_MAX; i++)
		items[i].first = rows[i] - items[i].n;
	for (int path = KVT_ATTEND_DECODE; path < KVT_ATTEND_PATHS; path++) {
		if (!takes(path, &w))
			continue;
		batch = run(&w, &p, items, ITEMS_MAX, path, 0, "a batch");
		at = 0;
		for (uint32_t i = 0; i < ITEMS_MAX; i++) {
			one = run(&w, &p, &items[i], 1, KVT_ATTEND_AUTO, 0, "one of a batch");
			if (memcmp(one, batch + at, items[i].n * token))
				fail("sequence %u alone and in a batch differ: %s", i, describe(&w, &p));
			if (i % 16 == 0 && !(error_of(&w, &items[i], one, 2) <= tolerance(&w)))
				fail("error of sequence %u of a batch: %s", i, describe(&w, &p));
			at += items[i].n * token;
			free(one);
		}
		free(batch);
	}
	place_free(&p);
	world_free(&w);
}

/* A captured step replayed while its sequences grow, and on several streams at once. */
static void check_graph(uint32_t largest)
{
	enum { STREAMS = 8 };
	uint32_t rows[2] = { largest, largest / 3 }, now[2] = { 0, 0 };
	struct world w;
	struct place p;
	struct call c[STREAMS];
	kvt_stream stream[STREAMS];
	kvt_graph graph[STREAMS];
	uint64_t token;

	random_shape(&w);
	world_make(&w, 2, rows);
	world_features(&w, below(16));
	place_put(&w, 64, 16, MIXED, &p);
	token = (uint64_t)w.shape.heads * w.shape.v_dim * size_of(w.shape.out_type);
	for (int s = 0; s < STREAMS; s++) {
		struct item items[2] = { { .seq = 0, .n = 1, .rows = 1 }, { .seq = 1, .n = 1, .rows = 1 } };

		call_make(&c[s], &w, &p, items, 2, KVT_ATTEND_AUTO, largest);
		OK(g->ops->stream_create(g, &stream[s]));
		OK(g->ops->capture_begin(g, stream[s]));
		poison(&c[s], stream[s]);
		launch(&c[s].args, &c[s].recipe, 0, stream[s]);
		OK(g->ops->capture_end(g, stream[s], &graph[s]));
	}
	for (int step = 0; step < 6; step++) {
		for (int i = 0; i < 2; i++)
			now[i] = 1 + below(rows[i]);
		for (int s = 0; s < STREAMS; s++) {
			uint64_t q_token = c[s].args.q_stride;
			uint32_t first[2] = { now[0] - 1, now[1] - 1 };

			OK(g->ops->copy_h2d(g, c[s].args.rows, now, sizeof(now)));
			OK(g->ops->copy_h2d(g, c[s].args.first, first, sizeof(first)));
			for (int i = 0; i < 2; i++)
				OK(g->ops->copy_h2d(g, c[s].args.q + i * q_token, w.q[i] + first[i] * q_token, q_token));
		}
		for (int s = 0; s < STREAMS; s++)
			OK(g->ops->graph_launch(g, graph[s], stream[s]));
		for (int s = 0; s < STREAMS; s++)
			OK(g->ops->stream_sync(g, stream[s]));
		for (int i = 0; i < 2; i++) {
			struct item it = { .seq = i, .first = now[i] - 1, .n = 1, .rows = now[i] };
			uint8_t *want = run(&w, &p, &it, 1, KVT_ATTEND_PREFILL, 0, "eager");

			for (int s = 0; s < STREAMS; s++) {
				uint8_t *got = fetch(&c[s], "replayed");

				if (memcmp(want, got + i * token, token))
					fail("a replayed step differs at %u rows on stream %d: %s", now[i], s, describe(&w, &p));
				free(got);
			}
			free(want);
		}
	}
	for (int s = 0; s < STREAMS; s++) {
		g->ops->graph_destroy(g, graph[s]);
		g->ops->stream_destroy(g, stream[s]);
		call_free(&c[s]);
	}
	place_free(&p);
	world_free(&w);
}

int gpu_attend_check(struct kvt_gpu *gpu, uint64_t seed, bool for_gpu)
{
	int cases = for_gpu ? 250 : (int)test_rounds(20, 6, 1);
	uint32_t rows = for_gpu ? 2100 : test_rounds(1100, 1100, 600);

	g = gpu;
	large = for_gpu;
	rng = seed;
	failures = 0;
	worst_error[0] = worst_error[1] = 0;
	for (int i = 0; i < cases; i++)
		check_case(large ? 3000 : 1300);
	printf("attend: %d cases, %d failures; largest error against float64: f16 %.2g, bf16 %.2g\n", cases, failures,
	       worst_error[0], worst_error[1]);
	for (int i = 0; i < (large ? 8 : 1); i++) {
		struct world w;

		random_shape(&w);
		if (large && i < 2) {
			w.shape.k_dim = w.shape.v_dim = i ? 64 : 128;
			w.shape.codec = KVT_F16;
		} else if (!large) {
			w.shape.heads = 2;
			w.shape.kv_heads = 1;
			w.shape.k_dim = w.shape.v_dim = 16;
		}
		world_make(&w, 1, &rows);
		world_features(&w, i < 2 ? 0 : below(64));
		check_exact(&w);
		world_free(&w);
	}
	printf("attend: chunks, block sizes, placements: %d failures so far\n", failures);
	for (int i = 0; i < (large ? 20 : 2); i++)
		check_unseen(large ? 300 + below(900) : 150);
	printf("attend: what is not seen: %d failures so far\n", failures);
	for (int i = 0; i < (large ? 3 : 1); i++)
		check_batch(large ? 3000 : 600);
	for (int i = 0; i < (large ? 3 : 1); i++)
		check_graph(large ? 2500 : 700);
	printf("attend: batches, graphs, streams: %d failures so far\n", failures);
	return failures;
}

int gpu_attend_check_fast(struct kvt_gpu *gpu, uint64_t seed, bool for_gpu)
{
	uint32_t rows = for_gpu ? 2100 : 300;

	g = gpu;
	large = for_gpu;
	rng = seed;
	family = KVT_ATTN_FAST;
	failures = 0;
	worst_error[0] = worst_error[1] = 0;
	for (int i = 0; i < (large ? 150 : (int)test_rounds(6, 3, 1)); i++)
		check_case(large ? 3000 : 300);
	printf("attend, fast: largest error against float64: f16 %.2g, bf16 %.2g; %d failures\n", worst_error[0], worst_error[1],
	       failures);
	for (int i = 0; i < (large ? 6 : 1); i++) {
		struct world w;

		random_shape(&w);
		if (!large) {
			w.shape.heads = 2;
			w.shape.kv_heads = 1;
			w.shape.k_dim = w.shape.v_dim = 64;
		}
		world_make(&w, 1, &rows);
		world_features(&w, i % 2 ? below(16) : 0);
		check_exact(&w);
		world_free(&w);
	}
	for (int i = 0; i < (large ? 10 : 1); i++)
		check_unseen(large ? 300 + below(900) : 150);
	for (int i = 0; i < (large ? 3 : 1); i++)
		check_batch(large ? 3000 : 160);
	for (int i = 0; i < (large ? 2 : 1); i++)
		check_graph(large ? 2500 : 200);
	printf("attend, fast: chunks, placements, what is not seen, batches, graphs: %d failures so far\n", failures);
	family = KVT_ATTN_EXACT;
	return failures;
}

int gpu_attend_check_mutations(struct kvt_gpu *gpu, uint64_t seed)
{
	struct world w = { .shape = { .k_dim = 128, .v_dim = 128, .heads = 8, .kv_heads = 2, .codec = KVT_F16 } };
	const uint32_t rows = 1024;
	struct item it = { .first = rows - 1, .n = 1, .rows = rows };
	uint64_t row = 2 * 128 * 2, split = KVT_ATTEND_SPLIT * row, out = 8 * 128 * 4;
	uint8_t *want, *got, *t = malloc(split);
	struct place p;

	g = gpu;
	large = true;
	rng = seed;
	failures = 0;
	world_make(&w, 1, &rows);
	world_features(&w, 0);
	place_put(&w, 64, 64, ON_GPU, &p);
	want = run(&w, &p, &it, 1, KVT_ATTEND_AUTO, 0, "as it is");
	place_free(&p);
	for (int what = 0; what < 3; what++) {
		static const char *const names[] = { "two rows permuted", "a split dropped", "two splits swapped" };
		uint64_t a = what == 0 ? 5 * row : 0, b = what == 0 ? 200 * row : split, n = what == 0 ? row : split;

		/* attention is the same function after a permutation, but for roundings */
		w.shape.window = what == 1 ? rows - KVT_ATTEND_SPLIT : 0;
		for (int plane = 0; plane < 2 && what != 1; plane++) {
			uint8_t *x = plane ? w.v[0] : w.k[0];

			memcpy(t, x + a, n);
			memcpy(x + a, x + b, n);
			memcpy(x + b, t, n);
		}
		place_put(&w, 64, 64, ON_GPU, &p);
		got = run(&w, &p, &it, 1, KVT_ATTEND_AUTO, 0, names[what]);
		if (!memcmp(want, got, out))
			fail("%s: not one bit changed", names[what]);
		free(got);
		place_free(&p);
	}
	free(want);
	free(t);
	world_free(&w);
	return failures;
}

/* ---- timings ---- */

enum { SETS_MAX = 64, REPEATS = 15, WARM_MS = 100 };

/* One layer's KV of @n_seqs sequences of @rows, in blocks in a random order; the rest of a call. */
struct work {
	struct kvt_attend_args args;
	struct kvt_attend_limits limits;
	struct kvt_attend_recipe recipe;
	kvt_dptr k_table, v_table, rows, tokens, q, out, parts;
};

struct stock {
	kvt_dptr slab;
	uint8_t *pinned;
	uint64_t used, bytes, pinned_used;
};

static void fill_random(struct stock *s)
{
	uint64_t piece = 16 << 20;
	uint8_t *p = random_elements(KVT_F16, piece / 2, 1);

	for (uint64_t at = 0; at < s->bytes; at += piece) {
		uint64_t n = s->bytes - at < piece ? s->bytes - at : piece;

		OK(g->ops->copy_h2d(g, s->slab + at, p, n));
		if (s->pinned)
			memcpy(s->pinned + at, p, n);
	}
	free(p);
}

static kvt_dptr table_of(struct stock *s, uint32_t n_seqs, uint32_t blocks, uint64_t block_bytes, uint32_t on_gpu)
{
	uint64_t n = (uint64_t)n_seqs * blocks, *e = malloc(n * 8);
	kvt_dptr d;

	for (uint64_t i = 0; i < n; i++) {
		uint64_t k = attn_random(&rng) % (i + 1), entry;

		if (on_gpu && i % on_gpu) { /* one block of @on_gpu is on the GPU */
			entry = (uintptr_t)(s->pinned + s->pinned_used);
			s->pinned_used += block_bytes;
		} else {
			entry = s->slab + s->used;
			s->used += block_bytes;
		}
		e[i] = e[k];
		e[k] = entry;
	}
	if (s->used > s->bytes || s->pinned_used > s->bytes) {
		printf("the timings' memory is too small\n");
		exit(1);
	}
	OK(g->ops->alloc(g, n * 8, &d));
	OK(g->ops->copy_h2d(g, d, e, n * 8));
	free(e);
	return d;
}

enum { FAST = KVT_ATTEND_PATHS };

static const struct timing {
	const char *name;
	uint32_t n_seqs, heads, kv_heads, dim, rows, tokens, on_gpu, sets;
	int path; /* enum kvt_attend_path, or FAST: family fast, which has no choice */
} timings[] = {
	{ "decode 1 x 128K", 1, 32, 8, 128, 131072, 1, 0, 4, KVT_ATTEND_AUTO },
	{ "decode 1 x 32K", 1, 32, 8, 128, 32768, 1, 0, 8, KVT_ATTEND_AUTO },
	{ "decode 32 x 8K", 32, 32, 8, 128, 8192, 1, 0, 2, KVT_ATTEND_AUTO },
	{ "decode 1 x 4K", 1, 32, 8, 128, 4096, 1, 0, 32, KVT_ATTEND_AUTO },
	{ "decode 8 x 16K, 4/1 heads", 8, 4, 1, 128, 16384, 1, 0, 4, KVT_ATTEND_AUTO },
	{ "decode 1 x 4K, 14/2 x 64", 1, 14, 2, 64, 4096, 1, 0, 64, KVT_ATTEND_AUTO },
	{ "decode 1 x 16K, 15/16 pinned", 1, 32, 8, 128, 16384, 1, 16, 4, KVT_ATTEND_AUTO },
	{ "prefill 16K", 1, 32, 8, 128, 16384, 16384, 0, 1, KVT_ATTEND_AUTO },
	{ "prefill 16K", 1, 32, 8, 128, 16384, 16384, 0, 1, KVT_ATTEND_PREFILL },
	{ "prefill 4K, 14/2 x 64", 1, 14, 2, 64, 4096, 4096, 0, 4, KVT_ATTEND_AUTO },
	{ "chunk 512 on 32K", 1, 32, 8, 128, 32768, 512, 0, 4, KVT_ATTEND_AUTO },
	{ "chunk 64 on 4K, 14/2 x 64", 1, 14, 2, 64, 4096, 64, 0, 16, KVT_ATTEND_AUTO },
	{ "prefill 16K, fast", 1, 32, 8, 128, 16384, 16384, 0, 1, FAST },
	{ "chunk 512 on 32K, fast", 1, 32, 8, 128, 32768, 512, 0, 4, FAST },
	{ "prefill 4K, 14/2 x 64, fast", 1, 14, 2, 64, 4096, 4096, 0, 4, FAST },
};

static void work_make(struct work *w, struct stock *s, const struct timing *what)
{
	const struct kvt_attend_device d = device();
	uint32_t n_seqs = what->n_seqs, heads = what->heads, kv_heads = what->kv_heads, dim = what->dim;
	uint32_t rows = what->rows, tokens = what->tokens, on_gpu = what->on_gpu;
	uint32_t row = kv_heads * dim * 2, block = 65536 / row, *n = malloc(n_seqs * 4), *t = malloc((n_seqs + 1) * 4);
	uint64_t q_bytes = (uint64_t)n_seqs * tokens * heads * dim * 2;
	uint8_t *q = random_elements(KVT_F16, q_bytes / 2, 1);

	*w = (struct work){ 0 };
	w->k_table = table_of(s, n_seqs, rows / block, 65536, on_gpu);
	w->v_table = table_of(s, n_seqs, rows / block, 65536, on_gpu);
	for (uint32_t i = 0; i <= n_seqs; i++)
		t[i] = i * tokens;
	for (uint32_t i = 0; i < n_seqs; i++)
		n[i] = rows;
	OK(g->ops->alloc(g, n_seqs * 4, &w->rows));
	OK(g->ops->alloc(g, n_seqs * 4 + 4, &w->tokens));
	OK(g->ops->alloc(g, q_bytes, &w->q));
	OK(g->ops->alloc(g, q_bytes, &w->out));
	OK(g->ops->copy_h2d(g, w->rows, n, n_seqs * 4));
	OK(g->ops->copy_h2d(g, w->tokens, t, n_seqs * 4 + 4));
	OK(g->ops->copy_h2d(g, w->q, q, q_bytes));
	w->args = (struct kvt_attend_args){
		.q = w->q, .out = w->out, .q_stride = heads * dim * 2ull, .out_stride = heads * dim * 2ull,
		.k_blocks = w->k_table, .v_blocks = w->v_table, .tokens = w->tokens, .rows = w->rows, .n_seqs = n_seqs,
		.table_stride = rows / block, .heads = heads, .kv_heads = kv_heads, .k_dim = dim, .v_dim = dim,
		.k_block_rows = block, .v_block_rows = block, .k_row_bytes = row, .v_row_bytes = row, .codec = KVT_F16,
		.q_type = KVT_F16, .out_type = KVT_F16, .causal = 1, .scale = 1 / sqrtf((float)dim),
		.family = what->path == FAST ? KVT_ATTN_FAST : KVT_ATTN_EXACT,
	};
	w->limits.tokens = n_seqs * tokens;
	w->limits.seq_tokens = tokens;
	w->limits.rows = (uint64_t)n_seqs * rows;
	OK(kvt_attend_recipe_path(&d, &w->limits, (enum kvt_attend_path)what->path, &w->args, &w->recipe));
	OK(kvt_attend_slab(g, s->slab, s->bytes, &w->args));
	if (w->recipe.scratch_bytes) {
		OK(g->ops->alloc(g, w->recipe.scratch_bytes, &w->parts));
		OK(g->ops->memset_async(g, w->parts, 0, 4 * KVT_ATTEND_COUNTERS, 0));
		OK(g->ops->stream_sync(g, 0));
	}
	w->args.parts = w->parts;
	free(n);
	free(t);
	free(q);
}

static void work_free(struct work *w)
{
	kvt_dptr all[] = { w->k_table, w->v_table, w->rows, w->tokens, w->q, w->out, w->parts };

	for (size_t i = 0; i < N_OF(all); i++)
		g->ops->free(g, all[i]);
}

/* Microseconds a call: the median of replays of a graph of @n calls, each on its own data. */
static double time_graph(struct work *w, uint32_t n, uint32_t grid)
{
	float ms, times[REPEATS];
	kvt_stream stream;
	kvt_graph graph;
	kvt_event from, to;

	OK(g->ops->stream_create(g, &stream));
	OK(g->ops->event_create(g, &from));
	OK(g->ops->event_create(g, &to));
	OK(g->ops->capture_begin(g, stream));
	for (uint32_t i = 0; i < n; i++)
		launch(&w[i].args, &w[i].recipe, grid, stream);
	OK(g->ops->capture_end(g, stream, &graph));
	for (float warm = 0; warm < WARM_MS; warm += ms) {
		OK(g->ops->event_record(g, from, stream));
		OK(g->ops->graph_launch(g, graph, stream));
		OK(g->ops->event_record(g, to, stream));
		OK(g->ops->event_sync(g, to));
		OK(g->ops->event_elapsed(g, from, to, &ms));
	}
	for (int i = 0; i < REPEATS; i++) {
		int k;

		OK(g->ops->event_record(g, from, stream));
		OK(g->ops->graph_launch(g, graph, stream));
		OK(g->ops->event_record(g, to, stream));
		OK(g->ops->event_sync(g, to));
		OK(g->ops->event_elapsed(g, from, to, &ms));
		for (k = i; k > 0 && times[k - 1] > ms; k--)
			times[k] = times[k - 1];
		times[k] = ms;
	}
	g->ops->graph_destroy(g, graph);
	g->ops->event_destroy(g, from);
	g->ops->event_destroy(g, to);
	g->ops->stream_destroy(g, stream);
	return times[REPEATS / 2] * 1e3 / n;
}

void gpu_attend_time(struct kvt_gpu *gpu, const char *only)
{
	static struct work work[SETS_MAX];
	struct stock s = { .bytes = 5ull << 29 };
	void *pinned;

	g = gpu;
	OK(g->ops->alloc(g, s.bytes, &s.slab));
	OK(g->ops->host_alloc(g, s.bytes, &pinned));
	s.pinned = pinned;
	fill_random(&s);
	for (size_t i = 0; i < N_OF(timings); i++) {
		const struct timing *t = &timings[i];
		double kv = 4.0 * t->n_seqs * t->rows * t->kv_heads * t->dim, us, pairs;

		if (only && !strstr(t->name, only))
			continue;
		s.used = s.pinned_used = 0;
		for (uint32_t k = 0; k < t->sets; k++)
			work_make(&work[k], &s, t);
		us = time_graph(work, t->sets, 0);
		pairs = (double)t->n_seqs * t->heads * t->tokens * (t->rows - (t->tokens - 1) / 2.0);
		printf("%-30s %9.1f us  KV %7.1f GB/s  %7.1f TFLOP/s  (%s)", t->name, us, kv / us / 1e3,
		       4 * pairs * t->dim / us / 1e6, work[0].recipe.step[0].function);
		printf("\n");
		for (uint32_t grid = 8; t->on_gpu && grid <= 256; grid *= 2)
			printf("    %3u blocks: from host RAM %.1f GB/s\n", grid,
			       kv / t->on_gpu * (t->on_gpu - 1) / time_graph(work, t->sets, grid) / 1e3);
		for (uint32_t k = 0; k < t->sets; k++)
			work_free(&work[k]);
	}
	g->ops->free(g, s.slab);
	g->ops->host_free(g, pinned);
}
