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

# make_model DIR [LAYERS [NAME [HIDDEN INTER]]]: a tiny one (with a tensor NAME); its rows of K and V, 3 heads of 10 in
# f16, are 60 bytes. With HIDDEN and INTER: a large one, all holes.
make_model() {
	mkdir -p "$1"
	perl -e '
		my ($dir, $layers, $more, $hidden, $inter, $holes) = @ARGV;
		my ($data, $end, @header) = ("", 0);
		sub tensor {
			my ($name, @shape) = @_;
			my $n = 1;
			$n *= $_ for @shape;
			push @header, sprintf "\"%s\":{\"dtype\":\"F32\",\"shape\":[%s],\"data_offsets\":[%d,%d]}", $name,
				join(",", @shape), $end, $end + 4 * $n;
			$data .= pack "f<*", map { sin($end + $_ * $_) } 1 .. $n unless $holes;
			$end += 4 * $n;
		}
		tensor("model.embed_tokens.weight", 260, $hidden);
		tensor("model.norm.weight", $hidden);
		for my $layer (map { "model.layers.$_" } 0 .. $layers - 1) {
			tensor("$layer.input_layernorm.weight", $hidden);
			tensor("$layer.post_attention_layernorm.weight", $hidden);
			tensor("$layer.self_attn.${_}_proj.weight", 30, $hidden) for "q", "k", "v";
			tensor("$layer.self_attn.o_proj.weight", $hidden, 30);
			tensor("$layer.mlp.${_}_proj.weight", $inter, $hidden) for "gate", "up";
			tensor("$layer.mlp.down_proj.weight", $hidden, $inter);
		}
		tensor($more, 4) if $more;
		my $header = "{" . join(",", @header) . "}";
		open my $f, ">", "$dir/model.safetensors" or die;
		print $f pack("Q<", length $header), $header, $data;
		close $f or die;
		truncate "$dir/model.safetensors", 8 + length($header) + $end or exit 1;' \
		"$1" "${2:-1}" "${3:-}" "${4:-16}" "${5:-24}" "${4:+holes}" || return 1
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
	timeout 60 "$kvtier" run "$@" >"$TMPDIR/stdout" 2>"$TMPDIR/stderr"
	got=$?
	[ $got = "$code" ] || { echo "run $*: exit code $got, not $code"; failed=1; }
	[ "$(wc -l <"$TMPDIR/stderr")" = 1 ] || { echo "run $*: not one line: $(cat "$TMPDIR/stderr")"; failed=1; }
	grep -qE -- "$pattern" "$TMPDIR/stderr" || { echo "run $*: no \"$pattern\" in: $(cat "$TMPDIR/stderr")"; failed=1; }
	[ ! -s "$TMPDIR/stdout" ] || { echo "run $*: on stdout: $(cat "$TMPDIR/stdout")"; failed=1; }
	# who runs the command knows options, not the library's fields
	if sed 's/"[^"]*"//g' "$TMPDIR/stderr" | grep -qE '(^|[ (])((ram|pinned|gpu|disk|block)_bytes|max_[a-z_]*|numa_[a-z]*|host=|top_|min_p)'; then
		echo "run $*: a field's name in: $(cat "$TMPDIR/stderr")"
		failed=1
	fi
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
	'--ram-bytes 1GB' '--temperature -1' '--temperature hot' '--temperature nan' '--top-k -1' '--top-k 1.5' '--top-p 1.1' \
	'--top-p x' '--min-p -0.1' '--top-n-sigma inf' '--repetition-penalty 0' '--presence-penalty 1e99' \
	'--frequency-penalty 1,5' '--penalty-last-n x' '--logit-bias 5' '--logit-bias 5=nan' '--logit-bias x=1' '--logit-bias 1=inf' \
	'--logit-bias 1=1,1=2' '--logit-bias 1=1,' '--sampler-order top_k,top_k' '--sampler-order top_q' \
	'--sampler-order top_k,bias' '--seed -1' '--seed x' '--progress loud' '--io floppy' '--host guest' '--backend tpu' '--policy mru' '--kv-type int3' '--untiered --ram-bytes 1G' '--untiered --disk-dir /'; do
	# shellcheck disable=SC2086
	refuse 2 "${wrong%% *}.*see: kvtier help run" $good --prompt a $wrong
done

for empty in --model --tokenizer --prompt-file --disk-dir --stats --logits; do
	# shellcheck disable=SC2086
	refuse 2 "$empty \"\": a name is needed" $good --prompt a $empty ''
done
# shellcheck disable=SC2086
{
	refuse 2 '"1GB" is not a size: units are powers of 1024' $good --prompt a --ram-bytes 1GB
	refuse 2 '--policy "mru": auto, lru, s3fifo, cost or scan are known' $good --prompt a --policy mru
	refuse 2 '--top-p is 1.1: 0 to 1' $good --prompt a --top-p 1.1
	refuse 2 '--top-k is set but not in --sampler-order' $good --prompt a --top-k 5 --sampler-order bias
	refuse 1 '--logit-bias for token 260: the vocabulary has 260' $good --prompt a --logit-bias 260=1
}

# a GPU is named where one is used
# shellcheck disable=SC2086
{
	refuse 2 '--device is of the gpu tier: no --untiered' $good --prompt a --untiered --device 0
	refuse 2 '--device says which GPU: no --backend cpu' $good --prompt a --gpu-bytes 1M --backend cpu --device 5
	refuse 2 '--device says which GPU: without --gpu-bytes or --backend cuda' $good --prompt a --device 5
	refuse 2 '--device says which GPU: without --gpu-bytes or --backend cuda' $good --prompt a --gpu-bytes 0 --device 5
	refuse 1 '--device 1023, and the cpu backend, to which auto falls back, has device 0 alone: ' $good --prompt a \
		--gpu-bytes 8M --device 1023
	refuse 1 '--backend cuda: ' $good --prompt a --backend cuda --device 1023
}

# an output is not the other one, nor what is read
ln "$dir/good/model.safetensors" "$dir/hard"
ln -s good/config.json "$dir/soft"
# shellcheck disable=SC2086
{
	refuse 2 '--logits and --stats are one file' $good --prompt a --logits "$out/new" --stats "$out/../out/new"
	refuse 2 '--logits and --stats are one file' $good --prompt a --logits "$out/want" --stats "$out/want"
	for name in hard soft good/config.json good/../good/model.safetensors; do
		refuse 2 "--logits $dir/$name would replace a file that is read" $good --prompt a --logits "$dir/$name"
	done
	refuse 2 "--stats $out/want would replace a file that is read" $good --prompt-file "$out/want" --stats "$out/want"
	refuse 2 "--stats $out/want would replace a file that is read" $good --prompt a --tokenizer "$out/want" --stats "$out/want"
}
rm "$dir/hard" "$dir/soft"

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
config 's/"num_hidden_layers": 1/"num_hidden_layers": 0/' '"num_hidden_layers" is 0'
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

# more layers than the configuration has: as if another model's config.json lay there
sed 's/"num_hidden_layers": 1/"num_hidden_layers": 2/' "$dir/good/config.json" >"$dir/bad/config.json"
sed 's/layers\.0\./layers.1./g' "$dir/good/model.safetensors" >"$dir/bad/model.safetensors"
model 'no tensor "model.layers.0.input_layernorm.weight"'
cp "$dir/good/config.json" "$dir/bad/config.json"
make_model "$dir/bad" 2
cp "$dir/good/config.json" "$dir/bad/config.json"
model 'tensor "model.layers.1.[a-z_.]*", and "num_hidden_layers" is 1'
make_model "$dir/bad" 1 strange.weight
model 'tensor "strange.weight", for which a Llama model of this configuration has no use'
make_model "$dir/bad"

# 13 TB of weights: seen before memory is taken for them
if make_model "$dir/bad" 64 '' 65536 262144; then
	sed 's/"num_hidden_layers": 1/"num_hidden_layers": 64/; s/"hidden_size": 16/"hidden_size": 65536/
		s/"intermediate_size": 24/"intermediate_size": 262144/' "$dir/good/config.json" >"$dir/bad/config.json"
	model 'the weights need [0-9]{14} bytes of RAM, '
else
	echo "SKIP: weights that memory cannot hold: no such file can be made here"
fi
make_model "$dir/bad"

# what is no file: said at once, not waited for
for what in pipe directory device; do
	for name in config.json model.safetensors; do
		mv "$dir/bad/$name" "$dir/kept"
		case $what in
		pipe) mkfifo "$dir/bad/$name" ;;
		directory) mkdir "$dir/bad/$name" ;;
		device) ln -s /dev/zero "$dir/bad/$name" ;;
		esac
		model "$name: a (pipe or device|directory), not a regular file"
		rm -r "${dir:?}/bad/$name"
		mv "$dir/kept" "$dir/bad/$name"
	done
