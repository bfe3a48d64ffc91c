/* SPDX-License-Identifier: (GPL-2.0-only WITH Linux-syscall-note) OR MIT */
/*
 * kvtier: pools of memory frames with an owner, transfers between them and files.
 *
 * Rules of this interface
 *
 * - Every ioctl takes a struct that begins with its own size in bytes. A larger struct (a newer program) is accepted
 *   while the part that this kernel does not know is zero, else -E2BIG. A shorter one (an older program) is accepted
 *   from the size that its first release had, the rest reads as zero; what is returned is cut to the caller's size.
 * - The size that is encoded in an ioctl's number is that of the struct in this header; the kernel looks at the type,
 *   the direction and the number, and believes @size.
 * - Fields called __reserved must be zero. Flags that are not defined must be zero.
 * - Sizes and offsets are bytes unless the field says otherwise.
 * - What the running module can do is said by the feature mask of KVTIER_IOC_QUERY, never by a version.
 * - An ioctl that fails has changed nothing. Those that work on many things return how many they did, and an error only
 *   if that is none.
 * - Descriptors are returned close-on-exec.
 *
 * Errors
 *
 *   -EINVAL	  a field is out of its range, an alignment is wrong, or a reserved field is not zero
 *   -E2BIG	  the struct is larger than known and its tail is not zero
 *   -EOPNOTSUPP  an undefined flag, or a feature that this kernel lacks
 *   -EFAULT	  a pointer is bad
 *   -ENOTTY	  no such ioctl on this descriptor
 *   -EBADF	  a descriptor is not open, not of the kind asked for, or not open for this direction
 *   -ENOMEM	  no memory, on the machine or under the memory cgroup's limit, or (strict) on the node
 *   -EPERM	  RLIMIT_MEMLOCK would be exceeded and the caller lacks CAP_IPC_LOCK; or not the owner of a named pool
 *   -EDQUOT	  the module's limit for one user (parameter max_user_bytes) would be exceeded
 *   -ENOSPC	  the module's limit for all (parameter max_bytes) would be exceeded
 *   -ENODEV	  the NUMA node is not online or has no memory
 *   -EEXIST	  a pool of that name exists
 *   -ENOENT	  no pool of that name
 *   -EACCES	  the named pool's mode does not allow it
 *   -ENODATA	  the frame has no memory: it was taken or released. KVTIER_IOC_POPULATE gives it some
 *   -EBUSY	  frames are in a transfer; or (in a completion) the queue was full
 *   -ECANCELED	  (in a completion) cancelled before it began
 *   -EFBIG	  a write beyond RLIMIT_FSIZE
 *   -EINTR	  a signal ended the call
 */
#ifndef _UAPI_LINUX_KVTIER_H
#define _UAPI_LINUX_KVTIER_H

#include <linux/ioctl.h>
#include <linux/types.h>

#define KVTIER_DEVICE "/dev/kvtier"
#define KVTIER_IOC_TYPE 0xE7

/* A change that an old program would notice raises this; it has never happened. */
#define KVTIER_ABI_VERSION 1

/* ---- the device --------------------------------------------------------------------------------------------------- */

#define KVTIER_FEATURE_POOL	 (1ULL << 0) /* pools, populate, release */
#define KVTIER_FEATURE_NAMED	 (1ULL << 1) /* named pools */
#define KVTIER_FEATURE_RECLAIM	 (1ULL << 2) /* KVTIER_POOL_RECLAIM, under global and memory cgroup pressure */
#define KVTIER_FEATURE_TRANSFER	 (1ULL << 3) /* queues, submit, reap, cancel, drain */
#define KVTIER_FEATURE_URING_CMD (1ULL << 4) /* KVTIER_URING_CMD_XFER on a queue */
#define KVTIER_FEATURE_PEER	 (1ULL << 5) /* peer-to-peer memory: reserved, no module sets it yet */

#define KVTIER_MIN_FRAME_BYTES 4096u
#define KVTIER_MAX_FRAME_BYTES (2u << 20)
#define KVTIER_MAX_FRAMES      (1u << 24) /* in a pool */
#define KVTIER_MAX_DEPTH       4096u	  /* of a queue */
#define KVTIER_NAME_BYTES      64	  /* with the NUL */

