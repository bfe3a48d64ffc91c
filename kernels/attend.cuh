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
 *   tile: m' = the largest s_j if that is above m by more than GROWTH, else m
 *         p_j = 2^(s_j c - m' c), alpha = 2^((m - m') c);  l' = l alpha + sum of p_j
 *         acc = acc alpha, then one chain of matrix instructions over 16 positions
 *         each, ascending, of p_j rounded to the codec
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
#define GROWTH 8.0f	/* in exponents of 2: weights stay below 2^GROWTH, and accumulators are rarely rescaled */
#define PAD 16		/* bytes behind each row in shared memory, so that eight rows' 16 bytes lie in all banks */
#define STAGES_MAX 8	/* tiles in flight */
#define GROUPS (SPLIT / 16) /* of 16 positions, which lie in one block: a split's, as many as a warp has lanes */
#define INF __int_as_float(0x7f800000)

typedef struct kvt_attend_args attend_args;

extern __shared__ __align__(1024) uint8_t attend_memory[];

/* ---- instructions ---- */

static __device__ __forceinline__ uint32_t shared_address(const void *p)
{
	return (uint32_t)__cvta_generic_to_shared(p);
}

/* 128 threads wait for each other. */
static __device__ __forceinline__ void group_sync(uint32_t id)
{
	asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory");
}

/* Whether any of the 128 threads says so. */
static __device__ __forceinline__ bool group_any(uint32_t id, bool any)
{
	uint32_t r;

	asm volatile("{\n"
		     ".reg .pred p, q;\n"
		     "setp.ne.u32 p, %1, 0;\n"
		     "barrier.cta.red.or.pred q, %2, 128, p;\n"
		     "selp.u32 %0, 1, 0, q;\n"
		     "}" : "=r"(r) : "r"((uint32_t)any), "r"(id) : "memory");
	return r;
}

static __device__ __forceinline__ void copy16(uint32_t dst, uint64_t src)
{
	asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}

/* 16 bytes to shared memory, or 16 zeros. */
static __device__ __forceinline__ void copy16(uint32_t dst, uint64_t src, bool there)
{
	asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(there ? 16 : 0)
		     : "memory");
}

/* A policy of the L2 for what is read once: it makes room before other things have to, such as splits' parts. */
static __device__ __forceinline__ uint64_t once_policy(void)
{
	uint64_t policy;

	asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
	return policy;
}

static __device__ __forceinline__ void copy16_once(uint32_t dst, uint64_t src, uint64_t policy)
{
	asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "l"(policy)
		     : "memory");
}

/* ---- barriers in shared memory: what was copied is there ---- */

static __device__ __forceinline__ void barrier_init(uint64_t *b, uint32_t count)
{
	asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(count) : "memory");
}

static __device__ __forceinline__ void barrier_arrive(uint64_t *b)
{
	asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}

/* Arrive when this thread's copies so far are there. */
static __device__ __forceinline__ void barrier_arrive_copied(uint64_t *b)
{
	asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(b)) : "memory");
}

static __device__ __forceinline__ void barrier_wait(uint64_t *b, uint32_t parity)
{
#if __CUDA_ARCH__ >= 900
	asm volatile("{\n"
		     ".reg .pred p;\n"
		     "again:\n"
		     "mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n"
		     "@!p bra again;\n"
		     "}" ::"r"(shared_address(b)), "r"(parity) : "memory");
#else
	asm volatile("{\n"
		     ".reg .pred p;\n"
		     "again:\n"
		     "mbarrier.test_wait.parity.shared.b64 p, [%0], %1;\n"
		     "@!p bra again;\n"
		     "}" ::"r"(shared_address(b)), "r"(parity) : "memory");
#endif
}

static __device__ __forceinline__ void copy_commit(void)
{
	asm volatile("cp.async.commit_group;" ::: "memory");
}

