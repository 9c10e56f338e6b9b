"""Prompts, their ids, and what a batch of them looks like."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
import torch
from openvla_golden import DATA, TINY, golden_policy

from policies.openvla.presets import preset_config, preset_tokenizer
from policies.openvla.prompts import PromptTokenizer, build_prompt

GOLDEN = json.loads((DATA / "action_tokens.meta.json").read_text())
SPACE = 29871


def golden_tokenizer(length: int | None = None) -> PromptTokenizer:
    return PromptTokenizer(PromptTokenizer.read(TINY), 32000, 32000, length=length)


def test_ids_are_those_of_the_reference_and_end_in_the_lone_space_mark() -> None:
    before, after = "In: What action should the robot take to ", "?\nOut:"
    for prompt in GOLDEN["prompts"]:
        instruction = prompt["text"].removeprefix(before).rstrip().removesuffix(after)
        ids = prompt["ids"] if prompt["ids"][-1] == SPACE else [*prompt["ids"], SPACE]
        if instruction == instruction.lower():
            assert build_prompt(instruction) == prompt["text"].rstrip()
            assert golden_tokenizer()([instruction]).tolist() == [ids]


def test_prompt_and_action_tokens_make_up_the_training_text() -> None:
    text = GOLDEN["training_text"][0]
    instruction = text["text"].split("take to ")[1].split("?")[0]
    ids = golden_tokenizer()([instruction])[0].tolist()
    action = golden_policy().tokens.encode(torch.tensor(text["actions"][0], dtype=torch.float64)).tolist()
    assert [*ids, *action, 2] == text["input_ids"]
    assert text["labels"] == [-100] * len(ids) + [*action, 2]


def test_instructions_are_lower_cased() -> None:
    assert torch.equal(golden_tokenizer()(["Pick Up The BOWL"]), golden_tokenizer()(["pick up the bowl"]))


def test_the_vicuna_style_of_version_0_1() -> None:
    prompt = build_prompt("Push", "openvla-v01")
    assert prompt.startswith("A chat between a curious user and an artificial intelligence assistant. The assistant")
    assert prompt.endswith("USER: What action should the robot take to push? ASSISTANT:")
    with pytest.raises(ValueError, match="unknown prompt style 'v2'; known: openvla, openvla-v01"):
        PromptTokenizer(PromptTokenizer.read(TINY), 32000, 32000, style="v2")  # type: ignore[arg-type]


def test_a_batch_has_its_pads_between_bos_and_prompt() -> None:
    short, long = golden_tokenizer()(["push"])[0].tolist(), golden_tokenizer()(["push the red mug"])[0].tolist()
    pads = [32000] * (len(long) - len(short))
    assert golden_tokenizer()(["push", "push the red mug"]).tolist() == [[1, *pads, *short[1:]], long]
    assert golden_tokenizer(length=40)(["push"]).shape == (1, 40)


def test_a_prompt_that_is_too_long_is_named() -> None:
    with pytest.raises(ValueError, match=r"of 'push the red mug' has \d+ tokens, more than prompt_length \(12\)"):
        golden_tokenizer(length=12)(["push", "push the red mug"])


def test_a_tokenizer_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="has no tokenizer.json"):
        PromptTokenizer.read(tmp_path)
    with pytest.raises(ValueError, match="has 32000 ids, but the model was trained with 100"):
        PromptTokenizer(PromptTokenizer.read(TINY), 100, 100)
    other = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    with pytest.raises(ValueError, match="not a Llama tokenizer"):
        PromptTokenizer(other, 2, 2)


def test_the_presets_tokenizer_reads_any_text_and_spells_action_tokens() -> None:
    config, tokenizer = preset_config("openvla-tiny"), preset_tokenizer()
    size = config.vocab_size
    prompts = PromptTokenizer(tokenizer, size, config.pad_token_id)
    ids = prompts(["pick up the cube"])[0].tolist()
    assert ids[0] == tokenizer.token_to_id("<s>") == 1
    assert ids[-1] == tokenizer.token_to_id("▁")
    assert len(ids) < 35
    assert 0 not in prompts(["Ünusual ☃\tzebra 42"])[0].tolist()  # bytes, never <unk>
    characters = "".join(tokenizer.id_to_token(i) for i in range(size - 256, size))
    assert tokenizer.encode("Out: " + characters, add_special_tokens=False).ids[-256:] == list(range(size - 256, size))
    assert (tokenizer.token_to_id("<PAD>"), tokenizer.get_vocab_size()) == (size, size + 1)
