// SPDX-License-Identifier: MIT
/* The options of kvtier run: one table, and what the library's parameters are called in it. */
#include "tools/run_options.h"

#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "kvtier.h"
#include "tools/tools.h"
#include "uapi/linux/kvtier.h"

#define DEFAULT_MAX_TOKENS 128
#define DEFAULT_CHUNK 512
#define DEFAULT_BLOCK (64u << 10)
#define BIASES 4096u

enum kind { TEXT, ANY_TEXT, SIZE, NUMBER, REAL, NAME, FLAG, BIAS, ORDER };

struct spec {
	const char *name;
	enum kind kind;
	size_t offset;
	uint64_t min, max;	   /* NUMBER */
	const char *const names[6]; /* NAME: value i is names[i] */
};

#define AT(field) offsetof(struct run_options, field)

static const struct spec specs[] = {
	{ "--model", TEXT, AT(model), 0, 0, { 0 } },
	{ "--tokenizer", TEXT, AT(tokenizer), 0, 0, { 0 } },
	{ "--no-fast-load", FLAG, AT(no_fast_load), 0, 0, { 0 } },
	{ "--prompt", ANY_TEXT, AT(prompt), 0, 0, { 0 } },
	{ "--prompt-file", TEXT, AT(prompt_file), 0, 0, { 0 } },
	{ "--max-tokens", NUMBER, AT(max_tokens), 1, 1u << 30, { 0 } },
	{ "--temperature", REAL, AT(sampling.temperature), 0, 0, { 0 } },
	{ "--top-k", NUMBER, AT(top_k), 0, UINT32_MAX, { 0 } },
	{ "--top-p", REAL, AT(sampling.top_p), 0, 0, { 0 } },
	{ "--min-p", REAL, AT(sampling.min_p), 0, 0, { 0 } },
	{ "--top-n-sigma", REAL, AT(sampling.top_n_sigma), 0, 0, { 0 } },
	{ "--repetition-penalty", REAL, AT(sampling.repetition_penalty), 0, 0, { 0 } },
	{ "--presence-penalty", REAL, AT(sampling.presence_penalty), 0, 0, { 0 } },
	{ "--frequency-penalty", REAL, AT(sampling.frequency_penalty), 0, 0, { 0 } },
	{ "--penalty-last-n", NUMBER, AT(penalty_last_n), 0, UINT32_MAX, { 0 } },
	{ "--logit-bias", BIAS, 0, 0, 0, { 0 } },
	{ "--sampler-order", ORDER, 0, 0, 0, { 0 } },
	{ "--seed", NUMBER, AT(sampling.seed), 0, UINT64_MAX, { 0 } },
	{ "--untiered", FLAG, AT(untiered), 0, 0, { 0 } },
	{ "--gpu-bytes", SIZE, AT(gpu), 0, 0, { 0 } },
	{ "--pinned-bytes", SIZE, AT(pinned), 0, 0, { 0 } },
	{ "--ram-bytes", SIZE, AT(ram), 0, 0, { 0 } },
	{ "--disk-bytes", SIZE, AT(disk), 0, 0, { 0 } },
	{ "--disk-dir", TEXT, AT(disk_dir), 0, 0, { 0 } },
	{ "--store", TEXT, AT(store), 0, 0, { 0 } },
	{ "--warm", TEXT, AT(warm), 0, 0, { 0 } },
	{ "--block-bytes", SIZE, AT(block), 0, 0, { 0 } },
	{ "--threads", NUMBER, AT(threads), 1, 1024, { 0 } },
	{ "--prefill-chunk", NUMBER, AT(chunk), 1, 1u << 30, { 0 } },
	{ "--kv-type", NAME, AT(kv_type), 0, 0, { "f32", "f16", "bf16" } },
	{ "--host", NAME, AT(host), 0, 0, { "auto", "user", "module" } },
	{ "--backend", NAME, AT(backend), 0, 0, { "auto", "cpu", "cuda" } },
	{ "--device", NUMBER, AT(device), 0, 1023, { 0 } },
	{ "--io", NAME, AT(io), 0, 0, { "auto", "uring", "threads" } },
	{ "--policy", NAME, AT(policy), 0, 0, { "auto", "lru", "s3fifo", "cost", "scan" } }, /* enum kvt_policy_kind */
	{ "--progress", NAME, AT(progress), 0, 0, { "auto", "always", "never" } },
	{ "--stats", TEXT, AT(stats), 0, 0, { 0 } },
	{ "--logits", TEXT, AT(logits), 0, 0, { 0 } },
};

