// SPDX-License-Identifier: GPL-2.0-only
/*
 * /sys/kernel/kvtier: counters of the module, and a directory for each pool. One value a file; bytes, or a count.
 *
 * A pool's directory goes before the pool does: sysfs waits for those who read it.
 */
#include <linux/kobject.h>
#include <linux/mutex.h>
#include <linux/slab.h>
#include <linux/sysfs.h>
#include <linux/user_namespace.h>

#include "internal.h"

atomic64_t kvt_counters[KVT_COUNTERS];

static struct kobject *kvt_root;
static struct kset *kvt_pool_dirs;

/* ---- the module's ---- */

struct kvt_counter_attr {
	struct kobj_attribute attr;
	enum kvt_counter counter;
};

static ssize_t kvt_counter_show(struct kobject *kobj, struct kobj_attribute *attr, char *buf)
{
	enum kvt_counter counter = container_of(attr, struct kvt_counter_attr, attr)->counter;

	return sysfs_emit(buf, "%lld\n", atomic64_read(&kvt_counters[counter]));
}

#define KVT_COUNTER(_name, _counter)                                              \
	static struct kvt_counter_attr kvt_attr_##_name = {                       \
		.attr = __ATTR(_name, 0444, kvt_counter_show, NULL),              \
		.counter = _counter,                                              \
	}

KVT_COUNTER(pools_created, KVT_C_POOLS_CREATED);
KVT_COUNTER(taken_frames, KVT_C_TAKEN_FRAMES);
KVT_COUNTER(taken_bytes, KVT_C_TAKEN_BYTES);
KVT_COUNTER(populated_frames, KVT_C_POPULATED_FRAMES);
KVT_COUNTER(reads, KVT_C_READS);
KVT_COUNTER(read_bytes, KVT_C_READ_BYTES);
KVT_COUNTER(writes, KVT_C_WRITES);
KVT_COUNTER(write_bytes, KVT_C_WRITE_BYTES);
KVT_COUNTER(cancelled, KVT_C_CANCELLED);
KVT_COUNTER(errors_io, KVT_C_ERR_IO);
KVT_COUNTER(errors_memory, KVT_C_ERR_MEMORY);
KVT_COUNTER(errors_memlock, KVT_C_ERR_MEMLOCK);
KVT_COUNTER(errors_user_limit, KVT_C_ERR_USER_LIMIT);
KVT_COUNTER(errors_limit, KVT_C_ERR_LIMIT);
KVT_COUNTER(errors_lost, KVT_C_ERR_LOST);

static ssize_t pools_alive_show(struct kobject *kobj, struct kobj_attribute *attr, char *buf)
{
	struct kvt_pool *pool;
	unsigned int n = 0;

	mutex_lock(&kvt_pools_lock);
	list_for_each_entry(pool, &kvt_pools, node_in_list)
		n++;
	mutex_unlock(&kvt_pools_lock);
	return sysfs_emit(buf, "%u\n", n);
}
static struct kobj_attribute kvt_attr_pools_alive = __ATTR_RO(pools_alive);

static ssize_t bytes_show(struct kobject *kobj, struct kobj_attribute *attr, char *buf)
{
	return sysfs_emit(buf, "%llu\n", kvt_account_total());
}
static struct kobj_attribute kvt_attr_bytes = __ATTR_RO(bytes);

/* Bytes of frames whose word says @state. Slow where much memory is: every word is looked at. */
static ssize_t kvt_state_bytes(char *buf, u32 state)
{
	struct kvt_pool *pool;
	u32 counts[4];
	u64 bytes = 0;

	mutex_lock(&kvt_pools_lock);
	list_for_each_entry(pool, &kvt_pools, node_in_list) {
		kvt_pool_count_words(pool, counts);
		bytes += (u64)counts[state] * pool->frame_bytes;
	}
	mutex_unlock(&kvt_pools_lock);
	return sysfs_emit(buf, "%llu\n", bytes);
}

#define KVT_STATE_BYTES(_name, _state)                                                           \
	static ssize_t _name##_show(struct kobject *kobj, struct kobj_attribute *attr, char *buf) \
	{                                                                                         \
		return kvt_state_bytes(buf, _state);                                              \
	}                                                                                         \
	static struct kobj_attribute kvt_attr_##_name = __ATTR_RO(_name)

KVT_STATE_BYTES(free_bytes, KVTIER_WORD_FREE);
KVT_STATE_BYTES(held_bytes, KVTIER_WORD_HELD);
KVT_STATE_BYTES(clean_bytes, KVTIER_WORD_CLEAN);

static struct attribute *kvt_root_attrs[] = {
	&kvt_attr_pools_alive.attr,
	&kvt_attr_bytes.attr,
	&kvt_attr_free_bytes.attr,
	&kvt_attr_held_bytes.attr,
	&kvt_attr_clean_bytes.attr,
	&kvt_attr_pools_created.attr.attr,
	&kvt_attr_taken_frames.attr.attr,
	&kvt_attr_taken_bytes.attr.attr,
	&kvt_attr_populated_frames.attr.attr,
	&kvt_attr_reads.attr.attr,
	&kvt_attr_read_bytes.attr.attr,
	&kvt_attr_writes.attr.attr,
	&kvt_attr_write_bytes.attr.attr,
	&kvt_attr_cancelled.attr.attr,
	&kvt_attr_errors_io.attr.attr,
	&kvt_attr_errors_memory.attr.attr,
	&kvt_attr_errors_memlock.attr.attr,
	&kvt_attr_errors_user_limit.attr.attr,
	&kvt_attr_errors_limit.attr.attr,
	&kvt_attr_errors_lost.attr.attr,
	NULL
};

