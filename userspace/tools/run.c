// SPDX-License-Identifier: MIT
/*
 * kvtier run: read a prompt, generate text, with the model's KV cache in tiers;
 * and say how that went.
 */
#include <errno.h>
#include <jansson.h>
#include <limits.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "attention/attend.h"
#include "base/err.h"
#include "cache/batch.h"
#include "engines/ref/engine.h"
#include "kvtier-arena.h"
#include "runtime/loader.h"
#include "store/journal.h"
#include "tools/measure.h"
#include "tools/outfile.h"
#include "tools/run_options.h"
#include "tools/tools.h"

#define PROMPT_BYTES_MAX (1u << 30)
#define QUERY_ROWS 512 /* of a pass over the cache: more scratch than that gains nothing */
#define SPARE_SLOTS 128 /* for writes under way: the old slot stays until the new one is verified */
#define KEPT_PROMPTS 8	/* that a directory has room for, if nothing else is said */
#define MIB (1024.0 * 1024)

struct run {
	struct run_options o;
	struct ref_model *model;
	uint32_t *ids, n_ids; /* the prompt; behind it, what was generated */
	uint32_t max_new, generated, chunk;
	uint32_t cached; /* of the prompt's, from earlier runs */
	uint8_t fingerprint[KVT_FINGERPRINT];
	uint64_t row_bytes; /* of a plane */
	struct kvt_plane_params *planes;
	struct kvt_gpu *gpu; /* NULL: the cache's, if it has any */
	bool on_gpu;	     /* it computes */
	struct kvt_cache *cache;
	struct kvt_seq *seq;
	struct ref_engine *engine;
	struct kvt_sampler *sampler;
	const float *logits_row;
	struct outfile logits, stats;
	double begin, prefill_s, decode_s, ttft_s; /* ttft: from the start of the program, loading included */
};

/* ---- model and prompt ---- */

struct loading {
	struct tool_progress bar;
	enum tool_progress_mode mode;
	double begin;
	bool on;
};

static int show_loading(void *user, uint64_t done, uint64_t total)
{
	struct loading *l = user;

	if (!l->on) {
		tool_progress_start(&l->bar, l->mode, "weights", "bytes", total);
		l->bar.start = l->begin; /* the first piece is here already */
		l->on = true;
	}
	tool_progress_update(&l->bar, done);
	return 0;
}

static int load_model(struct run *r)
{
	struct loading l = { .mode = (enum tool_progress_mode)r->o.progress, .begin = now() };
	const struct kvt_load_params how = { .size = sizeof(how), .io = (uint32_t)r->o.io,
					     .mode = r->o.no_fast_load ? KVT_LOAD_MMAP : KVT_LOAD_AUTO,
					     .progress = show_loading, .user = &l };
	int err = ref_model_load(r->o.model, r->o.tokenizer, &how, &r->model);

	if (l.on)
		tool_progress_end(&l.bar);
	return err;
}

static int read_prompt(struct run *r)
{
	const struct ref_config *c = &r->model->config;
	const char *text = r->o.prompt;
	uint32_t *grown;
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
	grown = realloc(r->ids, ((size_t)r->n_ids + r->max_new) * sizeof(*grown));
	if (!grown)
		return kvt_fail(-ENOMEM, "no memory for %u tokens", r->n_ids + r->max_new);
	r->ids = grown;
	return 0;
}

/* ---- budgets ---- */

/* Bytes of the blocks that @tokens tokens fill. */
static uint64_t blocks_bytes(const struct run *r, uint64_t tokens)
{
	uint64_t rows = r->o.block / r->row_bytes;

	return rows ? (tokens + rows - 1) / rows * r->o.block * 2 * r->model->config.layers : 0;
}

/*
 * A GPU computes where the gpu tier is to live on one: --backend cuda, or auto
 * with --gpu-bytes; the CPU does what it cannot. Sets the scratch that takes.
 */
