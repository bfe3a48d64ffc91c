// SPDX-License-Identifier: MIT
/*
 * FLASH_ATTN_EXT over KV tensors. Two layouts of K and V are understood: all
 * heads of a position in one row (llama.cpp's caches), and a plane for each
 * head. Each stream, and in the second layout each head, is one call. With
 * latent attention V is the beginning of K's rows.
 */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "attention/kernel.h"
#include "base/err.h"
#include "codec/codec.h"
#include "engines/ggml/internal.h"

#define TOKENS_AT_ONCE 512 /* whose queries are brought into order at a time */

enum layout { NONE, HEADS_IN_ROW, HEAD_PLANES };

/* @part: of the one head's rows only the beginning may be read. */
static enum layout layout_of(const struct kg_view *v, bool part)
{
	uint64_t head = kvt_codec_bytes(v->type, (uint64_t)v->ne[0]), plane = v->rows * v->row_bytes;

	if (!v->row_bytes || !head || v->at % plane || (v->ne[1] > 1 && v->nb[1] != v->row_bytes) ||
	    (v->ne[3] > 1 && v->nb[3] % plane) || (uint64_t)v->ne[1] > v->rows)
		return NONE;
	if (head * (uint64_t)v->ne[2] == v->row_bytes && (v->ne[2] == 1 || v->nb[2] == head))
		return HEADS_IN_ROW;
	if (part && v->ne[2] == 1 && head < v->row_bytes)
		return HEADS_IN_ROW;
	return head == v->row_bytes && v->nb[2] % plane == 0 ? HEAD_PLANES : NONE;
}

bool kg_attention_fits(const struct kg_attention *a)
{
	const struct kg_view *q = &a->q, *k = &a->k, *v = &a->v;

	return q->type == KVT_F32 && a->out.type == KVT_F32 && q->nb[0] == 4 && layout_of(k, false) &&
	       layout_of(k, false) == layout_of(v, true) && k->ne[0] >= 8 && k->ne[0] <= KVT_HEAD_MAX && v->ne[0] >= 8 &&
	       v->ne[0] <= KVT_HEAD_MAX && q->ne[0] == k->ne[0] &&
	       k->ne[1] == v->ne[1] && k->ne[2] == v->ne[2] && k->ne[3] == v->ne[3] && q->ne[3] == k->ne[3] &&
	       q->ne[2] % k->ne[2] == 0 && a->scale != 0 &&
	       (!a->has_mask || (a->mask.type == KVT_F16 && a->mask.ne[2] == 1 && a->mask.nb[0] == 2)) &&
	       (!a->has_sinks || a->sinks.type == KVT_F32);
}

/* The slopes of ALiBi (arXiv 2108.12409) as ggml extends them to head counts that are no power of two. */
static void slopes_of(float max_bias, uint32_t heads, float *slope)
{
	uint32_t power = 1;

	while (power * 2 <= heads)
		power *= 2;
	for (uint32_t h = 0; h < heads; h++)
		slope[h] = h < power ? powf(powf(2, -max_bias / (float)power), (float)(h + 1)) :
				       powf(powf(2, -max_bias / 2 / (float)power), (float)(2 * (h - power) + 1));
}

struct call {
	const struct kg_attention *a;
	struct kg_cache *cache;
	struct kvt_attn attn;
	uint32_t head, heads; /* query heads [head, head + heads) */
	int64_t stream;
	float *q, *out; /* scratch */
};

/* Bytes of the queries and results that scratch takes, each. */
static uint64_t piece_bytes(const struct kg_attention *a, int64_t dims)
{
	uint64_t n = (uint64_t)(a->q.ne[1] < TOKENS_AT_ONCE ? a->q.ne[1] : TOKENS_AT_ONCE);

	return n * (uint64_t)a->q.ne[2] * (uint64_t)dims * sizeof(float);
}

