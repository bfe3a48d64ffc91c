// SPDX-License-Identifier: MIT
/* A host backend that goes wrong on purpose: see host_fault.h. */
#include "lib/host_fault.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/err.h"
#include "host/file.h"

enum state { FREE, INNER, HELD };

struct entry {
	struct kvt_xfer x; /* as asked for */
	uint32_t state;
	uint32_t kind;	 /* what goes wrong with it */
	uint32_t delay;	 /* reaps to come before it is handed out */
	uint64_t number; /* its event */
	uint64_t order;
	int32_t result;
};

struct fault_host {
	struct kvt_host host; /* first; its eventfd is an epoll of the inner one and @held_fd */
	struct kvt_host *inner;
	int held_fd;
	pthread_mutex_t lock; /* all below; held while the inner host is called */
	struct kvt_fault fault;
	struct kvt_host_calls calls;
	uint64_t events, hits, arrivals;
	struct entry entries[]; /* [depth] */
};

static struct fault_host *lock(struct kvt_host *host)
{
	struct fault_host *f = (struct fault_host *)host;

	pthread_mutex_lock(&f->lock);
	return f;
}

static uint64_t mix(uint64_t seed, uint64_t n)
{
	uint64_t x = seed + (n + 1) * 0x9e3779b97f4a7c15u;

	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
	x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
	return x ^ (x >> 31);
}

static bool is_hit(const struct fault_host *f, uint64_t number)
{
	const struct kvt_fault *p = &f->fault;

	if (!p->at || number < p->at)
		return false;
	return number == p->at || (p->every && (number - p->at) % p->every == 0);
}

static int32_t error_of(const struct fault_host *f)
{
	return f->fault.err ? f->fault.err : -EIO;
}

/* One call that can fail. 0, or the error it is to fail with. */
static int call(struct fault_host *f, uint64_t *counter, const char *name)
{
	(*counter)++;
	f->events++;
	if (f->fault.kind != KVT_FAULT_ERRNO || !is_hit(f, f->events))
		return 0;
	f->hits++;
	return kvt_fail(error_of(f), "injected fault: %s is event %llu", name, (unsigned long long)f->events);
}

static int fault_pool_create(struct kvt_host *host, const struct kvt_pool_params *params, struct kvt_pool **pool)
{
	struct fault_host *f = lock(host);
	int ret = call(f, &f->calls.pool_create, "pool_create");

	if (!ret)
		ret = kvt_pool_create(f->inner, params, pool);
	pthread_mutex_unlock(&f->lock);
	return ret;
}

static void fault_pool_destroy(struct kvt_host *host, struct kvt_pool *pool)
{
	struct fault_host *f = lock(host);

	f->calls.pool_destroy++;
	kvt_pool_destroy(f->inner, pool);
	pthread_mutex_unlock(&f->lock);
}

static int fault_file_open(struct kvt_host *host, const struct kvt_file_params *params, struct kvt_file **file)
{
	struct fault_host *f = lock(host);
	int ret = call(f, &f->calls.file_open, "file_open");

	if (!ret)
		ret = kvt_file_open(f->inner, params, file);
	pthread_mutex_unlock(&f->lock);
	return ret;
}

static void fault_file_close(struct kvt_host *host, struct kvt_file *file)
{
	struct fault_host *f = lock(host);

	f->calls.file_close++;
	kvt_file_close(f->inner, file);
	pthread_mutex_unlock(&f->lock);
}

static struct entry *free_entry(struct fault_host *f)
{
	uint32_t i;

	for (i = 0; i < f->host.params.depth; i++)
		if (f->entries[i].state == FREE)
			return &f->entries[i];
	return NULL;
}

static void hold(struct fault_host *f, struct entry *e, int32_t result)
{
	uint64_t n = f->arrivals++;

	e->state = HELD;
	e->result = result;
	e->delay = f->fault.delay ? mix(f->fault.seed, e->number) % (f->fault.delay + 1ull) : 0;
	e->order = f->fault.reorder ? mix(~f->fault.seed, e->number) : n;
	eventfd_write(f->held_fd, 1);
}

/* Returns whether the transfer was accepted. */
static bool submit_one(struct fault_host *f, const struct kvt_xfer *x)
{
	struct entry *e = free_entry(f);
	struct kvt_xfer inner = *x;
	bool hit;

	if (!e)
		return false;
	hit = f->fault.kind && is_hit(f, f->events + 1) && (!f->fault.only || (f->fault.only & (1u << x->op)));
	*e = (struct entry){ .x = *x, .state = INNER, .number = f->events + 1, .kind = hit ? f->fault.kind : KVT_FAULT_NONE };
	inner.user = (uint64_t)(e - f->entries);
	if (e->kind == KVT_FAULT_TORN)
		inner.bytes = (x->bytes + 1) / 2;
	if (e->kind == KVT_FAULT_MISPLACE)
		inner.slot = (x->slot + 1) % x->file->n_slots;
	if (e->kind == KVT_FAULT_ERRNO || e->kind == KVT_FAULT_LOST) {
		hold(f, e, e->kind == KVT_FAULT_ERRNO ? error_of(f) : 0);
	} else if (kvt_host_submit(f->inner, &inner, 1) != 1) {
		e->state = FREE;
		return false;
	}
	f->events++;
	f->hits += hit;
	f->calls.transfers++;
	f->calls.transfer_bytes += x->bytes;
	return true;
}

static int fault_submit(struct kvt_host *host, const struct kvt_xfer *xfers, uint32_t n)
{
	struct fault_host *f = lock(host);
	int ret = call(f, &f->calls.submit, "submit");
	uint32_t i = 0;

	while (!ret && i < n && submit_one(f, &xfers[i]))
		i++;
	pthread_mutex_unlock(&f->lock);
	return ret ? ret : (int)i;
}

int kvt_file_flip_bit(struct kvt_file *file, uint32_t slot, uint64_t bit)
{
	_Alignas(4096) uint8_t page[4096];
	off_t at = (off_t)(slot * file->frame_bytes + bit / 8 / sizeof(page) * sizeof(page));

	if (pread(file->fd, page, sizeof(page), at) != (ssize_t)sizeof(page))
		return -EIO;
	page[bit / 8 % sizeof(page)] ^= (uint8_t)(1u << bit % 8);
	return pwrite(file->fd, page, sizeof(page), at) == (ssize_t)sizeof(page) ? 0 : -EIO;
}

static int32_t spoil(const struct fault_host *f, const struct entry *e, int32_t result)
{
	uint64_t bit = mix(f->fault.seed, e->number) % (e->x.bytes * 8ull);

	if (e->kind == KVT_FAULT_TORN)
		return error_of(f);
	if (e->kind != KVT_FAULT_FLIP || result)
		return result;
	if (e->x.op == KVT_XFER_WRITE)
		return kvt_file_flip_bit(e->x.file, e->x.slot, bit);
	e->x.pool->base[e->x.frame * e->x.pool->frame_bytes + bit / 8] ^= (uint8_t)(1u << bit % 8);
	return 0;
}

static void collect(struct fault_host *f)
{
	struct kvt_done done[64];
	struct entry *e;
	int i, n;

	do {
		n = kvt_host_reap(f->inner, done, 64);
		for (i = 0; i < n; i++) {
			e = &f->entries[done[i].user];
			hold(f, e, spoil(f, e, done[i].result));
		}
	} while (n == 64);
}

static struct entry *next_held(struct fault_host *f)
{
	struct entry *best = NULL, *e;

	for (e = f->entries; e < f->entries + f->host.params.depth; e++)
		if (e->state == HELD && !e->delay && (!best || e->order < best->order))
			best = e;
	return best;
}

