// SPDX-License-Identifier: MIT
/*
 * Threads on one store, each with blocks of its own, against models of their
 * own, while frames are fought over: nobody sees another's bytes, nobody
 * deadlocks, the books balance. Meant for ThreadSanitizer as well.
 */
#include <check.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "lib/host_fault.h"
#include "lib/rounds.h"
#include "lib/scratch.h"
#include "lib/store_model.h"

#define THREADS 6

struct job {
	struct model *model;
	uint64_t operations;
	int ret;
};

static void *work(void *arg)
{
	struct job *j = arg;

	j->ret = model_run(j->model, j->operations);
	if (!j->ret)
		j->ret = model_verify(j->model);
	return NULL;
}

static const struct {
	uint32_t frames[KVT_TIERS];
	uint32_t io;
	bool late; /* completions come late and out of order */
} shapes[] = {
	{ { 0, 8, 24, 200 }, KVT_IO_AUTO, false },
	{ { 0, 0, 32, 200 }, KVT_IO_THREADS, false },
	{ { 12, 4, 24, 240 }, KVT_IO_AUTO, false },
	{ { 0, 8, 24, 200 }, KVT_IO_AUTO, true },
};

START_TEST(each_sees_its_own)
{
	struct kvt_budget budget[KVT_TIERS] = { { .limit = UINT64_MAX }, { .limit = UINT64_MAX }, { .limit = UINT64_MAX },
						{ .limit = UINT64_MAX } };
	struct kvt_host_params hp = { .kind = KVT_HOST_USER, .io = shapes[_i].io, .depth = 64, .frame_bytes = 4096,
				      .budget = &budget[KVT_TIER_RAM] };
	struct kvt_fault fault = { .kind = KVT_FAULT_NONE, .delay = 3, .reorder = true, .seed = 5 };
	struct kvt_store_params p = { .n_planes = MODEL_PLANES, .block_bytes = 4096, .budget = budget,
				      .disk_dir = test_scratch(), .numa_node = -1, .policy = &kvt_policy_lru };
	uint64_t operations = test_rounds(2500, 400, 400);
	struct kvt_plane_geom planes[MODEL_PLANES];
	struct kvt_gpu *gpu = NULL;
	struct job jobs[THREADS];
	pthread_t threads[THREADS];
	struct kvt_host *inner;
	struct kvt_store *store;

	model_planes(planes, 4096);
	p.planes = planes;
	for (uint32_t t = 0; t < KVT_TIERS; t++)
		p.frames[t] = shapes[_i].frames[t];
	ck_assert_msg(!kvt_host_open(&hp, &inner), "%s", kvt_last_error());
	p.host = inner;
	if (shapes[_i].late)
		ck_assert(!kvt_host_fault_open(inner, &fault, &p.host));
	if (p.frames[KVT_TIER_GPU])
		ck_assert(!kvt_gpu_cpu_open(0, &gpu));
	p.gpu = gpu;
	ck_assert_msg(!kvt_store_create(&p, &store), "%s", kvt_last_error());
	for (int i = 0; i < THREADS; i++) {
		struct model_config c = { .store = store, .slots = 20, .seed = 100 + (uint64_t)i, };

		jobs[i] = (struct job){ .operations = operations };
		ck_assert(!model_create(&c, &jobs[i].model));
	}
	for (int i = 0; i < THREADS; i++)
		ck_assert(!pthread_create(&threads[i], NULL, work, &jobs[i]));
	for (int i = 0; i < THREADS; i++) {
		pthread_join(threads[i], NULL);
		ck_assert(!jobs[i].ret);
	}
	ck_assert_msg(!kvt_store_check(store), "%s", kvt_last_error());
	for (int i = 0; i < THREADS; i++)
		model_destroy(jobs[i].model);
	ck_assert_msg(!kvt_store_check(store), "%s", kvt_last_error());
	kvt_store_destroy(store);
	kvt_host_close(p.host);
	if (gpu)
		gpu->ops->close(gpu);
	for (int t = 0; t < KVT_TIERS; t++)
		ck_assert_uint_eq(budget[t].used, 0);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("store_crowd");
	TCase *t = tcase_create("threads");
	SRunner *r = srunner_create(s);
	int failed;

	tcase_set_timeout(t, 300);
	tcase_add_loop_test(t, each_sees_its_own, 0, sizeof(shapes) / sizeof(shapes[0]));
	suite_add_tcase(s, t);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
