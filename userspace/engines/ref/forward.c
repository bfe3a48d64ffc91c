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

#include "base/err.h"
#include "engines/ref/engine.h"

#define ROWS_A_TASK 8
#define GEMM_ROWS_A_TASK 96	   /* whole tiles of every kernel */
#define GEMM_WORK_A_TASK (1u << 18) /* multiply-adds, some microseconds */

struct ref_engine {
	const struct ref_model *model;
	struct kvt_cache *cache;
	const struct ref_kernels *kernels;
	uint32_t chunk;
	float *memory;
	/* [chunk] rows each, in memory */
	float *x;	/* [hidden] the residual stream */
	float *h;	/* [hidden] what a half-layer reads and gives */
	float *qkv;	/* [(heads + 2 kv_heads) * head_dim] */
	float *q;	/* [heads * head_dim], turned */
	float *attn;	/* [heads * head_dim] */
	float *gate_up; /* [2 * inter] */
	float *angles;	/* [head_dim / 2] cosines, then sines */
	/* of the call under way */
	const struct ref_layer *layer;
	const uint32_t *tokens;
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

int ref_engine_create(const struct ref_model *model, struct kvt_cache *cache, uint32_t chunk, const char *isa,
		      struct ref_engine **engine)
{
	const struct ref_config *c = &model->config;
	struct ref_engine *e = calloc(1, sizeof(*e));
	const uint64_t widths[] = { c->hidden, c->hidden, qkv_width(c), (uint64_t)c->heads * c->head_dim,
				    (uint64_t)c->heads * c->head_dim, 2ull * c->inter, c->head_dim };
	float **const buffers[] = { &e->x, &e->h, &e->qkv, &e->q, &e->attn, &e->gate_up, &e->angles };
	uint64_t row = 0, at = 0;

	for (uint32_t i = 0; i < sizeof(widths) / sizeof(widths[0]); i++)
		row += widths[i];
	if (!e)
		return kvt_fail(-ENOMEM, "no memory for an engine");
	e->memory = malloc(row * chunk * sizeof(float));
	if (!e->memory) {
		free(e);
		return kvt_fail(-ENOMEM, "no memory for %llu bytes of activations of %u tokens: a smaller --prefill-chunk",
				(unsigned long long)(row * chunk * sizeof(float)), chunk);
	}
	for (uint32_t i = 0; i < sizeof(widths) / sizeof(widths[0]); at += widths[i++] * chunk)
		*buffers[i] = e->memory + at;
	e->model = model;
	e->cache = cache;
	e->chunk = chunk;
	e->kernels = ref_kernels(isa);
	if (!e->kernels) {
		ref_engine_free(e);
		return kvt_fail(-EINVAL, "this CPU or build has no %s kernels", isa);
	}
	*engine = e;
	return 0;
}

void ref_engine_free(struct ref_engine *e)
{
	if (!e)
		return;
	free(e->memory);
	free(e);
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

static void row_embed(struct ref_engine *e, uint32_t i)
{
	const struct ref_config *c = &e->model->config;
	const uint32_t half = c->head_dim / 2;
	float *angles = e->angles + (size_t)i * c->head_dim;

	ref_matrix_row(&e->model->embed, e->tokens[i], e->x + (size_t)i * c->hidden);
	for (uint32_t j = 0; j < half; j++) {
		double angle = e->model->frequency[j] * (e->first + i);

		angles[j] = (float)cos(angle);
		angles[half + j] = (float)sin(angle);
	}
}

static void row_norm(struct ref_engine *e, uint32_t i, const float *weight)
{
	const struct ref_config *c = &e->model->config;

	e->kernels->rmsnorm(e->h + (size_t)i * c->hidden, e->x + (size_t)i * c->hidden, weight, c->hidden, c->eps);
}

static void row_before_attention(struct ref_engine *e, uint32_t i)
{
	row_norm(e, i, e->layer->attn_norm);
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

static void row_add(struct ref_engine *e, uint32_t i)
{
	const uint32_t hidden = e->model->config.hidden;

	e->kernels->add(e->x + (size_t)i * hidden, e->h + (size_t)i * hidden, hidden);
}

static void row_after_attention(struct ref_engine *e, uint32_t i)
{
	row_add(e, i);
	row_norm(e, i, e->layer->mlp_norm);
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
	gemm(e, &e->layer->out, e->attn, (size_t)c->heads * c->head_dim, e->n, e->h);
	each_row(e, row_after_attention);
	gemm(e, &e->layer->gate_up, e->h, c->hidden, e->n, e->gate_up);
	each_row(e, row_swiglu);
	gemm(e, &e->layer->down, e->gate_up, 2 * (size_t)c->inter, e->n, e->h);
	each_row(e, row_add);
	return 0;
}

int ref_forward(struct ref_engine *e, struct kvt_seq *seq, const uint32_t *tokens, uint32_t n, uint32_t n_logits,
		float *logits)
{
	const struct ref_config *c = &e->model->config;
	const struct ref_matrix *head = c->tied ? &e->model->embed : &e->model->head;
	int err;

	e->first = kvt_seq_len(seq);
	e->tokens = tokens;
	e->n = n;
	if (!n || n > e->chunk || n_logits > n)
		return kvt_fail(-EINVAL, "%u tokens with %u logits in a call of at most %u", n, n_logits, e->chunk);
	if (n > c->context || e->first > c->context - n)
		return kvt_fail(-ERANGE, "%u tokens behind %u: the model's context is %u", n, e->first, c->context);
	for (uint32_t i = 0; i < n; i++)
		if (tokens[i] >= c->vocab)
			return kvt_fail(-EINVAL, "token id %u, the model has %u", tokens[i], c->vocab);
	err = kvt_seq_append(seq, tokens, n);
	if (err)
		return err;
	each_row(e, row_embed);
	for (uint32_t i = 0; !err && i < c->layers; i++)
		err = layer(e, seq, i);
	if (err) {
		kvt_seq_truncate(seq, e->first);
		return err;
	}
	for (uint32_t i = n - n_logits; i < n; i++)
		row_norm(e, i, e->model->norm);
	if (n_logits)
		gemm(e, head, e->h + (size_t)(n - n_logits) * c->hidden, c->hidden, n_logits, logits);
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
