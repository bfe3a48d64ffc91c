// SPDX-License-Identifier: MIT
/*
 * Attention of few query rows where there is much to read and scores are plain:
 * a thread block takes one split for four KV heads at once, so that pieces of
 * 1 KB are read. A warp has a KV head to itself, scores and output, and waits for
 * nobody but the loading warps, which fill a ring of stages: a tile's K, then its V.
 *
 * Multiprocessors read at rates that differ by a third: so units are dealt one
 * by one, as late as loading can go on without a gap.
 */
#include "attend_decode.cuh"

#define WIDE_HEADS 4
#define WIDE_STAGES 8
#define WIDE_AHEAD 4 /* units that are dealt and not begun by all warps */
#define WIDE_LATE 4  /* stages that are yet to be asked for when the next unit is dealt; its number is asked for before */

template <int DIM> struct wide {
	static constexpr uint32_t row = WIDE_HEADS * DIM * 2;
	static constexpr uint32_t rows = 32, stage = rows * row, per_tile = TILE / rows;
};

struct wide_shared {
	uint64_t full[WIDE_STAGES], empty[WIDE_STAGES];
	uint64_t dealt[WIDE_AHEAD], taken[WIDE_AHEAD];
	uint32_t unit[WIDE_AHEAD];
	query_row rows[WIDE_HEADS][DECODE_ROWS];
	uint32_t before[]; /* [n_seqs + 1] */
};

/* The block's @n-th unit, by a warp; each warp asks for each. The grid's last say that there are no more. */
static __device__ __forceinline__ uint32_t wide_unit(wide_shared &sh, uint32_t n)
{
	uint32_t unit;

	barrier_wait(&sh.dealt[n % WIDE_AHEAD], n / WIDE_AHEAD % 2);
	unit = sh.unit[n % WIDE_AHEAD];
	barrier_arrive(&sh.taken[n % WIDE_AHEAD]);
	return unit;
}

/* One thread deals: the first unit is the block's number, the others come from a counter that all blocks share. */
struct dealer {
	uint32_t n, next;

	static __device__ __forceinline__ uint32_t *counter(const attend_args &a)
	{
		return reinterpret_cast<uint32_t *>(a.parts) + KVT_ATTEND_COUNTERS - 1;
	}

	/* For the next time: it is not waited for. */
	__device__ __forceinline__ void draw(const attend_args &a)
	{
		next = gridDim.x + atomicAdd(counter(a), 1);
	}

	__device__ __forceinline__ void deal(wide_shared &sh)
	{
		const uint32_t slot = n % WIDE_AHEAD;

		barrier_wait(&sh.taken[slot], n / WIDE_AHEAD % 2 ^ 1);
		sh.unit[slot] = next;
		barrier_arrive(&sh.dealt[slot]);
		n++;
	}

	/* Each block gets one number behind the last unit's, also who has had no unit; the last of them is asked for last. */
	__device__ __forceinline__ void end(const attend_args &a, uint32_t units)
	{
		if (n == 1)
			draw(a);
		if (next == max(units, gridDim.x) + gridDim.x - 1)
			*counter(a) = 0;
	}
};

/* ---- loading ---- */

