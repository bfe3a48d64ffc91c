/* SPDX-License-Identifier: MIT */
/*
 * Host backend: where host frames live, and how their bytes reach a file.
 *
 * A pool is an array of equal frames in one mapping. A slot file is an array of
 * equal slots on disk. A transfer copies the head of one frame to or from one
 * slot, asynchronously. Implementations: user.c (mmap, io_uring or threads),
 * module.c (/dev/kvtier). All pass tests/conformance/host.c.
 *
 * Threads: pool and file calls may run concurrently. kvt_host_submit() and
 * kvt_host_reap() are safe from any thread.
 */
#ifndef KVT_HOST_HOST_H
#define KVT_HOST_HOST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/budget.h"
#include "kvtier.h"

struct kvt_host;

struct kvt_host_params {
	uint32_t kind;	      /* enum kvt_host_kind */
	uint32_t io;	      /* enum kvt_io_kind */
	uint32_t depth;	      /* most transfers in flight, 1 to 4096 */
	uint64_t frame_bytes; /* the pools' and the file's: a multiple of 4 KiB, at most 2 MiB */
	uint32_t io_threads;  /* workers of the thread fallback; 0: 4 */
	struct kvt_budget *budget; /* rings, bounce buffers and worker stacks are charged here first */
};

/* Bytes that kvt_host_open() will charge at most for these parameters. */
uint64_t kvt_host_overhead(const struct kvt_host_params *params);

/* -EINVAL, -ENOMEM (budget), -ENODEV (no module), -EPERM / -ENOSYS (io_uring asked for by name and denied). */
int kvt_host_open(const struct kvt_host_params *params, struct kvt_host **host);

/* Drains what is in flight. Pools and file must have been closed. */
void kvt_host_close(struct kvt_host *host);

/* "user/io_uring", "user/threads", ... and, where something was degraded, why ("" if nothing was). */
const char *kvt_host_name(const struct kvt_host *host);
const char *kvt_host_note(const struct kvt_host *host);

/* ---- pools ---- */

#define KVT_POOL_HEADER_BYTES 4096u

struct kvt_pool_reclaim_ops;

struct kvt_pool {
	uint8_t *base; /* frame i is at base + i * frame_bytes; page aligned */
	uint64_t frame_bytes;
	uint32_t n_frames;
	bool pinned;	 /* really locked */
	bool hugepages;	 /* reserved ones, really */
	int32_t node;	 /* node the kernel was given, or -1 */
	bool found;	 /* named, and there before: frames and header are as they were left */
	uint8_t *header; /* named: a page that is kept with the frames; zeros at first. Else NULL */
	const struct kvt_pool_reclaim_ops *reclaim; /* NULL: frames stay */
};

struct kvt_pool_params {
	uint32_t n_frames;
	bool pinned;	  /* lock; -ENOMEM with the memlock message if that is refused */
	bool hugepages;	  /* MAP_HUGETLB for a multiple of 2 MiB where there are enough, else madvise as always */
	bool numa_strict; /* bound to @node, an error if that is refused; else @node is preferred */
	int32_t node;	  /* or -1 */
	bool reclaim;	  /* what is let go of may be taken when memory is short, where the host can */
	const char *name; /* outlives its maker; one process at a time finds it again by this name. NULL: it does not */
};

/*
 * A pool whose ->reclaim is set: all frames are held at first. One that was let
 * go of may be taken away at any time, the oldest first, until it is held
 * again; nobody may touch it meanwhile. Any thread; calls on one frame are the
 * caller's to order.
 */
struct kvt_pool_reclaim_ops {
	void (*let_go)(struct kvt_pool *, uint32_t frame);
	bool (*hold)(struct kvt_pool *, uint32_t frame); /* false: it was taken, its content is lost */
	int (*regain)(struct kvt_pool *, uint32_t frame); /* hold it whatever it contains; -ENOMEM: there is no memory for it */
};

/*
 * Frames read as zeros at first. A child of fork() does not inherit them.
 * A pageable pool is committed lazily by the kernel. Errors: -ENOMEM, -EINVAL,
 * and with numa_strict what mbind() said; otherwise one warning and node = -1.
 * With a name: -EOPNOTSUPP (only the module has such pools), -EBUSY (another
 * process uses it), -EEXIST (it has another geometry), -EACCES.
 */
int kvt_pool_create(struct kvt_host *host, const struct kvt_pool_params *params, struct kvt_pool **pool);
void kvt_pool_destroy(struct kvt_host *host, struct kvt_pool *pool);

