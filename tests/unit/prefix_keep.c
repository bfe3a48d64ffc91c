// SPDX-License-Identifier: MIT
/*
 * A directory that outlives the process: what comes back is what was written,
 * whoever ended, lost, cut or forged what; what does not fit is refused by name.
 */
#include <check.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "cache/prefix.h"
#include "lib/keep_dir.h"
#include "lib/prefix_rig.h"
#include "lib/rounds.h"
#include "lib/store_model.h"
#include "store/journal.h"

#define TALKS 12

static struct rig_config kept(void)
{
	return (struct rig_config){ .dir = keep_dir, .chunks = 150 };
}

static uint32_t talk_len(uint32_t talk)
{
	return 64 * (1 + talk % 4) - 1 + talk % 3;
}

static uint32_t all_chunks(void)
{
	uint32_t n = 0;

	for (uint32_t i = 0; i < TALKS; i++)
		n += (talk_len(i) + 63) / 64;
	return n;
}

static void compute_talks(struct prefix_rig *r)
{
	uint32_t tokens[260];

	for (uint32_t i = 0; i < TALKS; i++) {
		rig_prompt(tokens, talk_len(i), i, 0);
		rig_compute(r, i % RIG_ROOTS, tokens, talk_len(i));
	}
}

/* Tokens served of those asked for; whatever is served is right. */
static uint32_t serve_talks(struct prefix_rig *r)
{
	uint32_t tokens[260], served = 0;

	for (uint32_t i = 0; i < TALKS; i++) {
		rig_prompt(tokens, talk_len(i), i, 0);
		served += rig_serve_some(r, i % RIG_ROOTS, tokens, talk_len(i));
	}
	return served;
}

static uint32_t all_talks(void)
{
	uint32_t n = 0;

	for (uint32_t i = 0; i < TALKS; i++)
		n += talk_len(i);
	return n;
}

START_TEST(a_restart_finds_everything)
{
	struct kvt_prefix_stats st = KVT_INIT(st);
	struct prefix_rig r;

	keep_dir_make();
	for (int round = 0; round < 3; round++) {
		r = rig_make(kept());
		ck_assert(!kvt_prefix_stats(r.cache, &st));
		ck_assert_uint_eq(st.recovered, round ? all_chunks() : 0);
		if (round)
			ck_assert_uint_eq(serve_talks(&r), all_talks());
		else
			compute_talks(&r);
		ck_assert(!kvt_cache_flush(r.cache));
		ck_assert(!kvt_prefix_stats(r.cache, &st));
		ck_assert_uint_eq(st.untrue, 0);
		ck_assert_uint_eq(st.saved, round ? 0 : all_chunks());
		rig_free(&r);
	}
	keep_dir_remove();
}
END_TEST

static void refused(struct rig_config c, int err, const char *name)
{
	struct prefix_rig r;

	ck_assert_int_eq(rig_open(&r, c), err);
	ck_assert_msg(strstr(kvt_last_error(), name), "\"%s\" names no %s", kvt_last_error(), name);
}

/* Where standard streams are closed, what the process prints does not go into the directory's files. */
START_TEST(no_standard_stream)
{
	bool regular = false;
	struct prefix_rig r;
	struct kvt_dir *d;
	struct stat st;
	int was[3], ret;

	keep_dir_make();
	r = rig_make(kept());
	rig_free(&r);
	for (int fd = 0; fd < 3; fd++) {
		was[fd] = fcntl(fd, F_DUPFD_CLOEXEC, 3);
		close(fd);
	}
	ret = kvt_dir_open(keep_dir, NULL, &d);
	for (int fd = 0; fd < 3; fd++)
		regular |= !fstat(fd, &st) && S_ISREG(st.st_mode);
	if (!ret)
		kvt_dir_close(d);
	for (int fd = 0; fd < 3; fd++) {
		dup2(was[fd], fd);
		close(was[fd]);
	}
	ck_assert_msg(!ret, "%s", kvt_last_error());
	ck_assert(!regular);
	keep_dir_remove();
}
END_TEST

