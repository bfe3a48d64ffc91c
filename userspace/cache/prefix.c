// SPDX-License-Identifier: MIT
/* The prefix cache's calls: match, attach, insert, evict. */
#include "cache/prefix.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>

#include "base/err.h"
#include "base/params.h"

#define NONE KVT_TREE_NONE
#define CHUNK_MAX 65536u
#define RECLAIM_TRIES 64 /* leaves looked at for one that nobody shares */

/* ---- what it takes ---- */

static uint64_t gcd(uint64_t a, uint64_t b)
{
	while (b) {
		uint64_t rest = a % b;

		a = b;
		b = rest;
	}
	return a;
}

static int plan_chunk(struct kvt_prefix_plan *plan, const struct kvt_cache_params *p, const struct kvt_plane *planes)
{
	uint64_t least = 1, blocks = 0;

	for (uint32_t i = 0; i < p->n_planes; i++) {
		uint64_t rows = planes[i].geom.block_rows;

		if (planes[i].rows)
			continue;
		least = least / gcd(least, rows) * rows;
		if (least > CHUNK_MAX)
			return kvt_fail(-EINVAL, "prefix tree: the planes' blocks of up to %u rows have no common multiple below %u tokens: choose block_bytes so that they do",
					planes[i].geom.block_rows, CHUNK_MAX);
	}
	if (p->prefix_tokens % least || p->prefix_tokens > CHUNK_MAX)
		return kvt_fail(-EINVAL, "prefix_tokens is %u: a multiple of %llu (the rows of blocks) up to %u expected, or 0",
				p->prefix_tokens, (unsigned long long)least, CHUNK_MAX);
	plan->chunk = p->prefix_tokens ? p->prefix_tokens : (uint32_t)least;
	for (uint32_t i = 0; i < p->n_planes; i++)
		blocks += planes[i].rows ? 0 : plan->chunk / planes[i].geom.block_rows;
	if (!blocks)
		return kvt_fail(-EINVAL, "prefix tree: the cache has no sequence planes");
	if (blocks > UINT32_MAX / 2)
		return kvt_fail(-EINVAL, "prefix tree: %llu blocks in a chunk are too many: lower prefix_tokens", (unsigned long long)blocks);
	plan->chunk_blocks = (uint32_t)blocks;
	return 0;
}

static int plan_snapshots(struct kvt_prefix_plan *plan, const struct kvt_cache_params *p, const struct kvt_plane *planes)
{
	uint64_t room = 0, bytes;

	if (!p->snapshots != !p->snapshot_bytes || p->snapshots > 1u << 20)
		return kvt_fail(-EINVAL, "snapshots is %u (to 2^20) and snapshot_bytes %llu: both or neither", p->snapshots,
				(unsigned long long)p->snapshot_bytes);
	plan->snapshots = p->snapshots;
	plan->session_snapshots = p->session_snapshots;
	plan->snapshot_bytes = p->snapshot_bytes;
	/* their blocks are those of the plane that wastes least */
	for (uint32_t i = 0; i < p->n_planes; i++) {
		bytes = (uint64_t)planes[i].geom.block_rows * planes[i].geom.row_bytes;
		if (bytes > room) {
			room = bytes;
			plan->snapshot_plane = i;
		}
	}
	if ((p->snapshot_bytes + room - 1) / room > UINT32_MAX / 2)
		return kvt_fail(-EINVAL, "snapshot_bytes is %llu: too many blocks", (unsigned long long)p->snapshot_bytes);
	plan->snapshot_blocks = (uint32_t)((p->snapshot_bytes + room - 1) / room);
	return 0;
}

uint64_t kvt_prefix_plan_bytes(const struct kvt_prefix_plan *plan, uint32_t capacity)
{
	return sizeof(struct kvt_prefix) + kvt_tree_bytes(plan->chunk, capacity, plan->policy) +
	       (uint64_t)capacity * plan->chunk_blocks * sizeof(uint32_t) +
	       plan->snapshots * (sizeof(struct kvt_snapshot) + (uint64_t)plan->snapshot_blocks * sizeof(uint32_t)) +
	       (plan->snapshots ? 2u << 20 : 0) + (plan->kept ? kvt_keeper_bytes(plan, capacity) : 0);
}

