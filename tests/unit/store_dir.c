// SPDX-License-Identifier: MIT
/*
 * What the files of a directory may say: each field alone, forged with checksums that hold, damaged, cut or
 * another directory's, counts for nothing, and all else is found. And what a directory writes is found again.
 */
#include <check.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cache/prefix.h"
#include "codec/codec.h"
#include "lib/keep_dir.h"
#include "lib/prefix_rig.h"
#include "lib/rounds.h"
#include "store/journal.h"

#define TALKS 8
#define LONG_TALK 3  /* two chunks and a tail; the others are one chunk */
#define OTHER_ROOT 6 /* this talk's */
#define CHUNKS (TALKS - 1 + 3)
#define FREE_SLOT 500 /* from here on no talk has any */

static struct rig_config kept(void)
{
	return (struct rig_config){ .dir = keep_dir, .chunks = 40 };
}

static uint32_t talk(uint32_t i, uint32_t *tokens, uint32_t *root)
{
	uint32_t n = i == LONG_TALK ? 2 * 64 + 32 : 64;

	rig_prompt(tokens, n, i, 0);
	*root = i == OTHER_ROOT;
	return n;
}

static uint64_t saved(struct prefix_rig *r)
{
	struct kvt_prefix_stats st = KVT_INIT(st);

	ck_assert(!kvt_prefix_stats(r->cache, &st));
	return st.saved;
}

/* A flush returns when all that is new, @chunks in the end, is written down, each time. */
static void compute_talks(struct prefix_rig *r, uint32_t chunks)
{
	uint64_t before = saved(r), is_new = 0;
	uint32_t tokens[256], root, n;

	for (uint32_t i = 0; i < TALKS; i++) {
		n = talk(i, tokens, &root);
		rig_compute(r, root, tokens, n);
		ck_assert_msg(!kvt_cache_flush(r->cache), "%s", kvt_last_error());
		is_new += (n + 63) / 64;
		if (chunks == CHUNKS)
			ck_assert_uint_eq(saved(r), before + is_new);
	}
	ck_assert_uint_eq(saved(r), before + chunks);
}

static void make_kept(void)
{
	struct prefix_rig r;

	keep_dir_make();
	r = rig_make(kept());
	compute_talks(&r, CHUNKS);
	rig_free(&r);
}

/* Chunks that a new process finds. */
static uint32_t found(void)
{
	struct kvt_prefix_stats st = KVT_INIT(st);
	struct prefix_rig r = rig_make(kept());

	ck_assert(!kvt_prefix_stats(r.cache, &st));
	ck_assert_uint_eq(st.chunks - st.chunks_free, st.recovered);
	rig_free(&r);
	return (uint32_t)st.recovered;
}

/* The same where all talks must be among them. */
static uint32_t found_beside_talks(void)
{
	struct kvt_prefix_stats st = KVT_INIT(st);
	struct prefix_rig r = rig_make(kept());
	uint32_t tokens[256], root, n;

	for (uint32_t i = 0; i < TALKS; i++) {
		n = talk(i, tokens, &root);
		rig_serve(&r, root, tokens, n, n);
	}
	ck_assert(!kvt_prefix_stats(r.cache, &st));
	ck_assert_uint_eq(st.chunks - st.chunks_free, st.recovered);
	rig_free(&r);
	return (uint32_t)st.recovered;
}

/* ---- records ---- */

struct record {
	struct kvt_log_head head;
	uint32_t tokens[256];
	struct kvt_block_entry e[16];
	uint64_t at;
};

/* The @n-th record of a kind. */
static struct record nth(uint32_t type, uint32_t n)
{
	struct kvt_log_record r;
	struct record rec = { 0 };
	struct kvt_dir *d;
	const uint8_t *log;
	uint64_t bytes, at = 0;

