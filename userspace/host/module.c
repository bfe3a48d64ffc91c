// SPDX-License-Identifier: MIT
/*
 * The kernel module's host: pools are mappings of its pools, and an engine for io.h that submits to one of its queues.
 *
 * A pageable pool gets its memory frame by frame, when it is touched, but is charged when it is made: no touch meets a
 * limit. The module retries nothing; short transfers are gone on with here, as in the other engines.
 */
#include "host/module.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/err.h"
#include "host/io.h"
#include "host/size.h"
#include "uapi/linux/kvtier.h"

#define MAX_POOLS 16
#define MAX_FILES 16
#define BATCH 64u
#define KERNEL_ITEM 512u /* bytes of a transfer in the module, rounded up; it charges them to RLIMIT_MEMLOCK */
#define NEEDED (KVTIER_FEATURE_POOL | KVTIER_FEATURE_TRANSFER)

struct module_pool {
	struct kvt_pool pool; /* first: what callers see */
	int fd;
	size_t map_bytes; /* 0: this entry of the host's table is free */
};

struct module_io {
	struct kvt_io io; /* first */
	int queue;
};

struct module_host {
	struct kvt_host host; /* first */
	struct module_io engine;
	int device;
	uint64_t charged;
	pthread_mutex_t lock; /* all below */
	bool warned;	      /* about a pool on another node */
	struct module_pool pools[MAX_POOLS];
	struct kvt_file files[MAX_FILES];
};

/* ---- the device ---- */

static int open_device(void)
{
	struct kvtier_query query = { .size = sizeof(query) };
	int fd = open(KVTIER_DEVICE, O_RDWR | O_CLOEXEC);
	int err = errno;

	if (fd < 0 && err == ENOENT)
		return kvt_fail(-ENOENT, "no %s: sudo modprobe kvtier, after sudo make install-dkms", KVTIER_DEVICE);
	if (fd < 0)
		return kvt_fail(-err, "%s: %s%s", KVTIER_DEVICE, strerror(err),
				err == EACCES ? ": sudo usermod -aG kvtier $USER" : "");
	if (ioctl(fd, KVTIER_IOC_QUERY, &query) < 0) {
		err = errno;
		close(fd);
		return kvt_fail(-ENODEV, "%s: KVTIER_IOC_QUERY: %s", KVTIER_DEVICE, strerror(err));
	}
	if ((query.features & NEEDED) == NEEDED)
		return fd;
	close(fd);
	return kvt_fail(-ENODEV, "%s: the module lacks features: %#llx of %#llx", KVTIER_DEVICE,
			(unsigned long long)(query.features & NEEDED), NEEDED);
}

/* Asked of the module itself: it knows about capabilities. */
static int try_pool(int device, uint64_t frames)
{
	struct kvtier_pool_create create = { .size = sizeof(create), .flags = KVTIER_POOL_LAZY, .node = -1,
					     .frame_bytes = KVTIER_MAX_FRAME_BYTES, .n_frames = (uint32_t)frames };

	if (ioctl(device, KVTIER_IOC_POOL_CREATE, &create) < 0)
		return -errno;
	close(create.fd);
	return 0;
}

int kvt_module_suits(void)
{
	struct rlimit limit = { .rlim_cur = RLIM_INFINITY };
	int device = open_device(), ret = 0;

	if (device < 0)
		return device;
	getrlimit(RLIMIT_MEMLOCK, &limit);
	if (limit.rlim_cur != RLIM_INFINITY &&
	    try_pool(device, limit.rlim_cur / KVTIER_MAX_FRAME_BYTES + 1) == -EPERM)
		ret = kvt_fail(-EPERM, "the kvtier module is not used: RLIMIT_MEMLOCK is %s: ulimit -l unlimited",
			       kvt_size_text(limit.rlim_cur).s);
	close(device);
	return ret;
}

/* ---- the engine ---- */

