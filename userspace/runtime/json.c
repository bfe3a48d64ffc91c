// SPDX-License-Identifier: MIT
/* A strict JSON reader without a tree: RFC 8259, no extensions, strings decoded in place. */
#include "runtime/json.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"

static int bad(const struct kvt_json *j, size_t at, const char *expected)
{
	unsigned char c = at < j->bytes ? (unsigned char)j->text[at] : 0;
	char found[24];

	if (at >= j->bytes)
		strcpy(found, "the end");
	else if (c > 0x20 && c < 0x7f)
		snprintf(found, sizeof(found), "'%c'", c);
	else
		snprintf(found, sizeof(found), "byte 0x%02x", c);
	return kvt_fail(-EINVAL, "%s: not valid JSON at byte %llu: expected %s, found %s", j->what,
			(unsigned long long)(j->base + at), expected, found);
}

/* Well-formed UTF-8 by table 3-7 of the Unicode standard: no overlong forms, no surrogates. */
bool kvt_utf8_valid(const char *text, size_t bytes)
{
	const unsigned char *s = (const unsigned char *)text, *end = s + bytes;

	while (s < end) {
		unsigned char c = *s++, low = 0x80, high = 0xbf;
		int more;

		if (c < 0x80)
			continue;
		if (c >= 0xc2 && c <= 0xdf) {
			more = 1;
		} else if (c >= 0xe0 && c <= 0xef) {
			more = 2;
			low = c == 0xe0 ? 0xa0 : 0x80;
			high = c == 0xed ? 0x9f : 0xbf;
		} else if (c >= 0xf0 && c <= 0xf4) {
			more = 3;
			low = c == 0xf0 ? 0x90 : 0x80;
			high = c == 0xf4 ? 0x8f : 0xbf;
		} else {
			return false;
		}
		for (; more; more--) {
			if (s == end || *s < low || *s > high)
				return false;
			s++;
			low = 0x80;
			high = 0xbf;
		}
	}
	return true;
}

static bool space(char c)
{
	return c == ' ' || c == '\t' || c == '\n' || c == '\r';
}

static bool digit(char c)
{
	return c >= '0' && c <= '9';
}

/* The byte at @at, or NUL past the end (which no rule below accepts). */
static char at(const struct kvt_json *j, size_t at)
{
	return at < j->bytes ? j->text[at] : 0;
}

char kvt_json_peek(struct kvt_json *j)
{
	while (j->at < j->bytes && space(j->text[j->at]))
		j->at++;
	return at(j, j->at);
}

int kvt_json_open(struct kvt_json *j, char bracket, const char *as)
{
	if (kvt_json_peek(j) != bracket)
		return bad(j, j->at, as);
	j->at++;
	return 0;
}

int kvt_json_next(struct kvt_json *j, char close, bool *first)
{
	char c = kvt_json_peek(j);

	if (c == close) {
		j->at++;
		return 0;
	}
	if (*first) {
		*first = false;
		return 1;
	}
	if (c != ',')
		return bad(j, j->at, close == '}' ? "',' or '}'" : "',' or ']'");
	j->at++;
	return 1;
}

