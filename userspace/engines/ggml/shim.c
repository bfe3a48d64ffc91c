// SPDX-License-Identifier: MIT
/*
 * The plug-in as ggml sees it: one device, KVTIER0, that holds KV tensors and
 * runs the operations on them, and nothing else. What differs between versions
 * of ggml's backend API is a table each here; the rest is the core's.
 *
 * Which operations the device takes decides where llama.cpp puts things: no
 * operation on weights, so that they stay where they are without it; every
 * operation on KV tensors, also those that will be refused when they run:
 * otherwise ggml would end the process, or read the KV tensors past us.
 */
#include <dlfcn.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "codec/codec.h"
#include "engines/ggml/abi.h"
#include "engines/ggml/plugin.h"

#define DEVICE "KVTIER0"

extern char **environ;

/* ggml's functions, found at load */
static struct {
#define MEMBER(name, type) __typeof__(type) name;
	KG_FUNCTIONS(MEMBER)
#undef MEMBER
} ggml;

static struct kg_config config;
static int version;
static struct kg_buft buft, *cpu_buft;
static struct kg_dev device;
static struct kg_reg reg;

/* ---- messages: to stderr at once; llama.cpp's own log has a thread, and loses what it holds when the process ends ---- */

static void say(void *user, enum kvt_log_level level, const char *line)
{
	(void)user;
	if ((int)level <= config.log)
		fprintf(stderr, "kvtier: %s\n", line);
}

static void say_error(const char *doing)
{
	kvt_log(KVT_LOG_ERROR, "%s: %s", doing, kvt_last_error());
}

/* ---- tensors ---- */

static uint32_t type_of(enum ggml_type type)
{
	switch (type) {
	case GGML_TYPE_F32: return KVT_F32;
	case GGML_TYPE_F16: return KVT_F16;
	case GGML_TYPE_BF16: return KVT_BF16;
	case GGML_TYPE_Q8_0: return KVT_Q8_0;
	case GGML_TYPE_Q4_0: return KVT_Q4_0;
	case GGML_TYPE_I32: return KG_I32;
	case GGML_TYPE_I64: return KG_I64;
	default: return KG_OTHER;
	}
}

static const struct ggml_tensor *root_of(const struct ggml_tensor *t)
{
	return t->view_src ? t->view_src : t;
}

static bool is_ours(const struct ggml_tensor *root)
{
	return root->buffer && ((kg_buf_t)root->buffer)->buft == &buft;
}

static struct kg_tensor *kv_of(const struct ggml_tensor *t)
{
	return is_ours(root_of(t)) ? root_of(t)->extra : NULL;
}

/* Also where llama.cpp only asks how much memory a context would take: buffers are empty then, and tensors not in them. */
static bool is_kv(const struct ggml_tensor *t)
{
	const struct ggml_tensor *root = root_of(t);

	return kv_of(t) || (is_ours(root) && !root->data && root->op == GGML_OP_NONE &&
			   (kg_is_state(root->name) || !strncmp(root->name, "cache_", 6)));
}

/* A KV tensor, or what may become one: before buffers are there, any tensor that no operation has made. */
static bool may_be_kv(const struct ggml_tensor *t)
{
	const struct ggml_tensor *root = root_of(t);

	if (root->buffer)
		return is_kv(t);
	if (type_of(root->type) >= KVT_CODECS || root->type == GGML_TYPE_F32)
		return false;
	return root->op == GGML_OP_NONE && !(root->flags & GGML_TENSOR_FLAG_INPUT);
}

static struct kg_view view_of(const struct ggml_tensor *t)
{
	const struct ggml_tensor *root = root_of(t);
	struct kg_view v = { .kv = kv_of(t), .data = t->data, .type = type_of(t->type), .row_bytes = root->nb[1],
			     .rows = (uint64_t)root->ne[1] };

	v.at = t->view_src ? t->view_offs : 0;
	if (v.kv) /* of views of views ggml keeps the sum; of an operation's result in place, the address */
		v.at = (uint64_t)((uintptr_t)t->data - (uintptr_t)root->data);
	for (int i = 0; i < 4; i++) {
		v.ne[i] = t->ne[i];
		v.nb[i] = t->nb[i];
	}
	return v;
}

