"""How fast a recipe learns: trains it on several seeds and prints when each passed 90 % and 95 %.

    python benchmarks/learning.py                                   # maniskill_pushcube_ppo, seeds 0, 1 and 2
    python benchmarks/learning.py --recipe maniskill_pushcube_grpo --seeds 0,1 train.iterations=400
    python benchmarks/learning.py --recipe maniskill_openvla_tiny_ppo --run-root runs/ppo --curve ppo.svg \\
        policy.openvla.checkpoint=runs/maniskill_openvla_tiny_sft/pretrained

Times are wall-clock from the first iteration, evaluations during training included. Success is deterministic, on
held-out seeds; "before" (where the recipe asks for it) and "final" are evaluations on seeds of their own. Runs that
have ended under --run-root are not repeated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from embodied_rl.report import write_curve

EVALUATIONS = ("evaluation_before.json", "evaluation.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="maniskill_pushcube_ppo")
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated")
    parser.add_argument("--run-root", default=None, help="where the runs go; default: a temporary directory")
    parser.add_argument("--curve", type=Path, default=None, metavar="FILE.svg", help="draw all of them")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    root = Path(arguments.run_root or tempfile.mkdtemp(prefix="embodied-rl-learning-"))
    print(f"{arguments.recipe}, runs in {root}")
    print(f"{'seed':>4}  {'90 % at':>20}  {'95 % at':>20}  {'end':>20}  {'before':>16}  final")
    runs = {seed: root / f"seed_{seed}" for seed in arguments.seeds.split(",")}
    for seed, run in runs.items():
        if (run / "evaluation.json").is_file():
            print(row(seed, run), flush=True)
            continue
        command = [str(Path(sys.executable).with_name("embodied-rl")), "train", arguments.recipe, f"seed={seed}"]
        command += [f"run_root={root}", f"name={run.name}", "evaluation.videos=0", *arguments.overrides]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            sys.exit(done.stdout)
        print(row(seed, run), flush=True)
    if arguments.curve:
        print(write_curve(list(runs.values()), arguments.curve, arguments.recipe))


def row(seed: str, run: Path) -> str:
    """One line of the table."""
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    before, final = (
        json.loads(file.read_text()) if file.is_file() else None for file in map(run.joinpath, EVALUATIONS)
    )
    passed = [next((m for m in metrics if m.get("eval/success_once", 0) >= aim), None) for aim in (0.9, 0.95)]
    cells = "  ".join(f"{point(m):>20}" for m in (*passed, metrics[-1]))
    return f"{seed:>4}  {cells}  {rate(before):>16}  {rate(final)}"


def rate(evaluation: dict[str, Any] | None) -> str:
    if evaluation is None:
        return ""
    return f"{evaluation['successes'] / evaluation['n']:.3f} ({evaluation['successes']}/{evaluation['n']})"


def point(metrics: dict[str, Any] | None) -> str:
    return f"{metrics['env_steps']:,} / {metrics['time/wall_s']:.0f} s" if metrics else "never"


if __name__ == "__main__":
    main()
