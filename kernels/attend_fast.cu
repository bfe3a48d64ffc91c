// SPDX-License-Identifier: MIT
/*
 * Family fast: attention of many query rows on sm_90a, with an arithmetic of its
 * own. It is attend.cuh's but for this: tiles have 128 positions, there are no
 * splits (m, l and acc run through all tiles that a row sees), and a tile's sum
 * of weights is added lane by lane. So a row's bits depend on what it sees alone,
 * as in family exact.
 *
 * A thread block has two warpgroups of 64 rows and one that loads. The two take
 * turns at the tensor cores: one multiplies while the other forms weights, and
 * the scores of a tile are begun before the products of the tile before.
 * FlashAttention-3 (Shah et al. 2024) has both.
 */
#include "wgmma.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

#define FAST_TILE KVT_ATTEND_FAST_TILE
#define FAST_GROUPS (FAST_TILE / 16)
#define FAST_GROUP_ROWS 64
#define FAST_ROWS (2 * FAST_GROUP_ROWS)
#define FAST_LOADERS 128
#define FAST_SLOTS 3 /* tiles of K, and of V, in shared memory */

struct fast_shared {
	uint64_t full[2][FAST_SLOTS], empty[2][FAST_SLOTS]; /* K, V */
	uint32_t before[KVT_ATTEND_SEQS + 1];
};

/* A place in a ring of slots, and how often it went round. */
struct fast_slot {
	uint32_t i, phase;

	__device__ __forceinline__ void next(void)
	{
		if (++i == FAST_SLOTS) {
			i = 0;
			phase ^= 1;
		}
	}
};

/* ---- work ---- */

/* Rows of a KV head; of the tiles that any of them sees, every row sees all of [whole0, whole1). */
struct fast_unit {
	sequence s;
	uint32_t seq, kv_head, row0, all_rows;
	uint32_t from, to, tile0, tiles, whole0, whole1;
};

static __device__ __forceinline__ fast_unit get_fast_unit(const attend_args &a, const uint32_t *before, uint32_t index)
{
	const uint32_t group = a.heads / a.kv_heads;
	uint32_t local, row_blocks, token0, token1, end;
	fast_unit u;

	u.seq = find_unit(before, a.n_seqs, index);
	u.s = get_sequence(a, u.seq);
	local = index - before[u.seq];
	u.all_rows = u.s.n * group;
	row_blocks = (u.all_rows + FAST_ROWS - 1) / FAST_ROWS;
	u.kv_head = local % a.kv_heads;
	u.row0 = (row_blocks - 1 - local / a.kv_heads) * FAST_ROWS; /* rows that see most are taken first */
	token0 = u.row0 / group;
	token1 = (min(u.row0 + FAST_ROWS, u.all_rows) - 1) / group;
	u.from = sees_from(a, u.s, token0);
	u.to = sees_to(a, u.s, token1);
	u.tile0 = u.from / FAST_TILE;
	u.tiles = u.from < u.to ? (u.to - 1) / FAST_TILE + 1 - u.tile0 : 0;
	u.whole0 = min((sees_from(a, u.s, token1) + FAST_TILE - 1) / FAST_TILE - u.tile0, u.tiles);
	end = sees_to(a, u.s, token0) / FAST_TILE;
	u.whole1 = max(end > u.tile0 ? end - u.tile0 : 0, u.whole0);
	return u;
}

