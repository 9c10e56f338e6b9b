"""OpenVLA behind the policy contract: one action of A dimensions from one token for each.

Tokens are sampled with cached keys and values. What is kept as log-prob is then computed by the very code that
learning uses, on the same cached prompt, so that the ratio of the policies is exactly 1 until the first update.
"""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from policies.action_tokens import (
    ActionStatistics,
    ActionTokens,
    action_statistics,
    gripper_as_trained,
    gripper_command,
)
from policies.base import Observation, Policy, PolicyOutput, PolicySettings
from policies.lora import add_lora, load_adapter
from policies.noise import SlotNoise
from policies.openvla.checkpoint import load_weights, save_checkpoint
from policies.openvla.config import OpenVLAConfig
from policies.openvla.model import Context, OpenVLA
from policies.openvla.presets import PRESETS, preset_config, preset_tokenizer
from policies.openvla.processor import Processor
from policies.openvla.prompts import PromptTokenizer
from policies.openvla.settings import OpenVLASettings
from policies.sampling import Sampling
from policies.value_head import ValueHead

if TYPE_CHECKING:
    from tokenizers import Tokenizer


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
    return OpenVLAPolicy(str(checkpoint), OpenVLASettings.from_options(options))


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
        ValueError: the env's actions are discrete, or come in chunks. And as `load`.
    """
    options = dict(settings.options)
    if settings.num_choices is not None or settings.chunk != 1:
        raise ValueError("OpenVLA decides on one continuous action at a time: chunk must be 1")
    checkpoint = options.pop("checkpoint")
    return OpenVLAPolicy(checkpoint, OpenVLASettings.from_options(options), action_size=len(settings.action_low))


class OpenVLAPolicy(Policy):
    """Reads `image` (one view) and `instruction`, or what `processor` made of them.

    Shapes: C = 1, K = 1; tokens are ids int64 [N, 1, A].

    Attributes:
        network: ids and pixels in, hidden states and logits out.
        critic: the value head.
        processor: prepares observations.
        sampling: may be replaced, for example for an evaluation at another temperature.
        adapted: names of modules that have an adapter.
    """

    def __init__(self, checkpoint: str, settings: OpenVLASettings, action_size: int = 7) -> None:
        super().__init__()
        source = _open(checkpoint, settings, action_size)
        self.settings, self.config, self.directory = settings, source.config, source.directory
        prompts = PromptTokenizer(
            source.tokenizer, self.config.vocab_size, self.config.pad_token_id, settings.prompt, settings.prompt_length
        )
        self.processor = Processor(
            self.config, prompts, source.preprocessor, settings.lanczos, settings.center_crop, settings.view
        )
        self.tokens = ActionTokens(self.config.vocab_size, self.config.num_bins)
        self.sampling = Sampling(settings.temperature, settings.top_k, settings.top_p)
        if settings.unnorm_key is not None:
            _ = self.statistics  # an unknown name is told before the weights are read
        self.network = _network(source, settings)
        self.critic = ValueHead(self.config.text.hidden_size, settings.value_hidden, settings.value_position)
        self.adapted = prepare_training(self.network, settings)
        if settings.compile is not None:
            for layer in self.network.language_model.model.layers:
                layer.compile(backend=settings.compile, dynamic=True)

    @functools.cached_property
    def statistics(self) -> ActionStatistics:
        """Statistics of the data set that the actions are in.

        Raises:
            UnknownStatistics: the checkpoint has no such data set, or several and none was named.
        """
        return action_statistics(self.config.norm_stats, self.settings.unnorm_key)

    # ------------------------------------------------------------------------------------------ contract

    def prepare(self, observation: Observation) -> Observation:
        return self.processor(observation)

    @torch.no_grad()
    def act(self, observation: Observation, deterministic: bool, generator: SlotNoise | None) -> PolicyOutput:
        context = self._read(observation)
        ids, _ = self.generate(context, deterministic, generator)
        logprob, _, value = self._score(context, ids)
        action = self.statistics.unnormalise(self.tokens.decode(ids), self.settings.epsilon)
        action = gripper_command(action, self.settings.gripper).float()
        return PolicyOutput(action[:, None], ids[:, None], logprob[:, None], value)

    def evaluate(self, observation: Observation, token: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        size = len(self.statistics.low)
        if token.shape[1:] != (1, size) or self.tokens.outside(token).any():
            raise ValueError(f"tokens {list(token.shape)}: expected action ids of the shape [N, 1, {size}]")
        logprob, entropy, value = self._score(self._read(observation), token[:, 0])
        return logprob[:, None], entropy[:, None], value

    def tokenise(self, action: Tensor) -> Tensor:
        """The tokens of demonstrated actions, float32 [N, 1, A] as `act` gives them: ids int64 of the same shape."""
        return self.tokens.encode(self.statistics.normalise(gripper_as_trained(action, self.settings.gripper)))

    def value(self, observation: Observation) -> Tensor:
        context = self._read(observation)
        if self.critic.position == "first":
            return self.critic(context.hidden[:, -1:])
        return self.critic(self._states(context, self.generate(context, deterministic=True, generator=None)[0]))

    # ------------------------------------------------------------------------------------------ statistics

    def adopt_statistics(self, norm_stats: dict[str, Any], key: str | None) -> None:
        """Take other action statistics, from a data set or a checkpoint, in place of one's own; see `statistics`."""
        self.config = replace(self.config, norm_stats=norm_stats)
        self.settings = replace(self.settings, unnorm_key=key)
        self.__dict__.pop("statistics", None)

    def get_extra_state(self) -> Tensor:
        """The statistics as JSON, uint8: they belong to the parameters, so they are stored and sent with them."""
        content = {"norm_stats": self.config.norm_stats, "unnorm_key": self.settings.unnorm_key}
        return torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        content = json.loads(bytes(state.tolist()))
        self.adopt_statistics(content["norm_stats"], content["unnorm_key"])

    # ------------------------------------------------------------------------------------------ pieces

    def generate(self, context: Context, deterministic: bool, generator: SlotNoise | None) -> tuple[Tensor, Tensor]:
        """Choose the tokens of an action one after the other, among action ids.

        Returns:
            Ids [N, A], and the logits of all action ids that each was chosen by, float32 [N, A, bins].
        """
        size = len(self.statistics.low)
        uniform = None if deterministic else _uniform(generator, len(context.mask), size).to(context.mask.device)
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
        like = self.network.language_model.model.norm.weight
        ids = inputs["prompt"].to(like.device)
        mask = ids != self.config.pad_token_id
        used = mask.any(0)  # columns of pads would cost time
        ids, mask = ids[:, used], mask[:, used]
        pixels = self.processor.normalise(inputs["pixels"]).to(like.device, like.dtype)
        return self.network.read(ids, mask, pixels)

    def _states(self, context: Context, ids: Tensor) -> Tensor:
        """Hidden states that predict each of the ids, [N, A, D]."""
        return torch.cat([context.hidden[:, -1:], self.network.extend(context, ids[:, :-1]).hidden], dim=1)

    def _score(self, context: Context, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-prob and entropy [N, A] among action ids, and value [N]."""
        states = self._states(context, ids)
        log_p = self.sampling.log_probabilities(self.network.language_model.logits(states, self.tokens.ids))
        logprob = log_p.gather(-1, (ids - self.tokens.ids.start)[..., None]).squeeze(-1)
        return logprob, -(log_p.exp() * log_p).sum(-1), self.critic(states)

    def save_pretrained(self, directory: str | Path) -> None:
        """Write the network, adapters merged, as a checkpoint in the published format, which has no value head.

        Small files of the checkpoint that it came from, such as its code, go with it.

        Raises:
            FileExistsError: there is a checkpoint already.
        """
        save_checkpoint(Path(directory), self.network, self.config, self.processor, beside=self.directory)


class _Source(NamedTuple):
    config: OpenVLAConfig
    tokenizer: Tokenizer
    preprocessor: dict[str, Any] | None
    directory: Path | None


def _open(checkpoint: str, settings: OpenVLASettings, action_size: int) -> _Source:
    config = read_config(checkpoint, action_size)
    if checkpoint in PRESETS:
        return _Source(config, preset_tokenizer(), None, None)
    directory = Path(checkpoint)
    tokenizer = PromptTokenizer.read(Path(settings.tokenizer or directory))
    return _Source(config, tokenizer, Processor.read(directory), directory)


def _network(source: _Source, settings: OpenVLASettings) -> OpenVLA:
    dtype = settings.torch_dtype or source.config.dtype
    if source.directory is None:
        return OpenVLA(source.config, settings.attention).to(dtype)
    with torch.device("meta"):
        network = OpenVLA(source.config, settings.attention)
    load_weights(network, source.directory, dtype)
    return network


def prepare_training(network: OpenVLA, settings: OpenVLASettings) -> list[str]:
    """Freeze what is not trained, and add adapters.

    Returns:
        Names of the modules that have an adapter.
    """
    for part in (network.vision_backbone, network.language_model.model):
        part.gradient_checkpointing = settings.gradient_checkpointing
    for name in settings.frozen:
        network.get_submodule(name).requires_grad_(False)
    if settings.lora is not None:
        return add_lora(network, settings.lora)
    if settings.adapter is not None:
        return load_adapter(network, Path(settings.adapter))
    return []


def adapted_modules(config: OpenVLAConfig, settings: OpenVLASettings) -> list[str]:
    """Names of the modules that would have an adapter, found on the meta device."""
    with torch.device("meta"):
        return prepare_training(OpenVLA(config, settings.attention), settings)


def _uniform(generator: SlotNoise | None, envs: int, size: int) -> Tensor:
    if generator is None:
        raise ValueError("sampling needs a generator")
    if len(generator.keys) != envs:
        raise ValueError(f"the generator has {len(generator.keys)} slots for {envs} envs")
    return torch.from_numpy(generator.uniform(size))
