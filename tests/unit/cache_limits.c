// SPDX-License-Identifier: MIT
/*
 * Budgets are hard, and a full tier is an error or a slower way, never a crash
 * or another's bytes: what goes wrong for others at this job, each as a test of
 * its kind.
 */
#include <check.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cache/cache.h"
#include "lib/host_fault.h"
#include "lib/rounds.h"
#include "lib/scratch.h"
#include "lib/store_model.h"

#define HEADS 2
#define DIM 64
#define ROW (HEADS * DIM)

static struct kvt_plane_params planes[2];

static struct kvt_cache_params params(uint64_t frames, uint64_t disk, uint32_t seqs, uint32_t tokens)
{
	struct kvt_cache_params p = KVT_INIT(p);

	for (int i = 0; i < 2; i++)
		planes[i] = (struct kvt_plane_params){ .size = sizeof(planes[i]), .codec = KVT_F32, .heads = HEADS,
						       .head_dim = DIM };
	p.planes = planes;
	p.n_planes = 2;
	p.block_bytes = 4096;
	p.threads = 1;
	p.max_seqs = seqs;
	p.max_tokens = tokens;
	p.max_query_rows = 16;
	p.disk_bytes = disk;
	p.ram_bytes = (uint64_t)kvt_cache_min_ram(&p) + frames * (4096 + 256);
	return p;
}

/* Rows that name their sequence, plane and position. */
static void pattern(float *row, uint32_t seq, uint32_t plane, uint32_t t)
{
	for (int i = 0; i < ROW; i++)
		row[i] = (float)(seq * 1000003u + plane * 7919u + t * 131u + (uint32_t)i);
}

static int write_row(struct kvt_seq *s, uint32_t seq, uint32_t t)
{
	float row[ROW];
	int ret = 0;

	for (uint32_t plane = 0; plane < 2 && !ret; plane++) {
		struct kvt_rows src = { .data = row, .type = KVT_F32 };

		pattern(row, seq, plane, t);
		ret = kvt_seq_write(s, plane, t, 1, &src);
	}
	return ret;
}

static void expect_rows(struct kvt_seq *s, uint32_t seq, uint32_t first, uint32_t n)
{
	float row[ROW], want[ROW];

	for (uint32_t t = first; t < first + n; t++)
		for (uint32_t plane = 0; plane < 2; plane++) {
			struct kvt_rows dst = { .data = row, .type = KVT_F32 };

			if (kvt_seq_read(s, plane, t, 1, &dst))
				ck_abort_msg("reading: %s", kvt_last_error());
			pattern(want, seq, plane, t);
			if (memcmp(row, want, sizeof(row)))
				ck_abort_msg("sequence %u, plane %u, row %u: %g instead of %g", seq, plane, t,
					     (double)row[0], (double)want[0]);
		}
}

static uint64_t rss(void)
{
	unsigned long long pages = 0;
	FILE *f = fopen("/proc/self/statm", "r");

	if (!f || fscanf(f, "%*u %llu", &pages) != 1)
		ck_abort_msg("no /proc/self/statm");
	fclose(f);
	return pages * (uint64_t)sysconf(_SC_PAGESIZE);
}

/* Sequences that come back from the disk, with stores in between, get their own bytes. */
START_TEST(sequences_come_back_as_themselves)
{
	struct kvt_cache_params p = params(8, 16 << 20, 64, 64);
	struct kvt_seq *seq[64];
	struct kvt_cache *cache;

	ck_assert_msg(!kvt_cache_create(&p, &cache), "%s", kvt_last_error());
	for (uint32_t i = 0; i < 64; i++) {
		ck_assert(!kvt_seq_create(cache, &seq[i]));
		ck_assert(!kvt_seq_append(seq[i], NULL, 40));
		for (uint32_t t = 0; t < 40; t++)
			ck_assert_msg(!write_row(seq[i], i, t), "%s", kvt_last_error());
	}
	for (uint32_t i = 0; i < 64; i++)
		ck_assert_msg(kvt_seq_move(seq[i], KVT_TIER_DISK) == 10, "%s", kvt_last_error());
	for (uint32_t round = 0; round < 3; round++)
		for (uint32_t i = 0; i < 64; i++) {
			uint32_t other = (i * 29 + 7) % 64;

			expect_rows(seq[i], i, 0, 40);
			/* and one that changes while others load */
			ck_assert_msg(!write_row(seq[other], other, i % 40), "%s", kvt_last_error());
		}
	kvt_cache_destroy(cache);
}
END_TEST

