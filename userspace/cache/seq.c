// SPDX-License-Identifier: MIT
/* Sequences: token ids and a block table for each sequence plane; forks share blocks. */
#include "cache/cache.h"

#include <errno.h>
#include <string.h>

#include "base/err.h"

static const struct kvt_plane *seq_plane(const struct kvt_cache *c, uint32_t plane)
{
	if (plane >= c->n_planes) {
		kvt_fail(-EINVAL, "plane %u of %u", plane, c->n_planes);
		return NULL;
	}
	if (c->planes[plane].rows) {
		kvt_fail(-EINVAL, "plane %u is a raw plane: its rows belong to no sequence", plane);
		return NULL;
	}
	return &c->planes[plane];
}

static int check_alive(const struct kvt_seq *seq)
{
	return seq->alive ? 0 : kvt_fail(-EINVAL, "the sequence was freed");
}

int kvt_seq_idle(const struct kvt_seq *seq)
{
	int ret = check_alive(seq);

	if (ret)
		return ret;
	return seq->batch ? kvt_fail(-EBUSY, "the sequence is attached to a batch on the GPU: detach it first") : 0;
}

static int check_range(const struct kvt_seq *seq, uint32_t first, uint32_t n)
{
	if (first > seq->len || n > seq->len - first)
		return kvt_fail(-ERANGE, "rows %u to %llu of a sequence of %u tokens", first,
				(unsigned long long)first + n, seq->len);
	return 0;
}

static void drop_blocks(struct kvt_seq *seq, const struct kvt_plane *p, uint32_t from)
{
	uint32_t *table = kvt_seq_table(seq, p);

	for (uint32_t i = from; i < p->table_len && (uint64_t)i * p->geom.block_rows < seq->len; i++)
		kvt_table_put(seq->cache, &table[i]);
}

static void cut(struct kvt_seq *seq, uint32_t tokens)
{
	struct kvt_cache *c = seq->cache;

	for (uint32_t i = 0; i < c->n_planes; i++) {
		const struct kvt_plane *p = &c->planes[i];

		if (!p->rows)
			drop_blocks(seq, p, (tokens + p->geom.block_rows - 1) / p->geom.block_rows);
	}
	seq->len = tokens;
}

int kvt_seq_create(struct kvt_cache *c, struct kvt_seq **seq)
{
	struct kvt_seq *s = NULL;

	if (!c || !seq)
		return kvt_fail(-EINVAL, "a sequence: no cache, or nowhere to put it");
	pthread_mutex_lock(&c->lock);
	for (uint32_t i = 0; i < c->max_seqs && (!s || s->alive); i++)
		if (!c->seqs[i].alive || (!s && c->seqs[i].recovered))
			s = &c->seqs[i];
	if (s) {
		c->alive += !s->alive;
		s->alive = true;
		s->recovered = false;
	}
	pthread_mutex_unlock(&c->lock);
	if (!s)
		return kvt_fail(-ENOSPC, "%u sequences are alive, as many as max_seqs allows", c->max_seqs);
	cut(s, 0); /* what nobody recovered */
	memset(s->tables, 0xff, c->tables_len * sizeof(uint32_t)); /* KVT_NO_BLOCK */
	*seq = s;
	return 0;
}

void kvt_seq_free(struct kvt_seq *seq)
{
	struct kvt_cache *c;

	if (!seq || !seq->alive) /* freed already */
		return;
	c = seq->cache;
	kvt_batch_detach(seq->batch);
	cut(seq, 0);
	pthread_mutex_lock(&c->lock);
	seq->alive = false;
	c->alive--;
	pthread_mutex_unlock(&c->lock);
}

int kvt_seq_fork(struct kvt_seq *seq, uint32_t tokens, struct kvt_seq **fork)
{
	struct kvt_cache *c = seq->cache;
	struct kvt_seq *f;
	int ret = kvt_seq_idle(seq);

	if (!ret && !fork)
		ret = kvt_fail(-EINVAL, "a fork: nowhere to put it");
	if (!ret)
		ret = check_range(seq, 0, tokens);
	if (ret)
		return ret;
	ret = kvt_seq_create(c, &f);
	if (ret)
		return ret;
	for (uint32_t i = 0; i < c->n_planes; i++) {
		const struct kvt_plane *p = &c->planes[i];
		const uint32_t *from = kvt_seq_table(seq, p);
		uint32_t *to = kvt_seq_table(f, p);

		for (uint32_t b = 0; !p->rows && (uint64_t)b * p->geom.block_rows < tokens; b++) {
			if (from[b] == KVT_NO_BLOCK)
				continue;
			kvt_store_get(c->store, from[b]);
			to[b] = from[b];
		}
	}
	memcpy(f->tokens, seq->tokens, tokens * sizeof(uint32_t));
	f->len = tokens;
	*fork = f;
	return 0;
}

