// SPDX-License-Identifier: MIT
/*
 * Attention of few query rows: a thread block takes up to 16 rows of one KV head
 * over one split, and leaves (max, sum, accumulator) for attend_merge. Its four
 * warps share each tile: 16 positions of scores each, then a quarter of the
 * output's columns each. Four more warps load, ahead of them and into the block's
 * next split. (A bulk copy for each row's part is half as fast as cp.async.)
 */
#include "attend_decode.cuh"

struct decode_shared {
	uint64_t there[STAGES_MAX][2], empty[STAGES_MAX]; /* K, V of a stage */
	query_row rows[DECODE_ROWS];
	float max[4][DECODE_ROWS];
	float sum[4][DECODE_ROWS][4];
	alignas(16) uint8_t weights[DECODE_ROWS][2 * TILE + PAD];
	uint32_t before[]; /* [n_seqs + 1] */
};

/* What lies where in shared memory. */
struct decode_layout {
	uint32_t q_stride, k_stride, v_stride, queries, stage0, stage_bytes, stages;
};

static __device__ __forceinline__ decode_layout get_layout(const attend_args &a)
{
	decode_layout l;

	l.q_stride = 2 * whole_steps(a.k_dim) + PAD;
	l.k_stride = whole_lines(a.k_dim);
	l.v_stride = whole_lines(a.v_dim);
	l.queries = (sizeof(decode_shared) + 4 * (a.n_seqs + 1) + 127) / 128 * 128;
	l.stage_bytes = TILE * (l.k_stride + l.v_stride);
	l.stages = min((dynamic_shared_bytes() - l.queries - DECODE_ROWS * l.q_stride) / l.stage_bytes, (uint32_t)STAGES_MAX);
	l.stage0 = shared_address(attend_memory) + l.queries + DECODE_ROWS * l.q_stride; /* a whole line */
	return l;
}

/* ---- the loading warps ---- */

template <int WIDTH> static __device__ __forceinline__ void
load_splits(const attend_args &a, decode_shared &sh, const decode_layout &l)
{
	uint32_t stage = 0, parity = 1;

	for (uint32_t unit = blockIdx.x; unit < sh.before[a.n_seqs]; unit += gridDim.x) {
		const decode_unit u = get_decode_unit(a, sh.before, unit, a.kv_heads);
		const uint32_t split = u.tile0 / (SPLIT / TILE);
		uint64_t k, v;
		bool holes;

		if (!u.tiles)
			continue;
		k = find_group(a.k_blocks + (uint64_t)u.seq * a.table_stride * 8, a.k_block_rows, a.k_row_bytes,
			       u.kv_head * a.k_dim * 2, split, u.from, u.to);
		v = find_group(a.v_blocks + (uint64_t)u.seq * a.table_stride * 8, a.v_block_rows, a.v_row_bytes,
			       u.kv_head * a.v_dim * 2, split, u.from, u.to);
		holes = (u.to - 1) / 16 - u.from / 16 + 1 > __popc(__ballot_sync(0xffffffffu, k && v));
		for (uint32_t t = u.tile0; t < u.tile0 + u.tiles; t++) {
			const uint32_t at = l.stage0 + stage * l.stage_bytes;
			const bool whole = !holes && t * TILE >= u.from && (t + 1) * TILE <= u.to;

			barrier_wait(&sh.empty[stage], parity);
			auto k_group = [&](uint32_t i) { return group_of(k, t, i); };
			auto v_group = [&](uint32_t i) { return group_of(v, t, i); };

			load_tile<WIDTH, true>(k_group, a.k_row_bytes, a.k_dim / 8, t, u.from, u.to, whole, at, l.k_stride);
			barrier_arrive_copied(&sh.there[stage][0]);
			load_tile<WIDTH, true>(v_group, a.v_row_bytes, a.v_dim / 8, t, u.from, u.to, whole,
					       at + TILE * l.k_stride, l.v_stride);
			barrier_arrive_copied(&sh.there[stage][1]);
			if (++stage == l.stages) {
				stage = 0;
				parity ^= 1;
			}
		}
	}
	copy_wait<0>();
}

/* ---- the computing warps ---- */

