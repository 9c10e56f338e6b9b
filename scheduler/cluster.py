"""The machines a run uses: devices, worker processes and the channel hub. Ray owns the processes.

Devices are GPUs where there are any, else CPU slots (usable cores), numbered from 0 over all nodes.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

from scheduler import channel as channels
from scheduler.channel import Channel
from scheduler.device_lock import DeviceLock
from scheduler.hub import Hub
from scheduler.placement import GroupPlacement, PlacementError
from scheduler.shared_memory import remove_orphans
from scheduler.transport import Location
from scheduler.worker import Context, Handle, Watch, Worker, WorkerFailed, WorkerGroup, wait_all
from scheduler.worker_process import WorkerProcess

Kind = Literal["cpu", "gpu"]
END_S = 5.0  # how long workers may take to shut down before they are killed
PROBE_S = 5.0  # how long the head of a cluster may take to accept a connection; Ray itself tries for minutes


class RayFailed(Exception):
    """Ray did not start, or there is none to join."""


@dataclass(frozen=True)
class Device:
    """One device: `local` is its position among the GPUs, or the usable cores, of its node."""

    index: int
    kind: Kind
    node: str
    local: int


class Cluster:
    """A started (or joined) Ray cluster and the channels of one run; a context manager. Raises RayFailed.

    Args:
        address: Ray cluster to join; None starts Ray on this machine (RAY_ADDRESS is honoured).
        cpu_slots: CPU slots that count as devices; None: the usable cores. Slots may outnumber cores.
        timeout_s: bound of every wait for a worker.
        log_file: file that workers append their log to.
    """

    def __init__(
        self,
        address: str | None = None,
        cpu_slots: int | None = None,
        timeout_s: float = 600.0,
        log_file: str | None = None,
    ) -> None:
        # Ray reads this when it is imported. A dead worker is reported once, by name: see `WorkerDied`.
        os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed")
        import ray

        self.timeout_s, self.log_file = timeout_s, log_file
        self.groups: list[WorkerGroup] = []
        self._process = os.getpid()
        self._owns_ray = not ray.is_initialized()
        if self._owns_ray:
            with _own_termination():
                _init_ray(address)
        try:
            self.host = ray.get_runtime_context().get_node_id()
            nodes = [node for node in ray.nodes() if node["Alive"]]
            nodes.sort(key=lambda node: (node["NodeID"] != self.host, node["NodeID"]))
            self.devices = _devices(nodes, cpu_slots)
            self.kind: Kind = self.devices[0].kind
            self.hub = Hub(self.host, nodes[0]["NodeManagerAddress"] if len(nodes) > 1 else None)
        except BaseException:
            if self._owns_ray:
                ray.shutdown()
            raise
        self._watch = Watch(self.groups)
        atexit.register(self.shutdown)

    def start(
        self, name: str, worker_class: type[Worker], placement: GroupPlacement, *args: Any, **kwargs: Any
    ) -> WorkerGroup:
        """Start one group and wait until every rank is constructed. Raises WorkerFailed."""
        group, handle = self.launch(name, worker_class, placement, *args, **kwargs)
        self.await_start([(group, handle)])
        return group

    def launch(
        self, name: str, worker_class: type[Worker], placement: GroupPlacement, *args: Any, **kwargs: Any
    ) -> tuple[WorkerGroup, Handle]:
        """Begin to start a group, so that several can start side by side; `await_start` completes it."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        mailbox = self.channel(f"mail/{name}", capacity=4)
        context = Context(
            name, 0, len(placement.ranks), (), self.kind, (), self.host, mailbox, self.device_lock(), self.log_file
        )
        actors: list[Any] = []
        for rank, indices in enumerate(placement.ranks):
            devices = [self.devices[index] for index in indices]
            node = devices[0].node
            if any(device.node != node for device in devices):
                raise PlacementError(f"{name}[{rank}] would span several nodes: devices {list(indices)}")
            strategy = NodeAffinitySchedulingStrategy(node, soft=False)
            own = context.of_rank(rank, tuple(indices), tuple(device.local for device in devices), node)
            named: Any = ray.remote(type(worker_class.__name__, (WorkerProcess,), {}))  # the name that `ps` shows
            actor_class = named.options(num_cpus=0, scheduling_strategy=strategy, max_restarts=0)
            actors.append(actor_class.remote(worker_class, own, args, kwargs))
        group = WorkerGroup(name, worker_class, actors, self.hub.endpoint.local, placement, (args, kwargs))
        group.cluster = self
        self.groups.append(group)
        return group, Handle(group, [actor.start.remote() for actor in actors])

    def relocate(self, group: WorkerGroup, placement: GroupPlacement) -> None:
        """Move a group: its workers start anew on other devices and `restore` what the old ones had as `state`.

        Nobody may be calling the group. Raises WorkerFailed, or PlacementError; the old workers then go on.
        """
        begun = time.monotonic()
        states = group.state().result(self.timeout_s)
        args, kwargs = group._args
        successor, start = self.launch(group.name, group._worker_class, placement, *args, **kwargs)
        try:
            self.await_start([(successor, start)])
            successor.restore(states).wait(self.timeout_s)
        except BaseException:
            self.end([successor])
            raise
        successor.start_s = time.monotonic() - begun
        self.groups.remove(successor)
        predecessors = group.actors
        group.become(successor)
        _end(predecessors)

    def end(self, groups: Sequence[WorkerGroup]) -> None:
        """End the workers of some groups, which are then of no use any more."""
        for group in groups:
            self.groups.remove(group)
        _end([actor for group in groups for actor in group.actors])

    def await_start(self, launched: list[tuple[WorkerGroup, Handle]]) -> None:
        """Wait until the launched groups are constructed. Raises the first cause of a failure."""
        begun = time.monotonic()
        wait_all([handle for _, handle in launched], self.timeout_s)
        for group, _ in launched:
            group.start_s = time.monotonic() - begun
        for group, handle in launched:
            group.locations = handle.result()

    def channel(
        self,
        name: str,
        capacity: int = 16,
        producers: WorkerGroup | None = None,
        consumers: WorkerGroup | None = None,
    ) -> Channel:
        """A channel between groups (None: the driver, or anyone). Knowing the consumers lets bytes move faster."""
        if consumers is not None:
            receivers = tuple(consumers.locations)
        else:
            receivers = (Location(self.host, -1),) if {d.node for d in self.devices} == {self.host} else ()
        return Channel(
            name,
            self.hub.endpoint,
            capacity,
            producers.name if producers else "the driver",
            consumers.name if consumers else "the driver",
            receivers,
            self.timeout_s,
        )

    def device_lock(self) -> DeviceLock:
        """The lock by which workers that share devices take turns."""
        return DeviceLock(self.hub.endpoint, self.timeout_s)

    def shutdown(self) -> None:
        """End the workers, the hub and, if it was started here, Ray. Calls after the first do nothing."""
        import ray

        atexit.unregister(self.shutdown)
        if os.getpid() != self._process:  # a forked child that ends must not end its parent's run
            return
        groups, self.groups = self.groups, []
        owns_ray, self._owns_ray = self._owns_ray, False
        try:
            self._watch.stop()
            if groups:
                channels.fail_all(self.hub.endpoint.local, WorkerFailed("the driver", "ended the run"), for_good=True)
            _end([actor for group in groups for actor in group.actors])
            self.hub.close()
        finally:
            if owns_ray:
                ray.shutdown()
            remove_orphans()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()


