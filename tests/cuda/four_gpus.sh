#!/usr/bin/env bash
# What four GPUs of one host show, through NCCL: references and layouts of four ranks in fp32 and bf16, played hosts, and the
# 20-layer model on disjoint and colocated grids. Every part prints its own lines; exit code 1 if a part fails.
#
#   bash tests/cuda/four_gpus.sh MIMO REFERENCES FOLDER [PART ...]   PART: layouts, references, hosts, disjoint, colocated
set -u
mimo=$1 references=$2 folder=$3
shift 3
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(layouts references hosts disjoint colocated)
here=$(dirname "$0")
# shellcheck source=tests/cuda/parts.sh
source "$here/parts.sh"

layouts() {
	local deep=(--num-query-groups 4 --mamba-num-groups 4 --num-layers 8 --hybrid-layer-pattern 'ME|M*|ME|M-|ME|M*|ME|M-')
	run 120 "$mimo" verify --preset nemotron-tiny --device cuda "${deep[@]}" --layouts tp4,tp4ep4,dp4ep4,tp2dp2ep2,tp2pp2,dp2pp2ep2,pp4
	run 90 "$mimo" verify --preset nemotron-vlm-tiny --device cuda \
		--layouts 'tp2+tp2ep2,dp2+dp2ep2,dp4|dp4ep4,tp2dp2|tp2dp2ep2,2+pp2,2+dp2ep2'
}

references() {
	local name
	for name in mimo-tp2-tp2ep2-dynamic-small mimo-dp2-dp2ep2-fixed-small mimo-participation-corrected-small; do
		run 60 "$mimo" parity --device cuda --golden "$references/$name"
		run 60 "$mimo" parity --device cuda --bf16 --golden "$references/$name"
	done
}

hosts() { run 200 bash "$here/hosts.sh" "$mimo"; }
# GPUs of 80 GB hold fewer experts; the products of a step stay the same, since a token goes to as many experts.
few=() fewer=()
memory=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits | head -n 1)
[ "$memory" -gt 100000 ] || few=(--num-experts 64) fewer=(--num-experts 16)
disjoint() { run 120 bash "$here/twenty_layers.sh" "$mimo" "$folder/disjoint" tp2+tp2ep2 12 "${few[@]}"; }
colocated() { run 120 bash "$here/twenty_layers.sh" "$mimo" "$folder/colocated" 'dp4|dp4ep4' 12 "${fewer[@]}"; }

run_parts "${parts[@]}"
