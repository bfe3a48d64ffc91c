// SPDX-License-Identifier: MIT
/* What the superblock and the log say, without their files: checking, making and reading records. */
#include "store/journal.h"

#include <errno.h>
#include <string.h>

#include "base/err.h"
#include "codec/codec.h"

#define MAGIC "KVTSTORE"
#define LOG_MAGIC 0x6c74766bu /* kvtl */
#define ALIGN 32u

_Static_assert(sizeof(struct kvt_log_head) == 64 && sizeof(struct kvt_block_entry) == 40 &&
		       sizeof(struct kvt_super) == 88 && sizeof(struct kvt_super_plane) == 32,
	       "the layout on disk");

static uint64_t check_of(const void *from, uint64_t bytes, uint64_t dir)
{
	return kvt_row_digest(0, from, (uint32_t)bytes) + dir * 0x9E3779B97F4A7C15ull;
}

/* ---- superblock ---- */

static int bad_super(const char *what)
{
	return kvt_fail(-EUCLEAN, "superblock: %s: it is damaged, or not kvtier's: what is in the directory cannot be used, remove it (kvtier store rm --force)", what);
}

int kvt_super_check(const void *image, uint64_t bytes)
{
	const struct kvt_super *s = image;
	const uint64_t from = offsetof(struct kvt_super, dir);

	if (bytes < sizeof(*s) || memcmp(s->magic, MAGIC, sizeof(s->magic)))
		return bad_super("it does not begin like one");
	if (s->version != KVT_DIR_VERSION)
		return kvt_fail(-EMEDIUMTYPE, "format version %u, this library knows %u", s->version, KVT_DIR_VERSION);
	if (s->bytes != bytes || s->n_planes < 1 || s->n_planes > 65535 ||
	    s->bytes != sizeof(*s) + s->n_planes * sizeof(s->planes[0]))
		return bad_super("its size is wrong");
	if (s->check != check_of((const uint8_t *)s + from, bytes - from, 0))
		return bad_super("its checksum is wrong");
	if (!s->chunk || s->block_bytes < 4096 || s->block_bytes > 2u << 20 || s->block_bytes % 4096)
		return bad_super("its geometry cannot be");
	for (uint32_t i = 0; i < s->n_planes; i++) {
		const struct kvt_super_plane *p = &s->planes[i];

		if (p->codec >= KVT_CODECS || !p->row_bytes || !p->block_rows ||
		    (uint64_t)p->row_bytes * p->block_rows > s->block_bytes || (!p->rows && s->chunk % p->block_rows))
			return bad_super("a plane cannot be");
	}
	return 0;
}

/* ---- log ---- */

static uint64_t pad(uint64_t bytes, uint64_t to)
{
	return (bytes + to - 1) / to * to;
}

static uint64_t body_bytes(uint32_t type, uint32_t n_tokens, uint32_t n_blocks)
{
	if (type == KVT_LOG_ROOT)
		return n_tokens;
	if (type == KVT_LOG_CHUNK)
		return pad((uint64_t)n_tokens * sizeof(uint32_t), 8) + (uint64_t)n_blocks * sizeof(struct kvt_block_entry);
	return 0;
}

uint64_t kvt_log_bytes(uint32_t type, uint32_t n_tokens, uint32_t n_blocks)
{
	return pad(sizeof(struct kvt_log_head) + body_bytes(type, n_tokens, n_blocks), ALIGN);
}

static uint64_t head_check(const struct kvt_log_head *h, uint64_t dir)
{
	const uint64_t from = offsetof(struct kvt_log_head, body);

	return check_of((const uint8_t *)h + from, sizeof(*h) - from, dir) ^ h->bytes * 0xC2B2AE3D27D4EB4Full;
}

void kvt_log_make(void *buf, const struct kvt_log_head *head, uint64_t dir, const void *tokens,
		  const struct kvt_block_entry *entries)
{
	const uint64_t bytes = kvt_log_bytes(head->type, head->n_tokens, head->n_blocks);
	struct kvt_log_head *h = buf;
	uint8_t *body = (uint8_t *)(h + 1);
	uint64_t words = (uint64_t)head->n_tokens * (head->type == KVT_LOG_CHUNK ? sizeof(uint32_t) : 1);

	memset(buf, 0, bytes);
	*h = *head;
	h->magic = LOG_MAGIC;
	h->bytes = (uint32_t)bytes;
	if (words)
		memcpy(body, tokens, words);
	if (head->n_blocks)
		memcpy(body + pad(words, 8), entries, head->n_blocks * sizeof(*entries));
	h->body = check_of(body, bytes - sizeof(*h), dir);
	h->check = head_check(h, dir);
}

static bool head_holds(const struct kvt_log_head *h, uint64_t left, uint64_t dir)
{
	if (h->magic != LOG_MAGIC || h->bytes < sizeof(*h) || h->bytes > KVT_RECORD_MAX || h->bytes > left ||
	    h->check != head_check(h, dir))
		return false;
	return h->bytes == kvt_log_bytes(h->type, h->n_tokens, h->n_blocks);
}

bool kvt_log_next(const uint8_t *log, uint64_t bytes, uint64_t dir, uint64_t *at, struct kvt_log_record *r)
{
	while (bytes - *at >= sizeof(r->head)) {
		const uint8_t *body = log + *at + sizeof(r->head);
		uint64_t begin = *at;

		memcpy(&r->head, log + begin, sizeof(r->head));
		if (!head_holds(&r->head, bytes - begin, dir)) {
			*at += ALIGN; /* the log's size need not be a multiple */
			if (*at > bytes)
				*at = bytes;
			continue;
		}
		*at += r->head.bytes;
		if (r->head.body != check_of(body, r->head.bytes - sizeof(r->head), dir))
			continue;
		r->key = body;
		r->tokens = (const uint32_t *)body;
		r->entries = (const struct kvt_block_entry *)(body + pad((uint64_t)r->head.n_tokens * sizeof(uint32_t), 8));
		r->at = begin;
		r->end = *at;
		return true;
	}
	return false;
}
