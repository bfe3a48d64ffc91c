/* SPDX-License-Identifier: MIT */
/* The host over the kernel module's /dev/kvtier. */
#ifndef KVT_HOST_MODULE_H
#define KVT_HOST_MODULE_H

#include "host/host.h"

/* Bytes that kvt_module_open() charges at most. */
uint64_t kvt_module_overhead(const struct kvt_host_params *params);

/* -ENODEV with the reason: no module, no permission, or one that lacks what is needed. */
int kvt_module_open(const struct kvt_host_params *params, struct kvt_host **host);

/* Take a named pool's name away. -ENOENT, -EPERM: another's; -ENODEV. */
int kvt_module_pool_remove(const char *name);

/*
 * Whether "auto" should take the module: 0, or a negative errno with the reason in kvt_last_error(). -ENOENT: it is not
 * there, which is no degradation. A pageable pool of the module is memory that stays, charged to RLIMIT_MEMLOCK: where
 * that is limited, user space serves better.
 */
int kvt_module_suits(void);

#endif
