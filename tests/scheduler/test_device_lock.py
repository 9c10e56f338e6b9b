"""Leases on device sets: the table alone against a model, then through the hub by threads, processes and workers."""

import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from ends import Background, wait_until
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from probes import Leaser

from scheduler import connection
from scheduler.channel import fail_all
from scheduler.cluster import Cluster
from scheduler.connection import HubLost
from scheduler.device_lock import DeviceLock, DeviceTimeout, Holder, LeaseTable, Request, release_dead
from scheduler.hub import Hub
from scheduler.placement import GroupPlacement
from scheduler.trace import Trace
from scheduler.worker import WorkerGroup

SOON = 60.0  # a bound for "does not hang" on a busy machine
A, B, C = (Holder(name, "here", pid) for pid, name in enumerate("abc"))


def ask(table: LeaseTable, holder: Holder, *devices: int, ticket: str = "") -> list[str]:
    return [str(r.ticket) for r in table.acquire(Request(ticket or holder.name, holder, frozenset(devices)))]


def end(table: LeaseTable, holder: Holder, *devices: int) -> list[str]:
    return [str(r.ticket) for r in table.release(holder, frozenset(devices))]


# ---------------------------------------------------------------------------------------------- the table


def test_sets_that_do_not_overlap_are_held_at_once() -> None:
    table = LeaseTable()
    assert ask(table, A, 0, 1) == ["a"]
    assert ask(table, B, 2) == ["b"]
    assert table.devices(A) == {0, 1} and table.devices(B) == {2}


def test_a_set_is_granted_whole_or_not_at_all() -> None:
    table = LeaseTable()
    ask(table, A, 0)
    assert ask(table, B, 0, 1) == []
    assert table.devices(B) == set()
    assert end(table, A, 0) == ["b"]


def test_a_large_request_is_not_starved_by_small_ones() -> None:
    table = LeaseTable()
    ask(table, A, 0)
    assert ask(table, B, 0, 1, 2, 3) == []
    assert ask(table, C, 1) == []  # free, but the larger request came first
    assert end(table, A, 0) == ["b"]
    assert end(table, B, 0, 1, 2, 3) == ["c"]


def test_a_request_that_meets_nobody_does_not_wait_behind_others() -> None:
    table = LeaseTable()
    ask(table, A, 0)
    ask(table, B, 0, 1)
    assert ask(table, C, 2) == ["c"]


def test_a_holder_may_lease_what_it_holds_again_and_keeps_it_until_the_last_end() -> None:
    table = LeaseTable()
    ask(table, A, 0, 1)
    ask(table, B, 1)
    assert ask(table, A, 1, ticket="again") == ["again"]
    assert end(table, A, 0, 1) == []
    assert table.devices(A) == {1}
    assert end(table, A, 1) == ["b"]


def test_what_could_deadlock_is_refused() -> None:
    table = LeaseTable()
    ask(table, A, 0)
    with pytest.raises(ValueError, match="a holds devices 0 and asks for 0, 1, which could deadlock"):
        ask(table, A, 0, 1)
    with pytest.raises(ValueError, match="a holds devices 0 and asks for 1"):
        ask(table, A, 1)
    with pytest.raises(ValueError, match="b asks for a lease of no devices"):
        ask(table, B)


def test_ending_a_lease_that_is_not_held_is_refused() -> None:
    with pytest.raises(ValueError, match="a holds no lease of devices 0"):
        end(LeaseTable(), A, 0)


def test_a_withdrawn_request_lets_those_behind_it_in() -> None:
    table = LeaseTable()
    ask(table, A, 0)
    ask(table, B, 0, 1)
    ask(table, C, 1)
    assert [r.ticket for r in table.cancel("b")] == ["c"]


def test_the_dead_hold_and_want_nothing() -> None:
    table = LeaseTable()
    ask(table, A, 0)
    ask(table, B, 0)
    ask(table, C, 0)
    assert [r.ticket for r in table.bury(lambda holder: holder in (A, B))] == ["c"]


def test_a_lease_is_wanted_if_its_end_would_free_what_another_waits_for() -> None:
    table = LeaseTable()
    ask(table, A, 0, 1)
    assert not table.is_wanted(A, frozenset({0, 1}))
    ask(table, B, 1, 2)
    assert table.is_wanted(A, frozenset({0, 1}))
    ask(table, A, 1, ticket="again")
    assert not table.is_wanted(A, frozenset({1})), "the outer lease still holds it"


def test_what_a_request_waits_for_is_named() -> None:
    table = LeaseTable()
    ask(table, A, 0, 1)
    ask(table, B, 1, 2)
    ask(table, C, 1, 2, 3)
    assert table.obstacles("c") == "a holds 1, b asked before for 1, 2"
    assert table.obstacles("a") == ""


