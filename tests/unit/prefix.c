// SPDX-License-Identifier: MIT
/* The prefix cache's calls: what is served is what was inserted, whoever writes, evicts or runs out of room meanwhile. */
#include <check.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cache/prefix.h"
#include "lib/prefix_rig.h"
#include "lib/rounds.h"

/* k blocks + {-1, 0, 1} tokens: all of them are found, and read back as written. */
START_TEST(a_hit_gives_what_was_written)
{
	struct prefix_rig r = rig_make((struct rig_config){ 0 });
	uint32_t n = 3 * r.chunk - 1 + (uint32_t)_i, tokens[4 * 64];
	struct kvt_prefix_match m;
	struct kvt_seq *seq;

	rig_prompt(tokens, n, 1, 0);
	rig_compute(&r, 0, tokens, n);
	ck_assert(!kvt_prefix_match(r.cache, &r.roots[0], tokens, n, &m));
	ck_assert_uint_eq(m.tokens, n);
	ck_assert_uint_eq(m.chunks, (n + r.chunk - 1) / r.chunk);
	kvt_prefix_release(r.cache, &m);
	/* one token more or other than what is known: exactly the rest is found */
	tokens[n - 5]++;
	ck_assert(!kvt_prefix_match(r.cache, &r.roots[0], tokens, n, &m));
	ck_assert_uint_eq(m.tokens, n - 5);
	ck_assert(!kvt_seq_create(r.cache, &seq));
	ck_assert_int_eq(kvt_prefix_attach(r.cache, &m, n, seq), n - 5);
	kvt_prefix_release(r.cache, &m);
	rig_expect(0, seq, tokens, n - 5);
	/* it goes on from there; nobody else sees that */
	rig_extend(&r, 0, seq, tokens, n);
	rig_expect(0, seq, tokens, n);
	tokens[n - 5]--;
	rig_serve(&r, 0, tokens, n, n);
	kvt_seq_free(seq);
	rig_free(&r);
}
END_TEST

/* Roots share nothing; the same root does. Ids that differ in one byte are other tokens. */
START_TEST(roots_and_tokens_do_not_collide)
{
	struct prefix_rig r = rig_make((struct rig_config){ 0 });
	uint32_t a[128], b[128];
	const uint32_t ids[] = { 65, 321, 0, 65536, 0x7fffffff, UINT32_MAX };

	for (uint32_t i = 0; i < 6; i++) {
		for (uint32_t k = 0; k < 128; k++)
			a[k] = ids[i];
		rig_serve(&r, 0, a, 128, 0);
		rig_compute(&r, 0, a, 128);
		for (uint32_t root = 1; root < RIG_ROOTS; root++)
			rig_serve(&r, root, a, 128, 0);
		rig_serve(&r, 0, a, 128, 128);
	}
	for (uint32_t k = 0; k < 128; k++)
		b[k] = 65 + (k % 64 == 63);
	rig_serve(&r, 0, b, 128, 63);
	for (uint32_t root = 1; root < RIG_ROOTS; root++) {
		rig_compute(&r, root, b, 128);
		rig_serve(&r, root, b, 128, 128);
	}
	rig_free(&r);
}
END_TEST

