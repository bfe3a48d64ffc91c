// SPDX-License-Identifier: MIT
/*
 * Frames of the gpu tier: one slab of device memory, written, digested and
 * copied through the backend's table alone. Rows are encoded on the device, and
 * what arrives there is digested there.
 *
 * One lock and one staging area: rows and the kernels' argument arrays go
 * through it a piece at a time.
 */
#include "store/internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/err.h"
#include "codec/codec.h"
#include "gpu/kernels.h"

#define PIECE_ROWS 1024u
#define PIECE_BYTES (256u << 10)
#define THREADS 256
#define COPY_BLOCKS 16 /* thread blocks of the copy kernel: they fill the link and leave the device to others */
#define COPY_THREADS 512
#define TRIES 3 /* of each way to move blocks, at the start */

/* The argument arrays, as they lie on the device. */
struct piece {
	uint64_t blocks[PIECE_ROWS];
	uint32_t rows[PIECE_ROWS];
	uint64_t src[KVT_DEVICE_GROUP];
	uint32_t first;
	uint32_t pad;
	uint64_t out[KVT_DEVICE_GROUP];
};

struct kvt_device {
	struct kvt_gpu *gpu;
	const struct kvt_gpu_ops *ops;
	uint64_t block_bytes, staging_bytes, slab_bytes;
	kvt_dptr slab, staging, arrays;
	void *registered[KVT_TIERS + 1]; /* host pools that the device reads and writes at full rate */
	uint32_t n_registered;
	kvt_kernel digest, append, copy;
	struct kvt_device_rates rates;
	pthread_mutex_t lock;
	struct piece piece; /* the host's copy */
};

static uint64_t staging_bytes(const struct kvt_plane_geom *planes, uint32_t n)
{
	uint64_t most = PIECE_BYTES;

	for (uint32_t i = 0; i < n; i++)
		if (planes[i].elems * sizeof(float) > most)
			most = planes[i].elems * sizeof(float);
	return most;
}

uint64_t kvt_device_overhead(const struct kvt_store_params *p)
{
	return staging_bytes(p->planes, p->n_planes) + sizeof(struct piece);
}

static kvt_dptr frame_at(const struct kvt_device *d, uint32_t frame)
{
	return d->slab + frame * d->block_bytes;
}

/* Copies to and from memory that the driver does not know go through its own staging, at a fraction of the rate. */
static bool register_pool(struct kvt_device *d, const struct kvt_pool *pool, uint64_t block_bytes)
{
	if (!pool)
		return false;
	if (d->ops->host_register(d->gpu, pool->base, pool->n_frames * block_bytes)) {
		kvt_log(KVT_LOG_WARN, "gpu tier: copies will be slow: %s", kvt_last_error());
		return false;
	}
	d->registered[d->n_registered++] = pool->base;
	return true;
}

static int move_by_kernel(struct kvt_device *d, uint32_t n, bool up)
{
	const struct kvt_dim3 grid = { COPY_BLOCKS, 1, 1 }, block = { COPY_THREADS, 1, 1 };
	const kvt_dptr on_device = d->arrays + offsetof(struct piece, blocks);
	const kvt_dptr on_host = d->arrays + offsetof(struct piece, src);
	struct kvt_copy_args args = { .dst = up ? on_device : on_host, .src = up ? on_host : on_device, .n = n,
				      .bytes = (uint32_t)d->block_bytes };
	void *list = &args;

	return d->ops->launch(d->gpu, d->copy, grid, block, 0, 0, &list, 1);
}

/* @pinned: all of the host's are, so that one call may do. */
static int move_by_engine(struct kvt_device *d, uint32_t n, bool up, bool pinned)
{
	const uint64_t *dst = up ? d->piece.blocks : d->piece.src, *src = up ? d->piece.src : d->piece.blocks;
	int ret = pinned ? d->ops->copy_batch_async(d->gpu, dst, src, d->block_bytes, n, 0) : -ENOSYS;

	if (ret != -ENOSYS)
		return ret;
	ret = 0;
	for (uint32_t i = 0; i < n && !ret; i++) {
		void *host = (void *)(uintptr_t)d->piece.src[i];

		ret = up ? d->ops->copy_h2d_async(d->gpu, d->piece.blocks[i], host, d->block_bytes, 0) :
			   d->ops->copy_d2h_async(d->gpu, host, d->piece.blocks[i], d->block_bytes, 0);
	}
	return ret;
}

