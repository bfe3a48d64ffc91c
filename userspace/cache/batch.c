// SPDX-License-Identifier: MIT
/*
 * Sequences that a GPU appends and attends to. While they are attached, their
 * blocks are pinned where kernels read them, and tables on the device say
 * where; each step the host only makes room (a block now and then) and counts
 * tokens. Positions are read from device memory, so that work which was
 * captured once serves every later step.
 *
 * Nothing here waits for the device but attach (its uploads), detach (which
 * takes the digests that kernels have added up), and the first attention of a
 * batch with a ring (cache/ring.h), which finds out whether the ring is faster.
 *
 * Device memory, in 64-bit words: tokens, rows (two of each a word), then for
 * each sequence plane blocks[max_seqs][stride] and sums[max_seqs][stride].
 */
#include "cache/batch.h"
#include "cache/ring.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/params.h"
#include "codec/codec.h"
#include "gpu/attend.h"
#include "gpu/kernels.h"

#define WARPS 4 /* of a thread block that appends: more thread blocks, so more multiprocessors */

/* Table entries [first, end) of a plane are open, those before are pinned. They may reach behind the sequence's end. */
struct open_range {
	uint32_t first, end;
};

struct kvt_batch {
	struct kvt_cache *cache;
	struct kvt_gpu *gpu;
	const struct kvt_gpu_ops *ops;
	kvt_stream stream;
	kvt_kernel extend, set, advance;
	kvt_dptr words, scratch;
	uint64_t charged, scratch_bytes;
	uint32_t max_seqs, max_tokens, stride;
	uint32_t tokens_words, rows_words; /* how many */

	uint32_t n, total, longest; /* sequences; tokens of this step, of all and of one of them */
	uint64_t rows_most;	    /* KV rows of all sequences that launches are sized for */
	bool settled; /* the tables of this step were complete before what was launched last began */
	uint32_t epoch;
	struct kvt_seq **seqs;	/* [max_seqs] */
	uint32_t *counts;	/* [max_seqs + 1], and room for an even number */
	struct open_range *open; /* [max_seqs][n_planes] */
	uint64_t *line;		/* [stride] */
	uint64_t *zeros_hash;	/* [n_planes]: kvt_row_hash() of a row of zeros */
	struct kvt_set_args pending;
	struct kvt_ring *ring; /* or NULL: what is in pinned memory is read there */
	uint32_t *in_place;    /* [n_planes]: table entries of blocks that are */
};

/* ---- words on the device, set in stream order from launch arguments: no copy has to outlive the call ---- */

static int launch(struct kvt_batch *b, kvt_kernel kernel, uint32_t blocks, uint32_t threads, void *args)
{
	const struct kvt_dim3 grid = { blocks ? blocks : 1, 1, 1 }, block = { threads, 1, 1 };

	return b->ops->launch(b->gpu, kernel, grid, block, 0, b->stream, &args, 1);
}

/*
 * What reads tables and rows of earlier steps before it waits. Behind a change of the tables one launch is in order, and so
 * they are there for all that follow; a ring changes what they stand for by copies between launches.
 */
static int launch_reader(struct kvt_batch *b, kvt_kernel kernel, struct kvt_dim3 grid, struct kvt_dim3 block, uint32_t shared,
			 void *args)
{
	const bool early = b->settled && !b->ring;

	b->settled = true;
	return (early ? b->ops->launch_early : b->ops->launch)(b->gpu, kernel, grid, block, shared, b->stream, &args, 1);
}

static int flush_words(struct kvt_batch *b)
{
	int ret = 0;

	b->settled = false;
	b->pending.words = b->words;
	if (b->pending.n)
		ret = launch(b, b->set, 1, KVT_SET_MAX, &b->pending);
	if (!ret)
		b->pending.n = 0;
	return ret;
}

/* Room for @n words that are to be set together. */
static int room_for_words(struct kvt_batch *b, uint32_t n)
{
	return b->pending.n + n > KVT_SET_MAX ? flush_words(b) : 0;
}

static void put_word(struct kvt_batch *b, uint32_t index, uint64_t value)
{
	b->pending.index[b->pending.n] = index;
	b->pending.value[b->pending.n++] = value;
}

static int set_word(struct kvt_batch *b, uint32_t index, uint64_t value)
{
	int ret = room_for_words(b, 1);

	if (!ret)
		put_word(b, index, value);
	return ret;
}

/* @n 32-bit values from word @at on. */
static int set_halves(struct kvt_batch *b, uint32_t at, const uint32_t *values, uint32_t n)
{
	int ret = 0;

	for (uint32_t i = 0; i < n && !ret; i += 2)
		ret = set_word(b, at + i / 2, values[i] | (uint64_t)(i + 1 < n ? values[i + 1] : 0) << 32);
	return ret;
}

/* ---- where things are ---- */

