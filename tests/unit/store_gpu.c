// SPDX-License-Identifier: MIT
/*
 * The gpu tier through its table alone, on a device whose memory the CPU cannot
 * touch: random work against the model, every call failing once, completion
 * late and out of order, bits flipped on the way.
 */
#include <check.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "gpu/mock.h"
#include "lib/rounds.h"
#include "lib/scratch.h"
#include "lib/store_model.h"

static const struct model_config config = { .frames = { 6, 2, 6, 64 }, .slots = 40 };

static struct kvt_gpu *open_mock(void)
{
	struct kvt_gpu *gpu;

	ck_assert_msg(!kvt_mock_open(16 << 20, &gpu), "%s", kvt_last_error());
	return gpu;
}

static void close_mock(struct kvt_gpu *gpu)
{
	ck_assert_str_eq(kvt_mock_fault(gpu), "");
	ck_assert_uint_eq(kvt_mock_alive(gpu), 0);
	gpu->ops->close(gpu);
}

START_TEST(serves_what_was_written)
{
	struct model_config c = config;
	struct kvt_stats st = KVT_INIT(st);
	struct model *m;

	c.gpu = open_mock();
	c.seed = 21 + (uint64_t)_i;
	if (_i) {
		kvt_mock_delay(c.gpu, _i == 1 ? 3 : UINT64_MAX);
		kvt_mock_reorder(c.gpu, 5);
	}
	ck_assert_msg(!model_create(&c, &m), "%s", kvt_last_error());
	ck_assert(!model_run(m, 1200));
	ck_assert(!model_verify(m));
	kvt_store_stats(model_store(m), &st);
	ck_assert_uint_gt(st.moves, 50);
	ck_assert_uint_gt(kvt_mock_count(c.gpu, KVT_MOCK_launch), 100);
	/* nothing is allocated on the device after the start */
	ck_assert_uint_eq(kvt_mock_count(c.gpu, KVT_MOCK_alloc), 3);
	model_destroy(m);
	close_mock(c.gpu);
}
END_TEST

/* The same on a real one, where there is one: frames of the default size, and one above the copy engine's threshold. */
START_TEST(serves_on_cuda)
{
	static const uint64_t block_bytes[] = { 4096, 65536, 2 << 20 };
	struct model_config c = config;
	struct kvt_stats st = KVT_INIT(st);
	struct model *m;
	int ret = kvt_gpu_cuda_open(0, &c.gpu);

	if (ret == -ENODEV) {
		printf("serves_on_cuda: skipped: %s\n", kvt_last_error());
		return;
	}
	ck_assert_msg(!ret, "%s", kvt_last_error());
	c.seed = 77;
	c.block_bytes = block_bytes[_i];
	ck_assert_msg(!model_create(&c, &m), "%s", kvt_last_error());
	ck_assert(!model_run(m, 1200));
	ck_assert(!model_verify(m));
	kvt_store_stats(model_store(m), &st);
	ck_assert_uint_gt(st.moves, 50);
	ck_assert_uint_eq(st.digest_errors, 0);
	model_destroy(m);
	c.gpu->ops->close(c.gpu);
}
END_TEST

/* A mock that takes itself for a GPU, so that ways are tried; some are slow. */
static const struct kvt_gpu_ops *quick;
static bool slow_kernel, slow_batch;

static int launch_slowly(struct kvt_gpu *gpu, kvt_kernel kernel, struct kvt_dim3 grid, struct kvt_dim3 block,
			 uint32_t shared_bytes, kvt_stream stream, void *const *args, uint32_t n_args)
{
	if (slow_kernel)
		usleep(30000);
	return quick->launch(gpu, kernel, grid, block, shared_bytes, stream, args, n_args);
}

static int batch_slowly(struct kvt_gpu *gpu, const uint64_t *dst, const uint64_t *src, uint64_t bytes, uint32_t n,
			kvt_stream stream)
{
	if (slow_batch)
		usleep(30000);
	return quick->copy_batch_async(gpu, dst, src, bytes, n, stream);
}

