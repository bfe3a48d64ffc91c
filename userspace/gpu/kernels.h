/* SPDX-License-Identifier: MIT */
/*
 * The kernels' arguments, shared by kernels/<module>.cu, the C twins (twins.c)
 * and whoever launches them. A kernel takes one struct by value: n_args is 1.
 *
 *	struct kvt_copy_args a = { ... };
 *	void *args[] = { &a };
 *	ops->launch(gpu, kernel, grid, block, 0, stream, args, 1);
 *
 * Addresses are a device's or a pinned host's; [n] u64 is an array of n there.
 * Any one-dimensional grid of blocks of 32 to 1024 threads (a multiple of 32)
 * does the whole work. Outputs are written, never read, but for sums. Aligned to 16 bytes is
 * fast; less is right and slower, down to one byte, or an element for append.
 *
 * Launched early (gpu.h), some are ahead of what is before them with what steps do not change: "append", "extend"
 * and "rope" read everything but rows and sums, products their W, attention also KV rows of sequences but
 * those of the step itself: as many as there are query tokens, the last ones; without "first".
 *
 * The function in the fatbin is <module>_<function>.
 */
#ifndef KVT_GPU_KERNELS_H
#define KVT_GPU_KERNELS_H

#include <stdint.h>

/* "block", "digest": out[i] = kvt_rows_digest(first[i], rows[i], blocks[i], row_bytes) */
struct kvt_digest_args {
	uint64_t blocks; /* [n] u64: where block i's rows begin */
	uint64_t rows;	 /* [n] u32: how many */
	uint64_t first;	 /* [n] u32: index of the first of them in its block; 0: every one begins at row 0 */
	uint64_t out;	 /* [n] u64 */
	uint32_t n;
	uint32_t row_bytes;
};

/* "block", "verify": *bad += how many of digests[i] are not wanted[i] */
struct kvt_verify_args {
	uint64_t digests; /* [n] u64 */
	uint64_t wanted;  /* [n] u64 */
	uint64_t bad;	  /* u64 */
	uint32_t n, reserved;
};

/* "block", "copy": bytes from src[i] to dst[i], gathering or scattering. No destination overlaps anything. */
struct kvt_copy_args {
	uint64_t dst;	/* [n] u64 */
	uint64_t src;	/* [n] u64 */
	uint64_t sizes; /* [n] u32: bytes of each, at most @bytes; 0: all are @bytes */
	uint32_t n;
	uint32_t bytes;
};

/*
 * "block", "append": row i, at src + i * src_stride, encoded to row rows[i] of
 * the block at blocks[i]; byte for byte what kvt_codec_convert() gives. No two
 * rows go to one place.
 */
struct kvt_append_args {
	uint64_t src;	     /* [n] rows of @elements of @src_type */
	uint64_t src_stride; /* bytes */
	uint64_t blocks;     /* [n] u64 */
	uint64_t rows;	     /* [n] u32 */
	uint32_t n;
	uint32_t elements;
	uint32_t src_type; /* enum kvt_codec */
	uint32_t dst_type; /* enum kvt_codec; a block's rows are elements of it, contiguous */
};

/*
 * Rows of a batch of sequences, as attention has them (below): sequence i has
 * source rows [tokens[i], tokens[i + 1]), which become the last of its rows[i].
 */

/*
 * "block", "extend": in each of one or two planes, append each row, encoded as by append, where its position
 * says: block blocks[i * table_stride + position / block_rows], row position %
 * block_rows. To what sums[] has at the same index, add how its digest
 * (kvt_row_digest) differs from that of a row of zeros, which was there before:
 * so the sums are right for rows that nobody writes, too. The grid has n_planes rows of
 * blocks, of 128 threads at most.
 */
