// SPDX-License-Identifier: MIT
/*
 * Text to token ids and back: a byte a token, or SentencePiece BPE as Llama 2
 * has it. There, the text is cut into characters and the neighbours whose
 * union is the best-scored piece are joined, leftmost first, until none are;
 * what is no piece becomes byte tokens. A space stands for U+2581.
 */
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "engines/ref/engine.h"

#define TOKENIZER_BYTES_MAX (256u << 20)
#define PIECE_BYTES_MAX 4096
#define NONE UINT32_MAX

/* GGUF's and SentencePiece's numbers. */
enum piece_type { PIECE_NORMAL = 1, PIECE_UNKNOWN, PIECE_CONTROL, PIECE_USER, PIECE_UNUSED, PIECE_BYTE };

struct piece {
	uint32_t offset, bytes; /* in text */
	float score;
	uint8_t type;
};

struct ref_tokenizer {
	uint32_t vocab;
	int32_t bos;
	bool by_bytes;
	char *text; /* all pieces; by_bytes: the 256 bytes */
	struct piece *pieces;
	uint32_t *table; /* open addressing: ids of the pieces that text may become */
	uint32_t table_mask;
	uint32_t byte_id[256];
};

void ref_tokenizer_free(struct ref_tokenizer *t)
{
	if (!t)
		return;
	free(t->text);
	free(t->pieces);
	free(t->table);
	free(t);
}

/* ---- load ---- */

/* FNV-1a */
static uint32_t hash(const char *s, uint32_t n)
{
	uint32_t h = 2166136261u;

	while (n--)
		h = (h ^ (uint8_t)*s++) * 16777619u;
	return h ^ h >> 15;
}

/* The id of a piece with this text, or the free place for it in *slot. */
static uint32_t find(const struct ref_tokenizer *t, const char *s, uint32_t n, uint32_t *slot)
{
	uint32_t i = hash(s, n) & t->table_mask, id;

	for (; (id = t->table[i]) != NONE; i = (i + 1) & t->table_mask)
		if (t->pieces[id].bytes == n && !memcmp(t->text + t->pieces[id].offset, s, n))
			return id;
	if (slot)
		*slot = i;
	return NONE;
}

/* "<0x0A>" and the like: the byte, or -1. */
static int byte_piece(const char *s, size_t n)
{
	unsigned int value;
	char digits[3];

	if (n != 6 || memcmp(s, "<0x", 3) || s[5] != '>' || !isxdigit((uint8_t)s[3]) || !isxdigit((uint8_t)s[4]))
		return -1;
	memcpy(digits, s + 3, 2);
	digits[2] = 0;
	sscanf(digits, "%x", &value);
	return (int)value;
}

/* A piece's type where the file does not tell. */
static uint8_t guess_type(const struct ref_config *c, uint32_t id, const char *s, size_t n)
{
	if ((int64_t)id == c->bos)
		return PIECE_CONTROL;
	for (uint32_t i = 0; i < c->n_eos; i++)
		if (id == c->eos[i])
			return PIECE_CONTROL;
	if (n == 5 && !memcmp(s, "<unk>", 5))
		return PIECE_UNKNOWN;
	return byte_piece(s, n) >= 0 ? PIECE_BYTE : PIECE_NORMAL;
}

static int add_piece(struct ref_tokenizer *t, uint32_t id, const char *s, size_t n, float score, uint8_t type,
		     uint32_t *end)
{
	struct piece *p = &t->pieces[id];
	uint32_t slot;
	int byte;

	*p = (struct piece){ .offset = *end, .score = score, .type = type };
	if (type == PIECE_BYTE) {
		byte = byte_piece(s, n);
		if (byte < 0)
			return kvt_fail(-EINVAL, "token %u is of the byte type, but not of the form <0x0A>", id);
		t->byte_id[byte] = id;
		t->text[(*end)++] = (char)byte;
		p->bytes = 1;
		return 0;
	}
	for (size_t i = 0; i < n; p->bytes++) {
		bool space = n - i >= 3 && !memcmp(s + i, "\xe2\x96\x81", 3);

		t->text[(*end)++] = space ? ' ' : s[i];
		i += space ? 3 : 1;
	}
	/* An empty piece and a second one with the same text are never made from text. */
	if ((type == PIECE_NORMAL || type == PIECE_USER) && n && find(t, t->text + p->offset, p->bytes, &slot) == NONE)
		t->table[slot] = id;
	return 0;
}

