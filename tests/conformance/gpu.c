// SPDX-License-Identifier: MIT
/*
 * What every GPU backend does, one behaviour a case. The mock runs twice: doing
 * its work at the call, and as late and as disordered as a device may.
 */
#include <check.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "codec/codec.h"
#include "gpu/gpu.h"
#include "gpu/kernels.h"
#include "gpu/mock.h"
#include "lib/gpu_backends.h"

#define MEMORY (4ull << 20)

static struct kvt_gpu *g;

/* What the backend under test is: its name, and how a test opens it. */
static int open_cpu(void)
{
	return kvt_gpu_cpu_open_limit(0, MEMORY, &g);
}

static int open_mock(void)
{
	return kvt_mock_open(MEMORY, &g);
}

static int open_late_mock(void)
{
	int err = kvt_mock_open(MEMORY, &g);

	if (!err) {
		kvt_mock_delay(g, UINT64_MAX);
		kvt_mock_reorder(g, 0x853c49e6748fea9bull);
	}
	return err;
}

static int open_slow_mock(void)
{
	int err = kvt_mock_open(MEMORY, &g);

	if (!err)
		kvt_mock_delay(g, 3);
	return err;
}

static int open_cuda(void)
{
	return kvt_gpu_cuda_open(0, &g);
}

static const struct backend {
	const char *name;
	int (*open)(void);
	bool mock;
} backends[] = {
	{ "cpu", open_cpu, false },
	{ "mock", open_mock, true },
	{ "mock, late and out of order", open_late_mock, true },
	{ "mock, three calls late", open_slow_mock, true },
	{ "cuda", open_cuda, false }, /* the last: not everywhere */
};

static int n_backends = (int)(sizeof(backends) / sizeof(backends[0]));

/* Opens the backend of this loop; CASE_END closes it and sees that nothing was done wrong on the way. */
#define CASE(name)                                                                                                     \
	static void body_##name(void);                                                                                 \
	START_TEST(name)                                                                                               \
	{                                                                                                              \
		ck_assert_msg(!backends[_i].open(), "backend %d: %s", _i, kvt_last_error());                             \
		body_##name();                                                                                         \
		if (backends[_i].mock)                                                                                 \
			ck_assert_str_eq(kvt_mock_fault(g), "");                                                       \
		g->ops->close(g);                                                                                      \
	}                                                                                                              \
	END_TEST                                                                                                       \
	static void body_##name(void)

