// SPDX-License-Identifier: MIT
/*
 * The sampler's rules one by one: the generator's known answers, each bad
 * parameter alone, strange logits, batches, the adaptive path, passes and
 * allocations counted, and bits that no compiler may change.
 */
#include <check.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvtier.h"
#include "lib/rounds.h"
#include "runtime/philox.h"
#include "runtime/sampler.h"

#ifndef __has_feature
#define __has_feature(x) 0
#endif
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && !__has_feature(address_sanitizer) && \
	!__has_feature(thread_sanitizer)
#define COUNTS_ALLOCATIONS 1
static unsigned long allocations;

void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t n, size_t bytes);
void *__libc_realloc(void *p, size_t bytes);

void *malloc(size_t bytes)
{
	allocations++;
	return __libc_malloc(bytes);
}

void *calloc(size_t n, size_t bytes)
{
	allocations++;
	return __libc_calloc(n, bytes);
}

void *realloc(void *p, size_t bytes)
{
	allocations++;
	return __libc_realloc(p, bytes);
}
#endif

#define GOLDEN 0x76bcaf937c838bfe /* see golden_bits */

static const float eight[8] = { 5, 4.5, 3, 2, 0, -1, -3, -8 };

/* A float in [-1, 1) of 24 bits, from the generator alone. */
static float noise(uint64_t stream, uint64_t i)
{
	return (float)(kvt_sampler_uniform(99, stream, i) * 2 - 1);
}

static struct kvt_sampler *sampler_of(uint32_t vocab)
{
	struct kvt_sampler *s;

	ck_assert_int_eq(kvt_sampler_create(vocab, &s), 0);
	return s;
}

/* The ids kept, as text, of one row. */
static const char *kept(const float *logits, uint32_t vocab, const struct kvt_sampler_params *p)
{
	static char text[400];
	struct kvt_sampler *s = sampler_of(vocab);
	struct kvt_sample row = { .params = p, .logits = logits };
	uint32_t *ids = malloc(vocab * sizeof(*ids));
	int64_t n = kvt_sampler_distribution(s, &row, ids, NULL, NULL);

	snprintf(text, sizeof(text), "%s", n < 0 ? kvt_last_error() : "");
	for (int64_t i = 0; i < n; i++)
		snprintf(text + strlen(text), sizeof(text) - strlen(text), "%s%u", i ? " " : "", ids[i]);
	free(ids);
	kvt_sampler_destroy(s);
	return text;
}

/* Random123 1.14, tests/kat_vectors, the three lines of "philox4x32 10". */
START_TEST(philox_known_answers)
{
	static const struct {
		uint32_t counter[4], key[2], out[4];
	} cases[] = {
		{ { 0, 0, 0, 0 }, { 0, 0 }, { 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8 } },
		{ { ~0u, ~0u, ~0u, ~0u }, { ~0u, ~0u }, { 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd } },
		{ { 0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344 },
		  { 0xa4093822, 0x299f31d0 },
		  { 0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1 } },
	};
	uint32_t out[4];

	for (int i = 0; i < 3; i++) {
		kvt_philox4x32_10(cases[i].counter, cases[i].key, out);
		ck_assert_mem_eq(out, cases[i].out, sizeof(out));
	}
}
END_TEST

/* Each part of the address of a draw matters, in all of its 64 bits; nothing else is read. */
START_TEST(uniform_addresses)
{
	double u = kvt_sampler_uniform(1, 2, 3);

	ck_assert(u == kvt_sampler_uniform(1, 2, 3));
	for (int bit = 0; bit < 64; bit++) {
		ck_assert(u != kvt_sampler_uniform(1 ^ 1ull << bit, 2, 3));
		ck_assert(u != kvt_sampler_uniform(1, 2 ^ 1ull << bit, 3));
		ck_assert(u != kvt_sampler_uniform(1, 2, 3 ^ 1ull << bit));
	}
	/* words 0 and 1 of the first known answer */
	ck_assert(kvt_sampler_uniform(0, 0, 0) == (0xe169c58d6627e8d5 >> 11) * 0x1p-53);
}
END_TEST

