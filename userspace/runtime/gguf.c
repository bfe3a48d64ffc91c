// SPDX-License-Identifier: MIT
/*
 * The GGUF reader. The header's length is known only at its end, so it is read
 * as the cursor advances, into a reservation that never moves: names, texts and
 * number arrays stay where they were read.
 */
#include "runtime/gguf.h"

#include <endian.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/err.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "number arrays are used as they are in the file: little-endian"
#endif

enum value_type { U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64, VALUE_TYPES };

static const struct {
	uint8_t meta, bytes;
} values[VALUE_TYPES] = {
	[U8] = { KVT_META_UINT, 1 },	[I8] = { KVT_META_INT, 1 },    [U16] = { KVT_META_UINT, 2 },
	[I16] = { KVT_META_INT, 2 },	[U32] = { KVT_META_UINT, 4 },  [I32] = { KVT_META_INT, 4 },
	[F32] = { KVT_META_FLOAT, 4 },	[BOOL] = { KVT_META_BOOL, 1 }, [STRING] = { KVT_META_STRING, 0 },
	[ARRAY] = { KVT_META_ARRAY, 0 }, [U64] = { KVT_META_UINT, 8 },  [I64] = { KVT_META_INT, 8 },
	[F64] = { KVT_META_FLOAT, 8 },
};

/* The least a value takes in the file: a string's length, an array's type and count. */
static uint64_t least_bytes(uint32_t type)
{
	return type == STRING ? 8 : type == ARRAY ? 12 : values[type].bytes;
}

/* The file's type numbers; what is not here is KVT_DT_UNKNOWN. */
static const uint8_t ggml_types[] = {
	[0] = KVT_DT_F32 + 1,	   [1] = KVT_DT_F16 + 1,      [2] = KVT_DT_Q4_0 + 1,	[3] = KVT_DT_Q4_1 + 1,
	[6] = KVT_DT_Q5_0 + 1,	   [7] = KVT_DT_Q5_1 + 1,     [8] = KVT_DT_Q8_0 + 1,	[9] = KVT_DT_Q8_1 + 1,
	[10] = KVT_DT_Q2_K + 1,	   [11] = KVT_DT_Q3_K + 1,    [12] = KVT_DT_Q4_K + 1,	[13] = KVT_DT_Q5_K + 1,
	[14] = KVT_DT_Q6_K + 1,	   [15] = KVT_DT_Q8_K + 1,    [16] = KVT_DT_IQ2_XXS + 1, [17] = KVT_DT_IQ2_XS + 1,
	[18] = KVT_DT_IQ3_XXS + 1, [19] = KVT_DT_IQ1_S + 1,   [20] = KVT_DT_IQ4_NL + 1, [21] = KVT_DT_IQ3_S + 1,
	[22] = KVT_DT_IQ2_S + 1,   [23] = KVT_DT_IQ4_XS + 1,  [24] = KVT_DT_I8 + 1,	[25] = KVT_DT_I16 + 1,
	[26] = KVT_DT_I32 + 1,	   [27] = KVT_DT_I64 + 1,     [28] = KVT_DT_F64 + 1,	[29] = KVT_DT_IQ1_M + 1,
	[30] = KVT_DT_BF16 + 1,	   [34] = KVT_DT_TQ1_0 + 1,   [35] = KVT_DT_TQ2_0 + 1,	[39] = KVT_DT_MXFP4 + 1,
};

struct cursor {
	struct kvt_build *b;
	struct kvt_shard *shard;
	uint8_t *text;	 /* the header so far */
	uint64_t at;	 /* the next byte */
	uint64_t filled; /* bytes read */
	uint64_t limit;	 /* the header cannot go beyond: the file's end, or KVT_GGUF_HEADER_MAX */
	size_t n_dims, dim_room, n_texts, text_room;
	uint64_t alignment;
};

#define FILL_BYTES (1u << 20)

static int too_short(const struct cursor *c, const char *what, uint64_t n)
{
	if (c->limit < c->shard->bytes)
		return kvt_fail(-EINVAL, "%s: %s (%llu) goes beyond the %u bytes that a GGUF header may have", c->shard->path,
				what, (unsigned long long)n, KVT_GGUF_HEADER_MAX);
	return kvt_fail(-EINVAL, "%s: %s (%llu) at byte %llu goes beyond the file's %llu bytes", c->shard->path, what,
			(unsigned long long)n, (unsigned long long)c->at, (unsigned long long)c->shard->bytes);
}

