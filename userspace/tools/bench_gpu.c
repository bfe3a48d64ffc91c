// SPDX-License-Identifier: MIT
/*
 * kvtier bench gpu: blocks between host and GPU by the copy engine and by a
 * kernel, rows appended, and blocks digested, each beside what the link or the
 * memory does in the same run. Times are the device's own
 * events; small work is captured and replayed, over sets that do not fit the L2.
 */
#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/err.h"
#include "codec/codec.h"
#include "gpu/gpu.h"
#include "gpu/kernels.h"
#include "kvtier.h"
#include "tools/measure.h"
#include "tools/tools.h"

#define BYTES (256ull << 20) /* moved at a time */
#define ROUNDS_MAX 64
#define SETS 64 /* of small work, each of its own memory */

static const char usage[] =
	"usage: kvtier bench gpu [--device N] [--rounds N]\n"
	"\n"
	"  --device N     which GPU (default: 0)\n"
	"  --rounds N     measurements of each, medians are printed (default: 7)\n";

struct gb {
	struct kvt_gpu *gpu;
	const struct kvt_gpu_ops *ops;
	uint32_t rounds;
	kvt_event from, to;
	kvt_stream stream;
	kvt_dptr device, lists; /* BYTES; addresses for kernels */
	uint8_t *host;		/* BYTES, pinned */
	kvt_kernel copy, append, extend, digest;
};

/* Seconds that the device takes for what @work puts on the stream: the median. */
static int timed(struct gb *g, int (*work)(struct gb *, void *), void *arg, double *seconds)
{
	double v[ROUNDS_MAX];
	float ms;
	int ret = 0;

	for (uint32_t i = 0; i < g->rounds + 1 && !ret; i++) {
		ret = g->ops->event_record(g->gpu, g->from, g->stream);
		if (!ret)
			ret = work(g, arg);
		if (!ret)
			ret = g->ops->event_record(g->gpu, g->to, g->stream);
		if (!ret)
			ret = g->ops->event_sync(g->gpu, g->to);
		if (!ret)
			ret = g->ops->event_elapsed(g->gpu, g->from, g->to, &ms);
		if (!ret && i) /* the first warms up */
			v[i - 1] = ms * 1e-3;
	}
	if (!ret)
		*seconds = median(v, g->rounds);
	return ret;
}

struct blocks {
	uint64_t bytes; /* of each */
	uint32_t n;
	bool down, kernel;
};

/* A sequence's blocks to the gpu tier and back, as a cache moves them: copied, digested, compared, published. */
static int bench_moves(struct gb *g)
{
	struct kvt_plane_params plane = KVT_INIT(plane);
	struct kvt_cache_params p = KVT_INIT(p);
	double up[ROUNDS_MAX], down[ROUNDS_MAX], t;
	static uint16_t rows[256][1024];
	struct kvt_rows src = { .data = rows, .type = KVT_F16 };
	struct kvt_stats st = KVT_INIT(st);
	struct kvt_cache *cache;
	struct kvt_seq *seq;
	const uint32_t tokens = BYTES / sizeof(rows[0]);
	int64_t moved = 0;
	int ret;

	plane.codec = KVT_F16;
	plane.heads = 8;
	plane.head_dim = 128;
	p.planes = &plane;
	p.n_planes = 1;
	p.gpu_bytes = p.pinned_bytes = BYTES + (8 << 20);
	p.ram_bytes = 64 << 20;
	p.max_tokens = tokens;
	p.max_seqs = 1;
	p.backend = KVT_BACKEND_CUDA;
	p.gpu_device = g->gpu->device;
	p.threads = 1;
	ret = kvt_cache_create(&p, &cache);
	if (ret)
		return ret;
	for (uint32_t i = 0; i < sizeof(rows) / 2; i++)
		rows[i / 1024][i % 1024] = (uint16_t)(i * 40503u & 0x7bff); /* finite */
	ret = kvt_seq_create(cache, &seq);
	if (!ret)
		ret = kvt_seq_append(seq, NULL, tokens);
	for (uint32_t i = 0; i < tokens && !ret; i += 256)
		ret = kvt_seq_write(seq, 0, i, 256, &src);
	for (uint32_t i = 0; i < g->rounds && !ret && moved >= 0; i++) {
		t = now();
		moved = kvt_seq_move(seq, KVT_TIER_PINNED);
		down[i] = now() - t;
		t = now();
		if (moved >= 0)
			moved = kvt_seq_move(seq, KVT_TIER_GPU);
		up[i] = now() - t;
	}
	kvt_cache_stats(cache, &st);
	kvt_cache_destroy(cache);
	if (ret || moved < 0)
		return ret ? ret : (int)moved;
	printf("%-34s %12.1f up, %.1f down; %llu blocks of %llu\n", "a sequence's moves, GB/s", BYTES / median(up, g->rounds) * 1e-9,
	       BYTES / median(down, g->rounds) * 1e-9, (unsigned long long)moved, (unsigned long long)st.blocks);
	return 0;
}