	ck_assert(!kvt_dir_open(keep_dir, NULL, &d) && !kvt_dir_map(d, &log, &bytes));
	do
		ck_assert(kvt_log_next(log, bytes, d->super->dir, &at, &r));
	while (r.head.type != type || n--);
	rec.head = r.head;
	rec.at = r.at;
	memcpy(rec.tokens, r.key, r.head.n_tokens * (type == KVT_LOG_CHUNK ? sizeof(uint32_t) : 1));
	if (type == KVT_LOG_CHUNK)
		memcpy(rec.e, r.entries, r.head.n_blocks * sizeof(*rec.e));
	kvt_dir_unmap(log, bytes);
	kvt_dir_close(d);
	return rec;
}

static void append(const struct record *rec)
{
	static uint8_t buf[8192];
	struct kvt_dir *d;

	ck_assert(!kvt_dir_open(keep_dir, NULL, &d));
	kvt_log_make(buf, &rec->head, d->super->dir, rec->tokens, rec->e);
	ck_assert(!kvt_dir_append(d, buf, kvt_log_bytes(rec->head.type, rec->head.n_tokens, rec->head.n_blocks)));
	kvt_dir_close(d);
}

static void append_drop(uint64_t id)
{
	append(&(struct record){ .head = { .type = KVT_LOG_DROP, .id = id } });
}

/* A chunk of a new conversation behind the root of the first, in slots that are free. */
static struct record chunk(uint64_t id, uint32_t talk, uint32_t slot)
{
	struct record rec = nth(KVT_LOG_CHUNK, 0);

	rec.head.id = id;
	rig_prompt(rec.tokens, 64, talk, 0);
	for (uint32_t i = 0; i < rec.head.n_blocks; i++) {
		rec.e[i].id.chunk = id;
		rec.e[i].slot = slot + i;
	}
	return rec;
}

static off_t log_bytes(void)
{
	struct stat st;

	ck_assert(!stat(keep_file("log"), &st));
	return st.st_size;
}

/* As many entries as planes of 64, 64 and 32 rows have for 128 tokens, which are two chunks' worth. */
static void make_double(struct record *rec)
{
	const struct kvt_block_entry of[] = { rec->e[0], rec->e[0], rec->e[1], rec->e[1],
					      rec->e[2], rec->e[2], rec->e[2], rec->e[2] };
	const uint32_t index[] = { 0, 1, 1, 2, 2, 3, 4, 5 };

	memcpy(rec->e, of, sizeof(of));
	for (uint32_t i = 0; i < 8; i++) {
		rec->e[i].index = index[i];
		rec->e[i].slot = FREE_SLOT + i;
	}
	rig_prompt(rec->tokens, 128, 100, 0);
	rec->head.n_tokens = 128;
	rec->head.n_blocks = 8;
}

enum {
	RIGHT, SLOT, FEWER_ROWS, MORE_ROWS, INDEX, PLANE, CHUNK, ONE_MORE, ONE_LESS, EMPTY, DOUBLE, CHUNK_AS_ROOT, NO_ROOT,
	NO_PARENT, ROOT_AS_PARENT, OTHERS_PARENT, TAIL_AS_PARENT, OTHERS_ID, FORGERIES,
};

static void forge(struct record *rec, uint32_t what)
{
	switch (what) {
	case SLOT:
		rec->e[2].slot = 1u << 24;
		break;
	case FEWER_ROWS:
		rec->e[0].id.rows--;
		break;
	case MORE_ROWS:
		rec->e[0].id.rows++;
		break;
	case INDEX:
		rec->e[2].index = 1;
		break;
	case PLANE:
		rec->e[1].id.plane = 0;
		break;
	case CHUNK:
		rec->e[1].id.chunk++;
		break;
	case ONE_MORE:
		rec->e[rec->head.n_blocks] = rec->e[0];
		rec->e[rec->head.n_blocks].slot = FREE_SLOT + rec->head.n_blocks;
		rec->e[rec->head.n_blocks].index = rec->head.n_blocks;
		rec->head.n_blocks++;
		break;
	case ONE_LESS:
		rec->head.n_blocks--;
		break;
	case EMPTY:
		rec->head.n_tokens = rec->head.n_blocks = 0;
		break;
	case DOUBLE:
		make_double(rec);
		break;
	case CHUNK_AS_ROOT:
		rec->head.root = rec->head.parent = nth(KVT_LOG_CHUNK, 0).head.id;
		break;
	case NO_ROOT:
		rec->head.root = rec->head.parent = 777;
		break;
	case NO_PARENT:
		rec->head.parent = 777;
		break;
	case ROOT_AS_PARENT:
		rec->head.parent = nth(KVT_LOG_ROOT, 1).head.id;
		break;
	case OTHERS_PARENT:
		rec->head.parent = nth(KVT_LOG_CHUNK, OTHER_ROOT + 2).head.id;
		break;
	case TAIL_AS_PARENT:
		rec->head.parent = nth(KVT_LOG_CHUNK, LONG_TALK + 2).head.id;
		break;
	case OTHERS_ID:
		rec->head.id = nth(KVT_LOG_CHUNK, 1).head.id;
		for (uint32_t i = 0; i < rec->head.n_blocks; i++)
			rec->e[i].id.chunk = rec->head.id;
		break;
	}
}

START_TEST(a_record_that_cannot_be_counts_for_nothing)
{
	struct record rec;
	off_t bytes;

	make_kept();
	bytes = log_bytes();
	for (uint32_t what = RIGHT; what < FORGERIES; what++) {
		rec = chunk(1000, 100, FREE_SLOT);
		forge(&rec, what);
		append(&rec);
		ck_assert_msg(found_beside_talks() == CHUNKS + (what == RIGHT), "forgery %u", what);
		ck_assert(!truncate(keep_file("log"), bytes));
	}
	/* a root whose key is short, and a chunk of it */
	rec = nth(KVT_LOG_ROOT, 0);
	rec.head.id = 999;
	rec.head.n_tokens -= 8;
	append(&rec);
	rec = chunk(1000, 100, FREE_SLOT);
	rec.head.root = rec.head.parent = 999;
	append(&rec);
	ck_assert_uint_eq(found_beside_talks(), CHUNKS);
	keep_dir_remove();
}
END_TEST

/* Of records of one chunk, and of those that name one slot, the last counts: what was dropped may be known to nobody. */
START_TEST(the_last_record_counts)
{
	struct record a, b;
	off_t bytes;

	make_kept();
	bytes = log_bytes();
	/* its slots are another's now; it stays lost when that one goes */
	a = chunk(1000, 100, FREE_SLOT);
	append(&a);
	b = chunk(1001, 101, FREE_SLOT);
	append(&b);
	ck_assert_uint_eq(found_beside_talks(), CHUNKS + 1);
	append_drop(1001);
	ck_assert_uint_eq(found_beside_talks(), CHUNKS);
	ck_assert(!truncate(keep_file("log"), bytes));
	/* and a third one's; or written again, elsewhere */
	for (uint32_t again = 0; again < 2; again++) {
		a = chunk(1000, 100, FREE_SLOT);
		append(&a);
		b = chunk(1001, 101, FREE_SLOT);
		append(&b);
		b = chunk(1002, 102, FREE_SLOT);
		append(&b);
		a = chunk(1000, 100, FREE_SLOT + 100);
		if (again)
			append(&a);
		ck_assert_uint_eq(found_beside_talks(), CHUNKS + 1 + again);
		ck_assert(!truncate(keep_file("log"), bytes));
	}
	/* written again before its first slots were another's: also under another number */
	for (uint64_t id = 1000; id < 1002; id++) {
		a = chunk(1000, 100, FREE_SLOT);
		append(&a);
		a = chunk(id, 100, FREE_SLOT + 100);
		append(&a);
		b = chunk(1002, 102, FREE_SLOT);
		append(&b);
		ck_assert_uint_eq(found_beside_talks(), CHUNKS + 2);
		ck_assert(!truncate(keep_file("log"), bytes));
	}
	keep_dir_remove();
}
END_TEST