static const struct kvt_sampler_ops *const ops[KVT_ISAS] = KVT_ISA_TABLE(&kvt_sampler_ops);

static double exp_of(const struct kvt_sampler_ops *o, double x)
{
	o->exp_scaled(&x, &x, 1, 0, 1);
	return x;
}

START_TEST(exp_and_ln)
{
	const struct kvt_sampler_ops *o = ops[_i];

	if (!kvt_isa_usable(_i))
		return;
	ck_assert(exp_of(o, 0) == 1);
	ck_assert(exp_of(o, -INFINITY) == 0);
	ck_assert(exp_of(o, -701) == 0);
	ck_assert(exp_of(o, -700) > 0);
	ck_assert(kvt_sampler_ln(o, 1) == 0);
	ck_assert(kvt_sampler_ln(o, 1e-320) == -690);
	for (uint32_t i = 0; i < test_rounds(200000, 50000, 10000); i++) {
		double u = kvt_sampler_uniform(5, 0, i), x = -700 * u * u * u, e = exp(x), p = exp(-680 * u * u);

		ck_assert_msg(fabs(exp_of(o, x) - e) <= 5e-16 * e, "e^%.17g", x);
		ck_assert_msg(fabs(kvt_sampler_ln(o, p) - log(p)) <= 1e-15 * (1 + fabs(log(p))), "ln %.17g", p);
	}
}
END_TEST

#define REFUSED(field, value, part)                                                           \
	do {                                                                                  \
		struct kvt_sampler_params bad = KVT_SAMPLER_PARAMS_INIT;                      \
		bad.field = (value);                                                          \
		ck_assert_int_eq(kvt_sampler_check(&bad, 8), -EINVAL);                        \
		ck_assert_ptr_nonnull(strstr(kvt_last_error(), part));                        \
		ck_assert_ptr_nonnull(strstr(kept(eight, 8, &bad), part));                    \
	} while (0)

START_TEST(bad_parameters)
{
	static const struct kvt_logit_bias outside = { 8, 1 }, nan_bias = { 0, NAN }, inf_bias = { 0, INFINITY },
					   twice[2] = { { 3, 1 }, { 3, 1 } };
	struct kvt_sampler_params p = KVT_SAMPLER_PARAMS_INIT;
	struct kvt_sampler *s;
	struct {
		struct kvt_sampler_params p;
		uint64_t tail;
	} longer = { .p = p };

	ck_assert_int_eq(kvt_sampler_check(&p, 8), 0);
	REFUSED(temperature, -1, "temperature");
	REFUSED(temperature, NAN, "temperature");
	REFUSED(temperature, INFINITY, "temperature");
	REFUSED(top_p, 1.5, "top_p");
	REFUSED(top_p, -0.1, "top_p");
	REFUSED(top_p, NAN, "top_p");
	REFUSED(min_p, 1.01, "min_p");
	REFUSED(min_p, -1, "min_p");
	REFUSED(min_p, NAN, "min_p");
	REFUSED(top_n_sigma, NAN, "top_n_sigma");
	REFUSED(top_n_sigma, INFINITY, "top_n_sigma");
	REFUSED(repetition_penalty, 0, "repetition_penalty");
	REFUSED(repetition_penalty, -1, "repetition_penalty");
	REFUSED(repetition_penalty, NAN, "repetition_penalty");
	REFUSED(repetition_penalty, INFINITY, "repetition_penalty");
	REFUSED(presence_penalty, NAN, "presence_penalty");
	REFUSED(presence_penalty, -INFINITY, "presence_penalty");
	REFUSED(frequency_penalty, NAN, "frequency_penalty");
	REFUSED(frequency_penalty, 1e300, "frequency_penalty");
	REFUSED(flags, 0x80, "flags");
	REFUSED(reserved, 1, "reserved");
	REFUSED(n_bias, 1, "bias is NULL");
	REFUSED(size, 4, "KVT_SAMPLER_PARAMS_INIT");

	p.n_bias = 1;
	p.bias = &outside;
	ck_assert_int_eq(kvt_sampler_check(&p, 8), -EINVAL);
	ck_assert_str_eq(kept(eight, 8, &p), "bias for token 8: the vocabulary has 8");
	p.bias = &nan_bias;
	ck_assert_int_eq(kvt_sampler_check(&p, 8), -EINVAL);
	p.bias = &inf_bias;
	ck_assert_int_eq(kvt_sampler_check(&p, 8), -EINVAL);
	p.n_bias = 2;
	p.bias = twice;
	ck_assert_str_eq(kept(eight, 8, &p), "two biases for token 3");

	longer.p.size = sizeof(longer);
	ck_assert_int_eq(kvt_sampler_check(&longer.p, 8), 0);
	longer.tail = 1;
	ck_assert_int_eq(kvt_sampler_check(&longer.p, 8), -E2BIG);
	ck_assert_int_eq(kvt_sampler_check(NULL, 8), -EINVAL);

	ck_assert_int_eq(kvt_sampler_create(0, &s), -EINVAL);
	ck_assert_ptr_null(s);
	ck_assert_int_eq(kvt_sampler_create((1 << 24) + 1, &s), -EINVAL);
	kvt_sampler_destroy(NULL);
}
END_TEST

