"""A multilayer perceptron over state observations, with a critic of its own.

Continuous actions: a diagonal Gaussian whose standard deviation does not depend on the state. Discrete: a categorical.
A chunk of C actions is C independent heads of one network.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from policies.base import Observation, Policy, PolicyOutput, PolicySettings
from policies.noise import SlotNoise
from policies.running_statistics import RunningStatistics


class MLPPolicy(Policy):
    """Options: hidden, log_std, normalise_observations, observation_clip (see PolicyConfig)."""

    action_middle: Tensor
    action_half: Tensor

    def __init__(self, settings: PolicySettings) -> None:
        super().__init__()
        if settings.state_size is None:
            raise ValueError("the mlp policy reads `state`, which this env does not provide")
        options = settings.options
        size, hidden = settings.state_size, tuple(options["hidden"])
        self.chunk, self.num_choices = settings.chunk, settings.num_choices
        self.dims = len(settings.action_low)
        outputs = self.chunk * (self.num_choices or self.dims)
        self.actor = _mlp(size, hidden, outputs, gain=0.01)
        self.critic = _mlp(size, hidden, 1, gain=1.0)
        if self.num_choices is None:
            self.log_std = nn.Parameter(torch.full((self.chunk, self.dims), float(options["log_std"])))
        low, high = torch.tensor(settings.action_low), torch.tensor(settings.action_high)
        self.register_buffer("action_middle", (high + low) / 2, persistent=False)
        self.register_buffer("action_half", (high - low) / 2, persistent=False)
        self.normalises: bool = options["normalise_observations"]
        self.statistics_of = ("state",) if self.normalises else ()
        self.statistics = RunningStatistics(size, options["observation_clip"])

    def act(self, observation: Observation, deterministic: bool, generator: SlotNoise | None) -> PolicyOutput:
        features = self._features(observation)
        if self.num_choices is None:
            mean = self.actor(features).view(-1, self.chunk, self.dims)
            token = mean if deterministic else mean + self._std() * self._normal(generator, mean)
            action = self.action_middle + self.action_half * token.clamp(-1, 1)
            logprob = self._gaussian_logprob(mean, token)
        else:
            logits = self._logits(features)
            choice = logits.argmax(-1) if deterministic else self._choose(logits, generator)
            token = action = choice[..., None].float()
            logprob = logits.gather(-1, choice[..., None])
        return PolicyOutput(action, token, logprob, self.critic(features).squeeze(-1))

    def evaluate(self, observation: Observation, token: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features = self._features(observation)
        value = self.critic(features).squeeze(-1)
        if self.num_choices is None:
            mean = self.actor(features).view(-1, self.chunk, self.dims)
            entropy = (self._log_std() + 0.5 * math.log(2 * math.pi * math.e)).expand_as(mean)
            return self._gaussian_logprob(mean, token), entropy, value
        logits = self._logits(features)
        entropy = -(logits.exp() * logits).sum(-1, keepdim=True)
        return logits.gather(-1, token.long()), entropy, value

    def value(self, observation: Observation) -> Tensor:
        return self.critic(self._features(observation)).squeeze(-1)

    def observe(self, observation: Observation, valid: Tensor) -> None:
        if self.normalises:
            self.statistics.observe(observation["state"], valid)

    # ------------------------------------------------------------------------------------------ pieces

    def _features(self, observation: Observation) -> Tensor:
        state = observation["state"]
        return self.statistics(state) if self.normalises else state

    def _log_std(self) -> Tensor:
        return self.log_std.clamp(-5.0, 2.0)

    def _std(self) -> Tensor:
        return self._log_std().exp()

    def _gaussian_logprob(self, mean: Tensor, token: Tensor) -> Tensor:
        z = (token - mean) / self._std()
        return -0.5 * z * z - self._log_std() - 0.5 * math.log(2 * math.pi)

    def _logits(self, features: Tensor) -> Tensor:
        assert self.num_choices is not None
        return self.actor(features).view(-1, self.chunk, self.num_choices).log_softmax(-1)

    def _normal(self, generator: SlotNoise | None, like: Tensor) -> Tensor:
        if generator is None:
            raise ValueError("sampling needs a generator")
        return torch.from_numpy(generator.normal(self.chunk * self.dims)).to(like.device).view_as(like)

    def _choose(self, logits: Tensor, generator: SlotNoise | None) -> Tensor:
        if generator is None:
            raise ValueError("sampling needs a generator")
        uniform = torch.from_numpy(generator.uniform(self.chunk)).to(logits.device)
        cumulative = logits.double().exp().cumsum(-1)
        return (cumulative < uniform[..., None] * cumulative[..., -1:]).sum(-1).clamp(max=logits.shape[-1] - 1)


def _mlp(inputs: int, hidden: tuple[int, ...], outputs: int, gain: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [_linear(inputs, width, math.sqrt(2)), nn.Tanh()]
        inputs = width
    return nn.Sequential(*layers, _linear(inputs, outputs, gain))


def _linear(inputs: int, outputs: int, gain: float) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer
