// SPDX-License-Identifier: MIT
/*
 * The arena: no two buffers that live together share a byte, layouts are near
 * the lower bound, contents survive a pass that writes all of them, one
 * allocation and no other, and every refusal.
 */
#include <check.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu/mock.h"
#include "kvtier.h"
#include "runtime/arena.h"
#include "runtime/scratch.h"

static uint64_t state = 88172645463325252u;

static uint32_t random_below(uint32_t n)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return (state >> 32) % n;
}

static void check_layout(const struct kvt_arena_plan *plan, const uint64_t *offsets, const struct kvt_arena_size *size)
{
	ck_assert_uint_ge(size->bytes, size->bound);
	ck_assert_uint_le(size->bytes, size->unshared);
	for (uint32_t i = 0; i < plan->n; i++) {
		const struct kvt_arena_buffer *a = &plan->buffers[i];

		ck_assert_uint_eq(offsets[i] % KVT_ARENA_ALIGN, 0);
		ck_assert_uint_le(offsets[i] + a->bytes, size->bytes);
		for (uint32_t j = 0; j < i; j++) {
			const struct kvt_arena_buffer *b = &plan->buffers[j];

			if (a->first > b->last || b->first > a->last)
				continue;
			ck_assert_msg(offsets[i] + a->bytes <= offsets[j] || offsets[j] + b->bytes <= offsets[i],
				      "buffers %u and %u overlap", i, j);
		}
	}
}

START_TEST(random_plans)
{
	static struct kvt_arena_buffer buffers[64];
	uint64_t offsets[64], again[64];
	double worst = 0, sum = 0;
	uint32_t optimal = 0, plans = 400;

	for (uint32_t round = 0; round < plans; round++) {
		struct kvt_arena_plan plan = { .size = sizeof(plan), .buffers = buffers, .n = 1 + random_below(64) };
		struct kvt_arena_size size, size2;
		double ratio;

		for (uint32_t i = 0; i < plan.n; i++) {
			buffers[i] = (struct kvt_arena_buffer){ .name = "b", .first = random_below(30) };
			buffers[i].bytes = random_below(2) ? random_below(5000) : random_below(1000000);
			buffers[i].last = buffers[i].first + random_below(round % 3 ? 4 : 20);
		}
		ck_assert_int_eq(kvt_arena_layout(&plan, offsets, &size), 0);
		check_layout(&plan, offsets, &size);
		ck_assert_int_eq(kvt_arena_layout(&plan, again, &size2), 0);
		ck_assert_mem_eq(offsets, again, plan.n * sizeof(offsets[0]));
		ratio = size.bound ? (double)size.bytes / size.bound : 1;
		optimal += size.bytes == size.bound;
		worst = ratio > worst ? ratio : worst;
		sum += ratio;
	}
	printf("%u random plans: %u at the lower bound, mean %.4f of it, worst %.4f\n", plans, optimal, sum / plans, worst);
	ck_assert(sum / plans < 1.01 && worst < 1.15);
}
END_TEST

/* The greedy orders alone reach the bound in 36 of these 60 plans, by size alone in 24. */
START_TEST(search_finds)
{
	static struct kvt_arena_buffer buffers[40];
	uint32_t plain = 0, found = 0;

	for (uint32_t round = 0; round < 60; round++) {
		struct kvt_arena_plan plan = { .size = sizeof(plan), .buffers = buffers, .n = 40 };
		struct kvt_arena_size size;

		for (uint32_t i = 0; i < plan.n; i++) {
			buffers[i] = (struct kvt_arena_buffer){ "b", 256 * (1 + random_below(9)), random_below(20), 0 };
			buffers[i].last = buffers[i].first + 1 + random_below(6);
		}
		ck_assert_int_eq(kvt_arena_layout(&plan, NULL, &size), 0);
		plain++;
		found += size.bytes == size.bound;
	}
	printf("%u of %u dense plans at the lower bound\n", found, plain);
	ck_assert_uint_ge(found, 50);
}
END_TEST

