"""Workers and groups in real Ray actors: calls, messages, and what a failure does to the others."""

import copy
import importlib
import os
import pickle
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ends import wait_until
from probes import Probe

from scheduler.channel import Channel
from scheduler.cluster import Cluster
from scheduler.placement import GroupPlacement
from scheduler.worker import Handle, WorkerDied, WorkerFailed, WorkerGroup, wait_all
from scheduler.worker_process import visible_gpus

SOON = 60.0  # a bound for "does not hang" on a busy machine


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)  # where workers find `Probe`
        with Cluster(cpu_slots=2):
            yield


@pytest.fixture
def cluster(ray_here: None) -> Iterator[Cluster]:
    with Cluster(cpu_slots=2, timeout_s=60.0) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def shared(ray_here: None) -> Iterator[tuple[Cluster, WorkerGroup]]:
    """Two ranks for the tests that leave them as they were."""
    with Cluster(cpu_slots=2, timeout_s=60.0) as cluster:
        yield cluster, start(cluster, ranks=2)


@pytest.fixture
def group(shared: tuple[Cluster, WorkerGroup]) -> WorkerGroup:
    return shared[1]


@pytest.fixture
def channel(shared: tuple[Cluster, WorkerGroup], request: pytest.FixtureRequest) -> Channel:
    """A channel of the test's own that the shared ranks fill."""
    return shared[0].channel(request.node.name, producers=shared[1])


def start(cluster: Cluster, ranks: int = 1, name: str = "probe", **kwargs: Any) -> WorkerGroup:
    return cluster.start(name, Probe, GroupPlacement(name, tuple((i % 2,) for i in range(ranks))), **kwargs)


# ---------------------------------------------------------------------------------------------- calls


def test_a_call_runs_on_every_rank_and_returns_by_rank(group: WorkerGroup) -> None:
    assert len(group) == 2
    assert group.about().result(SOON) == [(0, 2, (0,)), (1, 2, (1,))]
    assert group.echo(1, a=2).result(SOON) == [((1,), {"a": 2})] * 2


def test_a_sharded_call_gives_each_rank_its_own_arguments(group: WorkerGroup) -> None:
    assert group.echo.sharded([((1,), {}), ((2,), {"b": 3})]).result(SOON) == [((1,), {}), ((2,), {"b": 3})]
    with pytest.raises(ValueError, match="probe has 2 ranks, but 1 shards were given"):
        group.echo.sharded([((1,), {})])


def test_a_method_that_is_not_there_is_named(group: WorkerGroup) -> None:
    with pytest.raises(AttributeError, match="Probe has no method 'ehco'"):
        group.ehco()


def test_a_handle_tells_when_every_rank_is_done(group: WorkerGroup, tmp_path: Path) -> None:
    handle = group.wait_for.sharded([((None,), {}), ((tmp_path / "end",), {})])
    Handle(group, handle.refs[:1]).wait(SOON)
    assert not handle.done()
    (tmp_path / "end").touch()
    handle.wait(SOON)
    assert handle.done()


def test_a_call_that_takes_too_long_names_the_ranks_at_work(group: WorkerGroup, tmp_path: Path) -> None:
    handle = group.wait_for.sharded([((None,), {}), ((tmp_path / "end",), {})])
    Handle(group, handle.refs[:1]).wait(SOON)
    with pytest.raises(TimeoutError, match=r"waited 0.5 s for probe\[1\]$"):
        handle.wait(0.5)
    (tmp_path / "end").touch()
    handle.wait(SOON)


def test_a_worker_runs_on_the_core_of_its_slot(group: WorkerGroup) -> None:
    usable = sorted(os.sched_getaffinity(0))
    assert group.cores().result(SOON) == [{usable[rank % len(usable)]} for rank in range(2)]


def test_a_ranks_own_gpus_come_first_among_those_the_process_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-1f2e,7")
    assert visible_gpus((1, 2)) == "GPU-1f2e,7,4"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr("scheduler.worker_process.local_device_count", lambda: (4, "gpu"))
    assert visible_gpus((2,)) == "2,0,1,3"


def test_workers_send_to_each_other_by_name(group: WorkerGroup) -> None:
    sent = {"image": np.arange(50_000), "step": 3}
    for got in group.pass_on(sent).result(SOON):
        assert got["step"] == 3 and np.array_equal(got["image"], sent["image"])


def test_a_message_that_does_not_come_is_named_with_its_sender(group: WorkerGroup) -> None:
    with pytest.raises(
        WorkerFailed,
        match=r"channel 'mail/probe\[\d\]' \(key 'env\[0\]'\).* filled by env\[0\] ",
    ):
        group.receive_from("env[0]").wait(SOON)


