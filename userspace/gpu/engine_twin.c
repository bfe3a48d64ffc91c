// SPDX-License-Identifier: MIT
/* The reference engine's kernels in plain C: kernels/engine.cu's bits, which are those of engines/ref's CPU kernels. */
#include <errno.h>

#include "base/err.h"
#include "gpu/engine.h"
#include "gpu/engine_math.h"

#define AT(address) ((void *)(uintptr_t)(address))
#define LANES 16 /* of a sum */
#define PIECE 256 /* of a row that is made ready at a time */

static const float *panel_of(uint64_t w, uint32_t j, uint32_t k)
{
	return (const float *)AT(w) + (uint64_t)(j / KVT_PANEL) * k * KVT_PANEL;
}

int kvt_engine_twin_embed(struct kvt_dim3 grid, struct kvt_dim3 block, void *const *args)
{
	const struct kvt_embed_args *a = args[0];
	float *x = AT(a->x);

	(void)grid, (void)block;
	if (a->n > KVT_EMBED_MAX)
		return kvt_fail(-EINVAL, "embed: %u tokens; %u at most", a->n, KVT_EMBED_MAX);
	for (uint32_t t = 0; t < a->n; t++) {
		const float *row = panel_of(a->w, a->ids[t], a->k) + a->ids[t] % KVT_PANEL;

		for (uint32_t i = 0; i < a->k; i++)
			*x++ = row[(uint64_t)i * KVT_PANEL];
	}
	return 0;
}

static float norm_scale(const struct kvt_gemm_args *a, const float *x)
{
	float sum[LANES] = { 0 };

	for (uint32_t i = 0; i < a->k; i++)
		sum[i % LANES] = fmaf(x[i], x[i], sum[i % LANES]);
	for (uint32_t half = LANES / 2; half; half /= 2)
		for (uint32_t i = 0; i < half; i++)
			sum[i] += sum[i + half];
	return kvt_math_norm_scale(sum[0], a->k, a->eps);
}

static float ready(const struct kvt_gemm_args *a, const float *x, uint32_t i, float scale)
{
	if (a->before == KVT_GEMM_NORM)
		return kvt_math_norm(x[i], scale, ((const float *)AT(a->weight))[i]);
	return a->before == KVT_GEMM_SILU ? kvt_math_silu_mul(x[i], x[a->k + i]) : x[i];
}

/* Outputs of one panel, which go on from @sum. */
static void multiply(const float *w, const float *x, uint32_t k, float *sum)
{
	for (uint32_t i = 0; i < k; i++, w += KVT_PANEL)
		for (uint32_t j = 0; j < KVT_PANEL; j++)
			sum[j] = fmaf(x[i], w[j], sum[j]);
}

static void gemm_row(const struct kvt_gemm_args *a, const float *x, float *y)
{
	const float scale = a->before == KVT_GEMM_NORM ? norm_scale(a, x) : 0;

	for (uint32_t j = 0; j < a->n; j += KVT_PANEL) {
		float sum[KVT_PANEL] = { 0 }, piece[PIECE];
		const uint32_t n = a->n - j < KVT_PANEL ? a->n - j : KVT_PANEL;

		for (uint32_t at = 0; at < a->k; at += PIECE) {
			const uint32_t k = a->k - at < PIECE ? a->k - at : PIECE;

			for (uint32_t i = 0; i < k; i++)
				piece[i] = ready(a, x, at + i, scale);
			multiply(panel_of(a->w, j, a->k) + (uint64_t)at * KVT_PANEL, piece, k, sum);
		}
		for (uint32_t i = 0; i < n; i++)
			y[j + i] = a->add ? y[j + i] + sum[i] : sum[i];
	}
}

int kvt_engine_twin_gemm(struct kvt_dim3 grid, struct kvt_dim3 block, void *const *args)
{
	const struct kvt_gemm_args *a = args[0];

	(void)grid, (void)block;
	for (uint32_t r = 0; r < a->rows; r++)
		gemm_row(a, (const float *)AT(a->x) + (uint64_t)r * a->x_stride, (float *)AT(a->y) + (uint64_t)r * a->y_stride);
	return 0;
}

int kvt_engine_twin_rope(struct kvt_dim3 grid, struct kvt_dim3 block, void *const *args)
{
	const struct kvt_rope_args *a = args[0];
	const uint32_t half = a->dim / 2, first = *(const uint32_t *)AT(a->rows) - a->n;
	float *from = AT(a->qkv), *q = AT(a->q);

	(void)grid, (void)block;
	for (uint32_t t = 0; t < a->n; t++, from += (uint64_t)a->kv_heads * a->dim) {
		const float *angles = (const float *)AT(a->angles) + (uint64_t)(first + t) * a->dim;

		for (uint32_t h = 0; h < a->heads + a->kv_heads; h++, from += a->dim) {
			float *to = h < a->heads ? q + ((uint64_t)t * a->heads + h) * a->dim : from;

			for (uint32_t i = 0; i < half; i++) {
				float x = from[i], y = from[half + i];

				kvt_math_rope(&x, &y, angles[i], angles[half + i]);
				to[i] = x;
				to[half + i] = y;
			}
		}
	}
	return 0;
}
