#!/bin/sh
# SPDX-License-Identifier: MIT
# kvtier replay: its report, JSON, picture, and what it refuses: 1 with the reason for a bad trace, 2 for wrong usage.
set -u
kvtier=$KVT_BUILD/kvtier
traces=$KVT_SOURCE/tests/data/traces
failed=0

# check CODE PATTERN ARGUMENTS...: exit code and a pattern of both outputs
check() {
	code=$1 want=$2
	shift 2
	out=$("$kvtier" replay "$@" 2>&1)
	got=$?
	# shellcheck disable=SC2254 # patterns are meant
	case $out in $want) ;; *) echo "replay $*: not \"$want\": $out"; failed=1 ;; esac
	[ $got -eq "$code" ] || { echo "replay $*: exit code $got, not $code"; failed=1; }
}

check 0 '*policy lru: 17.65 % of blocks hit (3); the optimum is 47.06 % (8), of which this is 37.5 %*policy auto: *' \
	"$traces/shared_prefix.jsonl" --tier ram=45% --policy lru,auto
check 0 '*gpu *1 *disk *6 *' "$traces/shared_prefix.jsonl" --tier gpu=64M,disk=384M
check 0 '*5 requests, 11 blocks of 64 tokens*6 of them distinct*(5), of which this is 100.0 %*' "$traces/session.json" --tier ram=100%
check 0 '{*"requests": 7,*"optimum_hits": 10,*"policy": "auto",*"hits": 10,*"gpu": {*"blocks": 7*"decisions": "*"*}' \
	"$traces/shared_prefix.jsonl" --tier gpu=100% --json
check 1 'kvtier replay: *session.json: line 1: *' "$traces/session.json" --tier ram=1% --format mooncake
check 1 'kvtier replay: *shared_prefix.jsonl: line 2: *' "$traces/shared_prefix.jsonl" --tier ram=1% --format agentic
check 1 'kvtier replay: *none: No such file or directory' "$TMPDIR/none" --tier ram=1%
check 1 'kvtier replay: *: a directory, not a regular file' "$TMPDIR" --tier ram=1%
check 1 'kvtier replay: ram=4096 bytes holds no block: 64 tokens of 131072 bytes take 8388608 (--token-bytes)' \
	"$traces/session.json" --tier ram=4K
check 2 'kvtier replay: a TRACE is needed*' --json
check 2 'kvtier replay: no tier has a size*(see: kvtier help replay)' a
check 2 'kvtier replay: no tier has a size*(see: kvtier help replay)' a --tier ram=0,disk=0%
check 2 'kvtier replay: one TRACE, not "b" too*' a b
check 2 'kvtier replay: "--polcy" is not an option*' --polcy lru
check 2 'kvtier replay: --policy needs a value*' a --policy
check 2 'kvtier replay: "mru" is no policy: auto, cost, scan, s3fifo or lru expected*' a --policy lru,mru
check 2 'kvtier replay: "tape" is no tier: gpu, pinned, ram or disk expected*' a --tier ram=1%,tape=4G
check 2 'kvtier replay: "ram": TIER=SIZE expected*' a --tier ram
check 2 'kvtier replay: the ram tier has two sizes*' a --tier ram=1%,ram=2%
check 2 'kvtier replay: "101%": a percentage from 0 to 100 is needed*' a --tier ram=101%
check 2 'kvtier replay: "1 %": a percentage*' a --tier 'ram=1 %'
check 2 'kvtier replay: --format "csv": mooncake or agentic expected*' a --format csv
check 2 'kvtier replay: --prefill "0": a whole number*' a --prefill 0
check 2 'kvtier replay: --token-bytes 0: 1 to 1G expected*' a --token-bytes 0
check 2 'kvtier replay: disk=0: a rate is needed*' a --load disk=0
# the same trace, the same decisions
for policy in lru s3fifo scan cost auto; do
	for run in 1 2; do
		"$kvtier" replay "$traces/shared_prefix.jsonl" --tier gpu=20%,ram=20% --policy $policy --json >"$TMPDIR/$run"
	done
	cmp -s "$TMPDIR/1" "$TMPDIR/2" || { echo "replay: $policy decides otherwise the second time"; failed=1; }
done
check 0 '*policy auto*' "$traces/shared_prefix.jsonl" --tier ram=50% --plot "$TMPDIR/out.svg"
case $(cat "$TMPDIR/out.svg") in
'<svg '*'>optimum</text>'*'>auto</text>'*'</svg>') ;;
*) echo "replay: the picture is none"; failed=1 ;;
esac
# 12,000 requests of 12K tokens, a third of them with a prefix that others have, through three tiers: seconds, not minutes
awk 'BEGIN {
	for (i = 0; i < 12000; i++) {
		printf "{\"timestamp\":%d,\"input_length\":12288,\"output_length\":100,\"hash_ids\":[", i
		who = i * 7919 % 12000
		for (b = 0; b < 24; b++)
			printf "%s%d", b ? "," : "", (b < 16 ? who % 300 : i % 3 ? 300 + i : 300 + who % 500) * 24 + b
		print "]}"
	}
}' >"$TMPDIR/large"
begin=$(date +%s)
check 0 '*12000 requests, 288000 blocks of 512 tokens*' "$TMPDIR/large" --tier gpu=1%,ram=5%,disk=20%
[ $(($(date +%s) - begin)) -lt 60 ] || { echo "replay: 12,000 requests took $(($(date +%s) - begin)) s"; failed=1; }
rm "$TMPDIR/large"
check 1 'kvtier replay: *' "$traces/shared_prefix.jsonl" --tier ram=50% --plot "$TMPDIR/none/out.svg"
rm "$TMPDIR/1" "$TMPDIR/2" "$TMPDIR/out.svg"
exit $failed
