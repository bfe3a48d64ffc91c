// SPDX-License-Identifier: MIT
/* The public attention calls: checks, and the tables that a call reads. */
#include <errno.h>
#include <math.h>

#include "base/err.h"
#include "base/params.h"
#include "cache/cache.h"
#include "codec/codec.h"

static int check_attn(struct kvt_cache *c, const struct kvt_attn *a, bool raw, struct kvt_attend_call *call)
{
	const struct kvt_plane *k, *v;
	uint32_t v_dim;

	if (a->k_plane >= c->n_planes || a->v_plane >= c->n_planes)
		return kvt_fail(-EINVAL, "attention: planes %u and %u of %u", a->k_plane, a->v_plane, c->n_planes);
	k = &c->planes[a->k_plane];
	v = &c->planes[a->v_plane];
	if (!k->rows != !raw || !v->rows != !raw)
		return kvt_fail(-EINVAL, "attention: planes %u and %u must both be %s planes", a->k_plane, a->v_plane,
				raw ? "raw" : "sequence");
	if (k->heads != v->heads)
		return kvt_fail(-EINVAL, "attention: K has %u heads and V has %u", k->heads, v->heads);
	if (k->head_dim < 8 || k->head_dim > KVT_HEAD_MAX || v->head_dim < 8 || v->head_dim > KVT_HEAD_MAX)
		return kvt_fail(-EINVAL, "attention: head sizes %u and %u, 8 to %u expected", k->head_dim, v->head_dim,
				KVT_HEAD_MAX);
	v_dim = a->v_dim ? a->v_dim : v->head_dim;
	if (v_dim < 8 || v_dim > v->head_dim || (v_dim < v->head_dim && v->heads > 1))
		return kvt_fail(-EINVAL, "attention: v_dim is %u of %u heads of %u: 8 or more of one head expected", v_dim,
				v->heads, v->head_dim);
	if (a->family > KVT_ATTN_FAST)
		return kvt_fail(-EINVAL, "attention: no family %u", a->family);
	if (a->family == KVT_ATTN_FAST)
		return kvt_fail(-EOPNOTSUPP, "attention: the CPU has no family fast; batches on an sm_90 GPU do");
	if (!a->n_heads || a->n_heads % k->heads)
		return kvt_fail(-EINVAL, "attention: %u query heads are no multiple of %u KV heads", a->n_heads, k->heads);
	if (a->n_heads > c->max_query_heads)
		return kvt_fail(-EINVAL, "attention: %u query heads, max_query_heads is %u", a->n_heads,
				c->max_query_heads);
	if (a->flags & ~KVT_ATTN_CAUSAL)
		return kvt_fail(-EINVAL, "attention: flags 0x%x: unknown bits", a->flags);
	if (raw && (a->flags || a->window))
		return kvt_fail(-EINVAL, "attention: with a mask, the mask says what is seen: no causal flag, no window");
	if (!isfinite(a->scale) || !isfinite(a->softcap) || a->softcap < 0)
		return kvt_fail(-EINVAL, "attention: scale %g and softcap %g must be finite, softcap not negative",
				(double)a->scale, (double)a->softcap);
	if ((a->q_stride && a->q_stride < (uint64_t)a->n_heads * k->head_dim) ||
	    (a->out_stride && a->out_stride < (uint64_t)a->n_heads * v_dim))
		return kvt_fail(-EINVAL, "attention: q_stride %llu and out_stride %llu: at least %u heads of %u and %u elements, or 0",
				(unsigned long long)a->q_stride, (unsigned long long)a->out_stride, a->n_heads, k->head_dim,
				v_dim);
	*call = (struct kvt_attend_call){
		.shape = { .k_dim = k->head_dim, .v_dim = v_dim,
			   .k_codec = kvt_codec_group(k->geom.codec) > 1 ? KVT_F32 : k->geom.codec,
			   .v_codec = kvt_codec_group(v->geom.codec) > 1 ? KVT_F32 : v->geom.codec,
			   .scale = a->scale ? a->scale : (float)(1.0 / sqrt(k->head_dim)), .softcap = a->softcap,
			   .mask_type = KVT_F32 },
		.k_geom = &k->geom, .v_geom = &v->geom, .heads = a->n_heads, .kv_heads = k->heads,
		.widen = kvt_codec_group(k->geom.codec) > 1 || kvt_codec_group(v->geom.codec) > 1,
		.causal = a->flags & KVT_ATTN_CAUSAL, .window = a->window, .slopes = a->alibi, .sinks = a->sinks,
		.q_stride = a->q_stride ? a->q_stride : (uint64_t)a->n_heads * k->head_dim,
		.out_stride = a->out_stride ? a->out_stride : (uint64_t)a->n_heads * v_dim,
	};
	return 0;
}

static int check_strides(const struct kvt_attend_call *call, uint64_t n)
{
	if (kvt_stride_fits(n * sizeof(float), call->q_stride) && kvt_stride_fits(n * sizeof(float), call->out_stride))
		return 0;
	return kvt_fail(-EINVAL, "attention: %llu queries, %llu and %llu elements apart, are beyond memory", (unsigned long long)n,
			(unsigned long long)call->q_stride, (unsigned long long)call->out_stride);
}

/*
 * Layers are attended to in the same order at every step: what followed this
 * pair last time will be read next, and its first blocks may load meanwhile.
 */
