// SPDX-License-Identifier: MIT
/* The strict safetensors reader: one pass over the header, then the byte ranges in order. */
#include "runtime/safetensors.h"

#include <endian.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/err.h"

/* Room for the pull parser's state and the shapes of one shard. */
struct header {
	struct kvt_build *b;
	uint32_t shard;
	const char *path;
	struct kvt_json j;
	size_t n_dims, dim_room;
	bool metadata_seen;
	char what[400]; /* begins messages about the entry that is being read */
};

static int parse_dtype(struct header *h, struct kvt_tensor *t)
{
	struct kvt_json_string s;
	int err = kvt_json_str(&h->j, "a dtype in double quotes", &s);

	if (err)
		return err;
	for (t->dtype = 0; t->dtype < KVT_DT_SAFETENSORS; t->dtype++)
		if (!strcmp(kvt_dtype_name(t->dtype), s.s) && strlen(s.s) == s.len)
			return 0;
	return kvt_fail(-EINVAL, "%s: unknown dtype \"%s\"", h->what, kvt_quote(s.s, s.len).s);
}

static int parse_shape(struct header *h, struct kvt_tensor *t)
{
	struct kvt_shard *s = &h->b->w->shards[h->shard];
	bool first = true;
	uint64_t dim;
	int more, err;

	err = kvt_json_open(&h->j, '[', "a shape in brackets");
	if (err)
		return err;
	t->elements = 1;
	while ((more = kvt_json_next(&h->j, ']', &first)) > 0) {
		err = kvt_json_u64(&h->j, "a whole number", &dim);
		if (!err)
			err = kvt_grow((void **)&s->dims, &h->dim_room, h->n_dims, sizeof(*s->dims));
		if (err)
			return err;
		s->dims[h->n_dims++] = dim;
		t->rank++;
		if (__builtin_mul_overflow(t->elements, dim, &t->elements))
			return kvt_fail(-EINVAL, "%s: the shape has 2^64 elements or more", h->what);
	}
	return more;
}

/* offset and bytes hold begin and end until the ranges are checked */
static int parse_offsets(struct header *h, struct kvt_tensor *t)
{
	uint64_t v[2] = { 0, 0 };
	bool first = true;
	uint32_t n = 0;
	int more, err;

	err = kvt_json_open(&h->j, '[', "data_offsets in brackets");
	if (err)
		return err;
	while ((more = kvt_json_next(&h->j, ']', &first)) > 0) {
		if (n == 2)
			return kvt_fail(-EINVAL, "%s: data_offsets has more than two numbers", h->what);
		err = kvt_json_u64(&h->j, "a whole number", &v[n++]);
		if (err)
			return err;
	}
	if (more < 0)
		return more;
	if (n != 2)
		return kvt_fail(-EINVAL, "%s: data_offsets has fewer than two numbers", h->what);
	t->offset = v[0];
	t->bytes = v[1];
	return 0;
}

static int parse_tensor(struct header *h, const struct kvt_json_string *name)
{
	static const char *const fields[] = { "dtype", "shape", "data_offsets" };
	static int (*const parse[])(struct header *, struct kvt_tensor *) = { parse_dtype, parse_shape, parse_offsets };
	struct kvt_tensor *t = kvt_build_tensor(h->b, h->shard);
	struct kvt_json_string key;
	bool first = true, seen[3] = { false };
	int more = 0, err;

	if (!t)
		return -ENOMEM;
	t->name = name->s;
	t->name_len = name->len;
	snprintf(h->what, sizeof(h->what), "%s: tensor \"%s\"", h->path, kvt_quote(t->name, t->name_len).s);
	h->j.what = h->what;
	err = kvt_json_open(&h->j, '{', "a tensor's entry in braces");
	while (!err && (more = kvt_json_next(&h->j, '}', &first)) > 0) {
		int i = 0;

		err = kvt_json_key(&h->j, &key);
		if (err)
			break;
		while (i < 3 && strcmp(key.s, fields[i]))
			i++;
		if (i == 3) {
			err = kvt_json_skip(&h->j);
			continue;
		}
		if (seen[i])
			return kvt_fail(-EINVAL, "%s: \"%s\" comes twice", h->what, fields[i]);
		seen[i] = true;
		err = parse[i](h, t);
	}
	if (err || more)
		return err ? err : more;
	for (int i = 0; i < 3; i++)
		if (!seen[i])
			return kvt_fail(-EINVAL, "%s: no \"%s\"", h->what, fields[i]);
	h->j.what = h->path;
	return 0;
}

