// SPDX-License-Identifier: MIT
/*
 * Replaying traces: by hand on small ones, the optimum against trying
 * everything, every policy against the optimum, auto against LRU and S3-FIFO on
 * traces made here and (where the inputs are) on real ones.
 */
#include <check.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "lib/rounds.h"
#include "tools/replay.h"

static const struct kvt_policy_ops *const all[] = { &kvt_policy_lru, &kvt_policy_s3fifo, &kvt_policy_scan, &kvt_policy_cost,
						    &kvt_policy_auto };
#define POLICIES 5

static uint64_t seed;

static uint32_t draw(uint32_t n)
{
	seed = seed * 6364136223846793005ull + 1442695040888963407ull;
	return (uint32_t)((seed >> 33) % n);
}

static void read_data(const char *name, enum trace_format format, struct trace *t)
{
	const char *source = getenv("KVT_SOURCE");
	char path[4096];

	snprintf(path, sizeof(path), "%s/tests/data/traces/%s", source ? source : ".", name);
	ck_assert_msg(!trace_read(path, format, t), "%s", kvt_last_error());
}

static struct replay_result run(const struct trace *t, const struct kvt_policy_ops *policy, const uint32_t frames[KVT_TIERS])
{
	struct replay_params p = { .policy = policy, .token_bytes = 1024, .tokens_per_s = 1000,
				   .load_bytes_per_s = { 0, 10 << 20, 8 << 20, 4 << 20 } };
	struct replay_result r;

	memcpy(p.frames, frames, sizeof(p.frames));
	ck_assert_msg(!replay_run(t, &p, &r), "%s", kvt_last_error());
	return r;
}

static uint64_t hits_of(const struct trace *t, const struct kvt_policy_ops *policy, uint32_t frames)
{
	struct replay_result r = run(t, policy, (uint32_t[KVT_TIERS]){ 0, 0, frames, 0 });

	return r.hits[KVT_TIER_RAM];
}

static uint64_t optimum(const struct trace *t, uint64_t frames)
{
	uint64_t hits;

	ck_assert_msg(!replay_optimum(t, frames, &hits), "%s", kvt_last_error());
	return hits;
}

/* ---- by hand ---- */

START_TEST(shared_prefix_by_hand)
{
	struct replay_result r;
	struct trace t;

	read_data("shared_prefix.jsonl", TRACE_MOONCAKE, &t);
	ck_assert_uint_eq(t.n_requests, 7);
	ck_assert_uint_eq(t.n_distinct, 7);
	ck_assert_uint_eq(t.n_blocks, 17);
	ck_assert_uint_eq(trace_tokens(&t, &t.requests[1], 2), 1300 - 1024); /* a partial block */
	/* room for all: 0 1 again, 0 1 2 again, 4 5 again, 0 1 2 again */
	r = run(&t, &kvt_policy_lru, (uint32_t[KVT_TIERS]){ 7, 0, 0, 0 });
	ck_assert_uint_eq(r.hits[KVT_TIER_GPU], 10);
	ck_assert_uint_eq(r.dropped, 0);
	/* 1024, 1535 of 1536 (the last token is computed), 599 of 600, 1535 */
	ck_assert_uint_eq(r.tokens_hit, 1024 + 1535 + 599 + 1535);
	ck_assert_uint_eq(r.tokens_hit + r.tokens_computed, 1536 + 1300 + 600 + 1536 + 600 + 100 + 1536);
	ck_assert_uint_eq(optimum(&t, 7), 10);
	/*
	 * Three blocks, LRU: 0 1 2; 0 and 1 hit, and 2 goes as the oldest leaf: 0 1 3; 3 and 1 go: 0 4 5; 0 hits, 5 and 4
	 * go: 0 1 2; 2 and 1 go: 0 4 5; 0 goes: 4 5 6; nothing hits.
	 */
	r = run(&t, &kvt_policy_lru, (uint32_t[KVT_TIERS]){ 0, 0, 3, 0 });
	ck_assert_uint_eq(r.hits[KVT_TIER_RAM], 3);
	ck_assert_uint_eq(optimum(&t, 3), 8); /* keep 0 1 2 */
	/* two tiers: one block on top, and what it gives down */
	r = run(&t, &kvt_policy_lru, (uint32_t[KVT_TIERS]){ 1, 0, 0, 6 });
	ck_assert_uint_eq(r.hits[KVT_TIER_GPU] + r.hits[KVT_TIER_DISK], 10);
	ck_assert_uint_eq(r.loaded_bytes[KVT_TIER_DISK], r.hits[KVT_TIER_DISK] * 512 * 1024);
	ck_assert_uint_gt(r.stored_bytes[KVT_TIER_DISK], 0);
	trace_free(&t);
}
END_TEST

