/* SPDX-License-Identifier: MIT */
/* What the exact kernels work on: a tile of positions, and a batch of the query rows that see something of it. */
#ifndef KVT_ATTENTION_BATCH_H
#define KVT_ATTENTION_BATCH_H

#include "attention/panel.h"

#define BATCH KVT_HEADS_ROWS

struct tile {
	const struct kvt_attn_shape *shape;
	const struct kvt_query_rows *rows;
	struct kvt_attn_state *out;
	uint64_t first; /* position of row 0 */
	unsigned n;
	const uint8_t *const *k_rows, *const *v_rows;
	uint32_t left, more;	     /* rows of the split from the tile's first on; and those after it */
	uint32_t row, head_rows;     /* the first query row; how many a KV head has */
	uint32_t heads;		     /* direct: in one go */
	uint32_t k_offset, v_offset; /* of that row's head */
	uint32_t k_bytes, v_bytes;   /* of a head in a row */
	bool direct;
	unsigned ahead;		   /* direct: rows, */
	float *q;		   /* and queries, aligned: a load across two lines costs two */
	uint32_t q_stride;
	float *k, *v;		   /* panels */
	size_t k_stride, v_stride; /* floats between panels */
	bool packed;		   /* the panels hold this tile */
};

/* Rows [at, at + n) of a batch. */
struct span {
	unsigned at, n;
	uint32_t head;
	bool last; /* of its head */
};

/* Query rows that see something of the tile. */
struct batch {
	unsigned n, spans;
	struct span span[BATCH];
	uint32_t head[BATCH]; /* KV heads from the first row's on */
	uint32_t row[BATCH];
	uint64_t seen[BATCH];
	const float *q[BATCH];
	float *acc[BATCH];
	float alpha[BATCH];
	float s[BATCH][KVT_TILE]; /* scores, then weights */
	float bias[BATCH][KVT_TILE];
	float lane[BATCH][PANEL]; /* of a row's largest score, then of its sum */
};

#endif
