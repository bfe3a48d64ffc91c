#!/bin/sh
# SPDX-License-Identifier: MIT
# A program of the public headers and the shared library alone has weights, scratch and a sampler; in C and in C++ (where
# designated initializers warn of what they leave out).
set -u
failed=0
for language in 'c -std=c11' 'c++ -std=c++20 -Wno-missing-field-initializers'; do
	# shellcheck disable=SC2086 # a word and options
	if ! cc -Wall -Wextra -Werror -D_GNU_SOURCE -I"$KVT_SOURCE/include" -x $language "$KVT_SOURCE/tests/unit/shared/parts.c" \
		-x none -L"$KVT_BUILD" -lkvtier -o "$TMPDIR/parts" ||
		! LD_LIBRARY_PATH=$KVT_BUILD "$TMPDIR/parts" "$TMPDIR/model.safetensors"; then
		echo "as $language"
		failed=1
	fi
done
rm -f "$TMPDIR/parts" "$TMPDIR/model.safetensors"
exit $failed
