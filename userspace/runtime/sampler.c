// SPDX-License-Identifier: MIT
/*
 * One pass over the logits finds the largest (and sigma); from that follows a
 * threshold below which nothing can survive; the second pass reads only those
 * blocks whose maximum reaches it, and everything after works on what is left.
 *
 * Every filter keeps a prefix of the order (logit descending, id ascending), so
 * none needs a sort: a prefix is found by bucketing on the logit and narrowing
 * to the bucket in which it ends. Candidates stay in the order of their ids.
 */
#include "runtime/sampler.h"

#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "runtime/philox.h"

#define MAX_VOCAB (1u << 24)
#define BLOCK KVT_SAMPLER_BLOCK
#define LANES KVT_SAMPLER_LANES
#define BUCKETS 512u
#define FEW 32u /* sorted directly */
#define DOUBLE_MAX 0x1.fffffffffffffp1023
#define FLOAT_MAX 0x1.fffffep127
#define FLOAT_MIN 0x1p-126
#define LOGIT_ULP 0x1p-24 /* what a float's rounding may have taken from a logit */

struct kvt_sampler {
	const struct kvt_sampler_ops *ops;
	uint32_t vocab, n_blocks;
	uint64_t logits_read;
	/* between calls all zero; a token's bit is set where it has a bias or a count */
	uint64_t *touched; /* [n_blocks] */
	uint32_t *count;   /* [vocab] */
	double *bias;	   /* [vocab] */
	double *block_max; /* [n_blocks] */
	/* candidates, ascending by id */
	double *v;	/* [vocab + 1] logits after bias and penalties */
	double *w;	/* [vocab] e^((v - max) / t) */
	uint32_t *id;	/* [vocab + 1] */
	uint32_t *list; /* [vocab + 1] candidates under selection */
};

/* One row on its way. */
struct chain {
	struct kvt_sampler_params p;
	const float *logits;
	uint8_t order[KVT_STAGES];  /* the stages that are on */
	uint8_t adjust[2];	    /* bias and penalties, in order; those that are on */
	uint32_t n_adjust, n_first; /* ... and how many of them come before the first filter */
	double max, sigma;
	uint32_t n;	 /* candidates */
	double weight_t; /* the temperature that w was made with; 0: none */
};

static const char *const stage_names[KVT_STAGES] = {
	[KVT_STAGE_BIAS] = "bias",     [KVT_STAGE_PENALTIES] = "penalties", [KVT_STAGE_TOP_N_SIGMA] = "top_n_sigma",
	[KVT_STAGE_TOP_K] = "top_k",   [KVT_STAGE_TOP_P] = "top_p",	    [KVT_STAGE_MIN_P] = "min_p",
	[KVT_STAGE_TEMPERATURE] = "temperature",
};

static const uint8_t default_order[KVT_STAGES] = {
	KVT_STAGE_BIAS,	 KVT_STAGE_PENALTIES, KVT_STAGE_TOP_N_SIGMA, KVT_STAGE_TOP_K,
	KVT_STAGE_TOP_P, KVT_STAGE_MIN_P,     KVT_STAGE_TEMPERATURE, KVT_STAGE_END,
};

const char *kvt_sampler_stage_name(enum kvt_sampler_stage stage)
{
	return (unsigned int)stage < KVT_STAGES ? stage_names[stage] : NULL;
}

int kvt_sampler_create_isa(uint32_t vocab, enum kvt_isa isa, struct kvt_sampler **sampler)
{
	static const struct kvt_sampler_ops *const ops[KVT_ISAS] = KVT_ISA_TABLE(&kvt_sampler_ops);
	struct kvt_sampler *s;
	uint64_t n_blocks = ((uint64_t)vocab + BLOCK - 1) / BLOCK;
	char *at;

	*sampler = NULL;
	if (!vocab || vocab > MAX_VOCAB)
		return kvt_fail(-EINVAL, "a vocabulary of %u tokens: a sampler takes 1 to %u", vocab, MAX_VOCAB);
	if (!kvt_isa_usable(isa))
		return kvt_fail(-ENOTSUP, "this CPU or build lacks %s", kvt_isa_name(isa));
	s = calloc(1, sizeof(*s));
	at = calloc(1, n_blocks * 16 + (vocab + 1ull) * 36);
	if (!s || !at) {
		free(s);
		free(at);
		return kvt_fail(-ENOMEM, "no memory for a sampler of %u tokens", vocab);
	}
	s->ops = ops[isa];
	s->vocab = vocab;
	s->n_blocks = n_blocks;
	/* the 8-byte arrays first: no padding */
	s->touched = (uint64_t *)at;
	s->block_max = (double *)(s->touched + n_blocks);
	s->bias = s->block_max + n_blocks;
	s->v = s->bias + vocab + 1;
	s->w = s->v + vocab + 1;
	s->id = (uint32_t *)(s->w + vocab + 1);
	s->list = s->id + vocab + 1;
	s->count = s->list + vocab + 1;
	*sampler = s;
	return 0;
}

