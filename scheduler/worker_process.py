"""The process of a worker, as a Ray actor: sets it up on its devices, runs methods, turns exceptions into reports."""

from __future__ import annotations

import logging
import os
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from scheduler import channel as channels
from scheduler import shared_memory
from scheduler.channel import Channel, ChannelClosed, ChannelTimeout
from scheduler.connection import HubLost, Identity, become
from scheduler.device_lock import DeviceTimeout
from scheduler.placement import local_device_count
from scheduler.trace import Trace
from scheduler.transport import Location
from scheduler.worker import Context, Worker, WorkerFailed


class WorkerProcess:
    """The Ray actor around a worker."""

    def __init__(self, worker_class: type[Worker], context: Context, args: tuple, kwargs: dict) -> None:
        self.context = context
        if context.device_kind == "gpu":
            os.environ["CUDA_VISIBLE_DEVICES"] = visible_gpus(context.cores)
        else:
            usable = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {usable[core % len(usable)] for core in context.cores})
        if context.log_file:
            form = f"%(asctime)s {context.name} %(levelname)s %(message)s"
            logging.basicConfig(filename=context.log_file, level=logging.INFO, format=form, force=True)
        self.worker = worker_class.__new__(worker_class)
        self.worker.context = context
        self.worker.trace = Trace(context.name)
        self.worker._switch_seconds = {"offload": [], "onload": []}
        become(Identity(context.name, context.host, self.worker.trace))
        self.init = (args, kwargs)
        self.needs_shutdown = False

    def start(self) -> Any:
        """Run the worker's `__init__`; returns where it lives, or the failure."""
        args, kwargs = self.init
        failure = self._guard(self.worker.__init__, args, kwargs)  # type: ignore[misc]
        if isinstance(failure, WorkerFailed):
            return failure
        self.needs_shutdown = True
        return Location.here(self.context.host)

    def call(self, method: str, args: tuple, kwargs: dict) -> Any:
        if method == "shutdown":
            self.needs_shutdown = False
        return self._guard(getattr(self.worker, method), args, kwargs)

    def alive(self) -> None:
        """Answers the watch."""

    def end(self) -> Any:
        """Before the process is killed: shut the worker down and remove its shared memory."""
        failure = self.call("shutdown", (), {}) if self.needs_shutdown else None
        shared_memory.arena().close()
        return failure

    def _guard(self, work: Callable, args: tuple, kwargs: dict) -> Any:
        channels.take_produced()
        try:
            return work(*args, **kwargs)
        except Exception as error:
            failure = self._failure(error)
            concerned = [value for value in (*args, *kwargs.values()) if isinstance(value, Channel)]
            for one in {c.name: c for c in (*concerned, *channels.take_produced())}.values():
                one.close(failure)
            return failure

    def _failure(self, error: Exception) -> WorkerFailed:
        """What is reported: another worker's failure that came through a channel is passed on as it is."""
        log = logging.getLogger(__name__)
        if isinstance(error, WorkerFailed):
            log.warning("stopped because %s %s", error.worker, error.summary)
            return error
        failure = WorkerFailed(
            self.context.name,
            f"failed: {type(error).__name__}: {error}",
            traceback.format_exc(),
            time.time(),
            secondary=isinstance(error, ChannelClosed | ChannelTimeout | DeviceTimeout | HubLost),
        )
        log.error("%s", failure)
        return failure


def visible_gpus(positions: Sequence[int]) -> str:
    """CUDA_VISIBLE_DEVICES for a rank: its own of the GPUs that this process was given, then the others.

    The rank works on its own; to see the others lets it open what their workers send.
    """
    given = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    if not given:
        count, kind = local_device_count()
        given = [str(gpu) for gpu in range(max(count if kind == "gpu" else 0, *(p + 1 for p in positions)))]
    order = [*positions, *(position for position in range(len(given)) if position not in positions)]
    return ",".join(given[position] for position in order)