/* A caller built against a header that ended behind top_p: what it lacks is off. */
START_TEST(older_header)
{
	struct kvt_sampler_params p = KVT_SAMPLER_PARAMS_INIT;

	memset(&p.min_p, 0xff, sizeof(p) - offsetof(struct kvt_sampler_params, min_p));
	p.size = offsetof(struct kvt_sampler_params, min_p);
	p.top_p = 0.9;
	ck_assert_str_eq(kept(eight, 8, &p), "0 1 2");
}
END_TEST

START_TEST(orders)
{
	static const struct kvt_logit_bias lift = { 7, 20 }, ban = { 0, -INFINITY };
	struct kvt_sampler_params p = KVT_SAMPLER_PARAMS_INIT;

	/* at temperature 4 the third token's probability is above 0.3 of the first's; before it, it is not */
	p.temperature = 4;
	p.min_p = 0.3;
	ck_assert_str_eq(kept(eight, 8, &p), "0 1");
	memcpy(p.order, (uint8_t[]){ KVT_STAGE_TEMPERATURE, KVT_STAGE_MIN_P, 0 }, 3);
	ck_assert_str_eq(kept(eight, 8, &p), "0 1 2 3");

	/* top_p of what top_k left, and the other way round */
	p = (struct kvt_sampler_params)KVT_SAMPLER_PARAMS_INIT;
	p.top_k = 2;
	p.top_p = 0.63;
	memcpy(p.order, (uint8_t[]){ KVT_STAGE_TOP_P, KVT_STAGE_TOP_K, 0 }, 3);
	ck_assert_str_eq(kept(eight, 8, &p), "0 1");
	p.top_p = 0.6; /* the first has 0.622 of the two's mass, 0.554 of all's */
	ck_assert_str_eq(kept(eight, 8, &p), "0 1");
	memcpy(p.order, (uint8_t[]){ KVT_STAGE_TOP_K, KVT_STAGE_TOP_P, 0 }, 3);
	ck_assert_str_eq(kept(eight, 8, &p), "0");

	/* top_n_sigma behind top_p still sees the sigma of all */
	p = (struct kvt_sampler_params)KVT_SAMPLER_PARAMS_INIT;
	p.top_p = 0.999;
	p.top_n_sigma = 0.5;
	memcpy(p.order, (uint8_t[]){ KVT_STAGE_TOP_P, KVT_STAGE_TOP_N_SIGMA, 0 }, 3);
	ck_assert_str_eq(kept(eight, 8, &p), "0 1 2");

	/* top_n_sigma before the bias judges the model's own logits */
	p = (struct kvt_sampler_params)KVT_SAMPLER_PARAMS_INIT;
	p.top_n_sigma = 0.25;
	p.bias = &lift;
	p.n_bias = 1;
	ck_assert_str_eq(kept(eight, 8, &p), "7");
	memcpy(p.order, (uint8_t[]){ KVT_STAGE_TOP_N_SIGMA, KVT_STAGE_BIAS, 0 }, 3);
	ck_assert_str_eq(kept(eight, 8, &p), "0 1");
	p.bias = &ban;
	ck_assert_str_eq(kept(eight, 8, &p), "1");
	p.top_n_sigma = 1e-3;
	ck_assert_ptr_nonnull(strstr(kept(eight, 8, &p), "banned"));

	memcpy(p.order, (uint8_t[]){ KVT_STAGE_TOP_K, KVT_STAGE_BIAS, 0 }, 3);
	ck_assert_ptr_nonnull(strstr(kept(eight, 8, &p), "only top_n_sigma may come before"));
	memcpy(p.order, (uint8_t[]){ KVT_STAGE_BIAS, KVT_STAGE_BIAS, 0 }, 3);
	ck_assert_str_eq(kept(eight, 8, &p), "order has bias twice");
	memcpy(p.order, (uint8_t[]){ KVT_STAGES, 0 }, 2);
	ck_assert_ptr_nonnull(strstr(kept(eight, 8, &p), "order[0] is 8"));
	memcpy(p.order, (uint8_t[]){ KVT_STAGE_BIAS, 0 }, 2);
	ck_assert_str_eq(kept(eight, 8, &p), "top_n_sigma is set but not in the order");
	ck_assert_str_eq(kvt_sampler_stage_name(KVT_STAGE_TEMPERATURE), "temperature");
	ck_assert_ptr_null(kvt_sampler_stage_name(KVT_STAGES));
	ck_assert_ptr_null(kvt_sampler_stage_name(KVT_STAGE_END));
}
END_TEST

