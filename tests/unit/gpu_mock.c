// SPDX-License-Identifier: MIT
/* What the mock GPU does beyond what every backend does: it is what other tests stand on. */
#include <check.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "codec/codec.h"
#include "gpu/kernels.h"
#include "gpu/mock.h"

static struct kvt_gpu *g;

static void setup(void)
{
	ck_assert_int_eq(kvt_mock_open(0, &g), 0);
}

static void teardown(void)
{
	g->ops->close(g);
}

#define OK(call) ck_assert_msg((call) == 0, "%s: %s", #call, kvt_last_error())

static kvt_dptr device(uint64_t bytes)
{
	kvt_dptr p = 0;

	OK(g->ops->alloc(g, bytes, &p));
	return p;
}

/* The kernel's word on whether this process may read there. */
static bool readable(kvt_dptr p)
{
	int fd[2];
	bool may;

	ck_assert_int_eq(pipe(fd), 0);
	may = write(fd[1], (void *)(uintptr_t)p, 1) == 1;
	ck_assert(may || errno == EFAULT);
	close(fd[0]);
	close(fd[1]);
	return may;
}

START_TEST(the_cpu_cannot_touch_device_memory)
{
	kvt_dptr p = device(100000);

	ck_assert(!g->host_readable);
	ck_assert(!readable(p));
	OK(g->ops->memset_async(g, p, 1, 100000, 0));
	ck_assert(!readable(p));
	ck_assert(!readable(p + 99999));
}
END_TEST

START_TEST(new_memory_is_not_zero)
{
	uint8_t out[2] = { 0 };
	kvt_dptr p = device(2);
	void *h;

	OK(g->ops->copy_d2h(g, out, p, 2));
	ck_assert(out[0] == 0xcd && out[1] == 0xcd);
	OK(g->ops->host_alloc(g, 1, &h));
	ck_assert(*(uint8_t *)h == 0xcd);
}
END_TEST

/* A little of everything that can fail; stops at the first error, as a caller would. */
static int some_work(void)
{
	static uint8_t host[64];
	kvt_dptr p = 0;
	kvt_stream s = 0;
	kvt_event e = 0;
	int err;

	err = g->ops->alloc(g, 64, &p);
	if (!err)
		err = g->ops->stream_create(g, &s);
	if (!err)
		err = g->ops->event_create(g, &e);
	if (!err)
		err = g->ops->copy_h2d_async(g, p, host, 64, s);
	if (!err)
		err = g->ops->event_record(g, e, s);
	if (!err)
		err = g->ops->event_sync(g, e);
	if (e)
		g->ops->event_destroy(g, e);
	if (s)
		g->ops->stream_destroy(g, s);
	g->ops->free(g, p);
	return err;
}

START_TEST(every_call_can_fail_once)
{
	int n = 0;

	for (;;) {
		kvt_mock_fail_at(g, ++n, -EIO);
		int err = some_work();

		ck_assert_uint_eq(kvt_mock_alive(g), 0);
		if (!kvt_mock_failed(g)) {
			ck_assert_int_eq(err, 0);
			break;
		}
		ck_assert_int_eq(err, -EIO);
	}
	ck_assert_int_eq(n, 7); /* six calls that can fail, and a run untouched */
	kvt_mock_fail_at(g, 0, 0);
	OK(some_work());
	ck_assert_str_eq(kvt_mock_fault(g), "");
}
END_TEST

START_TEST(a_failed_call_did_nothing)
{
	uint8_t out = 0, in = 7;
	kvt_dptr p = device(1);

	OK(g->ops->copy_h2d(g, p, &in, 1));
	in = 8;
	kvt_mock_fail_at(g, 1, -ENOMEM);
	ck_assert_int_eq(g->ops->copy_h2d(g, p, &in, 1), -ENOMEM);
	kvt_mock_fail_at(g, 1, -EIO);
	ck_assert_int_eq(g->ops->memset_async(g, p, 9, 1, 0), -EIO);
	OK(g->ops->copy_d2h(g, &out, p, 1));
	ck_assert_uint_eq(out, 7);
}
END_TEST

START_TEST(a_kind_of_call_is_refused)
{
	kvt_dptr p;

	kvt_mock_refuse(g, KVT_MOCK_alloc, -ENOMEM);
	ck_assert_int_eq(g->ops->alloc(g, 1, &p), -ENOMEM);
	ck_assert_int_eq(g->ops->alloc(g, 1, &p), -ENOMEM);
	OK(g->ops->bind_thread(g));
	kvt_mock_refuse(g, KVT_MOCK_alloc, 0);
	OK(g->ops->alloc(g, 1, &p));
}
END_TEST

