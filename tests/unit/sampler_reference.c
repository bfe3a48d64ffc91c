// SPDX-License-Identifier: MIT
/*
 * The sampler against one that sorts everything and calls the C library: the
 * same tokens kept and the same probabilities over random parameters, ties,
 * orders and sizes; and 10^6 draws against exact probabilities.
 */
#include <check.h>
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvtier.h"
#include "lib/rounds.h"
#include "runtime/sampler.h"

#define MAX_VOCAB 5000

struct entry {
	double x;
	uint32_t id;
};

static struct kvt_sampler_params params;
static float logits[MAX_VOCAB];
static uint32_t history[300], vocab, n_history;

/* Random numbers of the test's own. */
static uint64_t state = 88172645463325252u;

static uint64_t next(void)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return state;
}

static double uniform(void)
{
	return (next() >> 11) * 0x1p-53;
}

static int by_rank(const void *a, const void *b)
{
	const struct entry *x = a, *y = b;

	if (x->x != y->x)
		return x->x < y->x ? 1 : -1;
	return x->id < y->id ? -1 : 1;
}

static int by_id(const void *a, const void *b)
{
	const struct entry *x = a, *y = b;

	return x->id < y->id ? -1 : x->id > y->id;
}

static void add_bias(struct entry *e, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++)
		for (uint32_t j = 0; j < params.n_bias; j++)
			if (params.bias[j].token == e[i].id)
				e[i].x += params.bias[j].bias;
}

static void penalise(struct entry *e, uint32_t n)
{
	static uint32_t count[MAX_VOCAB];

	memset(count, 0, sizeof(count));
	for (uint32_t i = 0; i < n_history; i++)
		if (history[i] < vocab)
			count[history[i]]++;
	for (uint32_t i = 0; i < n; i++)
		if (count[e[i].id]) {
			e[i].x = e[i].x > 0 ? e[i].x / params.repetition_penalty : e[i].x * params.repetition_penalty;
			e[i].x -= count[e[i].id] * params.frequency_penalty + params.presence_penalty;
		}
}

static double sigma_of(const struct entry *e, uint32_t n)
{
	double mean = 0, variance = 0;
	uint32_t finite = 0;

	for (uint32_t i = 0; i < n; i++)
		if (isfinite(e[i].x)) {
			mean += e[i].x;
			finite++;
		}
	mean /= finite;
	for (uint32_t i = 0; i < n; i++)
		if (isfinite(e[i].x))
			variance += (e[i].x - mean) * (e[i].x - mean);
	return sqrt(variance / finite);
}

/* How near the decisions came to a boundary: a case on the edge of rounding proves nothing. */
static double margin;

static void near(double a, double b)
{
	double distance = fabs(a - b) / (1 + fabs(b));

	margin = distance < margin ? distance : margin;
}

static uint32_t keep_from(struct entry *e, uint32_t n, double limit)
{
	uint32_t kept = 0;

	for (uint32_t i = 0; i < n; i++) {
		if (e[i].x != e[0].x)
			near(e[i].x, limit);
		if (e[i].x >= limit)
			e[kept++] = e[i];
	}
	return kept;
}

static uint32_t top_p(struct entry *e, uint32_t n, double t)
{
	double sum = 0, mass = 0;
	uint32_t kept = 0;

	for (uint32_t i = 0; i < n; i++)
		sum += exp((e[i].x - e[0].x) / t);
	for (uint32_t i = 0; i < n && (!i || mass < params.top_p); i++) {
		mass += exp((e[i].x - e[0].x) / t) / sum;
		near(mass, params.top_p);
		kept++;
	}
	return kept;
}

