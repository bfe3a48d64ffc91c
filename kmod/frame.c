// SPDX-License-Identifier: GPL-2.0-only
/*
 * A frame's memory: given, held for a transfer, taken away.
 *
 * Memory is allocated before map_lock is taken, so that reclaim can find its way to this very pool. It is order-0 pages
 * (each with its own count, as mappings and get_user_pages want it) in as large physically contiguous runs as there are,
 * as transfers want it.
 */
#include <linux/memcontrol.h>
#include <linux/mm.h>
#include <linux/sched/mm.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>

#include "compat.h"
#include "internal.h"
#include "trace.h"

/* No OOM kill for a pool's sake: the caller is told. */
#define KVT_GFP (GFP_USER | __GFP_ACCOUNT | __GFP_ZERO | __GFP_NOWARN)

static struct page *kvt_pages_alloc(const struct kvt_pool *pool, unsigned int order)
{
	gfp_t gfp = KVT_GFP | (order ? __GFP_NORETRY : __GFP_RETRY_MAYFAIL);
	struct page *page;

	if (pool->flags & KVTIER_POOL_STRICT_NODE)
		gfp |= __GFP_THISNODE;
	if (pool->node == NUMA_NO_NODE)
		page = alloc_pages(gfp, order);
	else
		page = alloc_pages_node(pool->node, gfp, order);
	if (page && order)
		split_page(page, order);
	return page;
}

static void kvt_run_free(struct page *page, unsigned int n)
{
	unsigned int i;

	for (i = 0; i < n; i++)
		put_page(page + i);
}

static void kvt_runs_free(struct bio_vec *runs, unsigned int n, const struct bio_vec *one)
{
	unsigned int i;

	for (i = 0; i < n; i++)
		kvt_run_free(runs[i].bv_page, runs[i].bv_len >> PAGE_SHIFT);
	if (runs != one)
		kfree(runs);
}

/* Fills @frame's runs, which nobody else sees. */
static int kvt_runs_alloc(const struct kvt_pool *pool, struct kvt_frame *frame)
{
	unsigned int left = pool->frame_pages, order = ilog2(left), n = 0;
	struct page *page, *next;
	struct bio_vec *run;
	LIST_HEAD(pages);

	while (left) {
		order = min_t(unsigned int, order, ilog2(left));
		page = fatal_signal_pending(current) ? NULL : kvt_pages_alloc(pool, order);
		if (!page) {
			if (!order || fatal_signal_pending(current))
				goto free_pages;
			order--;
			continue;
		}
		set_page_private(page, order);
		list_add_tail(&page->lru, &pages);
		left -= 1u << order;
		n++;
	}

	frame->runs = &frame->one;
	if (n > 1) {
		frame->runs = kmalloc_array(n, sizeof(*frame->runs), GFP_KERNEL_ACCOUNT | __GFP_NOWARN | __GFP_RETRY_MAYFAIL);
		if (!frame->runs)
			goto free_pages;
	}
	frame->n_runs = n;
	run = frame->runs;
	list_for_each_entry_safe(page, next, &pages, lru) {
		list_del(&page->lru);
		run->bv_page = page;
		run->bv_len = PAGE_SIZE << page_private(page);
		run->bv_offset = 0;
		set_page_private(page, 0);
		run++;
	}
	frame->nid = page_to_nid(frame->runs[0].bv_page);
	return 0;

free_pages:
	list_for_each_entry_safe(page, next, &pages, lru) {
		list_del(&page->lru);
		order = page_private(page);
		set_page_private(page, 0);
		kvt_run_free(page, 1u << order);
	}
	if (fatal_signal_pending(current))
		return -EINTR;
	kvt_count(KVT_C_ERR_MEMORY, 1);
	return -ENOMEM;
}

