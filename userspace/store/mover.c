// SPDX-License-Identifier: MIT
/*
 * The mover: one thread that takes completions, verifies what they brought,
 * publishes it, and writes dirty blocks back.
 *
 * Write-back runs when a caller waits for a frame or a flush, and in the
 * background while free frames are short and dirty blocks are many; only the
 * background is held to the rate cap, and only it waits while blocks are read.
 */
#include "store/internal.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/err.h"
#include "codec/codec.h"

#define BATCH 32

/* ---- the queue ---- */

static uint64_t clock_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

static struct io *io_take(struct kvt_store *s)
{
	struct io *io;

	if (s->free_io == NONE)
		return NULL;
	io = &s->io[s->free_io];
	s->free_io = io->next;
	io->bounce = NONE;
	io->tries = 0;
	return io;
}

static void io_give(struct kvt_store *s, struct io *io)
{
	if (io->bounce != NONE)
		s->bounces.item[s->bounces.n++] = io->bounce;
	if (io->kind != IO_LOAD)
		s->stores--;
	else if (!--s->loads)
		s->st.disk_read_ns += clock_ns() - s->loading_since;
	io->next = s->free_io;
	s->free_io = (uint32_t)(io - s->io);
}

static void io_queue(struct kvt_store *s, struct io *io)
{
	uint32_t i = (uint32_t)(io - s->io);

	io->next = NONE;
	if (s->queue_head == NONE)
		s->queue_head = i;
	else
		s->io[s->queue_tail].next = i;
	s->queue_tail = i;
}

int kvt_store_load(struct kvt_store *s, uint32_t block, uint32_t tiers)
{
	struct block *b = &s->blocks[block];
	uint32_t tier, frame;
	struct io *io;

	if (s->free_io == NONE)
		return -EAGAIN;
	if (kvt_store_take_frame(s, tiers & HOST_TIERS, &tier, &frame))
		return -EAGAIN;
	io = io_take(s);
	io->block = block;
	io->kind = IO_LOAD;
	io->tier = tier;
	io->frame = frame;
	io->slot = b->slot;
	io->rows = b->rows;
	io->digest = b->digest;
	b->state = B_LOADING;
	b->error = 0;
	if (!s->loads++)
		s->loading_since = clock_ns();
	io_queue(s, io);
	return 0;
}

int kvt_store_store(struct kvt_store *s, uint32_t block)
{
	struct block *b = &s->blocks[block];
	struct io *io;
	uint32_t slot;

	if (s->free_io == NONE || !s->bounces.n || s->disk_error || kvt_store_take_slot(s, block, &slot))
		return -EAGAIN;
	io = io_take(s);
	io->block = block;
	io->kind = IO_STORE;
	io->tier = b->tier;
	io->frame = b->frame;
	io->slot = slot;
	io->bounce = s->bounces.item[--s->bounces.n];
	io->rows = b->rows;
	io->digest = b->digest;
	b->writing = true;
	s->policy_ops->busy(s->policy, block);
	s->stores++;
	io_queue(s, io);
	return 0;
}

/* ---- completions: without the lock ---- */

static uint64_t digest_of(const struct kvt_store *s, const struct io *io, const uint8_t *data)
{
	return kvt_rows_digest(0, io->rows, data, s->planes[s->blocks[io->block].plane].row_bytes);
}

