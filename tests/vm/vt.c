// SPDX-License-Identifier: MIT
/* The frame of the tests that run in a guest: cases, checks, and short words for the module's calls. */
#include <grp.h>
#include <poll.h>
#include <sys/utsname.h>

#include "vt.h"

struct vt_case *vt_cases;

int vt_device(void)
{
	static int fd = -1;

	if (fd < 0)
		fd = open(KVTIER_DEVICE, O_RDWR | O_CLOEXEC);
	CHECK(fd >= 0);
	return fd;
}

int vt_pool(uint32_t flags, uint32_t frame_bytes, uint32_t n)
{
	struct kvtier_pool_create c = { .size = sizeof(c), .flags = flags, .frame_bytes = frame_bytes, .n_frames = n,
					.node = -1 };

	return ioctl(vt_device(), KVTIER_IOC_POOL_CREATE, &c) ? -1 : c.fd;
}

int vt_pool_named(const char *name, uint32_t mode, uint32_t frame_bytes, uint32_t n)
{
	struct kvtier_pool_create c = { .size = sizeof(c), .frame_bytes = frame_bytes, .n_frames = n, .node = -1,
					.mode = mode, .flags = KVTIER_POOL_RECLAIM };

	strncpy((char *)c.name, name, sizeof(c.name) - 1);
	return ioctl(vt_device(), KVTIER_IOC_POOL_CREATE, &c) ? -1 : c.fd;
}

int vt_open(const char *name, uint32_t flags)
{
	struct kvtier_pool_open o = { .size = sizeof(o), .flags = flags };

	strncpy((char *)o.name, name, sizeof(o.name) - 1);
	return ioctl(vt_device(), KVTIER_IOC_POOL_OPEN, &o) ? -1 : o.fd;
}

int vt_remove(const char *name)
{
	struct kvtier_pool_remove r = { .size = sizeof(r) };

	strncpy((char *)r.name, name, sizeof(r.name) - 1);
	return ioctl(vt_device(), KVTIER_IOC_POOL_REMOVE, &r);
}

struct kvtier_pool_stat vt_stat(int pool)
{
	struct kvtier_pool_stat s = { .size = sizeof(s) };

	CHECK(!ioctl(pool, KVTIER_IOC_POOL_STAT, &s));
	return s;
}

uint8_t *vt_map(int pool, uint32_t frame_bytes, uint32_t n)
{
	uint8_t *p = mmap(NULL, (size_t)frame_bytes * n, PROT_READ | PROT_WRITE, MAP_SHARED, pool, 0);

	CHECK(p != MAP_FAILED);
	return p;
}

_Atomic uint64_t *vt_words(int pool, uint32_t n)
{
	void *p = mmap(NULL, n * sizeof(uint64_t), PROT_READ | PROT_WRITE, MAP_SHARED, pool, KVTIER_MMAP_WORDS);

	CHECK(p != MAP_FAILED);
	return p;
}

int vt_range(int pool, unsigned long cmd, uint32_t first, uint32_t n)
{
	struct kvtier_range r = { .size = sizeof(r), .first = first, .n = n };

	return ioctl(pool, cmd, &r);
}

int vt_queue(uint32_t depth, int efd)
{
	struct kvtier_queue_create q = { .size = sizeof(q), .depth = depth, .eventfd = efd };

	return ioctl(vt_device(), KVTIER_IOC_QUEUE_CREATE, &q) ? -1 : q.fd;
}

int vt_submit(int queue, int pool, const struct kvtier_xfer *items, uint32_t n)
{
	struct kvtier_submit s = { .size = sizeof(s), .pool_fd = pool, .n = n, .item_bytes = sizeof(*items),
				   .items = (uintptr_t)items };

	return ioctl(queue, KVTIER_IOC_SUBMIT, &s);
}