/* Give a frame memory: 1, or 0 if it had some, or an error. */
static int kvt_frame_try_populate(struct kvt_pool *pool, u32 index)
{
	struct kvt_frame fresh = {}, *frame = &pool->frames[index];
	struct mem_cgroup *old;
	bool charged = false;
	int err;

	/* A look without the lock, to spare the common case an allocation. */
	if (READ_ONCE(frame->runs))
		return 0;
	/* The pool was charged for the first time that a frame has memory. */
	if (READ_ONCE(frame->had_memory)) {
		err = kvt_charge(&pool->account, pool->frame_bytes);
		if (err)
			return err;
		charged = true;
	}
	old = set_active_memcg(pool->account.memcg);
	err = kvt_runs_alloc(pool, &fresh);
	set_active_memcg(old);
	if (err)
		goto uncharge;

	down_write(&pool->map_lock);
	/* Another came first; or came first and lost it, so that a charge is missing: the caller tries again. */
	if (frame->runs || frame->had_memory != charged) {
		err = frame->runs ? 0 : -EAGAIN;
		up_write(&pool->map_lock);
		kvt_runs_free(fresh.runs, fresh.n_runs, &fresh.one);
		goto uncharge;
	}
	frame->one = fresh.one;
	frame->n_runs = fresh.n_runs;
	frame->nid = fresh.nid;
	WRITE_ONCE(frame->had_memory, true);
	WRITE_ONCE(frame->runs, fresh.runs == &fresh.one ? &frame->one : fresh.runs);
	atomic_inc(&pool->present);
	if (frame->n_runs == 1)
		atomic_inc(&pool->contiguous);
	/* Who sees HELD may touch the frame. */
	smp_store_release(&pool->words[index], KVTIER_WORD(KVTIER_WORD_HELD, frame->generation, 0));
	up_write(&pool->map_lock);

	atomic64_inc(&pool->populated);
	kvt_count(KVT_C_POPULATED_FRAMES, 1);
	trace_kvtier_populate(pool->id, index);
	return 1;

uncharge:
	if (charged)
		kvt_uncharge(&pool->account, pool->frame_bytes);
	return err;
}

int kvt_frame_populate(struct kvt_pool *pool, u32 index)
{
	int ret;

	do {
		ret = kvt_frame_try_populate(pool, index);
	} while (ret == -EAGAIN);
	return ret;
}

/* Drop a frame's memory. Its word says BUSY, map_lock is held for writing, and no transfer uses it. */
static void kvt_frame_drop(struct kvt_pool *pool, u32 index)
{
	struct kvt_frame *frame = &pool->frames[index];

	lockdep_assert_held_write(&pool->map_lock);
	unmap_mapping_range(pool->inode->i_mapping, (loff_t)index * pool->frame_bytes, pool->frame_bytes, 1);
	kvt_runs_free(frame->runs, frame->n_runs, &frame->one);
	atomic_dec(&pool->present);
	if (frame->n_runs == 1)
		atomic_dec(&pool->contiguous);
	WRITE_ONCE(frame->runs, NULL);
	frame->n_runs = 0;
	frame->generation = (frame->generation + 1) & 0xffffff;
	/* Who sees FREE may ask for memory again: the old one is gone. */
	smp_store_release(&pool->words[index], KVTIER_WORD(KVTIER_WORD_FREE, frame->generation, 0));
	kvt_uncharge(&pool->account, pool->frame_bytes);
}

/* Somebody holds the pages (a registered buffer, a GPU): taking the frame would free nothing. */
static bool kvt_frame_pinned(const struct kvt_frame *frame)
{
	unsigned int i, j;

	for (i = 0; i < frame->n_runs; i++)
		for (j = 0; j < frame->runs[i].bv_len >> PAGE_SHIFT; j++)
			if (folio_maybe_dma_pinned(page_folio(frame->runs[i].bv_page + j)))
				return true;
	return false;
}

/*
 * Take a frame whose word was seen as @word, CLEAN. map_lock is held for writing. The compare-and-swap is where user
 * space, which may be making the frame HELD, and reclaim agree on who has it. Returns the pages that were given back.
 */
