// SPDX-License-Identifier: MIT
/*
 * Attention kernels in plain C: the same function through the same splits and
 * tiles, with the same roundings of queries and weights. The GPU's tensor cores
 * add products in another order and its exponential is another, so that bits
 * differ from the GPU's; among the twins they are exact, as the kernels' are.
 */
#include <errno.h>
#include <math.h>
#include <string.h>

#include "base/err.h"
#include "base/half.h"
#include "gpu/attend.h"
#include "kvtier.h"

#define AT(address) ((void *)(uintptr_t)(address))
#define SPLIT KVT_ATTEND_SPLIT
#define TILE KVT_ATTEND_TILE
#define DECODE_ROWS 16
#define LOG2E 1.44269504f
#define GROWTH 8.0f /* kernels/attend.cuh */
#define MOST 16384.0f /* kernels/attend_fast.cu */

static float load(const void *array, uint32_t type, uint64_t i)
{
	if (type == KVT_F32)
		return ((const float *)array)[i];
	return kvt_float_of(type == KVT_F16 ? kvt_f16_widen(((const uint16_t *)array)[i]) :
					      kvt_bf16_widen(((const uint16_t *)array)[i]));
}

static void store(void *array, uint32_t type, uint64_t i, float f)
{
	if (f != f)
		f = kvt_float_of(0x7fc00000);
	if (type == KVT_F32)
		((float *)array)[i] = f;
	else
		((uint16_t *)array)[i] = type == KVT_F16 ? kvt_f16_narrow(kvt_bits_of(f)) : kvt_bf16_narrow(kvt_bits_of(f));
}

static float round_to(uint32_t codec, float f)
{
	return codec == KVT_F16 ? kvt_float_of(kvt_f16_widen(kvt_f16_narrow(kvt_bits_of(f)))) :
				  kvt_float_of(kvt_bf16_widen(kvt_bf16_narrow(kvt_bits_of(f))));
}

/* A query row: where it is, and what it sees. */
struct row {
	uint32_t seq, token, head; /* token of the whole batch */
	uint32_t pos, lo, hi;
};

static void set_row(const struct kvt_attend_args *a, uint32_t seq, uint32_t token, uint32_t head, struct row *r)
{
	const uint32_t *tokens = AT(a->tokens), *firsts = AT(a->first);
	uint32_t rows = ((const uint32_t *)AT(a->rows))[seq], n = tokens[seq + 1] - tokens[seq];
	uint32_t pos = (firsts ? firsts[seq] : rows - n) + token;

	*r = (struct row){ .seq = seq, .token = tokens[seq] + token, .head = head, .pos = pos, .hi = rows };
	if (a->causal && pos + 1 < rows)
		r->hi = pos + 1;
	if (a->window && pos + 1 > a->window)
		r->lo = pos + 1 - a->window;
	if (r->lo > r->hi)
		r->lo = r->hi;
}

/* Splits [*s0, *s1) that a sequence's rows see; one, if they see nothing. */
static void span(const struct kvt_attend_args *a, uint32_t seq, uint32_t *s0, uint32_t *s1)
{
	const uint32_t *tokens = AT(a->tokens);
	uint32_t n = tokens[seq + 1] - tokens[seq];
	struct row low, high;

	*s0 = *s1 = 0;
	if (!n)
		return;
	set_row(a, seq, 0, 0, &low);
	set_row(a, seq, n - 1, 0, &high);
	*s0 = low.lo / SPLIT;
	*s1 = (high.hi + SPLIT - 1) / SPLIT;
	if (*s1 <= *s0)
		*s1 = *s0 + 1;
}

static const void *kv_row(uint64_t blocks, uint32_t stride, uint32_t seq, uint32_t pos, uint32_t block_rows,
			  uint32_t row_bytes, uint32_t offset)
{
	uint64_t block = ((const uint64_t *)AT(blocks))[(uint64_t)seq * stride + pos / block_rows];

	return block ? AT(block + (uint64_t)(pos % block_rows) * row_bytes + offset) : NULL;
}

static bool general(const struct kvt_attend_args *a)
{
	return a->softcap != 0 || a->slopes || a->mask || a->scale < 0;
}

/* The exponent's unit: scores are kept as they come out of the product where nothing is added to them. */
static float unit(const struct kvt_attend_args *a)
{
	return general(a) ? LOG2E : a->scale * LOG2E;
}

static float score(const struct kvt_attend_args *a, const struct row *r, const float *q, uint32_t j)
{
	uint32_t kv_head = r->head / (a->heads / a->kv_heads);
	const void *k = kv_row(a->k_blocks, a->table_stride, r->seq, j, a->k_block_rows, a->k_row_bytes,
			       kv_head * a->k_dim * 2);
	float s = 0, bias;

	for (uint32_t d = 0; k && d < a->k_dim; d++)
		s = fmaf(q[d], load(k, a->codec, d), s);
	if (!general(a))
		return s;
	s *= a->scale;
	if (a->softcap != 0)
		s = a->softcap * tanhf(s / a->softcap);
	if (a->mask) {
		bias = load(AT(a->mask), a->mask_type, r->token * a->mask_stride + j);
		if (bias == -INFINITY)
			return bias;
		return s + (a->slopes ? ((const float *)AT(a->slopes))[r->head] * bias : bias);
	}
	if (a->slopes)
		s = fmaf(((const float *)AT(a->slopes))[r->head], (float)((int32_t)j - (int32_t)r->pos), s);
	return s;
}

