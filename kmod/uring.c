// SPDX-License-Identifier: GPL-2.0-only
/* Transfers as io_uring commands on a queue: one command, one transfer, one completion in the ring. */
#include <linux/file.h>
#include <linux/uaccess.h>

#include "compat.h"
#include "internal.h"

struct kvt_uring_pdu {
	struct kvt_item *item;
};

static struct kvt_uring_pdu *kvt_uring_pdu(struct io_uring_cmd *cmd)
{
	BUILD_BUG_ON(sizeof(struct kvt_uring_pdu) > sizeof(cmd->pdu));
	return (struct kvt_uring_pdu *)cmd->pdu;
}

#if IS_ENABLED(CONFIG_IO_URING)

KVT_URING_TASK_WORK(kvt_uring_tell, cmd, issue_flags)
{
	struct kvt_item *item = kvt_uring_pdu(cmd)->item;
	struct file *queue_file = item->queue_file;
	s32 result = item->result;

	kvt_item_free(item);
	fput(queue_file);
	kvt_uring_done(cmd, result, issue_flags);
}

/* Any context. The ring hears of it from its own task. */
void kvt_uring_complete(struct io_uring_cmd *cmd)
{
	io_uring_cmd_complete_in_task(cmd, kvt_uring_tell);
}

int kvt_queue_uring_cmd(struct io_uring_cmd *cmd, unsigned int issue_flags)
{
	const struct kvtier_uring_xfer *payload = kvt_uring_payload(cmd);
	struct kvt_queue *queue = cmd->file->private_data;
	struct kvtier_uring_xfer arg;
	struct kvtier_xfer xfer;
	struct kvt_item *item;
	int err;

	if (cmd->cmd_op != KVTIER_URING_CMD_XFER)
		return -ENOTTY;
	/* The SQE is shared with user space: read once. */
	arg.item = READ_ONCE(payload->item);
	arg.pool_fd = READ_ONCE(payload->pool_fd);
	arg.__reserved = READ_ONCE(payload->__reserved);
	if (arg.__reserved)
		return -EINVAL;
	if (copy_from_user(&xfer, u64_to_user_ptr(arg.item), sizeof(xfer)))
		return -EFAULT;
	item = kvt_item_alloc(queue);
	if (!item)
		return -EBUSY;
	err = kvt_item_prepare(item, cmd->file, arg.pool_fd, &xfer);
	if (err) {
		kvt_item_free(item);
		return err;
	}
	item->cmd = cmd;
	kvt_uring_pdu(cmd)->item = item;
	kvt_item_start(item);
	return -EIOCBQUEUED;
}

#else

int kvt_queue_uring_cmd(struct io_uring_cmd *cmd, unsigned int issue_flags)
{
	return -EOPNOTSUPP;
}

void kvt_uring_complete(struct io_uring_cmd *cmd)
{
}

#endif
