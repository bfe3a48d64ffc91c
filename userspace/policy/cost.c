// SPDX-License-Identifier: MIT
/*
 * Cost: the candidate goes whose frame is expected to save the least.
 *
 * How soon content is used again is learned, not assumed. Blocks are sorted into
 * classes by how often they were used and by what the owner says of their kind.
 * For each class it is counted how many of those that reached an age were used
 * again at that age (ages in turns, in bins of a quarter octave), with decay. From
 * that follows what a frame given to a block of this class and age is worth: the
 * largest ratio, over all times it might be kept, of the chance of a use by then
 * to the frame time it takes until then (the Gittins index). Where computing anew
 * is what a use saves, it counts with what that costs over loading.
 *
 * One-off content has no worth when it is new already: a scan does not push out
 * what is used. In a class the oldest candidate is asked for its worth. What is
 * read in a cycle is worth more the older it is, up to the next round; so `auto`
 * asks the newest one too, and then does on cycles what `scan` does. Turns, not
 * touches, are the clock because content of one request comes and goes together:
 * that another's turn came is what tells that this one's did not.
 *
 * Only births that have reached an age count among those that might have been
 * used at it; else a class that has just begun to fill would look useless. They
 * wait in a ring of epochs, through which each bin has its own pointer.
 *
 * What is known of forgotten content stays in ghosts, found by its key.
 */
#include <stdlib.h>
#include <string.h>

#include "policy/ghost.h"
#include "policy/list.h"

#define KINDS KVT_POLICY_KINDS
#define LEVELS 8 /* of hits: 0, 1, 2-3, 4-7, ..., 64 and more */
#define CLASSES (LEVELS * KINDS)
#define WEIGHTS 4 /* of what a use saves: about 1/2, 1, 2, 4 of the usual */
#define SUB_SHIFT 2 /* bins in an octave: 1 << SUB_SHIFT */
#define BINS (20 << SUB_SHIFT)
#define EPOCHS 128
#define EPOCH_MIN 64 /* touches */
#define PRIOR 20.0f /* observations that a wider class counts for in a narrower one */
#define PRIOR_USE 0.02f /* of all, in each bin: reuse falls with age, as for LRU */
#define MEMORY 32 /* frames' worth of touches after which counts are halved */
#define GHOSTS_MIN 8192

#define CLEAN_LISTS (CLASSES * WEIGHTS)
#define AHEAD CLEAN_LISTS
#define DIRTY (CLEAN_LISTS + 1)
#define TIER_LISTS (CLEAN_LISTS + 2)
#define LISTS (TIER_LISTS * KVT_TIERS)
#define FETCHED 0x80 /* in node.hits: fetched ahead, not used yet */
#define HITS_MAX 0x7f

struct cost {
	struct kvt_policy policy;
	uint64_t turn, touches;
	uint64_t next_epoch, next_halving;
	uint32_t frames, epoch_len;
	uint32_t saved_ns; /* by a use, usually; 0: nothing is known of costs */
	uint32_t load_ns;  /* from the last tier */
	uint32_t recompute_ns;
	bool fresh_end; /* auto */
	bool last[KVT_TIERS]; /* what leaves it is lost */
	uint32_t described; /* block whose next touch brings this class: */
	uint8_t kind, weight;
	struct ghosts ghosts;
	uint64_t *key; /* [blocks], or NULL */
	uint64_t epoch;
	uint64_t epoch_turn[EPOCHS]; /* when it ended */
	uint64_t reached[BINS];	     /* epochs whose births have reached the bin */
	uint16_t births[EPOCHS][CLASSES];
	float used[CLASSES][BINS], born[CLASSES][BINS], worth[CLASSES][BINS];
	struct list list[LISTS];
	struct node node[];
};

static struct cost *cost_of(struct kvt_policy *p)
{
	return (struct cost *)p;
}

/* ---- ages ---- */

static uint32_t bin_of(uint64_t age)
{
	uint32_t octave, bin;

	if (age < 1)
		age = 1;
	octave = 63 - (uint32_t)__builtin_clzll(age);
	bin = (octave << SUB_SHIFT) + (uint32_t)((age - (1ull << octave)) << SUB_SHIFT >> octave);
	return bin < BINS ? bin : BINS - 1;
}

static float bin_start(uint32_t bin)
{
	uint32_t octave = bin >> SUB_SHIFT, part = bin & ((1u << SUB_SHIFT) - 1);

	return (float)(1ull << octave) * (1 + (float)part / (1 << SUB_SHIFT));
}