/**
 * struct kvtier_query - what this module is and may hold (KVTIER_IOC_QUERY, on /dev/kvtier)
 * @size: sizeof(struct kvtier_query)
 * @abi_version: (out) KVTIER_ABI_VERSION of the module
 * @features: (out) KVTIER_FEATURE_*
 * @max_bytes: (out) bytes that all pools together may hold
 * @max_user_bytes: (out) bytes that one user's pools may hold
 * @used_bytes: (out) bytes that all pools hold now, tables included
 * @user_bytes: (out) bytes that the caller's user's pools hold now
 * @min_frame_bytes: (out) smallest frame; every frame size is a multiple of it
 * @max_frame_bytes: (out) largest frame
 * @max_frames: (out) most frames in a pool
 * @max_depth: (out) most transfers of one queue
 */
struct kvtier_query {
	__u32 size;
	__u32 abi_version;
	__aligned_u64 features;
	__aligned_u64 max_bytes;
	__aligned_u64 max_user_bytes;
	__aligned_u64 used_bytes;
	__aligned_u64 user_bytes;
	__u32 min_frame_bytes;
	__u32 max_frame_bytes;
	__u32 max_frames;
	__u32 max_depth;
};
#define KVTIER_IOC_QUERY _IOWR(KVTIER_IOC_TYPE, 0x00, struct kvtier_query)

/* ---- pools -------------------------------------------------------------------------------------------------------- */

#define KVTIER_POOL_STRICT_NODE (1u << 0) /* all frames on @node or -ENOMEM; else @node is a preference */
#define KVTIER_POOL_LAZY	(1u << 1) /* frames get their memory when first touched, transferred or populated */
#define KVTIER_POOL_RECLAIM	(1u << 2) /* the kernel may take clean frames under memory pressure */

/*
 * The mapping: frame i is at i * frame_bytes; the state words, one __u64 for each frame, begin at KVTIER_MMAP_WORDS; the
 * header page, whose content is the user's, is at KVTIER_MMAP_HEADER. All are MAP_SHARED and backed by real pages:
 * O_DIRECT, io_uring's registered buffers and other users of get_user_pages() work on the frames. Children of fork() do
 * not inherit the mappings. Touching a frame that has no memory is SIGBUS.
 */
#define KVTIER_MMAP_WORDS  0x100000000000ULL
#define KVTIER_MMAP_HEADER 0x200000000000ULL
#define KVTIER_HEADER_BYTES 4096u

/**
 * struct kvtier_pool_create - make a pool (KVTIER_IOC_POOL_CREATE, on /dev/kvtier)
 * @size: sizeof(struct kvtier_pool_create)
 * @flags: KVTIER_POOL_*
 * @frame_bytes: size of a frame: a multiple of 4096, at most 2 MiB
 * @n_frames: number of frames, 1 to KVTIER_MAX_FRAMES, and less than KVTIER_MMAP_WORDS in bytes
 * @node: NUMA node, or -1 for the caller's memory policy
 * @mode: permissions of a named pool, of 0666; 0 for a pool without a name
 * @name: NUL-terminated and padded with NULs: letters, digits, '.', '_', '-'; not beginning with '.'. Empty: the pool
 *	  goes with its last descriptor and mapping. Named: it stays until removed
 * @fd: (out) the pool, open for reading and writing
 * @__reserved: zero
 * @id: (out) number of the pool, never used again while the module is loaded
 *
 * Frames read as zeros at first; their state is HELD, or FREE while a lazy frame has no memory. Memory is charged to the
 * caller's memory cgroup when it is allocated, and to its user's locked memory (RLIMIT_MEMLOCK; not with CAP_IPC_LOCK)
 * and the module's limits when the pool is made, so that no touch of a lazy frame meets a limit. Memory that a frame
 * loses is uncharged; what it gets again is charged to the same three.
 */