static uint64_t copies_launched(struct kvt_gpu *gpu)
{
	struct kvt_mock_record r;
	uint64_t n = 0;

	for (uint64_t i = 0; kvt_mock_log(gpu, i, &r); i++)
		n += r.call == KVT_MOCK_launch && !strcmp(r.function, "copy");
	return n;
}

/* Blocks move by what was faster when it was tried: batched copies, one copy each where there are none, a kernel. */
START_TEST(the_faster_way_is_taken)
{
	enum { BATCH, EACH, KERNEL };
	struct model_config c = config;
	struct kvt_stats st = KVT_INIT(st);
	struct kvt_device_rates rates;
	struct kvt_gpu_ops ops;
	struct model *m;
	bool batches, launches;

	c.gpu = open_mock();
	c.gpu->sm = 90;
	quick = c.gpu->ops;
	ops = *quick;
	ops.launch = launch_slowly;
	ops.copy_batch_async = batch_slowly;
	c.gpu->ops = &ops;
	slow_kernel = _i != KERNEL;
	slow_batch = _i == KERNEL;
	if (_i == EACH)
		kvt_mock_refuse(c.gpu, KVT_MOCK_copy_batch_async, -ENOSYS);
	ck_assert_msg(!model_create(&c, &m), "%s", kvt_last_error());
	kvt_store_gpu_rates(model_store(m), &rates);
	ck_assert_int_eq(rates.kernel[0], _i == KERNEL);
	ck_assert_int_eq(rates.kernel[1], _i == KERNEL);
	slow_kernel = slow_batch = false;
	kvt_mock_reset(c.gpu);
	ck_assert(!model_run(m, 300));
	ck_assert(!model_verify(m));
	kvt_store_stats(model_store(m), &st);
	ck_assert_uint_gt(st.moves, 10);
	ck_assert_uint_eq(st.digest_errors, 0);
	batches = kvt_mock_count(c.gpu, KVT_MOCK_copy_batch_async);
	launches = copies_launched(c.gpu);
	ck_assert_int_eq(launches, _i == KERNEL);
	ck_assert_int_eq(batches, _i != KERNEL); /* or asked for, where there are none */
	model_destroy(m);
	close_mock(c.gpu);
}
END_TEST

START_TEST(each_call_fails_once)
{
	uint64_t step = test_rounds(3, 31, 31), at;
	bool failed = true, early;

	for (at = 1; failed; at += step) {
		struct model_config c = config;
		struct model *m;

		c.gpu = open_mock();
		c.seed = at;
		c.errors_allowed = true;
		kvt_mock_fail_at(c.gpu, at, at % 2 ? -EIO : -ENOMEM);
		early = true;
		if (!model_create(&c, &m)) {
			ck_assert_msg(!model_run(m, 60), "call %llu", (unsigned long long)at);
			ck_assert_msg(!model_verify(m), "call %llu", (unsigned long long)at);
			early = kvt_mock_failed(c.gpu);
			model_destroy(m);
		}
		failed = kvt_mock_failed(c.gpu);
		if (failed && !early) /* giving something back has failed: the device has it still */
			c.gpu->ops->close(c.gpu);
		else
			close_mock(c.gpu);
	}
	ck_assert_uint_gt(at, 60);
}
END_TEST

