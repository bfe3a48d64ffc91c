// SPDX-License-Identifier: MIT
/*
 * Family fast: attention of many query rows on sm_90a, with an arithmetic of its
 * own. It is attend.cuh's but for this: tiles have 128 positions, there are no
 * splits (m, l and acc run through all tiles that a row sees), a tile's sum of
 * weights is added lane by lane, and m changes by what it does:
 *
 *   tile: p_j = 2^(s_j c - m c). If that sums up to at most 2^14 in each of the
 *         row's four lanes, m stays. Else m' = the largest of m and s_j, and p_j
 *         are formed again; acc and l are multiplied with 2^((m - m') c).
 *
 * So a tile's largest score, a fifth of the work beside products, is looked for
 * in few tiles, the first that a row sees among them: there m is -inf, and p_j
 * are inf or NaN. A row's bits depend on what it sees alone, as in family exact.
 *
 * A thread block has two warpgroups of 64 rows and one that loads. The two take
 * turns at the tensor cores: one multiplies while the other forms weights, and
 * the scores of a tile are begun before the products of the tile before
 * (FlashAttention-3, Shah et al. 2024, has both). Scores whose weights are too
 * large are computed again, from K, which is kept until weights are known.
 *
 * Two thread blocks, a cluster, take 128 rows each of one KV head. Each has the
 * copy engine bring half of every tile to both, where blocks lie as that needs.
 */
#include "wgmma.cuh"

/* The tensor map is read where the launch put it, at a multiple of 128: CUDA 13 wants as much, 12 half. */
struct alignas(128) fast_args : kvt_attend_args {
};

static_assert(sizeof(fast_args) == sizeof(kvt_attend_args), "a launch copies as much as there is");

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

#define FAST_TILE KVT_ATTEND_FAST_TILE
#define FAST_GROUP_ROWS 64
#define FAST_ROWS (2 * FAST_GROUP_ROWS) /* of a thread block */
#define FAST_BLOCKS 2 /* of a cluster */
#define FAST_SLOTS 3 /* tiles of K, and of V, in shared memory */
#define FAST_MOST 16384.0f /* of weights that one lane adds up: f16 has four times as much */

struct fast_shared {
	uint64_t full[2][FAST_SLOTS], empty[2][FAST_SLOTS]; /* K, V */
	uint32_t too_large[2][2]; /* for each computing warpgroup: the turn, even or odd, whose weights were */
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

/* A thread block's place in its cluster. */
static __device__ __forceinline__ uint32_t fast_rank(void)
{
	return blockIdx.x % FAST_BLOCKS;
}

/*
 * Rows of a KV head: [row0, row0 + 128) of those that a cluster has. Tiles are those that any of these sees; of them, all
 * of the thread block's rows see all of [whole0, whole1).
 */
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
	row_blocks = (u.all_rows + FAST_BLOCKS * FAST_ROWS - 1) / (FAST_BLOCKS * FAST_ROWS);
	u.kv_head = local % a.kv_heads;
	u.row0 = (row_blocks - 1 - local / a.kv_heads) * (FAST_BLOCKS * FAST_ROWS); /* rows that see most are taken first */
	token0 = u.row0 / group;
	token1 = (min(u.row0 + FAST_BLOCKS * FAST_ROWS, u.all_rows) - 1) / group;
	u.from = sees_from(a, u.s, token0);
	u.to = sees_to(a, u.s, token1);
	u.tile0 = u.from / FAST_TILE;
	u.tiles = u.from < u.to ? (u.to - 1) / FAST_TILE + 1 - u.tile0 : 0;
	u.row0 += fast_rank() * FAST_ROWS;
	token0 = min(u.row0, u.all_rows - 1) / group;
	token1 = (min(u.row0 + FAST_ROWS, u.all_rows) - 1) / group;
	u.whole0 = min((sees_from(a, u.s, token1) + FAST_TILE - 1) / FAST_TILE - u.tile0, u.tiles);
	end = sees_to(a, u.s, token0) / FAST_TILE;
	u.whole1 = max(end > u.tile0 ? end - u.tile0 : 0, u.whole0);
	return u;
}

