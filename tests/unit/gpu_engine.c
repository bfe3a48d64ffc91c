// SPDX-License-Identifier: MIT
/*
 * The reference engine's kernels on every backend: the bits of the CPU's own,
 * by each kernel, on any grid, whatever is fused with a product.
 */
#include <check.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engines/ref/engine.h"
#include "gpu/engine.h"
#include "gpu/mock.h"
#include "lib/gpu_backends.h"
#include "lib/rounds.h"

#define OK(call) ck_assert_msg((call) == 0, "%s: %s", #call, kvt_last_error())
#define GUARD 1234.5f

static uint32_t seed;

static float random_float(float size)
{
	seed = seed * 1664525u + 1013904223u;
	return size * (float)(int32_t)seed / 2147483648.0f;
}

static float *random_floats(size_t n, float size)
{
	float *f = malloc(n * sizeof(*f));

	for (size_t i = 0; i < n; i++)
		f[i] = random_float(size);
	return f;
}

static int n_backends;
static struct kvt_gpu *gpu;

static void open_gpu(int i)
{
	seed = 1;
	OK(gpu_backend_open(i, &gpu));
}

static kvt_dptr up(const void *data, size_t bytes)
{
	kvt_dptr p;

	OK(gpu->ops->alloc(gpu, bytes, &p));
	OK(gpu->ops->copy_h2d(gpu, p, data, bytes));
	return p;
}

/* What is at @p now; it is freed. */
static void *down(kvt_dptr p, size_t bytes)
{
	void *data = malloc(bytes);

	OK(gpu->ops->stream_sync(gpu, 0));
	OK(gpu->ops->copy_d2h(gpu, data, p, bytes));
	gpu->ops->free(gpu, p);
	return data;
}

static void launch(const char *function, uint32_t blocks, uint32_t threads, void *args)
{
	const struct kvt_dim3 grid = { blocks, 1, 1 }, block = { threads, 1, 1 };
	kvt_kernel kernel;

	OK(gpu->ops->kernel(gpu, "engine", function, &kernel));
	OK(gpu->ops->launch(gpu, kernel, grid, block, 0, 0, &args, 1));
}

static struct ref_matrix random_matrix(uint32_t n, uint32_t k)
{
	struct ref_matrix m;
	float *row = malloc(k * sizeof(*row));

	ck_assert_int_eq(ref_matrix_alloc(&m, n, k), 0);
	for (uint32_t j = 0; j < n; j++) {
		for (uint32_t i = 0; i < k; i++)
			row[i] = random_float(1);
		ref_matrix_set(&m, j, row);
	}
	free(row);
	return m;
}

/* ---- products ---- */

struct product {
	uint32_t rows, n, k, before, add, x_stride, y_stride;
};

/* What the CPU's kernels make of it, one after the other. */
static float *product_on_cpu(const struct product *p, const struct ref_matrix *w, const float *x, const float *weight,
			     float eps, const float *y)
{
	const struct ref_kernels *kernels = ref_kernels(NULL);
	float *out = malloc((size_t)p->rows * p->y_stride * sizeof(*out)), *ready = malloc(p->k * sizeof(*ready));
	float *sum = malloc(p->n * sizeof(*sum));

	memcpy(out, y, (size_t)p->rows * p->y_stride * sizeof(*out));
	for (uint32_t r = 0; r < p->rows; r++) {
		const float *row = x + (size_t)r * p->x_stride;
		float *to = out + (size_t)r * p->y_stride;

		if (p->before == KVT_GEMM_NORM)
			kernels->rmsnorm(ready, row, weight, p->k, eps);
		else if (p->before == KVT_GEMM_SILU)
			kernels->silu_mul(ready, row, row + p->k, p->k);
		else
			memcpy(ready, row, p->k * sizeof(*ready));
		kernels->gemm(w, 0, (p->n + REF_PANEL - 1) / REF_PANEL, ready, p->k, 1, sum, p->n);
		if (p->add)
			kernels->add(to, sum, p->n);
		else
			memcpy(to, sum, p->n * sizeof(*to));
	}
	free(ready);
	free(sum);
	return out;
}