/* What does not fit is told before memory is taken, and what fitted before still is there. */
START_TEST(more_than_the_budget_is_told)
{
	struct kvt_cache_params p = params(30, 0, 2, 4096);
	uint64_t before, limit = p.ram_bytes;
	struct kvt_stats st = KVT_INIT(st);
	struct kvt_cache *cache;
	struct kvt_seq *big, *small;
	uint32_t t = 0;
	int ret = 0;

	before = rss();
	ck_assert_msg(!kvt_cache_create(&p, &cache), "%s", kvt_last_error());
	ck_assert(!kvt_seq_create(cache, &small) && !kvt_seq_append(small, NULL, 10));
	for (uint32_t k = 0; k < 10; k++)
		ck_assert(!write_row(small, 1, k));
	ck_assert(!kvt_seq_create(cache, &big) && !kvt_seq_append(big, NULL, 4096));
	while (t < 4096 && !ret)
		ret = write_row(big, 2, t++);
	ck_assert_int_eq(ret, -ENOSPC);
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "budget"));
	ck_assert(!kvt_cache_stats(cache, &st));
	ck_assert_uint_gt(st.full, 0);
	ck_assert_uint_le(st.tier[KVT_TIER_RAM].peak, limit);
	if (!test_sanitized()) /* whose shadow memory counts too */
		ck_assert_uint_le(rss() - before, limit + (2 << 20));
	expect_rows(small, 1, 0, 10);
	expect_rows(big, 2, 0, t - 2);
	kvt_seq_free(big);
	/* what it held can be used again */
	ck_assert(!kvt_seq_create(cache, &big) && !kvt_seq_append(big, NULL, 8) && !write_row(big, 3, 0));
	kvt_cache_destroy(cache);
}
END_TEST

struct storer {
	struct kvt_cache *cache;
	uint32_t id, refused, stored;
};

static void *store_many(void *arg)
{
	struct storer *s = arg;

	for (uint32_t i = 0; i < 125; i++) {
		struct kvt_seq *seq;
		bool ok = true;

		if (kvt_seq_create(s->cache, &seq)) {
			s->refused++;
			continue;
		}
		ok = !kvt_seq_append(seq, NULL, 16);
		for (uint32_t t = 0; t < 16 && ok; t++)
			ok = !write_row(seq, s->id, t);
		if (ok) {
			expect_rows(seq, s->id, 0, 16);
			s->stored++;
		} else {
			s->refused++;
		}
		kvt_seq_free(seq);
	}
	return NULL;
}

/* Far more is stored, from eight threads, than there is room for. */
START_TEST(a_full_tier_refuses_and_lives)
{
	struct kvt_cache_params p = params(2, 8 * 4096, 8, 64);
	struct storer s[8];
	pthread_t threads[8];
	struct kvt_stats st = KVT_INIT(st);
	struct kvt_cache *cache;
	uint32_t refused = 0, stored = 0;

	ck_assert_msg(!kvt_cache_create(&p, &cache), "%s", kvt_last_error());
	for (uint32_t i = 0; i < 8; i++) {
		s[i] = (struct storer){ .cache = cache, .id = i };
		ck_assert(!pthread_create(&threads[i], NULL, store_many, &s[i]));
	}
	for (uint32_t i = 0; i < 8; i++) {
		pthread_join(threads[i], NULL);
		refused += s[i].refused;
		stored += s[i].stored;
	}
	ck_assert_uint_eq(refused + stored, 1000);
	ck_assert_uint_gt(stored, 0);
	/* a block whose sequence went while it was on its way to or from the disk goes when it is there */
	for (uint32_t i = 0; i < 10000 && (!i || st.blocks); i++) {
		usleep(i ? 1000 : 0);
		ck_assert(!kvt_cache_stats(cache, &st));
	}
	ck_assert_msg(!kvt_store_check(cache->store), "%s", kvt_last_error());
	ck_assert_uint_eq(st.blocks, 0);
	if (refused)
		ck_assert_uint_gt(st.full, 0);
	kvt_cache_destroy(cache);
}
END_TEST