struct kvtier_pool_create {
	__u32 size;
	__u32 flags;
	__u32 frame_bytes;
	__u32 n_frames;
	__s32 node;
	__u32 mode;
	__u8 name[KVTIER_NAME_BYTES];
	__s32 fd;
	__u32 __reserved;
	__aligned_u64 id;
};
#define KVTIER_IOC_POOL_CREATE _IOWR(KVTIER_IOC_TYPE, 0x01, struct kvtier_pool_create)

#define KVTIER_OPEN_RDONLY (1u << 0) /* the mode's read permission is enough; nothing can be changed through @fd */

/**
 * struct kvtier_pool_open - open a named pool (KVTIER_IOC_POOL_OPEN, on /dev/kvtier)
 * @size: sizeof(struct kvtier_pool_open)
 * @flags: KVTIER_OPEN_*
 * @name: as given to KVTIER_IOC_POOL_CREATE
 * @fd: (out) the pool
 * @__reserved: zero
 *
 * Permissions are checked as a file's of that owner, group and mode would be. KVTIER_IOC_POOL_STAT tells the geometry.
 */
struct kvtier_pool_open {
	__u32 size;
	__u32 flags;
	__u8 name[KVTIER_NAME_BYTES];
	__s32 fd;
	__u32 __reserved;
};
#define KVTIER_IOC_POOL_OPEN _IOWR(KVTIER_IOC_TYPE, 0x02, struct kvtier_pool_open)

/**
 * struct kvtier_pool_remove - take a pool's name away (KVTIER_IOC_POOL_REMOVE, on /dev/kvtier)
 * @size: sizeof(struct kvtier_pool_remove)
 * @flags: zero
 * @name: as given to KVTIER_IOC_POOL_CREATE
 *
 * The owner's or CAP_FOWNER's to do. The memory goes with the last descriptor and mapping.
 */
struct kvtier_pool_remove {
	__u32 size;
	__u32 flags;
	__u8 name[KVTIER_NAME_BYTES];
};
#define KVTIER_IOC_POOL_REMOVE _IOWR(KVTIER_IOC_TYPE, 0x03, struct kvtier_pool_remove)

/**
 * struct kvtier_pool_stat - a pool's geometry and counters (KVTIER_IOC_POOL_STAT, on a pool)
 * @size: sizeof(struct kvtier_pool_stat)
 * @flags: (out) KVTIER_POOL_*, as created
 * @frame_bytes: (out) size of a frame
 * @n_frames: (out) number of frames
 * @node: (out) as created
 * @mode: (out) as created
 * @uid: (out) owner, in the caller's user namespace
 * @gid: (out) group, in the caller's user namespace
 * @name: (out) name, or empty; empty also once it was removed
 * @id: (out) number of the pool
 * @charged_bytes: (out) bytes charged for this pool: frames, state words, tables, header
 * @present: (out) frames that have memory
 * @contiguous: (out) frames whose memory is one physically contiguous run
 * @held: (out) frames whose word says HELD, counted one by one
 * @clean: (out) frames whose word says CLEAN
 * @busy: (out) frames whose word says BUSY
 * @taken: (out) times that a frame was taken under memory pressure
 * @populated: (out) times that a frame got memory
 */
struct kvtier_pool_stat {
	__u32 size;
	__u32 flags;
	__u32 frame_bytes;
	__u32 n_frames;
	__s32 node;
	__u32 mode;
	__u32 uid;
	__u32 gid;
	__u8 name[KVTIER_NAME_BYTES];
	__aligned_u64 id;
	__aligned_u64 charged_bytes;
	__u32 present;
	__u32 contiguous;
	__u32 held;
	__u32 clean;
	__u32 busy;
	__u32 __reserved;
	__aligned_u64 taken;
	__aligned_u64 populated;
};
#define KVTIER_IOC_POOL_STAT _IOWR(KVTIER_IOC_TYPE, 0x10, struct kvtier_pool_stat)

/**
 * struct kvtier_range - frames [@first, @first + @n) (KVTIER_IOC_POPULATE and KVTIER_IOC_RELEASE, on a pool)
 * @size: sizeof(struct kvtier_range)
 * @flags: zero
 * @first: index of the first frame
 * @n: number of frames, at least 1
 *
 * POPULATE gives memory, which reads as zeros, to those frames that have none; their words become HELD. It returns how
 * many frames got some: of two callers that want the same frame one is told 1, and it is its to fill. RELEASE gives the
 * memory of frames back, whatever their words say, which become FREE with the next generation. It returns how many
 * frames had some; a frame in a transfer ends it (-EBUSY if it is the first).
 */
