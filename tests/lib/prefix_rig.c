// SPDX-License-Identifier: MIT
/* A cache with a prefix tree whose rows are functions of the tokens before them. */
#include "lib/prefix_rig.h"

#include <check.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cache/prefix.h"

static const uint32_t dims[RIG_PLANES] = { 16, 32, 32 };

static uint32_t codec_of(const struct rig_config *c, uint32_t plane)
{
	return plane == 0 ? KVT_F32 : plane == 1 ? KVT_F16 : c->codec;
}

int rig_open(struct prefix_rig *r, struct rig_config c)
{
	static uint8_t model[KVT_FINGERPRINT];
	struct kvt_plane_params planes[RIG_PLANES];
	struct kvt_cache_params p = KVT_INIT(p);
	int64_t bytes;

	memset(r, 0, sizeof(*r));
	r->ns = 1000000;
	for (uint32_t i = 0; i < RIG_PLANES; i++)
		planes[i] = (struct kvt_plane_params){ .size = sizeof(planes[i]), .codec = codec_of(&c, i), .heads = 1,
						       .head_dim = dims[i], .layer = i };
	p.planes = planes;
	p.n_planes = RIG_PLANES;
	p.block_bytes = 4096;
	p.max_tokens = 1024;
	p.max_seqs = 16;
	p.threads = 1;
	p.io = c.io;
	p.policy = c.policy;
	p.disk_bytes = !c.disk && !c.dir ? 0 : c.disk_bytes ? c.disk_bytes : c.small ? 64 * 4096 : 4 << 20;
	p.pinned_bytes = c.pinned_bytes;
	p.snapshots = c.snapshots;
	p.snapshot_bytes = c.snapshots ? RIG_SNAPSHOT : 0;
	p.session_snapshots = c.snapshots / 2;
	if (c.dir) {
		model[0] = c.model;
		p.store_dir = c.dir;
		p.store_model = model;
		p.store_rotation = c.rotation;
	}
	bytes = kvt_prefix_bytes(&p, c.chunks ? c.chunks : c.small ? 60 : 200);
	if (bytes < 0)
		return (int)bytes;
	p.prefix_bytes = (uint64_t)bytes;
	bytes = kvt_cache_min_ram(&p);
	if (bytes < 0)
		return (int)bytes;
	p.ram_bytes = (uint64_t)bytes + (c.small ? 60 : c.disk || c.dir ? 150 : 1000) * (4096 + 256);
	for (uint32_t i = 0; i < RIG_ROOTS; i++) {
		r->roots[i] = (struct kvt_prefix_root){ .size = sizeof(r->roots[i]) };
		r->roots[i].model[0] = c.model;
		r->roots[i].salt = "tenant";
		r->roots[i].adapter = "tenant";
		r->roots[i].salt_bytes = i & 1 ? 6 : 0;
		r->roots[i].adapter_bytes = i & 2 ? 6 : 0;
	}
	return kvt_cache_create(&p, &r->cache);
}

struct prefix_rig rig_make(struct rig_config c)
{
	struct prefix_rig r;

	ck_assert_msg(!rig_open(&r, c), "%s", kvt_last_error());
	r.chunk = (uint32_t)kvt_prefix_tokens(r.cache);
	ck_assert_uint_eq(r.chunk, 64);
	return r;
}

void rig_free(struct prefix_rig *r)
{
	struct kvt_prefix_stats st = KVT_INIT(st);

	ck_assert_msg(!kvt_prefix_check(r->cache), "%s", kvt_last_error());
	ck_assert_msg(!kvt_store_check(r->cache->store), "%s", kvt_last_error());
	ck_assert(!kvt_prefix_stats(r->cache, &st));
	ck_assert_uint_eq(st.chunks_free + st.chunks_evictable + st.chunks_pinned, st.chunks);
	kvt_cache_destroy(r->cache);
}

static uint64_t mix(uint64_t z)
{
	z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
	z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
	return z ^ (z >> 31);
}

void rig_prompt(uint32_t *tokens, uint32_t n, uint32_t talk, uint32_t fork)
{
	for (uint32_t i = 0; i < n; i++)
		tokens[i] = (uint32_t)mix(((uint64_t)talk << 32) + i + (fork && i >= fork ? 1ull << 60 : 0));
}

/* The row of token @t: of the root and all tokens up to it. Values that every codec holds exactly. */
static void make_row(uint32_t root, uint32_t plane, uint64_t history, float *row)
{
	uint64_t h = mix(history + plane * 977 + root * 7919);

	for (uint32_t i = 0; i < dims[plane]; i++)
		row[i] = (float)(int)(mix(h + i) & 127) - 64;
}

static uint64_t history_of(const uint32_t *tokens, uint32_t n)
{
	uint64_t h = 1;

	for (uint32_t i = 0; i < n; i++)
		h = mix(h + tokens[i]);
	return h;
}