static bool is(const struct ggml_tensor *t, const char *op)
{
	return !strcmp(ggml.ggml_op_name(t->op), op);
}

/* ---- operations ---- */

static float float_param(const struct ggml_tensor *t, int i)
{
	float f;

	memcpy(&f, &t->op_params[i], sizeof(f));
	return f;
}

static struct kg_attention attention_of(const struct ggml_tensor *t)
{
	struct kg_attention a = {
		.q = view_of(t->src[0]), .k = view_of(t->src[1]), .v = view_of(t->src[2]), .out = view_of(t),
		.has_mask = t->src[3], .has_sinks = t->src[4],
		.scale = float_param(t, 0), .max_bias = float_param(t, 1), .softcap = float_param(t, 2),
	};

	if (a.has_mask)
		a.mask = view_of(t->src[3]);
	if (a.has_sinks)
		a.sinks = view_of(t->src[4]);
	return a;
}

static struct kg_rope rope_of(const struct ggml_tensor *t)
{
	struct kg_rope r = {
		.in = view_of(t->src[0]), .positions = view_of(t->src[1]), .out = view_of(t), .has_factors = t->src[2],
		.dims = t->op_params[1], .mode = t->op_params[2], .ctx_orig = t->op_params[4],
		.base = float_param(t, 5), .freq_scale = float_param(t, 6), .ext_factor = float_param(t, 7),
		.attn_factor = float_param(t, 8), .beta_fast = float_param(t, 9), .beta_slow = float_param(t, 10),
		.offset = t->op_params[15],
	};

	if (r.has_factors)
		r.factors = view_of(t->src[2]);
	return r;
}

static bool rope_fits(const struct kg_rope *r)
{
	return (r->mode == 0 || r->mode == 2) && (r->in.type == KVT_F16 || r->in.type == KVT_BF16) &&
	       r->in.type == r->out.type && r->positions.type == KG_I32 && r->dims > 0 && r->dims % 2 == 0 &&
	       r->offset >= 0 && r->offset + r->dims <= r->in.ne[0];
}

static bool is_index(uint32_t type)
{
	return type == KG_I32 || type == KG_I64;
}

/* The operation by its types and shapes, on tensors that are KV tensors or may become such. */
static bool fits(const struct ggml_tensor *t)
{
	const struct ggml_tensor *a = t->src[0];
	uint32_t type = type_of(t->type), from = a ? type_of(a->type) : KG_OTHER;
	struct kg_attention attention;
	struct kg_rope rope;

	if (is(t, "FLASH_ATTN_EXT")) {
		attention = attention_of(t);
		return kg_attention_fits(&attention);
	}
	if (is(t, "SET_ROWS"))
		return type < KVT_CODECS && type != KVT_F32 && (from == KVT_F32 || from == KVT_F16) &&
		       is_index(type_of(t->src[1]->type));
	if (is(t, "GET_ROWS"))
		return from < KVT_CODECS && from != KVT_F32 && type == KVT_F32 && type_of(t->src[1]->type) == KG_I32;
	if (is(t, "CPY"))
		return type < KVT_CODECS && from < KVT_CODECS && !memcmp(t->ne, a->ne, sizeof(t->ne)) &&
		       (kvt_codec_group(type) == 1 || from == type || from == KVT_F32) &&
		       t->nb[0] == kvt_codec_bytes(type, kvt_codec_group(type)) &&
		       a->nb[0] == kvt_codec_bytes(from, kvt_codec_group(from));
	if (is(t, "ROPE")) {
		rope = rope_of(t);
		return rope_fits(&rope);
	}
	return false;
}

/* Has ggml a KV tensor of ours in it? Then we take it, and say what is wrong when it runs. */
static bool touches_kv(const struct ggml_tensor *t)
{
	if (is_kv(t))
		return true;
	for (int i = 0; i < GGML_MAX_SRC; i++)
		if (t->src[i] && is_kv(t->src[i]))
			return true;
	return false;
}

static bool is_view(const struct ggml_tensor *t)
{
	return t->op == GGML_OP_NONE || is(t, "RESHAPE") || is(t, "VIEW") || is(t, "PERMUTE") || is(t, "TRANSPOSE");
}