START_TEST(refuses_by_name)
{
	struct prefix_rig r;
	struct rig_config c;
	uint32_t version = 2, served;
	uint64_t word;
	int fd;

	keep_dir_make();
	r = rig_make(kept());
	compute_talks(&r);
	/* a second cache of this process, a second process */
	refused(kept(), -EBUSY, "this process");
	if (!fork()) { /* one that inherits no list of what is open */
		execl("/proc/self/exe", "prefix_keep", "open", keep_dir, NULL);
		_exit(99);
	}
	wait(&fd);
	ck_assert_int_eq(WEXITSTATUS(fd), 0);
	rig_free(&r);

	c = kept(), c.model = 1;
	refused(c, -EMEDIUMTYPE, "model");
	c = kept(), c.rotation = 7;
	refused(c, -EMEDIUMTYPE, "rotation");
	c = kept(), c.codec = KVT_BF16;
	refused(c, -EMEDIUMTYPE, "codec");

	/* what is damaged is not written over: it may be another version's */
	fd = open(keep_file("superblock"), O_RDWR);
	ck_assert(pread(fd, &word, 8, 40) == 8);
	word ^= 1ull << 17;
	ck_assert(pwrite(fd, &word, 8, 40) == 8);
	refused(kept(), -EUCLEAN, "checksum");
	word ^= 1ull << 17;
	ck_assert(pwrite(fd, &word, 8, 40) == 8);
	ck_assert(pwrite(fd, &version, 4, 8) == 4);
	refused(kept(), -EMEDIUMTYPE, "version 2");
	version = KVT_DIR_VERSION;
	ck_assert(pwrite(fd, &version, 4, 8) == 4);
	close(fd);
	r = rig_make(kept());
	served = serve_talks(&r);
	ck_assert_uint_eq(served, all_talks());
	rig_free(&r);
	for (int bytes = 0; bytes < 88; bytes += 29) {
		ck_assert(!truncate(keep_file("superblock"), bytes));
		refused(kept(), -EUCLEAN, "superblock");
	}
	keep_dir_remove();
}
END_TEST

static void flip(const char *name, uint64_t at)
{
	int fd = open(keep_file(name), O_RDWR);
	uint8_t byte;

	ck_assert(pread(fd, &byte, 1, (off_t)at) == 1);
	byte ^= 0x10;
	ck_assert(pwrite(fd, &byte, 1, (off_t)at) == 1);
	close(fd);
}

/* A byte anywhere in log or slots, a log cut anywhere: what is served is right, and what was served wrong is computed again. */
START_TEST(damage_costs_what_it_hits)
{
	struct kvt_prefix_stats st = KVT_INIT(st);
	struct prefix_rig r;
	struct stat log, slots;
	uint64_t random = 99;
	uint32_t served, worst = UINT32_MAX, rounds = test_rounds(40, 6, 3);

	keep_dir_make();
	r = rig_make(kept());
	compute_talks(&r);
	rig_free(&r);
	for (uint32_t i = 0; i < rounds; i++) {
		ck_assert(!stat(keep_file("log"), &log) && !stat(keep_file("slots"), &slots));
		ck_assert_int_gt(log.st_size, 0);
		if (i == 2)
			ck_assert(!truncate(keep_file("slots"), 0));
		else if (i % 4 == 3)
			ck_assert(!truncate(keep_file("log"), (off_t)(model_random(&random) % (uint64_t)log.st_size)));
		else if (i % 4 == 1)
			flip("log", model_random(&random) % (uint64_t)log.st_size);
		else
			flip("slots", model_random(&random) % (120 * 4096));
		r = rig_make(kept());
		served = serve_talks(&r);
		if (i % 4 != 3 && i != 2)
			worst = served < worst ? served : worst;
		compute_talks(&r);
		ck_assert_uint_eq(serve_talks(&r), all_talks());
		ck_assert(!kvt_prefix_stats(r.cache, &st));
		rig_free(&r);
	}
	/* one byte costs at most the chunks behind it in one conversation, or in the log those of one root */
	ck_assert_msg(worst > all_talks() / 2, "%u of %u tokens were served", worst, all_talks());
	keep_dir_remove();
}
END_TEST