int ref_tokenizer_from(const char *const *pieces, const size_t *lengths, const float *scores, const int32_t *types,
		       const struct ref_config *c, struct ref_tokenizer **tokenizer)
{
	struct ref_tokenizer *t = calloc(1, sizeof(*t));
	uint32_t end = 0, size = 16;
	uint64_t total = 1;
	int err = 0;

	if (!t)
		return kvt_fail(-ENOMEM, "tokenizer: no memory");
	t->vocab = c->vocab;
	t->bos = c->bos;
	for (uint32_t i = 0; i < c->vocab; i++) {
		if (lengths[i] > PIECE_BYTES_MAX || isnan(scores[i])) {
			err = kvt_fail(-EINVAL, "token %u has %zu bytes (at most %d) and the score %g", i, lengths[i],
				       PIECE_BYTES_MAX, (double)scores[i]);
			goto free_tokenizer;
		}
		total += lengths[i] ? lengths[i] : 1;
	}
	while (size < 2 * c->vocab)
		size *= 2;
	t->table_mask = size - 1;
	t->text = total < UINT32_MAX ? malloc(total) : NULL;
	t->pieces = calloc(c->vocab, sizeof(*t->pieces));
	t->table = malloc(size * sizeof(*t->table));
	if (!t->text || !t->pieces || !t->table) {
		err = kvt_fail(-ENOMEM, "tokenizer: no memory for %u tokens of %llu bytes", c->vocab,
			       (unsigned long long)total);
		goto free_tokenizer;
	}
	memset(t->table, 0xff, size * sizeof(*t->table));
	memset(t->byte_id, 0xff, sizeof(t->byte_id));
	for (uint32_t i = 0; !err && i < c->vocab; i++)
		err = add_piece(t, i, pieces[i], lengths[i], scores[i],
				types ? (uint8_t)types[i] : guess_type(c, i, pieces[i], lengths[i]), &end);
	for (uint32_t b = 0; !err && b < 256; b++)
		if (t->byte_id[b] == NONE)
			err = kvt_fail(-EINVAL, "there is no token <0x%02X>: only vocabularies with all 256 bytes are supported",
				       b);
	if (err)
		goto free_tokenizer;
	*tokenizer = t;
	return 0;

free_tokenizer:
	ref_tokenizer_free(t);
	return err;
}

static int by_bytes(const struct ref_config *c, struct ref_tokenizer **tokenizer)
{
	struct ref_tokenizer *t;

	if (c->vocab < 256 || c->vocab > 512 || (c->bos >= 0 && c->bos < 256))
		return kvt_fail(-EINVAL, "the model has no tokenizer file, and its %u tokens are not bytes (which would be 256 "
				"to 512, BOS above 255): add its tok*.json or tok*.bin, or --tokenizer FILE", c->vocab);
	t = calloc(1, sizeof(*t));
	if (t)
		t->text = malloc(256);
	if (!t || !t->text) {
		ref_tokenizer_free(t);
		return kvt_fail(-ENOMEM, "tokenizer: no memory");
	}
	for (int i = 0; i < 256; i++)
		t->text[i] = (char)i;
	t->by_bytes = true;
	t->vocab = c->vocab;
	t->bos = c->bos;
	*tokenizer = t;
	return 0;
}

/* What both file formats are read into. */
struct piece_list {
	const char **text;
	size_t *bytes;
	float *scores;
	int32_t *types;
};

static int piece_list_alloc(struct piece_list *l, uint32_t n)
{
	l->text = calloc(n, sizeof(*l->text));
	l->bytes = calloc(n, sizeof(*l->bytes));
	l->scores = calloc(n, sizeof(*l->scores));
	l->types = calloc(n, sizeof(*l->types));
	return l->text && l->bytes && l->scores && l->types ? 0 : kvt_fail(-ENOMEM, "no memory for %u tokens", n);
}

