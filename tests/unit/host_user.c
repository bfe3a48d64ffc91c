// SPDX-License-Identifier: MIT
/*
 * The user-space host where the machine refuses things: O_DIRECT, locked memory, NUMA, io_uring,
 * nameless files, whole transfers. Functions of libc and liburing are bent by those of the same
 * name below, which the program's symbols put before the libraries'.
 */
#include <check.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <numaif.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "lib/host_rig.h"
#include "lib/scratch.h"

#define FRAME (64u << 10)
#define DEPTH 16u

#ifdef __has_feature /* clang */
#define SANITIZED (__has_feature(address_sanitizer) || __has_feature(thread_sanitizer))
#elif defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#else
#define SANITIZED 0
#endif

/* ---- the bent functions ---- */

enum { WHOLE, SHORT, TRICKLE, NOTHING, INTERRUPTED, BROKEN, GATED };

static struct {
	int setfl, tmpfile, mbind, buffers; /* errno, or 0 */
	int direct_write, any_write;	    /* errno of a pwrite(): to a direct file, to any */
	int statx;			    /* 0: as it is; 1: knows no DIOALIGN; 2: says the next two */
	uint32_t mem_align, offset_align;   /* the latter is also demanded of short transfers */
	uint32_t registered;		    /* buffers, so far */
	_Atomic int transfer; /* of a read or write: one of the above */
	_Atomic int bent;     /* how often @transfer did something */
	_Atomic int gate;     /* opens GATED */
	_Atomic int slow;     /* microseconds before the eventfd is cleared */
	_Atomic int submit;   /* errno of io_uring_submit(), so often: */
	_Atomic int submits;
} bend;

int fcntl(int fd, int cmd, ...)
{
	va_list ap;
	long arg;

	va_start(ap, cmd);
	arg = va_arg(ap, long);
	va_end(ap);
	if (cmd == F_SETFL && (arg & O_DIRECT) && bend.setfl) {
		errno = bend.setfl;
		return -1;
	}
	return (int)syscall(SYS_fcntl, fd, cmd, arg);
}