int kvt_sampler_create(uint32_t vocab, struct kvt_sampler **sampler)
{
	return kvt_sampler_create_isa(vocab, kvt_isa_best(), sampler);
}

void kvt_sampler_destroy(struct kvt_sampler *s)
{
	if (!s)
		return;
	free(s->touched);
	free(s);
}

uint64_t kvt_sampler_logits_read(const struct kvt_sampler *s)
{
	return s->logits_read;
}

double kvt_sampler_uniform(uint64_t seed, uint64_t sequence, uint64_t position)
{
	const uint32_t counter[4] = { position, position >> 32, sequence, sequence >> 32 };
	const uint32_t key[2] = { seed, seed >> 32 };
	uint32_t out[4];

	kvt_philox4x32_10(counter, key, out);
	return (((uint64_t)out[1] << 32 | out[0]) >> 11) * 0x1p-53;
}

double kvt_sampler_ln(const struct kvt_sampler_ops *ops, double x)
{
	double y, m = x, e;
	int k = 0;

	if (x >= 1)
		return 0;
	if (x < 0x1p-995)
		return -690;
	for (; m < 0.75; m *= 2)
		k++;
	y = (m - 1) - k * 0x1.62e42fefa39efp-1;
	/* Halley's iteration on e^y = x: the error's cube is the next error */
	for (int i = 0; i < 4; i++) {
		y = y < 0 ? y : 0;
		ops->exp_scaled(&e, &y, 1, 0, 1);
		y += 2 * (x - e) / (x + e);
	}
	return y;
}

/* ---- parameters ----------------------------------------------------------- */

/* Written so that NaN fails: a comparison with it is false. */
static int check_range(const char *name, double x, double min, double max)
{
	if (x >= min && x <= max)
		return 0;
	if (max == 1)
		return kvt_fail(-EINVAL, "%s is %g: %g to %g is allowed", name, x, min, max);
	return kvt_fail(-EINVAL, "%s is %g: a finite number%s is needed", name, x,
			min == 0 ? " >= 0" : min > 0 ? " > 0" : " that a float can hold");
}

static bool stage_on(const struct kvt_sampler_params *p, uint8_t stage)
{
	switch (stage) {
	case KVT_STAGE_BIAS:
		return p->n_bias;
	case KVT_STAGE_PENALTIES:
		return p->repetition_penalty != 1 || p->presence_penalty != 0 || p->frequency_penalty != 0;
	case KVT_STAGE_TOP_N_SIGMA:
		return p->top_n_sigma > 0;
	case KVT_STAGE_TOP_K:
		return p->top_k;
	case KVT_STAGE_TOP_P:
		return p->top_p < 1;
	case KVT_STAGE_MIN_P:
		return p->min_p > 0;
	case KVT_STAGE_TEMPERATURE:
		return p->temperature != 1 && p->temperature != 0;
	}
	return false;
}