static int hex4(const struct kvt_json *j, size_t pos, uint32_t *value)
{
	*value = 0;
	for (size_t i = pos; i < pos + 4; i++) {
		char c = at(j, i);

		if (digit(c))
			*value = *value * 16 + (c - '0');
		else if ((c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F'))
			*value = *value * 16 + ((c | 0x20) - 'a' + 10);
		else
			return bad(j, i, "four hexadecimal digits");
	}
	return 0;
}

static size_t put_utf8(char *out, uint32_t c)
{
	if (c < 0x80) {
		out[0] = c;
		return 1;
	}
	if (c < 0x800) {
		out[0] = 0xc0 | c >> 6;
		out[1] = 0x80 | (c & 0x3f);
		return 2;
	}
	if (c < 0x10000) {
		out[0] = 0xe0 | c >> 12;
		out[1] = 0x80 | (c >> 6 & 0x3f);
		out[2] = 0x80 | (c & 0x3f);
		return 3;
	}
	out[0] = 0xf0 | c >> 18;
	out[1] = 0x80 | (c >> 12 & 0x3f);
	out[2] = 0x80 | (c >> 6 & 0x3f);
	out[3] = 0x80 | (c & 0x3f);
	return 4;
}

/* \uXXXX at @pos (behind the u), or a surrogate pair. Returns the bytes it takes. */
static int unicode_escape(const struct kvt_json *j, size_t pos, uint32_t *c)
{
	uint32_t low;
	int err;

	err = hex4(j, pos, c);
	if (err)
		return err;
	if (*c < 0xd800 || *c > 0xdfff)
		return 4;
	if (*c > 0xdbff)
		return bad(j, pos, "a character, not half of a surrogate pair");
	if (at(j, pos + 4) != '\\' || at(j, pos + 5) != 'u')
		return bad(j, pos + 4, "the second half of a surrogate pair");
	err = hex4(j, pos + 6, &low);
	if (err)
		return err;
	if (low < 0xdc00 || low > 0xdfff)
		return bad(j, pos + 6, "the second half of a surrogate pair");
	*c = 0x10000 + ((*c - 0xd800) << 10) + (low - 0xdc00);
	return 10;
}

/* The decoded form is never longer than the text, and its NUL falls on the closing quote at the latest. */
int kvt_json_str(struct kvt_json *j, const char *as, struct kvt_json_string *str)
{
	static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
	size_t pos;
	char *out;

	if (kvt_json_peek(j) != '"')
		return bad(j, j->at, as);
	pos = j->at + 1;
	out = j->text + pos;
	str->s = out;
	for (;;) {
		char c = at(j, pos);
		const char *e;
		uint32_t u;
		int n;

		if (c == '"')
			break;
		if (pos >= j->bytes || (unsigned char)c < 0x20)
			return bad(j, pos, "the rest of a string");
		pos++;
		if (c != '\\') {
			*out++ = c;
			continue;
		}
		c = at(j, pos);
		e = c ? strchr(from, c) : NULL;
		if (e) {
			*out++ = to[e - from];
			pos++;
			continue;
		}
		if (c != 'u')
			return bad(j, pos, "an escape that JSON has");
		n = unicode_escape(j, pos + 1, &u);
		if (n < 0)
			return n;
		out += put_utf8(out, u);
		pos += 1 + n;
	}
	*out = 0;
	str->len = out - str->s;
	j->at = pos + 1;
	return 0;
}

int kvt_json_key(struct kvt_json *j, struct kvt_json_string *key)
{
	int err = kvt_json_str(j, "a name in double quotes", key);

	if (err)
		return err;
	if (kvt_json_peek(j) != ':')
		return bad(j, j->at, "':'");
	j->at++;
	return 0;
}

/* The end of the number that begins at j->at, or -EINVAL. *whole: digits alone. */
static int scan_number(struct kvt_json *j, const char *as, size_t *end, bool *whole)
{
	size_t pos;

	kvt_json_peek(j);
	pos = j->at;
	*whole = at(j, pos) != '-';
	if (!*whole)
		pos++;
	if (!digit(at(j, pos)))
		return bad(j, pos, as);
	if (at(j, pos) == '0' && digit(at(j, pos + 1)))
		return bad(j, pos, "a number without leading zeros");
	while (digit(at(j, pos)))
		pos++;
	if (at(j, pos) == '.') {
		*whole = false;
		pos++;
		if (!digit(at(j, pos)))
			return bad(j, pos, "digits");
		while (digit(at(j, pos)))
			pos++;
	}
	if (at(j, pos) == 'e' || at(j, pos) == 'E') {
		*whole = false;
		pos++;
		if (at(j, pos) == '+' || at(j, pos) == '-')
			pos++;
		if (!digit(at(j, pos)))
			return bad(j, pos, "digits");
		while (digit(at(j, pos)))
			pos++;
	}
	*end = pos;
	return 0;
}

int kvt_json_u64(struct kvt_json *j, const char *as, uint64_t *value)
{
	size_t end;
	bool whole;
	int err;

	err = scan_number(j, as, &end, &whole);
	if (err)
		return err;
	if (!whole)
		return bad(j, j->at, as);
	*value = 0;
	for (size_t i = j->at; i < end; i++)
		if (__builtin_mul_overflow(*value, 10, value) ||
		    __builtin_add_overflow(*value, (uint64_t)(j->text[i] - '0'), value))
			return bad(j, j->at, "a number below 2^64");
	j->at = end;
	return 0;
}

int kvt_json_number(struct kvt_json *j, const char *as, double *value)
{
	char digits[64];
	size_t end;
	bool whole;
	int err;

	err = scan_number(j, as, &end, &whole);
	if (err)
		return err;
	if (end - j->at >= sizeof(digits))
		return bad(j, j->at, "a number of at most 63 characters");
	memcpy(digits, j->text + j->at, end - j->at);
	digits[end - j->at] = 0;
	*value = strtod(digits, NULL);
	j->at = end;
	return 0;
}

int kvt_json_literal(struct kvt_json *j, const char *literal)
{
	size_t n = strlen(literal);

	kvt_json_peek(j);
	if (j->bytes - j->at < n || memcmp(j->text + j->at, literal, n))
		return bad(j, j->at, literal);
	j->at += n;
	return 0;
}

static int skip_scalar(struct kvt_json *j, char c)
{
	struct kvt_json_string str;
	size_t end;
	bool whole;
	int err;

	switch (c) {
	case '"':
		return kvt_json_str(j, "a string", &str);
	case 't':
		return kvt_json_literal(j, "true");
	case 'f':
		return kvt_json_literal(j, "false");
	case 'n':
		return kvt_json_literal(j, "null");
	}
	err = scan_number(j, "a value", &end, &whole);
	if (!err)
		j->at = end;
	return err;
}

int kvt_json_skip(struct kvt_json *j)
{
	char close[KVT_JSON_DEPTH];
	bool first = false;
	uint32_t depth = 0;
	int more, err;

	for (;;) {
		char c = kvt_json_peek(j);

		if (c == '{' || c == '[') {
			if (depth == KVT_JSON_DEPTH)
				return bad(j, j->at, "at most 128 levels of nesting");
			close[depth++] = c == '{' ? '}' : ']';
			j->at++;
			first = true;
		} else {
			err = skip_scalar(j, c);
			if (err)
				return err;
		}
		/* what ends here, and on to the next member */
		for (;;) {
			if (!depth)
				return 0;
			more = kvt_json_next(j, close[depth - 1], &first);
			if (more < 0)
				return more;
			if (more)
				break;
			depth--;
			first = false;
		}
		if (close[depth - 1] == '}') {
			struct kvt_json_string key;

			err = kvt_json_key(j, &key);
			if (err)
				return err;
		}
	}
}

int kvt_json_end(struct kvt_json *j)
{
	return kvt_json_peek(j) || j->at < j->bytes ? bad(j, j->at, "the end") : 0;
}
