// SPDX-License-Identifier: GPL-2.0-only
/*
 * Pools: made, named, found again, passed on as descriptors, gone with the last one.
 *
 * Each pool has an inode on an internal mount, which carries owner, group and mode (so that the VFS checks permissions)
 * and the mappings. A name is a reference to its pool.
 */
#include <linux/ctype.h>
#include <linux/file.h>
#include <linux/fs_context.h>
#include <linux/memcontrol.h>
#include <linux/module.h>
#include <linux/mount.h>
#include <linux/nodemask.h>
#include <linux/pseudo_fs.h>
#include <linux/sched/mm.h>
#include <linux/sched/signal.h>
#include <linux/seq_file.h>
#include <linux/user_namespace.h>
#include <linux/vmalloc.h>

#include "compat.h"
#include "internal.h"
#include "trace.h"

#define KVT_FS_MAGIC 0x6b767469 /* "kvti" */

DEFINE_MUTEX(kvt_pools_lock);
LIST_HEAD(kvt_pools);

static atomic64_t kvt_next_id = ATOMIC64_INIT(1);

/* Mounted while there are pools: a mount holds the module. */
static struct vfsmount *kvt_mount;
static int kvt_mount_count;

/* The first pool's maker may be in a user namespace: owners are everybody's, not relative to that. */
static int kvt_fs_init_context(struct fs_context *fc)
{
	put_user_ns(fc->user_ns);
	fc->user_ns = get_user_ns(&init_user_ns);
	return init_pseudo(fc, KVT_FS_MAGIC) ? 0 : -ENOMEM;
}

static struct file_system_type kvt_fs_type = {
	.name = "kvtier",
	.owner = THIS_MODULE,
	.init_fs_context = kvt_fs_init_context,
	.kill_sb = kill_anon_super,
};

static void kvt_pool_free(struct kref *ref)
{
	struct kvt_pool *pool = container_of(ref, struct kvt_pool, ref);

	trace_kvtier_pool_destroy(pool->id, pool->n_frames, pool->frame_bytes);
	kvt_sysfs_remove(pool);
	mutex_lock(&kvt_pools_lock);
	list_del(&pool->node_in_list);
	mutex_unlock(&kvt_pools_lock);
	kvt_reclaim_remove(pool);
	kvt_frames_free(pool);
	iput(pool->inode);
	simple_release_fs(&kvt_mount, &kvt_mount_count);
	vfree(pool->header);
	vfree(pool->words);
	kvfree(pool->frames);
	kvt_uncharge(&pool->account, kvt_account_bytes(&pool->account));
	kvt_account_exit(&pool->account);
	kfree(pool);
}

static void kvt_pool_put(struct kvt_pool *pool)
{
	kref_put(&pool->ref, kvt_pool_free);
}

/* How many frames' words say FREE, HELD, CLEAN, BUSY; other states count as HELD. */
void kvt_pool_count_words(const struct kvt_pool *pool, u32 counts[4])
{
	u32 i, state;

	memset(counts, 0, 4 * sizeof(*counts));
	for (i = 0; i < pool->n_frames; i++) {
		state = KVTIER_WORD_STATE(READ_ONCE(pool->words[i]));
		counts[state <= KVTIER_WORD_BUSY ? state : KVTIER_WORD_HELD]++;
		if (!(i & 0xffff))
			cond_resched();
	}
}

static long kvt_pool_stat(struct kvt_call *call)
{
	struct kvt_pool *pool = kvt_pool_of_file(call->file);
	struct kvtier_pool_stat *stat = call->arg;
	u32 counts[4], size = stat->size;

	kvt_pool_count_words(pool, counts);
	*stat = (struct kvtier_pool_stat) {
		.size = size,
		.flags = pool->flags,
		.frame_bytes = pool->frame_bytes,
		.n_frames = pool->n_frames,
		.node = pool->node,
		.mode = pool->mode,
		.uid = from_kuid_munged(current_user_ns(), pool->inode->i_uid),
		.gid = from_kgid_munged(current_user_ns(), pool->inode->i_gid),
		.id = pool->id,
		.charged_bytes = kvt_account_bytes(&pool->account),
		.present = atomic_read(&pool->present),
		.contiguous = atomic_read(&pool->contiguous),
		.held = counts[KVTIER_WORD_HELD],
		.clean = counts[KVTIER_WORD_CLEAN],
		.busy = counts[KVTIER_WORD_BUSY],
		.taken = atomic64_read(&pool->taken),
		.populated = atomic64_read(&pool->populated),
	};
	mutex_lock(&kvt_pools_lock);
	memcpy(stat->name, pool->name, sizeof(stat->name));
	mutex_unlock(&kvt_pools_lock);
	return 0;
}

