// SPDX-License-Identifier: MIT
/* Frames and slots: taking them, giving them back, evicting a block to get one. The store's lock is held throughout. */
#include "store/internal.h"

#include <errno.h>
#include <string.h>

#include "base/err.h"

uint8_t *kvt_store_host_frame(const struct kvt_store *s, uint32_t tier, uint32_t frame)
{
	return s->pool[tier]->base + (uint64_t)frame * s->block_bytes;
}

static uint32_t pop(struct free_list *l)
{
	return l->item[--l->n];
}

static void push(struct free_list *l, uint32_t item)
{
	l->item[l->n++] = item;
}

/* The RAM tier's pool, if its frames may be taken. */
static struct kvt_pool *reclaimable(const struct kvt_store *s, uint32_t tier)
{
	return tier == KVT_TIER_RAM && s->pool[tier] && s->pool[tier]->reclaim ? s->pool[tier] : NULL;
}

void kvt_store_give(struct kvt_store *s, uint32_t tier, uint32_t frame)
{
	struct kvt_pool *pool = reclaimable(s, tier);

	push(&s->frames[tier], frame);
	kvt_warm_forget(s, tier, frame);
	if (pool)
		pool->reclaim->let_go(pool, frame);
}

int kvt_store_ready(struct kvt_store *s, uint32_t tier, uint32_t frame)
{
	struct kvt_pool *pool = reclaimable(s, tier);

	return pool ? pool->reclaim->regain(pool, frame) : 0;
}

void kvt_store_grasp(struct kvt_store *s, uint32_t block)
{
	struct block *b = &s->blocks[block];
	struct kvt_pool *pool = reclaimable(s, b->tier);

	if (!b->loose)
		return;
	b->loose = false;
	if (pool->reclaim->hold(pool, b->frame))
		return;
	s->st.reclaimed++;
	s->policy_ops->busy(s->policy, block);
	kvt_store_unplace(s, block);
}

/* Nobody uses the block. If the disk has its content, its frame is the kernel's to take. */
static void rest(struct kvt_store *s, uint32_t block)
{
	struct block *b = &s->blocks[block];
	struct kvt_pool *pool = reclaimable(s, b->tier);

	/* without a disk tier nothing is ever written down: all may go, but only to another memory tier */
	s->policy_ops->idle(s->policy, block, b->tier, !b->dirty || !s->file);
	if (!pool || b->dirty || b->slot == NONE || b->loose)
		return;
	b->loose = true;
	pool->reclaim->let_go(pool, b->frame);
}

void kvt_store_place(struct kvt_store *s, uint32_t block, uint32_t tier, uint32_t frame)
{
	struct block *b = &s->blocks[block];

	b->tier = (uint8_t)tier;
	b->frame = frame;
	b->place_rev++;
	s->tier_blocks[tier]++;
	s->dirty_host += b->dirty && tier != KVT_TIER_GPU;
	kvt_warm_note(s, block);
}

void kvt_store_unplace(struct kvt_store *s, uint32_t block)
{
	struct block *b = &s->blocks[block];

	if (b->frame == NONE)
		return;
	kvt_store_end_ahead(s, block, false);
	kvt_store_give(s, b->tier, b->frame);
	b->loose = false;
	s->tier_blocks[b->tier]--;
	s->dirty_host -= b->dirty && b->tier != KVT_TIER_GPU;
	b->frame = NONE;
	b->tier = KVT_TIER_DISK;
	b->place_rev++;
}

void kvt_store_end_ahead(struct kvt_store *s, uint32_t block, bool used)
{
	struct block *b = &s->blocks[block];

	s->st.prefetch_used += used && b->ahead == AHEAD_WANTED;
	s->st.prefetch_wasted += !used && b->ahead == AHEAD_WANTED;
	b->ahead = AHEAD_NOT;
}

void kvt_store_set_dirty(struct kvt_store *s, uint32_t block, bool dirty)
{
	struct block *b = &s->blocks[block];

	if (b->dirty == dirty)
		return;
	b->dirty = dirty;
	s->dirty += dirty ? 1 : -1;
	if (b->frame != NONE && b->tier != KVT_TIER_GPU)
		s->dirty_host += dirty ? 1 : -1;
}

void kvt_store_set_slot(struct kvt_store *s, uint32_t block, uint32_t slot)
{
	struct block *b = &s->blocks[block];

	if (b->slot != NONE) {
		push(&s->frames[KVT_TIER_DISK], b->slot);
		s->tier_blocks[KVT_TIER_DISK]--;
	}
	b->slot = slot;
	if (slot != NONE)
		s->tier_blocks[KVT_TIER_DISK]++;
}

/* A block's first slot must leave the reserve, so that one with a slot can always be rewritten beside its old content. */
static bool slot_for(const struct kvt_store *s, const struct block *b)
{
	return !s->adopting && s->frames[KVT_TIER_DISK].n > (b->slot == NONE ? s->slot_reserve : 0);
}

bool kvt_store_may_dirty(const struct kvt_store *s)
{
	return s->dirty_host + s->changing < s->dirty_max;
}

