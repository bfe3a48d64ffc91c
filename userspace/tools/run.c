// SPDX-License-Identifier: MIT
/*
 * kvtier run: read a prompt, generate text greedily, with the model's KV cache
 * in tiers; and say how that went.
 */
#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/err.h"
#include "engines/ref/engine.h"
#include "tools/outfile.h"
#include "tools/tools.h"

#define PROMPT_BYTES_MAX (1u << 30)
#define DEFAULT_MAX_TOKENS 128
#define DEFAULT_CHUNK 512
#define DEFAULT_BLOCK (64u << 10)
#define UNSET UINT64_MAX
#define SPARE_SLOTS 128 /* for writes under way: the old slot stays until the new one is verified */
#define MIB (1024.0 * 1024)

struct options {
	const char *model, *tokenizer, *prompt, *prompt_file, *disk_dir, *stats, *logits;
	uint64_t max_tokens, threads, chunk;
	uint64_t gpu, pinned, ram, disk, block; /* bytes */
	uint64_t kv_type, host, io, backend;	/* enums */
	uint64_t untiered;
};

/* ---- options ---- */

enum kind { TEXT, SIZE, NUMBER, NAME, FLAG };

struct spec {
	const char *name;
	enum kind kind;
	size_t offset;
	uint64_t min, max;	   /* NUMBER */
	const char *const names[5]; /* NAME: value i is names[i] */
};

#define AT(field) offsetof(struct options, field)

static const struct spec specs[] = {
	{ "--model", TEXT, AT(model), 0, 0, { 0 } },
	{ "--tokenizer", TEXT, AT(tokenizer), 0, 0, { 0 } },
	{ "--prompt", TEXT, AT(prompt), 0, 0, { 0 } },
	{ "--prompt-file", TEXT, AT(prompt_file), 0, 0, { 0 } },
	{ "--max-tokens", NUMBER, AT(max_tokens), 1, 1u << 30, { 0 } },
	{ "--untiered", FLAG, AT(untiered), 0, 0, { 0 } },
	{ "--gpu-bytes", SIZE, AT(gpu), 0, 0, { 0 } },
	{ "--pinned-bytes", SIZE, AT(pinned), 0, 0, { 0 } },
	{ "--ram-bytes", SIZE, AT(ram), 0, 0, { 0 } },
	{ "--disk-bytes", SIZE, AT(disk), 0, 0, { 0 } },
	{ "--disk-dir", TEXT, AT(disk_dir), 0, 0, { 0 } },
	{ "--block-bytes", SIZE, AT(block), 0, 0, { 0 } },
	{ "--threads", NUMBER, AT(threads), 1, 1024, { 0 } },
	{ "--prefill-chunk", NUMBER, AT(chunk), 1, 1u << 30, { 0 } },
	{ "--kv-type", NAME, AT(kv_type), 0, 0, { "f32", "f16", "bf16" } },
	{ "--host", NAME, AT(host), 0, 0, { "auto", "user", "module" } },
	{ "--backend", NAME, AT(backend), 0, 0, { "auto", "cpu", "cuda" } },
	{ "--io", NAME, AT(io), 0, 0, { "auto", "uring", "threads" } },
	{ "--stats", TEXT, AT(stats), 0, 0, { 0 } },
	{ "--logits", TEXT, AT(logits), 0, 0, { 0 } },
};

static int set_option(const struct spec *s, const char *text, struct options *o)
{
	void *to = (char *)o + s->offset;
	uint64_t n;

	switch (s->kind) {
	case TEXT:
		*(const char **)to = text;
		return 0;
	case SIZE:
		if (tool_size(text, to))
			return tool_usage_error("run", "%s %s", s->name, kvt_last_error());
		return 0;
	case NUMBER:
		if (tool_number(s->name, text, s->min, s->max, to))
			return tool_usage_error("run", "%s", kvt_last_error());
		return 0;
	case NAME:
		for (n = 0; s->names[n] && strcmp(s->names[n], text); n++)
			;
		if (!s->names[n])
			return tool_usage_error("run", "%s \"%s\": %s, %s or %s are known", s->name, text, s->names[0],
						s->names[1], s->names[2]);
		*(uint64_t *)to = n;
		return 0;
	default:
		*(uint64_t *)to = 1;
		return 0;
	}
}

static const struct spec *find_option(const char *name)
{
	for (size_t i = 0; i < sizeof(specs) / sizeof(specs[0]); i++)
		if (!strcmp(specs[i].name, name))
			return &specs[i];
	return NULL;
}

