// SPDX-License-Identifier: MIT
/*
 * What every host backend must do, whatever it is made of: each case runs on each row of
 * the table below. What only one of them can do is tested beside it (tests/unit/host_*.c).
 */
#include <check.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include "lib/host_rig.h"

#define FRAME (64u << 10)
#define DEPTH 32u

static const struct variant {
	const char *name;
	uint32_t kind, io;
} variants[] = {
	{ "user/io_uring", KVT_HOST_USER, KVT_IO_URING },
	{ "user/threads", KVT_HOST_USER, KVT_IO_THREADS },
	{ "module", KVT_HOST_MODULE, KVT_IO_AUTO },
};

#define N_VARIANTS ((int)(sizeof(variants) / sizeof(variants[0])))

/* KVT_TEST_VARIANT names the only one that is to run, and which must then be there. */
static int first_variant, end_variant = N_VARIANTS;

static void skip(int v, const char *why)
{
	fprintf(stderr, "SKIP (%s): %s\n", variants[v].name, why);
}

/* False where this variant cannot be on this machine; then the reason has been told. */
static bool open_host(struct rig *r, int v, uint64_t frame, uint32_t depth)
{
	int ret = rig_host(r, variants[v].kind, variants[v].io, frame, depth);

	if ((ret == -ENODEV || ret == -EPERM || ret == -ENOSYS) && end_variant - first_variant > 1) {
		skip(v, kvt_last_error());
		return false;
	}
	must(ret);
	ck_assert_str_eq(kvt_host_name(r->host), variants[v].name);
	ck_assert_str_eq(kvt_host_note(r->host), "");
	return true;
}

static bool open_rig(struct rig *r, int v, const char *dir, uint64_t frame, uint32_t frames, uint32_t slots)
{
	if (!open_host(r, v, frame, DEPTH))
		return false;
	rig_fill(r, dir, frames, slots);
	return true;
}

