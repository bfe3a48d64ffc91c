// SPDX-License-Identifier: MIT
/*
 * A model's weights, by the names Hugging Face or GGUF give them. All of them
 * are checked against the configuration before one byte is loaded, and nothing
 * in the file may be left over: what a configuration does not speak of would
 * be a model that runs and says something else. Then the loader brings the file
 * into memory, and each tensor is packed as floats and its bytes given back.
 */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "base/err.h"
#include "engines/ref/engine.h"
#include "runtime/loader.h"

#define PAGE 4096u

struct names {
	const char *layer, *layers; /* how a layer's tensors begin, and what says how many there are */
	const char *embed, *norm, *head, *attn_norm, *mlp_norm, *q, *k, *v, *out, *gate, *up, *down;
};

static const struct names hugging_face = {
	.layer = "model.layers.%u.",
	.layers = "num_hidden_layers",
	.embed = "model.embed_tokens.weight",
	.norm = "model.norm.weight",
	.head = "lm_head.weight",
	.attn_norm = "model.layers.%u.input_layernorm.weight",
	.mlp_norm = "model.layers.%u.post_attention_layernorm.weight",
	.q = "model.layers.%u.self_attn.q_proj.weight",
	.k = "model.layers.%u.self_attn.k_proj.weight",
	.v = "model.layers.%u.self_attn.v_proj.weight",
	.out = "model.layers.%u.self_attn.o_proj.weight",
	.gate = "model.layers.%u.mlp.gate_proj.weight",
	.up = "model.layers.%u.mlp.up_proj.weight",
	.down = "model.layers.%u.mlp.down_proj.weight",
};

static const struct names gguf = {
	.layer = "blk.%u.",
	.layers = "llama.block_count",
	.embed = "token_embd.weight",
	.norm = "output_norm.weight",
	.head = "output.weight",
	.attn_norm = "blk.%u.attn_norm.weight",
	.mlp_norm = "blk.%u.ffn_norm.weight",
	.q = "blk.%u.attn_q.weight",
	.k = "blk.%u.attn_k.weight",
	.v = "blk.%u.attn_v.weight",
	.out = "blk.%u.attn_output.weight",
	.gate = "blk.%u.ffn_gate.weight",
	.up = "blk.%u.ffn_up.weight",
	.down = "blk.%u.ffn_down.weight",
};

struct loader {
	const struct kvt_weights *w;
	const struct names *names;
	struct ref_model *model;
	uint32_t layer; /* that %u stands for */
	struct kvt_load_image image; /* empty: tensors are checked and counted, nothing is packed */
	bool *wanted;	  /* [w->n_tensors] */
	uint64_t largest; /* bytes of a packed matrix */
	float *row;
};

/* The tensor, if it is [rows][columns] and of a type that can be decoded. @rows 0: [columns]. */
static int find(const struct loader *l, const char *pattern, uint32_t rows, uint32_t columns,
		const struct kvt_tensor **tensor)
{
	const struct kvt_tensor *t;
	uint32_t block, bytes;
	char name[96];
	int err;

	snprintf(name, sizeof(name), pattern, l->layer);
	t = kvt_weights_find(l->w, name);
	if (!t)
		return kvt_fail(-EINVAL, "%s: there is no tensor \"%s\"", l->w->path, name);
	err = kvt_tensor_decodes(l->w, t);
	if (err)
		return err;
	kvt_dtype_block(t->dtype, &block, &bytes);
	if (t->rank != (rows ? 2 : 1) || t->shape[t->rank - 1] != columns || (rows && t->shape[0] != rows) || columns % block)
		return kvt_fail(-EINVAL, "%s: tensor \"%s\" has %llu dimensions and %llu elements, the configuration wants "
				"[%u, %u]", l->w->path, name, (unsigned long long)t->rank, (unsigned long long)t->elements,
				rows ? rows : 1, columns);
	l->wanted[t - l->w->tensors] = true;
	*tensor = t;
	return 0;
}

/* Row @j of a tensor in memory, as floats. */
static void decode_row(const struct loader *l, const struct kvt_tensor *t, uint32_t j, uint32_t columns, float *row)
{
	const uint64_t bytes = t->bytes / (t->elements / columns);
	const uint8_t *base = l->image.items[t - l->w->tensors].host;

	kvt_tensor_decode(t->dtype, base + j * bytes, columns, row);
}

