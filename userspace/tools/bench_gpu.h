/* SPDX-License-Identifier: MIT */
/* kvtier bench gpu inside: the device at hand, how work on it is timed, and the table of results. */
#ifndef KVT_TOOLS_BENCH_GPU_H
#define KVT_TOOLS_BENCH_GPU_H

#include <jansson.h>

#include "gpu/gpu.h"
#include "kvtier.h"

#define GB_BYTES (256ull << 20) /* that copies move */
#define GB_ROUNDS_MAX 64
#define GB_SETS 64 /* of small work, each of its own memory, so that the L2 does not hold it */

struct gb {
	struct kvt_gpu *gpu;
	const struct kvt_gpu_ops *ops;
	uint32_t rounds;
	kvt_event from, to;
	kvt_stream stream;
	kvt_dptr device, lists; /* GB_BYTES; addresses for kernels */
	uint8_t *host;		/* GB_BYTES, pinned */
	kvt_kernel copy, append, extend, digest, read;
	double read_rate, copy_rate, up_rate, down_rate; /* bytes a second: the limits */
	uint64_t free_bytes;
	json_t *rows; /* NULL: rows are printed */
	bool below;   /* a row was */
};

/* A result: @limit is what bounds it, measured in the same run; @wanted is in the same unit, 0: nothing is asked for. */
struct gb_row {
	const char *work, *unit, *limit_of;
	double value, limit, wanted;
	bool less; /* is better */
};
void gb_head(struct gb *g);
void gb_row(struct gb *g, const struct gb_row *row);

/* Seconds that the device takes for what @work puts on the stream: the median. */
int gb_timed(struct gb *g, int (*work)(struct gb *, void *), void *arg, double *seconds);

/* The same for a graph of what @work puts there. */
int gb_timed_graph(struct gb *g, int (*work)(struct gb *, void *), void *arg, double *seconds);

/* bench_gpu_attend.c: attention; bench_gpu_cache.c: through a cache. -EBADMSG: what was timed is wrong. */
int gb_attention(struct gb *g);
int gb_cache(struct gb *g);

#endif
