/* SPDX-License-Identifier: MIT */
/*
 * A strict JSON reader that builds no tree: the caller pulls the values it
 * expects, in order, and strings are decoded in place. Memory is the text's
 * own, whatever the text says (docs/adr/0006-json-reader.md).
 *
 * The text must be valid UTF-8 (kvt_utf8_valid()). Every call returns 0, or a
 * count where said, or -EINVAL with a message that holds the byte position.
 */
#ifndef KVT_RUNTIME_JSON_H
#define KVT_RUNTIME_JSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct kvt_json {
	char *text; /* changed by decoding */
	size_t bytes, at;
	const char *what; /* begins messages: "FILE: header" */
	uint64_t base;	  /* added to positions in messages */
};

/* A decoded string inside the text, followed by a NUL; may hold NULs of its own ("\u0000"). */
struct kvt_json_string {
	char *s;
	size_t len;
};

#define KVT_JSON_DEPTH 128 /* nesting that kvt_json_skip() follows */

bool kvt_utf8_valid(const char *s, size_t bytes);

/* The next byte that is not white space; 0 at the end. */
char kvt_json_peek(struct kvt_json *j);

/* Enter '{' or '['; @as names what is expected there. */
int kvt_json_open(struct kvt_json *j, char bracket, const char *as);

/*
 * Step to the next member of the array or object that @close ends. *first: true
 * before the first. Returns 1 at a member, 0 past @close.
 */
int kvt_json_next(struct kvt_json *j, char close, bool *first);

/* A member's name and its colon. */
int kvt_json_key(struct kvt_json *j, struct kvt_json_string *key);

int kvt_json_str(struct kvt_json *j, const char *as, struct kvt_json_string *str);

/* A whole number in [0, 2^64), written as digits only. */
int kvt_json_u64(struct kvt_json *j, const char *as, uint64_t *value);

/* Any number; *value is the nearest double. */
int kvt_json_number(struct kvt_json *j, const char *as, double *value);

/* The literal null, true or false. */
int kvt_json_literal(struct kvt_json *j, const char *literal);

/* Any value, of at most KVT_JSON_DEPTH levels. */
int kvt_json_skip(struct kvt_json *j);

/* Nothing but white space may follow. */
int kvt_json_end(struct kvt_json *j);

#endif