static int check_options(const struct options *o)
{
	if (!o->model)
		return tool_usage_error("run", "--model DIR is missing");
	if (!o->prompt == !o->prompt_file)
		return tool_usage_error("run", "one of --prompt TEXT and --prompt-file FILE is needed");
	if (o->block % 4096 || o->block < 4096 || o->block > 2u << 20)
		return tool_usage_error("run", "--block-bytes %llu: a multiple of 4K from 4K to 2M is needed",
					(unsigned long long)o->block);
	if (o->untiered && (o->gpu != UNSET || o->pinned != UNSET || o->ram != UNSET || o->disk != UNSET || o->disk_dir))
		return tool_usage_error("run", "--untiered keeps the whole cache in memory: it takes no budgets and no --disk-dir");
	return 0;
}

/* 0, or the exit code. */
static int parse_options(int argc, char **argv, struct options *o)
{
	const struct spec *s;
	int code;

	*o = (struct options){ .max_tokens = DEFAULT_MAX_TOKENS, .chunk = DEFAULT_CHUNK, .gpu = UNSET, .pinned = UNSET,
			       .ram = UNSET, .disk = UNSET, .block = DEFAULT_BLOCK, .kv_type = KVT_F16 };
	for (int i = 1; i < argc; i++) {
		s = find_option(argv[i]);
		if (!s)
			return tool_usage_error("run", "\"%s\" is not an option", argv[i]);
		if (s->kind != FLAG && ++i == argc)
			return tool_usage_error("run", "%s needs a value", s->name);
		code = set_option(s, argv[i], o);
		if (code)
			return code;
	}
	return check_options(o);
}

/* ---- the run ---- */

struct run {
	struct options o;
	struct ref_model *model;
	uint32_t *ids, n_ids; /* the prompt */
	uint32_t max_new, generated, chunk;
	struct kvt_plane_params *planes;
	struct kvt_cache *cache;
	struct kvt_seq *seq;
	struct ref_engine *engine;
	float *logits_row;
	struct outfile logits, stats;
	double begin, prefill_s, decode_s, ttft_s; /* ttft: from the start of the program, loading included */
};

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static int read_prompt(struct run *r)
{
	const struct ref_config *c = &r->model->config;
	const char *text = r->o.prompt;
	char *file = NULL;
	size_t bytes;
	int err = 0;

	if (text)
		bytes = strlen(text);
	else
		err = ref_read_file(r->o.prompt_file, PROMPT_BYTES_MAX, &file, &bytes);
	if (!err)
		err = ref_encode(r->model->tokenizer, text ? text : file, bytes, &r->ids, &r->n_ids);
	free(file);
	if (err)
		return err;
	if (!r->n_ids)
		return kvt_fail(-EINVAL, "the prompt is empty, and the model has no BOS token to begin with");
	if (r->n_ids > c->context)
		return kvt_fail(-EINVAL, "the prompt has %u tokens, the model's context is %u: a shorter prompt is needed", r->n_ids,
				c->context);
	/* the last token is not fed back */
	r->max_new = c->context - r->n_ids + 1;
	if (r->o.max_tokens <= r->max_new)
		r->max_new = (uint32_t)r->o.max_tokens;
	else
		fprintf(stderr, "kvtier run: note: --max-tokens %llu is cut to %u, the model's context of %u then being full\n",
			(unsigned long long)r->o.max_tokens, r->max_new, c->context);
	return 0;
}

/* ---- budgets ---- */

/* Bytes of the blocks that @tokens tokens fill. */
static uint64_t blocks_bytes(const struct run *r, uint64_t tokens, uint64_t row_bytes)
{
	uint64_t rows = r->o.block / row_bytes;

	return rows ? (tokens + rows - 1) / rows * r->o.block * 2 * r->model->config.layers : 0;
}

/* What was not given: everything in RAM if that is a quarter of the machine's at most; and room on disk for all. */
static int choose_budgets(const struct run *r, uint64_t all, struct kvt_cache_params *p)
{
	const struct options *o = &r->o;
	uint64_t physical = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE), whole;
	int64_t least;

	p->gpu_bytes = o->gpu == UNSET ? 0 : o->gpu;
	p->pinned_bytes = o->pinned == UNSET ? 0 : o->pinned;
	p->disk_bytes = o->untiered ? 0 : o->disk == UNSET ? all + SPARE_SLOTS * o->block : o->disk;
	p->ram_bytes = o->ram == UNSET ? 0 : o->ram;
	if (o->ram != UNSET)
		return 0;
	least = kvt_cache_min_ram(p);
	if (least < 0)
		return (int)least;
	p->ram_bytes = (uint64_t)least;
	if (o->gpu != UNSET || o->pinned != UNSET)
		return 0;
	/* with what a frame costs beside its bytes */
	whole = (uint64_t)least + all + all / o->block * 256;
	if (!o->untiered && whole > physical / 4)
		whole = physical / 4;
	if (whole > p->ram_bytes)
		p->ram_bytes = whole;
	return 0;
}

static int create_cache(struct run *r)
{
	const struct ref_config *c = &r->model->config;
	const uint64_t tokens = (uint64_t)r->n_ids + r->max_new - 1;
	const uint64_t row = (uint64_t)c->kv_heads * c->head_dim * (r->o.kv_type == KVT_F32 ? 4 : 2);
	struct kvt_cache_params p = KVT_INIT(p);
	int err;

	r->planes = calloc(2 * c->layers, sizeof(*r->planes));
	if (!r->planes)
		return kvt_fail(-ENOMEM, "no memory for %u layers", c->layers);
	ref_planes(c, (enum kvt_codec)r->o.kv_type, r->planes);
	p.planes = r->planes;
	p.n_planes = 2 * c->layers;
	p.block_bytes = r->o.block;
	p.disk_dir = r->o.disk_dir;
	p.name = "run";
	p.threads = (uint32_t)r->o.threads;
	p.max_seqs = 1;
	p.max_tokens = (uint32_t)tokens;
	p.max_query_rows = r->chunk < DEFAULT_CHUNK ? r->chunk : DEFAULT_CHUNK;
	p.max_query_heads = c->heads;
	p.host = (uint32_t)r->o.host;
	p.io = (uint32_t)r->o.io;
	p.backend = (uint32_t)r->o.backend;
	err = choose_budgets(r, blocks_bytes(r, tokens, row), &p);
	if (!err)
		err = kvt_cache_create(&p, &r->cache);
	if (!err && r->o.block % row)
		fprintf(stderr, "kvtier run: note: a row of %llu bytes does not divide the block of %llu (--block-bytes): "
			"%llu bytes of each block stay unused\n", (unsigned long long)row, (unsigned long long)r->o.block,
			(unsigned long long)(r->o.block % row));
	return err;
}

/* ---- generation ---- */

static int prefill(struct run *r)
{
	struct tool_progress bar;
	uint32_t n;
	int err = 0;

	tool_progress_start(&bar, TOOL_PROGRESS_AUTO, "prefill", "tokens", r->n_ids);
	for (uint32_t at = 0; !err && at < r->n_ids; at += n) {
		n = r->n_ids - at < r->chunk ? r->n_ids - at : r->chunk;
		err = ref_forward(r->engine, r->seq, r->ids + at, n, at + n == r->n_ids, r->logits_row);
		tool_progress_update(&bar, at + n);
	}
	tool_progress_end(&bar);
	return err;
}

static int generate(struct run *r)
{
	const struct ref_config *c = &r->model->config;
	uint32_t before = r->ids[r->n_ids - 1], id;
	const char *piece;
	size_t bytes;
	int err;

	for (;;) {
		id = ref_argmax(r->logits_row, c->vocab);
		if (!isfinite(r->logits_row[id]))
			return kvt_fail(-EDOM, "the logits at position %u are not numbers: the model's weights, or --kv-type, are "
					"not fit for this prompt", kvt_seq_len(r->seq) - 1);
		if (r->logits.f)
			fwrite(r->logits_row, sizeof(float), c->vocab, r->logits.f);
		if (!r->generated++)
			r->ttft_s = now() - r->begin;
		if (ref_is_eos(c, id))
			return 0;
		piece = ref_decode(r->model->tokenizer, before, id, &bytes);
		fwrite(piece, 1, bytes, stdout);
		fflush(stdout);
		if (r->generated == r->max_new)
			return 0;
		err = ref_forward(r->engine, r->seq, &id, 1, 1, r->logits_row);
		if (err)
			return err;
		before = id;
	}
}

/* ---- what it took ---- */

static double rate(double n, double seconds)
{
	return seconds > 0 ? n / seconds : 0;
}

