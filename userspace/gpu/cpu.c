// SPDX-License-Identifier: MIT
/*
 * The reference backend: device memory is host memory, and what is put on a
 * stream is done before the call returns. A graph is a list of operations.
 *
 * Addresses are checked as a device would: the device's side of a copy lies
 * inside one allocation. Kernels are trusted.
 *
 * The lock guards the tables, not the work: two streams run side by side.
 */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/budget.h"
#include "base/err.h"
#include "gpu/gpu.h"
#include "gpu/op.h"
#include "gpu/ranges.h"

#define ALIGN 256

struct stream {
	bool capturing;
	struct kvt_op_list ops; /* of the capture */
};

struct event {
	bool captured; /* its last recording is in a capture that has not run */
	bool reached;
	struct timespec at;
};

struct cpu {
	struct kvt_gpu gpu;
	pthread_mutex_t lock;
	struct kvt_budget memory;
	struct kvt_ranges ranges;
	struct stream stream0;
	struct kvt_table streams, events, graphs;
};

static struct cpu *cpu_of(struct kvt_gpu *gpu)
{
	return (struct cpu *)gpu; /* its first member */
}

/* ---- memory ---- */

/* Forget the range that begins at @p. Returns its size; 0, with a message, if there is none. */
static uint64_t forget(struct cpu *c, enum kvt_range_kind kind, uintptr_t p, const char *what)
{
	uint64_t bytes;

	pthread_mutex_lock(&c->lock);
	bytes = kvt_ranges_remove(&c->ranges, kind, p);
	pthread_mutex_unlock(&c->lock);
	if (!bytes)
		kvt_fail(-EINVAL, "%s: %#lx is not the beginning of %s; nothing done", what, (unsigned long)p,
			 kvt_range_name(kind));
	return bytes;
}

/* Whether [p, p + bytes) lies in one allocation of the device. */
static int check_device(struct cpu *c, const char *what, kvt_dptr p, uint64_t bytes)
{
	bool inside;

	pthread_mutex_lock(&c->lock);
	inside = kvt_ranges_holding(&c->ranges, KVT_RANGE_DEVICE, p, bytes);
	pthread_mutex_unlock(&c->lock);
	if (inside)
		return 0;
	return kvt_fail(-EINVAL, "%s: %llu bytes at %#llx are not in one device allocation", what,
			(unsigned long long)bytes, (unsigned long long)p);
}

/* The same for what a kernel may read too: the device's, or pinned memory of the host. */
static int check_source(struct cpu *c, const char *what, uint64_t p, uint64_t bytes)
{
	bool pinned;

	pthread_mutex_lock(&c->lock);
	pinned = kvt_ranges_pinned(&c->ranges, p, bytes);
	pthread_mutex_unlock(&c->lock);
	return pinned ? 0 : check_device(c, what, p, bytes);
}

static int take(struct cpu *c, enum kvt_range_kind kind, uint64_t bytes, void **p)
{
	size_t align = kind == KVT_RANGE_DEVICE ? ALIGN : (size_t)sysconf(_SC_PAGESIZE);
	void *mem;
	int err;

	if (!bytes)
		return kvt_fail(-EINVAL, "0 bytes of %s asked for", kvt_range_name(kind));
	if (kind == KVT_RANGE_DEVICE && kvt_budget_charge(&c->memory, bytes))
		return kvt_fail(-ENOMEM, "%llu bytes of device memory asked for, %llu of %llu are taken",
				(unsigned long long)bytes, (unsigned long long)c->memory.used,
				(unsigned long long)c->memory.limit);
	if (posix_memalign(&mem, align, bytes)) {
		err = kvt_fail(-ENOMEM, "no %llu bytes for %s", (unsigned long long)bytes, kvt_range_name(kind));
		goto release_budget;
	}
	pthread_mutex_lock(&c->lock);
	err = kvt_ranges_add(&c->ranges, kind, (uintptr_t)mem, bytes);
	pthread_mutex_unlock(&c->lock);
	if (err)
		goto free_memory;
	*p = mem;
	return 0;

free_memory:
	free(mem);
release_budget:
	if (kind == KVT_RANGE_DEVICE)
		kvt_budget_release(&c->memory, bytes);
	return err;
}

