// SPDX-License-Identifier: MIT
/*
 * The reference engine beside attention: embedding, matrix products with what
 * comes before (RMSNorm, SwiGLU) and behind them (the residual), RoPE. Each
 * output of a product is one thread's chain over k, so that its bits do not
 * depend on how many rows there are; they are those of the CPU's kernels.
 * Arguments and twins: userspace/gpu/kernels.h, engine_twin.c.
 */
#include <cuda_pipeline.h>

#include "early.cuh"
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

/* The last row's address for those behind it. */
static __device__ __forceinline__ const float *row_of(const struct kvt_gemm_args &a, uint32_t row)
{
	return floats_at(a.x) + (uint64_t)min(row, a.rows - 1) * a.x_stride;
}

/* An element of x as the product takes it. */
template <int BEFORE> static __device__ __forceinline__ float ready(float x, float up, float scale, float weight)
{
	if (BEFORE == KVT_GEMM_NORM)
		return kvt_math_norm(x, scale, weight);
	return BEFORE == KVT_GEMM_SILU ? kvt_math_silu_mul(x, up) : x;
}

/* RMSNorm's factors for @ROWS rows of this half of the warp, @step apart; the whole warp calls. */
template <int ROWS>
static __device__ __forceinline__ void norm_scales(const struct kvt_gemm_args &a, uint32_t row, uint32_t step,
						   float (&scale)[ROWS])
{
	constexpr int TOGETHER = 32 / ROWS < 16 ? 32 / ROWS : 16; /* loads in flight cover what one takes */
	float sum[ROWS] = { };

#pragma unroll TOGETHER
	for (uint32_t i = threadIdx.x % SUM_LANES; i < a.k; i += SUM_LANES)
#pragma unroll
		for (int r = 0; r < ROWS; r++) {
			const float x = row_of(a, row + r * step)[i];

			sum[r] = __fmaf_rn(x, x, sum[r]);
		}
#pragma unroll
	for (int r = 0; r < ROWS; r++) {
		for (int half = SUM_LANES / 2; half; half /= 2)
			sum[r] = __fadd_rn(sum[r], __shfl_xor_sync(0xffffffffu, sum[r], half));
		scale[r] = kvt_math_norm_scale(sum[r], a.k, a.eps);
	}
}

static __device__ __forceinline__ void put(const struct kvt_gemm_args &a, uint32_t row, uint32_t j, float sum)
{
	float *y = floats_at(a.y) + (uint64_t)row * a.y_stride + j;

	if (j < a.n)
		*y = a.add ? __fadd_rn(*y, sum) : sum;
}

/* Known at compile time, what comes before a product stands in no load's way. */
#define EACH_BEFORE(call, a, shared)                                   \
	switch (a.before) {                                            \
	case KVT_GEMM_NORM: return call<KVT_GEMM_NORM>(a, shared);     \
	case KVT_GEMM_SILU: return call<KVT_GEMM_SILU>(a, shared);     \
	default: return call<KVT_GEMM_AS_IT_IS>(a, shared);            \
	}

/*
 * ---- few rows: a block takes a panel of one row. All its threads bring W into shared memory ahead of use, and make x
 * ready; one warp has the chains, an output a thread ----
 */

#define ROW_THREADS 256
#define ROW_PIECE 1024 /* floats of x that are made ready at a time */
#define ROW_K 64       /* k of a stage */
#define ROW_STAGES 4

struct row_shared {
	float4 w[ROW_STAGES][ROW_K][KVT_PANEL / 4];
	float x[ROW_PIECE];
};

/* One group of copies, also behind the end, so that they can be counted. */
static __device__ __forceinline__ void fetch_stage(const struct kvt_gemm_args &a, struct row_shared *s, const float4 *w,
						   uint32_t at)
{
	float4 *to = &s->w[at / ROW_K % ROW_STAGES][0][0];

	for (uint32_t i = threadIdx.x; i < ROW_K * KVT_PANEL / 4; i += ROW_THREADS)
		if (at + i / (KVT_PANEL / 4) < a.k)
			__pipeline_memcpy_async(to + i, w + (uint64_t)at * (KVT_PANEL / 4) + i, sizeof(*to));
	__pipeline_commit();
}

static __device__ __forceinline__ float chain(float sum, const float *w, const float *x, uint32_t n)
{
	if (n >= ROW_K) {
#pragma unroll
		for (int i = 0; i < ROW_K; i++)
			sum = __fmaf_rn(x[i], w[i * KVT_PANEL], sum);
		return sum;
	}
#pragma unroll 4
	for (uint32_t i = 0; i < n; i++)
		sum = __fmaf_rn(x[i], w[i * KVT_PANEL], sum);
	return sum;
}

