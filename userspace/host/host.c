// SPDX-License-Identifier: MIT
/* The door to every host implementation: arguments are checked here, once for all of them. */
#include "host/host.h"

#include <errno.h>
#include <stddef.h>
#include <stdio.h>

#include "base/err.h"
#include "host/file.h"
#include "host/module.h"
#include "host/size.h"
#include "host/user.h"

#define MAX_DEPTH 4096u
#define MAX_THREADS 64u
#define MAX_FRAME (2ull << 20)

static int check_params(const struct kvt_host_params *p)
{
	if (p->kind > KVT_HOST_MODULE || p->io > KVT_IO_THREADS)
		return kvt_fail(-EINVAL, "host: no such kind (%u) or io (%u)", p->kind, p->io);
	if (!p->depth || p->depth > MAX_DEPTH)
		return kvt_fail(-EINVAL, "host: a depth of %u asked, 1 to %u", p->depth, MAX_DEPTH);
	if (!p->frame_bytes || p->frame_bytes % 4096 || p->frame_bytes > MAX_FRAME)
		return kvt_fail(-EINVAL, "host: frames of %s asked, a multiple of 4 KiB up to %s",
				kvt_size_text(p->frame_bytes).s, kvt_size_text(MAX_FRAME).s);
	if (p->io_threads > MAX_THREADS)
		return kvt_fail(-EINVAL, "host: %u I/O threads asked, at most %u", p->io_threads, MAX_THREADS);
	if (!p->budget)
		return kvt_fail(-EINVAL, "host: no budget given");
	return 0;
}

uint64_t kvt_host_overhead(const struct kvt_host_params *params)
{
	uint64_t user = kvt_user_overhead(params), module = kvt_module_overhead(params);

	if (params->kind == KVT_HOST_MODULE)
		return module;
	return params->kind == KVT_HOST_USER || user > module ? user : module;
}

/* By itself, where nothing speaks against it; an I/O path that was asked for by name is user space's. */
static int open_auto(const struct kvt_host_params *params, struct kvt_host **host)
{
	int suits = params->io == KVT_IO_AUTO ? kvt_module_suits() : -ENOENT;
	char why[sizeof((*host)->note)];
	int ret;

	if (!suits)
		return kvt_module_open(params, host);
	snprintf(why, sizeof(why), "%s", suits == -ENOENT ? "" : kvt_last_error());
	ret = kvt_user_open(params, host);
	if (!ret && !(*host)->note[0])
		snprintf((*host)->note, sizeof((*host)->note), "%s", why);
	return ret;
}

int kvt_host_open(const struct kvt_host_params *params, struct kvt_host **host)
{
	int ret = check_params(params);

	if (ret < 0)
		return ret;
	switch (params->kind) {
	case KVT_HOST_MODULE:
		return kvt_module_open(params, host);
	case KVT_HOST_USER:
		return kvt_user_open(params, host);
	default:
		return open_auto(params, host);
	}
}

void kvt_host_close(struct kvt_host *host)
{
	if (host)
		host->ops->close(host);
}

const char *kvt_host_name(const struct kvt_host *host)
{
	return host->name;
}

const char *kvt_host_note(const struct kvt_host *host)
{
	return host->note;
}

int kvt_host_eventfd(struct kvt_host *host)
{
	return host->eventfd;
}

int kvt_pool_create(struct kvt_host *host, const struct kvt_pool_params *params, struct kvt_pool **pool)
{
	return host->ops->pool_create(host, params, pool);
}

void kvt_pool_destroy(struct kvt_host *host, struct kvt_pool *pool)
{
	if (pool)
		host->ops->pool_destroy(host, pool);
}

int kvt_file_open(struct kvt_host *host, const struct kvt_file_params *params, struct kvt_file **file)
{
	return host->ops->file_open(host, params, file);
}

void kvt_file_close(struct kvt_host *host, struct kvt_file *file)
{
	if (file)
		host->ops->file_close(host, file);
}

int kvt_host_submit(struct kvt_host *host, const struct kvt_xfer *xfers, uint32_t n)
{
	uint32_t i;

	for (i = 0; i < n; i++) {
		const struct kvt_xfer *x = &xfers[i];

		if (x->op > KVT_XFER_WRITE || !x->file || !x->pool)
			return kvt_fail(-EINVAL, "transfer %u of %u: no such op (%u), or no file or pool", i, n, x->op);
		if (x->slot >= x->file->n_slots || x->frame >= x->pool->n_frames)
			return kvt_fail(-EINVAL, "transfer %u of %u: slot %u of %u, frame %u of %u", i, n, x->slot,
					x->file->n_slots, x->frame, x->pool->n_frames);
		if (!x->bytes || x->bytes > x->pool->frame_bytes)
			return kvt_fail(-EINVAL, "transfer %u of %u: %u bytes asked, 1 to %s", i, n, x->bytes,
					kvt_size_text(x->pool->frame_bytes).s);
	}
	return n ? host->ops->submit(host, xfers, n) : 0;
}

int kvt_host_reap(struct kvt_host *host, struct kvt_done *done, uint32_t n)
{
	return n ? host->ops->reap(host, done, n) : 0;
}

int kvt_host_cancel(struct kvt_host *host, uint64_t user)
{
	return host->ops->cancel(host, user);
}

void kvt_host_drain(struct kvt_host *host)
{
	host->ops->drain(host);
}