/* Asked for k chunks, k go: from memory to disk while that has room, and what is matched stays. */
START_TEST(evicts_what_was_asked_for)
{
	struct prefix_rig r = rig_make((struct rig_config){ .disk = true });
	uint32_t tokens[20][2 * 64], bytes;
	struct kvt_prefix_stats st = KVT_INIT(st), after = KVT_INIT(after);
	struct kvt_prefix_match m;
	struct kvt_seq *seq;

	for (uint32_t i = 0; i < 20; i++) {
		rig_prompt(tokens[i], 128, 100 + i, 0);
		rig_compute(&r, 0, tokens[i], 128);
	}
	ck_assert(!kvt_prefix_match(r.cache, &r.roots[0], tokens[0], 128, &m));
	ck_assert(!kvt_prefix_stats(r.cache, &st));
	ck_assert_uint_eq(st.chunks_pinned, 2);
	ck_assert_int_eq(kvt_prefix_evict(r.cache, KVT_TIER_RAM, 7), 7);
	ck_assert(!kvt_prefix_stats(r.cache, &after));
	ck_assert_uint_eq(after.demoted - st.demoted, 7);
	ck_assert_uint_eq(after.dropped, st.dropped);
	ck_assert_uint_eq(after.chunks_free, st.chunks_free);
	for (uint32_t i = 0; i < 20; i++)
		rig_serve(&r, 0, tokens[i], 128, 128);
	ck_assert_int_eq(kvt_cache_flush(r.cache), 0);
	ck_assert_int_eq(kvt_prefix_evict(r.cache, KVT_TIER_DISK, 9), 9);
	ck_assert(!kvt_prefix_stats(r.cache, &after));
	ck_assert_uint_eq(after.chunks_free, st.chunks_free + 9);
	/* all that can go goes; the pinned path is still there to be read */
	bytes = 2 * 20 - 9 - 2;
	ck_assert_int_eq(kvt_prefix_evict(r.cache, KVT_TIER_DISK, 1000), bytes);
	ck_assert(!kvt_seq_create(r.cache, &seq));
	ck_assert_int_eq(kvt_prefix_attach(r.cache, &m, 128, seq), 128);
	rig_expect(0, seq, tokens[0], 128);
	kvt_prefix_release(r.cache, &m);
	ck_assert_int_eq(kvt_prefix_evict(r.cache, KVT_TIER_RAM, 1000), 2);
	rig_expect(0, seq, tokens[0], 128); /* the sequence's own references */
	kvt_seq_free(seq);
	rig_free(&r);
}
END_TEST

/* More prompts than any tier has room for: all are computed, what is served is right, and what is kept is bounded. */
START_TEST(a_full_cache_goes_on)
{
	struct prefix_rig r = rig_make((struct rig_config){ .disk = _i == 1, .small = true });
	struct kvt_prefix_stats st = KVT_INIT(st);

	rig_crowd(&r, 8, test_rounds(125, 20, 20));
	ck_assert(!kvt_prefix_stats(r.cache, &st));
	ck_assert_uint_eq(st.chunks_pinned, 0);
	ck_assert_uint_eq(st.chunks_free + st.chunks_evictable, st.chunks);
	ck_assert_uint_gt(st.dropped, 0);
	rig_free(&r);
}
END_TEST

/* Dropping a chunk that a sequence uses makes no room, so it stays, however cold; others make way. */
START_TEST(what_runs_keeps_its_chunks)
{
	struct prefix_rig r = rig_make((struct rig_config){ .small = true });
	struct kvt_prefix_stats st = KVT_INIT(st);
	uint32_t tokens[256], others[128];
	struct kvt_prefix_match m;
	struct kvt_seq *seq;

	rig_prompt(tokens, 256, 1, 0);
	rig_compute(&r, 0, tokens, 256);
	ck_assert(!kvt_prefix_match(r.cache, &r.roots[0], tokens, 256, &m));
	ck_assert(!kvt_seq_create(r.cache, &seq));
	ck_assert_int_eq(kvt_prefix_attach(r.cache, &m, 256, seq), 256);
	kvt_prefix_release(r.cache, &m);
	for (uint32_t i = 0; i < 60; i++) {
		rig_prompt(others, 128, 100 + i, 0);
		rig_compute(&r, 0, others, 128);
	}
	ck_assert(!kvt_prefix_stats(r.cache, &st));
	ck_assert_uint_gt(st.dropped, 40);
	rig_serve(&r, 0, tokens, 256, 256);
	kvt_seq_free(seq);
	rig_free(&r);
}
END_TEST

