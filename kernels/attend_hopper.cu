// SPDX-License-Identifier: MIT
/*
 * Attention of many query rows on sm_90a: attend_prefill's arithmetic by wgmma,
 * which adds as mma.sync does there (tests/gpu compares their bits). A thread
 * block is two warpgroups of 64 rows each and one that loads. While the tensor
 * cores multiply a tile's weights, the next tile's are formed. Scores to which
 * something is added are attend_prefill's.
 *
 * Loads are cp.async and not TMA: blocks lie at any address, also in host
 * memory, and a row's part in shared memory is swizzled.
 */
#include "wgmma.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

#define GROUP_ROWS 64
#define HOPPER_ROWS (2 * GROUP_ROWS)
#define LOADERS 128
#define SLOTS 4 /* tiles of K, and of V, in shared memory; a power of two */
#define LAG 4	/* loads under way behind the one that is waited for; fewer than 2 * SLOTS */

struct hopper_shared {
	uint64_t full[2][SLOTS], empty[2][SLOTS]; /* K, V */
	query_row rows[HOPPER_ROWS];
	uint32_t before[KVT_ATTEND_SEQS + 1];
};

/* ---- work ---- */

struct unit {
	sequence s;
	uint32_t seq, kv_head, row0, all_rows;
	uint32_t from, to, tile0, tiles; /* what any of its rows sees */
};

static __device__ __forceinline__ unit get_unit(const attend_args &a, const uint32_t *before, uint32_t index)
{
	const uint32_t group = a.heads / a.kv_heads;
	uint32_t local, row_blocks;
	unit u;

	u.seq = find_unit(before, a.n_seqs, index);
	u.s = get_sequence(a, u.seq);
	local = index - before[u.seq];
	u.all_rows = u.s.n * group;
	row_blocks = (u.all_rows + HOPPER_ROWS - 1) / HOPPER_ROWS;
	u.kv_head = local % a.kv_heads;
	u.row0 = (row_blocks - 1 - local / a.kv_heads) * HOPPER_ROWS; /* rows that see most are taken first */
	u.from = sees_from(a, u.s, u.row0 / group);
	u.to = sees_to(a, u.s, (min(u.row0 + HOPPER_ROWS, u.all_rows) - 1) / group);
	u.tile0 = u.from / TILE;
	u.tiles = u.from < u.to ? (u.to - 1) / TILE + 1 - u.tile0 : 0;
	return u;
}

/* Of a unit's tiles, those that a group's rows see, and of these those of which every row sees everything. */
struct seen {
	uint32_t first, last, whole0, whole1;
};

static __device__ __forceinline__ seen get_seen(const attend_args &a, const unit &u, uint32_t row0)
{
	const uint32_t group = a.heads / a.kv_heads, end = min(row0 + GROUP_ROWS, u.all_rows);
	const uint32_t token0 = row0 / group, token1 = end > row0 ? (end - 1) / group : token0;
	const uint32_t from = sees_from(a, u.s, token0), to = end > row0 ? sees_to(a, u.s, token1) : from;
	seen g;

	g.first = from < to ? from / TILE - u.tile0 : u.tiles;
	g.last = from < to ? (to - 1) / TILE + 1 - u.tile0 : u.tiles;
	g.whole0 = from < to ? (sees_from(a, u.s, token1) + TILE - 1) / TILE - u.tile0 : u.tiles;
	g.whole1 = from < to ? sees_to(a, u.s, token0) / TILE - u.tile0 : u.tiles;
	return g;
}