static int read_order(struct chain *c)
{
	const uint8_t *order = c->p.order[0] == KVT_STAGE_END ? default_order : c->p.order;
	bool seen[KVT_STAGES] = { false }, filtered = false;
	uint32_t n = 0;

	c->n_adjust = 0;
	c->n_first = UINT32_MAX;
	for (uint32_t i = 0; i < sizeof(c->p.order) && order[i] != KVT_STAGE_END; i++) {
		uint8_t stage = order[i];
		bool adjusts = stage == KVT_STAGE_BIAS || stage == KVT_STAGE_PENALTIES;

		if (stage >= KVT_STAGES)
			return kvt_fail(-EINVAL, "order[%u] is %u: stages are 1 to %u", i, stage, KVT_STAGES - 1);
		if (seen[stage])
			return kvt_fail(-EINVAL, "order has %s twice", stage_names[stage]);
		if (adjusts && filtered)
			return kvt_fail(-EINVAL, "order has %s after a stage that must follow it: only top_n_sigma may come before",
					stage_names[stage]);
		seen[stage] = true;
		filtered |= !adjusts && stage != KVT_STAGE_TOP_N_SIGMA;
		if (!stage_on(&c->p, stage))
			continue;
		if (adjusts)
			c->adjust[c->n_adjust++] = stage;
		else if (stage == KVT_STAGE_TOP_N_SIGMA)
			c->n_first = c->n_adjust;
		c->order[n++] = stage;
	}
	c->order[n] = KVT_STAGE_END;
	if (c->n_first > c->n_adjust)
		c->n_first = c->n_adjust;
	for (uint8_t stage = 1; stage < KVT_STAGES; stage++)
		if (!seen[stage] && stage_on(&c->p, stage))
			return kvt_fail(-EINVAL, "%s is set but not in the order", stage_names[stage]);
	return 0;
}

static int read_params(struct chain *c, const struct kvt_sampler_params *params)
{
	static const struct kvt_sampler_params off = KVT_SAMPLER_PARAMS_INIT;
	struct kvt_sampler_params *p = &c->p;
	int err;

	if (!params)
		return kvt_fail(-EINVAL, "no sampler parameters");
	if (params->size < offsetof(struct kvt_sampler_params, top_p))
		return kvt_fail(-EINVAL, "sampler parameters of %u bytes: begin with KVT_SAMPLER_PARAMS_INIT",
				params->size);
	*p = off;
	memcpy(p, params, params->size < sizeof(*p) ? params->size : sizeof(*p));
	for (size_t i = sizeof(*p); i < params->size; i++)
		if (((const char *)params)[i])
			return kvt_fail(-E2BIG, "sampler parameters of %u bytes use fields that this library lacks", params->size);
	if (p->flags & ~KVT_SAMPLER_ADAPTIVE || p->reserved)
		return kvt_fail(-EINVAL, "sampler flags 0x%x, reserved %u: unknown bits", p->flags, p->reserved);
	if ((err = check_range("temperature", p->temperature, 0, DOUBLE_MAX)) ||
	    (err = check_range("top_p", p->top_p, 0, 1)) || (err = check_range("min_p", p->min_p, 0, 1)) ||
	    (err = check_range("top_n_sigma", p->top_n_sigma, -FLOAT_MAX, FLOAT_MAX)) ||
	    (err = check_range("repetition_penalty", p->repetition_penalty, FLOAT_MIN, FLOAT_MAX)) ||
	    (err = check_range("presence_penalty", p->presence_penalty, -FLOAT_MAX, FLOAT_MAX)) ||
	    (err = check_range("frequency_penalty", p->frequency_penalty, -FLOAT_MAX, FLOAT_MAX)))
		return err;
	if (p->n_bias && !p->bias)
		return kvt_fail(-EINVAL, "n_bias is %u and bias is NULL", p->n_bias);
	return read_order(c);
}

static int check_bias(const struct kvt_logit_bias *b, uint32_t vocab)
{
	if (b->token >= vocab)
		return kvt_fail(-EINVAL, "bias for token %u: the vocabulary has %u", b->token, vocab);
	if (!(b->bias < INFINITY))
		return kvt_fail(-EINVAL, "bias for token %u is %g: a finite number or -inf is needed", b->token, b->bias);
	return 0;
}

int kvt_sampler_check(const struct kvt_sampler_params *params, uint32_t vocab)
{
	struct chain c;
	int err = read_params(&c, params);

	for (uint32_t i = 0; !err && i < c.p.n_bias; i++)
		err = check_bias(&c.p.bias[i], vocab);
	return err;
}

/* ---- bias and penalties --------------------------------------------------- */

static bool is_touched(const struct kvt_sampler *s, uint32_t token)
{
	return s->touched[token / BLOCK] >> token % BLOCK & 1;
}

static void touch(struct kvt_sampler *s, uint32_t token)
{
	s->touched[token / BLOCK] |= 1ull << token % BLOCK;
}

