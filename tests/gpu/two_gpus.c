// SPDX-License-Identifier: MIT
/*
 * Two GPUs in one process, each with a cache of its own: they work side by side
 * from threads, or by turns from one, give the same bits, know their own memory
 * alone, and when one is lost nothing is given out that is wrong. Two mocks
 * everywhere, of which one goes on without the other.
 */
#include <check.h>
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "cache/batch.h"
#include "codec/codec.h"
#include "gpu/kernels.h"
#include "gpu/mock.h"
#include "lib/gpu_backends.h"
#include "lib/rounds.h"

#define OK(call) ck_assert_msg((call) == 0, "%s: %s", #call, kvt_last_error())

#define HEADS 2
#define DIM 64
#define Q_HEADS 6
#define ELEMS (HEADS * DIM)
#define Q_ELEMS (Q_HEADS * DIM)
#define BLOCK 4096
#define LEN 200
#define CHUNK 64
#define BAD 0x10 /* no address of any device */

enum kind { MOCKS, GPUS };

static int n_kinds;

struct side {
	uint32_t device;
	struct kvt_gpu *gpu;
	struct kvt_cache *cache;
	struct kvt_batch *batch;
	kvt_dptr rows[2], q, out; /* of K and V; LEN of each */
	struct kvt_seq *seq;
	float row[LEN * ELEMS], query[LEN * Q_ELEMS];
	float attended[LEN * Q_ELEMS];
	pthread_barrier_t *start;
	_Atomic bool *stop;
	uint64_t rounds;
	int failed; /* in a thread, */
	char why[256]; /* and why */
};

/* Values in [-1, 1) that depend on @what alone. */
static void fill(float *f, uint32_t n, uint64_t what)
{
	uint64_t z = what * 0x9E3779B97F4A7C15ull + 1;

	for (uint32_t i = 0; i < n; i++) {
		z = z * 6364136223846793005ull + 1442695040888963407ull;
		f[i] = (float)(int32_t)(z >> 33) / 1073741824.0f - 1.0f;
	}
}

/* Two thirds of the sequence's blocks find room in GPU memory, the others are read where they are pinned. */
static void open_side(struct side *s, enum kind kind, uint32_t device)
{
	struct kvt_plane_params planes[2];
	struct kvt_cache_params p = KVT_INIT(p);
	struct kvt_batch_params b = KVT_INIT(b);

	for (uint32_t i = 0; i < 2; i++)
		planes[i] = (struct kvt_plane_params){ .size = sizeof(planes[i]), .codec = KVT_F16, .heads = HEADS,
						       .head_dim = DIM };
	p.planes = planes;
	p.n_planes = 2;
	p.block_bytes = BLOCK;
	p.gpu_scratch_bytes = 3 << 20;
	p.gpu_bytes = p.gpu_scratch_bytes + (280 << 10) + 18 * BLOCK;
	p.pinned_bytes = 40 * BLOCK;
	p.ram_bytes = 6 << 20;
	p.max_tokens = LEN;
	p.max_seqs = 2;
	p.threads = 1;
	p.max_query_heads = Q_HEADS;
	p.backend = KVT_BACKEND_CUDA;
	p.gpu_device = device;
	b.max_seqs = 1;
	b.max_tokens = CHUNK;
	*s = (struct side){ .device = device };
	if (kind == MOCKS) {
		OK(kvt_mock_open(16 << 20, &s->gpu));
		OK(kvt_cache_create_on(&p, NULL, s->gpu, &s->cache));
	} else {
		OK(kvt_cache_create(&p, &s->cache));
	}
	OK(kvt_batch_create(s->cache, &b, &s->batch));
	s->gpu = kvt_batch_gpu(s->batch);
	ck_assert_uint_eq(s->gpu->device, kind == MOCKS ? 0 : device);
	for (uint32_t i = 0; i < 2; i++)
		OK(s->gpu->ops->alloc(s->gpu, CHUNK * ELEMS * 4, &s->rows[i]));
	OK(s->gpu->ops->alloc(s->gpu, CHUNK * Q_ELEMS * 4, &s->q));
	OK(s->gpu->ops->alloc(s->gpu, CHUNK * Q_ELEMS * 4, &s->out));
}

static void close_side(struct side *s, enum kind kind)
{
	const kvt_dptr all[] = { s->rows[0], s->rows[1], s->q, s->out };

	for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
		s->gpu->ops->free(s->gpu, all[i]);
	kvt_batch_destroy(s->batch);
	kvt_cache_destroy(s->cache);
	if (kind == MOCKS)
		s->gpu->ops->close(s->gpu);
}