/* Read while it is written, and written while the slots change hands: a small directory and much to keep. */
START_TEST(a_small_directory_keeps_its_size)
{
	struct rig_config c = kept();
	struct kvt_prefix_stats st = KVT_INIT(st);
	struct prefix_rig r;
	uint32_t tokens[128];
	struct stat log, slots;

	keep_dir_make();
	c.disk_bytes = 600 << 10;
	for (int round = 0; round < 3; round++) {
		r = rig_make(c);
		for (uint32_t i = 0; i < 150; i++) {
			rig_prompt(tokens, 128, i, 0);
			rig_compute(&r, 0, tokens, 128);
			rig_serve_some(&r, 0, tokens, 128);
		}
		ck_assert(!kvt_prefix_stats(r.cache, &st));
		ck_assert_uint_gt(st.dropped, 100);
		rig_free(&r);
		ck_assert(!stat(keep_file("log"), &log) && !stat(keep_file("slots"), &slots));
		ck_assert_uint_le((uint64_t)log.st_size + (uint64_t)slots.st_size + 4096, c.disk_bytes);
	}
	r = rig_make(c);
	ck_assert(!kvt_prefix_stats(r.cache, &st));
	ck_assert_uint_gt(st.recovered, 10);
	rig_free(&r);
	/* and with less: what lies behind the end is not known any more */
	c.disk_bytes = 300 << 10;
	r = rig_make(c);
	for (uint32_t i = 0; i < 150; i++) {
		rig_prompt(tokens, 128, i, 0);
		rig_serve_some(&r, 0, tokens, 128);
	}
	rig_free(&r);
	keep_dir_remove();
}
END_TEST

/* Every second chunk goes, and a long prompt takes their slots, which are not side by side: it comes back whole. */
START_TEST(scattered_slots_hold_a_prompt)
{
	struct rig_config c = kept();
	struct prefix_rig r;
	struct kvt_prefix_match m;
	uint32_t tokens[512], jumps = 0, slot, last = KVT_NO_BLOCK;
	const uint32_t *table;
	struct kvt_seq *seq;

	keep_dir_make();
	c.policy = KVT_POLICY_LRU;
	r = rig_make(c);
	for (uint32_t i = 0; i < 20; i++) {
		rig_prompt(tokens, 64, i, 0);
		rig_compute(&r, 0, tokens, 64);
		ck_assert(!kvt_cache_flush(r.cache));
	}
	for (uint32_t i = 1; i < 20; i += 2) {
		rig_prompt(tokens, 64, i, 0);
		rig_serve(&r, 0, tokens, 64, 64);
	}
	ck_assert_int_eq(kvt_prefix_evict(r.cache, KVT_TIER_DISK, 10), 10);
	rig_prompt(tokens, 512, 100, 0);
	rig_compute(&r, 0, tokens, 512);
	rig_free(&r);
	r = rig_make(c);
	rig_serve(&r, 0, tokens, 512, 512);
	ck_assert(!kvt_prefix_match(r.cache, &r.roots[0], tokens, 512, &m));
	ck_assert(!kvt_seq_create(r.cache, &seq));
	ck_assert_int_eq(kvt_prefix_attach(r.cache, &m, 512, seq), 512);
	kvt_prefix_release(r.cache, &m);
	table = kvt_seq_table(seq, &r.cache->planes[0]);
	for (uint32_t i = 0; i < 8; i++) {
		slot = kvt_store_slot(r.cache->store, table[i]);
		ck_assert_uint_lt(slot, 80);
		jumps += last != KVT_NO_BLOCK && slot - last != 4 && last - slot != 4;
		last = slot;
	}
	ck_assert_uint_gt(jumps, 3); /* or this tests nothing */
	kvt_seq_free(seq);
	for (uint32_t i = 1; i < 20; i += 2) {
		rig_prompt(tokens, 64, i, 0);
		rig_serve(&r, 0, tokens, 64, 64);
	}
	rig_free(&r);
	keep_dir_remove();
}
END_TEST

