/* SPDX-License-Identifier: MIT */
/* An open set of weights as the readers fill it; its use is in include/kvtier-weights.h. */
#ifndef KVT_RUNTIME_WEIGHTS_H
#define KVT_RUNTIME_WEIGHTS_H

#include <stddef.h>
#include <stdint.h>
#include <time.h>

#include "kvtier-weights.h"

enum kvt_meta_type { KVT_META_UINT, KVT_META_INT, KVT_META_FLOAT, KVT_META_BOOL, KVT_META_STRING, KVT_META_ARRAY };

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

/* By key; NULL where there is none. */
const struct kvt_meta *kvt_weights_meta(const struct kvt_weights *w, const char *key);

/* Item @index (below count) of an array as a single value, or the single value itself. */
struct kvt_meta kvt_meta_item(const struct kvt_meta *m, uint64_t index);

/* -ESTALE if the file of shard @shard is not as it was when it was opened. */
int kvt_shard_unchanged(const struct kvt_weights *w, uint32_t shard);

/* For messages: the type's name, or "GGUF type 41". */
const char *kvt_tensor_type(const struct kvt_tensor *t, char buf[24]);

#endif
