/* SPDX-License-Identifier: MIT */
/*
 * XXH3_64bits (seed 0) of a row, as a GPU wants it: a short row is one thread's,
 * a long one is shared by four, each with two of the eight accumulators and a
 * sixteenth of a kilobyte's 16-byte columns; they meet in one addition.
 * https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
 *
 * Plain C as well: tests/unit/digest_kernel.c compares it on the CPU.
 */
#ifndef KVT_KERNELS_XXH3_CUH
#define KVT_KERNELS_XXH3_CUH

#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define XXH3_FN static __device__ __forceinline__
#define XXH3_DATA static __device__ __constant__
#else
#define XXH3_FN static inline
#define XXH3_DATA static
#endif

#define XXH3_LONG 240 /* rows of more bytes are long */
#define XXH3_SECRET_WORDS 24

/* The default secret: 192 bytes as little-endian words. */
XXH3_DATA const uint64_t xxh3_secret[XXH3_SECRET_WORDS] = {
	0xbe4ba423396cfeb8ull, 0x1cad21f72c81017cull, 0xdb979083e96dd4deull, 0x1f67b3b7a4a44072ull,
	0x78e5c0cc4ee679cbull, 0x2172ffcc7dd05a82ull, 0x8e2443f7744608b8ull, 0x4c263a81e69035e0ull,
	0xcb00c391bb52283cull, 0xa32e531b8b65d088ull, 0x4ef90da297486471ull, 0xd8acdea946ef1938ull,
	0x3f349ce33f76faa8ull, 0x1d4f0bc7c7bbdcf9ull, 0x3159b4cd4be0518aull, 0x647378d9c97e9fc8ull,
	0xc3ebd33483acc5eaull, 0xeb6313faffa081c5ull, 0x49daf0b751dd0d17ull, 0x9e68d429265516d3ull,
	0xfca1477d58be162bull, 0xce31d07ad1b8f88full, 0x280416958f3acb45ull, 0x7e404bbbcafbd7afull,
};

#define XXH3_P32_1 0x9E3779B1u
#define XXH3_P32_2 0x85EBCA77u
#define XXH3_P32_3 0xC2B2AE3Du
#define XXH3_P64_1 0x9E3779B185EBCA87ull
#define XXH3_P64_2 0xC2B2AE3D27D4EB4Full
#define XXH3_P64_3 0x165667B19E3779F9ull
#define XXH3_P64_4 0x85EBCA77C2B2AE63ull
#define XXH3_P64_5 0x27D4EB2F165667C5ull

XXH3_FN uint32_t xxh3_read32(const uint8_t *p)
{
#ifdef __CUDACC__
	if ((uintptr_t)p % 4 == 0)
		return *(const uint32_t *)p;
	return p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
#else
	uint32_t v;

	memcpy(&v, p, sizeof(v));
	return v;
#endif
}

XXH3_FN uint64_t xxh3_read64(const uint8_t *p)
{
#ifdef __CUDACC__
	if ((uintptr_t)p % 8 == 0)
		return *(const uint64_t *)p;
#endif
	return xxh3_read32(p) | (uint64_t)xxh3_read32(p + 4) << 32;
}

struct xxh3_pair {
	uint64_t a, b;
};

XXH3_FN struct xxh3_pair xxh3_read128(const uint8_t *p)
{
	struct xxh3_pair r;

#ifdef __CUDACC__
	if ((uintptr_t)p % 16 == 0) {
		ulonglong2 v = *(const ulonglong2 *)p;

		r.a = v.x;
		r.b = v.y;
		return r;
	}
#endif
	r.a = xxh3_read64(p);
	r.b = xxh3_read64(p + 8);
	return r;
}

/* 8 bytes of the secret from byte @at. */
XXH3_FN uint64_t xxh3_key(const uint64_t *secret, uint32_t at)
{
	uint32_t shift = at % 8 * 8;

	return shift ? secret[at / 8] >> shift | secret[at / 8 + 1] << (64 - shift) : secret[at / 8];
}

XXH3_FN uint64_t xxh3_fold(uint64_t a, uint64_t b)
{
#ifdef __CUDA_ARCH__
	return a * b ^ __umul64hi(a, b);
#else
	unsigned __int128 m = (unsigned __int128)a * b;

	return (uint64_t)m ^ (uint64_t)(m >> 64);
#endif
}

XXH3_FN uint64_t xxh3_rotl(uint64_t v, int n)
{
	return v << n | v >> (64 - n);
}

XXH3_FN uint64_t xxh3_swap64(uint64_t v)
{
#ifdef __CUDA_ARCH__
	return (uint64_t)__byte_perm((uint32_t)v, 0, 0x0123) << 32 | __byte_perm((uint32_t)(v >> 32), 0, 0x0123);
#else
	return __builtin_bswap64(v);
#endif
}

XXH3_FN uint64_t xxh3_avalanche(uint64_t h)
{
	h = (h ^ h >> 37) * 0x165667919E3779F9ull;
	return h ^ h >> 32;
}

XXH3_FN uint64_t xxh64_avalanche(uint64_t h)
{
	h = (h ^ h >> 33) * XXH3_P64_2;
	h = (h ^ h >> 29) * XXH3_P64_3;
	return h ^ h >> 32;
}

XXH3_FN uint64_t xxh3_mix16(const uint8_t *p, const uint64_t *secret, uint32_t at)
{
	struct xxh3_pair v = xxh3_read128(p);

	return xxh3_fold(v.a ^ xxh3_key(secret, at), v.b ^ xxh3_key(secret, at + 8));
}

