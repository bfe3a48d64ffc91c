// SPDX-License-Identifier: MIT
/*
 * What happens to blocks as bytes: their digest, their copies, rows appended to
 * them. Arguments and twins: userspace/gpu/kernels.h, twins.c; the same bits.
 */
#include "early.cuh"
#include "gpu/kernels.h"
#include "half.cuh"
#include "xxh3.cuh"

template <typename T> static __device__ __forceinline__ T *at(uint64_t address)
{
	return reinterpret_cast<T *>(address);
}

/* ---- digest: a thread block takes a block at a time; four threads a long row, one a short row ---- */

static __device__ uint64_t rows_digest(const uint8_t *rows, uint32_t n, uint64_t first, uint32_t row_bytes,
				       const uint64_t *secret)
{
	const uint32_t j = threadIdx.x % 4, group = 0xfu << (threadIdx.x % 32 / 4 * 4);
	uint64_t sum = 0, h;

	if (row_bytes <= XXH3_LONG) {
		for (uint32_t r = threadIdx.x; r < n; r += blockDim.x)
			sum += xxh3_row_digest(xxh3_short(rows + (uint64_t)r * row_bytes, row_bytes, secret),
					       first + r);
		return sum;
	}
	for (uint32_t r = threadIdx.x / 4; r < n; r += blockDim.x / 4) {
		h = xxh3_long_part(rows + (uint64_t)r * row_bytes, row_bytes, j, secret);
		h += __shfl_xor_sync(group, h, 1);
		h += __shfl_xor_sync(group, h, 2);
		if (j == 0)
			sum += xxh3_row_digest(xxh3_avalanche(row_bytes * XXH3_P64_1 + h), first + r);
	}
	return sum;
}

extern "C" __global__ void __launch_bounds__(1024) block_digest(const struct kvt_digest_args a)
{
	__shared__ uint64_t secret[XXH3_SECRET_WORDS], sums[32];
	const uint64_t *blocks = at<const uint64_t>(a.blocks);
	const uint32_t *rows = at<const uint32_t>(a.rows), *first = at<const uint32_t>(a.first);
	uint64_t *out = at<uint64_t>(a.out);

	if (threadIdx.x < XXH3_SECRET_WORDS)
		secret[threadIdx.x] = xxh3_secret[threadIdx.x];
	__syncthreads();

	for (uint32_t i = blockIdx.x; i < a.n; i += gridDim.x) {
		uint64_t sum = rows_digest(at<const uint8_t>(blocks[i]), rows[i], first ? first[i] : 0, a.row_bytes,
					   secret);

		for (int d = 16; d; d /= 2)
			sum += __shfl_xor_sync(0xffffffffu, sum, d);
		if (threadIdx.x % 32 == 0)
			sums[threadIdx.x / 32] = sum;
		__syncthreads();
		if (threadIdx.x == 0) {
			for (uint32_t w = 1; w < blockDim.x / 32; w++)
				sum += sums[w];
			out[i] = sum;
		}
		__syncthreads();
	}
}

extern "C" __global__ void __launch_bounds__(1024) block_verify(const struct kvt_verify_args a)
{
	const uint64_t *digests = at<const uint64_t>(a.digests), *wanted = at<const uint64_t>(a.wanted);

	for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < a.n; i += gridDim.x * blockDim.x)
		if (digests[i] != wanted[i])
			atomicAdd(at<unsigned long long>(a.bad), 1ull);
}

/* ---- copy: a warp takes 4 KiB of an item at a time, eight loads of 16 bytes in flight in each thread ---- */

#define PIECE 4096
#define IN_FLIGHT 8

template <typename T> static __device__ __forceinline__ void copy_as(uint8_t *dst, const uint8_t *src, uint32_t bytes)
{
	const T *s = reinterpret_cast<const T *>(src);
	T *d = reinterpret_cast<T *>(dst);
	const uint32_t lane = threadIdx.x % 32, n = bytes / sizeof(T), whole = n / (32 * IN_FLIGHT) * (32 * IN_FLIGHT);

	for (uint32_t i = lane; i < whole; i += 32 * IN_FLIGHT) {
		T v[IN_FLIGHT];

#pragma unroll
		for (int k = 0; k < IN_FLIGHT; k++)
			v[k] = __ldcs(s + i + 32 * k);
#pragma unroll
		for (int k = 0; k < IN_FLIGHT; k++)
			__stcs(d + i + 32 * k, v[k]);
	}
	for (uint32_t i = whole + lane; i < n; i += 32)
		__stcs(d + i, __ldcs(s + i));
	for (uint32_t i = n * sizeof(T) + lane; i < bytes; i += 32)
		dst[i] = src[i];
}

