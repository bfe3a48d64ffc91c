// SPDX-License-Identifier: MIT
/*
 * Batches: what kernels append is what sequences hold afterwards, byte for byte
 * and digest for digest; attention's bits depend on nothing but the rows; a
 * step in steady state neither waits nor allocates; every call may fail.
 */
#include <check.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cache/batch.h"
#include "codec/codec.h"
#include "gpu/mock.h"
#include "lib/gpu_backends.h"
#include "lib/rounds.h"

#define OK(call) ck_assert_msg((call) == 0, "%s: %s", #call, kvt_last_error())
#define IS(err, call)                                                                                                  \
	do {                                                                                                           \
		int got_ = (call);                                                                                     \
		ck_assert_msg(got_ == (err), "%s gave %d: %s", #call, got_, kvt_last_error());                         \
	} while (0)

#define PLANES 4 /* K and V of two layers */
#define HEADS 2
#define DIM 64
#define Q_HEADS 6
#define ELEMS (HEADS * DIM)
#define ROW (ELEMS * 2) /* bytes, f16 */
#define BLOCK_ROWS (4096 / ROW)
#define MAX_TOKENS 700

struct rig {
	struct kvt_gpu *gpu;
	struct kvt_cache *cache;
	struct kvt_batch *batch;
	kvt_dptr src, q, out; /* MAX_TOKENS rows of each */
};

static uint64_t rng;

static uint32_t rnd(void)
{
	rng ^= rng << 13;
	rng ^= rng >> 7;
	rng ^= rng << 17;
	return (uint32_t)(rng >> 32);
}

/* Row @t of plane @plane of sequence @seq, as f32: the same whenever it is asked for. */
static void row_of(uint32_t seq, uint32_t plane, uint32_t t, float *row, uint32_t n)
{
	uint64_t z = seq * 1000003ull + plane * 7919ull + t * 104729ull + 1;

	for (uint32_t i = 0; i < n; i++) {
		z = z * 6364136223846793005ull + 1442695040888963407ull;
		row[i] = (float)(int32_t)(z >> 33) / 1073741824.0f - 1.0f;
	}
}

static int n_backends;

/* ---- calls that make the host wait, and calls that take memory, of any backend ---- */

static const struct kvt_gpu_ops *real;
static uint64_t waits, takes;

#define COUNTED(name, counter, declared, given) \
	static int counted_##name declared \
	{ \
		counter++; \
		return real->name given; \
	}

COUNTED(stream_sync, waits, (struct kvt_gpu *g, kvt_stream s), (g, s))
COUNTED(event_sync, waits, (struct kvt_gpu *g, kvt_event e), (g, e))
COUNTED(copy_h2d, waits, (struct kvt_gpu *g, kvt_dptr d, const void *s, uint64_t n), (g, d, s, n))
COUNTED(copy_d2h, waits, (struct kvt_gpu *g, void *d, kvt_dptr s, uint64_t n), (g, d, s, n))
COUNTED(copy_d2d, waits, (struct kvt_gpu *g, kvt_dptr d, kvt_dptr s, uint64_t n), (g, d, s, n))
COUNTED(alloc, takes, (struct kvt_gpu *g, uint64_t n, kvt_dptr *p), (g, n, p))
COUNTED(host_alloc, takes, (struct kvt_gpu *g, uint64_t n, void **p), (g, n, p))
COUNTED(host_register, takes, (struct kvt_gpu *g, void *p, uint64_t n), (g, p, n))
COUNTED(stream_create, takes, (struct kvt_gpu *g, kvt_stream *s), (g, s))
COUNTED(event_create, takes, (struct kvt_gpu *g, kvt_event *e), (g, e))

static void count_calls(struct kvt_gpu *gpu)
{
	static struct kvt_gpu_ops counting;

	if (gpu->ops != &counting)
		real = gpu->ops;
	counting = *real;
	counting.stream_sync = counted_stream_sync;
	counting.event_sync = counted_event_sync;
	counting.copy_h2d = counted_copy_h2d;
	counting.copy_d2h = counted_copy_d2h;
	counting.copy_d2d = counted_copy_d2d;
	counting.alloc = counted_alloc;
	counting.host_alloc = counted_host_alloc;
	counting.host_register = counted_host_register;
	counting.stream_create = counted_stream_create;
	counting.event_create = counted_event_create;
	gpu->ops = &counting;
	waits = takes = 0;
}

/* @gpu_frames, @pinned_frames, @ring_frames: blocks of 4 KiB. */
static int make_ring(struct rig *r, struct kvt_gpu *gpu, uint32_t gpu_frames, uint32_t pinned_frames, uint32_t max_seqs,
		     uint32_t ring_frames)
{
	struct kvt_plane_params planes[PLANES];
	struct kvt_cache_params p = KVT_INIT(p);
	struct kvt_batch_params b = KVT_INIT(b);
	int ret;

	for (uint32_t i = 0; i < PLANES; i++)
		planes[i] = (struct kvt_plane_params){ .size = sizeof(planes[i]), .codec = KVT_F16, .heads = HEADS,
						       .head_dim = DIM, .layer = i / 2 };
	p.planes = planes;
	p.n_planes = PLANES;
	p.block_bytes = 4096;
	p.gpu_scratch_bytes = (3 << 20) + (ring_frames ? (64 << 10) + ring_frames * 4096ull : 0);
	p.gpu_bytes = p.gpu_scratch_bytes + (280 << 10) + gpu_frames * 4096ull; /* between: the store's staging */
	p.pinned_bytes = pinned_frames * 4096ull;
	p.ram_bytes = 6 << 20;
	p.max_tokens = MAX_TOKENS;
	p.max_seqs = 5;
	p.threads = 1;
	p.max_query_heads = Q_HEADS;
	b.max_seqs = max_seqs;
	b.max_tokens = MAX_TOKENS;
	b.ring_bytes = ring_frames * 4096ull;
	r->gpu = gpu;
	r->batch = NULL;
	r->src = r->q = r->out = 0;
	ret = kvt_cache_create_on(&p, NULL, gpu, &r->cache);
	if (ret) {
		r->cache = NULL;
		return ret;
	}
	ret = kvt_batch_create(r->cache, &b, &r->batch);
	if (!ret)
		ret = gpu->ops->alloc(gpu, MAX_TOKENS * ELEMS * 4, &r->src);
	if (!ret)
		ret = gpu->ops->alloc(gpu, MAX_TOKENS * Q_HEADS * DIM * 4, &r->q);
	if (!ret)
		ret = gpu->ops->alloc(gpu, MAX_TOKENS * Q_HEADS * DIM * 4, &r->out);
	return ret;
}

static int make(struct rig *r, struct kvt_gpu *gpu, uint32_t gpu_frames, uint32_t pinned_frames, uint32_t max_seqs)
{
	return make_ring(r, gpu, gpu_frames, pinned_frames, max_seqs, 0);
}

static void unmake(struct rig *r)
{
	kvt_batch_destroy(r->batch);
	kvt_cache_destroy(r->cache);
	r->gpu->ops->free(r->gpu, r->src);
	r->gpu->ops->free(r->gpu, r->q);
	r->gpu->ops->free(r->gpu, r->out);
}

/* A step of sequences that had lens[] tokens, of which the first @planes planes are written. */
static int step_planes(struct rig *r, const uint32_t *names, uint32_t *lens, const uint32_t *counts, uint32_t n,
		       uint32_t planes)
{
	static float rows[MAX_TOKENS * ELEMS];
	struct kvt_rows src = { .data = (void *)(uintptr_t)r->src, .type = KVT_F32 };
	int ret = kvt_batch_step(r->batch, counts, NULL);

	if (ret)
		return ret;
	for (uint32_t plane = 0; plane < planes; plane++) {
		uint32_t at = 0;

		for (uint32_t i = 0; i < n; i++)
			for (uint32_t t = 0; t < counts[i]; t++)
				row_of(names[i], plane, lens[i] + t, rows + at++ * ELEMS, ELEMS);
		ret = kvt_batch_wait(r->batch); /* the one buffer is used again */
		if (!ret && at)
			ret = r->gpu->ops->copy_h2d(r->gpu, r->src, rows, at * ELEMS * 4ull);
		if (!ret && at)
			ret = kvt_batch_write(r->batch, plane, &src);
		if (ret)
			return ret;
	}
	for (uint32_t i = 0; i < n; i++)
		lens[i] += counts[i];
	return 0;
}

static int step(struct rig *r, const uint32_t *names, uint32_t *lens, const uint32_t *counts, uint32_t n)
{
	return step_planes(r, names, lens, counts, n, PLANES);
}

/* Row @t of a plane is what row_of() says, or zeros. */
static int verify_row(struct kvt_seq *seq, uint32_t name, uint32_t plane, uint32_t t, bool written)
{
	float row[ELEMS] = { 0 };
	uint8_t want[ROW], got[ROW];
	struct kvt_rows dst = { .data = got, .type = KVT_ENCODED };
	int ret = kvt_seq_read(seq, plane, t, 1, &dst);

	if (ret)
		return ret;
	if (written)
		row_of(name, plane, t, row, ELEMS);
	kvt_codec_convert(want, KVT_F16, row, KVT_F32, ELEMS);
	ck_assert_msg(!memcmp(want, got, ROW), "sequence %u, plane %u, row %u", name, plane, t);
	return 0;
}

/* Rows [0, len) of all planes are what row_of() says. */
static int verify(struct kvt_seq *seq, uint32_t name, uint32_t len)
{
	int ret = 0;

	ck_assert_uint_eq(kvt_seq_len(seq), len);
	for (uint32_t plane = 0; !ret && plane < PLANES; plane++)
		for (uint32_t t = 0; !ret && t < len; t++)
			ret = verify_row(seq, name, plane, t, true);
	return ret;
}

/* Rows [first, first + n) through the CPU. */
static void write_on_cpu(struct kvt_seq *seq, uint32_t name, uint32_t first, uint32_t n)
{
	static float rows[MAX_TOKENS * ELEMS];
	struct kvt_rows src = { .data = rows, .type = KVT_F32 };

	OK(kvt_seq_append(seq, NULL, n));
	for (uint32_t plane = 0; plane < PLANES; plane++) {
		for (uint32_t t = 0; t < n; t++)
			row_of(name, plane, first + t, rows + t * ELEMS, ELEMS);
		OK(kvt_seq_write(seq, plane, first, n, &src));
	}
}

/* Sequences that the CPU began, the GPU goes on with, forks of them, and the CPU again; in gpu and pinned frames. */
START_TEST(rows_are_what_was_written)
{
	struct kvt_stats st = KVT_INIT(st);
	struct kvt_seq *seq[3], *fork;
	uint32_t names[3] = { 1, 2, 3 }, lens[3] = { 0, 45, 33 }, counts[3];
	struct kvt_gpu *gpu;
	struct rig r;

	rng = 0x9E3779B97F4A7C15ull + (uint64_t)_i;
	OK(gpu_backend_open(_i, &gpu));
	OK(make(&r, gpu, 60, 400, 3));
	for (int i = 0; i < 3; i++) {
		OK(kvt_seq_create(r.cache, &seq[i]));
		if (lens[i])
			write_on_cpu(seq[i], names[i], 0, lens[i]);
	}
	OK(kvt_seq_fork(seq[1], 40, &fork)); /* its last block is shared: attaching copies it */
	for (int round = 0; round < 3; round++) {
		OK(kvt_batch_attach(r.batch, seq, 3));
		IS(-EBUSY, kvt_seq_append(seq[0], NULL, 1));
		IS(-EBUSY, kvt_seq_truncate(seq[0], 0));
		IS(-EBUSY, (int)kvt_seq_move(seq[1], KVT_TIER_RAM));
		for (int k = 0; k < 4; k++) {
			for (int i = 0; i < 3; i++)
				counts[i] = rnd() % (k == 1 ? 40 : 3);
			counts[0] += k == 0;
			OK(step(&r, names, lens, counts, 3));
		}
		kvt_batch_detach(r.batch);
		for (int i = 0; i < 3; i++)
			OK(verify(seq[i], names[i], lens[i]));
		write_on_cpu(seq[2], names[2], lens[2], 5);
		lens[2] += 5;
	}
	OK(verify(fork, names[1], 40));
	OK(kvt_cache_stats(r.cache, &st));
	ck_assert_uint_eq(st.digest_errors, 0);
	ck_assert_uint_eq(st.blocks_lost, 0);
	/* every digest is right: else the move would say so */
	for (int i = 0; i < 3; i++)
		ck_assert_msg(kvt_seq_move(seq[i], KVT_TIER_RAM) >= 0, "%s", kvt_last_error());
	OK(kvt_cache_stats(r.cache, &st));
	ck_assert_uint_eq(st.digest_errors, 0);
	OK(kvt_batch_attach(r.batch, seq, 3));
	kvt_seq_free(seq[0]); /* detaches */
	OK(verify(seq[1], names[1], lens[1]));
	unmake(&r);
	gpu_backend_close(_i, gpu);
}
END_TEST

/* A sequence whose last block has rows that nobody wrote: they are zeros, to readers and to the digest. */
START_TEST(rows_never_written_are_zeros)
{
	static const uint8_t zeros[ROW];
	uint32_t names[1] = { 7 }, lens[1] = { BLOCK_ROWS + 5 };
	struct kvt_stats st = KVT_INIT(st);
	uint8_t got[ROW], want[ROW];
	struct kvt_rows dst = { .data = got, .type = KVT_ENCODED };
	struct kvt_gpu *gpu;
	struct kvt_seq *seq;
	float row[ELEMS];
	struct rig r;

	OK(gpu_backend_open(_i, &gpu));
	OK(make(&r, gpu, 60, 60, 1));
	OK(kvt_seq_create(r.cache, &seq));
	OK(kvt_seq_append(seq, NULL, lens[0]));
	OK(kvt_batch_attach(r.batch, &seq, 1));
	OK(step(&r, names, lens, (uint32_t[]){ 3 }, 1));
	kvt_batch_detach(r.batch);
	ck_assert_msg(kvt_seq_move(seq, KVT_TIER_RAM) > 0, "%s", kvt_last_error());
	OK(kvt_cache_stats(r.cache, &st));
	ck_assert_uint_eq(st.digest_errors, 0);
	for (uint32_t t = 0; t < lens[0]; t++) {
		row_of(names[0], 1, t, row, ELEMS);
		kvt_codec_convert(want, KVT_F16, row, KVT_F32, ELEMS);
		OK(kvt_seq_read(seq, 1, t, 1, &dst));
		ck_assert(!memcmp(got, t < BLOCK_ROWS + 5 ? zeros : want, ROW));
	}
	unmake(&r);
	gpu_backend_close(_i, gpu);
}
END_TEST

/* Sequences that begin alike, to the middle of a block, and go on side by side: each in its own copy of the block. */
START_TEST(forks_go_on_side_by_side)
{
	const uint32_t names[2] = { 11, 12 }, counts[2] = { 3, 2 };
	uint32_t lens[2] = { BLOCK_ROWS / 2, BLOCK_ROWS / 2 };
	struct kvt_stats st = KVT_INIT(st);
	struct kvt_seq *seq[2];
	struct kvt_gpu *gpu;
	struct rig r;

	OK(gpu_backend_open(_i, &gpu));
	OK(make(&r, gpu, 60, 60, 2));
	OK(kvt_seq_create(r.cache, &seq[0]));
	write_on_cpu(seq[0], names[0], 0, lens[0]);
	OK(kvt_seq_fork(seq[0], lens[0], &seq[1]));
	OK(kvt_batch_attach(r.batch, seq, 2));
	OK(step(&r, names, lens, counts, 2));
	kvt_batch_detach(r.batch);
	for (uint32_t i = 0; i < 2; i++) {
		ck_assert_msg(kvt_seq_move(seq[i], KVT_TIER_RAM) > 0, "%s", kvt_last_error());
		for (uint32_t plane = 0; plane < PLANES; plane++)
			for (uint32_t t = 0; t < lens[i]; t++)
				OK(verify_row(seq[i], names[t < BLOCK_ROWS / 2 ? 0 : i], plane, t, true));
	}
	OK(kvt_cache_stats(r.cache, &st));
	ck_assert_uint_eq(st.digest_errors, 0);
	ck_assert_uint_eq(st.blocks_lost, 0);
	unmake(&r);
	gpu_backend_close(_i, gpu);
}
END_TEST

/* A step whose planes are not, or not all, written costs no row of another step, whose blocks it shares; its own are zeros. */
START_TEST(an_aborted_step_loses_nothing)
{
	const uint32_t names[1] = { 8 }, counts[1] = { BLOCK_ROWS / 2 - 1 }, first = 2 * counts[0];
	struct kvt_stats st = KVT_INIT(st);
	struct kvt_gpu *gpu;
	struct kvt_seq *seq;
	struct rig r;

	for (uint32_t planes = 0; planes < 2; planes++) {
		uint32_t lens[1] = { 0 };

		OK(gpu_backend_open(_i, &gpu));
		OK(make(&r, gpu, 60, 60, 1));
		OK(kvt_seq_create(r.cache, &seq));
		OK(kvt_batch_attach(r.batch, &seq, 1));
		for (int k = 0; k < 4; k++)
			OK(step_planes(&r, names, lens, counts, 1, k == 2 ? planes : PLANES));
		kvt_batch_detach(r.batch);
		ck_assert_msg(kvt_seq_move(seq, KVT_TIER_RAM) > 0, "%s", kvt_last_error());
		for (uint32_t plane = 0; plane < PLANES; plane++)
			for (uint32_t t = 0; t < lens[0]; t++)
				OK(verify_row(seq, names[0], plane, t,
					      plane < planes || t < first || t >= first + counts[0]));
		OK(kvt_seq_truncate(seq, first));
		lens[0] = first;
		OK(kvt_batch_attach(r.batch, &seq, 1));
		OK(step(&r, names, lens, counts, 1));
		kvt_batch_detach(r.batch);
		ck_assert_msg(kvt_seq_move(seq, KVT_TIER_RAM) > 0, "%s", kvt_last_error());
		OK(verify(seq, names[0], lens[0]));
		OK(kvt_cache_stats(r.cache, &st));
		ck_assert_uint_eq(st.digest_errors, 0);
		ck_assert_uint_eq(st.blocks_lost, 0);
		unmake(&r);
		gpu_backend_close(_i, gpu);
	}
}
END_TEST

/* Attention of all query rows of a sequence of @len tokens, in steps of @chunk, beside a stranger or alone. */
static void attend_all(struct rig *r, uint32_t family, uint32_t len, uint32_t chunk, bool stranger, float *out)
{
	static float q[MAX_TOKENS * Q_HEADS * DIM];
	struct kvt_batch_attn io = KVT_INIT(io);
	struct kvt_attn attn = KVT_INIT(attn);
	struct kvt_seq *seq[2];
	uint32_t names[2] = { 9, 8 }, lens[2] = { 0, 0 }, counts[2], n = stranger ? 2 : 1;

	for (uint32_t i = 0; i < n; i++)
		OK(kvt_seq_create(r->cache, &seq[i]));
	OK(kvt_batch_attach(r->batch, seq, n));
	attn.flags = KVT_ATTN_CAUSAL;
	attn.n_heads = Q_HEADS;
	attn.family = family;
	io.q = r->q;
	io.out = r->out;
	while (lens[0] < len) {
		uint32_t first = lens[0], total;

		counts[0] = len - first < chunk ? len - first : chunk;
		counts[1] = first % 3;
		total = counts[0] + (stranger ? counts[1] : 0);
		OK(step(r, names, lens, counts, n));
		for (uint32_t t = 0; t < total; t++)
			row_of(50, 0, t < counts[0] ? first + t : 1000 + t, q + t * Q_HEADS * DIM, Q_HEADS * DIM);
		OK(r->gpu->ops->copy_h2d(r->gpu, r->q, q, total * Q_HEADS * DIM * 4ull));
		for (uint32_t layer = 0; layer < 2; layer++) {
			attn.k_plane = 2 * layer;
			attn.v_plane = 2 * layer + 1;
			OK(kvt_batch_attend(r->batch, &attn, &io));
			OK(kvt_batch_wait(r->batch));
			OK(r->gpu->ops->copy_d2h(r->gpu, out + (layer * len + first) * Q_HEADS * DIM, r->out,
						 counts[0] * Q_HEADS * DIM * 4ull));
		}
	}
	kvt_batch_detach(r->batch);
	for (uint32_t i = 0; i < n; i++)
		kvt_seq_free(seq[i]);
}

/* The bits of a prompt's attention, however it was cut, wherever its blocks are, and whoever else is in the batch. */
START_TEST(attention_depends_on_the_rows_alone)
{
	enum { LEN = 90, FLOATS = 2 * LEN * Q_HEADS * DIM };
	static const struct {
		uint32_t gpu, pinned, chunk;
		bool stranger;
	} ways[] = { { 200, 0, 1, false }, { 200, 0, 16, true }, { 10, 200, 33, false }, { 0x1, 200, LEN, true } };
	static float wants[2][FLOATS], got[FLOATS];
	struct kvt_gpu *gpu;
	uint32_t families;
	struct rig r;

	OK(gpu_backend_open(_i, &gpu));
	families = gpu->sm && gpu->sm != 90 ? 1 : 2;
	for (uint32_t family = 0; family < families; family++) {
		float *want = wants[family];
		bool some = false;

		OK(make(&r, gpu, 200, 0, 1));
		attend_all(&r, family, LEN, LEN, false, want);
		unmake(&r);
		for (int i = 0; i < FLOATS; i++) {
			ck_assert(want[i] > -2 && want[i] < 2);
			some |= want[i] != 0;
		}
		ck_assert(some);
		for (size_t w = 0; w < sizeof(ways) / sizeof(ways[0]); w += test_rounds(1, 1, 3)) {
			OK(make(&r, gpu, ways[w].gpu, ways[w].pinned, 2));
			attend_all(&r, family, LEN, ways[w].chunk, ways[w].stranger, got);
			ck_assert_msg(!memcmp(want, got, sizeof(got)), "way %zu gives other bits, family %u", w, family);
			unmake(&r);
		}
	}
	if (families == 2)
		ck_assert_msg(memcmp(wants[0], wants[1], sizeof(got)), "both families are one");
	gpu_backend_close(_i, gpu);
}
END_TEST

/* Decoding by a graph that was captured once: the host waits for nothing, and nothing is allocated. */
START_TEST(a_captured_step_serves_later_ones)
{
	enum { STEPS = 3 * BLOCK_ROWS };
	struct kvt_rows src = { .type = KVT_F32 };
	struct kvt_batch_attn io = KVT_INIT(io);
	struct kvt_attn attn = KVT_INIT(attn);
	uint32_t names[1] = { 4 }, lens[1] = { 0 }, one[1] = { 1 }, epoch;
	static float rows[PLANES][ELEMS], eager[Q_HEADS * DIM], captured[Q_HEADS * DIM];
	uint64_t step_waits = 0, step_takes = 0;
	struct kvt_seq *seq;
	struct kvt_gpu *gpu;
	kvt_graph graph;
	struct rig r;

	OK(gpu_backend_open(_i, &gpu));
	count_calls(gpu);
	OK(make(&r, gpu, 100, 0, 1));
	OK(kvt_seq_create(r.cache, &seq));
	OK(kvt_batch_attach(r.batch, &seq, 1));
	OK(step(&r, names, lens, (uint32_t[]){ 20 }, 1));
	OK(step(&r, names, lens, one, 1));
	attn.flags = KVT_ATTN_CAUSAL;
	attn.n_heads = Q_HEADS;
	attn.k_plane = 2;
	attn.v_plane = 3;
	io.q = r.q;
	io.out = r.out;
	row_of(60, 0, 0, captured, Q_HEADS * DIM);
	OK(gpu->ops->copy_h2d(gpu, r.q, captured, sizeof(captured)));
	epoch = kvt_batch_epoch(r.batch);
	OK(gpu->ops->capture_begin(gpu, kvt_batch_stream(r.batch)));
	for (uint32_t plane = 0; plane < PLANES; plane++) {
		src.data = (void *)(uintptr_t)(r.src + plane * sizeof(rows[0]));
		OK(kvt_batch_write(r.batch, plane, &src));
	}
	OK(kvt_batch_attend(r.batch, &attn, &io));
	OK(gpu->ops->capture_end(gpu, kvt_batch_stream(r.batch), &graph));
	for (int k = 0; k < STEPS; k++) {
		for (uint32_t plane = 0; plane < PLANES; plane++)
			row_of(names[0], plane, lens[0], rows[plane], ELEMS);
		OK(kvt_batch_wait(r.batch));
		OK(gpu->ops->copy_h2d(gpu, r.src, rows, sizeof(rows)));
		if (gpu_backend_is_mock(_i))
			kvt_mock_reset(gpu);
		count_calls(gpu);
		OK(kvt_batch_step(r.batch, one, NULL));
		OK(gpu->ops->graph_launch(gpu, graph, kvt_batch_stream(r.batch)));
		step_waits += waits;
		step_takes += takes;
		if (gpu_backend_is_mock(_i))
			ck_assert_uint_le(kvt_mock_count(gpu, KVT_MOCK_launch), 2); /* advance, and a table's new block */
		lens[0]++;
		ck_assert_uint_eq(kvt_batch_epoch(r.batch), epoch);
	}
	ck_assert_uint_eq(step_waits, 0);
	ck_assert_uint_eq(step_takes, 0);
	OK(kvt_batch_wait(r.batch));
	OK(gpu->ops->copy_d2h(gpu, captured, r.out, sizeof(captured)));
	OK(kvt_batch_attend(r.batch, &attn, &io));
	OK(kvt_batch_wait(r.batch));
	OK(gpu->ops->copy_d2h(gpu, eager, r.out, sizeof(eager)));
	ck_assert(!memcmp(eager, captured, sizeof(eager)));
	gpu->ops->graph_destroy(gpu, graph);
	kvt_batch_detach(r.batch);
	OK(verify(seq, names[0], lens[0]));
	unmake(&r);
	gpu_backend_close(_i, gpu);
}
END_TEST

/*
 * Kernels read tables before they wait for what is before them. So the first behind a change of the tables is launched in
 * order, and with a ring, which changes what is where they say, all are.
 */
START_TEST(all_but_a_steps_first_launch_may_begin_early)
{
	const uint32_t one[1] = { 1 };
	uint32_t names[1] = { 4 }, lens[1] = { 0 };

	for (uint32_t ring = 0; ring <= 8; ring += 8) {
		struct kvt_rows src = { .type = KVT_F32 };
		struct kvt_batch_attn io = KVT_INIT(io);
		struct kvt_attn attn = KVT_INIT(attn);
		struct kvt_seq *seq;
		struct rig r;

		OK(gpu_backend_open(GPU_MOCK, &r.gpu));
		lens[0] = 0;
		OK(make_ring(&r, r.gpu, 100, 100, 1, ring));
		OK(kvt_seq_create(r.cache, &seq));
		OK(kvt_batch_attach(r.batch, &seq, 1));
		OK(step(&r, names, lens, (uint32_t[]){ 20 }, 1));
		src.data = (void *)(uintptr_t)r.src;
		attn.n_heads = Q_HEADS;
		io.q = r.q;
		io.out = r.out;
		for (int k = 0; k < 3; k++) {
			OK(kvt_batch_step(r.batch, one, NULL));
			kvt_mock_reset(r.gpu);
			for (uint32_t layer = 0; layer < PLANES / 2; layer++) {
				attn.k_plane = 2 * layer;
				attn.v_plane = 2 * layer + 1;
				OK(kvt_batch_write_kv(r.batch, attn.k_plane, &src, attn.v_plane, &src));
				OK(kvt_batch_attend(r.batch, &attn, &io));
			}
			if (ring)
				ck_assert_uint_eq(kvt_mock_count(r.gpu, KVT_MOCK_launch_early), 0);
			else
				ck_assert_uint_eq(kvt_mock_count(r.gpu, KVT_MOCK_launch), 1);
			ck_assert_uint_ge(kvt_mock_count(r.gpu, KVT_MOCK_launch) + kvt_mock_count(r.gpu, KVT_MOCK_launch_early),
					  PLANES);
		}
		kvt_batch_detach(r.batch);
		unmake(&r);
		gpu_backend_close(GPU_MOCK, r.gpu);
	}
}
END_TEST

/*
 * @steps tokens of each sequence, of which nobody waits for any: rows, queries and results have memory of their own.
 * @out: [steps][layer][sequence] query heads.
 */
static int decode(struct rig *r, const uint32_t *names, uint32_t *lens, uint32_t n, uint32_t steps, float *out)
{
	const uint32_t q_row = Q_HEADS * DIM;
	static float rows[MAX_TOKENS * ELEMS], q[MAX_TOKENS * Q_HEADS * DIM];
	struct kvt_rows src[2] = { { .type = KVT_F32 }, { .type = KVT_F32 } };
	struct kvt_batch_attn io = KVT_INIT(io);
	struct kvt_attn attn = KVT_INIT(attn);
	uint32_t ones[4] = { 1, 1, 1, 1 };
	int ret;

	ck_assert_uint_le(steps * PLANES * n, MAX_TOKENS);
	for (uint32_t s = 0; s < steps; s++)
		for (uint32_t plane = 0; plane < PLANES; plane++)
			for (uint32_t i = 0; i < n; i++) {
				row_of(names[i], plane, lens[i] + s, rows + ((s * PLANES + plane) * n + i) * ELEMS, ELEMS);
				row_of(70 + i, plane, lens[i] + s, q + ((s * PLANES + plane) / 2 * n + i) * q_row, q_row);
			}
	ret = r->gpu->ops->copy_h2d(r->gpu, r->src, rows, steps * PLANES * n * ELEMS * 4ull);
	if (!ret)
		ret = r->gpu->ops->copy_h2d(r->gpu, r->q, q, steps * PLANES / 2 * n * q_row * 4ull);
	attn.flags = KVT_ATTN_CAUSAL;
	attn.n_heads = Q_HEADS;
	for (uint32_t s = 0; s < steps && !ret; s++) {
		ret = kvt_batch_step(r->batch, ones, NULL);
		for (uint32_t plane = 0; plane < PLANES && !ret; plane += 2) {
			src[0].data = (void *)(uintptr_t)(r->src + (s * PLANES + plane) * n * ELEMS * 4ull);
			src[1].data = (void *)(uintptr_t)(r->src + (s * PLANES + plane + 1) * n * ELEMS * 4ull);
			attn.k_plane = plane;
			attn.v_plane = plane + 1;
			io.q = r->q + (s * PLANES + plane) / 2 * n * q_row * 4ull;
			io.out = r->out + (s * PLANES + plane) / 2 * n * q_row * 4ull;
			ret = kvt_batch_write_kv(r->batch, plane, &src[0], plane + 1, &src[1]);
			if (!ret)
				ret = kvt_batch_attend(r->batch, &attn, &io);
		}
	}
	if (!ret)
		ret = kvt_batch_wait(r->batch);
	if (!ret)
		ret = r->gpu->ops->copy_d2h(r->gpu, out, r->out, steps * PLANES / 2 * n * q_row * 4ull);
	for (uint32_t i = 0; i < n; i++)
		lens[i] += steps;
	return ret;
}

enum { RING_LEN = 290, RING_FORK = 160, RING_STEPS = 6, RING_FLOATS = RING_STEPS * 2 * 2 * Q_HEADS * DIM };

/* Two sequences, the second a fork of the first, each with something of its own. */
static void make_forks(struct rig *r, struct kvt_seq **seq, uint32_t *lens)
{
	OK(kvt_seq_create(r->cache, &seq[0]));
	for (uint32_t at = 0; at < RING_FORK; at += BLOCK_ROWS) /* planes take frames by turns, */
		write_on_cpu(seq[0], 21, at, BLOCK_ROWS);
	write_on_cpu(seq[0], 21, RING_FORK, RING_LEN - RING_FORK); /* or one after the other */
	OK(kvt_seq_fork(seq[0], RING_FORK, &seq[1]));
	write_on_cpu(seq[1], 22, RING_FORK, 50);
	lens[0] = RING_LEN;
	lens[1] = RING_FORK + 50;
}

static const uint32_t ring_names[2] = { 21, 22 };

/* Blocks that pass through a ring of any size, or are read in place, or are resident: the bits are the same. */
START_TEST(a_ring_changes_no_bit)
{
	static const struct {
		uint32_t gpu, pinned, ring;
	} ways[] = { { 250, 0, 0 }, { 12, 250, 0 }, { 12, 250, 2 }, { 12, 250, 7 }, { 40, 250, 21 }, { 12, 250, 37 },
		     { 12, 250, 64 }, { 12, 250, 200 } };
	static const enum kvt_mock_call ring_copies[] = { KVT_MOCK_copy_2d_async, KVT_MOCK_copy_batch_async };
	static float want[RING_FLOATS], got[RING_FLOATS];
	struct kvt_stats st = KVT_INIT(st);
	struct kvt_seq *seq[2];
	struct kvt_gpu *gpu;
	uint32_t lens[2];
	struct rig r;

	OK(gpu_backend_open(_i, &gpu));
	for (size_t w = 0; w < sizeof(ways) / sizeof(ways[0]); w += test_rounds(1, 1, 3)) {
		if (gpu_backend_is_mock(_i)) /* every other time as an older driver */
			kvt_mock_refuse(gpu, KVT_MOCK_copy_batch_async, w % 2 ? -ENOSYS : 0);
		OK(make_ring(&r, gpu, ways[w].gpu, ways[w].pinned, 2, ways[w].ring));
		make_forks(&r, seq, lens);
		for (int round = 0; round < 2; round++) { /* the second finds other blocks full */
			OK(kvt_batch_attach(r.batch, seq, 2));
			OK(decode(&r, ring_names, lens, 2, RING_STEPS, got));
			kvt_batch_detach(r.batch);
		}
		if (!w)
			memcpy(want, got, sizeof(want));
		ck_assert_msg(!memcmp(want, got, sizeof(want)), "way %zu gives other bits", w);
		OK(kvt_cache_stats(r.cache, &st));
		ck_assert_uint_eq(st.digest_errors, 0);
		if (w < 2)
			ck_assert_int_eq(st.in_place_bytes > 0, w);
		if (!_i || gpu_backend_is_mock(_i))
			ck_assert_int_eq(st.streamed_bytes > 0, ways[w].ring > 0);
		OK(verify(seq[0], 21, lens[0]));
		unmake(&r);
	}
	if (gpu_backend_is_mock(_i))
		for (size_t i = 0; i < sizeof(ring_copies) / sizeof(ring_copies[0]); i++)
			ck_assert_msg(kvt_mock_count(gpu, ring_copies[i]), "no %s", kvt_mock_call_name(ring_copies[i]));
	gpu_backend_close(_i, gpu);
}
END_TEST

/* Each step moves what is not resident, once, and nothing more; it waits for nothing and allocates nothing. */
START_TEST(a_step_moves_what_is_not_resident)
{
	enum { STEPS = 5, WARM = 3 }; /* which open no block */
	static float out[STEPS * 2 * 2 * Q_HEADS * DIM];
	struct kvt_stats st = KVT_INIT(st);
	uint64_t streamed, in_place, pinned;
	struct kvt_seq *seq[2];
	struct kvt_gpu *gpu;
	uint32_t lens[2];
	struct rig r;

	OK(gpu_backend_open(_i, &gpu));
	OK(make_ring(&r, gpu, 12, 250, 2, 46)); /* two planes, and a little more */
	make_forks(&r, seq, lens);
	OK(kvt_batch_attach(r.batch, seq, 2));
	OK(decode(&r, ring_names, lens, 2, WARM, out));
	OK(kvt_cache_stats(r.cache, &st));
	pinned = st.tier[KVT_TIER_PINNED].blocks;
	streamed = st.streamed_bytes;
	in_place = st.in_place_bytes;
	ck_assert_uint_eq(st.tier[KVT_TIER_GPU].frames_free, 0);
	ck_assert_uint_gt(pinned, 60);
	count_calls(gpu);
	OK(decode(&r, ring_names, lens, 2, STEPS, out));
	ck_assert_uint_le(waits, 5); /* rows, queries, the wait, its verdict, results: none of a step */
	ck_assert_uint_eq(takes, 0);
	OK(kvt_cache_stats(r.cache, &st));
	ck_assert_uint_eq(st.tier[KVT_TIER_PINNED].blocks, pinned);
	/* a device may find in place faster: then each fork reads what they share */
	if (!_i || gpu_backend_is_mock(_i) || st.streamed_bytes > streamed) {
		ck_assert_uint_eq(st.streamed_bytes - streamed + st.in_place_bytes - in_place, STEPS * pinned * 4096);
		ck_assert_uint_ge(st.streamed_bytes - streamed, STEPS * (pinned - 8) * 4096); /* but for the open ones */
	} else {
		ck_assert_uint_ge(st.in_place_bytes - in_place, STEPS * pinned * 4096);
		ck_assert_uint_le(st.in_place_bytes - in_place, 2 * STEPS * pinned * 4096);
	}
	unmake(&r);
	gpu_backend_close(_i, gpu);
}
END_TEST

struct mover {
	struct kvt_seq *seq;
	atomic_bool stop;
	int64_t failed;
	uint64_t rounds;
};

static void *move_about(void *arg)
{
	struct mover *m = arg;
	int64_t moved = 0;

	do {
		moved = kvt_seq_move(m->seq, m->rounds % 2 ? KVT_TIER_RAM : KVT_TIER_GPU);
		if (moved < 0)
			m->failed = moved;
		m->rounds++;
	} while (!atomic_load(&m->stop));
	return NULL;
}

/* Another sequence's blocks come to and leave GPU memory meanwhile: the bits stay, and its rows do. */
START_TEST(moves_beside_decoding_change_no_bit)
{
	static float want[RING_FLOATS], got[RING_FLOATS];
	struct kvt_stats st = KVT_INIT(st);
	struct mover m = { 0 };
	struct kvt_seq *seq[2];
	struct kvt_gpu *gpu;
	pthread_t thread;
	uint32_t lens[2];
	struct rig r;

	OK(gpu_backend_open(_i, &gpu));
	for (int beside = 0; beside < 2; beside++) {
		OK(make_ring(&r, gpu, 110, 250, 2, 46));
		make_forks(&r, seq, lens);
		OK(kvt_seq_create(r.cache, &m.seq));
		write_on_cpu(m.seq, 33, 0, 120);
		OK(kvt_batch_attach(r.batch, seq, 2));
		if (beside)
			ck_assert_int_eq(pthread_create(&thread, NULL, move_about, &m), 0);
		OK(decode(&r, ring_names, lens, 2, RING_STEPS, beside ? got : want));
		atomic_store(&m.stop, true);
		if (beside)
			ck_assert_int_eq(pthread_join(thread, NULL), 0);
		kvt_batch_detach(r.batch);
		ck_assert_int_eq(m.failed, 0);
		OK(verify(m.seq, 33, 120));
		OK(kvt_cache_stats(r.cache, &st));
		ck_assert_uint_eq(st.digest_errors, 0);
		unmake(&r);
		atomic_store(&m.stop, false);
	}
	ck_assert_uint_gt(m.rounds, 0);
	ck_assert(!memcmp(want, got, sizeof(want)));
	gpu_backend_close(_i, gpu);
}
END_TEST

/* A bit that flips on the way to the ring: the results are refused, once, and what is not refused is right. */
START_TEST(what_arrives_damaged_is_refused)
{
	enum { ROUNDS = 4, STEPS = 2, FLOATS = STEPS * 2 * 2 * Q_HEADS * DIM };
	static float want[ROUNDS][FLOATS], got[FLOATS];
	struct kvt_stats st = KVT_INIT(st);
	uint32_t lens[2], refused, total = 0;
	struct kvt_seq *seq[2];
	struct kvt_gpu *gpu;
	struct rig r;
	int ret;

	for (uint64_t nth = 0; nth < 5; nth++) { /* a round has more copies before its results */
		OK(gpu_backend_open(GPU_MOCK, &gpu));
		OK(make_ring(&r, gpu, 12, 250, 2, 46));
		make_forks(&r, seq, lens);
		OK(kvt_batch_attach(r.batch, seq, 2));
		refused = 0;
		for (int round = 0; round < ROUNDS; round++) {
			if (round == 1 && nth) /* behind rows and queries */
				kvt_mock_flip(gpu, 2 + nth, 12345 * nth);
			ret = decode(&r, ring_names, lens, 2, STEPS, nth ? got : want[round]);
			kvt_mock_flip(gpu, 0, 0);
			if (ret) {
				ck_assert_int_eq(ret, -EBADMSG);
				refused++;
			} else if (nth) {
				ck_assert(!memcmp(want[round], got, sizeof(got)));
			}
		}
		OK(kvt_cache_stats(r.cache, &st));
		ck_assert_uint_eq(st.digest_errors, refused);
		ck_assert_uint_le(refused, nth > 0);
		total += refused;
		unmake(&r);
		gpu_backend_close(GPU_MOCK, gpu);
	}
	ck_assert_uint_ge(total, 3);
}
END_TEST

/* What a ring holds for good is copied again once it was found damaged. */
START_TEST(damage_does_not_stay)
{
	enum { FLOATS = 2 * 2 * Q_HEADS * DIM };
	static float want[2][FLOATS], got[2][FLOATS];
	struct kvt_mock_record copy;
	struct kvt_seq *seq[2];
	uint32_t lens[2];
	struct kvt_gpu *gpu;
	struct rig r;
	kvt_dptr at;

	for (int damaged = 0; damaged < 2; damaged++) {
		OK(gpu_backend_open(GPU_MOCK, &gpu));
		OK(make_ring(&r, gpu, 12, 250, 2, 200));
		make_forks(&r, seq, lens);
		kvt_mock_reset(gpu);
		OK(kvt_batch_attach(r.batch, seq, 2));
		at = 0; /* where the last copy to the ring went */
		for (uint64_t i = 0; kvt_mock_log(gpu, i, &copy); i++)
			at = copy.call == KVT_MOCK_copy_2d_async || copy.call == KVT_MOCK_copy_h2d_async ||
					     copy.call == KVT_MOCK_copy_batch_async ?
				     copy.dst :
				     at;
		ck_assert_uint_ne(at, 0);
		if (damaged)
			kvt_mock_corrupt(gpu, at, 777);
		IS(damaged ? -EBADMSG : 0, decode(&r, ring_names, lens, 2, 1, damaged ? got[0] : want[0]));
		OK(decode(&r, ring_names, lens, 2, 1, damaged ? got[1] : want[1]));
		unmake(&r);
		gpu_backend_close(GPU_MOCK, gpu);
	}
	ck_assert(!memcmp(want[1], got[1], sizeof(want[1])));
}
END_TEST

/* Each call of the device fails once while blocks pass through a ring: what is given out is right. */
START_TEST(each_call_fails_once_with_a_ring)
{
	enum { STEPS = 3 };
	uint64_t step_by = test_rounds(37, 151, 151), at, runs = 0;
	static float want[STEPS * 2 * 2 * Q_HEADS * DIM], got[STEPS * 2 * 2 * Q_HEADS * DIM];
	bool failed = true;

	for (at = 0; failed; at += at ? step_by : 1) {
		struct kvt_seq *seq[2];
		struct kvt_gpu *gpu;
		uint32_t lens[2];
		struct rig r;
		int ret;

		OK(gpu_backend_open(GPU_LATE_MOCK, &gpu));
		OK(make_ring(&r, gpu, 12, 250, 2, 46));
		make_forks(&r, seq, lens);
		kvt_mock_fail_at(gpu, at, _i ? -ENODEV : -EIO);
		ret = kvt_batch_attach(r.batch, seq, 2);
		if (!ret)
			ret = decode(&r, ring_names, lens, 2, STEPS, at ? got : want);
		failed = !at || kvt_mock_failed(gpu);
		runs += failed;
		if (!failed)
			OK(ret);
		if (at && !ret)
			ck_assert(!memcmp(want, got, sizeof(want)));
		kvt_batch_detach(r.batch);
		unmake(&r);
		gpu_backend_close(GPU_MOCK, gpu);
	}
	ck_assert_uint_gt(runs * step_by, 100);
}
END_TEST

/* What a ring cannot do is said. */
START_TEST(limits_of_a_ring)
{
	struct kvt_batch_params p = KVT_INIT(p);
	struct kvt_batch_attn io = KVT_INIT(io);
	struct kvt_attn a = KVT_INIT(a);
	static float out[2 * 2 * Q_HEADS * DIM];
	struct kvt_seq *seq[2];
	struct kvt_gpu *gpu;
	kvt_graph graph;
	uint32_t lens[2];
	struct rig r;

	OK(gpu_backend_open(GPU_MOCK, &gpu));
	OK(make_ring(&r, gpu, 12, 250, 2, 46));
	make_forks(&r, seq, lens);
	OK(kvt_batch_attach(r.batch, seq, 2));
	OK(decode(&r, ring_names, lens, 2, 1, out));
	a.n_heads = Q_HEADS;
	io.q = r.q;
	io.out = r.out;
	a.v_plane = 2;
	IS(-EOPNOTSUPP, kvt_batch_attend(r.batch, &a, &io));
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "neighbours"));
	a.v_plane = 1;
	OK(gpu->ops->capture_begin(gpu, kvt_batch_stream(r.batch)));
	IS(-EINVAL, kvt_batch_attend(r.batch, &a, &io));
	OK(gpu->ops->capture_end(gpu, kvt_batch_stream(r.batch), &graph));
	gpu->ops->graph_destroy(gpu, graph);
	kvt_batch_destroy(r.batch);
	r.batch = NULL;
	p.ring_bytes = 4096;
	IS(-EINVAL, kvt_batch_create(r.cache, &p, &r.batch));
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "ring_bytes is 4096"));
	p.ring_bytes = 64 << 20;
	IS(-ENOMEM, kvt_batch_create(r.cache, &p, &r.batch));
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "for its ring"));
	unmake(&r);
	gpu_backend_close(GPU_MOCK, gpu);
}
END_TEST