static uint32_t blocks_word(const struct kvt_batch *b, uint32_t plane, uint32_t seq)
{
	return b->tokens_words + b->rows_words + (2 * plane * b->max_seqs + seq) * b->stride;
}

static uint32_t sums_word(const struct kvt_batch *b, uint32_t plane, uint32_t seq)
{
	return blocks_word(b, plane, seq) + b->max_seqs * b->stride;
}

static kvt_dptr word_at(const struct kvt_batch *b, uint32_t word)
{
	return b->words + 8ull * word;
}

kvt_stream kvt_batch_stream(const struct kvt_batch *b)
{
	return b->stream;
}

struct kvt_gpu *kvt_batch_gpu(const struct kvt_batch *b)
{
	return b->gpu;
}

kvt_dptr kvt_batch_tokens(const struct kvt_batch *b)
{
	return b->words;
}

kvt_dptr kvt_batch_rows(const struct kvt_batch *b)
{
	return word_at(b, b->tokens_words);
}

uint32_t kvt_batch_epoch(const struct kvt_batch *b)
{
	return b->epoch;
}

/* ---- blocks ---- */

static struct open_range *open_of(struct kvt_batch *b, uint32_t plane, uint32_t seq)
{
	return &b->open[seq * b->cache->n_planes + plane];
}

/*
 * Open the block behind those that are open, which has @rows rows of the
 * sequence's so far; a new one where there is none.
 */
static int open_next(struct kvt_batch *b, uint32_t plane, uint32_t seq, uint32_t rows)
{
	struct open_range *open = open_of(b, plane, seq);
	const uint32_t at = open->end;
	const struct kvt_plane *p = &b->cache->planes[plane];
	uint32_t *block = &kvt_seq_table(b->seqs[seq], p)[at];
	struct kvt_store *store = b->cache->store;
	bool fresh = *block == KVT_NO_BLOCK;
	uint64_t address, digest;
	int ret = room_for_words(b, 2); /* first: what is open must get into the tables */

	if (!ret)
		ret = fresh ? kvt_store_alloc(store, plane, block) : kvt_table_own(b->cache, block, rows, true);
	if (ret)
		return ret;
	ret = kvt_store_open(store, *block, b->stream, &address, &digest);
	if (ret) {
		if (fresh) {
			kvt_store_put(store, *block);
			*block = KVT_NO_BLOCK;
		}
		return ret;
	}
	put_word(b, blocks_word(b, plane, seq) + at, address);
	put_word(b, sums_word(b, plane, seq) + at, digest);
	b->in_place[plane] += kvt_store_on_host(store, *block, &(struct kvt_host_rows){ 0 });
	open->end++;
	return 0;
}

static uint32_t entries(const struct kvt_plane *p, uint32_t tokens)
{
	return (tokens + p->geom.block_rows - 1) / p->geom.block_rows;
}

/* Open blocks for @count more tokens. What a call that fails has opened is there for the next. */
static int make_room(struct kvt_batch *b, uint32_t seq, uint32_t count)
{
	struct kvt_cache *c = b->cache;
	int ret = 0;

	for (uint32_t plane = 0; plane < c->n_planes && !ret; plane++) {
		const struct kvt_plane *p = &c->planes[plane];
		const struct open_range *open = open_of(b, plane, seq);

		while (!ret && !p->rows && open->end < entries(p, b->seqs[seq]->len + count))
			ret = open_next(b, plane, seq, 0);
	}
	return ret;
}

/* Pin a plane's full blocks, open its last, and say where they are. */
static int attach_plane(struct kvt_batch *b, uint32_t plane, uint32_t seq)
{
	const struct kvt_plane *p = &b->cache->planes[plane];
	struct kvt_seq *s = b->seqs[seq];
	uint32_t full = s->len / p->geom.block_rows, left = s->len % p->geom.block_rows;
	uint32_t *table = kvt_seq_table(s, p);
	int ret = kvt_store_pin(b->cache->store, table, full, b->line);

	*open_of(b, plane, seq) = ret ? (struct open_range){ 0, 0 } : (struct open_range){ full, full };
	if (!ret && full)
		ret = b->ops->copy_h2d(b->gpu, word_at(b, blocks_word(b, plane, seq)), b->line, full * sizeof(uint64_t));
	return ret || !left ? ret : open_next(b, plane, seq, left);
}