START_TEST(a_damaged_record_is_none)
{
	const uint32_t step = test_rounds(3, 29, 61);
	struct record rec;
	uint8_t byte, bad;
	uint64_t bytes;
	int fd;

	make_kept();
	rec = nth(KVT_LOG_CHUNK, 1);
	bytes = kvt_log_bytes(rec.head.type, rec.head.n_tokens, rec.head.n_blocks);
	fd = open(keep_file("log"), O_RDWR);
	for (uint64_t i = 0; i < bytes; i += step) {
		ck_assert(pread(fd, &byte, 1, (off_t)(rec.at + i)) == 1);
		bad = byte ^ (uint8_t)(1u << i % 8);
		ck_assert(pwrite(fd, &bad, 1, (off_t)(rec.at + i)) == 1);
		ck_assert_msg(found() == CHUNKS - 1, "byte %llu", (unsigned long long)i);
		ck_assert(pwrite(fd, &byte, 1, (off_t)(rec.at + i)) == 1);
	}
	close(fd);
	ck_assert_uint_eq(found_beside_talks(), CHUNKS);
	keep_dir_remove();
}
END_TEST

/* The head of a long record, and no more of it: nobody reads behind the end, and what is written then is found. */
START_TEST(a_record_cut_short_is_none)
{
	static uint32_t buf[16384], many[10000], tokens[64];
	struct kvt_log_head h = { .type = KVT_LOG_CHUNK, .id = 2000, .root = 1, .parent = 1, .n_tokens = 10000 };
	struct kvt_dir *d;
	struct prefix_rig r;

	make_kept();
	ck_assert(!kvt_dir_open(keep_dir, NULL, &d));
	kvt_log_make(buf, &h, d->super->dir, many, NULL);
	ck_assert(!kvt_dir_append(d, buf, sizeof(h) + 13));
	kvt_dir_close(d);
	r = rig_make(kept());
	rig_prompt(tokens, 64, 100, 0);
	rig_compute(&r, 0, tokens, 64);
	rig_free(&r);
	ck_assert_uint_eq(found_beside_talks(), CHUNKS + 1);
	keep_dir_remove();
}
END_TEST

START_TEST(records_of_another_directory_are_none)
{
	make_kept();
	ck_assert(!unlink(keep_file("superblock")));
	ck_assert_uint_eq(found(), 0);
	keep_dir_remove();
}
END_TEST

/* ---- superblock ---- */

static struct kvt_super *read_super(uint64_t *bytes)
{
	int fd = open(keep_file("superblock"), O_RDONLY);
	struct kvt_super *s = calloc(1, 4096);
	ssize_t n = pread(fd, s, 4096, 0);

	ck_assert_int_gt(n, (ssize_t)sizeof(*s));
	close(fd);
	*bytes = (uint64_t)n;
	return s;
}

START_TEST(a_superblock_that_cannot_be_is_refused)
{
	const uint64_t from = offsetof(struct kvt_super, dir);
	const uint64_t plane = offsetof(struct kvt_super, planes[2]);
	const struct {
		uint64_t at;
		uint32_t value;
		const char *name; /* NULL: it may be so */
	} cases[] = {
		{ offsetof(struct kvt_super, rotation), 5, NULL },
		{ offsetof(struct kvt_super, chunk), 0, "geometry" },
		{ offsetof(struct kvt_super, block_bytes), 2048, "geometry" },
		{ offsetof(struct kvt_super, block_bytes), 4097, "geometry" },
		{ offsetof(struct kvt_super, block_bytes), 4 << 20, "geometry" },
		{ plane + offsetof(struct kvt_super_plane, codec), KVT_CODECS, "plane" },
		{ plane + offsetof(struct kvt_super_plane, row_bytes), 0, "plane" },
		{ plane + offsetof(struct kvt_super_plane, block_rows), 0, "plane" },
		{ plane + offsetof(struct kvt_super_plane, block_rows), 1024, "plane" },
		{ plane + offsetof(struct kvt_super_plane, block_rows), 24, "plane" },
		{ offsetof(struct kvt_super, n_planes), 2, "size" },
		{ offsetof(struct kvt_super, n_planes), 0, "size" },
		{ offsetof(struct kvt_super, bytes), 0, "size" },
	};
	struct kvt_super *s, *was = calloc(1, 4096);
	uint64_t bytes;
	int ret;

	make_kept();
	s = read_super(&bytes);
	memcpy(was, s, bytes);
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		memcpy((uint8_t *)s + cases[i].at, &cases[i].value, sizeof(cases[i].value));
		s->check = kvt_row_digest(0, (const uint8_t *)s + from, (uint32_t)(bytes - from));
		ret = kvt_super_check(s, bytes);
		ck_assert_msg(ret == (cases[i].name ? -EUCLEAN : 0), "case %zu: %d", i, ret);
		if (ret)
			ck_assert_msg(strstr(kvt_last_error(), cases[i].name), "case %zu: %s", i, kvt_last_error());
		memcpy(s, was, bytes);
	}
	s->check = kvt_row_digest(0, (const uint8_t *)s + from, (uint32_t)(bytes + 32 - from));
	ck_assert_int_eq(kvt_super_check(s, bytes + 32), -EUCLEAN);
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "size"));
	free(was);
	free(s);
	keep_dir_remove();
}
END_TEST

