"""A pool of processes that compare answers. One that computes for too long is killed and replaced; the pool lives.

No signals are used, so that it works in any thread and in a Ray actor. The bound is on processor time: on a busy
machine no right answer becomes undecided.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import psutil

from reasoning.answers import is_answer, plain_verdict, without_units
from reasoning.extraction import answer_of

START_S = 600.0  # of wall time: the imports of many processes that start at once on a busy machine
WALL_FACTOR = 30.0  # a process that waits instead of computing is killed after so many times the bound
POLL_S = 0.05
Verdict = bool | None


@dataclass
class VerdictCounts:
    """What was decided so far; `timeouts` are among the undecided."""

    right: int = 0
    wrong: int = 0
    undecided: int = 0
    timeouts: int = 0

    def add(self, verdict: Verdict) -> None:
        self.right += verdict is True
        self.wrong += verdict is False
        self.undecided += verdict is None


@dataclass
class Verifier:
    """Verifies predictions against reference answers. Use as a context manager, from one thread at a time.

    Args:
        processes: that compare at once.
        timeout_s: seconds of processor time for one comparison.
    """

    processes: int = 1
    timeout_s: float = 5.0
    counts: VerdictCounts = field(default_factory=VerdictCounts)

    def __post_init__(self) -> None:
        self._pool: list[_Process] = []

    def verify(self, prediction: str | None, answer: str) -> Verdict:
        """As `verify_all`, for one pair."""
        return self.verify_all([(prediction, answer)])[0]

    def verify_all(self, pairs: Sequence[tuple[str | None, str]]) -> list[Verdict]:
        """The verdict on each (completion or answer, reference answer).

        True: equal. False: not equal, or no answer was given (None: the completion was cut off). None: undecided,
        because the reference is no answer, or the comparison did not end in time or failed.
        """
        verdicts: dict[tuple[str, str], Verdict] = {}
        told = [self._without_algebra(prediction, answer, verdicts) for prediction, answer in pairs]
        self._compare([pair for pair, verdict in verdicts.items() if verdict is None], verdicts)
        found = [verdicts[each] if isinstance(each, tuple) else each for each in told]
        for verdict in found:
            self.counts.add(verdict)
        return found

    @staticmethod
    def _without_algebra(
        prediction: str | None, answer: str, verdicts: dict[tuple[str, str], Verdict]
    ) -> Verdict | tuple[str, str]:
        """The verdict, or the pair of answers that is to be compared, which is added to `verdicts`."""
        gold = answer_of(answer) if "boxed" in answer or "####" in answer else answer.strip()
        if gold is None or not is_answer(gold):
            return None
        given = answer_of(prediction, gold) if prediction is not None else None
        if given is None:
            return False
        if (plain := plain_verdict(given, gold)) is not None:
            return plain
        if (pair := without_units(given, gold)) is None:
            return False
        verdicts[pair] = None
        return pair

    def _compare(self, pairs: list[tuple[str, str]], verdicts: dict[tuple[str, str], Verdict]) -> None:
        """Fill in the verdicts on `pairs`, each process working on one at a time.

        A pair whose process dies gets a second one: it may have been killed from outside, not by its bound on memory.
        """
        pairs, at_work, retried = pairs[::-1], dict[_Process, tuple[str, str]](), set[tuple[str, str]]()
        while pairs or at_work:
            while pairs and (process := self._idle(at_work)):
                at_work[process] = pairs.pop()
                process.ask(at_work[process])
            ready, _, _ = select.select([process.reply for process in at_work], [], [], POLL_S)
            for process in list(at_work):
                if process.reply in ready:
                    pair, line = at_work.pop(process), process.reply.readline()
                    if line:
                        verdicts[pair] = json.loads(line)
                        continue
                    self._remove(process)
                    if pair not in retried:
                        retried.add(pair)
                        pairs.append(pair)
                elif process.is_overdue(self.timeout_s):
                    self.counts.timeouts += 1
                    at_work.pop(process)
                    self._remove(process)

    def _idle(self, at_work: dict[_Process, tuple[str, str]]) -> _Process | None:
        for process in [process for process in self._pool if process not in at_work]:
            if not process.has_ended():
                return process
            self._remove(process)
        if len(self._pool) < self.processes:
            self._pool.append(_Process())
            return self._pool[-1]
        return None

    def _remove(self, process: _Process) -> None:
        self._pool.remove(process)
        process.kill()

    def start(self) -> Verifier:
        """Start all processes now; else they start when they are needed."""
        self._pool += [_Process() for _ in range(self.processes - len(self._pool))]
        return self

    def close(self) -> None:
        while self._pool:
            self._remove(self._pool[0])

    def __enter__(self) -> Verifier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Process:
    """One process that runs `reasoning.answers`."""

    def __init__(self) -> None:
        root = str(Path(__file__).resolve().parent.parent)
        paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "reasoning.answers"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": paths},
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self.reply = self._process.stdin, self._process.stdout
        self._started = False

    def ask(self, pair: tuple[str, str]) -> None:
        if not self._started:
            ready, _, _ = select.select([self.reply], [], [], START_S)
            if not ready:
                raise RuntimeError(
                    f"the process that compares answers has not started within {START_S:.0f} s: is it too busy?"
                )
            if self.reply.readline() != b"ready\n":
                raise RuntimeError("the process that compares answers ended: pip install 'embodied-rl[reasoning]'")
            self._started = True
        self._cpu_s, self._since = self._cpu(), time.monotonic()
        try:
            self._requests.write(json.dumps(pair).encode() + b"\n")
            self._requests.flush()
        except BrokenPipeError:
            pass  # it has died meanwhile; its reply ends, which is noticed

    def is_overdue(self, timeout_s: float) -> bool:
        waited = time.monotonic() - self._since
        return self._cpu() - self._cpu_s > timeout_s or waited > WALL_FACTOR * timeout_s

    def _cpu(self) -> float:
        try:
            times = psutil.Process(self._process.pid).cpu_times()
        except psutil.NoSuchProcess:
            return 0.0
        return times.user + times.system

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):  # of a request that it did not live to read
            self._requests.close()
        self.reply.close()
