// SPDX-License-Identifier: MIT
/*
 * What an engine's author writes: public headers and the shared library alone.
 * Weights from a file into memory and into an arena, and a token from them.
 * C and C++. usage: parts FILE (which it writes)
 */
#include <kvtier-arena.h>
#include <kvtier-sampler.h>
#include <kvtier-weights.h>
#include <kvtier.h>

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MUST(holds)                                                                                      \
	do {                                                                                             \
		if (!(holds)) {                                                                          \
			fprintf(stderr, "line %d: %s is not so; %s\n", __LINE__, #holds, kvt_last_error()); \
			exit(1);                                                                         \
		}                                                                                        \
	} while (0)

enum { LOAD, RUN, STEPS };

#define BUFFERS_OF(X)              \
	X(logits, 20, LOAD, RUN)   \
	X(staging, 5000, LOAD, LOAD) \
	X(work, 4000, RUN, RUN)
#define INDEX(name, bytes, first, last) KVT_ARENA_ENUM(BUF_, name),
#define ENTRY(name, bytes, first, last) KVT_ARENA_BUFFER(name, bytes, first, last),
#define CHECK(name, bytes, first, last) KVT_ARENA_CHECK(name, first, last);
enum { BUFFERS_OF(INDEX) BUFFERS };
BUFFERS_OF(CHECK)
static const struct kvt_arena_buffer buffers[BUFFERS] = { BUFFERS_OF(ENTRY) };

static const float logits[5] = { 1, -2, 3.5f, 0, 3 };

/* One tensor of bytes, then one of floats. */
static void write_file(const char *path)
{
	static const char header[] = "{\"__metadata__\":{\"made_by\":\"a test\",\"layers\":\"7\"},"
				     "\"bias\":{\"dtype\":\"I8\",\"shape\":[4],\"data_offsets\":[0,4]},"
				     "\"head\":{\"dtype\":\"F32\",\"shape\":[1,5],\"data_offsets\":[4,24]}}";
	const uint64_t bytes = sizeof(header) - 1;
	FILE *f = fopen(path, "wb");

	MUST(f && fwrite(&bytes, 8, 1, f) == 1 && fwrite(header, bytes, 1, f) == 1 && fwrite("abcd", 4, 1, f) == 1 &&
	     fwrite(logits, sizeof(logits), 1, f) == 1 && !fclose(f));
}

static void what_it_holds(const struct kvt_weights *w)
{
	struct kvt_weights_info info = KVT_INIT(info);
	const struct kvt_tensor *head = kvt_weights_find(w, "head");
	uint32_t block, bytes;
	struct kvt_text text;
	uint64_t layers;
	float f[5];

	MUST(!kvt_weights_info(w, &info));
	MUST(info.size == sizeof(info) && info.format == KVT_SAFETENSORS && info.n_shards == 1 && info.n_tensors == 2 &&
	     info.bytes == 24);
	info.size = 0;
	MUST(kvt_weights_info(w, &info) == -EINVAL);
	MUST(head && head == kvt_weights_tensor(w, 1) && !kvt_weights_tensor(w, 2) && !kvt_weights_find(w, "tail"));
	MUST(head->rank == 2 && head->shape[1] == 5 && head->bytes == 20 && !strcmp(kvt_dtype_name(KVT_DT_F32), "F32"));
	for (int other = KVT_DTYPES; other < 5000; other++)
		MUST(!kvt_dtype_name((enum kvt_dtype)other));
	kvt_dtype_block(KVT_DT_Q8_0, &block, &bytes);
	MUST(block == 32 && bytes == 34);
	kvt_dtype_block(KVT_DTYPES, &block, &bytes);
	MUST(!block && !bytes);
	MUST(!kvt_weights_text(w, "made_by", 0, &text) && text.len == 6 && !memcmp(text.s, "a test", 6));
	MUST(!kvt_weights_uint(w, "layers", 0, &layers) && layers == 7);
	MUST(kvt_weights_count(w, "heads") == -ENOENT);
	MUST(!kvt_tensor_decodes(w, head) && kvt_tensor_decodes(w, kvt_weights_tensor(w, 0)) == -ENOTSUP);
	MUST(!kvt_tensor_read_f32(w, head, 1, 4, f) && !memcmp(f, logits + 1, 16));
	MUST(!kvt_tensor_decode(KVT_DT_F32, logits, 5, f) && !memcmp(f, logits, 20));
	MUST(kvt_tensor_decode(KVT_DT_I8, "abcd", 4, f) == -ENOTSUP && kvt_tensor_decode(KVT_DTYPES, "", 0, f) == -ENOTSUP);
	MUST(kvt_tensor_decode(KVT_DT_Q8_0, "", 31, f) == -EINVAL);
}

static void into_memory(const struct kvt_weights *w)
{
	struct kvt_load_report report = KVT_INIT(report);
	struct kvt_load_item items[2];
	uint64_t bytes = kvt_load_layout(w, NULL, NULL);
	void *base = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);

	MUST(base && !kvt_load_fits(bytes, NULL));
	MUST(kvt_load_layout(w, base, items) == bytes);
	MUST(!kvt_load(w, items, 2, NULL, &report));
	MUST(report.bytes == 24 && !memcmp(items[0].host, "abcd", 4) && !memcmp(items[1].host, logits, 20));
	free(base);
}