/* More than the gpu and pinned tiers hold: the step fails, nothing is longer, and what was there is still right. */
START_TEST(a_full_tier_is_an_error)
{
	uint32_t names[1] = { 5 }, lens[1] = { 0 }, counts[1] = { BLOCK_ROWS };
	struct kvt_seq *seq;
	struct kvt_gpu *gpu;
	struct rig r;
	int ret = 0;

	OK(gpu_backend_open(_i, &gpu));
	OK(make(&r, gpu, 20, 0, 1));
	OK(kvt_seq_create(r.cache, &seq));
	OK(kvt_batch_attach(r.batch, &seq, 1));
	while (!ret && lens[0] < MAX_TOKENS - BLOCK_ROWS)
		ret = step(&r, names, lens, counts, 1);
	ck_assert_msg(ret == -ENOSPC || ret == -ENOMEM, "%d", ret);
	ck_assert_uint_ge(lens[0], 3 * BLOCK_ROWS);
	IS(-EINVAL, kvt_batch_step(r.batch, (uint32_t[]){ MAX_TOKENS + 1 }, NULL));
	kvt_batch_detach(r.batch);
	OK(verify(seq, names[0], lens[0]));
	IS(-EINVAL, kvt_batch_step(r.batch, counts, NULL));
	unmake(&r);
	gpu_backend_close(_i, gpu);
}
END_TEST