/* ---- learning ---- */

/*
 * worth[a] = max over t >= a of (uses in bins a..t) / (frame time in bins a..t):
 * the slopes of the upper hull of the points (time, uses) seen from each, found from the far end.
 */
static void find_worth(const float *uses, const float *time, float *worth)
{
	float x[BINS + 1], y[BINS + 1];
	uint32_t hull[BINS + 1], n = 0;

	x[0] = y[0] = 0;
	for (uint32_t b = 0; b < BINS; b++) {
		x[b + 1] = x[b] + time[b];
		y[b + 1] = y[b] + uses[b];
	}
	hull[n++] = BINS;
	for (uint32_t a = BINS; a--;) {
		while (n > 1 && (y[hull[n - 2]] - y[a]) * (x[hull[n - 1]] - x[a]) >=
					(y[hull[n - 1]] - y[a]) * (x[hull[n - 2]] - x[a]))
			n--;
		worth[a] = (y[hull[n - 1]] - y[a]) / (x[hull[n - 1]] - x[a]);
		hull[n++] = a;
	}
}

/* Reuse by bin: a class borrows from its level where it has seen little, the level from all, all from PRIOR_USE. */
static void learn(struct cost *c)
{
	float all[BINS], level[BINS], width[BINS], uses[BINS], time[BINS];

	for (uint32_t b = 0; b < BINS; b++) {
		float used = 0, born = 0;

		for (uint32_t k = 0; k < CLASSES; k++) {
			used += c->used[k][b];
			born += c->born[k][b];
		}
		all[b] = (used + PRIOR * PRIOR_USE) / (born + PRIOR);
		width[b] = bin_start(b + 1) - bin_start(b);
	}
	for (uint32_t k = 0; k < CLASSES; k++) {
		float alive = 1;

		for (uint32_t b = 0; b < BINS && !(k % KINDS); b++) {
			float used = 0, born = 0;

			for (uint32_t kind = 0; kind < KINDS; kind++) {
				used += c->used[k + kind][b];
				born += c->born[k + kind][b];
			}
			level[b] = (used + PRIOR * all[b]) / (born + PRIOR);
		}
		for (uint32_t b = 0; b < BINS; b++) {
			float p = (c->used[k][b] + PRIOR * level[b]) / (c->born[k][b] + PRIOR);

			uses[b] = p < alive - 1e-4f ? p : alive > 1e-4f ? alive - 1e-4f : 0;
			time[b] = width[b] * (alive - uses[b] / 2);
			alive -= uses[b];
		}
		find_worth(uses, time, c->worth[k]);
	}
}

static void end_epoch(struct cost *c)
{
	c->epoch_turn[c->epoch % EPOCHS] = c->turn;
	c->epoch++;
	for (uint32_t b = 0; b < BINS; b++) {
		float middle = (bin_start(b) + bin_start(b + 1)) / 2;

		for (; c->reached[b] < c->epoch; c->reached[b]++) {
			uint64_t e = c->reached[b] % EPOCHS;

			if ((float)(c->turn - c->epoch_turn[e]) < middle && c->epoch - c->reached[b] < EPOCHS)
				break;
			for (uint32_t k = 0; k < CLASSES; k++)
				c->born[k][b] += c->births[e][k];
		}
	}
	memset(c->births[c->epoch % EPOCHS], 0, sizeof(c->births[0]));
	if (c->touches >= c->next_halving) {
		for (uint32_t k = 0; k < CLASSES; k++) {
			for (uint32_t b = 0; b < BINS; b++) {
				c->used[k][b] /= 2;
				c->born[k][b] /= 2;
			}
		}
		c->next_halving = c->touches + (uint64_t)c->frames * MEMORY;
	}
	learn(c);
	c->next_epoch = c->touches + c->epoch_len;
}

/* ---- life ---- */

static uint32_t ghosts_wanted(const struct kvt_policy_params *p)
{
	if (!p->keyed)
		return 0;
	return p->blocks > GHOSTS_MIN / 2 ? p->blocks * 2 : GHOSTS_MIN;
}

static uint64_t cost_bytes(const struct kvt_policy_params *p)
{
	return sizeof(struct cost) + (uint64_t)p->blocks * (sizeof(struct node) + (p->keyed ? sizeof(uint64_t) : 0)) +
	       ghosts_bytes(ghosts_wanted(p));
}