static void piece_list_free(struct piece_list *l)
{
	free(l->text);
	free(l->bytes);
	free(l->scores);
	free(l->types);
}

/* {"tokens": [...], "scores": [...], "types": [...]}, types being optional */
static int from_json(const char *text, size_t bytes, const struct ref_config *c, struct ref_tokenizer **tokenizer)
{
	json_t *o, *tokens, *scores, *types;
	struct piece_list l = { 0 };
	json_error_t error;
	char quoted[96];
	int err;

	o = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &error);
	if (!o)
		return kvt_fail(-EINVAL, "not JSON, line %d: %s", error.line, ref_quote(quoted, sizeof(quoted), error.text));
	tokens = json_object_get(o, "tokens");
	scores = json_object_get(o, "scores");
	types = json_object_get(o, "types");
	err = piece_list_alloc(&l, c->vocab);
	if (err)
		goto free_list;
	if (!json_is_array(tokens) || !json_is_array(scores)) {
		err = kvt_fail(-EINVAL, "no \"tokens\" and \"scores\": only llama-spm JSON and llama2.c's .bin are supported");
		goto free_list;
	}
	if (json_array_size(tokens) != c->vocab || json_array_size(scores) != c->vocab ||
	    (types && json_array_size(types) != c->vocab)) {
		err = kvt_fail(-EINVAL, "%zu tokens, %zu scores, %zu types, for a \"vocab_size\" of %u",
			       json_array_size(tokens), json_array_size(scores), json_array_size(types), c->vocab);
		goto free_list;
	}
	for (uint32_t i = 0; i < c->vocab; i++) {
		const json_t *piece = json_array_get(tokens, i), *type = json_array_get(types, i);

		if (!json_is_string(piece) || !json_is_number(json_array_get(scores, i)) || (type && !json_is_integer(type))) {
			err = kvt_fail(-EINVAL, "token %u is not a string with a number for its score and type", i);
			goto free_list;
		}
		l.text[i] = json_string_value(piece);
		l.bytes[i] = json_string_length(piece);
		l.scores[i] = (float)json_number_value(json_array_get(scores, i));
		l.types[i] = (int32_t)json_integer_value(type);
	}
	err = ref_tokenizer_from(l.text, l.bytes, l.scores, types ? l.types : NULL, c, tokenizer);

free_list:
	piece_list_free(&l);
	json_decref(o);
	return err;
}

/* int32 longest piece; then for each token: float score, int32 length, bytes */
static int from_bin(const char *data, size_t bytes, const struct ref_config *c, struct ref_tokenizer **tokenizer)
{
	struct piece_list l = { 0 };
	size_t at = 4;
	int32_t n;
	int err;

	err = piece_list_alloc(&l, c->vocab);
	for (uint32_t i = 0; !err && i < c->vocab; i++) {
		if (at > bytes || bytes - at < 8) {
			err = kvt_fail(-EINVAL, "ends after %u tokens, \"vocab_size\" is %u", i, c->vocab);
			break;
		}
		memcpy(&l.scores[i], data + at, 4);
		memcpy(&n, data + at + 4, 4);
		at += 8;
		if (n < 0 || (size_t)n > bytes - at) {
			err = kvt_fail(-EINVAL, "token %u has a length of %d, %zu bytes are left", i, n, bytes - at);
			break;
		}
		l.text[i] = data + at;
		l.bytes[i] = (size_t)n;
		at += (size_t)n;
	}
	if (!err && at != bytes)
		err = kvt_fail(-EINVAL, "has %zu bytes behind its %u tokens (\"vocab_size\")", bytes - at, c->vocab);
	if (!err)
		err = ref_tokenizer_from(l.text, l.bytes, l.scores, NULL, c, tokenizer);
	piece_list_free(&l);
	return err;
}

static bool ends_with(const char *s, const char *end)
{
	return strlen(s) >= strlen(end) && !strcmp(s + strlen(s) - strlen(end), end);
}

