// SPDX-License-Identifier: MIT
/* Pools: memory, mappings, descriptors, names, limits, and every way to die. */
#include <dirent.h>
#include <liburing.h>
#include <sched.h>
#include <sys/file.h>
#include <sys/syscall.h>

#include "vt.h"

/* What a pool of one frame is charged beside the frame: words, table, header. */
#define OVERHEAD (3 * 4096)

CASE(memory)
{
	static const uint32_t sizes[] = { 4096, 12288, 65536, 2 * MIB };

	for (unsigned int i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
		int pool = vt_pool(0, sizes[i], 3);
		uint8_t *a, *b;

		CHECK(pool >= 0);
		a = vt_map(pool, sizes[i], 3);
		b = vt_map(pool, sizes[i], 3);
		for (size_t j = 0; j < 3u * sizes[i]; j += 512)
			CHECK(!a[j]);
		vt_fill(a, 3 * sizes[i], i);
		CHECK(vt_filled(b, 3 * sizes[i], i));
		CHECK_EQ(vt_stat(pool).present, 3);
		CHECK(vt_stat(pool).contiguous <= 3);
		/* Page tables dropped behind its back: the same bytes come again. */
		CHECK(!madvise(a, 3 * sizes[i], MADV_DONTNEED));
		CHECK(vt_filled(a, 3 * sizes[i], i));
		a = mremap(a, 3 * sizes[i], 3 * sizes[i], MREMAP_MAYMOVE | MREMAP_FIXED,
			   mmap(NULL, 3 * sizes[i], PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
		CHECK(a != MAP_FAILED && vt_filled(a, 3 * sizes[i], i));
		munmap(a, 3 * sizes[i]);
		munmap(b, 3 * sizes[i]);
		close(pool);
	}
}

CASE(lazy)
{
	int pool = vt_pool(KVTIER_POOL_LAZY, 65536, 4);
	uint8_t *p = vt_map(pool, 65536, 4);
	_Atomic uint64_t *words = vt_words(pool, 4);

	CHECK_EQ(vt_stat(pool).present, 0);
	CHECK_EQ(words[2], KVTIER_WORD(KVTIER_WORD_FREE, 0, 0));
	p[2 * 65536 + 5] = 1;
	CHECK_EQ(vt_stat(pool).present, 1);
	CHECK_EQ(words[2], KVTIER_WORD(KVTIER_WORD_HELD, 0, 0));
	CHECK_EQ(vt_range(pool, KVTIER_IOC_RELEASE, 0, 4), 1);
	CHECK_EQ(words[2], KVTIER_WORD(KVTIER_WORD_FREE, 1, 0));
	/* Lost content does not come back by itself as zeros. */
	CHECK(vt_sigbus(p + 2 * 65536));
	munmap(p, 4 * 65536);
	p = vt_map(pool, 65536, 4);
	CHECK_EQ(vt_range(pool, KVTIER_IOC_POPULATE, 2, 1), 1);
	CHECK_EQ(words[2], KVTIER_WORD(KVTIER_WORD_HELD, 1, 0));
	CHECK(!p[2 * 65536 + 5]);
}

/* get_user_pages on the frames: O_DIRECT, and a buffer registered with io_uring. */
CASE(direct_io)
{
	int pool = vt_pool(0, 65536, 4), file = open("/mnt/direct", O_CREAT | O_RDWR | O_DIRECT, 0600);
	uint8_t *p = vt_map(pool, 65536, 4);

	if (file < 0)
		SKIP("no O_DIRECT on /mnt (%s)", strerror(errno));
	vt_fill(p, 65536, 1);
	CHECK_EQ(pwrite(file, p, 65536, 0), 65536);
	CHECK_EQ(pread(file, p + 65536, 65536, 0), 65536);
	CHECK(vt_filled(p + 65536, 65536, 1));
	unlink("/mnt/direct");
}

CASE(uring_registered)
{
	int pool = vt_pool(0, 65536, 4), file = vt_file("/tmp", 0, 65536);
	uint8_t *p = vt_map(pool, 65536, 4);
	struct iovec iov = { .iov_base = p, .iov_len = 4 * 65536 };
	struct io_uring_cqe *cqe;
	struct io_uring ring;

	CHECK(!io_uring_queue_init(4, &ring, 0));
	if (vt_kernel() < 605) {
		CHECK_EQ(io_uring_register_buffers(&ring, &iov, 1), -EOPNOTSUPP);
		SKIP("before 6.5, io_uring registers no buffer that is a mapping of a file, whatever file");
	}
	CHECK_EQ(io_uring_register_buffers(&ring, &iov, 1), 0);
	vt_fill(p, 65536, 2);
	io_uring_prep_write_fixed(io_uring_get_sqe(&ring), file, p, 65536, 0, 0);
	CHECK_EQ(io_uring_submit_and_wait(&ring, 1), 1);
	CHECK(!io_uring_wait_cqe(&ring, &cqe) && cqe->res == 65536);
	io_uring_cqe_seen(&ring, cqe);
	io_uring_prep_read_fixed(io_uring_get_sqe(&ring), file, p + 65536, 65536, 0, 0);
	CHECK_EQ(io_uring_submit_and_wait(&ring, 1), 1);
	CHECK(!io_uring_wait_cqe(&ring, &cqe) && cqe->res == 65536);
	CHECK(vt_filled(p + 65536, 65536, 2));
	/* Registered buffers outlive mapping and descriptor. */
	munmap(p, 4 * 65536);
	close(pool);
	io_uring_queue_exit(&ring);
}

static void touch(void *p);

/* A mapping in pieces: each keeps the pool, and shows the same frames. */
CASE(pieces)
{
	int pool = vt_pool(0, 65536, 2);
	uint8_t *p = vt_map(pool, 65536, 2);

	vt_fill(p, 2 * 65536, 3);
	close(pool);
	CHECK(!munmap(p + 4096, 8192));
	CHECK(!mprotect(p + 65536, 4096, PROT_READ));
	CHECK(!madvise(p + 3 * 4096, 4096, MADV_DONTNEED));
	CHECK(mremap(p, 0, 4096, MREMAP_MAYMOVE) == MAP_FAILED); /* EINVAL or, on older kernels, EFAULT */
	CHECK(!munmap(p, 4096));
	CHECK(vt_sysfs("bytes") > 0);
	for (int i = 3; i < 32; i++) {
		uint8_t *all = malloc(2 * 65536);

		vt_fill(all, 2 * 65536, 3);
		CHECK(!memcmp(p + i * 4096, all + i * 4096, 4096));
		free(all);
	}
	/* A child that is let in after all (newer kernels refuse) sees the same memory, and its end takes nothing away. */
	if (!madvise(p + 3 * 4096, 4096, MADV_DOFORK)) {
		CHECK_EQ(vt_child(touch, p + 3 * 4096), 0);
		CHECK_EQ(p[3 * 4096], 1);
	} else {
		CHECK_EQ(errno, EINVAL);
	}
	CHECK(!munmap(p + 3 * 4096, 29 * 4096));
}

/* Owner, mode and size are the pool's, not an inode's; a lock on it is one for all who open it. */
CASE(not_a_file)
{
	int pool = vt_pool_named("inode", 0600, 4096, 1), again;

	CHECK_ERR(fchmod(pool, 0777), EOPNOTSUPP);
	CHECK_ERR(fchown(pool, 1000, 1000), EOPNOTSUPP);
	CHECK(ftruncate(pool, 0) == -1);
	CHECK_EQ(vt_stat(pool).mode, 0600);
	again = vt_open("inode", 0);
	CHECK(again >= 0);
	CHECK(!flock(pool, LOCK_EX | LOCK_NB));
	CHECK_ERR(flock(again, LOCK_EX | LOCK_NB), EWOULDBLOCK);
	close(pool);
	CHECK(!flock(again, LOCK_EX | LOCK_NB));
	CHECK(!vt_remove("inode"));
}

static void touch(void *p)
{
	*(volatile uint8_t *)p = 1;
}

static void close_it(void *fd)
{
	close(*(int *)fd);
}

CASE(fork_and_dup)
{
	int pool = vt_pool(0, 4096, 2), copy = dup(pool);
	uint8_t *p = vt_map(pool, 4096, 2);

	CHECK_EQ(vt_child(touch, p), -SIGSEGV);
	CHECK_EQ(vt_child(close_it, &pool), 0);
	p[0] = 3;
	CHECK(!close(pool));
	CHECK_EQ(vt_stat(copy).present, 2);
	CHECK(!close(copy));
	CHECK_ERR(close(copy), EBADF);
	/* The mapping alone keeps it. */
	CHECK_EQ(p[0], 3);
	CHECK(vt_sysfs("bytes") > 0);
}

static void share_child(void *arg)
{
	int pool = vt_recv_fd(*(int *)arg);
	uint8_t *p = vt_map(pool, 65536, 2);

	CHECK(vt_filled(p, 65536, 5));
	vt_fill(p + 65536, 65536, 6);
}

CASE(pass_descriptor)
{
	int pool = vt_pool(0, 65536, 2), pair[2];
	uint8_t *p = vt_map(pool, 65536, 2);

	CHECK(!socketpair(AF_UNIX, SOCK_DGRAM, 0, pair));
	vt_fill(p, 65536, 5);
	vt_send_fd(pair[0], pool);
	CHECK_EQ(vt_child(share_child, &pair[1]), 0);
	CHECK(vt_filled(p + 65536, 65536, 6));
	/* In a socket that nobody reads: gone with the socket. */
	vt_send_fd(pair[0], pool);
}

/* Die at a random place of a random life. */
static void live(void *arg)
{
	unsigned int seed = *(unsigned int *)arg;
	int file = vt_file("/tmp", 0, 1 << 20);
	char name[32];

	snprintf(name, sizeof(name), "kill.%d", getpid());
	for (;;) {
		int pool = vt_pool(rand_r(&seed) % 2 ? KVTIER_POOL_RECLAIM : KVTIER_POOL_LAZY, 65536, 64);
		int queue = vt_queue(16, -1);
		struct kvtier_xfer x = { .fd = file, .bytes = 65536 };
		uint8_t *p;

		if (pool < 0)
			continue;
		p = vt_map(pool, 65536, 64);
		for (int i = 0; i < 16; i++) {
			p[rand_r(&seed) % (64 * 65536)] = 1;
			x.op = rand_r(&seed) % 2;
			x.frame = rand_r(&seed) % 64;
			vt_submit(queue, pool, &x, 1);
		}
		if (rand_r(&seed) % 2)
			close(vt_pool_named(name, 0600, 65536, 4));
		vt_remove(name);
		munmap(p, 64 * 65536);
		close(pool);
		close(queue);
	}
}

CASE(kill_anywhere)
{
	for (unsigned int i = 0; i < 40; i++) {
		unsigned int seed = i;
		int status;
		char name[32];
		pid_t pid = fork();

		CHECK(pid >= 0);
		if (!pid)
			live(&seed);
		usleep(1000 + i * 3137 % 60000);
		kill(pid, SIGKILL);
		CHECK_EQ(waitpid(pid, &status, 0), pid);
		CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
		snprintf(name, sizeof(name), "kill.%d", pid);
		vt_remove(name); /* a name stays, as it should */
	}
}

static void fill_named(void *arg)
{
	int pool = vt_pool_named("warm", 0600, 65536, 8);
	uint8_t *p = vt_map(pool, 65536, 8), *header;

	(void)arg;
	header = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, pool, KVTIER_MMAP_HEADER);
	CHECK(header != MAP_FAILED);
	vt_fill(p, 8 * 65536, 7);
	vt_fill(header, 4096, 8);
	vt_words(pool, 8)[3] = KVTIER_WORD(KVTIER_WORD_CLEAN, 0, 9);
	kill(getpid(), SIGKILL);
}

/* A restarted engine finds its memory. */
CASE(named)
{
	uint8_t *p, *header;
	int pool;

	CHECK_EQ(vt_child(fill_named, NULL), -SIGKILL);
	CHECK(vt_sysfs("bytes") > 8 * 65536);
	CHECK_ERR(vt_pool_named("warm", 0600, 4096, 1), EEXIST);
	pool = vt_open("warm", 0);
	CHECK(pool >= 0);
	CHECK_EQ(vt_stat(pool).n_frames, 8);
	CHECK(!strcmp((char *)vt_stat(pool).name, "warm"));
	p = vt_map(pool, 65536, 8);
	header = mmap(NULL, 4096, PROT_READ, MAP_SHARED, pool, KVTIER_MMAP_HEADER);
	CHECK(header != MAP_FAILED);
	CHECK(vt_filled(p, 8 * 65536, 7));
	CHECK(vt_filled(header, 4096, 8));
	CHECK_EQ(vt_words(pool, 8)[3], KVTIER_WORD(KVTIER_WORD_CLEAN, 0, 9));
	CHECK(!vt_remove("warm"));
	CHECK_ERR(vt_remove("warm"), ENOENT);
	CHECK_ERR(vt_open("warm", 0), ENOENT);
	/* The name is gone, the memory is not. */
	CHECK(vt_filled(p, 8 * 65536, 7));
	CHECK(!vt_stat(pool).name[0]);
}

static void as_user(void *arg)
{
	(void)arg;
	vt_become_user();
	CHECK_ERR(vt_open("private", 0), EACCES);
	CHECK_ERR(vt_open("private", KVTIER_OPEN_RDONLY), EACCES);
	CHECK_ERR(vt_open("public", 0), EACCES);
	CHECK(vt_open("public", KVTIER_OPEN_RDONLY) >= 0);
	CHECK_ERR(vt_remove("public"), EPERM);
	CHECK(vt_pool_named("mine", 0600, 4096, 1) >= 0);
	CHECK_EQ(vt_stat(vt_open("mine", 0)).uid, 1000);
}

CASE(permissions)
{
	CHECK(vt_pool_named("private", 0600, 4096, 1) >= 0);
	CHECK(vt_pool_named("public", 0644, 4096, 1) >= 0);
	CHECK_EQ(vt_child(as_user, NULL), 0);
	CHECK(vt_open("mine", 0) >= 0); /* root may */
	CHECK(!vt_remove("mine"));
	CHECK(!vt_remove("private"));
	CHECK(!vt_remove("public"));
}

/* root of a user namespace that is user 100000 outside, and makes the first pool that there is */
static void in_namespace(void *arg)
{
	int *pipes = arg;
	char byte;

	CHECK(vt_device() >= 0);
	CHECK(!unshare(CLONE_NEWUSER));
	CHECK(write(pipes[1], "u", 1) == 1);
	CHECK(read(pipes[2], &byte, 1) == 1);
	CHECK(!setresgid(0, 0, 0) && !setresuid(0, 0, 0));
	CHECK(vt_pool_named("inside", 0600, 4096, 1) >= 0);
	CHECK_EQ(vt_stat(vt_open("inside", 0)).uid, 0);
	CHECK(write(pipes[1], "c", 1) == 1);
	CHECK(read(pipes[2], &byte, 1) == 1);
	/* Another's pool is not there for it, whoever its root is. */
	CHECK_ERR(vt_open("outside", 0), EACCES);
	CHECK_ERR(vt_remove("outside"), EPERM);
}

CASE(user_namespace)
{
	char path[64], byte;
	int to[2], from[2], pipes[4], status;
	pid_t pid;

	if (access("/proc/self/ns/user", F_OK))
		SKIP("no user namespaces in this kernel");
	CHECK(!pipe(to) && !pipe(from));
	pipes[1] = from[1];
	pipes[2] = to[0];
	pid = fork();
	CHECK(pid >= 0);
	if (!pid) {
		in_namespace(pipes);
		_exit(0);
	}
	CHECK(read(from[0], &byte, 1) == 1);
	for (int i = 0; i < 2; i++) {
		int fd;

		snprintf(path, sizeof(path), "/proc/%d/%s_map", pid, i ? "gid" : "uid");
		fd = open(path, O_WRONLY);
		CHECK(fd >= 0 && write(fd, "0 100000 1", 10) == 10);
		close(fd);
	}
	CHECK(write(to[1], "m", 1) == 1);
	CHECK(read(from[0], &byte, 1) == 1);
	CHECK_EQ(vt_stat(vt_open("inside", 0)).uid, 100000);
	CHECK(vt_pool_named("outside", 0600, 4096, 1) >= 0);
	CHECK(write(to[1], "o", 1) == 1);
	CHECK_EQ(waitpid(pid, &status, 0), pid);
	CHECK(WIFEXITED(status) && !WEXITSTATUS(status));
	CHECK(!vt_remove("inside"));
	CHECK(!vt_remove("outside"));
}

static struct kvtier_query query(void)
{
	struct kvtier_query q = { .size = sizeof(q) };

	CHECK(!ioctl(vt_device(), KVTIER_IOC_QUERY, &q));
	return q;
}

CASE(limits_to_the_byte)
{
	struct kvtier_query before = query();
	int a, b;

	vt_set_param("max_bytes", 2 * (OVERHEAD + 65536) - 1);
	a = vt_pool(0, 65536, 1);
	CHECK(a >= 0);
	CHECK_EQ(query().used_bytes, OVERHEAD + 65536);
	CHECK_EQ(vt_stat(a).charged_bytes, OVERHEAD + 65536);
	CHECK_ERR(vt_pool(0, 65536, 1), ENOSPC);
	CHECK_EQ(query().used_bytes, OVERHEAD + 65536);
	vt_set_param("max_bytes", 2 * (OVERHEAD + 65536));
	b = vt_pool(0, 65536, 1);
	CHECK(b >= 0);
	CHECK_ERR(vt_pool(0, 4096, 1), ENOSPC);
	close(b);
	vt_set_param("max_bytes", before.max_bytes);

	vt_set_param("max_user_bytes", OVERHEAD * 2 + 65536 * 2 - 1);
	CHECK_ERR(vt_pool(0, 65536, 1), EDQUOT);
	/* A lazy pool is charged at once; what was released, when it comes again. */
	CHECK_ERR(vt_pool(KVTIER_POOL_LAZY, 65536, 1), EDQUOT);
	vt_set_param("max_user_bytes", OVERHEAD * 2 + 65536 * 2);
	b = vt_pool(KVTIER_POOL_LAZY, 65536, 1);
	CHECK(b >= 0);
	CHECK_EQ(query().used_bytes, OVERHEAD * 2 + 65536 * 2);
	CHECK_EQ(vt_range(b, KVTIER_IOC_POPULATE, 0, 1), 1);
	CHECK_EQ(query().used_bytes, OVERHEAD * 2 + 65536 * 2);
	CHECK_EQ(vt_range(b, KVTIER_IOC_RELEASE, 0, 1), 1);
	CHECK_EQ(query().used_bytes, OVERHEAD * 2 + 65536);
	vt_set_param("max_user_bytes", OVERHEAD * 2 + 65536 * 2 - 1);
	CHECK_ERR(vt_range(b, KVTIER_IOC_POPULATE, 0, 1), EDQUOT);
	CHECK_EQ(query().used_bytes, OVERHEAD * 2 + 65536);
	vt_set_param("max_user_bytes", before.max_user_bytes);
}

static void memlock(void *arg)
{
	struct rlimit limit = { .rlim_cur = OVERHEAD + 65536 - 4096, .rlim_max = OVERHEAD + 65536 };
	int pool;

	(void)arg;
	vt_become_user();
	CHECK(!setrlimit(RLIMIT_MEMLOCK, &limit));
	CHECK_ERR(vt_pool(0, 65536, 1), EPERM);
	limit.rlim_cur = limit.rlim_max;
	CHECK(!setrlimit(RLIMIT_MEMLOCK, &limit));
	for (int i = 0; i < 3; i++) {
		pool = vt_pool(0, 65536, 1);
		CHECK(pool >= 0);
		CHECK_ERR(vt_pool(0, 4096, 1), EPERM);
		CHECK_ERR(vt_queue(1, -1), EPERM);
		close(pool);
		/* The last close may be finished by a worker. */
		while (vt_sysfs("bytes"))
			usleep(1000);
	}
}

CASE(memlock_to_the_byte)
{
	CHECK_EQ(vt_child(memlock, NULL), 0);
}

static void write_file(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY);

	CHECK(fd >= 0);
	CHECK(write(fd, text, strlen(text)) == (ssize_t)strlen(text));
	close(fd);
}