static struct kvt_policy *create(const struct kvt_policy_params *p, const struct kvt_policy_ops *ops)
{
	struct cost *c = calloc(1, cost_bytes(p));

	if (!c)
		return NULL;
	c->policy.ops = ops;
	c->fresh_end = ops == &kvt_policy_auto;
	for (uint32_t t = 0; t < KVT_TIERS; t++) {
		c->frames += p->frames[t];
		c->last[t] = kvt_policy_below(p, t, 0) == KVT_TIERS;
		if (p->frames[t])
			c->load_ns = p->reload_ns[t];
	}
	c->recompute_ns = p->recompute_ns;
	c->saved_ns = p->recompute_ns > c->load_ns ? p->recompute_ns - c->load_ns : 0;
	c->epoch_len = c->frames / 16 > EPOCH_MIN ? c->frames / 16 : EPOCH_MIN;
	if (c->epoch_len > UINT16_MAX)
		c->epoch_len = UINT16_MAX;
	c->next_halving = (uint64_t)c->frames * MEMORY;
	c->turn = 1;
	c->described = NONE;
	if (p->keyed)
		c->key = (uint64_t *)(c->node + p->blocks);
	ghosts_init(&c->ghosts, c->key + (c->key ? p->blocks : 0), ghosts_wanted(p));
	lists_init(c->list, LISTS, c->node, p->blocks);
	learn(c);
	c->next_epoch = c->epoch_len;
	return &c->policy;
}

static struct kvt_policy *cost_create(const struct kvt_policy_params *p)
{
	return create(p, &kvt_policy_cost);
}

static struct kvt_policy *auto_create(const struct kvt_policy_params *p)
{
	return create(p, &kvt_policy_auto);
}

static void cost_destroy(struct kvt_policy *p)
{
	free(p);
}

/* ---- what happens to blocks ---- */

static uint8_t weight_of(const struct cost *c, uint32_t recompute_ns)
{
	uint64_t saved = recompute_ns > c->load_ns ? recompute_ns - c->load_ns : 0;
	uint64_t tenths = c->saved_ns && recompute_ns ? saved * 10 / c->saved_ns : 10;

	return tenths < 7 ? 0 : tenths < 14 ? 1 : tenths < 28 ? 2 : 3;
}

static void cost_describe(struct kvt_policy *p, uint32_t block, const struct kvt_content *content)
{
	struct cost *c = cost_of(p);
	struct node *n = &c->node[block];
	struct ghost g;

	c->described = block;
	c->kind = content->kind % KINDS;
	c->weight = weight_of(c, content->recompute_ns);
	if (!c->key || c->key[block] == content->key)
		return;
	c->key[block] = content->key;
	n->stamp = 0;
	n->hits = 0;
	if (ghosts_take(&c->ghosts, content->key, &g)) {
		n->stamp = c->turn - (uint32_t)((uint32_t)c->turn - g.when);
		n->hits = g.hits;
		n->class = g.class;
	}
}

static uint32_t list_of(const struct node *n, uint32_t tier)
{
	return tier * TIER_LISTS + (n->hits & FETCHED ? AHEAD : n->class);
}

static void put(struct cost *c, uint32_t block, uint32_t list)
{
	list_remove(c->list, c->node, block);
	list_insert(c->list, c->node, list, block, list % TIER_LISTS == DIRTY ? BY_WRITE : BY_TOUCH);
}

static uint8_t level_of(uint8_t hits)
{
	uint32_t level = hits ? 32 - (uint32_t)__builtin_clz(hits) : 0;

	return level < LEVELS ? (uint8_t)level : LEVELS - 1;
}

static void cost_touch(struct kvt_policy *p, uint32_t block, enum kvt_use use)
{
	struct cost *c = cost_of(p);
	struct node *n = &c->node[block];
	uint8_t kind, weight;

	if (use == KVT_USE_AHEAD) {
		n->hits |= FETCHED;
	} else {
		n->hits &= HITS_MAX;
		if (n->stamp && n->stamp < c->turn) {
			c->used[n->class % CLASSES][bin_of(c->turn - n->stamp)]++;
			n->hits += n->hits < HITS_MAX;
		}
		kind = c->described == block ? c->kind : n->class % KINDS;
		weight = c->described == block ? c->weight : n->stamp ? n->class / CLASSES : 1;
		if (n->stamp < c->turn) {
			n->class = (uint8_t)(weight * CLASSES + level_of(n->hits) * KINDS + kind);
			c->births[c->epoch % EPOCHS][n->class % CLASSES]++;
			n->stamp = c->turn;
		}
		if (use == KVT_USE_WRITE)
			n->written = (uint32_t)c->turn;
		c->described = NONE;
		if (++c->touches >= c->next_epoch)
			end_epoch(c);
	}
	if (n->list != NO_LIST)
		put(c, block, n->list % TIER_LISTS == DIRTY ? n->list : list_of(n, n->list / TIER_LISTS));
}

