// SPDX-License-Identifier: MIT
/*
 * Reclaim for real: clean frames go under pressure, oldest first, and nothing else does; user space finds out by the
 * word, and fills the frame again.
 */
#include <liburing.h>
#include <pthread.h>
#include <stdatomic.h>

#include "vt.h"

#define FRAME 65536u

static void write_file(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY);

	CHECK(fd >= 0);
	CHECK(write(fd, text, strlen(text)) > 0);
	close(fd);
}

static void cgroup_make(const char *max)
{
	if (mkdir("/cgroup/vt", 0755) && errno != EEXIST)
		SKIP("no memory cgroups (%s)", strerror(errno));
	write_file("/cgroup/vt/memory.max", max);
	write_file("/cgroup/vt/cgroup.procs", "0");
}

static long long cgroup_oom_kills(void)
{
	char text[512] = "", *at;
	int fd = open("/cgroup/vt/memory.events", O_RDONLY);

	CHECK(fd >= 0 && read(fd, text, sizeof(text) - 1) > 0);
	close(fd);
	at = strstr(text, "oom_kill ");
	CHECK(at);
	return atoll(at + 9);
}

static void cgroup_leave(void)
{
	write_file("/cgroup/cgroup.procs", "0");
	usleep(200000);
	rmdir("/cgroup/vt");
}

/* Give shrinkers a turn. */
static void drop_caches(void)
{
	write_file("/proc/sys/vm/drop_caches", "2");
}

/* Anonymous memory, touched. */
static uint8_t *hog(size_t bytes)
{
	uint8_t *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	CHECK(p != MAP_FAILED);
	for (size_t i = 0; i < bytes; i += 4096)
		p[i] = 1;
	return p;
}

/* Old clean frames go, young clean ones and held ones stay, all under a cgroup's limit. */
CASE(oldest_first_in_a_cgroup)
{
	enum { N = 512 };
	uint32_t oldest_kept = UINT32_MAX, youngest_taken = 0, taken = 0;
	_Atomic uint64_t *words;
	uint8_t *p, *anon;
	/* On one node: reclaim goes by node, and knows the oldest of each. */
	struct kvtier_pool_create c = { .size = sizeof(c), .flags = KVTIER_POOL_RECLAIM | KVTIER_POOL_STRICT_NODE,
					.frame_bytes = FRAME, .n_frames = N, .node = 0 };
	int pool;

	cgroup_make("50331648"); /* 48 MiB: 32 of frames, and little else */
	CHECK(!ioctl(vt_device(), KVTIER_IOC_POOL_CREATE, &c));
	pool = c.fd;
	p = vt_map(pool, FRAME, N);
	words = vt_words(pool, N);
	for (uint32_t i = 0; i < N; i++)
		vt_fill(p + (size_t)i * FRAME, FRAME, i);
	/* Every fourth is held. Stamps in an order that indices do not have, and across the clock's wrap. */
	for (uint32_t i = 0; i < N; i++)
		if (i % 4)
			words[i] = KVTIER_WORD(KVTIER_WORD_CLEAN, 0, UINT32_MAX - 100 + i * 7 % N);
	anon = hog(28 * MIB);
	CHECK_EQ(cgroup_oom_kills(), 0);
	for (uint32_t i = 0; i < N; i++) {
		uint64_t word = words[i];
		uint32_t age = i * 7 % N;

		if (i % 4 == 0) {
			CHECK_EQ(word, KVTIER_WORD(KVTIER_WORD_HELD, 0, 0));
			CHECK(vt_filled(p + (size_t)i * FRAME, FRAME, i));
		} else if (KVTIER_WORD_STATE(word) == KVTIER_WORD_CLEAN) {
			CHECK(vt_filled(p + (size_t)i * FRAME, FRAME, i));
			oldest_kept = age < oldest_kept ? age : oldest_kept;
		} else {
			CHECK_EQ(word, KVTIER_WORD(KVTIER_WORD_FREE, 1, 0));
			youngest_taken = age > youngest_taken ? age : youngest_taken;
			taken++;
		}
	}
	printf("  %u taken, the youngest of age %u; the oldest kept is of age %u\n", taken, youngest_taken, oldest_kept);
	CHECK(taken >= 12 * MIB / FRAME);
	/* Not all of them, for want of a half. */
	CHECK(oldest_kept < N);
	/* Two may reclaim at once, each with a batch of the oldest that it saw. */
	CHECK(youngest_taken < oldest_kept + 64);
	CHECK_EQ(vt_stat(pool).taken, taken);
	CHECK_EQ(vt_stat(pool).present, N - taken);
	CHECK(vt_sysfs("taken_frames") >= taken);

	/* Room again: what was taken can be filled again, at the same address, in the next generation. */
	munmap(anon, 28 * MIB);
	for (uint32_t i = 0; i < N; i++) {
		if (KVTIER_WORD_STATE(words[i]) != KVTIER_WORD_FREE)
			continue;
		CHECK_EQ(vt_range(pool, KVTIER_IOC_POPULATE, i, 1), 1);
		CHECK_EQ(words[i], KVTIER_WORD(KVTIER_WORD_HELD, 1, 0));
		for (uint32_t j = 0; j < FRAME; j += 512)
			CHECK(!p[(size_t)i * FRAME + j]);
		vt_fill(p + (size_t)i * FRAME, FRAME, i);
	}
	CHECK_EQ(vt_stat(pool).present, N);
	for (uint32_t i = 0; i < N; i++)
		CHECK(vt_filled(p + (size_t)i * FRAME, FRAME, i));
	cgroup_leave();
}

