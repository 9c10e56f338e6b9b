"""What keeps a checkpoint from being used as the options say, told without reading its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from policies.action_tokens import UnknownStatistics, action_statistics
from policies.openvla.checkpoint import CheckpointError, check_weights
from policies.openvla.config import ConfigError
from policies.openvla.model import OpenVLA
from policies.openvla.policy import adapted_modules, read_config
from policies.openvla.presets import PRESETS
from policies.openvla.prompts import PromptTokenizer
from policies.openvla.settings import OpenVLASettings

_EXPECTED = (FileNotFoundError, ConfigError, CheckpointError, UnknownStatistics, ValueError)


def problems(checkpoint: str, settings: OpenVLASettings) -> Iterator[tuple[str, str]]:
    """Pairs of the option at fault, `checkpoint` or a field of `OpenVLASettings`, and what is wrong.

    The network is built on the meta device, where it takes no memory; of weights, names and shapes are read.
    """
    try:
        config = read_config(checkpoint)
    except _EXPECTED as error:
        yield "checkpoint", str(error)
        return
    directory = None if checkpoint in PRESETS else Path(checkpoint)

    def tokenizer() -> None:
        if directory is not None:
            found = PromptTokenizer.read(Path(settings.tokenizer or directory))
            PromptTokenizer(found, config.vocab_size, config.pad_token_id, settings.prompt, settings.prompt_length)

    def weights() -> None:
        if directory is not None:
            with torch.device("meta"):
                network = OpenVLA(config)
            check_weights(network, directory)

    def adapters(**only: Any) -> Callable[[], object]:
        return lambda: adapted_modules(config, replace(settings, **only))

    checks: dict[str, Callable[[], object]] = {
        "tokenizer": tokenizer,
        "unnorm_key": lambda: action_statistics(config.norm_stats, settings.unnorm_key),
        "checkpoint": weights,
        "lora": adapters(adapter=None),
        "adapter": adapters(lora=None),
    }
    for option, check in checks.items():
        try:
            check()
        except _EXPECTED as error:
            yield option, str(error)