/* { a, a, a + 1 } has a sigma of sqrt(2) / 3, whatever a: n = 3 / sqrt(2) divides keeping a from dropping it. */
START_TEST(sigma_far_from_zero)
{
	struct kvt_sampler_params p = KVT_SAMPLER_PARAMS_INIT;

	for (int i = 0; i < 100; i++) {
		const float a = 8000003 + 10007 * i, three[3] = { a, a, a + 1 };

		p.top_n_sigma = 2.122;
		ck_assert_str_eq(kept(three, 3, &p), "0 1 2");
		p.top_n_sigma = 2.120;
		ck_assert_str_eq(kept(three, 3, &p), "2");
	}
}
END_TEST

START_TEST(strange_logits)
{
	static const float nan_last[3] = { 1, 2, NAN }, banned[2] = { -INFINITY, -INFINITY },
			   infs[5] = { 1, INFINITY, -INFINITY, INFINITY, 1e38f },
			   wide[3] = { 3.4e38f, -3.4e38f, 3.4e38f }, tiny[2] = { 1e-45f, 0 };
	static const struct kvt_logit_bias ban = { 1, -INFINITY };
	struct kvt_sampler_params p = KVT_SAMPLER_PARAMS_INIT, greedy = KVT_SAMPLER_PARAMS_INIT, all;

	greedy.temperature = 0;
	all = p;
	all.top_k = 3;
	all.top_p = 0.9;
	all.min_p = 0.01;
	all.top_n_sigma = 2;
	ck_assert_str_eq(kept(nan_last, 3, &p), "the logit of token 2 is NaN");
	ck_assert_str_eq(kept(nan_last, 3, &greedy), "the logit of token 2 is NaN");
	ck_assert_str_eq(kept(banned, 2, &p), "every logit is -inf: no token can be drawn");
	ck_assert_str_eq(kept(banned, 2, &greedy), "every logit is -inf: no token can be drawn");
	ck_assert_str_eq(kept(infs, 5, &p), "1 3");
	ck_assert_str_eq(kept(infs, 5, &greedy), "1");
	ck_assert_str_eq(kept(infs, 5, &all), "1 3");
	ck_assert_str_eq(kept(wide, 3, &all), "0 2");
	ck_assert_str_eq(kept(tiny, 2, &all), "0 1");

	/* a banned token is gone whatever its logit; a NaN is an error even where it is banned */
	p.bias = &ban;
	p.n_bias = 1;
	ck_assert_str_eq(kept(infs, 5, &p), "3");
	ck_assert_str_eq(kept((float[]){ 1, NAN }, 2, &p), "the logit of token 1 is NaN");
}
END_TEST

