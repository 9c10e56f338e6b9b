"""From observations to what OpenVLA-OFT reads: several views, and the state of the robot."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from policies.base import Observation
from policies.openvla.config import OpenVLAConfig
from policies.openvla.processor import Processor
from policies.openvla.prompts import PromptTokenizer


class OpenVLAOFTProcessor(Processor):
    """Prepares batches on the device where their images are; see `Processor`.

    Args:
        views: cameras that are shown, in order.
        proprioception: `state` is read too.
    """

    def __init__(
        self,
        config: OpenVLAConfig,
        tokenizer: PromptTokenizer,
        written: dict[str, Any] | None = None,
        lanczos: bool = False,
        center_crop: bool = False,
        views: tuple[int, ...] = (0,),
        proprioception: bool = False,
    ) -> None:
        super().__init__(config, tokenizer, written, lanczos, center_crop)
        self.views = views
        if proprioception:
            self.reads = (*self.reads, "state")

    def __call__(self, observation: Observation) -> Observation:
        """As `Processor`, with `pixels` uint8 [N, views, 3, size, size], and `state` [N, S] as it was if it is read."""
        inputs = super().__call__(observation)
        if "state" not in self.reads or inputs is observation:
            return inputs
        state = torch.as_tensor(observation["state"])
        if state.dim() != 2 or len(state) != len(inputs["pixels"]) or not state.is_floating_point():
            expected = f"[{len(inputs['pixels'])}, S] of floating point numbers"
            raise ValueError(f"`state` is {list(state.shape)} of {state.dtype}; expected {expected}")
        return {**inputs, "state": state}

    def pixels(self, image: Tensor) -> Tensor:
        """What is shown of images uint8 [N, V, H, W, 3]: uint8 [N, views, 3, size, size]."""
        shown = image[:, list(self.views)].permute(0, 1, 4, 2, 3)
        return self.resize(shown.flatten(0, 1)).unflatten(0, shown.shape[:2])
