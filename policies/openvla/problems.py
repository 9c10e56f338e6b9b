"""What keeps a checkpoint from being used as the options say, told without reading its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from policies.action_tokens import UnknownStatistics
from policies.openvla.checkpoint import CheckpointError, check_weights
from policies.openvla.config import ConfigError, OpenVLAConfig
from policies.openvla.model import OpenVLA
from policies.openvla.policy import adapted_modules, read_config
from policies.openvla.presets import PRESETS, missing_weights
from policies.openvla.processor import Processor
from policies.openvla.prompts import PromptTokenizer
from policies.openvla.settings import OpenVLASettings

EXPECTED = (FileNotFoundError, ConfigError, CheckpointError, UnknownStatistics, ValueError)
"""What a checkpoint or an option that does not fit raises."""

Check = tuple[str, Callable[[], object]]
Settings = TypeVar("Settings", bound=OpenVLASettings)


def problems(checkpoint: str, settings: OpenVLASettings) -> Iterator[tuple[str, str]]:
    """Pairs of the option at fault, `checkpoint` or a field of `OpenVLASettings`, and what is wrong.

    The network is built on the meta device, where it takes no memory; of weights, names and shapes are read.
    """
    try:
        config = read_config(checkpoint)
    except EXPECTED as error:
        yield "checkpoint", str(error)
        return
    directory = None if checkpoint in PRESETS else Path(checkpoint)
    if problem := missing_weights(checkpoint):
        yield "checkpoint", problem
    yield from failures(shared_checks(config, directory, settings, adapted_modules))


def failures(checks: list[Check]) -> Iterator[tuple[str, str]]:
    """Options whose checks raise, and what."""
    for option, check in checks:
        try:
            check()
        except EXPECTED as error:
            yield option, str(error)


def shared_checks(
    config: OpenVLAConfig,
    directory: Path | None,
    settings: Settings,
    adapted: Callable[[OpenVLAConfig, Settings], object],
) -> list[Check]:
    """Options, and what raises one of `EXPECTED` if they do not fit the checkpoint; `adapted` as `adapted_modules`."""

    def tokenizer() -> None:
        if directory is not None:
            found = PromptTokenizer.read(Path(settings.tokenizer or directory))
            PromptTokenizer(found, config.vocab_size, config.pad_token_id, settings.prompt, settings.prompt_length)

    def images() -> None:
        if directory is not None:
            Processor.read(directory)

    def weights() -> None:
        if directory is not None:
            with torch.device("meta"):
                network = OpenVLA(config)
            check_weights(network, directory)

    def training(**only: Any) -> Callable[[], object]:
        return lambda: adapted(config, replace(settings, **only))

    alone = settings.reuse_features and settings.lora is None and settings.adapter is None
    return [
        ("tokenizer", tokenizer),
        ("unnorm_key", lambda: settings.statistics(config.norm_stats)),
        ("checkpoint", images),
        ("checkpoint", weights),
        *([("lora", training(adapter=None))] if settings.lora else []),
        *([("adapter", training(lora=None))] if settings.adapter else []),
        *([("reuse_features", training())] if alone else []),
    ]