/* The device goes at any call: what was not there alone is still served, and work goes on without it. */
START_TEST(goes_on_without_the_device)
{
	uint64_t step = test_rounds(17, 97, 97), at, dropped = 0, runs = 0;
	struct kvt_stats st = KVT_INIT(st);
	bool failed = true;

	/* the first calls are those of the store's creation, which fails with them */
	for (at = 10; failed; at += step) {
		struct model_config c = config;
		struct model *m;

		c.gpu = open_mock();
		c.seed = at;
		c.errors_allowed = true;
		ck_assert_msg(!model_create(&c, &m), "%s", kvt_last_error());
		kvt_mock_fail_at(c.gpu, at, -ENODEV);
		ck_assert_msg(!model_run(m, 120), "call %llu", (unsigned long long)at);
		failed = kvt_mock_failed(c.gpu);
		ck_assert_msg(!model_run(m, 60), "call %llu", (unsigned long long)at);
		ck_assert_msg(!model_verify(m), "call %llu", (unsigned long long)at);
		kvt_store_stats(model_store(m), &st);
		ck_assert_msg(!kvt_store_check(model_store(m)), "%s", kvt_last_error());
		if (failed) {
			ck_assert_uint_eq(st.gpu_lost, 1);
			ck_assert_uint_eq(st.tier[KVT_TIER_GPU].blocks, 0);
			dropped += st.gpu_dropped;
			runs++;
		}
		model_destroy(m);
		close_mock(c.gpu);
	}
	ck_assert_uint_gt(runs * step, 85);
	ck_assert_uint_gt(dropped, runs);
}
END_TEST

#define FEW_BYTES { { .limit = 1 << 20 }, { .limit = 1 << 20 }, { .limit = 8 << 20 }, { .limit = 1 << 20 } }

/* A store of a few blocks on the mock, to be created; its gpu and host are the caller's to close. */
static void few_frames(struct kvt_store_params *p, struct kvt_budget *budget, struct kvt_plane_geom *planes)
{
	struct kvt_host_params hp = { .kind = KVT_HOST_USER, .depth = 8, .frame_bytes = 4096, .budget = &budget[KVT_TIER_RAM] };

	model_planes(planes, 4096);
	*p = (struct kvt_store_params){ .n_planes = MODEL_PLANES, .planes = planes, .block_bytes = 4096, .budget = budget,
					.frames = { 4, 0, 4, 16 }, .headroom = 2, .disk_dir = test_scratch(), .numa_node = -1,
					.policy = &kvt_policy_lru, .gpu = open_mock() };
	ck_assert(!kvt_host_open(&hp, &p->host));
}

/* A block whose copy is on disk outlives the device; one that was on the device alone is an error, never other bytes. */
START_TEST(the_disk_has_what_the_device_had)
{
	struct kvt_budget budget[KVT_TIERS] = FEW_BYTES;
	struct kvt_plane_geom planes[MODEL_PLANES];
	struct kvt_store_params p;
	uint8_t rows[4096];
	struct kvt_rows src = { .data = rows, .type = KVT_ENCODED };
	struct kvt_stats st = KVT_INIT(st);
	struct kvt_store *store;
	struct kvt_view view;
	uint32_t block[2];

	few_frames(&p, budget, planes);
	src.stride = planes[0].row_bytes;
	for (size_t i = 0; i < sizeof(rows); i++)
		rows[i] = (uint8_t)(i * 11);
	ck_assert_msg(!kvt_store_create(&p, &store), "%s", kvt_last_error());
	for (int i = 0; i < 2; i++) {
		ck_assert(!kvt_store_alloc(store, 0, &block[i]));
		ck_assert(!kvt_store_write(store, block[i], 0, 16, &src));
		if (!i)
			ck_assert(!kvt_store_flush(store));
	}
	kvt_store_stats(store, &st);
	ck_assert_uint_eq(st.tier[KVT_TIER_GPU].blocks, 2);
	kvt_mock_fail_at(p.gpu, 1, -ENODEV);
	kvt_store_borrow_begin(store, block, 1);
	ck_assert_msg(!kvt_store_borrow_wait(store, block, 1, &view), "%s", kvt_last_error());
	ck_assert(!memcmp(view.data, rows, 4096));
	kvt_store_return(store, block, 1);
	kvt_store_borrow_begin(store, block + 1, 1);
	ck_assert_int_eq(kvt_store_borrow_wait(store, block + 1, 1, &view), -EBADMSG);
	ck_assert_msg(!kvt_store_write(store, block[1], 0, 16, &src), "%s", kvt_last_error());
	ck_assert_int_eq(kvt_store_move(store, block, 2, KVT_TIER_GPU), 0);
	kvt_store_stats(store, &st);
	ck_assert_uint_eq(st.gpu_lost, 1);
	ck_assert_uint_eq(st.gpu_dropped, 2);
	ck_assert_uint_eq(st.blocks_lost, 1);
	ck_assert_msg(!kvt_store_check(store), "%s", kvt_last_error());
	for (int i = 0; i < 2; i++)
		kvt_store_put(store, block[i]);
	kvt_store_destroy(store);
	kvt_host_close(p.host);
	close_mock(p.gpu);
}
END_TEST

