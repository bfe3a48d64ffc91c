// SPDX-License-Identifier: MIT
/* What passes through GPU memory ahead of its use; cache/ring.h. */
#include "cache/ring.h"

#include <errno.h>
#include <stdlib.h>

#include "base/err.h"
#include "gpu/kernels.h"

#define PIECE_BYTES (64ull << 20) /* of a copy: what is behind waits for places of its own */
#define PITCH_MAX (1ull << 31)
#define RUN_BYTES (16ull << 20) /* from which on a copy of its own, which costs 14 us, beats being one of a batch */
#define COPY_BLOCKS 16
#define COPY_THREADS 512
#define DIGEST_BLOCKS 8 /* on each multiprocessor */
#define DIGEST_THREADS 256
#define TRIES 2

struct entry {
	uint64_t src, digest;
	uint32_t rows, word, frame, plane;
};

struct passing { /* a plane */
	uint32_t at, blocks; /* of the lists; entries of one block have one place */
	uint32_t frame;	     /* of its first block; the others follow */
	kvt_event here, done;
	bool staged;  /* its blocks are in their places, or on their way */
	bool checked; /* the reading stream has waited for them, and verified them */
	bool read;    /* and a launch on them is on it */
	bool busy;    /* the copying stream has not waited for the last launch that reads its places */
};

struct kvt_ring {
	struct kvt_cache *cache;
	struct kvt_gpu *gpu;
	const struct kvt_gpu_ops *ops;
	kvt_stream reader, copier;
	kvt_kernel copy, digest, verify;
	kvt_event from, to;
	kvt_dptr slab, lists; /* src, dst, wanted, out: [most] u64 of each; how many were bad; rows: [most] u32 */
	uint64_t block_bytes;
	uint32_t frames, most;
	uint32_t n, blocks; /* entries, and how many blocks they are of */
	bool verifies;	    /* since the last verdict */
	struct kvt_ring_choice choice;
	struct passing *planes; /* [n_planes] */
	uint32_t *order, *place, *owners; /* [n_planes]: planes by layer, each one's place there, and room */
	struct entry *entries;	/* [most] */
	uint64_t *src, *dst, *wanted; /* [most]: the lists as they lie on the device */
	uint32_t *rows;
};

enum list { SRC, DST, WANTED, OUT, BAD };

static kvt_dptr list_at(const struct kvt_ring *r, enum list list, uint32_t i)
{
	return r->lists + ((uint64_t)list * r->most + i) * sizeof(uint64_t);
}

static kvt_dptr rows_at(const struct kvt_ring *r, uint32_t i)
{
	return list_at(r, BAD, 1) + i * sizeof(uint32_t);
}

static uint64_t lists_bytes(uint32_t most)
{
	return (BAD * (uint64_t)most + 1) * sizeof(uint64_t) + most * sizeof(uint32_t);
}

uint64_t kvt_ring_bytes(const struct kvt_cache *c, uint64_t ring_bytes, uint32_t most)
{
	return ring_bytes / c->block_bytes * c->block_bytes + lists_bytes(most) + sizeof(struct kvt_ring) +
	       c->n_planes * (sizeof(struct passing) + 3 * sizeof(uint32_t)) +
	       most * (sizeof(struct entry) + 3 * sizeof(uint64_t) + sizeof(uint32_t));
}

/* ---- places ---- */

int kvt_ring_add(struct kvt_ring *r, uint32_t plane, uint32_t word, const struct kvt_host_rows *rows)
{
	if (r->n == r->most)
		return -ENOBUFS;
	r->entries[r->n++] = (struct entry){ .src = rows->at, .digest = rows->digest, .rows = rows->rows, .word = word,
					     .plane = plane };
	return 0;
}

static bool before(const struct kvt_ring *r, const struct entry *a, const struct entry *b)
{
	return a->plane == b->plane ? a->src < b->src : r->place[a->plane] < r->place[b->plane];
}

