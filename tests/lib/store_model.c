// SPDX-License-Identifier: MIT
/* A store and a plain-memory model of it, driven by random operations. */
#include "lib/store_model.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lib/scratch.h"

#define PLANES MODEL_PLANES
#define MAX_SLOTS 512
#define MAX_BATCH 8

/* What one name (of MAX_SLOTS) should hold. Names may share a block. */
struct name {
	uint32_t block; /* KVT_NO_BLOCK: none */
	uint32_t rows;
	uint8_t *bytes; /* [block_rows * row_bytes] */
	bool doubtful;	/* a change failed: old content, or an error, until it is written whole */
};

struct model {
	struct model_config c;
	struct kvt_budget budget[KVT_TIERS];
	struct kvt_plane_geom planes[PLANES];
	struct kvt_host *host;
	struct kvt_gpu *gpu;
	struct kvt_store *store;
	struct name names[MAX_SLOTS];
	uint32_t plane_of[MAX_SLOTS];
	uint32_t n;
	uint64_t random, errors, lost, step;
	uint8_t *rows;
};

uint64_t model_random(uint64_t *state)
{
	uint64_t z = (*state += 0x9E3779B97F4A7C15ull);

	z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
	z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
	return z ^ (z >> 31);
}

static uint32_t pick(struct model *m, uint32_t n)
{
	return (uint32_t)(model_random(&m->random) % n);
}

struct kvt_store *model_store(struct model *m)
{
	return m->store;
}

uint64_t model_errors(const struct model *m)
{
	return m->errors;
}

uint64_t model_lost(const struct model *m)
{
	return m->lost;
}

void model_destroy(struct model *m)
{
	if (!m)
		return;
	for (uint32_t i = 0; i < m->n; i++)
		if (m->store && m->names[i].block != KVT_NO_BLOCK)
			kvt_store_put(m->store, m->names[i].block);
	if (!m->c.store)
		kvt_store_destroy(m->store);
	if (m->gpu && !m->c.gpu)
		m->gpu->ops->close(m->gpu);
	if (m->host && !m->c.host)
		kvt_host_close(m->host);
	for (uint32_t t = 0; t < KVT_TIERS; t++)
		if (m->budget[t].used) {
			printf("tier %u: %llu bytes are still charged\n", t, (unsigned long long)m->budget[t].used);
			fflush(stdout);
			abort();
		}
	for (uint32_t i = 0; i < m->n; i++)
		free(m->names[i].bytes);
	free(m->rows);
	free(m);
}

void model_planes(struct kvt_plane_geom planes[MODEL_PLANES], uint64_t block_bytes)
{
	static const struct kvt_plane_geom kinds[PLANES] = {
		{ .codec = KVT_F32, .elems = 64 }, { .codec = KVT_F16, .elems = 100 }, { .codec = KVT_BF16, .elems = 8 },
	};

	for (uint32_t i = 0; i < PLANES; i++) {
		planes[i] = kinds[i];
		planes[i].row_bytes = kinds[i].elems * (kinds[i].codec == KVT_F32 ? 4 : 2);
		planes[i].block_rows = (uint32_t)block_bytes / planes[i].row_bytes;
	}
}

int model_create(const struct model_config *c, struct model **model)
{
	struct model *m = calloc(1, sizeof(*m));
	struct kvt_store_params p;
	int ret = 0;

	m->c = *c;
	m->random = c->seed;
	if (!m->c.block_bytes)
		m->c.block_bytes = 4096;
	model_planes(m->planes, m->c.block_bytes);
	for (uint32_t t = 0; t < KVT_TIERS; t++)
		m->budget[t].limit = UINT64_MAX;
	m->host = c->host;
	m->gpu = c->gpu;
	m->store = c->store;
	if (!m->host && !m->store) {
		struct kvt_host_params hp = { .kind = KVT_HOST_USER, .io = c->io, .depth = 64,
					      .frame_bytes = m->c.block_bytes, .budget = &m->budget[KVT_TIER_RAM] };

		ret = kvt_host_open(&hp, &m->host);
	}
	if (!ret && !m->gpu && c->frames[KVT_TIER_GPU])
		ret = kvt_gpu_cpu_open(0, &m->gpu);
	p = (struct kvt_store_params){
		.planes = m->planes, .n_planes = PLANES, .headroom = 2, .flags = c->flags, .block_bytes = m->c.block_bytes,
		.budget = m->budget, .disk_dir = c->dir ? c->dir : test_scratch(),
		.numa_node = -1, .writeback_bytes_per_s = c->rate, .host = m->host, .gpu = m->gpu,
		.policy = &kvt_policy_lru,
	};
	memcpy(p.frames, c->frames, sizeof(p.frames));
	if (!ret && !m->store)
		ret = kvt_store_create(&p, &m->store);
	if (ret) {
		model_destroy(m);
		return ret;
	}
	m->n = c->slots;
	if (!m->n) {
		uint32_t memory = c->frames[0] + c->frames[1] + c->frames[2], disk = c->frames[KVT_TIER_DISK];

		m->n = memory > disk ? memory : disk;
		m->n -= m->n / 4 + 1; /* copies need room */
	}
	if (m->n > MAX_SLOTS)
		m->n = MAX_SLOTS;
	for (uint32_t i = 0; i < m->n; i++) {
		m->names[i].block = KVT_NO_BLOCK;
		m->plane_of[i] = i % PLANES;
		m->names[i].bytes = calloc(1, m->c.block_bytes);
	}
	m->rows = malloc(m->c.block_bytes);
	*model = m;
	return 0;
}

