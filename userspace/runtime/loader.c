// SPDX-License-Identifier: MIT
/*
 * The loader. What is asked for becomes spans (file range, destination), sorted
 * by place; spans with small gaps between them become runs, runs are cut into
 * pieces of at most a staging buffer, and a piece that has been read is cut to
 * the spans it covers. Whole blocks of a span go straight into host memory that
 * the driver can read into. A staging buffer is free, or being read into, or being
 * copied out of: it is not reused before its event on the GPU's stream.
 *
 * What lies in the page cache comes from there, on as many cores as reads are in
 * flight, in pieces small enough to be in a cache when they leave staging. All
 * else is O_DIRECT's. docs/adr/0018-loader.md has what was measured.
 */
#include "runtime/loader.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "base/err.h"
#include "base/params.h"
#include "base/workers.h"
#include "runtime/build.h"
#include "runtime/load_io.h"

#define ALIGN	      4096u /* of direct reads; a file system that wants more refuses the first one */
#define PIECE_BYTES   (4u << 20)
#define PIECE_MIN     (256u << 10)
#define CACHED_BYTES  (1u << 20) /* the most of a piece from the page cache */
#define DEPTH	      4u /* one a core, from here */
#define DEPTH_CORES   8u /* to here */
#define STRAIGHT_MIN  (256u << 10) /* whole blocks of a span below which staging, with its neighbours, is better */
#define GAP_BYTES     (128u << 10) /* read over a smaller gap: it costs less than another read */
#define CACHE_SAMPLES 64	   /* places asked of the page cache for each shard */
#define PAGE	      4096u /* of the page cache, at least */

struct span {
	uint32_t shard;
	uint64_t offset, bytes;
	uint8_t *host;
	kvt_dptr device;
};

struct source {
	uint32_t mode;	/* enum kvt_load_mode; AUTO until it is opened */
	int direct_fd;	/* or -1 */
	uint32_t memory_align; /* that direct reads want of their destination */
	uint8_t *map;	/* or NULL */
};

struct load {
	const struct kvt_weights *w;
	struct kvt_load_params params;
	struct kvt_budget *budget;
	struct kvt_gpu *gpu;
	struct kvt_load_report report;
	struct span *spans;
	struct source *sources; /* by shard */
	uint64_t done, total;

	/* the next piece */
	uint32_t span; /* the first that ends behind @at */
	uint32_t run_end_span; /* the first behind the run */
	uint64_t at, run_end; /* equal: no run */

	struct kvt_load_io io;
	bool io_open;
	kvt_stream stream;
	bool stream_open, stream_idle;
	struct kvt_load_slot slots[KVT_LOAD_DEPTH_MAX];
	uint32_t depth, n_events;
	uint64_t piece_bytes;
	uint8_t *staging;
	bool staging_host_alloc, staging_registered;
};

/* ---- what is asked for ---- */

static int by_place(const void *a, const void *b)
{
	const struct span *x = a, *y = b;

	if (x->shard != y->shard)
		return x->shard < y->shard ? -1 : 1;
	if (x->offset != y->offset)
		return x->offset < y->offset ? -1 : 1;
	return (x->host > y->host) - (x->host < y->host);
}

/* Neighbours in the file that are neighbours in memory are one span. */
static uint32_t join(struct span *s, uint32_t n)
{
	uint32_t out = 0;

	for (uint32_t i = 1; i < n; i++) {
		struct span *a = &s[out];
		const struct span *b = &s[i];

		if (a->shard == b->shard && a->offset + a->bytes == b->offset &&
		    (a->host ? a->host + a->bytes == b->host : b->device && a->device + a->bytes == b->device))
			a->bytes += b->bytes;
		else
			s[++out] = *b;
	}
	return n ? out + 1 : 0;
}

/* Device memory that is the host's needs no copy engine. Whether it is the device's at all, the device says. */
static int reachable(struct load *l, struct span *s)
{
	uint8_t byte;
	int err = l->gpu->ops->copy_d2h(l->gpu, &byte, s->device, 1);

	if (!err)
		err = l->gpu->ops->copy_d2h(l->gpu, &byte, s->device + s->bytes - 1, 1);
	s->host = (uint8_t *)(uintptr_t)s->device;
	s->device = 0;
	return err;
}

/* @t is one of @w's: told by where it is, before anything of it is read. */
static bool tensor_of(const struct kvt_weights *w, const struct kvt_tensor *t)
{
	uintptr_t at = (uintptr_t)t - (uintptr_t)w->tensors;

	return t && at < w->n_tensors * sizeof(*t) && at % sizeof(*t) == 0;
}

