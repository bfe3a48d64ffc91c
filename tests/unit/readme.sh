#!/bin/sh
# SPDX-License-Identifier: MIT
# The README's example compiles against the library, runs, and prints what the README says.
set -u
awk '/^```c$/ { on = 1; next } /^```$/ { on = 0 } on' README.md >"$TMPDIR/example.c"
awk '/^prints$/ { seen = 1 } seen && /^```$/ { n++; next } n == 1' README.md >"$TMPDIR/expected"
# shellcheck disable=SC2046 # a list of flags
cc -Wall -Wextra -Werror -Iinclude -o "$TMPDIR/example" "$TMPDIR/example.c" "$KVT_BUILD/libkvtier.a" \
	$(pkg-config --libs liburing jansson) -lnuma -lm -pthread &&
	"$TMPDIR/example" >"$TMPDIR/printed" &&
	[ -s "$TMPDIR/expected" ] &&
	diff -u "$TMPDIR/expected" "$TMPDIR/printed"
code=$?
rm -f "$TMPDIR/example" "$TMPDIR/example.c" "$TMPDIR/expected" "$TMPDIR/printed"
exit $code
