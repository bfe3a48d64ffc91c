// SPDX-License-Identifier: MIT
/*
 * y = x W^T. Outputs lie side by side in vectors and each is one chain of fused
 * multiply-adds over k, ascending, whatever the tile it is computed in: one row
 * or many, this vector width or another, the bits are the same.
 *
 * A tile keeps ROWS x TILE_VECTORS accumulators in registers; a panel's part
 * stays in the L2 cache while all rows pass by it.
 */
#include "base/simd.h"
#include "engines/ref/kernels.h"

#if KVT_VW == 16
#define ROWS 12
#define TILE_VECTORS 2
#elif KVT_VW == 8
#define ROWS 6
#define TILE_VECTORS 2
#else
#define ROWS 6
#define TILE_VECTORS 4
#endif
#define PANEL_VECTORS (REF_PANEL / KVT_VW)

/* Else gcc -O2 keeps the accumulators in memory. */
#define UNROLL _Pragma("GCC unroll 16")

/* @w: the tile's first output at k = 0. @n: its outputs that exist. */
VF_INLINE void tile(const float *w, uint32_t k, const float *x, size_t x_stride, float *y, size_t y_stride, uint32_t n,
		    const int rows, const int vectors)
{
	vf acc[ROWS][PANEL_VECTORS], b[PANEL_VECTORS];

	UNROLL
	for (int r = 0; r < rows; r++)
		UNROLL
		for (int v = 0; v < vectors; v++)
			acc[r][v] = vf_zero();
	for (uint32_t i = 0; i < k; i++, w += REF_PANEL) {
		UNROLL
		for (int v = 0; v < vectors; v++)
			b[v] = vf_load(w + v * KVT_VW);
		UNROLL
		for (int r = 0; r < rows; r++) {
			vf a = vf_set1(x[r * x_stride + i]);

			UNROLL
			for (int v = 0; v < vectors; v++)
				acc[r][v] = vf_fma(a, b[v], acc[r][v]);
		}
	}
	UNROLL
	for (int v = 0; v < vectors; v++) {
		uint32_t at = (uint32_t)v * KVT_VW;

		UNROLL
		for (int r = 0; r < rows; r++) {
			if (at + KVT_VW <= n)
				vf_store(y + r * y_stride + at, acc[r][v]);
			else if (at < n)
				vf_store_part(y + r * y_stride + at, acc[r][v], n - at);
		}
	}
}

static void panel_one_row(const float *w, uint32_t k, const float *x, float *y, uint32_t n)
{
	tile(w, k, x, 0, y, 0, n, 1, PANEL_VECTORS);
}

static void panel_rows(const float *w, uint32_t k, const float *x, size_t x_stride, uint32_t rows, float *y,
		       size_t y_stride, uint32_t n)
{
	const uint32_t width = TILE_VECTORS * KVT_VW;

	for (uint32_t at = 0; at < n; at += width) {
		uint32_t r = 0, left = n - at;

		for (; r + ROWS <= rows; r += ROWS)
			tile(w + at, k, x + r * x_stride, x_stride, y + r * y_stride + at, y_stride, left, ROWS, TILE_VECTORS);
		for (; r + 3 <= rows; r += 3)
			tile(w + at, k, x + r * x_stride, x_stride, y + r * y_stride + at, y_stride, left, 3, TILE_VECTORS);
		for (; r < rows; r++)
			tile(w + at, k, x + r * x_stride, x_stride, y + r * y_stride + at, y_stride, left, 1, TILE_VECTORS);
	}
}

void KVT_SIMD(ref_gemm)(const struct ref_matrix *m, uint32_t panel, uint32_t panels, const float *x, size_t x_stride,
			uint32_t rows, float *y, size_t y_stride)
{
	for (uint32_t p = panel; p < panel + panels; p++) {
		const float *w = m->panels + (size_t)p * m->k * REF_PANEL;
		uint32_t left = m->n - p * REF_PANEL, n = left < REF_PANEL ? left : REF_PANEL;

		if (rows == 1)
			panel_one_row(w, m->k, x, y + p * REF_PANEL, n);
		else
			panel_rows(w, m->k, x, x_stride, rows, y + p * REF_PANEL, y_stride, n);
	}
}
