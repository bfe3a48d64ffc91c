/* SPDX-License-Identifier: MIT */
/*
 * GPU backend: one table of functions, five concerns (memory, launch, streams,
 * graphs, events). Backends: cpu.c (the reference: runs the kernels' C twins in
 * order), mock.c (tests: records, refuses, delays, reorders), cuda.c.
 *
 * Every entry is a function. What a backend lacks returns -ENOSYS; nothing is
 * NULL and nothing succeeds silently. All return 0 or a negative errno unless
 * said otherwise. A stream orders what is put on it; stream 0 of a backend is
 * its default stream. Streams are not ordered with each other but by events.
 * Work on a stream may run at any time until it is synchronised; arguments of a
 * launch are copied before it returns. What fails after its call returned shows
 * at the next synchronisation of its stream.
 *
 * -ENODEV from an entry of an open backend: the device, or the context on it, is
 * gone with all its memory (a fault of the hardware or of a kernel, a suspend).
 * Every later call says the same, frees do nothing, and close still works.
 *
 * Threads: any entry from any thread; one stream's users order themselves.
 */
#ifndef KVT_GPU_GPU_H
#define KVT_GPU_GPU_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct kvt_gpu;

typedef uint64_t kvt_dptr;    /* device address; 0 is none */
typedef uint32_t kvt_kernel;  /* handle of (module, function) */
typedef uint32_t kvt_stream;  /* 0: the default stream */
typedef uint32_t kvt_event;
typedef uint32_t kvt_graph;   /* an instantiated graph */

struct kvt_dim3 {
	uint32_t x, y, z;
};

struct kvt_gpu_ops {
	const char *name; /* "cpu", "mock", "cuda" */
	void (*close)(struct kvt_gpu *);

	/* memory. alloc: aligned to 256 bytes, contents undefined; free accepts 0. */
	int (*alloc)(struct kvt_gpu *, uint64_t bytes, kvt_dptr *);
	void (*free)(struct kvt_gpu *, kvt_dptr);
	int (*mem_info)(struct kvt_gpu *, uint64_t *free_bytes, uint64_t *total_bytes);
	int (*host_alloc)(struct kvt_gpu *, uint64_t bytes, void **);
	void (*host_free)(struct kvt_gpu *, void *);
	int (*host_register)(struct kvt_gpu *, void *, uint64_t bytes); /* -EEXIST: some of it is registered */
	int (*host_unregister)(struct kvt_gpu *, void *);
	/* 0 bytes: nothing is done. Sync copies follow what is on stream 0 and return when the bytes have arrived. */
	int (*copy_h2d)(struct kvt_gpu *, kvt_dptr dst, const void *src, uint64_t bytes);
	int (*copy_d2h)(struct kvt_gpu *, void *dst, kvt_dptr src, uint64_t bytes);
	int (*copy_d2d)(struct kvt_gpu *, kvt_dptr dst, kvt_dptr src, uint64_t bytes);
	int (*copy_h2d_async)(struct kvt_gpu *, kvt_dptr dst, const void *src, uint64_t bytes, kvt_stream);
	int (*copy_d2h_async)(struct kvt_gpu *, void *dst, kvt_dptr src, uint64_t bytes, kvt_stream);
	int (*copy_d2d_async)(struct kvt_gpu *, kvt_dptr dst, kvt_dptr src, uint64_t bytes, kvt_stream);
	/* rows of width bytes, pitches in bytes; @src: the device's, or pinned memory of the host */
	int (*copy_2d_async)(struct kvt_gpu *, kvt_dptr dst, uint64_t dst_pitch, kvt_dptr src, uint64_t src_pitch,
			     uint64_t width, uint64_t height, kvt_stream);
	/*
	 * @n copies of @bytes each, in any order, either side the device's or pinned memory of the host; the lists are
	 * read before it returns. Optional: where it is not there, one copy each does the same. Not in a capture (-EINVAL).
	 */
	int (*copy_batch_async)(struct kvt_gpu *, const uint64_t *dst, const uint64_t *src, uint64_t bytes, uint32_t n,
				kvt_stream);
	int (*memset_async)(struct kvt_gpu *, kvt_dptr, uint8_t value, uint64_t bytes, kvt_stream);

