#!/usr/bin/env bash
# The Python package's own `energon info` and `energon lint` on what `mimo data prepare` writes, and its loaders against ours
# with random settings (MIMO_ENERGON_SEED=N: others). Installs the package (with PyTorch, some gigabytes) into build/tools,
# once; MIMO_ENERGON names an `energon` that is there already.
set -euo pipefail
cd "$(dirname "$0")/../.."
if [ -z "${MIMO_ENERGON:-}" ]; then
	venv=build/tools/energon-7.4.0
	if [ ! -f "$venv/complete" ]; then
		rm -rf "$venv"
		python3 -m venv "$venv"
		"$venv/bin/pip" install --quiet --disable-pip-version-check megatron-energon==7.4.0
		touch "$venv/complete"
	fi
	export MIMO_ENERGON=$PWD/$venv/bin/energon
fi
exec node_modules/.bin/bun test --timeout 1800000 ./tests/data/energon-tool.test.ts
