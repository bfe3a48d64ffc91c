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
 * wait in a ring of epochs, through which each bin has its own pointer. Between the
 * ends of two epochs nothing new is learned, so that it may be worked out late, or never.
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
#define CLEAN_WORDS (CLEAN_LISTS / 64)
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
	uint64_t *away; /* a bit for each block: in the list of dirty ones, but no candidate just now */
	uint64_t epoch;
	uint64_t epoch_turn[EPOCHS]; /* when it ended */
	uint64_t reached[BINS];	     /* epochs whose births have reached the bin */
	uint16_t births[EPOCHS][CLASSES];
	uint64_t in_births[EPOCHS]; /* a bit for each class that has some; and so in the following */
	uint64_t in_uses, in_counts, in_levels, in_worth;
	uint16_t uses[CLASSES][BINS]; /* of the epoch that has not ended */
	float used[CLASSES][BINS], born[CLASSES][BINS], worth[CLASSES][BINS];
	float all[BINS], level[LEVELS][BINS];
	float start[BINS + 1]; /* ages at which bins begin */
	uint64_t in_list[KVT_TIERS][CLEAN_WORDS]; /* lists that are not empty */
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

_Static_assert(CLASSES == 64, "a set of classes is a word");

#define each_class(k, set)                                                                                          \
	(uint64_t left_##k = (set), k = 0; left_##k && (k = (uint64_t)__builtin_ctzll(left_##k), true);              \
	 left_##k &= left_##k - 1)

/* What wider classes show. Classes without counts add nothing to a sum. */
static void learn_all(struct cost *c)
{
	float used[BINS] = { 0 }, born[BINS] = { 0 };

	for each_class(k, c->in_counts) {
		for (uint32_t b = 0; b < BINS; b++) {
			used[b] += c->used[k][b];
			born[b] += c->born[k][b];
		}
	}
	for (uint32_t b = 0; b < BINS; b++)
		c->all[b] = (used[b] + PRIOR * PRIOR_USE) / (born[b] + PRIOR);
}

static void learn_level(struct cost *c, uint32_t level)
{
	float used[BINS] = { 0 }, born[BINS] = { 0 };

	if (!c->in_levels)
		learn_all(c);
	for each_class(k, c->in_counts & ((1ull << KINDS) - 1) << level * KINDS) {
		for (uint32_t b = 0; b < BINS; b++) {
			used[b] += c->used[k][b];
			born[b] += c->born[k][b];
		}
	}
	for (uint32_t b = 0; b < BINS; b++)
		c->level[level][b] = (used[b] + PRIOR * c->all[b]) / (born[b] + PRIOR);
	c->in_levels |= 1ull << level;
}

/* Reuse by bin: a class borrows from its level where it has seen little, the level from all, all from PRIOR_USE. */
static void learn(struct cost *c, uint32_t k)
{
	float uses[BINS], time[BINS], alive = 1;
	const float *level = c->level[k / KINDS];

	if (!(c->in_levels >> k / KINDS & 1))
		learn_level(c, k / KINDS);
	for (uint32_t b = 0; b < BINS; b++)
		uses[b] = (c->used[k][b] + PRIOR * level[b]) / (c->born[k][b] + PRIOR);
	for (uint32_t b = 0; b < BINS; b++) {
		uses[b] = uses[b] < alive - 1e-4f ? uses[b] : alive > 1e-4f ? alive - 1e-4f : 0;
		time[b] = (c->start[b + 1] - c->start[b]) * (alive - uses[b] / 2);
		alive -= uses[b];
	}
	find_worth(uses, time, c->worth[k]);
	c->in_worth |= 1ull << k;
}

/* One by one, as if each had been counted when it was seen. */
static void count_uses(struct cost *c)
{
	for each_class(k, c->in_uses) {
		for (uint32_t b = 0; b < BINS; b++)
			for (; c->uses[k][b]; c->uses[k][b]--)
				c->used[k][b]++;
	}
	c->in_counts |= c->in_uses;
	c->in_uses = 0;
}

static void count_births(struct cost *c, uint32_t bin)
{
	const float middle = (c->start[bin] + c->start[bin + 1]) / 2;

	for (; c->reached[bin] < c->epoch; c->reached[bin]++) {
		uint64_t e = c->reached[bin] % EPOCHS;

		if ((float)(c->turn - c->epoch_turn[e]) < middle && c->epoch - c->reached[bin] < EPOCHS)
			break;
		for each_class(k, c->in_births[e])
			c->born[k][bin] += c->births[e][k];
		c->in_counts |= c->in_births[e];
	}
}

/* What is learned is computed when it is asked for: often nobody does before the next epoch has ended. */
static void end_epoch(struct cost *c)
{
	count_uses(c);
	c->epoch_turn[c->epoch % EPOCHS] = c->turn;
	c->epoch++;
	for (uint32_t b = 0; b < BINS; b++)
		count_births(c, b);
	memset(c->births[c->epoch % EPOCHS], 0, sizeof(c->births[0]));
	c->in_births[c->epoch % EPOCHS] = 0;
	if (c->touches >= c->next_halving) {
		for each_class(k, c->in_counts) {
			for (uint32_t b = 0; b < BINS; b++) {
				c->used[k][b] /= 2;
				c->born[k][b] /= 2;
			}
		}
		c->next_halving = c->touches + (uint64_t)c->frames * MEMORY;
	}
	c->in_levels = c->in_worth = 0;
	c->next_epoch = c->touches + c->epoch_len;
}

/* ---- life ---- */

static uint32_t ghosts_wanted(const struct kvt_policy_params *p)
{
	if (!p->keyed)
		return 0;
	return p->blocks > GHOSTS_MIN / 2 ? p->blocks * 2 : GHOSTS_MIN;
}

static uint64_t away_words(const struct kvt_policy_params *p)
{
	return ((uint64_t)p->blocks + 63) / 64;
}

static uint64_t cost_bytes(const struct kvt_policy_params *p)
{
	return sizeof(struct cost) + (uint64_t)p->blocks * (sizeof(struct node) + (p->keyed ? sizeof(uint64_t) : 0)) +
	       away_words(p) * sizeof(uint64_t) + ghosts_bytes(ghosts_wanted(p));
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
	c->away = (uint64_t *)(c->node + p->blocks);
	if (p->keyed)
		c->key = c->away + away_words(p);
	ghosts_init(&c->ghosts, c->away + away_words(p) + (p->keyed ? p->blocks : 0), ghosts_wanted(p));
	lists_init(c->list, LISTS, c->node, p->blocks);
	for (uint32_t b = 0; b <= BINS; b++)
		c->start[b] = bin_start(b);
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
	if (content->recompute_ns && !c->recompute_ns) /* what is usual is seen then, not known */
		c->saved_ns = c->saved_ns ? c->saved_ns - c->saved_ns / 64 + content->recompute_ns / 64 : content->recompute_ns;
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

static void mark_list(struct cost *c, uint32_t list)
{
	uint32_t tier = list / TIER_LISTS, k = list % TIER_LISTS;

	if (k >= CLEAN_LISTS)
		return;
	if (c->list[list].head == NONE)
		c->in_list[tier][k / 64] &= ~(1ull << k % 64);
	else
		c->in_list[tier][k / 64] |= 1ull << k % 64;
}

static void leave(struct cost *c, uint32_t block)
{
	uint32_t list = c->node[block].list;

	if (list == NO_LIST)
		return;
	list_remove(c->list, c->node, block);
	mark_list(c, list);
	c->away[block / 64] &= ~(1ull << block % 64);
}

/*
 * Dirty blocks keep their place while they are in use: it is that of their last
 * write, which would have to be looked for again each time.
 */
static void cost_busy(struct kvt_policy *p, uint32_t block)
{
	struct cost *c = cost_of(p);

	if (c->node[block].list != NO_LIST && c->node[block].list % TIER_LISTS == DIRTY)
		c->away[block / 64] |= 1ull << block % 64;
	else
		leave(c, block);
}

static void put(struct cost *c, uint32_t block, uint32_t list)
{
	leave(c, block);
	list_insert(c->list, c->node, list, block, list % TIER_LISTS == DIRTY ? BY_WRITE : BY_TOUCH);
	mark_list(c, list);
}

static void move_dirty(struct cost *c, uint32_t block)
{
	const uint64_t away = c->away[block / 64] & 1ull << block % 64;

	put(c, block, c->node[block].list);
	c->away[block / 64] |= away;
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
			c->uses[n->class % CLASSES][bin_of(c->turn - n->stamp)]++;
			c->in_uses |= 1ull << n->class % CLASSES;
			n->hits += n->hits < HITS_MAX;
		}
		kind = c->described == block ? c->kind : n->class % KINDS;
		weight = c->described == block ? c->weight : n->stamp ? n->class / CLASSES : 1;
		if (n->stamp < c->turn) {
			n->class = (uint8_t)(weight * CLASSES + level_of(n->hits) * KINDS + kind);
			c->births[c->epoch % EPOCHS][n->class % CLASSES]++;
			c->in_births[c->epoch % EPOCHS] |= 1ull << n->class % CLASSES;
			n->stamp = c->turn;
		}
		if (use == KVT_USE_WRITE)
			n->written = (uint32_t)c->turn;
		c->described = NONE;
		if (++c->touches >= c->next_epoch)
			end_epoch(c);
	}
	if (n->list == NO_LIST)
		return;
	if (n->list % TIER_LISTS != DIRTY)
		put(c, block, list_of(n, n->list / TIER_LISTS));
	else if (use == KVT_USE_WRITE)
		move_dirty(c, block);
}

