// SPDX-License-Identifier: MIT
/* GPU backends for tests; lib/gpu_backends.h. */
#include "lib/gpu_backends.h"

#include <check.h>
#include <errno.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/err.h"
#include "gpu/mock.h"
#include "kvtier.h"

bool gpu_is_there(uint32_t device)
{
	struct kvt_gpu *gpu;
	pid_t child;
	int status;

	fflush(NULL);
	child = fork();
	if (!child) {
		status = kvt_gpu_cuda_open(device, &gpu);
		if (status)
			printf("cuda: not tested: %s\n", kvt_last_error());
		else
			printf("cuda: %s\n", gpu->description);
		fflush(stdout);
		_exit(status == -ENODEV ? 77 : 0);
	}
	return child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status) || WEXITSTATUS(status) != 77;
}

int gpu_backends(void)
{
	return gpu_is_there(0) ? GPU_CUDA + 1 : GPU_CUDA;
}

int gpu_backend_open(int backend, struct kvt_gpu **gpu)
{
	int ret;

	if (backend == GPU_CPU)
		return kvt_gpu_cpu_open_limit(0, 512 << 20, gpu);
	if (backend == GPU_CUDA)
		return kvt_gpu_cuda_open(0, gpu);
	ret = kvt_mock_open(64 << 20, gpu);
	if (!ret && backend == GPU_LATE_MOCK) {
		kvt_mock_delay(*gpu, UINT64_MAX);
		kvt_mock_reorder(*gpu, 77);
	}
	return ret;
}

void gpu_backend_close(int backend, struct kvt_gpu *gpu)
{
	if (gpu_backend_is_mock(backend)) {
		ck_assert_str_eq(kvt_mock_fault(gpu), "");
		ck_assert_uint_eq(kvt_mock_alive(gpu), 0);
	}
	gpu->ops->close(gpu);
}
