// SPDX-License-Identifier: MIT
/* Weights of any format: opening by name or content, look-up, and reading tensors by pread. */
#include "runtime/weights.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/err.h"
#include "base/params.h"
#include "codec/codec.h"
#include "runtime/build.h"
#include "runtime/gguf.h"
#include "runtime/safetensors.h"

static const struct {
	const char *name;
	uint16_t block, bytes;
} dtypes[KVT_DTYPES] = {
	[KVT_DT_BOOL] = { "BOOL", 1, 1 },
	[KVT_DT_F4] = { "F4", 2, 1 },
	[KVT_DT_F6_E2M3] = { "F6_E2M3", 4, 3 },
	[KVT_DT_F6_E3M2] = { "F6_E3M2", 4, 3 },
	[KVT_DT_U8] = { "U8", 1, 1 },
	[KVT_DT_I8] = { "I8", 1, 1 },
	[KVT_DT_F8_E5M2] = { "F8_E5M2", 1, 1 },
	[KVT_DT_F8_E4M3] = { "F8_E4M3", 1, 1 },
	[KVT_DT_F8_E8M0] = { "F8_E8M0", 1, 1 },
	[KVT_DT_F8_E4M3FNUZ] = { "F8_E4M3FNUZ", 1, 1 },
	[KVT_DT_F8_E5M2FNUZ] = { "F8_E5M2FNUZ", 1, 1 },
	[KVT_DT_I16] = { "I16", 1, 2 },
	[KVT_DT_U16] = { "U16", 1, 2 },
	[KVT_DT_F16] = { "F16", 1, 2 },
	[KVT_DT_BF16] = { "BF16", 1, 2 },
	[KVT_DT_I32] = { "I32", 1, 4 },
	[KVT_DT_U32] = { "U32", 1, 4 },
	[KVT_DT_F32] = { "F32", 1, 4 },
	[KVT_DT_C64] = { "C64", 1, 8 },
	[KVT_DT_F64] = { "F64", 1, 8 },
	[KVT_DT_I64] = { "I64", 1, 8 },
	[KVT_DT_U64] = { "U64", 1, 8 },
	[KVT_DT_Q4_0] = { "Q4_0", 32, 18 },
	[KVT_DT_Q4_1] = { "Q4_1", 32, 20 },
	[KVT_DT_Q5_0] = { "Q5_0", 32, 22 },
	[KVT_DT_Q5_1] = { "Q5_1", 32, 24 },
	[KVT_DT_Q8_0] = { "Q8_0", 32, 34 },
	[KVT_DT_Q8_1] = { "Q8_1", 32, 36 },
	[KVT_DT_Q2_K] = { "Q2_K", 256, 84 },
	[KVT_DT_Q3_K] = { "Q3_K", 256, 110 },
	[KVT_DT_Q4_K] = { "Q4_K", 256, 144 },
	[KVT_DT_Q5_K] = { "Q5_K", 256, 176 },
	[KVT_DT_Q6_K] = { "Q6_K", 256, 210 },
	[KVT_DT_Q8_K] = { "Q8_K", 256, 292 },
	[KVT_DT_IQ2_XXS] = { "IQ2_XXS", 256, 66 },
	[KVT_DT_IQ2_XS] = { "IQ2_XS", 256, 74 },
	[KVT_DT_IQ3_XXS] = { "IQ3_XXS", 256, 98 },
	[KVT_DT_IQ1_S] = { "IQ1_S", 256, 50 },
	[KVT_DT_IQ4_NL] = { "IQ4_NL", 32, 18 },
	[KVT_DT_IQ3_S] = { "IQ3_S", 256, 110 },
	[KVT_DT_IQ2_S] = { "IQ2_S", 256, 82 },
	[KVT_DT_IQ4_XS] = { "IQ4_XS", 256, 136 },
	[KVT_DT_IQ1_M] = { "IQ1_M", 256, 56 },
	[KVT_DT_TQ1_0] = { "TQ1_0", 256, 54 },
	[KVT_DT_TQ2_0] = { "TQ2_0", 256, 66 },
	[KVT_DT_MXFP4] = { "MXFP4", 32, 17 },
	[KVT_DT_UNKNOWN] = { "unknown", 0, 0 },
};