START_TEST(session_by_hand)
{
	struct trace t;

	read_data("session.json", TRACE_AGENTIC, &t);
	ck_assert_uint_eq(t.n_requests, 5);
	ck_assert_uint_eq(t.block_tokens, 64);
	ck_assert_uint_eq(t.n_distinct, 6); /* 1 2 3 4 of model a, 1 2 of model b: models never share */
	ck_assert(t.requests[1].time == 5.5 && t.requests[2].time == 6 && t.requests[3].time == 6.5);
	ck_assert_uint_eq(t.blocks[t.requests[1].first], t.blocks[t.requests[0].first]); /* a sub-agent shares */
	/* 2 of the sub-agent's, 3 of the last of model a */
	ck_assert_uint_eq(hits_of(&t, &kvt_policy_auto, 6), 5);
	ck_assert_uint_eq(optimum(&t, 6), 5);
	trace_free(&t);
}
END_TEST

/* ---- bad input, each fault alone ---- */

#define ROW "{\"timestamp\": 5, \"input_length\": 600, \"output_length\": 1, \"hash_ids\": [1, 2]}\n"
#define ONE(rest) "{\"block_size\": 64, \"requests\": [{\"t\": 1, \"type\": \"s\", \"model\": \"a\", " rest "}]}"

static const struct {
	enum trace_format format;
	const char *text, *message;
} refused[] = {
	{ TRACE_MOONCAKE, "", "x: no request has a whole block" },
	{ TRACE_MOONCAKE, ROW "\n" ROW, "x: line 2: '[' or '{' expected near end of file (column 0)" },
	{ TRACE_MOONCAKE, ROW "[]\n", "x: line 2: an object is needed" },
	{ TRACE_MOONCAKE, ROW "{\"timestamp\": 4, \"input_length\": 1, \"output_length\": 1, \"hash_ids\": [1]}",
	  "x: line 2: timestamp: 4 is before the line above's 5" },
	{ TRACE_MOONCAKE, "{\"timestamp\": -1, \"input_length\": 1, \"output_length\": 1, \"hash_ids\": [1]}",
	  "x: line 1: timestamp: a number from 0 on is needed" },
	{ TRACE_MOONCAKE, "{\"timestamp\": 0, \"input_length\": 0, \"output_length\": 1, \"hash_ids\": []}",
	  "x: line 1: input_length: a whole number from 1 to 1073741824 is needed" },
	{ TRACE_MOONCAKE, "{\"timestamp\": 0, \"input_length\": 5, \"hash_ids\": [1]}",
	  "x: line 1: output_length: a whole number from 0 to 1073741824 is needed" },
	{ TRACE_MOONCAKE, "{\"timestamp\": 0, \"input_length\": 513, \"output_length\": 1, \"hash_ids\": [1]}",
	  "x: line 1: hash_ids: 1 ids, but 513 tokens are 2 blocks of 512" },
	{ TRACE_MOONCAKE, "{\"timestamp\": 0, \"input_length\": 513, \"output_length\": 1, \"hash_ids\": 7}",
	  "x: line 1: hash_ids: a list is needed" },
	{ TRACE_MOONCAKE, "{\"timestamp\": 0, \"input_length\": 513, \"output_length\": 1, \"hash_ids\": [1, 1.5]}",
	  "x: line 1: hash_ids[1]: a whole number from 0 on is needed" },
	{ TRACE_MOONCAKE, "{\"timestamp\": 0, \"input_length\": 513, \"output_length\": 1, \"hash_ids\": [7, 7]}",
	  "x: line 1: hash_ids: 7 is there twice: an id stands for a whole prefix" },
	{ TRACE_AGENTIC, "[]", "x: block_size: a whole number from 1 to 65536 is needed" },
	{ TRACE_AGENTIC, "{\"block_size\": 0, \"requests\": []}", "x: block_size: a whole number from 1 to 65536 is needed" },
	{ TRACE_AGENTIC, "{\"block_size\": 64}", "x: request 1: requests: a list is needed" },
	{ TRACE_AGENTIC, "{\"block_size\": 64, \"requests\": [7]}", "x: request 1: an object with a type is needed" },
	{ TRACE_AGENTIC, "{\"block_size\": 64, \"requests\": [{\"t\": 1, \"type\": \"q\"}]}",
	  "x: request 1: type: \"q\" is not s, n or subagent" },
	{ TRACE_AGENTIC, "{\"block_size\": 64, \"requests\": [{\"t\": 1, \"type\": \"n\", \"in\": 64, \"out\": 1, \"hash_ids\": [1]}]}",
	  "x: request 1: model: a name is needed" },
	{ TRACE_AGENTIC, ONE("\"in\": 127, \"out\": 0, \"hash_ids\": [1, 2]"),
	  "x: request 1: hash_ids: 2 ids, but 127 tokens are 1 blocks of 64" },
	{ TRACE_AGENTIC, ONE("\"in\": 63, \"out\": 0, \"hash_ids\": []"), "x: no request has a whole block" },
};

