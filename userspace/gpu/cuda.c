// SPDX-License-Identifier: MIT
/*
 * The CUDA backend: gpu.h's table over the driver API, on a device's primary
 * context, so that memory and streams are shared with whatever else in the
 * process uses CUDA. The caller's current context is put back after each call.
 *
 * Stream 0 is a stream of this backend's own, not CUDA's legacy stream: nobody
 * else's work is waited for. What the driver would let pass is checked here
 * (ranges, capture rules), so that every backend refuses the same things.
 *
 * c->lock guards the tables and the ranges; it is not held over driver calls
 * that wait.
 */
#include "gpu/cuda.h"

#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "gpu/fatbin.h"

/* ---- a call: the context made current, and what went wrong ---- */

int kvt_cuda_is_lost(struct cuda *c)
{
	return kvt_fail(-ENODEV, "CUDA device %d is lost since %s: its memory is gone; see dmesg for Xid, and open it again",
			c->device, kvt_cu_error_name(c->cu, atomic_load(&c->lost)));
}

__attribute__((format(printf, 3, 4))) int kvt_cuda_check(struct cuda *c, kvt_cu_result result, const char *fmt, ...)
{
	int err = kvt_cu_errno(result);
	char what[160];
	va_list ap;

	if (!result)
		return 0;
	va_start(ap, fmt);
	vsnprintf(what, sizeof(what), fmt, ap);
	va_end(ap);
	if (err == -ENODEV) {
		kvt_cu_result none = 0;

		atomic_compare_exchange_strong(&c->lost, &none, result);
	}
	return kvt_fail(err, "CUDA device %d: %s: %s", c->device, what, kvt_cu_error_name(c->cu, result));
}

/* Returns 0 with the context current; kvt_cuda_leave() then. */
int kvt_cuda_enter(struct cuda *c, bool *pushed)
{
	kvt_cu_handle current = NULL;
	kvt_cu_result result;

	*pushed = false;
	if (atomic_load(&c->lost))
		return kvt_cuda_is_lost(c);
	result = c->cu->CtxGetCurrent(&current);
	if (!result && current != c->context) {
		result = c->cu->CtxPushCurrent(c->context);
		*pushed = !result;
	}
	return kvt_cuda_check(c, result, "making the context current");
}

void kvt_cuda_leave(struct cuda *c, bool pushed)
{
	kvt_cu_handle popped;

	if (pushed)
		c->cu->CtxPopCurrent(&popped);
}

/* ---- memory ---- */

static int note(struct cuda *c, enum kvt_range_kind kind, uint64_t p, uint64_t bytes)
{
	int err;

	pthread_mutex_lock(&c->lock);
	err = kvt_ranges_add(&c->ranges, kind, p, bytes);
	pthread_mutex_unlock(&c->lock);
	return err;
}

static bool forget(struct cuda *c, enum kvt_range_kind kind, uint64_t p)
{
	uint64_t bytes;

	pthread_mutex_lock(&c->lock);
	bytes = kvt_ranges_remove(&c->ranges, kind, p);
	pthread_mutex_unlock(&c->lock);
	return bytes;
}

static int check_range(struct cuda *c, const char *what, kvt_dptr p, uint64_t bytes)
{
	bool inside;

	pthread_mutex_lock(&c->lock);
	inside = kvt_ranges_holding(&c->ranges, KVT_RANGE_DEVICE, p, bytes);
	pthread_mutex_unlock(&c->lock);
	return inside ? 0 : kvt_fail(-EINVAL, "%s: %llu bytes at %#llx are not device memory of this backend", what,
				     (unsigned long long)bytes, (unsigned long long)p);
}

/* The same for each of @n that a kernel may read too: the device's, or pinned memory of the host. */
static int check_sources(struct cuda *c, const char *what, const uint64_t *p, uint64_t bytes, uint32_t n)
{
	uint32_t i = 0;

	pthread_mutex_lock(&c->lock);
	while (i < n && (kvt_ranges_pinned(&c->ranges, p[i], bytes) ||
			 kvt_ranges_holding(&c->ranges, KVT_RANGE_DEVICE, p[i], bytes)))
		i++;
	pthread_mutex_unlock(&c->lock);
	return i == n ? 0 : check_range(c, what, p[i], bytes);
}

