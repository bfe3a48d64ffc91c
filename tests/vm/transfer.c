// SPDX-License-Identifier: MIT
/* Transfers: the right bytes, one completion each, bounded, cancellable, and whoever dies meanwhile. */
#include <linux/fs.h>
#include <liburing.h>
#include <poll.h>
#include <pthread.h>
#include <sys/statvfs.h>

#include "vt.h"

#define FRAME 65536u

/* Write every frame, read it into another, for each way that a file can be open. */
static void round_trip(const char *dir, int flags, uint32_t frame)
{
	enum { N = 16 };
	int pool = vt_pool(0, frame, 2 * N), queue = vt_queue(N, -1), file;
	struct kvtier_xfer x[N];
	char path[64];
	uint8_t *p;

	snprintf(path, sizeof(path), "%s/probe", dir);
	file = open(path, O_CREAT | O_RDWR | flags, 0600);
	if (file < 0)
		SKIP("%s has no O_DIRECT (%s)", dir, strerror(errno));
	unlink(path);
	CHECK(pool >= 0 && queue >= 0 && !ftruncate(file, (off_t)N * frame));
	p = vt_map(pool, frame, 2 * N);
	for (int round = 0; round < 3; round++) {
		for (int dir_ = KVTIER_XFER_WRITE; dir_ >= KVTIER_XFER_READ; dir_--) {
			for (int i = 0; i < N; i++) {
				x[i] = (struct kvtier_xfer) { .op = dir_, .fd = file, .bytes = frame, .user = i,
							      .offset = (uint64_t)(N - 1 - i) * frame,
							      .frame = dir_ == KVTIER_XFER_WRITE ? i : N + i };
				if (dir_ == KVTIER_XFER_WRITE)
					vt_fill(p + (size_t)i * frame, frame, round * 100 + i);
			}
			CHECK_EQ(vt_submit(queue, pool, x, N), N);
			for (int got = 0, seen = 0; got < N;) {
				struct kvtier_done done[4];
				struct pollfd poll_ = { .fd = queue, .events = POLLIN };
				int n;

				CHECK_EQ(poll(&poll_, 1, 60000), 1);
				n = vt_reap(queue, done, 4);
				CHECK(n > 0);
				for (int i = 0; i < n; i++) {
					CHECK_EQ(done[i].result, frame);
					CHECK(!(seen & 1 << done[i].user));
					seen |= 1 << done[i].user;
				}
				got += n;
			}
		}
		for (int i = 0; i < N; i++)
			CHECK(vt_filled(p + (size_t)(N + i) * frame, frame, round * 100 + i));
	}
}

CASE(buffered_tmpfs) { round_trip("/tmp", 0, FRAME); }
CASE(buffered_disk) { round_trip("/mnt", 0, FRAME); }
CASE(direct_4k) { round_trip("/mnt", O_DIRECT, 4096); }
CASE(direct_64k) { round_trip("/mnt", O_DIRECT, FRAME); }
CASE(direct_2m) { round_trip("/mnt", O_DIRECT, 2 * MIB); }

/* Part of a frame, and only it. */
CASE(part_of_a_frame)
{
	int pool = vt_pool(0, 12288, 1), queue = vt_queue(1, -1), file = vt_file("/tmp", 0, 12288);
	struct kvtier_xfer x = { .op = KVTIER_XFER_READ, .fd = file, .frame_offset = 5000, .bytes = 3000, .offset = 17 };
	uint8_t *p = vt_map(pool, 12288, 1), data[12288];

	vt_fill(data, sizeof(data), 1);
	CHECK_EQ(pwrite(file, data, sizeof(data), 0), sizeof(data));
	memset(p, 0xee, 12288);
	CHECK_EQ(vt_submit(queue, pool, &x, 1), 1);
	CHECK_EQ(vt_wait(queue, 0), 3000);
	CHECK(!memcmp(p + 5000, data + 17, 3000));
	for (int i = 0; i < 12288; i++)
		CHECK(p[i] == 0xee || (i >= 5000 && i < 8000));
	/* At and past the end of the file: as read(2). */
	x.offset = 12288 - 10;
	CHECK_EQ(vt_submit(queue, pool, &x, 1), 1);
	CHECK_EQ(vt_wait(queue, 0), 10);
	x.offset = 99999;
	CHECK_EQ(vt_submit(queue, pool, &x, 1), 1);
	CHECK_EQ(vt_wait(queue, 0), 0);
}

