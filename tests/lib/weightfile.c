// SPDX-License-Identifier: MIT
/* See weightfile.h. */
#include "lib/weightfile.h"

#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "lib/scratch.h"

void put(struct bytes *b, const void *data, size_t n)
{
	if (b->n + n > b->room) {
		b->room = (b->n + n) * 2;
		b->p = realloc(b->p, b->room);
		if (!b->p)
			abort();
	}
	if (n)
		memcpy(b->p + b->n, data, n);
	b->n += n;
}

void put_text(struct bytes *b, const char *s)
{
	put(b, s, strlen(s));
}

void put_u32(struct bytes *b, uint32_t v)
{
	put(b, &v, 4);
}

void put_u64(struct bytes *b, uint64_t v)
{
	put(b, &v, 8);
}

void put_gguf_text(struct bytes *b, const char *s)
{
	put_u64(b, strlen(s));
	put_text(b, s);
}

void put_pattern(struct bytes *b, size_t n, uint32_t seed)
{
	uint64_t x = seed * 0x9e3779b97f4a7c15u + 1;

	for (size_t i = 0; i < n; i += 8) {
		x ^= x << 13;
		x ^= x >> 7;
		x ^= x << 17;
		put(b, &x, n - i < 8 ? n - i : 8);
	}
}

void put_safetensors(struct bytes *b, const char *header, const void *data, size_t n)
{
	put_u64(b, strlen(header));
	put_text(b, header);
	put(b, data, n);
}

static char dir[256];
static pid_t owner;

static int remove_entry(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
	(void)st;
	(void)type;
	(void)ftw;
	return remove(path);
}

static void remove_dir(void)
{
	if (getpid() == owner) /* tests run in children */
		nftw(dir, remove_entry, 8, FTW_DEPTH | FTW_PHYS);
}

const char *scratch_dir(void)
{
	if (dir[0])
		return dir;
	snprintf(dir, sizeof(dir), "%s/kvtier-weights-XXXXXX", test_scratch());
	if (!mkdtemp(dir)) {
		perror(dir);
		exit(1);
	}
	owner = getpid();
	atexit(remove_dir);
	return dir;
}

const char *scratch(const char *name)
{
	static char paths[8][512];
	static unsigned int turn;
	char *path = paths[turn++ % 8];

	snprintf(path, sizeof(paths[0]), "%s/%s", scratch_dir(), name);
	return path;
}

const char *write_file(const char *name, const void *data, size_t n)
{
	const char *path = scratch(name);
	FILE *f = fopen(path, "w");

	if (!f || fwrite(data, 1, n, f) != n || fclose(f)) {
		perror(path);
		exit(1);
	}
	return path;
}

const char *write_bytes(const char *name, struct bytes *b)
{
	const char *path = write_file(name, b->p ? b->p : (const uint8_t *)"", b->n);

	free(b->p);
	*b = (struct bytes){ 0 };
	return path;
}

const char *input(const char *test, const char *name)
{
	static char path[512];
	const char *root = getenv("KVT_INPUTS");

	snprintf(path, sizeof(path), "%s/%s", root ? root : "../shared/inputs", name);
	if (!access(path, R_OK))
		return path;
	printf("SKIP: %s: no %s (KVT_INPUTS says where the optional inputs are)\n", test, path);
	return NULL;
}
