// SPDX-License-Identifier: MIT
/*
 * What the plug-in is told: KVTIER_* variables, and a file of key=value lines
 * with the same names in small letters. The environment has the last word; a
 * name that is not known is an error, in either.
 */
#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "engines/ggml/plugin.h"

enum kind { SIZE, NUMBER, WORD, TEXT, FLAG };

struct key {
	const char *name;
	enum kind kind;
	size_t at;	    /* in struct kg_config */
	uint64_t min, max;  /* NUMBER; TEXT: max is the room; FLAG: max is the bit */
	const char *words;  /* WORD: separated by spaces; the value is the index */
};

#define CACHE(member) offsetof(struct kg_config, cache.member)
#define OWN(member) offsetof(struct kg_config, member)

static const struct key keys[] = {
	{ "gpu_bytes", SIZE, CACHE(gpu_bytes), 0, 0, NULL },
	{ "pinned_bytes", SIZE, CACHE(pinned_bytes), 0, 0, NULL },
	{ "ram_bytes", SIZE, CACHE(ram_bytes), 0, 0, NULL },
	{ "disk_bytes", SIZE, CACHE(disk_bytes), 0, 0, NULL },
	{ "block_bytes", SIZE, CACHE(block_bytes), 0, 0, NULL },
	{ "writeback_bytes_per_s", SIZE, CACHE(writeback_bytes_per_s), 0, 0, NULL },
	{ "disk_dir", TEXT, OWN(disk_dir), 0, sizeof(((struct kg_config *)0)->disk_dir), NULL },
	{ "name", TEXT, OWN(name), 0, sizeof(((struct kg_config *)0)->name), NULL },
	{ "stats", TEXT, OWN(stats), 0, sizeof(((struct kg_config *)0)->stats), NULL },
	{ "threads", NUMBER, CACHE(threads), 1, 1024, NULL },
	{ "max_query_rows", NUMBER, CACHE(max_query_rows), 1, 1 << 20, NULL },
	{ "max_query_heads", NUMBER, CACHE(max_query_heads), 1, 8192, NULL },
	{ "numa_node", NUMBER, CACHE(numa_node), 0, 65535, NULL },
	{ "caches", NUMBER, OWN(caches), 1, 64, NULL },
	{ "host", WORD, CACHE(host), 0, 0, "auto user module" },
	{ "io", WORD, CACHE(io), 0, 0, "auto uring threads" },
	{ "log", WORD, OWN(log), 0, 0, "error warn info debug" },
	{ "device", WORD, OWN(chosen), 0, 0, "chosen always" },
	{ "planes", WORD, OWN(all_planes), 0, 0, "cache all" },
	{ "hugepages", FLAG, CACHE(flags), 0, KVT_CACHE_HUGEPAGES, NULL },
	{ "no_write_verify", FLAG, CACHE(flags), 0, KVT_CACHE_NO_WRITE_VERIFY, NULL },
	{ "numa_strict", FLAG, CACHE(flags), 0, KVT_CACHE_NUMA_STRICT, NULL },
};

static const struct key *find_key(const char *name)
{
	for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++)
		if (!strcmp(keys[i].name, name))
			return &keys[i];
	return NULL;
}

/* Digits and, for sizes, one of K M G T. */
static bool read_number(const char *text, bool units, uint64_t *value)
{
	const char *unit;
	char *end;

	if (!isdigit((unsigned char)*text))
		return false;
	errno = 0;
	*value = strtoull(text, &end, 10);
	if (errno)
		return false;
	if (units && *end && (unit = strchr("KMGT", toupper((unsigned char)*end)))) {
		unsigned int shift = 10 * (unsigned int)(unit - "KMGT" + 1);

		if (*value >> (63 - shift))
			return false;
		*value <<= shift;
		end++;
	}
	return !*end;
}

static int word_index(const char *words, const char *text)
{
	size_t n = strlen(text);

	for (int i = 0; *words; i++) {
		size_t len = strcspn(words, " ");

		if (len == n && !memcmp(words, text, n))
			return i;
		words += len + (words[len] == ' ');
	}
	return -1;
}

