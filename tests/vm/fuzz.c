// SPDX-License-Identifier: MIT
/*
 * Random and half-sensible use of every ioctl, from several processes and threads at once, with closing, mapping, forking
 * and pressure in between. KVT_FUZZ_SECONDS (20), KVT_FUZZ_SEED. The kernel's log is the judge, and the module's emptiness.
 */
#include <dirent.h>
#include <liburing.h>
#include <pthread.h>
#include <sched.h>

#include "vt.h"

enum { FDS = 24, PROCESSES = 3, THREADS = 3 };

struct fuzz {
	int fds[FDS]; /* pools, queues, files, anything; shared by the threads, closed under each other */
	int files[4];
	uint8_t *maps[8];
};

static struct fuzz *shared;
static uint64_t end_ns;

static uint64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static uint32_t rnd(uint64_t *seed)
{
	*seed = *seed * 6364136223846793005ull + 1442695040888963407ull;
	return *seed >> 33;
}

/* Numbers at the edges more often than not. */
static uint64_t number(uint64_t *seed)
{
	static const uint64_t edges[] = { 0, 1, 2, 3, 8, 4095, 4096, 4097, 8192, 65536, 2 * MIB, 0x7fffffff, 0x80000000,
					  UINT32_MAX, INT64_MAX, UINT64_MAX, UINT64_MAX - 4095, KVTIER_MMAP_WORDS,
					  KVTIER_MMAP_HEADER };

	switch (rnd(seed) % 4) {
	case 0:
		return rnd(seed) % 16;
	case 1:
		return (uint64_t)rnd(seed) << 31 | rnd(seed);
	default:
		return edges[rnd(seed) % (sizeof(edges) / sizeof(edges[0]))];
	}
}

static int any_fd(uint64_t *seed)
{
	switch (rnd(seed) % 8) {
	case 0:
		return (int)number(seed);
	case 1:
		return shared->files[rnd(seed) % 4];
	default:
		return shared->fds[rnd(seed) % FDS];
	}
}

static void *any_pointer(uint64_t *seed, void *good)
{
	switch (rnd(seed) % 16) {
	case 0:
		return (void *)(uintptr_t)number(seed);
	case 1:
		return shared->maps[rnd(seed) % 8]; /* a pool's own memory, which may go away under the call */
	case 2:
		return NULL;
	default:
		return good;
	}
}

static void keep(uint64_t *seed, int fd)
{
	int *slot = &shared->fds[rnd(seed) % FDS], old;

	if (fd < 0)
		return;
	old = __atomic_exchange_n(slot, fd, __ATOMIC_SEQ_CST);
	if (old > 2)
		close(old);
}

static void good_name(uint64_t *seed, uint8_t *name)
{
	memset(name, 0, KVTIER_NAME_BYTES);
	sprintf((char *)name, "fuzz.%u", rnd(seed) % 4);
	if (rnd(seed) % 16 == 0)
		name[rnd(seed) % KVTIER_NAME_BYTES] = rnd(seed);
}

static void one_pool(uint64_t *seed)
{
	struct kvtier_pool_create c = { .size = sizeof(c), .flags = rnd(seed) % 8, .node = -1,
					.frame_bytes = 4096 * (1 + rnd(seed) % 32), .n_frames = 1 + rnd(seed) % 64 };

	if (rnd(seed) % 8 == 0)
		c.frame_bytes = 2 * MIB, c.n_frames = 2;
	if (rnd(seed) % 4 == 0) {
		good_name(seed, c.name);
		c.mode = rnd(seed) & 0666;
	}
	if (c.flags & KVTIER_POOL_STRICT_NODE)
		c.node = rnd(seed) % 3;
	if (!ioctl(vt_device(), KVTIER_IOC_POOL_CREATE, &c))
		keep(seed, c.fd);
}

