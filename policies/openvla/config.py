"""What an OpenVLA checkpoint's `config.json` says, with the defaults that it leaves out.

The file is a diff against the classes that wrote it (transformers 4.40): `text_config` names only what differs from
`LlamaConfig`, and the vision backbone is one identifier that stands for timm models and sizes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

_BACKBONES = {
    "dinosiglip-vit-so-224px": (("vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"), 224),
    "siglip-vit-so400m": (("vit_so400m_patch14_siglip_224",), 224),
}
# Not official: constructor arguments of vision transformers that timm does not list, one dictionary for each tower.
_VISION_ARGUMENTS = ("vision_arguments", "golden_vit_args")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _list_of(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(is_right, value))


def _or_null(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or is_right(value)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_whole(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_size(value: Any) -> bool:
    return _is_whole(value) and value > 0


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and value > 0


_Kinds = dict[str, tuple[str, Callable[[Any], bool]]]
_KINDS: _Kinds = {
    "vision_backbone_id": ("a text", _is_text),
    "timm_model_ids": ("a list of texts", _or_null(_list_of(_is_text))),
    "image_sizes": ("a list of whole numbers above 0", _list_of(_is_size)),
    **{key: ("a list of JSON objects", _or_null(_list_of(_is_object))) for key in _VISION_ARGUMENTS},
    "timm_override_act_layers": ("a list", _or_null(_list_of(lambda _: True))),
    "torch_dtype": ("a text", _is_text),
    "dtype": ("a text", _is_text),
    "text_config": ("a JSON object", _is_object),
    "n_action_bins": ("a whole number above 0", _is_size),
    "pad_to_multiple_of": ("a whole number", _is_whole),
    "pad_token_id": ("a whole number", _is_whole),
    "norm_stats": ("a JSON object", _or_null(_is_object)),
}
_TEXT_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "head_dim"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
)
_TEXT_KINDS: _Kinds = {
    **{key: ("a whole number above 0", _or_null(_is_size)) for key in _TEXT_SIZES},
    **{key: ("a number above 0", _or_null(_is_positive)) for key in ("rms_norm_eps", "rope_theta")},
    "rope_parameters": ("a JSON object", _or_null(_is_object)),
}


class ConfigError(ValueError):
    """A file of a checkpoint that is damaged, is not OpenVLA's, or asks for what is not supported."""


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ConfigError for anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}; expected a JSON object")
    return content


