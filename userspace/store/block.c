// SPDX-License-Identifier: MIT
/*
 * What callers do with blocks: allocate, hold, read, write, move. Every call
 * here takes its holds under the lock, does its copying without it, and
 * publishes under it.
 */
#include "store/internal.h"

#include <errno.h>
#include <string.h>

#include "base/err.h"
#include "codec/codec.h"

/* ---- references ---- */

static int alloc_locked(struct kvt_store *s, uint32_t plane, uint32_t *block)
{
	struct block *b;

	if (s->free_block == NONE) {
		s->st.full++;
		return kvt_fail(-ENOSPC, "all %u blocks are in use: raise the memory or disk budgets, or end sequences",
				s->n_blocks);
	}
	*block = s->free_block;
	b = &s->blocks[*block];
	s->free_block = b->next;
	*b = (struct block){
		.plane = plane, .refs = 1, .frame = NONE, .slot = NONE, .tier = KVT_TIER_DISK, .state = B_IDLE,
		.content_rev = b->content_rev + 1, .place_rev = b->place_rev,
	};
	s->st.blocks++;
	return 0;
}

int kvt_store_alloc(struct kvt_store *s, uint32_t plane, uint32_t *block)
{
	int ret;

	pthread_mutex_lock(&s->lock);
	ret = alloc_locked(s, plane, block);
	pthread_mutex_unlock(&s->lock);
	return ret;
}

void kvt_store_get(struct kvt_store *s, uint32_t block)
{
	pthread_mutex_lock(&s->lock);
	s->blocks[block].refs++;
	pthread_mutex_unlock(&s->lock);
}

void kvt_store_put_locked(struct kvt_store *s, uint32_t block)
{
	struct block *b = &s->blocks[block];

	if (--b->refs)
		return;
	b->dead = true;
	kvt_store_settle(s, block);
}

void kvt_store_put(struct kvt_store *s, uint32_t block)
{
	pthread_mutex_lock(&s->lock);
	kvt_store_put_locked(s, block);
	pthread_mutex_unlock(&s->lock);
}

bool kvt_store_shared(struct kvt_store *s, uint32_t block)
{
	bool shared;

	pthread_mutex_lock(&s->lock);
	shared = s->blocks[block].refs > 1;
	pthread_mutex_unlock(&s->lock);
	return shared;
}

uint32_t kvt_store_rows(struct kvt_store *s, uint32_t block)
{
	uint32_t rows;

	pthread_mutex_lock(&s->lock);
	rows = s->blocks[block].rows;
	pthread_mutex_unlock(&s->lock);
	return rows;
}

/* ---- holds: with the lock, which waiting lets go ---- */

void kvt_store_hold(struct kvt_store *s, uint32_t block)
{
	kvt_store_grasp(s, block);
	kvt_store_end_ahead(s, block, true);
	s->blocks[block].holds++;
	s->policy_ops->busy(s->policy, block);
}

void kvt_store_unhold(struct kvt_store *s, uint32_t block)
{
	s->blocks[block].holds--;
	kvt_store_settle(s, block);
}

static uint8_t *frame_data(const struct kvt_store *s, uint32_t tier, uint32_t frame)
{
	if (tier == KVT_TIER_GPU)
		return (uint8_t *)kvt_device_host_view(s, frame);
	return kvt_store_host_frame(s, tier, frame);
}

typedef int take_fn(struct kvt_store *s, uint32_t tiers, uint32_t *tier, uint32_t *frame);

/*
 * Move a block at rest from its frame to one of @tiers, which @take finds: copy, verify, publish,
 * release. Others' holds on it are of calls that wait for it to be readable.
 */
static int move_frame(struct kvt_store *s, uint32_t block, uint32_t tiers, take_fn *take)
{
	struct block *b = &s->blocks[block];
	const struct kvt_plane_geom *g = &s->planes[b->plane];
	uint32_t from = b->tier, old = b->frame, tier = 0, frame = 0;
	uint64_t digest = 0;
	int ret;

	b->state = B_MOVING;
	s->policy_ops->busy(s->policy, block);
	ret = take(s, tiers, &tier, &frame);
	if (ret)
		goto out;
	pthread_mutex_unlock(&s->lock);
	ret = kvt_store_ready(s, tier, frame);
	if (!ret && tier == KVT_TIER_GPU) {
		ret = kvt_device_load(s, frame, g, b->rows, frame_data(s, from, old), &digest);
	} else if (!ret) {
		uint8_t *to = kvt_store_host_frame(s, tier, frame);

		if (from == KVT_TIER_GPU)
			ret = kvt_device_save(s, to, old);
		else
			memcpy(to, kvt_store_host_frame(s, from, old), s->block_bytes);
		digest = kvt_rows_digest(0, b->rows, to, g->row_bytes);
	}
	pthread_mutex_lock(&s->lock);
	if (!ret && digest != b->digest) {
		s->st.digest_errors++;
		ret = kvt_fail(-EBADMSG, "a block of plane %u changed on its way from %s to %s", b->plane,
			       kvt_tier_name(from), kvt_tier_name(tier));
	}
	if (ret) {
		kvt_store_give(s, tier, frame);
	} else {
		kvt_store_unplace(s, block);
		kvt_store_place(s, block, tier, frame);
		s->st.moves++;
		s->st.move_bytes += rows_bytes(s, b, b->rows);
	}
out:
	b->state = B_IDLE;
	kvt_store_settle(s, block);
	return ret;
}

