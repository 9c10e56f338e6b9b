"""What the tests run in processes of their own. No torch: every process would import it."""

import logging
import os
import signal
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from ends import wait_until

from scheduler import connection, shared_memory
from scheduler.channel import Channel
from scheduler.shared_memory import HEADER, SENT
from scheduler.transport import unpack
from scheduler.worker import Worker

LARGE = 40_000  # elements, enough bytes for shared memory in every dtype


class Probe(Worker):
    """A worker that does what a test tells it to."""

    def __init__(self, fails: bool = False, slow: float = 0.0, mark: str = "") -> None:
        self.mark = mark
        time.sleep(slow)
        if fails:
            raise ValueError("no such robot")

    def about(self) -> tuple[int, int, tuple[int, ...]]:
        return self.rank, self.world_size, self.devices

    def pid(self) -> int:
        return os.getpid()

    def cores(self) -> set[int]:
        return os.sched_getaffinity(0)

    def echo(self, *args: Any, **kwargs: Any) -> tuple:
        return args, kwargs

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def wait_for(self, path: Path | None) -> None:
        assert path is None or wait_until(path.exists)

    def fail(self, text: str, after: float = 0.0, once: Path | None = None) -> None:
        time.sleep(after)
        self.wait_for(once)
        raise ValueError(text)

    def fail_on_rank(self, rank: int, channel: Channel) -> Any:
        if self.rank == rank:
            raise ValueError("broken gripper")
        return channel.get()

    def end_process(self, after: float = 0.0) -> None:
        time.sleep(after)
        os.kill(os.getpid(), signal.SIGKILL)

    def unpicklable(self) -> Any:
        return threading.Lock()

    def get(self, channel: Channel, timeout: float | None = None) -> Any:
        return channel.get(timeout=timeout)

    def put(self, channel: Channel, items: int, then_fail: bool = False) -> None:
        for i in range(items):
            channel.put(i)
        if then_fail:
            raise ValueError("broken camera")

    def put_array(self, channel: Channel) -> None:
        channel.put(np.zeros(LARGE))

    def scale(self, source: Channel, target: Channel, factor: int) -> None:
        for array in source:
            target.put(array * factor)

    def pass_on(self, obj: Any) -> Any:
        """Rank 0 sends to rank 1, which sends it back."""
        if self.rank == 0:
            self.send(obj, "probe[1]")
            return self.recv("probe[1]", timeout=30.0)
        got = self.recv("probe[0]", timeout=30.0)
        self.send(got, "probe[0]")
        return got

    def receive_from(self, source: str) -> Any:
        return self.recv(source, timeout=0.1)

    def ways(self) -> str:
        """The address by which this worker reaches the hub."""
        ((_, address),) = connection._thread.__dict__["clients"]
        return address

    def blocks(self) -> int:
        """Blocks of shared memory that this worker has sent."""
        return len(shared_memory.arena().blocks)

    def work(self) -> None:
        with self.trace.span("work"):
            pass

    def log(self, text: str) -> None:
        logging.getLogger("probe").info(text)

    def shutdown(self) -> None:
        if self.mark:
            with open(self.mark, "a") as file:
                file.write("shut down\n")


def hold(frames: list[bytes], pipe: Connection) -> None:
    array = unpack(frames)
    pipe.send(float(array.sum()))
    pipe.recv()
    del array
    pipe.send("dropped")
    pipe.recv()


def echo(pipe: Connection) -> None:
    """For each message of tensors: where each one lies, its type and its sum."""
    while (frames := pipe.recv()) is not None:
        tensors = unpack(frames)
        pipe.send({name: (str(t.device), str(t.dtype), int(t.double().sum())) for name, t in tensors.items()})
        del tensors


def take_and_give_back(path: str, size: int, pipe: Connection) -> None:
    memory = shared_memory._attach(path, size)
    pipe.send("ready")
    while not pipe.poll():
        for _ in range(1000):
            HEADER.pack_into(memory, 0, os.getpid())
            HEADER.pack_into(memory, 0, SENT)


def produce(channel: Channel, first: int, count: int) -> None:
    for i in range(first, first + count):
        channel.put((i, np.full(LARGE, i, np.int32)))


def consume(channel: Channel, results: Channel) -> None:
    got = []
    for i, array in channel:
        assert (array == i).all()
        got.append(i)
    results.put(got)


def wait_for_items(channel: Channel, n: int) -> None:
    channel.get(n=n)


class Leaser(Worker):
    """Works on devices it shares; what it holds there is a word."""

    def __init__(self) -> None:
        self.place = "device"

    def hold(self, until: Path | None = None, timeout: float | None = None, keep: bool | None = None) -> None:
        """Keep the devices until a file is there."""
        with self.lease(timeout, keep):
            assert self.place == "device"
            assert until is None or wait_until(until.exists)

    def memory(self) -> str:
        return self.place

    def offload(self) -> None:
        self.place = "host"

    def onload(self) -> None:
        self.place = "device"
