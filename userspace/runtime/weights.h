/* SPDX-License-Identifier: MIT */
/*
 * A model's weights on disk, whatever the format: tensors by name, metadata by
 * key, and their bytes. A safetensors file, a directory of them (one
 * model.safetensors, or model.safetensors.index.json and its shards), or a GGUF
 * file (v2, v3).
 *
 * Everything a file claims is checked against the file before memory is taken
 * for it. Files stay open; a file that changes size or modification time after
 * it was opened makes reads fail with -ESTALE. Errors name file, tensor and
 * reason: -EINVAL (content), -ENOTSUP (a type that cannot be decoded),
 * -ESTALE (changed under way), -EIO, -ENOMEM, or what open() said.
 *
 * Threads: an open object is constant; any call but close from any thread.
 */
#ifndef KVT_RUNTIME_WEIGHTS_H
#define KVT_RUNTIME_WEIGHTS_H

#include <stddef.h>
#include <stdint.h>
#include <time.h>

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

/* "F32", "BF16", "Q4_0", ...; "unknown" for KVT_DT_UNKNOWN. */
const char *kvt_dtype_name(enum kvt_dtype dtype);

/* @block elements take @bytes bytes (F6_E2M3: 4 and 3; Q8_0: 32 and 34); 0 and 0 for KVT_DT_UNKNOWN. */
void kvt_dtype_block(enum kvt_dtype dtype, uint32_t *block, uint32_t *bytes);

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

enum kvt_meta_type { KVT_META_UINT, KVT_META_INT, KVT_META_FLOAT, KVT_META_BOOL, KVT_META_STRING, KVT_META_ARRAY };

/* A string of a file; ends with a NUL; may hold others. GGUF strings need not be UTF-8. */
struct kvt_text {
	const char *s;
	uint64_t len;
};

struct kvt_meta {
	struct kvt_text key;
	uint32_t shard;
	uint32_t type;	      /* enum kvt_meta_type */
	uint32_t item_type;   /* of an array's items (never an array of arrays: those are skipped over) */
	uint32_t item_bytes;
	uint64_t count; /* items of an array, 1 otherwise */
	union {
		uint64_t u; /* UINT, BOOL */
		int64_t i;
		double f;
		struct kvt_text text;
		const void *items; /* ARRAY: struct kvt_text [count], or packed numbers */
	};
};

struct kvt_shard {
	char *path;
	int fd;
	uint64_t bytes; /* the file's size */
	struct timespec mtime;
	uint64_t data; /* where tensor data begins */
	void *header;  /* what names, shapes and metadata point into */
	size_t header_bytes;
	uint64_t *dims;
	struct kvt_text *texts;
};

enum kvt_weights_format { KVT_SAFETENSORS, KVT_GGUF };

struct kvt_weights {
	char *path; /* as it was given */
	uint32_t format; /* enum kvt_weights_format */
	uint32_t version; /* GGUF's */
	uint32_t n_shards, n_tensors, n_meta;
	struct kvt_shard *shards;
	struct kvt_tensor *tensors; /* by shard, then by offset */
	struct kvt_meta *meta;
	uint32_t *by_name; /* tensors in the order of their names */
	uint64_t bytes;	   /* of all tensors */
};

/*
 * Open a file or a directory. The format is the name's (.safetensors, .gguf,
 * .index.json), otherwise the content's.
 */
int kvt_weights_open(const char *path, struct kvt_weights **weights);
void kvt_weights_close(struct kvt_weights *weights);

/* By name; NULL where there is none. */
const struct kvt_tensor *kvt_weights_find(const struct kvt_weights *w, const char *name);
const struct kvt_meta *kvt_weights_meta(const struct kvt_weights *w, const char *key);

/*
 * Metadata by key, item @index of an array (0 for a single value): -ENOENT, -ERANGE, or -EINVAL where it is of
 * another type. kvt_weights_uint() takes any whole number that is not negative (also one that is written as text, as
 * safetensors must); kvt_weights_number() any number. Texts stay as long as @w.
 */
int kvt_weights_text(const struct kvt_weights *w, const char *key, uint64_t index, struct kvt_text *text);
int kvt_weights_uint(const struct kvt_weights *w, const char *key, uint64_t index, uint64_t *value);
int kvt_weights_number(const struct kvt_weights *w, const char *key, uint64_t index, double *value);

/* Item @index (below count) of an array as a single value, or the single value itself. */
struct kvt_meta kvt_meta_item(const struct kvt_meta *m, uint64_t index);

/* Items of the array @key, or -ENOENT, -EINVAL (not an array). */
int64_t kvt_weights_count(const struct kvt_weights *w, const char *key);

/* The tensor's bytes [first, first + bytes) as they are in the file. -ERANGE, -ESTALE, -EIO. */
int kvt_tensor_read(const struct kvt_weights *w, const struct kvt_tensor *t, uint64_t first, uint64_t bytes, void *dst);

/* Elements [first, first + n) as floats; @first and @n whole blocks of a quantised type. -ENOTSUP: by name. */
int kvt_tensor_read_f32(const struct kvt_weights *w, const struct kvt_tensor *t, uint64_t first, uint64_t n,
			float *dst);

/* 0 if kvt_tensor_read_f32() can decode the type: F32, F16, BF16, Q8_0, Q4_0. Else -ENOTSUP, naming it. */
int kvt_tensor_decodes(const struct kvt_weights *w, const struct kvt_tensor *t);

/* Bytes of such a tensor that are already in memory, to floats: @n elements from @src. */
void kvt_tensor_decode(enum kvt_dtype dtype, const void *src, uint64_t n, float *dst);

/* -ESTALE if the file of shard @shard is not as it was when it was opened. */
int kvt_shard_unchanged(const struct kvt_weights *w, uint32_t shard);

/* For messages: the type's name, or "GGUF type 41". */
const char *kvt_tensor_type(const struct kvt_tensor *t, char buf[24]);

#endif