/* Tokens found of eight prompts that come back, while one-off prompts of as many chunks each pass through a tree of 60. */
static uint64_t found_beside_scan(uint32_t policy, uint32_t *dropped)
{
	struct prefix_rig r = rig_make((struct rig_config){ .policy = policy, .chunks = 60 });
	uint32_t rounds = test_rounds(60, 25, 15), tokens[256], once = 1000;
	struct kvt_prefix_stats st = KVT_INIT(st);
	uint64_t found = 0;

	for (uint32_t round = 0; round < rounds; round++) {
		for (uint32_t i = 0; i < 8; i++) {
			rig_prompt(tokens, 256, i, 0);
			found += rig_serve_some(&r, 0, tokens, 256);
			rig_compute(&r, 0, tokens, 256);
			for (uint32_t k = 0; k < 2; k++) {
				rig_prompt(tokens, 256, once++, 0);
				rig_compute(&r, 0, tokens, 256);
			}
		}
	}
	ck_assert(!kvt_prefix_stats(r.cache, &st));
	*dropped = (uint32_t)st.dropped;
	rig_free(&r);
	return found * 100 / (rounds * 8 * 256);
}

/* What is dropped is the policy's to say: prompts that pass once push out what comes back for LRU, not for who learns. */
START_TEST(a_scan_does_not_push_out_what_comes_back)
{
	uint32_t dropped[3];
	uint64_t lru = found_beside_scan(KVT_POLICY_LRU, &dropped[0]);
	uint64_t learned = found_beside_scan(KVT_POLICY_AUTO, &dropped[1]);
	uint64_t cost = found_beside_scan(KVT_POLICY_COST, &dropped[2]);

	printf("of what comes back are found: lru %llu %%, auto %llu %%, cost %llu %%; dropped %u, %u, %u chunks\n",
	       (unsigned long long)lru, (unsigned long long)learned, (unsigned long long)cost, dropped[0], dropped[1],
	       dropped[2]);
	ck_assert_uint_lt(lru, 10);
	ck_assert_uint_gt(learned, 50);
	ck_assert_uint_gt(cost, 50);
}
END_TEST

/* Who must make room in memory goes to disk, by the policy, and is dropped only where that cannot be. */
START_TEST(demotes_what_is_wanted_least)
{
	const uint32_t policy = _i ? KVT_POLICY_AUTO : KVT_POLICY_LRU;
	struct prefix_rig r = rig_make((struct rig_config){ .disk = true, .policy = policy, .chunks = 30 });
	struct kvt_prefix_stats before = KVT_INIT(before), after = KVT_INIT(after);
	uint32_t tokens[256], once = 1000, memory, disk;
	uint64_t demoted;

	for (uint32_t round = 0; round < 60; round++) {
		for (uint32_t i = 0; i < 5; i++) { /* two that come back, and 12 chunks that do not */
			rig_prompt(tokens, 256, i < 2 ? i : once++, 0);
			rig_compute(&r, 0, tokens, 256);
		}
	}
	ck_assert(!kvt_prefix_stats(r.cache, &before));
	demoted = before.demoted;
	ck_assert_int_eq(kvt_prefix_evict(r.cache, KVT_TIER_RAM, 16), 16);
	ck_assert(!kvt_prefix_stats(r.cache, &after));
	ck_assert_uint_eq(after.demoted, demoted + 16);
	ck_assert_uint_eq(after.dropped, before.dropped);
	for (uint32_t i = 0; i < 2; i++) {
		rig_prompt(tokens, 256, i, 0);
		rig_serve(&r, 0, tokens, 256, 256);
	}
	ck_assert(!kvt_prefix_stats(r.cache, &after));
	memory = (uint32_t)(after.hit_bytes[KVT_TIER_RAM] - before.hit_bytes[KVT_TIER_RAM]);
	disk = (uint32_t)(after.hit_bytes[KVT_TIER_DISK] - before.hit_bytes[KVT_TIER_DISK]);
	if (policy == KVT_POLICY_AUTO) /* one-off prompts went, also those that came after their last use */
		ck_assert_msg(!disk && memory, "%u bytes in memory, %u on disk", memory, disk);
	else
		ck_assert_msg(disk, "LRU is better than it was thought to be");
	rig_free(&r);
}
END_TEST