static const struct kvt_plane *learn_order(struct kvt_cache *c, const struct kvt_attn *a, uint32_t *next_v)
{
	struct kvt_plane *k = &c->planes[a->k_plane];
	const struct kvt_plane *next = NULL;

	pthread_mutex_lock(&c->lock);
	if (c->last_k != UINT32_MAX && c->last_k != a->k_plane) {
		c->planes[c->last_k].next_k = a->k_plane;
		c->planes[c->last_k].next_v = a->v_plane;
	}
	c->last_k = a->k_plane;
	if (k->next_k != UINT32_MAX) {
		next = &c->planes[k->next_k];
		*next_v = k->next_v;
	}
	pthread_mutex_unlock(&c->lock);
	return next;
}

static void set_item(struct kvt_attend_call *call, const struct kvt_attn_item *it, const struct kvt_plane *k,
		     const struct kvt_plane *v)
{
	call->k_geom = &k->geom;
	call->v_geom = &v->geom;
	call->k_table = kvt_seq_table(it->seq, k);
	call->v_table = kvt_seq_table(it->seq, v);
	call->n_rows = it->seq->len;
	call->n = it->n;
	call->first = it->first;
	call->q = it->q;
	call->out = it->out;
}

int kvt_attend(struct kvt_cache *c, const struct kvt_attn *attn, const struct kvt_attn_item *items, uint32_t n_items)
{
	const struct kvt_plane *next;
	struct kvt_attend_call call, after;
	struct kvt_attn a;
	uint32_t next_v = 0;
	int ret = kvt_params_copy(&a, sizeof(a), sizeof(a), attn, "attention");

	if (!ret)
		ret = check_attn(c, &a, false, &call);
	if (!ret && n_items && !items)
		ret = kvt_fail(-EINVAL, "attention: %u items, but items is NULL", n_items);
	if (ret)
		return ret;
	for (uint32_t i = 0; i < n_items; i++) {
		const struct kvt_attn_item *it = &items[i];

		if (!it->seq || it->seq->cache != c || !it->q || !it->out)
			return kvt_fail(-EINVAL, "attention: item %u lacks a sequence of this cache, q or out", i);
		ret = kvt_seq_idle(it->seq);
		if (ret)
			return ret;
		if (it->first > it->seq->len || it->n > it->seq->len - it->first)
			return kvt_fail(-ERANGE, "attention: item %u: positions %u to %llu of a sequence of %u tokens", i,
					it->first, (unsigned long long)it->first + it->n, it->seq->len);
		ret = check_strides(&call, it->n);
		if (ret)
			return ret;
	}
	next = learn_order(c, &a, &next_v);
	for (uint32_t i = 0; i < n_items && !ret; i++) {
		const struct kvt_attn_item *it = &items[i];

		set_item(&call, it, &c->planes[a.k_plane], &c->planes[a.v_plane]);
		after = call;
		call.next = &after;
		if (i + 1 < n_items)
			set_item(&after, &items[i + 1], &c->planes[a.k_plane], &c->planes[a.v_plane]);
		else if (next && !next->rows)
			set_item(&after, &items[0], next, &c->planes[next_v]);
		else
			call.next = NULL;
		ret = kvt_attend_run(c->attend, &call);
	}
	return ret;
}

int kvt_attend_mask(struct kvt_cache *c, const struct kvt_attn *attn, const struct kvt_attn_mask *mask)
{
	const struct kvt_plane *k, *v, *next;
	struct kvt_attend_call call, after;
	struct kvt_attn_mask m;
	struct kvt_attn a;
	uint32_t next_v = 0;
	int ret = kvt_params_copy(&a, sizeof(a), sizeof(a), attn, "attention");

	if (!ret)
		ret = kvt_params_copy(&m, sizeof(m), sizeof(m), mask, "attention mask");
	if (!ret)
		ret = check_attn(c, &a, true, &call);
	if (ret)
		return ret;
	k = &c->planes[a.k_plane];
	v = &c->planes[a.v_plane];
	if (m.n_rows > k->rows || m.n_rows > v->rows)
		return kvt_fail(-ERANGE, "attention: %llu rows of planes of %llu and %llu", (unsigned long long)m.n_rows,
				(unsigned long long)k->rows, (unsigned long long)v->rows);
	if (!m.q || !m.out || m.reserved)
		return kvt_fail(-EINVAL, "attention: q or out is missing, or reserved is %u", m.reserved);
	ret = check_strides(&call, m.n);
	if (ret)
		return ret;
	if (m.mask && (m.mask_stride < m.n_rows || !kvt_stride_fits((uint64_t)m.n * sizeof(float), m.mask_stride) ||
		       (m.mask_type != KVT_F32 && m.mask_type != KVT_F16)))
		return kvt_fail(-EINVAL, "attention: mask of stride %llu over %llu rows, type %u (f32 or f16)",
				(unsigned long long)m.mask_stride, (unsigned long long)m.n_rows, m.mask_type);
	call.shape.mask_type = m.mask_type;
	call.k_table = k->table;
	call.v_table = v->table;
	call.n_rows = m.n_rows;
	call.n = m.n;
	call.mask = m.mask;
	call.mask_stride = m.mask_stride;
	call.slopes = m.mask ? a.alibi : NULL;
	call.q = m.q;
	call.out = m.out;
	next = learn_order(c, &a, &next_v);
	if (next && next->rows >= m.n_rows && c->planes[next_v].rows >= m.n_rows) { /* a sequence plane has 0 */
		after = call;
		after.k_geom = &next->geom;
		after.v_geom = &c->planes[next_v].geom;
		after.k_table = next->table;
		after.v_table = c->planes[next_v].table;
		call.next = &after;
	}
	return kvt_attend_run(c->attend, &call);
}
