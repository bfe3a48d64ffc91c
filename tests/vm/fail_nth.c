// SPDX-License-Identifier: MIT
/*
 * Every point where a call of the module may fail for want of memory, or of a page of the caller's, fails once: errors
 * only, and nothing left or changed.
 *
 * With fail-nth the n-th such point of the next system calls fails, for n from 1 until the call is through without. Only
 * points that the module has on its stack count: the test's own calls, and the kernel's before and after, are not swept.
 * The kinds (slab, pages, copies) are swept one by one, because how often a slab needs pages is luck. Memory that is
 * locked is limited to what the call needs: what one failure leaves charged lets the next call fail otherwise. What a file
 * system allocates in a worker is not swept; the module itself allocates nothing there. Needs a kernel with fault injection.
 */
#include <liburing.h>
#include <linux/capability.h>
#include <sys/syscall.h>

#include "vt.h"

enum { SLAB, PAGES, COPIES, KINDS };
static const char *const kinds[] = { "failslab", "fail_page_alloc", "fail_usercopy" };

static int nth_fd = -1;
static unsigned long long text_start, text_end; /* the module's code */

static bool knob(const char *kind, const char *name, unsigned long long value)
{
	char path[96], text[32];
	int fd, len;
	bool ok;

	snprintf(path, sizeof(path), "/sys/kernel/debug/%s/%s", kind, name);
	fd = open(path, O_WRONLY);
	if (fd < 0)
		return false;
	len = snprintf(text, sizeof(text), "0x%llx", value);
	ok = write(fd, text, len) == len;
	close(fd);
	return ok;
}

static unsigned long long number_in(const char *path)
{
	char text[64] = "";
	FILE *f = fopen(path, "r");

	CHECK(f && fgets(text, sizeof(text), f));
	fclose(f);
	return strtoull(text, NULL, 0);
}

/* Points of this kind count while the module is on the stack, or never. */
static void count_points(int kind, bool on)
{
	/* In this order no other stack is ever within. */
	if (on)
		CHECK(knob(kinds[kind], "require-start", text_start));
	CHECK(knob(kinds[kind], "require-end", on ? text_end : 2));
	if (!on)
		CHECK(knob(kinds[kind], "require-start", 1));
}

/* Locked memory counts, also for root. */
static void drop_ipc_lock(void)
{
	struct __user_cap_header_struct header = { .version = _LINUX_CAPABILITY_VERSION_3 };
	struct __user_cap_data_struct data[2];

	CHECK(!syscall(SYS_capget, &header, data));
	data[0].effective &= ~(1u << CAP_IPC_LOCK);
	CHECK(!syscall(SYS_capset, &header, data));
}

static void lock_at_most(rlim_t bytes)
{
	struct rlimit limit = { .rlim_cur = bytes, .rlim_max = RLIM_INFINITY };

	CHECK(!setrlimit(RLIMIT_MEMLOCK, &limit));
}

static void need_injection(void)
{
	if (!knob("failslab", "verbose", 0))
		SKIP("no fault injection in this kernel");
	text_start = number_in("/sys/module/kvtier/sections/.text");
	text_end = text_start + number_in("/sys/module/kvtier/coresize");
	CHECK(text_end > text_start && text_start > 4096);
	for (int kind = 0; kind < KINDS; kind++) {
		CHECK(knob(kinds[kind], "verbose", 0));
		CHECK(knob(kinds[kind], "stacktrace-depth", 32));
		count_points(kind, false);
	}
	/* Also allocations that could wait; also single pages. */
	CHECK(knob("failslab", "ignore-gfp-wait", 0));
	CHECK(knob("fail_page_alloc", "ignore-gfp-wait", 0));
	CHECK(knob("fail_page_alloc", "ignore-gfp-highmem", 0));
	CHECK(knob("fail_page_alloc", "min-order", 0));
	nth_fd = open("/proc/thread-self/fail-nth", O_RDWR | O_CLOEXEC);
	CHECK(nth_fd >= 0);
	vt_device();
	drop_ipc_lock();
	lock_at_most(RLIM_INFINITY);
}