/* piece.blocks and piece.src say what; waits for nothing. A kernel takes what is pinned alone. */
static int move_frames(struct kvt_device *d, uint32_t n, bool up, bool kernel, bool pinned)
{
	int ret = 0;

	if (kernel)
		ret = d->ops->copy_h2d_async(d->gpu, d->arrays + offsetof(struct piece, src), d->piece.src,
					     n * sizeof(uint64_t), 0);
	if (!ret)
		ret = d->ops->copy_h2d_async(d->gpu, d->arrays + offsetof(struct piece, blocks), d->piece.blocks,
					     n * sizeof(uint64_t), 0);
	if (ret)
		return ret;
	return kernel ? move_by_kernel(d, n, up) : move_by_engine(d, n, up, pinned);
}

/* Seconds for @n frames by one way: the best of a few. */
static int time_move(struct kvt_device *d, uint32_t n, bool up, bool kernel, double *seconds)
{
	struct timespec from, to;
	int ret = 0;

	*seconds = 1;
	for (int i = 0; i <= TRIES && !ret; i++) {
		clock_gettime(CLOCK_MONOTONIC, &from);
		ret = move_frames(d, n, up, kernel, true);
		if (!ret)
			ret = d->ops->stream_sync(d->gpu, 0);
		clock_gettime(CLOCK_MONOTONIC, &to);
		double t = (double)(to.tv_sec - from.tv_sec) + (double)(to.tv_nsec - from.tv_nsec) * 1e-9;

		if (i && t < *seconds) /* the first loads the kernel */
			*seconds = t;
	}
	return ret;
}

/*
 * Which way is faster depends on the device, its link and the size of a block:
 * it is tried with frames that nobody uses yet. Where kernels run on the CPU
 * there is nothing to find out.
 */
static int calibrate(struct kvt_store *s, uint32_t frames)
{
	struct kvt_device *d = s->device;
	struct kvt_device_rates *r = &d->rates;
	const struct kvt_pool *pool = s->pool[KVT_TIER_PINNED];
	uint32_t n = pool && pool->n_frames < KVT_DEVICE_GROUP ? pool->n_frames : KVT_DEVICE_GROUP;
	struct timespec from, to;
	double t[2];
	int ret = 0;

	r->kernel[0] = r->kernel[1] = true;
	if (!d->gpu->sm || !(s->device_tiers >> KVT_TIER_PINNED & 1))
		return 0;
	n = n < frames ? n : frames;
	clock_gettime(CLOCK_MONOTONIC, &from);
	for (uint32_t i = 0; i < n; i++) {
		d->piece.blocks[i] = frame_at(d, i);
		d->piece.src[i] = (uintptr_t)kvt_store_host_frame(s, KVT_TIER_PINNED, i);
	}
	for (int up = 1; up >= 0; up--) { /* what comes down has gone up */
		for (int kernel = 0; kernel < 2 && !ret; kernel++)
			ret = time_move(d, n, up, kernel, &t[kernel]);
		if (ret)
			return ret;
		r->kernel[up] = t[1] < t[0];
		r->bytes_per_s[up] = (double)(n * d->block_bytes) / (t[1] < t[0] ? t[1] : t[0]);
	}
	clock_gettime(CLOCK_MONOTONIC, &to);
	r->micros = (uint64_t)(to.tv_sec - from.tv_sec) * 1000000 + (uint64_t)((to.tv_nsec - from.tv_nsec) / 1000);
	kvt_log(KVT_LOG_INFO, "gpu tier: blocks of %llu bytes go up by %s at %.1f GB/s and down by %s at %.1f GB/s (tried for %.1f ms)",
		(unsigned long long)d->block_bytes, r->kernel[1] ? "kernel" : "copy engine", r->bytes_per_s[1] * 1e-9,
		r->kernel[0] ? "kernel" : "copy engine", r->bytes_per_s[0] * 1e-9, (double)r->micros * 1e-3);
	return 0;
}

void kvt_store_gpu_rates(const struct kvt_store *s, struct kvt_device_rates *rates)
{
	*rates = s->device ? s->device->rates : (struct kvt_device_rates){ 0 };
}

uint64_t kvt_store_gpu_slab(const struct kvt_store *s, kvt_dptr *base)
{
	*base = s->device ? s->device->slab : 0;
	return s->device ? s->device->slab_bytes : 0;
}

