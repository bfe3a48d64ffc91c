/* SPDX-License-Identifier: MIT */
/*
 * The arithmetic of the GPU's exact attention, which every attend_*.cu follows,
 * so that a row's bits do not depend on who computes it (docs/adr/0011).
 *
 * Positions are cut at multiples of TILE and SPLIT. For a query row, rounded to
 * the rows' codec:
 *
 *   s_j   = one chain of matrix instructions over 16 dimensions each, ascending, from +0
 *   then, where anything is added to scores, adjust(): one rounding each
 *   tile: m' = max(m, s_j); p_j = 2^(s_j c - m' c), alpha = 2^((m - m') c)
 *         l' = l alpha + sum of p_j;  acc = acc alpha, then one chain of matrix
 *         instructions over 16 positions each, ascending, of p_j rounded to the codec
 *   split: (m, l, acc) begin at (-inf, 0, 0); splits are merged in ascending order by weigh()
 *
 * In the sum of p_j, lane q of four has positions 2q, 2q + 1 of each eight; 16
 * positions' four are added first, then the 16s, then tiles, and at the split's
 * end the lanes: (0 + 1) + (2 + 3). It is how mma's and wgmma's accumulators lie.
 *
 * Positions not seen have s = -inf, which changes no number above. All bits of
 * zeros that depend on how many of them were added are lost by one + 0 at the end.
 * Online softmax: FlashAttention-2 (Dao 2023), algorithm 1.
 */
#ifndef KVT_KERNELS_ATTEND_CUH
#define KVT_KERNELS_ATTEND_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "gpu/kernels.h"
#include "half.cuh"

#define TILE KVT_ATTEND_TILE
#define SPLIT KVT_ATTEND_SPLIT
#define LOG2E 1.44269504f
#define PAD 16		/* bytes behind each row in shared memory, so that eight rows' 16 bytes lie in all banks */
#define STAGES_MAX 6	/* tiles in flight */
#define STAGE_RING 8	/* more than STAGES_MAX; a power of two */
#define INF __int_as_float(0x7f800000)

typedef struct kvt_attend_args attend_args;

extern __shared__ __align__(1024) uint8_t attend_memory[];

/* ---- instructions ---- */

static __device__ __forceinline__ uint32_t shared_address(const void *p)
{
	return (uint32_t)__cvta_generic_to_shared(p);
}

/* 16 bytes to shared memory, or 16 zeros. */
static __device__ __forceinline__ void copy16(uint32_t dst, uint64_t src, bool there)
{
	asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(there ? 16 : 0)
		     : "memory");
}

static __device__ __forceinline__ void copy_commit(void)
{
	asm volatile("cp.async.commit_group;" ::: "memory");
}

/* At most @n of this thread's groups are still under way. */
static __device__ __forceinline__ void copy_wait(uint32_t n)
{
#define WAIT(k) case k: asm volatile("cp.async.wait_group %0;" ::"n"(k) : "memory"); break
	switch (n) {
	WAIT(1); WAIT(2); WAIT(3); WAIT(4); WAIT(5); WAIT(6); WAIT(7); WAIT(8); WAIT(9); WAIT(10);
	default: asm volatile("cp.async.wait_group 0;" ::: "memory");
	}
#undef WAIT
}