/* Have the next @n bytes in memory. */
static int need(struct cursor *c, const char *what, uint64_t n)
{
	uint64_t until;
	int err;

	if (n > c->limit - c->at)
		return too_short(c, what, n);
	if (c->at + n <= c->filled)
		return 0;
	until = c->at + n + FILL_BYTES;
	if (until > c->limit)
		until = c->limit;
	err = kvt_shard_read(c->b->w, 0, c->filled, c->text + c->filled, until - c->filled);
	if (!err)
		c->filled = until;
	return err;
}

static int get_u32(struct cursor *c, const char *what, uint32_t *v)
{
	int err = need(c, what, 4);

	if (err)
		return err;
	memcpy(v, c->text + c->at, 4);
	c->at += 4;
	return 0;
}

static int get_u64(struct cursor *c, const char *what, uint64_t *v)
{
	int err = need(c, what, 8);

	if (err)
		return err;
	memcpy(v, c->text + c->at, 8);
	c->at += 8;
	return 0;
}

/* A string gets its NUL by moving one byte down, onto the length that has been read. */
static int get_text(struct cursor *c, const char *what, struct kvt_text *text)
{
	uint64_t len;
	char *s;
	int err;

	err = get_u64(c, what, &len);
	if (!err)
		err = need(c, what, len);
	if (err)
		return err;
	s = (char *)c->text + c->at - 1;
	memmove(s, s + 1, len);
	s[len] = 0;
	c->at += len;
	*text = (struct kvt_text){ s, len };
	return 0;
}

static int get_type(struct cursor *c, const char *key, uint32_t *type)
{
	int err = get_u32(c, "a value's type", type);

	if (err)
		return err;
	if (*type < VALUE_TYPES)
		return 0;
	err = kvt_fail(-EINVAL, "%s: metadata \"%s\": no such value type: %u", c->shard->path,
		       kvt_quote(key, strlen(key)).s, *type);
	*type = 0; /* an index of the tables, whoever looks */
	return err;
}

static int get_array_head(struct cursor *c, const char *key, uint32_t *type, uint64_t *count)
{
	int err = get_type(c, key, type);

	if (!err)
		err = get_u64(c, "an array's length", count);
	if (err)
		return err;
	if (*count > (c->limit - c->at) / least_bytes(*type))
		return too_short(c, "an array's length", *count);
	return 0;
}

/* Arrays of arrays have no meaning to this reader: walk over them. */
static int skip_items(struct cursor *c, const char *key, uint32_t type, uint64_t count, uint32_t depth)
{
	struct kvt_text text;
	uint32_t item_type;
	uint64_t items;
	int err = 0;

	if (type != STRING && type != ARRAY) {
		err = need(c, "an array", count * values[type].bytes);
		if (!err)
			c->at += count * values[type].bytes;
		return err;
	}
	if (depth == KVT_GGUF_DEPTH)
		return kvt_fail(-EINVAL, "%s: metadata \"%s\": arrays in arrays deeper than %u", c->shard->path,
				kvt_quote(key, strlen(key)).s, KVT_GGUF_DEPTH);
	for (uint64_t i = 0; i < count && !err; i++) {
		if (type == STRING) {
			err = get_text(c, "a string", &text);
			continue;
		}
		err = get_array_head(c, key, &item_type, &items);
		if (!err)
			err = skip_items(c, key, item_type, items, depth + 1);
	}
	return err;
}

/* Texts move while their array grows: m->u is an index into them until resolve(). */
static int get_array(struct cursor *c, struct kvt_meta *m)
{
	uint32_t type;
	uint64_t count;
	int err;

	err = get_array_head(c, m->key.s, &type, &count);
	if (err)
		return err;
	m->item_type = values[type].meta;
	m->item_bytes = values[type].bytes;
	if (type == ARRAY) {
		m->count = 0;
		return skip_items(c, m->key.s, type, count, 1);
	}
	m->count = count;
	if (type != STRING) {
		err = need(c, "an array", count * m->item_bytes);
		m->items = c->text + c->at;
		c->at += count * m->item_bytes;
		return err;
	}
	m->u = c->n_texts;
	for (uint64_t i = 0; i < count; i++) {
		err = kvt_grow((void **)&c->shard->texts, &c->text_room, c->n_texts, sizeof(struct kvt_text));
		if (!err)
			err = get_text(c, "a string", &c->shard->texts[c->n_texts]);
		if (err)
			return err;
		c->n_texts++;
	}
	return 0;
}

