"""What is wrong with what the user asked for, and how it is shown: all faults at once, on one screen."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Fault:
    """One thing that keeps a run from starting.

    `key` is a configuration key, or what was given ("recipe", "--resume"); `value` is what was given for it;
    `problem` says what was expected instead; `hint` names the nearest valid value or the command that helps.
    `defaulted` lists keys that hold their defaults because of this fault: checks of these would mislead.
    `obtainable`: nothing is wrong but that something is not on this machine yet; a dry run goes on.
    """

    key: str
    value: Any
    problem: str
    hint: str = ""
    defaulted: tuple[str, ...] = ()
    obtainable: bool = False


def defaulted_keys(faults: Sequence[Fault]) -> frozenset[str]:
    """Keys whose values were not understood and were replaced by defaults."""
    return frozenset(key for fault in faults for key in fault.defaulted)


def nearest_multiples(value: int, unit: int, minimum: int = 1) -> str:
    """The multiples of `unit` on both sides of `value`: "8 or 10"."""
    lower = value // unit * unit
    near = [number for number in (lower, lower + unit) if number >= minimum]
    return " or ".join(map(str, near))


def nearest_divisors(value: int, *numbers: int, minimum: int = 1) -> str:
    """The common divisors of `numbers` nearest to `value`, one on each side: "4 or 6"; "" if none."""
    smallest = min(numbers)
    divisors = [d for d in range(minimum, smallest + 1) if not any(number % d for number in numbers)]
    near = [*[d for d in divisors if d <= value][-1:], *[d for d in divisors if d > value][:1]]
    return " or ".join(map(str, near))


def any_of(words: Collection[str]) -> str:
    """Words as a choice: "a", "a or b", "a, b or c"."""
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def show(value: Any) -> str:
    """A value on one line, as it would be written in YAML."""
    if isinstance(value, str):
        return value or '""'
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def print_faults(faults: Sequence[Fault], action: str) -> None:
    """Prints all faults to stderr, grouped by section; `action` is what did not start because of them."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
    console.print(Text(f"{count}; {action} was not started.", "bold red"))
    groups: dict[str, list[Fault]] = {}
    for fault in faults:
        groups.setdefault(fault.key.partition(".")[0], []).append(fault)
    for group in groups.values():
        for fault in group:
            given = "" if fault.value is None else f" = {show(fault.value)}"
            console.print(Text.assemble("  ", (fault.key + given, "bold"), ": ", fault.problem))
            if fault.hint:
                console.print(Text.assemble("      ", (fault.hint, "green")))