const char *kvt_dtype_name(enum kvt_dtype dtype)
{
	return (uint32_t)dtype < KVT_DTYPES ? dtypes[dtype].name : NULL;
}

void kvt_dtype_block(enum kvt_dtype dtype, uint32_t *block, uint32_t *bytes)
{
	bool known = (uint32_t)dtype < KVT_DTYPES;

	*block = known ? dtypes[dtype].block : 0;
	*bytes = known ? dtypes[dtype].bytes : 0;
}

const char *kvt_tensor_type(const struct kvt_tensor *t, char buf[24])
{
	if (t->dtype != KVT_DT_UNKNOWN)
		return dtypes[t->dtype].name;
	snprintf(buf, 24, "GGUF type %u", t->ggml_type);
	return buf;
}

/* ---- for the format readers ---- */

struct kvt_quoted kvt_quote(const char *s, size_t len)
{
	struct kvt_quoted q;
	size_t n = len < 90 ? len : 90;

	for (size_t i = 0; i < n; i++)
		q.s[i] = (unsigned char)s[i] < 0x20 || s[i] == 0x7f ? '?' : s[i];
	strcpy(q.s + n, len > n ? "..." : "");
	return q;
}

int kvt_grow(void **array, size_t *room, size_t used, size_t item_bytes)
{
	size_t more = *room ? *room * 2 : 64;
	void *p;

	if (used < *room)
		return 0;
	p = reallocarray(*array, more, item_bytes);
	if (!p)
		return kvt_fail(-ENOMEM, "no memory for %zu entries of %zu bytes", more, item_bytes);
	*array = p;
	*room = more;
	return 0;
}

struct kvt_tensor *kvt_build_tensor(struct kvt_build *b, uint32_t shard)
{
	struct kvt_weights *w = b->w;
	struct kvt_tensor *t;

	if (w->n_tensors == UINT32_MAX) {
		kvt_fail(-EINVAL, "%s: more than %u tensors", w->path, UINT32_MAX);
		return NULL;
	}
	if (kvt_grow((void **)&w->tensors, &b->tensor_room, w->n_tensors, sizeof(*t)))
		return NULL;
	t = &w->tensors[w->n_tensors++];
	*t = (struct kvt_tensor){ .shard = shard };
	return t;
}

struct kvt_meta *kvt_build_meta(struct kvt_build *b, uint32_t shard)
{
	struct kvt_weights *w = b->w;
	struct kvt_meta *m;

	if (w->n_meta == UINT32_MAX) {
		kvt_fail(-EINVAL, "%s: more than %u metadata entries", w->path, UINT32_MAX);
		return NULL;
	}
	if (kvt_grow((void **)&w->meta, &b->meta_room, w->n_meta, sizeof(*m)))
		return NULL;
	m = &w->meta[w->n_meta++];
	*m = (struct kvt_meta){ .shard = shard, .count = 1 };
	return m;
}

int kvt_build_shard(struct kvt_weights *w, const char *path)
{
	struct kvt_shard *s = &w->shards[w->n_shards];
	struct stat st;

	*s = (struct kvt_shard){ .fd = -1, .path = strdup(path) };
	if (!s->path)
		return kvt_fail(-ENOMEM, "no memory for the path %s", path);
	w->n_shards++;
	/* without O_NONBLOCK a FIFO would wait for its writer */
	s->fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
	if (s->fd < 0 || fstat(s->fd, &st))
		return kvt_fail(-errno, "%s: %m", path);
	if (!S_ISREG(st.st_mode))
		return kvt_fail(-EINVAL, "%s: %s, not a regular file", path,
				S_ISDIR(st.st_mode) ? "a directory" : "a pipe or device");
	s->bytes = st.st_size;
	s->mtime = st.st_mtim;
	return 0;
}

