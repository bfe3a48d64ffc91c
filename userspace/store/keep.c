// SPDX-License-Identifier: MIT
/*
 * Blocks that stay as they are: shared by many, written down with what they
 * are, and taken over from a process that is gone.
 */
#include "store/internal.h"

#include <errno.h>

void kvt_store_get_all(struct kvt_store *s, const uint32_t *blocks, uint32_t n, uint64_t *bytes)
{
	pthread_mutex_lock(&s->lock);
	for (uint32_t i = 0; i < n; i++) {
		struct block *b = blocks[i] == KVT_NO_BLOCK ? NULL : &s->blocks[blocks[i]];

		if (!b)
			continue;
		b->refs++;
		if (bytes)
			bytes[b->tier] += rows_bytes(s, b, b->rows);
	}
	pthread_mutex_unlock(&s->lock);
}

void kvt_store_put_all(struct kvt_store *s, const uint32_t *blocks, uint32_t n)
{
	pthread_mutex_lock(&s->lock);
	for (uint32_t i = 0; i < n; i++)
		if (blocks[i] != KVT_NO_BLOCK)
			kvt_store_put_locked(s, blocks[i]);
	pthread_mutex_unlock(&s->lock);
}

uint32_t kvt_store_count(struct kvt_store *s, const uint32_t *blocks, uint32_t n, enum kvt_tier tier)
{
	uint32_t there = 0;

	pthread_mutex_lock(&s->lock);
	for (uint32_t i = 0; i < n; i++) {
		const struct block *b = blocks[i] == KVT_NO_BLOCK ? NULL : &s->blocks[blocks[i]];

		if (b)
			there += tier == KVT_TIER_DISK ? b->slot != NONE : b->frame != NONE && b->tier == tier;
	}
	pthread_mutex_unlock(&s->lock);
	return there;
}

bool kvt_store_alone(struct kvt_store *s, const uint32_t *blocks, uint32_t n)
{
	bool alone = false;

	pthread_mutex_lock(&s->lock);
	for (uint32_t i = 0; i < n && !alone; i++)
		alone = blocks[i] != KVT_NO_BLOCK && s->blocks[blocks[i]].refs == 1;
	pthread_mutex_unlock(&s->lock);
	return alone;
}

bool kvt_store_entry(struct kvt_store *s, uint32_t block, struct kvt_block_entry *entry)
{
	const struct block *b = &s->blocks[block];
	bool clean;

	pthread_mutex_lock(&s->lock);
	clean = b->slot != NONE && !b->dirty && !b->lost;
	*entry = (struct kvt_block_entry){
		.id = { .digest = b->digest, .revision = b->content_rev, .plane = b->plane, .rows = b->rows },
		.slot = b->slot,
	};
	pthread_mutex_unlock(&s->lock);
	return clean;
}

uint32_t kvt_store_adopt(struct kvt_store *s, const struct kvt_block_entry *entry)
{
	const struct kvt_block_id *id = &entry->id;
	struct free_list *slots = &s->frames[KVT_TIER_DISK];
	uint32_t block;

	pthread_mutex_lock(&s->lock);
	block = s->free_block;
	s->free_block = s->blocks[block].next;
	s->blocks[block] = (struct block){
		.plane = id->plane, .rows = id->rows, .digest = id->digest, .content_rev = id->revision, .refs = 1,
		.frame = NONE, .slot = entry->slot, .tier = KVT_TIER_DISK, .state = B_IDLE, .unproven = true,
	};
	s->st.blocks++;
	s->tier_blocks[KVT_TIER_DISK]++;
	/* the free list is still all slots, the last one first: strike out what is taken */
	slots->item[slots->total - 1 - entry->slot] = NONE;
	if (entry->slot >= s->slot_high)
		s->slot_high = entry->slot + 1;
	pthread_mutex_unlock(&s->lock);
	return block;
}

void kvt_store_adopted(struct kvt_store *s)
{
	struct free_list *slots = &s->frames[KVT_TIER_DISK];
	uint32_t kept = 0;

	pthread_mutex_lock(&s->lock);
	for (uint32_t i = 0; i < slots->n; i++)
		if (slots->item[i] != NONE)
			slots->item[kept++] = slots->item[i];
	slots->n = kept;
	s->adopting = false;
	pthread_mutex_unlock(&s->lock);
}

static uint32_t good_blocks(struct kvt_store *s, const uint32_t *blocks, uint32_t n)
{
	uint32_t i;

	pthread_mutex_lock(&s->lock);
	for (i = 0; i < n && (blocks[i] == KVT_NO_BLOCK || !s->blocks[blocks[i]].lost); i++)
		;
	pthread_mutex_unlock(&s->lock);
	return i;
}

static bool all_proven(struct kvt_store *s, const uint32_t *blocks, uint32_t n)
{
	bool proven = true;

	pthread_mutex_lock(&s->lock);
	for (uint32_t i = 0; i < n && proven; i++)
		proven = blocks[i] == KVT_NO_BLOCK || !s->blocks[blocks[i]].unproven;
	pthread_mutex_unlock(&s->lock);
	return proven;
}

#define PROVE_BATCH 32

int64_t kvt_store_prove(struct kvt_store *s, const uint32_t *blocks, uint32_t n)
{
	struct kvt_view views[PROVE_BATCH];
	uint32_t batch = kvt_store_host_frames(s) / 4, part;
	int ret;

	batch = batch < 1 ? 1 : batch > PROVE_BATCH ? PROVE_BATCH : batch;
	for (uint32_t at = 0; at < n; at += part) {
		part = n - at < batch ? n - at : batch;
		if (all_proven(s, blocks + at, part))
			continue;
		kvt_store_borrow_begin(s, blocks + at, part);
		ret = kvt_store_borrow_wait(s, blocks + at, part, views);
		if (!ret) {
			kvt_store_return(s, blocks + at, part);
			continue;
		}
		return ret == -EBADMSG ? (int64_t)at + good_blocks(s, blocks + at, part) : ret;
	}
	return good_blocks(s, blocks, n);
}
