// SPDX-License-Identifier: MIT
/*
 * The splits' parts of attend_decode to output rows, in ascending order. A thread
 * block takes some of a row's columns at a time: weights need only the maxima, all
 * products are then formed at once, and what is left is one chain of fma.
 */
#include "attend.cuh"

#define MERGE_SPLITS 128 /* at a time */
#define MERGE_COLUMNS 32
#define MERGE_ROWS 16 /* DECODE_ROWS of attend_decode.cu */

extern "C" __global__ void __launch_bounds__(256) attend_merge(const attend_args a)
{
	constexpr int LOADS = 16; /* of a thread at a time */
	__shared__ uint32_t before[KVT_ATTEND_SEQS + 1], tokens[KVT_ATTEND_SEQS + 1];
	__shared__ float2 old[MERGE_SPLITS]; /* weight of what was merged so far, weighted sum of the part */
	__shared__ float part_weight[MERGE_SPLITS], tops[MERGE_SPLITS / 32];
	__shared__ float product[MERGE_SPLITS * MERGE_COLUMNS];
	const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = a.heads / a.kv_heads;
	const uint64_t part_floats = (uint64_t)a.part_rows * (a.v_dim + 2);
	const float c = exponent_unit(a);
	/* warps side by side for columns, and the others for other splits */
	const uint32_t slices = (a.v_dim + MERGE_COLUMNS - 1) / MERGE_COLUMNS, each = (slices + gridDim.x - 1) / gridDim.x;
	const uint32_t across = each > 4 ? 8 : each > 2 ? 4 : each, down = 8 / across, chunk = LOADS * down;
	const uint32_t width = across * MERGE_COLUMNS, own_column = warp % across * MERGE_COLUMNS + lane;
	const uint32_t own_split = warp / across;

	count_units(before, a.n_seqs, [&](uint32_t i) {
		const sequence s = get_sequence(a, i);
		uint32_t first;

		tokens[i] = s.token;
		tokens[i + 1] = s.token + s.n; /* as the next one has it */
		return splits_seen(a, s, &first) * ((s.n * group + MERGE_ROWS - 1) / MERGE_ROWS) * a.kv_heads;
	});

	const uint32_t head = blockIdx.y, kv_head = head / group;

	for (uint32_t token = blockIdx.z; token < tokens[a.n_seqs]; token += gridDim.z)
	for (uint32_t column0 = blockIdx.x * width; column0 < a.v_dim; column0 += gridDim.x * width) {
		const uint32_t seq = find_unit(tokens, a.n_seqs, token), column = column0 + own_column;
		const sequence s = get_sequence(a, seq);
		const uint32_t row = (token - s.token) * group + head - kv_head * group;
		const uint32_t row_blocks = (s.n * group + MERGE_ROWS - 1) / MERGE_ROWS;
		const uint64_t step = (uint64_t)row_blocks * a.kv_heads * part_floats; /* from split to split */
		const float *part = array<float>(a.parts) + KVT_ATTEND_COUNTERS + row % MERGE_ROWS +
				    (before[seq] + (uint64_t)row / MERGE_ROWS * a.kv_heads + kv_head) * part_floats;
		const float *acc = part + 2 * a.part_rows + (uint64_t)(row % MERGE_ROWS) * a.v_dim - row % MERGE_ROWS + column;
		uint32_t first, splits = splits_seen(a, s, &first);
		float max = -INF, sum = 0, out = 0, x[LOADS], own, l;
		auto load = [&](uint32_t s0) {
			const uint32_t split = s0 + threadIdx.x;
			const bool mine = threadIdx.x < chunk && split < splits;

			own = mine ? __ldcg(part + split * step) : -INF;
			l = mine ? __ldcg(part + split * step + a.part_rows) : 0;
#pragma unroll
			for (int i = 0; i < LOADS; i++) {
				const uint32_t k = s0 + i * down + own_split;

				x[i] = k < splits && column < a.v_dim ? __ldcg(acc + k * step) : 0;
			}
		};

		load(0);
		for (uint32_t s0 = 0; s0 < splits; s0 += chunk) {
			const uint32_t n = min(splits - s0, chunk);
			float highest = own, lower;

			if (warp < MERGE_SPLITS / 32) { /* splits behind the last count as 0, times 1 */
#pragma unroll
				for (int d = 1; d < 32; d *= 2) {
					const float other = __shfl_up_sync(0xffffffffu, highest, d);

					highest = lane >= d ? fmaxf(highest, other) : highest;
				}
				lower = __shfl_up_sync(0xffffffffu, highest, 1);
				lower = lane ? fmaxf(max, lower) : max;
			}
			__syncthreads(); /* what was in shared memory is done with */
			if (warp < MERGE_SPLITS / 32 && lane == 31)
				tops[warp] = highest;
			__syncthreads();
#pragma unroll
			for (int i = 0; i < MERGE_SPLITS / 32; i++) {
				lower = i < warp ? fmaxf(lower, tops[i]) : lower;
				max = fmaxf(max, tops[i]);
			}
			if (warp < MERGE_SPLITS / 32) {
				float old_weight, w;

				weigh(&lower, own, c, &old_weight, &w);
				part_weight[threadIdx.x] = w;
				old[threadIdx.x] = make_float2(old_weight, __fmul_rn(l, w));
			}
			__syncthreads();
#pragma unroll
			for (int i = 0; i < LOADS; i++) {
				const uint32_t k = i * down + own_split;

				product[k * width + own_column] = part_weight[k] == 0 ? 0 : __fmul_rn(x[i], part_weight[k]);
			}
			load(s0 + chunk); /* while this is added up */
			__syncthreads();
			for (uint32_t k0 = 0; own_split == 0 && k0 < n; k0 += 16) {
#pragma unroll
				for (uint32_t k = k0; k < k0 + 16; k++) {
					out = __fmaf_rn(out, old[k].x, product[k * width + own_column]);
					sum = __fmaf_rn(sum, old[k].x, old[k].y);
				}
			}
		}
		if (own_split == 0 && column < a.v_dim)
			store_output(a, token, (uint64_t)head * a.v_dim + column,
				     output_bits(out, final_weight(a, head, max, sum, c)));
	}
}
