/* SPDX-License-Identifier: MIT */
/*
 * A cache with a prefix tree whose rows are functions of the tokens before them:
 * what is served can be checked without knowing who computed it. Failures are check's.
 */
#ifndef KVT_TESTS_PREFIX_RIG_H
#define KVT_TESTS_PREFIX_RIG_H

#include <stdbool.h>

#include "kvtier.h"

#define RIG_ROOTS 4
#define RIG_PLANES 3 /* 64, 64 and 32 rows a block: a chunk is 64 tokens, 4 blocks */
#define RIG_SNAPSHOT 20000

struct rig_config {
	bool disk, small;
	uint32_t snapshots;
	uint32_t chunks;      /* that the tree may have; 0: 200 */
	const char *dir;      /* kept there; NULL: nothing is */
	uint64_t disk_bytes;  /* 0: 4 MiB */
	uint64_t pinned_bytes;
	uint64_t rotation;
	uint32_t codec;	      /* of the last plane: enum kvt_codec */
	uint8_t model;
	uint32_t io;	      /* enum kvt_io_kind */
	uint32_t policy;      /* enum kvt_policy_kind */
};

struct prefix_rig {
	struct kvt_cache *cache;
	uint32_t chunk;
	uint32_t counter, prompts; /* of a crowd */
	uint32_t ns;		   /* that computing a token takes, as rig_compute() says */
	struct kvt_prefix_root roots[RIG_ROOTS]; /* plain, salted, an adapter, both */
};

/* What kvt_cache_create() says. */
int rig_open(struct prefix_rig *r, struct rig_config c);
struct prefix_rig rig_make(struct rig_config c);

/* The books balance, and everything goes. */
void rig_free(struct prefix_rig *r);

/* Tokens of conversation @talk: the same for the same @talk, but for what is behind @fork, if that is not 0. */
void rig_prompt(uint32_t *tokens, uint32_t n, uint32_t talk, uint32_t fork);

/* A sequence's tokens become tokens [n], and the new ones' rows are written. */
void rig_extend(struct prefix_rig *r, uint32_t root, struct kvt_seq *seq, const uint32_t *tokens, uint32_t n);

/* Its tokens and rows are what they should be. */
void rig_expect(uint32_t root, struct kvt_seq *seq, const uint32_t *tokens, uint32_t n);

/* Compute a prompt as a request would, what is known being shared, and keep it. */
void rig_compute(struct prefix_rig *r, uint32_t root, const uint32_t *tokens, uint32_t n);

/* A lookup finds @found tokens, and they are right. */
void rig_serve(struct prefix_rig *r, uint32_t root, const uint32_t *tokens, uint32_t n, uint32_t found);

/* The same for any number of tokens, which is returned. */
uint32_t rig_serve_some(struct prefix_rig *r, uint32_t root, const uint32_t *tokens, uint32_t n);

/* @threads at once, each computing and serving @prompts prompts of its own. */
void rig_crowd(struct prefix_rig *r, uint32_t threads, uint32_t prompts);

#endif
