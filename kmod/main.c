// SPDX-License-Identifier: GPL-2.0-only
/* The device, and the one way by which every ioctl of this module comes in. */
#include <linux/file.h>
#include <linux/miscdevice.h>
#include <linux/module.h>
#include <linux/nospec.h>
#include <linux/uaccess.h>

#include "internal.h"

#ifndef CONFIG_64BIT
#error "kvtier needs 64-bit atomics on memory that is shared with user space"
#endif

/* The largest struct of any table. */
union kvt_arg {
	u32 size;
	struct kvtier_query query;
	struct kvtier_pool_create create;
	struct kvtier_pool_open open;
	struct kvtier_pool_remove remove;
	struct kvtier_pool_stat stat;
	struct kvtier_range range;
	struct kvtier_queue_create queue;
	struct kvtier_submit submit;
	struct kvtier_reap reap;
	struct kvtier_cancel cancel;
	struct kvtier_drain drain;
};

static const struct kvt_ioctl *kvt_ioctl_find(unsigned int cmd, const struct kvt_ioctl *table, size_t n)
{
	size_t i;

	if (_IOC_TYPE(cmd) != KVTIER_IOC_TYPE || _IOC_DIR(cmd) != (_IOC_READ | _IOC_WRITE))
		return NULL;
	for (i = 0; i < n; i++)
		if (table[i].nr == _IOC_NR(cmd))
			return &table[array_index_nospec(i, n)];
	return NULL;
}

long kvt_ioctl(struct file *file, unsigned int cmd, unsigned long arg, const struct kvt_ioctl *table, size_t n)
{
	const struct kvt_ioctl *ioctl = kvt_ioctl_find(cmd, table, n);
	void __user *user = (void __user *)arg;
	union kvt_arg data;
	struct kvt_call call = { .file = file, .arg = &data, .new_fd = -1 };
	u32 size;
	long ret;

	if (!ioctl)
		return -ENOTTY;
	if (get_user(size, (u32 __user *)user))
		return -EFAULT;
	if (size < ioctl->min_size)
		return -EINVAL;
	if (size > PAGE_SIZE)
		return -E2BIG;
	ret = copy_struct_from_user(&data, ioctl->size, user, size);
	if (ret)
		return ret;
	/* What was copied is what counts, also if it changed in between. */
	data.size = size;
	if (ioctl->write && !(file->f_mode & FMODE_WRITE))
		return -EBADF;

	ret = ioctl->fn(&call);
	if (ret < 0)
		return ret;
	if (ioctl->out && copy_to_user(user, &data, min(size, ioctl->size)))
		ret = -EFAULT;
	if (!call.new_file)
		return ret;
	if (ret < 0) {
		if (call.undo)
			call.undo(call.new_file);
		put_unused_fd(call.new_fd);
		fput(call.new_file);
	} else {
		fd_install(call.new_fd, call.new_file);
	}
	return ret;
}

/* @file becomes the call's, once this has worked. */
int kvt_call_new_fd(struct kvt_call *call, struct file *file)
{
	int fd = get_unused_fd_flags(O_CLOEXEC);

	if (fd < 0)
		return fd;
	call->new_fd = fd;
	call->new_file = file;
	return 0;
}

static long kvt_query(struct kvt_call *call)
{
	struct kvtier_query *query = call->arg;

	*query = (struct kvtier_query) {
		.size = query->size,
		.abi_version = KVTIER_ABI_VERSION,
		.features = KVTIER_FEATURE_POOL | KVTIER_FEATURE_NAMED | KVTIER_FEATURE_RECLAIM |
			    KVTIER_FEATURE_TRANSFER,
		.max_bytes = kvt_max_bytes(),
		.max_user_bytes = kvt_max_user_bytes(),
		.used_bytes = kvt_account_total(),
		.user_bytes = kvt_account_of_user(current_fsuid()),
		.min_frame_bytes = PAGE_SIZE,
		.max_frame_bytes = KVTIER_MAX_FRAME_BYTES,
		.max_frames = KVTIER_MAX_FRAMES,
		.max_depth = KVTIER_MAX_DEPTH,
	};
	if (IS_ENABLED(CONFIG_IO_URING))
		query->features |= KVTIER_FEATURE_URING_CMD;
	return 0;
}

static const struct kvt_ioctl kvt_device_ioctls[] = {
	KVT_IOCTL(KVTIER_IOC_QUERY, kvtier_query, max_depth, true, false, kvt_query),
	KVT_IOCTL(KVTIER_IOC_POOL_CREATE, kvtier_pool_create, id, true, true, kvt_pool_create),
	KVT_IOCTL(KVTIER_IOC_POOL_OPEN, kvtier_pool_open, __reserved, true, false, kvt_pool_open),
	KVT_IOCTL(KVTIER_IOC_POOL_REMOVE, kvtier_pool_remove, name, false, true, kvt_pool_remove),
	KVT_IOCTL(KVTIER_IOC_QUEUE_CREATE, kvtier_queue_create, __reserved, true, true, kvt_queue_create),
};

static long kvt_device_ioctl(struct file *file, unsigned int cmd, unsigned long arg)
{
	return kvt_ioctl(file, cmd, arg, kvt_device_ioctls, ARRAY_SIZE(kvt_device_ioctls));
}

static const struct file_operations kvt_device_fops = {
	.owner = THIS_MODULE,
	.unlocked_ioctl = kvt_device_ioctl,
	.compat_ioctl = compat_ptr_ioctl,
	.llseek = noop_llseek,
};

static struct miscdevice kvt_device = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "kvtier",
	.fops = &kvt_device_fops,
	.mode = 0660,
};

static int __init kvt_init(void)
{
	int err;

	kvt_limits_init();
	err = kvt_sysfs_init();
	if (err)
		return err;
	err = kvt_reclaim_init();
	if (err)
		goto exit_sysfs;
	/* Last: from here on the module is used. */
	err = misc_register(&kvt_device);
	if (err)
		goto exit_reclaim;
	return 0;

exit_reclaim:
	kvt_reclaim_exit();
exit_sysfs:
	kvt_sysfs_exit();
	return err;
}

static void __exit kvt_exit(void)
{
	misc_deregister(&kvt_device);
	kvt_reclaim_exit();
	kvt_sysfs_exit();
}

module_init(kvt_init);
module_exit(kvt_exit);
MODULE_LICENSE("GPL");
MODULE_VERSION("0.1.0");
MODULE_DESCRIPTION("Pools of memory frames for tiered key-value caches");
MODULE_ALIAS("devname:kvtier");
