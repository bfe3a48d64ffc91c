// SPDX-License-Identifier: MIT
/*
 * Sequences that a process before this one left in a warm RAM tier. Their token ids are in the store's user area, their
 * blocks are found by the place that they had in the tables.
 *
 * A sequence is as long as its rows go without a gap in every plane. Its tokens were written before its rows, and rows
 * are cut before tokens are overwritten: tokens belong to the rows that are there, whenever the process was killed.
 */
#include "cache/cache.h"

#include <errno.h>
#include <string.h>

#include "base/err.h"

/* The table entry that a found block had, or NULL: not a sequence's, or of another plane. */
static uint32_t *entry_of(const struct kvt_cache *c, uint64_t key, uint32_t plane)
{
	uint64_t per_seq = (uint64_t)c->max_tokens + c->tables_len, at = (key - 1) % per_seq;
	const struct kvt_plane *p = &c->planes[plane];

	if (p->rows || (key - 1) / per_seq >= c->max_seqs || at < (uint64_t)c->max_tokens + p->table_first ||
	    at >= (uint64_t)c->max_tokens + p->table_first + p->table_len)
		return NULL;
	return &c->tables[key - 1];
}

/* Tokens for which every plane has all rows. */
static uint32_t whole_len(const struct kvt_seq *seq)
{
	const struct kvt_cache *c = seq->cache;
	uint32_t least = c->max_tokens;

	for (uint32_t i = 0; i < c->n_planes; i++) {
		const struct kvt_plane *p = &c->planes[i];
		const uint32_t *table = kvt_seq_table(seq, p);
		uint64_t len = 0;

		for (uint32_t b = 0; !p->rows && b < p->table_len && table[b] != KVT_NO_BLOCK; b++) {
			uint32_t rows = kvt_store_rows(c->store, table[b]);

			len += rows;
			if (rows < p->geom.block_rows)
				break;
		}
		if (!p->rows && len < least)
			least = (uint32_t)len;
	}
	return least;
}

void kvt_cache_recover(struct kvt_cache *c)
{
	uint32_t *area = kvt_store_user_area(c->store);

	for (uint32_t i = 0; i < c->max_seqs; i++) {
		c->seqs[i].tokens = area + (uint64_t)i * c->max_tokens;
		memset(c->seqs[i].tables, 0xff, c->tables_len * sizeof(uint32_t)); /* KVT_NO_BLOCK */
	}
	for (uint32_t block = 0; block < kvt_store_found(c->store); block++) {
		uint32_t plane, *entry;
		uint64_t key = kvt_store_named(c->store, block, &plane);

		entry = entry_of(c, key, plane);
		if (entry && *entry == KVT_NO_BLOCK)
			*entry = block;
		else
			kvt_store_put(c->store, block);
	}
	for (uint32_t i = 0; i < c->max_seqs; i++) {
		struct kvt_seq *seq = &c->seqs[i];
		uint32_t len = whole_len(seq);

		seq->alive = true;
		seq->recovered = len > 0;
		c->alive++;
		seq->len = c->max_tokens; /* blocks may be anywhere */
		kvt_seq_truncate(seq, len);
		if (!len)
			kvt_seq_free(seq);
	}
}

static uint32_t common(const struct kvt_seq *seq, const uint32_t *tokens, uint32_t n)
{
	uint32_t i = 0;

	while (i < n && i < seq->len && seq->tokens[i] == tokens[i])
		i++;
	return i;
}

int kvt_seq_recover(struct kvt_cache *c, const uint32_t *tokens, uint32_t n, struct kvt_seq **seq)
{
	struct kvt_seq *best = NULL;
	uint32_t most = 0;

	pthread_mutex_lock(&c->lock);
	for (uint32_t i = 0; i < c->max_seqs; i++) {
		uint32_t same = c->seqs[i].recovered ? common(&c->seqs[i], tokens, n) : 0;

		if (same > most) {
			most = same;
			best = &c->seqs[i];
		}
	}
	if (best)
		best->recovered = false;
	pthread_mutex_unlock(&c->lock);
	if (!best)
		return kvt_fail(-ENOENT, "of what was found in the warm pool, nothing begins with these %u tokens", n);
	*seq = best;
	return kvt_seq_truncate(best, most);
}