/* A bit flips while a block moves up, down or to the disk: the move fails or is done again, and the bytes are right. */
START_TEST(flipped_on_the_way)
{
	static const enum kvt_tier to[] = { KVT_TIER_GPU, KVT_TIER_RAM, KVT_TIER_DISK };
	struct kvt_budget budget[KVT_TIERS] = FEW_BYTES;
	struct kvt_plane_geom planes[MODEL_PLANES];
	struct kvt_store_params p;
	uint8_t rows[4096], wrong = 0;
	struct kvt_rows src = { .data = rows, .type = KVT_ENCODED };
	struct kvt_stats st = KVT_INIT(st);
	struct kvt_view view;
	uint32_t block;
	int64_t ret;

	few_frames(&p, budget, planes);
	src.stride = planes[0].row_bytes;
	for (size_t i = 0; i < sizeof(rows); i++)
		rows[i] = (uint8_t)(i * 7 + _i);
	for (uint64_t nth = 1; nth < 4; nth++) {
		struct kvt_store *store;

		ck_assert_msg(!kvt_store_create(&p, &store), "%s", kvt_last_error());
		ck_assert(!kvt_store_alloc(store, 0, &block));
		ck_assert(!kvt_store_write(store, block, 0, 16, &src)); /* into a gpu frame: the fastest */
		if (to[_i] == KVT_TIER_GPU)
			ck_assert_int_eq(kvt_store_move(store, &block, 1, KVT_TIER_RAM), 1);
		kvt_mock_flip(p.gpu, nth, 4096 * 3 + nth);
		ret = kvt_store_move(store, &block, 1, to[_i]);
		ck_assert_msg(ret == 1 || ret == 0 || ret == -EBADMSG, "%lld", (long long)ret);
		kvt_mock_flip(p.gpu, 0, 0);
		kvt_store_borrow_begin(store, &block, 1);
		ret = kvt_store_borrow_wait(store, &block, 1, &view);
		kvt_store_stats(store, &st);
		ck_assert_msg(!ret, "the block is lost, though its source was whole: %s", kvt_last_error());
		ck_assert(!memcmp(view.data, rows, 4096));
		kvt_store_return(store, &block, 1);
		wrong += st.digest_errors > 0;
		ck_assert_msg(!kvt_store_check(store), "%s", kvt_last_error());
		kvt_store_put(store, block);
		kvt_store_destroy(store);
	}
	ck_assert_uint_gt(wrong, 0);
	kvt_host_close(p.host);
	close_mock(p.gpu);
}
END_TEST

/* ---- going down ---- */

/* Blocks of 16 rows that say who they are, in a store with these frames; without disk slots, none can ever be written. */
struct steps {
	struct kvt_budget budget[KVT_TIERS];
	struct kvt_plane_geom planes[MODEL_PLANES];
	struct kvt_store_params p;
	struct kvt_store *store;
	uint32_t block[24], n;
};

static void steps_open(struct steps *s, uint32_t gpu, uint32_t pinned, uint32_t ram, uint32_t disk,
		       const struct kvt_policy_ops *policy)
{
	struct kvt_budget few[KVT_TIERS] = FEW_BYTES;

	memset(s, 0, sizeof(*s));
	memcpy(s->budget, few, sizeof(few));
	few_frames(&s->p, s->budget, s->planes);
	memcpy(s->p.frames, (uint32_t[KVT_TIERS]){ gpu, pinned, ram, disk }, sizeof(s->p.frames));
	s->p.headroom = disk ? 2 : 0;
	s->p.policy = policy;
	s->p.writeback_bytes_per_s = 1; /* only for who waits */
	ck_assert_msg(!kvt_store_create(&s->p, &s->store), "%s", kvt_last_error());
}