static void untouch_all(struct kvt_sampler *s)
{
	for (uint32_t b = 0; b < s->n_blocks; b++) {
		for (uint64_t word = s->touched[b]; word; word &= word - 1) {
			uint32_t token = b * BLOCK + __builtin_ctzll(word);

			s->count[token] = 0;
			s->bias[token] = 0;
		}
		s->touched[b] = 0;
	}
}

/* On an error the caller untouches. */
static int touch_all(struct kvt_sampler *s, const struct chain *c, const struct kvt_sample *row)
{
	uint32_t first = 0;
	int err;

	for (uint32_t i = 0; i < c->p.n_bias; i++) {
		const struct kvt_logit_bias *b = &c->p.bias[i];

		err = check_bias(b, s->vocab);
		if (err)
			return err;
		if (is_touched(s, b->token))
			return kvt_fail(-EINVAL, "two biases for token %u", b->token);
		s->bias[b->token] = b->bias;
		touch(s, b->token);
	}
	if (!stage_on(&c->p, KVT_STAGE_PENALTIES))
		return 0;
	if (row->n_history && !row->history)
		return kvt_fail(-EINVAL, "n_history is %u and history is NULL", row->n_history);
	if (c->p.penalty_last_n && c->p.penalty_last_n < row->n_history)
		first = row->n_history - c->p.penalty_last_n;
	for (uint32_t i = first; i < row->n_history; i++) {
		uint32_t token = row->history[i];

		if (token >= s->vocab)
			continue;
		s->count[token]++;
		touch(s, token);
	}
	return 0;
}

/* A token's logit after the first @n adjustments. */
static double adjusted(const struct kvt_sampler *s, const struct chain *c, uint32_t token, uint32_t n)
{
	const struct kvt_sampler_params *p = &c->p;
	double x = c->logits[token];

	if (!is_touched(s, token))
		return x;
	for (uint32_t i = 0; i < n; i++) {
		if (c->adjust[i] == KVT_STAGE_BIAS) {
			if (s->bias[token] == -INFINITY)
				return -INFINITY; /* also for a logit of +inf */
			x += s->bias[token];
		} else if (s->count[token]) {
			x = x > 0 ? x / p->repetition_penalty : x * p->repetition_penalty;
			x -= s->count[token] * p->frequency_penalty + p->presence_penalty;
		}
	}
	return x;
}

/* ---- the first pass ------------------------------------------------------- */

static void spread_add(struct kvt_sampler_spread *a, uint32_t lane, double x)
{
	double d;

	if (!(fabs(x) <= DOUBLE_MAX))
		return;
	if (!a->any)
		a->shift = x;
	a->any = true;
	d = x - a->shift;
	a->n[lane]++;
	a->sum[lane] += d;
	a->square[lane] += d * d;
}

static void spread_block(const struct kvt_sampler *s, struct kvt_sampler_spread *a, const float *x)
{
	for (uint32_t i = 0; i < BLOCK && !a->any; i++) {
		a->any = fabsf(x[i]) <= FLOAT_MAX;
		a->shift = x[i];
	}
	s->ops->spread(a, x);
}

static double spread_sigma(const struct kvt_sampler_spread *a)
{
	double n = 0, sum = 0, square = 0, mean, variance;

	if (!a->any)
		return 0;
	for (uint32_t j = 0; j < LANES; j++) {
		n += a->n[j];
		sum += a->sum[j];
		square += a->square[j];
	}
	mean = sum / n;
	variance = square / n - mean * mean;
	return variance > 0 ? sqrt(variance) : 0;
}

static uint32_t block_tokens(const struct kvt_sampler *s, uint32_t b)
{
	return b + 1 < s->n_blocks ? BLOCK : s->vocab - b * BLOCK;
}

static int nan_found(const float *x, uint32_t first)
{
	while (!isnan(*x)) {
		x++;
		first++;
	}
	return kvt_fail(-EDOM, "the logit of token %u is NaN", first);
}

