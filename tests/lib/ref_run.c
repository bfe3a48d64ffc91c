// SPDX-License-Identifier: MIT
/* One run of the reference engine, in one of the ways that must not matter. */
#include "lib/ref_run.h"

#include <check.h>
#include <stdlib.h>
#include <string.h>

#include "cache/batch.h"

#define PLENTY (64u << 20)

static struct kvt_cache *open_cache(const struct ref_model *m, const struct ref_how *how, uint32_t tokens, uint32_t chunk)
{
	struct kvt_plane_params *planes = calloc(2 * m->config.layers, sizeof(*planes));
	const struct kvt_batch_params batch = { .size = sizeof(batch), .max_seqs = 1, .max_tokens = chunk };
	struct kvt_cache_params p = KVT_INIT(p);
	struct kvt_cache *cache;
	int64_t least;

	ref_planes(&m->config, (enum kvt_codec)how->codec, planes);
	p.planes = planes;
	p.n_planes = 2 * m->config.layers;
	p.gpu_bytes = how->gpu;
	p.pinned_bytes = how->pinned;
	p.disk_bytes = how->disk;
	p.block_bytes = how->block;
	p.threads = how->threads;
	p.io = how->io;
	p.max_seqs = 1;
	p.max_tokens = tokens;
	p.max_query_rows = chunk;
	p.max_query_heads = m->config.heads;
	if (how->on_gpu) {
		p.block_bytes = how->block ? how->block : 65536;
		least = kvt_batch_scratch(&p, &batch, m->config.heads);
		ck_assert_msg(least >= 0, "%s: %s", how->name, kvt_last_error());
		p.gpu_scratch_bytes = (uint64_t)least;
		p.gpu_bytes = (uint64_t)kvt_cache_min_gpu(&p) + how->gpu;
	}
	least = kvt_cache_min_ram(&p);
	ck_assert_msg(least >= 0, "%s: %s", how->name, kvt_last_error());
	p.ram_bytes = (uint64_t)(least + (how->ram == 0 ? PLENTY : how->ram < 0 ? 0 : how->ram));
	ck_assert_msg(kvt_cache_create_on(&p, NULL, how->tier, &cache) == 0, "%s: %s", how->name, kvt_last_error());
	free(planes);
	return cache;
}

float *ref_run(const struct ref_model *m, const struct ref_how *how, const uint32_t *ids, uint32_t n, uint32_t n_new,
	       uint32_t *new_ids, struct kvt_stats *stats)
{
	const uint32_t chunk = how->chunk && how->chunk < n ? how->chunk : n, vocab = m->config.vocab, total = n + n_new - 1;
	struct kvt_cache *cache = open_cache(m, how, total, chunk);
	float *logits = malloc((size_t)total * vocab * sizeof(*logits));
	const struct ref_engine_params params = { .model = m, .cache = cache, .gpu = how->scratch, .tokens = chunk,
						  .logits = chunk, .isa = how->isa, .on_gpu = how->on_gpu };
	struct ref_engine *engine;
	const float *rows;
	struct kvt_seq *seq;
	uint32_t id = 0, step;

	ck_assert_msg(kvt_seq_create(cache, &seq) == 0, "%s", kvt_last_error());
	ck_assert_msg(ref_engine_create(&params, &engine) == 0, "%s", kvt_last_error());
	if (how->started)
		how->started();
	for (uint32_t at = 0; at < total; at += step) {
		step = at >= n ? 1 : n - at < chunk ? n - at : chunk;
		/* an assertion that passes would take memory too */
		if (ref_forward(engine, seq, at < n ? ids + at : &id, step, step, &rows))
			ck_abort_msg("%s, token %u: %s", how->name, at, kvt_last_error());
		memcpy(logits + (size_t)at * vocab, rows, (size_t)step * vocab * sizeof(*rows));
		id = ref_argmax(logits + (size_t)(at + step - 1) * vocab, vocab);
		if (new_ids && at + step >= n)
			new_ids[at + step - n] = id;
	}
	if (how->ended)
		how->ended();
	if (stats)
		ck_assert_int_eq(kvt_cache_stats(cache, stats), 0);
	ref_engine_free(engine);
	kvt_seq_free(seq);
	kvt_cache_destroy(cache);
	return logits;
}