struct kvtier_range {
	__u32 size;
	__u32 flags;
	__u32 first;
	__u32 n;
};
#define KVTIER_IOC_POPULATE _IOWR(KVTIER_IOC_TYPE, 0x11, struct kvtier_range)
#define KVTIER_IOC_RELEASE  _IOWR(KVTIER_IOC_TYPE, 0x12, struct kvtier_range)

/*
 * State words: who may touch a frame is agreed on by compare-and-swap on its word.
 *
 *   FREE   no memory. Content is gone
 *   HELD   memory; user space uses it. The kernel never takes it
 *   CLEAN  memory; content has a copy elsewhere. The kernel may take it at any time
 *   BUSY   the kernel is taking it
 *
 *   user space: HELD -> CLEAN (with a stamp), CLEAN -> HELD (then the content may be read)
 *   kernel:	 CLEAN -> BUSY -> FREE (next generation), under pressure, smallest stamp first on a NUMA node;
 *		 FREE -> HELD, KVTIER_IOC_POPULATE; anything -> BUSY -> FREE (next generation), KVTIER_IOC_RELEASE
 *
 * The generation changes whenever content is lost, so that whoever remembers it can tell that a frame is another's now.
 * The kernel trusts no word: it keeps for itself which frames have memory.
 */
#define KVTIER_WORD_FREE  0
#define KVTIER_WORD_HELD  1
#define KVTIER_WORD_CLEAN 2
#define KVTIER_WORD_BUSY  3

#define KVTIER_WORD_STATE(word)	     ((__u32)((word) & 0xff))
#define KVTIER_WORD_GENERATION(word) ((__u32)((word) >> 8 & 0xffffff)) /* wraps */
#define KVTIER_WORD_STAMP(word)	     ((__u32)((word) >> 32)) /* the user's clock; smaller is older, modulo 2^32 */
#define KVTIER_WORD(state, generation, stamp) \
	((__u64)(__u32)(stamp) << 32 | (__u64)((generation) & 0xffffffu) << 8 | (__u64)(state))

/* ---- transfers ---------------------------------------------------------------------------------------------------- */

/**
 * struct kvtier_queue_create - make a transfer queue (KVTIER_IOC_QUEUE_CREATE, on /dev/kvtier)
 * @size: sizeof(struct kvtier_queue_create)
 * @flags: zero
 * @depth: most transfers between acceptance and reaping, 1 to KVTIER_MAX_DEPTH
 * @eventfd: an eventfd that is signalled at each completion, or -1. The queue itself can be polled, too
 * @fd: (out) the queue
 * @__reserved: zero
 *
 * Closing a descriptor of the queue waits for what is in flight (a fatal signal ends the wait, not the transfers). The
 * end of a process does not wait: its transfers go on by themselves.
 */
struct kvtier_queue_create {
	__u32 size;
	__u32 flags;
	__u32 depth;
	__s32 eventfd;
	__s32 fd;
	__u32 __reserved;
};
#define KVTIER_IOC_QUEUE_CREATE _IOWR(KVTIER_IOC_TYPE, 0x04, struct kvtier_queue_create)

#define KVTIER_XFER_READ  0 /* file to frame */
#define KVTIER_XFER_WRITE 1 /* frame to file */

/**
 * struct kvtier_xfer - one transfer
 * @op: KVTIER_XFER_*
 * @fd: a block device, or a regular file on a file system with a backing device or on tmpfs (not one of /proc or /sys),
 *	open for the direction, not O_APPEND. Opened with O_DIRECT, its alignment rules hold for @offset, @frame_offset
 *	and @bytes; without, the page cache is used
 * @frame: index of the frame
 * @frame_offset: where in the frame
 * @bytes: how much, at least 1; must end within the frame
 * @__reserved: zero
 * @offset: where in the file
 * @user: handed back in the completion
 */