static int get_value(struct cursor *c, struct kvt_meta *m)
{
	uint32_t type, bytes;
	float f;
	int err;

	err = get_type(c, m->key.s, &type);
	if (err)
		return err;
	m->type = values[type].meta;
	if (type == STRING)
		return get_text(c, "a string", &m->text);
	if (type == ARRAY)
		return get_array(c, m);
	bytes = values[type].bytes;
	err = need(c, "a value", bytes);
	if (err)
		return err;
	memcpy(&m->u, c->text + c->at, bytes);
	c->at += bytes;
	if (type == F32) {
		memcpy(&f, &m->u, 4);
		m->f = f;
	} else if (m->type == KVT_META_INT && bytes < 8) {
		m->i = (int64_t)(m->u << (64 - 8 * bytes)) >> (64 - 8 * bytes);
	} else if (type == BOOL) {
		m->u = !!m->u;
	}
	if (strcmp(m->key.s, "general.alignment"))
		return 0;
	if (type != U32 || !m->u || (m->u & (m->u - 1)))
		return kvt_fail(-EINVAL, "%s: general.alignment is not a power of two of type u32", c->shard->path);
	c->alignment = m->u;
	return 0;
}

static int get_tensor(struct cursor *c)
{
	struct kvt_tensor *t = kvt_build_tensor(c->b, 0);
	uint64_t dims[KVT_GGUF_RANK_MAX], row;
	uint32_t rank, block, block_bytes;
	const char *path = c->shard->path;
	struct kvt_text name;
	int err;

	if (!t)
		return -ENOMEM;
	err = get_text(c, "a tensor's name", &name);
	if (!err)
		err = get_u32(c, "a tensor's rank", &rank);
	if (err)
		return err;
	t->name = name.s;
	t->name_len = name.len;
	if (rank > KVT_GGUF_RANK_MAX)
		return kvt_fail(-EINVAL, "%s: tensor \"%s\": %u dimensions, at most %u are allowed", path,
				kvt_quote(name.s, name.len).s, rank, KVT_GGUF_RANK_MAX);
	t->rank = rank;
	t->elements = 1;
	for (uint32_t i = 0; i < rank; i++) {
		err = get_u64(c, "a tensor's shape", &dims[i]);
		if (err)
			return err;
		if (__builtin_mul_overflow(t->elements, dims[i], &t->elements))
			return kvt_fail(-EINVAL, "%s: tensor \"%s\": the shape has 2^64 elements or more", path,
					kvt_quote(name.s, name.len).s);
	}
	/* the file's innermost dimension comes first, ours last */
	for (uint32_t i = rank; i-- > 0;) {
		err = kvt_grow((void **)&c->shard->dims, &c->dim_room, c->n_dims, sizeof(*dims));
		if (err)
			return err;
		c->shard->dims[c->n_dims++] = dims[i];
	}
	err = get_u32(c, "a tensor's type", &t->ggml_type);
	if (!err)
		err = get_u64(c, "a tensor's offset", &t->offset);
	if (err)
		return err;
	t->dtype = KVT_DT_UNKNOWN;
	if (t->ggml_type < sizeof(ggml_types) && ggml_types[t->ggml_type])
		t->dtype = ggml_types[t->ggml_type] - 1;
	if (t->dtype == KVT_DT_UNKNOWN)
		return 0;
	kvt_dtype_block(t->dtype, &block, &block_bytes);
	row = rank ? dims[0] : 1;
	if (row % block)
		return kvt_fail(-EINVAL, "%s: tensor \"%s\": rows of %llu elements are not whole blocks of %u (%s)", path,
				kvt_quote(name.s, name.len).s, (unsigned long long)row, block, kvt_dtype_name(t->dtype));
	if (__builtin_mul_overflow(t->elements / block, block_bytes, &t->bytes))
		return kvt_fail(-EINVAL, "%s: tensor \"%s\": the shape takes 2^64 bytes or more", path,
				kvt_quote(name.s, name.len).s);
	return 0;
}