START_TEST(pools_are_zeroed_aligned_and_private)
{
	const struct kvt_pool_params kinds[] = {
		{ .n_frames = 33, .node = -1 },
		{ .n_frames = 33, .node = -1, .pinned = true },
		{ .n_frames = 64, .node = -1, .pinned = true, .hugepages = true },
		{ .n_frames = 33, .node = -1, .hugepages = true },
		{ .n_frames = 33, .node = 0 },
	};
	unsigned char resident;
	struct rig r = { 0 };
	struct kvt_pool *pool;
	unsigned int i;
	uint32_t f;
	int status;
	pid_t pid;

	if (!open_host(&r, _i, FRAME, DEPTH))
		return;
	for (i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
		must(kvt_pool_create(r.host, &kinds[i], &pool));
		ck_assert_uint_eq((uintptr_t)pool->base % 4096, 0);
		ck_assert_uint_eq(pool->n_frames, kinds[i].n_frames);
		ck_assert_uint_eq(pool->frame_bytes, FRAME);
		ck_assert_int_eq(pool->pinned, kinds[i].pinned);
		ck_assert(pool->node == kinds[i].node || pool->node == -1);
		if (!kinds[i].hugepages)
			ck_assert(!pool->hugepages);
		for (f = 0; f < pool->n_frames; f++) {
			ck_assert(zeros(pool->base + (uint64_t)f * FRAME, FRAME));
			pool->base[(uint64_t)f * FRAME + FRAME - 1] = 1;
		}
		/* The child has no such mapping. */
		pid = fork();
		if (!pid)
			_exit(mincore(pool->base, 4096, &resident) < 0 && errno == ENOMEM ? 0 : 1);
		ck_assert_int_eq(waitpid(pid, &status, 0), pid);
		ck_assert_msg(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child inherited the frames");
		kvt_pool_destroy(r.host, pool);
	}
	kvt_host_close(r.host);
	ck_assert_uint_eq(atomic_load(&r.budget.used), 0);
}
END_TEST

START_TEST(pools_of_impossible_size)
{
	struct kvt_pool_params params = { .node = -1 };
	struct rig r = { 0 };
	struct kvt_pool *pool = NULL;

	if (!open_host(&r, _i, 2 << 20, DEPTH))
		return;
	ck_assert_int_eq(kvt_pool_create(r.host, &params, &pool), -EINVAL);
	params.n_frames = UINT32_MAX; /* 8 PiB */
	ck_assert_int_eq(kvt_pool_create(r.host, &params, &pool), -ENOMEM);
	params.pinned = true;
	ck_assert_int_eq(kvt_pool_create(r.host, &params, &pool), -ENOMEM);
	ck_assert_ptr_null(pool);
	kvt_pool_destroy(r.host, NULL);
	kvt_host_close(r.host);
	kvt_host_close(NULL);
}
END_TEST

START_TEST(every_slot_comes_back)
{
	const uint32_t slots = 200, frames = 50;
	struct kvt_xfer x[200];
	struct kvt_done done[7];
	bool seen[200];
	uint32_t op, i, base, sent, got;
	struct rig r;
	int n;

	if (!open_rig(&r, _i, test_dir(), FRAME, frames, slots))
		return;
	for (op = KVT_XFER_WRITE; op + 1 > KVT_XFER_READ; op--) {
		for (base = 0; base < slots; base += frames) {
			memset(seen, 0, sizeof(seen));
			for (i = 0; i < frames; i++) {
				/* Slots in an order that is not the frames'. */
				x[i] = xfer(&r, op, (base + i * 37) % slots, i);
				if (op == KVT_XFER_WRITE)
					fill(frame_at(&r, i), FRAME, x[i].slot);
				else
					memset(frame_at(&r, i), 0xee, FRAME);
			}
			for (sent = got = 0; got < frames;) {
				n = kvt_host_submit(r.host, x + sent, frames - sent);
				must(n);
				sent += (uint32_t)n;
				ck_assert_uint_le(sent - got, DEPTH);
				n = kvt_host_reap(r.host, done, 7);
				must(n);
				for (i = 0; i < (uint32_t)n; i++) {
					ck_assert_int_eq(done[i].result, 0);
					ck_assert(done[i].user < slots && !seen[done[i].user]);
					seen[done[i].user] = true;
				}
				got += (uint32_t)n;
			}
			for (i = 0; i < frames; i++) {
				ck_assert(seen[x[i].slot]);
				ck_assert(holds(frame_at(&r, i), FRAME, x[i].slot));
			}
		}
	}
	rig_close(&r);
}
END_TEST

START_TEST(a_batch_beyond_the_depth_is_cut)
{
	struct kvt_done done[2 * DEPTH];
	struct kvt_xfer x[2 * DEPTH];
	struct rig r;
	uint32_t i;

	if (!open_rig(&r, _i, test_dir(), FRAME, 2 * DEPTH, 2 * DEPTH))
		return;
	for (i = 0; i < 2 * DEPTH; i++)
		x[i] = xfer(&r, KVT_XFER_WRITE, i, i);
	ck_assert_int_eq(kvt_host_submit(r.host, x, 2 * DEPTH), DEPTH);
	kvt_host_drain(r.host);
	/* Finished is not reaped: the table is still full. */
	ck_assert_int_eq(kvt_host_submit(r.host, x, 1), 0);
	ck_assert_int_eq(kvt_host_reap(r.host, done, 1), 1);
	ck_assert_int_eq(kvt_host_submit(r.host, x, 2), 1);
	kvt_host_drain(r.host);
	ck_assert_int_eq(kvt_host_reap(r.host, done, 2 * DEPTH), DEPTH);
	ck_assert_int_eq(kvt_host_reap(r.host, done, 2 * DEPTH), 0);
	ck_assert_int_eq(kvt_host_submit(r.host, x, 0), 0);
	rig_close(&r);
}
END_TEST

START_TEST(bad_transfers_change_nothing)
{
	struct kvt_xfer good, bad[2];
	struct kvt_done done;
	unsigned int i;
	struct rig r;

	if (!open_rig(&r, _i, test_dir(), FRAME, 4, 4))
		return;
	good = xfer(&r, KVT_XFER_WRITE, 0, 0);
	for (i = 0; i < 7; i++) {
		bad[0] = bad[1] = good;
		switch (i) {
		case 0: bad[1].op = 2; break;
		case 1: bad[1].slot = 4; break;
		case 2: bad[1].frame = 4; break;
		case 3: bad[1].bytes = 0; break;
		case 4: bad[1].bytes = FRAME + 1; break;
		case 5: bad[1].file = NULL; break;
		case 6: bad[1].pool = NULL; break;
		}
		ck_assert_int_eq(kvt_host_submit(r.host, bad, 2), -EINVAL);
		kvt_host_drain(r.host);
		ck_assert_int_eq(kvt_host_reap(r.host, &done, 1), 0);
	}
	rig_close(&r);
}
END_TEST

/* Slots at both ends of the file, lengths that no alignment divides, never a byte outside the slot. */
START_TEST(odd_lengths)
{
	const uint32_t lengths[] = { 1, 7, 511, 512, 513, 4095, 4096, 4097, FRAME - 1, FRAME };
	const uint32_t slots = 3;
	struct kvt_xfer x;
	struct rig r;
	uint32_t i, s;

	if (!open_rig(&r, _i, test_dir(), FRAME, 3, slots))
		return;
	for (i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++) {
		for (s = 0; s < slots; s++) {
			fill(frame_at(&r, 0), FRAME, 100 + s);
			ck_assert_int_eq(transfer(&r, xfer(&r, KVT_XFER_WRITE, s, 0)), 0);
		}
		fill(frame_at(&r, 0), FRAME, i);
		x = xfer(&r, KVT_XFER_WRITE, slots - 1, 0);
		x.bytes = lengths[i];
		ck_assert_int_eq(transfer(&r, x), 0);
		memset(frame_at(&r, 1), 0, 2 * FRAME);
		x.op = KVT_XFER_READ;
		x.frame = 1;
		ck_assert_int_eq(transfer(&r, x), 0);
		ck_assert(!memcmp(frame_at(&r, 0), frame_at(&r, 1), lengths[i]));
		ck_assert_msg(zeros(frame_at(&r, 2), FRAME), "a read went beyond its frame");
		for (s = 0; s + 1 < slots; s++) {
			ck_assert_int_eq(transfer(&r, xfer(&r, KVT_XFER_READ, s, 1)), 0);
			ck_assert_msg(holds(frame_at(&r, 1), FRAME, 100 + s), "slot %u was touched", s);
		}
	}
	rig_close(&r);
}
END_TEST

START_TEST(the_file_is_as_large_as_told_and_nameless)
{
	struct kvt_file_info info;
	struct stat st;
	struct rig r;
	char link[64], target[4096];
	ssize_t n;

	if (!open_rig(&r, _i, test_dir(), FRAME, 2, 5))
		return;
	ck_assert_int_eq(fstat(kvt_file_fd(r.file), &st), 0);
	ck_assert_int_eq(st.st_size, 5 * FRAME);
	ck_assert_int_eq(st.st_nlink, 0);
	ck_assert_int_eq(st.st_blocks, 0);
	ck_assert(fcntl(kvt_file_fd(r.file), F_GETFD) & FD_CLOEXEC);
	ck_assert(fcntl(kvt_host_eventfd(r.host), F_GETFD) & FD_CLOEXEC);
	snprintf(link, sizeof(link), "/proc/self/fd/%d", kvt_file_fd(r.file));
	n = readlink(link, target, sizeof(target) - 1);
	ck_assert(n > 0);
	target[n] = '\0';
	ck_assert_ptr_nonnull(strstr(target, "(deleted)"));
	kvt_file_info(r.file, &info);
	ck_assert_int_eq(info.direct, !info.reason[0]);
	ck_assert_int_eq(info.direct, !!(fcntl(kvt_file_fd(r.file), F_GETFL) & O_DIRECT));

	/* A slot never written reads as zeros; a discarded one gives its space back. */
	fill(frame_at(&r, 0), FRAME, 1);
	ck_assert_int_eq(transfer(&r, xfer(&r, KVT_XFER_READ, 4, 0)), 0);
	ck_assert(zeros(frame_at(&r, 0), FRAME));
	fill(frame_at(&r, 0), FRAME, 1);
	ck_assert_int_eq(transfer(&r, xfer(&r, KVT_XFER_WRITE, 4, 0)), 0);
	ck_assert_int_eq(fsync(kvt_file_fd(r.file)), 0);
	ck_assert_int_eq(fstat(kvt_file_fd(r.file), &st), 0);
	ck_assert_int_ge(st.st_blocks, FRAME / 512);
	kvt_file_discard(r.file, 4);
	kvt_file_discard(r.file, 5); /* outside: nothing grows */
	ck_assert_int_eq(fstat(kvt_file_fd(r.file), &st), 0);
	ck_assert_int_eq(st.st_blocks, 0);
	ck_assert_int_eq(st.st_size, 5 * FRAME);
	rig_close(&r);
}
END_TEST

START_TEST(bad_directories)
{
	struct kvt_file_params params = { .n_slots = 4 };
	struct rig r = { 0 };
	struct kvt_file *file = NULL;

	if (!open_host(&r, _i, FRAME, DEPTH))
		return;
	params.dir = "/nonexistent/kvtier";
	ck_assert_int_eq(kvt_file_open(r.host, &params, &file), -ENOENT);
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "/nonexistent/kvtier"));
	params.dir = "/etc/passwd";
	ck_assert_int_eq(kvt_file_open(r.host, &params, &file), -ENOTDIR);
	params.dir = "";
	ck_assert_int_eq(kvt_file_open(r.host, &params, &file), -EINVAL);
	params.dir = NULL;
	ck_assert_int_eq(kvt_file_open(r.host, &params, &file), -EINVAL);
	params.dir = test_dir();
	params.n_slots = 0;
	ck_assert_int_eq(kvt_file_open(r.host, &params, &file), -EINVAL);
	ck_assert_ptr_null(file);
	kvt_file_close(r.host, NULL);
	kvt_host_close(r.host);
}
END_TEST

