/* SPDX-License-Identifier: MIT */
/*
 * The llama.cpp plug-in's core: KV tensors of ggml buffers as raw planes of a
 * cache, and the operations on them. It knows no version of ggml: shim.c
 * translates (abi.h says what it translates from).
 *
 * A ggml buffer is a range of addresses. The ranges of its KV tensors are
 * reserved and never hold bytes: an address there is a name for rows of planes.
 * What else lies in a buffer (a graph's intermediate results) is plain memory.
 *
 * A KV tensor of ne0 x ne1 x ne2 x ne3 elements is ne2 * ne3 planes (llama.cpp:
 * one for each stream) of ne1 rows of ne0 elements.
 *
 * The cache is created with the first byte, when the shapes of the heads are
 * known: all buffers that wait for one share it. Budgets are checked before,
 * as tensors are added.
 *
 * Threads: calls on buffers of one cache are the caller's to order, as ggml's
 * are; everything else may run concurrently.
 */
#ifndef KVT_ENGINES_GGML_PLUGIN_H
#define KVT_ENGINES_GGML_PLUGIN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvtier.h"

#define KG_ALIGN 4096 /* of tensors: ranges of KV tensors are whole pages */

/* ---- configuration ---- */

struct kg_config {
	struct kvt_cache_params cache; /* budgets are those of all caches together */
	uint32_t caches;   /* how many divide the budgets */
	bool all_planes;   /* every tensor of a suitable type is a KV tensor; for tests of operations */
	bool chosen;	   /* a device is offered, whatever the command line says */
	int log;	   /* enum kvt_log_level */
	char disk_dir[256], name[64], stats[256];
};

/*
 * From the environment (KVTIER_RAM_BYTES, ...) and, behind it, the file
 * KVTIER_CONFIG names. 1: configured; 0: nothing is set; -EINVAL, -ENOENT, ...
 */
int kg_config_read(struct kg_config *config, char *const *environ);

/* ---- buffers and KV tensors ---- */

struct kg_buffer;
struct kg_tensor;

void kg_setup(const struct kg_config *config);

/* @bytes of addresses, read as zeros where they are plain. */
int kg_buffer_create(uint64_t bytes, struct kg_buffer **buffer);
void kg_buffer_free(struct kg_buffer *buffer);
uint8_t *kg_buffer_base(const struct kg_buffer *buffer);

/* Is it one of what models keep beside K and V: recurrent states, indexes? It stays in plain memory. */
bool kg_is_state(const char *name);

/* May a tensor of this name and type be a KV tensor? 0: no; 1: yes; negative: it is one, and is refused. */
int kg_tensor_wanted(const char *name, uint32_t type, const char *type_name);

/* The range at @offset becomes a KV tensor. -ENOMEM: the budgets do not hold it. */
int kg_tensor_add(struct kg_buffer *buffer, const char *name, uint32_t codec, const int64_t ne[4], uint64_t offset,
		  struct kg_tensor **tensor);

/* Attention will read the tensor as rows of @heads, with @query_heads. */
void kg_tensor_shape(struct kg_tensor *tensor, uint32_t heads, uint32_t query_heads);

/* Bytes [at, at + n) of a tensor. On an error what was read is 0xff, which every codec decodes to NaN. */
int kg_tensor_read(struct kg_tensor *tensor, uint64_t at, void *data, uint64_t n);
int kg_tensor_write(struct kg_tensor *tensor, uint64_t at, const void *data, uint64_t n);
int kg_tensor_fill(struct kg_tensor *tensor, uint64_t at, uint8_t value, uint64_t n);
int kg_tensor_copy(struct kg_tensor *dst, struct kg_tensor *src, uint64_t to, uint64_t from, uint64_t n);

/* Everything in the buffer becomes @value; an earlier error of its cache is forgotten. */
int kg_buffer_clear(struct kg_buffer *buffer, uint8_t value);

/* Bytes that the budgets hold, and how many of them KV tensors have taken. */
void kg_memory(uint64_t *total, uint64_t *taken);

/* ---- operations ---- */

enum kg_type { /* beside enum kvt_codec */
	KG_I32 = 0x100, KG_I64, KG_OTHER,
};

/* A tensor as an operation sees it: of plain memory at @data, or @kv from byte @at on. */
struct kg_view {
	struct kg_tensor *kv;
	uint8_t *data;
	uint64_t at, row_bytes, rows; /* in the tensor that it is a view of: that one's rows */
	uint32_t type;
	int64_t ne[4];
	uint64_t nb[4]; /* bytes */
};

struct kg_attention {
	struct kg_view q, k, v, mask, sinks, out;
	bool has_mask, has_sinks;
	float scale, max_bias, softcap;
};

struct kg_rope {
	struct kg_view in, positions, factors, out;
	bool has_factors;
	int32_t dims, offset, mode, ctx_orig;
	float base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow;
};

/* Can the operation run, by types and shapes alone? The views' @kv may be NULL. */
bool kg_attention_fits(const struct kg_attention *a);

/* 0, or a negative errno with the reason in kvt_last_error(). */
int kg_attention(const struct kg_attention *a);
int kg_set_rows(const struct kg_view *out, const struct kg_view *in, const struct kg_view *index);
int kg_get_rows(const struct kg_view *out, const struct kg_view *in, const struct kg_view *index);
int kg_copy(const struct kg_view *out, const struct kg_view *in);
int kg_rope(const struct kg_rope *r);

#endif
