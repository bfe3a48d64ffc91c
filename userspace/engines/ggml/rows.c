// SPDX-License-Identifier: MIT
/*
 * Rows in, out and about: SET_ROWS, GET_ROWS, CPY and ROPE on KV tensors. But
 * for SET_ROWS and copies of bytes they go through f32 a row at a time: a cursor
 * holds the row it is at.
 */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "codec/codec.h"
#include "engines/ggml/internal.h"

#define ROWS_AT_ONCE 256

/* ---- a row of a view at a time, as f32 ---- */

struct cursor {
	const struct kg_view *view;
	float *row;	/* of the KV tensor, or of the view */
	uint64_t at;	/* which: index or address */
	bool holds, dirty;
};

static int cursor_open(struct cursor *c, const struct kg_view *v)
{
	uint64_t n = v->kv ? v->kv->elements : (uint64_t)v->ne[0];

	*c = (struct cursor){ .view = v, .row = malloc(n * sizeof(float)) };
	if (!c->row)
		return kvt_fail(-ENOMEM, "no memory for a row of %" PRIu64 " elements", n);
	if (v->kv || v->nb[0] == kvt_codec_bytes(v->type, kvt_codec_group(v->type)))
		return 0;
	free(c->row);
	return kvt_fail(-EOPNOTSUPP, "elements that are not contiguous");
}

static int cursor_flush(struct cursor *c)
{
	const struct kg_view *v = c->view;
	int ret = 0;

	if (c->dirty && v->kv)
		ret = kg_rows_write(v->kv, c->at, 1, c->row);
	else if (c->dirty)
		kvt_codec_convert((uint8_t *)c->at, v->type, c->row, KVT_F32, (uint64_t)v->ne[0]);
	c->dirty = false;
	return ret;
}

/* Elements (0.., i1, i2, i3); to be written if @dirty. They stay until the next call. */
static int cursor_at(struct cursor *c, int64_t i1, int64_t i2, int64_t i3, bool dirty, float **elements)
{
	const struct kg_view *v = c->view;
	uint64_t at = kg_at(v, i1, i2, i3), row = v->kv ? at / v->kv->row_bytes : (uint64_t)(uintptr_t)v->data + at - v->at;
	int ret = 0;

	if (!c->holds || c->at != row) {
		ret = cursor_flush(c);
		if (!ret && v->kv)
			ret = kg_rows_read(v->kv, row, 1, c->row);
		else if (!ret)
			kvt_codec_convert(c->row, KVT_F32, (const void *)row, v->type, (uint64_t)v->ne[0]);
		c->holds = !ret;
		c->at = row;
	}
	c->dirty |= dirty;
	*elements = c->row;
	if (v->kv)
		*elements += at % v->kv->row_bytes * v->kv->elements / v->kv->row_bytes;
	return ret;
}

static int cursor_close(struct cursor *c, int ret)
{
	if (!ret)
		ret = cursor_flush(c);
	free(c->row);
	return ret;
}

static int check(const struct kg_tensor *t)
{
	if (t->buffer->cache && t->buffer->cache->failed)
		return kvt_fail(-EIO, "%s: bytes of this cache were lost in an earlier error: clear it, or restart", t->name);
	return 0;
}

/* ---- SET_ROWS ---- */

static int64_t index_at(const struct kg_view *x, int64_t i, int64_t i2, int64_t i3)
{
	const uint8_t *p = x->data + (uint64_t)i * x->nb[0] + (uint64_t)(i2 % x->ne[1]) * x->nb[1] +
			   (uint64_t)(i3 % x->ne[2]) * x->nb[2];
	int32_t narrow;
	int64_t wide;

	if (x->type == KG_I32) {
		memcpy(&narrow, p, sizeof(narrow));
		return narrow;
	}
	memcpy(&wide, p, sizeof(wide));
	return wide;
}