static void cost_turn(struct kvt_policy *p)
{
	cost_of(p)->turn++;
}

static void cost_idle(struct kvt_policy *p, uint32_t block, enum kvt_tier tier, bool clean)
{
	struct cost *c = cost_of(p);
	uint32_t list = (uint32_t)tier * TIER_LISTS + DIRTY;

	if (clean)
		put(c, block, list_of(&c->node[block], tier));
	else if (c->node[block].list == list)
		c->away[block / 64] &= ~(1ull << block % 64);
	else
		put(c, block, list);
}

static float worth_of(struct cost *c, uint32_t block, uint32_t tier)
{
	static const float factor[WEIGHTS] = { 0.5f, 1, 2, 4 };
	const struct node *n = &c->node[block];
	float worth;

	if (!(c->in_worth >> n->class % CLASSES & 1))
		learn(c, n->class % CLASSES);
	worth = c->worth[n->class % CLASSES][bin_of(c->turn - n->stamp)];

	return c->last[tier] ? worth * factor[n->class / CLASSES] : worth;
}

/* Which of two ends goes first: the one of less worth, of equals the older. */
static void offer(struct cost *c, uint32_t block, uint32_t tier, uint32_t *best, float *least)
{
	float worth;

	worth = worth_of(c, block, tier);
	if (*best != NONE && (worth > *least || (worth == *least && c->node[block].stamp >= c->node[*best].stamp)))
		return;
	*best = block;
	*least = worth;
}

static uint32_t oldest_dirty(struct cost *c, uint32_t tiers)
{
	uint32_t best = NONE;

	for (uint32_t t = 0; t < KVT_TIERS; t++) {
		const struct list *l = &c->list[t * TIER_LISTS + DIRTY];

		if (!(tiers & (1u << t)))
			continue;
		while (l->head != NONE && (c->away[l->head / 64] >> l->head % 64 & 1))
			leave(c, l->head); /* it comes back when it is one again */
		if (l->head != NONE && (best == NONE || node_after(&c->node[best], &c->node[l->head], BY_WRITE)))
			best = l->head;
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
		for (uint32_t w = 0; w < CLEAN_WORDS && (tiers & (1u << t)); w++) {
			for each_class(k, c->in_list[t][w]) {
				const struct list *l = &c->list[t * TIER_LISTS + w * 64 + k];

				offer(c, l->head, t, &best, &least);
				if (c->fresh_end)
					offer(c, l->tail, t, &best, &least);
			}
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

	leave(c, block);
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
