// SPDX-License-Identifier: MIT
/* The prefix tree's shape: finding, adding, removing and pinning nodes. */
#include "cache/tree.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/err.h"

#define NONE KVT_TREE_NONE
#define BATCH KVT_TREE_FETCH
#define ALL_TIERS ((1u << KVT_TIERS) - 1)

static uint64_t mix(uint64_t z)
{
	z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
	z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
	return z ^ (z >> 31);
}

/* NH, the universal hash of UMAC: whoever does not know the key cannot choose tokens that collide. */
static uint64_t hash_tokens(const struct kvt_tree *t, uint64_t parent, const uint32_t *tokens, uint32_t n)
{
	uint64_t sum = 0;
	uint32_t i;

	for (i = 0; i + 1 < n; i += 2)
		sum += (uint64_t)(tokens[i] + t->key[i]) * (tokens[i + 1] + t->key[i + 1]);
	if (i < n)
		sum += (uint64_t)(tokens[i] + t->key[i]) * t->key[t->chunk];
	return mix(sum + parent * 0x9E3779B97F4A7C15ull);
}

static uint64_t hash_chunk(const struct kvt_tree *t, uint64_t parent, const uint32_t *tokens)
{
	return hash_tokens(t, parent, tokens, t->chunk);
}

/* ---- siblings in token order ---- */

static uint32_t common(const uint32_t *a, uint32_t n, const uint32_t *b, uint32_t m)
{
	uint32_t i = 0, end = n < m ? n : m;

	while (i < end && a[i] == b[i])
		i++;
	return i;
}

/* < 0: tokens [n] stand before @node. @shared: how many both begin with. */
static int compare(const struct kvt_tree *t, const uint32_t *tokens, uint32_t n, uint32_t node, uint32_t *shared)
{
	const uint32_t *other = kvt_tree_tokens(t, node);
	uint32_t m = t->nodes[node].n, i = common(tokens, n, other, m);

	*shared = i;
	if (i == n || i == m)
		return n < m ? -1 : n > m;
	return tokens[i] < other[i] ? -1 : 1;
}

struct gap {
	uint32_t before, after;		      /* nodes, or NONE; one that is equal counts as behind */
	uint32_t before_shared, after_shared; /* tokens */
};

static void find_gap(const struct kvt_tree *t, uint32_t top, const uint32_t *tokens, uint32_t n, struct gap *g)
{
	uint32_t shared;

	*g = (struct gap){ .before = NONE, .after = NONE };
	while (top != NONE) {
		if (compare(t, tokens, n, top, &shared) <= 0) {
			g->after = top;
			g->after_shared = shared;
			top = t->nodes[top].left;
		} else {
			g->before = top;
			g->before_shared = shared;
			top = t->nodes[top].right;
		}
	}
}

static uint64_t priority(uint32_t node)
{
	return mix(node + 1);
}

static uint32_t *siblings(struct kvt_tree *t, uint32_t root, uint32_t parent)
{
	return parent == NONE ? &t->roots[root].children : &t->nodes[parent].children;
}

static void treap_insert(struct kvt_tree *t, uint32_t *link, uint32_t node)
{
	const uint32_t *tokens = kvt_tree_tokens(t, node);
	struct kvt_tree_node *v = &t->nodes[node];
	uint32_t *left = &v->left, *right = &v->right, top, shared;

	while (*link != NONE && priority(*link) >= priority(node))
		link = compare(t, tokens, v->n, *link, &shared) < 0 ? &t->nodes[*link].left : &t->nodes[*link].right;
	top = *link;
	*link = node;
	while (top != NONE) {
		if (compare(t, tokens, v->n, top, &shared) < 0) {
			*right = top;
			right = &t->nodes[top].left;
			top = *right;
		} else {
			*left = top;
			left = &t->nodes[top].right;
			top = *left;
		}
	}
	*left = *right = NONE;
}