static int launch_copy(struct gb *g, const struct blocks *b)
{
	struct kvt_copy_args a = { .n = b->n, .bytes = (uint32_t)b->bytes };
	const struct kvt_dim3 grid = { 16, 1, 1 }, block = { 512, 1, 1 };
	void *args[] = { &a };

	a.dst = b->down ? g->lists : g->lists + b->n * 8ull;
	a.src = b->down ? g->lists + b->n * 8ull : g->lists;
	return g->ops->launch(g->gpu, g->copy, grid, block, 0, g->stream, args, 1);
}

/* Blocks in a scattered order: the k-th is number k * 977 mod n. */
static uint64_t place(const struct blocks *b, uint32_t k)
{
	return (uint64_t)k * 977 % b->n * b->bytes;
}

static int copy_blocks(struct gb *g, void *arg)
{
	const struct blocks *b = arg;
	int ret = 0;

	if (b->kernel)
		return launch_copy(g, b);
	for (uint32_t k = 0; k < b->n && !ret; k++) {
		kvt_dptr on_device = g->device + place(b, k);
		uint8_t *on_host = g->host + k * b->bytes;

		ret = b->down ? g->ops->copy_d2h_async(g->gpu, on_host, on_device, b->bytes, g->stream) :
				g->ops->copy_h2d_async(g->gpu, on_device, on_host, b->bytes, g->stream);
	}
	return ret;
}

/* Host addresses, then the device's, for launch_copy(). */
static int put_lists(struct gb *g, const struct blocks *b)
{
	uint64_t *list = malloc(b->n * 16ull);
	int ret;

	if (!list)
		return kvt_fail(-ENOMEM, "no memory for %u addresses", b->n);
	for (uint32_t k = 0; k < b->n; k++) {
		list[k] = (uintptr_t)g->host + k * b->bytes;
		list[b->n + k] = g->device + place(b, k);
	}
	ret = g->ops->copy_h2d(g->gpu, g->lists, list, b->n * 16ull);
	free(list);
	return ret;
}

static int bench_copies(struct gb *g)
{
	static const uint64_t sizes[] = { BYTES / 4, 2 << 20, 256 << 10, 64 << 10, 16 << 10, 4 << 10 };
	double s[2][2];
	int ret;

	printf("%-34s %12s %12s %12s %12s\n", "blocks of, GB/s", "up, engine", "up, kernel", "down, engine", "down, kernel");
	for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
		struct blocks b = { .bytes = sizes[i], .n = (uint32_t)(BYTES / sizes[i]) };

		ret = put_lists(g, &b);
		for (int down = 0; down < 2 && !ret; down++)
			for (int kernel = 0; kernel < 2 && !ret; kernel++) {
				b.down = down;
				b.kernel = kernel;
				ret = timed(g, copy_blocks, &b, &s[down][kernel]);
			}
		if (ret)
			return ret;
		printf("  %-32llu %12.1f %12.1f %12.1f %12.1f\n", (unsigned long long)sizes[i], BYTES / s[0][0] * 1e-9,
		       BYTES / s[0][1] * 1e-9, BYTES / s[1][0] * 1e-9, BYTES / s[1][1] * 1e-9);
	}
	return 0;
}

static int replay(struct gb *g, void *arg)
{
	return g->ops->graph_launch(g->gpu, *(kvt_graph *)arg, g->stream);
}

/* Seconds for one of the @SETS pieces of work that @work puts on the stream, captured together. */
static int timed_graph(struct gb *g, int (*work)(struct gb *, void *), void *arg, double *seconds)
{
	kvt_graph graph;
	int ret = g->ops->capture_begin(g->gpu, g->stream), end;

	if (ret)
		return ret;
	ret = work(g, arg);
	end = g->ops->capture_end(g->gpu, g->stream, &graph);
	if (ret || end)
		return ret ? ret : end;
	ret = timed(g, replay, &graph, seconds);
	g->ops->graph_destroy(g->gpu, graph);
	*seconds /= SETS;
	return ret;
}

#define APPEND_ROWS 512
#define APPEND_ELEMS (8 * 128)
#define APPEND_BYTES (APPEND_ROWS * APPEND_ELEMS * 2ull) /* read, and as many written */
#define BLOCK_ROWS 32
#define TABLE (APPEND_ROWS / BLOCK_ROWS)

struct rows {
	kvt_dptr blocks, index; /* by row: address and row */
	kvt_dptr table, tokens, count; /* addresses by block, then digests; one sequence's tokens and rows */
	bool extend, plain;
};