/* Threads that insert, evict and find, while the keeper writes; then all of it again from disk. */
START_TEST(a_crowd_is_kept)
{
	struct rig_config c = kept();
	struct prefix_rig r;

	keep_dir_make();
	c.small = true;
	c.chunks = 60;
	c.disk_bytes = 1200 << 10;
	for (int round = 0; round < 2; round++) {
		r = rig_make(c);
		rig_crowd(&r, 6, test_rounds(60, 10, 10));
		rig_free(&r);
	}
	keep_dir_remove();
}
END_TEST

/* The process may write no more than so much to a file: nothing ends, what runs goes on, and less is kept. */
START_TEST(a_limit_on_files_is_no_end)
{
	struct kvt_prefix_stats st = KVT_INIT(st);
	struct rlimit limit = { 100 * 4096, RLIM_INFINITY };
	struct prefix_rig r;

	keep_dir_make();
	r = rig_make(kept());
	limit.rlim_cur = 20000; /* the log's, and of the slots all but the first */
	ck_assert(!setrlimit(RLIMIT_FSIZE, &limit));
	compute_talks(&r);
	compute_talks(&r);
	ck_assert_uint_gt(serve_talks(&r), all_talks() / 2);
	rig_free(&r);
	limit.rlim_cur = RLIM_INFINITY;
	ck_assert(!setrlimit(RLIMIT_FSIZE, &limit));
	r = rig_make(kept());
	ck_assert(!kvt_prefix_stats(r.cache, &st));
	ck_assert_uint_lt(st.recovered, all_chunks() / 2);
	serve_talks(&r);
	compute_talks(&r);
	ck_assert_uint_eq(serve_talks(&r), all_talks());
	rig_free(&r);
	keep_dir_remove();
}
END_TEST

/* ---- kill -9 ---- */

/*
 * The one that is killed is a program of its own: check's cases tell their
 * parent where they are through one file, and a child that wrote there, too, would break it off in a word.
 */
static uint64_t talk_seed;
static volatile uint32_t *computed;

START_TEST(talk_forever)
{
	struct prefix_rig r = rig_make(kept());
	uint32_t tokens[260], talk, n;

	for (;;) {
		talk = (uint32_t)(model_random(&talk_seed) % 24);
		n = 64 * (1 + talk % 4) - 1 + talk % 3;
		rig_prompt(tokens, n, talk, model_random(&talk_seed) % 3 ? 0 : n / 2);
		rig_compute(&r, talk % RIG_ROOTS, tokens, n);
		++*computed;
		if (model_random(&talk_seed) % 8 == 0)
			kvt_prefix_evict(r.cache, KVT_TIER_DISK, 3);
	}
}
END_TEST

/* The other program's: @fd is what both count in. */
static int talk(const char *path, const char *seed, const char *fd)
{
	Suite *s = suite_create("talk");
	TCase *t = tcase_create("talk");
	SRunner *r = srunner_create(s);

	unsetenv("CK_RUN_CASE"); /* of the tests, not of this one */
	unsetenv("CK_RUN_SUITE");
	snprintf(keep_dir, sizeof(keep_dir), "%s", path);
	talk_seed = strtoull(seed, NULL, 10);
	computed = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, atoi(fd), 0);
	if (computed == MAP_FAILED)
		return 1;
	tcase_add_test(t, talk_forever);
	suite_add_tcase(s, t);
	srunner_set_fork_status(r, CK_NOFORK);
	srunner_run_all(r, CK_SILENT);
	srunner_free(r);
	return 1;
}

static pid_t start_talk(uint32_t seed, int fd)
{
	char number[16], counter[16];
	pid_t child = fork();

	if (child)
		return child;
	snprintf(number, sizeof(number), "%u", seed);
	snprintf(counter, sizeof(counter), "%d", fd);
	execl("/proc/self/exe", "prefix_keep", "talk", keep_dir, number, counter, NULL);
	_exit(99);
}