static void module_start(struct kvt_io *io, const uint32_t *ids, uint32_t n)
{
	const struct module_io *m = (struct module_io *)io;
	struct kvtier_xfer items[BATCH];
	uint32_t i, first = 0;
	int ret;

	while (first < n) {
		const struct kvt_pool *pool = io->reqs[ids[first]].x.pool;
		struct kvtier_submit submit = { .size = sizeof(submit), .item_bytes = sizeof(items[0]),
						.pool_fd = ((const struct module_pool *)pool)->fd,
						.items = (uintptr_t)items };

		for (i = 0; i < BATCH && first + i < n && io->reqs[ids[first + i]].x.pool == pool; i++) {
			const struct kvt_req *req = &io->reqs[ids[first + i]];

			items[i] = (struct kvtier_xfer) {
				.op = req->x.op == KVT_XFER_READ ? KVTIER_XFER_READ : KVTIER_XFER_WRITE,
				.fd = req->x.file->fd,
				.frame = req->x.frame,
				.frame_offset = req->done,
				.bytes = req->want - req->done,
				.offset = kvt_req_offset(req),
				.user = ids[first + i],
			};
		}
		submit.n = i;
		ret = ioctl(m->queue, KVTIER_IOC_SUBMIT, &submit);
		if (ret > 0) {
			first += (uint32_t)ret;
		} else {
			/* The first is wrong (a full queue cannot be: it has a place for each request). */
			kvt_io_end(io, ids[first], ret < 0 ? -errno : -EBUSY);
			first++;
		}
	}
}

static void module_poll(struct kvt_io *io)
{
	struct module_io *m = (struct module_io *)io;
	struct kvtier_done done[BATCH];
	struct kvtier_reap reap = { .size = sizeof(reap), .n = BATCH, .done = (uintptr_t)done };
	uint32_t again[BATCH], n_again;
	int n, i;

	do {
		n = ioctl(m->queue, KVTIER_IOC_REAP, &reap);
		n_again = 0;
		for (i = 0; i < n; i++) {
			uint32_t id = (uint32_t)done[i].user;
			struct kvt_req *req = &io->reqs[id];
			const struct kvt_file *file = req->x.file;

			if (kvt_req_step(req, done[i].result)) {
				again[n_again++] = id;
				continue;
			}
			if (file->drop_cache && !req->result)
				posix_fadvise(file->fd, (off_t)(req->x.slot * file->frame_bytes),
					      (off_t)file->frame_bytes, POSIX_FADV_DONTNEED);
			kvt_io_end(io, id, req->result);
		}
		if (n_again)
			module_start(io, again, n_again);
	} while (n == (int)BATCH);
}

static void module_wait(struct kvt_io *io)
{
	struct pollfd queue = { .fd = ((struct module_io *)io)->queue, .events = POLLIN };

	/* Bounded: another thread may take the completion that was waited for. */
	poll(&queue, 1, 10);
}

static int module_cancel(struct kvt_io *io, uint64_t user)
{
	struct module_io *m = (struct module_io *)io;
	struct kvtier_cancel cancel = { .size = sizeof(cancel) };
	int cancelled = 0;
	uint32_t id;
	bool match;

	for (id = 0; id < io->depth; id++) {
		pthread_mutex_lock(&io->lock);
		match = io->reqs[id].busy && io->reqs[id].x.user == user;
		if (match)
			io->reqs[id].cancel = true;
		pthread_mutex_unlock(&io->lock);
		cancel.user = id;
		if (match && ioctl(m->queue, KVTIER_IOC_CANCEL, &cancel) > 0)
			cancelled = 1;
	}
	return cancelled;
}

static const struct kvt_io_ops engine_ops = {
	.start = module_start,
	.poll = module_poll,
	.wait = module_wait,
	.cancel = module_cancel,
};

/* ---- pools ---- */

static int pool_refused(int err, uint64_t bytes, const struct kvt_pool_params *params)
{
	struct kvtier_query query = { .size = sizeof(query) };
	struct rlimit limit = { .rlim_cur = RLIM_INFINITY };
	int device;

	switch (err) {
	case EPERM:
		getrlimit(RLIMIT_MEMLOCK, &limit);
		return kvt_fail(-ENOMEM, "RLIMIT_MEMLOCK is %s, %s asked, and all pools of this user count: ulimit -l, or "
				"LimitMEMLOCK=", kvt_size_text(limit.rlim_cur).s, kvt_size_text(bytes).s);
	case EDQUOT:
	case ENOSPC:
		device = open_device();
		if (device >= 0 && !ioctl(device, KVTIER_IOC_QUERY, &query))
			kvt_fail(-ENOMEM, "pool of %s: the kvtier module lets %s hold %s, and %s are held: "
				 "/sys/module/kvtier/parameters/%s", kvt_size_text(bytes).s,
				 err == EDQUOT ? "one user" : "all users",
				 kvt_size_text(err == EDQUOT ? query.max_user_bytes : query.max_bytes).s,
				 kvt_size_text(err == EDQUOT ? query.user_bytes : query.used_bytes).s,
				 err == EDQUOT ? "max_user_bytes" : "max_bytes");
		if (device >= 0)
			close(device);
		return -ENOMEM;
	case ENODEV:
		return kvt_fail(-EINVAL, "pool of %s: NUMA node %d has no memory: numactl -H lists the nodes, or leave "
				"numa_strict", kvt_size_text(bytes).s, params->node);
	default:
		return kvt_fail(-err, "pool of %s in the kvtier module: %s%s", kvt_size_text(bytes).s, strerror(err),
				err == ENOMEM ? ": less, or a larger memory.max of the cgroup, or more RAM" : "");
	}
}