static void refused(const struct kvt_super *want, const char *name)
{
	struct kvt_dir *d;

	ck_assert_int_eq(kvt_dir_open(keep_dir, want, &d), -EMEDIUMTYPE);
	ck_assert_msg(strstr(kvt_last_error(), name), "\"%s\" names no %s", kvt_last_error(), name);
}

START_TEST(another_caches_directory_is_refused_by_name)
{
	struct kvt_super *s, *want = calloc(1, 4096);
	struct kvt_dir *d;
	uint64_t bytes;

	make_kept();
	s = read_super(&bytes);
#define BUT(change, name) \
	do { \
		memcpy(want, s, bytes); \
		change; \
		refused(want, name); \
	} while (0)
	BUT(want->rotation++, "rotation");
	BUT(want->block_bytes *= 2, "block_bytes");
	BUT(want->n_planes--, "planes");
	BUT(want->chunk *= 2, "prefix_tokens");
	BUT(want->model[5] ^= 1, "model");
	BUT(want->planes[1].codec ^= 1, "codec");
	BUT(want->planes[1].heads++, "geometry");
	BUT(want->planes[1].layer++, "geometry");
	BUT(want->planes[1].block_rows *= 2, "geometry");
#undef BUT
	ck_assert(!kvt_dir_open(keep_dir, s, &d));
	kvt_dir_close(d);
	free(want);
	free(s);
	keep_dir_remove();
}
END_TEST

/* ---- what is written ---- */

START_TEST(a_limit_on_files_is_told)
{
	struct rlimit limit, was;
	uint64_t buf[8] = { 0 };
	struct kvt_dir *d;
	off_t bytes;

	make_kept();
	bytes = log_bytes();
	ck_assert(!kvt_dir_open(keep_dir, NULL, &d) && !getrlimit(RLIMIT_FSIZE, &was));
	limit = was;
	limit.rlim_cur = (rlim_t)bytes + 63;
	ck_assert(!setrlimit(RLIMIT_FSIZE, &limit));
	ck_assert_int_eq(kvt_dir_append(d, buf, sizeof(buf)), -EFBIG);
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "RLIMIT_FSIZE"));
	limit.rlim_cur++;
	ck_assert(!setrlimit(RLIMIT_FSIZE, &limit));
	ck_assert_int_eq(kvt_dir_append(d, buf, sizeof(buf)), 0);
	ck_assert(!setrlimit(RLIMIT_FSIZE, &was));
	kvt_dir_close(d);
	keep_dir_remove();
}
END_TEST

