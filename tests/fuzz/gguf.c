// SPDX-License-Identifier: MIT
/*
 * Any bytes as a GGUF file: refused with one line, or metadata and tensors that
 * lie within the file. What is accepted is also read, and tried as a model.
 */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "engines/ref/engine.h"
#include "kvtier.h"
#include "runtime/loader.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

static void must(int holds)
{
	if (!holds)
		abort();
}

static void read_metadata(const struct kvt_weights *w)
{
	for (uint32_t i = 0; i < w->n_meta; i++) {
		const struct kvt_meta *m = &w->meta[i];

		must(m->key.s[m->key.len] == 0);
		for (uint64_t k = 0; k < m->count; k++) {
			struct kvt_meta one = kvt_meta_item(m, k);

			must(one.type != KVT_META_ARRAY);
			if (one.type == KVT_META_STRING)
				must(one.text.s[one.text.len] == 0 && strlen(one.text.s) <= one.text.len);
		}
	}
}

static void read_tensors(const struct kvt_weights *w, uint64_t bytes)
{
	uint64_t end = w->shards[0].data;
	float f[256];

	for (uint32_t i = 0; i < w->n_tensors; i++) {
		const struct kvt_tensor *t = &w->tensors[i];
		uint64_t n = t->elements < 256 ? t->elements : 256;
		uint32_t block, size;

		kvt_dtype_block(t->dtype, &block, &size);
		must(t->offset >= end && t->offset + t->bytes <= (bytes > end ? bytes : end) && t->rank <= 4);
		end = t->offset + t->bytes;
		if (!kvt_tensor_decodes(w, t))
			must(!kvt_tensor_read_f32(w, t, 0, n / block * block, f));
	}
}

static void load_model(const char *path)
{
	const struct kvt_load_params how = { .size = sizeof(how), .mode = KVT_LOAD_MMAP };
	struct ref_model *m;

	if (ref_model_load(path, NULL, &how, &m))
		must(kvt_last_error()[0] && !strchr(kvt_last_error(), '\n'));
	else
		ref_model_free(m);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	static int fd = -1;
	struct kvt_weights *w;
	char path[64];
	int err;

	if (fd < 0)
		fd = memfd_create("gguf", 0);
	must(!ftruncate(fd, 0) && pwrite(fd, data, bytes, 0) == (ssize_t)bytes);
	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	err = kvt_weights_open(path, &w);
	if (err) {
		must(err == -22 && kvt_last_error()[0] && !strchr(kvt_last_error(), '\n'));
		return 0;
	}
	if (w->format == KVT_GGUF) {
		read_metadata(w);
		read_tensors(w, bytes);
		load_model(path);
	}
	kvt_weights_close(w);
	return 0;
}