/* A row of 0 to 16 bytes. */
XXH3_FN uint64_t xxh3_tiny(const uint8_t *p, uint32_t len, const uint64_t *secret)
{
	uint64_t a, b;

	if (len > 8) {
		a = xxh3_read64(p) ^ xxh3_key(secret, 24) ^ xxh3_key(secret, 32);
		b = xxh3_read64(p + len - 8) ^ xxh3_key(secret, 40) ^ xxh3_key(secret, 48);
		return xxh3_avalanche(len + xxh3_swap64(a) + b + xxh3_fold(a, b));
	}
	if (len >= 4) {
		a = xxh3_read32(p + len - 4) + ((uint64_t)xxh3_read32(p) << 32);
		a ^= xxh3_key(secret, 8) ^ xxh3_key(secret, 16);
		a ^= xxh3_rotl(a, 49) ^ xxh3_rotl(a, 24);
		a *= 0x9FB21C651E98DF25ull;
		a ^= (a >> 35) + len;
		a *= 0x9FB21C651E98DF25ull;
		return a ^ a >> 28;
	}
	if (len) {
		a = (uint64_t)p[0] << 16 | (uint64_t)p[len >> 1] << 24 | p[len - 1] | (uint64_t)len << 8;
		return xxh64_avalanche(a ^ (uint32_t)(secret[0] ^ secret[0] >> 32));
	}
	return xxh64_avalanche(xxh3_key(secret, 56) ^ xxh3_key(secret, 64));
}

/* A row of at most XXH3_LONG bytes. */
XXH3_FN uint64_t xxh3_short(const uint8_t *p, uint32_t len, const uint64_t *secret)
{
	uint64_t h = len * XXH3_P64_1;
	uint32_t i;

	if (len <= 16)
		return xxh3_tiny(p, len, secret);
	if (len <= 128) {
		for (i = (len - 1) / 32; i > 0; i--)
			h += xxh3_mix16(p + 16 * i, secret, 32 * i) +
			     xxh3_mix16(p + len - 16 * (i + 1), secret, 32 * i + 16);
		return xxh3_avalanche(h + xxh3_mix16(p, secret, 0) + xxh3_mix16(p + len - 16, secret, 16));
	}
	for (i = 0; i < 8; i++)
		h += xxh3_mix16(p + 16 * i, secret, 16 * i);
	h = xxh3_avalanche(h);
	for (; i < len / 16; i++)
		h += xxh3_mix16(p + 16 * i, secret, 16 * (i - 8) + 3);
	return xxh3_avalanche(h + xxh3_mix16(p + len - 16, secret, 136 - 17));
}

XXH3_FN void xxh3_add(uint64_t *acc, struct xxh3_pair v, uint64_t key0, uint64_t key1)
{
	uint64_t k0 = v.a ^ key0, k1 = v.b ^ key1;

	acc[0] += v.b + (uint64_t)(uint32_t)k0 * (k0 >> 32);
	acc[1] += v.a + (uint64_t)(uint32_t)k1 * (k1 >> 32);
}

/* Part @j (0 to 3) of a long row's hash: its two accumulators before the first stripe, */
XXH3_FN void xxh3_begin(uint64_t *acc, uint32_t j)
{
	acc[0] = j == 0 ? XXH3_P32_3 : j == 1 ? XXH3_P64_2 : j == 2 ? XXH3_P64_4 : XXH3_P64_5;
	acc[1] = j == 0 ? XXH3_P64_1 : j == 1 ? XXH3_P64_3 : j == 2 ? XXH3_P32_2 : XXH3_P32_1;
}

/* after each 16 of them behind which there are more, */
XXH3_FN void xxh3_scramble(uint64_t *acc, uint32_t j, const uint64_t *secret)
{
	for (int i = 0; i < 2; i++)
		acc[i] = (acc[i] ^ acc[i] >> 47 ^ secret[16 + 2 * j + i]) * XXH3_P32_1;
}

/* and what becomes of them and its column of the last 64 bytes. */
XXH3_FN uint64_t xxh3_end(uint64_t *acc, struct xxh3_pair last, uint32_t j, const uint64_t *secret)
{
	xxh3_add(acc, last, xxh3_key(secret, 121 + 16 * j), xxh3_key(secret, 121 + 16 * j + 8));
	return xxh3_fold(acc[0] ^ xxh3_key(secret, 11 + 16 * j), acc[1] ^ xxh3_key(secret, 11 + 16 * j + 8));
}

/* That part; the hash is xxh3_avalanche(len * XXH3_P64_1 + the sum of the four parts). */
XXH3_FN uint64_t xxh3_long_part(const uint8_t *p, uint32_t len, uint32_t j, const uint64_t *secret)
{
	const uint32_t last = (len - 1) / 64; /* stripes but for the last, which ends with the row */
	const uint8_t *column = p + 16 * j;
	uint64_t acc[2], key = secret[2 * j], next;

	xxh3_begin(acc, j);
	for (uint32_t s = 0; s < last; s += 16) {
		uint32_t n = last - s < 16 ? last - s : 16;

#ifdef __CUDACC__
#pragma unroll 4
#endif
		for (uint32_t i = 0; i < n; i++) {
			next = secret[2 * j + i + 1];
			xxh3_add(acc, xxh3_read128(column + (uint64_t)(s + i) * 64), key, next);
			key = next;
		}
		if (n < 16)
			break;
		xxh3_scramble(acc, j, secret);
		key = secret[2 * j];
	}
	return xxh3_end(acc, xxh3_read128(p + len - 64 + 16 * j), j, secret);
}

/* A row's share of its block's digest; userspace/codec/codec.h. */
XXH3_FN uint64_t xxh3_row_digest(uint64_t hash, uint64_t row_index)
{
	return xxh64_avalanche(hash + (row_index + 1) * 0x9E3779B97F4A7C15ull);
}

#endif
