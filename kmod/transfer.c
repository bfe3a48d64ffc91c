// SPDX-License-Identifier: GPL-2.0-only
/*
 * Transfers between frames and files: begun in batches, completed one by one.
 *
 * A file that was opened with O_DIRECT is tried without blocking from the submitter; what would block, and everything
 * that goes through the page cache, is begun by a worker, with the submitter's credentials and memory cgroup. An item
 * holds its file, its pool's file and its queue's file, so that nothing goes away before it; it is one of the @depth
 * that were allocated with the queue, from acceptance until it is reaped: that is the bound of what is in flight.
 */
#include <linux/anon_inodes.h>
#include <linux/backing-dev.h>
#include <linux/cred.h>
#include <linux/eventfd.h>
#include <linux/file.h>
#include <linux/magic.h>
#include <linux/memcontrol.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/poll.h>
#include <linux/sched/mm.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>
#include <linux/uaccess.h>
#include <linux/uio.h>

#include "compat.h"
#include "internal.h"
#include "trace.h"

#define KVT_WORKERS 16 /* of a queue: a file that hangs holds up nobody else */
#define KVT_REAP    32u

struct kvt_item *kvt_item_alloc(struct kvt_queue *queue)
{
	struct kvt_item *item;
	unsigned long flags;

	spin_lock_irqsave(&queue->lock, flags);
	item = list_first_entry_or_null(&queue->free, struct kvt_item, node);
	if (item)
		list_del_init(&item->node);
	spin_unlock_irqrestore(&queue->lock, flags);
	return item;
}

void kvt_item_free(struct kvt_item *item)
{
	struct kvt_queue *queue = item->queue;
	unsigned long flags;

	spin_lock_irqsave(&queue->lock, flags);
	list_add(&item->node, &queue->free);
	spin_unlock_irqrestore(&queue->lock, flags);
}

static bool kvt_item_freezes(const struct kvt_item *item)
{
	return item->write && S_ISREG(file_inode(item->iocb.ki_filp)->i_mode);
}

/* The transfer is over: let go of all but the queue, and tell. Any context. */
static void kvt_item_finish(struct kvt_item *item, long result)
{
	struct kvt_queue *queue = item->queue;
	struct file *queue_file = item->queue_file;
	struct io_uring_cmd *cmd = item->cmd;
	unsigned long flags;

	/* A worker has no signals; what a submitter was interrupted with is for system calls only. */
	if (result == -ERESTARTSYS || result == -ERESTARTNOINTR || result == -ERESTARTNOHAND ||
	    result == -ERESTART_RESTARTBLOCK)
		result = -EINTR;
	item->result = result;
	trace_kvtier_xfer_done(item->pool->id, item->frame, item->write, item->result);
	if (result >= 0) {
		kvt_count(item->write ? KVT_C_WRITES : KVT_C_READS, 1);
		kvt_count(item->write ? KVT_C_WRITE_BYTES : KVT_C_READ_BYTES, result);
	} else {
		kvt_count(result == -ECANCELED ? KVT_C_CANCELLED : KVT_C_ERR_IO, 1);
	}

	kvt_frame_put(item->pool, item->frame);
	fput(item->iocb.ki_filp);
	fput(item->pool_file);
	put_cred(item->cred);
	mem_cgroup_put(item->memcg);

	spin_lock_irqsave(&queue->lock, flags);
	queue->in_flight--;
	if (!cmd)
		list_add_tail(&item->node, &queue->done);
	spin_unlock_irqrestore(&queue->lock, flags);
	/* The item may be another transfer by now; the queue's file is still held. */
	if (!cmd && queue->eventfd)
		kvt_eventfd_signal(queue->eventfd);
	wake_up_all(&queue->wait);
	if (cmd)
		kvt_uring_complete(cmd);
	else
		fput(queue_file);
}

static void kvt_item_queue(struct kvt_item *item)
{
	struct kvt_queue *queue = item->queue;
	unsigned long flags;

	item->iocb.ki_flags &= ~IOCB_NOWAIT;
	spin_lock_irqsave(&queue->lock, flags);
	list_add_tail(&item->node, &queue->waiting);
	queue_work(queue->workers, &item->work);
	spin_unlock_irqrestore(&queue->lock, flags);
}

static void kvt_item_done(struct kvt_item *item, long result)
{
	if (result == -EAGAIN && (item->iocb.ki_flags & IOCB_NOWAIT))
		kvt_item_queue(item);
	else
		kvt_item_finish(item, result);
}

