#!/bin/sh
# SPDX-License-Identifier: MIT
# kvtier run --store: what an earlier run has computed is not computed again, and the logits have the same bytes.
set -u
model=$KVT_SOURCE/tests/data/kvt-demo
dir=$TMPDIR/store
failed=0
mkdir "$dir"

complain() {
	echo "$*"
	failed=1
}

# run OPTIONS...
run() {
	"$KVT_BUILD/kvtier" run --model "$model" --prompt-file "$dir/prompt" --max-tokens 4 --block-bytes 16K "$@"
}

# field NAME: a number of the last run's stats
field() {
	sed -n "s/.*\"$1\": \([0-9.e-]*\).*/\1/p" "$dir/stats" | head -n 1
}

# A block has 64 rows of 256 bytes; a token is a byte, and one stands in front.
for tokens in 255 256 257; do
	head -c $((tokens - 1)) "$model/heldout.txt" >"$dir/prompt"
	run --untiered --logits "$dir/cold" >"$dir/cold.txt" || exit 1
	for round in first second third; do
		run --store "$dir/kept.$tokens" --logits "$dir/logits" --stats "$dir/stats" >"$dir/text" || exit 1
		cmp "$dir/logits" "$dir/cold" || complain "$tokens tokens, $round run: other logits"
		cmp "$dir/text" "$dir/cold.txt" || complain "$tokens tokens, $round run: other text"
		[ "$(field prompt_tokens)" = $tokens ] || complain "the prompt has $(field prompt_tokens) tokens, not $tokens"
		want=$((tokens - 1))
		[ $round != first ] || want=0
		[ "$(field cached_tokens)" = $want ] ||
			complain "$tokens tokens, $round run: $(field cached_tokens) were cached, not $want"
	done
done

# a prompt that parts from it in the middle of a block, and one that goes on behind it; in little memory
{ head -c 100 "$model/heldout.txt"; echo 'something else'; } >"$dir/prompt"
run --untiered --logits "$dir/cold" >/dev/null || exit 1
run --store "$dir/kept.256" --logits "$dir/logits" --stats "$dir/stats" >/dev/null || exit 1
cmp "$dir/logits" "$dir/cold" || complain "a prompt that parts from a kept one: other bytes"
[ "$(field cached_tokens)" = 101 ] || complain "a prompt that parts after 101 tokens: $(field cached_tokens) were cached"
head -c 700 "$model/heldout.txt" >"$dir/prompt"
run --untiered --logits "$dir/cold" >/dev/null || exit 1
least=$(run --store "$dir/kept.256" --ram-bytes 1 2>&1 | sed -n 's/.* at least \([0-9]*\) are needed.*/\1/p')
run --store "$dir/kept.256" --ram-bytes "$least" --logits "$dir/logits" --stats "$dir/stats" >/dev/null || exit 1
cmp "$dir/logits" "$dir/cold" || complain "a longer prompt in little memory: other bytes"
[ "$(field cached_tokens)" -ge 255 ] || complain "a longer prompt: $(field cached_tokens) were cached"

# the directory's upkeep
"$KVT_BUILD/kvtier" store ls "$dir/kept.256" | grep -q ' chunks, ' || complain "store ls lists nothing"
"$KVT_BUILD/kvtier" store ls "$dir/kept.256" --json | grep -q '"chunks": [1-9]' || complain "store ls --json lists nothing"
"$KVT_BUILD/kvtier" store verify "$dir/kept.256" >"$dir/text" || complain "store verify: $(cat "$dir/text")"
"$KVT_BUILD/kvtier" store compact "$dir/kept.256" >/dev/null || complain "store compact failed"
"$KVT_BUILD/kvtier" store verify "$dir/kept.256" --json | grep -q '"bad": 0' || complain "store compact has lost something"
run --store "$dir/kept.256" --stats "$dir/stats" >/dev/null || exit 1
[ "$(field cached_tokens)" = 700 ] || complain "after store compact $(field cached_tokens) of 701 tokens were cached"

# a byte that is not what was written is computed again, and told
printf 'x' | dd of="$dir/kept.256/slots" bs=1 seek=5000 conv=notrunc 2>/dev/null
"$KVT_BUILD/kvtier" store verify "$dir/kept.256" >/dev/null && complain "store verify has not seen a changed byte"
run --store "$dir/kept.256" --logits "$dir/logits" >/dev/null || exit 1
cmp "$dir/logits" "$dir/cold" || complain "a changed byte on disk: other bytes"