/* ---- room: what leaves a memory tier goes to the next one below that has frames ---- */

static bool free_in(const struct kvt_store *s, uint32_t tiers)
{
	for (uint32_t t = 0; t < KVT_TIER_DISK; t++)
		if ((tiers >> t & 1) && s->frames[t].n)
			return true;
	return false;
}

/* The block of @tiers that should leave it. What is dirty takes no host frames that are left for reading. */
static uint32_t who_goes(const struct kvt_store *s, uint32_t tiers)
{
	uint32_t victim = s->policy_ops->victim(s->policy, tiers, true);

	if (victim != KVT_POLICY_NONE)
		return victim;
	victim = s->policy_ops->victim(s->policy, tiers, false);
	if (victim == KVT_POLICY_NONE || (s->blocks[victim].tier == KVT_TIER_GPU && !kvt_store_may_dirty(s)))
		return NONE;
	return victim;
}

/* Out of one of @tiers into a free frame of @to. */
static bool pass_one(struct kvt_store *s, uint32_t tiers, uint32_t to)
{
	uint32_t victim = who_goes(s, tiers);
	uint32_t from;
	bool dirty;
	int ret;

	if (victim == NONE)
		return false;
	from = s->blocks[victim].tier;
	dirty = s->blocks[victim].dirty && s->blocks[victim].tier == KVT_TIER_GPU;
	s->changing += dirty;
	ret = move_frame(s, victim, 1u << to, kvt_store_take_free);
	s->changing -= dirty;
	s->st.demotions += !ret && to > from;
	return !ret;
}

/*
 * Room in @tiers, if those below can take something: where all of those are full, what is worth least of all
 * leaves memory, unless it is in @tiers itself and makes the room; then each tier gives a block to
 * the one below it, up to @tiers. The lock is let go over the copies. False: no room was made.
 */
static bool make_room(struct kvt_store *s, uint32_t tiers)
{
	uint32_t lowest = 31 - (uint32_t)__builtin_clz(tiers), to, from, victim, below = 0;

	for (uint32_t t = lowest + 1; t < KVT_TIER_DISK; t++)
		below |= s->frames[t].total ? 1u << t : 0;
	for (to = lowest + 1; to < KVT_TIER_DISK && !s->frames[to].n; to++)
		;
	if (to >= KVT_TIER_DISK && !s->file) { /* nothing leaves memory: but a faster tier may have room */
		for (to = 0; to < lowest && (!s->frames[to].n || (tiers >> to & 1)); to++)
			;
		return to < lowest && pass_one(s, tiers, to);
	}
	if (to >= KVT_TIER_DISK) {
		victim = below ? s->policy_ops->victim(s->policy, tiers | below, true) : KVT_POLICY_NONE;
		if (victim == KVT_POLICY_NONE || !(below >> s->blocks[victim].tier & 1))
			return false;
		to = s->blocks[victim].tier;
		kvt_store_evict(s, victim);
	}
	for (; to > lowest; to = from) {
		for (from = to - 1; from > lowest && !s->frames[from].total; from--)
			;
		if (!pass_one(s, from > lowest ? 1u << from : tiers, to))
			return false;
	}
	return true;
}

int kvt_store_find_frame(struct kvt_store *s, uint32_t tiers, uint32_t *tier, uint32_t *frame)
{
	if (!kvt_store_take_free(s, tiers, tier, frame))
		return 0;
	make_room(s, tiers);
	return kvt_store_take_frame(s, tiers, tier, frame);
}

int kvt_store_wait_frame(struct kvt_store *s, uint32_t tiers, uint32_t *tier, uint32_t *frame)
{
	uint64_t since = s->write_errors;
	int ret;

	while ((ret = kvt_store_find_frame(s, tiers, tier, frame)) == -EAGAIN) {
		ret = kvt_store_wait_room(s, since);
		if (ret)
			break;
	}
	return ret;
}

static int load_error(struct kvt_store *s, uint32_t block, int err)
{
	const struct block *b = &s->blocks[block];

	if (err == -EBADMSG)
		return kvt_fail(err, "a block of plane %u is lost: %s; the sequence must be computed again", b->plane,
				s->gpu_lost ? "nobody else had it than the GPU that is gone, or the disk gave back something else" :
					      "what the disk gave back is not what was written");
	return kvt_fail(err, "reading a block of plane %u from disk slot %u failed: %s", b->plane, b->slot, strerror(-err));
}

/* Tiers that the CPU reads. */
static uint32_t readable_tiers(const struct kvt_store *s)
{
	return s->gpu && s->gpu->host_readable ? MEMORY_TIERS : HOST_TIERS;
}

int kvt_store_wait_resident(struct kvt_store *s, uint32_t block, uint32_t tiers)
{
	const uint32_t hosts = tiers & HOST_TIERS ? tiers & HOST_TIERS : HOST_TIERS;
	struct block *b = &s->blocks[block];
	uint64_t since = s->write_errors;
	int ret;

	for (;;) {
		if (b->error) {
			ret = b->error;
			b->error = 0;
			return load_error(s, block, ret);
		}
		if (b->state != B_IDLE) {
			kvt_store_wait_change(s);
			continue;
		}
		kvt_store_drop_gone(s, block);
		if (b->lost)
			return load_error(s, block, -EBADMSG);
		if (b->frame != NONE && tiers >> b->tier & 1)
			return 0;
		if (b->frame != NONE) {
			if (b->pins)
				return kvt_fail(-EBUSY, "a block of plane %u is in use by a batch on the GPU: detach it first",
						b->plane);
			if (b->writing) {
				kvt_store_wait_change(s);
				continue;
			}
			ret = move_frame(s, block, tiers, kvt_store_wait_frame);
			if (ret && !s->gpu_lost)
				return ret;
			continue;
		}
		if (!free_in(s, hosts) && make_room(s, hosts)) /* the lock was let go */
			continue;
		ret = kvt_store_load(s, block, hosts);
		if (ret) {
			ret = kvt_store_wait_room(s, since);
			if (ret)
				return ret;
			continue;
		}
		pthread_mutex_unlock(&s->lock);
		kvt_store_submit(s);
		pthread_mutex_lock(&s->lock);
	}
}

/* ---- borrow ---- */

void kvt_store_borrow_begin(struct kvt_store *s, const uint32_t *blocks, uint32_t n)
{
	bool queued = false;

	pthread_mutex_lock(&s->lock);
	/* first all holds: a load must not evict a later block of the same call */
	for (uint32_t i = 0; i < n; i++)
		if (blocks[i] != KVT_NO_BLOCK)
			kvt_store_hold(s, blocks[i]);
	for (uint32_t i = 0; i < n; i++) {
		struct block *b = blocks[i] == KVT_NO_BLOCK ? NULL : &s->blocks[blocks[i]];

		if (!b || !b->rows)
			continue;
		if (b->frame != NONE) {
			s->st.hits++;
			continue;
		}
		s->st.misses++;
		if (b->state != B_IDLE || b->lost)
			continue;
		b->error = 0;
		if (!kvt_store_load(s, blocks[i], HOST_TIERS))
			queued = true;
	}
	pthread_mutex_unlock(&s->lock);
	if (queued)
		kvt_store_submit(s);
}

bool kvt_store_missing(struct kvt_store *s, const uint32_t *blocks, uint32_t n)
{
	bool missing = false;

	pthread_mutex_lock(&s->lock);
	for (uint32_t i = 0; i < n && !missing; i++)
		missing = blocks[i] != KVT_NO_BLOCK && s->blocks[blocks[i]].rows && s->blocks[blocks[i]].frame == NONE;
	pthread_mutex_unlock(&s->lock);
	return missing;
}

/* Queue loads of blocks from *next on until there is no frame or io for one. */
static void load_ahead(struct kvt_store *s, const uint32_t *blocks, uint32_t n, uint32_t *next)
{
	bool queued = false;

	for (; *next < n; (*next)++) {
		const struct block *b = blocks[*next] == KVT_NO_BLOCK ? NULL : &s->blocks[blocks[*next]];

		if (!b || !b->rows || b->frame != NONE || b->state != B_IDLE || b->lost || b->error)
			continue;
		if (kvt_store_load(s, blocks[*next], HOST_TIERS))
			break;
		queued = true;
	}
	if (!queued)
		return;
	pthread_mutex_unlock(&s->lock);
	kvt_store_submit(s);
	pthread_mutex_lock(&s->lock);
}

int kvt_store_borrow_wait(struct kvt_store *s, const uint32_t *blocks, uint32_t n, struct kvt_view *views)
{
	uint32_t next = 0;
	int ret = 0;

	pthread_mutex_lock(&s->lock);
	s->working++;
	for (uint32_t i = 0; i < n && !ret; i++) {
		struct block *b = blocks[i] == KVT_NO_BLOCK ? NULL : &s->blocks[blocks[i]];

		if (!b || !b->rows) {
			views[i] = (struct kvt_view){ .data = s->zeros, .tier = KVT_TIER_RAM };
			continue;
		}
		if (b->frame == NONE && next < n) {
			next = next < i ? i : next;
			load_ahead(s, blocks, n, &next);
		}
		ret = kvt_store_wait_resident(s, blocks[i], readable_tiers(s));
		if (!ret)
			views[i] = (struct kvt_view){
				.data = frame_data(s, b->tier, b->frame),
				.rows = b->rows,
				.tier = b->tier,
				.place_rev = b->place_rev,
				.content_rev = b->content_rev,
			};
	}
	pthread_mutex_unlock(&s->lock);
	if (ret)
		kvt_store_return(s, blocks, n);
	return ret;
}

static void let_go(struct kvt_store *s, const uint32_t *blocks, uint32_t n, enum kvt_use use)
{
	for (uint32_t i = 0; i < n; i++) {
		if (blocks[i] == KVT_NO_BLOCK)
			continue;
		s->policy_ops->touch(s->policy, blocks[i], use);
		kvt_store_unhold(s, blocks[i]);
	}
}

