"""A thread's connection to the hub, and who this process is in the run.

Requests wait for their answers without spinning and never for ever: one that nobody waits for any more is withdrawn.
An answer begins with "ok", with "failed" (and an error), or with "withdrawn".
"""

from __future__ import annotations

import itertools
import os
import pickle
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import zmq

from scheduler.trace import Trace

Frames = list[Any]  # bytes, or memoryviews of what is large
SILENCE_S = 60.0  # how long the hub may be silent, because the driver was stopped for example
CHECK_S = 1.0  # who waits asks so often whether it is there
GREETING = b"hello"


class HubLost(ConnectionError):
    """The hub does not answer, or has been closed."""


@dataclass
class Identity:
    """Who this process is: a worker on its node (`host`), or, by default, the driver."""

    name: str = "the driver"
    host: str = ""
    trace: Trace | None = None


this_process = Identity()


def become(identity: Identity) -> None:
    """Tell this process who it is."""
    vars(this_process).update(vars(identity))


@dataclass(frozen=True)
class Endpoint:
    """Where the hub is reached: `local` on its own host, `remote` from others (None: it serves its host alone)."""

    local: str
    remote: str | None
    host: str

    @property
    def here(self) -> str:
        """The host of this process."""
        return this_process.host or self.host

    def connect(self) -> Client:
        """This thread's connection."""
        return connect(self.local if self.here == self.host or not self.remote else self.remote)


class Client:
    """One DEALER socket for a thread; requests are answered in any order and matched by number."""

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 60)  # or a firewall may drop a connection that is idle
        self._socket.connect(address)
        self._address = address
        self._numbers = itertools.count()
        self._name, self._unanswered = b"", 0
        self._greet()

    def request(self, frames: list, timeout: float | None = None, cancel: list | None = None) -> Frames:
        """Send and wait for the answer; after the time limit, seconds, the request is withdrawn by `cancel`.

        Without a limit it is something that the hub need not wait for: it only has to be there.

        Raises HubLost if the hub does not answer, or the connection breaks: what was on its way is lost then.
        """
        try:
            number = self._send(frames)
            answer = self._receive([number], SILENCE_S if timeout is None else timeout)
            if answer is None and cancel is not None:
                withdrawal = self._send([*cancel, number])
                answer = self._receive([number, withdrawal], SILENCE_S)  # the answer may have been on its way
            if answer is None:
                raise HubLost(f"the hub has not answered for {SILENCE_S:g} s; has the driver ended?")
            return answer[1:]
        except BaseException:  # the hub must not deliver to a request that nobody waits for any more
            self.close()
            raise

    def close(self) -> None:
        """Disconnect; the thread's next request connects anew."""
        self._socket.close(linger=0)
        _thread.__dict__["clients"].pop((os.getpid(), self._address), None)

    def _send(self, frames: list) -> bytes:
        number = str(next(self._numbers)).encode()
        self._socket.send_multipart([number, *frames], copy=False)
        return number

    def _receive(self, wanted: Collection[bytes], timeout: float) -> Frames | None:
        deadline = time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            if self._socket.poll(max(0, int(1000 * min(left, CHECK_S)))):
                answer = receive(self._socket)
                if answer[0] in wanted:
                    return answer
                if answer[0] == GREETING:
                    self._check_name(answer[1])
            elif left <= CHECK_S:
                return None
            else:
                self._greet()

    def _greet(self) -> None:
        """Ask by what name the hub knows this connection. A new one has been made underneath if it changes."""
        if self._unanswered * CHECK_S > SILENCE_S:
            raise HubLost(f"the hub has not answered for {SILENCE_S:g} s; has the driver ended?")
        self._unanswered += 1
        self._socket.send_multipart([GREETING, GREETING])

    def _check_name(self, name: bytes) -> None:
        self._unanswered = 0
        if self._name and name != self._name:
            raise HubLost("the connection to the hub broke, and what was on its way is lost")
        self._name = name


_thread = threading.local()


def connect(address: str) -> Client:
    """This thread's connection to a hub; a forked child makes its own."""
    clients = _thread.__dict__.setdefault("clients", {})
    return clients.get((os.getpid(), address)) or clients.setdefault((os.getpid(), address), Client(address))


def receive(socket: zmq.Socket) -> Frames:
    """The parts of one message."""
    parts: Frames = [socket.recv()]
    while socket.getsockopt(zmq.RCVMORE):  # what comes first is small; a view costs more than the copy of that
        parts.append(socket.recv() if len(parts) < 5 else socket.recv(copy=False).buffer)
    return parts


def dump_error(error: BaseException | None) -> bytes:
    """An exception as bytes; one that cannot be pickled is replaced by its description."""
    from ray import cloudpickle

    if error is None:
        return b""
    try:
        data = cloudpickle.dumps(error)
        pickle.loads(data)
        return data
    except Exception:
        return cloudpickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))


def load_error(data: bytes) -> BaseException:
    return pickle.loads(data)
