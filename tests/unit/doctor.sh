#!/bin/sh
# SPDX-License-Identifier: MIT
# kvtier doctor: it tells what a made-up machine has and lacks, with a command for each thing lacking, and never fails.
set -u
kvtier=$KVT_BUILD/kvtier
root=$TMPDIR/root
failed=0

# has TEXT PATTERN: a line of TEXT matches, blanks squeezed
has() {
	if ! echo "$1" | tr -s ' ' | grep -qE -- "$2"; then
		echo "no line \"$2\" in:"
		echo "$1"
		failed=1
	fi
}

put() {
	mkdir -p "$(dirname "$root$1")"
	printf '%s\n' "$2" >"$root$1"
}

release=$(uname -r)
# A machine that lacks nearly everything.
put /etc/os-release 'ID=debian'
put /sys/kernel/mm/transparent_hugepage/enabled 'always madvise [never]'
put /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages 0
put /sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages 0
put "/boot/config-$release" '# CONFIG_PCI_P2PDMA is not set'
put /sys/bus/pci/devices/0000:01:00.0/vendor 0x10de
put /sys/bus/pci/devices/0000:01:00.0/class 0x030200
put /proc/meminfo 'MemTotal:       16777216 kB'
out=$("$kvtier" doctor --root "$root" --dir "$TMPDIR/none") || { echo "exit code $?"; failed=1; }
has "$out" '^ ok memory 16\.0 GiB'
has "$out" '^ missing thp transparent huge pages are off'
has "$out" '\$ echo madvise \| sudo tee /sys/kernel/mm/transparent_hugepage/enabled'
has "$out" '^ missing hugetlb no 2 MiB page is reserved'
has "$out" '\$ sudo sysctl vm\.nr_hugepages=512'
has "$out" "^ missing disk $TMPDIR/none:"
has "$out" "\\\$ mkdir -p '$TMPDIR/none'"
has "$out" '^ missing module no /dev/kvtier: kvtier\.ko is not installed'
has "$out" '\$ sudo make install-dkms'
has "$out" '^ missing p2p this kernel is built without CONFIG_PCI_P2PDMA'
if ! ldconfig -p | grep -q libcuda.so.1; then
	has "$out" '^ missing gpu 1 NVIDIA GPU on the PCI bus: libcuda\.so\.1'
	has "$out" '\$ sudo apt-get install nvidia-driver'
fi

# The same machine, mended.
put /sys/kernel/mm/transparent_hugepage/enabled 'always [madvise] never'
put /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages 512
put /sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages 500
put "/boot/config-$release" 'CONFIG_PCI_P2PDMA=y'
put /dev/kvtier ''
put /sys/module/kvtier/version 0.1.0
put /sys/fs/cgroup/memory.max 1073741824
out=$("$kvtier" doctor --root "$root" --dir "$TMPDIR")
has "$out" '^ ok memory 16\.0 GiB.* limit is 1\.0 GiB'
has "$out" '^ ok thp transparent huge pages: madvise'
has "$out" '^ ok hugetlb 500 of 512 reserved 2 MiB pages free'
has "$out" '^ ok module /dev/kvtier, version 0\.1\.0'
has "$out" '^ absent p2p the kernel has PCI_P2PDMA'
rm "$root/dev/kvtier"
put "/lib/modules/$release/updates/dkms/kvtier.ko.xz" ''
has "$("$kvtier" doctor --root "$root")" '\$ sudo modprobe kvtier'

# A driver library that crashes, exits or is no library must not take doctor along.
mkdir "$TMPDIR/lib"
echo '__attribute__((constructor)) static void f(void) { *(volatile int *)0 = 0; }' |
	cc -shared -fPIC -x c -o "$TMPDIR/lib/libcuda.so.1" -