int open(const char *path, int flags, ...)
{
	va_list ap;
	int mode = 0;

	if (flags & (O_CREAT | O_TMPFILE)) {
		va_start(ap, flags);
		mode = va_arg(ap, int);
		va_end(ap);
	}
	if ((flags & O_TMPFILE) == O_TMPFILE && bend.tmpfile) {
		errno = bend.tmpfile;
		return -1;
	}
	return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

int statx(int fd, const char *restrict path, int flags, unsigned int mask, struct statx *restrict st)
{
	int ret = (int)syscall(SYS_statx, fd, path, flags, mask, st);

	if (bend.statx)
		st->stx_mask &= ~0x2000u;
	if (bend.statx == 2) {
		st->stx_mask |= 0x2000u;
		memcpy((char *)st + 152, &bend.mem_align, 4);
		memcpy((char *)st + 156, &bend.offset_align, 4);
	}
	return ret;
}

long mbind(void *addr, unsigned long len, int mode, const unsigned long *mask, unsigned long max, unsigned int flags)
{
	if (bend.mbind) {
		errno = bend.mbind;
		return -1;
	}
	return syscall(SYS_mbind, addr, len, mode, mask, max, flags);
}

int eventfd_read(int fd, eventfd_t *value)
{
	usleep((useconds_t)atomic_load(&bend.slow));
	return read(fd, value, sizeof(*value)) == sizeof(*value) ? 0 : -1;
}

/* The sanitizers' own mlock() does nothing. */
int mlock(const void *addr, size_t len)
{
	return (int)syscall(SYS_mlock, addr, len);
}

/* What is left of a transfer of @n bytes, or -1 with errno. */
static ssize_t bent_bytes(size_t n, uint64_t at)
{
	switch (atomic_load(&bend.transfer)) {
	case SHORT: /* by half, and to where a direct transfer cannot go on */
		if (bend.offset_align && at % bend.offset_align) {
			errno = EINVAL;
			return -1;
		}
		if (n > 8192) {
			atomic_fetch_add(&bend.bent, 1);
			return (ssize_t)n / 2 + 512;
		}
		break;
	case TRICKLE:
		atomic_fetch_add(&bend.bent, 1);
		return n < 512 ? (ssize_t)n : 512;
	case NOTHING:
		return 0;
	case INTERRUPTED:
		if (atomic_fetch_add(&bend.bent, 1) % 2 == 0) {
			errno = EINTR;
			return -1;
		}
		break;
	case BROKEN:
		errno = EIO;
		return -1;
	case GATED:
		atomic_fetch_add(&bend.bent, 1);
		while (!atomic_load(&bend.gate))
			usleep(100);
	}
	return (ssize_t)n;
}

ssize_t pread(int fd, void *buf, size_t n, off_t at)
{
	ssize_t bytes = bent_bytes(n, (uint64_t)at);

	return bytes <= 0 ? bytes : (ssize_t)syscall(SYS_pread64, fd, buf, bytes, at);
}

ssize_t pwrite(int fd, const void *buf, size_t n, off_t at)
{
	ssize_t bytes = bent_bytes(n, (uint64_t)at);

	if (bend.any_write || (bend.direct_write && (syscall(SYS_fcntl, fd, F_GETFL) & O_DIRECT))) {
		errno = bend.any_write ? bend.any_write : bend.direct_write;
		return -1;
	}
	return bytes <= 0 ? bytes : (ssize_t)syscall(SYS_pwrite64, fd, buf, bytes, at);
}

/* The entries that wait are cut as bent_bytes() says. */
static void cut_entries(struct io_uring_sq *sq)
{
	struct io_uring_sqe *sqe;
	unsigned int i;
	ssize_t bytes;

	for (i = sq->sqe_head; i != sq->sqe_tail; i++) {
		sqe = &sq->sqes[i & sq->ring_mask];
		if (sqe->opcode == IORING_OP_FADVISE)
			continue;
		bytes = bent_bytes(sqe->len, sqe->off);
		if (bytes < 0)
			sqe->fd = -1; /* fails by itself */
		else
			sqe->len = (uint32_t)bytes;
	}
}

int io_uring_submit(struct io_uring *ring)
{
	int (*real)(struct io_uring *) = (int (*)(struct io_uring *))dlsym(RTLD_NEXT, "io_uring_submit");

	if (atomic_load(&bend.submits) > 0) {
		atomic_fetch_sub(&bend.submits, 1);
		return -atomic_load(&bend.submit);
	}
	if (atomic_load(&bend.transfer) == SHORT || atomic_load(&bend.transfer) == TRICKLE)
		cut_entries(&ring->sq);
	return real(ring);
}

int io_uring_register_buffers_update_tag(struct io_uring *ring, unsigned int off, const struct iovec *iov,
					 const __u64 *tags, unsigned int n)
{
	int (*real)(struct io_uring *, unsigned int, const struct iovec *, const __u64 *, unsigned int) =
		(int (*)(struct io_uring *, unsigned int, const struct iovec *, const __u64 *, unsigned int))dlsym(
			RTLD_NEXT, "io_uring_register_buffers_update_tag");

	if (bend.buffers && iov->iov_base)
		return -bend.buffers;
	bend.registered += iov->iov_base != NULL;
	return real(ring, off, iov, tags, n);
}

/* ---- tests ---- */

/* False, and told, where io_uring is not to be had. */
static bool open_rig(struct rig *r, uint32_t io, const char *dir, uint32_t slots)
{
	int ret = rig_host(r, KVT_HOST_USER, io, FRAME, DEPTH);

	if (ret == -EPERM || ret == -ENOSYS) {
		fprintf(stderr, "SKIP: %s\n", kvt_last_error());
		return false;
	}
	must(ret);
	rig_fill(r, dir, slots, slots);
	return true;
}

static void write_and_read(struct rig *r, uint32_t slots, uint64_t key)
{
	uint32_t i;

	for (i = 0; i < slots; i++) {
		fill(frame_at(r, i), FRAME, key + i);
		ck_assert_int_eq(transfer(r, xfer(r, KVT_XFER_WRITE, i, i)), 0);
	}
	for (i = 0; i < slots; i++) {
		memset(frame_at(r, 0), 0, FRAME);
		ck_assert_int_eq(transfer(r, xfer(r, KVT_XFER_READ, i, 0)), 0);
		ck_assert(holds(frame_at(r, 0), FRAME, key + i));
	}
}

/* Whether the disk of test_dir() has O_DIRECT when nothing is bent: the cases below need that. */
static bool disk_is_direct(void)
{
	struct kvt_file_info info;

	must(kvt_file_probe(test_dir(), &info));
	if (!info.direct)
		fprintf(stderr, "SKIP: %s: choose a directory with KVT_TEST_DIR\n", info.reason);
	return info.direct;
}

static void buffered_because(uint32_t io, const char *why)
{
	struct kvt_file_info info;
	struct rig r;

	if (!open_rig(&r, io, test_dir(), 4))
		return;
	kvt_file_info(r.file, &info);
	ck_assert(!info.direct);
	ck_assert_msg(strstr(info.reason, why) != NULL, "'%s' does not say '%s'", info.reason, why);
	ck_assert_msg(strstr(info.reason, info.fs) != NULL, "'%s' does not name %s", info.reason, info.fs);
	ck_assert(!(fcntl(kvt_file_fd(r.file), F_GETFL) & O_DIRECT));
	write_and_read(&r, 4, 50);
	rig_close(&r);
}

START_TEST(o_direct_is_refused_at_open)
{
	if (!disk_is_direct())
		return;
	bend.setfl = EINVAL;
	buffered_because((uint32_t)_i, "refuses O_DIRECT (EINVAL)");
}
END_TEST

START_TEST(o_direct_is_refused_at_the_first_write)
{
	if (!disk_is_direct())
		return;
	bend.direct_write = EINVAL;
	buffered_because((uint32_t)_i, "refuses a direct transfer of 4096 bytes (EINVAL)");
}
END_TEST

START_TEST(statx_says_no)
{
	bend.statx = 2;
	buffered_because((uint32_t)_i, "has no O_DIRECT");
}
END_TEST

START_TEST(alignment_that_slots_do_not_have)
{
	bend.statx = 2;
	bend.mem_align = 512;
	bend.offset_align = 128 << 10;
	buffered_because((uint32_t)_i, "wants O_DIRECT aligned to 131072 bytes (memory: 512), slots are 64 KiB");
	bend.mem_align = 8192;
	bend.offset_align = 512;
	buffered_because((uint32_t)_i, "wants O_DIRECT aligned to 512 bytes (memory: 8192)");
}
END_TEST

/* Before Linux 6.1 statx() does not tell: the trial does. */
START_TEST(a_kernel_without_dioalign)
{
	struct kvt_file_info info;
	struct rig r;

	if (!disk_is_direct())
		return;
	bend.statx = 1;
	if (!open_rig(&r, (uint32_t)_i, test_dir(), 4))
		return;
	kvt_file_info(r.file, &info);
	ck_assert(info.direct);
	ck_assert_uint_eq(info.offset_align, 4096);
	write_and_read(&r, 4, 1);
	rig_close(&r);
}
END_TEST

/* Whatever the alignment, lengths are rounded up to it and no further than the slot. */
START_TEST(large_alignments)
{
	struct kvt_file_info info;
	struct kvt_xfer x;
	struct rig r;

	if (!disk_is_direct())
		return;
	bend.statx = 2;
	bend.mem_align = 4096;
	bend.offset_align = 16384;
	if (!open_rig(&r, (uint32_t)_i, test_dir(), 4))
		return;
	kvt_file_info(r.file, &info);
	ck_assert(info.direct);
	ck_assert_uint_eq(info.offset_align, 16384);
	write_and_read(&r, 4, 1);
	fill(frame_at(&r, 0), FRAME, 90);
	x = xfer(&r, KVT_XFER_WRITE, 3, 0);
	x.bytes = 1;
	ck_assert_int_eq(transfer(&r, x), 0);
	ck_assert_int_eq(transfer(&r, xfer(&r, KVT_XFER_READ, 3, 1)), 0);
	ck_assert(!memcmp(frame_at(&r, 0), frame_at(&r, 1), 16384));
	fill(frame_at(&r, 0), FRAME, 4);
	ck_assert(!memcmp(frame_at(&r, 0) + 16384, frame_at(&r, 1) + 16384, FRAME - 16384));
	rig_close(&r);
}
END_TEST

/* What passed through the page cache does not stay there. */
START_TEST(buffered_slots_leave_the_page_cache)
{
	unsigned char cached[4 * FRAME / 4096];
	struct rig r;
	uint32_t i;
	void *map;

	if (!disk_is_direct())
		return;
	bend.setfl = EINVAL;
	if (!open_rig(&r, (uint32_t)_i, test_dir(), 4))
		return;
	write_and_read(&r, 4, 1);
	ck_assert_int_eq(fsync(kvt_file_fd(r.file)), 0); /* dirty pages cannot be dropped yet */
	for (i = 0; i < 4; i++)
		ck_assert_int_eq(transfer(&r, xfer(&r, KVT_XFER_READ, i, i)), 0);
	/* Looked at without reading, which would fetch them. */
	map = mmap(NULL, 4 * FRAME, PROT_READ, MAP_SHARED, kvt_file_fd(r.file), 0);
	ck_assert(map != MAP_FAILED);
	ck_assert_int_eq(mincore(map, 4 * FRAME, cached), 0);
	for (i = 0; i < sizeof(cached); i++)
		ck_assert_msg(!(cached[i] & 1), "page %u is in the cache", i);
	for (i = 0; i < 4; i++)
		ck_assert(holds(frame_at(&r, i), FRAME, 1 + i));
	munmap(map, 4 * FRAME);
	rig_close(&r);
}
END_TEST

/* Where a standard stream is closed, what the process prints does not go into the slots. */
START_TEST(no_standard_stream)
{
	struct rig r;
	int kept, fd;

	must(rig_host(&r, KVT_HOST_USER, KVT_IO_THREADS, FRAME, DEPTH));
	kept = fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 3);
	close(STDOUT_FILENO);
	rig_fill(&r, "/dev/shm", 2, 2);
	fd = kvt_file_fd(r.file);
	dup2(kept, STDOUT_FILENO);
	close(kept);
	ck_assert_int_gt(fd, STDERR_FILENO);
	ck_assert(fcntl(fd, F_GETFD) & FD_CLOEXEC);
	write_and_read(&r, 2, 7);
	rig_close(&r);
}
END_TEST