template <int DIM> static __device__ __forceinline__ void
wide_load(const attend_args &a, wide_shared &sh, uint32_t stage0, uint32_t stages)
{
	using shape = wide<DIM>;
	constexpr uint32_t pieces = shape::row / 16, down = 128 / pieces;
	const uint32_t thread = threadIdx.x % 128, row = thread / pieces, units = sh.before[a.n_seqs];
	/* the 16 bytes of a line are exchanged by the row's number: lines stay lines, and eight rows lie in all banks */
	const uint32_t line = row * shape::row + thread % pieces / 8 * 128, place = (thread ^ row) % 8 * 16;
	const uint64_t policy = once_policy();
	uint32_t stage = 0, parity = 1, unit, next_unit;
	uint64_t next_k = 0, next_v = 0;
	dealer d = { 0, blockIdx.x };
	decode_unit next;
	auto begin = [&](uint32_t n) { /* the n-th unit; where its rows are is not waited for */
		if (thread == 0)
			d.deal(sh);
		__syncwarp();
		next_unit = wide_unit(sh, n);
		next = get_decode_unit(a, sh.before, next_unit, a.kv_heads / WIDE_HEADS);
		if (!next.tiles)
			return;
		next_k = find_group(a.k_blocks + (uint64_t)next.seq * a.table_stride * 8, a.k_block_rows, a.k_row_bytes,
				    next.kv_head * shape::row, next.tile0 / (SPLIT / TILE), next.from, next.to);
		next_v = find_group(a.v_blocks + (uint64_t)next.seq * a.table_stride * 8, a.v_block_rows, a.v_row_bytes,
				    next.kv_head * shape::row, next.tile0 / (SPLIT / TILE), next.from, next.to);
	};

	begin(0);
	for (uint32_t n = 1; unit = next_unit, unit < units; n++) {
		const decode_unit u = next;
		const uint64_t k = next_k, v = next_v;
		const uint32_t all = u.tiles * 2 * shape::per_tile;

		for (uint32_t i = 0;; i++) {
			if (thread == 0 && i == all - min(all, 2u * WIDE_LATE))
				d.draw(a);
			if (i == all - min(all, (uint32_t)WIDE_LATE))
				begin(n);
			if (i == all)
				break;
			const uint32_t t = u.tile0 + i / (2 * shape::per_tile), first = i % shape::per_tile * shape::rows;
			const bool is_v = i / shape::per_tile % 2;
			const uint64_t found = is_v ? v : k, row_bytes = is_v ? a.v_row_bytes : a.k_row_bytes;
			const uint64_t in_group = row * row_bytes + thread % pieces * 16;

			barrier_wait(&sh.empty[stage], parity);
#pragma unroll
			for (uint32_t g = 0; g < shape::rows; g += 16) {
				const uint64_t base = group_of(found, t, (first + g) / 16), src = base + in_group;
				const uint32_t position = t * TILE + first + g;
				const uint32_t dst = stage0 + stage * shape::stage + g * shape::row + line;

				if (base && position >= u.from && position + 16 <= u.to) {
#pragma unroll
					for (uint32_t r = 0; r < 16; r += down)
						copy16_once(dst + r * shape::row + (place ^ r % 8 * 16),
							    src + r * row_bytes, policy);
				} else {
#pragma unroll 1
					for (uint32_t r = 0; r < 16; r += down)
						copy16(dst + r * shape::row + (place ^ r % 8 * 16), src + r * row_bytes,
						       base && position + r + row >= u.from && position + r + row < u.to);
				}
			}
			barrier_arrive_copied(&sh.full[stage]);
			if (++stage == stages) {
				stage = 0;
				parity ^= 1;
			}
		}
	}
	if (thread == 0)
		d.end(a, units);
	copy_wait<0>();
}

/* ---- computing ---- */

/* A lane's pieces of a head's queries, as mma wants them. */
template <int CODEC, int DIM> static __device__ __forceinline__ void
wide_queries(const attend_args &a, const decode_unit &u, uint32_t kv_head, uint32_t (&q)[DIM / 16][4])
{
	const uint32_t lane = threadIdx.x % 32, group = a.heads / a.kv_heads, size = a.q_type == ROW_F32 ? 4 : 2;

#pragma unroll
	for (int i = 0; i < 2; i++) {
		const uint32_t row = u.row0 + lane / 4 + 8 * i, token = row / group;
		const uint64_t at = a.q + (uint64_t)(u.s.token + token) * a.q_stride +
				    ((uint64_t)(kv_head * group + row % group) * DIM + lane % 4 * 2) * size;

#pragma unroll
		for (int d = 0; d < DIM / 8; d++) {
			uint32_t x = 0;

			if (token < u.s.n && a.q_type == CODEC)
				x = array<uint32_t>(at)[d * 4];
			else if (token < u.s.n)
				x = pair<CODEC>(load_float(at, d * 8, a.q_type), load_float(at, d * 8 + 1, a.q_type));
			q[d / 2][d % 2 * 2 + i] = x;
		}
	}
}

