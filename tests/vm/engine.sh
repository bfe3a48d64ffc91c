#!/bin/sh
# SPDX-License-Identifier: MIT
# In a guest: the reference engine over the module gives the bits that it gives in user space, and reads its disk tier.
set -eu
run() {
	kvtier run --model /model --prompt-file /prompt --max-tokens 2 --threads 1 --pinned-bytes 256K \
		--ram-bytes 3M --disk-dir /mnt --host "$1" --stats "/tmp/$1.json" --logits "/tmp/$1.logits" \
		>"/tmp/$1.out" 2>"/tmp/$1.err" || { cat "/tmp/$1.err"; exit 1; }
}
run user
run module
run auto
grep -q '"host": "module"' /tmp/module.json
grep -q '"host": "module"' /tmp/auto.json
cmp /tmp/user.logits /tmp/module.logits
cmp /tmp/user.out /tmp/module.out
for host in user module; do
	grep '"disk_reads"' /tmp/$host.json
	! grep -q '"disk_reads": 0,' /tmp/$host.json || { echo "$host read nothing from disk"; exit 1; }
done
[ "$(cat /sys/kernel/kvtier/reads)" -gt 0 ]
echo "ok   engine: $(wc -c </tmp/module.logits) bytes of logits are equal"
