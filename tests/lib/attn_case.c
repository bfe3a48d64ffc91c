// SPDX-License-Identifier: MIT
/* Random attention problems; attn_case.h. */
#include "lib/attn_case.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/half.h"

uint64_t attn_random(uint64_t *state)
{
	uint64_t z = *state += 0x9e3779b97f4a7c15;

	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
	z = (z ^ z >> 27) * 0x94d049bb133111eb;
	return z ^ z >> 31;
}

static uint32_t below(uint64_t *state, uint32_t n)
{
	return (uint32_t)(attn_random(state) >> 33) % n;
}

/* Near enough: the sum of four uniform numbers, scaled to variance 1. Exact in binary, the same everywhere. */
float attn_normal(uint64_t *state)
{
	int64_t sum = 0;

	for (int i = 0; i < 4; i++)
		sum += (int32_t)(attn_random(state) >> 32) >> 8;
	return (float)sum * 0x1.bb67aep-24f; /* the sum's variance is 4 * 2^46 / 3 */
}

static uint32_t element(uint32_t codec)
{
	return codec == KVT_F32 ? 4 : 2;
}

void attn_encode(uint8_t *array, uint32_t codec, size_t index, float f)
{
	uint16_t h = codec == KVT_F16 ? kvt_f16_narrow(kvt_bits_of(f)) : kvt_bf16_narrow(kvt_bits_of(f));

	if (codec == KVT_F32)
		memcpy(array + index * 4, &f, 4);
	else
		memcpy(array + index * 2, &h, 2);
}

float attn_decode(const uint8_t *array, uint32_t codec, size_t index)
{
	uint16_t h;
	float f;

	if (codec == KVT_F32) {
		memcpy(&f, array + index * 4, 4);
		return f;
	}
	memcpy(&h, array + index * 2, 2);
	return kvt_float_of(codec == KVT_F16 ? kvt_f16_widen(h) : kvt_bf16_widen(h));
}

static float special(uint64_t *state)
{
	static const uint32_t bits[] = { 0x7f800000, 0xff800000, 0x7fc00000, 0xffc12345, 0x7f812345,
					 0x80000000, 0x00000000, 0x00000001, 0x807fffff, 0x33800000 };

	return kvt_float_of(bits[below(state, sizeof(bits) / sizeof(*bits))]);
}

static void *take(uint8_t **at, size_t bytes)
{
	uint8_t *p = *at;

	*at += (bytes + 63) / 64 * 64;
	return p;
}

/* Which positions row @i may see: every shape that a planner makes. */
static void choose_range(struct attn_case *c, uint32_t i, uint32_t kind, uint64_t *r)
{
	uint64_t n = c->n, a = below(r, c->n + 1), b = below(r, c->n + 1);

	c->pos[i] = n - 1 - (i % n);
	switch (kind) {
	case 0: /* causal: rows of one token see the same */
		c->lo[i] = 0;
		c->hi[i] = n - (i / 4) % n;
		c->pos[i] = c->hi[i] - 1;
		break;
	case 1: /* causal within a window */
		c->hi[i] = n - (i / 2) % n;
		c->lo[i] = c->hi[i] > 70 ? c->hi[i] - 70 : 0;
		c->pos[i] = c->hi[i] - 1;
		break;
	case 2: /* one position */
		c->lo[i] = a < n ? a : 0;
		c->hi[i] = c->lo[i] + 1;
		break;
	case 3: /* nothing, or anything */
		c->lo[i] = a;
		c->hi[i] = b;
		break;
	default:
		c->lo[i] = 0;
		c->hi[i] = n;
	}
}

