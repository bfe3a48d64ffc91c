/* SPDX-License-Identifier: MIT */
/*
 * A store and a plain-memory model of it, driven by random operations. After
 * each, what the store serves is what the model holds, and its books balance.
 */
#ifndef KVT_TESTS_STORE_MODEL_H
#define KVT_TESTS_STORE_MODEL_H

#include "gpu/gpu.h"
#include "host/host.h"
#include "store/store.h"

struct model_config {
	uint32_t frames[KVT_TIERS];
	uint64_t block_bytes; /* 0: 4 KiB */
	uint32_t io;	      /* enum kvt_io_kind */
	struct kvt_store *store; /* NULL: makes its own; a shared one has the planes of model_planes() */
	struct kvt_host *host; /* NULL: opens its own */
	struct kvt_gpu *gpu;   /* NULL: the cpu backend, where a gpu tier is asked for */
	const char *dir;       /* NULL: /var/tmp or $TMPDIR */
	uint32_t slots;	       /* blocks that the model juggles; 0: as many as fit */
	bool errors_allowed;   /* faults are being injected: calls may fail, but must never lie */
	uint64_t seed;
	uint32_t flags;	       /* KVT_CACHE_* */
	uint64_t rate;
};

struct model;

/* 0 or a negative errno from creating the store. */
int model_create(const struct model_config *config, struct model **model);
void model_destroy(struct model *model);

/* Run @n operations. 0, or -1 with a line about the first lie on stdout. */
int model_run(struct model *model, uint64_t n);

/* Read everything back and compare. */
int model_verify(struct model *model);

/* The planes of every model's store, for blocks of @block_bytes. Returns how many. */
#define MODEL_PLANES 3
void model_planes(struct kvt_plane_geom planes[MODEL_PLANES], uint64_t block_bytes);

struct kvt_store *model_store(struct model *model);
uint64_t model_errors(const struct model *model); /* calls that failed */
uint64_t model_lost(const struct model *model);	  /* blocks whose content is gone, as told */

uint64_t model_random(uint64_t *state);

#endif
