#!/usr/bin/env bash
# The tests that need a GPU, then a run that fits 8 minutes on one H200 with 16 cores and 128 GiB. Installs nothing.
# Records are synced one by one, so that whatever ends it leaves what was measured. Arguments go to `run`.
#   PYTHON=python3   interpreter that has torch
#   BUDGET=6m        time for the run; the tests have the rest
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
BUDGET=${BUDGET:-6m}
export PYTHONUNBUFFERED=1

if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu-check: torch sees no GPU: not enough data" >&2
    exit 3
fi
"$PYTHON" -m benchmarks check || true  # doubts are recorded in the run, too

status=0
# By name: modules of other tests may import what is not installed here.
mapfile -t gpu_tests < <(grep -rl --include='test_*.py' 'mark\.gpu' tests)
if "$PYTHON" -c 'import pytest, pytest_timeout' 2>/dev/null; then
    timeout 120 "$PYTHON" -m pytest -q -m gpu "${gpu_tests[@]}" || status=$?
elif "$PYTHON" -c 'import pytest' 2>/dev/null; then
    # Without pytest-timeout its settings in pyproject.toml would be unknown.
    timeout 120 "$PYTHON" -m pytest -q -m gpu -c /dev/null --rootdir . -p no:cacheprovider "${gpu_tests[@]}" || status=$?
else
    echo "gpu-check: pytest is not installed; the tests marked gpu did not run" >&2
    status=3
fi

"$PYTHON" -m benchmarks run --device cuda --share-device --time-budget "$BUDGET" --repeats 5 \
    --case qwen3-30b-a3b/lora8/ep1/l2/bfloat16 \
    --case qwen3-30b-a3b/full/ep8/l1/bfloat16 \
    --preset sweep "$@" || { code=$?; [ "$status" -ne 0 ] || status=$code; }
exit "$status"
