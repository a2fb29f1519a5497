#!/usr/bin/env bash
#SBATCH --job-name=packckpt-bench
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --gpus-per-node=2
#SBATCH --cpus-per-task=8
#SBATCH --mem=120G
#SBATCH --time=00:30:00
#SBATCH --signal=TERM@60
# sbatch benchmarks/launch/slurm.sh [arguments of `run`]. The TERM a minute before the end lets the run say that it was
# interrupted; `python -m benchmarks resume RUN` under srun goes on with it.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
# Not through head: under pipefail its early end would fail the script.
read -r MASTER_ADDR < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT
# Ranks find each other's checkpoints in the scratch folder: it must be one that all of them see.
SCRATCH=${SCRATCH:-$PWD/.bench-scratch-$SLURM_JOB_ID}
mkdir -p "$SCRATCH"
trap 'rm -rf "$SCRATCH"' EXIT
srun --kill-on-bad-exit=1 "${PYTHON:-python3}" -m benchmarks run --scratch "$SCRATCH" "$@"