START_TEST(no_nameless_files)
{
	char dir[512];
	struct stat st;
	struct rig r;

	snprintf(dir, sizeof(dir), "%s/kvt-named-XXXXXX", test_scratch());
	ck_assert_ptr_nonnull(mkdtemp(dir));
	bend.tmpfile = EOPNOTSUPP;
	if (open_rig(&r, (uint32_t)_i, dir, 4)) {
		ck_assert_int_eq(fstat(kvt_file_fd(r.file), &st), 0);
		ck_assert_int_eq(st.st_nlink, 0);
		ck_assert_int_eq(st.st_mode & 0777, 0600);
		ck_assert_int_eq(rmdir(dir), 0); /* empty */
		write_and_read(&r, 4, 1);
		rig_close(&r);
	}
	rmdir(dir);
}
END_TEST

START_TEST(the_first_write_finds_no_space)
{
	struct kvt_file_params params = { .dir = test_dir(), .n_slots = 4 };
	struct kvt_file_info info;
	struct kvt_file *file;
	struct rig r;

	must(rig_host(&r, KVT_HOST_USER, KVT_IO_THREADS, FRAME, DEPTH));
	bend.any_write = ENOSPC;
	ck_assert_int_eq(kvt_file_open(r.host, &params, &file), -ENOSPC);
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), test_dir()));
	ck_assert_int_eq(kvt_file_probe(test_dir(), &info), -ENOSPC);
	bend.any_write = EIO;
	ck_assert_int_eq(kvt_file_open(r.host, &params, &file), -EIO);
	kvt_host_close(r.host);
}
END_TEST

