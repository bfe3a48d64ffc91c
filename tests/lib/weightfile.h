/* SPDX-License-Identifier: MIT */
/* For tests of weight files: a scratch directory, files in it, and bytes to fill them with. */
#ifndef KVT_TESTS_WEIGHTFILE_H
#define KVT_TESTS_WEIGHTFILE_H

#include <stddef.h>
#include <stdint.h>

struct bytes {
	uint8_t *p;
	size_t n, room;
};

void put(struct bytes *b, const void *data, size_t n);
void put_text(struct bytes *b, const char *s);
void put_u32(struct bytes *b, uint32_t v);
void put_u64(struct bytes *b, uint64_t v);
void put_gguf_text(struct bytes *b, const char *s); /* its length, then the text */
void put_pattern(struct bytes *b, size_t n, uint32_t seed); /* bytes that differ everywhere */

/* A safetensors file: the header's length, @header, @data. */
void put_safetensors(struct bytes *b, const char *header, const void *data, size_t n);

/* A scratch directory of this process, made at the first call and removed at exit. */
const char *scratch_dir(void);

/* PATH of @name in there, in one of a few buffers that are used in turn. */
const char *scratch(const char *name);

/* Write, or exit with a message. */
const char *write_file(const char *name, const void *data, size_t n);
const char *write_bytes(const char *name, struct bytes *b); /* and empties @b */

/* A file of the optional inputs, or NULL, having said on stdout that @test is skipped and why. */
const char *input(const char *test, const char *name);

#endif