static int create_pool(struct module_host *m, const struct kvt_pool_params *params, uint64_t bytes, int32_t *node)
{
	struct kvtier_pool_create create = {
		.size = sizeof(create),
		.flags = (params->pinned ? 0 : KVTIER_POOL_LAZY) |
			 (params->numa_strict && params->node >= 0 ? KVTIER_POOL_STRICT_NODE : 0),
		.frame_bytes = (uint32_t)m->host.params.frame_bytes,
		.n_frames = params->n_frames,
		.node = params->node < 0 ? -1 : params->node,
	};

	*node = create.node;
	if (!ioctl(m->device, KVTIER_IOC_POOL_CREATE, &create))
		return create.fd;
	if (errno == ENODEV && !params->numa_strict) {
		create.node = *node = -1;
		if (!ioctl(m->device, KVTIER_IOC_POOL_CREATE, &create)) {
			if (!m->warned)
				kvt_log(KVT_LOG_WARN, "frames are not on NUMA node %d: it has no memory", params->node);
			m->warned = true;
			return create.fd;
		}
	}
	return pool_refused(errno, bytes, params);
}

static int fill_pool(struct module_host *m, struct module_pool *p, const struct kvt_pool_params *params)
{
	uint64_t physical = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
	uint64_t frame_bytes = m->host.params.frame_bytes, bytes = params->n_frames * frame_bytes;
	void *base;
	int ret;

	if (!params->n_frames)
		return kvt_fail(-EINVAL, "pool: 0 frames of %s cannot be", kvt_size_text(frame_bytes).s);
	if (bytes > physical)
		return kvt_fail(-ENOMEM, "pool of %s: the machine has %s of memory", kvt_size_text(bytes).s,
				kvt_size_text(physical).s);
	*p = (struct module_pool) { .pool = { .frame_bytes = frame_bytes, .n_frames = params->n_frames,
					      .pinned = params->pinned } };
	ret = create_pool(m, params, bytes, &p->pool.node);
	if (ret < 0)
		return ret;
	p->fd = ret;
	base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, p->fd, 0);
	if (base == MAP_FAILED) {
		ret = kvt_fail(-ENOMEM, "pool of %s: mmap(): %s: ulimit -v, or vm.overcommit_memory",
			       kvt_size_text(bytes).s, strerror(errno));
		close(p->fd);
		return ret;
	}
	p->pool.base = base;
	p->map_bytes = bytes;
	return 0;
}

static int module_pool_create(struct kvt_host *host, const struct kvt_pool_params *params, struct kvt_pool **pool)
{
	struct module_host *m = (struct module_host *)host;
	struct module_pool *p = NULL;
	int i, ret;

	pthread_mutex_lock(&m->lock);
	for (i = 0; i < MAX_POOLS && !p; i++)
		if (!m->pools[i].map_bytes)
			p = &m->pools[i];
	ret = p ? fill_pool(m, p, params) : kvt_fail(-ENOSPC, "pool: a host has at most %d", MAX_POOLS);
	if (!ret)
		*pool = &p->pool;
	pthread_mutex_unlock(&m->lock);
	return ret;
}

static void module_pool_destroy(struct kvt_host *host, struct kvt_pool *pool)
{
	struct module_host *m = (struct module_host *)host;
	struct module_pool *p = (struct module_pool *)pool;

	pthread_mutex_lock(&m->lock);
	munmap(p->pool.base, p->map_bytes);
	close(p->fd);
	p->map_bytes = 0;
	pthread_mutex_unlock(&m->lock);
}

/* ---- the rest of the table ---- */

static int module_file_open(struct kvt_host *host, const struct kvt_file_params *params, struct kvt_file **file)
{
	struct module_host *m = (struct module_host *)host;
	struct kvt_file *f = NULL;
	int i, ret;

	pthread_mutex_lock(&m->lock);
	for (i = 0; i < MAX_FILES && !f; i++)
		if (m->files[i].fd < 0)
			f = &m->files[i];
	ret = f ? kvt_slot_file_open(f, params, host->params.frame_bytes) :
		  kvt_fail(-ENOSPC, "slot file: a host has at most %d", MAX_FILES);
	if (!ret)
		*file = f;
	pthread_mutex_unlock(&m->lock);
	return ret;
}

