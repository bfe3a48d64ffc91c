#!/bin/bash
# SPDX-License-Identifier: MIT
# What the plug-in cannot do it refuses by name, with the way out, before the first token or with the first request; the
# process is never aborted. Without configuration, or with a wrong one, there is no device.
# shellcheck source=tests/lib/llama.sh disable=SC2119
. "$KVT_SOURCE/tests/lib/llama.sh"
need_model
dir=$TMPDIR/refuses
mkdir "$dir"
on=(-dev KVTIER0 -ngl 99 -fa on)

# refused NAME TEXT VARIABLE=VALUE... -- OPTION...: says so, and ends by itself with an error or lives and fails the request
refused() {
	local name=$1 text=$2 code
	shift 2
	if serve GGML_BACKEND_PATH="$plugin" "$@" -c 1024 -np 1; then
		ask completion '{"prompt":"Once","n_predict":2}' | grep -q '"error"' || wrong "$name: the request did not fail"
		kill -0 "$server" 2>/dev/null || wrong "$name: the server ended with the request"
	else
		wait "$server"
		code=$?
		[ $code -lt 124 ] || wrong "$name: exit code $code"
		server=
	fi
	stop
	grep -q -- "$text" "$TMPDIR/server.log" || wrong "$name: no \"$text\": $(grep kvtier: "$TMPDIR/server.log" | head -n 3)"
}

m=KVTIER_RAM_BYTES=64M
refused "flash attention off" 'start with -fa on' $m -- -dev KVTIER0 -ngl 99 -fa off
refused "f32" 'use -ctk and -ctv f16' $m -- "${on[@]}" -ctk f32 -ctv f32
refused "too little for anything" 'KVTIER_RAM_BYTES is 102400' KVTIER_RAM_BYTES=100K KVTIER_DISK_BYTES=64M -- "${on[@]}"
refused "no such directory" '/nowhere' KVTIER_RAM_BYTES=16M KVTIER_DISK_BYTES=64M KVTIER_DISK_DIR=/nowhere -- "${on[@]}"

# ---- a disk that fills up: the request fails and says why, the server lives, and goes on when there is room ----
mkdir "$dir/full"
if mount -t tmpfs -o size=512k tmpfs "$dir/full"; then
	small=(GGML_BACKEND_PATH="$plugin" KVTIER_THREADS=1 KVTIER_BLOCK_BYTES=4K KVTIER_MAX_QUERY_ROWS=16 KVTIER_DISK_BYTES=16M
		KVTIER_DISK_DIR="$dir/full")
	serve "${small[@]}" KVTIER_RAM_BYTES=1K -- "${on[@]}" -c 2048 -np 1
	stop
	least=$(grep -o 'needs at least [0-9]*' "$TMPDIR/server.log" | tail -n 1 | grep -o '[0-9]*')
	if serve "${small[@]}" KVTIER_RAM_BYTES=$((${least:-0} + 100000)) -- "${on[@]}" -c 2048 -np 1; then
		head -c 1M /dev/zero >"$dir/full/other" 2>/dev/null
		ask completion '{"prompt":"Once upon a time","n_predict":1500,"ignore_eos":true}' | grep -q '"error"' ||
			wrong "disk full: the request did not fail"
		kill -0 "$server" 2>/dev/null || wrong "disk full: the server ended with the request"
		grep -q 'disk tier: No space left on device' "$TMPDIR/server.log" || wrong "disk full: $(grep kvtier: "$TMPDIR/server.log")"
		rm "$dir/full/other"
		ask completion '{"prompt":"Once upon a time","n_predict":8,"temperature":0}' | grep -q 'there was a' ||
			wrong "disk full: no answer afterwards"
	else
		wrong "disk full: no server: $(tail -n 5 "$TMPDIR/server.log")"
	fi
	stop
	umount "$dir/full"
else
	echo "a disk that fills up: not tested, as nothing can be mounted here"
fi

# no_device TEXT VARIABLE=VALUE...: llama.cpp itself knows no such device
no_device() {
	local text=$1
	shift
	tiered "$@" llama-completion -m "$model" -p x -n 1 -no-cnv "${on[@]}" >"$dir/log" 2>&1 && wrong "$*: there is a device"
	grep -q -- "$text" "$dir/log" || wrong "$*: no \"$text\": $(grep -i kvtier "$dir/log" | head -n 3)"
}

no_device 'invalid device: KVTIER0' LANG=C
for split in '-sm' '--split-mode'; do
	on=(-dev KVTIER0 -ngl 99 -fa on $split tensor)
	no_device 'use -sm layer' $m
done
on=(-dev KVTIER0 -ngl 99 -fa on)
no_device 'KVTIER_RAM is not known' $m KVTIER_RAM=1
no_device 'KVTIER_RAM_BYTES is not set' KVTIER_DISK_BYTES=1G
no_device 'a number from 1 to 1024' $m KVTIER_THREADS=many
printf 'ram_bytes=64M\nthread=2\n' >"$dir/conf"
no_device 'conf:2: thread is not known' KVTIER_CONFIG="$dir/conf"
rm -rf "$dir" "$TMPDIR/server.log"
exit $failed