out=$(LD_LIBRARY_PATH=$TMPDIR/lib "$kvtier" doctor) || { echo "crashing driver: exit code $?"; failed=1; }
has "$out" '^ missing gpu asking libcuda\.so\.1 ended by Segmentation fault'
echo '#include <stdlib.h>
__attribute__((constructor)) static void f(void) { exit(0); }' | cc -shared -fPIC -x c -o "$TMPDIR/lib/libcuda.so.1" -
out=$(LD_LIBRARY_PATH=$TMPDIR/lib "$kvtier" doctor) || { echo "exiting driver: exit code $?"; failed=1; }
has "$out" '^ missing gpu asking libcuda\.so\.1 ended by'
echo 'int cuInit(unsigned f) { return f + 100; }' | cc -shared -fPIC -x c -o "$TMPDIR/lib/libcuda.so.1" -
has "$(LD_LIBRARY_PATH=$TMPDIR/lib "$kvtier" doctor)" '^ missing gpu .*lacks functions of the driver API'
# Every GPU has a line.
echo '#include <stddef.h>
#include <stdio.h>
int cuInit(unsigned f) { return f; }
int cuDriverGetVersion(int *v) { *v = 13000; return 0; }
int cuDeviceGetCount(int *n) { *n = 2; return 0; }
int cuDeviceGet(int *d, int i) { *d = i; return 0; }
int cuDeviceGetName(char *s, int n, int d) { snprintf(s, n, "Made-up %c", 65 + d); return 0; }
int cuDeviceTotalMem_v2(size_t *b, int d) { *b = (size_t)(d + 1) << 30; return 0; }' |
	cc -shared -fPIC -x c -o "$TMPDIR/lib/libcuda.so.1" -
out=$(LD_LIBRARY_PATH=$TMPDIR/lib "$kvtier" doctor)
has "$out" '^ missing gpu 0 of 2: Made-up A, 1\.0 GiB; driver API 13\.0; not used: '
has "$out" '^ missing gpu 1 of 2: Made-up B, 2\.0 GiB; driver API 13\.0; not used: '
LD_LIBRARY_PATH=$TMPDIR/lib "$kvtier" doctor --json | perl -MJSON::PP -e '
	local $/; my @g = grep { $_->{name} eq "gpu" } @{decode_json(<STDIN>)->{checks}};
	die "gpus\n" unless @g == 2 && $g[1]{facts}{device} == 1 && $g[1]{facts}{devices} == 2 && $g[0]{mend};' || failed=1

# A small memlock limit, where this process is bound by it at all.
bound='prlimit --memlock=65536:65536 setpriv --bounding-set -ipc_lock --inh-caps -ipc_lock'
[ "$(id -u)" = 0 ] || bound='prlimit --memlock=65536:65536'
if $bound true 2>/dev/null; then
	out=$($bound "$kvtier" doctor)
	has "$out" '^ missing memlock RLIMIT_MEMLOCK is 64 KiB: a larger pinned tier is not locked'
	# that is so
	$bound "$kvtier" run --model "$KVT_SOURCE/tests/data/kvt-demo" --prompt a --max-tokens 1 --pinned-bytes 1M --host user \
		>/dev/null 2>"$TMPDIR/err" || { echo "a pinned tier above the limit: $(cat "$TMPDIR/err")"; failed=1; }
	has "$(cat "$TMPDIR/err")" 'warning: pinned tier: not locked: RLIMIT_MEMLOCK is 64 KiB, 1 MiB asked'
	rm "$TMPDIR/err"
	has "$out" '\$ echo "[$]USER - memlock unlimited" \| sudo tee'
fi

# The JSON is JSON, says the same, and survives a name that is not UTF-8.
odd=$TMPDIR/$(printf 'odd\377name')
mkdir "$odd"
"$kvtier" doctor --json --dir "$odd" --dir "$TMPDIR/none" --dir /proc | perl -MJSON::PP -e '
	local $/; my $d = decode_json(<STDIN>); my %n; $n{$_->{name}}++ for @{$d->{checks}};
	for (qw(cpu memory memlock hugetlb thp numa io_uring module gpu p2p)) { die "$_: not there once\n" unless $n{$_} == 1 }
	die "disk: not there three times\n" unless $n{disk} == 3;
	for (@{$d->{checks}}) {
		die "$_->{name}: status\n" unless $_->{status} =~ /^(ok|missing|absent)$/;
		die "$_->{name}: missing, and no command\n" if $_->{status} eq "missing" && !$_->{mend};
		die "$_->{name}: facts\n" unless ref $_->{facts} eq "HASH";
	}' || failed=1

rm -rf "$root" "${TMPDIR:?}/lib" "$odd"
exit $failed