static int attend(struct call *c, int64_t first, uint32_t n)
{
	const struct kg_attention *a = c->a;
	const struct kg_view *q = &a->q, *out = &a->out, *mask = &a->mask;
	uint64_t q_head = (uint64_t)q->ne[0] * sizeof(float), out_head = (uint64_t)out->ne[0] * sizeof(float);
	struct kvt_attn_mask m = KVT_INIT(m);
	int ret;

	m.n = n;
	m.n_rows = (uint64_t)a->k.ne[1];
	if (a->has_mask) {
		m.mask = mask->data + (uint64_t)first * mask->nb[1] + (uint64_t)(c->stream % mask->ne[3]) * mask->nb[3];
		m.mask_stride = mask->nb[1] / 2;
		m.mask_type = KVT_F16;
	}
	/* a token's heads side by side are what kvtier takes, and what llama.cpp gives */
	if (q->nb[2] == q_head && q->nb[1] == c->heads * q_head) {
		m.q = (const float *)(q->data + kg_at(q, first, c->head, c->stream) - q->at);
	} else {
		for (uint32_t i = 0; i < n; i++)
			for (uint32_t h = 0; h < c->heads; h++)
				memcpy(c->q + ((uint64_t)i * c->heads + h) * (uint64_t)q->ne[0],
				       q->data + kg_at(q, first + i, c->head + h, c->stream) - q->at, q_head);
		m.q = c->q;
	}
	m.out = (float *)(out->data + kg_at(out, 0, first, c->stream) - out->at);
	if (c->heads != out->ne[1])
		m.out = c->out;
	ret = kvt_attend_mask(c->cache->cache, &c->attn, &m);
	c->cache->attention_calls += !ret;
	for (uint32_t i = 0; m.out == c->out && i < n && !ret; i++)
		memcpy(out->data + kg_at(out, c->head, first + i, c->stream) - out->at,
		       c->out + (uint64_t)i * c->heads * (uint64_t)out->ne[0], c->heads * out_head);
	return ret;
}

static uint32_t plane_of(const struct kg_view *v, int64_t head, int64_t stream)
{
	uint64_t at = v->at + (uint64_t)stream * v->nb[3] + (uint64_t)head * v->nb[2];

	return v->kv->first_plane + (uint32_t)(at / (v->rows * v->row_bytes));
}

int kg_attention(const struct kg_attention *a)
{
	const struct kg_view *k = &a->k, *v = &a->v;
	enum layout layout = layout_of(k, false);
	uint32_t heads = (uint32_t)a->q.ne[2], groups = layout == HEAD_PLANES ? (uint32_t)k->ne[2] : 1;
	uint64_t q_bytes = piece_bytes(a, a->q.ne[0]), out_bytes = piece_bytes(a, a->out.ne[0]);
	struct call c = { .a = a, .attn = KVT_INIT(c.attn), .heads = heads / groups };
	float *slope;
	uint32_t n;
	int ret = 0;

	if (!kg_attention_fits(a) || !k->kv || !v->kv || k->kv->rows != k->rows || v->kv->rows != v->rows)
		return kvt_fail(-EOPNOTSUPP, "attention of %" PRId64 " and %" PRId64 " dimensions over %s and %s, in a layout or with a mask that is not known here: run it without -dev KVTIER0",
				k->ne[0], v->ne[0], k->kv ? k->kv->name : "plain memory", v->kv ? v->kv->name : "plain memory");
	c.cache = kg_open(k->kv);
	if (!c.cache || kg_open(v->kv) != c.cache)
		return c.cache ? kvt_fail(-EINVAL, "%s and %s are in different caches", k->kv->name, v->kv->name) : -EIO;
	if (c.cache->failed)
		return kvt_fail(-EIO, "%s: bytes of this cache were lost in an earlier error: clear it, or restart", k->kv->name);
	slope = kg_scratch(c.cache, heads * sizeof(float) + q_bytes + out_bytes);
	if (!slope)
		return -ENOMEM;
	slopes_of(a->max_bias, heads, slope);
	c.q = slope + heads;
	c.out = c.q + q_bytes / sizeof(float);
	c.attn.scale = a->scale;
	c.attn.softcap = a->softcap;
	c.attn.n_heads = c.heads;
	c.attn.v_dim = (uint32_t)v->ne[0];
	for (c.stream = 0; c.stream < a->q.ne[3] && !ret; c.stream++)
		for (uint32_t g = 0; g < groups && !ret; g++) {
			c.head = g * c.heads;
			c.attn.k_plane = plane_of(k, layout == HEAD_PLANES ? g : 0, c.stream);
			c.attn.v_plane = plane_of(v, layout == HEAD_PLANES ? g : 0, c.stream);
			c.attn.alibi = a->max_bias > 0 ? slope + c.head : NULL;
			c.attn.sinks = a->has_sinks ? (const float *)a->sinks.data + c.head : NULL;
			for (int64_t first = 0; first < a->q.ne[1] && !ret; first += n) {
				n = (uint32_t)(a->q.ne[1] - first < TOKENS_AT_ONCE ? a->q.ne[1] - first : TOKENS_AT_ONCE);
				ret = attend(&c, first, n);
			}
		}
	return ret;
}
