"""Runs a flow, and keeps it on the best plan that its measurements know of.

    run(flow, plan)                                   # from a plan, which a better one may replace
    run(flow, items=512, iterations=100)              # planned from what the first iterations measure

The first iteration warms up. The next ones try a few batch sizes, by the pipeline groups of loops and the items in
each call of stages, unless the profile has them already or a plan was given. From there on the plan is made anew before
every iteration. It replaces the running one if what it saves in the iterations that are left is more than what moving
costs. A plan that has been run is judged by how long it took, not by what was predicted of it.
"""

from __future__ import annotations

import logging
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scheduler.executor import Executor, Iteration
from scheduler.flow import Flow
from scheduler.plan import Plan, granularities, make_plan
from scheduler.profile import Profile
from scheduler.simulate import expected_seconds

logger = logging.getLogger(__name__)
LEAST_GAIN = 0.05  # of an iteration; less is within the spread of timings
SAME = 0.02  # share by which times of plans must differ to be told apart
REMEMBERED = 5  # iterations by which a plan is judged

Signature = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Replan:
    """A change of plan before an iteration: why, and the seconds it took."""

    iteration: int
    plan: Plan
    reason: str
    seconds: float


class Schedule:
    """Measures, plans and re-plans the flow of an executor.

    Args:
        profile: what is known; measurements are added.
        fixed: groups stay where they are; only how loops are cut and what goes on in chunks is planned.
        memory_per_device: bytes; None: what the GPUs have; on a CPU it is no constraint.
        accepts: whether the workers can run a plan (their items may not divide among any number of ranks).
    """

    def __init__(
        self,
        executor: Executor,
        profile: Profile,
        fixed: bool = False,
        memory_per_device: int | None = None,
        accepts: Callable[[Plan], bool] = lambda plan: True,
    ) -> None:
        self.executor, self.profile, self.fixed, self.memory = executor, profile, fixed, memory_per_device
        self._accepts = accepts
        self.changes: list[Replan] = []
        self._trials = [] if executor.plan else self._untried()
        self._tried: dict[Signature, Plan] = {}
        self._seconds: dict[Signature, deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
        self._warm = self._switches_known = False

    def iterate(
        self,
        sources: Mapping[str, Sequence[Any]] | None = None,
        arguments: Mapping[str, tuple[Any, ...]] | None = None,
        left: float = float("inf"),
    ) -> tuple[Iteration, dict[str, float]]:
        """Choose the plan, run an iteration under it, and take in what it measured.

        Args:
            sources, arguments: as in `Executor.iterate`.
            left: iterations that will be run, this one included.

        Returns the iteration and its metrics: `schedule/measured_s` and, once there is a plan, `schedule/predicted_s`
        and `schedule/error` (measured over predicted, less 1).
        """
        self._choose(left)
        plan, warm = self.executor.plan, self._warm
        done = self.executor.iterate(sources, arguments)
        metrics = {"schedule/measured_s": done.seconds}
        if plan is not None and warm:
            predicted = expected_seconds(plan, self.profile)
            metrics |= {"schedule/predicted_s": predicted, "schedule/error": done.seconds / predicted - 1.0}
        if warm:
            self._seconds[self._running()].append(done.seconds)
            self.profile.add(*done.samples)
            self.profile.hops |= done.hops
            self.profile.overhead_s = done.overhead_s
        self._warm = True
        return done, metrics

    # ------------------------------------------------------------------------------------------ choosing

    def _choose(self, left: float) -> None:
        if self._warm and self._trials:
            self.executor.cut(*self._trials.pop(0))
            return
        if not self._warm:
            return
        if missing := set(self.executor.flow.calls()) - set(self.profile.samples):
            if self.executor.number == 2:  # the iteration after the first that was measured
                names = ", ".join(sorted(missing))
                logger.warning("no plan can be made: nothing was measured of %s (see Link.call)", names)
            return
        if not self._switches_known:
            self._measure_switches()
        best = self._planned()
        if self.executor.plan is None:
            self._change(self._first(best), "the first that could be planned from measurements")
        current = self._refresh(self.executor.plan)
        candidates = [
            current,
            *([best] if self._accepts(best) else []),
            self._planned(fixed=True),
            *(plan.repriced(self.profile) for plan in self._tried.values()),
        ]
        chosen = self._cheapest(candidates, current)
        now, then = self._score(current, current), self._score(chosen, current)
        moves = self.executor.moves(chosen)
        cost = sum(self.executor.groups[name].start_s for name in moves)
        if signature(chosen) == signature(current) or now - then < LEAST_GAIN * now or (now - then) * left < cost:
            return
        price = f"; moving {', '.join(moves)} takes about {cost:.2g} s" if moves else ""
        self._change(chosen, f"{then:.3g} s an iteration instead of {now:.3g} s{price}")

    def _cheapest(self, plans: Sequence[Plan], current: Plan) -> Plan:
        """The quickest plan; of those that are as quick, to what can be told, the one that moves the fewest groups."""
        scores = [self._score(plan, current) for plan in plans]
        as_quick = [plan for plan, score in zip(plans, scores, strict=True) if score <= (1 + SAME) * min(scores)]
        return min(as_quick, key=lambda plan: len(self.executor.moves(plan)))

    def _first(self, best: Plan) -> Plan:
        """The plan to begin with: where groups are, and of the loop cuts that were tried the one that was quickest."""
        here = best if self.fixed else self._planned(fixed=True)
        loops = [node for node in self.executor.flow.stages() if node.kind == "loop"]
        cut = [here.with_groups(node.name, groups) for node in loops for groups in node.pipeline]
        return min([here, *(plan.repriced(self.profile) for plan in cut)], key=lambda plan: self._score(plan, here))

    def _running(self) -> Signature:
        """Of what the executor runs now."""
        executor, granularity = self.executor, dict[str, int]()
        for node in executor.flow.stages():
            whole = node.gather or node.kind == "loop"
            names = [node.name] if node.kind == "stage" else [call.name for call in node.calls]
            granularity |= dict.fromkeys(names, executor.items if whole else executor.granularity[node.name])
        return _signature(executor.placement, executor.loop_groups, granularity)

    def _measure_switches(self) -> None:
        """How much memory there is, and what it costs the groups that can to make room for others."""
        for name, group in self.executor.groups.items():
            sizes = [size for size in group.device_memory().result(self.executor.timeout_s) if size is not None]
            if self.memory is None and sizes:
                self.memory = min(sizes)
            ranks = [rank for rank in group.measure_switch().result(self.executor.timeout_s) if rank is not None]
            if ranks:
                held, offload_s, onload_s = (max(values) for values in zip(*ranks, strict=True))
                self.profile.add_group(name, held, offload_s, onload_s)
        self._switches_known = True

    def _planned(self, fixed: bool = False) -> Plan:
        flow, items, there = self.executor.flow, self.executor.items, self.executor.cluster
        if fixed or self.fixed:
            return Plan.from_placement(flow, self.executor.placement, self.profile, items, there, self.memory)
        return make_plan(flow, self.profile, there, items, self.memory)

    def _refresh(self, plan: Plan | None) -> Plan:
        """The running plan with the newest prediction."""
        assert plan is not None
        self.executor.plan = plan.repriced(self.profile)
        return self.executor.plan

    def _score(self, plan: Plan, current: Plan) -> float:
        """Seconds of an iteration: measured, or predicted and off by as much as the current plan's prediction."""
        if known := self._seconds.get(signature(plan)):
            return statistics.median(known)
        measured = self._seconds.get(signature(current))
        return plan.predicted_s * (statistics.median(measured) / current.predicted_s if measured else 1.0)

    def _change(self, plan: Plan, reason: str) -> None:
        self._warm = not self.executor.moves(plan)
        seconds = self.executor.apply(plan)
        self._tried[signature(plan)] = plan
        self.changes.append(Replan(self.executor.number, plan, reason, seconds))
        logger.info("new plan before iteration %d: %s\n%s", self.executor.number + 1, reason, plan)

    def _untried(self) -> list[tuple[dict[str, int], dict[str, int]]]:
        """Cuts of loops and batch sizes of stages to measure, at most three of each, those left out that are known."""
        wanted: dict[str, list[int]] = {}
        known = {name: {sample.items for sample in samples} for name, samples in self.profile.samples.items()}
        items = self.executor.items
        for node in self.executor.flow.stages():
            if node.kind == "loop":
                choices = _spread(node.pipeline or (self.executor.loop_groups[node.name],))
                wanted[node.name] = [s for s in choices if items // s not in known.get(node.calls[0].name, ())]
            else:
                sizes = (
                    [items] if node.gather else _spread([m for m in granularities(items) if m % node.granularity == 0])
                )
                wanted[node.name] = [m for m in sizes if m not in known.get(node.name, ())]
        trials = max(map(len, wanted.values()))
        loops = self.executor.loop_groups
        each = [
            {name: values[min(i, len(values) - 1)] for name, values in wanted.items() if values} for i in range(trials)
        ]
        return [
            ({n: v for n, v in cuts.items() if n in loops}, {n: v for n, v in cuts.items() if n not in loops})
            for cuts in each
        ]


def signature(plan: Plan) -> Signature:
    """What makes plans different when they run."""
    return _signature(plan.placement, plan.loop_groups, plan.granularity)


def _signature(placement: Mapping[str, Any], groups: Mapping[str, int], granularity: Mapping[str, int]) -> Signature:
    return tuple(sorted([*placement.items(), *groups.items(), *granularity.items()], key=str))


def _spread(values: Sequence[int]) -> list[int]:
    """The first, the last and one between."""
    return sorted({values[0], values[len(values) // 2], values[-1]})


def run(
    flow: Flow,
    plan: Plan | None = None,
    iterations: int = 1,
    items: int | None = None,
    sources: Mapping[str, Sequence[Any]] | None = None,
    profile: Profile | None = None,
    memory_per_device: int | None = None,
    replan: bool = True,
) -> list[Iteration]:
    """Run a flow for some iterations, planned and re-planned from what they measure.

    Args:
        plan: to begin with; None: the best that the first iterations or the profile know of.
        items: of one iteration; default: the plan's, or the number of the items of the first source.
        sources: the items of each source, the same in every iteration.
        profile: of earlier runs; measurements are added to it.
        replan: whether another plan may replace the given one.

    Raises what `Executor` and `Executor.iterate` raise, and PlanError where there is no plan that memory allows.
    """
    if items is None:
        items = plan.items if plan else max(map(len, (sources or {}).values()), default=0)
    executor = Executor(flow, items, plan)
    if plan is not None and not replan:
        return [executor.iterate(sources) for _ in range(iterations)]
    schedule = Schedule(executor, profile or Profile(), memory_per_device=memory_per_device)
    return [schedule.iterate(sources, left=iterations - i)[0] for i in range(iterations)]