int kvt_prefix_plan(struct kvt_prefix_plan *plan, const struct kvt_cache_params *p, const struct kvt_plane *planes)
{
	uint64_t low = 0, high, middle;
	int ret;

	*plan = (struct kvt_prefix_plan){ .policy = &kvt_policy_lru, .kept = p->store_dir };
	ret = plan_chunk(plan, p, planes);
	if (!ret)
		ret = plan_snapshots(plan, p, planes);
	if (ret)
		return ret;
	high = p->prefix_bytes / sizeof(struct kvt_tree_node) + 1;
	high = high > UINT32_MAX / 2 ? UINT32_MAX / 2 : high;
	while (low + 1 < high) {
		middle = (low + high) / 2;
		if (kvt_prefix_plan_bytes(plan, (uint32_t)middle) <= p->prefix_bytes)
			low = middle;
		else
			high = middle;
	}
	plan->capacity = (uint32_t)low;
	return 0;
}

/* ---- life ---- */

static void *map(uint64_t bytes)
{
	void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	return p == MAP_FAILED ? NULL : p;
}

static uint64_t blocks_bytes(const struct kvt_prefix_plan *plan)
{
	return (uint64_t)plan->capacity * plan->chunk_blocks * sizeof(uint32_t);
}

int kvt_prefix_create(struct kvt_cache *cache, const struct kvt_prefix_plan *plan, struct kvt_prefix **prefix)
{
	struct kvt_prefix *p = calloc(1, sizeof(*p));
	uint64_t seed;
	int ret;

	if (!p)
		return kvt_fail(-ENOMEM, "no memory for a prefix tree");
	p->cache = cache;
	p->plan = *plan;
	pthread_mutex_init(&p->lock, NULL);
	pthread_mutex_init(&p->row_lock, NULL);
	if (getrandom(&seed, sizeof(seed), 0) != sizeof(seed)) {
		ret = kvt_fail(-errno, "prefix tree: getrandom: %s", strerror(errno));
		goto err_destroy;
	}
	ret = kvt_tree_create(plan->chunk, plan->capacity, seed, plan->policy, &p->tree);
	if (ret)
		goto err_destroy;
	p->blocks = map(blocks_bytes(plan));
	if (plan->snapshots) {
		p->snapshots = calloc(plan->snapshots, sizeof(*p->snapshots));
		p->snapshot_blocks = malloc((uint64_t)plan->snapshots * plan->snapshot_blocks * sizeof(uint32_t));
		p->row = malloc(2u << 20);
	}
	if (!p->blocks || (plan->snapshots && (!p->snapshots || !p->snapshot_blocks || !p->row))) {
		ret = kvt_fail(-ENOMEM, "no memory for a prefix tree of %u chunks", plan->capacity);
		goto err_destroy;
	}
	for (uint32_t i = 0; i < plan->snapshots; i++)
		p->snapshots[i].node = NONE;
	*prefix = p;
	return 0;

err_destroy:
	kvt_prefix_destroy(p);
	return ret;
}

void kvt_prefix_destroy(struct kvt_prefix *p)
{
	if (!p)
		return;
	kvt_keeper_stop(p);
	kvt_tree_destroy(p->tree);
	if (p->blocks)
		munmap(p->blocks, blocks_bytes(&p->plan));
	free(p->snapshots);
	free(p->snapshot_blocks);
	free(p->row);
	pthread_mutex_destroy(&p->row_lock);
	pthread_mutex_destroy(&p->lock);
	free(p);
}

static struct kvt_prefix *prefix_of(const struct kvt_cache *c)
{
	if (!c->prefix)
		kvt_fail(-EINVAL, "the cache has no prefix tree: give it prefix_bytes");
	return c->prefix;
}

int kvt_prefix_key(const struct kvt_prefix_root *root, struct kvt_root_key *key)
{
	struct kvt_prefix_root r;
	int ret = kvt_params_copy(&r, sizeof(r), sizeof(r), root, "prefix root");

	if (ret)
		return ret;
	if (r.reserved || r.adapter_bytes > KVT_ROOT_PART || r.salt_bytes > KVT_ROOT_PART || (r.adapter_bytes && !r.adapter) ||
	    (r.salt_bytes && !r.salt))
		return kvt_fail(-EINVAL, "prefix root: adapter of %u bytes, salt of %u (64 at most, and not NULL), reserved %u",
				r.adapter_bytes, r.salt_bytes, r.reserved);
	memset(key, 0, sizeof(*key));
	memcpy(key->model, r.model, sizeof(key->model));
	key->adapter_bytes = (uint8_t)r.adapter_bytes;
	key->salt_bytes = (uint8_t)r.salt_bytes;
	if (r.adapter_bytes)
		memcpy(key->adapter, r.adapter, r.adapter_bytes);
	if (r.salt_bytes)
		memcpy(key->salt, r.salt, r.salt_bytes);
	return 0;
}

