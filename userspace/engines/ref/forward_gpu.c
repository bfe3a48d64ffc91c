// SPDX-License-Identifier: MIT
/*
 * The forward pass on a GPU: weights, scratch and the KV cache are in its
 * memory, each step only launches, and the host waits for logits alone. A
 * decoding step is captured in a graph, which serves until the batch's sizes
 * change. What is launched gives the bits of the CPU's kernels, but for
 * attention, whose arithmetic on a GPU is of its own.
 */
#include "engines/ref/forward_gpu.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "cache/batch.h"
#include "gpu/engine.h"
#include "runtime/scratch.h"

#define ALIGN 256
#define ANGLES_PIECE (1u << 20) /* bytes of the table that are made and copied at a time */

_Static_assert(REF_PANEL == KVT_PANEL, "the CPU's panels are the GPU's");

/* A layer's weights in GPU memory. */
struct gpu_layer {
	kvt_dptr attn_norm, qkv, out, mlp_norm, gate_up, down;
};

struct ref_gpu {
	const struct ref_model *model;
	struct kvt_batch *batch;
	struct kvt_gpu *gpu;
	const struct kvt_gpu_ops *ops;
	kvt_stream stream;
	struct kvt_arena *arena;
	kvt_dptr weights; /* the one allocation, angles at its end */
	kvt_dptr embed, head, norm, angles;
	struct gpu_layer *layers;
	kvt_dptr x, qkv, q, attn, gate_up, logits; /* scratch */
	float *host_logits;
	kvt_graph graph; /* of a step of one token with its logits; 0: none */
	uint32_t epoch;	 /* that it was captured in */
};

/* ---- what it takes ---- */

static uint64_t aligned(uint64_t bytes)
{
	return (bytes + ALIGN - 1) / ALIGN * ALIGN;
}

static uint64_t angles_bytes(const struct ref_config *c, uint32_t positions)
{
	return aligned((uint64_t)positions * c->head_dim * sizeof(float));
}

static uint64_t weights_bytes(const struct ref_config *c)
{
	const uint64_t norm = aligned(c->hidden * sizeof(float)), qkv = (c->heads + 2ull * c->kv_heads) * c->head_dim;
	const uint64_t layer = 2 * norm + aligned(ref_matrix_bytes((uint32_t)qkv, c->hidden)) +
			       aligned(ref_matrix_bytes(c->hidden, c->heads * c->head_dim)) +
			       aligned(ref_matrix_bytes(2 * c->inter, c->hidden)) +
			       aligned(ref_matrix_bytes(c->hidden, c->inter));

	return c->layers * layer + norm + (c->tied ? 1 : 2) * aligned(ref_matrix_bytes(c->vocab, c->hidden));
}

/*
 * The plan of runtime/scratch.h without what is fused away here: norms are part
 * of the product behind them, and the last one reads x while logits are written.
 */
static struct kvt_arena_plan scratch_plan(const struct ref_config *c, uint32_t tokens, uint32_t logits,
					  struct kvt_arena_buffer buffers[KVT_DECODER_BUFFERS])
{
	static const uint32_t unused[] = { KVT_SCRATCH_ids, KVT_SCRATCH_angles, KVT_SCRATCH_h, KVT_SCRATCH_h_attn,
					   KVT_SCRATCH_h_mlp, KVT_SCRATCH_h_final, KVT_SCRATCH_chosen };
	const struct kvt_decoder_shape shape = { c->hidden, c->inter, c->heads, c->kv_heads, c->head_dim, c->vocab, logits,
						 tokens };
	const struct kvt_arena_plan plan = kvt_decoder_scratch(&shape, buffers);

	for (uint32_t i = 0; i < sizeof(unused) / sizeof(unused[0]); i++)
		buffers[unused[i]].bytes = 0;
	buffers[KVT_SCRATCH_x].last = KVT_STEP_HEAD;
	return plan;
}

int64_t ref_gpu_bytes(const struct ref_config *c, uint32_t positions, uint32_t tokens, uint32_t logits)
{
	struct kvt_arena_buffer buffers[KVT_DECODER_BUFFERS];
	const struct kvt_arena_plan plan = scratch_plan(c, tokens, logits, buffers);
	struct kvt_arena_size size;
	int err = kvt_arena_layout(&plan, NULL, &size);

	return err ? err : (int64_t)(weights_bytes(c) + angles_bytes(c, positions) + size.bytes);
}

