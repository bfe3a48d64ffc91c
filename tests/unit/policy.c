// SPDX-License-Identifier: MIT
/*
 * The placement policies: what holds for all of them, against a model that only
 * knows the interface; LRU and S3-FIFO against naive twins; what scan, cost and
 * auto promise; the cascade from tier to tier, and marks with a distance.
 */
#include <check.h>
#include <stdlib.h>
#include <string.h>

#include "lib/rounds.h"
#include "policy/policy.h"

#define NONE KVT_POLICY_NONE

static const struct kvt_policy_ops *const all[] = { &kvt_policy_lru, &kvt_policy_s3fifo, &kvt_policy_scan, &kvt_policy_cost,
						    &kvt_policy_auto };
#define POLICIES ((int)(sizeof(all) / sizeof(all[0])))

static uint64_t seed;

static uint32_t draw(uint32_t n)
{
	seed = seed * 6364136223846793005ull + 1442695040888963407ull;
	return (uint32_t)((seed >> 33) % n);
}

/* ---- all of them ---- */

#define BLOCKS 200

struct mirror {
	bool idle[BLOCKS], clean[BLOCKS];
	uint32_t tier[BLOCKS];
};

static void check_victim(const struct kvt_policy_ops *ops, struct kvt_policy *p, const struct mirror *m)
{
	uint32_t tiers = draw(1 << KVT_TIERS), victim;
	bool clean = draw(2), any = false;

	for (uint32_t i = 0; i < BLOCKS; i++)
		any |= m->idle[i] && m->clean[i] == clean && (tiers >> m->tier[i] & 1);
	victim = ops->victim(p, tiers, clean);
	ck_assert_msg((victim != NONE) == any, "%s: victim %u, candidates: %d", ops->name, victim, any);
	if (victim == NONE)
		return;
	ck_assert_uint_lt(victim, BLOCKS);
	ck_assert_msg(m->idle[victim] && m->clean[victim] == clean && (tiers >> m->tier[victim] & 1),
		      "%s: block %u is no candidate", ops->name, victim);
	ck_assert_msg(ops->victim(p, tiers, clean) == victim, "%s: asked twice, it says two things", ops->name);
}

/* A walk over the whole interface. Returns a digest of all victims. */
static uint64_t walk(const struct kvt_policy_ops *ops, bool keyed, uint64_t from)
{
	struct kvt_policy_params params = { .blocks = BLOCKS, .frames = { 20, 30, 50, 100 }, .keyed = keyed,
					    .reload_ns = { 0, 10, 20, 50 }, .recompute_ns = 100 };
	struct kvt_policy *p = ops->create(&params);
	struct mirror m = { 0 };
	uint64_t digest = 0;

	ck_assert_ptr_nonnull(p);
	seed = from;
	for (uint32_t step = 0; step < test_rounds(15000, 4000, 1000); step++) {
		uint32_t b = draw(BLOCKS), victim;

		switch (draw(8)) {
		case 0:
			if (keyed)
				ops->describe(p, b, &(struct kvt_content){ .key = 1 + draw(1000), .recompute_ns = draw(400),
									   .kind = draw(KVT_POLICY_KINDS) });
			ops->touch(p, b, KVT_USE_READ);
			break;
		case 1:
			ops->touch(p, b, draw(3));
			break;
		case 2:
		case 3:
		case 4:
			m.idle[b] = true;
			m.clean[b] = draw(2);
			m.tier[b] = draw(KVT_TIERS);
			ops->idle(p, b, m.tier[b], m.clean[b]);
			break;
		case 5:
			m.idle[b] = false;
			ops->busy(p, b);
			break;
		case 6:
			m.idle[b] = false;
			ops->forget(p, b);
			break;
		default:
			ops->turn(p);
		}
		check_victim(ops, p, &m);
		victim = ops->victim(p, draw(16), draw(2));
		digest = (digest ^ victim) * 0x100000001b3ull;
	}
	ops->destroy(p);
	return digest;
}

