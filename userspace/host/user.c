// SPDX-License-Identifier: MIT
/*
 * The user-space host: anonymous mappings, an unlinked slot file, and io_uring to move
 * bytes between them, or threads where io_uring is denied.
 */
#include "host/user.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/err.h"
#include "host/size.h"

#define MAX_POOLS 16
#define MAX_FILES 16
#define DEFAULT_THREADS 4

struct user_host {
	struct kvt_host host; /* first */
	struct kvt_io *io;
	uint64_t charged;
	pthread_mutex_t lock; /* all below */
	bool warned;	      /* about a degraded pool */
	struct kvt_user_pool pools[MAX_POOLS];
	struct kvt_file files[MAX_FILES];
};

static int user_pool_create(struct kvt_host *host, const struct kvt_pool_params *params, struct kvt_pool **pool)
{
	struct user_host *user = (struct user_host *)host;
	struct kvt_user_pool *p = NULL;
	int i, ret;

	pthread_mutex_lock(&user->lock);
	for (i = 0; i < MAX_POOLS && !p; i++)
		if (!user->pools[i].map_bytes)
			p = &user->pools[i];
	ret = p ? kvt_user_pool_map(p, params, host->params.frame_bytes) :
		  kvt_fail(-ENOSPC, "pool: a host has at most %d", MAX_POOLS);
	if (!ret) {
		user->io->ops->pool_added(user->io, p);
		if (p->warning[0] && !user->warned)
			kvt_log(KVT_LOG_WARN, "%s", p->warning);
		user->warned |= p->warning[0] != '\0';
		*pool = &p->pool;
	}
	pthread_mutex_unlock(&user->lock);
	return ret;
}

static void user_pool_destroy(struct kvt_host *host, struct kvt_pool *pool)
{
	struct user_host *user = (struct user_host *)host;
	struct kvt_user_pool *p = (struct kvt_user_pool *)pool;

	pthread_mutex_lock(&user->lock);
	user->io->ops->pool_removed(user->io, p);
	kvt_user_pool_unmap(p);
	pthread_mutex_unlock(&user->lock);
}

static int user_file_open(struct kvt_host *host, const struct kvt_file_params *params, struct kvt_file **file)
{
	struct user_host *user = (struct user_host *)host;
	struct kvt_file *f = NULL;
	uint32_t i;
	int ret;

	pthread_mutex_lock(&user->lock);
	for (i = 0; i < MAX_FILES; i++)
		if (user->files[i].fd < 0)
			break;
	if (i < MAX_FILES)
		f = &user->files[i];
	ret = f ? kvt_slot_file_open(f, params, host->params.frame_bytes) :
		  kvt_fail(-ENOSPC, "slot file: a host has at most %d", MAX_FILES);
	if (!ret) {
		user->io->ops->file_added(user->io, f, i);
		*file = f;
	}
	pthread_mutex_unlock(&user->lock);
	return ret;
}

static void user_file_close(struct kvt_host *host, struct kvt_file *file)
{
	struct user_host *user = (struct user_host *)host;

	pthread_mutex_lock(&user->lock);
	user->io->ops->file_removed(user->io, file);
	kvt_slot_file_close(file);
	pthread_mutex_unlock(&user->lock);
}

static int user_submit(struct kvt_host *host, const struct kvt_xfer *xfers, uint32_t n)
{
	return kvt_io_submit(((struct user_host *)host)->io, xfers, n);
}

static int user_reap(struct kvt_host *host, struct kvt_done *done, uint32_t n)
{
	return kvt_io_reap(((struct user_host *)host)->io, done, n);
}

static int user_cancel(struct kvt_host *host, uint64_t id)
{
	struct kvt_io *io = ((struct user_host *)host)->io;

	return io->ops->cancel(io, id);
}

static void user_drain(struct kvt_host *host)
{
	kvt_io_drain(((struct user_host *)host)->io);
}

static void user_close(struct kvt_host *host)
{
	struct user_host *user = (struct user_host *)host;
	struct kvt_budget *budget = host->params.budget;
	uint64_t charged = user->charged;

	kvt_io_drain(user->io);
	user->io->ops->close(user->io);
	close(host->eventfd);
	pthread_mutex_destroy(&user->lock);
	free(user);
	kvt_budget_release(budget, charged);
}

