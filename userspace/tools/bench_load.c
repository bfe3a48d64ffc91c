// SPDX-License-Identifier: MIT
/*
 * kvtier bench load: weights from a file that is dropped from the page cache
 * before each load, or lies in it, into host memory and a GPU's; each beside
 * what one would have without a loader. The two of a pair take turns in going first.
 */
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/err.h"
#include "base/workers.h"
#include "kvtier-arena.h"
#include "kvtier.h"
#include "runtime/loader.h"
#include "tools/measure.h"
#include "tools/tools.h"

#define ROUNDS_MAX 64
#define TENSORS	   64 /* of the file that is made */
#define HEADER	   8192 /* of that file: its tensors begin 8 bytes into a page, as they may in any file */
#define PIECE	   (4u << 20)
#define PLACES	   16 /* looked up in the page cache */
#define READERS	   4u /* pieces in flight of the plain reader, as of the loader */

static const char usage[] =
	"usage: kvtier bench load [--file F | --bytes S] [--disk-dir D] [--backend NAME] [--device N]\n"
	"                         [--cold | --cached] [--rounds N] [--json]\n"
	"\n"
	"  --file F        weights to load (default: a file is made, without a name, so that it is gone afterwards)\n"
	"  --bytes S       size of the file that is made (default: 2G)\n"
	"  --disk-dir D    where (default: $TMPDIR or /var/tmp)\n"
	"  --backend NAME  whose memory to load into, beside the host's: cpu (default), cuda, auto\n"
	"  --device N      which GPU (default: 0)\n"
	"  --cold          only from the disk: the file is dropped from the page cache before each load\n"
	"  --cached        only from the page cache\n"
	"  --rounds N      pairs of each, medians are printed (default: 5)\n"
	"  --json          a JSON list instead of a table\n";

struct bench {
	const char *path, *dir;
	int made; /* descriptor of the file that was made, or -1 */
	uint64_t bytes; /* to make */
	bool cold, cached, json;
	uint32_t backend, device, rounds;
	struct kvt_weights *w;
	int fd; /* of its first shard, as that is named */
	uint64_t file_bytes;
	struct kvt_gpu *gpu;
	uint64_t memory_bytes;
	uint8_t *host; /* where loads go: used before, so that no page comes for the first time */
	kvt_dptr memory;
	struct kvt_load_item *host_items, *items;
	struct kvt_load_report report; /* of the last load */
	json_t *rows;
};

/* ---- the file ---- */

static int write_all(int fd, const void *data, uint64_t bytes, uint64_t at)
{
	while (bytes) {
		ssize_t n = pwrite(fd, data, bytes, (off_t)at);

		if (n < 0)
			return -errno;
		data = (const uint8_t *)data + n;
		at += (uint64_t)n;
		bytes -= (uint64_t)n;
	}
	return 0;
}

static int write_tensors(int fd, uint64_t tensor)
{
	uint64_t *piece = malloc(PIECE), z = 1, length = htole64(HEADER);
	char *header = malloc(HEADER + 1);
	size_t n = 0;
	int ret = piece && header ? write_all(fd, &length, 8, 0) : -ENOMEM;

	for (uint64_t i = 0; i < TENSORS && !ret; i++)
		n += (size_t)sprintf(header + n, "%c\"t%" PRIu64 "\":{\"dtype\":\"BF16\",\"shape\":[%" PRIu64 "],"
				     "\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}", i ? ',' : '{', i, tensor / 2, i * tensor,
				     (i + 1) * tensor);
	if (!ret) {
		memset(header + n, ' ', HEADER - n);
		header[n] = '}';
		ret = write_all(fd, header, HEADER, 8);
	}
	for (uint64_t at = 0; at < TENSORS * tensor && !ret; at += PIECE) {
		for (uint64_t i = 0; i < PIECE / 8; i++) /* nothing that a disk could make smaller */
			piece[i] = z = z * 6364136223846793005ull + 1442695040888963407ull;
		ret = write_all(fd, piece, TENSORS * tensor - at < PIECE ? TENSORS * tensor - at : PIECE, 8 + HEADER + at);
	}
	free(header);
	free(piece);
	return ret;
}