START_TEST(every_victim_is_a_candidate)
{
	const struct kvt_policy_ops *ops = all[_i % POLICIES];
	bool keyed = _i / POLICIES;

	/* C7: the same calls, the same decisions */
	ck_assert_uint_eq(walk(ops, keyed, 1), walk(ops, keyed, 1));
	ck_assert_uint_ne(walk(ops, keyed, 1), walk(ops, keyed, 2));
}
END_TEST

START_TEST(bytes_grow_as_promised)
{
	struct kvt_policy_params few = { .blocks = 100000 }, more = { .blocks = 1100000 };

	for (int keyed = 0; keyed < 2; keyed++) {
		few.keyed = more.keyed = keyed;
		ck_assert_uint_le(all[_i]->bytes(&more) - all[_i]->bytes(&few), 1000000ull * KVT_POLICY_BLOCK_BYTES);
	}
	ck_assert_ptr_eq(kvt_policy_find(all[_i]->name), all[_i]);
	ck_assert_ptr_null(kvt_policy_find("mru"));
}
END_TEST

/* ---- twins: one tier of clean blocks, each access a turn ---- */

#define FRAMES 50
#define CONTENT 400

struct cache {
	const struct kvt_policy_ops *ops;
	struct kvt_policy *p;
	uint32_t where[4 * CONTENT], holds[FRAMES + 1], frames, n, evicted; /* of the last access: content, or NONE */
	uint64_t hits;
};

static void cache_init(struct cache *c, const struct kvt_policy_ops *ops, uint32_t frames)
{
	/* more blocks than are used: ghosts enough that none is lost */
	struct kvt_policy_params params = { .blocks = 40 * FRAMES, .frames = { 0, 0, frames, 0 }, .keyed = true };

	ck_assert_uint_le(frames, FRAMES);
	memset(c, 0xff, sizeof(*c));
	c->ops = ops;
	c->p = ops->create(&params);
	c->frames = frames;
	c->n = 0;
	c->hits = 0;
}

static void use(struct cache *c, uint32_t content, const struct kvt_content *described)
{
	struct kvt_content plain = { .key = content + 1 };
	uint32_t b = c->where[content];

	c->evicted = NONE;
	if (b != NONE) {
		c->hits++;
	} else {
		for (b = 0; c->holds[b] != NONE; b++)
			;
		c->holds[b] = content;
		c->where[content] = b;
		c->n++;
	}
	c->ops->describe(c->p, b, described ? described : &plain);
	c->ops->touch(c->p, b, KVT_USE_READ);
	c->ops->idle(c->p, b, KVT_TIER_RAM, true);
	c->ops->turn(c->p);
	if (c->n <= c->frames)
		return;
	b = c->ops->victim(c->p, 1u << KVT_TIER_RAM, true);
	ck_assert_uint_ne(b, NONE);
	c->evicted = c->holds[b];
	c->ops->forget(c->p, b);
	c->where[c->evicted] = NONE;
	c->holds[b] = NONE;
	c->n--;
}

START_TEST(lru_is_least_recently_used)
{
	uint32_t last[CONTENT] = { 0 }, oldest;
	struct cache c;

	cache_init(&c, &kvt_policy_lru, FRAMES);
	seed = 5;
	for (uint32_t now = 1; now < 20000; now++) {
		uint32_t content = draw(draw(CONTENT) + 1);

		last[content] = now;
		use(&c, content, NULL);
		if (c.evicted == NONE)
			continue;
		oldest = c.evicted;
		for (uint32_t i = 0; i < CONTENT; i++)
			if (c.where[i] != NONE && last[i] < last[oldest])
				oldest = i;
		ck_assert_uint_eq(oldest, c.evicted);
	}
	c.ops->destroy(c.p);
}
END_TEST

/* S3-FIFO with arrays, shifted at each step. */
struct twin {
	uint32_t queue[2][FRAMES + 1], n[2], hits[CONTENT], ghost[CONTENT], evictions;
	bool present[CONTENT];
};

static void take_first(struct twin *t, int q)
{
	t->n[q]--;
	memmove(t->queue[q], t->queue[q] + 1, t->n[q] * sizeof(uint32_t));
}