static const struct kvt_ioctl kvt_pool_ioctls[] = {
	KVT_IOCTL(KVTIER_IOC_POOL_STAT, kvtier_pool_stat, populated, true, false, kvt_pool_stat),
	KVT_IOCTL(KVTIER_IOC_POPULATE, kvtier_range, n, false, true, kvt_pool_populate),
	KVT_IOCTL(KVTIER_IOC_RELEASE, kvtier_range, n, false, true, kvt_pool_release),
};

static long kvt_pool_ioctl(struct file *file, unsigned int cmd, unsigned long arg)
{
	return kvt_ioctl(file, cmd, arg, kvt_pool_ioctls, ARRAY_SIZE(kvt_pool_ioctls));
}

static int kvt_pool_release_file(struct inode *inode, struct file *file)
{
	kvt_pool_put(file->private_data);
	return 0;
}

static void kvt_pool_show_fdinfo(struct seq_file *m, struct file *file)
{
	struct kvt_pool *pool = file->private_data;

	seq_printf(m, "kvtier-pool:\t%llu\n", pool->id);
}

static const struct file_operations kvt_pool_fops = {
	.owner = THIS_MODULE,
	.release = kvt_pool_release_file,
	.mmap = kvt_pool_mmap,
	.unlocked_ioctl = kvt_pool_ioctl,
	.compat_ioctl = compat_ptr_ioctl,
	.llseek = noop_llseek,
	.show_fdinfo = kvt_pool_show_fdinfo,
};

/* Owner, group and mode stay as they were made, whatever the kernel lets anonymous inodes do. */
static int kvt_pool_setattr(KVT_SETATTR_ARGS)
{
	return -EOPNOTSUPP;
}

static const struct inode_operations kvt_pool_iops = {
	.setattr = kvt_pool_setattr,
};

struct kvt_pool *kvt_pool_of_file(struct file *file)
{
	return file->f_op == &kvt_pool_fops ? file->private_data : NULL;
}

/* A file on @pool; takes a reference of its own. */
static struct file *kvt_pool_file(struct kvt_pool *pool, int flags)
{
	struct file *file;

	/* The file's, given back by the VFS. The caller is an ioctl of this module: it cannot fail. */
	__module_get(THIS_MODULE);
	ihold(pool->inode);
	file = alloc_file_pseudo(pool->inode, kvt_mount, "kvtier-pool", flags | O_CLOEXEC, &kvt_pool_fops);
	if (IS_ERR(file)) {
		iput(pool->inode);
		module_put(THIS_MODULE);
		return file;
	}
	kref_get(&pool->ref);
	file->private_data = pool;
	file->f_mapping = pool->inode->i_mapping;
	return file;
}

static int kvt_name_check(const u8 *name)
{
	size_t i, len = strnlen(name, KVTIER_NAME_BYTES);

	if (len == KVTIER_NAME_BYTES || name[0] == '.')
		return -EINVAL;
	for (i = 0; i < len; i++)
		if (!isascii(name[i]) || (!isalnum(name[i]) && !strchr("._-", name[i])))
			return -EINVAL;
	for (; i < KVTIER_NAME_BYTES; i++)
		if (name[i])
			return -EINVAL;
	return 0;
}

static struct kvt_pool *kvt_pool_find(const u8 *name)
{
	struct kvt_pool *pool;

	lockdep_assert_held(&kvt_pools_lock);
	list_for_each_entry(pool, &kvt_pools, node_in_list)
		if (pool->name[0] && !strcmp(pool->name, name))
			return pool;
	return NULL;
}

static int kvt_create_check(const struct kvtier_pool_create *arg)
{
	if (arg->flags & ~(KVTIER_POOL_STRICT_NODE | KVTIER_POOL_LAZY | KVTIER_POOL_RECLAIM))
		return -EOPNOTSUPP;
	if (arg->__reserved)
		return -EINVAL;
	if (!arg->frame_bytes || arg->frame_bytes > KVTIER_MAX_FRAME_BYTES || !PAGE_ALIGNED(arg->frame_bytes))
		return -EINVAL;
	if (!arg->n_frames || arg->n_frames > KVTIER_MAX_FRAMES ||
	    (u64)arg->n_frames * arg->frame_bytes > KVTIER_MMAP_WORDS)
		return -EINVAL;
	if (kvt_name_check(arg->name) || (arg->name[0] ? arg->mode & ~0666 : arg->mode))
		return -EINVAL;
	if (arg->node < -1 || (arg->node == -1 && (arg->flags & KVTIER_POOL_STRICT_NODE)))
		return -EINVAL;
	if (arg->node != -1 && (arg->node >= MAX_NUMNODES || !node_state(arg->node, N_MEMORY)))
		return -ENODEV;
	return 0;
}