int ref_tokenizer_load(const char *path, const struct ref_config *c, struct ref_tokenizer **tokenizer)
{
	size_t bytes;
	char *data;
	int err;

	if (!path)
		return by_bytes(c, tokenizer);
	err = ref_read_file(path, TOKENIZER_BYTES_MAX, &data, &bytes);
	if (err)
		return err;
	if (ends_with(path, ".bin"))
		err = from_bin(data, bytes, c, tokenizer);
	else
		err = from_json(data, bytes, c, tokenizer);
	free(data);
	return err ? kvt_fail_more(err, "%s", path) : 0;
}

int ref_tokenizer_find(const char *dir, char *path, size_t size)
{
	struct dirent *e;
	int n = 0;
	DIR *d;

	path[0] = 0;
	d = opendir(dir);
	if (!d)
		return kvt_fail(-errno, "%s: %s", dir, strerror(errno));
	while ((e = readdir(d)) && n >= 0) {
		if (strncmp(e->d_name, "tok", 3) || !strcmp(e->d_name, "tokenizer_config.json") ||
		    !(ends_with(e->d_name, ".json") || ends_with(e->d_name, ".bin") || ends_with(e->d_name, ".model")))
			continue;
		if (path[0])
			n = kvt_fail(-EINVAL, "%s and %s/%s are both there: choose with --tokenizer FILE", path, dir, e->d_name);
		else if (snprintf(path, size, "%s/%s", dir, e->d_name) >= (int)size)
			n = kvt_fail(-ENAMETOOLONG, "%s/%s: the path is too long", dir, e->d_name);
	}
	closedir(d);
	return n;
}

/* ---- encode ---- */

/* A stretch of the text; those joined to the one before have no bytes. */
struct symbol {
	uint32_t offset, bytes, prev, next;
};

/* A pair that is a piece; stale when its length is no longer that of both. */
struct join {
	float score;
	uint32_t left, right, bytes;
};

struct joins {
	struct join *heap;
	uint32_t n;
};

static bool better(const struct join *a, const struct join *b)
{
	return a->score > b->score || (a->score == b->score && a->left < b->left);
}

static void joins_push(struct joins *j, struct join join)
{
	uint32_t i = j->n++;

	for (; i && better(&join, &j->heap[(i - 1) / 2]); i = (i - 1) / 2)
		j->heap[i] = j->heap[(i - 1) / 2];
	j->heap[i] = join;
}

static struct join joins_pop(struct joins *j)
{
	struct join top = j->heap[0], last = j->heap[--j->n];
	uint32_t i = 0, child;

	while ((child = 2 * i + 1) < j->n) {
		child += child + 1 < j->n && better(&j->heap[child + 1], &j->heap[child]);
		if (!better(&j->heap[child], &last))
			break;
		j->heap[i] = j->heap[child];
		i = child;
	}
	j->heap[i] = last;
	return top;
}

static void consider(const struct ref_tokenizer *t, const char *text, const struct symbol *s, uint32_t left,
		     uint32_t right, struct joins *joins)
{
	uint32_t bytes, id;

	if (left == NONE || right == NONE)
		return;
	bytes = s[left].bytes + s[right].bytes;
	id = find(t, text + s[left].offset, bytes, NULL);
	if (id != NONE)
		joins_push(joins, (struct join){ t->pieces[id].score, left, right, bytes });
}

/* Bytes of the UTF-8 character at @s; 1 where it is none. */
static uint32_t char_bytes(const char *s, size_t left)
{
	uint8_t c = (uint8_t)*s;
	uint32_t n = c < 0xc0 ? 1 : c < 0xe0 ? 2 : c < 0xf0 ? 3 : 4;

	if (n > left)
		return 1;
	for (uint32_t i = 1; i < n; i++)
		if (((uint8_t)s[i] & 0xc0) != 0x80)
			return 1;
	return n;
}