template <int CODEC, int DIM> static __device__ __forceinline__ void
wide_compute(const attend_args &a, wide_shared &sh, uint32_t stage0, uint32_t stages)
{
	using shape = wide<DIM>;
	const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = a.heads / a.kv_heads;
	const uint32_t groups = a.kv_heads / WIDE_HEADS, units = sh.before[a.n_seqs];
	const float c = exponent_unit(a);
	const uint64_t part_floats = (uint64_t)a.part_rows * (DIM + 2);
	const uint32_t k_lane = (lane % 8 + lane / 16 * 8) * shape::row + warp * (DIM * 2);
	const uint32_t v_lane = lane % 16 * shape::row + warp * (DIM * 2);
	const uint32_t k_place = (lane / 8 % 2 ^ lane % 8) * 16, v_place = (lane / 16 ^ lane % 8) * 16;
	uint32_t stage = 0, parity = 0, unit, q[DIM / 16][4];
	decode_unit last;

	auto ready = [&]() { barrier_wait(&sh.full[stage], parity); };
	auto done = [&]() {
		barrier_arrive(&sh.empty[stage]);
		if (++stage == stages) {
			stage = 0;
			parity ^= 1;
		}
	};

	last.seq = ~0u;
	for (uint32_t n = 0; unit = wide_unit(sh, n), unit < units; n++) {
		const decode_unit u = get_decode_unit(a, sh.before, unit, groups);
		const uint32_t kv_head = u.kv_head * WIDE_HEADS + warp, all_rows = u.s.n * group;
		/* tiles in which every row sees everything */
		const uint32_t whole_from = sees_from(a, u.s, last_token(a, u)), whole_to = sees_to(a, u.s, first_token(a, u));
		float *part = reinterpret_cast<float *>(a.parts) + KVT_ATTEND_COUNTERS +
			      ((uint64_t)(unit / groups) * a.kv_heads + kv_head) * part_floats;
		float *part_acc = part + 2 * a.part_rows;
		float acc[DIM / 8][4] = {}, max[2] = { -INF, -INF }, sum[2] = {};

		if (u.seq != last.seq || u.row0 != last.row0 || u.kv_head != last.kv_head) {
			wide_queries<CODEC, DIM>(a, u, kv_head, q);
			__syncwarp();
			if (lane < DECODE_ROWS)
				sh.rows[warp][lane] = get_row(a, u.s, u.row0 + lane, kv_head);
			__syncwarp();
			last = u;
		}
#pragma unroll 1
		for (uint32_t t = 0; t < u.tiles; t++) {
			const uint32_t tile = (u.tile0 + t) * TILE;
			const bool partly = tile < whole_from || tile + TILE > whole_to;
			float score[TILE / 8][4] = {}, scale[2];
			uint32_t weights[TILE / 16][4], hidden = 0;

#pragma unroll
			for (int p = 0; p < TILE / 16; p++) {
				const uint32_t at = stage0 + stage * shape::stage + p * 16 % shape::rows * shape::row + k_lane;

				if (p * 16 % shape::rows == 0)
					ready();
#pragma unroll
				for (int d0 = 0; d0 < DIM / 16; d0 += 4) { /* loads, then products */
					uint32_t kb[4][4];

#pragma unroll
					for (int d = 0; d < 4; d++)
						matrices(kb[d], at + d0 * 32 + (k_place ^ d * 32));
#pragma unroll
					for (int d = 0; d < 4; d++) {
						multiply<CODEC>(score[2 * p], q[d0 + d], kb[d][0], kb[d][1]);
						multiply<CODEC>(score[2 * p + 1], q[d0 + d], kb[d][2], kb[d][3]);
					}
				}
				if ((p + 1) * 16 % shape::rows == 0)
					done();
			}
			if (partly)
				hidden = look(a, &sh.rows[warp][lane / 4], false, score, tile + lane % 4 * 2);
			soften(score, max, sum, scale, c);
			if (partly)
				hide(score, hidden);
			rescale(acc, scale);
#pragma unroll
			for (int i = 0; i < TILE / 4; i++)
				weights[i / 4][i % 4] = pair<CODEC>(score[i / 2][i % 2 * 2], score[i / 2][i % 2 * 2 + 1]);

			auto v_piece = [&](uint32_t row, uint32_t piece) {
				uint32_t s = stage + row / shape::rows;

				s -= s >= stages ? stages : 0;
				return stage0 + s * shape::stage + row % shape::rows * shape::row + warp * (DIM * 2) +
				       piece / 8 * 128 + (piece ^ row) % 8 * 16;
			};

			if (partly) { /* all of the tile's V */
				for (uint32_t i = 0; i < shape::per_tile; i++) {
					const uint32_t s = stage + i;

					barrier_wait(&sh.full[s < stages ? s : s - stages], s < stages ? parity : parity ^ 1);
				}
				if (__any_sync(0xffffffffu, any_not_finite<CODEC, 32>(DIM / 8, v_piece))) {
					careful_output<CODEC>(acc, weights, DIM / 8, v_piece);
					for (uint32_t i = 0; i < shape::per_tile; i++)
						done();
					continue;
				}
			}
#pragma unroll
			for (int p = 0; p < TILE / 16; p++) {
				const uint32_t at = stage0 + stage * shape::stage + p * 16 % shape::rows * shape::row + v_lane;

				if (p * 16 % shape::rows == 0)
					ready();
#pragma unroll
				for (int n0 = 0; n0 < DIM / 16; n0 += 4) {
					uint32_t vb[4][4];

#pragma unroll
					for (int i = 0; i < 4; i++)
						matrices_transposed(vb[i], at + n0 * 32 + (v_place ^ i * 32));
#pragma unroll
					for (int i = 0; i < 4; i++) {
						multiply<CODEC>(acc[2 * (n0 + i)], weights[p], vb[i][0], vb[i][1]);
						multiply<CODEC>(acc[2 * (n0 + i) + 1], weights[p], vb[i][2], vb[i][3]);
					}
				}
				if ((p + 1) * 16 % shape::rows == 0)
					done();
			}
		}

#pragma unroll
		for (int i = 0; i < 2; i++) {
			const uint32_t row = lane / 4 + 8 * i;

			sum[i] = row_sum(sum[i]);
			if (u.row0 + row >= all_rows)
				continue;
			if (lane % 4 == 0) {
				part[row] = max[i];
				part[a.part_rows + row] = sum[i];
			}
#pragma unroll
			for (int x = 0; x < DIM / 8; x++)
				*reinterpret_cast<float2 *>(part_acc + row * DIM + x * 8 + lane % 4 * 2) =
					make_float2(acc[x][2 * i], acc[x][2 * i + 1]);
		}
	}
}

