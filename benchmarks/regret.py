"""Is the plan that was chosen the best? Throughput of the chosen plan beside that of hand-written placements.

    python benchmarks/regret.py                        # three workloads, some ten minutes on two cores

Workloads: ManiSkill PushCube from state with a small policy (env-bound) and with a large one (inference-bound), and
from images with a CNN. Each is run under every placement and number of pipeline groups listed, and under what the
system chooses from its own measurements, starting with nothing known. All under `deterministic: true`, so that every
plan computes the same. Regret is what the chosen plan loses against the best one. Needs an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from embodied_rl.config import Config
from embodied_rl.team import Team
from scheduler.cluster import Cluster
from scheduler.placement import parse_placement
from scheduler.plan import Plan
from scheduler.profile import Profile

PLACEMENTS = (
    "env, rollout, actor: 0-1",
    "env: 0; rollout, actor: 1",
    "env: 0-1; rollout, actor: 1",
    "env: 0; rollout: 1; actor: 0-1",
)
GROUPS = (1, 2, 4)
ENV = {
    "kind": "maniskill", "id": "PushCube-v1", "control_mode": "pd_ee_delta_pose", "num_envs": 8, "horizon": 12,
    "sim_freq": 50, "control_freq": 5,
}  # fmt: skip
IMAGE = {"observation": ["image"], "image_size": 64}
WORKLOADS: dict[str, dict[str, Any]] = {
    "state, small MLP": {"env": ENV, "policy": {"hidden": [64, 64]}, "rollout": {"steps": 24}},
    "state, large MLP": {"env": ENV, "policy": {"hidden": [2048, 2048, 2048]}, "rollout": {"steps": 12}},
    "RGB, CNN": {"env": {**ENV, **IMAGE}, "policy": {"kind": "cnn"}, "rollout": {"steps": 12}},
}


def configuration(workload: dict[str, Any]) -> Config:
    settings = {
        **workload,
        "rollout": {**workload["rollout"], "pipeline_stages": "auto"},
        "algorithm": {"epochs": 1, "minibatches": 4},
        "cluster": {"cpu_slots": 2},
        "deterministic": True,
        "inference_block": 2,
    }
    return Config.model_validate_json(json.dumps(settings))


def seconds_of(team: Team, iterations: int) -> float:
    """Median of some iterations, after one to warm up."""
    executor = team.schedule.executor
    executor.iterate()
    return statistics.median(executor.iterate().seconds for _ in range(iterations))


def measure(config: Config, iterations: int, settle: int) -> list[tuple[str, float, float]]:
    """(plan, measured, predicted seconds of an iteration), the chosen plan first."""
    rows: list[tuple[str, float, float]] = []
    with Cluster(cpu_slots=2) as cluster:
        profile = Profile()
        team = Team(config, cluster, profile=profile)
        team.sync_weights()
        for iteration in range(settle):
            team.iterate(iteration, left=1000)
        executor, (loop,) = (
            team.schedule.executor,
            [n for n in team.schedule.executor.flow.stages() if n.kind == "loop"],
        )
        chosen = executor.plan
        assert chosen is not None
        for change in team.schedule.changes:
            print(f"    from iteration {change.iteration}: {change.plan.placement_text}: {change.reason}", flush=True)
        what = f"chosen: {chosen.placement_text}, S = {chosen.loop_groups[loop.name]}"
        rows.append((what, seconds_of(team, iterations), chosen.repriced(profile).predicted_s))
        for placement in PLACEMENTS:
            placed = parse_placement(placement, 2, executor.flow.groups())
            plan = Plan.from_placement(executor.flow, placed, profile, config.env.num_envs, 2)
            executor.apply(plan)
            for groups in GROUPS:
                executor.cut({loop.name: groups}, {})
                predicted = plan.with_groups(loop.name, groups).repriced(profile).predicted_s
                rows.append((f"{placement}, S = {groups}", seconds_of(team, iterations), predicted))
                print(f"    {rows[-1][0]}: {rows[-1][1]:.3f} s", flush=True)
        team.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, action="append", help="default: all")
    parser.add_argument("--iterations", type=int, default=3, help="whose median is taken, for each plan")
    parser.add_argument("--settle", type=int, default=10, help="iterations after which the plan is the chosen one")
    options = parser.parse_args()
    summary = []
    for name in options.workload or WORKLOADS:
        config, start = configuration(WORKLOADS[name]), time.monotonic()
        print(f"{name}:", flush=True)
        rows = measure(config, options.iterations, options.settle)
        steps = config.env.num_envs * config.rollout.steps
        best = min(seconds for _, seconds, _ in rows)
        print(f"\n  {'env steps/s':>11} {'of best':>8} {'predicted':>10}  plan")
        for what, seconds, predicted in rows:
            print(f"  {steps / seconds:>11.0f} {best / seconds:>8.0%} {steps / predicted:>10.0f}  {what}")
        summary.append((name, 1 - best / rows[0][1]))
        print(f"  regret {summary[-1][1]:.1%}   ({time.monotonic() - start:.0f} s)\n", flush=True)
    for name, regret in summary:
        print(f"{name:<20} regret {regret:.1%}")


if __name__ == "__main__":
    main()