START_TEST(bad_input_is_refused_by_name)
{
	struct trace t;

	ck_assert_int_eq(trace_parse(refused[_i].text, strlen(refused[_i].text), "x", refused[_i].format, &t), -EINVAL);
	ck_assert_str_eq(kvt_last_error(), refused[_i].message);
	ck_assert_ptr_null(t.requests);
}
END_TEST

/* ---- traces made here ---- */

struct maker {
	char *text;
	size_t len, cap;
	double time;
};

/* A request for blocks first..first + n - 1 of @name, behind @n_root blocks of @root; ids are made unique. */
static void ask(struct maker *m, uint32_t root, uint32_t n_root, uint32_t name, uint32_t n, uint32_t output)
{
	size_t need = m->len + 200 + 24 * (size_t)(n_root + n);

	if (need > m->cap) {
		m->cap = need * 2;
		m->text = realloc(m->text, m->cap);
		ck_assert_ptr_nonnull(m->text);
	}
	m->time += 10;
	m->len += (size_t)sprintf(m->text + m->len, "{\"timestamp\":%g,\"input_length\":%u,\"output_length\":%u,\"hash_ids\":[", m->time,
				  (n_root + n) * 512, output);
	for (uint32_t i = 0; i < n_root + n; i++) {
		unsigned long long id = i < n_root ? (root + 1ull) << 20 | i : (name + 1000ull) << 20 | (i - n_root);

		m->len += (size_t)sprintf(m->text + m->len, "%s%llu", i ? "," : "", id);
	}
	m->len += (size_t)sprintf(m->text + m->len, "]}\n");
}

static void finish(struct maker *m, struct trace *t)
{
	ck_assert_msg(!trace_parse(m->text, m->len, "made", TRACE_MOONCAKE, t), "%s", kvt_last_error());
	free(m->text);
}

/* About Zipf's law: rank r with probability about 1 / r. */
static uint32_t zipf(uint32_t n)
{
	uint32_t bits = 32 - (uint32_t)__builtin_clz(n), octave = draw(bits), r = (1u << octave) - 1 + draw(1u << octave);

	return r < n ? r : draw(n);
}

static void make_random(struct trace *t, uint32_t requests)
{
	struct maker m = { 0 };

	for (uint32_t i = 0; i < requests; i++)
		ask(&m, draw(2), draw(3), draw(3), 1 + draw(3), draw(100));
	finish(&m, t);
}

/* ---- the optimum ---- */