template <int BEFORE> static __device__ __forceinline__ void gemm_row(const struct kvt_gemm_args &a, struct row_shared *s)
{
	const uint32_t panels = (a.n + KVT_PANEL - 1) / KVT_PANEL;

	for (uint64_t unit = blockIdx.x; unit < (uint64_t)panels * a.rows; unit += gridDim.x) {
		const uint32_t row = unit / panels, panel = unit % panels;
		const float *x = row_of(a, row);
		const float4 *w = reinterpret_cast<const float4 *>(floats_at(a.w)) + (uint64_t)panel * a.k * (KVT_PANEL / 4);
		float scale[1] = { }, sum = 0;

		for (uint32_t stage = 0; stage < ROW_STAGES - 1; stage++)
			fetch_stage(a, s, w, stage * ROW_K);
		wait_for_earlier(); /* weights are there from the beginning */
		if (BEFORE == KVT_GEMM_NORM)
			norm_scales<1>(a, row, 0, scale);
		for (uint32_t at = 0; at < a.k; at += ROW_K) {
			if (at % ROW_PIECE == 0) {
				__syncthreads();
				for (uint32_t i = threadIdx.x; i < ROW_PIECE && at + i < a.k; i += ROW_THREADS)
					s->x[i] = ready<BEFORE>(x[at + i], BEFORE == KVT_GEMM_SILU ? x[a.k + at + i] : 0,
								scale[0],
								BEFORE == KVT_GEMM_NORM ? floats_at(a.weight)[at + i] : 0);
			}
			__pipeline_wait_prior(ROW_STAGES - 2);
			__syncthreads();
			fetch_stage(a, s, w, at + (ROW_STAGES - 1) * ROW_K);
			if (threadIdx.x < KVT_PANEL)
				sum = chain(sum, reinterpret_cast<const float *>(s->w[at / ROW_K % ROW_STAGES]) + threadIdx.x,
					    s->x + at % ROW_PIECE, a.k - at);
		}
		if (threadIdx.x < KVT_PANEL)
			put(a, row, panel * KVT_PANEL + threadIdx.x, sum);
		__syncthreads();
	}
}

extern "C" __global__ void __launch_bounds__(ROW_THREADS) engine_gemm_row(const struct kvt_gemm_args a)
{
	__shared__ __align__(16) struct row_shared s;

	let_next_begin();
	EACH_BEFORE(gemm_row, a, &s)
}

/* ---- many rows: a block takes a panel of 64 rows, a thread 4 x 4 outputs, and fetches the next tile meanwhile ---- */

#define TILE_ROWS 64 /* userspace/gpu/engine.c */
#define TILE_K 32
#define TILE_THREADS 128
#define TILE_PAD 4 /* floats: 16-byte loads, and stores of eight k and four rows by a warp hit 32 banks */
#define TILE_W (TILE_K * KVT_PANEL / 4 / TILE_THREADS) /* a thread's part of a tile */
#define TILE_X (TILE_K * TILE_ROWS / TILE_THREADS)

struct tile {
	float4 w[TILE_K * KVT_PANEL / 4];
	float x[TILE_K][TILE_ROWS + TILE_PAD]; /* by k: what a thread needs lies together */
	float scale[TILE_ROWS];
};

struct tile_part {
	float4 w[TILE_W];
	float x[TILE_X], up[TILE_X], weight;
};

/* Behind the end of k and rows something else is read, and not used. */
template <int BEFORE> static __device__ __forceinline__ void fetch_part(const struct kvt_gemm_args &a, struct tile_part *p,
									uint32_t panel, uint32_t row, uint32_t at)
{
	const float4 *w = reinterpret_cast<const float4 *>(floats_at(a.w)) + (uint64_t)panel * a.k * (KVT_PANEL / 4);
	const uint32_t k = min(at + threadIdx.x / 32 * 8 + threadIdx.x % 8, a.k - 1);

#pragma unroll
	for (uint32_t i = 0; i < TILE_W; i++)
		p->w[i] = __ldg(w + min(at * (KVT_PANEL / 4) + i * TILE_THREADS + threadIdx.x, a.k * (KVT_PANEL / 4) - 1));
#pragma unroll
	for (uint32_t i = 0; i < TILE_X; i++) {
		const float *x = row_of(a, row + 4 * i + threadIdx.x % 32 / 8) + k;

		p->x[i] = x[0];
		p->up[i] = BEFORE == KVT_GEMM_SILU ? x[a.k] : 0;
	}
	p->weight = BEFORE == KVT_GEMM_NORM ? floats_at(a.weight)[k] : 0;
}

