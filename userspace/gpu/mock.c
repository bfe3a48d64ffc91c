// SPDX-License-Identifier: MIT
/*
 * The GPU for tests; gpu/mock.h.
 *
 * Every stream is a queue of operations. An operation runs when it is at the
 * head of its stream, what it waits for has been reached, and either its time
 * has come (a number of calls after its own) or somebody waits for it. Which of
 * several such streams goes on may be drawn from a seed.
 *
 * Device memory is one mapping without access rights; they are granted from a
 * call's first operation to its end. One lock is held through every call, work
 * included.
 */
#include "gpu/mock.h"

#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "base/err.h"
#include "gpu/kernels.h"
#include "gpu/op.h"
#include "gpu/ranges.h"

#define ALIGN 256
#define HUGE (2ull << 20)
#define NEW 0xcd
#define GONE 0xdd
#define LOG_MAX (1u << 18) /* later calls are counted, not written down */

struct item {
	struct kvt_op op;
	uint64_t due; /* in calls */
};

struct stream {
	bool capturing;
	struct kvt_op_list capture;
	struct item *queue; /* [head, n) wait */
	uint32_t head, n, room;
	int err; /* of work, for the next synchronisation */
};

struct event {
	uint64_t recorded, reached; /* recordings put on a stream, and run */
	bool captured;
	bool destroyed; /* kept: work may still name it */
	struct timespec at;
};

struct mock {
	struct kvt_gpu gpu;
	pthread_mutex_t lock;

	uint8_t *memory; /* of huge pages, where there are any: rights of small ones take longer to change than most work */
	bool open;
	uint64_t bytes, used;
	uint64_t touched; /* bytes from the beginning that were ever allocated, whole huge pages */
	struct kvt_ranges ranges;
	struct kvt_table streams, events, graphs; /* streams.objects[0] is the default stream */

	uint64_t calls, failable;
	uint64_t fail_at, flip_at, flip_bit, delay, seed, copies;
	int fail_err, refuse[KVT_MOCK_CALL_KINDS];
	bool failed, gone;

	struct kvt_mock_record *log;
	uint64_t n_log, log_room;
	uint64_t counts[KVT_MOCK_CALL_KINDS];
	uint64_t syncs, allocs;
	char fault[256];
};

static struct mock *mock_of(struct kvt_gpu *gpu)
{
	return (struct mock *)gpu; /* its first member */
}

__attribute__((format(printf, 2, 3))) static void fault(struct mock *m, const char *fmt, ...)
{
	va_list ap;

	if (m->fault[0])
		return;
	va_start(ap, fmt);
	vsnprintf(m->fault, sizeof(m->fault), fmt, ap);
	va_end(ap);
}

const char *kvt_mock_call_name(enum kvt_mock_call call)
{
	static const char *const names[] = {
#define X(name) #name,
		KVT_MOCK_CALLS(X)
#undef X
	};

	return (unsigned int)call < KVT_MOCK_CALL_KINDS ? names[call] : NULL;
}

/* ---- running what is queued ---- */

/* Until close_memory(), at the call's end. */
static void open_memory(struct mock *m)
{
	if (!m->open && m->touched)
		m->open = !mprotect(m->memory, m->touched, PROT_READ | PROT_WRITE);
}

static void close_memory(struct mock *m)
{
	if (m->open && !m->gpu.host_readable)
		m->open = mprotect(m->memory, m->touched, PROT_NONE) != 0;
}

/* False, noting it, for a device address that is not in one live allocation. */
static bool alive(struct mock *m, const void *p, uint64_t bytes)
{
	const uint8_t *b = p;

	if (!bytes || b < m->memory || b >= m->memory + m->bytes ||
	    kvt_ranges_holding(&m->ranges, KVT_RANGE_DEVICE, (uintptr_t)p, bytes))
		return true;
	fault(m, "work on %llu bytes at %p, which are not in one allocation", (unsigned long long)bytes, p);
	return false;
}

static uint64_t span(uint64_t pitch, uint64_t width, uint64_t height)
{
	return width && height ? pitch * (height - 1) + width : 0;
}

static bool op_alive(struct mock *m, const struct kvt_op *op)
{
	if (op->kind == KVT_OP_COPY || op->kind == KVT_OP_COPY_2D)
		return alive(m, op->copy.dst, span(op->copy.dst_pitch, op->copy.width, op->copy.height)) &&
		       alive(m, op->copy.src, span(op->copy.src_pitch, op->copy.width, op->copy.height));
	if (op->kind == KVT_OP_MEMSET)
		return alive(m, op->set.dst, op->set.bytes);
	return true;
}

/* Count a copy, and spoil it if its turn has come. */
static void copied(struct mock *m, void *dst, uint64_t bytes)
{
	if (bytes && m->flip_at && ++m->copies == m->flip_at)
		((uint8_t *)dst)[m->flip_bit / 8 % bytes] ^= 1u << m->flip_bit % 8;
}

static void copied_items(struct mock *m, const struct kvt_op *op)
{
	const struct kvt_copy_args *a = (const void *)op->launch.args;
	const uint64_t *dst = (const void *)(uintptr_t)a->dst;
	const uint32_t *sizes = (const void *)(uintptr_t)a->sizes;

	for (uint32_t i = 0; i < a->n; i++)
		copied(m, (void *)(uintptr_t)dst[i], sizes ? sizes[i] : a->bytes);
}