static void treap_remove(struct kvt_tree *t, uint32_t *link, uint32_t node)
{
	const struct kvt_tree_node *v = &t->nodes[node];
	uint32_t a = v->left, b = v->right, shared;

	while (*link != node)
		link = compare(t, kvt_tree_tokens(t, node), v->n, *link, &shared) < 0 ? &t->nodes[*link].left :
											 &t->nodes[*link].right;
	while (a != NONE && b != NONE) {
		if (priority(a) >= priority(b)) {
			*link = a;
			link = &t->nodes[a].right;
			a = *link;
		} else {
			*link = b;
			link = &t->nodes[b].left;
			b = *link;
		}
	}
	*link = a != NONE ? a : b;
}

/* ---- life ---- */

static uint32_t power_of_two(uint32_t n)
{
	uint32_t p = 1;

	while (p < n)
		p *= 2;
	return p;
}

/* Most prompts of one kind share a root; a tree of many tenants has at least as many chunks. */
static uint32_t root_count(uint32_t capacity)
{
	return capacity / 16 + 16;
}

static uint64_t lay_out(struct kvt_tree *t, uint32_t chunk, uint32_t capacity, uint8_t *base)
{
	uint64_t at = 0;
#define PLACE(field, count) \
	do { \
		t->field = base ? (void *)(base + at) : NULL; \
		at += ((uint64_t)(count) * sizeof(*t->field) + 63) / 64 * 64; \
	} while (0)

	t->n_roots = root_count(capacity);
	t->n_buckets = power_of_two(capacity);
	t->root_buckets = power_of_two(t->n_roots);
	PLACE(nodes, capacity);
	PLACE(tokens, (uint64_t)capacity * chunk);
	PLACE(buckets, t->n_buckets);
	PLACE(roots, t->n_roots);
	PLACE(root_heads, t->root_buckets);
	PLACE(key, chunk + 1);
#undef PLACE
	return at;
}

uint64_t kvt_tree_bytes(uint32_t chunk, uint32_t capacity, const struct kvt_policy_ops *ops)
{
	const struct kvt_policy_params policy = { .blocks = capacity, .keyed = true };
	struct kvt_tree t;

	return sizeof(t) + lay_out(&t, chunk, capacity, NULL) + ops->bytes(&policy);
}

/* Large pages, where there are any: nodes are found all over it. */
static void spread_out(void *from, uint64_t bytes)
{
	uint64_t skip = -(uintptr_t)from % 4096;

	if (bytes > skip)
		madvise((uint8_t *)from + skip, bytes - skip, MADV_HUGEPAGE);
}