static int cuda_alloc(struct kvt_gpu *gpu, uint64_t bytes, kvt_dptr *p)
{
	struct cuda *c = cuda_of(gpu);
	size_t free_bytes = 0, total = 0;
	bool pushed;
	int err;

	if (!bytes)
		return kvt_fail(-EINVAL, "0 bytes of device memory asked for");
	err = kvt_cuda_enter(c, &pushed);
	if (err)
		return err;
	err = kvt_cuda_check(c, c->cu->MemGetInfo(&free_bytes, &total), "memory info");
	if (!err && bytes > total)
		err = kvt_fail(-ENOMEM, "%llu bytes of device memory asked for, CUDA device %d has %zu",
			       (unsigned long long)bytes, c->device, total);
	if (!err)
		err = kvt_cuda_check(c, c->cu->MemAlloc(p, bytes), "%llu bytes of device memory asked for, %zu of %zu are free",
			    (unsigned long long)bytes, free_bytes, total);
	if (!err) {
		err = note(c, KVT_RANGE_DEVICE, *p, bytes);
		if (err)
			c->cu->MemFree(*p);
	}
	kvt_cuda_leave(c, pushed);
	return err;
}

static void cuda_free(struct kvt_gpu *gpu, kvt_dptr p)
{
	struct cuda *c = cuda_of(gpu);
	bool pushed;

	if (!p)
		return;
	if (!forget(c, KVT_RANGE_DEVICE, p))
		kvt_log(KVT_LOG_ERROR, "cuda backend: free of %#llx, which is no device memory of this backend",
			(unsigned long long)p);
	else if (!kvt_cuda_enter(c, &pushed)) {
		kvt_cuda_check(c, c->cu->MemFree(p), "free");
		kvt_cuda_leave(c, pushed);
	}
}

static int cuda_mem_info(struct kvt_gpu *gpu, uint64_t *free_bytes, uint64_t *total_bytes)
{
	struct cuda *c = cuda_of(gpu);
	size_t free = 0, total = 0;
	bool pushed;
	int err = kvt_cuda_enter(c, &pushed);

	if (err)
		return err;
	err = kvt_cuda_check(c, c->cu->MemGetInfo(&free, &total), "memory info");
	kvt_cuda_leave(c, pushed);
	*free_bytes = free;
	*total_bytes = total;
	return err;
}

static int cuda_host_alloc(struct kvt_gpu *gpu, uint64_t bytes, void **p)
{
	struct cuda *c = cuda_of(gpu);
	bool pushed;
	int err;

	if (!bytes)
		return kvt_fail(-EINVAL, "0 bytes of pinned host memory asked for");
	err = kvt_cuda_enter(c, &pushed);
	if (err)
		return err;
	err = kvt_cuda_check(c, c->cu->MemHostAlloc(p, bytes, KVT_CU_HOST_PORTABLE | KVT_CU_HOST_DEVICEMAP),
		    "%llu bytes of pinned host memory", (unsigned long long)bytes);
	if (!err) {
		err = note(c, KVT_RANGE_HOST, (uintptr_t)*p, bytes);
		if (err)
			c->cu->MemFreeHost(*p);
	}
	kvt_cuda_leave(c, pushed);
	return err;
}

static void cuda_host_free(struct kvt_gpu *gpu, void *p)
{
	struct cuda *c = cuda_of(gpu);
	bool pushed;

	if (!p)
		return;
	if (!forget(c, KVT_RANGE_HOST, (uintptr_t)p))
		kvt_log(KVT_LOG_ERROR, "cuda backend: host_free of %p, which is no pinned memory of this backend", p);
	else if (!kvt_cuda_enter(c, &pushed)) {
		kvt_cuda_check(c, c->cu->MemFreeHost(p), "host_free");
		kvt_cuda_leave(c, pushed);
	}
}

