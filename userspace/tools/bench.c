// SPDX-License-Identifier: MIT
/*
 * kvtier bench: each figure beside the ceiling it is held against, measured in
 * the same run, in turns, medians of both. Ratios travel between machines and
 * days; absolute figures do not.
 */
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/cpu.h"
#include "base/err.h"
#include "base/workers.h"
#include "cache/cache.h"
#include "codec/codec.h"
#include "tools/peak.h"
#include "tools/measure.h"
#include "tools/tools.h"

#define ROUNDS_MAX 64

static const char usage[] =
	"usage: kvtier bench [WHAT...] [--threads N] [--rounds N] [--disk-dir D] [--kv-bytes S] [--json]\n"
	"\n"
	"WHAT: decode, prefill, stream, placement, digest (default: all);\n"
	"gpu or load alone (kvtier bench gpu -h, kvtier bench load -h)\n"
	"  --threads N    compute threads (default: all cores)\n"
	"  --rounds N     paired measurements of each, medians are printed (default: 5)\n"
	"  --disk-dir D   where stream puts its slot file (default: $TMPDIR or /var/tmp)\n"
	"  --kv-bytes S   size of the KV cache that stream reads (default: 384M)\n"
	"  --json         a JSON list instead of a table\n";

struct bench {
	uint32_t threads, rounds;
	const char *dir;
	uint64_t kv_bytes;
	json_t *rows;
	bool json;
};

KVT_ISA_DECLARE(extern const struct peak_ops, peak);

const struct peak_ops *peak_ops(void)
{

	static const struct peak_ops *const table[KVT_ISAS] = KVT_ISA_TABLE(&peak);

	return table[kvt_isa_best()];
}

/* Print one figure, the ceiling, and the median of the ratios of the pairs. */
static void report(struct bench *b, const char *what, const char *unit, double *got, double *ceiling,
		   const char *ceiling_is)
{
	double ratio[ROUNDS_MAX], g, c = 0, r = 0;

	for (uint32_t i = 0; ceiling && i < b->rounds; i++)
		ratio[i] = got[i] / ceiling[i];
	if (ceiling) {
		r = median(ratio, b->rounds);
		c = median(ceiling, b->rounds);
	}
	g = median(got, b->rounds);
	if (b->json) {
		json_t *row = json_pack("{ss ss sf ss}", "what", what, "unit", unit, "value", g, "ceiling_is", ceiling_is);

		if (ceiling) {
			json_object_set_new(row, "ceiling", json_real(c));
			json_object_set_new(row, "ratio", json_real(r));
		}
		json_array_append_new(b->rows, row);
	} else if (ceiling) {
		printf("%-44s %9.2f %-8s %5.1f %% of %9.2f (%s)\n", what, g, unit, 100 * r, c, ceiling_is);
	} else {
		printf("%-44s %9.2f %-8s %s\n", what, g, unit, ceiling_is);
	}
	fflush(stdout);
}

/* ---- ceilings ---- */

/* Where results go that are computed for the time they take. */
static volatile float sink;

struct reading {
	const uint8_t *data;
	size_t piece;
};

static void read_piece(void *arg, uint32_t worker, uint32_t i)
{
	const struct reading *r = arg;

	(void)worker;
	sink = peak_ops()->read(r->data + i * r->piece, r->piece);
}

static double read_rate(struct kvt_workers *w, const uint8_t *data, size_t bytes)
{
	struct reading r = { data, 1 << 20 };
	double start = now();

	kvt_workers_run(w, (uint32_t)(bytes / r.piece), read_piece, &r);
	return (double)bytes / (now() - start) / 1e9;
}

static void fma_piece(void *arg, uint32_t worker, uint32_t i)
{
	double *sum = arg;
	float keep;

	(void)worker;
	sum[i] = peak_ops()->fma(4000000, &keep);
}

static double fma_rate(struct kvt_workers *w, uint32_t threads)
{
	double flops[1024] = { 0 }, start = now(), sum = 0;

	kvt_workers_run(w, threads, fma_piece, flops);
	for (uint32_t i = 0; i < threads; i++)
		sum += flops[i];
	return sum / (now() - start) / 1e9;
}

/* ---- caches full of random rows ---- */

struct shape {
	const char *name;
	uint32_t layers, heads, kv_heads, dim, tokens;
};

struct full_cache {
	struct kvt_cache *cache;
	struct kvt_seq *seq;
	float *q, *out;
	uint64_t bytes; /* of KV */
};

static float *random_floats(uint64_t seed, size_t n)
{
	float *f = malloc(n * sizeof(*f));

	for (size_t i = 0; f && i < n; i++) {
		seed = seed * 6364136223846793005ull + 1442695040888963407ull;
		f[i] = (float)(int32_t)(seed >> 32) * 0x1p-31f;
	}
	return f;
}

