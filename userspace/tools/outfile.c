// SPDX-License-Identifier: MIT
/*
 * A file that appears whole, or not at all. It has no name until it is
 * complete, so that a run that is killed leaves nothing; where the file system
 * cannot do that (no O_TMPFILE), a name beside it.
 */
#include "tools/outfile.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdbool.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/err.h"

enum { NAMELESS, NAMED, IN_PLACE };

/* The name it has on its way to @o->path; false if that is too long. */
static bool temporary(const struct outfile *o, char name[PATH_MAX])
{
	return snprintf(name, PATH_MAX, "%s.%ld.tmp", o->path, (long)getpid()) < PATH_MAX;
}

static int open_beside(struct outfile *o)
{
	const char *slash = strrchr(o->path, '/');
	char name[PATH_MAX];
	int fd;

	if (!temporary(o, name)) {
		errno = ENAMETOOLONG;
		return -1;
	}
	if (slash)
		snprintf(name, sizeof(name), "%.*s", slash == o->path ? 1 : (int)(slash - o->path), o->path);
	else
		strcpy(name, ".");
	o->kind = NAMELESS;
	fd = open(name, O_TMPFILE | O_WRONLY | O_CLOEXEC, 0666);
	if (fd >= 0 || (errno != EOPNOTSUPP && errno != EISDIR))
		return fd;
	o->kind = NAMED;
	temporary(o, name);
	return open(name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
}

int outfile_open(struct outfile *o, const char *path)
{
	struct stat st;
	int fd;

	*o = (struct outfile){ .path = path, .kind = IN_PLACE };
	if (!stat(path, &st) && !S_ISREG(st.st_mode))
		fd = open(path, O_WRONLY | O_CLOEXEC); /* a directory: EISDIR */
	else
		fd = open_beside(o);
	if (fd < 0)
		return kvt_fail(-errno, "%s: %s", path, strerror(errno));
	o->f = tool_stream_open(&o->stream, fd);
	if (!o->f) {
		close(fd);
		return kvt_fail(-ENOMEM, "%s: no memory for a buffer", path);
	}
	return 0;
}

/* Closes the file; returns 0, or -errno of the first write that failed. */
static int finish(struct outfile *o, const char *name)
{
	char self[64];
	int err = tool_stream_flush(&o->stream, o->f);

	snprintf(self, sizeof(self), "/proc/self/fd/%d", o->stream.fd);
	if (!err && o->kind == NAMELESS && linkat(AT_FDCWD, self, AT_FDCWD, name, AT_SYMLINK_FOLLOW))
		err = -errno;
	fclose(o->f);
	if (close(o->stream.fd) && !err)
		err = -errno;
	o->f = NULL;
	return err;
}

int outfile_commit(struct outfile *o)
{
	char name[PATH_MAX];
	int err;

	temporary(o, name);
	err = finish(o, name);
	if (o->kind == IN_PLACE)
		return err ? kvt_fail(err, "%s: %s", o->path, strerror(-err)) : 0;
	if (!err && rename(name, o->path))
		err = -errno;
	if (err) {
		unlink(name);
		return kvt_fail(err, "%s: %s; nothing was left there", o->path, strerror(-err));
	}
	return 0;
}

void outfile_abort(struct outfile *o)
{
	char name[PATH_MAX];

	if (!o->f)
		return;
	fclose(o->f);
	close(o->stream.fd);
	o->f = NULL;
	if (o->kind == NAMED && temporary(o, name))
		unlink(name);
}
