"""The commands of reasoning, `embodied-rl math ...`. Everything heavy is imported where it is used."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Train language models on mathematics by reinforcement learning.", no_args_is_help=True)
_WORDS = typer.Argument(
    metavar="RECIPE KEY=VALUE",
    help="A recipe (`embodied-rl math recipes`), the path of a YAML file or a run directory, then keys to override.",
)


@app.command()
def train(
    words: Annotated[list[str] | None, _WORDS] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the newest run of this recipe.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print configuration and memory; start nothing.")
    ] = False,
) -> None:
    """Train a language model. For example: embodied-rl math train smollm2_arithmetic algorithm.lr=2e-5"""
    from embodied_rl.faults import print_faults
    from embodied_rl.runs import choose_run_dir
    from reasoning.recipe import DEFAULT_RECIPE, dry_run_text, load_recipe

    words = list(words or [])
    recipe = words.pop(0).rstrip("/") if words and "=" not in words[0] else DEFAULT_RECIPE
    config, faults = load_recipe(recipe, words)
    given_run = resume and (Path(recipe) / "config.yaml").is_file()
    name = Path(recipe).name.removesuffix(".yaml")
    run_dir, run_faults = choose_run_dir(config, name, recipe if given_run else resume)  # type: ignore[arg-type]
    if faults := faults + run_faults:
        print_faults(faults, "training")
        raise typer.Exit(2)
    if dry_run:
        typer.echo(dry_run_text(config, run_dir))
        raise typer.Exit()
    from reasoning.train import train as start

    raise typer.Exit(start(config, run_dir, resume, shlex.join(["embodied-rl", *sys.argv[1:]])))


@app.command("eval")
def evaluate(
    words: Annotated[list[str], _WORDS],
    benchmark: Annotated[str, typer.Option(help="File (.jsonl, .parquet) or generated set.")],
    samples: Annotated[int, typer.Option(min=1, help="Completions of each problem.")] = 1,
    temperature: Annotated[float, typer.Option(min=0, help="0: the likeliest tokens; with one sample only.")] = 1.0,
    out: Annotated[Path, typer.Option(help="Directory of the result.")] = Path("evaluations/math"),
) -> None:
    """Measure accuracy: pass@1, avg@k, maj@k and pass@k. A run directory stands for its newest checkpoint's model."""
    from embodied_rl.faults import Fault, print_faults
    from reasoning.recipe import load_recipe

    recipe, *overrides = words
    pretrained = Path(recipe) / "pretrained"
    overrides = [f"data.test={benchmark}", "evaluation.problems=1000000", "data.test_size=1000000", *overrides]
    overrides += [f"model.path={pretrained}", "model.lora_rank=null"] if pretrained.is_dir() else []
    config, faults = load_recipe(recipe, overrides)
    if samples > 1 and temperature == 0:
        faults.append(Fault("--temperature", 0, "all samples would be equal", "one sample, or a temperature above 0"))
    if faults:
        print_faults(faults, "evaluation")
        raise typer.Exit(2)
    from reasoning.benchmark import run_benchmark

    raise typer.Exit(run_benchmark(config, samples, temperature, out))


@app.command()
def recipes() -> None:
    """List the recipes of reasoning."""
    from reasoning.recipe import recipe_names

    for name, summary in recipe_names().items():
        typer.echo(f"{name:24}  {summary}")


@app.command()
def keys() -> None:
    """List the configuration keys with their defaults."""
    from reasoning.recipe import keys as all_keys

    for name, default in all_keys().items():
        typer.echo(f"{name} = {default}")


def main() -> None:
    """`python -m reasoning.cli`."""
    app()


if __name__ == "__main__":
    main()
