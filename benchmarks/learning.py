"""How fast a recipe learns: trains it on several seeds and prints when each passed 90 % and 95 %.

    python benchmarks/learning.py                                   # maniskill_pushcube_ppo, seeds 0, 1 and 2
    python benchmarks/learning.py --recipe maniskill_pushcube_grpo --seeds 0,1 train.iterations=400

Times are wall-clock from the first iteration, evaluations during training included. Success is deterministic, on
held-out seeds; "final" is the final evaluation on seeds of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="maniskill_pushcube_ppo")
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated")
    parser.add_argument("--run-root", default=None, help="where the runs go; default: a temporary directory")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    root = Path(arguments.run_root or tempfile.mkdtemp(prefix="embodied-rl-learning-"))
    print(f"{arguments.recipe}, runs in {root}")
    print(f"{'seed':>4}  {'90 % at':>20}  {'95 % at':>20}  {'end':>20}  final")
    for seed in arguments.seeds.split(","):
        run = root / f"seed_{seed}"
        command = [str(Path(sys.executable).with_name("embodied-rl")), "train", arguments.recipe, f"seed={seed}"]
        command += [f"run_root={root}", f"name={run.name}", "evaluation.videos=0", *arguments.overrides]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            sys.exit(done.stdout)
        print(row(seed, run), flush=True)


def row(seed: str, run: Path) -> str:
    """One line of the table."""
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    final = json.loads((run / "evaluation.json").read_text())
    passed = [next((m for m in metrics if m.get("eval/success_once", 0) >= aim), None) for aim in (0.9, 0.95)]
    cells = "  ".join(f"{point(m):>20}" for m in (*passed, metrics[-1]))
    return f"{seed:>4}  {cells}  {final['success_once']:.3f} ({final['successes']}/{final['n']})"


def point(metrics: dict[str, Any] | None) -> str:
    return f"{metrics['env_steps']:,} / {metrics['time/wall_s']:.0f} s" if metrics else "never"


if __name__ == "__main__":
    main()
