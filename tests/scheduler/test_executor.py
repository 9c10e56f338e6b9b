"""Flows run on real workers: every item arrives once and in its place, however stages are placed, cut and moved."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from crew import Maker, Taker

from scheduler.cluster import Cluster
from scheduler.executor import Executor
from scheduler.flow import Flow, FlowError
from scheduler.placement import parse_placement
from scheduler.plan import Plan
from scheduler.profile import Profile, Sample
from scheduler.worker import Worker, WorkerDied, WorkerFailed, WorkerGroup

Crew = Callable[..., list[WorkerGroup]]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)  # where workers find the crew
        with Cluster(cpu_slots=2, timeout_s=60) as started:
            yield started


@pytest.fixture
def crew(cluster: Cluster) -> Iterator[Crew]:
    """Starts groups; they end with the test."""
    started: list[WorkerGroup] = []

    def start(**wanted: tuple[type[Worker], str]) -> list[WorkerGroup]:
        text = "; ".join(f"{name}: {devices}" for name, (_, devices) in wanted.items())
        placed = parse_placement(text, 2, list(wanted))
        started.extend(cluster.start(name, kind, placed[name]) for name, (kind, _) in wanted.items())
        return started

    yield start
    cluster.end(started)


def chain(maker: Any, taker: Any, method: str = "double", name: str = "chain") -> Flow:
    flow = Flow(name)
    made = flow.stage(getattr(maker, method), flow.source("numbers"))
    flow.stage(taker.gather, made, gather=True)
    return flow


def test_a_call_that_gives_nothing_does_not_end_a_broadcast(crew: Crew) -> None:
    maker, taker = crew(maker=(Maker, "0"), taker=(Taker, "all/1"))
    flow = Flow("some news")
    made = flow.stage(maker.odd, flow.source("numbers"))
    flow.stage(taker.hear, made, gather=True, broadcast=True)
    done = Executor(flow, items=4).iterate({"numbers": range(4)})
    assert done.reports["taker.hear"] == [(0, [1, 3]), (1, [1, 3])]


@pytest.mark.parametrize("places", [("all", "all"), ("0", "1"), ("all/1", "0"), ("all/1", "all/1")])
def test_every_item_arrives_once_and_in_order(crew: Crew, places: tuple[str, str]) -> None:
    maker, taker = crew(maker=(Maker, places[0]), taker=(Taker, places[1]))
    executor = Executor(chain(maker, taker), items=10)
    for iteration, granularity in enumerate((1, 3, 10)):
        executor.cut({}, {"maker.double": granularity})
        done = executor.iterate({"numbers": range(10)})
        ranks = done.reports["taker.gather"]
        assert [report[0] for report in ranks] == [iteration] * len(taker)
        shares = [[2 * n for n in range(10) if n % len(taker) == rank] for rank in range(len(taker))]
        assert [report[1] for report in ranks] == shares
        assert done.outputs["taker.gather"] == [sum(share) for share in shares]
    assert sum(maker.count().result()) == 30


def test_a_generator_passes_items_on_before_it_is_done(crew: Crew, tmp_path: Path) -> None:
    maker, taker = crew(maker=(Maker, "0"), taker=(Taker, "1"))
    flow = Flow("elastic")
    flow.stage(taker.take, flow.stage(maker.one_by_one, flow.source("numbers"), granularity=5))
    arguments = {"maker.one_by_one": (tmp_path,), "taker.take": (tmp_path,)}
    done = Executor(flow, items=5).iterate({"numbers": range(5)}, arguments)
    assert done.outputs["taker.take"] == [0, 2, 4, 6, 8]


def test_none_drops_an_item_and_inputs_are_matched_by_number(crew: Crew) -> None:
    maker, taker = crew(maker=(Maker, "0"), taker=(Taker, "all/1"))
    flow = Flow("pairs")
    numbers = flow.source("numbers")
    flow.stage(taker.pair, flow.stage(maker.odd, numbers), flow.stage(maker.double, numbers))
    done = Executor(flow, items=9).iterate({"numbers": range(9)})
    assert done.outputs["taker.pair"] == [(n, 2 * n) for n in range(9) if n % 2]


def test_a_broadcast_reaches_every_rank(crew: Crew) -> None:
    maker, taker = crew(maker=(Maker, "0"), taker=(Taker, "all/1"))
    flow = Flow("news")
    made = flow.stage(maker.double, flow.source("numbers"))
    flow.stage(taker.hear, made, gather=True, broadcast=True)
    done = Executor(flow, items=3).iterate({"numbers": range(3)})
    assert done.reports["taker.hear"] == [(0, [0, 2, 4]), (1, [0, 2, 4])]


@pytest.mark.parametrize("places", [("all", "all"), ("0", "all/1"), ("all/1", "1")])
def test_a_loop_serves_every_group_of_every_rank(crew: Crew, places: tuple[str, str]) -> None:
    env, policy = crew(env=(Taker, places[0]), policy=(Taker, places[1]))
    flow = Flow("loop")
    flow.loop(env.step, policy.act, steps=4, items=6, pipeline=(1, 2, 3))
    executor = Executor(flow, items=6)
    for groups in (1, 2, 3):
        executor.cut({"env.step <> policy.act": groups}, {})
        done = executor.iterate(arguments={"env.step": (10,)})
        assert done.reports["env.step"] == [sum(10 + group + 4 for group in range(groups))] * len(env)
        assert sum(done.reports["policy.act"]) == 4 * groups * len(env)


def test_what_fails_is_named_and_nothing_hangs(crew: Crew) -> None:
    maker, taker = crew(maker=(Maker, "0"), taker=(Taker, "1"))
    with pytest.raises(WorkerFailed, match=r"(?s)maker\[0\] failed: ValueError: broken gripper.*in fail"):
        Executor(chain(maker, taker, "fail", "failing"), items=3).iterate({"numbers": range(3)})
    executor = Executor(chain(maker, taker, "too_few", "short"), items=3)
    executor.cut({}, {"maker.too_few": 3})
    with pytest.raises(WorkerFailed, match="maker.too_few was given 3 items and returned 2; None drops one"):
        executor.iterate({"numbers": range(3)})


def test_items_for_other_sources_are_refused(crew: Crew) -> None:
    maker, taker = crew(maker=(Maker, "0"), taker=(Taker, "1"))
    executor = Executor(chain(maker, taker), items=3)
    with pytest.raises(FlowError, match=r"has the sources \['numbers'\], and items came for \['prompts'\]"):
        executor.iterate({"prompts": range(3)})
    with pytest.raises(FlowError, match="'maker.double' has no worker"):
        flow = Flow("names")
        flow.stage("maker.double", flow.source("numbers"))
        Executor(flow, items=3)


def profile(costs: dict[str, float]) -> Profile:
    return Profile().add(*(Sample(name, 8, 1, seconds) for name, seconds in costs.items()))


def test_moved_workers_take_their_state_along(crew: Crew) -> None:
    maker, taker = crew(maker=(Maker, "all"), taker=(Taker, "all"))
    flow = chain(maker, taker, name="moving")
    executor, known = Executor(flow, items=8), profile({"maker.double": 1.0, "taker.gather": 1.0})
    seen = []
    for placement in ({"maker": [0], "taker": [1]}, {"maker": [1], "taker": [1]}, {"maker": [0, 1], "taker": [0, 1]}):
        plan = Plan.from_placement(flow, placement, known, 8, 2)
        before = [location.pid for location in maker.locations]
        executor.apply(plan)
        assert executor.placement == {name: tuple(devices) for name, devices in placement.items()}
        assert executor.moves(plan) == {}
        assert [location.pid for location in maker.locations] != before
        seen.append(executor.iterate({"numbers": range(8)}).outputs["taker.gather"])
    assert seen == [[56]] * 3
    assert maker.count().result() == [24]


def test_a_plan_leaves_the_ranks_of_groups_that_stay(crew: Crew) -> None:
    maker, taker = crew(maker=(Maker, "all/1"), taker=(Taker, "0"))
    flow = chain(maker, taker, name="staying")
    plan = Plan.from_placement(
        flow, {"maker": [0, 1], "taker": [0]}, profile({"maker.double": 1, "taker.gather": 1}), 8, 2
    )
    executor = Executor(flow, items=8, plan=plan)
    assert executor.moves(plan) == {} and len(maker) == 2
    assert executor.iterate({"numbers": range(8)}).outputs["taker.gather"] == [56]


def test_stages_on_the_same_devices_take_turns(crew: Crew) -> None:
    maker, taker = crew(maker=(Maker, "0"), taker=(Taker, "0"))
    flow = Flow("turns")
    flow.stage(taker.slowly, flow.stage(maker.slowly, flow.source("numbers")))
    done = Executor(flow, items=6).iterate({"numbers": range(6)}, {"maker.slowly": (0.02,), "taker.slowly": (0.02,)})
    assert done.outputs["taker.slowly"] == [0, 2, 4, 6, 8, 10]
    events = [event for group in (maker, taker) for event in group.drain_trace().result()[0]]
    work = sorted((e.start, e.end) for e in events if e.category == "work" and e.end - e.start > 0.005)
    assert len(work) == 12
    assert all(end <= start for (_, end), (start, _) in zip(work, work[1:], strict=False))


def test_calls_are_measured(crew: Crew) -> None:
    maker, taker = crew(maker=(Maker, "all"), taker=(Taker, "1"))
    flow = chain(maker, taker, "slowly", "measured")
    executor = Executor(flow, items=28)
    executor.cut({}, {"maker.slowly": 4})
    done = executor.iterate({"numbers": range(28)}, {"maker.slowly": (0.05,)})  # seven calls: their mean
    samples = {sample.stage: sample for sample in done.samples}
    made = samples["maker.slowly"]
    assert (made.items, made.devices) == (4, 2)
    assert 0.2 <= made.seconds < 0.3, "the time it would have taken alone, however busy the machine is"
    assert 0.4 < made.busy < 0.6, "one thread on two cores"
    assert (samples["taker.gather"].items, samples["taker.gather"].devices) == (28, 1)
    assert made.memory_bytes > 10 * 2**20


def test_a_dead_worker_ends_the_iteration_with_its_name(cluster: Cluster) -> None:
    placed = parse_placement("maker: 0; taker: 1", 2, ["maker", "taker"])
    with Cluster(cpu_slots=2, timeout_s=60) as own:  # a run does not go on after a death
        maker, taker = own.start("maker", Maker, placed["maker"]), own.start("taker", Taker, placed["taker"])
        executor = Executor(chain(maker, taker, "slowly", "dying"), items=1)
        threading.Timer(0.5, os.kill, (maker.locations[0].pid, signal.SIGKILL)).start()
        with pytest.raises(WorkerDied, match=r"maker\[0\] died"):
            executor.iterate({"numbers": range(1)}, {"maker.slowly": (60.0,)})
