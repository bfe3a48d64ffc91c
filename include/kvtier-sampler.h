/* SPDX-License-Identifier: MIT */
/*
 * From logits to a token: penalties, filters, temperature, a draw.
 *
 * A token is a pure function of the logits, the parameters, the history, and
 * (seed, sequence, position); of nothing else: not of the batch, the thread,
 * the compiler, the instruction set or the C library. Only IEEE-754 binary64
 * operations are used, each rounded once, in an order fixed by the source; the
 * build must keep to them (no -ffast-math, no x87, no flush to zero).
 *
 * The stages, in their default order:
 *
 *   bias         logit += bias of the token. -inf bans a token
 *   penalties    for a token that occurs c > 0 times in the history:
 *                logit = logit > 0 ? logit / repetition : logit * repetition
 *                logit -= c * frequency + presence
 *   top_n_sigma  keep logits >= max - n * sigma; sigma is the population
 *                standard deviation of the finite logits. Never sees temperature
 *   top_k        keep the k largest
 *   top_p        keep the smallest set of largest probabilities whose sum is
 *                at least p; the token that crosses p is in
 *   min_p        keep probabilities >= min_p times the largest
 *   temperature  divide the logits by it
 *
 * params.order may name any order in which bias and penalties come before
 * top_k, top_p, min_p and temperature. top_n_sigma may also come before bias
 * and penalties: it then judges the model's own logits. A filter's
 * probabilities are the softmax over what the filters before it kept, at the
 * temperature if that comes before, else at 1.
 *
 * Rules:
 *  - Of equal logits the lower id counts as the larger.
 *  - No filter removes the largest; so at least one token always survives.
 *  - Temperature 0 is greedy: the largest logit after bias and penalties.
 *  - Sums are compared to p, and probabilities to min_p, to the precision that
 *    the logits have as floats (about 1e-7, towards keeping).
 *  - A NaN among the logits is -EDOM, naming it. -inf is never kept, never
 *    drawn, and not counted in sigma. Tokens at +inf share all probability.
 *    No token above -inf: -EDOM.
 *  - Ids in the history that are not below the vocabulary are ignored.
 *
 * Cost: at most two passes over the logits, then work on what survives; no
 * allocation after kvt_sampler_create().
 */
#ifndef KVTIER_SAMPLER_H
#define KVTIER_SAMPLER_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct kvt_sampler;

enum kvt_sampler_stage {
	KVT_STAGE_END, /* ends an order; an order that begins with it is the default */
	KVT_STAGE_BIAS,
	KVT_STAGE_PENALTIES,
	KVT_STAGE_TOP_N_SIGMA,
	KVT_STAGE_TOP_K,
	KVT_STAGE_TOP_P,
	KVT_STAGE_MIN_P,
	KVT_STAGE_TEMPERATURE,
	KVT_STAGES
};

/* "bias", "penalties", "top_n_sigma", ...; NULL for another number. */
const char *kvt_sampler_stage_name(enum kvt_sampler_stage stage);

struct kvt_logit_bias {
	uint32_t token;
	float bias; /* finite, or -inf: never this token */
};

/*
 * Do not compute what cannot matter: when the draw falls on the largest logit
 * however the others share the rest (always, when the logits are one-hot to
 * float precision), that token is returned without softmax or selection. The
 * token is the same with and without.
 */
#define KVT_SAMPLER_ADAPTIVE (1u << 0)

/*
 * Begin with KVT_SAMPLER_PARAMS_INIT: zero is not "off" for all of these. Where
 * a caller's older header lacks a field, the stage is off.
 */
struct kvt_sampler_params {
	uint32_t size;
	uint32_t flags;		   /* KVT_SAMPLER_* */
	double temperature;	   /* 0: greedy; else > 0, finite */
	double top_p;		   /* 0 to 1; 1: off; 0: the largest alone */
	double min_p;		   /* 0 to 1; 0: off */
	double top_n_sigma;	   /* finite; 0 or less: off */
	double repetition_penalty; /* > 0, finite; 1: off */
	double presence_penalty;   /* finite; 0: off */
	double frequency_penalty;  /* finite; 0: off */
	uint32_t top_k;		   /* 0: off */
	uint32_t penalty_last_n;   /* count only the history's last n tokens; 0: all of it */
	uint64_t seed;
	const struct kvt_logit_bias *bias; /* [n_bias], each token at most once */
	uint32_t n_bias;
	uint8_t order[8]; /* enum kvt_sampler_stage, ended by KVT_STAGE_END; every stage that is on, once */
	uint32_t reserved;
};

#define KVT_SAMPLER_PARAMS_INIT \
	{ .size = sizeof(struct kvt_sampler_params), .temperature = 1, .top_p = 1, .repetition_penalty = 1 }

/*
 * One row of a batch. The history is whatever the penalties shall count: the
 * prompt with the output (as llama.cpp) or the output alone (as OpenAI's API).
 */
struct kvt_sample {
	const struct kvt_sampler_params *params; /* may be shared by many */
	const float *logits;			 /* [vocab] */
	const uint32_t *history;		 /* [n_history], oldest first; NULL where 0 */
	uint32_t n_history;
	int32_t error;	   /* out: 0, or this row's negative errno */
	uint64_t sequence; /* with seed and position: the draw */
	uint64_t position; /* of the token drawn: give each (seed, sequence, position) one draw */
	uint32_t token;	   /* out, where error is 0 */
	uint32_t kept;	   /* out: tokens that survived the filters; 0 where adaptive did not need to know */
};

/*
 * A sampler for vocabularies of @vocab tokens (1 to 2^24), with all the memory
 * it will need: about 40 bytes a token. -EINVAL, -ENOMEM. One thread at a time
 * may use a sampler; it keeps nothing from one call to the next.
 */
int kvt_sampler_create(uint32_t vocab, struct kvt_sampler **sampler);
void kvt_sampler_destroy(struct kvt_sampler *sampler);

/* 0, or -EINVAL or -E2BIG with a message naming the first parameter that is out of range for @vocab tokens. */
int kvt_sampler_check(const struct kvt_sampler_params *params, uint32_t vocab);

/*
 * Sample @n rows. Rows do not affect each other: one that fails has its error
 * set and the others their tokens. Returns 0, or the first failing row's error
 * (its message names the row). -EINVAL: a parameter; -EDOM: the logits.
 */
int kvt_sampler_sample(struct kvt_sampler *sampler, struct kvt_sample *rows, uint32_t n);

/*
 * The distribution that the row's token is drawn from. Any output may be NULL:
 * @ids the tokens kept, ascending; @probs their probabilities; @logits_after
 * all logits after bias and penalties. Each has room for the whole vocabulary.
 * row->token and row->kept are set too. Returns the tokens kept (greedy: 1).
 */
int64_t kvt_sampler_distribution(struct kvt_sampler *sampler, struct kvt_sample *row, uint32_t *ids, double *probs,
				 double *logits_after);

#ifdef __cplusplus
}
#endif
#endif
