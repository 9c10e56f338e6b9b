#!/usr/bin/env bash
# Checks what only a GPU machine can show. Prints each figure; ends with the first failure.
# Usage: bash scripts/gpu_check.sh [PYTHON]    (default: the project's .venv, made by scripts/setup.sh)
set -euo pipefail
cd "$(dirname "$0")/.."
if [[ "${1:-}" == "--help" ]]; then sed -n '2,3p' "$0" | sed 's/^# //'; exit 0; fi
python="${1:-.venv/bin/python}"
[[ -x "$(command -v "$python")" ]] || { bash scripts/setup.sh; }

echo "== devices"
nvidia-smi --query-gpu=name,memory.total --format=csv,noheader
"$python" -m embodied_rl.doctor || true

echo "== tests that need CUDA"
"$python" -m pytest -q -m gpu tests

echo "== PickCube on one GPU simulation of 512 envs, 20 iterations"
runs=$(mktemp -d)
"$python" -c "from embodied_rl.cli import main; main()" train maniskill_pickcube_ppo \
    run_root="$runs" train.iterations=20 evaluation.every=10 evaluation.videos=1 tracking.wandb=disabled
tail -n 1 "$runs"/*/metrics.jsonl | tr ',' '\n' | grep -E 'perf/|time/|success_once'
