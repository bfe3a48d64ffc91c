// SPDX-License-Identifier: MIT
/* What the commands read from their arguments, and how they say what is wrong with them. */
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <stdarg.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "kvtier.h"
#include "tools/tools.h"

#define SIZE_FORM "a number of bytes with an optional K, M, G or T (4096, 64K, 1.5G)"

/* The digits at @text, and after a point at most nine more: value = whole + part / scale. */
static const char *read_decimal(const char *text, uint64_t *whole, uint64_t *part, uint64_t *scale)
{
	const char *p = text;

	*whole = *part = 0;
	*scale = 1;
	for (; *p >= '0' && *p <= '9'; p++)
		if (__builtin_mul_overflow(*whole, 10, whole) || __builtin_add_overflow(*whole, *p - '0', whole))
			return NULL;
	if (p == text)
		return NULL;
	if (*p != '.')
		return p;
	for (p++; *p >= '0' && *p <= '9'; p++) {
		if (*scale == 1000000000)
			return NULL;
		*part = *part * 10 + (*p - '0');
		*scale *= 10;
	}
	return p[-1] == '.' ? NULL : p;
}

int tool_size(const char *text, uint64_t *bytes)
{
	static const char units[] = "KMGT";
	uint64_t whole, part, scale, unit = 1;
	const char *p = read_decimal(text, &whole, &part, &scale), *u;
	const char *more = "";
	unsigned __int128 value;

	if (!p)
		return kvt_fail(-EINVAL, "\"%s\" is not a size: %s", text, SIZE_FORM);
	if (*p && (u = strchr(units, *p >= 'a' && *p <= 'z' ? *p - 'a' + 'A' : *p))) {
		unit <<= 10 * (u - units + 1);
		p++;
		if (!strcasecmp(p, "iB"))
			p += 2;
		else if (!strcasecmp(p, "B"))
			more = "units are powers of 1024, K or KiB, M or MiB, G or GiB, T or TiB: ";
	}
	value = (unsigned __int128)whole * unit + (unsigned __int128)part * unit / scale;
	if (*p || (unit == 1 && part))
		return kvt_fail(-EINVAL, "\"%s\" is not a size: %s%s", text, more, SIZE_FORM);
	if (value > INT64_MAX)
		return kvt_fail(-EINVAL, "\"%s\" is not a size below 8 EiB: %s", text, SIZE_FORM);
	*bytes = value;
	return 0;
}

int tool_real(const char *option, const char *text, double *value)
{
	const bool banned = !strcmp(text, "-inf");
	char *end;

	/* not what strtod() takes beside numbers: spaces, hexadecimal, words */
	if (!*text || (!banned && text[strspn(text, "0123456789+-.eE")]))
		goto not_a_number;
	errno = 0;
	*value = banned ? -INFINITY : strtod(text, &end);
	if (banned || (!*end && !errno))
		return 0;
not_a_number:
	return kvt_fail(-EINVAL, "%s \"%s\": a number is needed", option, text);
}

int tool_number(const char *option, const char *text, uint64_t min, uint64_t max, uint64_t *value)
{
	uint64_t whole, part, scale;
	const char *p = read_decimal(text, &whole, &part, &scale);

	if (!p || *p || scale != 1 || whole < min || whole > max)
		return kvt_fail(-EINVAL, "%s \"%s\": a whole number from %" PRIu64 " to %" PRIu64 " is needed", option,
				text, min, max);
	*value = whole;
	return 0;
}

const struct tool_word *tool_words;

static bool in_word(char c)
{
	return c == '_' || c == '-' || (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

static const struct tool_word *word_at(const char *text)
{
	for (const struct tool_word *w = tool_words; w && w->library; w++) {
		size_t n = strlen(w->library);

		if (!strncmp(text, w->library, n) && !in_word(text[n]))
			return w;
	}
	return NULL;
}

const char *tool_message(const char *line, char *buf, size_t bytes)
{
	char *to = buf, *end = buf + bytes - 1;
	bool begins = true;

	while (*line && to < end) {
		const struct tool_word *w = begins ? word_at(line) : NULL;

		begins = *line == ' ' || *line == '(';
		if (!w) {
			*to++ = *line++;
			continue;
		}
		to += snprintf(to, (size_t)(end - to) + 1, "%s", w->option);
		to = to > end ? end : to;
		line += strlen(w->library);
	}
	*to = 0;
	return buf;
}

int tool_usage_error(const char *command, const char *fmt, ...)
{
	char line[600], buf[800];
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(line, sizeof(line), fmt, ap);
	va_end(ap);
	fprintf(stderr, "kvtier %s: %s (see: kvtier help %s)\n", command, tool_message(line, buf, sizeof(buf)), command);
	return 2;
}

int tool_option_error(const char *command, int found, char **argv, const struct option *options)
{
	const char letter[] = { '-', (char)optopt, 0 };

	if (found == ':')
		return tool_usage_error(command, "%s needs a value", argv[optind - 1]);
	/* of a word of letters the one that is wrong; a long option is a word, also one with a value that it does not take */
	for (; optopt && options->name; options++)
		if (options->val == optopt)
			break;
	return tool_usage_error(command, "\"%s\" is not an option",
				optopt && !options->name ? letter : argv[optind - 1]);
}

int tool_failed(const char *command)
{
	char buf[800];

	fprintf(stderr, "kvtier %s: %s\n", command, tool_message(kvt_last_error(), buf, sizeof(buf)));
	return 1;
}
