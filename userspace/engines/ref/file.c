// SPDX-License-Identifier: MIT
/* One whole small file, and names from files made fit to print. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/err.h"
#include "engines/ref/engine.h"

int ref_read_file(const char *path, uint64_t limit, char **data, size_t *bytes)
{
	size_t size = 0, room = 64 << 10;
	char *buf = NULL, *grown;
	int fd, err;
	struct stat st;
	ssize_t got;

	/* without O_NONBLOCK a FIFO would wait for its writer */
	fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
	if (fd < 0)
		return kvt_fail(-errno, "%s: %s", path, strerror(errno));
	if (fstat(fd, &st) || !S_ISREG(st.st_mode)) {
		err = kvt_fail(S_ISDIR(st.st_mode) ? -EISDIR : -EINVAL, "%s: %s, not a regular file", path,
			       S_ISDIR(st.st_mode) ? "a directory" : "a pipe or device");
		goto free_buf;
	}
	do {
		if (!buf || size == room) {
			room = buf ? room * 2 : room;
			grown = realloc(buf, room + 1);
			if (!grown) {
				err = kvt_fail(-ENOMEM, "%s: no memory for %zu bytes", path, room + 1);
				goto free_buf;
			}
			buf = grown;
		}
		got = read(fd, buf + size, room - size);
		if (got < 0 && errno != EINTR) {
			err = kvt_fail(-errno, "%s: %s", path, strerror(errno));
			goto free_buf;
		}
		size += got > 0 ? (size_t)got : 0;
		if (size > limit) {
			err = kvt_fail(-EFBIG, "%s: more than %llu bytes, the most that is read", path,
				       (unsigned long long)limit);
			goto free_buf;
		}
	} while (got);
	close(fd);
	buf[size] = 0;
	*data = buf;
	*bytes = size;
	return 0;

free_buf:
	free(buf);
	close(fd);
	return err;
}

const char *ref_quote(char *buf, size_t size, const char *text)
{
	size_t n = 0;

	buf[n++] = '"';
	for (; *text && n + 5 < size; text++)
		buf[n++] = (unsigned char)*text < 0x20 || *text == 0x7f || (*text & 0x80) ? '?' : *text;
	if (*text) {
		memcpy(buf + n, "...", 3);
		n += 3;
	}
	buf[n++] = '"';
	buf[n] = 0;
	return buf;
}
