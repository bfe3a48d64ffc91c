# SPDX-License-Identifier: MIT
# What the tests with a real llama.cpp share: they need the chroot of scripts/llama/fetch, the plug-in and a small model.
# shellcheck shell=bash disable=SC2034,SC2119,SC2120 # names that the tests read; stop takes a signal or none

set -u
run=$KVT_SOURCE/scripts/llama/run
plugin=$KVT_BUILD/libggml-kvtier.so
model=${KVT_INPUTS:-/nonexistent}/models/stories260K.gguf
cache=${LLAMA_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvtier/llama}
export BUILD=$KVT_BUILD
failed=0

skip() { echo "$*"; exit 77; }
wrong() { echo "$*"; failed=1; }

[ "$(id -u)" = 0 ] || skip "llama.cpp lies in a chroot, which needs root"
[ -e "$cache/forky/.done" ] || skip "no llama.cpp in $cache: scripts/llama/fetch"
[ -e "$plugin" ] || skip "libggml-kvtier.so is not built (ggml's headers: scripts/llama/fetch, or libggml-dev)"
need_model() { [ -e "$model" ] || skip "no models/stories260K.gguf under KVT_INPUTS"; }

# Two busy sets of threads on few cores otherwise wait for each other by spinning.
stock() { OMP_WAIT_POLICY=passive "$run" "$@" </dev/null; }

# tiered VARIABLE=VALUE... COMMAND...
tiered() { OMP_WAIT_POLICY=passive "$run" env GGML_BACKEND_PATH="$plugin" "$@" </dev/null; }

# built VARIABLE=VALUE... COMMAND...: the same with the llama.cpp of scripts/llama/build
built() { OMP_WAIT_POLICY=passive env GGML_BACKEND_PATH="$plugin" PATH="$cache/source/build/bin:$PATH" "$@" </dev/null; }

# ops HOW OPERATION LEAST [PATTERN]: llama.cpp's own test of an operation: all pass, and at least so many ran
ops() {
	local log=$TMPDIR/ops n
	"$1" KVTIER_RAM_BYTES=512M KVTIER_PLANES=all KVTIER_MAX_QUERY_ROWS=64 KVTIER_MAX_QUERY_HEADS=64 \
		test-backend-ops test -b KVTIER0 -o "$2" ${4:+-p "$4"} >"$log" 2>&1 || wrong "$2: $(grep -a FAIL "$log" | head -n 5)"
	n=$(grep -ac "$2(.*OK" "$log")
	echo "$2: $n passed"
	[ "$n" -ge "$3" ] || wrong "$2: only $n ran"
	rm -f "$log"
}

# ---- a server ----
port=$((20000 + $$ % 20000))
server=

# serve VARIABLE=VALUE... -- OPTION...: starts llama-server and waits until it answers
serve() {
	local vars=() i
	while [ "$1" != -- ]; do vars+=("$1"); shift; done
	shift
	port=$((port + 1))
	OMP_WAIT_POLICY=passive "$run" env "${vars[@]}" llama-server -m "$model" --host 127.0.0.1 --port $port -t 1 --no-webui \
		--cache-ram 0 "$@" </dev/null >"$TMPDIR/server.log" 2>&1 &
	server=$!
	for i in $(seq 600); do
		kill -0 $server 2>/dev/null || return 1
		! curl -sf "http://127.0.0.1:$port/health" >/dev/null || return 0
		sleep 0.2
	done
	return 1
}

ask() { curl -s --max-time 120 "http://127.0.0.1:$port/$1" ${2:+-H 'Content-Type: application/json' -d "$2"}; }

stop() {
	[ -z "$server" ] || { kill "${1:--TERM}" "$server" 2>/dev/null; wait "$server" 2>/dev/null; }
	server=
}
trap 'stop -KILL' EXIT

# generate PROMPT TOKENS [MORE]: text on the first lines, then each token's log-probabilities
generate() {
	ask completion "{\"prompt\":\"$1\",\"n_predict\":$2,\"temperature\":0,\"n_probs\":3,\"cache_prompt\":false,\"ignore_eos\":true${3:+,$3}}" |
		perl -MJSON::PP -0777 -ne '$j = decode_json($_); die "no content: $_\n" unless defined $j->{content};
			binmode STDOUT, ":utf8"; print $j->{content}, "\n=\n";
			print join(" ", map { "$_->{id} $_->{logprob}" } @{$_->{top_logprobs}}), "\n" for @{$j->{completion_probabilities}}'
}

# The text alone.
text_of() { sed '/^=$/,$d' "$1"; }

# Bytes of a tier in a stats file: tier NAME KEY FILE
tier() { T=$1 K=$2 perl -MJSON::PP -0777 -ne 'print decode_json($_)->{tier}{$ENV{T}}{$ENV{K}}' <"$3"; }
counter() { K=$1 perl -MJSON::PP -0777 -ne 'print decode_json($_)->{$ENV{K}}' <"$2"; }