int kg_set_rows(const struct kg_view *out, const struct kg_view *in, const struct kg_view *index)
{
	struct kg_tensor *t = out->kv;
	uint64_t rows[ROWS_AT_ONCE], row;
	struct kg_cache *c;
	uint32_t n = 0, plane = 0;
	struct kvt_rows src = { .stride = in->nb[1], .type = in->type };
	int ret = check(t);

	if (!ret && ((uint64_t)out->ne[0] != t->elements || out->nb[1] != t->row_bytes))
		return kvt_fail(-EOPNOTSUPP, "%s: elements of rows of %" PRIu64 " are set apart, as without flash attention: start with -fa on, or, where this model has none, without -dev KVTIER0",
				t->name, t->elements);
	if (ret || !(c = kg_open(t)))
		return ret ? ret : -EIO;
	for (int64_t i3 = 0; i3 < in->ne[3]; i3++)
		for (int64_t i2 = 0; i2 < in->ne[2]; i2++)
			for (int64_t i1 = 0; i1 < in->ne[1]; i1++) {
				int64_t to = index_at(index, i1, i2, i3);

				if (to < 0 || to >= out->ne[1])
					return kvt_fail(-ERANGE, "%s: row %" PRId64 " of %" PRId64, t->name, to, out->ne[1]);
				row = kg_at(out, to, i2, i3) / t->row_bytes;
				if (n && (n == ROWS_AT_ONCE || !i1 || plane != row / t->rows)) {
					ret = kvt_plane_write(c->cache, t->first_plane + plane, rows, n, &src);
					if (ret)
						return ret;
					n = 0;
				}
				if (!n) {
					src.data = in->data + kg_at(in, i1, i2, i3) - in->at;
					plane = (uint32_t)(row / t->rows);
				}
				rows[n++] = row % t->rows;
			}
	return n ? kvt_plane_write(c->cache, t->first_plane + plane, rows, n, &src) : 0;
}

/* ---- GET_ROWS ---- */

int kg_get_rows(const struct kg_view *out, const struct kg_view *in, const struct kg_view *index)
{
	struct cursor c;
	int ret = check(in->kv);

	if (!ret)
		ret = cursor_open(&c, in);
	if (ret)
		return ret;
	for (int64_t i3 = 0; i3 < index->ne[2] && !ret; i3++)
		for (int64_t i2 = 0; i2 < index->ne[1] && !ret; i2++)
			for (int64_t i1 = 0; i1 < index->ne[0] && !ret; i1++) {
				int64_t from = index_at(index, i1, i2, i3);
				float *x;

				if (from < 0 || from >= in->ne[1])
					ret = kvt_fail(-ERANGE, "%s: row %" PRId64 " of %" PRId64, in->kv->name, from,
						       in->ne[1]);
				if (!ret)
					ret = cursor_at(&c, from, i2, i3, false, &x);
				if (!ret)
					memcpy(out->data + kg_at(out, i1, i2, i3) - out->at, x,
					       (uint64_t)in->ne[0] * sizeof(float));
			}
	return cursor_close(&c, ret);
}

/* ---- CPY ---- */

static bool contiguous(const struct kg_view *v)
{
	uint64_t bytes = kvt_codec_bytes(v->type, (uint64_t)v->ne[0]);

	for (int i = 1; i < 4; bytes *= (uint64_t)v->ne[i++])
		if (v->ne[i] != 1 && v->nb[i] != bytes)
			return false;
	return true;
}

static int copy_bytes(const struct kg_view *out, uint64_t to, const struct kg_view *in, uint64_t from, uint64_t n)
{
	if (in->kv && out->kv)
		return kg_tensor_copy(out->kv, in->kv, to, from, n);
	return in->kv ? kg_tensor_read(in->kv, from, out->data + to - out->at, n) :
			kg_tensor_write(out->kv, to, in->data + from - in->at, n);
}

/* As stored: encoding twice is not encoding once. */
static int copy_same(const struct kg_view *out, const struct kg_view *in)
{
	uint64_t row = kvt_codec_bytes(in->type, (uint64_t)in->ne[0]);
	int ret = 0;

	if (contiguous(in) && contiguous(out))
		return copy_bytes(out, out->at, in, in->at, row * (uint64_t)(in->ne[1] * in->ne[2] * in->ne[3]));
	for (int64_t i3 = 0; i3 < in->ne[3] && !ret; i3++)
		for (int64_t i2 = 0; i2 < in->ne[2] && !ret; i2++)
			for (int64_t i1 = 0; i1 < in->ne[1] && !ret; i1++)
				ret = copy_bytes(out, kg_at(out, i1, i2, i3), in, kg_at(in, i1, i2, i3), row);
	return ret;
}

int kg_copy(const struct kg_view *out, const struct kg_view *in)
{
	struct cursor from, to;
	int ret = out->kv ? check(out->kv) : 0;

	if (!out->kv && !in->kv)
		return kvt_fail(-EOPNOTSUPP, "neither is a KV tensor");
	if (!ret && in->kv)
		ret = check(in->kv);
	if (ret)
		return ret;
	if (in->type == out->type)
		return copy_same(out, in);
	ret = cursor_open(&from, in);
	if (ret)
		return ret;
	ret = cursor_open(&to, out);
	if (ret)
		return cursor_close(&from, ret);
	for (int64_t i3 = 0; i3 < in->ne[3] && !ret; i3++)
		for (int64_t i2 = 0; i2 < in->ne[2] && !ret; i2++)
			for (int64_t i1 = 0; i1 < in->ne[1] && !ret; i1++) {
				float *x, *y;

				ret = cursor_at(&from, i1, i2, i3, false, &x);
				if (!ret)
					ret = cursor_at(&to, i1, i2, i3, true, &y);
				if (!ret)
					memcpy(y, x, (uint64_t)in->ne[0] * sizeof(float));
			}
	ret = cursor_close(&to, ret);
	return cursor_close(&from, ret);
}

