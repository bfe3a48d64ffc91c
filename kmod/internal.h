/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The module's objects: pools of frames, transfer queues, and the accounts that both are charged to.
 *
 * A pool lives as long as a file or its name refers to it. It has an inode of its own on an internal mount, so that its
 * pages can be taken out of every mapping at once.
 *
 * Lock order
 *   mmap_lock -> kvt_pool.map_lock -> fs_reclaim -> [shrinker: other pools' map_lock by trylock] -> i_mmap_rwsem
 *   kvt_pools_lock -> nothing of ours
 *   kvt_queue.lock, the accounts' lock: leaves. kvt_queue.lock is taken with interrupts off.
 * No user memory is touched under map_lock: it may be a pool's.
 */
#ifndef KVT_INTERNAL_H
#define KVT_INTERNAL_H

#include <linux/atomic.h>
#include <linux/bvec.h>
#include <linux/fs.h>
#include <linux/kobject.h>
#include <linux/kref.h>
#include <linux/list.h>
#include <linux/rwsem.h>
#include <linux/spinlock.h>
#include <linux/types.h>
#include <linux/wait.h>
#include <linux/workqueue.h>

#include <uapi/linux/kvtier.h>

struct cred;
struct eventfd_ctx;
struct io_uring_cmd;
struct mem_cgroup;
struct user_struct;
struct vm_area_struct;

/* ---- account.c: who pays ---- */

struct kvt_owner;

struct kvt_account {
	struct kvt_owner *owner; /* the module's own count of a user's bytes */
	struct user_struct *user; /* whose locked_vm is charged; NULL with CAP_IPC_LOCK */
	struct mem_cgroup *memcg; /* what later allocations are charged to */
	u64 bytes; /* charged, under the accounts' lock */
};

int kvt_account_init(struct kvt_account *account);
void kvt_account_exit(struct kvt_account *account);
int kvt_charge(struct kvt_account *account, u64 bytes);
void kvt_uncharge(struct kvt_account *account, u64 bytes);
u64 kvt_account_bytes(const struct kvt_account *account);
u64 kvt_account_total(void);
u64 kvt_account_of_user(kuid_t uid);
void kvt_limits_init(void);
u64 kvt_max_bytes(void);
u64 kvt_max_user_bytes(void);

/* ---- pool.c ---- */

struct kvt_frame {
	struct bio_vec *runs; /* the frame's memory, physically contiguous runs; NULL: none */
	struct bio_vec one; /* @runs points here where one run is all */
	u16 n_runs;
	s16 nid;
	bool had_memory; /* once: a touch does not give it any again */
	u32 generation; /* the kernel's own */
	atomic_t in_flight; /* transfers; raised under map_lock, for reading at least */
};

/* Pages of one node that reclaim may find; on the shrinker's list, which finds the cgroup by the object's address. */
struct kvt_marker {
	struct list_head lru;
	struct kvt_pool *pool;
};

struct kvt_pool {
	struct kref ref;
	u64 id;
	u32 flags;
	u32 frame_bytes;
	u32 frame_pages;
	u32 n_frames;
	int node;
	u16 mode;
	char name[KVTIER_NAME_BYTES]; /* under kvt_pools_lock; "" when it has none */
	struct list_head node_in_list; /* of all pools, under kvt_pools_lock */
	struct inode *inode; /* holds uid, gid, mode and the mappings */
	struct kvt_account account;
	struct kvt_pool_dir *dir; /* in sysfs */

	/*
	 * Which frames have memory: written under it for writing, read under it for reading. Nothing that allocates
	 * runs under it for writing. Reclaim only tries to take it.
	 */
	struct rw_semaphore map_lock;
	struct kvt_frame *frames;
	u64 *words; /* shared with user space, never trusted */
	void *header; /* user space's */

	atomic_t present; /* frames with memory */
	atomic_t contiguous; /* of them, those of one run */
	atomic64_t taken;
	atomic64_t populated;

	u32 cursor; /* where reclaim looks next; racy, a hint */
	atomic_t reclaiming; /* shrinkers that use the pool without a reference */
	struct kvt_marker **markers; /* one for each node, or NULL */
};

extern struct mutex kvt_pools_lock; /* names, and the list */
extern struct list_head kvt_pools;

struct kvt_pool *kvt_pool_of_file(struct file *file); /* NULL: not a pool */
void kvt_pool_count_words(const struct kvt_pool *pool, u32 counts[4]);

/* ---- main.c: the ioctl table ---- */

/* What an ioctl works on. A new descriptor is installed once its number has reached user space. */
struct kvt_call {
	struct file *file;
	void *arg; /* the struct, of this module's size */
	struct file *new_file;
	int new_fd;
	void (*undo)(struct file *new_file); /* if it could not be told; may be NULL */
};

struct kvt_ioctl {
	unsigned int nr;
	u32 size, min_size;
	bool out; /* the struct is copied back */
	bool write; /* the descriptor must be open for writing */
	long (*fn)(struct kvt_call *call);
};

#define KVT_IOCTL(_cmd, _struct, _last, _out, _write, _fn)                                                            \
	{                                                                                                             \
		.nr = _IOC_NR(_cmd), .size = sizeof(struct _struct), .min_size = offsetofend(struct _struct, _last),  \
		.out = _out, .write = _write, .fn = _fn                                                               \
	}

long kvt_ioctl(struct file *file, unsigned int cmd, unsigned long arg, const struct kvt_ioctl *table, size_t n);
int kvt_call_new_fd(struct kvt_call *call, struct file *file);

long kvt_pool_create(struct kvt_call *call);
long kvt_pool_open(struct kvt_call *call);
long kvt_pool_remove(struct kvt_call *call);
long kvt_queue_create(struct kvt_call *call);

/* ---- frame.c ---- */

int kvt_frame_populate(struct kvt_pool *pool, u32 index);
int kvt_frame_get(struct kvt_pool *pool, u32 index); /* for a transfer: it keeps its memory until put */
void kvt_frame_put(struct kvt_pool *pool, u32 index);
u32 kvt_frame_take(struct kvt_pool *pool, u32 index, u64 word);
void kvt_frames_free(struct kvt_pool *pool);
long kvt_pool_populate(struct kvt_call *call);
long kvt_pool_release(struct kvt_call *call);

/* ---- mmap.c ---- */

int kvt_pool_mmap(struct file *file, struct vm_area_struct *vma);

/* ---- reclaim.c ---- */

int kvt_reclaim_init(void);
void kvt_reclaim_exit(void);
int kvt_reclaim_add(struct kvt_pool *pool);
void kvt_reclaim_remove(struct kvt_pool *pool);

/* ---- transfer.c, uring.c ---- */

/* One transfer. Filled while free, then touched by one context at a time: submitter, worker, completion, reaper. */
struct kvt_item {
	struct kiocb iocb;
	struct kvt_queue *queue;
	struct kvt_pool *pool;
	struct file *pool_file;
	struct file *queue_file;
	const struct cred *cred;
	struct mem_cgroup *memcg;
	struct io_uring_cmd *cmd; /* whom to tell; NULL: the queue's reaper */
	struct work_struct work;
	struct list_head node; /* in the queue's free, waiting or done list */
	u32 frame, frame_offset, bytes;
	bool write;
	u64 user;
	s32 result;
};

struct kvt_queue {
	u32 depth;
	struct kvt_item *items;
	struct eventfd_ctx *eventfd;
	struct kvt_account account;
	struct workqueue_struct *workers;
	wait_queue_head_t wait;

	spinlock_t lock; /* the lists and the count */
	struct list_head free, waiting, done; /* waiting: for a worker to begin them */
	u32 in_flight;
};

extern const struct file_operations kvt_queue_fops;

struct kvt_item *kvt_item_alloc(struct kvt_queue *queue);
void kvt_item_free(struct kvt_item *item);
int kvt_item_prepare(struct kvt_item *item, struct file *queue_file, int pool_fd, const struct kvtier_xfer *xfer);
void kvt_item_start(struct kvt_item *item);

int kvt_queue_uring_cmd(struct io_uring_cmd *cmd, unsigned int issue_flags);
void kvt_uring_complete(struct io_uring_cmd *cmd);

/* ---- sysfs.c ---- */

enum kvt_counter {
	KVT_C_POOLS_CREATED,
	KVT_C_TAKEN_FRAMES,
	KVT_C_TAKEN_BYTES,
	KVT_C_POPULATED_FRAMES,
	KVT_C_READS,
	KVT_C_READ_BYTES,
	KVT_C_WRITES,
	KVT_C_WRITE_BYTES,
	KVT_C_CANCELLED,
	KVT_C_ERR_IO, /* transfers that failed */
	KVT_C_ERR_MEMORY, /* no memory, or the cgroup's limit */
	KVT_C_ERR_MEMLOCK,
	KVT_C_ERR_USER_LIMIT,
	KVT_C_ERR_LIMIT,
	KVT_C_ERR_LOST, /* a frame was touched that has no memory */
	KVT_COUNTERS
};

extern atomic64_t kvt_counters[KVT_COUNTERS];

static inline void kvt_count(enum kvt_counter counter, u64 n)
{
	atomic64_add(n, &kvt_counters[counter]);
}

int kvt_sysfs_init(void);
void kvt_sysfs_exit(void);
int kvt_sysfs_add(struct kvt_pool *pool);
void kvt_sysfs_remove(struct kvt_pool *pool);

#endif