static void one_submit(uint64_t *seed)
{
	struct kvtier_xfer x[8];
	struct kvtier_submit s = {
		.size = sizeof(s), .pool_fd = any_fd(seed), .n = 1 + rnd(seed) % 8, .item_bytes = sizeof(x[0])
	};

	for (int i = 0; i < 8; i++)
		x[i] = (struct kvtier_xfer) { .op = rnd(seed) % 2, .fd = shared->files[rnd(seed) % 4], .frame = rnd(seed) % 8,
					      .bytes = 4096 * (1 + rnd(seed) % 4), .offset = 4096ull * (rnd(seed) % 64),
					      .user = rnd(seed) % 4 };
	if (rnd(seed) % 4 == 0)
		((uint32_t *)x)[rnd(seed) % (sizeof(x) / 4)] = number(seed);
	s.items = (uintptr_t)any_pointer(seed, x);
	ioctl(any_fd(seed), KVTIER_IOC_SUBMIT, &s);
}

static void one_uring(uint64_t *seed)
{
	struct kvtier_xfer x = { .op = rnd(seed) % 2, .fd = shared->files[rnd(seed) % 4], .frame = rnd(seed) % 8,
				.bytes = 4096 };
	struct kvtier_uring_xfer *cmd;
	struct io_uring_sqe *sqe;
	struct io_uring ring;
	int n = 1 + rnd(seed) % 8;

	if (io_uring_queue_init(8, &ring, 0))
		return;
	for (int i = 0; i < n; i++) {
		sqe = io_uring_get_sqe(&ring);
		io_uring_prep_rw(IORING_OP_URING_CMD, sqe, any_fd(seed), NULL, 0, 0);
		sqe->cmd_op = rnd(seed) % 16 ? KVTIER_URING_CMD_XFER : number(seed);
		cmd = (struct kvtier_uring_xfer *)sqe->cmd;
		*cmd = (struct kvtier_uring_xfer) { .item = (uintptr_t)any_pointer(seed, &x), .pool_fd = any_fd(seed) };
	}
	/* Often nobody waits for the end. */
	io_uring_submit_and_wait(&ring, rnd(seed) % 2 ? n : 0);
	io_uring_queue_exit(&ring);
}

static void one_map(uint64_t *seed)
{
	static const uint64_t offsets[] = { 0, 4096, KVTIER_MMAP_WORDS, KVTIER_MMAP_HEADER };
	uint64_t offset = rnd(seed) % 4 ? offsets[rnd(seed) % 4] : number(seed) & ~4095ull;
	uint8_t **slot = &shared->maps[rnd(seed) % 8], *old, *p;

	p = mmap(NULL, 4096 * (1 + rnd(seed) % 16), PROT_READ | PROT_WRITE, rnd(seed) % 8 ? MAP_SHARED : MAP_PRIVATE,
		 any_fd(seed), offset);
	if (p == MAP_FAILED)
		return;
	old = __atomic_exchange_n(slot, p, __ATOMIC_SEQ_CST);
	if (old && rnd(seed) % 2)
		munmap(old, 65536);
}

/* Words, pages and header scribbled over, through whatever is mapped. A child takes what SIGBUS there is. */
static void one_scribble(uint64_t *seed)
{
	uint8_t *p = shared->maps[rnd(seed) % 8];
	uint64_t word = KVTIER_WORD(rnd(seed) % 6, rnd(seed), rnd(seed));
	int pipes[2];

	if (!p || pipe(pipes))
		return;
	/* The kernel touches it for us: a bad page is EFAULT. */
	if (write(pipes[1], &word, 8) == 8 && read(pipes[0], p + 8 * (rnd(seed) % 64), 8) < 0)
		(void)!read(pipes[0], &word, 8);
	close(pipes[0]);
	close(pipes[1]);
}