/* Of two memory tiers, making room in one says nothing about what is in the other. */
START_TEST(evicts_from_the_tier_that_was_named)
{
	struct prefix_rig r = rig_make((struct rig_config){ .disk = true, .pinned_bytes = 40 * 4096 });
	struct kvt_prefix_stats st = KVT_INIT(st);
	struct kvt_stats all = KVT_INIT(all);
	uint32_t tokens[64];

	for (uint32_t i = 0; i < 30; i++) {
		rig_prompt(tokens, 64, i, 0);
		rig_compute(&r, 0, tokens, 64);
	}
	ck_assert_int_eq(kvt_prefix_evict(r.cache, KVT_TIER_PINNED, 10), 10);
	ck_assert(!kvt_cache_stats(r.cache, &all));
	ck_assert_uint_eq(all.tier[KVT_TIER_PINNED].blocks, 0);
	ck_assert_uint_eq(all.tier[KVT_TIER_RAM].blocks, 120);
	ck_assert_int_eq(kvt_prefix_evict(r.cache, KVT_TIER_RAM, 30), 30);
	ck_assert(!kvt_prefix_stats(r.cache, &st));
	ck_assert_uint_eq(st.demoted, 40);
	ck_assert_uint_eq(st.dropped, 0);
	for (uint32_t i = 0; i < 30; i++) {
		rig_prompt(tokens, 64, i, 0);
		rig_serve(&r, 0, tokens, 64, 64);
	}
	rig_free(&r);
}
END_TEST

/* Once it is known how long the disk takes, what is computed in less than that is not kept there. */
START_TEST(what_is_computed_sooner_is_not_kept_on_disk)
{
	struct prefix_rig r = rig_make((struct rig_config){ .disk = true });
	struct kvt_prefix_stats before = KVT_INIT(before), after = KVT_INIT(after);
	struct kvt_stats st = KVT_INIT(st);
	uint32_t tokens[128];

	for (uint32_t i = 0; i < 20; i++) {
		rig_prompt(tokens, 64, i, 0);
		rig_compute(&r, 0, tokens, 64);
	}
	ck_assert_int_eq(kvt_prefix_evict(r.cache, KVT_TIER_RAM, 20), 20);
	for (uint32_t i = 0; i < 20; i++) {
		rig_prompt(tokens, 64, i, 0);
		rig_serve(&r, 0, tokens, 64, 64);
	}
	ck_assert(!kvt_cache_stats(r.cache, &st));
	ck_assert_uint_ge(st.disk_reads, 80);
	ck_assert_uint_gt(st.disk_read_ns, 80 * 64); /* or the disk is faster than what is computed below */
	r.ns = 1;
	for (uint32_t i = 20; i < 30; i++) {
		rig_prompt(tokens, 64, i, 0);
		rig_compute(&r, 0, tokens, 64);
	}
	ck_assert(!kvt_prefix_stats(r.cache, &before));
	ck_assert_int_eq(kvt_prefix_evict(r.cache, KVT_TIER_RAM, 30), 30);
	ck_assert(!kvt_prefix_stats(r.cache, &after));
	ck_assert_uint_eq(after.demoted - before.demoted, 20);
	ck_assert_uint_eq(after.dropped - before.dropped, 10);
	for (uint32_t i = 0; i < 30; i++) {
		rig_prompt(tokens, 64, i, 0);
		rig_serve(&r, 0, tokens, 64, i < 20 ? 64 : 0);
	}
	/* but where something is behind it that is worth it, both go there */
	rig_prompt(tokens, 128, 50, 0);
	rig_compute(&r, 0, tokens, 64);
	r.ns = 1000000;
	rig_compute(&r, 0, tokens, 128);
	kvt_prefix_evict(r.cache, KVT_TIER_RAM, 1000);
	rig_serve(&r, 0, tokens, 128, 128);
	rig_free(&r);
}
END_TEST

