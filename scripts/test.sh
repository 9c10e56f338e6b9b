#!/usr/bin/env bash
# Runs the project's checks in its own environment: ruff, mypy, then pytest with the arguments given here.
# Stops at the first that fails, with its exit code.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"
case "${1:-}" in
    -h|--help)
        echo "usage: bash scripts/test.sh [PYTEST_ARGUMENT…]"
        echo "Installs what is missing (scripts/setup.sh), then runs ruff, mypy and pytest; stops at the first failure."
        echo "Without arguments, pytest runs two files at a time (-n 2); with arguments, what they say."
        exit 0 ;;
esac

bash "$here/setup.sh" --extras maniskill,libero,dev
source "$here/setup.sh"
cd "$ROOT"

has_browser() { command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null

if ! has_browser && is_debian && [ "$(id -u)" -eq 0 ]; then
    echo "test: installing chromium (the tests of the HTML report open it in a browser)"
    LOG="$(mktemp)"
    apt_update || true
    if apt_install chromium && has_browser; then
        rm -f "$LOG"
    else
        echo "test: no chromium here (log: $LOG): the tests that need a browser will be skipped"
    fi
fi

announce() { printf '\n== %s\n' "$*"; }

announce "ruff check ."
"$VENV/bin/ruff" check .
announce "mypy"
"$PYTHON" -m mypy
# Tests wait for processes more than they compute. A file stays whole, as its tests share clusters and simulators; the
# long ones come early in the alphabet, so that none is left for the end.
if [ $# -eq 0 ]; then set -- -n 2 --dist loadfile --no-loadscope-reorder; fi
announce "pytest $*"
"$PYTHON" -m pytest "$@"
