// SPDX-License-Identifier: MIT
/*
 * kvtier bench gpu: blocks between host and GPU by copies, batched copies and a
 * kernel, rows appended, blocks digested, attention, and decoding through a
 * cache, each beside what bounds it, measured in the same run, and what it
 * should reach. Times are the device's own events; small work is captured and
 * replayed, over sets that do not fit the L2. What attention gives is checked.
 */
#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "codec/codec.h"
#include "gpu/kernels.h"
#include "tools/bench_gpu.h"
#include "tools/measure.h"
#include "tools/tools.h"

#define BYTES GB_BYTES
#define SETS GB_SETS
#define WARM_S 0.03

static const char usage[] =
	"usage: kvtier bench gpu [--device N] [--rounds N] [--json]\n"
	"\n"
	"  --device N     which GPU (default: 0)\n"
	"  --rounds N     measurements of each, medians are printed (default: 7)\n"
	"  --json         the table as JSON\n";

static bool passes(const struct gb_row *r)
{
	return r->less ? r->value <= r->wanted : r->value >= r->wanted;
}

void gb_head(struct gb *g)
{
	if (!g->rows)
		printf("%-44s %9s %-8s %9s %7s  %-14s %8s\n", "work", "reached", "", "limit", "", "of", "wanted");
}

void gb_row(struct gb *g, const struct gb_row *r)
{
	const double percent = r->limit > 0 ? 100 * r->value / r->limit : 0;

	g->below |= r->wanted > 0 && !passes(r);
	if (g->rows) {
		json_t *o = json_pack("{ss sf ss}", "work", r->work, "value", r->value, "unit", r->unit);

		if (r->limit > 0)
			json_object_update(o, json_pack("{sf ss sf}", "limit", r->limit, "limit_of", r->limit_of, "percent", percent));
		if (r->wanted > 0)
			json_object_update(o, json_pack("{sf sb}", "wanted", r->wanted, "passes", passes(r)));
		json_array_append_new(g->rows, o);
		return;
	}
	printf("%-44s %9.1f %-8s", r->work, r->value, r->unit);
	if (r->limit > 0)
		printf(" %9.1f %6.1f%%  %-14s", r->limit, percent, r->limit_of);
	else if (r->wanted > 0)
		printf(" %9s %7s  %-14s", "", "", "");
	if (r->wanted > 0)
		printf(" %8.1f %s", r->wanted, passes(r) ? "PASS" : "below");
	printf("\n");
}

int gb_timed(struct gb *g, int (*work)(struct gb *, void *), void *arg, double *seconds)
{
	double v[GB_ROUNDS_MAX], warm = 0;
	float ms = 0;
	int ret = 0;

	for (uint32_t i = 0; i < g->rounds && !ret;) {
		ret = g->ops->event_record(g->gpu, g->from, g->stream);
		if (!ret)
			ret = work(g, arg);
		if (!ret)
			ret = g->ops->event_record(g->gpu, g->to, g->stream);
		if (!ret)
			ret = g->ops->event_sync(g->gpu, g->to);
		if (!ret)
			ret = g->ops->event_elapsed(g->gpu, g->from, g->to, &ms);
		if (!ret && warm >= WARM_S)
			v[i++] = ms * 1e-3;
		warm += ms * 1e-3 + 1e-6;
	}
	if (!ret)
		*seconds = median(v, g->rounds);
	return ret;
}

enum way { COPIES, BATCH, KERNEL, WAYS };

struct blocks {
	uint64_t bytes; /* of each */
	uint32_t n;
	bool down;
	enum way way;
	uint64_t *host, *device; /* [n] each: addresses, as they are in the lists */
};

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

	if (b->way == KERNEL)
		return launch_copy(g, b);
	if (b->way == BATCH)
		return g->ops->copy_batch_async(g->gpu, b->down ? b->host : b->device, b->down ? b->device : b->host, b->bytes,
						b->n, g->stream);
	for (uint32_t k = 0; k < b->n && !ret; k++) {
		void *host = (void *)(uintptr_t)b->host[k];

		ret = b->down ? g->ops->copy_d2h_async(g->gpu, host, b->device[k], b->bytes, g->stream) :
				g->ops->copy_h2d_async(g->gpu, b->device[k], host, b->bytes, g->stream);
	}
	return ret;
}

/* Host addresses, then the device's, here and on the device. */
static int make_lists(struct gb *g, struct blocks *b)
{
	b->host = malloc(b->n * 16ull);
	if (!b->host)
		return kvt_fail(-ENOMEM, "no memory for %u addresses", b->n);
	b->device = b->host + b->n;
	for (uint32_t k = 0; k < b->n; k++) {
		b->host[k] = (uintptr_t)g->host + k * b->bytes;
		b->device[k] = g->device + place(b, k);
	}
	return g->ops->copy_h2d(g->gpu, g->lists, b->host, b->n * 16ull);
}

