// SPDX-License-Identifier: MIT
/*
 * The llama.cpp plug-in's core without llama.cpp: KV tensors against a plain
 * copy of them in memory (random writes, reads, fills, rows by index, copies,
 * rotations), attention against float64, budgets that do not change a bit, and
 * what is refused.
 */
#include <check.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codec/codec.h"
#include "engines/ggml/plugin.h"

static uint64_t rng = 88172645463325252ull;

static uint32_t rnd(void)
{
	rng ^= rng << 13;
	rng ^= rng >> 7;
	rng ^= rng << 17;
	return (uint32_t)(rng >> 32);
}

static float rndf(void)
{
	return (float)(int32_t)rnd() / 2147483648.0f;
}

static void setup_with(uint64_t ram, uint64_t disk, uint32_t threads)
{
	struct kg_config c;
	char *env[] = { (char *)"KVTIER_RAM_BYTES=1G", NULL };

	ck_assert_int_eq(kg_config_read(&c, env), 1);
	c.cache.ram_bytes = ram;
	c.cache.disk_bytes = disk;
	c.cache.block_bytes = 4096;
	c.cache.threads = threads;
	c.cache.max_query_rows = 16;
	kg_setup(&c);
}

/* A buffer with one tensor, and the tensor as a view. */
static struct kg_buffer *one_tensor(const char *name, uint32_t codec, int64_t ne0, int64_t ne1, int64_t ne2,
				    struct kg_tensor **t, struct kg_view *v)
{
	const int64_t ne[4] = { ne0, ne1, ne2, 1 };
	uint64_t row = kvt_codec_bytes(codec, (uint64_t)ne0);
	struct kg_buffer *b;

	ck_assert_int_eq(kg_buffer_create(row * (uint64_t)(ne1 * ne2), &b), 0);
	ck_assert_msg(!kg_tensor_add(b, name, codec, ne, 0, t), "%s", kvt_last_error());
	*v = (struct kg_view){ .kv = *t, .data = kg_buffer_base(b), .row_bytes = row, .rows = (uint64_t)ne1, .type = codec,
			       .ne = { ne0, ne1, ne2, 1 }, .nb = { kvt_codec_bytes(codec, kvt_codec_group(codec)), row,
								   row * (uint64_t)ne1, row * (uint64_t)(ne1 * ne2) } };
	return b;
}

static struct kg_view plain(void *data, uint32_t type, int64_t ne0, int64_t ne1, int64_t ne2, uint64_t element)
{
	uint64_t row = element * (uint64_t)ne0;

	return (struct kg_view){ .data = data, .type = type, .ne = { ne0, ne1, ne2, 1 }, .row_bytes = row,
				 .rows = (uint64_t)ne1,
				 .nb = { element, row, row * (uint64_t)ne1, row * (uint64_t)(ne1 * ne2) } };
}

enum { COLS = 64, ROWS = 150, STREAMS = 3 };

static const uint32_t codecs[] = { KVT_F16, KVT_BF16, KVT_Q8_0, KVT_Q4_0 };

START_TEST(bytes_as_memory)
{
	uint32_t codec = codecs[_i];
	uint64_t row = kvt_codec_bytes(codec, COLS), all = row * ROWS * STREAMS;
	uint8_t *model = calloc(1, all), *buf = malloc(all);
	struct kg_tensor *t;
	struct kg_buffer *b;
	struct kg_view v;

	setup_with(4 << 20, _i & 1 ? 8 << 20 : 0, 2);
	b = one_tensor("cache_k_l0", codec, COLS, ROWS, STREAMS, &t, &v);
	ck_assert_int_eq(kg_buffer_clear(b, 0), 0);
	for (int step = 0; step < 600; step++) {
		uint64_t at = rnd() % all, n = rnd() % 3 ? rnd() % 400 : rnd() % all;
		uint8_t value = (uint8_t)(rnd() % 3 ? 0 : rnd());

		if (rnd() % 2) {
			at -= at % row;
			n -= n % row;
		}
		n = n > all - at ? all - at : n;
		switch (rnd() % 4) {
		case 0:
			for (uint64_t i = 0; i < n; i++)
				buf[i] = (uint8_t)rnd();
			ck_assert_msg(!kg_tensor_write(t, at, buf, n), "%s", kvt_last_error());
			memcpy(model + at, buf, n);
			break;
		case 1:
			ck_assert_int_eq(kg_tensor_fill(t, at, value, n), 0);
			memset(model + at, value, n);
			break;
		case 2:
			ck_assert_int_eq(kg_tensor_read(t, at, buf, n), 0);
			ck_assert(!memcmp(buf, model + at, n));
			break;
		default:
			if (rnd() % 40 == 0) {
				ck_assert_int_eq(kg_buffer_clear(b, 0), 0);
				memset(model, 0, all);
			}
		}
	}
	ck_assert_int_eq(kg_tensor_read(t, all - 1, buf, 2), -ERANGE);
	ck_assert(buf[0] == 0xff && buf[1] == 0xff);
	kg_buffer_free(b);
	free(model);
	free(buf);
}
END_TEST