/* @where: what to name in a message. */
static int set(struct kg_config *c, const struct key *key, const char *where, const char *text)
{
	uint8_t *at = (uint8_t *)c + key->at;
	uint64_t number;
	uint32_t small;
	int word;

	switch (key->kind) {
	case SIZE:
		if (!read_number(text, true, &number))
			return kvt_fail(-EINVAL, "%s is \"%s\": bytes, with K, M, G or T if you like, expected", where, text);
		memcpy(at, &number, sizeof(number));
		return 0;
	case NUMBER:
		if (!read_number(text, false, &number) || number < key->min || number > key->max)
			return kvt_fail(-EINVAL, "%s is \"%s\": a number from %" PRIu64 " to %" PRIu64 " expected", where,
					text, key->min, key->max);
		small = (uint32_t)number + (key->at == CACHE(numa_node)); /* there 0 is any node */
		memcpy(at, &small, sizeof(small));
		return 0;
	case WORD:
		word = word_index(key->words, text);
		if (word < 0)
			return kvt_fail(-EINVAL, "%s is \"%s\": one of %s expected", where, text, key->words);
		if (key->at == OWN(chosen) || key->at == OWN(all_planes))
			*(bool *)at = word;
		else
			memcpy(at, &word, sizeof(word));
		return 0;
	case FLAG:
		if (strcmp(text, "0") && strcmp(text, "1"))
			return kvt_fail(-EINVAL, "%s is \"%s\": 0 or 1 expected", where, text);
		memcpy(&small, at, sizeof(small));
		small = *text == '1' ? small | (uint32_t)key->max : small & ~(uint32_t)key->max;
		memcpy(at, &small, sizeof(small));
		return 0;
	case TEXT:
		if (strlen(text) >= key->max)
			return kvt_fail(-EINVAL, "%s is %zu bytes long: at most %" PRIu64 " expected", where, strlen(text),
					key->max - 1);
		strcpy((char *)at, text);
		return 0;
	}
	return 0;
}

static char *trim(char *s)
{
	size_t n;

	while (isspace((unsigned char)*s))
		s++;
	for (n = strlen(s); n && isspace((unsigned char)s[n - 1]); n--)
		s[n - 1] = '\0';
	return s;
}

static int read_file(struct kg_config *c, const char *path)
{
	char line[1024], where[1200];
	FILE *f = fopen(path, "re");
	int ret = 0, number = 0;

	if (!f)
		return kvt_fail(-errno, "KVTIER_CONFIG is \"%s\": %s", path, strerror(errno));
	while (!ret && fgets(line, sizeof(line), f)) {
		char *name = line, *value = strchr(line, '=');
		const struct key *key;

		number++;
		if (!strchr(line, '\n') && !feof(f)) {
			ret = kvt_fail(-EINVAL, "%s:%d: the line is longer than %zu bytes", path, number, sizeof(line) - 2);
			break;
		}
		name = trim(name);
		if (!*name || *name == '#')
			continue;
		if (!value) {
			ret = kvt_fail(-EINVAL, "%s:%d: \"%s\" is not key=value", path, number, name);
			break;
		}
		*value++ = '\0';
		name = trim(name);
		key = find_key(name);
		snprintf(where, sizeof(where), "%s:%d: %s", path, number, name);
		ret = key ? set(c, key, where, trim(value)) :
			    kvt_fail(-EINVAL, "%s is not known: see kvtier-llama(7)", where);
	}
	if (!ret && ferror(f))
		ret = kvt_fail(-EIO, "KVTIER_CONFIG is \"%s\": it cannot be read", path);
	fclose(f);
	return ret;
}

static int read_variable(struct kg_config *c, const char *text)
{
	char where[64] = "KVTIER_", name[64];
	const char *value = strchr(text, '=');
	size_t n = value ? (size_t)(value - text) : 0;
	const struct key *key;

	if (!value || n >= sizeof(name) - 8)
		return kvt_fail(-EINVAL, "KVTIER_%.40s is not known: see kvtier-llama(7)", text);
	for (size_t i = 0; i < n; i++) {
		where[7 + i] = text[i];
		name[i] = (char)tolower((unsigned char)text[i]);
	}
	where[7 + n] = name[n] = '\0';
	key = find_key(name);
	if (!key)
		return kvt_fail(-EINVAL, "%s is not known: see kvtier-llama(7)", where);
	return set(c, key, where, value + 1);
}

int kg_config_read(struct kg_config *c, char *const *env)
{
	const char *file = NULL;
	bool any = false;
	int ret = 0;

	memset(c, 0, sizeof(*c));
	c->cache.size = sizeof(c->cache);
	c->caches = 1;
	c->log = KVT_LOG_WARN;
	for (size_t i = 0; env[i]; i++)
		if (!strncmp(env[i], "KVTIER_CONFIG=", 14))
			file = env[i] + 14;
	if (file) {
		any = true;
		ret = read_file(c, file);
	}
	for (size_t i = 0; env[i] && !ret; i++) {
		if (strncmp(env[i], "KVTIER_", 7) || !strncmp(env[i], "KVTIER_CONFIG=", 14))
			continue;
		any = true;
		ret = read_variable(c, env[i] + 7);
	}
	if (ret)
		return ret;
	if (any && !c->cache.ram_bytes)
		return kvt_fail(-EINVAL, "KVTIER_RAM_BYTES is not set: it is the memory that the KV cache, its bookkeeping and buffers may take");
	if (c->cache.gpu_bytes)
		return kvt_fail(-EINVAL, "KVTIER_GPU_BYTES: this plug-in has no gpu tier: leave it out");
	return any;
}
