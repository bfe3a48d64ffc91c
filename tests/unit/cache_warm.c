// SPDX-License-Identifier: MIT
/*
 * A RAM tier whose frames may be taken at any time, and one that outlives its process: every byte that is served is the
 * right one, whatever was taken, torn, or left half-done by a kill.
 */
#include <check.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cache/cache.h"
#include "lib/host_keep.h"
#include "lib/scratch.h"
#include "store/store.h"

enum { PLANES = 3, DIM = 64, TOKENS = 400, SEQS = 4 };

static struct kvt_budget budget = { .limit = UINT64_MAX };
static const struct kvt_plane_params planes[PLANES] = {
	{ .size = sizeof(planes[0]), .codec = KVT_F32, .heads = 1, .head_dim = DIM },
	{ .size = sizeof(planes[0]), .codec = KVT_F32, .heads = 1, .head_dim = DIM / 2 },
	{ .size = sizeof(planes[0]), .codec = KVT_F32, .heads = 1, .head_dim = DIM },
};

static void remove_pool(void)
{
	char path[384];

	snprintf(path, sizeof(path), "%s/warm", test_scratch());
	unlink(path);
}

/* With a warm pool or not; with @frames of RAM, and a disk tier or not. */
static struct kvt_cache_params params(bool warm, uint32_t frames, bool disk)
{
	struct kvt_cache_params p = KVT_INIT(p);
	int64_t least;

	p.planes = planes;
	p.n_planes = PLANES;
	p.block_bytes = 4096;
	p.disk_dir = test_scratch();
	p.disk_bytes = disk ? 4 << 20 : 0;
	p.threads = 1;
	p.max_seqs = SEQS;
	p.max_tokens = TOKENS;
	p.max_query_rows = 1;
	p.warm_name = warm ? "warm" : NULL;
	p.warm_id = 7;
	p.host = KVT_HOST_USER;
	least = kvt_cache_min_ram(&p);
	ck_assert_msg(least > 0, "%s", kvt_last_error());
	p.ram_bytes = (uint64_t)least + frames * 4600ull;
	return p;
}

static struct kvt_cache *try_open(const struct kvt_cache_params *p, uint32_t take, struct kvt_host **host)
{
	struct kvt_host_params hp = { .kind = KVT_HOST_USER, .io = KVT_IO_THREADS, .depth = 64,
				      .frame_bytes = 4096, .budget = &budget };
	struct kvt_cache *cache;
	struct kvt_host *inner;

	ck_assert(!kvt_host_open(&hp, &inner) && !kvt_host_keep_open(inner, test_scratch(), take, host));
	if (!kvt_cache_create_on(p, *host, NULL, &cache))
		return cache;
	kvt_host_close(*host);
	return NULL;
}

static struct kvt_cache *open_cache(const struct kvt_cache_params *p, uint32_t take, struct kvt_host **host)
{
	struct kvt_cache *cache = try_open(p, take, host);

	ck_assert_msg(cache != NULL, "%s", kvt_last_error());
	return cache;
}

static void close_cache(struct kvt_cache *cache, struct kvt_host *host)
{
	ck_assert_msg(!kvt_store_check(cache->store), "%s", kvt_last_error());
	kvt_cache_destroy(cache);
	kvt_host_close(host);
}

static struct kvt_stats stats(struct kvt_cache *cache)
{
	struct kvt_stats st = KVT_INIT(st);

	ck_assert(!kvt_cache_stats(cache, &st));
	return st;
}

/* A row says which tokens led to it: [0, pos]. */
static void row_of(const uint32_t *tokens, uint32_t pos, uint32_t plane, float *row)
{
	uint32_t h = 2166136261u + plane;

	for (uint32_t i = 0; i <= pos; i++)
		h = (h ^ tokens[i]) * 16777619u;
	for (uint32_t i = 0; i < DIM; i++)
		row[i] = (float)(int32_t)((h = h * 1664525u + 1013904223u) >> 8);
}

static int grow(struct kvt_seq *seq, const uint32_t *tokens, uint32_t to)
{
	uint32_t from = kvt_seq_len(seq);
	static float rows[TOKENS][DIM];
	int ret = kvt_seq_append(seq, tokens + from, to - from);

	for (uint32_t p = 0; p < PLANES && !ret; p++) {
		struct kvt_rows src = { .data = rows, .stride = sizeof(rows[0]), .type = KVT_F32 };

		for (uint32_t t = from; t < to; t++)
			row_of(tokens, t, p, rows[t - from]);
		if (to > from)
			ret = kvt_seq_write(seq, p, from, to - from, &src);
	}
	return ret;
}

