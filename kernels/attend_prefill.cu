// SPDX-License-Identifier: MIT
/*
 * Attention of many query rows: a thread block takes 64 rows of one KV head
 * through all their splits, 16 rows a warp. Rows of V wider than SLICE are taken
 * by one block for each slice, which forms the scores again.
 */
#include "attend.cuh"

#define PREFILL_ROWS 64

struct prefill_shared {
	uint64_t there[STAGES_MAX][2]; /* K, V of a stage */
	uint32_t before[KVT_ATTEND_SEQS + 1];
	query_row rows[PREFILL_ROWS];
	uint64_t where[2][2][GROUPS]; /* of splits in turn: rows of K and V */
};

template <int CODEC, int SLICE> static __device__ __forceinline__ void prefill(const attend_args &a)
{
	prefill_shared &sh = *reinterpret_cast<prefill_shared *>(attend_memory);
	const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = a.heads / a.kv_heads;
	const uint32_t k_stride = 2 * whole_steps(a.k_dim) + PAD, v_stride = 2 * SLICE + PAD;
	const uint32_t stage_bytes = TILE * (k_stride + v_stride);
	const uint32_t slices = (a.v_dim + SLICE - 1) / SLICE;
	uint8_t *queries = attend_memory + (sizeof(prefill_shared) + 127) / 128 * 128;
	const uint32_t stages0 = shared_address(queries) + PREFILL_ROWS * k_stride;
	const uint32_t stages = min((shared_address(attend_memory) + dynamic_shared_bytes() - stages0) / stage_bytes,
				    (uint32_t)STAGES_MAX);
	uint32_t load_stage = 0, stage = 0, parity = 0;
	const bool general = is_general(a);
	const float c = exponent_unit(a);
	const uint32_t a_row = lane % 16, a_column = lane / 16 * 16;
	const uint32_t b_row = lane % 8 + lane / 16 * 8, b_column = lane / 8 % 2 * 16;

	if (threadIdx.x < 2 * STAGES_MAX)
		barrier_init(&sh.there[0][threadIdx.x], 128);
	for (uint32_t i = 0; i < stages; i++)
		clear_ends<false>(stages0 + i * stage_bytes, TILE, k_stride, a.k_dim);
	count_units(sh.before, a.n_seqs, [&](uint32_t i) {
		return (get_sequence(a, i).n * group + PREFILL_ROWS - 1) / PREFILL_ROWS * a.kv_heads * slices;
	});

	for (uint32_t unit = blockIdx.x; unit < sh.before[a.n_seqs]; unit += gridDim.x) {
		const uint32_t seq = find_unit(sh.before, a.n_seqs, unit), local = unit - sh.before[seq];
		const sequence s = get_sequence(a, seq);
		const uint32_t all_rows = s.n * group, row_blocks = (all_rows + PREFILL_ROWS - 1) / PREFILL_ROWS;
		const uint32_t slice = local % slices, kv_head = local / slices % a.kv_heads;
		/* rows that see most are taken first */
		const uint32_t row0 = (row_blocks - 1 - local / slices / a.kv_heads) * PREFILL_ROWS;
		const uint32_t token0 = row0 / group, token1 = (min(row0 + PREFILL_ROWS, all_rows) - 1) / group;
		const uint32_t from = sees_from(a, s, token0), to = sees_to(a, s, token1);
		const uint32_t width = min(a.v_dim - slice * SLICE, (uint32_t)SLICE);
		const uint64_t k_table = a.k_blocks + (uint64_t)seq * a.table_stride * 8;
		const uint64_t v_table = a.v_blocks + (uint64_t)seq * a.table_stride * 8;
		const uint32_t tile0 = from / TILE, tiles = from < to ? (to - 1) / TILE + 1 - tile0 : 0;
		const uint32_t whole_from = sees_from(a, s, token1), whole_to = sees_to(a, s, token0);
		float acc[SLICE / 8][4] = {}, max[2] = { -INF, -INF }, sum[2] = {};
		uint32_t loaded = 0;
		float run[SLICE / 8][4] = {}, run_max[2] = { -INF, -INF }, run_sum[2] = {};

		auto find = [&](uint32_t split) { /* threads 0 to 63 */
			const uint32_t i = threadIdx.x % GROUPS, position = split * SPLIT + i * 16;
			const bool seen = position < to && position + 16 > from;
			uint64_t at = 0;

			if (threadIdx.x < GROUPS && seen)
				at = find_rows(k_table, a.k_block_rows, a.k_row_bytes, kv_head * a.k_dim * 2, position);
			else if (threadIdx.x < 2 * GROUPS && seen)
				at = find_rows(v_table, a.v_block_rows, a.v_row_bytes, (kv_head * a.v_dim + slice * SLICE) * 2,
					       position);
			if (threadIdx.x < 2 * GROUPS)
				sh.where[split % 2][threadIdx.x / GROUPS][i] = at;
		};
		auto load = [&]() { /* the next tile, if there is one */
			const uint32_t at = stages0 + load_stage * stage_bytes, tile = tile0 + loaded;

			if (loaded == tiles)
				return;

			const auto &where = sh.where[tile / (SPLIT / TILE) % 2];
			const uint32_t group0 = tile % (SPLIT / TILE) * (TILE / 16);
			const bool inside = tile * TILE >= from && (tile + 1) * TILE <= to;
			auto k_group = [&](uint32_t i) { return where[0][group0 + i]; };
			auto v_group = [&](uint32_t i) { return where[1][group0 + i]; };
			const bool k_whole = inside && k_group(0) && k_group(1) && k_group(2) && k_group(3);
			const bool v_whole = inside && v_group(0) && v_group(1) && v_group(2) && v_group(3);

			load_tile<SLICE / 8, false>(k_group, a.k_row_bytes, a.k_dim / 8, tile, from, to, k_whole, at, k_stride);
			barrier_arrive_copied(&sh.there[load_stage][0]);
			load_tile<SLICE / 8, false>(v_group, a.v_row_bytes, width / 8, tile, from, to, v_whole,
						    at + TILE * k_stride, v_stride);
			barrier_arrive_copied(&sh.there[load_stage][1]);
			load_stage = load_stage + 1 < stages ? load_stage + 1 : 0;
			loaded++;
		};

		__syncthreads(); /* the last unit is done with */
		find(tile0 / (SPLIT / TILE));
		find(tile0 / (SPLIT / TILE) + 1);
		if (threadIdx.x < PREFILL_ROWS)
			sh.rows[threadIdx.x] = get_row(a, s, row0 + threadIdx.x, kv_head);
		load_queries<CODEC, 4>(a, s, kv_head, row0, PREFILL_ROWS, queries, k_stride);
		__syncthreads();
		while (loaded < min(stages, tiles))
			load();

		for (uint32_t t = 0; t < tiles; t++) {
			const uint32_t k_at = stages0 + stage * stage_bytes, v_at = k_at + TILE * k_stride;
			const uint32_t position = (tile0 + t) * TILE;
			const uint32_t q_row = shared_address(queries) + (warp * 16 + a_row) * k_stride + a_column;
			const uint32_t k_row = k_at + b_row * k_stride + b_column;
			uint32_t qa[2][4], kb[2][TILE / 16][4], weights[TILE / 16][4];
			float score[TILE / 8][4] = {}, scale[2];

			if (t) {
				__syncthreads(); /* everybody is done with the last tile */
				load();
			}
			/* the split before is loaded: its place is the next one's */
			if (t && (tile0 + t) % (SPLIT / TILE) == 0)
				find((tile0 + t) / (SPLIT / TILE) + 1);
			barrier_wait(&sh.there[stage][0], parity);

			auto fetch = [&](int which, uint32_t d) {
				matrices(qa[which], q_row + 2 * d);
#pragma unroll
				for (int n = 0; n < TILE / 16; n++)
					matrices(kb[which][n], k_row + n * 16 * k_stride + 2 * d);
			};
			auto form = [&](int which) {
#pragma unroll
				for (int n = 0; n < TILE / 16; n++) {
					multiply<CODEC>(score[2 * n], qa[which], kb[which][n][0], kb[which][n][1]);
					multiply<CODEC>(score[2 * n + 1], qa[which], kb[which][n][2], kb[which][n][3]);
				}
			};

			fetch(0, 0);
#pragma unroll 1
			for (uint32_t d = 0; d < a.k_dim; d += 32) { /* what comes next is fetched while products are formed */
				if (d + 16 < a.k_dim)
					fetch(1, d + 16);
				form(0);
				if (d + 16 >= a.k_dim)
					break;
				if (d + 32 < a.k_dim)
					fetch(0, d + 32);
				form(1);
			}
			const bool partly = general || position < whole_from || position + TILE > whole_to;
			uint32_t hidden = 0;

			if (partly)
				hidden = look(a, &sh.rows[warp * 16 + lane / 4], general, score, position + lane % 4 * 2);
			soften(score, max, sum, scale, c);
			if (partly)
				hide(score, hidden);
			rescale(acc, scale);
#pragma unroll
			for (int i = 0; i < TILE / 4; i++)
				weights[i / 4][i % 4] = pair<CODEC>(score[i / 2][i % 2 * 2], score[i / 2][i % 2 * 2 + 1]);
			barrier_wait(&sh.there[stage][1], parity);
			if (++stage == stages) {
				stage = 0;
				parity ^= 1;
			}

			auto v_piece = [&](uint32_t row, uint32_t piece) { return v_at + row * v_stride + piece * 16; };

			if (partly && __syncthreads_or(any_not_finite<CODEC, 128>(width / 8, v_piece))) {
				careful_output<CODEC>(acc, weights, width / 8, v_piece);
			} else {
#pragma unroll
				for (int p = 0; p < TILE / 16; p++)
#pragma unroll
					for (int n0 = 0; n0 < SLICE / 16; n0 += 4) { /* loads, then products */
						uint32_t vb[4][4], at = v_piece(p * 16 + a_row, 2 * n0) + a_column;

						if (n0 * 16 >= width) /* what is beside the rest of V's columns is not stored */
							break;
#pragma unroll
						for (int n = 0; n < 4; n++)
							matrices_transposed(vb[n], at + n * 32);
#pragma unroll
						for (int n = 0; n < 4; n++) {
							multiply<CODEC>(acc[2 * (n0 + n)], weights[p], vb[n][0], vb[n][1]);
							multiply<CODEC>(acc[2 * (n0 + n) + 1], weights[p], vb[n][2], vb[n][3]);
						}
					}
			}
			if (t + 1 < tiles && (tile0 + t + 1) % (SPLIT / TILE))
				continue;

			merge_split(run_max, run_sum, run, max, sum, acc, c);
#pragma unroll
			for (int i = 0; i < 2; i++) {
				max[i] = -INF;
				sum[i] = 0;
			}
		}

#pragma unroll
		for (int i = 0; i < 2; i++) {
			const uint32_t row = row0 + warp * 16 + lane / 4 + 8 * i, head = kv_head * group + row % group;
			const uint64_t column0 = (uint64_t)head * a.v_dim + slice * SLICE;
			float weight;

			if (row >= all_rows)
				continue;
			weight = final_weight(a, head, run_max[i], run_sum[i], c);
#pragma unroll
			for (int n = 0; n < SLICE / 8; n++) {
				const uint32_t column = n * 8 + lane % 4 * 2;

				if (column < width)
					store_output2(a, s.token + row / group, column0 + column,
						      output_bits(run[n][2 * i], weight),
						      output_bits(run[n][2 * i + 1], weight));
			}
		}
	}
}

#define PREFILL(name, codec, slice) \
	extern "C" __global__ void __launch_bounds__(128, 2) attend_prefill_##name(const attend_args a) \
	{ \
		prefill<codec, slice>(a); \
	}

PREFILL(f16_64, ROW_F16, 64)
PREFILL(f16_128, ROW_F16, 128)
PREFILL(bf16_64, ROW_BF16, 64)
PREFILL(bf16_128, ROW_BF16, 128)
