/* SPDX-License-Identifier: MIT */
/* The options of kvtier run. */
#ifndef KVT_TOOLS_RUN_OPTIONS_H
#define KVT_TOOLS_RUN_OPTIONS_H

#include <stdint.h>

#include "kvtier-sampler.h"

#define RUN_UNSET UINT64_MAX

struct run_options {
	const char *model, *tokenizer, *prompt, *prompt_file, *disk_dir, *store, *warm, *stats, *logits;
	uint64_t max_tokens, threads, chunk, device;
	uint64_t gpu, pinned, ram, disk, block; /* bytes; RUN_UNSET: not given, but for block; so @device */
	uint64_t kv_type, host, io, backend, policy, progress; /* enums */
	uint64_t untiered, no_fast_load;	/* flags */
	uint64_t top_k, penalty_last_n;		/* as in @sampling, wider */
	struct kvt_sampler_params sampling;
	struct kvt_logit_bias *bias; /* what sampling.bias points to; to be freed */
};

/* 0, or the exit code: what is wrong was printed. Free the options in any case. */
int run_options_parse(int argc, char **argv, struct run_options *options);
void run_options_free(struct run_options *options);

#endif