#define OK(call) ck_assert_msg((call) == 0, "%s: %s", #call, kvt_last_error())
#define FAILS(err, call)                                                                                               \
	do {                                                                                                           \
		int got_ = (call);                                                                                     \
		ck_assert_msg(got_ == (err), "%s gave %d", #call, got_);                                               \
		ck_assert_msg(*kvt_last_error(), "%s said nothing", #call);                                            \
	} while (0)

static uint64_t rng = 0x2545F4914F6CDD1Dull;

static uint32_t rnd(void)
{
	rng ^= rng << 13;
	rng ^= rng >> 7;
	rng ^= rng << 17;
	return rng >> 32;
}

static void randomise(void *p, size_t bytes)
{
	for (size_t i = 0; i < bytes; i++)
		((uint8_t *)p)[i] = rnd();
}

static kvt_dptr device(uint64_t bytes)
{
	kvt_dptr p = 0;

	OK(g->ops->alloc(g, bytes, &p));
	return p;
}

/* Device memory holding @bytes of @src. */
static kvt_dptr upload(const void *src, uint64_t bytes)
{
	kvt_dptr p = device(bytes);

	OK(g->ops->copy_h2d(g, p, src, bytes));
	return p;
}

/* ---- memory ---- */

CASE(alloc_is_aligned_and_distinct)
{
	kvt_dptr p[32];

	for (int i = 0; i < 32; i++) {
		p[i] = device(i + 1);
		ck_assert_uint_ne(p[i], 0);
		ck_assert_uint_eq(p[i] % 256, 0);
		for (int k = 0; k < i; k++)
			ck_assert(p[i] != p[k]);
	}
	for (int i = 0; i < 32; i++)
		g->ops->free(g, p[i]);
	g->ops->free(g, 0);
}

CASE(alloc_keeps_within_memory)
{
	const bool others = !strcmp(g->ops->name, "cuda"); /* processes take and give back memory of the device's */
	uint64_t free_bytes, total, before;
	kvt_dptr p, q;

	OK(g->ops->mem_info(g, &before, &total));
	ck_assert_uint_ge(total, before);
	p = device(1 << 20);
	OK(g->ops->mem_info(g, &free_bytes, &total));
	ck_assert(others || free_bytes <= before - (1 << 20));
	FAILS(-ENOMEM, g->ops->alloc(g, total, &q));
	FAILS(-ENOMEM, g->ops->alloc(g, UINT64_MAX - 255, &q));
	FAILS(-EINVAL, g->ops->alloc(g, 0, &q));
	g->ops->free(g, p);
	OK(g->ops->mem_info(g, &free_bytes, &total));
	ck_assert(others || free_bytes == before);
}

CASE(freed_memory_is_used_again)
{
	for (int i = 0; i < 20; i++) {
		kvt_dptr p = device(MEMORY / 2), q = device(MEMORY / 4);

		g->ops->free(g, p);
		g->ops->free(g, q);
	}
}

/* Host memory is pinned here or there: it can be written, and knows its own. */
CASE(host_memory)
{
	void *p, *q;

	OK(g->ops->host_alloc(g, 10000, &p));
	memset(p, 1, 10000);
	FAILS(-EINVAL, g->ops->host_alloc(g, 0, &q));
	FAILS(-EEXIST, g->ops->host_register(g, (char *)p + 4096, 100));
	g->ops->host_free(g, p);
	g->ops->host_free(g, NULL);
}

CASE(host_register_keeps_books)
{
	char *p = aligned_alloc(4096, 4 * 4096);

	FAILS(-EINVAL, g->ops->host_register(g, NULL, 4096));
	FAILS(-EINVAL, g->ops->host_register(g, p, 0));
	FAILS(-EINVAL, g->ops->host_unregister(g, p));
	OK(g->ops->host_register(g, p + 4096, 2 * 4096));
	FAILS(-EEXIST, g->ops->host_register(g, p, 4 * 4096));
	FAILS(-EEXIST, g->ops->host_register(g, p + 2 * 4096, 2 * 4096));
	OK(g->ops->host_register(g, p, 4096));
	OK(g->ops->host_register(g, p + 3 * 4096, 4096));
	FAILS(-EINVAL, g->ops->host_unregister(g, p + 2 * 4096));
	OK(g->ops->host_unregister(g, p + 4096));
	FAILS(-EINVAL, g->ops->host_unregister(g, p + 4096));
	OK(g->ops->host_unregister(g, p));
	OK(g->ops->host_unregister(g, p + 3 * 4096));
	free(p);
}

/* ---- copies ---- */

static const uint64_t sizes[] = { 0, 1, 3, 255, 4096, 65537 };
#define MOST 65537

/* Every size at an odd offset, through each of the three directions: those bytes, and none beside them. */
CASE(sync_copies)
{
	static uint8_t in[MOST + 32], out[MOST + 32], poison[MOST + 32];
	kvt_dptr a = device(sizeof(in)), b = device(sizeof(in));

	memset(poison, 0xa5, sizeof(poison));
	for (size_t k = 0; k < sizeof(sizes) / sizeof(sizes[0]); k++) {
		uint64_t n = sizes[k];

		randomise(in, sizeof(in));
		memset(out, 0xa5, sizeof(out));
		OK(g->ops->copy_h2d(g, a, poison, sizeof(poison)));
		OK(g->ops->copy_h2d(g, b, poison, sizeof(poison)));
		OK(g->ops->copy_h2d(g, a + 7, in, n));
		OK(g->ops->copy_d2d(g, b + 9, a + 7, n));
		OK(g->ops->copy_d2h(g, out, b, sizeof(out)));
		ck_assert(!memcmp(out, poison, 9));
		ck_assert(!memcmp(out + 9, in, n));
		ck_assert(!memcmp(out + 9 + n, poison, sizeof(out) - 9 - n));
		memset(out, 0xa5, sizeof(out));
		OK(g->ops->copy_d2h(g, out + 5, a + 7, n));
		ck_assert(!memcmp(out, poison, 5));
		ck_assert(!memcmp(out + 5, in, n));
		ck_assert(!memcmp(out + 5 + n, poison, sizeof(out) - 5 - n));
	}
}

CASE(async_copies)
{
	static uint8_t in[MOST], out[MOST + 32], poison[MOST + 32];
	kvt_dptr a = device(sizeof(out)), b = device(sizeof(out));
	kvt_stream s;

	OK(g->ops->stream_create(g, &s));
	memset(poison, 0xa5, sizeof(poison));
	for (size_t k = 0; k < sizeof(sizes) / sizeof(sizes[0]); k++) {
		uint64_t n = sizes[k];

		randomise(in, sizeof(in));
		memset(out, 0, sizeof(out));
		OK(g->ops->memset_async(g, b, 0xa5, sizeof(out), s));
		OK(g->ops->copy_h2d_async(g, a + 7, in, n, s));
		OK(g->ops->copy_d2d_async(g, b + 9, a + 7, n, s));
		OK(g->ops->copy_d2h_async(g, out, b, sizeof(out), s));
		OK(g->ops->stream_sync(g, s));
		ck_assert(!memcmp(out, poison, 9));
		ck_assert(!memcmp(out + 9, in, n));
		ck_assert(!memcmp(out + 9 + n, poison, sizeof(out) - 9 - n));
	}
	g->ops->stream_destroy(g, s);
}

CASE(copies_outside_memory_are_refused)
{
	uint8_t host[512] = { 0 };
	kvt_dptr a = device(256), b = device(256);

	FAILS(-EINVAL, g->ops->copy_h2d(g, a, host, 257));
	FAILS(-EINVAL, g->ops->copy_h2d(g, a + 1, host, 256));
	FAILS(-EINVAL, g->ops->copy_h2d(g, a - 1, host, 2));
	FAILS(-EINVAL, g->ops->copy_h2d(g, 0, host, 1));
	FAILS(-EINVAL, g->ops->copy_d2h(g, host, a, 257));
	FAILS(-EINVAL, g->ops->copy_d2h(g, host, a, UINT64_MAX));
	FAILS(-EINVAL, g->ops->copy_d2d(g, a, b, 257));
	FAILS(-EINVAL, g->ops->copy_d2d_async(g, a, b + 1, 256, 0));
	FAILS(-EINVAL, g->ops->memset_async(g, a, 0, 257, 0));
	FAILS(-EINVAL, g->ops->copy_2d_async(g, a, 64, b, 65, 64, 4, 0));
	FAILS(-EINVAL, g->ops->copy_2d_async(g, a, 32, b, 64, 33, 2, 0));
}

/* Rows of one pitch to rows of another; what lies between rows stays. */
CASE(copy_2d)
{
	static uint8_t in[40 * 100], out[50 * 100], want[50 * 100];
	kvt_dptr a = device(sizeof(in)), b = device(sizeof(out));
	static const struct {
		uint64_t width, height;
	} shapes[] = { { 1, 1 }, { 33, 17 }, { 40, 100 }, { 0, 5 }, { 5, 0 } };

	for (size_t k = 0; k < sizeof(shapes) / sizeof(shapes[0]); k++) {
		randomise(in, sizeof(in));
		memset(want, 0xa5, sizeof(want));
		for (uint64_t y = 0; y < shapes[k].height; y++)
			memcpy(want + 50 * y, in + 40 * y, shapes[k].width);
		OK(g->ops->copy_h2d(g, a, in, sizeof(in)));
		OK(g->ops->memset_async(g, b, 0xa5, sizeof(out), 0));
		OK(g->ops->copy_2d_async(g, b, 50, a, 40, shapes[k].width, shapes[k].height, 0));
		OK(g->ops->copy_d2h(g, out, b, sizeof(out)));
		ck_assert(!memcmp(out, want, sizeof(out)));
	}
}

/* The same from pinned memory, given out by the backend or registered with it; other memory of the host is refused. */
CASE(copy_2d_from_the_host)
{
	enum { PITCH = 3000, WIDTH = 1024, ROWS = 5, BYTES = 4 * 4096 };
	static uint8_t out[WIDTH * ROWS] __attribute__((aligned(4096)));
	kvt_dptr d = device(sizeof(out));
	uint8_t *mine;
	void *pinned;

	ck_assert_int_eq(posix_memalign((void **)&mine, 4096, BYTES), 0);
	OK(g->ops->host_alloc(g, BYTES, &pinned));
	for (int k = 0; k < 2; k++) {
		uint8_t *from = k ? mine : pinned;

		randomise(from, BYTES);
		if (k) {
			FAILS(-EINVAL, g->ops->copy_2d_async(g, d, WIDTH, (uintptr_t)from, PITCH, WIDTH, ROWS, 0));
			OK(g->ops->host_register(g, mine, BYTES));
		}
		OK(g->ops->copy_2d_async(g, d, WIDTH, (uintptr_t)from, PITCH, WIDTH, ROWS, 0));
		OK(g->ops->copy_d2h(g, out, d, sizeof(out)));
		for (uint32_t y = 0; y < ROWS; y++)
			ck_assert(!memcmp(out + y * WIDTH, from + y * PITCH, WIDTH));
		FAILS(-EINVAL, g->ops->copy_2d_async(g, d, WIDTH, (uintptr_t)from, PITCH, WIDTH, ROWS + 1, 0));
		FAILS(-EINVAL, g->ops->copy_2d_async(g, d, WIDTH, (uintptr_t)from + PITCH, 4096, WIDTH, ROWS, 0));
	}
	OK(g->ops->host_unregister(g, mine));
	g->ops->host_free(g, pinned);
	free(mine);
}

/* Scattered copies up, across and down in one call each, in stream order, more than a driver gets at once. */
CASE(copy_batch)
{
	enum { N = 600, EACH = 77, APART = 96, BYTES = N * APART };
	static uint8_t poison[BYTES];
	uint64_t up[2][N], across[N], down[2][N];
	kvt_dptr a = device(BYTES), b = device(BYTES);
	uint8_t *in, *out, other[EACH];
	void *pinned;
	kvt_stream s;
	kvt_graph graph;
	int ret;

	OK(g->ops->stream_create(g, &s));
	OK(g->ops->host_alloc(g, 2 * BYTES, &pinned));
	in = pinned;
	out = in + BYTES;
	randomise(in, BYTES);
	memset(poison, 0xa5, BYTES);
	memcpy(out, poison, BYTES);
	for (uint32_t i = 0; i < N; i++) {
		uint32_t k = i * 7 % N;

		up[0][i] = a + k * APART + 3;
		up[1][i] = (uintptr_t)in + i * APART + 1;
		across[i] = b + i * APART;
		down[0][i] = (uintptr_t)out + k * APART;
		down[1][i] = b + k * APART;
	}
	ret = g->ops->copy_batch_async(g, up[0], up[1], EACH, 0, s);
	if (ret == -ENOSYS && !strcmp(g->ops->name, "cuda")) {
		printf("copy_batch: skipped: %s\n", kvt_last_error());
		return;
	}
	OK(ret);
	OK(g->ops->memset_async(g, a, 0x5a, BYTES, s));
	OK(g->ops->copy_batch_async(g, up[0], up[1], EACH, N, s));
	OK(g->ops->copy_batch_async(g, up[0], down[1], 0, N, s));
	OK(g->ops->copy_batch_async(g, across, up[0], EACH, N, s));
	OK(g->ops->copy_batch_async(g, down[0], down[1], EACH, N, s));
	OK(g->ops->stream_sync(g, s));
	for (uint32_t i = 0; i < N; i++) {
		ck_assert(!memcmp(out + i * APART, in + i * APART + 1, EACH));
		ck_assert(!memcmp(out + i * APART + EACH, poison, APART - EACH));
	}

	/* a wrong one among them: none is done */
	memcpy(out, poison, BYTES);
	down[1][N - 1] = b + BYTES - EACH + 1;
	FAILS(-EINVAL, g->ops->copy_batch_async(g, down[0], down[1], EACH, N, s));
	down[1][N - 1] = (uintptr_t)other;
	FAILS(-EINVAL, g->ops->copy_batch_async(g, down[0], down[1], EACH, N, s));
	down[1][N - 1] = b;
	down[0][N - 1] = (uintptr_t)other;
	FAILS(-EINVAL, g->ops->copy_batch_async(g, down[0], down[1], EACH, N, s));
	FAILS(-EINVAL, g->ops->copy_batch_async(g, down[0], down[1], EACH, 1, 999));
	OK(g->ops->stream_sync(g, s));
	ck_assert(!memcmp(out, poison, BYTES));

	/* nor in a capture, which goes on */
	OK(g->ops->capture_begin(g, s));
	FAILS(-EINVAL, g->ops->copy_batch_async(g, down[0], down[1], EACH, 1, s));
	OK(g->ops->memset_async(g, a, 0, BYTES, s));
	OK(g->ops->capture_end(g, s, &graph));
	OK(g->ops->graph_launch(g, graph, s));
	OK(g->ops->stream_sync(g, s));
	ck_assert(!memcmp(out, poison, BYTES));
	g->ops->graph_destroy(g, graph);
	g->ops->stream_destroy(g, s);
	g->ops->host_free(g, pinned);
	g->ops->free(g, a);
	g->ops->free(g, b);
}

CASE(memset_sets_that_much)
{
	uint8_t out[300], want[300];
	kvt_dptr a = device(300);

	memset(want, 0x11, sizeof(want));
	memset(want + 3, 0x7e, 251);
	OK(g->ops->memset_async(g, a, 0x11, 300, 0));
	OK(g->ops->memset_async(g, a + 3, 0x7e, 251, 0));
	OK(g->ops->memset_async(g, a, 0xff, 0, 0));
	OK(g->ops->copy_d2h(g, out, a, 300));
	ck_assert(!memcmp(out, want, 300));
}

/* ---- streams ---- */

/* What is put on a stream happens in order: the last of many writes is what stays. */
CASE(a_stream_is_in_order)
{
	uint8_t out = 0;
	kvt_dptr a = device(2);
	kvt_stream s;

	OK(g->ops->stream_create(g, &s));
	for (int i = 0; i <= 200; i++) {
		OK(g->ops->memset_async(g, a, i, 1, s));
		OK(g->ops->copy_d2d_async(g, a + 1, a, 1, s));
	}
	OK(g->ops->copy_d2h_async(g, &out, a + 1, 1, s));
	OK(g->ops->stream_sync(g, s));
	ck_assert_uint_eq(out, 200);
	g->ops->stream_destroy(g, s);
}

CASE(destroying_a_stream_keeps_its_work)
{
	uint8_t out = 0;
	kvt_dptr a = device(1);
	kvt_event e;
	kvt_stream s;

	OK(g->ops->event_create(g, &e));
	OK(g->ops->stream_create(g, &s));
	OK(g->ops->memset_async(g, a, 42, 1, s));
	OK(g->ops->event_record(g, e, s));
	g->ops->stream_destroy(g, s);
	OK(g->ops->event_sync(g, e));
	OK(g->ops->copy_d2h(g, &out, a, 1));
	ck_assert_uint_eq(out, 42);
	g->ops->event_destroy(g, e);
}

CASE(unknown_handles_are_refused)
{
	kvt_dptr a = device(16);
	kvt_stream s;
	kvt_event e;
	kvt_graph graph;
	float ms;

	OK(g->ops->stream_create(g, &s));
	g->ops->stream_destroy(g, s);
	OK(g->ops->event_create(g, &e));
	g->ops->event_destroy(g, e);
	FAILS(-EINVAL, g->ops->stream_sync(g, s));
	FAILS(-EINVAL, g->ops->memset_async(g, a, 0, 16, s));
	FAILS(-EINVAL, g->ops->memset_async(g, a, 0, 16, 12345678));
	FAILS(-EINVAL, g->ops->capture_begin(g, s));
	FAILS(-EINVAL, g->ops->capture_end(g, s, &graph));
	FAILS(-EINVAL, g->ops->graph_launch(g, 7, 0));
	FAILS(-EINVAL, g->ops->event_record(g, e, 0));
	FAILS(-EINVAL, g->ops->event_wait(g, 0, e));
	FAILS(-EINVAL, g->ops->event_query(g, e));
	FAILS(-EINVAL, g->ops->event_sync(g, e));
	FAILS(-EINVAL, g->ops->event_elapsed(g, e, e, &ms));
	FAILS(-EINVAL, g->ops->event_query(g, 0));
}

static void *use_from_a_thread(void *arg)
{
	uint8_t in[1000], out[1000] = { 0 };
	kvt_stream s;
	kvt_dptr a;
	bool same = true;

	memset(in, (int)(intptr_t)arg, sizeof(in));
	if (g->ops->bind_thread(g) || g->ops->stream_create(g, &s))
		return NULL;
	for (int i = 0; i < 50 && same; i++) {
		same = !g->ops->alloc(g, sizeof(in), &a) && !g->ops->copy_h2d_async(g, a, in, sizeof(in), s) &&
		       !g->ops->copy_d2h_async(g, out, a, sizeof(in), s) && !g->ops->stream_sync(g, s) &&
		       !memcmp(in, out, sizeof(in));
		g->ops->free(g, a);
	}
	g->ops->stream_destroy(g, s);
	return same ? arg : NULL;
}

CASE(any_thread_may_call)
{
	pthread_t t[4];
	void *result;

	for (intptr_t i = 0; i < 4; i++)
		ck_assert_int_eq(pthread_create(&t[i], NULL, use_from_a_thread, (void *)(i + 1)), 0);
	for (intptr_t i = 0; i < 4; i++) {
		pthread_join(t[i], &result);
		ck_assert_ptr_eq(result, (void *)(i + 1));
	}
}

/* ---- events ---- */

CASE(a_stream_waits_for_an_event)
{
	for (int i = 0; i < 50; i++) {
		uint8_t out = 0;
		kvt_dptr a = device(2);
		kvt_stream s[2];
		kvt_event e[2];

		for (int k = 0; k < 2; k++) {
			OK(g->ops->stream_create(g, &s[k]));
			OK(g->ops->event_create(g, &e[k]));
		}
		/* there and back: s1 reads what s0 wrote, s0 then overwrites what s1 has read */
		OK(g->ops->memset_async(g, a, 1, 1, s[0]));
		OK(g->ops->event_record(g, e[0], s[0]));
		OK(g->ops->event_wait(g, s[1], e[0]));
		OK(g->ops->copy_d2d_async(g, a + 1, a, 1, s[1]));
		OK(g->ops->event_record(g, e[1], s[1]));
		OK(g->ops->event_wait(g, s[0], e[1]));
		OK(g->ops->memset_async(g, a, 2, 1, s[0]));
		OK(g->ops->stream_sync(g, s[0]));
		OK(g->ops->copy_d2h(g, &out, a + 1, 1));
		ck_assert_uint_eq(out, 1);
		OK(g->ops->copy_d2h(g, &out, a, 1));
		ck_assert_uint_eq(out, 2);
		for (int k = 0; k < 2; k++) {
			g->ops->stream_destroy(g, s[k]);
			g->ops->event_destroy(g, e[k]);
		}
		g->ops->free(g, a);
	}
}

/* A wait is for the recording before it, also when the event is recorded again. */
CASE(an_event_can_be_recorded_again)
{
	uint8_t out[3];
	kvt_dptr a = device(4);
	kvt_stream s, t;
	kvt_event e;

	OK(g->ops->stream_create(g, &s));
	OK(g->ops->stream_create(g, &t));
	OK(g->ops->event_create(g, &e));
	for (int i = 0; i < 3; i++) {
		OK(g->ops->memset_async(g, a + i, 10 + i, 1, s));
		OK(g->ops->event_record(g, e, s));
		OK(g->ops->event_wait(g, t, e));
		OK(g->ops->copy_d2h_async(g, &out[i], a + i, 1, t));
	}
	OK(g->ops->stream_sync(g, t));
	for (int i = 0; i < 3; i++)
		ck_assert_uint_eq(out[i], 10 + i);
}

CASE(query_and_sync)
{
	uint8_t out = 0;
	kvt_dptr a = device(1);
	kvt_event e;
	int reached;

	OK(g->ops->event_create(g, &e));
	ck_assert_int_eq(g->ops->event_query(g, e), 1); /* never recorded */
	OK(g->ops->event_sync(g, e));
	OK(g->ops->event_wait(g, 0, e));
	OK(g->ops->memset_async(g, a, 5, 1, 0));
	OK(g->ops->copy_d2h_async(g, &out, a, 1, 0));
	OK(g->ops->event_record(g, e, 0));
	for (int i = 0; (reached = g->ops->event_query(g, e)) == 0; i++)
		ck_assert_int_lt(i, 1000000);
	ck_assert_int_eq(reached, 1);
	ck_assert_uint_eq(out, 5);
	OK(g->ops->event_record(g, e, 0));
	OK(g->ops->event_sync(g, e));
	ck_assert_int_eq(g->ops->event_query(g, e), 1);
}

CASE(elapsed_is_time)
{
	kvt_event a, b;
	float ms = -1;

	OK(g->ops->event_create(g, &a));
	OK(g->ops->event_create(g, &b));
	FAILS(-EAGAIN, g->ops->event_elapsed(g, a, b, &ms));
	OK(g->ops->event_record(g, a, 0));
	OK(g->ops->event_sync(g, a));
	FAILS(-EAGAIN, g->ops->event_elapsed(g, a, b, &ms));
	usleep(20000);
	OK(g->ops->event_record(g, b, 0));
	OK(g->ops->event_sync(g, b));
	OK(g->ops->event_elapsed(g, a, b, &ms));
	ck_assert(ms >= 19 && ms < 5000);
}

/* ---- graphs ---- */

/* Recorded, not run; replayed on what memory then holds, as often as asked. */
CASE(a_graph_replays_on_new_contents)
{
	static uint8_t in[500], out[500];
	kvt_dptr a = device(500), b = device(500);
	kvt_graph graph;
	kvt_stream s;

	OK(g->ops->stream_create(g, &s));
	OK(g->ops->memset_async(g, b, 9, 500, s));
	OK(g->ops->capture_begin(g, s));
	OK(g->ops->copy_d2d_async(g, b, a, 500, s));
	OK(g->ops->memset_async(g, b + 250, 0x33, 100, s));
	OK(g->ops->capture_end(g, s, &graph));
	OK(g->ops->stream_sync(g, s));
	OK(g->ops->copy_d2h(g, out, b, 500));
	for (int i = 0; i < 500; i++)
		ck_assert_uint_eq(out[i], 9);
	for (int k = 0; k < 3; k++) {
		randomise(in, 500);
		OK(g->ops->copy_h2d(g, a, in, 500));
		OK(g->ops->graph_launch(g, graph, s));
		OK(g->ops->stream_sync(g, s));
		OK(g->ops->copy_d2h(g, out, b, 500));
		memset(in + 250, 0x33, 100);
		ck_assert(!memcmp(in, out, 500));
	}
	g->ops->graph_destroy(g, graph);
	g->ops->stream_destroy(g, s);
}

CASE(a_capture_has_its_rules)
{
	kvt_graph graph;
	kvt_stream s, other;
	kvt_event e;

	OK(g->ops->stream_create(g, &s));
	OK(g->ops->stream_create(g, &other));
	OK(g->ops->event_create(g, &e));
	FAILS(-EINVAL, g->ops->capture_begin(g, 0));
	FAILS(-EINVAL, g->ops->capture_end(g, s, &graph));
	OK(g->ops->capture_begin(g, s));
	FAILS(-EINVAL, g->ops->capture_begin(g, s));
	FAILS(-EINVAL, g->ops->stream_sync(g, s));
	OK(g->ops->event_record(g, e, s));
	FAILS(-EINVAL, g->ops->event_wait(g, other, e));
	FAILS(-EINVAL, g->ops->event_query(g, e));
	OK(g->ops->event_wait(g, s, e));
	OK(g->ops->stream_sync(g, other));
	OK(g->ops->capture_end(g, s, &graph));
	/* once it runs, the event is one like others */
	OK(g->ops->graph_launch(g, graph, s));
	OK(g->ops->event_wait(g, other, e));
	OK(g->ops->stream_sync(g, other));
	g->ops->graph_destroy(g, graph);
}

CASE(an_empty_graph_does_nothing)
{
	kvt_graph graph;
	kvt_stream s;

	OK(g->ops->stream_create(g, &s));
	OK(g->ops->capture_begin(g, s));
	OK(g->ops->capture_end(g, s, &graph));
	OK(g->ops->graph_launch(g, graph, 0));
	OK(g->ops->stream_sync(g, 0));
	g->ops->graph_destroy(g, graph);
}

/* ---- kernels ---- */

static const struct kvt_dim3 grid = { 4, 1, 1 }, block = { 128, 1, 1 };

static kvt_kernel kernel(const char *function)
{
	kvt_kernel k = 0;

	OK(g->ops->kernel(g, "block", function, &k));
	return k;
}

CASE(unknown_kernels_and_wrong_launches)
{
	struct kvt_copy_args a = { 0 };
	void *args[] = { &a, &a };
	kvt_kernel k;

	FAILS(-ENOENT, g->ops->kernel(g, "block", "nothing", &k));
	FAILS(-ENOENT, g->ops->kernel(g, "nowhere", "copy", &k));
	k = kernel("copy");
	FAILS(-EINVAL, g->ops->launch(g, k, grid, block, 0, 0, args, 0));
	FAILS(-EINVAL, g->ops->launch(g, k, grid, block, 0, 0, args, 2));
	FAILS(-EINVAL, g->ops->launch(g, 123456, grid, block, 0, 0, args, 1));
	FAILS(-EINVAL, g->ops->launch(g, k, (struct kvt_dim3){ 0, 1, 1 }, block, 0, 0, args, 1));
	FAILS(-EINVAL, g->ops->launch(g, k, grid, (struct kvt_dim3){ 1, 0, 1 }, 0, 0, args, 1));
	FAILS(-EINVAL, g->ops->launch(g, k, grid, (struct kvt_dim3){ 1025, 1, 1 }, 0, 0, args, 1));
	FAILS(-EINVAL, g->ops->launch(g, k, grid, block, 0, 999, args, 1));
	OK(g->ops->launch(g, k, grid, block, 0, 0, args, 1)); /* n = 0 */
	OK(g->ops->stream_sync(g, 0));
}

/* Blocks of random rows, whole and partly filled, from any first row; outputs poisoned. */
CASE(digest_equals_the_cpus)
{
	static const uint32_t row_bytes[] = { 8, 16, 64, 136, 200, 256, 520, 1024, 2048 };
	static uint8_t rows[20 * 2048];
	enum { N = 9 };
	uint64_t at[N], out[N], *poison = out;
	uint32_t count[N], first[N];
	kvt_dptr data = device(sizeof(rows)), d_at, d_count, d_first, d_out = device(sizeof(out));

	for (size_t k = 0; k < sizeof(row_bytes) / sizeof(row_bytes[0]); k++) {
		struct kvt_digest_args a = { .n = N, .row_bytes = row_bytes[k] };
		void *args[] = { &a };

		randomise(rows, sizeof(rows));
		OK(g->ops->copy_h2d(g, data, rows, sizeof(rows)));
		for (uint32_t i = 0; i < N; i++) {
			at[i] = data + i * row_bytes[k];
			count[i] = i * 5 % 11;
			first[i] = rnd() % 1000;
		}
		d_at = upload(at, sizeof(at));
		d_count = upload(count, sizeof(count));
		d_first = upload(first, sizeof(first));
		for (int with_first = 0; with_first < 2; with_first++) {
			memset(poison, 0xa5, sizeof(out));
			OK(g->ops->copy_h2d(g, d_out, poison, sizeof(out)));
			a.blocks = d_at;
			a.rows = d_count;
			a.first = with_first ? d_first : 0;
			a.out = d_out;
			OK(g->ops->launch(g, kernel("digest"), grid, block, 0, 0, args, 1));
			memset(&a, 0, sizeof(a)); /* the launch has taken its copy */
			a.n = N;
			a.row_bytes = row_bytes[k];
			OK(g->ops->copy_d2h(g, out, d_out, sizeof(out)));
			for (uint32_t i = 0; i < N; i++) {
				uint64_t want = 0;

				for (uint32_t r = 0; r < count[i]; r++)
					want += kvt_row_digest((with_first ? first[i] : 0) + r,
							       rows + (i + r) * row_bytes[k], row_bytes[k]);
				ck_assert_uint_eq(out[i], want);
			}
		}
		g->ops->free(g, d_at);
		g->ops->free(g, d_count);
		g->ops->free(g, d_first);
	}
}

/* Gather from pinned host memory and scatter back, of equal and of different sizes; nothing beside them changes. */
CASE(copy_gathers_and_scatters)
{
	enum { N = 13, STRIDE = 5000 };
	static uint8_t want[N * STRIDE], out[N * STRIDE];
	uint64_t dst[N], src[N];
	uint32_t bytes[N];
	kvt_dptr mem = device(sizeof(want)), d_dst, d_src, d_bytes;
	uint8_t *host;
	void *p;

	OK(g->ops->host_alloc(g, sizeof(want), &p));
	host = p;
	for (int with_sizes = 0; with_sizes < 2; with_sizes++) {
		struct kvt_copy_args a = { .n = N, .bytes = 4096 };
		void *args[] = { &a };

		randomise(host, sizeof(want));
		memset(want, 0xa5, sizeof(want));
		OK(g->ops->copy_h2d(g, mem, want, sizeof(want)));
		for (uint32_t i = 0; i < N; i++) {
			src[i] = (uintptr_t)host + i * STRIDE + (with_sizes ? i : 0);
			dst[i] = mem + (N - 1 - i) * STRIDE + (with_sizes ? 2 * i : 0);
			bytes[i] = with_sizes ? rnd() % 4097 : 4096;
			memcpy(want + (dst[i] - mem), (void *)(uintptr_t)src[i], bytes[i]);
		}
		a.dst = d_dst = upload(dst, sizeof(dst));
		a.src = d_src = upload(src, sizeof(src));
		d_bytes = upload(bytes, sizeof(bytes));
		a.sizes = with_sizes ? d_bytes : 0;
		OK(g->ops->launch(g, kernel("copy"), grid, block, 0, 0, args, 1));
		OK(g->ops->copy_d2h(g, out, mem, sizeof(out)));
		ck_assert(!memcmp(out, want, sizeof(out)));

		/* and back: what is beside them on the host stays too */
		memset(host, 0x5a, sizeof(want));
		a.dst = d_src;
		a.src = d_dst;
		OK(g->ops->launch(g, kernel("copy"), grid, block, 0, 0, args, 1));
		OK(g->ops->stream_sync(g, 0));
		for (uint32_t i = 0; i < N; i++) {
			const uint8_t *from = (void *)(uintptr_t)src[i], *end = host + sizeof(want);

			if (i + 1 < N)
				end = (void *)(uintptr_t)src[i + 1];

			ck_assert(!memcmp(from, want + (dst[i] - mem), bytes[i]));
			for (from += bytes[i]; from < end; from++)
				if (*from != 0x5a)
					ck_abort_msg("a byte beside item %u", i);
		}
		g->ops->free(g, d_dst);
		g->ops->free(g, d_src);
		g->ops->free(g, d_bytes);
	}
	g->ops->host_free(g, p);
}

/* Rows of every type to rows of every type, from the device and from the host, into scattered places. */
CASE(append_encodes_as_the_cpu_does)
{
	enum { N = 11, ELEMENTS = 37, BLOCK_ROWS = 6, BLOCKS = 3 };
	static uint8_t in[N * (ELEMENTS * 4 + 12)], want[BLOCKS * BLOCK_ROWS * ELEMENTS * 4], out[sizeof(want)];
	uint64_t blocks[N];
	uint32_t rows[N];
	kvt_dptr mem = device(sizeof(want)), dev_in = device(sizeof(in)), d_blocks, d_rows;
	void *host_in;

	OK(g->ops->host_alloc(g, sizeof(in), &host_in));
	for (uint32_t st = 0; st <= KVT_BF16; st++)
		for (uint32_t dt = 0; dt <= KVT_BF16; dt++)
			for (int on_host = 0; on_host < 2; on_host++) {
				uint64_t row = kvt_codec_bytes(dt, ELEMENTS);
				struct kvt_append_args a = {
					.src = on_host ? (uintptr_t)host_in : dev_in,
					.src_stride = kvt_codec_bytes(st, ELEMENTS) + (st == KVT_F32 ? 12 : 10),
					.n = N, .elements = ELEMENTS, .src_type = st, .dst_type = dt,
				};
				void *args[] = { &a };

				randomise(in, sizeof(in));
				OK(g->ops->copy_h2d(g, dev_in, in, sizeof(in)));
				memcpy(host_in, in, sizeof(in));
				memset(want, 0xa5, sizeof(want));
				OK(g->ops->copy_h2d(g, mem, want, sizeof(want)));
				for (uint32_t i = 0; i < N; i++) {
					uint32_t place = (i * 7 + 3) % (BLOCKS * BLOCK_ROWS);

					rows[i] = place % BLOCK_ROWS;
					blocks[i] = mem + place / BLOCK_ROWS * BLOCK_ROWS * row;
					kvt_codec_convert(want + place * row, dt, in + i * a.src_stride, st, ELEMENTS);
				}
				a.blocks = d_blocks = upload(blocks, sizeof(blocks));
				a.rows = d_rows = upload(rows, sizeof(rows));
				OK(g->ops->launch(g, kernel("append"), grid, block, 0, 0, args, 1));
				OK(g->ops->copy_d2h(g, out, mem, sizeof(out)));
				ck_assert(!memcmp(out, want, sizeof(out)));
				g->ops->free(g, d_blocks);
				g->ops->free(g, d_rows);
			}
	g->ops->host_free(g, host_in);
}

/* A batch of sequences of different lengths, one with nothing new: rows where positions say, digests added up; both planes. */
CASE(extend_places_and_digests)
{
	enum { SEQS = 3, STRIDE = 4, BLOCK_ROWS = 5, LONGEST = 1504, N = 11, ENTRIES = SEQS * STRIDE };
	static const uint32_t tokens[SEQS + 1] = { 0, 4, 4, N }, rows[SEQS] = { 9, 3, 17 };
	static const uint32_t sizes[] = { 48, 120, 160, 512, 544, 1024, 1056, LONGEST }; /* rows of all kinds of digests */
	static float in[2][N * LONGEST], encoded[N * LONGEST];
	static uint8_t want[2][ENTRIES * BLOCK_ROWS * LONGEST * 4], out[sizeof(want[0])];
	static const float zeros[LONGEST];
	uint64_t blocks[ENTRIES], sums[2][ENTRIES], got[ENTRIES];
	kvt_dptr mem[2], d_in[2], d_sums[2], d_blocks[2], d_tokens = upload(tokens, sizeof(tokens));
	struct kvt_extend_args a = { .tokens = d_tokens, .rows = upload(rows, sizeof(rows)), .n_seqs = SEQS,
				     .table_stride = STRIDE };
	void *args[] = { &a };

	for (int p = 0; p < 2; p++) {
		randomise(in[p], sizeof(in[p]));
		d_in[p] = device(sizeof(in[p]));
		mem[p] = device(sizeof(want[p]));
		d_sums[p] = device(sizeof(sums[p]));
		d_blocks[p] = device(sizeof(blocks));
	}
	for (uint32_t turn = 0; turn < 18 * sizeof(sizes) / sizeof(sizes[0]); turn++) {
		const uint32_t elements = sizes[turn / 18], n = turn % 2 + 1, used = ENTRIES * BLOCK_ROWS * 4 * elements;

		a.n_planes = n;
		for (uint32_t p = 0; p < n; p++) {
			const uint32_t src_type = turn / 6 % 3, dst_type = (turn / 2 + p) % 3;
			const uint32_t row = (uint32_t)kvt_codec_bytes(dst_type, elements);
			const uint32_t src_row = (uint32_t)kvt_codec_bytes(src_type, elements);

			memset(want[p], 0xa5, used);
			OK(g->ops->copy_h2d(g, mem[p], want[p], used));
			for (uint32_t i = 0; i < ENTRIES; i++) {
				blocks[i] = mem[p] + (i * 7 + 2) % ENTRIES * BLOCK_ROWS * row;
				sums[p][i] = rnd();
			}
			OK(g->ops->copy_h2d(g, d_sums[p], sums[p], sizeof(sums[p])));
			OK(g->ops->copy_h2d(g, d_blocks[p], blocks, sizeof(blocks)));
			kvt_codec_convert(encoded, src_type, in[p], KVT_F32, N * elements);
			OK(g->ops->copy_h2d(g, d_in[p], encoded, N * src_row));
			a.plane[p] = (struct kvt_extend_plane){
				.src = d_in[p], .src_stride = src_row, .blocks = d_blocks[p], .sums = d_sums[p],
				.zeros_hash = kvt_row_hash(zeros, row), .block_rows = BLOCK_ROWS, .elements = elements,
				.src_type = src_type, .dst_type = dst_type,
			};
			for (uint32_t i = 0; i < SEQS; i++)
				for (uint32_t t = tokens[i]; t < tokens[i + 1]; t++) {
					uint32_t position = rows[i] - tokens[i + 1] + t;
					uint32_t at = i * STRIDE + position / BLOCK_ROWS;
					uint32_t in_block = position % BLOCK_ROWS;
					uint8_t *dst = want[p] + (blocks[at] - mem[p]) + in_block * row;

					kvt_codec_convert(dst, dst_type, (uint8_t *)encoded + t * src_row, src_type, elements);
					sums[p][at] += kvt_row_digest(in_block, dst, row) -
						       kvt_row_digest(in_block, zeros, row);
				}
		}
		OK(g->ops->launch(g, kernel("extend"), (struct kvt_dim3){ grid.x, n, 1 }, block, 0, 0, args, 1));
		for (uint32_t p = 0; p < n; p++) {
			OK(g->ops->copy_d2h(g, out, mem[p], used));
			OK(g->ops->copy_d2h(g, got, d_sums[p], sizeof(got)));
			ck_assert(!memcmp(out, want[p], used));
			ck_assert(!memcmp(got, sums[p], sizeof(got)));
		}
	}
}

/* Every word once, also behind the last whole round of loads. */
CASE(read_reads_everything)
{
	enum { WORDS = 2 * 5003 };
	static uint64_t words[WORDS];
	uint64_t out = 7, want = out;
	struct kvt_read_args a = { .bytes = sizeof(words) };
	void *args[] = { &a };
	kvt_kernel k = 0;

	randomise(words, sizeof(words));
	for (uint32_t i = 0; i < WORDS; i++)
		want ^= words[i];
	a.from = upload(words, sizeof(words));
	a.out = upload(&out, sizeof(out));
	OK(g->ops->kernel(g, "measure", "read", &k));
	OK(g->ops->launch(g, k, grid, block, 0, 0, args, 1));
	OK(g->ops->copy_d2h(g, &out, a.out, sizeof(out)));
	ck_assert_uint_eq(out, want);
}

/* Digests that are not what they should be are counted, on top of what was. */
CASE(verify_counts_what_differs)
{
	enum { N = 1500 };
	static uint64_t digests[N], wanted[N];
	uint64_t bad = 5, want = bad;
	struct kvt_verify_args a = { .n = N };
	void *args[] = { &a };

	randomise(wanted, sizeof(wanted));
	memcpy(digests, wanted, sizeof(digests));
	for (uint32_t i = 0; i < N; i += 1 + i % 3 * 100, want++)
		digests[i] ^= 1ull << i % 64;
	a.digests = upload(digests, sizeof(digests));
	a.wanted = upload(wanted, sizeof(wanted));
	a.bad = upload(&bad, sizeof(bad));
	OK(g->ops->launch(g, kernel("verify"), grid, block, 0, 0, args, 1));
	OK(g->ops->copy_d2h(g, &bad, a.bad, sizeof(bad)));
	ck_assert_uint_eq(bad, want);
}

CASE(set_and_advance)
{
	uint64_t words[50], want[50];
	uint32_t rows[3] = { 7, 0, 100 }, tokens[4] = { 0, 1, 1, 34 };
	struct kvt_set_args a = { .n = KVT_SET_MAX };
	struct kvt_advance_args b = { .n_seqs = 3 };
	void *set[] = { &a }, *advance[] = { &b };
	kvt_dptr d_words, d_rows = upload(rows, sizeof(rows)), d_tokens = upload(tokens, sizeof(tokens));

	randomise(words, sizeof(words));
	memcpy(want, words, sizeof(want));
	a.words = d_words = upload(words, sizeof(words));
	for (uint32_t i = 0; i < a.n; i++) {
		a.index[i] = (i * 3 + 1) % 50;
		a.value[i] = want[a.index[i]] = ~want[a.index[i]];
	}
	OK(g->ops->launch(g, kernel("set"), grid, block, 0, 0, set, 1));
	OK(g->ops->copy_d2h(g, words, d_words, sizeof(words)));
	ck_assert(!memcmp(words, want, sizeof(words)));
	b.rows = d_rows;
	b.tokens = d_tokens;
	for (int k = 0; k < 2; k++)
		OK(g->ops->launch(g, kernel("advance"), grid, block, 0, 0, advance, 1));
	OK(g->ops->copy_d2h(g, rows, d_rows, sizeof(rows)));
	ck_assert_uint_eq(rows[0], 9);
	ck_assert_uint_eq(rows[1], 0);
	ck_assert_uint_eq(rows[2], 166);
}

CASE(tensor_maps)
{
	uint64_t map[KVT_TENSOR_MAP] = { 0 };
	kvt_dptr p = device(65536);
	int err = g->ops->tensor_map(g, p, 65536, 512, 64, map);

	if (err == -EOPNOTSUPP)
		return; /* a GPU that has none */
	OK(err);
	ck_assert(map[0] || map[1]);
	OK(g->ops->tensor_map(g, p + 256, 128, 16, 256, map));
	FAILS(-EINVAL, g->ops->tensor_map(g, p + 8, 1024, 512, 64, map));
	FAILS(-EINVAL, g->ops->tensor_map(g, p, 127, 512, 64, map));
	FAILS(-EINVAL, g->ops->tensor_map(g, p, 65536, 0, 64, map));
	FAILS(-EINVAL, g->ops->tensor_map(g, p, 65536, 520, 64, map));
	FAILS(-EINVAL, g->ops->tensor_map(g, p, 65536, 512, 0, map));
	FAILS(-EINVAL, g->ops->tensor_map(g, p, 65536, 512, 257, map));
	FAILS(-EINVAL, g->ops->tensor_map(g, p, 1ull << 40, 512, 64, map)); /* more than a map addresses */
	FAILS(-EINVAL, g->ops->tensor_map(g, p, 65536 + 256, 512, 64, map)); /* more than was allocated */
	FAILS(-EINVAL, g->ops->tensor_map(g, 4096, 65536, 512, 64, map));
	g->ops->free(g, p);
}

/* A captured launch keeps the arguments it was given and reads memory when it runs. */
CASE(a_graph_replays_a_launch)
{
	uint64_t at, out = 0;
	uint32_t count = 4;
	static uint8_t rows[4 * 64];
	kvt_dptr data = device(sizeof(rows)), d_at, d_count = upload(&count, 4), d_out = device(8);
	struct kvt_digest_args a = { .rows = d_count, .out = d_out, .n = 1, .row_bytes = 64 };
	void *args[] = { &a };
	kvt_graph graph;
	kvt_stream s;

	at = data;
	a.blocks = d_at = upload(&at, 8);
	OK(g->ops->stream_create(g, &s));
	OK(g->ops->capture_begin(g, s));
	OK(g->ops->launch(g, kernel("digest"), grid, block, 0, s, args, 1));
	OK(g->ops->capture_end(g, s, &graph));
	memset(&a, 0xff, sizeof(a));
	for (int k = 0; k < 3; k++) {
		randomise(rows, sizeof(rows));
		OK(g->ops->copy_h2d(g, data, rows, sizeof(rows)));
		OK(g->ops->graph_launch(g, graph, s));
		OK(g->ops->copy_d2h_async(g, &out, d_out, 8, s));
		OK(g->ops->stream_sync(g, s));
		ck_assert_uint_eq(out, kvt_rows_digest(0, 4, rows, 64));
	}
	g->ops->graph_destroy(g, graph);
	g->ops->free(g, d_at);
}

/*
 * Early launches behind each other and behind others, put on a stream and in a
 * graph: each sees all that is before it. A row goes through a chain of places.
 */
CASE(early_launches_keep_their_order)
{
	enum { N = 40, BYTES = 4096 };
	static uint8_t in[BYTES], out[BYTES];
	uint64_t at[N + 1];
	uint32_t zero = 0;
	kvt_dptr data = device((N + 1) * BYTES), d_at, d_zero = upload(&zero, 4);
	struct kvt_append_args a = { .src_stride = BYTES, .rows = d_zero, .n = 1, .elements = BYTES / 4 };
	void *args[] = { &a };
	const kvt_kernel k = kernel("append");
	kvt_graph graph = 0;
	kvt_stream s;

	for (int i = 0; i <= N; i++)
		at[i] = data + (uint64_t)i * BYTES;
	d_at = upload(at, sizeof(at));
	OK(g->ops->stream_create(g, &s));
	for (int round = 0; round < 6; round++) {
		randomise(in, BYTES);
		OK(g->ops->copy_h2d(g, data, in, BYTES));
		if (round == 2)
			OK(g->ops->capture_begin(g, s));
		if (round <= 2) {
			for (int i = 0; i < N; i++) {
				a.src = at[i];
				a.blocks = d_at + 8ull * (i + 1);
				OK((i % 7 == 3 ? g->ops->launch : g->ops->launch_early)(g, k, grid, block, 0, s, args, 1));
			}
		}
		if (round == 2)
			OK(g->ops->capture_end(g, s, &graph));
		if (round >= 2) {
			OK(g->ops->graph_launch(g, graph, s));
			if (round == 4)
				OK(g->ops->graph_launch(g, graph, s));
		}
		OK(g->ops->copy_d2h_async(g, out, data + N * BYTES, BYTES, s));
		OK(g->ops->stream_sync(g, s));
		ck_assert(!memcmp(in, out, BYTES));
	}
	g->ops->graph_destroy(g, graph);
}

/* A kernel that does not wait is launched behind what is before it; wrong launches are refused as others. */
CASE(what_does_not_wait_is_not_early)
{
	enum { BYTES = 1 << 20 };
	static uint8_t in[BYTES], out[BYTES];
	kvt_dptr from = device(BYTES), middle = device(BYTES), to = device(BYTES), d_from, d_middle, d_to;
	const uint64_t at[3] = { from, middle, to };
	struct kvt_copy_args a = { .n = 1, .bytes = BYTES };
	void *args[] = { &a };
	const kvt_kernel k = kernel("copy");

	d_from = upload(&at[0], 8);
	d_middle = upload(&at[1], 8);
	d_to = upload(&at[2], 8);
	randomise(in, BYTES);
	OK(g->ops->copy_h2d(g, from, in, BYTES));
	a.src = d_from;
	a.dst = d_middle;
	OK(g->ops->launch_early(g, k, grid, block, 0, 0, args, 1));
	a.src = d_middle;
	a.dst = d_to;
	OK(g->ops->launch_early(g, k, grid, block, 0, 0, args, 1));
	OK(g->ops->copy_d2h(g, out, to, BYTES));
	ck_assert(!memcmp(in, out, BYTES));
	FAILS(-EINVAL, g->ops->launch_early(g, k, grid, block, 0, 0, args, 0));
	FAILS(-EINVAL, g->ops->launch_early(g, 123456, grid, block, 0, 0, args, 1));
	FAILS(-EINVAL, g->ops->launch_early(g, k, (struct kvt_dim3){ 0, 1, 1 }, block, 0, 0, args, 1));
	FAILS(-EINVAL, g->ops->launch_early(g, k, grid, block, 0, 999, args, 1));
}

/* ---- tables ---- */

#define ENTRIES(ops) ((void *const *)&(ops)->close)
#define N_ENTRIES ((sizeof(struct kvt_gpu_ops) - offsetof(struct kvt_gpu_ops, close)) / sizeof(void *))

CASE(no_entry_is_null)
{
	ck_assert_ptr_nonnull(g->ops->name);
	ck_assert_ptr_nonnull(memchr(g->description, 0, sizeof(g->description)));
	ck_assert_int_ne(g->description[0], 0);
	for (size_t i = 0; i < N_ENTRIES; i++)
		ck_assert_msg(ENTRIES(g->ops)[i], "entry %zu", i);
}

START_TEST(nosys_refuses_everything)
{
	struct kvt_gpu gpu = { .ops = &kvt_gpu_nosys };
	const struct kvt_gpu_ops *o = gpu.ops;
	struct kvt_dim3 one = { 1, 1, 1 };
	uint64_t n, m;
	void *p;
	uint32_t h;
	float ms;

	for (size_t i = 0; i < N_ENTRIES; i++)
		ck_assert_msg(ENTRIES(o)[i], "entry %zu", i);
	FAILS(-ENOSYS, o->alloc(&gpu, 1, &n));
	FAILS(-ENOSYS, o->mem_info(&gpu, &n, &m));
	FAILS(-ENOSYS, o->host_alloc(&gpu, 1, &p));
	FAILS(-ENOSYS, o->host_register(&gpu, &n, 1));
	FAILS(-ENOSYS, o->host_unregister(&gpu, &n));
	FAILS(-ENOSYS, o->copy_h2d(&gpu, 1, &n, 0));
	FAILS(-ENOSYS, o->copy_d2h(&gpu, &n, 1, 0));
	FAILS(-ENOSYS, o->copy_d2d(&gpu, 1, 2, 0));
	FAILS(-ENOSYS, o->copy_h2d_async(&gpu, 1, &n, 0, 0));
	FAILS(-ENOSYS, o->copy_d2h_async(&gpu, &n, 1, 0, 0));
	FAILS(-ENOSYS, o->copy_d2d_async(&gpu, 1, 2, 0, 0));
	FAILS(-ENOSYS, o->copy_2d_async(&gpu, 1, 1, 2, 1, 0, 0, 0));
	FAILS(-ENOSYS, o->copy_batch_async(&gpu, &n, &m, 0, 0, 0));
	FAILS(-ENOSYS, o->memset_async(&gpu, 1, 0, 0, 0));
	FAILS(-ENOSYS, o->kernel(&gpu, "block", "copy", &h));
	FAILS(-ENOSYS, o->tensor_map(&gpu, 256, 256, 128, 1, &n));
	FAILS(-ENOSYS, o->launch(&gpu, 0, one, one, 0, 0, NULL, 0));
	FAILS(-ENOSYS, o->launch_early(&gpu, 0, one, one, 0, 0, NULL, 0));
	FAILS(-ENOSYS, o->stream_create(&gpu, &h));
	FAILS(-ENOSYS, o->stream_sync(&gpu, 0));
	FAILS(-ENOSYS, o->bind_thread(&gpu));
	FAILS(-ENOSYS, o->capture_begin(&gpu, 1));
	FAILS(-ENOSYS, o->capture_end(&gpu, 1, &h));
	FAILS(-ENOSYS, o->graph_launch(&gpu, 1, 0));
	FAILS(-ENOSYS, o->event_create(&gpu, &h));
	FAILS(-ENOSYS, o->event_record(&gpu, 1, 0));
	FAILS(-ENOSYS, o->event_wait(&gpu, 0, 1));
	FAILS(-ENOSYS, o->event_query(&gpu, 1));
	FAILS(-ENOSYS, o->event_sync(&gpu, 1));
	FAILS(-ENOSYS, o->event_elapsed(&gpu, 1, 2, &ms));
	o->free(&gpu, 1);
	o->host_free(&gpu, NULL);
	o->stream_destroy(&gpu, 1);
	o->graph_destroy(&gpu, 1);
	o->event_destroy(&gpu, 1);
	o->close(&gpu);
}
END_TEST

START_TEST(twins_fit_a_launch)
{
	for (const struct kvt_twin_entry *t = kvt_twins; t->module; t++) {
		uint32_t bytes = 0;

		ck_assert_uint_le(t->n_args, KVT_KERNEL_MAX_ARGS);
		for (uint32_t i = 0; i < t->n_args; i++) {
			ck_assert_uint_gt(t->arg_bytes[i], 0);
			bytes += (t->arg_bytes[i] + 7) / 8 * 8;
		}
		ck_assert_uint_le(bytes, KVT_KERNEL_ARG_BYTES);
		for (const struct kvt_twin_entry *u = kvt_twins; u < t; u++)
			ck_assert(strcmp(t->module, u->module) || strcmp(t->function, u->function));
	}
}
END_TEST

START_TEST(cpu_has_one_device)
{
	struct kvt_gpu *gpu;
	uint64_t free_bytes, total;

	FAILS(-ENODEV, kvt_gpu_cpu_open(1, &gpu));
	ck_assert_int_eq(kvt_gpu_cpu_open(0, &gpu), 0);
	ck_assert(gpu->host_readable);
	ck_assert_int_eq(gpu->ops->mem_info(gpu, &free_bytes, &total), 0);
	ck_assert_uint_eq(total, (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE));
	gpu->ops->close(gpu);
}
END_TEST

static char logged[512];

static void on_log(void *user, enum kvt_log_level level, const char *line)
{
	(void)user;
	if (level == KVT_LOG_ERROR)
		snprintf(logged, sizeof(logged), "%s", line);
}

/* A free that is wrong cannot fail; it changes nothing and says so. */
START_TEST(cpu_tells_of_a_wrong_free)
{
	uint64_t before, after, total;
	kvt_dptr p;
	void *host;

	ck_assert_int_eq(open_cpu(), 0);
	kvt_set_log(on_log, NULL);
	p = device(1000);
	OK(g->ops->host_alloc(g, 1000, &host));
	OK(g->ops->mem_info(g, &before, &total));
	g->ops->free(g, p + 256);
	ck_assert_ptr_nonnull(strstr(logged, "free"));
	logged[0] = 0;
	g->ops->free(g, (uintptr_t)host);
	ck_assert_ptr_nonnull(strstr(logged, "free"));
	logged[0] = 0;
	g->ops->host_free(g, (void *)(uintptr_t)p);
	ck_assert_ptr_nonnull(strstr(logged, "host_free"));
	OK(g->ops->mem_info(g, &after, &total));
	ck_assert_uint_eq(before, after);
	g->ops->free(g, p);
	g->ops->host_free(g, host);
	logged[0] = 0;
	g->ops->free(g, p);
	ck_assert_ptr_nonnull(strstr(logged, "free"));
	kvt_set_log(NULL, NULL);
	g->ops->close(g);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("gpu");
	TCase *t = tcase_create("gpu");
	SRunner *r = srunner_create(s);
	int failed;

	n_backends -= !gpu_is_there(0);
#define ADD(name) tcase_add_loop_test(t, name, 0, n_backends)
	tcase_set_timeout(t, 60);
	ADD(alloc_is_aligned_and_distinct);
	ADD(alloc_keeps_within_memory);
	ADD(freed_memory_is_used_again);
	ADD(host_memory);
	ADD(host_register_keeps_books);
	ADD(sync_copies);
	ADD(async_copies);
	ADD(copies_outside_memory_are_refused);
	ADD(copy_2d);
	ADD(copy_2d_from_the_host);
	ADD(copy_batch);
	ADD(memset_sets_that_much);
	ADD(a_stream_is_in_order);
	ADD(destroying_a_stream_keeps_its_work);
	ADD(unknown_handles_are_refused);
	ADD(any_thread_may_call);
	ADD(a_stream_waits_for_an_event);
	ADD(an_event_can_be_recorded_again);
	ADD(query_and_sync);
	ADD(elapsed_is_time);
	ADD(a_graph_replays_on_new_contents);
	ADD(a_capture_has_its_rules);
	ADD(an_empty_graph_does_nothing);
	ADD(unknown_kernels_and_wrong_launches);
	ADD(digest_equals_the_cpus);
	ADD(copy_gathers_and_scatters);
	ADD(append_encodes_as_the_cpu_does);
	ADD(extend_places_and_digests);
	ADD(read_reads_everything);
	ADD(verify_counts_what_differs);
	ADD(set_and_advance);
	ADD(tensor_maps);
	ADD(a_graph_replays_a_launch);
	ADD(early_launches_keep_their_order);
	ADD(what_does_not_wait_is_not_early);
	ADD(no_entry_is_null);
	tcase_add_test(t, nosys_refuses_everything);
	tcase_add_test(t, twins_fit_a_launch);
	tcase_add_test(t, cpu_has_one_device);
	tcase_add_test(t, cpu_tells_of_a_wrong_free);
	suite_add_tcase(s, t);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed != 0;
}