static void arm(int n)
{
	char text[16];
	int len = sprintf(text, "%d", n);

	CHECK_EQ(write(nth_fd, text, len), len);
}

/* true if the failure was reached */
static bool disarm(void)
{
	int saved = errno;
	char text[16] = "";
	bool reached;

	CHECK(pread(nth_fd, text, sizeof(text) - 1, 0) > 0);
	reached = !atoi(text);
	CHECK_EQ(write(nth_fd, "0", 1), 1);
	errno = saved;
	return reached;
}

static int open_files(void)
{
	int n = 0;

	for (int fd = 0; fd < 256; fd++)
		n += fcntl(fd, F_GETFD) >= 0;
	return n;
}

/* What a call that failed may not have changed. */
struct state {
	long long bytes, pools, held, clean, refs;
	int files;
};

static struct state state_now(void)
{
	return (struct state){
		.bytes = vt_sysfs("bytes"), .pools = vt_sysfs("pools_alive"), .held = vt_sysfs("held_bytes"),
		.clean = vt_sysfs("clean_bytes"), .refs = vt_sysfs("../../module/kvtier/refcnt"), .files = open_files(),
	};
}

static void check_state(const struct state *want)
{
	struct state now = state_now();

	CHECK_EQ(now.bytes, want->bytes);
	CHECK_EQ(now.pools, want->pools);
	CHECK_EQ(now.held, want->held);
	CHECK_EQ(now.clean, want->clean);
	CHECK_EQ(now.refs, want->refs);
	CHECK_EQ(now.files, want->files);
}

/*
 * @fn runs armed and gives -1 with errno, or what it made; @undo takes that back; @failed may look closer after an error.
 * @want: kinds of which there must be an error at least.
 */
struct call {
	const char *what;
	int (*fn)(void *arg);
	void (*undo)(void *arg, int made);
	void (*failed)(void *arg);
	void *arg;
	unsigned int want;
};

static void sweep_kind(const struct call *c, int kind)
{
	int n, made, failed = 0;
	struct state before;
	long long most;

	/* Once without: what is made at a first time is there, and what it needs is known. */
	lock_at_most(RLIM_INFINITY);
	before = state_now();
	made = c->fn(c->arg);
	CHECK(made >= 0);
	most = vt_sysfs("bytes");
	if (c->undo)
		c->undo(c->arg, made);
	check_state(&before);
	lock_at_most(most > before.bytes ? most : before.bytes);

	count_points(kind, true);
	for (n = 1;; n++) {
		bool reached;

		CHECK(n < 5000);
		arm(n);
		errno = 0;
		made = c->fn(c->arg);
		reached = disarm();
		if (made < 0) {
			CHECK(reached);
			CHECK(errno == ENOMEM || errno == EFAULT);
			failed++;
			if (c->failed)
				c->failed(c->arg);
		} else if (c->undo) {
			c->undo(c->arg, made);
		}
		check_state(&before);
		if (!reached)
			break;
	}
	count_points(kind, false);
	printf("  %s, %s: %d points, %d errors\n", c->what, kinds[kind], n - 1, failed);
	CHECK(failed > 0 || !(c->want & 1u << kind));
}

static void sweep(struct call c)
{
	for (int kind = 0; kind < KINDS; kind++)
		sweep_kind(&c, kind);
	lock_at_most(RLIM_INFINITY);
}

#define ANY (1u << SLAB | 1u << COPIES)

/* ---- pools ---- */

static int create(void *arg)
{
	struct kvtier_pool_create copy = *(struct kvtier_pool_create *)arg;

	return ioctl(vt_device(), KVTIER_IOC_POOL_CREATE, &copy) ? -1 : copy.fd;
}

static void created(void *arg, int fd)
{
	struct kvtier_pool_create *c = arg;

	CHECK_EQ(vt_stat(fd).present, c->n_frames);
	CHECK(!close(fd));
	CHECK(!vt_remove((char *)c->name));
}

static void no_name(void *arg)
{
	struct kvtier_pool_create *c = arg;

	CHECK_ERR(vt_open((char *)c->name, 0), ENOENT);
}

