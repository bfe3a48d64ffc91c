// SPDX-License-Identifier: MIT
/* Any text as a trace of either format (the first byte says which): refused, or a forest of prefixes that replays. */
#include <stdint.h>
#include <stdlib.h>

#include "tools/replay.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(const struct trace *t)
{
	uint64_t at = 0, best;
	struct replay_params p = {
		.policy = &kvt_policy_auto, .frames = { 1, 0, 2, 3 }, .token_bytes = 1, .tokens_per_s = 1000,
	};
	struct replay_result r;

	for (uint32_t i = 0; i < t->n_requests; i++) {
		const struct trace_request *q = &t->requests[i];

		if (q->first + q->n > t->n_blocks || (i && q->time < t->requests[i - 1].time))
			abort();
		for (uint32_t d = 0; d < q->n; d++)
			if (t->parent[t->blocks[q->first + d]] != (d ? t->blocks[q->first + d - 1] : TRACE_NONE))
				abort();
		at += q->n;
	}
	if (at != t->n_blocks || replay_run(t, &p, &r) || replay_optimum(t, 6, &best))
		abort();
	if (r.hits[0] + r.hits[1] + r.hits[2] + r.hits[3] > best)
		abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct trace t;

	if (!size || trace_parse((const char *)data + 1, size - 1, "fuzz", data[0] & 1 ? TRACE_AGENTIC : TRACE_MOONCAKE, &t))
		return 0;
	check(&t);
	trace_free(&t);
	return 0;
}