static void print_tiers(const struct run *r)
{
	struct kvt_stats st = KVT_INIT(st);
	const double seconds = r->prefill_s + r->decode_s;

	if (kvt_cache_stats(r->cache, &st))
		return;
	fprintf(stderr, "%-7s %12s %12s %8s\n", "tier", "budget MiB", "peak MiB", "blocks");
	for (uint32_t t = 0; t < KVT_TIERS; t++)
		if (st.tier[t].budget)
			fprintf(stderr, "%-7s %12.1f %12.1f %8llu\n", kvt_tier_name((enum kvt_tier)t),
				(double)st.tier[t].budget / MIB, (double)st.tier[t].peak / MIB,
				(unsigned long long)st.tier[t].blocks);
	fprintf(stderr, "disk    %llu reads, %.1f MiB, %.1f MiB/s; %llu writes, %.1f MiB, %.1f MiB/s\n",
		(unsigned long long)st.disk_reads, (double)st.disk_read_bytes / MIB,
		rate((double)st.disk_read_bytes / MIB, seconds), (unsigned long long)st.disk_writes,
		(double)st.disk_write_bytes / MIB, rate((double)st.disk_write_bytes / MIB, seconds));
	fprintf(stderr, "blocks  %llu found in memory, %llu loaded, %llu moved between memory tiers, %llu evicted\n",
		(unsigned long long)st.hits, (unsigned long long)st.misses, (unsigned long long)st.moves,
		(unsigned long long)st.evictions);
	fprintf(stderr, "prefill %u tokens, %.1f/s; decode %u tokens, %.1f/s; first token after %.2f s\n", r->n_ids,
		rate(r->n_ids, r->prefill_s), r->generated - 1, rate(r->generated - 1, r->decode_s), r->ttft_s);
}

static json_t *run_json(const struct run *r)
{
	return json_pack("{si si sf sf sf sf sf sI si ss}", "prompt_tokens", (int)r->n_ids, "generated_tokens",
			 (int)r->generated, "prefill_seconds", r->prefill_s, "prefill_tokens_per_s",
			 rate(r->n_ids, r->prefill_s), "decode_seconds", r->decode_s, "decode_tokens_per_s",
			 rate(r->generated - 1, r->decode_s), "ttft_seconds", r->ttft_s, "weight_bytes",
			 (json_int_t)r->model->bytes, "prefill_chunk", (int)r->chunk, "kv_type",
			 kvt_codec_name((enum kvt_codec)r->o.kv_type));
}

/* The cache's counters, and "run" beside them. */
static int write_stats(struct run *r)
{
	const int64_t bytes = kvt_cache_stats_json(r->cache, NULL, 0);
	const size_t room = bytes < 0 ? 0 : (size_t)bytes + 256; /* numbers may grow meanwhile */
	char *text = room ? malloc(room) : NULL;
	json_t *o = NULL;
	int err = 0;

	if (text) {
		kvt_cache_stats_json(r->cache, text, room);
		o = json_loads(text, 0, NULL);
	}
	if (!o || json_object_set_new(o, "run", run_json(r)) ||
	    json_dumpf(o, r->stats.f, JSON_INDENT(2) | JSON_PRESERVE_ORDER) || fputc('\n', r->stats.f) == EOF)
		err = kvt_fail(-EIO, "%s: the stats could not be written", r->stats.path);
	json_decref(o);
	free(text);
	return err;
}

static int run(struct run *r)
{
	double start;
	int err;

	err = ref_model_load(r->o.model, r->o.tokenizer, &r->model);
	if (!err)
		err = read_prompt(r);
	if (err)
		return err;
	r->chunk = r->o.chunk < r->n_ids ? (uint32_t)r->o.chunk : r->n_ids;
	if (r->o.logits)
		err = outfile_open(&r->logits, r->o.logits);
	if (!err && r->o.stats)
		err = outfile_open(&r->stats, r->o.stats);
	if (!err)
		err = create_cache(r);
	if (!err)
		err = kvt_seq_create(r->cache, &r->seq);
	if (!err)
		err = ref_engine_create(r->model, r->cache, r->chunk, NULL, &r->engine);
	if (err)
		return err;
	r->logits_row = malloc(r->model->config.vocab * sizeof(float));
	if (!r->logits_row)
		return kvt_fail(-ENOMEM, "no memory for %u logits", r->model->config.vocab);
	start = now();
	err = prefill(r);
	r->prefill_s = now() - start;
	start = now();
	if (!err)
		err = generate(r);
	r->decode_s = now() - start;
	if (isatty(STDOUT_FILENO))
		fputc('\n', stdout);
	if (err)
		return err;
	if (isatty(STDERR_FILENO))
		print_tiers(r);
	if (r->stats.f)
		err = write_stats(r);
	if (!err && r->logits.f)
		err = outfile_commit(&r->logits);
	if (!err && r->stats.f)
		err = outfile_commit(&r->stats);
	return err;
}

int cmd_run(int argc, char **argv)
{
	struct run r = { .begin = now() };
	int code = parse_options(argc, argv, &r.o);

	if (code)
		return code;
	if (run(&r))
		code = tool_failed("run");
	outfile_abort(&r.logits);
	outfile_abort(&r.stats);
	ref_engine_free(r.engine);
	kvt_seq_free(r.seq);
	kvt_cache_destroy(r.cache);
	free(r.logits_row);
	free(r.planes);
	free(r.ids);
	ref_model_free(r.model);
	return code;
}
