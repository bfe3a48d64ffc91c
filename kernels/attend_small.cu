// SPDX-License-Identifier: MIT
/*
 * Attention of few query rows to little: where there are fewer splits than
 * multiprocessors, what counts is how long one takes. A thread block has a split
 * of one KV head with all loads under way at once; each of its warps forms the
 * scores of a tile, then 16 columns of the output over all tiles. The last of a
 * row's splits to end merges them.
 *
 * With two warps a scheduler, each instruction of a chain takes its four cycles
 * and more: what is on the way is short.
 *
 * Begun early, it asks for all rows but the step's own before it waits for those,
 * for queries, and for whoever still has the parts.
 */
#include "attend_decode.cuh"

#define SMALL_TILES (SPLIT / TILE) /* a warp has one */

struct small_shared {
	uint64_t there[SMALL_TILES]; /* V */
	query_row rows[DECODE_ROWS];
	float max[DECODE_ROWS], sum[DECODE_ROWS];
	float top[SMALL_TILES][DECODE_ROWS], scale[SMALL_TILES][DECODE_ROWS];
	float sums[SMALL_TILES][DECODE_ROWS][4];
	uint32_t last;
	alignas(16) uint8_t weights[DECODE_ROWS][2 * SPLIT + PAD];
	uint32_t before[]; /* [n_seqs + 1] */
};

/* What lies where: tiles of K, and those of V that fit beside them; the others follow K in its place. */
struct small_layout {
	uint32_t q_stride, k_stride, v_stride, queries, tile_bytes, tiles0, tiles;

	__device__ __forceinline__ uint32_t k(uint32_t tile) const
	{
		return tiles0 + tile * tile_bytes;
	}
	__device__ __forceinline__ uint32_t v(uint32_t tile) const
	{
		return tiles0 + (SMALL_TILES + tile < tiles ? SMALL_TILES + tile : tile) * tile_bytes;
	}
};

static __device__ __forceinline__ small_layout get_small_layout(const attend_args &a)
{
	small_layout l;
	uint32_t fixed;

	l.q_stride = 2 * whole_steps(a.k_dim) + PAD;
	l.k_stride = whole_lines(a.k_dim);
	l.v_stride = whole_lines(a.v_dim);
	l.queries = (sizeof(small_shared) + 4 * (a.n_seqs + 1) + 127) / 128 * 128;
	fixed = (l.queries + DECODE_ROWS * l.q_stride + 127) / 128 * 128;
	l.tiles0 = shared_address(attend_memory) + fixed;
	l.tile_bytes = TILE * max(l.k_stride, l.v_stride);
	l.tiles = (dynamic_shared_bytes() - fixed) / l.tile_bytes;
	return l;
}

/* A warp: a tile of K or of V, rows outside [from, to) as zeros, but for those in [fresh, to). */
static __device__ __forceinline__ void
small_load(uint64_t found, uint32_t row_bytes, uint32_t pieces, uint32_t tile, uint32_t from, uint32_t fresh, uint32_t to,
	   uint32_t dst, uint32_t stride)
{
	const uint32_t inverse = 65535 / pieces + 1; /* k / pieces = k * inverse >> 16 for k < 16 * 16 */
	const uint32_t groups = __ballot_sync(0xffffffffu, found != 0) >> tile % SMALL_TILES * (TILE / 16) & 15;
	const bool whole = groups == 15 && tile * TILE >= from && (tile + 1) * TILE <= fresh && pieces > 1 && 32 % pieces == 0;

#pragma unroll 1
	for (uint32_t i = 0; i < TILE / 16; i++, dst += 16 * stride) {
		const uint64_t base = group_of(found, tile, i);
		const uint32_t row0 = (threadIdx.x % 32) * inverse >> 16, piece0 = threadIdx.x % 32 - row0 * pieces;
		const uint64_t in_group = base + (uint64_t)row0 * row_bytes + piece0 * 16;
		const uint32_t to_row = dst + row0 * stride + piece0 / 8 * 128;

		if (whole) {
#pragma unroll 4
			for (uint32_t r = 0; r < 16; r += 32 / pieces)
				copy16(to_row + r * stride + (piece0 ^ (row0 + r)) % 8 * 16,
				       in_group + (uint64_t)r * row_bytes);
			continue;
		}
#pragma unroll 1
		for (uint32_t k = threadIdx.x % 32; k < 16 * pieces; k += 32) {
			const uint32_t row = k * inverse >> 16, piece = k - row * pieces, position = tile * TILE + i * 16 + row;

			if (position < fresh || position >= to)
				copy16(dst + row * stride + swizzled_piece(row, piece),
				       base + (uint64_t)row * row_bytes + piece * 16,
				       base && position >= from && position < to);
		}
	}
}