static void load_finished(struct kvt_store *s, struct io *io, int result)
{
	uint8_t *data = kvt_store_host_frame(s, io->tier, io->frame);
	struct block *b = &s->blocks[io->block];
	bool good = false, unproven;
	uint64_t used;
	uint32_t slot;

	if (!result) {
		used = rows_bytes(s, b, io->rows);
		memset(data + used, 0, s->block_bytes - used);
		good = digest_of(s, io, data) == io->digest;
	}
	pthread_mutex_lock(&s->lock);
	unproven = b->unproven;
	if (!result && !good) {
		s->st.digest_errors++;
		if (!io->tries++) { /* the transfer may have been at fault, not the disk */
			io_queue(s, io);
			pthread_mutex_unlock(&s->lock);
			return;
		}
		kvt_store_lose(s, io->block);
		result = -EBADMSG;
	}
	s->st.disk_reads++;
	s->st.disk_read_bytes += rows_bytes(s, b, io->rows);
	if (result) {
		if (result != -EBADMSG)
			s->st.io_errors++;
		kvt_store_end_ahead(s, io->block, false);
		kvt_store_give(s, io->tier, io->frame);
		b->error = (int16_t)result;
	} else if (b->ahead == AHEAD_UNWANTED) {
		b->ahead = AHEAD_NOT;
		kvt_store_give(s, io->tier, io->frame);
	} else {
		kvt_store_place(s, io->block, io->tier, io->frame);
		b->unproven = false;
	}
	b->state = B_IDLE;
	slot = io->slot;
	kvt_store_settle(s, io->block);
	io_give(s, io);
	pthread_mutex_unlock(&s->lock);
	if (result == -EBADMSG && unproven)
		kvt_log(KVT_LOG_INFO, "disk slot %u does not hold what an earlier process left there", slot);
	else if (result == -EBADMSG) /* log lines are written without the lock: the callback may ask for the stats */
		kvt_log(KVT_LOG_ERROR, "disk slot %u does not hold what was written: a block is lost", slot);
}

static void store_failed(struct kvt_store *s, struct io *io, int result)
{
	bool full = result == -ENOSPC || result == -EDQUOT || result == -EFBIG;
	struct block *b = &s->blocks[io->block];
	bool source_bad = false, shrunk = false, closed = false, gone = result == -ENODEV && io->tier == KVT_TIER_GPU;
	uint32_t slots;

	/* of source and copy, which one is wrong? The block is not written to while it is being written back. */
	if (result == -EBADMSG)
		source_bad = io->tier == KVT_TIER_GPU ||
			     digest_of(s, io, kvt_store_host_frame(s, io->tier, io->frame)) != io->digest;
	pthread_mutex_lock(&s->lock);
	if (result == -EBADMSG)
		s->st.digest_errors++;
	else
		s->st.io_errors++;
	if (full && !io->tries++) { /* another's file may have gone meanwhile */
		io->kind = IO_STORE;
		io_queue(s, io);
		pthread_mutex_unlock(&s->lock);
		return;
	}
	if (source_bad) {
		kvt_store_lose(s, io->block);
	} else if (!gone) { /* else it is not the disk's fault */
		s->write_errors++;
		s->errors_in_row++;
	}
	if (full) {
		shrunk = kvt_store_retire_slot(s, io->slot);
		s->st.full++;
	} else {
		kvt_store_give(s, KVT_TIER_DISK, io->slot);
	}
	if (s->errors_in_row >= WRITE_ERRORS_MAX && !s->disk_error && !full) {
		s->disk_error = result;
		closed = true;
	}
	slots = s->frames[KVT_TIER_DISK].total;
	b->writing = false;
	kvt_store_settle(s, io->block);
	io_give(s, io);
	pthread_mutex_unlock(&s->lock);
	if (source_bad)
		kvt_log(KVT_LOG_ERROR, "memory does not hold what was written to it: a block is lost");
	if (shrunk)
		kvt_log(KVT_LOG_WARN, "disk tier: %s: goes on with the %u slots of %llu bytes that have been written",
			strerror(-result), slots, (unsigned long long)s->block_bytes);
	if (closed)
		kvt_log(KVT_LOG_ERROR, "disk tier: %u writes in a row failed, the last with %s: it takes no more",
			WRITE_ERRORS_MAX, strerror(-result));
}

static void store_published(struct kvt_store *s, struct io *io)
{
	struct block *b = &s->blocks[io->block];

	pthread_mutex_lock(&s->lock);
	s->errors_in_row = 0;
	s->st.disk_writes++;
	s->st.disk_write_bytes += rows_bytes(s, b, io->rows);
	kvt_store_set_slot(s, io->block, io->slot);
	kvt_store_set_dirty(s, io->block, false);
	b->writing = false;
	kvt_store_settle(s, io->block);
	io_give(s, io);
	pthread_mutex_unlock(&s->lock);
}

