// SPDX-License-Identifier: MIT
/* Streams, stdout among them, that remember their first failure, so that a command can say why its output is not there. */
#include <errno.h>
#include <stdio.h>
#include <unistd.h>

#include "tools/tools.h"

static ssize_t put(void *cookie, const char *buf, size_t bytes)
{
	struct tool_stream *s = cookie;
	size_t at = 0;
	ssize_t n;

	while (at < bytes) {
		n = write(s->fd, buf + at, bytes - at);
		if (n >= 0) {
			at += (size_t)n;
		} else if (errno != EINTR) {
			s->failure = s->failure ? s->failure : -errno;
			return 0;
		}
	}
	return (ssize_t)bytes;
}

FILE *tool_stream_open(struct tool_stream *s, int fd)
{
	*s = (struct tool_stream){ .fd = fd };
	return fopencookie(s, "w", (cookie_io_functions_t){ .write = put });
}

int tool_stream_flush(const struct tool_stream *s, FILE *f)
{
	if (!fflush(f) && !ferror(f))
		return 0;
	return s->failure ? s->failure : -EIO;
}

static struct tool_stream standard;

void tool_output_begin(void)
{
	FILE *f = tool_stream_open(&standard, STDOUT_FILENO);

	if (!f)
		return; /* no memory: the plain one does the same with fewer words */
	setvbuf(f, NULL, isatty(STDOUT_FILENO) ? _IOLBF : _IOFBF, BUFSIZ);
	stdout = f;
}

int tool_output_end(void)
{
	return tool_stream_flush(&standard, stdout);
}
