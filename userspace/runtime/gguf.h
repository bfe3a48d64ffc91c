/* SPDX-License-Identifier: MIT */
/*
 * GGUF, versions 2 and 3, little-endian: metadata and tensor infos, both counted
 * by the file. Every count, length and offset is checked against what is left
 * of the file before memory is taken for it.
 */
#ifndef KVT_RUNTIME_GGUF_H
#define KVT_RUNTIME_GGUF_H

#include "runtime/build.h"

#define KVT_GGUF_HEADER_MAX (256u << 20) /* bytes of metadata and tensor infos; real files have a few MiB */
#define KVT_GGUF_RANK_MAX   4
#define KVT_GGUF_DEPTH	    4 /* arrays of arrays */

/* Read the header of shard 0 and append its tensors and metadata. */
int kvt_gguf_read(struct kvt_build *b);

#endif