int vt_reap(int queue, struct kvtier_done *done, uint32_t n)
{
	struct kvtier_reap r = { .size = sizeof(r), .n = n, .done = (uintptr_t)done };

	return ioctl(queue, KVTIER_IOC_REAP, &r);
}

int vt_wait(int queue, uint64_t user)
{
	struct pollfd p = { .fd = queue, .events = POLLIN };
	struct kvtier_done done;

	CHECK_EQ(poll(&p, 1, -1), 1);
	CHECK_EQ(vt_reap(queue, &done, 1), 1);
	CHECK_EQ(done.user, user);
	return done.result;
}

long long vt_sysfs(const char *name)
{
	char path[128], text[64] = "";
	int fd;

	snprintf(path, sizeof(path), "/sys/kernel/kvtier/%s", name);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	CHECK(fd >= 0);
	CHECK(read(fd, text, sizeof(text) - 1) > 0);
	close(fd);
	return atoll(text);
}

void vt_set_param(const char *name, unsigned long long value)
{
	char path[128];
	FILE *f;

	snprintf(path, sizeof(path), "/sys/module/kvtier/parameters/%s", name);
	f = fopen(path, "w");
	CHECK(f);
	CHECK(fprintf(f, "%llu\n", value) > 0);
	CHECK(!fclose(f));
}

int vt_file(const char *dir, int flags, off_t bytes)
{
	char path[128];
	int fd;

	snprintf(path, sizeof(path), "%s/vt.%d", dir, getpid());
	fd = open(path, O_CREAT | O_RDWR | O_TRUNC | O_CLOEXEC | flags, 0600);
	CHECK(fd >= 0);
	CHECK(!unlink(path));
	CHECK(!ftruncate(fd, bytes));
	return fd;
}

void vt_fill(uint8_t *p, size_t n, uint32_t seed)
{
	uint64_t x = seed * 0x9e3779b97f4a7c15ull + 1;

	for (size_t i = 0; i + 8 <= n; i += 8) {
		x = x * 6364136223846793005ull + 1442695040888963407ull;
		memcpy(p + i, &x, 8);
	}
}

bool vt_filled(const uint8_t *p, size_t n, uint32_t seed)
{
	uint64_t x = seed * 0x9e3779b97f4a7c15ull + 1;

	for (size_t i = 0; i + 8 <= n; i += 8) {
		x = x * 6364136223846793005ull + 1442695040888963407ull;
		if (memcmp(p + i, &x, 8))
			return false;
	}
	return true;
}

