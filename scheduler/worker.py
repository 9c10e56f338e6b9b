"""Workers and worker groups: classes in Ray actors, called as one.

A `Worker` runs in a process of its own, on the devices its placement names. A `WorkerGroup` is the driver's handle
on all its ranks. When one fails, `wait_all` finds the first cause and tells every other worker through the channels.
"""

from __future__ import annotations

import logging
import os
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayActorError

from scheduler import channel as channels
from scheduler.channel import Channel, ChannelClosed, ChannelTimeout
from scheduler.trace import Event, Trace
from scheduler.transport import Location

SETTLE_S = 1.0  # after a failure, how long others may take to report theirs, so that the first cause is among them


class WorkerFailed(Exception):
    """A worker raised; the message is its original traceback."""

    def __init__(self, worker: str, summary: str, details: str = "", at: float = 0.0, secondary: bool = False) -> None:
        super().__init__(worker, summary, details, at, secondary)
        self.worker, self.summary, self.details, self.at, self.secondary = (
            worker,
            summary,
            details,
            at,
            secondary,
        )

    def __str__(self) -> str:
        return f"{self.worker} {self.summary}" + (f"\n{self.details}" if self.details else "")


class WorkerDied(WorkerFailed):
    """A worker's process ended without raising (killed, out of memory, crashed)."""


@dataclass(frozen=True)
class Context:
    """What a worker knows of its place. `mailbox` is a template for the channels of `send` and `recv`."""

    group: str
    rank: int
    world_size: int
    devices: tuple[int, ...]
    device_kind: str
    cores: tuple[int, ...]
    host: str
    mailbox: Channel
    log_file: str | None = None

    @property
    def name(self) -> str:
        return f"{self.group}[{self.rank}]"


class Worker:
    """Base class of what runs in a worker process. `self.rank` and the rest are there before `__init__` runs."""

    context: Context
    trace: Trace

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
        self._mailbox(to).put(obj, key=self.context.name, timeout=timeout)

    def recv(self, source: str, timeout: float | None = None) -> Any:
        """Receive the next object from one worker, named like "actor[0]"."""
        return self._mailbox(self.context.name).get(key=source, timeout=timeout)

    def _mailbox(self, owner: str) -> Channel:
        box = self.context.mailbox
        named = Channel.__new__(Channel)
        named.__dict__ = {**box.__dict__, "name": f"mail/{owner}", "consumers": owner, "producers": "a peer"}
        return named

    def drain_trace(self) -> list[Event]:
        """This worker's timeline since the last call."""
        return self.trace.drain()

    def offload(self) -> None:
        """Move device memory to the host; workers that hold some override it."""

    def onload(self) -> None:
        """Undo `offload`."""

    def shutdown(self) -> None:
        """Release what the process would not release by ending."""


class _Host:
    """The Ray actor around a worker: sets the process up, runs methods, turns exceptions into reports."""

    def __init__(self, worker_class: type[Worker], context: Context, args: tuple, kwargs: dict) -> None:
        self.context = context
        if context.device_kind == "gpu":
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str(device) for device in context.cores)
        else:
            os.sched_setaffinity(0, context.cores)
        if context.log_file:
            form = f"%(asctime)s {context.name} %(levelname)s %(message)s"
            logging.basicConfig(filename=context.log_file, level=logging.INFO, format=form, force=True)
        channels.set_host(context.host)
        self.worker = worker_class.__new__(worker_class)
        self.worker.context = context
        self.worker.trace = Trace(context.name)
        self.init = (args, kwargs)

    def start(self) -> Any:
        """Run the worker's `__init__`; returns where it lives, or the failure."""
        args, kwargs = self.init
        failure = self._guard(lambda: self.worker.__init__(*args, **kwargs))  # type: ignore[misc]
        return failure if isinstance(failure, WorkerFailed) else Location.here(self.context.host)

    def call(self, method: str, args: tuple, kwargs: dict) -> Any:
        return self._guard(lambda: getattr(self.worker, method)(*args, **kwargs))

    def _guard(self, work: Any) -> Any:
        channels.take_produced()
        try:
            return work()
        except Exception as error:
            failure = WorkerFailed(
                self.context.name,
                f"failed: {type(error).__name__}: {error}",
                traceback.format_exc(),
                time.time(),
                secondary=isinstance(error, ChannelClosed | ChannelTimeout | WorkerFailed),
            )
            logging.getLogger(__name__).error("%s", failure)
            for produced in channels.take_produced():
                produced.close(failure)
            return failure


class Handle:
    """A call in flight on all ranks of a group."""

    def __init__(self, group: WorkerGroup, refs: list[Any]) -> None:
        self.group, self.refs = group, refs

    def done(self) -> bool:
        return len(ray.wait(self.refs, num_returns=len(self.refs), timeout=0)[0]) == len(self.refs)

    def wait(self, timeout: float | None = None) -> None:
        """Wait for all ranks. Raises WorkerFailed or WorkerDied (the first cause), or TimeoutError."""
        wait_all([self], timeout)

    def result(self, timeout: float | None = None) -> list[Any]:
        """The return values by rank; waits like `wait`."""
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

    def __init__(self, name: str, worker_class: type[Worker], actors: list[Any], hub_address: str) -> None:
        self.name, self.actors, self.hub_address = name, actors, hub_address
        self._worker_class = worker_class
        self.locations: list[Location] = []

    def __getattr__(self, method: str) -> GroupMethod:
        if method.startswith("_") or not callable(getattr(self._worker_class, method, None)):
            raise AttributeError(f"{self._worker_class.__name__} has no method '{method}'")
        return GroupMethod(self, method)

    def __len__(self) -> int:
        return len(self.actors)

    def worker_name(self, rank: int) -> str:
        return f"{self.name}[{rank}]"


def wait_all(handles: Sequence[Handle], timeout: float | None = None) -> None:
    """Wait for calls on several groups at once.

    As soon as one worker fails, every channel is closed with its error, so that nobody waits for it.
    Raises the first cause: a WorkerDied or WorkerFailed. Raises TimeoutError naming who is still at work.
    """
    owner = {ref: (h.group, rank) for h in handles for rank, ref in enumerate(h.refs)}
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
                    channels.fail_all(owner[ref][0].hub_address, failure)
                    deadline = time.monotonic() + SETTLE_S
                failures.append(failure)
    if failures:
        raise min(failures, key=lambda f: (not isinstance(f, WorkerDied), f.secondary, f.at))


def _failure_of(ref: Any, group: WorkerGroup, rank: int) -> WorkerFailed | None:
    try:
        result = ray.get(ref)
    except RayActorError as error:
        reason = " ".join(str(error).split("\n")[0].split())
        summary = "died: its process ended (killed, out of memory or crashed)"
        return WorkerDied(group.worker_name(rank), summary, reason, time.time())
    return result if isinstance(result, WorkerFailed) else None


def with_rank(context: Context, rank: int, devices: tuple[int, ...], cores: tuple[int, ...], host: str) -> Context:
    """The context of one rank, from its group's."""
    return replace(context, rank=rank, devices=devices, cores=cores, host=host)
