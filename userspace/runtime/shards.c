// SPDX-License-Identifier: MIT
/* A model in many safetensors files: the index and the shards must say the same. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/err.h"
#include "runtime/safetensors.h"

/* A file beside the index: never a path, and of one line, for errors name it. */
static bool file_name(const struct kvt_json_string *f)
{
	for (size_t i = 0; i < f->len; i++)
		if ((unsigned char)f->s[i] < ' ')
			return false;
	return f->len && f->len <= 255 && !strchr(f->s, '/') && strcmp(f->s, ".") && strcmp(f->s, "..");
}

static int parse_total(const char *path, struct kvt_json *j, struct kvt_shard_index *x)
{
	size_t at = (kvt_json_peek(j), j->at);
	double number;
	int err;

	if (x->has_total)
		return kvt_fail(-EINVAL, "%s: \"total_size\" comes twice", path);
	x->has_total = true;
	if (!kvt_json_u64(j, "total_size as a number", &x->total_size))
		return 0;
	/* some writers count in floats: 1000000.0 */
	j->at = at;
	err = kvt_json_number(j, "total_size as a number", &number);
	if (err)
		return err;
	if (!(number >= 0 && number < 0x1p53) || number != (double)(uint64_t)number)
		return kvt_fail(-EINVAL, "%s: total_size is not a number of bytes", path);
	x->total_size = number;
	return 0;
}

static int parse_metadata(const char *path, struct kvt_json *j, struct kvt_shard_index *x)
{
	struct kvt_json_string key;
	bool first = true;
	int more, err;

	err = kvt_json_open(j, '{', "metadata in braces");
	if (err)
		return err;
	while ((more = kvt_json_next(j, '}', &first)) > 0) {
		err = kvt_json_key(j, &key);
		if (!err)
			err = !strcmp(key.s, "total_size") ? parse_total(path, j, x) : kvt_json_skip(j);
		if (err)
			return err;
	}
	return more;
}

static int parse_map(const char *path, struct kvt_json *j, struct kvt_shard_index *x, size_t *room)
{
	bool first = true;
	int more, err;

	err = kvt_json_open(j, '{', "weight_map in braces");
	if (err)
		return err;
	while ((more = kvt_json_next(j, '}', &first)) > 0) {
		struct kvt_shard_entry *e;

		err = kvt_grow((void **)&x->entries, room, x->n_entries, sizeof(*x->entries));
		if (err)
			return err;
		e = &x->entries[x->n_entries];
		err = kvt_json_key(j, &e->name);
		if (!err)
			err = kvt_json_str(j, "a shard's file name in double quotes", &e->file);
		if (err)
			return err;
		if (!file_name(&e->file))
			return kvt_fail(-EINVAL, "%s: tensor \"%s\": \"%s\" is not the name of a file beside the index", path,
					kvt_quote(e->name.s, e->name.len).s, kvt_quote(e->file.s, e->file.len).s);
		x->n_entries++;
	}
	return more;
}

static int by_name(const void *a, const void *b)
{
	const struct kvt_shard_entry *x = a, *y = b;

	return kvt_name_compare(x->name.s, x->name.len, y->name.s, y->name.len);
}