static int cuda_host_register(struct kvt_gpu *gpu, void *p, uint64_t bytes)
{
	struct cuda *c = cuda_of(gpu);
	bool pushed;
	int err;

	pthread_mutex_lock(&c->lock);
	err = kvt_ranges_register(&c->ranges, p, bytes);
	pthread_mutex_unlock(&c->lock);
	if (err)
		return err;
	err = kvt_cuda_enter(c, &pushed);
	if (!err) {
		err = kvt_cuda_check(c, c->cu->MemHostRegister(p, bytes, KVT_CU_HOST_PORTABLE | KVT_CU_HOST_DEVICEMAP),
			    "registering %llu bytes at %p", (unsigned long long)bytes, p);
		kvt_cuda_leave(c, pushed);
	}
	if (err)
		forget(c, KVT_RANGE_REGISTERED, (uintptr_t)p);
	return err;
}

static int cuda_host_unregister(struct kvt_gpu *gpu, void *p)
{
	struct cuda *c = cuda_of(gpu);
	bool pushed;
	int err;

	if (!forget(c, KVT_RANGE_REGISTERED, (uintptr_t)p))
		return kvt_fail(-EINVAL, "host_unregister: nothing was registered at %p", p);
	err = kvt_cuda_enter(c, &pushed);
	if (err)
		return err;
	err = kvt_cuda_check(c, c->cu->MemHostUnregister(p), "host_unregister");
	kvt_cuda_leave(c, pushed);
	return err;
}

/* ---- streams ---- */

/* With the lock held. */
struct stream *kvt_cuda_stream_of(struct cuda *c, kvt_stream handle)
{
	struct stream *s = handle ? kvt_table_get(&c->streams, handle) : &c->stream0;

	if (!s)
		kvt_fail(-EINVAL, "no stream has handle %u", handle);
	return s;
}

/* The driver's handle, with the context made current: kvt_cuda_leave() then. */
int kvt_cuda_begin(struct cuda *c, kvt_stream handle, kvt_cu_handle *stream, bool *pushed)
{
	struct stream *s;

	pthread_mutex_lock(&c->lock);
	s = kvt_cuda_stream_of(c, handle);
	if (s)
		*stream = s->cu;
	pthread_mutex_unlock(&c->lock);
	return s ? kvt_cuda_enter(c, pushed) : -EINVAL;
}

int kvt_cuda_begin_uncaptured(struct cuda *c, kvt_stream handle, const char *why, kvt_cu_handle *stream, bool *pushed)
{
	struct stream *s;
	int err = 0;

	pthread_mutex_lock(&c->lock);
	s = kvt_cuda_stream_of(c, handle);
	if (!s)
		err = -EINVAL;
	else if (s->capturing)
		err = kvt_fail(-EINVAL, "stream %u is capturing: %s", handle, why);
	else
		*stream = s->cu;
	pthread_mutex_unlock(&c->lock);
	return err ? err : kvt_cuda_enter(c, pushed);
}

enum direction { H2D, D2H, D2D };

static int copy(struct cuda *c, enum direction way, uint64_t dst, uint64_t src, uint64_t bytes, kvt_stream handle,
		bool wait)
{
	kvt_cu_handle stream;
	kvt_cu_result result = 0;
	bool pushed;
	int err = 0;

	if (bytes && way != D2H)
		err = check_range(c, "copy to", dst, bytes);
	if (bytes && way != H2D && !err)
		err = check_range(c, "copy from", src, bytes);
	if (!err)
		err = kvt_cuda_begin(c, handle, &stream, &pushed);
	if (err)
		return err;
	if (bytes && way == H2D)
		result = c->cu->MemcpyHtoDAsync(dst, (const void *)(uintptr_t)src, bytes, stream);
	else if (bytes && way == D2H)
		result = c->cu->MemcpyDtoHAsync((void *)(uintptr_t)dst, src, bytes, stream);
	else if (bytes)
		result = c->cu->MemcpyDtoDAsync(dst, src, bytes, stream);
	err = kvt_cuda_check(c, result, "copy of %llu bytes", (unsigned long long)bytes);
	if (!err && wait)
		err = kvt_cuda_check(c, c->cu->StreamSynchronize(stream), "copy of %llu bytes", (unsigned long long)bytes);
	kvt_cuda_leave(c, pushed);
	return err;
}