static int cpu_alloc(struct kvt_gpu *gpu, uint64_t bytes, kvt_dptr *p)
{
	void *mem = NULL;
	int err = take(cpu_of(gpu), KVT_RANGE_DEVICE, bytes, &mem);

	if (!err)
		*p = (uintptr_t)mem;
	return err;
}

static void cpu_free(struct kvt_gpu *gpu, kvt_dptr p)
{
	struct cpu *c = cpu_of(gpu);
	uint64_t bytes;

	if (!p)
		return;
	bytes = forget(c, KVT_RANGE_DEVICE, p, "free");
	if (bytes) {
		free((void *)(uintptr_t)p);
		kvt_budget_release(&c->memory, bytes);
	} else {
		kvt_log(KVT_LOG_ERROR, "cpu backend: %s", kvt_last_error());
	}
}

static int cpu_mem_info(struct kvt_gpu *gpu, uint64_t *free_bytes, uint64_t *total_bytes)
{
	struct cpu *c = cpu_of(gpu);

	*total_bytes = c->memory.limit;
	*free_bytes = c->memory.limit - c->memory.used;
	return 0;
}

static int cpu_host_alloc(struct kvt_gpu *gpu, uint64_t bytes, void **p)
{
	return take(cpu_of(gpu), KVT_RANGE_HOST, bytes, p);
}

static void cpu_host_free(struct kvt_gpu *gpu, void *p)
{
	if (!p)
		return;
	if (forget(cpu_of(gpu), KVT_RANGE_HOST, (uintptr_t)p, "host_free"))
		free(p);
	else
		kvt_log(KVT_LOG_ERROR, "cpu backend: %s", kvt_last_error());
}

static int cpu_host_register(struct kvt_gpu *gpu, void *p, uint64_t bytes)
{
	struct cpu *c = cpu_of(gpu);
	int err;

	pthread_mutex_lock(&c->lock);
	err = kvt_ranges_register(&c->ranges, p, bytes);
	pthread_mutex_unlock(&c->lock);
	return err;
}

static int cpu_host_unregister(struct kvt_gpu *gpu, void *p)
{
	return forget(cpu_of(gpu), KVT_RANGE_REGISTERED, (uintptr_t)p, "host_unregister") ? 0 : -EINVAL;
}

/* ---- streams ---- */

/* With the lock held. */
static struct stream *stream_of(struct cpu *c, kvt_stream handle)
{
	struct stream *s = handle ? kvt_table_get(&c->streams, handle) : &c->stream0;

	if (!s)
		kvt_fail(-EINVAL, "no stream has handle %u", handle);
	return s;
}

/* With the lock held. */
static struct event *event_of(struct cpu *c, kvt_event handle)
{
	struct event *e = kvt_table_get(&c->events, handle);

	if (!e)
		kvt_fail(-EINVAL, "no event has handle %u", handle);
	return e;
}

static int run_event(struct cpu *c, const struct kvt_op *op)
{
	struct event *e;

	pthread_mutex_lock(&c->lock);
	e = event_of(c, op->event.event);
	if (e && op->kind == KVT_OP_RECORD) {
		clock_gettime(CLOCK_MONOTONIC, &e->at);
		e->reached = true;
		e->captured = false;
	}
	pthread_mutex_unlock(&c->lock);
	return e ? 0 : -EINVAL;
}

static int run(struct cpu *c, const struct kvt_op *op)
{
	if (op->kind == KVT_OP_RECORD || op->kind == KVT_OP_WAIT)
		return run_event(c, op);
	return kvt_op_run(op);
}

/* Record the operation where the stream captures, else do it. */
static int put(struct cpu *c, kvt_stream handle, const struct kvt_op *op)
{
	struct stream *s;
	bool capturing = false;
	int err = 0;

	pthread_mutex_lock(&c->lock);
	s = stream_of(c, handle);
	if (!s) {
		err = -EINVAL;
	} else if (s->capturing) {
		capturing = true;
		err = kvt_op_append(&s->ops, op);
	}
	pthread_mutex_unlock(&c->lock);
	return err || capturing ? err : run(c, op);
}

static int put_copy(struct cpu *c, kvt_stream stream, void *dst, const void *src, uint64_t bytes)
{
	const struct kvt_op op = {
		.kind = KVT_OP_COPY,
		.copy = { .dst = dst, .src = src, .width = bytes, .height = 1 },
	};

	return put(c, stream, &op);
}

static int cpu_copy_h2d_async(struct kvt_gpu *gpu, kvt_dptr dst, const void *src, uint64_t bytes, kvt_stream stream)
{
	struct cpu *c = cpu_of(gpu);

	if (bytes && check_device(c, "copy_h2d", dst, bytes))
		return -EINVAL;
	return put_copy(c, stream, (void *)(uintptr_t)dst, src, bytes);
}

static int cpu_copy_d2h_async(struct kvt_gpu *gpu, void *dst, kvt_dptr src, uint64_t bytes, kvt_stream stream)
{
	struct cpu *c = cpu_of(gpu);

	if (bytes && check_device(c, "copy_d2h", src, bytes))
		return -EINVAL;
	return put_copy(c, stream, dst, (const void *)(uintptr_t)src, bytes);
}

static int cpu_copy_d2d_async(struct kvt_gpu *gpu, kvt_dptr dst, kvt_dptr src, uint64_t bytes, kvt_stream stream)
{
	struct cpu *c = cpu_of(gpu);

	if (bytes && (check_device(c, "copy_d2d to", dst, bytes) || check_device(c, "copy_d2d from", src, bytes)))
		return -EINVAL;
	return put_copy(c, stream, (void *)(uintptr_t)dst, (const void *)(uintptr_t)src, bytes);
}

static int cpu_copy_h2d(struct kvt_gpu *gpu, kvt_dptr dst, const void *src, uint64_t bytes)
{
	return cpu_copy_h2d_async(gpu, dst, src, bytes, 0);
}

static int cpu_copy_d2h(struct kvt_gpu *gpu, void *dst, kvt_dptr src, uint64_t bytes)
{
	return cpu_copy_d2h_async(gpu, dst, src, bytes, 0);
}

static int cpu_copy_d2d(struct kvt_gpu *gpu, kvt_dptr dst, kvt_dptr src, uint64_t bytes)
{
	return cpu_copy_d2d_async(gpu, dst, src, bytes, 0);
}

static int cpu_copy_2d_async(struct kvt_gpu *gpu, kvt_dptr dst, uint64_t dst_pitch, kvt_dptr src, uint64_t src_pitch,
			     uint64_t width, uint64_t height, kvt_stream stream)
{
	struct cpu *c = cpu_of(gpu);
	const struct kvt_op op = {
		.kind = KVT_OP_COPY_2D,
		.copy = {
			.dst = (void *)(uintptr_t)dst, .dst_pitch = dst_pitch,
			.src = (const void *)(uintptr_t)src, .src_pitch = src_pitch,
			.width = width, .height = height,
		},
	};
	uint64_t dst_bytes, src_bytes;
	int err = kvt_span_2d(dst_pitch, src_pitch, width, height, &dst_bytes, &src_bytes);

	if (!err && dst_bytes)
		err = check_device(c, "copy_2d to", dst, dst_bytes);
	if (!err && src_bytes)
		err = check_source(c, "copy_2d from", src, src_bytes);
	if (err)
		return err;
	return put(c, stream, &op);
}

static int cpu_copy_batch_async(struct kvt_gpu *gpu, const uint64_t *dst, const uint64_t *src, uint64_t bytes, uint32_t n,
				kvt_stream handle)
{
	struct cpu *c = cpu_of(gpu);
	struct stream *s;
	int err = 0;

	for (uint32_t i = 0; i < n && bytes && !err; i++) {
		err = check_source(c, "copy_batch to", dst[i], bytes);
		if (!err)
			err = check_source(c, "copy_batch from", src[i], bytes);
	}
	pthread_mutex_lock(&c->lock);
	s = err ? NULL : stream_of(c, handle);
	if (!s)
		err = -EINVAL;
	else if (s->capturing)
		err = kvt_fail(-EINVAL, "stream %u is capturing: batched copies cannot be", handle);
	pthread_mutex_unlock(&c->lock);
	for (uint32_t i = 0; i < n && !err; i++)
		err = put_copy(c, handle, (void *)(uintptr_t)dst[i], (const void *)(uintptr_t)src[i], bytes);
	return err;
}

