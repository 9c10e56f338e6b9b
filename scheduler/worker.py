"""Workers and worker groups: classes in Ray actors, called as one.

A `Worker` runs in a process of its own (see `worker_process`), on the devices its placement names. A `WorkerGroup` is
the driver's handle on all its ranks. When one fails, `wait_all` finds the first cause and tells every other worker
through the channels; when one dies while the driver waits for something else, the `Watch` does.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from scheduler import channel as channels
from scheduler.channel import Channel
from scheduler.device_lock import DeviceLock, release_dead
from scheduler.placement import GroupPlacement
from scheduler.stage import StageCall, StageReport, memory_held, run_stage
from scheduler.trace import Event, Trace
from scheduler.transport import Location

SETTLE_S = 1.0  # after a failure, how long others may take to report theirs, so that the first cause is among them
WATCH_S = 1.0  # how often the driver looks whether the workers live


class WorkerFailed(Exception):
    """A worker raised; the message is its original traceback."""

    def __init__(self, worker: str, summary: str, details: str = "", at: float = 0.0, secondary: bool = False) -> None:
        super().__init__(worker, summary, details, at, secondary)
        self.worker, self.summary, self.details = worker, summary, details
        self.at, self.secondary = at, secondary

    def __str__(self) -> str:
        return f"{self.worker} {self.summary}" + (f"\n{self.details}" if self.details else "")


class WorkerDied(WorkerFailed):
    """A worker's process ended without raising (killed, out of memory, crashed)."""


@dataclass(frozen=True)
class Context:
    """What a worker knows of its place.

    `cores` are the positions of its devices among its node's usable cores or GPUs; `mailbox` is a template for the
    channels of `send` and `recv`.
    """

    group: str
    rank: int
    world_size: int
    devices: tuple[int, ...]
    device_kind: str
    cores: tuple[int, ...]
    host: str
    mailbox: Channel
    device_lock: DeviceLock
    log_file: str | None = None

    @property
    def name(self) -> str:
        return f"{self.group}[{self.rank}]"

    def of_rank(self, rank: int, devices: tuple[int, ...], cores: tuple[int, ...], host: str) -> Context:
        """The context of one rank, from its group's."""
        return replace(self, rank=rank, devices=devices, cores=cores, host=host)


class Worker:
    """Base class of what runs in a worker process. `self.rank` and the rest are there before `__init__` runs."""

    context: Context
    trace: Trace
    iteration: int = 0  # of the flow that is run
    _offloaded = False
    _switch_seconds: dict[str, list[float]]

    @property
    def rank(self) -> int:
        return self.context.rank

    @property
    def world_size(self) -> int:
        return self.context.world_size

    @property
    def devices(self) -> tuple[int, ...]:
        """Indices of this rank's devices: GPUs, or CPU slots."""
        return self.context.devices

    def send(self, obj: Any, to: str, timeout: float | None = None) -> None:
        """Send to one worker, named like "rollout[0]"; waits while its mailbox is full."""
        self._mailbox(to, self.context.name).put(obj, key=self.context.name, timeout=timeout)

    def recv(self, source: str, timeout: float | None = None) -> Any:
        """Receive the next object from one worker, named like "actor[0]"."""
        return self._mailbox(self.context.name, source).get(key=source, timeout=timeout)

    def _mailbox(self, owner: str, sender: str) -> Channel:
        box = copy.copy(self.context.mailbox)
        box.name, box.consumers, box.producers = f"mail/{owner}", owner, sender
        return box

    def drain_trace(self) -> list[Event]:
        """This worker's timeline since the last call."""
        return self.trace.drain()

    def offload(self) -> None:
        """Move device memory to the host; workers that hold some override it."""

    def onload(self) -> None:
        """Undo `offload`."""

    @contextmanager
    def lease(self, timeout: float | None = None, keep: bool | None = None) -> Iterator[None]:
        """Hold this rank's devices for a block of work; waits, in a fair order, until no other worker holds them.

        Args:
            keep: whether what this worker has on the devices stays there when the block ends; else it is moved to the
                host (by `offload`, if its class has one) and the next lease brings it back. None: it stays unless
                another worker waits for the devices.

        Raises DeviceTimeout naming who holds the devices.
        """
        lock = self.context.device_lock
        with lock.lease(self.devices, timeout):
            if self._offloaded:
                self._switch(self.onload)
            yield
            if self._can_offload and not (not lock.is_wanted(self.devices) if keep is None else keep):
                self._switch(self.offload)

    @property
    def _can_offload(self) -> bool:
        return type(self).offload is not Worker.offload

    def device_memory(self) -> int | None:
        """Bytes of memory of this rank's GPU; None on a CPU, where a device has no memory of its own."""
        if self.context.device_kind == "cpu":
            return None
        import torch

        return torch.cuda.get_device_properties(0).total_memory

    def measure_switch(self) -> tuple[int, float, float] | None:
        """Offload and onload once: (bytes that this frees on a device, seconds of each); None if the class cannot."""
        if not self._can_offload:
            return None
        held = memory_held()
        self._switch(self.offload)
        freed = held - memory_held()
        self._switch(self.onload)
        return max(0, freed), self._switch_seconds["offload"][-1], self._switch_seconds["onload"][-1]

    def switch_seconds(self) -> dict[str, list[float]]:
        """How long each switch of a lease has taken: seconds by "offload" and "onload"."""
        return self._switch_seconds

    def _switch(self, move: Callable[[], None]) -> None:
        start = time.monotonic()
        move()
        end = time.monotonic()
        name = move.__name__
        self._offloaded = name == "offload"
        self._switch_seconds[name].append(end - start)
        self.trace.add(name, start, end, "switch")

    def run_stage(self, call: StageCall, iteration: int, arguments: tuple[Any, ...] = ()) -> StageReport:
        """Do this rank's part of one iteration of a flow."""
        self.iteration, start = iteration, time.monotonic()
        report = run_stage(self, call, arguments)
        report.start, report.end = start, time.monotonic()
        return report

    def state(self) -> Any:
        """What a successor on other devices needs to go on exactly as this rank would."""

    def restore(self, states: list[Any]) -> None:
        """Take over from the ranks whose `state` these are; there may have been more or fewer of them."""

    def shutdown(self) -> None:
        """Release what the process would not release by ending. Called once: by the driver, or by the cluster's end."""


