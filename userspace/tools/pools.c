// SPDX-License-Identifier: MIT
/* kvtier pools: the kernel module's pools, as its sysfs has them; and taking a named one away. */
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "host/module.h"
#include "tools/tools.h"

#define POOLS "/sys/kernel/kvtier/pools"

/* A pool's attribute without its newline; "" if the pool is gone meanwhile. */
static const char *attribute(const char *pool, const char *name, char text[128])
{
	char path[384];
	FILE *f;

	snprintf(path, sizeof(path), POOLS "/%s/%s", pool, name);
	text[0] = '\0';
	f = fopen(path, "r");
	if (f && fgets(text, 128, f))
		text[strcspn(text, "\n")] = '\0';
	if (f)
		fclose(f);
	return text;
}

static int list(void)
{
	char name[128], owner[128], mode[128], bytes[128], frames[128], taken[128];
	DIR *dir = opendir(POOLS);
	struct dirent *e;

	if (!dir)
		return kvt_fail(-errno, "%s: %s: is the kvtier module loaded? sudo modprobe kvtier", POOLS, strerror(errno));
	printf("%-24s %6s %5s %12s %9s %9s\n", "name", "owner", "mode", "MiB", "frames", "taken");
	while ((e = readdir(dir))) {
		if (e->d_name[0] == '.')
			continue;
		attribute(e->d_name, "name", name);
		printf("%-24s %6s %5s %12.1f %9s %9s\n", name[0] ? name : "-", attribute(e->d_name, "owner", owner),
		       attribute(e->d_name, "mode", mode), strtod(attribute(e->d_name, "bytes", bytes), NULL) / (1 << 20),
		       attribute(e->d_name, "frames", frames), attribute(e->d_name, "taken_frames", taken));
	}
	closedir(dir);
	return 0;
}

int cmd_pools(int argc, char **argv)
{
	int ret;

	if (argc == 1)
		ret = list();
	else if (argc == 3 && !strcmp(argv[1], "--remove"))
		ret = kvt_module_pool_remove(argv[2]);
	else
		return tool_usage_error("pools", "nothing, or --remove NAME, expected");
	return ret ? tool_failed("pools") : 0;
}
