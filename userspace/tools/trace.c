// SPDX-License-Identifier: MIT
/*
 * Reading traces. Every block of every prompt is looked up by (block before it,
 * id): what has another prefix is another block, whatever the ids say.
 */
#include "tools/trace.h"

#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "engines/ref/engine.h"

#define MAX_FILE_BYTES (2ull << 30)
#define MAX_TOKENS (1u << 30) /* of a request */
#define MAX_BLOCKS (1ull << 31) /* of a trace */
#define MOONCAKE_TOKENS 512
#define MAX_MODELS 64
#define MAX_DEPTH 16 /* of sub-agents */

struct slot {
	uint64_t id;
	uint32_t parent; /* or a root: TRACE_NONE - model */
	uint32_t block;	 /* + 1; 0: free */
};

struct reader {
	struct trace *t;
	const char *name;
	uint64_t line; /* 0: one object for the whole file */
	struct slot *slots;
	uint64_t n_slots; /* a power of two */
	uint64_t cap_requests, cap_blocks, cap_distinct;
	char *models[MAX_MODELS];
	uint32_t n_models;
	uint64_t *sorted; /* ids of a row, to find one that is there twice */
	size_t cap_sorted;
};

static int bad(const struct reader *r, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

static int bad(const struct reader *r, const char *fmt, ...)
{
	char what[300];
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(what, sizeof(what), fmt, ap);
	va_end(ap);
	if (r->line)
		return kvt_fail(-EINVAL, "%s: line %" PRIu64 ": %s", r->name, r->line, what);
	return kvt_fail(-EINVAL, "%s: request %u: %s", r->name, r->t->n_requests + 1, what);
}

/* Room for one more in the array that the pointer at @array points to, which holds @n. */
static int grow(void *array, uint64_t *cap, uint64_t n, size_t size)
{
	void *old, *more;

	if (n < *cap)
		return 0;
	memcpy(&old, array, sizeof(old));
	more = realloc(old, (*cap ? *cap * 2 : 1024) * size);
	if (!more)
		return kvt_fail(-ENOMEM, "no memory for a trace of more than %" PRIu64 " blocks", n);
	memcpy(array, &more, sizeof(more));
	*cap = *cap ? *cap * 2 : 1024;
	return 0;
}

/* ---- blocks ---- */

static uint64_t slot_of(const struct reader *r, uint32_t parent, uint64_t id)
{
	uint64_t h = (id ^ (uint64_t)parent << 32) * 0x9e3779b97f4a7c15ull;
	uint64_t i = (h ^ h >> 31) & (r->n_slots - 1);

	while (r->slots[i].block && (r->slots[i].parent != parent || r->slots[i].id != id))
		i = (i + 1) & (r->n_slots - 1);
	return i;
}

static int grow_slots(struct reader *r)
{
	uint64_t old_n = r->n_slots;
	struct slot *old = r->slots;

	if (2ull * r->t->n_distinct < r->n_slots)
		return 0;
	r->n_slots = old_n ? old_n * 2 : 4096;
	r->slots = calloc(r->n_slots, sizeof(*r->slots));
	if (!r->slots) {
		r->slots = old;
		r->n_slots = old_n;
		return kvt_fail(-ENOMEM, "no memory for a trace of more than %u distinct blocks", r->t->n_distinct);
	}
	for (uint64_t i = 0; i < old_n; i++)
		if (old[i].block)
			r->slots[slot_of(r, old[i].parent, old[i].id)] = old[i];
	free(old);
	return 0;
}

static int add_block(struct reader *r, uint32_t root, uint32_t *before, uint64_t id)
{
	struct trace *t = r->t;
	uint32_t parent = *before == TRACE_NONE ? TRACE_NONE - root : *before;
	struct slot *slot;
	int ret;

	if (t->n_blocks >= MAX_BLOCKS)
		return kvt_fail(-E2BIG, "%s: more than %llu blocks", r->name, MAX_BLOCKS);
	ret = grow_slots(r);
	if (!ret)
		ret = grow(&t->blocks, &r->cap_blocks, t->n_blocks, sizeof(*t->blocks));
	if (!ret)
		ret = grow(&t->parent, &r->cap_distinct, t->n_distinct, sizeof(*t->parent));
	if (ret)
		return ret;
	slot = &r->slots[slot_of(r, parent, id)];
	if (!slot->block) {
		*slot = (struct slot){ .id = id, .parent = parent, .block = t->n_distinct + 1 };
		t->parent[t->n_distinct++] = *before;
	}
	*before = slot->block - 1;
	t->blocks[t->n_blocks++] = *before;
	return 0;
}

static int by_id(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

	return (x > y) - (x < y);
}

static int add_blocks(struct reader *r, const json_t *ids, uint32_t root)
{
	size_t n = json_array_size(ids);
	uint32_t before = TRACE_NONE;
	int ret = 0;

	if (n > r->cap_sorted) {
		uint64_t *more = realloc(r->sorted, n * sizeof(*more));

		if (!more)
			return kvt_fail(-ENOMEM, "no memory for a prompt of %zu blocks", n);
		r->sorted = more;
		r->cap_sorted = n;
	}
	for (size_t i = 0; i < n && !ret; i++) {
		const json_t *id = json_array_get(ids, i);

		if (!json_is_integer(id) || json_integer_value(id) < 0)
			return bad(r, "hash_ids[%zu]: a whole number from 0 on is needed", i);
		r->sorted[i] = (uint64_t)json_integer_value(id);
		ret = add_block(r, root, &before, r->sorted[i]);
	}
	if (ret || n < 2)
		return ret;
	qsort(r->sorted, n, sizeof(*r->sorted), by_id);
	for (size_t i = 1; i < n; i++)
		if (r->sorted[i] == r->sorted[i - 1])
			return bad(r, "hash_ids: %" PRIu64 " is there twice: an id stands for a whole prefix", r->sorted[i]);
	return 0;
}

/* ---- requests ---- */

static int tokens(const struct reader *r, const json_t *object, const char *key, uint32_t least, uint32_t *value)
{
	const json_t *v = json_object_get(object, key);
	json_int_t i = json_integer_value(v);

	if (!json_is_integer(v) || i < least || i > MAX_TOKENS)
		return bad(r, "%s: a whole number from %u to %u is needed", key, least, MAX_TOKENS);
	*value = (uint32_t)i;
	return 0;
}

static int number(const struct reader *r, const json_t *object, const char *key, double *value)
{
	const json_t *v = json_object_get(object, key);

	*value = json_number_value(v);
	if (!json_is_number(v) || !isfinite(*value) || *value < 0)
		return bad(r, "%s: a number from 0 on is needed", key);
	return 0;
}

/* @partial: the last block may be. */
static int add_request(struct reader *r, const json_t *object, const char *in, const char *out, double time, uint32_t root,
		       bool partial)
{
	struct trace *t = r->t;
	const json_t *ids = json_object_get(object, "hash_ids");
	struct trace_request q = { .time = time, .first = t->n_blocks };
	uint64_t want;
	int ret = tokens(r, object, in, partial, &q.input);

	if (!ret)
		ret = tokens(r, object, out, 0, &q.output);
	if (ret)
		return ret;
	if (!json_is_array(ids))
		return bad(r, "hash_ids: a list is needed");
	want = (q.input + (partial ? t->block_tokens - 1ull : 0)) / t->block_tokens;
	if (json_array_size(ids) != want)
		return bad(r, "hash_ids: %zu ids, but %u tokens are %" PRIu64 " blocks of %u", json_array_size(ids), q.input, want,
			   t->block_tokens);
	ret = add_blocks(r, ids, root);
	if (!ret)
		ret = grow(&t->requests, &r->cap_requests, t->n_requests, sizeof(*t->requests));
	if (ret)
		return ret;
	q.n = (uint32_t)want;
	t->requests[t->n_requests++] = q;
	return 0;
}

static int parse_mooncake(struct reader *r, const char *text, size_t bytes)
{
	const char *end = text + bytes;
	double time, last = 0;
	json_error_t error;
	int ret = 0;

	r->t->block_tokens = MOONCAKE_TOKENS;
	while (text < end && !ret) {
		const char *eol = memchr(text, '\n', (size_t)(end - text));
		size_t len = (size_t)((eol ? eol : end) - text);
		json_t *row;

		r->line++;
		if (!len && !eol)
			break;
		row = json_loadb(text, len, JSON_REJECT_DUPLICATES, &error);
		if (!row)
			return bad(r, "%s (column %d)", error.text, error.column);
		ret = json_is_object(row) ? number(r, row, "timestamp", &time) : bad(r, "an object is needed");
		if (!ret && time < last)
			ret = bad(r, "timestamp: %g is before the line above's %g", time, last);
		last = time;
		if (!ret)
			ret = add_request(r, row, "input_length", "output_length", time / 1e3, 0, true);
		json_decref(row);
		text += len + 1;
	}
	return ret;
}

static int model_root(struct reader *r, const json_t *object, uint32_t *root)
{
	const char *model = json_string_value(json_object_get(object, "model"));

	if (!model)
		return bad(r, "model: a name is needed");
	for (*root = 0; *root < r->n_models; (*root)++)
		if (!strcmp(r->models[*root], model))
			return 0;
	if (r->n_models == MAX_MODELS)
		return bad(r, "model: more than %u of them", MAX_MODELS);
	r->models[r->n_models] = strdup(model);
	if (!r->models[r->n_models])
		return kvt_fail(-ENOMEM, "no memory for a model's name");
	r->n_models++;
	return 0;
}

static int parse_requests(struct reader *r, const json_t *object, double base, unsigned int depth)
{
	const json_t *list = json_object_get(object, "requests");
	uint32_t root = 0;
	int ret = 0;

	if (!json_is_array(list))
		return bad(r, "requests: a list is needed");
	if (depth > MAX_DEPTH)
		return bad(r, "sub-agents are more than %u deep", MAX_DEPTH);
	for (size_t i = 0; i < json_array_size(list) && !ret; i++) {
		const json_t *one = json_array_get(list, i);
		const char *type = json_string_value(json_object_get(one, "type"));
		double time;

		ret = json_is_object(one) && type ? number(r, one, "t", &time) : bad(r, "an object with a type is needed");
		if (ret)
			return ret;
		if (!strcmp(type, "subagent")) {
			ret = parse_requests(r, one, base + time, depth + 1);
		} else if (!strcmp(type, "s") || !strcmp(type, "n")) {
			ret = model_root(r, one, &root);
			if (!ret)
				ret = add_request(r, one, "in", "out", base + time, root, false);
		} else {
			ret = bad(r, "type: \"%.20s\" is not s, n or subagent", type);
		}
	}
	return ret;
}

static int by_time(const void *a, const void *b)
{
	const struct trace_request *x = a, *y = b;

	if (x->time != y->time)
		return x->time < y->time ? -1 : 1;
	return (x->first > y->first) - (x->first < y->first);
}

static int parse_agentic(struct reader *r, const char *text, size_t bytes)
{
	json_error_t error;
	json_t *session = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &error);
	const json_t *size = json_object_get(session, "block_size");
	int ret;

	if (!session)
		return kvt_fail(-EINVAL, "%s: line %d: %s", r->name, error.line, error.text);
	if (!json_is_object(session) || json_integer_value(size) < 1 || json_integer_value(size) > 65536) {
		ret = kvt_fail(-EINVAL, "%s: block_size: a whole number from 1 to 65536 is needed", r->name);
	} else {
		r->t->block_tokens = (uint32_t)json_integer_value(size);
		ret = parse_requests(r, session, 0, 0);
	}
	json_decref(session);
	if (!ret && r->t->n_requests)
		qsort(r->t->requests, r->t->n_requests, sizeof(*r->t->requests), by_time);
	return ret;
}

int trace_parse(const char *text, size_t bytes, const char *name, enum trace_format format, struct trace *trace)
{
	struct reader r = { .t = trace, .name = name };
	int ret;

	memset(trace, 0, sizeof(*trace));
	ret = format == TRACE_MOONCAKE ? parse_mooncake(&r, text, bytes) : parse_agentic(&r, text, bytes);
	if (!ret && !trace->n_blocks)
		ret = kvt_fail(-EINVAL, "%s: no request has a whole block", name);
	while (r.n_models)
		free(r.models[--r.n_models]);
	free(r.slots);
	free(r.sorted);
	if (ret)
		trace_free(trace);
	return ret;
}

int trace_read(const char *path, enum trace_format format, struct trace *trace)
{
	size_t bytes;
	char *text;
	int ret = ref_read_file(path, MAX_FILE_BYTES, &text, &bytes);

	if (ret)
		return ret;
	ret = trace_parse(text, bytes, path, format, trace);
	free(text);
	return ret;
}

void trace_free(struct trace *t)
{
	free(t->requests);
	free(t->blocks);
	free(t->parent);
	memset(t, 0, sizeof(*t));
}
