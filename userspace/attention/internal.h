/* SPDX-License-Identifier: MIT */
/* What the attention kernels share across instruction sets. */
#ifndef KVT_ATTENTION_INTERNAL_H
#define KVT_ATTENTION_INTERNAL_H

#include "attention/kernel.h"
#include "base/cpu.h"

KVT_ISA_DECLARE(extern const struct kvt_attn_kernels, kvt_attn);

/* Make row @i's output NaN, whatever is merged into it. */
void kvt_attn_state_spoil(struct kvt_attn_state *, uint32_t i, uint32_t v_dim);

#endif
