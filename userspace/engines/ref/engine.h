/* SPDX-License-Identifier: MIT */
/*
 * A small Llama engine on libkvtier: the example of how an engine links it.
 * The cache is reached through kvtier.h alone; forward.c is the part to read.
 *
 * Its arithmetic is a function of a token's history only. Every output of a
 * matrix product is one chain of fused multiply-adds over k, ascending; sums
 * have a fixed shape; so cutting a prompt differently, more threads or another
 * instruction set give the same bits, and whole runs can be compared by them.
 *
 * Errors: a negative errno and one line in kvt_last_error().
 */
#ifndef KVT_REF_ENGINE_H
#define KVT_REF_ENGINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvtier.h"

/* ---- config.c: what config.json says ---- */

#define REF_EOS_MAX 8

enum ref_rope { REF_ROPE_PLAIN, REF_ROPE_LINEAR, REF_ROPE_LLAMA3 };

struct ref_config {
	uint32_t vocab, hidden, inter, layers, heads, kv_heads, head_dim;
	uint32_t context; /* positions */
	float eps;	  /* of RMSNorm */
	double rope_theta;
	enum ref_rope rope;
	double rope_factor, rope_low, rope_high, rope_context; /* linear: factor; llama3: all */
	bool tied;	     /* the output matrix is the embedding */
	int32_t bos;	     /* -1: none */
	uint32_t n_eos, eos[REF_EOS_MAX];
};

/* Parse @bytes of JSON. -EINVAL names the field, what it holds and what is supported. */
int ref_config_parse(const char *json, size_t bytes, struct ref_config *config);

/* The limits that every source of a config is held to. */
int ref_config_check(const struct ref_config *config);

int ref_config_load(const char *path, struct ref_config *config);

/* ---- file.c: one whole small file ---- */

/* Reads @path, NUL-terminated, to be freed. -EFBIG above @limit bytes. */
int ref_read_file(const char *path, uint64_t limit, char **data, size_t *bytes);

/* @text in quotes with what would not print replaced, cut to fit @buf; returns @buf. For names in messages. */
const char *ref_quote(char *buf, size_t size, const char *text);

/* ---- tokenizer.c ---- */

struct ref_tokenizer;

/*
 * Of @vocab tokens. @path: a llama-spm .json or a llama2.c .bin file; NULL:
 * a token is a byte. ref_tokenizer_find() names the one in a model directory
 * ("" if there is none, which means bytes).
 */
int ref_tokenizer_load(const char *path, const struct ref_config *config, struct ref_tokenizer **tokenizer);
int ref_tokenizer_find(const char *dir, char *path, size_t size);

/* From pieces as GGUF metadata has them; @types NULL: all normal. Nothing is kept. */
int ref_tokenizer_from(const char *const *pieces, const size_t *lengths, const float *scores, const int32_t *types,
		       const struct ref_config *config, struct ref_tokenizer **tokenizer);
void ref_tokenizer_free(struct ref_tokenizer *tokenizer);

/* The ids of @text, BOS first; to be freed. Every text has ids. */
int ref_encode(const struct ref_tokenizer *tokenizer, const char *text, size_t bytes, uint32_t **ids, uint32_t *n);

/* The bytes that @id adds behind @before; not NUL-terminated. Control tokens add none. */
const char *ref_decode(const struct ref_tokenizer *tokenizer, uint32_t before, uint32_t id, size_t *bytes);

/* ---- matrix.c: weights, packed for y = x W^T ---- */

#define REF_PANEL 32 /* outputs side by side */

/*
 * W [n][k], packed: panel p holds outputs [32p, 32p + 32), k-major, zeros where
 * there is no output. Element (j, i) is panels[(j / 32 * k + i) * 32 + j % 32].
 */
struct ref_matrix {
	float *panels; /* 64-byte aligned */
	uint32_t n, k;
};

uint64_t ref_matrix_bytes(uint32_t n, uint32_t k); /* of panels */
int ref_matrix_alloc(struct ref_matrix *m, uint32_t n, uint32_t k);
void ref_matrix_free(struct ref_matrix *m);
/* Row @j of W, in and out: [k]. */
void ref_matrix_set(struct ref_matrix *m, uint32_t j, const float *row);
void ref_matrix_row(const struct ref_matrix *m, uint32_t j, float *row);

/* ---- kernels (gemm.simd.c, ops.simd.c), a table for each instruction set ---- */