START_TEST(short_transfers_go_on)
{
	struct rig r;

	if (!disk_is_direct())
		return;
	bend.statx = 2;
	bend.mem_align = bend.offset_align = 4096;
	if (!open_rig(&r, (uint32_t)_i, test_dir(), 4))
		return;
	atomic_store(&bend.transfer, SHORT);
	write_and_read(&r, 4, 7);
	/* 64, 32 and 16 KiB, twice for each slot. */
	ck_assert_int_eq(atomic_load(&bend.bent), 4 * 2 * 3);
	atomic_store(&bend.transfer, WHOLE);
	rig_close(&r);
}
END_TEST

/* However small the pieces: what gets on is not given up. */
START_TEST(trickling_transfers_arrive)
{
	struct rig r;

	if (!open_rig(&r, (uint32_t)_i, "/dev/shm", 2))
		return;
	atomic_store(&bend.transfer, TRICKLE);
	write_and_read(&r, 2, 7);
	ck_assert_int_eq(atomic_load(&bend.bent), 2 * 2 * FRAME / 512);
	atomic_store(&bend.transfer, WHOLE);
	rig_close(&r);
}
END_TEST

START_TEST(transfers_that_do_not_get_on)
{
	struct rig r;

	if (!open_rig(&r, KVT_IO_THREADS, test_dir(), 2))
		return;
	atomic_store(&bend.transfer, NOTHING);
	ck_assert_int_eq(transfer(&r, xfer(&r, KVT_XFER_WRITE, 0, 0)), -EIO);
	ck_assert_int_eq(transfer(&r, xfer(&r, KVT_XFER_READ, 0, 0)), -EIO);
	atomic_store(&bend.transfer, BROKEN);
	ck_assert_int_eq(transfer(&r, xfer(&r, KVT_XFER_WRITE, 0, 0)), -EIO);
	atomic_store(&bend.transfer, INTERRUPTED);
	write_and_read(&r, 2, 3);
	atomic_store(&bend.transfer, WHOLE);
	rig_close(&r);
}
END_TEST

START_TEST(cancelled_before_their_start)
{
	struct kvt_xfer x[DEPTH];
	uint32_t i, cancelled = 0;
	struct pollfd p = { .events = POLLIN };
	struct kvt_done done;
	struct rig r;

	if (!open_rig(&r, KVT_IO_THREADS, test_dir(), DEPTH))
		return;
	p.fd = kvt_host_eventfd(r.host);
	for (i = 0; i < DEPTH; i++) {
		fill(frame_at(&r, i), FRAME, i);
		x[i] = xfer(&r, KVT_XFER_WRITE, i, i);
		x[i].user = i / 2; /* two of each */
	}
	atomic_store(&bend.transfer, GATED);
	ck_assert_int_eq(kvt_host_submit(r.host, x, DEPTH), DEPTH);
	while (atomic_load(&bend.bent) < 4)
		usleep(100); /* each of the four workers has one */
	ck_assert_int_eq(kvt_host_cancel(r.host, 0), 0);
	ck_assert_int_eq(kvt_host_cancel(r.host, 3), 1);
	ck_assert_int_eq(kvt_host_cancel(r.host, 3), 0);
	ck_assert_int_eq(kvt_host_cancel(r.host, DEPTH), 0);
	/* They are to be reaped at once, while the others are stuck, and the eventfd tells. */
	ck_assert_int_eq(poll(&p, 1, 10000), 1);
	for (i = 0; i < 2; i++) {
		done = wait_one(r.host);
		ck_assert_uint_eq(done.user, 3);
		ck_assert_int_eq(done.result, -ECANCELED);
	}
	atomic_store(&bend.gate, 1);
	for (i = 0; i < DEPTH - 2; i++)
		cancelled += wait_one(r.host).result != 0;
	ck_assert_uint_eq(cancelled, 0);
	for (i = 0; i < DEPTH; i++) {
		ck_assert_int_eq(transfer(&r, xfer(&r, KVT_XFER_READ, i, 0)), 0);
		ck_assert(i / 2 == 3 ? zeros(frame_at(&r, 0), FRAME) : holds(frame_at(&r, 0), FRAME, i));
	}
	rig_close(&r);
}
END_TEST

