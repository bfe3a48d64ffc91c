/* SPDX-License-Identifier: MIT */
/*
 * NVIDIA's driver API as far as kvtier uses it, taken from libcuda.so.1 at run
 * time: one binary runs with and without a GPU, and no CUDA headers are needed
 * to build it. Functions are named as in cuda.h without their "cu".
 */
#ifndef KVT_GPU_DRIVER_H
#define KVT_GPU_DRIVER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef int kvt_cu_result; /* CUresult */
typedef struct kvt_cu_object *kvt_cu_handle; /* CUcontext, CUmodule, CUfunction, CUstream, CUevent, CUgraph, CUgraphExec */

enum { /* CUmemorytype */
	KVT_CU_MEMORY_DEVICE = 2,
	KVT_CU_MEMORY_UNIFIED = 4, /* whichever the address says */
};

enum { /* CUdevice_attribute */
	KVT_CU_MULTIPROCESSORS = 16,
	KVT_CU_UNIFIED_ADDRESSING = 41,
	KVT_CU_CC_MAJOR = 75,
	KVT_CU_CC_MINOR = 76,
	KVT_CU_REGISTERED_HOST_POINTERS = 91,
	KVT_CU_SHARED_OPTIN = 97,
};

enum { /* flags and CUfunction_attribute */
	KVT_CU_COPY_IN_STREAM_ORDER = 1, /* the source is read when the stream comes to it */
	KVT_CU_HOST_PORTABLE = 1,
	KVT_CU_HOST_DEVICEMAP = 2,
	KVT_CU_STREAM_NON_BLOCKING = 1,
	KVT_CU_CAPTURE_RELAXED = 2,
	KVT_CU_EVENT_EXTERNAL = 1,
	KVT_CU_FUNC_SHARED_BYTES = 1,
	KVT_CU_FUNC_PTX_VERSION = 5, /* of the architecture that it was compiled for: 90 */
	KVT_CU_FUNC_MAX_DYNAMIC_SHARED = 8,
	KVT_CU_FUNC_SHARED_CARVEOUT = 9, /* per cent of what shared memory and cache divide */
};

enum { /* CUtensorMapDataType, CUtensorMapSwizzle, CUtensorMapL2promotion */
	KVT_CU_TENSOR_U16 = 1,
	KVT_CU_SWIZZLE_128 = 3,
	KVT_CU_PROMOTE_256 = 3,
};

enum { /* CUresult, those that are told apart */
	KVT_CU_NOT_FOUND = 500,
	KVT_CU_NOT_READY = 600,
};

struct kvt_cu_attribute { /* CUlaunchAttribute */
	int id, padding;
	int value; /* of 64 bytes */
	uint32_t rest[15];
};

enum { KVT_CU_PROGRAMMATIC_SERIALIZATION = 6 }; /* CUlaunchAttributeID */

struct kvt_cu_launch { /* CUlaunchConfig */
	unsigned int gx, gy, gz, bx, by, bz, shared;
	kvt_cu_handle stream;
	struct kvt_cu_attribute *attributes;
	unsigned int n_attributes;
};

struct kvt_cu_copy_2d { /* CUDA_MEMCPY2D */
	size_t src_x, src_y;
	unsigned int src_type;
	const void *src_host;
	uint64_t src_device;
	void *src_array;
	size_t src_pitch;
	size_t dst_x, dst_y;
	unsigned int dst_type;
	void *dst_host;
	uint64_t dst_device;
	void *dst_array;
	size_t dst_pitch;
	size_t width, height;
};

struct kvt_cu_copy_attributes { /* CUmemcpyAttributes */
	int src_order;
	struct {
		int type, id;
	} src_hint, dst_hint;
	unsigned int flags;
};

