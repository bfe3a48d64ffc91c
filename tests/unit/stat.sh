#!/bin/sh
# SPDX-License-Identifier: MIT
# kvtier stat: the cache of a run that is going on, as a line and as JSON; nothing of it afterwards.
set -u
kvtier=$KVT_BUILD/kvtier
failed=0
wrong() {
	echo "$*"
	failed=1
}
"$kvtier" run --model tests/data/kvt-demo --prompt 'The' --max-tokens 100000 --kv-type f32 --threads 1 --ram-bytes 64M >/dev/null 2>&1 &
pid=$!
trap 'kill $pid 2>/dev/null; rm -f "$TMPDIR/line" "$TMPDIR/json"' EXIT
for i in $(seq 100); do
	[ "$i" -le 1 ] || sleep 0.1
	"$kvtier" stat $pid >"$TMPDIR/line" 2>/dev/null && break
done
grep -q "^ *$pid .* [0-9.]*/64.0 " "$TMPDIR/line" || wrong "no line of the run: $(cat "$TMPDIR/line")"
"$kvtier" stat | grep -q "^ *$pid " || wrong "it is not among all"
"$kvtier" stat $pid --json >"$TMPDIR/json" || wrong "no JSON"
perl -MJSON::PP -0777 -ne '$l = decode_json($_); $s = $l->[0];
	exit !(@$l == 1 && $s->{process} == '$pid' && $s->{tier}{ram}{budget} == 64 << 20 && $s->{rows_written} > 0
		&& exists $s->{digest_errors})' "$TMPDIR/json" || wrong "another JSON: $(head -c 300 "$TMPDIR/json")"
kill $pid
wait $pid
"$kvtier" stat $pid >"$TMPDIR/line" 2>&1 && wrong "a process that has ended: $(cat "$TMPDIR/line")"
grep -q "process $pid has no cache" "$TMPDIR/line" || wrong "another message: $(cat "$TMPDIR/line")"
exit $failed