int kvt_name_compare(const char *a, size_t a_len, const char *b, size_t b_len)
{
	int c = memcmp(a, b, a_len < b_len ? a_len : b_len);

	return c ? c : (a_len > b_len) - (a_len < b_len);
}

static int by_name(const void *a, const void *b, void *tensors)
{
	const struct kvt_tensor *t = tensors, *x = &t[*(const uint32_t *)a], *y = &t[*(const uint32_t *)b];

	return kvt_name_compare(x->name, x->name_len, y->name, y->name_len);
}

static int by_key(const void *a, const void *b)
{
	const struct kvt_text *x = a, *y = b;

	return kvt_name_compare(x->s, x->len, y->s, y->len);
}

int kvt_build_unique_keys(const struct kvt_weights *w, uint32_t first, const char *path)
{
	size_t n = w->n_meta - first;
	struct kvt_text *keys = malloc((n + 1) * sizeof(*keys));
	int err = 0;

	if (!keys)
		return kvt_fail(-ENOMEM, "%s: no memory for %zu metadata keys", path, n);
	for (size_t i = 0; i < n; i++)
		keys[i] = w->meta[first + i].key;
	qsort(keys, n, sizeof(*keys), by_key);
	for (size_t i = 1; i < n && !err; i++)
		if (!by_key(&keys[i - 1], &keys[i]))
			err = kvt_fail(-EINVAL, "%s: metadata \"%s\" comes twice", path,
				       kvt_quote(keys[i].s, keys[i].len).s);
	free(keys);
	return err;
}

static int by_range(const void *a, const void *b)
{
	const struct kvt_tensor *x = a, *y = b;

	if (x->offset != y->offset)
		return x->offset < y->offset ? -1 : 1;
	if (x->bytes != y->bytes)
		return x->bytes < y->bytes ? -1 : 1;
	return kvt_name_compare(x->name, x->name_len, y->name, y->name_len);
}

void kvt_build_sort(struct kvt_weights *w, uint32_t first)
{
	if (w->n_tensors > first)
		qsort(w->tensors + first, w->n_tensors - first, sizeof(*w->tensors), by_range);
}

int kvt_build_finish(struct kvt_weights *w)
{
	w->by_name = malloc(((size_t)w->n_tensors + 1) * sizeof(*w->by_name));
	if (!w->by_name)
		return kvt_fail(-ENOMEM, "%s: no memory for an index of %u tensors", w->path, w->n_tensors);
	for (uint32_t i = 0; i < w->n_tensors; i++) {
		w->by_name[i] = i;
		w->bytes += w->tensors[i].bytes;
	}
	qsort_r(w->by_name, w->n_tensors, sizeof(*w->by_name), by_name, w->tensors);
	for (uint32_t i = 1; i < w->n_tensors; i++) {
		const struct kvt_tensor *a = &w->tensors[w->by_name[i - 1]], *b = &w->tensors[w->by_name[i]];

		if (by_name(&w->by_name[i - 1], &w->by_name[i], w->tensors))
			continue;
		if (a->shard == b->shard)
			return kvt_fail(-EINVAL, "%s: tensor \"%s\": the name comes twice", w->shards[a->shard].path,
					kvt_quote(a->name, a->name_len).s);
		return kvt_fail(-EINVAL, "%s: tensor \"%s\" is in two shards: %s and %s", w->path,
				kvt_quote(a->name, a->name_len).s, w->shards[a->shard].path, w->shards[b->shard].path);
	}
	return 0;
}

