#!/bin/bash
# SPDX-License-Identifier: MIT
# llama-server with the plug-in at a tenth of its KV cache in memory: four slots, unified and not, in parallel; context shift;
# slots saved by one server and restored by another, with and without the plug-in; files cut short or with a byte turned;
# cells freed here and there; requests given up halfway; kill -9; prompts that are in a slot already, whole, around block edges.
# Answers are those of a server without the plug-in.
# shellcheck source=tests/lib/llama.sh disable=SC2119
. "$KVT_SOURCE/tests/lib/llama.sh"
need_model
dir=$TMPDIR/server
mkdir -p "$dir/slots" "$dir/disk"
stories=('Once upon a time, there was a little girl' 'One day, a dog' 'The sun was' 'Tom and Sue had a big')
options=(-fa on --slot-save-path "$dir/slots")
on=("${options[@]}" -dev KVTIER0 -ngl 99)
vars=(GGML_BACKEND_PATH="$plugin" KVTIER_DISK_BYTES=16M KVTIER_DISK_DIR="$dir/disk" KVTIER_BLOCK_BYTES=4K KVTIER_THREADS=1
	KVTIER_MAX_QUERY_ROWS=16 KVTIER_STATS="$dir/stats")

begin() { # NAME serve-arguments
	local name=$1
	shift
	serve "$@" || { wrong "$name: no server: $(tail -n 5 "$TMPDIR/server.log")"; stop; return 1; }
}

# The least memory that the cache takes, from its own words; 130 KB are a tenth of what 2048 cells hold.
serve "${vars[@]}" KVTIER_RAM_BYTES=1K -- "${on[@]}" -c 2048 -np 4 && wrong "1 KB is enough?"
stop
least=$(grep -o 'needs at least [0-9]*' "$TMPDIR/server.log" | tail -n 1 | grep -o '[0-9]*')
ram=$((${least:-0} + 131072))
vars+=("KVTIER_RAM_BYTES=$ram")
within() {
	[ "$(tier ram peak "$dir/stats")" -le $ram ] || wrong "$1: peak $(tier ram peak "$dir/stats") bytes of memory, $ram allowed"
	[ "$(counter digest_errors "$dir/stats")" = 0 ] || wrong "$1: digest errors"
}

# ---- what llama.cpp itself answers ----
begin stock -- "${options[@]}" -c 2048 -np 4 || exit 1
for i in 0 1 2 3; do generate "${stories[i]}" 120 >"$dir/want$i"; done
generate "${stories[0]}" 60 '"id_slot":0' >"$dir/half"
ask "slots/0?action=save" '{"filename":"stock"}' | grep -q '"n_saved"' || wrong "stock does not save"
generate "${stories[0]}" 120 '"id_slot":0,"cache_prompt":true' >/dev/null
stop

# ---- four slots at once ----
for how in "-kvu" "-no-kvu"; do
	begin "slots $how" "${vars[@]}" -- "${on[@]}" -c 2048 -np 4 $how || continue
	for round in 1 2 3; do
		jobs=()
		for i in 0 1 2 3; do
			generate "${stories[i]}" 120 >"$dir/got$i" &
			jobs+=($!)
		done
		wait "${jobs[@]}"
		for i in 0 1 2 3; do
			text_of "$dir/want$i" >"$dir/text"
			text_of "$dir/got$i" | cmp -s - "$dir/text" || wrong "slots $how, round $round: another story $i"
		done
	done
	stop
	within "slots $how"
	[ "$(counter disk_reads "$dir/stats")" -gt 100 ] || wrong "slots $how: nothing came from disk"
done

# ---- saved and restored, also across ----
# restored FILE: the server's slot 0 gets it, and goes on as the one that saved it
restored() {
	ask "slots/0?action=restore" "{\"filename\":\"$1\"}" | grep -q '"n_restored"' || wrong "$2: not restored"
	generate "${stories[0]}" 120 '"id_slot":0' >"$dir/got"
	text_of "$dir/want0" >"$dir/text"
	text_of "$dir/got" | cmp -s - "$dir/text" || wrong "$2: another story"
}