static __device__ __forceinline__ void copy_piece(uint8_t *dst, const uint8_t *src, uint32_t bytes)
{
	const uint64_t low = reinterpret_cast<uint64_t>(dst) | reinterpret_cast<uint64_t>(src);

	if (low % 16 == 0)
		copy_as<uint4>(dst, src, bytes);
	else if (low % 4 == 0)
		copy_as<uint32_t>(dst, src, bytes);
	else
		copy_as<uint8_t>(dst, src, bytes);
}

extern "C" __global__ void __launch_bounds__(1024) block_copy(const struct kvt_copy_args a)
{
	const uint64_t *dst = at<const uint64_t>(a.dst), *src = at<const uint64_t>(a.src);
	const uint32_t *sizes = at<const uint32_t>(a.sizes);
	const uint64_t pieces = (a.bytes + PIECE - 1ull) / PIECE, warps = (uint64_t)gridDim.x * (blockDim.x / 32);

	for (uint64_t w = (uint64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; w < a.n * pieces; w += warps) {
		const uint32_t i = w / pieces, bytes = sizes ? sizes[i] : a.bytes;
		const uint64_t from = w % pieces * PIECE;

		if (from < bytes)
			copy_piece(at<uint8_t>(dst[i]) + from, at<const uint8_t>(src[i]) + from,
				   bytes - from < PIECE ? bytes - from : PIECE);
	}
}

/* ---- append: a warp takes a row; eight elements a thread where both sides are aligned, else one ---- */

template <int TYPE> struct element;

template <> struct element<ROW_F32> {
	typedef uint32_t type;
	static __device__ __forceinline__ uint32_t widen(uint32_t v) { return v; }
	static __device__ __forceinline__ uint32_t narrow(uint32_t f) { return f; }
};

template <> struct element<ROW_F16> {
	typedef uint16_t type;
	static __device__ __forceinline__ uint32_t widen(uint16_t v) { return f16_widen(v); }
	static __device__ __forceinline__ uint16_t narrow(uint32_t f) { return f16_narrow(f); }
};

template <> struct element<ROW_BF16> {
	typedef uint16_t type;
	static __device__ __forceinline__ uint32_t widen(uint16_t v) { return bf16_widen(v); }
	static __device__ __forceinline__ uint16_t narrow(uint32_t f) { return bf16_narrow(f); }
};

template <typename T, int N> struct alignas(16) several {
	T v[N];
};

template <int SRC, int DST> static __device__ __forceinline__ typename element<DST>::type
convert(typename element<SRC>::type v)
{
	if constexpr (SRC == DST)
		return v; /* also a signalling NaN */
	else
		return element<DST>::narrow(element<SRC>::widen(v));
}

/* By a warp, four loads of eight elements in flight in each thread. Elements lie at multiples of their size. */
template <int SRC, int DST> static __device__ void encode_row(uint64_t d, uint64_t s, uint32_t elements)
{
	typedef typename element<SRC>::type src_t;
	typedef typename element<DST>::type dst_t;
	typedef several<src_t, 8> src8;
	typedef several<dst_t, 8> dst8;
	const uint32_t lane = threadIdx.x % 32;
	uint32_t done = 0;

	if ((s | d) % 16 == 0) {
		const uint32_t n = elements / 8;

		done = n * 8;
		for (uint32_t e = lane; e < n; e += 128) {
			src8 in[4];

#pragma unroll
			for (int u = 0; u < 4; u++)
				if (e + 32 * u < n)
					in[u] = at<const src8>(s)[e + 32 * u];
#pragma unroll
			for (int u = 0; u < 4; u++) {
				dst8 out;

#pragma unroll
				for (int k = 0; k < 8; k++)
					out.v[k] = convert<SRC, DST>(in[u].v[k]);
				if (e + 32 * u < n)
					at<dst8>(d)[e + 32 * u] = out;
			}
		}
	}
	for (uint32_t e = done + lane; e < elements; e += 32)
		at<dst_t>(d)[e] = convert<SRC, DST>(at<const src_t>(s)[e]);
}

static __device__ __forceinline__ uint32_t row_bytes(uint32_t type, uint32_t elements)
{
	return elements * (type == ROW_F32 ? 4 : 2);
}

template <int SRC, int DST> static __device__ void append_rows(const struct kvt_append_args &a)
{
	const uint64_t *blocks = at<const uint64_t>(a.blocks);
	const uint32_t *rows = at<const uint32_t>(a.rows);
	const uint64_t warps = (uint64_t)gridDim.x * (blockDim.x / 32);
	const uint32_t bytes = row_bytes(DST, a.elements);
	uint64_t i = (uint64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, d = 0;

	if (i < a.n)
		d = blocks[i] + (uint64_t)rows[i] * bytes;
	wait_for_earlier(); /* source rows, and whoever reads those that are replaced; not where they go */
	while (i < a.n) {
		encode_row<SRC, DST>(d, a.src + i * a.src_stride, a.elements);
		i += warps;
		if (i < a.n)
			d = blocks[i] + (uint64_t)rows[i] * bytes;
	}
}

#define EACH_PAIR(types, call, ...) \
	switch (types.src_type * 3 + types.dst_type) { \
	case ROW_F32 * 3 + ROW_F32: return call<ROW_F32, ROW_F32>(__VA_ARGS__); \
	case ROW_F32 * 3 + ROW_F16: return call<ROW_F32, ROW_F16>(__VA_ARGS__); \
	case ROW_F32 * 3 + ROW_BF16: return call<ROW_F32, ROW_BF16>(__VA_ARGS__); \
	case ROW_F16 * 3 + ROW_F32: return call<ROW_F16, ROW_F32>(__VA_ARGS__); \
	case ROW_F16 * 3 + ROW_F16: return call<ROW_F16, ROW_F16>(__VA_ARGS__); \
	case ROW_F16 * 3 + ROW_BF16: return call<ROW_F16, ROW_BF16>(__VA_ARGS__); \
	case ROW_BF16 * 3 + ROW_F32: return call<ROW_BF16, ROW_F32>(__VA_ARGS__); \
	case ROW_BF16 * 3 + ROW_F16: return call<ROW_BF16, ROW_F16>(__VA_ARGS__); \
	case ROW_BF16 * 3 + ROW_BF16: return call<ROW_BF16, ROW_BF16>(__VA_ARGS__); \
	}

extern "C" __global__ void __launch_bounds__(1024) block_append(const struct kvt_append_args a)
{
	let_next_begin();
	EACH_PAIR(a, append_rows, a)
}

/* ---- extend: a warp takes a row, and digests what it writes, in place of zeros ---- */

static __device__ __noinline__ uint64_t row_hash(uint64_t row, uint32_t bytes, const uint64_t *secret)
{
	const uint32_t lane = threadIdx.x % 32;
	uint64_t h = 0;

	if (bytes <= XXH3_LONG)
		return lane ? 0 : xxh3_short(at<const uint8_t>(row), bytes, secret);
	if (lane < 4)
		h = xxh3_long_part(at<const uint8_t>(row), bytes, lane, secret);
	h += __shfl_xor_sync(0xffffffffu, h, 1);
	h += __shfl_xor_sync(0xffffffffu, h, 2);
	return xxh3_avalanche(bytes * XXH3_P64_1 + h);
}

/*
 * A long row of whole stripes whose 16-byte pieces are aligned: lane 4 g + j encodes column j of stripes g, g + 8, ...,
 * and has what XXH3 wants of them in registers. Returned where piece 0 of the last stripe is: lane *owner.
 */
template <int SRC, int DST>
static __device__ __forceinline__ uint64_t encode_and_hash(uint64_t d, uint64_t s, uint32_t elements, const uint64_t *secret,
							   uint32_t *owner)
{
	typedef several<typename element<SRC>::type, 8> src8;
	typedef several<typename element<DST>::type, 8> dst8;
	const uint32_t lane = threadIdx.x % 32, j = lane % 4, pieces = elements / 8, last = pieces / 4 - 1;
	uint64_t acc[2];
	struct xxh3_pair end = { };

	xxh3_begin(acc, j);
	for (uint32_t e0 = 0; e0 < pieces; e0 += 128) {
		src8 in[4];

#pragma unroll
		for (int u = 0; u < 4; u++)
			if (e0 + 32 * u + lane < pieces)
				in[u] = at<const src8>(s)[e0 + 32 * u + lane];
#pragma unroll
		for (int half = 0; half < 2; half++) { /* 16 stripes */
			uint64_t sum[2] = { };

#pragma unroll
			for (int u = 2 * half; u < 2 * half + 2; u++) {
				const uint32_t e = e0 + 32 * u + lane, i = e / 4 % 16;
				union {
					dst8 row;
					struct xxh3_pair pair;
				} out;

				if (e >= pieces)
					break;
#pragma unroll
				for (int k = 0; k < 8; k++)
					out.row.v[k] = convert<SRC, DST>(in[u].v[k]);
				at<dst8>(d)[e] = out.row;
				if (e / 4 == last)
					end = out.pair;
				else
					xxh3_add(sum, out.pair, secret[2 * j + i], secret[2 * j + i + 1]);
			}
			if (e0 + 64 * half >= pieces)
				break;
#pragma unroll
			for (int i = 0; i < 2; i++) {
#pragma unroll
				for (int distance = 4; distance < 32; distance *= 2)
					sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], distance);
				acc[i] += sum[i];
			}
			if (last >= e0 / 4 + 16 * half + 16)
				xxh3_scramble(acc, j, secret);
		}
	}
	*owner = last % 8 * 4;
	uint64_t h = xxh3_end(acc, end, j, secret);

	h += __shfl_xor_sync(0xffffffffu, h, 1);
	h += __shfl_xor_sync(0xffffffffu, h, 2);
	return xxh3_avalanche(2 * elements * XXH3_P64_1 + h);
}

