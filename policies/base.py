"""The policy contract: what rollout workers call to act and actor workers call to learn.

Shapes: N envs, C actions in a chunk, A action dimensions, S state size.
"""

from __future__ import annotations

import importlib
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from policies.noise import SlotNoise
from policies.state_dicts import shapes, state_faults

Observation = dict[str, Any]


@dataclass(frozen=True)
class PolicySettings:
    """What to build: `kind`, the sizes the env dictates, and the kind's own options.

    Attributes:
        action_low, action_high: bounds of each action dimension.
        num_choices: set for a discrete action (one dimension that holds an index).
        chunk: C.
    """

    kind: str
    state_size: int | None
    action_low: tuple[float, ...]
    action_high: tuple[float, ...]
    num_choices: int | None
    chunk: int
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class PolicyOutput:
    """One policy call.

    Attributes:
        action: float32 [N, C, A], ready for the env.
        token: what was sampled; `evaluate` takes it back. Here [N, C, A].
        logprob: [N, C, A].
        value: [N], or [N, C].
    """

    action: Tensor
    token: Tensor
    logprob: Tensor
    value: Tensor


class Policy(nn.Module):
    """Base class of policies. Observations hold tensors: `state` float32 [N, S], `image` uint8 [N, V, H, W, 3].

    `statistics_of` names the observations that `observe` keeps running statistics of.
    """

    statistics_of: tuple[str, ...] = ()

    @abstractmethod
    def act(self, observation: Observation, deterministic: bool, generator: SlotNoise | None) -> PolicyOutput:
        """Choose a chunk of actions. `generator` may be None only when deterministic."""

    @abstractmethod
    def evaluate(self, observation: Observation, token: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-prob [N, C, A], entropy [N, C, A] and value [N] or [N, C] of what was sampled; differentiable."""

    @abstractmethod
    def value(self, observation: Observation) -> Tensor:
        """Value [N] or [N, C]."""

    def prepare(self, observation: Observation) -> Observation:
        """What the other methods need of an observation; they take either. Tensors only, so that it can be stored."""
        return observation

    def encode(self, observation: Observation) -> Observation:
        """A prepared observation after what can be computed of it once and for all; the other methods take it too.

        The rows of a batch belong to envs, here too.
        """
        return observation

    def learned_state(self) -> dict[str, Tensor]:
        """The part of the state dict that learning may change: all but the frozen parameters."""
        frozen = {name for name, parameter in self.named_parameters() if not parameter.requires_grad}
        return {name: tensor for name, tensor in self.state_dict().items() if name not in frozen}

    def load_learned_state(self, state: dict[str, Tensor]) -> None:
        """Undo `learned_state`, of a policy that was built alike. Raises RuntimeError for another's."""
        own, given = ({**tensors, "_extra_state": torch.empty(0)} for tensors in (self.learned_state(), state))
        if faults := state_faults(shapes(own), shapes(given)):  # extra state has no shape of its own
            raise RuntimeError(f"these are not the parameters of this policy:\n{faults}")
        self.load_state_dict(state, strict=False)

    @contextmanager
    def at_temperature(self, temperature: float | None) -> Iterator[None]:
        """In here tokens are sampled at a temperature, if one is given. Raises ValueError for a policy without."""
        if temperature is not None:
            raise ValueError(f"{type(self).__name__} has no temperature")
        yield

    def observe(self, observation: Observation, valid: Tensor) -> None:
        """Take in the observations of one iteration (leading dimensions as `valid`), for running statistics."""


KINDS = {
    "mlp": "policies.mlp:MLPPolicy",
    "cnn": "policies.cnn:CNNPolicy",
    "openvla": "policies.openvla:build",
    "openvla_oft": "policies.openvla_oft:build",
}


def make(settings: PolicySettings, seed: int) -> Policy:
    """Build a policy of a registered kind with parameters drawn from the seed."""
    module, name = KINDS[settings.kind].split(":")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return getattr(importlib.import_module(module), name)(settings)
