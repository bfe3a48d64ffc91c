/* SPDX-License-Identifier: GPL-2.0-only */
/* Differences between the kernels this module is built for (6.1 to 7.3), all of them here. */
#ifndef KVT_COMPAT_H
#define KVT_COMPAT_H

#include <linux/cred.h>
#include <linux/eventfd.h>
#include <linux/fs.h>
#include <linux/list_lru.h>
#include <linux/mm.h>
#include <linux/shrinker.h>
#include <linux/swap.h>
#include <linux/version.h>

/* 6.8 moved uring_cmd's declarations into a header of their own. */
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 8, 0)
#include <linux/io_uring/cmd.h>
#else
#include <linux/io_uring.h>
#endif

/* 6.3 replaced the user namespace of a mount by its idmap. */
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 3, 0)
#define kvt_nop_idmap (&nop_mnt_idmap)
#define KVT_SETATTR_ARGS struct mnt_idmap *idmap, struct dentry *dentry, struct iattr *attr
#else
#define kvt_nop_idmap (&init_user_ns)
#define KVT_SETATTR_ARGS struct user_namespace *mnt_userns, struct dentry *dentry, struct iattr *attr
#endif

/* 6.6 gave these helpers; they were backported to 6.1, but not to all between, so that no version tells. */
static inline void kvt_kiocb_start_write(struct kiocb *iocb)
{
	struct super_block *sb = file_inode(iocb->ki_filp)->i_sb;

	sb_start_write(sb);
	__sb_writers_release(sb, SB_FREEZE_WRITE);
}

static inline void kvt_kiocb_end_write(struct kiocb *iocb)
{
	struct super_block *sb = file_inode(iocb->ki_filp)->i_sb;

	__sb_writers_acquired(sb, SB_FREEZE_WRITE);
	sb_end_write(sb);
}

/* 6.3 made vm_flags read-only but for its setters. */
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 3, 0)
static inline void vm_flags_set(struct vm_area_struct *vma, vm_flags_t flags)
{
	vma->vm_flags |= flags;
}
#endif

/* 6.4 renamed the counter of pages reclaimed outside of the LRU lists and gave it a helper. */
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 4, 0)
static inline void mm_account_reclaimed_pages(unsigned long pages)
{
	if (current->reclaim_state)
		current->reclaim_state->reclaimed_slab += pages;
}
#endif

/* 6.7 allocates shrinkers; before, the caller owned them. */
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 7, 0)
static struct shrinker kvt_only_shrinker;

static inline struct shrinker *shrinker_alloc(unsigned int flags, const char *name)
{
	kvt_only_shrinker.flags = flags;
	return &kvt_only_shrinker;
}

/* The number that a list_lru wants is given by registration: it must come first, and the callbacks must wait. */
#define KVT_LRU_AFTER_SHRINKER 1
#define kvt_shrinker_register(shrinker) register_shrinker(shrinker, "kvtier")
#define kvt_shrinker_free(shrinker, registered)              \
	do {                                                 \
		if (registered)                              \
			unregister_shrinker(shrinker);       \
	} while (0)
#else
#define KVT_LRU_AFTER_SHRINKER 0
#define kvt_shrinker_register(shrinker) (shrinker_register(shrinker), 0)
#define kvt_shrinker_free(shrinker, registered) shrinker_free(shrinker)
#endif

/* 6.8 renamed the list_lru calls that find node and cgroup by the object. */
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 8, 0)
#define list_lru_add_obj list_lru_add
#define list_lru_del_obj list_lru_del
#endif

/* 6.13 no longer hands the list's lock to the walker. */
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 13, 0)
#define KVT_LRU_WALKER(name, item, arg) \
	enum lru_status name(struct list_head *item, struct list_lru_one *list, void *arg)
#else
#define KVT_LRU_WALKER(name, item, arg) \
	enum lru_status name(struct list_head *item, struct list_lru_one *list, spinlock_t *lock, void *arg)
#endif

/* 6.8 protects against freezing in vfs_iocb_iter_write(), up to its return, or to the end of what it has begun. */
#define KVT_VFS_STARTS_WRITE (LINUX_VERSION_CODE >= KERNEL_VERSION(6, 8, 0))

/* 6.8 dropped the count. */
static inline void kvt_eventfd_signal(struct eventfd_ctx *ctx)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 8, 0)
	eventfd_signal(ctx);
#else
	eventfd_signal(ctx, 1);
#endif
}

/* 6.6 gave the SQE instead of a pointer into it; later it became a macro that takes the type. */
static inline const void *kvt_uring_payload(const struct io_uring_cmd *cmd)
{
#if defined(io_uring_sqe_cmd) || LINUX_VERSION_CODE >= KERNEL_VERSION(6, 6, 0)
	return cmd->sqe->cmd;
#else
	return cmd->cmd;
#endif
}

/* 6.18 dropped the second result. */
static inline void kvt_uring_done(struct io_uring_cmd *cmd, ssize_t result, unsigned int issue_flags)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 18, 0)
	io_uring_cmd_done(cmd, result, issue_flags);
#else
	io_uring_cmd_done(cmd, result, 0, issue_flags);
#endif
}

/* 6.19 gives task work its request instead of the command and the issue flags. */
#ifdef IO_URING_CMD_TASK_WORK_ISSUE_FLAGS
#define KVT_URING_TASK_WORK(name, cmd, issue_flags)                                                   \
	static void name##_do(struct io_uring_cmd *cmd, unsigned int issue_flags);                    \
	static void name(struct io_tw_req req, io_tw_token_t token)                                   \
	{                                                                                             \
		name##_do(io_uring_cmd_from_tw(req), IO_URING_CMD_TASK_WORK_ISSUE_FLAGS);             \
	}                                                                                             \
	static void name##_do(struct io_uring_cmd *cmd, unsigned int issue_flags)
#else
#define KVT_URING_TASK_WORK(name, cmd, issue_flags) static void name(struct io_uring_cmd *cmd, unsigned int issue_flags)
#endif

#endif