static int first_pass(struct kvt_sampler *s, struct chain *c)
{
	const bool sigma = stage_on(&c->p, KVT_STAGE_TOP_N_SIGMA) && c->p.temperature != 0;
	const uint32_t n_adjust = c->p.temperature == 0 ? c->n_adjust : c->n_first;
	struct kvt_sampler_spread spread = { .any = false };

	c->max = -INFINITY;
	for (uint32_t b = 0; b < s->n_blocks; b++) {
		const float *x = c->logits + b * BLOCK;
		uint32_t n = block_tokens(s, b);
		float copy[BLOCK];
		double max;
		bool nan;

		s->logits_read += n;
		if (n < BLOCK) {
			for (uint32_t i = 0; i < BLOCK; i++)
				copy[i] = i < n ? x[i] : -INFINITY;
			x = copy;
		}
		max = s->ops->scan(x, &nan);
		if (nan)
			return nan_found(x, b * BLOCK);
		if (s->touched[b]) {
			memmove(copy, x, sizeof(copy));
			for (uint64_t word = s->touched[b]; word; word &= word - 1)
				copy[__builtin_ctzll(word)] = -INFINITY;
			x = copy;
			max = s->ops->scan(x, &nan);
			for (uint64_t word = s->touched[b]; word; word &= word - 1) {
				uint32_t i = __builtin_ctzll(word);
				double y = adjusted(s, c, b * BLOCK + i, n_adjust);

				max = y > max ? y : max;
				spread_add(&spread, i % LANES, y);
			}
		}
		if (sigma)
			spread_block(s, &spread, x);
		s->block_max[b] = max;
		c->max = max > c->max ? max : c->max;
	}
	if (c->max == -INFINITY)
		return kvt_fail(-EDOM, "every logit is -inf: no token can be drawn");
	c->sigma = sigma ? spread_sigma(&spread) : 0;
	return 0;
}

/* The lowest id at the maximum. The second largest value goes to *second. */
static uint32_t find_max(struct kvt_sampler *s, const struct chain *c, uint32_t n_adjust, double *second)
{
	uint32_t b = 0, token = UINT32_MAX;
	double m = -INFINITY;

	while (s->block_max[b] != c->max)
		b++;
	s->logits_read += block_tokens(s, b);
	for (uint32_t i = 0; i < block_tokens(s, b); i++) {
		double y = adjusted(s, c, b * BLOCK + i, n_adjust);

		if (y == c->max && token == UINT32_MAX)
			token = b * BLOCK + i;
		else
			m = y > m ? y : m;
	}
	for (uint32_t i = 0; i < s->n_blocks; i++)
		if (i != b && s->block_max[i] > m)
			m = s->block_max[i];
	*second = m;
	return token;
}

/* ---- selection ------------------------------------------------------------ */

/* List entries by (v descending, candidate ascending); few of them. */
static void sort_few(const struct kvt_sampler *s, uint32_t n)
{
	for (uint32_t i = 1; i < n; i++) {
		uint32_t x = s->list[i], j = i;

		for (; j && s->v[s->list[j - 1]] < s->v[x]; j--)
			s->list[j] = s->list[j - 1];
		s->list[j] = x;
	}
}

/* A selection under way: what is certainly above the list, and what ends it. */
struct prefix {
	uint32_t n; /* entries in the list */
	double low, high;
	uint64_t above_n, count;
	double above_w, mass;
};

static bool prefix_full(const struct prefix *p, uint64_t n, double w)
{
	return p->above_n + n >= p->count || p->above_w + w >= p->mass;
}

static void prefix_range(const struct kvt_sampler *s, struct prefix *p)
{
	p->low = p->high = s->v[s->list[0]];
	for (uint32_t i = 1; i < p->n; i++) {
		double v = s->v[s->list[i]];

		p->low = v < p->low ? v : p->low;
		p->high = v > p->high ? v : p->high;
	}
}

static uint32_t bucket(const struct prefix *p, double v)
{
	return (p->high - v) / (p->high - p->low) * (BUCKETS - 0.5);
}

/* Cut the list to the bucket in which the prefix ends. The highest and the lowest value never share one. */
static void prefix_narrow(struct kvt_sampler *s, struct prefix *p)
{
	uint32_t hist_n[BUCKETS] = { 0 }, b, n = 0;
	double hist_w[BUCKETS] = { 0 };

	for (uint32_t i = 0; i < p->n; i++) {
		b = bucket(p, s->v[s->list[i]]);
		hist_n[b]++;
		if (p->mass < INFINITY)
			hist_w[b] += s->w[s->list[i]];
	}
	for (b = 0; b < BUCKETS - 1 && !prefix_full(p, hist_n[b], hist_w[b]); b++) {
		p->above_n += hist_n[b];
		p->above_w += hist_w[b];
	}
	for (uint32_t i = 0; i < p->n; i++)
		if (bucket(p, s->v[s->list[i]]) == b)
			s->list[n++] = s->list[i];
	p->n = n;
}