void kvt_store_borrow_drop(struct kvt_store *s, const uint32_t *blocks, uint32_t n)
{
	pthread_mutex_lock(&s->lock);
	let_go(s, blocks, n, KVT_USE_AHEAD);
	pthread_mutex_unlock(&s->lock);
}

void kvt_store_return(struct kvt_store *s, const uint32_t *blocks, uint32_t n)
{
	pthread_mutex_lock(&s->lock);
	let_go(s, blocks, n, KVT_USE_READ);
	s->policy_ops->turn(s->policy);
	kvt_store_end_work(s);
	pthread_mutex_unlock(&s->lock);
}

void kvt_store_work(struct kvt_store *s, bool begin)
{
	pthread_mutex_lock(&s->lock);
	if (begin)
		s->working++;
	else
		kvt_store_end_work(s);
	pthread_mutex_unlock(&s->lock);
}

uint32_t kvt_store_host_frames(const struct kvt_store *s)
{
	return s->frames[KVT_TIER_PINNED].total + s->frames[KVT_TIER_RAM].total;
}

/* ---- prefetch ---- */

/* Would a load take the frame of nobody who needs it? */
static bool room_ahead(const struct kvt_store *s)
{
	uint32_t victim;

	if (s->urgent || !s->file)
		return false;
	if (free_in(s, HOST_TIERS))
		return true;
	victim = s->policy_ops->victim(s->policy, HOST_TIERS, true);
	return victim != KVT_POLICY_NONE && !s->blocks[victim].ahead;
}

uint32_t kvt_store_prefetch(struct kvt_store *s, const uint32_t *blocks, uint32_t n)
{
	bool queued = false;
	uint32_t i;

	pthread_mutex_lock(&s->lock);
	for (i = 0; i < n; i++) {
		struct block *b = blocks[i] == KVT_NO_BLOCK ? NULL : &s->blocks[blocks[i]];

		if (b && b->ahead == AHEAD_UNWANTED) {
			b->ahead = AHEAD_WANTED;
			s->st.prefetch_wasted--;
		}
		/* what went wrong is for a borrow to try again */
		if (!b || !b->rows || b->frame != NONE || b->state != B_IDLE || b->lost || b->error)
			continue;
		if (!room_ahead(s) || kvt_store_load(s, blocks[i], HOST_TIERS))
			break;
		b->ahead = AHEAD_WANTED;
		s->st.prefetched++;
		s->policy_ops->touch(s->policy, blocks[i], KVT_USE_AHEAD);
		queued = true;
	}
	pthread_mutex_unlock(&s->lock);
	if (queued)
		kvt_store_submit(s);
	return i;
}

uint32_t kvt_store_prefetch_room(struct kvt_store *s)
{
	uint64_t frames, room;

	pthread_mutex_lock(&s->lock);
	frames = (uint64_t)kvt_store_host_frames(s) + s->frames[KVT_TIER_GPU].total;
	room = (uint64_t)s->frames[KVT_TIER_PINNED].n + s->frames[KVT_TIER_RAM].n;
	room += s->st.blocks > frames ? (s->st.blocks - frames) / AHEAD_SHARE : 0;
	pthread_mutex_unlock(&s->lock);
	return (uint32_t)room;
}

void kvt_store_prefetch_drop(struct kvt_store *s, const uint32_t *blocks, uint32_t n)
{
	pthread_mutex_lock(&s->lock);
	for (uint32_t i = 0; i < n; i++) {
		struct block *b = blocks[i] == KVT_NO_BLOCK ? NULL : &s->blocks[blocks[i]];

		if (!b || b->ahead != AHEAD_WANTED)
			continue;
		if (b->state == B_LOADING) {
			kvt_store_end_ahead(s, blocks[i], false);
			b->ahead = AHEAD_UNWANTED;
		} else if (b->state == B_IDLE) {
			kvt_store_evict(s, blocks[i]);
		}
	}
	kvt_store_wake(s);
	pthread_mutex_unlock(&s->lock);
}

/* ---- writing ---- */

static void end_change(struct kvt_store *s, uint32_t block)
{
	s->blocks[block].changing = false;
	s->changing--;
	s->working--;
	kvt_store_unhold(s, block); /* wakes */
}

