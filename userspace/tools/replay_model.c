// SPDX-License-Identifier: MIT
/*
 * The model of a prefix cache that a trace is replayed through, with the real policies.
 *
 * A prompt is a path from a root. A block is a hit if it and all before it are
 * cached. When a request is done all its blocks are cached, in the first tier,
 * and are touched, the last first; one turn has passed. Then each tier that is
 * too full gives blocks down, until it is not: the policy says which, of those
 * without a block behind them in this tier or a faster one. What leaves the last
 * tier is dropped. A request's own blocks need no place in a tier while it runs.
 *
 * The optimum. A use of a block is a use of all before it, so none is used later
 * than one behind it. Who keeps what is used soonest, of equals the shallowest,
 * thus never keeps a block without those before it: Belady's rule, with the
 * freedom not to cache at all, is within the model, and no policy beats it.
 */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "tools/replay.h"

#define NONE UINT32_MAX

/* A cached block, by the number that the policy knows. */
struct cached {
	uint32_t node;
	uint32_t tier;
	uint32_t behind[KVT_TIERS]; /* cached blocks behind it, by tier */
	uint32_t next;		    /* free list */
};

struct model {
	const struct trace *t;
	const struct replay_params *p;
	struct kvt_policy_params pp;
	const struct kvt_policy_ops *ops;
	struct kvt_policy *policy;
	struct cached *cached;
	uint32_t *where; /* [n_distinct] -> cached, or NONE */
	uint32_t free, used[KVT_TIERS];
	uint64_t block_bytes;
	double *ttft;
	struct replay_result *r;
};

static uint32_t longest(const struct trace *t)
{
	uint32_t most = 0;

	for (uint32_t i = 0; i < t->n_requests; i++)
		most = t->requests[i].n > most ? t->requests[i].n : most;
	return most;
}

static int model_init(struct model *m)
{
	uint64_t blocks = (uint64_t)longest(m->t);

	m->ops = m->p->policy;
	m->block_bytes = m->p->token_bytes * m->t->block_tokens;
	for (uint32_t t = 0; t < KVT_TIERS; t++)
		blocks += m->p->frames[t];
	if (blocks >= NONE)
		return kvt_fail(-E2BIG, "%llu blocks in all tiers are too many", (unsigned long long)blocks);
	m->pp = (struct kvt_policy_params){ .blocks = (uint32_t)blocks, .keyed = true };
	for (uint32_t t = 0; t < KVT_TIERS; t++) {
		uint64_t rate = m->p->load_bytes_per_s[t];
		double ns = rate ? (double)m->block_bytes * 1e9 / (double)rate : 0;

		m->pp.frames[t] = m->p->frames[t];
		m->pp.reload_ns[t] = ns < UINT32_MAX ? (uint32_t)ns : UINT32_MAX;
	}
	m->pp.recompute_ns = (uint32_t)fmin((double)m->t->block_tokens * 1e9 / (double)m->p->tokens_per_s, UINT32_MAX);
	m->policy = m->ops->create(&m->pp);
	m->cached = calloc(m->pp.blocks, sizeof(*m->cached));
	m->where = malloc(m->t->n_distinct * sizeof(*m->where));
	m->ttft = malloc(m->t->n_requests * sizeof(*m->ttft));
	if (!m->policy || !m->cached || !m->where || !m->ttft)
		return kvt_fail(-ENOMEM, "no memory to replay with %u blocks", m->pp.blocks);
	memset(m->where, 0xff, m->t->n_distinct * sizeof(*m->where));
	for (uint32_t i = 0; i < m->pp.blocks; i++)
		m->cached[i].next = i + 1 < m->pp.blocks ? i + 1 : NONE;
	return 0;
}

static void model_free(struct model *m)
{
	if (m->policy)
		m->ops->destroy(m->policy);
	free(m->cached);
	free(m->where);
	free(m->ttft);
}

/* The cached block before @i, or NONE. */
static uint32_t before(const struct model *m, uint32_t i)
{
	uint32_t parent = m->t->parent[m->cached[i].node];

	return parent == TRACE_NONE ? NONE : m->where[parent];
}