static int parse_metadata(struct header *h)
{
	uint32_t first_meta = h->b->w->n_meta;
	struct kvt_json_string key, value;
	bool first = true;
	int more, err;

	if (h->metadata_seen)
		return kvt_fail(-EINVAL, "%s: __metadata__ comes twice", h->path);
	h->metadata_seen = true;
	if (kvt_json_peek(&h->j) == 'n')
		return kvt_json_literal(&h->j, "null");
	err = kvt_json_open(&h->j, '{', "__metadata__ in braces");
	if (err)
		return err;
	while ((more = kvt_json_next(&h->j, '}', &first)) > 0) {
		struct kvt_meta *m;

		err = kvt_json_key(&h->j, &key);
		if (!err)
			err = kvt_json_str(&h->j, "a metadata value in double quotes", &value);
		if (err)
			return err;
		m = kvt_build_meta(h->b, h->shard);
		if (!m)
			return -ENOMEM;
		m->key = (struct kvt_text){ key.s, key.len };
		m->type = KVT_META_STRING;
		m->text = (struct kvt_text){ value.s, value.len };
	}
	return more ? more : kvt_build_unique_keys(h->b->w, first_meta, h->path);
}

/* Ranges [begin, end) must follow each other without a gap, match dtype and shape, and fill the data. */
static int check_ranges(struct header *h, uint32_t first)
{
	struct kvt_weights *w = h->b->w;
	const struct kvt_shard *s = &w->shards[h->shard];
	uint64_t data_bytes = s->bytes - s->data, at = 0, size, dim = 0;

	for (uint32_t i = first; i < w->n_tensors; i++) {
		w->tensors[i].shape = s->dims ? s->dims + dim : NULL; /* scalars alone */
		dim += w->tensors[i].rank;
	}
	kvt_build_sort(w, first);
	for (uint32_t i = first; i < w->n_tensors; i++) {
		struct kvt_tensor *t = &w->tensors[i];
		uint64_t begin = t->offset, end = t->bytes;
		uint32_t block, bytes;

		if (begin != at)
			return kvt_fail(-EINVAL, "%s: tensor \"%s\": data_offsets [%llu, %llu] %s: the tensor before ends at %llu",
					h->path, kvt_quote(t->name, t->name_len).s, (unsigned long long)begin,
					(unsigned long long)end, begin < at ? "overlap another tensor" : "leave a hole",
					(unsigned long long)at);
		if (end < begin)
			return kvt_fail(-EINVAL, "%s: tensor \"%s\": data_offsets [%llu, %llu] end before they begin", h->path,
					kvt_quote(t->name, t->name_len).s, (unsigned long long)begin,
					(unsigned long long)end);
		kvt_dtype_block(t->dtype, &block, &bytes);
		if (t->elements % block)
			return kvt_fail(-EINVAL, "%s: tensor \"%s\": %llu elements of %s do not fill whole bytes", h->path,
					kvt_quote(t->name, t->name_len).s, (unsigned long long)t->elements,
					kvt_dtype_name(t->dtype));
		if (__builtin_mul_overflow(t->elements / block, bytes, &size))
			return kvt_fail(-EINVAL, "%s: tensor \"%s\": the shape takes 2^64 bytes or more", h->path,
					kvt_quote(t->name, t->name_len).s);
		if (size != end - begin)
			return kvt_fail(-EINVAL, "%s: tensor \"%s\": dtype %s and shape need %llu bytes, data_offsets give %llu",
					h->path, kvt_quote(t->name, t->name_len).s, kvt_dtype_name(t->dtype),
					(unsigned long long)size, (unsigned long long)(end - begin));
		if (end > data_bytes)
			return kvt_fail(-EINVAL, "%s: tensor \"%s\": ends at byte %llu of the data, the file has %llu: it is cut "
					"off (an interrupted download?)", h->path, kvt_quote(t->name, t->name_len).s,
					(unsigned long long)end, (unsigned long long)data_bytes);
		t->offset = s->data + begin;
		t->bytes = size;
		at = end;
	}
	if (at != data_bytes)
		return kvt_fail(-EINVAL, "%s: the tensors end at byte %llu of the data, the file has %llu", h->path,
				(unsigned long long)at, (unsigned long long)data_bytes);
	return 0;
}

