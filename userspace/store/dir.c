// SPDX-License-Identifier: MIT
/* The files of a directory that outlives the process: making, locking, appending, compacting. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/err.h"
#include "base/fd.h"
#include "codec/codec.h"
#include "store/journal.h"

#define SUPER_MAX (4u << 20)

/*
 * A record lock belongs to the process: a child of fork() does not have it, and it
 * ends with the process. But the process itself may lock twice, so what this one has open is listed.
 */
static pthread_mutex_t open_lock = PTHREAD_MUTEX_INITIALIZER;
static struct open_dir {
	dev_t dev;
	ino_t ino;
	struct open_dir *next;
} *open_dirs;

static int enlist(const struct stat *st)
{
	struct open_dir *o;
	int ret = 0;

	pthread_mutex_lock(&open_lock);
	for (o = open_dirs; o && (o->dev != st->st_dev || o->ino != st->st_ino); o = o->next)
		;
	if (o) {
		ret = -EBUSY;
	} else {
		o = malloc(sizeof(*o));
		ret = o ? 0 : -ENOMEM;
	}
	if (!ret) {
		*o = (struct open_dir){ st->st_dev, st->st_ino, open_dirs };
		open_dirs = o;
	}
	pthread_mutex_unlock(&open_lock);
	return ret;
}

static void delist(const struct stat *st)
{
	struct open_dir **o, *gone;

	pthread_mutex_lock(&open_lock);
	for (o = &open_dirs; (*o)->dev != st->st_dev || (*o)->ino != st->st_ino; o = &(*o)->next)
		;
	gone = *o;
	*o = gone->next;
	pthread_mutex_unlock(&open_lock);
	free(gone);
}

