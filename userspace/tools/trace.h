/* SPDX-License-Identifier: MIT */
/* Traces of requests, for kvtier replay: each prompt is a path from a root through blocks that others may share. */
#ifndef KVT_TOOLS_TRACE_H
#define KVT_TOOLS_TRACE_H

#include <stddef.h>
#include <stdint.h>

#define TRACE_NONE UINT32_MAX

enum trace_format {
	TRACE_MOONCAKE, /* a JSON object a line; blocks of 512 tokens, the last of a prompt may be partial */
	TRACE_AGENTIC,	/* one object: a session; whole blocks; ids are one session's, of one model */
};

struct trace_request {
	double time; /* s */
	uint32_t input, output; /* tokens */
	uint64_t first; /* its blocks are blocks[first, first + n) */
	uint32_t n;
};

struct trace {
	uint32_t block_tokens;
	uint32_t n_requests, n_distinct;
	uint64_t n_blocks;
	struct trace_request *requests; /* by time */
	uint32_t *blocks; /* numbers below n_distinct: the same one for the same prefix */
	uint32_t *parent; /* [n_distinct] the block before it, or TRACE_NONE */
};

/*
 * Read a trace; @name is for messages. -EINVAL: it breaks its format, and where;
 * -E2BIG: it is too large; nothing is left to be freed then.
 */
int trace_parse(const char *text, size_t bytes, const char *name, enum trace_format format, struct trace *trace);
int trace_read(const char *path, enum trace_format format, struct trace *trace);
void trace_free(struct trace *trace);

/* Tokens that block @i of request @r holds. */
static inline uint32_t trace_tokens(const struct trace *t, const struct trace_request *r, uint32_t i)
{
	uint64_t begin = (uint64_t)i * t->block_tokens, left = r->input - begin;

	return left < t->block_tokens ? (uint32_t)left : t->block_tokens;
}

#endif