/* The block's @round-th unit: there and back, so that each block gets long and short ones. */
static __device__ __forceinline__ uint32_t unit_of(uint32_t round)
{
	return round * gridDim.x + (round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
}

/* ---- the loading warpgroup ---- */

template <int DIM> static __device__ __forceinline__ void load_units(const attend_args &a, hopper_shared &sh, uint32_t slots0)
{
	const uint32_t thread = threadIdx.x % LOADERS;
	constexpr int pieces = DIM / 8, step = LOADERS / pieces; /* 8 or 16 rows: the swizzle stays the same */
	const uint32_t piece = thread % pieces, row = thread / pieces;
	const uint32_t dst0 = piece / 8 * (TILE * 128) + swizzled(row, piece);
	uint32_t loads = 0, arrived = 0; /* K's and V's in turn */

	auto arrive = [&]() {
		barrier_arrive(&sh.full[arrived % 2][arrived / 2 % SLOTS]);
		arrived++;
	};

	for (uint32_t round = 0; unit_of(round) < sh.before[a.n_seqs]; round++) {
		const unit u = get_unit(a, sh.before, unit_of(round));
		const uint64_t k_table = a.k_blocks + (uint64_t)u.seq * a.table_stride * 8;
		const uint64_t v_table = a.v_blocks + (uint64_t)u.seq * a.table_stride * 8;
		uint64_t k_rows = 0, v_rows = 0; /* of the lane's 16 positions in a split */
		const uint32_t offset = u.kv_head * DIM * 2;
		uint32_t split = ~0u;

		for (uint32_t t = u.tile0; t < u.tile0 + u.tiles; t++) {
			if (t * TILE / SPLIT != split) {
				split = t * TILE / SPLIT;
				k_rows = find_group(k_table, a.k_block_rows, a.k_row_bytes, offset, split, u.from, u.to);
				v_rows = find_group(v_table, a.v_block_rows, a.v_row_bytes, offset, split, u.from, u.to);
			}
			const uint32_t groups = __ballot_sync(0xffffffffu, k_rows && v_rows) >> t % (SPLIT / TILE) * 4 & 15;
			const bool whole = groups == 15 && t * TILE >= u.from && (t + 1) * TILE <= u.to;

#pragma unroll
			for (int which = 0; which < 2; which++) {
				const uint32_t slot = loads / 2 % SLOTS, row_bytes = which ? a.v_row_bytes : a.k_row_bytes;
				const uint32_t dst = slots0 + (which * SLOTS + slot) * (TILE * DIM * 2) + dst0;
				const uint64_t at = row * (uint64_t)row_bytes + piece * 16, eight = 8ull * row_bytes;

				barrier_wait(&sh.empty[which][slot], (loads / 2 / SLOTS + 1) % 2);
#pragma unroll
				for (int i = 0; i < TILE / 16; i++) { /* a group of 16 rows: one or two of this thread's */
					const uint64_t base = group_of(which ? v_rows : k_rows, t, i);
					const uint32_t position = t * TILE + i * 16 + row;

#pragma unroll
					for (int r = 0; r < 16; r += step) {
						const uint64_t src = base + at + (r ? eight : 0);

						if (whole)
							copy16(dst + (i * 16 + r) * 128, src);
						else
							copy16(dst + (i * 16 + r) * 128, src,
							       base && position + r >= u.from && position + r < u.to);
					}
				}
				copy_commit();
				if (++loads - arrived > LAG) {
					copy_wait<LAG>();
					publish();
					arrive();
				}
			}
		}
		copy_wait<0>();
		publish();
		while (arrived < loads)
			arrive();
	}
}

/* ---- a computing warpgroup ---- */

template <int CODEC, int DIM> static __device__ __forceinline__ void
group_queries(const attend_args &a, const unit &u, uint32_t row0, uint8_t *dst)
{
	const uint32_t group = a.heads / a.kv_heads, size = a.q_type == ROW_F32 ? 4 : 2;

	for (uint32_t i = threadIdx.x % 128; i < GROUP_ROWS * (DIM / 8); i += 128) {
		const uint32_t r = i / (DIM / 8), piece = i % (DIM / 8);
		const uint32_t token = (row0 + r) / group, head = u.kv_head * group + (row0 + r) % group;
		const uint64_t at = a.q + (uint64_t)(u.s.token + token) * a.q_stride + (head * DIM + piece * 8) * size;
		uint4 x = make_uint4(0, 0, 0, 0);

		if (token < u.s.n && a.q_type == CODEC)
			x = *array<uint4>(at);
		else if (token < u.s.n)
			x = make_uint4(pair<CODEC>(load_float(at, 0, a.q_type), load_float(at, 1, a.q_type)),
				       pair<CODEC>(load_float(at, 2, a.q_type), load_float(at, 3, a.q_type)),
				       pair<CODEC>(load_float(at, 4, a.q_type), load_float(at, 5, a.q_type)),
				       pair<CODEC>(load_float(at, 6, a.q_type), load_float(at, 7, a.q_type)));
		*reinterpret_cast<uint4 *>(dst + piece / 8 * (HOPPER_ROWS * 128) + swizzled(r, piece)) = x;
	}
}

template <int CODEC, int DIM> static __device__ __forceinline__ void compute_units(const attend_args &a, hopper_shared &sh,
										   uint8_t *queries, uint32_t slots0)
{
	const uint32_t wg = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
	const uint32_t warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
	const uint32_t group = a.heads / a.kv_heads, tile_bytes = TILE * DIM * 2;
	const matrix q(shared_address(queries) + wg * (GROUP_ROWS * 128), 0);
	const float c = exponent_unit(a);
	uint32_t k_used = 0, v_used = 0; /* tiles, of all units */

	auto k_wait = [&]() { barrier_wait(&sh.full[0][k_used % SLOTS], k_used / SLOTS % 2); };
	auto v_wait = [&]() { barrier_wait(&sh.full[1][v_used % SLOTS], v_used / SLOTS % 2); };
	auto k_free = [&](bool now = true) {
		if (lane == 0 && now)
			barrier_arrive(&sh.empty[0][k_used % SLOTS]);
		k_used++;
	};
	auto v_free = [&]() {
		if (lane == 0)
			barrier_arrive(&sh.empty[1][v_used % SLOTS]);
		v_used++;
	};

	for (uint32_t round = 0; unit_of(round) < sh.before[a.n_seqs]; round++) {
		const unit u = get_unit(a, sh.before, unit_of(round));
		const uint32_t row0 = u.row0 + wg * GROUP_ROWS;
		const seen own = get_seen(a, u, row0);
		float acc[DIM / 8][4] = {}, run[DIM / 8][4] = {}, score[TILE / 8][4], scale[2];
		float max[2] = { -INF, -INF }, sum[2] = {}, run_max[2] = { -INF, -INF }, run_sum[2] = {};
		float split_max[2], split_sum[2];
		uint32_t weights[TILE / 16][4];
		auto pass = [&](uint32_t n) { /* tiles that the other group alone sees */
			for (uint32_t t = 0; t < n; t++) {
				k_wait();
				k_free();
				v_wait();
				v_free();
			}
		};
		auto scores = [&]() { /* begin S = Q K^T of the next tile of K */
			const matrix k(slots0 + k_used % SLOTS * tile_bytes, 0);

			k_wait();
			wgmma_begin();
#pragma unroll
			for (int d = 0; d < DIM / 16; d++)
				wgmma_scores<CODEC>(score, q.at(d / 4 * (HOPPER_ROWS * 128) + d % 4 * 32),
						    k.at(d / 4 * (TILE * 128) + d % 4 * 32), d > 0);
			wgmma_commit();
		};
		auto v_piece = [&](uint32_t row, uint32_t piece) {
			return slots0 + (SLOTS + v_used % SLOTS) * tile_bytes + piece / 8 * (TILE * 128) + swizzled(row, piece);
		};
		auto output = [&]() { /* begin O += P V of the next tile of V, which is there */
			const matrix v(slots0 + (SLOTS + v_used % SLOTS) * tile_bytes, TILE * 128);

			wgmma_begin();
#pragma unroll
			for (int p = 0; p < TILE / 16; p++)
				wgmma_output<CODEC>(acc, weights[p], v.at(p * 16 * 128));
			wgmma_commit();
		};
		auto pack = [&]() {
#pragma unroll
			for (int i = 0; i < TILE / 4; i++)
				weights[i / 4][i % 4] = pair<CODEC>(score[i / 2][i % 2 * 2], score[i / 2][i % 2 * 2 + 1]);
		};
		auto merge = [&](const float m[2], const float l[2]) { merge_split(run_max, run_sum, run, m, l, acc, c); };

		group_sync(1 + wg); /* everybody is done with the last unit's queries and rows */
		if (threadIdx.x % 128 < GROUP_ROWS)
			sh.rows[wg * GROUP_ROWS + threadIdx.x % 128] = get_row(a, u.s, row0 + threadIdx.x % 128, u.kv_head);
		group_queries<CODEC, DIM>(a, u, row0, queries + wg * (GROUP_ROWS * 128));
		publish();
		group_sync(1 + wg);

		auto next_split = [&](uint32_t t) { return t > own.first && (u.tile0 + t) % (SPLIT / TILE) == 0; };
		auto end_split = [&]() {
			merge(max, sum);
			max[0] = max[1] = -INF;
			sum[0] = sum[1] = 0;
		};
		auto part_of_tile = [&](uint32_t t) { /* of which not every row sees everything */
			uint32_t hidden;

			if (next_split(t))
				end_split();
			scores();
			wgmma_wait<0>();
			settled(score);
			k_free();
			hidden = look(a, &sh.rows[wg * GROUP_ROWS + warp * 16 + lane / 4], false, score,
				      (u.tile0 + t) * TILE + lane % 4 * 2);
			soften(score, max, sum, scale, c);
			hide(score, hidden);
			pack();
			rescale(acc, scale);
			v_wait();
			if (group_any(1 + wg, any_not_finite<CODEC, 128>(DIM / 8, v_piece))) {
				careful_output<CODEC>(acc, weights, DIM / 8, v_piece);
			} else {
				output();
				wgmma_wait<0>();
				settled(acc);
			}
			v_free();
		};

		pass(own.first);
		uint32_t t = own.first;

		while (t < min(own.whole0, own.last))
			part_of_tile(t++);
		if (t < own.whole1) {
			if (next_split(t))
				end_split();
			scores();
			wgmma_wait<0>();
			settled(score);
			k_free();
			soften(score, max, sum, scale, c);
			rescale(acc, scale);
			pack();
			for (t++; t < own.whole1; t++) {
				scores();
				v_wait();
				output();
				wgmma_wait<1>();
				settled(score);
				if (next_split(t)) {
#pragma unroll
					for (int i = 0; i < 2; i++) {
						split_max[i] = max[i];
						split_sum[i] = sum[i];
						max[i] = -INF;
						sum[i] = 0;
					}
				}
				soften(score, max, sum, scale, c);
				/* sums are never less than 0: so the compiler forms weights before it waits for products */
				k_free(!(sum[0] + sum[1] < 0));
				wgmma_wait<0>();
				settled(acc);
				v_free();
				if (next_split(t))
					merge(split_max, split_sum);
				else
					rescale(acc, scale);
				pack();
			}
			v_wait();
			output();
			wgmma_wait<0>();
			settled(acc);
			v_free();
		}
		while (t < own.last)
			part_of_tile(t++);
		if (own.first < own.last)
			merge(max, sum);
		pass(u.tiles - own.last);

#pragma unroll
		for (int i = 0; i < 2; i++) {
			const uint32_t row = row0 + warp * 16 + lane / 4 + 8 * i, head = u.kv_head * group + row % group;
			float weight;

			if (row >= u.all_rows)
				continue;
			weight = final_weight(a, head, run_max[i], run_sum[i], c);
#pragma unroll
			for (int n = 0; n < DIM / 8; n++)
				store_output2(a, u.s.token + row / group, (uint64_t)head * DIM + n * 8 + lane % 4 * 2,
					      output_bits(run[n][2 * i], weight), output_bits(run[n][2 * i + 1], weight));
		}
	}
}

template <int CODEC, int DIM> static __device__ __forceinline__ void hopper(const attend_args &a)
{
	uint8_t *queries = attend_memory; /* swizzled: begins at a multiple of 1024 */
	const uint32_t group = a.heads / a.kv_heads, slots0 = shared_address(queries) + HOPPER_ROWS * DIM * 2;
	hopper_shared &sh = *reinterpret_cast<hopper_shared *>(queries + (HOPPER_ROWS + 2 * SLOTS * TILE) * DIM * 2);

	if (threadIdx.x < 2 * SLOTS) {
		barrier_init(&sh.full[0][threadIdx.x], LOADERS);
		barrier_init(&sh.empty[0][threadIdx.x], 8); /* warps that compute */
	}
	count_units(sh.before, a.n_seqs, [&](uint32_t i) {
		return (get_sequence(a, i).n * group + HOPPER_ROWS - 1) / HOPPER_ROWS * a.kv_heads;
	});
	if (threadIdx.x >= 256) {
		asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
		load_units<DIM>(a, sh, slots0);
	} else {
		asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
		compute_units<CODEC, DIM>(a, sh, queries, slots0);
	}
}
#else
template <int CODEC, int DIM> static __device__ __forceinline__ void hopper(const attend_args &)
{
}
#endif

#define HOPPER(name, codec, dim) \
	extern "C" __global__ void __launch_bounds__(384, 1) attend_hopper_##name(const attend_args a) \
	{ \
		hopper<codec, dim>(a); \
	}

HOPPER(f16_64, ROW_F16, 64)
HOPPER(f16_128, ROW_F16, 128)
HOPPER(bf16_64, ROW_BF16, 64)
HOPPER(bf16_128, ROW_BF16, 128)
