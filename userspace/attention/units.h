/* SPDX-License-Identifier: MIT */
/*
 * The work of a group of splits, cut into units for the threads: which there are,
 * what each reads, and how their parts become output rows.
 */
#ifndef KVT_ATTENTION_UNITS_H
#define KVT_ATTENTION_UNITS_H

#include "attention/attend.h"

#define UNIT_ROWS 128 /* query rows of a unit */

static inline uint64_t kvt_round_up(uint64_t n, uint64_t to)
{
	return (n + to - 1) / to * to;
}

/* Consecutive splits, and the blocks that they lie in. */
struct group {
	uint64_t first, end; /* splits [first, end) */
	uint64_t k0, v0;     /* first block of each plane */
	uint32_t n_k, n_v;   /* n_v is 0 where V's rows lie in K's */
	uint32_t v_at;	     /* V's first view */
	uint32_t *blocks;    /* [n_k] then [n_v] */
};

struct merging;

struct kvt_units {
	struct kvt_workers *workers;
	const struct kvt_attn_kernels *kernels;
	struct kvt_attn_state run, part;
	struct merging *merging; /* [query heads] */
	uint8_t *scratch;	 /* [workers][scratch_bytes] */
	size_t scratch_bytes, wide_bytes;
	uint32_t max_v_dim;
};

/* Some query tokens of a call over its groups. Above the line: the caller's. */
struct pass {
	struct kvt_units *u;
	const struct kvt_attend_call *c;
	const struct group *g;
	const struct kvt_view *views; /* of the group's blocks */
	uint32_t t0, tokens;	      /* query tokens [t0, t0 + tokens) */
	bool last;		      /* the group is the pass's last */
	/* ---- */
	bool parts;	      /* a unit's splits are merged by and by, else at once */
	uint32_t group_heads; /* query heads of a KV head */
	uint32_t rows;	      /* of one KV head: tokens * group_heads */
	uint32_t row_blocks;  /* of one KV head */
	/* the group's units, with parts: runs of so many splits of so many KV heads, then shorter ones, then narrower ones */
	uint32_t slots;	      /* splits whose parts are kept */
	uint32_t run, heads, narrow; /* splits of a long run; KV heads, 1 if they have several row blocks */
	uint32_t long_runs, short_runs, narrow_runs;
	uint64_t units;
	_Atomic uint64_t next;
};

/* Bytes that it takes. */
uint64_t kvt_units_bytes(const struct kvt_attend_params *);
void kvt_units_init(struct kvt_units *, const struct kvt_attend_params *, struct kvt_workers *, void *memory);

/* Begin with no row seen. */
void kvt_units_begin(struct pass *);
/* One group after the other. After the last one the output is there. */
void kvt_units_group(struct pass *);
/* Instead, where there is no group at all. */
void kvt_units_nothing(struct pass *);

/* KV rows [*lo, *hi) that a query token may see. */
void kvt_attend_visible(const struct kvt_attend_call *, uint32_t token, uint64_t *lo, uint64_t *hi);

#endif