static int plan(struct load *l, const struct kvt_load_item *items, uint32_t n)
{
	uint32_t n_spans = 0;
	int err;

	l->spans = calloc((size_t)n + 1, sizeof(*l->spans));
	l->sources = calloc((size_t)l->w->n_shards, sizeof(*l->sources));
	if (!l->spans || !l->sources)
		return kvt_fail(-ENOMEM, "%s: no memory for a plan of %u tensors", l->w->path, n);
	for (uint32_t i = 0; i < l->w->n_shards; i++)
		l->sources[i].direct_fd = -1;
	for (uint32_t i = 0; i < n; i++) {
		const struct kvt_tensor *t = items[i].tensor;

		if (!tensor_of(l->w, t))
			return kvt_fail(-EINVAL, "%s: the tensor of item %u is %s", l->w->path, i, t ? "of other weights" : "NULL");
		if (!t->bytes)
			continue;
		if (!items[i].host == !items[i].device || (items[i].device && !l->gpu))
			return kvt_fail(-EINVAL, "%s: tensor \"%s\" needs one destination: host memory, or device memory and a GPU",
					l->w->path, t->name);
		l->spans[n_spans] = (struct span){ t->shard, t->offset, t->bytes, items[i].host, items[i].device };
		if (items[i].device && l->gpu->host_readable) {
			err = reachable(l, &l->spans[n_spans]);
			if (err)
				return err;
		}
		n_spans++;
		l->total += t->bytes;
	}
	qsort(l->spans, n_spans, sizeof(*l->spans), by_place);
	n_spans = join(l->spans, n_spans);
	l->spans[n_spans].shard = UINT32_MAX; /* ends every walk */
	return 0;
}

static uint64_t span_end(const struct span *s)
{
	return s->offset + s->bytes;
}

/* The run that begins at span @first: its end, and the span behind it. */
static uint64_t run_from(const struct load *l, uint32_t first, uint32_t *behind)
{
	const struct span *s = &l->spans[first];
	uint64_t end = span_end(s);
	uint32_t i = first + 1;

	for (; l->spans[i].shard == s->shard && l->spans[i].offset <= end + GAP_BYTES; i++)
		if (span_end(&l->spans[i]) > end)
			end = span_end(&l->spans[i]);
	*behind = i;
	return end;
}

/* ---- how a shard is read ---- */

static const char *fs_name(int fd, char buf[24])
{
	static const struct {
		uint32_t magic;
		const char *name;
	} known[] = { { 0x01021994, "tmpfs" }, { 0x858458f6, "ramfs" }, { 0x794c7630, "overlayfs" },
		      { 0x6969, "nfs" },       { 0x65735546, "fuse" },	{ 0x2fc12fc1, "zfs" },
		      { 0x01021997, "9p" },    { 0xef53, "ext4" } };
	struct statfs fs;

	if (fstatfs(fd, &fs))
		return "the file system";
	for (size_t i = 0; i < sizeof(known) / sizeof(*known); i++)
		if (known[i].magic == (uint32_t)fs.f_type)
			return known[i].name;
	snprintf(buf, 24, "file system 0x%lx", (unsigned long)fs.f_type);
	return buf;
}

static int map_shard(struct load *l, uint32_t shard)
{
	const struct kvt_shard *s = &l->w->shards[shard];
	struct source *src = &l->sources[shard];
	void *map = mmap(NULL, s->bytes, PROT_READ, MAP_SHARED, s->fd, 0);

	if (map == MAP_FAILED)
		return kvt_fail(-errno, "%s: mapping %" PRIu64 " bytes: %m", s->path, s->bytes);
	madvise(map, s->bytes, MADV_SEQUENTIAL);
	src->map = map;
	src->mode = KVT_LOAD_MMAP;
	return 0;
}

/* O_DIRECT refused, at open or at the first read. */
static int fall_back(struct load *l, uint32_t shard)
{
	const struct kvt_shard *s = &l->w->shards[shard];
	char buf[24];

	if (l->sources[shard].mode == KVT_LOAD_MMAP)
		return 0; /* another piece came here first */
	kvt_log(KVT_LOG_WARN, "%s: %s has no O_DIRECT here: loading through mmap", s->path, fs_name(s->fd, buf));
	return map_shard(l, shard);
}