static const struct kvt_host_ops user_ops = {
	.close = user_close,
	.pool_create = user_pool_create,
	.pool_destroy = user_pool_destroy,
	.file_open = user_file_open,
	.file_close = user_file_close,
	.submit = user_submit,
	.reap = user_reap,
	.cancel = user_cancel,
	.drain = user_drain,
};

static uint32_t workers(const struct kvt_host_params *params)
{
	return params->io_threads ? params->io_threads : DEFAULT_THREADS;
}

static uint64_t engine_bytes(const struct kvt_host_params *params, uint32_t kind)
{
	return kind == KVT_IO_URING ? kvt_uring_bytes(params->depth) :
				      kvt_threads_bytes(params->depth, workers(params));
}

uint64_t kvt_user_overhead(const struct kvt_host_params *params)
{
	uint64_t uring = engine_bytes(params, KVT_IO_URING), threads = engine_bytes(params, KVT_IO_THREADS);

	if (params->io == KVT_IO_AUTO)
		return sizeof(struct user_host) + (uring > threads ? uring : threads);
	return sizeof(struct user_host) + (params->io == KVT_IO_URING ? uring : threads);
}

/* Charge for an engine, then open it. */
static int open_engine(struct user_host *user, uint32_t kind)
{
	const struct kvt_host_params *params = &user->host.params;
	uint64_t bytes = engine_bytes(params, kind);
	int ret;

	if (kvt_budget_charge(params->budget, bytes))
		return kvt_fail(-ENOMEM, "host I/O by %s at depth %u: %s asked, the budget has %s left",
				kind == KVT_IO_URING ? "io_uring" : "threads", params->depth, kvt_size_text(bytes).s,
				kvt_size_text(params->budget->limit - atomic_load(&params->budget->used)).s);
	if (kind == KVT_IO_URING)
		ret = kvt_uring_open(params->depth, user->host.eventfd, &user->io);
	else
		ret = kvt_threads_open(params->depth, workers(params), user->host.eventfd, &user->io);
	if (ret < 0) {
		kvt_budget_release(params->budget, bytes);
		return ret;
	}
	user->charged += bytes;
	snprintf(user->host.name, sizeof(user->host.name), "user/%s", kind == KVT_IO_URING ? "io_uring" : "threads");
	return 0;
}

int kvt_user_open(const struct kvt_host_params *params, struct kvt_host **host)
{
	struct user_host *user;
	int i, ret;

	if (kvt_budget_charge(params->budget, sizeof(*user)))
		return kvt_fail(-ENOMEM, "host: %s asked, the budget is %s", kvt_size_text(kvt_user_overhead(params)).s,
				kvt_size_text(params->budget->limit).s);
	user = calloc(1, sizeof(*user));
	if (!user) {
		ret = kvt_fail(-ENOMEM, "host: no memory");
		goto release;
	}
	user->host.ops = &user_ops;
	user->host.params = *params;
	user->charged = sizeof(*user);
	for (i = 0; i < MAX_FILES; i++)
		user->files[i].fd = -1;
	user->host.eventfd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (user->host.eventfd < 0) {
		ret = kvt_fail(-errno, "host: eventfd: %s: ulimit -n", strerror(errno));
		goto free_user;
	}
	pthread_mutex_init(&user->lock, NULL);
	ret = open_engine(user, params->io == KVT_IO_THREADS ? KVT_IO_THREADS : KVT_IO_URING);
	if (ret < 0 && params->io == KVT_IO_AUTO) {
		snprintf(user->host.note, sizeof(user->host.note), "%s", kvt_last_error());
		ret = open_engine(user, KVT_IO_THREADS);
	}
	if (ret < 0)
		goto destroy_lock;
	*host = &user->host;
	return 0;

destroy_lock:
	pthread_mutex_destroy(&user->lock);
	close(user->host.eventfd);
free_user:
	free(user);
release:
	kvt_budget_release(params->budget, sizeof(*user));
	return ret;
}