static const struct kvt_decoder_shape shapes[] = {
	/* hidden, inter, heads, kv_heads, head_dim, vocab, batch, tokens */
	{ 64, 172, 8, 4, 8, 512, 1, 33 },
	{ 4096, 14336, 32, 8, 128, 128256, 16, 512 },
	{ 896, 4864, 14, 2, 64, 151936, 64, 64 },
	{ 8192, 28672, 64, 8, 128, 128256, 1, 1 },
};

START_TEST(decoders)
{
	struct kvt_arena_buffer buffers[KVT_DECODER_BUFFERS];
	uint64_t offsets[KVT_DECODER_BUFFERS];

	for (uint32_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
		struct kvt_arena_plan plan = kvt_decoder_scratch(&shapes[i], buffers);
		struct kvt_arena_size size;

		ck_assert_int_eq(kvt_arena_layout(&plan, offsets, &size), 0);
		check_layout(&plan, offsets, &size);
		printf("hidden %u, %u tokens: %llu bytes, %.4f of the lower bound, %.2f of unshared\n", shapes[i].hidden,
		       shapes[i].tokens, (unsigned long long)size.bytes, (double)size.bytes / size.bound,
		       (double)size.bytes / size.unshared);
		ck_assert_uint_eq(size.bytes, size.bound);
		ck_assert_uint_lt(size.bytes, size.unshared);
	}
}
END_TEST

/* Fill or check @bytes of a device buffer with a pattern of (buffer, round). */
static void pattern(struct kvt_gpu *gpu, kvt_dptr p, uint64_t bytes, uint32_t buffer, uint32_t round, bool check)
{
	uint8_t *host = malloc(bytes + 1), *want = malloc(bytes + 1);

	for (uint64_t i = 0; i < bytes; i++)
		want[i] = (uint8_t)(i * 7 + buffer * 31 + round * 101);
	if (!check) {
		ck_assert_int_eq(gpu->ops->copy_h2d(gpu, p, want, bytes), 0);
	} else {
		ck_assert_int_eq(gpu->ops->copy_d2h(gpu, host, p, bytes), 0);
		ck_assert_msg(!memcmp(host, want, bytes), "buffer %u lost its contents", buffer);
	}
	free(want);
	free(host);
}

static void run_step(struct kvt_gpu *gpu, struct kvt_arena *arena, const struct kvt_arena_plan *plan, uint32_t step,
		     uint32_t round)
{
	for (uint32_t i = 0; i < plan->n; i++) {
		const struct kvt_arena_buffer *b = &plan->buffers[i];
		bool born_before_loop = b->first < plan->loop_first;
		kvt_dptr p;

		if (step < b->first || step > b->last)
			continue;
		ck_assert_int_eq(kvt_arena_get(arena, i, b->bytes, step, &p), 0);
		ck_assert_uint_eq(p % KVT_ARENA_ALIGN, 0);
		if (step == b->first)
			pattern(gpu, p, b->bytes, i, born_before_loop ? 0 : round, false);
		pattern(gpu, p, b->bytes, i, born_before_loop ? 0 : round, true);
	}
}

/* A whole pass with three layers: every buffer keeps its bytes from its first step to its last, in every round. */
START_TEST(contents_survive)
{
	struct kvt_arena_buffer buffers[KVT_DECODER_BUFFERS];
	struct kvt_arena_plan plan = kvt_decoder_scratch(&shapes[0], buffers);
	struct kvt_arena *arena;
	struct kvt_gpu *gpu;

	ck_assert_int_eq(kvt_mock_open(0, &gpu), 0);
	ck_assert_int_eq(kvt_arena_create(gpu, &plan, &arena), 0);
	ck_assert_uint_eq(kvt_mock_allocs(gpu), 1);
	for (uint32_t pass = 0; pass < 2; pass++) {
		for (uint32_t step = 0; step < plan.loop_first; step++)
			run_step(gpu, arena, &plan, step, 0);
		for (uint32_t layer = 0; layer < 3; layer++)
			for (uint32_t step = plan.loop_first; step <= plan.loop_last; step++)
				run_step(gpu, arena, &plan, step, layer);
		for (uint32_t step = plan.loop_last + 1; step < KVT_DECODER_STEPS; step++)
			run_step(gpu, arena, &plan, step, 9);
	}
	ck_assert_uint_eq(kvt_mock_allocs(gpu), 1);
	ck_assert_uint_eq(kvt_mock_alive(gpu), 1);
	kvt_arena_destroy(arena);
	ck_assert_uint_eq(kvt_mock_alive(gpu), 0);
	ck_assert_str_eq(kvt_mock_fault(gpu), "");
	gpu->ops->close(gpu);
}
END_TEST

