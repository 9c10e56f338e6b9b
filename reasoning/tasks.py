"""Generated problems of graded difficulty, so that everything runs without a download.

    arithmetic:1   a + b, up to 12, in words    algebra:1   x + a = b
    arithmetic:2   a + b, two digits            algebra:2   a x + b = c
    arithmetic:3   a - b and a + b              algebra:3   the larger root of x^2 + b x + c = 0
    arithmetic:4   a * b, up to 20
    arithmetic:5   a * b + c
    digits:1       12+34= for character models, two digits

The training and the held-out part of a set share no problem.
"""

from __future__ import annotations

import random
from collections.abc import Callable

HELD_OUT = 5  # every fifth problem, by its hash, is held out
EXHAUSTED = 2000  # draws without a new problem after which a set has no more


SUMS = (
    "What is {a} + {b}?",
    "Add {a} and {b}.",
    "{a} + {b} = ?",
    "Calculate {a} plus {b}.",
    "What is the sum of {a} and {b}?",
    "How much is {a} plus {b}?",
    "Tom has {a} apples and is given {b} more. How many apples has he now?",
    "A bus carries {a} people, and {b} more get on. How many people are on the bus?",
    "{a} birds sit in a tree, and {b} join them. How many birds are in the tree?",
    "Ann read {a} pages yesterday and {b} pages today. How many pages did she read?",
)


def _sum_in_words(draw: random.Random) -> tuple[str, str]:
    a, b = draw.randint(1, 12), draw.randint(1, 12)
    return draw.choice(SUMS).format(a=a, b=b), str(a + b)


def _sum(draw: random.Random) -> tuple[str, str]:
    a, b = draw.randint(0, 99), draw.randint(0, 99)
    return f"What is {a} + {b}?", str(a + b)


def _sum_or_difference(draw: random.Random) -> tuple[str, str]:
    a, b, minus = draw.randint(0, 99), draw.randint(0, 99), draw.random() < 0.5
    return f"What is {a} {'-' if minus else '+'} {b}?", str(a - b if minus else a + b)


def _product(draw: random.Random) -> tuple[str, str]:
    a, b = draw.randint(2, 20), draw.randint(2, 20)
    return f"What is {a} * {b}?", str(a * b)


def _product_and_sum(draw: random.Random) -> tuple[str, str]:
    a, b, c = draw.randint(2, 20), draw.randint(2, 20), draw.randint(0, 99)
    return f"What is {a} * {b} + {c}?", str(a * b + c)


def _shifted(draw: random.Random) -> tuple[str, str]:
    a, x = draw.randint(1, 50), draw.randint(-20, 50)
    return f"Solve for x: x + {a} = {x + a}", str(x)


def _linear(draw: random.Random) -> tuple[str, str]:
    a, b, x = draw.randint(2, 9), draw.randint(0, 30), draw.randint(-9, 20)
    return f"Solve for x: {a}x + {b} = {a * x + b}", str(x)


def _quadratic(draw: random.Random) -> tuple[str, str]:
    first, second = draw.randint(-15, 15), draw.randint(-15, 15)
    middle, last = -(first + second), first * second
    return f"What is the larger root of x^2 + ({middle})x + ({last}) = 0?", str(max(first, second))


def _digits(draw: random.Random) -> tuple[str, str]:
    a, b = draw.randint(0, 99), draw.randint(0, 99)
    return f"{a:02}+{b:02}=", str(a + b)


TASKS: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    "arithmetic:1": _sum_in_words,
    "arithmetic:2": _sum,
    "arithmetic:3": _sum_or_difference,
    "arithmetic:4": _product,
    "arithmetic:5": _product_and_sum,
    "algebra:1": _shifted,
    "algebra:2": _linear,
    "algebra:3": _quadratic,
    "digits:1": _digits,
}


def generated(name: str, size: int, held_out: bool, seed: int = 0) -> list[tuple[str, str]]:
    """Up to `size` distinct (problem, answer) pairs, of the training or the held-out part.

    Raises KeyError for an unknown name.
    """
    make, draw = TASKS[name], random.Random(f"{name} {held_out} {seed}")
    found: dict[str, str] = {}
    misses = 0
    while len(found) < size and misses < EXHAUSTED:
        problem, answer = make(draw)
        is_new = problem not in found and _is_held_out(problem) == held_out
        misses = 0 if is_new else misses + 1
        if is_new:
            found[problem] = answer
    return list(found.items())


def _is_held_out(problem: str) -> bool:
    return random.Random(problem).randrange(HELD_OUT) == 0
