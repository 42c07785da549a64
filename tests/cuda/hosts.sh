#!/usr/bin/env bash
# Two hosts, played by one with four GPUs (or two): ranks say with NCCL's variable which host they are on, so that they
# share no memory, meet over TCP and send through NCCL's sockets. A line a proof; exit code 1 if one fails.
#
#   bash tests/cuda/hosts.sh MIMO
set -u
mimo=$1
gpus=$(nvidia-smi --list-gpus | wc -l)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-lo} MASTER_ADDR=127.0.0.1 MIMO_SECRET=proof
port=23000
pids=()

# start ASSIGNMENT NAME COMMAND...: a rank for each letter of ASSIGNMENT, which is its host, on the GPU of its number.
start() {
	local assignment=$1 name=$2 rank local letter
	shift 2
	port=$((port + 10)) pids=()
	for rank in $(seq 0 $((${#assignment} - 1))); do
		letter=${assignment:rank:1}
		local=$(tr -cd "$letter" <<<"${assignment:0:rank}" | wc -c)
		RANK=$rank WORLD_SIZE=${#assignment} LOCAL_RANK=$local LOCAL_WORLD_SIZE=$(tr -cd "$letter" <<<"$assignment" | wc -c) \
			MASTER_PORT=$port NCCL_HOSTID=$letter CUDA_VISIBLE_DEVICES=$rank \
			timeout 200 "$@" >"$work/$name.$rank" 2>&1 &
		pids+=($!)
	done
}

# end: waits for all; `codes` are their exit codes.
end() {
	local pid
	codes=""
	for pid in "${pids[@]}"; do
		wait "$pid"
		codes+="$? "
	done
}

report() { # NAME OK TEXT
	if [ "$2" = yes ]; then echo "ok    $1: $3"; else
		failed=1
		echo "FAILED $1: $3"
		for file in "$work/$1".[0-9]; do tail -n 5 "$file" | cut -c1-300 | sed "s/^/  ${file##*/}: /"; done
	fi
}

# The losses of each step in a log, with all their digits.
losses() { sed -n 's/.*"iteration":\([0-9]*\).*"lm loss":\([^,}]*\).*/\1 \2/p' "$1"; }

# same NAME ASSIGNMENT FLAGS...: the tiny preset over two hosts has the losses, to the last digit, of the same ranks on one.
same() {
	local name=$1 assignment=$2 steps=(--train-iters 6 --lr-warmup-iters 0)
	shift 2
	timeout 100 "$mimo" train --preset nemotron-vlm-tiny --device cuda "${steps[@]}" "$@" --log-json "$work/$name.one.jsonl" \
		>"$work/$name.9" 2>&1
	start "$assignment" "$name" "$mimo" train --preset nemotron-vlm-tiny --device cuda "${steps[@]}" "$@" \
		--log-json "$work/$name.jsonl"
	end
	if [ -z "${codes//[0 ]/}" ] && [ "$(losses "$work/$name.jsonl" | wc -l)" = 6 ] &&
		diff <(losses "$work/$name.one.jsonl") <(losses "$work/$name.jsonl") >"$work/$name.8"; then
		report "$name" yes "hosts $assignment, 6 losses equal to those on one host, the last $(losses "$work/$name.jsonl" | tail -n 1)"
	else report "$name" no "hosts $assignment, exit codes $codes"; fi
}

same grids-apart ab --llm-offset 1
if [ "$gpus" -ge 4 ]; then
	same tensor-parallel aabb --encoder-tp 2 --llm-offset 2 --llm-tp 2 --llm-ep 2
	same tensor-parallel-across abab --encoder-tp 2 --llm-offset 2 --llm-tp 2 --llm-ep 2
	same data-parallel-across abab --encoder-dp 2 --llm-offset 2 --llm-dp 2 --llm-ep 2 --use-distributed-optimizer
fi

# fails NAME ASSIGNMENT VICTIM SIGNAL WORDS: a rank of a long run gets a signal; the others end within ten seconds, with its name.
fails() {
	local name=$1 assignment=$2 victim=$3 signal=$4 words=$5 flags=() began process rank
	if [ ${#assignment} -eq 2 ]; then flags=(--llm-offset 1); else flags=(--encoder-tp 2 --llm-offset 2 --llm-tp 2 --llm-ep 2); fi
	start "$assignment" "$name" "$mimo" train --preset nemotron-vlm-tiny --device cuda --train-iters 100000 --lr-decay-iters 100000 \
		"${flags[@]}"
	for _ in $(seq 400); do grep -qs "iteration *10/" "$work/$name.$((${#assignment} - 1))" && break || sleep 0.1; done
	process=$(pgrep -P "${pids[victim]}")
	began=$(date +%s%N)
	kill "-$signal" "$process"
	for rank in $(seq 0 $((${#assignment} - 1))); do [ "$rank" = "$victim" ] || wait "${pids[rank]}"; done
	began=$((($(date +%s%N) - began) / 1000000))
	kill -9 "$process" 2>/dev/null
	wait 2>/dev/null
	if [ "$began" -lt 10000 ] && grep -hq "^mimo: rank $victim .*$words" "$work/$name".*; then
		report "$name" yes "all ended after $began ms: $(grep -h "^mimo: rank $victim" "$work/$name".* | head -n 1)"
		grep -h "^  rank" "$work/$name".* | head -n 3
	else report "$name" no "ended after $began ms"; fi
}

# A rank of the same host sees the signal, a rank of another host the closed connection; the first to see it names the death.
death="\(its process has ended\|it was killed by SIGKILL\)"
if [ "$gpus" -ge 4 ]; then
	fails killed aabb 3 KILL "$death"
	fails killed-first aabb 2 KILL "$death"
	fails killed-root aabb 0 KILL "$death"
	fails stopped aabb 3 STOP "\(it was stopped\|silent for 5 s\)"
else
	fails killed ab 1 KILL "$death"
	fails killed-root ab 0 KILL "$death"
fi

if [ "$gpus" -ge 4 ]; then hosts=abcd; else hosts=ab; fi
start $hosts doctor "$mimo" doctor
end
line=$(grep "NCCL links" "$work/doctor.0")
if grep -q "pairs\? of nodes over NCCL" <<<"$line"; then report doctor yes "$line"; else report doctor no "exit codes $codes"; fi

exit $failed
