// SPDX-License-Identifier: MIT
/* What a cache did and where its bytes are, as numbers and as JSON. */
#include <errno.h>
#include <jansson.h>
#include <string.h>

#include "base/err.h"
#include "base/params.h"
#include "cache/cache.h"

int kvt_cache_stats(struct kvt_cache *c, struct kvt_stats *stats)
{
	uint32_t size = stats ? stats->size : 0;
	struct kvt_stats st = { 0 };

	if (size < sizeof(uint32_t) * 2)
		return kvt_fail(-EINVAL, "stats: size is %u: begin with KVT_INIT()", size);
	kvt_store_stats(c->store, &st);
	pthread_mutex_lock(&c->lock);
	st.sequences = c->alive;
	st.streamed_bytes = c->streamed_bytes;
	st.in_place_bytes = c->in_place_bytes;
	pthread_mutex_unlock(&c->lock);
	if (size > sizeof(st)) {
		memset(stats, 0, size);
		size = sizeof(st);
	}
	st.size = size;
	memcpy(stats, &st, size);
	return 0;
}

void kvt_cache_streamed(struct kvt_cache *c, uint64_t streamed, uint64_t in_place)
{
	pthread_mutex_lock(&c->lock);
	c->streamed_bytes += streamed;
	c->in_place_bytes += in_place;
	pthread_mutex_unlock(&c->lock);
}

void kvt_cache_ring(struct kvt_cache *c, const struct kvt_ring_choice *choice)
{
	pthread_mutex_lock(&c->lock);
	c->ring = *choice;
	pthread_mutex_unlock(&c->lock);
}

/* What a batch does with blocks in pinned memory, and what it took to find out. */
static json_t *ring_json(struct kvt_cache *c)
{
	static const char *const ways[] = { "", "engine", "kernel", "in place" };
	struct kvt_ring_choice r;

	pthread_mutex_lock(&c->lock);
	r = c->ring;
	pthread_mutex_unlock(&c->lock);
	return json_pack("{ss sI sf sf sf}", "by", ways[r.way], "tried_bytes", (json_int_t)r.bytes, "engine_s", r.engine_s,
			 "kernel_s", r.kernel_s, "in_place_s", r.in_place_s);
}

static json_t *tier_json(const struct kvt_tier_stats *t)
{
	return json_pack("{sI sI sI sI sI sI sI}", "budget", (json_int_t)t->budget, "used", (json_int_t)t->used, "peak",
			 (json_int_t)t->peak, "overhead", (json_int_t)t->overhead, "frames", (json_int_t)t->frames,
			 "frames_free", (json_int_t)t->frames_free, "blocks", (json_int_t)t->blocks);
}

static json_t *prefix_json(struct kvt_cache *c)
{
	struct kvt_prefix_stats st = KVT_INIT(st);
	json_t *o = json_object(), *hit = json_object();

	kvt_prefix_stats(c, &st);
#define COUNT(name) json_object_set_new(o, #name, json_integer((json_int_t)st.name))
	COUNT(roots);
	COUNT(chunks);
	COUNT(chunks_free);
	COUNT(chunks_evictable);
	COUNT(chunks_pinned);
	COUNT(tokens);
	COUNT(lookups);
	COUNT(lookups_hit);
	COUNT(tokens_asked);
	COUNT(tokens_hit);
	COUNT(depth);
	COUNT(saved_ns);
	COUNT(inserted);
	COUNT(demoted);
	COUNT(dropped);
	COUNT(refused);
	COUNT(snapshots);
	COUNT(snapshots_used);
	COUNT(saved);
	COUNT(recovered);
	COUNT(untrue);
	COUNT(log_bytes);
#undef COUNT
	for (uint32_t t = 0; t < KVT_TIERS; t++)
		json_object_set_new(hit, kvt_tier_name(t), json_integer((json_int_t)st.hit_bytes[t]));
	json_object_set_new(o, "hit_bytes", hit);
	return o;
}

int64_t kvt_cache_stats_json(struct kvt_cache *c, char *buf, size_t bytes)
{
	struct kvt_stats st = KVT_INIT(st);
	struct kvt_device_rates rates;
	struct kvt_file_info info;
	json_t *root, *tiers;
	char *text;
	size_t n;

	if (bytes && !buf)
		return kvt_fail(-EINVAL, "statistics: nowhere to put %zu bytes", bytes);
	tiers = json_object();
	kvt_cache_stats(c, &st);
	kvt_store_io_info(c->store, &info);
	for (uint32_t t = 0; t < KVT_TIERS; t++)
		json_object_set_new(tiers, kvt_tier_name(t), tier_json(&st.tier[t]));
	root = json_pack("{ss ss ss ss ss sb si sI sI sI so}", "name", c->name, "version", kvt_version(), "host",
			 kvt_host_name(c->host), "host_note", kvt_host_note(c->host), "disk_fs", info.fs ? info.fs : "",
			 "disk_direct", info.direct, "sequences", st.sequences, "block_bytes", (json_int_t)st.block_bytes,
			 "blocks", (json_int_t)st.blocks, "blocks_dirty", (json_int_t)st.blocks_dirty, "tier", tiers);
	if (!root)
		return kvt_fail(-ENOMEM, "no memory for the stats");
#define COUNT(name) json_object_set_new(root, #name, json_integer((json_int_t)st.name))
	COUNT(rows_written);
	COUNT(hits);
	COUNT(misses);
	COUNT(disk_reads);
	COUNT(disk_read_bytes);
	COUNT(disk_writes);
	COUNT(disk_write_bytes);
	COUNT(moves);
	COUNT(move_bytes);
	COUNT(evictions);
	COUNT(cow_copies);
	COUNT(digest_errors);
	COUNT(io_errors);
	COUNT(full);
	COUNT(blocks_lost);
	COUNT(reclaimed);
	COUNT(warm_blocks);
	COUNT(gpu_lost);
	COUNT(gpu_dropped);
	COUNT(demotions);
	COUNT(disk_read_ns);
	COUNT(streamed_bytes);
	COUNT(in_place_bytes);
	COUNT(prefetched);
	COUNT(prefetch_used);
	COUNT(prefetch_wasted);
#undef COUNT
	if (c->prefix)
		json_object_set_new(root, "prefix", prefix_json(c));
	kvt_store_gpu_rates(c->store, &rates);
	json_object_set_new(root, "gpu_moves",
			    json_pack("{ss sf ss sf sI}", "up", rates.kernel[1] ? "kernel" : "engine", "up_bytes_per_s",
				      rates.bytes_per_s[1], "down", rates.kernel[0] ? "kernel" : "engine",
				      "down_bytes_per_s", rates.bytes_per_s[0], "calibration_us",
				      (json_int_t)rates.micros));
	json_object_set_new(root, "gpu_stream", ring_json(c));
	json_object_set_new(root, "gpu_backend", json_string(c->gpu ? c->gpu->ops->name : ""));
	json_object_set_new(root, "gpu", json_string(c->gpu ? c->gpu->description : ""));
	json_object_set_new(root, "disk_reason", json_string(info.reason ? info.reason : ""));
	text = json_dumps(root, JSON_INDENT(2) | JSON_PRESERVE_ORDER);
	json_decref(root);
	if (!text)
		return kvt_fail(-ENOMEM, "no memory for the stats");
	n = strlen(text);
	if (bytes) {
		size_t take = n < bytes ? n : bytes - 1;

		memcpy(buf, text, take);
		buf[take] = '\0';
	}
	free(text);
	return (int64_t)n;
}