static int choose_gpu(struct run *r, struct kvt_cache_params *p)
{
	const struct kvt_batch_params batch = { .size = sizeof(batch), .max_seqs = 1, .max_tokens = r->chunk };
	const bool wanted = r->o.gpu != RUN_UNSET && r->o.gpu;
	int64_t scratch;
	int err;

	if (r->o.untiered || (r->o.backend != KVT_BACKEND_CUDA && (r->o.backend != KVT_BACKEND_AUTO || !wanted)))
		return 0;
	err = r->o.backend == KVT_BACKEND_CUDA ? kvt_gpu_open(KVT_BACKEND_CUDA, p->gpu_device, &r->gpu) :
						 kvt_gpu_cuda_open(p->gpu_device, &r->gpu);
	if (err) /* what the gpu tier lives on then, the cache says */
		return r->o.backend == KVT_BACKEND_CUDA ? err : 0;
	if (r->o.gpu != RUN_UNSET && !wanted)
		return 0;
	if (r->o.warm) {
		fprintf(stderr, "kvtier run: note: the CPU computes: what --warm keeps is in the ram tier, which a GPU does not read\n");
		return 0;
	}
	scratch = kvt_batch_scratch(p, &batch, r->model->config.heads);
	if (scratch < 0) {
		fprintf(stderr, "kvtier run: note: the CPU computes: %s\n", kvt_last_error());
		return 0;
	}
	p->gpu_scratch_bytes = (uint64_t)scratch;
	r->on_gpu = true;
	return 0;
}

/*
 * The GPU reads blocks in its memory and in pinned memory: what was not given
 * is as much of its memory as is free and useful, and pinned memory for the rest.
 */
static int choose_gpu_budgets(const struct run *r, uint64_t all, struct kvt_cache_params *p)
{
	const struct run_options *o = &r->o;
	const int64_t model = ref_gpu_bytes(&r->model->config, p->max_tokens, r->chunk, 1), least = kvt_cache_min_gpu(p);
	uint64_t physical = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE), room, total, wanted, held;
	int err = model < 0 ? (int)model : least < 0 ? (int)least : r->gpu->ops->mem_info(r->gpu, &room, &total);

	if (err)
		return err;
	if (o->gpu != RUN_UNSET && o->gpu < (uint64_t)least)
		return kvt_fail(-ENOMEM, "gpu_bytes is %llu bytes: at least %llu are needed (%llu of them tables and scratch of attention); the model's %llu come on top",
				(unsigned long long)o->gpu, (unsigned long long)least, (unsigned long long)p->gpu_scratch_bytes,
				(unsigned long long)model);
	/* some is left to the driver and to others */
	room -= room / 16;
	room = room > (uint64_t)model ? room - (uint64_t)model : 0;
	p->gpu_bytes = o->gpu != RUN_UNSET ? o->gpu : (uint64_t)least + all;
	wanted = o->gpu != RUN_UNSET ? o->gpu : (uint64_t)least;
	if (wanted > room)
		return kvt_fail(-ENOMEM, "%s: the model takes %llu bytes of GPU memory and the cache %llu (gpu_bytes): %llu are free",
				r->gpu->description, (unsigned long long)model, (unsigned long long)wanted,
				(unsigned long long)room + (uint64_t)model);
	if (p->gpu_bytes > room)
		p->gpu_bytes = room;
	held = p->gpu_bytes - (uint64_t)least;
	if (o->pinned != RUN_UNSET || held >= all)
		return 0;
	/* what is read from a directory stays in pinned memory, and each plane's last block is copied to go on from */
	if (o->store)
		p->pinned_bytes = all + 2 * p->n_planes * o->block;
	else
		p->pinned_bytes = all - held;
	/* not all host frames may hold what is nowhere else: store/internal.h, dirty_max */
	p->pinned_bytes += (2 * kvt_split_blocks((uint32_t)(o->block / r->row_bytes)) + 2) * o->block;
	if (p->pinned_bytes > physical / 4)
		return kvt_fail(-ENOMEM, "%llu bytes of the cache are beside gpu_bytes, in pinned memory: more than a quarter of this machine's: give pinned_bytes",
				(unsigned long long)p->pinned_bytes);
	return 0;
}

