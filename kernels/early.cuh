/* SPDX-License-Identifier: MIT */
/*
 * Kernels that begin before what is before them on their stream has ended
 * (launch_early in userspace/gpu/gpu.h). Each thread waits before it uses what
 * that may have made, and before it writes anything. Thread block 0 waits also
 * where it has nothing to do: who is behind relies on it that what is before a
 * kernel has ended when the kernel has.
 */
#ifndef KVT_KERNELS_EARLY_CUH
#define KVT_KERNELS_EARLY_CUH

/* Until all kernels before this one have ended and what they wrote is there. At once in a plain launch. */
static __device__ __forceinline__ void wait_for_earlier(void)
{
#if __CUDA_ARCH__ >= 900
	asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* The next kernel may begin when all thread blocks have come here, or ended. */
static __device__ __forceinline__ void let_next_begin(void)
{
#if __CUDA_ARCH__ >= 900
	asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#endif
