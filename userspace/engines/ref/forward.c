// SPDX-License-Identifier: MIT
/*
 * Llama's forward pass over a kvtier cache. What the engine does with the cache
 * is all here: a sequence grows by the tokens' ids, each layer writes its rows
 * of K and V and attends over all rows so far. Where those live is not its
 * business, and does not show in its results.
 */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "engines/ref/forward_gpu.h"
#include "runtime/scratch.h"

#define ROWS_A_TASK 8
#define GEMM_ROWS_A_TASK 96	   /* whole tiles of every kernel */
#define GEMM_WORK_A_TASK (1u << 18) /* multiply-adds, some microseconds */

struct ref_engine {
	const struct ref_model *model;
	struct ref_gpu *on_gpu; /* computes instead of what follows; NULL: the CPU does */
	struct kvt_cache *cache;
	const struct ref_kernels *kernels;
	struct kvt_gpu *gpu;
	bool owns_gpu;
	uint32_t most_tokens, most_logits;
	struct kvt_arena *arena;
	/* scratch, a row for each token of a call: runtime/scratch.h says which is alive when */
	uint32_t *ids;
	float *x;	/* [hidden] the residual stream */
	float *angles;	/* [head_dim / 2] cosines, then sines */
	float *h;	/* [hidden] what attention reads */
	float *qkv;	/* [(heads + 2 kv_heads) * head_dim] */
	float *q;	/* [heads * head_dim], turned */
	float *attn;	/* [heads * head_dim] */
	float *h_attn;	/* [hidden] what attention gives, and the half-layer behind it reads */
	float *gate_up; /* [2 * inter] */
	float *h_mlp;	/* [hidden] what that gives */
	float *h_final; /* [hidden], a row for each row of logits */
	float *logits;	/* [vocab] */
	/* of the call under way */
	const struct ref_layer *layer;
	uint32_t first, n;
};

void ref_planes(const struct ref_config *c, enum kvt_codec codec, struct kvt_plane_params *planes)
{
	for (uint32_t i = 0; i < 2 * c->layers; i++)
		planes[i] = (struct kvt_plane_params){
			.size = sizeof(planes[i]),
			.codec = codec,
			.heads = c->kv_heads,
			.head_dim = c->head_dim,
			.layer = i / 2,
		};
}

static uint32_t qkv_width(const struct ref_config *c)
{
	return (c->heads + 2 * c->kv_heads) * c->head_dim;
}

static int take_scratch(struct ref_engine *e)
{
	static const struct {
		uint32_t buffer, step;
		size_t field;
	} uses[] = {
#define USE(name, step) { KVT_SCRATCH_##name, KVT_STEP_##step, offsetof(struct ref_engine, name) }
		USE(ids, EMBED), USE(x, EMBED), USE(angles, EMBED), USE(h, NORM), USE(qkv, QKV), USE(q, ROPE),
		USE(attn, ATTEND), USE(h_attn, OUT), USE(gate_up, GATE_UP), USE(h_mlp, DOWN),
		USE(h_final, FINAL_NORM), USE(logits, HEAD),
#undef USE
	};
	const struct ref_config *c = &e->model->config;
	const struct kvt_decoder_shape shape = { c->hidden, c->inter, c->heads, c->kv_heads, c->head_dim, c->vocab,
						 e->most_logits, e->most_tokens };
	struct kvt_arena_buffer buffers[KVT_DECODER_BUFFERS];
	const struct kvt_arena_plan plan = kvt_decoder_scratch(&shape, buffers);
	kvt_dptr address;
	int err = kvt_arena_create(e->gpu, &plan, &e->arena);

	for (uint32_t i = 0; !err && i < sizeof(uses) / sizeof(uses[0]); i++) {
		err = kvt_arena_get(e->arena, uses[i].buffer, buffers[uses[i].buffer].bytes, uses[i].step, &address);
		if (!err)
			*(void **)((char *)e + uses[i].field) = (void *)(uintptr_t)address;
	}
	return err;
}

