// SPDX-License-Identifier: MIT
/*
 * ggml_stub PLUGIN VERSION LAYOUT [FAULT]: loads the plug-in as a ggml would whose
 * backend API says VERSION and lays its tables out as LAYOUT does, with one thing
 * not as it should be. Exit code 0: the plug-in took it.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engines/ggml/abi.h"

static int layout;
static const char *fault = "";
static struct kg_reg reg;
static struct kg_dev dev;
static struct kg_buft buft;
static struct ggml_tensor tensors[2];
static int made;

static const char *cpu_name(kg_reg_t r) { return (void)r, "CPU"; }
static size_t one_device(kg_reg_t r) { return (void)r, strcmp(fault, "devices") ? 1 : 2; }
static kg_dev_t device(kg_reg_t r, size_t i) { return (void)r, (void)i, &dev; }
static const char *dev_name(kg_dev_t d) { return (void)d, "CPU"; }
static enum ggml_backend_dev_type dev_type(kg_dev_t d) { return (void)d, GGML_BACKEND_DEVICE_TYPE_CPU; }
static kg_backend_t no_backend(kg_dev_t d, const char *params) { return (void)d, (void)params, NULL; }
static kg_buft_t dev_buft(kg_dev_t d) { return (void)d, &buft; }
static bool takes_op(kg_dev_t d, kg_const_tensor t) { return (void)d, (void)t, true; }
static bool takes_buft(kg_dev_t d, kg_buft_t t) { return (void)d, (void)t, true; }
static const char *buft_name(kg_buft_t t) { return (void)t, "CPU"; }
static kg_buf_t no_buffer(kg_buft_t t, size_t n) { return (void)t, (void)n, NULL; }
static size_t align(kg_buft_t t) { return (void)t, 32; }
static bool host(kg_buft_t t) { return (void)t, true; }

/* ---- ggml's functions, as far as the plug-in looks at a ggml that it loads in ---- */
#define EXPORT __attribute__((visibility("default")))
EXPORT void *stub_by_name(const char *name) __asm__("ggml_backend_reg_by_name");
void *stub_by_name(const char *name) { return strcmp(name, "CPU") ? NULL : &reg; }
EXPORT const char *stub_op_name(int op) __asm__("ggml_op_name");
const char *stub_op_name(int op) { return op == GGML_OP_VIEW ? "VIEW" : "NONE"; }
EXPORT const char *stub_type_name(int type) __asm__("ggml_type_name");
const char *stub_type_name(int type) { return type == GGML_TYPE_Q8_0 ? "q8_0" : type == GGML_TYPE_BF16 ? "bf16" : "f16"; }
EXPORT size_t stub_overhead(void) __asm__("ggml_tensor_overhead");
size_t stub_overhead(void) { return sizeof(struct ggml_tensor) + (strcmp(fault, "tensor") ? 32 : 128); }
EXPORT void *stub_init(struct ggml_init_params p) __asm__("ggml_init");
void *stub_init(struct ggml_init_params p) { return (void)p, &tensors; }
EXPORT void stub_free(void *ctx) __asm__("ggml_free");
void stub_free(void *ctx) { (void)ctx; }
EXPORT struct ggml_tensor *stub_tensor(void *ctx, int type, int64_t a, int64_t b) __asm__("ggml_new_tensor_2d");
struct ggml_tensor *stub_tensor(void *ctx, int type, int64_t a, int64_t b)
{
	struct ggml_tensor *t = &tensors[made++];

	(void)ctx;
	t->type = (enum ggml_type)type;
	t->ne[0] = a;
	t->ne[1] = b;
	t->ne[2] = t->ne[3] = 1;
	t->nb[1] = (size_t)a * 2;
	t->nb[2] = t->nb[1] * (size_t)b;
	return t;
}
EXPORT struct ggml_tensor *stub_view(void *ctx, struct ggml_tensor *of, int64_t a, int64_t b, size_t nb, size_t at)
	__asm__("ggml_view_2d");
struct ggml_tensor *stub_view(void *ctx, struct ggml_tensor *of, int64_t a, int64_t b, size_t nb, size_t at)
{
	struct ggml_tensor *t = stub_tensor(ctx, (int)of->type, a, b);

	(void)nb;
	t->op = GGML_OP_VIEW;
	t->view_src = t->src[0] = of;
	t->view_offs = at;
	return t;
}
EXPORT void *stub_set_name(struct ggml_tensor *t, const char *name) __asm__("ggml_set_name");
void *stub_set_name(struct ggml_tensor *t, const char *name) { return strcpy(t->name, name), t; }

/* Found, and never called. */
#define UNUSED(name) EXPORT void stub_##name(void) __asm__(#name); void stub_##name(void) { abort(); }
UNUSED(ggml_backend_buft_alloc_buffer)
UNUSED(ggml_backend_buffer_init)
UNUSED(ggml_graph_n_nodes)
UNUSED(ggml_graph_node)
#ifndef WITHOUT_NBYTES
UNUSED(ggml_nbytes)
#endif

int main(int argc, char **argv)
{
	void *plugin, *(*init)(void);

	if (argc < 4)
		return fprintf(stderr, "usage: ggml_stub PLUGIN VERSION LAYOUT [FAULT]\n"), 2;
	layout = atoi(argv[3]);
	fault = argc > 4 ? argv[4] : "";
	reg = (struct kg_reg){ .api_version = atoi(argv[2]), .get_name = cpu_name, .get_device_count = one_device,
			       .get_device = device };
	dev = (struct kg_dev){ .i = { .get_name = dev_name, .get_type = dev_type, .init_backend = no_backend,
				      .get_buffer_type = dev_buft, .supports_op = takes_op, .supports_buft = takes_buft },
			       .reg = strcmp(fault, "device") ? &reg : NULL };
	if (layout == 2) {
		buft.v2.i = (struct kg_buft_v2){ .get_name = buft_name, .alloc_buffer = no_buffer, .get_alignment = align,
						 .is_host = host };
		buft.v2.device = &dev;
	} else {
		buft.v3.i = (struct kg_buft_v3){ .get_name = buft_name, .alloc_buffer = no_buffer, .get_alignment = align,
						 .is_host = host };
		buft.v3.device = &dev;
	}
	plugin = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
	*(void **)&init = plugin ? dlsym(plugin, "ggml_backend_init") : NULL;
	if (!init)
		return fprintf(stderr, "%s\n", dlerror()), 2;
	return init() ? 0 : 1;
}