/* Bytes of the slots that a directory has already: a short prompt is no reason to give some back. */
static uint64_t kept_bytes(const char *dir)
{
	char path[PATH_MAX];
	struct stat st;

	if (snprintf(path, sizeof(path), "%s/" KVT_DIR_SLOTS, dir) >= (int)sizeof(path) || stat(path, &st) || st.st_size < 0)
		return 0;
	return (uint64_t)st.st_size;
}

/* What was not given: everything in RAM if that is a quarter of the machine's at most; and room on disk for all. */
static int choose_budgets(const struct run *r, uint64_t all, struct kvt_cache_params *p)
{
	const struct run_options *o = &r->o;
	uint64_t physical = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE), whole, chunks;
	int64_t least;

	p->gpu_bytes = o->gpu == RUN_UNSET ? 0 : o->gpu;
	p->pinned_bytes = o->pinned == RUN_UNSET ? 0 : o->pinned;
	if (r->on_gpu) {
		int err = choose_gpu_budgets(r, all, p);

		if (err)
			return err;
	}
	p->disk_bytes = o->untiered || (r->on_gpu && o->disk == RUN_UNSET && !o->store) ? 0 :
			o->disk != RUN_UNSET ? o->disk : (o->store ? KEPT_PROMPTS * all : all) + SPARE_SLOTS * o->block;
	if (o->store && o->disk == RUN_UNSET && kept_bytes(o->store) > p->disk_bytes)
		p->disk_bytes = kept_bytes(o->store);
	if (o->store) {
		/* as many chunks as the directory can hold, and the tails of some prompts */
		chunks = p->disk_bytes / (p->n_planes * o->block) + KEPT_PROMPTS * 8;
		least = kvt_prefix_bytes(p, chunks < UINT32_MAX / 4 ? (uint32_t)chunks : UINT32_MAX / 4);
		if (least < 0)
			return (int)least;
		p->prefix_bytes = (uint64_t)least;
	}
	p->ram_bytes = o->ram == RUN_UNSET ? 0 : o->ram;
	if (o->ram != RUN_UNSET)
		return 0;
	least = kvt_cache_min_ram(p);
	if (least < 0)
		return (int)least;
	p->ram_bytes = (uint64_t)least;
	if (r->on_gpu || o->gpu != RUN_UNSET || o->pinned != RUN_UNSET)
		return 0;
	/* with what a frame costs beside its bytes */
	whole = (uint64_t)least + all + all / o->block * 256;
	if (!o->untiered && whole > physical / 4)
		whole = physical / 4;
	if (whole > p->ram_bytes)
		p->ram_bytes = whole;
	return 0;
}

/* Said now, not when half of the prompt is computed. */
static int check_room(const struct run *r, bool disk)
{
	const uint64_t tokens = (uint64_t)r->n_ids + r->max_new - 1, bytes = blocks_bytes(r, tokens);
	const uint64_t wanting = kvt_cache_wanting(r->cache, bytes / r->o.block);

	if (!wanting)
		return 0;
	return kvt_fail(-ENOSPC, "the prompt's %u tokens and the %u to come take %llu bytes in blocks of %llu: at least %llu more are needed in %s, or a lower max_tokens",
			r->n_ids, r->max_new, (unsigned long long)bytes, (unsigned long long)r->o.block,
			(unsigned long long)wanting, disk ? "disk_bytes" : "ram_bytes or pinned_bytes");
}