struct ref_kernels {
	/*
	 * y[r][j] = chain of fma over i of x[r][i] * W[j][i], from +0, for @rows rows of x and the outputs of
	 * @panels panels from @panel on. Strides in elements.
	 */
	void (*gemm)(const struct ref_matrix *w, uint32_t panel, uint32_t panels, const float *x, size_t x_stride,
		     uint32_t rows, float *y, size_t y_stride);
	/* y = x / sqrt(mean(x^2) + eps) * weight; the sum in 16 lanes, i mod 16, folded 8, 4, 2, 1 */
	void (*rmsnorm)(float *y, const float *x, const float *weight, uint32_t n, float eps);
	/* y = silu(gate) * up */
	void (*silu_mul)(float *y, const float *gate, const float *up, uint32_t n);
	/* x += y */
	void (*add)(float *x, const float *y, uint32_t n);
	/* One head, rotate-half: pairs (i, i + half) by angle i; @angles: [half] cosines, [half] sines. y may be x. */
	void (*rope)(float *y, const float *x, const float *angles, uint32_t half);
};

/* The best for this CPU, or by name; NULL if this CPU or build lacks it. */
const struct ref_kernels *ref_kernels(const char *isa);

/* ---- model.c: weights as floats, from a Hugging Face directory or a GGUF file ---- */

struct ref_layer {
	float *attn_norm, *mlp_norm; /* [hidden] */
	struct ref_matrix qkv;	     /* heads, then KV heads of K, then of V */
	struct ref_matrix out, gate_up, down;
};

struct ref_model {
	struct ref_config config;
	struct ref_tokenizer *tokenizer;
	struct ref_matrix embed, head; /* head.panels NULL: tied */
	float *norm;		       /* [hidden] */
	struct ref_layer *layers;
	double *frequency; /* [head_dim / 2] radians a position */
	uint64_t bytes;	   /* of weights in memory */
};

struct kvt_weights;
struct kvt_load_params;

/*
 * @tokenizer: a file, or NULL for what the model has. @how: runtime/loader.h;
 * NULL: as is best. -EINVAL also for a tensor that the configuration has no
 * place for; -ENOMEM before anything is loaded that memory cannot hold.
 */
int ref_model_load(const char *path, const char *tokenizer, const struct kvt_load_params *how, struct ref_model **model);
void ref_model_free(struct ref_model *model);

/* fingerprint.c: what all rows of the cache are a function of, beside the tokens. Reads all weights once. */
void ref_fingerprint(const struct ref_model *model, uint8_t fingerprint[KVT_FINGERPRINT]);

/* gguf.c: the same from GGUF metadata */
int ref_gguf_config(const struct kvt_weights *w, struct ref_config *config);
int ref_gguf_tokenizer(const struct kvt_weights *w, const struct ref_config *config, struct ref_tokenizer **tokenizer);

/* Of @position: [head_dim / 2] cosines, then sines. */
void ref_angles(const struct ref_model *model, uint32_t position, float *angles);

/* ---- forward.c, and forward_gpu.c: tokens in, logits out, through a kvtier cache ---- */

struct ref_engine;

/* The planes of a cache for @model: layer l has K in plane 2l and V in plane 2l + 1. @planes [2 * layers]. */
void ref_planes(const struct ref_config *config, enum kvt_codec codec, struct kvt_plane_params *planes);

struct kvt_gpu;

struct ref_engine_params {
	const struct ref_model *model; /* model and cache stay the caller's */
	struct kvt_cache *cache;
	struct kvt_gpu *gpu; /* what the scratch is allocated from: the CPU must be able to read it. NULL: its own */
	uint32_t tokens;     /* of a call, at most */
	uint32_t logits;     /* rows of logits of a call, at most; 0: 1 */
	const char *isa;     /* as ref_kernels() */
	bool on_gpu;	     /* compute on what the gpu tier lives on; @gpu and @isa have no use then */
};

/*
 * What an engine with @on_gpu takes of its GPU beside the cache, in bytes, where
 * sequences have at most @positions tokens. The cache's gpu_scratch_bytes:
 * kvt_batch_scratch() for one sequence.
 */
int64_t ref_gpu_bytes(const struct ref_config *config, uint32_t positions, uint32_t tokens, uint32_t logits);

/*
 * All memory is taken here, scratch by one allocation. Calls are for any sequence
 * of the cache, one at a time. @on_gpu: -ENOMEM before anything is taken that the
 * GPU cannot hold; no other call is for the sequence of the last ref_forward()
 * before ref_engine_rest().
 */
int ref_engine_create(const struct ref_engine_params *params, struct ref_engine **engine);
void ref_engine_free(struct ref_engine *engine);

/* Sequences are free for other calls, and hold what was appended. */
void ref_engine_rest(struct ref_engine *engine);

/*
 * Append @n tokens to @seq and give the logits behind the last @n_logits of
 * them: [n_logits][vocab], the engine's until the next call. @logits may be
 * NULL where @n_logits is 0.
 */
int ref_forward(struct ref_engine *engine, struct kvt_seq *seq, const uint32_t *tokens, uint32_t n, uint32_t n_logits,
		const float **logits);

/* The greatest logit's id, the lowest of equals. */
uint32_t ref_argmax(const float *logits, uint32_t n);

bool ref_is_eos(const struct ref_config *config, uint32_t id);

#endif
