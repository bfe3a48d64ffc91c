// SPDX-License-Identifier: MIT
/*
 * S3-FIFO: three queues, none of them sorted by use. What is new waits in a
 * small one, a tenth of the tier; what is used there more than once goes to the
 * main one, what is not is forgotten but for its key. A key that comes back
 * while it is remembered goes to the main queue at once. The main queue gives
 * what has been used since another round.
 *
 * A candidate that is in use leaves its queue and comes back to its place in it.
 */
#include <stdlib.h>

#include "policy/ghost.h"
#include "policy/list.h"

#define QUEUES (KVT_TIERS * 2 * 2) /* a tier's clean or dirty candidates, small or main */
#define HITS_MAX 3
#define SMALL_SHARE 10

struct s3fifo {
	struct kvt_policy policy;
	uint64_t clock; /* entries to a queue */
	uint32_t evicted; /* from the small queues */
	uint32_t remembered; /* keys are, until so many others have been evicted */
	struct ghosts ghosts;
	struct list queue[QUEUES];
	uint32_t len[QUEUES];
	uint32_t home[KVT_TIERS][2]; /* blocks whose place is in a tier's small or main queues, candidates or not */
	uint64_t *key;
	struct node node[];
};

static struct s3fifo *s3_of(struct kvt_policy *p)
{
	return (struct s3fifo *)p;
}

static uint32_t ghosts_wanted(const struct kvt_policy_params *p)
{
	return p->keyed ? 2 * p->blocks : 0;
}

static uint64_t s3_bytes(const struct kvt_policy_params *p)
{
	return sizeof(struct s3fifo) + (uint64_t)p->blocks * (sizeof(struct node) + sizeof(uint64_t)) +
	       ghosts_bytes(ghosts_wanted(p));
}

static struct kvt_policy *s3_create(const struct kvt_policy_params *p)
{
	struct s3fifo *s = calloc(1, s3_bytes(p));

	if (!s)
		return NULL;
	s->policy.ops = &kvt_policy_s3fifo;
	for (uint32_t t = 0; t < KVT_TIERS; t++)
		s->remembered += p->frames[t];
	s->key = (uint64_t *)(s->node + p->blocks);
	ghosts_init(&s->ghosts, s->key + p->blocks, ghosts_wanted(p));
	lists_init(s->queue, QUEUES, s->node, p->blocks);
	return &s->policy;
}

static void s3_destroy(struct kvt_policy *p)
{
	free(p);
}

/* node.class: is it, or will it be, in the main queue? */
static void s3_describe(struct kvt_policy *p, uint32_t block, const struct kvt_content *content)
{
	struct s3fifo *s = s3_of(p);
	struct ghost g;

	if (s->key[block] == content->key)
		return;
	s->key[block] = content->key;
	if (ghosts_take(&s->ghosts, content->key, &g))
		s->node[block].class = s->evicted - g.when <= s->remembered;
}

static void s3_touch(struct kvt_policy *p, uint32_t block, enum kvt_use use)
{
	struct s3fifo *s = s3_of(p);
	struct node *n = &s->node[block];

	(void)use;
	if (!n->stamp)
		n->stamp = ++s->clock;
	else if (n->hits < HITS_MAX)
		n->hits++;
}

static void s3_turn(struct kvt_policy *p)
{
	(void)p;
}

static void leave(struct s3fifo *s, uint32_t block)
{
	if (s->node[block].list != NO_LIST)
		s->len[s->node[block].list]--;
	list_remove(s->queue, s->node, block);
}

static void enter(struct s3fifo *s, uint32_t block, uint32_t queue)
{
	leave(s, block);
	list_insert(s->queue, s->node, queue, block, BY_TOUCH);
	s->len[queue]++;
}

/* node.written: the tier where it was a candidate last, + 1 */
static void set_home(struct s3fifo *s, uint32_t block, uint32_t written, uint8_t class)
{
	struct node *n = &s->node[block];

	if (n->written)
		s->home[n->written - 1][n->class]--;
	n->written = written;
	n->class = class;
	if (written)
		s->home[written - 1][class]++;
}

static void s3_idle(struct kvt_policy *p, uint32_t block, enum kvt_tier tier, bool clean)
{
	set_home(s3_of(p), block, (uint32_t)tier + 1, s3_of(p)->node[block].class);
	enter(s3_of(p), block, ((uint32_t)tier * 2 + clean) * 2 + s3_of(p)->node[block].class);
}

static void s3_busy(struct kvt_policy *p, uint32_t block)
{
	leave(s3_of(p), block);
}

/* Each block passed over loses a hit, of at most HITS_MAX that uses paid for: amortised O(1). */
static uint32_t s3_victim(struct kvt_policy *p, uint32_t tiers, bool clean)
{
	struct s3fifo *s = s3_of(p);

	for (uint32_t t = 0; t < KVT_TIERS; t++) {
		uint32_t small = (t * 2 + clean) * 2, main = small + 1;

		while ((tiers & (1u << t)) && s->len[small] + s->len[main]) {
			bool from_small = s->len[small] &&
					  s->home[t][0] * SMALL_SHARE >= s->home[t][0] + s->home[t][1];
			uint32_t block = s->queue[from_small || !s->len[main] ? small : main].head;
			struct node *n = &s->node[block];

			if (n->list == small ? n->hits <= 1 : !n->hits)
				return block;
			n->hits = n->list == small ? 0 : n->hits - 1;
			set_home(s, block, n->written, 1);
			n->stamp = ++s->clock;
			enter(s, block, main);
		}
	}
	return NONE;
}

static void s3_forget(struct kvt_policy *p, uint32_t block)
{
	struct s3fifo *s = s3_of(p);
	struct node *n = &s->node[block];

	leave(s, block);
	if (s->key[block] && !n->class)
		ghosts_put(&s->ghosts, s->key[block], &(struct ghost){ .when = ++s->evicted });
	s->key[block] = 0;
	set_home(s, block, 0, 0);
	n->stamp = 0;
	n->hits = 0;
}

const struct kvt_policy_ops kvt_policy_s3fifo = {
	.name = "s3fifo",
	.bytes = s3_bytes,
	.create = s3_create,
	.destroy = s3_destroy,
	.describe = s3_describe,
	.touch = s3_touch,
	.turn = s3_turn,
	.idle = s3_idle,
	.busy = s3_busy,
	.victim = s3_victim,
	.forget = s3_forget,
};
