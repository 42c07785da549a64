#!/usr/bin/env bash
# The language model of Nemotron-3-Nano-30B-A3B on one GPU with the experts that expert parallelism of 8 would leave it: 16 of
# 128, every one with as many rows (forced balance), 8192 tokens a microbatch. On two GPUs with expert parallelism 32 of 128.
# Adam's moments in bf16, as the optimizer's shards of a larger run would leave that memory free.
#
#   bash tests/cuda/nano_30b.sh MIMO FOLDER GPUS [STEPS [FLAG…]]
set -eu
mimo=$1 folder=$2 gpus=$3 steps=${4:-10}
arguments=(
	--preset nemotron-nano-30b-a3b --model-provider nemotron-moe-vlm --dataset-provider mock --llm-only --llm-dp "$gpus" --llm-ep "$gpus" --num-experts $((16 * gpus))
	--seq-length 8192 --micro-batch-size 1 --global-batch-size $((4 * gpus)) --bf16
	--moe-router-force-load-balancing --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16
	--train-iters "$steps" --eval-interval 1000 --log-interval 1 --log-throughput "${@:5}"
)
bash "$(dirname "$0")/measure_run.sh" "$mimo" "$folder" "$steps" "${arguments[@]}"
