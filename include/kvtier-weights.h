/* SPDX-License-Identifier: MIT */
/*
 * A model's weights on disk: a safetensors file, a directory of them (one
 * model.safetensors, or model.safetensors.index.json and its shards), or a GGUF
 * file (v2, v3); and a loader that brings tensors into memory, or a GPU's, at
 * the disk's speed.
 *
 * Everything a file claims is checked against the file before memory is taken
 * for it. Files stay open; a file that changes size or modification time after
 * it was opened makes reads fail with -ESTALE.
 *
 * Errors name file, tensor and reason: -EINVAL (content), -ENOTSUP (a type that
 * cannot be decoded), -ESTALE (changed under way), -EIO, -ENOMEM, or what open()
 * said.
 *
 * Threads: an open object is constant; any call but close from any thread.
 */
#ifndef KVTIER_WEIGHTS_H
#define KVTIER_WEIGHTS_H

#include <stdint.h>

#include "kvtier.h"

#ifdef __cplusplus
extern "C" {
#endif

struct kvt_weights;
struct kvt_gpu; /* kvt_gpu_open(), in kvtier-arena.h */

/* Element types. One name serves both formats where they mean the same. */
enum kvt_dtype {
	/* safetensors has these 22; GGUF has some */
	KVT_DT_BOOL, KVT_DT_F4, KVT_DT_F6_E2M3, KVT_DT_F6_E3M2, KVT_DT_U8, KVT_DT_I8, KVT_DT_F8_E5M2, KVT_DT_F8_E4M3,
	KVT_DT_F8_E8M0, KVT_DT_F8_E4M3FNUZ, KVT_DT_F8_E5M2FNUZ, KVT_DT_I16, KVT_DT_U16, KVT_DT_F16, KVT_DT_BF16,
	KVT_DT_I32, KVT_DT_U32, KVT_DT_F32, KVT_DT_C64, KVT_DT_F64, KVT_DT_I64, KVT_DT_U64,
	KVT_DT_SAFETENSORS, /* their number */
	/* GGUF only: blocks of elements */
	KVT_DT_Q4_0 = KVT_DT_SAFETENSORS, KVT_DT_Q4_1, KVT_DT_Q5_0, KVT_DT_Q5_1, KVT_DT_Q8_0, KVT_DT_Q8_1,
	KVT_DT_Q2_K, KVT_DT_Q3_K, KVT_DT_Q4_K, KVT_DT_Q5_K, KVT_DT_Q6_K, KVT_DT_Q8_K, KVT_DT_IQ2_XXS, KVT_DT_IQ2_XS,
	KVT_DT_IQ3_XXS, KVT_DT_IQ1_S, KVT_DT_IQ4_NL, KVT_DT_IQ3_S, KVT_DT_IQ2_S, KVT_DT_IQ4_XS, KVT_DT_IQ1_M,
	KVT_DT_TQ1_0, KVT_DT_TQ2_0, KVT_DT_MXFP4,
	KVT_DT_UNKNOWN, /* a GGUF type this reader has no name for: listed, never read */
	KVT_DTYPES
};

/* "F32", "BF16", "Q4_0", ...; "unknown" for KVT_DT_UNKNOWN; NULL for another number. */
const char *kvt_dtype_name(enum kvt_dtype dtype);

/* @block elements take @bytes bytes (F6_E2M3: 4 and 3; Q8_0: 32 and 34); 0 and 0 for KVT_DT_UNKNOWN. */
void kvt_dtype_block(enum kvt_dtype dtype, uint32_t *block, uint32_t *bytes);

/* ---- what a file holds ---------------------------------------------------- */

/* The library's, as long as the weights are open. */
struct kvt_tensor {
	const char *name; /* ends with a NUL; may hold others (then name_len > strlen(name)) */
	uint32_t name_len;
	uint32_t dtype;	      /* enum kvt_dtype */
	uint32_t ggml_type;   /* GGUF: the file's number */
	uint32_t shard;	      /* index of the file */
	uint64_t rank;	      /* 0: a scalar. safetensors sets no limit */
	const uint64_t *shape; /* [rank], outermost first: a weight of a linear layer is [out, in] in both formats */
	uint64_t elements;
	uint64_t offset; /* in the file, of any alignment */
	uint64_t bytes;	 /* 0 for KVT_DT_UNKNOWN */
};

enum kvt_weights_format { KVT_SAFETENSORS, KVT_GGUF };

struct kvt_weights_info {
	uint32_t size;
	uint32_t format;  /* enum kvt_weights_format */
	uint32_t version; /* GGUF's; else 0 */
	uint32_t n_shards, n_tensors;
	uint32_t reserved;
	uint64_t bytes; /* of all tensors */
};

/*
 * Open a file or a directory. The format is the name's (.safetensors, .gguf,
 * .index.json), otherwise the content's. Reads headers, no tensors.
 */
int kvt_weights_open(const char *path, struct kvt_weights **weights);
void kvt_weights_close(struct kvt_weights *weights);

/* Fill @info, its size set. -EINVAL: it is not. */
int kvt_weights_info(const struct kvt_weights *w, struct kvt_weights_info *info);

/* Tensor @index, in the order of shards, then of offsets; NULL from n_tensors on. */
const struct kvt_tensor *kvt_weights_tensor(const struct kvt_weights *w, uint32_t index);

/* By name; NULL where there is none. */
const struct kvt_tensor *kvt_weights_find(const struct kvt_weights *w, const char *name);

/* A string of a file; ends with a NUL; may hold others. GGUF strings need not be UTF-8. */
struct kvt_text {
	const char *s;
	uint64_t len;
};

/*
 * Metadata by key, item @index of an array (0 for a single value): -ENOENT, -ERANGE, or -EINVAL where it is of
 * another type. kvt_weights_uint() takes any whole number that is not negative (also one that is written as text, as
 * safetensors must); kvt_weights_number() any number. Texts stay as long as @w.
 */
int kvt_weights_text(const struct kvt_weights *w, const char *key, uint64_t index, struct kvt_text *text);
int kvt_weights_uint(const struct kvt_weights *w, const char *key, uint64_t index, uint64_t *value);
int kvt_weights_number(const struct kvt_weights *w, const char *key, uint64_t index, double *value);

/* Items of the array @key, or -ENOENT, -EINVAL (not an array). */
int64_t kvt_weights_count(const struct kvt_weights *w, const char *key);

/* ---- tensors, one at a time ----------------------------------------------- */

/* The tensor's bytes [first, first + bytes) as they are in the file. -ERANGE, -ESTALE, -EIO. */
int kvt_tensor_read(const struct kvt_weights *w, const struct kvt_tensor *t, uint64_t first, uint64_t bytes, void *dst);

/*
 * Elements [first, first + n) as floats; @first and @n whole blocks of a quantised type. -ENOTSUP: of a type that
 * cannot be decoded (F32, F16, BF16, Q8_0 and Q4_0 can), by name; -ERANGE, -ESTALE, -EIO.
 */
int kvt_tensor_read_f32(const struct kvt_weights *w, const struct kvt_tensor *t, uint64_t first, uint64_t n,
			float *dst);

/* 0 if kvt_tensor_read_f32() can decode the type. Else -ENOTSUP, naming it. */
int kvt_tensor_decodes(const struct kvt_weights *w, const struct kvt_tensor *t);

/* What is in memory already, to floats: @n elements of such a type. -ENOTSUP; -EINVAL: no whole blocks. */
int kvt_tensor_decode(enum kvt_dtype dtype, const void *src, uint64_t n, float *dst);

/* ---- the loader ----------------------------------------------------------- */

/*
 * Several large aligned O_DIRECT reads in flight into a small staging ring, each
 * cut to the tensors it covers and copied on while the next ones are read. Other
 * ways to the same bytes, chosen for each shard: buffered reads and mmap (no
 * O_DIRECT there, or asked for). All give the same bytes or an error.
 *
 * The rule: 64 places of what is asked for are looked up in the page cache. Three
 * quarters of them there: buffered reads, which are copies by the CPU, on as many
 * cores as reads are in flight. Else O_DIRECT, whatever the sizes of the tensors.
 */
enum kvt_load_mode { KVT_LOAD_AUTO, KVT_LOAD_DIRECT, KVT_LOAD_BUFFERED, KVT_LOAD_MMAP, KVT_LOAD_MODES };

/* One tensor and where it goes: t->bytes bytes at @host, or at the address @device of the params' GPU. */
struct kvt_load_item {
	const struct kvt_tensor *tensor;
	void *host;
	uint64_t device;
};

/* Staging takes depth x piece_bytes, and 64 KiB of stack a read where threads do them. */
struct kvt_load_params {
	uint32_t size;
	uint32_t mode; /* enum kvt_load_mode; DIRECT too gives way to MMAP where there is no O_DIRECT */
	uint32_t io;   /* enum kvt_io_kind (kvtier.h): io_uring, or threads where it is denied */
	uint32_t depth; /* reads in flight, at most 64; 0: one a core, from 4 to 8 */
	uint64_t piece_bytes; /* of one read: a multiple of 4 KiB, at most 1 GiB; 0: 4 MiB. Of cached files, at most 1 MiB */
	struct kvt_gpu *gpu; /* for items with @device; else NULL */
	/* After each piece, bytes, on the calling thread; not 0 ends the load with -ECANCELED. NULL: none. */
	int (*progress)(void *user, uint64_t done, uint64_t total);
	void *user;
};

struct kvt_load_report {
	uint32_t size;
	uint32_t pinned;	/* 1: the staging ring is */
	uint64_t bytes;		/* delivered */
	uint64_t read_bytes;	/* read for that, with alignment and small gaps */
	uint64_t staging_bytes; /* taken meanwhile */
	uint32_t shards[KVT_LOAD_MODES]; /* read by each mode (never AUTO) */
	const char *io;		/* "io_uring", "threads", "none" (mmap only) */
};

/*
 * Load @n tensors of @w. @params NULL: the defaults; @report may be NULL. On an
 * error the destinations' contents are undefined; nothing is in flight any more.
 * -EINVAL: a parameter, or an item without exactly one destination; -ENOMEM
 * (staging or stacks), -ESTALE (a file changed), -ECANCELED, -EPERM / -ENOSYS
 * (io_uring asked for by name and denied), or what a read or the GPU said.
 */
int kvt_load(const struct kvt_weights *w, const struct kvt_load_item *items, uint32_t n,
	     const struct kvt_load_params *params, struct kvt_load_report *report);

/*
 * Place all tensors of @w in one block of host memory at @base (page aligned)
 * as they lie in their files, which is what reads go straight into. A tensor
 * whose place in the file does not suit its elements is put behind them.
 * items [n_tensors] get tensor and host. Returns the bytes of the block;
 * with @base NULL it does only that.
 */
uint64_t kvt_load_layout(const struct kvt_weights *w, void *base, struct kvt_load_item *items);

/*
 * Whether @bytes of weights can be had where they are to go, before anything is
 * allocated: the memory free on @gpu, or (NULL) what the kernel and the cgroup
 * say is left of RAM. -ENOMEM: how much is asked, how much there is.
 */
int kvt_load_fits(uint64_t bytes, struct kvt_gpu *gpu);

#ifdef __cplusplus
}
#endif
#endif
