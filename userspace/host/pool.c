// SPDX-License-Identifier: MIT
/*
 * A pool's frames: one anonymous mapping, not inherited by fork(), placed on a NUMA node
 * and locked before its first byte is touched.
 */
#include <errno.h>
#include <numaif.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/err.h"
#include "host/size.h"
#include "host/user.h"

#define HUGE (2ull << 20)
#define NODES 1024

/* With room for alignment to a huge page; what is not needed is given back. */
static uint8_t *map_aligned(uint64_t bytes)
{
	uint8_t *map = mmap(NULL, bytes + HUGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	uint64_t before;

	if (map == MAP_FAILED)
		return map;
	before = -(uintptr_t)map & (HUGE - 1);
	if (before)
		munmap(map, before);
	munmap(map + before + bytes, HUGE - before);
	return map + before;
}

/*
 * Reserved huge pages only for whole ones: a rounded-up pool would be larger than its budget. Transparent ones are
 * always asked for: a cache is read at the speed of its page walks, too.
 */
static uint8_t *map_frames(uint64_t bytes, bool reserved, bool *huge)
{
	uint8_t *map = MAP_FAILED;

	*huge = false;
	if (reserved && bytes % HUGE == 0)
		map = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
			   MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB | (21 << MAP_HUGE_SHIFT), -1, 0);
	if (map != MAP_FAILED) {
		*huge = true;
		return map;
	}
	if (bytes >= HUGE)
		map = map_aligned(bytes);
	if (map == MAP_FAILED)
		return mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	madvise(map, bytes, MADV_HUGEPAGE); /* a wish: smaller pages serve as well */
	return map;
}

static int bind_node(struct kvt_user_pool *pool, const struct kvt_pool_params *params, uint64_t bytes)
{
	const unsigned int bits = 8 * sizeof(unsigned long);
	unsigned long mask[NODES / (8 * sizeof(unsigned long))] = { 0 };
	int ret = -EINVAL;

	pool->pool.node = -1;
	if (params->node < 0)
		return 0;
	if (params->node < NODES) {
		mask[params->node / bits] = 1ul << (params->node % bits);
		/* Strict binding has the kernel kill a process whose node is full, so it must be asked for. */
		ret = mbind(pool->pool.base, bytes, params->numa_strict ? MPOL_BIND : MPOL_PREFERRED, mask, NODES, 0) ?
			      -errno : 0;
	}
	if (!ret) {
		pool->pool.node = params->node;
		return 0;
	}
	if (params->numa_strict)
		return kvt_fail(ret, "pool of %s: mbind() to NUMA node %d: %s: numactl -H lists the nodes, "
				"or leave numa_strict", kvt_size_text(bytes).s, params->node, strerror(-ret));
	snprintf(pool->warning, sizeof(pool->warning), "frames are not bound to NUMA node %d: mbind(): %s",
		 params->node, strerror(-ret));
	return 0;
}

static uint64_t locked_already(void)
{
	FILE *f = fopen("/proc/self/status", "re");
	unsigned long long kib = 0;
	char line[128];

	while (f && fgets(line, sizeof(line), f) && sscanf(line, "VmLck: %llu", &kib) != 1)
		;
	if (f)
		fclose(f);
	return kib * 1024;
}

static int lock_frames(const struct kvt_user_pool *pool, uint64_t bytes)
{
	struct rlimit limit = { .rlim_cur = RLIM_INFINITY };
	uint64_t locked;

	if (!mlock(pool->pool.base, bytes))
		return 0;
	getrlimit(RLIMIT_MEMLOCK, &limit);
	locked = locked_already();
	if (limit.rlim_cur == RLIM_INFINITY || locked + bytes <= limit.rlim_cur)
		return kvt_fail(-ENOMEM, "mlock() of %s: %s: less pinned memory, or more RAM",
				kvt_size_text(bytes).s, strerror(errno));
	if (locked)
		return kvt_fail(-ENOMEM, "RLIMIT_MEMLOCK is %s, %s asked, %s locked already: ulimit -l, or LimitMEMLOCK=",
				kvt_size_text(limit.rlim_cur).s, kvt_size_text(bytes).s, kvt_size_text(locked).s);
	return kvt_fail(-ENOMEM, "RLIMIT_MEMLOCK is %s, %s asked: ulimit -l, or LimitMEMLOCK=",
			kvt_size_text(limit.rlim_cur).s, kvt_size_text(bytes).s);
}

int kvt_user_pool_map(struct kvt_user_pool *pool, const struct kvt_pool_params *params, uint64_t frame_bytes)
{
	uint64_t physical = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
	uint64_t bytes;
	int ret;

	*pool = (struct kvt_user_pool){ .buf_first = -1 };
	if (params->name)
		return kvt_fail(-EOPNOTSUPP, "pool %s: memory that outlives its process is had from the kvtier module only: host module",
				params->name);
	if (!params->n_frames || __builtin_mul_overflow((uint64_t)params->n_frames, frame_bytes, &bytes) ||
	    bytes > INT64_MAX)
		return kvt_fail(-EINVAL, "pool: %u frames of %s cannot be", params->n_frames,
				kvt_size_text(frame_bytes).s);
	/* To lock more than there is would have the kernel kill the process half-way. */
	if (bytes > physical)
		return kvt_fail(-ENOMEM, "pool of %s: the machine has %s of memory", kvt_size_text(bytes).s,
				kvt_size_text(physical).s);
	pool->pool.frame_bytes = frame_bytes;
	pool->pool.n_frames = params->n_frames;
	pool->pool.base = map_frames(bytes, params->hugepages, &pool->pool.hugepages);
	if (pool->pool.base == MAP_FAILED)
		return kvt_fail(-ENOMEM, "pool of %s: mmap(): %s: ulimit -v, or vm.overcommit_memory",
				kvt_size_text(bytes).s, strerror(errno));
	if (madvise(pool->pool.base, bytes, MADV_DONTFORK) < 0) {
		ret = kvt_fail(-errno, "pool of %s: madvise(MADV_DONTFORK): %s", kvt_size_text(bytes).s,
			       strerror(errno));
		goto unmap;
	}
	ret = bind_node(pool, params, bytes);
	if (ret < 0)
		goto unmap;
	if (params->pinned) {
		ret = lock_frames(pool, bytes);
		if (ret < 0)
			goto unmap;
		pool->pool.pinned = true;
	}
	pool->map_bytes = bytes;
	return 0;

unmap:
	munmap(pool->pool.base, bytes);
	return ret;
}

void kvt_user_pool_unmap(struct kvt_user_pool *pool)
{
	munmap(pool->pool.base, pool->map_bytes);
	pool->map_bytes = 0;
}