int kvt_device_create(struct kvt_store *s, uint32_t frames)
{
	struct kvt_device *d;
	int ret;

	if (!s->gpu)
		return kvt_fail(-ENODEV, "a gpu tier was asked for and there is no gpu backend");
	d = calloc(1, sizeof(*d));
	if (!d)
		return kvt_fail(-ENOMEM, "no memory for the gpu tier");
	pthread_mutex_init(&d->lock, NULL);
	s->device = d;
	d->gpu = s->gpu;
	d->ops = s->gpu->ops;
	d->block_bytes = s->block_bytes;
	d->staging_bytes = staging_bytes(s->planes, s->n_planes);
	d->slab_bytes = frames * s->block_bytes;
	ret = d->ops->kernel(d->gpu, "block", "digest", &d->digest);
	if (!ret)
		ret = d->ops->kernel(d->gpu, "block", "append", &d->append);
	if (!ret)
		ret = d->ops->kernel(d->gpu, "block", "copy", &d->copy);
	if (!ret)
		ret = d->ops->alloc(d->gpu, d->slab_bytes, &d->slab);
	if (!ret)
		ret = d->ops->alloc(d->gpu, d->staging_bytes, &d->staging);
	if (!ret)
		ret = d->ops->alloc(d->gpu, sizeof(struct piece), &d->arrays);
	if (ret)
		return kvt_fail_more(ret, "gpu tier of %u frames", frames);
	s->device_tiers = 1u << KVT_TIER_GPU;
	if (register_pool(d, s->pool[KVT_TIER_PINNED], s->block_bytes))
		s->device_tiers |= 1u << KVT_TIER_PINNED;
	register_pool(d, s->staging, s->block_bytes);
	return calibrate(s, frames);
}

void kvt_device_destroy(struct kvt_store *s)
{
	struct kvt_device *d = s->device;

	if (!d)
		return;
	while (d->n_registered)
		d->ops->host_unregister(d->gpu, d->registered[--d->n_registered]);
	d->ops->free(d->gpu, d->arrays);
	d->ops->free(d->gpu, d->staging);
	d->ops->free(d->gpu, d->slab);
	pthread_mutex_destroy(&d->lock);
	free(d);
}

int kvt_store_device_ended(struct kvt_store *s, int ret, const char *what)
{
	bool first;

	if (!ret)
		return 0;
	if (ret == -ENODEV) {
		pthread_mutex_lock(&s->lock);
		first = kvt_store_gpu_gone(s);
		pthread_mutex_unlock(&s->lock);
		if (first)
			kvt_log(KVT_LOG_ERROR, "gpu tier: %s: goes on without it; what was there alone is lost",
				kvt_last_error());
	}
	return kvt_fail_more(ret, "%s", what);
}

kvt_dptr kvt_device_frame(const struct kvt_store *s, uint32_t tier, uint32_t frame)
{
	return tier == KVT_TIER_GPU ? frame_at(s->device, frame) : (uintptr_t)kvt_store_host_frame(s, tier, frame);
}

const uint8_t *kvt_device_host_view(const struct kvt_store *s, uint32_t frame)
{
	return (const uint8_t *)(uintptr_t)frame_at(s->device, frame);
}

static int zero(struct kvt_device *d, kvt_dptr at, uint64_t bytes)
{
	int ret = d->ops->memset_async(d->gpu, at, 0, bytes, 0);

	return ret ? ret : d->ops->stream_sync(d->gpu, 0);
}

int kvt_device_zero(struct kvt_store *s, uint32_t frame)
{
	struct kvt_device *d = s->device;
	int ret = zero(d, frame_at(d, frame), d->block_bytes);

	return kvt_store_device_ended(s, ret, "zeroing a gpu frame");
}

int kvt_device_zero_async(struct kvt_store *s, uint32_t tier, uint32_t frame, kvt_stream stream)
{
	struct kvt_device *d = s->device;

	if (tier != KVT_TIER_GPU) { /* no kernel knows the frame yet */
		memset(kvt_store_host_frame(s, tier, frame), 0, s->block_bytes);
		return 0;
	}
	return kvt_store_device_ended(s, d->ops->memset_async(d->gpu, frame_at(d, frame), 0, d->block_bytes, stream), "zeroing a gpu frame");
}

static int launch(struct kvt_device *d, kvt_kernel kernel, void *args)
{
	const struct kvt_dim3 grid = { 16, 1, 1 }, block = { THREADS, 1, 1 };
	int ret = d->ops->launch(d->gpu, kernel, grid, block, 0, 0, &args, 1);

	return ret ? ret : d->ops->stream_sync(d->gpu, 0);
}