/* A packed tensor's pages are the system's again, so that a model is not in memory twice. */
static void give_back(const struct loader *l, const struct kvt_tensor *t)
{
	const uintptr_t base = (uintptr_t)l->image.items[t - l->w->tensors].host;
	const uintptr_t begin = (base + PAGE - 1) / PAGE * PAGE, end = (base + t->bytes) / PAGE * PAGE;

	if (begin < end)
		madvise((void *)begin, end - begin, MADV_DONTNEED);
}

static int load_vector(struct loader *l, const char *pattern, uint32_t n, float **vector)
{
	const struct kvt_tensor *t = NULL;
	int err = find(l, pattern, 0, n, &t);

	if (err)
		return err;
	if (!l->image.items) {
		l->model->bytes += n * sizeof(**vector);
		return 0;
	}
	*vector = malloc(n * sizeof(**vector));
	if (!*vector)
		return kvt_fail(-ENOMEM, "no memory for %u floats", n);
	decode_row(l, t, 0, n, *vector);
	return 0;
}

/*
 * Where row @j of a file's Q or K belongs in a head of @dim. GGUF has the
 * pairs that RoPE turns side by side, (2i, 2i + 1), the engine half a head
 * apart, (i, i + dim / 2).
 */
static uint32_t rotate_half_row(uint32_t j, uint32_t dim)
{
	return j / dim * dim + j % dim % 2 * (dim / 2) + j % dim / 2;
}

/* A tensor into rows [first, first + rows) of @m. */
static void pack(struct loader *l, const struct kvt_tensor *t, struct ref_matrix *m, uint32_t first, uint32_t rows,
		 bool turns)
{
	for (uint32_t j = 0; j < rows; j++) {
		decode_row(l, t, j, m->k, l->row);
		ref_matrix_set(m, first + (turns ? rotate_half_row(j, l->model->config.head_dim) : j), l->row);
	}
	give_back(l, t);
}

struct part {
	const char *name;
	uint32_t rows;
	bool turns;
};

/* Tensors one below the other in one matrix. */
static int load_matrix(struct loader *l, const struct part *parts, uint32_t n_parts, uint32_t k, struct ref_matrix *m)
{
	const struct kvt_tensor *t[3];
	uint32_t rows = 0, first = 0;
	uint64_t bytes;
	int err = 0;

	for (uint32_t i = 0; !err && i < n_parts; rows += parts[i++].rows)
		err = find(l, parts[i].name, parts[i].rows, k, &t[i]);
	if (err)
		return err;
	if (!l->image.items) {
		bytes = ref_matrix_bytes(rows, k);
		l->model->bytes += bytes;
		l->largest = bytes > l->largest ? bytes : l->largest;
		return 0;
	}
	err = ref_matrix_alloc(m, rows, k);
	for (uint32_t i = 0; !err && i < n_parts; first += parts[i++].rows)
		pack(l, t[i], m, first, parts[i].rows, parts[i].turns);
	return err;
}

static int load_layer(struct loader *l, struct ref_layer *layer)
{
	const struct ref_config *c = &l->model->config;
	const struct names *names = l->names;
	const bool turns = names == &gguf;
	const struct part qkv[] = {
		{ names->q, c->heads * c->head_dim, turns },
		{ names->k, c->kv_heads * c->head_dim, turns },
		{ names->v, c->kv_heads * c->head_dim, false },
	};
	const struct part out[] = { { names->out, c->hidden, false } };
	const struct part gate_up[] = { { names->gate, c->inter, false }, { names->up, c->inter, false } };
	const struct part down[] = { { names->down, c->hidden, false } };
	int err;

	err = load_vector(l, names->attn_norm, c->hidden, &layer->attn_norm);
	if (!err)
		err = load_matrix(l, qkv, 3, c->hidden, &layer->qkv);
	if (!err)
		err = load_matrix(l, out, 1, c->heads * c->head_dim, &layer->out);
	if (!err)
		err = load_vector(l, names->mlp_norm, c->hidden, &layer->mlp_norm);
	if (!err)
		err = load_matrix(l, gate_up, 2, c->hidden, &layer->gate_up);
	if (!err)
		err = load_matrix(l, down, 1, c->inter, &layer->down);
	return err;
}

