"""Sampler and trainer must agree: the log-probability of a sampled token is the same where it was drawn and where it is
learned from, until the first update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Limit:
    """What rounding in batches of other sizes explains of the distances: on average, and of a single token."""

    mean: float
    largest: float

    @staticmethod
    def of(network: torch.nn.Module, computes_in: torch.dtype | None = None) -> Limit:
        """By the coarsest type that a network computes in: of its parameters, or under autocast."""
        types = {parameter.dtype for parameter in network.parameters() if parameter.is_floating_point()}
        types |= {computes_in} if computes_in else set()
        return Limit(0.005, 0.1) if all(torch.finfo(one).bits >= 32 for one in types) else Limit(0.1, 2.0)


@dataclass
class Gap:
    """Distance between log-probabilities of the trainer and of the sampler, over valid tokens."""

    total: float = 0.0
    count: int = 0
    largest: float = 0.0

    def add(self, logprob: Tensor, sampled: Tensor, valid: Tensor) -> None:
        """Log-probabilities [B, C, A] of both, and the executed actions, bool [B, C]."""
        apart = (logprob.detach().float() - sampled.float()).abs()[valid]
        if apart.numel():
            self.total += float(apart.sum())
            self.count += apart.numel()
            self.largest = max(self.largest, float(apart.max()))

    def metrics(self, total: Callable[[Tensor], Tensor], largest: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Mean and maximum; the arguments take the sum and the maximum of a tensor over ranks."""
        apart, count = total(torch.tensor([self.total, float(self.count)], dtype=torch.float64)).tolist()
        most = float(largest(torch.tensor(self.largest, dtype=torch.float64)))
        return {"sampling/logprob_gap_mean": apart / max(count, 1.0), "sampling/logprob_gap_max": most}


def disagreement(logprob: Tensor, sampled: Tensor, valid: Tensor, slots: Tensor, limit: Limit) -> str | None:
    """What is wrong if trainer and sampler do not have the same policy, and where.

    Args:
        logprob, sampled: [B, C, A]; log-probabilities of the same tokens.
        valid: bool [B, C].
        slots: [B, 2]; chunk step and env of each decision.
    """
    apart = torch.where(valid[..., None], (logprob.float() - sampled.float()).abs(), 0.0)
    mean = float(apart[valid].mean()) if valid.any() else 0.0
    if mean <= limit.mean and float(apart.max()) <= limit.largest:
        return None
    row, action, dimension = (int(i) for i in torch.unravel_index(apart.argmax(), apart.shape))
    step, env = slots[row].tolist()
    return (
        f"before the first update, log-probabilities of the actor and of the rollout workers are {mean:.3g} apart on "
        f"average (rounding explains {limit.mean}), {float(apart.max()):.3g} at most (rounding: {limit.largest}): "
        f"dimension {dimension} of action {action}, chunk step {step}, env {env}. Likely: "
        f"{_cause(apart, valid, limit.mean / 10)}"
    )


def _cause(apart: Tensor, valid: Tensor, small: float) -> str:
    """Where the distances are tells what differs. `small`: those that are none."""
    by_decision = apart[valid.any(-1)].mean((-2, -1))
    if (by_decision <= small).float().mean() > 0.25:
        return (
            "some decisions agree and others do not, so what was stored of their observations differs from what was "
            "seen (padding of prompts, images)"
        )
    tokens = apart[valid]
    if tokens.shape[-1] > 1 and float(tokens[:, 0].mean()) <= small:
        return (
            "the first token of each action agrees and later ones do not, so what was read before them differs (cached "
            "keys and values, positions, order of tokens)"
        )
    return (
        "all decisions differ alike, so both sides have other parameters, another temperature or another slice of the "
        "vocabulary"
    )