const char *kvt_file_hint(const void *head, size_t bytes)
{
	static const struct {
		const char *begin, *hint;
	} known[] = {
		{ "version https://git-lfs", " (it is a Git LFS pointer, not the file it stands for: git lfs pull)" },
		{ "GGUF", " (it is a GGUF file: name it .gguf)" },
		{ "PK\x03\x04", " (it is a zip archive, such as a PyTorch checkpoint)" },
		{ "../", " (it is the text of a symbolic link)" },
		{ "/", " (it is the text of a symbolic link)" },
		{ "<!DOCTYPE", " (it is an HTML page)" },
		{ "<html", " (it is an HTML page)" },
		{ "{", " (it is JSON text)" },
	};

	for (size_t i = 0; i < sizeof(known) / sizeof(*known); i++) {
		size_t n = strlen(known[i].begin);

		if (bytes >= n && !memcmp(head, known[i].begin, n))
			return known[i].hint;
	}
	return "";
}

/* ---- reading ---- */

int kvt_shard_unchanged(const struct kvt_weights *w, uint32_t shard)
{
	const struct kvt_shard *s = &w->shards[shard];
	struct stat st;

	if (fstat(s->fd, &st))
		return kvt_fail(-errno, "%s: %m", s->path);
	if ((uint64_t)st.st_size != s->bytes)
		return kvt_fail(-ESTALE, "%s: the file changed while it was read: it had %llu bytes, now %llu", s->path,
				(unsigned long long)s->bytes, (unsigned long long)st.st_size);
	if (st.st_mtim.tv_sec != s->mtime.tv_sec || st.st_mtim.tv_nsec != s->mtime.tv_nsec)
		return kvt_fail(-ESTALE, "%s: the file was written to while it was read", s->path);
	return 0;
}

int kvt_shard_read(const struct kvt_weights *w, uint32_t shard, uint64_t offset, void *dst, uint64_t bytes)
{
	const struct kvt_shard *s = &w->shards[shard];
	uint8_t *out = dst;

	while (bytes) {
		ssize_t n = pread(s->fd, out, bytes < 1u << 30 ? bytes : 1u << 30, offset);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return kvt_fail(-errno, "%s: reading %llu bytes at %llu: %m", s->path,
					(unsigned long long)bytes, (unsigned long long)offset);
		if (!n)
			return kvt_fail(-ESTALE, "%s: the file changed while it was read: it had %llu bytes, now ends at %llu",
					s->path, (unsigned long long)s->bytes, (unsigned long long)offset);
		out += n;
		offset += n;
		bytes -= n;
	}
	return 0;
}

int kvt_tensor_read(const struct kvt_weights *w, const struct kvt_tensor *t, uint64_t first, uint64_t bytes, void *dst)
{
	int err;

	if (first > t->bytes || bytes > t->bytes - first)
		return kvt_fail(-ERANGE, "%s: tensor \"%s\" has %llu bytes, asked for %llu at %llu", w->shards[t->shard].path,
				kvt_quote(t->name, t->name_len).s, (unsigned long long)t->bytes,
				(unsigned long long)bytes, (unsigned long long)first);
	err = kvt_shard_read(w, t->shard, t->offset + first, dst, bytes);
	return err ? err : kvt_shard_unchanged(w, t->shard);
}

static float half(const uint8_t *src)
{
	float f;

	kvt_codec_convert(&f, KVT_F32, src, KVT_F16, 1);
	return f;
}

