#!/bin/sh
# SPDX-License-Identifier: MIT
# In a guest: the reference engine over the module gives the bits that it gives in user space, also where it reads its
# disk tier; and one that was killed leaves its cache to the next.
set -eu
# Guests are slow: few tokens, in blocks so small that memory does not hold them all.
head -c 48 /prompt >/tmp/prompt
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

export TMPDIR=/mnt
# A RAM tier with a name, killed with -9: the next process goes on with what it finds there, the bits are those of a run that
# found nothing, and nothing is read from disk.
head -c 24 /prompt >/tmp/short
launch() {
	out=$1
	shift
	exec kvtier run --model /model --prompt-file /tmp/short --threads 1 --prefill-chunk 8 --block-bytes 4K \
		--stats "/tmp/$out.json" --logits "/tmp/$out" "$@" >"/tmp/$out.out" 2>"/tmp/$out.err"
}
answer() { (launch "$@"); }
must() {
	answer "$@" || { cat "/tmp/$1.err"; exit 1; }
}
# refused NAME WORDS ARGUMENT...: it fails, and says so in these words
refused() {
	name=$1 words=$2
	shift 2
	if answer "$name" --max-tokens 1 "$@"; then echo "$name was not refused"; exit 1; fi
	grep -q -e "$words" "/tmp/$name.err" || { cat "/tmp/$name.err"; exit 1; }
}
# killed CONDITION ARGUMENT...: run with a pool, and kill the process once the condition holds
killed() {
	when=$1
	shift
	rm -f /tmp/killed.out
	launch killed --warm kv "$@" &
	until $when; do
		[ -d /proc/$! ] || { echo "it ended before it could be killed"; cat /tmp/killed.err; exit 1; }
		sleep 0.2
	done
	refused busy 'the pool kv is in use by another process' --warm kv
	kill -9 $!
	wait $! 2>/dev/null || true
	[ "$(cat /sys/kernel/kvtier/pools_alive)" = 1 ]
}
number() { sed -n "s/.*\"$1\": \\([0-9]*\\).*/\\1/p" "/tmp/$2.json" | head -n 1; }
frames() { cat /sys/kernel/kvtier/populated_frames; }
some_frames() { [ $(($(frames) - base)) -gt 12 ]; }
some_text() { [ -s /tmp/killed.out ]; }

must cold --max-tokens 4 --host user
base=$(frames)
killed some_frames --max-tokens 500
killed some_text --max-tokens 500
before=$(cat /sys/kernel/kvtier/read_bytes)
must warm --max-tokens 4 --warm kv
cmp /tmp/cold /tmp/warm
cmp /tmp/cold.out /tmp/warm.out
tokens=$(number prompt_tokens warm)
[ "$(number cached_tokens warm)" = $((tokens - 1)) ] || { echo "not all was found"; cat /tmp/warm.json; exit 1; }
[ "$(number disk_read_bytes warm)" = 0 ] && [ "$(cat /sys/kernel/kvtier/read_bytes)" = "$before" ]
echo "ok   warm restart: after kill -9, $((tokens - 1)) of $tokens tokens found, the same bits, nothing read from disk"

# A run that ends by itself leaves its cache, too. Another geometry is refused by name.
must again --max-tokens 4 --warm kv
cmp /tmp/cold /tmp/again
[ "$(number cached_tokens again)" = $((tokens - 1)) ]
refused other 'the pool kv .*another name, or kvtier pools --remove kv' --warm kv --kv-type f32
kvtier pools | grep -q '^kv '
kvtier pools --remove kv
[ "$(cat /sys/kernel/kvtier/pools_alive)" = 0 ]
refused none '--warm keeps the ram tier in the kernel module' --warm kv --host user

# With a directory: memory serves what it has, the directory what memory has not; and each is kept.
must stored --max-tokens 4 --store /mnt/store --warm kv2
cmp /tmp/cold /tmp/stored
must both --max-tokens 4 --store /mnt/store --warm kv2
cmp /tmp/cold /tmp/both
[ "$(number cached_tokens both)" = $((tokens - 1)) ] && [ "$(number disk_read_bytes both)" = 0 ]
kvtier pools --remove kv2
must directory --max-tokens 4 --store /mnt/store --warm kv2
cmp /tmp/cold /tmp/directory
[ "$(number cached_tokens directory)" = $((tokens - 1)) ] && [ "$(number disk_read_bytes directory)" -gt 0 ]
kvtier pools --remove kv2
echo "ok   warm restart with a directory: from memory while it is there, from disk when not, the same bits"