/* At most N of this thread's groups are still under way. */
template <int N> static __device__ __forceinline__ void copy_wait(void)
{
	asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
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

/* A row's elements in shared memory, with zeros behind the last of K and Q: products take 16 at a time. */
static __device__ __forceinline__ uint32_t whole_steps(uint32_t dim)
{
	return (dim + 15) / 16 * 16;
}

/*
 * Or rows are whole lines of 128 bytes whose 16-byte pieces are exchanged by the row's number: eight rows' lie in all
 * banks too, and a line that is copied stays one line.
 */
static __device__ __forceinline__ uint32_t whole_lines(uint32_t dim)
{
	return (2 * dim + 127) / 128 * 128;
}

static __device__ __forceinline__ uint32_t swizzled_piece(uint32_t row, uint32_t piece)
{
	return piece / 8 * 128 + (piece ^ row) % 8 * 16;
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

/* Splits that any of a sequence's tokens sees: their number, and the first; one, if there are tokens and they see nothing. */
static __device__ __forceinline__ uint32_t splits_seen(const attend_args &a, const sequence &s, uint32_t *first)
{
	const uint32_t from = s.n ? sees_from(a, s, 0) / SPLIT : 0;
	const uint32_t to = s.n ? (sees_to(a, s, s.n - 1) + SPLIT - 1) / SPLIT : 0;

	*first = from;
	return s.n ? max(to, from + 1) - from : 0;
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

/*
 * Some of a tile's scores, of which not all may be seen: accumulators 8 positions apart from @j on; element e of one is
 * row e / 2 of the thread's two, position e % 2. Returns a bit for each that is not seen.
 */
template <int N> static __device__ __forceinline__ uint32_t look(const attend_args &a, const query_row *row, bool general,
								  float (&s)[N][4], uint32_t j)
{
	uint32_t hidden = 0;

#pragma unroll
	for (int i = 0; i < 4 * N; i++) {
		const query_row &r = row[i % 4 / 2 * 8];
		const uint32_t at = j + i / 4 * 8 + i % 2;
		float &x = s[i / 4][i % 4];

		if (at < r.from || at >= r.to)
			x = -INF;
		else if (general)
			x = adjust(a, r, x, at);
		hidden |= x == -INF ? 1u << i : 0;
	}
	return hidden;
}

/* Weights of what is not seen to -0: careful_output() knows them by that. */
template <int N> static __device__ __forceinline__ void hide(float (&s)[N][4], uint32_t hidden)
{
#pragma unroll
	for (int i = 0; i < 4 * N; i++)
		s[i / 4][i % 4] = hidden >> i & 1 ? -0.0f : s[i / 4][i % 4];
}

/* A tile's largest score to the split's reference: what accumulators are multiplied with, and what is taken from s c. */
static __device__ __forceinline__ void refer(float *max, float top, float c, float *scale, float *taken)
{
	const bool grown = __fmul_rn(__fsub_rn(top, *max), c) > GROWTH;

	*scale = grown ? power2(__fmul_rn(__fsub_rn(*max, top), c)) : 1;
	*max = grown ? top : *max;
	*taken = *max == -INF ? 0 : __fmul_rn(*max, c);
}

/*
 * A tile's scores of a thread's two rows to weights. @max, @sum: of the split so
 * far; @scale: what the accumulators must be multiplied with.
 */
static __device__ __forceinline__ void soften(float score[TILE / 8][4], float max[2], float sum[2], float scale[2], float c)
{
#pragma unroll
	for (int i = 0; i < 2; i++) {
		float top = score[0][2 * i], taken, x = 0;

#pragma unroll
		for (int n = 0; n < TILE / 8; n++)
			top = fmaxf(top, fmaxf(score[n][2 * i], score[n][2 * i + 1]));
		top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
		top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
		refer(&max[i], top, c, &scale[i], &taken);
#pragma unroll
		for (int n = 0; n < TILE / 8; n++)
#pragma unroll
			for (int e = 2 * i; e < 2 * i + 2; e++)
				score[n][e] = power2(__fmaf_rn(score[n][e], c, -taken));
#pragma unroll
		for (int p = 0; p < TILE / 16; p++) {
			const float y = __fadd_rn(__fadd_rn(score[2 * p][2 * i], score[2 * p][2 * i + 1]),
						  __fadd_rn(score[2 * p + 1][2 * i], score[2 * p + 1][2 * i + 1]));

			x = p ? __fadd_rn(x, y) : y;
		}
		sum[i] = __fmaf_rn(sum[i], scale[i], x);
	}
}

/* Multiplying with 1 is left out: few tiles need more. */
template <int N> static __device__ __forceinline__ void rescale(float (&acc)[N][4], const float scale[2])
{
	if (!__any_sync(0xffffffffu, scale[0] != 1 || scale[1] != 1))
		return;
#pragma unroll
	for (int n = 0; n < N; n++)
#pragma unroll
		for (int e = 0; e < 4; e++)
			acc[n][e] = __fmul_rn(acc[n][e], scale[e / 2]);
}

/* The sum of a row's four lanes, at the end of a split. */
static __device__ __forceinline__ float row_sum(float sum)
{
	sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 1));
	return __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 2));
}

/* ---- V that is not finite, where not every row sees every position ----
 *
 * A weight of 0 hides no infinity or NaN: their product is NaN. So a tile of V
 * that has such elements and is seen in part is multiplied without them, and
 * they are added for those rows that see them.
 */

