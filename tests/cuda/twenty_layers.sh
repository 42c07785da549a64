#!/usr/bin/env bash
# The 20-layer model of Megatron-LM's examples/mimo/scripts/run_hetero_nemotron_20l_mock_train.sh with its sizes, bf16, on
# the GPUs that are there. Prints the plan from rates that it measures first, every step and the trace's summary.
#
#   bash tests/cuda/twenty_layers.sh MIMO FOLDER LAYOUT [STEPS]
#
# LAYOUT: tp2+tp2ep2 (four GPUs, as Megatron-LM was run for the reference), language (its language model alone on two
# GPUs), or 1+1 (two GPUs; 64 of 128 experts, which is what one GPU holds).
set -eu
mimo=$1 folder=$2 layout=$3 steps=${4:-12}
experts=128 traced=$((steps - 1))
vision=(--image-token-id 511 --dynamic-resolution --pixel-shuffle --disable-vision-class-token --encoder-ddp-overlap)
case $layout in
tp2+tp2ep2) grids=("${vision[@]}" --encoder-tp 2 --encoder-dp 1 --llm-offset 2 --llm-tp 2 --llm-ep 2) ;;
language) grids=(--llm-only --llm-tp 2 --llm-ep 2) ;;
1+1) grids=("${vision[@]}" --encoder-tp 1 --encoder-dp 1 --llm-offset 1 --llm-tp 1 --llm-ep 1) experts=64 ;;
*) echo "twenty_layers.sh: no layout $layout; there are tp2+tp2ep2, language and 1+1." >&2 && exit 2 ;;
esac
arguments=(
	--model-provider nemotron-moe-vlm --dataset-provider mock
	--num-layers 20 --hybrid-layer-pattern 'MEMEM*EMEMEM*EMEMEM*' --hidden-size 2688 --num-attention-heads 32
	--group-query-attention --num-query-groups 8 --ffn-hidden-size 1856 --kv-channels 128 --squared-relu
	--disable-bias-linear --normalization RMSNorm --init-method-std 0.0173
	--num-experts "$experts" --moe-router-topk 6 --moe-grouped-gemm --moe-ffn-hidden-size 1856
	--moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.5 --moe-router-enable-expert-bias
	--moe-router-dtype fp32 --moe-router-load-balancing-type seq_aux_loss --moe-router-fusion --moe-aux-loss-coeff 1e-4
	--moe-shared-expert-intermediate-size 3712 --moe-shared-expert-overlap --moe-token-dispatcher-type alltoall
	--moe-permute-fusion --use-fused-weighted-squared-relu
	--mamba-num-heads 64 --mamba-head-dim 64 --mamba-num-groups 8 --mamba-state-dim 128 --linear-conv-kernel-dim 4
	--position-embedding-type none --attention-backend fused --calculate-per-token-loss --cross-entropy-loss-fusion
	--seq-length 8192 --max-position-embeddings 8192 --bf16
	--llm-cp 1 --llm-pp 1 --llm-dp 1 --llm-expt-tp 1 "${grids[@]}"
	--vocab-size 131072 --micro-batch-size 1 --global-batch-size 4
	--lr 2e-4 --min-lr 2e-6 --lr-decay-style cosine --lr-warmup-iters 0 --lr-decay-iters 10 --weight-decay 0.05
	--override-opt-param-scheduler --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
	--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
	--eval-interval 1000 --eval-iters 0 --log-interval 1 --rerun-mode disabled
	--train-iters "$steps"
)
mkdir -p "$folder"
"$mimo" plan --device cuda --measure "${arguments[@]}" | sed -n '/Memory of a rank/,/^$/p;/Seconds of a step/,$p'
began=$(date +%s.%N)
"$mimo" train "${arguments[@]}" --device cuda --log-json "$folder/log.jsonl" --profile-step-start "$traced" \
	--profile-step-end "$traced" --profile-file "$folder/trace.json"
"$mimo" trace summary "$folder/trace.json"
python3 - "$folder/log.jsonl" "$began" <<'PYTHON'
import datetime, json, statistics, sys

lines = [json.loads(line) for line in open(sys.argv[1])]
steps = [line for line in lines if "elapsed_ms" in line]
plain = [step["elapsed_ms"] for step in steps[2:-2]]
print(f"first step's line {steps[0]['time']}, started {datetime.datetime.fromtimestamp(float(sys.argv[2])).isoformat()}")
print(f"losses {[round(step['lm loss'], 5) for step in steps]}")
print(f"grad norms {[round(step['grad_norm'], 3) for step in steps]}")
print(f"ms of a step: median {statistics.median(plain):.1f}, least {min(plain):.1f} of {len(plain)}")
print(f"memory {json.dumps(steps[-1]['memory'])}")
for module in steps[-3]["modules"]:
    print(json.dumps(module))
PYTHON
