// SPDX-License-Identifier: MIT
/* A host with one pool and one file, as the host tests use it. */
#include "lib/host_rig.h"

#include <check.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

const char *test_dir(void)
{
	const char *dir = getenv("KVT_TEST_DIR");

	return dir ? dir : "/var/tmp";
}

void must(int ret)
{
	ck_assert_msg(ret >= 0, "%d: %s", ret, kvt_last_error());
}

int rig_host(struct rig *r, uint32_t kind, uint32_t io, uint64_t frame, uint32_t depth)
{
	struct kvt_host_params params = { .kind = kind, .io = io, .depth = depth, .frame_bytes = frame,
					  .budget = &r->budget };

	memset(r, 0, sizeof(*r));
	r->budget.limit = UINT64_MAX;
	r->frame = frame;
	return kvt_host_open(&params, &r->host);
}

void rig_fill(struct rig *r, const char *dir, uint32_t frames, uint32_t slots)
{
	struct kvt_pool_params pool = { .n_frames = frames, .node = -1 };
	struct kvt_file_params file = { .dir = dir, .n_slots = slots };

	must(kvt_pool_create(r->host, &pool, &r->pool));
	must(kvt_file_open(r->host, &file, &r->file));
}

void rig_close(struct rig *r)
{
	kvt_host_drain(r->host);
	kvt_file_close(r->host, r->file);
	kvt_pool_destroy(r->host, r->pool);
	kvt_host_close(r->host);
	ck_assert_uint_eq(atomic_load(&r->budget.used), 0);
}

uint8_t *frame_at(const struct rig *r, uint32_t i)
{
	return r->pool->base + i * r->frame;
}

static uint64_t word(uint64_t key, uint64_t i)
{
	uint64_t x = key * 0x9e3779b97f4a7c15u + i * 0xd1b54a32d192ed03u;

	x ^= x >> 31;
	return x * 0xbf58476d1ce4e5b9u;
}

void fill(uint8_t *frame, uint64_t bytes, uint64_t key)
{
	uint64_t i, v;

	for (i = 0; i < bytes / 8; i++) {
		v = word(key, i);
		memcpy(frame + 8 * i, &v, 8);
	}
}

bool holds(const uint8_t *frame, uint64_t bytes, uint64_t key)
{
	uint64_t i, v;

	for (i = 0; i < bytes / 8; i++) {
		v = word(key, i);
		if (memcmp(frame + 8 * i, &v, 8))
			return false;
	}
	return true;
}

bool zeros(const uint8_t *p, uint64_t bytes)
{
	return !p[0] && !memcmp(p, p + 1, bytes - 1);
}

struct kvt_xfer xfer(const struct rig *r, uint32_t op, uint32_t slot, uint32_t frame)
{
	return (struct kvt_xfer){ .op = op, .slot = slot, .file = r->file, .pool = r->pool, .frame = frame,
				  .bytes = (uint32_t)r->frame, .user = slot };
}

struct kvt_done wait_one(struct kvt_host *host)
{
	struct pollfd p = { .fd = kvt_host_eventfd(host), .events = POLLIN };
	struct kvt_done done;

	while (kvt_host_reap(host, &done, 1) != 1)
		ck_assert_msg(poll(&p, 1, 100000) == 1, "no completion in 100 s");
	return done;
}

int32_t transfer(const struct rig *r, struct kvt_xfer x)
{
	struct kvt_done done;

	x.user = 0xabcdef0123456789u;
	ck_assert_int_eq(kvt_host_submit(r->host, &x, 1), 1);
	done = wait_one(r->host);
	ck_assert_uint_eq(done.user, x.user);
	return done.result;
}
