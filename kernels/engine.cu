// SPDX-License-Identifier: MIT
/*
 * The reference engine beside attention: embedding, matrix products with what
 * comes before (RMSNorm, SwiGLU) and behind them (the residual), RoPE. Each
 * output of a product is one thread's chain over k, so that its bits do not
 * depend on how many rows there are; they are those of the CPU's kernels.
 * Arguments and twins: userspace/gpu/kernels.h, engine_twin.c.
 */
#include "gpu/engine_math.h"
#include "gpu/kernels.h"

#define SUM_LANES 16 /* of a sum of squares */

static __device__ __forceinline__ float *floats_at(uint64_t address)
{
	return reinterpret_cast<float *>(address);
}

extern "C" __global__ void __launch_bounds__(1024) engine_embed(const struct kvt_embed_args a)
{
	for (uint64_t u = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; u < (uint64_t)a.n * a.k;
	     u += (uint64_t)gridDim.x * blockDim.x) {
		const uint32_t id = a.ids[u / a.k], i = u % a.k;

		floats_at(a.x)[u] = floats_at(a.w)[((uint64_t)(id / KVT_PANEL) * a.k + i) * KVT_PANEL + id % KVT_PANEL];
	}
}

/* RMSNorm's factor for the row of this half of the warp; the whole warp calls. */
static __device__ float norm_scale(const struct kvt_gemm_args &a, const float *x)
{
	float sum = 0;

#pragma unroll 8
	for (uint32_t i = threadIdx.x % SUM_LANES; i < a.k; i += SUM_LANES)
		sum = __fmaf_rn(x[i], x[i], sum);
	for (int half = SUM_LANES / 2; half; half /= 2)
		sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, half));
	return kvt_math_norm_scale(sum, a.k, a.eps);
}

static __device__ __forceinline__ float ready(const struct kvt_gemm_args &a, const float *x, uint32_t i, float scale)
{
	if (a.before == KVT_GEMM_NORM)
		return kvt_math_norm(x[i], scale, floats_at(a.weight)[i]);
	return a.before == KVT_GEMM_SILU ? kvt_math_silu_mul(x[i], x[a.k + i]) : x[i];
}

static __device__ __forceinline__ void put(const struct kvt_gemm_args &a, uint32_t row, uint32_t j, float sum)
{
	float *y = floats_at(a.y) + (uint64_t)row * a.y_stride + j;

	if (j < a.n)
		*y = a.add ? __fadd_rn(*y, sum) : sum;
}

/*
 * ---- few rows: a block takes a panel of one row. All its threads make x ready; one warp has the chains, an output a
 * thread, with loads of 64 k in flight ahead ----
 */

#define ROW_PIECE 1024 /* floats of x that are made ready at a time */
#define ROW_THREADS 256
#define AHEAD 64

/* @w: this thread's output. Elements from @n on are not read. */
static __device__ __forceinline__ void fetch(float (&to)[AHEAD], const float *w, uint32_t n)
{
#pragma unroll
	for (int i = 0; i < AHEAD; i++)
		if (i < n)
			to[i] = __ldg(w + i * KVT_PANEL);
}

static __device__ __forceinline__ float chain(float sum, const float (&w)[AHEAD], const float *x, uint32_t n)
{
	if (n >= AHEAD) {
#pragma unroll
		for (int i = 0; i < AHEAD; i++)
			sum = __fmaf_rn(x[i], w[i], sum);
		return sum;
	}
#pragma unroll
	for (int i = 0; i < AHEAD; i++)
		if (i < n)
			sum = __fmaf_rn(x[i], w[i], sum);
	return sum;
}

extern "C" __global__ void __launch_bounds__(ROW_THREADS) engine_gemm_row(const struct kvt_gemm_args a)
{
	__shared__ __align__(16) float piece[ROW_PIECE];
	const uint32_t panels = (a.n + KVT_PANEL - 1) / KVT_PANEL;
	const bool chains = threadIdx.x < KVT_PANEL;

	for (uint64_t unit = blockIdx.x; unit < (uint64_t)panels * a.rows; unit += gridDim.x) {
		const uint32_t row = unit / panels, panel = unit % panels;
		const float *x = floats_at(a.x) + (uint64_t)row * a.x_stride;
		const float *w = floats_at(a.w) + (uint64_t)panel * a.k * KVT_PANEL + threadIdx.x;
		float now[AHEAD], next[AHEAD], scale = 0, sum = 0;

		if (chains)
			fetch(next, w, a.k);
		if (a.before == KVT_GEMM_NORM)
			scale = norm_scale(a, x);
		for (uint32_t at = 0; at < a.k; at += AHEAD) {
			if (at % ROW_PIECE == 0) {
				__syncthreads();
				for (uint32_t i = threadIdx.x; i < ROW_PIECE && at + i < a.k; i += ROW_THREADS)
					piece[i] = ready(a, x, at + i, scale);
				__syncthreads();
			}
			if (!chains)
				continue;
#pragma unroll
			for (int i = 0; i < AHEAD; i++)
				now[i] = next[i];
			if (at + AHEAD < a.k)
				fetch(next, w + (uint64_t)(at + AHEAD) * KVT_PANEL, a.k - at - AHEAD);
			sum = chain(sum, now, piece + at % ROW_PIECE, a.k - at);
		}
		if (chains)
			put(a, row, panel * KVT_PANEL + threadIdx.x, sum);
	}
}