/* The disk is full of what may not leave: what comes then is not kept, what comes later is, with its root. */
START_TEST(what_could_not_be_written_is_not_taken_for_written)
{
	struct rig_config c = kept();
	struct kvt_prefix_match held[30];
	uint32_t tokens[64], n = 0;
	uint64_t before;
	struct prefix_rig r;

	keep_dir_make();
	c.disk_bytes = 180 << 10;
	r = rig_make(c);
	do {
		before = saved(&r);
		ck_assert_uint_lt(n, 29);
		rig_prompt(tokens, 64, 100 + n, 0);
		rig_compute(&r, 0, tokens, 64);
		ck_assert(!kvt_prefix_match(r.cache, &r.roots[0], tokens, 64, &held[n++]));
		kvt_cache_flush(r.cache);
	} while (saved(&r) > before);
	rig_prompt(tokens, 64, 200, 0);
	rig_compute(&r, 1, tokens, 64);
	ck_assert(!kvt_prefix_match(r.cache, &r.roots[1], tokens, 64, &held[n]));
	kvt_cache_flush(r.cache);
	ck_assert_uint_eq(saved(&r), before);
	for (uint32_t i = 0; i < n; i++)
		kvt_prefix_release(r.cache, &held[i]);
	ck_assert_int_ge(kvt_prefix_evict(r.cache, KVT_TIER_DISK, 3), 3);
	rig_prompt(tokens, 64, 201, 0);
	rig_compute(&r, 1, tokens, 64);
	kvt_cache_flush(r.cache);
	ck_assert_uint_eq(saved(&r), before + 1);
	kvt_prefix_release(r.cache, &held[n]);
	rig_free(&r);
	r = rig_make(c);
	rig_serve(&r, 1, tokens, 64, 64);
	rig_free(&r);
	keep_dir_remove();
}
END_TEST

/* What was dropped is not found, all of it; what is found can be added to, and leave. */
START_TEST(what_is_found_lives_on)
{
	struct rig_config c = kept();
	struct kvt_prefix_stats st = KVT_INIT(st);
	struct prefix_rig r;
	uint32_t tokens[128];

	keep_dir_make();
	c.policy = KVT_POLICY_LRU;
	r = rig_make(c);
	compute_talks(&r, CHUNKS);
	ck_assert_int_eq(kvt_prefix_evict(r.cache, KVT_TIER_DISK, 100), CHUNKS);
	compute_talks(&r, CHUNKS); /* their roots come back, too */
	rig_prompt(tokens, 64, 100, 0);
	rig_compute(&r, 0, tokens, 64);
	ck_assert(!kvt_cache_flush(r.cache));
	ck_assert_int_eq(kvt_prefix_evict(r.cache, KVT_TIER_DISK, 4), 4);
	rig_serve(&r, 0, tokens, 64, 64); /* none of the four, so that the talks have them all */
	rig_free(&r);
	ck_assert_uint_eq(found(), CHUNKS + 1 - 4);

	r = rig_make(kept());
	compute_talks(&r, 4);
	rig_free(&r);
	r = rig_make(kept());
	rig_prompt(tokens, 128, 0, 0);
	rig_serve(&r, 0, tokens, 64, 64);
	ck_assert(!kvt_prefix_stats(r.cache, &st));
	ck_assert_uint_eq(st.saved_ns, 64ull * r.ns);
	rig_compute(&r, 0, tokens, 128);
	ck_assert(!kvt_cache_flush(r.cache));
	ck_assert_uint_eq(saved(&r), 1);
	rig_free(&r);

	r = rig_make(kept());
	rig_serve(&r, 0, tokens, 128, 128);
	ck_assert(!kvt_prefix_stats(r.cache, &st));
	ck_assert_int_eq(kvt_prefix_evict(r.cache, KVT_TIER_DISK, 100), (int64_t)st.recovered);
	ck_assert(!kvt_prefix_stats(r.cache, &st));
	ck_assert_uint_eq(st.roots, 0);
	ck_assert_uint_eq(st.chunks_free, st.chunks);
	rig_free(&r);
	ck_assert_uint_eq(found(), 0);
	keep_dir_remove();
}
END_TEST