START_TEST(kill_9_leaves_what_was_written)
{
	uint32_t rounds = getenv("KVT_TEST_KILLS") ? (uint32_t)atoi(getenv("KVT_TEST_KILLS")) :
			  test_rounds(100, 10, 5);
	int fd = memfd_create("computed", 0);
	uint64_t random = 31337, recovered = 0, untrue = 0, served = 0, asked = 0;
	struct kvt_prefix_stats st = KVT_INIT(st);
	struct prefix_rig r;
	uint32_t tokens[260], n;

	keep_dir_make();
	ck_assert(fd >= 0 && !ftruncate(fd, 4096));
	computed = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	ck_assert(computed != MAP_FAILED);
	for (uint32_t i = 0; i < rounds; i++) {
		pid_t child;

		*computed = 0;
		child = start_talk(i, fd);
		/* by its own progress, so that a slow machine kills at the same kind of points: some before the first */
		n = (uint32_t)(model_random(&random) % 24);
		while (*computed < n) {
			ck_assert_msg(!waitpid(child, NULL, WNOHANG), "the child ended by itself");
			usleep(100);
		}
		usleep((useconds_t)(model_random(&random) % 3000));
		ck_assert(!kill(child, SIGKILL));
		ck_assert(waitpid(child, NULL, 0) == child);
		r = rig_make(kept());
		ck_assert(!kvt_prefix_stats(r.cache, &st));
		recovered += st.recovered;
		for (uint32_t talk = 0; talk < 24; talk++) {
			n = 64 * (1 + talk % 4) - 1 + talk % 3;
			rig_prompt(tokens, n, talk, 0);
			served += rig_serve_some(&r, talk % RIG_ROOTS, tokens, n);
			asked += n;
		}
		ck_assert(!kvt_prefix_stats(r.cache, &st));
		untrue += st.untrue;
		rig_free(&r);
	}
	printf("kill -9 at %u points: %llu chunks found, %llu of them not what was written; %llu of %llu tokens served, all right\n",
	       rounds, (unsigned long long)recovered, (unsigned long long)untrue, (unsigned long long)served,
	       (unsigned long long)asked);
	ck_assert_uint_gt(recovered, rounds * 3);
	ck_assert_uint_lt(untrue * 10, recovered + 10);
	keep_dir_remove();
}
END_TEST

/* ---- power cut ---- */

#define VERSIONS 6

struct image {
	uint8_t *data[VERSIONS];
	uint64_t bytes[VERSIONS];
};

static void load(struct image *img, int version, const char *name)
{
	int fd = open(keep_file(name), O_RDONLY);
	struct stat st;

	ck_assert(fd >= 0 && !fstat(fd, &st));
	img->bytes[version] = (uint64_t)st.st_size;
	img->data[version] = calloc(1, (size_t)st.st_size + 4096);
	ck_assert(pread(fd, img->data[version], (size_t)st.st_size, 0) == st.st_size);
	close(fd);
}

/*
 * What a disk may hold after a power cut: each 4 KiB of each file is as it was at some time since it was
 * last synced, independently of all others; so is each file's length.
 */
static uint64_t cut_power(const struct image *img, const char *name, uint64_t *random, bool lose_much)
{
	uint64_t newest = img->bytes[VERSIONS - 1], changed = 0, bytes;
	int fd = open(keep_file(name), O_RDWR | O_TRUNC), v;
	static const uint8_t zeros[4096];

	bytes = img->bytes[model_random(random) % 4 ? VERSIONS - 1 : (int)(model_random(random) % VERSIONS)];
	for (uint64_t at = 0; at < bytes; at += 4096) {
		const uint8_t *from = zeros;

		v = model_random(random) % (lose_much ? 2 : 12) ? VERSIONS - 1 : (int)(model_random(random) % VERSIONS);
		if (at < img->bytes[v])
			from = img->data[v] + at;
		changed += at < newest && memcmp(from, img->data[VERSIONS - 1] + at, 4096);
		ck_assert(pwrite(fd, from, bytes - at < 4096 ? bytes - at : 4096, (off_t)at) > 0);
	}
	close(fd);
	return changed;
}

