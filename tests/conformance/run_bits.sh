#!/bin/sh
# SPDX-License-Identifier: MIT
# kvtier run: the logits file has the same bytes whatever the budgets, blocks, threads, chunks, I/O path and tiers.
set -u
model=$KVT_SOURCE/tests/data/kvt-demo
dir=$TMPDIR/bits
failed=0
mkdir "$dir"
head -c 1500 "$model/heldout.txt" >"$dir/prompt"

# run NAME OPTIONS...
run() {
	"$KVT_BUILD/kvtier" run --model "$model" --prompt-file "$dir/prompt" --max-tokens 12 --disk-dir "$dir" "$@"
}

# begin OPTIONS... &: the same in the background, $! being its own
begin() {
	exec "$KVT_BUILD/kvtier" run --model "$model" --prompt-file "$dir/prompt" --max-tokens 12 --disk-dir "$dir" "$@"
}

"$KVT_BUILD/kvtier" run --model "$model" --prompt-file "$dir/prompt" --max-tokens 12 --untiered \
	--logits "$dir/untiered.f32" >"$dir/untiered.txt" || exit 1
if [ "$(stat -c %s "$dir/untiered.f32")" != $((12 * 260 * 4)) ]; then
	echo "--logits holds $(stat -c %s "$dir/untiered.f32") bytes, not 12 rows of 260 floats"
	exit 1
fi

# same OPTIONS...: a run with them gives the bytes of the untiered one
same() {
	if ! run "$@" --logits "$dir/logits.f32" --stats "$dir/stats" >"$dir/text" 2>"$dir/err"; then
		echo "$*: $(cat "$dir/err")"
		failed=1
	elif ! cmp "$dir/logits.f32" "$dir/untiered.f32" || ! cmp "$dir/text" "$dir/untiered.txt"; then
		echo "$*: other bytes"
		failed=1
	fi
	rm -f "$dir/logits.f32"
}

# counted NAME: the counter is in the stats of the last run, and not 0
counted() {
	grep -q "\"$1\": [1-9]" "$dir/stats" || { echo "$1 is 0: the run has not tested what it should"; failed=1; }
}

# needs OPTIONS...: least=, the smallest --ram-bytes that runs, and books=, what of it is not frames
needs() {
	message=$(run --ram-bytes 1 "$@" 2>&1)
	least=$(echo "$message" | sed -n 's/.* at least \([0-9]*\) are needed.*/\1/p')
	books=$(echo "$message" | sed -n 's/.*(\([0-9]*\) of them bookkeeping.*/\1/p')
	[ -n "$least$books" ] || { echo "no least budget in: $message"; exit 1; }
}

kv=$((1511 * 3072)) # bytes: 6 layers, K and V, 2 heads of 64 in f16

for block in 4K 64K 1M; do
	needs --block-bytes $block
	same --block-bytes $block --ram-bytes "$least"
	if run --block-bytes $block --ram-bytes $((least - 1)) >/dev/null 2>&1; then
		echo "--block-bytes $block: it runs with less than the least"
		failed=1
	fi
done
needs --block-bytes 64K
same --pinned-bytes $((kv / 4)) --ram-bytes $((books + kv / 4))
needs --block-bytes 4K --pinned-bytes $((kv / 24))
same --block-bytes 4K --pinned-bytes $((kv / 24)) --ram-bytes $((books + kv / 24))
counted disk_reads
counted evictions
# whichever policy says what leaves: the same bytes, but not as many reads
for policy in auto lru s3fifo cost scan; do
	needs --block-bytes 4K --policy $policy
	same --block-bytes 4K --policy $policy --ram-bytes $((books + kv / 2))
	reads=$(sed -n 's/.*"disk_reads": \([0-9]*\).*/\1/p' "$dir/stats")
	[ $policy != lru ] || lru=$reads
	[ $policy != auto ] || auto=$reads
done
[ $((auto * 10)) -lt $((lru * 9)) ] || { echo "--policy auto reads $auto blocks from disk, lru $lru"; failed=1; }
for io in uring threads; do
	if [ $io = uring ] && "$KVT_BUILD/kvtier" doctor --json | tr -d ' \n' | grep -q '"name":"io_uring","status":"missing"'; then
		echo "SKIP: --io uring: the kernel denies it"
		continue
	fi
	needs --block-bytes 16K --io $io
	same --block-bytes 16K --ram-bytes "$least" --io $io
	counted disk_reads