/* Add the digest of rows [first, first + n) of a frame, or subtract it. */
static int digest(struct kvt_device *d, kvt_dptr frame, uint32_t row_bytes, uint32_t first, uint32_t n, bool subtract,
		  uint64_t *sum)
{
	const kvt_dptr at = d->arrays;
	struct kvt_digest_args args = {
		.blocks = at + offsetof(struct piece, blocks), .rows = at + offsetof(struct piece, rows),
		.first = at + offsetof(struct piece, first), .out = at + offsetof(struct piece, out),
		.n = 1, .row_bytes = row_bytes,
	};
	uint64_t out = 0;
	int ret;

	if (!n)
		return 0;
	d->piece.blocks[0] = frame + (uint64_t)first * row_bytes;
	d->piece.rows[0] = n;
	d->piece.first = first;
	ret = d->ops->copy_h2d(d->gpu, args.blocks, d->piece.blocks, sizeof(uint64_t));
	if (!ret)
		ret = d->ops->copy_h2d(d->gpu, args.rows, d->piece.rows, sizeof(uint32_t));
	if (!ret)
		ret = d->ops->copy_h2d(d->gpu, args.first, &d->piece.first, sizeof(uint32_t));
	if (!ret)
		ret = launch(d, d->digest, &args);
	if (!ret)
		ret = d->ops->copy_d2h(d->gpu, &out, args.out, sizeof(out));
	if (!ret)
		*sum += subtract ? -out : out;
	return ret;
}

/* Rows from host memory, in pieces, through the staging area into the frame. */
static int append(struct kvt_device *d, kvt_dptr frame, const struct kvt_plane_geom *g, uint32_t first, uint32_t n,
		  const struct kvt_rows *src)
{
	uint32_t type = src->type == KVT_ENCODED ? g->codec : src->type;
	uint64_t row = kvt_codec_bytes(type, g->elems);
	uint32_t most = (uint32_t)(d->staging_bytes / row), piece;
	int ret = 0;

	if (most > PIECE_ROWS)
		most = PIECE_ROWS;
	for (uint32_t done = 0; done < n && !ret; done += piece) {
		struct kvt_append_args args = {
			.src = d->staging, .src_stride = row,
			.blocks = d->arrays + offsetof(struct piece, blocks),
			.rows = d->arrays + offsetof(struct piece, rows),
			.elements = g->elems, .src_type = type, .dst_type = g->codec,
		};

		piece = n - done < most ? n - done : most;
		args.n = piece;
		for (uint32_t i = 0; i < piece && !ret; i++) {
			d->piece.blocks[i] = frame;
			d->piece.rows[i] = first + done + i;
			if (src->stride != row)
				ret = d->ops->copy_h2d(d->gpu, d->staging + i * row,
						       (uint8_t *)src->data + (done + i) * src->stride, row);
		}
		if (!ret && src->stride == row)
			ret = d->ops->copy_h2d(d->gpu, d->staging, (uint8_t *)src->data + done * row, piece * row);
		if (!ret)
			ret = d->ops->copy_h2d(d->gpu, args.blocks, d->piece.blocks, piece * sizeof(uint64_t));
		if (!ret)
			ret = d->ops->copy_h2d(d->gpu, args.rows, d->piece.rows, piece * sizeof(uint32_t));
		if (!ret)
			ret = launch(d, d->append, &args);
	}
	return ret;
}

int kvt_device_write(struct kvt_store *s, uint32_t frame, const struct kvt_plane_geom *g, uint32_t old,
		     uint32_t first, uint32_t n, const struct kvt_rows *src, uint64_t *delta)
{
	struct kvt_device *d = s->device;
	uint32_t end = first + n, overlap = end < old ? end : old;
	kvt_dptr at = frame_at(d, frame);
	int ret = 0;

	*delta = 0;
	pthread_mutex_lock(&d->lock);
	if (overlap > first)
		ret = digest(d, at, g->row_bytes, first, overlap - first, true, delta);
	if (!ret && first > old)
		ret = digest(d, at, g->row_bytes, old, first - old, false, delta);
	if (!ret)
		ret = append(d, at, g, first, n, src);
	if (!ret)
		ret = digest(d, at, g->row_bytes, first, n, false, delta);
	pthread_mutex_unlock(&d->lock);
	return kvt_store_device_ended(s, ret, "writing rows to a gpu frame");
}