START_TEST(bad_parameters)
{
	struct kvt_budget budget = { .limit = UINT64_MAX };
	struct kvt_host_params good = { .kind = variants[_i].kind, .io = variants[_i].io, .depth = DEPTH,
					.frame_bytes = FRAME, .budget = &budget }, p;
	struct kvt_host *host = NULL;
	unsigned int i;

	for (i = 0; i < 10; i++) {
		p = good;
		switch (i) {
		case 0: p.kind = 3; break;
		case 1: p.io = 3; break;
		case 2: p.depth = 0; break;
		case 3: p.depth = 4097; break;
		case 4: p.frame_bytes = 0; break;
		case 5: p.frame_bytes = 4095; break;
		case 6: p.frame_bytes = 6000; break;
		case 7: p.frame_bytes = (2 << 20) + 4096; break;
		case 8: p.io_threads = 1000000; break;
		case 9: p.budget = NULL; break;
		}
		ck_assert_int_eq(kvt_host_open(&p, &host), -EINVAL);
	}
	ck_assert_ptr_null(host);
	ck_assert_uint_eq(atomic_load(&budget.peak), 0);
}
END_TEST

START_TEST(the_budget_is_asked_first)
{
	const uint32_t depths[] = { 1, 5, 32, 1024, 4096 };
	struct kvt_budget budget;
	struct kvt_host_params params = { .kind = variants[_i].kind, .io = variants[_i].io, .frame_bytes = FRAME,
					  .budget = &budget };
	struct kvt_host *host;
	unsigned int i;
	int ret;

	for (i = 0; i < sizeof(depths) / sizeof(depths[0]); i++) {
		params.depth = depths[i];
		budget = (struct kvt_budget){ .limit = kvt_host_overhead(&params) - 1 };
		ret = kvt_host_open(&params, &host);
		ck_assert_int_eq(ret, -ENOMEM);
		ck_assert_uint_eq(atomic_load(&budget.used), 0);
		budget = (struct kvt_budget){ .limit = kvt_host_overhead(&params) };
		ret = kvt_host_open(&params, &host);
		if (ret == -EPERM || ret == -ENOSYS || ret == -ENODEV) {
			skip(_i, kvt_last_error());
			return;
		}
		must(ret);
		ck_assert_uint_eq(atomic_load(&budget.used), budget.limit);
		kvt_host_close(host);
		ck_assert_uint_eq(atomic_load(&budget.used), 0);
	}
}
END_TEST

/* Any wait by poll() ends, however few completions are taken at a time. */
START_TEST(the_eventfd_tells_of_every_completion)
{
	struct pollfd p = { .events = POLLIN };
	struct kvt_xfer x[DEPTH];
	struct kvt_done done[2];
	uint32_t round, i, got;
	struct rig r;
	int n;

	if (!open_rig(&r, _i, test_dir(), 4096, DEPTH, DEPTH))
		return;
	p.fd = kvt_host_eventfd(r.host);
	for (round = 0; round < 200; round++) {
		for (i = 0; i < DEPTH; i++)
			x[i] = xfer(&r, round % 2 ? KVT_XFER_READ : KVT_XFER_WRITE, i, i);
		ck_assert_int_eq(kvt_host_submit(r.host, x, DEPTH), DEPTH);
		if (round % 3 == 0)
			kvt_host_drain(r.host);
		for (got = 0; got < DEPTH; got += (uint32_t)n) {
			ck_assert_msg(poll(&p, 1, 100000) == 1, "completions wait and the eventfd is silent");
			n = kvt_host_reap(r.host, done, 1 + round % 2);
			must(n);
		}
		/* All are reaped: at most one look in vain for each, whose signal may come after it was taken; then silence. */
		ck_assert_int_eq(kvt_host_reap(r.host, done, 2), 0);
		for (i = 0; poll(&p, 1, 0) == 1; i++) {
			ck_assert_uint_lt(i, DEPTH);
			ck_assert_int_eq(kvt_host_reap(r.host, done, 2), 0);
		}
	}
	rig_close(&r);
}
END_TEST

START_TEST(cancel_ends_or_completes)
{
	struct kvt_done done[DEPTH];
	struct kvt_xfer x[DEPTH];
	uint32_t i, cancelled = 0, told = 0;
	struct rig r;
	int n, ret;

	if (!open_rig(&r, _i, test_dir(), FRAME, DEPTH, DEPTH))
		return;
	ck_assert_int_eq(kvt_host_cancel(r.host, 5), 0);
	for (i = 0; i < DEPTH; i++) {
		x[i] = xfer(&r, KVT_XFER_WRITE, i, i);
		fill(frame_at(&r, i), FRAME, i);
	}
	ck_assert_int_eq(kvt_host_submit(r.host, x, DEPTH), DEPTH);
	for (i = DEPTH; i-- > 0;) {
		ret = kvt_host_cancel(r.host, i);
		ck_assert(ret == 0 || ret == 1);
		told += (uint32_t)ret;
	}
	kvt_host_drain(r.host);
	n = kvt_host_reap(r.host, done, DEPTH);
	ck_assert_int_eq(n, DEPTH);
	for (i = 0; i < DEPTH; i++) {
		ck_assert(done[i].result == 0 || done[i].result == -ECANCELED);
		cancelled += done[i].result == -ECANCELED;
	}
	ck_assert_uint_le(told, cancelled);
	ck_assert_int_eq(kvt_host_cancel(r.host, 5), 0);
	for (i = 0; i < DEPTH; i++) {
		if (done[i].result)
			continue;
		ck_assert_int_eq(transfer(&r, xfer(&r, KVT_XFER_READ, (uint32_t)done[i].user, 0)), 0);
		ck_assert(holds(frame_at(&r, 0), FRAME, done[i].user));
	}
	rig_close(&r);
}
END_TEST

START_TEST(close_with_transfers_in_flight)
{
	struct kvt_xfer x[DEPTH];
	struct rig r;
	uint32_t i;

	if (!open_rig(&r, _i, test_dir(), FRAME, DEPTH, DEPTH))
		return;
	for (i = 0; i < DEPTH; i++)
		x[i] = xfer(&r, KVT_XFER_WRITE, i, i);
	ck_assert_int_eq(kvt_host_submit(r.host, x, DEPTH), DEPTH);
	rig_close(&r); /* drains; nothing is reaped */
}
END_TEST

/* A thread may go away while its transfers are in flight. */
static void *submit_and_leave(void *arg)
{
	struct rig *r = arg;
	struct kvt_xfer x[DEPTH];
	uint32_t i;

	for (i = 0; i < DEPTH; i++)
		x[i] = xfer(r, KVT_XFER_WRITE, i, i);
	ck_assert_int_eq(kvt_host_submit(r->host, x, DEPTH), DEPTH);
	return NULL;
}