/*
 * How memory must lie for direct reads of @fd: many drivers take any 4 bytes.
 * STATX_DIOALIGN by number: younger than the C libraries this builds with.
 */
static uint32_t memory_align(int fd)
{
	union {
		struct statx stx;
		uint32_t raw[64];
	} u = { .raw = { 0 } };

	_Static_assert(sizeof(u) == 256, "the kernel's struct statx");
	if (statx(fd, "", AT_EMPTY_PATH, 0x2000, &u.stx) || !(u.stx.stx_mask & 0x2000))
		return ALIGN;
	return u.raw[38] && u.raw[38] < ALIGN ? u.raw[38] : ALIGN;
}

static int open_direct(struct load *l, uint32_t shard)
{
	const struct kvt_shard *s = &l->w->shards[shard];
	struct source *src = &l->sources[shard];
	struct stat a, b;

	src->direct_fd = open(s->path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_DIRECT);
	if (src->direct_fd < 0 && errno == EINVAL)
		return fall_back(l, shard);
	if (src->direct_fd < 0 || fstat(s->fd, &a) || fstat(src->direct_fd, &b))
		return kvt_fail(-errno, "%s: opening with O_DIRECT: %m", s->path);
	if (a.st_dev != b.st_dev || a.st_ino != b.st_ino)
		return kvt_fail(-ESTALE, "%s: the file was replaced while it was read", s->path);
	src->memory_align = memory_align(src->direct_fd);
	src->mode = KVT_LOAD_DIRECT;
	return 0;
}

/*
 * Whether most of a shard's wanted bytes are in the page cache: asked of a sample, by reads that may not wait. A page is
 * asked for once: the kernel begins to read one that it does not have, and soon has it.
 */
static bool cached(const struct load *l, uint32_t first)
{
	uint32_t shard = l->spans[first].shard, hits = 0, n = 0;
	uint64_t bytes = 0, next = 0, at = 0, asked = UINT64_MAX;
	char byte;

	for (uint32_t i = first; l->spans[i].shard == shard; i++)
		bytes += l->spans[i].bytes;
	/* no readahead for a question */
	posix_fadvise(l->w->shards[shard].fd, 0, 0, POSIX_FADV_RANDOM);
	for (uint32_t i = first; l->spans[i].shard == shard; at += l->spans[i++].bytes)
		for (; next < at + l->spans[i].bytes; next += bytes / CACHE_SAMPLES + 1) {
			struct iovec one = { &byte, 1 };
			uint64_t offset = l->spans[i].offset + (next - at);

			if (offset / PAGE == asked)
				continue;
			asked = offset / PAGE;
			n++;
			hits += preadv2(l->w->shards[shard].fd, &one, 1, (off_t)offset, RWF_NOWAIT) == 1;
		}
	posix_fadvise(l->w->shards[shard].fd, 0, 0, POSIX_FADV_NORMAL);
	return hits * 4 >= n * 3;
}

/* What the page cache has comes from there; all else is O_DIRECT's, small tensors too: docs/bench/loader.md. */
static uint32_t choose_mode(const struct load *l, uint32_t first)
{
	if (l->params.mode != KVT_LOAD_AUTO)
		return l->params.mode;
	return cached(l, first) ? KVT_LOAD_BUFFERED : KVT_LOAD_DIRECT;
}

static int open_source(struct load *l, uint32_t first)
{
	uint32_t shard = l->spans[first].shard;
	int err = 0;

	switch (choose_mode(l, first)) {
	case KVT_LOAD_MMAP:
		err = map_shard(l, shard);
		break;
	case KVT_LOAD_DIRECT:
		err = open_direct(l, shard);
		break;
	default:
		l->sources[shard].mode = KVT_LOAD_BUFFERED;
	}
	return err;
}

/* ---- staging ---- */

static uint64_t staging_need(const struct load *l)
{
	return l->depth * (l->piece_bytes + (l->params.io == KVT_IO_URING ? 0 : KVT_LOAD_STACK));
}

/* What the page cache has is copied by as many cores as reads are in flight. */
static uint32_t depth_here(void)
{
	uint32_t cores = kvt_cores();

	return cores < DEPTH ? DEPTH : cores > DEPTH_CORES ? DEPTH_CORES : cores;
}