static int run_work(struct mock *m, const struct kvt_op *op)
{
	int err;

	if (!op_alive(m, op))
		return -EFAULT;
	open_memory(m);
	err = kvt_op_run(op);
	if (op->kind == KVT_OP_COPY || op->kind == KVT_OP_COPY_2D)
		copied(m, op->copy.dst, op->copy.width);
	else if (op->kind == KVT_OP_LAUNCH && !strcmp(op->launch.twin->module, "block") &&
		 !strcmp(op->launch.twin->function, "copy"))
		copied_items(m, op);
	return err;
}

static bool can_go_on(struct mock *m, const struct stream *s)
{
	const struct kvt_op *op;
	const struct event *e;

	if (!s || s->head == s->n)
		return false;
	op = &s->queue[s->head].op;
	if (op->kind != KVT_OP_WAIT)
		return true;
	e = kvt_table_get(&m->events, op->event.event);
	return e->reached >= op->event.turn;
}

static void step(struct mock *m, struct stream *s)
{
	const struct kvt_op *op = &s->queue[s->head++].op;
	struct event *e;
	int err = 0;

	if (op->kind == KVT_OP_RECORD) {
		e = kvt_table_get(&m->events, op->event.event);
		e->reached = op->event.turn;
		clock_gettime(CLOCK_MONOTONIC, &e->at);
	} else if (op->kind != KVT_OP_WAIT) {
		err = run_work(m, op);
	}
	if (err && !s->err)
		s->err = err;
	if (s->head == s->n)
		s->head = s->n = 0;
}

static uint64_t draw(struct mock *m, uint64_t below)
{
	m->seed ^= m->seed << 13;
	m->seed ^= m->seed >> 7;
	m->seed ^= m->seed << 17;
	return m->seed % below;
}

/* A stream that can go on (and, with @due, whose head's time has come): @want if it can and nothing is drawn. */
static struct stream *pick(struct mock *m, struct stream *want, bool due)
{
	struct stream *s, *found = NULL;
	uint64_t n = 0;

	if (!m->seed && can_go_on(m, want))
		return want;
	for (uint32_t i = 0; i < m->streams.n; i++) {
		s = m->streams.objects[i];
		if (!can_go_on(m, s) || (due && s->queue[s->head].due > m->calls))
			continue;
		n++;
		if (!found || (m->seed && !draw(m, n)))
			found = s;
	}
	return found;
}

static int stuck(struct mock *m)
{
	fault(m, "a wait for work that waits for an event that nothing will record");
	return kvt_fail(-EDEADLK, "%s", m->fault);
}

static int drain(struct mock *m, struct stream *s)
{
	struct stream *next;
	int err;

	while (s->head < s->n) {
		next = pick(m, s, false);
		if (!next)
			return stuck(m);
		step(m, next);
	}
	err = s->err;
	s->err = 0;
	return err;
}

static int reach(struct mock *m, const struct event *e, uint64_t turn)
{
	struct stream *next;

	while (e->reached < turn) {
		next = pick(m, NULL, false);
		if (!next)
			return stuck(m);
		step(m, next);
	}
	return 0;
}

/* ---- a call comes in, and goes out ---- */

/* As a device that is lost: what was in its memory and on its streams is no more. */
static void go(struct mock *m)
{
	m->gone = true;
	for (uint32_t i = 0; i < m->streams.n; i++) {
		struct stream *s = m->streams.objects[i];

		if (s)
			s->head = s->n = 0;
	}
	open_memory(m);
	memset(m->memory, GONE, m->touched);
}

/* Write the call down and decide whether it fails. Takes the lock; leave() lets it go. */
static int enter(struct mock *m, struct kvt_mock_record r, bool can_fail)
{
	pthread_mutex_lock(&m->lock);
	m->calls++;
	m->counts[r.call]++;
	if (m->n_log < LOG_MAX && m->n_log == m->log_room) {
		uint64_t room = m->log_room ? m->log_room * 2 : 256;
		struct kvt_mock_record *log = realloc(m->log, room * sizeof(*log));

		if (log) {
			m->log = log;
			m->log_room = room;
		}
	}
	if (m->n_log < m->log_room)
		m->log[m->n_log++] = r;
	if (!can_fail)
		return 0;
	if (m->gone)
		return kvt_fail(-ENODEV, "mock: the device is gone");
	if (m->refuse[r.call])
		return kvt_fail(m->refuse[r.call], "mock: %s refused", kvt_mock_call_name(r.call));
	if (m->fail_at && ++m->failable == m->fail_at) {
		m->failed = true;
		if (m->fail_err == -ENODEV)
			go(m);
		return kvt_fail(m->fail_err, "mock: call %llu (%s) fails", (unsigned long long)m->fail_at,
				kvt_mock_call_name(r.call));
	}
	return 0;
}

static int leave(struct mock *m, int result)
{
	struct stream *s;

	if (m->n_log && m->n_log < LOG_MAX)
		m->log[m->n_log - 1].result = result;
	while ((s = pick(m, NULL, true)))
		step(m, s);
	close_memory(m);
	pthread_mutex_unlock(&m->lock);
	return result;
}

#define ENTER(m, name, ...) enter(m, (struct kvt_mock_record){ .call = KVT_MOCK_##name, ##__VA_ARGS__ }, true)
#define NOTE(m, name, ...) enter(m, (struct kvt_mock_record){ .call = KVT_MOCK_##name, ##__VA_ARGS__ }, false)

/* ---- memory ---- */

static const void *const_of(uint64_t address)
{
	return (const void *)(uintptr_t)address;
}

static void *ptr_of(uint64_t address)
{
	return (void *)(uintptr_t)address;
}