/* What messages of the library call what an option sets; longer ones before their beginnings. */
static const struct tool_word words[] = {
	{ "ram_bytes", "--ram-bytes" },
	{ "pinned_bytes", "--pinned-bytes" },
	{ "gpu_bytes", "--gpu-bytes" },
	{ "disk_bytes", "--disk-bytes" },
	{ "block_bytes", "--block-bytes" },
	{ "disk_dir", "--disk-dir" },
	{ "store_dir", "--store" },
	{ "threads, max_query_rows", "--threads, --prefill-chunk" },
	{ "max_query_rows", "--prefill-chunk" },
	{ "max_tokens", "--max-tokens" },
	{ "warm_name", "--warm" },
	{ "host=user", "--host user" },
	{ "host=module", "--host module" },
	{ "gpu device", "--device" },
	{ "backend cuda", "--backend cuda" },
	{ "backend cpu", "--backend cpu" },
	{ "the memory or disk budgets, or end sequences", "--ram-bytes, --pinned-bytes or --disk-bytes" }, /* it has one */
	{ "the memory or disk budgets", "--ram-bytes, --pinned-bytes or --disk-bytes" },
	{ "the memory budgets", "--ram-bytes or --pinned-bytes" },
	{ "a disk budget", "--disk-bytes" },
	{ "the disk budget", "--disk-bytes" },
	{ "the maximum batch or tokens of a pass", "--prefill-chunk" },
	{ "temperature", "--temperature" },
	{ "top_p", "--top-p" },
	{ "min_p", "--min-p" },
	{ "top_k", "--top-k" },
	{ "top_n_sigma", "--top-n-sigma" },
	{ "repetition_penalty", "--repetition-penalty" },
	{ "presence_penalty", "--presence-penalty" },
	{ "frequency_penalty", "--frequency-penalty" },
	{ "bias for token", "--logit-bias for token" },
	{ "order has", "--sampler-order has" },
	{ "the order", "--sampler-order" },
	{ 0 },
};

static int bad(const char *message)
{
	return tool_usage_error("run", "%s", message);
}

/* ID=BIAS[,ID=BIAS]...; the option may come again. */
static int add_biases(const char *text, struct run_options *o)
{
	struct kvt_sampler_params *p = &o->sampling;
	struct kvt_logit_bias *grown;
	char item[64];
	uint64_t token;
	double bias;
	size_t n;

	for (; text; text = text[n] ? text + n + 1 : NULL) {
		char *equals;

		n = strcspn(text, ",");
		equals = memchr(text, '=', n);
		if (!equals || n >= sizeof(item))
			return tool_usage_error("run", "--logit-bias \"%s\": ID=BIAS[,ID=BIAS]... is needed", text);
		memcpy(item, text, n);
		item[n] = 0;
		item[equals - text] = 0;
		if (tool_number("--logit-bias, token", item, 0, UINT32_MAX, &token) ||
		    tool_real("--logit-bias", item + (equals - text) + 1, &bias))
			return bad(kvt_last_error());
		for (uint32_t i = 0; i < p->n_bias; i++)
			if (o->bias[i].token == token)
				return tool_usage_error("run", "--logit-bias names token %s twice", item);
		if (p->n_bias == BIASES)
			return tool_usage_error("run", "--logit-bias: more than %u tokens", BIASES);
		grown = realloc(o->bias, (p->n_bias + 1) * sizeof(*grown));
		if (!grown)
			return tool_usage_error("run", "--logit-bias: no memory for %u tokens", p->n_bias + 1);
		p->bias = o->bias = grown;
		o->bias[p->n_bias++] = (struct kvt_logit_bias){ (uint32_t)token, (float)bias };
	}
	return 0;
}