START_TEST(history_rules)
{
	static const uint32_t history[] = { 0, 0, 0, 1, 8, 0xffffffff };
	struct kvt_sampler_params p = KVT_SAMPLER_PARAMS_INIT;
	struct kvt_sampler *s = sampler_of(8);
	struct kvt_sample row = { .params = &p, .logits = eight, .history = history, .n_history = 6 };
	double after[8];

	p.frequency_penalty = 1;
	ck_assert_int_eq(kvt_sampler_distribution(s, &row, NULL, NULL, after), 8);
	ck_assert(after[0] == 2 && after[1] == 3.5 && after[2] == 3);
	/* the window counts from the end, and ids that it ignores are in it */
	p.penalty_last_n = 4;
	ck_assert_int_eq(kvt_sampler_distribution(s, &row, NULL, NULL, after), 8);
	ck_assert(after[0] == 4 && after[1] == 3.5);
	p.penalty_last_n = 7;
	ck_assert_int_eq(kvt_sampler_distribution(s, &row, NULL, NULL, after), 8);
	ck_assert(after[0] == 2);
	/* nothing is left of it in the next call */
	row.n_history = 0;
	ck_assert_int_eq(kvt_sampler_distribution(s, &row, NULL, NULL, after), 8);
	ck_assert(after[0] == 5 && after[1] == 4.5);
	row.history = NULL;
	row.n_history = 1;
	ck_assert_int_eq(kvt_sampler_sample(s, &row, 1), -EINVAL);
	kvt_sampler_destroy(s);
}
END_TEST

/* Rows fail alone, and a row's token does not depend on its neighbours. */
START_TEST(batch)
{
	enum { ROWS = 64, VOCAB = 1000 };
	static float logits[ROWS][VOCAB];
	struct kvt_sampler_params p = KVT_SAMPLER_PARAMS_INIT, bad = p;
	struct kvt_sampler *s = sampler_of(VOCAB);
	struct kvt_sample rows[ROWS], alone;
	uint32_t history[ROWS];

	p.temperature = 2;
	p.repetition_penalty = 1.3;
	p.top_p = 0.97;
	bad.top_p = 2;
	for (uint32_t i = 0; i < ROWS; i++) {
		for (uint32_t j = 0; j < VOCAB; j++)
			logits[i][j] = 4 * noise(i, j);
		history[i] = i * 7;
		rows[i] = (struct kvt_sample){ .params = &p, .logits = logits[i], .history = history, .n_history = i,
					       .sequence = i, .position = 5 };
	}
	ck_assert_int_eq(kvt_sampler_sample(s, rows, ROWS), 0);
	for (uint32_t i = ROWS; i-- > 0;) {
		alone = rows[i];
		alone.token = UINT32_MAX;
		ck_assert_int_eq(kvt_sampler_sample(s, &alone, 1), 0);
		ck_assert_uint_eq(alone.token, rows[i].token);
	}
	rows[3].params = &bad;
	logits[9][999] = NAN;
	alone = rows[10];
	ck_assert_int_eq(kvt_sampler_sample(s, rows, ROWS), -EINVAL);
	ck_assert_str_eq(kvt_last_error(), "2 of 64 rows failed; row 3: top_p is 2: 0 to 1 is allowed");
	ck_assert_int_eq(rows[3].error, -EINVAL);
	ck_assert_int_eq(rows[9].error, -EDOM);
	ck_assert_int_eq(rows[10].error, 0);
	ck_assert_uint_eq(rows[10].token, alone.token);
	ck_assert_int_eq(kvt_sampler_sample(s, rows, 0), 0);
	rows[0].logits = NULL;
	ck_assert_int_eq(kvt_sampler_sample(s, rows, 1), -EINVAL);
	kvt_sampler_destroy(s);
}
END_TEST