static void check_product(const struct product *p)
{
	static const struct {
		const char *function;
		uint32_t blocks, threads;
	} ways[] = { { "gemm_row", 0, 256 }, { "gemm_tile", 0, 128 }, { "gemm_row", 3, 256 }, { "gemm_tile", 2, 128 } };
	const size_t x_bytes = (size_t)p->rows * p->x_stride * sizeof(float);
	const size_t y_bytes = (size_t)p->rows * p->y_stride * sizeof(float);
	struct ref_matrix w = random_matrix(p->n, p->k);
	float *x = random_floats((size_t)p->rows * p->x_stride, p->before == KVT_GEMM_SILU ? 120 : 2);
	float *weight = random_floats(p->k, 1), *y = random_floats((size_t)p->rows * p->y_stride, 1), *want, *got;
	struct kvt_gemm_args args = { .rows = p->rows, .n = p->n, .k = p->k, .x_stride = p->x_stride, .y_stride = p->y_stride,
				      .before = p->before, .add = p->add, .eps = 1e-5f };

	x[0] = 0;
	x[p->k - 1] = -0.0f;
	for (uint32_t r = 0; r < p->rows; r++) /* between rows nothing is touched */
		for (uint32_t i = p->n; i < p->y_stride; i++)
			y[(size_t)r * p->y_stride + i] = GUARD;
	want = product_on_cpu(p, &w, x, weight, args.eps, y);
	args.x = up(x, x_bytes);
	args.w = up(w.panels, ref_matrix_bytes(p->n, p->k));
	args.weight = up(weight, p->k * sizeof(*weight));
	for (size_t i = 0; i < sizeof(ways) / sizeof(ways[0]); i++) {
		const struct kvt_engine_step step = kvt_engine_gemm(&args);

		args.y = up(y, y_bytes);
		launch(ways[i].function, ways[i].blocks ? ways[i].blocks : step.grid.x, ways[i].threads, &args);
		got = down(args.y, y_bytes);
		for (size_t at = 0; at < (size_t)p->rows * p->y_stride; at++)
			ck_assert_msg(!memcmp(&got[at], &want[at], sizeof(float)),
				      "%s, %u rows of %u x %u, before %u, add %u: output %zu is %a, the CPU's %a", ways[i].function,
				      p->rows, p->n, p->k, p->before, p->add, at, (double)got[at], (double)want[at]);
		free(got);
	}
	gpu->ops->free(gpu, args.x);
	gpu->ops->free(gpu, args.w);
	gpu->ops->free(gpu, args.weight);
	ref_matrix_free(&w);
	free(x);
	free(weight);
	free(y);
	free(want);
}

/* rows, outputs, k: whole tiles and panels and none; k below, at and beyond what is fetched and made ready at a time */
static const uint32_t shapes[][3] = {
	{ 1, 1, 1 }, { 1, 33, 7 }, { 1, 260, 256 }, { 2, 64, 64 }, { 3, 31, 172 }, { 8, 96, 128 }, { 9, 40, 33 },
	{ 64, 32, 32 }, { 65, 70, 100 }, { 5, 20, 1100 }, { 70, 37, 1025 },
};

START_TEST(products)
{
	const int backend = _i / 3, before = _i % 3;

	open_gpu(backend);
	for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i += test_rounds(1, 2, 3))
		for (uint32_t add = 0; add < 2; add++) {
			const struct product p = { shapes[i][0], shapes[i][1], shapes[i][2], (uint32_t)before, add,
						   (before == KVT_GEMM_SILU ? 2 : 1) * shapes[i][2] + 3 * add,
						   shapes[i][1] + 5 * add };

			check_product(&p);
		}
	gpu_backend_close(backend, gpu);
}
END_TEST

/* ---- rows ---- */

