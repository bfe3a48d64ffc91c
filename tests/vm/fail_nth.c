// SPDX-License-Identifier: MIT
/*
 * Every allocation of every call fails once: with fail-nth, the n-th allocation of the next system call fails, for n from
 * 1 until the call is through without. Errors only, and nothing left. Needs a kernel with fault injection.
 */
#include <liburing.h>

#include "vt.h"

static int nth_fd = -1;

static bool knob(const char *path, const char *value)
{
	int fd = open(path, O_WRONLY);
	bool ok;

	if (fd < 0)
		return false;
	ok = write(fd, value, strlen(value)) > 0;
	close(fd);
	return ok;
}

static void need_injection(void)
{
	if (!knob("/sys/kernel/debug/failslab/ignore-gfp-wait", "N"))
		SKIP("no fault injection in this kernel");
	CHECK(knob("/sys/kernel/debug/fail_page_alloc/ignore-gfp-wait", "N"));
	CHECK(knob("/sys/kernel/debug/fail_page_alloc/ignore-gfp-highmem", "N"));
	CHECK(knob("/sys/kernel/debug/fail_page_alloc/min-order", "0"));
	/* Also the copies from and to user space. */
	CHECK(knob("/sys/kernel/debug/fail_usercopy/verbose", "0"));
	knob("/sys/kernel/debug/failslab/verbose", "0");
	knob("/sys/kernel/debug/fail_page_alloc/verbose", "0");
	nth_fd = open("/proc/thread-self/fail-nth", O_RDWR);
	CHECK(nth_fd >= 0);
}

/* Run fn with the n-th failure; true if it was reached. */
static bool with_failure(int n, int (*fn)(void *), void *arg, int *result)
{
	char text[16];
	ssize_t len;

	len = sprintf(text, "%d", n);
	CHECK(write(nth_fd, text, len) == len);
	errno = 0;
	*result = fn(arg);
	int saved = errno;
	memset(text, 0, sizeof(text));
	CHECK(pread(nth_fd, text, sizeof(text) - 1, 0) > 0);
	CHECK(write(nth_fd, "0", 1) == 1);
	errno = saved;
	return atoi(text) == 0;
}

/* Sweep: fn returns >= 0 when it worked. Undo runs after each success. */
static void sweep(const char *what, int (*fn)(void *), void (*undo)(void *, int), void *arg)
{
	int n, result, failed = 0;

	for (n = 1; n < 2000; n++) {
		bool reached = with_failure(n, fn, arg, &result);

		if (result < 0) {
			failed++;
			CHECK(errno == ENOMEM || errno == EFAULT || errno == EMFILE || errno == ENFILE);
		} else if (undo) {
			undo(arg, result);
		}
		if (!reached) {
			CHECK(result >= 0);
			break;
		}
	}
	CHECK(n < 2000);
	printf("  %s: %d points, %d errors\n", what, n - 1, failed);
	CHECK(failed > 0);
}

static int create(void *arg)
{
	struct kvtier_pool_create *c = arg, copy = *c;

	return ioctl(vt_device(), KVTIER_IOC_POOL_CREATE, &copy) ? -1 : copy.fd;
}

static void closed(void *arg, int fd)
{
	struct kvtier_pool_create *c = arg;

	CHECK(!close(fd));
	if (c->name[0])
		CHECK(!vt_remove((char *)c->name));
}

CASE(pool_create)
{
	struct kvtier_pool_create c = { .size = sizeof(c), .frame_bytes = 12288, .n_frames = 2, .node = -1,
					.flags = KVTIER_POOL_RECLAIM };

	need_injection();
	sweep("create", create, closed, &c);
	strcpy((char *)c.name, "nth");
	c.mode = 0600;
	sweep("create named", create, closed, &c);
}

static int open_named(void *arg)
{
	return vt_open(arg, 0);
}

static void just_close(void *arg, int fd)
{
	(void)arg;
	CHECK(!close(fd));
}

