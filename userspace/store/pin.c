// SPDX-License-Identifier: MIT
/*
 * Blocks that kernels use: pinned where the device reads them, from before the
 * first launch until after the last has run, which only the caller knows. An
 * open block gets its rows from kernels; its row count and digest are told when
 * it is sealed, so that no append waits for the device.
 */
#include "store/internal.h"

#include <errno.h>
#include <string.h>

#include "base/err.h"

static void pin(struct kvt_store *s, uint32_t block)
{
	s->blocks[block].pins++;
}

static void unpin(struct kvt_store *s, uint32_t block)
{
	s->blocks[block].pins--;
	kvt_store_unhold(s, block);
}

static int no_device(const struct kvt_store *s)
{
	return kvt_fail(-ENODEV, s->gpu_lost ? "the GPU is gone, and its tier with it" :
			"there is no gpu tier: gpu_bytes is 0");
}

int kvt_store_pin(struct kvt_store *s, const uint32_t *blocks, uint32_t n, uint64_t *at)
{
	uint32_t done = 0;
	int ret = 0;

	kvt_store_borrow_begin(s, blocks, n);
	pthread_mutex_lock(&s->lock);
	s->working++;
	if (!s->device || s->gpu_lost)
		ret = no_device(s);
	for (; done < n && !ret; done++) {
		struct block *b = blocks[done] == KVT_NO_BLOCK ? NULL : &s->blocks[blocks[done]];

		at[done] = 0;
		if (!b)
			continue;
		if (b->rows)
			ret = kvt_store_wait_resident(s, blocks[done], s->device_tiers);
		if (ret)
			break;
		pin(s, blocks[done]);
		if (b->rows)
			at[done] = kvt_device_frame(s, b->tier, b->frame);
	}
	for (uint32_t i = 0; i < n && ret; i++) {
		if (blocks[i] == KVT_NO_BLOCK)
			continue;
		if (i < done)
			unpin(s, blocks[i]);
		else
			kvt_store_unhold(s, blocks[i]);
	}
	kvt_store_end_work(s);
	pthread_mutex_unlock(&s->lock);
	return ret;
}

bool kvt_store_on_host(struct kvt_store *s, uint32_t block, struct kvt_host_rows *rows)
{
	const struct block *b;
	bool on_host;

	if (block == KVT_NO_BLOCK)
		return false;
	pthread_mutex_lock(&s->lock);
	b = &s->blocks[block];
	on_host = b->frame != NONE && b->tier == KVT_TIER_PINNED;
	if (on_host)
		*rows = (struct kvt_host_rows){ (uintptr_t)kvt_store_host_frame(s, b->tier, b->frame), b->digest, b->rows };
	pthread_mutex_unlock(&s->lock);
	return on_host;
}

void kvt_store_count_bad(struct kvt_store *s, uint64_t n)
{
	pthread_mutex_lock(&s->lock);
	s->st.digest_errors += n;
	pthread_mutex_unlock(&s->lock);
}

void kvt_store_unpin(struct kvt_store *s, const uint32_t *blocks, uint32_t n)
{
	pthread_mutex_lock(&s->lock);
	for (uint32_t i = 0; i < n; i++) {
		if (blocks[i] == KVT_NO_BLOCK)
			continue;
		s->policy_ops->touch(s->policy, blocks[i], KVT_USE_READ);
		unpin(s, blocks[i]);
	}
	s->policy_ops->turn(s->policy);
	pthread_mutex_unlock(&s->lock);
}

/* A frame for a block that has none, zeroed in stream order. */
static int new_frame(struct kvt_store *s, uint32_t block, kvt_stream stream)
{
	uint32_t tier, frame;
	int ret;

	s->blocks[block].state = B_MOVING;
	/* host frames that dirty blocks may not take are for reading */
	ret = kvt_store_wait_frame(s, kvt_store_may_dirty(s) ? s->device_tiers : 1u << KVT_TIER_GPU, &tier, &frame);
	if (!ret) {
		pthread_mutex_unlock(&s->lock);
		ret = kvt_device_zero_async(s, tier, frame, stream);
		pthread_mutex_lock(&s->lock);
		if (ret)
			kvt_store_give(s, tier, frame);
		else
			kvt_store_place(s, block, tier, frame);
	}
	s->blocks[block].state = B_IDLE;
	return ret;
}

int kvt_store_open(struct kvt_store *s, uint32_t block, kvt_stream stream, uint64_t *at, uint64_t *digest)
{
	struct block *b = &s->blocks[block];
	bool fresh;
	int ret;

	pthread_mutex_lock(&s->lock);
	s->working++;
	if (!s->device || s->gpu_lost) {
		ret = no_device(s);
	} else if (b->rows) {
		ret = kvt_store_hold_to_change(s, block, false, s->device_tiers, &fresh);
		if (!ret) { /* what it will hold is not what others wait to see changed; it is pinned */
			b->changing = false;
			s->changing--;
			s->working--;
		}
	} else {
		kvt_store_hold(s, block);
		s->policy_ops->touch(s->policy, block, KVT_USE_WRITE);
		s->policy_ops->turn(s->policy);
		ret = new_frame(s, block, stream);
		if (ret)
			kvt_store_unhold(s, block);
	}
	if (!ret) {
		pin(s, block);
		kvt_store_set_dirty(s, block, true);
		*at = kvt_device_frame(s, b->tier, b->frame);
		*digest = b->digest;
	}
	kvt_store_end_work(s);
	pthread_mutex_unlock(&s->lock);
	return ret;
}

void kvt_store_seal(struct kvt_store *s, uint32_t block, uint32_t rows, const uint64_t *digest)
{
	struct block *b = &s->blocks[block];

	pthread_mutex_lock(&s->lock);
	s->st.rows_written += rows - b->rows;
	b->rows = rows;
	b->digest = digest ? *digest : 0;
	b->content_rev++;
	if (!digest && rows && !b->lost)
		kvt_store_lose(s, block);
	kvt_store_drop_gone(s, block);
	if (!rows) { /* zeros need no place */
		kvt_store_set_dirty(s, block, false);
		kvt_store_unplace(s, block);
		kvt_store_set_slot(s, block, NONE);
	}
	unpin(s, block);
	pthread_mutex_unlock(&s->lock);
}
