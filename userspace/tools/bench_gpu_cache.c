// SPDX-License-Identifier: MIT
/*
 * kvtier bench gpu through a cache: a sequence's moves between tiers, a whole
 * decoding step captured in a graph, and decoding with most of the KV in pinned
 * memory, read in place and through a ring. What steps give is compared by
 * bytes: captured with eager, the ring with in place.
 */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "cache/batch.h"
#include "tools/bench_gpu.h"
#include "tools/measure.h"

#define BLOCK (64u << 10)
#define LAYERS_MAX 32

struct model {
	uint32_t layers, heads, kv_heads, dim, tokens;
	uint64_t gpu_bytes, pinned_bytes, scratch_bytes, ring_bytes;
};

struct run {
	struct gb *g;
	struct model m;
	struct kvt_cache *cache;
	struct kvt_batch *batch;
	struct kvt_seq *seq;
	kvt_dptr src, q, out; /* a row of K or V; of queries; of results for each layer */
};

static uint64_t q_bytes(const struct model *m)
{
	return m->heads * m->dim * 2ull;
}

/* Token by token over all planes, as a prompt is prefilled. */
static int write_rows(struct run *r)
{
	const uint32_t row = r->m.kv_heads * r->m.dim * 2, chunk = BLOCK / row;
	uint64_t *rows = malloc(BLOCK);
	struct kvt_rows src = { .data = rows, .type = KVT_F16 };
	uint64_t z = 1;
	int ret;

	if (!rows)
		return kvt_fail(-ENOMEM, "no memory for rows");
	ret = kvt_seq_append(r->seq, NULL, r->m.tokens);
	for (uint32_t t = 0; t < r->m.tokens && !ret; t += chunk)
		for (uint32_t plane = 0; plane < 2 * r->m.layers && !ret; plane++) {
			for (uint32_t i = 0; i < BLOCK / 8; i++) {
				z = z * 6364136223846793005ull + 1442695040888963407ull;
				rows[i] = (z ^ z >> 32) & 0xb7ffb7ffb7ffb7ff; /* finite, less than 1 */
			}
			ret = kvt_seq_write(r->seq, plane, t, r->m.tokens - t < chunk ? r->m.tokens - t : chunk, &src);
		}
	free(rows);
	return ret;
}

static int open_cache(struct gb *g, const struct model *m, struct run *r)
{
	struct kvt_plane_params planes[2 * LAYERS_MAX];
	struct kvt_cache_params p = KVT_INIT(p);
	int ret;

	*r = (struct run){ .g = g, .m = *m };
	for (uint32_t i = 0; i < 2 * m->layers; i++)
		planes[i] = (struct kvt_plane_params){ .size = sizeof(planes[i]), .codec = KVT_F16, .heads = m->kv_heads,
						       .head_dim = m->dim, .layer = i / 2 };
	p.planes = planes;
	p.n_planes = 2 * m->layers;
	p.gpu_scratch_bytes = m->scratch_bytes;
	p.gpu_bytes = m->scratch_bytes + m->gpu_bytes;
	p.pinned_bytes = m->pinned_bytes;
	p.ram_bytes = 256 << 20;
	p.max_tokens = m->tokens + 1024;
	p.max_seqs = 1;
	p.max_query_rows = 1;
	p.max_query_heads = m->heads;
	p.backend = KVT_BACKEND_CUDA;
	p.threads = 1;
	ret = kvt_cache_create_on(&p, NULL, g->gpu, &r->cache);
	if (!ret)
		ret = kvt_seq_create(r->cache, &r->seq);
	if (!ret)
		ret = write_rows(r);
	if (!ret)
		ret = g->ops->alloc(g->gpu, m->kv_heads * m->dim * 2ull, &r->src);
	if (!ret)
		ret = g->ops->alloc(g->gpu, q_bytes(m), &r->q);
	if (!ret)
		ret = g->ops->alloc(g->gpu, m->layers * q_bytes(m), &r->out);
	if (!ret)
		ret = g->ops->memset_async(g->gpu, r->src, 0x2c, m->kv_heads * m->dim * 2ull, 0);
	if (!ret)
		ret = g->ops->memset_async(g->gpu, r->q, 0x35, q_bytes(m), 0);
	return ret ? ret : g->ops->stream_sync(g->gpu, 0);
}

