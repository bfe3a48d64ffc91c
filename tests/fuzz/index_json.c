// SPDX-License-Identifier: MIT
/* Any bytes as model.safetensors.index.json: refused with one line, or sorted names and files that are no paths. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "kvtier.h"
#include "runtime/safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

static void must(int holds)
{
	if (!holds)
		abort();
}

static int by_file(const void *a, const void *b)
{
	return strcmp(*(const char *const *)a, *(const char *const *)b);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	struct kvt_shard_index x;
	char *text = malloc(bytes); /* exactly: a byte beyond is an error */
	int err;

	if (bytes)
		memcpy(text, data, bytes);
	err = kvt_shard_index_parse("index", text, bytes, &x);
	if (err) {
		must(err == -22 && kvt_last_error()[0] && !strchr(kvt_last_error(), '\n'));
	} else {
		for (size_t i = 0; i < x.n_entries; i++) {
			const struct kvt_shard_entry *e = &x.entries[i];

			must(e->file.len && !strchr(e->file.s, '/') && strcmp(e->file.s, "..") && strlen(e->file.s) == e->file.len);
			must(!i || kvt_name_compare(e[-1].name.s, e[-1].name.len, e->name.s, e->name.len) < 0);
			must(bsearch(&e->file.s, x.files, x.n_files, sizeof(*x.files), by_file) != NULL);
		}
		for (uint32_t i = 1; i < x.n_files; i++)
			must(strcmp(x.files[i - 1], x.files[i]) < 0);
	}
	kvt_shard_index_free(&x);
	free(text);
	return 0;
}