static int device_alloc(struct mock *m, uint64_t bytes, kvt_dptr *p)
{
	uintptr_t at = (uintptr_t)m->memory;
	const struct kvt_range *in_the_way;
	uint64_t end;
	int err;

	m->allocs++;
	if (!bytes)
		return kvt_fail(-EINVAL, "mock: 0 bytes of device memory asked for");
	while ((in_the_way = kvt_ranges_overlap(&m->ranges, KVT_RANGE_DEVICE, at, bytes)))
		at = (in_the_way->base + in_the_way->bytes + ALIGN - 1) / ALIGN * ALIGN;
	end = at - (uintptr_t)m->memory;
	if (bytes > m->bytes || end > m->bytes - bytes)
		return kvt_fail(-ENOMEM, "mock: %llu bytes of device memory asked for, %llu of %llu are taken",
				(unsigned long long)bytes, (unsigned long long)m->used, (unsigned long long)m->bytes);
	err = kvt_ranges_add(&m->ranges, KVT_RANGE_DEVICE, at, bytes);
	if (err)
		return err;
	end = (end + bytes + HUGE - 1) / HUGE * HUGE;
	if (end > m->bytes)
		end = m->bytes;
	if (end > m->touched) {
		m->touched = end;
		m->open = false;
	}
	m->used += bytes;
	open_memory(m);
	memset(ptr_of(at), NEW, bytes);
	*p = at;
	return 0;
}

static int mock_alloc(struct kvt_gpu *gpu, uint64_t bytes, kvt_dptr *p)
{
	struct mock *m = mock_of(gpu);
	int err = ENTER(m, alloc, .bytes = bytes);

	return leave(m, err ? err : device_alloc(m, bytes, p));
}

static bool overlap(uint64_t a, uint64_t a_bytes, uint64_t b, uint64_t b_bytes)
{
	return a < b + b_bytes && b < a + a_bytes;
}

static bool op_uses(const struct kvt_op *op, uint64_t p, uint64_t bytes)
{
	switch (op->kind) {
	case KVT_OP_COPY:
	case KVT_OP_COPY_2D:
		return overlap((uintptr_t)op->copy.dst, span(op->copy.dst_pitch, op->copy.width, op->copy.height), p,
			       bytes) ||
		       overlap((uintptr_t)op->copy.src, span(op->copy.src_pitch, op->copy.width, op->copy.height), p,
			       bytes);
	case KVT_OP_MEMSET:
		return overlap((uintptr_t)op->set.dst, op->set.bytes, p, bytes);
	case KVT_OP_LAUNCH: /* an argument that is an address in it */
		for (size_t i = 0; i < KVT_KERNEL_ARG_BYTES / 8; i++)
			if (op->launch.args[i] >= p && op->launch.args[i] < p + bytes)
				return true;
		return false;
	default:
		return false;
	}
}

/* Memory is about to go: nothing that waits may use it. What does is done first, so that the test can go on. */
static void check_unused(struct mock *m, const char *what, uint64_t p, uint64_t bytes)
{
	for (uint32_t i = 0; i < m->streams.n; i++) {
		struct stream *s = m->streams.objects[i];

		for (uint32_t k = s ? s->head : 0; s && k < s->n; k++)
			if (op_uses(&s->queue[k].op, p, bytes)) {
				fault(m, "%s of %#llx while work on it is pending on stream %u", what,
				      (unsigned long long)p, i);
				drain(m, s);
				break;
			}
	}
}

static uint64_t forget(struct mock *m, enum kvt_range_kind kind, uint64_t p, const char *what)
{
	const struct kvt_range *r = kvt_ranges_holding(&m->ranges, kind, p, 1);

	if (!r || r->base != p) {
		fault(m, "%s of %#llx, which is not such an allocation", what, (unsigned long long)p);
		return 0;
	}
	check_unused(m, what, p, r->bytes);
	return kvt_ranges_remove(&m->ranges, kind, p);
}

static void mock_free(struct kvt_gpu *gpu, kvt_dptr p)
{
	struct mock *m = mock_of(gpu);
	uint64_t bytes;

	NOTE(m, free, .dst = p);
	bytes = p ? forget(m, KVT_RANGE_DEVICE, p, "free") : 0;
	if (bytes) {
		m->used -= bytes;
		open_memory(m);
		memset(ptr_of(p), GONE, bytes);
	}
	leave(m, 0);
}

static int mock_mem_info(struct kvt_gpu *gpu, uint64_t *free_bytes, uint64_t *total_bytes)
{
	struct mock *m = mock_of(gpu);
	int err = ENTER(m, mem_info);

	if (!err) {
		*free_bytes = m->bytes - m->used;
		*total_bytes = m->bytes;
	}
	return leave(m, err);
}

static int pinned_alloc(struct mock *m, uint64_t bytes, void **p)
{
	void *mem;
	int err;

	m->allocs++;
	if (!bytes)
		return kvt_fail(-EINVAL, "mock: 0 bytes of pinned host memory asked for");
	if (posix_memalign(&mem, (size_t)sysconf(_SC_PAGESIZE), bytes))
		return kvt_fail(-ENOMEM, "mock: no %llu bytes of host memory", (unsigned long long)bytes);
	err = kvt_ranges_add(&m->ranges, KVT_RANGE_HOST, (uintptr_t)mem, bytes);
	if (err) {
		free(mem);
		return err;
	}
	memset(mem, NEW, bytes);
	*p = mem;
	return 0;
}

static int mock_host_alloc(struct kvt_gpu *gpu, uint64_t bytes, void **p)
{
	struct mock *m = mock_of(gpu);
	int err = ENTER(m, host_alloc, .bytes = bytes);

	return leave(m, err ? err : pinned_alloc(m, bytes, p));
}

static void mock_host_free(struct kvt_gpu *gpu, void *p)
{
	struct mock *m = mock_of(gpu);

	NOTE(m, host_free, .dst = (uintptr_t)p);
	if (p && forget(m, KVT_RANGE_HOST, (uintptr_t)p, "host_free"))
		free(p);
	leave(m, 0);
}

