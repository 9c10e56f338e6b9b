"""The simulation against the closed form where that is exact, and what it shows where it is not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.flow import Flow
from scheduler.plan import Plan, device_sets
from scheduler.plan_tree import Leaf, PlanNode, Spatial, Temporal, loop_seconds
from scheduler.profile import Profile, Sample
from scheduler.simulate import Simulation, loop_calls, simulate


def leaf(name: str, seconds: float, *devices: int, items: int = 1) -> Leaf:
    return Leaf(name, items, devices, seconds, (name,), (name,), (0,))


def plan_of(root: PlanNode, devices: int, items: int = 1) -> Plan:
    return Plan("test", items, device_sets(devices), root)


def assert_no_device_does_two_things(simulation: Simulation) -> None:
    for intervals in simulation.busy.values():
        for earlier, later in zip(intervals, intervals[1:], strict=False):
            assert earlier.end <= later.start + 1e-12


times = st.floats(0.01, 10.0)


@settings(max_examples=100, deadline=None)
@given(st.lists(times, min_size=1, max_size=5), st.integers(1, 12), st.none() | st.integers(1, 3))
def test_a_chain_takes_what_the_closed_form_says(seconds: list[float], chunks: int, capacity: int | None) -> None:
    parts = tuple(leaf(f"s{i}", t, i) for i, t in enumerate(seconds))
    depends = tuple((i - 1,) if i else () for i in range(len(parts)))
    plan = plan_of(Spatial(parts, depends, chunks, 1), len(parts), chunks)
    simulation = simulate(plan, capacity=capacity)
    assert simulation.makespan == pytest.approx(sum(seconds) + (chunks - 1) * max(seconds), rel=1e-9)
    assert simulation.makespan == pytest.approx(plan.predicted_s, rel=1e-9)
    assert simulation.idle_share == pytest.approx(plan.idle_share, abs=1e-9)
    assert_no_device_does_two_things(simulation)


@settings(max_examples=100, deadline=None)
@given(times, times, st.integers(1, 8), st.integers(1, 20))
def test_a_loop_takes_what_the_closed_form_says(env: float, policy: float, groups: int, steps: int) -> None:
    ends = [end for *_, end in loop_calls(steps, groups, lambda _: env, lambda _: policy)]
    assert len(ends) == 2 * steps * groups
    assert max(ends) == pytest.approx(float(loop_seconds(steps, groups, env, policy)), rel=1e-9)
    # a round costs max(S e, S p, e + p); what comes on top is less than one pass through both stages
    rounds = steps * max(groups * env, groups * policy, env + policy)
    assert rounds * (1 - 1e-9) <= max(ends) <= rounds + min(env, policy) + 1e-9


def test_a_loop_on_shared_devices_takes_turns() -> None:
    calls = list(loop_calls(3, 1, lambda _: 2.0, lambda _: 1.0))
    assert [start for _, _, start, _ in calls] == [0.0, 2.0, 3.0, 5.0, 6.0, 8.0]
    assert calls[-1][-1] == 9.0


def test_unequal_groups_of_a_loop_are_slower_than_equal_ones() -> None:
    def makespan(env: list[float], policy: list[float]) -> float:
        calls = loop_calls(50, 2, env.__getitem__, policy.__getitem__)
        return max(end for *_, end in calls)

    assert makespan([1.0, 1.0], [1.0, 1.0]) == pytest.approx(101.0)
    assert makespan([1.5, 0.5], [1.5, 0.5]) > 1.2 * 101.0


def test_branches_of_a_pipeline_run_at_once() -> None:
    parts = (leaf("a", 1.0, 0), leaf("b", 3.0, 1), leaf("c", 2.0, 2), leaf("d", 1.0, 3))
    plan = plan_of(Spatial(parts, ((), (0,), (0,), (1, 2)), 4, 1), 4, 4)
    assert plan.predicted_s == pytest.approx((1 + 3 + 1) + 3 * 3)
    assert simulate(plan).makespan == pytest.approx(plan.predicted_s)


def test_the_closed_form_bounds_a_bottleneck_off_the_critical_path() -> None:
    parts = (leaf("slow", 3.0, 0), leaf("b", 2.0, 1), leaf("c", 2.0, 2))
    plan = plan_of(Spatial(parts, ((), (), (1,)), 10, 1), 3, 10)
    assert plan.predicted_s == pytest.approx(4 + 9 * 3)
    assert simulate(plan).makespan == pytest.approx(10 * 3)  # slow alone; b and c are done before


def test_nested_plans_and_switches_add_up() -> None:
    inner = Spatial((leaf("a", 1.0, 0, items=2), leaf("b", 2.0, 1, items=2)), ((), (0,)), 6, 2, 0.5, 0.25, ("a", "b"))
    last = Leaf("c", 6, (0, 1), 4.0, ("c",), ("c",), (0,), onload_s=1.0, offload_s=1.0, moved=("c",))
    plan = plan_of(Temporal((inner, last), swap=True), 2, 6)
    simulation = simulate(plan)
    assert plan.predicted_s == pytest.approx(0.5 + (3 + 2 * 2) + 0.25 + 1 + 4 + 1)
    assert simulation.makespan == pytest.approx(plan.predicted_s)
    assert [(i.label, i.start) for i in simulation.busy[0] if i.kind == "switch"] == [
        ("switch", 0.0),
        ("switch", 7.5),
        ("switch", 7.75),
        ("switch", 12.75),
    ]
    assert simulation.idle_share == pytest.approx(plan.idle_share) == pytest.approx(1 - (3 + 6 + 2 * 4) / (2 * 13.75))
    assert_no_device_does_two_things(simulation)


def long_tail(scoring: float = 0.9) -> tuple[Flow, Flow, Profile]:
    """Generation with log-normal durations feeds scoring: streamed, and after a barrier."""
    flows = []
    for gather in (False, True):
        flow = Flow("tail")
        flow.stage("reward.score", flow.stage("rollout.generate", flow.source("prompts")), gather=gather)
        flows.append(flow)
    tail = tuple(np.exp(np.random.default_rng(0).normal(0.0, 1.0, 500)).tolist())
    profile = Profile()
    for n in (1, 64):
        profile.add(
            Sample("rollout.generate", n, 1, 1.0 * n, durations=tail), Sample("reward.score", n, 1, scoring * n)
        )
    return flows[0], flows[1], profile


def test_elastic_pipelining_hides_most_of_the_scoring_of_a_long_tailed_stage() -> None:
    streamed, barrier, profile = long_tail()
    plans = [Plan.from_placement(flow, {"rollout": [0], "reward": [1]}, profile, 64) for flow in (streamed, barrier)]
    spans = [np.array([simulate(p, profile, seed, capacity=4).makespan for seed in range(40)]) for p in plans]
    assert plans[0].granularity["reward.score"] < 64 == plans[1].granularity["reward.score"]
    assert spans[1].mean() == pytest.approx(64 * 1.9, rel=0.05)
    assert 1.5 < spans[1].mean() / spans[0].mean() < 1.9
    assert spans[0].std() > 0


def test_a_full_channel_holds_its_producer_back() -> None:
    streamed, _, profile = long_tail()
    plan = Plan.from_placement(streamed, {"rollout": [0], "reward": [1]}, profile, 64)
    spans = {c: np.mean([simulate(plan, profile, s, c).makespan for s in range(20)]) for c in (1, 4, None)}
    assert spans[1] >= spans[4] >= spans[None]
    assert spans[1] > spans[None]


def test_a_seed_repeats_and_none_is_the_plan() -> None:
    streamed, _, profile = long_tail()
    plan = Plan.from_placement(streamed, {"rollout": [0], "reward": [1]}, profile, 64)
    assert simulate(plan, profile, seed=3) == simulate(plan, profile, seed=3)
    assert simulate(plan, profile, seed=3).makespan != simulate(plan, profile, seed=4).makespan
    assert simulate(plan, profile).makespan == pytest.approx(plan.predicted_s, rel=1e-9)


def test_wrong_arguments_are_explained() -> None:
    plan = plan_of(leaf("a", 1.0, 0), 1)
    with pytest.raises(ValueError, match="capacity 0: a channel holds at least 1 chunk"):
        simulate(plan, capacity=0)
    with pytest.raises(ValueError, match="a seed needs the profile"):
        simulate(plan, seed=1)
