/* SPDX-License-Identifier: MIT */
/*
 * Panels: what the matrix loops read. A panel is an array [steps][16] of f32;
 * 16 results lie side by side. For scores a step is a dimension and the 16 are
 * positions (K transposed); for the output a step is a position and the 16 are
 * dimensions of V. Both are then one loop, sum over steps of a[row][step] *
 * panel[step][16], whose 16 x rows sums are independent chains.
 */
#ifndef KVT_ATTENTION_PANEL_H
#define KVT_ATTENTION_PANEL_H

#include <stddef.h>

#include "attention/ahead.h"
#include "base/simd.h"
#include "kvtier.h"

#define PANEL 16
#define PANEL_VECS (PANEL / KVT_VW)

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

/* Dimensions [d, d + n) of KVT_VW positions; positions from @rows on are zero. */
VF_INLINE void panel_transpose(uint32_t codec, float *out, const uint8_t *const *k, uint32_t offset, unsigned rows,
			       uint32_t d, unsigned n)
{
	vf v[KVT_VW];

	offset += d * panel_element(codec);
	if (rows >= KVT_VW) {
		KVT_UNROLL
		for (unsigned i = 0; i < KVT_VW; i++)
			v[i] = panel_widen(codec, k[i] + offset, n);
	} else {
		for (unsigned i = 0; i < KVT_VW; i++)
			v[i] = i < rows ? panel_widen(codec, k[i] + offset, n) : vf_zero();
	}
	vf_transpose(v);
	out += d * PANEL;
	if (n >= KVT_VW) {
		KVT_UNROLL
		for (unsigned i = 0; i < KVT_VW; i++)
			vf_store(out + i * PANEL, v[i]);
	} else {
		for (unsigned i = 0; i < n; i++)
			vf_store(out + i * PANEL, v[i]);
	}
}

#ifdef KVT_TRANSPOSE_HALVES
/* The whole panel but for the last dims % 8 dimensions, which the caller adds. */
VF_INLINE uint32_t panel_k_halves(uint32_t codec, float *out, const uint8_t *const *k, uint32_t offset, uint32_t dims,
				  struct ahead *ahead)
{
	uint32_t d = 0;

	for (; d + 8 <= dims; d += 8) {
		__m256i v[8];

		ahead_step(ahead, PANEL * 8 * 2 / LINE / 2);
		vf_transpose_halves(k, offset + d * 2, v);
		KVT_UNROLL
		for (unsigned i = 0; i < 8; i++) {
			__m128i low = _mm256_castsi256_si128(v[i]), high = _mm256_extracti128_si256(v[i], 1);

			vf_store(out + (d + i) * PANEL, codec == KVT_F16 ? _mm256_cvtph_ps(low) : vf_of_bf16(low));
			vf_store(out + (d + i) * PANEL + 8, codec == KVT_F16 ? _mm256_cvtph_ps(high) : vf_of_bf16(high));
		}
	}
	return d;
}
#endif

VF_INLINE void panel_k_codec(uint32_t codec, float *out, const uint8_t *const *k, uint32_t offset, unsigned rows,
			     uint32_t dims, struct ahead *ahead)
{
	uint32_t first = 0;

#ifdef KVT_TRANSPOSE_HALVES
	if (codec != KVT_F32 && rows == PANEL)
		first = panel_k_halves(codec, out, k, offset, dims, ahead);
#endif
	for (unsigned lane = 0; lane < PANEL; lane += KVT_VW, out += KVT_VW, k += KVT_VW) {
		unsigned have = rows > lane ? rows - lane : 0;
		uint32_t d = first;

		for (; d + KVT_VW <= dims; d += KVT_VW) {
			/* half of the lines that this reads; the multiplication asks for the other half */
			ahead_step(ahead, KVT_VW * KVT_VW * panel_element(codec) / LINE / 2);
			panel_transpose(codec, out, k, offset, have, d, KVT_VW);
		}
		if (d < dims)
			panel_transpose(codec, out, k, offset, have, d, dims - d);
	}
}

/* One panel of K: positions k[0..rows), rows <= 16, the rest zero. [dims][16] */
static inline void panel_k(uint32_t codec, float *out, const uint8_t *const *k, uint32_t offset, unsigned rows,
			   uint32_t dims, struct ahead *ahead)
{
	switch (codec) {
	case KVT_F16:
		panel_k_codec(KVT_F16, out, k, offset, rows, dims, ahead);
		break;
	case KVT_BF16:
		panel_k_codec(KVT_BF16, out, k, offset, rows, dims, ahead);
		break;
	default:
		panel_k_codec(KVT_F32, out, k, offset, rows, dims, ahead);
	}
}

VF_INLINE void panel_v_codec(uint32_t codec, float *out, size_t stride, const uint8_t *v, uint32_t dims)
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
		panel_v_codec(KVT_F16, out, stride, v, dims);
		break;
	case KVT_BF16:
		panel_v_codec(KVT_BF16, out, stride, v, dims);
		break;
	default:
		panel_v_codec(KVT_F32, out, stride, v, dims);
	}
}

/*
 * c[row][vector] += sum over steps a[row][step] * b[panel][step][16]. @rows and
 * @panels are constants: c is registers.
 */
VF_INLINE void panel_multiply(const unsigned rows, const unsigned panels, vf *c, const float *const *a, const float *b,
			      size_t stride, uint32_t steps, struct ahead *ahead)
{
	const unsigned vecs = panels * PANEL_VECS;

	for (uint32_t s = 0; s < steps;) {
		uint32_t pause = steps - s < 8 ? steps : s + 8;

		ahead_step(ahead, ahead->pace);
		for (; s < pause; s++, b += PANEL) {
			vf x[4 * PANEL_VECS];

			KVT_UNROLL
			for (unsigned p = 0; p < panels; p++) {
				KVT_UNROLL
				for (unsigned v = 0; v < PANEL_VECS; v++)
					x[p * PANEL_VECS + v] = vf_load(b + p * stride + v * KVT_VW);
			}
			KVT_UNROLL
			for (unsigned i = 0; i < rows; i++) {
				vf y = vf_set1(a[i][s]);

				KVT_UNROLL
				for (unsigned v = 0; v < vecs; v++)
					c[i * vecs + v] = vf_fma(y, x[v], c[i * vecs + v]);
			}
		}
	}
}

#endif
