// SPDX-License-Identifier: MIT
/* kvtier store: what a directory of kept chunks holds, whether that is still so, and its upkeep. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/err.h"
#include "cache/tree.h"
#include "codec/codec.h"
#include "store/journal.h"
#include "tools/tools.h"

struct chunk {
	uint64_t id, root, parent, at; /* at: in the log */
	uint32_t tokens, blocks;
	bool reached; /* from its root */
};

struct root {
	uint64_t id;
	struct kvt_root_key key;
	uint64_t chunks, tokens, blocks;
};

struct listing {
	struct kvt_dir *dir;
	const uint8_t *log;
	uint64_t bytes;
	struct chunk *chunks; /* by id */
	struct root *roots;   /* by id */
	uint64_t n_chunks, n_roots, n_blocks, tokens, unreached;
};

static int by_id(const void *a, const void *b)
{
	const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

	return x < y ? -1 : x > y;
}

/* Of one id the later record counts. */
static int by_age(const void *a, const void *b)
{
	const struct chunk *x = a, *y = b;
	int ids = by_id(&x->id, &y->id);

	return ids ? ids : by_id(&x->at, &y->at);
}

static struct root *find_root(const struct listing *l, uint64_t id)
{
	return l->n_roots ? bsearch(&id, l->roots, l->n_roots, sizeof(*l->roots), by_id) : NULL;
}

static struct chunk *find_chunk(const struct listing *l, uint64_t id)
{
	return l->n_chunks ? bsearch(&id, l->chunks, l->n_chunks, sizeof(*l->chunks), by_id) : NULL;
}

static void keep_latest(struct listing *l, const uint64_t *drops, uint64_t n_drops)
{
	uint64_t kept = 0;

	qsort(l->chunks, l->n_chunks, sizeof(*l->chunks), by_age);
	for (uint64_t i = 0; i < l->n_chunks; i++) {
		if (i + 1 < l->n_chunks && l->chunks[i + 1].id == l->chunks[i].id)
			continue;
		if (n_drops && bsearch(&l->chunks[i].id, drops, n_drops, sizeof(*drops), by_id))
			continue;
		l->chunks[kept++] = l->chunks[i];
	}
	l->n_chunks = kept;
}

/* Numbers grow from a chunk to those behind it, so one pass in their order reaches all that can be. */
static void reach(struct listing *l)
{
	for (uint64_t i = 0; i < l->n_chunks; i++) {
		struct chunk *c = &l->chunks[i];
		const struct chunk *up = c->parent == c->root ? NULL : find_chunk(l, c->parent);
		struct root *r = find_root(l, c->root);

		c->reached = r && (c->parent == c->root || (up && up->reached));
		if (!c->reached) {
			l->unreached++;
			continue;
		}
		r->chunks++;
		r->tokens += c->tokens;
		r->blocks += c->blocks;
		l->tokens += c->tokens;
		l->n_blocks += c->blocks;
	}
}

static int list(struct listing *l)
{
	uint64_t dir = l->dir->super->dir, n = 0, n_drops = 0, *drops;
	struct kvt_log_record r;
	int err = kvt_dir_map(l->dir, &l->log, &l->bytes);

	if (err)
		return err;
	for (uint64_t at = 0; kvt_log_next(l->log, l->bytes, dir, &at, &r);)
		n++;
	drops = malloc((n + 1) * sizeof(*drops));
	l->chunks = malloc((n + 1) * sizeof(*l->chunks));
	l->roots = malloc((n + 1) * sizeof(*l->roots));
	if (!drops || !l->chunks || !l->roots) {
		free(drops);
		return kvt_fail(-ENOMEM, "no memory for %" PRIu64 " records", n);
	}
	for (uint64_t at = 0; kvt_log_next(l->log, l->bytes, dir, &at, &r);) {
		if (r.head.type == KVT_LOG_DROP) {
			drops[n_drops++] = r.head.id;
		} else if (r.head.type == KVT_LOG_CHUNK) {
			l->chunks[l->n_chunks++] = (struct chunk){ .id = r.head.id, .root = r.head.root, .at = r.at,
				.parent = r.head.parent, .tokens = r.head.n_tokens, .blocks = r.head.n_blocks };
		} else if (r.head.n_tokens == sizeof(struct kvt_root_key)) {
			struct root *root = &l->roots[l->n_roots++];

			*root = (struct root){ .id = r.head.id };
			memcpy(&root->key, r.key, sizeof(root->key));
		}
	}
	qsort(drops, n_drops, sizeof(*drops), by_id);
	qsort(l->roots, l->n_roots, sizeof(*l->roots), by_id);
	keep_latest(l, drops, n_drops);
	free(drops);
	reach(l);
	return 0;
}

