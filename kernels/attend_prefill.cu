// SPDX-License-Identifier: MIT
/*
 * Attention of many query rows: a thread block takes 64 rows of one KV head
 * through all their splits, 16 rows a warp. Rows of V wider than SLICE are taken
 * by one block for each slice, which forms the scores again.
 */
#include "attend.cuh"

#define PREFILL_ROWS 64

struct prefill_shared {
	uint32_t before[KVT_ATTEND_SEQS + 1];
	query_row rows[PREFILL_ROWS];
	uint64_t where[STAGE_RING][2][4];
};

template <int CODEC, int SLICE> static __device__ __forceinline__ void prefill(const attend_args &a)
{
	prefill_shared &sh = *reinterpret_cast<prefill_shared *>(attend_memory);
	const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = a.heads / a.kv_heads;
	const uint32_t k_stride = 2 * a.k_dim + PAD, v_stride = 2 * SLICE + PAD, stage_bytes = TILE * (k_stride + v_stride);
	const uint32_t slices = (a.v_dim + SLICE - 1) / SLICE;
	uint8_t *queries = attend_memory + (sizeof(prefill_shared) + 127) / 128 * 128;
	const uint32_t stages0 = shared_address(queries) + PREFILL_ROWS * k_stride;
	const uint32_t stages = min((shared_address(attend_memory) + dynamic_shared_bytes() - stages0) / stage_bytes,
				    (uint32_t)STAGES_MAX);
	const bool general = is_general(a);
	const float c = exponent_unit(a);
	const uint32_t a_row = lane % 16, a_column = lane / 16 * 16;
	const uint32_t b_row = lane % 8 + lane / 16 * 8, b_column = lane / 8 % 2 * 16;

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
		const plane k = { a.k_blocks + (uint64_t)seq * a.table_stride * 8, a.k_block_rows, a.k_row_bytes,
				  kv_head * a.k_dim * 2, a.k_dim / 8 };
		const plane v = { a.v_blocks + (uint64_t)seq * a.table_stride * 8, a.v_block_rows, a.v_row_bytes,
				  kv_head * a.v_dim * 2 + slice * SLICE * 2, width / 8 };
		const uint32_t tile0 = from / TILE, tiles = from < to ? (to - 1) / TILE + 1 - tile0 : 0;
		const uint32_t whole_from = sees_from(a, s, token1), whole_to = sees_to(a, s, token0);
		float acc[SLICE / 8][4] = {}, max[2] = { -INF, -INF }, sum[2] = {};
		float run[SLICE / 8][4] = {}, run_max[2] = { -INF, -INF }, run_sum[2] = {};

		auto find = [&](uint32_t t, uint32_t i) {
			if (t >= tiles)
				return;
			if (i < 4)
				find_tile(k, tile0 + t, from, to, i, sh.where[t % STAGE_RING][0]);
			else
				find_tile(v, tile0 + t, from, to, i - 4, sh.where[t % STAGE_RING][1]);
		};
		auto load = [&](uint32_t t) { /* K and V are a group each, also where nothing is left to load */
			const uint32_t at = stages0 + t % stages * stage_bytes;

			if (t < tiles)
				load_tile(a, k, tile0 + t, from, to, sh.where[t % STAGE_RING][0], at, k_stride);
			copy_commit();
			if (t < tiles)
				load_tile(a, v, tile0 + t, from, to, sh.where[t % STAGE_RING][1], at + TILE * k_stride, v_stride);
			copy_commit();
		};

		__syncthreads(); /* the last unit is done with */
		if (threadIdx.x < 8 * stages)
			find(threadIdx.x / 8, threadIdx.x % 8);
		if (threadIdx.x >= 128 - PREFILL_ROWS)
			sh.rows[threadIdx.x + PREFILL_ROWS - 128] = get_row(a, s, row0 + threadIdx.x + PREFILL_ROWS - 128, kv_head);
		__syncthreads();
		for (uint32_t t = 0; t + 1 < stages; t++)
			load(t);
		load_queries<CODEC>(a, s, kv_head, row0, PREFILL_ROWS, queries, k_stride);

		for (uint32_t t = 0; t < tiles; t++) {
			const uint32_t k_at = stages0 + t % stages * stage_bytes, v_at = k_at + TILE * k_stride;
			const uint32_t position = (tile0 + t) * TILE;
			float score[TILE / 8][4] = {}, scale[2];
			uint32_t qa[4], kb[4];

			if (stages == 1) {
				__syncthreads();
				load(t);
			}
			copy_wait(stages == 1 ? 1 : 2 * stages - 3);
			__syncthreads(); /* K is there; everybody is done with the last tile */
			if (stages > 1)
				load(t + stages - 1);
			if (threadIdx.x < 8)
				find(t + stages, threadIdx.x);

			const uint32_t q_row = shared_address(queries) + (warp * 16 + a_row) * k_stride + a_column;
			const uint32_t k_row = k_at + b_row * k_stride + b_column;

#pragma unroll 2
			for (uint32_t d = 0; d < 2 * a.k_dim; d += 32) {
				matrices(qa, q_row + d);
#pragma unroll
				for (int n = 0; n < TILE / 16; n++) {
					matrices(kb, k_row + n * 16 * k_stride + d);
					multiply<CODEC>(score[2 * n], qa, kb[0], kb[1]);
					multiply<CODEC>(score[2 * n + 1], qa, kb[2], kb[3]);
				}
			}
			if (general || position < whole_from || position + TILE > whole_to) {
				const query_row *two[2] = { &sh.rows[warp * 16 + lane / 4], &sh.rows[warp * 16 + lane / 4 + 8] };

#pragma unroll
				for (int n = 0; n < TILE / 8; n++)
					look(a, two, general, score[n], position + n * 8 + lane % 4 * 2);
			}
			soften(score, max, sum, scale, c);
#pragma unroll
			for (int n = 0; n < SLICE / 8; n++)
#pragma unroll
				for (int e = 0; e < 4; e++)
					acc[n][e] = __fmul_rn(acc[n][e], scale[e / 2]);
			copy_wait(stages == 1 ? 0 : 2 * (stages - 1));
			__syncthreads(); /* V is there */
#pragma unroll
			for (int p = 0; p < TILE / 16; p++) {
				const uint32_t pa[4] = {
					pair<CODEC>(score[2 * p][0], score[2 * p][1]), pair<CODEC>(score[2 * p][2], score[2 * p][3]),
					pair<CODEC>(score[2 * p + 1][0], score[2 * p + 1][1]),
					pair<CODEC>(score[2 * p + 1][2], score[2 * p + 1][3]),
				};
				uint32_t vb[4];

#pragma unroll
				for (int n = 0; n < SLICE / 16; n++) {
					if (n * 16 >= width)
						break;
					matrices_transposed(vb, v_at + (p * 16 + a_row) * v_stride + n * 32 + a_column);
					multiply<CODEC>(acc[2 * n], pa, vb[0], vb[1]);
					multiply<CODEC>(acc[2 * n + 1], pa, vb[2], vb[3]);
				}
			}
			if (t + 1 < tiles && (tile0 + t + 1) % (SPLIT / TILE))
				continue;

			/* the end of a split */
#pragma unroll
			for (int i = 0; i < 2; i++) {
				float old_weight, part_weight;

				weigh(&run_max[i], max[i], c, &old_weight, &part_weight);
				run_sum[i] = merged_sum(run_sum[i], old_weight, row_sum(sum[i]), part_weight);
#pragma unroll
				for (int n = 0; n < SLICE / 8; n++)
#pragma unroll
					for (int e = 2 * i; e < 2 * i + 2; e++) {
						run[n][e] = merged(run[n][e], old_weight, acc[n][e], part_weight);
						acc[n][e] = 0;
					}
				max[i] = -INF;
				sum[i] = 0;
			}
		}

#pragma unroll
		for (int i = 0; i < 2; i++) {
			const uint32_t row = row0 + warp * 16 + lane / 4 + 8 * i, head = kv_head * group + row % group;
			float weight;

			if (row >= all_rows)
				continue;
			weight = final_weight(a, head, run_max[i], run_sum[i], c);
#pragma unroll
			for (int n = 0; n < SLICE / 8; n++) {
				const uint32_t column = n * 8 + lane % 4 * 2;

				if (column < width)
					store_output2(a, s.token + row / group, (uint64_t)head * a.v_dim + slice * SLICE + column,
						      output_bits(run[n][2 * i], weight), output_bits(run[n][2 * i + 1], weight));
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