/* ---- ROPE ---- */

/* Where the interpolation of long contexts begins and ends, in dimensions (YaRN, arXiv 2309.00071). */
static float turning(const struct kg_rope *r, float turns)
{
	return (float)r->dims * logf((float)r->ctx_orig / (turns * 2 * (float)M_PI)) / (2 * logf(r->base));
}

/* cos and sin for each pair, by the arithmetic of llama.cpp's CPU backend, so that shifted keys have its bits. */
static void angles(const struct kg_rope *r, float position, const float *factors, float *cos_sin)
{
	float low = fmaxf(0, floorf(turning(r, r->beta_fast)));
	float high = fminf((float)(r->dims - 1), ceilf(turning(r, r->beta_slow)));
	float step = powf(r->base, -2.0f / (float)r->dims), theta = position;

	for (int32_t i = 0; i < r->dims / 2; i++, theta *= step) {
		float extrapolated = factors ? theta / factors[i] : theta, scale = r->attn_factor;
		float angle = r->freq_scale * extrapolated;

		if (r->ext_factor != 0) {
			float y = ((float)i - low) / fmaxf(0.001f, high - low);
			float mix = (1 - fminf(1, fmaxf(0, y))) * r->ext_factor;

			angle = angle * (1 - mix) + extrapolated * mix;
			scale *= 1 + 0.1f * logf(1 / r->freq_scale);
		}
		cos_sin[2 * i] = cosf(angle) * scale;
		cos_sin[2 * i + 1] = sinf(angle) * scale;
	}
}

static void rotate(const struct kg_rope *r, const float *cos_sin, float *x)
{
	/* neox: pairs lie half of the dimensions apart */
	const int32_t pairs = r->dims / 2, apart = r->mode ? pairs : 1, step = r->mode ? 1 : 2;

	x += r->offset;
	for (int32_t i = 0; i < pairs; i++, x += step) {
		float a = x[0], b = x[apart];

		x[0] = a * cos_sin[2 * i] - b * cos_sin[2 * i + 1];
		x[apart] = a * cos_sin[2 * i + 1] + b * cos_sin[2 * i];
	}
}

int kg_rope(const struct kg_rope *r)
{
	const struct kg_view *in = &r->in, *out = &r->out;
	bool in_place = in->kv == out->kv && in->at == out->at;
	float *cos_sin, *x, *y;
	struct cursor from, to;
	bool turns;
	int ret = in->kv ? check(in->kv) : 0;

	if (!ret)
		ret = cursor_open(&from, in);
	if (ret)
		return ret;
	ret = cursor_open(&to, out);
	if (ret)
		return cursor_close(&from, ret);
	cos_sin = malloc(((uint64_t)r->dims + 2) * sizeof(float));
	if (!cos_sin)
		ret = kvt_fail(-ENOMEM, "no memory");
	for (int64_t i3 = 0; i3 < in->ne[3] && !ret; i3++)
		for (int64_t i2 = 0; i2 < in->ne[2] && !ret; i2++) {
			int32_t position;

			memcpy(&position, r->positions.data + (uint64_t)i2 * sizeof(position), sizeof(position));
			angles(r, (float)position, r->has_factors ? (const float *)r->factors.data : NULL, cos_sin);
			turns = !in_place;
			for (int32_t i = 0; i < r->dims / 2; i++)
				turns |= cos_sin[2 * i] != 1 || cos_sin[2 * i + 1] != 0;
			for (int64_t i1 = 0; i1 < in->ne[1] && turns && !ret; i1++) {
				if (in_place) { /* rows that do not turn are not touched */
					ret = cursor_at(&from, i1, i2, i3, true, &x);
					y = x;
				} else {
					ret = cursor_at(&from, i1, i2, i3, false, &x);
					if (!ret)
						ret = cursor_at(&to, i1, i2, i3, true, &y);
					if (!ret)
						memcpy(y, x, (uint64_t)in->ne[0] * sizeof(float));
				}
				if (!ret)
					rotate(r, cos_sin, y);
			}
		}
	free(cos_sin);
	ret = cursor_close(&to, ret);
	return cursor_close(&from, ret);
}