/* A state comes back as it was put, from the deepest place at or above the match; sessions have their share. */
START_TEST(snapshots_hang_on_nodes)
{
	struct prefix_rig r = rig_make((struct rig_config){ .snapshots = 4 });
	static uint8_t state[RIG_SNAPSHOT], back[RIG_SNAPSHOT];
	struct kvt_prefix_stats st = KVT_INIT(st);
	uint32_t tokens[4 * 64];
	struct kvt_prefix_match m;

	rig_prompt(tokens, 256, 5, 0);
	ck_assert_int_eq(kvt_snapshot_put(r.cache, &r.roots[0], tokens, 64, 1, state, 100), -ENOENT);
	rig_compute(&r, 0, tokens, 256);
	for (uint32_t n = 64; n <= 256; n += 64) {
		memset(state, (int)n, sizeof(state));
		ck_assert_msg(!kvt_snapshot_put(r.cache, &r.roots[0], tokens, n - 1, n <= 128, state, RIG_SNAPSHOT - n), "%s",
			      kvt_last_error());
	}
	ck_assert_int_eq(kvt_snapshot_put(r.cache, &r.roots[0], tokens, 64, 1, state, RIG_SNAPSHOT + 1), -EINVAL);
	ck_assert(!kvt_prefix_match(r.cache, &r.roots[0], tokens, 190, &m));
	ck_assert_uint_eq(m.tokens, 190);
	ck_assert_uint_eq(m.snapshot, 127); /* 191 is behind the match */
	ck_assert_int_eq(kvt_snapshot_get(r.cache, &m, back, 10), RIG_SNAPSHOT - 128);
	ck_assert_int_eq(kvt_snapshot_get(r.cache, &m, back, sizeof(back)), RIG_SNAPSHOT - 128);
	memset(state, 128, sizeof(state));
	ck_assert(!memcmp(state, back, RIG_SNAPSHOT - 128));
	kvt_prefix_release(r.cache, &m);
	/* a node has one, a session two: this one takes the place of another session's, and of its own oldest */
	ck_assert(!kvt_snapshot_put(r.cache, &r.roots[0], tokens, 190, 1, state, 4096));
	ck_assert(!kvt_prefix_stats(r.cache, &st));
	ck_assert_uint_eq(st.snapshots_used, 3);
	for (uint32_t n = 64; n <= 256; n += 64) {
		ck_assert(!kvt_prefix_match(r.cache, &r.roots[0], tokens, n, &m));
		ck_assert_uint_eq(m.snapshot, n == 64 ? 0 : n == 192 ? 190 : n - 1);
		kvt_prefix_release(r.cache, &m);
	}
	ck_assert_int_eq(kvt_prefix_evict(r.cache, KVT_TIER_RAM, 1000), 4);
	ck_assert(!kvt_prefix_stats(r.cache, &st));
	ck_assert_uint_eq(st.snapshots_used, 0);
	rig_free(&r);
}
END_TEST

/* A recurrence over tokens: the deepest snapshot and the tokens behind it give the state that all tokens give. */
static void recur(uint64_t *state, const uint32_t *tokens, uint32_t first, uint32_t end)
{
	for (uint32_t i = first; i < end; i++)
		for (uint32_t k = 0; k < 500; k++)
			state[k] = state[k] * 6364136223846793005ull + tokens[i] + k;
}

START_TEST(restore_and_replay_is_the_cold_state)
{
	struct prefix_rig r = rig_make((struct rig_config){ .snapshots = 8, .disk = true });
	static uint64_t state[500], cold[500], back[500];
	struct kvt_prefix_match m;
	uint32_t tokens[256];

	rig_prompt(tokens, 256, 9, 0);
	rig_compute(&r, 0, tokens, 256);
	for (uint32_t at = 0; at < 256; at += 64) {
		recur(state, tokens, at, at + 64);
		ck_assert(!kvt_snapshot_put(r.cache, &r.roots[0], tokens, at + 64, 1, state, sizeof(state)));
	}
	for (uint32_t n = 1; n <= 256; n += 17) {
		ck_assert_int_ge(kvt_prefix_evict(r.cache, KVT_TIER_RAM, 2), 0); /* not the snapshots */
		ck_assert(!kvt_prefix_match(r.cache, &r.roots[0], tokens, n, &m));
		ck_assert_uint_eq(m.snapshot, n / 64 * 64);
		memset(back, 0, sizeof(back));
		if (m.snapshot)
			ck_assert_int_eq(kvt_snapshot_get(r.cache, &m, back, sizeof(back)), sizeof(back));
		recur(back, tokens, m.snapshot, n);
		memset(cold, 0, sizeof(cold));
		recur(cold, tokens, 0, n);
		ck_assert(!memcmp(back, cold, sizeof(cold)));
		kvt_prefix_release(r.cache, &m);
	}
	rig_free(&r);
}
END_TEST