/* By plane and address, in place. */
static void sort(struct kvt_ring *r)
{
	uint32_t gap = 1;

	while (gap < r->n / 3)
		gap = 3 * gap + 1;
	for (; gap; gap /= 3)
		for (uint32_t i = gap; i < r->n; i++) {
			struct entry e = r->entries[i];
			uint32_t k = i;

			for (; k >= gap && before(r, &e, &r->entries[k - gap]); k -= gap)
				r->entries[k] = r->entries[k - gap];
			r->entries[k] = e;
		}
}

/* A plane's entries, of which @i is the first of @n. Returns the next plane's first; those without a place are no more. */
static uint32_t place_plane(struct kvt_ring *r, uint32_t i, uint32_t n)
{
	const uint32_t plane = r->entries[i].plane;
	struct passing *p = &r->planes[plane];

	p->at = r->blocks;
	p->frame = r->blocks % r->frames;
	for (; i < n && r->entries[i].plane == plane; i++) {
		struct entry e = r->entries[i];

		if (!p->blocks || e.src != r->src[r->blocks - 1]) {
			if (p->blocks == r->frames / 2)
				continue;
			r->src[r->blocks] = e.src;
			r->dst[r->blocks] = r->slab + r->blocks % r->frames * r->block_bytes;
			r->wanted[r->blocks] = e.digest;
			r->rows[r->blocks++] = e.rows;
			p->blocks++;
		}
		e.frame = (r->blocks - 1) % r->frames;
		r->entries[r->n++] = e;
	}
	return i;
}

/* Blocks from @i on, at most @n, that one copy takes: evenly apart. */
static uint32_t run_of(const struct kvt_ring *r, uint32_t i, uint32_t n, uint64_t *apart)
{
	uint32_t run = 1;

	*apart = n > 1 ? r->src[i + 1] - r->src[i] : r->block_bytes;
	while (run < n && *apart < PITCH_MAX && r->src[i + run] - r->src[i + run - 1] == *apart)
		run++;
	return run;
}

/* Runs of blocks [i, i + n). */
static uint32_t count_runs(const struct kvt_ring *r, uint32_t i, uint32_t n)
{
	uint32_t runs = 0;
	uint64_t apart;

	for (uint32_t end = i + n; i < end; runs++)
		i += run_of(r, i, end - i, &apart);
	return runs;
}

/* Where kernels are their twins there is nothing to try. */
static void choose_untried(struct kvt_ring *r)
{
	r->choice.way = count_runs(r, 0, r->blocks) <= r->blocks / 2 ? KVT_RING_ENGINE : KVT_RING_KERNEL;
	kvt_cache_ring(r->cache, &r->choice);
}

int kvt_ring_lay_out(struct kvt_ring *r)
{
	const uint32_t n = r->n;
	uint64_t none = 0;
	int ret;

	sort(r);
	r->n = 0;
	for (uint32_t i = 0; i < n;)
		i = place_plane(r, i, n);
	if (!r->gpu->sm && r->choice.way == KVT_RING_UNKNOWN && r->blocks)
		choose_untried(r);
	ret = r->ops->copy_h2d(r->gpu, list_at(r, SRC, 0), r->src, r->blocks * sizeof(uint64_t));
	if (!ret)
		ret = r->ops->copy_h2d(r->gpu, list_at(r, DST, 0), r->dst, r->blocks * sizeof(uint64_t));
	if (!ret)
		ret = r->ops->copy_h2d(r->gpu, list_at(r, WANTED, 0), r->wanted, r->blocks * sizeof(uint64_t));
	if (!ret)
		ret = r->ops->copy_h2d(r->gpu, rows_at(r, 0), r->rows, r->blocks * sizeof(uint32_t));
	if (!ret)
		ret = r->ops->copy_h2d(r->gpu, list_at(r, BAD, 0), &none, sizeof(none));
	return ret;
}

bool kvt_ring_entry(const struct kvt_ring *r, uint32_t i, uint32_t *plane, uint32_t *word, kvt_dptr *place)
{
	if (i >= r->n)
		return false;
	*plane = r->entries[i].plane;
	*word = r->entries[i].word;
	*place = r->slab + r->entries[i].frame * r->block_bytes;
	return true;
}

/* Do blocks [a, a + n) and [b, b + m), counted from the ring's first frame on, have a frame in common? */
static bool meet(const struct kvt_ring *r, uint32_t a, uint32_t n, uint32_t b, uint32_t m)
{
	return n && m && ((b + r->frames - a) % r->frames < n || (a + r->frames - b) % r->frames < m);
}

