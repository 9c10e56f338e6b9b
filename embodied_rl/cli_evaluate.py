"""The command `eval`: of a run, on LIBERO's suites, or of a language model on a benchmark."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from embodied_rl.cli_ends import interruptible, refuse

if TYPE_CHECKING:
    from embodied_rl.faults import Fault

_LIBERO = "On LIBERO's suites"
_LANGUAGE = "Of language models"
_OF_EVALUATION = {  # parameters of `eval` beside the policy
    "a run": {"episodes", "seed", "videos", "stochastic", "out"},
    "a suite": {
        "suite",
        "protocol",
        "trials",
        "tasks",
        "envs",
        "seed",
        "videos",
        "stochastic",
        "out",
        "resume",
        "wandb",
    },
    "a benchmark": {"benchmark", "samples", "temperature", "out"},
}


def evaluate(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN|CHECKPOINT|POLICY|RECIPE",
            help="A run directory (its best checkpoint is taken) or a checkpoint directory, then keys that say where "
            "its envs are now, such as env.server=tcp://robot:5005. With --suite: a run or checkpoint directory of "
            "OpenVLA, a preset such as openvla-tiny, expert or random. With --benchmark: a recipe or a run directory, "
            "then keys to override.",
            show_default=False,
        ),
    ] = None,
    episodes: Annotated[
        int | None,
        typer.Option(min=1, help="Default: the run's evaluation.final_episodes.", show_default=False),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Seed of the initial states; default: the run's.", show_default=False),
    ] = None,
    videos: Annotated[
        int | None, typer.Option(min=0, help="Default: the run's evaluation.videos.", show_default=False)
    ] = None,
    stochastic: Annotated[
        bool | None,
        typer.Option(
            "--stochastic/--deterministic",
            help="Sample actions, or take the likeliest; default: as the run's evaluation.deterministic, or the "
            "protocol of --suite, has it.",
            show_default=False,
        ),
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(metavar="SUITE[,SUITE]", help="LIBERO suites to evaluate on, or all.", rich_help_panel=_LIBERO),
    ] = None,
    named_policy: Annotated[
        str | None,
        typer.Option("--policy", help="The policy, in place of the argument.", rich_help_panel=_LIBERO),
    ] = None,
    protocol: Annotated[
        str,
        typer.Option(help="openvla, openvla-oft, simplevla, rlinf or lerobot.", rich_help_panel=_LIBERO),
    ] = "openvla-oft",
    trials: Annotated[
        int | None,
        typer.Option(min=1, help="Of each task; default: the protocol's.", rich_help_panel=_LIBERO, show_default=False),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(metavar="0,3", help="Numbers; default: all.", rich_help_panel=_LIBERO, show_default=False),
    ] = None,
    envs: Annotated[
        int | None,
        typer.Option(
            min=1, help="Env processes; default: one for each core.", rich_help_panel=_LIBERO, show_default=False
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Directory of the result, new or empty; default: a new one in evaluations, here or in the run.",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the evaluation in that directory.", rich_help_panel=_LIBERO)
    ] = False,
    wandb: Annotated[str, typer.Option(help="auto, online, offline or disabled.", rich_help_panel=_LIBERO)] = "auto",
    benchmark: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Problems: .jsonl, .parquet or a generated set.", rich_help_panel=_LANGUAGE),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Completions of each problem.", rich_help_panel=_LANGUAGE)] = 1,
    temperature: Annotated[
        float, typer.Option(min=0, help="Of several samples; a single one is greedy.", rich_help_panel=_LANGUAGE)
    ] = 1.0,
) -> None:
    """Measure the success rate of a policy: of a run, in its env, or on LIBERO's suites under a published protocol; or
    the accuracy of a language model on a benchmark.

    For example: embodied-rl eval openvla-tiny --suite libero_spatial --tasks 0,3 --trials 10
    """
    with interruptible():
        from embodied_rl.faults import Fault
        from embodied_rl.kinds import kind_of
        from embodied_rl.preflight import environment_faults
        from embodied_rl.result_folder import removed_if_empty, result_folder
        from embodied_rl.runs import checkpoint_at, moved

        chosen, *rest = words or [named_policy or ""]
        if not chosen:
            hint = (
                "name a run or a checkpoint; with --suite, expert, random or a preset such as openvla-tiny; "
                "with --benchmark, a recipe of a language model"
            )
            refuse([Fault("policy", None, "no policy was named", hint)], "the evaluation")
        kind = None if suite else kind_of(chosen)
        if kind is not None and benchmark is None:
            refuse(
                [Fault("--benchmark", None, "a language model is evaluated on one", "name a file")], "the evaluation"
            )
        if kind is None and suite is None and benchmark is not None:
            problem = "only a run or a recipe of a language model is evaluated on a benchmark"
            is_model = Path(chosen, "config.json").is_file()
            hint = f"name one, and model.path={chosen}" if is_model else "see `embodied-rl recipes`"
            refuse([Fault("policy", chosen, problem, hint)], "the evaluation")
        if faults := _useless(context, "a suite" if suite else "a benchmark" if kind else "a run"):
            refuse(faults, "the evaluation")
        if kind is not None and benchmark is not None:
            raise typer.Exit(kind.evaluate([chosen, *rest], benchmark, samples, temperature, out))
        if suite is not None and rest:
            problem = "a suite is evaluated without overrides"
            refuse([Fault("command line", word, problem, "leave it out") for word in rest], "the evaluation")
        if suite is not None:
            from embodied_rl.evaluate_suite import evaluate_from_options

            options = {"protocol": protocol, "trials": trials, "tasks": tasks, "envs": envs, "seed": seed}
            options |= {"videos": videos, "stochastic": stochastic, "resume": resume, "wandb": wandb}
            command = shlex.join(["embodied-rl", *sys.argv[1:], *([] if resume else ["--resume"])])
            raise typer.Exit(evaluate_from_options(chosen, suite, out, command, options))
        if fault := _not_trained(chosen):
            refuse([fault], "the evaluation")
        checkpoint, config, faults = checkpoint_at(Path(chosen))
        config, moving_faults = moved(config, rest)
        faults = [*faults, *moving_faults] or environment_faults(config, dry_run=False)
        place = checkpoint.absolute()
        run_dir = place.parent.parent if place.parent.name == "checkpoints" else Path()
        folder, faults = result_folder(out, run_dir / "evaluations" / place.name, faults)
        if faults:
            refuse(faults, "the evaluation")
        with removed_if_empty(folder):
            from embodied_rl.evaluate import evaluate_checkpoint

            raise typer.Exit(
                evaluate_checkpoint(
                    checkpoint,
                    config=config,
                    folder=folder,
                    episodes=config.evaluation.final_episodes if episodes is None else episodes,
                    seed=seed,
                    videos=config.evaluation.videos if videos is None else videos,
                    deterministic=config.evaluation.deterministic if stochastic is None else not stochastic,
                )
            )


def _not_trained(name: str) -> Fault | None:
    """A policy that is no run, and so has no env of its own; None: another word, or a directory of this name."""
    from embodied_rl.faults import Fault
    from embodied_rl.recipe import EMBODIED
    from embodied_rl.suite_policies import SCRIPTED

    if Path(name).exists():
        return None
    if name in SCRIPTED or name.startswith("openvla-"):
        return Fault("policy", name, "is evaluated on LIBERO's suites", "name one: --suite libero_spatial")
    if name in EMBODIED.names():
        return Fault("policy", name, "is a recipe; what is evaluated is a run of it", f"such as runs/{name}")
    return None


def _useless(context: typer.Context, what: str) -> list[Fault]:
    """Options that were given and that an evaluation of a run, a suite or a benchmark has no use for."""
    from embodied_rl.faults import Fault

    given = [one for one in context.command.params if _is_given(context, one.name or "")]
    return [
        Fault(
            "/".join([*one.opts, *one.secondary_opts]), context.params[one.name or ""], f"not of {what}", "leave it out"
        )
        for one in given
        if one.name not in {"words", "named_policy", *_OF_EVALUATION[what]}
    ]


def _is_given(context: typer.Context, parameter: str) -> bool:
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"