struct kvt_extend_plane {
	uint64_t src;	     /* [tokens[n_seqs]] rows of @elements of @src_type */
	uint64_t src_stride; /* bytes */
	uint64_t blocks;     /* [n_seqs][table_stride] u64: addresses */
	uint64_t sums;	     /* [n_seqs][table_stride] u64: the blocks' digests */
	uint64_t zeros_hash; /* kvt_row_hash() of an encoded row of zeros */
	uint32_t block_rows;
	uint32_t elements;
	uint32_t src_type;
	uint32_t dst_type;
};

struct kvt_extend_args {
	struct kvt_extend_plane plane[2]; /* K and V in one launch */
	uint64_t tokens;		  /* [n_seqs + 1] u32 */
	uint64_t rows;			  /* [n_seqs] u32 */
	uint32_t n_planes;
	uint32_t n_seqs, table_stride, reserved;
};

/* "block", "set": words[index[i]] = value[i] of 64-bit words. */
#define KVT_SET_MAX 32
struct kvt_set_args {
	uint64_t words;
	uint32_t n, reserved;
	uint32_t index[KVT_SET_MAX];
	uint64_t value[KVT_SET_MAX];
};

/* "block", "advance": rows[i] += tokens[i + 1] - tokens[i], of u32. */
struct kvt_advance_args {
	uint64_t rows;	 /* [n_seqs] */
	uint64_t tokens; /* [n_seqs + 1] */
	uint32_t n_seqs, reserved;
};

/*
 * "engine": what a Llama layer does beside attention, bit for bit what
 * engines/ref does on the CPU (engine_math.h). Any one-dimensional grid does the
 * whole work. A matrix W [n][k] is in panels of 32 outputs: W[j][i] is
 * w[(j / 32 * k + i) * 32 + j % 32], zeros where there is no output.
 */
#define KVT_PANEL 32
#define KVT_EMBED_MAX 64

/* "embed": x[t] = row ids[t] of W. */
struct kvt_embed_args {
	uint64_t x; /* [n][k] f32 */
	uint64_t w;
	uint32_t n, k;
	uint32_t ids[KVT_EMBED_MAX];
};

enum kvt_gemm_before { KVT_GEMM_AS_IT_IS, KVT_GEMM_NORM, KVT_GEMM_SILU };

/*
 * "gemm_row" (blocks of 256 threads, for a few rows) and "gemm_tile" (of 128):
 * y = f(x) W^T, each output one chain of fused multiply-adds over k, ascending,
 * from +0. f is RMSNorm, or SwiGLU of k gates and the k ups behind them.
 */
struct kvt_gemm_args {
	uint64_t x;	   /* [rows], x_stride floats apart */
	uint64_t w;	   /* 16-byte aligned */
	uint64_t y;	   /* [rows], y_stride floats apart */
	uint64_t weight;   /* [k] of RMSNorm */
	uint32_t rows, n, k;
	uint32_t x_stride, y_stride;
	uint32_t before;   /* enum kvt_gemm_before */
	uint32_t add;	   /* 1: to what y holds */
	float eps;	   /* of RMSNorm */
};

/*
 * "rope": in each of n rows, query heads are turned into q, KV heads where they
 * are, rotate-half: pairs (i, i + dim / 2). The rows are a sequence's last.
 */
struct kvt_rope_args {
	uint64_t qkv;	 /* [n][heads + 2 kv_heads][dim] f32 */
	uint64_t q;	 /* [n][heads][dim] f32 */
	uint64_t angles; /* [positions][dim] f32: dim / 2 cosines, then as many sines */
	uint64_t rows;	 /* [1] u32: the sequence's */
	uint32_t n, heads, kv_heads, dim;
};

/* "measure", "read": *out ^= all 64-bit words of a range of a multiple of 16 bytes, so aligned. */
struct kvt_read_args {
	uint64_t from, bytes;
	uint64_t out; /* u64 */
};