static void empty_cache(struct full_cache *f)
{
	kvt_cache_destroy(f->cache);
	free(f->q);
	free(f->out);
}

static int fill_cache(struct full_cache *f, const struct shape *s, struct kvt_cache_params *p, uint64_t ram, uint32_t n)
{
	struct kvt_plane_params *planes = calloc(s->layers * 2ul, sizeof(*planes));
	size_t row = (size_t)s->kv_heads * s->dim, piece = 256;
	float *rows = random_floats(1, piece * row);
	int64_t least;
	int ret;

	memset(f, 0, sizeof(*f));
	f->q = random_floats(2, (size_t)n * s->heads * s->dim);
	f->out = malloc((size_t)n * s->heads * s->dim * sizeof(float));
	for (uint32_t i = 0; i < s->layers * 2; i++)
		planes[i] = (struct kvt_plane_params){ .size = sizeof(planes[i]), .codec = KVT_F16, .heads = s->kv_heads,
						       .head_dim = s->dim, .layer = i / 2 };
	p->planes = planes;
	p->n_planes = s->layers * 2;
	p->max_seqs = 1;
	p->max_tokens = s->tokens;
	p->max_query_rows = n;
	p->max_query_heads = s->heads;
	f->bytes = (uint64_t)s->layers * 2 * s->tokens * row * 2;
	least = kvt_cache_min_ram(p);
	ret = least < 0 ? (int)least : 0;
	p->ram_bytes = ram > (uint64_t)least ? ram : (uint64_t)least;
	if (!ram)
		p->ram_bytes += f->bytes + f->bytes / 16;
	if (!ret)
		ret = kvt_cache_create(p, &f->cache);
	if (!ret)
		ret = kvt_seq_create(f->cache, &f->seq);
	if (!ret)
		ret = kvt_seq_append(f->seq, NULL, s->tokens);
	for (uint32_t t = 0; t < s->tokens && !ret; t += (uint32_t)piece) {
		struct kvt_rows src = { .data = rows, .type = KVT_F32 };

		for (uint32_t i = 0; i < s->layers * 2 && !ret; i++)
			ret = kvt_seq_write(f->seq, i, t, (uint32_t)piece, &src);
	}
	free(rows);
	free(planes);
	if (ret)
		empty_cache(f);
	return ret;
}

/* Every layer once, for the last @n tokens. Returns seconds, negative on an error. */
static double attend_all(struct full_cache *f, const struct shape *s, uint32_t n)
{
	struct kvt_attn a = KVT_INIT(a);
	struct kvt_attn_item item = { .seq = f->seq, .first = s->tokens - n, .n = n, .q = f->q, .out = f->out };
	double start = now();

	a.flags = KVT_ATTN_CAUSAL;
	a.n_heads = s->heads;
	for (uint32_t l = 0; l < s->layers; l++) {
		a.k_plane = 2 * l;
		a.v_plane = 2 * l + 1;
		if (kvt_attend(f->cache, &a, &item, 1))
			return -1;
	}
	return now() - start;
}

/* ---- what is measured ---- */

static int bench_decode(struct bench *b, struct kvt_workers *w)
{
	static const struct shape shapes[] = {
		{ "decode f16 32/8 heads D 128, 8 x 8K", 8, 32, 8, 128, 8192 },
		{ "decode f16 14/2 heads D 64, 24 x 16K", 24, 14, 2, 64, 16384 },
		{ "decode f16 4/2 heads D 64, 6 x 32K", 6, 4, 2, 64, 32768 },
	};

	for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
		struct kvt_cache_params p = KVT_INIT(p);
		double got[ROUNDS_MAX], ceiling[ROUNDS_MAX], t;
		struct full_cache f;
		const uint8_t *data;

		p.threads = b->threads;
		if (fill_cache(&f, &shapes[i], &p, 0, 1))
			return -1;
		data = kvt_store_pool(f.cache->store, KVT_TIER_RAM);
		if (attend_all(&f, &shapes[i], 1) < 0)
			goto failed;
		for (uint32_t r = 0; r < b->rounds; r++) {
			ceiling[r] = read_rate(w, data, f.bytes >> 20 << 20);
			t = attend_all(&f, &shapes[i], 1);
			if (t < 0)
				goto failed;
			got[r] = (double)f.bytes / t / 1e9;
		}
		report(b, shapes[i].name, "GB/s", got, ceiling, "reading the same memory");
		empty_cache(&f);
		continue;
failed:
		empty_cache(&f);
		return -1;
	}
	return 0;
}