static void steps_close(struct steps *s)
{
	ck_assert_msg(!kvt_store_check(s->store), "%s", kvt_last_error());
	for (uint32_t i = 0; i < s->n; i++)
		kvt_store_put(s->store, s->block[i]);
	kvt_store_destroy(s->store);
	kvt_host_close(s->p.host);
	close_mock(s->p.gpu);
}

static void steps_write(struct steps *s, uint32_t n)
{
	uint8_t rows[4096];
	struct kvt_rows src = { .data = rows, .type = KVT_ENCODED, .stride = s->planes[0].row_bytes };

	for (; n--; s->n++) {
		memset(rows, (int)(s->n + 1), sizeof(rows));
		ck_assert(!kvt_store_alloc(s->store, 0, &s->block[s->n]));
		ck_assert_msg(!kvt_store_write(s->store, s->block[s->n], 0, 16, &src), "block %u: %s", s->n, kvt_last_error());
	}
}

static void steps_verify(struct steps *s)
{
	struct kvt_view view;

	for (uint32_t i = 0; i < s->n; i++) {
		kvt_store_borrow_begin(s->store, &s->block[i], 1);
		ck_assert_msg(!kvt_store_borrow_wait(s->store, &s->block[i], 1, &view), "block %u: %s", i, kvt_last_error());
		ck_assert_uint_eq(view.data[5], i + 1);
		kvt_store_return(s->store, &s->block[i], 1);
	}
}

static struct kvt_stats steps_stats(struct steps *s)
{
	struct kvt_stats st = KVT_INIT(st);

	kvt_store_stats(s->store, &st);
	return st;
}

static enum kvt_tier steps_tier(struct steps *s, uint32_t i)
{
	enum kvt_tier tier;

	kvt_store_frame(s->store, s->block[i], &tier);
	return tier;
}

/* Who makes room in the gpu tier goes to pinned memory, who makes room there to RAM; nothing is read from disk again. */
START_TEST(each_tier_gives_to_the_next)
{
	struct kvt_stats before, st;
	struct steps s;

	steps_open(&s, 4, 4, 4, 16, &kvt_policy_lru);
	steps_write(&s, 11); /* 0-3 on the gpu, 4-7 pinned, 8-10 in RAM, where one frame is left */
	ck_assert(!kvt_store_flush(s.store));
	before = steps_stats(&s);
	ck_assert_int_eq(kvt_store_move(s.store, &s.block[10], 1, KVT_TIER_GPU), 1);
	st = steps_stats(&s);
	ck_assert_int_eq(steps_tier(&s, 10), KVT_TIER_GPU);
	ck_assert_int_eq(steps_tier(&s, 0), KVT_TIER_PINNED);
	ck_assert_int_eq(steps_tier(&s, 4), KVT_TIER_RAM);
	ck_assert_uint_eq(st.demotions - before.demotions, 2);
	ck_assert_uint_eq(st.evictions, before.evictions);
	/* all full: the one that was used longest ago leaves memory, where it is in RAM, and the others move up behind it */
	steps_write(&s, 1);
	ck_assert(!kvt_store_flush(s.store));
	ck_assert_int_eq(steps_tier(&s, 11), KVT_TIER_RAM);
	kvt_store_borrow_begin(s.store, s.block, 4); /* so that it is 4, in RAM */
	kvt_store_borrow_drop(s.store, s.block, 4);
	before = steps_stats(&s);
	ck_assert_int_eq(kvt_store_move(s.store, &s.block[9], 1, KVT_TIER_GPU), 1);
	st = steps_stats(&s);
	ck_assert_int_eq(steps_tier(&s, 4), KVT_TIER_DISK);
	ck_assert_uint_eq(st.evictions - before.evictions, 1);
	ck_assert_uint_eq(st.demotions - before.demotions, 2);
	ck_assert_uint_eq(st.disk_reads, 0);
	ck_assert_uint_eq(st.tier[KVT_TIER_GPU].blocks, 4);
	ck_assert_uint_eq(st.tier[KVT_TIER_PINNED].blocks, 4);
	steps_verify(&s);
	steps_close(&s);
}
END_TEST

