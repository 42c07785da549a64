#!/usr/bin/env bash
# What eight GPUs of one host show, through NCCL: layouts of eight ranks, the language model of Nemotron-3-Nano-30B-A3B whole (128
# experts, expert parallelism of 8) in bf16 and with e4m3 experts, with forced and with its own routing, and sequences of 131,072 and
# 1,048,576 tokens on eight context-parallel ranks. Every part prints its own lines; exit code 1 if a part fails. With PLAN=1 each run is
# planned for H200s instead, which needs no GPU but for e4m3.
#
#   bash tests/cuda/eight_gpus.sh MIMO FOLDER [PART ...]   PART: layouts, nano, routed, e4m3, context
set -u
mimo=$1 folder=$2
shift 2
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(layouts nano routed e4m3 context)
here=$(dirname "$0")
# shellcheck source=tests/cuda/parts.sh
source "$here/parts.sh"

steps=10
# measure FOLDER FLAG…
measure() {
	local to=$1
	shift
	local flags=(--preset nemotron-nano-30b-a3b --model-provider nemotron-moe-vlm --dataset-provider mock --llm-only --llm-ep 8 --bf16
		--use-distributed-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --micro-batch-size 1
		--train-iters $steps --eval-interval 1000 --log-interval 1 --log-throughput "$@")
	if [ -n "${PLAN:-}" ]; then
		run 300 "$mimo" plan --gpu h200 --memory-gib 139 "${flags[@]}"
	else
		run 400 bash "$here/measure_run.sh" "$mimo" "$folder/$to" $steps "${flags[@]}"
	fi
}
# Four microbatches of 8,192 tokens a rank. Without a bound every rank has room for the rows of all, 100 GiB of activations.
lanes=(--llm-dp 8 --seq-length 8192 --global-batch-size 32)

layouts() {
	local deep=(--num-query-groups 4 --mamba-num-groups 4 --num-layers 8 --hybrid-layer-pattern 'ME|M*|ME|M-|ME|M*|ME|M-')
	[ -z "${PLAN:-}" ] || return 0
	run 200 "$mimo" verify --preset nemotron-tiny --device cuda "${deep[@]}" \
		--layouts cp4dp2ep4,tp2cp2dp2ep4,cp2pp4,tp2dp4ep8,dp8ep8
	run 120 "$mimo" verify --preset nemotron-vlm-tiny --device cuda --layouts 'dp4+tp2cp2ep4,dp8|tp2dp4ep8'
}
nano() { measure nano "${lanes[@]}" --moe-router-force-load-balancing --moe-expert-capacity-bound 1.25; }
routed() { measure routed "${lanes[@]}" --moe-expert-capacity-bound 2; }
e4m3() { measure e4m3 "${lanes[@]}" --moe-router-force-load-balancing --moe-expert-capacity-bound 1.25 --fp8-format e4m3 --fp8-recipe blockwise; }
context() {
	local length
	for length in 131072 1048576; do
		measure "context-$length" --llm-cp 8 --seq-length $length --global-batch-size 1 --moe-router-force-load-balancing \
			--moe-expert-capacity-bound 1.1 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
	done
}

run_parts "${parts[@]}"