static int mock_host_register(struct kvt_gpu *gpu, void *p, uint64_t bytes)
{
	struct mock *m = mock_of(gpu);
	int err = ENTER(m, host_register, .dst = (uintptr_t)p, .bytes = bytes);

	m->allocs++;
	if (!err)
		err = kvt_ranges_register(&m->ranges, p, bytes);
	return leave(m, err);
}

static int mock_host_unregister(struct kvt_gpu *gpu, void *p)
{
	struct mock *m = mock_of(gpu);
	int err = ENTER(m, host_unregister, .dst = (uintptr_t)p);
	const struct kvt_range *r;

	if (!err || m->gone) { /* what is registered is the host's to forget */
		r = kvt_ranges_holding(&m->ranges, KVT_RANGE_REGISTERED, (uintptr_t)p, 1);
		if (r && r->base == (uintptr_t)p)
			forget(m, KVT_RANGE_REGISTERED, (uintptr_t)p, "host_unregister");
		else
			err = kvt_fail(-EINVAL, "mock: host_unregister: %p is not registered", p);
	}
	return leave(m, err);
}

static int check_device(struct mock *m, const char *what, kvt_dptr p, uint64_t bytes)
{
	if (!bytes || kvt_ranges_holding(&m->ranges, KVT_RANGE_DEVICE, p, bytes))
		return 0;
	return kvt_fail(-EINVAL, "mock: %s: %llu bytes at %#llx are not in one device allocation", what,
			(unsigned long long)bytes, (unsigned long long)p);
}

/* The same for what a kernel may read too: the device's, or pinned memory of the host. */
static int check_source(struct mock *m, const char *what, uint64_t p, uint64_t bytes)
{
	return kvt_ranges_pinned(&m->ranges, p, bytes) ? 0 : check_device(m, what, p, bytes);
}

/* ---- streams ---- */

static struct stream *stream_of(struct mock *m, kvt_stream handle)
{
	struct stream *s = kvt_table_get(&m->streams, handle);

	if (!s)
		kvt_fail(-EINVAL, "mock: no stream has handle %u", handle);
	return s;
}

static struct event *event_of(struct mock *m, kvt_event handle)
{
	struct event *e = kvt_table_get(&m->events, handle);

	if (!e || e->destroyed) {
		kvt_fail(-EINVAL, "mock: no event has handle %u", handle);
		return NULL;
	}
	return e;
}

static int enqueue(struct mock *m, struct stream *s, const struct kvt_op *op)
{
	if (s->n == s->room) {
		uint32_t room = s->room ? s->room * 2 : 16;
		struct item *queue = realloc(s->queue, room * sizeof(*queue));

		if (!queue)
			return kvt_fail(-ENOMEM, "mock: no memory for %u operations", room);
		s->queue = queue;
		s->room = room;
	}
	s->queue[s->n++] = (struct item){
		.op = *op,
		.due = m->delay > UINT64_MAX - m->calls ? UINT64_MAX : m->calls + m->delay,
	};
	return 0;
}

/* Put on the stream, or in its capture. An event's operation learns here which recording it means. */
static int put(struct mock *m, kvt_stream handle, const struct kvt_op *op)
{
	struct stream *s = stream_of(m, handle);
	struct kvt_op o = *op;
	struct event *e;

	if (!s)
		return -EINVAL;
	if (s->capturing)
		return kvt_op_append(&s->capture, op);
	if (op->kind == KVT_OP_RECORD || op->kind == KVT_OP_WAIT) {
		e = event_of(m, op->event.event);
		if (!e)
			return -EINVAL;
		if (op->kind == KVT_OP_RECORD) {
			e->recorded++;
			e->captured = false;
		}
		o.event.turn = e->recorded;
	}
	return enqueue(m, s, &o);
}

static int put_copy(struct mock *m, kvt_stream stream, uint64_t dst, uint64_t src, uint64_t bytes)
{
	const struct kvt_op op = {
		.kind = KVT_OP_COPY,
		.copy = { .dst = ptr_of(dst), .src = const_of(src), .width = bytes, .height = 1 },
	};

	return put(m, stream, &op);
}

/* @to and @from: whether the destination and the source are the device's. */
static int copy(struct mock *m, const char *what, uint64_t dst, bool to, uint64_t src, bool from, uint64_t bytes,
		kvt_stream stream)
{
	if ((to && check_device(m, what, dst, bytes)) || (from && check_device(m, what, src, bytes)))
		return -EINVAL;
	return put_copy(m, stream, dst, src, bytes);
}

static int copy_now(struct mock *m, const char *what, uint64_t dst, bool to, uint64_t src, bool from, uint64_t bytes)
{
	int err = copy(m, what, dst, to, src, from, bytes, 0);

	m->syncs++;
	return err ? err : drain(m, m->streams.objects[0]);
}