/* Rows by index, over streams as one tensor of 2 dimensions, from rows that lie apart. */
START_TEST(set_and_get_rows)
{
	uint32_t codec = codecs[_i];
	static float in[40][COLS + 8], out[40][COLS], want[COLS];
	uint8_t bytes[COLS * 4];
	struct kg_view v, flat, src = plain(in, KVT_F32, COLS, 40, 1, 4), dst = plain(out, KVT_F32, COLS, 40, 1, 4), index;
	struct kg_tensor *t;
	struct kg_buffer *b;
	int64_t rows[40];
	int32_t narrow[40];

	setup_with(4 << 20, 0, 1);
	b = one_tensor("cache_v_l3", codec, COLS, ROWS, STREAMS, &t, &v);
	flat = v;
	flat.ne[1] = ROWS * STREAMS;
	flat.ne[2] = 1;
	src.nb[1] = src.nb[2] = src.nb[3] = sizeof(in[0]);
	for (int i = 0; i < 40; i++) {
		rows[i] = i < 20 ? ROWS - 10 + i : (i * 7919) % (ROWS * STREAMS);
		for (int j = 0; j < COLS; j++)
			in[i][j] = rndf() * 10;
	}
	index = plain(rows, KG_I64, 40, 1, 1, 8);
	ck_assert_msg(!kg_set_rows(&flat, &src, &index), "%s", kvt_last_error());
	for (int i = 0; i < 40; i++)
		narrow[i] = (int32_t)rows[i];
	index = plain(narrow, KG_I32, 40, 1, 1, 4);
	ck_assert_msg(!kg_get_rows(&dst, &flat, &index), "%s", kvt_last_error());
	for (int i = 0; i < 40; i++) {
		int last = i;

		for (int k = i; k < 40; k++)
			last = rows[k] == rows[i] ? k : last;
		kvt_codec_convert(bytes, codec, in[last], KVT_F32, COLS);
		kvt_codec_convert(want, KVT_F32, bytes, codec, COLS);
		ck_assert_msg(!memcmp(want, out[i], sizeof(want)), "row %d", i);
	}
	narrow[3] = ROWS * STREAMS;
	ck_assert_int_eq(kg_set_rows(&flat, &src, &index), -ERANGE);
	ck_assert_int_eq(kg_get_rows(&dst, &flat, &index), -ERANGE);
	narrow[3] = -1;
	ck_assert_int_eq(kg_set_rows(&flat, &src, &index), -ERANGE);
	/* as llama.cpp writes V without flash attention */
	flat.ne[0] = 1;
	flat.ne[1] = COLS * ROWS * STREAMS;
	flat.nb[1] = flat.nb[0];
	narrow[3] = 0;
	ck_assert_int_eq(kg_set_rows(&flat, &src, &index), -EOPNOTSUPP);
	ck_assert(strstr(kvt_last_error(), "-fa on"));
	kg_buffer_free(b);
}
END_TEST

enum { HEADS = 2, GROUP = 3, DIM = 32, KV = 300, TOKENS = 19 };

struct problem {
	struct kg_buffer *k_buffer, *v_buffer;
	struct kg_tensor *k, *v;
	struct kg_attention a;
	float q[TOKENS][HEADS * GROUP][DIM], out[TOKENS][HEADS * GROUP][DIM], sinks[HEADS * GROUP];
	float rows[2][KV][HEADS * DIM];
	uint16_t mask[TOKENS][KV];
};

static struct problem p;

