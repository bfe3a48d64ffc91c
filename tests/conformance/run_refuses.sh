#!/bin/sh
# SPDX-License-Identifier: MIT
# kvtier run and bad input: one line that says what is wrong, exit code 2 for usage and 1 for failure, nothing left behind.
set -u
kvtier=$KVT_BUILD/kvtier
dir=$TMPDIR/refuses
out=$dir/out
failed=0
mkdir "$dir" "$out"
command -v perl >/dev/null || { echo "perl is not installed: it makes the models"; exit 77; }

# make_model DIR: a tiny one; its rows of K and V, 3 heads of 10 in f16, are 60 bytes
make_model() {
	mkdir -p "$1"
	perl -e '
		my ($dir, $data, @header) = ($ARGV[0], "");
		sub tensor {
			my ($name, @shape) = @_;
			my $n = 1;
			$n *= $_ for @shape;
			push @header, sprintf "\"%s\":{\"dtype\":\"F32\",\"shape\":[%s],\"data_offsets\":[%d,%d]}", $name,
				join(",", @shape), length $data, length($data) + 4 * $n;
			$data .= pack "f<*", map { sin(length($data) + $_ * $_) } 1 .. $n;
		}
		tensor("model.embed_tokens.weight", 260, 16);
		tensor("model.norm.weight", 16);
		tensor("model.layers.0.input_layernorm.weight", 16);
		tensor("model.layers.0.post_attention_layernorm.weight", 16);
		tensor("model.layers.0.self_attn.${_}_proj.weight", 30, 16) for "q", "k", "v";
		tensor("model.layers.0.self_attn.o_proj.weight", 16, 30);
		tensor("model.layers.0.mlp.${_}_proj.weight", 24, 16) for "gate", "up";
		tensor("model.layers.0.mlp.down_proj.weight", 16, 24);
		my $header = "{" . join(",", @header) . "}";
		open my $f, ">", "$dir/model.safetensors" or die;
		print $f pack("Q<", length $header), $header, $data;
		close $f or die;' "$1"
	cat >"$1/config.json" <<'END'
{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 260, "hidden_size": 16,
 "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 10,
 "hidden_act": "silu", "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000,
 "tie_word_embeddings": true, "bos_token_id": 256, "torch_dtype": "float32"}
END
}

# refuse CODE PATTERN OPTIONS...: that exit code, one line on stderr that matches, and no file more than before
refuse() {
	code=$1 pattern=$2
	shift 2
	before=$(ls -A "$dir" "$out")
	"$kvtier" run "$@" >"$TMPDIR/stdout" 2>"$TMPDIR/stderr"
	got=$?
	[ $got = "$code" ] || { echo "run $*: exit code $got, not $code"; failed=1; }
	[ "$(wc -l <"$TMPDIR/stderr")" = 1 ] || { echo "run $*: not one line: $(cat "$TMPDIR/stderr")"; failed=1; }
	grep -qE -- "$pattern" "$TMPDIR/stderr" || { echo "run $*: no \"$pattern\" in: $(cat "$TMPDIR/stderr")"; failed=1; }
	[ ! -s "$TMPDIR/stdout" ] || { echo "run $*: on stdout: $(cat "$TMPDIR/stdout")"; failed=1; }
	[ "$before" = "$(ls -A "$dir" "$out")" ] || { echo "run $*: left behind: $(ls -A "$dir" "$out")"; failed=1; }
	rm -f "$TMPDIR/stdout" "$TMPDIR/stderr"
}

# model PATTERN: what is in $dir/bad is refused
model() {
	refuse 1 "$1" --model "$dir/bad" --prompt a --max-tokens 2 --logits "$out/logits" --stats "$out/stats"
}

# config SED-SCRIPT PATTERN: config.json, edited, is refused
config() {
	sed "$1" "$dir/good/config.json" >"$dir/bad/config.json"
	model "$2"
	cp "$dir/good/config.json" "$dir/bad/config.json"
}