static int cuda_copy_h2d(struct kvt_gpu *gpu, kvt_dptr dst, const void *src, uint64_t bytes)
{
	return copy(cuda_of(gpu), H2D, dst, (uintptr_t)src, bytes, 0, true);
}

static int cuda_copy_d2h(struct kvt_gpu *gpu, void *dst, kvt_dptr src, uint64_t bytes)
{
	return copy(cuda_of(gpu), D2H, (uintptr_t)dst, src, bytes, 0, true);
}

static int cuda_copy_d2d(struct kvt_gpu *gpu, kvt_dptr dst, kvt_dptr src, uint64_t bytes)
{
	return copy(cuda_of(gpu), D2D, dst, src, bytes, 0, true);
}

static int cuda_copy_h2d_async(struct kvt_gpu *gpu, kvt_dptr dst, const void *src, uint64_t bytes, kvt_stream stream)
{
	return copy(cuda_of(gpu), H2D, dst, (uintptr_t)src, bytes, stream, false);
}

static int cuda_copy_d2h_async(struct kvt_gpu *gpu, void *dst, kvt_dptr src, uint64_t bytes, kvt_stream stream)
{
	return copy(cuda_of(gpu), D2H, (uintptr_t)dst, src, bytes, stream, false);
}

static int cuda_copy_d2d_async(struct kvt_gpu *gpu, kvt_dptr dst, kvt_dptr src, uint64_t bytes, kvt_stream stream)
{
	return copy(cuda_of(gpu), D2D, dst, src, bytes, stream, false);
}

static int cuda_copy_2d_async(struct kvt_gpu *gpu, kvt_dptr dst, uint64_t dst_pitch, kvt_dptr src, uint64_t src_pitch,
			      uint64_t width, uint64_t height, kvt_stream handle)
{
	struct cuda *c = cuda_of(gpu);
	const struct kvt_cu_copy_2d a = {
		.src_type = KVT_CU_MEMORY_UNIFIED, .src_device = src, .src_pitch = src_pitch,
		.dst_type = KVT_CU_MEMORY_DEVICE, .dst_device = dst, .dst_pitch = dst_pitch,
		.width = width, .height = height,
	};
	uint64_t dst_bytes, src_bytes;
	kvt_cu_handle stream;
	bool pushed;
	int err;

	err = kvt_span_2d(dst_pitch, src_pitch, width, height, &dst_bytes, &src_bytes);
	if (!err && dst_bytes)
		err = check_range(c, "copy_2d to", dst, dst_bytes);
	if (!err && src_bytes)
		err = check_sources(c, "copy_2d from", &src, src_bytes, 1);
	if (!err)
		err = kvt_cuda_begin(c, handle, &stream, &pushed);
	if (err)
		return err;
	if (dst_bytes)
		err = kvt_cuda_check(c, c->cu->Memcpy2DAsync(&a, stream), "copy of %llu rows of %llu bytes",
			    (unsigned long long)height, (unsigned long long)width);
	kvt_cuda_leave(c, pushed);
	return err;
}

#define BATCH 64 /* copies that a call of the driver gets: it sets up 256 at half of the rate, docs/bench/gpu-blocks.md */

static kvt_cu_result copy_batch(const struct kvt_cu *cu, const uint64_t *dst, const uint64_t *src, const size_t *sizes,
				uint32_t n, kvt_cu_handle stream)
{
	const struct kvt_cu_copy_attributes attributes = { .src_order = KVT_CU_COPY_IN_STREAM_ORDER };
	const size_t from = 0;
	size_t failed;

	if (cu->MemcpyBatchAsync2)
		return cu->MemcpyBatchAsync2(dst, src, sizes, n, &attributes, &from, 1, stream);
	return cu->MemcpyBatchAsync(dst, src, sizes, n, &attributes, &from, 1, &failed, stream);
}

