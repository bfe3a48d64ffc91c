// SPDX-License-Identifier: MIT
/*
 * The fatbin that `make kernels` made (KVT_FATBIN is its path), as read-only
 * data, and what it is for (a file with a string); nothing where it was not made.
 */
#include "gpu/fatbin.h"

#include <stddef.h>
#include <stdint.h>

#include "gpu/gpu.h"

#ifdef KVT_FATBIN
__asm__(".pushsection .rodata\n"
	".balign 64\n"
	".hidden kvt_fatbin_begin\n"
	".globl kvt_fatbin_begin\n"
	"kvt_fatbin_begin: .incbin \"" KVT_FATBIN "\"\n"
	".popsection\n");

extern const uint8_t kvt_fatbin_begin[] __attribute__((visibility("hidden")));

const void *kvt_fatbin(void)
{
	return kvt_fatbin_begin;
}

const char *kvt_gpu_kernel_archs(void)
{
	return
#include KVT_FATBIN_ARCHS
		;
}
#else
const void *kvt_fatbin(void)
{
	return NULL;
}

const char *kvt_gpu_kernel_archs(void)
{
	return "";
}
#endif