START_TEST(the_submitting_thread_ends)
{
	struct kvt_done done[DEPTH];
	uint32_t round, i;
	pthread_t thread;
	struct rig r;

	if (!open_rig(&r, _i, test_dir(), FRAME, DEPTH, DEPTH))
		return;
	for (round = 0; round < 8; round++) {
		for (i = 0; i < DEPTH; i++)
			fill(frame_at(&r, i), FRAME, round * DEPTH + i);
		ck_assert_int_eq(pthread_create(&thread, NULL, submit_and_leave, &r), 0);
		pthread_join(thread, NULL);
		kvt_host_drain(r.host);
		ck_assert_int_eq(kvt_host_reap(r.host, done, DEPTH), DEPTH);
		for (i = 0; i < DEPTH; i++)
			ck_assert_int_eq(done[i].result, 0);
		for (i = 0; i < DEPTH; i++) {
			ck_assert_int_eq(transfer(&r, xfer(&r, KVT_XFER_READ, i, i)), 0);
			ck_assert(holds(frame_at(&r, i), FRAME, round * DEPTH + i));
		}
		kvt_file_discard(r.file, round);
	}
	rig_close(&r);
}
END_TEST

#define CROWD 4u
#define OWN 8u /* slots and frames of each thread */
#define TURNS 40u

struct crowd {
	struct rig *r;
	uint32_t first;
	_Atomic uint32_t *in_flight; /* [CROWD * OWN] by slot */
};

static void reap_some(struct crowd *c)
{
	struct kvt_done done[3];
	int i, n = kvt_host_reap(c->r->host, done, 3);

	must(n);
	for (i = 0; i < n; i++) {
		ck_assert_int_eq(done[i].result, 0);
		atomic_store(&c->in_flight[done[i].user], 0);
	}
}

/* Each thread writes and reads its own slots; any thread may reap any completion. */
static void *one_of_a_crowd(void *arg)
{
	struct crowd *c = arg;
	struct kvt_xfer x;
	uint32_t turn, i, slot;

	for (turn = 0; turn < TURNS; turn++) {
		for (i = 0; i < OWN; i++) {
			slot = c->first + i;
			x = xfer(c->r, turn % 2 ? KVT_XFER_READ : KVT_XFER_WRITE, slot, slot);
			if (turn % 2)
				memset(frame_at(c->r, slot), 0, c->r->frame);
			else
				fill(frame_at(c->r, slot), c->r->frame, turn * 64 + slot);
			atomic_store(&c->in_flight[slot], 1);
			while (kvt_host_submit(c->r->host, &x, 1) != 1)
				reap_some(c);
		}
		if (turn % 8 == 0)
			kvt_host_cancel(c->r->host, ~0ull);
		for (i = 0; i < OWN; i++) {
			slot = c->first + i;
			while (atomic_load(&c->in_flight[slot])) {
				reap_some(c);
				sched_yield();
			}
			ck_assert(holds(frame_at(c->r, slot), c->r->frame, turn / 2 * 128 + slot));
		}
	}
	return NULL;
}

START_TEST(threads_submit_and_reap_together)
{
	_Atomic uint32_t in_flight[CROWD * OWN] = { 0 };
	struct crowd c[CROWD];
	pthread_t t[CROWD];
	struct rig r;
	uint32_t i;

	if (!open_rig(&r, _i, test_dir(), 4096, OWN * CROWD, OWN * CROWD))
		return;
	for (i = 0; i < CROWD; i++) {
		c[i] = (struct crowd){ .r = &r, .first = OWN * i, .in_flight = in_flight };
		ck_assert_int_eq(pthread_create(&t[i], NULL, one_of_a_crowd, &c[i]), 0);
	}
	for (i = 0; i < CROWD; i++)
		pthread_join(t[i], NULL);
	rig_close(&r);
}
END_TEST

START_TEST(two_hosts_at_once)
{
	struct rig a, b;
	uint32_t i;

	if (!open_rig(&a, _i, test_dir(), FRAME, 4, 8) || !open_rig(&b, _i, test_dir(), 4096, 4, 8))
		return;
	for (i = 0; i < 8; i++) {
		fill(frame_at(&a, 0), FRAME, i);
		fill(frame_at(&b, 0), 4096, 100 + i);
		ck_assert_int_eq(transfer(&a, xfer(&a, KVT_XFER_WRITE, i, 0)), 0);
		ck_assert_int_eq(transfer(&b, xfer(&b, KVT_XFER_WRITE, i, 0)), 0);
	}
	for (i = 0; i < 8; i++) {
		ck_assert_int_eq(transfer(&a, xfer(&a, KVT_XFER_READ, i, 1)), 0);
		ck_assert_int_eq(transfer(&b, xfer(&b, KVT_XFER_READ, i, 1)), 0);
		ck_assert(holds(frame_at(&a, 1), FRAME, i));
		ck_assert(holds(frame_at(&b, 1), 4096, 100 + i));
	}
	rig_close(&a);
	rig_close(&b);
}
END_TEST