struct state {
	float max, sum, acc[KVT_ATTEND_V_MAX];
};

static void get_query(const struct kvt_attend_args *a, const struct row *r, float *q)
{
	const uint8_t *token = AT(a->q + r->token * a->q_stride);

	for (uint32_t d = 0; d < a->k_dim; d++)
		q[d] = round_to(a->codec, load(token, a->q_type, (uint64_t)r->head * a->k_dim + d));
}

/*
 * Whether family fast takes another reference for a tile's scores, at positions [from, to): if by the one so far one of
 * four lanes has too much to add up. Lane i has positions 2i and 2i + 1 of each eight.
 */
static bool must_refer(const float *s, uint32_t from, uint32_t to, float c, float max)
{
	float part[4] = { 0 };

	for (uint32_t j = from; j < to; j++)
		part[j % 8 / 2] += max == -INFINITY ? INFINITY : exp2f(fmaf(s[j - from], c, -(max * c)));
	return !(part[0] <= MOST && part[1] <= MOST && part[2] <= MOST && part[3] <= MOST);
}

/* Positions [lo, hi) by tiles cut at multiples of @tile: those of family fast, or exact. */
static void do_tiles(const struct kvt_attend_args *a, const struct row *r, uint32_t lo, uint32_t hi, uint32_t tile,
		     struct state *st)
{
	float q[KVT_ATTEND_K_MAX], s[KVT_ATTEND_FAST_TILE], c = unit(a);
	uint32_t kv_head = r->head / (a->heads / a->kv_heads);

	*st = (struct state){ .max = -INFINITY };
	get_query(a, r, q);
	for (uint32_t from = lo, to; from < hi; from = to) {
		float max = -INFINITY, base, alpha = 1, sum = 0;

		to = (from / tile + 1) * tile < hi ? (from / tile + 1) * tile : hi;
		for (uint32_t j = from; j < to; j++) {
			s[j - from] = score(a, r, q, j);
			max = fmaxf(max, s[j - from]);
		}
		if (tile == KVT_ATTEND_FAST_TILE ? must_refer(s, from, to, c, st->max) && max > st->max :
						   (max - st->max) * c > GROWTH) {
			alpha = exp2f((st->max - max) * c);
			st->max = max;
		}
		base = st->max == -INFINITY ? 0 : st->max;
		for (uint32_t d = 0; d < a->v_dim; d++)
			st->acc[d] *= alpha;
		for (uint32_t j = from; j < to; j++) {
			const void *v = kv_row(a->v_blocks, a->table_stride, r->seq, j, a->v_block_rows, a->v_row_bytes,
					       kv_head * a->v_dim * 2);
			float p = exp2f(fmaf(s[j - from], c, -(base * c)));

			if (s[j - from] == -INFINITY)
				continue;
			sum += p;
			p = round_to(a->codec, p);
			for (uint32_t d = 0; v && d < a->v_dim; d++)
				st->acc[d] = fmaf(p, load(v, a->codec, d), st->acc[d]);
		}
		st->sum = fmaf(st->sum, alpha, sum);
	}
}

static void do_split(const struct kvt_attend_args *a, const struct row *r, uint32_t split, struct state *st)
{
	uint32_t lo = split * SPLIT > r->lo ? split * SPLIT : r->lo;
	uint32_t hi = (split + 1) * SPLIT < r->hi ? (split + 1) * SPLIT : r->hi;

	do_tiles(a, r, lo, hi, TILE, st);
}

static void merge(const struct kvt_attend_args *a, struct state *into, const struct state *part)
{
	float c = unit(a), max = fmaxf(into->max, part->max), base = max == -INFINITY ? 0 : max;
	float x = exp2f((into->max - base) * c), y = exp2f((part->max - base) * c);

	into->max = max;
	into->sum = fmaf(into->sum, x, part->sum * y);
	for (uint32_t d = 0; d < a->v_dim; d++)
		into->acc[d] = fmaf(into->acc[d], x, y == 0 ? 0 : part->acc[d] * y);
}

static void finish(const struct kvt_attend_args *a, const struct row *r, const struct state *st)
{
	float top = st->max * unit(a), weight = 1, sum = st->sum, sink, max;
	void *out = AT(a->out + r->token * a->out_stride);

	if (a->sinks && sum != 0) {
		sink = ((const float *)AT(a->sinks))[r->head] * LOG2E;
		max = fmaxf(top, sink);
		weight = exp2f(top - max);
		sum = fmaf(sum, weight, exp2f(sink - max));
	}
	weight = st->sum == 0 ? 0 : weight / sum;
	for (uint32_t d = 0; d < a->v_dim; d++)
		store(out, a->out_type, (uint64_t)r->head * a->v_dim + d, st->acc[d] * weight + 0.0f);
}