/* Offsets become the file's; tensors lie in the file, aligned, and do not overlap. */
static int check_ranges(struct cursor *c)
{
	struct kvt_weights *w = c->b->w;
	const struct kvt_shard *s = c->shard;
	uint64_t dim = 0, room = s->bytes > s->data ? s->bytes - s->data : 0, end = 0;

	for (uint32_t i = 0; i < w->n_tensors; i++) {
		w->tensors[i].shape = s->dims ? s->dims + dim : NULL; /* scalars alone */
		dim += w->tensors[i].rank;
	}
	kvt_build_sort(w, 0);
	for (uint32_t i = 0; i < w->n_tensors; i++) {
		struct kvt_tensor *t = &w->tensors[i];
		struct kvt_quoted name = kvt_quote(t->name, t->name_len);

		if (t->offset % c->alignment)
			return kvt_fail(-EINVAL, "%s: tensor \"%s\": offset %llu is not a multiple of the alignment, %llu", s->path,
					name.s, (unsigned long long)t->offset, (unsigned long long)c->alignment);
		if (t->offset > room || t->bytes > room - t->offset)
			return kvt_fail(-EINVAL, "%s: tensor \"%s\": %llu bytes at %llu of the data, the file has %llu: it is cut off "
					"(an interrupted download?)", s->path, name.s, (unsigned long long)t->bytes,
					(unsigned long long)t->offset, (unsigned long long)room);
		if (t->offset < end)
			return kvt_fail(-EINVAL, "%s: tensor \"%s\": overlaps tensor \"%s\"", s->path, name.s,
					kvt_quote(t[-1].name, t[-1].name_len).s);
		end = t->offset + t->bytes;
		t->offset += s->data;
	}
	return 0;
}

static int get_head(struct cursor *c, uint64_t *n_tensors, uint64_t *n_meta)
{
	uint32_t magic, version;
	int err;

	err = get_u32(c, "the magic", &magic);
	if (!err)
		err = get_u32(c, "the version", &version);
	if (err)
		return err;
	if (memcmp(&magic, "GGUF", 4))
		return kvt_fail(-EINVAL, "%s: not a GGUF file: it does not begin with \"GGUF\"%s", c->shard->path,
				kvt_file_hint(c->text, c->filled));
	if (version != 2 && version != 3)
		return kvt_fail(-EINVAL, "%s: GGUF version %u%s, versions 2 and 3 can be read", c->shard->path, version,
				version & 0xffff ? "" : " (a big-endian file?)");
	c->b->w->version = version;
	err = get_u64(c, "the number of tensors", n_tensors);
	if (!err)
		err = get_u64(c, "the number of metadata entries", n_meta);
	if (err)
		return err;
	/* an entry has a key's length, a type and a byte of value; a tensor, a length, rank, type and offset */
	if (*n_meta > (c->limit - c->at) / 13)
		return too_short(c, "the number of metadata entries", *n_meta);
	if (*n_tensors > (c->limit - c->at) / 24)
		return too_short(c, "the number of tensors", *n_tensors);
	return 0;
}

int kvt_gguf_read(struct kvt_build *b)
{
	struct kvt_weights *w = b->w;
	struct kvt_shard *s = &w->shards[0];
	struct cursor c = { .b = b, .shard = s, .alignment = 32 };
	uint64_t n_tensors = 0, n_meta = 0;
	int err;

	w->format = KVT_GGUF;
	c.limit = s->bytes < KVT_GGUF_HEADER_MAX ? s->bytes : KVT_GGUF_HEADER_MAX;
	s->header_bytes = c.limit + 1;
	s->header = mmap(NULL, s->header_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (s->header == MAP_FAILED) {
		s->header = NULL;
		return kvt_fail(-ENOMEM, "%s: no memory for a header of up to %zu bytes", s->path, s->header_bytes);
	}
	c.text = s->header;
	err = get_head(&c, &n_tensors, &n_meta);
	if (err)
		return err;
	for (uint64_t i = 0; i < n_meta && !err; i++) {
		struct kvt_meta *m = kvt_build_meta(b, 0);

		if (!m)
			return -ENOMEM;
		err = get_text(&c, "a metadata key", &m->key);
		if (!err)
			err = get_value(&c, m);
	}
	if (!err)
		err = kvt_build_unique_keys(w, 0, s->path);
	for (uint64_t i = 0; i < n_tensors && !err; i++)
		err = get_tensor(&c);
	if (err)
		return err;
	for (uint32_t i = 0; i < w->n_meta && s->texts; i++)
		if (w->meta[i].type == KVT_META_ARRAY && w->meta[i].item_type == KVT_META_STRING)
			w->meta[i].items = s->texts + w->meta[i].u;
	s->data = (c.at + c.alignment - 1) & ~(c.alignment - 1);
	return check_ranges(&c);
}