START_TEST(a_power_cut_costs_what_was_lost)
{
	struct image slots = { 0 }, log = { 0 };
	struct kvt_prefix_stats st = KVT_INIT(st);
	uint64_t random = 4711 + (uint64_t)_i, recovered = 0, untrue = 0, served = 0, asked = 0, lost = 0, chunks = 0;
	uint32_t rounds = test_rounds(60, 5, 2), tokens[260], n;
	struct prefix_rig r;

	keep_dir_make();
	r = rig_make(kept());
	/* six moments of one run, with slots given away and taken between them */
	for (int v = 0; v < VERSIONS; v++) {
		for (uint32_t talk = 0; talk < 8; talk++) {
			n = 64 * (1 + talk % 4) - 1 + talk % 3;
			rig_prompt(tokens, n, (uint32_t)v * 5 + talk, 0);
			rig_compute(&r, talk % RIG_ROOTS, tokens, n);
		}
		kvt_prefix_evict(r.cache, KVT_TIER_DISK, 6);
		ck_assert(!kvt_cache_flush(r.cache));
		load(&slots, v, "slots");
		load(&log, v, "log");
	}
	ck_assert(!kvt_prefix_stats(r.cache, &st));
	chunks = st.chunks - st.chunks_free;
	rig_free(&r);
	for (uint32_t i = 0; i < rounds; i++) {
		lost += cut_power(&slots, "slots", &random, _i) + cut_power(&log, "log", &random, _i);
		r = rig_make(kept());
		ck_assert(!kvt_prefix_stats(r.cache, &st));
		recovered += st.recovered;
		for (uint32_t v = 0; v < VERSIONS; v++)
			for (uint32_t talk = 0; talk < 8; talk++) {
				n = 64 * (1 + talk % 4) - 1 + talk % 3;
				rig_prompt(tokens, n, v * 5 + talk, 0);
				served += rig_serve_some(&r, talk % RIG_ROOTS, tokens, n);
				asked += n;
			}
		ck_assert(!kvt_prefix_stats(r.cache, &st));
		untrue += st.untrue;
		rig_free(&r);
	}
	printf("power cut x %u: %llu 4 KiB writes undone; of %llu chunks each time %.1f were found, %.1f of them not what was written; %llu of %llu tokens served, all right\n",
	       rounds, (unsigned long long)lost, (unsigned long long)chunks, (double)recovered / rounds,
	       (double)untrue / rounds, (unsigned long long)served, (unsigned long long)asked);
	ck_assert_uint_gt(lost, rounds);
	if (!_i) /* a twelfth of the writes is lost: most chunks are served */
		ck_assert_uint_gt((recovered - untrue) * 2, chunks * rounds);
	for (int v = 0; v < VERSIONS; v++) {
		free(slots.data[v]);
		free(log.data[v]);
	}
	keep_dir_remove();
}
END_TEST

/* Records that cannot be reached, and that nobody told to be gone: they do not fill the log for good. */
START_TEST(what_nobody_knows_leaves_the_log)
{
	struct kvt_log_head h = { .type = KVT_LOG_CHUNK, .root = 1, .n_tokens = 64 };
	struct kvt_prefix_stats st = KVT_INIT(st);
	uint32_t tokens[64] = { 0 };
	static uint8_t buf[1024];
	struct prefix_rig r;
	struct kvt_dir *d;
	uint64_t full;

	keep_dir_make();
	r = rig_make(kept());
	rig_free(&r);
	ck_assert(!kvt_dir_open(keep_dir, NULL, &d));
	for (h.id = 2; h.id < 6000; h.id++) {
		kvt_log_make(buf, &h, d->super->dir, tokens, NULL);
		ck_assert(!kvt_dir_append(d, buf, kvt_log_bytes(h.type, 64, 0)));
	}
	full = d->log_bytes;
	kvt_dir_close(d);
	for (int round = 0; round < 2; round++) {
		r = rig_make(kept());
		ck_assert(!kvt_prefix_stats(r.cache, &st));
		ck_assert_uint_lt(st.log_bytes, full / 10);
		ck_assert_uint_eq(st.recovered, round ? all_chunks() : 0);
		compute_talks(&r);
		ck_assert_uint_eq(serve_talks(&r), all_talks());
		rig_free(&r);
	}
	keep_dir_remove();
}
END_TEST

