"""Metrics of one update: averages over its minibatches, whose parts come from micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


class Sums:
    """Collects metrics of one rank; `means` combines the ranks.

    A part is a micro-batch's share of a minibatch's mean (a sum over global counts), so parts add up over micro-batches
    and ranks. A plain value is already the same on every rank.
    """

    def __init__(self) -> None:
        self.minibatches = 0
        self._parts: dict[str, Tensor] = {}
        self._plain: dict[str, list[float]] = {}

    def begin_minibatch(self) -> None:
        self.minibatches += 1

    def add_part(self, name: str, part: Tensor) -> None:
        """Add a micro-batch's share of the running minibatch's mean."""
        part = part.detach().double()
        self._parts[name] = self._parts[name] + part if name in self._parts else part

    def divide(self, counts: Mapping[str, Tensor]) -> None:
        """Divide the parts that were added as mere sums, because their global counts were not known yet."""
        for name, count in counts.items():
            if name in self._parts:
                self._parts[name] = self._parts[name] / count

    def add(self, name: str, value: float) -> None:
        """Add a value; the mean over the update's values is reported."""
        self._plain.setdefault(name, []).append(value)

    def means(self, total: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """The metrics by name; `total` sums a tensor over ranks."""
        metrics = {name: sum(values) / len(values) for name, values in self._plain.items()}
        if self._parts:
            names = sorted(self._parts)
            summed = total(torch.stack([self._parts[name] for name in names])) / max(self.minibatches, 1)
            metrics.update(zip(names, summed.tolist(), strict=True))
        return metrics