class Handle:
    """A call in flight on all ranks of a group."""

    def __init__(self, group: WorkerGroup, refs: list[Any]) -> None:
        self.group, self.refs = group, refs

    def done(self) -> bool:
        """Whether every rank has returned or failed."""
        import ray

        return len(ray.wait(self.refs, num_returns=len(self.refs), timeout=0)[0]) == len(self.refs)

    def wait(self, timeout: float | None = None) -> None:
        """Wait for all ranks. Raises WorkerFailed or WorkerDied (the first cause), or TimeoutError."""
        wait_all([self], timeout)

    def result(self, timeout: float | None = None) -> list[Any]:
        """The return values by rank; waits like `wait`."""
        import ray

        self.wait(timeout)
        return ray.get(self.refs)


class GroupMethod:
    """A worker method, callable on every rank of the group."""

    def __init__(self, group: WorkerGroup, name: str) -> None:
        self.group, self.name = group, name

    def __call__(self, *args: Any, **kwargs: Any) -> Handle:
        """Call on all ranks with the same arguments."""
        return self.sharded([(args, kwargs)] * len(self.group.actors))

    def sharded(self, calls: Sequence[tuple[tuple, dict]]) -> Handle:
        """Call with arguments of its own for each rank: `calls[rank] = (args, kwargs)`."""
        if len(calls) != len(self.group.actors):
            raise ValueError(
                f"{self.group.name} has {len(self.group.actors)} ranks, but {len(calls)} shards were given"
            )
        refs = [actor.call.remote(self.name, a, k) for actor, (a, k) in zip(self.group.actors, calls, strict=True)]
        return Handle(self.group, refs)


class WorkerGroup:
    """All ranks of one worker class; `group.method(...)` calls it on every rank and returns a `Handle`."""

    def __init__(
        self,
        name: str,
        worker_class: type[Worker],
        actors: list[Any],
        hub_address: str,
        placement: GroupPlacement,
        args: tuple[tuple, dict] = ((), {}),
    ) -> None:
        self.name, self.actors, self.hub_address, self.placement = name, actors, hub_address, placement
        self._worker_class, self._args = worker_class, args
        self.locations: list[Location] = []
        self.cluster: Any = None  # that started it; in the driver alone
        self.start_s = 0.0  # how long the newest workers took to start, with the state of their predecessors

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "cluster": None}

    def become(self, other: WorkerGroup) -> None:
        """Stand for the workers of another group from now on."""
        self.actors, self.placement, self.locations = other.actors, other.placement, other.locations
        self.start_s = other.start_s

    def __getattr__(self, method: str) -> GroupMethod:
        if method.startswith("_"):  # not a worker's, and pickle asks for some before `__init__` has run
            raise AttributeError(method)
        if not callable(getattr(self._worker_class, method, None)):
            raise AttributeError(f"{self._worker_class.__name__} has no method '{method}'")
        return GroupMethod(self, method)

    def __len__(self) -> int:
        return len(self.actors)

    def worker_name(self, rank: int) -> str:
        return f"{self.name}[{rank}]"


