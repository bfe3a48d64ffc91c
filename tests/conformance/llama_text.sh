#!/bin/bash
# SPDX-License-Identifier: MIT
# Stock llama.cpp, greedy, 512 tokens of a trained model: the same text with the plug-in as without it. With all in memory,
# with 1/2, 1/10 and 1/50 of it, and with 1 to 4 threads, the log-probabilities are the same to the last digit. Loaded but
# not chosen, or not configured, it changes nothing.
# shellcheck source=tests/lib/llama.sh disable=SC2119
. "$KVT_SOURCE/tests/lib/llama.sh"
need_model
dir=$TMPDIR/text
mkdir "$dir"
story='Once upon a time, there was a little girl'

# run NAME VARIABLE=VALUE... -- OPTION...
run_text() {
	local name=$1
	shift
	serve "$@" -c 2048 -np 1 || { wrong "$name: no server: $(tail -n 5 "$TMPDIR/server.log")"; stop; return 1; }
	generate "$story" 512 >"$dir/$name" || wrong "$name: no answer"
	stop
	[ "$(grep -c . "$dir/$name")" -gt 512 ] || wrong "$name: $(grep -c . "$dir/$name") lines"
}

# as NAME OTHER: the same bytes
as() { cmp "$dir/$1" "$dir/$2" || wrong "$1 differs from $2"; }

on=(-dev KVTIER0 -ngl 99 -fa on)
load=(GGML_BACKEND_PATH="$plugin")
small=("${load[@]}" KVTIER_DISK_BYTES=8M KVTIER_DISK_DIR="$dir" KVTIER_BLOCK_BYTES=4K KVTIER_MAX_QUERY_ROWS=16)

run_text stock -- -fa on
run_text unconfigured "${load[@]}" -- -fa on && as unconfigured stock
run_text unchosen "${load[@]}" KVTIER_RAM_BYTES=64M -- -fa on && as unchosen stock
run_text ram "${load[@]}" KVTIER_RAM_BYTES=64M KVTIER_THREADS=1 KVTIER_STATS="$dir/stats" -- "${on[@]}"
text_of "$dir/ram" >"$dir/ram.text"
text_of "$dir/stock" | cmp - "$dir/ram.text" || wrong "the text differs from llama.cpp's own"
[ "$(counter rows_written "$dir/stats")" -gt 5000 ] || wrong "rows were written elsewhere: $(counter rows_written "$dir/stats")"
for threads in 2 3 4; do
	run_text "threads$threads" "${load[@]}" KVTIER_RAM_BYTES=64M KVTIER_THREADS=$threads -- "${on[@]}" && as "threads$threads" ram
done
# K and V of 523 tokens are 340 KB, the least that a cache takes for itself is known from its own refusal
least=$(KVTIER=1 serve "${small[@]}" KVTIER_RAM_BYTES=1K KVTIER_THREADS=1 -- "${on[@]}" -c 2048 -np 1
	grep -o 'needs at least [0-9]*' "$TMPDIR/server.log" | tail -n 1 | grep -o '[0-9]*')
stop
[ "${least:-0}" -gt 100000 ] || wrong "no refusal of 1 KB that says what is needed: $(grep kvtier: "$TMPDIR/server.log" | head -n 2)"
for part in 2 10 50; do
	ram=$((least + 340000 / part))
	run_text "part$part" "${small[@]}" KVTIER_RAM_BYTES=$ram KVTIER_THREADS=1 KVTIER_STATS="$dir/stats" -- "${on[@]}" || continue
	as "part$part" ram
	[ "$(tier ram peak "$dir/stats")" -le $ram ] || wrong "part$part: $(tier ram peak "$dir/stats") bytes of memory, $ram allowed"
	[ $part = 2 ] || [ "$(counter disk_reads "$dir/stats")" -gt 1000 ] || wrong "part$part: few reads from disk"
done
rm -rf "$dir" "$TMPDIR/server.log"
exit $failed