if begin save "${vars[@]}" -- "${on[@]}" -c 2048 -np 4; then
	generate "${stories[0]}" 60 '"id_slot":0' >/dev/null
	ask "slots/0?action=save" '{"filename":"ours"}' | grep -q '"n_saved"' || wrong "the plug-in's server does not save"
	restored ours "own file"
	restored stock "llama.cpp's file"
	generate "${stories[1]}" 120 '"id_slot":1' >"$dir/before"

	# ---- damaged files: refused, and nothing else changes ----
	size=$(stat -c %s "$dir/slots/ours")
	: >"$dir/slots/empty"
	head -c 1 "$dir/slots/ours" >"$dir/slots/one"
	head -c 16 "$dir/slots/ours" >"$dir/slots/header"
	for cut in $(seq 4096 4096 $((size - 1))) empty one header; do
		bad=$cut
		[ -e "$dir/slots/$bad" ] || head -c "$cut" "$dir/slots/ours" >"$dir/slots/$bad"
		ask "slots/0?action=restore" "{\"filename\":\"$bad\"}" | grep -q '"error"' || wrong "restored from a file cut at $cut"
	done
	generate "${stories[1]}" 120 '"id_slot":1' >"$dir/after"
	cmp "$dir/before" "$dir/after" || wrong "another slot changed with a restore that was refused"
	restored ours "after refusals"

	# ---- cells freed here and there ----
	for i in 0 1 2 3; do generate "${stories[i]}" 100 "\"id_slot\":$i" >/dev/null; done
	ask "slots/1?action=erase" '{}' >/dev/null
	ask "slots/3?action=erase" '{}' >/dev/null
	restored ours "into freed cells"

	# ---- given up halfway ----
	long=$(printf 'the cat sat on the mat and %.0s' $(seq 60))
	for i in 1 2 3; do
		curl -s --max-time 0.2 "http://127.0.0.1:$port/completion" -H 'Content-Type: application/json' \
			-d "{\"prompt\":\"$long\",\"n_predict\":200}" >/dev/null
	done
	restored ours "after requests given up"

	# ---- kill -9 ----
	stop -KILL
	left=$(ls -A "$dir/disk")
	[ -z "$left" ] || wrong "kill -9 left $left"
fi
begin "after kill -9" "${vars[@]}" -- "${on[@]}" -c 2048 -np 4 && restored ours "after kill -9"
stop
begin "without" -- "${options[@]}" -c 2048 -np 4 && restored ours "our file without the plug-in"
stop

# ---- context shift ----
for how in stock ours; do
	if [ $how = stock ]; then
		begin shift -- "${options[@]}" -c 256 -np 1 --context-shift --keep 4 || continue
	else
		begin shift "${vars[@]}" -- "${on[@]}" -c 256 -np 1 --context-shift --keep 4 || continue
	fi
	generate "${stories[0]}" 400 >"$dir/shift.$how"
	stop
done
text_of "$dir/shift.stock" >"$dir/text"
text_of "$dir/shift.ours" | cmp - "$dir/text" || wrong "another story after a context shift"
[ "$(grep -c . "$dir/shift.ours")" -gt 400 ] || wrong "no 400 tokens after a context shift"

# ---- a prompt that a slot has already: its last token alone is computed, and gives the bits that all of it gave ----
if begin cached "${vars[@]}" -- "${on[@]}" -c 1024 -np 1; then
	for n in 63 64 65 127 128 129 191 192 193; do # blocks of 64 rows
		ids=$(seq 1 "$n" | awk '{ print 3 + $1 * 37 % 200 }' | paste -sd,)
		for cached in false true; do
			ask completion "{\"prompt\":[$ids],\"n_predict\":12,\"temperature\":0,\"n_probs\":3,\"cache_prompt\":$cached}" \
				>"$dir/answer"
			perl -MJSON::PP -0777 -ne '$j = decode_json($_); print "$j->{timings}{prompt_n}\n"; print $j->{content}, "\n";
				print join(" ", map { "$_->{id} $_->{logprob}" } @{$_->{top_logprobs}}), "\n"
				for @{$j->{completion_probabilities}}' <"$dir/answer" >"$dir/cached.$cached"
		done
		[ "$(head -n 1 "$dir/cached.false") $(head -n 1 "$dir/cached.true")" = "$n 1" ] ||
			wrong "$n tokens: $(head -qn 1 "$dir/cached.false" "$dir/cached.true" | xargs) were computed, not $n and 1"
		[ "$(grep -c . "$dir/cached.true")" -ge 12 ] || wrong "$n tokens: $(cat "$dir/answer")"
		cmp <(tail -n +2 "$dir/cached.false") <(tail -n +2 "$dir/cached.true") || wrong "$n tokens: other bits with the prompt cached"
	done
fi
stop
rm -rf "$dir" "$TMPDIR/server.log"
exit $failed