/* Tell the policy whether @i may leave its tier. */
static void settle(struct model *m, uint32_t i)
{
	const struct cached *c;
	uint32_t behind = 0;

	if (i == NONE)
		return;
	c = &m->cached[i];
	for (uint32_t t = 0; t <= c->tier; t++)
		behind += c->behind[t];
	if (behind)
		m->ops->busy(m->policy, i);
	else
		m->ops->idle(m->policy, i, c->tier, true);
}

/* Into @tier; KVT_TIERS: out of the cache. */
static void place(struct model *m, uint32_t i, uint32_t tier)
{
	struct cached *c = &m->cached[i];
	uint32_t up = before(m, i);

	if (c->tier < KVT_TIERS) {
		m->used[c->tier]--;
		if (up != NONE)
			m->cached[up].behind[c->tier]--;
	}
	c->tier = tier;
	if (tier < KVT_TIERS) {
		m->used[tier]++;
		if (up != NONE)
			m->cached[up].behind[tier]++;
	}
}

static uint32_t cache_block(struct model *m, uint32_t node)
{
	uint32_t i = m->free;
	struct cached *c = &m->cached[i];

	m->free = c->next;
	*c = (struct cached){ .node = node, .tier = KVT_TIERS };
	m->where[node] = i;
	return i;
}

static void drop(struct model *m, uint32_t i)
{
	struct cached *c = &m->cached[i];

	m->ops->forget(m->policy, i);
	m->where[c->node] = NONE;
	c->next = m->free;
	m->free = i;
	m->r->dropped++;
}

static int make_room(struct model *m)
{
	for (uint32_t t = 0; t < KVT_TIERS; t++) {
		uint32_t to = kvt_policy_below(&m->pp, t, 0);

		while (m->used[t] > m->p->frames[t]) {
			uint32_t i = m->ops->victim(m->policy, 1u << t, true), up;

			if (i == KVT_POLICY_NONE)
				return kvt_fail(-EUCLEAN, "policy %s has no candidate in tier %s", m->ops->name, kvt_tier_name(t));
			m->r->decisions = (m->r->decisions ^ ((uint64_t)m->cached[i].node << 3 | t)) * 0x100000001b3ull;
			up = before(m, i);
			place(m, i, to);
			if (to < KVT_TIERS) {
				m->r->stored_bytes[to] += m->block_bytes;
				settle(m, i);
			} else {
				drop(m, i);
			}
			settle(m, up);
		}
	}
	return 0;
}

/* What was generated after a prompt says much about who asks, and so about whether they come again. */
static uint32_t kind_of(uint32_t output)
{
	uint32_t bits = output ? 32 - (uint32_t)__builtin_clz(output) : 0;

	return bits <= 2 ? 0 : bits >= KVT_POLICY_KINDS + 1 ? KVT_POLICY_KINDS - 1 : bits - 2;
}

static int serve(struct model *m, const struct trace_request *q, double *ttft)
{
	const uint32_t *blocks = m->t->blocks + q->first;
	uint32_t hit = 0, first = kvt_policy_below(&m->pp, UINT32_MAX, 0);
	uint64_t cached_tokens = 0, compute;

	*ttft = 0;
	for (; hit < q->n && m->where[blocks[hit]] != NONE; hit++) {
		uint32_t tier = m->cached[m->where[blocks[hit]]].tier;

		m->r->hits[tier]++;
		m->r->loaded_bytes[tier] += m->block_bytes;
		*ttft += (double)m->pp.reload_ns[tier] / 1e9;
		cached_tokens += trace_tokens(m->t, q, hit);
	}
	/* the last token is computed in any case: it gives the first logits */
	compute = q->input > cached_tokens ? q->input - cached_tokens : q->input ? 1 : 0;
	m->r->tokens_hit += q->input - compute;
	m->r->tokens_computed += compute;
	*ttft += (double)compute / (double)m->p->tokens_per_s;
	if (first == KVT_TIERS)
		return 0;
	/* all are there before any is said to be a candidate: one is not while another lies behind it */
	for (uint32_t d = 0; d < q->n; d++) {
		uint32_t i = m->where[blocks[d]];

		place(m, i == NONE ? cache_block(m, blocks[d]) : i, first);
	}
	for (uint32_t d = q->n; d--;) {
		uint32_t i = m->where[blocks[d]];

		m->ops->describe(m->policy, i, &(struct kvt_content){ .key = blocks[d] + 1ull, .kind = kind_of(q->output) });
		m->ops->touch(m->policy, i, KVT_USE_READ);
		settle(m, i);
	}
	m->ops->turn(m->policy);
	return make_room(m);
}

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