static int cuda_copy_batch_async(struct kvt_gpu *gpu, const uint64_t *dst, const uint64_t *src, uint64_t bytes, uint32_t n,
				 kvt_stream handle)
{
	struct cuda *c = cuda_of(gpu);
	kvt_cu_handle stream;
	size_t sizes[BATCH];
	bool pushed;
	int err;

	if (!c->cu->MemcpyBatchAsync2 && !c->cu->MemcpyBatchAsync)
		return kvt_fail(-ENOSYS, "the driver has no batched copies: they came with CUDA 12.8");
	err = check_sources(c, "copy_batch to", dst, bytes, bytes ? n : 0);
	if (!err)
		err = check_sources(c, "copy_batch from", src, bytes, bytes ? n : 0);
	if (!err)
		err = kvt_cuda_begin_uncaptured(c, handle, "batched copies cannot be captured", &stream, &pushed);
	if (err)
		return err;
	for (uint32_t i = 0; i < BATCH; i++)
		sizes[i] = bytes;
	for (uint32_t i = 0, some; i < n && bytes && !err; i += some) {
		some = n - i < BATCH ? n - i : BATCH;
		err = kvt_cuda_check(c, copy_batch(c->cu, dst + i, src + i, sizes, some, stream), "%u copies of %llu bytes", some,
				     (unsigned long long)bytes);
	}
	kvt_cuda_leave(c, pushed);
	return err;
}

static int cuda_memset_async(struct kvt_gpu *gpu, kvt_dptr p, uint8_t value, uint64_t bytes, kvt_stream handle)
{
	struct cuda *c = cuda_of(gpu);
	kvt_cu_handle stream;
	bool pushed;
	int err = bytes ? check_range(c, "memset", p, bytes) : 0;

	if (!err)
		err = kvt_cuda_begin(c, handle, &stream, &pushed);
	if (err)
		return err;
	if (bytes)
		err = kvt_cuda_check(c, c->cu->MemsetD8Async(p, value, bytes, stream), "memset of %llu bytes",
			    (unsigned long long)bytes);
	kvt_cuda_leave(c, pushed);
	return err;
}

/* ---- kernels ---- */

#define EARLY_DRIVER 12030 /* the first that also captures such launches */

static int load_function(struct cuda *c, const struct kvt_twin_entry *twin, struct function *f)
{
	int fixed = 0, version = 0, room;
	kvt_cu_handle *function = &f->cu;
	char name[128];
	bool pushed;
	int err;

	snprintf(name, sizeof(name), "%s_%s", twin->module, twin->function);
	err = kvt_cuda_enter(c, &pushed);
	if (err)
		return err;
	err = kvt_cuda_check(c, c->cu->ModuleGetFunction(function, c->module, name), "kernel %s", name);
	if (!err)
		err = kvt_cuda_check(c, c->cu->FuncGetAttribute(&fixed, KVT_CU_FUNC_SHARED_BYTES, *function), "kernel %s", name);
	room = (int)c->gpu.shared_max - fixed;
	if (!err)
		err = kvt_cuda_check(c, c->cu->FuncSetAttribute(*function, KVT_CU_FUNC_MAX_DYNAMIC_SHARED, room),
			    "kernel %s: %d bytes of shared memory", name, room);
	/* blocks share a multiprocessor as their shared memory allows; kernels read what they load once */
	if (!err)
		err = kvt_cuda_check(c, c->cu->FuncSetAttribute(*function, KVT_CU_FUNC_SHARED_CARVEOUT, 100),
				     "kernel %s: shared memory before cache", name);
	if (!err) /* what the driver has made of older code does not wait */
		err = kvt_cuda_check(c, c->cu->FuncGetAttribute(&version, KVT_CU_FUNC_PTX_VERSION, *function), "kernel %s", name);
	f->early = twin->waits && version >= 90 && c->cu->LaunchKernelEx && c->cu->version >= EARLY_DRIVER;
	kvt_cuda_leave(c, pushed);
	return err;
}