/* On the cpu backend, where a device address is a pointer. */
static void into_an_arena(const struct kvt_weights *w)
{
	struct kvt_arena_plan plan = KVT_INIT(plan);
	struct kvt_load_params params = KVT_INIT(params);
	struct kvt_load_item item = { kvt_weights_find(w, "head"), NULL, 0 };
	struct kvt_sampler_params greedy = KVT_SAMPLER_PARAMS_INIT;
	struct kvt_sampler *sampler;
	struct kvt_sample row;
	struct kvt_arena_size size;
	struct kvt_arena *arena;
	struct kvt_gpu *gpu;
	uint64_t work, again, offsets[BUFFERS];

	MUST(kvt_gpu_open(99, 0, &gpu) == -EINVAL && !gpu);
	MUST(kvt_gpu_open(KVT_BACKEND_CPU, 1, &gpu) == -ENODEV && !gpu);
	MUST(!kvt_gpu_open(KVT_BACKEND_CPU, 0, &gpu));
	plan.buffers = buffers;
	plan.n = BUFFERS;
	MUST(!kvt_arena_layout(&plan, offsets, &size));
	MUST(size.unshared == 256 + 5120 + 4096 && size.bytes == 256 + 5120 && offsets[BUF_work] == offsets[BUF_staging]);
	MUST(!kvt_arena_create(gpu, &plan, &arena));
	MUST(kvt_arena_size(arena).bytes == size.bytes);
	MUST(!kvt_arena_get(arena, BUF_logits, 20, LOAD, &item.device));
	params.gpu = gpu;
	MUST(!kvt_load_fits(20, gpu));
	MUST(!kvt_load(w, &item, 1, &params, NULL));
	MUST(!kvt_arena_get(arena, BUF_logits, 20, RUN, &again) && again == item.device);
	MUST(!kvt_arena_get(arena, BUF_work, 4000, RUN, &work) && work % KVT_ARENA_ALIGN == 0);
	memset((void *)(uintptr_t)work, 0, 4000);
	MUST(kvt_arena_get(arena, BUF_work, 4001, RUN, &work) == -ENOSPC && strstr(kvt_last_error(), "work"));

	greedy.temperature = 0;
	memset(&row, 0, sizeof(row));
	row.params = &greedy;
	row.logits = (const float *)(uintptr_t)again;
	MUST(!kvt_sampler_create(5, &sampler) && !kvt_sampler_sample(sampler, &row, 1));
	MUST(row.token == 2);
	kvt_sampler_destroy(sampler);
	kvt_arena_destroy(arena);
	kvt_gpu_close(gpu);
	kvt_gpu_close(NULL);
}

int main(int argc, char **argv)
{
	struct kvt_weights *w;

	if (argc != 2)
		return 2;
	write_file(argv[1]);
	MUST(!kvt_weights_open(argv[1], &w));
	what_it_holds(w);
	into_memory(w);
	into_an_arena(w);
	kvt_weights_close(w);
	return 0;
}
