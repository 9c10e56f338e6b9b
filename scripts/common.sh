# What the scripts that train have in common. To be sourced; runs nothing by itself.
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"
embodied_rl="$here/../.venv/bin/embodied-rl"

# wants_help ARGUMENT…: whether help is asked for.
wants_help() {
    case " $* " in *" -h "*|*" --help "*) return 0 ;; esac
    return 1
}

# take_recipe ARGUMENT…: sets `arguments`, and `recipe` if the first one is a recipe: neither a setting (key=value) nor an
# option.
take_recipe() {
    case "${1:-}" in
        ""|-*|*=*) ;;
        *) recipe="$1"; shift ;;
    esac
    arguments=("$@")
}

# collect_demonstrations RECIPE DIRECTORY: as many as the recipe says; goes on with what is there.
collect_demonstrations() {
    "$embodied_rl" collect "$1" --out "$2" $([ -e "$2" ] && echo --resume)
}

# warm_start_of RECIPE: the recipe that makes what this one starts from, where there is one: X_sft for X_ppo and X_grpo.
warm_start_of() {
    local name; name="$(basename "${1%.yaml}")"
    case "$name" in *_ppo|*_grpo) name="${name%_*}_sft" ;; *) return 0 ;; esac
    if [ -f "$here/../embodied_rl/recipes/$name.yaml" ]; then echo "$name"; fi
}

# train_from_warm_start RECIPE ARGUMENT…: trains it. Where it has a warm start that was not trained yet, that comes first,
# on demonstrations; not so in a dry run, or if a checkpoint is given.
train_from_warm_start() {
    local recipe="$1" warm; shift
    warm="$(warm_start_of "$recipe")"
    case " $* " in *" --dry-run "*|*".checkpoint="*) warm="" ;; esac
    if [ -n "$warm" ]; then
        local run="runs/$warm"
        if [ ! -d "$run/pretrained" ]; then
            collect_demonstrations "$warm" "demonstrations/$warm"
            "$embodied_rl" sft "$warm" --data "demonstrations/$warm" $([ -e "$run" ] && echo --resume)
        fi
        local kind; kind="$(awk '/^policy:/ {own = 1} own && $1 == "kind:" {print $2; exit}' "$run/config.yaml")"
        set -- "policy.$kind.checkpoint=$run/pretrained" "$@"
    fi
    exec "$embodied_rl" train "$recipe" "$@"
}
