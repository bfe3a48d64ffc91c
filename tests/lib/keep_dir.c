// SPDX-License-Identifier: MIT
/* A directory for a cache that outlives its process. */
#include "lib/keep_dir.h"

#include <check.h>
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "lib/scratch.h"

char keep_dir[256];

const char *keep_file(const char *name)
{
	static char path[320];

	snprintf(path, sizeof(path), "%s/%s", keep_dir, name);
	return path;
}

void keep_dir_make(void)
{
	snprintf(keep_dir, sizeof(keep_dir), "%s/kvtier-keep-XXXXXX", test_scratch());
	ck_assert_ptr_nonnull(mkdtemp(keep_dir));
}

void keep_dir_remove(void)
{
	struct dirent *e;
	DIR *d = opendir(keep_dir);

	while (d && (e = readdir(d)))
		unlinkat(dirfd(d), e->d_name, 0);
	if (d)
		closedir(d);
	ck_assert(!rmdir(keep_dir));
}