static int take_lock(struct kvt_dir *d)
{
	struct flock l = { .l_type = F_WRLCK, .l_whence = SEEK_SET };
	struct stat st;
	int ret;

	if (fstat(d->fd, &st))
		return kvt_fail(-errno, "%s: %s", d->path, strerror(errno));
	ret = enlist(&st);
	if (ret)
		return kvt_fail(ret, ret == -EBUSY ? "%s: another cache of this process has it open" : "%s: no memory", d->path);
	d->lock = kvt_fd_above(openat(d->fd, "lock", O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
	if (d->lock >= 0 && !fcntl(d->lock, F_SETLK, &l))
		return 0;
	ret = -errno;
	delist(&st);
	if (d->lock < 0)
		return kvt_fail(ret, "%s/lock: %s", d->path, strerror(-ret));
	if (fcntl(d->lock, F_GETLK, &l) || l.l_type == F_UNLCK)
		l.l_pid = 0;
	close(d->lock);
	d->lock = -1;
	return kvt_fail(-EBUSY, "%s: process %ld has it open: end that one, or use another directory", d->path, (long)l.l_pid);
}

static void give_lock(struct kvt_dir *d)
{
	struct stat st;

	if (d->lock < 0)
		return;
	if (!fstat(d->fd, &st))
		delist(&st);
	close(d->lock);
}

/* ---- superblock ---- */

static int read_super(struct kvt_dir *d)
{
	int fd = openat(d->fd, "superblock", O_RDONLY | O_CLOEXEC | O_NOFOLLOW), ret;
	struct stat st;
	ssize_t n = -1;

	if (fd < 0)
		return -errno;
	if (!fstat(fd, &st) && st.st_size <= SUPER_MAX) {
		d->super = calloc(1, (size_t)st.st_size + sizeof(*d->super));
		n = d->super ? pread(fd, d->super, (size_t)st.st_size, 0) : -1;
	}
	close(fd);
	if (n < 0 || n != st.st_size)
		return kvt_fail(-EUCLEAN, "%s/superblock: it cannot be read: what is in the directory cannot be used, remove it (kvtier store rm --force)", d->path);
	ret = kvt_super_check(d->super, (uint64_t)n);
	return ret ? kvt_fail_more(ret, "%s", d->path) : 0;
}

static int write_super(struct kvt_dir *d, const struct kvt_super *want)
{
	const uint64_t from = offsetof(struct kvt_super, dir);
	struct kvt_super *s = malloc(want->bytes);
	int fd, ret = 0;

	if (!s)
		return kvt_fail(-ENOMEM, "%s: no memory for a superblock", d->path);
	memcpy(s, want, want->bytes);
	memcpy(s->magic, "KVTSTORE", sizeof(s->magic));
	s->version = KVT_DIR_VERSION;
	if (getrandom(&s->dir, sizeof(s->dir), 0) != sizeof(s->dir))
		s->dir = (uint64_t)getpid();
	s->check = kvt_row_digest(0, (const uint8_t *)s + from, (uint32_t)(s->bytes - from));
	fd = kvt_fd_above(openat(d->fd, "superblock.new", O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600));
	/* once in a directory's life: worth a sync */
	if (fd < 0 || write(fd, s, s->bytes) != (ssize_t)s->bytes || fsync(fd) ||
	    renameat(d->fd, "superblock.new", d->fd, "superblock") || fsync(d->fd))
		ret = kvt_fail(errno ? -errno : -EIO, "%s/superblock: %s", d->path, strerror(errno));
	if (fd >= 0)
		close(fd);
	if (ret)
		free(s);
	else
		d->super = s;
	return ret;
}

static int other(const char *path, const char *what, uint64_t there, uint64_t here)
{
	return kvt_fail(-EMEDIUMTYPE, "%s was written with %s %llu, this cache has %llu: use another directory, or remove it (kvtier store rm)",
			path, what, (unsigned long long)there, (unsigned long long)here);
}

static int compare_planes(const char *path, const struct kvt_super *a, const struct kvt_super *b)
{
	for (uint32_t i = 0; i < a->n_planes; i++) {
		const struct kvt_super_plane *p = &a->planes[i], *q = &b->planes[i];

		if (p->codec != q->codec)
			return kvt_fail(-EMEDIUMTYPE, "%s was written with codec %s in plane %u, this cache has %s: use another directory, or remove it (kvtier store rm)",
					path, kvt_codec_name((enum kvt_codec)p->codec), i,
					kvt_codec_name((enum kvt_codec)q->codec));
		if (memcmp(p, q, sizeof(*p)))
			return kvt_fail(-EMEDIUMTYPE, "%s was written with another geometry of plane %u (%u x %u, layer %u; this cache has %u x %u, layer %u): use another directory, or remove it (kvtier store rm)",
					path, i, p->heads, p->head_dim, p->layer, q->heads, q->head_dim, q->layer);
	}
	return 0;
}

static int compare_super(const char *path, const struct kvt_super *a, const struct kvt_super *b)
{
	int ret;

	if (memcmp(a->model, b->model, sizeof(a->model)))
		return kvt_fail(-EMEDIUMTYPE, "%s was written with another model (fingerprint %02x%02x%02x%02x..., this cache's is %02x%02x%02x%02x...): use another directory, or remove it (kvtier store rm)",
				path, a->model[0], a->model[1], a->model[2], a->model[3], b->model[0], b->model[1],
				b->model[2], b->model[3]);
	if (a->rotation != b->rotation)
		return other(path, "rotation", a->rotation, b->rotation);
	if (a->block_bytes != b->block_bytes)
		return other(path, "block_bytes", a->block_bytes, b->block_bytes);
	if (a->n_planes != b->n_planes)
		return other(path, "planes", a->n_planes, b->n_planes);
	ret = compare_planes(path, a, b);
	if (!ret && a->chunk != b->chunk)
		ret = other(path, "prefix_tokens", a->chunk, b->chunk);
	return ret;
}

/* ---- life ---- */

static int open_log(struct kvt_dir *d)
{
	struct stat st;

	d->log = kvt_fd_above(openat(d->fd, "log", O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600));
	if (d->log < 0 || fstat(d->log, &st))
		return kvt_fail(-errno, "%s/log: %s", d->path, strerror(errno));
	d->log_bytes = (uint64_t)st.st_size;
	return 0;
}

/* The folder itself, which nobody else has open from here on. */
static int open_folder(const char *path, bool make, struct kvt_dir **dir)
{
	struct kvt_dir *d = calloc(1, sizeof(*d));
	int ret;

	if (!d || !(d->path = strdup(path))) {
		free(d);
		return kvt_fail(-ENOMEM, "%s: no memory", path);
	}
	d->fd = d->lock = d->log = -1;
	if (make && mkdir(path, 0700) && errno != EEXIST) {
		ret = kvt_fail(-errno, "%s: %s", path, strerror(errno));
		goto err_close;
	}
	d->fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (d->fd < 0) {
		ret = kvt_fail(-errno, "%s: %s", path, strerror(errno));
		goto err_close;
	}
	if (!make && faccessat(d->fd, "superblock", F_OK, 0)) {
		ret = kvt_fail(-ENOENT, "%s: there is no superblock: not a kvtier store", path);
		goto err_close;
	}
	ret = take_lock(d);
	if (ret)
		goto err_close;
	*dir = d;
	return 0;

err_close:
	kvt_dir_close(d);
	return ret;
}

int kvt_dir_open(const char *path, const struct kvt_super *want, struct kvt_dir **dir)
{
	struct kvt_dir *d;
	int ret = open_folder(path, want != NULL, &d);

	if (ret)
		return ret;
	ret = read_super(d);
	if (ret == -ENOENT && want)
		ret = write_super(d, want);
	else if (!ret && want)
		ret = compare_super(path, d->super, want);
	if (!ret)
		ret = open_log(d);
	if (ret) {
		kvt_dir_close(d);
		return ret;
	}
	*dir = d;
	return 0;
}

void kvt_dir_close(struct kvt_dir *d)
{
	if (!d)
		return;
	if (d->log >= 0)
		close(d->log);
	give_lock(d);
	if (d->fd >= 0)
		close(d->fd);
	free(d->super);
	free(d->path);
	free(d);
}

static const char *const files[] = { "log", "log.new", KVT_DIR_SLOTS, "superblock.new", "superblock", "lock" };

int kvt_dir_remove(const char *path, bool damaged)
{
	struct kvt_dir *d;
	int ret = open_folder(path, false, &d);

	if (ret)
		return ret;
	if (!damaged)
		ret = read_super(d);
	if (ret) {
		kvt_dir_close(d);
		return ret;
	}
	for (size_t i = 0; i < sizeof(files) / sizeof(files[0]); i++)
		if (unlinkat(d->fd, files[i], 0) && errno != ENOENT && !ret)
			ret = kvt_fail(-errno, "%s/%s: %s", d->path, files[i], strerror(errno));
	if (!ret && rmdir(d->path) && errno != ENOTEMPTY && errno != EBUSY)
		ret = kvt_fail(-errno, "%s: %s", d->path, strerror(errno));
	kvt_dir_close(d);
	return ret;
}

/* ---- log ---- */

int kvt_dir_map(const struct kvt_dir *d, const uint8_t **log, uint64_t *bytes)
{
	void *p;

	*log = NULL;
	*bytes = d->log_bytes;
	if (!d->log_bytes)
		return 0;
	p = mmap(NULL, d->log_bytes, PROT_READ, MAP_PRIVATE, d->log, 0);
	if (p == MAP_FAILED)
		return kvt_fail(-errno, "%s/log: %s", d->path, strerror(errno));
	*log = p;
	return 0;
}

void kvt_dir_unmap(const uint8_t *log, uint64_t bytes)
{
	if (log)
		munmap((void *)log, bytes);
}

void kvt_dir_trim(struct kvt_dir *d, uint64_t end)
{
	if (end < d->log_bytes && !ftruncate(d->log, (off_t)end))
		d->log_bytes = end;
}

int kvt_dir_append(struct kvt_dir *d, const void *buf, uint64_t bytes)
{
	struct rlimit limit;
	ssize_t n;
	int err;

	/* growing past it would raise SIGXFSZ, which ends the process */
	if (!getrlimit(RLIMIT_FSIZE, &limit) && d->log_bytes + bytes > limit.rlim_cur)
		return kvt_fail(-EFBIG, "%s/log: RLIMIT_FSIZE is %llu, and the log has %llu bytes: ulimit -f, or LimitFSIZE=", d->path,
				(unsigned long long)limit.rlim_cur, (unsigned long long)d->log_bytes);
	n = write(d->log, buf, bytes);
	err = n < 0 ? -errno : -EIO;
	if (n == (ssize_t)bytes) {
		d->log_bytes += bytes;
		return 0;
	}
	if (n > 0 && ftruncate(d->log, (off_t)d->log_bytes))
		d->log_bytes += (uint64_t)n / 32 * 32; /* readers find their way past it */
	return kvt_fail(err, "%s/log: %s", d->path, strerror(-err));
}

static int ascending(const void *a, const void *b)
{
	const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

	return x < y ? -1 : x > y;
}

/* Where in @at the last record of a live number is noted, or NULL. */
static uint64_t *place_of(const uint64_t *live, uint64_t *at, uint64_t n, uint64_t id)
{
	const uint64_t *found = n ? bsearch(&id, live, n, sizeof(id), ascending) : NULL;

	return found ? at + (found - live) : NULL;
}

static int copy_live(const struct kvt_dir *d, int fd, const uint8_t *log, uint64_t bytes, const uint64_t *live, uint64_t *last,
		     uint64_t n, uint64_t *written)
{
	struct kvt_log_record r;
	uint64_t *place;

	for (uint64_t at = 0; kvt_log_next(log, bytes, d->super->dir, &at, &r);) {
		place = r.head.type == KVT_LOG_DROP ? NULL : place_of(live, last, n, r.head.id);
		if (place)
			*place = r.at;
	}
	for (uint64_t at = 0; kvt_log_next(log, bytes, d->super->dir, &at, &r);) {
		place = r.head.type == KVT_LOG_DROP ? NULL : place_of(live, last, n, r.head.id);
		if (!place || *place != r.at)
			continue;
		if (write(fd, log + r.at, r.end - r.at) != (ssize_t)(r.end - r.at))
			return errno ? -errno : -EIO;
		*written += r.end - r.at;
	}
	return fdatasync(fd) ? -errno : 0;
}

int kvt_dir_compact(struct kvt_dir *d, uint64_t *live, uint64_t n, uint64_t *scratch)
{
	uint64_t bytes, written = 0;
	const uint8_t *log;
	int ret = kvt_dir_map(d, &log, &bytes), fd;

	if (ret || !log)
		return ret;
	qsort(live, n, sizeof(*live), ascending);
	fd = kvt_fd_above(openat(d->fd, "log.new", O_RDWR | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600));
	ret = fd < 0 ? -errno : copy_live(d, fd, log, bytes, live, scratch, n, &written);
	kvt_dir_unmap(log, bytes);
	if (!ret && renameat(d->fd, "log.new", d->fd, "log"))
		ret = -errno;
	if (ret) {
		if (fd >= 0) {
			close(fd);
			unlinkat(d->fd, "log.new", 0);
		}
		return kvt_fail(ret, "%s/log: compaction: %s", d->path, strerror(-ret));
	}
	close(d->log);
	d->log = fd;
	d->log_bytes = written;
	return 0;
}