static uint32_t twin_use(struct twin *t, uint32_t content)
{
	int to;

	if (t->present[content]) {
		t->hits[content] += t->hits[content] < 3;
	} else {
		to = t->ghost[content] && t->evictions - t->ghost[content] <= FRAMES;
		t->ghost[content] = 0;
		t->present[content] = true;
		t->hits[content] = 0;
		t->queue[to][t->n[to]++] = content;
	}
	while (t->n[0] + t->n[1] > FRAMES) {
		int from = t->n[0] && (t->n[0] * 10 >= t->n[0] + t->n[1] || !t->n[1]) ? 0 : 1;
		uint32_t first = t->queue[from][0];

		take_first(t, from);
		if (from ? t->hits[first] : t->hits[first] > 1) {
			t->hits[first] = from ? t->hits[first] - 1 : 0;
			t->queue[1][t->n[1]++] = first;
			continue;
		}
		t->present[first] = false;
		if (!from)
			t->ghost[first] = ++t->evictions;
		return first;
	}
	return NONE;
}

START_TEST(s3fifo_is_its_twin)
{
	struct twin t = { 0 };
	struct cache c;

	cache_init(&c, &kvt_policy_s3fifo, FRAMES);
	seed = 9;
	for (int i = 0; i < 30000; i++) {
		uint32_t content = draw(draw(CONTENT) + 1), evicted = twin_use(&t, content);

		use(&c, content, NULL);
		ck_assert_msg(c.evicted == evicted, "step %d: %u went, not %u", i, c.evicted, evicted);
	}
	ck_assert_uint_gt(c.hits, 9000);
	c.ops->destroy(c.p);
}
END_TEST

/* ---- cycles ---- */

/* Hits of the last of @rounds over @n contents. Belady's rule gives about FRAMES - 1 of them; LRU none. */
static uint64_t hits_of_cycle(const struct kvt_policy_ops *ops, uint32_t n, int rounds)
{
	uint64_t before = 0, hits;
	struct cache c;

	cache_init(&c, ops, FRAMES);
	for (int r = 0; r < rounds; r++) {
		before = c.hits;
		for (uint32_t i = 0; i < n; i++)
			use(&c, i, NULL);
	}
	hits = c.hits - before;
	ops->destroy(c.p);
	return hits;
}

START_TEST(a_cycle_streams_only_what_does_not_fit)
{
	for (uint32_t n = FRAMES + 1; n <= 4 * FRAMES; n += 49) {
		ck_assert_uint_eq(hits_of_cycle(&kvt_policy_lru, n, 8), 0);
		ck_assert_uint_ge(hits_of_cycle(&kvt_policy_scan, n, 8), FRAMES - 2);
		ck_assert_uint_ge(hits_of_cycle(&kvt_policy_auto, n, 8), FRAMES - 5);
	}
}
END_TEST

START_TEST(what_left_the_cycle_goes_first)
{
	struct cache c;

	cache_init(&c, all[2 + _i * 2], FRAMES); /* scan and auto */
	for (int r = 0; r < 10; r++)
		for (uint32_t i = 0; i < 100; i++)
			use(&c, i, NULL);
	for (int r = 0; r < 10; r++)
		for (uint32_t i = 100; i < 200; i++)
			use(&c, i, NULL);
	for (uint32_t i = 0; i < 100; i++)
		ck_assert_uint_eq(c.where[i], NONE);
	c.ops->destroy(c.p);
}
END_TEST

START_TEST(what_is_fetched_ahead_goes_last)
{
	const struct kvt_policy_ops *ops = all[2 + _i]; /* scan, cost and auto */
	struct kvt_policy_params params = { .blocks = 10, .frames = { 0, 0, 10, 0 } };
	struct kvt_policy *p = ops->create(&params);
	bool went[10] = { false };

	for (int r = 0; r < 20; r++) {
		for (uint32_t b = 0; b < 10; b++) {
			ops->touch(p, b, KVT_USE_READ);
			ops->idle(p, b, KVT_TIER_RAM, true);
			ops->turn(p);
		}
	}
	ops->touch(p, 3, KVT_USE_AHEAD);
	ops->touch(p, 9, KVT_USE_AHEAD);
	for (int n = 0; n < 8; n++) {
		uint32_t b = ops->victim(p, 1u << KVT_TIER_RAM, true);

		went[b] = true;
		ops->busy(p, b);
	}
	ck_assert(!went[3] && !went[9]);
	ops->touch(p, 3, KVT_USE_READ); /* used: a candidate like others */
	ck_assert_uint_eq(ops->victim(p, 1u << KVT_TIER_RAM, true), 3);
	ops->destroy(p);
}
END_TEST

