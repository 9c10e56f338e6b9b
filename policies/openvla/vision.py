"""The vision backbone: DINOv2 and SigLIP side by side, each read one block before its end.

Tensor names are those of published checkpoints. The last block, the final norm and SigLIP's pooling are held for them
alone: nothing computes them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from policies.openvla.config import ConfigError, OpenVLAConfig


class VisionBackbone(nn.Module):
    """Patch features of one or two vision transformers.

    Attributes:
        num_patches: P.
        width: sum of the towers' widths.
        gradient_checkpointing: recompute blocks in the backward pass.
    """

    def __init__(self, config: OpenVLAConfig, attention: str) -> None:
        super().__init__()
        self.featurizer = _tower(config, 0, attention)
        if len(config.timm_ids) == 2:
            self.fused_featurizer = _tower(config, 1, attention)
        self.num_patches: int = self.towers[0].patch_embed.num_patches
        self.width: int = sum(tower.embed_dim for tower in self.towers)
        self.gradient_checkpointing = False

    @property
    def towers(self) -> list[Any]:
        """The vision transformers, in the order of their pixel channels."""
        return list(self.children())

    def forward(self, pixels: Tensor, *condition: Tensor) -> Tensor:
        """Pixels [N, 3 * towers, H, W] -> features [N, P, width], the towers' features one after the other.

        `condition`: what blocks take beside their input, if they were replaced by such that do.
        """
        images = zip(self.towers, pixels.split(3, dim=1), strict=True)
        return torch.cat([self._features(tower, image, condition) for tower, image in images], dim=-1)

    def _features(self, tower: Any, image: Tensor, condition: tuple[Tensor, ...]) -> Tensor:
        x = tower.norm_pre(tower._pos_embed(tower.patch_embed(image)))
        for block in tower.blocks[:-1]:
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, *condition, use_reentrant=False)
            else:
                x = block(x, *condition)
        return x[:, tower.num_prefix_tokens :]

    def unused(self) -> list[nn.Parameter]:
        """Parameters that the features do not depend on."""
        parts = [(tower.blocks[-1], tower.norm, tower.attn_pool) for tower in self.towers]
        return [p for tower in parts for part in tower if part is not None for p in part.parameters()]


class _LayerScale(nn.Module):
    """timm's LayerScale with the parameter's name in checkpoints (`gamma` would be renamed by old loaders)."""

    def __init__(self, like: Any) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(like.gamma.detach())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale_factor


def _tower(config: OpenVLAConfig, index: int, attention: str) -> Any:
    try:
        import timm
    except ImportError as error:
        raise ImportError("OpenVLA needs timm: pip install 'embodied-rl[vla]'") from error
    tower: Any
    name = config.timm_ids[index]
    shared: dict[str, Any] = {"img_size": config.image_size, "num_classes": 0}
    if config.vision_arguments is None and not timm.is_model(name):
        raise ConfigError(f"timm {timm.__version__} knows no vision tower {name!r}")
    try:
        if config.vision_arguments is not None:
            tower = timm.models.VisionTransformer(**config.vision_arguments[index], **shared)
        else:
            tower = timm.create_model(name, pretrained=False, **shared)
    except TypeError as error:
        raise ConfigError(f"timm does not make the vision tower {name!r}: {error}") from None
    for block in tower.blocks:
        if not hasattr(block.attn, "fused_attn"):
            raise ImportError(f"timm {timm.__version__} does not let the attention implementation be chosen")
        block.attn.fused_attn = attention == "sdpa"
        for name in ("ls1", "ls2"):
            if hasattr(getattr(block, name), "gamma"):
                setattr(block, name, _LayerScale(getattr(block, name)))
    return tower