/* From flat to one-hot: adaptive never changes the token, and does skip where one token has it all. */
START_TEST(adaptive_same_token)
{
	enum { VOCAB = 300, DRAWS = 4000 };
	struct kvt_sampler_params plain = KVT_SAMPLER_PARAMS_INIT, adaptive;
	struct kvt_sampler *s = sampler_of(VOCAB);
	uint32_t skipped, other_than_max;
	float logits[VOCAB];

	for (int spike = 0; spike <= 60; spike += 4) {
		for (uint32_t i = 0; i < VOCAB; i++)
			logits[i] = noise(7, i);
		logits[123] = spike;
		skipped = other_than_max = 0;
		for (uint32_t i = 0; i < DRAWS; i++) {
			struct kvt_sample a, b;

			plain.top_p = i % 3 ? 1 : 0.999;
			plain.min_p = i % 5 ? 0 : 1e-6;
			plain.temperature = i % 2 ? 1 : 1.5;
			adaptive = plain;
			adaptive.flags = KVT_SAMPLER_ADAPTIVE;
			a = (struct kvt_sample){ .params = &plain, .logits = logits, .position = i };
			b = a;
			b.params = &adaptive;
			ck_assert_int_eq(kvt_sampler_sample(s, &a, 1), 0);
			ck_assert_int_eq(kvt_sampler_sample(s, &b, 1), 0);
			ck_assert_uint_eq(a.token, b.token);
			skipped += b.kept == 0;
			other_than_max += a.token != 123;
		}
		if (spike == 8)
			ck_assert(other_than_max > 0 && skipped > 0);
		if (spike == 60)
			ck_assert(other_than_max == 0 && skipped == DRAWS);
	}
	/* two equal maxima, or two at +inf: nothing to skip to but the draw */
	logits[124] = logits[123] = 60;
	for (uint32_t i = 0; i < 200; i++) {
		struct kvt_sample a = { .params = &plain, .logits = logits, .position = i }, b = a;

		b.params = &adaptive;
		if (i == 100)
			logits[124] = logits[123] = INFINITY;
		ck_assert_int_eq(kvt_sampler_sample(s, &a, 1), 0);
		ck_assert_int_eq(kvt_sampler_sample(s, &b, 1), 0);
		ck_assert_uint_eq(a.token, b.token);
	}
	kvt_sampler_destroy(s);
}
END_TEST

/* 128K tokens, every stage on: two passes at most, and no memory taken. */
START_TEST(passes_and_allocations)
{
	enum { VOCAB = 128 * 1024, DRAWS = 8 };
	static const struct kvt_logit_bias bias[2] = { { 5, 1 }, { VOCAB - 1, 30 } };
	struct kvt_sampler_params p = KVT_SAMPLER_PARAMS_INIT;
	struct kvt_sampler *s = sampler_of(VOCAB);
	float *logits = malloc(VOCAB * sizeof(float));
	uint32_t history[256];
	struct kvt_sample row = { .params = &p, .logits = logits, .history = history, .n_history = 256 };

	for (uint32_t i = 0; i < VOCAB; i++)
		logits[i] = 4 * (noise(1, i) + noise(2, i) + noise(3, i));
	for (uint32_t i = 0; i < 256; i++)
		history[i] = i * 509;
	p.temperature = 0.8;
	p.top_p = 0.95;
	p.min_p = 0.05;
	p.top_n_sigma = 2;
	p.top_k = 40;
	p.repetition_penalty = 1.1;
	p.presence_penalty = 0.1;
	p.frequency_penalty = 0.1;
	p.bias = bias;
	p.n_bias = 2;
	for (int variant = 0; variant < 6; variant++) {
		uint64_t before = kvt_sampler_logits_read(s);
		int failed = 0;
#ifdef COUNTS_ALLOCATIONS
		unsigned long taken = allocations;
#endif
		if (variant == 1)
			p.flags = KVT_SAMPLER_ADAPTIVE;
		if (variant == 2) /* the most that can survive: mass of all */
			memcpy(p.order, (uint8_t[]){ 1, 2, KVT_STAGE_TOP_P, 3, 4, 6, 7, 0 }, 8);
		if (variant == 3)
			p = (struct kvt_sampler_params)KVT_SAMPLER_PARAMS_INIT;
		if (variant == 4)
			p.top_p = 0.99;
		if (variant == 5)
			p.temperature = 0;
		for (int i = 0; i < DRAWS; i++) {
			row.position = i;
			failed |= kvt_sampler_sample(s, &row, 1); /* an assertion here would allocate */
		}
#ifdef COUNTS_ALLOCATIONS
		taken = allocations - taken;
		ck_assert_uint_eq(taken, 0);
#endif
		ck_assert_int_eq(failed, 0);
		before = kvt_sampler_logits_read(s) - before;
		ck_assert_uint_ge(before, (uint64_t)VOCAB * DRAWS);
		ck_assert_uint_le(before, (variant == 5 ? VOCAB + 64 : 2ull * VOCAB) * DRAWS);
		if (variant < 2) /* the second pass reads the few blocks that have something to offer */
			ck_assert_uint_le(before, VOCAB * 11ull / 10 * DRAWS);
	}
	free(logits);
	kvt_sampler_destroy(s);
}
END_TEST