/* A disk tier of exactly the cache's blocks, and the least memory: enough, also for rewriting what lies there. */
START_TEST(a_disk_of_exactly_the_blocks)
{
	enum { ROWS = 800, BLOCKS = 2 * ROWS / 8 };
	struct kvt_cache_params p = params(0, BLOCKS * 4096ull, 1, ROWS);
	struct kvt_cache *cache;
	struct kvt_seq *seq;

	ck_assert_msg(!kvt_cache_create(&p, &cache), "%s", kvt_last_error());
	ck_assert(!kvt_seq_create(cache, &seq) && !kvt_seq_append(seq, NULL, ROWS));
	for (uint32_t t = 0; t < ROWS; t++)
		ck_assert_msg(!write_row(seq, 1, t), "row %u: %s", t, kvt_last_error());
	for (uint32_t i = 0; i < 2 * ROWS; i++)
		ck_assert_msg(!write_row(seq, 1, i * 37 % ROWS), "rewriting, %u: %s", i, kvt_last_error());
	expect_rows(seq, 1, 0, ROWS);
	ck_assert_msg(!kvt_store_check(cache->store), "%s", kvt_last_error());
	kvt_cache_destroy(cache);
}
END_TEST

/* Eviction takes what it was asked for: k blocks of n. */
START_TEST(eviction_takes_what_was_asked_for)
{
	struct kvt_cache_params p = params(64, 1 << 20, 1, 256);
	struct kvt_stats st = KVT_INIT(st);
	struct kvt_cache *cache;
	struct kvt_seq *seq;
	uint32_t *table;

	ck_assert(!kvt_cache_create(&p, &cache));
	ck_assert(!kvt_seq_create(cache, &seq) && !kvt_seq_append(seq, NULL, 256));
	for (uint32_t t = 0; t < 256; t++)
		ck_assert(!write_row(seq, 0, t));
	table = kvt_seq_table(seq, &cache->planes[0]);
	ck_assert(!kvt_cache_stats(cache, &st));
	ck_assert_uint_eq(st.tier[KVT_TIER_RAM].blocks, 64);
	ck_assert_int_eq(kvt_store_move(cache->store, table, 5, KVT_TIER_DISK), 5);
	ck_assert(!kvt_cache_stats(cache, &st));
	ck_assert_uint_eq(st.tier[KVT_TIER_RAM].blocks, 59);
	ck_assert_uint_eq(st.tier[KVT_TIER_DISK].blocks, 5);
	ck_assert_uint_eq(st.tier[KVT_TIER_RAM].frames_free + 59, st.tier[KVT_TIER_RAM].frames);
	expect_rows(seq, 0, 0, 256);
	kvt_cache_destroy(cache);
}
END_TEST

/* A read right behind a write-back on a slow disk waits or serves; it is never partial. */
START_TEST(reads_while_writes_are_in_flight)
{
	struct kvt_budget budget = { .limit = UINT64_MAX };
	struct kvt_host_params hp = { .kind = KVT_HOST_USER, .depth = 64, .frame_bytes = 4096, .budget = &budget };
	struct kvt_fault fault = { .kind = KVT_FAULT_NONE, .delay = 40, .reorder = true, .seed = 3 };
	struct kvt_cache_params p = params(2, 4 << 20, 4, 600);
	struct kvt_host *inner, *host;
	struct kvt_cache *cache;
	struct kvt_seq *seq;

	ck_assert(!kvt_host_open(&hp, &inner) && !kvt_host_fault_open(inner, &fault, &host));
	ck_assert_msg(!kvt_cache_create_on(&p, host, NULL, &cache), "%s", kvt_last_error());
	ck_assert(!kvt_seq_create(cache, &seq));
	for (uint32_t t = 0; t < 600; t++) {
		ck_assert(!kvt_seq_append(seq, NULL, 1) && !write_row(seq, 5, t));
		expect_rows(seq, 5, t > 30 ? (t * 17) % (t - 30) : 0, t > 30 ? 3 : 1);
	}
	expect_rows(seq, 5, 0, 600);
	kvt_cache_destroy(cache);
	kvt_host_close(host);
}
END_TEST