/* Of two elements, those that are infinite or NaN. */
template <int CODEC> static __device__ __forceinline__ uint32_t not_finite(uint32_t two)
{
	const uint32_t low = CODEC == ROW_F16 ? 0x7c00 : 0x7f80, high = low << 16;

	return ((two & low) == low ? two & 0xffff : 0) | ((two & high) == high ? two & 0xffff0000 : 0);
}

template <int CODEC> static __device__ __forceinline__ float half_of(uint32_t two, uint32_t which)
{
	const uint16_t h = which ? two >> 16 : two;

	return __uint_as_float(CODEC == ROW_F16 ? f16_widen(h) : bf16_widen(h));
}

static __device__ __forceinline__ uint32_t load_shared(uint32_t address)
{
	uint32_t r;

	asm volatile("ld.shared.u32 %0, [%1];" : "=r"(r) : "r"(address) : "memory");
	return r;
}

/* Whether this thread's share, of THREADS, of a tile of V has such; at(row, piece): where 16 bytes of it are. */
template <int CODEC, int THREADS, typename AT> static __device__ __forceinline__ bool any_not_finite(uint32_t pieces, AT at)
{
	uint32_t found = 0;

#pragma unroll 1
	for (uint32_t row = threadIdx.x % THREADS / 8; row < TILE; row += THREADS / 8)
#pragma unroll 1
		for (uint32_t piece = threadIdx.x % 8; piece < pieces; piece += 8)
			for (uint32_t i = 0; i < 16; i += 4)
				found |= not_finite<CODEC>(load_shared(at(row, piece) + i));
	return found;
}