/* A match that ends inside a chunk pins the chunks that it uses, and no other. */
START_TEST(a_match_pins_what_it_uses)
{
	struct prefix_rig r = rig_make((struct rig_config){ 0 });
	struct kvt_prefix_stats st = KVT_INIT(st);
	struct kvt_prefix_match a, b;
	uint32_t tokens[256];

	rig_prompt(tokens, 256, 3, 0);
	rig_compute(&r, 0, tokens, 256);
	ck_assert(!kvt_prefix_match(r.cache, &r.roots[0], tokens, 65, &a));
	ck_assert(!kvt_prefix_match(r.cache, &r.roots[0], tokens, 200, &b));
	ck_assert(!kvt_prefix_stats(r.cache, &st));
	ck_assert_uint_eq(st.chunks_pinned, 4);
	kvt_prefix_release(r.cache, &b);
	ck_assert(!kvt_prefix_stats(r.cache, &st));
	ck_assert_uint_eq(st.chunks_pinned, 2);
	ck_assert_int_eq(kvt_prefix_evict(r.cache, KVT_TIER_RAM, 100), 2);
	kvt_prefix_release(r.cache, &a);
	kvt_prefix_release(r.cache, &a); /* once is enough, twice does no harm */
	ck_assert(!kvt_prefix_stats(r.cache, &st));
	ck_assert_uint_eq(st.chunks_pinned, 0);
	ck_assert_uint_eq(st.chunks_evictable, 2);
	rig_serve(&r, 0, tokens, 256, 128);
	rig_free(&r);
}
END_TEST

/* Where all else is pinned, the end of what is known does not make room for what is put behind it. */
START_TEST(what_a_prompt_stands_on_stays)
{
	struct prefix_rig r = rig_make((struct rig_config){ .chunks = 3 });
	struct kvt_prefix_stats st = KVT_INIT(st);
	struct kvt_prefix_match held[2];
	uint32_t tokens[128];

	for (uint32_t i = 0; i < 3; i++) {
		rig_prompt(tokens, 128, i, 0);
		rig_compute(&r, 0, tokens, 64);
		if (i < 2)
			ck_assert(!kvt_prefix_match(r.cache, &r.roots[0], tokens, 64, &held[i]));
	}
	rig_compute(&r, 0, tokens, 128);
	ck_assert(!kvt_prefix_stats(r.cache, &st));
	ck_assert_uint_eq(st.refused, 1);
	ck_assert_uint_eq(st.dropped, 0);
	rig_serve(&r, 0, tokens, 128, 64);
	kvt_prefix_release(r.cache, &held[0]);
	rig_compute(&r, 0, tokens, 128); /* now another one does */
	rig_serve(&r, 0, tokens, 128, 128);
	kvt_prefix_release(r.cache, &held[1]);
	rig_free(&r);
}
END_TEST