static void close_cache(struct run *r)
{
	kvt_batch_destroy(r->batch);
	kvt_cache_destroy(r->cache);
	r->g->ops->free(r->g->gpu, r->src);
	r->g->ops->free(r->g->gpu, r->q);
	r->g->ops->free(r->g->gpu, r->out);
}

static int attach(struct run *r, uint64_t ring_bytes)
{
	struct kvt_batch_params p = KVT_INIT(p);
	int ret;

	p.max_tokens = 1;
	p.ring_bytes = ring_bytes;
	ret = kvt_batch_create(r->cache, &p, &r->batch);
	return ret ? ret : kvt_batch_attach(r->batch, &r->seq, 1);
}

/* A token's work in all layers, behind its kvt_batch_step(). */
static int layers(struct run *r)
{
	struct kvt_rows src = { .data = (void *)(uintptr_t)r->src, .type = KVT_F16 };
	struct kvt_attn attn = KVT_INIT(attn);
	struct kvt_batch_attn io = KVT_INIT(io);
	int ret = 0;

	attn.flags = KVT_ATTN_CAUSAL;
	attn.n_heads = r->m.heads;
	io.q_type = io.out_type = KVT_F16;
	io.q = r->q;
	for (uint32_t l = 0; l < r->m.layers && !ret; l++) {
		attn.k_plane = 2 * l;
		attn.v_plane = 2 * l + 1;
		io.out = r->out + l * q_bytes(&r->m);
		ret = kvt_batch_write_kv(r->batch, attn.k_plane, &src, attn.v_plane, &src);
		if (!ret)
			ret = kvt_batch_attend(r->batch, &attn, &io);
	}
	return ret;
}

static int step(struct run *r)
{
	const uint32_t one = 1;
	int ret = kvt_batch_step(r->batch, &one, NULL);

	return ret ? ret : layers(r);
}

static int results(struct run *r, uint8_t *out)
{
	int ret = kvt_batch_wait(r->batch);

	return ret ? ret : r->g->ops->copy_d2h(r->g->gpu, out, r->out, r->m.layers * q_bytes(&r->m));
}

static int compare(const uint8_t *a, const uint8_t *b, uint64_t bytes, const char *what)
{
	bool none = true;

	for (uint64_t i = 0; i < bytes; i++)
		none &= !a[i];
	return none || memcmp(a, b, bytes) ? kvt_fail(-EBADMSG, "%s: other bits: no figure of it would mean anything", what) : 0;
}

/* ---- a whole step, captured ---- */

static int time_steps(struct run *r, uint32_t n, kvt_graph graph, double *seconds)
{
	const kvt_stream stream = kvt_batch_stream(r->batch);
	const struct gb *g = r->g;
	double v[GB_ROUNDS_MAX];
	const uint32_t one = 1;
	float ms;
	int ret = 0;

	for (uint32_t i = 0; i < n && !ret; i++) {
		ret = kvt_batch_step(r->batch, &one, NULL);
		if (!ret)
			ret = g->ops->event_record(g->gpu, g->from, stream);
		if (!ret)
			ret = g->ops->graph_launch(g->gpu, graph, stream);
		if (!ret)
			ret = g->ops->event_record(g->gpu, g->to, stream);
		if (!ret)
			ret = g->ops->event_sync(g->gpu, g->to);
		if (!ret)
			ret = g->ops->event_elapsed(g->gpu, g->from, g->to, &ms);
		v[i % GB_ROUNDS_MAX] = ms * 1e-3;
	}
	*seconds = median(v, n < GB_ROUNDS_MAX ? n : GB_ROUNDS_MAX);
	return ret;
}