static int lie(const struct model *m, uint32_t i, const char *what)
{
	printf("seed %llu, step %llu, name %u (block %u, %u rows): %s\n", (unsigned long long)m->c.seed,
	       (unsigned long long)m->step, i, m->names[i].block, m->names[i].rows, what);
	return -1;
}

/* A call failed: allowed only where faults are injected. */
static int failed(struct model *m, uint32_t i, const char *call, int err)
{
	char line[768];

	m->errors++;
	if (m->c.errors_allowed)
		return 0;
	snprintf(line, sizeof(line), "%s failed: %s (%s)", call, strerror(-err), kvt_last_error());
	return lie(m, i, line);
}

/* Every name that shares a block shares its fate. */
static void doubt(struct model *m, uint32_t i)
{
	m->names[i].doubtful = true;
}

static int compare(struct model *m, uint32_t i, const struct kvt_view *v)
{
	const struct name *nm = &m->names[i];

	if (v->rows != nm->rows)
		return lie(m, i, "the number of rows is wrong");
	if (memcmp(v->data, nm->bytes, m->c.block_bytes))
		return lie(m, i, "a wrong byte was served");
	return 0;
}

static int op_read(struct model *m)
{
	uint32_t blocks[MAX_BATCH], names[MAX_BATCH], n = 1 + pick(m, 3);
	struct kvt_view views[MAX_BATCH];
	int ret = 0;

	for (uint32_t k = 0; k < n; k++) {
		names[k] = pick(m, m->n);
		blocks[k] = m->names[names[k]].block;
	}
	kvt_store_borrow_begin(m->store, blocks, n);
	ret = kvt_store_borrow_wait(m->store, blocks, n, views);
	if (ret) {
		if (ret == -EBADMSG)
			m->lost++;
		return failed(m, names[0], "borrow", ret);
	}
	for (uint32_t k = 0; k < n && !ret; k++)
		ret = compare(m, names[k], &views[k]);
	kvt_store_return(m->store, blocks, n);
	return ret;
}

static void forget(struct model *m, uint32_t i)
{
	struct name *nm = &m->names[i];

	if (nm->block != KVT_NO_BLOCK)
		kvt_store_put(m->store, nm->block);
	nm->block = KVT_NO_BLOCK;
	nm->rows = 0;
	nm->doubtful = false;
	memset(nm->bytes, 0, m->c.block_bytes);
}

static int op_write(struct model *m)
{
	uint32_t i = pick(m, m->n), first, n;
	struct name *nm = &m->names[i];
	const struct kvt_plane_geom *g = &m->planes[m->plane_of[i]];
	struct kvt_rows src = { .data = m->rows, .type = KVT_ENCODED, .stride = g->row_bytes };
	int ret;

	if (nm->block != KVT_NO_BLOCK && kvt_store_shared(m->store, nm->block))
		forget(m, i);
	if (nm->block == KVT_NO_BLOCK) {
		ret = kvt_store_alloc(m->store, m->plane_of[i], &nm->block);
		if (ret) {
			nm->block = KVT_NO_BLOCK;
			return failed(m, i, "alloc", ret);
		}
	}
	switch (pick(m, 3)) {
	case 0: /* append */
		first = nm->rows < g->block_rows ? nm->rows : 0;
		break;
	case 1:
		first = 0;
		break;
	default:
		first = pick(m, g->block_rows);
	}
	n = 1 + pick(m, g->block_rows - first);
	for (uint32_t k = 0; k < n * g->row_bytes; k++)
		m->rows[k] = (uint8_t)model_random(&m->random);
	ret = kvt_store_write(m->store, nm->block, first, n, &src);
	if (ret) {
		doubt(m, i);
		return failed(m, i, "write", ret);
	}
	memcpy(nm->bytes + (size_t)first * g->row_bytes, m->rows, (size_t)n * g->row_bytes);
	if (first + n > nm->rows)
		nm->rows = first + n;
	return 0;
}