static bool supports_op(kg_dev_t dev, kg_const_tensor t)
{
	(void)dev;
	if (is_view(t))
		return true;
	if (is(t, "FLASH_ATTN_EXT")) {
		if (kv_of(t->src[1]) && t->src[0]->ne[2] > 0 && t->src[1]->ne[2] > 0 && t->src[2]->ne[2] > 0) {
			const struct kg_view k = view_of(t->src[1]), v = view_of(t->src[2]);

			/* one row of all heads, or a plane for each */
			kg_tensor_shape(k.kv, (uint64_t)k.ne[2] * k.nb[2] == k.row_bytes ? (uint32_t)k.ne[2] : 1,
					(uint32_t)t->src[0]->ne[2]);
			if (v.kv)
				kg_tensor_shape(v.kv, (uint64_t)v.ne[2] * v.nb[2] == v.row_bytes ? (uint32_t)v.ne[2] : 1,
						(uint32_t)t->src[0]->ne[2]);
		}
	}
	if (touches_kv(t))
		return true;
	for (int i = 0; i < GGML_MAX_SRC; i++) /* a weight that asks where it could lie: not here */
		if (t->src[i] && is_ours(root_of(t->src[i])))
			return false;
	if (is(t, "FLASH_ATTN_EXT"))
		return may_be_kv(t->src[1]) && may_be_kv(t->src[2]) && fits(t);
	if (is(t, "SET_ROWS"))
		return may_be_kv(t) && fits(t);
	if (is(t, "CPY"))
		return (may_be_kv(t->src[1]) || may_be_kv(t->src[0])) && fits(t);
	if (is(t, "GET_ROWS") || is(t, "ROPE"))
		return may_be_kv(t->src[0]) && fits(t);
	return false;
}

/* Plain memory for a view that an operation wants to read as such; to be freed. */
static int materialise(struct kg_view *v, const struct ggml_tensor *t, void **memory)
{
	size_t n = ggml.ggml_nbytes(t);
	int ret;

	*memory = NULL;
	if (!v->kv)
		return 0;
	*memory = malloc(n);
	ret = *memory ? kg_tensor_read(v->kv, v->at, *memory, n) : kvt_fail(-ENOMEM, "no memory for %s", t->name);
	v->data = *memory;
	v->kv = NULL;
	return ret;
}

static int run_attention(const struct ggml_tensor *t)
{
	struct kg_attention a = attention_of(t);
	void *memory[3] = { NULL };
	int ret = materialise(&a.q, t->src[0], &memory[0]);

	if (!ret && a.has_mask)
		ret = materialise(&a.mask, t->src[3], &memory[1]);
	if (!ret && a.has_sinks)
		ret = materialise(&a.sinks, t->src[4], &memory[2]);
	if (!ret)
		ret = kg_attention(&a);
	for (int i = 0; i < 3; i++)
		free(memory[i]);
	return ret;
}

static int run_set_rows(const struct ggml_tensor *t)
{
	struct kg_view out = view_of(t), in = view_of(t->src[0]), index = view_of(t->src[1]);
	void *memory;
	int ret = materialise(&in, t->src[0], &memory);

	if (!ret && !out.kv)
		ret = kvt_fail(-EOPNOTSUPP, "it is not a KV tensor");
	if (!ret)
		ret = kg_set_rows(&out, &in, &index);
	free(memory);
	return ret;
}

static int refuse(const struct ggml_tensor *t)
{
	const char *name = "a KV tensor", *hint = "run it without -dev " DEVICE;

	for (int i = 0; i < GGML_MAX_SRC; i++)
		if (t->src[i] && kv_of(t->src[i]))
			name = root_of(t->src[i])->name;
	if (is(t, "MUL_MAT") || is(t, "CONT") || is(t, "SOFT_MAX"))
		hint = "this is how llama.cpp computes without flash attention: start it with -fa on, or, where this model has none, without -dev " DEVICE;
	return kvt_fail(-EOPNOTSUPP, "%s of %s is not among what runs here: %s", ggml.ggml_op_name(t->op), name, hint);
}

