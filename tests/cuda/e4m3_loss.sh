#!/usr/bin/env bash
# Trains a model in bf16 and with experts in e4m3 on the same real text from the same weights, and in bf16 and e4m3 again
# with the batches cut into other microbatches: runs that are equally right, whose differences say how much of that of e4m3
# is rounding of any kind. Prints tests/bench/compare_losses.py's tables; logs stay in FOLDER.
#
#   bash tests/cuda/e4m3_loss.sh MIMO FOLDER MODEL [STEPS [FLAG…]]
#
# MODEL: tiny (on processors; about half a minute a run of 200 steps on two cores), or language1 (the 20-layer language model with 32
# experts, on one Hopper GPU). RUNS in the environment chooses among bf16, bf16-cut, bf16-apart (the experts' operations
# one after the other), fp32 (tiny alone), e4m3, e4m3-cut and e4m3-wgrad (weight gradients too); the first is what others stand
# beside.
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
language1)
	# shellcheck source-path=SCRIPTDIR source=twenty_layers_flags.sh
	source "$here/twenty_layers_flags.sh"
	# Upstream's schedule ends after ten steps, and long sequences are costly: 8192 tokens a step in four samples.
	twenty_layers language1 "$steps" --dataset-provider text --seq-length 2048 --global-batch-size 4 \
		--lr 1e-4 --min-lr 1e-5 --lr-warmup-iters 20 --lr-decay-iters "$steps" --device cuda "${@:5}"
	cut=(--micro-batch-size 2)
	;;
*)
	echo "$0: no model $model; there are tiny and language1." >&2
	exit 2
	;;
esac
[[ " ${arguments[*]} " != *" --device cpu "* ]] || rounded+=(--fp8-emulate)
quarter=$((steps / 4))
arguments+=(--data-path "$text" --split "95,5,0" --eval-interval "$quarter" --eval-iters 4 --log-interval "$quarter")
logs=()
for run in ${RUNS:-bf16 bf16-cut e4m3 e4m3-cut}; do
	case $run in
	bf16) own=() ;;
	bf16-cut) own=("${cut[@]}") ;;
	bf16-apart) own=(--moe-fused-mlp off) ;;
	fp32) own=(--no-bf16) ;;
	e4m3) own=("${rounded[@]}") ;;
	e4m3-cut) own=("${rounded[@]}" "${cut[@]}") ;;
	e4m3-wgrad) own=("${rounded[@]}" --fp8-wgrad) ;;
	*)
		echo "$0: no run $run; there are bf16, bf16-cut, bf16-apart, fp32, e4m3, e4m3-cut and e4m3-wgrad." >&2
		exit 2
		;;
	esac
	mkdir -p "$folder/$run"
	rm -f "$folder/$run/log.jsonl"
	echo "== $run"
	"$mimo" train "${arguments[@]}" ${own[@]+"${own[@]}"} --log-json "$folder/$run/log.jsonl"
	logs+=("$run=$folder/$run/log.jsonl")
done
python3 "$here/../bench/compare_losses.py" "${logs[@]}"