make_model "$dir/good"
good="--model $dir/good --max-tokens 2"
# shellcheck disable=SC2086 # options are meant to be split
"$kvtier" run $good --prompt a --logits "$out/want" >"$out/text" 2>&1 || { echo "the good model does not run"; exit 1; }

# ---- usage ----
refuse 2 'model DIR is missing' --prompt a
refuse 2 'one of --prompt TEXT and --prompt-file FILE' --model "$dir/good"
refuse 2 'one of --prompt TEXT and --prompt-file FILE' --model "$dir/good" --prompt a --prompt-file b
refuse 2 '"--frob" is not an option' --model "$dir/good" --prompt a --frob
refuse 2 '"extra" is not an option' --model "$dir/good" --prompt a extra
refuse 2 'io needs a value' --model "$dir/good" --prompt a --io
for wrong in '--threads 0' '--threads 1000000' '--threads two' '--max-tokens 0' '--prefill-chunk 0' '--ram-bytes 12Q' \
	'--ram-bytes -1' '--disk-bytes 1e9' '--block-bytes 0' '--block-bytes 1000' '--block-bytes 4M' '--block-bytes 6K' \
	'--io floppy' '--host guest' '--backend tpu' '--kv-type int3' '--untiered --ram-bytes 1G' '--untiered --disk-dir /'; do
	# shellcheck disable=SC2086
	refuse 2 "${wrong%% *}.*see: kvtier help run" $good --prompt a $wrong
done

# ---- the model ----
# shellcheck disable=SC2086
refuse 1 'none: No such file' $good --prompt a --model "$dir/none"
mkdir "$dir/bad"
model 'config.json: No such file'
cp "$dir/good/config.json" "$dir/bad"
model 'safetensors'
cp "$dir/good/model.safetensors" "$dir/bad"
config 's/.*//' 'config.json: not JSON'
config '4d' 'config.json: not JSON'
config "s/llama/$(printf '\377\376')/" 'config.json: not JSON'
config 's/LlamaForCausalLM/MambaForCausalLM/' '"architectures" is \["MambaForCausalLM"\]'
config 's/float32/float4/' '"torch_dtype" is "float4"; supported'
config 's/silu/relu/' '"hidden_act" is "relu"'
config 's/"hidden_size": 16/"hidden_size": 1e99/' '"hidden_size" is 9\.9+7e98, not a whole number'
config 's/"hidden_size": 16/"hidden_size": 65536/' 'embed_tokens.weight" has .* the configuration wants \[260, 65536\]'
config 's/"vocab_size": 260/"vocab_size": 4000000/' 'tokens are not bytes|configuration wants'
config 's/"num_hidden_layers": 1/"num_hidden_layers": 1000/' 'no tensor "model.layers.1.input_layernorm.weight"'
config 's/"tie_word_embeddings": true/"tie_word_embeddings": false/' 'no tensor "lm_head.weight"'
config 's/"head_dim": 10/"head_dim": 11/' 'a head of 11 elements'
: >"$dir/bad/model.safetensors"
model 'model.safetensors'
head -c 2000 "$dir/good/model.safetensors" >"$dir/bad/model.safetensors"
model 'model.safetensors'
printf '\377\377\377\377\377\377\377\177{}' >"$dir/bad/model.safetensors"
model 'model.safetensors'
sed 's/"F32","shape":\[24,16\]/"I32","shape":[24,16]/' "$dir/good/model.safetensors" >"$dir/bad/model.safetensors"
model 'I32'
sed 's/self_attn.q_proj.weight"/self_attn.q_proj.biasss"/; s/.biasss"/.bias"  /' "$dir/good/model.safetensors" \
	>"$dir/bad/model.safetensors"
model 'q_proj.bias"; biases are not supported'

# ---- the prompt ----
# shellcheck disable=SC2086
{
	refuse 1 'none: No such file' $good --prompt-file "$dir/none"
	refuse 1 'the prompt has 71 tokens, the model.s context is 64' $good \
		--prompt 0123456789012345678901234567890123456789012345678901234567890123456789
}