static int fault_reap(struct kvt_host *host, struct kvt_done *done, uint32_t n)
{
	struct fault_host *f = lock(host);
	struct entry *e;
	uint32_t got = 0, i;
	eventfd_t count;
	bool held = false;

	f->calls.reap++;
	collect(f);
	while (got < n && (e = next_held(f))) {
		done[got++] = (struct kvt_done){ .user = e->x.user, .result = e->result };
		e->state = FREE;
	}
	if (eventfd_read(f->held_fd, &count) < 0)
		count = 0;
	for (i = 0; i < host->params.depth; i++) {
		e = &f->entries[i];
		held |= e->state == HELD;
		if (e->state == HELD && e->delay)
			e->delay--;
	}
	if (held)
		eventfd_write(f->held_fd, 1);
	pthread_mutex_unlock(&f->lock);
	return (int)got;
}

static int fault_cancel(struct kvt_host *host, uint64_t user)
{
	struct fault_host *f = lock(host);
	uint32_t i;
	int ret = 0;

	f->calls.cancel++;
	for (i = 0; i < host->params.depth; i++)
		if (f->entries[i].state == INNER && f->entries[i].x.user == user && kvt_host_cancel(f->inner, i))
			ret = 1;
	pthread_mutex_unlock(&f->lock);
	return ret;
}

static void fault_drain(struct kvt_host *host)
{
	struct fault_host *f = lock(host);

	f->calls.drain++;
	kvt_host_drain(f->inner);
	collect(f);
	pthread_mutex_unlock(&f->lock);
}

static void fault_close(struct kvt_host *host)
{
	struct fault_host *f = (struct fault_host *)host;

	kvt_host_close(f->inner);
	close(f->host.eventfd);
	close(f->held_fd);
	pthread_mutex_destroy(&f->lock);
	free(f);
}

static const struct kvt_host_ops fault_ops = {
	.close = fault_close,
	.pool_create = fault_pool_create,
	.pool_destroy = fault_pool_destroy,
	.file_open = fault_file_open,
	.file_close = fault_file_close,
	.submit = fault_submit,
	.reap = fault_reap,
	.cancel = fault_cancel,
	.drain = fault_drain,
};

int kvt_host_fault_open(struct kvt_host *inner, const struct kvt_fault *fault, struct kvt_host **host)
{
	struct epoll_event event = { .events = EPOLLIN };
	struct fault_host *f = calloc(1, sizeof(*f) + inner->params.depth * sizeof(f->entries[0]));

	if (!f)
		return kvt_fail(-ENOMEM, "fault host: no memory");
	f->host = *inner;
	f->host.ops = &fault_ops;
	f->inner = inner;
	f->fault = *fault;
	f->held_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	f->host.eventfd = epoll_create1(EPOLL_CLOEXEC);
	if (f->held_fd < 0 || f->host.eventfd < 0 ||
	    epoll_ctl(f->host.eventfd, EPOLL_CTL_ADD, f->held_fd, &event) ||
	    epoll_ctl(f->host.eventfd, EPOLL_CTL_ADD, kvt_host_eventfd(inner), &event)) {
		close(f->held_fd);
		close(f->host.eventfd);
		free(f);
		return kvt_fail(-EMFILE, "fault host: no descriptors");
	}
	pthread_mutex_init(&f->lock, NULL);
	*host = &f->host;
	return 0;
}

void kvt_host_fault_set(struct kvt_host *host, const struct kvt_fault *fault)
{
	struct fault_host *f = lock(host);

	f->fault = *fault;
	f->events = f->hits = 0;
	pthread_mutex_unlock(&f->lock);
}

uint64_t kvt_host_fault_events(struct kvt_host *host)
{
	struct fault_host *f = lock(host);
	uint64_t n = f->events;

	pthread_mutex_unlock(&f->lock);
	return n;
}

uint64_t kvt_host_fault_hits(struct kvt_host *host)
{
	struct fault_host *f = lock(host);
	uint64_t n = f->hits;

	pthread_mutex_unlock(&f->lock);
	return n;
}

void kvt_host_fault_calls(struct kvt_host *host, struct kvt_host_calls *calls)
{
	struct fault_host *f = lock(host);

	*calls = f->calls;
	pthread_mutex_unlock(&f->lock);
}