static long long read_number(const char *path)
{
	char text[64] = "";
	int fd = open(path, O_RDONLY);

	CHECK(fd >= 0 && read(fd, text, 63) > 0);
	close(fd);
	return atoll(text);
}

static void in_cgroup(void *arg)
{
	int pool;

	(void)arg;
	write_file("/cgroup/vt/cgroup.procs", "0");
	pool = vt_pool(0, 65536, 64);
	CHECK(pool >= 0);
	CHECK(read_number("/cgroup/vt/memory.current") >= 64 * 65536);
	CHECK_EQ(vt_range(pool, KVTIER_IOC_RELEASE, 0, 64), 64);
	CHECK(read_number("/cgroup/vt/memory.current") < 64 * 65536);
	/* More than the group has: told, not killed. */
	CHECK_ERR(vt_pool(0, 65536, 1024), ENOMEM);
}

CASE(cgroup)
{
	if (mkdir("/cgroup/vt", 0755))
		SKIP("no memory cgroups (%s)", strerror(errno));
	write_file("/cgroup/vt/memory.max", "33554432");
	CHECK_EQ(vt_child(in_cgroup, NULL), 0);
	/* The last close may be finished by a worker; the case's alarm ends what would wait for ever. */
	while (read_number("/cgroup/vt/memory.current") >= 2 << 20)
		usleep(1000);
	CHECK(!rmdir("/cgroup/vt"));
}

