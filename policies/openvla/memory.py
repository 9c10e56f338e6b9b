"""How much memory a model needs on a device, counted on the meta device: every tensor has a shape, none has content.

Counted are parameters, gradients, optimiser states, what the backward pass keeps, cached keys and values, and what is
recorded; not what kernels and the allocator take for themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from policies.openvla.action_policy import prepare_training, trained_vision
from policies.openvla.config import OpenVLAConfig
from policies.openvla.llama import Decoder
from policies.openvla.model import Context, OpenVLA, Prismatic
from policies.openvla.settings import OpenVLASettings
from policies.sampling import Sampling
from policies.value_head import ValueHead


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device.

    Attributes:
        parameters: of the network and the value head.
        gradients, optimiser: of what is trained; Adam keeps two numbers for each.
        activations: what one backward pass needs.
        keys_values: of one batch of inference, at its end.
        recorded: of one observation, from which is learned: pictures or their features, and a prompt. Not on the
            device.
        flops: not bytes, but floating point operations of one forward pass on one sample; attention left out.
        learning_flops: those of a forward and a backward pass.
    """

    parameters: int
    gradients: int
    optimiser: int
    activations: int
    keys_values: int
    recorded: int
    flops: int
    learning_flops: int

    @property
    def learning(self) -> int:
        """Of an actor."""
        return self.parameters + self.gradients + self.optimiser + self.activations

    @property
    def inference(self) -> int:
        """Of a rollout."""
        return self.parameters + self.keys_values


def estimate_memory(
    config: OpenVLAConfig,
    settings: OpenVLASettings,
    batch: int,
    micro_batch: int,
    prompt_length: int = 32,
    action_size: int = 7,
) -> MemoryEstimate:
    """What a policy would need.

    Args:
        config: of the checkpoint.
        settings: of the policy.
        batch: envs in one call of `act`.
        micro_batch: samples in one forward and backward pass.
        prompt_length: tokens of a prompt.
        action_size: tokens of an action.
    """
    with torch.device("meta"):
        network = OpenVLA(config, settings.attention).to(settings.torch_dtype or config.dtype)
        critic = ValueHead(config.text.hidden_size, settings.value_hidden, settings.value_position)

    def states(ids: Tensor, features: Tensor) -> Context:
        context = network.read_features(ids, ids.bool(), features)
        extended = network.extend(context, ids.new_ones(len(ids), action_size - 1))
        return replace(extended, hidden=torch.cat([context.hidden[:, -1:], extended.hidden], dim=1))

    shown = (3 * len(config.timm_ids), config.image_size, config.image_size)
    length = network.vision_backbone.num_patches + prompt_length
    return estimate(network, critic, settings, shown, states, batch, micro_batch, prompt_length, length)


def estimate(
    network: Prismatic,
    critic: ValueHead,
    settings: OpenVLASettings,
    shown: tuple[int, ...],
    states: Callable[[Tensor, Tensor], Context],
    batch: int,
    micro_batch: int,
    prompt_length: int,
    length: int,
) -> MemoryEstimate:
    """What a network and a critic on the meta device would need.

    Args:
        network, critic: on the meta device, nothing frozen yet.
        settings: of the policy.
        shown: shape of the normalised pixels of one sample.
        states: ids [N, L] and features -> the hidden states that predict all tokens of an action, and what is cached.
        batch, micro_batch, prompt_length: see `estimate_memory`.
        length: tokens in the longest pass through the language model.
    """
    config, dtype = network.config, network.language_model.model.norm.weight.dtype
    with torch.device("meta"):
        prepare_training(network, settings)

        def inputs(samples: int) -> tuple[Tensor, Tensor]:
            ids = torch.ones(samples, prompt_length, dtype=torch.long)
            return ids, network.features(ids, ids.bool(), torch.ones(samples, *shown, dtype=dtype))

        def loss() -> None:
            hidden = states(*inputs(micro_batch)).hidden
            logits = network.language_model.logits(hidden, slice(0, config.num_bins))
            log_p = Sampling().log_probabilities(logits)
            (log_p.exp() * log_p).sum() + critic(hidden).sum()

        def one_layer() -> None:
            x = torch.ones(micro_batch, length, config.text.hidden_size, dtype=dtype)
            decoder = Decoder(replace(config.text, num_hidden_layers=1), settings.attention).to(dtype)
            mask = torch.ones(micro_batch, 1, length, length, dtype=torch.bool)
            decoder(x, torch.zeros(micro_batch, length, dtype=torch.long), mask)

        parameters = [*network.parameters(), *critic.parameters()]
        activations = _kept_bytes(loss, parameters)
        if settings.gradient_checkpointing:  # one layer at a time is there in full
            activations += _kept_bytes(one_layer, [])
        with torch.no_grad(), _FusedAttention():
            keys_values = [x for pair in states(*inputs(batch)).keys_values for x in pair]
            with FlopCounterMode(display=False) as seeing:
                ids, features = inputs(1)
            with FlopCounterMode(display=False) as reading:
                states(ids, features)
    pictures = math.prod(shown) // len(config.timm_ids)  # uint8, and not one copy for each tower
    backward = (1 if settings.lora or settings.adapter else 2) + settings.gradient_checkpointing
    sees, reads = seeing.get_total_flops(), reading.get_total_flops()
    sees_again = 0 if settings.reuse_features else sees * (1 + backward * bool(trained_vision(network)))
    trained = sum(p.nbytes for p in parameters if p.requires_grad)
    return MemoryEstimate(
        parameters=sum(p.nbytes for p in parameters),
        gradients=trained,
        optimiser=2 * trained,
        activations=activations,
        keys_values=sum(x.nbytes for x in keys_values),
        recorded=ids.nbytes + (features.nbytes if settings.reuse_features else pictures),
        flops=sees + reads,
        learning_flops=sees_again + reads * (1 + backward),
    )


def _kept_bytes(run: Callable[[], None], parameters: list[nn.Parameter]) -> int:
    """Bytes that autograd keeps of a computation, parameters aside."""
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with _FusedAttention(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run()
    for parameter in parameters:
        kept.pop(parameter.untyped_storage()._cdata, None)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


class _FusedAttention(TorchFunctionMode):
    """On the meta device attention falls back to a kernel that keeps all its weights; devices have better ones."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return _AttentionShape.apply(*args[:3])
        return func(*args, **(kwargs or {}))


class _AttentionShape(torch.autograd.Function):
    """The memory of a fused attention: inputs, result, and one number for each row of weights."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, result, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return result