/* One multiplication by the block's scale, as ggml does it: the bits agree. */
int kvt_tensor_decode(enum kvt_dtype dtype, const void *src, uint64_t n, float *dst)
{
	const uint8_t *block = src;
	uint32_t elements, bytes;

	kvt_dtype_block(dtype, &elements, &bytes);
	if (elements && n % elements)
		return kvt_fail(-EINVAL, "%llu elements of %s are no whole blocks of %u", (unsigned long long)n,
				kvt_dtype_name(dtype), elements);
	switch (dtype) {
	case KVT_DT_F32:
		kvt_codec_convert(dst, KVT_F32, src, KVT_F32, n);
		break;
	case KVT_DT_F16:
		kvt_codec_convert(dst, KVT_F32, src, KVT_F16, n);
		break;
	case KVT_DT_BF16:
		kvt_codec_convert(dst, KVT_F32, src, KVT_BF16, n);
		break;
	case KVT_DT_Q8_0:
		for (; n >= 32; n -= 32, block += 34, dst += 32) {
			float d = half(block);

			for (int i = 0; i < 32; i++)
				dst[i] = (int8_t)block[2 + i] * d;
		}
		break;
	case KVT_DT_Q4_0:
		for (; n >= 32; n -= 32, block += 18, dst += 32) {
			float d = half(block);

			for (int i = 0; i < 16; i++) {
				dst[i] = ((block[2 + i] & 15) - 8) * d;
				dst[i + 16] = ((block[2 + i] >> 4) - 8) * d;
			}
		}
		break;
	default:
		return kvt_fail(-ENOTSUP, "type %s cannot be decoded (F32, F16, BF16, Q8_0 and Q4_0 can)",
				elements ? kvt_dtype_name(dtype) : "unknown");
	}
	return 0;
}

int kvt_tensor_decodes(const struct kvt_weights *w, const struct kvt_tensor *t)
{
	char type[24];

	switch (t->dtype) {
	case KVT_DT_F32:
	case KVT_DT_F16:
	case KVT_DT_BF16:
	case KVT_DT_Q8_0:
	case KVT_DT_Q4_0:
		return 0;
	}
	return kvt_fail(-ENOTSUP, "%s: tensor \"%s\" is %s, which cannot be decoded (F32, F16, BF16, Q8_0 and Q4_0 can)",
			w->shards[t->shard].path, kvt_quote(t->name, t->name_len).s, kvt_tensor_type(t, type));
}

int kvt_tensor_read_f32(const struct kvt_weights *w, const struct kvt_tensor *t, uint64_t first, uint64_t n, float *dst)
{
	uint64_t raw[2176]; /* 17408 bytes: whole blocks of 1, 2, 4, 18 and 34 bytes */
	uint32_t block, bytes;
	uint64_t piece;
	int err;

	err = kvt_tensor_decodes(w, t);
	if (err)
		return err;
	kvt_dtype_block(t->dtype, &block, &bytes);
	if (first > t->elements || n > t->elements - first || first % block || n % block)
		return kvt_fail(-ERANGE, "%s: tensor \"%s\" has %llu elements in blocks of %u, asked for %llu at %llu",
				w->shards[t->shard].path, kvt_quote(t->name, t->name_len).s,
				(unsigned long long)t->elements, block, (unsigned long long)n,
				(unsigned long long)first);
	piece = sizeof(raw) / bytes * block;
	for (uint64_t i = 0; i < n; i += piece) {
		uint64_t now = n - i < piece ? n - i : piece;

		err = kvt_shard_read(w, t->shard, t->offset + (first + i) / block * bytes, raw, now / block * bytes);
		if (err)
			return err;
		kvt_tensor_decode(t->dtype, raw, now, dst + i);
	}
	return kvt_shard_unchanged(w, t->shard);
}

/* ---- look-up ---- */

int kvt_weights_info(const struct kvt_weights *w, struct kvt_weights_info *info)
{
	const struct kvt_weights_info ours = { .format = w->format, .version = w->version, .n_shards = w->n_shards,
					       .n_tensors = w->n_tensors, .bytes = w->bytes };
	int err = kvt_result_check(info, "weights info");

	if (!err && info)
		kvt_result_copy(info, &ours, sizeof(ours));
	return err;
}

const struct kvt_tensor *kvt_weights_tensor(const struct kvt_weights *w, uint32_t index)
{
	return index < w->n_tensors ? &w->tensors[index] : NULL;
}

const struct kvt_tensor *kvt_weights_find(const struct kvt_weights *w, const char *name)
{
	uint32_t low = 0, high = w->n_tensors;
	size_t len = strlen(name);

	while (low < high) {
		uint32_t mid = low + (high - low) / 2;
		const struct kvt_tensor *t = &w->tensors[w->by_name[mid]];
		int c = kvt_name_compare(name, len, t->name, t->name_len);

		if (!c)
			return t;
		if (c < 0)
			high = mid;
		else
			low = mid + 1;
	}
	return NULL;
}

