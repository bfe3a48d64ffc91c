/* SPDX-License-Identifier: MIT */
/*
 * Ghosts: what is remembered of content that is gone, by its key. A table of
 * fixed size in which a key has PROBES places; the oldest of them makes room.
 * Two keys may share a tag: then one's past is taken for the other's, once in
 * 2^29 look-ups, and a decision is worse, nothing else.
 */
#ifndef KVT_POLICY_GHOST_H
#define KVT_POLICY_GHOST_H

#include <stdbool.h>
#include <stdint.h>

#define GHOST_PROBES 8

struct ghost {
	uint32_t tag; /* 0: free */
	uint32_t when; /* low bits of the owner's counter; an older one makes room first */
	uint8_t hits, class;
};

struct ghosts {
	struct ghost *ghost;
	uint32_t n; /* 0, or at least GHOST_PROBES */
	uint32_t used;
};

static inline uint32_t ghosts_round(uint32_t n)
{
	return n && n < GHOST_PROBES ? GHOST_PROBES : n;
}

static inline uint64_t ghosts_bytes(uint32_t n)
{
	return (uint64_t)ghosts_round(n) * sizeof(struct ghost);
}

/* @memory: ghosts_bytes(n), zeroed */
static inline void ghosts_init(struct ghosts *g, void *memory, uint32_t n)
{
	g->ghost = memory;
	g->n = ghosts_round(n);
}

static inline uint64_t ghost_mix(uint64_t key)
{
	key = (key ^ key >> 32) * 0x9e3779b97f4a7c15ull;
	key = (key ^ key >> 29) * 0xbf58476d1ce4e5b9ull;
	return key ^ key >> 32;
}

static inline struct ghost *ghost_at(const struct ghosts *g, uint64_t mixed, uint32_t probe)
{
	uint32_t at = (uint32_t)((mixed & UINT32_MAX) * g->n >> 32) + probe;

	return &g->ghost[at < g->n ? at : at - g->n];
}

/* What is remembered of @key goes to *found, and is remembered no more. */
static inline bool ghosts_take(struct ghosts *g, uint64_t key, struct ghost *found)
{
	uint64_t mixed = ghost_mix(key);
	uint32_t tag = (uint32_t)(mixed >> 32) | 1;

	for (uint32_t i = 0; i < GHOST_PROBES && g->used; i++) {
		struct ghost *at = ghost_at(g, mixed, i);

		if (at->tag != tag)
			continue;
		*found = *at;
		at->tag = 0;
		g->used--;
		return true;
	}
	return false;
}

static inline void ghosts_put(struct ghosts *g, uint64_t key, const struct ghost *what)
{
	uint64_t mixed = ghost_mix(key);
	struct ghost *to = NULL;

	for (uint32_t i = 0; i < GHOST_PROBES && g->n; i++) {
		struct ghost *at = ghost_at(g, mixed, i);

		if (!to || (to->tag && (!at->tag || what->when - at->when > what->when - to->when)))
			to = at;
	}
	if (!to)
		return;
	g->used += !to->tag;
	*to = *what;
	to->tag = (uint32_t)(mixed >> 32) | 1;
}

#endif
