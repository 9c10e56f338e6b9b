"""How a checkpoint is used: the options of the policy."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, get_args

import torch

from policies.action_tokens import ActionStatistics, Gripper, action_statistics
from policies.lora import LoRASettings
from policies.openvla.config import read_json_object
from policies.openvla.llama import Attention
from policies.openvla.prompts import PromptStyle
from policies.value_head import ValuePosition

_FILE = "policy_settings.json"

Dtype = Literal["float32", "bfloat16"]
Part = Literal["vision_backbone", "projector", "language_model"]


@dataclass(frozen=True)
class OpenVLASettings:
    """How a checkpoint is used.

    Attributes:
        unnorm_key: data set whose action statistics apply; None: the checkpoint's only one.
        epsilon: added to the range of an action dimension; 0 for OpenVLA, 1e-8 for models trained by OFT's code.
        gripper: how the last action dimension is commanded.
        tokenizer: directory that has the tokenizer; None: the checkpoint's.
        prompt: style of the prompt.
        prompt_length: prompts are filled up to it; None: to the longest of a batch.
        lanczos: resize images by TensorFlow's Lanczos filter first.
        center_crop: show the middle 90 % of the image.
        view: which camera is shown.
        dtype: of the network; None: as stored. The value head and adapters are float32.
        attention: implementation, in the vision towers and in the language model.
        gradient_checkpointing: recompute activations in the backward pass.
        compile: backend of `torch.compile` for the language model's layers, such as `inductor` or `cudagraphs`; None:
            not compiled. The latter is for static shapes: OpenVLA-OFT's, in batches of one size under `prompt_length`.
        temperature, top_k, top_p: see `Sampling`.
        value_position, value_hidden, value_detached: see `ValueHead`.
        value_of_state: the critic reads `state`, which the policy does not; see `StateValue`. Of the other options of
            the critic, `value_hidden` applies.
        lora: adapters to train; everything but them and the value head is then frozen.
        adapter: directory of a stored adapter to go on from, instead of `lora`.
        frozen: parts that are not trained.
        reuse_features: what the vision towers make of a picture is computed once, while acting, and learned from in
            place of the picture. For towers that are not trained. It takes more memory than pictures do: seven times
            as much in the published model.
    """

    KIND: ClassVar[str] = "openvla"
    LASTING: ClassVar[tuple[str, ...]] = ("epsilon", "gripper", "prompt", "view")  # a model keeps to these for life

    unnorm_key: str | None = None
    epsilon: float = 0.0
    gripper: Gripper = "as_trained"
    tokenizer: str | None = None
    prompt: PromptStyle = "openvla"
    prompt_length: int | None = None
    lanczos: bool = False
    center_crop: bool = False
    view: int = 0
    dtype: Dtype | None = None
    attention: Attention = "sdpa"
    gradient_checkpointing: bool = False
    compile: str | None = None
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    value_position: ValuePosition = "first"
    value_hidden: tuple[int, ...] = (512, 128)
    value_detached: bool = False
    value_of_state: bool = False
    lora: LoRASettings | None = None
    adapter: str | None = None
    frozen: tuple[Part, ...] = ()
    reuse_features: bool = False

    def __post_init__(self) -> None:
        require("attention", self.attention, get_args(Attention))
        require("dtype", self.dtype, (None, *get_args(Dtype)))
        require("gripper", self.gripper, get_args(Gripper))
        require_whole("view", self.view, 0)
        if self.prompt_length is not None:
            require_whole("prompt_length", self.prompt_length, 1)
        require_list("value_hidden", self.value_hidden)
        for width in self.value_hidden:
            require_whole("value_hidden", width, 1)
        require_list("frozen", self.frozen)
        for part in self.frozen:
            require("frozen", part, get_args(Part))
        given = [name for name in ("lora", "adapter", "frozen") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are given; adapters freeze all else, `adapter` is a stored one")

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """`dtype` as PyTorch's."""
        return None if self.dtype is None else getattr(torch, self.dtype)

    def statistics(self, norm_stats: dict[str, Any], of: str = "action") -> ActionStatistics:
        """Those that apply, of a checkpoint's; see `action_statistics` for the arguments and errors."""
        return action_statistics(norm_stats, self.unnorm_key, of=of)

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> Self:
        """From a dictionary; `lora` may be one too.

        Raises:
            ValueError: an option that does not exist, or has a value that it may not have.
        """
        for kind, given in ((cls, options), (LoRASettings, options.get("lora"))):
            known = [field.name for field in fields(kind)]
            unknown = sorted(set(given) - set(known)) if isinstance(given, dict) else []
            if unknown:
                raise ValueError(f"unknown options {unknown} of {kind.__name__}; known: {', '.join(known)}")
        lora = options.get("lora")
        return cls(**{**options, "lora": LoRASettings(**lora) if isinstance(lora, dict) else lora})

    def write(self, directory: Path) -> None:
        """Tell, beside a checkpoint, how its model is to be used; published checkpoints do not."""
        lasting = {"kind": self.KIND, **{name: getattr(self, name) for name in self.LASTING}}
        (directory / _FILE).write_text(json.dumps(lasting, indent=1), encoding="utf-8")


def written_settings(directory: str | Path) -> dict[str, Any]:
    """What a checkpoint tells of its use: `kind`, and options; empty for a published one, or a preset.

    Raises ConfigError for a damaged file.
    """
    path = Path(directory) / _FILE
    if not path.is_file():
        return {}
    written = read_json_object(path)
    return {name: tuple(value) if isinstance(value, list) else value for name, value in written.items()}


def require_whole(name: str, value: Any, least: int) -> None:
    """Raise a ValueError that names an option which is no whole number, or below `least`."""
    if type(value) is not int or value < least:
        raise ValueError(f"{name} is {value!r}; expected a whole number, at least {least}")


def require_list(name: str, values: Any) -> None:
    """Raise a ValueError that names an option which takes several values and is given something else."""
    if not isinstance(values, list | tuple):
        raise ValueError(f"{name} is {values!r}; expected a list or a tuple")


def require(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Raise a ValueError that names an option whose value is not allowed."""
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; expected one of {', '.join(map(repr, allowed))}")
