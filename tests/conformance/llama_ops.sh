#!/bin/bash
# SPDX-License-Identifier: MIT
# llama.cpp's own test of operations on every one that the device takes, its tensors being KV tensors.
# shellcheck source=tests/lib/llama.sh
. "$KVT_SOURCE/tests/lib/llama.sh"
log=$TMPDIR/log

# ops OPERATION LEAST [PATTERN]: all pass, and at least so many ran
ops() {
	local n
	tiered KVTIER_RAM_BYTES=512M KVTIER_PLANES=all KVTIER_MAX_QUERY_ROWS=64 KVTIER_MAX_QUERY_HEADS=64 \
		test-backend-ops test -b KVTIER0 -o "$1" ${3:+-p "$3"} >"$log" 2>&1 || wrong "$1: $(grep -a FAIL "$log" | head -n 5)"
	n=$(grep -ac "$1(.*OK" "$log")
	echo "$1: $n passed"
	[ "$n" -ge "$2" ] || wrong "$1: only $n ran"
}

ops SET_ROWS 100
ops GET_ROWS 20
ops CPY 40
ops ROPE 60
# one and several queries, each size of heads, masks, sinks, ALiBi, soft-cap, groups and streams
ops FLASH_ATTN_EXT 400 'kv=113,nb=[13],|kv=512,nb=3,.*type_K=(bf16|q8_0|q4_0)'
rm -f "$log"
exit $failed
