// SPDX-License-Identifier: MIT
/*
 * A cache's life: parameters are checked, budgets divided into overhead and
 * frames, and everything is allocated.
 *
 * The RAM budget pays for all overhead first; what is left is frames. The other
 * tiers' budgets are frames alone, but for what a gpu's own staging takes.
 */
#include "cache/cache.h"

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/err.h"
#include "base/params.h"
#include "cache/prefix.h"
#include "cache/publish.h"
#include "codec/codec.h"
#include "kvtier-arena.h"
#include "store/journal.h"

#define DEFAULT_BLOCK_BYTES (64u << 10)
#define DEFAULT_MAX_SEQS 16
#define DEFAULT_MAX_TOKENS 131072
#define DEFAULT_QUERY_ROWS 512
#define HOST_DEPTH 64
#define FRAMES_MAX (UINT32_MAX / 8) /* of a tier */
#define PREFIX_MAX (1ull << 48) /* bytes: ram_overhead() does not wrap */

static const struct kvt_policy_ops *const policies[KVT_POLICIES] = {
	[KVT_POLICY_AUTO] = &kvt_policy_auto, [KVT_POLICY_LRU] = &kvt_policy_lru, [KVT_POLICY_S3FIFO] = &kvt_policy_s3fifo,
	[KVT_POLICY_COST] = &kvt_policy_cost, [KVT_POLICY_SCAN] = &kvt_policy_scan,
};

/* ---- parameters ---- */

static int check_plane(const struct kvt_plane_params *p, uint32_t i, const struct kvt_cache_params *cache,
		       struct kvt_plane *plane)
{
	uint64_t elems, row, block_bytes = cache->block_bytes;

	if (p->codec >= KVT_CODECS)
		return kvt_fail(-EINVAL, "plane %u: codec %u is unknown", i, p->codec);
	if (p->heads < 1 || p->heads > 1024)
		return kvt_fail(-EINVAL, "plane %u: %u heads, 1 to 1024 expected", i, p->heads);
	if (p->head_dim < 1 || p->head_dim > 8192)
		return kvt_fail(-EINVAL, "plane %u: head_dim %u, 1 to 8192 expected", i, p->head_dim);
	if (p->reserved)
		return kvt_fail(-EINVAL, "plane %u: reserved is %u, not 0", i, p->reserved);
	if (p->rows > 1ull << 40)
		return kvt_fail(-EINVAL, "plane %u: %llu rows, 2^40 at most", i, (unsigned long long)p->rows);
	if (p->head_dim % kvt_codec_group(p->codec))
		return kvt_fail(-EINVAL, "plane %u: head_dim %u: %s encodes %u elements together: a multiple of them expected, or another codec",
				i, p->head_dim, kvt_codec_name(p->codec), kvt_codec_group(p->codec));
	if (kvt_codec_group(p->codec) > 1 && cache->gpu_bytes)
		return kvt_fail(-EINVAL, "plane %u: the gpu tier has no kernels for %s yet: gpu_bytes 0, or f16",
				i, kvt_codec_name(p->codec));
	elems = (uint64_t)p->heads * p->head_dim;
	row = kvt_codec_bytes(p->codec, elems);
	if (row > block_bytes)
		return kvt_fail(-EINVAL, "plane %u: a row of %llu bytes does not fit a block of %llu: raise block_bytes (2 MiB at most)",
				i, (unsigned long long)row, (unsigned long long)block_bytes);
	*plane = (struct kvt_plane){
		.geom = { .codec = p->codec, .elems = (uint32_t)elems, .row_bytes = (uint32_t)row,
			  .block_rows = (uint32_t)(block_bytes / row) },
		.heads = p->heads, .head_dim = p->head_dim, .layer = p->layer, .rows = p->rows,
		.next_k = UINT32_MAX, .next_v = UINT32_MAX,
	};
	return 0;
}

static bool printable(const char *s)
{
	for (; *s; s++)
		if (*s < ' ' || *s > '~')
			return false;
	return true;
}

/* @least: ram_bytes is what is being asked for. */
static int check_params(struct kvt_cache_params *p, bool least)
{
	uint64_t physical = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
	const uint64_t ram = least ? 0 : p->ram_bytes;

	if ((ram > physical || p->pinned_bytes > physical - ram) && (!ram || !p->pinned_bytes))
		return kvt_fail(-ENOMEM, "%s is %llu: more than this machine's %llu bytes of memory: lower it and give a disk budget",
				ram ? "ram_bytes" : "pinned_bytes", (unsigned long long)(ram + p->pinned_bytes),
				(unsigned long long)physical);
	if (ram > physical || p->pinned_bytes > physical - ram)
		return kvt_fail(-ENOMEM, "ram_bytes %llu and pinned_bytes %llu are more than this machine's %llu bytes of memory: lower them and give a disk budget",
				(unsigned long long)ram, (unsigned long long)p->pinned_bytes,
				(unsigned long long)physical);
	if (!p->block_bytes)
		p->block_bytes = DEFAULT_BLOCK_BYTES;
	if (p->block_bytes % 4096 || p->block_bytes > 2u << 20)
		return kvt_fail(-EINVAL, "block_bytes is %llu: a multiple of 4 KiB from 4 KiB to 2 MiB expected",
				(unsigned long long)p->block_bytes);
	if (p->flags & ~(KVT_CACHE_HUGEPAGES | KVT_CACHE_NO_WRITE_VERIFY | KVT_CACHE_NUMA_STRICT | KVT_CACHE_PUBLISH) ||
	    p->reserved2)
		return kvt_fail(-EINVAL, "flags 0x%x, reserved2 %u: unknown bits", p->flags, p->reserved2);
	if (p->policy >= KVT_POLICIES)
		return kvt_fail(-EINVAL, "policy %u is unknown", p->policy);
	if (!p->prefix_bytes && (p->prefix_tokens || p->snapshots || p->snapshot_bytes || p->store_dir))
		return kvt_fail(-EINVAL, "prefix_tokens, snapshots and store_dir are of a prefix tree: give prefix_bytes");
	if (p->prefix_bytes > PREFIX_MAX)
		return kvt_fail(-EINVAL, "prefix_bytes is %llu: it is a part of ram_bytes, and 2^48 at most",
				(unsigned long long)p->prefix_bytes);
	if (p->store_dir && !p->disk_bytes)
		return kvt_fail(-EINVAL, "store_dir %s without disk_bytes: how much may it take?", p->store_dir);
	if (!p->planes || p->n_planes < 1 || p->n_planes > 65535)
		return kvt_fail(-EINVAL, "%u planes, 1 to 65535 expected", p->planes ? p->n_planes : 0);
	if (p->threads > 1024)
		return kvt_fail(-EINVAL, "%u threads, 1 to 1024 expected (0: one for each core)", p->threads);
	if (p->name && (strlen(p->name) > 63 || !printable(p->name)))
		return kvt_fail(-EINVAL, "the name is %zu bytes long: at most 63 printable ASCII bytes expected", strlen(p->name));
	if (p->numa_node < 0 || p->numa_node > 65536)
		return kvt_fail(-EINVAL, "numa_node is %d: a node's number + 1, or 0 for any, expected", p->numa_node);
	if (p->host > KVT_HOST_MODULE || p->io > KVT_IO_THREADS || p->backend > KVT_BACKEND_CUDA)
		return kvt_fail(-EINVAL, "host %u, io %u, backend %u: not all are known", p->host, p->io, p->backend);
	if (p->gpu_scratch_bytes > p->gpu_bytes)
		return kvt_fail(-EINVAL, "gpu_scratch_bytes, %llu, is a part of gpu_bytes, which is %llu",
				(unsigned long long)p->gpu_scratch_bytes, (unsigned long long)p->gpu_bytes);
	if (!p->threads)
		p->threads = kvt_cores();
	if (!p->max_seqs)
		p->max_seqs = DEFAULT_MAX_SEQS;
	if (!p->max_tokens)
		p->max_tokens = DEFAULT_MAX_TOKENS;
	if (!p->max_query_rows)
		p->max_query_rows = DEFAULT_QUERY_ROWS;
	if (p->max_seqs > 1u << 20 || p->max_tokens > 1u << 30 || p->max_query_rows > 1u << 20 ||
	    p->max_query_heads > 8192)
		return kvt_fail(-EINVAL, "max_seqs %u (to 2^20), max_tokens %u (to 2^30), max_query_rows %u (to 2^20) or max_query_heads %u (to 8192) is too large",
				p->max_seqs, p->max_tokens, p->max_query_rows, p->max_query_heads);
	if (!p->name)
		p->name = "kvtier";
	if (!p->disk_dir) {
		p->disk_dir = getenv("TMPDIR");
		if (!p->disk_dir || !*p->disk_dir)
			p->disk_dir = "/var/tmp";
	}
	return 0;
}