void attn_case_make_sized(struct attn_case *c, uint64_t seed, unsigned what, uint32_t k_dim, uint32_t v_dim,
			  uint32_t m, uint32_t n, uint32_t k_codec, uint32_t v_codec)
{
	uint64_t r = seed * 0x2545f4914f6cdd1d + what;
	uint32_t heads = 1 + below(&r, 3), head = below(&r, heads), kind = below(&r, 6);
	float k_scale = what & ATTN_SPREAD && below(&r, 2) ? 100 : 1, q_scale = k_scale;
	size_t bytes;
	uint8_t *at;

	memset(c, 0, sizeof(*c));
	c->shape.k_dim = k_dim;
	c->shape.v_dim = v_dim;
	c->shape.k_codec = k_codec;
	c->shape.v_codec = v_codec;
	c->shape.scale = 1 / sqrtf((float)k_dim);
	c->shape.mask_type = below(&r, 2) ? KVT_F16 : KVT_F32;
	c->m = m;
	c->n = n;
	c->k_row = (size_t)heads * k_dim * element(k_codec);
	c->v_row = (size_t)heads * v_dim * element(v_codec);
	c->k_offset = head * k_dim * element(k_codec);
	c->v_offset = head * v_dim * element(v_codec);
	bytes = n * (c->k_row + c->v_row) + (size_t)m * k_dim * 4 + (size_t)m * n * 4 + (size_t)m * 40 + 64 * 16;
	c->memory = at = calloc(1, bytes);
	c->k = take(&at, n * c->k_row);
	c->v = take(&at, n * c->v_row);
	c->q = take(&at, (size_t)m * k_dim * 4);
	c->lo = take(&at, m * 8);
	c->hi = take(&at, m * 8);
	c->pos = take(&at, m * 8);
	for (size_t i = 0; i < (size_t)n * heads * k_dim; i++)
		attn_encode(c->k, k_codec, i, attn_normal(&r) * k_scale);
	for (size_t i = 0; i < (size_t)n * heads * v_dim; i++)
		attn_encode(c->v, v_codec, i, attn_normal(&r));
	for (size_t i = 0; i < (size_t)m * k_dim; i++)
		c->q[i] = attn_normal(&r) * q_scale;
	for (uint32_t i = 0; i < m; i++)
		choose_range(c, i, kind == 5 ? below(&r, 5) : kind, &r);
	if (what & ATTN_BIAS) {
		uint32_t have = below(&r, 32), holes = below(&r, 3);

		if (have & 1) {
			c->mask = take(&at, (size_t)m * n * 4);
			for (size_t i = 0; i < (size_t)m * n; i++)
				attn_encode(c->mask, c->shape.mask_type, i,
					    holes && below(&r, holes == 1 ? 20 : 2) == 0 ? -INFINITY : attn_normal(&r));
		}
		if (have & 2) {
			c->slope = take(&at, m * 4);
			for (uint32_t i = 0; i < m; i++)
				c->slope[i] = ldexpf(1, -(int)below(&r, 9));
		}
		if (have & 4)
			c->shape.softcap = below(&r, 2) ? 30 : 0.5f;
		if (have & 8) {
			c->sinks = take(&at, m * 4);
			for (uint32_t i = 0; i < m; i++)
				c->sinks[i] = below(&r, 4) ? attn_normal(&r) * 3 : -INFINITY;
		}
	}
	for (uint32_t i = what & ATTN_SPECIAL ? below(&r, 6) : 0; i; i--) {
		/* one draw a statement: the order of arguments is the compiler's */
		uint32_t where = below(&r, 5), at_random = below(&r, 1u << 30);
		float f = special(&r);

		if (where == 0)
			attn_encode(c->k, k_codec, at_random % (n * heads * k_dim), f);
		else if (where == 1)
			attn_encode(c->v, v_codec, at_random % (n * heads * v_dim), f);
		else if (where == 2)
			c->q[at_random % (m * k_dim)] = f;
		else if (where == 3 && c->mask)
			attn_encode(c->mask, c->shape.mask_type, at_random % (m * n), f);
		else if (where == 4 && c->sinks)
			c->sinks[at_random % m] = f;
	}
}

void attn_case_make(struct attn_case *c, uint64_t seed, unsigned what)
{
	static const uint32_t dims[] = { 8, 16, 24, 64, 72, 80, 96, 100, 112, 128, 192, 256, 512, 576, 9, 31, 33, 127 };
	uint64_t r = seed ^ 0x5851f42d4c957f2d;
	uint32_t k_dim = dims[below(&r, sizeof(dims) / sizeof(*dims))], v_dim = k_dim, m, n, codec;

	if (!below(&r, 3))
		v_dim = dims[below(&r, sizeof(dims) / sizeof(*dims))];
	m = 1 + below(&r, below(&r, 3) ? 8 : 60);
	n = below(&r, 4) ? 1 + below(&r, 300) : 1 + below(&r, 900);
	codec = below(&r, 9);
	attn_case_make_sized(c, seed, what, k_dim, v_dim, m, n, codec / 3, codec % 3);
}

