"""Models that are named instead of given: small ones of the same classes, with random weights and a tokenizer of their
own, all of which runs on a CPU; and the published ones' sizes, to plan with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from policies.openvla.config import OpenVLAConfig

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_ACTION_BINS = 32  # a small model sees too few examples of each of the published 256
_FIRST_ACTION_CHARACTER = 0x4E00  # single characters that no instruction holds and that never merge

_SPECIAL, _SPACE = ("<unk>", "<s>", "</s>"), "▁"
_SENTENCES = (
    "In: What action should the robot take to pick up the cube and put it on the plate? Out:",
    "push the cube to the goal region, pull the red ball, lift the peg, stack the green cube on the blue cube",
    "open the top drawer of the cabinet, close the door, turn on the stove, place the black bowl in the basket",
)

PRESETS: dict[str, dict[str, Any]] = {
    "openvla-tiny": {
        "model_type": "openvla",
        "timm_model_ids": ["tiny_dinov2", "tiny_siglip"],
        "vision_arguments": [
            {
                "patch_size": 14,
                "embed_dim": 64,
                "depth": 3,
                "num_heads": 2,
                "reg_tokens": 4,
                "no_embed_class": True,
                "init_values": 1.0,
            },
            {
                "patch_size": 14,
                "embed_dim": 48,
                "depth": 3,
                "num_heads": 2,
                "class_token": False,
                "global_pool": "map",
            },
        ],
        "image_sizes": [56, 56],
        "n_action_bins": _ACTION_BINS,
        "pad_to_multiple_of": 64,
        "torch_dtype": "float32",
        "text_config": {
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 176,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        },
    },
    "openvla-7b": {"model_type": "openvla", "torch_dtype": "bfloat16"},
}
_WITHOUT_WEIGHTS = ("openvla-7b", "openvla-oft-7b")


def missing_weights(checkpoint: str) -> str | None:
    """What is wrong with a preset that is made of sizes alone; None for any other checkpoint."""
    if checkpoint not in _WITHOUT_WEIGHTS:
        return None
    return f"{checkpoint} stands for the published model's sizes; its weights are yours to give, as a directory"


def preset_config(name: str, action_size: int = 7) -> OpenVLAConfig:
    """The configuration of a preset.

    The one data set in its statistics is the preset's name; its actions fill [-1, 1] in every dimension.
    """
    config = PRESETS[name]
    if name not in _WITHOUT_WEIGHTS:
        size = len(_vocabulary()[0])
        text = {**config["text_config"], "vocab_size": size + config["pad_to_multiple_of"]}
        config = {**config, "pad_token_id": size, "text_config": text}
    action = {**unit_statistics(action_size), "mask": [True] * action_size}
    return OpenVLAConfig.from_dict({**config, "norm_stats": {name: {"action": action}}}, name)


def unit_statistics(size: int) -> dict[str, list[float]]:
    """Of so many dimensions that fill [-1, 1]."""
    low, high = [-1.0] * size, [1.0] * size
    return {"q01": low, "q99": high, "min": low, "max": high}


def preset_tokenizer() -> Tokenizer:
    """A tokenizer of Llama 2's kind: bytes as fallback, spaces as `▁`, action characters last."""
    import tokenizers

    pieces, merges = _vocabulary()
    model = tokenizers.models.BPE(
        vocab={piece: index for index, piece in enumerate(pieces)},
        merges=merges,
        unk_token=_SPECIAL[0],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend(_SPACE), tokenizers.normalizers.Replace(" ", _SPACE)]
    )
    tokenizer.add_special_tokens([*_SPECIAL, "<PAD>"])
    return tokenizer


def _vocabulary() -> tuple[list[str], list[tuple[str, str]]]:
    """Pieces in the order of their ids, and merges that build each known word from its beginning."""
    words = sorted({word for sentence in _SENTENCES for word in sentence.split()})
    merges = dict.fromkeys((_SPACE + word[:length], word[length]) for word in words for length in range(len(word)))
    pieces = [*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), _SPACE]
    pieces += [chr(code) for code in range(0x21, 0x7F)]
    pieces += [first + second for first, second in merges]
    pieces += [chr(_FIRST_ACTION_CHARACTER + index) for index in range(_ACTION_BINS)]
    return pieces, list(merges)