int kvt_tree_create(uint32_t chunk, uint32_t capacity, uint64_t seed, const struct kvt_policy_ops *ops,
		    const struct kvt_policy_params *costs, struct kvt_tree **tree)
{
	struct kvt_policy_params policy = *costs;
	struct kvt_tree *t = calloc(1, sizeof(*t));

	if (!t)
		return kvt_fail(-ENOMEM, "no memory for a prefix tree");
	t->chunk = chunk;
	t->capacity = capacity;
	t->ops = ops;
	t->free_node = t->free_root = NONE;
	t->map_bytes = lay_out(t, chunk, capacity, NULL);
	t->map = mmap(NULL, t->map_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	policy.blocks = capacity;
	policy.keyed = true;
	t->policy = ops->create(&policy);
	if (t->map == MAP_FAILED || !t->policy) {
		if (t->map == MAP_FAILED)
			t->map = NULL;
		kvt_tree_destroy(t);
		return kvt_fail(-ENOMEM, "no memory for a prefix tree of %u chunks", capacity);
	}
	lay_out(t, chunk, capacity, t->map);
	spread_out(t->map, t->map_bytes);
	spread_out(t->policy, ops->bytes(&policy));
	for (uint32_t i = 0; i <= chunk; i++)
		t->key[i] = (uint32_t)(mix(seed + i * 0x9E3779B97F4A7C15ull) >> 32);
	*tree = t;
	return 0;
}

void kvt_tree_destroy(struct kvt_tree *t)
{
	if (!t)
		return;
	if (t->policy)
		t->ops->destroy(t->policy);
	if (t->map)
		munmap(t->map, t->map_bytes);
	free(t);
}

/* ---- roots ---- */

static uint64_t hash_key(const struct kvt_tree *t, const struct kvt_root_key *key)
{
	const uint8_t *bytes = (const uint8_t *)key;
	uint64_t h = t->key[0], word;

	for (size_t i = 0; i < sizeof(*key); i += sizeof(word)) {
		size_t n = sizeof(*key) - i < sizeof(word) ? sizeof(*key) - i : sizeof(word);

		word = 0;
		memcpy(&word, bytes + i, n);
		h = mix(h + word + t->key[t->chunk]);
	}
	return h;
}

static uint32_t find_root(const struct kvt_tree *t, const struct kvt_root_key *key, uint64_t hash)
{
	for (uint32_t i = t->root_heads[hash & (t->root_buckets - 1)]; i; i = t->roots[i - 1].next)
		if (t->roots[i - 1].hash == hash && !memcmp(&t->roots[i - 1].key, key, sizeof(*key)))
			return i - 1;
	return NONE;
}

uint32_t kvt_tree_root(struct kvt_tree *t, const struct kvt_root_key *key)
{
	return find_root(t, key, hash_key(t, key));
}

uint32_t kvt_tree_root_get(struct kvt_tree *t, const struct kvt_root_key *key)
{
	uint64_t hash = hash_key(t, key);
	uint32_t *head = &t->root_heads[hash & (t->root_buckets - 1)], i = find_root(t, key, hash);
	struct kvt_tree_root *r;

	if (i != NONE) {
		t->roots[i].nodes++;
		return i;
	}
	if (t->free_root != NONE) {
		i = t->free_root;
		t->free_root = t->roots[i].next;
	} else if (t->fresh_root < t->n_roots) {
		i = t->fresh_root++;
	} else {
		return NONE;
	}
	r = &t->roots[i];
	*r = (struct kvt_tree_root){ .key = *key, .hash = hash, .children = NONE, .nodes = 1, .next = *head };
	*head = i + 1;
	t->roots_used++;
	return i;
}

void kvt_tree_root_put(struct kvt_tree *t, uint32_t root)
{
	struct kvt_tree_root *r = &t->roots[root];
	uint32_t *link = &t->root_heads[r->hash & (t->root_buckets - 1)];

	if (--r->nodes)
		return;
	while (*link != root + 1)
		link = &t->roots[*link - 1].next;
	*link = r->next;
	r->next = t->free_root;
	t->free_root = root;
	t->roots_used--;
}

/* ---- finding ---- */

static uint64_t hash_of(const struct kvt_tree *t, uint32_t root, uint32_t node)
{
	return node == NONE ? t->roots[root].hash : t->nodes[node].hash;
}

static uint32_t find_whole(const struct kvt_tree *t, uint32_t root, uint32_t parent, uint64_t hash, const uint32_t *tokens)
{
	for (uint32_t i = t->buckets[hash & (t->n_buckets - 1)]; i; i = t->nodes[i - 1].next) {
		const struct kvt_tree_node *v = &t->nodes[i - 1];

		if (v->hash == hash && v->parent == parent && v->root == root &&
		    !memcmp(kvt_tree_tokens(t, i - 1), tokens, t->chunk * sizeof(*tokens)))
			return i - 1;
	}
	return NONE;
}

/* The hashes of up to BATCH chunks, and their nodes on the way to the processor. */
static void look_ahead(const struct kvt_tree *t, uint64_t hash, const uint32_t *tokens, uint32_t n, uint64_t *hashes)
{
	uint32_t heads[BATCH];

	for (uint32_t i = 0; i < n; i++) {
		hash = hashes[i] = hash_chunk(t, hash, tokens + (uint64_t)i * t->chunk);
		__builtin_prefetch(&t->buckets[hash & (t->n_buckets - 1)]);
	}
	for (uint32_t i = 0; i < n; i++) {
		heads[i] = t->buckets[hashes[i] & (t->n_buckets - 1)];
		if (heads[i])
			__builtin_prefetch(&t->nodes[heads[i] - 1], 1);
	}
	for (uint32_t i = 0; i < n; i++)
		if (heads[i])
			__builtin_prefetch(kvt_tree_tokens(t, heads[i] - 1));
}

static void walk_tail(struct kvt_tree *t, uint32_t root, const uint32_t *tokens, uint32_t n, struct kvt_tree_path *p)
{
	uint32_t node, shared;
	struct gap g;

	find_gap(t, *siblings(t, root, p->parent), tokens, n < t->chunk ? n : t->chunk, &g);
	node = g.before_shared > g.after_shared ? g.before : g.after;
	shared = g.before_shared > g.after_shared ? g.before_shared : g.after_shared;
	if (!shared || (t->nodes[node].flags & KVT_NODE_BAD))
		return;
	p->node = node;
	p->tokens += shared;
	p->chunks++;
}

void kvt_tree_walk(struct kvt_tree *t, uint32_t root, const uint32_t *tokens, uint32_t n, struct kvt_tree_path *p)
{
	uint64_t hashes[BATCH], hash;
	uint32_t left = n / t->chunk, part, i, node;

	*p = (struct kvt_tree_path){ .root = root, .node = NONE, .parent = NONE };
	if (root == NONE)
		return;
	hash = t->roots[root].hash;
	while (left) {
		part = left < BATCH ? left : BATCH;
		look_ahead(t, hash, tokens + p->tokens, part, hashes);
		for (i = 0; i < part; i++) {
			node = find_whole(t, root, p->node, hashes[i], tokens + p->tokens);
			if (node == NONE || (t->nodes[node].flags & KVT_NODE_BAD))
				break;
			p->node = p->parent = node;
			p->tokens += t->chunk;
			p->chunks++;
		}
		if (i < part)
			break;
		hash = hashes[part - 1];
		left -= part;
	}
	p->whole = p->tokens;
	if (p->tokens < n)
		walk_tail(t, root, tokens + p->tokens, n - p->tokens, p);
}

void kvt_tree_fetch(struct kvt_tree *t, uint32_t root, uint32_t parent, const uint32_t *tokens, uint32_t n)
{
	uint64_t hash = hash_of(t, root, parent);

	for (uint32_t i = 0; i < n && i < BATCH; i++) {
		hash = hash_chunk(t, hash, tokens + (uint64_t)i * t->chunk);
		__builtin_prefetch(&t->buckets[hash & (t->n_buckets - 1)], 1);
	}
}

uint32_t kvt_tree_child(struct kvt_tree *t, uint32_t root, uint32_t parent, const uint32_t *tokens, uint32_t n)
{
	struct gap g;

	if (*siblings(t, root, parent) == NONE)
		return NONE; /* most are added behind one that is new itself */
	if (n == t->chunk)
		return find_whole(t, root, parent, hash_chunk(t, hash_of(t, root, parent), tokens), tokens);
	find_gap(t, *siblings(t, root, parent), tokens, n, &g);
	return g.after_shared == n ? g.after : NONE;
}

/* ---- who may leave ---- */

static bool may_leave(const struct kvt_tree *t, uint32_t node)
{
	const struct kvt_tree_node *v = &t->nodes[node];
	uint32_t behind = 0;

	for (uint32_t i = 0; i <= v->tier; i++)
		behind += v->behind[i];
	return !behind && !(v->flags & KVT_NODE_NEW) && !kvt_tree_busy(t, node);
}

void kvt_tree_skip(struct kvt_tree *t, uint32_t node)
{
	if (!(t->nodes[node].flags & KVT_NODE_LISTED))
		return;
	t->nodes[node].flags &= ~KVT_NODE_LISTED;
	t->ops->busy(t->policy, node);
}

void kvt_tree_settle(struct kvt_tree *t, uint32_t node)
{
	if (!may_leave(t, node)) {
		kvt_tree_skip(t, node);
		return;
	}
	t->nodes[node].flags |= KVT_NODE_LISTED;
	t->ops->idle(t->policy, node, t->nodes[node].tier, true);
}

void kvt_tree_place(struct kvt_tree *t, uint32_t node, enum kvt_tier tier)
{
	struct kvt_tree_node *v = &t->nodes[node];

	if (v->tier == tier)
		return;
	if (v->parent != NONE) {
		t->nodes[v->parent].behind[v->tier]--;
		t->nodes[v->parent].behind[tier]++;
	}
	v->tier = (uint16_t)tier;
	kvt_tree_settle(t, node);
	if (v->parent != NONE)
		kvt_tree_settle(t, v->parent);
}

void kvt_tree_use(struct kvt_tree *t, uint32_t node, const struct kvt_content *what)
{
	struct kvt_content content;

	if (what) {
		content = *what;
		if (!content.key)
			content.key = t->nodes[node].hash | 1;
		t->ops->describe(t->policy, node, &content);
	}
	t->ops->touch(t->policy, node, KVT_USE_READ);
	t->nodes[node].flags &= ~KVT_NODE_NEW;
	kvt_tree_settle(t, node);
}

void kvt_tree_turn(struct kvt_tree *t)
{
	t->ops->turn(t->policy);
}

uint32_t kvt_tree_victim(struct kvt_tree *t, uint32_t tiers)
{
	uint32_t node;

	while ((node = t->ops->victim(t->policy, tiers, true)) != KVT_POLICY_NONE) {
		if (!kvt_tree_busy(t, node))
			return node;
		kvt_tree_skip(t, node); /* until it is let go of */
	}
	return NONE;
}

/* What is behind a node is worth no more than it, so that goes first. */
uint32_t kvt_tree_leaf(struct kvt_tree *t)
{
	uint32_t node, leaf, passed = NONE;

	for (;;) {
		node = leaf = kvt_tree_victim(t, ALL_TIERS);
		while (leaf != NONE && t->nodes[leaf].children != NONE)
			leaf = t->nodes[leaf].children;
		if (leaf == NONE || (t->nodes[leaf].flags & KVT_NODE_LISTED))
			break;
		kvt_tree_skip(t, node);
		t->nodes[node].passed = passed;
		passed = node;
	}
	for (; passed != NONE; passed = t->nodes[passed].passed)
		kvt_tree_settle(t, passed);
	return leaf;
}

/* ---- changing ---- */

void kvt_tree_pin(struct kvt_tree *t, uint32_t node)
{
	for (; node != NONE; node = t->nodes[node].parent)
		if (!t->nodes[node].pins++)
			t->pinned++;
}

void kvt_tree_unpin(struct kvt_tree *t, uint32_t node)
{
	for (; node != NONE; node = t->nodes[node].parent) {
		if (--t->nodes[node].pins)
			continue;
		t->pinned--;
		if (!(t->nodes[node].flags & KVT_NODE_LISTED))
			kvt_tree_settle(t, node);
	}
}

void kvt_tree_hold(struct kvt_tree *t, uint32_t node)
{
	t->nodes[node].holds++;
}

void kvt_tree_unhold(struct kvt_tree *t, uint32_t node)
{
	t->nodes[node].holds--;
	kvt_tree_settle(t, node);
}

uint32_t kvt_tree_add(struct kvt_tree *t, uint32_t root, uint32_t parent, const uint32_t *tokens, uint32_t n,
		      enum kvt_tier tier)
{
	uint32_t node, *head;
	struct kvt_tree_node *v;

	if (t->free_node != NONE) {
		node = t->free_node;
		t->free_node = t->nodes[node].next;
	} else if (t->fresh_node < t->capacity) {
		node = t->fresh_node++;
	} else {
		return NONE;
	}
	v = &t->nodes[node];
	*v = (struct kvt_tree_node){ .root = root, .parent = parent, .n = n, .children = NONE, .snapshot = NONE,
				     .tier = (uint16_t)tier, .flags = KVT_NODE_NEW };
	memcpy(kvt_tree_tokens(t, node), tokens, n * sizeof(*tokens));
	v->hash = hash_tokens(t, hash_of(t, root, parent), tokens, n);
	if (n == t->chunk) {
		head = &t->buckets[v->hash & (t->n_buckets - 1)];
		v->next = *head;
		*head = node + 1;
	}
	treap_insert(t, siblings(t, root, parent), node);
	if (parent != NONE) {
		t->nodes[parent].behind[tier]++;
		kvt_tree_settle(t, parent);
	}
	t->roots[root].nodes++;
	t->used++;
	t->used_tokens += n;
	return node;
}

uint32_t kvt_tree_covered(struct kvt_tree *t, uint32_t node)
{
	const struct kvt_tree_node *v = &t->nodes[node];
	uint32_t top = *siblings(t, v->root, v->parent);
	struct gap g;

	if (top == node && v->left == NONE)
		return NONE; /* most have no siblings */
	find_gap(t, top, kvt_tree_tokens(t, node), v->n, &g);
	if (g.before == NONE || g.before_shared < t->nodes[g.before].n || kvt_tree_busy(t, g.before))
		return NONE;
	return g.before;
}

void kvt_tree_remove(struct kvt_tree *t, uint32_t node)
{
	struct kvt_tree_node *v = &t->nodes[node];
	uint32_t *link;

	treap_remove(t, siblings(t, v->root, v->parent), node);
	if (v->n == t->chunk) {
		link = &t->buckets[v->hash & (t->n_buckets - 1)];
		while (*link != node + 1)
			link = &t->nodes[*link - 1].next;
		*link = v->next;
	}
	t->ops->forget(t->policy, node);
	if (v->parent != NONE) {
		t->nodes[v->parent].behind[v->tier]--;
		kvt_tree_settle(t, v->parent);
	}
	t->used--;
	t->used_tokens -= v->n;
	v->n = 0;
	v->next = t->free_node;
	t->free_node = node;
	kvt_tree_root_put(t, v->root);
}

/* ---- for tests ---- */

static int wrong(const char *what, uint32_t node)
{
	return kvt_fail(-EUCLEAN, "prefix tree: node %u: %s", node, what);
}

static int check_node(const struct kvt_tree *t, uint32_t node, uint64_t *pins)
{
	const struct kvt_tree_node *v = &t->nodes[node], *up = v->parent == NONE ? NULL : &t->nodes[v->parent];
	uint32_t top = up ? up->children : t->roots[v->root].children;
	struct gap g;

	if (v->n > t->chunk || (v->n < t->chunk && v->children != NONE))
		return wrong("a tail with children", node);
	if (up && (!up->n || up->n < t->chunk || up->root != v->root))
		return wrong("its parent is not its parent", node);
	if (up && up->pins < v->pins)
		return wrong("pinned more than what is above it", node);
	find_gap(t, top, kvt_tree_tokens(t, node), v->n, &g);
	if (g.after != node)
		return wrong("not found among its siblings", node);
	if ((v->left != NONE && priority(v->left) > priority(node)) ||
	    (v->right != NONE && priority(v->right) > priority(node)))
		return wrong("not above its siblings", node);
	if (v->n == t->chunk && find_whole(t, v->root, v->parent, v->hash, kvt_tree_tokens(t, node)) != node)
		return wrong("not found by its hash", node);
	if (!kvt_tree_busy(t, node) && may_leave(t, node) != !!(v->flags & KVT_NODE_LISTED))
		return wrong(may_leave(t, node) ? "it may leave, and the policy does not know" : "listed, and may not leave", node);
	*pins += v->pins > 0;
	return 0;
}

int kvt_tree_check(const struct kvt_tree *t)
{
	uint64_t used = 0, pinned = 0, tokens = 0, free_nodes = t->capacity - t->fresh_node;
	int ret = 0;

	for (uint32_t i = 0; i < t->fresh_node && !ret; i++) {
		if (!t->nodes[i].n)
			continue;
		used++;
		tokens += t->nodes[i].n;
		ret = check_node(t, i, &pinned);
	}
	for (uint32_t i = t->free_node; i != NONE && free_nodes <= t->capacity; i = t->nodes[i].next)
		free_nodes++;
	if (ret)
		return ret;
	if (used != t->used || pinned != t->pinned || tokens != t->used_tokens || used + free_nodes != t->capacity)
		return kvt_fail(-EUCLEAN, "prefix tree: %llu used, %llu pinned, %llu free of %u chunks, but %u and %u are counted",
				(unsigned long long)used, (unsigned long long)pinned, (unsigned long long)free_nodes,
				t->capacity, t->used, t->pinned);
	return 0;
}