/* The sequence's next @n tokens, and their attention. */
static int go_on(struct side *s, uint32_t n)
{
	const uint32_t at = kvt_seq_len(s->seq), counts[1] = { n };
	struct kvt_rows src[2] = { { .data = (void *)(uintptr_t)s->rows[0], .type = KVT_F32 },
				   { .data = (void *)(uintptr_t)s->rows[1], .type = KVT_F32 } };
	struct kvt_batch_attn io = KVT_INIT(io);
	struct kvt_attn attn = KVT_INIT(attn);
	int ret = kvt_batch_step(s->batch, counts, NULL);

	for (uint32_t plane = 0; plane < 2 && !ret; plane++) {
		for (uint32_t t = 0; t < n; t++)
			fill(s->row + t * ELEMS, ELEMS, 2 * (at + t) + plane);
		ret = s->gpu->ops->copy_h2d(s->gpu, s->rows[plane], s->row, n * ELEMS * 4ull);
	}
	for (uint32_t t = 0; t < n; t++)
		fill(s->query + t * Q_ELEMS, Q_ELEMS, 1000000 + at + t);
	if (!ret)
		ret = s->gpu->ops->copy_h2d(s->gpu, s->q, s->query, n * Q_ELEMS * 4ull);
	if (!ret)
		ret = kvt_batch_write_kv(s->batch, 0, &src[0], 1, &src[1]);
	attn.flags = KVT_ATTN_CAUSAL;
	attn.n_heads = Q_HEADS;
	attn.v_plane = 1;
	io.q = s->q;
	io.out = s->out;
	if (!ret)
		ret = kvt_batch_attend(s->batch, &attn, &io);
	if (!ret)
		ret = kvt_batch_wait(s->batch);
	return ret ? ret : s->gpu->ops->copy_d2h(s->gpu, s->attended + at * Q_ELEMS, s->out, n * Q_ELEMS * 4ull);
}

/* -EILSEQ: a row is not what was written. */
static int check_rows(struct side *s)
{
	uint8_t want[ELEMS * 2], got[ELEMS * 2];
	struct kvt_rows dst = { .data = got, .type = KVT_ENCODED };
	int ret = 0;

	for (uint32_t plane = 0; plane < 2; plane++)
		for (uint32_t t = 0; t < kvt_seq_len(s->seq) && !ret; t++) {
			fill(s->row, ELEMS, 2 * t + plane);
			kvt_codec_convert(want, KVT_F16, s->row, KVT_F32, ELEMS);
			ret = kvt_seq_read(s->seq, plane, t, 1, &dst);
			if (!ret && memcmp(want, got, sizeof(want)))
				ret = kvt_fail(-EILSEQ, "plane %u, row %u", plane, t);
		}
	return ret;
}

static int move_to(struct side *s, enum kvt_tier tier)
{
	int64_t moved = kvt_seq_move(s->seq, tier);

	if (!moved)
		return kvt_fail(-ENODATA, "nothing moved to tier %d", (int)tier);
	return moved < 0 ? (int)moved : 0;
}

/* A prompt in chunks and some tokens one by one; its blocks go away and come back between. It stays, with its results. */
static int work(struct side *s)
{
	int ret = 0;

	if (s->seq)
		kvt_seq_free(s->seq);
	s->seq = NULL;
	ret = kvt_seq_create(s->cache, &s->seq);
	for (uint32_t half = 1; half <= 2 && !ret; half++) {
		ret = kvt_batch_attach(s->batch, &s->seq, 1);
		for (uint32_t n; !ret && (n = half * LEN / 2 - kvt_seq_len(s->seq));)
			ret = go_on(s, n > CHUNK ? CHUNK : n > 4 ? n - 4 : 1);
		kvt_batch_detach(s->batch);
		if (!ret)
			ret = check_rows(s);
		if (!ret)
			ret = move_to(s, KVT_TIER_RAM);
		if (!ret)
			ret = check_rows(s);
		if (!ret)
			ret = move_to(s, KVT_TIER_GPU);
	}
	return ret;
}

static void *run(void *arg)
{
	struct side *s = arg;
	float *first = malloc(sizeof(s->attended));
	int ret = first ? 0 : -ENOMEM;

	pthread_barrier_wait(s->start);
	for (s->rounds = 0; !ret && (s->rounds < 3 || (s->stop && !atomic_load(s->stop))); s->rounds++) {
		ret = work(s);
		if (!s->rounds && !ret)
			memcpy(first, s->attended, sizeof(s->attended));
		else if (!ret && memcmp(first, s->attended, sizeof(s->attended)))
			ret = kvt_fail(-EILSEQ, "other bits in round %llu", (unsigned long long)s->rounds);
	}
	s->failed = ret;
	if (ret)
		snprintf(s->why, sizeof(s->why), "device %u: error %d: %s", s->device, ret, kvt_last_error());
	free(first);
	return NULL;
}

static void undamaged(const struct side *s)
{
	struct kvt_stats st = KVT_INIT(st);

	OK(kvt_cache_stats(s->cache, &st));
	ck_assert_uint_eq(st.digest_errors, 0);
	ck_assert_uint_eq(st.blocks_lost, 0);
	ck_assert_uint_eq(st.gpu_lost, 0);
	ck_assert_uint_gt(st.moves, 0);
}

static struct side side[2];

START_TEST(same_bits_side_by_side)
{
	pthread_barrier_t start;
	pthread_t thread[2];
	bool some = false;

	pthread_barrier_init(&start, NULL, 2);
	for (uint32_t i = 0; i < 2; i++) {
		open_side(&side[i], (enum kind)_i, i);
		side[i].start = &start;
	}
	for (uint32_t i = 0; i < 2; i++)
		ck_assert_int_eq(pthread_create(&thread[i], NULL, run, &side[i]), 0);
	for (uint32_t i = 0; i < 2; i++)
		ck_assert_int_eq(pthread_join(thread[i], NULL), 0);
	for (uint32_t i = 0; i < 2; i++) {
		ck_assert_str_eq(side[i].why, "");
		undamaged(&side[i]);
	}
	for (uint32_t i = 0; i < LEN * Q_ELEMS; i++)
		some |= side[0].attended[i] != 0;
	ck_assert(some);
	ck_assert(!memcmp(side[0].attended, side[1].attended, sizeof(side[0].attended)));
	for (uint32_t i = 0; i < 2; i++)
		close_side(&side[i], (enum kind)_i);
	pthread_barrier_destroy(&start);
}
END_TEST

/* One thread, a token here and a token there: what is current is put back after each call. */
START_TEST(by_turns_from_one_thread)
{
	for (uint32_t i = 0; i < 2; i++) {
		open_side(&side[i], (enum kind)_i, i);
		OK(kvt_seq_create(side[i].cache, &side[i].seq));
		OK(kvt_batch_attach(side[i].batch, &side[i].seq, 1));
	}
	for (uint32_t n = 0; n < 60; n++)
		OK(go_on(&side[n % 3 == 0], 1));
	for (uint32_t n = 0; n < 20; n++)
		OK(go_on(&side[1], 1));
	ck_assert(!memcmp(side[0].attended, side[1].attended, sizeof(side[0].attended)));
	for (uint32_t i = 0; i < 2; i++) {
		kvt_batch_detach(side[i].batch);
		OK(check_rows(&side[i]));
		close_side(&side[i], (enum kind)_i);
	}
}
END_TEST

/* Memory, streams and events of one are none of the other's. */
START_TEST(each_knows_its_own_memory)
{
	uint8_t byte = 1;

	for (uint32_t i = 0; i < 2; i++)
		open_side(&side[i], (enum kind)_i, i);
	for (uint32_t i = 0; i < 2; i++) {
		struct kvt_gpu *gpu = side[i].gpu;
		kvt_dptr others = side[!i].q;

		ck_assert_int_eq(gpu->ops->copy_h2d(gpu, others, &byte, 1), -EINVAL);
		ck_assert_int_eq(gpu->ops->copy_d2h(gpu, &byte, others, 1), -EINVAL);
		ck_assert_int_eq(gpu->ops->copy_d2d(gpu, side[i].q, others, 1), -EINVAL);
		ck_assert_int_eq(gpu->ops->memset_async(gpu, others, 0, 1, 0), -EINVAL);
	}
	for (uint32_t i = 0; i < 2; i++)
		close_side(&side[i], (enum kind)_i);
}
END_TEST

/* By a kernel that writes where nothing is, */
static void fault(struct side *s)
{
	struct kvt_set_args args = { .words = BAD, .n = 1, .value = { 1 } };
	const struct kvt_dim3 grid = { 1, 1, 1 }, block = { KVT_SET_MAX, 1, 1 };
	void *list = &args;
	kvt_kernel set;

	OK(s->gpu->ops->kernel(s->gpu, "block", "set", &set));
	OK(s->gpu->ops->launch(s->gpu, set, grid, block, 0, 0, &list, 1));
}

/* or by somebody in the process who resets it. */
static void reset(const struct side *s)
{
	void *lib = dlopen("libcuda.so.1", RTLD_NOW);
	int (*get)(int *, int) = (int (*)(int *, int))dlsym(lib, "cuDeviceGet");
	int (*primary_reset)(int) = (int (*)(int))dlsym(lib, "cuDevicePrimaryCtxReset_v2");
	int device;

	ck_assert_int_eq(get(&device, (int)s->device), 0);
	ck_assert_int_eq(primary_reset(device), 0);
	dlclose(lib);
}

/* Its rows that were elsewhere are there, and nothing is computed: twice, for the first call may be the one that finds out. */
static void goes_on_without(struct side *s)
{
	struct kvt_stats st = KVT_INIT(st);

	for (int k = 0; k < 2; k++) {
		OK(check_rows(s));
		ck_assert_int_eq(kvt_batch_attach(s->batch, &s->seq, 1), -ENODEV);
	}
	OK(kvt_cache_stats(s->cache, &st));
	ck_assert_uint_eq(st.gpu_lost, 1);
	ck_assert_uint_eq(st.digest_errors, 0);
}

/* What may come of work on a lost device: errors, and nothing that is wrong. */
static void failed_as_it_may(const struct side *s, int err)
{
	struct kvt_stats st = KVT_INIT(st);

	ck_assert_msg(err == -ENODEV || err == -EBADMSG || err == -ENODATA, "error %d: %s", err, kvt_last_error());
	OK(kvt_cache_stats(s->cache, &st));
	ck_assert_uint_eq(st.gpu_lost, 1);
	ck_assert_uint_eq(st.digest_errors, 0);
}

START_TEST(lost_at_any_call)
{
	const uint64_t step = test_rounds(11, 41, 53);
	uint64_t runs = 0;
	int ret = -1;

	for (uint64_t at = 1; ret; at += step, runs++) {
		open_side(&side[0], MOCKS, 0);
		kvt_mock_fail_at(side[0].gpu, at, -ENODEV);
		ret = work(&side[0]);
		if (ret)
			failed_as_it_may(&side[0], ret);
		kvt_mock_fail_at(side[0].gpu, 0, 0);
		close_side(&side[0], MOCKS);
	}
	ck_assert_uint_gt(runs, 4);
}
END_TEST

/*
 * One goes while the other works. After a kernel's fault CUDA ends all that a process has on any GPU (13.0, two H200): an
 * error of the other's, too, and what it alone had is lost, but all that it gave out is right. Else it notices nothing.
 */
static void lose_one(enum kind kind, bool by_fault)
{
	_Atomic bool stop = false;
	pthread_barrier_t start;
	pthread_t thread;

	pthread_barrier_init(&start, NULL, 2);
	for (uint32_t i = 0; i < 2; i++) {
		open_side(&side[i], kind, i);
		OK(work(&side[i]));
		OK(move_to(&side[i], KVT_TIER_RAM));
	}
	side[0].start = &start;
	side[0].stop = &stop;
	ck_assert_int_eq(pthread_create(&thread, NULL, run, &side[0]), 0);
	pthread_barrier_wait(&start);
	if (kind == MOCKS)
		kvt_mock_fail_at(side[1].gpu, 1, -ENODEV);
	else if (by_fault)
		fault(&side[1]);
	else
		reset(&side[1]);
	ck_assert_int_eq(side[1].gpu->ops->stream_sync(side[1].gpu, 0), -ENODEV);
	goes_on_without(&side[1]);
	atomic_store(&stop, true);
	ck_assert_int_eq(pthread_join(thread, NULL), 0);
	if (side[0].failed && kind == GPUS && by_fault) {
		printf("%s\n", side[0].why);
		failed_as_it_may(&side[0], side[0].failed);
	} else {
		ck_assert_str_eq(side[0].why, "");
		undamaged(&side[0]);
		ck_assert(!memcmp(side[0].attended, side[1].attended, sizeof(side[0].attended)));
	}
	close_side(&side[1], kind);
	if (!by_fault) { /* it can be opened again, as messages say, and the other goes on */
		open_side(&side[1], kind, 1);
		for (uint32_t i = 0; i < 2; i++)
			OK(work(&side[i]));
		ck_assert(!memcmp(side[0].attended, side[1].attended, sizeof(side[0].attended)));
		close_side(&side[1], kind);
	}
	close_side(&side[0], kind);
	pthread_barrier_destroy(&start);
}

START_TEST(a_reset_one_leaves_the_other)
{
	lose_one((enum kind)_i, false);
}
END_TEST

START_TEST(a_fault_on_one_spoils_nothing)
{
	lose_one((enum kind)_i, true);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("two_gpus");
	TCase *t = tcase_create("two_gpus");
	SRunner *r = srunner_create(s);
	int failed;

	n_kinds = gpu_is_there(1) ? GPUS + 1 : GPUS;
	if (n_kinds == GPUS)
		printf("SKIP: two_gpus on CUDA: needs a second GPU\n");
	tcase_set_timeout(t, 120);
	tcase_add_loop_test(t, same_bits_side_by_side, 0, n_kinds);
	tcase_add_loop_test(t, by_turns_from_one_thread, 0, n_kinds);
	tcase_add_loop_test(t, each_knows_its_own_memory, 0, n_kinds);
	tcase_add_test(t, lost_at_any_call);
	tcase_add_loop_test(t, a_reset_one_leaves_the_other, 0, n_kinds);
	tcase_add_loop_test(t, a_fault_on_one_spoils_nothing, 0, n_kinds); /* the last: no process goes on after it */
	suite_add_tcase(s, t);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