done
# a disk tier of exactly the cache's blocks: 1511 rows of 256 bytes, in 12 planes
needs --block-bytes 16K
same --block-bytes 16K --ram-bytes "$least" --disk-bytes $((12 * 24 * 16384))
for threads in 1 2 3 7; do
	same --threads $threads
done
for chunk in 1 7 64 512 100000; do
	same --prefill-chunk $chunk
done
same --block-bytes 16K --gpu-bytes 1M --backend cpu --ram-bytes 3M
counted disk_reads
# the directory goes away while the disk tier is in use
needs --block-bytes 16K
mkdir "$dir/gone"
begin --block-bytes 16K --ram-bytes "$least" --prefill-chunk 16 --disk-dir "$dir/gone" --logits "$dir/logits.f32" \
	>"$dir/text" 2>"$dir/err" &
pid=$!
for _ in $(seq 200); do
	# shellcheck disable=SC2010 # names are not read, only where links point to
	ls -l "/proc/$pid/fd" 2>/dev/null | grep -q "$dir/gone/.*(deleted)" && break
	sleep 0.05
done
kill -0 $pid || { echo "the run was over before its directory could vanish"; failed=1; }
rmdir "$dir/gone" || failed=1
if ! wait $pid || ! cmp "$dir/logits.f32" "$dir/untiered.f32"; then
	echo "a --disk-dir that vanished: $(cat "$dir/err")"
	failed=1
fi

# kill -9 leaves nothing of the output files, where files can be without a name
mkdir "$dir/killed"
begin --prefill-chunk 1 --logits "$dir/killed/logits" --stats "$dir/killed/stats" >"$dir/text" 2>"$dir/err" &
pid=$!
for _ in $(seq 200); do
	# shellcheck disable=SC2010
	[ "$(ls -l "/proc/$pid/fd" 2>/dev/null | grep -c "$dir/killed/")" = 2 ] && break
	sleep 0.05
done
kill -9 $pid || failed=1
{ wait $pid; } 2>/dev/null
case $(stat -f -c %T "$dir") in
ext* | xfs | btrfs | tmpfs)
	[ -z "$(ls -A "$dir/killed")" ] || { echo "kill -9 left $(ls -A "$dir/killed")"; failed=1; } ;;
*) echo "SKIP: kill -9 and output files: $(stat -f -c %T "$dir") may have no O_TMPFILE" ;;
esac

# a full disk: an error where memory cannot hold the rest, nothing to notice where it can
mkdir "$dir/small"
# shellcheck disable=SC2016 # expanded by the inner shell
if ! unshare -rm sh -c 'mount -t tmpfs -o size=256k none "$1"' - "$dir/small" 2>/dev/null; then
	echo "SKIP: a full --disk-dir: no mount namespace here"
else
	full() {
		# shellcheck disable=SC2016
		unshare -rm sh -c 'mount -t tmpfs -o size=256k none "$1" && shift && exec "$@"' - "$dir/small" \
			"$KVT_BUILD/kvtier" run --model "$model" --prompt-file "$dir/prompt" --max-tokens 12 --block-bytes 16K \
			--disk-dir "$dir/small" --logits "$dir/full.f32" "$@" >"$dir/text" 2>"$dir/err"
	}
	if full --ram-bytes "$least" || [ "$(grep -c . "$dir/err")" -gt 3 ] || [ -e "$dir/full.f32" ] ||
		! tail -n 1 "$dir/err" | grep -q '^kvtier run: '; then
		echo "a full disk and little memory: $(cat "$dir/err")"
		failed=1
	fi
	if ! full --ram-bytes 16M || ! cmp "$dir/full.f32" "$dir/untiered.f32"; then
		echo "a full disk and enough memory: $(cat "$dir/err")"
		failed=1
	fi
fi

# the portable kernels are slow: the beginning of the same prompt
head -c 100 "$model/heldout.txt" >"$dir/short"
for isa in portable avx2 avx512 neon; do
	KVTIER_ISA=$isa run --prompt-file "$dir/short" --max-tokens 4 --logits "$dir/$isa.f32" >/dev/null 2>"$dir/err"
	grep -q 'does not have it' "$dir/err" && continue
	cmp "$dir/$isa.f32" "$dir/portable.f32" || failed=1
done
rm -rf "$dir"
exit $failed