CASE(bad_alignment_is_the_files)
{
	int pool = vt_pool(0, 4096, 1), queue = vt_queue(1, -1), file = open("/mnt/align", O_CREAT | O_RDWR | O_DIRECT, 0600);
	struct kvtier_xfer x = { .op = KVTIER_XFER_WRITE, .fd = file, .bytes = 100 };

	if (file < 0)
		SKIP("no O_DIRECT on /mnt (%s)", strerror(errno));
	unlink("/mnt/align");
	CHECK_EQ(vt_submit(queue, pool, &x, 1), 1);
	CHECK_EQ(vt_wait(queue, 0), -EINVAL);
}

/* Files that are more than bytes: a worker would read and write them in the wrong namespaces. */
CASE(no_pseudo_files)
{
	int pool = vt_pool(0, 4096, 1), queue = vt_queue(1, -1);
	static const char *const paths[] = { "/proc/version", "/proc/sys/kernel/hostname", "/sys/kernel/kvtier/bytes",
					     "/proc/self/mem" };

	for (unsigned int i = 0; i < sizeof(paths) / sizeof(paths[0]); i++) {
		struct kvtier_xfer x = { .op = KVTIER_XFER_READ, .fd = open(paths[i], O_RDONLY), .bytes = 1 };

		CHECK(x.fd >= 0);
		CHECK_ERR(vt_submit(queue, pool, &x, 1), EINVAL);
	}
	struct kvtier_xfer x = { .op = KVTIER_XFER_WRITE, .fd = open(paths[1], O_WRONLY), .bytes = 1 };

	CHECK(x.fd >= 0);
	CHECK_ERR(vt_submit(queue, pool, &x, 1), EINVAL);
}

/* One's transfers to a file system that hangs do not hold up another's. */
static void while_frozen(void *arg)
{
	enum { N = 64 };
	int pool = vt_pool(0, 4096, 1), stuck = vt_queue(N, -1), queue = vt_queue(1, -1);
	struct kvtier_xfer x[N], one = { .op = KVTIER_XFER_WRITE, .fd = vt_file("/tmp", 0, 0), .bytes = 4096, .user = 9 };

	for (int i = 0; i < N; i++)
		x[i] = (struct kvtier_xfer) { .op = KVTIER_XFER_WRITE, .fd = *(int *)arg, .bytes = 4096,
					      .offset = 4096u * i };
	CHECK_EQ(vt_submit(stuck, pool, x, N), N);
	usleep(300000);
	CHECK_EQ(vt_submit(queue, pool, &one, 1), 1);
	CHECK_EQ(vt_wait(queue, 9), 4096);
	CHECK_EQ(vt_reap(stuck, (struct kvtier_done[1]) { }, 1), 0);
	/* Killed, whatever it waits for: the transfers end by themselves later. */
	kill(getpid(), SIGKILL);
}

CASE(a_file_system_that_hangs)
{
	int mnt = open("/mnt", O_RDONLY), file = vt_file("/mnt", 0, 0), got;

	/* A write that was not given back what it holds would let this wait for ever. */
	round_trip("/mnt", O_DIRECT, 4096);
	round_trip("/mnt", 0, 4096);
	if (ioctl(mnt, FIFREEZE, 0))
		SKIP("/mnt cannot be frozen (%s)", strerror(errno));
	got = vt_child(while_frozen, &file);
	CHECK(!ioctl(mnt, FITHAW, 0));
	CHECK_EQ(got, -SIGKILL);
}

CASE(full_queue_and_eventfd)
{
	int event = eventfd(0, EFD_CLOEXEC), pool = vt_pool(0, 4096, 1), queue = vt_queue(3, event);
	int file = vt_file("/tmp", 0, 4096);
	struct kvtier_xfer x[5];
	struct kvtier_done done[5];
	uint64_t n, sum = 0;

	for (int i = 0; i < 5; i++)
		x[i] = (struct kvtier_xfer) { .op = KVTIER_XFER_WRITE, .fd = file, .bytes = 4096, .user = i };
	CHECK_EQ(vt_submit(queue, pool, x, 5), 3);
	/* In flight until reaped. */
	while (sum < 3) {
		CHECK_EQ(read(event, &n, 8), 8);
		sum += n;
	}
	CHECK_EQ(vt_submit(queue, pool, x + 3, 2), 0);
	CHECK_EQ(vt_reap(queue, done, 2), 2);
	CHECK_EQ(vt_submit(queue, pool, x + 3, 2), 2);
	CHECK_EQ(vt_submit(queue, pool, x, 1), 0);
	for (sum = 0; sum < 2; sum += n)
		CHECK_EQ(read(event, &n, 8), 8);
	CHECK_EQ(vt_reap(queue, done, 5), 3);
	CHECK_EQ(vt_reap(queue, done, 5), 0);
	CHECK_EQ(poll(&(struct pollfd) { .fd = queue, .events = POLLIN }, 1, 0), 0);
}

/* A frame in a transfer keeps its memory; one without memory takes no transfer. */
CASE(frames)
{
	int pool = vt_pool(KVTIER_POOL_LAZY, FRAME, 4), queue = vt_queue(8, -1), file = vt_file("/tmp", 0, FRAME);
	struct kvtier_xfer x = { .op = KVTIER_XFER_READ, .fd = file, .bytes = FRAME, .frame = 1 };

	/* Never touched: gets memory. */
	CHECK_EQ(vt_submit(queue, pool, &x, 1), 1);
	CHECK_EQ(vt_wait(queue, 0), FRAME);
	CHECK_EQ(vt_stat(pool).present, 1);
	CHECK_EQ(vt_range(pool, KVTIER_IOC_RELEASE, 1, 1), 1);
	CHECK_ERR(vt_submit(queue, pool, &x, 1), ENODATA);
	CHECK_EQ(vt_range(pool, KVTIER_IOC_POPULATE, 1, 1), 1);
	CHECK_EQ(vt_submit(queue, pool, &x, 1), 1);
	CHECK_EQ(vt_wait(queue, 0), FRAME);
}

/* Submits to a frozen file system: its workers wait, and what is behind them has not begun. */
enum { CANCELS = 128 };
static int *cancelled_then; /* shared with the parent, who thaws whatever happens here */

static void cancel_while_frozen(void *arg)
{
	int *fds = arg, pool = fds[0], queue = fds[1], file = fds[2];
	struct kvtier_cancel c = { .size = sizeof(c) };

	for (int i = 0; i < CANCELS; i++) {
		struct kvtier_xfer x = { .op = KVTIER_XFER_WRITE, .fd = file, .bytes = 4096, .user = i,
					 .offset = (uint64_t)i * 4096, .frame = i % 4 };

		CHECK_EQ(vt_submit(queue, pool, &x, 1), 1);
	}
	CHECK_ERR(vt_range(pool, KVTIER_IOC_RELEASE, 3, 1), EBUSY);
	for (int i = CANCELS - 1; i >= 0; i--) {
		c.user = i;
		*cancelled_then += ioctl(queue, KVTIER_IOC_CANCEL, &c);
	}
}

CASE(cancel)
{
	int fds[] = { vt_pool(0, 4096, 4), vt_queue(CANCELS, -1), vt_file("/mnt", 0, 0) }, queue = fds[1];
	int mnt = open("/mnt", O_RDONLY), told = 0, got;
	struct kvtier_drain d = { .size = sizeof(d) };
	static struct kvtier_done done[CANCELS];
	long long before = vt_sysfs("cancelled");

	cancelled_then = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	CHECK(cancelled_then != MAP_FAILED);
	if (ioctl(mnt, FIFREEZE, 0))
		SKIP("/mnt cannot be frozen (%s)", strerror(errno));
	got = vt_child(cancel_while_frozen, fds);
	CHECK(!ioctl(mnt, FITHAW, 0));
	CHECK_EQ(got, 0);
	/* A queue has 16 workers: so many may have begun. */
	CHECK(*cancelled_then >= CANCELS - 16 && *cancelled_then <= CANCELS);
	CHECK(!ioctl(queue, KVTIER_IOC_DRAIN, &d));
	CHECK_EQ(vt_reap(queue, done, CANCELS), CANCELS);
	for (int i = 0; i < CANCELS; i++) {
		CHECK(done[i].result == 4096 || done[i].result == -ECANCELED);
		told += done[i].result == -ECANCELED;
	}
	CHECK_EQ(told, *cancelled_then);
	CHECK_EQ(vt_sysfs("cancelled") - before, told);
	CHECK_EQ(vt_range(fds[0], KVTIER_IOC_RELEASE, 3, 1), 1);
}

/* Everything closed at once: closing waits, and nothing is left. */
CASE(close_with_work)
{
	for (int i = 0; i < 20; i++) {
		int pool = vt_pool(0, FRAME, 32), queue = vt_queue(64, -1), file = vt_file("/mnt", i % 2 ? O_DIRECT : 0, 32 * FRAME);
		struct kvtier_xfer x[32];

		for (int j = 0; j < 32; j++)
			x[j] = (struct kvtier_xfer) { .op = KVTIER_XFER_WRITE, .fd = file, .bytes = FRAME, .frame = j,
						      .offset = (uint64_t)j * FRAME };
		CHECK_EQ(vt_submit(queue, pool, x, 32), 32);
		close(file);
		close(pool);
		close(queue);
	}
}

CASE(file_size_limit)
{
	int pool = vt_pool(0, 4096, 1), queue = vt_queue(1, -1), file = vt_file("/tmp", 0, 0);
	struct rlimit limit = { .rlim_cur = 8192, .rlim_max = 8192 };
	struct kvtier_xfer x = { .op = KVTIER_XFER_WRITE, .fd = file, .bytes = 4096, .offset = 4097 };

	CHECK(!setrlimit(RLIMIT_FSIZE, &limit));
	CHECK_ERR(vt_submit(queue, pool, &x, 1), EFBIG);
	x.offset = 4096;
	CHECK_EQ(vt_submit(queue, pool, &x, 1), 1);
	CHECK_EQ(vt_wait(queue, 0), 4096);
}

/* The disk's word reaches the caller. */
CASE(disk_full)
{
	int pool = vt_pool(0, 2 * MIB, 1), queue = vt_queue(1, -1);
	int file = vt_file("/mnt", 0, 0), rest = vt_file("/mnt", 0, 0);
	long long before = vt_sysfs("errors_io");
	struct statvfs room;
	int result = 0;

	/* All but some is taken already. */
	CHECK(!fstatvfs(rest, &room));
	if (room.f_bavail * room.f_bsize > 64 * MIB)
		CHECK(!posix_fallocate(rest, 0, room.f_bavail * room.f_bsize - 48 * MIB));
	for (int i = 0; i < 512 && result >= 0; i++) {
		struct kvtier_xfer x = { .op = KVTIER_XFER_WRITE, .fd = file, .bytes = 2 * MIB,
					 .offset = (uint64_t)i * 2 * MIB };

		CHECK_EQ(vt_submit(queue, pool, &x, 1), 1);
		result = vt_wait(queue, 0);
	}
	CHECK_EQ(result, -ENOSPC);
	CHECK_EQ(vt_sysfs("errors_io"), before + 1);
}

static void uring_xfer(struct io_uring *ring, int queue, int pool, const struct kvtier_xfer *x, uint64_t user)
{
	struct io_uring_sqe *sqe = io_uring_get_sqe(ring);
	struct kvtier_uring_xfer *cmd;

	CHECK(sqe);
	io_uring_prep_rw(IORING_OP_URING_CMD, sqe, queue, NULL, 0, 0);
	sqe->cmd_op = KVTIER_URING_CMD_XFER;
	sqe->user_data = user;
	cmd = (struct kvtier_uring_xfer *)sqe->cmd;
	*cmd = (struct kvtier_uring_xfer) { .item = (uintptr_t)x, .pool_fd = pool };
}

static void uring_round(const char *dir, int flags)
{
	enum { N = 8 };
	int pool = vt_pool(0, FRAME, 2 * N), queue = vt_queue(N, -1), file = vt_file(dir, flags, N * FRAME);
	struct kvtier_xfer x[N];
	struct io_uring_cqe *cqe;
	struct io_uring ring;
	uint8_t *p = vt_map(pool, FRAME, 2 * N);

	CHECK(!io_uring_queue_init(2 * N, &ring, 0));
	for (int op = KVTIER_XFER_WRITE; op >= KVTIER_XFER_READ; op--) {
		for (int i = 0; i < N; i++) {
			x[i] = (struct kvtier_xfer) { .op = op, .fd = file, .bytes = FRAME, .offset = (uint64_t)i * FRAME,
						      .frame = op == KVTIER_XFER_WRITE ? i : N + i };
			if (op == KVTIER_XFER_WRITE)
				vt_fill(p + (size_t)i * FRAME, FRAME, i);
			uring_xfer(&ring, queue, pool, &x[i], i);
		}
		CHECK_EQ(io_uring_submit_and_wait(&ring, N), N);
		for (int i = 0; i < N; i++) {
			CHECK(!io_uring_wait_cqe(&ring, &cqe));
			CHECK_EQ(cqe->res, FRAME);
			io_uring_cqe_seen(&ring, cqe);
		}
	}
	for (int i = 0; i < N; i++)
		CHECK(vt_filled(p + (size_t)(N + i) * FRAME, FRAME, i));
	/* One too many; a bad item; a bad command. */
	for (int i = 0; i < N + 1; i++)
		uring_xfer(&ring, queue, pool, &x[0], i);
	CHECK_EQ(io_uring_submit_and_wait(&ring, N + 1), N + 1);
	for (int i = 0, busy = 0; i < N + 1; i++) {
		CHECK(!io_uring_wait_cqe(&ring, &cqe));
		CHECK(cqe->res == FRAME || cqe->res == -EBUSY);
		busy += cqe->res == -EBUSY;
		CHECK(busy <= 1);
		io_uring_cqe_seen(&ring, cqe);
	}
	x[0].frame = 99;
	uring_xfer(&ring, queue, pool, &x[0], 0);
	CHECK_EQ(io_uring_submit_and_wait(&ring, 1), 1);
	CHECK(!io_uring_wait_cqe(&ring, &cqe) && cqe->res == -EINVAL);
	io_uring_cqe_seen(&ring, cqe);
	uring_xfer(&ring, queue, pool, NULL, 0);
	CHECK_EQ(io_uring_submit_and_wait(&ring, 1), 1);
	CHECK(!io_uring_wait_cqe(&ring, &cqe) && cqe->res == -EFAULT);
	io_uring_cqe_seen(&ring, cqe);
	/* Left in flight when the ring goes. */
	x[0].frame = 0;
	for (int i = 0; i < N; i++)
		uring_xfer(&ring, queue, pool, &x[0], i);
	CHECK_EQ(io_uring_submit(&ring), N);
	io_uring_queue_exit(&ring);
}

CASE(uring_cmd_buffered) { uring_round("/tmp", 0); }

CASE(uring_cmd_direct)
{
	uring_round("/mnt", O_DIRECT);
}

/* Submitters, reapers and cancellers of one queue: each transfer completes once. */
enum { PER_THREAD = 200, THREADS = 4 };
static int shared_queue, shared_pool, shared_file;
static _Atomic int shared_done[THREADS * PER_THREAD], shared_left = THREADS * PER_THREAD;

static void *hammer(void *arg)
{
	int me = (int)(intptr_t)arg, sent = 0;

	while (shared_left > 0) {
		struct kvtier_xfer x = { .op = sent & 1, .fd = shared_file, .bytes = 4096, .frame = me,
					 .user = me * PER_THREAD + sent, .offset = me * 4096u };
		struct kvtier_cancel c = { .size = sizeof(c), .user = x.user };
		struct kvtier_done done[8];
		int n;

		if (sent < PER_THREAD && vt_submit(shared_queue, shared_pool, &x, 1) == 1)
			sent++;
		if (sent % 5 == 0)
			CHECK(ioctl(shared_queue, KVTIER_IOC_CANCEL, &c) >= 0);
		n = vt_reap(shared_queue, done, 8);
		CHECK(n >= 0);
		for (int i = 0; i < n; i++) {
			CHECK(done[i].result == 4096 || done[i].result == -ECANCELED);
			CHECK_EQ(shared_done[done[i].user]++, 0);
			shared_left--;
		}
	}
	return NULL;
}

CASE(threads)
{
	pthread_t threads[THREADS];

	shared_queue = vt_queue(16, -1);
	shared_pool = vt_pool(0, 4096, THREADS);
	shared_file = vt_file("/tmp", 0, 4096 * THREADS);
	for (int i = 0; i < THREADS; i++)
		CHECK(!pthread_create(&threads[i], NULL, hammer, (void *)(intptr_t)i));
	for (int i = 0; i < THREADS; i++)
		CHECK(!pthread_join(threads[i], NULL));
	for (int i = 0; i < THREADS * PER_THREAD; i++)
		CHECK_EQ(shared_done[i], 1);
}
