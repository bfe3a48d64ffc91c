/* SPDX-License-Identifier: MIT */
/*
 * Panels: what the matrix loops read when many query rows share K and V. A panel
 * is an array of f32, [steps][16]; 16 results lie side by side. For scores a step
 * is a dimension and the 16 are positions (K transposed); for the output a step
 * is a position and the 16 are dimensions of V. Both are then one loop, sum over
 * steps of a[row][step] * panel[step][16], whose 16 x rows sums are independent
 * chains.
 *
 * A score is eight partial sums, of the dimensions d mod 8. So K's panels hold
 * the dimensions 0, 8, 16, ... first, then 1, 9, 17, ...
 */
#ifndef KVT_ATTENTION_PANEL_H
#define KVT_ATTENTION_PANEL_H

#include <stddef.h>
#include <stdint.h>

#include "attention/kernel.h"
#include "base/simd.h"
#include "kvtier.h"

#define LINE 64
#define PANEL 16
#define PANEL_VECS (PANEL / KVT_VW)
#define PARTS KVT_SCORE_PARTS

VF_INLINE vf panel_widen(uint32_t codec, const uint8_t *p, unsigned n)
{
	switch (codec) {
	case KVT_F16:
		return n < KVT_VW ? vf_load_f16_part(p, n) : vf_load_f16(p);
	case KVT_BF16:
		return n < KVT_VW ? vf_load_bf16_part(p, n) : vf_load_bf16(p);
	default:
		return n < KVT_VW ? vf_load_part((const float *)p, n) : vf_load((const float *)p);
	}
}

VF_INLINE uint32_t panel_element(uint32_t codec)
{
	return codec == KVT_F32 ? 4 : 2;
}

/* The steps of K's panel that are partial sum @part: [panel_part(dims, part), panel_part(dims, part + 1)). */
static inline uint32_t panel_part(uint32_t dims, uint32_t part)
{
	return part * (dims / PARTS) + (part < dims % PARTS ? part : dims % PARTS);
}

/* Dimensions [d, d + n) of KVT_VW positions. */
VF_INLINE void panel_transpose(uint32_t codec, float *out, const uint8_t *const *rows, uint32_t dims, uint32_t d,
			       unsigned n)
{
	vf v[KVT_VW];

	KVT_UNROLL
	for (unsigned i = 0; i < KVT_VW; i++)
		v[i] = panel_widen(codec, rows[i] + d * panel_element(codec), n);
	vf_transpose(v);
	KVT_UNROLL
	for (unsigned i = 0; i < KVT_VW; i++) {
		if (i < n)
			vf_store(out + (panel_part(dims, (d + i) % PARTS) + (d + i) / PARTS) * PANEL, v[i]);
	}
}

VF_INLINE void panel_k_widen(uint32_t codec, float *out, const uint8_t *const *rows, uint32_t dims)
{
	for (unsigned lane = 0; lane < PANEL; lane += KVT_VW, out += KVT_VW, rows += KVT_VW) {
		uint32_t d = 0;

		for (; d + KVT_VW <= dims; d += KVT_VW)
			panel_transpose(codec, out, rows, dims, d, KVT_VW);
		if (d < dims)
			panel_transpose(codec, out, rows, dims, d, dims - d);
	}
}

/* One panel of K, of 16 rows. */
static inline void panel_k(uint32_t codec, float *out, const uint8_t *const *rows, uint32_t dims)
{
	switch (codec) {
	case KVT_F16:
		panel_k_widen(KVT_F16, out, rows, dims);
		break;
	case KVT_BF16:
		panel_k_widen(KVT_BF16, out, rows, dims);
		break;
	default:
		panel_k_widen(KVT_F32, out, rows, dims);
	}
}

VF_INLINE void panel_v_widen(uint32_t codec, float *out, size_t stride, const uint8_t *v, uint32_t dims)
{
	const uint32_t e = panel_element(codec);
	uint32_t d = 0;

	for (; d + PANEL <= dims; d += PANEL, out += stride) {
		KVT_UNROLL
		for (unsigned i = 0; i < PANEL; i += KVT_VW)
			vf_store(out + i, panel_widen(codec, v + (d + i) * e, KVT_VW));
	}
	for (unsigned i = 0; d + i < dims; i += KVT_VW) {
		uint32_t n = dims - d - i;

		vf_store(out + i, panel_widen(codec, v + (d + i) * e, n < KVT_VW ? n : KVT_VW));
	}
}

/* One position of V into its step of each panel, which lie @stride floats apart. Lanes past @dims are not defined. */
static inline void panel_v(uint32_t codec, float *out, size_t stride, const uint8_t *v, uint32_t dims)
{
	switch (codec) {
	case KVT_F16:
		panel_v_widen(KVT_F16, out, stride, v, dims);
		break;
	case KVT_BF16:
		panel_v_widen(KVT_BF16, out, stride, v, dims);
		break;
	default:
		panel_v_widen(KVT_F32, out, stride, v, dims);
	}
}

/*
 * c[row][vector] += sum over steps a[row][step * a_step] * b[panel][step][16],
 * panels @stride floats apart. @a_step, @rows and @panels are constants: c is
 * registers.
 */
VF_INLINE void panel_multiply(const unsigned a_step, const unsigned rows, const unsigned panels, vf *c,
			      const float *const *a, const float *b, size_t stride, uint32_t steps)
{
	const unsigned vecs = panels * PANEL_VECS;

	for (uint32_t s = 0; s < steps; s++, b += PANEL) {
		vf x[4 * PANEL_VECS];

		KVT_UNROLL
		for (unsigned p = 0; p < panels; p++) {
			KVT_UNROLL
			for (unsigned v = 0; v < PANEL_VECS; v++)
				x[p * PANEL_VECS + v] = vf_load(b + p * stride + v * KVT_VW);
		}
		KVT_UNROLL
		for (unsigned i = 0; i < rows; i++) {
			vf y = vf_set1(a[i][s * a_step]);

			KVT_UNROLL
			for (unsigned v = 0; v < vecs; v++)
				c[i * vecs + v] = vf_fma(y, x[v], c[i * vecs + v]);
		}
	}
}

#endif