static void expect(struct kvt_seq *seq, const uint32_t *tokens)
{
	static float rows[TOKENS][DIM];
	uint32_t n = kvt_seq_len(seq);
	float want[DIM];

	for (uint32_t p = 0; p < PLANES; p++) {
		struct kvt_rows dst = { .data = rows, .stride = sizeof(rows[0]), .type = KVT_F32 };

		ck_assert_msg(!kvt_seq_read(seq, p, 0, n, &dst), "%s", kvt_last_error());
		for (uint32_t t = 0; t < n; t++) {
			row_of(tokens, t, p, want);
			ck_assert_msg(!memcmp(rows[t], want, sizeof(float) * planes[p].head_dim), "plane %u, row %u of %u",
				      p, t, n);
		}
	}
}

static void prompt(uint32_t k, uint32_t *tokens)
{
	/* those of 2j and 2j + 1 begin alike */
	for (uint32_t i = 0; i < TOKENS; i++)
		tokens[i] = i < 40 ? k / 2 * 1000 + i : k * 7919 + i * i;
}

/* Frames go whenever they may; blocks come back from disk. */
START_TEST(taken_frames)
{
	struct kvt_cache_params p = params(false, 24, true);
	struct kvt_seq *seq[SEQS];
	uint32_t tokens[SEQS][TOKENS], seed = 1;
	struct kvt_host *host;
	struct kvt_cache *cache = open_cache(&p, 160, &host);

	for (uint32_t i = 0; i < SEQS; i++) {
		prompt(i, tokens[i]);
		ck_assert(!kvt_seq_create(cache, &seq[i]));
	}
	for (uint32_t round = 0; round < 300; round++) {
		uint32_t i = (seed = seed * 1103515245u + 12345u) >> 16 & 3, len = kvt_seq_len(seq[i]), to = len + round % 13;

		if (round % 17 == 16)
			ck_assert(!kvt_seq_truncate(seq[i], len / 2));
		else if (round % 23 == 22)
			ck_assert_int_ge(kvt_seq_move(seq[i], round & 1 ? KVT_TIER_RAM : KVT_TIER_DISK), 0);
		else if (to <= TOKENS)
			ck_assert_msg(!grow(seq[i], tokens[i], to), "%s", kvt_last_error());
		if (round % 3 == 0)
			expect(seq[(round / 3) % SEQS], tokens[(round / 3) % SEQS]);
		if (round % 40 == 39)
			ck_assert_msg(!kvt_cache_flush(cache), "%s", kvt_last_error());
	}
	ck_assert_uint_gt(stats(cache).reclaimed, 20);
	ck_assert_uint_eq(stats(cache).digest_errors, 0);
	ck_assert_uint_eq(stats(cache).blocks_lost, 0);
	close_cache(cache, host);
}
END_TEST

/* No memory for a frame that was taken: that call fails, says so, and the next one works. */
START_TEST(no_memory_to_regain)
{
	struct kvt_cache_params p = params(false, 8, true);
	uint32_t tokens[TOKENS], failed = 0;
	struct kvt_host *host;
	struct kvt_cache *cache = open_cache(&p, 256, &host);
	struct kvt_seq *seq;
	float row[DIM];
	struct kvt_rows dst = { .data = row, .type = KVT_F32 };

	prompt(0, tokens);
	ck_assert(!kvt_seq_create(cache, &seq) && !grow(seq, tokens, TOKENS) && !kvt_cache_flush(cache));
	for (uint32_t i = 0; i < TOKENS; i += 16) {
		kvt_host_keep_fail(host, 1);
		failed += kvt_seq_read(seq, 0, i, 1, &dst) == -ENOMEM;
		kvt_host_keep_fail(host, 0);
		ck_assert_msg(!kvt_seq_read(seq, 0, i, 1, &dst), "%s", kvt_last_error());
	}
	ck_assert_uint_gt(failed, 0);
	expect(seq, tokens);
	close_cache(cache, host);
}
END_TEST

static void fill_and_die(const struct kvt_cache_params *p, uint32_t n_tokens)
{
	pid_t pid = fork();
	int status;

	ck_assert(pid >= 0);
	if (!pid) {
		uint32_t tokens[TOKENS];
		struct kvt_host *host;
		struct kvt_cache *cache = open_cache(p, 0, &host);
		struct kvt_seq *seq;

		for (uint32_t i = 0; i < 2; i++) {
			prompt(i * 2, tokens);
			if (kvt_seq_create(cache, &seq) || grow(seq, tokens, n_tokens))
				_exit(1);
		}
		kill(getpid(), SIGKILL);
	}
	ck_assert(waitpid(pid, &status, 0) == pid && WIFSIGNALED(status));
}