static int cpu_memset_async(struct kvt_gpu *gpu, kvt_dptr p, uint8_t value, uint64_t bytes, kvt_stream stream)
{
	struct cpu *c = cpu_of(gpu);
	const struct kvt_op op = {
		.kind = KVT_OP_MEMSET,
		.set = { .dst = (void *)(uintptr_t)p, .bytes = bytes, .value = value },
	};

	if (bytes && check_device(c, "memset", p, bytes))
		return -EINVAL;
	return put(c, stream, &op);
}

static int cpu_kernel(struct kvt_gpu *gpu, const char *module, const char *function, kvt_kernel *kernel)
{
	(void)gpu;
	return kvt_twin_find(module, function, kernel);
}

static int cpu_tensor_map(struct kvt_gpu *gpu, kvt_dptr base, uint64_t bytes, uint32_t row_bytes, uint32_t rows, uint64_t *map)
{
	if (kvt_tensor_map_check(base, bytes, row_bytes, rows) || check_device(cpu_of(gpu), "tensor_map", base, bytes))
		return -EINVAL;
	kvt_tensor_map_say(base, bytes, row_bytes, rows, map);
	return 0;
}

static int cpu_launch(struct kvt_gpu *gpu, kvt_kernel kernel, struct kvt_dim3 grid, struct kvt_dim3 block,
		      uint32_t shared_bytes, kvt_stream stream, void *const *args, uint32_t n_args)
{
	const struct kvt_twin_entry *twin = kvt_twin_get(kernel);
	struct kvt_op op;
	int err;

	(void)shared_bytes;
	if (!twin)
		return -EINVAL;
	err = kvt_op_launch(&op, twin, grid, block, args, n_args);
	return err ? err : put(cpu_of(gpu), stream, &op);
}

static int add_object(struct cpu *c, struct kvt_table *table, void *object, uint32_t *handle)
{
	int err;

	if (!object)
		return kvt_fail(-ENOMEM, "no memory for a stream, event or graph");
	pthread_mutex_lock(&c->lock);
	err = kvt_table_add(table, object, handle);
	pthread_mutex_unlock(&c->lock);
	if (err)
		free(object);
	return err;
}

static int cpu_stream_create(struct kvt_gpu *gpu, kvt_stream *stream)
{
	struct cpu *c = cpu_of(gpu);

	return add_object(c, &c->streams, calloc(1, sizeof(struct stream)), stream);
}

static void cpu_stream_destroy(struct kvt_gpu *gpu, kvt_stream handle)
{
	struct cpu *c = cpu_of(gpu);
	struct stream *s;

	pthread_mutex_lock(&c->lock);
	s = kvt_table_remove(&c->streams, handle);
	pthread_mutex_unlock(&c->lock);
	if (s)
		kvt_op_list_free(&s->ops);
	free(s);
}

static int cpu_stream_sync(struct kvt_gpu *gpu, kvt_stream handle)
{
	struct cpu *c = cpu_of(gpu);
	struct stream *s;
	int err = 0;

	pthread_mutex_lock(&c->lock);
	s = stream_of(c, handle);
	if (!s)
		err = -EINVAL;
	else if (s->capturing)
		err = kvt_fail(-EINVAL, "stream %u is capturing: nothing on it runs", handle);
	pthread_mutex_unlock(&c->lock);
	return err;
}

static int cpu_bind_thread(struct kvt_gpu *gpu)
{
	(void)gpu;
	return 0;
}

/* ---- graphs ---- */

static int cpu_capture_begin(struct kvt_gpu *gpu, kvt_stream handle)
{
	struct cpu *c = cpu_of(gpu);
	struct stream *s;
	int err = 0;

	pthread_mutex_lock(&c->lock);
	s = stream_of(c, handle);
	if (!s)
		err = -EINVAL;
	else if (!handle)
		err = kvt_fail(-EINVAL, "the default stream cannot capture: create one");
	else if (s->capturing)
		err = kvt_fail(-EINVAL, "stream %u is capturing already", handle);
	else
		s->capturing = true;
	pthread_mutex_unlock(&c->lock);
	return err;
}