static void finished(struct kvt_store *s, uint32_t index, int result)
{
	struct io *io = &s->io[index];

	/* what queued the io wrote it under the lock */
	pthread_mutex_lock(&s->lock);
	pthread_mutex_unlock(&s->lock);

	if (io->kind == IO_LOAD) {
		load_finished(s, io, result);
	} else if (result) {
		store_failed(s, io, result);
	} else if (io->kind == IO_STORE && !(s->flags & KVT_CACHE_NO_WRITE_VERIFY)) {
		pthread_mutex_lock(&s->lock);
		io->kind = IO_VERIFY;
		io_queue(s, io);
		pthread_mutex_unlock(&s->lock);
	} else if (io->kind == IO_VERIFY &&
		   digest_of(s, io, s->staging->base + (uint64_t)io->bounce * s->block_bytes) != io->digest) {
		store_failed(s, io, -EBADMSG);
	} else {
		store_published(s, io);
	}
}

/* ---- submission: without the lock ---- */

/*
 * A gpu frame reaches the disk through its bounce frame. What arrives there is
 * verified before it goes on, and fetched once more if it is wrong.
 */
static int fetch_from_gpu(struct kvt_store *s, const struct io *io)
{
	uint8_t *data = s->staging->base + (uint64_t)io->bounce * s->block_bytes;
	int ret;

	for (int tries = 0; tries < 2; tries++) {
		ret = kvt_device_save(s, data, io->frame);
		if (ret || digest_of(s, io, data) == io->digest)
			return ret;
		pthread_mutex_lock(&s->lock);
		s->st.digest_errors++;
		pthread_mutex_unlock(&s->lock);
	}
	return -EBADMSG;
}

void kvt_store_submit(struct kvt_store *s)
{
	struct kvt_xfer xfer[BATCH];
	uint32_t n;
	int done;

	for (;;) {
		pthread_mutex_lock(&s->lock);
		for (n = 0; n < BATCH && s->queue_head != NONE; n++) {
			uint32_t i = s->queue_head;
			const struct io *io = &s->io[i];
			bool bounce = io->kind == IO_VERIFY || (io->kind == IO_STORE && io->tier == KVT_TIER_GPU);

			s->queue_head = io->next;
			xfer[n] = (struct kvt_xfer){
				.op = io->kind == IO_STORE ? KVT_XFER_WRITE : KVT_XFER_READ,
				.slot = io->slot,
				.file = s->file,
				.pool = bounce ? s->staging : s->pool[io->tier],
				.frame = bounce ? io->bounce : io->frame,
				.bytes = (uint32_t)rows_bytes(s, &s->blocks[io->block], io->rows),
				.user = i,
			};
		}
		pthread_mutex_unlock(&s->lock);
		if (!n)
			return;
		for (uint32_t i = 0; i < n; i++) {
			const struct io *io = &s->io[xfer[i].user];

			if (io->kind == IO_LOAD)
				done = kvt_store_ready(s, io->tier, io->frame);
			else if (io->kind == IO_STORE && io->tier == KVT_TIER_GPU)
				done = fetch_from_gpu(s, io);
			else
				continue;
			if (done) {
				finished(s, (uint32_t)xfer[i].user, done);
				memmove(&xfer[i], &xfer[i + 1], (--n - i) * sizeof(xfer[0]));
				i--;
			}
		}
		for (uint32_t sent = 0; sent < n; sent += (uint32_t)done) {
			done = kvt_host_submit(s->host, xfer + sent, n - sent);
			if (done < 0) {
				finished(s, (uint32_t)xfer[sent].user, done);
				done = 1;
			} else if (!done) { /* as many in flight as the host takes: the mover goes on when some end */
				pthread_mutex_lock(&s->lock);
				while (n > sent) {
					struct io *io = &s->io[xfer[--n].user];

					io->next = s->queue_head;
					if (s->queue_head == NONE)
						s->queue_tail = (uint32_t)xfer[n].user;
					s->queue_head = (uint32_t)xfer[n].user;
				}
				pthread_mutex_unlock(&s->lock);
				/* they may all have ended since, and the mover have seen an empty queue */
				if (!pthread_equal(pthread_self(), s->mover))
					kvt_store_kick(s);
				return;
			}
		}
	}
}

