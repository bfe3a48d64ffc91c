/* SPDX-License-Identifier: MIT */
/*
 * How decoding is divided: units are (sequence, split, 16 query rows of a KV
 * head), which leave a part each: what attend_decode, attend_wide and
 * attend_small have in common, and who merges the parts.
 */
#ifndef KVT_KERNELS_ATTEND_DECODE_CUH
#define KVT_KERNELS_ATTEND_DECODE_CUH

#include "attend.cuh"
#include "early.cuh"

#define DECODE_ROWS 16

/* One split of some rows. */
struct decode_unit {
	sequence s;
	uint32_t seq, kv_head, row0;
	uint32_t from, to, tile0, tiles;
};

static __device__ __forceinline__ uint32_t row_blocks(const attend_args &a, const sequence &s)
{
	return (s.n * (a.heads / a.kv_heads) + DECODE_ROWS - 1) / DECODE_ROWS;
}

static __device__ __forceinline__ uint32_t first_token(const attend_args &a, const decode_unit &u)
{
	return u.row0 ? u.row0 / (a.heads / a.kv_heads) : 0;
}

static __device__ __forceinline__ uint32_t last_token(const attend_args &a, const decode_unit &u)
{
	const uint32_t group = a.heads / a.kv_heads;

	return u.s.n > 1 ? (min(u.row0 + DECODE_ROWS, u.s.n * group) - 1) / group : 0;
}

static __device__ __forceinline__ decode_unit get_decode_unit(const attend_args &a, const uint32_t *before, uint32_t index,
								uint32_t kv_heads)
{
	decode_unit u;
	uint32_t local, blocks, split;

	u.tiles = 0;
	if (index >= before[a.n_seqs])
		return u;
	u.seq = find_unit(before, a.n_seqs, index);
	u.s = get_sequence(a, u.seq);
	local = index - before[u.seq];
	blocks = row_blocks(a, u.s);
	splits_seen(a, u.s, &split);
	u.kv_head = local % kv_heads;
	local /= kv_heads;
	if (blocks > 1) {
		u.row0 = local % blocks * DECODE_ROWS;
		local /= blocks;
	} else {
		u.row0 = 0;
	}
	split += local;
	u.from = max(sees_from(a, u.s, first_token(a, u)), split * SPLIT);
	u.to = min(sees_to(a, u.s, last_token(a, u)), (split + 1) * SPLIT);
	u.tile0 = u.from / TILE;
	u.tiles = u.from < u.to ? (u.to - 1) / TILE + 1 - u.tile0 : 0;
	return u;
}

/* The @i-th line of what lies from @at on: it is asked for before it is known what of it is needed. */
static __device__ __forceinline__ void prefetch(uint64_t at, uint64_t bytes, uint32_t i)
{
	if (i * 128ull < bytes)
		asm volatile("prefetch.global.L2 [%0];" ::"l"(at + i * 128ull));
}

#endif