/* The cluster's @round-th unit: there and back, so that each cluster gets long and short ones. */
static __device__ __forceinline__ uint32_t fast_unit_of(uint32_t round)
{
	const uint32_t n = gridDim.x / FAST_BLOCKS, i = blockIdx.x / FAST_BLOCKS;

	return round * n + (round % 2 ? n - 1 - i : i);
}

/* ---- the cluster ---- */

static __device__ __forceinline__ void cluster_sync(void)
{
	asm volatile("barrier.cluster.arrive.aligned;\n"
		     "barrier.cluster.wait.aligned;" ::: "memory");
}

/* As barrier_arrive(), at the barrier in the same place of thread block @rank. A wider scope would wait for all memory. */
static __device__ __forceinline__ void barrier_arrive(uint64_t *b, uint32_t rank)
{
	asm volatile("{\n"
		     ".reg .b32 there;\n"
		     "mapa.shared::cluster.u32 there, %0, %1;\n"
		     "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
		     "}" ::"r"(shared_address(b)), "r"(rank) : "memory");
}

/* ---- the loading warpgroup ---- */

static __device__ __forceinline__ void barrier_expect(uint64_t *b, uint32_t bytes)
{
	asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes) : "memory");
}

/* One of a warp's lanes has the copy engine bring a box to both thread blocks; where there is none, zeros. */
static __device__ __forceinline__ void copy_box(uint32_t dst, const uint64_t *map, uint32_t at, uint64_t *b)
{
	asm volatile("{\n"
		     ".reg .pred p;\n"
		     "elect.sync _|p, 0xffffffff;\n"
		     "@p cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
		     "[%0], [%1, {%2, %3, %2}], [%4], %5;\n"
		     "}" ::"r"(dst), "l"(map), "r"(0), "r"(at), "r"(shared_address(b)), "h"((uint16_t)((1 << FAST_BLOCKS) - 1))
		     : "memory");
}

/*
 * A warp loads 64 columns of K or of V, a box of rows for each lane: by the copy engine if all that is there lies in
 * the slab, and then half of them for both thread blocks; else (pinned memory, other memory of the device) piece by
 * piece, all of them for its own.
 */