static void copies_row(struct gb *g, const struct blocks *b, double rate)
{
	static const char *const ways[WAYS] = { "copies", "batch", "kernel" };
	double *limit = b->down ? &g->down_rate : &g->up_rate;
	char work[64];
	struct gb_row row = { .work = work, .unit = "GB/s", .limit_of = b->down ? "link down" : "link up", .value = rate * 1e-9 };

	if (b->bytes == BYTES) { /* one run */
		*limit = rate;
		snprintf(work, sizeof(work), "one run of 256 MiB %s", b->down ? "down" : "up");
	} else {
		snprintf(work, sizeof(work), "blocks of %u KiB %s, by %s", (uint32_t)(b->bytes >> 10), b->down ? "down" : "up",
			 ways[b->way]);
		row.limit = *limit * 1e-9;
		if (b->bytes >= 2 << 20)
			row.wanted = b->way == BATCH ? 54 : 0;
		else if (b->bytes >= 16 << 10 && b->way == KERNEL)
			row.wanted = b->down ? 52 : 51;
	}
	gb_row(g, &row);
}

static int bench_copies(struct gb *g)
{
	static const uint64_t sizes[] = { BYTES, 2 << 20, 256 << 10, 64 << 10, 16 << 10, 4 << 10 };
	double s;
	int ret;

	for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
		struct blocks b = { .bytes = sizes[i], .n = (uint32_t)(BYTES / sizes[i]) };

		ret = make_lists(g, &b);
		for (int down = 0; down < 2 && !ret; down++)
			for (b.way = COPIES; b.way < (b.n > 1 ? WAYS : BATCH) && !ret; b.way++) {
				b.down = down;
				ret = gb_timed(g, copy_blocks, &b, &s);
				if (!ret)
					copies_row(g, &b, BYTES / s);
				else if (b.way == BATCH && ret == -ENOSYS) /* an older driver */
					ret = 0;
			}
		free(b.host);
		if (ret)
			return ret;
	}
	return 0;
}

static int replay(struct gb *g, void *arg)
{
	return g->ops->graph_launch(g->gpu, *(kvt_graph *)arg, g->stream);
}

int gb_timed_graph(struct gb *g, int (*work)(struct gb *, void *), void *arg, double *seconds)
{
	kvt_graph graph;
	int ret = g->ops->capture_begin(g->gpu, g->stream), end;

	if (ret)
		return ret;
	ret = work(g, arg);
	end = g->ops->capture_end(g->gpu, g->stream, &graph);
	if (ret || end)
		return ret ? ret : end;
	ret = gb_timed(g, replay, &graph, seconds);
	g->ops->graph_destroy(g->gpu, graph);
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
			.plane = { {
				.src = src, .src_stride = APPEND_ELEMS * 2, .blocks = r->table + i * TABLE * 8ull,
				.sums = r->table + SETS * TABLE * 8ull, .zeros_hash = 1, .block_rows = BLOCK_ROWS,
				.elements = APPEND_ELEMS, .src_type = KVT_BF16, .dst_type = KVT_F16,
			} },
			.n_planes = 1, .tokens = r->tokens, .rows = r->count, .n_seqs = 1, .table_stride = TABLE,
		};
		void *args[] = { r->extend ? (void *)&e : (void *)&a };

		if (r->plain)
			ret = g->ops->copy_d2d_async(g->gpu, dst, src, APPEND_BYTES, g->stream);
		else
			ret = g->ops->launch_early(g->gpu, r->extend ? g->extend : g->append, grid, block, 0, g->stream,
						   args, 1);
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
	double s, alike = 0; /* a copy's rate that is launched as often */
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
		static const char *const works[] = { "device copy of 512 rows x 8 x 128",
						     "append 512 x 8 x 128, bf16 as f16, by index", "the same through tables, with digest" };
		struct gb_row row = { .work = works[i], .unit = "GB/s", .limit_of = i ? "that copy" : "HBM copy",
				      .limit = i ? alike : g->copy_rate * 1e-9 };

		r.plain = i == 0;
		r.extend = i == 2;
		ret = gb_timed_graph(g, append_rows, &r, &s);
		row.value = SETS * 2 * APPEND_BYTES / s * 1e-9;
		alike = i ? alike : row.value;
		row.wanted = i == 1 ? 0.6 * row.limit : 0;
		if (!ret)
			gb_row(g, &row);
	}
	return ret;
}

static int digest_blocks(struct gb *g, void *arg)
{
	const struct kvt_dim3 grid = { g->gpu->processors ? 4 * g->gpu->processors : 8, 1, 1 }, block = { 256, 1, 1 };
	struct kvt_digest_args *a = arg;
	void *args[] = { a };

	return g->ops->launch(g->gpu, g->digest, grid, block, 0, g->stream, args, 1);
}

#define PASSES 8
#define READ_BYTES (1ull << 30)

static int copy_half(struct gb *g, void *arg)
{
	int ret = 0;

	(void)arg;
	for (int i = 0; i < PASSES && !ret; i++)
		ret = g->ops->copy_d2d_async(g->gpu, g->device + BYTES / 2, g->device, BYTES / 2, g->stream);
	return ret;
}

static int read_all(struct gb *g, void *arg)
{
	const struct kvt_dim3 grid = { 4 * g->gpu->processors, 1, 1 }, block = { 512, 1, 1 };
	void *args[] = { arg };

	return g->ops->launch(g->gpu, g->read, grid, block, 0, g->stream, args, 1);
}