struct kvtier_xfer {
	__u32 op;
	__s32 fd;
	__u32 frame;
	__u32 frame_offset;
	__u32 bytes;
	__u32 __reserved;
	__aligned_u64 offset;
	__aligned_u64 user;
};

/**
 * struct kvtier_submit - begin transfers (KVTIER_IOC_SUBMIT, on a queue)
 * @size: sizeof(struct kvtier_submit)
 * @flags: zero
 * @pool_fd: the frames' pool; READ needs it open for writing
 * @n: number of items, at least 1
 * @item_bytes: sizeof(struct kvtier_xfer)
 * @__reserved: zero
 * @items: pointer to @n items
 *
 * Returns how many were accepted, in order: fewer than @n when the queue is full, or when an item is wrong that is not
 * the first. A wrong first item is its error; a full queue is 0. An accepted item completes exactly once; its frame
 * keeps its memory until then. Its words are the caller's to set: HELD.
 */
struct kvtier_submit {
	__u32 size;
	__u32 flags;
	__s32 pool_fd;
	__u32 n;
	__u32 item_bytes;
	__u32 __reserved;
	__aligned_u64 items;
};
#define KVTIER_IOC_SUBMIT _IOWR(KVTIER_IOC_TYPE, 0x20, struct kvtier_submit)

/**
 * struct kvtier_done - a completion
 * @user: the item's
 * @result: bytes moved, as of read(2) and write(2), or a negative errno
 * @__reserved: zero
 */
struct kvtier_done {
	__aligned_u64 user;
	__s32 result;
	__u32 __reserved;
};

/**
 * struct kvtier_reap - take completions, without waiting (KVTIER_IOC_REAP, on a queue)
 * @size: sizeof(struct kvtier_reap)
 * @flags: zero
 * @n: room at @done, in items, at least 1
 * @__reserved: zero
 * @done: pointer to @n struct kvtier_done
 *
 * Returns how many were written, oldest first. After -EFAULT none is lost.
 */
struct kvtier_reap {
	__u32 size;
	__u32 flags;
	__u32 n;
	__u32 __reserved;
	__aligned_u64 done;
};
#define KVTIER_IOC_REAP _IOWR(KVTIER_IOC_TYPE, 0x21, struct kvtier_reap)

/**
 * struct kvtier_cancel - cancel transfers that have not begun (KVTIER_IOC_CANCEL, on a queue)
 * @size: sizeof(struct kvtier_cancel)
 * @flags: zero
 * @user: of the items
 *
 * Returns how many were; they complete with -ECANCELED.
 */
struct kvtier_cancel {
	__u32 size;
	__u32 flags;
	__aligned_u64 user;
};
#define KVTIER_IOC_CANCEL _IOWR(KVTIER_IOC_TYPE, 0x22, struct kvtier_cancel)

/**
 * struct kvtier_drain - wait until nothing is in flight (KVTIER_IOC_DRAIN, on a queue)
 * @size: sizeof(struct kvtier_drain)
 * @flags: zero
 *
 * Completions stay to be reaped. Only a fatal signal ends the wait early.
 */
struct kvtier_drain {
	__u32 size;
	__u32 flags;
};
#define KVTIER_IOC_DRAIN _IOWR(KVTIER_IOC_TYPE, 0x23, struct kvtier_drain)

/**
 * struct kvtier_uring_xfer - the 16 bytes at an IORING_OP_URING_CMD's sqe->cmd
 * @item: pointer to a struct kvtier_xfer; read when the request is issued, @user is ignored
 * @pool_fd: the frame's pool
 * @__reserved: zero
 *
 * sqe->fd is the queue and sqe->cmd_op KVTIER_URING_CMD_XFER. The completion's result is as of struct kvtier_done; a full
 * queue is -EBUSY.
 */
struct kvtier_uring_xfer {
	__aligned_u64 item;
	__s32 pool_fd;
	__u32 __reserved;
};
#define KVTIER_URING_CMD_XFER _IOWR(KVTIER_IOC_TYPE, 0x40, struct kvtier_uring_xfer)

#endif /* _UAPI_LINUX_KVTIER_H */