void attn_case_free(struct attn_case *c)
{
	free(c->memory);
}

bool attn_case_sees(const struct attn_case *c, uint32_t row, uint64_t position)
{
	if (position < c->lo[row] || position >= c->hi[row])
		return false;
	return !c->mask || attn_decode(c->mask, c->shape.mask_type, (size_t)row * c->n + position) != -INFINITY;
}

void attn_case_fill_position(struct attn_case *c, uint64_t position, int byte)
{
	memset(c->k + position * c->k_row, byte, c->k_row);
	memset(c->v + position * c->v_row, byte, c->v_row);
}

#define REDZONE 64
#define RED 0xa5

/* @bytes between redzones, @shift from a multiple of 64. */
static void *zone_new(size_t bytes, size_t shift)
{
	uint8_t *p = aligned_alloc(64, (bytes + shift + 2 * REDZONE + 63) / 64 * 64);

	memset(p, RED, bytes + shift + 2 * REDZONE);
	return p + REDZONE + shift;
}

static bool zone_free(void *zone, size_t bytes, size_t shift)
{
	uint8_t *p = (uint8_t *)zone - REDZONE - shift;
	bool good = true;

	for (size_t i = 0; i < REDZONE + shift; i++)
		good &= p[i] == RED;
	for (size_t i = 0; i < REDZONE; i++)
		good &= p[REDZONE + shift + bytes + i] == RED;
	free(p);
	return good;
}

bool attn_case_run(const struct kvt_attn_kernels *kernels, const struct attn_case *c, uint32_t row, uint32_t m,
		   unsigned shift, float *out)
{
	const uint32_t v_dim = c->shape.v_dim, ke = element(c->shape.k_codec), ve = element(c->shape.v_codec);
	const size_t acc = (size_t)m * v_dim * 4, k = c->n * c->k_row, v = c->n * c->v_row;
	const size_t scratch = kernels->scratch_bytes(&c->shape, m), me = element(c->shape.mask_type);
	struct kvt_attn_state total = { zone_new(m * 4, shift * 4), zone_new(m * 4, shift * 4), zone_new(acc, shift * 4) };
	struct kvt_attn_state part = { zone_new(m * 4, shift * 4), zone_new(m * 4, shift * 4), zone_new(acc, shift * 4) };
	uint8_t *kb = zone_new(k, shift * ke), *vb = zone_new(v, shift * ve), *work = zone_new(scratch, 0);
	float *result = zone_new(acc, shift * 4), *q = zone_new((size_t)m * c->shape.k_dim * 4, shift * 4);
	const float **qs = calloc(m, sizeof(*qs));
	float **outs = calloc(m, sizeof(*outs));
	const void **masks = calloc(m, sizeof(*masks));
	struct kvt_query_rows rows = { .m = m, .q = qs, .lo = c->lo + row, .hi = c->hi + row, .pos = c->pos + row,
				       .mask = c->mask ? masks : NULL, .slope = c->slope ? c->slope + row : NULL };
	bool good = true;

	memcpy(kb, c->k, k);
	memcpy(vb, c->v, v);
	memcpy(q, c->q + (size_t)row * c->shape.k_dim, (size_t)m * c->shape.k_dim * 4);
	for (uint32_t i = 0; i < m; i++) {
		qs[i] = q + (size_t)i * c->shape.k_dim;
		outs[i] = result + (size_t)i * v_dim;
		masks[i] = c->mask ? c->mask + (size_t)(row + i) * c->n * me : NULL;
	}
	kvt_attn_state_clear(&total, m, v_dim);
	for (uint64_t first = 0; first < c->n; first += KVT_SPLIT) {
		const uint8_t *kr[KVT_SPLIT + KVT_TILE], *vr[KVT_SPLIT];
		struct kvt_split_rows split = { .first = first, .heads = 1, .k = kr, .v = vr, .k_offset = c->k_offset,
						.v_offset = c->v_offset };

		for (split.n = 0; split.n < KVT_SPLIT && first + split.n < c->n; split.n++) {
			kr[split.n] = kb + (first + split.n) * c->k_row;
			vr[split.n] = vb + (first + split.n) * c->v_row;
		}
		for (uint64_t j = first + split.n; split.more < KVT_TILE && j < c->n; j++, split.more++)
			kr[split.n + split.more] = kb + j * c->k_row;
		kernels->split(&c->shape, &split, &rows, &part, work);
		kernels->merge(&total, &part, m, v_dim);
	}
	kernels->finish(&total, m, v_dim, c->sinks ? c->sinks + row : NULL, outs);
	memcpy(out, result, acc);
	good &= zone_free(total.max, m * 4, shift * 4);
	good &= zone_free(total.sum, m * 4, shift * 4);
	good &= zone_free(part.max, m * 4, shift * 4);
	good &= zone_free(part.sum, m * 4, shift * 4);
	good &= zone_free(total.acc, acc, shift * 4);
	good &= zone_free(part.acc, acc, shift * 4);
	good &= zone_free(kb, k, shift * ke);
	good &= zone_free(vb, v, shift * ve);
	good &= zone_free(work, scratch, 0);
	good &= zone_free(result, acc, shift * 4);
	good &= zone_free(q, (size_t)m * c->shape.k_dim * 4, shift * 4);
	free(qs);
	free(outs);
	free(masks);
	return good;
}