/* The block's @round-th unit: there and back, so that each block gets long and short ones. */
static __device__ __forceinline__ uint32_t fast_unit_of(uint32_t round)
{
	return round * gridDim.x + (round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
}

/* ---- the loading warpgroup ---- */

template <int DIM> static __device__ __forceinline__ void fast_load(const attend_args &a, fast_shared &sh, uint32_t slots0)
{
	const uint32_t thread = threadIdx.x % FAST_LOADERS, lane = threadIdx.x % 32;
	constexpr int pieces = DIM / 8, down = FAST_LOADERS / pieces; /* 8 or 16 rows: the swizzle stays the same */
	const uint32_t piece = thread % pieces, row = thread / pieces;
	const uint32_t dst0 = slots0 + piece / 8 * (FAST_TILE * 128) + swizzled(row, piece);
	fast_slot slot[2] = {};

	for (uint32_t round = 0; fast_unit_of(round) < sh.before[a.n_seqs]; round++) {
		const fast_unit u = get_fast_unit(a, sh.before, fast_unit_of(round));
		const bool of_v = lane >= 16;
		const uint64_t table = (of_v ? a.v_blocks : a.k_blocks) + (uint64_t)u.seq * a.table_stride * 8;
		const uint32_t block_rows = of_v ? a.v_block_rows : a.k_block_rows;
		const uint32_t row_bytes = of_v ? a.v_row_bytes : a.k_row_bytes;
		/* A step is K of a tile and V of the one before, as they are needed; half a warp finds the groups of each. */
		auto find = [&](uint32_t step) -> uint64_t {
			const uint32_t tile = of_v ? step - 1 : step, position = (u.tile0 + tile) * FAST_TILE + lane % 16 * 16;

			return lane % 16 < FAST_GROUPS && tile < u.tiles && position < u.to && position + 16 > u.from ?
				       find_rows(table, block_rows, row_bytes, u.kv_head * DIM * 2, position) : 0;
		};
		uint64_t next = find(0);

		for (uint32_t step = 0; u.tiles && step <= u.tiles; step++) {
			const uint64_t found = next;
			const uint32_t there = __ballot_sync(0xffffffffu, found != 0);

			next = find(step + 1);
#pragma unroll
			for (uint32_t v = 0; v < 2; v++) {
				const uint32_t tile = step - v, position0 = (u.tile0 + tile) * FAST_TILE;
				const bool whole = (there >> 16 * v & 0xff) == 0xff && position0 >= u.from &&
						   position0 + FAST_TILE <= u.to;
				const uint32_t dst = dst0 + (v * FAST_SLOTS + slot[v].i) * (FAST_TILE * DIM * 2);
				const uint64_t down_bytes = (uint64_t)down * (v ? a.v_row_bytes : a.k_row_bytes);
				const uint64_t in_group = row * (uint64_t)(v ? a.v_row_bytes : a.k_row_bytes) + piece * 16;

				if (tile >= u.tiles)
					continue;
				barrier_wait(&sh.empty[v][slot[v].i], slot[v].phase ^ 1);
#pragma unroll
				for (int i = 0; i < FAST_GROUPS; i++) {
					const uint64_t base = __shfl_sync(0xffffffffu, found, v * 16 + i);
					const uint32_t position = position0 + i * 16 + row;

#pragma unroll
					for (int r = 0; r < 16; r += down) {
						const uint64_t src = base + in_group + (r ? down_bytes : 0);

						if (whole)
							copy16(dst + (i * 16 + r) * 128, src);
						else
							copy16(dst + (i * 16 + r) * 128, src,
							       base && position + r >= u.from && position + r < u.to);
					}
				}
				barrier_arrive_copied(&sh.full[v][slot[v].i]);
				slot[v].next();
			}
		}
	}
}

/* ---- a computing warpgroup ---- */

/* Both warpgroups' turns; one passes its turn on when its products are begun. */
static __device__ __forceinline__ void turn_wait(uint32_t wg)
{
	asm volatile("bar.sync %0, 256;" ::"r"(3 + wg) : "memory");
}

static __device__ __forceinline__ void turn_pass(uint32_t wg)
{
	asm volatile("bar.arrive %0, 256;" ::"r"(4 - wg) : "memory");
}

/* @x, which is never less than 0, is formed before what comes next: so the compiler does not wait for products first. */
static __device__ __forceinline__ void formed(float x, uint32_t address)
{
	asm volatile("{\n"
		     ".reg .pred p;\n"
		     "setp.lt.f32 p, %0, 0f00000000;\n"
		     "@p st.shared.f32 [%1], %0;\n"
		     "}" ::"f"(x), "r"(address) : "memory");
}

/* attend.cuh's soften() for a tile of 128 positions; the largest of even and of odd positions side by side. */
static __device__ __forceinline__ void
fast_soften(float (&score)[FAST_TILE / 8][4], float max[2], float sum[2], float scale[2], float c)
{
#pragma unroll
	for (int i = 0; i < 2; i++) {
		float top = score[0][2 * i], odd = score[0][2 * i + 1], taken, x = 0;

#pragma unroll
		for (int n = 1; n < FAST_TILE / 8; n++) {
			top = fmaxf(top, score[n][2 * i]);
			odd = fmaxf(odd, score[n][2 * i + 1]);
		}
		top = fmaxf(top, odd);
		top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
		top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
		refer(&max[i], top, c, &scale[i], &taken);
#pragma unroll
		for (int n = 0; n < FAST_TILE / 8; n++)
#pragma unroll
			for (int e = 2 * i; e < 2 * i + 2; e++)
				score[n][e] = power2(__fmaf_rn(score[n][e], c, -taken));
#pragma unroll
		for (int p = 0; p < FAST_TILE / 16; p++) {
			const float y = __fadd_rn(__fadd_rn(score[2 * p][2 * i], score[2 * p][2 * i + 1]),
						  __fadd_rn(score[2 * p + 1][2 * i], score[2 * p + 1][2 * i + 1]));

			x = p ? __fadd_rn(x, y) : y;
		}
		sum[i] = __fmaf_rn(sum[i], scale[i], x);
	}
}

/* Query rows [row0, row0 + 64) as a left operand; rows that are not there are zeros. */
template <int CODEC, int DIM> static __device__ __forceinline__ void
fast_queries(const attend_args &a, const fast_unit &u, uint32_t row0, uint32_t (&q)[DIM / 16][4])
{
	const uint32_t group = a.heads / a.kv_heads, lane = threadIdx.x % 32;

#pragma unroll
	for (int i = 0; i < 2; i++) {
		const uint32_t row = row0 + threadIdx.x % 128 / 32 * 16 + lane / 4 + 8 * i, token = row / group;
		const uint64_t at = a.q + (uint64_t)(u.s.token + token) * a.q_stride;
		const uint32_t first = (u.kv_head * group + row % group) * DIM + lane % 4 * 2;

#pragma unroll
		for (int d = 0; d < DIM / 8; d++) {
			uint32_t &x = q[d / 2][d % 2 * 2 + i];

			if (token >= u.s.n)
				x = 0;
			else if (a.q_type == CODEC)
				x = array<uint32_t>(at)[(first + d * 8) / 2];
			else
				x = pair<CODEC>(load_float(at, first + d * 8, a.q_type),
						load_float(at, first + d * 8 + 1, a.q_type));
		}
	}
}

/*
 * Whether any of the 128 threads says so. As group_any(), for all of a warp's threads together: where the compiler
 * sees no divergence, what wgmma's descriptors are made of stays in uniform registers.
 */
static __device__ __forceinline__ bool any_of_group(uint32_t id, bool any)
{
	uint32_t r;

	asm volatile("{\n"
		     ".reg .pred p, q;\n"
		     "setp.ne.u32 p, %1, 0;\n"
		     "bar.red.or.pred q, %2, 128, p;\n"
		     "selp.u32 %0, 1, 0, q;\n"
		     "}" : "=r"(r) : "r"((uint32_t)any), "r"(id) : "memory");
	return __any_sync(0xffffffffu, r);
}

/* Whether this thread's share, of 128 threads, of a tile has infinities or NaNs: 0 times these is NaN. */
template <int CODEC, int DIM> static __device__ __forceinline__ bool tile_not_finite(uint32_t tile)
{
	uint32_t sum = 0;

#pragma unroll 4
	for (uint32_t i = threadIdx.x % 128; i < FAST_TILE * DIM / 8; i += 128) {
		uint32_t x[4];

		asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
			     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(tile + i * 16) : "memory");
#pragma unroll
		for (int e = 0; e < 4; e++)
			if constexpr (CODEC == ROW_F16)
				asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(x[e]), "r"(0));
			else
				asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(x[e]), "r"(0));
	}
	return not_finite<CODEC>(sum) != 0;
}

