"""Choosing one of several options from logits, with random numbers that come from outside."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Log-probabilities follow the temperature alone: under `top_k` and `top_p` a ratio of
    policies would not exist for a token that one of them cuts off.

    Attributes:
        temperature: divides the logits, when tokens are drawn and when they are scored.
        top_k: draw only from the k most likely.
        top_p: draw only from the fewest most likely that together reach this probability.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ValueError(f"temperature is {self.temperature}; expected more than 0 (greedy is `deterministic`)")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; expected at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; expected more than 0 and at most 1")

    def log_probabilities(self, logits: Tensor) -> Tensor:
        """Logits [..., options] -> log-probabilities in float32."""
        return (logits.float() / self.temperature).log_softmax(-1)

    def choose(self, logits: Tensor, uniform: Tensor) -> Tensor:
        """Draw by the inverse of the cumulative distribution.

        Args:
            logits: [N, options].
            uniform: float64 [N] in (0, 1].

        Returns:
            Indices [N].
        """
        probabilities = (logits.double() / self.temperature).softmax(-1)
        if self.top_k is not None or self.top_p is not None:
            ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
            before = ordered.cumsum(-1) - ordered
            kept = before < (1.0 if self.top_p is None else self.top_p)
            if self.top_k is not None:
                kept[:, self.top_k :] = False
            probabilities = torch.zeros_like(ordered).scatter(-1, order, torch.where(kept, ordered, 0.0))
        cumulative = probabilities.cumsum(-1)
        return (cumulative < uniform[:, None] * cumulative[:, -1:]).sum(-1)
