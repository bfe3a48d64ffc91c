/* SPDX-License-Identifier: MIT */
/*
 * A host backend that goes wrong on purpose, wrapped around a real one.
 *
 * Everything that can fail is an event: a call of pool_create, file_open or submit, and
 * each accepted transfer. Events are numbered from 1 in the order in which they are asked
 * for, so a sweep is: at = 1, 2, 3, ... until a run has fewer events than that.
 * Positions of flipped bits, delays and orders are functions of the seed and the event's
 * number: the same run goes wrong in the same way.
 */
#ifndef KVT_TESTS_HOST_FAULT_H
#define KVT_TESTS_HOST_FAULT_H

#include "host/host.h"

enum kvt_fault_kind {
	KVT_FAULT_NONE,	    /* only delays and orders */
	KVT_FAULT_ERRNO,    /* the call, or the transfer, fails with @err; no byte moves */
	KVT_FAULT_TORN,	    /* the transfer moves half of its bytes, then fails with @err */
	KVT_FAULT_FLIP,	    /* succeeds, with one bit wrong: in the frame (read), in the file (write) */
	KVT_FAULT_LOST,	    /* succeeds, and nothing has moved */
	KVT_FAULT_MISPLACE, /* succeeds, with the slot after the one asked for */
};

/* Faults other than ERRNO hit transfers alone: an event that is a call passes them by. */
struct kvt_fault {
	uint32_t kind;	 /* enum kvt_fault_kind */
	int32_t err;	 /* negative errno; 0: -EIO */
	uint64_t at;	 /* number of the event that goes wrong; 0: none */
	uint64_t every;	 /* and each so many events after it; 0: only that one */
	uint64_t seed;
	uint32_t delay;	 /* hold each completion back for 0 to so many reaps */
	bool reorder;	 /* hand completions out in a seeded order */
	uint32_t only;	 /* 1 << KVT_XFER_READ | 1 << KVT_XFER_WRITE: transfers of others pass unharmed; 0: all are hit */
};

struct kvt_host_calls {
	uint64_t pool_create, pool_destroy, file_open, file_close, submit, reap, cancel, drain;
	uint64_t transfers, transfer_bytes; /* accepted */
};

/* Wrap @inner, which is closed with the wrapper; pools and files are made through the wrapper. */
int kvt_host_fault_open(struct kvt_host *inner, const struct kvt_fault *fault, struct kvt_host **host);

/* A new plan; events are counted from 1 again. */
void kvt_host_fault_set(struct kvt_host *host, const struct kvt_fault *fault);

uint64_t kvt_host_fault_events(struct kvt_host *host); /* since the plan was set */
uint64_t kvt_host_fault_hits(struct kvt_host *host);   /* that went wrong */
void kvt_host_fault_calls(struct kvt_host *host, struct kvt_host_calls *calls);

/* Flip bit @bit of a slot in the file, past any cache of the host. 0 or a negative errno. */
int kvt_file_flip_bit(struct kvt_file *file, uint32_t slot, uint64_t bit);

#endif