def _end(actors: list[Any]) -> None:
    """Let workers shut down, then kill their processes."""
    import ray

    if actors:
        with suppress(ray.exceptions.RayError):
            ray.wait([actor.end.remote() for actor in actors], num_returns=len(actors), timeout=END_S)
    for actor in actors:
        ray.kill(actor)


@contextmanager
def _own_termination() -> Iterator[None]:
    """Give the program its handler of SIGTERM back, which Ray replaces when it starts: by one that raises SystemExit,
    then by one that aborts with a dump. A signal that came meanwhile is handled."""
    own = signal.getsignal(signal.SIGTERM)
    if not callable(own) or threading.current_thread() is not threading.main_thread():
        yield
        return
    came = False
    try:
        yield
    except SystemExit:
        came = True
    finally:
        signal.signal(signal.SIGTERM, own)
    if came:
        own(signal.SIGTERM, None)


def _init_ray(address: str | None) -> None:
    import ray

    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    joined = address or os.environ.get("RAY_ADDRESS")
    if joined and (place := re.fullmatch(r"(?:ray://)?([^/]+):(\d+)", joined)):
        _await_head(joined, place[1].strip("[]"), int(place[2]))
    try:
        if joined:
            ray.init(address, **quiet)
        else:
            ray.init("local", include_dashboard=False, object_store_memory=100 * 2**20, **quiet)
    except (KeyboardInterrupt, SystemExit):
        ray.shutdown()
        raise
    except Exception as error:  # Ray has no class of its own for it
        ray.shutdown()
        raise RayFailed(f"Ray did not {f'join the cluster at {joined}' if joined else 'start'}: {error}") from error


def _await_head(address: str, host: str, port: int) -> None:
    """Wait until something listens there. Raises RayFailed."""
    deadline = time.monotonic() + PROBE_S
    while True:
        try:
            socket.create_connection((host, port), PROBE_S).close()
            return
        except (OSError, OverflowError) as error:
            if time.monotonic() > deadline or not isinstance(error, ConnectionRefusedError):  # the head may be starting
                raise RayFailed(f"no Ray cluster at {address}: {error}; `ray start --head` starts one there") from None
        time.sleep(0.2)


def _devices(nodes: list[dict], cpu_slots: int | None) -> list[Device]:
    found: list[tuple[Kind, str, int]] = []
    for node in nodes:
        found += [("gpu", node["NodeID"], i) for i in range(int(node["Resources"].get("GPU", 0)))]
    if not found or cpu_slots is not None:
        found = []
        for position, node in enumerate(nodes):
            here = position == 0
            cores = len(os.sched_getaffinity(0)) if here else int(node["Resources"].get("CPU", 0))
            count = cpu_slots if here and cpu_slots else cores
            found += [("cpu", node["NodeID"], i % cores) for i in range(count)]
    return [Device(index, kind, node, local) for index, (kind, node, local) in enumerate(found)]