/*
 * The last candidate of the smallest prefix of (v descending, id ascending)
 * that has @count entries or a weight of @mass (INFINITY: w is not looked at).
 * All values are finite or all are equal. The list holds @n candidates, with
 * all that the prefix can have.
 */
static uint32_t prefix_end(struct kvt_sampler *s, uint32_t n, uint64_t count, double mass)
{
	struct prefix p = { .n = n, .count = count, .mass = mass };
	uint32_t i;

	for (;;) {
		prefix_range(s, &p);
		if (p.n <= FEW || p.low == p.high)
			break;
		prefix_narrow(s, &p);
	}
	if (p.low != p.high)
		sort_few(s, p.n);
	for (i = 0; i < p.n - 1; i++) {
		double w = mass < INFINITY ? s->w[s->list[i]] : 0;

		if (prefix_full(&p, 1, w))
			break;
		p.above_n++;
		p.above_w += w;
	}
	return s->list[i];
}

static uint32_t top_k_end(struct kvt_sampler *s, uint32_t n, uint32_t k)
{
	for (uint32_t i = 0; i < n; i++)
		s->list[i] = i;
	return prefix_end(s, n, k, INFINITY);
}

/*
 * Candidates that weigh less than an n-th of what p leaves over are not listed:
 * all of them together weigh less than that, so the prefix ends before them.
 * (Half of it, to be clear of rounding.)
 */
static uint32_t top_p_end(struct kvt_sampler *s, uint32_t n, double sum, double p)
{
	double least = sum * (1 - p) / n * 0.5;
	uint32_t listed = 0;

	for (uint32_t i = 0; i < n; i++) {
		s->list[listed] = i;
		listed += s->w[i] >= least;
	}
	return prefix_end(s, listed, UINT64_MAX, sum * p);
}

/* Keep the candidates above @least, and those at it up to candidate @last_equal. */
static void keep(struct kvt_sampler *s, struct chain *c, double least, uint32_t last_equal)
{
	const bool weights = c->weight_t != 0;
	uint32_t n = 0;

	for (uint32_t i = 0; i < c->n; i++) {
		if (!(s->v[i] > least || (s->v[i] == least && i <= last_equal)))
			continue;
		s->v[n] = s->v[i];
		s->id[n] = s->id[i];
		if (weights)
			s->w[n] = s->w[i];
		n++;
	}
	c->n = n;
}

/* Their weights at temperature @t, and the sum. */
static double weigh(struct kvt_sampler *s, struct chain *c, double t)
{
	double lanes[LANES] = { 0 }, sum = 0;

	if (c->weight_t != t && c->max < INFINITY) {
		s->ops->exp_scaled(s->w, s->v, c->n, c->max, t);
	} else if (c->weight_t != t) {
		for (uint32_t i = 0; i < c->n; i++) /* all at +inf */
			s->w[i] = 1;
	}
	c->weight_t = t;
	for (uint32_t i = 0; i < c->n; i++)
		lanes[i % LANES] += s->w[i];
	for (uint32_t j = 0; j < LANES; j++)
		sum += lanes[j];
	return sum;
}

static double sigma_limit(const struct chain *c)
{
	return c->max == INFINITY ? c->max : c->max - c->p.top_n_sigma * c->sigma;
}

static double min_p_limit(const struct kvt_sampler *s, const struct chain *c, double t)
{
	double limit;

	if (c->p.min_p == 1 || c->max == INFINITY)
		return c->max;
	limit = c->max + t * kvt_sampler_ln(s->ops, c->p.min_p);
	return limit - LOGIT_ULP * (fabs(c->max) + fabs(limit));
}

/* At least k values are not below the k-th largest block maximum, so the k-th largest value is not either. */
static double top_k_limit(struct kvt_sampler *s, const struct chain *c)
{
	uint32_t n = 0;

	for (uint32_t b = 0; b < s->n_blocks; b++)
		if (s->block_max[b] > -INFINITY)
			s->v[n++] = s->block_max[b];
	if (n < c->p.top_k)
		return -DOUBLE_MAX;
	return s->v[top_k_end(s, n, c->p.top_k)];
}