static int check_memory(struct ref_gpu *g, uint32_t positions, const struct ref_engine_params *p)
{
	const struct ref_config *c = &p->model->config;
	int64_t bytes = ref_gpu_bytes(c, positions, p->tokens, p->logits ? p->logits : 1);
	uint64_t free_bytes, total;
	int err = bytes < 0 ? (int)bytes : g->ops->mem_info(g->gpu, &free_bytes, &total);

	if (err || (uint64_t)bytes <= free_bytes)
		return err;
	return kvt_fail(-ENOMEM, "%s: the model takes %llu bytes beside the cache (%llu of weights, %llu of angles, scratch), %llu are free: lower gpu_bytes, or the maximum batch or tokens of a pass",
			g->gpu->description, (unsigned long long)bytes, (unsigned long long)weights_bytes(c),
			(unsigned long long)angles_bytes(c, positions), (unsigned long long)free_bytes);
}

/* ---- life ---- */

/* Copy to the next place in the weights' memory. */
static int upload(struct ref_gpu *g, kvt_dptr *next, const float *data, uint64_t bytes, kvt_dptr *at)
{
	*at = *next;
	*next += aligned(bytes);
	return g->ops->copy_h2d(g->gpu, *at, data, bytes);
}

static int upload_matrix(struct ref_gpu *g, kvt_dptr *next, const struct ref_matrix *m, kvt_dptr *at)
{
	return upload(g, next, m->panels, ref_matrix_bytes(m->n, m->k), at);
}

static int upload_layer(struct ref_gpu *g, kvt_dptr *next, const struct ref_layer *from, struct gpu_layer *to)
{
	const uint64_t norm = g->model->config.hidden * sizeof(float);
	int err = upload(g, next, from->attn_norm, norm, &to->attn_norm);

	if (!err)
		err = upload_matrix(g, next, &from->qkv, &to->qkv);
	if (!err)
		err = upload_matrix(g, next, &from->out, &to->out);
	if (!err)
		err = upload(g, next, from->mlp_norm, norm, &to->mlp_norm);
	if (!err)
		err = upload_matrix(g, next, &from->gate_up, &to->gate_up);
	if (!err)
		err = upload_matrix(g, next, &from->down, &to->down);
	return err;
}

/* Made by the C library's functions, as the CPU's are: a GPU has its own. */
static int upload_angles(struct ref_gpu *g, uint32_t positions)
{
	const uint32_t dim = g->model->config.head_dim, most = ANGLES_PIECE / (dim * sizeof(float)) + 1;
	float *piece = malloc((size_t)most * dim * sizeof(*piece));
	int err = piece ? 0 : kvt_fail(-ENOMEM, "no memory for %u angles", most * dim);

	for (uint32_t at = 0, n; !err && at < positions; at += n) {
		n = positions - at < most ? positions - at : most;
		for (uint32_t i = 0; i < n; i++)
			ref_angles(g->model, at + i, piece + (size_t)i * dim);
		err = g->ops->copy_h2d(g->gpu, g->angles + (uint64_t)at * dim * sizeof(*piece), piece,
				       (uint64_t)n * dim * sizeof(*piece));
	}
	free(piece);
	return err;
}

static int upload_model(struct ref_gpu *g, uint32_t positions)
{
	const struct ref_model *m = g->model;
	const struct ref_config *c = &m->config;
	kvt_dptr next;
	int err = g->ops->alloc(g->gpu, weights_bytes(c) + angles_bytes(c, positions), &g->weights);

	if (err)
		return kvt_fail_more(err, "weights");
	next = g->weights;
	err = upload_matrix(g, &next, &m->embed, &g->embed);
	g->head = g->embed;
	if (!err && !c->tied)
		err = upload_matrix(g, &next, &m->head, &g->head);
	for (uint32_t i = 0; !err && i < c->layers; i++)
		err = upload_layer(g, &next, &m->layers[i], &g->layers[i]);
	if (!err)
		err = upload(g, &next, m->norm, c->hidden * sizeof(float), &g->norm);
	g->angles = next;
	return err ? err : upload_angles(g, positions);
}

static int take_scratch(struct ref_gpu *g, uint32_t tokens, uint32_t logits)
{
	static const struct {
		uint32_t buffer, step;
		size_t field;
	} uses[] = {
#define USE(name, step) { KVT_SCRATCH_##name, KVT_STEP_##step, offsetof(struct ref_gpu, name) }
		USE(x, EMBED), USE(qkv, QKV), USE(q, ROPE), USE(attn, ATTEND), USE(gate_up, GATE_UP), USE(logits, HEAD),
#undef USE
	};
	struct kvt_arena_buffer buffers[KVT_DECODER_BUFFERS];
	const struct kvt_arena_plan plan = scratch_plan(&g->model->config, tokens, logits, buffers);
	int err = kvt_arena_create(g->gpu, &plan, &g->arena);

	for (uint32_t i = 0; !err && i < sizeof(uses) / sizeof(uses[0]); i++)
		err = kvt_arena_get(g->arena, uses[i].buffer, buffers[uses[i].buffer].bytes, uses[i].step,
				    (kvt_dptr *)((char *)g + uses[i].field));
	return err;
}