static void end(struct listing *l)
{
	kvt_dir_unmap(l->log, l->bytes);
	free(l->chunks);
	free(l->roots);
	kvt_dir_close(l->dir);
}

/* ---- ls ---- */

static const char *hex(const uint8_t *bytes, size_t n, char *text)
{
	for (size_t i = 0; i < n; i++)
		sprintf(text + 2 * i, "%02x", bytes[i]);
	text[2 * n] = '\0';
	return text;
}

static json_t *roots_json(const struct listing *l)
{
	char model[2 * KVT_FINGERPRINT + 1], adapter[2 * KVT_ROOT_PART + 1], salt[2 * KVT_ROOT_PART + 1];
	json_t *list = json_array();

	for (uint64_t i = 0; i < l->n_roots; i++) {
		const struct root *r = &l->roots[i];

		if (r->chunks)
			json_array_append_new(list, json_pack("{ss ss ss sI sI sI}", "model", hex(r->key.model, KVT_FINGERPRINT, model),
				"adapter", hex(r->key.adapter, r->key.adapter_bytes, adapter), "salt",
				hex(r->key.salt, r->key.salt_bytes, salt), "chunks", (json_int_t)r->chunks, "tokens",
				(json_int_t)r->tokens, "blocks", (json_int_t)r->blocks));
	}
	return list;
}

static void print_json(json_t *o)
{
	json_dumpf(o, stdout, JSON_INDENT(2) | JSON_PRESERVE_ORDER);
	putchar('\n');
	json_decref(o);
}

static int ls(struct listing *l, bool json)
{
	const struct kvt_super *s = l->dir->super;
	char text[2 * KVT_ROOT_PART + 1];

	if (json) {
		print_json(json_pack("{ss si sI si si sI sI sI sI sI so}", "path", l->dir->path, "version", (int)s->version,
				     "block_bytes", (json_int_t)s->block_bytes, "chunk_tokens", (int)s->chunk, "planes",
				     (int)s->n_planes, "log_bytes", (json_int_t)l->bytes, "chunks",
				     (json_int_t)(l->n_chunks - l->unreached), "unreached", (json_int_t)l->unreached, "tokens",
				     (json_int_t)l->tokens, "bytes", (json_int_t)(l->n_blocks * s->block_bytes), "roots", roots_json(l)));
		return 0;
	}
	printf("%s: format %u, model %s...\n%u planes, blocks of %" PRIu64 " bytes, chunks of %u tokens\n", l->dir->path, s->version,
	       hex(s->model, 8, text), s->n_planes, s->block_bytes, s->chunk);
	printf("%" PRIu64 " chunks, %" PRIu64 " tokens, %.1f MiB; a log of %.1f KiB\n", l->n_chunks - l->unreached, l->tokens,
	       (double)(l->n_blocks * s->block_bytes) / (1 << 20), (double)l->bytes / 1024);
	if (l->unreached)
		printf("%" PRIu64 " chunks cannot be reached: the record of one before them is lost\n", l->unreached);
	for (uint64_t i = 0; i < l->n_roots; i++) {
		const struct root *r = &l->roots[i];

		if (!r->chunks)
			continue;
		printf("%8" PRIu64 " chunks %10" PRIu64 " tokens", r->chunks, r->tokens);
		if (r->key.adapter_bytes)
			printf("  adapter %s", hex(r->key.adapter, r->key.adapter_bytes, text));
		if (r->key.salt_bytes)
			printf("  salt %s", hex(r->key.salt, r->key.salt_bytes, text));
		putchar('\n');
	}
	return 0;
}

/* ---- verify ---- */

/* Does every slot hold what the record says? */
static bool holds(const struct kvt_super *s, int slots, const struct kvt_log_record *r, uint8_t *buf)
{
	for (uint32_t i = 0; i < r->head.n_blocks; i++) {
		const struct kvt_block_entry *e = &r->entries[i];
		const struct kvt_super_plane *p = e->id.plane < s->n_planes ? &s->planes[e->id.plane] : NULL;
		uint64_t bytes = p ? (uint64_t)e->id.rows * p->row_bytes : 0;

		if (!p || e->id.rows > p->block_rows || e->id.chunk != r->head.id ||
		    pread(slots, buf, bytes, (off_t)(e->slot * s->block_bytes)) != (ssize_t)bytes ||
		    kvt_rows_digest(0, e->id.rows, buf, p->row_bytes) != e->id.digest)
			return false;
	}
	return true;
}

static int verify(struct listing *l, bool json)
{
	uint8_t *buf = malloc(l->dir->super->block_bytes);
	int slots = openat(l->dir->fd, KVT_DIR_SLOTS, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
	uint64_t good = 0, checked = 0, at;
	struct tool_progress bar;
	struct kvt_log_record r;

	tool_progress_start(&bar, TOOL_PROGRESS_AUTO, "verify", "chunks", l->n_chunks);
	for (uint64_t i = 0; buf && i < l->n_chunks; i++) {
		if (!l->chunks[i].reached)
			continue;
		at = l->chunks[i].at;
		checked++;
		good += kvt_log_next(l->log, l->bytes, l->dir->super->dir, &at, &r) && holds(l->dir->super, slots, &r, buf);
		tool_progress_update(&bar, i + 1);
	}
	tool_progress_end(&bar);
	free(buf);
	if (slots >= 0)
		close(slots);
	if (json)
		print_json(json_pack("{ss sI sI sI sI}", "path", l->dir->path, "chunks", (json_int_t)checked, "good", (json_int_t)good,
				     "bad", (json_int_t)(checked - good), "unreached", (json_int_t)l->unreached));
	else
		printf("%" PRIu64 " chunks: %" PRIu64 " are what was written, %" PRIu64 " are not and will be computed again; %" PRIu64
		       " cannot be reached\n", checked, good, checked - good, l->unreached);
	return good == checked ? 0 : 1;
}

/* ---- compact, rm ---- */

static int compact(struct listing *l, bool json)
{
	const uint64_t before = l->bytes, most = l->n_chunks + l->n_roots;
	uint64_t *live = malloc((2 * most + 1) * sizeof(*live)), n = 0;
	int err;

	for (uint64_t i = 0; live && i < l->n_chunks; i++)
		if (l->chunks[i].reached)
			live[n++] = l->chunks[i].id;
	for (uint64_t i = 0; live && i < l->n_roots; i++)
		if (l->roots[i].chunks)
			live[n++] = l->roots[i].id;
	err = live ? kvt_dir_compact(l->dir, live, n, live + most) : kvt_fail(-ENOMEM, "no memory for a compaction");
	free(live);
	if (err)
		return tool_failed("store");
	if (json)
		print_json(json_pack("{ss sI sI}", "path", l->dir->path, "log_bytes_before", (json_int_t)before, "log_bytes",
				     (json_int_t)l->dir->log_bytes));
	else
		printf("the log had %" PRIu64 " bytes, and has %" PRIu64 "\n", before, l->dir->log_bytes);
	return 0;
}

int cmd_store(int argc, char **argv)
{
	static const char *const actions[] = { "ls", "verify", "compact", "rm" };
	const char *path = NULL, *action = argc > 1 ? argv[1] : "";
	struct listing l = { 0 };
	bool json = false, force = false;
	int code, what;

	for (what = 0; what < 4 && strcmp(actions[what], action); what++)
		;
	if (what == 4)
		return tool_usage_error("store", "\"%s\": ls, verify, compact or rm is needed", action);
	for (int i = 2; i < argc; i++) {
		if (!strcmp(argv[i], "--json"))
			json = true;
		else if (!strcmp(argv[i], "--force") && what == 3)
			force = true;
		else if (argv[i][0] == '-')
			return tool_usage_error("store", "\"%s\" is not an option", argv[i]);
		else if (path)
			return tool_usage_error("store", "one directory at a time: \"%s\" and \"%s\"", path, argv[i]);
		else
			path = argv[i];
	}
	if (!path)
		return tool_usage_error("store", "which directory?");
	if (what == 3)
		return kvt_dir_remove(path, force) ? tool_failed("store") : 0;
	if (kvt_dir_open(path, NULL, &l.dir))
		return tool_failed("store");
	if (list(&l))
		code = tool_failed("store");
	else
		code = what == 0 ? ls(&l, json) : what == 1 ? verify(&l, json) : compact(&l, json);
	end(&l);
	return code;
}
