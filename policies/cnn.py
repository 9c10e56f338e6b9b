"""A convolutional encoder for images (the one of Mnih et al., 2015, pooled to a fixed size), with heads as in `mlp`.

Actor and critic share the encoder. Several cameras are encoded alike and averaged; a state, if there is one, is joined.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from policies.base import Observation, PolicySettings
from policies.mlp import MLPPolicy

FEATURES = 256
POOLED = 4  # rows and columns that any image size is pooled to


class CNNPolicy(MLPPolicy):
    """Options: hidden (of the heads), log_std (see PolicyConfig)."""

    def __init__(self, settings: PolicySettings) -> None:
        options = {**settings.options, "normalise_observations": False}
        self.state_size = settings.state_size or 0
        super().__init__(replace(settings, state_size=FEATURES + self.state_size, options=options))
        self.encoder = nn.Sequential(
            _layer(nn.Conv2d(3, 32, 8, stride=4, padding=2)),
            nn.ReLU(),
            _layer(nn.Conv2d(32, 64, 4, stride=2, padding=1)),
            nn.ReLU(),
            _layer(nn.Conv2d(64, 64, 3, padding=1)),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(POOLED),
            nn.Flatten(),
            _layer(nn.Linear(64 * POOLED**2, FEATURES)),
            nn.ReLU(),
        )

    def _features(self, observation: Observation) -> Tensor:
        image = observation["image"]
        if image.ndim != 5 or image.shape[-1] != 3:
            raise ValueError(f"the cnn policy reads images [N, V, H, W, 3], not {list(image.shape)}")
        count, views = image.shape[:2]
        scaled = image.flatten(0, 1).permute(0, 3, 1, 2).float() / 255.0
        features = self.encoder(scaled).view(count, views, FEATURES).mean(1)
        return torch.cat([features, observation["state"]], -1) if self.state_size else features


def _layer(layer: nn.Conv2d | nn.Linear) -> nn.Module:
    nn.init.orthogonal_(layer.weight, math.sqrt(2))
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer
