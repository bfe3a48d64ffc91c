// SPDX-License-Identifier: MIT
/*
 * The prefix tree against a list of all that was inserted: the longest common
 * prefix, found by comparing with everything. Few token values, so that
 * prompts share, split and end anywhere; ids that differ in one byte only.
 * After every step the tree's books balance.
 */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cache/tree.h"
#include "lib/rounds.h"
#include "lib/store_model.h"

#define CHUNK 4
#define CAPACITY 96
#define PROMPT 40
#define ROOTS 5

static const uint32_t values[] = { 65, 321, 0, 65536, 0x7fffffff, UINT32_MAX };

static struct kvt_root_key root_key(uint32_t i)
{
	struct kvt_root_key key = { .model = { 1 } };

	/* an adapter "a" with the salt "b", the adapter "ab", the salt "ab": none may be another */
	switch (i) {
	case 1:
		key.adapter_bytes = 1, key.adapter[0] = 'a', key.salt_bytes = 1, key.salt[0] = 'b';
		break;
	case 2:
		key.adapter_bytes = 2, memcpy(key.adapter, "ab", 2);
		break;
	case 3:
		key.salt_bytes = 2, memcpy(key.salt, "ab", 2);
		break;
	case 4:
		key.salt_bytes = 3, memcpy(key.salt, "ab", 3);
		break;
	}
	return key;
}

/* What the tree holds, as paths: tokens from the root to a node's end. */
struct known {
	uint32_t node, root, n, tokens[PROMPT];
};

static const struct kvt_policy_ops *const policies[] = { &kvt_policy_lru, &kvt_policy_s3fifo, &kvt_policy_scan,
							 &kvt_policy_cost, &kvt_policy_auto };

static struct kvt_tree *create(uint32_t chunk, uint32_t capacity, const struct kvt_policy_ops *ops)
{
	const struct kvt_policy_params costs = { .frames = { 0, 0, capacity, capacity } };
	struct kvt_tree *t;

	ck_assert_msg(!kvt_tree_create(chunk, capacity, 5, ops, &costs, &t), "%s", kvt_last_error());
	return t;
}

/* A new node that a request has used. */
static uint32_t add(struct kvt_tree *t, uint32_t root, uint32_t parent, const uint32_t *tokens, uint32_t n)
{
	uint32_t node = kvt_tree_add(t, root, parent, tokens, n, KVT_TIER_RAM);

	if (node != KVT_TREE_NONE)
		kvt_tree_use(t, node, &(struct kvt_content){ .kind = n % KVT_POLICY_KINDS });
	return node;
}

struct state {
	struct kvt_tree *t;
	struct known known[CAPACITY];
	uint32_t n, pins[64], n_pins;
	uint64_t random;
};

static uint32_t pick(struct state *s, uint32_t n)
{
	return (uint32_t)(model_random(&s->random) % n);
}

static uint32_t prompt(struct state *s, uint32_t *tokens)
{
	uint32_t n = 1 + pick(s, PROMPT);

	for (uint32_t i = 0; i < n; i++)
		tokens[i] = values[pick(s, 8) ? 0 : pick(s, 6)];
	return n;
}

static uint32_t longest(const struct state *s, uint32_t root, const uint32_t *tokens, uint32_t n)
{
	uint32_t best = 0, k;

	for (uint32_t i = 0; i < s->n; i++) {
		if (s->known[i].root != root)
			continue;
		for (k = 0; k < n && k < s->known[i].n && tokens[k] == s->known[i].tokens[k]; k++)
			;
		best = k > best ? k : best;
	}
	return best;
}

static void removed(struct state *s, uint32_t node)
{
	for (uint32_t i = 0; i < s->n; i++)
		if (s->known[i].node == node)
			s->known[i--] = s->known[--s->n];
}

static uint32_t walk(struct state *s, uint32_t which, const uint32_t *tokens, uint32_t n, struct kvt_tree_path *path)
{
	struct kvt_root_key key = root_key(which);

	kvt_tree_walk(s->t, kvt_tree_root(s->t, &key), tokens, n, path);
	ck_assert_uint_eq(path->tokens, longest(s, which, tokens, n));
	ck_assert_uint_eq(path->chunks, (path->tokens + CHUNK - 1) / CHUNK);
	return path->tokens;
}

