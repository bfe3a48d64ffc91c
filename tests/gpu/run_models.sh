#!/bin/bash
# SPDX-License-Identifier: MIT
# kvtier run --backend cuda on a machine with a GPU: the same logits wherever blocks are and however a prompt is cut, close
# to the CPU's, and the answers that the demo model knows. For a bare machine: needs bash, coreutils and python3.
#
#	run_models.sh [KVTIER DEMO [STORIES [PROMPTS]]]
#
# Without arguments: what the build and the source have; skipped where there is no GPU, or no kernels in the build.
# DEMO: tests/data/kvt-demo. STORIES: a directory of stories260K, heads of 8 elements. PROMPTS: how many of
# 12, of 4K tokens and of 32K.
set -u
kvtier=${1:-$KVT_BUILD/kvtier}
demo=${2:-$KVT_SOURCE/tests/data/kvt-demo}
stories=${3:-}
if [ $# = 0 ]; then
	out=$("$kvtier" run --model "$demo" --prompt x --max-tokens 1 --backend cuda 2>&1 >/dev/null) || { echo "$out"; exit 77; }
	[ ! -d "${KVT_INPUTS:-}/models/stories260K-hf" ] || stories=$KVT_INPUTS/models/stories260K-hf
fi
prompts=${4:-12}
dir=$(mktemp -d)
export TMPDIR=$dir
trap 'rm -rf "$dir"' EXIT
failed=0

fail() {
	echo "FAIL: $*"
	failed=1
}

# run OPTIONS...: of $model and $prompt, on the GPU
run() {
	"$kvtier" run --model "$model" --prompt-file "$prompt" --max-tokens 16 --backend cuda --stats "$dir/stats" \
		"$@"
}

# same OPTIONS...: the bytes of the first run
same() {
	if ! run "$@" --logits "$dir/logits" >"$dir/text" 2>"$dir/err"; then
		fail "$name, $*: $(cat "$dir/err")"
	elif ! cmp -s "$dir/logits" "$dir/want" || ! cmp -s "$dir/text" "$dir/text.want"; then
		fail "$name, $*: other bytes"
	elif ! grep -q '"on_gpu": true' "$dir/stats"; then
		fail "$name, $*: the CPU computed"
	fi
	runs=$((runs + 1))
}

# needs OPTIONS...: the least --gpu-bytes
needs() {
	run --gpu-bytes 1 "$@" 2>&1 >/dev/null | sed -n 's/.*at least \([0-9]*\) are needed.*/\1/p'
}

# bits KV: in all the ways that must not matter; KV bytes of rows
bits() {
	kv=$1
	runs=0
	if ! run --logits "$dir/want" >"$dir/text.want" 2>"$dir/err"; then
		fail "$name: $(cat "$dir/err")"
		return
	fi
	grep -q '"on_gpu": true' "$dir/stats" || fail "$name: the CPU computed: $(cat "$dir/err")"
	grep -o '"[a-z]*_tokens_per_s": [0-9.]*' "$dir/stats" | tr '\n' ' '
	same
	for block in 4K 16K 64K 1M; do
		least=$(needs --block-bytes $block)
		[ -n "$least" ] || fail "$name: no least --gpu-bytes for blocks of $block"
		same --block-bytes $block
		same --block-bytes $block --gpu-bytes "${least:-1M}"
		run --block-bytes $block --gpu-bytes $((least - 1)) >/dev/null 2>&1 && fail "$name: it runs with less than the least"
	done
	for part in 2 12; do
		least=$(needs --block-bytes 16K)
		same --block-bytes 16K --gpu-bytes $((least + kv / part))
		same --block-bytes 16K --gpu-bytes $((least + kv / part)) --disk-bytes 256M
	done
	for chunk in 1 7 64 512 100000; do
		least=$(needs --block-bytes 16K --prefill-chunk $chunk)
		same --prefill-chunk $chunk
		same --prefill-chunk $chunk --block-bytes 16K --gpu-bytes $((least + kv / 3))
	done
	same --store "$dir/store"
	same --store "$dir/store" --gpu-bytes $(($(needs) + kv / 3))
	grep -q '"cached_tokens": [1-9]' "$dir/stats" || fail "$name: --store kept nothing"
	rm -rf "$dir/store"
	"$kvtier" run --model "$model" --prompt-file "$prompt" --max-tokens 16 --backend cpu --untiered --logits "$dir/cpu" \
		>"$dir/text.cpu" || fail "$name: on the CPU"
	cmp -s "$dir/text.cpu" "$dir/text.want" && text=same || text=other
	python3 - "$dir/want" "$dir/cpu" "$name" $runs "$text" <<'END'
import array, sys
rows = [array.array("f", open(p, "rb").read()) for p in sys.argv[1:3]]
n = len(rows[0]) // 16  # the first row: behind it, other tokens may follow
print("%s: %s runs with the same bytes; logits differ from the CPU's by %.3g; %s text" %
      (sys.argv[3], sys.argv[4], max(abs(a - b) for a, b in zip(rows[0][:n], rows[1][:n])), sys.argv[5]))
END
}

model=$demo
name=kvt-demo
prompt=$dir/prompt
head -c 1500 "$demo/heldout.txt" >"$prompt"
bits $((1516 * 3072))
if [ -n "$stories" ]; then
	model=$stories
	name=stories260K
	printf 'Once upon a time, there was a little girl named Lily. She loved to play outside in the park.' >"$prompt"
	bits $((60 * 640))
fi

# needles FILE BYTES: the digits that each prompt of a file hides, with so much of the cache on the GPU and the rest pinned
needles() {
	right=0
	for i in $(seq "$prompts"); do
		python3 - "$demo/$1" "$i" "$dir/prompt" "$dir/answer" <<'END'
import itertools, json, sys
o = json.loads(next(itertools.islice(open(sys.argv[1]), int(sys.argv[2]) - 1, None)))
open(sys.argv[3], "w").write(o["prompt"])
open(sys.argv[4], "w").write(o["answer"] + "\n")
END
		if ! run --max-tokens 7 --gpu-bytes $(($(needs) + $2)) >"$dir/text" 2>"$dir/err"; then
			fail "$1, $i: $(cat "$dir/err")"
		elif cmp -s "$dir/text" "$dir/answer"; then
			right=$((right + 1))
		else
			fail "$1, $i: $(head -c 20 "$dir/text") is not $(cat "$dir/answer")"
		fi
	done
	echo "$1: $right of $prompts; $(grep -o '"[a-z]*_tokens_per_s": [0-9]*' "$dir/stats" | tr '\n' ' ')"
}

model=$demo
prompt=$dir/prompt
needles needle_4k.jsonl $((6 << 20))
needles needle_32k.jsonl $((8 << 20)) # a twelfth

# what does not fit
message=$(run --gpu-bytes 1000G 2>&1 >/dev/null) && fail "1000G of GPU memory"
case $message in
*"are free"*) ;;
*) fail "1000G of GPU memory: $message" ;;
esac
exit $failed
