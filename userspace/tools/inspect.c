// SPDX-License-Identifier: MIT
/*
 * kvtier inspect: what a weight file or model directory holds. What a file says
 * is shown as text, never sent to the terminal raw; as JSON it is written as it
 * is read, without a tree, since a header may have 100 MB.
 */
#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvtier.h"
#include "runtime/json.h"
#include "runtime/weights.h"
#include "tools/tools.h"

#define TEXT_SHOWN  60 /* bytes of a text value */
#define ITEMS_SHOWN 4  /* of an array */

/* Length of the character at @s, or 0 where it is not one. */
static size_t character(const char *s, size_t left)
{
	unsigned char c = *s;
	size_t n = c < 0x80 ? 1 : c < 0xe0 ? 2 : c < 0xf0 ? 3 : 4;

	return n <= left && kvt_utf8_valid(s, n) ? n : 0;
}

/* Quoted, by JSON's rules; bytes that are not UTF-8 become U+FFFD. */
static void json_text(const char *s, size_t len)
{
	putchar('"');
	while (len) {
		size_t n = character(s, len);

		if (!n)
			fputs("\\ufffd", stdout);
		else if (n == 1 && (*s == '"' || *s == '\\'))
			printf("\\%c", *s);
		else if (n == 1 && ((unsigned char)*s < 0x20 || *s == 0x7f))
			printf("\\u%04x", *s);
		else
			fwrite(s, 1, n, stdout);
		s += n ? n : 1;
		len -= n ? n : 1;
	}
	putchar('"');
}

/* The fewest digits that read back as @v; as a float if it is one (1e-05, not 9.99999975e-06). */
static const char *number(double v, char text[32])
{
	for (int digits = 6; digits <= 17; digits++) {
		snprintf(text, 32, "%.*g", digits, v);
		if ((double)(float)v == v ? strtof(text, NULL) == (float)v : strtod(text, NULL) == v)
			break;
	}
	return text;
}

/* Item @i of @m (0 of a single value). */
static void json_item(const struct kvt_meta *m, uint64_t i)
{
	struct kvt_meta one = kvt_meta_item(m, i);
	char text[32];

	switch (one.type) {
	case KVT_META_UINT:
		printf("%" PRIu64, one.u);
		break;
	case KVT_META_INT:
		printf("%" PRId64, one.i);
		break;
	case KVT_META_BOOL:
		fputs(one.u ? "true" : "false", stdout);
		break;
	case KVT_META_FLOAT:
		if (isfinite(one.f))
			fputs(number(one.f, text), stdout);
		else
			fputs("null", stdout); /* JSON has no such number */
		break;
	case KVT_META_STRING:
		json_text(one.text.s, one.text.len);
		break;
	}
}

static void json_value(const struct kvt_meta *m)
{
	if (m->type != KVT_META_ARRAY) {
		json_item(m, 0);
		return;
	}
	if (m->item_type == KVT_META_ARRAY) {
		fputs("null", stdout); /* arrays of arrays are not kept */
		return;
	}
	putchar('[');
	for (uint64_t i = 0; i < m->count; i++) {
		if (i)
			putchar(',');
		json_item(m, i);
	}
	putchar(']');
}

static void json_metadata(const struct kvt_weights *w, uint32_t shard)
{
	bool first = true;

	fputs("\"metadata\":{", stdout);
	for (uint32_t i = 0; i < w->n_meta; i++) {
		const struct kvt_meta *m = &w->meta[i];

		if (m->shard != shard)
			continue;
		fputs(first ? "\n  " : ",\n  ", stdout);
		first = false;
		json_text(m->key.s, m->key.len);
		putchar(':');
		json_value(m);
	}
	putchar('}');
}

static void print_json(const struct kvt_weights *w)
{
	char type[24];

	fputs("{\"path\":", stdout);
	json_text(w->path, strlen(w->path));
	printf(",\n\"format\":\"%s\",", w->format == KVT_GGUF ? "gguf" : "safetensors");
	if (w->format == KVT_GGUF)
		printf("\"version\":%" PRIu32 ",", w->version);
	printf("\"bytes\":%" PRIu64 ",\n\"files\":[", w->bytes);
	for (uint32_t i = 0; i < w->n_shards; i++) {
		fputs(i ? ",\n {\"path\":" : "\n {\"path\":", stdout);
		json_text(w->shards[i].path, strlen(w->shards[i].path));
		printf(",\"bytes\":%" PRIu64 ",\"data_offset\":%" PRIu64 ",\n ", w->shards[i].bytes, w->shards[i].data);
		json_metadata(w, i);
		putchar('}');
	}
	fputs("],\n", stdout);
	json_metadata(w, 0);
	fputs(",\n\"tensors\":[", stdout);
	for (uint32_t i = 0; i < w->n_tensors; i++) {
		const struct kvt_tensor *t = &w->tensors[i];

		fputs(i ? ",\n {\"name\":" : "\n {\"name\":", stdout);
		json_text(t->name, t->name_len);
		printf(",\"dtype\":\"%s\",\"shape\":[", kvt_tensor_type(t, type));
		for (uint64_t d = 0; d < t->rank; d++)
			printf("%s%" PRIu64, d ? "," : "", t->shape[d]);
		printf("],\"file\":%" PRIu32 ",\"offset\":%" PRIu64 ",\"bytes\":", t->shard, t->offset);
		if (t->dtype == KVT_DT_UNKNOWN)
			fputs("null}", stdout);
		else
			printf("%" PRIu64 "}", t->bytes);
	}
	fputs("]}\n", stdout);
}