START_TEST(embeddings)
{
	const uint32_t vocab = 101, k = 70;
	struct kvt_embed_args args = { .n = KVT_EMBED_MAX, .k = k };
	struct ref_matrix w;
	float *row = malloc(k * sizeof(*row)), *got;

	open_gpu(_i);
	w = random_matrix(vocab, k);
	for (uint32_t i = 0; i < KVT_EMBED_MAX; i++)
		args.ids[i] = i * 37 % vocab;
	args.w = up(w.panels, ref_matrix_bytes(vocab, k));
	for (uint32_t blocks = 1; blocks < 40; blocks += 31) {
		got = random_floats((size_t)KVT_EMBED_MAX * k, 1);
		args.x = up(got, (size_t)KVT_EMBED_MAX * k * sizeof(float));
		free(got);
		launch("embed", blocks, 64, &args);
		got = down(args.x, (size_t)KVT_EMBED_MAX * k * sizeof(float));
		for (uint32_t i = 0; i < KVT_EMBED_MAX; i++) {
			ref_matrix_row(&w, args.ids[i], row);
			ck_assert_mem_eq(got + (size_t)i * k, row, k * sizeof(*row));
		}
		free(got);
	}
	gpu->ops->free(gpu, args.w);
	ref_matrix_free(&w);
	free(row);
	gpu_backend_close(_i, gpu);
}
END_TEST

START_TEST(turned_heads)
{
	static const uint32_t dims[] = { 2, 8, 64, 80 };
	const struct ref_kernels *kernels = ref_kernels(NULL);
	const uint32_t n = 5, positions = 40, heads = 6, kv_heads = 2;

	open_gpu(_i);
	for (size_t d = 0; d < sizeof(dims) / sizeof(dims[0]); d++) {
		const uint32_t dim = dims[d], rows = positions - 3, width = (heads + 2 * kv_heads) * dim;
		float *angles = random_floats((size_t)positions * dim, 1), *qkv = random_floats((size_t)n * width, 3);
		float *q = random_floats((size_t)n * heads * dim, 1), *got_q, *got_qkv;
		struct kvt_rope_args args = { .n = n, .heads = heads, .kv_heads = kv_heads, .dim = dim };

		angles[(rows - n) * dim + dim / 2] = 0; /* a sine of +0: 0 - s is +0 */
		args.angles = up(angles, (size_t)positions * dim * sizeof(float));
		args.qkv = up(qkv, (size_t)n * width * sizeof(float));
		args.q = up(q, (size_t)n * heads * dim * sizeof(float));
		args.rows = up(&rows, sizeof(rows));
		launch("rope", 2, 64, &args);
		got_q = down(args.q, (size_t)n * heads * dim * sizeof(float));
		got_qkv = down(args.qkv, (size_t)n * width * sizeof(float));
		for (uint32_t t = 0; t < n; t++) {
			const float *at = angles + (size_t)(rows - n + t) * dim;

			for (uint32_t h = 0; h < heads + kv_heads; h++) {
				float *from = qkv + (size_t)t * width + h * dim;

				kernels->rope(h < heads ? q + ((size_t)t * heads + h) * dim : from, from, at, dim / 2);
			}
		}
		ck_assert_mem_eq(got_q, q, (size_t)n * heads * dim * sizeof(float));
		ck_assert_mem_eq(got_qkv, qkv, (size_t)n * width * sizeof(float));
		gpu->ops->free(gpu, args.angles);
		gpu->ops->free(gpu, args.rows);
		free(angles);
		free(qkv);
		free(q);
		free(got_q);
		free(got_qkv);
	}
	gpu_backend_close(_i, gpu);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("gpu_engine");
	TCase *t = tcase_create("kernels");
	SRunner *r = srunner_create(s);
	int failed;

	n_backends = gpu_backends();
	tcase_set_timeout(t, 120);
	tcase_add_loop_test(t, products, 0, 3 * n_backends);
	tcase_add_loop_test(t, embeddings, 0, n_backends);
	tcase_add_loop_test(t, turned_heads, 0, n_backends);
	suite_add_tcase(s, t);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