def test_arrays_stream_through_a_worker(shared: tuple[Cluster, WorkerGroup]) -> None:
    cluster, group = shared
    source = cluster.channel("source", 2, consumers=group)
    target = cluster.channel("target", 2, producers=group)
    handle = group.scale.sharded([((source, target, 2), {}), ((source, target, 2), {})])
    arrays = [np.full(50_000, i) for i in range(40)]

    def feed() -> None:
        for array in arrays:
            source.put(array)
        source.close()

    feeder = threading.Thread(target=feed)
    feeder.start()
    got = [target.get(timeout=SOON) for _ in arrays]
    assert sorted(int(array[0]) for array in got) == [2 * i for i in range(40)]
    assert all((array == array[0]).all() for array in got)
    handle.wait(SOON)
    feeder.join(SOON)


def test_a_worker_hands_its_timeline_over(group: WorkerGroup) -> None:
    group.drain_trace().wait(SOON)
    group.work().wait(SOON)
    assert [[(event.track, event.name) for event in rank] for rank in group.drain_trace().result(SOON)] == [
        [("probe[0]", "work")],
        [("probe[1]", "work")],
    ]


# ---------------------------------------------------------------------------------------------- exceptions


def test_a_workers_exception_comes_with_its_name_and_traceback(group: WorkerGroup, tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed) as caught:
        group.fail.sharded([(("later",), {"once": tmp_path / "end"}), (("broken gripper",), {})]).wait(SOON)
    (tmp_path / "end").touch()
    assert caught.value.worker == "probe[1]"
    assert caught.value.summary == "failed: ValueError: broken gripper"
    assert "raise ValueError(text)" in str(caught.value)


def test_a_group_that_failed_can_be_called_again(group: WorkerGroup, channel: Channel) -> None:
    with pytest.raises(WorkerFailed):
        group.fail("once").wait(SOON)
    group.put(channel, 1).wait(SOON)
    assert channel.get(n=2, timeout=SOON) == [0, 0]


def test_a_result_that_cannot_be_pickled_is_a_failure_of_its_worker(group: WorkerGroup) -> None:
    with pytest.raises(WorkerFailed, match=r"(?s)probe\[\d\] .*cannot pickle"):
        group.unpicklable().wait(SOON)


def test_who_waits_for_a_worker_that_failed_is_released(group: WorkerGroup, channel: Channel) -> None:
    with pytest.raises(WorkerFailed) as caught:
        group.fail_on_rank(1, channel).wait(SOON)
    assert caught.value.worker == "probe[1]" and "broken gripper" in caught.value.summary
    assert group.echo().result(SOON) == [((), {})] * 2


def test_the_cause_is_raised_when_only_the_one_that_waits_is_awaited(group: WorkerGroup, channel: Channel) -> None:
    whole = group.fail_on_rank(1, channel)
    with pytest.raises(WorkerFailed) as caught:
        Handle(group, whole.refs[:1]).wait(SOON)
    assert caught.value.worker == "probe[1]" and "broken gripper" in str(caught.value)


def test_a_producers_exception_is_raised_where_its_items_are_read(group: WorkerGroup, channel: Channel) -> None:
    group.put(channel, 3, then_fail=True)
    with pytest.raises(WorkerFailed, match=r"probe\[\d\] failed: ValueError: broken camera"):
        while True:
            channel.get(timeout=SOON)


def test_a_producer_that_fails_before_its_first_item_closes_its_channel(group: WorkerGroup, channel: Channel) -> None:
    group.put(channel, 0, then_fail=True)
    with pytest.raises(WorkerFailed, match="broken camera"):
        channel.get(timeout=SOON)