/* A log callback may ask for the stats. */
static struct kvt_cache *logged;
static uint32_t log_lines;

static void log_and_ask(void *user, enum kvt_log_level level, const char *line)
{
	struct kvt_stats st = KVT_INIT(st);

	(void)user, (void)level, (void)line;
	log_lines++;
	if (logged)
		kvt_cache_stats(logged, &st);
}

/* The file system is full long before the disk budget is: the cache goes on with what it has got. */
START_TEST(the_file_system_is_full_first)
{
	static char dir[512];
	int status, fd;
	pid_t child;

	snprintf(dir, sizeof(dir), "%s/kvtier-test-XXXXXX", test_scratch());
	ck_assert_ptr_nonnull(mkdtemp(dir));
	child = fork();
	if (!child) { /* a mount of its own, gone with the process */
		struct kvt_cache_params p = params(4, 4 << 20, 2, 1024);
		struct kvt_stats st = KVT_INIT(st);
		struct kvt_cache *cache;
		struct kvt_seq *seq;
		uint32_t t = 0;
		char path[600], *fill;
		int ret = 0;

		if (unshare(CLONE_NEWNS) || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) ||
		    mount("tmpfs", dir, "tmpfs", 0, "size=512k"))
			_exit(77);
		/* somebody else takes half of it */
		snprintf(path, sizeof(path), "%s/other", dir);
		fd = open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
		fill = calloc(1, 256 << 10);
		if (fd < 0 || write(fd, fill, 256 << 10) != 256 << 10)
			_exit(77);
		p.disk_dir = dir;
		if (kvt_cache_create(&p, &cache) || kvt_seq_create(cache, &seq))
			_exit(2);
		logged = cache;
		kvt_set_log(log_and_ask, NULL);
		while (t < 1024 && !ret) {
			ret = kvt_seq_append(seq, NULL, 1);
			if (!ret)
				ret = write_row(seq, 9, t++);
		}
		if (ret != -ENOSPC || kvt_cache_stats(cache, &st) || !st.full || st.blocks_lost)
			_exit(3);
		if (!st.tier[KVT_TIER_DISK].blocks) /* what did fit is in use */
			_exit(4);
		expect_rows(seq, 9, 0, t - 2);
		if (kvt_store_check(cache->store) || !log_lines)
			_exit(5);
		logged = NULL;
		kvt_cache_destroy(cache);
		_exit(0);
	}
	ck_assert_int_eq(waitpid(child, &status, 0), child);
	rmdir(dir);
	if (WIFEXITED(status) && WEXITSTATUS(status) == 77)
		printf("SKIP: the_file_system_is_full_first: no mount may be made here (needs root)\n");
	else
		ck_assert_msg(WIFEXITED(status) && !WEXITSTATUS(status), "status %x", status);
}
END_TEST

/* Memory does not creep: a million sequences and blocks come and go. */
START_TEST(a_million_come_and_go)
{
	struct kvt_cache_params p = params(32, 1 << 20, 4, 64);
	uint64_t rounds = test_rounds(1000000, 20000, 5000), settled = 0;
	struct kvt_cache *cache;
	float row[ROW] = { 1 };
	struct kvt_rows src = { .data = row, .type = KVT_F32 };

	ck_assert(!kvt_cache_create(&p, &cache));
	for (uint64_t i = 0; i < rounds; i++) {
		struct kvt_seq *seq;

		if (kvt_seq_create(cache, &seq) || kvt_seq_append(seq, NULL, 1) || kvt_seq_write(seq, i & 1, 0, 1, &src))
			ck_abort_msg("%s", kvt_last_error());
		kvt_seq_free(seq);
		if (i == rounds / 10)
			settled = rss();
	}
	/* a sanitizer keeps what is freed for a while */
	ck_assert_uint_le(rss(), settled + (test_sanitized() ? 16 << 20 : 256 << 10));
	kvt_cache_destroy(cache);
}
END_TEST

