/* SPDX-License-Identifier: MIT */
/* The scratch of a Llama-like decoder, from its configuration: one row a buffer, laid out by an arena. */
#ifndef KVT_RUNTIME_SCRATCH_H
#define KVT_RUNTIME_SCRATCH_H

#include "runtime/arena.h"

/* The steps of a pass. Those from NORM to ADD_MLP repeat for every layer. */
enum kvt_decoder_step {
	KVT_STEP_EMBED,
	KVT_STEP_NORM,	     /* layers begin: h = norm(x) */
	KVT_STEP_QKV,	     /* qkv = W h */
	KVT_STEP_ROPE,	     /* q = turned; K and V rows leave */
	KVT_STEP_ATTEND,     /* attn = attention(q) */
	KVT_STEP_OUT,	     /* h = W attn */
	KVT_STEP_ADD_ATTN,   /* x += h; h = norm(x) */
	KVT_STEP_GATE_UP,    /* gate_up = W h */
	KVT_STEP_SWIGLU,     /* in place */
	KVT_STEP_DOWN,	     /* h = W gate_up */
	KVT_STEP_ADD_MLP,    /* layers end: x += h */
	KVT_STEP_FINAL_NORM, /* h = norm(x) */
	KVT_STEP_HEAD,	     /* logits = W h */
	KVT_STEP_SAMPLE,
	KVT_DECODER_STEPS
};

/* All that the sizes follow from. */
struct kvt_decoder_shape {
	uint32_t hidden, inter, heads, kv_heads, head_dim, vocab;
	uint32_t batch;	 /* sequences in a pass: rows of logits */
	uint32_t tokens; /* of all sequences in a pass: the longest piece of a prompt, at least @batch */
};

/*
 * X(name, elements a row, rows, bytes an element, first step, last step), s being the shape.
 * qkv, q and attn have no lifetime in common with gate_up or logits; h is reborn at OUT and DOWN.
 */
#define KVT_DECODER_SCRATCH(X)                                                                                    \
	X(ids, 1, s->tokens, 4, KVT_STEP_EMBED, KVT_STEP_EMBED)                                                   \
	X(x, s->hidden, s->tokens, 4, KVT_STEP_EMBED, KVT_STEP_FINAL_NORM)                                        \
	X(angles, s->head_dim, s->tokens, 4, KVT_STEP_EMBED, KVT_STEP_ROPE)                                       \
	X(h, s->hidden, s->tokens, 4, KVT_STEP_NORM, KVT_STEP_QKV)                                                \
	X(qkv, (s->heads + 2ull * s->kv_heads) * s->head_dim, s->tokens, 4, KVT_STEP_QKV, KVT_STEP_ROPE)          \
	X(q, (uint64_t)s->heads * s->head_dim, s->tokens, 4, KVT_STEP_ROPE, KVT_STEP_ATTEND)                      \
	X(attn, (uint64_t)s->heads * s->head_dim, s->tokens, 4, KVT_STEP_ATTEND, KVT_STEP_OUT)                    \
	X(h_attn, s->hidden, s->tokens, 4, KVT_STEP_OUT, KVT_STEP_GATE_UP)                                        \
	X(gate_up, 2ull * s->inter, s->tokens, 4, KVT_STEP_GATE_UP, KVT_STEP_DOWN)                                \
	X(h_mlp, s->hidden, s->tokens, 4, KVT_STEP_DOWN, KVT_STEP_ADD_MLP)                                        \
	X(h_final, s->hidden, s->batch, 4, KVT_STEP_FINAL_NORM, KVT_STEP_HEAD)                                    \
	X(logits, s->vocab, s->batch, 4, KVT_STEP_HEAD, KVT_STEP_SAMPLE)                                          \
	X(chosen, 1, s->batch, 4, KVT_STEP_SAMPLE, KVT_STEP_SAMPLE)

enum kvt_decoder_buffer {
#define KVT_ROW(name, elements, rows, bytes, first, last) KVT_ARENA_ENUM(KVT_SCRATCH_, name),
	KVT_DECODER_SCRATCH(KVT_ROW)
#undef KVT_ROW
	KVT_DECODER_BUFFERS
};

#define KVT_ROW(name, elements, rows, bytes, first, last)                                        \
	KVT_ARENA_CHECK(name, first, last);                                                      \
	_Static_assert((last) < KVT_DECODER_STEPS, "buffer " #name " outlives the pass");
KVT_DECODER_SCRATCH(KVT_ROW)
#undef KVT_ROW

/* Fill @buffers, and make a plan of them. */
static inline struct kvt_arena_plan kvt_decoder_scratch(const struct kvt_decoder_shape *s,
							struct kvt_arena_buffer buffers[KVT_DECODER_BUFFERS])
{
#define KVT_ROW(name, elements, rows, bytes, first, last)                                                       \
	buffers[KVT_SCRATCH_##name] = (struct kvt_arena_buffer)KVT_ARENA_BUFFER(                                \
		name, kvt_arena_product(elements, rows, bytes), first, last);
	KVT_DECODER_SCRATCH(KVT_ROW)
#undef KVT_ROW
	return (struct kvt_arena_plan){ sizeof(struct kvt_arena_plan), KVT_DECODER_BUFFERS, buffers, KVT_STEP_NORM,
					KVT_STEP_ADD_MLP };
}

#endif
