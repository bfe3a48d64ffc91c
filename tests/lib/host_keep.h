/* SPDX-License-Identifier: MIT */
/*
 * A host whose RAM pools outlive the process, and whose frames are taken away as soon as they may be, at random: what the
 * kernel module does, without it. Wrapped around a real host; named pools are files in @dir.
 */
#ifndef KVT_TESTS_HOST_KEEP_H
#define KVT_TESTS_HOST_KEEP_H

#include "host/host.h"

/* Of 256 frames that are let go of, @take are taken. @inner becomes the new host's. */
int kvt_host_keep_open(struct kvt_host *inner, const char *dir, uint32_t take, struct kvt_host **host);

/* Fail the n-th time from now that a taken frame is regained, with -ENOMEM. */
void kvt_host_keep_fail(struct kvt_host *host, uint32_t n);

#endif