/* A chunk whose bytes are lost is computed again where it was; what is behind it stays, and makes no room for what follows. */
START_TEST(a_lost_chunk_is_mended_in_place)
{
	struct rig_config c = kept();
	struct kvt_stats st = KVT_INIT(st);
	struct kvt_prefix_match held;
	uint32_t tokens[192], other[64];
	uint64_t word = 1;
	struct prefix_rig r;
	int fd;

	keep_dir_make();
	rig_prompt(tokens, 192, 1, 0);
	r = rig_make(c);
	rig_compute(&r, 0, tokens, 128);
	rig_free(&r);
	fd = open(keep_file("slots"), O_WRONLY);
	ck_assert(pwrite(fd, &word, sizeof(word), (off_t)nth(KVT_LOG_CHUNK, 0).e[1].slot * 4096) == sizeof(word));
	close(fd);
	c.chunks = 3;
	r = rig_make(c);
	rig_prompt(other, 64, 2, 0);
	rig_compute(&r, 0, other, 64);
	ck_assert(!kvt_cache_flush(r.cache)); /* what is being written down is busy, too */
	ck_assert(!kvt_prefix_match(r.cache, &r.roots[0], other, 64, &held));
	rig_serve(&r, 0, tokens, 192, 0);
	rig_compute(&r, 0, tokens, 192);
	rig_serve(&r, 0, tokens, 192, 128);
	ck_assert(!kvt_cache_flush(r.cache) && !kvt_cache_stats(r.cache, &st));
	ck_assert_uint_eq(st.blocks, 3 * 4); /* what was lost went */
	kvt_prefix_release(r.cache, &held);
	rig_compute(&r, 0, tokens, 192);
	rig_serve(&r, 0, tokens, 192, 192);
	rig_free(&r);
	r = rig_make(c);
	rig_serve(&r, 0, tokens, 192, 192);
	rig_free(&r);
	keep_dir_remove();
}
END_TEST

/* Much is written, in one process, into a log that has room for a part of it: the newest is found. */
START_TEST(a_log_is_compacted_while_it_is_written)
{
	const uint32_t talks = test_rounds(400, 200, 150);
	struct rig_config c = kept();
	struct kvt_prefix_stats st = KVT_INIT(st);
	uint32_t tokens[128];
	struct prefix_rig r;

	keep_dir_make();
	c.disk_bytes = 400 << 10;
	c.policy = KVT_POLICY_LRU;
	r = rig_make(c);
	for (uint32_t i = 0; i < talks; i++) {
		rig_prompt(tokens, 128, i, 0);
		rig_compute(&r, i % 2, tokens, 128);
	}
	kvt_cache_flush(r.cache); /* not all has room */
	ck_assert(!kvt_prefix_stats(r.cache, &st));
	ck_assert_uint_gt(st.saved * kvt_log_bytes(KVT_LOG_CHUNK, 64, 4), st.log_bytes);
	rig_free(&r);
	r = rig_make(c);
	rig_serve(&r, (talks - 1) % 2, tokens, 128, 128);
	ck_assert(!kvt_prefix_stats(r.cache, &st));
	ck_assert_uint_gt(st.recovered, 10);
	rig_free(&r);
	keep_dir_remove();
}
END_TEST

/* Of each number the last record, and the dropped not at all. */
START_TEST(a_compacted_log_has_the_last_records)
{
	struct record rec, root;
	uint64_t live[2], scratch[2], bytes;
	struct kvt_dir *d;

	make_kept();
	append_drop(nth(KVT_LOG_CHUNK, 1).head.id);
	rec = nth(KVT_LOG_CHUNK, 0);
	rec.head.ns = 4711;
	append(&rec);
	root = nth(KVT_LOG_ROOT, 0);
	live[0] = rec.head.id;
	live[1] = root.head.id;
	bytes = kvt_log_bytes(KVT_LOG_CHUNK, rec.head.n_tokens, rec.head.n_blocks) +
		kvt_log_bytes(KVT_LOG_ROOT, root.head.n_tokens, 0);
	ck_assert(!kvt_dir_open(keep_dir, NULL, &d));
	ck_assert(!kvt_dir_compact(d, live, 2, scratch));
	ck_assert_uint_eq(d->log_bytes, bytes);
	kvt_dir_close(d);
	ck_assert_int_eq(log_bytes(), (off_t)bytes);
	ck_assert_uint_eq(nth(KVT_LOG_CHUNK, 0).head.ns, 4711);
	ck_assert_uint_eq(found(), 1);
	keep_dir_remove();
}
END_TEST

