/* SPDX-License-Identifier: MIT */
/* Which kernels serve this CPU, and the state that needs no arithmetic. */
#include "attention/internal.h"

#include <math.h>
#include <string.h>

static const struct kvt_attn_kernels *const kernels[KVT_ISAS] = KVT_ISA_TABLE(&kvt_attn);

const struct kvt_attn_kernels *kvt_attn_kernels(const char *isa)
{
	enum kvt_isa i = isa ? kvt_isa_find(isa) : kvt_isa_best();

	return i < KVT_ISAS && kvt_isa_usable(i) ? kernels[i] : NULL;
}

void kvt_attn_state_clear(struct kvt_attn_state *state, uint32_t m, uint32_t v_dim)
{
	for (uint32_t i = 0; i < m; i++) {
		state->max[i] = -INFINITY;
		state->sum[i] = 0;
	}
	memset(state->acc, 0, (size_t)m * v_dim * sizeof(float));
}
