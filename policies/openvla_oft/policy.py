"""OpenVLA-OFT behind the policy contract: a chunk of C actions of A dimensions from one forward pass.

No sampled token is read by the model, so all tokens are drawn from, and scored by, the same hidden states.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from policies.action_tokens import ActionStatistics
from policies.base import Observation, PolicyOutput, PolicySettings
from policies.lora import merged_state_dict
from policies.noise import SlotNoise
from policies.openvla.action_policy import ActionTokenPolicy, load_network, prepare_training
from policies.openvla.checkpoint import save_checkpoint
from policies.openvla.config import OpenVLAConfig
from policies.openvla.model import Context
from policies.openvla.presets import preset_config, unit_statistics
from policies.openvla.processor import Processor
from policies.openvla_oft.checkpoint import load_side_files, save_side_files, split_state
from policies.openvla_oft.model import OpenVLAOFT
from policies.openvla_oft.processor import OpenVLAOFTProcessor
from policies.openvla_oft.settings import Layout, OpenVLAOFTSettings
from policies.value_head import ValueHead

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PRESETS = {"openvla-oft-tiny": "openvla-tiny", "openvla-oft-7b": "openvla-7b"}
"""Presets, and OpenVLA's of the same sizes."""


def load(checkpoint: str | Path, **options: Any) -> OpenVLAOFTPolicy:
    """A policy from a checkpoint directory, or from a preset with random weights (`openvla-oft-tiny`).

    Args:
        checkpoint: directory in the published format, or the name of a preset.
        options: fields of `OpenVLAOFTSettings`.

    Raises:
        FileNotFoundError: a file of the checkpoint, or its tokenizer, is not there.
        ConfigError: the checkpoint is of another architecture.
        CheckpointError: its weights do not fit its configuration or the options.
        UnknownStatistics: a head or a projector needs statistics that the checkpoint does not have.
        ValueError, TypeError: an option that does not exist or does not fit.
    """
    settings = OpenVLAOFTSettings.from_options(options)
    return OpenVLAOFTPolicy(str(checkpoint), settings, read_config(checkpoint, layout=settings.layout))


def read_config(
    checkpoint: str | Path, action_size: int = 7, state_size: int = 8, layout: Layout = "official"
) -> OpenVLAConfig:
    """The configuration of a checkpoint directory, or of a preset for actions and states of given sizes.

    Raises:
        FileNotFoundError: no such directory or preset, or no configuration in it.
        ConfigError: the checkpoint is of another architecture.
    """
    name = str(checkpoint)
    if name in PRESETS:
        config = preset_config(PRESETS[name], action_size)
        statistics = {**config.norm_stats[PRESETS[name]], "proprio": unit_statistics(state_size)}
        return replace(config, norm_stats={name: statistics})
    directory = Path(checkpoint)
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory} is no directory, and no preset; presets: {', '.join(PRESETS)}")
    return OpenVLAConfig.read(directory, keep_base_statistics=layout == "rlinf")


def build(settings: PolicySettings) -> OpenVLAOFTPolicy:
    """The policy for an env; options are `checkpoint` and the fields of `OpenVLAOFTSettings` but `chunk`.

    Raises:
        ValueError: the env's actions are discrete, or it has no state to read. And as `load`.
    """
    options = dict(settings.options)
    checkpoint = options.pop("checkpoint")
    if settings.num_choices is not None:
        raise ValueError("OpenVLA-OFT decides on continuous actions")
    own = OpenVLAOFTSettings.from_options({**options, "chunk": settings.chunk})
    if own.proprioception and settings.state_size is None:
        raise ValueError("proprioception reads `state`, which this env does not provide")
    config = read_config(checkpoint, len(settings.action_low), settings.state_size or 0, own.layout)
    policy = OpenVLAOFTPolicy(checkpoint, own, config)
    if own.value_of_state:
        policy.read_states(settings.state_size)
    return policy


