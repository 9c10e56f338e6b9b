"""What passes between the workers: a prompt, and the group of completions that it was given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from reasoning.data import Problem

EVALUATION = 1 << 40  # numbers of prompts from here on are those of evaluations


@dataclass(frozen=True)
class Prompt:
    """A problem to be sampled. `number` is unique in a run and decides the random numbers of its completions."""

    problem: Problem
    number: int

    @property
    def is_of_evaluation(self) -> bool:
        return self.number >= EVALUATION


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn; temperature 0 takes the likeliest token."""

    count: int
    temperature: float
    max_new_tokens: int


@dataclass
class Completion:
    """One answer of the model.

    Attributes:
        ids: its tokens, the one that ended it included.
        logprobs: of each token when it was drawn, at the sampling temperature.
        finished: it ended by itself, not at the limit of length.
        rewards: by function; None: undecided.
        reward: their weighted sum, with the overlong penalty; None: undecided, it takes no part in learning.
        reference: log-probs of its tokens under the reference model, where the divergence from it counts.
    """

    ids: list[int]
    logprobs: list[float]
    finished: bool
    text: str = ""
    rewards: dict[str, float | None] = field(default_factory=dict)
    reward: float | None = None
    reference: list[float] | None = None


@dataclass
class Group:
    """The completions of one prompt, drawn with the weights of version `version` (iterations learned)."""

    prompt: Prompt
    prompt_ids: list[int]
    completions: list[Completion]
    version: int = 0

    @classmethod
    def of(cls, content: dict[str, Any]) -> Group:
        """What `dataclasses.asdict` made of it."""
        prompt, completions = content["prompt"], content["completions"]
        problem = Problem(**prompt["problem"])
        whole = {"prompt": Prompt(problem, prompt["number"]), "completions": [Completion(**c) for c in completions]}
        return cls(**{**content, **whole})