/* ---- many rows: a block takes a panel of 64 rows, four outputs of four rows a thread ---- */

#define TILE_ROWS 64 /* userspace/gpu/engine.c */
#define TILE_K 32
#define TILE_THREADS 128
#define TILE_PAD 4 /* floats: 16-byte loads, and stores of eight k and four rows by a warp hit 32 banks */

struct tile {
	float4 w[TILE_K][KVT_PANEL / 4];
	float x[TILE_K][TILE_ROWS + TILE_PAD]; /* by k: what a thread needs lies together */
	float scale[TILE_ROWS];
};

static __device__ __forceinline__ const float *row_of(const struct kvt_gemm_args &a, uint32_t row)
{
	return floats_at(a.x) + (uint64_t)(row < a.rows ? row : a.rows - 1) * a.x_stride;
}

static __device__ __forceinline__ void load_tile(const struct kvt_gemm_args &a, struct tile *t, uint32_t panel, uint32_t row,
						 uint32_t at)
{
	const float4 *w = reinterpret_cast<const float4 *>(floats_at(a.w) + ((uint64_t)panel * a.k + at) * KVT_PANEL);
	const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;

	for (uint32_t i = threadIdx.x; i < TILE_K * KVT_PANEL / 4; i += TILE_THREADS)
		if (at + i / (KVT_PANEL / 4) < a.k)
			t->w[i / (KVT_PANEL / 4)][i % (KVT_PANEL / 4)] = __ldg(w + i);
#pragma unroll
	for (uint32_t i = 0; i < TILE_ROWS / 4; i++) {
		const uint32_t r = 4 * i + lane / 8, k = 8 * warp + lane % 8;

		if (at + k < a.k)
			t->x[k][r] = ready(a, row_of(a, row + r), at + k, t->scale[r]);
	}
}

static __device__ __forceinline__ void multiply_k(float (&sum)[4][4], const struct tile *t, uint32_t k)
{
	const float4 x = *reinterpret_cast<const float4 *>(&t->x[k][threadIdx.x / 8 * 4]), w = t->w[k][threadIdx.x % 8];
	const float xs[4] = { x.x, x.y, x.z, x.w }, ws[4] = { w.x, w.y, w.z, w.w };

#pragma unroll
	for (int r = 0; r < 4; r++)
#pragma unroll
		for (int j = 0; j < 4; j++)
			sum[r][j] = __fmaf_rn(xs[r], ws[j], sum[r][j]);
}

extern "C" __global__ void __launch_bounds__(TILE_THREADS) engine_gemm_tile(const struct kvt_gemm_args a)
{
	__shared__ struct tile t;
	const uint32_t panels = (a.n + KVT_PANEL - 1) / KVT_PANEL, tall = (a.rows + TILE_ROWS - 1) / TILE_ROWS;

	for (uint64_t unit = blockIdx.x; unit < (uint64_t)panels * tall; unit += gridDim.x) {
		const uint32_t row = unit / panels * TILE_ROWS, panel = unit % panels;
		float sum[4][4] = { };

		if (a.before == KVT_GEMM_NORM) {
			for (uint32_t r = threadIdx.x / SUM_LANES; r < TILE_ROWS; r += TILE_THREADS / SUM_LANES)
				t.scale[r] = norm_scale(a, row_of(a, row + r));
			__syncthreads();
		}
		for (uint32_t at = 0; at < a.k; at += TILE_K) {
			load_tile(a, &t, panel, row, at);
			__syncthreads();
			if (a.k - at >= TILE_K) {
#pragma unroll 8
				for (uint32_t k = 0; k < TILE_K; k++)
					multiply_k(sum, &t, k);
			} else {
				for (uint32_t k = 0; k < a.k - at; k++)
					multiply_k(sum, &t, k);
			}
			__syncthreads();
		}
#pragma unroll
		for (uint32_t r = 0; r < 4; r++)
#pragma unroll
			for (uint32_t j = 0; j < 4; j++)
				if (row + threadIdx.x / 8 * 4 + r < a.rows)
					put(a, row + threadIdx.x / 8 * 4 + r, panel * KVT_PANEL + threadIdx.x % 8 * 4 + j,
					    sum[r][j]);
	}
}

extern "C" __global__ void __launch_bounds__(1024) engine_rope(const struct kvt_rope_args a)
{
	const uint32_t half = a.dim / 2, turned = a.heads + a.kv_heads;
	const uint32_t first = *reinterpret_cast<const uint32_t *>(a.rows) - a.n;

	for (uint64_t u = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; u < (uint64_t)a.n * turned * half;
	     u += (uint64_t)gridDim.x * blockDim.x) {
		const uint32_t i = u % half, h = u / half % turned, t = u / half / turned;
		const float *angles = floats_at(a.angles) + (uint64_t)(first + t) * a.dim;
		float *from = floats_at(a.qkv) + ((uint64_t)t * (turned + a.kv_heads) + h) * a.dim;
		float *to = h < a.heads ? floats_at(a.q) + ((uint64_t)t * a.heads + h) * a.dim : from;
		float x = from[i], y = from[half + i];

		kvt_math_rope(&x, &y, angles[i], angles[half + i]);
		to[i] = x;
		to[half + i] = y;
	}
}
