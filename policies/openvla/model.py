"""OpenVLA: patches of an image and a prompt go through one language model, which answers with action tokens.

The sequence is BOS | patches | pads | prompt | action tokens. Pads stand between patches and prompt, so that the
prompts of a batch end together; positions count what is not a pad.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from policies.openvla.config import OpenVLAConfig
from policies.openvla.llama import Attention, KeyValue, Llama
from policies.openvla.vision import VisionBackbone


@dataclass
class Context:
    """What the language model has read, to go on from: K tokens of each of N sequences.

    Attributes:
        hidden: states of the tokens read last, after the final norm [N, S, D].
        keys_values: of each layer, [N, heads, K, head dim].
        mask: bool [N, K]; what is not a pad.
    """

    hidden: Tensor
    keys_values: list[KeyValue]
    mask: Tensor


class Prismatic(nn.Module):
    """Vision towers, projector and language model, with the tensor names of published checkpoints.

    Attributes:
        sees_with: what names of the parameters begin with that features of pictures depend on.
    """

    sees_with: tuple[str, ...] = ("vision_backbone.",)

    def __init__(self, config: OpenVLAConfig, attention: Attention = "sdpa") -> None:
        super().__init__()
        self.config = config
        self.vision_backbone = VisionBackbone(config, attention)
        self.projector = _Projector(self.vision_backbone.width, config.text.hidden_size, len(config.timm_ids))
        self.language_model = Llama(config.text, attention)
        for parameter in self.vision_backbone.unused():
            parameter.requires_grad_(False)

    def features(self, ids: Tensor, mask: Tensor, pixels: Tensor) -> Tensor:
        """What the vision towers make of pictures, [N, patches, width]; arguments as those of `read`."""
        return self.vision_backbone(pixels)


class OpenVLA(Prismatic):
    """The network alone: ids and normalised pixels in, hidden states and logits out."""

    def read(self, ids: Tensor, mask: Tensor, pixels: Tensor) -> Context:
        """Read images and prompts.

        Args:
            ids: [N, L], BOS first.
            mask: bool [N, L]; what is not a pad.
            pixels: normalised, [N, 3 * towers, H, W].
        """
        return self.read_features(ids, mask, self.features(ids, mask, pixels))

    def read_features(self, ids: Tensor, mask: Tensor, features: Tensor) -> Context:
        """As `read`, with the features of the pixels."""
        patches = self.projector(features)
        words = self.language_model.model.embed_tokens(ids)
        x = torch.cat([words[:, :1], patches, words[:, 1:]], dim=1)
        mask = torch.cat([mask[:, :1], mask.new_ones(patches.shape[:2]), mask[:, 1:]], dim=1)
        return self._run(x, mask, None)

    def extend(self, context: Context, ids: Tensor) -> Context:
        """Read ids [N, S] after what was read before."""
        mask = torch.cat([context.mask, context.mask.new_ones(ids.shape)], dim=1)
        return self._run(self.language_model.model.embed_tokens(ids), mask, context.keys_values)

    def _run(self, x: Tensor, mask: Tensor, past: list[KeyValue] | None) -> Context:
        length, total = x.shape[1], mask.shape[1]
        positions = (mask.long().cumsum(1) - 1)[:, -length:]
        causal = torch.ones(length, total, dtype=torch.bool, device=x.device).tril(total - length)
        hidden, keys_values = self.language_model.model(x, positions, (causal & mask[:, None])[:, None], past)
        return Context(hidden, keys_values, mask)


class _Projector(nn.Module):
    """From patch features to the language model's embeddings; one layer more for fused backbones."""

    def __init__(self, vision_width: int, hidden_size: int, towers: int) -> None:
        super().__init__()
        widths = (vision_width, 4 * vision_width, hidden_size) if towers == 2 else (vision_width, hidden_size)
        for index, (inputs, outputs) in enumerate(zip(widths, (*widths[1:], hidden_size), strict=True), 1):
            self.add_module(f"fc{index}", nn.Linear(inputs, outputs))

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.children()):
            x = layer(F.gelu(x) if index else x)
        return x
