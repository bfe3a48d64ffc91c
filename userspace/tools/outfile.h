/* SPDX-License-Identifier: MIT */
/* A file that appears whole, or not at all. */
#ifndef KVT_TOOLS_OUTFILE_H
#define KVT_TOOLS_OUTFILE_H

#include <stdio.h>

#include "tools/tools.h"

struct outfile {
	const char *path;
	FILE *f; /* NULL: not open */
	struct tool_stream stream;
	int kind;
};

/*
 * Open for writing what will become @path, which must outlive it; @o must
 * not move. Errors as in err.h. A path that is there and no regular file (a pipe, /dev/null) is
 * written as it is.
 */
int outfile_open(struct outfile *o, const char *path);

/* Everything is written: give it its name, over what had it before. Closed in any case. */
int outfile_commit(struct outfile *o);

/* Drop it, if it is open. */
void outfile_abort(struct outfile *o);

#endif
