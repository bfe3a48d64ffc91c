/* SPDX-License-Identifier: MIT */
/*
 * The floating-point environment that exactness needs: round to nearest,
 * denormals kept, nothing trapped. A program linked with -ffast-math anywhere
 * turns denormals off in its threads, and the bits would follow.
 */
#ifndef KVT_BASE_FPENV_H
#define KVT_BASE_FPENV_H

#include <stdint.h>

#if defined(__x86_64__)
#include <immintrin.h>
#else
#include <fenv.h>
#endif

#if defined(__x86_64__)
typedef uint32_t kvt_fpenv_t;
#elif defined(__aarch64__)
typedef uint64_t kvt_fpenv_t;
#else
typedef fenv_t kvt_fpenv_t;
#endif

/*
 * Between the two, call a function that is not inlined: a compiler may move
 * arithmetic across them.
 */
static inline kvt_fpenv_t kvt_fpenv_enter(void)
{
#if defined(__x86_64__)
	kvt_fpenv_t old = _mm_getcsr();

	_mm_setcsr(0x1f80);
#elif defined(__aarch64__)
	kvt_fpenv_t old;

	__asm__ volatile("mrs %0, fpcr" : "=r"(old));
	if (old)
		__asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0));
#else
	kvt_fpenv_t old;

	fegetenv(&old);
	fesetenv(FE_DFL_ENV);
#endif
	return old;
}

static inline void kvt_fpenv_leave(kvt_fpenv_t old)
{
#if defined(__x86_64__)
	_mm_setcsr(old);
#elif defined(__aarch64__)
	if (old)
		__asm__ volatile("msr fpcr, %0" : : "r"(old));
#else
	fesetenv(&old);
#endif
}

#endif