/* Many pools and files come and go: whatever the implementation registers is given back. */
START_TEST(pools_and_files_come_and_go)
{
	struct kvt_pool_params pool = { .n_frames = 3, .pinned = true, .node = -1 };
	struct kvt_file_params file = { .dir = test_dir(), .n_slots = 2 };
	struct kvt_pool *keep = NULL;
	struct rig r = { 0 };
	uint32_t i;

	if (!open_host(&r, _i, FRAME, DEPTH))
		return;
	must(kvt_pool_create(r.host, &pool, &keep));
	for (i = 0; i < 300; i++) {
		pool.pinned = i % 2;
		must(kvt_pool_create(r.host, &pool, &r.pool));
		must(kvt_file_open(r.host, &file, &r.file));
		fill(frame_at(&r, 2), FRAME, i);
		ck_assert_int_eq(transfer(&r, xfer(&r, KVT_XFER_WRITE, 1, 2)), 0);
		ck_assert_int_eq(transfer(&r, xfer(&r, KVT_XFER_READ, 1, 0)), 0);
		ck_assert(holds(frame_at(&r, 0), FRAME, i));
		kvt_file_close(r.host, r.file);
		kvt_pool_destroy(r.host, r.pool);
	}
	kvt_pool_destroy(r.host, keep);
	kvt_host_close(r.host);
}
END_TEST

/* Write and read a few slots in @dir, whatever kind of file system it is, and check what is told of it. */
static void works_in(int v, const char *dir, const char *fs)
{
	struct kvt_file_info info, probed;
	struct rig r;
	uint32_t i;

	if (!open_rig(&r, v, dir, FRAME, 8, 8))
		return;
	kvt_file_info(r.file, &info);
	ck_assert_str_eq(info.fs, fs);
	if (info.direct) {
		ck_assert_str_eq(info.reason, "");
		ck_assert_uint_ge(info.offset_align, 512);
	} else {
		ck_assert_msg(strstr(info.reason, fs) != NULL, "no file system named in '%s'", info.reason);
	}
	must(kvt_file_probe(dir, &probed));
	ck_assert_int_eq(probed.direct, info.direct);
	ck_assert_str_eq(probed.fs, info.fs);
	ck_assert_str_eq(probed.reason, info.reason);
	for (i = 0; i < 8; i++) {
		fill(frame_at(&r, i), FRAME, i);
		ck_assert_int_eq(transfer(&r, xfer(&r, KVT_XFER_WRITE, i, i)), 0);
	}
	memset(r.pool->base, 0, 8 * FRAME);
	for (i = 0; i < 8; i++) {
		ck_assert_int_eq(transfer(&r, xfer(&r, KVT_XFER_READ, i, 7 - i)), 0);
		ck_assert(holds(frame_at(&r, 7 - i), FRAME, i));
	}
	rig_close(&r);
}

/* tmpfs has accepted O_DIRECT since Linux 6.6 and copies all the same: buffered on every kernel. */
START_TEST(tmpfs_is_buffered_and_named)
{
	struct kvt_file_info info;

	must(kvt_file_probe("/dev/shm", &info));
	if (strcmp(info.fs, "tmpfs")) {
		skip(_i, "/dev/shm is not a tmpfs");
		return;
	}
	ck_assert(!info.direct);
	ck_assert_str_eq(info.reason, "tmpfs has no O_DIRECT");
	works_in(_i, "/dev/shm", "tmpfs");
}
END_TEST

/* A mount namespace of this test process alone (check forks one for each test). */
static bool own_mounts(int v)
{
	if (unshare(CLONE_NEWNS) && unshare(CLONE_NEWNS | CLONE_NEWUSER)) {
		skip(v, "no mount namespace for this user");
		return false;
	}
	if (mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL)) {
		skip(v, "mounts cannot be made private");
		return false;
	}
	return true;
}

START_TEST(overlayfs_works_either_way)
{
	char base[] = "/var/tmp/kvt-overlay-XXXXXX", lower[64], upper[64], work[64], merged[64], options[256];

	if (!own_mounts(_i))
		return;
	/* An overlay's upper layer must not itself be one: a tmpfs of its own serves everywhere. */
	ck_assert_ptr_nonnull(mkdtemp(base));
	if (mount("tmpfs", base, "tmpfs", 0, "size=64m")) {
		skip(_i, "a tmpfs cannot be mounted");
		rmdir(base);
		return;
	}
	snprintf(lower, sizeof(lower), "%s/lower", base);
	snprintf(upper, sizeof(upper), "%s/upper", base);
	snprintf(work, sizeof(work), "%s/work", base);
	snprintf(merged, sizeof(merged), "%s/merged", base);
	ck_assert(!mkdir(lower, 0700) && !mkdir(upper, 0700) && !mkdir(work, 0700) && !mkdir(merged, 0700));
	snprintf(options, sizeof(options), "lowerdir=%s,upperdir=%s,workdir=%s", lower, upper, work);
	if (mount("overlay", merged, "overlay", 0, options) &&
	    (strcat(options, ",userxattr"), mount("overlay", merged, "overlay", 0, options)))
		skip(_i, "an overlay cannot be mounted");
	else
		works_in(_i, merged, "overlay");
	umount2(merged, MNT_DETACH);
	umount2(base, MNT_DETACH);
	rmdir(base);
}
END_TEST