int ref_gpu_create(const struct ref_engine_params *p, struct ref_gpu **gpu)
{
	const struct kvt_batch_params batch = { .size = sizeof(batch), .max_seqs = 1, .max_tokens = p->tokens };
	const uint32_t logits = p->logits ? p->logits : 1;
	struct ref_gpu *g = calloc(1, sizeof(*g));
	int err;

	if (!g)
		return kvt_fail(-ENOMEM, "no memory for an engine");
	g->model = p->model;
	g->layers = calloc(p->model->config.layers, sizeof(*g->layers));
	err = g->layers ? kvt_batch_create(p->cache, &batch, &g->batch) :
			  kvt_fail(-ENOMEM, "no memory for %u layers", p->model->config.layers);
	if (err)
		goto free_engine;
	g->gpu = kvt_batch_gpu(g->batch);
	g->ops = g->gpu->ops;
	g->stream = kvt_batch_stream(g->batch);
	err = check_memory(g, p->cache->max_tokens, p);
	if (!err)
		err = upload_model(g, p->cache->max_tokens);
	if (!err)
		err = take_scratch(g, p->tokens, logits);
	if (!err)
		err = g->ops->host_alloc(g->gpu, kvt_arena_product(logits, p->model->config.vocab, sizeof(float)),
					 (void **)&g->host_logits);
	if (err)
		goto free_engine;
	*gpu = g;
	return 0;

free_engine:
	ref_gpu_free(g);
	return err;
}

static void drop_graph(struct ref_gpu *g)
{
	if (g->graph)
		g->ops->graph_destroy(g->gpu, g->graph);
	g->graph = 0;
}

void ref_gpu_free(struct ref_gpu *g)
{
	if (!g)
		return;
	ref_gpu_rest(g);
	if (g->ops) {
		drop_graph(g);
		g->ops->host_free(g->gpu, g->host_logits);
		g->ops->free(g->gpu, g->weights);
	}
	kvt_arena_destroy(g->arena);
	kvt_batch_destroy(g->batch);
	free(g->layers);
	free(g);
}

void ref_gpu_rest(struct ref_gpu *g)
{
	kvt_batch_detach(g->batch);
}

/* ---- the pass: launches, and nothing else ---- */

static int launch(struct ref_gpu *g, struct kvt_engine_step step, void *args)
{
	kvt_kernel kernel;
	int err = g->ops->kernel(g->gpu, "engine", step.function, &kernel);

	return err ? err : g->ops->launch_early(g->gpu, kernel, step.grid, step.block, 0, g->stream, &args, 1);
}

/* Ids are arguments: nothing that must outlive the call, and no graph could have them. */
static int embed(struct ref_gpu *g, const uint32_t *ids, uint32_t n)
{
	const uint32_t hidden = g->model->config.hidden;
	struct kvt_embed_args args = { .w = g->embed, .k = hidden };
	int err = 0;

	for (uint32_t at = 0; !err && at < n; at += args.n) {
		args.x = g->x + (uint64_t)at * hidden * sizeof(float);
		args.n = n - at < KVT_EMBED_MAX ? n - at : KVT_EMBED_MAX;
		memcpy(args.ids, ids + at, args.n * sizeof(*ids));
		err = launch(g, kvt_engine_embed(&args), &args);
	}
	return err;
}

static int gemm(struct ref_gpu *g, struct kvt_gemm_args args)
{
	args.eps = g->model->config.eps;
	return launch(g, kvt_engine_gemm(&args), &args);
}

static int attention(struct ref_gpu *g, uint32_t layer, uint32_t n)
{
	const struct ref_config *c = &g->model->config;
	const uint64_t head = c->head_dim * sizeof(float), stride = (c->heads + 2ull * c->kv_heads) * head;
	const struct kvt_rows k = { (void *)(uintptr_t)(g->qkv + c->heads * head), stride, KVT_F32, 0 };
	const struct kvt_rows v = { (void *)(uintptr_t)(g->qkv + (c->heads + c->kv_heads) * head), stride, KVT_F32, 0 };
	struct kvt_rope_args turn = { .qkv = g->qkv, .q = g->q, .angles = g->angles, .rows = kvt_batch_rows(g->batch), .n = n,
				      .heads = c->heads, .kv_heads = c->kv_heads, .dim = c->head_dim };
	struct kvt_batch_attn io = KVT_INIT(io);
	struct kvt_attn attn = KVT_INIT(attn);
	int err = launch(g, kvt_engine_rope(&turn), &turn);

	attn.flags = KVT_ATTN_CAUSAL;
	attn.k_plane = 2 * layer;
	attn.v_plane = 2 * layer + 1;
	attn.n_heads = c->heads;
	io.q = g->q;
	io.out = g->attn;
	if (!err)
		err = kvt_batch_write_kv(g->batch, attn.k_plane, &k, attn.v_plane, &v);
	return err ? err : kvt_batch_attend(g->batch, &attn, &io);
}

