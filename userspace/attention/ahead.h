/* SPDX-License-Identifier: MIT */
/*
 * Fetching ahead. A head's part of a row is a few cache lines, then comes another
 * row's: too short a stream for the hardware's prefetchers. So the lines that
 * come next are asked for a few at a time from within the matrix loops, and
 * memory does not rest while they compute.
 *
 * Rows are taken in the order of use: a tile's K, its V, the next tile's K, ...
 * and go to the second-level cache: rows lie a power of two apart, so that a
 * tile of them has only a few sets of the first level's to share.
 */
#ifndef KVT_ATTENTION_AHEAD_H
#define KVT_ATTENTION_AHEAD_H

#include <stdint.h>

#include "attention/kernel.h"

#define LINE 64

struct ahead {
	const uint8_t *at, *end; /* of the head in a row */
	const struct kvt_split_rows *rows;
	uint32_t bytes[2];    /* of the head in a row: K, V */
	uint32_t next, limit; /* rows in the order of use, KVT_TILE for each plane of a tile; then the next call's */
	uint32_t total;	      /* of them this call's */
	uint32_t pace;	      /* lines for each 8 steps of a multiplication */
};

static inline uint32_t ahead_lines(uint32_t bytes)
{
	return (bytes + LINE - 1) / LINE;
}

/* Ask for @lines cache lines. More at once than memory can take would stall the loads behind them. */
static inline void ahead_step(struct ahead *a, uint32_t lines)
{
	for (; lines; lines--) {
		while (a->at >= a->end) {
			uint32_t i = a->next, v = i / KVT_TILE & 1, row = i / (2 * KVT_TILE) * KVT_TILE + i % KVT_TILE;
			const struct kvt_split_rows *rows = a->rows;

			if (i >= a->limit)
				return;
			a->next++;
			if (i >= a->total) {
				rows = rows->next;
				row = i - a->total;
			}
			if (row >= rows->n)
				continue;
			a->at = v ? rows->v[row] + rows->v_offset : rows->k[row] + rows->k_offset;
			a->end = a->at + a->bytes[v];
		}
		__builtin_prefetch(a->at, 0, 2);
		a->at += LINE;
	}
}

/* The first tile's K, unless the last call has asked for it: a few rows at once, the rest while they are consumed. */
static inline void ahead_begin(struct ahead *a, const struct kvt_split_rows *rows, uint32_t k_bytes, uint32_t v_bytes)
{
	*a = (struct ahead){ .rows = rows, .bytes = { k_bytes, v_bytes }, .limit = KVT_TILE };
	a->total = (rows->n + KVT_TILE - 1) / KVT_TILE * 2 * KVT_TILE;
	if (rows->fetched)
		a->next = KVT_TILE;
	else
		ahead_step(a, 16 * ahead_lines(k_bytes));
}

/*
 * The loops begin to consume a plane of a tile: the one behind it may be
 * fetched meanwhile, half of it while packing, the rest in @pauses of the
 * multiplications.
 */
static inline void ahead_plane(struct ahead *a, uint32_t pauses)
{
	uint32_t last = a->total + (a->rows->next ? KVT_TILE : 0), left;

	if (a->next + KVT_TILE < a->limit) /* what has been consumed unasked is not fetched again */
		a->next = a->limit - KVT_TILE;
	a->limit = a->limit + KVT_TILE < last ? a->limit + KVT_TILE : last;
	left = a->limit - a->next;
	left = left > KVT_TILE / 2 ? left - KVT_TILE / 2 : 0;
	a->pace = left * ahead_lines(a->bytes[a->limit / KVT_TILE & 1 ? 0 : 1]) / (pauses + 1) + 1;
}

#endif