/* Seal what is open of a plane; @known: its digests can be had from the device. */
static void detach_plane(struct kvt_batch *b, uint32_t plane, uint32_t seq, bool known)
{
	const struct open_range open = *open_of(b, plane, seq);
	const struct kvt_plane *p = &b->cache->planes[plane];
	uint32_t *table = kvt_seq_table(b->seqs[seq], p), len = b->seqs[seq]->len;
	struct kvt_store *store = b->cache->store;

	if (known && open.end > open.first)
		known = !kvt_store_device_ended(store,
						b->ops->copy_d2h(b->gpu, b->line,
								 word_at(b, sums_word(b, plane, seq) + open.first),
								 (open.end - open.first) * sizeof(uint64_t)),
						"reading digests");
	for (uint32_t at = open.first, written; at < open.end; at++) {
		uint64_t begin = (uint64_t)at * p->geom.block_rows;
		uint32_t rows = len <= begin ? 0 : len - begin < p->geom.block_rows ? (uint32_t)(len - begin) :
										     p->geom.block_rows;

		written = kvt_store_rows(store, table[at]);
		if (rows > written) /* as zeros; what kernels wrote instead is in the sum */
			b->line[at - open.first] += kvt_equal_rows_digest(written, rows - written, b->zeros_hash[plane]);
		kvt_store_seal(store, table[at], rows, known ? &b->line[at - open.first] : NULL);
		if (!rows) {
			kvt_store_put(store, table[at]);
			table[at] = KVT_NO_BLOCK;
		}
	}
	kvt_store_unpin(store, table, open.first);
}

static void detach_seq(struct kvt_batch *b, uint32_t seq, uint32_t planes, bool known)
{
	for (uint32_t plane = 0; plane < planes; plane++)
		if (!b->cache->planes[plane].rows)
			detach_plane(b, plane, seq, known);
	b->seqs[seq]->batch = NULL;
}

static int attach_seq(struct kvt_batch *b, uint32_t seq)
{
	int ret = 0;

	for (uint32_t plane = 0; plane < b->cache->n_planes; plane++) {
		if (!b->cache->planes[plane].rows)
			ret = attach_plane(b, plane, seq);
		if (ret) { /* the digests of what is open may be among the words that wait */
			bool known = !flush_words(b) && !b->ops->stream_sync(b->gpu, b->stream);

			detach_seq(b, seq, plane + 1, known);
			return ret;
		}
	}
	b->seqs[seq]->batch = b;
	return 0;
}

void kvt_batch_detach(struct kvt_batch *b)
{
	int ret;

	if (!b || !b->n)
		return;
	ret = flush_words(b); /* digests of blocks that no step has reached */
	if (!ret)
		ret = b->ops->stream_sync(b->gpu, b->stream);
	kvt_store_device_ended(b->cache->store, ret, "a batch's work");
	if (b->ring) /* nothing comes out of pinned frames any more */
		kvt_store_device_ended(b->cache->store, kvt_ring_stop(b->ring), "a batch's copies");
	for (uint32_t i = 0; i < b->n; i++)
		detach_seq(b, i, b->cache->n_planes, !ret);
	b->n = b->total = 0;
	b->pending.n = 0;
}

/* ---- blocks in pinned memory: read there, or from the ring ---- */

/* Those that pass through the ring have their places in the tables from now on. */
static int use_ring(struct kvt_batch *b)
{
	uint32_t plane, word;
	kvt_dptr place;
	int ret = 0;

	for (uint32_t i = 0; !ret && kvt_ring_entry(b->ring, i, &plane, &word, &place); i++) {
		ret = set_word(b, word, place);
		b->in_place[plane]--;
	}
	if (!ret)
		ret = flush_words(b);
	return ret ? ret : kvt_ring_start(b->ring);
}

/* Full blocks stay as they are while they are attached, so copies of them do. */
static int find_on_host(struct kvt_batch *b)
{
	struct kvt_host_rows rows;
	bool room = b->ring;
	int ret;

	for (uint32_t plane = 0; plane < b->cache->n_planes; plane++)
		for (uint32_t seq = 0; seq < b->n && !b->cache->planes[plane].rows; seq++) {
			const uint32_t *table = kvt_seq_table(b->seqs[seq], &b->cache->planes[plane]);

			for (uint32_t at = 0; at < open_of(b, plane, seq)->first; at++) {
				if (!kvt_store_on_host(b->cache->store, table[at], &rows))
					continue;
				b->in_place[plane]++;
				room = room && !kvt_ring_add(b->ring, plane, blocks_word(b, plane, seq) + at, &rows);
			}
		}
	ret = b->ring ? kvt_ring_lay_out(b->ring) : 0;
	return !ret && b->ring && kvt_ring_on(b->ring) ? use_ring(b) : ret;
}

/* KV rows that launches are sized for when sequences have @rows. */
static uint64_t rows_covered(uint64_t rows)
{
	uint64_t most = 4096;

	while (most < rows)
		most *= 2;
	return most;
}

/* Sizes of launches cover growth; when they no longer do, what was captured is captured anew. */
static void fit_rows(struct kvt_batch *b)
{
	uint64_t rows = 0;

	for (uint32_t i = 0; i < b->n; i++)
		rows += b->seqs[i]->len;
	if (rows <= b->rows_most)
		return;
	b->rows_most = rows_covered(rows);
	b->epoch++;
}