START_TEST(work_is_late)
{
	uint8_t *out;
	kvt_dptr p = device(1);
	kvt_event e;
	void *h;

	OK(g->ops->host_alloc(g, 1, &h));
	out = h;
	OK(g->ops->memset_async(g, p, 1, 1, 0));
	kvt_mock_delay(g, 2);
	OK(g->ops->copy_d2h_async(g, out, p, 1, 0));
	ck_assert_uint_eq(*out, 0xcd);
	OK(g->ops->bind_thread(g));
	ck_assert_uint_eq(*out, 0xcd);
	OK(g->ops->bind_thread(g));
	ck_assert_uint_eq(*out, 1);

	kvt_mock_delay(g, UINT64_MAX);
	OK(g->ops->event_create(g, &e));
	*out = 2;
	OK(g->ops->copy_d2h_async(g, out, p, 1, 0));
	OK(g->ops->event_record(g, e, 0));
	for (int i = 0; i < 100; i++)
		OK(g->ops->bind_thread(g));
	ck_assert_uint_eq(*out, 2);
	OK(g->ops->event_sync(g, e));
	ck_assert_uint_eq(*out, 1);

	*out = 3;
	OK(g->ops->copy_d2h_async(g, out, p, 1, 0));
	OK(g->ops->event_record(g, e, 0));
	ck_assert_int_eq(g->ops->event_query(g, e), 0);
	ck_assert_uint_eq(*out, 1);
	ck_assert_int_eq(g->ops->event_query(g, e), 1);
}
END_TEST

/* Without an event between them, two streams' writes to one byte end either way; with one, always the same way. */
START_TEST(streams_race)
{
	int first = 0, second = 0;

	kvt_mock_delay(g, UINT64_MAX);
	for (uint64_t seed = 1; seed <= 200; seed++) {
		uint8_t out = 0;
		kvt_dptr p = device(1);
		kvt_stream s[2];
		kvt_event e[2];

		kvt_mock_reorder(g, seed * 0x9E3779B97F4A7C15ull);
		for (int i = 0; i < 2; i++) {
			OK(g->ops->stream_create(g, &s[i]));
			OK(g->ops->event_create(g, &e[i]));
			OK(g->ops->memset_async(g, p, 1 + i, 1, s[i]));
			OK(g->ops->event_record(g, e[i], s[i]));
		}
		OK(g->ops->event_sync(g, e[0]));
		OK(g->ops->event_sync(g, e[1]));
		OK(g->ops->copy_d2h(g, &out, p, 1));
		first += out == 1;
		second += out == 2;
		for (int i = 0; i < 2; i++) {
			g->ops->stream_destroy(g, s[i]);
			g->ops->event_destroy(g, e[i]);
		}
		g->ops->free(g, p);
	}
	ck_assert_int_eq(first + second, 200);
	ck_assert_int_gt(first, 20);
	ck_assert_int_gt(second, 20);
}
END_TEST

START_TEST(a_bit_of_the_nth_copy_flips)
{
	uint8_t in[4] = { 0 }, out[4];
	kvt_dptr p = device(4);

	kvt_mock_flip(g, 3, 10);
	OK(g->ops->copy_h2d(g, p, in, 4));
	OK(g->ops->copy_d2h(g, out, p, 4));
	ck_assert(!memcmp(in, out, 4));
	OK(g->ops->copy_h2d(g, p, in, 4));
	OK(g->ops->copy_d2h(g, out, p, 4));
	ck_assert(out[0] == 0 && out[1] == 4 && out[2] == 0 && out[3] == 0);
	OK(g->ops->copy_h2d(g, p, in, 4));
	OK(g->ops->copy_d2h(g, out, p, 4));
	ck_assert(!memcmp(in, out, 4));
	kvt_mock_corrupt(g, p, 31);
	OK(g->ops->copy_d2h(g, out, p, 4));
	ck_assert(out[3] == 0x80);
}
END_TEST