def test_a_time_out_is_not_the_first_cause_while_there_is_another(
    group: WorkerGroup, channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler.worker.SETTLE_S", SOON)
    impatient = Handle(group, group.get(channel, 0.1).refs[:1])
    slow = Handle(group, group.fail("lost the cube", after=0.5).refs[1:])
    with pytest.raises(WorkerFailed, match="lost the cube") as caught:
        wait_all([impatient, slow], SOON)
    assert caught.value.worker == "probe[1]"


def test_a_time_out_alone_names_whom_it_waited_for(group: WorkerGroup, channel: Channel) -> None:
    with pytest.raises(
        WorkerFailed, match=r"has been empty; it is filled by probe \(seen so far: nobody\): waited 0.1 s"
    ):
        group.get(channel, 0.1).wait(SOON)


def test_a_failure_at_the_start_is_raised(cluster: Cluster) -> None:
    with pytest.raises(WorkerFailed, match=r"^probe\[0\] failed: ValueError: no such robot"):
        start(cluster, fails=True)


def test_a_worker_that_does_not_come_up_is_named(ray_here: None) -> None:
    with Cluster(cpu_slots=2, timeout_s=60.0) as cluster:
        cluster.start("other", Probe, GroupPlacement("other", ((0,),)))
        cluster.timeout_s = 0.5
        with pytest.raises(TimeoutError, match=r"^waited 0.5 s for probe\[0\]$"):
            start(cluster, slow=30.0)


def test_a_worker_that_cannot_be_loaded_fails_at_the_start(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text("from scheduler.worker import Worker\nclass Mine(Worker): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    mine = importlib.import_module("only_here").Mine
    with pytest.raises(WorkerFailed, match=r"(?s)^probe\[0\] failed to start.*No module named 'only_here'"):
        cluster.start("probe", mine, GroupPlacement("probe", ((0,),)))


def test_failures_survive_pickling() -> None:
    failure = WorkerDied("env[3]", "died", "details", 1.5, True)
    copied = pickle.loads(pickle.dumps(failure))
    assert type(copied) is WorkerDied and vars(copied) == vars(failure)


def test_a_group_can_be_copied(group: WorkerGroup) -> None:
    assert copy.copy(group).worker_name(1) == "probe[1]"


# ---------------------------------------------------------------------------------------------- deaths and ends


def test_a_killed_worker_is_the_first_cause_and_the_others_are_released(cluster: Cluster) -> None:
    group = start(cluster, ranks=2)
    channel = cluster.channel("never filled")
    pids = group.pid().result(SOON)
    waiting = group.get(channel)
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(WorkerDied) as caught:
        waiting.wait(SOON)
    assert caught.value.worker == "probe[1]"
    assert str(caught.value).startswith("probe[1] died: its process ended")
    assert Handle(group, group.echo().refs[:1]).result(SOON) == [((), {})]


def test_a_death_is_the_cause_of_errors_reported_just_before_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler.worker.SETTLE_S", SOON)
    losing, dying = start(cluster, name="losing"), start(cluster, name="dying")
    with pytest.raises(WorkerDied) as caught:
        wait_all([losing.fail("connection lost"), dying.end_process(after=0.3)], SOON)
    assert caught.value.worker == "dying[0]"


@pytest.mark.parametrize("used_before", [True, False])
def test_a_driver_that_waits_in_a_channel_learns_of_a_death(cluster: Cluster, used_before: bool) -> None:
    group = start(cluster)
    channel = cluster.channel("items", producers=group)
    if used_before:
        group.put(channel, 1).wait(SOON)
        assert channel.get(timeout=SOON) == 0
    group.end_process(after=0.2)
    if not used_before:
        assert wait_until(lambda: bool(cluster.hub._failure))
    with pytest.raises(WorkerDied, match=r"probe\[0\] died"):
        channel.get(timeout=SOON)


def test_an_idle_worker_that_is_killed_is_found_by_who_waits_for_it(cluster: Cluster) -> None:
    idle, other = start(cluster, name="idle"), start(cluster, name="other")
    waiting = other.get(cluster.channel("items", producers=idle))
    os.kill(idle.pid().result(SOON)[0], signal.SIGKILL)
    with pytest.raises(WorkerDied, match=r"^idle\[0\] died"):
        waiting.wait(SOON)


def test_the_end_of_a_cluster_leaves_nothing_behind(
    ray_here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler.cluster.END_S", SOON)
    marks = [str(tmp_path / name) for name in ("by driver", "by cluster")]
    log = tmp_path / "log.txt"
    with Cluster(cpu_slots=2, log_file=str(log)) as cluster:
        first, second = (start(cluster, name=f"g{i}", mark=mark) for i, mark in enumerate(marks))
        channel = cluster.channel("items", producers=first)
        first.put_array(channel).wait(SOON)
        pids = [group.pid().result(SOON)[0] for group in (first, second)]
        first.log("reached").wait(SOON)
        first.shutdown().wait(SOON)
        assert any(f"-{pids[0]}-" in path.name for path in Path("/dev/shm").iterdir())
    assert [Path(mark).read_text() for mark in marks] == ["shut down\n"] * 2
    assert "g0[0] INFO reached" in log.read_text()
    assert not [path for path in Path("/dev/shm").iterdir() if f"-{pids[0]}-" in path.name]
    assert wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))