int kvt_batch_attach(struct kvt_batch *b, struct kvt_seq *const *seqs, uint32_t n)
{
	uint32_t lens[2];
	int ret = 0;

	if (b->n)
		return kvt_fail(-EBUSY, "the batch has %u sequences attached: detach them first", b->n);
	if (!n || n > b->max_seqs)
		return kvt_fail(-EINVAL, "%u sequences for a batch, its max_seqs is %u", n, b->max_seqs);
	for (uint32_t i = 0; i < n; i++) {
		if (!seqs[i] || seqs[i]->cache != b->cache || !seqs[i]->alive)
			return kvt_fail(-EINVAL, "sequence %u of the batch is none of its cache, or was freed", i);
		if (seqs[i]->batch)
			return kvt_fail(-EBUSY, "sequence %u is attached to a batch already", i);
		for (uint32_t k = 0; k < i; k++)
			if (seqs[k] == seqs[i])
				return kvt_fail(-EINVAL, "sequences %u and %u of the batch are one", k, i);
	}
	memset(b->in_place, 0, b->cache->n_planes * sizeof(*b->in_place));
	for (uint32_t i = 0; i < n && !ret; i++) {
		b->seqs[i] = seqs[i];
		b->counts[i] = 0;
		ret = attach_seq(b, i);
		b->n += !ret;
	}
	for (uint32_t i = 0; i < n && !ret; i += 2) {
		lens[0] = seqs[i]->len;
		lens[1] = i + 1 < n ? seqs[i + 1]->len : 0;
		ret = set_halves(b, b->tokens_words + i / 2, lens, 2);
	}
	for (uint32_t i = 0; i < b->tokens_words && !ret; i++)
		ret = set_word(b, i, 0);
	if (!ret)
		ret = flush_words(b);
	if (!ret)
		ret = find_on_host(b);
	if (ret) {
		kvt_batch_detach(b);
		return kvt_store_device_ended(b->cache->store, ret, "attaching a batch");
	}
	b->total = b->longest = 0;
	b->rows_most = 0;
	fit_rows(b);
	b->epoch++;
	return 0;
}

/* ---- a step ---- */

/* Where each sequence's tokens begin among the step's. */
static int set_counts(struct kvt_batch *b, const uint32_t *counts)
{
	uint32_t two[2] = { 0, 0 }, end = 0;
	int ret = 0;

	for (uint32_t i = 0; i <= b->n && !ret; i++) {
		two[i % 2] = end;
		if (i % 2 || i == b->n)
			ret = set_halves(b, i / 2, two, 2);
		end += i < b->n ? counts[i] : 0;
	}
	return ret;
}

int kvt_batch_step(struct kvt_batch *b, const uint32_t *counts, const uint32_t *tokens)
{
	struct kvt_advance_args advance = { .rows = kvt_batch_rows(b), .tokens = kvt_batch_tokens(b), .n_seqs = b->n };
	uint32_t total = 0, longest = 0, seq;
	bool same = true;
	int ret = 0;

	if (!b->n)
		return kvt_fail(-EINVAL, "a step of a batch without sequences: attach some");
	if (!counts)
		return kvt_fail(-EINVAL, "a step: how many tokens each of %u sequences gets is not said", b->n);
	for (seq = 0; seq < b->n; seq++) {
		if (counts[seq] > b->max_tokens - total)
			return kvt_fail(-EINVAL, "a step of more tokens than the batch's max_tokens, %u", b->max_tokens);
		if (counts[seq] > b->cache->max_tokens - b->seqs[seq]->len)
			return kvt_fail(-ENOSPC, "%u tokens behind %u: max_tokens is %u", counts[seq], b->seqs[seq]->len,
					b->cache->max_tokens);
		total += counts[seq];
		longest = counts[seq] > longest ? counts[seq] : longest;
		same &= counts[seq] == b->counts[seq];
	}
	for (seq = 0; seq < b->n && !ret; seq++)
		ret = make_room(b, seq, counts[seq]);
	if (!ret && !same)
		ret = set_counts(b, counts);
	if (!ret)
		ret = flush_words(b);
	if (!ret)
		ret = launch(b, b->advance, 1, 256, &advance);
	if (ret)
		return kvt_store_device_ended(b->cache->store, ret, "a batch's step");
	for (seq = 0; seq < b->n; seq++) {
		struct kvt_seq *s = b->seqs[seq];

		if (tokens)
			memcpy(s->tokens + s->len, tokens, counts[seq] * sizeof(uint32_t));
		else
			memset(s->tokens + s->len, 0, counts[seq] * sizeof(uint32_t));
		tokens = tokens ? tokens + counts[seq] : NULL;
		s->len += counts[seq];
		b->counts[seq] = counts[seq];
	}
	b->epoch += !same;
	b->total = total;
	b->longest = longest;
	fit_rows(b);
	return 0;
}

static struct kvt_plane *batch_plane(struct kvt_batch *b, uint32_t plane)
{
	if (!b->total)
		kvt_fail(-EINVAL, "the batch has no step that rows could belong to");
	else if (plane >= b->cache->n_planes || b->cache->planes[plane].rows)
		kvt_fail(-EINVAL, "plane %u is no sequence plane of %u planes", plane, b->cache->n_planes);
	else
		return &b->cache->planes[plane];
	return NULL;
}

/* What becomes of the step's rows of a plane. */
static int extend_plane(struct kvt_batch *b, uint32_t plane, const struct kvt_rows *src, struct kvt_extend_plane *extend)
{
	const struct kvt_plane *p = batch_plane(b, plane);
	struct kvt_rows rows;
	int ret;

	if (!p)
		return -EINVAL;
	ret = kvt_rows_check(p, src, b->total, &rows);
	if (ret)
		return ret;
	*extend = (struct kvt_extend_plane){
		.src = (uintptr_t)rows.data, .src_stride = rows.stride, .blocks = word_at(b, blocks_word(b, plane, 0)),
		.sums = word_at(b, sums_word(b, plane, 0)), .zeros_hash = b->zeros_hash[plane],
		.block_rows = p->geom.block_rows, .elements = p->geom.elems,
		.src_type = rows.type == KVT_ENCODED ? p->geom.codec : rows.type, .dst_type = p->geom.codec,
	};
	return 0;
}

static int extend(struct kvt_batch *b, struct kvt_extend_args *args, uint32_t n_planes)
{
	const struct kvt_dim3 grid = { (b->total + WARPS - 1) / WARPS, n_planes, 1 }, block = { 32 * WARPS, 1, 1 };
	int ret;

	args->tokens = kvt_batch_tokens(b);
	args->rows = kvt_batch_rows(b);
	args->n_planes = n_planes;
	args->n_seqs = b->n;
	args->table_stride = b->stride;
	ret = launch_reader(b, b->extend, grid, block, 0, args);
	return ret ? kvt_store_device_ended(b->cache->store, ret, "writing a batch's rows") : 0;
}

int kvt_batch_write(struct kvt_batch *b, uint32_t plane, const struct kvt_rows *src)
{
	struct kvt_extend_args args = { 0 };
	int ret = extend_plane(b, plane, src, &args.plane[0]);

	return ret ? ret : extend(b, &args, 1);
}

int kvt_batch_write_kv(struct kvt_batch *b, uint32_t k_plane, const struct kvt_rows *k, uint32_t v_plane,
		       const struct kvt_rows *v)
{
	struct kvt_extend_args args = { 0 };
	int ret = extend_plane(b, k_plane, k, &args.plane[0]);

	if (!ret && k_plane == v_plane)
		ret = kvt_fail(-EINVAL, "plane %u is to be written twice in a step", k_plane);
	if (!ret)
		ret = extend_plane(b, v_plane, v, &args.plane[1]);
	return ret ? ret : extend(b, &args, 2);
}

static int attend_args(struct kvt_batch *b, const struct kvt_attn *a, const struct kvt_batch_attn *io,
		       struct kvt_attend_args *args)
{
	const struct kvt_plane *k = batch_plane(b, a->k_plane), *v = k ? batch_plane(b, a->v_plane) : NULL;
	uint32_t q_row, out_row;

