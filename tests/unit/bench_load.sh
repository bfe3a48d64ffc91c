#!/bin/sh
# SPDX-License-Identifier: MIT
# kvtier bench load: a row for each pair, as a table and as JSON; the file it makes is gone; wrong usage is told.
set -u
kvtier=$KVT_BUILD/kvtier
failed=0

# check CODE PATTERN ARGUMENTS...: exit code and a pattern of both outputs
check() {
	code=$1 want=$2
	shift 2
	out=$("$kvtier" bench load "$@" 2>&1)
	got=$?
	# shellcheck disable=SC2254 # patterns are meant
	case $out in $want) ;; *) echo "bench load $*: not \"$want\": $out"; failed=1 ;; esac
	[ $got -eq "$code" ] || { echo "bench load $*: exit code $got, not $code"; failed=1; }
}

row='*MB/s, *.* (*.* to *.*) of *'
check 0 "kvtier *: 4 MB; *medians of 2*
load, cached, host memory $row(mmap and one copy); reads from the page cache, *
load, cached, GPU memory $row" --bytes 4M --rounds 2 --cached --disk-dir "$TMPDIR"
check 0 '*"what": "load, cached, GPU memory",*"unit": "MB/s",*"value": *"ceiling": *"ratio": *"ratio_high": *"how":*' \
	--bytes 4M --rounds 1 --cached --json
# a directory that keeps its pages (tmpfs) has nothing cold, and says so
out=$("$kvtier" bench load --bytes 4M --rounds 1 --cold --disk-dir "$TMPDIR" 2>&1)
case $out in
*"stays in the page cache"* | *"opening with O_DIRECT"*)
	echo "SKIP: cold loads: $out" ;;
*"load, cold, host memory "*"direct reads, "*" --no-fast-load "*"mmap, none"*"load, cold, GPU memory "*) ;;
*)
	echo "bench load --cold: $out"
	failed=1 ;;
esac
[ -z "$(ls -A "$TMPDIR")" ] || { echo "files are left: $(ls -A "$TMPDIR")"; failed=1; }
check 0 "*tests/data/kvt-demo/*: * MB; *load, cached, GPU memory*" --file "$KVT_SOURCE/tests/data/kvt-demo/model.safetensors" \
	--rounds 1 --cached
check 1 'kvtier bench: *none: No such file*' --file "$TMPDIR/none"
check 1 'kvtier bench: *none/kvtier-load-*: No such file or directory (--disk-dir)' --disk-dir "$TMPDIR/none"
check 2 'kvtier bench: --bytes 4K: 1M to 1T*' --bytes 4K
check 2 'kvtier bench: --backend "tpu": auto, cpu or cuda*' --backend tpu
check 2 'kvtier bench: --cold or --cached*' --cold --cached
check 2 "kvtier bench: load takes no 'x'*" x
check 2 'kvtier bench: "--frob" is not an option*' --frob
check 0 'usage: kvtier bench load*' --help
exit $failed