static void make_problem(uint32_t codec, bool extras, uint64_t ram, uint64_t disk, uint32_t threads)
{
	uint8_t bytes[HEADS * DIM * 4];
	int64_t index[KV];
	struct kg_view kv[2], src, i64;

	memset(&p, 0, sizeof(p));
	rng = 4711;
	setup_with(ram, disk, threads);
	p.k_buffer = one_tensor("cache_k_l0", codec, HEADS * DIM, KV, 1, &p.k, &kv[0]);
	kg_buffer_clear(p.k_buffer, 0);
	p.v_buffer = one_tensor("cache_v_l0", codec, HEADS * DIM, KV, 1, &p.v, &kv[1]);
	kg_buffer_clear(p.v_buffer, 0);
	kg_tensor_shape(p.k, HEADS, HEADS * GROUP);
	kg_tensor_shape(p.v, HEADS, HEADS * GROUP);
	for (int i = 0; i < KV; i++)
		index[i] = (i * 7) % KV;
	for (int x = 0; x < 2; x++) {
		for (int i = 0; i < KV; i++)
			for (int j = 0; j < HEADS * DIM; j++)
				p.rows[x][index[i]][j] = rndf();
		for (int i = 0; i < KV; i++) {
			src = plain(p.rows[x][index[i]], KVT_F32, HEADS * DIM, 1, 1, 4);
			i64 = plain(&index[i], KG_I64, 1, 1, 1, 8);
			ck_assert_msg(!kg_set_rows(&kv[x], &src, &i64), "%s", kvt_last_error());
			kvt_codec_convert(bytes, codec, p.rows[x][index[i]], KVT_F32, HEADS * DIM);
			kvt_codec_convert(p.rows[x][index[i]], KVT_F32, bytes, codec, HEADS * DIM);
		}
		/* as llama.cpp looks at it: dimensions, positions, heads */
		kv[x].ne[0] = DIM;
		kv[x].ne[2] = HEADS;
		kv[x].nb[2] = kv[x].row_bytes / HEADS;
		kv[x].nb[3] = kv[x].row_bytes * KV;
	}
	for (int t = 0; t < TOKENS; t++) {
		for (int h = 0; h < HEADS * GROUP; h++)
			for (int d = 0; d < DIM; d++)
				p.q[t][h][d] = rndf() * 4;
		for (int j = 0; j < KV; j++)
			p.mask[t][j] = j % 5 == 4 || j > KV - TOKENS + t ? 0xfc00 : extras ? (uint16_t)(0xb800 + j) : 0;
	}
	p.a = (struct kg_attention){
		.q = plain(p.q, KVT_F32, DIM, TOKENS, HEADS * GROUP, 4), .k = kv[0], .v = kv[1],
		.mask = plain(p.mask, KVT_F16, KV, TOKENS, 1, 2), .out = plain(p.out, KVT_F32, DIM, HEADS * GROUP, TOKENS, 4),
		.sinks = plain(p.sinks, KVT_F32, HEADS * GROUP, 1, 1, 4), .has_mask = true, .has_sinks = extras,
		.scale = 0.25f, .max_bias = extras ? 8 : 0, .softcap = extras ? 2 : 0,
	};
	p.a.q.nb[1] = sizeof(p.q[0]);
	p.a.q.nb[2] = sizeof(p.q[0][0]);
	for (int h = 0; h < HEADS * GROUP; h++)
		p.sinks[h] = rndf();
}

static void end_problem(void)
{
	kg_buffer_free(p.k_buffer);
	kg_buffer_free(p.v_buffer);
}

static double f16(uint16_t h)
{
	float f;

	kvt_codec_convert(&f, KVT_F32, &h, KVT_F16, 1);
	return (double)f;
}

static double largest_error(bool extras)
{
	/* ALiBi's slopes for 6 heads by hand: the first 4 of 2^-2, 2^-4, ...; then the odd ones of twice as many */
	static const double slope[] = { 0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125 };
	double worst = 0;

	for (int t = 0; t < TOKENS; t++)
		for (int h = 0; h < HEADS * GROUP; h++) {
			double score[KV], top = -INFINITY, sum = 0, got[DIM] = { 0 };

			for (int j = 0; j < KV; j++) {
				double s = 0, m = f16(p.mask[t][j]);

				for (int d = 0; d < DIM; d++)
					s += (double)p.q[t][h][d] * (double)p.rows[0][j][h / GROUP * DIM + d];
				s *= 0.25;
				score[j] = isinf(m) ? -INFINITY : extras ? 2 * tanh(s / 2) + slope[h] * m : s;
				top = fmax(top, score[j]);
			}
			if (extras)
				sum = exp((double)p.sinks[h] - top);
			for (int j = 0; j < KV; j++) {
				double w = exp(score[j] - top);

				sum += w;
				for (int d = 0; d < DIM; d++)
					got[d] += w * (double)p.rows[1][j][h / GROUP * DIM + d];
			}
			for (int d = 0; d < DIM; d++)
				worst = fmax(worst, fabs(got[d] / sum - (double)p.out[t][h][d]));
		}
	return worst;
}

START_TEST(attention_is_right)
{
	double worst;

	make_problem(codecs[_i / 2], _i & 1, 16 << 20, 0, 2);
	ck_assert_msg(!kg_attention(&p.a), "%s", kvt_last_error());
	worst = largest_error(_i & 1);
	ck_assert_msg(worst < 1e-6, "%g", worst);
	end_problem();
}
END_TEST