def wait_all(
    handles: Sequence[Handle], timeout: float | None = None, on_done: Callable[[Handle], Any] | None = None
) -> None:
    """Wait for calls on several groups at once; `on_done` is called with each that all its ranks have finished.

    As soon as one worker fails, every channel is closed with its error, so that nobody waits for it.
    Raises the first cause: a WorkerDied or WorkerFailed. Raises TimeoutError naming who is still at work.
    """
    import ray

    owner = {ref: (h.group, rank) for h in handles for rank, ref in enumerate(h.refs)}
    at_work = {handle: len(handle.refs) for handle in handles}
    handle_of = {ref: handle for handle in handles for ref in handle.refs}
    pending, failures = list(owner), list[WorkerFailed]()
    deadline = None if timeout is None else time.monotonic() + timeout
    while pending:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready, pending = ray.wait(pending, num_returns=1, timeout=left)
        if not ready:
            if failures:
                break
            late = ", ".join(owner[ref][0].worker_name(owner[ref][1]) for ref in pending)
            raise TimeoutError(f"waited {timeout:g} s for {late}")
        for ref in ready:
            failure = _failure_of(ref, *owner[ref])
            if failure is not None:
                if not failures:
                    _tell_all(owner[ref][0], failure)
                    deadline = time.monotonic() + SETTLE_S
                failures.append(failure)
            at_work[handle_of[ref]] -= 1
            if on_done is not None and not failures and not at_work[handle_of[ref]]:
                on_done(handle_of[ref])
    if failures:
        raise min(failures, key=lambda f: (not isinstance(f, WorkerDied), f.secondary, f.at))


def _tell_all(group: WorkerGroup, failure: WorkerFailed) -> None:
    if isinstance(failure, WorkerDied):
        release_dead(group.hub_address, failure.worker)
    channels.fail_all(group.hub_address, failure, for_good=isinstance(failure, WorkerDied))


def _failure_of(ref: Any, group: WorkerGroup, rank: int) -> WorkerFailed | None:
    import ray
    from ray.exceptions import RayActorError, RayError

    name = group.worker_name(rank)
    try:
        result = ray.get(ref)
    except RayActorError as error:
        if error.actor_init_failed:
            return WorkerFailed(name, "failed to start", str(error), time.time())
        summary = "died: its process ended (killed, out of memory or crashed)"
        reasons = [line for line in str(error).splitlines()[1:] if not line.startswith("\t")] or [str(error)]
        return WorkerDied(name, summary, " ".join(reasons).split(" Some common causes")[0], time.time())
    except RayError as error:  # for example a result that cannot be pickled
        return WorkerFailed(name, "failed outside its method", str(error), time.time())
    return result if isinstance(result, WorkerFailed) else None


class Watch:
    """Looks for dead workers from a thread of the driver, whatever the driver itself waits for.

    A question that a busy worker cannot answer yet costs nothing; one to a dead worker comes back as an error.
    """

    def __init__(self, groups: Sequence[WorkerGroup]) -> None:
        self._groups = groups
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="worker-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        import ray

        asked: dict[tuple[WorkerGroup, int, Any], Any] = {}
        while not self._stop.wait(WATCH_S) and ray.is_initialized():
            for group in list(self._groups):
                for rank, actor in enumerate(group.actors):
                    if (group, rank, actor) not in asked:
                        asked[group, rank, actor] = actor.alive.remote()
            answered, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=0) if asked else ([], [])
            for (group, rank, actor), ref in list(asked.items()):
                if ref in answered:
                    del asked[group, rank, actor]
                    failure = _failure_of(ref, group, rank)
                    if failure is not None and group in self._groups and actor in group.actors:
                        _tell_all(group, failure)
                        return