const struct kvt_meta *kvt_weights_meta(const struct kvt_weights *w, const char *key)
{
	size_t len = strlen(key);

	for (uint32_t i = 0; i < w->n_meta; i++)
		if (!kvt_name_compare(key, len, w->meta[i].key.s, w->meta[i].key.len))
			return &w->meta[i];
	return NULL;
}

static int get(const struct kvt_weights *w, const char *key, uint64_t index, const struct kvt_meta **m)
{
	*m = kvt_weights_meta(w, key);
	if (!*m)
		return kvt_fail(-ENOENT, "%s: no metadata \"%s\"", w->path, key);
	if (index >= (*m)->count)
		return kvt_fail(-ERANGE, "%s: metadata \"%s\" has %llu items, asked for item %llu", w->path, key,
				(unsigned long long)(*m)->count, (unsigned long long)index);
	return 0;
}

int64_t kvt_weights_count(const struct kvt_weights *w, const char *key)
{
	const struct kvt_meta *m = kvt_weights_meta(w, key);

	if (!m)
		return kvt_fail(-ENOENT, "%s: no metadata \"%s\"", w->path, key);
	if (m->type != KVT_META_ARRAY)
		return kvt_fail(-EINVAL, "%s: metadata \"%s\" is not an array", w->path, key);
	return m->count;
}

int kvt_weights_text(const struct kvt_weights *w, const char *key, uint64_t index, struct kvt_text *text)
{
	const struct kvt_meta *m;
	int err = get(w, key, index, &m);

	if (err)
		return err;
	if (m->type == KVT_META_STRING)
		*text = m->text;
	else if (m->type == KVT_META_ARRAY && m->item_type == KVT_META_STRING)
		*text = ((const struct kvt_text *)m->items)[index];
	else
		return kvt_fail(-EINVAL, "%s: metadata \"%s\" is not text", w->path, key);
	return 0;
}

/* Arrays hold packed little-endian numbers. */
struct kvt_meta kvt_meta_item(const struct kvt_meta *m, uint64_t index)
{
	struct kvt_meta one = { .type = m->item_type };
	const uint8_t *p;
	float f;

	if (m->type != KVT_META_ARRAY)
		return *m;
	if (m->item_type == KVT_META_STRING) {
		one.text = ((const struct kvt_text *)m->items)[index];
		return one;
	}
	p = (const uint8_t *)m->items + index * m->item_bytes;
	if (m->item_type == KVT_META_FLOAT && m->item_bytes == 4) {
		memcpy(&f, p, 4);
		one.f = f;
		return one;
	}
	memcpy(&one.u, p, m->item_bytes);
	if (m->item_type == KVT_META_INT && m->item_bytes < 8) {
		int shift = 64 - 8 * m->item_bytes;

		one.i = (int64_t)(one.u << shift) >> shift;
	}
	return one;
}

int kvt_weights_uint(const struct kvt_weights *w, const char *key, uint64_t index, uint64_t *value)
{
	const struct kvt_meta *m;
	struct kvt_meta one;
	char *end;
	int err = get(w, key, index, &m);

	if (err)
		return err;
	one = kvt_meta_item(m, index);
	if (one.type == KVT_META_UINT || one.type == KVT_META_BOOL || (one.type == KVT_META_INT && one.i >= 0)) {
		*value = one.u;
		return 0;
	}
	if (one.type == KVT_META_STRING && one.text.s[0] >= '0' && one.text.s[0] <= '9') {
		errno = 0;
		*value = strtoull(one.text.s, &end, 10);
		if (!errno && end == one.text.s + one.text.len)
			return 0;
	}
	return kvt_fail(-EINVAL, "%s: metadata \"%s\" is not a whole number", w->path, key);
}

