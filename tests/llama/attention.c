// SPDX-License-Identifier: MIT
/*
 * attention ROWS QUERIES HEADS KV_HEADS DIM THREADS ROUNDS TYPE...: one FLASH_ATTN_EXT by llama.cpp's CPU backend and by the
 * plug-in's device, which must be there, in turns; medians of both in milliseconds, and how many times faster the second is.
 */
#include <ggml-alloc.h>
#include <ggml-backend.h>
#include <ggml-cpu.h>
#include <ggml.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct side {
	ggml_backend_t backend;
	struct ggml_context *ctx, *kv_ctx;
	struct ggml_tensor *q, *k, *v, *mask, *out;
	struct ggml_cgraph *graph;
	float *result;
	double ms[101];
};

static int rows, queries, heads, kv_heads, dim, rounds;

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

static void make(struct side *s, ggml_backend_dev_t dev, enum ggml_type type)
{
	struct ggml_init_params p = { .mem_size = 1 << 20, .no_alloc = true };
	ggml_backend_buffer_t buffer;

	s->backend = ggml_backend_dev_init(dev, NULL);
	s->kv_ctx = ggml_init(p);
	s->ctx = ggml_init(p);
	s->k = ggml_new_tensor_3d(s->kv_ctx, type, dim * kv_heads, rows, 1);
	s->v = ggml_new_tensor_3d(s->kv_ctx, type, dim * kv_heads, rows, 1);
	ggml_set_name(s->k, "cache_k_l0");
	ggml_set_name(s->v, "cache_v_l0");
	buffer = ggml_backend_alloc_ctx_tensors_from_buft(s->kv_ctx, ggml_backend_dev_buffer_type(dev));
	if (!buffer)
		exit(1);
	ggml_backend_buffer_clear(buffer, 0);
	s->q = ggml_new_tensor_4d(s->ctx, GGML_TYPE_F32, dim, heads, queries, 1);
	s->mask = ggml_new_tensor_4d(s->ctx, GGML_TYPE_F16, rows, queries, 1, 1);
	s->out = ggml_flash_attn_ext(s->ctx, ggml_permute(s->ctx, s->q, 0, 2, 1, 3),
				     ggml_view_4d(s->ctx, s->k, dim, rows, kv_heads, 1, s->k->nb[1],
						  ggml_row_size(type, dim), s->k->nb[2], 0),
				     ggml_view_4d(s->ctx, s->v, dim, rows, kv_heads, 1, s->v->nb[1],
						  ggml_row_size(type, dim), s->v->nb[2], 0),
				     s->mask, 1.0f / sqrtf((float)dim), 0, 0);
	s->graph = ggml_new_graph(s->ctx);
	ggml_build_forward_expand(s->graph, s->out);
	if (!ggml_backend_alloc_ctx_tensors_from_buft(s->ctx, ggml_backend_dev_buffer_type(dev)))
		exit(1);
	ggml_backend_supports_op(s->backend, s->out); /* as the scheduler does: heads are known from here on */
	s->result = malloc(ggml_nbytes(s->out));
}

static float noise(unsigned *seed)
{
	*seed = *seed * 1664525 + 1013904223;
	return (float)(int)*seed / 2147483648.0f;
}

static void fill(struct side *s, enum ggml_type type)
{
	size_t n = (size_t)dim * kv_heads * rows;
	float *f = malloc(n * sizeof(*f));
	void *encoded = malloc(ggml_nbytes(s->k));
	ggml_fp16_t *mask = calloc((size_t)rows * queries, sizeof(*mask));
	unsigned seed = 1;

	for (int t = 0; t < 2; t++) {
		for (size_t i = 0; i < n; i++)
			f[i] = noise(&seed);
		ggml_quantize_chunk(type, f, encoded, 0, rows, dim * kv_heads, NULL);
		ggml_backend_tensor_set(t ? s->v : s->k, encoded, 0, ggml_nbytes(s->k));
	}
	for (int i = 0; i < queries; i++)
		for (int j = rows - queries + i + 1; j < rows; j++)
			mask[(size_t)i * rows + j] = ggml_fp32_to_fp16(-INFINITY);
	ggml_backend_tensor_set(s->mask, mask, 0, ggml_nbytes(s->mask));
	f = realloc(f, ggml_nbytes(s->q));
	for (size_t i = 0; i < ggml_nbytes(s->q) / 4; i++)
		f[i] = noise(&seed) * 4;
	ggml_backend_tensor_set(s->q, f, 0, ggml_nbytes(s->q));
	free(f);
	free(encoded);
	free(mask);
}

static int by_size(const void *a, const void *b)
{
	return *(const double *)a < *(const double *)b ? -1 : 1;
}

int main(int argc, char **argv)
{
	static struct side side[2];
	ggml_backend_dev_t device;

	if (argc < 9)
		return fprintf(stderr, "usage: attention ROWS QUERIES HEADS KV_HEADS DIM THREADS ROUNDS TYPE...\n"), 2;
	rows = atoi(argv[1]);
	queries = atoi(argv[2]);
	heads = atoi(argv[3]);
	kv_heads = atoi(argv[4]);
	dim = atoi(argv[5]);
	rounds = atoi(argv[7]) < 101 ? atoi(argv[7]) : 101;
	ggml_backend_load_all();
	device = ggml_backend_dev_by_name("KVTIER0");
	if (!device)
		return fprintf(stderr, "no device KVTIER0\n"), 1;
	for (int t = 8; t < argc; t++) {
		enum ggml_type type = GGML_TYPE_COUNT;
		double difference = 0, most = 0;

		for (int i = 0; i < GGML_TYPE_COUNT; i++)
			if (ggml_type_name((enum ggml_type)i) && !strcmp(ggml_type_name((enum ggml_type)i), argv[t]))
				type = (enum ggml_type)i;
		memset(side, 0, sizeof(side));
		for (int i = 0; i < 2; i++) {
			make(&side[i], i ? device : ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), type);
			fill(&side[i], type);
		}
		void (*set_threads)(ggml_backend_t, int) = (void (*)(ggml_backend_t, int))ggml_backend_reg_get_proc_address(
			ggml_backend_dev_backend_reg(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU)),
			"ggml_backend_set_n_threads");
		set_threads(side[0].backend, atoi(argv[6]));
		for (int r = -1; r < rounds; r++)
			for (int i = 0; i < 2; i++) {
				double begin = now();

				if (ggml_backend_graph_compute(side[i].backend, side[i].graph))
					return 1;
				if (r >= 0)
					side[i].ms[r] = now() - begin;
			}
		for (int i = 0; i < 2; i++) {
			qsort(side[i].ms, (size_t)rounds, sizeof(double), by_size);
			ggml_backend_tensor_get(side[i].out, side[i].result, 0, ggml_nbytes(side[i].out));
		}
		for (size_t i = 0; i < ggml_nbytes(side[0].out) / 4; i++) {
			difference = fmax(difference, fabs((double)side[0].result[i] - (double)side[1].result[i]));
			most = fmax(most, fabs((double)side[0].result[i]));
		}
		printf("%-5s %6d rows, %4d queries: llama.cpp %9.3f ms, kvtier %9.3f ms: %.2f times as fast; "
		       "largest difference %.1e of %.1e\n",
		       argv[t], rows, queries, side[0].ms[rounds / 2], side[1].ms[rounds / 2],
		       side[0].ms[rounds / 2] / side[1].ms[rounds / 2], difference, most);
	}
	return 0;
}