int kvt_device_cut(struct kvt_store *s, uint32_t frame, const struct kvt_plane_geom *g, uint32_t old, uint32_t rows,
		   uint64_t *delta)
{
	struct kvt_device *d = s->device;
	kvt_dptr at = frame_at(d, frame);
	int ret;

	*delta = 0;
	pthread_mutex_lock(&d->lock);
	ret = digest(d, at, g->row_bytes, rows, old - rows, true, delta);
	if (!ret)
		ret = zero(d, at + (uint64_t)rows * g->row_bytes, (uint64_t)(old - rows) * g->row_bytes);
	pthread_mutex_unlock(&d->lock);
	return kvt_store_device_ended(s, ret, "cutting a gpu frame");
}

int kvt_device_load(struct kvt_store *s, uint32_t frame, const struct kvt_plane_geom *g, uint32_t rows,
		    const void *src, uint64_t *sum)
{
	struct kvt_device *d = s->device;
	kvt_dptr at = frame_at(d, frame);
	int ret;

	*sum = 0;
	pthread_mutex_lock(&d->lock);
	ret = d->ops->copy_h2d(d->gpu, at, src, d->block_bytes);
	if (!ret)
		ret = digest(d, at, g->row_bytes, 0, rows, false, sum);
	pthread_mutex_unlock(&d->lock);
	return kvt_store_device_ended(s, ret, "copying a block to the gpu");
}

int kvt_device_save(struct kvt_store *s, void *dst, uint32_t frame)
{
	struct kvt_device *d = s->device;
	int ret;

	pthread_mutex_lock(&d->lock);
	ret = d->ops->copy_d2h(d->gpu, dst, frame_at(d, frame), d->block_bytes);
	pthread_mutex_unlock(&d->lock);
	return kvt_store_device_ended(s, ret, "copying a block from the gpu");
}

/* Digests of what has arrived, a launch for each run of planes with rows of one size. */
static int digest_moves(struct kvt_store *s, const struct kvt_device_move *moves, uint32_t n)
{
	struct kvt_device *d = s->device;
	const struct kvt_dim3 grid = { COPY_BLOCKS, 1, 1 }, block = { THREADS, 1, 1 };
	const kvt_dptr at = d->arrays;
	int ret = d->ops->copy_h2d_async(d->gpu, at + offsetof(struct piece, rows), d->piece.rows, n * sizeof(uint32_t), 0);

	for (uint32_t i = 0, run; i < n && !ret; i += run) {
		struct kvt_digest_args args = {
			.blocks = at + offsetof(struct piece, blocks) + i * sizeof(uint64_t),
			.rows = at + offsetof(struct piece, rows) + i * sizeof(uint32_t),
			.out = at + offsetof(struct piece, out) + i * sizeof(uint64_t),
			.row_bytes = s->planes[moves[i].plane].row_bytes,
		};
		void *list = &args;

		for (run = 1; i + run < n && s->planes[moves[i + run].plane].row_bytes == args.row_bytes; run++)
			;
		args.n = run;
		ret = d->ops->launch(d->gpu, d->digest, grid, block, 0, 0, &list, 1);
	}
	return ret ? ret : d->ops->copy_d2h(d->gpu, d->piece.out, at + offsetof(struct piece, out), n * sizeof(uint64_t));
}

int kvt_device_move(struct kvt_store *s, struct kvt_device_move *moves, uint32_t n, bool up)
{
	struct kvt_device *d = s->device;
	bool pinned = true;
	int ret;

	pthread_mutex_lock(&d->lock);
	for (uint32_t i = 0; i < n; i++) {
		pinned &= s->device_tiers >> moves[i].tier & 1;
		d->piece.blocks[i] = frame_at(d, moves[i].frame);
		d->piece.src[i] = (uintptr_t)kvt_store_host_frame(s, moves[i].tier, moves[i].host_frame);
		d->piece.rows[i] = moves[i].rows;
	}
	ret = move_frames(d, n, up, pinned && d->rates.kernel[up], pinned);
	if (!ret)
		ret = up ? digest_moves(s, moves, n) : d->ops->stream_sync(d->gpu, 0);
	for (uint32_t i = 0; i < n && !ret; i++)
		moves[i].digest = d->piece.out[i];
	if (ret) /* frames are used again: nothing may still be on its way to or from them */
		d->ops->stream_sync(d->gpu, 0);
	pthread_mutex_unlock(&d->lock);
	return kvt_store_device_ended(s, ret, "moving blocks between host and gpu");
}
