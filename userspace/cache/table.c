// SPDX-License-Identifier: MIT
/* Rows through a block table: reading, writing with copy-on-write, borrowing. */
#include "cache/prefix.h"

#include <errno.h>
#include <string.h>

#include "base/err.h"
#include "codec/codec.h"

int kvt_rows_check(const struct kvt_plane *plane, const struct kvt_rows *rows, uint64_t n, struct kvt_rows *checked)
{
	uint64_t row;

	if (!rows || !rows->data)
		return kvt_fail(-EINVAL, "rows: no data");
	if (rows->reserved)
		return kvt_fail(-EINVAL, "rows: reserved is %u, not 0", rows->reserved);
	if (rows->type != KVT_ENCODED && !kvt_codec_group(rows->type))
		return kvt_fail(-EINVAL, "rows: type %u is not a codec", rows->type);
	if (rows->type != KVT_ENCODED && rows->type != plane->geom.codec && kvt_codec_group(rows->type) > 1)
		return kvt_fail(-EINVAL, "rows: %s rows are for %s planes, this one is %s: f32, f16 or bf16 expected",
				kvt_codec_name(rows->type), kvt_codec_name(rows->type), kvt_codec_name(plane->geom.codec));
	row = rows->type == KVT_ENCODED ? plane->geom.row_bytes : kvt_codec_bytes(rows->type, plane->geom.elems);
	if (rows->stride && rows->stride < row)
		return kvt_fail(-EINVAL, "rows: stride is %llu bytes, a row takes %llu", (unsigned long long)rows->stride,
				(unsigned long long)row);
	if (!kvt_stride_fits(n, rows->stride))
		return kvt_fail(-EINVAL, "rows: %llu of them, %llu bytes apart, are beyond memory", (unsigned long long)n,
				(unsigned long long)rows->stride);
	*checked = *rows;
	if (!rows->stride)
		checked->stride = row;
	return 0;
}

static void decode_rows(uint8_t *dst, const struct kvt_rows *to, const struct kvt_plane_geom *g, const uint8_t *src,
			uint32_t n)
{
	for (uint32_t i = 0; i < n; i++) {
		if (to->type == KVT_ENCODED)
			memcpy(dst + i * to->stride, src + (uint64_t)i * g->row_bytes, g->row_bytes);
		else
			kvt_codec_convert(dst + i * to->stride, to->type, src + (uint64_t)i * g->row_bytes, g->codec,
					  g->elems);
	}
}

int kvt_table_read(struct kvt_cache *cache, const struct kvt_plane *plane, const uint32_t *table, uint64_t first,
		   uint64_t n, const struct kvt_rows *dst)
{
	const struct kvt_plane_geom *g = &plane->geom;
	uint64_t end = first + n, done = 0;
	int ret;

	while (first < end) {
		const uint32_t *block = &table[first / g->block_rows];
		uint32_t row = (uint32_t)(first % g->block_rows);
		uint32_t part = end - first < g->block_rows - row ? (uint32_t)(end - first) : g->block_rows - row;
		struct kvt_view view;

		kvt_store_borrow_begin(cache->store, block, 1);
		ret = kvt_store_borrow_wait(cache->store, block, 1, &view);
		if (ret)
			return ret;
		decode_rows((uint8_t *)dst->data + done * dst->stride, dst, g, view.data + (uint64_t)row * g->row_bytes,
			    part);
		kvt_store_return(cache->store, block, 1);
		first += part;
		done += part;
	}
	return 0;
}

void kvt_table_put(struct kvt_cache *cache, uint32_t *entry)
{
	if (*entry == KVT_NO_BLOCK)
		return;
	kvt_store_unname(cache->store, *entry, kvt_entry_key(cache, entry));
	kvt_store_put(cache->store, *entry);
	*entry = KVT_NO_BLOCK;
}

/* The old name goes first: two blocks never have one. */
static void replace(struct kvt_cache *cache, uint32_t *entry, uint32_t block)
{
	kvt_table_put(cache, entry);
	*entry = block;
	kvt_store_name(cache->store, block, kvt_entry_key(cache, entry));
}