/* ---- what it takes ---- */

struct plan {
	struct kvt_cache_params p; /* checked, defaults filled in */
	struct kvt_plane *planes;
	struct kvt_store_params store;
	struct kvt_attend_params attend;
	struct kvt_host_params host;
	struct kvt_prefix_plan prefix;
	uint64_t log_max; /* of a directory's bytes those that are not slots */
	struct kvt_plane_geom *geoms;
	uint32_t tables_len;	/* of a sequence's tables, entries */
	uint64_t tables_bytes;	/* of all tables */
	uint64_t overhead;	/* of the cache itself: all but the store's and the host's */
	uint32_t least_frames;	/* host frames that attention and a writer need */
};

static void plan_free(struct plan *plan)
{
	free(plan->planes);
	free(plan->geoms);
}

static int plan_planes(struct plan *plan)
{
	const struct kvt_cache_params *p = &plan->p;
	uint64_t raw = 0, heads = 0, tables = 0;
	int ret;

	plan->planes = calloc(p->n_planes, sizeof(*plan->planes));
	plan->geoms = calloc(p->n_planes, sizeof(*plan->geoms));
	if (!plan->planes || !plan->geoms)
		return kvt_fail(-ENOMEM, "no memory for %u planes", p->n_planes);
	for (uint32_t i = 0; i < p->n_planes; i++) {
		struct kvt_plane *plane = &plan->planes[i];
		struct kvt_plane_params one;
		uint64_t len, split;

		/* their size says how far apart they are */
		ret = kvt_params_copy(&one, sizeof(one), 32, (const uint8_t *)p->planes + (uint64_t)i * p->planes[0].size,
				      "plane");
		if (!ret)
			ret = check_plane(&one, i, p, plane);
		if (ret)
			return ret;
		len = ((one.rows ? one.rows : p->max_tokens) + plane->geom.block_rows - 1) / plane->geom.block_rows;
		if (len >= KVT_NO_BLOCK)
			return kvt_fail(-EINVAL, "plane %u: %llu rows take too many blocks", i,
					(unsigned long long)one.rows);
		plane->table_len = (uint32_t)len;
		if (one.rows) {
			raw += len;
		} else {
			plane->table_first = (uint32_t)tables;
			tables += len;
		}
		if (tables > UINT32_MAX / 2)
			return kvt_fail(-EINVAL, "%u planes of %u tokens take too many blocks for a sequence: lower max_tokens or raise block_bytes",
					p->n_planes, p->max_tokens);
		plan->geoms[i] = plane->geom;
		split = kvt_split_blocks(plane->geom.block_rows);
		if (plan->attend.split_blocks < 2 * split)
			plan->attend.split_blocks = (uint32_t)(2 * split);
		heads = plane->heads > heads ? plane->heads : heads;
		if (plane->head_dim <= KVT_HEAD_MAX && plane->head_dim > plan->attend.max_v_dim)
			plan->attend.max_v_dim = plan->attend.max_k_dim = plane->head_dim;
		plan->attend.widen |= kvt_codec_group(plane->geom.codec) > 1;
	}
	plan->tables_len = (uint32_t)tables;
	if (!plan->attend.max_v_dim)
		plan->attend.max_v_dim = plan->attend.max_k_dim = 8;
	plan->tables_bytes = (raw + p->max_seqs * ((uint64_t)p->max_tokens + plan->tables_len)) * sizeof(uint32_t);
	plan->attend.max_query_heads = p->max_query_heads ? p->max_query_heads : (uint32_t)(heads * 8);
	plan->attend.max_query_rows = p->max_query_rows;
	plan->attend.threads = p->threads;
	plan->attend.block_bytes = p->block_bytes;
	/* a split's K and V, a block being written, and the one it was copied from */
	plan->least_frames = plan->attend.split_blocks + 2;
	return 0;
}

