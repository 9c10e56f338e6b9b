"""Workers for flows under test. No torch: every process would import it."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ends import wait_until

from scheduler.stage import Link, Output
from scheduler.worker import Worker


def spin(seconds: float) -> None:
    """Of this thread alone: what Ray's threads do meanwhile is no part of the work."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Maker(Worker):
    """Doubles numbers; remembers how many."""

    made = 0

    def double(self, numbers: list[int]) -> list[int]:
        self.made += len(numbers)
        return [2 * number for number in numbers]

    def slowly(self, numbers: list[int], seconds: float = 0.0) -> list[int]:
        spin(seconds * len(numbers))
        return self.double(numbers)

    def one_by_one(self, numbers: list[int], taken: Path) -> Iterator[tuple[int, int]]:
        """The last first, and each once the one before has been taken."""
        for position in reversed(range(len(numbers))):
            yield position, 2 * numbers[position]
            assert wait_until((taken / str(2 * numbers[position])).exists)

    def odd(self, numbers: list[int]) -> list[int | None]:
        return [number if number % 2 else None for number in numbers]

    def too_few(self, numbers: list[int]) -> list[int]:
        return numbers[1:]

    def fail(self, numbers: list[int]) -> None:
        raise ValueError("broken gripper")

    def state(self) -> int:
        return self.made

    def restore(self, states: list[Any]) -> None:
        self.made = sum(states)

    def count(self) -> int:
        return self.made


class Heavy(Maker):
    """Holds memory that it can put aside."""

    def __init__(self) -> None:
        self.onload()

    def offload(self) -> None:
        del self.ballast
        time.sleep(0.05)

    def onload(self) -> None:
        time.sleep(0.1)
        self.ballast = bytearray(os.urandom(1)) * (64 << 20)


class Taker(Worker):
    """Takes what comes."""

    def take(self, numbers: list[int], taken: Path) -> list[int]:
        """Leaves a file for each."""
        for number in numbers:
            (taken / str(number)).touch()
        return numbers

    def slowly(self, numbers: list[int], seconds: float = 0.0) -> list[int]:
        spin(seconds * len(numbers))
        return numbers

    def pair(self, left: list[int], right: list[int]) -> list[tuple[int, int]]:
        return list(zip(left, right, strict=True))

    def gather(self, numbers: list[int]) -> Output:
        return Output([sum(numbers)], report=(self.iteration, numbers))

    def hear(self, numbers: list[int]) -> Output:
        return Output(report=(self.rank, numbers))

    # ---- a loop

    def step(self, link: Link, start: int = 0) -> int:
        """Send a number for each group; the answers, summed, are the next numbers."""
        values = [start + group for group in range(link.groups)]
        for _ in range(link.steps):
            for group, value in enumerate(values):
                link.send(group, value)
            for group in range(link.groups):
                value = link.answer(group)
                with link.call(1):
                    values[group] = value
        link.finish()
        return sum(values)

    def act(self, link: Link) -> int:
        calls, running = 0, link.loop.ranks[0]
        last: dict[int, int] = {}
        while running:
            stream, value = link.next()
            if stream < 0:
                running -= 1
                continue
            with link.call(1):
                last[stream] = value + 1
            link.reply(stream, last[stream])
            calls += 1
        for stream, value in last.items():
            link.emit(stream, value)
        return calls