void rig_extend(struct prefix_rig *r, uint32_t root, struct kvt_seq *seq, const uint32_t *tokens, uint32_t n)
{
	uint32_t from = kvt_seq_len(seq);
	uint64_t history = history_of(tokens, from);
	float *rows[RIG_PLANES];
	struct kvt_rows src = { .type = KVT_F32 };

	ck_assert_msg(!kvt_seq_append(seq, tokens + from, n - from), "%s", kvt_last_error());
	for (uint32_t p = 0; p < RIG_PLANES; p++)
		rows[p] = malloc((size_t)(n - from + 1) * dims[p] * sizeof(float));
	for (uint32_t t = from; t < n; t++) {
		history = mix(history + tokens[t]);
		for (uint32_t p = 0; p < RIG_PLANES; p++)
			make_row(root, p, history, rows[p] + (size_t)(t - from) * dims[p]);
	}
	for (uint32_t p = 0; p < RIG_PLANES; p++) {
		src.data = rows[p];
		ck_assert_msg(!kvt_seq_write(seq, p, from, n - from, &src), "%s", kvt_last_error());
		free(rows[p]);
	}
	(void)r;
}

/* Does one plane hold the rows that it should? */
static bool plane_right(uint32_t root, uint32_t plane, struct kvt_seq *seq, const uint32_t *tokens, uint32_t n, float *rows)
{
	struct kvt_rows dst = { .data = rows, .type = KVT_F32 };
	uint64_t history = 1;
	float want[64];

	if (n && kvt_seq_read(seq, plane, 0, n, &dst)) {
		printf("%u tokens, plane %u: %s\n", n, plane, kvt_last_error());
		return false;
	}
	for (uint32_t t = 0; t < n; t++) {
		history = mix(history + tokens[t]);
		make_row(root, plane, history, want);
		if (memcmp(rows + (size_t)t * dims[plane], want, dims[plane] * sizeof(float))) {
			printf("token %u, plane %u: a wrong row was served\n", t, plane);
			return false;
		}
	}
	return true;
}

void rig_expect(uint32_t root, struct kvt_seq *seq, const uint32_t *tokens, uint32_t n)
{
	uint32_t *ids = malloc((n + 1) * sizeof(*ids));
	float *rows = malloc((n + 1) * sizeof(float[64]));
	bool right = !kvt_seq_tokens(seq, 0, n, ids) && !memcmp(ids, tokens, n * sizeof(*ids));

	for (uint32_t p = 0; p < RIG_PLANES && right; p++)
		right = plane_right(root, p, seq, tokens, n, rows);
	free(rows);
	free(ids);
	ck_assert_msg(right, "%u tokens are not what was computed", n);
}

void rig_compute(struct prefix_rig *r, uint32_t root, const uint32_t *tokens, uint32_t n)
{
	struct kvt_prefix_match m;
	struct kvt_seq *seq;

	ck_assert_msg(!kvt_prefix_match(r->cache, &r->roots[root], tokens, n - 1, &m), "%s", kvt_last_error());
	ck_assert_msg(!kvt_seq_create(r->cache, &seq), "%s", kvt_last_error());
	ck_assert_msg(kvt_prefix_attach(r->cache, &m, n, seq) >= 0, "%s", kvt_last_error());
	kvt_prefix_release(r->cache, &m);
	rig_extend(r, root, seq, tokens, n);
	ck_assert_msg(kvt_prefix_insert(r->cache, &r->roots[root], seq, n, r->ns) >= 0, "%s", kvt_last_error());
	kvt_seq_free(seq);
}

uint32_t rig_serve_some(struct prefix_rig *r, uint32_t root, const uint32_t *tokens, uint32_t n)
{
	struct kvt_prefix_match m;
	struct kvt_seq *seq;
	int64_t found;

	ck_assert_msg(!kvt_prefix_match(r->cache, &r->roots[root], tokens, n, &m), "%s", kvt_last_error());
	ck_assert_msg(!kvt_seq_create(r->cache, &seq), "%s", kvt_last_error());
	found = kvt_prefix_attach(r->cache, &m, n, seq);
	ck_assert_msg(found >= 0, "%s", kvt_last_error());
	kvt_prefix_release(r->cache, &m);
	rig_expect(root, seq, tokens, (uint32_t)found);
	kvt_seq_free(seq);
	return (uint32_t)found;
}

void rig_serve(struct prefix_rig *r, uint32_t root, const uint32_t *tokens, uint32_t n, uint32_t found)
{
	ck_assert_uint_eq(rig_serve_some(r, root, tokens, n), found);
}

static void *compute_and_serve(void *arg)
{
	struct prefix_rig *r = arg;
	uint32_t tokens[2 * 64], id = __atomic_fetch_add(&r->counter, 1, __ATOMIC_RELAXED);

	for (uint32_t i = 0; i < r->prompts; i++) {
		rig_prompt(tokens, 128, id * 1000 + i, 0);
		rig_compute(r, id % RIG_ROOTS, tokens, 128);
		rig_serve_some(r, id % RIG_ROOTS, tokens, 128);
	}
	return NULL;
}

void rig_crowd(struct prefix_rig *r, uint32_t threads, uint32_t prompts)
{
	pthread_t thread[16];

	r->prompts = prompts;
	for (uint32_t i = 0; i < threads; i++)
		ck_assert(!pthread_create(&thread[i], NULL, compute_and_serve, r));
	for (uint32_t i = 0; i < threads; i++)
		pthread_join(thread[i], NULL);
}
