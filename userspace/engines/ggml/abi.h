/* SPDX-License-Identifier: MIT */
/*
 * The tables through which ggml calls a backend, as API versions 2 and 3 lay
 * them out, and the functions of ggml that the plug-in calls.
 *
 * ggml does not install the header that declares the tables, so they are
 * declared here: the order of the entries is the interface, and shim.c compares
 * it with the tables of the CPU backend that it finds in the process before it
 * offers anything. Entries that are called or set here have their types, the
 * others are pointers. Functions are looked up by name in the library that loads
 * the plug-in: it links with no version of ggml.
 */
#ifndef KVT_ENGINES_GGML_ABI_H
#define KVT_ENGINES_GGML_ABI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <ggml-backend.h>
#include <ggml.h>

typedef struct kg_buft *kg_buft_t;
typedef struct kg_buf *kg_buf_t;
typedef struct kg_dev *kg_dev_t;
typedef struct kg_reg *kg_reg_t;
typedef struct kg_backend *kg_backend_t;
typedef const struct ggml_tensor *kg_const_tensor;

/* Buffer types: version 2 has 6 entries. */
struct kg_buft_v2 {
	const char *(*get_name)(kg_buft_t);
	kg_buf_t (*alloc_buffer)(kg_buft_t, size_t bytes);
	size_t (*get_alignment)(kg_buft_t);
	size_t (*get_max_size)(kg_buft_t);
	size_t (*get_alloc_size)(kg_buft_t, kg_const_tensor);
	bool (*is_host)(kg_buft_t);
};

/* Version 3 has 8. */
struct kg_buft_v3 {
	const char *(*get_name)(kg_buft_t);
	kg_buf_t (*alloc_buffer)(kg_buft_t, size_t bytes);
	void *alloc_buffer_n;
	size_t (*get_alignment)(kg_buft_t);
	size_t (*get_max_size)(kg_buft_t);
	size_t (*get_alloc_size)(kg_buft_t, kg_const_tensor);
	void *get_alloc_size_n;
	bool (*is_host)(kg_buft_t);
};

struct kg_buft {
	union {
		struct {
			struct kg_buft_v2 i;
			kg_dev_t device;
			void *context;
		} v2;
		struct {
			struct kg_buft_v3 i;
			kg_dev_t device;
			void *context;
		} v3;
	};
};

/* From here on versions 2 and 3 agree. */
struct kg_buf_i {
	void (*free_buffer)(kg_buf_t);
	void *(*get_base)(kg_buf_t);
	enum ggml_status (*init_tensor)(kg_buf_t, struct ggml_tensor *);
	void (*memset_tensor)(kg_buf_t, struct ggml_tensor *, uint8_t value, size_t offset, size_t n);
	void (*set_tensor)(kg_buf_t, struct ggml_tensor *, const void *data, size_t offset, size_t n);
	void (*get_tensor)(kg_buf_t, kg_const_tensor, void *data, size_t offset, size_t n);
	void *set_tensor_2d, *get_tensor_2d;
	bool (*cpy_tensor)(kg_buf_t, kg_const_tensor src, struct ggml_tensor *dst);
	void (*clear)(kg_buf_t, uint8_t value);
	void *reset;
};

struct kg_buf {
	struct kg_buf_i i;
	kg_buft_t buft;
	void *context;
	size_t size;
	int usage;
};

struct kg_backend_i {
	const char *(*get_name)(kg_backend_t);
	void (*free)(kg_backend_t);
	void *set_tensor_async, *get_tensor_async, *set_tensor_2d_async, *get_tensor_2d_async, *cpy_tensor_async;
	void *synchronize;
	void *graph_plan_create, *graph_plan_free, *graph_plan_update, *graph_plan_compute;
	enum ggml_status (*graph_compute)(kg_backend_t, struct ggml_cgraph *);
	void *event_record, *event_wait;
	void *graph_optimize;
};

struct kg_backend {
	ggml_guid_t guid;
	struct kg_backend_i i;
	kg_dev_t device;
	void *context;
};

struct kg_dev_i {
	const char *(*get_name)(kg_dev_t);
	const char *(*get_description)(kg_dev_t);
	void (*get_memory)(kg_dev_t, size_t *free, size_t *total);
	enum ggml_backend_dev_type (*get_type)(kg_dev_t);
	void (*get_props)(kg_dev_t, struct ggml_backend_dev_props *);
	kg_backend_t (*init_backend)(kg_dev_t, const char *params);
	kg_buft_t (*get_buffer_type)(kg_dev_t);
	void *get_host_buffer_type, *buffer_from_host_ptr;
	bool (*supports_op)(kg_dev_t, kg_const_tensor);
	bool (*supports_buft)(kg_dev_t, kg_buft_t);
	void *offload_op;
	void *event_new, *event_free, *event_synchronize;
};

struct kg_dev {
	struct kg_dev_i i;
	kg_reg_t reg;
	void *context;
};

struct kg_reg {
	int api_version;
	const char *(*get_name)(kg_reg_t);
	size_t (*get_device_count)(kg_reg_t);
	kg_dev_t (*get_device)(kg_reg_t, size_t index);
	void *(*get_proc_address)(kg_reg_t, const char *name);
	void *context;
};

/* ggml's functions: name, type. */
#define KG_FUNCTIONS(X)                                                                                       \
	X(ggml_backend_reg_by_name, kg_reg_t (*)(const char *))                                               \
	X(ggml_backend_buft_alloc_buffer, kg_buf_t (*)(kg_buft_t, size_t))                                    \
	X(ggml_backend_buffer_init, kg_buf_t (*)(kg_buft_t, struct kg_buf_i, void *, size_t))                 \
	X(ggml_graph_n_nodes, int (*)(struct ggml_cgraph *))                                                  \
	X(ggml_graph_node, struct ggml_tensor *(*)(struct ggml_cgraph *, int))                                \
	X(ggml_op_name, const char *(*)(enum ggml_op))                                                        \
	X(ggml_type_name, const char *(*)(enum ggml_type))                                                    \
	X(ggml_nbytes, size_t (*)(kg_const_tensor))                                                           \
	X(ggml_tensor_overhead, size_t (*)(void))                                                             \
	X(ggml_init, struct ggml_context *(*)(struct ggml_init_params))                                       \
	X(ggml_free, void (*)(struct ggml_context *))                                                         \
	X(ggml_new_tensor_2d, struct ggml_tensor *(*)(struct ggml_context *, enum ggml_type, int64_t, int64_t)) \
	X(ggml_view_2d, struct ggml_tensor *(*)(struct ggml_context *, struct ggml_tensor *, int64_t, int64_t, size_t, \
						size_t))                                                      \
	X(ggml_set_name, struct ggml_tensor *(*)(struct ggml_tensor *, const char *))

#endif
