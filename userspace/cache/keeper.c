// SPDX-License-Identifier: MIT
/*
 * The keeper: one thread that writes down which chunk lies where, so that the
 * next process finds it; and the reading of what the last one wrote.
 *
 * It alone touches the log. A chunk is queued when it is inserted; its blocks are
 * written back, then its record is appended behind its parent's. A chunk that is
 * dropped leaves its number to be written down as gone. Nobody waits for it but a flush.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "cache/prefix.h"
#include "store/journal.h"

#define NONE KVT_TREE_NONE
#define STACK (256u << 10)
#define DROPS 256	/* written down at once */
#define RETRIES 3	/* chunks dropped from disk to make room for one: they may have fewer blocks */
#define IS_ROOT (1u << 31)

struct kvt_keeper {
	struct kvt_prefix *prefix;
	struct kvt_dir *dir;
	pthread_t thread;
	pthread_cond_t work, idle;
	uint32_t head, tail; /* nodes to be saved, the oldest first */
	uint64_t *drops;     /* [capacity] chunks that are gone; more than that are not written down */
	uint32_t n_drops;
	uint64_t next_id;
	uint64_t *ids;	     /* [2 * live_max()] scratch of a compaction */
	uint8_t *buf;
	struct kvt_block_entry *entries; /* [chunk_blocks] */
	uint64_t log_max;
	uint64_t live;	     /* bytes of the log after the last compaction */
	bool busy, stop, started;
};

/* ---- what it takes ---- */

static uint64_t record_max(const struct kvt_prefix_plan *plan)
{
	return kvt_log_bytes(KVT_LOG_CHUNK, plan->chunk, plan->chunk_blocks) +
	       kvt_log_bytes(KVT_LOG_ROOT, sizeof(struct kvt_root_key), 0);
}

static uint64_t buf_bytes(const struct kvt_prefix_plan *plan)
{
	uint64_t drops = DROPS * kvt_log_bytes(KVT_LOG_DROP, 0, 0), record = record_max(plan);

	return record > drops ? record : drops;
}

/* Numbers in use at once: of chunks, and of their roots. */
static uint64_t live_max(uint64_t capacity)
{
	return 2 * capacity;
}

uint64_t kvt_keeper_bytes(const struct kvt_prefix_plan *plan, uint32_t capacity)
{
	return sizeof(struct kvt_keeper) + (capacity + 2 * live_max(capacity)) * sizeof(uint64_t) + buf_bytes(plan) +
	       plan->chunk_blocks * sizeof(struct kvt_block_entry) + STACK;
}

#define LOG_LEAST (64u << 10)

/* Of the disk's bytes: the live records of a full disk, as many that are not, and a compacted log beside them. */
static double log_share(const struct kvt_prefix_plan *plan, uint64_t block_bytes)
{
	uint64_t record = 3 * record_max(plan), chunk = plan->chunk_blocks * block_bytes;

	return (double)record / (double)(record + chunk);
}

uint64_t kvt_keeper_log_max(const struct kvt_prefix_plan *plan, uint64_t disk_bytes, uint64_t block_bytes)
{
	return (uint64_t)((double)disk_bytes * log_share(plan, block_bytes)) / 4096 * 4096 + LOG_LEAST;
}

uint64_t kvt_keeper_disk_least(const struct kvt_prefix_plan *plan, uint64_t block_bytes)
{
	double bytes = (double)(LOG_LEAST + block_bytes) / (1 - log_share(plan, block_bytes));

	return ((uint64_t)bytes / 4096 + 1) * 4096;
}

/* ---- queues: with the prefix's lock ---- */

static void dequeue(struct kvt_keeper *k, uint32_t node)
{
	struct kvt_tree_node *nodes = k->prefix->tree->nodes, *v = &nodes[node];

	if (v->before != NONE)
		nodes[v->before].after = v->after;
	else
		k->head = v->after;
	if (v->after != NONE)
		nodes[v->after].before = v->before;
	else
		k->tail = v->before;
	v->flags &= ~KVT_NODE_QUEUED;
}