/* Tables and memory; nobody else sees the pool. */
static int kvt_pool_fill(struct kvt_pool *pool)
{
	u64 words = PAGE_ALIGN(pool->n_frames * sizeof(u64));
	u64 table = PAGE_ALIGN(pool->n_frames * sizeof(struct kvt_frame));
	gfp_t gfp = GFP_KERNEL_ACCOUNT | __GFP_ZERO | __GFP_NOWARN | __GFP_RETRY_MAYFAIL;
	int err;
	u32 i;

	err = kvt_charge(&pool->account, words + table + PAGE_SIZE + (u64)pool->n_frames * pool->frame_bytes);
	if (err)
		return err;
	pool->frames = kvmalloc(table, gfp);
	pool->words = __vmalloc(words, gfp);
	pool->header = __vmalloc(PAGE_SIZE, gfp);
	if (!pool->frames || !pool->words || !pool->header) {
		kvt_count(KVT_C_ERR_MEMORY, 1);
		return -ENOMEM;
	}
	if (pool->flags & KVTIER_POOL_LAZY)
		return 0;
	for (i = 0; i < pool->n_frames; i++) {
		if (fatal_signal_pending(current))
			return -EINTR;
		err = kvt_frame_populate(pool, i);
		if (err < 0)
			return err;
		cond_resched();
	}
	return 0;
}

static struct kvt_pool *kvt_pool_new(const struct kvtier_pool_create *arg)
{
	struct kvt_pool *pool;
	int err;

	pool = kzalloc(sizeof(*pool), GFP_KERNEL_ACCOUNT);
	if (!pool)
		return ERR_PTR(-ENOMEM);
	kref_init(&pool->ref);
	init_rwsem(&pool->map_lock);
	pool->flags = arg->flags;
	pool->frame_bytes = arg->frame_bytes;
	pool->frame_pages = arg->frame_bytes >> PAGE_SHIFT;
	pool->n_frames = arg->n_frames;
	pool->node = arg->node;
	pool->mode = arg->mode;
	pool->id = atomic64_fetch_inc(&kvt_next_id);

	err = kvt_account_init(&pool->account);
	if (err)
		goto free_pool;
	err = simple_pin_fs(&kvt_fs_type, &kvt_mount, &kvt_mount_count);
	if (err)
		goto exit_account;
	pool->inode = alloc_anon_inode(kvt_mount->mnt_sb);
	if (IS_ERR(pool->inode)) {
		err = PTR_ERR(pool->inode);
		goto release_fs;
	}
	/* alloc_anon_inode() made the caller the owner. */
	pool->inode->i_mode = (pool->inode->i_mode & S_IFMT) | pool->mode;
	pool->inode->i_op = &kvt_pool_iops;
	err = kvt_pool_fill(pool);
	if (err)
		goto free_frames;
	err = kvt_reclaim_add(pool);
	if (err)
		goto free_frames;
	err = kvt_sysfs_add(pool);
	if (err)
		goto remove_reclaim;
	mutex_lock(&kvt_pools_lock);
	list_add_tail(&pool->node_in_list, &kvt_pools);
	mutex_unlock(&kvt_pools_lock);
	kvt_count(KVT_C_POOLS_CREATED, 1);
	trace_kvtier_pool_create(pool->id, pool->n_frames, pool->frame_bytes);
	return pool;

remove_reclaim:
	kvt_reclaim_remove(pool);
free_frames:
	if (pool->frames && pool->words)
		kvt_frames_free(pool);
	vfree(pool->header);
	vfree(pool->words);
	kvfree(pool->frames);
	kvt_uncharge(&pool->account, kvt_account_bytes(&pool->account));
	iput(pool->inode);
release_fs:
	simple_release_fs(&kvt_mount, &kvt_mount_count);
exit_account:
	kvt_account_exit(&pool->account);
free_pool:
	kfree(pool);
	return ERR_PTR(err);
}

