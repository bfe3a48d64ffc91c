// SPDX-License-Identifier: MIT
/*
 * Attention of few query rows: a thread block takes up to 16 rows of one KV head
 * over one split, and leaves (max, sum, accumulator) for attend_merge. Its four
 * warps share each tile: 16 positions of scores each, then a quarter of the
 * output's columns each. So a split takes little time and registers, and two or
 * more blocks on a multiprocessor keep loads in flight while others compute.
 */
#include "attend.cuh"

#define DECODE_ROWS 16

struct decode_shared {
	uint32_t before[KVT_ATTEND_SEQS + 1];
	query_row rows[DECODE_ROWS];
	uint64_t where[STAGE_RING][2][4]; /* rows of K and V of tiles to load */
	float max[4][DECODE_ROWS];
	float sum[4][DECODE_ROWS][4];
	alignas(16) uint8_t weights[DECODE_ROWS][2 * TILE + PAD];
};

/* COLUMNS of the output for each warp. */
template <int CODEC, int COLUMNS> static __device__ __forceinline__ void decode(const attend_args &a)
{
	decode_shared &sh = *reinterpret_cast<decode_shared *>(attend_memory);
	const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = a.heads / a.kv_heads;
	const uint32_t k_stride = 2 * a.k_dim + PAD, v_stride = 2 * a.v_dim + PAD, stage_bytes = TILE * (k_stride + v_stride);
	uint8_t *queries = attend_memory + (sizeof(decode_shared) + 127) / 128 * 128;
	const uint32_t stages0 = shared_address(queries) + DECODE_ROWS * k_stride;
	const uint32_t stages = min((shared_address(attend_memory) + dynamic_shared_bytes() - stages0) / stage_bytes,
				    (uint32_t)STAGES_MAX);
	const bool general = is_general(a);
	const float c = exponent_unit(a);
	const uint64_t part_floats = (uint64_t)a.part_rows * (a.v_dim + 2);
	/* a lane's rows of 16-byte pieces for ldmatrix: A and transposed B; B */
	const uint32_t a_row = lane % 16, a_column = lane / 16 * 16;
	const uint32_t b_row = lane % 8 + lane / 16 * 8, b_column = lane / 8 % 2 * 16;

	count_units(sh.before, a.n_seqs, [&](uint32_t i) {
		const sequence s = get_sequence(a, i);
		uint32_t first;

		return splits_seen(a, s, &first) * ((s.n * group + DECODE_ROWS - 1) / DECODE_ROWS) * a.kv_heads;
	});

	for (uint32_t unit = blockIdx.x; unit < sh.before[a.n_seqs]; unit += gridDim.x) {
		const uint32_t seq = find_unit(sh.before, a.n_seqs, unit), local = unit - sh.before[seq];
		const sequence s = get_sequence(a, seq);
		const uint32_t all_rows = s.n * group, row_blocks = (all_rows + DECODE_ROWS - 1) / DECODE_ROWS;
		const uint32_t kv_head = local % a.kv_heads, row0 = local / a.kv_heads % row_blocks * DECODE_ROWS;
		const uint32_t token0 = row0 / group, token1 = (min(row0 + DECODE_ROWS, all_rows) - 1) / group;
		float *part = reinterpret_cast<float *>(a.parts) + unit * part_floats, *part_acc = part + 2 * a.part_rows;
		uint32_t first, from, to;

		splits_seen(a, s, &first);
		first += local / a.kv_heads / row_blocks;
		from = max(sees_from(a, s, token0), first * SPLIT);
		to = min(sees_to(a, s, token1), (first + 1) * SPLIT);

		const plane k = { a.k_blocks + (uint64_t)seq * a.table_stride * 8, a.k_block_rows, a.k_row_bytes,
				  kv_head * a.k_dim * 2, a.k_dim / 8 };
		const plane v = { a.v_blocks + (uint64_t)seq * a.table_stride * 8, a.v_block_rows, a.v_row_bytes,
				  kv_head * a.v_dim * 2, a.v_dim / 8 };
		const uint32_t tile0 = from / TILE, tiles = from < to ? (to - 1) / TILE + 1 - tile0 : 0;
		/* tiles in which every row sees everything */
		const uint32_t whole_from = sees_from(a, s, token1), whole_to = sees_to(a, s, token0);
		float acc[COLUMNS / 8][4] = {}, max[2] = { -INF, -INF }, sum[2] = {};

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
		if (threadIdx.x >= 128 - DECODE_ROWS)
			sh.rows[threadIdx.x + DECODE_ROWS - 128] = get_row(a, s, row0 + threadIdx.x + DECODE_ROWS - 128, kv_head);
		__syncthreads();
		for (uint32_t t = 0; t + 1 < stages; t++)
			load(t);
		load_queries<CODEC>(a, s, kv_head, row0, DECODE_ROWS, queries, k_stride);

		for (uint32_t t = 0; t < tiles; t++) {
			const uint32_t k_at = stages0 + t % stages * stage_bytes, v_at = k_at + TILE * k_stride;
			const uint32_t position = (tile0 + t) * TILE + warp * 16;
			float score[2][4] = {}, top[2], scale[2], base[2];
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

			const uint32_t q_row = shared_address(queries) + a_row * k_stride + a_column;
			const uint32_t k_row = k_at + (warp * 16 + b_row) * k_stride + b_column;

#pragma unroll 4
			for (uint32_t d = 0; d < 2 * a.k_dim; d += 32) {
				matrices(qa, q_row + d);
				matrices(kb, k_row + d);
				multiply<CODEC>(score[0], qa, kb[0], kb[1]);
				multiply<CODEC>(score[1], qa, kb[2], kb[3]);
			}
			if (general || position - warp * 16 < whole_from || position - warp * 16 + TILE > whole_to) {
				const query_row *two[2] = { &sh.rows[lane / 4], &sh.rows[lane / 4 + 8] };

				look(a, two, general, score[0], position + lane % 4 * 2);
				look(a, two, general, score[1], position + lane % 4 * 2 + 8);
			}
#pragma unroll
			for (int i = 0; i < 2; i++) {
				float m = fmaxf(fmaxf(score[0][2 * i], score[0][2 * i + 1]),
						fmaxf(score[1][2 * i], score[1][2 * i + 1]));

				m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
				m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
				if (lane % 4 == 0)
					sh.max[warp][lane / 4 + 8 * i] = m;
			}
			__syncthreads();
#pragma unroll
			for (int i = 0; i < 2; i++) {
				const uint32_t row = lane / 4 + 8 * i;
				float x;

				top[i] = fmaxf(fmaxf(sh.max[0][row], sh.max[1][row]), fmaxf(sh.max[2][row], sh.max[3][row]));
				top[i] = fmaxf(max[i], top[i]);
				base[i] = top[i] == -INF ? 0 : top[i];
				scale[i] = power2(__fmul_rn(__fsub_rn(max[i], base[i]), c));
				max[i] = top[i];
				base[i] = __fmul_rn(base[i], c);
#pragma unroll
				for (int e = 0; e < 4; e++) {
					float &p = score[e / 2][2 * i + e % 2];

					p = power2(__fmaf_rn(p, c, -base[i]));
				}
				x = __fadd_rn(__fadd_rn(score[0][2 * i], score[0][2 * i + 1]),
					      __fadd_rn(score[1][2 * i], score[1][2 * i + 1]));
				sh.sum[warp][row][lane % 4] = x;
#pragma unroll
				for (int n = 0; n < 2; n++)
					*reinterpret_cast<uint32_t *>(&sh.weights[row][2 * (warp * 16 + n * 8 + lane % 4 * 2)]) =
						pair<CODEC>(score[n][2 * i], score[n][2 * i + 1]);
			}
			copy_wait(stages == 1 ? 0 : 2 * (stages - 1));
			__syncthreads(); /* V and the weights are there */
			if (warp == 0) {
#pragma unroll
				for (int i = 0; i < 2; i++) {
					const uint32_t row = lane / 4 + 8 * i;
					float x = __fadd_rn(sh.sum[0][row][lane % 4], sh.sum[1][row][lane % 4]);

					x = __fadd_rn(__fadd_rn(x, sh.sum[2][row][lane % 4]), sh.sum[3][row][lane % 4]);
					sum[i] = __fmaf_rn(sum[i], scale[i], x);
				}
			}
#pragma unroll
			for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
				for (int e = 0; e < 4; e++)
					acc[n][e] = __fmul_rn(acc[n][e], scale[e / 2]);
#pragma unroll
			for (int p = 0; p < TILE / 16; p++) {
				uint32_t pa[4], vb[4];

				matrices(pa, shared_address(&sh.weights[a_row][a_column + p * 32]));
#pragma unroll
				for (int n = 0; n < COLUMNS / 16; n++) {
					const uint32_t column = warp * COLUMNS + n * 16;

					if (column >= a.v_dim)
						break;
					matrices_transposed(vb, v_at + (p * 16 + a_row) * v_stride + column * 2 + a_column);
					multiply<CODEC>(acc[2 * n], pa, vb[0], vb[1]);
					multiply<CODEC>(acc[2 * n + 1], pa, vb[2], vb[3]);
				}
			}
		}

#pragma unroll
		for (int i = 0; i < 2; i++) {
			const uint32_t row = lane / 4 + 8 * i;

			if (warp == 0)
				sum[i] = row_sum(sum[i]);
			if (row0 + row >= all_rows)
				continue;
			if (warp == 0 && lane % 4 == 0) {
				part[row] = max[i];
				part[a.part_rows + row] = sum[i];
			}
#pragma unroll
			for (int n = 0; n < COLUMNS / 8; n++) {
				const uint32_t column = warp * COLUMNS + n * 8 + lane % 4 * 2;

				if (column < a.v_dim)
					*reinterpret_cast<float2 *>(part_acc + (uint64_t)row * a.v_dim + column) =
						make_float2(acc[n][2 * i], acc[n][2 * i + 1]);
			}
		}
	}
}

#define DECODE(name, codec, columns, blocks) \
	extern "C" __global__ void __launch_bounds__(128, blocks) attend_decode_##name(const attend_args a) \
	{ \
		decode<codec, columns>(a); \
	}

DECODE(f16_64, ROW_F16, 16, 4)
DECODE(f16_128, ROW_F16, 32, 4)
DECODE(f16_256, ROW_F16, 64, 3)
DECODE(f16_512, ROW_F16, 128, 2)
DECODE(bf16_64, ROW_BF16, 16, 4)
DECODE(bf16_128, ROW_BF16, 32, 4)
DECODE(bf16_256, ROW_BF16, 64, 3)
DECODE(bf16_512, ROW_BF16, 128, 2)