static bool planes_meet(const struct kvt_ring *r, const struct passing *p, const struct passing *q)
{
	return meet(r, p->frame, p->blocks, q->frame, q->blocks);
}

/* ---- copies ---- */

static int copy_by_engine(struct kvt_ring *r, uint32_t i, uint32_t n)
{
	const uint32_t runs = count_runs(r, i, n);
	uint64_t apart;
	int ret = -ENOSYS;

	if (runs > 1 && runs * RUN_BYTES > n * r->block_bytes)
		ret = r->ops->copy_batch_async(r->gpu, r->dst + i, r->src + i, r->block_bytes, n, r->copier);
	if (ret != -ENOSYS)
		return ret;
	ret = 0;
	for (uint32_t end = i + n, run; i < end && !ret; i += run) {
		run = run_of(r, i, end - i, &apart);
		if (apart == r->block_bytes)
			ret = r->ops->copy_h2d_async(r->gpu, r->dst[i], (void *)(uintptr_t)r->src[i], run * r->block_bytes,
						     r->copier);
		else
			ret = r->ops->copy_2d_async(r->gpu, r->dst[i], r->block_bytes, r->src[i], apart, r->block_bytes, run,
						    r->copier);
	}
	return ret;
}

static int copy_by_kernel(struct kvt_ring *r, uint32_t i, uint32_t n)
{
	const struct kvt_dim3 grid = { COPY_BLOCKS, 1, 1 }, block = { COPY_THREADS, 1, 1 };
	struct kvt_copy_args args = { .dst = list_at(r, DST, i), .src = list_at(r, SRC, i), .n = n,
				      .bytes = (uint32_t)r->block_bytes };
	void *list = &args;

	return r->ops->launch(r->gpu, r->copy, grid, block, 0, r->copier, &list, 1);
}

/* Behind launches that read the places of a piece of a plane. */
static int wait_for_owners(struct kvt_ring *r, uint32_t n_owners, uint32_t frame, uint32_t n)
{
	int ret = 0;

	for (uint32_t i = 0; i < n_owners && !ret; i++) {
		struct passing *q = &r->planes[r->owners[i]];

		if (!q->busy || !meet(r, frame, n, q->frame, q->blocks))
			continue;
		ret = r->ops->event_wait(r->gpu, r->copier, q->done);
		q->busy = ret;
	}
	return ret;
}

static int copy_plane(struct kvt_ring *r, struct passing *p, bool kernel)
{
	const uint32_t most = (uint32_t)(PIECE_BYTES / r->block_bytes);
	uint32_t n_owners = 0;
	int ret = 0;

	for (uint32_t i = 0; i < r->cache->n_planes; i++) {
		struct passing *q = &r->planes[i];

		if (!planes_meet(r, p, q))
			continue;
		q->staged = false;
		if (q->busy)
			r->owners[n_owners++] = i;
	}
	for (uint32_t i = 0, n; i < p->blocks && !ret; i += n) {
		uint32_t frame = (p->frame + i) % r->frames;

		n = p->blocks - i < most ? p->blocks - i : most;
		n = r->frames - frame < n ? r->frames - frame : n;
		ret = wait_for_owners(r, n_owners, frame, n);
		if (!ret)
			ret = kernel ? copy_by_kernel(r, p->at + i, n) : copy_by_engine(r, p->at + i, n);
	}
	kvt_cache_streamed(r->cache, p->blocks * r->block_bytes, 0);
	return ret;
}

static int stage(struct kvt_ring *r, struct passing *p)
{
	int ret = copy_plane(r, p, r->choice.way == KVT_RING_KERNEL);

	if (!ret)
		ret = r->ops->event_record(r->gpu, p->here, r->copier);
	p->staged = !ret;
	p->checked = p->read = false;
	return ret;
}

/* Would staging a plane take places from one that is there and was not read yet? */
static bool too_early(const struct kvt_ring *r, const struct passing *p)
{
	for (uint32_t i = 0; i < r->cache->n_planes; i++)
		if (r->planes[i].staged && !r->planes[i].read && planes_meet(r, p, &r->planes[i]))
			return true;
	return false;
}

/* The planes behind place @at in the order, round to it, as far as there is room. */
static int stage_ahead(struct kvt_ring *r, uint32_t at)
{
	int ret = 0;

	for (uint32_t i = 1; i <= r->cache->n_planes && !ret; i++) {
		struct passing *p = &r->planes[r->order[(at + i) % r->cache->n_planes]];

		if (!p->blocks || p->staged)
			continue;
		if (too_early(r, p))
			break;
		ret = stage(r, p);
	}
	return ret;
}

/* ---- launches ---- */

/* Digests of what has arrived, in the reading stream. */
static int verify(struct kvt_ring *r, uint32_t plane)
{
	const struct passing *p = &r->planes[plane];
	const uint32_t processors = r->gpu->processors ? r->gpu->processors : 1;
	const struct kvt_dim3 grid = { DIGEST_BLOCKS * processors, 1, 1 }, few = { COPY_BLOCKS, 1, 1 };
	const struct kvt_dim3 block = { DIGEST_THREADS, 1, 1 };
	struct kvt_digest_args d = { .blocks = list_at(r, DST, p->at), .rows = rows_at(r, p->at), .out = list_at(r, OUT, p->at),
				     .n = p->blocks, .row_bytes = r->cache->planes[plane].geom.row_bytes };
	struct kvt_verify_args v = { .digests = d.out, .wanted = list_at(r, WANTED, p->at), .bad = list_at(r, BAD, 0),
				     .n = p->blocks };
	void *args = &d;
	int ret = r->ops->launch(r->gpu, r->digest, grid, block, 0, r->reader, &args, 1);

	args = &v;
	return ret ? ret : r->ops->launch(r->gpu, r->verify, few, block, 0, r->reader, &args, 1);
}

static int enter(struct kvt_ring *r, uint32_t plane)
{
	struct passing *p = &r->planes[plane];
	int ret = 0;

	if (!p->blocks)
		return 0;
	if (!p->staged)
		ret = stage(r, p);
	if (!ret && !p->checked)
		ret = r->ops->event_wait(r->gpu, r->reader, p->here);
	if (ret)
		return ret;
	p->busy = true; /* what is put on the reading stream now reads its places */
	if (p->checked)
		return 0;
	r->verifies = true;
	ret = verify(r, plane);
	p->checked = !ret;
	return ret;
}

int kvt_ring_enter(struct kvt_ring *r, uint32_t k, uint32_t v)
{
	int ret;

	if (k != v && planes_meet(r, &r->planes[k], &r->planes[v]))
		return kvt_fail(-EOPNOTSUPP, "attention: with a ring, K and V are neighbours in the order of layers; planes %u and %u are not",
				k, v);
	ret = enter(r, k);
	return ret || k == v ? ret : enter(r, v);
}

static int leave(struct kvt_ring *r, struct passing *p)
{
	int ret;

	if (!p->blocks || !p->busy)
		return 0;
	ret = r->ops->event_record(r->gpu, p->done, r->reader);
	if (ret && !r->ops->stream_sync(r->gpu, r->reader)) /* no event says so: nobody reads it any more */
		p->busy = false;
	p->read = true;
	return ret;
}

int kvt_ring_leave(struct kvt_ring *r, uint32_t k, uint32_t v)
{
	const uint32_t n = r->cache->n_planes;
	uint32_t last = (r->place[k] + 1) % n == r->place[v] ? r->place[v] : r->place[k];
	int ret = leave(r, &r->planes[k]), also = k == v ? 0 : leave(r, &r->planes[v]);

	if (ret || also)
		return ret ? ret : also;
	return stage_ahead(r, last);
}

