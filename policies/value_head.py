"""A critic that shares the trunk of a language model: a small network on its hidden states (RL4VLA, 2505.19789)."""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor, nn

from policies.running_statistics import RunningStatistics

ValuePosition = Literal["first", "last", "mean"]


class ValueHead(nn.Module):
    """Value of the hidden states that predict the tokens of an action.

    Args:
        width: of the hidden states.
        hidden: widths of the layers between.
        position: which of the states is read. `first`: the last prompt token, which no action influences; best in
            RL4VLA's comparison. `last`: the one that predicts the last action token. `mean`: of all.
        actions: a value for each of that many actions of a chunk (RLinf-VLA, 2510.06710); None: one for the chunk.
        detached: the head's gradients end at the hidden states, so that they do not move the policy.
    """

    def __init__(
        self,
        width: int,
        hidden: tuple[int, ...] = (512, 128),
        position: ValuePosition = "first",
        actions: int | None = None,
        detached: bool = False,
    ) -> None:
        super().__init__()
        if position not in ("first", "last", "mean"):
            raise ValueError(f"unknown value position {position!r}; expected first, last or mean")
        self.position, self.actions, self.detached = position, actions, detached
        layers: list[nn.Module] = []
        for size in hidden:
            layers += [nn.Linear(width, size), nn.GELU()]
            width = size
        self.layers = nn.Sequential(*layers, nn.Linear(width, actions or 1, bias=False))
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states [N, tokens, width] -> value float32 [N] or [N, actions].

        Under `first`, later states may be left out.
        """
        state = {"first": hidden[:, 0], "last": hidden[:, -1], "mean": hidden.mean(1)}[self.position]
        value = self.layers((state.detach() if self.detached else state).float())
        return value.squeeze(-1) if self.actions is None else value


class StateValue(nn.Module):
    """A critic that reads the state of the env, which the policy does not see (Pinto et al., 2017, 1710.06542).

    Args:
        state_size: S.
        hidden: widths of the layers between.
        actions: as in `ValueHead`.
    """

    CLIP = 8.0

    def __init__(self, state_size: int, hidden: tuple[int, ...], actions: int | None = None) -> None:
        super().__init__()
        self.actions = actions
        self.statistics = RunningStatistics(state_size, self.CLIP)
        layers: list[nn.Module] = []
        width = state_size
        for size in hidden:
            layers += [nn.Linear(width, size), nn.Tanh()]
            width = size
        self.layers = nn.Sequential(*layers, nn.Linear(width, actions or 1))
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                nn.init.orthogonal_(layer.weight, math.sqrt(2) if layer is not self.layers[-1] else 1.0)
                nn.init.zeros_(layer.bias)

    def forward(self, state: Tensor) -> Tensor:
        """States [N, S] -> value float32 [N] or [N, actions]."""
        value = self.layers(self.statistics(state.float()))
        return value.squeeze(-1) if self.actions is None else value