/*
 * "attend": attention over paged rows, for a batch of sequences; what is asked
 * is kvt_attend()'s contract (kvtier.h). Which kernels to launch, on what grid,
 * with how much shared memory and scratch: gpu/attend.h.
 *
 * Everything that grows from step to step is read from device memory when the
 * kernel runs, so that a captured graph serves sequences that grow.
 *
 * Row r of sequence i's K is at k_blocks[i * table_stride + r / k_block_rows] +
 * (r % k_block_rows) * k_row_bytes; KV head h's elements begin h * k_dim
 * elements on; the same with v. Blocks may lie in device or pinned host memory,
 * in any mixture; address 0 stands for rows of zeros. Rows that no query may
 * see are not read. Blocks, rows and heads begin at multiples of 16 bytes.
 */
#define KVT_ATTEND_SPLIT 512 /* positions; splits begin at multiples of it */
#define KVT_ATTEND_TILE 64   /* positions; likewise */
#define KVT_ATTEND_FAST_TILE 128 /* of family fast, which has no splits */

struct kvt_attend_args {
	uint64_t map[16];  /* gpu.h's tensor_map() of the slab (below). The first: it is aligned as the whole */
	uint64_t q;	   /* [tokens][heads][k_dim] of q_type; a token's heads are contiguous */
	uint64_t out;	   /* [tokens][heads][v_dim] of out_type; likewise */
	uint64_t q_stride; /* bytes from token to token */
	uint64_t out_stride;
	uint64_t k_blocks; /* [n_seqs][table_stride] u64 */
	uint64_t v_blocks;
	uint64_t tokens;   /* [n_seqs + 1] u32: sequence i has query tokens [tokens[i], tokens[i + 1]) */
	uint64_t rows;	   /* [n_seqs] u32: its KV rows */
	uint64_t first;	   /* [n_seqs] u32: position of its first query token; 0: its tokens are its last rows */
	uint64_t slopes;   /* [heads] f32: ALiBi; 0: none. With a mask: bias = slope * mask */
	uint64_t sinks;	   /* [heads] f32 logits; 0: none */
	uint64_t mask;	   /* [tokens][mask_stride] of mask_type by position, added to scores; 0: none */
	uint64_t mask_stride; /* elements */
	uint64_t parts;	      /* scratch of decoding; 16-byte aligned, contents ignored */
	uint64_t slab, slab_bytes; /* blocks in it may be copied by @map; 0 bytes: none is */
	uint32_t n_seqs;      /* at most KVT_ATTEND_SEQS */
	uint32_t table_stride;
	uint32_t heads, kv_heads;
	uint32_t k_dim, v_dim; /* multiples of 8; at most KVT_ATTEND_K_MAX, KVT_ATTEND_V_MAX */
	uint32_t k_block_rows, v_block_rows; /* multiples of 16 */
	uint32_t k_row_bytes, v_row_bytes;
	uint32_t codec;	   /* of K and V: KVT_F16, KVT_BF16; queries are rounded to it */
	uint32_t q_type, out_type, mask_type; /* enum kvt_codec; a mask is KVT_F32 or KVT_F16 */
	uint32_t causal;   /* 0 or 1 */
	uint32_t window;   /* 0: none */
	uint32_t part_rows; /* query rows of a part: gpu/attend.h sets it */
	uint32_t fused; /* 1: the last of a row's splits to end merges them; gpu/attend.h sets it */
	float scale;	   /* not 0 */
	float softcap;	   /* 0: none */
	uint32_t family;   /* enum kvt_attn_family; a recipe goes by it */
	uint32_t reserved[11]; /* to a multiple of the map's alignment, 128 bytes */
};

/* Rows of a box: a power of two, of which blocks of K and of V, and halves of tiles, have a whole number. */
#define KVT_ATTEND_BOX_ROWS(k_block_rows, v_block_rows) \
	KVT_LOWEST_BIT((k_block_rows) | (v_block_rows) | KVT_ATTEND_FAST_TILE / 2)
#define KVT_LOWEST_BIT(x) ((x) & -(x))

#define KVT_ATTEND_SEQS 1024
#define KVT_ATTEND_COUNTERS 8192 /* u32, at the beginning of scratch */
#define KVT_ATTEND_K_MAX 576
#define KVT_ATTEND_V_MAX 512

#endif