/*
 * The bits of 3000 distributions and draws over random parameters, from inputs
 * made with whole numbers: the same for every compiler, optimisation and
 * instruction set.
 */
START_TEST(golden_bits)
{
	enum { VOCAB = 777 };
	struct kvt_sampler *s;
	static const struct kvt_logit_bias bias[2] = { { 3, 1.25 }, { 700, -INFINITY } };
	uint32_t ids[VOCAB], history[50];
	double probs[VOCAB], after[VOCAB];
	uint64_t hash = 0xcbf29ce484222325;
	float logits[VOCAB];

	if (!kvt_isa_usable(_i)) {
		ck_assert_int_eq(kvt_sampler_create_isa(VOCAB, _i, &s), -ENOTSUP);
		return;
	}
	ck_assert_int_eq(kvt_sampler_create_isa(VOCAB, _i, &s), 0);
	for (uint64_t round = 0; round < 3000; round++) {
		struct kvt_sampler_params p = KVT_SAMPLER_PARAMS_INIT;
		struct kvt_sample row = { .params = &p, .logits = logits, .history = history, .sequence = round };
		int64_t n;

		for (uint32_t i = 0; i < VOCAB; i++)
			logits[i] = (round % 7 + 1) * noise(1000 + round, i);
		for (uint32_t i = 0; i < 50; i++)
			history[i] = (uint32_t)(kvt_sampler_uniform(3, round, i) * 900);
		p.temperature = 0.25 * (round % 9);
		p.top_p = round % 2 ? 1 : 1 - kvt_sampler_uniform(3, round, 60) / 4;
		p.min_p = round % 3 ? 0 : kvt_sampler_uniform(3, round, 61) / 16;
		p.top_n_sigma = round % 5 ? 0 : 2;
		p.top_k = round % 4 ? 0 : 100;
		p.repetition_penalty = round % 6 ? 1 : 1.3;
		p.presence_penalty = round % 6 ? 0 : 0.1;
		p.bias = bias;
		p.n_bias = round % 3;
		row.n_history = 50;
		n = kvt_sampler_distribution(s, &row, ids, probs, after);
		ck_assert_int_gt(n, 0);
		for (int64_t i = 0; i < n; i++) {
			uint64_t bits;

			memcpy(&bits, &probs[i], 8);
			hash = (hash ^ ids[i]) * 0x100000001b3;
			hash = (hash ^ bits) * 0x100000001b3;
		}
		hash = (hash ^ row.token) * 0x100000001b3;
	}
	ck_assert_msg(hash == GOLDEN, "0x%016llx", (unsigned long long)hash);
	kvt_sampler_destroy(s);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("sampler");
	TCase *t = tcase_create("sampler");
	SRunner *r = srunner_create(s);
	int failed;

	tcase_set_timeout(t, 120);
	tcase_add_test(t, philox_known_answers);
	tcase_add_test(t, uniform_addresses);
	tcase_add_loop_test(t, exp_and_ln, 0, KVT_ISAS);
	tcase_add_test(t, bad_parameters);
	tcase_add_test(t, older_header);
	tcase_add_test(t, orders);
	tcase_add_test(t, sigma_far_from_zero);
	tcase_add_test(t, strange_logits);
	tcase_add_test(t, history_rules);
	tcase_add_test(t, batch);
	tcase_add_test(t, adaptive_same_token);
	tcase_add_test(t, passes_and_allocations);
	tcase_add_loop_test(t, golden_bits, 0, KVT_ISAS);
	suite_add_tcase(s, t);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed != 0;
}
