/* SPDX-License-Identifier: MIT */
/*
 * A file is never a standard stream. In a process that has closed one, the
 * next open() gets its number, and with it what the process prints.
 */
#ifndef KVT_BASE_FD_H
#define KVT_BASE_FD_H

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

/* Takes what open() returned: another number for the same file if it is 0, 1 or 2; or -1, and errno. */
static inline int kvt_fd_above(int fd)
{
	int above, err;

	if (fd < 0 || fd > STDERR_FILENO)
		return fd;
	above = fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
	err = errno;
	close(fd);
	errno = err;
	return above;
}

#endif