static int append_rows(struct gb *g, void *arg)
{
	const struct rows *r = arg;
	const struct kvt_dim3 grid = { APPEND_ROWS / 4, 1, 1 }, block = { 128, 1, 1 };
	int ret = 0;

	for (uint32_t i = 0; i < SETS && !ret; i++) {
		kvt_dptr src = g->device + i * 2 * APPEND_BYTES, dst = src + APPEND_BYTES;
		struct kvt_append_args a = {
			.src = src, .src_stride = APPEND_ELEMS * 2, .blocks = r->blocks + i * APPEND_ROWS * 8ull,
			.rows = r->index, .n = APPEND_ROWS, .elements = APPEND_ELEMS, .src_type = KVT_BF16,
			.dst_type = KVT_F16,
		};
		struct kvt_extend_args e = {
			.src = src, .src_stride = APPEND_ELEMS * 2, .blocks = r->table + i * TABLE * 8ull,
			.sums = r->table + SETS * TABLE * 8ull, .tokens = r->tokens, .rows = r->count, .zeros_hash = 1,
			.n_seqs = 1, .table_stride = TABLE, .block_rows = BLOCK_ROWS, .elements = APPEND_ELEMS,
			.src_type = KVT_BF16, .dst_type = KVT_F16,
		};
		void *args[] = { r->extend ? (void *)&e : (void *)&a };

		if (r->plain)
			ret = g->ops->copy_d2d_async(g->gpu, dst, src, APPEND_BYTES, g->stream);
		else
			ret = g->ops->launch(g->gpu, r->extend ? g->extend : g->append, grid, block, 0, g->stream, args, 1);
	}
	return ret;
}

static int bench_append(struct gb *g)
{
	enum { BY_ROW = SETS * APPEND_ROWS, BY_BLOCK = SETS * TABLE };
	static uint64_t lists[BY_ROW + 2 * BY_BLOCK];
	static uint32_t index[APPEND_ROWS];
	const uint32_t tokens[2] = { 0, APPEND_ROWS }, count = APPEND_ROWS;
	struct rows r = { .blocks = g->lists, .table = g->lists + BY_ROW * 8ull, .index = g->lists + sizeof(lists) };
	double s[3];
	int ret;

	for (uint32_t i = 0; i < SETS; i++) {
		kvt_dptr dst = g->device + i * 2 * APPEND_BYTES + APPEND_BYTES;

		for (uint32_t k = 0; k < APPEND_ROWS; k++)
			lists[i * APPEND_ROWS + k] = dst + k / BLOCK_ROWS * (BLOCK_ROWS * APPEND_ELEMS * 2ull);
		for (uint32_t k = 0; k < TABLE; k++)
			lists[BY_ROW + i * TABLE + k] = dst + k * (BLOCK_ROWS * APPEND_ELEMS * 2ull);
	}
	for (uint32_t k = 0; k < APPEND_ROWS; k++)
		index[k] = k % BLOCK_ROWS;
	r.tokens = r.index + sizeof(index);
	r.count = r.tokens + sizeof(tokens);
	ret = g->ops->copy_h2d(g->gpu, r.blocks, lists, sizeof(lists));
	if (!ret)
		ret = g->ops->copy_h2d(g->gpu, r.index, index, sizeof(index));
	if (!ret)
		ret = g->ops->copy_h2d(g->gpu, r.tokens, tokens, sizeof(tokens));
	if (!ret)
		ret = g->ops->copy_h2d(g->gpu, r.count, &count, sizeof(count));
	for (int i = 0; i < 3 && !ret; i++) {
		r.plain = i == 0;
		r.extend = i == 2;
		ret = timed_graph(g, append_rows, &r, &s[i]);
	}
	if (ret)
		return ret;
	printf("append 512 rows x 8 x 128, bf16 to f16, captured; bytes read and written:\n");
	printf("  %-32s %12.1f GB/s  %8.2f us\n", "device copy of as much", 2 * APPEND_BYTES / s[0] * 1e-9, s[0] * 1e6);
	printf("  %-32s %12.1f GB/s  %8.2f us  %5.1f%% of it\n", "append (rows by index)", 2 * APPEND_BYTES / s[1] * 1e-9,
	       s[1] * 1e6, 100 * s[0] / s[1]);
	printf("  %-32s %12.1f GB/s  %8.2f us  %5.1f%% of it\n", "extend (tables, with digest)", 2 * APPEND_BYTES / s[2] * 1e-9,
	       s[2] * 1e6, 100 * s[0] / s[2]);
	return 0;
}

static int digest_blocks(struct gb *g, void *arg)
{
	const struct kvt_dim3 grid = { g->gpu->processors ? 4 * g->gpu->processors : 8, 1, 1 }, block = { 256, 1, 1 };
	struct kvt_digest_args *a = arg;
	void *args[] = { a };

	return g->ops->launch(g->gpu, g->digest, grid, block, 0, g->stream, args, 1);
}