/* Most hits from request @r on, with the cached set @set (a bit a block): tries every set that may be kept. */
static uint32_t try_all(const struct trace *t, uint32_t r, uint32_t set, uint32_t frames, int16_t *memo)
{
	const struct trace_request *q = &t->requests[r];
	uint32_t hits = 0, have = set, best = 0;

	if (r == t->n_requests)
		return 0;
	if (memo[r << t->n_distinct | set] >= 0)
		return (uint32_t)memo[r << t->n_distinct | set];
	while (hits < q->n && (set >> t->blocks[q->first + hits] & 1))
		hits++;
	for (uint32_t d = 0; d < q->n; d++)
		have |= 1u << t->blocks[q->first + d];
	for (uint32_t keep = have;; keep = (keep - 1) & have) {
		if ((uint32_t)__builtin_popcount(keep) <= frames) {
			uint32_t more = try_all(t, r + 1, keep, frames, memo);

			best = more > best ? more : best;
		}
		if (!keep)
			break;
	}
	memo[r << t->n_distinct | set] = (int16_t)(hits + best);
	return hits + best;
}

START_TEST(optimum_is_what_trying_everything_finds)
{
	uint32_t tried = 0;
	struct trace t;

	for (seed = 1; tried < test_rounds(40, 20, 4); seed++) {
		int16_t *memo;

		make_random(&t, 8);
		if (t.n_distinct <= 10) {
			memo = malloc(sizeof(*memo) << t.n_distinct << 3);
			for (uint32_t frames = 0; frames <= 6; frames += 2) {
				memset(memo, 0xff, sizeof(*memo) << t.n_distinct << 3);
				ck_assert_uint_eq(optimum(&t, frames), try_all(&t, 0, 0, frames, memo));
			}
			free(memo);
			tried++;
		}
		trace_free(&t);
	}
}
END_TEST

START_TEST(no_policy_beats_the_optimum)
{
	struct trace t;

	seed = 77 + (uint64_t)_i;
	make_random(&t, test_rounds(300, 100, 30));
	for (uint32_t frames = 1; frames <= t.n_distinct; frames++) {
		uint64_t most = optimum(&t, frames);

		for (uint32_t p = 0; p < POLICIES; p++) {
			uint32_t a = draw(frames + 1), b = draw(frames - a + 1);
			uint32_t split[KVT_TIERS] = { a, 0, b, frames - a - b };
			struct replay_result r = run(&t, all[p], split), again = run(&t, all[p], split);
			uint64_t hits = r.hits[0] + r.hits[1] + r.hits[2] + r.hits[3];

			ck_assert_uint_le(hits, most);
			if (frames == t.n_distinct)
				ck_assert_uint_eq(hits, most);
			ck_assert_mem_eq(&r, &again, sizeof(r)); /* C7 */
		}
	}
	trace_free(&t);
}
END_TEST

START_TEST(a_tier_that_is_slower_than_computing_is_skipped)
{
	struct replay_params p = { .policy = &kvt_policy_auto, .frames = { 2, 0, 0, 7 }, .token_bytes = 1024,
				   .tokens_per_s = 1000, .load_bytes_per_s = { 0, 0, 0, 1000 * 1024 - 1 } };
	struct replay_result r;
	struct trace t;

	read_data("shared_prefix.jsonl", TRACE_MOONCAKE, &t);
	ck_assert(!replay_run(&t, &p, &r));
	ck_assert_uint_eq(r.hits[KVT_TIER_DISK], 0);
	ck_assert_uint_eq(r.stored_bytes[KVT_TIER_DISK], 0);
	p.load_bytes_per_s[KVT_TIER_DISK] = 1001 * 1024;
	ck_assert(!replay_run(&t, &p, &r));
	ck_assert_uint_gt(r.hits[KVT_TIER_DISK], 0);
	trace_free(&t);
}
END_TEST

/* ---- auto against the others ---- */

enum { ZIPF, ZIPF_AND_SCAN, LOOP, SHIFTING, TENANTS, GROWING, SHAPES };

static void make_shape(int shape, struct trace *t)
{
	uint32_t turns[200] = { 0 };
	struct maker m = { 0 };

	seed = 11;
	for (uint32_t i = 0; i < 3000; i++) {
		uint32_t who = zipf(200);

		switch (shape) {
		case ZIPF:
			ask(&m, 0, 2, zipf(1000), 10, 100);
			break;
		case ZIPF_AND_SCAN: /* every third request is never seen again */
			ask(&m, 0, 2, i % 3 ? zipf(1000) : 10000 + i, 10, 100);
			break;
		case LOOP:
			ask(&m, 0, 0, i % 150, 10, 100);
			break;
		case SHIFTING: /* another working set every 500 requests */
			ask(&m, 0, 2, i / 500 * 1000 + zipf(300), 10, 100);
			break;
		case TENANTS: /* conversations of ten tenants, each with its system prompt, that grow and end */
			if (++turns[who] > 12)
				turns[who] = 1;
			ask(&m, who % 10, 8, who * 100 + (i / 1500), 2 * turns[who], 20 + draw(1000));
			break;
		default: /* one prompt that only grows, and a stray one now and then */
			ask(&m, 0, 1, i % 20 ? 1 : 10000 + i, i % 20 ? 20 + i / 100 : 5, 100);
		}
	}
	finish(&m, t);
}