/* ---- the time it takes ---- */

START_TEST(recovery_is_one_scan)
{
	uint32_t chunks = test_rounds(100000, 2000, 500), tokens[64];
	struct rig_config c = kept();
	struct kvt_prefix_stats st = KVT_INIT(st);
	struct kvt_block_entry e[4] = { 0 };
	struct kvt_log_head h = { .type = KVT_LOG_ROOT, .id = 1, .n_tokens = sizeof(struct kvt_root_key) };
	struct kvt_root_key key = { 0 };
	struct timespec a, b;
	struct kvt_dir *d;
	struct prefix_rig r;
	static uint8_t buf[4096];
	double seconds;

	keep_dir_make();
	c.chunks = chunks + 10;
	c.disk_bytes = (uint64_t)chunks * 6 * 4096 * 2;
	r = rig_make(c);
	rig_free(&r);
	ck_assert(!kvt_dir_open(keep_dir, NULL, &d));
	kvt_log_make(buf, &h, d->super->dir, &key, NULL);
	ck_assert(!kvt_dir_append(d, buf, kvt_log_bytes(h.type, h.n_tokens, 0)));
	h = (struct kvt_log_head){ .type = KVT_LOG_CHUNK, .root = 1, .n_tokens = 64, .n_blocks = 4 };
	for (uint32_t i = 0; i < chunks; i++) {
		h.id = i + 2;
		h.parent = i % 100 ? i + 1 : 1;
		rig_prompt(tokens, 64, i, 0);
		for (uint32_t k = 0; k < 4; k++)
			e[k] = (struct kvt_block_entry){ .id = { .chunk = h.id, .plane = k < 2 ? k : 2,
								 .rows = k < 2 ? 64 : 32 },
							 .slot = i * 4 + k, .index = k };
		kvt_log_make(buf, &h, d->super->dir, tokens, e);
		ck_assert(!kvt_dir_append(d, buf, kvt_log_bytes(h.type, 64, 4)));
	}
	kvt_dir_close(d);
	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &a); /* others may run meanwhile */
	r = rig_make(c);
	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &b);
	seconds = (double)(b.tv_sec - a.tv_sec) + (double)(b.tv_nsec - a.tv_nsec) * 1e-9;
	ck_assert(!kvt_prefix_stats(r.cache, &st));
	ck_assert_uint_eq(st.recovered, chunks);
	printf("recovery of %u chunks: %.3f s, a log of %.1f MiB\n", chunks, seconds, (double)st.log_bytes / (1 << 20));
	if (!test_sanitized())
		ck_assert_msg(seconds < 1, "%.2f s", seconds);
	rig_free(&r);
	keep_dir_remove();
}
END_TEST

/* ---- all of it at random ---- */