/* No tier has room: what is kept for later requests makes way for what runs. */
static bool made_room(struct kvt_cache *cache, int err)
{
	return err == -ENOSPC && cache->prefix && kvt_prefix_reclaim(cache->prefix);
}

static int copy_block(struct kvt_cache *cache, uint32_t block, uint32_t rows, uint32_t *copy)
{
	int ret;

	do
		ret = kvt_store_copy(cache->store, block, rows, copy);
	while (made_room(cache, ret));
	return ret;
}

int kvt_table_own(struct kvt_cache *cache, uint32_t *block, uint32_t rows, bool alone)
{
	bool shared, longer;
	uint32_t copy;
	int ret;

	if (*block == KVT_NO_BLOCK)
		return 0;
	shared = kvt_store_shared(cache->store, *block);
	longer = kvt_store_rows(cache->store, *block) > rows;
	if (!longer && !(shared && alone))
		return 0;
	if (!shared)
		return kvt_store_cut(cache->store, *block, rows);
	ret = copy_block(cache, *block, rows, &copy);
	if (ret)
		return ret;
	replace(cache, block, copy);
	return 0;
}

/* The block that a write of rows [row, row + n) should go to: *block itself, or a new one where that is shared. */
static int block_to_write(struct kvt_cache *cache, uint32_t plane, uint32_t block, uint32_t row, uint32_t n,
			  uint32_t *target)
{
	uint32_t rows;
	int ret;

	*target = block;
	if (block != KVT_NO_BLOCK && !kvt_store_shared(cache->store, block))
		return 0;
	rows = block == KVT_NO_BLOCK ? 0 : kvt_store_rows(cache->store, block);
	if (rows && (row || n < rows))
		return copy_block(cache, block, rows, target);
	do /* nothing of it is kept */
		ret = kvt_store_alloc(cache->store, plane, target);
	while (made_room(cache, ret));
	return ret;
}

int kvt_table_write(struct kvt_cache *cache, uint32_t plane, uint32_t *table, uint64_t first, uint64_t n,
		    const struct kvt_rows *src)
{
	const struct kvt_plane_geom *g = &cache->planes[plane].geom;
	uint64_t end = first + n, done = 0;
	int ret;

	while (first < end) {
		uint32_t *block = &table[first / g->block_rows], target;
		uint32_t row = (uint32_t)(first % g->block_rows);
		uint32_t part = end - first < g->block_rows - row ? (uint32_t)(end - first) : g->block_rows - row;
		struct kvt_rows from = *src;

		ret = block_to_write(cache, plane, *block, row, part, &target);
		if (ret)
			return ret;
		from.data = (uint8_t *)src->data + done * src->stride;
		do
			ret = kvt_store_write(cache->store, target, row, part, &from);
		while (made_room(cache, ret));
		if (ret) {
			if (target != *block)
				kvt_store_put(cache->store, target);
			return ret;
		}
		if (target != *block)
			replace(cache, block, target);
		first += part;
		done += part;
	}
	return 0;
}

int kvt_table_borrow(struct kvt_cache *cache, const struct kvt_plane *plane, uint32_t block, struct kvt_borrow *borrow)
{
	struct kvt_view view;
	int ret;

	kvt_store_borrow_begin(cache->store, &block, 1);
	ret = kvt_store_borrow_wait(cache->store, &block, 1, &view);
	if (ret)
		return ret;
	kvt_store_work(cache->store, false); /* nobody knows for how long */
	*borrow = (struct kvt_borrow){
		.data = view.data, .rows = view.rows, .row_bytes = plane->geom.row_bytes, .tier = view.tier,
		.block = block, .place_rev = view.place_rev, .content_rev = view.content_rev,
	};
	return 0;
}

void kvt_borrow_return(struct kvt_cache *cache, const struct kvt_borrow *borrow)
{
	kvt_store_borrow_drop(cache->store, &borrow->block, 1);
}