static void one_random(uint64_t *seed)
{
	static const unsigned long cmds[] = { KVTIER_IOC_QUERY, KVTIER_IOC_POOL_CREATE, KVTIER_IOC_POOL_OPEN,
					      KVTIER_IOC_POOL_REMOVE, KVTIER_IOC_POOL_STAT, KVTIER_IOC_POPULATE,
					      KVTIER_IOC_RELEASE, KVTIER_IOC_QUEUE_CREATE, KVTIER_IOC_SUBMIT,
					      KVTIER_IOC_REAP, KVTIER_IOC_CANCEL, KVTIER_IOC_DRAIN };
	static const uint32_t sizes[] = { sizeof(struct kvtier_query), sizeof(struct kvtier_pool_create),
					  sizeof(struct kvtier_pool_open), sizeof(struct kvtier_pool_remove),
					  sizeof(struct kvtier_pool_stat), sizeof(struct kvtier_range),
					  sizeof(struct kvtier_range), sizeof(struct kvtier_queue_create),
					  sizeof(struct kvtier_submit), sizeof(struct kvtier_reap),
					  sizeof(struct kvtier_cancel), sizeof(struct kvtier_drain) };
	uint32_t i = rnd(seed) % (sizeof(cmds) / sizeof(cmds[0])), *words;
	union {
		uint32_t words[128];
		struct kvtier_pool_create create;
	} arg;

	words = arg.words;
	for (int j = 0; j < 128; j++)
		words[j] = rnd(seed) % 2 ? 0 : number(seed);
	words[0] = rnd(seed) % 4 ? sizes[i] : rnd(seed) % 2 ? sizes[i] + 8 * (rnd(seed) % 8) : number(seed);
	if (words[0] > sizes[i] && words[0] < sizeof(arg) && rnd(seed) % 2)
		memset((char *)words + sizes[i], 0, words[0] - sizes[i]);
	/* A create that works by luck must not take the machine's memory. */
	if (cmds[i] == KVTIER_IOC_POOL_CREATE)
		arg.create.n_frames = rnd(seed) % 64;
	if (!ioctl(rnd(seed) % 2 ? vt_device() : any_fd(seed), rnd(seed) % 32 ? cmds[i] : number(seed),
		   any_pointer(seed, words))) {
		if (cmds[i] == KVTIER_IOC_POOL_CREATE && arg.create.fd > 2 && arg.create.fd < 1024)
			keep(seed, arg.create.fd);
	}
}

static void one_of_all(uint64_t *seed)
{
	struct kvtier_range r = { .size = sizeof(r), .first = rnd(seed) % 4, .n = 1 + rnd(seed) % 8 };
	struct kvtier_pool_open o = { .size = sizeof(o), .flags = rnd(seed) % 2 };
	struct kvtier_pool_remove rm = { .size = sizeof(rm) };
	struct kvtier_cancel c = { .size = sizeof(c), .user = rnd(seed) % 4 };
	struct kvtier_pool_stat stat = { .size = sizeof(stat) };
	struct kvtier_done done[8];
	int fd;

	switch (rnd(seed) % 16) {
	case 0:
		one_pool(seed);
		break;
	case 1:
		keep(seed, vt_queue(1 + rnd(seed) % 32, rnd(seed) % 2 ? -1 : any_fd(seed)));
		break;
	case 2:
	case 3:
	case 4:
		one_submit(seed);
		break;
	case 5:
		vt_reap(any_fd(seed), any_pointer(seed, done), 1 + rnd(seed) % 8);
		break;
	case 6:
		ioctl(any_fd(seed), rnd(seed) % 2 ? KVTIER_IOC_POPULATE : KVTIER_IOC_RELEASE, &r);
		break;
	case 7:
		ioctl(any_fd(seed), KVTIER_IOC_CANCEL, &c);
		break;
	case 8:
		one_map(seed);
		break;
	case 9:
		one_scribble(seed);
		break;
	case 10:
		good_name(seed, o.name);
		if (!ioctl(vt_device(), KVTIER_IOC_POOL_OPEN, &o))
			keep(seed, o.fd);
		break;
	case 11:
		good_name(seed, rm.name);
		ioctl(vt_device(), KVTIER_IOC_POOL_REMOVE, &rm);
		break;
	case 12:
		fd = any_fd(seed);
		if (rnd(seed) % 2)
			keep(seed, dup(fd));
		else
			ioctl(fd, KVTIER_IOC_POOL_STAT, &stat);
		break;
	case 13:
		if (rnd(seed) % 4 == 0)
			one_uring(seed);
		break;
	case 14:
		if (rnd(seed) % 64 == 0) {
			fd = open("/proc/sys/vm/drop_caches", O_WRONLY);
			(void)!write(fd, "2", 1);
			close(fd);
		}
		break;
	default:
		one_random(seed);
	}
}