static uint64_t ram_overhead(struct plan *plan)
{
	uint64_t host = (uint64_t)plan->store.frames[KVT_TIER_PINNED] + plan->store.frames[KVT_TIER_RAM];

	plan->attend.frames = host < UINT32_MAX ? (uint32_t)host : UINT32_MAX;
	plan->overhead = sizeof(struct kvt_cache) + plan->p.n_planes * sizeof(struct kvt_plane) +
			 plan->p.max_seqs * sizeof(struct kvt_seq) + plan->tables_bytes +
			 kvt_workers_bytes(plan->p.threads) + kvt_attend_bytes(&plan->attend) + plan->p.prefix_bytes +
			 (plan->p.flags & KVT_CACHE_PUBLISH ? kvt_publish_bytes() : 0);
	return plan->overhead + kvt_store_overhead(&plan->store) + kvt_host_overhead(&plan->host);
}

/* The most RAM frames that fit @bytes together with the overhead they cause; -1: not even none. */
static int64_t ram_frames(struct plan *plan, uint64_t bytes)
{
	uint64_t low = 0, high = bytes / plan->p.block_bytes + 1, n;

	plan->store.frames[KVT_TIER_RAM] = 0;
	if (ram_overhead(plan) > bytes)
		return -1;
	while (low + 1 < high) {
		n = (low + high) / 2;
		plan->store.frames[KVT_TIER_RAM] = (uint32_t)n;
		if (ram_overhead(plan) + n * plan->p.block_bytes <= bytes)
			low = n;
		else
			high = n;
	}
	plan->store.frames[KVT_TIER_RAM] = (uint32_t)low;
	ram_overhead(plan); /* the last try was of another number */
	return (int64_t)low;
}

/* @least: the bytes of a block and of the overhead that then is. */
static int frames_of(const struct plan *plan, const char *what, uint64_t bytes, uint64_t overhead, uint64_t least,
		     uint32_t *frames)
{
	uint64_t n = bytes < least ? 0 : (bytes - overhead) / plan->p.block_bytes;

	if (bytes && !n)
		return kvt_fail(-ENOMEM, "%s is %llu bytes: at least %llu are needed, a block of %llu%s; 0 leaves the tier out", what,
				(unsigned long long)bytes, (unsigned long long)least, (unsigned long long)plan->p.block_bytes,
				overhead ? " and what goes with it" : "");
	if (n > FRAMES_MAX)
		return kvt_fail(-EINVAL, "%s is %llu bytes: %llu are the most with blocks of %llu: lower it, or raise block_bytes", what,
				(unsigned long long)bytes, FRAMES_MAX * (unsigned long long)plan->p.block_bytes,
				(unsigned long long)plan->p.block_bytes);
	*frames = (uint32_t)n;
	return 0;
}