/* Over the budget: smaller reads, then fewer. */
static int charge_staging(struct load *l)
{
	struct kvt_budget *b = l->budget;

	while (b && kvt_budget_charge(b, staging_need(l))) {
		if (l->piece_bytes / 2 >= PIECE_MIN)
			l->piece_bytes = l->piece_bytes / 2 & ~(uint64_t)(ALIGN - 1);
		else if (l->depth > 1)
			l->depth /= 2;
		else
			return kvt_fail(-ENOMEM, "loading weights needs %" PRIu64 " bytes of staging, the budget has %" PRIu64
					" left of %" PRIu64 ": raise the RAM budget", staging_need(l),
					b->limit - atomic_load(&b->used), b->limit);
	}
	l->report.staging_bytes = staging_need(l);
	return 0;
}

static int alloc_staging(struct load *l)
{
	uint64_t bytes = l->depth * l->piece_bytes;
	void *p = NULL;

	if (l->gpu && !l->gpu->ops->host_alloc(l->gpu, bytes, &p)) {
		l->staging_host_alloc = true;
	} else {
		p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		if (p == MAP_FAILED)
			return kvt_fail(-ENOMEM, "no memory for %" PRIu64 " bytes of staging", bytes);
		madvise(p, bytes, MADV_HUGEPAGE);
		if (l->gpu && !l->gpu->ops->host_register(l->gpu, p, bytes))
			l->staging_registered = true;
		else if (l->gpu)
			kvt_log(KVT_LOG_WARN, "weights: staging is not pinned, copies to the GPU will be slower: %s",
				kvt_last_error());
	}
	l->report.pinned = l->staging_host_alloc || l->staging_registered;
	l->staging = p;
	for (uint32_t i = 0; i < l->depth; i++)
		l->slots[i].buf = l->staging + i * l->piece_bytes;
	return 0;
}

static void free_staging(struct load *l)
{
	uint64_t bytes = l->depth * l->piece_bytes;

	if (l->staging_host_alloc) {
		l->gpu->ops->host_free(l->gpu, l->staging);
	} else if (l->staging) {
		if (l->staging_registered)
			l->gpu->ops->host_unregister(l->gpu, l->staging);
		munmap(l->staging, bytes);
	}
	if (l->budget && l->report.staging_bytes)
		kvt_budget_release(l->budget, l->report.staging_bytes);
}

static int open_gpu(struct load *l)
{
	const struct kvt_gpu_ops *ops = l->gpu->ops;
	int err;

	err = ops->bind_thread(l->gpu);
	if (!err)
		err = ops->stream_create(l->gpu, &l->stream);
	if (err)
		return err;
	l->stream_open = true;
	for (; l->n_events < l->depth; l->n_events++) {
		err = ops->event_create(l->gpu, &l->slots[l->n_events].copied);
		if (err)
			return err;
	}
	return 0;
}

/* ---- pieces ---- */

static int progress(struct load *l, uint64_t bytes)
{
	l->done += bytes;
	if (l->params.progress && l->params.progress(l->params.user, l->done, l->total))
		return kvt_fail(-ECANCELED, "%s: loading was cancelled at %" PRIu64 " of %" PRIu64 " bytes", l->w->path, l->done,
				l->total);
	return 0;
}

/* How the pieces of a shard begin in the file and lie in memory, and the most of one. */
struct piece {
	uint64_t file_align, memory_align, bytes;
};

/* The range of whole blocks that span @s can take without staging; empty where it cannot. */
static bool straight(const struct span *s, struct piece p, uint64_t *begin, uint64_t *end)
{
	*begin = (s->offset + p.file_align - 1) & ~(p.file_align - 1);
	*end = span_end(s) & ~(p.file_align - 1);
	return s->host && ((uintptr_t)s->host + (*begin - s->offset)) % p.memory_align == 0 &&
	       *end >= *begin + STRAIGHT_MIN;
}

/*
 * The piece at l->at: [*begin, *end). Returns the span that it goes straight
 * into, or NULL for a staged piece, which ends where a straight one can begin.
 */
static const struct span *cut(const struct load *l, struct piece p, uint64_t *begin, uint64_t *end)
{
	*begin = l->at & ~(p.file_align - 1);
	*end = *begin + p.bytes < l->run_end ? *begin + p.bytes : l->run_end;
	for (const struct span *s = &l->spans[l->span]; s < &l->spans[l->run_end_span] && s->offset < *end; s++) {
		uint64_t first, last;

		if (!straight(s, p, &first, &last) || last <= l->at)
			continue;
		if (l->at < first) {
			*end = first < *end ? first : *end;
			break;
		}
		*begin = l->at;
		*end = last < *end ? last : *end;
		return s;
	}
	return NULL;
}