START_TEST(found_after_a_kill)
{
	struct kvt_cache_params p = params(true, 300, _i);
	uint32_t tokens[TOKENS], other[TOKENS];
	struct kvt_seq *seq, *fresh[SEQS];
	struct kvt_host *host;
	struct kvt_cache *cache;

	remove_pool();
	fill_and_die(&p, 333);
	cache = open_cache(&p, 0, &host);
	prompt(1, other);
	ck_assert_int_eq(kvt_seq_recover(cache, other + 1, 100, &seq), -ENOENT);
	prompt(0, tokens);
	ck_assert_msg(!kvt_seq_recover(cache, tokens, TOKENS, &seq), "%s", kvt_last_error());
	ck_assert_uint_eq(kvt_seq_len(seq), 333);
	expect(seq, tokens);
	ck_assert_uint_eq(stats(cache).disk_reads, 0);
	ck_assert_uint_gt(stats(cache).warm_blocks, 0);
	/* it goes on like any other */
	ck_assert_msg(!grow(seq, tokens, TOKENS), "%s", kvt_last_error());
	expect(seq, tokens);
	ck_assert_int_eq(kvt_seq_recover(cache, tokens, TOKENS, &seq), -ENOENT); /* once */
	/* the other one makes room */
	for (uint32_t i = 0; i < SEQS - 1; i++)
		ck_assert_msg(!kvt_seq_create(cache, &fresh[i]), "%s", kvt_last_error());
	ck_assert_int_eq(kvt_seq_create(cache, &fresh[0]), -ENOSPC);
	close_cache(cache, host);

	/* after an orderly end, too; cut to what is common */
	cache = open_cache(&p, 0, &host);
	prompt(1, other);
	ck_assert_msg(!kvt_seq_recover(cache, other, TOKENS, &seq), "%s", kvt_last_error());
	ck_assert_uint_eq(kvt_seq_len(seq), 40);
	expect(seq, other);
	ck_assert(!grow(seq, other, 200));
	expect(seq, other);
	kvt_seq_free(seq);
	close_cache(cache, host);
	/* what was freed is not found */
	cache = open_cache(&p, 0, &host);
	ck_assert_int_eq(kvt_seq_recover(cache, other, TOKENS, &seq), -ENOENT);
	ck_assert_uint_eq(stats(cache).blocks, 0);
	close_cache(cache, host);
	remove_pool();
}
END_TEST

/* Another model, another geometry: refused by name, and nothing changed. */
START_TEST(others_are_refused)
{
	struct kvt_cache_params p = params(true, 120, false), q = p;
	struct kvt_plane_params other[PLANES];
	uint32_t tokens[TOKENS];
	struct kvt_host *host;
	struct kvt_cache *cache;
	struct kvt_seq *seq;

	remove_pool();
	fill_and_die(&p, 100);
	q.warm_id = 8;
	ck_assert(!try_open(&q, 0, &host) && strstr(kvt_last_error(), "another model"));
	q = p;
	memcpy(other, planes, sizeof(other));
	other[1].codec = KVT_F16;
	other[1].head_dim = DIM;
	q.planes = other;
	ck_assert(!try_open(&q, 0, &host) && strstr(kvt_last_error(), "another model"));
	cache = open_cache(&p, 0, &host);
	prompt(0, tokens);
	ck_assert(!kvt_seq_recover(cache, tokens, TOKENS, &seq) && kvt_seq_len(seq) == 100);
	close_cache(cache, host);
	remove_pool();
}
END_TEST