static int create_cache(struct run *r)
{
	const struct ref_config *c = &r->model->config;
	/* what is found again has a size that does not depend on the prompt */
	const uint64_t tokens = r->o.warm ? c->context : (uint64_t)r->n_ids + r->max_new - 1;
	const uint64_t rows = r->o.warm ? r->o.chunk : r->chunk;
	struct kvt_cache_params p = KVT_INIT(p);
	int err;

	r->row_bytes = (uint64_t)c->kv_heads * c->head_dim * (r->o.kv_type == KVT_F32 ? 4 : 2);
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
	p.max_query_rows = rows < QUERY_ROWS ? (uint32_t)rows : QUERY_ROWS;
	p.max_query_heads = c->heads;
	p.host = (uint32_t)r->o.host;
	p.io = (uint32_t)r->o.io;
	p.backend = (uint32_t)r->o.backend;
	p.gpu_device = r->o.device == RUN_UNSET ? 0 : (uint32_t)r->o.device;
	p.policy = (uint32_t)r->o.policy;
	p.flags = KVT_CACHE_PUBLISH;
	if (r->o.store || r->o.warm)
		ref_fingerprint(r->model, r->fingerprint);
	if (r->o.store) {
		p.store_dir = r->o.store;
		p.store_model = r->fingerprint;
	}
	if (r->o.warm) {
		p.host = KVT_HOST_MODULE; /* or the reason why not */
		p.warm_name = r->o.warm;
		memcpy(&p.warm_id, r->fingerprint, sizeof(p.warm_id));
	}
	err = choose_gpu(r, &p);
	if (!err)
		err = choose_budgets(r, blocks_bytes(r, tokens), &p);
	if (!err)
		err = kvt_cache_create_on(&p, NULL, r->gpu, &r->cache);
	if (!err)
		err = check_room(r, p.disk_bytes);
	if (!err && r->o.block % r->row_bytes)
		fprintf(stderr, "kvtier run: note: a row of %llu bytes does not divide the block of %llu (--block-bytes): "
			"%llu bytes of each block stay unused\n", (unsigned long long)r->row_bytes, (unsigned long long)r->o.block,
			(unsigned long long)(r->o.block % r->row_bytes));
	return err;
}

/* ---- what earlier runs have computed ---- */

static struct kvt_prefix_root kept_root(const struct run *r)
{
	struct kvt_prefix_root root = KVT_INIT(root);

	memcpy(root.model, r->fingerprint, sizeof(root.model));
	return root;
}

/* The sequence begins with what is known of the prompt, but for its last token: that one's logits are wanted. */
static int begin_with_kept(struct run *r)
{
	const struct kvt_prefix_root root = kept_root(r);
	struct kvt_prefix_match match;
	int64_t n = kvt_prefix_match(r->cache, &root, r->ids, r->n_ids - 1, &match);

	if (n)
		return (int)n;
	/* what was found in memory is no longer */
	if (match.tokens > r->cached) {
		n = kvt_seq_truncate(r->seq, 0);
		if (!n)
			n = kvt_prefix_attach(r->cache, &match, r->n_ids, r->seq);
		r->cached = n < 0 ? 0 : (uint32_t)n;
	}
	kvt_prefix_release(r->cache, &match);
	return n < 0 ? (int)n : 0;
}

/* The same of what a run before this one left in the named pool; else the sequence is a new one. */
static int begin_with_warm(struct run *r)
{
	int err = r->o.warm ? kvt_seq_recover(r->cache, r->ids, r->n_ids - 1, &r->seq) : -ENOENT;

	if (err == -ENOENT)
		return kvt_seq_create(r->cache, &r->seq);
	if (!err)
		r->cached = kvt_seq_len(r->seq);
	return err;
}

/* For later runs. That there is no room for it is not this one's failure. */
static int keep(struct run *r)
{
	const struct kvt_prefix_root root = kept_root(r);
	const uint32_t computed = r->n_ids - r->cached, tokens = kvt_seq_len(r->seq);
	int64_t n = kvt_prefix_insert(r->cache, &root, r->seq, tokens, (uint32_t)(r->prefill_s / computed * 1e9));

	return n < 0 ? (int)n : 0;
}

/* ---- generation ---- */

static int prefill(struct run *r)
{
	struct tool_progress bar;
	uint32_t n;
	int err = 0;

	tool_progress_start(&bar, (enum tool_progress_mode)r->o.progress, "prefill", "tokens", r->n_ids);
	bar.from = r->cached;
	bar.grows = true;
	for (uint32_t at = r->cached; !err && at < r->n_ids; at += n) {
		n = r->n_ids - at < r->chunk ? r->n_ids - at : r->chunk;
		err = ref_forward(r->engine, r->seq, r->ids + at, n, at + n == r->n_ids, &r->logits_row);
		tool_progress_update(&bar, at + n);
	}
	tool_progress_end(&bar);
	return err;
}