/* A safetensors file without a name: gone whatever happens. */
static int make_file(struct bench *b, char path[64])
{
	uint64_t tensor = b->bytes / TENSORS / 2 * 2;
	char *name = NULL;
	int ret = 0;

	if (asprintf(&name, "%s/kvtier-load-XXXXXX", b->dir) < 0)
		return kvt_fail(-ENOMEM, "no memory for a name");
	b->made = mkostemp(name, O_CLOEXEC);
	if (b->made < 0)
		ret = kvt_fail(-errno, "%s: %m (--disk-dir)", name);
	else
		unlink(name);
	free(name);
	if (ret)
		return ret;
	ret = -posix_fallocate(b->made, 0, (off_t)(8 + HEADER + TENSORS * tensor)); /* its room, before it is filled */
	if (!ret)
		ret = write_tensors(b->made, tensor);
	if (ret)
		return kvt_fail(ret, "%s: making a file of %" PRIu64 " bytes: %s (--bytes, --disk-dir)", b->dir, b->bytes,
				strerror(-ret));
	snprintf(path, 64, "/proc/self/fd/%d", b->made);
	b->path = path;
	return 0;
}

/* Take the file out of the page cache, or read it into it. */
static int place_file(const struct bench *b, bool cold)
{
	char *buf;
	struct iovec one;
	int ret = 0, there = 0;

	buf = malloc(PIECE);
	if (!buf)
		return kvt_fail(-ENOMEM, "no memory for reading");
	one = (struct iovec){ buf, 1 };
	if (cold) {
		/* dirty pages are not dropped; fsync() would wait for other files too */
		sync_file_range(b->fd, 0, 0, SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
		posix_fadvise(b->fd, 0, 0, POSIX_FADV_DONTNEED);
		posix_fadvise(b->fd, 0, 0, POSIX_FADV_RANDOM); /* a question brings no readahead */
		for (uint64_t i = 0; i < PLACES; i++)
			there += preadv2(b->fd, &one, 1, (off_t)(b->file_bytes / PLACES * i), RWF_NOWAIT) == 1;
		if (there > PLACES / 2)
			ret = kvt_fail(-EBUSY, "%s stays in the page cache, by its file system or for another process "
				       "(--cached loads from there)", b->path);
		posix_fadvise(b->fd, 0, 0, POSIX_FADV_NORMAL);
	} else {
		for (uint64_t at = 0; at < b->file_bytes && !ret; at += PIECE)
			if (pread(b->fd, buf, PIECE, (off_t)at) <= 0)
				ret = kvt_fail(-EIO, "%s cannot be read at %" PRIu64, b->path, at);
	}
	free(buf);
	return ret;
}

/* ---- ways to load ---- */

struct plain {
	int fd;
	uint64_t bytes;
	uint8_t *buf;
	bool failed;
};

static void plain_piece(void *arg, uint32_t worker, uint32_t i)
{
	struct plain *p = arg;
	uint64_t at = (uint64_t)i * PIECE, end = at + PIECE < p->bytes ? at + PIECE : p->bytes;
	ssize_t n = 1;

	for (; at < end && n > 0; at += (uint64_t)n)
		n = pread(p->fd, p->buf + (size_t)worker * PIECE, PIECE, (off_t)at);
	if (n <= 0)
		p->failed = true;
}

/* The whole file by O_DIRECT, into the same few buffers again and again. */
static int plain_reader(struct bench *b)
{
	struct plain p = { .fd = open(b->path, O_RDONLY | O_DIRECT | O_CLOEXEC), .bytes = b->file_bytes };
	struct kvt_workers *w = NULL;
	int ret;

	if (p.fd < 0)
		return kvt_fail(-errno, "%s: opening with O_DIRECT: %m (--cached does without)", b->path);
	p.buf = mmap(NULL, READERS * PIECE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	ret = p.buf == MAP_FAILED ? kvt_fail(-ENOMEM, "no memory for reading") : kvt_workers_create(READERS, &w);
	if (!ret) {
		madvise(p.buf, READERS * PIECE, MADV_HUGEPAGE);
		kvt_workers_run(w, (uint32_t)((p.bytes + PIECE - 1) / PIECE), plain_piece, &p);
		kvt_workers_destroy(w);
		if (p.failed)
			ret = kvt_fail(-EIO, "%s: a plain read failed", b->path);
	}
	if (p.buf != MAP_FAILED)
		munmap(p.buf, READERS * PIECE);
	close(p.fd);
	return ret;
}

/* The whole file mapped and copied, to the GPU or (@gpu NULL) to host memory. */
static int copy_map(struct bench *b, struct kvt_gpu *gpu)
{
	uint8_t *map = mmap(NULL, b->file_bytes, PROT_READ, MAP_PRIVATE, b->fd, 0);
	int ret = 0;

	if (map == MAP_FAILED)
		return kvt_fail(-errno, "%s: mmap: %m", b->path);
	if (gpu)
		ret = gpu->ops->copy_h2d(gpu, b->memory, map, b->file_bytes);
	else
		memcpy(b->host, map, b->file_bytes);
	munmap(map, b->file_bytes);
	return ret;
}

static int copy_map_host(struct bench *b)
{
	return copy_map(b, NULL);
}

static int copy_map_gpu(struct bench *b)
{
	return copy_map(b, b->gpu);
}

static int load_host(struct bench *b, enum kvt_load_mode mode)
{
	struct kvt_load_params p = { .size = sizeof(p), .mode = mode };

	return kvt_load(b->w, b->host_items, b->w->n_tensors, &p, &b->report);
}

static int load_fast(struct bench *b)
{
	return load_host(b, KVT_LOAD_AUTO);
}

static int load_mmap(struct bench *b)
{
	return load_host(b, KVT_LOAD_MMAP);
}

static int load_gpu(struct bench *b)
{
	struct kvt_load_params p = { .size = sizeof(p), .gpu = b->gpu };

	return kvt_load(b->w, b->items, b->w->n_tensors, &p, &b->report);
}

/* ---- pairs ---- */

static const struct row {
	const char *what, *ceiling;
	bool cold;
	int (*load)(struct bench *b), (*beside)(struct bench *b);
} rows[] = {
	{ "cold, host memory", "plain O_DIRECT reader", true, load_fast, plain_reader },
	{ "cold, host memory, --no-fast-load", "plain O_DIRECT reader", true, load_mmap, plain_reader },
	{ "cold, GPU memory", "plain O_DIRECT reader", true, load_gpu, plain_reader },
	{ "cold, GPU memory", "mmap and one copy", true, load_gpu, copy_map_gpu },
	{ "cached, host memory", "mmap and one copy", false, load_fast, copy_map_host },
	{ "cached, GPU memory", "mmap and one copy", false, load_gpu, copy_map_gpu },
};

/* MB/s of one of a pair. */
static int timed(struct bench *b, const struct row *row, int (*work)(struct bench *), double *rate)
{
	double start;
	int ret = row->cold ? place_file(b, true) : 0;

	start = now();
	if (!ret)
		ret = work(b);
	*rate = (double)b->file_bytes / (now() - start) / 1e6;
	return ret;
}

static const char *how(const struct bench *b)
{
	static const char *const modes[KVT_LOAD_MODES] = { "", "direct reads", "reads from the page cache", "mmap" };

	for (uint32_t m = 0; m < KVT_LOAD_MODES; m++)
		if (b->report.shards[m])
			return modes[m];
	return "nothing to read";
}

static void report(struct bench *b, const struct row *row, double *got, double *beside)
{
	double ratio[ROUNDS_MAX], r, g, c;
	char what[64];

	for (uint32_t i = 0; i < b->rounds; i++)
		ratio[i] = got[i] / beside[i];
	r = median(ratio, b->rounds);
	g = median(got, b->rounds);
	c = median(beside, b->rounds);
	snprintf(what, sizeof(what), "load, %s", row->what);
	if (b->rows) {
		json_array_append_new(b->rows, json_pack("{ss ss sf ss sf sf sf sf ss ss}", "what", what, "unit", "MB/s", "value", g,
							 "ceiling_is", row->ceiling, "ceiling", c, "ratio", r, "ratio_low", ratio[0],
							 "ratio_high", ratio[b->rounds - 1], "how", how(b), "io", b->report.io));
		return;
	}
	printf("%-39s %6.0f MB/s, %.3f (%.3f to %.3f) of %6.0f (%s); %s, %s\n", what, g, r, ratio[0], ratio[b->rounds - 1], c,
	       row->ceiling, how(b), b->report.io);
	fflush(stdout);
}

static int measure(struct bench *b, const struct row *row)
{
	double got[ROUNDS_MAX], beside[ROUNDS_MAX];
	int ret = row->cold ? 0 : place_file(b, false);

	for (uint32_t i = 0; i < b->rounds && !ret; i++) {
		if (i % 2)
			ret = timed(b, row, row->load, &got[i]);
		if (!ret)
			ret = timed(b, row, row->beside, &beside[i]);
		if (!ret && i % 2 == 0)
			ret = timed(b, row, row->load, &got[i]);
	}
	if (!ret)
		report(b, row, got, beside);
	return ret;
}

/* ---- the command ---- */

/* Room for the tensors, or for the file as it is, in host memory and on the GPU. */
static int get_memory(struct bench *b)
{
	uint64_t bytes = kvt_load_layout(b->w, NULL, NULL), at = 0;
	int ret;

	for (uint32_t i = 0; i < b->w->n_tensors; i++)
		at += (b->w->tensors[i].bytes + 255) & ~255ull;
	bytes = bytes > b->file_bytes ? bytes : b->file_bytes;
	b->memory_bytes = bytes > at ? bytes : at;
	ret = kvt_load_fits(b->memory_bytes * (b->backend == KVT_BACKEND_CPU ? 2 : 1), NULL);
	if (!ret)
		ret = kvt_gpu_open(b->backend, b->device, &b->gpu);
	if (!ret)
		ret = kvt_load_fits(b->memory_bytes, b->gpu);
	if (!ret)
		ret = b->gpu->ops->alloc(b->gpu, b->memory_bytes, &b->memory);
	if (ret)
		return ret;
	b->items = calloc(2 * ((size_t)b->w->n_tensors + 1), sizeof(*b->items));
	b->host = mmap(NULL, b->memory_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (!b->items || b->host == MAP_FAILED)
		return kvt_fail(-ENOMEM, "no memory for %" PRIu64 " bytes of weights", b->memory_bytes);
	b->host_items = b->items + b->w->n_tensors;
	kvt_load_layout(b->w, b->host, b->host_items);
	at = 0;
	for (uint32_t i = 0; i < b->w->n_tensors; i++) {
		b->items[i] = (struct kvt_load_item){ .tensor = &b->w->tensors[i], .device = b->memory + at };
		at += (b->w->tensors[i].bytes + 255) & ~255ull;
	}
	madvise(b->host, b->memory_bytes, MADV_HUGEPAGE);
	memset(b->host, 0, b->memory_bytes);
	ret = b->gpu->ops->memset_async(b->gpu, b->memory, 0, b->memory_bytes, 0);
	return ret ? ret : b->gpu->ops->stream_sync(b->gpu, 0);
}

static int run(struct bench *b)
{
	char path[64];
	int ret = b->path ? 0 : make_file(b, path);

	if (!ret)
		ret = kvt_weights_open(b->path, &b->w);
	if (ret)
		return ret;
	if (b->w->n_shards != 1)
		return kvt_fail(-EINVAL, "%s: has %u shards: name one of them", b->path, b->w->n_shards);
	b->path = b->w->shards[0].path;
	b->fd = b->w->shards[0].fd;
	b->file_bytes = b->w->shards[0].bytes;
	ret = get_memory(b);
	if (ret)
		return ret;
	if (!b->json)
		printf("kvtier %s; %s: %.0f MB; GPU memory: %s; medians of %u\n", kvt_version(), b->made < 0 ? b->path : b->dir,
		       (double)b->file_bytes / 1e6, b->gpu->description, b->rounds);
	for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]) && !ret; i++)
		if (rows[i].cold ? !b->cached : !b->cold)
			ret = measure(b, &rows[i]);
	return ret;
}