CASE(pool_create)
{
	struct kvtier_pool_create c = { .size = sizeof(c), .frame_bytes = 12288, .n_frames = 1, .node = -1,
					.flags = KVTIER_POOL_RECLAIM, .name = "nth", .mode = 0600 };

	need_injection();
	sweep((struct call){ "create", create, created, no_name, &c, ANY | 1u << PAGES });
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

static int remove_named(void *arg)
{
	return vt_remove(arg);
}

static void made_again(void *arg, int zero)
{
	CHECK_EQ(zero, 0);
	CHECK(!close(vt_pool_named(arg, 0600, 4096, 1)));
}

static int query(void *arg)
{
	struct kvtier_query q = { .size = sizeof(q) };

	(void)arg;
	return ioctl(vt_device(), KVTIER_IOC_QUERY, &q);
}

static int stat_pool(void *arg)
{
	struct kvtier_pool_stat s = { .size = sizeof(s) };

	return ioctl(*(int *)arg, KVTIER_IOC_POOL_STAT, &s);
}

CASE(pool_open_stat_remove)
{
	int pool;

	need_injection();
	CHECK(!close(vt_pool_named("nth", 0600, 4096, 1)));
	sweep((struct call){ "query", query, NULL, NULL, NULL, 1u << COPIES });
	sweep((struct call){ "open", open_named, just_close, NULL, "nth", ANY });
	pool = vt_open("nth", 0);
	CHECK(pool >= 0);
	sweep((struct call){ "stat", stat_pool, NULL, NULL, &pool, 1u << COPIES });
	close(pool);
	sweep((struct call){ "remove", remove_named, made_again, NULL, "nth", 1u << COPIES });
	CHECK(!vt_remove("nth"));
}

/* ---- frames ---- */

static int populate(void *arg)
{
	return vt_range(*(int *)arg, KVTIER_IOC_POPULATE, 0, 1);
}

static void release(void *arg, int n)
{
	CHECK_EQ(n, 1);
	CHECK_EQ(vt_range(*(int *)arg, KVTIER_IOC_RELEASE, 0, 1), 1);
}

static int release_armed(void *arg)
{
	return vt_range(*(int *)arg, KVTIER_IOC_RELEASE, 0, 1);
}

static void populated_again(void *arg, int n)
{
	CHECK_EQ(n, 1);
	CHECK_EQ(vt_range(*(int *)arg, KVTIER_IOC_POPULATE, 0, 1), 1);
}

static void still_free(void *arg)
{
	CHECK_EQ(vt_stat(*(int *)arg).present, 0);
}

static void still_held(void *arg)
{
	CHECK_EQ(vt_stat(*(int *)arg).held, 1);
}

CASE(populate_and_release)
{
	int pool;

	need_injection();
	pool = vt_pool(KVTIER_POOL_LAZY, 12288, 1);
	/* Its first memory was charged with the pool. */
	release(&pool, populate(&pool));
	sweep((struct call){ "populate", populate, release, still_free, &pool, 1u << PAGES | 1u << COPIES });
	CHECK_EQ(populate(&pool), 1);
	sweep((struct call){ "release", release_armed, populated_again, still_held, &pool, 1u << COPIES });
}

/* Touched by madvise(), which tells of a fault's error; a copy to user space would try again and hide it. */
enum { TOUCHED = 3 };

struct touch {
	int pool;
	uint8_t *p;
};

static int touch(void *arg)
{
	struct touch *t = arg;

	return madvise(t->p, TOUCHED * 4096, MADV_POPULATE_WRITE);
}

/* Frames, tables and all: the next touch makes everything again. */
static void touch_afresh(void *arg, int zero)
{
	struct touch *t = arg;

	CHECK_EQ(zero, 0);
	CHECK_EQ(vt_stat(t->pool).present, TOUCHED);
	CHECK(!munmap(t->p, TOUCHED * 4096));
	CHECK(!close(t->pool));
	t->pool = vt_pool(KVTIER_POOL_LAZY, 4096, TOUCHED);
	t->p = vt_map(t->pool, 4096, TOUCHED);
}

/* A frame that a failure left without memory, or out of the tables, is got by the next touch. */
static void touch_again(void *arg)
{
	CHECK_EQ(touch(arg), 0);
	touch_afresh(arg, 0);
}

CASE(mapping)
{
	struct touch t;

	need_injection();
	t.pool = vt_pool(KVTIER_POOL_LAZY, 4096, TOUCHED);
	t.p = vt_map(t.pool, 4096, TOUCHED);
	sweep((struct call){ "mapping", touch, touch_afresh, touch_again, &t, 1u << PAGES });
}

/* ---- transfers: an error from the call, or in the completion; never neither ---- */

static int queue_create(void *arg)
{
	return vt_queue(64, *(int *)arg);
}

CASE(queue_create_)
{
	int event = eventfd(0, EFD_CLOEXEC);

	need_injection();
	sweep((struct call){ "queue", queue_create, just_close, NULL, &event, ANY });
}

struct xfer_arg {
	int pool, queue;
	struct kvtier_xfer x;
	uint8_t *frame, *data; /* the frame's and the file's bytes */
	struct io_uring ring;
};

enum { XFER = 8192, SEED = 5 };

static void xfer_prepare(struct xfer_arg *a)
{
	memset(a->frame, 0, XFER);
	vt_fill(a->x.op == KVTIER_XFER_READ ? a->data : a->frame, XFER, SEED);
	if (a->x.op == KVTIER_XFER_WRITE)
		memset(a->data, 0, XFER);
	CHECK_EQ(pwrite(a->x.fd, a->data, XFER, 0), XFER);
}

static void xfer_check(struct xfer_arg *a, int result)
{
	if (result < 0) {
		CHECK(result == -ENOMEM || result == -EFAULT || result == -EAGAIN || result == -EIO);
		return;
	}
	CHECK_EQ(result, XFER);
	CHECK_EQ(pread(a->x.fd, a->data, XFER, 0), XFER);
	CHECK(vt_filled(a->frame, XFER, SEED) && vt_filled(a->data, XFER, SEED));
}

static int submit(void *arg)
{
	struct xfer_arg *a = arg;

	return vt_submit(a->queue, a->pool, &a->x, 1);
}

static void reaped(void *arg, int n)
{
	struct xfer_arg *a = arg;

	CHECK_EQ(n, 1);
	xfer_check(a, vt_wait(a->queue, a->x.user));
	xfer_prepare(a);
}

static void nothing_in_flight(void *arg)
{
	struct xfer_arg *a = arg;
	struct kvtier_drain d = { .size = sizeof(d) };
	struct kvtier_done done;

	CHECK(!ioctl(a->queue, KVTIER_IOC_DRAIN, &d));
	CHECK_EQ(vt_reap(a->queue, &done, 1), 0);
}

static void uring_command(struct xfer_arg *a)
{
	struct io_uring_sqe *sqe = io_uring_get_sqe(&a->ring);

	CHECK(sqe);
	io_uring_prep_rw(IORING_OP_URING_CMD, sqe, a->queue, NULL, 0, 0);
	sqe->cmd_op = KVTIER_URING_CMD_XFER;
	*(struct kvtier_uring_xfer *)sqe->cmd = (struct kvtier_uring_xfer){ .item = (uintptr_t)&a->x, .pool_fd = a->pool };
}

static int submit_uring(void *arg)
{
	struct xfer_arg *a = arg;
	int ret = io_uring_submit(&a->ring);

	if (ret >= 0)
		return ret;
	errno = -ret;
	return -1;
}

static void uring_done(void *arg, int n)
{
	struct xfer_arg *a = arg;
	struct io_uring_cqe *cqe;

	CHECK_EQ(n, 1);
	CHECK(!io_uring_wait_cqe(&a->ring, &cqe));
	xfer_check(a, cqe->res);
	io_uring_cqe_seen(&a->ring, cqe);
}

static void uring_next(void *arg, int n)
{
	uring_done(arg, n);
	xfer_prepare(arg);
	uring_command(arg);
}

static void xfer_setup(struct xfer_arg *a)
{
	a->pool = vt_pool(0, 12288, 1);
	a->queue = vt_queue(2, -1);
	CHECK(a->pool >= 0 && a->queue >= 0);
	a->frame = vt_map(a->pool, 12288, 1);
	a->data = mmap(NULL, XFER, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(a->data != MAP_FAILED);
	CHECK(!io_uring_queue_init(2, &a->ring, 0));
}

CASE(transfer)
{
	struct xfer_arg a = { .x = { .bytes = XFER, .user = 3 } };

	need_injection();
	xfer_setup(&a);
	for (int direct = 0; direct < 2; direct++) {
		a.x.fd = vt_file(direct ? "/mnt" : "/tmp", direct ? O_DIRECT : 0, 65536);
		for (a.x.op = 0; a.x.op < 2; a.x.op++) {
			xfer_prepare(&a);
			sweep((struct call){ direct ? "direct" : "buffered", submit, reaped, nothing_in_flight, &a,
					     1u << COPIES });
			uring_command(&a);
			/* A command's error is in its completion. */
			sweep((struct call){ direct ? "command, direct" : "command, buffered", submit_uring, uring_next,
					     NULL, &a, 0 });
			uring_done(&a, submit_uring(&a));
		}
	}
	io_uring_queue_exit(&a.ring);
}

/* A transfer gives a lazy frame its memory; a new pool each time, for only the first one does. */
static void lazy_reaped(void *arg, int n)
{
	struct xfer_arg *a = arg;

	CHECK_EQ(n, 1);
	CHECK_EQ(vt_wait(a->queue, a->x.user), XFER);
	CHECK_EQ(vt_stat(a->pool).present, 1);
	close(a->pool);
	a->pool = vt_pool(KVTIER_POOL_LAZY, 12288, 1);
}

CASE(transfer_to_a_lazy_frame)
{
	struct xfer_arg a = { .x = { .bytes = XFER, .user = 3, .op = KVTIER_XFER_READ } };

	need_injection();
	a.pool = vt_pool(KVTIER_POOL_LAZY, 12288, 1);
	a.queue = vt_queue(2, -1);
	a.x.fd = vt_file("/tmp", 0, 65536);
	sweep((struct call){ "lazy", submit, lazy_reaped, nothing_in_flight, &a, 1u << PAGES | 1u << COPIES });
}

/* ---- completions ---- */

static int reap_one(void *arg)
{
	struct xfer_arg *a = arg;
	struct kvtier_done done;
	int n = vt_reap(a->queue, &done, 1);

	if (n == 1)
		CHECK(done.user == a->x.user && done.result == (int)a->x.bytes);
	return n;
}

/* Another, so that there is one to reap. */
static void complete_one(void *arg, int n)
{
	struct xfer_arg *a = arg;
	struct kvtier_drain d = { .size = sizeof(d) };

	CHECK_EQ(n, 1);
	CHECK_EQ(submit(a), 1);
	CHECK(!ioctl(a->queue, KVTIER_IOC_DRAIN, &d));
}

static int drain(void *arg)
{
	struct kvtier_drain d = { .size = sizeof(d) };

	return ioctl(*(int *)arg, KVTIER_IOC_DRAIN, &d);
}

static int cancel(void *arg)
{
	struct kvtier_cancel c = { .size = sizeof(c), .user = 77 };

	return ioctl(*(int *)arg, KVTIER_IOC_CANCEL, &c);
}

/* A completion that could not be told is still there. */
CASE(reap_drain_cancel)
{
	struct xfer_arg a = { .x = { .bytes = 4096, .user = 3 } };

	need_injection();
	a.pool = vt_pool(0, 4096, 1);
	a.queue = vt_queue(2, -1);
	a.x.fd = vt_file("/tmp", 0, 4096);
	complete_one(&a, 1);
	sweep((struct call){ "reap", reap_one, complete_one, NULL, &a, 1u << COPIES });
	CHECK_EQ(reap_one(&a), 1);
	sweep((struct call){ "drain", drain, NULL, NULL, &a.queue, 1u << COPIES });
	sweep((struct call){ "cancel", cancel, NULL, NULL, &a.queue, 1u << COPIES });
}
