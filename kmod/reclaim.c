// SPDX-License-Identifier: GPL-2.0-only
/*
 * Reclaim: under memory pressure, frames that user space marked CLEAN are taken, those with the smallest stamp first.
 *
 * The shrinker is told node and memory cgroup, and finds the pools that were charged to it on a list_lru, by one marker
 * per pool and node. It may run inside any allocation, also one made by this module: it only tries locks. A pool on
 * which it works is held by a count, for which the pool's end waits, and not by a reference, which it could be the last
 * to drop.
 *
 * Numbers are pages. Words are looked at without a lock in windows of bounded size; the oldest few of a window are kept
 * and taken, by compare-and-swap, under the pool's lock.
 */
#include <linux/memcontrol.h>
#include <linux/mm.h>
#include <linux/nodemask.h>
#include <linux/sched/mm.h>
#include <linux/slab.h>
#include <linux/wait_bit.h>

#include "compat.h"
#include "internal.h"

#define KVT_WINDOW   65536u /* words looked at in a call and pool */
#define KVT_OLDEST   64u /* frames taken from a window */
#define KVT_AT_ONCE  16u /* pools worked on in a call */
#define KVT_BATCH    128 /* pages that reclaim asks for at once */

/*
 * Reclaim of a cgroup does not count what shrinkers give back, and so always goes down to its last priority, at which it
 * asks for 4 / seeks of all. With the usual 2, a cgroup at its limit would lose every clean frame at once.
 */
#define KVT_SEEKS    32

static struct shrinker *kvt_shrinker;
static struct list_lru kvt_lru;
static bool kvt_lru_ready;
static struct kmem_cache *kvt_marker_cache;

struct kvt_found {
	struct kvt_pool *pools[KVT_AT_ONCE];
	unsigned int n;
};

static KVT_LRU_WALKER(kvt_find_pool, item, arg)
{
	struct kvt_pool *pool = container_of(item, struct kvt_marker, lru)->pool;
	struct kvt_found *found = arg;

	if (found->n == KVT_AT_ONCE)
		return LRU_SKIP;
	atomic_inc(&pool->reclaiming);
	found->pools[found->n++] = pool;
	/* Others first, next time. */
	return LRU_ROTATE;
}

static void kvt_find_pools(struct shrink_control *sc, struct kvt_found *found)
{
	unsigned long walk = KVT_AT_ONCE;

	found->n = 0;
	/* With kvt_reclaim_init(): the list is there. */
	if (smp_load_acquire(&kvt_lru_ready))
		list_lru_walk_one(&kvt_lru, sc->nid, sc->memcg, kvt_find_pool, found, &walk);
}

static void kvt_put_pool(struct kvt_pool *pool)
{
	if (atomic_dec_and_test(&pool->reclaiming))
		wake_up_var(&pool->reclaiming);
}

static bool kvt_takeable(const struct kvt_pool *pool, u32 index, int nid, u64 *word)
{
	const struct kvt_frame *frame = &pool->frames[index];

	*word = READ_ONCE(pool->words[index]);
	return KVTIER_WORD_STATE(*word) == KVTIER_WORD_CLEAN && READ_ONCE(frame->runs) &&
	       READ_ONCE(frame->nid) == nid;
}

static unsigned long kvt_count_pages(struct shrinker *shrinker, struct shrink_control *sc)
{
	struct kvt_found found;
	unsigned long pages = 0;
	struct kvt_pool *pool;
	unsigned int i;
	u32 n, look, clean;
	u64 word;

	kvt_find_pools(sc, &found);
	for (i = 0; i < found.n; i++) {
		pool = found.pools[i];
		look = min(pool->n_frames, KVT_WINDOW);
		clean = 0;
		for (n = 0; n < look; n++)
			clean += kvt_takeable(pool, (READ_ONCE(pool->cursor) + n) % pool->n_frames, sc->nid, &word);
		/* What a window shows stands for the whole. */
		pages += div_u64((u64)clean * pool->n_frames, look) * pool->frame_pages;
		kvt_put_pool(pool);
	}
	return pages;
}

struct kvt_old {
	u32 n;
	u32 youngest; /* index of the one to replace */
	u32 frames[KVT_OLDEST];
	u64 words[KVT_OLDEST];
};

static bool kvt_older(u64 a, u64 b)
{
	return (s32)(KVTIER_WORD_STAMP(a) - KVTIER_WORD_STAMP(b)) < 0;
}

static void kvt_old_note(struct kvt_old *old, u32 want, u32 frame, u64 word)
{
	u32 i;

	if (old->n < want) {
		i = old->n++;
	} else {
		i = old->youngest;
		if (!kvt_older(word, old->words[i]))
			return;
	}
	old->frames[i] = frame;
	old->words[i] = word;
	if (old->n < want)
		return;
	for (i = 0, old->youngest = 0; i < old->n; i++)
		if (kvt_older(old->words[old->youngest], old->words[i]))
			old->youngest = i;
}