int kvt_store_take_slot(struct kvt_store *s, uint32_t block, uint32_t *slot)
{
	if (!slot_for(s, &s->blocks[block]))
		return -EAGAIN;
	*slot = pop(&s->frames[KVT_TIER_DISK]);
	if (*slot >= s->slot_high)
		s->slot_high = *slot + 1;
	return 0;
}

/*
 * The file system has no room for a slot: go on with the slots that have been
 * written before, whose room is taken already. True the first time.
 */
bool kvt_store_retire_slot(struct kvt_store *s, uint32_t slot)
{
	struct free_list *l = &s->frames[KVT_TIER_DISK];
	bool first = !s->shrunk;
	uint32_t kept = 0;

	for (uint32_t i = 0; i < l->n; i++)
		if (l->item[i] < s->slot_high && l->item[i] != slot)
			l->item[kept++] = l->item[i];
	l->total -= l->n - kept + 1;
	l->n = kept;
	s->shrunk = true;
	return first;
}

/* What a block held can be had from nowhere: reading it is an error from now on, until it is written anew. */
void kvt_store_lose(struct kvt_store *s, uint32_t block)
{
	s->blocks[block].lost = true;
	s->st.blocks_lost++;
	kvt_store_set_slot(s, block, NONE);
	kvt_store_set_dirty(s, block, false);
}

bool kvt_store_drop_gone(struct kvt_store *s, uint32_t block)
{
	struct block *b = &s->blocks[block];

	if (!s->gpu_lost || b->frame == NONE || b->tier != KVT_TIER_GPU || b->writing)
		return false;
	if (!b->lost && (b->dirty || b->slot == NONE))
		kvt_store_lose(s, block);
	kvt_store_unplace(s, block);
	s->st.gpu_dropped++;
	return true;
}

bool kvt_store_gpu_gone(struct kvt_store *s)
{
	if (s->gpu_lost)
		return false;
	s->gpu_lost = true;
	s->st.gpu_lost++;
	for (uint32_t i = 0; i < s->n_blocks; i++)
		if (s->blocks[i].state == B_IDLE)
			kvt_store_settle(s, i);
	return true;
}

static void free_block(struct kvt_store *s, uint32_t block)
{
	struct block *b = &s->blocks[block];

	s->policy_ops->forget(s->policy, block);
	kvt_store_unplace(s, block);
	kvt_store_set_slot(s, block, NONE);
	kvt_store_set_dirty(s, block, false);
	b->state = B_FREE;
	b->next = s->free_block;
	s->free_block = block;
	s->st.blocks--;
}

void kvt_store_settle(struct kvt_store *s, uint32_t block)
{
	struct block *b = &s->blocks[block];
	bool used = b->state != B_IDLE || b->holds || b->writing;

	if (!used)
		kvt_store_drop_gone(s, block);
	if (b->lost && !used)
		kvt_store_unplace(s, block);
	if (b->dead && !used)
		free_block(s, block);
	else if (b->frame != NONE && !used)
		rest(s, block);
	else
		s->policy_ops->busy(s->policy, block);
	kvt_store_wake(s);
}

int kvt_store_take_free(struct kvt_store *s, uint32_t tiers, uint32_t *tier, uint32_t *frame)
{
	for (uint32_t t = 0; t < KVT_TIER_DISK; t++) {
		if ((tiers & (1u << t)) && s->frames[t].n && !(t == KVT_TIER_GPU && s->gpu_lost)) {
			*tier = t;
			*frame = pop(&s->frames[t]);
			return 0;
		}
	}
	return -EAGAIN;
}

void kvt_store_evict(struct kvt_store *s, uint32_t block)
{
	s->policy_ops->busy(s->policy, block);
	kvt_store_unplace(s, block);
	s->st.evictions++;
}

int kvt_store_take_frame(struct kvt_store *s, uint32_t tiers, uint32_t *tier, uint32_t *frame)
{
	uint32_t victim;

	if (!kvt_store_take_free(s, tiers, tier, frame))
		return 0;
	victim = s->file ? s->policy_ops->victim(s->policy, tiers, true) : KVT_POLICY_NONE;
	if (victim == KVT_POLICY_NONE)
		return -EAGAIN;
	*tier = s->blocks[victim].tier;
	kvt_store_evict(s, victim);
	*frame = pop(&s->frames[*tier]);
	return 0;
}

/* Nothing can leave memory: who has it. */
static int all_held(const struct kvt_store *s)
{
	uint32_t read = 0, pinned = 0, changed = 0, moved = 0;

	for (uint32_t i = 0; i < s->n_blocks; i++) {
		const struct block *b = &s->blocks[i];

		if (b->state == B_FREE || b->frame == NONE)
			continue;
		moved += b->state == B_MOVING;
		changed += b->changing;
		pinned += b->pins && !b->changing;
		read += b->state == B_IDLE && b->holds && !b->pins && !b->changing;
	}
	return kvt_fail(-ENOMEM, "of %u host and %u gpu frames of %llu bytes none comes free: %u are borrowed or being read, %u in use by gpu batches, %u being written, %u moved, %u loaded; %u are not yet on disk: do less of it at once, or raise the memory budgets",
			kvt_store_host_frames(s), s->frames[KVT_TIER_GPU].total, (unsigned long long)s->block_bytes,
			read, pinned, changed, moved, s->loads, s->dirty);
}

