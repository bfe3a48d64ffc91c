// SPDX-License-Identifier: MIT
/*
 * Buffers, their KV tensors, and the cache behind them: which rows an address
 * names, and when the cache comes to be.
 */
#include "engines/ggml/internal.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "attention/kernel.h"
#include "base/err.h"
#include "codec/codec.h"

#define PIECE (256u << 10) /* bytes that pass through scratch at a time */
#define ROWS_AT_ONCE 256
#define PLANES_MAX 4096 /* of a tensor; one of more is one long plane, which attention does not take */

/* Guards the list of buffers, their caches' counts and @caches; held while a cache is created. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct kg_config config;
static struct kg_buffer *buffers;
static uint32_t caches;
static uint64_t taken;

void kg_setup(const struct kg_config *c)
{
	config = *c;
	config.cache.disk_dir = *config.disk_dir ? config.disk_dir : NULL;
	config.cache.name = *config.name ? config.name : "llama.cpp";
	config.cache.flags |= KVT_CACHE_PUBLISH;
	/* the planes are raw: there are no sequences */
	config.cache.max_seqs = config.cache.max_tokens = 1;
	config.cache.gpu_bytes /= config.caches;
	config.cache.pinned_bytes /= config.caches;
	config.cache.ram_bytes /= config.caches;
	config.cache.disk_bytes /= config.caches;
}

static uint64_t budget(void)
{
	return config.cache.pinned_bytes + config.cache.ram_bytes + config.cache.disk_bytes;
}

void kg_memory(uint64_t *total, uint64_t *used)
{
	pthread_mutex_lock(&lock);
	*total = budget() * config.caches;
	*used = taken < *total ? taken : *total;
	pthread_mutex_unlock(&lock);
}

/* ---- buffers ---- */