CASE(pool_open)
{
	need_injection();
	CHECK(vt_pool_named("nth", 0600, 4096, 1) >= 0);
	sweep("open", open_named, just_close, "nth");
	CHECK(!vt_remove("nth"));
}

static int queue_create(void *arg)
{
	return vt_queue(64, *(int *)arg);
}

CASE(queue_create_)
{
	int event = eventfd(0, 0);

	need_injection();
	sweep("queue", queue_create, just_close, &event);
}

static int populate(void *arg)
{
	return vt_range(*(int *)arg, KVTIER_IOC_POPULATE, 0, 1);
}

static void release(void *arg, int n)
{
	(void)n;
	CHECK_EQ(vt_range(*(int *)arg, KVTIER_IOC_RELEASE, 0, 1), 1);
}

CASE(populate_)
{
	int pool;

	need_injection();
	pool = vt_pool(KVTIER_POOL_LAZY, 12288, 1);
	sweep("populate", populate, release, &pool);
}

/* Transfers: an error from the call, or in the completion; never neither. */
struct xfer_arg {
	int pool, queue;
	struct kvtier_xfer x;
};

static int submit(void *arg)
{
	struct xfer_arg *a = arg;

	return vt_submit(a->queue, a->pool, &a->x, 1);
}

static void reaped(void *arg, int n)
{
	struct xfer_arg *a = arg;
	int result;

	CHECK_EQ(n, 1);
	result = vt_wait(a->queue, a->x.user);
	CHECK(result == (int)a->x.bytes || result == -ENOMEM || result == -EFAULT || result == -EAGAIN || result == -EIO);
}

CASE(transfer)
{
	struct xfer_arg a = { .x = { .bytes = 8192, .user = 3 } };

	need_injection();
	a.pool = vt_pool(KVTIER_POOL_LAZY, 12288, 1);
	a.queue = vt_queue(2, -1);
	for (int direct = 0; direct < 2; direct++) {
		a.x.fd = vt_file(direct ? "/mnt" : "/tmp", direct ? O_DIRECT : 0, 65536);
		for (a.x.op = 0; a.x.op < 2; a.x.op++)
			sweep(direct ? "direct" : "buffered", submit, reaped, &a);
	}
}

static int map_and_touch(void *arg)
{
	int pool = *(int *)arg;
	uint8_t *p = mmap(NULL, 65536, PROT_READ | PROT_WRITE, MAP_SHARED, pool, 0);
	int zero, ret;

	if (p == MAP_FAILED)
		return -1;
	/* The kernel touches it for us: what the fault finds is EFAULT. */
	zero = open("/dev/zero", O_RDONLY);
	ret = zero < 0 ? -1 : read(zero, p, 65536) == 65536 ? 0 : -1;
	if (ret)
		errno = EFAULT;
	if (zero >= 0)
		close(zero);
	munmap(p, 65536);
	return ret;
}

CASE(mapping)
{
	int pool;

	need_injection();
	pool = vt_pool(KVTIER_POOL_LAZY, 65536, 1);
	sweep("mapping", map_and_touch, NULL, &pool);
}

static int reap_one(void *arg)
{
	struct kvtier_done done;
	struct xfer_arg *a = arg;

	return vt_reap(a->queue, &done, 1);
}

/* A completion that could not be told is still there. */
CASE(reap)
{
	struct xfer_arg a = { .x = { .bytes = 4096, .user = 3 } };
	struct kvtier_drain d = { .size = sizeof(d) };

	need_injection();
	a.pool = vt_pool(0, 4096, 1);
	a.queue = vt_queue(2, -1);
	a.x.fd = vt_file("/tmp", 0, 4096);
	CHECK_EQ(submit(&a), 1);
	CHECK(!ioctl(a.queue, KVTIER_IOC_DRAIN, &d));
	for (int n = 1, result;; n++) {
		if (!with_failure(n, reap_one, &a, &result)) {
			CHECK_EQ(result, 1);
			break;
		}
		CHECK(result == -1 && errno == EFAULT);
	}
}