uint32_t kvt_seq_len(const struct kvt_seq *seq)
{
	return seq->len;
}

int kvt_seq_append(struct kvt_seq *seq, const uint32_t *tokens, uint32_t n)
{
	struct kvt_cache *c = seq->cache;
	int ret = kvt_seq_idle(seq);

	if (ret)
		return ret;
	if (n > c->max_tokens - seq->len)
		return kvt_fail(-ENOSPC, "%u tokens behind %u: max_tokens is %u", n, seq->len, c->max_tokens);
	/* what a cut or a fork left behind the end must not show through */
	for (uint32_t i = 0; i < c->n_planes; i++) {
		const struct kvt_plane *p = &c->planes[i];
		uint32_t rows = seq->len % p->geom.block_rows;

		if (p->rows || !rows)
			continue;
		ret = kvt_table_own(c, &kvt_seq_table(seq, p)[seq->len / p->geom.block_rows], rows, false);
		if (ret)
			return ret;
	}
	if (tokens)
		memcpy(seq->tokens + seq->len, tokens, n * sizeof(uint32_t));
	else
		memset(seq->tokens + seq->len, 0, n * sizeof(uint32_t));
	seq->len += n;
	return 0;
}

int kvt_seq_truncate(struct kvt_seq *seq, uint32_t tokens)
{
	int ret = kvt_seq_idle(seq);

	if (ret)
		return ret;
	if (tokens > seq->len)
		return kvt_fail(-EINVAL, "a sequence of %u tokens cannot be cut to %u", seq->len, tokens);
	cut(seq, tokens);
	return 0;
}

int kvt_seq_tokens(const struct kvt_seq *seq, uint32_t first, uint32_t n, uint32_t *tokens)
{
	int ret = check_alive(seq);

	if (!ret)
		ret = check_range(seq, first, n);
	if (!ret && n && !tokens)
		ret = kvt_fail(-EINVAL, "a sequence's tokens: nowhere to put %u of them", n);
	if (!ret && n)
		memcpy(tokens, seq->tokens + first, n * sizeof(uint32_t));
	return ret;
}

static int check_rows(const struct kvt_seq *seq, uint32_t plane, uint32_t first, uint32_t n, const struct kvt_rows *rows,
		      struct kvt_rows *checked)
{
	const struct kvt_plane *p = seq_plane(seq->cache, plane);
	int ret = p ? kvt_seq_idle(seq) : -EINVAL;

	if (!ret)
		ret = check_range(seq, first, n);
	return ret ? ret : kvt_rows_check(p, rows, n, checked);
}

int kvt_seq_write(struct kvt_seq *seq, uint32_t plane, uint32_t first, uint32_t n, const struct kvt_rows *src)
{
	struct kvt_rows rows;
	int ret = check_rows(seq, plane, first, n, src, &rows);

	return ret ? ret : kvt_table_write(seq->cache, plane, kvt_seq_table(seq, &seq->cache->planes[plane]), first, n, &rows);
}

int kvt_seq_read(struct kvt_seq *seq, uint32_t plane, uint32_t first, uint32_t n, const struct kvt_rows *dst)
{
	const struct kvt_plane *p;
	struct kvt_rows rows;
	int ret = check_rows(seq, plane, first, n, dst, &rows);

	if (ret)
		return ret;
	p = &seq->cache->planes[plane];
	return kvt_table_read(seq->cache, p, kvt_seq_table(seq, p), first, n, &rows);
}

int64_t kvt_seq_move(struct kvt_seq *seq, enum kvt_tier tier)
{
	int ret;

	if ((unsigned int)tier >= KVT_TIERS)
		return kvt_fail(-EINVAL, "tier %u", tier);
	ret = kvt_seq_idle(seq);
	if (ret)
		return ret;
	/* all planes in one call, so that none takes another's frames; behind the end there are no blocks */
	return kvt_store_move(seq->cache->store, seq->tables, seq->cache->tables_len, tier);
}

int kvt_seq_borrow(struct kvt_seq *seq, uint32_t plane, uint32_t index, struct kvt_borrow *borrow)
{
	const struct kvt_plane *p = seq_plane(seq->cache, plane);
	int ret;

	if (!p)
		return -EINVAL;
	ret = kvt_seq_idle(seq);
	if (!ret && !borrow)
		ret = kvt_fail(-EINVAL, "a borrowed block: nowhere to say where it is");
	if (ret)
		return ret;
	if ((uint64_t)index * p->geom.block_rows >= seq->len)
		return kvt_fail(-ERANGE, "block %u of a sequence of %u tokens, %u rows a block", index, seq->len,
				p->geom.block_rows);
	return kvt_table_borrow(seq->cache, p, kvt_seq_table(seq, p)[index], borrow);
}
