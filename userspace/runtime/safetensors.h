/* SPDX-License-Identifier: MIT */
/*
 * safetensors: 8 bytes of little-endian length n, n bytes of JSON, tensor data.
 * Stricter than the reference implementation where its text is: the header
 * begins with '{', no name or metadata key comes twice, every byte of data
 * belongs to exactly one tensor. As lax as it: white space may follow the
 * JSON, unknown fields of an entry are ignored, "__metadata__" may be null.
 */
#ifndef KVT_RUNTIME_SAFETENSORS_H
#define KVT_RUNTIME_SAFETENSORS_H

#include <stdbool.h>

#include "runtime/build.h"
#include "runtime/json.h"

#define KVT_SAFETENSORS_HEADER_MAX 100000000u

/* Read the header of an opened shard and append its tensors and metadata. */
int kvt_safetensors_read(struct kvt_build *b, uint32_t shard);

/* The same from text in memory: the shard's path, bytes and data are set. @text is decoded in place and must stay. */
int kvt_safetensors_parse(struct kvt_build *b, uint32_t shard, char *text, size_t bytes);

/* model.safetensors.index.json: which shard holds which tensor. */
struct kvt_shard_index {
	struct kvt_shard_entry {
		struct kvt_json_string name, file;
	} *entries; /* by name */
	size_t n_entries;
	const char **files; /* by name, each once */
	uint32_t n_files;
	bool has_total;
	uint64_t total_size;
};

#define KVT_SHARDS_MAX 4096

/* @text is decoded in place and must stay; @path begins messages. */
int kvt_shard_index_parse(const char *path, char *text, size_t bytes, struct kvt_shard_index *index);
void kvt_shard_index_free(struct kvt_shard_index *index);

/* Open an index, its shards, and check each against the other. */
int kvt_safetensors_open_index(struct kvt_weights *w, const char *path);

#endif
