#!/usr/bin/env bash
# Trains a model in bf16 and with experts, or experts and projections, in e4m3 on the same real text from the same weights, and in bf16 and e4m3 again
# with the batches cut into other microbatches: runs that are equally right, whose differences say how much of that of e4m3
# is rounding of any kind. Prints tests/bench/compare_losses.py's tables; logs stay in FOLDER.
#
#   bash tests/cuda/e4m3_loss.sh MIMO FOLDER MODEL [STEPS [FLAG…]]
#
# MODEL: tiny (on processors; about half a minute a run of 200 steps on two cores), small (twice as wide, on a Hopper GPU, where runs
# of SEEDS, default 1234, train side by side), or language1 (the 20-layer language model with 32
# experts, on one Hopper GPU). RUNS in the environment chooses among bf16, bf16-cut, bf16-apart (the experts' operations
# one after the other), fp32 (tiny alone), e4m3, e4m3-cut, e4m3-wgrad (weight gradients too) and e4m3-all (and projections); the first
# is what others stand beside.
set -eu
mimo=$1 folder=$2 model=$3 steps=${4:-200}
here=$(cd "$(dirname "$0")" && pwd)
text=$here/../../examples/text/king-james.txt
rounded=(--fp8-format e4m3 --fp8-recipe blockwise)
case $model in
tiny)
	arguments=(--preset nemotron-tiny --bf16 --device cpu --train-iters "$steps" "${@:5}")
	# Of eight samples: two microbatches, otherwise four.
	cut=(--micro-batch-size 2)
	;;
small)
	arguments=(--preset nemotron-tiny --hidden-size 256 --kv-channels 64 --ffn-hidden-size 512 --moe-ffn-hidden-size 256
		--moe-shared-expert-intermediate-size 256 --mamba-num-heads 16 --seq-length 512 --bf16 --device cuda
		--train-iters "$steps" "${@:5}")
	cut=(--micro-batch-size 2)
	;;
language1)
	# shellcheck source-path=SCRIPTDIR source=twenty_layers_flags.sh
	source "$here/twenty_layers_flags.sh"
	# Upstream's schedule ends after ten steps, and long sequences are costly: 8192 tokens a step in four samples.
	twenty_layers language1 "$steps" --dataset-provider text --seq-length 2048 --global-batch-size 4 \
		--lr 1e-4 --min-lr 1e-5 --lr-warmup-iters 20 --lr-decay-iters "$steps" --device cuda "${@:5}"
	cut=(--micro-batch-size 2)
	;;
*)
	echo "$0: no model $model; there are tiny, small and language1." >&2
	exit 2
	;;
esac
[[ " ${arguments[*]} " != *" --device cpu "* ]] || rounded+=(--fp8-emulate)
quarter=$((steps / 4))
arguments+=(--data-path "$text" --split "95,5,0" --eval-interval "$quarter" --eval-iters 4 --log-interval "$quarter")

# train_all SEED: every run from that seed, and how they differ.
train_all() {
	local seed=$1 logs=() own run
	for run in ${RUNS:-bf16 bf16-cut e4m3 e4m3-cut}; do
		case $run in
		bf16) own=() ;;
		bf16-cut) own=("${cut[@]}") ;;
		bf16-apart) own=(--moe-fused-mlp off) ;;
		fp32) own=(--no-bf16) ;;
		e4m3) own=("${rounded[@]}") ;;
		e4m3-cut) own=("${rounded[@]}" "${cut[@]}") ;;
		e4m3-wgrad) own=("${rounded[@]}" --fp8-wgrad) ;;
		e4m3-all) own=("${rounded[@]}" --fp8-wgrad --fp8-modules experts projections) ;;
		*)
			echo "$0: no run $run; there are bf16, bf16-cut, bf16-apart, fp32, e4m3, e4m3-cut, e4m3-wgrad and e4m3-all." >&2
			exit 2
			;;
		esac
		mkdir -p "$folder/$seed/$run"
		rm -f "$folder/$seed/$run/log.jsonl"
		echo "== seed $seed, $run"
		"$mimo" train "${arguments[@]}" ${own[@]+"${own[@]}"} --seed "$seed" --log-json "$folder/$seed/$run/log.jsonl"
		logs+=("$run=$folder/$seed/$run/log.jsonl")
	done
	python3 "$here/../bench/compare_losses.py" "${logs[@]}"
}

jobs=()
for seed in ${SEEDS:-1234}; do
	if [ "$model" = small ]; then
		mkdir -p "$folder/$seed"
		train_all "$seed" >"$folder/$seed/out.txt" 2>&1 &
		jobs+=($!)
	else
		train_all "$seed"
	fi
done
status=0
for job in ${jobs[@]+"${jobs[@]}"}; do wait "$job" || status=1; done
if [ "$model" = small ]; then
	for seed in ${SEEDS:-1234}; do cat "$folder/$seed/out.txt"; done
fi
exit $status