/* The copy kernel's items count as copies: a digest on arrival sees a flip in any of them. */
START_TEST(a_bit_of_a_copied_item_flips)
{
	enum { N = 3 };
	static uint8_t rows[N][64];
	uint64_t src[N], dst[N], out[N];
	uint32_t one[N] = { 1, 1, 1 };
	kvt_dptr from = device(sizeof(rows)), to = device(sizeof(rows)), d_src = device(sizeof(src)),
		 d_dst = device(sizeof(dst)), d_one = device(sizeof(one)), d_out = device(sizeof(out));
	struct kvt_copy_args copy = { .dst = d_dst, .src = d_src, .n = N, .bytes = 64 };
	struct kvt_digest_args digest = { .blocks = d_dst, .rows = d_one, .out = d_out, .n = N, .row_bytes = 64 };
	void *copy_args[] = { &copy }, *digest_args[] = { &digest };
	struct kvt_dim3 dim = { 32, 1, 1 };
	kvt_kernel k_copy, k_digest;

	OK(g->ops->kernel(g, "block", "copy", &k_copy));
	OK(g->ops->kernel(g, "block", "digest", &k_digest));
	for (int i = 0; i < N; i++) {
		src[i] = from + i * 64;
		dst[i] = to + i * 64;
	}
	OK(g->ops->copy_h2d(g, from, rows, sizeof(rows)));
	OK(g->ops->copy_h2d(g, d_src, src, sizeof(src)));
	OK(g->ops->copy_h2d(g, d_dst, dst, sizeof(dst)));
	OK(g->ops->copy_h2d(g, d_one, one, sizeof(one)));
	for (uint64_t nth = 0; nth <= N; nth++) {
		kvt_mock_flip(g, nth, 100 * nth);
		OK(g->ops->launch(g, k_copy, dim, dim, 0, 0, copy_args, 1));
		kvt_mock_flip(g, 0, 0);
		OK(g->ops->launch(g, k_digest, dim, dim, 0, 0, digest_args, 1));
		OK(g->ops->copy_d2h(g, out, d_out, sizeof(out)));
		for (uint64_t i = 0; i < N; i++)
			ck_assert((out[i] == kvt_row_digest(0, rows[i], 64)) == (i + 1 != nth));
	}
}
END_TEST

START_TEST(calls_are_written_down)
{
	struct kvt_digest_args a = { 0 };
	void *args[] = { &a };
	struct kvt_mock_record r;
	kvt_dptr p = device(1000), q = device(1000);
	kvt_kernel k;
	kvt_stream s;

	OK(g->ops->stream_create(g, &s));
	OK(g->ops->kernel(g, "block", "digest", &k));
	kvt_mock_reset(g);
	OK(g->ops->copy_2d_async(g, p, 100, q, 90, 30, 7, s));
	OK(g->ops->launch(g, k, (struct kvt_dim3){ 5, 6, 7 }, (struct kvt_dim3){ 32, 2, 1 }, 99, s, args, 1));
	ck_assert_int_eq(g->ops->copy_d2h(g, args, p, 5000), -EINVAL);
	OK(g->ops->stream_sync(g, s));
	g->ops->free(g, q);
	OK(g->ops->launch_early(g, k, (struct kvt_dim3){ 4, 1, 1 }, (struct kvt_dim3){ 64, 1, 1 }, 0, 0, args, 1));

	ck_assert(kvt_mock_log(g, 0, &r));
	ck_assert(r.call == KVT_MOCK_copy_2d_async && r.dst == p && r.src == q && r.dst_pitch == 100 &&
		  r.src_pitch == 90 && r.width == 30 && r.height == 7 && r.bytes == 210 && r.stream == s &&
		  r.result == 0);
	ck_assert(kvt_mock_log(g, 1, &r));
	ck_assert(r.call == KVT_MOCK_launch && r.handle == k && r.grid.x == 5 && r.grid.y == 6 && r.grid.z == 7 &&
		  r.block.x == 32 && r.block.y == 2 && r.shared_bytes == 99 && r.stream == s);
	ck_assert_str_eq(r.module, "block");
	ck_assert_str_eq(r.function, "digest");
	ck_assert(kvt_mock_log(g, 2, &r));
	ck_assert(r.call == KVT_MOCK_copy_d2h && r.bytes == 5000 && r.result == -EINVAL);
	ck_assert(kvt_mock_log(g, 3, &r) && r.call == KVT_MOCK_stream_sync);
	ck_assert(kvt_mock_log(g, 4, &r) && r.call == KVT_MOCK_free && r.dst == q);
	ck_assert(kvt_mock_log(g, 5, &r) && r.call == KVT_MOCK_launch_early && r.handle == k && r.grid.x == 4 &&
		  r.block.x == 64 && r.stream == 0);
	ck_assert(!kvt_mock_log(g, 6, &r));
	ck_assert_uint_eq(kvt_mock_count(g, KVT_MOCK_launch), 1);
	ck_assert_uint_eq(kvt_mock_syncs(g), 2);
	ck_assert_uint_eq(kvt_mock_allocs(g), 0);
	p = device(1);
	ck_assert_uint_eq(kvt_mock_allocs(g), 1);
	ck_assert_str_eq(kvt_mock_call_name(KVT_MOCK_event_elapsed), "event_elapsed");
	ck_assert_ptr_null(kvt_mock_call_name(KVT_MOCK_CALL_KINDS));
}
END_TEST

