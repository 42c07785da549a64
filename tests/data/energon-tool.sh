#!/usr/bin/env bash
# The Python package's own `energon info` and `energon lint` on what `mimo data prepare` writes, and its loaders against ours
# with random settings (MIMO_ENERGON_SEED=N: others; MIMO_TEST_FULL=1: more). MIMO_ENERGON names an `energon` that is there
# already; otherwise one is installed into build/energon, once.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ -n "${MIMO_ENERGON:-}" ] || bash tests/data/energon-install.sh
exec node_modules/.bin/bun test --timeout 1800000 ./tests/data/energon-tool.test.ts
