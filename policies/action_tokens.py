"""Actions as tokens of a language model, and the statistics that give them their units back (Kim et al., 2024).

Each action dimension, normalised to [-1, 1], is cut into bins; bin `b` is the `b`-th id from the end of the vocabulary.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

OFT_EPSILON = 1e-8
"""What OpenVLA-OFT adds to the range of an action dimension; OpenVLA adds nothing."""

Bounds = Literal["quantiles", "extremes"]
"""What becomes -1 and 1: the 1st and 99th percentile of a data set, or its least and greatest value."""

_SOURCES = " (in dataset_statistics.json, or norm_stats of config.json)"

Gripper = Literal["as_trained", "libero", "maniskill"]


class UnknownStatistics(KeyError):
    """The key of a data set that the checkpoint has no statistics of."""

    def __str__(self) -> str:
        return str(self.args[0])


class ActionTokens:
    """The action ids of a vocabulary.

    Args:
        vocab_size: of the tokenizer (32000 for Llama 2).
        num_bins: number of action ids. That many edges leave one bin less: the lowest two ids mean the same value.

    Attributes:
        ids: the slice of the vocabulary that holds action ids.
    """

    def __init__(self, vocab_size: int = 32000, num_bins: int = 256) -> None:
        self.ids = slice(vocab_size - num_bins, vocab_size)
        self.edges = torch.from_numpy(np.linspace(-1, 1, num_bins))  # torch.linspace rounds some edges differently
        self.centres = (self.edges[:-1] + self.edges[1:]) / 2

    def encode(self, action: Tensor) -> Tensor:
        """Normalised actions -> ids of the same shape. A value on an edge belongs to the bin above."""
        action = action.clamp(-1, 1)
        edges = self.edges.to(action.device)
        return self.ids.stop - torch.bucketize(action.double(), edges, right=True)

    def outside(self, ids: Tensor) -> Tensor:
        """Which ids are no action tokens, bool of the same shape."""
        return (ids < self.ids.start) | (ids >= self.ids.stop)

    def decode(self, ids: Tensor) -> Tensor:
        """Ids -> normalised actions of the same shape, float64.

        Ids that are no action tokens become the nearest end of the range, as in the reference, with a warning.
        """
        outside = self.outside(ids)
        if outside.any():
            message = (
                f"{int(outside.sum())} of {ids.numel()} tokens are no action tokens "
                f"({self.ids.start} to {self.ids.stop - 1}), for example {int(ids[outside][0])}"
            )
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        bins = (self.ids.stop - 1 - ids).clamp(0, len(self.centres) - 1)
        return self.centres.to(ids.device)[bins]


@dataclass(frozen=True)
class ActionStatistics:
    """Range of each action dimension in a data set.

    Attributes:
        low, high: what becomes -1 and 1, float64 [A].
        mask: bool [A]; the dimensions that were normalised.
    """

    low: Tensor
    high: Tensor
    mask: Tensor

    def normalise(self, action: Tensor) -> Tensor:
        """Actions [..., A] in the data set's units -> [-1, 1], float64; 0 where the data set knows one value only."""
        low, high, mask = (x.to(action.device) for x in (self.low, self.high, self.mask))
        span = torch.where(high > low, high - low, 1.0)
        normalised = torch.where(high > low, 2 * (action.double() - low) / span - 1, 0.0)
        return torch.where(mask, normalised, action.double()).clamp(-1, 1)

    def unnormalise(self, action: Tensor, epsilon: float = 0.0) -> Tensor:
        """Normalised actions [..., A] -> actions in the data set's units, float64."""
        low, high, mask = (x.to(action.device) for x in (self.low, self.high, self.mask))
        return torch.where(mask, 0.5 * (action.double() + 1) * (high - low + epsilon) + low, action.double())


def action_statistics(
    norm_stats: dict[str, Any], key: str | None, bounds: Bounds = "quantiles", of: str = "action"
) -> ActionStatistics:
    """The action statistics of a data set.

    Args:
        norm_stats: data set -> {"action": {"q01", "q99", "mask"?}, …}, as in a checkpoint.
        key: the data set; the form with `_no_noops` at its end is found too. None: the only one.
        bounds: which of the statistics are the range.
        of: `action`, or `proprio` for those of the state.

    Raises:
        UnknownStatistics: no such key, or none given where there are several. The message lists those known.
        ValueError: statistics that are no lists of numbers, or of unequal lengths.
    """
    known = ", ".join(sorted(norm_stats)) or "none"
    if key is None:
        if len(norm_stats) != 1:
            raise UnknownStatistics(f"name the data set (unnorm_key) whose action statistics apply; known: {known}")
        key = next(iter(norm_stats))
    found = next((name for name in (key, f"{key}_no_noops") if name in norm_stats), None)
    if found is None:
        raise UnknownStatistics(f"no action statistics of {key!r} in the checkpoint; known: {known}")
    data_set = _require_object(f"the statistics of {found!r}", norm_stats[found])
    if of not in data_set:
        raise UnknownStatistics(f"the statistics of {found!r} have no {of!r}; known: {', '.join(data_set)}")
    where = f"the {of} statistics of {found!r}"
    values = _require_object(where, data_set[of])
    names = {"quantiles": ("q01", "q99"), "extremes": ("min", "max")}[bounds]
    if absent := [name for name in names if name not in values]:
        raise UnknownStatistics(f"{where} have no {' and no '.join(absent)}")
    for name in names:
        if not _are_numbers(values[name]):
            raise ValueError(f"{where}: {name} is {values[name]!r}; expected a list of numbers{_SOURCES}")
    low, high = (torch.as_tensor(values[name], dtype=torch.float64) for name in names)
    given = values.get("mask")
    given = [True] * len(low) if given is None else given
    if not _are_numbers(given) or not all(each in (0, 1) for each in given):
        raise ValueError(f"{where}: mask is {given!r}; expected a list of true and false{_SOURCES}")
    mask = torch.as_tensor(given, dtype=torch.bool)
    if not low.shape == high.shape == mask.shape:
        raise ValueError(
            f"statistics of {found!r}: {', '.join(names)} and mask have {len(low)}, {len(high)} and {len(mask)} entries"
        )
    return ActionStatistics(low, high, mask)


def _require_object(what: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} are {value!r}; expected a JSON object{_SOURCES}")
    return value


def _are_numbers(values: object) -> bool:
    kinds = (int, float, np.number, np.bool_)
    return isinstance(values, list | tuple | np.ndarray) and all(
        isinstance(x, kinds) and math.isfinite(x) for x in values
    )


def gripper_command(action: Tensor, gripper: Gripper) -> Tensor:
    """The last dimension, 0 (closed) to 1 (open) in training data, as the simulator wants it; [..., A].

    `libero`: -1 opens, 1 closes, 0.5 gives 0. `maniskill`: above 0.5 is 1 (opens), else -1. `as_trained`: unchanged.
    """
    if gripper == "as_trained":
        return action
    opening = action[..., -1:]
    command = -torch.sign(2 * opening - 1) if gripper == "libero" else torch.where(opening > 0.5, 1.0, -1.0)
    return torch.cat([action[..., :-1], command.to(action)], dim=-1)


def gripper_as_trained(action: Tensor, gripper: Gripper) -> Tensor:
    """The inverse of `gripper_command`: a simulator's command as training data has it, [..., A]."""
    if gripper == "as_trained":
        return action
    opening = (1 - action[..., -1:]) / 2 if gripper == "libero" else (1 + action[..., -1:]) / 2
    return torch.cat([action[..., :-1], opening], dim=-1)
