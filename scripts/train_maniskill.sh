#!/usr/bin/env bash
# From a fresh clone to a trained policy in ManiSkill with one command: installs what is missing, then trains.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
recipe="maniskill_pushcube_ppo"

if wants_help "$@"; then
    cat <<HELP
usage: bash scripts/train_maniskill.sh [RECIPE] [key=value…] [option…]

Installs what is missing (scripts/setup.sh), then runs: embodied-rl train RECIPE key=value… option…
RECIPE is the name of a file in embodied_rl/recipes or a path to a YAML file; the default is $recipe.
Where there is a recipe X_sft beside X_ppo or X_grpo, it is run first, on demonstrations of a scripted expert, and the
training starts from what it has learned (runs/X_sft/pretrained, which is kept).

  bash scripts/train_maniskill.sh                              a push task from state, on any machine
  bash scripts/train_maniskill.sh maniskill_openvla_tiny_ppo   a tiny OpenVLA: demonstrations, fine-tuning, then PPO
  bash scripts/train_maniskill.sh seed=2                       the same with one setting changed
  bash scripts/train_maniskill.sh --resume                     go on from the last checkpoint
  bash scripts/train_maniskill.sh --dry-run                    check the recipe, show the plan, start nothing
HELP
    exit 0
fi

take_recipe "$@"
case "$recipe" in
    *openvla*) bash "$here/setup.sh" --extras maniskill,vla,dev ;;
    *) bash "$here/setup.sh" ;;
esac
train_from_warm_start "$recipe" "${arguments[@]}"