/*
 * What must be reached to survive the stages up to the first that needs the
 * mass of what enters it. -inf never does.
 */
static double threshold(struct kvt_sampler *s, const struct chain *c)
{
	double least = -DOUBLE_MAX, limit, t = 1;

	if (c->max == INFINITY)
		return INFINITY;
	for (const uint8_t *stage = c->order; *stage; stage++) {
		limit = -DOUBLE_MAX;
		if (*stage == KVT_STAGE_TOP_P)
			break;
		if (*stage == KVT_STAGE_TOP_N_SIGMA) {
			limit = sigma_limit(c);
			if (c->n_first < c->n_adjust)
				return limit; /* what comes after will change the logits */
		} else if (*stage == KVT_STAGE_MIN_P) {
			limit = min_p_limit(s, c, t);
		} else if (*stage == KVT_STAGE_TOP_K) {
			limit = top_k_limit(s, c);
		} else if (*stage == KVT_STAGE_TEMPERATURE) {
			t = c->p.temperature;
		}
		least = limit > least ? limit : least;
	}
	return least;
}

/* The second pass: candidates are the tokens at or above @least. */
static void gather(struct kvt_sampler *s, struct chain *c, double least)
{
	uint32_t n = 0;

	for (uint32_t b = 0; b < s->n_blocks; b++) {
		const float *x = c->logits + b * BLOCK;
		uint32_t tokens = block_tokens(s, b);

		if (s->block_max[b] < least)
			continue;
		s->logits_read += tokens;
		/* written always, counted where it is kept: no branch to predict */
		if (!s->touched[b]) {
			for (uint32_t i = 0; i < tokens; i++) {
				s->v[n] = x[i];
				s->id[n] = b * BLOCK + i;
				n += x[i] >= least;
			}
			continue;
		}
		for (uint32_t i = 0; i < tokens; i++) {
			s->v[n] = adjusted(s, c, b * BLOCK + i, c->n_first);
			s->id[n] = b * BLOCK + i;
			n += s->v[n] >= least;
		}
	}
	c->n = n;
	c->weight_t = 0;
}

/* Bias and penalties behind top_n_sigma: over its survivors. */
static int adjust_late(struct kvt_sampler *s, struct chain *c)
{
	uint32_t n = 0;

	c->max = -INFINITY;
	for (uint32_t i = 0; i < c->n; i++) {
		double y = adjusted(s, c, s->id[i], c->n_adjust);

		if (y == -INFINITY)
			continue;
		s->v[n] = y;
		s->id[n++] = s->id[i];
		c->max = y > c->max ? y : c->max;
	}
	c->n = n;
	if (!n)
		return kvt_fail(-EDOM, "every token that top_n_sigma kept is banned by its bias: put bias first in the order");
	if (c->max == INFINITY)
		keep(s, c, INFINITY, UINT32_MAX);
	return 0;
}

/* Run the stages on the candidates; their weights at the end are the distribution. Returns the sum of the weights. */
static double filter(struct kvt_sampler *s, struct chain *c)
{
	double t = 1, sum;
	uint32_t last;

	for (const uint8_t *stage = c->order; *stage; stage++) {
		switch (*stage) {
		case KVT_STAGE_TOP_K:
			if (c->p.top_k >= c->n)
				break;
			last = top_k_end(s, c->n, c->p.top_k);
			keep(s, c, s->v[last], last);
			break;
		case KVT_STAGE_TOP_P:
			sum = weigh(s, c, t);
			last = top_p_end(s, c->n, sum, c->p.top_p * (1 - LOGIT_ULP));
			keep(s, c, s->v[last], last);
			break;
		case KVT_STAGE_MIN_P:
			keep(s, c, min_p_limit(s, c, t), UINT32_MAX);
			break;
		case KVT_STAGE_TEMPERATURE:
			t = c->p.temperature;
			break;
		case KVT_STAGE_TOP_N_SIGMA:
			if (c->n_first == c->n_adjust) /* else the second pass has done it, on other logits */
				keep(s, c, sigma_limit(c), UINT32_MAX);
			break;
		}
	}
	return weigh(s, c, t);
}

/* ---- the draw ------------------------------------------------------------- */