static int layer(struct ref_gpu *g, uint32_t i, uint32_t n)
{
	const struct ref_config *c = &g->model->config;
	const struct gpu_layer *l = &g->layers[i];
	const uint32_t q = c->heads * c->head_dim, qkv = q + 2 * c->kv_heads * c->head_dim;
	int err = gemm(g, (struct kvt_gemm_args){ .x = g->x, .x_stride = c->hidden, .w = l->qkv, .y = g->qkv, .y_stride = qkv,
						  .rows = n, .n = qkv, .k = c->hidden, .before = KVT_GEMM_NORM,
						  .weight = l->attn_norm });

	if (!err)
		err = attention(g, i, n);
	if (!err)
		err = gemm(g, (struct kvt_gemm_args){ .x = g->attn, .x_stride = q, .w = l->out, .y = g->x,
						      .y_stride = c->hidden, .rows = n, .n = c->hidden, .k = q, .add = 1 });
	if (!err)
		err = gemm(g, (struct kvt_gemm_args){ .x = g->x, .x_stride = c->hidden, .w = l->gate_up, .y = g->gate_up,
						      .y_stride = 2 * c->inter, .rows = n, .n = 2 * c->inter, .k = c->hidden,
						      .before = KVT_GEMM_NORM, .weight = l->mlp_norm });
	if (!err)
		err = gemm(g, (struct kvt_gemm_args){ .x = g->gate_up, .x_stride = 2 * c->inter, .w = l->down, .y = g->x,
						      .y_stride = c->hidden, .rows = n, .n = c->hidden, .k = c->inter,
						      .before = KVT_GEMM_SILU, .add = 1 });
	return err;
}

/* All of a step behind the embedding. Logits arrive in host memory in stream order. */
static int layers(struct ref_gpu *g, uint32_t n, uint32_t n_logits)
{
	const struct ref_config *c = &g->model->config;
	int err = 0;

	for (uint32_t i = 0; !err && i < c->layers; i++)
		err = layer(g, i, n);
	if (err || !n_logits)
		return err;
	err = gemm(g, (struct kvt_gemm_args){ .x = g->x + (uint64_t)(n - n_logits) * c->hidden * sizeof(float),
					      .x_stride = c->hidden, .w = g->head, .y = g->logits, .y_stride = c->vocab,
					      .rows = n_logits, .n = c->vocab, .k = c->hidden, .before = KVT_GEMM_NORM,
					      .weight = g->norm });
	return err ? err : g->ops->copy_d2h_async(g->gpu, g->host_logits, g->logits,
						  (uint64_t)n_logits * c->vocab * sizeof(float), g->stream);
}

static int capture(struct ref_gpu *g)
{
	int err, end;

	drop_graph(g);
	err = g->ops->capture_begin(g->gpu, g->stream);
	if (err)
		return err;
	err = layers(g, 1, 1);
	end = g->ops->capture_end(g->gpu, g->stream, &g->graph);
	if (err)
		drop_graph(g);
	else
		err = end;
	g->epoch = kvt_batch_epoch(g->batch);
	return err;
}

static int decode(struct ref_gpu *g)
{
	int err = g->graph && g->epoch == kvt_batch_epoch(g->batch) ? 0 : capture(g);

	return err ? err : g->ops->graph_launch(g->gpu, g->graph, g->stream);
}

static int step(struct ref_gpu *g, struct kvt_seq *seq, const uint32_t *tokens, uint32_t n, uint32_t n_logits)
{
	int err = 0;

	if (seq->batch != g->batch) {
		ref_gpu_rest(g);
		err = kvt_batch_attach(g->batch, &seq, 1);
	}
	if (!err)
		err = kvt_batch_step(g->batch, &n, tokens);
	if (!err)
		err = embed(g, tokens, n);
	if (!err)
		err = n == 1 && n_logits == 1 ? decode(g) : layers(g, n, n_logits);
	if (!err && n_logits)
		err = kvt_batch_wait(g->batch);
	return err;
}

int ref_gpu_forward(struct ref_gpu *g, struct kvt_seq *seq, uint32_t first, const uint32_t *tokens, uint32_t n,
		    uint32_t n_logits, const float **logits)
{
	int err = step(g, seq, tokens, n, n_logits);

	if (err) {
		struct kvt_gpu *gpu = g->gpu;
		char message[512];

		/* what comes now has its own errors */
		snprintf(message, sizeof(message), "%s", kvt_last_error());
		ref_gpu_rest(g);
		if (kvt_seq_len(seq) > first)
			kvt_seq_truncate(seq, first);
		return kvt_fail(err, "%s: %s", gpu->description, message);
	}
	if (n_logits)
		*logits = g->host_logits;
	return 0;
}