static float *part_at(const struct kvt_attend_args *a, uint64_t unit_index)
{
	return (float *)((uint8_t *)AT(a->parts) + 4 * KVT_ATTEND_COUNTERS + unit_index * kvt_attend_part_bytes(a));
}

/* Units of a sequence: splits x blocks of DECODE_ROWS rows x KV heads. */
static uint32_t row_blocks(const struct kvt_attend_args *a, uint32_t seq)
{
	const uint32_t *tokens = AT(a->tokens);

	return ((tokens[seq + 1] - tokens[seq]) * (a->heads / a->kv_heads) + DECODE_ROWS - 1) / DECODE_ROWS;
}

/* For each row of each unit. */
static void each_part(const struct kvt_attend_args *a, void (*fn)(const struct kvt_attend_args *, const struct row *,
								  uint32_t split, float *part, uint32_t i, void *arg),
		      uint32_t seq, uint32_t token, uint32_t head, uint64_t base, void *arg)
{
	uint32_t group = a->heads / a->kv_heads, s0, s1, row = token * group + head % group;
	struct row r;

	span(a, seq, &s0, &s1);
	set_row(a, seq, token, head, &r);
	for (uint32_t s = s0; s < s1; s++) {
		uint64_t block = (uint64_t)(s - s0) * row_blocks(a, seq) + row / DECODE_ROWS;

		fn(a, &r, s, part_at(a, base + block * a->kv_heads + head / group), row % DECODE_ROWS, arg);
	}
}

static void write_part(const struct kvt_attend_args *a, const struct row *r, uint32_t split, float *part, uint32_t i,
		       void *arg)
{
	struct state st;

	(void)arg;
	do_split(a, r, split, &st);
	part[i] = st.max;
	part[a->part_rows + i] = st.sum;
	memcpy(part + 2 * a->part_rows + (uint64_t)i * a->v_dim, st.acc, a->v_dim * sizeof(float));
}

static void take_part(const struct kvt_attend_args *a, const struct row *r, uint32_t split, float *part, uint32_t i,
		      void *arg)
{
	struct state st = { .max = part[i], .sum = part[a->part_rows + i] };

	(void)r, (void)split;
	memcpy(st.acc, part + 2 * a->part_rows + (uint64_t)i * a->v_dim, a->v_dim * sizeof(float));
	merge(a, arg, &st);
}

enum work { PARTS, JOIN, WHOLE, FAST };

static int each_row(const struct kvt_attend_args *a, enum work work)
{
	const uint32_t *tokens = AT(a->tokens);
	uint64_t base = 0;
	uint32_t s0, s1;

	for (uint32_t seq = 0; seq < a->n_seqs; seq++) {
		span(a, seq, &s0, &s1);
		for (uint32_t t = 0; t < tokens[seq + 1] - tokens[seq]; t++)
			for (uint32_t h = 0; h < a->heads; h++) {
				struct state run = { .max = -INFINITY }, st;
				struct row r;

				set_row(a, seq, t, h, &r);
				if (work == PARTS)
					each_part(a, write_part, seq, t, h, base, NULL);
				else if (work == JOIN)
					each_part(a, take_part, seq, t, h, base, &run);
				for (uint32_t s = r.lo / SPLIT; work == WHOLE && s * SPLIT < r.hi; s++) {
					do_split(a, &r, s, &st);
					merge(a, &run, &st);
				}
				if (work == FAST)
					do_tiles(a, &r, r.lo, r.hi, KVT_ATTEND_FAST_TILE, &run);
				if (work != PARTS)
					finish(a, &r, &run);
			}
		base += (uint64_t)(s1 - s0) * row_blocks(a, seq) * a->kv_heads;
	}
	return 0;
}

int kvt_attend_twin_decode(struct kvt_dim3 grid, struct kvt_dim3 block, void *const *args)
{
	const struct kvt_attend_args *a = args[0];

	(void)grid, (void)block;
	each_row(a, PARTS);
	return a->fused ? each_row(a, JOIN) : 0;
}

int kvt_attend_twin_merge(struct kvt_dim3 grid, struct kvt_dim3 block, void *const *args)
{
	(void)grid, (void)block;
	return each_row(args[0], JOIN);
}

int kvt_attend_twin_prefill(struct kvt_dim3 grid, struct kvt_dim3 block, void *const *args)
{
	(void)grid, (void)block;
	return each_row(args[0], WHOLE);
}

int kvt_attend_twin_fast(struct kvt_dim3 grid, struct kvt_dim3 block, void *const *args)
{
	(void)grid, (void)block;
	return each_row(args[0], FAST);
}
