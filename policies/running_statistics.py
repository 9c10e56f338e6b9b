"""Running mean and variance of states, to normalise them by."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RunningStatistics(nn.Module):
    """Normalises states [..., S] by the mean and variance of all that were observed so far.

    Args:
        size: S.
        clip: normalised numbers end there.
    """

    count: Tensor
    mean: Tensor
    var: Tensor

    def __init__(self, size: int, clip: float) -> None:
        super().__init__()
        self.clip = clip
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("var", torch.ones(size, dtype=torch.float64))

    def forward(self, state: Tensor) -> Tensor:
        std = (self.var + 1e-6).sqrt().clamp(min=1e-2).float()
        return ((state - self.mean.float()) / std).clamp(-self.clip, self.clip)

    def observe(self, state: Tensor, valid: Tensor) -> None:
        """Merge in the statistics of the valid states (Chan et al., 1983)."""
        states = state[valid].double()
        count = len(states)
        if count == 0:
            return
        total = self.count + count
        delta = states.mean(0) - self.mean
        spread = self.var * self.count + states.var(0, unbiased=False) * count + delta**2 * self.count * count / total
        self.mean += delta * count / total
        self.var.copy_(spread / total)
        self.count.copy_(total)
