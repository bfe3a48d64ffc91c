#!/bin/bash
# SPDX-License-Identifier: MIT
# llama.cpp's own test of model architectures: small random models, logits held against those of the CPU backend, states
# saved and restored. Every architecture with a KV cache passes on the device, or is one of those that llama.cpp has no flash
# attention for, which are refused by name. KVT_LLAMA_ARCHS: names, or "all".
# shellcheck source=tests/lib/llama.sh
. "$KVT_SOURCE/tests/lib/llama.sh"
# ALiBi, soft-cap, sliding and chunked windows, sinks, MoE, hybrids, latent attention, states beside K and V.
archs=${KVT_LLAMA_ARCHS:-'bloom cohere2 falcon gemma2 gemma3 gpt-oss granite jais llama llama4 minicpm3 phi3 qwen3 qwen3moe
	qwen3next deepseek2 glm5-next qwen4exp'}
# no flash attention at all; layers that share K and V of others, so that llama.cpp turns it off; sparse attention
refused='grok t5 gemma3n deepseek32 deepseek4 glm-dsa dots3note hy_v4'
log=$TMPDIR/log

# on_device PATTERN: what the test says
on_device() {
	tiered KVTIER_RAM_BYTES=1G KVTIER_CACHES=8 KVTIER_THREADS=1 KVTIER_LOG=info \
		timeout 3600 test-llama-archs -b KVTIER0 -a "$1" 2>&1
}

# shellcheck disable=SC2086 # words
if [ "$archs" = all ]; then
	pattern="^(?!($(echo $refused | tr ' ' '|'))\$)"
	least=100
else
	pattern="^($(echo $archs | tr ' ' '|'))\$"
	least=$(wc -w <<<"$archs")
fi
on_device "$pattern" >"$log"
code=$?
[ $code = 0 ] || wrong "exit code $code: $(grep -a 'kvtier:\|error\|ASSERT' "$log" | tail -n 2)"
# A row of the table, then what its caches said at their ends. Encoders have no KV cache.
sed 's/\x1b\[[0-9;]*m//g' "$log" | awk -F'|' -v least="$least" '
	/KV cache in tiers\|/ {
		gsub(/ /, "", $2)
		arch = $2
		rows[arch] += 0
		if (!(arch in order)) { order[arch] = ++n; name[n] = arch }
	}
	/attention calls/ { split($0, w, " attention calls"); k = split(w[1], v, " "); calls[arch] += v[k] }
	/ OK / { rows[arch]++; ok++ }
	/FAIL/ { print arch ": " $0; bad = 1 }
	END {
		for (i = 1; i <= n; i++)
			if (rows[name[i]]) {
				printf "%s: %d passed, %d attention calls\n", name[i], rows[name[i]], calls[name[i]]
				with += calls[name[i]] > 0
			}
		printf "%d architectures ran on the device, %d models passed\n", with, ok
		exit bad || with < least
	}' || failed=1
for arch in $([ "$archs" = all ] && echo "$refused" || echo grok deepseek4); do
	out=$(on_device "^$arch\$")
	code=$?
	if [ $code = 0 ] || { [ $code -ge 124 ] && [ $code -lt 255 ]; }; then wrong "$arch: exit code $code"; fi
	grep -q 'kvtier: .*-fa on' <<<"$out" || wrong "$arch has no flash attention, and is not refused for that"
done
rm -f "$log"
exit $failed