/* Those. */
static __device__ __forceinline__ void
small_load_fresh(uint64_t found, uint32_t row_bytes, uint32_t pieces, uint32_t tile, uint32_t fresh, uint32_t to, uint32_t dst,
		 uint32_t stride)
{
#pragma unroll 1
	for (uint32_t row = max(fresh, tile * TILE) % TILE, end = min(to - tile * TILE, (uint32_t)TILE); row < end; row++) {
		const uint64_t base = group_of(found, tile, row / 16);
		const uint32_t piece = threadIdx.x % 32;

		if (piece < pieces)
			copy16(dst + row * stride + swizzled_piece(row, piece),
			       base + (uint64_t)(row % 16) * row_bytes + piece * 16, base);
	}
}

/* As look(), where nothing is added to scores. */
static __device__ __forceinline__ uint32_t small_look(const query_row *row, float (&s)[TILE / 8][4], uint32_t j)
{
	const uint32_t from[2] = { row[0].from, row[8].from }, to[2] = { row[0].to, row[8].to };
	uint32_t hidden = 0;

#pragma unroll
	for (int i = 0; i < TILE / 2; i++) {
		const uint32_t at = j + i / 4 * 8 + i % 2;
		float &x = s[i / 4][i % 4];

		x = at < from[i % 4 / 2] || at >= to[i % 4 / 2] ? -INF : x;
		hidden |= x == -INF ? 1u << i : 0;
	}
	return hidden;
}

/* One more of a split's blocks has left its parts: how many did before. */
static __device__ __forceinline__ uint32_t small_count(uint32_t *counter)
{
	uint32_t before;

	asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
	return before;
}

/* The splits of some rows of a KV head: a warp has a row. @part: of the first split; parts are @step floats apart. */
static __device__ __forceinline__ void
small_merge(const attend_args &a, const decode_unit &u, const float *part, uint64_t step, uint32_t splits, float c)
{
	constexpr int LOADS = 16; /* at a time */
	const uint32_t lane = threadIdx.x % 32, group = a.heads / a.kv_heads;
	const uint32_t rows = min(u.s.n * group - u.row0, (uint32_t)DECODE_ROWS);

#pragma unroll 1
	for (uint32_t row = threadIdx.x / 32; row < rows; row += SMALL_TILES)
#pragma unroll 1
	for (uint32_t column = 2 * lane; column < (a.v_dim + 63) / 64 * 64; column += 64) {
		const uint32_t token = (u.row0 + row) / group, head = u.kv_head * group + (u.row0 + row) % group;
		const float *acc = part + 2 * a.part_rows + row * a.v_dim + min(column, a.v_dim - 2);
		const float *at = part + lane * step + row;
		float max = -INF, sum = 0, out[2] = {}, weight;
		float2 x[LOADS];
		uint32_t left = splits;
		auto load = [&]() {
#pragma unroll
			for (int j = 0; j < LOADS; j++)
				if (j < left)
					x[j] = __ldcg(reinterpret_cast<const float2 *>(acc + j * step));
			acc += LOADS * step;
		};

#pragma unroll 1
		for (uint32_t k0 = 0; k0 < splits; k0 += 32, at += 32 * step) {
			const bool mine = k0 + lane < splits;
			const float own = mine ? __ldcg(at) : -INF, l = mine ? __ldcg(at + a.part_rows) : 0;
			float highest = own, lower, old, w, added;

			load(); /* while weights are formed */
#pragma unroll
			for (int d = 1; d < 32; d *= 2) {
				const float other = __shfl_up_sync(0xffffffffu, highest, d);

				highest = lane >= d ? fmaxf(highest, other) : highest;
			}
			lower = __shfl_up_sync(0xffffffffu, highest, 1);
			lower = lane ? fmaxf(max, lower) : max;
			max = fmaxf(max, __shfl_sync(0xffffffffu, highest, 31));
			weigh(&lower, own, c, &old, &w);
			added = __fmul_rn(l, w);
#pragma unroll 1
			for (uint32_t j0 = 0; j0 < 32 && left; j0 += LOADS) {
				if (j0)
					load();
#pragma unroll
				for (int j = 0; j < LOADS; j++) {
					const float old_weight = __shfl_sync(0xffffffffu, old, j0 + j);
					const float part_weight = __shfl_sync(0xffffffffu, w, j0 + j);

					sum = __fmaf_rn(sum, old_weight, __shfl_sync(0xffffffffu, added, j0 + j));
					out[0] = merged(out[0], old_weight, x[j].x, part_weight);
					out[1] = merged(out[1], old_weight, x[j].y, part_weight);
					if (--left == 0)
						break;
				}
			}
		}
		weight = final_weight(a, head, max, sum, c);
		if (column < a.v_dim)
			store_output2(a, u.s.token + token, (uint64_t)head * a.v_dim + column, output_bits(out[0], weight),
				      output_bits(out[1], weight));
	}
}

