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
	uint32_t next, limit; /* rows in the order of use, KVT_TILE for each plane of a tile */
	uint32_t pace;	      /* lines for each 8 steps of a multiplication */
};

/* Ask for @lines cache lines. More at once than memory can take would stall the loads behind them. */
static inline void ahead_step(struct ahead *a, uint32_t lines)
{
	for (; lines; lines--) {
		while (a->at >= a->end) {
			uint32_t row = a->next / (2 * KVT_TILE) * KVT_TILE + a->next % KVT_TILE, v = a->next / KVT_TILE & 1;

			if (a->next >= a->limit)
				return;
			a->next++;
			if (row >= a->rows->n)
				continue;
			a->at = v ? a->rows->v[row] + a->rows->v_offset : a->rows->k[row] + a->rows->k_offset;
			a->end = a->at + a->bytes[v];
		}
		__builtin_prefetch(a->at, 0, 2);
		a->at += LINE;
	}
}

/* Ask for the first rows of K. */
static inline void ahead_begin(struct ahead *a, const struct kvt_split_rows *rows, uint32_t k_bytes, uint32_t v_bytes)
{
	*a = (struct ahead){ .rows = rows, .bytes = { k_bytes, v_bytes }, .limit = KVT_TILE };
	ahead_step(a, 16 * ((k_bytes + LINE - 1) / LINE));
}

/*
 * The loops begin to consume a plane of a tile: one more may be fetched
 * meanwhile, half of it while packing, half in @pauses of the multiplications.
 */
static inline void ahead_plane(struct ahead *a, uint32_t pauses)
{
	uint32_t v = a->limit / KVT_TILE & 1, begun = a->limit - KVT_TILE;

	if (a->next < begun)
		a->next = begun;
	a->limit += KVT_TILE;
	a->pace = KVT_TILE / 2 * ((a->bytes[v] + LINE - 1) / LINE) / (pauses + 1) + 1;
}

#endif
