/* SPDX-License-Identifier: MIT */
/* The matrix instructions of sm_90a, which a warpgroup of 128 threads does together, and what they read. */
#ifndef KVT_KERNELS_WGMMA_CUH
#define KVT_KERNELS_WGMMA_CUH

#include "attend.cuh"

/* What ordinary instructions did to shared memory comes before what tensor cores and bulk copies will do. */
static __device__ __forceinline__ void publish(void)
{
	asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

static __device__ __forceinline__ void wgmma_begin(void)
{
	asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

static __device__ __forceinline__ void wgmma_commit(void)
{
	asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int N> static __device__ __forceinline__ void wgmma_wait(void)
{
	asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

/* Registers that a wgmma was working on: nothing that uses them moves up across this. */
template <int N> static __device__ __forceinline__ void settled(float (&x)[N][4])
{
#pragma unroll
	for (int n = 0; n < N; n++)
		asm volatile("" : "+f"(x[n][0]), "+f"(x[n][1]), "+f"(x[n][2]), "+f"(x[n][3])::"memory");
}

/*
 * A matrix in shared memory: panels of 128-byte rows, the 16-byte pieces of a row
 * exchanged by the row's number (128-byte swizzle), eight rows 1024 bytes after
 * the eight before; @panel: bytes between panels, where an operand takes several.
 * The address is made one of the warp, so that steps from it are additions of
 * uniform registers: each wgmma waits for its descriptors.
 */
struct matrix {
	uint32_t low;

	__device__ __forceinline__ matrix(uint32_t address, uint32_t panel)
	{
		low = __shfl_sync(0xffffffffu, (address & 0x3ffff) >> 4 | (panel >> 4) << 16, 0);
	}
	__device__ __forceinline__ uint64_t at(uint32_t bytes) const
	{
		return (uint64_t)(1u << 30 | 1024 >> 4) << 32 | (low + bytes / 16);
	}
};

static __device__ __forceinline__ uint32_t swizzled(uint32_t row, uint32_t piece)
{
	return row * 128 + ((piece ^ row) % 8) * 16;
}

#define ACC4(x, n) "+f"(x[n][0]), "+f"(x[n][1]), "+f"(x[n][2]), "+f"(x[n][3])
#define ACC32(x, n) ACC4(x, n), ACC4(x, n + 1), ACC4(x, n + 2), ACC4(x, n + 3), \
		    ACC4(x, n + 4), ACC4(x, n + 5), ACC4(x, n + 6), ACC4(x, n + 7)
#define REGISTERS32 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
		    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
#define REGISTERS64 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
		    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
		    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
		    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "

/* s (+)= q k^T: 64 x 16 times 16 x 64, both from shared memory. */
template <int CODEC> static __device__ __forceinline__ void wgmma_scores(float (&s)[8][4], uint64_t q, uint64_t k, int more)
{
#define SCORES(type) \
	asm volatile("{\n" \
		     ".reg .pred p;\n" \
		     "setp.ne.b32 p, %34, 0;\n" \
		     "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " " REGISTERS32 \
		     "%32, %33, p, 1, 1, 0, 0;\n" \
		     "}" : ACC32(s, 0) : "l"(q), "l"(k), "r"(more))
	if constexpr (CODEC == ROW_F16)
		SCORES("f16");
	else
		SCORES("bf16");
#undef SCORES
}

/* The same with 128 positions, q from registers. */
template <int CODEC>
static __device__ __forceinline__ void wgmma_scores(float (&s)[16][4], const uint32_t q[4], uint64_t k, int more)
{
#define SCORES(type) \
	asm volatile("{\n" \
		     ".reg .pred p;\n" \
		     "setp.ne.b32 p, %69, 0;\n" \
		     "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " " REGISTERS64 \
		     "{%64, %65, %66, %67}, %68, p, 1, 1, 0;\n" \
		     "}" : ACC32(s, 0), ACC32(s, 8) : "r"(q[0]), "r"(q[1]), "r"(q[2]), "r"(q[3]), "l"(k), "r"(more))
	if constexpr (CODEC == ROW_F16)
		SCORES("f16");
	else
		SCORES("bf16");
#undef SCORES
}

/* o += p v: 64 x 16 times 16 x (64 or 128); p from registers. */
template <int CODEC> static __device__ __forceinline__ void wgmma_output(float (&o)[8][4], const uint32_t p[4], uint64_t v)
{
#define OUTPUT(type) \
	asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " " REGISTERS32 \
		     "{%32, %33, %34, %35}, %36, 1, 1, 1, 1;" \
		     : ACC32(o, 0) : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "l"(v))
	if constexpr (CODEC == ROW_F16)
		OUTPUT("f16");
	else
		OUTPUT("bf16");
#undef OUTPUT
}

template <int CODEC> static __device__ __forceinline__ void wgmma_output(float (&o)[16][4], const uint32_t p[4], uint64_t v)
{
#define OUTPUT(type) \
	asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " " REGISTERS64 \
		     "{%64, %65, %66, %67}, %68, 1, 1, 1, 1;" \
		     : ACC32(o, 0), ACC32(o, 8) : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "l"(v))
	if constexpr (CODEC == ROW_F16)
		OUTPUT("f16");
	else
		OUTPUT("bf16");
#undef OUTPUT
}

#endif
