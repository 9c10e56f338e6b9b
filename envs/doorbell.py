"""Chunk steps without the server in between, where trainer, env server and env processes are on one host.

`Doorbell` is an env process's end for one set of envs, `Doorbells` the trainer's, for all processes of the set. What a
chunk takes and gives lies in shared memory; through two pipes go only its number, and that it is done. The trainer
opens them as it maps the memory, by `/proc`. Whatever is out of the ordinary (episodes that ended, errors, a process
that is slow or gone) the trainer asks the server for, by the number: a process runs each chunk once and keeps its
outcome.
"""

from __future__ import annotations

import os
import re
import select
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

NUMBER = struct.Struct("q")
DONE = struct.Struct("q?ddd")  # number, whether there is nothing to ask the server for, start, end, processor seconds


class Doorbell:
    """The env process's end."""

    def __init__(self) -> None:
        self._rung, self._ring = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._heard, self._answer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    @property
    def descriptor(self) -> int:
        """Can be read from when it was rung."""
        return self._rung

    @property
    def place(self) -> list[Any]:
        """Where the trainer finds it: process, and descriptor and name of both pipes."""
        names = [os.readlink(f"/proc/self/fd/{descriptor}") for descriptor in (self._rung, self._answer)]
        return [os.getpid(), self._rung, names[0], self._answer, names[1]]

    def number(self) -> int:
        """Of the chunk it was rung for. Raises BlockingIOError if it was not."""
        (number,) = NUMBER.unpack(os.read(self._rung, NUMBER.size))
        return number

    def answer(self, number: int, is_all: bool, start: float, end: float, cpu: float) -> None:
        """Tell that a chunk is done. `is_all`: there is nothing to ask the server for."""
        with suppress(BlockingIOError):  # nobody has listened for long
            os.write(self._answer, DONE.pack(number, is_all, start, end, cpu))

    def close(self) -> None:
        for descriptor in (self._rung, self._ring, self._heard, self._answer):
            os.close(descriptor)


class Doorbells:
    """The trainer's end. Raises OSError where the places are not on this host, or not this user's.

    Raises TypeError and ValueError for what are no places.
    """

    def __init__(self, places: Sequence[Sequence[Any]]) -> None:
        self.places = places
        self._rings: list[int] = []
        self._answers: dict[int, int] = {}  # descriptor: number of the process
        self._poller = select.poll()
        try:
            for number, pid, rung, rung_name, answer, answer_name in places:
                self._rings.append(_open(pid, rung, rung_name, os.O_WRONLY))
                self._answers[_open(pid, answer, answer_name, os.O_RDONLY)] = number
        except BaseException:
            self.close()
            raise
        for descriptor in self._answers:
            self._poller.register(descriptor, select.POLLIN)

    def ring(self, number: int) -> None:
        """Begin a chunk in all processes. Raises OSError if one is gone."""
        for descriptor in self._rings:
            os.write(descriptor, NUMBER.pack(number))

    def wait(self, number: int, timeout_s: float) -> list[tuple[int, float, float, float]] | None:
        """The spans of a chunk (process, start, end, processor seconds), or None: the server has to be asked."""
        spans: dict[int, tuple[int, float, float, float]] = {}
        deadline = time.monotonic() + timeout_s
        while len(spans) < len(self._answers):
            ready = self._poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not ready:
                return None
            for descriptor, _ in ready:
                told = os.read(descriptor, DONE.size)
                if len(told) < DONE.size:  # the process is gone
                    return None
                done, is_all, *times = DONE.unpack(told)
                if done != number:  # of a chunk that the server was asked for
                    continue
                if not is_all:
                    return None
                process = self._answers[descriptor]
                spans[process] = (process, *times)
        return [spans[process] for process in sorted(spans)]

    def close(self) -> None:
        for descriptor in (*self._rings, *self._answers):
            os.close(descriptor)
        self._rings, self._answers = [], {}


def _open(pid: int, descriptor: int, name: str, mode: int) -> int:
    path = f"/proc/{int(pid)}/fd/{int(descriptor)}"
    if not re.fullmatch(r"pipe:\[\d+\]", name) or os.readlink(path) != name:
        raise OSError(f"{path} is not the pipe that the server spoke of")
    return os.open(path, mode | os.O_NONBLOCK | os.O_CLOEXEC)