	/* kernels (gpu/kernels.h). -ENOENT: no such kernel. args: pointers to each argument's value, all of them */
	int (*kernel)(struct kvt_gpu *, const char *module, const char *function, kvt_kernel *);
	/*
	 * What a kernel of sm_90 hands to its copy engine, into map[16], part of its arguments: boxes of @rows (at most
	 * 256) rows of 128 bytes, @row_bytes apart, that begin at multiples of 128 in the device memory [base, base +
	 * bytes). @base and @row_bytes are multiples of 16. -EOPNOTSUPP: the device or its driver has none.
	 */
	int (*tensor_map)(struct kvt_gpu *, kvt_dptr base, uint64_t bytes, uint32_t row_bytes, uint32_t rows, uint64_t *map);
	int (*launch)(struct kvt_gpu *, kvt_kernel, struct kvt_dim3 grid, struct kvt_dim3 block,
		      uint32_t shared_bytes, kvt_stream, void *const *args, uint32_t n_args);
	/*
	 * The same, and a kernel that waits for what is before it by itself (its entry in kvt_twins says so) may begin
	 * before that has ended, if it is a kernel too. Only what was complete before the last plain launch, copy or
	 * graph began is there from the beginning. Others, and where a device cannot, as launch.
	 */
	int (*launch_early)(struct kvt_gpu *, kvt_kernel, struct kvt_dim3 grid, struct kvt_dim3 block,
			    uint32_t shared_bytes, kvt_stream, void *const *args, uint32_t n_args);

	/* streams */
	int (*stream_create)(struct kvt_gpu *, kvt_stream *);
	void (*stream_destroy)(struct kvt_gpu *, kvt_stream); /* after what is on it */
	int (*stream_sync)(struct kvt_gpu *, kvt_stream);
	int (*bind_thread)(struct kvt_gpu *); /* make the device current for the calling thread */

	/*
	 * graphs: what is put on a capturing stream (any but 0) is recorded, not run. An event recorded in a capture
	 * can be waited for in the same capture alone. Synchronising a capturing stream is -EINVAL.
	 */
	int (*capture_begin)(struct kvt_gpu *, kvt_stream);
	int (*capture_end)(struct kvt_gpu *, kvt_stream, kvt_graph *);
	int (*graph_launch)(struct kvt_gpu *, kvt_graph, kvt_stream);
	void (*graph_destroy)(struct kvt_gpu *, kvt_graph);

	/* events. One that was never recorded counts as reached; elapsed wants both reached (-EAGAIN) */
	int (*event_create)(struct kvt_gpu *, kvt_event *);
	void (*event_destroy)(struct kvt_gpu *, kvt_event);
	int (*event_record)(struct kvt_gpu *, kvt_event, kvt_stream);
	int (*event_wait)(struct kvt_gpu *, kvt_stream, kvt_event); /* the stream waits */
	int (*event_query)(struct kvt_gpu *, kvt_event);	    /* 1 reached, 0 not yet */
	int (*event_sync)(struct kvt_gpu *, kvt_event);
	int (*event_elapsed)(struct kvt_gpu *, kvt_event from, kvt_event to, float *ms);
};

struct kvt_gpu {
	const struct kvt_gpu_ops *ops;
	uint32_t device;
	uint32_t sm; /* compute capability, 90 for 9.0; 0: the kernels are their twins */
	uint32_t processors, shared_max; /* multiprocessors; bytes of shared memory that a thread block may ask for */
	bool host_readable; /* the CPU may read and write device memory at (void *)(uintptr_t)kvt_dptr */
	char description[96];
};

/* The reference backend: host memory, everything done in order at the call, graphs included. Device 0 alone. */
int kvt_gpu_cpu_open(uint32_t device, struct kvt_gpu **gpu);

/* As above, with @bytes of device memory (0: the machine's physical memory). */
int kvt_gpu_cpu_open_limit(uint32_t device, uint64_t bytes, struct kvt_gpu **gpu);

/*
 * An NVIDIA GPU through libcuda.so.1. -ENODEV: no driver, no such device, or a
 * build without kernels; -ENOEXEC: kernels for other GPUs alone. The message says which.
 */
int kvt_gpu_cuda_open(uint32_t device, struct kvt_gpu **gpu);

/* What this build holds kernels for: "sm_80 sm_90a compute_80"; "" where nvcc was missing. */
const char *kvt_gpu_kernel_archs(void);

/* A C twin: what a kernel does, for the whole grid. Its result does not depend on the grid. */
typedef int (*kvt_twin)(struct kvt_dim3 grid, struct kvt_dim3 block, void *const *args);

#define KVT_KERNEL_MAX_ARGS 8
#define KVT_TENSOR_MAP 16 /* 64-bit words */
#define KVT_KERNEL_ARG_BYTES 512 /* of all arguments, each rounded up to 8 */

struct kvt_twin_entry {
	const char *module, *function;
	uint32_t n_args;
	kvt_twin run;
	uint32_t arg_bytes[KVT_KERNEL_MAX_ARGS]; /* each argument's size: a launch copies their values */
	bool waits; /* for what is before it (kernels/early.cuh) */
};

/* The twins, ended by an entry with a NULL module (twins.c). */
extern const struct kvt_twin_entry kvt_twins[];

/* A table whose every entry returns -ENOSYS (or does nothing), to start a backend from (nosys.c). */
extern const struct kvt_gpu_ops kvt_gpu_nosys;

#endif