/* All but the division of ram_bytes. */
static int make_plan(struct plan *plan, const struct kvt_cache_params *params, bool least)
{
	struct kvt_cache_params *p = &plan->p;
	uint64_t overhead, disk_least;
	int ret;

	memset(plan, 0, sizeof(*plan));
	ret = kvt_params_copy(p, sizeof(*p), offsetof(struct kvt_cache_params, prefix_bytes), params, "cache parameters");
	if (!ret)
		ret = check_params(p, least);
	if (!ret)
		ret = plan_planes(plan);
	if (!ret && p->prefix_bytes)
		ret = kvt_prefix_plan(&plan->prefix, p, plan->planes, policies[p->policy]);
	if (ret)
		return ret;
	plan->store = (struct kvt_store_params){
		.planes = plan->geoms, .n_planes = p->n_planes, .flags = p->flags, .block_bytes = p->block_bytes,
		.disk_dir = p->disk_dir, .numa_node = p->numa_node - 1,
		.writeback_bytes_per_s = p->writeback_bytes_per_s, .policy = policies[p->policy],
		.warm = p->warm_name, .warm_id = p->warm_id,
		.user_bytes = p->warm_name ? (uint64_t)p->max_seqs * p->max_tokens * sizeof(uint32_t) : 0,
	};
	if (plan->store.user_bytes / p->block_bytes > FRAMES_MAX)
		return kvt_fail(-EINVAL, "warm_name: %u sequences of %u tokens take too many blocks of %llu bytes: lower max_seqs or max_tokens",
				p->max_seqs, p->max_tokens, (unsigned long long)p->block_bytes);
	plan->host = (struct kvt_host_params){
		.kind = p->host, .io = p->io, .depth = HOST_DEPTH, .frame_bytes = p->block_bytes,
	};
	if (p->store_dir) {
		plan->store.disk_dir = p->store_dir;
		plan->store.disk_name = KVT_DIR_SLOTS;
		plan->log_max = kvt_keeper_log_max(&plan->prefix, p->disk_bytes, p->block_bytes);
	}
	disk_least = p->store_dir ? kvt_keeper_disk_least(&plan->prefix, p->block_bytes) : p->block_bytes;
	ret = frames_of(plan, "pinned_bytes", p->pinned_bytes, 0, p->block_bytes, &plan->store.frames[KVT_TIER_PINNED]);
	if (!ret)
		ret = frames_of(plan, "disk_bytes", p->disk_bytes, plan->log_max, disk_least, &plan->store.frames[KVT_TIER_DISK]);
	if (!ret && p->gpu_bytes) {
		plan->store.frames[KVT_TIER_GPU] = 1;
		overhead = kvt_store_gpu_overhead(&plan->store) + p->gpu_scratch_bytes;
		ret = frames_of(plan, "gpu_bytes", p->gpu_bytes, overhead, overhead + p->block_bytes,
				&plan->store.frames[KVT_TIER_GPU]);
	}
	return ret;
}

static int check_tree(const struct plan *plan)
{
	if (!plan->p.prefix_bytes || plan->prefix.capacity)
		return 0;
	return kvt_fail(-ENOMEM, "prefix_bytes is %llu: a tree of one chunk takes %llu", (unsigned long long)plan->p.prefix_bytes,
			(unsigned long long)kvt_prefix_plan_bytes(&plan->prefix, 1));
}

/* ram_bytes with which the plan has @plan->least_frames. Sets the RAM frames. */
static uint64_t least_ram(struct plan *plan)
{
	uint32_t pinned = plan->store.frames[KVT_TIER_PINNED];

	plan->store.frames[KVT_TIER_RAM] = pinned < plan->least_frames ? plan->least_frames - pinned : 0;
	return ram_overhead(plan) + plan->store.frames[KVT_TIER_RAM] * plan->p.block_bytes;
}

int64_t kvt_prefix_bytes(const struct kvt_cache_params *params, uint32_t chunks)
{
	struct plan plan = { 0 };
	struct kvt_cache_params p;
	int64_t ret = kvt_params_copy(&p, sizeof(p), offsetof(struct kvt_cache_params, prefix_bytes), params, "cache parameters");

	p.prefix_bytes = 1; /* asked for in earnest */
	if (!ret && chunks > KVT_PREFIX_CHUNKS)
		ret = kvt_fail(-EINVAL, "prefix tree: %u chunks, %u at most", chunks, KVT_PREFIX_CHUNKS);
	if (!ret)
		ret = make_plan(&plan, &p, true);
	if (!ret)
		ret = (int64_t)kvt_prefix_plan_bytes(&plan.prefix, chunks);
	plan_free(&plan);
	return ret;
}

