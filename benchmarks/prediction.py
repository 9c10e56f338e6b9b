"""How far predicted and measured seconds of an iteration are apart, on this machine.

    python benchmarks/prediction.py                     # two stages in turn and side by side, and the default recipe
    python benchmarks/prediction.py --recipe cartpole_ppo

Two workers do real work on their cores (matrix products, some 10 ms for each item). Each run measures its first
iterations, plans with the placement given, and compares what it predicted of the next iteration with what that took.
Needs an otherwise idle machine: who else uses its cores shows up as error.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from scheduler.cluster import Cluster
from scheduler.execute import Schedule
from scheduler.executor import Executor
from scheduler.flow import Flow
from scheduler.placement import parse_placement
from scheduler.profile import Profile
from scheduler.worker import Worker

ITEMS, TURNS = 32, 100
PLACEMENTS = {"temporal": "first, second: 0", "spatial": "first: 0; second: 1"}


class Multiplier(Worker):
    """Multiplies matrices: an item is how often."""

    def __init__(self, size: int = 160) -> None:
        self.matrix = np.linalg.qr(np.random.default_rng(0).standard_normal((size, size)))[0]  # products stay finite

    def multiply(self, counts: list[int]) -> list[int]:
        product = self.matrix
        for _ in range(sum(counts)):
            product = product @ self.matrix
        assert np.isfinite(product).all()
        return counts


def two_stages(kind: str, runs: int) -> list[float]:
    """Errors |measured / predicted - 1| of each run."""
    errors = []
    with Cluster(cpu_slots=2) as cluster:
        places = parse_placement(PLACEMENTS[kind], 2, ["first", "second"])
        first, second = (cluster.start(name, Multiplier, places[name]) for name in ("first", "second"))
        flow = Flow(kind)
        flow.stage(second.multiply, flow.stage(first.multiply, flow.source("counts")))
        counts = [TURNS] * ITEMS
        for run in range(runs):
            schedule = Schedule(Executor(flow, ITEMS), Profile(), fixed=True)
            while True:
                done, metrics = schedule.iterate({"counts": counts})
                if "schedule/error" in metrics:
                    break
            predicted = metrics["schedule/predicted_s"]
            errors.append(abs(metrics["schedule/error"]))
            seconds = f"predicted {predicted:.4f} s, measured {done.seconds:.4f} s"
            print(f"{kind} {run}: {seconds}, {errors[-1]:.1%}", flush=True)
    return errors


def recipe_errors(recipe: str, iterations: int) -> tuple[str, list[float]]:
    """The placement, and |schedule/error| of each iteration of a run of a recipe under its own plan."""
    with tempfile.TemporaryDirectory() as folder:
        words = [f"run_root={folder}", "name=run", f"train.iterations={iterations}", "train.stop_at_success=null"]
        words += ["evaluation.every=0", "evaluation.final_episodes=1", "evaluation.videos=0", "tracking.wandb=disabled"]
        command = str(Path(sys.executable).with_name("embodied-rl"))
        env = {**os.environ, "EMBODIED_RL_CACHE": folder}  # nothing is known of earlier runs
        subprocess.run([command, "train", recipe, *words], check=True, stdout=subprocess.DEVNULL, env=env)
        rows = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
        plans = [json.loads(line) for line in (Path(folder) / "run" / "plans.jsonl").read_text().splitlines()]
    where = f"{plans[-1]['placement']}, S = {plans[-1]['groups']}"
    return where, [abs(row["schedule/error"]) for row in rows if "schedule/error" in row]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument(
        "--recipe", default="maniskill_pushcube_ppo", help="whose iterations are predicted; '' for none"
    )
    parser.add_argument("--iterations", type=int, default=20, help="of the recipe")
    options = parser.parse_args()
    rows = [(kind, "", two_stages(kind, options.runs)) for kind in PLACEMENTS]
    if options.recipe:
        rows.append((options.recipe, *recipe_errors(options.recipe, options.iterations)))
    print(f"\n{'':<24} {'median error':>12} {'largest':>8}  runs")
    for name, where, errors in rows:
        print(f"{name:<24} {statistics.median(errors):>12.2%} {max(errors):>8.2%}  {len(errors)} {where}")


if __name__ == "__main__":
    main()