static int bench_step(struct gb *g)
{
	static const struct model m = { .layers = 24, .heads = 14, .kv_heads = 2, .dim = 64, .tokens = 4096,
					.gpu_bytes = 80 << 20, .pinned_bytes = 1 << 20, .scratch_bytes = 64 << 20 };
	struct gb_row row = { .work = "step of 4K, 14/2 heads of 64, captured", .unit = "us/layer", .wanted = 12, .less = true };
	static uint8_t eager[LAYERS_MAX * 14 * 64 * 2], captured[LAYERS_MAX * 14 * 64 * 2];
	const uint64_t bytes = m.layers * q_bytes(&m);
	kvt_graph graph = 0;
	struct run r;
	double s = 0;
	int ret = open_cache(g, &m, &r), end;

	if (!ret)
		ret = attach(&r, 0);
	if (!ret)
		ret = step(&r);
	if (!ret)
		ret = step(&r); /* as many tokens as before: what is captured now stays right */
	if (!ret)
		ret = g->ops->capture_begin(g->gpu, kvt_batch_stream(r.batch));
	if (!ret) {
		ret = layers(&r);
		end = g->ops->capture_end(g->gpu, kvt_batch_stream(r.batch), &graph);
		ret = ret ? ret : end;
	}
	if (!ret)
		ret = time_steps(&r, 64, graph, &s);
	if (!ret)
		ret = results(&r, captured);
	if (!ret)
		ret = g->ops->memset_async(g->gpu, r.out, 0, bytes, kvt_batch_stream(r.batch));
	if (!ret)
		ret = layers(&r);
	if (!ret)
		ret = results(&r, eager);
	if (!ret)
		ret = compare(eager, captured, bytes, row.work);
	if (graph)
		g->ops->graph_destroy(g->gpu, graph);
	close_cache(&r);
	row.value = s / m.layers * 1e6;
	if (!ret)
		gb_row(g, &row);
	return ret;
}

/* ---- most of the KV in pinned memory ---- */

enum { STREAM_WARM = 3, STREAM_STEPS = 12 };

static int time_stream(struct run *r, uint8_t *out, double *seconds, uint64_t *moved)
{
	struct kvt_stats st = KVT_INIT(st);
	uint64_t before;
	double t;
	int ret = 0;

	for (int i = 0; i < STREAM_WARM && !ret; i++)
		ret = step(r);
	if (!ret)
		ret = kvt_batch_wait(r->batch);
	kvt_cache_stats(r->cache, &st);
	before = st.streamed_bytes + st.in_place_bytes;
	t = now();
	for (int i = 0; i < STREAM_STEPS && !ret; i++)
		ret = step(r);
	if (!ret)
		ret = results(r, out);
	*seconds = (now() - t) / STREAM_STEPS;
	kvt_cache_stats(r->cache, &st);
	*moved = (st.streamed_bytes + st.in_place_bytes - before) / STREAM_STEPS;
	return ret;
}

/* What a step moves is what is not resident. */
static int check_moved(struct run *r, uint64_t moved)
{
	struct kvt_stats st = KVT_INIT(st);

	kvt_cache_stats(r->cache, &st);
	if (moved == st.tier[KVT_TIER_PINNED].blocks * BLOCK)
		return 0;
	return kvt_fail(-EBADMSG, "a step has moved %llu bytes, %llu blocks of %u are not resident", (unsigned long long)moved,
			(unsigned long long)st.tier[KVT_TIER_PINNED].blocks, BLOCK);
}

