// SPDX-License-Identifier: MIT
/* stdout that remembers its first failure, so that a command can say why its output is not there. */
#include <errno.h>
#include <stdio.h>
#include <unistd.h>

#include "tools/tools.h"

static int failure; /* -errno */

static ssize_t put(void *cookie, const char *buf, size_t bytes)
{
	size_t at = 0;
	ssize_t n;

	(void)cookie;
	while (at < bytes) {
		n = write(STDOUT_FILENO, buf + at, bytes - at);
		if (n >= 0) {
			at += (size_t)n;
		} else if (errno != EINTR) {
			failure = failure ? failure : -errno;
			return 0;
		}
	}
	return (ssize_t)bytes;
}

void tool_output_begin(void)
{
	FILE *f = fopencookie(NULL, "w", (cookie_io_functions_t){ .write = put });

	if (!f)
		return; /* no memory: the plain one does the same with fewer words */
	setvbuf(f, NULL, isatty(STDOUT_FILENO) ? _IOLBF : _IOFBF, BUFSIZ);
	stdout = f;
}

int tool_output_end(void)
{
	if (!fflush(stdout) && !ferror(stdout))
		return 0;
	return failure ? failure : -EIO;
}
