#!/usr/bin/env bash
# Plans a run from rates that it measures first, trains it and prints every step and the summary of a traced step.
#
#   bash tests/cuda/measure_run.sh MIMO FOLDER STEPS FLAG…
#
# The flags are those of mimo train.
set -eu
mimo=$1 folder=$2 steps=$3
arguments=("${@:4}")
traced=$((steps - 1))
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
