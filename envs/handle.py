"""The parent's end of one env process: starting it, talking to it, and finding out how it died."""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from importlib.machinery import PathFinder
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any

from envs import child
from envs.base import EnvError

STDERR_KEPT = 4000  # bytes of what the process said last


class ProcessLost(Exception):
    """The process is gone; the message says how."""


class ProcessHandle:
    """One env process: its pipe, and the answers that came while another set's was awaited.

    Args:
        timeout_s: bound of a single read or write, for a process that stops in the middle of a message.
    """

    def __init__(self, number: int, timeout_s: float) -> None:
        self.number = number
        self.is_lost = False
        self.answers: dict[int, deque[tuple[bool, Any]]] = {}
        ours, theirs = socket.socketpair()
        limit = struct.pack("ll", int(timeout_s) + 1, 0)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self.popen = subprocess.Popen(
            child.command(sys.executable, "envs.process", [str(theirs.fileno())]),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,  # a simulator that asks gets no answer
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": _search_path(), "OMP_NUM_THREADS": "1"},
        )
        assert self.popen.stderr is not None
        os.set_blocking(self.popen.stderr.fileno(), False)
        self._said, self._stderr_closed = b"", False
        self._verdict: str | None = None
        theirs.close()
        self._descriptor = ours.detach()
        self.connection = Connection(self._descriptor)
        self._poller = select.poll()
        self._poller.register(self._descriptor, select.POLLIN)
        self._poller.register(self.popen.stderr.fileno(), select.POLLIN)

    def send(self, *command: Any) -> None:
        try:
            self.connection.send(command)
        except BlockingIOError:  # half a command was sent: nothing sensible can follow
            self.popen.kill()
            self._verdict = "took no commands any more and was killed"
        except OSError:
            pass  # it died, or was ended: the wait for the answer finds out why

    @property
    def descriptors(self) -> list[int]:
        """Something can be read from one of these when the process has answered, spoken or died."""
        stderr = self.popen.stderr
        if self.connection.closed:
            return []
        return [self._descriptor, *([stderr.fileno()] if stderr and not self._stderr_closed else [])]

    def take_in(self) -> None:
        """Read the first of what has come, without waiting."""
        try:
            self._take_in(0)
        except ProcessLost:
            self.is_lost = True  # `receive` tells how

    def peek(self, key: int) -> bool | None:
        """Whether the next answer for one set is a success; None: it was not taken in yet."""
        queue = self.answers.get(key)
        return queue[0][0] if queue else None

    def receive(self, key: int, timeout: float) -> Any:
        """The next answer for one set. Raises ProcessLost, or EnvError with the process's own error."""
        queue = self.answers.setdefault(key, deque())
        deadline = time.monotonic() + timeout
        while not queue:
            self._take_in(max(0.0, deadline - time.monotonic()))
            if not queue and time.monotonic() >= deadline:
                self.popen.kill()
                raise ProcessLost(f"did not answer for {timeout:g} s and was killed")
        ok, payload = queue.popleft()
        if not ok:
            raise EnvError(payload)
        return payload

    def kill(self) -> None:
        """End it now and free what the parent holds of it."""
        self.popen.kill()
        self.popen.wait()
        self.is_lost = True
        self.connection.close()
        assert self.popen.stderr is not None
        self.popen.stderr.close()

    def _take_in(self, timeout: float) -> bool:
        """Read an answer, or what it said, if one comes in time; whether anything did. Raises ProcessLost."""
        if self.connection.closed:  # its descriptors may be others' by now
            raise ProcessLost(describe_end(self.popen.wait()))
        try:
            ready = dict(self._poller.poll(timeout * 1000))
            if self._descriptor in ready:
                answered, ok, payload = self.connection.recv()
                self.answers.setdefault(answered, deque()).append((ok, payload))
            elif ready:
                self._listen()
        except (EOFError, OSError):
            raise ProcessLost(self._how_it_died()) from None
        return bool(ready)

    def _listen(self) -> None:
        """Take in what it said on stderr, so that it never waits for room there."""
        assert self.popen.stderr is not None
        heard = self.popen.stderr.read()  # None: nothing now; empty: closed
        if heard == b"" and not self._stderr_closed:
            self._stderr_closed = True
            self._poller.unregister(self.popen.stderr.fileno())
        self._said = (self._said + (heard or b""))[-STDERR_KEPT:]

    def _how_it_died(self) -> str:
        try:
            code = self.popen.wait(5)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            return "broke off in the middle of a message and was killed"
        self._listen()
        how = self._verdict or describe_end(code)
        said = self._said.decode(errors="replace").strip()
        return how + (f"; it said:\n{said}" if said else "")


def describe_end(code: int) -> str:
    """What a process did that has this exit code."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def finds(module: str) -> bool:
    """Whether env processes find a module, or the package that it is in."""
    package = module.partition(".")[0]
    return find_spec(package) is not None or PathFinder.find_spec(package, [os.getcwd()]) is not None


def _search_path() -> str:
    """Where the process finds modules: where this one does, and last in the working directory, for your own env."""
    return os.pathsep.join(dict.fromkeys([*(entry or os.getcwd() for entry in sys.path), os.getcwd()]))
