#!/bin/bash
# SPDX-License-Identifier: MIT
# A larger trained model (SmolLM2 of 135 million parameters) with stock llama.cpp, greedy, 512 tokens: the same text with the
# plug-in and a tenth of K and V in memory as without it. Its weights are 32-bit floats there: as they are, Q4_1, llama.cpp
# rounds what they are multiplied with to 8 bits, and its own text changes with -fa off. So those are held to their own
# log-probabilities with all in memory.
# shellcheck source=tests/lib/llama.sh disable=SC2119
. "$KVT_SOURCE/tests/lib/llama.sh"
[ -e "$cache/model/.done" ] || skip "no larger model in $cache: scripts/llama/model"
dir=$TMPDIR/larger
mkdir "$dir"
prompt='The history of the lighthouse begins long before the age of sail. In the ancient world,'
on=(-dev KVTIER0 -ngl 99 -fa on)
load=(GGML_BACKEND_PATH="$plugin" KVTIER_STATS="$dir/stats" KVTIER_DISK_BYTES=64M KVTIER_DISK_DIR="$dir"
	KVTIER_BLOCK_BYTES=12K KVTIER_MAX_QUERY_ROWS=16)

# run_it NAME WEIGHTS TOKENS VARIABLE=VALUE... -- OPTION...
run_it() {
	local name=$1 weights=$2 tokens=$3
	shift 3
	# Copied to where the chroot sees it.
	[ -e "$dir/$weights.gguf" ] || ln "$cache/model/$weights.gguf" "$dir/" 2>/dev/null || cp "$cache/model/$weights.gguf" "$dir/"
	model=$dir/$weights.gguf
	serve "$@" -c 1024 -np 1 -t "$(nproc)" || { wrong "$name: no server: $(tail -n 5 "$TMPDIR/server.log")"; stop; return 1; }
	generate "$prompt" "$tokens" >"$dir/$name" || wrong "$name: no answer"
	stop
	[ "$(grep -c . "$dir/$name")" -gt "$tokens" ] || wrong "$name: $(grep -c . "$dir/$name") lines"
}

# what the cache takes for itself is known from its own refusal; K and V of 533 tokens are 30 layers of 2 x 384 bytes
least=$(run_it refused f32 1 "${load[@]}" KVTIER_RAM_BYTES=1K -- "${on[@]}" >/dev/null
	grep -o 'needs at least [0-9]*' "$TMPDIR/server.log" | tail -n 1 | grep -o '[0-9]*')
[ "${least:-0}" -gt 100000 ] || wrong "no refusal of 1 KB that says what is needed: $(grep kvtier: "$TMPDIR/server.log" | head -n 2)"
tenth=$((least + 533 * 30 * 2 * 384 / 10))

run_it stock f32 512 LANG=C -- -fa on
run_it tenth f32 512 "${load[@]}" KVTIER_RAM_BYTES=$tenth -- "${on[@]}"
text_of "$dir/stock" >"$dir/stock.text"
text_of "$dir/tenth" | cmp - "$dir/stock.text" || wrong "the text differs from llama.cpp's own"
[ "$(tier ram peak "$dir/stats")" -le $tenth ] || wrong "$(tier ram peak "$dir/stats") bytes of memory, $tenth allowed"
[ "$(counter disk_reads "$dir/stats")" -gt 1000 ] || wrong "few reads from disk"
run_it all q4_1 48 "${load[@]}" KVTIER_RAM_BYTES=256M -- "${on[@]}"
run_it part q4_1 48 "${load[@]}" KVTIER_RAM_BYTES=$((least + 100000)) -- "${on[@]}"
cmp "$dir/all" "$dir/part" || wrong "Q4_1: another placement, other log-probabilities"
rm -rf "$dir" "$TMPDIR/server.log"
exit $failed