	if (!v)
		return -EINVAL;
	if (k->heads != v->heads || k->geom.codec != v->geom.codec)
		return kvt_fail(-EINVAL, "attention: K has %u heads of %s and V %u of %s: the GPU takes the same for both",
				k->heads, kvt_codec_name(k->geom.codec), v->heads, kvt_codec_name(v->geom.codec));
	if (!a->n_heads || a->n_heads % k->heads)
		return kvt_fail(-EINVAL, "attention: %u query heads are no multiple of %u KV heads", a->n_heads, k->heads);
	if (a->flags & ~KVT_ATTN_CAUSAL)
		return kvt_fail(-EINVAL, "attention: flags 0x%x: unknown bits", a->flags);
	if (a->v_dim && a->v_dim != v->head_dim)
		return kvt_fail(-EOPNOTSUPP, "attention: v_dim is %u: the GPU takes all %u elements of V's heads", a->v_dim,
				v->head_dim);
	if (!isfinite(a->scale) || !isfinite(a->softcap) || a->softcap < 0)
		return kvt_fail(-EINVAL, "attention: scale %g and softcap %g must be finite, softcap not negative",
				(double)a->scale, (double)a->softcap);
	if (!io->q || !io->out || io->q_type > KVT_BF16 || io->out_type > KVT_BF16)
		return kvt_fail(-EINVAL, "attention: q or out is missing, or not f32, f16 or bf16 (%u, %u)", io->q_type,
				io->out_type);
	q_row = (uint32_t)kvt_codec_bytes(io->q_type, (uint64_t)a->n_heads * k->head_dim);
	out_row = (uint32_t)kvt_codec_bytes(io->out_type, (uint64_t)a->n_heads * v->head_dim);
	if ((io->q_stride && io->q_stride < q_row) || (io->out_stride && io->out_stride < out_row))
		return kvt_fail(-EINVAL, "attention: strides of %llu and %llu bytes, tokens take %u and %u",
				(unsigned long long)io->q_stride, (unsigned long long)io->out_stride, q_row, out_row);
	if (!kvt_stride_fits(b->total, io->q_stride) || !kvt_stride_fits(b->total, io->out_stride))
		return kvt_fail(-EINVAL, "attention: %u tokens, %llu and %llu bytes apart, are beyond memory", b->total,
				(unsigned long long)io->q_stride, (unsigned long long)io->out_stride);
	*args = (struct kvt_attend_args){
		.q = io->q, .out = io->out, .q_stride = io->q_stride ? io->q_stride : q_row,
		.out_stride = io->out_stride ? io->out_stride : out_row,
		.k_blocks = word_at(b, blocks_word(b, a->k_plane, 0)), .v_blocks = word_at(b, blocks_word(b, a->v_plane, 0)),
		.tokens = kvt_batch_tokens(b), .rows = kvt_batch_rows(b),
		.slopes = (uintptr_t)a->alibi, .sinks = (uintptr_t)a->sinks, .parts = b->scratch,
		.n_seqs = b->n, .table_stride = b->stride, .heads = a->n_heads, .kv_heads = k->heads,
		.k_dim = k->head_dim, .v_dim = v->head_dim, .k_block_rows = k->geom.block_rows,
		.v_block_rows = v->geom.block_rows, .k_row_bytes = k->geom.row_bytes, .v_row_bytes = v->geom.row_bytes,
		.codec = k->geom.codec, .q_type = io->q_type, .out_type = io->out_type, .mask_type = KVT_F32,
		.causal = a->flags & KVT_ATTN_CAUSAL, .window = a->window,
		.scale = a->scale ? a->scale : (float)(1.0 / sqrt(k->head_dim)), .softcap = a->softcap,
		.family = a->family,
	};
	return 0;
}

struct attention {
	struct kvt_batch *batch;
	struct kvt_attend_recipe recipe;
	struct kvt_attend_args args;
};

static int launch_attention(void *arg)
{
	struct attention *a = arg;
	struct kvt_batch *b = a->batch;
	kvt_kernel kernel;
	int ret = 0;

	for (uint32_t i = 0; !ret && i < a->recipe.n; i++) {
		const struct kvt_attend_step *step = &a->recipe.step[i];

		ret = b->ops->kernel(b->gpu, "attend", step->function, &kernel);
		if (!ret)
			ret = launch_reader(b, kernel, step->grid, step->block, step->shared_bytes, &a->args);
	}
	return ret;
}

/* With what passes through the ring there. */
static int attend(struct kvt_batch *b, struct attention *a, uint32_t k, uint32_t v)
{
	int ret = 0, left;

	if (b->ring && kvt_ring_undecided(b->ring, k, v)) {
		ret = kvt_ring_try(b->ring, k, v, launch_attention, a);
		if (!ret && kvt_ring_on(b->ring))
			ret = use_ring(b);
	}
	if (ret || !b->ring || !kvt_ring_on(b->ring)) {
		ret = ret ? ret : launch_attention(a);
	} else {
		ret = kvt_ring_enter(b->ring, k, v);
		if (!ret)
			ret = launch_attention(a);
		left = kvt_ring_leave(b->ring, k, v);
		ret = ret ? ret : left;
	}
	if (!ret && (b->in_place[k] || b->in_place[v]))
		kvt_cache_streamed(b->cache, 0, (b->in_place[k] + (k == v ? 0 : b->in_place[v])) * b->cache->block_bytes);
	return ret;
}

int kvt_batch_attend(struct kvt_batch *b, const struct kvt_attn *attn, const struct kvt_batch_attn *io)
{
	const struct kvt_attend_device device = { b->gpu->sm, b->gpu->processors, b->gpu->shared_max };
	const struct kvt_attend_limits limits = { .tokens = b->total, .seq_tokens = b->longest, .rows = b->rows_most };
	struct attention launches = { .batch = b };
	struct kvt_batch_attn where;
	struct kvt_attn a;
	kvt_dptr slab;
	uint64_t slab_bytes = kvt_store_gpu_slab(b->cache->store, &slab);
	int ret = kvt_params_copy(&a, sizeof(a), sizeof(a), attn, "attention");

	if (!ret)
		ret = kvt_params_copy(&where, sizeof(where), sizeof(where), io, "attention on a GPU");
	if (!ret && where.reserved)
		ret = kvt_fail(-EINVAL, "attention on a GPU: reserved is %u, not 0", where.reserved);
	if (!ret)
		ret = attend_args(b, &a, &where, &launches.args);
	if (!ret)
		ret = kvt_attend_recipe(&device, &limits, &launches.args, &launches.recipe);
	if (!ret)
		ret = kvt_attend_slab(b->gpu, slab, slab_bytes, &launches.args);
	if (!ret && launches.recipe.scratch_bytes > b->scratch_bytes)
		ret = kvt_fail(-ENOMEM, "attention: %llu bytes of scratch are needed for %llu KV rows, the batch has %llu: raise gpu_scratch_bytes",
			       (unsigned long long)launches.recipe.scratch_bytes, (unsigned long long)b->rows_most,
			       (unsigned long long)b->scratch_bytes);
	if (!ret)
		ret = attend(b, &launches, a.k_plane, a.v_plane);
	return ret == -ENODEV ? kvt_store_device_ended(b->cache->store, ret, "attention") : ret;
}

