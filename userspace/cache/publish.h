/* SPDX-License-Identifier: MIT */
/*
 * A cache's counters for other processes: whoever connects to its socket gets
 * them as one packet of JSON, and is closed. The socket has an abstract name,
 * so that nothing is left of it however the process ends, and is seen from
 * inside of a chroot and from outside. It answers root and its own user.
 */
#ifndef KVT_CACHE_PUBLISH_H
#define KVT_CACHE_PUBLISH_H

#include <stdint.h>

#include "kvtier.h"

#define KVT_PUBLISH_NAME "kvtier/%d/%u" /* process, and which of its caches; behind a NUL */
#define KVT_PUBLISH_STACK (128u << 10)
#define KVT_PUBLISH_MAX (64u << 10) /* bytes of a packet */

struct kvt_publish;

/* Memory that it takes, its thread's stack included. */
uint64_t kvt_publish_bytes(void);
int kvt_publish_start(struct kvt_cache *cache, struct kvt_publish **publish);
void kvt_publish_stop(struct kvt_publish *publish);

#endif
