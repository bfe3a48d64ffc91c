// SPDX-License-Identifier: MIT
/*
 * Recurrent-state snapshots: a state is bytes that only its engine understands,
 * kept in blocks like any other, so that it lives in any tier and is verified.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "cache/prefix.h"

#define NONE KVT_TREE_NONE

static uint32_t *blocks_of(const struct kvt_prefix *p, uint32_t snapshot)
{
	return p->snapshot_blocks + (uint64_t)snapshot * p->plan.snapshot_blocks;
}

static uint64_t payload(const struct kvt_prefix *p)
{
	const struct kvt_plane_geom *g = &p->cache->planes[p->plan.snapshot_plane].geom;

	return (uint64_t)g->block_rows * g->row_bytes;
}

static uint32_t block_count(const struct kvt_prefix *p, uint64_t bytes)
{
	return (uint32_t)((bytes + payload(p) - 1) / payload(p));
}

uint32_t kvt_snapshot_above(const struct kvt_prefix *p, uint32_t node, uint32_t tokens)
{
	for (; p->st.snapshots_used && node != NONE; node = p->tree->nodes[node].parent) {
		uint32_t s = p->tree->nodes[node].snapshot;

		if (s != NONE && p->snapshots[s].tokens <= tokens)
			return s;
	}
	return NONE;
}

void kvt_snapshot_drop(struct kvt_prefix *p, uint32_t snapshot)
{
	struct kvt_snapshot *s = &p->snapshots[snapshot];

	kvt_store_put_all(p->cache->store, blocks_of(p, snapshot), block_count(p, s->bytes));
	p->tree->nodes[s->node].snapshot = NONE;
	s->node = NONE;
	p->st.snapshots_used--;
}

/* A place for a snapshot of @session: a free one, else the session's oldest, else the oldest. With the lock. */
static uint32_t take_place(struct kvt_prefix *p, uint64_t session)
{
	uint32_t own = NONE, oldest = NONE, vacant = NONE, mine = 0;

	for (uint32_t i = 0; i < p->plan.snapshots; i++) {
		const struct kvt_snapshot *s = &p->snapshots[i];

		if (s->node == NONE) {
			vacant = i;
			continue;
		}
		if (oldest == NONE || s->used < p->snapshots[oldest].used)
			oldest = i;
		if (s->session != session)
			continue;
		mine++;
		if (own == NONE || s->used < p->snapshots[own].used)
			own = i;
	}
	if (p->plan.session_snapshots && mine >= p->plan.session_snapshots)
		vacant = own;
	else if (vacant == NONE)
		vacant = oldest;
	if (p->snapshots[vacant].node != NONE)
		kvt_snapshot_drop(p, vacant);
	return vacant;
}

/* A block of the state's bytes from @at on. */
static int write_block(struct kvt_prefix *p, const uint8_t *state, uint64_t bytes, uint32_t *block)
{
	const uint32_t row = p->cache->planes[p->plan.snapshot_plane].geom.row_bytes;
	struct kvt_rows rows = { .data = (void *)state, .stride = row, .type = KVT_ENCODED };
	uint32_t whole = (uint32_t)(bytes / row), rest = (uint32_t)(bytes % row);
	struct kvt_store *s = p->cache->store;
	int ret = kvt_store_alloc(s, p->plan.snapshot_plane, block);

	if (ret)
		return ret;
	if (whole)
		ret = kvt_store_write(s, *block, 0, whole, &rows);
	if (!ret && rest) {
		pthread_mutex_lock(&p->row_lock);
		memcpy(p->row, state + (uint64_t)whole * row, rest);
		memset(p->row + rest, 0, row - rest);
		rows.data = p->row;
		ret = kvt_store_write(s, *block, whole, 1, &rows);
		pthread_mutex_unlock(&p->row_lock);
	}
	if (ret)
		kvt_store_put(s, *block);
	return ret;
}

static int write_state(struct kvt_prefix *p, const uint8_t *state, uint64_t bytes, uint32_t *blocks)
{
	uint64_t room = payload(p), at = 0;
	uint32_t n = 0;
	int ret = 0;

	while (at < bytes && !ret) {
		uint64_t part = bytes - at < room ? bytes - at : room;

		ret = write_block(p, state + at, part, &blocks[n]);
		if (ret == -ENOSPC && kvt_prefix_reclaim(p)) {
			ret = 0;
			continue;
		}
		n += !ret;
		at += part;
	}
	if (ret)
		kvt_store_put_all(p->cache->store, blocks, n);
	return ret;
}

