/* SPDX-License-Identifier: MIT */
/*
 * CPU attention over one split.
 *
 * Positions are cut at fixed absolute boundaries: tiles of KVT_TILE within
 * splits of KVT_SPLIT. A split has its own (max, sum, accumulator); splits are
 * merged in ascending order by kvt_split_merge(). Within a split, tiles are
 * taken in ascending order. Per query row the arithmetic is one fixed sequence:
 *
 *   s_j   = 8 partial sums, each a chain of fma over its d = i, i + 8, ... from +0; folded 4, 2, 1
 *   then scale, soft-cap, bias (one rounding each, in this order; slope * bias is an fma)
 *   p_j   = exp(s_j - max) by the one polynomial of this directory
 *   acc_d = chain of fma over the visible rows j, ascending
 *
 * Folding n sums by m adds sum i + m to sum i, i < m. Rows that are not visible
 * are skipped, not multiplied by zero; so is a row whose score is -inf. The sum
 * of p is 16 partial sums, j mod 16, folded 8, 4, 2, 1 at the end of the tile.
 * Vector lanes hold different results, or the partial sums above, whose number
 * is not the vector's width: every width gives the same bits.
 * Online softmax over tiles: FlashAttention-2 (Dao 2023), algorithm 1.
 */
#ifndef KVT_ATTENTION_KERNEL_H
#define KVT_ATTENTION_KERNEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define KVT_TILE 64   /* positions */
#define KVT_SPLIT 256 /* positions; a multiple of KVT_TILE */
#define KVT_HEAD_MAX 576 /* MLA: a latent of 512 and 64 rotated */
#define KVT_SCORE_PARTS 8  /* no more than the least head size: no part is empty */
#define KVT_FEW_ROWS 8	   /* of a KV head: for no more, rows of K and V are read once, in place, */
#define KVT_HEADS_ROWS 32  /* and so many query rows of several KV heads in one go */

/* What is the same for every row of a call. */
struct kvt_attn_shape {
	uint32_t k_dim, v_dim;	   /* 8 to KVT_HEAD_MAX, any integer */
	uint32_t k_codec, v_codec; /* enum kvt_codec */
	float scale, softcap;	   /* softcap 0: none */
	uint32_t mask_type;	   /* KVT_F32, KVT_F16 */
};

/* The rows of one split, for some KV heads. */
struct kvt_split_rows {
	uint64_t first;		 /* position of row 0: a multiple of KVT_SPLIT */
	uint32_t n;		 /* rows, 1 to KVT_SPLIT */
	uint32_t heads;		 /* KV heads, at least 1: how many changes no bit */
	const uint8_t *const *k; /* [n + more] whole rows; head h's elements at k[j] + k_offset + h * its size */
	const uint8_t *const *v; /* [n] */
	uint32_t more;		 /* rows that the next call reads first: asked for ahead, not read */
	uint32_t k_offset, v_offset; /* bytes */
};

/* Query rows that read these KV heads: any tokens, any heads of the group. */
struct kvt_query_rows {
	uint32_t m;		   /* rows in all, as many of each KV head: head 0's first */
	const float *const *q;	   /* [m] -> [k_dim] */
	const uint64_t *lo, *hi;   /* [m] row i may see positions [lo[i], hi[i]) */
	const void *const *mask;   /* [m] -> mask elements by position (0 is position 0), or NULL: none */
	const float *slope;	   /* [m] or NULL. With a mask: bias = slope * mask (NULL: mask); without: slope * (j - pos) */
	const uint64_t *pos;	   /* [m] own position, for slope without mask */
};

/*
 * (max, sum, accumulator) of m rows: -inf, 0 and zeros where nothing was seen;
 * a sum of NaN for a row whose output is NaN.
 */
struct kvt_attn_state {
	float *max; /* [m] */
	float *sum; /* [m] */
	float *acc; /* [m][v_dim] */
};

/* Functions set round-to-nearest with denormals for themselves and restore the caller's modes. */
struct kvt_attn_kernels {
	const char *isa; /* "avx2", ... */
	/* Bytes of scratch that split() needs for up to @m rows; 64-byte aligned, contents ignored. */
	size_t (*scratch_bytes)(const struct kvt_attn_shape *, uint32_t m);
	/* One whole split: @out is overwritten. */
	void (*split)(const struct kvt_attn_shape *, const struct kvt_split_rows *, const struct kvt_query_rows *,
		      struct kvt_attn_state *out, void *scratch);
	/*
	 * @into = merge(@into, @part), rows i of both; @into covers the lower positions. With "nothing seen" on one
	 * side it is a copy of the other, bit for bit.
	 */
	void (*merge)(struct kvt_attn_state *into, const struct kvt_attn_state *part, uint32_t m, uint32_t v_dim);
	/*
	 * Row i's output: acc / sum, sinks[i] (NULL: none; -inf: no sink) taken into the sum; zeros where nothing was
	 * seen, whatever the sink; every NaN is 0x7fc00000. A sink of NaN or +inf makes the row NaN.
	 */
	void (*finish)(const struct kvt_attn_state *, uint32_t m, uint32_t v_dim, const float *sinks,
		       float *const *out);
};

/* The best for this CPU, or by name ("portable", "avx2", "avx512", "neon"); NULL if this CPU or build lacks it. */
const struct kvt_attn_kernels *kvt_attn_kernels(const char *isa);

/* Set a state to "nothing seen". */
void kvt_attn_state_clear(struct kvt_attn_state *, uint32_t m, uint32_t v_dim);

#endif