START_TEST(io_uring_is_busy_for_a_while)
{
	const int errors[] = { EAGAIN, EBUSY, EINTR };
	struct rig r;
	uint32_t i;

	if (!open_rig(&r, KVT_IO_URING, test_dir(), 4))
		return;
	for (i = 0; i < 3; i++) {
		atomic_store(&bend.submit, errors[i]);
		atomic_store(&bend.submits, 3);
		write_and_read(&r, 4, i);
		ck_assert_int_eq(atomic_load(&bend.submits), 0);
	}
	rig_close(&r);
}
END_TEST

/* What ends between the last look and the clearing of the eventfd is not lost. */
START_TEST(completions_race_the_clearing)
{
	struct rig r;

	if (!open_rig(&r, (uint32_t)_i, test_dir(), 4))
		return;
	atomic_store(&bend.slow, 20000);
	write_and_read(&r, 4, 1);
	atomic_store(&bend.slow, 0);
	rig_close(&r);
}
END_TEST

START_TEST(io_uring_stops_taking_entries)
{
	struct kvt_xfer x[DEPTH];
	struct kvt_done done[DEPTH];
	struct rig r;
	uint32_t i;

	if (!open_rig(&r, KVT_IO_URING, test_dir(), DEPTH))
		return;
	for (i = 0; i < DEPTH; i++)
		x[i] = xfer(&r, KVT_XFER_WRITE, i, i);
	atomic_store(&bend.submit, EPERM);
	atomic_store(&bend.submits, 1);
	ck_assert_int_eq(kvt_host_submit(r.host, x, DEPTH), DEPTH);
	kvt_host_drain(r.host);
	ck_assert_int_eq(kvt_host_reap(r.host, done, DEPTH), DEPTH);
	for (i = 0; i < DEPTH; i++)
		ck_assert_int_eq(done[i].result, -EPERM);
	write_and_read(&r, DEPTH, 9); /* and were it to begin again, nothing is stale */
	rig_close(&r);
}
END_TEST

START_TEST(buffers_are_not_registered)
{
	struct kvt_pool_params params = { .n_frames = 4, .pinned = true, .node = -1 };
	struct rig r;

	if (!open_rig(&r, KVT_IO_URING, test_dir(), 4))
		return;
	kvt_pool_destroy(r.host, r.pool);
	bend.buffers = _i ? ENOMEM : 0;
	must(kvt_pool_create(r.host, &params, &r.pool));
	ck_assert(r.pool->pinned);
	write_and_read(&r, 4, 1);
	rig_close(&r);
}
END_TEST

/* Places in the ring's table of buffers are used again. */
START_TEST(buffers_come_and_go)
{
	struct kvt_pool_params params = { .n_frames = 1, .pinned = true, .node = -1 };
	struct kvt_pool *pool;
	struct rig r;
	uint32_t i;

	if (!open_rig(&r, KVT_IO_URING, test_dir(), 1))
		return;
	for (i = 0; i < 600; i++) {
		must(kvt_pool_create(r.host, &params, &pool));
		kvt_pool_destroy(r.host, pool);
	}
	ck_assert_uint_eq(bend.registered, 600);
	rig_close(&r);
}
END_TEST

/* More than the kernel registers in one piece: frames on both sides of the seam. */
START_TEST(a_pool_of_several_registered_buffers)
{
	const uint32_t frames = (1u << 30) / FRAME + 2;
	struct kvt_pool_params params = { .n_frames = frames, .pinned = true, .node = -1 };
	struct rig r;
	uint32_t i;
	int ret;

	if (sysconf(_SC_AVPHYS_PAGES) < (4ll << 30) / 4096) {
		fprintf(stderr, "SKIP: less than 4 GiB of free memory\n");
		return;
	}
	if (!open_rig(&r, KVT_IO_URING, test_dir(), 4))
		return;
	kvt_pool_destroy(r.host, r.pool);
	r.pool = NULL;
	ret = kvt_pool_create(r.host, &params, &r.pool);
	if (ret == -ENOMEM)
		fprintf(stderr, "SKIP: %s\n", kvt_last_error());
	for (i = 0; !ret && i < 4; i++) {
		fill(frame_at(&r, frames - 4 + i), FRAME, i);
		ck_assert_int_eq(transfer(&r, xfer(&r, KVT_XFER_WRITE, i, frames - 4 + i)), 0);
	}
	for (i = 0; !ret && i < 4; i++) {
		ck_assert_int_eq(transfer(&r, xfer(&r, KVT_XFER_READ, i, frames - 1 - i)), 0);
		ck_assert(holds(frame_at(&r, frames - 1 - i), FRAME, i));
	}
	rig_close(&r);
}
END_TEST

static _Atomic int warnings;

