/* SPDX-License-Identifier: MIT */
/* Inside the CUDA backend: cuda.c has the context, memory and kernels, cuda_order.c streams, graphs and events. */
#ifndef KVT_GPU_CUDA_H
#define KVT_GPU_CUDA_H

#include <pthread.h>

#include "gpu/driver.h"
#include "gpu/gpu.h"
#include "gpu/op.h"
#include "gpu/ranges.h"

struct stream {
	kvt_cu_handle cu;
	bool capturing;
};

struct event {
	kvt_cu_handle cu;
	bool recorded; /* at least once outside a capture, or by a graph that ran */
	kvt_stream capture; /* recorded last in a capture of this stream, */
	kvt_graph graph;    /* or of this graph, which has not run since */
};

struct function {
	kvt_cu_handle cu; /* NULL until asked for */
	bool early;	  /* it waits for what is before it, and the driver lets it */
};

struct cuda {
	struct kvt_gpu gpu;
	const struct kvt_cu *cu;
	int device;
	kvt_cu_handle context, module;
	struct function *functions; /* [twins] */
	uint32_t n_functions;
	struct stream stream0;
	_Atomic kvt_cu_result lost; /* why every call fails */

	pthread_mutex_t lock;
	struct kvt_ranges ranges;
	struct kvt_table streams, events, graphs; /* graphs: CUgraphExec */
};

static inline struct cuda *cuda_of(struct kvt_gpu *gpu)
{
	return (struct cuda *)gpu; /* its first member */
}

/* 0, or the errno of a result with what was being done and the error's name. */
int kvt_cuda_check(struct cuda *c, kvt_cu_result result, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

/* Make the context current; 0: leave() then. */
int kvt_cuda_enter(struct cuda *c, bool *pushed);
void kvt_cuda_leave(struct cuda *c, bool pushed);

/* As enter(), with the driver's handle of a stream. */
int kvt_cuda_begin(struct cuda *c, kvt_stream handle, kvt_cu_handle *stream, bool *pushed);

/* As begin(); -EINVAL, saying @why, for a stream that captures. */
int kvt_cuda_begin_uncaptured(struct cuda *c, kvt_stream handle, const char *why, kvt_cu_handle *stream, bool *pushed);

/* With the lock held; NULL, with a message, for an unknown one. */
struct stream *kvt_cuda_stream_of(struct cuda *c, kvt_stream handle);

/* -ENODEV, saying since when. */
int kvt_cuda_is_lost(struct cuda *c);

/* The table's entries in cuda_order.c. */
int kvt_cuda_stream_create(struct kvt_gpu *gpu, kvt_stream *handle);
void kvt_cuda_stream_destroy(struct kvt_gpu *gpu, kvt_stream handle);
int kvt_cuda_stream_sync(struct kvt_gpu *gpu, kvt_stream handle);
int kvt_cuda_bind_thread(struct kvt_gpu *gpu);
int kvt_cuda_capture_begin(struct kvt_gpu *gpu, kvt_stream handle);
int kvt_cuda_capture_end(struct kvt_gpu *gpu, kvt_stream handle, kvt_graph *graph);
int kvt_cuda_graph_launch(struct kvt_gpu *gpu, kvt_graph graph, kvt_stream handle);
void kvt_cuda_graph_destroy(struct kvt_gpu *gpu, kvt_graph graph);
int kvt_cuda_event_create(struct kvt_gpu *gpu, kvt_event *handle);
void kvt_cuda_event_destroy(struct kvt_gpu *gpu, kvt_event handle);
int kvt_cuda_event_record(struct kvt_gpu *gpu, kvt_event handle, kvt_stream on);
int kvt_cuda_event_wait(struct kvt_gpu *gpu, kvt_stream on, kvt_event handle);
int kvt_cuda_event_query(struct kvt_gpu *gpu, kvt_event handle);
int kvt_cuda_event_sync(struct kvt_gpu *gpu, kvt_event handle);
int kvt_cuda_event_elapsed(struct kvt_gpu *gpu, kvt_event from, kvt_event to, float *ms);

#endif
