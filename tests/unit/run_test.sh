#!/bin/sh
# SPDX-License-Identifier: MIT
# The test runner itself: it tells pass, skip and fail apart, shows a failure's output, and lets nothing be left behind;
# and its summary ends with what failed, and why.
set -u
failed=0

# expect PATTERN SCRIPT: what scripts/run-test prints about a test that is SCRIPT (a limit of 2 s)
expect() {
	got=$(scripts/run-test "$TMPDIR/out" 2 some/test sh -c "$2" | sed -E 's/( +[0-9]+\.[0-9] s){2} +/ /')
	# shellcheck disable=SC2254 # patterns are meant
	case $got in
	$1) ;;
	*) echo "for: $2"; echo "printed: $got"; echo "wanted: $1"; failed=1 ;;
	esac
	want=$(echo "$1" | cut -c 1-4)
	grep -q "^$want  some/test" "$TMPDIR/out/some/test.result" || { echo "for: $2: no result kept"; failed=1; }
}

expect 'pass  some/test ' 'echo fine'
expect 'skip  some/test no such thing here' 'echo chatter; echo no such thing here; exit 77'
expect 'fail  some/test exit code 3*the reason*' 'echo the reason; exit 3'
expect 'fail  some/test exit code 139*' 'kill -SEGV $$'
expect 'fail  some/test stopped after 2 s*began*' 'echo began; sleep 30'
# shellcheck disable=SC2016 # the test expands it
expect 'fail  some/test left behind in TMPDIR: litter *' 'touch "$TMPDIR/litter"'
expect 'pass  some/test*
skip  some/test: one case: no disk' 'echo "SKIP: one case: no disk"'

# Of its two times, the second is that of a CPU: sleep takes none.
times=$(scripts/run-test "$TMPDIR/out" 9 some/test sh -c 'sleep 0.3; seq 300000 | sort -R | tail -n 1' | tr -s ' ' | cut -d ' ' -f 3,5)
echo "$times" | awk '{ exit !($2 > 0 && $1 >= 0.3) }' || { echo "times: $times"; failed=1; }
times=$(scripts/run-test "$TMPDIR/out" 9 some/test sleep 0.3 | tr -s ' ' | cut -d ' ' -f 3,5)
echo "$times" | awk '{ exit !($2 < 0.2 && $1 >= 0.3) }' || { echo "times of a sleep: $times"; failed=1; }

# summary CODE PATTERN: of what is in out
summary() {
	got=$(scripts/summary "$TMPDIR/out")
	code=$?
	# shellcheck disable=SC2254
	case $got in $2) ;; *) echo "summary: $got"; failed=1 ;; esac
	[ $code = "$1" ] || { echo "summary: exit code $code, not $1"; failed=1; }
}

rm -rf "${TMPDIR:?}/out"
scripts/run-test "$TMPDIR/out" 2 a/good true >/dev/null
scripts/run-test "$TMPDIR/out" 2 none sh -c 'echo not here; exit 77' >/dev/null
summary 0 '
skipped:
  none *not here

1 passed, 0 failed, 1 skipped'
scripts/run-test "$TMPDIR/out" 2 b/bad sh -c 'seq 100; echo the reason; exit 3' >/dev/null
summary 1 '*skipped:*none*
failed:
  fail  b/bad * exit code 3
      | 87
*      | 100
      | the reason

1 passed, 1 failed, 1 skipped'
rm -rf "${TMPDIR:?}/out"
mkdir "$TMPDIR/out"
summary 1 '
0 passed, 0 failed, 0 skipped'
rm -rf "${TMPDIR:?}/out"
exit $failed
