#!/bin/bash
# SPDX-License-Identifier: MIT
# llama.cpp's own test of model architectures: small random models, logits held against those of the CPU backend, states
# saved and restored. Every architecture with a KV cache passes on the device, or is one of those that are refused by name.
# shellcheck source=tests/lib/llama.sh
. "$KVT_SOURCE/tests/lib/llama.sh"
# ALiBi, soft-cap, sliding and chunked windows, sinks, MoE, a hybrid; KVT_LLAMA_ARCHS names others.
archs=${KVT_LLAMA_ARCHS:-'bloom cohere2 falcon gemma2 gemma3 gpt-oss granite jais llama llama4 minicpm3 phi3 qwen3 qwen3moe qwen3next'}

# one ARCHITECTURE: what the test says
one() {
	tiered KVTIER_RAM_BYTES=2G KVTIER_CACHES=8 KVTIER_THREADS=1 KVTIER_LOG=info \
		timeout 150 test-llama-archs -b KVTIER0 -a "^$1\$" 2>&1
}

passed=0
for arch in $archs; do
	out=$(one "$arch")
	ok=$(grep -c 'OK' <<<"$out")
	calls=$(grep -o '[0-9]* attention calls' <<<"$out" | awk '{ n += $1 } END { print n + 0 }')
	echo "$arch: $ok passed, $calls attention calls"
	if [ "$ok" = 0 ] || [ "$calls" = 0 ] || grep -q FAIL <<<"$out"; then
		wrong "$arch: $(grep -a 'kvtier:\|FAIL\|error' <<<"$out" | head -n 2)"
	fi
	passed=$((passed + ok))
done
[ $passed -ge 10 ] || wrong "only $passed models passed"
for arch in grok t5; do
	one "$arch" | grep -q 'kvtier: .*-fa on' || wrong "$arch has no flash attention, and is not refused for that"
done
exit $failed