static int set_order(const char *text, struct run_options *o)
{
	uint8_t *order = o->sampling.order;
	uint32_t n = 0, stage;
	size_t len;

	memset(order, KVT_STAGE_END, sizeof(o->sampling.order));
	for (; text; text = text[len] ? text + len + 1 : NULL) {
		len = strcspn(text, ",");
		for (stage = 1; stage < KVT_STAGES; stage++)
			if (strlen(kvt_sampler_stage_name(stage)) == len && !memcmp(kvt_sampler_stage_name(stage), text, len))
				break;
		if (stage == KVT_STAGES || n == sizeof(o->sampling.order) - 1)
			return tool_usage_error("run", "--sampler-order \"%s\": each once, of \"bias\", \"penalties\", "
						"\"top_n_sigma\", \"top_k\", \"top_p\", \"min_p\" and \"temperature\"", text);
		order[n++] = (uint8_t)stage;
	}
	return 0;
}

static int unknown_name(const struct spec *s, const char *text)
{
	char known[64] = "";
	size_t at = 0;

	for (size_t i = 0; s->names[i]; i++)
		at += (size_t)snprintf(known + at, sizeof(known) - at, "%s%s", !i ? "" : s->names[i + 1] ? ", " : " or ", s->names[i]);
	return tool_usage_error("run", "%s \"%s\": %s are known", s->name, text, known);
}

static int set_option(const struct spec *s, const char *text, struct run_options *o)
{
	void *to = (char *)o + s->offset;
	uint64_t n;

	switch (s->kind) {
	case TEXT:
		if (!*text)
			return tool_usage_error("run", "%s \"\": a name is needed", s->name);
		/* fall through */
	case ANY_TEXT:
		*(const char **)to = text;
		return 0;
	case SIZE:
		return tool_size(text, to) ? tool_usage_error("run", "%s %s", s->name, kvt_last_error()) : 0;
	case NUMBER:
		return tool_number(s->name, text, s->min, s->max, to) ? bad(kvt_last_error()) : 0;
	case REAL:
		return tool_real(s->name, text, to) ? bad(kvt_last_error()) : 0;
	case NAME:
		for (n = 0; s->names[n] && strcmp(s->names[n], text); n++)
			;
		if (!s->names[n])
			return unknown_name(s, text);
		*(uint64_t *)to = n;
		return 0;
	case BIAS:
		return add_biases(text, o);
	case ORDER:
		return set_order(text, o);
	default:
		*(uint64_t *)to = 1;
		return 0;
	}
}

static const struct spec *find_option(const char *name)
{
	for (size_t i = 0; i < sizeof(specs) / sizeof(specs[0]); i++)
		if (!strcmp(specs[i].name, name))
			return &specs[i];
	return NULL;
}

static int check_sampling(struct run_options *o)
{
	struct kvt_sampler_params *p = &o->sampling;

	p->top_k = (uint32_t)o->top_k;
	p->penalty_last_n = (uint32_t)o->penalty_last_n;
	/* which tokens there are is seen when the model is there */
	return kvt_sampler_check(p, UINT32_MAX) ? bad(kvt_last_error()) : 0;
}

/* A name that a model's loader reads, in its directory. */
static bool is_read(const char *name)
{
	return !strcmp(name, "config.json") || !strncmp(name, "tok", 3) || strstr(name, ".safetensors");
}

static bool same(const struct stat *a, const struct stat *b)
{
	return a->st_dev == b->st_dev && a->st_ino == b->st_ino;
}

/* What is written replaces what had the name: not what the run reads. */
static int check_output(const struct run_options *o, const char *option, const char *path)
{
	const char *const files[] = { o->model, o->tokenizer, o->prompt_file };
	bool found = false;
	struct stat st, other;
	struct dirent *e;
	DIR *dir;

	if (!path || stat(path, &st) || !S_ISREG(st.st_mode))
		return 0;
	for (size_t i = 0; i < sizeof(files) / sizeof(files[0]); i++)
		found |= files[i] && !stat(files[i], &other) && same(&st, &other);
	dir = opendir(o->model);
	while (dir && !found && (e = readdir(dir)))
		found = is_read(e->d_name) && !fstatat(dirfd(dir), e->d_name, &other, 0) && same(&st, &other);
	if (dir)
		closedir(dir);
	return found ? tool_usage_error("run", "%s %s would replace a file that is read", option, path) : 0;
}