static void *fuzz_thread(void *arg)
{
	uint64_t seed = (uintptr_t)arg;
	int status;
	pid_t pid;

	while (now_ns() < end_ns) {
		for (int i = 0; i < 64; i++)
			one_of_all(&seed);
		if (rnd(&seed) % 16)
			continue;
		/* A child that goes on with what it inherited, and may die at it. */
		pid = fork();
		if (!pid) {
			for (int i = 0; i < 64; i++)
				one_of_all(&seed);
			_exit(0);
		}
		if (rnd(&seed) % 2)
			kill(pid, SIGKILL);
		waitpid(pid, &status, 0);
	}
	return NULL;
}

static void fuzz_process(uint64_t seed)
{
	struct rlimit limit = { .rlim_cur = 256, .rlim_max = 256 };
	pthread_t threads[THREADS];
	static struct fuzz fuzz;

	setrlimit(RLIMIT_NOFILE, &limit);
	signal(SIGPIPE, SIG_IGN);
	shared = &fuzz;
	for (int i = 0; i < 4; i++) {
		char path[64];

		snprintf(path, sizeof(path), "%s/fuzz.%d.%d", i & 1 ? "/mnt" : "/tmp", getpid(), i);
		fuzz.files[i] = open(path, O_CREAT | O_RDWR | (i == 3 ? O_DIRECT : 0), 0600);
		unlink(path);
	}
	for (intptr_t i = 0; i < THREADS; i++)
		pthread_create(&threads[i], NULL, fuzz_thread, (void *)(uintptr_t)(seed * 1000 + i));
	for (int i = 0; i < THREADS; i++)
		pthread_join(threads[i], NULL);
}

/* Names that luck made are valid, too. */
static void remove_all(void)
{
	DIR *dir = opendir("/sys/kernel/kvtier/pools");
	char path[300], name[KVTIER_NAME_BYTES + 1];

	CHECK(dir);
	for (struct dirent *e; (e = readdir(dir));) {
		int fd;

		snprintf(path, sizeof(path), "/sys/kernel/kvtier/pools/%s/name", e->d_name);
		fd = open(path, O_RDONLY);
		memset(name, 0, sizeof(name));
		if (fd >= 0 && read(fd, name, sizeof(name) - 1) > 1) {
			name[strcspn(name, "\n")] = '\0';
			CHECK(!vt_remove(name));
		}
		if (fd >= 0)
			close(fd);
	}
	closedir(dir);
}

CASE(fuzz)
{
	const char *seconds = getenv("KVT_FUZZ_SECONDS"), *seed = getenv("KVT_FUZZ_SEED");
	uint64_t n = seconds ? strtoull(seconds, NULL, 0) : 20, first = seed ? strtoull(seed, NULL, 0) : now_ns();
	pid_t pids[PROCESSES];
	int status;

	printf("  %llu seconds, KVT_FUZZ_SEED=%llu\n", (unsigned long long)n, (unsigned long long)first);
	alarm(n + VT_TIMEOUT);
	end_ns = now_ns() + n * 1000000000ull;
	for (int i = 0; i < PROCESSES; i++) {
		pids[i] = fork();
		CHECK(pids[i] >= 0);
		if (!pids[i]) {
			fuzz_process(first + i);
			_exit(0);
		}
	}
	for (int i = 0; i < PROCESSES; i++)
		CHECK_EQ(waitpid(pids[i], &status, 0), pids[i]);
	remove_all();
	printf("  %lld pools, %lld reads, %lld writes, %lld frames taken\n", vt_sysfs("pools_created"), vt_sysfs("reads"),
	       vt_sysfs("writes"), vt_sysfs("taken_frames"));
	CHECK(vt_sysfs("reads") > 0 && vt_sysfs("writes") > 0);
}