/* Weights of 64 of the tile's positions. */
static __device__ __forceinline__ uint32_t (&weights_half(uint32_t (&weights)[FAST_TILE / 16][4], int which))[TILE / 16][4]
{
	return reinterpret_cast<uint32_t(&)[TILE / 16][4]>(weights[which * (TILE / 16)]);
}

template <int CODEC> static __device__ __forceinline__ uint32_t narrow2(uint32_t x, uint32_t y)
{
	const uint32_t nan = CODEC == ROW_F16 ? 0x7e00 : 0x7fc0, two = pair<CODEC>(__uint_as_float(x), __uint_as_float(y));

	return (x == 0x7fc00000 ? nan : two & 0xffff) | (y == 0x7fc00000 ? nan << 16 : two & 0xffff0000);
}

template <int CODEC, int DIM>
static __device__ __forceinline__ void fast_compute(const attend_args &a, fast_shared &sh, uint32_t slots0)
{
	const uint32_t wg = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
	const uint32_t warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
	const uint32_t group = a.heads / a.kv_heads;
	constexpr uint32_t tile_bytes = FAST_TILE * DIM * 2;
	const float c = exponent_unit(a);
	fast_slot k_slot = {}, v_slot = {};

	auto wait = [&](uint32_t v, const fast_slot &slot) {
		barrier_wait(&sh.full[v][slot.i], slot.phase);
		publish(); /* the loading threads' copies */
	};
	auto free = [&](uint32_t v, fast_slot &slot) {
		if (lane == 0)
			barrier_arrive(&sh.empty[v][slot.i]);
		slot.next();
	};

	if (wg == 1)
		turn_pass(1);
	for (uint32_t round = 0; fast_unit_of(round) < sh.before[a.n_seqs]; round++) {
		const fast_unit u = get_fast_unit(a, sh.before, fast_unit_of(round));
		const uint32_t row0 = u.row0 + wg * FAST_GROUP_ROWS, row = row0 + warp * 16 + lane / 4;
		float acc[DIM / 8][4] = {}, score[FAST_TILE / 8][4], scale[2];
		float max[2] = { -INF, -INF }, sum[2] = {};
		uint32_t weights[FAST_TILE / 16][4], q[DIM / 16][4];
		uint32_t t = 0;
		auto v_tile = [&]() { return slots0 + (FAST_SLOTS + v_slot.i) * tile_bytes; };
		auto scores = [&]() { /* begin S = Q K^T of the next tile of K, which is there */
			const matrix k(slots0 + k_slot.i * tile_bytes, 0);

			wgmma_begin();
#pragma unroll
			for (int d = 0; d < DIM / 16; d++)
				wgmma_scores<CODEC>(score, q[d], k.at(d / 4 * (FAST_TILE * 128) + d % 4 * 32), d > 0);
			wgmma_commit();
		};
		auto output = [&]() { /* begin O += P V of the next tile of V, which is there */
			const matrix v(v_tile(), FAST_TILE * 128);

			wgmma_begin();
#pragma unroll
			for (int p = 0; p < FAST_TILE / 16; p++)
				wgmma_output<CODEC>(acc, weights[p], v.at(p * 16 * 128));
			wgmma_commit();
		};
		auto pack = [&]() {
#pragma unroll
			for (int i = 0; i < FAST_TILE / 4; i++)
				weights[i / 4][i % 4] = pair<CODEC>(score[i / 2][i % 2 * 2], score[i / 2][i % 2 * 2 + 1]);
		};
		/* What is not seen becomes @x: -inf for a score, -0 for a weight, by which careful_output() knows it. */
		auto mark = [&](uint32_t tile, float x) {
			const uint32_t j = (u.tile0 + tile) * FAST_TILE + lane % 4 * 2;

#pragma unroll
			for (int i = 0; i < 2; i++) {
				const uint32_t token = min((row + 8 * i) / group, u.s.n - 1);
				const uint32_t from = sees_from(a, u.s, token), to = sees_to(a, u.s, token);

#pragma unroll
				for (int e = 0; e < FAST_TILE / 4; e++) {
					const uint32_t at = j + e / 2 * 8 + e % 2;

					if (at < from || at >= to)
						score[e / 2][2 * i + e % 2] = x;
				}
			}
		};
		auto v_piece = [&](uint32_t r, uint32_t piece) {
			return v_tile() + piece / 8 * (FAST_TILE * 128) + swizzled(r, piece);
		};
		auto lower = [&](uint32_t r, uint32_t piece) { return v_piece(TILE + r, piece); };
		auto first_weights = [&](bool whole) { /* of tile t, with no product under way */
			wait(0, k_slot);
			scores();
			wgmma_wait<0>();
			settled(score);
			free(0, k_slot);
			if (!whole)
				mark(t, -INF);
			fast_soften(score, max, sum, scale, c);
			if (!whole)
				mark(t, -0.0f);
			pack();
			rescale(acc, scale);
		};
		auto last_output = [&](bool whole) { /* of those weights */
			wait(1, v_slot);
			if (!whole && any_of_group(1 + wg, tile_not_finite<CODEC, DIM>(v_tile()))) {
				careful_output<CODEC>(acc, weights_half(weights, 0), DIM / 8, v_piece);
				careful_output<CODEC>(acc, weights_half(weights, 1), DIM / 8, lower);
			} else {
				output();
				wgmma_wait<0>();
				settled(acc);
			}
			__syncwarp(); /* all lanes have read what one of them frees */
			free(1, v_slot);
		};

		fast_queries<CODEC, DIM>(a, u, row0, q);
		while (t < u.tiles) {
			first_weights(t >= u.whole0 && t < u.whole1);
			for (t++; t > u.whole0 && t <= u.whole1 && t < u.tiles; t++) { /* while tile t - 1 is multiplied */
				wait(0, k_slot);
				turn_wait(wg);
				scores();
				wait(1, v_slot);
				output();
				turn_pass(wg);
				wgmma_wait<1>();
				settled(score);
				free(0, k_slot);
				if (t == u.whole1)
					mark(t, -INF);
				fast_soften(score, max, sum, scale, c);
				if (t == u.whole1)
					mark(t, -0.0f);
				formed(sum[0] + sum[1], shared_address(sh.full));
				wgmma_wait<0>();
				settled(acc);
				free(1, v_slot);
				rescale(acc, scale);
				pack();
			}
			last_output(t > u.whole0 && t <= u.whole1);
		}

#pragma unroll
		for (int i = 0; i < 2; i++) {
			const uint32_t head = u.kv_head * group + (row + 8 * i) % group, token = (row + 8 * i) / group;
			const uint64_t at = a.out + (uint64_t)(u.s.token + token) * a.out_stride +
					    (head * DIM + lane % 4 * 2) * (a.out_type == ROW_F32 ? 4 : 2);
			float weight;

			sum[i] = row_sum(sum[i]);
			if (row + 8 * i >= u.all_rows)
				continue;
			weight = final_weight(a, head, max[i], sum[i], c);
#pragma unroll
			for (int n = 0; n < DIM / 8; n++) {
				const uint32_t x = output_bits(acc[n][2 * i], weight);
				const uint32_t y = output_bits(acc[n][2 * i + 1], weight);

				if (a.out_type == ROW_F32)
					reinterpret_cast<uint2 *>(at)[n * 4] = make_uint2(x, y);
				else if (a.out_type == ROW_F16)
					reinterpret_cast<uint32_t *>(at)[n * 4] = narrow2<ROW_F16>(x, y);
				else
					reinterpret_cast<uint32_t *>(at)[n * 4] = narrow2<ROW_BF16>(x, y);
			}
		}
	}
}