/* Each call of the device fails once, or the device is gone from it on: rows are right, or reading them is an error. */
START_TEST(each_call_fails_once)
{
	uint64_t step_by = test_rounds(5, 41, 41), at, runs = 0;
	bool failed = true;

	for (at = 1; failed; at += step_by) {
		uint32_t names[1] = { 6 }, lens[1] = { 21 }, counts[1];
		struct kvt_stats st = KVT_INIT(st);
		struct kvt_seq *seq;
		struct kvt_gpu *gpu;
		struct rig r;
		int ret;

		OK(gpu_backend_open(GPU_MOCK, &gpu));
		OK(make(&r, gpu, 30, 30, 1));
		OK(kvt_seq_create(r.cache, &seq));
		write_on_cpu(seq, names[0], 0, 21);
		kvt_mock_fail_at(gpu, at, _i ? -ENODEV : -EIO);
		ret = kvt_batch_attach(r.batch, &seq, 1);
		for (int k = 0; k < 4 && !ret; k++) {
			counts[0] = 1 + (uint32_t)k * 9;
			ret = step(&r, names, lens, counts, 1);
		}
		kvt_batch_detach(r.batch);
		failed = kvt_mock_failed(gpu);
		runs += failed;
		if (!failed)
			OK(ret);
		/* of a step that failed, rows are zeros */
		if (kvt_seq_len(seq) == lens[0]) {
			ret = verify(seq, names[0], lens[0]);
			failed = kvt_mock_failed(gpu);
			ck_assert_msg(!ret || failed, "%s", kvt_last_error());
		}
		OK(kvt_cache_stats(r.cache, &st));
		ck_assert_uint_eq(st.gpu_lost, kvt_mock_failed(gpu) && _i);
		unmake(&r);
		gpu_backend_close(GPU_MOCK, gpu);
	}
	ck_assert_uint_gt(runs * step_by, 25);
}
END_TEST