/* Of as much as there is room for: a short read ends before all multiprocessors are at work. */
static int bench_read(struct gb *g)
{
	struct kvt_read_args a = { .bytes = READ_BYTES, .out = g->lists };
	double s;
	int ret;

	while (a.bytes > g->free_bytes / 2)
		a.bytes /= 2;
	ret = g->ops->alloc(g->gpu, a.bytes, &a.from);
	if (ret)
		return ret;
	for (uint64_t at = 0; at < a.bytes && !ret; at += BYTES)
		ret = g->ops->copy_d2d_async(g->gpu, a.from + at, g->device, a.bytes - at < BYTES ? a.bytes - at : BYTES,
					     g->stream);
	if (!ret)
		ret = gb_timed(g, read_all, &a, &s);
	g->ops->free(g->gpu, a.from);
	g->read_rate = ret ? 0 : a.bytes / s;
	return ret;
}

static int bench_memory(struct gb *g)
{
	struct gb_row row = { .work = "reading GPU memory", .unit = "GB/s" };
	double s;
	int ret = bench_read(g);

	if (ret)
		return ret;
	row.value = g->read_rate * 1e-9;
	gb_row(g, &row);
	ret = gb_timed_graph(g, copy_half, NULL, &s);
	if (ret)
		return ret;
	g->copy_rate = PASSES * BYTES / s;
	row.work = "copying in GPU memory, read and written";
	row.value = g->copy_rate * 1e-9;
	gb_row(g, &row);
	return 0;
}

static int bench_digest(struct gb *g)
{
	enum { N = BYTES / (64 << 10) };
	static uint64_t lists[N];
	static uint32_t rows[N];
	struct kvt_digest_args a = { .blocks = g->lists, .rows = g->lists + sizeof(lists),
				     .out = g->lists + sizeof(lists) + sizeof(rows), .n = N, .row_bytes = 2048 };
	struct gb_row row = { .work = "digest of 64 KiB blocks", .unit = "GB/s", .limit_of = "HBM read",
			      .limit = g->read_rate * 1e-9 };
	double s;
	int ret;

	for (uint32_t i = 0; i < N; i++) {
		lists[i] = g->device + i * (64ull << 10);
		rows[i] = 32;
	}
	ret = g->ops->copy_h2d(g->gpu, a.blocks, lists, sizeof(lists));
	if (!ret)
		ret = g->ops->copy_h2d(g->gpu, a.rows, rows, sizeof(rows));
	if (!ret)
		ret = gb_timed(g, digest_blocks, &a, &s);
	if (ret)
		return ret;
	row.value = BYTES / s * 1e-9;
	gb_row(g, &row);
	return 0;
}

static int prepare(struct gb *g)
{
	const struct kvt_gpu_ops *o = g->ops;
	void *host = NULL;
	uint64_t total;
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
	if (!ret)
		ret = o->kernel(g->gpu, "measure", "read", &g->read);
	if (!ret)
		ret = o->mem_info(g->gpu, &g->free_bytes, &total);
	if (ret)
		return ret;
	g->host = host;
	for (uint64_t i = 0, z = 1; i < BYTES / 8; i++) { /* not zeros: they can be faster than real bytes */
		z = z * 6364136223846793005ull + 1442695040888963407ull;
		((uint64_t *)host)[i] = z;
	}
	return o->copy_h2d(g->gpu, g->device, host, BYTES);
}

static void print_json(const struct gb *g)
{
	json_t *all = json_pack("{ss ss si sO}", "version", kvt_version(), "gpu", g->gpu->description, "rounds", g->rounds,
				"rows", g->rows);

	json_dumpf(all, stdout, JSON_INDENT(1) | JSON_REAL_PRECISION(6));
	putchar('\n');
	json_decref(all);
}

int bench_gpu(int argc, char **argv)
{
	static const struct option options[] = {
		{ "device", 1, NULL, 'd' }, { "rounds", 1, NULL, 'r' }, { "json", 0, NULL, 'j' }, { "help", 0, NULL, 'h' }, { 0 },
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
			ret = tool_number("--rounds", optarg, 1, GB_ROUNDS_MAX, &n);
			g.rounds = (uint32_t)n;
			break;
		case 'j':
			g.rows = json_array();
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
	if (!g.rows)
		printf("kvtier %s, %s; medians of %u\n", kvt_version(), g.gpu->description, g.rounds);
	gb_head(&g);
	ret = prepare(&g);
	if (!ret)
		ret = bench_memory(&g);
	if (!ret)
		ret = bench_copies(&g);
	if (!ret)
		ret = bench_append(&g);
	if (!ret)
		ret = bench_digest(&g);
	if (!ret)
		ret = gb_attention(&g);
	if (!ret)
		ret = gb_cache(&g);
	if (ret)
		tool_failed("bench");
	else if (g.rows)
		print_json(&g);
	g.ops->close(g.gpu); /* and all that it gave out */
	json_decref(g.rows);
	return ret ? 1 : 0;
}
