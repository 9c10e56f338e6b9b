"""How long the planner takes, by the size of the flow and the number of devices, and what its plans gain.

    python benchmarks/planner.py                 # the table: chains and series-parallel flows on 8 ... 1,024 devices
    python benchmarks/planner.py --stages 10 --devices 1024 --shape chain
    python benchmarks/planner.py --tail          # elastic pipelining of a long-tailed stage, by simulation

Runs on one core. Costs are made up (seeded): a fixed cost and a cost per item for each stage.
"""

from __future__ import annotations

import argparse
import os
import time

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

import numpy as np  # noqa: E402

from scheduler.flow import Flow, Node  # noqa: E402
from scheduler.plan import Plan, compare, make_plan  # noqa: E402
from scheduler.profile import Profile, Sample  # noqa: E402
from scheduler.simulate import simulate  # noqa: E402

SHAPES = ("chain", "series-parallel", "ladder")


def make_flow(shape: str, stages: int) -> Flow:
    """A chain; blocks of three branches of two stages between single stages; or two chains with rungs between them."""
    flow = Flow(f"{shape}-{stages}")
    ends: list[Node] = [flow.source("items")]
    made = 0

    def stage(*inputs: Node) -> Node:
        nonlocal made
        made += 1
        return flow.stage(f"group{made}.work", *inputs)

    while made < stages:
        if shape == "chain":
            ends = [stage(*ends)]
        elif shape == "ladder":
            left = stage(ends[0])
            ends = [left, stage(ends[-1], *([left] if made % 4 == 1 else []))] if made < stages else [left]
        else:
            joined = stage(*ends)
            branches = [joined] * 3
            for _ in range(2):
                branches = [stage(branch) if made < stages else branch for branch in branches]
            ends = list(dict.fromkeys(branches))
    return flow.validate()


def make_profile(flow: Flow, items: int, seed: int = 0) -> Profile:
    """Up to 10 ms for a call and 0.1 to 3 ms for an item, of which 0.5 to 20 % do not get faster with devices."""
    rng = np.random.default_rng(seed)
    profile = Profile()
    for node in flow.stages():
        fixed, each, serial = rng.uniform(0.0, 0.01), 10 ** rng.uniform(-4, -2.5), rng.uniform(0.005, 0.2)
        for count in (1, 8, 64, 512):
            for n in (1, items // 8, items):
                share = serial + (1 - serial) / count
                profile.add(Sample(node.name, n, count, fixed + each * max(n, count) * share))
    return profile


def search_seconds(shape: str, stages: int, devices: int, items: int, repeats: int) -> tuple[float, Plan]:
    """Median processor seconds of `make_plan` (one thread), so that other work on the machine does not count."""
    flow = make_flow(shape, stages)
    profile = make_profile(flow, items)
    taken = []
    for _ in range(repeats):
        start = time.process_time()
        plan = make_plan(flow, profile, devices, items)
        taken.append(time.process_time() - start)
    return float(np.median(taken)), plan


def print_growth(shapes: list[str], sizes: list[int], counts: list[int], items: int, repeats: int) -> None:
    print(f"seconds to plan {items} items (median of {repeats}), by devices")
    print(f"{'shape':<16} {'stages':>6} " + " ".join(f"{count:>7}" for count in counts))
    for shape in shapes:
        for stages in sizes:
            row = [search_seconds(shape, stages, count, items, repeats)[0] for count in counts]
            print(f"{shape:<16} {stages:>6} " + " ".join(f"{seconds:>7.3f}" for seconds in row), flush=True)


def print_tail(seeds: int) -> None:
    """Long-tailed generation, then scoring on devices of its own: streamed in chunks, and after a barrier."""
    flow = Flow("tail")
    samples = flow.stage("rollout.generate", flow.source("prompts"))
    flow.stage("reward.score", samples)
    tails = np.exp(np.random.default_rng(0).normal(0.0, 1.0, 512))
    profile = Profile()
    for n in (1, 64):
        profile.add(
            Sample("rollout.generate", n, 1, 1.0 * n, durations=tuple(tails)), Sample("reward.score", n, 1, 0.9 * n)
        )
    barrier = Flow("tail")
    samples = barrier.stage("rollout.generate", barrier.source("prompts"))
    barrier.stage("reward.score", samples, gather=True)
    placement = {"rollout": [0], "reward": [1]}
    times = {}
    for name, made in (("streamed", flow), ("barrier", barrier)):
        plan = Plan.from_placement(made, placement, profile, items=64)
        times[name] = np.array([simulate(plan, profile, seed=seed, capacity=2).makespan for seed in range(seeds)])
        low, high = np.quantile(times[name], [0.05, 0.95])
        print(
            f"{name:<10} {times[name].mean():8.2f} s (5 % to 95 %: {low:.2f} to {high:.2f}), "
            f"predicted {plan.predicted_s:.2f}"
        )
    print(f"gain {times['barrier'].mean() / times['streamed'].mean():.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, action="append", help="default: all")
    parser.add_argument("--stages", type=int, action="append", help="default: 3, 6, 10, 20")
    parser.add_argument("--devices", type=int, action="append", help="default: 8, 16, ..., 1024")
    parser.add_argument("--items", type=int, default=1024, help="items of an iteration (default 1024)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tail", action="store_true", help="only the long-tail simulation")
    parser.add_argument("--compare", action="store_true", help="also compare the styles of plans on 8 devices")
    args = parser.parse_args()
    if args.tail:
        print_tail(200)
        return
    counts = args.devices or [8 << k for k in range(8)]
    print_growth(args.shape or list(SHAPES), args.stages or [3, 6, 10, 20], counts, args.items, args.repeats)
    if args.compare:
        for shape in args.shape or SHAPES:
            flow = make_flow(shape, 6)
            print(f"\n{shape}, 6 stages, 8 devices\n{compare(flow, make_profile(flow, args.items), 8, args.items)}")


if __name__ == "__main__":
    main()
