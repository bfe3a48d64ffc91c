#!/bin/bash
# SPDX-License-Identifier: MIT
# llama-server with the plug-in at a tenth of its KV cache in memory, under all that people do at once: four slots asked in
# parallel, requests given up, slots saved, restored and erased, kill -9 in the middle and a new server that restores what the
# last one saved. Every answer is that of a server without the plug-in; memory stays within the budget and does not grow.
# KVT_LLAMA_SOAK: seconds; 12 by default.
# shellcheck source=tests/lib/llama.sh disable=SC2119
. "$KVT_SOURCE/tests/lib/llama.sh"
need_model
dir=$TMPDIR/soak
mkdir -p "$dir/slots" "$dir/disk"
soak=${KVT_LLAMA_SOAK:-12}
turns=$((soak < 300 ? 2 : 4)) # servers, the last and every other ended in good order
short=$((soak / turns / 3)) # seconds that those live which are killed
words=('Once upon a time there was a girl who' 'One day a dog saw a' 'The sun was big and' 'Tom and Sue had a red'
	'the cat sat on the mat and' 'Lily went to the park with her')

prompt_of() { for ((k = 0; k < 4 + $1 * 9 % 50; k++)); do printf '%s ' "${words[($1 + k) % 6]}"; done; }
options=(-fa on --slot-save-path "$dir/slots" -c 8192 -np 4 -kvu)
on=("${options[@]}" -dev KVTIER0 -ngl 99)
vars=(GGML_BACKEND_PATH="$plugin" KVTIER_DISK_BYTES=64M KVTIER_DISK_DIR="$dir/disk" KVTIER_BLOCK_BYTES=4K KVTIER_THREADS=1
	KVTIER_MAX_QUERY_ROWS=16 KVTIER_STATS="$dir/stats" KVTIER_NAME=soak)
serve "${vars[@]}" KVTIER_RAM_BYTES=1K -- "${on[@]}" && wrong "1 KB is enough?"
stop
least=$(grep -o 'needs at least [0-9]*' "$TMPDIR/server.log" | tail -n 1 | grep -o '[0-9]*')
ram=$((${least:-0} + 8192 * 5 * 2 * 64 / 10)) # a row of K, and of V, is 64 bytes in each of 5 layers

kilobytes() { awk -v key="$1:" '$1 == key { print $2 }' "/proc/$server/status"; }

# ---- what llama.cpp itself answers, and what memory it takes for that ----
serve -- "${options[@]}" || { echo "no server: $(tail -n 3 "$TMPDIR/server.log")"; exit 1; }
# Near a tie, rounding decides, which with llama.cpp depends on what else is in the batch: answers end before.
sure() {
	sed '1,/^=$/d' "$1" | awk '$2 - $4 < 0.02 { exit } { n++ } END { print n + 0 }'
}
tokens=()
for i in $(seq 0 11); do
	generate "$(prompt_of "$i")" 80 >"$dir/answer"
	tokens[i]=$(sure "$dir/answer")
	[ "${tokens[i]}" -gt 0 ] || tokens[i]=1
	generate "$(prompt_of "$i")" "${tokens[i]}" >"$dir/answer"
	text_of "$dir/answer" >"$dir/want$i"
done
stock_peak=$(kilobytes VmHWM)
stop

# ---- four at once, each until the deadline; what fails while a server is killed does not count ----
client() { # NUMBER DEADLINE
	local i=$1 n=0
	while [ "$(date +%s)" -lt "$2" ] && [ ! -e "$dir/killed" ]; do
		i=$(((i * 5 + 7) % 12))
		if [ $((n % 4)) = 3 ]; then
			curl -s --max-time 0.0$((1 + i % 9)) "http://127.0.0.1:$port/completion" -H 'Content-Type: application/json' \
				-d "{\"prompt\":\"$(prompt_of "$i")\",\"n_predict\":200}" >/dev/null && echo early >>"$dir/early"
			echo >>"$dir/cancels"
		elif generate "$(prompt_of "$i")" "${tokens[i]}" "\"id_slot\":$1" >"$dir/answer$1" 2>/dev/null; then
			text_of "$dir/answer$1" | cmp -s - "$dir/want$i" || echo "another answer to $i in slot $1" >>"$dir/wrong"
			echo >>"$dir/answers"
		elif [ ! -e "$dir/killed" ]; then
			echo "no answer to $i in slot $1" >>"$dir/wrong"
		fi
		case $((n % 7)) in
		2) ask "slots/$1?action=save" "{\"filename\":\"busy$1\"}" >/dev/null && echo >>"$dir/saves" ;;
		4) [ ! -e "$dir/slots/busy$1" ] || ask "slots/$1?action=restore" "{\"filename\":\"busy$1\"}" >/dev/null ;;
		6) ask "slots/$1?action=erase" '{}' >/dev/null ;;
		esac
		n=$((n + 1))
	done
}