static int cuda_kernel(struct kvt_gpu *gpu, const char *module, const char *function, kvt_kernel *kernel)
{
	struct cuda *c = cuda_of(gpu);
	struct function f;
	int err = kvt_twin_find(module, function, kernel);

	if (err)
		return err;
	pthread_mutex_lock(&c->lock);
	f = c->functions[*kernel];
	pthread_mutex_unlock(&c->lock);
	if (f.cu)
		return 0;
	err = load_function(c, kvt_twin_get(*kernel), &f);
	if (err)
		return err;
	pthread_mutex_lock(&c->lock);
	c->functions[*kernel] = f;
	pthread_mutex_unlock(&c->lock);
	return 0;
}

/* Sizes, of 16-bit elements: 64 of a row, where a box may begin, rows. The last two overlap: they are steps alone. */
static int cuda_tensor_map(struct kvt_gpu *gpu, kvt_dptr base, uint64_t bytes, uint32_t row_bytes, uint32_t rows, uint64_t *map)
{
	struct cuda *c = cuda_of(gpu);
	const uint64_t sizes[3] = { 64, bytes / 128, rows }, strides[2] = { 128, row_bytes };
	const uint32_t box[3] = { 64, 1, rows }, steps[3] = { 1, 1, 1 };
	_Alignas(128) uint64_t aligned[KVT_TENSOR_MAP] = { 0 };
	bool pushed;
	int err = kvt_tensor_map_check(base, bytes, row_bytes, rows);

	if (!err)
		err = check_range(c, "tensor_map", base, bytes);
	if (!err && (gpu->sm < 90 || !c->cu->TensorMapEncodeTiled))
		err = kvt_fail(-EOPNOTSUPP, "CUDA device %d is sm_%u, its driver of CUDA %d.%d: tensor maps came with sm_90 and CUDA 12.0",
			       c->device, gpu->sm, c->cu->version / 1000, c->cu->version % 1000 / 10);
	if (!err)
		err = kvt_cuda_enter(c, &pushed);
	if (err)
		return err;
	err = kvt_cuda_check(c,
		    c->cu->TensorMapEncodeTiled(aligned, KVT_CU_TENSOR_U16, 3, (void *)(uintptr_t)base, sizes, strides, box,
						steps, 0, KVT_CU_SWIZZLE_128, KVT_CU_PROMOTE_256, 0),
		    "a tensor map of %llu bytes, boxes of %u rows %u bytes apart", (unsigned long long)bytes, rows, row_bytes);
	kvt_cuda_leave(c, pushed);
	if (!err)
		memcpy(map, aligned, sizeof(aligned));
	return err;
}

static int put_launch(struct cuda *c, kvt_kernel kernel, struct kvt_dim3 grid, struct kvt_dim3 block, uint32_t shared_bytes,
		      kvt_stream handle, void *const *args, uint32_t n_args, bool early)
{
	struct kvt_cu_attribute attribute = { .id = KVT_CU_PROGRAMMATIC_SERIALIZATION, .value = 1 };
	struct kvt_cu_launch launch = {
		.gx = grid.x, .gy = grid.y, .gz = grid.z, .bx = block.x, .by = block.y, .bz = block.z, .shared = shared_bytes,
		.attributes = &attribute, .n_attributes = 1,
	};
	struct function f = { 0 };
	struct stream *s;
	bool pushed;
	int err;

	pthread_mutex_lock(&c->lock);
	if (kernel < c->n_functions)
		f = c->functions[kernel];
	s = f.cu ? kvt_cuda_stream_of(c, handle) : NULL;
	if (s)
		launch.stream = s->cu;
	pthread_mutex_unlock(&c->lock);
	if (!f.cu)
		return kvt_fail(-EINVAL, "no kernel has handle %u", kernel);
	if (!s)
		return -EINVAL;
	err = kvt_launch_check(&kvt_twins[kernel], grid, block, n_args);
	if (!err)
		err = kvt_cuda_enter(c, &pushed);
	if (err)
		return err;
	err = kvt_cuda_check(c,
		    early && f.early ? c->cu->LaunchKernelEx(&launch, f.cu, (void **)args, NULL) :
				       c->cu->LaunchKernel(f.cu, grid.x, grid.y, grid.z, block.x, block.y, block.z,
							   shared_bytes, launch.stream, (void **)args, NULL),
		    "launching %s_%s, %u x %u x %u blocks of %u x %u x %u threads, %u bytes of shared memory",
		    kvt_twins[kernel].module, kvt_twins[kernel].function, grid.x, grid.y, grid.z, block.x, block.y,
		    block.z, shared_bytes);
	kvt_cuda_leave(c, pushed);
	return err;
}