/* Without a disk tier what is written nowhere else goes down as well, and nothing is lost. */
START_TEST(goes_down_without_a_disk)
{
	const struct kvt_policy_ops *const policies[] = { &kvt_policy_lru, &kvt_policy_s3fifo, &kvt_policy_scan,
							  &kvt_policy_auto };
	uint32_t stay = 0;
	struct kvt_stats st;
	struct steps s;

	steps_open(&s, 4, 3, 5, 0, policies[_i]);
	steps_write(&s, 11);
	for (uint32_t i = 0; i < 60; i++)
		ck_assert_int_eq(kvt_store_move(s.store, &s.block[i * 7 % 11], 1, KVT_TIER_GPU), 1);
	st = steps_stats(&s);
	ck_assert_uint_gt(st.demotions, 30);
	ck_assert_uint_eq(st.evictions, 0);
	ck_assert_uint_eq(st.blocks_lost, 0);
	steps_verify(&s);
	/* and where there is no room anywhere, a block stays where it is */
	steps_write(&s, 1);
	while (stay < s.n && steps_tier(&s, stay) == KVT_TIER_GPU)
		stay++;
	ck_assert_int_eq(kvt_store_move(s.store, &s.block[stay], 1, KVT_TIER_GPU), 0);
	ck_assert_int_eq(kvt_store_flush(s.store), -ENOSPC);
	kvt_store_put(s.store, s.block[--s.n]);
	steps_verify(&s);
	steps_close(&s);
}
END_TEST

#define MOVERS 2

struct mover {
	struct steps *s;
	const uint32_t *block;
	enum kvt_tier tier;
	_Atomic bool *stop;
	bool failed;
};

static void *move_on_and_on(void *arg)
{
	struct mover *m = arg;

	while (!*m->stop && !m->failed)
		m->failed = kvt_store_move(m->s->store, m->block, 12, m->tier) < 0 ||
			    kvt_store_move(m->s->store, m->block, 12, KVT_TIER_DISK) < 0;
	return NULL;
}

/* More is moved than there are frames, to a tier that takes none of it, or some: who writes something else finds a frame. */
START_TEST(a_move_takes_no_frame_from_others)
{
	static const struct {
		uint32_t gpu, pinned, ram;
		enum kvt_tier tier;
	} to[] = { { 0, 4, 6, KVT_TIER_GPU }, { 2, 4, 6, KVT_TIER_GPU },
		   { 0, 4, 6, KVT_TIER_RAM }, { 0, 0, 10, KVT_TIER_RAM } };
	uint32_t rounds = test_rounds(1500, 300, 300), failed = 0, block;
	uint8_t rows[4096] = { 1 };
	struct kvt_rows src = { .data = rows, .type = KVT_ENCODED };
	struct mover m[MOVERS];
	_Atomic bool stop = false;
	pthread_t thread[MOVERS];
	char why[400] = "";
	struct steps s;

	steps_open(&s, to[_i].gpu, to[_i].pinned, to[_i].ram, 64, &kvt_policy_lru);
	src.stride = s.planes[0].row_bytes;
	steps_write(&s, 24);
	for (int i = 0; i < MOVERS; i++) {
		m[i] = (struct mover){ .s = &s, .block = &s.block[12 * i], .tier = to[_i].tier, .stop = &stop };
		ck_assert(!pthread_create(&thread[i], NULL, move_on_and_on, &m[i]));
	}
	for (uint32_t i = 0; i < rounds; i++) {
		ck_assert(!kvt_store_alloc(s.store, 0, &block));
		if (kvt_store_write(s.store, block, 0, 16, &src) && !failed++)
			snprintf(why, sizeof(why), "%s", kvt_last_error());
		kvt_store_put(s.store, block);
	}
	stop = true;
	for (int i = 0; i < MOVERS; i++) {
		pthread_join(thread[i], NULL);
		ck_assert(!m[i].failed);
	}
	ck_assert_msg(!failed, "%u of %u writes: %s", failed, rounds, why);
	steps_verify(&s);
	steps_close(&s);
}
END_TEST