int replay_run(const struct trace *t, const struct replay_params *p, struct replay_result *result)
{
	struct model m = { .t = t, .p = p, .r = result };
	int ret;

	memset(result, 0, sizeof(*result));
	ret = model_init(&m);
	for (uint32_t i = 0; i < t->n_requests && !ret; i++) {
		ret = serve(&m, &t->requests[i], &m.ttft[i]);
		if (p->progress)
			p->progress(p->arg, i + 1);
	}
	if (!ret) {
		qsort(m.ttft, t->n_requests, sizeof(*m.ttft), by_value);
		result->ttft_p50 = m.ttft[(t->n_requests - 1) / 2];
		result->ttft_p99 = m.ttft[(uint64_t)(t->n_requests - 1) * 99 / 100];
	}
	model_free(&m);
	return ret;
}

/* ---- the optimum ---- */

/* A cached block; used next by request @next, the farthest and then the deepest leaves first. */
struct due {
	uint32_t next, depth, node;
};

static bool leaves_before(const struct due *a, const struct due *b)
{
	return a->next != b->next ? a->next > b->next : a->depth > b->depth;
}

static void heap_push(struct due *heap, uint64_t n, struct due d)
{
	for (; n && leaves_before(&d, &heap[(n - 1) / 2]); n = (n - 1) / 2)
		heap[n] = heap[(n - 1) / 2];
	heap[n] = d;
}

/* @n: what is left */
static struct due heap_pop(struct due *heap, uint64_t n)
{
	struct due top = heap[0], last = heap[n];
	uint64_t i = 0, child;

	while ((child = 2 * i + 1) < n) {
		if (child + 1 < n && leaves_before(&heap[child + 1], &heap[child]))
			child++;
		if (!leaves_before(&heap[child], &last))
			break;
		heap[i] = heap[child];
		i = child;
	}
	heap[i] = last;
	return top;
}

int replay_optimum(const struct trace *t, uint64_t frames, uint64_t *hits)
{
	uint32_t *next = malloc(t->n_blocks * sizeof(*next)); /* [block of a request]: the next request that uses it */
	uint32_t *due = malloc(t->n_distinct * sizeof(*due)); /* [node]: cached, and used next by; 0: not cached */
	struct due *heap = malloc(t->n_blocks * sizeof(*heap));
	uint64_t n = 0, cached = 0;
	int ret = 0;

	*hits = 0;
	if (!next || !due || !heap) {
		ret = kvt_fail(-ENOMEM, "no memory for the optimum of %llu blocks", (unsigned long long)t->n_blocks);
		goto out;
	}
	memset(due, 0xff, t->n_distinct * sizeof(*due));
	for (uint32_t r = t->n_requests; r--;) {
		for (uint32_t d = 0; d < t->requests[r].n; d++) {
			uint64_t at = t->requests[r].first + d;

			next[at] = due[t->blocks[at]];
			due[t->blocks[at]] = r;
		}
	}
	memset(due, 0, t->n_distinct * sizeof(*due));
	for (uint32_t r = 0; r < t->n_requests; r++) {
		const uint32_t *blocks = t->blocks + t->requests[r].first;
		bool unbroken = true;

		for (uint32_t d = 0; d < t->requests[r].n; d++) {
			uint32_t node = blocks[d], use = next[t->requests[r].first + d];

			unbroken = unbroken && due[node];
			*hits += unbroken;
			cached -= due[node] != 0;
			due[node] = use == NONE ? 0 : use;
			if (use == NONE)
				continue;
			cached++;
			heap_push(heap, n++, (struct due){ use, d, node });
		}
		while (cached > frames) {
			struct due worst = heap_pop(heap, --n);

			if (due[worst.node] != worst.next) /* an entry from before a later use */
				continue;
			due[worst.node] = 0;
			cached--;
		}
	}
out:
	free(next);
	free(due);
	free(heap);
	return ret;
}
