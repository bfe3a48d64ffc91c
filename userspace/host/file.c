// SPDX-License-Identifier: MIT
/*
 * The slot file: nameless from birth, so that the kernel removes it whatever way
 * the process ends (or with a name, when it is to be kept), and direct where a
 * trial on the very file proves that O_DIRECT works.
 *
 * What a kernel or file system says about O_DIRECT is only a hint: statx() may not know,
 * open() may accept the flag and the first write refuse it. So the answer is a real
 * write and read of one aligned piece, before anything is promised.
 */
#include "host/file.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "base/err.h"
#include "base/fd.h"
#include "host/size.h"

#define PAGE 4096u
#define MAX_ALIGN (2u << 20) /* no frame is larger */

/* Linux 6.1; older headers lack the names, but the kernel's struct statx has always been 256 bytes. */
#define DIOALIGN_MASK 0x2000u
#define DIOALIGN_MEM_OFFSET 152
#define DIOALIGN_OFFSET_OFFSET 156

#define TMPFS_ID 0x01021994
#define RAMFS_ID 0x858458f6

static const struct {
	uint32_t magic;
	const char *name;
} file_systems[] = {
	{ 0xef53, "ext4" },	  { TMPFS_ID, "tmpfs" },    { 0x794c7630, "overlay" }, { 0x58465342, "xfs" },
	{ 0x9123683e, "btrfs" },  { 0xf2f52010, "f2fs" },   { 0x2fc12fc1, "zfs" },     { 0xca451a4e, "bcachefs" },
	{ 0x6969, "nfs" },	  { 0x65735546, "fuse" },   { RAMFS_ID, "ramfs" },     { 0x01021997, "9p" },
	{ 0x00c36400, "ceph" },	  { 0xff534d42, "cifs" },   { 0xfe534d42, "smb2" },    { 0x2011bab0, "exfat" },
	{ 0x4d44, "vfat" },
};

static uint32_t name_fs(struct kvt_file *file)
{
	struct statfs st;
	size_t i;

	file->info.fs = file->fs;
	if (fstatfs(file->fd, &st) < 0) {
		snprintf(file->fs, sizeof(file->fs), "unknown");
		return 0;
	}
	for (i = 0; i < sizeof(file_systems) / sizeof(file_systems[0]); i++) {
		if (file_systems[i].magic == (uint32_t)st.f_type) {
			snprintf(file->fs, sizeof(file->fs), "%s", file_systems[i].name);
			return (uint32_t)st.f_type;
		}
	}
	snprintf(file->fs, sizeof(file->fs), "0x%x", (unsigned int)st.f_type);
	return (uint32_t)st.f_type;
}

/* Returns false where the file system says that it has no direct I/O. */
static bool ask_alignment(struct kvt_file *file)
{
	union {
		struct statx stx;
		uint8_t raw[256];
	} u = { .raw = { 0 } };
	uint32_t mem, offset;

	file->info.mem_align = PAGE;
	file->info.offset_align = PAGE;
	if (statx(file->fd, "", AT_EMPTY_PATH, DIOALIGN_MASK, &u.stx) < 0 || !(u.stx.stx_mask & DIOALIGN_MASK))
		return true; /* not told: the trial decides */
	memcpy(&mem, u.raw + DIOALIGN_MEM_OFFSET, sizeof(mem));
	memcpy(&offset, u.raw + DIOALIGN_OFFSET_OFFSET, sizeof(offset));
	if (!mem || !offset)
		return false;
	file->info.mem_align = mem;
	file->info.offset_align = offset;
	return true;
}

