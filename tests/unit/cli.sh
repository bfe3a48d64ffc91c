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
	expect 0 "usage: kvtier COMMAND*run*doctor*bench*inspect*replay*sample*" "" $help
done
for command in run doctor bench inspect replay sample stat store; do
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
expect 2 "" 'kvtier doctor: --dir needs a directory*' doctor --dir ''
expect 2 "" 'kvtier bench: "--frob" is not an option (see: kvtier help bench)' bench --frob
expect 2 "" 'kvtier bench: "-x" is not an option (see: kvtier help bench)' bench --json -xy
expect 2 "" 'kvtier bench: "--json=3" is not an option (see: kvtier help bench)' bench --json=3
expect 2 "" 'kvtier bench: --rounds needs a value (see: kvtier help bench)' bench decode --rounds
expect 2 "" 'kvtier bench: --rounds "0": a whole number from 1 to 64 is needed (see: kvtier help bench)' bench --rounds 0
expect 2 "" 'kvtier bench: "--frob" is not an option (see: kvtier help bench)' bench gpu --frob
expect 2 "" "kvtier bench: 'frob' is not decode, *(see: kvtier help bench)" bench frob
expect 2 "" 'kvtier stat: PID "x"*(see: kvtier help stat)' stat x
expect 2 "" 'kvtier stat: one process at most*' stat 1 2
expect 1 "" 'kvtier stat: process 2147483647 has no cache*' stat 2147483647
expect 2 "" 'kvtier inspect: a FILE or DIR is needed*' inspect ''
expect 2 "" 'kvtier sample: --cases needs a file*' sample --cases ''
expect 2 "" 'kvtier sample: "--frob" is not an option*' sample --frob
expect 2 "" 'kvtier: --version takes nothing*' --version please
# Each option that kvtier run reads is in its help and in the man page.
options=$(sed -nE 's/^\t\{ "--([a-z-]+)", [A-Z_]+, .*/\1/p' "$KVT_SOURCE/userspace/tools/run_options.c")
echo "$options" | grep -qx device || { echo "kvtier run: its table of options is not found"; failed=1; }
help=$("$kvtier" help run)
for option in $options; do
	echo "$help" | grep -qE -- "^  (--[a-z, X-]+)?--$option( |\$)" || { echo "kvtier help run: no --$option"; failed=1; }
	grep -qE "Fl -$option( |$)" "$KVT_SOURCE/docs/man/kvtier.1" || { echo "kvtier.1: no --$option"; failed=1; }
done
mkfifo "$TMPDIR/fifo"
expect 1 "" 'kvtier inspect: *fifo: a pipe or device, not a regular file' inspect "$TMPDIR/fifo"
expect 1 "" 'kvtier sample: *fifo: a pipe or device, not a regular file' sample --cases "$TMPDIR/fifo"
expect 1 "" 'kvtier sample: *: a directory, not a regular file' sample --cases "$TMPDIR"
rm "$TMPDIR/fifo"

KVTIER_LOG=loud
export KVTIER_LOG
expect 2 "" 'kvtier: KVTIER_LOG is "loud"*' doctor
unset KVTIER_LOG

# Output that cannot be written is a failure, and says why, whether it fails at once or when a buffer is full.
full() {
	"$kvtier" "$@" 2>"$TMPDIR/err" >/dev/full
	code=$?
	if [ $code != 1 ] || [ "$(wc -l <"$TMPDIR/err")" != 1 ] ||
		! grep -q "^kvtier $1: standard output could not be written: No space left" "$TMPDIR/err"; then
		echo "kvtier $* on a full standard output: exit code $code, $(cat "$TMPDIR/err")"
		failed=1
	fi
	rm -f "$TMPDIR/err"
}
# So is a closed standard output; and no file that the command opens gets its number, and with it the text.
closed() {
	"$kvtier" "$@" 2>"$TMPDIR/err" >&-
	code=$?
	if [ $code != 1 ] || ! grep -q "^kvtier $1: standard output could not be written: Bad file descriptor" "$TMPDIR/err"; then
		echo "kvtier $* with standard output closed: exit code $code, $(cat "$TMPDIR/err")"
		failed=1
	fi
	rm -f "$TMPDIR/err"
}
text="run --model $KVT_SOURCE/tests/data/kvt-demo --prompt abc --max-tokens 2 --untiered --logits $TMPDIR/logits"
closed --version
closed doctor
# shellcheck disable=SC2086 # options are meant to be split
{
	closed $text
	[ ! -e "$TMPDIR/logits" ] || { echo "kvtier run with standard output closed: logits are there"; failed=1; }
	"$kvtier" $text >/dev/null 2>"$TMPDIR/err" || { echo "kvtier run: $(cat "$TMPDIR/err")"; failed=1; }
	mv "$TMPDIR/logits" "$TMPDIR/want"
	"$kvtier" $text --progress always >/dev/null 2>&- || { echo "kvtier run with standard error closed: exit code $?"; failed=1; }
	cmp "$TMPDIR/want" "$TMPDIR/logits" || { echo "kvtier run with standard error closed: other logits"; failed=1; }
	"$kvtier" $text >/dev/null 2>"$TMPDIR/err" <&- || { echo "kvtier run with standard input closed: exit code $?"; failed=1; }
}
rm -f "$TMPDIR/want" "$TMPDIR/logits" "$TMPDIR/err"
full --version
full help
full doctor
full doctor --json
full inspect "$KVT_SOURCE/tests/data/kvt-demo"
full inspect --json "$KVT_SOURCE/tests/data/kvt-demo"
printf '[%s{"name":"a","logits":[1]}]' "$(seq 500 | sed 's/.*/{"name":"a","logits":[1,2,3]},/')" >"$TMPDIR/cases"
full sample --cases "$TMPDIR/cases"
full bench placement --rounds 1
rm "$TMPDIR/cases"
exit $failed
