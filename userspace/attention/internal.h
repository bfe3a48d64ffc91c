/* SPDX-License-Identifier: MIT */
/* What the attention kernels share across instruction sets. */
#ifndef KVT_ATTENTION_INTERNAL_H
#define KVT_ATTENTION_INTERNAL_H

#include "attention/kernel.h"
#include "base/cpu.h"

KVT_ISA_DECLARE(extern const struct kvt_attn_kernels, kvt_attn);

#endif
