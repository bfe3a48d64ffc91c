/* SPDX-License-Identifier: MIT */
/* What the parts of the user-space host share. */
#ifndef KVT_HOST_USER_H
#define KVT_HOST_USER_H

#include "host/host.h"
#include "host/io.h"

struct kvt_user_pool {
	struct kvt_pool pool; /* first: what callers see */
	size_t map_bytes;     /* 0: this entry of the host's table is free */
	int32_t buf_first;    /* io_uring's registered buffers, or -1 */
	uint32_t n_bufs, buf_frames;
	char warning[128]; /* what was degraded, or "" */
};

/* Map, place and lock the frames. Fills @pool, but for its buffers. */
int kvt_user_pool_map(struct kvt_user_pool *pool, const struct kvt_pool_params *params, uint64_t frame_bytes);
void kvt_user_pool_unmap(struct kvt_user_pool *pool);

/* Bytes that kvt_user_open() charges at most. */
uint64_t kvt_user_overhead(const struct kvt_host_params *params);
int kvt_user_open(const struct kvt_host_params *params, struct kvt_host **host);

#endif