/* What was begun, and not done at once, ends here: with it the protection against freezing. */
static void kvt_item_complete(struct kiocb *iocb, long result)
{
	struct kvt_item *item = container_of(iocb, struct kvt_item, iocb);

	if (kvt_item_freezes(item))
		kvt_kiocb_end_write(iocb);
	kvt_item_done(item, result);
}

/* false: would block. The submitter must not wait for a frozen file system, also where the VFS would. */
static bool kvt_start_write(struct kiocb *iocb)
{
	struct super_block *sb = file_inode(iocb->ki_filp)->i_sb;

	if (!(iocb->ki_flags & IOCB_NOWAIT)) {
		if (!KVT_VFS_STARTS_WRITE)
			kvt_kiocb_start_write(iocb);
		return true;
	}
	if (!sb_start_write_trylock(sb))
		return false;
	if (KVT_VFS_STARTS_WRITE)
		sb_end_write(sb);
	else /* as kvt_kiocb_start_write() does: lockdep is told that another context will end it */
		__sb_writers_release(sb, SB_FREEZE_WRITE);
	return true;
}

/* Begin the transfer; it completes here, or later by kvt_item_complete(). */
static void kvt_item_issue(struct kvt_item *item)
{
	const struct kvt_frame *frame = &item->pool->frames[item->frame];
	struct kiocb *iocb = &item->iocb;
	struct iov_iter iter;
	ssize_t ret;

	iov_iter_bvec(&iter, item->write ? ITER_SOURCE : ITER_DEST, frame->runs, frame->n_runs,
		      item->pool->frame_bytes);
	iov_iter_advance(&iter, item->frame_offset);
	iov_iter_truncate(&iter, item->bytes);
	if (kvt_item_freezes(item) && !kvt_start_write(iocb)) {
		kvt_item_queue(item);
		return;
	}
	if (item->write)
		ret = vfs_iocb_iter_write(iocb->ki_filp, iocb, &iter);
	else
		ret = vfs_iocb_iter_read(iocb->ki_filp, iocb, &iter);
	if (ret == -EIOCBQUEUED)
		return;
	if (kvt_item_freezes(item) && !KVT_VFS_STARTS_WRITE)
		kvt_kiocb_end_write(iocb);
	kvt_item_done(item, ret);
}

static void kvt_item_work(struct work_struct *work)
{
	struct kvt_item *item = container_of(work, struct kvt_item, work);
	struct kvt_queue *queue = item->queue;
	struct mem_cgroup *memcg, *old_memcg;
	const struct cred *cred, *old_cred;
	unsigned long flags;

	spin_lock_irqsave(&queue->lock, flags);
	list_del_init(&item->node);
	spin_unlock_irqrestore(&queue->lock, flags);
	/* The item may be over before it has been issued; these are taken over from it. */
	cred = item->cred;
	item->cred = NULL;
	memcg = item->memcg;
	item->memcg = NULL;

	old_cred = override_creds(cred);
	old_memcg = set_active_memcg(memcg);
	kvt_item_issue(item);
	set_active_memcg(old_memcg);
	revert_creds(old_cred);
	mem_cgroup_put(memcg);
	put_cred(cred);
}

/*
 * A worker is in the initial namespaces, and has no mm. Files whose reading and writing means more than bytes (those of
 * /proc, /sys and the like) could tell the difference; files on a backing device and on tmpfs cannot.
 */
static bool kvt_file_is_data(const struct file *file)
{
	const struct super_block *sb = file_inode(file)->i_sb;
	umode_t mode = file_inode(file)->i_mode;

	return S_ISBLK(mode) || (S_ISREG(mode) && (sb->s_bdi != &noop_backing_dev_info || sb->s_magic == TMPFS_MAGIC));
}

static int kvt_file_check(const struct file *file, const struct kvtier_xfer *xfer)
{
	bool write = xfer->op == KVTIER_XFER_WRITE;

	if (!(file->f_mode & (write ? FMODE_WRITE : FMODE_READ)))
		return -EBADF;
	if (!kvt_file_is_data(file))
		return -EINVAL;
	if (!(file->f_mode & (write ? FMODE_CAN_WRITE : FMODE_CAN_READ)) ||
	    !(write ? file->f_op->write_iter : file->f_op->read_iter))
		return -EINVAL;
	/* An appending write would go elsewhere than it was told. */
	if (write && (file->f_flags & O_APPEND))
		return -EINVAL;
	if (write && S_ISREG(file_inode(file)->i_mode) && xfer->offset + xfer->bytes > rlimit(RLIMIT_FSIZE))
		return -EFBIG;
	return 0;
}