/* What is queued twice is written once, and more drops than there is room for are not written down. */
START_TEST(queues_hold_what_they_can)
{
	struct kvt_prefix_match a, b;
	struct kvt_prefix_stats st = KVT_INIT(st);
	uint32_t tokens[256], root, n;
	struct kvt_log_record rec;
	uint64_t before, bytes, at = 0, drops = 0;
	struct kvt_prefix *p;
	const uint8_t *log;
	struct kvt_dir *d;
	struct prefix_rig r;

	keep_dir_make();
	r = rig_make(kept());
	p = r.cache->prefix;
	compute_talks(&r, CHUNKS);
	n = talk(0, tokens, &root);
	ck_assert(!kvt_prefix_match(r.cache, &r.roots[root], tokens, n, &a));
	n = talk(1, tokens, &root);
	ck_assert(!kvt_prefix_match(r.cache, &r.roots[root], tokens, n, &b));
	before = saved(&r);
	pthread_mutex_lock(&p->lock);
	kvt_keeper_added(p, a.node);
	kvt_keeper_added(p, b.node);
	kvt_keeper_added(p, a.node);
	pthread_mutex_unlock(&p->lock);
	ck_assert(!kvt_cache_flush(r.cache));
	ck_assert_uint_eq(saved(&r), before + 2);
	pthread_mutex_lock(&p->lock);
	for (uint32_t i = 0; i < p->plan.capacity + 100; i++)
		kvt_keeper_dropped(p, a.node);
	pthread_mutex_unlock(&p->lock);
	ck_assert(!kvt_cache_flush(r.cache) && !kvt_prefix_stats(r.cache, &st));
	kvt_prefix_release(r.cache, &a);
	kvt_prefix_release(r.cache, &b);
	rig_free(&r);
	ck_assert(!kvt_dir_open(keep_dir, NULL, &d) && !kvt_dir_map(d, &log, &bytes));
	while (kvt_log_next(log, bytes, d->super->dir, &at, &rec))
		drops += rec.head.type == KVT_LOG_DROP;
	kvt_dir_unmap(log, bytes);
	kvt_dir_close(d);
	ck_assert_uint_eq(drops, st.chunks);
	ck_assert_uint_eq(found(), CHUNKS - 1);
	keep_dir_remove();
}
END_TEST

int main(void)
{
	Suite *s = suite_create("store_dir");
	TCase *t = tcase_create("dir");
	SRunner *r = srunner_create(s);
	int failed;

	tcase_set_timeout(t, 100);
	tcase_add_test(t, a_record_that_cannot_be_counts_for_nothing);
	tcase_add_test(t, the_last_record_counts);
	tcase_add_test(t, a_damaged_record_is_none);
	tcase_add_test(t, a_record_cut_short_is_none);
	tcase_add_test(t, records_of_another_directory_are_none);
	tcase_add_test(t, a_superblock_that_cannot_be_is_refused);
	tcase_add_test(t, another_caches_directory_is_refused_by_name);
	tcase_add_test(t, a_limit_on_files_is_told);
	tcase_add_test(t, what_could_not_be_written_is_not_taken_for_written);
	tcase_add_test(t, what_is_found_lives_on);
	tcase_add_test(t, a_lost_chunk_is_mended_in_place);
	tcase_add_test(t, a_log_is_compacted_while_it_is_written);
	tcase_add_test(t, a_compacted_log_has_the_last_records);
	tcase_add_test(t, queues_hold_what_they_can);
	suite_add_tcase(s, t);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