u32 kvt_frame_take(struct kvt_pool *pool, u32 index, u64 word)
{
	struct kvt_frame *frame = &pool->frames[index];

	if (!frame->runs || atomic_read(&frame->in_flight) || kvt_frame_pinned(frame))
		return 0;
	if (!try_cmpxchg(&pool->words[index], &word, KVTIER_WORD(KVTIER_WORD_BUSY, frame->generation, 0)))
		return 0;
	kvt_frame_drop(pool, index);
	atomic64_inc(&pool->taken);
	kvt_count(KVT_C_TAKEN_FRAMES, 1);
	kvt_count(KVT_C_TAKEN_BYTES, pool->frame_bytes);
	trace_kvtier_take(pool->id, index);
	return pool->frame_pages;
}

/* Hold a frame's memory for a transfer; a lazy frame that never had any gets it. */
int kvt_frame_get(struct kvt_pool *pool, u32 index)
{
	struct kvt_frame *frame = &pool->frames[index];
	int err;

	for (;;) {
		down_read(&pool->map_lock);
		if (frame->runs) {
			atomic_inc(&frame->in_flight);
			up_read(&pool->map_lock);
			return 0;
		}
		err = frame->had_memory || !(pool->flags & KVTIER_POOL_LAZY) ? -ENODATA : 0;
		up_read(&pool->map_lock);
		if (err) {
			kvt_count(KVT_C_ERR_LOST, 1);
			return err;
		}
		err = kvt_frame_populate(pool, index);
		if (err < 0)
			return err;
	}
}

void kvt_frame_put(struct kvt_pool *pool, u32 index)
{
	atomic_dec(&pool->frames[index].in_flight);
}

/* At the pool's end: nobody maps it, nothing is in flight. The charges are the caller's to take back. */
void kvt_frames_free(struct kvt_pool *pool)
{
	struct kvt_frame *frame;
	u32 i;

	for (i = 0; i < pool->n_frames; i++) {
		frame = &pool->frames[i];
		if (!frame->runs)
			continue;
		kvt_runs_free(frame->runs, frame->n_runs, &frame->one);
		cond_resched();
	}
}

static int kvt_range_check(const struct kvt_pool *pool, const struct kvtier_range *range)
{
	if (range->flags)
		return -EOPNOTSUPP;
	if (!range->n || range->first >= pool->n_frames || range->n > pool->n_frames - range->first)
		return -EINVAL;
	return 0;
}

long kvt_pool_populate(struct kvt_call *call)
{
	struct kvt_pool *pool = kvt_pool_of_file(call->file);
	struct kvtier_range *range = call->arg;
	long got = 0;
	int err;
	u32 i;

	err = kvt_range_check(pool, range);
	if (err)
		return err;
	for (i = range->first; i < range->first + range->n; i++) {
		if (fatal_signal_pending(current)) {
			err = -EINTR;
			break;
		}
		err = kvt_frame_populate(pool, i);
		if (err < 0)
			break;
		got += err;
		cond_resched();
	}
	return got ?: min(err, 0);
}

long kvt_pool_release(struct kvt_call *call)
{
	struct kvt_pool *pool = kvt_pool_of_file(call->file);
	struct kvtier_range *range = call->arg;
	struct kvt_frame *frame;
	long released = 0;
	int err;
	u32 i;

	err = kvt_range_check(pool, range);
	if (err)
		return err;
	for (i = range->first; i < range->first + range->n; i++) {
		frame = &pool->frames[i];
		if (down_write_killable(&pool->map_lock)) {
			err = -EINTR;
			break;
		}
		if (frame->runs && atomic_read(&frame->in_flight)) {
			err = -EBUSY;
		} else if (frame->runs) {
			xchg(&pool->words[i], KVTIER_WORD(KVTIER_WORD_BUSY, frame->generation, 0));
			kvt_frame_drop(pool, i);
			released++;
		}
		up_write(&pool->map_lock);
		if (err)
			break;
		cond_resched();
	}
	return released ?: err;
}
