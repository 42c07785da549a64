#!/usr/bin/env bash
# The 20-layer model of Megatron-LM's examples/mimo/scripts/run_hetero_nemotron_20l_mock_train.sh with its sizes, bf16, on
# the GPUs that are there. Prints the plan from rates that it measures first, every step and the trace's summary.
#
#   bash tests/cuda/twenty_layers.sh MIMO FOLDER LAYOUT [STEPS [FLAG…]]
#
# LAYOUT: tp2+tp2ep2 (four GPUs, as Megatron-LM was run for the reference), tp2dp2+tp2dp2ep2 (eight GPUs and twice the
# batch, as many microbatches a lane), language (its language model alone on two
# GPUs), dp2ep2 (the same without tensor parallelism, 64 experts), language1 (the same on one GPU, 32 experts), 1+1 (two GPUs; 64 of 128 experts, which is what one GPU holds), 1 (both modules on one GPU, 32 experts), or dp2|dp2ep2
# and dp4|dp4ep4 (both modules on all of two or four GPUs, 32 experts a GPU). Further flags are those of mimo train.
set -eu
mimo=$1 folder=$2 layout=$3 steps=${4:-12}
list=$(grep -v '^#' "$(dirname "$0")/../e2e/upstream-20l.txt" | tr '\n' ' ')
# with FLAG VALUE: another value than upstream's.
with() { list=$(sed -E "s/ --$1 [^ ]+/ --$1 $2/" <<<" $list"); }
# without FLAG...: what upstream's list has, and its value.
without() {
	local flag
	for flag; do list=$(sed -E "s/ --$flag( [^- ][^ ]*)?//" <<<" $list"); done
}
without tensor-parallel-num-weight-shards expert-tensor-parallel-num-weight-shards
with attention-backend fused
with global-batch-size 4
with eval-interval 1000
with train-iters "$steps"
with encoder-dp 1
case $layout in
tp2+tp2ep2) with llm-offset 2 ;;
tp2dp2+tp2dp2ep2)
	with global-batch-size 8
	for flag in encoder-dp llm-dp; do with "$flag" 2; done
	;;
language)
	without image-token-id dynamic-resolution pixel-shuffle disable-vision-class-token encoder-ddp-overlap
	without encoder-tp encoder-dp llm-offset
	list+=" --llm-only"
	;;
dp2ep2 | language1)
	gpus=2
	[ "$layout" = dp2ep2 ] || gpus=1
	without image-token-id dynamic-resolution pixel-shuffle disable-vision-class-token encoder-ddp-overlap
	without encoder-tp encoder-dp llm-offset
	with llm-tp 1
	with llm-dp "$gpus"
	with llm-ep "$gpus"
	with num-experts $((32 * gpus))
	list+=" --llm-only"
	;;
1+1)
	for flag in encoder-tp llm-offset llm-tp llm-ep; do with "$flag" 1; done
	with num-experts 64
	;;
1 | 'dp2|dp2ep2' | 'dp4|dp4ep4')
	gpus=1
	[ "$layout" = 1 ] || gpus=${layout:2:1}
	for flag in encoder-tp llm-tp; do with "$flag" 1; done
	for flag in encoder-dp llm-dp llm-ep; do with "$flag" "$gpus"; done
	with llm-offset 0
	with num-experts $((32 * gpus))
	;;
*)
	echo "twenty_layers.sh: no layout $layout; there are tp2+tp2ep2, tp2dp2+tp2dp2ep2, language, dp2ep2, language1, 1+1, 1, dp2|dp2ep2 and dp4|dp4ep4." >&2
	exit 2
	;;
esac
read -ra arguments <<<"$list"
arguments+=("${@:5}")
bash "$(dirname "$0")/measure_run.sh" "$mimo" "$folder" "$steps" "${arguments[@]}"
