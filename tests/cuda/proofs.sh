#!/usr/bin/env bash
# What must hold on GPUs and no processor can show: reference folders in fp32 and bf16, layouts, resuming on the other
# kind of device. A line a proof; exit code 1 if one fails.
#
#   bash tests/cuda/proofs.sh MIMO REFERENCES [NAME ...]     NAME: a folder, "verify", "shared", "kill", "resume",
#                                                            "stop", "features", "gradients" or "graphs"; default all
#
# MIMO: the executable. Layouts through NCCL run where there are two GPUs; those of more ranks share the GPUs that are there.
set -u
mimo=(timeout 240 "$1") references=$2
shift 2
wanted=("$@")
gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0

is_wanted() { [ ${#wanted[@]} -eq 0 ] || [[ " ${wanted[*]} " == *" $1 "* ]]; }

# prove NAME COMMAND...: its last line, or all it said where it fails.
prove() {
	local name=$1 began=$SECONDS
	shift
	if "$@" >"$work/out" 2>&1; then
		echo "ok    $name ($((SECONDS - began)) s): $(tail -n 1 "$work/out")"
	else
		failed=1
		echo "FAILED $name ($((SECONDS - began)) s)"
		tail -n 30 "$work/out"
	fi
}

for folder in "$references"/layer-* "$references"/hybrid-*; do
	name=$(basename "$folder")
	is_wanted "$name" && [ -d "$folder" ] || continue
	prove "$name" "${mimo[@]}" parity --device cuda --golden "$folder"
	case $name in hybrid-*) prove "$name bf16" "${mimo[@]}" parity --device cuda --bf16 --golden "$folder" ;; esac
done

for folder in "$references"/mimo-*; do
	name=$(basename "$folder")
	is_wanted "$name" && [ -d "$folder" ] || continue
	# A corrected folder's factor counts two encoder ranks: it runs on layouts that have them.
	case $name in
	*-corrected | *-corrected-small)
		prove "$name on its own layout, GPUs shared, bf16" "${mimo[@]}" parity --device cuda --bf16 \
			--distributed-backend shm --golden "$folder"
		;;
	*)
		prove "$name in one process" "${mimo[@]}" parity --device cuda --layout 1 --golden "$folder"
		prove "$name in one process, bf16" "${mimo[@]}" parity --device cuda --layout 1 --bf16 --golden "$folder"
		if [ "$gpus" -ge 2 ]; then
			prove "$name on 1+1" "${mimo[@]}" parity --device cuda --layout 1+1 --golden "$folder"
		fi
		;;
	esac
	prove "$name on its own layout, GPUs shared" "${mimo[@]}" parity --device cuda --distributed-backend shm --golden "$folder"
done

if is_wanted verify && [ "$gpus" -ge 2 ]; then
	prove "verify 1+1" "${mimo[@]}" verify --preset nemotron-vlm-tiny --device cuda --layouts 1+1
fi

if is_wanted shared; then
	layouts=1+1,tp2+tp2ep2,dp2+dp2ep2,4+4,tp2dp2+tp2dp2ep2,1+tp2,2+4,4+2
	prove "verify $layouts, GPUs shared" "${mimo[@]}" verify --preset nemotron-vlm-tiny --device cuda \
		--distributed-backend shm --layouts "$layouts"
fi

# Four ranks of a long run; rank 2 is killed after some steps. All end, with its name, within ten seconds.
killed() {
	local log=$work/killed began rank
	"${mimo[@]}" train --preset nemotron-vlm-tiny --device cuda --distributed-backend shm --llm-only --llm-dp 4 \
		--train-iters 100000 --lr-decay-iters 100000 >"$log" 2>&1 &
	for _ in $(seq 600); do grep -q "iteration *20/" "$log" && break || sleep 0.1; done
	rank=$(sed -n 's/^rank 2: pid \([0-9]*\).*/\1/p' "$log")
	began=$(date +%s%N)
	kill -9 "$rank" || return 1
	wait $! && return 1
	began=$((($(date +%s%N) - began) / 1000000))
	grep "^mimo: rank 2 .* was killed by SIGKILL" "$log" && [ "$began" -lt 10000 ] && echo "all ended after $began ms"
}

if is_wanted kill; then prove "a rank of four is killed" killed; fi

