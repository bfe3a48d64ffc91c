/* SPDX-License-Identifier: MIT */
/*
 * A GPU for tests. It moves real bytes and runs the kernels' C twins, but as
 * late and in as odd an order as a device may; it refuses and fails on demand,
 * and writes down every call. Device memory cannot be touched by the CPU
 * (SIGSEGV), reads as 0xcd when new, and what is done wrong with it is noted.
 *
 * All functions: any thread. Controls take effect with the next call.
 */
#ifndef KVT_GPU_MOCK_H
#define KVT_GPU_MOCK_H

#include "gpu/gpu.h"

/* The table's entries, in its order. */
#define KVT_MOCK_CALLS(X) \
	X(close) X(alloc) X(free) X(mem_info) X(host_alloc) X(host_free) X(host_register) X(host_unregister) \
	X(copy_h2d) X(copy_d2h) X(copy_d2d) X(copy_h2d_async) X(copy_d2h_async) X(copy_d2d_async) \
	X(copy_2d_async) X(copy_batch_async) X(memset_async) X(kernel) X(tensor_map) X(launch) X(launch_early) \
	X(stream_create) X(stream_destroy) X(stream_sync) X(bind_thread) X(capture_begin) X(capture_end) X(graph_launch) \
	X(graph_destroy) X(event_create) X(event_destroy) X(event_record) X(event_wait) X(event_query) X(event_sync) \
	X(event_elapsed)

enum kvt_mock_call {
#define X(name) KVT_MOCK_##name,
	KVT_MOCK_CALLS(X)
#undef X
	KVT_MOCK_CALL_KINDS
};

/* A call as it came in. What a call has no use for is 0. */
struct kvt_mock_record {
	enum kvt_mock_call call;
	int result;
	kvt_stream stream;
	uint32_t handle; /* the event, graph or kernel */
	uint64_t dst, src, bytes;	      /* addresses; @bytes of a 2-D copy, or a batch of height, are width x height */
	uint64_t dst_pitch, src_pitch, width, height;
	const char *module, *function;	      /* of a launch */
	struct kvt_dim3 grid, block;
	uint32_t shared_bytes;
};

/* A device with @memory bytes (0: 64 MiB). Work runs at the call until kvt_mock_delay() says otherwise. */
int kvt_mock_open(uint64_t memory, struct kvt_gpu **gpu);

/* From now on the CPU may read and write device memory, as the cpu backend's. */
void kvt_mock_readable(struct kvt_gpu *gpu);

/*
 * Fail the @nth call from now (1 is the next) with @err, changing nothing; 0: never. Only what can fail counts.
 * With -ENODEV the device is gone from then on, and its memory's content with it.
 */
void kvt_mock_fail_at(struct kvt_gpu *gpu, uint64_t nth, int err);

/* Whether that call has come: a sweep ends with the first run in which it has not. */
bool kvt_mock_failed(struct kvt_gpu *gpu);

/* Refuse every call of one kind with @err; 0: no more. */
void kvt_mock_refuse(struct kvt_gpu *gpu, enum kvt_mock_call call, int err);

/* Asynchronous work runs @calls later calls after its own, or when it is waited for. UINT64_MAX: only then. */
void kvt_mock_delay(struct kvt_gpu *gpu, uint64_t calls);

/* Which of the streams that can go on does so is drawn from @seed; 0: the one that is waited for. */
void kvt_mock_reorder(struct kvt_gpu *gpu, uint64_t seed);

/* Flip bit @bit of what the @nth copy from now brings (2-D copies and items of the copy kernel count); 0: none. */
void kvt_mock_flip(struct kvt_gpu *gpu, uint64_t nth, uint64_t bit);

/* Flip a bit of device memory where it lies. */
void kvt_mock_corrupt(struct kvt_gpu *gpu, kvt_dptr p, uint64_t bit);

/* The log: @i counts from the last reset. False beyond its end. */
bool kvt_mock_log(struct kvt_gpu *gpu, uint64_t i, struct kvt_mock_record *record);

/* Calls of one kind since the last reset, whether they succeeded or not. */
uint64_t kvt_mock_count(struct kvt_gpu *gpu, enum kvt_mock_call call);

/* Calls that made the host wait (sync copies, stream_sync, event_sync), and that took memory, since then. */
uint64_t kvt_mock_syncs(struct kvt_gpu *gpu);
uint64_t kvt_mock_allocs(struct kvt_gpu *gpu);

/* Forget the log and the counts. */
void kvt_mock_reset(struct kvt_gpu *gpu);

/* Objects alive: allocations (device, host, registered ranges), streams, events, graphs. */
uint64_t kvt_mock_alive(struct kvt_gpu *gpu);

/*
 * The first misuse: memory freed while work on it is pending, work on memory
 * that is not allocated, a double or foreign free, an unknown handle destroyed,
 * a wait that nothing will end. "" if there was none.
 */
const char *kvt_mock_fault(struct kvt_gpu *gpu);

/* "alloc", "free", ... */
const char *kvt_mock_call_name(enum kvt_mock_call call);

#endif