class OpenVLAOFTPolicy(ActionTokenPolicy):
    """Reads one or several views, and `state` if it has a projector for it.

    Values are [N], or [N, C] where each action has one. Under the `l1` head `act` is deterministic, `token` is the
    normalised action, float32 [N, C, A], and log-probs are 0; there is nothing to evaluate.
    """

    network: OpenVLAOFT
    settings: OpenVLAOFTSettings
    presets: Collection[str] = PRESETS

    def __init__(self, checkpoint: str, settings: OpenVLAOFTSettings, config: OpenVLAConfig) -> None:
        super().__init__(checkpoint, settings, config)
        self.chunk = settings.chunk

    @functools.cached_property
    def statistics(self) -> ActionStatistics:
        return self._statistics("action")

    @functools.cached_property
    def state_statistics(self) -> ActionStatistics:
        """Of `state`. Raises UnknownStatistics as `statistics`."""
        return self._statistics("proprio")

    def adopt_statistics(self, norm_stats: dict[str, Any], key: str | None) -> None:
        super().adopt_statistics(norm_stats, key)
        self.__dict__.pop("state_statistics", None)

    # ------------------------------------------------------------------------------------------ contract

    @torch.no_grad()
    def act(self, observation: Observation, deterministic: bool, generator: SlotNoise | None) -> PolicyOutput:
        if self.settings.head == "tokens":
            return super().act(observation, deterministic, generator)
        if not deterministic:
            raise ValueError("the l1 head has no distribution to sample from; act deterministically")
        context = self._read(observation)
        action = self.network.action_head(context.hidden).float()
        return PolicyOutput(self._command(action), action, torch.zeros_like(action), self.value(observation))

    def evaluate(self, observation: Observation, token: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self._require_tokens()
        return super().evaluate(observation, token)

    def tokenise(self, action: Tensor) -> Tensor:
        self._require_tokens()
        return super().tokenise(action)

    def generate(self, context: Context, deterministic: bool, generator: SlotNoise | None) -> tuple[Tensor, Tensor]:
        logits = self.network.language_model.logits(context.hidden, self.tokens.ids)
        if deterministic:
            choice = logits.argmax(-1)
        else:
            uniform = self._uniform(context, generator, logits.shape[1])
            choice = self.sampling.choose(logits.flatten(0, 1), uniform.flatten()).view_as(uniform)
        return choice + self.tokens.ids.start, logits

    # ------------------------------------------------------------------------------------------ pieces

    def _read(self, observation: Observation) -> Context:
        inputs = self.prepare(observation)
        state = self._state(inputs["state"]) if self.settings.proprioception else None
        slots = self.chunk * len(self.statistics.low)
        ids, mask = self._prompt(inputs)
        return self.network.read_features(ids, mask, self._features(inputs, ids, mask), slots, state)

    def _valued(self, context: Context) -> Tensor:
        return context.hidden

    def _states(self, context: Context, ids: Tensor) -> Tensor:
        return context.hidden

    def _state(self, state: Tensor) -> Tensor:
        """States [N, S] in the data set's units -> what the projector reads."""
        size = len(self.state_statistics.low)
        if state.shape[1] != size:
            raise ValueError(f"`state` is {list(state.shape)}; expected [N, {size}], as the checkpoint's statistics")
        low, high, mask = (x.to(state.device) for x in vars(self.state_statistics).values())
        scaled = 2 * (state.double() - low) / (high - low + self.settings.epsilon) - 1
        return torch.where(mask, scaled, state.double()).clamp(-1, 1).to(self._like)

    def _statistics(self, of: str) -> ActionStatistics:
        return self.settings.statistics(self.config.norm_stats, of)

    def _require_tokens(self) -> None:
        if self.settings.head != "tokens":
            raise ValueError("the l1 head has no action tokens: it can be evaluated, not trained here")

    # ------------------------------------------------------------------------------------------ parts

    def _make_network(self) -> OpenVLAOFT:
        network = load_network(lambda: OpenVLAOFT(self.config, self.settings), self.directory, self._dtype)
        self.side_modules = network.add_modules(*module_sizes(self.config, self.settings))
        if self.directory is not None:
            load_side_files(network, self.side_modules, self.directory)
        network.check_attention()
        return network

    def _make_processor(self, tokenizer: Tokenizer) -> Processor:
        settings = self.settings
        written = Processor.read(self.directory) if self.directory else None
        return OpenVLAOFTProcessor(
            self.config,
            self._make_prompts(tokenizer),
            written,
            settings.lanczos,
            settings.center_crop,
            settings.views,
            settings.proprioception,
        )

    def _make_critic(self) -> ValueHead:
        return make_critic(self.config, self.settings)

    def save_pretrained(self, directory: str | Path) -> None:
        main, parts = split_state(merged_state_dict(self.network), self.side_modules)
        save_checkpoint(Path(directory), main, self.config, self.processor, beside=self.directory)
        save_side_files(Path(directory), parts)
        self.settings.write(Path(directory))


def make_critic(config: OpenVLAConfig, settings: OpenVLAOFTSettings) -> ValueHead:
    """The value head that the settings ask for."""
    actions = settings.chunk if settings.value_of == "action" else None
    width, position = config.text.hidden_size, settings.value_position
    return ValueHead(width, settings.value_hidden, position, actions, settings.value_detached)


def module_sizes(config: OpenVLAConfig, settings: OpenVLAOFTSettings) -> tuple[int, int]:
    """Sizes of actions and states, where a module depends on them. Raises UnknownStatistics."""
    size = lambda of: len(settings.statistics(config.norm_stats, of).low)  # noqa: E731
    return size("action") if settings.head == "l1" else 0, size("proprio") if settings.proprioception else 0


def adapted_modules(config: OpenVLAConfig, settings: OpenVLAOFTSettings) -> list[str]:
    """Names of the modules that would have an adapter, found on the meta device."""
    with torch.device("meta"):
        network = OpenVLAOFT(config, settings)
        network.add_modules(*module_sizes(config, settings))
        return prepare_training(network, settings)