int kvt_store_hold_to_change(struct kvt_store *s, uint32_t block, bool replace, uint32_t tiers, bool *fresh)
{
	struct block *b = &s->blocks[block];
	uint64_t since = s->write_errors;
	uint32_t tier, frame;
	int ret = 0;

	*fresh = false;
	s->working++;
	while (!b->dirty && !kvt_store_may_dirty(s)) {
		ret = kvt_store_wait_room(s, since);
		if (ret) {
			kvt_store_end_work(s);
			return ret;
		}
	}
	s->changing++;
	kvt_store_hold(s, block);
	s->policy_ops->touch(s->policy, block, KVT_USE_WRITE);
	s->policy_ops->turn(s->policy);
	if (b->state == B_IDLE)
		b->error = 0; /* of a load that nobody waited for */
	for (;;) {
		if (b->state != B_IDLE || b->writing) {
			kvt_store_wait_change(s);
			continue;
		}
		kvt_store_drop_gone(s, block);
		if (b->lost && b->holds == 1) /* found while this call waited: what the frame holds is wrong */
			kvt_store_unplace(s, block);
		if (b->lost && (!replace || b->frame != NONE)) {
			ret = load_error(s, block, -EBADMSG);
			goto out;
		}
		if (b->frame != NONE && tiers >> b->tier & 1)
			goto out;
		if (b->frame == NONE && (!b->rows || replace))
			break;
		ret = kvt_store_wait_resident(s, block, tiers);
		if (ret)
			goto out;
	}
	b->state = B_MOVING;
	while (!(ret = kvt_store_wait_frame(s, tiers, &tier, &frame))) {
		pthread_mutex_unlock(&s->lock);
		ret = kvt_store_ready(s, tier, frame);
		if (!ret && tier == KVT_TIER_GPU)
			ret = kvt_device_zero(s, frame);
		else if (!ret)
			memset(kvt_store_host_frame(s, tier, frame), 0, s->block_bytes);
		pthread_mutex_lock(&s->lock);
		if (!ret)
			break;
		kvt_store_give(s, tier, frame);
		if (ret != -ENODEV) /* a gpu that is gone gives no second frame */
			break;
	}
	if (!ret)
		kvt_store_place(s, block, tier, frame);
	b->state = B_IDLE;
	*fresh = true;
out:
	b->changing = !ret;
	if (ret)
		end_change(s, block);
	return ret;
}

static void changed(struct kvt_store *s, uint32_t block, uint32_t rows, uint64_t digest)
{
	struct block *b = &s->blocks[block];

	b->rows = rows;
	b->digest = digest;
	b->content_rev++;
	b->lost = false;
	kvt_store_set_dirty(s, block, rows > 0);
	kvt_warm_note(s, block);
	if (!rows) { /* zeros need no place */
		kvt_store_unplace(s, block);
		kvt_store_set_slot(s, block, NONE);
	}
	end_change(s, block);
}

/* A change that broke off: the frame holds a mix. The old content is in the slot, or nowhere. */
static void change_failed(struct kvt_store *s, uint32_t block)
{
	struct block *b = &s->blocks[block];

	if (b->dirty)
		kvt_store_lose(s, block);
	kvt_store_unplace(s, block);
	end_change(s, block);
}

static void encode_rows(uint8_t *dst, const struct kvt_plane_geom *g, uint32_t n, const struct kvt_rows *src)
{
	const uint8_t *from = src->data;

	if (src->type == KVT_ENCODED) {
		for (uint32_t i = 0; i < n; i++)
			memcpy(dst + (uint64_t)i * g->row_bytes, from + i * src->stride, g->row_bytes);
	} else if (src->stride == kvt_codec_bytes(src->type, g->elems)) {
		kvt_codec_convert(dst, g->codec, from, src->type, (uint64_t)n * g->elems);
	} else {
		for (uint32_t i = 0; i < n; i++)
			kvt_codec_convert(dst + (uint64_t)i * g->row_bytes, g->codec, from + i * src->stride, src->type,
					  g->elems);
	}
}

/* Rows into a frame that holds @old rows and zeros behind them. */
static int write_frame(struct kvt_store *s, const struct block *b, uint32_t old, uint32_t first, uint32_t n,
		       const struct kvt_rows *src, uint64_t *delta)
{
	const struct kvt_plane_geom *g = &s->planes[b->plane];
	uint32_t end = first + n, overlap = end < old ? end : old;
	uint8_t *data, *at;

	if (b->tier == KVT_TIER_GPU)
		return kvt_device_write(s, b->frame, g, old, first, n, src, delta);
	data = kvt_store_host_frame(s, b->tier, b->frame);
	at = data + (uint64_t)first * g->row_bytes;
	*delta = 0;
	if (overlap > first)
		*delta -= kvt_rows_digest(first, overlap - first, at, g->row_bytes);
	if (first > old)
		*delta += kvt_rows_digest(old, first - old, data + (uint64_t)old * g->row_bytes, g->row_bytes);
	encode_rows(at, g, n, src);
	*delta += kvt_rows_digest(first, n, at, g->row_bytes);
	return 0;
}

int kvt_store_write(struct kvt_store *s, uint32_t block, uint32_t first, uint32_t n, const struct kvt_rows *src)
{
	struct block *b = &s->blocks[block];
	uint64_t delta, digest;
	uint32_t old;
	bool fresh;
	int ret;

	pthread_mutex_lock(&s->lock);
	ret = kvt_store_hold_to_change(s, block, !first && n >= b->rows, MEMORY_TIERS, &fresh);
	old = fresh ? 0 : b->rows;
	digest = fresh ? 0 : b->digest;
	pthread_mutex_unlock(&s->lock);
	if (ret)
		return ret;
	ret = write_frame(s, b, old, first, n, src, &delta);
	pthread_mutex_lock(&s->lock);
	if (ret) {
		change_failed(s, block);
	} else {
		changed(s, block, first + n > old ? first + n : old, digest + delta);
		s->st.rows_written += n;
	}
	pthread_mutex_unlock(&s->lock);
	return ret;
}

int kvt_store_cut(struct kvt_store *s, uint32_t block, uint32_t rows)
{
	struct block *b = &s->blocks[block];
	const struct kvt_plane_geom *g = &s->planes[b->plane];
	uint64_t delta = 0, from = (uint64_t)rows * g->row_bytes;
	uint8_t *data;
	bool fresh;
	int ret;

	pthread_mutex_lock(&s->lock);
	if (rows >= b->rows) {
		pthread_mutex_unlock(&s->lock);
		return 0;
	}
	ret = kvt_store_hold_to_change(s, block, false, MEMORY_TIERS, &fresh);
	pthread_mutex_unlock(&s->lock);
	if (ret)
		return ret;
	if (b->tier == KVT_TIER_GPU) {
		ret = kvt_device_cut(s, b->frame, g, b->rows, rows, &delta);
	} else {
		data = kvt_store_host_frame(s, b->tier, b->frame);
		delta -= kvt_rows_digest(rows, b->rows - rows, data + from, g->row_bytes);
		memset(data + from, 0, (uint64_t)(b->rows - rows) * g->row_bytes);
	}
	pthread_mutex_lock(&s->lock);
	if (ret)
		change_failed(s, block);
	else
		changed(s, block, rows, b->digest + delta);
	pthread_mutex_unlock(&s->lock);
	return ret;
}

int kvt_store_copy(struct kvt_store *s, uint32_t block, uint32_t rows, uint32_t *copy)
{
	struct block *from = &s->blocks[block];
	const struct kvt_plane_geom *g = &s->planes[from->plane];
	struct kvt_rows src = { .stride = g->row_bytes, .type = KVT_ENCODED };
	struct kvt_view view;
	uint32_t to;
	int ret;

	ret = kvt_store_alloc(s, from->plane, &to);
	if (ret)
		return ret;
	kvt_store_borrow_begin(s, &block, 1);
	ret = kvt_store_borrow_wait(s, &block, 1, &view);
	if (ret)
		goto err_put;
	if (rows > view.rows)
		rows = view.rows;
	src.data = (void *)view.data;
	/* whole first, since only the whole has a digest to verify it by */
	kvt_store_work(s, false); /* the write below is at work itself, or asleep */
	ret = view.rows ? kvt_store_write(s, to, 0, view.rows, &src) : 0;
	kvt_store_work(s, true);
	if (!ret && s->blocks[to].digest != from->digest)
		ret = kvt_fail(-EBADMSG, "a block of plane %u changed while it was copied", from->plane);
	kvt_store_return(s, &block, 1);
	if (!ret)
		ret = kvt_store_cut(s, to, rows);
	if (ret)
		goto err_put;
	pthread_mutex_lock(&s->lock);
	s->st.cow_copies++;
	pthread_mutex_unlock(&s->lock);
	*copy = to;
	return 0;

err_put:
	kvt_store_put(s, to);
	return ret;
}

/* ---- moving ---- */

/*
 * Is there no frame in @tier for a block of this move but that of another? What came there is not held, so that
 * others find frames meanwhile; they may take it, but no later block of the same move does.
 */
static bool no_frame_for(const struct kvt_store *s, enum kvt_tier tier, uint32_t move)
{
	uint32_t victim;

	if (s->frames[tier].n)
		return false;
	victim = who_goes(s, 1u << tier);
	return victim == NONE || s->blocks[victim].move == move;
}

/* With the lock: bring one block to @tier if there is room. */
static int move_one(struct kvt_store *s, uint32_t block, enum kvt_tier tier, uint32_t move)
{
	struct block *b = &s->blocks[block];
	int ret;

	while (b->state != B_IDLE || b->writing)
		kvt_store_wait_change(s);
	if (!b->rows || b->lost)
		return 0;
	kvt_store_grasp(s, block);
	if ((b->frame != NONE && (b->tier == tier || b->holds)) || no_frame_for(s, tier, move)) {
		kvt_store_hold(s, block);
		let_go(s, &block, 1, KVT_USE_AHEAD);
		return 0;
	}
	if (b->frame == NONE) {
		if (tier != KVT_TIER_GPU) {
			ret = kvt_store_load(s, block, 1u << tier);
			if (ret)
				return 0;
			kvt_store_hold(s, block);
			pthread_mutex_unlock(&s->lock);
			kvt_store_submit(s);
			pthread_mutex_lock(&s->lock);
		} else {
			kvt_store_hold(s, block);
		}
		ret = kvt_store_wait_resident(s, block, MEMORY_TIERS);
		kvt_store_unhold(s, block);
		if (ret)
			return ret == -ENOMEM || ret == -ENOSPC ? 0 : ret;
	} else {
		ret = move_frame(s, block, 1u << tier, kvt_store_find_frame);
		if (ret && ret != -ENODEV) /* else to be had from below, or lost */
			return ret == -EAGAIN ? 0 : ret;
	}
	return move_one(s, block, tier, move);
}

/* Is there anything that keeps a block from going to another memory tier right now? */
static bool at_rest_elsewhere(const struct block *b, enum kvt_tier tier)
{
	return b->state == B_IDLE && !b->writing && b->rows && !b->lost && b->frame != NONE && b->tier != tier && !b->holds;
}

static void publish_move(struct kvt_store *s, uint32_t block, enum kvt_tier tier, uint32_t frame, int ret, uint64_t digest)
{
	struct block *b = &s->blocks[block];

	if (!ret && digest != b->digest) {
		s->st.digest_errors++;
		ret = -EBADMSG;
	}
	if (ret) {
		kvt_store_give(s, tier, frame);
	} else {
		kvt_store_unplace(s, block);
		kvt_store_place(s, block, tier, frame);
		s->st.moves++;
		s->st.move_bytes += rows_bytes(s, b, b->rows);
	}
	b->state = B_IDLE;
	kvt_store_settle(s, block);
}

/*
 * With the lock: of a few blocks, those at rest go to the gpu, or from there,
 * together: one copy, one digest, one wait. What does not go this way, or goes
 * wrong, is left to move_one().
 */
static void move_together(struct kvt_store *s, const uint32_t *blocks, uint32_t n, enum kvt_tier tier, uint32_t move)
{
	struct kvt_device_move moves[KVT_DEVICE_GROUP];
	uint32_t which[KVT_DEVICE_GROUP], count = 0, frame, got, from = 0;
	bool up = tier == KVT_TIER_GPU, there[KVT_DEVICE_GROUP] = { false };
	int ret;

	for (uint32_t i = 0; i < n; i++) { /* those that are there stay */
		there[i] = blocks[i] != KVT_NO_BLOCK && s->blocks[blocks[i]].frame != NONE &&
			   s->blocks[blocks[i]].tier == tier;
		if (there[i])
			kvt_store_hold(s, blocks[i]);
	}
	for (uint32_t i = 0; i < n; i++) {
		struct block *b = blocks[i] == KVT_NO_BLOCK ? NULL : &s->blocks[blocks[i]];

		if (!b || !at_rest_elsewhere(b, tier) || (!up && b->tier != KVT_TIER_GPU))
			continue;
		if (no_frame_for(s, tier, move))
			break;
		kvt_store_grasp(s, blocks[i]);
		if (b->frame == NONE)
			continue;
		from = b->frame;
		b->state = B_MOVING;
		s->policy_ops->busy(s->policy, blocks[i]);
		if (kvt_store_find_frame(s, 1u << tier, &got, &frame)) {
			b->state = B_IDLE;
			kvt_store_settle(s, blocks[i]);
			break;
		}
		moves[count] = (struct kvt_device_move){
			.frame = up ? frame : from, .tier = up ? b->tier : (uint32_t)tier, .host_frame = up ? from : frame,
			.plane = b->plane, .rows = b->rows,
		};
		which[count++] = blocks[i];
	}
	if (count) {
		pthread_mutex_unlock(&s->lock);
		ret = 0;
		for (uint32_t k = 0; k < count && !ret && !up; k++)
			ret = kvt_store_ready(s, tier, moves[k].host_frame);
		if (!ret)
			ret = kvt_device_move(s, moves, count, up);
		for (uint32_t k = 0; k < count && !ret && !up; k++)
			moves[k].digest = kvt_rows_digest(0, moves[k].rows, kvt_store_host_frame(s, tier, moves[k].host_frame),
							  s->planes[moves[k].plane].row_bytes);
		pthread_mutex_lock(&s->lock);
		for (uint32_t k = 0; k < count; k++)
			publish_move(s, which[k], tier, up ? moves[k].frame : moves[k].host_frame, ret, moves[k].digest);
	}
	for (uint32_t i = 0; i < n; i++)
		if (there[i])
			kvt_store_unhold(s, blocks[i]);
}

/*
 * With the lock: as many blocks to @tier as fit. Held are at most a group while it is copied, or the one that is
 * waited for: however many blocks a move has, whoever else wants a frame finds one.
 */
static int64_t move_to_memory(struct kvt_store *s, const uint32_t *blocks, uint32_t n, enum kvt_tier tier)
{
	uint32_t move = ++s->last_move;
	int64_t there = 0;
	int ret = 0;

	if (!s->frames[tier].total || (tier == KVT_TIER_GPU && s->gpu_lost))
		return 0;
	for (uint32_t i = 0; i < n; i++)
		if (blocks[i] != KVT_NO_BLOCK)
			s->blocks[blocks[i]].move = move;
	for (uint32_t i = 0; i < n && !ret; i++) {
		if (s->device && i % KVT_DEVICE_GROUP == 0)
			move_together(s, blocks + i, n - i < KVT_DEVICE_GROUP ? n - i : KVT_DEVICE_GROUP, tier, move);
		if (blocks[i] != KVT_NO_BLOCK)
			ret = move_one(s, blocks[i], tier, move);
	}
	if (ret)
		return ret;
	for (uint32_t i = 0; i < n; i++)
		there += blocks[i] != KVT_NO_BLOCK && s->blocks[blocks[i]].frame != NONE && s->blocks[blocks[i]].tier == tier;
	return there;
}