/* Run the stages in @order over all tokens. Returns the tokens kept, with probabilities in x, ascending by id. */
static uint32_t reference(const uint8_t *order, struct entry *e)
{
	double t = 1, sigma, sum = 0, max;
	uint32_t n = vocab;

	margin = 1;
	for (uint32_t i = 0; i < vocab; i++)
		e[i] = (struct entry){ logits[i], i };
	sigma = sigma_of(e, n);
	for (; *order; order++) {
		qsort(e, n, sizeof(*e), by_rank);
		switch (*order) {
		case KVT_STAGE_BIAS:
			add_bias(e, n);
			break;
		case KVT_STAGE_PENALTIES:
			penalise(e, n);
			break;
		case KVT_STAGE_TOP_N_SIGMA:
			if (params.top_n_sigma > 0)
				n = keep_from(e, n, e[0].x - params.top_n_sigma * sigma);
			break;
		case KVT_STAGE_TOP_K:
			if (params.top_k && params.top_k < n)
				n = params.top_k;
			break;
		case KVT_STAGE_TOP_P:
			if (params.top_p < 1)
				n = top_p(e, n, t);
			break;
		case KVT_STAGE_MIN_P:
			if (params.min_p > 0)
				n = keep_from(e, n, e[0].x + t * log(params.min_p));
			break;
		case KVT_STAGE_TEMPERATURE:
			t = params.temperature;
			break;
		}
		while (n && e[n - 1].x == -INFINITY)
			n--;
		if (*order <= KVT_STAGE_PENALTIES)
			sigma = sigma_of(e, n);
	}
	qsort(e, n, sizeof(*e), by_rank);
	while (n && e[n - 1].x == -INFINITY)
		n--;
	max = e[0].x;
	for (uint32_t i = 0; i < n; i++)
		sum += exp((e[i].x - max) / t);
	for (uint32_t i = 0; i < n; i++)
		e[i].x = exp((e[i].x - max) / t) / sum;
	qsort(e, n, sizeof(*e), by_id);
	return n;
}

static const uint8_t orders[][8] = {
	{ 1, 2, 3, 4, 5, 6, 7 }, { 1, 2, 7, 3, 4, 5, 6 }, { 2, 1, 5, 4, 6, 3, 7 }, { 1, 2, 6, 7, 5, 4, 3 },
	{ 3, 1, 2, 4, 5, 6, 7 }, { 1, 3, 2, 7, 6, 5, 4 }, { 2, 3, 1, 5, 7, 6, 4 }, { 1, 2, 4, 7, 5, 3, 6 },
};

static void random_case(struct kvt_logit_bias *bias)
{
	static const uint32_t sizes[] = { 1, 2, 3, 31, 33, 63, 64, 65, 127, 128, 500, 1000, 4999, MAX_VOCAB };
	double scale = pow(10, 3 * uniform() - 1);
	uint32_t kind = next() % 4;

	vocab = sizes[next() % (sizeof(sizes) / sizeof(sizes[0]))];
	for (uint32_t i = 0; i < vocab; i++) {
		double x = scale * (uniform() + uniform() + uniform() - 1.5);

		if (kind == 1) /* many ties */
			x = floor(x);
		if (kind == 2 && next() % 3)
			x = -INFINITY;
		if (kind == 3 && next() % 50 == 0) /* a few far above */
			x += 5 * scale;
		logits[i] = x;
	}
	logits[next() % vocab] = scale;
	n_history = next() % 300;
	for (uint32_t i = 0; i < n_history; i++)
		history[i] = next() % (vocab + 5);
	params = (struct kvt_sampler_params)KVT_SAMPLER_PARAMS_INIT;
	params.bias = bias;
	for (uint32_t i = 0; i < 3 && next() % 2; i++)
		if (i * 64 < vocab)
			bias[params.n_bias++] = (struct kvt_logit_bias){ i * 64, next() % 4 ? uniform() : -INFINITY };
	if (next() % 2)
		params.temperature = 0.1 + 3 * uniform();
	if (next() % 2)
		params.top_p = next() % 5 ? uniform() : 0;
	if (next() % 3 == 0)
		params.min_p = next() % 5 ? pow(10, -4 * uniform()) : 1;
	if (next() % 3 == 0)
		params.top_n_sigma = 3 * uniform();
	if (next() % 3 == 0)
		params.top_k = 1 + next() % (next() % 2 ? 10 : vocab);
	if (next() % 2) {
		params.repetition_penalty = 0.5 + uniform();
		params.presence_penalty = uniform() - 0.3;
		params.frequency_penalty = (uniform() - 0.3) / 10;
	}
}