START_TEST(dirty_blocks_go_by_their_last_write)
{
	const struct kvt_policy_ops *ops = all[2 + _i];
	struct kvt_policy_params params = { .blocks = 3, .frames = { 0, 0, 3, 0 } };
	struct kvt_policy *p = ops->create(&params);

	for (uint32_t b = 0; b < 3; b++) {
		ops->touch(p, b, KVT_USE_WRITE);
		ops->idle(p, b, KVT_TIER_RAM, false);
		ops->turn(p);
	}
	ops->touch(p, 0, KVT_USE_READ); /* reading does not make it likelier to be written again */
	ops->turn(p);
	ck_assert_uint_eq(ops->victim(p, 1u << KVT_TIER_RAM, false), 0);
	ops->touch(p, 0, KVT_USE_WRITE);
	ck_assert_uint_eq(ops->victim(p, 1u << KVT_TIER_RAM, false), 1);
	ops->destroy(p);
}
END_TEST

/* ---- cost ---- */

/* A hot set of 40 in 50 frames, and a scan of one-off content between. */
static uint64_t hits_beside_scan(const struct kvt_policy_ops *ops)
{
	uint32_t scan = 40;
	struct cache c;
	uint64_t hits;

	cache_init(&c, ops, FRAMES);
	seed = 3;
	for (int i = 0; i < 20000; i++) {
		uint32_t content = draw(40);

		if (i % 2) {
			scan = scan + 1 < 4 * CONTENT ? scan + 1 : 40;
			content = scan;
		}
		use(&c, content, NULL);
	}
	hits = c.hits;
	ops->destroy(c.p);
	return hits;
}

START_TEST(a_scan_does_not_push_out_what_is_used)
{
	ck_assert_uint_lt(hits_beside_scan(&kvt_policy_lru), 7500);
	ck_assert_uint_gt(hits_beside_scan(&kvt_policy_cost), 9200);
	ck_assert_uint_gt(hits_beside_scan(&kvt_policy_auto), 9200);
}
END_TEST

/* Two kinds of content that nothing else tells apart: one comes back, one does not. */
START_TEST(kinds_are_learned)
{
	uint64_t hits[2];

	for (int told = 0; told < 2; told++) {
		uint32_t once = 200;
		struct cache c;

		cache_init(&c, &kvt_policy_cost, FRAMES);
		seed = 4;
		for (uint32_t i = 0; i < 40000; i++) {
			/* what is of kind 5 is used twice, 40 uses of such apart; three in four are of kind 2, and used once */
			uint32_t content = i % 4 ? once : i / 4 % 40 + i / 320 % 4 * 40;

			once = once + 1 < 4 * CONTENT ? once + 1 : 200;
			use(&c, content, &(struct kvt_content){ .key = (uint64_t)i / 4 / 80 * 10000 + content + 1,
								.kind = told ? (i % 4 ? 2 : 5) : 0 });
		}
		hits[told] = c.hits;
		c.ops->destroy(c.p);
	}
	ck_assert_msg(hits[1] > 2 * hits[0] + 1000, "%llu hits without kinds, %llu with", (unsigned long long)hits[0],
		      (unsigned long long)hits[1]);
}
END_TEST

