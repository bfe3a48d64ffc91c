// SPDX-License-Identifier: GPL-2.0-only
/*
 * Who pays for memory: the module's limits for all and for each user, the user's locked memory, and the memory cgroup.
 *
 * Locked memory is counted in the user's account, not in a process's: pools outlive the process that made them.
 */
#include <linux/capability.h>
#include <linux/cred.h>
#include <linux/limits.h>
#include <linux/memcontrol.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/sched/mm.h>
#include <linux/sched/signal.h>
#include <linux/sched/user.h>
#include <linux/slab.h>

#include "internal.h"

static unsigned long max_bytes;
module_param(max_bytes, ulong, 0644);
MODULE_PARM_DESC(max_bytes, "most bytes that all pools and queues may hold (default: three quarters of memory)");

static unsigned long max_user_bytes;
module_param(max_user_bytes, ulong, 0644);
MODULE_PARM_DESC(max_user_bytes, "most bytes that one user's pools and queues may hold (default: max_bytes)");

struct kvt_owner {
	struct list_head node;
	kuid_t uid;
	u32 refs;
	u64 bytes;
};

static DEFINE_SPINLOCK(kvt_accounts_lock);
static LIST_HEAD(kvt_owners);
static u64 kvt_total;

void kvt_limits_init(void)
{
	if (!max_bytes)
		max_bytes = (totalram_pages() << PAGE_SHIFT) / 4 * 3;
	if (!max_user_bytes)
		max_user_bytes = max_bytes;
}

u64 kvt_max_bytes(void)
{
	return READ_ONCE(max_bytes);
}

u64 kvt_max_user_bytes(void)
{
	return READ_ONCE(max_user_bytes);
}

static struct kvt_owner *kvt_owner_find(kuid_t uid)
{
	struct kvt_owner *owner;

	lockdep_assert_held(&kvt_accounts_lock);
	list_for_each_entry(owner, &kvt_owners, node)
		if (uid_eq(owner->uid, uid))
			return owner;
	return NULL;
}

static struct kvt_owner *kvt_owner_get(kuid_t uid)
{
	struct kvt_owner *owner, *fresh;

	fresh = kzalloc(sizeof(*fresh), GFP_KERNEL_ACCOUNT);
	if (!fresh)
		return NULL;
	spin_lock(&kvt_accounts_lock);
	owner = kvt_owner_find(uid);
	if (!owner) {
		owner = fresh;
		fresh = NULL;
		owner->uid = uid;
		list_add(&owner->node, &kvt_owners);
	}
	owner->refs++;
	spin_unlock(&kvt_accounts_lock);
	kfree(fresh);
	return owner;
}

static void kvt_owner_put(struct kvt_owner *owner)
{
	spin_lock(&kvt_accounts_lock);
	if (--owner->refs)
		owner = NULL;
	else
		list_del(&owner->node);
	spin_unlock(&kvt_accounts_lock);
	kfree(owner);
}

/* The caller pays, now and later. */
int kvt_account_init(struct kvt_account *account)
{
	account->owner = kvt_owner_get(current_fsuid());
	if (!account->owner)
		return -ENOMEM;
	account->user = capable(CAP_IPC_LOCK) ? NULL : get_uid(current_user());
	account->memcg = get_mem_cgroup_from_mm(current->mm);
	account->bytes = 0;
	return 0;
}

void kvt_account_exit(struct kvt_account *account)
{
	WARN_ON_ONCE(account->bytes);
	mem_cgroup_put(account->memcg);
	if (account->user)
		free_uid(account->user);
	kvt_owner_put(account->owner);
}

static int kvt_charge_locked_vm(struct user_struct *user, unsigned long pages)
{
	unsigned long limit = rlimit(RLIMIT_MEMLOCK) >> PAGE_SHIFT;
	long used = atomic_long_read(&user->locked_vm);

	do {
		if (pages > limit || used > limit - pages)
			return -EPERM;
	} while (!atomic_long_try_cmpxchg(&user->locked_vm, &used, used + pages));
	return 0;
}

/* Charge whole pages before they are allocated: -EPERM, -EDQUOT, -ENOSPC, with nothing changed. */
int kvt_charge(struct kvt_account *account, u64 bytes)
{
	struct kvt_owner *owner = account->owner;
	u64 limit = kvt_max_bytes(), user_limit = kvt_max_user_bytes();
	int err = 0;

	if (account->user && kvt_charge_locked_vm(account->user, bytes >> PAGE_SHIFT)) {
		kvt_count(KVT_C_ERR_MEMLOCK, 1);
		return -EPERM;
	}
	spin_lock(&kvt_accounts_lock);
	if (bytes > limit || kvt_total > limit - bytes) {
		err = -ENOSPC;
	} else if (bytes > user_limit || owner->bytes > user_limit - bytes) {
		err = -EDQUOT;
	} else {
		kvt_total += bytes;
		owner->bytes += bytes;
		account->bytes += bytes;
	}
	spin_unlock(&kvt_accounts_lock);
	if (!err)
		return 0;

	kvt_count(err == -ENOSPC ? KVT_C_ERR_LIMIT : KVT_C_ERR_USER_LIMIT, 1);
	if (account->user)
		atomic_long_sub(bytes >> PAGE_SHIFT, &account->user->locked_vm);
	return err;
}

void kvt_uncharge(struct kvt_account *account, u64 bytes)
{
	spin_lock(&kvt_accounts_lock);
	kvt_total -= bytes;
	account->owner->bytes -= bytes;
	account->bytes -= bytes;
	spin_unlock(&kvt_accounts_lock);
	if (account->user)
		atomic_long_sub(bytes >> PAGE_SHIFT, &account->user->locked_vm);
}

u64 kvt_account_bytes(const struct kvt_account *account)
{
	return READ_ONCE(account->bytes);
}

u64 kvt_account_total(void)
{
	return READ_ONCE(kvt_total);
}

u64 kvt_account_of_user(kuid_t uid)
{
	struct kvt_owner *owner;
	u64 bytes;

	spin_lock(&kvt_accounts_lock);
	owner = kvt_owner_find(uid);
	bytes = owner ? owner->bytes : 0;
	spin_unlock(&kvt_accounts_lock);
	return bytes;
}
