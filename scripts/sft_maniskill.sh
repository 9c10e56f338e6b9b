#!/usr/bin/env bash
# From a fresh clone to a tiny OpenVLA that has learned a ManiSkill task from pictures: installs what is missing, lets a
# scripted expert demonstrate the task, fine-tunes the policy on that, and evaluates it.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"
recipe="maniskill_openvla_tiny_sft"
episodes="${EPISODES:-400}"

for argument in "$@"; do
    case "$argument" in
        -h|--help)
            cat <<EOF
usage: [EPISODES=$episodes] [DATA=DIR] bash scripts/sft_maniskill.sh [RECIPE] [key=value…] [option…]

Installs what is missing (scripts/setup.sh), then runs
  embodied-rl collect RECIPE --episodes EPISODES --noise 0.1 --out DATA    (goes on with what is there)
  embodied-rl sft RECIPE key=value… option… --data DATA
RECIPE is the name of a file in embodied_rl/recipes or a path to a YAML file; the default is $recipe.
DATA is by default demonstrations/RECIPE.
EOF
            exit 0 ;;
    esac
done

# The first argument is a recipe unless it is a setting (key=value) or an option.
case "${1:-}" in
    ""|-*|*=*) ;;
    *) recipe="$1"; shift ;;
esac
name="$(basename "${recipe%.yaml}")"
data="${DATA:-demonstrations/$name}"

bash "$here/setup.sh" --extras maniskill,vla,dev
command="$here/../.venv/bin/embodied-rl"
"$command" collect "$recipe" --episodes "$episodes" --noise 0.1 --out "$data" $([ -e "$data" ] && echo --resume)
exec "$command" sft "$recipe" "$@" --data "$data"