/* What is not written yet goes down no further than leaves the frames that reading needs. */
START_TEST(headroom_is_not_eaten)
{
	uint32_t dirty = 0;
	struct steps s;

	steps_open(&s, 6, 0, 6, 32, &kvt_policy_lru);
	steps_write(&s, 4);
	ck_assert(!kvt_store_flush(s.store));
	ck_assert_int_eq(kvt_store_move(s.store, s.block, 4, KVT_TIER_DISK), 4);
	steps_write(&s, 10); /* six on the gpu, and four of the six host frames: as many as may be dirty */
	for (uint32_t i = 0; i < 4; i++)
		kvt_store_move(s.store, &s.block[i], 1, KVT_TIER_GPU);
	for (uint32_t i = 4; i < 14; i++)
		dirty += steps_tier(&s, i) == KVT_TIER_RAM && kvt_store_slot(s.store, s.block[i]) == KVT_NO_BLOCK;
	ck_assert_msg(dirty <= 4, "%u of 6 frames hold what is not written, and 2 are for reading", dirty);
	steps_verify(&s);
	steps_close(&s);
}
END_TEST

/* One block more than the gpu tier holds, each used in turn by kernels: most stay, where LRU moves every one each time. */
static double moves_a_round(const struct kvt_policy_ops *policy)
{
	uint64_t before = 0;
	struct steps s;
	uint64_t at;

	steps_open(&s, 8, 0, 8, 0, policy);
	steps_write(&s, 9);
	for (uint32_t round = 0; round < 60; round++) {
		if (round == 40)
			before = steps_stats(&s).moves;
		for (uint32_t i = 0; i < 9; i++) {
			ck_assert_msg(!kvt_store_pin(s.store, &s.block[i], 1, &at), "%s", kvt_last_error());
			kvt_store_unpin(s.store, &s.block[i], 1);
		}
	}
	before = steps_stats(&s).moves - before;
	steps_verify(&s);
	steps_close(&s);
	return (double)before / 20;
}

START_TEST(no_thrash_at_the_edge)
{
	double lru = moves_a_round(&kvt_policy_lru), scan = moves_a_round(&kvt_policy_scan);
	double learned = moves_a_round(&kvt_policy_auto);

	printf("9 blocks in 8 frames: moves a round: lru %.1f, scan %.1f, auto %.1f\n", lru, scan, learned);
	ck_assert_msg(lru > 16, "LRU is better than it was thought to be");
	ck_assert(scan <= 4.5);
	ck_assert(learned <= 4.5);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("store_gpu");
	TCase *t = tcase_create("mock");
	SRunner *r = srunner_create(s);
	int failed;

	tcase_set_timeout(t, 300);
	tcase_add_loop_test(t, serves_what_was_written, 0, 3);
	tcase_add_loop_test(t, serves_on_cuda, 0, 3);
	tcase_add_loop_test(t, the_faster_way_is_taken, 0, 3);
	tcase_add_test(t, each_call_fails_once);
	tcase_add_test(t, goes_on_without_the_device);
	tcase_add_test(t, the_disk_has_what_the_device_had);
	tcase_add_loop_test(t, flipped_on_the_way, 0, 3);
	tcase_add_test(t, each_tier_gives_to_the_next);
	tcase_add_loop_test(t, goes_down_without_a_disk, 0, 4);
	tcase_add_loop_test(t, a_move_takes_no_frame_from_others, 0, 4);
	tcase_add_test(t, headroom_is_not_eaten);
	tcase_add_test(t, no_thrash_at_the_edge);
	suite_add_tcase(s, t);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
