"""OpenVLA-OFT: images, state and prompt go through the language model with an empty slot for each action token.

The sequence is BOS | patches of each view | state | pads | prompt | slots | `</s>` (in some layouts). Every token
attends to every other that is no pad. A slot's embedding is zero, so slots are told apart by their positions, which do
not count pads. The hidden state before a slot decides on its token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from policies.openvla.config import OpenVLAConfig
from policies.openvla.model import Context, Prismatic
from policies.openvla_oft.modules import ActionHead, FiLMBlock, ProprioProjector
from policies.openvla_oft.settings import OpenVLAOFTSettings

_END = 2  # `</s>` of Llama's vocabulary


class OpenVLAOFT(Prismatic):
    """The network alone: ids, normalised pixels and states in, hidden states out.

    It is made with the parts of OpenVLA, as the main file of a checkpoint has them; `add_modules` makes the rest.
    """

    def __init__(self, config: OpenVLAConfig, settings: OpenVLAOFTSettings) -> None:
        super().__init__(config, settings.attention)
        self.settings = settings
        if settings.film:
            self.sees_with = (*self.sees_with, "language_model.model.embed_tokens.")

    def add_modules(self, action_size: int, state_size: int) -> list[str]:
        """Add what the settings ask for, on the device and of the type of the rest.

        Returns:
            Names of the parts that a checkpoint has in files of their own.
        """
        like, width = self.language_model.model.norm.weight, self.config.text.hidden_size
        names = []
        if self.settings.film:
            for tower in self.vision_backbone.towers:
                for index, block in enumerate(tower.blocks):
                    tower.blocks[index] = FiLMBlock(block, tower.embed_dim, width).to(like)
            for parameter in self.vision_backbone.unused():
                parameter.requires_grad_(False)
            names.append("vision_backbone")
        if self.settings.proprioception:
            self.proprio_projector = ProprioProjector(state_size, width).to(like)
            names.append("proprio_projector")
        if self.settings.head == "l1":
            self.action_head = ActionHead(width, action_size).to(like)
            names.append("action_head")
        return names

    def read(self, ids: Tensor, mask: Tensor, pixels: Tensor, slots: int, state: Tensor | None = None) -> Context:
        """Read observations and decide.

        Args:
            ids: [N, L], BOS first.
            mask: bool [N, L]; what is not a pad.
            pixels: normalised, [N, V, 3 * towers, H, W].
            slots: C * A.
            state: normalised, [N, S]; with a projector only.

        Returns:
            The hidden states that predict each slot, [N, slots, D], without keys and values.
        """
        return self.read_features(ids, mask, self.features(ids, mask, pixels), slots, state)

    def features(self, ids: Tensor, mask: Tensor, pixels: Tensor) -> Tensor:
        condition = (_language(*self._words(ids, mask)),) if self.settings.film else ()
        return torch.cat([self.vision_backbone(view, *condition) for view in pixels.unbind(1)], dim=1)

    def read_features(
        self, ids: Tensor, mask: Tensor, features: Tensor, slots: int, state: Tensor | None = None
    ) -> Context:
        """As `read`, with the features of the pixels, [N, V * P, width]."""
        words, mask = self._words(ids, mask)
        seen = self.projector(features)
        if state is not None:
            seen = torch.cat([seen, self.proprio_projector(state)[:, None]], dim=1)

        length = ids.shape[1]
        empty = words.new_zeros(len(ids), slots, words.shape[2])
        x = torch.cat([words[:, :1], seen, words[:, 1:length], empty, words[:, length:]], dim=1)
        there = mask.new_ones(len(ids), seen.shape[1] + slots)
        split = seen.shape[1]
        mask = torch.cat([mask[:, :1], there[:, :split], mask[:, 1:length], there[:, split:], mask[:, length:]], dim=1)
        first = split + length - 1
        return Context(self._run(x, mask)[:, first : first + slots], [], mask)

    @torch.no_grad()
    def check_attention(self) -> None:
        """Raise a RuntimeError unless a future token changes an earlier hidden state.

        Attention that ignores its mask is causal without a word, and a checkpoint then acts at random.
        """
        embed = self.language_model.model.embed_tokens.weight
        pairs = torch.stack([embed[[1, 2]], embed[[1, 3]]])
        before = self._run(pairs, torch.ones(2, 2, dtype=torch.bool, device=embed.device))[:, 0]
        if torch.equal(before[0], before[1]):
            raise RuntimeError(f"attention is causal under attention={self.settings.attention!r}; it must look ahead")

    def _run(self, x: Tensor, mask: Tensor) -> Tensor:
        positions = mask.long().cumsum(1) - 1
        return self.language_model.model(x, positions, mask[:, None, None], keep=False)[0]

    def _words(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings of the prompts and of what ends the sequence, [N, L, D], and which are no pads."""
        ends = self.settings.layout != "rlinf"
        after = ids.new_full((len(ids), int(ends)), _END)
        words = self.language_model.model.embed_tokens(torch.cat([ids, after], dim=1))
        return words, torch.cat([mask, torch.ones_like(after, dtype=torch.bool)], dim=1)


def _language(words: Tensor, mask: Tensor) -> Tensor:
    """Mean embedding [N, D] of the words [N, L, D] that are no pads."""
    kept = torch.where(mask[..., None], words.float(), 0.0)
    return (kept.sum(1) / mask.sum(1, keepdim=True)).to(words.dtype)
