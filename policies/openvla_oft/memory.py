"""How much memory a model of OpenVLA-OFT needs on a device; see `policies.openvla.memory`."""

from __future__ import annotations

import torch
from torch import Tensor

from policies.openvla.config import OpenVLAConfig
from policies.openvla.memory import MemoryEstimate, estimate
from policies.openvla.model import Context
from policies.openvla_oft.model import OpenVLAOFT
from policies.openvla_oft.policy import make_critic
from policies.openvla_oft.settings import OpenVLAOFTSettings


def estimate_memory(
    config: OpenVLAConfig,
    settings: OpenVLAOFTSettings,
    batch: int,
    micro_batch: int,
    prompt_length: int = 32,
    action_size: int = 7,
    state_size: int = 8,
) -> MemoryEstimate:
    """What a policy would need. No keys and values are cached.

    Args:
        config: of the checkpoint.
        settings: of the policy.
        batch: envs in one call of `act`.
        micro_batch: samples in one forward and backward pass.
        prompt_length: tokens of a prompt.
        action_size: tokens of one action of a chunk.
        state_size: of what a projector reads.
    """
    slots, views = settings.chunk * action_size, len(settings.views)
    with torch.device("meta"):
        network = OpenVLAOFT(config, settings).to(settings.torch_dtype or config.dtype)
        network.add_modules(action_size, state_size)
        critic = make_critic(config, settings)

    def states(ids: Tensor, features: Tensor) -> Context:
        state = torch.ones(len(ids), state_size).to(features) if settings.proprioception else None
        return network.read_features(ids, ids.bool(), features, slots, state)

    shown = (views, 3 * len(config.timm_ids), config.image_size, config.image_size)
    length = views * network.vision_backbone.num_patches + prompt_length + slots
    return estimate(network, critic, settings, shown, states, batch, micro_batch, prompt_length, length)