int kvt_snapshot_put(struct kvt_cache *c, const struct kvt_prefix_root *root, const uint32_t *tokens, uint32_t n,
		     uint64_t session, const void *state, uint64_t bytes)
{
	struct kvt_prefix *p = c->prefix;
	struct kvt_prefix_match match;
	uint32_t *blocks, place;
	int ret;

	if (!p || !state || !bytes || bytes > p->plan.snapshot_bytes)
		return kvt_fail(-EINVAL, "snapshot: a state of %llu bytes: snapshot_bytes is %llu", (unsigned long long)bytes,
				p ? (unsigned long long)p->plan.snapshot_bytes : 0);
	ret = kvt_prefix_pin(p, root, tokens, n, &match);
	if (ret)
		return ret;
	if (match.tokens < n || !n) {
		kvt_prefix_release(c, &match);
		return kvt_fail(-ENOENT, "snapshot: of %u tokens only %u are cached: insert them first", n, match.tokens);
	}
	blocks = malloc(p->plan.snapshot_blocks * sizeof(*blocks)); /* a snapshot is no hot path */
	ret = blocks ? write_state(p, state, bytes, blocks) : kvt_fail(-ENOMEM, "no memory for a snapshot");
	if (!ret) {
		pthread_mutex_lock(&p->lock);
		if (p->tree->nodes[match.node].snapshot != NONE)
			kvt_snapshot_drop(p, p->tree->nodes[match.node].snapshot);
		place = take_place(p, session);
		p->snapshots[place] = (struct kvt_snapshot){ .node = match.node, .tokens = n, .session = session,
							     .bytes = bytes, .used = ++p->clock };
		memcpy(blocks_of(p, place), blocks, block_count(p, bytes) * sizeof(*blocks));
		p->tree->nodes[match.node].snapshot = place;
		p->st.snapshots_used++;
		pthread_mutex_unlock(&p->lock);
	}
	free(blocks);
	kvt_prefix_release(c, &match);
	return ret;
}

/* One block's part of the state. */
static int read_block(struct kvt_prefix *p, uint32_t block, uint8_t *to, uint64_t bytes)
{
	struct kvt_view view;
	int ret;

	kvt_store_borrow_begin(p->cache->store, &block, 1);
	ret = kvt_store_borrow_wait(p->cache->store, &block, 1, &view);
	if (ret)
		return ret;
	memcpy(to, view.data, bytes);
	kvt_store_return(p->cache->store, &block, 1);
	return 0;
}

int64_t kvt_snapshot_get(struct kvt_cache *c, const struct kvt_prefix_match *match, void *state, uint64_t bytes)
{
	struct kvt_prefix *p = c->prefix;
	uint32_t *blocks, place, n = 0;
	uint64_t size = 0, room;
	int ret = 0;

	if (!p || !match->snapshot)
		return kvt_fail(-ENOENT, "snapshot: the match has none");
	room = payload(p);
	blocks = malloc(p->plan.snapshot_blocks * sizeof(*blocks));
	if (!blocks)
		return kvt_fail(-ENOMEM, "no memory for a snapshot");
	pthread_mutex_lock(&p->lock);
	place = kvt_snapshot_above(p, match->node, match->tokens);
	if (place == NONE || p->snapshots[place].tokens != match->snapshot) {
		ret = kvt_fail(-ENOENT, "snapshot: the one of %u tokens is gone", match->snapshot);
	} else {
		size = p->snapshots[place].bytes;
		p->snapshots[place].used = ++p->clock;
		if (size <= bytes) {
			n = block_count(p, size);
			memcpy(blocks, blocks_of(p, place), n * sizeof(*blocks));
			kvt_store_get_all(c->store, blocks, n, NULL);
		}
	}
	pthread_mutex_unlock(&p->lock);
	for (uint32_t i = 0; i < n && !ret; i++)
		ret = read_block(p, blocks[i], (uint8_t *)state + i * room, size - i * room < room ? size - i * room : room);
	kvt_store_put_all(c->store, blocks, n);
	free(blocks);
	return ret ? ret : (int64_t)size;
}