/* ---- dropping ---- */

void kvt_prefix_drop(struct kvt_prefix *p, uint32_t node)
{
	if (p->tree->nodes[node].snapshot != NONE)
		kvt_snapshot_drop(p, p->tree->nodes[node].snapshot);
	kvt_keeper_dropped(p, node);
	kvt_store_put_all(p->cache->store, kvt_prefix_blocks(p, node), p->plan.chunk_blocks);
	kvt_tree_remove(p->tree, node);
	p->st.dropped++;
}

bool kvt_prefix_reclaim(struct kvt_prefix *p)
{
	bool dropped = false;
	uint32_t node;

	pthread_mutex_lock(&p->lock);
	for (int i = 0; !dropped && i < RECLAIM_TRIES && (node = kvt_tree_leaf(p->tree)) != NONE; i++) {
		dropped = kvt_store_alone(p->cache->store, kvt_prefix_blocks(p, node), p->plan.chunk_blocks);
		if (dropped)
			kvt_prefix_drop(p, node);
		else /* sequences use all of it: that would make no room */
			p->tree->ops->touch(p->tree->leaves, node, KVT_USE_READ);
	}
	pthread_mutex_unlock(&p->lock);
	return dropped;
}

/* ---- match ---- */

int kvt_prefix_match(struct kvt_cache *c, const struct kvt_prefix_root *root, const uint32_t *tokens, uint32_t n,
		     struct kvt_prefix_match *match)
{
	struct kvt_prefix *p = prefix_of(c);
	struct kvt_root_key key;
	struct kvt_tree_path path;
	uint32_t snapshot;
	int ret = p ? kvt_prefix_key(root, &key) : -EINVAL;

	if (ret)
		return ret;
	pthread_mutex_lock(&p->lock);
	kvt_tree_walk(p->tree, kvt_tree_root(p->tree, &key), tokens, n, &path);
	kvt_tree_pin(p->tree, path.node);
	snapshot = kvt_snapshot_above(p, path.node, path.tokens);
	*match = (struct kvt_prefix_match){
		.tokens = path.tokens, .chunks = path.chunks, .node = path.node,
		.snapshot = snapshot == NONE ? 0 : p->snapshots[snapshot].tokens,
	};
	p->st.lookups++;
	p->st.lookups_hit += path.tokens > 0;
	p->st.tokens_asked += n;
	p->st.tokens_hit += path.tokens;
	if (path.chunks > p->st.depth)
		p->st.depth = path.chunks;
	pthread_mutex_unlock(&p->lock);
	return 0;
}

/* Leaves whose bytes are lost are of no use to anybody, and the log should not name them again. */
static void drop_bad(struct kvt_prefix *p, uint32_t node)
{
	const struct kvt_tree_node *v;
	uint32_t parent;

	for (; node != NONE; node = parent) {
		v = &p->tree->nodes[node];
		parent = v->parent;
		if (!(v->flags & KVT_NODE_BAD) || kvt_tree_busy(p->tree, node) || v->children != NONE)
			return;
		kvt_prefix_drop(p, node);
	}
}

void kvt_prefix_release(struct kvt_cache *c, struct kvt_prefix_match *match)
{
	struct kvt_prefix *p = c->prefix;

	if (!p)
		return;
	pthread_mutex_lock(&p->lock);
	kvt_tree_unpin(p->tree, match->node);
	drop_bad(p, match->node);
	pthread_mutex_unlock(&p->lock);
	*match = (struct kvt_prefix_match){ .node = NONE };
}

/* ---- attach ---- */

/* The first @n tokens of a node that is chunk number @depth of the sequence. With the lock. */
static void attach_node(struct kvt_prefix *p, uint32_t node, uint32_t depth, uint32_t n, struct kvt_seq *seq)
{
	const struct kvt_cache *c = p->cache;
	const uint32_t *blocks = kvt_prefix_blocks(p, node);

	memcpy(seq->tokens + (uint64_t)depth * p->plan.chunk, kvt_tree_tokens(p->tree, node), n * sizeof(uint32_t));
	for (uint32_t i = 0; i < c->n_planes; i++) {
		const struct kvt_plane *plane = &c->planes[i];
		uint32_t per = kvt_prefix_per_chunk(p, plane), used = (n + plane->geom.block_rows - 1) / plane->geom.block_rows;

		if (!per)
			continue;
		memcpy(kvt_seq_table(seq, plane) + (uint64_t)depth * per, blocks, used * sizeof(uint32_t));
		kvt_store_get_all(c->store, blocks, used, p->st.hit_bytes);
		blocks += per;
	}
}

static void count_saved(struct kvt_prefix *p, uint32_t node, uint32_t depth, uint32_t tokens)
{
	pthread_mutex_lock(&p->lock);
	for (; depth--; node = p->tree->nodes[node].parent) {
		uint32_t first = depth * p->plan.chunk, n = p->tree->nodes[node].n;

		if (first < tokens)
			p->st.saved_ns += (uint64_t)(tokens - first < n ? tokens - first : n) * p->tree->nodes[node].ns;
	}
	pthread_mutex_unlock(&p->lock);
}

int64_t kvt_prefix_attach(struct kvt_cache *c, const struct kvt_prefix_match *match, uint32_t tokens, struct kvt_seq *seq)
{
	struct kvt_prefix *p = prefix_of(c);
	uint32_t node = match->node, depth = match->chunks, n;
	int64_t good;

	if (!p)
		return -EINVAL;
	if (!seq || seq->cache != c || seq->len)
		return kvt_fail(-EINVAL, "attach: an empty sequence of this cache is needed");
	good = kvt_seq_idle(seq);
	if (good)
		return good;
	if (tokens > match->tokens)
		tokens = match->tokens;
	if (tokens > c->max_tokens)
		return kvt_fail(-ENOSPC, "%u matched tokens: max_tokens is %u", tokens, c->max_tokens);
	seq->len = tokens;
	/* from the last chunk to the first; where one is not what it was, the sequence ends before it */
	for (; depth--; node = p->tree->nodes[node].parent) {
		uint32_t first = depth * p->plan.chunk;

		if (first >= seq->len)
			continue;
		n = seq->len - first < p->plan.chunk ? seq->len - first : p->plan.chunk;
		pthread_mutex_lock(&p->lock);
		good = !(p->tree->nodes[node].flags & KVT_NODE_BAD);
		if (good)
			attach_node(p, node, depth, n, seq);
		pthread_mutex_unlock(&p->lock);
		if (good) {
			good = kvt_store_prove(c->store, kvt_prefix_blocks(p, node), p->plan.chunk_blocks);
			if (good == p->plan.chunk_blocks)
				continue;
		}
		kvt_seq_truncate(seq, first);
		if (good < 0)
			continue; /* not to be had now */
		pthread_mutex_lock(&p->lock);
		p->st.untrue += !(p->tree->nodes[node].flags & KVT_NODE_BAD);
		p->tree->nodes[node].flags |= KVT_NODE_BAD;
		pthread_mutex_unlock(&p->lock);
	}
	count_saved(p, match->node, match->chunks, seq->len);
	return seq->len;
}

/* ---- insert ---- */

/* The rows of tokens [0, tokens) were written in every plane. */
static int check_written(const struct kvt_cache *c, const struct kvt_seq *seq, uint32_t tokens)
{
	for (uint32_t i = 0; i < c->n_planes; i++) {
		const struct kvt_plane *plane = &c->planes[i];
		const uint32_t *table = kvt_seq_table(seq, plane);

		for (uint32_t b = 0; !plane->rows && (uint64_t)b * plane->geom.block_rows < tokens; b++)
			if (table[b] == KVT_NO_BLOCK)
				return kvt_fail(-EINVAL, "prefix insert: plane %u has no rows for tokens from %llu on", i,
						(unsigned long long)b * plane->geom.block_rows);
	}
	return 0;
}

/* A node's blocks become the sequence's. With the lock. */
static void take_blocks(struct kvt_prefix *p, uint32_t node, const struct kvt_seq *seq, uint32_t first)
{
	const struct kvt_cache *c = p->cache;
	uint32_t *blocks = kvt_prefix_blocks(p, node), n = p->tree->nodes[node].n;

	for (uint32_t i = 0; i < c->n_planes; i++) {
		const struct kvt_plane *plane = &c->planes[i];
		uint32_t per = kvt_prefix_per_chunk(p, plane), used = (n + plane->geom.block_rows - 1) / plane->geom.block_rows;

		if (!per)
			continue;
		memcpy(blocks, kvt_seq_table(seq, plane) + first / plane->geom.block_rows, used * sizeof(uint32_t));
		memset(blocks + used, 0xff, (per - used) * sizeof(uint32_t)); /* KVT_NO_BLOCK */
		blocks += per;
	}
	kvt_store_get_all(c->store, kvt_prefix_blocks(p, node), p->plan.chunk_blocks, NULL);
}