int kg_buffer_create(uint64_t bytes, struct kg_buffer **buffer)
{
	struct kg_buffer *b = calloc(1, sizeof(*b));

	if (!b)
		return kvt_fail(-ENOMEM, "no memory for a buffer");
	b->bytes = bytes;
	b->mapped = (bytes + KG_ALIGN) / KG_ALIGN * KG_ALIGN; /* never nothing */
	b->base = mmap(NULL, b->mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (b->base == MAP_FAILED) {
		free(b);
		return kvt_fail(-ENOMEM, "no addresses for a buffer of %" PRIu64 " bytes", bytes);
	}
	pthread_mutex_lock(&lock);
	b->next = buffers;
	buffers = b;
	pthread_mutex_unlock(&lock);
	*buffer = b;
	return 0;
}

uint8_t *kg_buffer_base(const struct kg_buffer *b)
{
	return b->base;
}

static void write_stats(struct kg_cache *c)
{
	struct kvt_stats st = KVT_INIT(st);
	int64_t n = kvt_cache_stats_json(c->cache, NULL, 0);
	char *text = n < 0 ? NULL : malloc((size_t)n + 1);
	FILE *f;

	if (!kvt_cache_stats(c->cache, &st))
		kvt_log(KVT_LOG_INFO, "%s: %" PRIu64 " attention calls, %" PRIu64 " rows written; peak: ram %" PRIu64 " of %" PRIu64 " bytes, disk %" PRIu64 " of %" PRIu64 "; read %" PRIu64 " bytes from disk, wrote %" PRIu64,
			config.cache.name, c->attention_calls, st.rows_written, st.tier[KVT_TIER_RAM].peak,
			st.tier[KVT_TIER_RAM].budget, st.tier[KVT_TIER_DISK].peak, st.tier[KVT_TIER_DISK].budget,
			st.disk_read_bytes, st.disk_write_bytes);
	if (*config.stats && text) {
		kvt_cache_stats_json(c->cache, text, (size_t)n + 1);
		f = fopen(config.stats, "we");
		if (!f || fprintf(f, "%s\n", text) < 0 || fclose(f))
			kvt_log(KVT_LOG_ERROR, "KVTIER_STATS is \"%s\": %s", config.stats, strerror(errno));
	}
	free(text);
}

static void cache_put(struct kg_cache *c)
{
	if (!c || --c->buffers)
		return;
	write_stats(c);
	kvt_cache_destroy(c->cache);
	free(c->scratch);
	free(c);
	caches--;
}

void kg_buffer_free(struct kg_buffer *b)
{
	struct kg_buffer **at;
	struct kg_tensor *t;

	if (!b)
		return;
	pthread_mutex_lock(&lock);
	for (at = &buffers; *at != b; at = &(*at)->next)
		;
	*at = b->next;
	cache_put(b->cache);
	while ((t = b->tensors)) {
		b->tensors = t->next;
		taken -= t->bytes;
		free(t);
	}
	pthread_mutex_unlock(&lock);
	munmap(b->base, b->mapped);
	free(b);
}

/* ---- KV tensors ---- */

static bool begins(const char *name, const char *with)
{
	return !strncmp(name, with, strlen(with));
}

static bool is_kv_name(const char *name)
{
	return begins(name, "cache_k") || begins(name, "cache_v");
}

bool kg_is_state(const char *name)
{
	return (begins(name, "cache_") && !is_kv_name(name)) || begins(name, "dsv4_");
}

int kg_tensor_wanted(const char *name, uint32_t type, const char *type_name)
{
	bool kv = is_kv_name(name);

	if (kv && type == KVT_F32)
		return kvt_fail(-EOPNOTSUPP, "%s is f32, which llama.cpp converts before attention, past this plug-in: use -ctk and -ctv f16, bf16, q8_0 or q4_0", name);
	if (kv && type >= KVT_CODECS)
		return kvt_fail(-EOPNOTSUPP, "%s is %s: use -ctk and -ctv f16, bf16, q8_0 or q4_0", name, type_name);
	return kv || (config.all_planes && type < KVT_CODECS && type != KVT_F32);
}

/* A plane of heads that are known, or of pieces that attention's scratch is then made for. */
static void plane_params(const struct kg_tensor *t, struct kvt_plane_params *p)
{
	uint32_t group = kvt_codec_group(t->codec);
	uint64_t dim = t->heads ? t->elements / t->heads : t->elements < KVT_HEAD_MAX ? t->elements : KVT_HEAD_MAX;
	const char *layer = strstr(t->name, "_l");

	while (t->elements % dim || dim % group)
		dim--;
	*p = (struct kvt_plane_params){
		.size = sizeof(*p), .codec = t->codec, .heads = (uint32_t)(t->elements / dim), .head_dim = (uint32_t)dim,
		.layer = layer ? (uint32_t)strtoul(layer + 2, NULL, 10) : 0, .rows = t->rows,
	};
}

/* The parameters of a cache for the tensors of @only, or of all buffers that are ready for one. */
static int make_params(struct kg_buffer *only, struct kvt_cache_params *p, struct kvt_plane_params **planes)
{
	uint32_t n = 0, heads = config.cache.max_query_heads;

	for (int pass = 0; pass < 2; pass++) {
		n = 0;
		for (struct kg_buffer *b = buffers; b; b = b->next) {
			if (b != only && (b->cache || !b->ready))
				continue;
			for (struct kg_tensor *t = b->tensors; t; t = t->next) {
				if (pass) {
					t->first_plane = n;
					for (uint64_t i = 0; i < t->planes; i++)
						plane_params(t, &(*planes)[n + i]);
				}
				heads = t->query_heads > heads ? t->query_heads : heads;
				n += (uint32_t)t->planes;
			}
		}
		if (!pass) {
			*planes = calloc(n, sizeof(**planes));
			if (!*planes)
				return kvt_fail(-ENOMEM, "no memory for %u planes", n);
		}
	}
	*p = config.cache;
	p->planes = *planes;
	p->n_planes = n;
	p->max_query_heads = heads;
	return 0;
}

static int check_budgets(struct kg_buffer *b, const struct kg_tensor *t)
{
	struct kvt_plane_params *planes = NULL;
	struct kvt_cache_params p;
	int64_t least;
	int ret;

	if (taken + t->bytes > budget() * config.caches)
		return kvt_fail(-ENOMEM, "%s: %" PRIu64 " bytes of KV cache, and %" PRIu64 " before it, are more than the budgets' %" PRIu64 ": raise KVTIER_DISK_BYTES or KVTIER_RAM_BYTES, or lower -c",
				t->name, t->bytes, taken, budget() * config.caches);
	ret = make_params(b, &p, &planes);
	least = ret ? ret : kvt_cache_min_ram(&p);
	free(planes);
	if (least < 0)
		return (int)least;
	if ((uint64_t)least > p.ram_bytes)
		return kvt_fail(-ENOMEM, "KVTIER_RAM_BYTES is %" PRIu64 "%s, %s needs at least %" PRId64 " with what is before it: raise it, or lower KVTIER_BLOCK_BYTES, KVTIER_THREADS or KVTIER_MAX_QUERY_ROWS",
				p.ram_bytes, config.caches > 1 ? " for each cache" : "", t->name, least);
	return 0;
}

int kg_tensor_add(struct kg_buffer *b, const char *name, uint32_t codec, const int64_t ne[4], uint64_t offset,
		  struct kg_tensor **tensor)
{
	uint64_t pages;
	struct kg_tensor *t, **end;
	int ret;

	if (ne[0] % kvt_codec_group(codec))
		return kvt_fail(-EINVAL, "%s: rows of %" PRId64 " elements: %s encodes %u together", name, ne[0],
				kvt_codec_name((enum kvt_codec)codec), kvt_codec_group(codec));
	t = calloc(1, sizeof(*t));
	if (!t)
		return kvt_fail(-ENOMEM, "%s: no memory", name);
	t->buffer = b;
	snprintf(t->name, sizeof(t->name), "%s", name);
	t->codec = codec;
	t->elements = (uint64_t)ne[0];
	t->rows = (uint64_t)ne[1];
	t->planes = (uint64_t)ne[2] * (uint64_t)ne[3];
	if (t->planes > PLANES_MAX) {
		t->rows *= t->planes;
		t->planes = 1;
	}
	t->row_bytes = kvt_codec_bytes(codec, t->elements);
	t->bytes = t->row_bytes * t->rows * t->planes;
	pthread_mutex_lock(&lock);
	for (end = &b->tensors; *end; end = &(*end)->next)
		;
	*end = t;
	ret = b->cache ? kvt_fail(-EBUSY, "%s: the buffer's cache exists already", name) : check_budgets(b, t);
	if (ret)
		*end = NULL;
	else
		taken += t->bytes;
	pthread_mutex_unlock(&lock);
	if (ret) {
		free(t);
		return ret;
	}
	/* whoever reads a KV tensor past us finds out at once */
	pages = t->bytes / KG_ALIGN * KG_ALIGN;
	if (offset % KG_ALIGN == 0 && pages)
		mprotect(b->base + offset, pages, PROT_NONE);
	*tensor = t;
	return 0;
}

void kg_tensor_shape(struct kg_tensor *t, uint32_t heads, uint32_t query_heads)
{
	pthread_mutex_lock(&lock);
	if (!t->buffer->cache) {
		if (t->elements % heads == 0 && t->elements / heads % kvt_codec_group(t->codec) == 0)
			t->heads = heads;
		t->query_heads = query_heads > t->query_heads ? query_heads : t->query_heads;
	}
	pthread_mutex_unlock(&lock);
}

static int create(struct kg_buffer *first)
{
	struct kvt_plane_params *planes = NULL;
	struct kvt_cache_params p;
	struct kg_cache *c;
	int ret;

	if (caches == config.caches)
		return kvt_fail(-EBUSY, "%u caches have the whole budget, and another is wanted (a draft model, a second context): KVTIER_CACHES=%u divides it",
				caches, caches + 1);
	c = calloc(1, sizeof(*c));
	if (!c)
		return kvt_fail(-ENOMEM, "no memory");
	ret = make_params(first, &p, &planes);
	if (!ret)
		ret = kvt_cache_create(&p, &c->cache);
	free(planes);
	if (ret) {
		free(c);
		return ret;
	}
	caches++;
	for (struct kg_buffer *b = buffers; b; b = b->next) {
		if (b != first && (b->cache || !b->ready || !b->tensors))
			continue;
		b->cache = c;
		c->buffers++;
	}
	return 0;
}

struct kg_cache *kg_open(struct kg_tensor *t)
{
	struct kg_buffer *b = t->buffer;
	int ret = 0;

	if (b->cache)
		return b->cache;
	pthread_mutex_lock(&lock);
	if (!b->cache)
		ret = create(b);
	pthread_mutex_unlock(&lock);
	if (ret)
		kvt_fail_more(ret, "the cache of %s", t->name);
	return ret ? NULL : b->cache;
}

void *kg_scratch(struct kg_cache *c, uint64_t bytes)
{
	if (bytes > c->scratch_bytes) {
		free(c->scratch);
		c->scratch = malloc(bytes);
		c->scratch_bytes = c->scratch ? bytes : 0;
		if (!c->scratch)
			kvt_fail(-ENOMEM, "no memory for %" PRIu64 " bytes of scratch", bytes);
	}
	return c->scratch;
}

/* ---- bytes ---- */

static int rows_io(struct kg_tensor *t, uint64_t first, uint64_t n, uint8_t *data, bool write, uint32_t type)
{
	struct kg_cache *c = kg_open(t);
	uint64_t stride = type == KVT_ENCODED ? t->row_bytes : t->elements * sizeof(float);
	uint64_t index[ROWS_AT_ONCE];
	uint32_t part;
	int ret = c ? 0 : -EIO;

	for (; n && !ret; n -= part, first += part, data += part * stride) {
		uint32_t plane = t->first_plane + (uint32_t)(first / t->rows);
		uint64_t row = first % t->rows;
		struct kvt_rows rows = { .data = data, .type = type };

		part = n < ROWS_AT_ONCE ? (uint32_t)n : ROWS_AT_ONCE;
		part = t->rows - row < part ? (uint32_t)(t->rows - row) : part;
		for (uint32_t i = 0; write && i < part; i++)
			index[i] = row + i;
		ret = write ? kvt_plane_write(c->cache, plane, index, part, &rows) :
			      kvt_plane_read(c->cache, plane, row, part, &rows);
	}
	return ret;
}

int kg_rows_read(struct kg_tensor *t, uint64_t first, uint32_t n, float *data)
{
	return rows_io(t, first, n, (uint8_t *)data, false, KVT_F32);
}

int kg_rows_write(struct kg_tensor *t, uint64_t first, uint32_t n, const float *data)
{
	return rows_io(t, first, n, (uint8_t *)data, true, KVT_F32);
}

static int check_bytes(const struct kg_tensor *t, uint64_t at, uint64_t n)
{
	if (at > t->bytes || n > t->bytes - at)
		return kvt_fail(-ERANGE, "%s: %" PRIu64 " bytes from byte %" PRIu64 " of %" PRIu64, t->name, n, at, t->bytes);
	return 0;
}

/* Bytes [at, at + n) of one row. */
static int part_io(struct kg_tensor *t, uint64_t at, uint64_t n, uint8_t *data, bool write)
{
	uint8_t *row = malloc(t->row_bytes);
	uint64_t offset = at % t->row_bytes;
	int ret = row ? rows_io(t, at / t->row_bytes, 1, row, false, KVT_ENCODED) : kvt_fail(-ENOMEM, "no memory for a row");

	if (!ret && write) {
		memcpy(row + offset, data, n);
		ret = rows_io(t, at / t->row_bytes, 1, row, true, KVT_ENCODED);
	} else if (!ret) {
		memcpy(data, row + offset, n);
	}
	free(row);
	return ret;
}

static int bytes_io(struct kg_tensor *t, uint64_t at, uint64_t n, uint8_t *data, bool write)
{
	int ret = check_bytes(t, at, n);
	uint64_t part;

	for (; n && !ret; n -= part, at += part, data += part) {
		uint64_t offset = at % t->row_bytes;

		if (offset || n < t->row_bytes) {
			part = t->row_bytes - offset < n ? t->row_bytes - offset : n;
			ret = part_io(t, at, part, data, write);
		} else {
			part = n / t->row_bytes * t->row_bytes;
			ret = rows_io(t, at / t->row_bytes, n / t->row_bytes, data, write, KVT_ENCODED);
		}
	}
	return ret;
}

/* What ggml cannot be told now, the next operation says. */
static int remember(struct kg_tensor *t, int ret)
{
	if (ret && t->buffer->cache)
		t->buffer->cache->failed = true;
	return ret;
}

int kg_tensor_read(struct kg_tensor *t, uint64_t at, void *data, uint64_t n)
{
	int ret = bytes_io(t, at, n, data, false);

	if (ret)
		memset(data, 0xff, n);
	return ret;
}

int kg_tensor_write(struct kg_tensor *t, uint64_t at, const void *data, uint64_t n)
{
	return remember(t, bytes_io(t, at, n, (uint8_t *)data, true));
}

/* Whole rows become zeros. */
static int clear_rows(struct kg_tensor *t, uint64_t first, uint64_t n)
{
	struct kg_cache *c = t->buffer->cache;
	uint64_t part;
	int ret = 0;

	for (; c && n && !ret; n -= part, first += part) {
		part = t->rows - first % t->rows < n ? t->rows - first % t->rows : n;
		ret = kvt_plane_clear(c->cache, t->first_plane + (uint32_t)(first / t->rows), first % t->rows, part);
	}
	return ret;
}

int kg_tensor_fill(struct kg_tensor *t, uint64_t at, uint8_t value, uint64_t n)
{
	uint64_t part = n < PIECE ? n : PIECE;
	uint8_t *bytes;
	int ret = check_bytes(t, at, n);

	if (ret || !n)
		return ret;
	if (!value && at % t->row_bytes == 0 && n % t->row_bytes == 0)
		return remember(t, clear_rows(t, at / t->row_bytes, n / t->row_bytes));
	bytes = malloc(part);
	if (!bytes)
		return remember(t, kvt_fail(-ENOMEM, "no memory"));
	memset(bytes, value, part);
	for (; n && !ret; n -= part, at += part) {
		part = n < PIECE ? n : PIECE;
		ret = bytes_io(t, at, part, bytes, true);
	}
	free(bytes);
	return remember(t, ret);
}

int kg_tensor_copy(struct kg_tensor *dst, struct kg_tensor *src, uint64_t to, uint64_t from, uint64_t n)
{
	uint64_t part = n < PIECE ? n : PIECE;
	uint8_t *bytes = malloc(part);
	int ret = bytes ? 0 : kvt_fail(-ENOMEM, "no memory");

	for (; n && !ret; n -= part, to += part, from += part) {
		part = n < PIECE ? n : PIECE;
		ret = bytes_io(src, from, part, bytes, false);
		if (!ret)
			ret = bytes_io(dst, to, part, bytes, true);
	}
	free(bytes);
	return remember(dst, ret);
}

int kg_buffer_clear(struct kg_buffer *b, uint8_t value)
{
	struct kg_tensor *t;
	int ret = 0;

	if (b->cache)
		b->cache->failed = false;
	b->ready = true;
	for (t = b->tensors; t && !ret; t = t->next)
		ret = kg_tensor_fill(t, 0, value, t->bytes);
	return ret;
}