/* A populate that needs memory may take the same pool's clean frames. */
CASE(a_pool_feeds_itself)
{
	enum { N = 1024 };
	_Atomic uint64_t *words;
	int pool;

	cgroup_make("33554432"); /* half of what all frames need */
	pool = vt_pool(KVTIER_POOL_RECLAIM | KVTIER_POOL_LAZY, FRAME, N);
	words = vt_words(pool, N);
	for (uint32_t i = 0; i < N; i++) {
		CHECK_EQ(vt_range(pool, KVTIER_IOC_POPULATE, i, 1), 1);
		words[i] = KVTIER_WORD(KVTIER_WORD_CLEAN, KVTIER_WORD_GENERATION(words[i]), i);
	}
	CHECK(vt_stat(pool).taken >= N / 2);
	CHECK_EQ(cgroup_oom_kills(), 0);
	/* All held: now it is told that there is no memory. */
	for (uint32_t i = 0; i < N; i++) {
		uint64_t word = words[i];

		if (KVTIER_WORD_STATE(word) == KVTIER_WORD_CLEAN)
			atomic_compare_exchange_strong(&words[i], &word,
						       KVTIER_WORD(KVTIER_WORD_HELD,
								   KVTIER_WORD_GENERATION(word), 0));
	}
	CHECK(vt_range(pool, KVTIER_IOC_POPULATE, 0, N) < N / 2);
	CHECK_ERR(vt_range(pool, KVTIER_IOC_POPULATE, 0, N), ENOMEM);
	CHECK_EQ(cgroup_oom_kills(), 0);
	cgroup_leave();
}

/* Not marked for reclaim: CLEAN means nothing. Pinned: taking would give nothing. */
CASE(what_is_not_taken)
{
	int plain = vt_pool(0, FRAME, 16), pool = vt_pool(KVTIER_POOL_RECLAIM, FRAME, 16);
	_Atomic uint64_t *a = vt_words(plain, 16), *b = vt_words(pool, 16);
	uint8_t *p = vt_map(pool, FRAME, 16);
	struct iovec iov = { .iov_base = p + FRAME, .iov_len = FRAME };
	struct io_uring ring;
	int pinned;

	CHECK(!io_uring_queue_init(1, &ring, 0));
	/* Before 6.5 it registers no mapping of a file: then nothing is pinned here. */
	pinned = !io_uring_register_buffers(&ring, &iov, 1);
	CHECK_EQ(pinned, vt_kernel() >= 605);
	for (int i = 0; i < 16; i++)
		a[i] = b[i] = KVTIER_WORD(i ? KVTIER_WORD_CLEAN : KVTIER_WORD_HELD, 0, i);
	/* Each turn takes a part. */
	for (int i = 0; i < 100; i++)
		drop_caches();
	CHECK_EQ(vt_stat(plain).taken, 0);
	CHECK_EQ(vt_stat(pool).taken, 15 - pinned);
	CHECK_EQ(KVTIER_WORD_STATE(b[1]), pinned ? KVTIER_WORD_CLEAN : KVTIER_WORD_FREE);
	CHECK_EQ(KVTIER_WORD_STATE(b[0]), KVTIER_WORD_HELD);
	/* What was taken is out of the mapping. */
	CHECK(vt_sigbus(p + 3 * FRAME));
}

/*
 * The race that matters: threads take frames by compare-and-swap, check that the bytes are the frame's, and let them go,
 * while memory is short and reclaim takes them. A frame that is held never changes; a lost one is filled again.
 */
