// SPDX-License-Identifier: MIT
/*
 * A RAM tier that outlives its process: what each frame holds is written down beside the frames, in the same named pool,
 * and believed after a restart only where record and content agree.
 *
 * Behind the tier's frames lie a record for each of them and the user's area. A record is written when a block with a
 * name comes into a frame or changes there, and cleared when it leaves. A process may be killed between any two
 * instructions, so nothing relies on an order: a record has a check of its own, a block the digest of its rows. What
 * does not match both is a frame without content.
 */
#include "store/internal.h"

#include <errno.h>
#include <string.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/err.h"
#include "codec/codec.h"

#define WARM_MAGIC 0x316d726177747661ull
#define WARM_VERSION 1

struct warm_header {
	uint64_t magic;
	uint32_t version, record_bytes;
	uint64_t id; /* of geometry and model */
	uint64_t check;
};

struct warm_record {
	uint64_t key; /* the block's name; 0: none here */
	struct kvt_block_id id;
	uint64_t check;
};

static uint64_t user_offset(uint32_t frames)
{
	return (frames * sizeof(struct warm_record) + 63) & ~63ull;
}

uint32_t kvt_warm_frames(const struct kvt_store_params *p)
{
	uint64_t bytes = user_offset(p->frames[KVT_TIER_RAM]) + p->user_bytes;

	return p->warm ? (uint32_t)((bytes + p->block_bytes - 1) / p->block_bytes) : 0;
}

static uint64_t header_check(const struct warm_header *h)
{
	return XXH3_64bits(h, offsetof(struct warm_header, check));
}

static uint64_t record_check(const struct warm_record *r, uint32_t frame)
{
	return XXH3_64bits_withSeed(r, offsetof(struct warm_record, check), frame + 1);
}

static uint64_t warm_id(const struct kvt_store_params *p)
{
	const uint64_t sizes[] = { p->n_planes, p->block_bytes, p->frames[KVT_TIER_RAM], p->user_bytes, p->warm_id };

	return XXH3_64bits_withSeed(p->planes, p->n_planes * sizeof(*p->planes),
				    XXH3_64bits(sizes, sizeof(sizes)));
}

void kvt_warm_note(struct kvt_store *s, uint32_t block)
{
	const struct block *b = &s->blocks[block];
	struct warm_record r = {
		.key = b->key,
		.id = { .digest = b->digest, .revision = b->content_rev, .plane = b->plane, .rows = b->rows },
	};

	if (!s->records || b->frame == NONE || b->tier != KVT_TIER_RAM)
		return;
	if (!b->key || !b->rows || b->lost) {
		s->records[b->frame].key = 0;
		return;
	}
	r.check = record_check(&r, b->frame);
	s->records[b->frame] = r;
}

void kvt_warm_forget(struct kvt_store *s, uint32_t tier, uint32_t frame)
{
	if (s->records && tier == KVT_TIER_RAM)
		s->records[frame].key = 0;
}

/* Is there, in @frame, what its record says? Counts what is not. */
static bool intact(struct kvt_store *s, uint32_t frame)
{
	struct kvt_pool *pool = s->pool[KVT_TIER_RAM];
	const struct warm_record *r = &s->records[frame];
	uint8_t *data = kvt_store_host_frame(s, KVT_TIER_RAM, frame);
	const struct kvt_plane_geom *g;
	uint64_t used;

	if (!r->key)
		return false;
	if (r->check != record_check(r, frame) || r->id.plane >= s->n_planes ||
	    r->id.rows > s->planes[r->id.plane].block_rows) {
		s->st.digest_errors++;
		return false;
	}
	if (pool->reclaim && !pool->reclaim->hold(pool, frame))
		return false;
	g = &s->planes[r->id.plane];
	used = (uint64_t)r->id.rows * g->row_bytes;
	if (kvt_rows_digest(0, r->id.rows, data, g->row_bytes) != r->id.digest) {
		s->st.digest_errors++;
		return false;
	}
	memset(data + used, 0, s->block_bytes - used); /* a write may have been under way there */
	return true;
}

static void adopt(struct kvt_store *s, uint32_t frame)
{
	const struct warm_record *r = &s->records[frame];
	uint32_t block = s->free_block;
	struct block *b = &s->blocks[block];

	s->free_block = b->next;
	*b = (struct block){
		.plane = r->id.plane, .refs = 1, .frame = NONE, .slot = NONE, .tier = KVT_TIER_DISK, .state = B_IDLE,
		.content_rev = r->id.revision, .rows = r->id.rows, .digest = r->id.digest, .key = r->key,
	};
	s->st.blocks++;
	s->st.warm_blocks++;
	kvt_store_place(s, block, KVT_TIER_RAM, frame);
	kvt_store_set_dirty(s, block, true);
	kvt_store_settle(s, block);
}

int kvt_warm_open(struct kvt_store *s, const struct kvt_store_params *p)
{
	struct kvt_pool *pool = s->pool[KVT_TIER_RAM];
	struct free_list *list = &s->frames[KVT_TIER_RAM];
	struct warm_header *h = (struct warm_header *)pool->header;
	struct warm_header want = { .magic = WARM_MAGIC, .version = WARM_VERSION, .record_bytes = sizeof(struct warm_record),
				    .id = warm_id(p) };
	uint8_t *meta = pool->base + (uint64_t)list->total * s->block_bytes;
	uint32_t n = list->total;

	want.check = header_check(&want);
	s->records = (struct warm_record *)meta;
	s->user_area = meta + user_offset(n);
	if (!pool->found || !h->magic) { /* its maker may have been killed before it wrote this */
		memset(meta, 0, (uint64_t)kvt_warm_frames(p) * s->block_bytes);
		*h = want;
		return 0;
	}
	if (memcmp(h, &want, sizeof(want))) {
		s->records = NULL;
		return kvt_fail(-EEXIST, "the pool %s holds blocks of another model, geometry or version: the parameters that it was made with, another name, or kvtier pools --remove %s",
				p->warm, p->warm);
	}
	/* with a disk tier, dirty blocks leave frames for reading; all of these are dirty */
	list->n = 0;
	for (uint32_t frame = n; frame--;) {
		if (s->dirty_host < s->dirty_max && s->free_block != NONE && intact(s, frame)) {
			adopt(s, frame);
			continue;
		}
		kvt_store_give(s, KVT_TIER_RAM, frame);
	}
	return 0;
}

uint32_t kvt_store_found(const struct kvt_store *s)
{
	return (uint32_t)s->st.warm_blocks;
}

uint64_t kvt_store_named(struct kvt_store *s, uint32_t block, uint32_t *plane)
{
	uint64_t key;

	pthread_mutex_lock(&s->lock);
	*plane = s->blocks[block].plane;
	key = s->blocks[block].key;
	pthread_mutex_unlock(&s->lock);
	return key;
}

void kvt_store_name(struct kvt_store *s, uint32_t block, uint64_t key)
{
	if (!s->records)
		return;
	pthread_mutex_lock(&s->lock);
	s->blocks[block].key = key;
	kvt_warm_note(s, block);
	pthread_mutex_unlock(&s->lock);
}

void kvt_store_unname(struct kvt_store *s, uint32_t block, uint64_t key)
{
	if (!s->records)
		return;
	pthread_mutex_lock(&s->lock);
	if (s->blocks[block].key == key) {
		s->blocks[block].key = 0;
		kvt_warm_note(s, block);
	}
	pthread_mutex_unlock(&s->lock);
}

void *kvt_store_user_area(struct kvt_store *s)
{
	return s->user_area;
}
