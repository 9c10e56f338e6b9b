#!/usr/bin/env bash
# From a fresh clone to a policy that reinforcement has improved in LIBERO: installs what is missing, lets a scripted expert
# demonstrate the task, fine-tunes the policy on that, and trains it on.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
recipe="libero_object_openvla_oft_tiny_grpo"

if wants_help "$@"; then
    cat <<HELP
usage: bash scripts/train_libero.sh [RECIPE] [key=value…] [option…]

Installs what is missing (scripts/setup.sh), then runs: embodied-rl train RECIPE key=value… option…
RECIPE is the name of a file in embodied_rl/recipes or a path to a YAML file; the default is $recipe.
Where there is a recipe X_sft beside X_grpo or X_ppo, it is run first, on demonstrations of a scripted expert, and the
training starts from what it has learned (runs/X_sft/pretrained, which is kept).

  bash scripts/train_libero.sh                                 a tiny OpenVLA-OFT on one task, on two CPU cores
  bash scripts/train_libero.sh libero_spatial_openvla_oft_grpo policy.openvla_oft.checkpoint=DIR
  …the same with --resume                                      go on from the last checkpoint
HELP
    exit 0
fi

take_recipe "$@"
bash "$here/setup.sh" --extras libero,vla --no-vulkan
train_from_warm_start "$recipe" "${arguments[@]}"