#define COPY_ASYNC(name, dst_t, to, src_t, from) \
	static int mock_##name##_async(struct kvt_gpu *gpu, dst_t dst, src_t src, uint64_t bytes, kvt_stream stream) \
	{ \
		struct mock *m = mock_of(gpu); \
		int err = ENTER(m, name##_async, .dst = (uintptr_t)dst, .src = (uintptr_t)src, .bytes = bytes, \
				.stream = stream); \
\
		return leave(m, err ? err : copy(m, #name, (uintptr_t)dst, to, (uintptr_t)src, from, bytes, stream)); \
	} \
	static int mock_##name(struct kvt_gpu *gpu, dst_t dst, src_t src, uint64_t bytes) \
	{ \
		struct mock *m = mock_of(gpu); \
		int err = ENTER(m, name, .dst = (uintptr_t)dst, .src = (uintptr_t)src, .bytes = bytes); \
\
		return leave(m, err ? err : copy_now(m, #name, (uintptr_t)dst, to, (uintptr_t)src, from, bytes)); \
	}

COPY_ASYNC(copy_h2d, kvt_dptr, true, const void *, false)
COPY_ASYNC(copy_d2h, void *, false, kvt_dptr, true)
COPY_ASYNC(copy_d2d, kvt_dptr, true, kvt_dptr, true)

static int mock_copy_2d_async(struct kvt_gpu *gpu, kvt_dptr dst, uint64_t dst_pitch, kvt_dptr src, uint64_t src_pitch,
			      uint64_t width, uint64_t height, kvt_stream stream)
{
	struct mock *m = mock_of(gpu);
	const struct kvt_op op = {
		.kind = KVT_OP_COPY_2D,
		.copy = {
			.dst = ptr_of(dst), .dst_pitch = dst_pitch, .src = const_of(src), .src_pitch = src_pitch,
			.width = width, .height = height,
		},
	};
	int err = ENTER(m, copy_2d_async, .dst = dst, .dst_pitch = dst_pitch, .src = src, .src_pitch = src_pitch,
			.width = width, .height = height, .bytes = width * height, .stream = stream);

	if (!err && width && height && (width > dst_pitch || width > src_pitch))
		err = kvt_fail(-EINVAL, "mock: copy_2d: rows of %llu bytes, pitches of %llu and %llu",
			       (unsigned long long)width, (unsigned long long)dst_pitch, (unsigned long long)src_pitch);
	if (!err && (check_device(m, "copy_2d", dst, span(dst_pitch, width, height)) ||
		     check_source(m, "copy_2d", src, span(src_pitch, width, height))))
		err = -EINVAL;
	return leave(m, err ? err : put(m, stream, &op));
}

/* From any one of them on. */
static int put_batch(struct mock *m, const uint64_t *dst, const uint64_t *src, uint64_t bytes, uint32_t n, kvt_stream stream)
{
	const struct stream *s = stream_of(m, stream);
	uint32_t first = m->seed && n ? (uint32_t)draw(m, n) : 0;
	int err = 0;

	if (!s)
		return -EINVAL;
	if (s->capturing)
		return kvt_fail(-EINVAL, "mock: stream %u is capturing: batched copies cannot be", stream);
	for (uint32_t i = 0; i < n && bytes; i++)
		if (check_source(m, "copy_batch to", dst[i], bytes) || check_source(m, "copy_batch from", src[i], bytes))
			return -EINVAL;
	for (uint32_t i = first; i < first + n && !err; i++)
		err = put_copy(m, stream, dst[i % n], src[i % n], bytes);
	return err;
}

static int mock_copy_batch_async(struct kvt_gpu *gpu, const uint64_t *dst, const uint64_t *src, uint64_t bytes, uint32_t n,
				 kvt_stream stream)
{
	struct mock *m = mock_of(gpu);
	int err = ENTER(m, copy_batch_async, .dst = n ? dst[0] : 0, .src = n ? src[0] : 0, .width = bytes, .height = n,
			.bytes = bytes * n, .stream = stream);

	return leave(m, err ? err : put_batch(m, dst, src, bytes, n, stream));
}

static int mock_memset_async(struct kvt_gpu *gpu, kvt_dptr p, uint8_t value, uint64_t bytes, kvt_stream stream)
{
	struct mock *m = mock_of(gpu);
	const struct kvt_op op = {
		.kind = KVT_OP_MEMSET,
		.set = { .dst = ptr_of(p), .bytes = bytes, .value = value },
	};
	int err = ENTER(m, memset_async, .dst = p, .bytes = bytes, .stream = stream);

	if (!err)
		err = check_device(m, "memset", p, bytes);
	return leave(m, err ? err : put(m, stream, &op));
}

static int mock_kernel(struct kvt_gpu *gpu, const char *module, const char *function, kvt_kernel *kernel)
{
	struct mock *m = mock_of(gpu);
	int err = ENTER(m, kernel);

	return leave(m, err ? err : kvt_twin_find(module, function, kernel));
}

static int mock_tensor_map(struct kvt_gpu *gpu, kvt_dptr base, uint64_t bytes, uint32_t row_bytes, uint32_t rows, uint64_t *map)
{
	struct mock *m = mock_of(gpu);
	int err = ENTER(m, tensor_map, .src = base, .bytes = bytes, .src_pitch = row_bytes, .height = rows);

	if (!err)
		err = kvt_tensor_map_check(base, bytes, row_bytes, rows);
	if (!err)
		err = check_device(m, "tensor_map", base, bytes);
	if (!err)
		kvt_tensor_map_say(base, bytes, row_bytes, rows, map);
	return leave(m, err);
}

static int put_launch(struct mock *m, enum kvt_mock_call call, kvt_kernel kernel, struct kvt_dim3 grid, struct kvt_dim3 block,
		      uint32_t shared_bytes, kvt_stream stream, void *const *args, uint32_t n_args)
{
	const struct kvt_twin_entry *twin = kvt_twin_get(kernel);
	const struct kvt_mock_record record = {
		.call = call, .handle = kernel, .stream = stream, .grid = grid, .block = block, .shared_bytes = shared_bytes,
		.module = twin ? twin->module : NULL, .function = twin ? twin->function : NULL,
	};
	struct kvt_op op = { 0 };
	int err = enter(m, record, true);

	if (!err && !twin)
		err = -EINVAL;
	if (!err)
		err = kvt_op_launch(&op, twin, grid, block, args, n_args);
	return leave(m, err ? err : put(m, stream, &op));
}

static int mock_launch(struct kvt_gpu *gpu, kvt_kernel kernel, struct kvt_dim3 grid, struct kvt_dim3 block,
		       uint32_t shared_bytes, kvt_stream stream, void *const *args, uint32_t n_args)
{
	return put_launch(mock_of(gpu), KVT_MOCK_launch, kernel, grid, block, shared_bytes, stream, args, n_args);
}

static int mock_launch_early(struct kvt_gpu *gpu, kvt_kernel kernel, struct kvt_dim3 grid, struct kvt_dim3 block,
			     uint32_t shared_bytes, kvt_stream stream, void *const *args, uint32_t n_args)
{
	return put_launch(mock_of(gpu), KVT_MOCK_launch_early, kernel, grid, block, shared_bytes, stream, args, n_args);
}

static int add_object(struct kvt_table *table, void *object, uint32_t *handle)
{
	int err = object ? kvt_table_add(table, object, handle) : kvt_fail(-ENOMEM, "mock: no memory for an object");

	if (err)
		free(object);
	return err;
}

static int mock_stream_create(struct kvt_gpu *gpu, kvt_stream *stream)
{
	struct mock *m = mock_of(gpu);
	int err = ENTER(m, stream_create);

	return leave(m, err ? err : add_object(&m->streams, calloc(1, sizeof(struct stream)), stream));
}

static void stream_free(struct stream *s)
{
	kvt_op_list_free(&s->capture);
	free(s->queue);
	free(s);
}

static void mock_stream_destroy(struct kvt_gpu *gpu, kvt_stream handle)
{
	struct mock *m = mock_of(gpu);
	struct stream *s;

	NOTE(m, stream_destroy, .stream = handle);
	s = handle ? kvt_table_get(&m->streams, handle) : NULL;
	if (s) {
		drain(m, s);
		kvt_table_remove(&m->streams, handle);
		stream_free(s);
	} else {
		fault(m, "stream_destroy of handle %u", handle);
	}
	leave(m, 0);
}

static int mock_stream_sync(struct kvt_gpu *gpu, kvt_stream handle)
{
	struct mock *m = mock_of(gpu);
	int err = ENTER(m, stream_sync, .stream = handle);
	struct stream *s = err ? NULL : stream_of(m, handle);

	m->syncs++;
	if (!err && !s)
		err = -EINVAL;
	else if (!err && s->capturing)
		err = kvt_fail(-EINVAL, "mock: stream %u is capturing: nothing on it runs", handle);
	return leave(m, err ? err : drain(m, s));
}

static int mock_bind_thread(struct kvt_gpu *gpu)
{
	struct mock *m = mock_of(gpu);

	return leave(m, ENTER(m, bind_thread));
}

/* ---- graphs ---- */

static int mock_capture_begin(struct kvt_gpu *gpu, kvt_stream handle)
{
	struct mock *m = mock_of(gpu);
	int err = ENTER(m, capture_begin, .stream = handle);
	struct stream *s = err ? NULL : stream_of(m, handle);

	if (!err && !s)
		err = -EINVAL;
	else if (!err && !handle)
		err = kvt_fail(-EINVAL, "mock: the default stream cannot capture: create one");
	else if (!err && s->capturing)
		err = kvt_fail(-EINVAL, "mock: stream %u is capturing already", handle);
	if (!err)
		s->capturing = true;
	return leave(m, err);
}

static int end_capture(struct mock *m, kvt_stream handle, kvt_graph *graph)
{
	struct stream *s = stream_of(m, handle);
	struct kvt_op_list *ops;

	if (!s)
		return -EINVAL;
	if (!s->capturing)
		return kvt_fail(-EINVAL, "mock: stream %u is not capturing", handle);
	ops = malloc(sizeof(*ops));
	s->capturing = false;
	if (ops)
		*ops = s->capture;
	else
		kvt_op_list_free(&s->capture);
	s->capture = (struct kvt_op_list){ 0 };
	return add_object(&m->graphs, ops, graph);
}

static int mock_capture_end(struct kvt_gpu *gpu, kvt_stream handle, kvt_graph *graph)
{
	struct mock *m = mock_of(gpu);
	int err = ENTER(m, capture_end, .stream = handle);

	return leave(m, err ? err : end_capture(m, handle, graph));
}

static int mock_graph_launch(struct kvt_gpu *gpu, kvt_graph graph, kvt_stream stream)
{
	struct mock *m = mock_of(gpu);
	int err = ENTER(m, graph_launch, .handle = graph, .stream = stream);
	const struct kvt_op_list *ops = kvt_table_get(&m->graphs, graph);

	if (!err && !ops)
		err = kvt_fail(-EINVAL, "mock: no graph has handle %u", graph);
	if (!err && !stream_of(m, stream))
		err = -EINVAL;
	for (uint32_t i = 0; !err && i < ops->n; i++)
		err = put(m, stream, &ops->ops[i]);
	return leave(m, err);
}

static void mock_graph_destroy(struct kvt_gpu *gpu, kvt_graph graph)
{
	struct mock *m = mock_of(gpu);
	struct kvt_op_list *ops;

	NOTE(m, graph_destroy, .handle = graph);
	ops = kvt_table_remove(&m->graphs, graph);
	if (ops)
		kvt_op_list_free(ops);
	else
		fault(m, "graph_destroy of handle %u", graph);
	free(ops);
	leave(m, 0);
}

/* ---- events ---- */

static int mock_event_create(struct kvt_gpu *gpu, kvt_event *event)
{
	struct mock *m = mock_of(gpu);
	int err = ENTER(m, event_create);

	return leave(m, err ? err : add_object(&m->events, calloc(1, sizeof(struct event)), event));
}

static void mock_event_destroy(struct kvt_gpu *gpu, kvt_event event)
{
	struct mock *m = mock_of(gpu);
	struct event *e;

	NOTE(m, event_destroy, .handle = event);
	e = kvt_table_get(&m->events, event);
	if (e && !e->destroyed)
		e->destroyed = true;
	else
		fault(m, "event_destroy of handle %u", event);
	leave(m, 0);
}

static int mock_event_record(struct kvt_gpu *gpu, kvt_event event, kvt_stream stream)
{
	struct mock *m = mock_of(gpu);
	const struct kvt_op op = { .kind = KVT_OP_RECORD, .event.event = event };
	int err = ENTER(m, event_record, .handle = event, .stream = stream);
	struct event *e = err ? NULL : event_of(m, event);
	struct stream *s = e ? stream_of(m, stream) : NULL;

	if (!err)
		err = s ? put(m, stream, &op) : -EINVAL;
	if (!err && s->capturing)
		e->captured = true;
	return leave(m, err);
}

static int mock_event_wait(struct kvt_gpu *gpu, kvt_stream stream, kvt_event event)
{
	struct mock *m = mock_of(gpu);
	const struct kvt_op op = { .kind = KVT_OP_WAIT, .event.event = event };
	int err = ENTER(m, event_wait, .handle = event, .stream = stream);
	struct event *e = err ? NULL : event_of(m, event);
	struct stream *s = e ? stream_of(m, stream) : NULL;

	if (!err && !s)
		err = -EINVAL;
	else if (!err && e->captured && !s->capturing)
		err = kvt_fail(-EINVAL, "mock: event %u was recorded in a capture: only that capture can wait for it",
			       event);
	return leave(m, err ? err : put(m, stream, &op));
}

/* The event if it can be asked about. */
static struct event *asked(struct mock *m, kvt_event event)
{
	struct event *e = event_of(m, event);

	if (e && e->captured) {
		kvt_fail(-EINVAL, "mock: event %u was recorded in a capture", event);
		return NULL;
	}
	return e;
}

/* Being asked lets one more operation run, so that a poll ends. */
static int mock_event_query(struct kvt_gpu *gpu, kvt_event event)
{
	struct mock *m = mock_of(gpu);
	int err = ENTER(m, event_query, .handle = event);
	struct event *e = err ? NULL : asked(m, event);
	struct stream *next;

	if (err || !e)
		return leave(m, err ? err : -EINVAL);
	if (e->reached >= e->recorded)
		return leave(m, 1);
	next = pick(m, NULL, false);
	if (!next)
		return leave(m, stuck(m));
	step(m, next);
	return leave(m, e->reached >= e->recorded);
}

static int mock_event_sync(struct kvt_gpu *gpu, kvt_event event)
{
	struct mock *m = mock_of(gpu);
	int err = ENTER(m, event_sync, .handle = event);
	struct event *e = err ? NULL : asked(m, event);

	m->syncs++;
	if (err || !e)
		return leave(m, err ? err : -EINVAL);
	return leave(m, reach(m, e, e->recorded));
}

static int mock_event_elapsed(struct kvt_gpu *gpu, kvt_event from, kvt_event to, float *ms)
{
	struct mock *m = mock_of(gpu);
	int err = ENTER(m, event_elapsed, .handle = from);
	struct event *a = err ? NULL : event_of(m, from), *b = a ? event_of(m, to) : NULL;

	if (!err && !b)
		err = -EINVAL;
	else if (!err && (!a->reached || a->reached < a->recorded || !b->reached || b->reached < b->recorded))
		err = kvt_fail(-EAGAIN, "mock: events %u and %u have not both been reached", from, to);
	if (!err)
		*ms = (float)((double)(b->at.tv_sec - a->at.tv_sec) * 1e3 +
			      (double)(b->at.tv_nsec - a->at.tv_nsec) * 1e-6);
	return leave(m, err);
}

/* ---- open, close, controls ---- */

static void mock_close(struct kvt_gpu *gpu)
{
	struct mock *m = mock_of(gpu);
	uint32_t i;

	for (i = 0; i < m->streams.n; i++)
		if (m->streams.objects[i])
			drain(m, m->streams.objects[i]);
	for (i = 0; i < m->streams.n; i++)
		if (m->streams.objects[i])
			stream_free(m->streams.objects[i]);
	for (i = 0; i < m->events.n; i++)
		free(m->events.objects[i]);
	for (i = 0; i < m->graphs.n; i++) {
		if (m->graphs.objects[i])
			kvt_op_list_free(m->graphs.objects[i]);
		free(m->graphs.objects[i]);
	}
	for (i = 0; i < m->ranges.n; i++)
		if (m->ranges.ranges[i].kind == KVT_RANGE_HOST)
			free((void *)m->ranges.ranges[i].base);
	kvt_ranges_free(&m->ranges);
	free(m->streams.objects);
	free(m->events.objects);
	free(m->graphs.objects);
	free(m->log);
	munmap(m->memory, m->bytes);
	pthread_mutex_destroy(&m->lock);
	free(m);
}

static const struct kvt_gpu_ops mock_ops = {
	.name = "mock",
#define X(name) .name = mock_##name,
	KVT_MOCK_CALLS(X)
#undef X
};

int kvt_mock_open(uint64_t memory, struct kvt_gpu **gpu)
{
	struct mock *m = calloc(1, sizeof(*m));
	uint32_t first;

	if (!m)
		return kvt_fail(-ENOMEM, "no memory for the mock backend");
	m->bytes = memory ? memory : 64ull << 20;
	m->memory = mmap(NULL, m->bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (m->memory == MAP_FAILED) {
		free(m);
		return kvt_fail(-ENOMEM, "mock: no %llu bytes of address space", (unsigned long long)memory);
	}
	madvise(m->memory, m->bytes, MADV_HUGEPAGE); /* a wish: smaller pages serve as well */
	if (add_object(&m->streams, calloc(1, sizeof(struct stream)), &first)) {
		munmap(m->memory, m->bytes);
		free(m);
		return -ENOMEM;
	}
	m->streams.objects[0] = kvt_table_remove(&m->streams, first);
	m->gpu.ops = &mock_ops;
	snprintf(m->gpu.description, sizeof(m->gpu.description), "a mock with %llu KiB",
		 (unsigned long long)m->bytes >> 10);
	pthread_mutex_init(&m->lock, NULL);
	*gpu = &m->gpu;
	return 0;
}

void kvt_mock_readable(struct kvt_gpu *gpu)
{
	struct mock *m = mock_of(gpu);

	pthread_mutex_lock(&m->lock);
	m->gpu.host_readable = true;
	open_memory(m);
	pthread_mutex_unlock(&m->lock);
}

void kvt_mock_fail_at(struct kvt_gpu *gpu, uint64_t nth, int err)
{
	struct mock *m = mock_of(gpu);

	pthread_mutex_lock(&m->lock);
	m->fail_at = nth;
	m->fail_err = err;
	m->failable = 0;
	m->failed = false;
	pthread_mutex_unlock(&m->lock);
}

bool kvt_mock_failed(struct kvt_gpu *gpu)
{
	struct mock *m = mock_of(gpu);
	bool failed;

	pthread_mutex_lock(&m->lock);
	failed = m->failed;
	pthread_mutex_unlock(&m->lock);
	return failed;
}

void kvt_mock_refuse(struct kvt_gpu *gpu, enum kvt_mock_call call, int err)
{
	struct mock *m = mock_of(gpu);

	pthread_mutex_lock(&m->lock);
	m->refuse[call] = err;
	pthread_mutex_unlock(&m->lock);
}

void kvt_mock_delay(struct kvt_gpu *gpu, uint64_t calls)
{
	struct mock *m = mock_of(gpu);

	pthread_mutex_lock(&m->lock);
	m->delay = calls;
	pthread_mutex_unlock(&m->lock);
}

void kvt_mock_reorder(struct kvt_gpu *gpu, uint64_t seed)
{
	struct mock *m = mock_of(gpu);

	pthread_mutex_lock(&m->lock);
	m->seed = seed;
	pthread_mutex_unlock(&m->lock);
}

void kvt_mock_flip(struct kvt_gpu *gpu, uint64_t nth, uint64_t bit)
{
	struct mock *m = mock_of(gpu);

	pthread_mutex_lock(&m->lock);
	m->flip_at = nth;
	m->flip_bit = bit;
	m->copies = 0;
	pthread_mutex_unlock(&m->lock);
}

void kvt_mock_corrupt(struct kvt_gpu *gpu, kvt_dptr p, uint64_t bit)
{
	struct mock *m = mock_of(gpu);

	pthread_mutex_lock(&m->lock);
	open_memory(m);
	*(uint8_t *)ptr_of(p + bit / 8) ^= 1u << bit % 8;
	close_memory(m);
	pthread_mutex_unlock(&m->lock);
}

bool kvt_mock_log(struct kvt_gpu *gpu, uint64_t i, struct kvt_mock_record *record)
{
	struct mock *m = mock_of(gpu);
	bool there;

	pthread_mutex_lock(&m->lock);
	there = i < m->n_log;
	if (there)
		*record = m->log[i];
	pthread_mutex_unlock(&m->lock);
	return there;
}

static uint64_t read_counter(struct mock *m, const uint64_t *counter)
{
	uint64_t n;

	pthread_mutex_lock(&m->lock);
	n = *counter;
	pthread_mutex_unlock(&m->lock);
	return n;
}

uint64_t kvt_mock_count(struct kvt_gpu *gpu, enum kvt_mock_call call)
{
	return read_counter(mock_of(gpu), &mock_of(gpu)->counts[call]);
}

uint64_t kvt_mock_syncs(struct kvt_gpu *gpu)
{
	return read_counter(mock_of(gpu), &mock_of(gpu)->syncs);
}

uint64_t kvt_mock_allocs(struct kvt_gpu *gpu)
{
	return read_counter(mock_of(gpu), &mock_of(gpu)->allocs);
}

void kvt_mock_reset(struct kvt_gpu *gpu)
{
	struct mock *m = mock_of(gpu);

	pthread_mutex_lock(&m->lock);
	m->n_log = 0;
	m->syncs = m->allocs = 0;
	memset(m->counts, 0, sizeof(m->counts));
	pthread_mutex_unlock(&m->lock);
}

uint64_t kvt_mock_alive(struct kvt_gpu *gpu)
{
	struct mock *m = mock_of(gpu);
	uint64_t n;
	uint32_t i;

	pthread_mutex_lock(&m->lock);
	n = m->ranges.n;
	for (i = 1; i < m->streams.n; i++)
		n += m->streams.objects[i] != NULL;
	for (i = 1; i < m->graphs.n; i++)
		n += m->graphs.objects[i] != NULL;
	for (i = 1; i < m->events.n; i++)
		n += m->events.objects[i] && !((struct event *)m->events.objects[i])->destroyed;
	pthread_mutex_unlock(&m->lock);
	return n;
}

const char *kvt_mock_fault(struct kvt_gpu *gpu)
{
	return mock_of(gpu)->fault; /* written once */
}