static void count_warning(void *user, enum kvt_log_level level, const char *line)
{
	(void)user;
	if (level == KVT_LOG_WARN && strstr(line, "NUMA node"))
		atomic_fetch_add(&warnings, 1);
}

START_TEST(mbind_is_refused)
{
	struct kvt_pool_params params = { .n_frames = 4, .node = 0 };
	struct kvt_pool *a, *b;
	struct rig r;

	must(rig_host(&r, KVT_HOST_USER, KVT_IO_THREADS, FRAME, DEPTH));
	kvt_set_log(count_warning, NULL);
	bend.mbind = EPERM;
	must(kvt_pool_create(r.host, &params, &a));
	must(kvt_pool_create(r.host, &params, &b));
	ck_assert_int_eq(a->node, -1);
	ck_assert_int_eq(b->node, -1);
	ck_assert_int_eq(atomic_load(&warnings), 1);
	kvt_pool_destroy(r.host, a);
	kvt_pool_destroy(r.host, b);
	params.numa_strict = true;
	ck_assert_int_eq(kvt_pool_create(r.host, &params, &a), -EPERM);
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "NUMA node 0"));
	bend.mbind = 0;
	params.node = 1000;
	ck_assert_int_eq(kvt_pool_create(r.host, &params, &a), -EINVAL);
	params.node = 100000;
	ck_assert_int_eq(kvt_pool_create(r.host, &params, &a), -EINVAL);
	kvt_host_close(r.host);
}
END_TEST

/* The flags that the kernel keeps for the mapping that begins at @base. */
static bool mapping_has(const void *base, const char *flag)
{
	FILE *f = fopen("/proc/self/smaps", "re");
	char line[512], begin[32];
	bool here = false, has = false;

	ck_assert_ptr_nonnull(f);
	snprintf(begin, sizeof(begin), "%lx-", (unsigned long)(uintptr_t)base);
	while (!has && fgets(line, sizeof(line), f)) {
		if (!strncmp(line, begin, strlen(begin)))
			here = true;
		else if (here && !strncmp(line, "VmFlags:", 8))
			break;
	}
	has = here && strstr(line, flag);
	fclose(f);
	return has;
}

START_TEST(transparent_huge_pages_unasked)
{
	struct kvt_pool_params params = { .n_frames = 33, .node = -1 };
	struct kvt_pool *pool;
	struct rig r;

	if (access("/sys/kernel/mm/transparent_hugepage", F_OK)) {
		fprintf(stderr, "SKIP: transparent_huge_pages_unasked: this kernel has none\n");
		return;
	}
	must(rig_host(&r, KVT_HOST_USER, KVT_IO_AUTO, FRAME, DEPTH));
	must(kvt_pool_create(r.host, &params, &pool));
	ck_assert(!pool->hugepages);
	ck_assert_uint_eq((uintptr_t)pool->base % (2 << 20), 0);
	ck_assert(mapping_has(pool->base, " hg"));
	kvt_pool_destroy(r.host, pool);
	kvt_host_close(r.host);
}
END_TEST

START_TEST(huge_pages_or_not)
{
	struct kvt_pool_params params = { .n_frames = 64, .node = -1, .hugepages = true };
	void *huge = mmap(NULL, 4 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB, -1, 0);
	struct kvt_pool *pool;
	struct rig r;

	if (huge == MAP_FAILED)
		fprintf(stderr, "no huge pages here: only the fallback is tested\n");
	else
		munmap(huge, 4 << 20);
	must(rig_host(&r, KVT_HOST_USER, KVT_IO_AUTO, FRAME, DEPTH));
	must(kvt_pool_create(r.host, &params, &pool));
	ck_assert_int_eq(pool->hugepages, huge != MAP_FAILED);
	ck_assert_uint_eq((uintptr_t)pool->base % (2 << 20), 0);
	ck_assert(zeros(pool->base, 4 << 20));
	kvt_pool_destroy(r.host, pool);
	params.n_frames = 63; /* a rounded-up mapping would be larger than what was asked for */
	must(kvt_pool_create(r.host, &params, &pool));
	ck_assert(!pool->hugepages);
	ck_assert_uint_eq((uintptr_t)pool->base % (2 << 20), 0);
	ck_assert(zeros(pool->base, 63 * FRAME));
	kvt_pool_destroy(r.host, pool);
	kvt_host_close(r.host);
}
END_TEST

START_TEST(more_frames_than_the_machine_has)
{
	struct kvt_pool_params params = { .n_frames = UINT32_MAX, .pinned = true, .node = -1 };
	struct kvt_pool *pool;
	struct rig r;

	must(rig_host(&r, KVT_HOST_USER, KVT_IO_AUTO, 2 << 20, DEPTH));
	ck_assert_int_eq(kvt_pool_create(r.host, &params, &pool), -ENOMEM);
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "the machine has "));
	kvt_host_close(r.host);
}
END_TEST