static int copy_half(struct gb *g, void *arg)
{
	(void)arg;
	return g->ops->copy_d2d_async(g->gpu, g->device + BYTES / 2, g->device, BYTES / 2, g->stream);
}

static int bench_digest(struct gb *g)
{
	enum { N = BYTES / (64 << 10) };
	static uint64_t lists[N];
	static uint32_t rows[N];
	struct kvt_digest_args a = { .blocks = g->lists, .rows = g->lists + sizeof(lists),
				     .out = g->lists + sizeof(lists) + sizeof(rows), .n = N, .row_bytes = 2048 };
	double s, d;
	int ret;

	for (uint32_t i = 0; i < N; i++) {
		lists[i] = g->device + i * (64ull << 10);
		rows[i] = 32;
	}
	ret = g->ops->copy_h2d(g->gpu, a.blocks, lists, sizeof(lists));
	if (!ret)
		ret = g->ops->copy_h2d(g->gpu, a.rows, rows, sizeof(rows));
	if (!ret)
		ret = timed(g, digest_blocks, &a, &s);
	if (!ret)
		ret = timed(g, copy_half, NULL, &d);
	if (ret)
		return ret;
	printf("%-34s %12.1f GB/s\n", "device copy, read and written", BYTES / d * 1e-9);
	printf("%-34s %12.1f GB/s\n", "digest of 64 KiB blocks", BYTES / s * 1e-9);
	return 0;
}

/* ---- weights ---- */

static int prepare(struct gb *g)
{
	const struct kvt_gpu_ops *o = g->ops;
	void *host = NULL;
	int ret = o->stream_create(g->gpu, &g->stream);

	if (!ret)
		ret = o->event_create(g->gpu, &g->from);
	if (!ret)
		ret = o->event_create(g->gpu, &g->to);
	if (!ret)
		ret = o->alloc(g->gpu, BYTES, &g->device);
	if (!ret)
		ret = o->alloc(g->gpu, 4 << 20, &g->lists);
	if (!ret)
		ret = o->host_alloc(g->gpu, BYTES, &host);
	if (!ret)
		ret = o->kernel(g->gpu, "block", "copy", &g->copy);
	if (!ret)
		ret = o->kernel(g->gpu, "block", "append", &g->append);
	if (!ret)
		ret = o->kernel(g->gpu, "block", "extend", &g->extend);
	if (!ret)
		ret = o->kernel(g->gpu, "block", "digest", &g->digest);
	if (ret)
		return ret;
	g->host = host;
	for (uint64_t i = 0, z = 1; i < BYTES / 8; i++) { /* not zeros: they can be faster than real bytes */
		z = z * 6364136223846793005ull + 1442695040888963407ull;
		((uint64_t *)host)[i] = z;
	}
	return o->copy_h2d(g->gpu, g->device, host, BYTES);
}

int bench_gpu(int argc, char **argv)
{
	static const struct option options[] = {
		{ "device", 1, NULL, 'd' }, { "rounds", 1, NULL, 'r' }, { "help", 0, NULL, 'h' }, { 0 },
	};
	struct gb g = { .rounds = 7 };
	uint64_t n, device = 0;
	int opt, ret = 0;

	opterr = 0;
	while ((opt = getopt_long(argc, argv, ":h", options, NULL)) != -1) {
		switch (opt) {
		case 'd':
			ret = tool_number("--device", optarg, 0, 1023, &device);
			break;
		case 'r':
			ret = tool_number("--rounds", optarg, 1, ROUNDS_MAX, &n);
			g.rounds = (uint32_t)n;
			break;
		case 'h':
			fputs(usage, stdout);
			return 0;
		default:
			return tool_option_error("bench", opt, argv, options);
		}
		if (ret)
			return tool_usage_error("bench", "%s", kvt_last_error());
	}
	if (optind < argc)
		return tool_usage_error("bench", "gpu takes no '%s'", argv[optind]);
	ret = kvt_gpu_cuda_open((uint32_t)device, &g.gpu);
	if (ret)
		return tool_failed("bench");
	g.ops = g.gpu->ops;
	printf("kvtier %s, %s; medians of %u\n", kvt_version(), g.gpu->description, g.rounds);
	ret = prepare(&g);
	if (!ret)
		ret = bench_copies(&g);
	if (!ret)
		ret = bench_moves(&g);
	if (!ret)
		ret = bench_append(&g);
	if (!ret)
		ret = bench_digest(&g);
	if (ret)
		tool_failed("bench");
	g.ops->close(g.gpu); /* and all that it gave out */
	return ret ? 1 : 0;
}
