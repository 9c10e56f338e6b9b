"""The command `embodied-rl`: reads what the user asks for, shows every fault at once, and hands over.

Exit codes: 0 done, 1 failed, 2 faults in what was asked (nothing was started), 130 interrupted. Everything
heavy is imported where it is used, so that help and a dry run are quick.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from embodied_rl.cli_ends import interruptible, refuse
from embodied_rl.cli_evaluate import evaluate
from embodied_rl.cli_serve import add_serve_commands

if TYPE_CHECKING:
    from embodied_rl.config import Config, Section
    from embodied_rl.faults import Fault

app = typer.Typer(
    help="Train robot policies in simulators, and language models, by reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """The console script."""
    app()


@app.command()
def train(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RECIPE KEY=VALUE",
            help="A recipe (`embodied-rl recipes`), the path of a YAML file or a run directory, then keys to "
            "override (`embodied-rl keys`). Default recipe: maniskill_pushcube_ppo.",
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue the newest run of this recipe, or the run directory given."),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check everything, print configuration, plan and memory; start nothing."),
    ] = False,
) -> None:
    """Train a policy.

    For example: embodied-rl train cartpole_ppo env.num_envs=16 algorithm.lr=1e-3
    """
    with interruptible():
        from embodied_rl.demonstration_faults import unused_demonstrations
        from embodied_rl.kinds import kind_of

        command = shlex.join(["embodied-rl", *sys.argv[1:]])
        if words and _is_recipe(words[0]) and (kind := kind_of(words[0])):
            raise typer.Exit(kind.train(words, resume, dry_run, command))
        config, run_dir = _prepared(words or [], resume, dry_run, "training", unused_demonstrations)
        from embodied_rl.train import train as start

        raise typer.Exit(start(config, run_dir, resume=resume, command=command))


@app.command()
def sft(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE [KEY=VALUE]...", help="As for `train`; its policy.kind is openvla or openvla_oft."
        ),
    ],
    data: Annotated[
        str | None,
        typer.Option(help="Directory of demonstrations (`embodied-rl collect`); default: the recipe's sft.data."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="As for `train`.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="As for `train`.")] = False,
) -> None:
    """Fine-tune a policy on demonstrations.

    The run directory holds `pretrained`, from which reinforcement can start. For example:
    embodied-rl sft maniskill_openvla_tiny_sft --data demos/pushcube
    """
    with interruptible():
        from embodied_rl.demonstration_faults import demonstration_faults

        words = [*words, *([f"sft.data={data}"] if data else [])]
        config, run_dir = _prepared(words, resume, dry_run, "fine-tuning", demonstration_faults)
        from embodied_rl.sft import FineTuning
        from embodied_rl.train import train as start

        command = shlex.join(["embodied-rl", *sys.argv[1:]])
        raise typer.Exit(start(config, run_dir, resume=resume, command=command, start=FineTuning.start))


app.command("eval")(evaluate)


@app.command()
def plan(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="RECIPE KEY=VALUE", help="As for `train`. Default recipe: maniskill_pushcube_ppo."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="16x8xH100", help="Plan for such devices (NODESxDEVICESxKIND) instead of this machine."),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Measured profile, such as a run's profile.yaml; default: this machine's."),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also the best collocated and the best disaggregated plan, side by side.")
    ] = False,
    svg: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Also draw the predicted timeline.")] = None,
) -> None:
    """Show where and when each worker would run, and how long it would take. Starts nothing.

    From times that runs of the recipe have measured. For example: embodied-rl plan cartpole_ppo --compare
    """
    with interruptible():
        from embodied_rl.consistency import consistency_faults
        from embodied_rl.faults import Fault, defaulted_keys
        from embodied_rl.kinds import kind_of
        from embodied_rl.planning import find_profile, how_to_measure, parse_cluster, print_plan
        from embodied_rl.recipe import DEFAULT_RECIPE, load_recipe
        from scheduler.device_space import PlanError
        from scheduler.profile import ProfileError

        words = list(words or [])
        recipe = words.pop(0) if words and _is_recipe(words[0]) else DEFAULT_RECIPE
        if faults := _picture_faults("--svg", svg):
            refuse(faults, "planning")
        if kind_of(recipe):
            hint = f"for its own plan: embodied-rl train {recipe} --dry-run"
            refuse([Fault("recipe", recipe, "`plan` takes the recipes of envs", hint)], "planning")
        config, faults = load_recipe(recipe, words)
        if faults := [*faults, *consistency_faults(config, defaulted_keys(faults))]:
            refuse(faults, "planning")
        try:
            devices = parse_cluster(cluster) if cluster else None
        except ValueError as error:
            refuse([Fault("--cluster", cluster, str(error))], "planning")
        try:
            known = find_profile(config, profile)
        except ProfileError as error:
            refuse([Fault("profile", None, str(error), how_to_measure(recipe))], "planning")
        try:
            print_plan(config, known, devices, compare, svg)
        except PlanError as error:
            refuse([Fault("plan", None, str(error))], "planning")


@app.command()
def collect(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE|ENV [KEY=VALUE]...",
            help="A recipe, for its env, or the id of an env with an expert (PushCube-v1, PullCube-v1, PickCube-v1, "
            "StackCube-v1): then with images and pd_ee_delta_pose; then keys to override, such as env.image_size, "
            "env.processes or seed.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Directory of the dataset.", show_default=False)],
    episodes: Annotated[
        int | None,
        typer.Option(min=1, help="Episodes that the dataset shall hold; as sft.episodes.", show_default="200"),
    ] = None,
    noise: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Standard deviation of what disturbs each executed action (the gripper's excepted); as sft.noise.",
            show_default="0",
        ),
    ] = None,
    jpeg: Annotated[bool, typer.Option("--jpeg", help="JPEG images: smaller than PNG, and lossy.")] = False,
    keep_failures: Annotated[bool, typer.Option("--keep-failures", help="Keep episodes without success too.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the dataset in this directory.")] = False,
) -> None:
    """Collect demonstrations by scripted experts.

    The actions in the dataset are what the expert would do. With --noise, what is done differs from them, so that the
    dataset also shows how to recover (DART, Laskey et al. 2017). A slow teacher: sft.speed=0.5.

    For example: embodied-rl collect PickCube-v1 --episodes 200 --out demos/pickcube --noise 0.1
    """
    with interruptible():
        from embodied_rl.collect import collect as start
        from embodied_rl.collect import collect_faults, dataset_settings, recipe_for
        from embodied_rl.demonstrations import DatasetError, DemonstrationWriter
        from embodied_rl.faults import Fault, defaulted_keys
        from embodied_rl.preflight import environment_faults
        from embodied_rl.recipe import EMBODIED

        recipe, *overrides = words
        options = {"sft.episodes": episodes, "sft.noise": noise}
        overrides += [f"{key}={value}" for key, value in options.items() if value is not None]
        config, faults = EMBODIED.read(recipe_for(recipe), overrides)
        faults += environment_faults(config, False, defaulted_keys(faults))
        faults = faults or collect_faults(config, out, resume)
        if faults:
            refuse(faults, "the collection")
        try:
            writer = DemonstrationWriter(out, dataset_settings(config, "jpeg" if jpeg else "png", keep_failures))
        except (DatasetError, OSError) as error:
            refuse([Fault("--out", str(out), str(error))], "the collection")
        command = shlex.join(["embodied-rl", *sys.argv[1:], *([] if resume else ["--resume"])])
        raise typer.Exit(start(config, config.sft.episodes, writer, command))


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    curve: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Also draw the learning curve.")] = None,
) -> None:
    """Write report.html of a run."""
    with interruptible():
        from embodied_rl.faults import Fault
        from embodied_rl.report import write_curve, write_report
        from embodied_rl.runs import not_a_run

        faults = [] if (run / "metrics.jsonl").is_file() else [not_a_run(run, "has no metrics.jsonl")]
        if faults := [*faults, *_picture_faults("--curve", curve)]:
            refuse(faults, "the report")
        try:
            typer.echo(write_report(run))
        except ValueError as error:
            refuse([not_a_run(run, str(error))], "the report")
        except OSError as error:
            refuse([Fault("run", str(run), str(error))], "the report")
        if curve is not None:
            try:
                typer.echo(write_curve([run], curve))
            except (ValueError, OSError) as error:
                refuse([Fault("--curve", str(curve), str(error))], "the curve")


@app.command()
def doctor() -> None:
    """Check this machine: simulators, rendering, devices; with the command that repairs each."""
    with interruptible():
        from embodied_rl.doctor import print_report

        raise typer.Exit(print_report())


@app.command()
def recipes() -> None:
    """List the recipes that come with the package."""
    from embodied_rl.kinds import kinds
    from embodied_rl.recipe import EMBODIED

    names = EMBODIED.names()
    for kind in kinds().values():
        names |= kind.RECIPES.names()
    width = max(map(len, names))
    for name, summary in names.items():
        typer.echo(f"{name:{width}}  {summary}")


@app.command()
def keys(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[math] [SECTION]", help="Those of language models; only keys that start with SECTION."),
    ] = None,
) -> None:
    """List the configuration keys: what each takes, its default, what it means."""
    from rich.console import Console
    from rich.text import Text

    from embodied_rl.faults import Fault, any_of, show
    from embodied_rl.kinds import kinds
    from embodied_rl.recipe import EMBODIED
    from embodied_rl.schema import all_keys, nearest_keys

    words = list(words or [])
    model: type[Section] = EMBODIED.model
    if words and words[0] in kinds():
        model = kinds()[words.pop(0)].RECIPES.model
    start = words[0] if words else ""
    chosen = [key for key in all_keys(model).values() if key.name.startswith(start)]
    if not chosen:
        near = nearest_keys(start, model)
        refuse([Fault("key", start, "no such key", f"nearest key: {any_of(near)}" if near else "")], "the list")
    console = Console(soft_wrap=True, highlight=False)
    for key in chosen:
        console.print(Text.assemble((key.name, "bold"), f" = {show(key.default)}", (f"  {key.expected}", "dim")))
        if key.description:
            console.print(Text(f"    {key.description}"))


add_serve_commands(app)


# --- helpers ------------------------------------------------------------------------------------------------


def _prepared(
    words: Sequence[str], resume: bool, dry_run: bool, action: str, more_faults: Callable[[Config], list[Fault]]
) -> tuple[Config, Path]:
    """The configuration and the directory of a run without faults. A dry run ends here."""
    from embodied_rl.faults import defaulted_keys
    from embodied_rl.preflight import preflight
    from embodied_rl.recipe import DEFAULT_RECIPE, EMBODIED, load_recipe, recipe_name
    from embodied_rl.runs import choose_run_dir

    words = list(words)
    recipe = words.pop(0) if words and _is_recipe(words[0]) else DEFAULT_RECIPE
    config, faults = load_recipe(recipe, words)
    given_run = EMBODIED.run_directory(recipe)
    resumed = str(given_run) if resume and given_run else resume
    run_dir, run_faults = choose_run_dir(config, recipe_name(recipe), resumed)
    faults += run_faults
    faults += preflight(config, run_dir, resume, dry_run, defaulted_keys(faults))
    needed = [fault for fault in faults if dry_run and fault.obtainable]
    faults = [fault for fault in faults if fault not in needed]
    if faults := faults or more_faults(config):
        refuse([*faults, *needed], action)
    if dry_run:
        from embodied_rl.dry_run import print_dry_run

        print_dry_run(config, run_dir, resume, needed)
        raise typer.Exit()
    return config, run_dir


def _picture_faults(option: str, path: Path | None) -> list[Fault]:
    """What keeps a picture from being written to `path`, if one was asked for."""
    from embodied_rl.faults import Fault
    from embodied_rl.run_faults import unwritable

    if path is None:
        return []
    if path.suffix.lower() != ".svg" or path.is_dir():
        return [Fault(option, str(path), "expected the path of a file that ends in .svg")]
    fault = unwritable(path.absolute().parent, option, "choose another place")
    return [replace(fault, value=str(path))] if fault else []


def _is_recipe(word: str) -> bool:
    return "=" not in word or Path(word).exists()