static int run(const struct ggml_tensor *t)
{
	struct kg_view out, in, index;
	struct kg_rope rope;

	if (is(t, "FLASH_ATTN_EXT"))
		return run_attention(t);
	if (is(t, "SET_ROWS"))
		return run_set_rows(t);
	if (!fits(t))
		return refuse(t);
	out = view_of(t);
	in = view_of(t->src[0]);
	if (is(t, "ROPE")) {
		rope = rope_of(t);
		return kg_rope(&rope);
	}
	if (is(t, "CPY"))
		return kg_copy(&out, &in);
	index = view_of(t->src[1]);
	return in.kv ? kg_get_rows(&out, &in, &index) : refuse(t);
}

static enum ggml_status graph_compute(kg_backend_t backend, struct ggml_cgraph *graph)
{
	int n = ggml.ggml_graph_n_nodes(graph);
	char doing[96];

	(void)backend;
	for (int i = 0; i < n; i++) {
		const struct ggml_tensor *t = ggml.ggml_graph_node(graph, i);

		if (is_view(t) || !run(t))
			continue;
		snprintf(doing, sizeof(doing), "%s %.64s", ggml.ggml_op_name(t->op), t->name);
		say_error(doing);
		return GGML_STATUS_FAILED;
	}
	return GGML_STATUS_SUCCESS;
}

/* ---- backend ---- */

static const char *backend_name(kg_backend_t backend)
{
	(void)backend;
	return DEVICE;
}

static void backend_free(kg_backend_t backend)
{
	free(backend);
}

/* ---- buffers ---- */

static void buffer_free(kg_buf_t buf)
{
	kg_buffer_free(buf->context);
}

static void *buffer_base(kg_buf_t buf)
{
	return kg_buffer_base(buf->context);
}

static enum ggml_status buffer_init_tensor(kg_buf_t buf, struct ggml_tensor *t)
{
	struct kg_buffer *b = buf->context;
	struct kg_tensor *kv = NULL;
	int ret;

	if (t->view_src || t->op != GGML_OP_NONE)
		return GGML_STATUS_SUCCESS;
	t->extra = NULL;
	ret = kg_tensor_wanted(t->name, type_of(t->type), ggml.ggml_type_name(t->type));
	if (ret > 0)
		ret = kg_tensor_add(b, t->name, type_of(t->type), t->ne,
				    (uint64_t)((uint8_t *)t->data - kg_buffer_base(b)), &kv);
	if (ret < 0) {
		say_error("KV cache");
		return GGML_STATUS_ALLOC_FAILED;
	}
	t->extra = kv;
	return GGML_STATUS_SUCCESS;
}

static uint64_t offset_of(const struct ggml_tensor *t)
{
	return (uint64_t)((uintptr_t)t->data - (uintptr_t)root_of(t)->data);
}

/* What goes wrong here ggml cannot be told: the next operation on the cache is refused. */
static void buffer_memset(kg_buf_t buf, struct ggml_tensor *t, uint8_t value, size_t offset, size_t n)
{
	(void)buf;
	if (!kv_of(t))
		memset((uint8_t *)t->data + offset, value, n);
	else if (kg_tensor_fill(kv_of(t), offset_of(t) + offset, value, n))
		say_error(t->name);
}

static void buffer_set(kg_buf_t buf, struct ggml_tensor *t, const void *data, size_t offset, size_t n)
{
	(void)buf;
	if (!kv_of(t))
		memcpy((uint8_t *)t->data + offset, data, n);
	else if (kg_tensor_write(kv_of(t), offset_of(t) + offset, data, n))
		say_error(t->name);
}

static void buffer_get(kg_buf_t buf, kg_const_tensor t, void *data, size_t offset, size_t n)
{
	(void)buf;
	if (!kv_of(t))
		memcpy(data, (uint8_t *)t->data + offset, n);
	else if (kg_tensor_read(kv_of(t), offset_of(t) + offset, data, n))
		say_error(t->name);
}

/* Between KV tensors of the same layout; ggml does the rest with set and get. */
static bool buffer_copy(kg_buf_t buf, kg_const_tensor src, struct ggml_tensor *dst)
{
	size_t n = ggml.ggml_nbytes(src);

	(void)buf;
	if (!kv_of(src) || !kv_of(dst) || n != ggml.ggml_nbytes(dst) || src->type != dst->type)
		return false;
	if (kg_tensor_copy(kv_of(dst), kv_of(src), offset_of(dst), offset_of(src), n))
		say_error(dst->name);
	return true;
}

static void buffer_clear(kg_buf_t buf, uint8_t value)
{
	if (kg_buffer_clear(buf->context, value))
		say_error("clear");
}

/* Is the buffer that this thread asks for next one of states? They stay where they are without us. */
static _Thread_local bool state;

/* ggml asks this of each tensor, and then for a buffer for all of them. */
static size_t buft_alloc_size(kg_buft_t type, kg_const_tensor t)
{
	(void)type;
	state = kg_is_state(t->name);
	return ggml.ggml_nbytes(t);
}

static const char *buft_name(kg_buft_t type)
{
	(void)type;
	return "KVTIER";
}

static kg_buf_t buft_alloc(kg_buft_t type, size_t bytes)
{
	static const struct kg_buf_i i = {
		.free_buffer = buffer_free, .get_base = buffer_base, .init_tensor = buffer_init_tensor,
		.memset_tensor = buffer_memset, .set_tensor = buffer_set, .get_tensor = buffer_get,
		.cpy_tensor = buffer_copy, .clear = buffer_clear,
	};
	struct kg_buffer *b;

	if (state && bytes) {
		state = false;
		kvt_log(KVT_LOG_WARN, "this model has states beside K and V: %zu bytes of them are in plain memory, which no budget counts",
			bytes);
		return ggml.ggml_backend_buft_alloc_buffer(cpu_buft, bytes);
	}
	if (kg_buffer_create(bytes, &b)) {
		say_error("buffer");
		return NULL;
	}
	return ggml.ggml_backend_buffer_init(type, i, b, bytes);
}

static size_t buft_alignment(kg_buft_t type)
{
	(void)type;
	return KG_ALIGN;
}

static bool buft_is_host(kg_buft_t type)
{
	(void)type;
	return false;
}

/* ---- device ---- */

static const char *dev_name(kg_dev_t dev)
{
	(void)dev;
	return DEVICE;
}

static const char *dev_description(kg_dev_t dev)
{
	(void)dev;
	return "KV cache in tiers";
}

static void dev_memory(kg_dev_t dev, size_t *left, size_t *total)
{
	uint64_t all, taken;

	(void)dev;
	kg_memory(&all, &taken);
	*total = all;
	*left = all - taken;
}

/* llama.cpp gives layers to GPUs only. */
static enum ggml_backend_dev_type dev_type(kg_dev_t dev)
{
	(void)dev;
	return GGML_BACKEND_DEVICE_TYPE_GPU;
}

static void dev_props(kg_dev_t dev, struct ggml_backend_dev_props *p)
{
	p->name = dev_name(dev);
	p->description = dev_description(dev);
	p->type = dev_type(dev);
	dev_memory(dev, &p->memory_free, &p->memory_total);
	p->caps.mmap_support = true; /* weights are not ours: they stay as they are */
}

static kg_buft_t dev_buffer_type(kg_dev_t dev)
{
	(void)dev;
	return &buft;
}

static bool supports_buft(kg_dev_t dev, kg_buft_t type)
{
	(void)dev;
	return type == &buft;
}

static kg_backend_t init_backend(kg_dev_t dev, const char *params)
{
	static uint8_t guid[16] = "kvtier KV tiers";
	struct kg_backend *b = calloc(1, sizeof(*b));

	(void)params;
	if (!b)
		return NULL;
	*b = (struct kg_backend){
		.guid = &guid, .device = dev,
		.i = { .get_name = backend_name, .free = backend_free, .graph_compute = graph_compute },
	};
	return b;
}

static const char *reg_name(kg_reg_t r)
{
	(void)r;
	return "KVTIER";
}

static size_t reg_devices(kg_reg_t r)
{
	return r->context ? 1 : 0;
}

static kg_dev_t reg_device(kg_reg_t r, size_t index)
{
	return index < reg_devices(r) ? &device : NULL;
}

static void *reg_proc(kg_reg_t r, const char *name)
{
	(void)r;
	(void)name;
	return NULL;
}