/* With the lock: write back what is dirty, many writes in flight. Afterwards all are at rest. */
static void write_all(struct kvt_store *s, const uint32_t *blocks, uint32_t n)
{
	uint64_t since = s->write_errors;
	uint32_t started = 0;

	while (started < n) {
		struct block *b = blocks[started] == KVT_NO_BLOCK ? NULL : &s->blocks[blocks[started]];

		if (b && b->state != B_IDLE) {
			kvt_store_wait_change(s);
			continue;
		}
		if (b && b->frame != NONE && b->dirty && !b->writing && kvt_store_store(s, blocks[started])) {
			/* the rest of this call is not what others wait for: it goes on when a write ends */
			if (!s->stores || s->write_errors - since >= WRITE_ERRORS_MAX)
				break;
			pthread_mutex_unlock(&s->lock);
			kvt_store_submit(s);
			pthread_mutex_lock(&s->lock);
			if (s->stores)
				kvt_store_wait_change(s);
			continue;
		}
		started++;
	}
	pthread_mutex_unlock(&s->lock);
	kvt_store_submit(s);
	pthread_mutex_lock(&s->lock);
	for (uint32_t i = 0; i < n; i++)
		while (blocks[i] != KVT_NO_BLOCK && (s->blocks[blocks[i]].writing || s->blocks[blocks[i]].state != B_IDLE))
			kvt_store_wait_change(s);
}

static int64_t move_to_disk(struct kvt_store *s, const uint32_t *blocks, uint32_t n)
{
	int64_t there = 0;

	if (!s->file)
		return 0;
	write_all(s, blocks, n);
	for (uint32_t i = 0; i < n; i++) {
		struct block *b = blocks[i] == KVT_NO_BLOCK ? NULL : &s->blocks[blocks[i]];

		while (b && (b->writing || b->state != B_IDLE))
			kvt_store_wait_change(s);
		if (!b || b->slot == NONE || b->dirty)
			continue;
		if (!b->holds) {
			s->policy_ops->busy(s->policy, blocks[i]);
			kvt_store_unplace(s, blocks[i]);
			kvt_store_settle(s, blocks[i]);
		}
		there += b->frame == NONE;
	}
	return there;
}

int64_t kvt_store_move(struct kvt_store *s, const uint32_t *blocks, uint32_t n, enum kvt_tier tier)
{
	int64_t there;

	pthread_mutex_lock(&s->lock);
	s->working++;
	if (tier == KVT_TIER_DISK)
		there = move_to_disk(s, blocks, n);
	else
		there = move_to_memory(s, blocks, n, tier);
	kvt_store_end_work(s);
	pthread_mutex_unlock(&s->lock);
	return there;
}

int kvt_store_save(struct kvt_store *s, const uint32_t *blocks, uint32_t n)
{
	int ret = 0;

	pthread_mutex_lock(&s->lock);
	s->working++;
	if (s->file)
		write_all(s, blocks, n);
	for (uint32_t i = 0; i < n && !ret; i++) {
		const struct block *b = blocks[i] == KVT_NO_BLOCK ? NULL : &s->blocks[blocks[i]];

		if (b && b->lost)
			ret = load_error(s, blocks[i], -EBADMSG);
		else if (b && b->dirty)
			ret = kvt_fail(s->frames[KVT_TIER_DISK].n > s->slot_reserve ? -EIO : -ENOSPC,
				       "a block of plane %u could not be written to disk", b->plane);
	}
	kvt_store_end_work(s);
	pthread_mutex_unlock(&s->lock);
	return ret;
}

int kvt_store_flush(struct kvt_store *s)
{
	uint64_t since, lost;
	int ret = 0;

	pthread_mutex_lock(&s->lock);
	since = s->write_errors;
	lost = s->st.blocks_lost;
	s->flushing++;
	while (s->dirty) {
		if (s->write_errors - since >= WRITE_ERRORS_MAX) {
			ret = kvt_fail(-EIO, "%u blocks could not be written back: the disk keeps failing", s->dirty);
			break;
		}
		if (!s->loads && !s->stores && !s->working) {
			if (s->disk_error || !s->frames[KVT_TIER_DISK].total)
				ret = kvt_fail(-ENOSPC, "%u blocks have no disk tier to be written to", s->dirty);
			else if (s->policy_ops->victim(s->policy, MEMORY_TIERS, false) == KVT_POLICY_NONE)
				ret = kvt_fail(-EBUSY, "%u dirty blocks are borrowed", s->dirty);
			else if (s->frames[KVT_TIER_DISK].n > 1 && s->slot_reserve > 1)
				s->slot_reserve = 1; /* as before any call fails for want of room */
			else if (s->frames[KVT_TIER_DISK].n <= s->slot_reserve)
				ret = kvt_fail(-ENOSPC, "%u blocks find no free disk slot: raise the disk budget", s->dirty);
			if (ret)
				break;
		}
		kvt_store_kick(s);
		pthread_cond_wait(&s->cond, &s->lock);
	}
	s->flushing--;
	if (!ret && s->st.blocks_lost > lost)
		ret = kvt_fail(-EBADMSG, "%llu blocks were found changed in memory and are lost",
			       (unsigned long long)(s->st.blocks_lost - lost));
	pthread_mutex_unlock(&s->lock);
	return ret;
}
