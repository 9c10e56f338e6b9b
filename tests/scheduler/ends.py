"""What tests of channels share: a channel of a hub, who waits in it, a call in a thread or process, and a wait."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scheduler.channel import Channel
from scheduler.hub import Hub
from scheduler.transport import Location, pack, unpack


def make(hub: Hub, name: str = "c", capacity: int = 16, receivers: tuple[Location, ...] = ()) -> Channel:
    return Channel(name, hub.endpoint, capacity, "env", "actor", receivers, 60.0)


def waiters(hub: Hub, name: str = "c") -> int:
    """How many wait for items of a channel, or for room in it."""
    queues = list(hub._channels[name].queues.values()) if name in hub._channels else []
    return sum(len(queue.getters) + len(queue.putters) for queue in queues)


def connections(hub: Hub) -> int:
    """How many clients of this host the hub is connected to."""
    return Path("/proc/net/unix").read_text().count(hub.endpoint.local.removeprefix("ipc://")) - 1  # where it listens


def await_farewell(hub: Hub, before: int) -> None:
    """Wait until the hub has fewer connections than before, and no longer delivers to the one that went."""
    assert wait_until(lambda: connections(hub) < before)
    for _ in range(2):  # on the first the end of the connection reaches its queue, and on the second it has seen it
        make(hub, "other").size()


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Whether it came true; the limit is a bound for "does not hang" on a busy machine."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


class Background:
    """A call in a thread; `result` waits for what it returned or raised."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.outcome: Any = None
        self.thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self.thread.start()

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            self.outcome = work()
        except BaseException as error:
            self.outcome = error

    @property
    def waits(self) -> bool:
        self.thread.join(0.3)
        return self.thread.is_alive()

    def result(self) -> Any:
        self.thread.join(90)
        assert not self.thread.is_alive(), "it hangs"
        return self.outcome


def send(value: Any) -> Any:
    return unpack(pack(value, "shared_memory"))


def run_script(script: str, *args: str) -> str:
    done = subprocess.run([sys.executable, "-c", script, *args], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout
