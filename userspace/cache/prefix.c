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
#define CHUNK_BLOCKS_MAX (1u << 24) /* so that no size of a tree of KVT_PREFIX_CHUNKS wraps */
#define SKIPS 256 /* chunks passed over in a search for one that makes the room that is wanted */
#define MEMORY_TIERS (1u << KVT_TIER_GPU | 1u << KVT_TIER_PINNED | 1u << KVT_TIER_RAM)
#define ANY_TIER KVT_TIERS
#define READS_MIN 32 /* from disk, before they say what reading costs */

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
	if (blocks > CHUNK_BLOCKS_MAX)
		return kvt_fail(-EINVAL, "prefix tree: %llu blocks in a chunk are too many (%u at most): lower prefix_tokens",
				(unsigned long long)blocks, CHUNK_BLOCKS_MAX);
	plan->chunk_blocks = (uint32_t)blocks;
	return 0;
}

static int plan_snapshots(struct kvt_prefix_plan *plan, const struct kvt_cache_params *p, const struct kvt_plane *planes)
{
	uint64_t room = 0, bytes, blocks;

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
	blocks = p->snapshot_bytes / room + (p->snapshot_bytes % room != 0); /* the sum of both could wrap */
	if (blocks > UINT32_MAX / 2)
		return kvt_fail(-EINVAL, "snapshot_bytes is %llu: a state of at most %llu bytes (%u blocks) expected",
				(unsigned long long)p->snapshot_bytes, UINT32_MAX / 2 * (unsigned long long)room,
				UINT32_MAX / 2);
	plan->snapshot_blocks = (uint32_t)blocks;
	return 0;
}

uint64_t kvt_prefix_plan_bytes(const struct kvt_prefix_plan *plan, uint32_t capacity)
{
	return sizeof(struct kvt_prefix) + kvt_tree_bytes(plan->chunk, capacity, plan->policy) +
	       (uint64_t)capacity * plan->chunk_blocks * sizeof(uint32_t) +
	       plan->snapshots * (sizeof(struct kvt_snapshot) + (uint64_t)plan->snapshot_blocks * sizeof(uint32_t)) +
	       (plan->snapshots ? 2u << 20 : 0) + (plan->kept ? kvt_keeper_bytes(plan, capacity) : 0);
}

int kvt_prefix_plan(struct kvt_prefix_plan *plan, const struct kvt_cache_params *p, const struct kvt_plane *planes,
		    const struct kvt_policy_ops *policy)
{
	uint64_t low = 0, high, middle;
	int ret;

	*plan = (struct kvt_prefix_plan){ .policy = policy, .kept = p->store_dir };
	ret = plan_chunk(plan, p, planes);
	if (!ret)
		ret = plan_snapshots(plan, p, planes);
	if (ret)
		return ret;
	high = p->prefix_bytes / sizeof(struct kvt_tree_node) + 1;
	high = high > KVT_PREFIX_CHUNKS ? KVT_PREFIX_CHUNKS : high;
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

/* What a chunk costs to load, as the disk has been so far; too few reads say nothing. */
static struct kvt_policy_params costs(const struct kvt_prefix *p)
{
	struct kvt_policy_params costs = { 0 };
	struct kvt_stats st;
	uint64_t ns;

	kvt_store_stats(p->cache->store, &st);
	for (uint32_t t = 0; t < KVT_TIERS; t++)
		costs.frames[t] = (uint32_t)((st.tier[t].frames + p->plan.chunk_blocks - 1) / p->plan.chunk_blocks);
	ns = st.disk_reads < READS_MIN ? 0 : st.disk_read_ns / st.disk_reads * p->plan.chunk_blocks;
	costs.reload_ns[KVT_TIER_DISK] = ns < UINT32_MAX ? (uint32_t)ns : UINT32_MAX;
	return costs;
}

/* ---- life ---- */

static void *map(uint64_t bytes)
{
	void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	if (p == MAP_FAILED)
		return NULL;
	madvise(p, bytes, MADV_HUGEPAGE);
	return p;
}

static uint64_t blocks_bytes(const struct kvt_prefix_plan *plan)
{
	return (uint64_t)plan->capacity * plan->chunk_blocks * sizeof(uint32_t);
}

int kvt_prefix_create(struct kvt_cache *cache, const struct kvt_prefix_plan *plan, struct kvt_prefix **prefix)
{
	struct kvt_prefix *p = calloc(1, sizeof(*p));
	struct kvt_policy_params c;
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
	c = costs(p);
	for (uint32_t t = 0; t < KVT_TIER_DISK; t++)
		if (c.frames[t])
			p->home = (enum kvt_tier)t;
	ret = kvt_tree_create(plan->chunk, plan->capacity, seed, plan->policy, &c, &p->tree);
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

/* Would a node's going make room in @tier; or, in ANY_TIER: do sequences use all of it? */
static bool makes_room(const struct kvt_prefix *p, uint32_t node, uint32_t tier)
{
	const uint32_t *blocks = kvt_prefix_blocks(p, node);

	if (tier == ANY_TIER)
		return kvt_store_alone(p->cache->store, blocks, p->plan.chunk_blocks);
	return kvt_store_count(p->cache->store, blocks, p->plan.chunk_blocks, (enum kvt_tier)tier);
}

/* Where a node's blocks are now. With the lock. */
static void locate(struct kvt_prefix *p, uint32_t node)
{
	uint32_t t = 0;

	while (t < KVT_TIER_DISK && !kvt_store_count(p->cache->store, kvt_prefix_blocks(p, node), p->plan.chunk_blocks, t))
		t++;
	kvt_tree_place(p->tree, node, (enum kvt_tier)t);
}

/* Of those that may leave @tiers, or with 0 of the leaves, the one that should first and makes room in @tier. With the lock. */
static uint32_t find_victim(struct kvt_prefix *p, uint32_t tiers, uint32_t tier)
{
	uint32_t skipped[SKIPS], n = 0, node;

	for (;;) {
		node = tiers ? kvt_tree_victim(p->tree, tiers) : kvt_tree_leaf(p->tree);
		if (node == NONE || makes_room(p, node, tier))
			break;
		if (tiers)
			locate(p, node); /* it was loaded, or evicted by the store, since */
		if (tiers && !(tiers >> p->tree->nodes[node].tier & 1))
			continue;
		if (n == SKIPS) {
			node = NONE;
			break;
		}
		kvt_tree_skip(p->tree, node);
		skipped[n++] = node;
	}
	while (n--)
		kvt_tree_settle(p->tree, skipped[n]);
	return node;
}

bool kvt_prefix_reclaim(struct kvt_prefix *p)
{
	uint32_t node;

	pthread_mutex_lock(&p->lock);
	node = find_victim(p, 0, ANY_TIER);
	if (node != NONE)
		kvt_prefix_drop(p, node);
	pthread_mutex_unlock(&p->lock);
	return node != NONE;
}

/* ---- use ---- */

/* How much of its prompt stands behind a chunk says much about how many will ask for it: by octaves of chunks. */
static uint32_t kind_of(uint32_t behind)
{
	uint32_t octave = 31 - (uint32_t)__builtin_clz(behind + 1);

	return octave < KVT_POLICY_KINDS ? octave : KVT_POLICY_KINDS - 1;
}

static uint32_t compute_ns(const struct kvt_prefix *p, uint32_t node)
{
	uint64_t ns = (uint64_t)p->tree->nodes[node].ns * p->tree->nodes[node].n;

	return ns < UINT32_MAX ? (uint32_t)ns : UINT32_MAX;
}

void kvt_prefix_use(struct kvt_prefix *p, uint32_t node, uint32_t behind)
{
	kvt_tree_use(p->tree, node, &(struct kvt_content){ .recompute_ns = compute_ns(p, node), .kind = kind_of(behind) });
}

/* A path from @node up to, but not, @end, of a prompt that has @behind more chunks. */
static void use_path(struct kvt_prefix *p, uint32_t node, uint32_t end, uint32_t behind)
{
	for (; node != end; node = p->tree->nodes[node].parent)
		kvt_prefix_use(p, node, behind++);
}

/* ---- match ---- */

static void find(struct kvt_prefix *p, const struct kvt_root_key *key, const uint32_t *tokens, uint32_t n, bool use,
		 struct kvt_prefix_match *match)
{
	struct kvt_tree_path path;
	uint32_t snapshot;

	kvt_tree_walk(p->tree, kvt_tree_root(p->tree, key), tokens, n, &path);
	if (use) {
		kvt_tree_turn(p->tree);
		use_path(p, path.node, NONE, (n + p->plan.chunk - 1) / p->plan.chunk - path.chunks);
	}
	kvt_tree_pin(p->tree, path.node);
	snapshot = kvt_snapshot_above(p, path.node, path.tokens);
	*match = (struct kvt_prefix_match){
		.tokens = path.tokens, .chunks = path.chunks, .node = path.node,
		.snapshot = snapshot == NONE ? 0 : p->snapshots[snapshot].tokens,
	};
}

int kvt_prefix_pin(struct kvt_prefix *p, const struct kvt_prefix_root *root, const uint32_t *tokens, uint32_t n,
		   struct kvt_prefix_match *match)
{
	struct kvt_root_key key;
	int ret = kvt_prefix_key(root, &key);

	if (ret)
		return ret;
	pthread_mutex_lock(&p->lock);
	find(p, &key, tokens, n, false, match);
	pthread_mutex_unlock(&p->lock);
	return 0;
}

int kvt_prefix_match(struct kvt_cache *c, const struct kvt_prefix_root *root, const uint32_t *tokens, uint32_t n,
		     struct kvt_prefix_match *match)
{
	struct kvt_prefix *p = prefix_of(c);
	struct kvt_root_key key;
	int ret = p ? kvt_prefix_key(root, &key) : -EINVAL;

	if (!match)
		return kvt_fail(-EINVAL, "prefix match: no match to fill");
	*match = (struct kvt_prefix_match){ .node = NONE };
	if (!ret && n && !tokens)
		ret = kvt_fail(-EINVAL, "prefix match: %u tokens, but no ids", n);
	if (ret)
		return ret;
	pthread_mutex_lock(&p->lock);
	find(p, &key, tokens, n, true, match);
	p->asked = true;
	p->st.lookups++;
	p->st.lookups_hit += match->tokens > 0;
	p->st.tokens_asked += n;
	p->st.tokens_hit += match->tokens;
	if (match->chunks > p->st.depth)
		p->st.depth = match->chunks;
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

	if (!p || !match || !match->chunks) /* a match of no chunks, a zeroed one too, holds nothing */
		return;
	pthread_mutex_lock(&p->lock);
	kvt_tree_unpin(p->tree, match->node);
	drop_bad(p, match->node);
	pthread_mutex_unlock(&p->lock);
	*match = (struct kvt_prefix_match){ .node = NONE };
}

/* ---- attach ---- */

static enum kvt_tier fastest(const uint64_t bytes[KVT_TIERS])
{
	uint32_t t = 0;

	while (t < KVT_TIER_DISK && !bytes[t])
		t++;
	return (enum kvt_tier)t;
}

/* The first @n tokens of a node that is chunk number @depth of the sequence. With the lock. */
static void attach_node(struct kvt_prefix *p, uint32_t node, uint32_t depth, uint32_t n, struct kvt_seq *seq)
{
	const struct kvt_cache *c = p->cache;
	const uint32_t *blocks = kvt_prefix_blocks(p, node);
	uint64_t bytes[KVT_TIERS] = { 0 };

	memcpy(seq->tokens + (uint64_t)depth * p->plan.chunk, kvt_tree_tokens(p->tree, node), n * sizeof(uint32_t));
	for (uint32_t i = 0; i < c->n_planes; i++) {
		const struct kvt_plane *plane = &c->planes[i];
		uint32_t per = kvt_prefix_per_chunk(p, plane), used = (n + plane->geom.block_rows - 1) / plane->geom.block_rows;

		if (!per)
			continue;
		memcpy(kvt_seq_table(seq, plane) + (uint64_t)depth * per, blocks, used * sizeof(uint32_t));
		kvt_store_get_all(c->store, blocks, used, bytes);
		blocks += per;
	}
	for (uint32_t t = 0; t < KVT_TIERS; t++)
		p->st.hit_bytes[t] += bytes[t];
	/* what lies on disk will be loaded */
	kvt_tree_place(p->tree, node, bytes[KVT_TIER_DISK] ? p->home : fastest(bytes));
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
	uint64_t bytes[KVT_TIERS] = { 0 };

	for (uint32_t i = 0; i < c->n_planes; i++) {
		const struct kvt_plane *plane = &c->planes[i];
		uint32_t per = kvt_prefix_per_chunk(p, plane), used = (n + plane->geom.block_rows - 1) / plane->geom.block_rows;

		if (!per)
			continue;
		memcpy(blocks, kvt_seq_table(seq, plane) + first / plane->geom.block_rows, used * sizeof(uint32_t));
		memset(blocks + used, 0xff, (per - used) * sizeof(uint32_t)); /* KVT_NO_BLOCK */
		blocks += per;
	}
	kvt_store_get_all(c->store, kvt_prefix_blocks(p, node), p->plan.chunk_blocks, bytes);
	kvt_tree_place(p->tree, node, fastest(bytes));
}

/* A new node, another being dropped for it if need be. */
static uint32_t add_node(struct kvt_prefix *p, uint32_t root, uint32_t parent, const uint32_t *tokens, uint32_t n)
{
	uint32_t node = kvt_tree_add(p->tree, root, parent, tokens, n, p->home), victim;

	if (node != NONE)
		return node;
	victim = kvt_tree_leaf(p->tree);
	if (victim == NONE)
		return NONE;
	kvt_prefix_drop(p, victim);
	return kvt_tree_add(p->tree, root, parent, tokens, n, p->home);
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
		p->tree->nodes[node].flags |= KVT_NODE_NEW;
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

/* The chunks of @seq behind those that are known. Returns the token before which it ends. With the lock. */
static uint32_t insert_path(struct kvt_prefix *p, uint32_t root, struct kvt_seq *seq, uint32_t tokens, uint32_t ns)
{
	const uint32_t chunk = p->plan.chunk;
	struct kvt_tree_path path;
	uint32_t at, n, node, known, held;

	kvt_tree_walk(p->tree, root, seq->tokens, tokens, &path);
	if (!p->asked) { /* nobody has asked for it: a use of its own */
		kvt_tree_turn(p->tree);
		use_path(p, path.parent, NONE, (tokens - path.whole + chunk - 1) / chunk);
	}
	p->asked = false;
	known = held = path.parent; /* what is held does not make room for what is behind it; nor does what is new */
	if (held != NONE)
		kvt_tree_hold(p->tree, held);
	for (at = path.whole; at < tokens; at += n) {
		n = tokens - at < chunk ? tokens - at : chunk;
		if ((at - path.whole) % (KVT_TREE_FETCH * chunk) == 0)
			kvt_tree_fetch(p->tree, root, path.parent, seq->tokens + at, (tokens - at) / chunk);
		node = insert_chunk(p, root, path.parent, seq, at, n, ns);
		if (node == NONE)
			break;
		if (!(p->tree->nodes[node].flags & KVT_NODE_NEW)) { /* it was behind one whose bytes were lost */
			kvt_tree_hold(p->tree, node);
			if (held != NONE)
				kvt_tree_unhold(p->tree, held);
			held = node;
		}
		path.parent = node;
	}
	use_path(p, path.parent, known, (tokens - at + chunk - 1) / chunk);
	if (held != NONE)
		kvt_tree_unhold(p->tree, held);
	return at;
}

int64_t kvt_prefix_insert(struct kvt_cache *c, const struct kvt_prefix_root *root, struct kvt_seq *seq, uint32_t tokens,
			  uint32_t ns)
{
	struct kvt_prefix *p = prefix_of(c);
	struct kvt_root_key key;
	uint32_t at = 0, place;
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
	pthread_mutex_lock(&p->lock);
	place = kvt_tree_root_get(p->tree, &key);
	if (place != NONE) {
		at = insert_path(p, place, seq, tokens, ns);
		kvt_tree_root_put(p->tree, place);
	}
	p->st.refused += (tokens - at + p->plan.chunk - 1) / p->plan.chunk;
	pthread_mutex_unlock(&p->lock);
	return at;
}

/* ---- evict ---- */

/*
 * Out of @tier, to what is below, with @worth not to where it would take longer to load than to compute. True: no block of
 * it is there any more. Without the lock; it is held.
 */
static bool demote(struct kvt_prefix *p, uint32_t node, enum kvt_tier tier, bool worth)
{
	const uint32_t *blocks = kvt_prefix_blocks(p, node), n = p->plan.chunk_blocks;
	struct kvt_store *s = p->cache->store;
	struct kvt_policy_params c = costs(p);

	for (uint32_t to = tier; kvt_store_count(s, blocks, n, tier);) {
		to = kvt_policy_below(&c, to, worth ? compute_ns(p, node) : 0);
		if (to == KVT_TIERS)
			break;
		kvt_store_move(s, blocks, n, (enum kvt_tier)to);
	}
	return !kvt_store_count(s, blocks, n, tier);
}

/* From a memory tier: demoted. What cannot be now is passed over. */
static uint32_t evict_memory(struct kvt_prefix *p, enum kvt_tier tier, uint32_t chunks, bool worth)
{
	uint32_t held[SKIPS], n_held = 0, node, gone = 0;
	bool out;

	pthread_mutex_lock(&p->lock);
	while (gone < chunks && n_held < SKIPS) {
		node = find_victim(p, 1u << tier, tier);
		if (node == NONE) /* what was loaded meanwhile may be elsewhere than was thought */
			node = find_victim(p, MEMORY_TIERS, tier);
		if (node == NONE)
			break;
		kvt_tree_hold(p->tree, node);
		pthread_mutex_unlock(&p->lock);
		out = demote(p, node, tier, worth);
		pthread_mutex_lock(&p->lock);
		locate(p, node);
		if (out) {
			kvt_tree_unhold(p->tree, node);
			p->st.demoted++;
			gone++;
		} else {
			held[n_held++] = node;
		}
	}
	while (n_held--)
		kvt_tree_unhold(p->tree, held[n_held]);
	pthread_mutex_unlock(&p->lock);
	return gone;
}

uint32_t kvt_prefix_drop_from(struct kvt_prefix *p, enum kvt_tier tier, uint32_t chunks)
{
	uint32_t node, gone;

	pthread_mutex_lock(&p->lock);
	for (gone = 0; gone < chunks; gone++) {
		node = find_victim(p, 0, tier);
		if (node == NONE)
			break;
		kvt_prefix_drop(p, node);
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
		gone = evict_memory(p, tier, chunks, true);
	if (gone < chunks)
		gone += kvt_prefix_drop_from(p, tier, chunks - gone);
	if (gone < chunks && tier != KVT_TIER_DISK) /* not worth it, but what is behind them is there, and was */
		gone += evict_memory(p, tier, chunks - gone, false);
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