int kvt_ring_verdict(struct kvt_ring *r)
{
	uint64_t bad = 0, none = 0;
	int ret = 0;

	if (!r->verifies)
		return 0;
	r->verifies = false;
	ret = r->ops->copy_d2h(r->gpu, &bad, list_at(r, BAD, 0), sizeof(bad));
	if (ret || !bad)
		return ret;
	for (uint32_t i = 0; i < r->cache->n_planes; i++) /* another copy may be right */
		r->planes[i].staged = false;
	kvt_store_count_bad(r->cache->store, bad);
	ret = r->ops->copy_h2d(r->gpu, list_at(r, BAD, 0), &none, sizeof(none));
	return ret ? ret : kvt_fail(-EBADMSG, "%llu blocks of pinned memory have not reached the GPU as they should: no result since the last wait is right",
				    (unsigned long long)bad);
}

/* ---- which way ---- */

bool kvt_ring_undecided(const struct kvt_ring *r, uint32_t k, uint32_t v)
{
	return r->choice.way == KVT_RING_UNKNOWN && (r->planes[k].blocks || r->planes[v].blocks);
}

bool kvt_ring_on(const struct kvt_ring *r)
{
	return r->blocks && (r->choice.way == KVT_RING_ENGINE || r->choice.way == KVT_RING_KERNEL);
}

int kvt_ring_start(struct kvt_ring *r)
{
	return stage_ahead(r, r->cache->n_planes - 1);
}

struct trial {
	struct kvt_ring *ring;
	uint32_t k, v;
	bool kernel;
};

static int try_copies(void *arg)
{
	const struct trial *t = arg;
	int ret = copy_plane(t->ring, &t->ring->planes[t->k], t->kernel);

	return ret || t->k == t->v ? ret : copy_plane(t->ring, &t->ring->planes[t->v], t->kernel);
}

/* Seconds of @work on a stream, the last of a few: the first loads kernels. */
static int timed(struct kvt_ring *r, kvt_stream stream, int (*work)(void *), void *arg, double *seconds)
{
	float ms = 0;
	int ret = 0;

	for (int i = 0; i < TRIES && !ret; i++) {
		ret = r->ops->event_record(r->gpu, r->from, stream);
		if (!ret)
			ret = work(arg);
		if (!ret)
			ret = r->ops->event_record(r->gpu, r->to, stream);
		if (!ret)
			ret = r->ops->event_sync(r->gpu, r->to);
		if (!ret)
			ret = r->ops->event_elapsed(r->gpu, r->from, r->to, &ms);
	}
	*seconds = ms * 1e-3;
	return ret;
}

int kvt_ring_try(struct kvt_ring *r, uint32_t k, uint32_t v, int (*in_place)(void *), void *arg)
{
	struct kvt_ring_choice *c = &r->choice;
	struct trial engine = { r, k, v, false }, kernel = { r, k, v, true };
	int ret = timed(r, r->reader, in_place, arg, &c->in_place_s);

	if (!ret)
		ret = timed(r, r->copier, try_copies, &engine, &c->engine_s);
	if (!ret)
		ret = timed(r, r->copier, try_copies, &kernel, &c->kernel_s);
	if (ret)
		return ret;
	c->bytes = (r->planes[k].blocks + (k == v ? 0 : r->planes[v].blocks)) * r->block_bytes;
	c->way = c->engine_s <= c->kernel_s ? KVT_RING_ENGINE : KVT_RING_KERNEL;
	if (c->in_place_s < c->engine_s && c->in_place_s < c->kernel_s)
		c->way = KVT_RING_IN_PLACE;
	kvt_cache_ring(r->cache, c);
	return 0;
}

/* ---- life ---- */

int kvt_ring_stop(struct kvt_ring *r)
{
	int ret = r->ops->stream_sync(r->gpu, r->copier);

	for (uint32_t i = 0; i < r->cache->n_planes; i++) {
		struct passing *p = &r->planes[i];

		*p = (struct passing){ .here = p->here, .done = p->done };
	}
	r->n = r->blocks = 0;
	r->verifies = false;
	return ret;
}