static void cost_turn(struct kvt_policy *p)
{
	cost_of(p)->turn++;
}

static void cost_idle(struct kvt_policy *p, uint32_t block, enum kvt_tier tier, bool clean)
{
	struct cost *c = cost_of(p);

	put(c, block, clean ? list_of(&c->node[block], tier) : (uint32_t)tier * TIER_LISTS + DIRTY);
}

static void cost_busy(struct kvt_policy *p, uint32_t block)
{
	list_remove(cost_of(p)->list, cost_of(p)->node, block);
}

static float worth_of(const struct cost *c, uint32_t block, uint32_t tier)
{
	static const float factor[WEIGHTS] = { 0.5f, 1, 2, 4 };
	const struct node *n = &c->node[block];
	float worth = c->worth[n->class % CLASSES][bin_of(c->turn - n->stamp)];

	return c->last[tier] ? worth * factor[n->class / CLASSES] : worth;
}

/* Which of two ends goes first: the one of less worth, of equals the older. */
static void offer(const struct cost *c, uint32_t block, uint32_t tier, uint32_t *best, float *least)
{
	float worth;

	if (block == NONE)
		return;
	worth = worth_of(c, block, tier);
	if (*best != NONE && (worth > *least || (worth == *least && c->node[block].stamp >= c->node[*best].stamp)))
		return;
	*best = block;
	*least = worth;
}

static uint32_t oldest_dirty(const struct cost *c, uint32_t tiers)
{
	uint32_t best = NONE;

	for (uint32_t t = 0; t < KVT_TIERS; t++) {
		uint32_t head = c->list[t * TIER_LISTS + DIRTY].head;

		if ((tiers & (1u << t)) && head != NONE &&
		    (best == NONE || node_after(&c->node[best], &c->node[head], BY_WRITE)))
			best = head;
	}
	return best;
}

static uint32_t cost_victim(struct kvt_policy *p, uint32_t tiers, bool clean)
{
	struct cost *c = cost_of(p);
	uint32_t best = NONE;
	float least = 0;

	if (!clean)
		return oldest_dirty(c, tiers);
	for (uint32_t t = 0; t < KVT_TIERS; t++) {
		for (uint32_t k = 0; k < CLEAN_LISTS && (tiers & (1u << t)); k++) {
			const struct list *l = &c->list[t * TIER_LISTS + k];

			offer(c, l->head, t, &best, &least);
			if (c->fresh_end)
				offer(c, l->tail, t, &best, &least);
		}
	}
	for (uint32_t t = 0; t < KVT_TIERS && best == NONE; t++)
		if (tiers & (1u << t))
			best = c->list[t * TIER_LISTS + AHEAD].tail;
	return best;
}

static void cost_forget(struct kvt_policy *p, uint32_t block)
{
	struct cost *c = cost_of(p);
	struct node *n = &c->node[block];

	cost_busy(p, block);
	if (c->key && c->key[block]) {
		ghosts_put(&c->ghosts, c->key[block],
			   &(struct ghost){ .when = (uint32_t)n->stamp, .hits = n->hits & HITS_MAX, .class = n->class });
		c->key[block] = 0;
	}
	n->stamp = 0;
	n->hits = n->class = 0;
}

#define COST_OPS(id, make)                                                                                             \
	{                                                                                                              \
		.name = id, .bytes = cost_bytes, .create = make, .destroy = cost_destroy, .describe = cost_describe,   \
		.touch = cost_touch, .turn = cost_turn, .idle = cost_idle, .busy = cost_busy, .victim = cost_victim,   \
		.forget = cost_forget,                                                                                 \
	}

const struct kvt_policy_ops kvt_policy_cost = COST_OPS("cost", cost_create);
const struct kvt_policy_ops kvt_policy_auto = COST_OPS("auto", auto_create);
