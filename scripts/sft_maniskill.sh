#!/usr/bin/env bash
# From a fresh clone to a tiny OpenVLA that has learned a ManiSkill task from pictures: installs what is missing, lets a
# scripted expert demonstrate the task, fine-tunes the policy on that, and evaluates it.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
recipe="maniskill_openvla_tiny_sft"

if wants_help "$@"; then
    cat <<HELP
usage: [DATA=DIR] bash scripts/sft_maniskill.sh [RECIPE] [key=value…] [option…]

Installs what is missing (scripts/setup.sh), then runs
  embodied-rl collect RECIPE --out DATA    (goes on with what is there)
  embodied-rl sft RECIPE key=value… option… --data DATA
RECIPE is the name of a file in embodied_rl/recipes or a path to a YAML file; the default is $recipe.
DATA is by default demonstrations/RECIPE.
HELP
    exit 0
fi

take_recipe "$@"
data="${DATA:-demonstrations/$(basename "${recipe%.yaml}")}"
bash "$here/setup.sh" --extras maniskill,vla,dev
collect_demonstrations "$recipe" "$data"
exec "$embodied_rl" sft "$recipe" "${arguments[@]}" --data "$data"
