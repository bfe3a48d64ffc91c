/* SPDX-License-Identifier: MIT */
/* For tests: run the reference engine once, in one of the ways that must not matter. */
#ifndef KVT_TESTS_REF_RUN_H
#define KVT_TESTS_REF_RUN_H

#include "engines/ref/engine.h"
#include "gpu/gpu.h"

/* 0 or NULL anywhere: the default. */
struct ref_how {
	const char *name; /* for messages */
	uint32_t codec;	  /* the one thing that does matter: enum kvt_codec */
	uint64_t gpu, pinned, disk, block; /* bytes; with @on_gpu, @gpu beyond the least */
	int64_t ram;	  /* 0: plenty; else bytes beyond the least that works, -1: none beyond */
	uint32_t threads, chunk, io;
	const char *isa;
	struct kvt_gpu *tier;	 /* what the gpu tier lives on */
	bool on_gpu;		 /* compute there */
	struct kvt_gpu *scratch; /* what the engine's scratch lives on */
	void (*started)(void);	 /* called when everything is there, before the first token */
	void (*ended)(void);	 /* behind the last one, before anything goes */
};

/*
 * Feed @ids [n], then @n_new - 1 greedy tokens. Returns the logits behind every
 * token fed, [n + n_new - 1][vocab], to be freed; the greedy ones are put into
 * @new_ids [n_new] (or NULL). @stats (its size set), or NULL, is filled at the end.
 * Fails the test on any error.
 */
float *ref_run(const struct ref_model *m, const struct ref_how *how, const uint32_t *ids, uint32_t n, uint32_t n_new,
	       uint32_t *new_ids, struct kvt_stats *stats);

#endif