/* acc += weights V for N x 8 columns, of which pieces [0, @pieces) are there. */
template <int CODEC, int N, typename AT> static __device__ __forceinline__ void
careful_output(float (&acc)[N][4], const uint32_t (&weights)[TILE / 16][4], uint32_t pieces, AT at)
{
	const uint32_t lane = threadIdx.x % 32;

#pragma unroll 1
	for (uint32_t p = 0; p < TILE / 16; p++) {
		uint32_t pa[4];

#pragma unroll
		for (int i = 0; i < 4; i++)
			pa[i] = p < 2 ? (p ? weights[1][i] : weights[0][i]) : p == 2 ? weights[2][i] : weights[3][i];
#pragma unroll
		for (int n = 0; n < N; n += 2) {
			uint32_t vb[4];

			if (n >= pieces)
				break;
			matrices_transposed(vb, at(p * 16 + lane % 16, n + lane / 16));
			for (int i = 0; i < 4; i++)
				vb[i] &= ~not_finite<CODEC>(vb[i]);
			multiply<CODEC>(acc[n], pa, vb[0], vb[1]);
			multiply<CODEC>(acc[n + 1], pa, vb[2], vb[3]);
		}
#pragma unroll 1
		for (uint32_t j = 0; j < 16; j++) { /* lane j % 8 / 2 of four has the weight, in its half j % 2 */
			uint32_t weight[2];

#pragma unroll
			for (int i = 0; i < 2; i++) {
				weight[i] = __shfl_sync(0xffffffffu, j < 8 ? pa[i] : pa[2 + i], lane / 4 * 4 + j % 8 / 2);
				weight[i] >>= 16 * (j % 2);
			}
#pragma unroll
			for (int n = 0; n < N; n++) {
				if (n >= pieces)
					break;
				const uint32_t two = not_finite<CODEC>(load_shared(at(p * 16 + j, n) + lane % 4 * 4));

#pragma unroll
				for (int e = 0; e < 4; e++)
					if ((weight[e / 2] & 0xffff) != 0x8000)
						acc[n][e] = __fmaf_rn(half_of<CODEC>(weight[e / 2], 0),
								      half_of<CODEC>(two, e % 2), acc[n][e]);
			}
		}
	}
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

/* The end of a split: a thread's part of two of its rows, (max, sum, acc), is merged into (run_max, run_sum, run). */
template <int N>
static __device__ __forceinline__ void merge_split(float run_max[2], float run_sum[2], float (&run)[N][4], const float max[2],
						   const float sum[2], float (&acc)[N][4], float c)
{
#pragma unroll
	for (int i = 0; i < 2; i++) {
		float old_weight, part_weight;

		weigh(&run_max[i], max[i], c, &old_weight, &part_weight);
		run_sum[i] = merged_sum(run_sum[i], old_weight, row_sum(sum[i]), part_weight);
#pragma unroll
		for (int n = 0; n < N; n++)
#pragma unroll
			for (int e = 2 * i; e < 2 * i + 2; e++) {
				run[n][e] = merged(run[n][e], old_weight, acc[n][e], part_weight);
				acc[n][e] = 0;
			}
	}
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

/* The same for lane i's group of a split; lanes whose group is not in [from, to) get 0. */
static __device__ __forceinline__ uint64_t find_group(uint64_t table, uint32_t block_rows, uint32_t row_bytes, uint32_t offset,
						      uint32_t split, uint32_t from, uint32_t to)
{
	const uint32_t position = split * SPLIT + threadIdx.x % 32 * 16;

	return position < to && position + 16 > from ? find_rows(table, block_rows, row_bytes, offset, position) : 0;
}

/* Of what the warp's lanes found, a tile's i-th. */
static __device__ __forceinline__ uint64_t group_of(uint64_t found, uint32_t tile, uint32_t i)
{
	return __shfl_sync(0xffffffffu, found, tile % (SPLIT / TILE) * (TILE / 16) + i);
}

/*
 * A tile into shared memory by 128 threads, WIDTH of them side by side, rows @stride bytes apart, @pieces of 16 bytes
 * each, exchanged or not; rows outside [from, to) are zeros, but for @whole tiles. @group(i): where the tile's i-th 16
 * rows are.
 */
template <int WIDTH, bool SWIZZLED, typename GROUP> static __device__ __forceinline__ void
load_tile(GROUP group, uint32_t row_bytes, uint32_t pieces, uint32_t tile, uint32_t from, uint32_t to, bool whole, uint32_t dst,
	  uint32_t stride)
{
	constexpr uint32_t down = 128 / WIDTH;
	const uint32_t row = threadIdx.x % 128 / WIDTH;

	for (uint32_t piece0 = 0; piece0 < pieces; piece0 += WIDTH) {
		const uint32_t piece = piece0 + threadIdx.x % WIDTH;
		const uint32_t to_row = dst + row * stride + (SWIZZLED ? piece / 8 * 128 : piece * 16);
		const uint32_t place = SWIZZLED ? (piece ^ row) % 8 * 16 : 0; /* of row 0 of 8 */
		const uint64_t in_group = row * (uint64_t)row_bytes + piece * 16;

		if (whole) {
#pragma unroll
			for (uint32_t i = 0; i < TILE / 16; i++) {
				const uint64_t at = group(i) + in_group;

#pragma unroll
				for (uint32_t r = 0; r < 16; r += down)
					if (piece < pieces)
						copy16(to_row + (i * 16 + r) * stride + (SWIZZLED ? place ^ r % 8 * 16 : 0),
						       at + r * (uint64_t)row_bytes);
			}
		} else {
#pragma unroll 1
			for (uint32_t i = 0; i < TILE / 16; i++) {
				const uint64_t base = group(i), at = base + in_group;

#pragma unroll 1
				for (uint32_t r = 0; r < 16; r += down) {
					const uint32_t position = tile * TILE + i * 16 + r + row;
					const bool there = base && position >= from && position < to;

					if (piece < pieces)
						copy16(to_row + (i * 16 + r) * stride + (SWIZZLED ? place ^ r % 8 * 16 : 0),
						       at + r * (uint64_t)row_bytes, there);
				}
			}
		}
	}
}

static __device__ __forceinline__ void clear16(uint32_t address)
{
	asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
}

/* All threads: zeros into the last 16 bytes of rows @stride bytes apart, where nothing is copied. */
template <bool SWIZZLED>
static __device__ __forceinline__ void clear_ends(uint32_t rows0, uint32_t rows, uint32_t stride, uint32_t dim)
{
	for (uint32_t i = threadIdx.x; dim % 16 && i < rows; i += blockDim.x)
		clear16(rows0 + i * stride + (SWIZZLED ? swizzled_piece(i, dim / 8) : 2 * dim));
}

/* WARPS: query rows [row, row + n) into shared memory, rounded to the codec; what is not there is zeros. */
template <int CODEC, int WARPS> static __device__ __forceinline__ void
load_queries(const attend_args &a, const sequence &s, uint32_t kv_head, uint32_t row, uint32_t n, uint8_t *dst, uint32_t stride)
{
	const uint32_t group = a.heads / a.kv_heads, lane = threadIdx.x % 32, size = a.q_type == ROW_F32 ? 4 : 2;

	for (uint32_t i = threadIdx.x / 32; i < n; i += WARPS) {
		const uint32_t token = (row + i) / group, head = kv_head * group + (row + i) % group;
		const uint64_t at = a.q + (uint64_t)(s.token + token) * a.q_stride + (uint64_t)head * a.k_dim * size;
		uint32_t *to = reinterpret_cast<uint32_t *>(dst + i * stride);

		for (uint32_t d = lane; d < whole_steps(a.k_dim) / 2; d += 32) {
			if (token >= s.n || d >= a.k_dim / 2)
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
