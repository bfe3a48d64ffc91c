#!/bin/bash
# SPDX-License-Identifier: MIT
# A trained model over a real text by llama.cpp's library, with every type of K and V: perplexity as without the plug-in; and
# every logit's bits the same with all of K and V in memory, a half, a tenth and a fiftieth, 1 to 4 threads, other block sizes.
# shellcheck source=tests/lib/llama.sh disable=SC2119
. "$KVT_SOURCE/tests/lib/llama.sh"
dir=$TMPDIR/perplexity
root=$cache/forky
tokens=${KVT_LLAMA_TOKENS:-768}
mkdir -p "$dir/include"
ln -s "$root"/usr/include/{ggml*,llama,gguf}.h "$dir/include/"
[ -e "$dir/include/llama.h" ] || skip "the chroot has no llama.h"
# its libraries want a newer libc than this one: found in the chroot
cc -std=gnu11 -O1 -isystem "$dir/include" -o "$dir/perplexity" tests/llama/perplexity.c -L"$root/usr/lib/$(cc -dumpmachine)" \
	-l:libllama.so.0 -l:libggml.so.0 -l:libggml-base.so.0 -lm -Wl,--unresolved-symbols=ignore-all || exit 1
scripts/llama/gguf tests/data/kvt-demo "$dir/model.gguf" || exit 1

# measure DEVICE TYPE_K TYPE_V VARIABLE=VALUE...
measure() {
	local args=("$dir/perplexity" "$dir/model.gguf" "$KVT_SOURCE/tests/data/kvt-demo/heldout.txt" "$tokens" "$1" "$2" "$3")
	shift 3
	tiered KVTIER_DEVICE=always "$@" "${args[@]}" 2>"$dir/err" || tail -n 3 "$dir/err" >&2
}

for types in 'f16 f16' 'bf16 bf16' 'f16 bf16' 'q8_0 q8_0' 'q8_0 q4_0'; do
	read -r k v <<<"$types"
	stock=$(tiered LANG=C "$dir/perplexity" "$dir/model.gguf" "$KVT_SOURCE/tests/data/kvt-demo/heldout.txt" "$tokens" - "$k" "$v" 2>/dev/null)
	all=$(measure KVTIER0 "$k" "$v" KVTIER_RAM_BYTES=256M KVTIER_THREADS=1)
	echo "$types: llama.cpp $stock, with the plug-in $all"
	# four digits for f16; else less: llama.cpp rounds queries to K's type before it multiplies, and codes ties otherwise
	case $types in 'f16 f16') part=0.0005 ;; *q4_0*) part=0.02 ;; *) part=0.003 ;; esac
	awk -v a="${stock%% *}" -v b="${all%% *}" -v part=$part \
		'BEGIN { d = a - b; exit !(a > 1 && d * d < a * a * part * part) }' ||
		wrong "$types: perplexity ${all%% *}, without the plug-in ${stock%% *}"
	[ "$types" = 'f16 f16' ] || continue
	bytes=$((tokens * 6 * 2 * 128 * 2))
	small=(KVTIER_DISK_BYTES=64M KVTIER_DISK_DIR="$dir" KVTIER_BLOCK_BYTES=8K KVTIER_MAX_QUERY_ROWS=64 KVTIER_STATS="$dir/stats")
	measure KVTIER0 f16 f16 "${small[@]}" KVTIER_RAM_BYTES=1K KVTIER_THREADS=1 >/dev/null 2>&1
	least=$(grep -o 'needs at least [0-9]*' "$dir/err" | tail -n 1 | grep -o '[0-9]*')
	for part in 2 10 50; do
		ram=$((least + bytes / part))
		got=$(measure KVTIER0 f16 f16 "${small[@]}" KVTIER_RAM_BYTES=$ram KVTIER_THREADS=1)
		[ "$got" = "$all" ] || wrong "1/$part in memory: $got, not $all"
		[ "$(tier ram peak "$dir/stats")" -le $ram ] || wrong "1/$part: $(tier ram peak "$dir/stats") bytes, $ram allowed"
		[ $part = 2 ] || [ "$(counter disk_reads "$dir/stats")" -gt 100 ] || wrong "1/$part: nothing came from disk"
	done
	for threads in 2 3 4; do
		got=$(measure KVTIER0 f16 f16 KVTIER_RAM_BYTES=256M KVTIER_THREADS=$threads KVTIER_BLOCK_BYTES=$((threads * 16))K)
		[ "$got" = "$all" ] || wrong "$threads threads: $got, not $all"
	done
done
rm -rf "$dir"
exit $failed
