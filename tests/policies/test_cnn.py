"""The convolutional policy: what it takes, that it sees, and that sampling and evaluation agree."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from policies import PolicySettings, SlotNoise, make

N, C, A = 5, 2, 3
OPTIONS = {"hidden": (16,), "log_std": -1.0, "normalise_observations": True, "observation_clip": 8.0}


def settings(state_size: int | None = None) -> PolicySettings:
    return PolicySettings("cnn", state_size, (-1.0,) * A, (1.0,) * A, None, C, OPTIONS)


def observation(size: int, views: int = 1, state: int = 0) -> dict:
    g = torch.Generator().manual_seed(size)
    seen = {"image": torch.randint(0, 256, (N, views, size, size, 3), generator=g, dtype=torch.uint8)}
    return seen | ({"state": torch.randn(N, state, generator=g)} if state else {})


@pytest.mark.parametrize(("size", "views", "state"), [(32, 1, 0), (64, 2, 4), (128, 1, 7)])
def test_what_was_sampled_is_evaluated_alike(size: int, views: int, state: int) -> None:
    policy, seen = make(settings(state or None), seed=0), observation(size, views, state)
    output = policy.act(seen, False, SlotNoise(0, np.arange(N), np.zeros(N, np.int64)))
    assert output.action.shape == (N, C, A) and output.value.shape == (N,)
    logprob, entropy, value = policy.evaluate(seen, output.token)
    torch.testing.assert_close(logprob, output.logprob)
    torch.testing.assert_close(value, output.value)
    torch.testing.assert_close(policy.value(seen), output.value)
    assert entropy.shape == (N, C, A)


def test_it_looks_at_the_image_and_learns_its_encoder() -> None:
    policy, seen = make(settings(), seed=0), observation(64)
    other = {"image": seen["image"].flip(2)}
    assert not torch.equal(policy.value(seen), policy.value(other))
    policy.value(seen).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in policy.encoder.parameters() if p.ndim > 1)


def test_an_image_of_another_layout_is_refused() -> None:
    policy = make(settings(), seed=0)
    with pytest.raises(ValueError, match=r"images \[N, V, H, W, 3\], not \[5, 3, 32, 32\]"):
        policy.value({"image": torch.zeros(N, 3, 32, 32)})
