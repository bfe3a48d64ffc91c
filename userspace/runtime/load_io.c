// SPDX-License-Identifier: MIT
/* Reads in flight: io_uring, or as many threads as reads where that is denied. */
#include "runtime/load_io.h"

#include <errno.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/err.h"

static void push(struct kvt_load_queue *q, struct kvt_load_slot *slot)
{
	slot->next = NULL;
	*q->tail = slot;
	q->tail = &slot->next;
}

static struct kvt_load_slot *pop(struct kvt_load_queue *q)
{
	struct kvt_load_slot *slot = q->head;

	q->head = slot->next;
	if (!q->head)
		q->tail = &q->head;
	return slot;
}

static void *reader(void *arg)
{
	struct kvt_load_io *io = arg;

	pthread_mutex_lock(&io->lock);
	for (;;) {
		struct kvt_load_slot *slot;

		while (!io->todo.head && !io->stop)
			pthread_cond_wait(&io->work, &io->lock);
		if (!io->todo.head)
			break;
		slot = pop(&io->todo);
		pthread_mutex_unlock(&io->lock);
		slot->result = pread(slot->fd, slot->into + slot->got, slot->ask - slot->got, slot->offset + slot->got);
		if (slot->result < 0)
			slot->result = -errno;
		pthread_mutex_lock(&io->lock);
		push(&io->done, slot);
		pthread_cond_signal(&io->finished);
	}
	pthread_mutex_unlock(&io->lock);
	return NULL;
}

static int start_threads(struct kvt_load_io *io, uint32_t depth)
{
	pthread_attr_t attr;
	int err = 0;

	pthread_mutex_init(&io->lock, NULL);
	pthread_cond_init(&io->work, NULL);
	pthread_cond_init(&io->finished, NULL);
	io->todo.tail = &io->todo.head;
	io->done.tail = &io->done.head;
	pthread_attr_init(&attr);
	pthread_attr_setstacksize(&attr, KVT_LOAD_STACK);
	while (io->n_threads < depth && !err) {
		err = pthread_create(&io->threads[io->n_threads], &attr, reader, io);
		if (!err)
			io->n_threads++;
	}
	pthread_attr_destroy(&attr);
	if (io->n_threads) /* fewer do as well, slower */
		return 0;
	kvt_load_io_close(io);
	return kvt_fail(-err, "no thread for reading weights: %s (RLIMIT_NPROC, or the cgroup's pids.max)", strerror(err));
}

int kvt_load_io_open(struct kvt_load_io *io, uint32_t kind, uint32_t depth)
{
	int err;

	memset(io, 0, sizeof(*io));
	if (kind == KVT_IO_THREADS)
		return start_threads(io, depth);
	err = io_uring_queue_init(depth, &io->ring, 0);
	io->uring = !err;
	if (!err)
		return 0;
	if (kind == KVT_IO_URING)
		return kvt_fail(err, "io_uring for %u reads: %s (sysctl kernel.io_uring_disabled, or a seccomp profile)", depth,
				strerror(-err));
	kvt_log(KVT_LOG_INFO, "weights: io_uring: %s: reading with %u threads", strerror(-err), depth);
	return start_threads(io, depth);
}

void kvt_load_io_close(struct kvt_load_io *io)
{
	while (io->in_flight)
		kvt_load_io_wait(io);
	if (io->uring) {
		io_uring_queue_exit(&io->ring);
		return;
	}
	pthread_mutex_lock(&io->lock);
	io->stop = true;
	pthread_cond_broadcast(&io->work);
	pthread_mutex_unlock(&io->lock);
	for (uint32_t i = 0; i < io->n_threads; i++)
		pthread_join(io->threads[i], NULL);
	pthread_cond_destroy(&io->finished);
	pthread_cond_destroy(&io->work);
	pthread_mutex_destroy(&io->lock);
}

int kvt_load_io_submit(struct kvt_load_io *io, struct kvt_load_slot *slot)
{
	struct io_uring_sqe *sqe;
	int n;

	if (!io->uring) {
		pthread_mutex_lock(&io->lock);
		push(&io->todo, slot);
		io->in_flight++;
		pthread_cond_signal(&io->work);
		pthread_mutex_unlock(&io->lock);
		return 0;
	}
	sqe = io_uring_get_sqe(&io->ring); /* as many entries as slots, each submitted at once: never full */
	io_uring_prep_read(sqe, slot->fd, slot->into + slot->got, slot->ask - slot->got, slot->offset + slot->got);
	io_uring_sqe_set_data(sqe, slot);
	if (slot->cached) /* on the kernel's workers, side by side; else this thread would copy, one after the other */
		io_uring_sqe_set_flags(sqe, IOSQE_ASYNC);
	do {
		n = io_uring_submit(&io->ring);
	} while (n == -EINTR || n == -EAGAIN);
	if (n < 0)
		return kvt_fail(n, "io_uring: submitting a read of %llu bytes: %s",
				(unsigned long long)(slot->ask - slot->got), strerror(-n));
	io->in_flight++;
	return 0;
}

struct kvt_load_slot *kvt_load_io_wait(struct kvt_load_io *io)
{
	struct kvt_load_slot *slot;
	struct io_uring_cqe *cqe;

	if (!io->uring) {
		pthread_mutex_lock(&io->lock);
		while (!io->done.head)
			pthread_cond_wait(&io->finished, &io->lock);
		slot = pop(&io->done);
		io->in_flight--;
		pthread_mutex_unlock(&io->lock);
		return slot;
	}
	while (io_uring_wait_cqe(&io->ring, &cqe)) /* only a signal ends it early */
		;
	slot = io_uring_cqe_get_data(cqe);
	slot->result = cqe->res;
	io_uring_cqe_seen(&io->ring, cqe);
	io->in_flight--;
	return slot;
}

int kvt_load_mapped(void *dst, const void *src, uint64_t bytes)
{
	struct iovec to = { dst, bytes }, from = { (void *)(uintptr_t)src, bytes };

	while (to.iov_len) {
		ssize_t n = process_vm_readv(getpid(), &to, 1, &from, 1, 0);

		if (n < 0)
			return -errno;
		if (!n)
			return -EFAULT;
		to.iov_base = (uint8_t *)to.iov_base + n;
		from.iov_base = (uint8_t *)from.iov_base + n;
		to.iov_len -= n;
		from.iov_len -= n;
	}
	return 0;
}
