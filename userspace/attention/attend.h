/* SPDX-License-Identifier: MIT */
/*
 * Attention over blocks: a plan of groups of splits that fit the frames, each
 * group's blocks borrowed while the next one's are loading.
 */
#ifndef KVT_ATTENTION_ATTEND_H
#define KVT_ATTENTION_ATTEND_H

#include "attention/kernel.h"
#include "base/workers.h"
#include "store/store.h"

struct kvt_attend;

struct kvt_attend_params {
	uint32_t threads;
	uint32_t max_query_rows;  /* tokens in one pass over the KV */
	uint32_t max_query_heads;
	uint32_t max_k_dim, max_v_dim; /* of a head */
	uint32_t frames;	  /* host frames of the store, */
	uint64_t block_bytes;	  /* and their size */
	bool widen;		  /* some planes are of codecs that the kernels do not read: rows become f32 first */
	uint32_t split_blocks;	  /* blocks that one split's K and V take at most */
};

/* Blocks of @block_rows rows that KVT_SPLIT positions from a multiple of KVT_SPLIT can touch. */
uint32_t kvt_split_blocks(uint32_t block_rows);

uint64_t kvt_attend_bytes(const struct kvt_attend_params *);
int kvt_attend_create(const struct kvt_attend_params *, struct kvt_store *, struct kvt_workers *, struct kvt_attend **);
void kvt_attend_destroy(struct kvt_attend *);

/* One sequence's, or one mask's, query tokens over one pair of planes. */
struct kvt_attend_call {
	struct kvt_attn_shape shape;
	const struct kvt_plane_geom *k_geom, *v_geom;
	const uint32_t *k_table, *v_table; /* block of rows [i * block_rows, ...), KVT_NO_BLOCK: zeros */
	uint64_t n_rows;		   /* KV rows */
	uint32_t heads, kv_heads;
	uint32_t n;	/* query tokens */
	uint64_t first; /* position of query token 0, without a mask */
	bool causal, widen; /* K or V is of such a codec; @shape says f32 for it */
	uint32_t window;
	const float *slopes, *sinks; /* [heads] or NULL */
	const void *mask;
	uint64_t mask_stride; /* elements */
	const float *q;	      /* [n][heads][k_dim], tokens q_stride apart */
	float *out;	      /* [n][heads][v_dim], tokens out_stride apart */
	uint64_t q_stride, out_stride; /* elements */
	const struct kvt_attend_call *next; /* what will likely be read next, as far as that says which rows; or NULL */
};

/* Calls on one kvt_attend take turns. */
int kvt_attend_run(struct kvt_attend *, const struct kvt_attend_call *);

#endif