/* The same name in the same directory, whether there is such a file or not yet; a device takes both. */
static bool same_name(const char *a, const char *b)
{
	const char *names[] = { a, b }, *last[2];
	struct stat st[2];
	char dir[PATH_MAX];

	if (!stat(a, &st[0]) && !S_ISREG(st[0].st_mode))
		return false;
	for (int i = 0; i < 2; i++) {
		const char *slash = strrchr(names[i], '/');

		last[i] = slash ? slash + 1 : names[i];
		snprintf(dir, sizeof(dir), "%.*s", slash ? (int)(last[i] - names[i]) : 1, slash ? names[i] : ".");
		if (stat(dir, &st[i]))
			return false;
	}
	return !strcmp(last[0], last[1]) && same(&st[0], &st[1]);
}

static int check_outputs(const struct run_options *o)
{
	int code = check_output(o, "--logits", o->logits);

	if (!code)
		code = check_output(o, "--stats", o->stats);
	if (!code && o->logits && o->stats && same_name(o->logits, o->stats))
		code = tool_usage_error("run", "--logits and --stats are one file, %s", o->stats);
	return code;
}

static int check_options(struct run_options *o)
{
	int code;

	if (!o->model)
		return tool_usage_error("run", "--model DIR is missing");
	if (!o->prompt == !o->prompt_file)
		return tool_usage_error("run", "one of --prompt TEXT and --prompt-file FILE is needed");
	if (o->block % 4096 || o->block < 4096 || o->block > 2u << 20)
		return tool_usage_error("run", "--block-bytes %llu: a multiple of 4K from 4K to 2M is needed",
					(unsigned long long)o->block);
	if (o->untiered && (o->gpu != RUN_UNSET || o->pinned != RUN_UNSET || o->ram != RUN_UNSET || o->disk != RUN_UNSET ||
			    o->disk_dir))
		return tool_usage_error("run", "--untiered keeps the whole cache in memory: it takes no budgets and no --disk-dir");
	if (o->store && (o->untiered || o->disk_dir))
		return tool_usage_error("run", "--store is where the disk tier lives: no --disk-dir, and no --untiered");
	if (o->device != RUN_UNSET && o->untiered)
		return tool_usage_error("run", "--device is of the gpu tier: no --untiered");
	if (o->device != RUN_UNSET && o->backend == KVT_BACKEND_CPU)
		return tool_usage_error("run", "--device says which GPU: no --backend cpu");
	if (o->device != RUN_UNSET && o->backend == KVT_BACKEND_AUTO && (o->gpu == RUN_UNSET || !o->gpu))
		return tool_usage_error("run", "--device says which GPU: without --gpu-bytes or --backend cuda none is used");
	if (o->warm && o->host == KVT_HOST_USER)
		return tool_usage_error("run", "--warm keeps the ram tier in the kernel module: no --host user");
	if (o->warm && strlen(o->warm) >= KVTIER_NAME_BYTES)
		return tool_usage_error("run", "--warm: a name has at most %d bytes, not %zu", KVTIER_NAME_BYTES - 1, strlen(o->warm));
	code = check_outputs(o);
	return code ? code : check_sampling(o);
}

int run_options_parse(int argc, char **argv, struct run_options *o)
{
	const struct spec *s;
	int code;

	*o = (struct run_options){ .max_tokens = DEFAULT_MAX_TOKENS, .chunk = DEFAULT_CHUNK, .block = DEFAULT_BLOCK,
				   .gpu = RUN_UNSET, .pinned = RUN_UNSET, .ram = RUN_UNSET, .disk = RUN_UNSET,
				   .device = RUN_UNSET, .kv_type = KVT_F16, .sampling = KVT_SAMPLER_PARAMS_INIT };
	o->sampling.temperature = 0;
	o->sampling.flags = KVT_SAMPLER_ADAPTIVE;
	tool_words = words;
	for (int i = 1; i < argc; i++) {
		s = find_option(argv[i]);
		if (!s)
			return tool_usage_error("run", "\"%s\" is not an option", argv[i]);
		if (s->kind != FLAG && ++i == argc)
			return tool_usage_error("run", "%s needs a value", s->name);
		code = set_option(s, argv[i], o);
		if (code)
			return code;
	}
	return check_options(o);
}

void run_options_free(struct run_options *o)
{
	free(o->bias);
	o->bias = NULL;
}