static void insert(struct state *s)
{
	uint32_t tokens[PROMPT], n = prompt(s, tokens), which = pick(s, ROOTS), node, part, old;
	struct kvt_root_key key = root_key(which);
	uint32_t root = kvt_tree_root_get(s->t, &key), parent = KVT_TREE_NONE;

	ck_assert_uint_ne(root, KVT_TREE_NONE);
	for (uint32_t at = 0; at < n; at += part) {
		part = n - at < CHUNK ? n - at : CHUNK;
		node = kvt_tree_child(s->t, root, parent, tokens + at, part);
		if (node == KVT_TREE_NONE) {
			struct known *k = &s->known[s->n];

			node = add(s->t, root, parent, tokens + at, part);
			if (node == KVT_TREE_NONE) {
				ck_assert_uint_eq(s->t->used, CAPACITY);
				break;
			}
			*k = (struct known){ .node = node, .root = which, .n = at + part };
			memcpy(k->tokens, tokens, k->n * sizeof(uint32_t));
			s->n++;
			old = kvt_tree_covered(s->t, node);
			if (old != KVT_TREE_NONE) {
				kvt_tree_remove(s->t, old);
				removed(s, old);
			}
		}
		parent = node;
	}
	kvt_tree_root_put(s->t, root);
}

static void match(struct state *s)
{
	uint32_t tokens[PROMPT], n = prompt(s, tokens);
	struct kvt_tree_path path;

	if (!walk(s, pick(s, ROOTS), tokens, n, &path) || s->n_pins == 64)
		return;
	kvt_tree_turn(s->t);
	for (uint32_t node = path.node; node != KVT_TREE_NONE; node = s->t->nodes[node].parent)
		kvt_tree_use(s->t, node, NULL);
	kvt_tree_pin(s->t, path.node);
	s->pins[s->n_pins++] = path.node;
}

static void release(struct state *s)
{
	uint32_t i;

	if (!s->n_pins)
		return;
	i = pick(s, s->n_pins);
	kvt_tree_unpin(s->t, s->pins[i]);
	s->pins[i] = s->pins[--s->n_pins];
}

static void evict(struct state *s)
{
	uint32_t node = kvt_tree_leaf(s->t), pinned = 0;

	if (node == KVT_TREE_NONE) { /* only when all are pinned */
		for (uint32_t i = 0; i < s->n; i++)
			pinned += s->t->nodes[s->known[i].node].pins > 0;
		ck_assert_uint_eq(pinned, s->t->used);
		return;
	}
	ck_assert_uint_eq(s->t->nodes[node].pins, 0);
	ck_assert_uint_eq(s->t->nodes[node].children, KVT_TREE_NONE);
	for (uint32_t i = 0; i < s->n_pins; i++)
		ck_assert_uint_ne(s->pins[i], node);
	kvt_tree_remove(s->t, node);
	removed(s, node);
}

/* Of what is in @tier and not pinned, something that has nothing behind it there or in a faster tier; it goes elsewhere. */
static void move(struct state *s)
{
	enum kvt_tier tier = (enum kvt_tier)pick(s, KVT_TIERS);
	uint32_t node = kvt_tree_victim(s->t, 1u << tier), behind;

	for (uint32_t i = 0; i < s->n && node == KVT_TREE_NONE; i++) {
		const struct kvt_tree_node *v = &s->t->nodes[s->known[i].node];

		behind = 0;
		for (uint32_t t = 0; t <= tier; t++)
			behind += v->behind[t];
		ck_assert_msg(v->pins || v->tier != tier || behind, "node %u could go", s->known[i].node);
	}
	if (node == KVT_TREE_NONE)
		return;
	ck_assert_uint_eq(s->t->nodes[node].tier, tier);
	ck_assert_uint_eq(s->t->nodes[node].pins, 0);
	for (uint32_t i = 0; i < s->n; i++) {
		const struct kvt_tree_node *v = &s->t->nodes[s->known[i].node];

		ck_assert_msg(v->parent != node || v->tier > tier, "node %u leaves before what is behind it", node);
	}
	kvt_tree_place(s->t, node, (enum kvt_tier)pick(s, KVT_TIERS));
}