int64_t kvt_cache_min_ram(const struct kvt_cache_params *params)
{
	struct plan plan;
	int64_t ret = make_plan(&plan, params, true);

	if (!ret)
		ret = check_tree(&plan); /* no memory would do */
	if (!ret)
		ret = (int64_t)least_ram(&plan);
	plan_free(&plan);
	return ret;
}

int64_t kvt_cache_min_gpu(const struct kvt_cache_params *params)
{
	struct kvt_cache_params p;
	struct plan plan = { 0 };
	int64_t ret = kvt_params_copy(&p, sizeof(p), offsetof(struct kvt_cache_params, prefix_bytes), params, "cache parameters");

	p.gpu_bytes = p.gpu_scratch_bytes + (1ull << 40); /* enough */
	p.prefix_bytes = p.prefix_tokens = p.snapshots = 0; /* no part of it */
	p.snapshot_bytes = 0;
	p.store_dir = NULL;
	if (!ret)
		ret = make_plan(&plan, &p, true);
	if (!ret)
		ret = (int64_t)(kvt_store_gpu_overhead(&plan.store) + p.gpu_scratch_bytes + plan.p.block_bytes);
	plan_free(&plan);
	return ret;
}

uint64_t kvt_cache_wanting(const struct kvt_cache *cache, uint64_t blocks)
{
	return kvt_store_wanting(cache->store, blocks) * cache->block_bytes;
}

static int divide_ram(struct plan *plan)
{
	uint64_t ram = plan->p.ram_bytes, least;
	int ret = check_tree(plan);

	if (ret)
		return ret;
	if (ram_frames(plan, ram) >= 0 &&
	    plan->store.frames[KVT_TIER_RAM] + (uint64_t)plan->store.frames[KVT_TIER_PINNED] >= plan->least_frames)
		return 0;
	least = least_ram(plan);
	return kvt_fail(-ENOMEM, "ram_bytes is %llu; with %u planes, blocks of %llu bytes and %u threads at least %llu are needed (%llu of them bookkeeping, scratch and stacks): raise ram_bytes, or lower block_bytes, threads, max_query_rows or max_tokens",
			(unsigned long long)ram, plan->p.n_planes, (unsigned long long)plan->p.block_bytes,
			plan->p.threads, (unsigned long long)least, (unsigned long long)ram_overhead(plan));
}

/* ---- life ---- */