class Leases(RuleBasedStateMachine):
    """Random requests, ends and deaths. Whoever waits must have a reason, and the reasons must not form a circle."""

    DEVICES = st.frozensets(st.integers(0, 4), min_size=1)
    HOLDERS = st.integers(0, 5).map(lambda i: Holder(f"w{i}", "here", i))

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable()
        self.held: list[Request] = []
        self.waiting: list[Request] = []
        self.count = 0

    def settle(self, granted: list[Request]) -> None:
        assert all(request in self.waiting for request in granted)
        self.waiting = [request for request in self.waiting if request not in granted]
        self.held += granted

    @rule(holder=HOLDERS, devices=DEVICES)
    def acquire(self, holder: Holder, devices: frozenset[int]) -> None:
        self.count += 1
        request = Request(self.count, holder, devices)
        held = self.table.devices(holder)
        if held and not devices <= held:
            with pytest.raises(ValueError):
                self.table.acquire(request)
        else:
            self.waiting.append(request)
            self.settle(self.table.acquire(request))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.held))
        self.held.remove(request)
        self.settle(self.table.release(request.holder, request.devices))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(request)
        self.settle(self.table.cancel(request.ticket))

    @rule(holder=HOLDERS)
    def die(self, holder: Holder) -> None:
        self.held = [request for request in self.held if request.holder != holder]
        self.waiting = [request for request in self.waiting if request.holder != holder]
        self.settle(self.table.bury(lambda other: other == holder))

    @invariant()
    def no_device_has_two_holders(self) -> None:
        for first in self.held:
            for second in self.held:
                assert first.holder == second.holder or not first.devices & second.devices

    @invariant()
    def who_waits_has_a_reason(self) -> None:
        for place, request in enumerate(self.waiting):
            before = [*self.held, *self.waiting[:place]]
            assert any(request.devices & other.devices for other in before)
            assert self.table.obstacles(request.ticket)

    @invariant()
    def someone_can_always_go_on(self) -> None:
        assert self.held or not self.waiting


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


# ---------------------------------------------------------------------------------------------- through the hub


@pytest.fixture
def lock(hub: Hub) -> DeviceLock:
    return DeviceLock(hub.endpoint, SOON)


def take(lock: DeviceLock, *devices: int) -> None:
    with lock.lease(devices, timeout=SOON):
        pass


def once_one_waits(hub: Hub, work: Callable[[], None]) -> Background:
    """Work in another thread, as soon as somebody waits for devices."""

    def run() -> None:
        assert wait_until(lambda: bool(hub._leases._waiting))
        work()

    return Background(run)


class Child:
    """A forked process that leases devices under a name and keeps them until it is told to end, or killed."""

    left: ClassVar[set[int]] = set()  # processes of a test that fails, which would keep its output open

    def __init__(self, lock: DeviceLock, name: str, *devices: int) -> None:
        self.told, tell = os.pipe()
        told, self.tell = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                connection.this_process.name = name
                with lock.lease(devices):
                    os.write(tell, b".")
                    os.read(told, 1)
            finally:
                os._exit(0)
        self.left.add(self.pid)

    def has_it(self) -> bool:
        return os.read(self.told, 1) == b"."

    def end(self) -> None:
        os.write(self.tell, b".")
        self._wait()

    def kill(self) -> None:
        os.kill(self.pid, 9)
        self._wait()

    def _wait(self) -> None:
        os.waitpid(self.pid, 0)
        self.left.remove(self.pid)


@pytest.fixture(autouse=True)
def no_child_is_left() -> Iterator[None]:
    yield
    while Child.left:
        os.kill(pid := Child.left.pop(), 9)
        os.waitpid(pid, 0)


def test_a_lease_waits_for_the_one_before(lock: DeviceLock) -> None:
    child = Child(lock, "env[0]", 0, 1)
    assert child.has_it()
    next_one = Background(lambda: take(lock, 1, 2))
    assert next_one.waits
    child.end()
    assert next_one.result() is None


def test_a_wait_that_takes_too_long_names_the_holder(lock: DeviceLock) -> None:
    child = Child(lock, "env[0]", 0, 1)
    assert child.has_it()
    with (
        pytest.raises(DeviceTimeout, match=r"^the driver waited 0.1 s for devices 1, 2: env\[0\] holds 1$"),
        lock.lease([2, 1], timeout=0.1),
    ):
        pass
    child.end()
    with lock.lease([1, 2], timeout=SOON):
        pass


@pytest.mark.parametrize("waits", [False, True])
def test_a_killed_process_holds_and_wants_nothing(hub: Hub, lock: DeviceLock, waits: bool) -> None:
    first = Child(lock, "env[0]", 0)
    assert first.has_it()
    doomed = Child(lock, "env[1]", 0) if waits else first
    assert wait_until(lambda: len(hub._processes) == (2 if waits else 1))
    doomed.kill()
    if waits:
        first.end()
    take(lock, 0)


def test_a_process_of_the_same_name_does_not_inherit_a_lease(lock: DeviceLock) -> None:
    child = Child(lock, "the driver", 0)
    assert child.has_it()
    with pytest.raises(DeviceTimeout, match="the driver holds 0"), lock.lease([0], timeout=0.1):
        pass
    child.kill()