static int read_option(struct bench *b, int opt)
{
	static const char *const backends[] = { "auto", "cpu", "cuda" };
	uint64_t n = 0;
	int ret = 0;

	switch (opt) {
	case 'f':
		b->path = optarg;
		break;
	case 's':
		ret = tool_size(optarg, &b->bytes);
		if (!ret && (b->bytes < 1u << 20 || b->bytes > 1ull << 40))
			ret = kvt_fail(-EINVAL, "--bytes %s: 1M to 1T", optarg);
		break;
	case 'D':
		b->dir = optarg;
		break;
	case 'b':
		while (n < 3 && strcmp(optarg, backends[n]))
			n++;
		b->backend = (uint32_t)n;
		if (n == 3)
			ret = kvt_fail(-EINVAL, "--backend \"%s\": auto, cpu or cuda is needed", optarg);
		break;
	case 'd':
		ret = tool_number("--device", optarg, 0, 1023, &n);
		b->device = (uint32_t)n;
		break;
	case 'r':
		ret = tool_number("--rounds", optarg, 1, ROUNDS_MAX, &n);
		b->rounds = (uint32_t)n;
		break;
	case 'o':
		b->cold = true;
		break;
	case 'c':
		b->cached = true;
		break;
	case 'j':
		b->json = true;
		break;
	}
	if (!ret && b->cold && b->cached)
		ret = kvt_fail(-EINVAL, "--cold or --cached: without either, both are measured");
	return ret;
}

