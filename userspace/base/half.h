/* SPDX-License-Identifier: MIT */
/*
 * f16 and bf16 one at a time, in integer arithmetic: what every vector unit's
 * conversion must equal. Widening is exact; narrowing rounds to nearest even,
 * overflows to infinity and keeps a NaN's sign and top payload bits, quieted.
 */
#ifndef KVT_BASE_HALF_H
#define KVT_BASE_HALF_H

#include <stdint.h>
#include <string.h>

static inline float kvt_float_of(uint32_t bits)
{
	float f;

	memcpy(&f, &bits, 4);
	return f;
}

static inline uint32_t kvt_bits_of(float f)
{
	uint32_t bits;

	memcpy(&bits, &f, 4);
	return bits;
}

/* A signalling NaN is quieted, as the conversion instructions do. */
static inline uint32_t kvt_f16_widen(uint16_t h)
{
	uint32_t sign = (uint32_t)(h & 0x8000) << 16, exp = (h >> 10) & 31, man = h & 0x3ff;

	if (exp == 31)
		return sign | 0x7f800000 | man << 13 | (man ? 0x400000 : 0);
	if (exp)
		return sign | (exp + 112) << 23 | man << 13;
	if (!man)
		return sign;
	exp = (uint32_t)__builtin_clz(man) - 21; /* places to the hidden bit, at least 1 */
	return sign | (113 - exp) << 23 | (man << exp & 0x3ff) << 13;
}

static inline uint16_t kvt_f16_narrow(uint32_t f)
{
	uint32_t sign = f >> 16 & 0x8000, mag = f & 0x7fffffff, shift, man, half;

	if (mag > 0x7f800000)
		return sign | 0x7e00 | (mag >> 13 & 0x3ff);
	if (mag >= 0x477ff000) /* 65520 and more */
		return sign | 0x7c00;
	if (mag >= 0x38800000) { /* normal: rebias, then round on the bits */
		mag -= 112u << 23;
		return sign | ((mag + 0xfff + (mag >> 13 & 1)) >> 13);
	}
	if (mag <= 0x33000000) /* 2^-25, half of the smallest, and less */
		return sign;
	shift = 126 - (mag >> 23);
	man = (mag & 0x7fffff) | 0x800000;
	half = 1u << (shift - 1);
	return sign | ((man + half - 1 + (man >> shift & 1)) >> shift);
}

/* A shift: a signalling NaN stays one. */
static inline uint32_t kvt_bf16_widen(uint16_t h)
{
	return (uint32_t)h << 16;
}

static inline uint16_t kvt_bf16_narrow(uint32_t f)
{
	if ((f & 0x7fffffff) > 0x7f800000)
		return f >> 16 | 0x40;
	return (f + 0x7fff + (f >> 16 & 1)) >> 16;
}

#endif
