"""From instructions to the ids of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PromptStyle = Literal["openvla", "openvla-v01"]

_TEMPLATES = {
    "openvla": "In: What action should the robot take to {}?\nOut:",
    "openvla-v01": (
        "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
        "detailed, and polite answers to the user's questions. USER: What action should the robot "
        "take to {}? ASSISTANT:"
    ),
}


def build_prompt(instruction: str, style: PromptStyle = "openvla") -> str:
    """The text around an instruction that a model was trained with; instructions are lower-case there."""
    return _TEMPLATES[style].format(instruction.lower())


class PromptTokenizer:
    """Tokenises prompts as in training: BOS first, and the lone space mark between the prompt and the action.

    Args:
        tokenizer: a Llama tokenizer.
        vocab_size: ids it must have, without added ones.
        pad_token_id: what fills up shorter prompts.
        style: of the prompts.
        length: fill up to it, so that batches can be stacked; None: to the longest prompt of the batch.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        pad_token_id: int,
        style: PromptStyle = "openvla",
        length: int | None = None,
    ) -> None:
        if style not in _TEMPLATES:
            raise ValueError(f"unknown prompt style {style!r}; known: {', '.join(_TEMPLATES)}")
        size = tokenizer.get_vocab_size(with_added_tokens=False)
        if size != vocab_size:
            raise ValueError(f"the tokenizer has {size} ids, but the model was trained with {vocab_size}")
        begin, space = tokenizer.token_to_id("<s>"), tokenizer.token_to_id("▁")
        if begin is None or space is None:
            raise ValueError("not a Llama tokenizer: it lacks '<s>' or '▁'")
        self.tokenizer, self.style, self.length, self.pad_token_id = tokenizer, style, length, pad_token_id
        self.begin, self.space = begin, space
        self._known: dict[str, list[int]] = {}

    @staticmethod
    def read(directory: Path) -> Tokenizer:
        """The tokenizer of a checkpoint.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it is damaged.
        """
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ImportError("OpenVLA needs tokenizers: pip install 'embodied-rl[vla]'") from error
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{directory} has no tokenizer.json; name a directory that has one as `tokenizer`")
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # what the library raises has no class of its own
            raise ValueError(f"{path} is no tokenizer: {error}") from None

    def __call__(self, instructions: Sequence[str]) -> Tensor:
        """Ids [N, L] of the prompts: BOS | pads | prompt, so that all prompts end together.

        Raises:
            ValueError: a prompt is longer than `length`.
        """
        prompts = [self._ids(instruction) for instruction in instructions]
        longest = max(map(len, prompts))
        length = self.length or longest
        if longest > length:
            text = max(instructions, key=lambda instruction: len(self._ids(instruction)))
            raise ValueError(f"the prompt of {text!r} has {longest} tokens, more than prompt_length ({length})")
        pads = [[self.pad_token_id] * (length - len(prompt)) for prompt in prompts]
        return torch.tensor([ids[:1] + pad + ids[1:] for ids, pad in zip(prompts, pads, strict=True)])

    def _ids(self, instruction: str) -> list[int]:
        if instruction not in self._known:
            text = build_prompt(instruction, self.style)
            ids = [self.begin, *self.tokenizer.encode(text, add_special_tokens=False).ids]
            self._known[instruction] = ids if ids[-1] == self.space else [*ids, self.space]
        return self._known[instruction]