static int make_tables(struct kvt_cache *c, const struct plan *plan)
{
	uint64_t per_seq = (uint64_t)plan->p.max_tokens + plan->tables_len;
	uint32_t *raw;

	c->tables_bytes = plan->tables_bytes;
	c->tables = mmap(NULL, c->tables_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (c->tables == MAP_FAILED) {
		c->tables = NULL;
		return kvt_fail(-ENOMEM, "no memory for block tables (%llu bytes): lower max_seqs or max_tokens",
				(unsigned long long)c->tables_bytes);
	}
	c->seqs = calloc(c->max_seqs, sizeof(*c->seqs));
	if (!c->seqs)
		return kvt_fail(-ENOMEM, "no memory for %u sequences", c->max_seqs);
	for (uint32_t i = 0; i < c->max_seqs; i++) {
		c->seqs[i].cache = c;
		c->seqs[i].tokens = c->tables + i * per_seq;
		c->seqs[i].tables = c->seqs[i].tokens + c->max_tokens;
	}
	raw = c->tables + c->max_seqs * per_seq;
	for (uint32_t i = 0; i < c->n_planes; i++) {
		if (!c->planes[i].rows)
			continue;
		c->planes[i].table = raw;
		raw += c->planes[i].table_len;
		memset(c->planes[i].table, 0xff, c->planes[i].table_len * sizeof(uint32_t)); /* KVT_NO_BLOCK */
	}
	return 0;
}

/* What a directory must have been written with. */
static int open_dir(struct kvt_cache *c, const struct plan *plan)
{
	struct kvt_super *want = calloc(1, sizeof(*want) + c->n_planes * sizeof(want->planes[0]));
	int ret;

	if (!want)
		return kvt_fail(-ENOMEM, "no memory for a superblock");
	want->bytes = (uint32_t)(sizeof(*want) + c->n_planes * sizeof(want->planes[0]));
	want->block_bytes = c->block_bytes;
	want->rotation = plan->p.store_rotation;
	want->chunk = plan->prefix.chunk;
	want->n_planes = c->n_planes;
	if (plan->p.store_model)
		memcpy(want->model, plan->p.store_model, sizeof(want->model));
	for (uint32_t i = 0; i < c->n_planes; i++)
		want->planes[i] = (struct kvt_super_plane){
			.codec = c->planes[i].geom.codec, .heads = c->planes[i].heads, .head_dim = c->planes[i].head_dim,
			.layer = c->planes[i].layer, .row_bytes = c->planes[i].geom.row_bytes,
			.block_rows = c->planes[i].geom.block_rows, .rows = c->planes[i].rows,
		};
	ret = kvt_dir_open(plan->p.store_dir, want, &c->dir);
	free(want);
	return ret;
}

static int build(struct kvt_cache *c, struct plan *plan)
{
	int ret = kvt_budget_charge(&c->budget[KVT_TIER_RAM], plan->overhead);

	if (ret)
		return kvt_fail(ret, "the ram budget does not hold the cache's own %llu bytes",
				(unsigned long long)plan->overhead);
	c->overhead = plan->overhead;
	if (kvt_budget_charge(&c->budget[KVT_TIER_DISK], plan->log_max))
		return kvt_fail(-ENOMEM, "the disk budget does not hold a log of %llu bytes", (unsigned long long)plan->log_max);
	if (!c->host) {
		plan->host.budget = &c->budget[KVT_TIER_RAM];
		c->owns_host = true;
		ret = kvt_host_open(&plan->host, &c->host);
		if (ret == -ENODEV)
			ret = kvt_fail_more(ret, plan->p.warm_name ? "warm_name needs the kernel module" : "host=module");
		if (ret)
			return ret;
	}
	if (!c->gpu && (plan->store.frames[KVT_TIER_GPU] || plan->p.backend == KVT_BACKEND_CUDA)) {
		c->owns_gpu = true;
		ret = kvt_gpu_open(plan->p.backend, plan->p.gpu_device, &c->gpu);
		if (ret)
			return ret;
	}
	plan->store.budget = c->budget;
	plan->store.headroom = plan->attend.split_blocks;
	plan->store.host = c->host;
	plan->store.gpu = c->gpu;
	ret = make_tables(c, plan);
	if (!ret && plan->p.store_dir)
		ret = open_dir(c, plan);
	if (!ret)
		ret = kvt_store_create(&plan->store, &c->store);
	if (!ret && plan->p.warm_name)
		kvt_cache_recover(c);
	if (!ret)
		ret = kvt_workers_create(c->threads, &c->workers);
	if (!ret) {
		plan->attend.frames = kvt_store_host_frames(c->store);
		ret = kvt_attend_create(&plan->attend, c->store, c->workers, &c->attend);
	}
	if (!ret && plan->p.prefix_bytes)
		ret = kvt_prefix_create(c, &plan->prefix, &c->prefix);
	if (!ret && c->dir)
		ret = kvt_keeper_start(c->prefix, c->dir, plan->store.frames[KVT_TIER_DISK], plan->log_max);
	if (!ret && plan->p.flags & KVT_CACHE_PUBLISH && kvt_publish_start(c, &c->publish))
		kvt_log(KVT_LOG_WARN, "%s: no other process can read its counters: %s", c->name, kvt_last_error());
	return ret;
}

void kvt_cache_destroy(struct kvt_cache *c)
{
	if (!c)
		return;
	kvt_publish_stop(c->publish);
	kvt_prefix_destroy(c->prefix);
	kvt_attend_destroy(c->attend);
	kvt_workers_destroy(c->workers);
	kvt_store_destroy(c->store);
	kvt_dir_close(c->dir);
	if (c->owns_gpu && c->gpu)
		c->gpu->ops->close(c->gpu);
	if (c->owns_host && c->host)
		kvt_host_close(c->host);
	free(c->seqs);
	if (c->tables)
		munmap(c->tables, c->tables_bytes);
	free(c->planes);
	pthread_mutex_destroy(&c->lock);
	free(c);
}

int kvt_cache_create_on(const struct kvt_cache_params *params, struct kvt_host *host, struct kvt_gpu *gpu,
			struct kvt_cache **cache)
{
	struct kvt_cache *c = NULL;
	struct plan plan;
	int ret = make_plan(&plan, params, false);

	if (!ret && !cache)
		ret = kvt_fail(-EINVAL, "nowhere to put the cache: the last argument is NULL");
	if (!ret)
		ret = divide_ram(&plan);
	if (ret)
		goto out;
	c = calloc(1, sizeof(*c));
	if (!c) {
		ret = kvt_fail(-ENOMEM, "no memory for a cache");
		goto out;
	}
	pthread_mutex_init(&c->lock, NULL);
	c->budget[KVT_TIER_GPU].limit = plan.p.gpu_bytes;
	c->budget[KVT_TIER_PINNED].limit = plan.p.pinned_bytes;
	c->budget[KVT_TIER_RAM].limit = plan.p.ram_bytes;
	c->budget[KVT_TIER_DISK].limit = plan.p.disk_bytes;
	strcpy(c->name, plan.p.name);
	c->block_bytes = plan.p.block_bytes;
	c->gpu_scratch_bytes = plan.p.gpu_scratch_bytes;
	c->planes = plan.planes;
	plan.planes = NULL;
	c->n_planes = plan.p.n_planes;
	c->max_seqs = plan.p.max_seqs;
	c->max_tokens = plan.p.max_tokens;
	c->tables_len = plan.tables_len;
	c->max_query_rows = plan.p.max_query_rows;
	c->max_query_heads = plan.attend.max_query_heads;
	c->threads = plan.p.threads;
	c->host = host;
	c->gpu = gpu;
	c->last_k = UINT32_MAX;
	for (uint32_t i = 0; i < c->n_planes; i++) {
		uint64_t left = c->block_bytes % c->planes[i].geom.row_bytes;

		if (left)
			kvt_log(KVT_LOG_INFO, "plane %u: a block of %llu bytes holds %u rows of %u bytes; %llu bytes of it stay unused (block_bytes)",
				i, (unsigned long long)c->block_bytes, c->planes[i].geom.block_rows,
				c->planes[i].geom.row_bytes, (unsigned long long)left);
	}
	ret = build(c, &plan);
	if (ret) {
		kvt_cache_destroy(c);
		c = NULL;
	}
out:
	plan_free(&plan);
	if (!ret)
		*cache = c;
	return ret;
}

int kvt_cache_create(const struct kvt_cache_params *params, struct kvt_cache **cache)
{
	return kvt_cache_create_on(params, NULL, NULL, cache);
}

/* ---- what concerns a whole cache ---- */

int64_t kvt_plane_block_rows(const struct kvt_cache *c, uint32_t plane)
{
	if (plane >= c->n_planes)
		return kvt_fail(-EINVAL, "plane %u of %u", plane, c->n_planes);
	return c->planes[plane].geom.block_rows;
}

int64_t kvt_plane_row_bytes(const struct kvt_cache *c, uint32_t plane)
{
	if (plane >= c->n_planes)
		return kvt_fail(-EINVAL, "plane %u of %u", plane, c->n_planes);
	return c->planes[plane].geom.row_bytes;
}

int kvt_cache_flush(struct kvt_cache *c)
{
	int ret = kvt_store_flush(c->store);

	if (c->prefix)
		kvt_keeper_flush(c->prefix);
	return ret;
}

struct parallel {
	void (*fn)(void *arg, uint32_t i);
	void *arg;
};

static void call(void *arg, uint32_t worker, uint32_t i)
{
	const struct parallel *p = arg;

	(void)worker;
	p->fn(p->arg, i);
}

void kvt_cache_parallel(struct kvt_cache *c, uint32_t n, void (*fn)(void *arg, uint32_t i), void *arg)
{
	struct parallel p = { fn, arg };

	kvt_workers_run(c->workers, n, call, &p);
}