static int bench_prefill(struct bench *b, struct kvt_workers *w)
{
	static const struct shape shapes[] = {
		{ "prefill chunk 512 on 8K, 32/8 heads D 128", 1, 32, 8, 128, 8192 },
		{ "prefill chunk 512 on 8K, 14/2 heads D 64", 1, 14, 2, 64, 8192 },
	};
	const uint32_t n = 512;

	for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
		const struct shape *s = &shapes[i];
		double pairs = (double)n * (s->tokens - n) + n * (n + 1.0) / 2;
		double got[ROUNDS_MAX], ceiling[ROUNDS_MAX], t = 0;
		struct kvt_cache_params p = KVT_INIT(p);
		struct full_cache f;

		p.threads = b->threads;
		if (fill_cache(&f, s, &p, 0, n))
			return -1;
		for (uint32_t r = 0; r < b->rounds && t >= 0; r++) {
			ceiling[r] = fma_rate(w, b->threads);
			t = attend_all(&f, s, n);
			got[r] = pairs * s->heads * s->dim * 4 / t / 1e9;
		}
		empty_cache(&f);
		if (t < 0)
			return -1;
		report(b, s->name, "GFLOP/s", got, ceiling, "multiply-adds in registers");
	}
	return 0;
}

/* Read a file from its beginning, 1 MiB at a time, past the page cache. Returns bytes/s, negative on an error. */
static double sequential_rate(int fd, uint64_t bytes)
{
	uint64_t piece = 1 << 20, at = 0;
	char path[64];
	double start;
	void *buf = aligned_alloc(4096, piece);
	ssize_t n = 1;
	int direct;

	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	direct = open(path, O_RDONLY | O_DIRECT | O_CLOEXEC);
	if (direct < 0)
		direct = open(path, O_RDONLY | O_CLOEXEC);
	start = now();
	while (buf && direct >= 0 && at < bytes && (n = pread(direct, buf, piece, (off_t)at)) > 0)
		at += (uint64_t)n;
	if (direct >= 0)
		close(direct);
	free(buf);
	return at ? (double)at / (now() - start) : -1;
}

static int bench_stream(struct bench *b)
{
	struct shape s = { "stream", 6, 32, 8, 128, 0 };
	struct kvt_cache_params p = KVT_INIT(p);
	double got[ROUNDS_MAX], ceiling[ROUNDS_MAX], t;
	uint64_t before, budget = b->kv_bytes / 12;
	struct kvt_stats st = KVT_INIT(st);
	struct full_cache f;
	char what[64];

	s.tokens = (uint32_t)(b->kv_bytes / (s.layers * 2ull * s.kv_heads * s.dim * 2) / 256 * 256);
	p.threads = b->threads;
	p.disk_dir = b->dir;
	p.disk_bytes = b->kv_bytes + b->kv_bytes / 8;
	if (fill_cache(&f, &s, &p, budget, 1))
		return -1;
	if (kvt_cache_flush(f.cache) || attend_all(&f, &s, 1) < 0)
		goto failed;
	for (uint32_t r = 0; r < b->rounds; r++) {
		ceiling[r] = sequential_rate(kvt_store_fd(f.cache->store), f.bytes) / 1e9;
		kvt_cache_stats(f.cache, &st);
		before = st.disk_read_bytes;
		t = attend_all(&f, &s, 1);
		if (t < 0 || ceiling[r] < 0)
			goto failed;
		kvt_cache_stats(f.cache, &st);
		got[r] = (double)(st.disk_read_bytes - before) / t / 1e9;
	}
	snprintf(what, sizeof(what), "decode, KV %.1f x the %llu MiB budget", (double)f.bytes / (double)p.ram_bytes,
		 (unsigned long long)p.ram_bytes >> 20);
	report(b, what, "GB/s", got, ceiling, "sequential O_DIRECT reader, 1 MiB");
	empty_cache(&f);
	return 0;
failed:
	empty_cache(&f);
	return -1;
}

static int bench_placement(struct bench *b)
{
	static const struct shape s = { "placement", 1, 1, 1, 64, 65536 };
	struct kvt_cache_params p = KVT_INIT(p);
	double got[ROUNDS_MAX];
	struct kvt_view views[512];
	struct full_cache f;
	uint32_t n;

	p.threads = 1;
	p.block_bytes = 4096;
	if (fill_cache(&f, &s, &p, 0, 1))
		return -1;
	n = f.cache->planes[0].table_len;
	for (uint32_t r = 0; r < b->rounds; r++) {
		const uint32_t *table = f.seq->tables;
		double start = now();

		for (uint32_t pass = 0; pass < 16; pass++)
			for (uint32_t i = 0; i + 512 <= n; i += 512) {
				kvt_store_borrow_begin(f.cache->store, table + i, 512);
				if (kvt_store_borrow_wait(f.cache->store, table + i, 512, views))
					goto failed;
				kvt_store_return(f.cache->store, table + i, 512);
			}
		got[r] = (now() - start) * 1e9 / (16.0 * (n / 512 * 512));
	}
	report(b, "placement: borrow and return a block", "ns", got, NULL, "(1000 allowed)");
	empty_cache(&f);
	return 0;
failed:
	empty_cache(&f);
	return -1;
}