/* Cut the next piece for @slot. Returns 1, 0 at the end. */
static int next_piece(struct load *l, struct kvt_load_slot *slot)
{
	const struct span *into;
	struct piece p = { 1, 1, l->piece_bytes };
	const struct kvt_shard *s;
	uint64_t begin, end;
	bool direct;
	int err;

	if (l->at == l->run_end) {
		l->span = l->run_end_span;
		if (l->spans[l->span].shard == UINT32_MAX)
			return 0;
		l->at = l->spans[l->span].offset;
		l->run_end = run_from(l, l->span, &l->run_end_span);
	}
	slot->shard = l->spans[l->span].shard;
	if (l->sources[slot->shard].mode == KVT_LOAD_AUTO) {
		err = open_source(l, l->span);
		if (err)
			return err;
		l->report.shards[l->sources[slot->shard].mode]++;
	}
	s = &l->w->shards[slot->shard];
	direct = l->sources[slot->shard].mode == KVT_LOAD_DIRECT;
	slot->cached = l->sources[slot->shard].mode == KVT_LOAD_BUFFERED;
	if (direct)
		p = (struct piece){ ALIGN, l->sources[slot->shard].memory_align, l->piece_bytes };
	else if (slot->cached && p.bytes > CACHED_BYTES)
		p.bytes = CACHED_BYTES;
	into = cut(l, p, &begin, &end);
	slot->into = into ? into->host + (begin - into->offset) : slot->buf;
	slot->offset = begin;
	slot->ask = (end - begin + p.file_align - 1) & ~(p.file_align - 1);
	slot->want = slot->ask < s->bytes - begin ? slot->ask : s->bytes - begin;
	slot->got = 0;
	slot->fd = direct ? l->sources[slot->shard].direct_fd : s->fd;
	slot->first = l->span;
	l->report.read_bytes += slot->want;
	l->at = end;
	while (l->span < l->run_end_span && span_end(&l->spans[l->span]) <= end)
		l->span++;
	return 1;
}

/*
 * Where the file has ended meanwhile, a load from the mapping would be SIGBUS;
 * a copy by the kernel is -EFAULT. Where such copies are denied (a seccomp
 * profile), plain reads give the same bytes.
 */
static int copy_mapped(struct load *l, uint32_t shard, void *dst, uint64_t offset, uint64_t bytes)
{
	int err = kvt_load_mapped(dst, l->sources[shard].map + offset, bytes);

	if (err == -EPERM || err == -ENOSYS)
		return kvt_shard_read(l->w, shard, offset, dst, bytes);
	if (!err)
		return 0;
	err = kvt_shard_unchanged(l->w, shard);
	return err ? err : kvt_fail(-EIO, "%s: reading the mapping at %" PRIu64 " failed", l->w->shards[shard].path, offset);
}

/* Hand what the piece covers to its destinations: from staging, or from the mapping. */
static int deliver(struct load *l, struct kvt_load_slot *slot)
{
	bool mapped = l->sources[slot->shard].map && slot->got < slot->want;
	uint64_t piece_end = slot->offset + slot->want, bytes = 0;
	bool to_gpu = false;
	int err = 0;

	slot->copying = false;
	if (slot->into != slot->buf) {
		if (mapped)
			err = copy_mapped(l, slot->shard, slot->into, slot->offset, slot->want);
		return err ? err : progress(l, slot->want);
	}
	for (const struct span *s = &l->spans[slot->first]; s->shard == slot->shard && s->offset < piece_end && !err; s++) {
		uint64_t from = s->offset > slot->offset ? s->offset : slot->offset;
		uint64_t to = span_end(s) < piece_end ? span_end(s) : piece_end;
		uint8_t *staged = slot->buf + (from - slot->offset);

		if (to <= from)
			continue;
		bytes += to - from;
		if (mapped)
			err = copy_mapped(l, slot->shard, s->host ? s->host + (from - s->offset) : staged, from, to - from);
		else if (s->host)
			memcpy(s->host + (from - s->offset), staged, to - from);
		if (s->host || err)
			continue;
		err = l->gpu->ops->copy_h2d_async(l->gpu, s->device + (from - s->offset), staged, to - from, l->stream);
		to_gpu = true;
	}
	if (to_gpu && !err)
		err = l->gpu->ops->event_record(l->gpu, slot->copied, l->stream);
	slot->copying = to_gpu && !err;
	return err ? err : progress(l, bytes);
}

