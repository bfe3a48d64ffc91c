#!/bin/sh
# SPDX-License-Identifier: MIT
# The command's frame: version, help, hints for mistyped names, exit codes (2 for wrong usage), no lost output.
set -u
kvtier=$KVT_BUILD/kvtier
failed=0

# expect CODE STDOUT-PATTERN STDERR-PATTERN ARGUMENTS...   (patterns of the whole output; "" is no output)
expect() {
	code=$1 want_out=$2 want_err=$3
	shift 3
	out=$("$kvtier" "$@" 2>"$TMPDIR/err")
	got=$?
	err=$(cat "$TMPDIR/err")
	rm "$TMPDIR/err"
	# shellcheck disable=SC2254 # patterns are meant
	{
		case $got in $code) ;; *) echo "kvtier $*: exit code $got, not $code"; failed=1 ;; esac
		case $out in $want_out) ;; *) echo "kvtier $*: on stdout: $out"; failed=1 ;; esac
		case $err in $want_err) ;; *) echo "kvtier $*: on stderr: $err"; failed=1 ;; esac
	}
}

expect 0 "kvtier [0-9]*.[0-9]*.[0-9]*" "" --version
expect 2 "" "usage: kvtier COMMAND*"
for help in help --help -h; do
	expect 0 "usage: kvtier COMMAND*run*doctor*bench*inspect*sample*" "" $help
done
for command in run doctor bench inspect sample; do
	expect 0 "usage: kvtier $command*" "" help $command
	expect 0 "usage: kvtier $command*" "" $command --help
done
expect 2 "" 'kvtier: no command "dcotor". Did you mean "doctor"?*' dcotor
expect 2 "" 'kvtier: no command "rum". Did you mean "run"?*' rum
expect 2 "" 'kvtier: no command "frobnicate" (see: kvtier help)' frobnicate
expect 2 "" 'kvtier: no command "" (see: kvtier help)' ""
expect 2 "" 'kvtier: no command "inspekt". Did you mean "inspect"?*' help inspekt
expect 2 "" 'kvtier help: one command at a time*' help run bench
expect 2 "" 'kvtier doctor: "--frob" is not an option (see: kvtier help doctor)' doctor --frob
expect 2 "" 'kvtier doctor: --dir needs a directory*' doctor --dir

KVTIER_LOG=loud
export KVTIER_LOG
expect 2 "" 'kvtier: KVTIER_LOG is "loud"*' doctor
unset KVTIER_LOG

# Output that cannot be written is a failure, not a success.
"$kvtier" doctor --json 2>"$TMPDIR/err" >/dev/full
code=$?
if [ $code != 1 ] || ! grep -q "could not be written: No space left" "$TMPDIR/err"; then
	echo "a full standard output: exit code $code, $(cat "$TMPDIR/err")"
	failed=1
fi
rm -f "$TMPDIR/err"
exit $failed
