/* SPDX-License-Identifier: MIT */
/* Compute threads: run a function over a range, the caller being one of them. */
#ifndef KVT_BASE_WORKERS_H
#define KVT_BASE_WORKERS_H

#include <stdint.h>

struct kvt_workers;

/* Cores that this process may use. */
uint32_t kvt_cores(void);

/* fn(arg, worker, i): @worker is in [0, threads), for scratch of its own. */
typedef void (*kvt_work_fn)(void *arg, uint32_t worker, uint32_t i);

/* Bytes that @threads cost, stacks included. */
uint64_t kvt_workers_bytes(uint32_t threads);

int kvt_workers_create(uint32_t threads, struct kvt_workers **workers);
void kvt_workers_destroy(struct kvt_workers *workers);
uint32_t kvt_workers_count(const struct kvt_workers *workers);

/* fn for every i in [0, n), in any order, then return. Callers take turns; called from within fn, the caller does it all. */
void kvt_workers_run(struct kvt_workers *workers, uint32_t n, kvt_work_fn fn, void *arg);

/*
 * The same for who holds a lock that fn of another run may be waiting for: does not wait for its turn. While others have the
 * threads, the caller does it all.
 */
void kvt_workers_run_now(struct kvt_workers *workers, uint32_t n, kvt_work_fn fn, void *arg);

#endif
