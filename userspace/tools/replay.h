/* SPDX-License-Identifier: MIT */
/* A trace through a policy: what a prefix cache in tiers would have had, and what the best possible would. */
#ifndef KVT_TOOLS_REPLAY_H
#define KVT_TOOLS_REPLAY_H

#include "policy/policy.h"
#include "tools/trace.h"

struct replay_params {
	const struct kvt_policy_ops *policy;
	uint32_t frames[KVT_TIERS]; /* blocks that a tier holds; at least one is not 0 */
	uint64_t token_bytes;
	uint64_t load_bytes_per_s[KVT_TIERS]; /* from a tier to where blocks are used; 0: at once */
	uint64_t tokens_per_s;		      /* of prefill */
	/* called after each request; NULL: not */
	void (*progress)(void *arg, uint64_t requests);
	void *arg;
};

struct replay_result {
	uint64_t hits[KVT_TIERS]; /* blocks */
	uint64_t tokens_hit, tokens_computed;
	uint64_t loaded_bytes[KVT_TIERS]; /* from a tier, for a hit */
	uint64_t stored_bytes[KVT_TIERS]; /* to a tier, from the one above */
	uint64_t dropped;		  /* blocks */
	uint64_t decisions;		  /* a digest of all victims, in order: the same trace gives the same */
	double ttft_p50, ttft_p99;	  /* s: loading and computing, without queueing and decoding */
};

int replay_run(const struct trace *trace, const struct replay_params *params, struct replay_result *result);

/* Belady's optimum: the most hits that @frames blocks can have, whatever the policy. */
int replay_optimum(const struct trace *trace, uint64_t frames, uint64_t *hits);

#endif