template <int CODEC, int DIM> static __device__ __forceinline__ void fast(const attend_args &a)
{
	const uint32_t group = a.heads / a.kv_heads, slots0 = shared_address(attend_memory); /* a multiple of 1024: swizzled */
	fast_shared &sh = *reinterpret_cast<fast_shared *>(attend_memory + 2 * FAST_SLOTS * FAST_TILE * DIM * 2);

	if (threadIdx.x < 2 * FAST_SLOTS) {
		barrier_init(&sh.full[0][threadIdx.x], FAST_LOADERS);
		barrier_init(&sh.empty[0][threadIdx.x], 8); /* warps that compute */
	}
	count_units(sh.before, a.n_seqs, [&](uint32_t i) {
		return (get_sequence(a, i).n * group + FAST_ROWS - 1) / FAST_ROWS * a.kv_heads;
	});
	if (threadIdx.x >= 256) {
		asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
		fast_load<DIM>(a, sh, slots0);
	} else {
		asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
		fast_compute<CODEC, DIM>(a, sh, slots0);
	}
}
#else
template <int CODEC, int DIM> static __device__ __forceinline__ void fast(const attend_args &)
{
}
#endif

#define FAST(name, codec, dim) \
	extern "C" __global__ void __launch_bounds__(384, 1) attend_fast_##name(const attend_args a) \
	{ \
		fast<codec, dim>(a); \
	}

FAST(f16_64, ROW_F16, 64)
FAST(f16_128, ROW_F16, 128)
FAST(bf16_64, ROW_BF16, 64)
FAST(bf16_128, ROW_BF16, 128)