static int cuda_launch(struct kvt_gpu *gpu, kvt_kernel kernel, struct kvt_dim3 grid, struct kvt_dim3 block,
		       uint32_t shared_bytes, kvt_stream stream, void *const *args, uint32_t n_args)
{
	return put_launch(cuda_of(gpu), kernel, grid, block, shared_bytes, stream, args, n_args, false);
}

static int cuda_launch_early(struct kvt_gpu *gpu, kvt_kernel kernel, struct kvt_dim3 grid, struct kvt_dim3 block,
			     uint32_t shared_bytes, kvt_stream stream, void *const *args, uint32_t n_args)
{
	return put_launch(cuda_of(gpu), kernel, grid, block, shared_bytes, stream, args, n_args, true);
}

/* ---- open and close ---- */

static void cuda_close(struct kvt_gpu *gpu)
{
	struct cuda *c = cuda_of(gpu);
	bool pushed, current = !kvt_cuda_enter(c, &pushed);

	kvt_table_free(&c->graphs, gpu, kvt_cuda_graph_destroy);
	kvt_table_free(&c->streams, gpu, kvt_cuda_stream_destroy);
	kvt_table_free(&c->events, gpu, kvt_cuda_event_destroy);
	for (uint32_t i = 0; current && i < c->ranges.n; i++) {
		const struct kvt_range *r = &c->ranges.ranges[i];

		if (r->kind == KVT_RANGE_DEVICE)
			c->cu->MemFree(r->base);
		else if (r->kind == KVT_RANGE_HOST)
			c->cu->MemFreeHost((void *)r->base);
		else
			c->cu->MemHostUnregister((void *)r->base);
	}
	if (current) {
		if (c->stream0.cu)
			c->cu->StreamDestroy(c->stream0.cu);
		if (c->module)
			c->cu->ModuleUnload(c->module);
		kvt_cuda_leave(c, pushed);
	}
	c->cu->DevicePrimaryCtxRelease(c->device);
	free(c->functions);
	kvt_ranges_free(&c->ranges);
	pthread_mutex_destroy(&c->lock);
	free(c);
}

static const struct kvt_gpu_ops cuda_ops = {
	.name = "cuda",
	.close = cuda_close,
	.alloc = cuda_alloc,
	.free = cuda_free,
	.mem_info = cuda_mem_info,
	.host_alloc = cuda_host_alloc,
	.host_free = cuda_host_free,
	.host_register = cuda_host_register,
	.host_unregister = cuda_host_unregister,
	.copy_h2d = cuda_copy_h2d,
	.copy_d2h = cuda_copy_d2h,
	.copy_d2d = cuda_copy_d2d,
	.copy_h2d_async = cuda_copy_h2d_async,
	.copy_d2h_async = cuda_copy_d2h_async,
	.copy_d2d_async = cuda_copy_d2d_async,
	.copy_2d_async = cuda_copy_2d_async,
	.copy_batch_async = cuda_copy_batch_async,
	.memset_async = cuda_memset_async,
	.kernel = cuda_kernel,
	.tensor_map = cuda_tensor_map,
	.launch = cuda_launch,
	.launch_early = cuda_launch_early,
	.stream_create = kvt_cuda_stream_create,
	.stream_destroy = kvt_cuda_stream_destroy,
	.stream_sync = kvt_cuda_stream_sync,
	.bind_thread = kvt_cuda_bind_thread,
	.capture_begin = kvt_cuda_capture_begin,
	.capture_end = kvt_cuda_capture_end,
	.graph_launch = kvt_cuda_graph_launch,
	.graph_destroy = kvt_cuda_graph_destroy,
	.event_create = kvt_cuda_event_create,
	.event_destroy = kvt_cuda_event_destroy,
	.event_record = kvt_cuda_event_record,
	.event_wait = kvt_cuda_event_wait,
	.event_query = kvt_cuda_event_query,
	.event_sync = kvt_cuda_event_sync,
	.event_elapsed = kvt_cuda_event_elapsed,
};