int kvt_batch_wait(struct kvt_batch *b)
{
	int ret = b->ops->stream_sync(b->gpu, b->stream);

	if (!ret && b->ring)
		ret = kvt_ring_verdict(b->ring);
	return kvt_store_device_ended(b->cache->store, ret, "a batch's work");
}

/* ---- life ---- */

/* 64-bit words on the device; in @host, bytes of the host's copies. */
static uint64_t table_words(uint64_t max_seqs, uint64_t n_planes, uint64_t stride, uint64_t *host)
{
	const struct kvt_batch *b;

	*host = sizeof(*b) + max_seqs * sizeof(*b->seqs) + (max_seqs + 2) * sizeof(*b->counts) +
		max_seqs * n_planes * sizeof(*b->open) + stride * sizeof(*b->line) +
		n_planes * (sizeof(*b->zeros_hash) + sizeof(*b->in_place));
	return max_seqs / 2 + 1 + (max_seqs + 1) / 2 + 2 * n_planes * max_seqs * stride;
}

int64_t kvt_batch_scratch(const struct kvt_cache_params *p, const struct kvt_batch_params *batch, uint32_t n_heads)
{
	const struct kvt_plane_params *plane = p->planes;
	const uint64_t row = kvt_codec_bytes(plane->codec, (uint64_t)plane->heads * plane->head_dim);
	const struct kvt_attend_device device = { 0 };
	struct kvt_attend_limits limits = { .rows = rows_covered((uint64_t)batch->max_seqs * p->max_tokens) };
	struct kvt_attend_args args = {
		.n_seqs = batch->max_seqs, .heads = n_heads, .kv_heads = plane->heads, .k_dim = plane->head_dim,
		.v_dim = plane->head_dim, .k_block_rows = (uint32_t)(p->block_bytes / row), .k_row_bytes = (uint32_t)row,
		.codec = plane->codec, .scale = 1,
	};
	struct kvt_attend_recipe recipe = { .n = 2 };
	uint64_t words, host, most = 0;
	int ret = 0;

	args.v_block_rows = args.k_block_rows;
	args.v_row_bytes = args.k_row_bytes;
	/* steps of more tokens are not divided over splits, which is what takes scratch */
	for (uint32_t n = 1; !ret && n <= batch->max_tokens && recipe.n == 2; n++) {
		limits.tokens = limits.seq_tokens = n;
		ret = kvt_attend_recipe(&device, &limits, &args, &recipe);
		most = !ret && recipe.scratch_bytes > most ? recipe.scratch_bytes : most;
	}
	if (ret)
		return ret;
	words = table_words(batch->max_seqs, p->n_planes, (p->max_tokens + args.k_block_rows - 1) / args.k_block_rows, &host);
	return (int64_t)(8 * words + host + most + 256);
}

