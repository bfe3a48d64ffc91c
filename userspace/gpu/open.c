// SPDX-License-Identifier: MIT
/* A backend by its name in the public interface. */
#include <errno.h>

#include "base/err.h"
#include "gpu/gpu.h"
#include "kvtier-arena.h"

int kvt_gpu_open(uint32_t backend, uint32_t device, struct kvt_gpu **gpu)
{
	int err;

	*gpu = NULL;
	if (backend > KVT_BACKEND_CUDA)
		return kvt_fail(-EINVAL, "backend %u: auto (%u), cpu (%u) and cuda (%u) are known", backend, KVT_BACKEND_AUTO,
				KVT_BACKEND_CPU, KVT_BACKEND_CUDA);
	if (backend == KVT_BACKEND_CPU)
		return kvt_gpu_cpu_open(device, gpu);
	err = kvt_gpu_cuda_open(device, gpu);
	if (err && backend == KVT_BACKEND_CUDA)
		return kvt_fail_more(err, "backend cuda");
	if (!err)
		return 0;
	if (device)
		return kvt_fail_more(err, "gpu device %u, and the cpu backend, to which auto falls back, has device 0 alone", device);
	kvt_log(KVT_LOG_WARN, "gpu: host memory (backend cpu): %s", kvt_last_error());
	return kvt_gpu_cpu_open(device, gpu);
}

void kvt_gpu_close(struct kvt_gpu *gpu)
{
	if (gpu)
		gpu->ops->close(gpu);
}
