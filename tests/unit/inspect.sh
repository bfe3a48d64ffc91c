#!/bin/sh
# SPDX-License-Identifier: MIT
# kvtier inspect: what is in a file, as text and as JSON; 1 with the reason for a bad file, 2 for wrong usage.
set -u
kvtier=$KVT_BUILD/kvtier
file=$TMPDIR/m.safetensors
failed=0

# check CODE PATTERN ARGUMENTS...: exit code and a pattern of both outputs
check() {
	code=$1 want=$2
	shift 2
	out=$("$kvtier" inspect "$@" 2>&1)
	got=$?
	# shellcheck disable=SC2254 # patterns are meant
	case $out in $want) ;; *) echo "inspect $*: not \"$want\": $out"; failed=1 ;; esac
	[ $got -eq "$code" ] || { echo "inspect $*: exit code $got, not $code"; failed=1; }
}

# a safetensors file: HEADER (below 256 bytes), DATA
make() {
	# shellcheck disable=SC2059 # an octal escape
	printf "\\$(printf %03o ${#1})\\000\\000\\000\\000\\000\\000\\000%s%s" "$1" "$2" >"$file"
}

make '{"__metadata__":{"format":"pt\u001b[2J"},"w\u001b":{"dtype":"BF16","shape":[2,1],"data_offsets":[0,4]}}' abcd
check 0 '*: safetensors, 1 tensors, 4 bytes in 1 file*format = "pt\\x1b\[2J"*w\\x1b *BF16 *\[2, 1] * 111 * 4' "$file"
check 0 '{"path":"*"format":"safetensors"*"metadata":{*"format":"pt\\u001b\[2J"}*"name":"w\\u001b","dtype":"BF16","shape":\[2,1],"file":0,"offset":111,"bytes":4}]}' \
	--json "$file"
mkdir "$TMPDIR/dir"
cp "$file" "$TMPDIR/dir/model.safetensors"
check 0 '*: safetensors, 1 tensors*' "$TMPDIR/dir"
# a name that would draw on the terminal
odd=$TMPDIR/$(printf 'a\033[31m\nb')
mkdir "$odd"
cp "$file" "$odd/model.safetensors"
check 0 "$TMPDIR/a\\\\x1b\[31m\\\\x0ab: safetensors*" "$odd"
rm -r "$odd"
make '{"w":{"dtype":"BF17","shape":[2,1],"data_offsets":[0,4]}}' abcd
check 1 "kvtier inspect: $file: tensor \"w\": unknown dtype \"BF17\"" "$file"
check 1 "kvtier inspect: $file: tensor \"w\": unknown dtype \"BF17\"" --json "$file"
check 1 "kvtier inspect: $TMPDIR/none: No such file or directory" "$TMPDIR/none"
check 2 'kvtier inspect: a FILE or DIR is needed*' --json
check 2 'kvtier inspect: one FILE or DIR, not "b" too*' a b
check 2 'kvtier inspect: "--jsn" is not an option*' --jsn
# GGUF: one float, two strings, one tensor of a type nobody knows
{
	printf 'GGUF\003\0\0\0\001\0\0\0\0\0\0\0\002\0\0\0\0\0\0\0'
	printf '\003\0\0\0\0\0\0\0eps\006\0\0\0\254\305\047\067'
	printf '\001\0\0\0\0\0\0\0s\011\0\0\0\010\0\0\0\002\0\0\0\0\0\0\0\001\0\0\0\0\0\0\0\377\001\0\0\0\0\0\0\0b'
	printf '\001\0\0\0\0\0\0\0t\001\0\0\0\010\0\0\0\0\0\0\0\143\0\0\0\0\0\0\0\0\0\0\0'
	head -c 64 /dev/zero
} >"$TMPDIR/m.gguf"
check 0 '*GGUF version 3, 1 tensors*eps = 1e-05*s = \["\\xff", "b"]*t *GGUF type 99 *\[8]*' "$TMPDIR/m.gguf"
check 0 '*"format":"gguf","version":3*"eps":1e-05*"s":\["\\ufffd","b"]*"dtype":"GGUF type 99"*"bytes":null}]}' --json "$TMPDIR/m.gguf"
"$kvtier" inspect "$TMPDIR/m.gguf" >/dev/full 2>/dev/null && { echo "a full disk is not noticed"; failed=1; }
rm -r "$file" "$TMPDIR/m.gguf" "$TMPDIR/dir"
exit $failed
