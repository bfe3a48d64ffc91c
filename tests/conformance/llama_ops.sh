#!/bin/bash
# SPDX-License-Identifier: MIT
# llama.cpp's own test of operations on every one that the device takes, its tensors being KV tensors.
# shellcheck source=tests/lib/llama.sh
. "$KVT_SOURCE/tests/lib/llama.sh"
ops tiered SET_ROWS 100
ops tiered GET_ROWS 20
ops tiered CPY 40
ops tiered ROPE 60
# one and several queries, each size of heads, masks, sinks, ALiBi, soft-cap, groups and streams
ops tiered FLASH_ATTN_EXT 400 'kv=113,nb=[13],|kv=512,nb=3,.*type_K=(bf16|q8_0|q4_0)'
exit $failed