START_TEST(random_work_and_reopening)
{
	uint64_t steps = getenv("KVT_TEST_STEPS") ? strtoull(getenv("KVT_TEST_STEPS"), NULL, 0) :
			 test_rounds(2500, 300, 150);
	uint64_t random = 555 + (uint64_t)_i;
	struct kvt_prefix_match held[4];
	uint32_t held_len[4], n_held = 0, tokens[260], talk, n;
	struct rig_config c = kept();
	struct prefix_rig r;
	struct kvt_seq *seq;

	keep_dir_make();
	c.chunks = 40;
	c.disk_bytes = 900 << 10;
	if (_i == 1)
		c.io = KVT_IO_THREADS;
	r = rig_make(c);
	for (uint64_t i = 0; i < steps; i++) {
		talk = (uint32_t)(model_random(&random) % 16);
		n = 1 + (uint32_t)(model_random(&random) % 256);
		rig_prompt(tokens, n, talk, model_random(&random) % 2 ? 0 : 1 + (uint32_t)(model_random(&random) % 256));
		switch (model_random(&random) % 10) {
		case 0: case 1: case 2: case 3:
			rig_compute(&r, talk % RIG_ROOTS, tokens, n);
			break;
		case 4: case 5:
			rig_serve_some(&r, talk % RIG_ROOTS, tokens, n);
			break;
		case 6: /* a match that is held while others come and go, then read */
			if (n_held < 4) {
				ck_assert(!kvt_prefix_match(r.cache, &r.roots[0], tokens, n, &held[n_held]));
				held_len[n_held++] = talk;
				break;
			}
			n_held--;
			rig_prompt(tokens, 256, held_len[n_held], 0);
			ck_assert(!kvt_seq_create(r.cache, &seq));
			ck_assert_int_ge(kvt_prefix_attach(r.cache, &held[n_held], 256, seq), 0);
			for (uint32_t t = 0; t < kvt_seq_len(seq); t++)
				ck_assert(!kvt_seq_tokens(seq, t, 1, &tokens[t]));
			rig_expect(0, seq, tokens, kvt_seq_len(seq));
			kvt_prefix_release(r.cache, &held[n_held]);
			kvt_seq_free(seq);
			break;
		case 7:
			kvt_prefix_evict(r.cache, KVT_TIER_RAM, 1 + (uint32_t)(model_random(&random) % 8));
			break;
		case 8:
			kvt_prefix_evict(r.cache, KVT_TIER_DISK, 1 + (uint32_t)(model_random(&random) % 3));
			break;
		default:
			if (model_random(&random) % 8)
				break;
			while (n_held)
				kvt_prefix_release(r.cache, &held[--n_held]);
			rig_free(&r);
			r = rig_make(c);
		}
		ck_assert_msg(!kvt_prefix_check(r.cache), "step %llu: %s", (unsigned long long)i, kvt_last_error());
	}
	while (n_held)
		kvt_prefix_release(r.cache, &held[--n_held]);
	rig_free(&r);
	keep_dir_remove();
}
END_TEST

/* Of another process: is it refused, and told by whom? */
static int open_elsewhere(const char *path)
{
	struct prefix_rig r;

	snprintf(keep_dir, sizeof(keep_dir), "%s", path);
	return rig_open(&r, kept()) == -EBUSY && strstr(kvt_last_error(), "process") ? 0 : 1;
}

static int run_tests(void)
{
	Suite *s = suite_create("prefix_keep");
	TCase *t = tcase_create("keep"), *k = tcase_create("kill"); /* CK_RUN_CASE=kill KVT_TEST_KILLS=1000 */
	SRunner *r = srunner_create(s);
	int failed;

	tcase_set_timeout(t, 250);
	tcase_add_test(t, a_restart_finds_everything);
	tcase_add_test(t, no_standard_stream);
	tcase_add_test(t, refuses_by_name);
	tcase_add_test(t, damage_costs_what_it_hits);
	tcase_add_test(t, a_small_directory_keeps_its_size);
	tcase_add_test(t, scattered_slots_hold_a_prompt);
	tcase_add_test(t, a_crowd_is_kept);
	tcase_add_test(t, a_limit_on_files_is_no_end);
	tcase_set_timeout(k, getenv("KVT_TEST_KILLS") ? 3000 : 250);
	tcase_add_test(k, kill_9_leaves_what_was_written);
	tcase_add_loop_test(t, a_power_cut_costs_what_was_lost, 0, 2);
	tcase_add_test(t, what_nobody_knows_leaves_the_log);
	tcase_add_test(t, recovery_is_one_scan);
	tcase_add_loop_test(t, random_work_and_reopening, 0, 2);
	suite_add_tcase(s, t);
	suite_add_tcase(s, k);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}

int main(int argc, char **argv)
{
	if (argc == 5)
		return talk(argv[2], argv[3], argv[4]);
	return argc == 3 ? open_elsewhere(argv[2]) : run_tests();
}