static void module_file_close(struct kvt_host *host, struct kvt_file *file)
{
	struct module_host *m = (struct module_host *)host;

	pthread_mutex_lock(&m->lock);
	kvt_slot_file_close(file);
	pthread_mutex_unlock(&m->lock);
}

static int module_submit(struct kvt_host *host, const struct kvt_xfer *xfers, uint32_t n)
{
	return kvt_io_submit(&((struct module_host *)host)->engine.io, xfers, n);
}

static int module_reap(struct kvt_host *host, struct kvt_done *done, uint32_t n)
{
	return kvt_io_reap(&((struct module_host *)host)->engine.io, done, n);
}

static int module_host_cancel(struct kvt_host *host, uint64_t user)
{
	return module_cancel(&((struct module_host *)host)->engine.io, user);
}

static void module_drain(struct kvt_host *host)
{
	kvt_io_drain(&((struct module_host *)host)->engine.io);
}

static void module_close(struct kvt_host *host)
{
	struct module_host *m = (struct module_host *)host;
	struct kvt_budget *budget = host->params.budget;
	uint64_t charged = m->charged;

	kvt_io_drain(&m->engine.io);
	close(m->engine.queue);
	kvt_io_exit(&m->engine.io);
	close(m->device);
	close(host->eventfd);
	pthread_mutex_destroy(&m->lock);
	free(m);
	kvt_budget_release(budget, charged);
}

static const struct kvt_host_ops module_ops = {
	.close = module_close,
	.pool_create = module_pool_create,
	.pool_destroy = module_pool_destroy,
	.file_open = module_file_open,
	.file_close = module_file_close,
	.submit = module_submit,
	.reap = module_reap,
	.cancel = module_host_cancel,
	.drain = module_drain,
};

uint64_t kvt_module_overhead(const struct kvt_host_params *params)
{
	return sizeof(struct module_host) + kvt_io_bytes(params->depth) + (uint64_t)params->depth * KERNEL_ITEM;
}

static int open_queue(struct module_host *m)
{
	struct kvtier_queue_create create = { .size = sizeof(create), .depth = m->host.params.depth,
					      .eventfd = m->host.eventfd };

	if (!ioctl(m->device, KVTIER_IOC_QUEUE_CREATE, &create))
		return create.fd;
	if (errno == EPERM)
		return pool_refused(EPERM, (uint64_t)create.depth * KERNEL_ITEM, NULL);
	return kvt_fail(-errno, "%s: a queue of depth %u: %s", KVTIER_DEVICE, create.depth, strerror(errno));
}

int kvt_module_open(const struct kvt_host_params *params, struct kvt_host **host)
{
	uint64_t bytes = kvt_module_overhead(params);
	struct module_host *m;
	int i, ret;

	if (kvt_budget_charge(params->budget, bytes))
		return kvt_fail(-ENOMEM, "host: %s asked, the budget has %s left", kvt_size_text(bytes).s,
				kvt_size_text(params->budget->limit - atomic_load(&params->budget->used)).s);
	m = calloc(1, sizeof(*m));
	if (!m) {
		ret = kvt_fail(-ENOMEM, "host: no memory");
		goto release;
	}
	m->host.ops = &module_ops;
	m->host.params = *params;
	m->charged = bytes;
	snprintf(m->host.name, sizeof(m->host.name), "module");
	for (i = 0; i < MAX_FILES; i++)
		m->files[i].fd = -1;
	m->device = open_device();
	if (m->device < 0) {
		ret = kvt_fail_more(-ENODEV, "host=module");
		goto free_host;
	}
	m->host.eventfd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (m->host.eventfd < 0) {
		ret = kvt_fail(-errno, "host: eventfd: %s: ulimit -n", strerror(errno));
		goto close_device;
	}
	m->engine.queue = open_queue(m);
	if (m->engine.queue < 0) {
		ret = m->engine.queue;
		goto close_eventfd;
	}
	ret = kvt_io_init(&m->engine.io, &engine_ops, params->depth, m->host.eventfd);
	if (ret < 0)
		goto close_queue;
	pthread_mutex_init(&m->lock, NULL);
	*host = &m->host;
	return 0;

close_queue:
	close(m->engine.queue);
close_eventfd:
	close(m->host.eventfd);
close_device:
	close(m->device);
free_host:
	free(m);
release:
	kvt_budget_release(params->budget, bytes);
	return ret;
}