static int kvt_xfer_check(const struct kvt_pool *pool, const struct kvtier_xfer *xfer)
{
	if (xfer->op > KVTIER_XFER_WRITE || xfer->__reserved)
		return -EINVAL;
	if (xfer->frame >= pool->n_frames || !xfer->bytes || xfer->frame_offset >= pool->frame_bytes ||
	    xfer->bytes > pool->frame_bytes - xfer->frame_offset)
		return -EINVAL;
	if (xfer->offset > LLONG_MAX - xfer->bytes)
		return -EINVAL;
	return 0;
}

/* Fill @item, which is nobody else's yet. On an error it holds nothing. */
int kvt_item_prepare(struct kvt_item *item, struct file *queue_file, int pool_fd, const struct kvtier_xfer *xfer)
{
	struct file *file, *pool_file;
	struct kvt_pool *pool;
	int err;

	pool_file = fget(pool_fd);
	if (!pool_file)
		return -EBADF;
	pool = kvt_pool_of_file(pool_file);
	err = -EBADF;
	if (!pool || (xfer->op == KVTIER_XFER_READ && !(pool_file->f_mode & FMODE_WRITE)))
		goto put_pool_file;
	err = kvt_xfer_check(pool, xfer);
	if (err)
		goto put_pool_file;
	err = -EBADF;
	file = fget(xfer->fd);
	if (!file)
		goto put_pool_file;
	err = kvt_file_check(file, xfer);
	if (err)
		goto put_file;
	err = kvt_frame_get(pool, xfer->frame);
	if (err)
		goto put_file;

	init_sync_kiocb(&item->iocb, file);
	item->iocb.ki_pos = xfer->offset;
	item->iocb.ki_complete = kvt_item_complete;
	item->write = xfer->op == KVTIER_XFER_WRITE;
	if (item->write)
		item->iocb.ki_flags |= IOCB_WRITE;
	item->pool_file = pool_file;
	item->pool = pool;
	item->queue_file = get_file(queue_file);
	item->cred = get_current_cred();
	item->memcg = get_mem_cgroup_from_mm(current->mm);
	item->cmd = NULL;
	item->frame = xfer->frame;
	item->frame_offset = xfer->frame_offset;
	item->bytes = xfer->bytes;
	item->user = xfer->user;
	return 0;

put_file:
	fput(file);
put_pool_file:
	fput(pool_file);
	return err;
}

/* From here on the item is its completion's. */
void kvt_item_start(struct kvt_item *item)
{
	struct kvt_queue *queue = item->queue;
	struct kiocb *iocb = &item->iocb;
	unsigned long flags;

	spin_lock_irqsave(&queue->lock, flags);
	queue->in_flight++;
	spin_unlock_irqrestore(&queue->lock, flags);
	trace_kvtier_xfer_start(item->pool->id, item->frame, item->write, iocb->ki_pos, item->bytes);
	if (!(iocb->ki_flags & IOCB_DIRECT) || !(iocb->ki_filp->f_mode & FMODE_NOWAIT)) {
		kvt_item_queue(item);
		return;
	}
	iocb->ki_flags |= IOCB_NOWAIT;
	kvt_item_issue(item);
}

static long kvt_queue_submit(struct kvt_call *call)
{
	struct kvt_queue *queue = call->file->private_data;
	struct kvtier_submit *arg = call->arg;
	u32 min_bytes = offsetofend(struct kvtier_xfer, user), i;
	struct kvtier_xfer xfer;
	struct kvt_item *item;
	int err = 0;

	if (arg->flags)
		return -EOPNOTSUPP;
	if (!arg->n || arg->__reserved || arg->item_bytes < min_bytes)
		return -EINVAL;
	if (arg->item_bytes > PAGE_SIZE)
		return -E2BIG;
	for (i = 0; i < arg->n; i++) {
		if (fatal_signal_pending(current)) {
			err = -EINTR;
			break;
		}
		item = kvt_item_alloc(queue);
		if (!item)
			break;
		err = copy_struct_from_user(&xfer, sizeof(xfer),
					    u64_to_user_ptr(arg->items + (u64)i * arg->item_bytes), arg->item_bytes);
		if (!err)
			err = kvt_item_prepare(item, call->file, arg->pool_fd, &xfer);
		if (err) {
			kvt_item_free(item);
			break;
		}
		kvt_item_start(item);
		cond_resched();
	}
	return i ?: err;
}