# superblocks that do not hold: nothing is used or removed, and the command that the message names removes it
for bytes in 9 100 9000000; do
	cp -r "$dir/kept.255" "$dir/damaged"
	truncate -s $bytes "$dir/damaged/superblock"
	for action in ls verify compact rm; do
		"$KVT_BUILD/kvtier" store $action "$dir/damaged" 2>"$dir/text" && complain "store $action of a damaged directory"
		grep -q 'store rm --force' "$dir/text" || complain "store $action: $(cat "$dir/text")"
		[ -e "$dir/damaged/slots" ] || complain "store $action has removed a damaged directory"
	done
	"$KVT_BUILD/kvtier" store rm "$dir/damaged" --force || complain "store rm --force of a damaged directory"
	[ ! -e "$dir/damaged" ] || complain "store rm --force has left $(ls -A "$dir/damaged")"
done
mkdir "$dir/other"
touch "$dir/other/slots"
"$KVT_BUILD/kvtier" store rm --force "$dir/other" 2>/dev/null && complain "store rm --force of what is no store"
[ -e "$dir/other/slots" ] || complain "store rm --force has removed what is no store's"

# a short prompt takes nothing from what a longer one has left there
head -c 2000 "$model/heldout.txt" >"$dir/prompt"
run --store "$dir/kept.long" >/dev/null || exit 1
printf 'Hi' >"$dir/prompt"
run --store "$dir/kept.long" >/dev/null || exit 1
"$KVT_BUILD/kvtier" store verify "$dir/kept.long" >"$dir/text" || complain "behind a short prompt: $(cat "$dir/text")"
head -c 2000 "$model/heldout.txt" >"$dir/prompt"
run --store "$dir/kept.long" --stats "$dir/stats" >/dev/null || exit 1
[ "$(field cached_tokens)" = 2000 ] || complain "behind a short prompt $(field cached_tokens) of 2001 tokens were cached"

# the prompt is kept before anything is generated: whoever is killed meanwhile leaves it
head -c 690 "$model/heldout.txt" >"$dir/prompt"
"$KVT_BUILD/kvtier" run --model "$model" --prompt-file "$dir/prompt" --block-bytes 16K --store "$dir/killed" \
	--max-tokens 20000 >"$dir/text" 2>/dev/null &
pid=$!
for _ in $(seq 300); do
	[ "$(wc -c <"$dir/text")" -lt 200 ] || break
	sleep 0.1
done
# what is kept is written beside generation, at the disk's own time: until nothing was for half a second
log=0 still=0
for _ in $(seq 300); do
	before=$log log=$(wc -c <"$dir/killed/log")
	if [ "$log" = "$before" ]; then still=$((still + 1)); else still=0; fi
	[ $still -lt 5 ] || break
	sleep 0.1
done
kill -0 $pid || complain "it ended before it was killed"
kill -9 $pid
wait $pid 2>/dev/null
run --store "$dir/killed" --stats "$dir/stats" >/dev/null || exit 1
[ "$(field cached_tokens)" -ge 640 ] || complain "after kill -9 $(field cached_tokens) of 691 tokens were cached"

# a directory that is removed while a run has it costs the run nothing, and is told
"$KVT_BUILD/kvtier" run --model "$model" --prompt-file "$dir/prompt" --block-bytes 16K --store "$dir/gone" \
	--max-tokens 500 >"$dir/text" 2>"$dir/err" &
pid=$!
for _ in $(seq 300); do
	[ ! -e "$dir/gone/log" ] || break
	sleep 0.02
done
rm -r "$dir/gone"
wait $pid || complain "a directory that was removed: the run failed"
[ "$(wc -c <"$dir/text")" -gt 400 ] || complain "a directory that was removed: $(wc -c <"$dir/text") bytes of text"
grep -q "note: --store $dir/gone is no longer there" "$dir/err" || complain "a directory that was removed: $(cat "$dir/err")"

# what does not fit is refused by name
refuses() {
	word=$1
	shift
	if run --store "$dir/kept.256" "$@" >/dev/null 2>"$dir/err"; then
		complain "$*: not refused"
	elif ! grep -q "$word" "$dir/err"; then
		complain "$*: $(cat "$dir/err")"
	fi
}
refuses codec --kv-type bf16
refuses block-bytes --block-bytes 64K
refuses disk-dir --disk-dir "$dir"
refuses untiered --untiered
"$KVT_BUILD/kvtier" store ls "$dir" 2>/dev/null && complain "store ls of what is no store"

"$KVT_BUILD/kvtier" store rm "$dir/kept.256" || complain "store rm failed"
[ ! -e "$dir/kept.256" ] || complain "store rm left something"
rm -rf "$dir"
exit $failed