/* Joins @text [bytes] and appends its ids. */
static int encode_pieces(const struct ref_tokenizer *t, const char *text, uint32_t bytes, uint32_t *ids, uint32_t *n)
{
	struct symbol *s = malloc(bytes * sizeof(*s));
	/* Every join leaves one symbol less and offers at most two more. */
	struct joins joins = { malloc(3ull * bytes * sizeof(*joins.heap)), 0 };
	uint32_t symbols = 0, id;
	int err = 0;

	if (!s || !joins.heap) {
		err = kvt_fail(-ENOMEM, "no memory to cut a prompt of %u bytes into tokens", bytes);
		goto free_symbols;
	}
	for (uint32_t at = 0; at < bytes; at += s[symbols++].bytes)
		s[symbols] = (struct symbol){ at, char_bytes(text + at, bytes - at), symbols - 1, symbols + 1 };
	s[symbols - 1].next = NONE;
	for (uint32_t i = 0; i + 1 < symbols; i++)
		consider(t, text, s, i, i + 1, &joins);
	while (joins.n) {
		struct join j = joins_pop(&joins);
		struct symbol *left = &s[j.left], *right = &s[j.right];

		if (!left->bytes || !right->bytes || left->bytes + right->bytes != j.bytes)
			continue;
		left->bytes = j.bytes;
		left->next = right->next;
		right->bytes = 0;
		if (left->next != NONE)
			s[left->next].prev = j.left;
		consider(t, text, s, left->prev, j.left, &joins);
		consider(t, text, s, j.left, left->next, &joins);
	}
	for (uint32_t i = 0; i != NONE; i = s[i].next) {
		id = find(t, text + s[i].offset, s[i].bytes, NULL);
		if (id != NONE)
			ids[(*n)++] = id;
		for (uint32_t b = 0; id == NONE && b < s[i].bytes; b++)
			ids[(*n)++] = t->byte_id[(uint8_t)text[s[i].offset + b]];
	}

free_symbols:
	free(s);
	free(joins.heap);
	return err;
}

int ref_encode(const struct ref_tokenizer *t, const char *text, size_t bytes, uint32_t **ids, uint32_t *n)
{
	uint32_t count = 0;
	uint32_t *out;
	char *spaced;
	int err = 0;

	if (bytes > INT32_MAX - 2)
		return kvt_fail(-EFBIG, "a prompt of %zu bytes; at most 2 GiB", bytes);
	out = malloc((bytes + 2) * sizeof(*out));
	if (!out)
		return kvt_fail(-ENOMEM, "no memory for the tokens of a prompt of %zu bytes", bytes);
	if (t->bos >= 0)
		out[count++] = (uint32_t)t->bos;
	if (t->by_bytes) {
		for (size_t i = 0; i < bytes; i++)
			out[count++] = (uint8_t)text[i];
	} else if (bytes) {
		/* Words are learnt with the space before them; so the first gets one. */
		spaced = malloc(bytes + 1);
		if (spaced) {
			spaced[0] = ' ';
			memcpy(spaced + 1, text, bytes);
			err = encode_pieces(t, spaced, (uint32_t)bytes + 1, out, &count);
		} else {
			err = kvt_fail(-ENOMEM, "no memory for a prompt of %zu bytes", bytes);
		}
		free(spaced);
	}
	if (err) {
		free(out);
		return err;
	}
	*ids = out;
	*n = count;
	return 0;
}

/* ---- decode ---- */

const char *ref_decode(const struct ref_tokenizer *t, uint32_t before, uint32_t id, size_t *bytes)
{
	const struct piece *p;

	*bytes = 0;
	if (id >= t->vocab || (t->by_bytes && id >= 256))
		return "";
	if (t->by_bytes) {
		*bytes = 1;
		return t->text + id;
	}
	p = &t->pieces[id];
	if (p->type == PIECE_CONTROL || p->type == PIECE_UNKNOWN || p->type == PIECE_UNUSED)
		return "";
	*bytes = p->bytes;
	/* the space that ref_encode() put before the first word */
	if (t->bos >= 0 && before == (uint32_t)t->bos && p->bytes && t->text[p->offset] == ' ') {
		*bytes -= 1;
		return t->text + p->offset + 1;
	}
	return t->text + p->offset;
}