/* Back to the head, in order: they could not be told. */
static void kvt_undo_reap(struct kvt_queue *queue, struct list_head *items)
{
	unsigned long flags;

	spin_lock_irqsave(&queue->lock, flags);
	list_splice(items, &queue->done);
	spin_unlock_irqrestore(&queue->lock, flags);
}

static long kvt_queue_reap(struct kvt_call *call)
{
	struct kvt_queue *queue = call->file->private_data;
	struct kvtier_reap *arg = call->arg;
	struct kvtier_done done[KVT_REAP];
	struct kvt_item *item;
	unsigned long flags;
	LIST_HEAD(items);
	u32 got = 0, n;

	if (arg->flags)
		return -EOPNOTSUPP;
	if (!arg->n || arg->__reserved)
		return -EINVAL;
	do {
		spin_lock_irqsave(&queue->lock, flags);
		for (n = 0; n < KVT_REAP && got + n < arg->n && !list_empty(&queue->done); n++) {
			item = list_first_entry(&queue->done, struct kvt_item, node);
			list_move_tail(&item->node, &items);
			done[n] = (struct kvtier_done) { .user = item->user, .result = item->result };
		}
		spin_unlock_irqrestore(&queue->lock, flags);
		if (n && copy_to_user(u64_to_user_ptr(arg->done + (u64)got * sizeof(done[0])), done,
				      n * sizeof(done[0]))) {
			kvt_undo_reap(queue, &items);
			return got ?: -EFAULT;
		}
		spin_lock_irqsave(&queue->lock, flags);
		list_splice_init(&items, &queue->free);
		spin_unlock_irqrestore(&queue->lock, flags);
		got += n;
	} while (n == KVT_REAP && got < arg->n);
	return got;
}

static long kvt_queue_cancel(struct kvt_call *call)
{
	struct kvt_queue *queue = call->file->private_data;
	struct kvtier_cancel *arg = call->arg;
	struct kvt_item *item, *next;
	unsigned long flags;
	LIST_HEAD(items);
	long n = 0;

	if (arg->flags)
		return -EOPNOTSUPP;
	spin_lock_irqsave(&queue->lock, flags);
	list_for_each_entry_safe(item, next, &queue->waiting, node) {
		/* A worker that has begun takes the item off the list next. */
		if (!item->cmd && item->user == arg->user && cancel_work(&item->work))
			list_move_tail(&item->node, &items);
	}
	spin_unlock_irqrestore(&queue->lock, flags);
	list_for_each_entry_safe(item, next, &items, node) {
		list_del_init(&item->node);
		kvt_item_finish(item, -ECANCELED);
		n++;
	}
	return n;
}

static bool kvt_queue_idle(struct kvt_queue *queue)
{
	unsigned long flags;
	bool idle;

	spin_lock_irqsave(&queue->lock, flags);
	idle = !queue->in_flight;
	spin_unlock_irqrestore(&queue->lock, flags);
	return idle;
}

static long kvt_queue_drain(struct kvt_call *call)
{
	struct kvt_queue *queue = call->file->private_data;
	struct kvtier_drain *arg = call->arg;

	if (arg->flags)
		return -EOPNOTSUPP;
	return wait_event_killable(queue->wait, kvt_queue_idle(queue)) ? -EINTR : 0;
}

static const struct kvt_ioctl kvt_queue_ioctls[] = {
	KVT_IOCTL(KVTIER_IOC_SUBMIT, kvtier_submit, items, false, true, kvt_queue_submit),
	KVT_IOCTL(KVTIER_IOC_REAP, kvtier_reap, done, false, true, kvt_queue_reap),
	KVT_IOCTL(KVTIER_IOC_CANCEL, kvtier_cancel, user, false, true, kvt_queue_cancel),
	KVT_IOCTL(KVTIER_IOC_DRAIN, kvtier_drain, flags, false, true, kvt_queue_drain),
};

static long kvt_queue_ioctl(struct file *file, unsigned int cmd, unsigned long arg)
{
	return kvt_ioctl(file, cmd, arg, kvt_queue_ioctls, ARRAY_SIZE(kvt_queue_ioctls));
}

static __poll_t kvt_queue_poll(struct file *file, poll_table *table)
{
	struct kvt_queue *queue = file->private_data;

	poll_wait(file, &queue->wait, table);
	return !list_empty(&queue->done) ? EPOLLIN | EPOLLRDNORM : 0;
}