/*
 * The unit interval is dealt out to the largest first, then by id. So the
 * adaptive path knows the largest's share without knowing the others' order.
 */
static uint32_t draw(const struct kvt_sampler *s, const struct chain *c, double sum, double uniform)
{
	double target = uniform * sum, end = 1;
	uint32_t top = 0, last;

	while (s->v[top] != c->max)
		top++;
	if (target < end)
		return s->id[top];
	last = top;
	for (uint32_t i = 0; i < c->n; i++) {
		if (i == top || s->w[i] == 0)
			continue;
		end += s->w[i];
		last = i;
		if (target < end)
			break;
	}
	return s->id[last];
}

/* Whether the draw falls on the largest, however much below @second the others are. */
static bool draw_is_clear(const struct kvt_sampler *s, const struct chain *c, double second, double uniform)
{
	double others;

	if (c->max == INFINITY)
		return false;
	s->ops->exp_scaled(&others, &second, 1, c->max, c->p.temperature);
	return uniform * (1 + (s->vocab - 1) * others) < 1 - 1e-9; /* more than all rounding */
}

struct outputs {
	uint32_t *ids;
	double *probs, *logits_after;
};

static void put_distribution(const struct kvt_sampler *s, const struct chain *c, double sum, const struct outputs *out)
{
	for (uint32_t i = 0; i < c->n; i++) {
		if (out->ids)
			out->ids[i] = s->id[i];
		if (out->probs)
			out->probs[i] = s->w[i] / sum;
	}
}

static int sample_touched(struct kvt_sampler *s, struct chain *c, struct kvt_sample *row, const struct outputs *out)
{
	double uniform, second, sum;
	uint32_t top;
	int err;

	err = touch_all(s, c, row);
	if (!err)
		err = first_pass(s, c);
	if (err)
		return err;
	if (out && out->logits_after)
		for (uint32_t i = 0; i < s->vocab; i++)
			out->logits_after[i] = adjusted(s, c, i, c->n_adjust);
	if (c->p.temperature == 0) {
		c->n = 1;
		s->v[0] = c->max;
		s->w[0] = 1;
		s->id[0] = row->token = find_max(s, c, c->n_adjust, &second);
		row->kept = 1;
		if (out)
			put_distribution(s, c, 1, out);
		return 0;
	}
	uniform = kvt_sampler_uniform(c->p.seed, row->sequence, row->position);
	if (c->p.flags & KVT_SAMPLER_ADAPTIVE && !out && c->n_first == c->n_adjust) {
		top = find_max(s, c, c->n_adjust, &second);
		if (draw_is_clear(s, c, second, uniform)) {
			row->token = top;
			row->kept = 0;
			return 0;
		}
	}
	gather(s, c, threshold(s, c));
	if (c->n_first < c->n_adjust) {
		err = adjust_late(s, c);
		if (err)
			return err;
	}
	sum = filter(s, c);
	row->token = draw(s, c, sum, uniform);
	row->kept = c->n;
	if (out)
		put_distribution(s, c, sum, out);
	return 0;
}

static int sample_row(struct kvt_sampler *s, struct kvt_sample *row, const struct outputs *out)
{
	struct chain c = { .logits = row->logits };
	int err = read_params(&c, row->params);

	if (!err && !row->logits)
		err = kvt_fail(-EINVAL, "logits is NULL");
	if (!err) {
		err = sample_touched(s, &c, row, out);
		untouch_all(s);
	}
	row->error = err;
	return err;
}

int kvt_sampler_sample(struct kvt_sampler *s, struct kvt_sample *rows, uint32_t n)
{
	char message[512];
	uint32_t failed = 0;
	int first = 0;

	for (uint32_t i = 0; i < n; i++) {
		int err = sample_row(s, &rows[i], NULL);

		if (err && !failed++) {
			first = err;
			snprintf(message, sizeof(message), "row %u: %s", i, kvt_last_error());
		}
	}
	return failed ? kvt_fail(first, "%u of %u rows failed; %s", failed, n, message) : 0;
}

int64_t kvt_sampler_distribution(struct kvt_sampler *s, struct kvt_sample *row, uint32_t *ids, double *probs,
				 double *logits_after)
{
	const struct outputs out = { ids, probs, logits_after };
	int err = sample_row(s, row, &out);

	return err ? err : (int64_t)row->kept;
}
