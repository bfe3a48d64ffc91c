// SPDX-License-Identifier: MIT
/*
 * A trace through the prefix cache's own tree and the real policies; what is
 * modelled is the clock and how many blocks a tier holds.
 *
 * A prompt is a path in the tree, of chunks of one "token": the block's number. A
 * block is a hit if it and all before it are cached. When a request is done all its
 * blocks are cached, in the first tier, and are used, the last first; one turn has
 * passed. Then each tier that is too full gives blocks down, until it is not. What leaves
 * the last tier is dropped. A request's own blocks need no place in a tier while it runs.
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
#include "cache/tree.h"
#include "tools/replay.h"

#define NONE UINT32_MAX
#define SEED 1 /* of the hash: any */

struct model {
	const struct trace *t;
	const struct replay_params *p;
	struct kvt_policy_params pp;
	struct kvt_tree *tree;
	uint32_t root;
	uint32_t used[KVT_TIERS];
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
	int ret;

	m->block_bytes = m->p->token_bytes * m->t->block_tokens;
	for (uint32_t t = 0; t < KVT_TIERS; t++)
		blocks += m->p->frames[t];
	if (blocks >= NONE)
		return kvt_fail(-E2BIG, "%llu blocks in all tiers are too many", (unsigned long long)blocks);
	for (uint32_t t = 0; t < KVT_TIERS; t++) {
		uint64_t rate = m->p->load_bytes_per_s[t];
		double ns = rate ? (double)m->block_bytes * 1e9 / (double)rate : 0;

		m->pp.frames[t] = m->p->frames[t];
		m->pp.reload_ns[t] = ns < UINT32_MAX ? (uint32_t)ns : UINT32_MAX;
	}
	m->pp.recompute_ns = (uint32_t)fmin((double)m->t->block_tokens * 1e9 / (double)m->p->tokens_per_s, UINT32_MAX);
	ret = kvt_tree_create(1, (uint32_t)blocks, SEED, m->p->policy, &m->pp, &m->tree);
	if (ret)
		return ret;
	m->root = kvt_tree_root_get(m->tree, &(struct kvt_root_key){ 0 });
	m->ttft = malloc(m->t->n_requests * sizeof(*m->ttft));
	return m->ttft ? 0 : kvt_fail(-ENOMEM, "no memory to replay %u requests", m->t->n_requests);
}

static void model_free(struct model *m)
{
	kvt_tree_destroy(m->tree);
	free(m->ttft);
}

static int make_room(struct model *m)
{
	struct kvt_tree *tree = m->tree;

	for (uint32_t t = 0; t < KVT_TIERS; t++) {
		uint32_t to = kvt_policy_below(&m->pp, t, 0);

		for (; m->used[t] > m->p->frames[t]; m->used[t]--) {
			uint32_t node = kvt_tree_victim(tree, 1u << t);

			if (node == NONE)
				return kvt_fail(-EUCLEAN, "policy %s has no candidate in tier %s", tree->ops->name, kvt_tier_name(t));
			m->r->decisions ^= (uint64_t)*kvt_tree_tokens(tree, node) << 3 | t;
			m->r->decisions *= 0x100000001b3ull;
			if (to < KVT_TIERS) {
				m->used[to]++;
				m->r->stored_bytes[to] += m->block_bytes;
				kvt_tree_place(tree, node, (enum kvt_tier)to);
			} else {
				m->r->dropped++;
				kvt_tree_remove(tree, node);
			}
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

static void count_hits(struct model *m, const struct trace_request *q, const struct kvt_tree_path *path, double *ttft)
{
	uint64_t cached = 0, compute;

	for (uint32_t node = path->node; node != NONE; node = m->tree->nodes[node].parent) {
		uint32_t tier = m->tree->nodes[node].tier;

		m->r->hits[tier]++;
		m->r->loaded_bytes[tier] += m->block_bytes;
		*ttft += (double)m->pp.reload_ns[tier] / 1e9;
	}
	for (uint32_t i = 0; i < path->chunks; i++)
		cached += trace_tokens(m->t, q, i);
	/* the last token is computed in any case: it gives the first logits */
	compute = q->input > cached ? q->input - cached : q->input ? 1 : 0;
	m->r->tokens_hit += q->input - compute;
	m->r->tokens_computed += compute;
	*ttft += (double)compute / (double)m->p->tokens_per_s;
}

static int serve(struct model *m, const struct trace_request *q, double *ttft)
{
	const uint32_t *blocks = m->t->blocks + q->first, first = kvt_policy_below(&m->pp, UINT32_MAX, 0);
	struct kvt_tree *tree = m->tree;
	struct kvt_tree_path path;
	uint32_t node;

	kvt_tree_walk(tree, m->root, blocks, q->n, &path);
	*ttft = 0;
	count_hits(m, q, &path, ttft);
	if (first == KVT_TIERS)
		return 0;
	for (node = path.node; node != NONE; node = tree->nodes[node].parent) {
		m->used[tree->nodes[node].tier]--;
		kvt_tree_place(tree, node, (enum kvt_tier)first);
	}
	node = path.node;
	for (uint32_t i = path.chunks; i < q->n; i++)
		node = kvt_tree_add(tree, m->root, node, &blocks[i], 1, (enum kvt_tier)first);
	m->used[first] += q->n;
	for (; node != NONE; node = tree->nodes[node].parent)
		kvt_tree_use(tree, node, &(struct kvt_content){ .key = *kvt_tree_tokens(tree, node) + 1ull,
								.kind = kind_of(q->output) });
	kvt_tree_turn(tree);
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