/* Read in every round of the loop, written before it: nothing of the loop may lie on it. */
START_TEST(loop_keeps)
{
	static const struct kvt_arena_buffer buffers[] = { { "in", 256, 0, 1 }, { "late", 256, 3, 3 }, { "out", 256, 4, 4 } };
	struct kvt_arena_plan straight = { .size = sizeof(straight), .n = 3, .buffers = buffers };
	struct kvt_arena_plan loop = { .size = sizeof(loop), .n = 3, .buffers = buffers, .loop_first = 1, .loop_last = 3 };
	struct kvt_arena_size size;
	uint64_t offsets[3];

	ck_assert_int_eq(kvt_arena_layout(&straight, offsets, &size), 0);
	ck_assert_uint_eq(size.bytes, 256);
	ck_assert_int_eq(kvt_arena_layout(&loop, offsets, &size), 0);
	ck_assert_uint_eq(size.bytes, 512);
	ck_assert_uint_ne(offsets[0], offsets[1]);
}
END_TEST

START_TEST(refusals)
{
	static const struct kvt_arena_buffer good[] = { { "q", 1000, 0, 2 }, { "gate", 300, 3, 4 }, { "none", 0, 0, 4 } };
	struct kvt_arena_buffer bad[3];
	struct kvt_arena_plan plan = { .size = sizeof(plan), .n = 3, .buffers = good };
	struct kvt_arena_plan wrong = { .size = sizeof(wrong), .n = 3, .buffers = bad };
	struct kvt_arena_size size;
	struct kvt_arena *arena;
	struct kvt_gpu *gpu;
	kvt_dptr p, q;

	ck_assert_int_eq(kvt_mock_open(0, &gpu), 0);
	ck_assert_int_eq(kvt_arena_create(gpu, &plan, &arena), 0);
	ck_assert_uint_eq(kvt_arena_size(arena).bytes, 1024);
	ck_assert_int_eq(kvt_arena_get(arena, 0, 1000, 2, &p), 0);
	ck_assert_int_eq(kvt_arena_get(arena, 0, 1, 0, &q), 0);
	ck_assert_uint_eq(p, q);
	ck_assert_int_eq(kvt_arena_get(arena, 2, 0, 0, &q), 0);
	q = 77;
	ck_assert_int_eq(kvt_arena_get(arena, 0, 1001, 2, &q), -ENOSPC);
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "scratch buffer q: 1001 bytes asked, 1000 planned"));
	ck_assert_int_eq(kvt_arena_get(arena, 2, 1, 0, &q), -ENOSPC);
	ck_assert_int_eq(kvt_arena_get(arena, 0, 1, 3, &q), -EINVAL);
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "scratch buffer q in step 3: it lives from 0 to 2"));
	ck_assert_int_eq(kvt_arena_get(arena, 1, 1, 2, &q), -EINVAL);
	ck_assert_int_eq(kvt_arena_get(arena, 3, 1, 0, &q), -EINVAL);
	ck_assert_uint_eq(q, 77);
	kvt_arena_destroy(arena);
	kvt_arena_destroy(NULL);

	memcpy(bad, good, sizeof(bad));
	bad[1].last = 2;
	ck_assert_int_eq(kvt_arena_create(gpu, &wrong, &arena), -EINVAL);
	ck_assert_ptr_null(arena);
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "gate lives from step 3 to 2"));
	bad[1].last = 4;
	bad[1].bytes = kvt_arena_product(1ull << 40, 1ull << 20, 16);
	ck_assert_uint_eq(bad[1].bytes, UINT64_MAX);
	ck_assert_int_eq(kvt_arena_layout(&wrong, NULL, &size), -EOVERFLOW);
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "gate"));
	bad[0].bytes = bad[1].bytes = 1ull << 60; /* each is allowed, the sum is not */
	ck_assert_int_eq(kvt_arena_layout(&wrong, NULL, &size), -EOVERFLOW);
	plan.size = 0;
	ck_assert_int_eq(kvt_arena_layout(&plan, NULL, &size), -EINVAL);
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "KVT_INIT"));
	plan.size = sizeof(plan);
	ck_assert_int_eq(kvt_arena_layout(&plan, NULL, NULL), -EINVAL);
	ck_assert_int_eq(kvt_arena_layout(NULL, NULL, &size), -EINVAL);
	plan.buffers = NULL;
	ck_assert_int_eq(kvt_arena_layout(&plan, NULL, &size), -EINVAL);
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "buffers is NULL"));
	plan.buffers = good;
	plan.loop_first = 2;
	plan.loop_last = 1;
	ck_assert_int_eq(kvt_arena_layout(&plan, NULL, &size), -EINVAL);
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "loop runs from step 2 to 1"));
	plan.loop_first = plan.loop_last = 0;
	plan.n = 0;
	ck_assert_int_eq(kvt_arena_layout(&plan, NULL, &size), -EINVAL);
	plan.n = KVT_ARENA_BUFFERS + 1;
	ck_assert_int_eq(kvt_arena_layout(&plan, NULL, &size), -EINVAL);
	plan.buffers = good + 2;
	plan.n = 1;
	ck_assert_int_eq(kvt_arena_create(gpu, &plan, &arena), 0);
	ck_assert_int_eq(kvt_arena_get(arena, 0, 0, 0, &q), 0);
	ck_assert_uint_ne(q, 0);
	kvt_arena_destroy(arena);
	gpu->ops->close(gpu);
}
END_TEST

