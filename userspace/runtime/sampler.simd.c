// SPDX-License-Identifier: MIT
/*
 * The sampler's loops over logits, once for each instruction set. Lanes do not
 * mix, sums go to eight fixed partial sums, and multiply and add are rounded
 * one by one; so the vector's width does not show in the bits.
 */
#include "base/simd.h"
#include "runtime/sampler.h"

#if defined(KVT_ISA_avx512)
#define BYTES 64
#elif defined(KVT_ISA_avx2)
#define BYTES 32
#else
#define BYTES 16
#endif
#define DOUBLES (BYTES / 8)
#define FLOATS (BYTES / 4)

typedef float floats __attribute__((vector_size(BYTES)));
typedef int32_t ints __attribute__((vector_size(BYTES)));
typedef float half_floats __attribute__((vector_size(BYTES / 2)));
typedef double doubles __attribute__((vector_size(BYTES)));
typedef int64_t longs __attribute__((vector_size(BYTES)));

#define LN2_HIGH 0x1.62e42feep-1 /* 32 bits, so that its product with an exponent is exact */
#define LN2_LOW 0x1.a39ef35793c76p-33

static float scan(const float *x, bool *nan)
{
	floats max = { 0 };
	ints bad = { 0 };
	float m;

	max -= __builtin_inff();
	for (uint32_t i = 0; i < KVT_SAMPLER_BLOCK; i += FLOATS) {
		floats y;
		ints more;

		memcpy(&y, x + i, sizeof(y));
		more = y > max;
		max = (floats)(((ints)y & more) | ((ints)max & ~more));
		bad |= y != y;
	}
	m = max[0];
	*nan = false;
	for (uint32_t j = 0; j < FLOATS; j++) {
		m = max[j] > m ? max[j] : m;
		*nan |= bad[j] != 0;
	}
	return m;
}

static void spread_lanes(struct kvt_sampler_spread *a, const float *x, uint32_t lane)
{
	doubles n, sum, square, one = { 0 };

	one += 1;
	memcpy(&n, a->n + lane, sizeof(n));
	memcpy(&sum, a->sum + lane, sizeof(sum));
	memcpy(&square, a->square + lane, sizeof(square));
	for (uint32_t i = lane; i < KVT_SAMPLER_BLOCK; i += KVT_SAMPLER_LANES) {
		half_floats narrow;
		doubles y, d;
		longs finite;

		memcpy(&narrow, x + i, sizeof(narrow));
		y = __builtin_convertvector(narrow, doubles);
		finite = y - y == 0;
		d = (doubles)((longs)(y - a->shift) & finite);
		n += (doubles)((longs)one & finite);
		sum += d;
		square += d * d;
	}
	memcpy(a->n + lane, &n, sizeof(n));
	memcpy(a->sum + lane, &sum, sizeof(sum));
	memcpy(a->square + lane, &square, sizeof(square));
}

static void spread(struct kvt_sampler_spread *a, const float *x)
{
	for (uint32_t lane = 0; lane < KVT_SAMPLER_LANES; lane += DOUBLES)
		spread_lanes(a, x, lane);
}

/* e^x = 2^k e^r with |r| <= ln2 / 2, by Taylor. */
static void exp_lanes(doubles *at)
{
	const double round = 0x1.8p52; /* adding it leaves the nearest whole number in the low bits */
	longs live = *at >= -700.0;
	doubles x = (doubles)((longs)*at & live), shifted = x * 0x1.71547652b82fep0 + round, k = shifted - round, r, e;

	r = (x - k * LN2_HIGH) - k * LN2_LOW;
	e = 0x1.6124613a86d09p-33 * r + 0x1.1eed8eff8d898p-29; /* 1/13!, 1/12! */
	e = e * r + 0x1.ae64567f544e4p-26;
	e = e * r + 0x1.27e4fb7789f5cp-22;
	e = e * r + 0x1.71de3a556c734p-19;
	e = e * r + 0x1.a01a01a01a01ap-16;
	e = e * r + 0x1.a01a01a01a01ap-13;
	e = e * r + 0x1.6c16c16c16c17p-10;
	e = e * r + 0x1.1111111111111p-7;
	e = e * r + 0x1.5555555555555p-5;
	e = e * r + 0x1.5555555555555p-3;
	e = e * r + 0.5;
	e = e * r + 1.0;
	e = e * r + 1.0;
	e *= (doubles)(((longs)shifted + 1023) << 52);
	*at = (doubles)((longs)e & live);
}

static void exp_scaled(double *w, const double *v, uint32_t n, double max, double t)
{
	doubles x = { 0 };
	uint32_t i = 0;

	for (; n - i >= DOUBLES; i += DOUBLES) {
		memcpy(&x, v + i, sizeof(x));
		x = (x - max) / t;
		exp_lanes(&x);
		memcpy(w + i, &x, sizeof(x));
	}
	if (i == n)
		return;
	x = (doubles){ 0 } + max;
	memcpy(&x, v + i, (n - i) * sizeof(double));
	x = (x - max) / t;
	exp_lanes(&x);
	memcpy(w + i, &x, (n - i) * sizeof(double));
}

const struct kvt_sampler_ops KVT_SIMD(kvt_sampler_ops) = { scan, spread, exp_scaled };
