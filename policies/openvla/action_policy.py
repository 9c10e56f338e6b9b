"""What policies that answer with action tokens share, whether token by token or all at once.

What is kept as log-prob of sampled tokens is computed by the very code that learning uses, on what was read for
sampling, so that the ratio of the policies is exactly 1 until the first update.
"""

from __future__ import annotations

import functools
import json
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from policies.action_tokens import (
    ActionStatistics,
    ActionTokens,
    gripper_as_trained,
    gripper_command,
)
from policies.base import Observation, Policy, PolicyOutput
from policies.lora import add_lora, load_adapter, merged_state_dict
from policies.noise import SlotNoise
from policies.openvla.checkpoint import load_weights, save_checkpoint
from policies.openvla.config import OpenVLAConfig
from policies.openvla.model import Context, Prismatic
from policies.openvla.presets import PRESETS, missing_weights, preset_tokenizer
from policies.openvla.processor import Processor
from policies.openvla.prompts import PromptTokenizer
from policies.openvla.settings import OpenVLASettings
from policies.sampling import Sampling
from policies.value_head import StateValue, ValueHead

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Network = TypeVar("Network", bound=Prismatic)


class ActionTokenPolicy(Policy):
    """Reads `image` and `instruction`, or what `processor` made of them.

    Shapes: K = 1; tokens are ids int64 [N, C, A].

    Args:
        checkpoint: a directory, or one of `presets`.
        settings: how it is used.
        config: what was read of the checkpoint.

    Attributes:
        network: ids and pixels in, hidden states and logits out.
        critic: the value head.
        processor: prepares observations.
        sampling: may be replaced, for example for an evaluation at another temperature.
        adapted: names of modules that have an adapter.
        chunk: C.
    """

    network: Prismatic
    presets: Collection[str] = PRESETS
    chunk = 1
    dynamic_shapes: bool | None = None  # in compiled layers; None: only once a second shape has come

    def __init__(self, checkpoint: str, settings: OpenVLASettings, config: OpenVLAConfig) -> None:
        super().__init__()
        if problem := missing_weights(checkpoint):
            raise FileNotFoundError(problem)
        self.settings, self.config = settings, config
        self.directory = None if checkpoint in self.presets else Path(checkpoint)
        self.processor = self._make_processor(_tokenizer(self.directory, settings))
        self.tokens = ActionTokens(config.vocab_size, config.num_bins)
        self.sampling = Sampling(settings.temperature, settings.top_k, settings.top_p)
        if settings.unnorm_key is not None:
            _ = self.statistics  # an unknown name is told before the weights are read
        self.network = self._make_network()
        self.critic: ValueHead | StateValue = self._make_critic()
        self.adapted = prepare_training(self.network, settings)
        if settings.compile is not None:
            for layer in self.network.language_model.model.layers:
                layer.compile(backend=settings.compile, dynamic=self.dynamic_shapes)

    def read_states(self, state_size: int | None) -> None:
        """Take a critic of the env's state; see `value_of_state`. Raises ValueError if the env has none to read."""
        if state_size is None:
            raise ValueError("value_of_state needs `state`, which this env does not provide")
        self.critic = StateValue(state_size, self.settings.value_hidden, self._make_critic().actions)
        self.statistics_of = ("state",)

    @functools.cached_property
    def statistics(self) -> ActionStatistics:
        """Statistics of the data set that the actions are in.

        Raises:
            UnknownStatistics: the checkpoint has no such data set, or several and none was named.
        """
        return self.settings.statistics(self.config.norm_stats)

    # ------------------------------------------------------------------------------------------ contract

    def prepare(self, observation: Observation) -> Observation:
        prepared = self.processor(observation)
        return {**prepared, "state": observation["state"]} if self.statistics_of else prepared

    @torch.no_grad()
    def encode(self, observation: Observation) -> Observation:
        """Under `reuse_features`, with `features` [N, patches, width] in place of `pixels`."""
        inputs = self.prepare(observation)
        if not self.settings.reuse_features:
            return inputs
        rest = {key: value for key, value in inputs.items() if key not in ("pixels", "features")}
        return {**rest, "features": self._features(inputs, *self._prompt(inputs))}

    def value(self, observation: Observation) -> Tensor:
        if isinstance(self.critic, StateValue):
            return self.critic(observation["state"])
        return self.critic(self._valued(self._read(observation)))

    def observe(self, observation: Observation, valid: Tensor) -> None:
        if isinstance(self.critic, StateValue):
            self.critic.statistics.observe(observation["state"], valid)

    @torch.no_grad()
    def act(self, observation: Observation, deterministic: bool, generator: SlotNoise | None) -> PolicyOutput:
        context = self._read(observation)
        ids, _ = self.generate(context, deterministic, generator)
        logprob, _, value = self._score(context, ids, observation)
        token = self._chunked(ids)
        return PolicyOutput(self._command(self.tokens.decode(token)), token, self._chunked(logprob), value)

    def evaluate(self, observation: Observation, token: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        size = len(self.statistics.low)
        if token.shape[1:] != (self.chunk, size) or self.tokens.outside(token).any():
            expected = f"action ids of the shape [N, {self.chunk}, {size}]"
            raise ValueError(f"tokens {list(token.shape)}: expected {expected}")
        logprob, entropy, value = self._score(self._read(observation), token.flatten(1), observation)
        return self._chunked(logprob), self._chunked(entropy), value

    def tokenise(self, action: Tensor) -> Tensor:
        """The tokens of demonstrated actions, float32 [N, C, A] as `act` gives them: ids int64 of the same shape."""
        return self.tokens.encode(self.statistics.normalise(gripper_as_trained(action, self.settings.gripper)))

    @contextmanager
    def at_temperature(self, temperature: float | None) -> Iterator[None]:
        kept = self.sampling
        if temperature is not None:
            self.sampling = replace(kept, temperature=temperature)
        try:
            yield
        finally:
            self.sampling = kept

    @abstractmethod
    def generate(self, context: Context, deterministic: bool, generator: SlotNoise | None) -> tuple[Tensor, Tensor]:
        """Choose the tokens of a chunk among action ids.

        Returns:
            Ids [N, C * A], and the logits of all action ids that each was chosen by, float32 [N, C * A, bins].
        """

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

    @abstractmethod
    def _read(self, observation: Observation) -> Context:
        """What the model makes of observations before it decides."""

    @abstractmethod
    def _states(self, context: Context, ids: Tensor) -> Tensor:
        """Hidden states that predict each of the ids, [N, C * A, D]."""

    @abstractmethod
    def _valued(self, context: Context) -> Tensor:
        """Hidden states of which the critic reads some, before anything is decided."""

    def _score(self, context: Context, ids: Tensor, observation: Observation) -> tuple[Tensor, Tensor, Tensor]:
        """Log-prob and entropy [N, C * A] among action ids, and value."""
        states = self._states(context, ids)
        log_p = self.sampling.log_probabilities(self.network.language_model.logits(states, self.tokens.ids))
        logprob = log_p.gather(-1, (ids - self.tokens.ids.start)[..., None]).squeeze(-1)
        value = self.critic(observation["state"] if isinstance(self.critic, StateValue) else states)
        return logprob, -(log_p.exp() * log_p).sum(-1), value

    def _prompt(self, inputs: Observation) -> tuple[Tensor, Tensor]:
        """Ids of the prompts, and which are no pads, [N, L] each."""
        ids = inputs["prompt"].to(self._like.device)
        mask = ids != self.config.pad_token_id
        if self.settings.compile is not None and not self.dynamic_shapes:
            return ids, mask
        used = mask.any(0)  # columns of pads would cost time
        return ids[:, used], mask[:, used]

    def _features(self, inputs: Observation, ids: Tensor, mask: Tensor) -> Tensor:
        """Of the pictures, [N, patches, width], unless they were computed before."""
        if "features" in inputs:
            return inputs["features"].to(self._like)
        return self.network.features(ids, mask, self.processor.normalise(inputs["pixels"]).to(self._like))

    @property
    def _like(self) -> Tensor:
        """A parameter on the network's device, of its type."""
        return self.network.language_model.model.norm.weight

    def _chunked(self, flat: Tensor) -> Tensor:
        """[N, C * A] -> [N, C, A]."""
        return flat.unflatten(1, (self.chunk, -1))

    def _command(self, action: Tensor) -> Tensor:
        """Normalised actions [N, C, A] as the env takes them, float32."""
        action = self.statistics.unnormalise(action, self.settings.epsilon)
        return gripper_command(action, self.settings.gripper).float()

    def _uniform(self, context: Context, generator: SlotNoise | None, size: int) -> Tensor:
        """Float64 [N, size] in (0, 1)."""
        envs = len(context.hidden)
        if generator is None:
            raise ValueError("sampling needs a generator")
        if len(generator.keys) != envs:
            raise ValueError(f"the generator has {len(generator.keys)} slots for {envs} envs")
        return torch.from_numpy(generator.uniform(size)).to(context.hidden.device)

    # ------------------------------------------------------------------------------------------ parts

    @abstractmethod
    def _make_network(self) -> Prismatic:
        """With the weights of the checkpoint."""

    def _make_processor(self, tokenizer: Tokenizer) -> Processor:
        settings = self.settings
        written = Processor.read(self.directory) if self.directory else None
        prompts = self._make_prompts(tokenizer)
        return Processor(self.config, prompts, written, settings.lanczos, settings.center_crop, settings.view)

    def _make_prompts(self, tokenizer: Tokenizer) -> PromptTokenizer:
        config, settings = self.config, self.settings
        return PromptTokenizer(
            tokenizer, config.vocab_size, config.pad_token_id, settings.prompt, settings.prompt_length
        )

    def _make_critic(self) -> ValueHead:
        width, settings = self.config.text.hidden_size, self.settings
        return ValueHead(width, settings.value_hidden, settings.value_position, detached=settings.value_detached)

    @property
    def _dtype(self) -> torch.dtype:
        return self.settings.torch_dtype or self.config.dtype

    def save_pretrained(self, directory: str | Path) -> None:
        """Write the network, adapters merged, as a checkpoint in the published format, which has no value head.

        Small files of the checkpoint that it came from, such as its code, go with it, and `policy_settings.json`, which
        tells how it is to be used.

        Raises:
            FileExistsError: there is a checkpoint already.
        """
        save_checkpoint(
            Path(directory), merged_state_dict(self.network), self.config, self.processor, beside=self.directory
        )
        self.settings.write(Path(directory))


def load_network(make: Callable[[], Network], directory: Path | None, dtype: torch.dtype) -> Network:
    """A network with the weights of a checkpoint, or with random ones if there is none."""
    if directory is None:
        return make().to(dtype)
    with torch.device("meta"):
        network = make()
    load_weights(network, directory, dtype)
    return network


def prepare_training(network: Prismatic, settings: OpenVLASettings) -> list[str]:
    """Freeze what is not trained, and add adapters.

    Returns:
        Names of the modules that have an adapter.

    Raises:
        ValueError: features are to be reused, and what they depend on is trained. And as `add_lora`, `load_adapter`.
    """
    for part in (network.vision_backbone, network.language_model.model):
        part.gradient_checkpointing = settings.gradient_checkpointing
    for name in settings.frozen:
        network.get_submodule(name).requires_grad_(False)
    adapted: list[str] = []
    if settings.lora is not None:
        adapted = add_lora(network, settings.lora)
    elif settings.adapter is not None:
        adapted = load_adapter(network, Path(settings.adapter))
    if settings.reuse_features and (trained := trained_vision(network)):
        raise ValueError(
            f"reuse_features keeps what is seen of a picture, and that depends on {trained[0]}, which is trained (and "
            f"{len(trained) - 1} more): freeze vision_backbone, or train adapters outside it"
        )
    return adapted


def trained_vision(network: Prismatic) -> list[str]:
    """Names of trained parameters that features of pictures depend on."""
    trained = (name for name, parameter in network.named_parameters() if parameter.requires_grad)
    return [name for name in trained if name.startswith(network.sees_with)]


def _tokenizer(directory: Path | None, settings: OpenVLASettings) -> Tokenizer:
    return preset_tokenizer() if directory is None else PromptTokenizer.read(Path(settings.tokenizer or directory))