void attn_case_reference(const struct attn_case *c, uint32_t row, struct attn_reference *ref)
{
	const uint32_t kd = c->shape.k_dim, vd = c->shape.v_dim;
	double *s = malloc(c->n * sizeof(*s)), max = -INFINITY, sum = 0;

	memset(ref, 0, sizeof(*ref));
	for (uint64_t j = 0; j < c->n; j++) {
		double dot = 0, terms = 0, bias = 0;

		s[j] = -INFINITY;
		if (!attn_case_sees(c, row, j))
			continue;
		for (uint32_t d = 0; d < kd; d++) {
			double x = (double)c->q[(size_t)row * kd + d] *
				   attn_decode(c->k + j * c->k_row + c->k_offset, c->shape.k_codec, d);

			dot += x;
			terms += fabs(x);
		}
		dot *= c->shape.scale;
		terms *= c->shape.scale;
		if (c->shape.softcap != 0)
			dot = c->shape.softcap * tanh(dot / c->shape.softcap);
		if (c->mask)
			bias = attn_decode(c->mask, c->shape.mask_type, (size_t)row * c->n + j);
		else if (c->slope)
			bias = (double)j - (double)c->pos[row];
		if (c->slope)
			bias *= c->slope[row];
		s[j] = dot + bias;
		if (!(s[j] < INFINITY))
			ref->nan = true;
		if (s[j] > max)
			max = s[j];
		if (s[j] > -INFINITY && terms + fabs(bias) > ref->terms)
			ref->terms = terms + fabs(bias);
	}
	ref->nothing = max == -INFINITY && !ref->nan;
	if (!ref->nothing && c->sinks && c->sinks[row] != -INFINITY) {
		if (!(c->sinks[row] < INFINITY))
			ref->nan = true;
		if (c->sinks[row] > max)
			max = c->sinks[row];
		sum = exp(c->sinks[row] - max);
	}
	for (uint64_t j = 0; j < c->n && !ref->nan; j++) {
		double p = s[j] == -INFINITY ? 0 : exp(s[j] - max);

		sum += p;
		for (uint32_t d = 0; d < vd && s[j] != -INFINITY; d++) {
			double v = attn_decode(c->v + j * c->v_row + c->v_offset, c->shape.v_codec, d);

			ref->out[d] += p * v;
			ref->weight[d] += p * fabs(v);
		}
	}
	for (uint32_t d = 0; d < vd && !ref->nothing; d++) {
		ref->out[d] /= sum;
		ref->weight[d] /= sum;
	}
	free(s);
}