static int cpu_capture_end(struct kvt_gpu *gpu, kvt_stream handle, kvt_graph *graph)
{
	struct cpu *c = cpu_of(gpu);
	struct kvt_op_list *ops = calloc(1, sizeof(*ops));
	struct stream *s;
	int err = 0;

	pthread_mutex_lock(&c->lock);
	s = stream_of(c, handle);
	if (!s) {
		err = -EINVAL;
	} else if (!s->capturing) {
		err = kvt_fail(-EINVAL, "stream %u is not capturing", handle);
	} else {
		s->capturing = false;
		if (ops)
			*ops = s->ops;
		else
			kvt_op_list_free(&s->ops);
		s->ops = (struct kvt_op_list){ 0 };
		if (!ops || kvt_table_add(&c->graphs, ops, graph))
			err = kvt_fail(-ENOMEM, "no memory for a graph");
	}
	pthread_mutex_unlock(&c->lock);
	if (err && ops)
		kvt_op_list_free(ops);
	if (err)
		free(ops);
	return err;
}

static int cpu_graph_launch(struct kvt_gpu *gpu, kvt_graph graph, kvt_stream stream)
{
	struct cpu *c = cpu_of(gpu);
	struct kvt_op_list *ops;
	int err = 0;

	pthread_mutex_lock(&c->lock);
	ops = kvt_table_get(&c->graphs, graph);
	if (!ops)
		err = kvt_fail(-EINVAL, "no graph has handle %u", graph);
	else if (!stream_of(c, stream))
		err = -EINVAL;
	pthread_mutex_unlock(&c->lock);
	for (uint32_t i = 0; !err && i < ops->n; i++)
		err = put(c, stream, &ops->ops[i]);
	return err;
}

static void cpu_graph_destroy(struct kvt_gpu *gpu, kvt_graph graph)
{
	struct cpu *c = cpu_of(gpu);
	struct kvt_op_list *ops;

	pthread_mutex_lock(&c->lock);
	ops = kvt_table_remove(&c->graphs, graph);
	pthread_mutex_unlock(&c->lock);
	if (ops)
		kvt_op_list_free(ops);
	free(ops);
}

/* ---- events ---- */

static int cpu_event_create(struct kvt_gpu *gpu, kvt_event *event)
{
	struct cpu *c = cpu_of(gpu);

	return add_object(c, &c->events, calloc(1, sizeof(struct event)), event);
}

static void cpu_event_destroy(struct kvt_gpu *gpu, kvt_event event)
{
	struct cpu *c = cpu_of(gpu);

	pthread_mutex_lock(&c->lock);
	free(kvt_table_remove(&c->events, event));
	pthread_mutex_unlock(&c->lock);
}

static int cpu_event_record(struct kvt_gpu *gpu, kvt_event event, kvt_stream stream)
{
	struct cpu *c = cpu_of(gpu);
	const struct kvt_op op = { .kind = KVT_OP_RECORD, .event.event = event };
	struct stream *s;
	struct event *e;

	pthread_mutex_lock(&c->lock);
	e = event_of(c, event);
	s = e ? stream_of(c, stream) : NULL;
	if (s && s->capturing)
		e->captured = true;
	pthread_mutex_unlock(&c->lock);
	return s ? put(c, stream, &op) : -EINVAL;
}

static int cpu_event_wait(struct kvt_gpu *gpu, kvt_stream stream, kvt_event event)
{
	struct cpu *c = cpu_of(gpu);
	const struct kvt_op op = { .kind = KVT_OP_WAIT, .event.event = event };
	struct stream *s;
	struct event *e;
	int err = 0;

	pthread_mutex_lock(&c->lock);
	e = event_of(c, event);
	s = e ? stream_of(c, stream) : NULL;
	if (!s)
		err = -EINVAL;
	else if (e->captured && !s->capturing)
		err = kvt_fail(-EINVAL, "event %u was recorded in a capture: only that capture can wait for it", event);
	pthread_mutex_unlock(&c->lock);
	return err ? err : put(c, stream, &op);
}

static int cpu_event_query(struct kvt_gpu *gpu, kvt_event event)
{
	struct cpu *c = cpu_of(gpu);
	struct event *e;
	int reached = -EINVAL;

	pthread_mutex_lock(&c->lock);
	e = event_of(c, event);
	if (e && e->captured)
		kvt_fail(-EINVAL, "event %u was recorded in a capture", event);
	else if (e)
		reached = 1;
	pthread_mutex_unlock(&c->lock);
	return reached;
}

static int cpu_event_sync(struct kvt_gpu *gpu, kvt_event event)
{
	int reached = cpu_event_query(gpu, event);

	return reached < 0 ? reached : 0;
}