static int bench_stream(struct gb *g)
{
	struct model m = { .layers = 16, .heads = 32, .kv_heads = 8, .dim = 128, .tokens = 32768 };
	const uint64_t kv = 4ull * m.layers * m.kv_heads * m.dim * m.tokens;
	static uint8_t want[LAYERS_MAX * 32 * 128 * 2], got[LAYERS_MAX * 32 * 128 * 2];
	static const char *const works[] = { "decode, 15/16 of the KV pinned, in place", "decode, 15/16 of the KV pinned, ring" };
	double seconds = 0;
	uint64_t moved = 0;
	struct run r;
	char *json;
	int64_t n;
	int ret;

	m.gpu_bytes = kv / 16 + (4 << 20);
	m.pinned_bytes = kv / 16 * 15 + (64 << 20);
	m.ring_bytes = kv / m.layers / 16 * 15 / 10 * 11; /* a layer, and a tenth */
	m.scratch_bytes = m.ring_bytes + (96 << 20);
	ret = open_cache(g, &m, &r);
	for (int ring = 0; ring < 2 && !ret; ring++) {
		struct gb_row row = { .work = works[ring], .unit = "GB/s", .limit_of = "link up", .limit = g->up_rate * 1e-9,
				      .wanted = ring ? 0.95 * g->up_rate * 1e-9 : 0 };

		ret = attach(&r, ring ? m.ring_bytes : 0);
		if (!ret)
			ret = time_stream(&r, ring ? got : want, &seconds, &moved);
		if (!ret)
			ret = check_moved(&r, moved);
		kvt_batch_destroy(r.batch);
		r.batch = NULL;
		if (!ret)
			ret = kvt_seq_truncate(r.seq, m.tokens);
		row.value = moved / seconds * 1e-9;
		if (!ret)
			gb_row(g, &row);
	}
	if (!ret)
		ret = compare(want, got, m.layers * q_bytes(&m), works[1]);
	n = ret ? 0 : kvt_cache_stats_json(r.cache, NULL, 0);
	json = n > 0 && !g->rows ? malloc(n + 1) : NULL;
	if (json && kvt_cache_stats_json(r.cache, json, n + 1) > 0 && strstr(json, "\"gpu_stream\""))
		printf("  %.*s\n", (int)strcspn(strstr(json, "\"gpu_stream\""), "}") + 1, strstr(json, "\"gpu_stream\""));
	free(json);
	close_cache(&r);
	return ret;
}

/* ---- a sequence's moves: copied, digested, compared, published ---- */

static int bench_moves(struct gb *g)
{
	static const struct model m = { .layers = 1, .heads = 8, .kv_heads = 8, .dim = 128, .tokens = 65536,
					.gpu_bytes = (256 << 20) + (8 << 20), .pinned_bytes = (256 << 20) + (8 << 20),
					.scratch_bytes = 1 << 20 };
	static const char *const works[] = { "a sequence's moves to the GPU", "and back" };
	double v[2][GB_ROUNDS_MAX], t;
	struct run r;
	int64_t moved = 0;
	int ret = open_cache(g, &m, &r);

	for (uint32_t i = 0; i < g->rounds && !ret && moved >= 0; i++)
		for (int up = 0; up < 2 && moved >= 0; up++) {
			t = now();
			moved = kvt_seq_move(r.seq, up ? KVT_TIER_GPU : KVT_TIER_PINNED);
			v[up][i] = now() - t;
		}
	close_cache(&r);
	if (ret || moved < 0)
		return ret ? ret : (int)moved;
	for (int up = 1; up >= 0; up--) {
		struct gb_row row = { .work = works[!up], .unit = "GB/s", .limit = (up ? g->up_rate : g->down_rate) * 1e-9,
				      .limit_of = up ? "link up" : "link down" };

		row.value = 4.0 * m.kv_heads * m.dim * m.tokens / median(v[up], g->rounds) * 1e-9;
		gb_row(g, &row);
	}
	return 0;
}

int gb_cache(struct gb *g)
{
	int ret = bench_step(g);

	if (!ret)
		ret = bench_stream(g);
	return ret ? ret : bench_moves(g);
}