int kvt_weights_number(const struct kvt_weights *w, const char *key, uint64_t index, double *value)
{
	const struct kvt_meta *m;
	struct kvt_meta one;
	int err = get(w, key, index, &m);

	if (err)
		return err;
	one = kvt_meta_item(m, index);
	switch (one.type) {
	case KVT_META_UINT:
	case KVT_META_BOOL:
		*value = one.u;
		return 0;
	case KVT_META_INT:
		*value = one.i;
		return 0;
	case KVT_META_FLOAT:
		*value = one.f;
		return 0;
	}
	return kvt_fail(-EINVAL, "%s: metadata \"%s\" is not a number", w->path, key);
}

/* ---- opening ---- */

static bool ends_with(const char *s, const char *suffix)
{
	size_t n = strlen(s), m = strlen(suffix);

	return n >= m && !strcmp(s + n - m, suffix);
}

static int open_file(struct kvt_weights *w, const char *path)
{
	struct kvt_build b = { .w = w };
	char magic[4];
	bool gguf;
	int err;

	w->shards = calloc(1, sizeof(*w->shards));
	if (!w->shards)
		return kvt_fail(-ENOMEM, "%s: no memory", path);
	err = kvt_build_shard(w, path);
	if (err)
		return err;
	gguf = ends_with(path, ".gguf");
	if (!gguf && !ends_with(path, ".safetensors") && w->shards[0].bytes >= sizeof(magic)) {
		err = kvt_shard_read(w, 0, 0, magic, sizeof(magic));
		if (err)
			return err;
		gguf = !memcmp(magic, "GGUF", 4);
	}
	err = gguf ? kvt_gguf_read(&b) : kvt_safetensors_read(&b, 0);
	if (!err)
		err = kvt_shard_unchanged(w, 0);
	return err ? err : kvt_build_finish(w);
}

static int open_directory(struct kvt_weights *w, const char *dir)
{
	char *path = NULL;
	int err;

	if (asprintf(&path, "%s/model.safetensors", dir) < 0)
		return kvt_fail(-ENOMEM, "%s: no memory", dir);
	if (!access(path, F_OK)) {
		err = open_file(w, path);
		goto free_path;
	}
	free(path);
	if (asprintf(&path, "%s/model.safetensors.index.json", dir) < 0)
		return kvt_fail(-ENOMEM, "%s: no memory", dir);
	if (!access(path, F_OK))
		err = kvt_safetensors_open_index(w, path);
	else
		err = kvt_fail(-ENOENT, "%s: has neither model.safetensors nor model.safetensors.index.json; name a file "
			       "of another name itself", dir);
free_path:
	free(path);
	return err;
}

int kvt_weights_open(const char *path, struct kvt_weights **weights)
{
	struct kvt_weights *w;
	struct stat st;
	int err;

	*weights = NULL;
	if (stat(path, &st))
		return kvt_fail(-errno, "%s: %m", path);
	w = calloc(1, sizeof(*w));
	if (!w)
		return kvt_fail(-ENOMEM, "%s: no memory", path);
	w->path = strdup(path);
	if (!w->path)
		err = kvt_fail(-ENOMEM, "%s: no memory", path);
	else if (S_ISDIR(st.st_mode))
		err = open_directory(w, path);
	else if (ends_with(path, ".index.json"))
		err = kvt_safetensors_open_index(w, path);
	else
		err = open_file(w, path);
	if (err) {
		kvt_weights_close(w);
		return err;
	}
	*weights = w;
	return 0;
}

void kvt_weights_close(struct kvt_weights *w)
{
	if (!w)
		return;
	for (uint32_t i = 0; i < w->n_shards; i++) {
		struct kvt_shard *s = &w->shards[i];

		if (s->fd >= 0)
			close(s->fd);
		if (s->header)
			munmap(s->header, s->header_bytes);
		free(s->dims);
		free(s->texts);
		free(s->path);
	}
	free(w->shards);
	free(w->tensors);
	free(w->meta);
	free(w->by_name);
	free(w->path);
	free(w);
}
