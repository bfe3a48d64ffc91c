// SPDX-License-Identifier: MIT
/* Is there a GPU; lib/gpu_there.h. */
#include "lib/gpu_there.h"

#include <errno.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/err.h"
#include "gpu/gpu.h"
#include "kvtier.h"

bool gpu_is_there(void)
{
	struct kvt_gpu *gpu;
	pid_t child;
	int status;

	fflush(NULL);
	child = fork();
	if (!child) {
		status = kvt_gpu_cuda_open(0, &gpu);
		if (status)
			printf("cuda: not tested: %s\n", kvt_last_error());
		else
			printf("cuda: %s\n", gpu->description);
		fflush(stdout);
		_exit(status == -ENODEV ? 77 : 0);
	}
	return child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status) || WEXITSTATUS(status) != 77;
}
