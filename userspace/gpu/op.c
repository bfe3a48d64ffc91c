// SPDX-License-Identifier: MIT
/* Operations as data; gpu/op.h. */
#include "gpu/op.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"

int kvt_op_run(const struct kvt_op *op)
{
	void *args[KVT_KERNEL_MAX_ARGS];
	uint32_t at = 0;

	switch (op->kind) {
	case KVT_OP_COPY:
	case KVT_OP_COPY_2D:
		for (uint64_t y = 0; op->copy.width && y < op->copy.height; y++)
			memmove((char *)op->copy.dst + y * op->copy.dst_pitch,
				(const char *)op->copy.src + y * op->copy.src_pitch, op->copy.width);
		return 0;
	case KVT_OP_MEMSET:
		if (op->set.bytes)
			memset(op->set.dst, op->set.value, op->set.bytes);
		return 0;
	case KVT_OP_LAUNCH:
		for (uint32_t i = 0; i < op->launch.twin->n_args; i++) {
			args[i] = (void *)&op->launch.args[at];
			at += (op->launch.twin->arg_bytes[i] + 7) / 8;
		}
		return op->launch.twin->run(op->launch.grid, op->launch.block, args);
	default:
		return kvt_fail(-EINVAL, "operation %d is not one that runs", (int)op->kind);
	}
}

int kvt_op_append(struct kvt_op_list *list, const struct kvt_op *op)
{
	if (list->n == list->room) {
		uint32_t room = list->room ? list->room * 2 : 16;
		struct kvt_op *ops = realloc(list->ops, room * sizeof(*ops));

		if (!ops)
			return kvt_fail(-ENOMEM, "no memory for %u recorded operations", room);
		list->ops = ops;
		list->room = room;
	}
	list->ops[list->n++] = *op;
	return 0;
}

void kvt_op_list_free(struct kvt_op_list *list)
{
	free(list->ops);
	*list = (struct kvt_op_list){ 0 };
}

static uint64_t threads(struct kvt_dim3 d)
{
	return (uint64_t)d.x * d.y * d.z;
}

int kvt_span_2d(uint64_t dst_pitch, uint64_t src_pitch, uint64_t width, uint64_t height, uint64_t *dst_bytes,
		uint64_t *src_bytes)
{
	*dst_bytes = *src_bytes = 0;
	if (!width || !height)
		return 0;
	if (width > dst_pitch || width > src_pitch)
		return kvt_fail(-EINVAL, "copy_2d: rows of %llu bytes, pitches of %llu and %llu", (unsigned long long)width,
				(unsigned long long)dst_pitch, (unsigned long long)src_pitch);
	if (__builtin_mul_overflow(dst_pitch, height - 1, dst_bytes) ||
	    __builtin_add_overflow(*dst_bytes, width, dst_bytes) ||
	    __builtin_mul_overflow(src_pitch, height - 1, src_bytes) ||
	    __builtin_add_overflow(*src_bytes, width, src_bytes))
		return kvt_fail(-EINVAL, "copy_2d: %llu rows are more than an address space", (unsigned long long)height);
	return 0;
}

int kvt_tensor_map_check(kvt_dptr base, uint64_t bytes, uint32_t row_bytes, uint32_t rows)
{
	if (base % 16 || bytes < 128 || bytes / 128 > INT32_MAX || !row_bytes || row_bytes % 16 || !rows || rows > 256)
		return kvt_fail(-EINVAL, "a tensor map of %llu bytes at %#llx, boxes of %u rows %u bytes apart: multiples of 16, at most 256 rows, 128 bytes to 256 GiB",
				(unsigned long long)bytes, (unsigned long long)base, rows, row_bytes);
	return 0;
}

void kvt_tensor_map_say(kvt_dptr base, uint64_t bytes, uint32_t row_bytes, uint32_t rows, uint64_t *map)
{
	memset(map, 0, KVT_TENSOR_MAP * sizeof(*map));
	map[0] = base;
	map[1] = bytes;
	map[2] = row_bytes;
	map[3] = rows;
}