/* At most @most bytes, control bytes and what is not UTF-8 as \xNN. Returns columns, roughly. */
static int show(const char *s, size_t len, size_t most)
{
	size_t end = len < most ? len : most, i = 0;
	int columns = 0;

	while (i < end) {
		size_t n = character(s + i, len - i);

		if (n && (unsigned char)s[i] >= 0x20 && s[i] != 0x7f) {
			fwrite(s + i, 1, n, stdout);
			columns++;
			i += n;
		} else {
			columns += printf("\\x%02x", (unsigned char)s[i]);
			i++;
		}
	}
	if (i < len)
		columns += printf("... (%zu bytes)", len);
	return columns;
}

static void show_value(const struct kvt_meta *m)
{
	bool array = m->type == KVT_META_ARRAY;

	if (array && m->item_type == KVT_META_ARRAY) {
		fputs("(arrays)", stdout);
		return;
	}
	if (array)
		putchar('[');
	for (uint64_t i = 0; i < m->count; i++) {
		struct kvt_meta one = kvt_meta_item(m, i);

		if (i)
			fputs(", ", stdout);
		if (i == ITEMS_SHOWN) {
			printf("... (%" PRIu64 " items)", m->count);
			break;
		}
		if (one.type == KVT_META_STRING) {
			putchar('"');
			show(one.text.s, one.text.len, TEXT_SHOWN);
			putchar('"');
		} else if (one.type == KVT_META_FLOAT && !isfinite(one.f)) {
			printf("%g", one.f);
		} else {
			json_item(&one, 0);
		}
	}
	if (array)
		putchar(']');
}

static void print_text(const struct kvt_weights *w)
{
	char type[24], shape[128];
	int widest = 4;

	show(w->path, strlen(w->path), SIZE_MAX);
	fputs(": ", stdout);
	if (w->format == KVT_GGUF)
		printf("GGUF version %" PRIu32, w->version);
	else
		fputs("safetensors", stdout);
	printf(", %" PRIu32 " tensors, %" PRIu64 " bytes in %" PRIu32 " file%s\n", w->n_tensors, w->bytes, w->n_shards,
	       w->n_shards == 1 ? "" : "s");
	for (uint32_t i = 0; i < w->n_shards && w->n_shards > 1; i++) {
		printf("file %" PRIu32 ": ", i);
		show(w->shards[i].path, strlen(w->shards[i].path), SIZE_MAX);
		printf(", %" PRIu64 " bytes\n", w->shards[i].bytes);
	}
	for (uint32_t i = 0; i < w->n_meta; i++) {
		if (w->n_shards > 1)
			printf("file %" PRIu32 ": ", w->meta[i].shard);
		show(w->meta[i].key.s, w->meta[i].key.len, 200);
		fputs(" = ", stdout);
		show_value(&w->meta[i]);
		putchar('\n');
	}
	for (uint32_t i = 0; i < w->n_tensors; i++)
		if (w->tensors[i].name_len > (uint32_t)widest)
			widest = w->tensors[i].name_len < 60 ? (int)w->tensors[i].name_len : 60;
	if (w->n_tensors)
		printf("%-*s  %-10s  %-18s  %14s  %14s%s\n", widest, "name", "dtype", "shape", "offset", "bytes",
		       w->n_shards > 1 ? "  file" : "");
	for (uint32_t i = 0; i < w->n_tensors; i++) {
		const struct kvt_tensor *t = &w->tensors[i];
		size_t n = 0;
		int columns;

		for (uint64_t d = 0; d < t->rank && n < sizeof(shape) - 30; d++)
			n += sprintf(shape + n, "%s%" PRIu64, d ? ", " : "", t->shape[d]);
		if (n >= sizeof(shape) - 30)
			n += sprintf(shape + n, ", ...");
		shape[n] = 0;
		columns = show(t->name, t->name_len, 200);
		printf("%*s  %-10s  [%s]%*s  %14" PRIu64 "  %14" PRIu64, widest > columns ? widest - columns : 0, "",
		       kvt_tensor_type(t, type), shape, n < 16 ? (int)(16 - n) : 0, "", t->offset, t->bytes);
		if (w->n_shards > 1)
			printf("  %" PRIu32, t->shard);
		putchar('\n');
	}
}

int cmd_inspect(int argc, char **argv)
{
	struct kvt_weights *w;
	const char *path = NULL;
	bool json = false;

	for (int i = 1; i < argc; i++) {
		if (!strcmp(argv[i], "--json"))
			json = true;
		else if (argv[i][0] == '-' && argv[i][1])
			return tool_usage_error("inspect", "\"%s\" is not an option", argv[i]);
		else if (path)
			return tool_usage_error("inspect", "one FILE or DIR, not \"%s\" too", argv[i]);
		else
			path = argv[i];
	}
	if (!path || !*path)
		return tool_usage_error("inspect", "a FILE or DIR is needed");
	if (kvt_weights_open(path, &w))
		return tool_failed("inspect");
	if (json)
		print_json(w);
	else
		print_text(w);
	kvt_weights_close(w);
	return 0;
}
