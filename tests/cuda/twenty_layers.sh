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
# shellcheck source-path=SCRIPTDIR source=twenty_layers_flags.sh
source "$(dirname "$0")/twenty_layers_flags.sh"
twenty_layers "$layout" "$steps" "${@:5}"
bash "$(dirname "$0")/measure_run.sh" "$mimo" "$folder" "$steps" "${arguments[@]}"
