"""What OpenVLA-OFT adds to OpenVLA, with the tensor names of its published files."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


class ProprioProjector(nn.Module):
    """The state of the robot as one token of the language model."""

    def __init__(self, state_size: int, hidden_size: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(state_size, hidden_size)
        self.fc2 = nn.Linear(hidden_size, hidden_size)

    def forward(self, state: Tensor) -> Tensor:
        """Normalised states [N, S] -> embeddings [N, D]."""
        return self.fc2(F.gelu(self.fc1(state)))


class ActionHead(nn.Module):
    """Actions by regression: the hidden states of each action's tokens through an MLP with residuals."""

    def __init__(self, hidden_size: int, action_size: int, blocks: int = 2) -> None:
        super().__init__()
        self.action_size = action_size
        self.model = _Regression(hidden_size, action_size, blocks)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states [N, C * A, D] -> normalised actions [N, C, A]."""
        return self.model(hidden.unflatten(1, (-1, self.action_size)).flatten(2))


class _Regression(nn.Module):
    def __init__(self, hidden_size: int, action_size: int, blocks: int) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(hidden_size * action_size)
        self.fc1 = nn.Linear(hidden_size * action_size, hidden_size)
        self.mlp_resnet_blocks = nn.ModuleList(_Residual(hidden_size) for _ in range(blocks))
        self.layer_norm2 = nn.LayerNorm(hidden_size)
        self.fc2 = nn.Linear(hidden_size, action_size)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.fc1(self.layer_norm1(x)))
        for block in self.mlp_resnet_blocks:
            x = block(x)
        return self.fc2(self.layer_norm2(x))


class _Residual(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(size), nn.Linear(size, size), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ffn(x)


class FiLMBlock(nn.Module):
    """A block of a vision transformer that language scales and shifts between its two halves (Perez et al., 2018)."""

    def __init__(self, block: Any, width: int, hidden_size: int) -> None:
        super().__init__()
        self.block = block
        self.scale = nn.Linear(hidden_size, width)
        self.shift = nn.Linear(hidden_size, width)

    def forward(self, x: Tensor, language: Tensor) -> Tensor:
        """Features [N, P, width], language [N, D] -> features."""
        block = self.block
        x = x + block.drop_path1(block.ls1(block.attn(block.norm1(x))))
        x = x * (1 + self.scale(language)[:, None]) + self.shift(language)[:, None]
        return x + block.drop_path2(block.ls2(block.mlp(block.norm2(x))))