static __device__ __forceinline__ void matrices(uint32_t r[4], uint32_t address)
{
	asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
		     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

static __device__ __forceinline__ void matrices_transposed(uint32_t r[4], uint32_t address)
{
	asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
		     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

/* d += a b: 16 x 16 times 16 x 8. */
template <int CODEC> static __device__ __forceinline__ void multiply(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
	if constexpr (CODEC == ROW_F16)
		asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
			     "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
			     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
			     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
	else
		asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
			     "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
			     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
			     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* 2^x; 2^0 is 1, 2^-inf is 0. */
static __device__ __forceinline__ float power2(float x)
{
	float y;

	asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
	return y;
}

template <int CODEC> static __device__ __forceinline__ uint32_t pair(float low, float high)
{
	uint32_t r;

	if constexpr (CODEC == ROW_F16)
		asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
	else
		asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
	return r;
}

template <typename T> static __device__ __forceinline__ const T *array(uint64_t address)
{
	return reinterpret_cast<const T *>(address);
}

/* Element @i of an array of @type. */
static __device__ __forceinline__ float load_float(uint64_t address, uint64_t i, uint32_t type)
{
	if (type == ROW_F32)
		return array<float>(address)[i];
	if (type == ROW_F16)
		return __half2float(array<__half>(address)[i]);
	return __bfloat162float(array<__nv_bfloat16>(address)[i]);
}

/* ---- what a query row sees ---- */

struct sequence {
	uint32_t token, n; /* its first query token in the batch, and how many */
	uint32_t rows, first;
};

static __device__ __forceinline__ sequence get_sequence(const attend_args &a, uint32_t i)
{
	sequence s;

	s.token = array<uint32_t>(a.tokens)[i];
	s.n = array<uint32_t>(a.tokens)[i + 1] - s.token;
	s.rows = array<uint32_t>(a.rows)[i];
	s.first = a.first ? array<uint32_t>(a.first)[i] : s.rows - s.n;
	return s;
}

static __device__ __forceinline__ uint32_t sees_to(const attend_args &a, const sequence &s, uint32_t token)
{
	return a.causal ? min(s.first + token + 1, s.rows) : s.rows;
}

static __device__ __forceinline__ uint32_t sees_from(const attend_args &a, const sequence &s, uint32_t token)
{
	const uint32_t end = s.first + token + 1;

	return a.window && end > a.window ? min(end - a.window, sees_to(a, s, token)) : 0;
}

/* Splits that any of a sequence's tokens sees: their number, and the first. */
static __device__ __forceinline__ uint32_t splits_seen(const attend_args &a, const sequence &s, uint32_t *first)
{
	const uint32_t from = s.n ? sees_from(a, s, 0) / SPLIT : 0;
	const uint32_t to = s.n ? (sees_to(a, s, s.n - 1) + SPLIT - 1) / SPLIT : 0;

	*first = from;
	return to > from ? to - from : 0;
}

/* Query rows of a block share a KV head: row = token * group + head in the group. */
struct query_row {
	uint64_t mask; /* of its token */
	uint32_t from, to, position;
	float slope;
};

static __device__ __forceinline__ query_row get_row(const attend_args &a, const sequence &s, uint32_t row, uint32_t kv_head)
{
	const uint32_t group = a.heads / a.kv_heads, token = min(row / group, s.n - 1), head = kv_head * group + row % group;
	query_row r;

	r.from = sees_from(a, s, token);
	r.to = sees_to(a, s, token);
	r.position = s.first + token;
	r.slope = a.slopes ? array<float>(a.slopes)[head] : 1;
	r.mask = a.mask + (s.token + token) * a.mask_stride * (a.mask_type == ROW_F32 ? 4 : 2);
	return r;
}

static __device__ __forceinline__ bool is_general(const attend_args &a)
{
	return a.softcap != 0 || a.slopes || a.mask || a.scale < 0;
}

/* c: what turns a score into the exponent of 2. */
static __device__ __forceinline__ float exponent_unit(const attend_args &a)
{
	return is_general(a) ? LOG2E : __fmul_rn(a.scale, LOG2E);
}

/* Scale, soft-cap and bias of a score at position @j. */
static __device__ __forceinline__ float adjust(const attend_args &a, const query_row &r, float s, uint32_t j)
{
	s = __fmul_rn(s, a.scale);
	if (a.softcap != 0) { /* cap tanh(s / cap) = cap - 2 cap / (e^(2 s / cap) + 1) */
		const float e = power2(__fmul_rn(s, __fdiv_rn(2 * LOG2E, a.softcap)));

		s = __fmaf_rn(-2 * a.softcap, __frcp_rn(__fadd_rn(e, 1)), a.softcap);
	}
	if (a.mask) {
		const float bias = load_float(r.mask, j, a.mask_type);

		return bias == -INF ? -INF : __fadd_rn(s, __fmul_rn(r.slope, bias));
	}
	return a.slopes ? __fmaf_rn(r.slope, (float)((int)j - (int)r.position), s) : s;
}

/* One accumulator of scores: element e is row e / 2 of the thread's two, position @j + e % 2. */
static __device__ __forceinline__ void look(const attend_args &a, const query_row *two[2], bool general, float s[4], uint32_t j)
{
#pragma unroll
	for (int e = 0; e < 4; e++) {
		const query_row &r = *two[e / 2];
		const uint32_t at = j + e % 2;

		if (at < r.from || at >= r.to)
			s[e] = -INF;
		else if (general)
			s[e] = adjust(a, r, s[e], at);
	}
}

/*
 * A tile's scores of a thread's two rows to weights. @max, @sum: of the split so
 * far; @scale: what the accumulators must be multiplied with.
 */
static __device__ __forceinline__ void soften(float score[TILE / 8][4], float max[2], float sum[2], float scale[2], float c)
{
#pragma unroll
	for (int i = 0; i < 2; i++) {
		float top = -INF, base, x = 0;

#pragma unroll
		for (int n = 0; n < TILE / 8; n++)
			top = fmaxf(top, fmaxf(score[n][2 * i], score[n][2 * i + 1]));
		top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
		top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
		top = fmaxf(max[i], top);
		base = top == -INF ? 0 : top;
		scale[i] = power2(__fmul_rn(__fsub_rn(max[i], base), c));
		max[i] = top;
		base = __fmul_rn(base, c);
#pragma unroll
		for (int n = 0; n < TILE / 8; n++)
#pragma unroll
			for (int e = 2 * i; e < 2 * i + 2; e++)
				score[n][e] = power2(__fmaf_rn(score[n][e], c, -base));
#pragma unroll
		for (int p = 0; p < TILE / 16; p++) {
			const float y = __fadd_rn(__fadd_rn(score[2 * p][2 * i], score[2 * p][2 * i + 1]),
						  __fadd_rn(score[2 * p + 1][2 * i], score[2 * p + 1][2 * i + 1]));

			x = p ? __fadd_rn(x, y) : y;
		}
		sum[i] = __fmaf_rn(sum[i], scale[i], x);
	}
}

/* The sum of a row's four lanes, at the end of a split. */
static __device__ __forceinline__ float row_sum(float sum)
{
	sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 1));
	return __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 2));
}