/* Radians a position, for each pair of a head. Llama 3.1 stretches the long waves and leaves the short ones. */
static int set_frequencies(struct loader *l)
{
	const struct ref_config *c = &l->model->config;
	const uint32_t half = c->head_dim / 2;
	const struct kvt_tensor *t;
	const bool stretched = l->names == &gguf && kvt_weights_find(l->w, "rope_freqs.weight");
	double *f;
	int err;

	/* GGUF has Llama 3.1's stretch as divisors. */
	if (stretched) {
		err = find(l, "rope_freqs.weight", 0, half, &t);
		if (err)
			return err;
	}
	if (!l->image.items)
		return 0;
	f = calloc(half, sizeof(*f));
	l->model->frequency = f;
	if (!f)
		return kvt_fail(-ENOMEM, "no memory for %u frequencies", half);
	for (uint32_t i = 0; i < half; i++) {
		double waves, smooth;

		f[i] = pow(c->rope_theta, -2.0 * i / c->head_dim);
		waves = c->rope_context * f[i] / (2 * M_PI);
		if (c->rope == REF_ROPE_LINEAR || (c->rope == REF_ROPE_LLAMA3 && waves < c->rope_low))
			f[i] /= c->rope_factor;
		else if (c->rope == REF_ROPE_LLAMA3 && waves < c->rope_high) {
			smooth = (waves - c->rope_low) / (c->rope_high - c->rope_low);
			f[i] = (1 - smooth) * f[i] / c->rope_factor + smooth * f[i];
		}
	}
	if (stretched)
		decode_row(l, t, 0, half, l->row);
	for (uint32_t i = 0; stretched && i < half; i++) {
		if (!(l->row[i] > 0) || !isfinite(l->row[i]))
			return kvt_fail(-EINVAL, "%s: \"rope_freqs.weight\" has the divisor %g", l->w->path, (double)l->row[i]);
		f[i] /= (double)l->row[i];
	}
	return 0;
}

static int refuse_biases(const struct kvt_weights *w)
{
	char quoted[96];

	for (uint32_t i = 0; i < w->n_tensors; i++) {
		const struct kvt_tensor *t = &w->tensors[i];

		if (t->name_len >= 5 && !memcmp(t->name + t->name_len - 5, ".bias", 5))
			return kvt_fail(-EINVAL, "%s: there is a tensor %s; biases are not supported", w->path,
					ref_quote(quoted, sizeof(quoted), t->name));
	}
	return 0;
}

/* Left over, and known to be of no use here: what some files carry beside their weights. */
static bool harmless(const struct loader *l, const char *name)
{
	const char *dot = strstr(name, ".rotary_emb.inv_freq");

	return (dot && !dot[strlen(".rotary_emb.inv_freq")]) || (l->model->config.tied && !strcmp(name, l->names->head));
}

static int refuse_strangers(const struct loader *l)
{
	const uint32_t layers = l->model->config.layers;
	char quoted[96];
	uint32_t layer;

	for (uint32_t i = 0; i < l->w->n_tensors; i++) {
		const char *name = l->w->tensors[i].name;

		if (l->wanted[i] || harmless(l, name))
			continue;
		ref_quote(quoted, sizeof(quoted), name);
		if (sscanf(name, l->names->layer, &layer) == 1 && layer >= layers)
			return kvt_fail(-EINVAL, "%s: there is a tensor %s, and \"%s\" is %u: the weights have more layers than "
					"the configuration", l->w->path, quoted, l->names->layers, layers);
		return kvt_fail(-EINVAL, "%s: there is a tensor %s, for which a Llama model of this configuration has no use", l->w->path,
				quoted);
	}
	return 0;
}

static int each_tensor(struct loader *l)
{
	struct ref_model *m = l->model;
	const struct ref_config *c = &m->config;
	const struct part embed[] = { { l->names->embed, c->vocab, false } };
	const struct part head[] = { { l->names->head, c->vocab, false } };
	int err;

	err = set_frequencies(l);
	if (!err)
		err = load_matrix(l, embed, 1, c->hidden, &m->embed);
	if (!err && !c->tied)
		err = load_matrix(l, head, 1, c->hidden, &m->head);
	for (l->layer = 0; !err && l->layer < c->layers; l->layer++)
		err = load_layer(l, &m->layers[l->layer]);
	if (!err)
		err = load_vector(l, l->names->norm, c->hidden, &m->norm);
	return err;
}