/* COLUMNS of the output for each warp. */
template <int CODEC, int COLUMNS> static __device__ __forceinline__ void
compute_splits(const attend_args &a, decode_shared &sh, const decode_layout &l)
{
	constexpr int BATCH = COLUMNS > 64 ? 1 : COLUMNS > 32 ? 2 : 4;
	const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = a.heads / a.kv_heads;
	const bool general = is_general(a);
	const float c = exponent_unit(a);
	const uint64_t part_floats = (uint64_t)a.part_rows * (a.v_dim + 2);
	/* a lane's rows of 16-byte pieces for ldmatrix: A and transposed B; B */
	const uint32_t a_row = lane % 16, a_column = lane / 16 * 16;
	const uint32_t b_row = lane % 8 + lane / 16 * 8, b_place = (lane / 8 % 2 ^ lane % 8) * 16;
	const uint32_t q_row = shared_address(attend_memory) + l.queries + a_row * l.q_stride + a_column;
	uint32_t stage = 0, parity = 0;

	for (uint32_t unit = blockIdx.x; unit < sh.before[a.n_seqs]; unit += gridDim.x) {
		const decode_unit u = get_decode_unit(a, sh.before, unit, a.kv_heads);
		const uint32_t all_rows = u.s.n * group;
		/* tiles in which every row sees everything */
		const uint32_t whole_from = sees_from(a, u.s, last_token(a, u)), whole_to = sees_to(a, u.s, first_token(a, u));
		float *part = reinterpret_cast<float *>(a.parts) + KVT_ATTEND_COUNTERS + unit * part_floats;
		float *part_acc = part + 2 * a.part_rows;
		float acc[COLUMNS / 8][4] = {}, max[2] = { -INF, -INF }, sum[2] = {};

		group_sync(1); /* the last unit is done with */
		if (threadIdx.x < DECODE_ROWS)
			sh.rows[threadIdx.x] = get_row(a, u.s, u.row0 + threadIdx.x, u.kv_head);
		load_queries<CODEC, 4>(a, u.s, u.kv_head, u.row0, DECODE_ROWS, attend_memory + l.queries, l.q_stride);
		group_sync(1);

		for (uint32_t t = 0; t < u.tiles; t++) {
			const uint32_t k_at = l.stage0 + stage * l.stage_bytes, v_at = k_at + TILE * l.k_stride;
			const uint32_t tile = (u.tile0 + t) * TILE, position = tile + warp * 16 + lane % 4 * 2;
			const uint32_t k_row = k_at + (warp * 16 + b_row) * l.k_stride;
			float score[2][4] = {}, scale[2];
			uint32_t weights[TILE / 16][4];

			barrier_wait(&sh.there[stage][0], parity);
#pragma unroll 1
			for (uint32_t d = 0; d < a.k_dim; d += 64) {
				uint32_t qa[4][4], kb[4][4];

#pragma unroll
				for (int i = 0; i < 4; i++) {
					/* not behind the row */
					matrices(qa[i], q_row + min(2 * d + i * 32, l.q_stride - PAD - 32));
					matrices(kb[i], k_row + 2 * d + (b_place ^ i * 32));
				}
#pragma unroll
				for (int i = 0; i < 4; i++) {
					if (d + i * 16 >= a.k_dim)
						break;
					multiply<CODEC>(score[0], qa[i], kb[i][0], kb[i][1]);
					multiply<CODEC>(score[1], qa[i], kb[i][2], kb[i][3]);
				}
			}
			const bool partly = general || tile < whole_from || tile + TILE > whole_to;
			uint32_t hidden = 0;

			if (partly)
				hidden = look(a, &sh.rows[lane / 4], general, score, position);
#pragma unroll
			for (int i = 0; i < 2; i++) {
				float m = fmaxf(fmaxf(score[0][2 * i], score[0][2 * i + 1]),
						fmaxf(score[1][2 * i], score[1][2 * i + 1]));

				m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
				m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
				if (lane % 4 == 0)
					sh.max[warp][lane / 4 + 8 * i] = m;
			}
			group_sync(1); /* maxima are there */
#pragma unroll
			for (int i = 0; i < 2; i++) {
				const uint32_t row = lane / 4 + 8 * i;
				float top, taken;

				top = fmaxf(fmaxf(sh.max[0][row], sh.max[1][row]), fmaxf(sh.max[2][row], sh.max[3][row]));
				refer(&max[i], top, c, &scale[i], &taken);
#pragma unroll
				for (int e = 0; e < 4; e++) {
					float &p = score[e / 2][2 * i + e % 2];

					p = power2(__fmaf_rn(p, c, -taken));
				}
				sh.sum[warp][row][lane % 4] = __fadd_rn(__fadd_rn(score[0][2 * i], score[0][2 * i + 1]),
									__fadd_rn(score[1][2 * i], score[1][2 * i + 1]));
			}
			if (partly)
				hide(score, hidden);
#pragma unroll
			for (int i = 0; i < 4; i++) {
				uint8_t *row = sh.weights[lane / 4 + i % 2 * 8];

				*reinterpret_cast<uint32_t *>(row + 2 * (warp * 16 + i / 2 * 8 + lane % 4 * 2)) =
					pair<CODEC>(score[i / 2][i % 2 * 2], score[i / 2][i % 2 * 2 + 1]);
			}
			barrier_wait(&sh.there[stage][1], parity);
			group_sync(1); /* the weights are there */
			if (warp == 0) {
#pragma unroll
				for (int i = 0; i < 2; i++) {
					const uint32_t row = lane / 4 + 8 * i;
					float x = __fadd_rn(sh.sum[0][row][lane % 4], sh.sum[1][row][lane % 4]);

					x = __fadd_rn(__fadd_rn(x, sh.sum[2][row][lane % 4]), sh.sum[3][row][lane % 4]);
					sum[i] = __fmaf_rn(sum[i], scale[i], x);
				}
			}
			rescale(acc, scale);
#pragma unroll
			for (int p = 0; p < TILE / 16; p++)
				matrices(weights[p], shared_address(&sh.weights[a_row][a_column + p * 32]));

			const uint32_t column0 = warp * COLUMNS, pieces = column0 < a.v_dim ? (a.v_dim - column0) / 8 : 0;
			auto v_piece = [&](uint32_t row, uint32_t piece) {
				return v_at + row * l.v_stride + swizzled_piece(row, piece);
			};
			auto own_piece = [&](uint32_t row, uint32_t piece) { return v_piece(row, piece + column0 / 8); };

			if (partly && group_any(1, any_not_finite<CODEC, 128>(a.v_dim / 8, v_piece))) {
				careful_output<CODEC>(acc, weights, pieces, own_piece);
			} else {
				const uint32_t v_row = v_at + a_row * l.v_stride + column0 / 64 * 128;
				const uint32_t v_place = (column0 / 8 + lane / 16 ^ lane) % 8 * 16;

#pragma unroll
				for (int p0 = 0; p0 < TILE / 16; p0 += BATCH) { /* loads, then products */
					constexpr int ACROSS = COLUMNS / 16;
					uint32_t vb[BATCH * ACROSS][4];

#pragma unroll
					for (int i = 0; i < BATCH * ACROSS; i++) {
						const uint32_t piece = i % ACROSS * 2;

						if (piece < pieces)
							matrices_transposed(vb[i], v_row + (p0 + i / ACROSS) * 16 * l.v_stride +
									   piece / 8 * 128 + (v_place ^ piece % 8 * 16));
					}
#pragma unroll
					for (int i = 0; i < BATCH * ACROSS; i++) {
						const int p = p0 + i / ACROSS, n = i % ACROSS * 2;

						if (n < pieces) {
							multiply<CODEC>(acc[n], weights[p], vb[i][0], vb[i][1]);
							multiply<CODEC>(acc[n + 1], weights[p], vb[i][2], vb[i][3]);
						}
					}
				}
			}
			barrier_arrive(&sh.empty[stage]);
			if (++stage == l.stages) {
				stage = 0;
				parity ^= 1;
			}
		}

#pragma unroll
		for (int i = 0; i < 2; i++) {
			const uint32_t row = lane / 4 + 8 * i;

			if (warp == 0)
				sum[i] = row_sum(sum[i]);
			if (u.row0 + row >= all_rows)
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

template <int CODEC, int COLUMNS> static __device__ __forceinline__ void decode(const attend_args &a)
{
	decode_shared &sh = *reinterpret_cast<decode_shared *>(attend_memory);
	const decode_layout l = get_layout(a);

	if (threadIdx.x < 2 * STAGES_MAX)
		barrier_init(&sh.there[0][threadIdx.x], 128); /* threads that load */
	if (threadIdx.x < STAGES_MAX)
		barrier_init(&sh.empty[threadIdx.x], 128); /* that compute */
	for (uint32_t i = 0; i < l.stages; i++) {
		clear_ends<true>(l.stage0 + i * l.stage_bytes, TILE, l.k_stride, a.k_dim);
		clear_ends<true>(l.stage0 + i * l.stage_bytes + TILE * l.k_stride, TILE, l.v_stride, a.v_dim);
	}
	wait_for_earlier();
	let_next_begin();
	count_units(sh.before, a.n_seqs, [&](uint32_t i) {
		const sequence s = get_sequence(a, i);
		uint32_t first;

		return splits_seen(a, s, &first) * row_blocks(a, s) * a.kv_heads;
	});
	if (threadIdx.x >= 128)
		load_splits<COLUMNS / 2>(a, sh, l);
	else
		compute_splits<CODEC, COLUMNS>(a, sh, l);
}

#define DECODE(name, codec, columns, blocks) \
	extern "C" __global__ void __launch_bounds__(256, blocks) attend_decode_##name(const attend_args a) \
	{ \
		decode<codec, columns>(a); \
	}

DECODE(f16_64, ROW_F16, 16, 2)
DECODE(f16_128, ROW_F16, 32, 2)
DECODE(f16_256, ROW_F16, 64, 1)
DECODE(f16_512, ROW_F16, 128, 1)
DECODE(bf16_64, ROW_BF16, 16, 2)
DECODE(bf16_128, ROW_BF16, 32, 2)
DECODE(bf16_256, ROW_BF16, 64, 1)
DECODE(bf16_512, ROW_BF16, 128, 1)