/* The disk is full before the slots are: each write says so, what was written stays readable. */
START_TEST(a_full_disk_is_told_for_each_write)
{
	char base[] = "/var/tmp/kvt-full-XXXXXX";
	struct kvt_done done[16];
	struct kvt_xfer x[16];
	bool written[16] = { false };
	uint32_t i, full = 0;
	struct rig r;

	if (!own_mounts(_i))
		return;
	ck_assert_ptr_nonnull(mkdtemp(base));
	/* Eight and a half slots: one write is cut in the middle. */
	if (mount("tmpfs", base, "tmpfs", 0, "size=557056")) {
		skip(_i, "a tmpfs cannot be mounted");
		rmdir(base);
		return;
	}
	if (open_rig(&r, _i, base, FRAME, 16, 16)) {
		for (i = 0; i < 16; i++) {
			fill(frame_at(&r, i), FRAME, i);
			x[i] = xfer(&r, KVT_XFER_WRITE, i, i);
		}
		ck_assert_int_eq(kvt_host_submit(r.host, x, 16), 16);
		kvt_host_drain(r.host);
		ck_assert_int_eq(kvt_host_reap(r.host, done, 16), 16);
		for (i = 0; i < 16; i++) {
			ck_assert_msg(!done[i].result || done[i].result == -ENOSPC, "%d", done[i].result);
			written[done[i].user] = !done[i].result;
			full += done[i].result == -ENOSPC;
		}
		ck_assert_msg(full >= 8, "%u of 16 writes were refused where 8.5 fit", full);
		ck_assert_msg(full < 16, "nothing was written");
		for (i = 0; i < 16; i++) {
			if (!written[i])
				continue;
			ck_assert_int_eq(transfer(&r, xfer(&r, KVT_XFER_READ, i, 0)), 0);
			ck_assert(holds(frame_at(&r, 0), FRAME, i));
		}
		/* Room made: the same write succeeds. */
		for (i = 0; i < 16; i++)
			kvt_file_discard(r.file, i);
		fill(frame_at(&r, 0), FRAME, 77);
		ck_assert_int_eq(transfer(&r, xfer(&r, KVT_XFER_WRITE, 15, 0)), 0);
		rig_close(&r);
	}
	umount2(base, MNT_DETACH);
	rmdir(base);
}
END_TEST

START_TEST(a_read_only_directory)
{
	struct kvt_file_params params = { .n_slots = 4 };
	char base[] = "/var/tmp/kvt-ro-XXXXXX";
	struct rig r = { 0 };
	struct kvt_file *file;

	if (!own_mounts(_i) || !open_host(&r, _i, FRAME, DEPTH))
		return;
	ck_assert_ptr_nonnull(mkdtemp(base));
	if (mount("tmpfs", base, "tmpfs", MS_RDONLY, NULL)) {
		skip(_i, "a tmpfs cannot be mounted");
	} else {
		params.dir = base;
		ck_assert_int_eq(kvt_file_open(r.host, &params, &file), -EROFS);
	}
	kvt_host_close(r.host);
	umount2(base, MNT_DETACH);
	rmdir(base);
}
END_TEST

/* RLIMIT_FSIZE: told when the file is made, and for each write where it is lowered later. Nothing dies of SIGXFSZ. */
START_TEST(a_file_size_limit_does_not_kill)
{
	struct rlimit limit = { .rlim_cur = 4 * FRAME, .rlim_max = RLIM_INFINITY };
	struct kvt_file_params params = { .dir = test_dir(), .n_slots = 8 };
	struct kvt_file *file;
	struct rig r;
	uint32_t i;

	if (!open_rig(&r, _i, test_dir(), FRAME, 8, 8))
		return;
	ck_assert_int_eq(setrlimit(RLIMIT_FSIZE, &limit), 0);
	ck_assert_int_eq(kvt_file_open(r.host, &params, &file), -EFBIG);
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "RLIMIT_FSIZE is 256 KiB, 512 KiB asked: ulimit -f"));
	for (i = 0; i < 8; i++) {
		fill(frame_at(&r, i), FRAME, i);
		ck_assert_int_eq(transfer(&r, xfer(&r, KVT_XFER_WRITE, i, i)), i < 4 ? 0 : -EFBIG);
	}
	for (i = 0; i < 4; i++) {
		ck_assert_int_eq(transfer(&r, xfer(&r, KVT_XFER_READ, i, 7)), 0);
		ck_assert(holds(frame_at(&r, 7), FRAME, i));
	}
	rig_close(&r);
}
END_TEST

