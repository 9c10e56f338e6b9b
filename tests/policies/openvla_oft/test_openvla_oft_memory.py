"""Memory that is estimated on the meta device against memory that a real model holds."""

from __future__ import annotations

import pytest
import torch
from openvla_oft_golden import full_observation

from policies import openvla_oft
from policies.openvla_oft.memory import estimate_memory


@pytest.mark.parametrize("options", [{}, {"more_views": (1,), "proprioception": True, "film": True}])
def test_the_estimate_is_what_a_real_backward_pass_keeps(options: dict[str, object]) -> None:
    policy, seen = openvla_oft.load("openvla-oft-tiny", chunk=3, value_of="action", **options), full_observation(4)
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
    assert estimated.keys_values == 0
