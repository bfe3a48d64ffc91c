/* SPDX-License-Identifier: MIT */
/*
 * What is put on a stream, as data: so that the backends without a GPU can
 * record it in a graph, replay it, and hold it back.
 */
#ifndef KVT_GPU_OP_H
#define KVT_GPU_OP_H

#include "gpu/gpu.h"

enum kvt_op_kind { KVT_OP_COPY, KVT_OP_COPY_2D, KVT_OP_MEMSET, KVT_OP_LAUNCH, KVT_OP_RECORD, KVT_OP_WAIT };

struct kvt_op {
	enum kvt_op_kind kind;
	union {
		struct {
			void *dst;
			const void *src;
			uint64_t dst_pitch, src_pitch, width, height; /* a plain copy has height 1 */
		} copy;
		struct {
			void *dst;
			uint64_t bytes;
			uint8_t value;
		} set;
		struct {
			const struct kvt_twin_entry *twin;
			struct kvt_dim3 grid, block;
			uint64_t args[KVT_KERNEL_ARG_BYTES / 8];
		} launch;
		struct {
			kvt_event event;
			uint64_t turn; /* which recording of the event; the backend's */
		} event;
	};
};

struct kvt_op_list {
	struct kvt_op *ops;
	uint32_t n, room;
};

/* Do a copy, a memset or a launch. What the twin returned, else 0. */
int kvt_op_run(const struct kvt_op *op);

/* 0, or -ENOMEM with the list as it was. */
int kvt_op_append(struct kvt_op_list *list, const struct kvt_op *op);
void kvt_op_list_free(struct kvt_op_list *list);

/* Bytes that a 2-D copy spans on either side, 0 where it copies nothing. -EINVAL: rows overlap, or leave the address space. */
int kvt_span_2d(uint64_t dst_pitch, uint64_t src_pitch, uint64_t width, uint64_t height, uint64_t *dst_bytes,
		uint64_t *src_bytes);

/* 0, or -EINVAL: no tensor map is of that form (gpu.h). */
int kvt_tensor_map_check(kvt_dptr base, uint64_t bytes, uint32_t row_bytes, uint32_t rows);

/* What backends without a copy engine put into a map: what it is of. */
void kvt_tensor_map_say(kvt_dptr base, uint64_t bytes, uint32_t row_bytes, uint32_t rows, uint64_t *map);

/* 0, or -EINVAL as a driver would refuse the launch. */
int kvt_launch_check(const struct kvt_twin_entry *twin, struct kvt_dim3 grid, struct kvt_dim3 block, uint32_t n_args);

/* Fill a launch, copying the arguments' values. -EINVAL, as a driver would refuse it. */
int kvt_op_launch(struct kvt_op *op, const struct kvt_twin_entry *twin, struct kvt_dim3 grid, struct kvt_dim3 block,
		  void *const *args, uint32_t n_args);

/* The twin's index in kvt_twins, or -ENOENT. */
int kvt_twin_find(const char *module, const char *function, kvt_kernel *kernel);

/* NULL, with a message, for a handle that kvt_twin_find() never gave. */
const struct kvt_twin_entry *kvt_twin_get(kvt_kernel kernel);

/* Small handles for objects. Handle 0 is never given out by kvt_table_add(). */
struct kvt_table {
	void **objects;
	uint32_t n;
};

int kvt_table_add(struct kvt_table *table, void *object, uint32_t *handle);
void *kvt_table_get(const struct kvt_table *table, uint32_t handle);	 /* NULL: no such handle */
void *kvt_table_remove(struct kvt_table *table, uint32_t handle); /* NULL: no such handle */

/* Destroy all that is left, and the table. */
void kvt_table_free(struct kvt_table *table, struct kvt_gpu *gpu, void (*destroy)(struct kvt_gpu *gpu, uint32_t handle));

#endif