START_TEST(budgets_and_threads_do_not_matter)
{
	static float all[sizeof(p.out) / sizeof(float)];
	static const struct {
		uint64_t ram, disk;
		uint32_t threads;
	} how[] = { { 8 << 20, 0, 3 }, { 1560 << 10, 2 << 20, 1 }, { 8 << 20, 2 << 20, 4 } };

	make_problem(KVT_F16, true, 16 << 20, 0, 1);
	ck_assert_int_eq(kg_attention(&p.a), 0);
	memcpy(all, p.out, sizeof(all));
	end_problem();
	for (size_t i = 0; i < sizeof(how) / sizeof(how[0]); i++) {
		make_problem(KVT_F16, true, how[i].ram, how[i].disk, how[i].threads);
		ck_assert_msg(!kg_attention(&p.a), "%s", kvt_last_error());
		ck_assert_msg(!memcmp(all, p.out, sizeof(all)), "budget %zu", i);
		end_problem();
	}
}
END_TEST

/* Queries with the heads outermost are brought into order; the bits are the same. */
START_TEST(any_order_of_queries)
{
	static float q[HEADS * GROUP][TOKENS][DIM], want[sizeof(p.out) / sizeof(float)];

	make_problem(KVT_F16, false, 16 << 20, 0, 2);
	ck_assert_int_eq(kg_attention(&p.a), 0);
	memcpy(want, p.out, sizeof(want));
	for (int t = 0; t < TOKENS; t++)
		for (int h = 0; h < HEADS * GROUP; h++)
			memcpy(q[h][t], p.q[t][h], sizeof(q[h][t]));
	p.a.q = plain(q, KVT_F32, DIM, TOKENS, HEADS * GROUP, 4);
	ck_assert_int_eq(kg_attention(&p.a), 0);
	ck_assert(!memcmp(want, p.out, sizeof(want)));
	end_problem();
}
END_TEST

START_TEST(attention_refuses)
{
	make_problem(KVT_F16, false, 16 << 20, 0, 1);
	p.a.mask.type = KVT_F32;
	ck_assert_int_eq(kg_attention(&p.a), -EOPNOTSUPP);
	p.a.mask.type = KVT_F16;
	p.a.mask.ne[2] = 2;
	ck_assert_int_eq(kg_attention(&p.a), -EOPNOTSUPP);
	p.a.mask.ne[2] = 1;
	p.a.k.at = p.a.k.row_bytes;
	ck_assert_int_eq(kg_attention(&p.a), -EOPNOTSUPP);
	p.a.k.at = 0;
	p.a.scale = 0;
	ck_assert_int_eq(kg_attention(&p.a), -EOPNOTSUPP);
	p.a.scale = 1;
	ck_assert_int_eq(kg_attention(&p.a), 0);
	end_problem();
}
END_TEST

/* In place, as for a context shift: positions of 0 leave their rows alone, others turn them, both pairings. */
START_TEST(rotation)
{
	int32_t position[ROWS];
	static float before[ROWS][COLS], after[ROWS][COLS];
	struct kg_view v, all = plain(before, KVT_F32, COLS, ROWS, 1, 4), back = plain(after, KVT_F32, COLS, ROWS, 1, 4);
	struct kg_tensor *t;
	struct kg_rope r;
	struct kg_buffer *b;

	setup_with(4 << 20, 0, 1);
	b = one_tensor("cache_k_l0", KVT_F16, COLS, ROWS, 1, &t, &v);
	for (int i = 0; i < ROWS; i++) {
		position[i] = i % 3 ? -7 * i : 0;
		for (int j = 0; j < COLS; j++)
			before[i][j] = rndf();
	}
	ck_assert_int_eq(kg_copy(&v, &all), 0);
	ck_assert_int_eq(kg_copy(&all, &v), 0); /* as f16 has them */
	v.ne[0] = COLS / 2;
	v.ne[1] = 2;
	v.ne[2] = ROWS;
	v.nb[2] = v.nb[1];
	v.nb[1] = v.row_bytes / 2;
	v.nb[3] = v.row_bytes * ROWS;
	r = (struct kg_rope){ .in = v, .out = v, .positions = plain(position, KG_I32, ROWS, 1, 1, 4), .dims = 24,
			      .mode = _i * 2, .base = 10000, .freq_scale = 1, .attn_factor = 1, .beta_fast = 32, .beta_slow = 1,
			      .ctx_orig = 4096 };
	ck_assert_msg(!kg_rope(&r), "%s", kvt_last_error());
	v.ne[0] = COLS;
	v.ne[1] = ROWS;
	v.ne[2] = 1;
	v.nb[1] = v.row_bytes;
	ck_assert_int_eq(kg_copy(&back, &v), 0);
	for (int i = 0; i < ROWS; i++)
		for (int j = 0; j < COLS; j++) {
			int head = j / 32 * 32, d = j - head, pair = _i ? d % 12 : d / 2, half = _i ? d / 12 : d % 2;
			double angle = position[i] * pow(10000, -2.0 * pair / 24), a, c;

			if (d >= 24 || !position[i]) {
				ck_assert(after[i][j] == before[i][j]);
				continue;
			}
			a = (double)before[i][head + (_i ? pair : 2 * pair)];
			c = (double)before[i][head + (_i ? pair + 12 : 2 * pair + 1)];
			ck_assert_double_eq_tol((double)after[i][j], half ? a * sin(angle) + c * cos(angle) :
							a * cos(angle) - c * sin(angle), 2e-3);
		}
	kg_buffer_free(b);
}
END_TEST