# trained DEVICE LOG FLAGS...: the tiny preset for so many steps. At the preset's learning rate without its warm-up AVX2 and
# AVX-512 already differ by 2e-5 after ten steps, at a tenth of it by 1e-7.
steps=10
trained() {
	local device=$1 log=$2
	shift 2
	[ "$device" != cuda ] || [ "$gpus" -ge 2 ] || set -- --distributed-backend shm "$@"
	"${mimo[@]}" train --preset nemotron-vlm-tiny --device "$device" --train-iters "$steps" --lr-warmup-iters 0 --lr 3e-4 --min-lr 3e-5 \
		--log-json "$log" "$@"
}

# losses_agree FOLDER LOG OTHER: in all steps that OTHER has, which are the last ones.
losses_agree() {
	python3 - "$@" "$steps" <<'PYTHON'
import json, sys

def losses(name):
    lines = map(json.loads, open(f"{sys.argv[1]}/{name}.jsonl"))
    return {line["iteration"]: line["lm loss"] for line in lines if "lm loss" in line}

one, other = losses(sys.argv[2]), losses(sys.argv[3])
steps = sorted(other)
last = int(sys.argv[4])
assert steps and steps == list(range(steps[0], last + 1)) and set(steps) <= set(one), f"steps {sorted(one)} and {steps}"
worst = max(abs(other[step] / one[step] - 1) for step in steps)
print(f"losses of steps {steps[0]} to {last} differ by {worst:.1e} at most")
sys.exit(worst > 1e-5)
PYTHON
}

# The second half of a run whose first half another kind of device did, beside the whole run.
resumed() {
	local first=$1 second=$2 folder=$work/$1-$2
	mkdir "$folder" &&
		trained "$first" "$folder/whole.jsonl" &&
		trained "$first" "$folder/half.jsonl" --save "$folder/checkpoint" --save-interval 5 --exit-interval 5 &&
		trained "$second" "$folder/rest.jsonl" --load "$folder/checkpoint" &&
		losses_agree "$folder" whole rest
}

# A run that a signal stops, with checkpoints written beside its steps; submitted again, it goes on.
stopped() {
	local steps=60 folder=$work/stopped shm=(--distributed-backend shm)
	local saves=(--save "$folder/checkpoint" --load "$folder/checkpoint" --save-interval 1 --async-save --exit-signal-handler)
	mkdir "$folder" && trained cuda "$folder/whole.jsonl" "${shm[@]}" || return 1
	trained cuda "$folder/first.jsonl" "${shm[@]}" "${saves[@]}" >"$folder/first" 2>&1 &
	local run=$!
	for _ in $(seq 600); do grep -q "checkpoint of step 2 " "$folder/first" && break || sleep 0.02; done
	pkill -TERM -P "$run" timeout
	wait "$run"
	[ $? -eq 75 ] || { cat "$folder/first" && return 1; }
	trained cuda "$folder/rest.jsonl" "${shm[@]}" "${saves[@]}" && losses_agree "$folder" whole rest
}

# alike NAME FLAG...: training on the processor and on GPUs, which ranks share, with the same losses.
alike() {
	local folder=$work/alike-$1
	shift
	mkdir "$folder" && trained cpu "$folder/cpu.jsonl" "$@" &&
		trained cuda "$folder/cuda.jsonl" "$@" --distributed-backend shm && losses_agree "$folder" cpu cuda
}

if is_wanted resume; then
	prove "a run of the CPU goes on on the GPU" resumed cpu cuda
	prove "a run of the GPU goes on on the CPU" resumed cuda cpu
fi

if is_wanted stop; then prove "a run that a signal stopped goes on" stopped; fi

if is_wanted features; then
	prove "recomputation" alike recompute --recompute-granularity full
	prove "a frozen encoder, ahead of the language model" alike ahead --freeze-vit --mimo-encoder-prefetch
	prove "a frozen language model" alike frozen --freeze-lm --seed 4321
	prove "buckets reduced in backward, ZeRO-1" alike buckets --encoder-dp 2 --llm-dp 2 --overlap-grad-reduce \
		--encoder-ddp-overlap --ddp-num-buckets 3 --use-distributed-optimizer
fi