static int start_piece(struct load *l, struct kvt_load_slot *slot)
{
	if (l->sources[slot->shard].mode == KVT_LOAD_MMAP)
		return deliver(l, slot);
	return kvt_load_io_submit(&l->io, slot);
}

/* A read has ended. Returns 1 if the slot is free (or copying) now, 0 if it reads on. */
static int end_read(struct load *l, struct kvt_load_slot *slot)
{
	const struct kvt_shard *s = &l->w->shards[slot->shard];
	bool direct = slot->fd != s->fd;
	uint64_t got = slot->got;
	int err;

	if (slot->result == -EINTR || slot->result == -EAGAIN)
		return kvt_load_io_submit(&l->io, slot);
	if (direct && !slot->got && (slot->result == -EINVAL || slot->result == -EOPNOTSUPP)) {
		if (l->sources[slot->shard].mode == KVT_LOAD_DIRECT) {
			l->report.shards[KVT_LOAD_DIRECT]--;
			l->report.shards[KVT_LOAD_MMAP]++;
		}
		err = fall_back(l, slot->shard);
		if (!err)
			err = deliver(l, slot);
		return err ? err : 1;
	}
	if (slot->result < 0)
		return kvt_fail(slot->result, "%s: reading %" PRIu64 " bytes at %" PRIu64 ": %s", s->path,
				slot->ask - slot->got, slot->offset + slot->got, strerror(-slot->result));
	got += slot->result;
	if (got >= slot->want) {
		slot->got = got;
		err = deliver(l, slot);
		return err ? err : 1;
	}
	/* short: go on from there, from whole blocks if direct */
	if (direct)
		got &= ~(uint64_t)(ALIGN - 1);
	if (got == slot->got) {
		err = kvt_shard_unchanged(l->w, slot->shard);
		return err ? err : kvt_fail(-EIO, "%s: reading at %" PRIu64 " gives no data, the file has %" PRIu64 " bytes",
					    s->path, slot->offset + got, s->bytes);
	}
	slot->got = got;
	return kvt_load_io_submit(&l->io, slot);
}

/* Copies that have ended free their slots; with @wait, the oldest one's end is waited for. */
static int reap_copies(struct load *l, struct kvt_load_slot **idle, uint32_t *n_idle, struct kvt_load_slot **copying,
		       uint32_t *n_copying, bool wait)
{
	while (*n_copying) {
		struct kvt_load_slot *slot = copying[0];
		int err = wait ? l->gpu->ops->event_sync(l->gpu, slot->copied) :
				 l->gpu->ops->event_query(l->gpu, slot->copied);

		if (err < 0)
			return err;
		if (!wait && !err)
			break;
		slot->copying = false;
		idle[(*n_idle)++] = slot;
		memmove(copying, copying + 1, --*n_copying * sizeof(*copying));
		wait = false;
	}
	return 0;
}

static int run(struct load *l)
{
	struct kvt_load_slot *idle[KVT_LOAD_DEPTH_MAX], *copying[KVT_LOAD_DEPTH_MAX], *slot;
	uint32_t n_idle = 0, n_copying = 0;
	bool more = true;
	int err;

	for (uint32_t i = 0; i < l->depth; i++)
		idle[n_idle++] = &l->slots[i];
	while (more || l->io.in_flight) {
		while (more && n_idle) {
			slot = idle[n_idle - 1];
			err = next_piece(l, slot);
			if (err < 0)
				return err;
			more = err;
			if (!more)
				break;
			err = start_piece(l, slot);
			if (err)
				return err;
			/* a mapped piece is delivered already: only its copies may hold the slot */
			if (l->sources[slot->shard].mode != KVT_LOAD_MMAP)
				n_idle--;
			else if (slot->copying)
				copying[n_copying++] = idle[--n_idle];
		}
		if (l->io.in_flight) {
			slot = kvt_load_io_wait(&l->io);
			err = end_read(l, slot);
			if (err < 0)
				return err;
			if (err && slot->copying)
				copying[n_copying++] = slot;
			else if (err)
				idle[n_idle++] = slot;
		}
		err = reap_copies(l, idle, &n_idle, copying, &n_copying, more && !n_idle && !l->io.in_flight);
		if (err)
			return err;
	}
	err = l->stream_open ? l->gpu->ops->stream_sync(l->gpu, l->stream) : 0;
	l->stream_idle = !err;
	return err;
}

