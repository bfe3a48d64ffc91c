#!/bin/sh
# SPDX-License-Identifier: MIT
# The plug-in in ggmls of several versions of the backend API: 2 and 3 are taken; another number, tables that are not laid out
# as their version's, a tensor of another size, a function that is not there: not loaded, with the exact reason.
set -u
plugin=$KVT_BUILD/libggml-kvtier.so
failed=0
[ -e "$plugin" ] || { echo "libggml-kvtier.so is not built (ggml's headers: scripts/llama/fetch, or libggml-dev)"; exit 77; }
build() { # NAME OPTION...
	name=$1
	shift
	cc -std=gnu11 -D_GNU_SOURCE -Iinclude -Iuserspace -isystem "$KVT_BUILD/ggml" "$@" -rdynamic -o "$TMPDIR/$name" \
		tests/llama/ggml_stub.c -ldl || exit 1
}

# case_of TEXT PROGRAM ARGUMENTS...: TEXT is what it says; "": it is taken, in silence
case_of() {
	text=$1 program=$2
	shift 2
	err=$("$TMPDIR/$program" "$plugin" "$@" 2>&1)
	code=$?
	if [ -z "$text" ]; then
		if [ "$code" != 0 ] || [ -n "$err" ]; then echo "$*: exit code $code: $err"; failed=1; fi
	else
		[ "$code" = 1 ] || { echo "$*: exit code $code"; failed=1; }
		case $err in "kvtier: not loaded: $text"*) ;; *) echo "$*: says $err"; failed=1 ;; esac
	fi
}

build stub
build stub_old -DWITHOUT_NBYTES
case_of '' stub 2 2
case_of '' stub 3 3
for version in 0 1 4 77; do
	case_of "ggml's backend API is version $version; this plug-in knows 2 and 3: use a kvtier that knows it" stub $version 3
done
odd="not laid out as that version's"
case_of "ggml's backend API is version 3, but its buffer type's table is $odd" stub 3 2
case_of "ggml's backend API is version 2, but its buffer type's table is $odd" stub 2 3
case_of "ggml's backend API is version 3, but its registry is $odd" stub 3 3 devices
case_of "ggml's backend API is version 2, but its device table is $odd" stub 2 2 device
case_of "ggml's backend API is version 3, but its tensor is $odd" stub 3 3 tensor
case_of 'this llama.cpp has no ggml_nbytes: it is a version that this plug-in does not know' stub_old 3 3
rm -f "$TMPDIR/stub" "$TMPDIR/stub_old"
exit $failed