/* Take up to @pages of the pool's oldest clean frames on @nid. Returns pages given back. */
static unsigned long kvt_shrink_pool(struct kvt_pool *pool, int nid, unsigned long pages, struct kvt_old *old)
{
	u32 look = min(pool->n_frames, KVT_WINDOW), start = READ_ONCE(pool->cursor) % pool->n_frames, n, index;
	u32 want = clamp_t(unsigned long, DIV_ROUND_UP(pages, pool->frame_pages), 1, KVT_OLDEST);
	unsigned long got = 0;
	u64 word;

	old->n = 0;
	for (n = 0; n < look; n++) {
		index = (start + n) % pool->n_frames;
		if (kvt_takeable(pool, index, nid, &word))
			kvt_old_note(old, want, index, word);
	}
	/* A pool of one window is always seen whole, so that what is taken is the oldest; a larger one by and by. */
	WRITE_ONCE(pool->cursor, look < pool->n_frames ? (start + look) % pool->n_frames : 0);
	if (!old->n || !down_write_trylock(&pool->map_lock))
		return 0;
	for (n = 0; n < old->n; n++)
		got += kvt_frame_take(pool, old->frames[n], old->words[n]);
	up_write(&pool->map_lock);
	return got;
}

static unsigned long kvt_scan_pages(struct shrinker *shrinker, struct shrink_control *sc)
{
	unsigned long got = 0, round, want = sc->nr_to_scan;
	struct kvt_found found;
	struct kvt_old *old;
	unsigned int i;

	/* It is too large for a stack that may be deep already. */
	old = kmalloc(sizeof(*old), GFP_NOWAIT | __GFP_NOWARN);
	if (!old)
		return SHRINK_STOP;
	kvt_find_pools(sc, &found);
	do {
		round = 0;
		for (i = 0; i < found.n && got + round < want; i++)
			round += kvt_shrink_pool(found.pools[i], sc->nid, want - got - round, old);
		got += round;
	} while (round && got < want);
	for (i = 0; i < found.n; i++)
		kvt_put_pool(found.pools[i]);
	kfree(old);
	mm_account_reclaimed_pages(got);
	sc->nr_scanned = max(got, 1UL);
	return got ?: SHRINK_STOP;
}

static void kvt_markers_free(struct kvt_pool *pool)
{
	int nid;

	for (nid = 0; pool->markers && nid < nr_node_ids; nid++) {
		if (!pool->markers[nid])
			continue;
		list_lru_del_obj(&kvt_lru, &pool->markers[nid]->lru);
		kmem_cache_free(kvt_marker_cache, pool->markers[nid]);
	}
	kfree(pool->markers);
	pool->markers = NULL;
}

/* Let reclaim find the pool. The caller's cgroup is the one that its frames are charged to. */
int kvt_reclaim_add(struct kvt_pool *pool)
{
	struct kvt_marker *marker;
	int nid;

	if (!(pool->flags & KVTIER_POOL_RECLAIM))
		return 0;
	pool->markers = kcalloc(nr_node_ids, sizeof(*pool->markers), GFP_KERNEL_ACCOUNT);
	if (!pool->markers)
		return -ENOMEM;
	/* Allocated for its side effect: the list gets its part for the caller's cgroup. */
	marker = kmem_cache_alloc_lru(kvt_marker_cache, &kvt_lru, GFP_KERNEL_ACCOUNT);
	if (!marker)
		goto free_markers;
	kmem_cache_free(kvt_marker_cache, marker);
	for_each_node_state(nid, N_MEMORY) {
		/* The list goes by the node that the marker is on. */
		marker = kmem_cache_alloc_node(kvt_marker_cache, GFP_KERNEL_ACCOUNT | __GFP_THISNODE, nid);
		if (!marker)
			goto free_markers;
		marker->pool = pool;
		INIT_LIST_HEAD(&marker->lru);
		pool->markers[nid] = marker;
		list_lru_add_obj(&kvt_lru, &marker->lru);
	}
	return 0;

free_markers:
	kvt_reclaim_remove(pool);
	return -ENOMEM;
}

/* Once this returns, reclaim neither finds the pool nor works on it. */
void kvt_reclaim_remove(struct kvt_pool *pool)
{
	kvt_markers_free(pool);
	wait_var_event(&pool->reclaiming, !atomic_read(&pool->reclaiming));
}

int kvt_reclaim_init(void)
{
	int err;

	kvt_marker_cache = KMEM_CACHE(kvt_marker, SLAB_ACCOUNT);
	if (!kvt_marker_cache)
		return -ENOMEM;
	kvt_shrinker = shrinker_alloc(SHRINKER_NUMA_AWARE | SHRINKER_MEMCG_AWARE, "kvtier");
	if (!kvt_shrinker) {
		err = -ENOMEM;
		goto destroy_cache;
	}
	kvt_shrinker->count_objects = kvt_count_pages;
	kvt_shrinker->scan_objects = kvt_scan_pages;
	kvt_shrinker->seeks = KVT_SEEKS;
	kvt_shrinker->batch = KVT_BATCH;
	if (KVT_LRU_AFTER_SHRINKER) {
		err = kvt_shrinker_register(kvt_shrinker);
		if (err)
			goto destroy_cache;
	}
	err = list_lru_init_memcg(&kvt_lru, kvt_shrinker);
	if (err)
		goto free_shrinker;
	/* On kernels where the shrinker may run already: see kvt_find_pools(). */
	smp_store_release(&kvt_lru_ready, true);
	if (!KVT_LRU_AFTER_SHRINKER) {
		err = kvt_shrinker_register(kvt_shrinker);
		if (err)
			goto destroy_lru;
	}
	return 0;

destroy_lru:
	list_lru_destroy(&kvt_lru);
free_shrinker:
	kvt_shrinker_free(kvt_shrinker, KVT_LRU_AFTER_SHRINKER);
destroy_cache:
	kmem_cache_destroy(kvt_marker_cache);
	return err;
}

void kvt_reclaim_exit(void)
{
	kvt_shrinker_free(kvt_shrinker, true);
	list_lru_destroy(&kvt_lru);
	kmem_cache_destroy(kvt_marker_cache);
}