template <int DIM> static __device__ __forceinline__ void fast_load(const fast_args &a, fast_shared &sh, uint32_t slots0)
{
	const uint32_t lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffffu, threadIdx.x % 128 / 32, 0);
	const uint32_t v = warp % 2, half = warp / 2;
	const uint32_t block_rows = v ? a.v_block_rows : a.k_block_rows, row_bytes = v ? a.v_row_bytes : a.k_row_bytes;
	const uint32_t box = KVT_ATTEND_BOX_ROWS(a.k_block_rows, a.v_block_rows), boxes = FAST_TILE / box;
	fast_slot slot = {};

	if (half >= DIM / 64)
		return;
	for (uint32_t round = 0; fast_unit_of(round) < sh.before[a.n_seqs]; round++) {
		const fast_unit u = get_fast_unit(a, sh.before, fast_unit_of(round));
		const uint64_t table = (v ? a.v_blocks : a.k_blocks) + (uint64_t)u.seq * a.table_stride * 8;
		const uint32_t column = (u.kv_head * DIM + half * 64) * 2;
		uint32_t position = u.tile0 * FAST_TILE + lane * box;
		auto find = [&](uint32_t position) -> uint64_t {
			return lane < boxes && position < u.to && position + box > u.from ?
				       array<uint64_t>(table)[position / block_rows] : 0;
		};
		uint64_t next = find(position);

		for (uint32_t tile = 0; tile < u.tiles; tile++, position += FAST_TILE) {
			const uint64_t block = next;
			const uint64_t at = block + (uint64_t)(position % block_rows) * row_bytes + column, in = at - a.slab;
			const uint32_t dst = slots0 + ((v * FAST_SLOTS + slot.i) * (DIM / 64) + half) * (FAST_TILE * 128);
			uint64_t *full = &sh.full[v][slot.i];

			next = find(position + FAST_TILE); /* while the copies before are under way */
			barrier_wait(&sh.empty[v][slot.i], slot.phase ^ 1);
			if (!__any_sync(0xffffffffu, block && (in >= a.slab_bytes || in % 128))) {
				const uint32_t unit = block ? (uint32_t)(in / 128) : 0x7fffffff, own = boxes / FAST_BLOCKS;

				if (lane == 0)
					barrier_expect(full, FAST_TILE * 128); /* the other's half, too */
				__syncwarp();
				for (uint32_t i = fast_rank() * own; i < (fast_rank() + 1) * own; i++)
					copy_box(dst + i * box * 128, a.map, __shfl_sync(0xffffffffu, unit, i), full);
			} else {
				const uint32_t piece = lane % 8;

#pragma unroll 4
				for (uint32_t r = lane / 8; r < FAST_TILE; r += 4) {
					const uint32_t p = (u.tile0 + tile) * FAST_TILE + r;
					const uint64_t first = __shfl_sync(0xffffffffu, at, r / box);
					const uint64_t row = first + (uint64_t)(r % box) * row_bytes;
					const bool there = __shfl_sync(0xffffffffu, block != 0, r / box);

					copy16(dst + swizzled(r, piece), row + piece * 16, there && p >= u.from && p < u.to);
				}
				copy_commit();
				copy_wait<0>();
				publish();
				__syncwarp();
				if (lane == 0)
					barrier_arrive(full);
			}
			slot.next();
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

/* Scores to weights by references c m; @part: what this lane adds up for either row. */
static __device__ __forceinline__ void
fast_weights(float (&score)[FAST_TILE / 8][4], const float taken[2], float part[2], float c)
{
#pragma unroll
	for (int i = 0; i < 2; i++) {
		float x = 0;

#pragma unroll
		for (int n = 0; n < FAST_TILE / 8; n++)
#pragma unroll
			for (int e = 2 * i; e < 2 * i + 2; e++)
				score[n][e] = power2(__fmaf_rn(score[n][e], c, -taken[i]));
#pragma unroll
		for (int p = 0; p < FAST_TILE / 16; p++) {
			const float y = __fadd_rn(__fadd_rn(score[2 * p][2 * i], score[2 * p][2 * i + 1]),
						  __fadd_rn(score[2 * p + 1][2 * i], score[2 * p + 1][2 * i + 1]));

			x = p ? __fadd_rn(x, y) : y;
		}
		part[i] = x;
	}
}

static __device__ __forceinline__ bool too_large(const float part[2])
{
	return !(part[0] <= FAST_MOST && part[1] <= FAST_MOST);
}

/* New references where @part, of weights by the old ones, is too large; @scale: what sums are multiplied with. */
static __device__ __forceinline__ void
fast_refer(const float (&score)[FAST_TILE / 8][4], float max[2], const float part[2], float scale[2], float c)
{
#pragma unroll
	for (int i = 0; i < 2; i++) {
		float top = score[0][2 * i];
		uint32_t change = !(part[i] <= FAST_MOST);

#pragma unroll
		for (int n = 0; n < FAST_TILE / 8; n++)
			top = fmaxf(top, fmaxf(score[n][2 * i], score[n][2 * i + 1]));
		top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
		top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
		change |= __shfl_xor_sync(0xffffffffu, change, 1);
		change |= __shfl_xor_sync(0xffffffffu, change, 2);
		top = change ? fmaxf(top, max[i]) : max[i];
		scale[i] = top == max[i] ? 1 : power2(__fmul_rn(__fsub_rn(max[i], top), c));
		max[i] = top;
	}
}

/*
 * Say that this turn's weights are too large. Without a branch, and where it stands: so the compiler forms weights
 * before it waits for products.
 */
static __device__ __forceinline__ void say_if(bool so, uint32_t address, uint32_t turn)
{
	asm volatile("{\n"
		     ".reg .pred p;\n"
		     "setp.ne.u32 p, %0, 0;\n"
		     "@p st.shared.u32 [%1], %2;\n"
		     "}" ::"r"((uint32_t)so), "r"(address), "r"(turn) : "memory");
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
static __device__ __forceinline__ void fast_compute(const fast_args &a, fast_shared &sh, uint32_t slots0)
{
	const uint32_t wg = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
	const uint32_t warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
	const uint32_t group = a.heads / a.kv_heads;
	constexpr uint32_t tile_bytes = FAST_TILE * DIM * 2;
	const float c = exponent_unit(a);
	fast_slot k_slot = {}, v_slot = {}; /* of the next tiles */
	fast_slot k_kept = {};		    /* of the one whose weights are not known to be good */
	uint32_t turn = 1;

	auto wait = [&](uint32_t v, const fast_slot &slot) { barrier_wait(&sh.full[v][slot.i], slot.phase); };
	auto free = [&](uint32_t v, const fast_slot &slot) {
		if (lane < FAST_BLOCKS)
			barrier_arrive(&sh.empty[v][slot.i], lane);
	};
	auto said = [&]() { return shared_address(&sh.too_large[wg][turn % 2]); };
	auto was_said = [&]() { return __any_sync(0xffffffffu, load_shared(said()) == turn); };

	if (wg == 1)
		turn_pass(1);
	for (uint32_t round = 0; fast_unit_of(round) < sh.before[a.n_seqs]; round++) {
		const fast_unit u = get_fast_unit(a, sh.before, fast_unit_of(round));
		const uint32_t row0 = u.row0 + wg * FAST_GROUP_ROWS, row = row0 + warp * 16 + lane / 4;
		float acc[DIM / 8][4] = {}, score[FAST_TILE / 8][4], scale[2];
		float max[2] = { -INF, -INF }, sum[2] = {}, taken[2], part[2] = { INF, INF };
		uint32_t weights[FAST_TILE / 16][4], q[DIM / 16][4];
		uint32_t t = 0;
		bool whole;
		auto v_tile = [&]() { return slots0 + (FAST_SLOTS + v_slot.i) * tile_bytes; };
		auto scores = [&](const fast_slot &slot) { /* begin S = Q K^T of a tile of K that is there */
			const matrix k(slots0 + slot.i * tile_bytes, 0);

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
		auto add = [&]() {
			sum[0] = __fadd_rn(sum[0], part[0]);
			sum[1] = __fadd_rn(sum[1], part[1]);
		};
		/* Scores of @tile, which are there, to weights by new references. */
		auto refer_anew = [&](uint32_t tile, bool whole) {
			float base[2];

			fast_refer(score, max, part, scale, c);
#pragma unroll
			for (int i = 0; i < 2; i++) {
				taken[i] = __fmul_rn(max[i], c);
				base[i] = max[i] == -INF ? 0 : taken[i];
				sum[i] = __fmul_rn(sum[i], scale[i]);
			}
			fast_weights(score, base, part, c);
			if (!whole)
				mark(tile, -0.0f);
			pack();
			rescale(acc, scale);
		};
		auto again = [&](uint32_t tile, bool whole) {
			scores(k_kept);
			wgmma_wait<0>();
			settled(score);
			if (!whole)
				mark(tile, -INF);
			refer_anew(tile, whole);
		};
		auto first_weights = [&]() { /* of tile t, with no product under way */
			wait(0, k_slot);
			scores(k_slot);
			wgmma_wait<0>();
			settled(score);
			k_kept = k_slot;
			k_slot.next();
			if (!whole)
				mark(t, -INF);
			if (t == 0) { /* all references are -inf */
				refer_anew(t, whole);
				return;
			}
			fast_weights(score, taken, part, c);
			if (any_of_group(1 + wg, too_large(part))) {
				again(t, whole);
				return;
			}
			if (!whole)
				mark(t, -0.0f);
			pack();
		};
		auto last_output = [&]() { /* of the weights that are there */
			free(0, k_kept);
			add();
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
			v_slot.next();
		};

		fast_queries<CODEC, DIM>(a, u, row0, q);
		while (t < u.tiles) {
			whole = t >= u.whole0 && t < u.whole1;
			first_weights();
			for (t++; t > u.whole0 && t <= u.whole1 && t < u.tiles; t++) { /* while tile t - 1 is multiplied */
				wait(0, k_slot);
				turn_wait(wg);
				scores(k_slot);
				if (was_said()) {
					wgmma_wait<0>();
					settled(score);
					again(t - 1, true);
					scores(k_slot);
				}
				turn++;
				free(0, k_kept);
				add();
				wait(1, v_slot);
				output();
				turn_pass(wg);
				wgmma_wait<1>();
				settled(score);
				k_kept = k_slot;
				k_slot.next();
				whole = t < u.whole1;
				if (!whole)
					mark(t, -INF);
				fast_weights(score, taken, part, c);
				if (!whole)
					mark(t, -0.0f);
				say_if(too_large(part), said(), turn);
				wgmma_wait<0>();
				settled(acc);
				free(1, v_slot);
				v_slot.next();
				pack();
			}
			group_sync(1 + wg);
			if (was_said())
				again(t - 1, whole);
			turn++;
			last_output();
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

template <int CODEC, int DIM> static __device__ __forceinline__ void fast(const fast_args &a)
{
	const uint32_t group = a.heads / a.kv_heads, slots0 = shared_address(attend_memory); /* a multiple of 1024: swizzled */
	fast_shared &sh = *reinterpret_cast<fast_shared *>(attend_memory + 2 * FAST_SLOTS * FAST_TILE * DIM * 2);

	if (threadIdx.x < 2 * FAST_SLOTS) {
		barrier_init(&sh.full[0][threadIdx.x], DIM / 64);	  /* warps that load it */
		barrier_init(&sh.empty[0][threadIdx.x], FAST_BLOCKS * 8); /* warps that compute; neither block runs ahead */
		asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); /* to the copy engine, too */
	}
	if (threadIdx.x < 4)
		sh.too_large[0][threadIdx.x] = 0;
	count_units(sh.before, a.n_seqs, [&](uint32_t i) {
		return (get_sequence(a, i).n * group + FAST_BLOCKS * FAST_ROWS - 1) / (FAST_BLOCKS * FAST_ROWS) * a.kv_heads;
	});
	cluster_sync(); /* barriers are there */
	if (threadIdx.x >= 256) {
		asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
		fast_load<DIM>(a, sh, slots0);
	} else {
		asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
		fast_compute<CODEC, DIM>(a, sh, slots0);
	}
	__syncwarp();
	cluster_sync(); /* the other block's copies, and arrivals, have come */
}
#define CLUSTER __cluster_dims__(FAST_BLOCKS, 1, 1)
#else
#define CLUSTER
template <int CODEC, int DIM> static __device__ __forceinline__ void fast(const fast_args &)
{
}
#endif

#define FAST(name, codec, dim) \
	extern "C" __global__ void __launch_bounds__(384, 1) CLUSTER attend_fast_##name(const __grid_constant__ fast_args a) \
	{ \
		fast<codec, dim>(a); \
	}

FAST(f16_64, ROW_F16, 64)
FAST(f16_128, ROW_F16, 128)
FAST(bf16_64, ROW_BF16, 64)
FAST(bf16_128, ROW_BF16, 128)