def test_a_dead_worker_of_another_host_is_reported_by_name(
    hub: Hub, lock: DeviceLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection.this_process, "host", "elsewhere")
    remote = Child(lock, "env[0]", 0)
    assert remote.has_it()
    monkeypatch.undo()
    remote.kill()
    release_dead(hub.endpoint.local, "env[1]")
    with pytest.raises(DeviceTimeout, match=r"env\[0\] holds 0"), lock.lease([0], timeout=0.1):
        pass
    release_dead(hub.endpoint.local, "env[0]")
    with lock.lease([0], timeout=SOON):
        pass


def test_leases_nest_in_a_process(lock: DeviceLock) -> None:
    with lock.lease([0, 1]):
        with lock.lease([1]):
            child = Child(lock, "env[0]", 1)
        assert wait_until(lambda: lock.is_wanted([0, 1]))
        with pytest.raises(ValueError, match="could deadlock"), lock.lease([2]):
            pass
    assert child.has_it()
    child.end()


def test_a_lease_ends_with_an_exception(lock: DeviceLock) -> None:
    with pytest.raises(KeyError), lock.lease([0]):
        raise KeyError
    child = Child(lock, "env[0]", 0)
    assert child.has_it()
    child.end()


def test_a_failed_run_refuses_who_waits_and_who_comes(hub: Hub, lock: DeviceLock) -> None:
    child = Child(lock, "env[0]", 0)
    assert child.has_it()
    failing = once_one_waits(hub, lambda: fail_all(hub.endpoint.local, ValueError("broken"), for_good=True))
    for _ in range(2):
        with pytest.raises(ValueError, match="broken"), lock.lease([0], timeout=SOON):
            pass
    assert failing.result() is None
    child.end()


def test_closing_the_hub_refuses_who_waits() -> None:
    hub = Hub("here")
    lock = DeviceLock(hub.endpoint)
    child = Child(lock, "env[0]", 0)
    assert child.has_it()
    closing = once_one_waits(hub, hub.close)
    with pytest.raises(HubLost, match="has been closed"), lock.lease([0], timeout=SOON):
        pass
    assert closing.result() is None
    child.kill()


def test_the_wait_is_in_the_trace(lock: DeviceLock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection.this_process, "trace", trace := Trace("env[0]"))
    with lock.lease([1, 0]):
        pass
    (event,) = trace.drain()
    assert (event.track, event.name, event.category, event.args) == (
        "env[0]",
        "wait for devices",
        "wait",
        {"devices": [0, 1]},
    )


def test_a_lock_can_be_sent(lock: DeviceLock) -> None:
    with pickle.loads(pickle.dumps(lock)).lease([0], timeout=SOON):
        pass


# ---------------------------------------------------------------------------------------------- workers


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)  # where workers find `Leaser`
        with Cluster(cpu_slots=2, timeout_s=60.0) as cluster:
            yield cluster


def start(cluster: Cluster, name: str, **kwargs: Any) -> WorkerGroup:
    return cluster.start(name, Leaser, GroupPlacement(name, ((0, 1),)), **kwargs)


def test_workers_switch_on_shared_devices_only_when_another_waits(cluster: Cluster, tmp_path: Path) -> None:
    one, two = start(cluster, "one"), start(cluster, "two")
    leases = cluster.hub._leases
    one.hold().wait(SOON)
    assert one.switch_seconds().result(SOON) == [{"offload": [], "onload": []}]
    handles = [one.hold(until=tmp_path / "end")]
    assert wait_until(lambda: bool(leases._held))
    handles.append(two.hold())
    assert wait_until(lambda: bool(leases._waiting))
    (tmp_path / "end").touch()
    for handle in handles:
        handle.wait(SOON)
    assert one.memory().result(SOON) == ["host"] and two.memory().result(SOON) == ["device"]
    one.hold().wait(SOON)
    assert one.memory().result(SOON) == ["device"]
    (seconds,) = one.switch_seconds().result(SOON)
    assert [len(seconds["offload"]), len(seconds["onload"])] == [1, 1]
    events = one.drain_trace().result(SOON)[0]
    assert [event.name for event in events if event.category == "switch"] == ["offload", "onload"]
    assert [event.category for event in events if event.name == "wait for devices"] == ["wait"] * 3


def test_workers_that_do_not_fit_together_leave_nothing_on_the_devices(cluster: Cluster) -> None:
    group = start(cluster, "large")
    for _ in range(2):
        group.hold(keep=False).wait(SOON)
        assert group.memory().result(SOON) == ["host"]
    (seconds,) = group.switch_seconds().result(SOON)
    assert [len(seconds["offload"]), len(seconds["onload"])] == [2, 1]


def test_a_worker_that_waits_too_long_for_devices_names_their_holder(cluster: Cluster, tmp_path: Path) -> None:
    holding, waiting = start(cluster, "holding"), start(cluster, "waiting")
    handle = holding.hold(until=tmp_path / "end")
    assert wait_until(lambda: bool(cluster.hub._leases._held))
    with pytest.raises(Exception, match=r"waiting\[0\] waited 0.1 s for devices 0, 1: holding\[0\] holds 0, 1"):
        waiting.hold(timeout=0.1).wait(SOON)
    (tmp_path / "end").touch()
    handle.wait(SOON)
