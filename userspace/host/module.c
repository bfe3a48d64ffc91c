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
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/file.h>
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
	_Atomic uint64_t *words; /* NULL: no frame is ever let go of */
	_Atomic uint32_t clock;	 /* the words' stamps */
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
	if (fd < 0 && err != ENXIO && err != ENODEV)
		return kvt_fail(-err, "%s: %s%s", KVTIER_DEVICE, strerror(err),
				err == EACCES ? ": sudo usermod -aG kvtier $USER" : "");
	if (fd < 0 || ioctl(fd, KVTIER_IOC_QUERY, &query) < 0) {
		err = errno;
		if (fd >= 0)
			close(fd);
		return kvt_fail(-ENODEV, "%s is not the kvtier module's device (%s): sudo rm %s; sudo modprobe -r kvtier; sudo modprobe kvtier",
				KVTIER_DEVICE, strerror(err), KVTIER_DEVICE);
	}
	if ((query.features & NEEDED) == NEEDED)
		return fd;
	close(fd);
	return kvt_fail(-ENODEV, "%s: the module lacks features: %#llx of %#llx", KVTIER_DEVICE,
			(unsigned long long)(query.features & NEEDED), NEEDED);
}

int kvt_module_pool_remove(const char *name)
{
	struct kvtier_pool_remove remove = { .size = sizeof(remove) };
	int device, ret = 0;

	if (strlen(name) >= sizeof(remove.name))
		return kvt_fail(-EINVAL, "a pool's name has at most %zu bytes", sizeof(remove.name) - 1);
	device = open_device();
	if (device < 0)
		return device;
	strcpy((char *)remove.name, name);
	if (ioctl(device, KVTIER_IOC_POOL_REMOVE, &remove) < 0)
		ret = kvt_fail(-errno, "the pool %s: %s", name, strerror(errno));
	close(device);
	return ret;
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

/* ---- frames that the kernel may take ---- */

static void module_let_go(struct kvt_pool *pool, uint32_t frame)
{
	struct module_pool *p = (struct module_pool *)pool;
	uint64_t word = atomic_load(&p->words[frame]);

	/* It is this process's as long as it says HELD. */
	if (KVTIER_WORD_STATE(word) == KVTIER_WORD_HELD)
		atomic_store(&p->words[frame], KVTIER_WORD(KVTIER_WORD_CLEAN, KVTIER_WORD_GENERATION(word),
							   atomic_fetch_add(&p->clock, 1)));
}

static bool module_hold(struct kvt_pool *pool, uint32_t frame)
{
	struct module_pool *p = (struct module_pool *)pool;
	uint64_t word = atomic_load(&p->words[frame]);

	if (KVTIER_WORD_STATE(word) == KVTIER_WORD_CLEAN)
		return atomic_compare_exchange_strong(&p->words[frame], &word,
						      KVTIER_WORD(KVTIER_WORD_HELD, KVTIER_WORD_GENERATION(word), 0));
	return KVTIER_WORD_STATE(word) == KVTIER_WORD_HELD;
}

static int module_regain(struct kvt_pool *pool, uint32_t frame)
{
	struct module_pool *p = (struct module_pool *)pool;
	struct kvtier_range range = { .size = sizeof(range), .first = frame, .n = 1 };

	while (!module_hold(pool, frame))
		if (ioctl(p->fd, KVTIER_IOC_POPULATE, &range) < 0)
			return kvt_fail(errno == EPERM || errno == EDQUOT || errno == ENOSPC ? -ENOMEM : -errno,
					"a frame that the kernel took got no memory again: %s", strerror(errno));
	return 0;
}

static const struct kvt_pool_reclaim_ops reclaim_ops = {
	.let_go = module_let_go,
	.hold = module_hold,
	.regain = module_regain,
};

/* ---- making them ---- */

/* One process at a time: the lock goes with the descriptor, however the process ends. */
static int lock_named(int fd, const char *name)
{
	if (!flock(fd, LOCK_EX | LOCK_NB))
		return fd;
	close(fd);
	return kvt_fail(-EBUSY, "the pool %s is in use by another process", name);
}

/* A pool of that name that is there: its descriptor, or -ENOENT. */
static int find_named(struct module_host *m, const struct kvt_pool_params *params)
{
	struct kvtier_pool_open o = { .size = sizeof(o) };
	struct kvtier_pool_stat stat = { .size = sizeof(stat) };

	strcpy((char *)o.name, params->name);
	if (ioctl(m->device, KVTIER_IOC_POOL_OPEN, &o) < 0)
		return errno == ENOENT ? -ENOENT : kvt_fail(-errno, "the pool %s: %s", params->name, strerror(errno));
	if (ioctl(o.fd, KVTIER_IOC_POOL_STAT, &stat) < 0 || stat.frame_bytes != m->host.params.frame_bytes ||
	    stat.n_frames != params->n_frames || !(stat.flags & KVTIER_POOL_RECLAIM) != !params->reclaim) {
		close(o.fd);
		return kvt_fail(-EEXIST, "the pool %s has %u frames of %u bytes, %u of %llu are asked for: the parameters that it was made with, another name, or kvtier pools --remove %s",
				params->name, stat.n_frames, stat.frame_bytes, params->n_frames,
				(unsigned long long)m->host.params.frame_bytes, params->name);
	}
	return lock_named(o.fd, params->name);
}

static int create_pool(struct module_host *m, const struct kvt_pool_params *params, uint64_t bytes, int32_t *node)
{
	struct kvtier_pool_create create = {
		.size = sizeof(create),
		.flags = (params->pinned ? 0 : KVTIER_POOL_LAZY) | (params->reclaim ? KVTIER_POOL_RECLAIM : 0) |
			 (params->numa_strict && params->node >= 0 ? KVTIER_POOL_STRICT_NODE : 0),
		.frame_bytes = (uint32_t)m->host.params.frame_bytes,
		.n_frames = params->n_frames,
		.node = params->node < 0 ? -1 : params->node,
	};

	if (params->name) {
		create.mode = 0600;
		strcpy((char *)create.name, params->name);
	}
	*node = create.node;
	if (!ioctl(m->device, KVTIER_IOC_POOL_CREATE, &create))
		return params->name ? lock_named(create.fd, params->name) : create.fd;
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

static size_t words_bytes(uint32_t n_frames)
{
	return (n_frames * sizeof(uint64_t) + 4095) & ~(size_t)4095;
}

static void unmap_pool(struct module_pool *p)
{
	if (p->pool.base)
		munmap(p->pool.base, p->pool.n_frames * p->pool.frame_bytes);
	if (p->words)
		munmap((void *)p->words, words_bytes(p->pool.n_frames));
	if (p->pool.header)
		munmap(p->pool.header, KVTIER_HEADER_BYTES);
	close(p->fd);
	p->map_bytes = 0;
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
	if (params->name && (!*params->name || strlen(params->name) >= KVTIER_NAME_BYTES))
		return kvt_fail(-EINVAL, "a pool's name has 1 to %d bytes, not %zu", KVTIER_NAME_BYTES - 1, strlen(params->name));
	*p = (struct module_pool) { .pool = { .frame_bytes = frame_bytes, .n_frames = params->n_frames,
					      .pinned = params->pinned, .node = -1 } };
	ret = params->name ? find_named(m, params) : -ENOENT;
	p->pool.found = ret >= 0;
	if (ret == -ENOENT)
		ret = create_pool(m, params, bytes, &p->pool.node);
	if (ret < 0)
		return ret;
	p->fd = ret;
	base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, p->fd, 0);
	if (base != MAP_FAILED)
		p->pool.base = base;
	if (params->reclaim) {
		base = mmap(NULL, words_bytes(params->n_frames), PROT_READ | PROT_WRITE, MAP_SHARED, p->fd, KVTIER_MMAP_WORDS);
		p->words = base != MAP_FAILED ? base : NULL;
		p->pool.reclaim = &reclaim_ops;
	}
	if (params->name) {
		base = mmap(NULL, KVTIER_HEADER_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, p->fd, KVTIER_MMAP_HEADER);
		p->pool.header = base != MAP_FAILED ? base : NULL;
	}
	if (!p->pool.base || (params->reclaim && !p->words) || (params->name && !p->pool.header)) {
		ret = kvt_fail(-ENOMEM, "pool of %s: mmap(): %s: ulimit -v, or vm.overcommit_memory",
			       kvt_size_text(bytes).s, strerror(errno));
		unmap_pool(p);
		return ret;
	}
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
	unmap_pool(p);
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
		ret = -ENODEV;
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