/* What tables and scratch take of gpu_scratch_bytes, the host's copies included. */
static int take(struct kvt_batch *b, uint64_t ring_bytes)
{
	struct kvt_cache *c = b->cache;
	struct kvt_stats st = KVT_INIT(st);
	uint64_t words, host, entries, ring = 0;
	int ret;

	for (uint32_t i = 0; i < c->n_planes; i++)
		if (!c->planes[i].rows && c->planes[i].table_len > b->stride)
			b->stride = c->planes[i].table_len;
	b->tokens_words = b->max_seqs / 2 + 1;
	b->rows_words = (b->max_seqs + 1) / 2;
	words = table_words(b->max_seqs, c->n_planes, b->stride, &host);
	kvt_cache_stats(c, &st);
	entries = st.tier[KVT_TIER_PINNED].frames;
	if (ring_bytes && entries)
		ring = kvt_ring_bytes(c, ring_bytes, (uint32_t)entries);
	if (words > UINT32_MAX || ring > c->gpu_scratch_bytes || 8 * words + host > c->gpu_scratch_bytes - ring)
		return kvt_fail(-ENOMEM, "a batch of %u sequences takes %llu bytes for tables, %llu for its ring, and scratch for attention; gpu_scratch_bytes is %llu",
				b->max_seqs, (unsigned long long)(8 * words + host), (unsigned long long)ring,
				(unsigned long long)c->gpu_scratch_bytes);
	ret = kvt_budget_charge(&c->budget[KVT_TIER_GPU], c->gpu_scratch_bytes);
	if (ret)
		return kvt_fail(ret, "gpu_scratch_bytes, %llu, are in use by another batch", (unsigned long long)c->gpu_scratch_bytes);
	b->charged = c->gpu_scratch_bytes;
	b->scratch_bytes = (c->gpu_scratch_bytes - ring - 8 * words - host) / 256 * 256;
	b->seqs = calloc(b->max_seqs, sizeof(*b->seqs));
	b->counts = calloc(b->max_seqs + 2, sizeof(*b->counts));
	b->open = calloc((uint64_t)b->max_seqs * c->n_planes, sizeof(*b->open));
	b->line = calloc(b->stride, sizeof(*b->line));
	b->zeros_hash = calloc(c->n_planes, sizeof(*b->zeros_hash));
	b->in_place = calloc(c->n_planes, sizeof(*b->in_place));
	if (!b->seqs || !b->counts || !b->open || !b->line || !b->zeros_hash || !b->in_place)
		return kvt_fail(-ENOMEM, "no memory for a batch of %u sequences", b->max_seqs);
	for (uint32_t i = 0; i < c->n_planes; i++)
		b->zeros_hash[i] = kvt_row_hash(kvt_store_zeros(c->store), c->planes[i].geom.row_bytes);
	ret = b->ops->alloc(b->gpu, 8 * words, &b->words);
	if (!ret && b->scratch_bytes)
		ret = b->ops->alloc(b->gpu, b->scratch_bytes, &b->scratch);
	if (!ret && b->scratch_bytes) /* counters, which kernels leave at 0; and parts are copied with rows that nobody wrote */
		ret = b->ops->memset_async(b->gpu, b->scratch, 0, b->scratch_bytes, b->stream);
	if (!ret && b->scratch_bytes)
		ret = b->ops->stream_sync(b->gpu, b->stream);
	if (!ret && ring)
		ret = kvt_ring_create(c, b->stream, ring_bytes, (uint32_t)entries, &b->ring);
	return ret;
}

void kvt_batch_destroy(struct kvt_batch *b)
{
	if (!b)
		return;
	kvt_batch_detach(b);
	kvt_ring_destroy(b->ring);
	b->ops->stream_destroy(b->gpu, b->stream);
	b->ops->free(b->gpu, b->scratch);
	b->ops->free(b->gpu, b->words);
	kvt_budget_release(&b->cache->budget[KVT_TIER_GPU], b->charged);
	free(b->in_place);
	free(b->zeros_hash);
	free(b->line);
	free(b->open);
	free(b->counts);
	free(b->seqs);
	free(b);
}

int kvt_batch_create(struct kvt_cache *c, const struct kvt_batch_params *params, struct kvt_batch **batch)
{
	struct kvt_batch_params p;
	struct kvt_batch *b;
	int ret = kvt_params_copy(&p, sizeof(p), sizeof(p), params, "batch parameters");

	if (ret)
		return ret;
	if (!c->gpu_scratch_bytes)
		return kvt_fail(-ENODEV, "a batch needs a gpu tier, and room beside it: gpu_bytes and gpu_scratch_bytes");
	if (p.flags || p.max_seqs > KVT_ATTEND_SEQS || p.max_tokens > 1u << 20)
		return kvt_fail(-EINVAL, "batch: flags 0x%x (none are known), max_seqs %u (to %u), max_tokens %u (to 2^20)",
				p.flags, p.max_seqs, KVT_ATTEND_SEQS, p.max_tokens);
	b = calloc(1, sizeof(*b));
	if (!b)
		return kvt_fail(-ENOMEM, "no memory for a batch");
	b->cache = c;
	b->gpu = c->gpu;
	b->ops = c->gpu->ops;
	b->max_seqs = p.max_seqs ? p.max_seqs : 1;
	b->max_tokens = p.max_tokens ? p.max_tokens : c->max_query_rows;
	ret = b->ops->stream_create(b->gpu, &b->stream);
	if (ret) {
		free(b);
		return ret;
	}
	ret = take(b, p.ring_bytes);
	if (!ret)
		ret = b->ops->kernel(b->gpu, "block", "extend", &b->extend);
	if (!ret)
		ret = b->ops->kernel(b->gpu, "block", "set", &b->set);
	if (!ret)
		ret = b->ops->kernel(b->gpu, "block", "advance", &b->advance);
	if (ret) {
		kvt_batch_destroy(b);
		return ret;
	}
	*batch = b;
	return 0;
}