CASE(unload_refused)
{
	int pool = vt_pool(0, 4096, 1), saved = dup(vt_device());

	/* By an open pool alone; by a name alone. */
	CHECK(pool >= 0);
	close(saved);
	CHECK_ERR(syscall(SYS_delete_module, "kvtier", O_NONBLOCK), EAGAIN);
	CHECK(vt_pool_named("stays", 0600, 4096, 1) >= 0);
	close(pool);
	for (int fd = 3; fd < 64; fd++)
		close(fd);
	usleep(200000);
	CHECK_ERR(syscall(SYS_delete_module, "kvtier", O_NONBLOCK), EAGAIN);
	pool = open(KVTIER_DEVICE, O_RDWR);
	CHECK(pool >= 0);
	struct kvtier_pool_remove r = { .size = sizeof(r), .name = "stays" };
	CHECK(!ioctl(pool, KVTIER_IOC_POOL_REMOVE, &r));
}

/* Loaded twice: refused; the first stays alive, its node too. */
CASE(load_twice)
{
	int ko = open("/kvtier.ko", O_RDONLY);

	CHECK(ko >= 0);
	CHECK_ERR(syscall(SYS_finit_module, ko, "", 0), EEXIST);
	CHECK(vt_pool(0, 4096, 1) >= 0);
}

static long long pool_value(uint64_t id, const char *name)
{
	char path[64];

	snprintf(path, sizeof(path), "pools/%llu/%s", (unsigned long long)id, name);
	return vt_sysfs(path);
}

CASE(sysfs)
{
	int pool = vt_pool_named("seen", 0640, 65536, 4);
	struct kvtier_pool_stat s = vt_stat(pool);
	_Atomic uint64_t *words = vt_words(pool, 4);
	DIR *dir;

	words[1] = KVTIER_WORD(KVTIER_WORD_CLEAN, 0, 1);
	CHECK_EQ(vt_sysfs("pools_alive"), 1);
	CHECK_EQ(vt_sysfs("held_bytes"), 3 * 65536);
	CHECK_EQ(vt_sysfs("clean_bytes"), 65536);
	CHECK_EQ(vt_sysfs("bytes"), s.charged_bytes);
	CHECK_EQ(pool_value(s.id, "frames"), 4);
	CHECK_EQ(pool_value(s.id, "frame_bytes"), 65536);
	CHECK_EQ(pool_value(s.id, "owner"), 0);
	CHECK_EQ(pool_value(s.id, "mode"), 640);
	CHECK_EQ(pool_value(s.id, "bytes"), s.charged_bytes);
	CHECK(!vt_remove("seen"));
	close(pool);
	munmap((void *)words, 4096);
	dir = opendir("/sys/kernel/kvtier/pools");
	CHECK(dir);
	for (struct dirent *e; (e = readdir(dir));)
		CHECK(e->d_name[0] == '.');
}

