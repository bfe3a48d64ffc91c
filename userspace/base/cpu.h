/* SPDX-License-Identifier: MIT */
/*
 * Which instruction sets this CPU and this build have, asked once. Every
 * dispatcher takes its table from here, so that one answer holds everywhere.
 * The environment variable KVTIER_ISA (a name below) overrides the choice, for
 * tests and measurements; the results are the same bits.
 */
#ifndef KVT_BASE_CPU_H
#define KVT_BASE_CPU_H

#include <stdbool.h>

enum kvt_isa { KVT_PORTABLE, KVT_NEON, KVT_AVX2, KVT_AVX512, KVT_ISAS };

/* Built in and usable on this CPU. */
bool kvt_isa_usable(enum kvt_isa isa);

/* The best usable one, or the one that KVTIER_ISA names. */
enum kvt_isa kvt_isa_best(void);

/* "portable", "neon", "avx2", "avx512". */
const char *kvt_isa_name(enum kvt_isa isa);

/* By name, usable or not; KVT_ISAS for another string. */
enum kvt_isa kvt_isa_find(const char *name);

/*
 * For a dispatcher of @name, which a *.simd.c file defines through KVT_SIMD(name):
 *   KVT_ISA_DECLARE(extern const struct ops, ops);
 *   static const struct ops *const table[KVT_ISAS] = KVT_ISA_TABLE(&ops);
 * Entries that this build lacks are NULL.
 */
#if defined(__x86_64__)
#define KVT_ISA_DECLARE(type, name) type name##_portable, name##_avx2, name##_avx512
#define KVT_ISA_TABLE(name) \
	{ [KVT_PORTABLE] = name##_portable, [KVT_AVX2] = name##_avx2, [KVT_AVX512] = name##_avx512 }
#elif defined(__aarch64__)
#define KVT_ISA_DECLARE(type, name) type name##_portable, name##_neon
#define KVT_ISA_TABLE(name) { [KVT_PORTABLE] = name##_portable, [KVT_NEON] = name##_neon }
#else
#define KVT_ISA_DECLARE(type, name) type name##_portable
#define KVT_ISA_TABLE(name) { [KVT_PORTABLE] = name##_portable }
#endif

#endif
