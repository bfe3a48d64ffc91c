// SPDX-License-Identifier: MIT
/*
 * The splits' parts of attend_decode to output rows, in ascending order. A thread
 * block takes 32 columns of a row at a time: weights need only the maxima, all
 * products are then formed at once, and what is left is one chain of fma.
 */
#include "attend.cuh"

#define MERGE_SPLITS 128 /* at a time */
#define MERGE_COLUMNS 32
#define MERGE_ROWS 16 /* DECODE_ROWS of attend_decode.cu */

extern "C" __global__ void __launch_bounds__(256) attend_merge(const attend_args a)
{
	__shared__ uint32_t before[KVT_ATTEND_SEQS + 1], tokens[KVT_ATTEND_SEQS + 1];
	__shared__ float old_weight[MERGE_SPLITS], part_weight[MERGE_SPLITS], part_sum[MERGE_SPLITS];
	__shared__ float product[MERGE_SPLITS][MERGE_COLUMNS];
	const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = a.heads / a.kv_heads;
	const uint32_t slices = (a.v_dim + MERGE_COLUMNS - 1) / MERGE_COLUMNS;
	const uint64_t part_floats = (uint64_t)a.part_rows * (a.v_dim + 2);
	const float c = exponent_unit(a);

	count_units(before, a.n_seqs, [&](uint32_t i) {
		const sequence s = get_sequence(a, i);
		uint32_t first;

		tokens[i] = s.token;
		tokens[i + 1] = s.token + s.n; /* as the next one has it */
		return splits_seen(a, s, &first) * ((s.n * group + MERGE_ROWS - 1) / MERGE_ROWS) * a.kv_heads;
	});

	const uint32_t head = blockIdx.y, kv_head = head / group;

	for (uint32_t token = blockIdx.z; token < tokens[a.n_seqs]; token += gridDim.z)
	for (uint32_t slice = blockIdx.x; slice < slices; slice += gridDim.x) {
		const uint32_t seq = find_unit(tokens, a.n_seqs, token);
		const sequence s = get_sequence(a, seq);
		const uint32_t row = (token - s.token) * group + head - kv_head * group;
		const uint32_t row_blocks = (s.n * group + MERGE_ROWS - 1) / MERGE_ROWS, column = slice * MERGE_COLUMNS + lane;
		const uint64_t step = (uint64_t)row_blocks * a.kv_heads * part_floats; /* from split to split */
		const float *part = array<float>(a.parts) + row % MERGE_ROWS +
				    (before[seq] + (uint64_t)row / MERGE_ROWS * a.kv_heads + kv_head) * part_floats;
		const float *acc = part + 2 * a.part_rows + (uint64_t)(row % MERGE_ROWS) * a.v_dim - row % MERGE_ROWS + column;
		uint32_t first, splits = splits_seen(a, s, &first);
		float max = -INF, sum = 0, out = 0;

		for (uint32_t s0 = 0; s0 < splits; s0 += MERGE_SPLITS) {
			const uint32_t n = min(splits - s0, (uint32_t)MERGE_SPLITS);
			float x[MERGE_SPLITS / 8];

#pragma unroll
			for (int i = 0; i < MERGE_SPLITS / 8; i++) {
				const uint32_t k = i * 8 + warp;

				x[i] = k < n && column < a.v_dim ? __ldcg(acc + (s0 + k) * step) : 0;
			}
			__syncthreads(); /* what was in shared memory is done with */
			if (warp == 0) {
#pragma unroll
				for (int i = 0; i < MERGE_SPLITS / 32; i++) {
					const uint32_t k = i * 32 + lane;

					if (i * 32 >= n)
						break;
					const float own = k < n ? __ldcg(part + (s0 + k) * step) : -INF;
					const float l = k < n ? __ldcg(part + (s0 + k) * step + a.part_rows) : 0;
					float highest = own, lower, w;

#pragma unroll
					for (int d = 1; d < 32; d *= 2) {
						const float other = __shfl_up_sync(0xffffffffu, highest, d);

						highest = lane >= d ? fmaxf(highest, other) : highest;
					}
					lower = __shfl_up_sync(0xffffffffu, highest, 1);
					lower = lane ? fmaxf(max, lower) : max;
					max = fmaxf(max, __shfl_sync(0xffffffffu, highest, 31));
					weigh(&lower, own, c, &old_weight[k], &w);
					part_weight[k] = w;
					part_sum[k] = __fmul_rn(l, w);
				}
			}
			__syncthreads();
#pragma unroll
			for (int i = 0; i < MERGE_SPLITS / 8; i++) {
				const uint32_t k = i * 8 + warp;

				product[k][lane] = part_weight[k] == 0 ? 0 : __fmul_rn(x[i], part_weight[k]);
			}
			__syncthreads();
			if (warp == 0)
				for (uint32_t k = 0; k < n; k++) {
					out = __fmaf_rn(out, old_weight[k], product[k][lane]);
					sum = __fmaf_rn(sum, old_weight[k], part_sum[k]);
				}
		}
		if (warp == 0 && column < a.v_dim)
			store_output(a, token, (uint64_t)head * a.v_dim + column,
				     output_bits(out, final_weight(a, head, max, sum, c)));
	}
}