START_TEST(wants)
{
	ck_assert_int_eq(kg_tensor_wanted("cache_k_l0", KVT_F16, "f16"), 1);
	ck_assert_int_eq(kg_tensor_wanted("cache_v_l12", KVT_Q4_0, "q4_0"), 1);
	ck_assert_int_eq(kg_tensor_wanted("KVTIER0#k#0", KVT_F16, "f16"), 0);
	ck_assert_int_eq(kg_tensor_wanted("cache_k_l0", KVT_F32, "f32"), -EOPNOTSUPP);
	ck_assert_int_eq(kg_tensor_wanted("cache_v_l0", KG_OTHER, "q5_1"), -EOPNOTSUPP);
	ck_assert(strstr(kvt_last_error(), "q5_1") && strstr(kvt_last_error(), "-ctk"));
}
END_TEST

START_TEST(budgets_are_checked_before)
{
	const int64_t ne[4] = { 1024, 4096, 1, 1 };
	struct kg_buffer *b, *c;
	struct kg_tensor *t, *u;
	struct kg_view v;
	uint64_t all, taken;
	uint8_t byte = 1;

	setup_with(4 << 20, 0, 1);
	ck_assert_int_eq(kg_buffer_create(16 << 20, &b), 0);
	ck_assert_int_eq(kg_tensor_add(b, "cache_k_l0", KVT_F16, ne, 0, &t), -ENOMEM);
	ck_assert(strstr(kvt_last_error(), "KVTIER_DISK_BYTES"));
	kg_memory(&all, &taken);
	ck_assert(all == 4 << 20 && !taken);
	setup_with(100 << 10, 64 << 20, 1);
	ck_assert_int_eq(kg_tensor_add(b, "cache_k_l0", KVT_F16, ne, 0, &t), -ENOMEM);
	ck_assert(strstr(kvt_last_error(), "KVTIER_RAM_BYTES is 102400"));
	kg_buffer_free(b);

	/* one cache has all: the next is told how to divide */
	setup_with(4 << 20, 0, 1);
	b = one_tensor("cache_k_l0", KVT_F16, COLS, ROWS, 1, &t, &v);
	c = one_tensor("cache_k_l0", KVT_F16, COLS, ROWS, 1, &u, &v);
	ck_assert_int_eq(kg_tensor_write(t, 0, &byte, 1), 0);
	ck_assert_int_lt(kg_tensor_write(u, 0, &byte, 1), 0);
	ck_assert(strstr(kvt_last_error(), "KVTIER_CACHES=2"));
	kg_buffer_free(b);
	ck_assert_int_eq(kg_tensor_write(u, 0, &byte, 1), 0);
	kg_buffer_free(c);
	kg_memory(&all, &taken);
	ck_assert_uint_eq(taken, 0);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("llama_core");
	TCase *t = tcase_create("llama_core");
	SRunner *r = srunner_create(s);
	int failed;

	tcase_add_loop_test(t, bytes_as_memory, 0, 4);
	tcase_add_loop_test(t, set_and_get_rows, 0, 4);
	tcase_add_loop_test(t, attention_is_right, 0, 8);
	tcase_add_test(t, budgets_and_threads_do_not_matter);
	tcase_add_test(t, any_order_of_queries);
	tcase_add_test(t, attention_refuses);
	tcase_add_loop_test(t, rotation, 0, 2);
	tcase_add_test(t, wants);
	tcase_add_test(t, budgets_are_checked_before);
	suite_add_tcase(s, t);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed != 0;
}
