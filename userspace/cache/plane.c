// SPDX-License-Identifier: MIT
/* Raw planes: rows by index, in any order, as an engine's cells are. */
#include "cache/cache.h"

#include <errno.h>
#include <string.h>

#include "base/err.h"

static struct kvt_plane *raw_plane(struct kvt_cache *c, uint32_t plane)
{
	if (plane >= c->n_planes) {
		kvt_fail(-EINVAL, "plane %u of %u", plane, c->n_planes);
		return NULL;
	}
	if (!c->planes[plane].rows) {
		kvt_fail(-EINVAL, "plane %u is not a raw plane: its rows belong to sequences", plane);
		return NULL;
	}
	return &c->planes[plane];
}

static int check_range(const struct kvt_plane *p, uint64_t first, uint64_t n)
{
	if (first > p->rows || n > p->rows - first)
		return kvt_fail(-ERANGE, "%llu rows from row %llu of a plane of %llu", (unsigned long long)n,
				(unsigned long long)first, (unsigned long long)p->rows);
	return 0;
}

int kvt_plane_write(struct kvt_cache *c, uint32_t plane, const uint64_t *rows, uint32_t n, const struct kvt_rows *src)
{
	struct kvt_plane *p = raw_plane(c, plane);
	struct kvt_rows from;
	uint32_t run;
	int ret;

	if (!p)
		return -EINVAL;
	ret = kvt_rows_check(p, src, n, &from);
	for (uint32_t i = 0; i < n && !ret; i++)
		ret = check_range(p, rows[i], 1);
	for (uint32_t i = 0; i < n && !ret; i += run) {
		struct kvt_rows part = from;

		for (run = 1; i + run < n && rows[i + run] == rows[i] + run; run++)
			;
		part.data = (uint8_t *)from.data + i * from.stride;
		ret = kvt_table_write(c, plane, p->table, rows[i], run, &part);
	}
	return ret;
}

int kvt_plane_read(struct kvt_cache *c, uint32_t plane, uint64_t first, uint32_t n, const struct kvt_rows *dst)
{
	struct kvt_plane *p = raw_plane(c, plane);
	struct kvt_rows to;
	int ret;

	if (!p)
		return -EINVAL;
	ret = check_range(p, first, n);
	if (!ret)
		ret = kvt_rows_check(p, dst, n, &to);
	if (!ret)
		ret = kvt_table_read(c, p, p->table, first, n, &to);
	return ret;
}

/* Zeros over rows [first, first + n), which lie in one block; at its end they are cut off instead. */
static int clear_rows(struct kvt_cache *c, uint32_t plane, uint64_t first, uint32_t n)
{
	struct kvt_plane *p = &c->planes[plane];
	struct kvt_rows zeros = { .data = (void *)kvt_store_zeros(c->store), .type = KVT_ENCODED,
				  .stride = p->geom.row_bytes };
	uint32_t *block = &p->table[first / p->geom.block_rows];
	uint32_t row = (uint32_t)(first % p->geom.block_rows);

	if (*block == KVT_NO_BLOCK)
		return 0;
	if (row + n < kvt_store_rows(c->store, *block))
		return kvt_store_write(c->store, *block, row, n, &zeros);
	if (row)
		return kvt_store_cut(c->store, *block, row);
	kvt_table_put(c, block);
	return 0;
}

int kvt_plane_clear(struct kvt_cache *c, uint32_t plane, uint64_t first, uint64_t n)
{
	struct kvt_plane *p = raw_plane(c, plane);
	uint64_t end = first + n;
	uint32_t part;
	int ret;

	if (!p)
		return -EINVAL;
	ret = check_range(p, first, n);
	for (; first < end && !ret; first += part) {
		part = p->geom.block_rows - (uint32_t)(first % p->geom.block_rows);
		if (part > end - first)
			part = (uint32_t)(end - first);
		ret = clear_rows(c, plane, first, part);
	}
	return ret;
}

int kvt_plane_borrow(struct kvt_cache *c, uint32_t plane, uint64_t index, struct kvt_borrow *borrow)
{
	struct kvt_plane *p = raw_plane(c, plane);

	if (!p)
		return -EINVAL;
	if (index >= p->table_len)
		return kvt_fail(-ERANGE, "block %llu of a plane of %u", (unsigned long long)index, p->table_len);
	return kvt_table_borrow(c, p, p->table[index], borrow);
}