begin=$(date +%s)
peak=0
for turn in $(seq $turns); do
	serve "${vars[@]}" KVTIER_RAM_BYTES=$ram -- "${on[@]}" || { wrong "no server: $(tail -n 3 "$TMPDIR/server.log")"; break; }
	if [ "$turn" -gt 1 ]; then # what the last server saved, whatever became of it
		ask "slots/0?action=restore" '{"filename":"kept"}' | grep -q '"n_restored"' || wrong "turn $turn: not restored"
	fi
	generate "$(prompt_of 3)" "${tokens[3]}" '"id_slot":0,"cache_prompt":true' >"$dir/answer"
	text_of "$dir/answer" | cmp -s - "$dir/want3" || wrong "turn $turn: another answer after a restart"
	ask "slots/0?action=save" '{"filename":"kept"}' | grep -q '"n_saved"' || wrong "turn $turn: not saved"
	rm -f "$dir/killed"
	jobs=()
	for slot in 0 1 2 3; do
		client $slot $((turn % 2 ? begin + soak * 10 : begin + soak * turn / turns)) &
		jobs+=($!)
	done
	if [ $((turn % 2)) = 1 ]; then
		sleep "$short"
		touch "$dir/killed"
		resident=$(kilobytes VmHWM)
		stop -KILL
		wait "${jobs[@]}"
		[ -z "$(ls -A "$dir/disk")" ] || wrong "kill -9 left $(ls -A "$dir/disk")"
	else
		sleep "$short"
		early=$(kilobytes VmRSS)
		"$KVT_BUILD/kvtier" stat "$server" --json | perl -MJSON::PP -0777 -e '$s = decode_json(<STDIN>)->[0];
			exit !($s->{name} eq "soak" && $s->{tier}{ram}{budget} == $ARGV[0] && $s->{rows_written} > 0)' $ram ||
			wrong "turn $turn: kvtier stat of the running server: $("$KVT_BUILD/kvtier" stat 2>&1)"
		wait "${jobs[@]}"
		resident=$(kilobytes VmHWM)
		growth=$(($(kilobytes VmRSS) - early))
		# the frames may have become a huge page meanwhile, within their budget
		[ $growth -lt $((2048 + 2048)) ] || wrong "turn $turn: memory grew by $growth KiB"
		stop
		peak=$(tier ram peak "$dir/stats")
		[ "$peak" -le $ram ] || wrong "turn $turn: peak $peak bytes of memory, $ram allowed"
		[ "$(counter digest_errors "$dir/stats")$(counter io_errors "$dir/stats")" = 00 ] || wrong "turn $turn: errors"
		[ "$(counter disk_reads "$dir/stats")" -gt 100 ] || wrong "turn $turn: nothing came from disk"
	fi
	# all else than K and V is as in a server that holds them whole
	[ "$resident" -le $((stock_peak + ram / 1024 + 2048)) ] ||
		wrong "turn $turn: the process held $resident KiB, $stock_peak without"
done
[ ! -e "$dir/wrong" ] || wrong "$(sort "$dir/wrong" | uniq -c | head -n 5)"
touch "$dir/"{answers,cancels,early,saves}
count() { wc -l <"$dir/$1"; }
if [ "$(count answers)" -le $((2 * turns)) ] || [ "$(count cancels)" -le "$(count early)" ]; then wrong "nothing happened"; fi
echo "$(($(date +%s) - begin)) s, $turns servers, $(count answers) answers, $(count cancels) given up, $(count saves) saved;" \
	"peak $peak of $ram bytes for the cache, $resident KiB in all, $stock_peak without"
rm -rf "$dir" "$TMPDIR/server.log"
exit $failed
