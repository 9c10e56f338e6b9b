"""Discrete-event simulation of a plan: what each device does when, and how long it takes in all.

For what the closed form of `plan_tree` does not cover: durations that vary (`seed`), queues that fill up (`capacity`),
pipelines with branches of unequal length, groups of a loop that differ; and for clusters that are not at hand. With
constant durations it gives exactly the closed form wherever that is exact: leaves, loops, turns, and pipelines whose
slowest part lies on the critical path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Literal

import numpy as np

from scheduler.plan_tree import Devices, Leaf, LoopShape, PlanNode, Spatial, leaves
from scheduler.profile import Profile

if TYPE_CHECKING:
    from scheduler.plan import Plan


@dataclass(frozen=True)
class Interval:
    """A call of a stage, or a switch of worker groups, on a set of devices."""

    label: str
    devices: Devices
    start: float
    end: float
    kind: Literal["work", "switch"] = "work"


@dataclass(frozen=True)
class Simulation:
    """What happened, in seconds from the start of the iteration."""

    makespan: float
    intervals: tuple[Interval, ...]
    num_devices: int

    @property
    def busy(self) -> dict[int, list[Interval]]:
        """The intervals of each device by start."""
        found: dict[int, list[Interval]] = {device: [] for device in range(self.num_devices)}
        for interval in sorted(self.intervals, key=lambda i: i.start):
            for device in interval.devices:
                found[device].append(interval)
        return found

    @property
    def idle_share(self) -> float:
        """Share of all device time without work; switching is not work."""
        work = sum((i.end - i.start) * len(i.devices) for i in self.intervals if i.kind == "work")
        return 1.0 - work / (self.makespan * self.num_devices) if self.makespan else 0.0


def simulate(
    plan: Plan, profile: Profile | None = None, seed: int | None = None, capacity: int | None = None
) -> Simulation:
    """Run one iteration of a plan.

    Args:
        profile: gives the distribution of durations for `seed`. Each call takes the plan's seconds times the mean of
            as many drawn durations as it has items (over their mean), so that small chunks vary more than large ones.
        seed: None: every call takes exactly what the plan says.
        capacity: finished chunks that may wait for each next part of a pipeline (at least 1); its producer blocks
            until there is room. None: any number.

    Raises ValueError for a capacity below 1, or a seed without a profile.
    """
    if capacity is not None and capacity < 1:
        raise ValueError(f"capacity {capacity}: a channel holds at least 1 chunk")
    if seed is not None and profile is None:
        raise ValueError("a seed needs the profile whose durations are drawn")
    rng = None if seed is None else np.random.default_rng(seed)
    run = _Run(profile, rng, capacity)
    makespan = run.node(plan.root, 0.0)
    return Simulation(makespan, tuple(run.intervals), plan.num_devices)


def expected_seconds(plan: Plan, profile: Profile, runs: int = 32) -> float:
    """Of an iteration, with what is spent before and after it: the closed form, or, where the durations of some stage
    differ much, the mean of simulations with drawn durations."""
    names = [member for leaf in leaves(plan.root) for member in leaf.members]
    if all(profile.model(name).durations is None for name in names):
        return plan.predicted_s
    spans = [simulate(plan, profile, seed).makespan for seed in range(runs)]
    return float(np.mean(spans)) + plan.overhead_s


def loop_calls(
    steps: int, groups: int, first_s: Callable[[int], float], second_s: Callable[[int], float], hop_s: float = 0.0
) -> Iterator[tuple[int, int, float, float]]:
    """The calls of a cyclic pair as (0 for the first stage or 1, group, start, end), in order of their start.

    Each group goes through the first stage, then the second, `steps` times; each stage takes the group that has waited
    longest. `first_s(group)` and `second_s(group)` are asked once for each call; `hop_s` is the way there and back.
    """
    waiting: tuple[list[tuple[float, int, int]], ...] = ([(0.0, group, 0) for group in range(groups)], [])
    heapify(waiting[0])
    free = [0.0, 0.0]
    while waiting[0] or waiting[1]:
        starts = [max(free[i], queue[0][0]) if queue else float("inf") for i, queue in enumerate(waiting)]
        stage = 0 if starts[0] <= starts[1] else 1
        _, group, step = heappop(waiting[stage])
        end = starts[stage] + (second_s if stage else first_s)(group)
        yield stage, group, starts[stage], end
        free[stage] = end
        if stage == 0:
            heappush(waiting[1], (end + hop_s / 2, group, step))
        elif step + 1 < steps:
            heappush(waiting[0], (end + hop_s / 2, group, step + 1))


class _Run:
    def __init__(self, profile: Profile | None, rng: np.random.Generator | None, capacity: int | None) -> None:
        self.profile, self.rng, self.capacity = profile, rng, capacity
        self.intervals: list[Interval] = []

    def node(self, node: PlanNode, start: float) -> float:
        """Run a node from `start`; returns when it ends."""
        now = self._switch(node, start, node.onload_s)
        if isinstance(node, Leaf):
            now = self._leaf(node, now)
        elif isinstance(node, Spatial):
            now = self._pipeline(node, now)
        else:
            for part in node.parts:
                now = self.node(part, now)
        return self._switch(node, now, node.offload_s)

    def _switch(self, node: PlanNode, start: float, seconds: float) -> float:
        if seconds:
            self.intervals.append(Interval("switch", node.devices, start, start + seconds, "switch"))
        return start + seconds

    def _leaf(self, leaf: Leaf, start: float) -> float:
        if leaf.loop is not None:
            for _ in range(leaf.loop.waves):
                start = self._wave(leaf.loop, leaf.items / leaf.loop.waves, start)
            return start
        end = start + leaf.call_s * self._factor(leaf.stage, leaf.items)
        self.intervals.append(Interval(leaf.stage, leaf.devices, start, end))
        return end

    def _wave(self, loop: LoopShape, items: float, start: float) -> float:
        in_group = max(1, round(items / loop.groups))
        names, sets = (loop.first, loop.second), (loop.first_devices, loop.second_devices)
        latest = start
        alone = replace(loop, second_devices=()).seconds
        slowdown = loop.seconds / alone if alone else 1.0  # of every call, where the stages share devices
        calls = loop_calls(
            loop.steps,
            loop.groups,
            lambda group: slowdown * loop.first_s * self._factor(loop.first, in_group),
            lambda group: slowdown * loop.second_s * self._factor(loop.second, in_group),
            slowdown * loop.hop_s,
        )
        for stage, _, begin, end in calls:
            self.intervals.append(Interval(names[stage], sets[stage], start + begin, start + end))
            latest = max(latest, start + end)
        return latest

    def _pipeline(self, node: Spatial, start: float) -> float:
        """Part i starts chunk k when it has passed chunk k-1 on and has chunk k of all that it depends on.

        A chunk can be passed on once the consumer has started the chunk `capacity` before it.
        """
        count = len(node.parts)
        consumers = [[j for j in range(count) if i in node.depends[j]] for i in range(count)]
        passed = [start] * count
        starts: list[list[float]] = [[] for _ in range(count)]
        for k in range(node.chunks):
            for i, part in enumerate(node.parts):
                begin = max([passed[i], *(passed[j] for j in node.depends[i])])
                starts[i].append(begin)
                passed[i] = self.node(part, begin)
                if self.capacity is not None and k >= self.capacity:
                    passed[i] = max([passed[i], *(starts[j][k - self.capacity] for j in consumers[i])])
        return max(passed)

    def _factor(self, stage: str, items: int) -> float:
        if self.rng is None or self.profile is None:
            return 1.0
        return self.profile.model(stage).sample_factor(items, self.rng)