done
mkfifo "$dir/fifo"
# shellcheck disable=SC2086
for what in "$dir/fifo" "$dir/bad" /dev/zero; do
	refuse 1 'not a regular file' $good --prompt-file "$what"
	refuse 1 'not a regular file' $good --prompt a --tokenizer "$what"
done
rm "$dir/fifo"

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
	refuse 1 '--ram-bytes is 0; .* at least [0-9]+ are needed' $good --prompt a --ram-bytes 0
	refuse 1 '--ram-bytes is 1000; .* at least [0-9]+ are needed' $good --prompt a --ram-bytes 1000
	refuse 1 "run: --ram-bytes is [0-9]+: more than this machine's [0-9]+ bytes" $good --prompt a --ram-bytes 64T
	refuse 1 "run: --pinned-bytes is [0-9]+: more than this machine's [0-9]+ bytes" $good --prompt a --pinned-bytes 900T
	refuse 1 "run: --ram-bytes [0-9]+ and --pinned-bytes [0-9]+ are more than this machine's" $good --prompt a --ram-bytes 64T \
		--pinned-bytes 1M
	[ -e /dev/kvtier ] || refuse 1 'run: --warm needs the kernel module: no /dev/kvtier' $good --prompt a --warm x
	[ -e /dev/kvtier ] || refuse 1 'run: --host module: no /dev/kvtier' $good --prompt a --host module
	refuse 1 '--gpu-bytes is 1099511627776000 bytes: 35184372023296 are the most with blocks of 65536: lower it' $good --prompt a --gpu-bytes 1000T
}

# least OPTION OTHERS...: one byte is refused, and so is one less than it says would do; that works
least() {
	option=$1
	shift
	# shellcheck disable=SC2086
	least=$("$kvtier" run $good --prompt a "$@" "$option" 1 2>&1 | sed -nE "s/.*$option is 1 bytes: at least ([0-9]+) .*/\1/p")
	# shellcheck disable=SC2086
	refuse 1 "$option is $((least - 1)) bytes: at least $least are needed" $good --prompt a "$@" "$option" $((least - 1))
	# shellcheck disable=SC2086
	"$kvtier" run $good --prompt a "$@" "$option" "$least" >"$out/text" 2>"$out/err" || {
		echo "$option $least: $(cat "$out/err")"
		failed=1
	}
	rm -f "$out/err"
}

least --pinned-bytes
least --disk-bytes
least --gpu-bytes --backend cpu
least --disk-bytes --store "$dir/kept"
least --disk-bytes --store "$dir/kept4K" --block-bytes 4K
rm -rf "$dir/kept" "$dir/kept4K"

# room OPTION BYTES OTHERS...: too little for prompt and answer is refused at the start, with what is wanting; with that the
# run comes to its end, and with a block less it does not start.
room() {
	option=$1 bytes=$2 more=first
	shift 2
	long="--model $KVT_SOURCE/tests/data/kvt-demo --prompt-file $dir/long --max-tokens 4 --block-bytes 4K --threads 1"
	for try in 1 2 3 4; do
		# shellcheck disable=SC2086
		"$kvtier" run $long "$@" "$option" "$bytes" --logits "$out/got" >"$out/text" 2>"$out/err" && break
		[ ! -s "$out/text" ] || { echo "$option $bytes: fails on the way"; failed=1; }
		more=$(sed -nE "s/.*take [0-9]+ bytes in blocks of 4096: at least ([0-9]+) more are needed in .*$option.*/\1/p" "$out/err")
		[ "$more" ] || break
		bytes=$((bytes + more))
	done
	if [ "$more" = first ] || ! cmp "$out/got" "$out/long"; then
		echo "room $option $bytes $*, try $try: $(cat "$out/err")"
		failed=1
	fi
	rm -f "$out/got" "$out/err"
	# shellcheck disable=SC2086
	refuse 1 "at least 4096 more are needed in .*$option" $long "$@" "$option" $((bytes - 4096))
}

