/* SPDX-License-Identifier: MIT */
/*
 * A directory that outlives the process:
 *
 *   superblock  what all the rest means: format, geometry, codecs, model
 *   slots       the store's slot file, blocks at slot * block_bytes
 *   log         records, each with checksums, appended: which token range lies in which slots
 *   lock        held by the process that has the directory open
 *
 * Nothing is synced while it is written. So nothing is believed for being there:
 * a record counts if its checksums hold, a block if its bytes have the digest
 * in the record. Records that did not reach the disk, or reached it before what they
 * speak of, or come from a time when the slot held something else, cost a miss.
 *
 * Numbers are little-endian. Records begin at multiples of 32 bytes; a reader that
 * loses its way goes on from the next one that holds.
 */
#ifndef KVT_STORE_JOURNAL_H
#define KVT_STORE_JOURNAL_H

#include <stdbool.h>
#include <stddef.h>

#include "kvtier.h"
#include "store/store.h"

#define KVT_DIR_VERSION 1
#define KVT_DIR_SLOTS "slots"
#define KVT_RECORD_MAX (64u << 20)

struct kvt_super_plane {
	uint32_t codec, heads, head_dim, layer;
	uint32_t row_bytes, block_rows;
	uint64_t rows; /* of a raw plane */
};

struct kvt_super {
	char magic[8];
	uint32_t version;
	uint32_t bytes;	   /* of all this, planes included */
	uint64_t check;	   /* of what follows */
	uint64_t dir;	   /* random: records of another directory do not count here */
	uint64_t block_bytes, rotation;
	uint32_t chunk;	   /* tokens */
	uint32_t n_planes;
	uint8_t model[KVT_FINGERPRINT];
	struct kvt_super_plane planes[];
};

enum { KVT_LOG_ROOT = 1, KVT_LOG_CHUNK, KVT_LOG_DROP };

struct kvt_log_head {
	uint32_t magic;
	uint32_t bytes;	   /* of the record, a multiple of 32 */
	uint64_t check;	   /* of what follows in here */
	uint64_t body;	   /* check of what follows the head */
	uint32_t type, ns;
	uint64_t id;	   /* never used twice in a directory */
	uint64_t parent;   /* CHUNK: the one before it, or its root */
	uint64_t root;
	uint32_t n_tokens; /* CHUNK: tokens; ROOT: bytes of its key */
	uint32_t n_blocks; /* CHUNK: entries behind the tokens */
};

struct kvt_log_record {
	struct kvt_log_head head;
	const void *key;			/* ROOT */
	const uint32_t *tokens;			/* CHUNK, and */
	const struct kvt_block_entry *entries;	/* its blocks */
	uint64_t at, end;			/* in the log */
};

/* 0, or -EUCLEAN with what is wrong. For an image of @bytes, aligned to 8. */
int kvt_super_check(const void *image, uint64_t bytes);

/*
 * The next whole record of @log [bytes] (aligned to 8) from *@at on, which moves behind it.
 * False: there is none.
 */
bool kvt_log_next(const uint8_t *log, uint64_t bytes, uint64_t dir, uint64_t *at, struct kvt_log_record *record);

/* Bytes of a record, and one made in @buf, which has as many. @head: all but magic, bytes and checks. */
uint64_t kvt_log_bytes(uint32_t type, uint32_t n_tokens, uint32_t n_blocks);
void kvt_log_make(void *buf, const struct kvt_log_head *head, uint64_t dir, const void *tokens,
		  const struct kvt_block_entry *entries);

struct kvt_dir {
	int fd, lock, log;
	char *path;
	struct kvt_super *super;
	uint64_t log_bytes;
	uint64_t records; /* read at the start */
};

/*
 * Open @path, which is made if need be, for a cache with the fields of @want (check and dir are
 * filled in here). NULL: any, which must be there. -EBUSY: it is open; -EMEDIUMTYPE: it is
 * another's; -EUCLEAN: its superblock does not hold; -ENOENT: it is no such directory.
 */
int kvt_dir_open(const char *path, const struct kvt_super *want, struct kvt_dir **dir);
void kvt_dir_close(struct kvt_dir *dir);

/* The log's bytes, to be given back; *@bytes 0: NULL. */
int kvt_dir_map(const struct kvt_dir *dir, const uint8_t **log, uint64_t *bytes);
void kvt_dir_unmap(const uint8_t *log, uint64_t bytes);

/* Cut what no record holds off the end. */
void kvt_dir_trim(struct kvt_dir *dir, uint64_t end);

/* Append records made in @buf. On an error nothing is appended. */
int kvt_dir_append(struct kvt_dir *dir, const void *buf, uint64_t bytes);

/*
 * Keep of the log the last record of each of @live [n], numbers of chunks and roots,
 * which are sorted here; @scratch [n]. Not on the way of anything: it syncs.
 */
int kvt_dir_compact(struct kvt_dir *dir, uint64_t *live, uint64_t n, uint64_t *scratch);

/* Remove the files of the directory at @path, and it if nothing else is in it. @damaged: whatever its superblock is. */
int kvt_dir_remove(const char *path, bool damaged);

#endif
