// SPDX-License-Identifier: MIT
/*
 * What stands for a model in a directory of kept rows: a digest of all that a row
 * is a function of. It tells models apart that differ by accident, not by intent.
 */
#include <string.h>

#include "codec/codec.h"
#include "engines/ref/engine.h"

#define PIECE (1u << 20)

static void add(uint64_t word[4], const void *data, uint64_t bytes)
{
	const uint8_t *from = data;
	uint64_t d;
	uint32_t n;

	for (; bytes; bytes -= n, from += n) {
		n = bytes < PIECE ? (uint32_t)bytes : PIECE;
		d = kvt_row_digest(0, from, n);
		for (uint32_t i = 0; i < 4; i++) {
			word[i] = (word[i] << 29 | word[i] >> 35) * 0x9E3779B97F4A7C15ull;
			word[i] += kvt_row_digest(i + 1, &d, sizeof(d));
		}
	}
}

static void add_matrix(uint64_t word[4], const struct ref_matrix *m)
{
	if (m->panels)
		add(word, m->panels, ref_matrix_bytes(m->n, m->k));
}

void ref_fingerprint(const struct ref_model *m, uint8_t fingerprint[KVT_FINGERPRINT])
{
	const struct ref_config *c = &m->config;
	/* the last is this engine's arithmetic: raise it when its bits change */
	const uint32_t shape[] = { c->hidden, c->inter, c->layers, c->heads, c->kv_heads, c->head_dim, 1 };
	uint64_t word[4] = { 1, 2, 3, 4 };

	add(word, shape, sizeof(shape));
	add(word, &c->eps, sizeof(c->eps));
	add(word, m->frequency, c->head_dim / 2 * sizeof(*m->frequency));
	add_matrix(word, &m->embed);
	for (uint32_t i = 0; i < c->layers; i++) {
		const struct ref_layer *l = &m->layers[i];

		add(word, l->attn_norm, c->hidden * sizeof(float));
		add(word, l->mlp_norm, c->hidden * sizeof(float));
		add_matrix(word, &l->qkv);
		add_matrix(word, &l->out);
		add_matrix(word, &l->gate_up);
		add_matrix(word, &l->down);
	}
	memcpy(fingerprint, word, KVT_FINGERPRINT);
}