# ---- budgets ----
# shellcheck disable=SC2086
{
	refuse 1 'ram_bytes is 0; .* at least [0-9]+ are needed' $good --prompt a --ram-bytes 0
	refuse 1 'ram_bytes is 1000; .* at least [0-9]+ are needed' $good --prompt a --ram-bytes 1000
	refuse 1 'pinned_bytes is 4095 bytes: less than a block of 65536' $good --prompt a --pinned-bytes 4095
	refuse 1 'disk_bytes is 4095 bytes: less than a block of 65536' $good --prompt a --disk-bytes 4095
	refuse 1 'gpu_bytes is 10 bytes: less than a block of 65536' $good --prompt a --gpu-bytes 10
	refuse 1 "ram_bytes [0-9]+ and pinned_bytes 0 are more than this machine's [0-9]+ bytes" $good --prompt a --ram-bytes 64T
	refuse 1 'gpu_bytes is 1099511627776000 bytes: more than' $good --prompt a --gpu-bytes 1000T
}

# ---- directories ----
# shellcheck disable=SC2086
{
	refuse 1 'none.*No such file' $good --prompt a --disk-dir "$dir/none"
	refuse 1 'Not a directory' $good --prompt a --disk-dir "$dir/good/config.json"
	refuse 1 '/proc' $good --prompt a --disk-dir /proc
	refuse 1 'none/logits: No such file' $good --prompt a --logits "$dir/none/logits"
	refuse 1 'refuses/out: Is a directory' $good --prompt a --stats "$out"
}
if [ "$(id -u)" = 0 ]; then
	echo "SKIP: a read-only --disk-dir: root may write to it"
else
	mkdir "$dir/readonly"
	chmod 555 "$dir/readonly"
	# shellcheck disable=SC2086
	refuse 1 'readonly.*Permission denied' $good --prompt a --disk-dir "$dir/readonly"
	chmod 755 "$dir/readonly"
fi

# ---- what is unusual and works ----
# works PATTERN OPTIONS...: the good run's logits, and stderr (nothing for an empty pattern)
works() {
	pattern=$1
	shift
	# shellcheck disable=SC2086
	"$kvtier" run $good --prompt a --logits "$out/got" "$@" >"$out/text" 2>"$out/err" ||
		{ echo "$*: $(cat "$out/err")"; failed=1; }
	cmp "$out/got" "$out/want" || { echo "$*: other logits"; failed=1; }
	grep -qE -- "$pattern" "$out/err" || { echo "$*: no \"$pattern\" in: $(cat "$out/err")"; failed=1; }
	rm -f "$out/got" "$out/err"
}

works 'note: a row of 60 bytes does not divide the block of 4096 \(--block-bytes\): 16 bytes' --block-bytes 4K
works 'note' --disk-dir /dev/shm
mkfifo "$out/pipe"
cat "$out/pipe" >"$out/piped" &
works 'note' --stats "$out/pipe"
if [ ! -p "$out/pipe" ] || ! wait $! || ! grep -q ttft_seconds "$out/piped"; then
	echo "--stats into a pipe: $(cat "$out/piped")"
	exit 1 # before it comes to a device
fi
# shellcheck disable=SC2086
"$kvtier" run $good --prompt a --max-tokens 100 >"$out/text" 2>"$out/err" || failed=1
grep -q -- '--max-tokens 100 is cut to 63' "$out/err" || { echo "no note of a cut: $(cat "$out/err")"; failed=1; }
# shellcheck disable=SC2086
if "$kvtier" run $good --prompt a --logits /dev/full >"$out/text" 2>"$out/err" ||
	! grep -q '/dev/full: No space left' "$out/err"; then
	echo "a full device for the logits: $(cat "$out/err")"
	failed=1
fi

rm -rf "$dir"
exit $failed
