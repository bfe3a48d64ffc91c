// SPDX-License-Identifier: MIT
/*
 * The splits' parts of attend_decode to output rows, in ascending order. A thread
 * block takes some of a row's columns at a time: weights need only the maxima, all
 * products are then formed at once, and what is left is one chain of fma.
 */
#include "attend_decode.cuh"

#define MERGE_SPLITS 256 /* at most, at a time */
#define MERGE_COLUMNS 32
#define MERGE_CHAIN 16	 /* splits that are in registers when they are added up */

extern "C" __global__ void __launch_bounds__(256) attend_merge(const attend_args a)
{
	constexpr int LOADS = 8; /* of a thread at a time, of four columns each: parts have even rows, so all is aligned */
	__shared__ uint32_t before[KVT_ATTEND_SEQS + 1], tokens[KVT_ATTEND_SEQS + 1];
	__shared__ alignas(16) float2 old[MERGE_SPLITS]; /* weight of what was merged so far, weighted sum of the part */
	__shared__ float part_weight[MERGE_SPLITS], tops[8];
	__shared__ alignas(16) float product[MERGE_SPLITS * MERGE_COLUMNS];
	const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = a.heads / a.kv_heads;
	const uint64_t part_floats = (uint64_t)a.part_rows * (a.v_dim + 2);
	const float c = exponent_unit(a);
	/* threads side by side for columns, and the others for other splits */
	const uint32_t slices = (a.v_dim + MERGE_COLUMNS - 1) / MERGE_COLUMNS, each = (slices + gridDim.x - 1) / gridDim.x;
	const uint32_t width = (each > 4 ? 8 : each > 2 ? 4 : each) * MERGE_COLUMNS, down = 1024 / width, chunk = LOADS * down;
	const uint32_t own_columns = threadIdx.x % (width / 4) * 4, own_split = threadIdx.x / (width / 4);

	/*
	 * Who leaves the parts lets this begin when it has waited itself. What was before both is there, but not the parts:
	 * they are waited for when it is known where they are.
	 */
	let_next_begin();
	count_units(before, a.n_seqs, [&](uint32_t i) {
		const sequence s = get_sequence(a, i);
		uint32_t first;

		tokens[i] = s.token;
		tokens[i + 1] = s.token + s.n; /* as the next one has it */
		return splits_seen(a, s, &first) * row_blocks(a, s) * a.kv_heads;
	});

	const uint32_t head = blockIdx.y, kv_head = head / group;

	for (uint32_t token = blockIdx.z; token < tokens[a.n_seqs]; token += gridDim.z)
	for (uint32_t column0 = blockIdx.x * width; column0 < a.v_dim; column0 += gridDim.x * width) {
		const uint32_t seq = find_unit(tokens, a.n_seqs, token), column = column0 + threadIdx.x;
		const sequence s = get_sequence(a, seq);
		const uint32_t row = (token - s.token) * group + head - kv_head * group;
		const uint64_t step = (uint64_t)row_blocks(a, s) * a.kv_heads * part_floats; /* from split to split */
		const float *part = array<float>(a.parts) + KVT_ATTEND_COUNTERS + row % DECODE_ROWS +
				    (before[seq] + (uint64_t)row / DECODE_ROWS * a.kv_heads + kv_head) * part_floats;
		const float *acc = part + 2 * a.part_rows + (uint64_t)(row % DECODE_ROWS) * a.v_dim - row % DECODE_ROWS +
				   column0 + own_columns;
		uint32_t first, splits = splits_seen(a, s, &first);
		float max = -INF, sum = 0, out = 0, own, l;
		float4 x[LOADS];
		auto load = [&](uint32_t s0) {
			const uint32_t split = s0 + threadIdx.x;
			const bool mine = threadIdx.x < chunk && split < splits;

			own = mine ? __ldcg(part + split * step) : -INF;
			l = mine ? __ldcg(part + split * step + a.part_rows) : 0;
#pragma unroll
			for (int i = 0; i < LOADS; i++) {
				const uint32_t k = s0 + i * down + own_split;

				x[i] = make_float4(0, 0, 0, 0);
				if (k < splits && column0 + own_columns < a.v_dim)
					x[i] = __ldcg(reinterpret_cast<const float4 *>(acc + k * step));
			}
		};

		wait_for_earlier();
		load(0);
		for (uint32_t s0 = 0; s0 < splits; s0 += chunk) {
			const uint32_t n = min(splits - s0, chunk);
			float highest = own, lower, old_weight, w;

#pragma unroll
			for (int d = 1; d < 32; d *= 2) { /* splits behind the last count as 0, times 1 */
				const float other = __shfl_up_sync(0xffffffffu, highest, d);

				highest = lane >= d ? fmaxf(highest, other) : highest;
			}
			lower = __shfl_up_sync(0xffffffffu, highest, 1);
			lower = lane ? fmaxf(max, lower) : max;
			__syncthreads(); /* what was in shared memory is done with */
			if (lane == 31)
				tops[warp] = highest;
			__syncthreads();
#pragma unroll
			for (int i = 0; i < 8; i++) {
				lower = i < warp ? fmaxf(lower, tops[i]) : lower;
				max = fmaxf(max, tops[i]);
			}
			weigh(&lower, own, c, &old_weight, &w);
			part_weight[threadIdx.x] = w;
			old[threadIdx.x] = make_float2(old_weight, __fmul_rn(l, w));
			__syncthreads();
#pragma unroll
			for (int i = 0; i < LOADS; i++) {
				const uint32_t k = i * down + own_split;
				const float pw = part_weight[k];
				float4 p = make_float4(0, 0, 0, 0);

				if (pw != 0)
					p = make_float4(__fmul_rn(x[i].x, pw), __fmul_rn(x[i].y, pw), __fmul_rn(x[i].z, pw),
							__fmul_rn(x[i].w, pw));
				*reinterpret_cast<float4 *>(product + k * width + own_columns) = p;
			}
			load(s0 + chunk); /* while this is added up */
			__syncthreads();
			for (uint32_t k0 = 0; threadIdx.x < width && k0 < n; k0 += MERGE_CHAIN) { /* loads, then sums */
				const float *own_product = product + k0 * width + threadIdx.x;
				float p[MERGE_CHAIN];
				float4 two[MERGE_CHAIN / 2];

#pragma unroll
				for (int k = 0; k < MERGE_CHAIN; k++)
					p[k] = own_product[k * width];
#pragma unroll
				for (int k = 0; k < MERGE_CHAIN / 2; k++)
					two[k] = reinterpret_cast<const float4 *>(old + k0)[k];
#pragma unroll
				for (int k = 0; k < MERGE_CHAIN / 2; k++) {
					out = __fmaf_rn(out, two[k].x, p[2 * k]);
					sum = __fmaf_rn(sum, two[k].x, two[k].y);
					out = __fmaf_rn(out, two[k].z, p[2 * k + 1]);
					sum = __fmaf_rn(sum, two[k].z, two[k].w);
				}
			}
		}
		if (threadIdx.x < width && column < a.v_dim)
			store_output(a, token, (uint64_t)head * a.v_dim + column,
				     output_bits(out, final_weight(a, head, max, sum, c)));
	}
	wait_for_earlier(); /* also where there is nothing to do */
}