static int cpu_event_elapsed(struct kvt_gpu *gpu, kvt_event from, kvt_event to, float *ms)
{
	struct cpu *c = cpu_of(gpu);
	struct event *a, *b;
	int err = 0;

	pthread_mutex_lock(&c->lock);
	a = event_of(c, from);
	b = a ? event_of(c, to) : NULL;
	if (!b)
		err = -EINVAL;
	else if (!a->reached || !b->reached)
		err = kvt_fail(-EAGAIN, "events %u and %u have not both been reached", from, to);
	else
		*ms = (float)((double)(b->at.tv_sec - a->at.tv_sec) * 1e3 +
			      (double)(b->at.tv_nsec - a->at.tv_nsec) * 1e-6);
	pthread_mutex_unlock(&c->lock);
	return err;
}

/* ---- open and close ---- */

static void cpu_close(struct kvt_gpu *gpu)
{
	struct cpu *c = cpu_of(gpu);

	kvt_table_free(&c->graphs, gpu, cpu_graph_destroy);
	kvt_table_free(&c->streams, gpu, cpu_stream_destroy);
	kvt_table_free(&c->events, gpu, cpu_event_destroy);
	for (uint32_t i = 0; i < c->ranges.n; i++)
		if (c->ranges.ranges[i].kind != KVT_RANGE_REGISTERED)
			free((void *)c->ranges.ranges[i].base);
	kvt_ranges_free(&c->ranges);
	pthread_mutex_destroy(&c->lock);
	free(c);
}

static const struct kvt_gpu_ops cpu_ops = {
	.name = "cpu",
	.close = cpu_close,
	.alloc = cpu_alloc,
	.free = cpu_free,
	.mem_info = cpu_mem_info,
	.host_alloc = cpu_host_alloc,
	.host_free = cpu_host_free,
	.host_register = cpu_host_register,
	.host_unregister = cpu_host_unregister,
	.copy_h2d = cpu_copy_h2d,
	.copy_d2h = cpu_copy_d2h,
	.copy_d2d = cpu_copy_d2d,
	.copy_h2d_async = cpu_copy_h2d_async,
	.copy_d2h_async = cpu_copy_d2h_async,
	.copy_d2d_async = cpu_copy_d2d_async,
	.copy_2d_async = cpu_copy_2d_async,
	.copy_batch_async = cpu_copy_batch_async,
	.memset_async = cpu_memset_async,
	.kernel = cpu_kernel,
	.tensor_map = cpu_tensor_map,
	.launch = cpu_launch,
	.launch_early = cpu_launch,
	.stream_create = cpu_stream_create,
	.stream_destroy = cpu_stream_destroy,
	.stream_sync = cpu_stream_sync,
	.bind_thread = cpu_bind_thread,
	.capture_begin = cpu_capture_begin,
	.capture_end = cpu_capture_end,
	.graph_launch = cpu_graph_launch,
	.graph_destroy = cpu_graph_destroy,
	.event_create = cpu_event_create,
	.event_destroy = cpu_event_destroy,
	.event_record = cpu_event_record,
	.event_wait = cpu_event_wait,
	.event_query = cpu_event_query,
	.event_sync = cpu_event_sync,
	.event_elapsed = cpu_event_elapsed,
};

int kvt_gpu_cpu_open_limit(uint32_t device, uint64_t bytes, struct kvt_gpu **gpu)
{
	struct cpu *c;

	if (device)
		return kvt_fail(-ENODEV, "gpu device %u: the cpu backend has device 0 alone", device);
	c = calloc(1, sizeof(*c));
	if (!c)
		return kvt_fail(-ENOMEM, "no memory for the cpu backend");
	if (!bytes)
		bytes = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
	c->gpu.ops = &cpu_ops;
	c->gpu.host_readable = true;
	snprintf(c->gpu.description, sizeof(c->gpu.description), "host memory, %llu MiB at most",
		 (unsigned long long)bytes >> 20);
	c->memory.limit = bytes;
	pthread_mutex_init(&c->lock, NULL);
	*gpu = &c->gpu;
	return 0;
}

int kvt_gpu_cpu_open(uint32_t device, struct kvt_gpu **gpu)
{
	return kvt_gpu_cpu_open_limit(device, 0, gpu);
}