#define KVT_CU_CALLS(X) \
	X(Init, "cuInit", (unsigned int flags)) \
	X(DriverGetVersion, "cuDriverGetVersion", (int *version)) \
	X(DeviceGetCount, "cuDeviceGetCount", (int *n)) \
	X(DeviceGet, "cuDeviceGet", (int *device, int ordinal)) \
	X(DeviceGetName, "cuDeviceGetName", (char *name, int len, int device)) \
	X(DeviceTotalMem, "cuDeviceTotalMem_v2", (size_t *bytes, int device)) \
	X(DeviceGetAttribute, "cuDeviceGetAttribute", (int *value, int attribute, int device)) \
	X(DevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", (kvt_cu_handle *context, int device)) \
	X(DevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2", (int device)) \
	X(CtxGetCurrent, "cuCtxGetCurrent", (kvt_cu_handle *context)) \
	X(CtxSetCurrent, "cuCtxSetCurrent", (kvt_cu_handle context)) \
	X(CtxPushCurrent, "cuCtxPushCurrent_v2", (kvt_cu_handle context)) \
	X(CtxPopCurrent, "cuCtxPopCurrent_v2", (kvt_cu_handle *context)) \
	X(ModuleLoadData, "cuModuleLoadData", (kvt_cu_handle *module, const void *image)) \
	X(ModuleUnload, "cuModuleUnload", (kvt_cu_handle module)) \
	X(ModuleGetFunction, "cuModuleGetFunction", (kvt_cu_handle *function, kvt_cu_handle module, const char *name)) \
	X(FuncGetAttribute, "cuFuncGetAttribute", (int *value, int attribute, kvt_cu_handle function)) \
	X(FuncSetAttribute, "cuFuncSetAttribute", (kvt_cu_handle function, int attribute, int value)) \
	X(LaunchKernel, "cuLaunchKernel", (kvt_cu_handle function, unsigned int gx, unsigned int gy, unsigned int gz, \
					   unsigned int bx, unsigned int by, unsigned int bz, unsigned int shared, \
					   kvt_cu_handle stream, void **args, void **extra)) \
	X(MemGetInfo, "cuMemGetInfo_v2", (size_t *free_bytes, size_t *total)) \
	X(MemAlloc, "cuMemAlloc_v2", (uint64_t *p, size_t bytes)) \
	X(MemFree, "cuMemFree_v2", (uint64_t p)) \
	X(MemHostAlloc, "cuMemHostAlloc", (void **p, size_t bytes, unsigned int flags)) \
	X(MemFreeHost, "cuMemFreeHost", (void *p)) \
	X(MemHostRegister, "cuMemHostRegister_v2", (void *p, size_t bytes, unsigned int flags)) \
	X(MemHostUnregister, "cuMemHostUnregister", (void *p)) \
	X(MemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2", (uint64_t dst, const void *src, size_t n, kvt_cu_handle stream)) \
	X(MemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2", (void *dst, uint64_t src, size_t n, kvt_cu_handle stream)) \
	X(MemcpyDtoDAsync, "cuMemcpyDtoDAsync_v2", (uint64_t dst, uint64_t src, size_t n, kvt_cu_handle stream)) \
	X(Memcpy2DAsync, "cuMemcpy2DAsync_v2", (const struct kvt_cu_copy_2d *copy, kvt_cu_handle stream)) \
	X(MemsetD8Async, "cuMemsetD8Async", (uint64_t p, unsigned char value, size_t bytes, kvt_cu_handle stream)) \
	X(StreamCreate, "cuStreamCreate", (kvt_cu_handle *stream, unsigned int flags)) \
	X(StreamDestroy, "cuStreamDestroy_v2", (kvt_cu_handle stream)) \
	X(StreamSynchronize, "cuStreamSynchronize", (kvt_cu_handle stream)) \
	X(StreamWaitEvent, "cuStreamWaitEvent", (kvt_cu_handle stream, kvt_cu_handle event, unsigned int flags)) \
	X(StreamBeginCapture, "cuStreamBeginCapture_v2", (kvt_cu_handle stream, int mode)) \
	X(StreamEndCapture, "cuStreamEndCapture", (kvt_cu_handle stream, kvt_cu_handle *graph)) \
	X(GraphInstantiate, "cuGraphInstantiateWithFlags", (kvt_cu_handle *exec, kvt_cu_handle graph, \
							    unsigned long long flags)) \
	X(GraphLaunch, "cuGraphLaunch", (kvt_cu_handle exec, kvt_cu_handle stream)) \
	X(GraphExecDestroy, "cuGraphExecDestroy", (kvt_cu_handle exec)) \
	X(GraphDestroy, "cuGraphDestroy", (kvt_cu_handle graph)) \
	X(EventCreate, "cuEventCreate", (kvt_cu_handle *event, unsigned int flags)) \
	X(EventDestroy, "cuEventDestroy_v2", (kvt_cu_handle event)) \
	X(EventRecord, "cuEventRecordWithFlags", (kvt_cu_handle event, kvt_cu_handle stream, unsigned int flags)) \
	X(EventQuery, "cuEventQuery", (kvt_cu_handle event)) \
	X(EventSynchronize, "cuEventSynchronize", (kvt_cu_handle event)) \
	X(EventElapsedTime, "cuEventElapsedTime", (float *ms, kvt_cu_handle from, kvt_cu_handle to)) \
	X(GetErrorName, "cuGetErrorName", (kvt_cu_result result, const char **name))

/* What drivers that will do have not all got: NULL there. */
#define KVT_CU_LATER_CALLS(X) \
	X(LaunchKernelEx, "cuLaunchKernelEx", (const struct kvt_cu_launch *launch, kvt_cu_handle function, void **args, \
					       void **extra)) /* 11.8 */ \
	X(MemcpyBatchAsync, "cuMemcpyBatchAsync", (const uint64_t *dst, const uint64_t *src, const size_t *sizes, size_t n, \
						   const struct kvt_cu_copy_attributes *attributes, const size_t *from, \
						   size_t n_attributes, size_t *failed, kvt_cu_handle stream)) /* 12.8 */ \
	X(MemcpyBatchAsync2, "cuMemcpyBatchAsync_v2", (const uint64_t *dst, const uint64_t *src, const size_t *sizes, size_t n, \
						       const struct kvt_cu_copy_attributes *attributes, const size_t *from, \
						       size_t n_attributes, kvt_cu_handle stream)) /* 13.0 */ \
	X(TensorMapEncodeTiled, "cuTensorMapEncodeTiled", (void *map, int type, uint32_t rank, void *base, \
							   const uint64_t *sizes, const uint64_t *strides, \
							   const uint32_t *box, const uint32_t *steps, int interleave, \
							   int swizzle, int promotion, int fill)) /* 12.0 */

struct kvt_cu {
#define X(name, symbol, args) kvt_cu_result(*name) args;
	KVT_CU_CALLS(X)
	KVT_CU_LATER_CALLS(X)
#undef X
	int version; /* 13000: CUDA 13.0 */
	int devices;
};

/* The driver, initialised, once a process. -ENODEV, saying what is missing: library, function or device. */
int kvt_cu_load(const struct kvt_cu **cu);

/* The errno for a result; 0 for success. -ENODEV alone means that the device, or this context on it, is gone. */
int kvt_cu_errno(kvt_cu_result result);

/* "CUDA_ERROR_...", never NULL. */
const char *kvt_cu_error_name(const struct kvt_cu *cu, kvt_cu_result result);

#endif