START_TEST(finds_the_longest_prefix)
{
	struct state s = { .random = 7000 + (uint64_t)_i };
	uint64_t steps = getenv("KVT_TEST_STEPS") ? strtoull(getenv("KVT_TEST_STEPS"), NULL, 0) :
			 test_rounds(30000, 5000, 1000);

	s.t = create(CHUNK, CAPACITY, policies[_i]);
	for (uint64_t i = 0; i < steps; i++) {
		switch (pick(&s, 10)) {
		case 0:
		case 1:
		case 2:
			insert(&s);
			break;
		case 3:
		case 4:
			match(&s);
			break;
		case 5:
		case 6:
			release(&s);
			break;
		case 7:
		case 8:
			move(&s);
			break;
		default:
			evict(&s);
		}
		ck_assert_msg(!kvt_tree_check(s.t), "step %llu: %s", (unsigned long long)i, kvt_last_error());
		ck_assert_uint_eq(s.n, s.t->used);
	}
	while (s.n_pins)
		release(&s);
	ck_assert_uint_eq(s.t->pinned, 0);
	while (s.n)
		evict(&s);
	ck_assert_uint_eq(s.t->used, 0);
	ck_assert_uint_eq(s.t->roots_used, 0);
	kvt_tree_destroy(s.t);
}
END_TEST

/* Chunks of chunks: a whole chunk beside tails that begin it, and others between them in token order. */
START_TEST(tails_give_way_to_what_covers_them)
{
	const uint32_t a[] = { 1, 2, 3, 4 }, b[] = { 1, 2, 9, 9 };
	struct kvt_root_key key = root_key(0);
	struct kvt_tree_path path;
	uint32_t root, tail, node;
	struct kvt_tree *t;

	t = create(CHUNK, 8, &kvt_policy_lru);
	root = kvt_tree_root_get(t, &key);
	tail = add(t, root, KVT_TREE_NONE, a, 2);
	ck_assert_uint_eq(kvt_tree_child(t, root, KVT_TREE_NONE, a, 1), tail);
	node = add(t, root, KVT_TREE_NONE, a, 4);
	kvt_tree_pin(t, tail);
	ck_assert_uint_eq(kvt_tree_covered(t, node), KVT_TREE_NONE); /* somebody reads it */
	kvt_tree_unpin(t, tail);
	ck_assert_uint_eq(kvt_tree_covered(t, node), tail);
	kvt_tree_remove(t, tail);
	ck_assert_uint_eq(kvt_tree_child(t, root, KVT_TREE_NONE, a, 2), node);
	add(t, root, KVT_TREE_NONE, b, 4);
	kvt_tree_walk(t, root, b, 3, &path);
	ck_assert_uint_eq(path.tokens, 3);
	kvt_tree_walk(t, root, a, 3, &path);
	ck_assert_uint_eq(path.tokens, 3);
	ck_assert_uint_eq(path.node, node);
	ck_assert(!kvt_tree_check(t));
	kvt_tree_destroy(t);
}
END_TEST