/* Peaks and the process's growth stay within the budgets through a million random operations. */
START_TEST(growth_stays_within_the_budgets)
{
	uint64_t n = test_rounds(1000000, 3000, 3000), step = 5000, before, most = 0;
	struct model_config c = { .frames = { 0, 64, 192, 600 }, .slots = 264, .seed = 77 };
	struct model *warm, *m;
	struct kvt_stats st = KVT_INIT(st);

	/* what the C library and the test itself keep is there before */
	ck_assert(!model_create(&c, &warm));
	before = rss();
	model_destroy(warm);
	ck_assert(!model_create(&c, &m));
	if (n < step)
		step = n;
	for (uint64_t done = 0; done < n; done += step) {
		ck_assert(!model_run(m, step));
		most = rss() > most ? rss() : most;
	}
	kvt_store_stats(model_store(m), &st);
	/* 1 MiB: allocator slack, stacks' guard pages, page tables */
	if (!test_sanitized())
		ck_assert_msg(most - before <= st.tier[KVT_TIER_PINNED].used + st.tier[KVT_TIER_RAM].used +
						       400 * 4096 + (1 << 20),
			      "%llu bytes more", (unsigned long long)(most - before));
	for (int t = 0; t < KVT_TIERS; t++)
		ck_assert_uint_le(st.tier[t].peak, st.tier[t].budget);
	model_destroy(m);
}
END_TEST

struct writer {
	struct kvt_seq *seq;
	uint32_t id, failed;
};

static void *write_much(void *arg)
{
	struct writer *w = arg;
	uint64_t random = w->id;

	for (uint32_t i = 0; i < 150; i++) {
		uint32_t t = (uint32_t)(model_random(&random) % 1000);

		if (write_row(w->seq, w->id, t))
			w->failed++;
		else
			expect_rows(w->seq, w->id, t, 1);
	}
	return NULL;
}

/* The least memory is enough for any number of writers: they wait for each other, and none gives up. */
START_TEST(writers_share_the_least_memory)
{
	struct kvt_cache_params p = params(0, 8 << 20, 6, 1000);
	struct kvt_cache *cache;
	struct writer w[6];
	pthread_t threads[6];

	ck_assert_msg(!kvt_cache_create(&p, &cache), "%s", kvt_last_error());
	for (uint32_t i = 0; i < 6; i++) {
		w[i] = (struct writer){ .id = i };
		ck_assert(!kvt_seq_create(cache, &w[i].seq) && !kvt_seq_append(w[i].seq, NULL, 1000));
	}
	for (uint32_t i = 0; i < 6; i++)
		ck_assert(!pthread_create(&threads[i], NULL, write_much, &w[i]));
	for (uint32_t i = 0; i < 6; i++) {
		pthread_join(threads[i], NULL);
		ck_assert_uint_eq(w[i].failed, 0);
	}
	kvt_cache_destroy(cache);
}
END_TEST

/* A move says how many blocks are there when it ends, and brings no more than fit. */
START_TEST(moves_count_what_is_there)
{
	struct kvt_cache_params p = params(10, 8 << 20, 1, 2000);
	struct kvt_stats st = KVT_INIT(st);
	struct kvt_cache *cache;
	struct kvt_seq *seq;

	p.pinned_bytes = 7 * 4096;
	ck_assert(!kvt_cache_create(&p, &cache));
	ck_assert(!kvt_seq_create(cache, &seq) && !kvt_seq_append(seq, NULL, 2000));
	for (uint32_t t = 0; t < 2000; t++)
		ck_assert(!write_row(seq, 3, t));
	ck_assert(!kvt_cache_flush(cache));
	for (int tier = KVT_TIER_PINNED; tier < KVT_TIERS; tier++) {
		int64_t n = kvt_seq_move(seq, (enum kvt_tier)tier);

		ck_assert(!kvt_cache_stats(cache, &st));
		ck_assert_int_eq(n, (int64_t)st.tier[tier].blocks);
	}
	expect_rows(seq, 3, 0, 2000);
	kvt_cache_destroy(cache);
}
END_TEST