int kvt_launch_check(const struct kvt_twin_entry *twin, struct kvt_dim3 grid, struct kvt_dim3 block, uint32_t n_args)
{
	if (n_args != twin->n_args)
		return kvt_fail(-EINVAL, "kernel %s.%s takes %u arguments, %u given", twin->module, twin->function,
				twin->n_args, n_args);
	if (!grid.x || !grid.y || !grid.z || grid.y > 65535 || grid.z > 65535 || grid.x > INT32_MAX)
		return kvt_fail(-EINVAL, "kernel %s.%s: a grid of %u x %u x %u; 1 to 2^31-1 x 65535 x 65535",
				twin->module, twin->function, grid.x, grid.y, grid.z);
	if (!block.x || !block.y || !block.z || block.x > 1024 || block.y > 1024 || block.z > 64 ||
	    threads(block) > 1024)
		return kvt_fail(-EINVAL, "kernel %s.%s: blocks of %u x %u x %u threads; at most 1024", twin->module,
				twin->function, block.x, block.y, block.z);
	return 0;
}

int kvt_op_launch(struct kvt_op *op, const struct kvt_twin_entry *twin, struct kvt_dim3 grid, struct kvt_dim3 block,
		  void *const *args, uint32_t n_args)
{
	int err = kvt_launch_check(twin, grid, block, n_args);
	uint32_t at = 0;

	if (err)
		return err;
	op->kind = KVT_OP_LAUNCH;
	op->launch.twin = twin;
	op->launch.grid = grid;
	op->launch.block = block;
	for (uint32_t i = 0; i < n_args; i++) {
		memcpy(&op->launch.args[at], args[i], twin->arg_bytes[i]);
		at += (twin->arg_bytes[i] + 7) / 8;
	}
	return 0;
}

int kvt_twin_find(const char *module, const char *function, kvt_kernel *kernel)
{
	for (uint32_t i = 0; kvt_twins[i].module; i++)
		if (!strcmp(kvt_twins[i].module, module) && !strcmp(kvt_twins[i].function, function)) {
			*kernel = i;
			return 0;
		}
	return kvt_fail(-ENOENT, "no kernel %s.%s", module, function);
}

const struct kvt_twin_entry *kvt_twin_get(kvt_kernel kernel)
{
	for (uint32_t i = 0; kvt_twins[i].module; i++)
		if (i == kernel)
			return &kvt_twins[i];
	kvt_fail(-EINVAL, "no kernel has handle %u", kernel);
	return NULL;
}

int kvt_table_add(struct kvt_table *table, void *object, uint32_t *handle)
{
	void **objects;
	uint32_t i, n;

	for (i = 1; i < table->n; i++)
		if (!table->objects[i])
			break;
	if (i >= table->n) {
		n = table->n ? table->n * 2 : 16;
		objects = realloc(table->objects, n * sizeof(*objects));
		if (!objects)
			return kvt_fail(-ENOMEM, "no memory for %u handles", n);
		memset(objects + table->n, 0, (n - table->n) * sizeof(*objects));
		i = table->n ? table->n : 1;
		table->objects = objects;
		table->n = n;
	}
	table->objects[i] = object;
	*handle = i;
	return 0;
}

void *kvt_table_get(const struct kvt_table *table, uint32_t handle)
{
	return handle < table->n ? table->objects[handle] : NULL;
}

void *kvt_table_remove(struct kvt_table *table, uint32_t handle)
{
	void *object = kvt_table_get(table, handle);

	if (object)
		table->objects[handle] = NULL;
	return object;
}

void kvt_table_free(struct kvt_table *table, struct kvt_gpu *gpu, void (*destroy)(struct kvt_gpu *gpu, uint32_t handle))
{
	for (uint32_t i = 1; i < table->n; i++)
		destroy(gpu, i);
	free(table->objects);
}