static void drop_ipc_lock(void)
{
	struct __user_cap_header_struct header = { .version = _LINUX_CAPABILITY_VERSION_3 };
	struct __user_cap_data_struct data[2];

	ck_assert_int_eq(syscall(SYS_capget, &header, data), 0);
	data[0].effective &= ~(1u << CAP_IPC_LOCK);
	ck_assert_int_eq(syscall(SYS_capset, &header, data), 0);
}

START_TEST(locked_memory_is_limited)
{
	struct rlimit limit = { .rlim_cur = 64 << 10, .rlim_max = 64 << 10 };
	struct kvt_pool_params params = { .n_frames = 16, .pinned = true, .node = -1 };
	struct kvt_pool *pool, *other;
	struct rig r;
	int ret;

	ck_assert_int_eq(setrlimit(RLIMIT_MEMLOCK, &limit), 0);
	drop_ipc_lock();
	ret = rig_host(&r, KVT_HOST_USER, (uint32_t)_i, FRAME, DEPTH);
	if (ret == -ENOMEM && _i == KVT_IO_URING) {
		/* Rings count too, and those of all of the user's processes. */
		ck_assert_ptr_nonnull(strstr(kvt_last_error(), "RLIMIT_MEMLOCK is 64 KiB"));
		return;
	}
	must(ret);
	ck_assert_int_eq(kvt_pool_create(r.host, &params, &pool), -ENOMEM);
	ck_assert_str_eq(kvt_last_error(), "RLIMIT_MEMLOCK is 64 KiB, 1 MiB asked: ulimit -l, or LimitMEMLOCK=");
	params.n_frames = 1;
	must(kvt_pool_create(r.host, &params, &pool));
	ck_assert(pool->pinned);
	ck_assert_int_eq(kvt_pool_create(r.host, &params, &other), -ENOMEM);
	ck_assert_str_eq(kvt_last_error(), "RLIMIT_MEMLOCK is 64 KiB, 64 KiB asked, 64 KiB locked already: "
					   "ulimit -l, or LimitMEMLOCK=");
	kvt_pool_destroy(r.host, pool);
	/* Pageable frames need no leave, and what was refused has left nothing locked. */
	params.n_frames = 4;
	params.pinned = false;
	must(kvt_pool_create(r.host, &params, &r.pool));
	ck_assert(!r.pool->pinned);
	must(kvt_file_open(r.host, &(struct kvt_file_params){ .dir = test_dir(), .n_slots = 4 }, &r.file));
	write_and_read(&r, 4, 1);
	rig_close(&r);
}
END_TEST

/* From now on, system call @nr of this process fails with @err. */
static void deny(long nr, int err)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)nr, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (uint32_t)err),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog prog = { .len = 4, .filter = code };

	ck_assert_int_eq(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
	ck_assert_int_eq(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &prog), 0);
}

/* As a container's seccomp profile does it. */
START_TEST(io_uring_is_denied)
{
	const struct {
		long nr;
		int err;
	} ways[] = { { SYS_io_uring_setup, EPERM }, { SYS_io_uring_setup, ENOSYS }, { SYS_io_uring_register, EPERM } };
	struct rig r;

	deny(ways[_i].nr, ways[_i].err);
	ck_assert_int_eq(rig_host(&r, KVT_HOST_USER, KVT_IO_URING, FRAME, DEPTH), -ways[_i].err);
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "io=threads"));
	ck_assert_uint_eq(atomic_load(&r.budget.used), 0);
	must(rig_host(&r, KVT_HOST_USER, KVT_IO_AUTO, FRAME, DEPTH));
	ck_assert_str_eq(kvt_host_name(r.host), "user/threads");
	ck_assert_msg(strstr(kvt_host_note(r.host), "io_uring") != NULL, "note: %s", kvt_host_note(r.host));
	rig_fill(&r, test_dir(), 4, 4);
	write_and_read(&r, 4, 1);
	rig_close(&r);
}
END_TEST

/* A process may lock itself in after it has opened its cache. */
START_TEST(io_uring_is_denied_later)
{
	struct rig r;

	if (!open_rig(&r, KVT_IO_URING, test_dir(), 4))
		return;
	write_and_read(&r, 4, 1);
	deny(SYS_io_uring_enter, EPERM);
	ck_assert_int_eq(transfer(&r, xfer(&r, KVT_XFER_READ, 0, 0)), -EPERM);
	rig_close(&r);
}
END_TEST

/* One descriptor after the other is missing: each call says so and leaves nothing. */
START_TEST(descriptors_run_out)
{
	struct rlimit limit = { .rlim_max = 1024 };
	struct kvt_file_params params = { .dir = test_dir(), .n_slots = 4 };
	uint32_t spare, open_now = 0, refused = 0;
	struct rig r;
	int fd, ret;

	for (fd = 0; fd < 256; fd++)
		open_now = fcntl(fd, F_GETFD) >= 0 ? (uint32_t)fd + 1 : open_now;
	while ((uint32_t)(fd = dup(2)) < open_now)
		; /* no gaps below */
	close(fd);
	for (spare = 0; spare < 8; spare++) {
		limit.rlim_cur = open_now + spare;
		ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
		ret = rig_host(&r, KVT_HOST_USER, (uint32_t)_i, FRAME, DEPTH);
		if (ret == -EPERM || ret == -ENOSYS)
			return;
		if (!ret) {
			ret = kvt_file_open(r.host, &params, &r.file);
			if (!ret)
				kvt_file_close(r.host, r.file);
			kvt_host_close(r.host);
		}
		ck_assert(!ret || ret == -EMFILE);
		refused += ret == -EMFILE;
		ck_assert_uint_eq(atomic_load(&r.budget.used), 0);
	}
	ck_assert_uint_ge(refused, 2);
	ck_assert_int_eq(ret, 0);
}
END_TEST