static const struct attribute_group kvt_root_group = { .attrs = kvt_root_attrs };

/* ---- a pool's ---- */

struct kvt_pool_dir {
	struct kobject kobj;
	struct kvt_pool *pool; /* there as long as the directory is in sysfs */
};

static struct kvt_pool *kvt_dir_pool(struct kobject *kobj)
{
	return container_of(kobj, struct kvt_pool_dir, kobj)->pool;
}

#define KVT_POOL_ATTR(_name, _format, _value)                                                          \
	static ssize_t pool_##_name##_show(struct kobject *kobj, struct kobj_attribute *attr, char *buf) \
	{                                                                                              \
		struct kvt_pool *pool = kvt_dir_pool(kobj);                                            \
											       \
		return sysfs_emit(buf, _format "\n", _value);                                          \
	}                                                                                              \
	static struct kobj_attribute kvt_pool_attr_##_name = __ATTR(_name, 0444, pool_##_name##_show, NULL)

KVT_POOL_ATTR(owner, "%u", from_kuid(&init_user_ns, pool->inode->i_uid));
KVT_POOL_ATTR(group, "%u", from_kgid(&init_user_ns, pool->inode->i_gid));
KVT_POOL_ATTR(mode, "%04o", pool->mode);
KVT_POOL_ATTR(frame_bytes, "%u", pool->frame_bytes);
KVT_POOL_ATTR(frames, "%u", pool->n_frames);
KVT_POOL_ATTR(node, "%d", pool->node);
KVT_POOL_ATTR(bytes, "%llu", kvt_account_bytes(&pool->account));
KVT_POOL_ATTR(frames_present, "%d", atomic_read(&pool->present));
KVT_POOL_ATTR(frames_contiguous, "%d", atomic_read(&pool->contiguous));
KVT_POOL_ATTR(taken_frames, "%lld", atomic64_read(&pool->taken));
KVT_POOL_ATTR(populated_frames, "%lld", atomic64_read(&pool->populated));

static ssize_t pool_name_show(struct kobject *kobj, struct kobj_attribute *attr, char *buf)
{
	struct kvt_pool *pool = kvt_dir_pool(kobj);
	ssize_t len;

	mutex_lock(&kvt_pools_lock);
	len = sysfs_emit(buf, "%s\n", pool->name);
	mutex_unlock(&kvt_pools_lock);
	return len;
}
static struct kobj_attribute kvt_pool_attr_name = __ATTR(name, 0444, pool_name_show, NULL);

static struct attribute *kvt_pool_attrs[] = {
	&kvt_pool_attr_name.attr,
	&kvt_pool_attr_owner.attr,
	&kvt_pool_attr_group.attr,
	&kvt_pool_attr_mode.attr,
	&kvt_pool_attr_frame_bytes.attr,
	&kvt_pool_attr_frames.attr,
	&kvt_pool_attr_node.attr,
	&kvt_pool_attr_bytes.attr,
	&kvt_pool_attr_frames_present.attr,
	&kvt_pool_attr_frames_contiguous.attr,
	&kvt_pool_attr_taken_frames.attr,
	&kvt_pool_attr_populated_frames.attr,
	NULL
};
ATTRIBUTE_GROUPS(kvt_pool);

static void kvt_dir_release(struct kobject *kobj)
{
	kfree(container_of(kobj, struct kvt_pool_dir, kobj));
}

static const struct kobj_type kvt_dir_type = {
	.sysfs_ops = &kobj_sysfs_ops,
	.release = kvt_dir_release,
	.default_groups = kvt_pool_groups,
};

int kvt_sysfs_add(struct kvt_pool *pool)
{
	struct kvt_pool_dir *dir;
	int err;

	dir = kzalloc(sizeof(*dir), GFP_KERNEL_ACCOUNT);
	if (!dir)
		return -ENOMEM;
	dir->pool = pool;
	dir->kobj.kset = kvt_pool_dirs;
	err = kobject_init_and_add(&dir->kobj, &kvt_dir_type, NULL, "%llu", pool->id);
	if (err) {
		kobject_put(&dir->kobj);
		return err;
	}
	pool->dir = dir;
	return 0;
}

void kvt_sysfs_remove(struct kvt_pool *pool)
{
	kobject_del(&pool->dir->kobj);
	kobject_put(&pool->dir->kobj);
}

int kvt_sysfs_init(void)
{
	int err;

	kvt_root = kobject_create_and_add("kvtier", kernel_kobj);
	if (!kvt_root)
		return -ENOMEM;
	err = sysfs_create_group(kvt_root, &kvt_root_group);
	if (err)
		goto put_root;
	kvt_pool_dirs = kset_create_and_add("pools", NULL, kvt_root);
	if (!kvt_pool_dirs) {
		err = -ENOMEM;
		goto put_root;
	}
	return 0;

put_root:
	kobject_put(kvt_root);
	return err;
}

void kvt_sysfs_exit(void)
{
	kset_unregister(kvt_pool_dirs);
	sysfs_remove_group(kvt_root, &kvt_root_group);
	kobject_put(kvt_root);
}