/* A load is good only if every file is as it was. */
static int unchanged(const struct load *l)
{
	int err = 0;

	for (uint32_t i = 0; i < l->w->n_shards && !err; i++)
		if (l->sources[i].mode != KVT_LOAD_AUTO)
			err = kvt_shard_unchanged(l->w, i);
	return err;
}

static void finish(struct load *l)
{
	if (l->io_open)
		kvt_load_io_close(&l->io);
	if (l->stream_open) {
		if (!l->stream_idle)
			l->gpu->ops->stream_sync(l->gpu, l->stream);
		for (uint32_t i = 0; i < l->n_events; i++)
			l->gpu->ops->event_destroy(l->gpu, l->slots[i].copied);
		l->gpu->ops->stream_destroy(l->gpu, l->stream);
	}
	free_staging(l);
	for (uint32_t i = 0; l->sources && i < l->w->n_shards; i++) {
		if (l->sources[i].direct_fd >= 0)
			close(l->sources[i].direct_fd);
		if (l->sources[i].map)
			munmap(l->sources[i].map, l->w->shards[i].bytes);
	}
	free(l->sources);
	free(l->spans);
	free(l);
}

static int check_params(const struct kvt_load_params *p)
{
	if (p->mode < KVT_LOAD_MODES && p->io <= KVT_IO_THREADS && p->piece_bytes % ALIGN == 0 && p->piece_bytes <= 1u << 30 &&
	    p->depth <= KVT_LOAD_DEPTH_MAX)
		return 0;
	return kvt_fail(-EINVAL, "kvt_load: mode %u, io %u, pieces of %" PRIu64 " bytes (multiples of %u, at most 1 GiB), "
			"depth %u (at most %u)", p->mode, p->io, p->piece_bytes, ALIGN, p->depth, KVT_LOAD_DEPTH_MAX);
}

int kvt_load_charged(const struct kvt_weights *w, const struct kvt_load_item *items, uint32_t n,
		     const struct kvt_load_params *params, struct kvt_budget *budget, struct kvt_load_report *report)
{
	struct kvt_load_params p = KVT_INIT(p);
	struct load *l;
	int err = params ? kvt_params_copy(&p, sizeof(p), sizeof(p), params, "load parameters") : 0;

	if (!err)
		err = kvt_result_check(report, "load report");
	if (!err)
		err = check_params(&p);
	if (!err && n && !items)
		err = kvt_fail(-EINVAL, "kvt_load: %u items, but items is NULL", n);
	if (err)
		return err;
	l = calloc(1, sizeof(*l));
	if (!l)
		return kvt_fail(-ENOMEM, "%s: no memory for loading", w->path);
	l->w = w;
	l->params = p;
	l->budget = budget;
	l->gpu = p.gpu;
	l->piece_bytes = p.piece_bytes ? p.piece_bytes : PIECE_BYTES;
	l->depth = p.depth ? p.depth : depth_here();
	l->report.io = "none";
	err = plan(l, items, n);
	if (!err)
		err = charge_staging(l);
	if (!err)
		err = alloc_staging(l);
	if (!err && l->gpu)
		err = open_gpu(l);
	if (!err && p.mode != KVT_LOAD_MMAP) {
		err = kvt_load_io_open(&l->io, p.io, l->depth);
		l->io_open = !err;
		l->report.io = l->io.uring ? "io_uring" : "threads";
	}
	if (!err)
		err = run(l);
	if (!err)
		err = unchanged(l);
	l->report.bytes = l->done;
	if (report)
		kvt_result_copy(report, &l->report, sizeof(l->report));
	finish(l);
	return err;
}

int kvt_load(const struct kvt_weights *w, const struct kvt_load_item *items, uint32_t n,
	     const struct kvt_load_params *params, struct kvt_load_report *report)
{
	return kvt_load_charged(w, items, n, params, NULL, report);
}

/* ---- memory ---- */

/* What a plain load of an element needs; blocks are read by bytes and halves. */
static uint32_t element_align(const struct kvt_tensor *t)
{
	uint32_t block, bytes;

	kvt_dtype_block(t->dtype, &block, &bytes);
	return block == 1 ? bytes : block == 32 ? 2 : 1;
}

