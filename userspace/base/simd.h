/* SPDX-License-Identifier: MIT */
/*
 * A vector of floats, the same on every instruction set. A *.simd.c file is
 * compiled once for each (KVT_ISA: portable, avx2, avx512, neon) and exports
 * its functions through KVT_SIMD(name).
 *
 * The bits do not depend on the instruction set because nothing here depends on
 * the vector's width: kernels put independent results side by side in a vector
 * and never add across it, and each operation is one IEEE-754 operation
 * (multiply-add is always fused).
 */
#ifndef KVT_BASE_SIMD_H
#define KVT_BASE_SIMD_H

#define KVT_SIMD_PASTE2(a, b) a##_##b
#define KVT_SIMD_PASTE(a, b) KVT_SIMD_PASTE2(a, b)
#define KVT_SIMD(name) KVT_SIMD_PASTE(name, KVT_ISA)

#endif