static int bench_digest(struct bench *b)
{
	static const uint32_t rows[] = { 128, 256, 512, 2048, 8192 };
	uint8_t *data = aligned_alloc(4096, 1 << 20);
	double got[ROUNDS_MAX];
	char what[64];

	if (!data)
		return kvt_fail(-ENOMEM, "no memory for a block");
	memset(data, 0x5a, 1 << 20);
	for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
		for (uint32_t r = 0; r < b->rounds; r++) {
			double start = now();
			uint64_t sum = 0;

			for (int k = 0; k < 64; k++)
				sum += kvt_rows_digest(0, (1 << 20) / rows[i], data, rows[i]);
			sink = (float)sum;
			got[r] = 64.0 * (1 << 20) / (now() - start) / 1e9;
		}
		snprintf(what, sizeof(what), "digest of 1 MiB, rows of %u bytes", rows[i]);
		report(b, what, "GB/s", got, NULL, "(one core; 10 wanted)");
	}
	free(data);
	return 0;
}

static bool wanted(int argc, char **argv, const char *what)
{
	for (int i = 0; i < argc; i++)
		if (!strcmp(argv[i], what))
			return true;
	return !argc;
}

int cmd_bench(int argc, char **argv)
{
	static const struct option options[] = {
		{ "threads", 1, NULL, 't' }, { "rounds", 1, NULL, 'r' }, { "disk-dir", 1, NULL, 'd' },
		{ "kv-bytes", 1, NULL, 'k' }, { "json", 0, NULL, 'j' },	 { "help", 0, NULL, 'h' }, { 0 },
	};
	static const char *const names[] = { "decode", "prefill", "stream", "placement", "digest" };
	struct bench b = { .threads = kvt_cores(), .rounds = 5, .kv_bytes = 384u << 20 };
	struct kvt_workers *w = NULL;
	uint64_t n;
	int opt, ret = 0;

	if (argc > 1 && !strcmp(argv[1], "gpu"))
		return bench_gpu(argc - 1, argv + 1);
	if (argc > 1 && !strcmp(argv[1], "load"))
		return bench_load(argc - 1, argv + 1);
	opterr = 0;
	while ((opt = getopt_long(argc, argv, ":h", options, NULL)) != -1) {
		switch (opt) {
		case 't':
			ret = tool_number("--threads", optarg, 1, 1024, &n);
			b.threads = (uint32_t)n;
			break;
		case 'r':
			ret = tool_number("--rounds", optarg, 1, ROUNDS_MAX, &n);
			b.rounds = (uint32_t)n;
			break;
		case 'd':
			b.dir = optarg;
			break;
		case 'k':
			ret = tool_size(optarg, &b.kv_bytes);
			if (!ret && (b.kv_bytes < 64u << 20 || b.kv_bytes > 1ull << 40))
				ret = kvt_fail(-EINVAL, "--kv-bytes %s: 64M to 1T", optarg);
			break;
		case 'j':
			b.json = true;
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
	argc -= optind;
	argv += optind;
	for (int i = 0; i < argc; i++) {
		size_t k = 0;

		while (k < sizeof(names) / sizeof(names[0]) && strcmp(argv[i], names[k]))
			k++;
		if (k == sizeof(names) / sizeof(names[0]))
			return tool_usage_error("bench", "'%s' is not decode, prefill, stream, placement or digest; gpu and load are run alone", argv[i]);
	}
	b.rows = json_array();
	if (!b.json)
		printf("kvtier %s, %s, %u threads, medians of %u\n", kvt_version(), kvt_isa_name(kvt_isa_best()), b.threads,
		       b.rounds);
	ret = kvt_workers_create(b.threads, &w);
	if (!ret && wanted(argc, argv, "decode"))
		ret = bench_decode(&b, w);
	if (!ret && wanted(argc, argv, "prefill"))
		ret = bench_prefill(&b, w);
	if (!ret && wanted(argc, argv, "stream"))
		ret = bench_stream(&b);
	if (!ret && wanted(argc, argv, "placement"))
		ret = bench_placement(&b);
	if (!ret && wanted(argc, argv, "digest"))
		ret = bench_digest(&b);
	kvt_workers_destroy(w);
	if (!ret && b.json) {
		json_dumpf(b.rows, stdout, JSON_INDENT(2));
		putchar('\n');
	}
	json_decref(b.rows);
	return ret ? tool_failed("bench") : 0;
}