/*
 * At the most the file's bytes and the matrix being packed, or all matrices and
 * the tensors of the last one, are in memory.
 */
static int fits(const struct loader *l)
{
	const uint64_t file = kvt_load_layout(l->w, NULL, NULL), packed = l->model->bytes;

	return kvt_load_fits((file > packed ? file : packed) + l->largest, NULL);
}

static int load_weights(struct loader *l, const struct kvt_load_params *how)
{
	struct ref_model *m = l->model;
	const struct ref_config *c = &m->config;
	const uint32_t widest = c->hidden > c->inter ? c->hidden : c->inter;
	int err;

	l->row = malloc((widest > c->heads * c->head_dim ? widest : c->heads * c->head_dim) * sizeof(*l->row));
	l->wanted = calloc((size_t)l->w->n_tensors + 1, sizeof(*l->wanted));
	m->layers = calloc(c->layers, sizeof(*m->layers));
	if (!l->row || !l->wanted || !m->layers)
		return kvt_fail(-ENOMEM, "no memory for %u layers", c->layers);
	err = refuse_biases(l->w);
	if (!err)
		err = each_tensor(l);
	if (!err)
		err = refuse_strangers(l);
	if (!err)
		err = fits(l);
	if (!err)
		err = kvt_load_image(l->w, how, NULL, &l->image, NULL);
	return err ? err : each_tensor(l);
}

int ref_model_load(const char *path, const char *tokenizer, const struct kvt_load_params *how, struct ref_model **model)
{
	struct ref_model *m = calloc(1, sizeof(*m));
	struct kvt_weights *w = NULL;
	struct loader l = { .model = m };
	char file[4096] = "";
	struct stat st;
	int err = 0;

	if (!m)
		return kvt_fail(-ENOMEM, "no memory for a model");
	if (stat(path, &st))
		err = kvt_fail(-errno, "%s: %s", path, strerror(errno));
	if (!err && S_ISDIR(st.st_mode)) {
		if (snprintf(file, sizeof(file), "%s/config.json", path) >= (int)sizeof(file))
			err = kvt_fail(-ENAMETOOLONG, "%s: the path is too long", path);
		if (!err)
			err = ref_config_load(file, &m->config);
	}
	if (!err)
		err = kvt_weights_open(path, &w);
	if (err)
		goto free_model;
	l.w = w;
	l.names = w->format == KVT_GGUF ? &gguf : &hugging_face;
	if (w->format == KVT_GGUF)
		err = ref_gguf_config(w, &m->config);
	else if (!S_ISDIR(st.st_mode))
		err = kvt_fail(-EINVAL, "%s: a directory with config.json and model.safetensors is wanted, or a .gguf file", path);
	file[0] = 0;
	if (!err && w->format == KVT_GGUF && !tokenizer)
		err = ref_gguf_tokenizer(w, &m->config, &m->tokenizer);
	else if (!err && !tokenizer)
		err = ref_tokenizer_find(path, file, sizeof(file));
	if (!err && !m->tokenizer)
		err = ref_tokenizer_load(tokenizer ? tokenizer : file[0] ? file : NULL, &m->config, &m->tokenizer);
	if (!err)
		err = load_weights(&l, how);
	kvt_load_image_free(&l.image);
	free(l.wanted);
	free(l.row);
	kvt_weights_close(w);
	if (err)
		goto free_model;
	*model = m;
	return 0;

free_model:
	ref_model_free(m);
	return err;
}

void ref_model_free(struct ref_model *m)
{
	if (!m)
		return;
	for (uint32_t i = 0; m->layers && i < m->config.layers; i++) {
		struct ref_layer *l = &m->layers[i];

		free(l->attn_norm);
		free(l->mlp_norm);
		ref_matrix_free(&l->qkv);
		ref_matrix_free(&l->out);
		ref_matrix_free(&l->gate_up);
		ref_matrix_free(&l->down);
	}
	free(m->layers);
	free(m->frequency);
	free(m->norm);
	ref_matrix_free(&m->embed);
	ref_matrix_free(&m->head);
	ref_tokenizer_free(m->tokenizer);
	free(m);
}