START_TEST(budget)
{
	static const struct kvt_arena_buffer buffers[] = { { "a", 1000, 0, 0 }, { "b", 3000, 1, 1 } };
	struct kvt_arena_plan plan = { .size = sizeof(plan), .n = 2, .buffers = buffers };
	struct kvt_budget b = { .limit = 3071 };
	struct kvt_arena *arena;
	struct kvt_gpu *gpu;

	ck_assert_int_eq(kvt_mock_open(0, &gpu), 0);
	ck_assert_int_eq(kvt_arena_create_charged(gpu, &b, &plan, &arena), -ENOMEM);
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "needs 3072 bytes"));
	ck_assert_uint_eq(kvt_mock_allocs(gpu), 0);
	b.limit = 3072;
	kvt_mock_refuse(gpu, KVT_MOCK_alloc, -ENOMEM);
	ck_assert_int_eq(kvt_arena_create_charged(gpu, &b, &plan, &arena), -ENOMEM);
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "mock: no 3072 bytes of scratch"));
	ck_assert_uint_eq(b.used, 0);
	kvt_mock_refuse(gpu, KVT_MOCK_alloc, 0);
	ck_assert_int_eq(kvt_arena_create_charged(gpu, &b, &plan, &arena), 0);
	ck_assert_uint_eq(b.used, 3072);
	kvt_arena_destroy(arena);
	ck_assert_uint_eq(b.used, 0);
	ck_assert_uint_eq(b.peak, 3072);
	gpu->ops->close(gpu);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("arena");
	TCase *t = tcase_create("arena");
	SRunner *r = srunner_create(s);
	int failed;

	tcase_set_timeout(t, 60);
	tcase_add_test(t, random_plans);
	tcase_add_test(t, search_finds);
	tcase_add_test(t, decoders);
	tcase_add_test(t, contents_survive);
	tcase_add_test(t, loop_keeps);
	tcase_add_test(t, refusals);
	tcase_add_test(t, budget);
	suite_add_tcase(s, t);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed != 0;
}