START_TEST(auto_on_made_traces)
{
	static const uint32_t percent[] = { 1, 5, 10, 25 };
	struct trace t;

	make_shape(_i, &t);
	for (uint32_t k = 0; k < 4; k += test_rounds(1, 2, 4)) {
		uint32_t frames = t.n_distinct * percent[k] / 100;
		uint64_t lru = hits_of(&t, &kvt_policy_lru, frames), s3 = hits_of(&t, &kvt_policy_s3fifo, frames);
		uint64_t got = hits_of(&t, &kvt_policy_auto, frames), best = optimum(&t, frames);

		printf("shape %d, %2u %%: lru %llu, s3fifo %llu, auto %llu, optimum %llu\n", _i, percent[k], (unsigned long long)lru,
		       (unsigned long long)s3, (unsigned long long)got, (unsigned long long)best);
		/* it has to learn in few requests what the others assume; in the smallest caches that shows */
		ck_assert_msg((double)got >= 0.99 * (double)lru, "%u %%", percent[k]);
		ck_assert_msg((double)got >= 0.88 * (double)s3, "%u %%", percent[k]);
		if (_i == LOOP)
			ck_assert_msg((double)got >= 0.9 * (double)best, "%u %%", percent[k]);
	}
	trace_free(&t);
}
END_TEST

START_TEST(auto_on_real_traces)
{
	static const char *const names[] = { "mooncake_synthetic_trace.jsonl", "agentic-cc/trace_0103.json", "agentic-cc/trace_0187.json",
					     "agentic-cc/trace_0291.json",     "agentic-cc/trace_0504.json", "agentic-cc/trace_0529.json",
					     "agentic-cc/trace_0599.json" };
	static const uint32_t percent[] = { 1, 5, 10, 25 };
	const char *inputs = getenv("KVT_INPUTS");
	char path[4096];
	struct trace t;

	snprintf(path, sizeof(path), "%s/traces/%s", inputs ? inputs : "../shared/inputs", names[_i]);
	if (trace_read(path, _i ? TRACE_AGENTIC : TRACE_MOONCAKE, &t)) {
		printf("SKIP: auto_on_real_traces: %s is not there (KVT_INPUTS names its folder)\n", path);
		return;
	}
	for (uint32_t k = 0; k < 4; k += test_rounds(1, 2, 4)) {
		uint32_t frames = t.n_distinct * percent[k] / 100 ? t.n_distinct * percent[k] / 100 : 1;
		uint64_t got = hits_of(&t, &kvt_policy_auto, frames);

		ck_assert_uint_ge(got, hits_of(&t, &kvt_policy_lru, frames));
		ck_assert_uint_ge(got, hits_of(&t, &kvt_policy_s3fifo, frames));
	}
	trace_free(&t);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("replay");
	TCase *c = tcase_create("replay");
	SRunner *r = srunner_create(s);
	int failed;

	tcase_add_test(c, shared_prefix_by_hand);
	tcase_add_test(c, session_by_hand);
	tcase_add_loop_test(c, bad_input_is_refused_by_name, 0, sizeof(refused) / sizeof(refused[0]));
	tcase_add_test(c, optimum_is_what_trying_everything_finds);
	tcase_add_loop_test(c, no_policy_beats_the_optimum, 0, 5);
	tcase_add_test(c, a_tier_that_is_slower_than_computing_is_skipped);
	tcase_add_loop_test(c, auto_on_made_traces, 0, SHAPES);
	tcase_add_loop_test(c, auto_on_real_traces, 0, (int)test_rounds(7, 3, 2));
	suite_add_tcase(s, c);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed ? 1 : 0;
}