int ref_engine_create(const struct ref_engine_params *p, struct ref_engine **engine)
{
	struct ref_engine *e = calloc(1, sizeof(*e));
	int err = 0;

	if (!e)
		return kvt_fail(-ENOMEM, "no memory for an engine");
	e->model = p->model;
	e->cache = p->cache;
	e->gpu = p->gpu;
	e->most_tokens = p->tokens;
	e->most_logits = p->logits ? p->logits : 1;
	if (p->on_gpu) {
		err = ref_gpu_create(p, &e->on_gpu);
		goto done;
	}
	e->kernels = ref_kernels(p->isa);
	if (!e->kernels)
		err = kvt_fail(-EINVAL, "this CPU or build has no %s kernels", p->isa);
	else if (e->gpu && !e->gpu->host_readable)
		err = kvt_fail(-EINVAL, "%s: this engine computes on the CPU, which cannot read that memory", e->gpu->description);
	if (!err && !e->gpu) {
		err = kvt_gpu_open(KVT_BACKEND_CPU, 0, &e->gpu);
		e->owns_gpu = !err;
	}
	if (!err)
		err = take_scratch(e);
done:
	if (err)
		ref_engine_free(e);
	else
		*engine = e;
	return err;
}

void ref_engine_free(struct ref_engine *e)
{
	if (!e)
		return;
	ref_gpu_free(e->on_gpu);
	kvt_arena_destroy(e->arena);
	if (e->owns_gpu)
		kvt_gpu_close(e->gpu);
	free(e);
}

void ref_engine_rest(struct ref_engine *e)
{
	if (e->on_gpu)
		ref_gpu_rest(e->on_gpu);
}

/* ---- work for the cache's threads ---- */

struct row_job {
	struct ref_engine *engine;
	void (*row)(struct ref_engine *e, uint32_t i);
	uint32_t n;
};

static void row_task(void *arg, uint32_t task)
{
	const struct row_job *job = arg;
	uint32_t end = (task + 1) * ROWS_A_TASK;

	for (uint32_t i = task * ROWS_A_TASK; i < end && i < job->n; i++)
		job->row(job->engine, i);
}

static void parallel(struct ref_engine *e, uint32_t tasks, void (*fn)(void *arg, uint32_t i), void *arg)
{
	if (tasks == 1)
		fn(arg, 0);
	else
		kvt_cache_parallel(e->cache, tasks, fn, arg);
}

static void each_row(struct ref_engine *e, void (*row)(struct ref_engine *e, uint32_t i))
{
	struct row_job job = { e, row, e->n };

	parallel(e, (e->n + ROWS_A_TASK - 1) / ROWS_A_TASK, row_task, &job);
}

struct gemm_job {
	const struct ref_kernels *kernels;
	const struct ref_matrix *w;
	const float *x;
	float *y;
	size_t x_stride;
	uint32_t rows, panels, panels_a_task, tasks_across;
};

static void gemm_task(void *arg, uint32_t task)
{
	const struct gemm_job *job = arg;
	uint32_t row = task / job->tasks_across * GEMM_ROWS_A_TASK, panel = task % job->tasks_across * job->panels_a_task;
	uint32_t rows = job->rows - row, panels = job->panels - panel;

	if (rows > GEMM_ROWS_A_TASK)
		rows = GEMM_ROWS_A_TASK;
	if (panels > job->panels_a_task)
		panels = job->panels_a_task;
	job->kernels->gemm(job->w, panel, panels, job->x + row * job->x_stride, job->x_stride, rows,
			   job->y + (size_t)row * job->w->n, job->w->n);
}

