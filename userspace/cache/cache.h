/* SPDX-License-Identifier: MIT */
/*
 * Inside a cache: the store, who computes, and the block tables of sequences
 * and raw planes.
 *
 * cache->lock guards which sequences are alive and what was attended to last. No
 * other lock is taken with it held. A sequence's tables are its caller's to order.
 */
#ifndef KVT_CACHE_CACHE_H
#define KVT_CACHE_CACHE_H

#include <pthread.h>
#include <stdbool.h>

#include "attention/attend.h"
#include "base/budget.h"
#include "base/workers.h"
#include "gpu/gpu.h"
#include "host/host.h"
#include "kvtier.h"
#include "store/store.h"

struct kvt_plane {
	struct kvt_plane_geom geom;
	uint32_t heads, head_dim, layer;
	uint64_t rows;	      /* raw: how many; 0: a sequence plane */
	uint32_t *table;      /* raw: [table_len] blocks */
	uint32_t table_len;   /* of the raw table, or of each sequence's */
	uint32_t table_first; /* in a sequence's tables */
	uint32_t next_k, next_v; /* the planes that the last pass attended to after this K plane, or UINT32_MAX */
};

struct kvt_seq {
	struct kvt_cache *cache;
	uint32_t len;
	bool alive;
	bool recovered; /* left by another process, and not asked for yet */
	struct kvt_batch *batch; /* that it is attached to; no other call may touch it then */
	uint32_t *tokens; /* [max_tokens] */
	uint32_t *tables; /* of all sequence planes, one after the other */
};

struct kvt_prefix;
struct kvt_dir;
struct kvt_publish;

/* How blocks in pinned memory reach a batch's launches, and seconds that each way took for so many bytes. */
enum kvt_ring_way { KVT_RING_UNKNOWN, KVT_RING_ENGINE, KVT_RING_KERNEL, KVT_RING_IN_PLACE };
struct kvt_ring_choice {
	enum kvt_ring_way way;
	uint64_t bytes; /* 0: not tried */
	double engine_s, kernel_s, in_place_s;
};

struct kvt_cache {
	struct kvt_budget budget[KVT_TIERS];
	char name[64];
	uint64_t block_bytes, overhead, gpu_scratch_bytes;
	struct kvt_plane *planes;
	uint32_t n_planes, max_seqs, max_tokens, tables_len;
	uint32_t max_query_rows, max_query_heads, threads;
	struct kvt_seq *seqs; /* [max_seqs] */
	uint32_t *tables;     /* [max_seqs][max_tokens + tables_len], then the raw planes' */
	uint64_t tables_bytes;
	struct kvt_host *host;
	struct kvt_gpu *gpu;
	bool owns_host, owns_gpu;
	struct kvt_store *store;
	struct kvt_workers *workers;
	struct kvt_attend *attend;
	struct kvt_prefix *prefix; /* or NULL */
	struct kvt_dir *dir;	   /* where it outlives the process, or NULL */
	struct kvt_publish *publish; /* or NULL */

	pthread_mutex_t lock;
	struct kvt_ring_choice ring; /* what a batch found out */
	uint64_t streamed_bytes, in_place_bytes;
	uint32_t alive; /* sequences */
	uint32_t last_k; /* K plane of the last attention call, or UINT32_MAX */
};

/* As kvt_cache_create() on a given host and gpu (NULL: its own), which outlive the cache. For tests. */
int kvt_cache_create_on(const struct kvt_cache_params *params, struct kvt_host *host, struct kvt_gpu *gpu,
			struct kvt_cache **cache);

/* The rows of caller's memory checked against a plane, with stride filled in. */
int kvt_rows_check(const struct kvt_plane *plane, const struct kvt_rows *rows, uint64_t n, struct kvt_rows *checked);

/* @n rows, @stride bytes apart, are places that addresses can name. */
static inline bool kvt_stride_fits(uint64_t n, uint64_t stride)
{
	return !n || stride <= INT64_MAX / n;
}

/* Read rows [first, first + n) through a table into @dst (checked). */
int kvt_table_read(struct kvt_cache *cache, const struct kvt_plane *plane, const uint32_t *table, uint64_t first,
		   uint64_t n, const struct kvt_rows *dst);

/* Write rows [first, first + n) through a table; a shared block is copied first. Block by block: all of it or none. */
int kvt_table_write(struct kvt_cache *cache, uint32_t plane, uint32_t *table, uint64_t first, uint64_t n,
		    const struct kvt_rows *src);

/* What a block is called in a warm pool: its entry's place among all tables. */
static inline uint64_t kvt_entry_key(const struct kvt_cache *cache, const uint32_t *entry)
{
	return (uint64_t)(entry - cache->tables) + 1;
}

/* Give an entry's block up, and the name that it has by it. */
void kvt_table_put(struct kvt_cache *cache, uint32_t *entry);

/* The smallest gpu_bytes with which a cache of @params has a gpu tier: gpu_scratch_bytes, staging and a block. Or an errno. */
int64_t kvt_cache_min_gpu(const struct kvt_cache_params *params);

/* Bytes that the tiers would have to have more, at least, for @blocks at the same time. */
uint64_t kvt_cache_wanting(const struct kvt_cache *cache, uint64_t blocks);

/* Take over what the store found in a warm pool. */
void kvt_cache_recover(struct kvt_cache *cache);

/* Make *block hold at most its first @rows, in a copy where others share it; @alone: in a copy even if it has no more. */
int kvt_table_own(struct kvt_cache *cache, uint32_t *block, uint32_t rows, bool alone);

int kvt_table_borrow(struct kvt_cache *cache, const struct kvt_plane *plane, uint32_t block, struct kvt_borrow *borrow);

/* For statistics: bytes that a batch copied ahead, or launches read in pinned memory; what a ring decided. */
void kvt_cache_streamed(struct kvt_cache *cache, uint64_t streamed, uint64_t in_place);
void kvt_cache_ring(struct kvt_cache *cache, const struct kvt_ring_choice *choice);

/* 0, or -EBUSY: a batch on the GPU has the sequence. */
int kvt_seq_idle(const struct kvt_seq *seq);

static inline uint32_t *kvt_seq_table(const struct kvt_seq *seq, const struct kvt_plane *plane)
{
	return seq->tables + plane->table_first;
}

#endif