/* Where a row of the step goes. */
struct place {
	uint64_t entry, row; /* in the tables; in memory */
	uint32_t index;	     /* in its block */
};

static __device__ __forceinline__ struct place find_place(const struct kvt_extend_args &a, const struct kvt_extend_plane &p,
							  uint32_t t, uint32_t bytes)
{
	const uint32_t *tokens = at<const uint32_t>(a.tokens), *rows = at<const uint32_t>(a.rows);
	uint32_t i = 0, end = a.n_seqs, position;
	struct place r;

	while (end - i > 1) {
		const uint32_t middle = (i + end) / 2;

		if (t >= tokens[middle])
			i = middle;
		else
			end = middle;
	}
	position = rows[i] - (tokens[i + 1] - t);
	r.index = position % p.block_rows;
	r.entry = (uint64_t)i * a.table_stride + position / p.block_rows;
	r.row = at<const uint64_t>(p.blocks)[r.entry] + (uint64_t)r.index * bytes;
	return r;
}

template <int SRC, int DST>
static __device__ __forceinline__ void extend_rows(const struct kvt_extend_args &a, const struct kvt_extend_plane &p,
						   const uint64_t *secret)
{
	unsigned long long *sums = at<unsigned long long>(p.sums);
	const uint32_t bytes = row_bytes(DST, p.elements), n = at<const uint32_t>(a.tokens)[a.n_seqs];
	const uint32_t warps = gridDim.x * (blockDim.x / 32), lane = threadIdx.x % 32;
	uint32_t t = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
	struct place to = { };
	uint64_t zeros = 0;
	auto find = [&]() {
		if (t >= n)
			return;
		to = find_place(a, p, t, bytes);
		zeros = xxh3_row_digest(p.zeros_hash, to.index);
	};

	find();
	wait_for_earlier(); /* source rows, and whoever reads those that are replaced; not the tables */
	for (; t < n; t += warps, find()) {
		const uint64_t s = p.src + t * p.src_stride;
		uint32_t owner = 0;
		uint64_t h;

		if (DST != ROW_F32 && (s | to.row) % 16 == 0 && bytes % 64 == 0 && bytes > XXH3_LONG) {
			h = encode_and_hash<SRC, DST>(to.row, s, p.elements, secret, &owner);
		} else {
			encode_row<SRC, DST>(to.row, s, p.elements);
			__syncwarp();
			h = row_hash(to.row, bytes, secret);
		}
		if (lane == owner)
			atomicAdd(&sums[to.entry], (unsigned long long)(xxh3_row_digest(h, to.index) - zeros));
	}
}

/* Few threads, so that nothing spills: one row in a step is a chain of loads, and every one counts. */
extern "C" __global__ void __launch_bounds__(128) block_extend(const __grid_constant__ struct kvt_extend_args a)
{
	__shared__ uint64_t secret[XXH3_SECRET_WORDS];

	let_next_begin();
	if (threadIdx.x < XXH3_SECRET_WORDS)
		secret[threadIdx.x] = xxh3_secret[threadIdx.x];
	__syncthreads();
	EACH_PAIR(a.plane[blockIdx.y], extend_rows, a, a.plane[blockIdx.y], secret)
}

extern "C" __global__ void __launch_bounds__(1024) block_set(const struct kvt_set_args a)
{
	if (blockIdx.x == 0 && threadIdx.x < a.n)
		at<uint64_t>(a.words)[a.index[threadIdx.x]] = a.value[threadIdx.x];
}

extern "C" __global__ void __launch_bounds__(1024) block_advance(const struct kvt_advance_args a)
{
	uint32_t *rows = at<uint32_t>(a.rows);
	const uint32_t *tokens = at<const uint32_t>(a.tokens);

	for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < a.n_seqs; i += gridDim.x * blockDim.x)
		rows[i] += tokens[i + 1] - tokens[i];
}