static void make_tables(void)
{
	if (version == 2) {
		buft.v2.i = (struct kg_buft_v2){ .get_name = buft_name, .alloc_buffer = buft_alloc,
						 .get_alignment = buft_alignment, .get_alloc_size = buft_alloc_size,
						 .is_host = buft_is_host };
		buft.v2.device = &device;
	} else {
		buft.v3.i = (struct kg_buft_v3){ .get_name = buft_name, .alloc_buffer = buft_alloc,
						 .get_alignment = buft_alignment, .get_alloc_size = buft_alloc_size,
						 .is_host = buft_is_host };
		buft.v3.device = &device;
	}
	device = (struct kg_dev){
		.i = { .get_name = dev_name, .get_description = dev_description, .get_memory = dev_memory,
		       .get_type = dev_type, .get_props = dev_props, .init_backend = init_backend,
		       .get_buffer_type = dev_buffer_type, .supports_op = supports_op, .supports_buft = supports_buft },
		.reg = &reg,
	};
	reg = (struct kg_reg){
		.api_version = version, .get_name = reg_name, .get_device_count = reg_devices,
		.get_device = reg_device, .get_proc_address = reg_proc,
	};
}

/* ---- is this a ggml that we know? ---- */

/* The library that @address is in, where ggml's functions are found from. */
static int find_functions(const void *address)
{
	const char *missing = NULL;
	Dl_info info;
	void *lib;

	if (!dladdr(address, &info) || !(lib = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD)))
		lib = dlopen(NULL, RTLD_NOW);
