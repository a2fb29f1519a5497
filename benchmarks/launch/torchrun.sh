#!/usr/bin/env bash
# One rank a GPU of this node (or NPROC ranks): benchmarks/launch/torchrun.sh --preset qwen3-30b-a3b
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
NPROC=${NPROC:-$("$PYTHON" -c 'import torch; print(max(1, torch.cuda.device_count()))')}
exec "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$NPROC" -m benchmarks run "$@"