/* ---- slot file ---- */

struct kvt_file;

struct kvt_file_params {
	const char *dir; /* unlinked file in here: nothing survives, whatever way the process ends */
	const char *name; /* not NULL: a file with this name in @dir, which is kept with what it holds, and made if need be */
	uint32_t n_slots;
};

/* What the probe found. */
struct kvt_file_info {
	bool direct;	     /* O_DIRECT in use */
	const char *reason;  /* why not ("tmpfs has no O_DIRECT"), or "" */
	const char *fs;	     /* file system's name: "ext4", "tmpfs", "overlay", "xfs", "btrfs", ... or "0x<magic>" */
	uint32_t mem_align, offset_align; /* bytes, from statx(STATX_DIOALIGN), else 4096 */
};

/*
 * Creates an unlinked file of up to n_slots * frame_bytes; space is taken as
 * slots are written. Errors say which: -ENOENT, -ENOTDIR, -EACCES, -EROFS, -ENOSPC,
 * -EFBIG (RLIMIT_FSIZE; also a write's result where the limit is lowered later).
 */
int kvt_file_open(struct kvt_host *host, const struct kvt_file_params *params, struct kvt_file **file);
void kvt_file_close(struct kvt_host *host, struct kvt_file *file); /* nothing in flight on it */
void kvt_file_info(const struct kvt_file *file, struct kvt_file_info *info);

/* The file's bytes, for tests that corrupt them and for benches: a descriptor owned by @file. */
int kvt_file_fd(const struct kvt_file *file);

/* Give a slot's disk space back (hole punch); best effort. */
void kvt_file_discard(struct kvt_file *file, uint32_t slot);

/* Probe a directory without keeping anything, for `kvtier doctor`. */
int kvt_file_probe(const char *dir, struct kvt_file_info *info);

/* ---- transfers ---- */

enum kvt_xfer_op { KVT_XFER_READ, KVT_XFER_WRITE };

struct kvt_xfer {
	uint32_t op;	/* enum kvt_xfer_op */
	uint32_t slot;
	struct kvt_file *file;
	struct kvt_pool *pool; /* the frame's */
	uint32_t frame;
	uint32_t bytes; /* 1 to frame_bytes; rounded up to the alignment on its way */
	uint64_t user;	/* handed back */
};

struct kvt_done {
	uint64_t user;
	int32_t result; /* 0, or a negative errno. A short transfer is retried, then -EIO */
};

/*
 * Submit up to @n transfers as one batch. Returns how many were accepted, in
 * order (0 when @depth are in flight), or a negative errno with none accepted.
 * From acceptance until its completion is reaped, the frame must stay.
 */
int kvt_host_submit(struct kvt_host *host, const struct kvt_xfer *xfers, uint32_t n);

/* Take up to @n completions without waiting. */
int kvt_host_reap(struct kvt_host *host, struct kvt_done *done, uint32_t n);

/*
 * Readable when completions may be waiting to be reaped. To be polled only: reaping
 * clears it, and the caller neither reads nor closes it.
 */
int kvt_host_eventfd(struct kvt_host *host);

/*
 * Transfers whose @user is given and that have not started complete with
 * -ECANCELED. Returns 1 if one was cancelled, 0 if it is past that.
 */
int kvt_host_cancel(struct kvt_host *host, uint64_t user);

/* Wait until nothing is in flight; completions stay to be reaped. */
void kvt_host_drain(struct kvt_host *host);

/* ---- for implementations and for tests that replace them ---- */

struct kvt_host_ops {
	void (*close)(struct kvt_host *);
	int (*pool_create)(struct kvt_host *, const struct kvt_pool_params *, struct kvt_pool **);
	void (*pool_destroy)(struct kvt_host *, struct kvt_pool *);
	int (*file_open)(struct kvt_host *, const struct kvt_file_params *, struct kvt_file **);
	void (*file_close)(struct kvt_host *, struct kvt_file *);
	int (*submit)(struct kvt_host *, const struct kvt_xfer *, uint32_t);
	int (*reap)(struct kvt_host *, struct kvt_done *, uint32_t);
	int (*cancel)(struct kvt_host *, uint64_t);
	void (*drain)(struct kvt_host *);
};

struct kvt_host {
	const struct kvt_host_ops *ops;
	struct kvt_host_params params;
	int eventfd;
	char name[32];
	char note[224];
};

#endif
