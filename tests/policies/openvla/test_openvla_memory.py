"""Memory that is estimated on the meta device against memory that a real model holds."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import torch
from openvla_golden import DATA, golden_policy, observation

from policies import openvla
from policies.lora import LoRASettings
from policies.openvla.config import OpenVLAConfig
from policies.openvla.memory import MemoryEstimate, estimate_memory
from policies.openvla.settings import OpenVLASettings

REAL = OpenVLAConfig.from_dict(json.loads((DATA / "real_openvla7b_config_expected.json").read_text()))

HEAD = 4 * (4096 * 512 + 512 + 512 * 128 + 128 + 128)


@functools.cache
def estimate(micro_batch: int = 1, **options: Any) -> MemoryEstimate:
    """Of the published model with 4 of its 32 layers."""
    text = dataclasses.replace(REAL.text, num_hidden_layers=4)
    config = dataclasses.replace(REAL, text=text)
    return estimate_memory(config, OpenVLASettings(**options), batch=3, micro_batch=micro_batch)


def test_the_published_model() -> None:
    """15.08 GB of weights; 294 tokens of two 4,096-wide bfloat16 vectors in each of 32 layers."""
    full = estimate_memory(REAL, OpenVLASettings(), batch=3, micro_batch=1)
    assert full.parameters == 15_082_474_368 + HEAD
    assert full.keys_values == 3 * 32 * 2 * 294 * 4096 * 2
    assert full.optimiser == 2 * full.gradients
    assert full.inference == full.parameters + full.keys_values
    assert full.learning == full.parameters + full.gradients + full.optimiser + full.activations


def test_adapters_and_checkpointing_save_what_they_are_for() -> None:
    full, recomputed = estimate(micro_batch=4), estimate(micro_batch=4, gradient_checkpointing=True)
    adapted = estimate(micro_batch=4, lora=LoRASettings(rank=32), gradient_checkpointing=True)
    assert recomputed.activations < full.activations / 3
    assert recomputed.gradients == full.gradients
    rank_32 = 4 * 32 * (4 * (4096 + 4096) + 3 * (4096 + 11008))
    assert adapted.gradients == 4 * rank_32 + HEAD
    assert adapted.parameters == full.parameters + 4 * rank_32


def test_features_are_recorded_in_place_of_pictures_and_not_computed_again() -> None:
    """A picture of 56 x 56 becomes 16 patches of 64 and 48 numbers; beside it is a prompt of 20 ids of 8 bytes."""
    config, prompt = openvla.read_config("openvla-tiny"), 20 * 8
    pictures, features = (
        estimate_memory(config, OpenVLASettings(frozen=("vision_backbone",), reuse_features=reused), 1, 1, 20)
        for reused in (False, True)
    )
    assert (pictures.recorded, features.recorded) == (3 * 56 * 56 + prompt, 16 * (64 + 48) * 4 + prompt)
    vision = 2 * 2 * 12 * (21 * 64**2 + 16 * 48**2) + 2 * 16 * 3 * 14**2 * (64 + 48)
    assert pictures.learning_flops - features.learning_flops == vision, "2 of 3 blocks of each tower, and the patches"
    assert pictures.flops == features.flops == features.learning_flops / 3 + vision, "the rest is learned from"
    whole = estimate_memory(config, OpenVLASettings(), 1, 1, 20)
    assert whole.learning_flops == 3 * whole.flops


def test_activations_grow_with_the_micro_batch() -> None:
    one, four = estimate(), estimate(micro_batch=4)
    assert 3.9 < four.activations / one.activations < 4.1


def test_the_estimate_is_what_a_real_backward_pass_keeps() -> None:
    policy = openvla.load("openvla-tiny")
    seen = observation(4)
    prompt = policy.prepare(seen)["prompt"]
    token = policy.act(seen, True, None).token
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = policy.evaluate(seen, token)
    for parameter in policy.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    measured = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    estimated = estimate_memory(policy.config, policy.settings, 4, 4, prompt_length=prompt.shape[1])
    assert outputs[0].requires_grad
    assert abs(estimated.activations / measured - 1) < 0.1
    assert estimated.parameters == sum(parameter.nbytes for parameter in policy.parameters())
    context = policy._read(seen)
    values = sum(x.nbytes for pair in policy.network.extend(context, token[:, 0, :-1]).keys_values for x in pair)
    assert estimated.keys_values == values


def test_the_golden_model_can_be_estimated_too() -> None:
    policy = golden_policy()
    estimated = estimate_memory(policy.config, policy.settings, 1, 1)
    assert estimated.parameters == sum(parameter.nbytes for parameter in policy.parameters())
