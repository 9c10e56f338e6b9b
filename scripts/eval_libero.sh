#!/usr/bin/env bash
# From a fresh clone to a success rate on LIBERO with one command: installs what is missing, then evaluates.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"

for argument in "$@"; do
    case "$argument" in
        -h|--help)
            cat <<EOF
usage: bash scripts/eval_libero.sh [POLICY] [--suite SUITE] [option…]

Installs what is missing (scripts/setup.sh), then runs: embodied-rl eval POLICY --suite SUITE option…
POLICY is a checkpoint directory, a preset, expert or random; the default suite is libero_spatial.

  bash scripts/eval_libero.sh openvla-tiny --trials 2                      the whole path, on any machine
  bash scripts/eval_libero.sh path/to/checkpoint --suite all --envs 8      the published protocol of OpenVLA-OFT
  bash scripts/eval_libero.sh --policy expert --suite libero_object --trials 5
  …the same with --resume                                                  goes on after an interruption
EOF
            exit 0 ;;
    esac
done

bash "$here/setup.sh" --extras libero,vla --no-vulkan
case " $* " in *" --suite"*) ;; *) set -- "$@" --suite libero_spatial ;; esac
exec "$here/../.venv/bin/embodied-rl" eval "$@"