int vt_child(void (*fn)(void *), void *arg)
{
	int status;
	pid_t pid;

	fflush(stdout);
	pid = fork();
	CHECK(pid >= 0);
	if (!pid) {
		fn(arg);
		fflush(stdout);
		_exit(0);
	}
	CHECK_EQ(waitpid(pid, &status, 0), pid);
	return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

/* In a thread's own frame a longjmp would do; a child cannot, as it does not inherit the mapping. */
static volatile sig_atomic_t vt_hit;
static const volatile uint8_t *volatile vt_at;

static void vt_on_sigbus(int sig, siginfo_t *info, void *context)
{
	long page = sysconf(_SC_PAGESIZE);
	void *at = (void *)((uintptr_t)info->si_addr & -page);

	(void)sig;
	(void)context;
	vt_hit = 1;
	/* Something to read there, so that the instruction ends. The test is over with this page. */
	if (mmap(at, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED)
		_exit(1);
}

bool vt_sigbus(const volatile uint8_t *p)
{
	struct sigaction action = { .sa_sigaction = vt_on_sigbus, .sa_flags = SA_SIGINFO }, old;

	CHECK(!sigaction(SIGBUS, &action, &old));
	vt_hit = 0;
	vt_at = p;
	(void)*vt_at;
	CHECK(!sigaction(SIGBUS, &old, NULL));
	return vt_hit;
}

int vt_kernel(void)
{
	struct utsname u;
	int major, minor;

	CHECK(!uname(&u) && sscanf(u.release, "%d.%d", &major, &minor) == 2);
	return major * 100 + minor;
}

void vt_become_user(void)
{
	vt_device(); /* opened before: the node is root's and its group's */
	CHECK(!setgroups(0, NULL));
	CHECK(!setresgid(1000, 1000, 1000));
	CHECK(!setresuid(1000, 1000, 1000));
}

void vt_send_fd(int sock, int fd)
{
	char byte = 0, control[CMSG_SPACE(sizeof(int))] = { 0 };
	struct iovec iov = { .iov_base = &byte, .iov_len = 1 };
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control,
			      .msg_controllen = sizeof(control) };
	struct cmsghdr *c = CMSG_FIRSTHDR(&msg);

	c->cmsg_level = SOL_SOCKET;
	c->cmsg_type = SCM_RIGHTS;
	c->cmsg_len = CMSG_LEN(sizeof(int));
	memcpy(CMSG_DATA(c), &fd, sizeof(int));
	CHECK_EQ(sendmsg(sock, &msg, 0), 1);
}

int vt_recv_fd(int sock)
{
	char byte, control[CMSG_SPACE(sizeof(int))];
	struct iovec iov = { .iov_base = &byte, .iov_len = 1 };
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control,
			      .msg_controllen = sizeof(control) };
	int fd;

	CHECK_EQ(recvmsg(sock, &msg, MSG_CMSG_CLOEXEC), 1);
	CHECK(CMSG_FIRSTHDR(&msg));
	memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&msg)), sizeof(int));
	return fd;
}

/* What is left in the module, once the last closes (which a worker may finish) are through. */
static bool vt_module_empty(void)
{
	for (int i = 0; i < 2400; i++) {
		if (!vt_sysfs("bytes") && !vt_sysfs("pools_alive") && !vt_sysfs("../../module/kvtier/refcnt"))
			return true;
		usleep(50000);
	}
	printf("  left in the module: %lld bytes, %lld pools, %lld references\n", vt_sysfs("bytes"),
	       vt_sysfs("pools_alive"), vt_sysfs("../../module/kvtier/refcnt"));
	return false;
}

static bool vt_wanted(const char *name, int argc, char **argv)
{
	for (int i = 1; i < argc; i++)
		if (!strcmp(argv[i], name))
			return true;
	return argc < 2;
}

int main(int argc, char **argv)
{
	const char *program = strrchr(argv[0], '/') ? strrchr(argv[0], '/') + 1 : argv[0];
	int failed = 0, passed = 0, skipped = 0;
	unsigned int outcome;

	setvbuf(stdout, NULL, _IOLBF, 0);
	for (struct vt_case *c = vt_cases; c; c = c->next) {
		time_t begin = time(NULL);
		int status;
		pid_t pid;

		if (!vt_wanted(c->name, argc, argv))
			continue;
		fflush(stdout);
		pid = fork();
		if (!pid) {
			setpgid(0, 0);
			alarm(VT_TIMEOUT);
			c->fn();
			fflush(stdout);
			_exit(0);
		}
		if (pid < 0 || waitpid(pid, &status, 0) != pid)
			return 1;
		kill(-pid, SIGKILL);
		outcome = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
		if (outcome != 77 && !vt_module_empty())
			outcome = outcome ?: 1;
		printf("%s %s.%s", !outcome ? "ok  " : outcome == 77 ? "skip" : "FAIL", program, c->name);
		if (outcome > 128)
			printf(" (signal %u)", outcome - 128);
		if (time(NULL) - begin > 2)
			printf(" (%d s)", (int)(time(NULL) - begin));
		printf("\n");
		failed += outcome && outcome != 77;
		skipped += outcome == 77;
		passed += !outcome;
	}
	printf("%s: %d passed, %d failed, %d skipped\n", program, passed, failed, skipped);
	return failed || passed + skipped == 0;
}