static int no_room(struct kvt_store *s)
{
	const struct free_list *disk = &s->frames[KVT_TIER_DISK];
	uint32_t frames = 0;

	for (uint32_t t = 0; t < KVT_TIER_DISK; t++)
		frames += s->frames[t].total;
	s->st.full++;
	if (!disk->total)
		return kvt_fail(-ENOSPC, "all %u memory frames of %llu bytes are in use and there is no disk tier: raise the memory budgets or give a disk budget",
				frames, (unsigned long long)s->block_bytes);
	if (s->disk_error)
		return kvt_fail(-ENOSPC, "all %u memory frames are in use and the disk tier takes no more writes (%s): raise the memory budgets or mend the disk",
				frames, strerror(-s->disk_error));
	if (s->shrunk)
		return kvt_fail(-ENOSPC, "all %u memory frames are in use and the disk tier's file system is full: it gave %u of %u slots of %llu bytes: free space there, or raise the memory budgets",
				frames, disk->total, s->budget_frames[KVT_TIER_DISK], (unsigned long long)s->block_bytes);
	if (s->policy_ops->victim(s->policy, MEMORY_TIERS, false) == KVT_POLICY_NONE)
		return all_held(s);
	return kvt_fail(-ENOSPC, "all %u memory frames and %u disk slots of %llu bytes are in use: raise the memory or disk budgets, or end sequences",
			frames, disk->total, (unsigned long long)s->block_bytes);
}

/*
 * Sleepers count as working from the moment they are woken, not from when they
 * run: else a call in between would see nobody at work and give up too early.
 */
void kvt_store_wake(struct kvt_store *s)
{
	s->wakeups++;
	s->working += s->asleep;
	s->asleep = 0;
	pthread_cond_broadcast(&s->cond);
}

static void sleep_until_woken(struct kvt_store *s)
{
	uint64_t seen = s->wakeups;

	s->asleep++;
	s->working--;
	while (s->wakeups == seen)
		pthread_cond_wait(&s->cond, &s->lock);
}

/* Can anything change but by calls that sleep? Asked by one that is about to. */
static bool in_flight(const struct kvt_store *s)
{
	uint32_t victim;

	if (s->loads || s->stores || s->working > 1)
		return true;
	victim = s->policy_ops->victim(s->policy, MEMORY_TIERS, false);
	return victim != KVT_POLICY_NONE && !s->disk_error && slot_for(s, &s->blocks[victim]);
}

void kvt_store_end_work(struct kvt_store *s)
{
	s->working--;
	if (s->asleep || s->flushing)
		kvt_store_wake(s);
}

/*
 * Where only borrows stand in the way: a block that is read stays as it is, so
 * it can be written back, and is clean. An open one (pins) does not stay.
 */
static bool store_borrowed(struct kvt_store *s)
{
	uint32_t left = s->dirty;
	bool any = false;

	for (uint32_t i = 0; s->file && i < s->n_blocks && left; i++) {
		const struct block *b = &s->blocks[i];

		left -= b->dirty;
		if (b->dirty && b->holds && !b->pins && !b->changing && b->state == B_IDLE && b->frame != NONE)
			any |= !kvt_store_store(s, i);
	}
	if (any)
		kvt_store_kick(s);
	return any;
}

/*
 * Before a call fails for want of room: the reserve lets several blocks be
 * rewritten at once; all of it but the one slot that any rewriting needs is
 * given to first slots. And where the oldest dirty block wants a first slot and
 * there is none, a younger one that has a slot goes before it.
 */
static bool hopeless(struct kvt_store *s)
{
	uint32_t victim;

	if (in_flight(s))
		return false;
	if (s->slot_reserve > 1)
		s->slot_reserve = 1;
	for (uint32_t i = 0; i < s->dirty && !s->disk_error; i++) {
		victim = s->policy_ops->victim(s->policy, MEMORY_TIERS, false);
		if (victim == KVT_POLICY_NONE)
			break;
		if (slot_for(s, &s->blocks[victim])) {
			kvt_store_kick(s);
			return false;
		}
		s->policy_ops->touch(s->policy, victim, KVT_USE_WRITE); /* to the back of the dirty ones */
	}
	return !store_borrowed(s);
}

void kvt_store_wait_change(struct kvt_store *s)
{
	if (hopeless(s)) { /* what is waited for is in the hands of one that sleeps for want of room */
		s->stuck = true;
		kvt_store_wake(s);
	}
	sleep_until_woken(s);
}

int kvt_store_wait_room(struct kvt_store *s, uint64_t since)
{
	if (s->stuck || hopeless(s) || s->write_errors - since >= WRITE_ERRORS_MAX) {
		s->stuck = false;
		return no_room(s);
	}
	s->urgent++;
	kvt_store_kick(s);
	sleep_until_woken(s);
	s->urgent--;
	return 0;
}
