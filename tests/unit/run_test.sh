#!/bin/sh
# SPDX-License-Identifier: MIT
# The test runner itself: it tells pass, skip and fail apart, shows a failure's output, and lets nothing be left behind.
set -u
failed=0

# expect PATTERN SCRIPT: what scripts/run-test prints about a test that is SCRIPT (a limit of 2 s)
expect() {
	got=$(scripts/run-test "$TMPDIR/out" 2 some/test sh -c "$2" | sed -E 's/ +[0-9]+\.[0-9] s +/ /')
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
rm -rf "${TMPDIR:?}/out"
exit $failed
