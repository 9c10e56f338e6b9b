"""Accuracy of a model on a benchmark: pass@1, avg@k, maj@k and pass@k with 95 % intervals; a file of every problem."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from embodied_rl.report_data import wilson_interval
from reasoning.answers import normal_form
from reasoning.extraction import answer_of
from reasoning.samples import Group


@dataclass(frozen=True)
class Estimate:
    """A mean over problems and its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.1%} [{self.low:.1%}, {self.high:.1%}]"


@dataclass(frozen=True)
class Judged:
    """The completions of one problem, judged."""

    id: str
    prompt: Any
    answer: str
    completions: list[str]
    answers: list[str | None]
    verdicts: list[bool | None]
    finished: list[bool]
    tokens: list[int]

    @classmethod
    def of(cls, group: Group) -> Judged:
        """From a group that the judge has scored for accuracy."""
        problem, completions = group.prompt.problem, group.completions
        rewards = [completion.rewards["accuracy"] for completion in completions]
        return cls(
            problem.id,
            problem.prompt,
            problem.answer,
            [completion.text for completion in completions],
            [answer_of(completion.text, problem.answer) if completion.finished else None for completion in completions],
            [None if reward is None else reward > 0 for reward in rewards],
            [completion.finished for completion in completions],
            [len(completion.ids) for completion in completions],
        )


def accuracy(problems: Sequence[Judged]) -> dict[str, Estimate]:
    """Estimates by name: "pass@1", and for k > 1 completions of each problem "avg@k", "maj@k" and "pass@2^i".

    An undecided verdict counts as not right. pass@k is the unbiased estimator (arXiv 2107.03374, equation 1). pass@1 is
    of the first completion, avg@k of all.
    """
    count = min(len(problem.verdicts) for problem in problems)
    right = [[verdict is True for verdict in problem.verdicts[:count]] for problem in problems]
    found = {"pass@1": _estimate([float(verdicts[0]) for verdicts in right])}
    if count == 1:
        return found
    found[f"avg@{count}"] = _estimate([sum(verdicts) / count for verdicts in right])
    found[f"maj@{count}"] = _estimate([float(majority(problem, count)) for problem in problems])
    for k in sorted({2**i for i in range(1, 20) if 2**i < count} | {count}):
        found[f"pass@{k}"] = _estimate([pass_at(k, count, sum(verdicts)) for verdicts in right])
    return found


def pass_at(k: int, count: int, right: int) -> float:
    """Chance that one of k completions is right, when `right` of `count` are. Raises ValueError for k above `count`."""
    if k > count:
        raise ValueError(f"pass@{k} of {count} completions: at least {k} are needed")
    return 1.0 - math.comb(count - right, k) / math.comb(count, k)


def majority(problem: Judged, count: int) -> bool:
    """Whether the answer that most of the first `count` completions gave is right; of equal ones the earliest."""
    given = [(answer, verdict) for answer, verdict in zip(problem.answers, problem.verdicts, strict=True)][:count]
    # Right answers are one answer however they are written; wrong ones where they are written almost alike.
    votes = Counter(True if verdict else normal_form(answer) for answer, verdict in given if answer is not None)
    return bool(votes) and votes.most_common(1)[0][0] is True


def write(problems: Sequence[Judged], path: Path) -> None:
    """One JSON object a problem: what was asked, what came back, which answer was extracted, the verdict."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for problem in problems:
            file.write(json.dumps(vars(problem), ensure_ascii=False) + "\n")


def table(problems: Sequence[Judged], most: int) -> tuple[list[str], list[list[str]]]:
    """Columns and rows that show the first completion of some problems."""
    mark = {True: "right", False: "wrong", None: "undecided"}
    rows = [
        [prompt_text(p.prompt), p.completions[0], str(p.answers[0]), p.answer, mark[p.verdicts[0]]]
        for p in problems[:most]
    ]
    return ["prompt", "completion", "answer", "reference", "verdict"], rows


def show(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Print a table, of long cells the beginning; nothing without rows."""
    if not rows:
        return
    shown = Table(*columns, title=title, title_justify="left")
    for row in rows:
        shown.add_row(*(Console().render_str(cell[:200], markup=False, highlight=False) for cell in row))
    Console().print(shown)


def prompt_text(prompt: Any) -> str:
    """What the user says in a prompt."""
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


def _estimate(values: Sequence[float]) -> Estimate:
    """Over problems: the score interval for shares, else the normal one; of a single problem nothing is known."""
    n, mean = len(values), sum(values) / len(values)
    if all(value in (0.0, 1.0) for value in values):
        return Estimate(mean, *wilson_interval(round(sum(values)), n))
    if n == 1:
        return Estimate(mean, 0.0, 1.0)
    half = 1.959964 * math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1) / n)
    return Estimate(mean, max(0.0, mean - half), min(1.0, mean + half))
