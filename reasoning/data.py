"""Problems: read from files or generated, filtered by length, and the order in which training sees them.

A problem's prompt is a plain text or a list of chat messages. Files hold one problem a row, as JSONL or Parquet, with
columns named by the configuration (format "plain") or as GSM8K, MATH, AIME and GPQA-diamond are published.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from reasoning.config import DataConfig
from reasoning.extraction import answer_of, boxed
from reasoning.tasks import TASKS, generated

Messages = list[dict[str, str]]


_AIME_ANSWER = re.compile(
    r"(?P<math>\$\$?)? \s* (?P<box>\\boxed\s*\{)? \s*"
    r"0* (?P<number>[0-9]{1,3}) (?:\.0*)? \s* (?:\^\s*\\circ | \^\s*\{\s*\\circ\s*\} | °)? \s*"
    r"(?(box)\}) \s* (?(math)(?P=math)) \.?",
    re.VERBOSE,
)


class DataError(ValueError):
    """Problems that cannot be read; the message names file and line."""


@dataclass(frozen=True)
class Problem:
    """One problem. `columns`: everything else that its row holds, for reward functions."""

    id: str
    prompt: str | Messages
    answer: str
    columns: dict[str, Any] = field(default_factory=dict)


@dataclass
class Loaded:
    """What a file gave: problems, and how many rows were left out as not understood or as too long."""

    problems: list[Problem]
    bad: int = 0
    long: int = 0


def load(config: DataConfig, held_out: bool) -> Loaded:
    """The training or the held-out problems of a configuration, without regard to their length.

    Raises DataError for a file that is missing or holds a bad line, unless bad lines are to be skipped.
    """
    name = config.test if held_out else config.train
    if name in TASKS:
        pairs = generated(name, config.test_size if held_out else config.train_size, held_out)
        return Loaded([_problem(config, f"{name}#{n}", p, a, {}) for n, (p, a) in enumerate(pairs)])
    loaded = read(Path(name), config)
    if held_out:
        loaded.problems = loaded.problems[: config.test_size]
    return loaded


def read(path: Path, config: DataConfig) -> Loaded:
    """The problems of a file, in its order. Raises DataError as `load`."""
    loaded, convert = Loaded([]), FORMATS[config.format]
    for line, row in _rows(path):
        try:
            if isinstance(row, Exception):
                raise row
            prompt, answer = convert(row, config)
            problem = _problem(config, f"{path.stem}#{line}", prompt, answer, row)
        except (KeyError, TypeError, ValueError) as error:
            what = f"no column {error}" if isinstance(error, KeyError) else str(error)
            if not config.skip_bad_lines:
                raise DataError(f"{path}, line {line}: {what}") from None
            loaded.bad += 1
            continue
        loaded.problems.append(problem)
    if not loaded.problems:
        raise DataError(f"{path} holds no problem")
    return loaded


def without_long(loaded: Loaded, length: Callable[[Problem], int], most: int) -> Loaded:
    """Leave out problems whose prompt has more than `most` tokens. Raises DataError if none is left."""
    kept = [problem for problem in loaded.problems if length(problem) <= most]
    if not kept:
        raise DataError(f"all {len(loaded.problems)} prompts have more than {most} tokens (data.max_prompt_tokens)")
    return Loaded(kept, loaded.bad, loaded.long + len(loaded.problems) - len(kept))


class Order:
    """Which problems come next: passes over all of them, each in an order of its own drawn from the seed.

    `cursor`, the number of problems given out, is the whole state.
    """

    def __init__(self, size: int, seed: int, cursor: int = 0) -> None:
        self.size, self.seed, self.cursor = size, seed, cursor

    def take(self, count: int) -> list[tuple[int, int]]:
        """The next `count` as (pass, index); a batch may span the border of two passes."""
        places = range(self.cursor, self.cursor + count)
        self.cursor += count
        orders = {number: self._order(number) for number in {place // self.size for place in places}}
        return [(place // self.size, int(orders[place // self.size][place % self.size])) for place in places]

    def _order(self, number: int) -> np.ndarray:
        return np.random.default_rng([self.seed, number]).permutation(self.size)


# --- formats ------------------------------------------------------------------------------------------------


def _plain(row: dict[str, Any], config: DataConfig) -> tuple[str | Messages, str]:
    return row[config.prompt_column], _text(row, config.answer_column)


def _gsm8k(row: dict[str, Any], _: DataConfig) -> tuple[str, str]:
    """`question`, and `answer` with the result after `####`."""
    answer = _text(row, "answer")
    if "####" not in answer:
        raise ValueError("the answer has no '####'")
    return row["question"], answer.rsplit("####", 1)[1].strip()


def _math(row: dict[str, Any], _: DataConfig) -> tuple[str, str]:
    """`problem`, and `answer` or the last `\\boxed{}` of `solution`."""
    if row.get("answer") is not None:
        return row["problem"], _text(row, "answer")
    found = boxed(_text(row, "solution"))
    if found is None or not (answer := answer_of(rf"\boxed{{{found}}}")):
        raise ValueError("the solution has no \\boxed answer")
    return row["problem"], answer


def _aime(row: dict[str, Any], _: DataConfig) -> tuple[str, str]:
    """`problem` or `question`, and `answer`, also as TeX and in degrees; names in any case."""
    row = {name.lower(): value for name, value in row.items()}
    if not (whole := _AIME_ANSWER.fullmatch(_text(row, "answer").strip())):
        raise ValueError(f"'answer' is {row['answer']!r}; expected a whole number from 0 to 999")
    return row["problem" if "problem" in row else "question"], whole["number"]


def _gpqa(row: dict[str, Any], _: DataConfig) -> tuple[str, str]:
    """`Question` and the correct and three incorrect answers; their order is drawn from the question."""
    question, right = _text(row, "Question"), _text(row, "Correct Answer").strip()
    choices = [right, *(_text(row, f"Incorrect Answer {number}").strip() for number in (1, 2, 3))]
    if not question.strip() or not all(choices) or len(set(choices)) < 4:
        raise ValueError(f"expected a question and four different choices, not {question!r} and {choices}")
    random.Random(question).shuffle(choices)
    listed = "\n".join(f"({letter}) {choice}" for letter, choice in zip("ABCD", choices, strict=True))
    return f"{question.strip()}\n\n{listed}", "ABCD"[choices.index(right)]


def _text(row: dict[str, Any], column: str) -> str:
    """A text or a number of a row, as a text."""
    value = row[column]
    is_number = isinstance(value, int | float | Decimal) and not isinstance(value, bool) and -inf < value < inf
    if not isinstance(value, str) and not is_number:
        raise ValueError(f"'{column}' is {value!r}; expected a text or a number")
    return str(value)


FORMATS: dict[str, Callable[[dict[str, Any], DataConfig], tuple[str | Messages, str]]] = {
    "plain": _plain,
    "gsm8k": _gsm8k,
    "math": _math,
    "aime": _aime,
    "gpqa": _gpqa,
}


def _problem(config: DataConfig, name: str, prompt: Any, answer: str, row: dict[str, Any]) -> Problem:
    if isinstance(prompt, Sequence | np.ndarray) and not isinstance(prompt, str):
        prompt = [dict(message) if isinstance(message, Mapping) else {} for message in prompt]
        if not prompt or any(
            not isinstance(m.get("role"), str) or not isinstance(m.get("content"), str) for m in prompt
        ):
            raise ValueError("a chat prompt is a list of messages with 'role' and 'content'")
        prompt[-1]["content"] = _instructed(prompt[-1]["content"], config)
    elif isinstance(prompt, str) and prompt.strip():
        prompt = _instructed(prompt, config)
    else:
        raise ValueError(f"the prompt is {prompt!r}; expected a text or a list of messages")
    if not answer.strip():
        raise ValueError("the answer is empty")
    try:
        json.dumps([prompt, answer], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the prompt or the answer holds half a character: {error}") from None
    taken = {config.prompt_column, config.answer_column}
    return Problem(name, prompt, answer, {key: value for key, value in row.items() if key not in taken})


def _instructed(text: str, config: DataConfig) -> str:
    return f"{text}\n{config.instruction}" if config.instruction else text


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    """(line, row) of a file; a ValueError in place of a row that is not one."""
    if not path.is_file():
        problem = "is a directory" if path.is_dir() else "does not exist"
        raise DataError(f"{path} {problem}; generated sets are {', '.join(TASKS)}")
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet
        except ImportError:
            raise DataError(f"{path}: reading Parquet takes pyarrow: pip install pyarrow") from None
        try:
            batches = pyarrow.parquet.ParquetFile(path).iter_batches(1024)
            yield from enumerate((row for batch in batches for row in _rows_of(batch)), start=1)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{path} is no Parquet file that can be read: {error}") from None
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
                    yield number, row if isinstance(row, dict) else ValueError("not a JSON object")
                except json.JSONDecodeError as error:  # without its own count of lines
                    yield number, ValueError(f"not JSON: {error.msg}, at character {error.pos}")
                except (ValueError, RecursionError) as error:
                    yield number, ValueError(f"not JSON: {error}")


def _rows_of(batch: Any) -> Iterator[Any]:
    """The rows of a batch of Parquet; a ValueError in place of one with a value that Python cannot hold."""
    for place in range(len(batch)):
        try:
            yield batch.slice(place, 1).to_pylist()[0]
        except (ValueError, OverflowError) as error:
            yield ValueError(f"not a row: {error}")