/* A match of no chunks holds nothing: releasing it is nothing, however it came to be, and so is releasing none. */
START_TEST(an_empty_match_holds_nothing)
{
	struct prefix_rig r = rig_make((struct rig_config){ 0 });
	struct kvt_prefix_root bad = r.roots[0];
	struct kvt_prefix_stats st = KVT_INIT(st);
	struct kvt_prefix_match zero = { 0 }, m, failed;
	uint32_t tokens[128];

	rig_prompt(tokens, 128, 1, 0);
	rig_compute(&r, 0, tokens, 128);
	ck_assert(!kvt_prefix_match(r.cache, &r.roots[0], tokens, 128, &m));
	ck_assert_uint_eq(m.chunks, 2);
	kvt_prefix_release(r.cache, &zero);
	kvt_prefix_release(r.cache, &zero);
	kvt_prefix_release(r.cache, NULL);
	bad.salt_bytes = 65;
	memset(&failed, 0x11, sizeof(failed));
	ck_assert_int_eq(kvt_prefix_match(r.cache, &bad, tokens, 128, &failed), -EINVAL);
	ck_assert_uint_eq(failed.chunks, 0);
	ck_assert_uint_eq(failed.tokens, 0);
	kvt_prefix_release(r.cache, &failed);
	ck_assert_int_eq(kvt_prefix_match(r.cache, &r.roots[0], tokens, 128, NULL), -EINVAL);
	ck_assert_int_eq(kvt_prefix_match(r.cache, &r.roots[0], NULL, 128, &failed), -EINVAL);
	ck_assert(!kvt_prefix_stats(r.cache, &st));
	ck_assert_uint_eq(st.chunks_pinned, 2); /* the real one stays */
	kvt_prefix_release(r.cache, &m);
	kvt_prefix_release(r.cache, &m);
	ck_assert(!kvt_prefix_stats(r.cache, &st));
	ck_assert_uint_eq(st.chunks_pinned, 0);
	ck_assert_msg(!kvt_prefix_check(r.cache), "%s", kvt_last_error());
	rig_free(&r);
}
END_TEST

START_TEST(refuses_what_cannot_be)
{
	struct prefix_rig r = rig_make((struct rig_config){ 0 });
	struct kvt_prefix_root root = r.roots[1];
	struct kvt_prefix_match m;
	uint32_t tokens[64] = { 0 };
	struct kvt_seq *seq;

	root.salt_bytes = 65;
	ck_assert_int_eq(kvt_prefix_match(r.cache, &root, tokens, 64, &m), -EINVAL);
	root = r.roots[1];
	root.size = 8;
	ck_assert_int_eq(kvt_prefix_match(r.cache, &root, tokens, 64, &m), -EINVAL);
	root = r.roots[1];
	root.reserved = 1;
	ck_assert_int_eq(kvt_prefix_match(r.cache, &root, tokens, 64, &m), -EINVAL);
	ck_assert(!kvt_seq_create(r.cache, &seq) && !kvt_seq_append(seq, tokens, 64));
	ck_assert_int_eq(kvt_prefix_insert(r.cache, &r.roots[0], seq, 65, 0), -EINVAL);
	ck_assert_int_eq(kvt_prefix_insert(r.cache, &r.roots[0], seq, 64, 0), -EINVAL); /* nothing was written */
	ck_assert(!kvt_prefix_match(r.cache, &r.roots[0], tokens, 64, &m));
	ck_assert_uint_eq(m.tokens, 0);
	ck_assert_int_eq(kvt_prefix_attach(r.cache, &m, 64, seq), -EINVAL); /* not empty */
	kvt_prefix_release(r.cache, &m);
	ck_assert_int_eq(kvt_prefix_evict(r.cache, KVT_TIERS, 1), -EINVAL);
	kvt_seq_free(seq);
	rig_free(&r);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("prefix");
	TCase *t = tcase_create("prefix");
	SRunner *r = srunner_create(s);
	int failed;

	tcase_set_timeout(t, 200);
	tcase_add_loop_test(t, a_hit_gives_what_was_written, 0, 3);
	tcase_add_test(t, roots_and_tokens_do_not_collide);
	tcase_add_test(t, evicts_what_was_asked_for);
	tcase_add_loop_test(t, a_full_cache_goes_on, 0, 2);
	tcase_add_test(t, what_runs_keeps_its_chunks);
	tcase_add_test(t, a_scan_does_not_push_out_what_comes_back);
	tcase_add_loop_test(t, demotes_what_is_wanted_least, 0, 2);
	tcase_add_test(t, evicts_from_the_tier_that_was_named);
	tcase_add_test(t, what_is_computed_sooner_is_not_kept_on_disk);
	tcase_add_test(t, snapshots_hang_on_nodes);
	tcase_add_test(t, restore_and_replay_is_the_cold_state);
	tcase_add_test(t, a_match_pins_what_it_uses);
	tcase_add_test(t, what_a_prompt_stands_on_stays);
	tcase_add_test(t, an_empty_match_holds_nothing);
	tcase_add_test(t, refuses_what_cannot_be);
	suite_add_tcase(s, t);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
