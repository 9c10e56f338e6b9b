"""A running flow measures itself, is planned from that, and moves where that pays."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from crew import Heavy, Maker, Taker

from scheduler.cluster import Cluster
from scheduler.execute import Schedule, run
from scheduler.executor import Executor
from scheduler.flow import Flow
from scheduler.placement import parse_placement
from scheduler.plan import Plan, make_plan
from scheduler.profile import Profile, Sample
from scheduler.worker import WorkerGroup

ARGUMENTS: dict[str, tuple[Any, ...]] = {"maker.slowly": (0.05,), "taker.slowly": (0.05,)}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)  # where workers find the crew
        with Cluster(cpu_slots=2, timeout_s=60) as started:
            yield started


@pytest.fixture
def groups(cluster: Cluster) -> Iterator[tuple[WorkerGroup, WorkerGroup]]:
    """Two groups on both slots."""
    placed = parse_placement("maker, taker: all", 2, ["maker", "taker"])
    maker, taker = cluster.start("maker", Maker, placed["maker"]), cluster.start("taker", Taker, placed["taker"])
    yield maker, taker
    cluster.end([maker, taker])


def two_stages(groups: tuple[WorkerGroup, WorkerGroup]) -> Flow:
    flow = Flow("two stages")
    made = flow.stage(groups[0].slowly, flow.source("numbers"))
    flow.stage(groups[1].slowly, made)
    return flow


def test_a_flow_is_measured_planned_and_moved_where_that_pays(groups: tuple[WorkerGroup, WorkerGroup]) -> None:
    executor, profile = Executor(two_stages(groups), items=8), Profile()
    schedule = Schedule(executor, profile)
    for number in range(7):
        done, metrics = schedule.iterate({"numbers": range(8)}, ARGUMENTS)
        assert done.outputs["taker.slowly"] == [2 * n for n in range(8)]
        if number < 4:
            assert "schedule/predicted_s" not in metrics, "nothing to predict from"
    assert {sample.items for sample in profile.samples["maker.slowly"]} >= {1, 8}, "a few batch sizes were tried"
    first, moved = schedule.changes[:2]
    assert first.plan.placement == {"maker": (0, 1), "taker": (0, 1)}
    assert moved.plan.placement in ({"maker": (0,), "taker": (1,)}, {"maker": (1,), "taker": (0,)})
    assert "moving" in moved.reason and moved.plan.root.seconds < 0.75 * first.plan.root.seconds
    assert moved.plan.root.seconds == pytest.approx(0.45, rel=0.2), "both at work at once"
    assert sum(groups[0].count().result()) == 7 * 8, "its state went with it"


def test_no_move_for_what_is_left_of_a_short_run(groups: tuple[WorkerGroup, WorkerGroup]) -> None:
    schedule = Schedule(Executor(two_stages(groups), items=8), Profile())
    for group in groups:
        group.start_s = 60.0  # more than any iteration takes, however busy the machine is
    for left in range(6, 0, -1):
        schedule.iterate({"numbers": range(8)}, ARGUMENTS, left=left)
    assert len(schedule.changes) == 1
    assert schedule.executor.placement == {"maker": (0, 1), "taker": (0, 1)}


def test_a_fixed_placement_stays(groups: tuple[WorkerGroup, WorkerGroup]) -> None:
    schedule = Schedule(Executor(two_stages(groups), items=8), Profile(), fixed=True)
    for _ in range(6):
        overhead_s = schedule.profile.overhead_s
        _, metrics = schedule.iterate({"numbers": range(8)}, ARGUMENTS)
    assert schedule.executor.placement == {"maker": (0, 1), "taker": (0, 1)}
    assert metrics["schedule/predicted_s"] - overhead_s == pytest.approx(0.8, rel=0.1)


def test_a_known_profile_needs_no_trials_and_a_measured_plan_is_judged_by_its_time(
    groups: tuple[WorkerGroup, WorkerGroup],
) -> None:
    flow, profile = two_stages(groups), Profile()
    schedule = Schedule(Executor(flow, items=8), profile)
    for _ in range(6):
        schedule.iterate({"numbers": range(8)}, ARGUMENTS)
    again = Schedule(Executor(flow, items=8), profile)  # another run, later
    for number in range(3):
        _, metrics = again.iterate({"numbers": range(8)}, ARGUMENTS)
        assert ("schedule/predicted_s" in metrics) == (number > 0)
    assert [change.iteration for change in again.changes] == [1]
    current = again.executor.plan
    assert current is not None
    again._seconds[next(iter(again._seconds))].extend([0.01] * 5)  # it turned out much faster than was predicted
    assert again._score(current, current) == pytest.approx(0.01)


def test_run_from_a_plan_and_without(groups: tuple[WorkerGroup, WorkerGroup]) -> None:
    flow = Flow("run")
    made = flow.stage(groups[0].double, flow.source("numbers"))
    flow.stage(groups[1].gather, made, gather=True)
    profile = Profile()
    for iteration in run(flow, iterations=5, sources={"numbers": range(8)}, profile=profile):
        assert iteration.outputs["taker.gather"] == [56]
    plan = Plan.from_placement(flow, {"maker": [1], "taker": [0]}, profile, 8, 2)
    for iteration in run(flow, plan, iterations=2, sources={"numbers": range(8)}, replan=False):
        assert iteration.outputs["taker.gather"] == [56]
    assert (groups[0].placement.devices, groups[1].placement.devices) == ((1,), (0,))


def test_what_making_room_costs_is_measured(cluster: Cluster) -> None:
    placed = parse_placement("maker, taker: all", 2, ["maker", "taker"])
    maker, taker = cluster.start("maker", Heavy, placed["maker"]), cluster.start("taker", Taker, placed["taker"])
    flow, profile = Flow("heavy"), Profile()
    flow.stage(taker.gather, flow.stage(maker.double, flow.source("numbers")), gather=True)
    run(flow, iterations=5, sources={"numbers": range(4)}, profile=profile)
    assert set(profile.switches) == {"maker"}, "the other has nothing to put aside"
    assert profile.switches["maker"].offload_s > 0.04 and profile.switches["maker"].onload_s > 0.09
    assert 50 << 20 < profile.resident_bytes["maker"] < 80 << 20
    cluster.end([maker, taker])


def test_groups_that_do_not_fit_together_make_room_for_each_other(cluster: Cluster) -> None:
    placed = parse_placement("maker, other: 0", 2, ["maker", "other"])
    maker, other = cluster.start("maker", Heavy, placed["maker"]), cluster.start("other", Heavy, placed["other"])
    flow = Flow("swap")
    flow.stage(other.double, flow.stage(maker.slowly, flow.source("numbers"), gather=False))
    profile = Profile().add(*(Sample(name, 4, 1, 0.1, 100 << 20) for name in flow.calls()))
    for name in ("maker", "other"):
        profile.add_group(name, 64 << 20, 0.05, 0.1)
    plan = make_plan(flow, profile, [("cpu", 1)], 4, memory_per_device=120 << 20)
    for iteration in run(flow, plan, iterations=2, sources={"numbers": range(4)}, replan=False):
        assert iteration.outputs["other.double"] == [0, 4, 8, 12]
    events = [event for group in (maker, other) for event in group.drain_trace().result()[0]]
    moves = sorted((event.start, event.track, event.name) for event in events if event.category == "switch")
    assert [(track, name) for _, track, name in moves][:3] == [
        ("maker[0]", "offload"), ("other[0]", "offload"), ("maker[0]", "onload"),
    ]  # fmt: skip
    cluster.end([maker, other])


def test_cuts_of_a_loop_that_were_tried_are_judged_by_their_time(cluster: Cluster) -> None:
    placed = parse_placement("env, policy: all", 2, ["env", "policy"])
    env, policy = (cluster.start(name, Taker, placed[name]) for name in ("env", "policy"))
    flow = Flow("cuts")
    flow.loop(env.step, policy.act, steps=20, items=4, pipeline=(1, 2, 4))
    schedule = Schedule(Executor(flow, items=4), Profile(), fixed=True)
    for _ in range(4):  # one to warm up, one for each cut
        schedule.iterate()
    assert len(schedule._seconds) == 3
    quickest = min(schedule._seconds, key=lambda key: schedule._seconds[key][0])
    schedule.iterate()
    assert schedule.executor.plan is not None
    assert schedule._running() == quickest
    cluster.end([env, policy])