int kvt_safetensors_parse(struct kvt_build *b, uint32_t shard, char *text, size_t bytes)
{
	struct header h = { .b = b, .shard = shard, .path = b->w->shards[shard].path,
			    .j = { .text = text, .bytes = bytes, .what = b->w->shards[shard].path, .base = 8 } };
	uint32_t first_tensor = b->w->n_tensors;
	struct kvt_json_string key;
	bool first = true;
	int more, err;

	if (!kvt_utf8_valid(text, bytes))
		return kvt_fail(-EINVAL, "%s: the header is not valid UTF-8", h.path);
	if (!bytes || text[0] != '{')
		return kvt_fail(-EINVAL, "%s: the header does not begin with '{'%s", h.path, bytes ? "" : ": it is empty");
	err = kvt_json_open(&h.j, '{', "'{'");
	if (err)
		return err;
	while ((more = kvt_json_next(&h.j, '}', &first)) > 0) {
		err = kvt_json_key(&h.j, &key);
		if (!err)
			err = !strcmp(key.s, "__metadata__") ? parse_metadata(&h) : parse_tensor(&h, &key);
		if (err)
			return err;
	}
	if (more)
		return more;
	err = kvt_json_end(&h.j);
	if (!err)
		err = check_ranges(&h, first_tensor);
	/* a name that comes twice shows as an overlap or a hole: say what it is */
	return err && kvt_build_finish(b->w) ? -EINVAL : err;
}

int kvt_safetensors_read(struct kvt_build *b, uint32_t shard)
{
	struct kvt_shard *s = &b->w->shards[shard];
	uint8_t head[32];
	size_t head_bytes = s->bytes < sizeof(head) ? s->bytes : sizeof(head);
	uint64_t n;
	void *text;
	int err;

	err = kvt_shard_read(b->w, shard, 0, head, head_bytes);
	if (err)
		return err;
	if (s->bytes < 8)
		return kvt_fail(-EINVAL, "%s: %llu bytes are too few for a safetensors file", s->path,
				(unsigned long long)s->bytes);
	memcpy(&n, head, 8);
	n = le64toh(n);
	if (n > KVT_SAFETENSORS_HEADER_MAX)
		return kvt_fail(-EINVAL, "%s: not a safetensors file: a header of %llu bytes, at most %u are allowed%s", s->path,
				(unsigned long long)n, KVT_SAFETENSORS_HEADER_MAX, kvt_file_hint(head, head_bytes));
	if (n > s->bytes - 8)
		return kvt_fail(-EINVAL, "%s: the header should have %llu bytes, the file ends after %llu%s", s->path,
				(unsigned long long)n, (unsigned long long)(s->bytes - 8),
				kvt_file_hint(head, head_bytes));
	/* one byte more: a name's NUL may not, but an empty header's mapping must exist */
	text = mmap(NULL, n + 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (text == MAP_FAILED)
		return kvt_fail(-ENOMEM, "%s: no memory for a header of %llu bytes", s->path, (unsigned long long)n);
	s->header = text;
	s->header_bytes = n + 1;
	s->data = 8 + n;
	err = kvt_shard_read(b->w, shard, 8, text, n);
	return err ? err : kvt_safetensors_parse(b, shard, text, n);
}