head -c 600 "$KVT_SOURCE/README.md" >"$dir/long"
"$kvtier" run --model "$KVT_SOURCE/tests/data/kvt-demo" --prompt-file "$dir/long" --max-tokens 4 --untiered --logits "$out/long" \
	>"$out/text" 2>"$out/err" || { echo "the long prompt: $(cat "$out/err")"; failed=1; }
rm -f "$out/err"
room --pinned-bytes 163840 --disk-bytes 0
# shellcheck disable=SC2086
refuse 1 'at least [0-9]+ more are needed in --disk-bytes' $long --ram-bytes 2M --disk-bytes 400K
room --pinned-bytes 163840 --disk-bytes 0 --gpu-bytes 1M --backend cpu

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
works '' --no-fast-load
works '' --top-k 5 --seed 7 --progress never
works '' --temperature 0.7 --top-k 1 --repetition-penalty 1
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
# shellcheck disable=SC2086
"$kvtier" run $good --prompt a --logits "$out/none" >/dev/full 2>"$out/err"
code=$?
if [ $code != 1 ] || [ -e "$out/none" ] ||
	[ "$(grep -v note "$out/err")" != 'kvtier run: standard output could not be written: No space left on device' ]; then
	echo "a full standard output: exit code $code, $(cat "$out/err")"
	failed=1
fi

# ---- sampling ----
# sampled OPTIONS...: the text of 40 tokens
sampled() {
	"$kvtier" run --model "$dir/good" --prompt abc --max-tokens 40 --temperature 1.5 --block-bytes 60K "$@" | od -An -tx1
}
if [ "$(sampled --seed 1)" != "$(sampled --seed 1 --untiered --threads 1 --prefill-chunk 1)" ]; then
	echo "the same seed gives other text"
	failed=1
fi
# where all tokens are as likely, each place draws its own
if [ "$(sampled --seed 1 --temperature 1e6 | tr -s ' ' '\n' | sort -u | wc -l)" -lt 10 ]; then
	echo "draws repeat: $(sampled --seed 1 --temperature 1e6)"
	failed=1
fi
[ "$(sampled --seed 1)" != "$(sampled --seed 2)" ] || { echo "another seed gives the same text"; failed=1; }
for option in '--top-k 2' '--top-p 0.3' '--min-p 0.6' '--top-n-sigma 0.5' '--repetition-penalty 3' '--presence-penalty 9' \
	'--frequency-penalty 9' '--logit-bias 65=50'; do
	# shellcheck disable=SC2086
	[ "$(sampled --seed 1 $option)" != "$(sampled --seed 1)" ] || { echo "$option changes nothing"; failed=1; }
done
[ "$("$kvtier" run --model "$dir/good" --prompt abc --max-tokens 3 --block-bytes 60K --logit-bias 65=1e30)" = AAA ] ||
	{ echo "--logit-bias does not choose"; failed=1; }

rm -rf "$dir"
exit $failed
