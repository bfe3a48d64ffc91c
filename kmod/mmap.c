// SPDX-License-Identifier: GPL-2.0-only
/*
 * A pool's mappings: frames, state words and header, all of real pages.
 *
 * A frame's pages enter a page table under map_lock, which who takes them holds for writing: no mapping can keep pages
 * that the frame has lost.
 */
#include <linux/mm.h>
#include <linux/vmalloc.h>

#include "compat.h"
#include "internal.h"

#define KVT_FAULT_PAGES 32u /* mapped at one fault */

/* Map some of a frame's pages around the one that was touched. */
static vm_fault_t kvt_map_around(struct vm_fault *vmf, const struct kvt_frame *frame, u32 frame_pages, u32 touched)
{
	struct vm_area_struct *vma = vmf->vma;
	u32 before = touched % KVT_FAULT_PAGES, n, i, run = 0, in_run = 0;
	struct page *pages[KVT_FAULT_PAGES], *page;
	unsigned long left, address;
	int err;

	before = min_t(unsigned long, before, (vmf->address - vma->vm_start) >> PAGE_SHIFT);
	n = min(KVT_FAULT_PAGES, frame_pages - (touched - before));
	address = (vmf->address & PAGE_MASK) - ((unsigned long)before << PAGE_SHIFT);
	n = min_t(unsigned long, n, (vma->vm_end - address) >> PAGE_SHIFT);

	in_run = touched - before;
	while (in_run >= frame->runs[run].bv_len >> PAGE_SHIFT)
		in_run -= frame->runs[run++].bv_len >> PAGE_SHIFT;
	for (i = 0; i < n; i++) {
		pages[i] = frame->runs[run].bv_page + in_run;
		if (++in_run == frame->runs[run].bv_len >> PAGE_SHIFT) {
			run++;
			in_run = 0;
		}
	}
	page = pages[before];

	left = n;
	err = vm_insert_pages(vma, address, pages, &left);
	/* Some are there already: then only the one that was asked for. */
	if (err == -EBUSY)
		err = vm_insert_page(vma, vmf->address & PAGE_MASK, page);
	if (err == -ENOMEM)
		return VM_FAULT_OOM;
	return !err || err == -EBUSY ? VM_FAULT_NOPAGE : VM_FAULT_SIGBUS;
}

static vm_fault_t kvt_frames_fault(struct vm_fault *vmf)
{
	struct kvt_pool *pool = vmf->vma->vm_private_data;
	u32 index = vmf->pgoff / pool->frame_pages;
	struct kvt_frame *frame;
	vm_fault_t ret;
	bool had_memory;
	int err;

	/* The mapping cannot grow, but what mmap() checked is cheap to check again. */
	if (index >= pool->n_frames)
		return VM_FAULT_SIGBUS;
	frame = &pool->frames[index];
	for (;;) {
		down_read(&pool->map_lock);
		if (frame->runs) {
			ret = kvt_map_around(vmf, frame, pool->frame_pages, vmf->pgoff % pool->frame_pages);
			up_read(&pool->map_lock);
			return ret;
		}
		had_memory = frame->had_memory;
		up_read(&pool->map_lock);
		if (had_memory || !(pool->flags & KVTIER_POOL_LAZY))
			break;
		err = kvt_frame_populate(pool, index);
		if (err < 0)
			return VM_FAULT_SIGBUS;
	}
	kvt_count(KVT_C_ERR_LOST, 1);
	return VM_FAULT_SIGBUS;
}

static const struct vm_operations_struct kvt_frames_vm_ops = {
	.fault = kvt_frames_fault,
};

static vm_fault_t kvt_table_fault(struct vm_fault *vmf, void *table)
{
	struct page *page = vmalloc_to_page(table);

	get_page(page);
	vmf->page = page;
	return 0;
}

static vm_fault_t kvt_words_fault(struct vm_fault *vmf)
{
	struct kvt_pool *pool = vmf->vma->vm_private_data;
	unsigned long offset = (vmf->pgoff << PAGE_SHIFT) - KVTIER_MMAP_WORDS;

	if (offset >= PAGE_ALIGN(pool->n_frames * sizeof(u64)))
		return VM_FAULT_SIGBUS;
	return kvt_table_fault(vmf, (void *)pool->words + offset);
}

static const struct vm_operations_struct kvt_words_vm_ops = {
	.fault = kvt_words_fault,
};

static vm_fault_t kvt_header_fault(struct vm_fault *vmf)
{
	struct kvt_pool *pool = vmf->vma->vm_private_data;

	if (vmf->pgoff != KVTIER_MMAP_HEADER >> PAGE_SHIFT)
		return VM_FAULT_SIGBUS;
	return kvt_table_fault(vmf, pool->header);
}

static const struct vm_operations_struct kvt_header_vm_ops = {
	.fault = kvt_header_fault,
};

int kvt_pool_mmap(struct file *file, struct vm_area_struct *vma)
{
	struct kvt_pool *pool = file->private_data;
	u64 start = (u64)vma->vm_pgoff << PAGE_SHIFT, bytes = vma->vm_end - vma->vm_start, base, limit;
	const struct vm_operations_struct *ops;

	if (vma->vm_pgoff > ULONG_MAX >> PAGE_SHIFT)
		return -EINVAL;
	/* MAP_SHARED; VM_SHARED is gone already where the descriptor is read-only. */
	if (!(vma->vm_flags & VM_MAYSHARE))
		return -EINVAL;
	if (start >= KVTIER_MMAP_HEADER) {
		base = KVTIER_MMAP_HEADER;
		limit = PAGE_ALIGN(KVTIER_HEADER_BYTES);
		ops = &kvt_header_vm_ops;
	} else if (start >= KVTIER_MMAP_WORDS) {
		base = KVTIER_MMAP_WORDS;
		limit = PAGE_ALIGN(pool->n_frames * sizeof(u64));
		ops = &kvt_words_vm_ops;
	} else {
		base = 0;
		limit = (u64)pool->n_frames * pool->frame_bytes;
		ops = &kvt_frames_vm_ops;
	}
	if (start - base > limit || bytes > limit - (start - base))
		return -EINVAL;

	vm_flags_set(vma, VM_DONTCOPY | VM_DONTEXPAND | VM_DONTDUMP);
	if (ops == &kvt_frames_vm_ops)
		vm_flags_set(vma, VM_MIXEDMAP);
	vma->vm_private_data = pool;
	vma->vm_ops = ops;
	return 0;
}