/* As many as there is address space for; the sanitizers need theirs. */
#if !SANITIZED
START_TEST(workers_cannot_start)
{
	struct kvt_budget budget = { .limit = UINT64_MAX };
	struct kvt_host_params params = { .io = KVT_IO_THREADS, .depth = DEPTH, .frame_bytes = FRAME,
					  .io_threads = 64, .budget = &budget };
	struct rlimit limit = { .rlim_max = RLIM_INFINITY };
	struct kvt_host *host;
	unsigned long pages;
	FILE *f = fopen("/proc/self/statm", "r");

	ck_assert_ptr_nonnull(f);
	ck_assert_int_eq(fscanf(f, "%lu", &pages), 1);
	fclose(f);
	limit.rlim_cur = pages * 4096 + (4 << 20);
	ck_assert_int_eq(setrlimit(RLIMIT_AS, &limit), 0);
	ck_assert_int_eq(kvt_host_open(&params, &host), -EAGAIN);
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), " of 64 started"));
	ck_assert_uint_eq(atomic_load(&budget.used), 0);
	params.io_threads = 2;
	must(kvt_host_open(&params, &host));
	kvt_host_close(host);
}
END_TEST
#endif

int main(void)
{
	Suite *suite = suite_create("host_user");
	TCase *tc = tcase_create("refusals");
	SRunner *runner;
	int failed;

	tcase_set_timeout(tc, 60);
	/* Loops run over enum kvt_io_kind, where both engines are concerned. */
	tcase_add_loop_test(tc, o_direct_is_refused_at_open, KVT_IO_URING, KVT_IO_THREADS + 1);
	tcase_add_loop_test(tc, o_direct_is_refused_at_the_first_write, KVT_IO_URING, KVT_IO_THREADS + 1);
	tcase_add_loop_test(tc, statx_says_no, KVT_IO_URING, KVT_IO_THREADS + 1);
	tcase_add_loop_test(tc, alignment_that_slots_do_not_have, KVT_IO_URING, KVT_IO_THREADS + 1);
	tcase_add_loop_test(tc, a_kernel_without_dioalign, KVT_IO_URING, KVT_IO_THREADS + 1);
	tcase_add_loop_test(tc, large_alignments, KVT_IO_URING, KVT_IO_THREADS + 1);
	tcase_add_loop_test(tc, buffered_slots_leave_the_page_cache, KVT_IO_URING, KVT_IO_THREADS + 1);
	tcase_add_test(tc, no_standard_stream);
	tcase_add_loop_test(tc, no_nameless_files, KVT_IO_URING, KVT_IO_THREADS + 1);
	tcase_add_test(tc, the_first_write_finds_no_space);
	tcase_add_loop_test(tc, short_transfers_go_on, KVT_IO_URING, KVT_IO_THREADS + 1);
	tcase_add_loop_test(tc, trickling_transfers_arrive, KVT_IO_URING, KVT_IO_THREADS + 1);
	tcase_add_test(tc, transfers_that_do_not_get_on);
	tcase_add_test(tc, cancelled_before_their_start);
	tcase_add_test(tc, io_uring_is_busy_for_a_while);
	tcase_add_loop_test(tc, completions_race_the_clearing, KVT_IO_URING, KVT_IO_THREADS + 1);
	tcase_add_test(tc, io_uring_stops_taking_entries);
	tcase_add_loop_test(tc, buffers_are_not_registered, 0, 2);
	tcase_add_test(tc, buffers_come_and_go);
	tcase_add_test(tc, a_pool_of_several_registered_buffers);
	tcase_add_test(tc, mbind_is_refused);
	tcase_add_test(tc, huge_pages_or_not);
	tcase_add_test(tc, transparent_huge_pages_unasked);
	tcase_add_test(tc, more_frames_than_the_machine_has);
	tcase_add_loop_test(tc, locked_memory_is_limited, KVT_IO_AUTO, KVT_IO_THREADS + 1);
	tcase_add_loop_test(tc, io_uring_is_denied, 0, 3);
	tcase_add_test(tc, io_uring_is_denied_later);
	tcase_add_loop_test(tc, descriptors_run_out, KVT_IO_URING, KVT_IO_THREADS + 1);
#if !SANITIZED
	tcase_add_test(tc, workers_cannot_start);
#endif
	suite_add_tcase(suite, tc);
	runner = srunner_create(suite);
	srunner_run_all(runner, CK_ENV);
	failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return failed != 0;
}
