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
 * does the whole work. Outputs are written, never read. Aligned to 16 bytes is
 * fast; less is right and slower, down to one byte, or an element for append.
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

#endif