void kvt_keeper_added(struct kvt_prefix *p, uint32_t node)
{
	struct kvt_tree_node *v = &p->tree->nodes[node];
	struct kvt_keeper *k = p->keeper;

	if (!k || (v->flags & KVT_NODE_QUEUED))
		return;
	v->flags |= KVT_NODE_QUEUED;
	v->before = k->tail;
	v->after = NONE;
	if (k->tail != NONE)
		p->tree->nodes[k->tail].after = node;
	else
		k->head = node;
	k->tail = node;
	pthread_cond_signal(&k->work);
}

void kvt_keeper_dropped(struct kvt_prefix *p, uint32_t node)
{
	struct kvt_tree_node *v = &p->tree->nodes[node];
	struct kvt_keeper *k = p->keeper;

	if (!k)
		return;
	if (v->flags & KVT_NODE_QUEUED)
		dequeue(k, node);
	if (!v->id || k->n_drops == p->plan.capacity)
		return;
	k->drops[k->n_drops++] = v->id;
	pthread_cond_signal(&k->work);
}

/* ---- writing: the thread's, with the lock let go ---- */

/* What nobody knows any more goes: also records that were never told to be gone, since a process was killed. */
static void compact(struct kvt_keeper *k)
{
	const struct kvt_tree *t = k->prefix->tree;
	uint64_t n = 0;

	pthread_mutex_lock(&k->prefix->lock);
	for (uint32_t i = 0; i < t->fresh_node; i++)
		if (t->nodes[i].n && (t->nodes[i].flags & KVT_NODE_SAVED))
			k->ids[n++] = t->nodes[i].id;
	for (uint32_t i = 0; i < t->fresh_root && n < live_max(t->capacity); i++)
		if (t->roots[i].nodes && t->roots[i].id)
			k->ids[n++] = t->roots[i].id;
	pthread_mutex_unlock(&k->prefix->lock);
	if (kvt_dir_compact(k->dir, k->ids, n, k->ids + live_max(t->capacity)))
		kvt_log(KVT_LOG_WARN, "store directory: %s", kvt_last_error());
	k->live = k->dir->log_bytes;
}

static int append(struct kvt_keeper *k, uint64_t bytes)
{
	uint64_t room = k->log_max / 3 * 2;

	if (k->dir->log_bytes + bytes > room && k->dir->log_bytes > k->live + k->live / 4)
		compact(k);
	if (k->dir->log_bytes + bytes > room)
		return kvt_fail(-ENOSPC, "the log has its %llu bytes: raise disk_bytes", (unsigned long long)room);
	return kvt_dir_append(k->dir, k->buf, bytes);
}

static void write_drops(struct kvt_keeper *k)
{
	struct kvt_log_head h = { .type = KVT_LOG_DROP };
	uint32_t n = k->n_drops < DROPS ? k->n_drops : DROPS;
	uint64_t at = 0;

	for (uint32_t i = 0; i < n; i++) {
		h.id = k->drops[--k->n_drops];
		kvt_log_make(k->buf + at, &h, k->dir->super->dir, NULL, NULL);
		at += kvt_log_bytes(KVT_LOG_DROP, 0, 0);
	}
	pthread_mutex_unlock(&k->prefix->lock);
	if (append(k, at))
		kvt_log(KVT_LOG_WARN, "store directory: %s", kvt_last_error());
	pthread_mutex_lock(&k->prefix->lock);
}

/* The blocks of a held node are on disk, and k->entries says where. */
static int save_blocks(struct kvt_keeper *k, uint32_t node, uint32_t *n)
{
	struct kvt_prefix *p = k->prefix;
	const uint32_t *blocks = kvt_prefix_blocks(p, node);
	int ret = kvt_store_save(p->cache->store, blocks, p->plan.chunk_blocks);

	for (int i = 0; ret == -ENOSPC && i < RETRIES && kvt_prefix_drop_from(p, KVT_TIER_DISK, 1); i++)
		ret = kvt_store_save(p->cache->store, blocks, p->plan.chunk_blocks);
	*n = 0;
	for (uint32_t i = 0; i < p->plan.chunk_blocks && !ret; i++) {
		if (blocks[i] == KVT_NO_BLOCK)
			continue;
		if (!kvt_store_entry(p->cache->store, blocks[i], &k->entries[*n]))
			return -EBADMSG;
		k->entries[(*n)++].index = i;
	}
	return ret;
}

/* Its record, and its root's before it where that is not there yet. Returns their bytes. */
static uint64_t make_records(struct kvt_keeper *k, uint32_t node, uint64_t root, uint64_t parent, bool new_root,
			     uint32_t n_blocks)
{
	const struct kvt_tree *t = k->prefix->tree;
	const struct kvt_tree_node *v = &t->nodes[node];
	struct kvt_log_head h = { .type = KVT_LOG_ROOT, .id = root, .n_tokens = sizeof(struct kvt_root_key) };
	uint64_t at = 0;

	if (new_root) {
		kvt_log_make(k->buf, &h, k->dir->super->dir, &t->roots[v->root].key, NULL);
		at = kvt_log_bytes(h.type, h.n_tokens, 0);
	}
	h = (struct kvt_log_head){ .type = KVT_LOG_CHUNK, .ns = v->ns, .id = v->id, .parent = parent, .root = root,
				   .n_tokens = v->n, .n_blocks = n_blocks };
	for (uint32_t i = 0; i < n_blocks; i++)
		k->entries[i].id.chunk = v->id;
	kvt_log_make(k->buf + at, &h, k->dir->super->dir, kvt_tree_tokens(t, node), k->entries);
	return at + kvt_log_bytes(h.type, h.n_tokens, h.n_blocks);
}

static void save_node(struct kvt_keeper *k, uint32_t node)
{
	struct kvt_prefix *p = k->prefix;
	struct kvt_tree_node *v = &p->tree->nodes[node];
	struct kvt_tree_root *r = &p->tree->roots[v->root];
	const struct kvt_tree_node *up = v->parent == NONE ? NULL : &p->tree->nodes[v->parent];
	bool new_root = !r->id;
	uint32_t n_blocks;
	int ret;

	dequeue(k, node);
	if ((v->flags & KVT_NODE_BAD) || (up && !(up->flags & KVT_NODE_SAVED)))
		return; /* without its parent it would not be found */
	if (new_root)
		r->id = k->next_id++;
	if (!v->id)
		v->id = k->next_id++;
	kvt_tree_hold(p->tree, node); /* and with it the root, and what is above */
	pthread_mutex_unlock(&p->lock);
	ret = save_blocks(k, node, &n_blocks);
	if (!ret)
		ret = append(k, make_records(k, node, r->id, up ? up->id : r->id, new_root, n_blocks));
	if (ret)
		kvt_log(KVT_LOG_WARN, "store directory: a chunk is not kept: %s", kvt_last_error());
	pthread_mutex_lock(&p->lock);
	if (!ret) {
		v->flags |= KVT_NODE_SAVED;
		p->st.saved++;
	} else if (new_root) {
		r->id = 0;
	}
	kvt_tree_unhold(p->tree, node);
}

static void *keep(void *arg)
{
	struct kvt_keeper *k = arg;
	struct kvt_prefix *p = k->prefix;

	pthread_mutex_lock(&p->lock);
	while (!k->stop || k->head != NONE || k->n_drops) {
		k->busy = k->head != NONE || k->n_drops;
		p->st.log_bytes = k->dir->log_bytes;
		if (k->n_drops) {
			write_drops(k);
		} else if (k->head != NONE) {
			save_node(k, k->head);
		} else {
			pthread_cond_broadcast(&k->idle);
			pthread_cond_wait(&k->work, &p->lock);
		}
	}
	k->busy = false;
	pthread_mutex_unlock(&p->lock);
	return NULL;
}

void kvt_keeper_flush(struct kvt_prefix *p)
{
	struct kvt_keeper *k = p->keeper;

	if (!k)
		return;
	pthread_mutex_lock(&p->lock);
	while (k->busy || k->head != NONE || k->n_drops) {
		pthread_cond_signal(&k->work);
		pthread_cond_wait(&k->idle, &p->lock);
	}
	pthread_mutex_unlock(&p->lock);
}

/* ---- reading what the last process wrote; nobody else is there yet ---- */

/* Numbers of roots and chunks to their places here. What it takes is given back before the cache starts. */
struct reading {
	struct kvt_prefix *prefix;
	const uint8_t *log;
	uint64_t bytes, end, mask;
	uint64_t *id;	    /* [mask + 1] */
	uint32_t *place;    /* a node, or a root with IS_ROOT, or NONE */
	uint64_t *drops, n_drops;
	uint64_t *record;   /* [capacity] where a node's is; 0: it has none any more */
	uint32_t *owner;    /* [slots] node + 1 */
	uint32_t n_slots;
};

static uint32_t *place_of(const struct reading *r, uint64_t id)
{
	uint64_t i = id * 0x9E3779B97F4A7C15ull >> 20;

	for (i &= r->mask; r->id[i] && r->id[i] != id; i = (i + 1) & r->mask)
		;
	r->id[i] = id;
	return &r->place[i];
}

static int by_id(const void *a, const void *b)
{
	const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

	return x < y ? -1 : x > y;
}

/* First pass: how many there are, and which are gone. */
static int count_records(struct reading *r)
{
	uint64_t dir = r->prefix->keeper->dir->super->dir, n = 0, drops = 0, at = 0;
	struct kvt_log_record rec;

	while (kvt_log_next(r->log, r->bytes, dir, &at, &rec)) {
		drops += rec.head.type == KVT_LOG_DROP;
		r->prefix->keeper->next_id = rec.head.id >= r->prefix->keeper->next_id ? rec.head.id + 1 :
										     r->prefix->keeper->next_id;
		r->end = rec.end;
		n++;
	}
	for (r->mask = 64; r->mask < 3 * n; r->mask *= 2)
		;
	r->id = calloc(r->mask, sizeof(*r->id));
	r->place = malloc(r->mask-- * sizeof(*r->place));
	r->drops = malloc((drops + 1) * sizeof(*r->drops));
	r->record = calloc(r->prefix->plan.capacity, sizeof(*r->record));
	r->owner = calloc(r->n_slots, sizeof(*r->owner));
	if (!r->id || !r->place || !r->drops || !r->record || !r->owner)
		return kvt_fail(-ENOMEM, "store directory: no memory to read %llu records", (unsigned long long)n);
	memset(r->place, 0xff, (r->mask + 1) * sizeof(*r->place)); /* NONE */
	for (at = 0; kvt_log_next(r->log, r->bytes, dir, &at, &rec);)
		if (rec.head.type == KVT_LOG_DROP)
			r->drops[r->n_drops++] = rec.head.id;
	qsort(r->drops, r->n_drops, sizeof(*r->drops), by_id);
	return 0;
}

/* Are its entries what a chunk of so many tokens has, in slots that there are? */
static bool entries_fit(const struct reading *r, const struct kvt_log_record *rec)
{
	const struct kvt_cache *c = r->prefix->cache;
	const struct kvt_block_entry *e = rec->entries, *end = e + rec->head.n_blocks;
	uint32_t base = 0;

	for (uint32_t i = 0; i < c->n_planes; i++) {
		const struct kvt_plane *plane = &c->planes[i];
		uint32_t per = kvt_prefix_per_chunk(r->prefix, plane);
		uint32_t used = (rec->head.n_tokens + plane->geom.block_rows - 1) / plane->geom.block_rows;

		for (uint32_t b = 0; per && b < used; b++, e++) {
			uint32_t rows = rec->head.n_tokens - b * plane->geom.block_rows;

			rows = rows < plane->geom.block_rows ? rows : plane->geom.block_rows;
			if (e == end || e->index != base + b || e->id.plane != i || e->id.chunk != rec->head.id ||
			    e->id.rows < rows || e->id.rows > plane->geom.block_rows || e->slot >= r->n_slots)
				return false;
		}
		base += per;
	}
	return e == end;
}

static void lose_node(struct reading *r, uint32_t node)
{
	r->record[node] = 0;
	r->prefix->tree->nodes[node].flags |= KVT_NODE_BAD;
}

static bool names_slot(const struct reading *r, uint32_t node, uint32_t slot)
{
	uint64_t at = r->record[node] - 1;
	struct kvt_log_record rec;

	kvt_log_next(r->log, r->bytes, r->prefix->keeper->dir->super->dir, &at, &rec);
	for (uint32_t i = 0; i < rec.head.n_blocks; i++)
		if (rec.entries[i].slot == slot)
			return true;
	return false; /* a later record of it says that it lies elsewhere */
}

/* Of two records that name a slot the later one is right: the slot was given away in between. */
static void claim_slots(struct reading *r, uint32_t node, const struct kvt_log_record *rec)
{
	for (uint32_t i = 0; i < rec->head.n_blocks; i++) {
		const uint32_t slot = rec->entries[i].slot;
		uint32_t *owner = &r->owner[slot];

		if (*owner && *owner != node + 1 && r->record[*owner - 1] && names_slot(r, *owner - 1, slot))
			lose_node(r, *owner - 1);
		*owner = node + 1;
	}
}

static void read_root(struct reading *r, const struct kvt_log_record *rec)
{
	uint32_t *place = place_of(r, rec->head.id), root;
	struct kvt_tree *t = r->prefix->tree;
	struct kvt_root_key key;

	if (rec->head.n_tokens != sizeof(key) || *place != NONE)
		return;
	memcpy(&key, rec->key, sizeof(key));
	root = kvt_tree_root_get(t, &key);
	if (root == NONE)
		return;
	if (t->roots[root].id) /* it had gone and come back: one hold is enough */
		kvt_tree_root_put(t, root);
	t->roots[root].id = rec->head.id;
	*place = root | IS_ROOT;
}

static void read_chunk(struct reading *r, const struct kvt_log_record *rec)
{
	struct kvt_tree *t = r->prefix->tree;
	uint32_t root = *place_of(r, rec->head.root), parent = NONE, node, *place = place_of(r, rec->head.id);

	if (root == NONE || !(root & IS_ROOT) || !rec->head.n_tokens || rec->head.n_tokens > t->chunk ||
	    bsearch(&rec->head.id, r->drops, r->n_drops, sizeof(uint64_t), by_id) || !entries_fit(r, rec))
		return;
	root &= ~IS_ROOT;
	if (rec->head.parent != rec->head.root) {
		parent = *place_of(r, rec->head.parent);
		if (parent >= t->capacity || t->nodes[parent].root != root || t->nodes[parent].n != t->chunk)
			return; /* its parent's record is lost */
	}
	node = kvt_tree_child(t, root, parent, rec->tokens, rec->head.n_tokens);
	if (*place != NONE && *place != node)
		return; /* a number is one chunk's; a chunk that was dropped, and came back, has a later one */
	if (node == NONE)
		node = kvt_tree_add(t, root, parent, rec->tokens, rec->head.n_tokens, KVT_TIER_DISK);
	if (node == NONE)
		return;
	*place = node;
	t->nodes[node].id = rec->head.id;
	t->nodes[node].ns = rec->head.ns;
	t->nodes[node].flags = (t->nodes[node].flags | KVT_NODE_SAVED) & ~KVT_NODE_BAD;
	r->record[node] = rec->at + 1;
	claim_slots(r, node, rec);
}

static void read_records(struct reading *r)
{
	struct kvt_prefix *p = r->prefix;
	struct kvt_tree *t = p->tree;
	uint64_t dir = p->keeper->dir->super->dir, at = 0;
	struct kvt_log_record rec;

	while (kvt_log_next(r->log, r->bytes, dir, &at, &rec)) {
		if (rec.head.type == KVT_LOG_ROOT)
			read_root(r, &rec);
		else if (rec.head.type == KVT_LOG_CHUNK)
			read_chunk(r, &rec);
	}
	for (uint32_t node = 0; node < t->fresh_node; node++) {
		uint32_t *blocks = kvt_prefix_blocks(p, node);

		memset(blocks, 0xff, p->plan.chunk_blocks * sizeof(*blocks)); /* KVT_NO_BLOCK */
		if (!r->record[node])
			continue;
		at = r->record[node] - 1;
		kvt_log_next(r->log, r->bytes, dir, &at, &rec);
		for (uint32_t i = 0; i < rec.head.n_blocks; i++)
			blocks[rec.entries[i].index] = kvt_store_adopt(p->cache->store, &rec.entries[i]);
		p->st.recovered++;
	}
	kvt_store_adopted(p->cache->store);
	/* nodes without bytes stay only above others; children come behind their parents */
	for (uint32_t node = t->fresh_node; node--;)
		if ((t->nodes[node].flags & KVT_NODE_BAD) && t->nodes[node].children == NONE) {
			p->keeper->drops[p->keeper->n_drops++] = t->nodes[node].id;
			kvt_tree_remove(t, node);
		}
	/* as if one request had used all, the oldest first */
	for (uint32_t node = 0; node < t->fresh_node; node++)
		if (t->nodes[node].n)
			kvt_prefix_use(p, node, 0);
	kvt_tree_turn(t);
	for (uint32_t i = 0; i < t->fresh_root; i++)
		if (t->roots[i].nodes) /* the hold of reading */
			kvt_tree_root_put(t, i);
}

static int recover(struct kvt_prefix *p, uint32_t n_slots)
{
	struct reading r = { .prefix = p, .n_slots = n_slots };
	int ret = kvt_dir_map(p->keeper->dir, &r.log, &r.bytes);

	if (!ret)
		ret = count_records(&r);
	if (!ret) {
		kvt_dir_trim(p->keeper->dir, r.end);
		r.bytes = r.end;
		read_records(&r);
	}
	kvt_dir_unmap(r.log, r.bytes);
	free(r.id);
	free(r.place);
	free(r.drops);
	free(r.record);
	free(r.owner);
	return ret;
}

/* ---- life ---- */

int kvt_keeper_start(struct kvt_prefix *p, struct kvt_dir *dir, uint32_t n_slots, uint64_t log_max)
{
	struct kvt_keeper *k = calloc(1, sizeof(*k));
	pthread_attr_t attr;
	int ret;

	if (!k)
		return kvt_fail(-ENOMEM, "no memory for a keeper");
	p->keeper = k;
	k->prefix = p;
	k->dir = dir;
	k->head = k->tail = NONE;
	k->next_id = 1;
	k->log_max = log_max;
	pthread_cond_init(&k->work, NULL);
	pthread_cond_init(&k->idle, NULL);
	k->drops = malloc((uint64_t)p->plan.capacity * sizeof(*k->drops));
	k->ids = malloc(2 * live_max(p->plan.capacity) * sizeof(*k->ids));
	k->buf = malloc(buf_bytes(&p->plan));
	k->entries = malloc(p->plan.chunk_blocks * sizeof(*k->entries));
	if (!k->drops || !k->ids || !k->buf || !k->entries)
		return kvt_fail(-ENOMEM, "no memory for a keeper");
	ret = recover(p, n_slots);
	if (ret)
		return ret;
	if (dir->log_bytes > log_max / 3)
		compact(k);
	p->st.log_bytes = dir->log_bytes;
	pthread_attr_init(&attr);
	pthread_attr_setstacksize(&attr, STACK);
	ret = pthread_create(&k->thread, &attr, keep, k);
	pthread_attr_destroy(&attr);
	k->started = !ret;
	return ret ? kvt_fail(-ret, "the keeper thread could not be started: %s", strerror(ret)) : 0;
}

void kvt_keeper_stop(struct kvt_prefix *p)
{
	struct kvt_keeper *k = p->keeper;

	if (!k)
		return;
	if (k->started) {
		pthread_mutex_lock(&p->lock);
		k->stop = true;
		pthread_cond_signal(&k->work);
		pthread_mutex_unlock(&p->lock);
		pthread_join(k->thread, NULL);
	}
	pthread_cond_destroy(&k->work);
	pthread_cond_destroy(&k->idle);
	free(k->drops);
	free(k->ids);
	free(k->buf);
	free(k->entries);
	free(k);
	p->keeper = NULL;
}