/*
 * At each close of a descriptor. Items hold the file: release comes after the last. A process that ends cannot be killed
 * any more: it must not wait for a file system that hangs.
 */
static int kvt_queue_flush(struct file *file, fl_owner_t id)
{
	struct kvt_queue *queue = file->private_data;

	if (current->flags & PF_EXITING)
		return 0;
	return wait_event_killable(queue->wait, kvt_queue_idle(queue)) ? -EINTR : 0;
}

static void kvt_queue_free(struct kvt_queue *queue)
{
	if (queue->eventfd)
		eventfd_ctx_put(queue->eventfd);
	/* The last item's worker may not have returned yet. */
	destroy_workqueue(queue->workers);
	kvfree(queue->items);
	kvt_uncharge(&queue->account, kvt_account_bytes(&queue->account));
	kvt_account_exit(&queue->account);
	kfree(queue);
}

static int kvt_queue_release(struct inode *inode, struct file *file)
{
	kvt_queue_free(file->private_data);
	return 0;
}

const struct file_operations kvt_queue_fops = {
	.owner = THIS_MODULE,
	.flush = kvt_queue_flush,
	.release = kvt_queue_release,
	.poll = kvt_queue_poll,
	.unlocked_ioctl = kvt_queue_ioctl,
	.compat_ioctl = compat_ptr_ioctl,
	.uring_cmd = kvt_queue_uring_cmd,
	.llseek = noop_llseek,
};

static struct kvt_queue *kvt_queue_new(u32 depth, int eventfd)
{
	u64 bytes = PAGE_ALIGN(depth * sizeof(struct kvt_item));
	struct kvt_queue *queue;
	int err;
	u32 i;

	queue = kzalloc(sizeof(*queue), GFP_KERNEL_ACCOUNT);
	if (!queue)
		return ERR_PTR(-ENOMEM);
	queue->depth = depth;
	init_waitqueue_head(&queue->wait);
	spin_lock_init(&queue->lock);
	INIT_LIST_HEAD(&queue->free);
	INIT_LIST_HEAD(&queue->waiting);
	INIT_LIST_HEAD(&queue->done);

	err = kvt_account_init(&queue->account);
	if (err)
		goto free_queue;
	err = kvt_charge(&queue->account, bytes);
	if (err)
		goto exit_account;
	queue->items = kvzalloc(bytes, GFP_KERNEL_ACCOUNT);
	if (!queue->items) {
		err = -ENOMEM;
		goto uncharge;
	}
	queue->workers = alloc_workqueue("kvtier", WQ_UNBOUND, KVT_WORKERS);
	if (!queue->workers) {
		err = -ENOMEM;
		goto free_items;
	}
	if (eventfd != -1) {
		queue->eventfd = eventfd_ctx_fdget(eventfd);
		if (IS_ERR(queue->eventfd)) {
			err = PTR_ERR(queue->eventfd);
			goto destroy_workers;
		}
	}
	for (i = 0; i < depth; i++) {
		queue->items[i].queue = queue;
		INIT_WORK(&queue->items[i].work, kvt_item_work);
		list_add_tail(&queue->items[i].node, &queue->free);
	}
	return queue;

destroy_workers:
	destroy_workqueue(queue->workers);
free_items:
	kvfree(queue->items);
uncharge:
	kvt_uncharge(&queue->account, bytes);
exit_account:
	kvt_account_exit(&queue->account);
free_queue:
	kfree(queue);
	return ERR_PTR(err);
}

long kvt_queue_create(struct kvt_call *call)
{
	struct kvtier_queue_create *arg = call->arg;
	struct kvt_queue *queue;
	struct file *file;
	int err;

	if (arg->flags)
		return -EOPNOTSUPP;
	if (arg->__reserved || !arg->depth || arg->depth > KVTIER_MAX_DEPTH || arg->eventfd < -1)
		return -EINVAL;
	queue = kvt_queue_new(arg->depth, arg->eventfd);
	if (IS_ERR(queue))
		return PTR_ERR(queue);
	file = anon_inode_getfile("[kvtier-queue]", &kvt_queue_fops, queue, O_RDWR | O_CLOEXEC);
	if (IS_ERR(file)) {
		kvt_queue_free(queue);
		return PTR_ERR(file);
	}
	err = kvt_call_new_fd(call, file);
	if (err) {
		fput(file);
		return err;
	}
	arg->fd = call->new_fd;
	return 0;
}
