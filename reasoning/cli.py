"""What `embodied-rl train` and `eval` do with a recipe of reasoning (see `embodied_rl.kinds`).

Everything heavy is imported where it is used.
"""

from __future__ import annotations

from pathlib import Path

import typer

from embodied_rl.faults import Fault, defaulted_keys, print_faults
from embodied_rl.recipe import recipe_name
from embodied_rl.result_folder import removed_if_empty, result_folder
from embodied_rl.run_faults import run_faults
from embodied_rl.runs import choose_run_dir
from reasoning.recipe import RECIPES, absences, load_recipe

# In a resumed run: how answers are compared, and how much is held in memory at once.
MAY_CHANGE = ("reward.processes", "reward.timeout_s", "sampling.max_rows", "algorithm.token_budget")

__all__ = ["RECIPES", "evaluate", "train"]


def train(words: list[str], resume: bool, dry_run: bool, command: str) -> int:
    """Train a language model; with `dry_run`, print configuration, memory and plans. The first word is the recipe."""
    recipe, *overrides = words
    config, faults = load_recipe(recipe, overrides)
    given_run = RECIPES.run_directory(recipe)
    resumed = str(given_run) if resume and given_run else resume
    run_dir, name_faults = choose_run_dir(config, recipe_name(recipe), resumed)  # type: ignore[arg-type]
    faults += name_faults
    faults += run_faults(config, run_dir, resume, defaulted_keys(faults), MAY_CHANGE)
    lacking = [fault for fault in absences(config) if fault.key not in defaulted_keys(faults)]
    faults += [fault for fault in lacking if not fault.obtainable]
    needed = [fault for fault in lacking if fault.obtainable]
    if faults or (needed and not dry_run):
        print_faults([*faults, *needed], "training")
        return 2
    if dry_run:
        from reasoning.dry_run import dry_run_text

        typer.echo(dry_run_text(config, run_dir, needed))
        return 0
    from reasoning.train import train as start

    return start(config, run_dir, resume, command)


EVERYTHING = 1_000_000


def evaluate(words: list[str], benchmark: str, samples: int, temperature: float, out: Path | None) -> int:
    """Measure accuracy: pass@1, avg@k, maj@k and pass@k. A run directory stands for the model that it ended with."""
    recipe, *overrides = words
    pretrained = Path(recipe) / "pretrained"
    whole = {"data.test": benchmark, "evaluation.problems": EVERYTHING, "data.test_size": EVERYTHING}
    whole |= {"model.path": pretrained, "model.lora_rank": "null"} if pretrained.is_dir() else {}
    given = {override.partition("=")[0] for override in overrides}
    overrides += [f"{key}={value}" for key, value in whole.items() if key not in given]
    config, faults = load_recipe(recipe, overrides)
    if samples > 1 and temperature == 0:
        faults.append(Fault("--temperature", 0, "all samples would be equal", "one sample, or a temperature above 0"))
    default = Path("evaluations") / f"{recipe_name(recipe)}_{recipe_name(Path(benchmark).stem)}"
    folder, faults = result_folder(out, default, faults)
    if faults:
        print_faults(faults, "the evaluation")
        return 2
    with removed_if_empty(folder):
        from reasoning.benchmark import run_benchmark

        return run_benchmark(config, samples, temperature, folder)