enum { RACE_FRAMES = 256, RACE_THREADS = 4 };
static _Atomic uint64_t *race_words;
static uint8_t *race_base;
static int race_pool;
static _Atomic bool race_stop;
static _Atomic unsigned long race_hits, race_refills;

static void *race_user(void *arg)
{
	unsigned int seed = (uintptr_t)arg;

	while (!race_stop) {
		uint32_t i = rand_r(&seed) % RACE_FRAMES;
		uint64_t word = race_words[i];
		uint8_t *p = race_base + (size_t)i * FRAME;

		if (KVTIER_WORD_STATE(word) == KVTIER_WORD_CLEAN) {
			if (!atomic_compare_exchange_strong(&race_words[i], &word,
							    KVTIER_WORD(KVTIER_WORD_HELD, KVTIER_WORD_GENERATION(word), 0)))
				continue;
			CHECK(vt_filled(p, FRAME, i));
			race_hits++;
		} else if (KVTIER_WORD_STATE(word) == KVTIER_WORD_FREE) {
			if (vt_range(race_pool, KVTIER_IOC_POPULATE, i, 1) != 1)
				continue;
			vt_fill(p, FRAME, i);
			race_refills++;
		} else {
			continue;
		}
		word = race_words[i];
		CHECK_EQ(KVTIER_WORD_STATE(word), KVTIER_WORD_HELD);
		race_words[i] = KVTIER_WORD(KVTIER_WORD_CLEAN, KVTIER_WORD_GENERATION(word), rand_r(&seed) % 1000);
	}
	return NULL;
}

static void *race_squeeze(void *arg)
{
	(void)arg;
	while (!race_stop) {
		drop_caches();
		usleep(2000);
	}
	return NULL;
}

CASE(held_or_taken_never_both)
{
	pthread_t threads[RACE_THREADS + 1];

	race_pool = vt_pool(KVTIER_POOL_RECLAIM | KVTIER_POOL_LAZY, FRAME, RACE_FRAMES);
	race_base = vt_map(race_pool, FRAME, RACE_FRAMES);
	race_words = vt_words(race_pool, RACE_FRAMES);
	for (int i = 0; i < RACE_THREADS; i++)
		CHECK(!pthread_create(&threads[i], NULL, race_user, (void *)(uintptr_t)(i + 1)));
	CHECK(!pthread_create(&threads[RACE_THREADS], NULL, race_squeeze, NULL));
	/* Until enough has happened, however slow the guest is; the case's alarm ends it otherwise. */
	while (race_hits < 1000 || race_refills < 2 * RACE_FRAMES || vt_stat(race_pool).taken < RACE_FRAMES)
		usleep(100000);
	race_stop = true;
	for (int i = 0; i <= RACE_THREADS; i++)
		CHECK(!pthread_join(threads[i], NULL));
	printf("  %lu hits, %lu refills, %llu taken\n", race_hits, race_refills,
	       (unsigned long long)vt_stat(race_pool).taken);
	/* None is lost: what is present and what is FREE make up the whole. */
	uint32_t free_words = 0;

	for (int i = 0; i < RACE_FRAMES; i++)
		free_words += KVTIER_WORD_STATE(race_words[i]) == KVTIER_WORD_FREE;
	CHECK_EQ(vt_stat(race_pool).present + free_words, RACE_FRAMES);
	CHECK_EQ(vt_stat(race_pool).busy, 0);
}

/* The whole machine short of memory: the hog gets its memory and nobody is killed. */
CASE(hog_of_the_machine)
{
	enum { N = 8192 }; /* 512 MiB */
	int pool = vt_pool(KVTIER_POOL_RECLAIM, FRAME, N), status;
	_Atomic uint64_t *words = vt_words(pool, N);
	long long before = vt_sysfs("taken_bytes");
	pid_t pid;

	CHECK(pool >= 0);
	for (uint32_t i = 0; i < N; i++)
		words[i] = KVTIER_WORD(KVTIER_WORD_CLEAN, 0, i);
	pid = fork();
	CHECK(pid >= 0);
	if (!pid) {
		hog((size_t)560 * MIB);
		_exit(0);
	}
	CHECK_EQ(waitpid(pid, &status, 0), pid);
	printf("  %lld MiB of 512 were taken\n", (vt_sysfs("taken_bytes") - before) / MIB);
	CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
	CHECK(vt_sysfs("taken_bytes") - before >= 100 * (long long)MIB);
}