/* Of content that is used alike, what costs more to compute stays. */
START_TEST(saving_counts)
{
	struct kvt_policy_params params = { .blocks = 101, .frames = { 0, 0, 100, 0 }, .keyed = true,
					    .reload_ns = { 0, 0, 10, 0 }, .recompute_ns = 100 };
	struct kvt_policy *p = kvt_policy_cost.create(&params);
	uint32_t dear = 0;

	for (uint32_t b = 0; b < 100; b++) {
		kvt_policy_cost.describe(p, b, &(struct kvt_content){ .key = b + 1, .recompute_ns = b % 2 ? 400 : 100 });
		kvt_policy_cost.touch(p, b, KVT_USE_READ);
		kvt_policy_cost.idle(p, b, KVT_TIER_RAM, true);
		kvt_policy_cost.turn(p);
	}
	for (int n = 0; n < 50; n++) {
		uint32_t b = kvt_policy_cost.victim(p, 1u << KVT_TIER_RAM, true);

		dear += b % 2;
		kvt_policy_cost.forget(p, b);
	}
	ck_assert_uint_le(dear, 15);
	kvt_policy_cost.destroy(p);
}
END_TEST

/* ---- tiers ---- */

START_TEST(cascade_skips_what_is_not_worth_loading)
{
	struct kvt_policy_params p = { .frames = { 10, 10, 10, 10 }, .reload_ns = { 0, 10, 120, 90 }, .recompute_ns = 100 };

	ck_assert_uint_eq(kvt_policy_below(&p, UINT32_MAX, 0), KVT_TIER_GPU);
	ck_assert_uint_eq(kvt_policy_below(&p, KVT_TIER_GPU, 0), KVT_TIER_PINNED);
	ck_assert_uint_eq(kvt_policy_below(&p, KVT_TIER_PINNED, 0), KVT_TIER_DISK); /* loading from ram costs 120 of 100 */
	ck_assert_uint_eq(kvt_policy_below(&p, KVT_TIER_PINNED, 121), KVT_TIER_RAM);
	ck_assert_uint_eq(kvt_policy_below(&p, KVT_TIER_PINNED, 90), KVT_TIERS);
	ck_assert_uint_eq(kvt_policy_below(&p, KVT_TIER_DISK, 0), KVT_TIERS);
	p.frames[KVT_TIER_PINNED] = 0;
	ck_assert_uint_eq(kvt_policy_below(&p, KVT_TIER_GPU, 121), KVT_TIER_RAM);
	p.recompute_ns = 0; /* costs are not known: no tier is skipped */
	ck_assert_uint_eq(kvt_policy_below(&p, KVT_TIER_GPU, 0), KVT_TIER_RAM);
}
END_TEST

START_TEST(a_level_at_the_edge_switches_once)
{
	uint32_t switches = 0;
	bool on = false;

	for (int i = 0; i < 1000; i++) {
		bool was = on;

		switches += kvt_policy_between(&on, 100 + i % 2, 50, 100) != was; /* about the upper mark */
	}
	ck_assert_uint_eq(switches, 1);
	for (int i = 0; i < 1000; i++) {
		bool was = on;

		switches += kvt_policy_between(&on, 50 + i % 2, 50, 100) != was; /* and the lower one */
	}
	ck_assert_uint_eq(switches, 2);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("policy");
	TCase *c = tcase_create("policy");
	SRunner *r = srunner_create(s);
	int failed;

	tcase_add_loop_test(c, every_victim_is_a_candidate, 0, 2 * POLICIES);
	tcase_add_loop_test(c, bytes_grow_as_promised, 0, POLICIES);
	tcase_add_test(c, lru_is_least_recently_used);
	tcase_add_test(c, s3fifo_is_its_twin);
	tcase_add_test(c, a_cycle_streams_only_what_does_not_fit);
	tcase_add_loop_test(c, what_left_the_cycle_goes_first, 0, 2);
	tcase_add_loop_test(c, what_is_fetched_ahead_goes_last, 0, 3);
	tcase_add_loop_test(c, dirty_blocks_go_by_their_last_write, 0, 3);
	tcase_add_test(c, a_scan_does_not_push_out_what_is_used);
	tcase_add_test(c, kinds_are_learned);
	tcase_add_test(c, saving_counts);
	tcase_add_test(c, cascade_skips_what_is_not_worth_loading);
	tcase_add_test(c, a_level_at_the_edge_switches_once);
	suite_add_tcase(s, c);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed ? 1 : 0;
}