void kvt_ring_destroy(struct kvt_ring *r)
{
	if (!r)
		return;
	for (uint32_t i = 0; r->planes && i < r->cache->n_planes; i++) {
		if (r->planes[i].here)
			r->ops->event_destroy(r->gpu, r->planes[i].here);
		if (r->planes[i].done)
			r->ops->event_destroy(r->gpu, r->planes[i].done);
	}
	if (r->from)
		r->ops->event_destroy(r->gpu, r->from);
	if (r->to)
		r->ops->event_destroy(r->gpu, r->to);
	if (r->copier)
		r->ops->stream_destroy(r->gpu, r->copier);
	r->ops->free(r->gpu, r->lists);
	r->ops->free(r->gpu, r->slab);
	free(r->rows);
	free(r->wanted);
	free(r->dst);
	free(r->src);
	free(r->entries);
	free(r->owners);
	free(r->place);
	free(r->order);
	free(r->planes);
	free(r);
}

/* The planes by layer, those of one layer as they were declared. */
static void put_in_order(struct kvt_ring *r)
{
	const struct kvt_plane *planes = r->cache->planes;

	for (uint32_t i = 0; i < r->cache->n_planes; i++) {
		uint32_t k = i;

		for (; k && planes[r->order[k - 1]].layer > planes[i].layer; k--)
			r->order[k] = r->order[k - 1];
		r->order[k] = i;
	}
	for (uint32_t i = 0; i < r->cache->n_planes; i++)
		r->place[r->order[i]] = i;
}

static int create_on_device(struct kvt_ring *r)
{
	int ret = r->ops->stream_create(r->gpu, &r->copier);

	if (!ret)
		ret = r->ops->event_create(r->gpu, &r->from);
	if (!ret)
		ret = r->ops->event_create(r->gpu, &r->to);
	for (uint32_t i = 0; i < r->cache->n_planes && !ret; i++) {
		ret = r->ops->event_create(r->gpu, &r->planes[i].here);
		if (!ret)
			ret = r->ops->event_create(r->gpu, &r->planes[i].done);
	}
	if (!ret)
		ret = r->ops->alloc(r->gpu, r->frames * r->block_bytes, &r->slab);
	if (!ret)
		ret = r->ops->alloc(r->gpu, lists_bytes(r->most), &r->lists);
	if (!ret)
		ret = r->ops->kernel(r->gpu, "block", "copy", &r->copy);
	if (!ret)
		ret = r->ops->kernel(r->gpu, "block", "digest", &r->digest);
	if (!ret)
		ret = r->ops->kernel(r->gpu, "block", "verify", &r->verify);
	return ret;
}

int kvt_ring_create(struct kvt_cache *c, kvt_stream reader, uint64_t ring_bytes, uint32_t most, struct kvt_ring **ring)
{
	struct kvt_ring *r;
	int ret = 0;

	if (ring_bytes / c->block_bytes < 2 || ring_bytes / c->block_bytes > UINT32_MAX)
		return kvt_fail(-EINVAL, "ring_bytes is %llu: a ring has 2 to 2^32 blocks of %llu bytes", (unsigned long long)ring_bytes,
				(unsigned long long)c->block_bytes);
	r = calloc(1, sizeof(*r));
	if (!r)
		return kvt_fail(-ENOMEM, "no memory for a ring");
	r->cache = c;
	r->gpu = c->gpu;
	r->ops = c->gpu->ops;
	r->reader = reader;
	r->block_bytes = c->block_bytes;
	r->frames = (uint32_t)(ring_bytes / c->block_bytes);
	r->most = most;
	r->planes = calloc(c->n_planes, sizeof(*r->planes));
	r->order = calloc(c->n_planes, sizeof(*r->order));
	r->place = calloc(c->n_planes, sizeof(*r->place));
	r->owners = calloc(c->n_planes, sizeof(*r->owners));
	r->entries = calloc(most, sizeof(*r->entries));
	r->src = calloc(most, sizeof(*r->src));
	r->dst = calloc(most, sizeof(*r->dst));
	r->wanted = calloc(most, sizeof(*r->wanted));
	r->rows = calloc(most, sizeof(*r->rows));
	if (!r->planes || !r->order || !r->place || !r->owners || !r->entries || !r->src || !r->dst || !r->wanted || !r->rows)
		ret = kvt_fail(-ENOMEM, "no memory for a ring of %u frames and %u blocks", r->frames, most);
	if (!ret) {
		put_in_order(r);
		ret = create_on_device(r);
	}
	if (ret) {
		kvt_ring_destroy(r);
		return ret;
	}
	*ring = r;
	return 0;
}
