#!/bin/sh
# SPDX-License-Identifier: MIT
# In a guest: the reference engine over the module gives the bits that it gives in user space, also where it reads its
# disk tier; and one that was killed leaves its cache to the next.
set -eu
# Guests are slow: few tokens, in blocks so small that memory does not hold them all.
head -c 100 /prompt >/tmp/prompt
run() {
	kvtier run --model /model --prompt-file /tmp/prompt --max-tokens 2 --threads 1 --pinned-bytes 16K \
		--block-bytes 4K --disk-dir /mnt --host "$1" --stats "/tmp/$1.json" --logits "/tmp/$1.logits" \
		>"/tmp/$1.out" 2>"/tmp/$1.err" || { cat "/tmp/$1.err"; exit 1; }
}
run user
run auto
grep -q '"host": "module"' /tmp/auto.json
cmp /tmp/user.logits /tmp/auto.logits
cmp /tmp/user.out /tmp/auto.out
for host in user auto; do
	grep '"disk_reads"' /tmp/$host.json
	! grep -q '"disk_reads": 0,' /tmp/$host.json || { echo "$host read nothing from disk"; exit 1; }
done
[ "$(cat /sys/kernel/kvtier/reads)" -gt 0 ]
echo "ok   engine: $(wc -c </tmp/auto.logits) bytes of logits are equal"

# Little memory may be locked: said with the limit and the knob; by itself, the library goes on without the module.
tight() {
	su user -c "ulimit -l 64; kvtier run --model /model --prompt a --max-tokens 1 --threads 1 --ram-bytes 3M \
		--disk-dir /tmp --stats /tmp/tight.json --host $1" 2>/tmp/tight.err >/dev/null
}
! tight module || { echo "64 KiB of locked memory were enough"; exit 1; }
grep -q 'usermod -aG kvtier' /tmp/tight.err || { cat /tmp/tight.err; exit 1; }
chmod 666 /dev/kvtier
! tight module || { echo "64 KiB of locked memory were enough"; exit 1; }
grep -q 'RLIMIT_MEMLOCK is 64.*asked.*ulimit -l' /tmp/tight.err || { cat /tmp/tight.err; exit 1; }
tight auto || { cat /tmp/tight.err; exit 1; }
grep -q '"host": "user' /tmp/tight.json && grep -q '"host_note": ".*RLIMIT_MEMLOCK' /tmp/tight.json
chmod 660 /dev/kvtier
echo "ok   little locked memory: $(sed -n 's/.*"host_note": "\(.*\)".*/\1/p' /tmp/tight.json)"

head -c 200 /prompt >/tmp/short
warm /tmp/short user - 8 /tmp/cold
! warm /tmp/short module kv 8 /tmp/killed die || { echo "it was not killed"; exit 1; }
[ "$(cat /sys/kernel/kvtier/pools_alive)" = 1 ]
before=$(cat /sys/kernel/kvtier/read_bytes)
warm /tmp/short module kv 8 /tmp/warm >/tmp/warm.out
cat /tmp/warm.out
grep -Eq '^([0-9]+) of [0-9]+ tokens found, 0 bytes read from disk' /tmp/warm.out
if grep -q '^0 of' /tmp/warm.out; then exit 1; fi
[ "$(cat /sys/kernel/kvtier/read_bytes)" = "$before" ]
cmp /tmp/cold /tmp/warm
cmp /tmp/cold /tmp/killed
kvtier pools | grep -q '^kv '
kvtier pools --remove kv
[ "$(cat /sys/kernel/kvtier/pools_alive)" = 0 ]
echo "ok   warm restart: after kill -9, $(cut -d, -f1 /tmp/warm.out), the same bits, nothing read from disk"