/* Give @pool its name, which holds it. */
static int kvt_pool_set_name(struct kvt_pool *pool, const u8 *name)
{
	int err = 0;

	mutex_lock(&kvt_pools_lock);
	if (kvt_pool_find(name)) {
		err = -EEXIST;
	} else {
		memcpy(pool->name, name, KVTIER_NAME_BYTES);
		kref_get(&pool->ref);
	}
	mutex_unlock(&kvt_pools_lock);
	return err;
}

static void kvt_pool_clear_name(struct kvt_pool *pool)
{
	lockdep_assert_held(&kvt_pools_lock);
	memset(pool->name, 0, sizeof(pool->name));
}

static void kvt_pool_undo_create(struct file *file)
{
	struct kvt_pool *pool = file->private_data;
	bool named;

	mutex_lock(&kvt_pools_lock);
	named = pool->name[0];
	if (named)
		kvt_pool_clear_name(pool);
	mutex_unlock(&kvt_pools_lock);
	if (named)
		kvt_pool_put(pool);
}

long kvt_pool_create(struct kvt_call *call)
{
	struct kvtier_pool_create *arg = call->arg;
	struct kvt_pool *pool;
	struct file *file;
	int err;

	err = kvt_create_check(arg);
	if (err)
		return err;
	/* Filling a large pool takes long: say at once that the name is taken. It is checked again when it is set. */
	mutex_lock(&kvt_pools_lock);
	err = arg->name[0] && kvt_pool_find(arg->name) ? -EEXIST : 0;
	mutex_unlock(&kvt_pools_lock);
	if (err)
		return err;

	pool = kvt_pool_new(arg);
	if (IS_ERR(pool))
		return PTR_ERR(pool);
	file = kvt_pool_file(pool, O_RDWR);
	if (IS_ERR(file)) {
		err = PTR_ERR(file);
		goto put_pool;
	}
	if (arg->name[0]) {
		err = kvt_pool_set_name(pool, arg->name);
		if (err)
			goto put_file;
	}
	call->undo = kvt_pool_undo_create;
	err = kvt_call_new_fd(call, file);
	if (err)
		goto clear_name;
	arg->fd = call->new_fd;
	arg->id = pool->id;
	kvt_pool_put(pool);
	return 0;

clear_name:
	kvt_pool_undo_create(file);
put_file:
	fput(file);
put_pool:
	kvt_pool_put(pool);
	return err;
}

long kvt_pool_open(struct kvt_call *call)
{
	struct kvtier_pool_open *arg = call->arg;
	bool rdonly = arg->flags & KVTIER_OPEN_RDONLY;
	struct kvt_pool *pool;
	struct file *file;
	int err;

	if (arg->flags & ~KVTIER_OPEN_RDONLY)
		return -EOPNOTSUPP;
	if (arg->__reserved || !arg->name[0] || kvt_name_check(arg->name))
		return -EINVAL;
	mutex_lock(&kvt_pools_lock);
	pool = kvt_pool_find(arg->name);
	if (pool)
		kref_get(&pool->ref);
	mutex_unlock(&kvt_pools_lock);
	if (!pool)
		return -ENOENT;
	err = inode_permission(kvt_nop_idmap, pool->inode, rdonly ? MAY_READ : MAY_READ | MAY_WRITE);
	if (err)
		goto put_pool;
	file = kvt_pool_file(pool, rdonly ? O_RDONLY : O_RDWR);
	if (IS_ERR(file)) {
		err = PTR_ERR(file);
		goto put_pool;
	}
	err = kvt_call_new_fd(call, file);
	if (err)
		goto put_file;
	arg->fd = call->new_fd;
	kvt_pool_put(pool);
	return 0;

put_file:
	fput(file);
put_pool:
	kvt_pool_put(pool);
	return err;
}

long kvt_pool_remove(struct kvt_call *call)
{
	struct kvtier_pool_remove *arg = call->arg;
	struct kvt_pool *pool;
	int err = 0;

	if (arg->flags)
		return -EOPNOTSUPP;
	if (!arg->name[0] || kvt_name_check(arg->name))
		return -EINVAL;
	mutex_lock(&kvt_pools_lock);
	pool = kvt_pool_find(arg->name);
	if (!pool)
		err = -ENOENT;
	else if (!inode_owner_or_capable(kvt_nop_idmap, pool->inode))
		err = -EPERM;
	else
		kvt_pool_clear_name(pool);
	mutex_unlock(&kvt_pools_lock);
	if (!err)
		kvt_pool_put(pool);
	return err;
}