uint64_t kvt_load_layout(const struct kvt_weights *w, void *base, struct kvt_load_item *items)
{
	uint8_t *at = base;
	uint64_t used = 0, place, shard_begin = 0;
	uint32_t i;

	for (i = 0; i < w->n_tensors; i++) {
		const struct kvt_tensor *t = &w->tensors[i];

		/* a shard's first tensor: as far into a page as in the file */
		if (!i || t->shard != t[-1].shard)
			shard_begin = ((used + ALIGN - 1) & ~(uint64_t)(ALIGN - 1)) + t->offset % ALIGN - t->offset;
		used = shard_begin + t->offset + t->bytes;
		if (base)
			items[i] = (struct kvt_load_item){ .tensor = t, .host = at + (shard_begin + t->offset) };
	}
	for (i = 0; i < w->n_tensors; i++) {
		const struct kvt_tensor *t = &w->tensors[i];

		if (t->offset % element_align(t) == 0)
			continue;
		place = (used + 63) & ~63ull;
		used = place + t->bytes;
		if (base)
			items[i].host = at + place;
	}
	return used;
}

/* The number behind @key in a file of lines, or behind nothing in a file of one. */
static bool read_number(const char *path, const char *key, uint64_t *value)
{
	FILE *f = fopen(path, "re");
	char line[128];
	bool found = false;

	while (f && !found && fgets(line, sizeof(line), f))
		if (!strncmp(line, key, strlen(key)))
			found = sscanf(line + strlen(key), "%" SCNu64, value) == 1;
	if (f)
		fclose(f);
	return found;
}

int kvt_load_fits(uint64_t bytes, struct kvt_gpu *gpu)
{
	uint64_t left, total, limit, used, cache;
	int err;

	if (gpu) {
		err = gpu->ops->mem_info(gpu, &left, &total);
		if (err)
			return err;
		if (bytes > left)
			return kvt_fail(-ENOMEM, "the weights need %" PRIu64 " bytes of %s, which has %" PRIu64 " free of %" PRIu64,
					bytes, gpu->description, left, total);
		return 0;
	}
	/* the cgroup's page cache gives way */
	if (read_number("/sys/fs/cgroup/memory.max", "", &limit) &&
	    read_number("/sys/fs/cgroup/memory.current", "", &used) &&
	    read_number("/sys/fs/cgroup/memory.stat", "file ", &cache)) {
		used = used > cache ? used - cache : 0;
		left = limit > used ? limit - used : 0;
		if (bytes > left)
			return kvt_fail(-ENOMEM, "the weights need %" PRIu64 " bytes of RAM, this cgroup has %" PRIu64
					" left of %" PRIu64 " (memory.max)", bytes, left, limit);
	}
	if (read_number("/proc/meminfo", "MemAvailable:", &left) && bytes / 1024 > left)
		return kvt_fail(-ENOMEM, "the weights need %" PRIu64 " bytes of RAM, %" PRIu64 " are available", bytes, left * 1024);
	return 0;
}

int kvt_load_image(const struct kvt_weights *w, const struct kvt_load_params *params, struct kvt_budget *budget,
		   struct kvt_load_image *image, struct kvt_load_report *report)
{
	uint64_t bytes = kvt_load_layout(w, NULL, NULL);
	void *base;
	int err;

	*image = (struct kvt_load_image){ 0 };
	err = kvt_load_fits(bytes, NULL);
	if (err)
		return err;
	if (budget && kvt_budget_charge(budget, bytes))
		return kvt_fail(-ENOMEM, "%s: the weights need %" PRIu64 " bytes, the budget has %" PRIu64 " left of %" PRIu64
				": raise the RAM budget", w->path, bytes,
				budget->limit - atomic_load(&budget->used), budget->limit);
	image->budget = budget;
	image->bytes = bytes;
	image->items = calloc((size_t)w->n_tensors + 1, sizeof(*image->items));
	/* one byte more: a model may have none */
	base = mmap(NULL, bytes + 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (!image->items || base == MAP_FAILED) {
		err = kvt_fail(-ENOMEM, "%s: no memory for %" PRIu64 " bytes of weights", w->path, bytes);
		goto free_image;
	}
	image->base = base;
	madvise(base, bytes + 1, MADV_HUGEPAGE);
	kvt_load_layout(w, base, image->items);
	err = kvt_load_charged(w, image->items, w->n_tensors, params, budget, report);
	if (!err)
		return 0;
free_image:
	kvt_load_image_free(image);
	return err;
}

void kvt_load_image_free(struct kvt_load_image *image)
{
	if (image->base)
		munmap(image->base, image->bytes + 1);
	if (image->budget)
		kvt_budget_release(image->budget, image->bytes);
	free(image->items);
	*image = (struct kvt_load_image){ 0 };
}
