// SPDX-License-Identifier: MIT
/*
 * Any bytes as a safetensors header: refused with one line, or tensors that
 * cover the data exactly, each once, by names that differ. The first two bytes
 * are the length of the data that the header describes.
 */
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

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	struct kvt_weights *w;
	struct kvt_build b;
	uint64_t at, data_bytes;
	char *text;
	int err;

	if (bytes < 2)
		return 0;
	data_bytes = data[0] | data[1] << 8;
	bytes -= 2;
	text = malloc(bytes); /* exactly: a byte beyond is an error */
	memcpy(text, data + 2, bytes);
	w = calloc(1, sizeof(*w));
	w->path = strdup("file");
	w->shards = calloc(1, sizeof(*w->shards));
	w->n_shards = 1;
	w->shards[0] = (struct kvt_shard){ .path = strdup("file"), .fd = -1, .data = 8 + bytes,
					   .bytes = 8 + bytes + data_bytes };
	b = (struct kvt_build){ .w = w };
	err = kvt_safetensors_parse(&b, 0, text, bytes);
	if (!err)
		err = kvt_build_finish(w);
	if (err) {
		must(err == -22 && kvt_last_error()[0] && !strchr(kvt_last_error(), '\n'));
		goto close;
	}
	at = w->shards[0].data;
	for (uint32_t i = 0; i < w->n_tensors; i++) {
		const struct kvt_tensor *t = &w->tensors[i];
		uint64_t elements = 1;
		uint32_t block, size;

		must(t->offset == at && strlen(t->name) <= t->name_len && t->dtype < KVT_DT_SAFETENSORS);
		for (uint64_t d = 0; d < t->rank; d++)
			elements *= t->shape[d];
		kvt_dtype_block(t->dtype, &block, &size);
		must(elements == t->elements && elements % block == 0 && elements / block * size == t->bytes);
		if (strlen(t->name) == t->name_len)
			must(kvt_weights_find(w, t->name) == t);
		at += t->bytes;
	}
	must(at == w->shards[0].bytes && w->bytes == data_bytes);
	for (uint32_t i = 0; i < w->n_meta; i++) {
		struct kvt_text value;

		must(w->meta[i].key.s[w->meta[i].key.len] == 0 && w->meta[i].text.s[w->meta[i].text.len] == 0);
		if (strlen(w->meta[i].key.s) == w->meta[i].key.len)
			must(!kvt_weights_text(w, w->meta[i].key.s, 0, &value) && value.s == w->meta[i].text.s);
	}
close:
	kvt_weights_close(w);
	free(text);
	return 0;
}