static int op_cut(struct model *m)
{
	uint32_t i = pick(m, m->n), rows;
	struct name *nm = &m->names[i];
	const struct kvt_plane_geom *g = &m->planes[m->plane_of[i]];
	int ret;

	if (nm->block == KVT_NO_BLOCK || !nm->rows || kvt_store_shared(m->store, nm->block))
		return 0;
	rows = pick(m, nm->rows + 1);
	ret = kvt_store_cut(m->store, nm->block, rows);
	if (ret) {
		doubt(m, i);
		return failed(m, i, "cut", ret);
	}
	memset(nm->bytes + (size_t)rows * g->row_bytes, 0, (size_t)(nm->rows - rows) * g->row_bytes);
	nm->rows = rows;
	return 0;
}

static int op_copy(struct model *m)
{
	uint32_t from = pick(m, m->n), to = pick(m, m->n), rows, copy;
	struct name *a = &m->names[from], *b = &m->names[to];
	const struct kvt_plane_geom *g = &m->planes[m->plane_of[from]];
	int ret;

	if (from == to || m->plane_of[from] != m->plane_of[to] || a->block == KVT_NO_BLOCK)
		return 0;
	rows = pick(m, a->rows + 1);
	ret = kvt_store_copy(m->store, a->block, rows, &copy);
	if (ret)
		return failed(m, from, "copy", ret);
	forget(m, to);
	b->block = copy;
	b->rows = rows;
	memcpy(b->bytes, a->bytes, (size_t)rows * g->row_bytes);
	return 0;
}

static int op_share(struct model *m)
{
	uint32_t from = pick(m, m->n), to = pick(m, m->n);
	struct name *a = &m->names[from], *b = &m->names[to];

	if (from == to || m->plane_of[from] != m->plane_of[to] || a->block == KVT_NO_BLOCK)
		return 0;
	forget(m, to);
	kvt_store_get(m->store, a->block);
	b->block = a->block;
	b->rows = a->rows;
	memcpy(b->bytes, a->bytes, m->c.block_bytes);
	return 0;
}

static int op_move(struct model *m)
{
	uint32_t blocks[MAX_BATCH], n = 1 + pick(m, MAX_BATCH), first = pick(m, m->n);
	int64_t ret;

	for (uint32_t k = 0; k < n; k++)
		blocks[k] = m->names[pick(m, m->n)].block;
	ret = kvt_store_move(m->store, blocks, n, pick(m, KVT_TIERS));
	return ret < 0 ? failed(m, first, "move", (int)ret) : 0;
}

/* Hints, right and wrong ones: nothing that is read may depend on them. */
static void op_ahead(struct model *m)
{
	uint32_t blocks[MAX_BATCH], n = 1 + pick(m, MAX_BATCH);

	for (uint32_t k = 0; k < n; k++)
		blocks[k] = m->names[pick(m, m->n)].block;
	kvt_store_prefetch(m->store, blocks, n);
	if (!pick(m, 4))
		kvt_store_prefetch_drop(m->store, blocks, n);
}

int model_run(struct model *m, uint64_t n)
{
	int ret = 0;

	for (uint64_t end = m->step + n; m->step < end && !ret; m->step++) {
		uint32_t r = pick(m, 100);

		if (r < 8)
			op_ahead(m);
		else if (r < 45)
			ret = op_read(m);
		else if (r < 75)
			ret = op_write(m);
		else if (r < 80)
			ret = op_cut(m);
		else if (r < 84)
			ret = op_copy(m);
		else if (r < 88)
			ret = op_share(m);
		else if (r < 97)
			ret = op_move(m);
		else
			forget(m, pick(m, m->n));
		if (!ret && kvt_store_check(m->store)) {
			printf("%s\n", kvt_last_error());
			ret = lie(m, 0, "the books do not balance");
		}
	}
	return ret;
}

int model_verify(struct model *m)
{
	int ret = 0;

	for (uint32_t i = 0; i < m->n && !ret; i++) {
		uint32_t block = m->names[i].block;
		struct kvt_view view;

		kvt_store_borrow_begin(m->store, &block, 1);
		ret = kvt_store_borrow_wait(m->store, &block, 1, &view);
		if (ret) {
			ret = failed(m, i, "borrow", ret);
			continue;
		}
		ret = compare(m, i, &view);
		kvt_store_return(m->store, &block, 1);
	}
	return ret;
}