template <int CODEC, int DIM> static __device__ __forceinline__ void decode_wide(const attend_args &a)
{
	wide_shared &sh = *reinterpret_cast<wide_shared *>(attend_memory);
	const uint32_t header = (sizeof(wide_shared) + 4 * (a.n_seqs + 1) + 127) / 128 * 128;
	const uint32_t stage0 = shared_address(attend_memory) + header;
	const uint32_t stages = min((dynamic_shared_bytes() - header) / wide<DIM>::stage, (uint32_t)WIDE_STAGES);

	if (threadIdx.x < WIDE_STAGES) {
		barrier_init(&sh.full[threadIdx.x], 128);	       /* threads that load */
		barrier_init(&sh.empty[threadIdx.x], WIDE_HEADS * 32); /* that compute */
	}
	if (threadIdx.x < WIDE_AHEAD) {
		barrier_init(&sh.dealt[threadIdx.x], 1);
		barrier_init(&sh.taken[threadIdx.x], WIDE_HEADS * 32 + 128); /* all threads */
	}
	prefetch(a.k_blocks, 8ull * a.n_seqs * a.table_stride, blockIdx.x * blockDim.x + threadIdx.x);
	prefetch(a.v_blocks, 8ull * a.n_seqs * a.table_stride, blockIdx.x * blockDim.x + threadIdx.x);
	wait_for_earlier();
	let_next_begin();
	count_units(sh.before, a.n_seqs, [&](uint32_t i) {
		const sequence s = get_sequence(a, i);
		uint32_t first;

		return splits_seen(a, s, &first) * row_blocks(a, s) * (a.kv_heads / WIDE_HEADS);
	});
	if (threadIdx.x >= WIDE_HEADS * 32)
		wide_load<DIM>(a, sh, stage0, stages);
	else
		wide_compute<CODEC, DIM>(a, sh, stage0, stages);
}

#define WIDE(name, codec, dim) \
	extern "C" __global__ void __launch_bounds__(WIDE_HEADS * 32 + 128, 1) attend_wide_##name(const attend_args a) \
	{ \
		decode_wide<codec, dim>(a); \
	}

WIDE(f16_64, ROW_F16, 64)
WIDE(f16_128, ROW_F16, 128)
WIDE(bf16_64, ROW_BF16, 64)
WIDE(bf16_128, ROW_BF16, 128)
