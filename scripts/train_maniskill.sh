#!/usr/bin/env bash
# From a fresh clone to a trained policy in ManiSkill with one command: installs what is missing, then trains.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"
recipe="maniskill_pushcube_ppo"

for argument in "$@"; do
    case "$argument" in
        -h|--help)
            cat <<EOF
usage: bash scripts/train_maniskill.sh [RECIPE] [key=value…] [option…]

Installs what is missing (scripts/setup.sh), then runs: embodied-rl train RECIPE key=value… option…
RECIPE is the name of a file in embodied_rl/recipes or a path to a YAML file; the default is $recipe.

  bash scripts/train_maniskill.sh                        a push task from state, on any machine
  bash scripts/train_maniskill.sh seed=2                 the same with one setting changed
  bash scripts/train_maniskill.sh --resume               go on from the last checkpoint
  bash scripts/train_maniskill.sh --dry-run              check the recipe, show the plan, start nothing
EOF
            exit 0 ;;
    esac
done

# The first argument is a recipe unless it is a setting (key=value) or an option.
case "${1:-}" in
    ""|-*|*=*) ;;
    *) recipe="$1"; shift ;;
esac

bash "$here/setup.sh"
exec "$here/../.venv/bin/embodied-rl" train "$recipe" "$@"