# gradients LAYOUT FLAG...: what verify compares of ranks that share GPUs, beside one process on the processor.
gradients() {
	local layout=$1 folder
	shift
	folder=$(mktemp -d -p "$work")
	"${mimo[@]}" verify --preset nemotron-tiny "$@" --device cpu --layouts 1 --reference "$folder" &&
		"${mimo[@]}" verify --preset nemotron-tiny "$@" --device cuda --distributed-backend shm --layouts "$layout" --reference "$folder"
}

if is_wanted gradients; then
	pattern=(--hybrid-layer-pattern 'M*E-')
	prove "gradients: all layers" gradients tp2ep2 "${pattern[@]}"
	prove "gradients: adapters" gradients tp2 "${pattern[@]}" --lora-rank 4 \
		--lora-target-modules linear_qkv linear_proj linear_fc1 linear_fc2 in_proj
	prove "gradients: adapters of experts" gradients dp2ep2 "${pattern[@]}" --lora-rank 4 \
		--lora-target-modules experts.linear_fc1 experts.linear_fc2
	prove "gradients: layers with sizes of their own" gradients dp2 --hybrid-layer-pattern 'M*EM*E' --mamba-num-heads-per-layer 8 4
	prove "gradients: MTP depths on two stages" gradients pp2 --hybrid-layer-pattern 'M*|E-/ME/ME' --mtp-num-layers 2
	prove "gradients: gated experts with biases and clamps" gradients tp2ep2 "${pattern[@]}" --no-squared-relu --swiglu --add-bias-linear \
		--moe-shared-expert-intermediate-size 0 --activation-func-clamp-value 7
	prove "gradients: quick GeGLU" gradients dp2ep2 "${pattern[@]}" --no-squared-relu --quick-geglu --activation-func-clamp-value 7 --glu-linear-offset 1
	prove "gradients: selective recomputation" gradients dp2 "${pattern[@]}" --recompute-granularity selective \
		--recompute-modules layernorm moe_act shared_experts core_attn
	prove "gradients: late weight gradients" gradients pp2 --hybrid-layer-pattern 'M*|E-' --delay-wgrad-compute
	prove "gradients: four stages of two segments" gradients pp4 --hybrid-layer-pattern 'M|*|E|-|M|*|E|-'
	prove "gradients: four tensor-parallel ranks" gradients tp4 "${pattern[@]}" --num-query-groups 4 --mamba-num-groups 4
	prove "gradients: rows once to a node" gradients dp4ep4 "${pattern[@]}" --moe-token-dispatcher-type flex
	prove "gradients: rows gathered" gradients dp4ep4 "${pattern[@]}" --moe-token-dispatcher-type allgather
	prove "gradients: a frozen teacher" gradients tp2 "${pattern[@]}" --export-kd-teacher-load teacher --export-kd-temperature 2 \
		--export-kd-alpha 0.7
fi

# with_graphs NAME FLAG...: training with CUDA graphs, with the losses of training without them.
with_graphs() {
	local folder=$work/graphs-$1
	shift
	mkdir "$folder" && trained cuda "$folder/plain.jsonl" "$@" --deterministic-mode &&
		trained cuda "$folder/graphs.jsonl" "$@" --deterministic-mode --cuda-graph-impl local && losses_agree "$folder" plain graphs
}

if is_wanted graphs; then
	graphs=(--cuda-graph-impl local)
	prove "operations in graphs: text in bf16" with_graphs text --bf16 --llm-only
	prove "operations in graphs: pictures in bf16" with_graphs pictures --bf16 --llm-offset 0
	prove "operations in graphs: verify, GPUs shared" "${mimo[@]}" verify --preset nemotron-vlm-tiny --device cuda "${graphs[@]}" \
		--distributed-backend shm --layouts 1+1,tp2+tp2ep2,dp2+dp2ep2
	for folder in "$references"/hybrid-tiny "$references"/mimo-1x1-fixed; do
		[ -d "$folder" ] || continue
		name=$(basename "$folder") layout=()
		case $name in mimo-*) layout=(--layout 1) ;; esac
		prove "operations in graphs: $name" "${mimo[@]}" parity --device cuda "${graphs[@]}" "${layout[@]}" --golden "$folder"
		prove "operations in graphs: $name bf16" "${mimo[@]}" parity --device cuda --bf16 "${graphs[@]}" "${layout[@]}" --golden "$folder"
	done
fi
exit $failed