/* Memory that changed by itself: what was found wrong is not served, nor written into, until it is written whole. */
START_TEST(a_bit_flips_in_memory)
{
	struct kvt_cache_params p = params(8, 1 << 20, 1, 64);
	float rows[8 * ROW] = { 1 }, back[ROW];
	struct kvt_rows src = { .data = rows, .type = KVT_F32 }, dst = { .data = back, .type = KVT_F32 };
	struct kvt_cache *cache;
	struct kvt_seq *seq;
	enum kvt_tier tier;
	uint32_t block;

	ck_assert(!kvt_cache_create(&p, &cache));
	ck_assert(!kvt_seq_create(cache, &seq) && !kvt_seq_append(seq, NULL, 64));
	ck_assert(!kvt_seq_write(seq, 0, 0, 8, &src));
	block = kvt_seq_table(seq, &cache->planes[0])[0];
	kvt_store_frame(cache->store, block, &tier)[100] ^= 4;
	ck_assert_int_eq(kvt_cache_flush(cache), -EBADMSG);
	ck_assert_int_eq(kvt_seq_read(seq, 0, 0, 1, &dst), -EBADMSG);
	ck_assert_int_eq(kvt_seq_write(seq, 0, 3, 1, &src), -EBADMSG);
	ck_assert_int_eq(kvt_seq_read(seq, 0, 3, 1, &dst), -EBADMSG);
	ck_assert(!kvt_seq_write(seq, 0, 0, 8, &src));
	ck_assert(!kvt_seq_read(seq, 0, 0, 1, &dst) && back[0] == 1);
	ck_assert(!kvt_cache_flush(cache));
	kvt_cache_destroy(cache);
}
END_TEST

static void attend_inside(void *arg, uint32_t i)
{
	struct kvt_attn a = KVT_INIT(a);
	float q[ROW] = { 1 }, out[ROW];
	struct kvt_attn_item item = { .seq = arg, .first = i, .n = 1, .q = q, .out = out };

	a.n_heads = HEADS;
	a.v_plane = 1;
	if (kvt_attend(((struct kvt_seq *)arg)->cache, &a, &item, 1))
		ck_abort_msg("%s", kvt_last_error());
}

START_TEST(attention_within_an_engines_parallel_work)
{
	struct kvt_cache_params p = params(64, 0, 1, 64);
	struct kvt_cache *cache;
	struct kvt_seq *seq;

	p.threads = 3;
	p.ram_bytes += 4 << 20;
	ck_assert(!kvt_cache_create(&p, &cache));
	ck_assert(!kvt_seq_create(cache, &seq) && !kvt_seq_append(seq, NULL, 64));
	kvt_cache_parallel(cache, 64, attend_inside, seq);
	kvt_cache_destroy(cache);
}
END_TEST

START_TEST(metadata_is_small)
{
	struct kvt_cache_params p = params(0, 64 << 20, 1, 64);
	int64_t one = kvt_cache_min_ram(&p), two;

	p.disk_bytes *= 2;
	two = kvt_cache_min_ram(&p);
	ck_assert_int_le((two - one) / ((64 << 20) / 4096), 128);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("cache_limits");
	TCase *t = tcase_create("limits");
	SRunner *r = srunner_create(s);
	int failed;

	tcase_set_timeout(t, 600);
	tcase_add_test(t, sequences_come_back_as_themselves);
	tcase_add_test(t, more_than_the_budget_is_told);
	tcase_add_test(t, a_full_tier_refuses_and_lives);
	tcase_add_test(t, a_disk_of_exactly_the_blocks);
	tcase_add_test(t, eviction_takes_what_was_asked_for);
	tcase_add_test(t, reads_while_writes_are_in_flight);
	tcase_add_test(t, the_file_system_is_full_first);
	tcase_add_test(t, a_million_come_and_go);
	tcase_add_test(t, growth_stays_within_the_budgets);
	tcase_add_test(t, writers_share_the_least_memory);
	tcase_add_test(t, moves_count_what_is_there);
	tcase_add_test(t, a_bit_flips_in_memory);
	tcase_add_test(t, attention_within_an_engines_parallel_work);
	tcase_add_test(t, metadata_is_small);
	suite_add_tcase(s, t);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