/* ---- write-back ---- */

struct pace {
	double last, allowance; /* seconds, bytes */
};

static bool background_wanted(struct kvt_store *s)
{
	uint32_t total = 0, free = 0;

	for (uint32_t t = 0; t < KVT_TIER_DISK; t++) {
		total += s->frames[t].total;
		free += s->frames[t].n;
	}
	return kvt_policy_between(&s->cleaning, s->dirty, total / 8, total / 4) && free < total / 4;
}

/* A block with room for rows will likely be written to again, and is not worth writing down before. */
static bool at_rest(const struct kvt_store *s, uint32_t block)
{
	return s->blocks[block].rows == s->planes[s->blocks[block].plane].block_rows;
}

/* Queue what should be written now, with the lock. Returns ms until more may be written, or -1. */
static int write_back(struct kvt_store *s, struct pace *pace)
{
	double t;

	if (s->rate) {
		t = (double)clock_ns() * 1e-9;
		pace->allowance += (t - pace->last) * (double)s->rate;
		pace->last = t;
		/* what was not used is not saved up beyond a moment's worth */
		if (pace->allowance > (double)(s->rate / 10 + s->block_bytes))
			pace->allowance = (double)(s->rate / 10 + s->block_bytes);
	}
	for (;;) {
		bool waited_for = s->urgent || s->flushing;
		uint32_t victim;

		/* beside reads the background writes one at a time: each of them ends here, and the mover looks again */
		if (s->stop || (!waited_for && ((s->loads && s->stores) || !background_wanted(s))))
			return -1;
		if (!waited_for && s->rate && pace->allowance < (double)s->block_bytes)
			return 1 + (int)(((double)s->block_bytes - pace->allowance) * 1e3 / (double)s->rate);
		victim = s->policy_ops->victim(s->policy, MEMORY_TIERS, false);
		if (victim == KVT_POLICY_NONE || (!waited_for && !at_rest(s, victim)) || kvt_store_store(s, victim))
			return -1;
		if (!waited_for)
			pace->allowance -= (double)s->block_bytes;
	}
}

static void *mover(void *arg)
{
	struct kvt_store *s = arg;
	struct pace pace = { .last = (double)clock_ns() * 1e-9 };
	struct pollfd fds[2] = {
		{ .fd = kvt_host_eventfd(s->host), .events = POLLIN },
		{ .fd = s->wake, .events = POLLIN },
	};
	struct kvt_done done[BATCH];
	int timeout = -1, n;
	uint64_t count;
	bool quit;

	for (;;) {
		/* both only wake; the host clears its own, and what there is to do is looked up below */
		if (poll(fds, 2, timeout) > 0 && fds[1].revents && read(s->wake, &count, sizeof(count)) < 0)
			count = 0;
		while ((n = kvt_host_reap(s->host, done, BATCH)) > 0)
			for (int i = 0; i < n; i++)
				finished(s, (uint32_t)done[i].user, done[i].result);
		pthread_mutex_lock(&s->lock);
		timeout = write_back(s, &pace);
		quit = s->stop && !s->loads && !s->stores;
		pthread_mutex_unlock(&s->lock);
		if (quit)
			return NULL;
		kvt_store_submit(s);
	}
}

void kvt_store_kick(struct kvt_store *s)
{
	uint64_t one = 1;

	if (write(s->wake, &one, sizeof(one)) < 0)
		return; /* the counter is full: it wakes all the same */
}

int kvt_store_mover_start(struct kvt_store *s)
{
	pthread_attr_t attr;
	int ret;

	pthread_attr_init(&attr);
	pthread_attr_setstacksize(&attr, MOVER_STACK);
	ret = pthread_create(&s->mover, &attr, mover, s);
	pthread_attr_destroy(&attr);
	return ret ? kvt_fail(-ret, "the mover thread could not be started: %s", strerror(ret)) : 0;
}

void kvt_store_mover_stop(struct kvt_store *s)
{
	pthread_mutex_lock(&s->lock);
	s->stop = true;
	pthread_mutex_unlock(&s->lock);
	kvt_store_kick(s);
	pthread_join(s->mover, NULL);
}
