"""OpenVLA behind the policy contract: one action of A dimensions from one token for each.

Tokens are sampled with cached keys and values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from policies.base import Observation, PolicySettings
from policies.noise import SlotNoise
from policies.openvla.action_policy import ActionTokenPolicy, load_network, prepare_training
from policies.openvla.config import OpenVLAConfig
from policies.openvla.model import Context, OpenVLA
from policies.openvla.presets import PRESETS, preset_config
from policies.openvla.settings import OpenVLASettings
from policies.value_head import ValueHead


def load(checkpoint: str | Path, **options: Any) -> OpenVLAPolicy:
    """A policy from a checkpoint directory, or from a preset with random weights (`openvla-tiny`).

    Args:
        checkpoint: directory in the published format, or the name of a preset.
        options: fields of `OpenVLASettings`.

    Raises:
        FileNotFoundError: a file of the checkpoint, or its tokenizer, is not there.
        ConfigError: the checkpoint is of another architecture.
        CheckpointError: its weights do not fit its configuration.
        ValueError, TypeError: an option that does not exist or does not fit.
    """
    settings = OpenVLASettings.from_options(options)
    return OpenVLAPolicy(str(checkpoint), settings, read_config(checkpoint))


def read_config(checkpoint: str | Path, action_size: int = 7) -> OpenVLAConfig:
    """The configuration of a checkpoint directory, or of a preset for actions of a given size.

    Raises:
        FileNotFoundError: no such directory or preset, or no configuration in it.
        ConfigError: the checkpoint is of another architecture.
    """
    if str(checkpoint) in PRESETS:
        return preset_config(str(checkpoint), action_size)
    directory = Path(checkpoint)
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory} is no directory, and no preset; presets: {', '.join(PRESETS)}")
    return OpenVLAConfig.read(directory)


def build(settings: PolicySettings) -> OpenVLAPolicy:
    """The policy for an env; options are `checkpoint` and the fields of `OpenVLASettings`.

    Raises:
        ValueError: the env's actions are discrete, or come in chunks, or it has no state to read. And as `load`.
    """
    options = dict(settings.options)
    if settings.num_choices is not None or settings.chunk != 1:
        raise ValueError("OpenVLA decides on one continuous action at a time: chunk must be 1")
    checkpoint = options.pop("checkpoint")
    config = read_config(checkpoint, len(settings.action_low))
    policy = OpenVLAPolicy(checkpoint, OpenVLASettings.from_options(options), config)
    if policy.settings.value_of_state:
        policy.read_states(settings.state_size)
    return policy


class OpenVLAPolicy(ActionTokenPolicy):
    """Reads one view. Shapes: C = 1."""

    network: OpenVLA
    dynamic_shapes = True  # what is cached grows with each token

    def generate(self, context: Context, deterministic: bool, generator: SlotNoise | None) -> tuple[Tensor, Tensor]:
        size = len(self.statistics.low)
        uniform = None if deterministic else self._uniform(context, generator, size)
        chosen: list[Tensor] = []
        logits: list[Tensor] = []
        for index in range(size):
            if index:
                context = self.network.extend(context, chosen[-1][:, None])
            logits.append(self.network.language_model.logits(context.hidden[:, -1], self.tokens.ids))
            choice = logits[-1].argmax(-1) if uniform is None else self.sampling.choose(logits[-1], uniform[:, index])
            chosen.append(choice + self.tokens.ids.start)
        return torch.stack(chosen, dim=1), torch.stack(logits, dim=1)

    def _read(self, observation: Observation) -> Context:
        inputs = self.prepare(observation)
        ids, mask = self._prompt(inputs)
        return self.network.read_features(ids, mask, self._features(inputs, ids, mask))

    def _valued(self, context: Context) -> Tensor:
        if isinstance(self.critic, ValueHead) and self.critic.position == "first":
            return context.hidden[:, -1:]
        return self._states(context, self.generate(context, deterministic=True, generator=None)[0])

    def _states(self, context: Context, ids: Tensor) -> Tensor:
        return torch.cat([context.hidden[:, -1:], self.network.extend(context, ids[:, :-1]).hidden], dim=1)

    def _make_network(self) -> OpenVLA:
        return load_network(lambda: OpenVLA(self.config, self.settings.attention), self.directory, self._dtype)


def adapted_modules(config: OpenVLAConfig, settings: OpenVLASettings) -> list[str]:
    """Names of the modules that would have an adapter, found on the meta device."""
    with torch.device("meta"):
        return prepare_training(OpenVLA(config, settings.attention), settings)