static int by_file(const void *a, const void *b)
{
	return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Entries by name, each once; the files they name. */
static int sort_index(const char *path, struct kvt_shard_index *x)
{
	const char **files;
	size_t n = 0;

	if (x->n_entries) /* else there is no array */
		qsort(x->entries, x->n_entries, sizeof(*x->entries), by_name);
	for (size_t i = 1; i < x->n_entries; i++)
		if (!by_name(&x->entries[i - 1], &x->entries[i]))
			return kvt_fail(-EINVAL, "%s: tensor \"%s\": the name comes twice (%s and %s)", path,
					kvt_quote(x->entries[i].name.s, x->entries[i].name.len).s,
					x->entries[i - 1].file.s, x->entries[i].file.s);
	files = malloc((x->n_entries + 1) * sizeof(*files));
	if (!files)
		return kvt_fail(-ENOMEM, "%s: no memory for %zu names", path, x->n_entries);
	x->files = files;
	for (size_t i = 0; i < x->n_entries; i++)
		files[i] = x->entries[i].file.s;
	qsort(files, x->n_entries, sizeof(*files), by_file);
	for (size_t i = 0; i < x->n_entries; i++)
		if (!n || strcmp(files[n - 1], files[i]))
			files[n++] = files[i];
	if (n > KVT_SHARDS_MAX)
		return kvt_fail(-EINVAL, "%s: %zu shards, at most %u are allowed", path, n, KVT_SHARDS_MAX);
	x->n_files = n;
	return 0;
}

int kvt_shard_index_parse(const char *path, char *text, size_t bytes, struct kvt_shard_index *x)
{
	struct kvt_json j = { .text = text, .bytes = bytes, .what = path };
	bool first = true, map_seen = false, metadata_seen = false;
	struct kvt_json_string key;
	size_t room = 0;
	int more, err;

	*x = (struct kvt_shard_index){ 0 };
	if (!kvt_utf8_valid(text, bytes))
		return kvt_fail(-EINVAL, "%s: not valid UTF-8", path);
	err = kvt_json_open(&j, '{', "'{'");
	if (err)
		return err;
	while ((more = kvt_json_next(&j, '}', &first)) > 0) {
		bool map, metadata;

		err = kvt_json_key(&j, &key);
		if (err)
			return err;
		map = !strcmp(key.s, "weight_map");
		metadata = !strcmp(key.s, "metadata");
		if ((map && map_seen) || (metadata && metadata_seen))
			return kvt_fail(-EINVAL, "%s: \"%s\" comes twice", path, key.s);
		map_seen |= map;
		metadata_seen |= metadata;
		err = map ? parse_map(path, &j, x, &room) : metadata ? parse_metadata(path, &j, x) : kvt_json_skip(&j);
		if (err)
			return err;
	}
	if (more)
		return more;
	err = kvt_json_end(&j);
	if (err)
		return err;
	if (!map_seen)
		return kvt_fail(-EINVAL, "%s: no \"weight_map\"", path);
	return sort_index(path, x);
}

void kvt_shard_index_free(struct kvt_shard_index *x)
{
	free(x->entries);
	free(x->files);
}

static int read_index(const char *path, char **text, size_t *bytes)
{
	struct kvt_shard shard;
	struct kvt_weights w = { .shards = &shard };
	int err;

	*text = NULL;
	err = kvt_build_shard(&w, path);
	if (err)
		goto close;
	*bytes = shard.bytes;
	if (shard.bytes > KVT_SAFETENSORS_HEADER_MAX) {
		err = kvt_fail(-EINVAL, "%s: %llu bytes, at most %u are allowed for an index", path,
			       (unsigned long long)shard.bytes, KVT_SAFETENSORS_HEADER_MAX);
		goto close;
	}
	*text = malloc(*bytes + 1);
	if (!*text) {
		err = kvt_fail(-ENOMEM, "%s: no memory for %zu bytes", path, *bytes);
		goto close;
	}
	err = kvt_shard_read(&w, 0, 0, *text, *bytes);
	if (!err)
		err = kvt_shard_unchanged(&w, 0);
close:
	if (shard.fd >= 0)
		close(shard.fd);
	free(shard.path);
	return err;
}

/* Both lists are sorted: walk them side by side. */
static int check_index(const struct kvt_weights *w, const char *path, const struct kvt_shard_index *x)
{
	size_t i = 0;
	uint32_t n = 0;

	while (i < x->n_entries || n < w->n_tensors) {
		const struct kvt_shard_entry *e = i < x->n_entries ? &x->entries[i] : NULL;
		const struct kvt_tensor *t = n < w->n_tensors ? &w->tensors[w->by_name[n]] : NULL;
		int c = !e ? 1 : !t ? -1 : kvt_name_compare(e->name.s, e->name.len, t->name, t->name_len);

		if (c < 0)
			return kvt_fail(-EINVAL, "%s: tensor \"%s\" should be in %s, which does not have it", path,
					kvt_quote(e->name.s, e->name.len).s, e->file.s);
		if (c > 0)
			return kvt_fail(-EINVAL, "%s: tensor \"%s\" of %s is not in the index", path,
					kvt_quote(t->name, t->name_len).s, w->shards[t->shard].path);
		if (strcmp(e->file.s, x->files[t->shard]))
			return kvt_fail(-EINVAL, "%s: tensor \"%s\" should be in %s, it is in %s", path,
					kvt_quote(t->name, t->name_len).s, e->file.s, x->files[t->shard]);
		i++;
		n++;
	}
	if (x->has_total && x->total_size != w->bytes)
		return kvt_fail(-EINVAL, "%s: total_size is %llu, the shards' tensors have %llu bytes", path,
				(unsigned long long)x->total_size, (unsigned long long)w->bytes);
	return 0;
}

int kvt_safetensors_open_index(struct kvt_weights *w, const char *path)
{
	const char *slash = strrchr(path, '/');
	int dir_len = slash ? (int)(slash - path) + 1 : 0;
	struct kvt_build b = { .w = w };
	struct kvt_shard_index x = { 0 };
	size_t bytes = 0;
	char *text;
	int err;

	err = read_index(path, &text, &bytes);
	if (!err)
		err = kvt_shard_index_parse(path, text, bytes, &x);
	if (err)
		goto free_index;
	w->shards = calloc((size_t)x.n_files + 1, sizeof(*w->shards));
	if (!w->shards) {
		err = kvt_fail(-ENOMEM, "%s: no memory for %u shards", path, x.n_files);
		goto free_index;
	}
	for (uint32_t i = 0; i < x.n_files && !err; i++) {
		char *file;

		if (asprintf(&file, "%.*s%s", dir_len, path, x.files[i]) < 0) {
			err = kvt_fail(-ENOMEM, "%s: no memory", path);
			break;
		}
		err = kvt_build_shard(w, file);
		if (err)
			kvt_fail_more(err, "%s: shard %u of %u", path, i + 1, x.n_files);
		else
			err = kvt_safetensors_read(&b, i);
		if (!err)
			err = kvt_shard_unchanged(w, i);
		free(file);
	}
	if (!err)
		err = kvt_build_finish(w);
	if (!err)
		err = check_index(w, path, &x);
free_index:
	kvt_shard_index_free(&x);
	free(text);
	return err;
}
