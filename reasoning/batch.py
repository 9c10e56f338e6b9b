"""What an actor learns from: completions with their advantages and log-probs, and which groups teach anything."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from reasoning.packing import Sample
from reasoning.samples import Completion, Group


@dataclass
class Batch:
    """Completions to learn from: S of at most L tokens. Numbers of tokens are 0 beyond a completion's end."""

    samples: list[Sample]
    advantage: Tensor  # [S], or [S, L] with a critic
    sampler: Tensor  # [S, L] log-probs when they were drawn
    old: Tensor | None  # [S, L] log-probs before the update; None: those of the first forward pass are
    reference: Tensor | None  # [S, L]
    value: Tensor | None = None  # [S, L] before the update
    returns: Tensor | None = None  # [S, L]

    def rows(self, index: Tensor | list[int], length: int | None = None) -> Batch:
        index = torch.as_tensor(index, dtype=torch.long, device="cpu")

        def take(x: Tensor | None) -> Any:
            return x if x is None else x[index] if x.ndim == 1 else x[index, :length]

        own = {name: take(value) for name, value in self.__dict__.items() if name != "samples"}
        return Batch([self.samples[number] for number in index.tolist()], **own)

    def to(self, device: torch.device) -> Batch:
        own: dict[str, Any] = {name: x.to(device) for name, x in self.__dict__.items() if isinstance(x, Tensor)}
        return replace(self, **own)

    @property
    def mask(self) -> Tensor:
        """Bool [S, L]: where completions have tokens."""
        lengths = torch.tensor([len(sample.completion) for sample in self.samples], dtype=torch.long)
        return torch.arange(int(lengths.max()) if len(lengths) else 1) < lengths[:, None]

    def __len__(self) -> int:
        return len(self.samples)


def samples_of(groups: list[Group]) -> list[Sample]:
    return [Sample(group.prompt.number, group.prompt_ids, c.ids) for group in groups for c in group.completions]


def judged(completion: Completion) -> float | None:
    """What dynamic sampling compares (DAPO, arXiv 2503.14476, equation 11): accuracy if it is paid, else the reward."""
    return None if completion.reward is None else completion.rewards.get("accuracy", completion.reward)


def differ(values: Iterable[float | None]) -> bool:
    """Whether a group teaches anything: not where all that is decided in it is equal."""
    return len({value for value in values if value is not None}) > 1


def padded(rows: list[list[float]]) -> Tensor:
    """[S, L], 0 beyond the end of a row."""
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True) if rows else torch.zeros(0, 1)