static int attribute(struct cuda *c, int which)
{
	int value = 0;

	c->cu->DeviceGetAttribute(&value, which, c->device);
	return value;
}

/* What the device is, and whether it can do what is relied on. */
static int look_at(struct cuda *c)
{
	char name[48] = "";
	size_t bytes = 0;
	int err;

	err = kvt_cuda_check(c, c->cu->DeviceGetName(name, sizeof(name), c->device), "device name");
	if (!err)
		err = kvt_cuda_check(c, c->cu->DeviceTotalMem(&bytes, c->device), "device memory");
	if (err)
		return err;
	if (!attribute(c, KVT_CU_UNIFIED_ADDRESSING) || !attribute(c, KVT_CU_REGISTERED_HOST_POINTERS))
		return kvt_fail(-EOPNOTSUPP, "CUDA device %d (%s) does not share addresses with the host", c->device, name);
	c->gpu.sm = (uint32_t)(10 * attribute(c, KVT_CU_CC_MAJOR) + attribute(c, KVT_CU_CC_MINOR));
	c->gpu.shared_max = (uint32_t)attribute(c, KVT_CU_SHARED_OPTIN);
	c->gpu.processors = (uint32_t)attribute(c, KVT_CU_MULTIPROCESSORS);
	snprintf(c->gpu.description, sizeof(c->gpu.description), "%s, sm_%u, %zu MiB, driver API %d.%d", name,
		 c->gpu.sm, bytes >> 20, c->cu->version / 1000,
		 c->cu->version % 1000 / 10);
	return 0;
}

static int start(struct cuda *c)
{
	bool pushed;
	int err = kvt_cuda_enter(c, &pushed);

	if (err)
		return err;
	err = kvt_cuda_check(c, c->cu->StreamCreate(&c->stream0.cu, KVT_CU_STREAM_NON_BLOCKING), "creating a stream");
	if (!err)
		err = kvt_cuda_check(c, c->cu->ModuleLoadData(&c->module, kvt_fatbin()),
			    "loading kernels (this build has them for %s; this is %s)", kvt_gpu_kernel_archs(), c->gpu.description);
	kvt_cuda_leave(c, pushed);
	return err;
}

int kvt_gpu_cuda_open(uint32_t device, struct kvt_gpu **gpu)
{
	const struct kvt_cu *cu;
	struct cuda *c;
	int err;

	if (!kvt_fatbin())
		return kvt_fail(-ENODEV, "this build has no CUDA kernels: `make kernels` where nvcc is installed, then make");
	err = kvt_cu_load(&cu);
	if (err)
		return err;
	if (device >= (uint32_t)cu->devices)
		return kvt_fail(-ENODEV, "CUDA device %u of %d: see CUDA_VISIBLE_DEVICES", device, cu->devices);
	c = calloc(1, sizeof(*c));
	if (!c)
		return kvt_fail(-ENOMEM, "no memory for the cuda backend");
	c->gpu.ops = &cuda_ops;
	c->gpu.device = device;
	c->cu = cu;
	pthread_mutex_init(&c->lock, NULL);
	while (kvt_twins[c->n_functions].module)
		c->n_functions++;
	c->functions = calloc(c->n_functions, sizeof(struct function));
	if (!c->functions) {
		err = kvt_fail(-ENOMEM, "no memory for the cuda backend");
		goto err_free;
	}
	err = kvt_cuda_check(c, cu->DeviceGet(&c->device, (int)device), "device %u", device);
	if (!err)
		err = kvt_cuda_check(c, cu->DevicePrimaryCtxRetain(&c->context, c->device), "its primary context");
	if (err)
		goto err_free;
	err = look_at(c);
	if (!err)
		err = start(c);
	if (err) {
		cuda_close(&c->gpu);
		return err;
	}
	*gpu = &c->gpu;
	return 0;

err_free:
	free(c->functions);
	pthread_mutex_destroy(&c->lock);
	free(c);
	return err;
}