#define FIND(name, type)                                     \
	*(void **)&ggml.name = dlsym(lib, #name);            \
	if (!ggml.name && !(*(void **)&ggml.name = dlsym(RTLD_DEFAULT, #name))) \
		missing = #name;
	KG_FUNCTIONS(FIND)
#undef FIND
	return missing ? kvt_fail(-ENOSYS, "this llama.cpp has no %s: it is a version that this plug-in does not know", missing) : 0;
}

/* Is there code at @address, of the library that @other is in? */
static bool is_code(const void *address, const void *other)
{
	Dl_info a, b;

	return address && dladdr(address, &a) && dladdr(other, &b) && a.dli_fbase == b.dli_fbase;
}

static int unknown(const char *what)
{
	return kvt_fail(-EPROTO, "ggml's backend API is version %d, but its %s is not laid out as that version's: this llama.cpp is not one that the plug-in knows",
			version, what);
}

/* The CPU backend's tables, entry by entry as far as they must be there. */
static int probe_tables(void)
{
	kg_reg_t cpu = ggml.ggml_backend_reg_by_name("CPU");
	const void *code;
	kg_buft_t type;
	kg_dev_t dev;

	if (!cpu)
		return kvt_fail(-ENODEV, "ggml has no CPU backend yet: load the plug-in after it (GGML_BACKEND_PATH does)");
	version = cpu->api_version;
	if (version != 2 && version != 3)
		return kvt_fail(-EPROTO, "ggml's backend API is version %d; this plug-in knows 2 and 3: use a kvtier that knows it, or another llama.cpp",
				version);
	code = (const void *)cpu->get_name;
	if (!is_code((void *)cpu->get_device, code) || !is_code((void *)cpu->get_device_count, code) ||
	    strcmp(cpu->get_name(cpu), "CPU") || cpu->get_device_count(cpu) != 1)
		return unknown("registry");
	dev = cpu->get_device(cpu, 0);
	if (!is_code((void *)dev->i.get_name, code) || !is_code((void *)dev->i.get_type, code) ||
	    !is_code((void *)dev->i.supports_op, code) || !is_code((void *)dev->i.supports_buft, code) ||
	    !is_code((void *)dev->i.init_backend, code) || !is_code((void *)dev->i.get_buffer_type, code) ||
	    dev->i.get_type(dev) != GGML_BACKEND_DEVICE_TYPE_CPU || dev->reg != cpu || dev->i.event_synchronize)
		return unknown("device table");
	type = dev->i.get_buffer_type(dev);
	if (version == 2 ? type->v2.device != dev && type->v2.device : type->v3.device != dev && type->v3.device)
		return unknown("buffer type");
	code = version == 2 ? (const void *)type->v2.i.get_name : (const void *)type->v3.i.get_name;
	if (version == 2 ? !is_code((void *)type->v2.i.alloc_buffer, code) || !is_code((void *)type->v2.i.is_host, code) ||
			   !is_code((void *)type->v2.i.get_alignment, code) || !type->v2.i.is_host(type) :
			   !is_code((void *)type->v3.i.alloc_buffer, code) || !is_code((void *)type->v3.i.is_host, code) ||
			   !is_code((void *)type->v3.i.get_alignment, code) || !type->v3.i.is_host(type))
		return unknown("buffer type's table");
	cpu_buft = type;
	return 0;
}

/* A tensor and a view of it, read through the structure that we were compiled with. */
static int probe_tensor(void)
{
	struct ggml_init_params params = { .mem_size = 16 << 10, .no_alloc = true };
	struct ggml_context *ctx = ggml.ggml_init(params);
	struct ggml_tensor *t, *v;
	bool fine;

	if (!ctx)
		return kvt_fail(-ENOMEM, "ggml has no memory for a context");
	t = ggml.ggml_new_tensor_2d(ctx, GGML_TYPE_F16, 64, 3);
	v = ggml.ggml_view_2d(ctx, t, 32, 2, t->nb[1], t->nb[1]);
	ggml.ggml_set_name(t, "cache_k_l0");
	fine = t->type == GGML_TYPE_F16 && t->ne[0] == 64 && t->ne[1] == 3 && t->ne[3] == 1 && t->nb[1] == 128 &&
	       t->nb[2] == 384 &&
	       t->op == GGML_OP_NONE && !t->src[0] && !t->view_src && !t->data && !strcmp(t->name, "cache_k_l0") &&
	       v->view_src == t && v->view_offs == 128 && v->src[0] == t && !strcmp(ggml.ggml_op_name(v->op), "VIEW") &&
	       !strcmp(ggml.ggml_type_name(GGML_TYPE_Q8_0), "q8_0") && !strcmp(ggml.ggml_type_name(GGML_TYPE_BF16), "bf16") &&
	       ggml.ggml_tensor_overhead() >= sizeof(*t) && ggml.ggml_tensor_overhead() < sizeof(*t) + 64;
	ggml.ggml_free(ctx);
	return fine ? 0 : unknown("tensor");
}

/* Does the command line (NULL: anywhere; else behind @option or @longer), or llama.cpp's variable for it, name @value? */
static bool is_asked_for(const char *variable, const char *option, const char *longer, const char *value)
{
	const char *set = getenv(variable);
	FILE *f = fopen("/proc/self/cmdline", "re");
	char *word = NULL;
	size_t room = 0;
	bool found = set && strstr(set, value), behind = !option;

	while (f && !found && getdelim(&word, &room, '\0', f) > 0) {
		found = behind && strstr(word, value);
		behind = !option || !strcmp(word, option) || !strcmp(word, longer);
	}
	free(word);
	if (f)
		fclose(f);
	return found;
}

/* What llama.cpp calls after loading us. NULL: not loaded. */
__attribute__((visibility("default"))) kg_reg_t ggml_backend_init(void);
kg_reg_t ggml_backend_init(void)
{
	int ret = find_functions(__builtin_return_address(0)), configured;

	kvt_set_log(say, NULL);
	config.log = KVT_LOG_WARN;
	configured = kg_config_read(&config, environ);
	if (!ret)
		ret = probe_tables();
	if (!ret)
		ret = probe_tensor();
	if (!ret && configured < 0)
		ret = configured;
	if (ret) {
		say_error("not loaded");
		return NULL;
	}
	make_tables();
	if (configured && is_asked_for("LLAMA_ARG_SPLIT_MODE", "-sm", "--split-mode", "tensor")) {
		kvt_log(KVT_LOG_ERROR, "-sm tensor: llama.cpp wraps devices in one of its own then, which does not know " DEVICE ": use -sm layer");
	} else if (configured && (config.chosen || is_asked_for("LLAMA_ARG_DEVICE", NULL, NULL, DEVICE))) {
		kg_setup(&config);
		reg.context = &config; /* a device */
	} else if (configured) {
		kvt_log(KVT_LOG_INFO, "configured, but not chosen: -dev " DEVICE " (or KVTIER_DEVICE=always) is missing");
	}
	return &reg;
}
