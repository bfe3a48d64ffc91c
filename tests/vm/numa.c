// SPDX-License-Identifier: MIT
/* Frames are on the node that was asked for, and nowhere else when that was meant strictly. */
#include <sys/syscall.h>

#include "vt.h"

#define FRAME 65536u

static int pool_on(int node, uint32_t flags, uint32_t n)
{
	struct kvtier_pool_create c = { .size = sizeof(c), .flags = flags, .frame_bytes = FRAME, .n_frames = n, .node = node };

	return ioctl(vt_device(), KVTIER_IOC_POOL_CREATE, &c) ? -1 : c.fd;
}

static bool two_nodes(void)
{
	return !access("/sys/devices/system/node/node1", F_OK);
}

static long long free_bytes(int node)
{
	char path[64], line[128];
	long long kib = -1;
	FILE *f;

	snprintf(path, sizeof(path), "/sys/devices/system/node/node%d/meminfo", node);
	f = fopen(path, "r");
	CHECK(f);
	while (fgets(line, sizeof(line), f))
		if (strstr(line, "MemFree:"))
			kib = atoll(strstr(line, "MemFree:") + 8);
	fclose(f);
	return kib * 1024;
}

CASE(on_the_asked_node)
{
	enum { N = 64, PAGES = N * FRAME / 4096 };
	static void *pages[PAGES];
	static int status[PAGES];

	if (!two_nodes())
		SKIP("one NUMA node");
	for (int node = 0; node < 2; node++) {
		int pool = pool_on(node, KVTIER_POOL_STRICT_NODE, N);
		uint8_t *p = vt_map(pool, FRAME, N);

		for (int i = 0; i < PAGES; i++) {
			pages[i] = p + (size_t)i * 4096;
			*(uint8_t *)pages[i] = 1;
		}
		CHECK(!syscall(SYS_move_pages, 0, PAGES, pages, NULL, status, 0));
		for (int i = 0; i < PAGES; i++)
			CHECK_EQ(status[i], node);
	}
}

CASE(strict_refuses)
{
	uint32_t more;
	int pool;

	if (!two_nodes())
		SKIP("one NUMA node");
	/* More than the node has free, less than the machine. */
	more = (free_bytes(1) + 48 * (long long)MIB) / FRAME;
	CHECK_ERR(pool_on(1, KVTIER_POOL_STRICT_NODE, more), ENOMEM);
	pool = pool_on(1, 0, more);
	CHECK(pool >= 0);
	CHECK_EQ(vt_stat(pool).present, more);
	CHECK_ERR(pool_on(2, 0, 1), ENODEV);
}