/* ---- splits to rows ---- */

/* The weights of what was merged so far and of the next split, given their maxima. */
static __device__ __forceinline__ void weigh(float *max, float part_max, float c, float *old_weight, float *part_weight)
{
	const float top = fmaxf(*max, part_max), base = top == -INF ? 0 : top;

	*old_weight = power2(__fmul_rn(__fsub_rn(*max, base), c));
	*part_weight = power2(__fmul_rn(__fsub_rn(part_max, base), c));
	*max = top;
}

static __device__ __forceinline__ float merged(float old, float old_weight, float part, float part_weight)
{
	return __fmaf_rn(old, old_weight, part_weight == 0 ? 0 : __fmul_rn(part, part_weight));
}

static __device__ __forceinline__ float merged_sum(float old, float old_weight, float part, float part_weight)
{
	return __fmaf_rn(old, old_weight, __fmul_rn(part, part_weight));
}

/* What accumulators are multiplied with at the end; the sink takes its share of the sum. */
static __device__ __forceinline__ float final_weight(const attend_args &a, uint32_t head, float max, float sum, float c)
{
	float weight = 1;

	if (sum == 0)
		return 0;
	if (a.sinks) {
		const float own = __fmul_rn(max, c), sink = __fmul_rn(array<float>(a.sinks)[head], LOG2E);
		const float top = fmaxf(own, sink);

		weight = power2(__fsub_rn(own, top));
		sum = __fmaf_rn(sum, weight, power2(__fsub_rn(sink, top)));
	}
	return __fdiv_rn(weight, sum);
}

static __device__ __forceinline__ uint32_t output_bits(float acc, float weight)
{
	const float f = weight == 0 ? 0 : __fadd_rn(__fmul_rn(acc, weight), 0);

	return f != f ? 0x7fc00000 : __float_as_uint(f);
}

static __device__ __forceinline__ void store_output(const attend_args &a, uint64_t token, uint64_t i, uint32_t bits)
{
	const uint64_t at = a.out + token * a.out_stride;

	if (a.out_type == ROW_F32)
		reinterpret_cast<uint32_t *>(at)[i] = bits;
	else
		reinterpret_cast<uint16_t *>(at)[i] = a.out_type == ROW_F16 ? f16_narrow(bits) : bf16_narrow(bits);
}

/* Two elements side by side; i is even. */
static __device__ __forceinline__ void store_output2(const attend_args &a, uint64_t token, uint64_t i, uint32_t x, uint32_t y)
{
	const uint64_t at = a.out + token * a.out_stride;

	if (a.out_type == ROW_F32)
		reinterpret_cast<uint2 *>(at)[i / 2] = make_uint2(x, y);
	else if (a.out_type == ROW_F16)
		reinterpret_cast<uint32_t *>(at)[i / 2] = f16_narrow(x) | (uint32_t)f16_narrow(y) << 16;
	else
		reinterpret_cast<uint32_t *>(at)[i / 2] = bf16_narrow(x) | (uint32_t)bf16_narrow(y) << 16;
}

/* ---- loading; other codecs would decode here ---- */

/* Where 16 positions' rows begin in a plane; 16 rows never leave a block. 0: zeros. */
static __device__ __forceinline__ uint64_t find_rows(uint64_t table, uint32_t block_rows, uint32_t row_bytes, uint32_t offset,
						     uint32_t position)
{
	const uint64_t block = array<uint64_t>(table)[position / block_rows];

	return block ? block + (uint64_t)(position % block_rows) * row_bytes + offset : 0;
}

