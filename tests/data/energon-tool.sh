#!/usr/bin/env bash
# Runs megatron-energon's `energon info` and `energon lint` on data sets of `mimo data prepare`, and compares its loaders with
# mimo's on random settings (MIMO_ENERGON_SEED=N: other settings; MIMO_TEST_FULL=1: more). MIMO_ENERGON names an installed
# `energon`; without it the first run installs megatron-energon into build/energon.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ -n "${MIMO_ENERGON:-}" ] || bash tests/data/energon-install.sh
exec node_modules/.bin/bun test --timeout 1800000 ./tests/data/energon-tool.test.ts