/* A new node, another being dropped for it if need be, but not the parent. */
static uint32_t add_node(struct kvt_prefix *p, uint32_t root, uint32_t parent, const uint32_t *tokens, uint32_t n)
{
	uint32_t node = kvt_tree_add(p->tree, root, parent, tokens, n), victim;

	if (node != NONE)
		return node;
	if (parent != NONE)
		p->tree->nodes[parent].flags |= KVT_NODE_LEAF_USED; /* to the back */
	victim = kvt_tree_leaf(p->tree);
	if (victim == NONE || victim == parent)
		return NONE;
	kvt_prefix_drop(p, victim);
	return kvt_tree_add(p->tree, root, parent, tokens, n);
}

/* One chunk or tail behind @parent. Returns its node (for a tail, perhaps a longer one), or NONE. */
static uint32_t insert_chunk(struct kvt_prefix *p, uint32_t root, uint32_t parent, const struct kvt_seq *seq, uint32_t first,
			     uint32_t n, uint32_t ns)
{
	const uint32_t *tokens = seq->tokens + first;
	uint32_t node = kvt_tree_child(p->tree, root, parent, tokens, n), old;
	struct kvt_tree_node *v;

	if (node != NONE && !(p->tree->nodes[node].flags & KVT_NODE_BAD))
		return node;
	if (node != NONE && (kvt_tree_busy(p->tree, node) || p->tree->nodes[node].n != n))
		return NONE;
	if (node != NONE) {
		kvt_store_put_all(p->cache->store, kvt_prefix_blocks(p, node), p->plan.chunk_blocks);
		p->tree->nodes[node].flags &= ~(KVT_NODE_BAD | KVT_NODE_SAVED);
	} else {
		node = add_node(p, root, parent, tokens, n);
		if (node == NONE)
			return NONE;
		p->st.inserted++;
		old = kvt_tree_covered(p->tree, node);
		if (old != NONE)
			kvt_prefix_drop(p, old);
	}
	v = &p->tree->nodes[node];
	v->ns = ns;
	take_blocks(p, node, seq, first);
	kvt_keeper_added(p, node);
	return node;
}

int64_t kvt_prefix_insert(struct kvt_cache *c, const struct kvt_prefix_root *root, struct kvt_seq *seq, uint32_t tokens,
			  uint32_t ns)
{
	struct kvt_prefix *p = prefix_of(c);
	uint32_t chunk, n, at;
	struct kvt_tree_path path;
	struct kvt_root_key key;
	int ret = p ? kvt_prefix_key(root, &key) : -EINVAL;

	if (ret)
		return ret;
	if (!seq || seq->cache != c || tokens > seq->len)
		return kvt_fail(-EINVAL, "prefix insert: %u tokens of a sequence of %u, which must be this cache's", tokens,
				seq ? seq->len : 0);
	ret = kvt_seq_idle(seq);
	if (!ret)
		ret = check_written(c, seq, tokens);
	if (ret)
		return ret;
	chunk = p->plan.chunk;
	pthread_mutex_lock(&p->lock);
	path.root = kvt_tree_root_get(p->tree, &key);
	kvt_tree_walk(p->tree, path.root, seq->tokens, tokens, &path);
	for (at = path.whole; at < tokens && path.root != NONE; at += n) {
		n = tokens - at < chunk ? tokens - at : chunk;
		path.node = insert_chunk(p, path.root, path.parent, seq, at, n, ns);
		if (path.node == NONE)
			break;
		path.parent = path.node;
	}
	p->st.refused += (tokens - at + chunk - 1) / chunk;
	if (path.root != NONE)
		kvt_tree_root_put(p->tree, path.root);
	pthread_mutex_unlock(&p->lock);
	return at;
}

/* ---- evict ---- */

