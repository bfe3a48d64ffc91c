// SPDX-License-Identifier: MIT
/* Pools that are files, and a hand that takes frames. */
#include "lib/host_keep.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/err.h"

enum { HELD, LOOSE, TAKEN };

struct keep_host {
	struct kvt_host host; /* first */
	struct kvt_host *inner;
	char dir[256];
	uint32_t take;
	_Atomic uint32_t fail, seed;
};

struct keep_pool {
	struct kvt_pool pool; /* first */
	struct keep_host *host;
	uint8_t *map; /* header, states, frames */
	uint64_t bytes;
	_Atomic uint8_t *states;
};

static void let_go(struct kvt_pool *pool, uint32_t frame)
{
	struct keep_pool *p = (struct keep_pool *)pool;
	uint8_t *data = pool->base + frame * pool->frame_bytes;

	if (p->states[frame] != HELD)
		return;
	if ((atomic_fetch_add(&p->host->seed, 1) * 2654435761u) >> 24 >= p->host->take) {
		p->states[frame] = LOOSE;
		return;
	}
	p->states[frame] = TAKEN;
	memset(data, 0xdd, pool->frame_bytes);
	mprotect(data, pool->frame_bytes, PROT_NONE); /* who touches it dies */
}

static bool hold(struct kvt_pool *pool, uint32_t frame)
{
	struct keep_pool *p = (struct keep_pool *)pool;

	if (p->states[frame] == TAKEN)
		return false;
	p->states[frame] = HELD;
	return true;
}

static int regain(struct kvt_pool *pool, uint32_t frame)
{
	struct keep_pool *p = (struct keep_pool *)pool;

	if (hold(pool, frame))
		return 0;
	if (p->host->fail && !--p->host->fail)
		return kvt_fail(-ENOMEM, "as the test asked");
	p->states[frame] = HELD;
	mprotect(pool->base + frame * pool->frame_bytes, pool->frame_bytes, PROT_READ | PROT_WRITE);
	return 0;
}

static const struct kvt_pool_reclaim_ops reclaim = { .let_go = let_go, .hold = hold, .regain = regain };

static int keep_pool_create(struct kvt_host *host, const struct kvt_pool_params *params, struct kvt_pool **pool)
{
	struct keep_host *h = (struct keep_host *)host;
	uint64_t states = (params->n_frames + 4095u) & ~4095u;
	struct keep_pool *p;
	char path[384];
	off_t end;
	int fd;

	if (!params->reclaim)
		return h->inner->ops->pool_create(h->inner, params, pool);
	p = calloc(1, sizeof(*p));
	if (!p)
		return -ENOMEM;
	snprintf(path, sizeof(path), "%s/%s", h->dir, params->name ? params->name : "anonymous");
	fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	if (!params->name)
		unlink(path);
	p->host = h;
	p->bytes = KVT_POOL_HEADER_BYTES + states + params->n_frames * host->params.frame_bytes;
	end = lseek(fd, 0, SEEK_END);
	if (end && (uint64_t)end != p->bytes) {
		close(fd);
		free(p);
		return kvt_fail(-EEXIST, "%s has another size", path);
	}
	if (fd < 0 || ftruncate(fd, (off_t)p->bytes)) {
		free(p);
		return kvt_fail(-errno, "%s", path);
	}
	p->map = mmap(NULL, p->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	close(fd);
	if (p->map == MAP_FAILED) {
		free(p);
		return kvt_fail(-ENOMEM, "%s", path);
	}
	p->states = (_Atomic uint8_t *)p->map + KVT_POOL_HEADER_BYTES;
	p->pool = (struct kvt_pool){ .base = p->map + KVT_POOL_HEADER_BYTES + states, .n_frames = params->n_frames,
				     .frame_bytes = host->params.frame_bytes, .node = -1, .found = end > 0,
				     .header = params->name ? p->map : NULL, .reclaim = &reclaim };
	*pool = &p->pool;
	return 0;
}

static void keep_pool_destroy(struct kvt_host *host, struct kvt_pool *pool)
{
	struct keep_host *h = (struct keep_host *)host;
	struct keep_pool *p = (struct keep_pool *)pool;

	if (!pool->reclaim) {
		h->inner->ops->pool_destroy(h->inner, pool);
		return;
	}
	munmap(p->map, p->bytes);
	free(p);
}

static void keep_close(struct kvt_host *host)
{
	kvt_host_close(((struct keep_host *)host)->inner);
	free(host);
}

static int keep_file_open(struct kvt_host *host, const struct kvt_file_params *params, struct kvt_file **file)
{
	return kvt_file_open(((struct keep_host *)host)->inner, params, file);
}

static void keep_file_close(struct kvt_host *host, struct kvt_file *file)
{
	kvt_file_close(((struct keep_host *)host)->inner, file);
}

static int keep_submit(struct kvt_host *host, const struct kvt_xfer *xfers, uint32_t n)
{
	return kvt_host_submit(((struct keep_host *)host)->inner, xfers, n);
}

static int keep_reap(struct kvt_host *host, struct kvt_done *done, uint32_t n)
{
	return kvt_host_reap(((struct keep_host *)host)->inner, done, n);
}

static int keep_cancel(struct kvt_host *host, uint64_t user)
{
	return kvt_host_cancel(((struct keep_host *)host)->inner, user);
}

static void keep_drain(struct kvt_host *host)
{
	kvt_host_drain(((struct keep_host *)host)->inner);
}

static const struct kvt_host_ops keep_ops = {
	.close = keep_close,
	.pool_create = keep_pool_create,
	.pool_destroy = keep_pool_destroy,
	.file_open = keep_file_open,
	.file_close = keep_file_close,
	.submit = keep_submit,
	.reap = keep_reap,
	.cancel = keep_cancel,
	.drain = keep_drain,
};

int kvt_host_keep_open(struct kvt_host *inner, const char *dir, uint32_t take, struct kvt_host **host)
{
	struct keep_host *h = calloc(1, sizeof(*h));

	if (!h)
		return -ENOMEM;
	h->host = *inner;
	h->host.ops = &keep_ops;
	h->inner = inner;
	h->take = take;
	snprintf(h->dir, sizeof(h->dir), "%s", dir);
	*host = &h->host;
	return 0;
}

void kvt_host_keep_fail(struct kvt_host *host, uint32_t n)
{
	((struct keep_host *)host)->fail = n;
}
