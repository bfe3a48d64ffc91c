/* SPDX-License-Identifier: MIT */
/* A directory for a cache that outlives its process, under TMPDIR. One at a time. Failures are check's. */
#ifndef KVT_TESTS_KEEP_DIR_H
#define KVT_TESTS_KEEP_DIR_H

extern char keep_dir[256];

void keep_dir_make(void);
void keep_dir_remove(void); /* and all files in it */

/* Its path, until the next call. */
const char *keep_file(const char *name);

#endif