/* kill -9 in the middle of writes: no name in the directory, and the space comes back. */
START_TEST(killed_while_writing)
{
	char base[] = "/var/tmp/kvt-kill-XXXXXX", command[96];
	struct kvt_done done[DEPTH];
	struct kvt_xfer x;
	struct statvfs before, after;
	uint32_t round, i;
	struct rig r;
	int status;
	pid_t pid;

	ck_assert_ptr_nonnull(mkdtemp(base));
	if (own_mounts(_i) && mount("tmpfs", base, "tmpfs", 0, "size=64m"))
		skip(_i, "a tmpfs cannot be mounted: the space is not checked");
	ck_assert_int_eq(statvfs(base, &before), 0);
	for (round = 0; round < 5; round++) {
		pid = fork();
		if (!pid) {
			if (!open_rig(&r, _i, base, FRAME, DEPTH, 64))
				_exit(3);
			for (i = 0;; i++) {
				x = xfer(&r, KVT_XFER_WRITE, i % 64, i % DEPTH);
				while (kvt_host_submit(r.host, &x, 1) != 1)
					kvt_host_reap(r.host, done, DEPTH);
			}
		}
		usleep(20000 + 13000 * round);
		kill(pid, SIGKILL);
		ck_assert_int_eq(waitpid(pid, &status, 0), pid);
		if (WIFEXITED(status) && WEXITSTATUS(status) == 3)
			break;
		ck_assert(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
		snprintf(command, sizeof(command), "test -z \"$(ls -A %s)\"", base);
		ck_assert_msg(system(command) == 0, "a file was left behind");
	}
	/* io_uring's last references go a moment after the process. */
	for (i = 0; i < 6000; i++) {
		ck_assert_int_eq(statvfs(base, &after), 0);
		if (after.f_bfree + 16 >= before.f_bfree)
			break;
		usleep(10000);
	}
	ck_assert_uint_lt(i, 6000);
	umount2(base, MNT_DETACH);
	rmdir(base);
}
END_TEST

/* A child that outlives the close holds descriptors, but neither the disk's space nor pinned frames. */
START_TEST(a_child_does_not_keep_the_space)
{
	struct stat st;
	struct rig r;
	int fd, status;
	pid_t pid;

	if (!open_rig(&r, _i, test_dir(), FRAME, 1, 1))
		return;
	fill(frame_at(&r, 0), FRAME, 1);
	ck_assert_int_eq(transfer(&r, xfer(&r, KVT_XFER_WRITE, 0, 0)), 0);
	fd = dup(kvt_file_fd(r.file)); /* as good as a child's */
	pid = fork();
	if (!pid) {
		pause();
		_exit(0);
	}
	rig_close(&r);
	ck_assert_int_eq(fstat(fd, &st), 0);
	ck_assert_int_eq(st.st_blocks, 0);
	kill(pid, SIGKILL);
	ck_assert_int_eq(waitpid(pid, &status, 0), pid);
	close(fd);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("host");
	TCase *tc = tcase_create("conformance");
	const char *variant = getenv("KVT_TEST_VARIANT");
	SRunner *runner;
	int failed;

	for (int i = 0; variant && i < N_VARIANTS; i++)
		if (!strcmp(variants[i].name, variant)) {
			first_variant = i;
			end_variant = i + 1;
		}
	if (variant && end_variant - first_variant != 1)
		return 2;
	tcase_set_timeout(tc, 120);
	tcase_add_loop_test(tc, pools_are_zeroed_aligned_and_private, first_variant, end_variant);
	tcase_add_loop_test(tc, pools_of_impossible_size, first_variant, end_variant);
	tcase_add_loop_test(tc, every_slot_comes_back, first_variant, end_variant);
	tcase_add_loop_test(tc, a_batch_beyond_the_depth_is_cut, first_variant, end_variant);
	tcase_add_loop_test(tc, bad_transfers_change_nothing, first_variant, end_variant);
	tcase_add_loop_test(tc, odd_lengths, first_variant, end_variant);
	tcase_add_loop_test(tc, the_file_is_as_large_as_told_and_nameless, first_variant, end_variant);
	tcase_add_loop_test(tc, bad_directories, first_variant, end_variant);
	tcase_add_loop_test(tc, bad_parameters, first_variant, end_variant);
	tcase_add_loop_test(tc, the_budget_is_asked_first, first_variant, end_variant);
	tcase_add_loop_test(tc, the_eventfd_tells_of_every_completion, first_variant, end_variant);
	tcase_add_loop_test(tc, cancel_ends_or_completes, first_variant, end_variant);
	tcase_add_loop_test(tc, close_with_transfers_in_flight, first_variant, end_variant);
	tcase_add_loop_test(tc, the_submitting_thread_ends, first_variant, end_variant);
	tcase_add_loop_test(tc, threads_submit_and_reap_together, first_variant, end_variant);
	tcase_add_loop_test(tc, two_hosts_at_once, first_variant, end_variant);
	tcase_add_loop_test(tc, pools_and_files_come_and_go, first_variant, end_variant);
	tcase_add_loop_test(tc, tmpfs_is_buffered_and_named, first_variant, end_variant);
	tcase_add_loop_test(tc, overlayfs_works_either_way, first_variant, end_variant);
	tcase_add_loop_test(tc, a_full_disk_is_told_for_each_write, first_variant, end_variant);
	tcase_add_loop_test(tc, a_read_only_directory, first_variant, end_variant);
	tcase_add_loop_test(tc, a_file_size_limit_does_not_kill, first_variant, end_variant);
	tcase_add_loop_test(tc, killed_while_writing, first_variant, end_variant);
	tcase_add_loop_test(tc, a_child_does_not_keep_the_space, first_variant, end_variant);
	suite_add_tcase(suite, tc);
	runner = srunner_create(suite);
	srunner_run_all(runner, CK_ENV);
	failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return failed != 0;
}