START_TEST(parameters)
{
	struct kvt_batch_params p = KVT_INIT(p);
	struct kvt_batch_attn io = KVT_INIT(io);
	struct kvt_attn a = KVT_INIT(a);
	struct kvt_batch *second;
	struct kvt_seq *seq, *both[2];
	struct kvt_gpu *gpu;
	struct rig r;

	OK(gpu_backend_open(GPU_MOCK, &gpu));
	OK(make(&r, gpu, 20, 0, 2));
	OK(kvt_seq_create(r.cache, &seq));
	both[0] = both[1] = seq;
	IS(-ENOMEM, kvt_batch_create(r.cache, &p, &second)); /* the scratch is taken */
	p.flags = 1;
	IS(-EINVAL, kvt_batch_create(r.cache, &p, &second));
	p.flags = 0;
	p.size = 4;
	IS(-EINVAL, kvt_batch_create(r.cache, &p, &second));
	IS(-EINVAL, kvt_batch_attach(r.batch, both, 2));
	IS(-EINVAL, kvt_batch_attach(r.batch, both, 0));
	IS(-EINVAL, kvt_batch_attach(r.batch, both, 3));
	OK(kvt_batch_attach(r.batch, both, 1));
	IS(-EBUSY, kvt_batch_attach(r.batch, both, 1));
	IS(-EINVAL, kvt_batch_write(r.batch, 0, &(struct kvt_rows){ .data = &p, .type = KVT_F16 })); /* no step yet */
	OK(kvt_batch_step(r.batch, (uint32_t[]){ 1 }, NULL));
	IS(-EINVAL, kvt_batch_write_kv(r.batch, 1, &(struct kvt_rows){ .data = &p, .type = KVT_F16 }, 1,
				       &(struct kvt_rows){ .data = &p, .type = KVT_F16 }));
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "written twice"));
	io.reserved = 1;
	IS(-EINVAL, kvt_batch_attend(r.batch, &a, &io));
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "reserved is 1"));
	io.reserved = 0;
	io.q = r.q;
	io.out = r.out;
	a.n_heads = Q_HEADS;
	a.v_plane = 1;
	OK(kvt_batch_step(r.batch, (uint32_t[]){ 1 }, NULL));
	OK(kvt_batch_attend(r.batch, &a, &io));
	ck_assert_uint_eq(kvt_mock_count(gpu, KVT_MOCK_tensor_map), 0);
	a.family = KVT_ATTN_FAST; /* the copy engine may bring what the gpu tier has */
	OK(kvt_batch_attend(r.batch, &a, &io));
	ck_assert_uint_eq(kvt_mock_count(gpu, KVT_MOCK_tensor_map), 1);
	a.softcap = 30; /* which it does not have: said, and not computed by another family */
	IS(-EOPNOTSUPP, kvt_batch_attend(r.batch, &a, &io));
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "take family exact"));
	a.family = KVT_ATTN_FAST + 1;
	IS(-EINVAL, kvt_batch_attend(r.batch, &a, &io));
	kvt_batch_detach(r.batch);
	kvt_batch_detach(r.batch);
	kvt_seq_free(seq);
	IS(-EINVAL, kvt_batch_attach(r.batch, both, 1));
	unmake(&r);
	gpu_backend_close(GPU_MOCK, gpu);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("cache_gpu");
	TCase *t = tcase_create("batch");
	SRunner *r = srunner_create(s);
	int failed;

	n_backends = gpu_backends();
	tcase_set_timeout(t, 300);
	tcase_add_loop_test(t, rows_are_what_was_written, 0, n_backends);
	tcase_add_loop_test(t, rows_never_written_are_zeros, 0, n_backends);
	tcase_add_loop_test(t, forks_go_on_side_by_side, 0, n_backends);
	tcase_add_loop_test(t, an_aborted_step_loses_nothing, 0, n_backends);
	tcase_add_loop_test(t, attention_depends_on_the_rows_alone, 0, n_backends);
	tcase_add_loop_test(t, a_captured_step_serves_later_ones, 0, n_backends);
	tcase_add_test(t, all_but_a_steps_first_launch_may_begin_early);
	tcase_add_loop_test(t, a_ring_changes_no_bit, 0, n_backends);
	tcase_add_loop_test(t, a_step_moves_what_is_not_resident, 0, n_backends);
	tcase_add_loop_test(t, moves_beside_decoding_change_no_bit, 0, n_backends);
	tcase_add_test(t, what_arrives_damaged_is_refused);
	tcase_add_test(t, damage_does_not_stay);
	tcase_add_loop_test(t, each_call_fails_once_with_a_ring, 0, 2);
	tcase_add_test(t, limits_of_a_ring);
	tcase_add_loop_test(t, a_full_tier_is_an_error, 0, n_backends);
	tcase_add_loop_test(t, each_call_fails_once, 0, 2);
	tcase_add_test(t, parameters);
	suite_add_tcase(s, t);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