def _require_kinds(content: dict[str, Any], kinds: _Kinds, prefix: str) -> None:
    for key, (expected, is_right) in kinds.items():
        if key in content and not is_right(content[key]):
            raise ConfigError(f"{prefix}{key} is {content[key]!r}; expected {expected}")


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of the language model; the defaults are those of transformers' `LlamaConfig`."""

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 32
    head_dim: int = 128
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0

    @staticmethod
    def from_dict(text: dict[str, Any]) -> LlamaConfig:
        """From `text_config`.

        Raises:
            ConfigError: it is not a Llama, or a Llama with parts that this project does not have, or no valid sizes.
        """
        _require_kinds(text, _TEXT_KINDS, "text_config.")
        expected = {
            "model_type": "llama",
            "hidden_act": "silu",
            "rope_scaling": None,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
        }
        for key, value in expected.items():
            if text.get(key, value) != value:
                raise ConfigError(f"text_config.{key} is {text[key]!r}; only {value!r} is supported")
        rope = text.get("rope_parameters") or {}
        if rope.get("rope_type", "default") != "default":
            raise ConfigError(
                f"text_config.rope_parameters.rope_type is {rope['rope_type']!r}; only 'default' is supported"
            )
        known = {key: text[key] for key in LlamaConfig.__dataclass_fields__ if text.get(key) is not None}
        _require_kinds(rope, {"rope_theta": _TEXT_KINDS["rope_theta"]}, "text_config.rope_parameters.")
        known.setdefault("rope_theta", rope.get("rope_theta", LlamaConfig.rope_theta))
        heads = known.get("num_attention_heads", LlamaConfig.num_attention_heads)
        known.setdefault("num_key_value_heads", heads)
        known.setdefault("head_dim", known.get("hidden_size", LlamaConfig.hidden_size) // heads)
        return LlamaConfig(**known)


@dataclass(frozen=True)
class OpenVLAConfig:
    """An OpenVLA model.

    Attributes:
        timm_ids: timm's names of the vision towers, in the order of their pixel channels.
        vision_arguments: for towers that timm does not list: arguments of `timm.models.VisionTransformer`.
        image_size: pixels of the square images that the towers see.
        resize_strategy: `resize-naive`, `letterbox` or `resize-crop`.
        num_bins: edges of the action bins.
        vocab_size: of the tokenizer; the last `num_bins` of its ids are action tokens.
        norm_stats: data set -> statistics of its actions.
        dtype: of the stored parameters.
        written: the dictionary that this was read from; what is written back.
    """

    timm_ids: tuple[str, ...]
    vision_arguments: tuple[dict[str, Any], ...] | None
    image_size: int
    resize_strategy: str
    text: LlamaConfig
    num_bins: int
    vocab_size: int
    pad_token_id: int
    norm_stats: dict[str, Any]
    dtype: torch.dtype
    written: dict[str, Any] = field(repr=False)

    @staticmethod
    def from_dict(raw: dict[str, Any], source: str = "config.json") -> OpenVLAConfig:
        """From the content of a `config.json`; `source` names it in errors.

        Raises:
            ConfigError: another architecture, an unknown vision backbone, image size or data type, or a value of
                another kind than it should be.
        """
        if raw.get("model_type") != "openvla":
            raise ConfigError(f"{source} describes a model of type {raw.get('model_type')!r}; expected 'openvla'")
        _require_kinds(raw, _KINDS, f"{source}: ")
        backbone = raw.get("vision_backbone_id", "dinosiglip-vit-so-224px")
        ids, size = _BACKBONES.get(backbone, (None, None))
        ids, sizes = raw.get("timm_model_ids", ids), raw.get("image_sizes", [size])
        if not ids or len(ids) > 2 or None in sizes:
            raise ConfigError(f"{source}: unknown vision backbone {backbone!r}; known: {', '.join(_BACKBONES)}")
        if len(set(sizes)) != 1:
            raise ConfigError(f"{source}: image_sizes {sizes} differ; both towers must see the same size")
        arguments = next((raw[key] for key in _VISION_ARGUMENTS if key in raw), None)
        if arguments is not None and len(arguments) != len(ids):
            raise ConfigError(f"{source}: {len(arguments)} sets of vision arguments for {len(ids)} towers")
        if any(raw.get("timm_override_act_layers") or []):
            raise ConfigError(f"{source}: timm_override_act_layers {raw['timm_override_act_layers']} is not supported")
        dtype = raw.get("torch_dtype", raw.get("dtype", "float32"))
        if dtype not in _DTYPES:
            raise ConfigError(f"{source}: unknown torch_dtype {dtype!r}; known: {', '.join(_DTYPES)}")
        try:
            text = LlamaConfig.from_dict({"vocab_size": 32064, **raw.get("text_config", {})})
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None
        vocab_size, num_bins = text.vocab_size - raw.get("pad_to_multiple_of", 64), raw.get("n_action_bins", 256)
        if not 2 <= num_bins <= vocab_size:
            raise ConfigError(f"{source}: n_action_bins is {num_bins}; expected 2 to {vocab_size}, the tokenizer's ids")
        return OpenVLAConfig(
            timm_ids=tuple(ids),
            vision_arguments=tuple(arguments) if arguments is not None else None,
            image_size=sizes[0],
            resize_strategy=raw.get("image_resize_strategy", "resize-naive"),
            text=text,
            num_bins=num_bins,
            vocab_size=vocab_size,
            pad_token_id=raw.get("pad_token_id", 32000),
            norm_stats=raw.get("norm_stats") or {},
            dtype=_DTYPES[dtype],
            written=raw,
        )

    @staticmethod
    def read(directory: Path, keep_base_statistics: bool = False) -> OpenVLAConfig:
        """Read `config.json`, and `dataset_statistics.json` where it exists: a fine-tuned model's own statistics
        replace those of its base, or are added to them.

        Raises:
            FileNotFoundError: there is no `config.json`.
            ConfigError: a damaged file; see also `from_dict`.
        """
        path = directory / "config.json"
        if not path.is_file():
            raise FileNotFoundError(f"{directory} is not a checkpoint: it has no config.json")
        raw = read_json_object(path)
        statistics = directory / "dataset_statistics.json"
        _require_kinds(raw, {"norm_stats": _KINDS["norm_stats"]}, f"{path}: ")
        if statistics.is_file():
            base = (raw.get("norm_stats") or {}) if keep_base_statistics else {}
            raw["norm_stats"] = {**base, **read_json_object(statistics)}
        return OpenVLAConfig.from_dict(raw, str(path))
