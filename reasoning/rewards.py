"""Rewards of completions: built-in functions, functions of the user, their weighted sum, the overlong penalty.

A reward function is called with the completions of one prompt, all by keyword, as in TRL:

    def reward(prompts, completions, completion_ids, answer, **columns) -> list[float | None]

`prompts` (texts or chat messages), `completions` (texts) and `completion_ids` (tokens) are equally long lists; `answer`
and each other column of the problem's row are repeated likewise. None: undecided; the completion takes no part in
learning. The function may be `async`. It is named by its import path, `package.module:function`.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from reasoning.answers import only_repeats
from reasoning.config import RewardConfig
from reasoning.extraction import answer_of, boxed
from reasoning.samples import Completion, Group
from reasoning.verifier import Verifier

Rewards = list[float | None]


class RewardError(ValueError):
    """A reward function that cannot be used; the message says what to do."""


class Rewarder:
    """Rewards groups by a configuration. Use its `verifier` as a context manager, or close it.

    Args:
        max_new_tokens: the limit of length, from which the overlong penalty counts.

    Raises RewardError for a function that cannot be imported.
    """

    def __init__(self, config: RewardConfig, max_new_tokens: int) -> None:
        self.config, self.max_new_tokens = config, max_new_tokens
        self.verifier = Verifier(config.processes, config.timeout_s)
        self._users = {name: import_function(name) for name in config.functions if name not in BUILT_IN}

    def reward(self, group: Group) -> Group:
        """Fill in the rewards of a group's completions, and their accuracy in evaluations, whether it is paid or not.

        Raises RewardError if a function does not give one each.
        """
        judged = {"accuracy": None} if group.prompt.is_of_evaluation else {}
        for name in {**self.config.functions, **judged}:
            built_in = BUILT_IN.get(name)
            given = built_in(self.verifier, group) if built_in else self._from_user(name, group)
            for completion, value in zip(group.completions, given, strict=True):
                completion.rewards[name] = value
        for completion in group.completions:
            completion.reward = self._total(completion)
        return group

    def _total(self, completion: Completion) -> float | None:
        weighted = [(completion.rewards[name], weight) for name, weight in self.config.functions.items()]
        if any(value is None for value, _ in weighted):
            return None
        total = sum(value * weight for value, weight in weighted if value is not None)
        return total - overlong_penalty(len(completion.ids), self.max_new_tokens, self.config)

    def _from_user(self, name: str, group: Group) -> Rewards:
        problem, count = group.prompt.problem, len(group.completions)
        columns: Mapping[str, Any] = {**problem.columns, "answer": problem.answer}
        arguments: dict[str, Any] = {key: [value] * count for key, value in columns.items()}
        arguments |= {  # columns of these names give way
            "prompts": [problem.prompt] * count,
            "completions": [completion.text for completion in group.completions],
            "completion_ids": [completion.ids for completion in group.completions],
        }
        given = self._users[name](**arguments)
        found = asyncio.run(given) if inspect.isawaitable(given) else given  # type: ignore[arg-type]
        if not isinstance(found, list) or len(found) != count:
            raise RewardError(f"{name} returned {found!r} for {count} completions; expected a list with one for each")
        rewards = [None if value is None else float(value) for value in found]
        if wrong := [value for value in rewards if value is not None and not math.isfinite(value)]:
            raise RewardError(f"{name} gave the reward {wrong[0]}; expected finite numbers, or None for undecided")
        return rewards


def overlong_penalty(length: int, limit: int, config: RewardConfig) -> float:
    """Soft overlong punishment (DAPO, arXiv 2503.14476, equation 13), a number from 0 to `overlong_penalty`.

    It grows over the last `overlong_buffer` tokens before the limit.
    """
    if not config.overlong_buffer:
        return 0.0
    over = length - (limit - config.overlong_buffer)
    return config.overlong_penalty * min(max(over / config.overlong_buffer, 0.0), 1.0)


def _accuracy(verifier: Verifier, group: Group) -> Rewards:
    """1 for a right answer, 0 for a wrong one or a completion that was cut off, None where it is undecided.

    Who answers with an expression of the problem has not solved it.
    """
    problem = group.prompt.problem
    asked = problem.prompt if isinstance(problem.prompt, str) else "\n".join(m["content"] for m in problem.prompt)
    has_answer = [c.finished and not only_repeats(asked, c.text, problem.answer) for c in group.completions]
    pairs = [(c.text if has else None, problem.answer) for c, has in zip(group.completions, has_answer, strict=True)]
    return [None if verdict is None else float(verdict) for verdict in verifier.verify_all(pairs)]


def _format(_: Verifier, group: Group) -> Rewards:
    """1 for a completion that ended by itself and whose answer is boxed, or is all that it says."""
    return [float(c.finished and _is_well_formed(c.text)) for c in group.completions]


def _is_well_formed(text: str) -> bool:
    answer = answer_of(text)
    return answer is not None and (boxed(text) is not None or answer == text.strip())


BUILT_IN: dict[str, Callable[[Verifier, Group], Rewards]] = {"accuracy": _accuracy, "format": _format}


def import_function(name: str) -> Callable[..., Any]:
    """The function of "package.module:function". Raises RewardError."""
    module, colon, function = name.partition(":")
    if not colon:
        raise RewardError(f"'{name}' is no reward function; expected {', '.join(BUILT_IN)} or package.module:function")
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)  # a module may lie in the working directory
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise RewardError(f"the reward function '{name}' cannot be imported: {error}") from error
    if not callable(found):
        raise RewardError(f"'{name}' is not a function")
    return found
