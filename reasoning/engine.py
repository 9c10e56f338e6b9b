"""What samples for a sampler: transformers, or vLLM where it is installed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from reasoning.config import MathConfig
from reasoning.generate import Generator, Request
from reasoning.models import LanguageModel
from reasoning.samples import Completion, Sampling


class Engine(Protocol):
    """Holds a copy of the model that learns."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, list[Completion]]]:
        """(position of the request, its completions), as soon as all of a request have ended."""

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take the parameters that learning changes, as `LanguageModel.learned_state` gives them."""

    def weights(self) -> dict[str, Tensor]:
        """These parameters, as they are here."""

    def offload(self) -> None:
        """Free the device's memory."""

    def onload(self) -> None:
        """Take it again."""


def make_engine(config: MathConfig, stop_id: int, device: torch.device) -> Engine:
    """The engine of a configuration. Raises ModelError where vLLM is asked for and missing.

    Args:
        stop_id: the tokenizer's end of a text; those of the model end a completion too.
    """
    if config.sampling.engine == "vllm":
        from reasoning.vllm_engine import VLLMEngine

        return VLLMEngine(config, stop_id)
    return TransformersEngine(config, stop_id, device)


class TransformersEngine:
    """Samples by `Generator`."""

    def __init__(self, config: MathConfig, stop_id: int, device: torch.device) -> None:
        self.device = device
        self.model = LanguageModel(config.model, trains=False, seed=config.seed).to(device)
        self._generator = Generator(self.model.network, self.model.stop_ids | {stop_id}, config.sampling.max_rows)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, list[Completion]]]:
        return self._generator.generate(requests, sampling)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        self.model.load_learned_state(weights)

    def weights(self) -> dict[str, Tensor]:
        return self.model.learned_state()

    def offload(self) -> None:
        self.model.to("cpu")
        torch.cuda.empty_cache()

    def onload(self) -> None:
        self.model.to(self.device)