template <int BEFORE> static __device__ __forceinline__ void store_part(struct tile *t, const struct tile_part *p)
{
	const uint32_t k = threadIdx.x / 32 * 8 + threadIdx.x % 8;

#pragma unroll
	for (uint32_t i = 0; i < TILE_W; i++)
		t->w[i * TILE_THREADS + threadIdx.x] = p->w[i];
#pragma unroll
	for (uint32_t i = 0; i < TILE_X; i++) {
		const uint32_t r = 4 * i + threadIdx.x % 32 / 8;

		t->x[k][r] = ready<BEFORE>(p->x[i], p->up[i], BEFORE == KVT_GEMM_NORM ? t->scale[r] : 0, p->weight);
	}
}

static __device__ __forceinline__ void multiply_k(float (&sum)[4][4], const struct tile *t, uint32_t k)
{
	const float4 x = *reinterpret_cast<const float4 *>(&t->x[k][threadIdx.x / 8 * 4]);
	const float4 w = t->w[k * (KVT_PANEL / 4) + threadIdx.x % 8];
	const float xs[4] = { x.x, x.y, x.z, x.w }, ws[4] = { w.x, w.y, w.z, w.w };

#pragma unroll
	for (int r = 0; r < 4; r++)
#pragma unroll
		for (int j = 0; j < 4; j++)
			sum[r][j] = __fmaf_rn(xs[r], ws[j], sum[r][j]);
}

template <int BEFORE> static __device__ __forceinline__ void gemm_tile(const struct kvt_gemm_args &a, struct tile *t)
{
	constexpr int HALVES = TILE_THREADS / SUM_LANES;
	const uint32_t panels = (a.n + KVT_PANEL - 1) / KVT_PANEL, tall = (a.rows + TILE_ROWS - 1) / TILE_ROWS;
	struct tile_part part;

	for (uint64_t unit = blockIdx.x; unit < (uint64_t)panels * tall; unit += gridDim.x) {
		const uint32_t row = unit / panels * TILE_ROWS, panel = unit % panels;
		float sum[4][4] = { };

		fetch_part<BEFORE>(a, &part, panel, row, 0);
		if (BEFORE == KVT_GEMM_NORM) {
			float scale[TILE_ROWS / HALVES];

			norm_scales(a, row + threadIdx.x / SUM_LANES, HALVES, scale);
#pragma unroll
			for (int r = 0; r < TILE_ROWS / HALVES; r++)
				t->scale[threadIdx.x / SUM_LANES + r * HALVES] = scale[r];
			__syncthreads();
		}
		for (uint32_t at = 0; at < a.k; at += TILE_K) {
			store_part<BEFORE>(t, &part);
			__syncthreads();
			if (at + TILE_K < a.k)
				fetch_part<BEFORE>(a, &part, panel, row, at + TILE_K);
			if (a.k - at >= TILE_K) {
#pragma unroll 8
				for (uint32_t k = 0; k < TILE_K; k++)
					multiply_k(sum, t, k);
			} else {
				for (uint32_t k = 0; k < a.k - at; k++)
					multiply_k(sum, t, k);
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

extern "C" __global__ void __launch_bounds__(TILE_THREADS) engine_gemm_tile(const struct kvt_gemm_args a)
{
	__shared__ __align__(16) struct tile t;

	EACH_BEFORE(gemm_tile, a, &t)
}

extern "C" __global__ void __launch_bounds__(1024) engine_rope(const struct kvt_rope_args a)
{
	const uint32_t half = a.dim / 2, turned = a.heads + a.kv_heads;
	const uint32_t first = *reinterpret_cast<const uint32_t *>(a.rows) - a.n;

	let_next_begin();
	for (uint64_t u = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; u < (uint64_t)a.n * turned * half;
	     u += (uint64_t)gridDim.x * blockDim.x) {
		const uint32_t i = u % half, h = u / half % turned, t = u / half / turned;
		const float *angles = floats_at(a.angles) + (uint64_t)(first + t) * a.dim;
		float *from = floats_at(a.qkv) + ((uint64_t)t * (turned + a.kv_heads) + h) * a.dim;
		float *to = h < a.heads ? floats_at(a.q) + ((uint64_t)t * a.heads + h) * a.dim : from;
		const float cosine = angles[i], sine = angles[half + i];
		float x, y;

		wait_for_earlier();
		x = from[i];
		y = from[half + i];
		kvt_math_rope(&x, &y, cosine, sine);
		to[i] = x;
		to[half + i] = y;
	}
}