int bench_load(int argc, char **argv)
{
	static const struct option options[] = {
		{ "file", 1, NULL, 'f' },   { "bytes", 1, NULL, 's' },	{ "disk-dir", 1, NULL, 'D' }, { "backend", 1, NULL, 'b' },
		{ "device", 1, NULL, 'd' }, { "rounds", 1, NULL, 'r' }, { "cold", 0, NULL, 'o' },     { "cached", 0, NULL, 'c' },
		{ "json", 0, NULL, 'j' },   { "help", 0, NULL, 'h' },	{ 0 },
	};
	const char *tmp = getenv("TMPDIR");
	struct bench b = { .dir = tmp && *tmp ? tmp : "/var/tmp", .made = -1, .bytes = 2ull << 30, .backend = KVT_BACKEND_CPU,
			   .rounds = 5, .host = MAP_FAILED, .report = KVT_INIT(b.report) };
	int opt, ret;

	opterr = 0;
	while ((opt = getopt_long(argc, argv, ":h", options, NULL)) != -1) {
		if (opt == 'h') {
			fputs(usage, stdout);
			return 0;
		}
		if (opt == ':' || opt == '?')
			return tool_option_error("bench", opt, argv, options);
		if (read_option(&b, opt))
			return tool_usage_error("bench", "%s", kvt_last_error());
	}
	if (optind < argc)
		return tool_usage_error("bench", "load takes no '%s'", argv[optind]);
	b.rows = b.json ? json_array() : NULL;
	ret = run(&b);
	if (!ret && b.json) {
		json_dumpf(b.rows, stdout, JSON_INDENT(2));
		putchar('\n');
	}
	if (ret)
		tool_failed("bench");
	json_decref(b.rows);
	if (b.host != MAP_FAILED)
		munmap(b.host, b.memory_bytes);
	free(b.items);
	kvt_gpu_close(b.gpu); /* and all that it gave out */
	kvt_weights_close(b.w);
	if (b.made >= 0)
		close(b.made);
	return ret ? 1 : 0;
}