template <int CODEC> static __device__ __forceinline__ void small(const attend_args &a)
{
	small_shared &sh = *reinterpret_cast<small_shared *>(attend_memory);
	const small_layout l = get_small_layout(a);
	const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = a.heads / a.kv_heads;
	const bool general = is_general(a);
	const float c = exponent_unit(a);
	const uint64_t part_floats = (uint64_t)a.part_rows * (a.v_dim + 2);
	const uint32_t a_row = lane % 16, a_column = lane / 16 * 16;
	const uint32_t b_row = lane % 8 + lane / 16 * 8, b_column = lane / 8 % 2 * 16;
	float *const parts = reinterpret_cast<float *>(a.parts) + KVT_ATTEND_COUNTERS;
	uint32_t phases = 0; /* of tiles */

	let_next_begin();
	if (a.first) /* which rows are the step's own is not known */
		wait_for_earlier();
	prefetch(a.k_blocks, 8ull * a.n_seqs * a.table_stride, threadIdx.x);
	prefetch(a.v_blocks, 8ull * a.n_seqs * a.table_stride, threadIdx.x);
	if (threadIdx.x < SMALL_TILES)
		barrier_init(&sh.there[threadIdx.x], 32);
	count_units(sh.before, a.n_seqs, [&](uint32_t i) {
		const sequence s = get_sequence(a, i);
		uint32_t first;

		return splits_seen(a, s, &first) * row_blocks(a, s) * a.kv_heads;
	});

	for (uint32_t unit = blockIdx.x; unit < sh.before[a.n_seqs]; unit += gridDim.x) {
		const decode_unit u = get_decode_unit(a, sh.before, unit, a.kv_heads);
		const uint32_t all_rows = u.s.n * group, split = u.tile0 / SMALL_TILES;
		const uint32_t whole_from = sees_from(a, u.s, last_token(a, u)), whole_to = sees_to(a, u.s, first_token(a, u));
		const uint32_t tile = u.tile0 + warp, position = tile * TILE + lane % 4 * 2;
		auto load_queries = [&](const uint64_t (&at)[2], uint32_t (&to)[4]) {
			auto each = [&](auto load) {
#pragma unroll
				for (int e = 0; e < 4; e++)
					to[e] = at[e / 2] && lane * 2 + e % 2 * 64 < a.k_dim ?
							load(at[e / 2], lane + e % 2 * 32) : 0;
			};

			if (a.q_type == CODEC)
				each([](uint64_t row, uint32_t i) { return array<uint32_t>(row)[i]; });
			else if (a.q_type == ROW_F32)
				each([](uint64_t row, uint32_t i) {
					return pair<CODEC>(array<float>(row)[2 * i], array<float>(row)[2 * i + 1]);
				});
			else
				each([](uint64_t row, uint32_t i) {
					constexpr uint32_t other = CODEC == ROW_F16 ? ROW_BF16 : ROW_F16;

					return pair<CODEC>(load_float(row, 2 * i, other), load_float(row, 2 * i + 1, other));
				});
		};
		auto is_partly = [&](uint32_t t) { return general || t * TILE < whole_from || (t + 1) * TILE > whole_to; };
		float *part = parts + unit * part_floats;
		const uint32_t column0 = warp * 16, pieces = column0 < a.v_dim ? min((a.v_dim - column0) / 8, 2u) : 0;
		const bool beside = SMALL_TILES + warp < l.tiles;
		uint64_t v = 0;
		const uint32_t fresh = a.first ? u.to : max(min(u.to, u.s.rows - u.s.n), u.from); /* on: the step's own */
		const bool known = (tile + 1) * TILE <= fresh || fresh == u.to;
		/* all rows see the same, others are zeros: tiles that are not there are made zeros, too, and all is one run */
		const bool alike = u.s.n == 1 && !general;
		float acc[2][4] = {}, score[TILE / 8][4] = {};
		uint32_t hidden = 0, query[4]; /* warp w's lanes have rows w and w + 8, two elements at a time */
		uint64_t k = 0, query_at[2];

		if (warp < u.tiles) {
			k = find_group(a.k_blocks + (uint64_t)u.seq * a.table_stride * 8, a.k_block_rows, a.k_row_bytes,
				       u.kv_head * a.k_dim * 2, split, u.from, u.to);
			v = find_group(a.v_blocks + (uint64_t)u.seq * a.table_stride * 8, a.v_block_rows, a.v_row_bytes,
				       u.kv_head * a.v_dim * 2, split, u.from, u.to);
			for (uint32_t i = lane; a.k_dim % 16 && i < TILE; i += 32) /* V was there, perhaps */
				clear16(l.k(warp) + i * l.k_stride + swizzled_piece(i, a.k_dim / 8));
			small_load(k, a.k_row_bytes, a.k_dim / 8, tile, u.from, fresh, u.to, l.k(warp), l.k_stride);
			copy_commit();
			if (beside)
				small_load(v, a.v_row_bytes, a.v_dim / 8, tile, u.from, fresh, u.to, l.v(warp), l.v_stride);
			copy_commit();
		} else if (alike) {
			for (uint32_t i = lane; i < TILE * l.v_stride / 16; i += 32)
				clear16(l.v(warp) + i * 16);
			for (uint32_t i = lane; i < DECODE_ROWS * TILE / 8; i += 32)
				clear16(shared_address(&sh.weights[i / 8][warp * TILE * 2 + i % 8 * 16]));
		}
		if (threadIdx.x < DECODE_ROWS) {
			sh.rows[threadIdx.x] = get_row(a, u.s, u.row0 + threadIdx.x, u.kv_head);
			sh.max[threadIdx.x] = -INF;
		}
#pragma unroll
		for (int i = 0; i < 2; i++) {
			const uint32_t row = u.row0 + warp + i * 8, head = u.kv_head * group + row % group;

			query_at[i] = row >= all_rows ? 0 : a.q + (uint64_t)(u.s.token + row / group) * a.q_stride +
							    (uint64_t)head * a.k_dim * (a.q_type == ROW_F32 ? 4 : 2);
		}
		wait_for_earlier();
		load_queries(query_at, query);
		if (warp < u.tiles && !known) {
			small_load_fresh(k, a.k_row_bytes, a.k_dim / 8, tile, fresh, u.to, l.k(warp), l.k_stride);
			if (beside)
				small_load_fresh(v, a.v_row_bytes, a.v_dim / 8, tile, fresh, u.to, l.v(warp), l.v_stride);
			copy_commit();
		}
		if (warp < u.tiles && beside)
			barrier_arrive_copied(&sh.there[warp]);
#pragma unroll
		for (int e = 0; e < 4; e++)
			if (lane * 2 + e % 2 * 64 < whole_steps(a.k_dim))
				*reinterpret_cast<uint32_t *>(attend_memory + l.queries + (warp + e / 2 * 8) * l.q_stride +
							      (lane + e % 2 * 32) * 4) = query[e];
		__syncthreads(); /* queries are there */
		if (warp < u.tiles) {
			const uint32_t k_row = l.k(warp) + b_row * l.k_stride;
			const uint32_t q_row = shared_address(attend_memory) + l.queries + a_row * l.q_stride + a_column;

			if (known)
				copy_wait<1>();
			else
				copy_wait<0>();
			__syncwarp();
#pragma unroll 2
			for (uint32_t d = 0; d < a.k_dim; d += 16) {
				uint32_t qa[4], kb[TILE / 16][4];

				matrices(qa, q_row + 2 * d);
#pragma unroll
				for (int n = 0; n < TILE / 16; n++)
					matrices(kb[n], k_row + n * 16 * l.k_stride +
								swizzled_piece(b_row, d / 8 + b_column / 16));
#pragma unroll
				for (int n = 0; n < TILE / 16; n++) {
					multiply<CODEC>(score[2 * n], qa, kb[n][0], kb[n][1]);
					multiply<CODEC>(score[2 * n + 1], qa, kb[n][2], kb[n][3]);
				}
			}
			if (!beside) {
				__syncwarp(); /* K is done with */
				small_load(v, a.v_row_bytes, a.v_dim / 8, tile, u.from, u.to, u.to, l.v(warp), l.v_stride);
				barrier_arrive_copied(&sh.there[warp]);
			}
			if (is_partly(tile))
				hidden = general ? look(a, &sh.rows[lane / 4], true, score, position) :
						   small_look(&sh.rows[lane / 4], score, position);
#pragma unroll
			for (int i = 0; i < 2; i++) {
				float top = score[0][2 * i];

#pragma unroll
				for (int n = 0; n < TILE / 8; n++)
					top = fmaxf(top, fmaxf(score[n][2 * i], score[n][2 * i + 1]));
				top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
				top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
				if (lane % 4 == 0)
					sh.top[warp][lane / 4 + 8 * i] = top;
			}
		}
		__syncthreads(); /* maxima are there */
		if (warp < u.tiles) {
#pragma unroll
			for (int i = 0; i < 2; i++) {
				const uint32_t row = lane / 4 + 8 * i;
				float max = -INF, scale = 1, taken = 0, x = 0;

				for (uint32_t t = 0; t <= warp; t++)
					refer(&max, sh.top[t][row], c, &scale, &taken);
#pragma unroll
				for (int n = 0; n < TILE / 8; n++)
#pragma unroll
					for (int e = 2 * i; e < 2 * i + 2; e++)
						score[n][e] = power2(__fmaf_rn(score[n][e], c, -taken));
#pragma unroll
				for (int p = 0; p < TILE / 16; p++) {
					const float *low = &score[2 * p][2 * i], *high = &score[2 * p + 1][2 * i];
					const float y = __fadd_rn(__fadd_rn(low[0], low[1]), __fadd_rn(high[0], high[1]));

					x = p ? __fadd_rn(x, y) : y;
				}
				sh.sums[warp][row][lane % 4] = x;
				if (lane % 4 == 0) {
					sh.scale[warp][row] = scale;
					if (warp == u.tiles - 1)
						sh.max[row] = max;
				}
			}
			if (is_partly(tile))
				hide(score, hidden);
#pragma unroll
			for (int n = 0; n < TILE / 8; n++)
#pragma unroll
				for (int i = 0; i < 2; i++)
					*reinterpret_cast<uint32_t *>(sh.weights[lane / 4 + 8 * i] +
								      2 * (warp * TILE + n * 8 + lane % 4 * 2)) =
						pair<CODEC>(score[n][2 * i], score[n][2 * i + 1]);
		}
		__syncthreads(); /* weights are there */
		if (warp >= SMALL_TILES - 2) { /* which have no columns where rows of V are short */
			const uint32_t row = threadIdx.x % 64 / 4;
			float sum = 0;

#pragma unroll
			for (int t = 0; t < SMALL_TILES; t++)
				if (t < u.tiles)
					sum = __fmaf_rn(sum, sh.scale[t][row], sh.sums[t][row][threadIdx.x % 4]);
			sum = row_sum(sum);
			if (threadIdx.x % 4 == 0 && u.row0 + row < all_rows) {
				part[row] = sh.max[row];
				part[a.part_rows + row] = sum;
			}
		}
		if (column0 < a.v_dim) {
			bool plain = alike || (u.tiles == SMALL_TILES && !is_partly(u.tile0) &&
					       !is_partly(u.tile0 + u.tiles - 1));
			auto own_piece = [&](uint32_t t, uint32_t row, uint32_t piece) {
				return l.v(t) + row * l.v_stride + swizzled_piece(row, column0 / 8 + piece);
			};
			const uint32_t weights_row = shared_address(&sh.weights[a_row][a_column]), v_step = 16 * l.v_stride;
			const uint32_t v_row = a_row * l.v_stride + swizzled_piece(a_row, column0 / 8 + a_column / 16);
			auto add = [&](uint32_t t) {
				uint32_t weights[TILE / 16][4], vb[TILE / 16][4];
				const uint32_t v_at = l.v(t) + v_row;

#pragma unroll
				for (int p = 0; p < TILE / 16; p++) {
					matrices(weights[p], weights_row + t * TILE * 2 + p * 32);
					matrices_transposed(vb[p], v_at + p * v_step);
				}
#pragma unroll
				for (int p = 0; p < TILE / 16; p++) {
					multiply<CODEC>(acc[0], weights[p], vb[p][0], vb[p][1]);
					multiply<CODEC>(acc[1], weights[p], vb[p][2], vb[p][3]);
				}
			};

			for (uint32_t t = 0; t < u.tiles; t++)
				barrier_wait(&sh.there[t], phases >> t & 1);
			for (uint32_t t = 1 + lane / 16; t < u.tiles; t += 2)
				plain &= sh.scale[t][lane % 16] == 1;
			if (__all_sync(0xffffffffu, plain)) { /* one run of instructions: loads go ahead of products */
#pragma unroll
				for (uint32_t t = 0; t < SMALL_TILES; t++)
					add(t);
			} else {
#pragma unroll 1
				for (uint32_t t = 0; t < u.tiles; t++) {
					const float scale[2] = { sh.scale[t][lane / 4], sh.scale[t][lane / 4 + 8] };
					auto piece_of = [&](uint32_t row, uint32_t piece) { return own_piece(t, row, piece); };

					rescale(acc, scale);
					if (is_partly(u.tile0 + t) &&
					    __any_sync(0xffffffffu, any_not_finite<CODEC, 32>(pieces, piece_of))) {
						uint32_t weights[TILE / 16][4];

#pragma unroll
						for (int p = 0; p < TILE / 16; p++)
							matrices(weights[p], shared_address(&sh.weights[a_row][a_column +
											    t * TILE * 2 + p * 32]));
						careful_output<CODEC>(acc, weights, pieces, piece_of);
					} else {
						add(t);
					}
				}
			}
#pragma unroll
			for (int i = 0; i < 2; i++)
#pragma unroll
				for (int n = 0; n < 2; n++) {
					const uint32_t row = lane / 4 + 8 * i, column = column0 + n * 8 + lane % 4 * 2;

					if (u.row0 + row < all_rows && column < a.v_dim)
						*reinterpret_cast<float2 *>(part + 2 * a.part_rows + row * a.v_dim + column) =
							make_float2(acc[n][2 * i], acc[n][2 * i + 1]);
				}
		}
		phases ^= (1u << u.tiles) - 1;
		if (a.fused) {
			const uint32_t of_split = row_blocks(a, u.s) * a.kv_heads;
			uint32_t first, splits = splits_seen(a, u.s, &first);
			const uint32_t unit0 = sh.before[u.seq] + (unit - sh.before[u.seq]) % of_split;
			uint32_t *counter = reinterpret_cast<uint32_t *>(a.parts) + unit0;

			__syncthreads();
			if (threadIdx.x == 0)
				sh.last = small_count(counter) == splits - 1;
			__syncthreads();
			if (sh.last) {
				small_merge(a, u, parts + unit0 * part_floats, of_split * part_floats, splits, c);
				if (threadIdx.x == 0)
					*counter = 0;
			}
		}
		__syncthreads(); /* this unit is done with */
	}
	if (blockIdx.x == 0)
		wait_for_earlier(); /* also where there was no unit */
	copy_wait<0>();
}

#define SMALL(name, codec) \
	extern "C" __global__ void __launch_bounds__(256, 1) attend_small_##name(const attend_args a) \
	{ \
		small<codec>(a); \
	}

SMALL(f16, ROW_F16)
SMALL(bf16, ROW_BF16)