#define FAULT(text) ck_assert_msg(strstr(kvt_mock_fault(g), text), "fault: '%s'", kvt_mock_fault(g))

START_TEST(fault_free_under_work)
{
	kvt_dptr p = device(16);

	kvt_mock_delay(g, UINT64_MAX);
	OK(g->ops->memset_async(g, p, 0, 16, 0));
	g->ops->free(g, p);
	FAULT("pending");
}
END_TEST

START_TEST(fault_free_under_a_launch)
{
	struct kvt_digest_args a = { .n = 0 };
	struct kvt_dim3 dim = { 32, 1, 1 };
	void *args[] = { &a };
	kvt_kernel k;

	a.out = device(16);
	OK(g->ops->kernel(g, "block", "digest", &k));
	kvt_mock_delay(g, UINT64_MAX);
	OK(g->ops->launch(g, k, dim, dim, 0, 0, args, 1));
	g->ops->free(g, a.out);
	FAULT("pending");
}
END_TEST

START_TEST(fault_host_free_under_work)
{
	kvt_dptr p = device(16);
	void *h;

	OK(g->ops->host_alloc(g, 16, &h));
	kvt_mock_delay(g, UINT64_MAX);
	OK(g->ops->copy_h2d_async(g, p, h, 16, 0));
	g->ops->host_free(g, h);
	FAULT("host_free");
}
END_TEST

START_TEST(fault_graph_on_freed_memory)
{
	kvt_dptr p = device(16);
	kvt_graph graph;
	kvt_stream s;

	OK(g->ops->stream_create(g, &s));
	OK(g->ops->capture_begin(g, s));
	OK(g->ops->memset_async(g, p, 0, 16, s));
	OK(g->ops->capture_end(g, s, &graph));
	g->ops->free(g, p);
	ck_assert_str_eq(kvt_mock_fault(g), "");
	OK(g->ops->graph_launch(g, graph, s));
	ck_assert_int_eq(g->ops->stream_sync(g, s), -EFAULT);
	FAULT("not in one allocation");
	OK(g->ops->stream_sync(g, s));
}
END_TEST

START_TEST(fault_double_free)
{
	kvt_dptr p = device(16);

	g->ops->free(g, p);
	ck_assert_str_eq(kvt_mock_fault(g), "");
	g->ops->free(g, p);
	FAULT("free");
}
END_TEST

START_TEST(fault_unknown_handles)
{
	kvt_event e;

	OK(g->ops->event_create(g, &e));
	g->ops->event_destroy(g, e);
	ck_assert_str_eq(kvt_mock_fault(g), "");
	g->ops->event_destroy(g, e);
	FAULT("event_destroy");
}
END_TEST

int main(void)
{
	Suite *s = suite_create("gpu mock");
	TCase *t = tcase_create("gpu mock");
	SRunner *r = srunner_create(s);
	int failed;

	tcase_add_checked_fixture(t, setup, teardown);
	tcase_set_timeout(t, 60);
	tcase_add_test(t, the_cpu_cannot_touch_device_memory);
	tcase_add_test(t, new_memory_is_not_zero);
	tcase_add_test(t, every_call_can_fail_once);
	tcase_add_test(t, a_failed_call_did_nothing);
	tcase_add_test(t, a_kind_of_call_is_refused);
	tcase_add_test(t, work_is_late);
	tcase_add_test(t, streams_race);
	tcase_add_test(t, a_bit_of_the_nth_copy_flips);
	tcase_add_test(t, a_bit_of_a_copied_item_flips);
	tcase_add_test(t, calls_are_written_down);
	tcase_add_test(t, fault_free_under_work);
	tcase_add_test(t, fault_free_under_a_launch);
	tcase_add_test(t, fault_host_free_under_work);
	tcase_add_test(t, fault_graph_on_freed_memory);
	tcase_add_test(t, fault_double_free);
	tcase_add_test(t, fault_unknown_handles);
	suite_add_tcase(s, t);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed != 0;
}
