"""OpenVLA on a GPU: images resized there, half precision, and a backward pass. Run by scripts/gpu_check.sh."""

from __future__ import annotations

import pytest
import torch
from openvla_golden import TINY, golden_policy, observation, tensors

from policies import SlotNoise, openvla
from policies.openvla import images

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("strategy", ["resize-naive", "letterbox", "resize-crop"])
def test_images_are_resized_on_the_device_as_on_the_cpu(strategy: images.ResizeStrategy) -> None:
    image = tensors("preprocess.npz")["raw_480x640"].permute(2, 0, 1)[None]
    resized = images.resize(image.cuda(), 224, strategy, [127] * 3)
    assert resized.is_cuda
    assert torch.equal(resized.cpu(), images.resize(image, 224, strategy, [127] * 3))


def test_float32_agrees_with_the_cpu() -> None:
    policy, seen = golden_policy(), observation()
    device = openvla.load(TINY, unnorm_key="libero_golden_no_noops").cuda()
    token = policy.act(seen, True, None).token
    expected, output = policy.evaluate(seen, token), device.evaluate(seen, token.cuda())
    for cpu, gpu in zip(expected, (output[0], output[1]), strict=False):
        torch.testing.assert_close(gpu.cpu(), cpu, rtol=0, atol=2e-3)


def test_half_precision_acts_and_learns() -> None:
    policy = openvla.load(
        "openvla-tiny", dtype="bfloat16", lora={"rank": 4}, gradient_checkpointing=True, prompt_length=48
    ).cuda()
    seen = observation()
    output = policy.act({**seen, "image": seen["image"].cuda()}, False, SlotNoise(0, range(8)))
    assert output.action.is_cuda
    logprob, _, value = policy.evaluate(seen, output.token)
    torch.testing.assert_close(logprob, output.logprob, rtol=0, atol=1e-2)
    (logprob.sum() + value.sum()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in policy.parameters() if p.requires_grad)