/* A node that no request has used yet stays, whoever else lets go of it; then it may leave. */
START_TEST(what_is_new_stays)
{
	const uint32_t a[] = { 1, 2, 3, 4 };
	struct kvt_tree *t = create(CHUNK, 8, policies[_i]);
	struct kvt_root_key key = root_key(0);
	uint32_t root = kvt_tree_root_get(t, &key), node = kvt_tree_add(t, root, KVT_TREE_NONE, a, CHUNK, KVT_TIER_RAM);

	kvt_tree_hold(t, node);
	kvt_tree_unhold(t, node);
	kvt_tree_pin(t, node);
	kvt_tree_unpin(t, node);
	kvt_tree_place(t, node, KVT_TIER_DISK);
	ck_assert_uint_eq(kvt_tree_victim(t, 1u << KVT_TIER_DISK), KVT_TREE_NONE);
	ck_assert_uint_eq(kvt_tree_leaf(t), KVT_TREE_NONE);
	ck_assert_msg(!kvt_tree_check(t), "%s", kvt_last_error());
	kvt_tree_use(t, node, NULL);
	ck_assert_uint_eq(kvt_tree_victim(t, 1u << KVT_TIER_DISK), node);
	ck_assert_uint_eq(kvt_tree_leaf(t), node);
	kvt_tree_destroy(t);
}
END_TEST

/* Who knows the key can choose tokens that collide: (a + key) * (b + key') is 0 for any b. They are others all the same. */
START_TEST(a_hash_only_finds_candidates)
{
	uint32_t a[] = { 0, 1, 7, 8 }, b[] = { 0, 2, 7, 8 }, child[] = { 5, 5, 5, 5 };
	struct kvt_root_key key = root_key(0);
	struct kvt_tree_path path;
	uint32_t root, other, na, nb, nc;
	struct kvt_tree *t;

	t = create(CHUNK, 8, &kvt_policy_lru);
	a[0] = b[0] = -t->key[0];
	root = kvt_tree_root_get(t, &key);
	na = add(t, root, KVT_TREE_NONE, a, CHUNK);
	ck_assert_uint_eq(kvt_tree_child(t, root, KVT_TREE_NONE, b, CHUNK), KVT_TREE_NONE);
	nb = add(t, root, KVT_TREE_NONE, b, CHUNK);
	ck_assert(t->nodes[na].hash == t->nodes[nb].hash); /* or this tests nothing */
	ck_assert_uint_eq(kvt_tree_child(t, root, KVT_TREE_NONE, a, CHUNK), na);
	ck_assert_uint_eq(kvt_tree_child(t, root, KVT_TREE_NONE, b, CHUNK), nb);
	/* behind both the same path hash leads to one child, which is only one's */
	nc = add(t, root, na, child, CHUNK);
	add(t, root, nb, a, 2); /* so that it is looked for there, too */
	ck_assert_uint_eq(kvt_tree_child(t, root, na, child, CHUNK), nc);
	ck_assert_uint_eq(kvt_tree_child(t, root, nb, child, CHUNK), KVT_TREE_NONE);
	kvt_tree_walk(t, root, b, CHUNK, &path);
	ck_assert_uint_eq(path.node, nb);
	/* a root whose hash is the same */
	key = root_key(1);
	other = kvt_tree_root_get(t, &key);
	t->roots[other].hash = t->roots[root].hash;
	add(t, other, KVT_TREE_NONE, child, CHUNK);
	ck_assert_uint_eq(kvt_tree_child(t, other, KVT_TREE_NONE, b, CHUNK), KVT_TREE_NONE);
	ck_assert(!kvt_tree_check(t));
	kvt_tree_destroy(t);
}
END_TEST

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

#define TIMES 16

static int shorter(const void *a, const void *b)
{
	const double x = *(const double *)a, y = *(const double *)b;

	return x < y ? -1 : x > y;
}

/*
 * A prompt of 128K tokens in a large tree, in the smallest chunks that are usual. What is on the way of
 * every request takes at most a few times as long as reading the prompt and its copy in the tree once.
 */
