// SPDX-License-Identifier: MIT
/* A table whose every entry refuses: a backend starts from it; nothing is NULL, nothing silently succeeds. */
#include <errno.h>

#include "base/err.h"
#include "gpu/gpu.h"

#pragma GCC diagnostic ignored "-Wunused-parameter"

#define NOSYS(entry, ...) \
	static int entry(struct kvt_gpu *gpu, ##__VA_ARGS__) \
	{ \
		return kvt_fail(-ENOSYS, "the %s backend has no " #entry "()", gpu->ops->name); \
	}

NOSYS(alloc, uint64_t bytes, kvt_dptr *p)
NOSYS(mem_info, uint64_t *free_bytes, uint64_t *total_bytes)
NOSYS(host_alloc, uint64_t bytes, void **p)
NOSYS(host_register, void *p, uint64_t bytes)
NOSYS(host_unregister, void *p)
NOSYS(copy_h2d, kvt_dptr dst, const void *src, uint64_t bytes)
NOSYS(copy_d2h, void *dst, kvt_dptr src, uint64_t bytes)
NOSYS(copy_d2d, kvt_dptr dst, kvt_dptr src, uint64_t bytes)
NOSYS(copy_h2d_async, kvt_dptr dst, const void *src, uint64_t bytes, kvt_stream stream)
NOSYS(copy_d2h_async, void *dst, kvt_dptr src, uint64_t bytes, kvt_stream stream)
NOSYS(copy_d2d_async, kvt_dptr dst, kvt_dptr src, uint64_t bytes, kvt_stream stream)
NOSYS(copy_2d_async, kvt_dptr dst, uint64_t dst_pitch, kvt_dptr src, uint64_t src_pitch, uint64_t width,
	uint64_t height, kvt_stream stream)
NOSYS(copy_batch_async, const uint64_t *dst, const uint64_t *src, uint64_t bytes, uint32_t n, kvt_stream stream)
NOSYS(memset_async, kvt_dptr p, uint8_t value, uint64_t bytes, kvt_stream stream)
NOSYS(kernel, const char *module, const char *function, kvt_kernel *k)
NOSYS(tensor_map, kvt_dptr base, uint64_t bytes, uint32_t row_bytes, uint32_t rows, uint64_t *map)
NOSYS(launch, kvt_kernel k, struct kvt_dim3 grid, struct kvt_dim3 block, uint32_t shared_bytes, kvt_stream stream,
	void *const *args, uint32_t n_args)
NOSYS(launch_early, kvt_kernel k, struct kvt_dim3 grid, struct kvt_dim3 block, uint32_t shared_bytes, kvt_stream stream,
	void *const *args, uint32_t n_args)
NOSYS(stream_create, kvt_stream *stream)
NOSYS(stream_sync, kvt_stream stream)
NOSYS(bind_thread)
NOSYS(capture_begin, kvt_stream stream)
NOSYS(capture_end, kvt_stream stream, kvt_graph *graph)
NOSYS(graph_launch, kvt_graph graph, kvt_stream stream)
NOSYS(event_create, kvt_event *event)
NOSYS(event_record, kvt_event event, kvt_stream stream)
NOSYS(event_wait, kvt_stream stream, kvt_event event)
NOSYS(event_query, kvt_event event)
NOSYS(event_sync, kvt_event event)
NOSYS(event_elapsed, kvt_event from, kvt_event to, float *ms)

static void close(struct kvt_gpu *gpu)
{
}

static void gpu_free(struct kvt_gpu *gpu, kvt_dptr p)
{
}

static void host_free(struct kvt_gpu *gpu, void *p)
{
}

static void destroy(struct kvt_gpu *gpu, uint32_t handle)
{
}

const struct kvt_gpu_ops kvt_gpu_nosys = {
	.name = "nosys",
	.close = close,
	.alloc = alloc,
	.free = gpu_free,
	.mem_info = mem_info,
	.host_alloc = host_alloc,
	.host_free = host_free,
	.host_register = host_register,
	.host_unregister = host_unregister,
	.copy_h2d = copy_h2d,
	.copy_d2h = copy_d2h,
	.copy_d2d = copy_d2d,
	.copy_h2d_async = copy_h2d_async,
	.copy_d2h_async = copy_d2h_async,
	.copy_d2d_async = copy_d2d_async,
	.copy_2d_async = copy_2d_async,
	.copy_batch_async = copy_batch_async,
	.memset_async = memset_async,
	.kernel = kernel,
	.tensor_map = tensor_map,
	.launch = launch,
	.launch_early = launch_early,
	.stream_create = stream_create,
	.stream_destroy = destroy,
	.stream_sync = stream_sync,
	.bind_thread = bind_thread,
	.capture_begin = capture_begin,
	.capture_end = capture_end,
	.graph_launch = graph_launch,
	.graph_destroy = destroy,
	.event_create = event_create,
	.event_destroy = destroy,
	.event_record = event_record,
	.event_wait = event_wait,
	.event_query = event_query,
	.event_sync = event_sync,
	.event_elapsed = event_elapsed,
};