/* y [rows][w->n] = x [rows] w^T */
static void gemm(struct ref_engine *e, const struct ref_matrix *w, const float *x, size_t x_stride, uint32_t rows,
		 float *y)
{
	struct gemm_job job = { .kernels = e->kernels, .w = w, .x = x, .y = y, .x_stride = x_stride, .rows = rows };
	uint32_t tall = rows < GEMM_ROWS_A_TASK ? rows : GEMM_ROWS_A_TASK;

	job.panels = (w->n + REF_PANEL - 1) / REF_PANEL;
	job.panels_a_task = (uint32_t)(GEMM_WORK_A_TASK / ((uint64_t)REF_PANEL * w->k * tall)) + 1;
	job.tasks_across = (job.panels + job.panels_a_task - 1) / job.panels_a_task;
	parallel(e, (rows + GEMM_ROWS_A_TASK - 1) / GEMM_ROWS_A_TASK * job.tasks_across, gemm_task, &job);
}

/* ---- what a layer does to one token's row ---- */

void ref_angles(const struct ref_model *m, uint32_t position, float *angles)
{
	const uint32_t half = m->config.head_dim / 2;

	for (uint32_t j = 0; j < half; j++) {
		double angle = m->frequency[j] * position;

		angles[j] = (float)cos(angle);
		angles[half + j] = (float)sin(angle);
	}
}

static void row_embed(struct ref_engine *e, uint32_t i)
{
	const struct ref_config *c = &e->model->config;

	ref_matrix_row(&e->model->embed, e->ids[i], e->x + (size_t)i * c->hidden);
	ref_angles(e->model, e->first + i, e->angles + (size_t)i * c->head_dim);
}

/* @to = norm of row @i of the residual stream */
static void row_norm(struct ref_engine *e, uint32_t i, const float *weight, float *to)
{
	const struct ref_config *c = &e->model->config;

	e->kernels->rmsnorm(to, e->x + (size_t)i * c->hidden, weight, c->hidden, c->eps);
}

static void row_before_attention(struct ref_engine *e, uint32_t i)
{
	row_norm(e, i, e->layer->attn_norm, e->h + (size_t)i * e->model->config.hidden);
}

static void row_rope(struct ref_engine *e, uint32_t i)
{
	const struct ref_config *c = &e->model->config;
	const float *angles = e->angles + (size_t)i * c->head_dim;
	float *from = e->qkv + (size_t)i * qkv_width(c), *q = e->q + (size_t)i * c->heads * c->head_dim;

	for (uint32_t h = 0; h < c->heads; h++, from += c->head_dim, q += c->head_dim)
		e->kernels->rope(q, from, angles, c->head_dim / 2);
	for (uint32_t h = 0; h < c->kv_heads; h++, from += c->head_dim)
		e->kernels->rope(from, from, angles, c->head_dim / 2);
}

static void row_after_attention(struct ref_engine *e, uint32_t i)
{
	const uint32_t hidden = e->model->config.hidden;
	float *h = e->h_attn + (size_t)i * hidden;

	e->kernels->add(e->x + (size_t)i * hidden, h, hidden);
	row_norm(e, i, e->layer->mlp_norm, h);
}

static void row_after_mlp(struct ref_engine *e, uint32_t i)
{
	const uint32_t hidden = e->model->config.hidden;

	e->kernels->add(e->x + (size_t)i * hidden, e->h_mlp + (size_t)i * hidden, hidden);
}

static void row_swiglu(struct ref_engine *e, uint32_t i)
{
	const uint32_t inter = e->model->config.inter;
	float *gate = e->gate_up + (size_t)i * 2 * inter;

	e->kernels->silu_mul(gate, gate, gate + inter, inter);
}

/* ---- the pass ---- */