START_TEST(a_long_prompt_is_found_at_once)
{
	const uint32_t chunk = 32, per = 4096, n = chunk * per;
	const uint32_t prompts = getenv("KVT_TEST_BIG") ? 244 : test_rounds(24, 2, 1), capacity = prompts * per;
	uint32_t *tokens = malloc(n * sizeof(*tokens)), parent, root, differs = 0, found = 0, covered = 0;
	double start, insert[TIMES], find[TIMES], read[TIMES];
	struct kvt_root_key key = root_key(0);
	struct kvt_tree_path path;
	struct kvt_tree *tree;

	tree = create(chunk, capacity, &kvt_policy_auto);
	root = kvt_tree_root_get(tree, &key);
	for (uint32_t p = 0; p < prompts; p++) {
		for (uint32_t i = 0; i < n; i++)
			tokens[i] = (i < 1000 ? 0 : p) * 7919 + i; /* all share the beginning */
		start = now();
		kvt_tree_walk(tree, root, tokens, n, &path);
		parent = path.parent;
		for (uint32_t at = path.whole; at < n; at += chunk) {
			if ((at - path.whole) / chunk % KVT_TREE_FETCH == 0)
				kvt_tree_fetch(tree, root, parent, tokens + at, (n - at) / chunk);
			if (kvt_tree_child(tree, root, parent, tokens + at, chunk) == KVT_TREE_NONE)
				parent = kvt_tree_add(tree, root, parent, tokens + at, chunk, KVT_TIER_RAM);
			covered += kvt_tree_covered(tree, parent) != KVT_TREE_NONE;
		}
		kvt_tree_turn(tree);
		for (uint32_t node = parent; node != path.parent; node = tree->nodes[node].parent)
			kvt_tree_use(tree, node, &(struct kvt_content){ .kind = 1 });
		insert[p % TIMES] = now() - start; /* the last ones', when the tree is large */
	}
	for (uint32_t p = 0; p < prompts; p += prompts / TIMES + 1) {
		for (uint32_t i = 0; i < n; i++)
			tokens[i] = (i < 1000 ? 0 : p) * 7919 + i;
		start = now();
		kvt_tree_walk(tree, root, tokens, n, &path);
		kvt_tree_turn(tree);
		for (uint32_t node = path.node; node != KVT_TREE_NONE; node = tree->nodes[node].parent)
			kvt_tree_use(tree, node, NULL);
		kvt_tree_pin(tree, path.node);
		find[found] = now() - start;
		kvt_tree_unpin(tree, path.node);
		ck_assert_uint_eq(path.tokens, n);
		start = now();
		for (uint32_t i = 0; i < n; i++) /* any other prompt's tokens */
			differs += tokens[i] != tree->tokens[(uint64_t)(p + prompts / 2) % prompts * n + i];
		read[found++] = now() - start;
	}
	ck_assert_uint_eq(covered, 0);
	qsort(find, found, sizeof(*find), shorter);
	qsort(read, found, sizeof(*read), shorter);
	qsort(insert, prompts < TIMES ? prompts : TIMES, sizeof(*insert), shorter);
	printf("prompt of 128K tokens in a tree of %u chunks: found in %.3f ms (half of the times in %.3f), inserted in %.3f ms (%.3f); reading both %.3f ms; %.0f bytes a chunk of %u tokens (%u)\n",
	       tree->used, find[0] * 1e3, find[found / 2] * 1e3, insert[0] * 1e3,
	       insert[(prompts < TIMES ? prompts : TIMES) / 2] * 1e3, read[0] * 1e3,
	       (double)kvt_tree_bytes(chunk, capacity, &kvt_policy_auto) / capacity, chunk, differs > 0);
	if (!test_sanitized()) {
		ck_assert_msg(find[0] < 60 * read[0], "found in %.1f times the time of reading", find[0] / read[0]);
		ck_assert_msg(insert[0] < 120 * read[0], "inserted in %.1f times the time of reading", insert[0] / read[0]);
	}
	kvt_tree_destroy(tree);
	free(tokens);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("prefix_tree");
	TCase *t = tcase_create("tree");
	SRunner *r = srunner_create(s);
	int failed;

	tcase_set_timeout(t, 200);
	tcase_add_loop_test(t, finds_the_longest_prefix, 0, sizeof(policies) / sizeof(policies[0]));
	tcase_add_test(t, tails_give_way_to_what_covers_them);
	tcase_add_loop_test(t, what_is_new_stays, 0, sizeof(policies) / sizeof(policies[0]));
	tcase_add_test(t, a_hash_only_finds_candidates);
	tcase_add_test(t, a_long_prompt_is_found_at_once);
	suite_add_tcase(s, t);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
