/* SPDX-License-Identifier: MIT */
/*
 * Panels: what the matrix loops read. A panel is an array [steps][16]; 16
 * results lie side by side. For scores a step is a dimension and the 16 are
 * positions (K transposed); for the output a step is a position and the 16 are
 * dimensions of V. Both are then one loop, sum over steps of a[row][step] *
 * panel[step][16], whose 16 x rows sums are independent chains.
 *
 * Panels that many query rows read are f32. Those that are read once keep the
 * rows' own codec, and the loop widens as it loads.
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

/* Dimensions [d, d + n) of KVT_VW positions. */
VF_INLINE void panel_transpose(uint32_t codec, float *out, const uint8_t *const *rows, uint32_t d, unsigned n)
{
	vf v[KVT_VW];

	KVT_UNROLL
	for (unsigned i = 0; i < KVT_VW; i++)
		v[i] = panel_widen(codec, rows[i] + d * panel_element(codec), n);
	vf_transpose(v);
	out += d * PANEL;
	if (n >= KVT_VW) {
		KVT_UNROLL
		for (unsigned i = 0; i < KVT_VW; i++)
			vf_store(out + i * PANEL, v[i]);
	} else {
		KVT_UNROLL
		for (unsigned i = 0; i < KVT_VW; i++) {
			if (i < n)
				vf_store(out + i * PANEL, v[i]);
		}
	}
}

VF_INLINE void panel_k_widen(uint32_t codec, float *out, const uint8_t *const *rows, uint32_t dims, struct ahead *ahead)
{
	for (unsigned lane = 0; lane < PANEL; lane += KVT_VW, out += KVT_VW, rows += KVT_VW) {
		uint32_t d = 0;

		for (; d + KVT_VW <= dims; d += KVT_VW) {
			/* half of the lines that this reads; the multiplication asks for the other half */
			ahead_step(ahead, KVT_VW * KVT_VW * panel_element(codec) / LINE / 2);
			panel_transpose(codec, out, rows, d, KVT_VW);
		}
		if (d < dims)
			panel_transpose(codec, out, rows, d, dims - d);
	}
}

#ifdef KVT_TRANSPOSE_HALVES
/* Without widening. */
VF_INLINE void panel_k_halves(uint16_t *out, const uint8_t *const *rows, uint32_t dims, struct ahead *ahead)
{
	uint32_t d = 0;

	for (; d + 8 <= dims; d += 8) {
		__m256i v[8];

		ahead_step(ahead, PANEL * 8 * 2 / LINE / 2);
		vh_transpose(rows, d * 2, v);
		KVT_UNROLL
		for (unsigned i = 0; i < 8; i++)
			_mm256_storeu_si256((__m256i *)(out + (d + i) * PANEL), v[i]);
	}
	for (; d < dims; d++) {
		for (unsigned i = 0; i < PANEL; i++)
			memcpy(out + d * PANEL + i, rows[i] + d * 2, 2);
	}
}
#endif

/* What a panel of K holds if it is read once. */
VF_INLINE uint32_t panel_k_kind(uint32_t codec)
{
#ifdef KVT_TRANSPOSE_HALVES
	return codec;
#else
	(void)codec;
	return KVT_F32;
#endif
}

/* One panel of K, of 16 rows, [dims][16] elements of @kind: KVT_F32 or panel_k_kind(). */
static inline void panel_k(uint32_t codec, uint32_t kind, void *out, const uint8_t *const *rows, uint32_t dims,
			   struct ahead *ahead)
{
#ifdef KVT_TRANSPOSE_HALVES
	if (kind != KVT_F32) {
		panel_k_halves(out, rows, dims, ahead);
		return;
	}
#endif
	(void)kind;
	switch (codec) {
	case KVT_F16:
		panel_k_widen(KVT_F16, out, rows, dims, ahead);
		break;
	case KVT_BF16:
		panel_k_widen(KVT_BF16, out, rows, dims, ahead);
		break;
	default:
		panel_k_widen(KVT_F32, out, rows, dims, ahead);
	}
}

VF_INLINE void panel_v_widen(uint32_t codec, uint8_t *out, size_t stride, const uint8_t *v, uint32_t dims)
{
	const uint32_t e = panel_element(codec);
	uint32_t d = 0;

	for (; d + PANEL <= dims; d += PANEL, out += stride) {
		KVT_UNROLL
		for (unsigned i = 0; i < PANEL; i += KVT_VW)
			vf_store((float *)out + i, panel_widen(codec, v + (d + i) * e, KVT_VW));
	}
	for (unsigned i = 0; d + i < dims; i += KVT_VW) {
		uint32_t n = dims - d - i;

		vf_store((float *)out + i, panel_widen(codec, v + (d + i) * e, n < KVT_VW ? n : KVT_VW));
	}
}

/*
 * One position of V into its step of each panel, which lie @stride bytes apart,
 * of KVT_F32 or @codec elements. Lanes past @dims are not defined.
 */
static inline void panel_v(uint32_t codec, uint32_t kind, uint8_t *out, size_t stride, const uint8_t *v, uint32_t dims)
{
	if (kind != KVT_F32) {
		uint32_t d = 0;

		for (; d + PANEL <= dims; d += PANEL, out += stride)
			memcpy(out, v + d * 2, PANEL * 2);
		if (d < dims)
			memcpy(out, v + d * 2, (dims - d) * 2);
		return;
	}
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
 * c[row][vector] += sum over steps a[row][step] * b[panel][step][16], panels
 * @stride bytes apart, of elements of @kind. @kind, @rows and @panels are
 * constants: c is registers.
 */
VF_INLINE void panel_multiply(const uint32_t kind, const unsigned rows, const unsigned panels, vf *c,
			      const float *const *a, const uint8_t *b, size_t stride, uint32_t steps,
			      struct ahead *ahead)
{
	const unsigned vecs = panels * PANEL_VECS, e = panel_element(kind);

	for (uint32_t s = 0; s < steps;) {
		uint32_t pause = steps - s < 8 ? steps : s + 8;

		ahead_step(ahead, ahead->pace);
		for (; s < pause; s++, b += PANEL * e) {
			vf x[4 * PANEL_VECS];

			KVT_UNROLL
			for (unsigned p = 0; p < panels; p++) {
				KVT_UNROLL
				for (unsigned v = 0; v < PANEL_VECS; v++)
					x[p * PANEL_VECS + v] = panel_widen(kind, b + p * stride + v * KVT_VW * e, KVT_VW);
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
