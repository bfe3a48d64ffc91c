/* SPDX-License-Identifier: MIT */
/* A host with one pool and one file, as the host tests use it. Failures are check's. */
#ifndef KVT_TESTS_HOST_RIG_H
#define KVT_TESTS_HOST_RIG_H

#include "host/host.h"

struct rig {
	struct kvt_budget budget;
	struct kvt_host *host;
	struct kvt_pool *pool;
	struct kvt_file *file;
	uint64_t frame; /* bytes */
};

/* $KVT_TEST_DIR, or /var/tmp: a directory on a disk. */
const char *test_dir(void);

/* The call succeeded, or the test fails with the library's message. */
void must(int ret);

/* Open the host alone: what kvt_host_open() returns. */
int rig_host(struct rig *r, uint32_t kind, uint32_t io, uint64_t frame, uint32_t depth);

/* A pool and a file for rig_host()'s host; they must succeed. */
void rig_fill(struct rig *r, const char *dir, uint32_t frames, uint32_t slots);

/* Closes everything, and checks that the budget is whole again. */
void rig_close(struct rig *r);

uint8_t *frame_at(const struct rig *r, uint32_t i);

/* A pattern that no other key has in any place. */
void fill(uint8_t *frame, uint64_t bytes, uint64_t key);
bool holds(const uint8_t *frame, uint64_t bytes, uint64_t key);
bool zeros(const uint8_t *p, uint64_t bytes);

/* A whole frame; user is the slot. */
struct kvt_xfer xfer(const struct rig *r, uint32_t op, uint32_t slot, uint32_t frame);

/* Wait by the eventfd alone, as a caller would. */
struct kvt_done wait_one(struct kvt_host *host);

/* Submit one transfer and wait for its result. */
int32_t transfer(const struct rig *r, struct kvt_xfer x);

#endif
