/* SPDX-License-Identifier: MIT */
/* What the *.simd.c files give each other and kernels.c: one set for each instruction set. */
#ifndef KVT_REF_KERNELS_H
#define KVT_REF_KERNELS_H

#include "base/cpu.h"
#include "engines/ref/engine.h"

#define REF_GEMM(isa)                                                                                                  \
	void ref_gemm_##isa(const struct ref_matrix *w, uint32_t panel, uint32_t panels, const float *x,              \
			    size_t x_stride, uint32_t rows, float *y, size_t y_stride)
REF_GEMM(portable);
REF_GEMM(avx2);
REF_GEMM(avx512);
REF_GEMM(neon);

extern const struct ref_kernels ref_kernels_portable, ref_kernels_avx2, ref_kernels_avx512, ref_kernels_neon;

#endif