static int attention(struct ref_engine *e, struct kvt_seq *seq, uint32_t layer)
{
	const struct ref_config *c = &e->model->config;
	const uint64_t stride = qkv_width(c) * sizeof(float);
	const struct kvt_rows k = { e->qkv + (size_t)c->heads * c->head_dim, stride, KVT_F32, 0 };
	const struct kvt_rows v = { e->qkv + (size_t)(c->heads + c->kv_heads) * c->head_dim, stride, KVT_F32, 0 };
	const struct kvt_attn_item item = { .seq = seq, .first = e->first, .n = e->n, .q = e->q, .out = e->attn };
	struct kvt_attn attn = KVT_INIT(attn);
	int err;

	attn.flags = KVT_ATTN_CAUSAL;
	attn.k_plane = 2 * layer;
	attn.v_plane = 2 * layer + 1;
	attn.n_heads = c->heads;
	err = kvt_seq_write(seq, attn.k_plane, e->first, e->n, &k);
	if (!err)
		err = kvt_seq_write(seq, attn.v_plane, e->first, e->n, &v);
	return err ? err : kvt_attend(e->cache, &attn, &item, 1);
}

static int layer(struct ref_engine *e, struct kvt_seq *seq, uint32_t i)
{
	const struct ref_config *c = &e->model->config;
	int err;

	e->layer = &e->model->layers[i];
	each_row(e, row_before_attention);
	gemm(e, &e->layer->qkv, e->h, c->hidden, e->n, e->qkv);
	each_row(e, row_rope);
	err = attention(e, seq, i);
	if (err)
		return err;
	gemm(e, &e->layer->out, e->attn, (size_t)c->heads * c->head_dim, e->n, e->h_attn);
	each_row(e, row_after_attention);
	gemm(e, &e->layer->gate_up, e->h_attn, c->hidden, e->n, e->gate_up);
	each_row(e, row_swiglu);
	gemm(e, &e->layer->down, e->gate_up, 2 * (size_t)c->inter, e->n, e->h_mlp);
	each_row(e, row_after_mlp);
	return 0;
}

int ref_forward(struct ref_engine *e, struct kvt_seq *seq, const uint32_t *tokens, uint32_t n, uint32_t n_logits,
		const float **logits)
{
	const struct ref_config *c = &e->model->config;
	const struct ref_matrix *head = c->tied ? &e->model->embed : &e->model->head;
	int err;

	e->first = kvt_seq_len(seq);
	e->n = n;
	if (!n || n > e->most_tokens || n_logits > n || n_logits > e->most_logits)
		return kvt_fail(-EINVAL, "%u tokens with %u logits in a call of at most %u with %u", n, n_logits, e->most_tokens,
				e->most_logits);
	if (n > c->context || e->first > c->context - n)
		return kvt_fail(-ERANGE, "%u tokens behind %u: the model's context is %u", n, e->first, c->context);
	for (uint32_t i = 0; i < n; i++)
		if (tokens[i] >= c->vocab)
			return kvt_fail(-EINVAL, "token id %u, the model has %u", tokens[i], c->vocab);
	if (e->on_gpu)
		return ref_gpu_forward(e->on_gpu, seq, e->first, tokens, n, n_logits, logits);
	err = kvt_seq_append(seq, tokens, n);
	if (err)
		return err;
	memcpy(e->ids, tokens, n * sizeof(*e->ids));
	each_row(e, row_embed);
	for (uint32_t i = 0; !err && i < c->layers; i++)
		err = layer(e, seq, i);
	if (err) {
		kvt_seq_truncate(seq, e->first);
		return err;
	}
	if (!n_logits)
		return 0;
	for (uint32_t i = 0; i < n_logits; i++)
		row_norm(e, n - n_logits + i, e->model->norm, e->h_final + (size_t)i * c->hidden);
	gemm(e, head, e->h_final, c->hidden, n_logits, e->logits);
	*logits = e->logits;
	return 0;
}

uint32_t ref_argmax(const float *logits, uint32_t n)
{
	uint32_t best = 0;

	for (uint32_t i = 1; i < n; i++)
		if (logits[i] > logits[best])
			best = i;
	return best;
}

bool ref_is_eos(const struct ref_config *c, uint32_t id)
{
	for (uint32_t i = 0; i < c->n_eos; i++)
		if (id == c->eos[i])
			return true;
	return false;
}
