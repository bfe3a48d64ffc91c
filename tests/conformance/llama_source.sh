#!/bin/bash
# SPDX-License-Identifier: MIT
# A llama.cpp built here from the source package of llama-cpp-python, whose backend API is another version than Debian's: the
# same 512 tokens and perplexity with the plug-in as without, and the same bits with a tenth of K and V in memory; its own test
# of operations passes. (Its test of architectures loads no plug-ins.)
# shellcheck source=tests/lib/llama.sh disable=SC2119
. "$KVT_SOURCE/tests/lib/llama.sh"
need_model
source=$cache/source
[ -e "$source/.done" ] || skip "no llama.cpp in $source: scripts/llama/build"
dir=$TMPDIR/source
mkdir "$dir"
version() { grep -rhoE 'GGML_BACKEND_API_VERSION +[0-9]+' "$1" | grep -oE '[0-9]+$'; }
echo "backend API $(version "$source/llama.cpp/ggml/src/ggml-backend-impl.h")"
cc -std=gnu11 -O1 -isystem "$source/llama.cpp/include" -isystem "$source/llama.cpp/ggml/include" -o "$dir/perplexity" \
	tests/llama/perplexity.c -L"$source/build/bin" -Wl,-rpath,"$source/build/bin" -lllama -lggml -lggml-base -lm || exit 1
scripts/llama/gguf tests/data/kvt-demo "$dir/model.gguf" || exit 1
printf 'Once upon a time, there was a little girl named Lily. She' >"$dir/story"

# run_it VARIABLE=VALUE... -- MODEL TEXT TOKENS DEVICE [MORE]
run_it() {
	local vars=()
	while [ "$1" != -- ]; do vars+=("$1"); shift; done
	OMP_WAIT_POLICY=passive env GGML_BACKEND_PATH="$plugin" "${vars[@]}" \
		"$dir/perplexity" "$2" "$3" "$4" "$5" f16 f16 "${@:6}" 2>"$dir/err" || tail -n 3 "$dir/err"
}
tiers=(KVTIER_DEVICE=always KVTIER_THREADS=1 KVTIER_DISK_BYTES=16M KVTIER_DISK_DIR="$dir" KVTIER_BLOCK_BYTES=8K
	KVTIER_MAX_QUERY_ROWS=64 KVTIER_STATS="$dir/stats")

run_it LANG=C -- "$model" "$dir/story" 12 - 512 | tail -n +2 >"$dir/stock"
run_it "${tiers[@]}" KVTIER_RAM_BYTES=64M -- "$model" "$dir/story" 12 KVTIER0 512 | tail -n +2 >"$dir/ours"
[ "$(wc -c <"$dir/stock")" -gt 1000 ] || wrong "no story: $(head -c 200 "$dir/stock")"
cmp "$dir/stock" "$dir/ours" || wrong "another story"
[ "$(counter rows_written "$dir/stats")" -gt 5000 ] || wrong "rows were written elsewhere"

text=(-- "$dir/model.gguf" tests/data/kvt-demo/heldout.txt 768)
stock=$(run_it LANG=C "${text[@]}" -)
all=$(run_it "${tiers[@]}" KVTIER_RAM_BYTES=64M "${text[@]}" KVTIER0)
echo "llama.cpp $stock, with the plug-in $all"
awk -v a="${stock%% *}" -v b="${all%% *}" 'BEGIN { d = a - b; exit !(a > 1 && d * d < a * a * 0.0005 ^ 2) }' ||
	wrong "perplexity ${all%% *}, without the plug-in ${stock%% *}"
run_it "${tiers[@]}" KVTIER_RAM_BYTES=1K "${text[@]}" KVTIER0 >"$dir/refusal"
least=$(grep -o 'needs at least [0-9]*' "$dir/err" | tail -n 1 | grep -o '[0-9]*')
ram=$((${least:-0} + 768 * 6 * 2 * 128 * 2 / 10))
[ "$(run_it "${tiers[@]}" KVTIER_RAM_BYTES=$ram "${text[@]}" KVTIER0)" = "$all" ] || wrong "a tenth in memory: other bits"
[ "$(tier ram peak "$dir/stats")" -le $ram ] || wrong "$(tier ram peak "$dir/stats") bytes of memory, $ram allowed"
[ "$(counter disk_reads "$dir/stats")" -gt 100 ] || wrong "nothing came from disk"

ops built SET_ROWS 100
ops built GET_ROWS 20
ops built CPY 40
ops built ROPE 60
ops built FLASH_ATTN_EXT 100 'kv=113,nb=3,.*type_K=f16'
rm -rf "$dir"
exit $failed