/* A bit flipped anywhere behind the header: never a wrong byte; and it is counted, or did not matter. */
START_TEST(flipped_bits)
{
	struct kvt_cache_params p = params(true, 60, false);
	uint32_t tokens[TOKENS], shorter = 0, counted = 0;
	char path[384];

	snprintf(path, sizeof(path), "%s/warm", test_scratch());
	prompt(0, tokens);
	for (uint32_t i = 0; i < 120; i++) {
		struct kvt_host *host;
		struct kvt_cache *cache;
		struct kvt_seq *seq;
		struct stat st;
		uint8_t byte;
		off_t at;
		int fd;

		remove_pool();
		fill_and_die(&p, 150);
		fd = open(path, O_RDWR | O_CLOEXEC);
		ck_assert(fd >= 0 && !fstat(fd, &st));
		/* every other one among records and tokens, at the end */
		at = i & 1 ? st.st_size - 1 - (off_t)(i * 197) % (4 * 4096) :
			     8192 + (off_t)((i * 2654435761u) % (st.st_size - 8192));
		ck_assert(pread(fd, &byte, 1, at) == 1);
		byte ^= 1u << i % 8;
		ck_assert(pwrite(fd, &byte, 1, at) == 1);
		close(fd);
		cache = open_cache(&p, 0, &host);
		counted += stats(cache).digest_errors > 0;
		if (!kvt_seq_recover(cache, tokens, TOKENS, &seq)) {
			shorter += kvt_seq_len(seq) < 150;
			expect(seq, tokens);
		} else {
			shorter++;
		}
		close_cache(cache, host);
	}
	ck_assert_uint_gt(shorter, 0);
	ck_assert_uint_gt(counted, 0);
	remove_pool();
}
END_TEST

static void live(const struct kvt_cache_params *p, uint32_t seed)
{
	uint32_t tokens[6][TOKENS], of[SEQS] = { 0 };
	struct kvt_seq *seq[SEQS] = { NULL };
	struct kvt_host *host;
	struct kvt_cache *cache = open_cache(p, 60, &host);

	for (uint32_t k = 0; k < 6; k++)
		prompt(k, tokens[k]);
	for (;;) {
		uint32_t r = (seed = seed * 1664525u + 1013904223u) >> 8, i = r % SEQS, k = r / 16 % 6, len;

		if (!seq[i]) {
			of[i] = k;
			if (kvt_seq_recover(cache, tokens[k], TOKENS, &seq[i]) && kvt_seq_create(cache, &seq[i]))
				_exit(1);
		}
		len = kvt_seq_len(seq[i]);
		switch (r / 128 % 8) {
		case 0:
			kvt_seq_free(seq[i]);
			seq[i] = NULL;
			break;
		case 1: /* another end to the same beginning */
			if (len > 30) {
				if (kvt_seq_truncate(seq[i], 30))
					_exit(1);
				of[i] ^= 1;
			}
			break;
		case 2:
			if (seq[(i + 1) % SEQS])
				kvt_seq_free(seq[(i + 1) % SEQS]);
			if (kvt_seq_fork(seq[i], len / 2, &seq[(i + 1) % SEQS]))
				_exit(1);
			of[(i + 1) % SEQS] = of[i];
			break;
		default:
			if (len + 25 <= TOKENS && grow(seq[i], tokens[of[i]], len + 1 + r / 1024 % 25))
				_exit(1);
		}
	}
}

/* Killed at any moment of any life; the next process lives on in what it finds. */
START_TEST(killed_anywhere)
{
	struct kvt_cache_params p = params(true, 150, _i);
	uint32_t tokens[TOKENS], found = 0;

	remove_pool();
	for (uint32_t n = 0; n < 40; n++) {
		pid_t pid = fork();
		struct kvt_host *host;
		struct kvt_cache *cache;
		struct kvt_seq *seq;
		int status;

		ck_assert(pid >= 0);
		if (!pid)
			live(&p, n + 1);
		usleep(3000 + n * 7919 % 40000);
		kill(pid, SIGKILL);
		ck_assert(waitpid(pid, &status, 0) == pid && WIFSIGNALED(status));
		if (n % 4)
			continue;
		cache = open_cache(&p, 0, &host);
		for (uint32_t k = 0; k < 6; k++) {
			prompt(k, tokens);
			while (!kvt_seq_recover(cache, tokens, TOKENS, &seq)) {
				found += kvt_seq_len(seq);
				expect(seq, tokens);
				kvt_seq_free(seq);
			}
		}
		close_cache(cache, host);
	}
	ck_assert_uint_gt(found, 100);
	remove_pool();
}
END_TEST

int main(void)
{
	Suite *s = suite_create("cache_warm");
	TCase *c = tcase_create("warm");
	SRunner *r = srunner_create(s);
	int failed;

	tcase_add_test(c, taken_frames);
	tcase_add_test(c, no_memory_to_regain);
	tcase_add_loop_test(c, found_after_a_kill, 0, 2);
	tcase_add_test(c, others_are_refused);
	tcase_add_test(c, flipped_bits);
	tcase_add_loop_test(c, killed_anywhere, 0, 2);
	suite_add_tcase(s, c);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