static void trace_knob(const char *name, const char *value)
{
	char path[96];

	snprintf(path, sizeof(path), "/sys/kernel/tracing/%s", name);
	write_file(path, value);
}

/* Each tracepoint tells what happened. */
CASE(tracepoints)
{
	static const char *const events[] = { "kvtier_pool_create:", "kvtier_populate:", "kvtier_xfer_start:", "kvtier_xfer_done:",
					      "kvtier_take:", "kvtier_pool_destroy:" };
	static char text[1 << 20];
	struct kvtier_xfer x = { .op = KVTIER_XFER_READ, .fd = vt_file("/tmp", 0, 4096), .bytes = 4096 };
	_Atomic uint64_t *words;
	int pool, queue, fd;
	size_t n = 0;
	ssize_t got;

	if (access("/sys/kernel/tracing/events/kvtier/enable", F_OK))
		SKIP("no tracepoints in this kernel");
	trace_knob("trace", "0");
	trace_knob("events/kvtier/enable", "1");
	pool = vt_pool(KVTIER_POOL_RECLAIM, 65536, 2);
	queue = vt_queue(1, -1);
	CHECK_EQ(vt_submit(queue, pool, &x, 1), 1);
	CHECK_EQ(vt_wait(queue, 0), 4096);
	words = vt_words(pool, 2);
	words[0] = KVTIER_WORD(KVTIER_WORD_CLEAN, 0, 0);
	while (!vt_stat(pool).taken)
		write_file("/proc/sys/vm/drop_caches", "2");
	close(queue);
	munmap((void *)words, 4096);
	close(pool);
	while (vt_sysfs("pools_alive"))
		usleep(1000);
	trace_knob("events/kvtier/enable", "0");
	fd = open("/sys/kernel/tracing/trace", O_RDONLY);
	while (n < sizeof(text) - 1 && (got = read(fd, text + n, sizeof(text) - 1 - n)) > 0)
		n += got;
	for (unsigned int i = 0; i < sizeof(events) / sizeof(events[0]); i++) {
		if (!strstr(text, events[i]))
			printf("  %s is not there\n", events[i]);
		CHECK(strstr(text, events[i]));
	}
}
