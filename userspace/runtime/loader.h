/* SPDX-License-Identifier: MIT */
/*
 * Loads tensors into memory, or a GPU's, at the disk's speed: several large
 * aligned O_DIRECT reads in flight into a small staging ring, each cut to the
 * tensors it covers and copied on while the next ones are read. Other ways to
 * the same bytes, chosen for each shard: buffered reads (what is asked for is
 * in the page cache) and mmap (no O_DIRECT there, or asked for). All give the
 * same bytes or an error.
 */
#ifndef KVT_RUNTIME_LOADER_H
#define KVT_RUNTIME_LOADER_H

#include <stdbool.h>

#include "base/budget.h"
#include "gpu/gpu.h"
#include "runtime/weights.h"

enum kvt_load_mode { KVT_LOAD_AUTO, KVT_LOAD_DIRECT, KVT_LOAD_BUFFERED, KVT_LOAD_MMAP, KVT_LOAD_MODES };

/* One tensor and where it goes: t->bytes bytes at @host, or at @device of the params' GPU. */
struct kvt_load_item {
	const struct kvt_tensor *tensor;
	void *host;
	kvt_dptr device;
};

struct kvt_load_params {
	uint32_t mode; /* enum kvt_load_mode; DIRECT too gives way to MMAP where there is no O_DIRECT */
	uint32_t io;   /* enum kvt_io_kind: io_uring, or threads where it is denied */
	struct kvt_gpu *gpu; /* for items with @device */
	struct kvt_budget *budget; /* NULL, or what staging and stacks are charged to; small: fewer, smaller reads */
	uint64_t piece_bytes; /* of one read: a multiple of 4 KiB; 0: 4 MiB */
	uint32_t depth;	      /* reads in flight; 0: 4 */
	/* After each piece, on the calling thread; not 0 ends the load with -ECANCELED. */
	int (*progress)(void *user, uint64_t done, uint64_t total);
	void *user;
};

struct kvt_load_report {
	uint64_t bytes;		/* delivered */
	uint64_t read_bytes;	/* read for that, with alignment and small gaps */
	uint64_t staging_bytes; /* charged */
	bool pinned;		/* the staging ring is */
	uint32_t shards[KVT_LOAD_MODES]; /* read by each mode (never AUTO) */
	const char *io;		/* "io_uring", "threads", "none" (mmap only) */
};

/*
 * Load @n tensors of @w. On an error the destinations' contents are undefined;
 * nothing is in flight any more. -EINVAL, -ENOMEM (staging or stacks),
 * -ESTALE (a file changed), -ECANCELED, -EPERM / -ENOSYS (io_uring asked for by
 * name and denied), or what a read or the GPU said. @report may be NULL.
 */
int kvt_load(const struct kvt_weights *w, const struct kvt_load_item *items, uint32_t n,
	     const struct kvt_load_params *params, struct kvt_load_report *report);

/*
 * Place all tensors of @w in one block of host memory at @base (page aligned)
 * as they lie in their files, which is what reads go straight into. A tensor
 * whose place in the file does not suit its elements is put behind them.
 * items [w->n_tensors] get tensor and host. Returns the bytes of the block;
 * with @base NULL it does only that.
 */
uint64_t kvt_load_layout(const struct kvt_weights *w, void *base, struct kvt_load_item *items);

/* All tensors of a model in host memory. */
struct kvt_load_image {
	uint8_t *base; /* huge pages where there are some */
	uint64_t bytes;
	struct kvt_load_item *items; /* [w->n_tensors], as w->tensors */
	struct kvt_budget *budget;
};

/*
 * Check that they fit, allocate the block (charged to the params' budget, and
 * kvt_load_fits()), lay it out and load. -ENOMEM, or as kvt_load().
 */
int kvt_load_image(const struct kvt_weights *w, const struct kvt_load_params *params, struct kvt_load_image *image,
		   struct kvt_load_report *report);
void kvt_load_image_free(struct kvt_load_image *image); /* a zeroed one too */

/*
 * Whether @bytes of weights can be had where they are to go, before anything is
 * allocated: the GPU's free memory, or what the kernel and the cgroup say is
 * left of RAM. -ENOMEM: how much is asked, how much there is.
 */
int kvt_load_fits(uint64_t bytes, struct kvt_gpu *gpu);

#endif
