#!/bin/sh
# SPDX-License-Identifier: MIT
#
# A row of a scratch table that does not say when its buffer is free, or frees it before it is made, does not compile.
set -u
source=${KVT_SOURCE:-$(cd "$(dirname "$0")/../.." && pwd)}
cc=${CC:-cc}
command -v "$cc" >/dev/null || { echo "no C compiler"; exit 77; }
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT

# compiles ROW: with ROW added to the decoder's table
compiles() {
	sed "s|^\tX(ids, .*|\t$1 \\\\\n&|" "$source/userspace/runtime/scratch.h" >"$dir/scratch.h"
	grep -qF "$1" "$dir/scratch.h" || { echo "the row was not added: $1"; exit 1; }
	printf '#include "scratch.h"\nint main(void) { return KVT_SCRATCH_added; }\n' >"$dir/main.c"
	"$cc" -std=gnu11 -D_GNU_SOURCE -I"$dir" -I"$source/include" -I"$source/userspace" -c -o "$dir/main.o" "$dir/main.c" \
		2>"$dir/log"
}

bad=0
compiles 'X(added, 1, s->tokens, 4, KVT_STEP_NORM, KVT_STEP_QKV)' || { cat "$dir/log"; bad=1; }
for row in 'X(added, 1, s->tokens, 4, KVT_STEP_NORM)' 'X(added, 1, s->tokens, 4, KVT_STEP_NORM, )' \
	'X(added, 1, s->tokens, 4, KVT_STEP_QKV, KVT_STEP_NORM)' \
	'X(added, 1, s->tokens, 4, KVT_STEP_NORM, KVT_DECODER_STEPS)'; do
	if compiles "$row"; then
		echo "compiles: $row"
		bad=1
	fi
done
exit $bad