/* Out of @tier, to what is below. True: no block of it is there any more. Without the lock; it is held. */
static bool demote(struct kvt_prefix *p, uint32_t node, enum kvt_tier tier)
{
	const uint32_t *blocks = kvt_prefix_blocks(p, node), n = p->plan.chunk_blocks;
	struct kvt_store *s = p->cache->store;

	for (uint32_t to = tier + 1; to < KVT_TIERS && kvt_store_count(s, blocks, n, tier); to++)
		if (p->cache->budget[to].limit)
			kvt_store_move(s, blocks, n, (enum kvt_tier)to);
	return !kvt_store_count(s, blocks, n, tier);
}

/* From a memory tier: demoted, or dropped where that is all that can be done. */
static uint32_t evict_memory(struct kvt_prefix *p, enum kvt_tier tier, uint32_t chunks)
{
	uint32_t node, gone = 0;
	bool there, out;

	pthread_mutex_lock(&p->lock);
	while (gone < chunks && (node = kvt_tree_warm(p->tree)) != NONE) {
		there = kvt_store_count(p->cache->store, kvt_prefix_blocks(p, node), p->plan.chunk_blocks, tier);
		kvt_tree_hold(p->tree, node);
		pthread_mutex_unlock(&p->lock);
		out = there && demote(p, node, tier);
		pthread_mutex_lock(&p->lock);
		kvt_tree_unhold(p->tree, node);
		kvt_tree_cool(p->tree, node);
		if (out)
			p->st.demoted++;
		gone += out;
	}
	pthread_mutex_unlock(&p->lock);
	return gone;
}

uint32_t kvt_prefix_drop_from(struct kvt_prefix *p, enum kvt_tier tier, uint32_t chunks)
{
	uint32_t node, gone = 0, tries;

	pthread_mutex_lock(&p->lock);
	for (tries = p->tree->used; tries && gone < chunks && (node = kvt_tree_leaf(p->tree)) != NONE; tries--) {
		if (kvt_store_count(p->cache->store, kvt_prefix_blocks(p, node), p->plan.chunk_blocks, tier)) {
			kvt_prefix_drop(p, node);
			gone++;
		} else {
			p->tree->ops->touch(p->tree->leaves, node, KVT_USE_READ);
		}
	}
	pthread_mutex_unlock(&p->lock);
	return gone;
}

int64_t kvt_prefix_evict(struct kvt_cache *c, enum kvt_tier tier, uint32_t chunks)
{
	struct kvt_prefix *p = prefix_of(c);
	uint32_t gone = 0;

	if (!p)
		return -EINVAL;
	if ((unsigned int)tier >= KVT_TIERS)
		return kvt_fail(-EINVAL, "tier %u", tier);
	if (tier != KVT_TIER_DISK)
		gone = evict_memory(p, tier, chunks);
	if (gone < chunks)
		gone += kvt_prefix_drop_from(p, tier, chunks - gone);
	return gone;
}

/* ---- what it is ---- */

int64_t kvt_prefix_tokens(const struct kvt_cache *c)
{
	const struct kvt_prefix *p = prefix_of(c);

	return p ? (int64_t)p->plan.chunk : -EINVAL;
}

int kvt_prefix_stats(struct kvt_cache *c, struct kvt_prefix_stats *stats)
{
	struct kvt_prefix *p = prefix_of(c);
	uint32_t size = stats ? stats->size : 0;
	struct kvt_prefix_stats st;

	if (!p)
		return -EINVAL;
	if (size < sizeof(uint32_t) * 2)
		return kvt_fail(-EINVAL, "prefix stats: size is %u: begin with KVT_INIT()", size);
	pthread_mutex_lock(&p->lock);
	st = p->st;
	st.roots = p->tree->roots_used;
	st.chunks = p->tree->capacity;
	st.chunks_free = p->tree->capacity - p->tree->used;
	st.chunks_pinned = p->tree->pinned;
	st.chunks_evictable = p->tree->used - p->tree->pinned;
	st.tokens = p->tree->used_tokens;
	st.snapshots = p->plan.snapshots;
	pthread_mutex_unlock(&p->lock);
	if (size > sizeof(st)) {
		memset(stats, 0, size);
		size = sizeof(st);
	}
	st.size = size;
	memcpy(stats, &st, size);
	return 0;
}

int kvt_prefix_check(struct kvt_cache *c)
{
	struct kvt_prefix *p = c->prefix;
	int ret;

	pthread_mutex_lock(&p->lock);
	ret = kvt_tree_check(p->tree);
	pthread_mutex_unlock(&p->lock);
	return ret;
}
