"""What it is worth to learn from finished groups while others are being sampled, where lengths have a long tail.

    python benchmarks/elastic_math.py

A character model with random weights ends a completion at any token with the same small chance, so that lengths are
distributed geometrically. The sampler has one core, judge and actor another. With a barrier the actor waits for the
last group; elastically (`algorithm.elastic`) it takes each as it comes. The elastic iteration is also simulated, from
the measured costs and the measured distribution of the time between groups. Needs an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import statistics

from reasoning.config import MathConfig, with_preset
from reasoning.data import Problem
from reasoning.flows import ELASTIC_CALLS
from reasoning.samples import Prompt
from reasoning.team import MathTeam
from scheduler.cluster import Cluster
from scheduler.executor import Iteration
from scheduler.flow import Flow, PlannedGroup
from scheduler.plan import Plan
from scheduler.profile import Profile, Sample
from scheduler.simulate import expected_seconds

PLACEMENT = "sampler: 0; judge, actor: 1"


def config(elastic: bool, prompts: int) -> MathConfig:
    content = {
        "placement": PLACEMENT,
        "model": {"path": "tiny"},
        "reward": {"functions": {"format": 1.0}},  # comparing a random model's answers would cost more than all else
        "sampling": {"prompts": prompts, "group_size": 4, "max_new_tokens": 200, "max_rows": 32},
        "algorithm": {"name": "grpo", "lr": 1e-9, "elastic": elastic},
        "cluster": {"cpu_slots": 2},
    }
    return with_preset(MathConfig.model_validate(content))


def simulated(done: list[Iteration], prompts: int) -> float:
    """Seconds of an elastic iteration, from the costs of an item in those measured."""
    groups = {name: PlannedGroup(name) for name in ("sampler", "judge", "actor")}
    flow = Flow("elastic")
    scored = flow.stage(groups["judge"].score, flow.stage(groups["sampler"].generate, flow.source("prompts")))
    flow.stage(groups["actor"].accumulate, scored, granularity=max(1, prompts // ELASTIC_CALLS))
    profile = Profile()
    for stage in flow.calls():
        for iteration in done:
            samples = [sample for sample in iteration.samples if sample.stage == stage]
            seconds = statistics.fmean(sample.seconds / sample.items for sample in samples)
            laps = tuple(lap for sample in samples for lap in sample.durations)
            profile.add(Sample(stage, 1, 1, seconds, durations=laps))
    profile.overhead_s = statistics.median(iteration.overhead_s for iteration in done)
    plan = Plan.from_placement(flow, {"sampler": [0], "judge": [1], "actor": [1]}, profile, prompts, 2)
    print(plan)
    return expected_seconds(plan, profile, runs=200)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--iterations", type=int, default=6)
    options = parser.parse_args()
    found: dict[bool, list[Iteration]] = {False: [], True: []}
    lengths: list[int] = []
    for elastic in found:
        with Cluster(cpu_slots=2) as cluster:
            team = MathTeam(config(elastic, options.prompts), cluster)
            for number in range(options.iterations):
                numbers = range(number * options.prompts, (number + 1) * options.prompts)
                prompts = [Prompt(Problem(str(n), f"{n % 90 + 10}+{n % 80 + 11}=", "1"), n) for n in numbers]
                done, _ = team.iterate(number, prompts, options.iterations - number)
                found[elastic] += [done] if number else []  # the first one warms up
                lengths += [len(c.ids) for c in done.reports["actor.update"][0]["shown"][0].completions]
            team.close()
    barrier, without = (statistics.median(done.seconds for done in found[elastic]) for elastic in found)
    expected = simulated(found[True], options.prompts)
    tail = max(lengths) / statistics.fmean(lengths)
    print(f"{options.prompts} groups of 4; of {len(lengths)} completions the longest has {tail:.1f} x the mean length")
    print(f"with a barrier   {barrier:.3f} s")
    print(f"elastic          {without:.3f} s   {barrier / without:.2f} x faster")
    print(f"simulated        {expected:.3f} s   {without / expected - 1:+.1%} measured over simulated")


if __name__ == "__main__":
    main()
