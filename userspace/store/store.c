// SPDX-License-Identifier: MIT
/* A store's life: everything it needs is sized, charged and allocated here, and given back. */
#include "store/internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/err.h"
#include "codec/codec.h"

static uint32_t staging_frames(const struct kvt_store_params *p)
{
	uint64_t n = STAGING_BYTES / p->block_bytes;

	if (!p->frames[KVT_TIER_DISK])
		return 0;
	return n < 1 ? 1 : n > STAGING_MAX ? STAGING_MAX : (uint32_t)n;
}

static uint32_t block_count(const struct kvt_store_params *p)
{
	uint64_t n = 0;

	for (uint32_t t = 0; t < KVT_TIERS; t++)
		n += p->frames[t];
	return n < NONE ? (uint32_t)n : NONE - 1;
}

static struct kvt_policy_params policy_params(const struct kvt_store_params *p)
{
	struct kvt_policy_params policy = { .blocks = block_count(p) };

	memcpy(policy.frames, p->frames, sizeof(policy.frames));
	return policy;
}

uint64_t kvt_store_overhead(const struct kvt_store_params *p)
{
	struct kvt_policy_params policy = policy_params(p);
	uint64_t blocks = block_count(p), staging = staging_frames(p), lists = staging;

	for (uint32_t t = 0; t < KVT_TIERS; t++)
		lists += p->frames[t];
	return kvt_warm_frames(p) * p->block_bytes + sizeof(struct kvt_store) +
	       p->n_planes * sizeof(struct kvt_plane_geom) + blocks * sizeof(struct block) +
	       p->policy->bytes(&policy) + lists * sizeof(uint32_t) + (staging + 1) * p->block_bytes +
	       MOVER_STACK;
}

uint64_t kvt_store_gpu_overhead(const struct kvt_store_params *p)
{
	return p->frames[KVT_TIER_GPU] ? kvt_device_overhead(p) : 0;
}

static int list_init(struct free_list *l, uint32_t n)
{
	l->n = l->total = n;
	if (!n)
		return 0;
	l->item = malloc(n * sizeof(*l->item));
	if (!l->item)
		return -ENOMEM;
	for (uint32_t i = 0; i < n; i++)
		l->item[i] = n - 1 - i;
	return 0;
}

/* A pinned tier whose pages may not be locked serves all the same, with a warning. */
static int make_pool(struct kvt_store *s, const struct kvt_store_params *p, uint32_t tier)
{
	struct kvt_pool_params pool = {
		.n_frames = p->frames[tier] + (tier == KVT_TIER_RAM ? kvt_warm_frames(p) : 0),
		.pinned = tier == KVT_TIER_PINNED,
		.reclaim = tier == KVT_TIER_RAM,
		.name = tier == KVT_TIER_RAM ? p->warm : NULL,
		.hugepages = p->flags & KVT_CACHE_HUGEPAGES,
		.numa_strict = p->flags & KVT_CACHE_NUMA_STRICT,
		.node = p->numa_node,
	};
	int ret = kvt_pool_create(s->host, &pool, &s->pool[tier]);

	if (ret == -ENOMEM && pool.pinned) {
		kvt_log(KVT_LOG_WARN, "pinned tier: not locked: %s", kvt_last_error());
		pool.pinned = false;
		ret = kvt_pool_create(s->host, &pool, &s->pool[tier]);
	}
	return ret;
}

static int make_frames(struct kvt_store *s, const struct kvt_store_params *p)
{
	struct kvt_file_params file = { .dir = p->disk_dir, .name = p->disk_name, .n_slots = p->frames[KVT_TIER_DISK] };
	struct kvt_file_info info;
	struct kvt_pool_params staging = { .n_frames = staging_frames(p), .node = p->numa_node };
	int ret;

	for (uint32_t t = KVT_TIER_PINNED; t <= KVT_TIER_RAM; t++) {
		if (!p->frames[t])
			continue;
		ret = make_pool(s, p, t);
		if (ret)
			return ret;
	}
	if (p->warm && !p->frames[KVT_TIER_RAM])
		return kvt_fail(-EINVAL, "the ram tier has no frames that the pool %s could keep", p->warm);
	if (p->frames[KVT_TIER_DISK]) {
		ret = kvt_pool_create(s->host, &staging, &s->staging);
		if (!ret)
			ret = kvt_file_open(s->host, &file, &s->file);
		if (ret)
			return ret;
		kvt_file_info(s->file, &info);
		if (!info.direct)
			kvt_log(KVT_LOG_WARN, "disk tier in %s (%s): buffered, so it uses memory beside the budgets: %s", p->disk_dir,
				info.fs, info.reason);
	}
	return p->frames[KVT_TIER_GPU] ? kvt_device_create(s, p->frames[KVT_TIER_GPU]) : 0;
}

static int charge(struct kvt_store *s, const struct kvt_store_params *p)
{
	uint32_t t;
	int ret = kvt_budget_charge(&p->budget[KVT_TIER_RAM], s->overhead);

	if (ret)
		return kvt_fail(ret, "the ram budget is %llu bytes, and bookkeeping alone takes %llu",
				(unsigned long long)p->budget[KVT_TIER_RAM].limit, (unsigned long long)s->overhead);
	ret = kvt_budget_charge(&p->budget[KVT_TIER_GPU], s->gpu_overhead);
	if (ret)
		goto err_overhead;
	for (t = 0; t < KVT_TIERS; t++) {
		ret = kvt_budget_charge(&p->budget[t], p->frames[t] * p->block_bytes);
		if (ret)
			goto err_frames;
	}
	s->budget = p->budget;
	return 0;

err_frames:
	kvt_fail(ret, "the %s budget is %llu bytes, and %u frames of %llu were asked for", kvt_tier_name(t),
		 (unsigned long long)p->budget[t].limit, p->frames[t], (unsigned long long)p->block_bytes);
	while (t--)
		kvt_budget_release(&p->budget[t], p->frames[t] * p->block_bytes);
	kvt_budget_release(&p->budget[KVT_TIER_GPU], s->gpu_overhead);
err_overhead:
	kvt_budget_release(&p->budget[KVT_TIER_RAM], s->overhead);
	return ret;
}

static int allocate(struct kvt_store *s, const struct kvt_store_params *p)
{
	struct kvt_policy_params policy = policy_params(p);
	int ret = 0;

	s->planes = malloc(p->n_planes * sizeof(*s->planes));
	s->blocks = calloc(s->n_blocks, sizeof(*s->blocks));
	s->policy = p->policy->create(&policy);
	for (uint32_t t = 0; t < KVT_TIERS; t++)
		ret |= list_init(&s->frames[t], p->frames[t]);
	ret |= list_init(&s->bounces, staging_frames(p));
	s->zeros = mmap(NULL, p->block_bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (ret || !s->planes || !s->blocks || !s->policy || s->zeros == MAP_FAILED)
		return kvt_fail(-ENOMEM, "no memory for the metadata of %u blocks (%llu bytes)", s->n_blocks,
				(unsigned long long)s->overhead);
	memcpy(s->planes, p->planes, p->n_planes * sizeof(*s->planes));
	for (uint32_t i = 0; i < s->n_blocks; i++) {
		s->blocks[i].frame = s->blocks[i].slot = NONE;
		s->blocks[i].next = i + 1 < s->n_blocks ? i + 1 : NONE;
	}
	for (uint32_t i = 0; i < IO_DEPTH; i++)
		s->io[i].next = i + 1 < IO_DEPTH ? i + 1 : NONE;
	s->queue_head = NONE;
	return 0;
}

static void release(struct kvt_store *s)
{
	kvt_device_destroy(s);
	if (s->file)
		kvt_file_close(s->host, s->file);
	if (s->staging)
		kvt_pool_destroy(s->host, s->staging);
	for (uint32_t t = 0; t < KVT_TIERS; t++) {
		if (s->pool[t])
			kvt_pool_destroy(s->host, s->pool[t]);
		if (s->budget)
			kvt_budget_release(&s->budget[t], s->budget_frames[t] * s->block_bytes);
		free(s->frames[t].item);
	}
	if (s->budget) {
		kvt_budget_release(&s->budget[KVT_TIER_RAM], s->overhead);
		kvt_budget_release(&s->budget[KVT_TIER_GPU], s->gpu_overhead);
	}
	free(s->bounces.item);
	if (s->zeros && s->zeros != MAP_FAILED)
		munmap(s->zeros, s->block_bytes);
	if (s->policy)
		s->policy_ops->destroy(s->policy);
	free(s->blocks);
	free(s->planes);
	if (s->wake >= 0)
		close(s->wake);
	pthread_cond_destroy(&s->cond);
	pthread_mutex_destroy(&s->lock);
	free(s);
}

uint64_t kvt_store_wanting(const struct kvt_store *s, uint64_t blocks)
{
	return blocks > s->n_blocks ? blocks - s->n_blocks : 0;
}

int kvt_store_create(const struct kvt_store_params *p, struct kvt_store **store)
{
	struct kvt_store *s = calloc(1, sizeof(*s));
	uint32_t reserve = p->frames[KVT_TIER_DISK] / 8;
	int ret;

	if (!s)
		return kvt_fail(-ENOMEM, "no memory for a store");
	pthread_mutex_init(&s->lock, NULL);
	pthread_cond_init(&s->cond, NULL);
	s->n_planes = p->n_planes;
	s->n_blocks = block_count(p);
	s->flags = p->flags;
	s->block_bytes = p->block_bytes;
	s->host = p->host;
	s->gpu = p->gpu;
	s->policy_ops = p->policy;
	s->rate = p->writeback_bytes_per_s;
	s->slot_reserve = !p->frames[KVT_TIER_DISK]  ? 0 :
			  reserve < 1		     ? 1 :
			  reserve > SLOT_RESERVE_MAX ? SLOT_RESERVE_MAX :
						       reserve;
	s->adopting = p->disk_name;
	s->dirty_max = UINT32_MAX;
	if (p->frames[KVT_TIER_DISK])
		s->dirty_max = p->frames[KVT_TIER_PINNED] + p->frames[KVT_TIER_RAM] - p->headroom;
	s->overhead = kvt_store_overhead(p);
	s->gpu_overhead = kvt_store_gpu_overhead(p);
	memcpy(s->budget_frames, p->frames, sizeof(s->budget_frames));
	s->wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
	if (s->wake < 0) {
		ret = kvt_fail(-errno, "eventfd: %s", strerror(errno));
		goto err_release;
	}
	ret = charge(s, p);
	if (ret)
		goto err_release;
	ret = allocate(s, p);
	if (ret)
		goto err_release;
	ret = make_frames(s, p);
	if (!ret && p->warm)
		ret = kvt_warm_open(s, p);
	if (ret)
		goto err_release;
	ret = kvt_store_mover_start(s);
	if (ret)
		goto err_release;
	*store = s;
	return 0;

err_release:
	release(s);
	return ret;
}

void kvt_store_destroy(struct kvt_store *s)
{
	if (!s)
		return;
	kvt_store_mover_stop(s);
	release(s);
}

void kvt_store_stats(struct kvt_store *s, struct kvt_stats *st)
{
	struct kvt_tier_stats *tier = st->tier;

	pthread_mutex_lock(&s->lock);
	*st = s->st;
	st->block_bytes = s->block_bytes;
	st->blocks_dirty = s->dirty;
	for (uint32_t t = 0; t < KVT_TIERS; t++) {
		st->tier[t] = (struct kvt_tier_stats){
			.budget = s->budget[t].limit,
			.used = s->budget[t].used,
			.peak = s->budget[t].peak,
			.frames = s->frames[t].total,
			.frames_free = s->frames[t].n,
			.blocks = s->tier_blocks[t],
		};
		tier[t].overhead = s->budget[t].used - s->budget_frames[t] * s->block_bytes;
	}
	pthread_mutex_unlock(&s->lock);
}

void kvt_store_io_info(struct kvt_store *s, struct kvt_file_info *info)
{
	if (s->file)
		kvt_file_info(s->file, info);
	else
		*info = (struct kvt_file_info){ .reason = "no disk tier", .fs = "" };
}

const uint8_t *kvt_store_zeros(const struct kvt_store *s)
{
	return s->zeros;
}

static int disagree(const char *what, uint32_t tier, uint64_t have, uint64_t want)
{
	return kvt_fail(-EUCLEAN, "%s of tier %s: %llu, but %llu are counted", what, kvt_tier_name(tier),
			(unsigned long long)have, (unsigned long long)want);
}

int kvt_store_check(struct kvt_store *s)
{
	uint64_t placed[KVT_TIERS] = { 0 }, flying[KVT_TIERS] = { 0 }, alive = 0, dirty = 0, dirty_host = 0,
		 ahead = 0;
	int ret = 0;

	pthread_mutex_lock(&s->lock);
	for (uint32_t i = 0; i < s->n_blocks; i++) {
		const struct block *b = &s->blocks[i];

		if (b->state == B_FREE)
			continue;
		alive++;
		dirty += b->dirty;
		ahead += b->ahead == AHEAD_WANTED;
		dirty_host += b->dirty && b->frame != NONE && b->tier != KVT_TIER_GPU;
		if (b->frame != NONE)
			placed[b->tier]++;
		placed[KVT_TIER_DISK] += b->slot != NONE;
	}
	flying[KVT_TIER_DISK] = s->stores; /* each has taken a slot that is not published yet */
	for (uint32_t t = 0; t < KVT_TIERS && !ret; t++) {
		if (placed[t] != s->tier_blocks[t])
			ret = disagree("blocks", t, s->tier_blocks[t], placed[t]);
		else if (!s->loads && !s->working &&
			 s->frames[t].n + placed[t] + flying[t] != s->frames[t].total)
			ret = disagree("frames used and free", t, s->frames[t].total, s->frames[t].n + placed[t] + flying[t]);
	}
	if (!ret && ahead != s->st.prefetched - s->st.prefetch_used - s->st.prefetch_wasted)
		ret = disagree("prefetched blocks", KVT_TIER_RAM,
			       s->st.prefetched - s->st.prefetch_used - s->st.prefetch_wasted, ahead);
	if (!ret && alive != s->st.blocks)
		ret = disagree("live blocks", KVT_TIER_RAM, s->st.blocks, alive);
	if (!ret && dirty_host != s->dirty_host)
		ret = disagree("dirty blocks in host frames", KVT_TIER_RAM, s->dirty_host, dirty_host);
	if (!ret && dirty != s->dirty)
		ret = disagree("dirty blocks", KVT_TIER_RAM, s->dirty, dirty);
	pthread_mutex_unlock(&s->lock);
	return ret;
}

int kvt_store_fd(struct kvt_store *s)
{
	return s->file ? kvt_file_fd(s->file) : -1;
}

const uint8_t *kvt_store_pool(const struct kvt_store *s, enum kvt_tier tier)
{
	return s->pool[tier] ? s->pool[tier]->base : NULL;
}

uint32_t kvt_store_slot(struct kvt_store *s, uint32_t block)
{
	uint32_t slot;

	pthread_mutex_lock(&s->lock);
	slot = s->blocks[block].dirty ? NONE : s->blocks[block].slot;
	pthread_mutex_unlock(&s->lock);
	return slot;
}

uint8_t *kvt_store_frame(struct kvt_store *s, uint32_t block, enum kvt_tier *tier)
{
	const struct block *b = &s->blocks[block];
	uint8_t *data = NULL;

	pthread_mutex_lock(&s->lock);
	*tier = b->tier;
	if (b->frame != NONE && b->tier != KVT_TIER_GPU)
		data = kvt_store_host_frame(s, b->tier, b->frame);
	pthread_mutex_unlock(&s->lock);
	return data;
}