/* The token behind those in r->ids. Its place in the sequence addresses the draw: (seed, 0, position). */
static int sample(struct run *r, uint32_t *id)
{
	const uint32_t position = r->n_ids + r->generated;
	struct kvt_sample row = { .params = &r->o.sampling, .logits = r->logits_row, .history = r->ids,
				  .n_history = position, .position = position };
	int err = kvt_sampler_sample(r->sampler, &row, 1);

	*id = row.token;
	if (err == -EDOM || (!err && !isfinite(r->logits_row[*id])))
		return kvt_fail(-EDOM, "the logits at position %u are not numbers: the model's weights, or --kv-type, are not fit "
				"for this prompt", position - 1);
	return err;
}

static int put_text(const char *text, size_t bytes)
{
	int err;

	fwrite(text, 1, bytes, stdout);
	err = tool_output_end();
	return err ? kvt_fail(err, "standard output could not be written: %s", strerror(-err)) : 0;
}

static int generate(struct run *r)
{
	const struct ref_config *c = &r->model->config;
	const char *piece;
	size_t bytes;
	uint32_t *id;
	int err;

	for (;;) {
		id = &r->ids[r->n_ids + r->generated];
		err = sample(r, id);
		if (err)
			return err;
		if (r->logits.f)
			fwrite(r->logits_row, sizeof(float), c->vocab, r->logits.f);
		if (!r->generated++)
			r->ttft_s = now() - r->begin;
		if (ref_is_eos(c, *id))
			return 0;
		piece = ref_decode(r->model->tokenizer, id[-1], *id, &bytes);
		err = put_text(piece, bytes);
		if (err || r->generated == r->max_new)
			return err;
		err = ref_forward(r->engine, r->seq, id, 1, 1, &r->logits_row);
		if (err)
			return err;
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
	fprintf(stderr, "%-7s %12s %14s %8s\n", "tier", "budget MiB", "set aside MiB", "blocks");
	for (uint32_t t = 0; t < KVT_TIERS; t++)
		if (st.tier[t].budget)
			fprintf(stderr, "%-7s %12.1f %14.1f %8llu\n", kvt_tier_name((enum kvt_tier)t),
				(double)st.tier[t].budget / MIB, (double)st.tier[t].peak / MIB,
				(unsigned long long)st.tier[t].blocks);
	fprintf(stderr, "disk    %llu reads, %.1f MiB, %.1f MiB/s; %llu writes, %.1f MiB, %.1f MiB/s\n",
		(unsigned long long)st.disk_reads, (double)st.disk_read_bytes / MIB,
		rate((double)st.disk_read_bytes / MIB, seconds), (unsigned long long)st.disk_writes,
		(double)st.disk_write_bytes / MIB, rate((double)st.disk_write_bytes / MIB, seconds));
	fprintf(stderr, "blocks  %llu found in memory, %llu loaded, %llu moved between memory tiers, %llu evicted\n",
		(unsigned long long)st.hits, (unsigned long long)st.misses, (unsigned long long)st.moves,
		(unsigned long long)st.evictions);
	if (r->o.store || r->o.warm)
		fprintf(stderr, "%-7s %u of the prompt's %u tokens are of earlier runs\n", r->o.warm ? "warm" : "store", r->cached,
			r->n_ids);
	fprintf(stderr, "prefill %u tokens, %.1f/s; decode %u tokens, %.1f/s; first token after %.2f s\n", r->n_ids - r->cached,
		rate(r->n_ids - r->cached, r->prefill_s), r->generated - 1, rate(r->generated - 1, r->decode_s), r->ttft_s);
}

static json_t *run_json(const struct run *r)
{
	return json_pack("{si si si sf sf sf sf sf sI si ss sb}", "prompt_tokens", (int)r->n_ids, "cached_tokens",
			 (int)r->cached, "generated_tokens", (int)r->generated, "prefill_seconds", r->prefill_s,
			 "prefill_tokens_per_s", rate(r->n_ids - r->cached, r->prefill_s), "decode_seconds", r->decode_s, "decode_tokens_per_s",
			 rate(r->generated - 1, r->decode_s), "ttft_seconds", r->ttft_s, "weight_bytes",
			 (json_int_t)r->model->bytes, "prefill_chunk", (int)r->chunk, "kv_type",
			 kvt_codec_name((enum kvt_codec)r->o.kv_type), "on_gpu", r->on_gpu);
}

/* The cache's counters, and "run" beside them. */
static int write_stats(struct run *r)
{
	const int64_t bytes = kvt_cache_stats_json(r->cache, NULL, 0);
	const size_t room = bytes < 0 ? 0 : (size_t)bytes + 256; /* numbers may grow meanwhile */
	char *text = room ? malloc(room) : NULL, *all = NULL;
	json_t *o = NULL;
	int err = 0;

	if (text) {
		kvt_cache_stats_json(r->cache, text, room);
		o = json_loads(text, 0, NULL);
	}
	if (o && !json_object_set_new(o, "run", run_json(r)))
		all = json_dumps(o, JSON_INDENT(2) | JSON_PRESERVE_ORDER);
	if (all)
		fprintf(r->stats.f, "%s\n", all); /* a failure: outfile_commit() says it */
	else
		err = kvt_fail(-ENOMEM, "%s: no memory for the stats", r->stats.path);
	free(all);
	json_decref(o);
	free(text);
	return err;
}

static int open_outputs(struct run *r)
{
	int err = 0;

	if (r->o.logits)
		err = outfile_open(&r->logits, r->o.logits);
	if (!err && r->o.stats)
		err = outfile_open(&r->stats, r->o.stats);
	return err;
}

static int create_engine(struct run *r)
{
	const struct ref_engine_params p = { .model = r->model, .cache = r->cache, .tokens = r->chunk, .on_gpu = r->on_gpu };
	int err = begin_with_warm(r);

	if (!err)
		err = ref_engine_create(&p, &r->engine);
	if (!err)
		err = kvt_sampler_create(r->model->config.vocab, &r->sampler);
	return err;
}

static int start(struct run *r)
{
	int err = load_model(r);

	if (!err)
		err = kvt_sampler_check(&r->o.sampling, r->model->config.vocab);
	if (!err)
		err = read_prompt(r);
	if (err)
		return err;
	r->chunk = r->o.chunk < r->n_ids ? (uint32_t)r->o.chunk : r->n_ids;
	err = open_outputs(r);
	if (!err)
		err = create_cache(r);
	return err ? err : create_engine(r);
}

static int run(struct run *r)
{
	struct stat st;
	double begin;
	int err = start(r);

	if (err)
		return err;
	if (r->o.store)
		err = begin_with_kept(r);
	if (err)
		return err;
	begin = now();
	err = prefill(r);
	r->prefill_s = now() - begin;
	if (!err && r->o.store) { /* now, for the rest may be interrupted */
		ref_engine_rest(r->engine);
		err = keep(r);
	}
	begin = now();
	if (!err)
		err = generate(r);
	r->decode_s = now() - begin;
	ref_engine_rest(r->engine);
	if (!err && r->o.store)
		err = keep(r);
	if (!err && r->o.store && stat(r->o.store, &st))
		fprintf(stderr, "kvtier run: note: --store %s is no longer there (%s): what was kept in it is lost\n", r->o.store,
			strerror(errno));
	if (!err && isatty(STDOUT_FILENO))
		err = put_text("\n", 1);
	if (err)
		return err;
	if (isatty(STDERR_FILENO) || r->o.progress == TOOL_PROGRESS_ALWAYS)
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
	int code = run_options_parse(argc, argv, &r.o);

	if (!code && run(&r))
		code = tool_failed("run");
	outfile_abort(&r.logits);
	outfile_abort(&r.stats);
	kvt_sampler_destroy(r.sampler);
	ref_engine_free(r.engine);
	if (!r.o.warm) /* else it is the next run's */
		kvt_seq_free(r.seq);
	kvt_cache_destroy(r.cache);
	kvt_gpu_close(r.gpu);
	free(r.planes);
	free(r.ids);
	ref_model_free(r.model);
	run_options_free(&r.o);
	return code;
}