/* One aligned piece there and back at @at, where nothing is, through the flags the file has now. 0 or a negative errno. */
static int trial(const struct kvt_file *file, uint32_t bytes, uint64_t at)
{
	uint8_t *buf = mmap(NULL, 2 * (size_t)bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	ssize_t n;
	int ret = 0;

	if (buf == MAP_FAILED)
		return -ENOMEM;
	memset(buf, 0x5a, bytes);
	n = pwrite(file->fd, buf, bytes, (off_t)at);
	if (n == (ssize_t)bytes)
		n = pread(file->fd, buf + bytes, bytes, (off_t)at);
	if (n < 0)
		ret = -errno;
	else if (n != (ssize_t)bytes || memcmp(buf, buf + bytes, bytes))
		ret = -EIO;
	munmap(buf, 2 * (size_t)bytes);
	return ret;
}

#define BUFFERED(file, ...) snprintf((file)->reason, sizeof((file)->reason), __VA_ARGS__)

/* Decides between direct and buffered. An error only where not even buffered bytes can be kept. */
static int probe(struct kvt_file *file, uint64_t frame_bytes, uint64_t end)
{
	uint32_t magic = name_fs(file), piece;
	int flags = fcntl(file->fd, F_GETFL);
	int ret;

	file->info.reason = file->reason;
	file->reason[0] = '\0';
	file->info.direct = false;
	file->drop_cache = magic != TMPFS_ID && magic != RAMFS_ID;
	if (!ask_alignment(file) || !file->drop_cache) {
		/* tmpfs has accepted the flag since 6.6, and then copies through its pages all the same. */
		BUFFERED(file, "%s has no O_DIRECT", file->fs);
	} else if (file->info.mem_align > PAGE || file->info.offset_align > MAX_ALIGN ||
		   frame_bytes % file->info.offset_align) {
		BUFFERED(file, "%s wants O_DIRECT aligned to %u bytes (memory: %u), slots are %s", file->fs,
			 file->info.offset_align, file->info.mem_align, kvt_size_text(frame_bytes).s);
	} else if (fcntl(file->fd, F_SETFL, flags | O_DIRECT) < 0) {
		BUFFERED(file, "%s refuses O_DIRECT (%s)", file->fs, strerrorname_np(errno));
	} else {
		piece = file->info.offset_align > PAGE ? file->info.offset_align : PAGE;
		ret = trial(file, piece, (end + piece - 1) / piece * piece);
		if (ret == -ENOSPC || ret == -EDQUOT)
			return ret;
		if (!ret) {
			file->info.direct = true;
			file->drop_cache = false;
			return 0;
		}
		BUFFERED(file, "%s refuses a direct transfer of %u bytes (%s)", file->fs, piece, strerrorname_np(-ret));
		if (fcntl(file->fd, F_SETFL, flags & ~O_DIRECT) < 0)
			return -errno;
	}
	file->info.mem_align = PAGE;
	file->info.offset_align = PAGE;
	/* Slots are read whole and in any order: what lies behind one is not wanted. */
	posix_fadvise(file->fd, 0, 0, POSIX_FADV_RANDOM);
	return trial(file, PAGE, (end + PAGE - 1) / PAGE * PAGE);
}

/* Where the file system cannot make nameless files, the name lives for a moment only. */
static int make_named(const char *dir)
{
	char path[PATH_MAX];
	int fd;

	if (snprintf(path, sizeof(path), "%s/.kvtier-XXXXXX", dir) >= (int)sizeof(path)) {
		errno = ENAMETOOLONG;
		return -1;
	}
	fd = mkostemp(path, O_CLOEXEC);
	if (fd >= 0)
		unlink(path);
	return kvt_fd_above(fd);
}

static int create(const char *dir)
{
	int fd = kvt_fd_above(open(dir, O_TMPFILE | O_EXCL | O_RDWR | O_CLOEXEC, 0600));

	if (fd < 0 && (errno == EOPNOTSUPP || errno == EISDIR || errno == EINVAL || errno == ENOENT))
		fd = make_named(dir);
	return fd < 0 ? -errno : fd;
}

static int open_named(const char *dir, const char *name)
{
	char path[PATH_MAX];
	int fd;

	if (snprintf(path, sizeof(path), "%s/%s", dir, name) >= (int)sizeof(path))
		return -ENAMETOOLONG;
	fd = kvt_fd_above(open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
	return fd < 0 ? -errno : fd;
}

static int open_and_probe(struct kvt_file *file, const char *dir, const char *name, uint64_t total, uint64_t frame_bytes)
{
	struct rlimit limit;
	struct stat st;
	int ret;

	if (!dir || !*dir)
		return kvt_fail(-EINVAL, "slot file: no directory given");
	/* Growing past the limit would raise SIGXFSZ, which ends the process. */
	if (!getrlimit(RLIMIT_FSIZE, &limit) && total > limit.rlim_cur)
		return kvt_fail(-EFBIG, "slot file in %s: RLIMIT_FSIZE is %s, %s asked: ulimit -f, or LimitFSIZE=", dir,
				kvt_size_text(limit.rlim_cur).s, kvt_size_text(total).s);
	file->kept = name;
	ret = name ? open_named(dir, name) : create(dir);
	if (ret < 0)
		return kvt_fail(ret, "slot file in %s: %s", dir, strerror(-ret));
	file->fd = ret;
	/* a kept file is probed behind all that it holds */
	ret = fstat(file->fd, &st) ? -errno :
	      probe(file, frame_bytes, !name ? 0 : (uint64_t)st.st_size > total ? (uint64_t)st.st_size : total);
	if (ret < 0) {
		kvt_fail(ret, "slot file in %s (%s): the first write says %s%s", dir, file->fs, strerror(-ret),
			 ret == -ENOSPC || ret == -EDQUOT ? ": make room, or choose another directory" : "");
		close(file->fd);
		file->fd = -1;
	}
	return ret;
}

int kvt_slot_file_open(struct kvt_file *file, const struct kvt_file_params *params, uint64_t frame_bytes)
{
	const char *dir = params->dir;
	const uint32_t n_slots = params->n_slots;
	uint64_t total;
	int ret;

	if (!n_slots || __builtin_mul_overflow((uint64_t)n_slots, frame_bytes, &total) || total > INT64_MAX)
		return kvt_fail(-EINVAL, "slot file: %u slots of %s cannot be", n_slots, kvt_size_text(frame_bytes).s);
	ret = open_and_probe(file, dir, params->name, total, frame_bytes);
	if (ret < 0)
		return ret;
	file->n_slots = n_slots;
	file->frame_bytes = frame_bytes;
	file->fixed = -1;
	/* Its full size at once, and sparse: no read ends early, and only written slots take space. */
	if ((!file->kept && ftruncate(file->fd, 0) < 0) || ftruncate(file->fd, (off_t)total) < 0) {
		ret = kvt_fail(-errno, "slot file in %s (%s): %s asked: %s", dir, file->fs, kvt_size_text(total).s,
			       strerror(errno));
		kvt_slot_file_close(file);
	}
	return ret;
}

void kvt_slot_file_close(struct kvt_file *file)
{
	/* Best effort: when nobody else holds the descriptor, close() frees the space anyway. */
	if (!file->kept && ftruncate(file->fd, 0) < 0)
		kvt_log(KVT_LOG_DEBUG, "slot file: ftruncate: %s", strerror(errno));
	close(file->fd);
	file->fd = -1;
}

void kvt_file_info(const struct kvt_file *file, struct kvt_file_info *info)
{
	*info = file->info;
}

int kvt_file_fd(const struct kvt_file *file)
{
	return file->fd;
}

void kvt_file_discard(struct kvt_file *file, uint32_t slot)
{
	if (fallocate(file->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)(slot * file->frame_bytes),
		      (off_t)file->frame_bytes) < 0)
		kvt_log(KVT_LOG_DEBUG, "slot file: %s cannot punch holes: %s", file->fs, strerror(errno));
}

int kvt_file_probe(const char *dir, struct kvt_file_info *info)
{
	static _Thread_local struct kvt_file file; /* holds the strings that @info points to */
	int ret;

	file.fd = -1;
	ret = open_and_probe(&file, dir, NULL, MAX_ALIGN, MAX_ALIGN);
	if (ret < 0)
		return ret;
	close(file.fd);
	file.fd = -1;
	*info = file.info;
	return 0;
}