START_TEST(same_as_reference)
{
	static struct entry e[MAX_VOCAB];
	static uint32_t ids[MAX_VOCAB];
	static double probs[MAX_VOCAB];
	struct kvt_logit_bias bias[3];
	uint32_t compared = 0, on_the_edge = 0, refused = 0, rounds = test_rounds(4000, 1000, 200);

	for (uint32_t round = 0; round < rounds; round++) {
		const uint8_t *order = orders[next() % (sizeof(orders) / sizeof(orders[0]))];
		struct kvt_sample row = { .params = &params, .logits = logits, .history = history, .position = round };
		struct kvt_sampler *s;
		int64_t n;
		uint32_t want;

		random_case(bias);
		row.n_history = n_history;
		memcpy(params.order, order, 8);
		ck_assert_int_eq(kvt_sampler_create(vocab, &s), 0);
		n = kvt_sampler_distribution(s, &row, ids, probs, NULL);
		kvt_sampler_destroy(s);
		if (n < 0) { /* all banned: by the bias, or by the bias of what top_n_sigma kept */
			ck_assert(strstr(kvt_last_error(), "no token can be drawn") ||
				  strstr(kvt_last_error(), "banned by its bias"));
			refused++;
			continue;
		}
		want = reference(order, e);
		if (margin < 1e-6) {
			on_the_edge++;
			continue;
		}
		compared++;
		ck_assert_msg(n == want, "round %u, %u tokens: %lld kept, %u expected", round, vocab, (long long)n, want);
		for (uint32_t i = 0; i < want; i++) {
			ck_assert_uint_eq(ids[i], e[i].id);
			ck_assert_msg(fabs(probs[i] - e[i].x) <= 1e-12 * e[i].x + 1e-300, "round %u, token %u: %g, not %g", round,
				      ids[i], probs[i], e[i].x);
		}
	}
	printf("%u distributions compared, %u on the edge of rounding, %u with every token banned\n", compared, on_the_edge,
	       refused);
	ck_assert_uint_gt(compared, rounds * 3 / 4);
}
END_TEST

/*
 * 10^6 draws against the exact probabilities. With k - 1 degrees of freedom,
 * chi-square has mean k - 1 and variance 2(k - 1); five standard deviations are
 * allowed on both sides: draws that are too even are as wrong.
 */
static void chi_square(const char *name, uint32_t address)
{
	const uint32_t draws = test_rounds(1000000, 100000, 20000);
	static struct entry e[MAX_VOCAB];
	static uint64_t seen[MAX_VOCAB];
	struct kvt_sample row = { .params = &params, .logits = logits };
	uint32_t n = reference(orders[0], e), cells = 0, draws_in_cells = 0, failed = 0;
	double chi = 0, rest = 0, rest_seen, freedom;
	struct kvt_sampler *s;

	ck_assert_int_eq(kvt_sampler_create(vocab, &s), 0);
	memset(seen, 0, sizeof(seen));
	for (uint32_t i = 0; i < draws; i++) {
		row.position = address == 0 ? i : 0;
		row.sequence = address == 1 ? i : 0;
		params.seed = address == 2 ? i : 0;
		failed |= kvt_sampler_sample(s, &row, 1);
		seen[row.token]++;
	}
	kvt_sampler_destroy(s);
	ck_assert_int_eq(failed, 0);
	for (uint32_t i = 0; i < n; i++) {
		double expected = draws * e[i].x;

		if (expected < 10) {
			rest += expected;
			continue;
		}
		chi += (seen[e[i].id] - expected) * (seen[e[i].id] - expected) / expected;
		draws_in_cells += seen[e[i].id];
		cells++;
	}
	rest_seen = draws - (double)draws_in_cells; /* what must not be drawn would be here */
	if (rest >= 10) {
		chi += (rest_seen - rest) * (rest_seen - rest) / rest;
		cells++;
	} else {
		ck_assert(rest_seen <= 40);
	}
	freedom = cells - 1;
	printf("%s: chi-square %.1f for %.0f degrees of freedom\n", name, chi, freedom);
	ck_assert_msg(fabs(chi - freedom) < 5 * sqrt(2 * freedom), "%s: chi-square %g for %g degrees of freedom", name, chi,
		      freedom);
}

START_TEST(draws_are_distributed)
{
	vocab = 50;
	for (uint32_t i = 0; i < vocab; i++)
		logits[i] = 3 * uniform();
	params = (struct kvt_sampler_params)KVT_SAMPLER_PARAMS_INIT;
	chi_square("temperature 1, by position", 0);
	chi_square("temperature 1, by sequence", 1);
	chi_square("temperature 1, by seed", 2);
	params.temperature = 0.7;
	params.top_k = 30;
	params.top_p = 0.9;
	params.min_p = 0.02;
	params.flags = KVT_SAMPLER_ADAPTIVE;
	chi_square("all filters, adaptive", 0);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("sampler_reference");
	TCase *t = tcase_create("sampler_reference");
	SRunner *r = srunner_create(s);
	int failed;

	tcase_set_timeout(t, 120);
	tcase_add_test(t, same_as_reference);
	tcase_add_test(t, draws_are_distributed);
	suite_add_tcase(s, t);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed != 0;
}