/* A plane as one block reads it: one KV head's columns [offset, offset + 16 chunks) bytes. */
struct plane {
	uint64_t table; /* of the sequence */
	uint32_t block_rows, row_bytes, offset, chunks;
};

/* Threads 0 to 3 of each tile: where its rows are, for load_tile(). Positions in [from, to) alone are looked up. */
static __device__ __forceinline__ void find_tile(const plane &p, uint32_t tile, uint32_t from, uint32_t to, uint32_t i,
						 uint64_t *where)
{
	const uint32_t position = tile * TILE + i * 16;

	where[i] = position < to && position + 16 > from ?
			   find_rows(p.table, p.block_rows, p.row_bytes, p.offset, position) : 0;
}

/* A tile into shared memory by 128 threads, rows @stride bytes apart; rows outside [from, to) are zeros. */
static __device__ __forceinline__ void load_tile(const attend_args &a, const plane &p, uint32_t tile, uint32_t from, uint32_t to,
						 const uint64_t *where, uint32_t dst, uint32_t stride)
{
	const uint32_t down = 128 / p.chunks, across = 128 % p.chunks;
	uint32_t row = threadIdx.x / p.chunks, chunk = threadIdx.x % p.chunks;

#pragma unroll 4
	for (uint32_t i = threadIdx.x; i < TILE * p.chunks; i += 128) {
		const uint64_t base = where[row / 16];
		const uint32_t position = tile * TILE + row;
		const bool there = base && position >= from && position < to;

		copy16(dst + row * stride + chunk * 16, there ? base + row % 16 * p.row_bytes + chunk * 16 : a.q, there);
		row += down;
		chunk += across;
		if (chunk >= p.chunks) {
			chunk -= p.chunks;
			row++;
		}
	}
}

/* Query rows [row, row + n) into shared memory, rounded to the codec; rows that are not there are zeros. */
template <int CODEC> static __device__ __forceinline__ void load_queries(const attend_args &a, const sequence &s, uint32_t kv_head,
									 uint32_t row, uint32_t n, uint8_t *dst, uint32_t stride)
{
	const uint32_t group = a.heads / a.kv_heads, lane = threadIdx.x % 32, size = a.q_type == ROW_F32 ? 4 : 2;

	for (uint32_t i = threadIdx.x / 32; i < n; i += blockDim.x / 32) {
		const uint32_t token = (row + i) / group, head = kv_head * group + (row + i) % group;
		const uint64_t at = a.q + (uint64_t)(s.token + token) * a.q_stride + (uint64_t)head * a.k_dim * size;
		uint32_t *to = reinterpret_cast<uint32_t *>(dst + i * stride);

		for (uint32_t d = lane; d < a.k_dim / 2; d += 32) {
			if (token >= s.n)
				to[d] = 0;
			else if (a.q_type == CODEC)
				to[d] = array<uint32_t>(at)[d];
			else
				to[d] = pair<CODEC>(load_float(at, 2 * d, a.q_type), load_float(at, 2 * d + 1, a.q_type));
		}
	}
}

/* ---- work: units of all sequences, side by side ---- */

/* before[i] = count(0) + ... + count(i - 1), for i up to @n; then all threads may read it. */
template <typename F> static __device__ __forceinline__ void count_units(uint32_t *before, uint32_t n, F count)
{
	uint32_t sum = 0;

	if (threadIdx.x < 32) {
		for (uint32_t i = threadIdx.x; i < (n + 31) / 32 * 32; i += 32) {
			uint32_t own = i < n ? count(i) : 0, up = own;

#pragma unroll
			for (int d = 1; d < 32; d *= 2) {
				const uint32_t lower = __shfl_up_sync(0xffffffffu, up, d);

				up += threadIdx.x >= d ? lower : 0;
			}
			if (i < n)
				before[i] = sum + up - own;
			sum += __shfl_sync(0xffffffffu, up, 31);
		}
		if (threadIdx.x == 0)
			before[n] = sum;
	}
	__syncthreads();
}

/* The i with before[i] <= unit < before[i + 1]. */
static __device__ __forceinline__ uint32_t find_unit(const uint32_t *before, uint32_t n, uint32_t unit)
{
	uint32_t low = 0, high = n;

	while (high - low > 1) {
		const uint32_t middle = (low + high) / 2;

		if (before[middle] <= unit)
			low = middle;
		else
			high = middle;
	}
	return low;
}

static __device__ __forceinline__ uint32_t dynamic_shared_bytes(void)
{
	uint32_t bytes;

	asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
	return bytes;
}

#endif
