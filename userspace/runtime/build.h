/* SPDX-License-Identifier: MIT */
/* What the format readers share while they fill a struct kvt_weights. */
#ifndef KVT_RUNTIME_BUILD_H
#define KVT_RUNTIME_BUILD_H

#include <stdbool.h>

#include "runtime/weights.h"

struct kvt_build {
	struct kvt_weights *w;
	size_t tensor_room, meta_room;
};

/* A name as messages show it: cut to a length, control bytes as '?'. kvt_quote(name, len).s */
struct kvt_quoted {
	char s[100];
};
struct kvt_quoted kvt_quote(const char *s, size_t len);

/* Room for one more of an array that doubles. -ENOMEM. */
int kvt_grow(void **array, size_t *room, size_t used, size_t item_bytes);

/* The next tensor or metadata entry, zeroed and counted; NULL with a message. */
struct kvt_tensor *kvt_build_tensor(struct kvt_build *b, uint32_t shard);
struct kvt_meta *kvt_build_meta(struct kvt_build *b, uint32_t shard);

/* Open @path (copied) as the next shard; room must be there. */
int kvt_build_shard(struct kvt_weights *w, const char *path);

/* Refuse a metadata key that comes twice among entries from @first on. */
int kvt_build_unique_keys(const struct kvt_weights *w, uint32_t first, const char *path);

/* Sort by offset, bytes, name: tensors from @first on. */
void kvt_build_sort(struct kvt_weights *w, uint32_t first);

/* Sort by name and refuse a name that comes twice. */
int kvt_build_finish(struct kvt_weights *w);

/* Exactly @bytes from @offset of the shard's file; -ESTALE where it ends early. */
int kvt_shard_read(const struct kvt_weights *w, uint32_t shard, uint64_t offset, void *dst, uint64_t bytes);

/* What a file is that was taken for something else: ", it is a Git LFS pointer: ..." or "". */
const char *kvt_file_hint(const void *head, size_t bytes);

/* Compare names: by bytes, then by length. */
int kvt_name_compare(const char *a, size_t a_len, const char *b, size_t b_len);

#endif
