"""The policy contract on the MLP: what is stored while sampling is what learning computes again."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import policies
from policies import Policy, PolicySettings, SlotNoise

OPTIONS = {"hidden": (16, 16), "log_std": -0.5, "normalise_observations": True, "observation_clip": 8.0}


def make(choices: int | None = None, chunk: int = 1, state_size: int | None = 5, **changes: Any) -> Policy:
    low, high = ((0.0,), (float((choices or 1) - 1),)) if choices else ((-1.0, -2.0, 0.0), (1.0, 2.0, 4.0))
    settings = PolicySettings("mlp", state_size, low, high, choices, chunk, {**OPTIONS, **changes})
    return policies.make(settings, seed=0)


def states(count: int = 6) -> dict[str, torch.Tensor]:
    return {"state": torch.randn(count, 5, generator=torch.Generator().manual_seed(1)) * 3 + 1}


@pytest.mark.parametrize("choices", [None, 4])
@pytest.mark.parametrize("chunk", [1, 3])
def test_evaluating_what_was_sampled_gives_the_stored_logprob_and_value(choices: int | None, chunk: int) -> None:
    policy, observation = make(choices, chunk), states()
    policy.observe(observation, torch.ones(6, dtype=torch.bool))
    output = policy.act(observation, False, SlotNoise(0, range(6)))
    logprob, entropy, value = policy.evaluate(observation, output.token)
    assert output.logprob.shape == logprob.shape == entropy.shape == (6, chunk, 1 if choices else 3)
    torch.testing.assert_close(logprob, output.logprob, rtol=0, atol=0)
    torch.testing.assert_close(value, output.value, rtol=0, atol=0)


def test_continuous_actions_are_clipped_and_scaled_to_the_bounds_of_the_env() -> None:
    policy = make(log_std=1.5)
    action = policy.act(states(200), False, SlotNoise(0, range(200))).action[:, 0]
    assert action.min(0).values.tolist() == [-1.0, -2.0, 0.0]
    assert action.max(0).values.tolist() == [1.0, 2.0, 4.0]


def test_gaussian_logprob_and_entropy_are_those_of_torch_distributions() -> None:
    policy, observation = make(), states()
    output = policy.act(observation, False, SlotNoise(0, range(6)))
    mean = policy.act(observation, True, None).token
    expected = torch.distributions.Normal(mean, math.exp(-0.5))
    torch.testing.assert_close(output.logprob, expected.log_prob(output.token))
    torch.testing.assert_close(policy.evaluate(observation, output.token)[1], expected.entropy())


def test_categorical_logprob_and_entropy_are_those_of_torch_distributions() -> None:
    policy, observation = make(4, chunk=2), states()
    token = torch.randint(4, (6, 2, 1), generator=torch.Generator().manual_seed(0)).float()
    logits = policy.actor(policy._features(observation)).view(6, 2, 4)
    expected = torch.distributions.Categorical(logits=logits)
    logprob, entropy, _ = policy.evaluate(observation, token)
    torch.testing.assert_close(logprob, expected.log_prob(token.squeeze(-1).long())[..., None])
    torch.testing.assert_close(entropy, expected.entropy()[..., None])


def test_discrete_choices_follow_their_probabilities() -> None:
    policy = make(3, hidden=(), normalise_observations=False)
    with torch.no_grad():
        policy.actor[0].weight.zero_()
        policy.actor[0].bias.copy_(torch.log(torch.tensor([0.1, 0.3, 0.6])))
    token = policy.act({"state": torch.zeros(20_000, 5)}, False, SlotNoise(0, range(20_000))).token
    frequencies = torch.bincount(token.long().flatten(), minlength=3) / 20_000
    torch.testing.assert_close(frequencies, torch.tensor([0.1, 0.3, 0.6]), atol=0.01, rtol=0)


def test_deterministic_actions_are_the_mean_and_need_no_generator() -> None:
    policy, observation = make(), states()
    first, second = policy.act(observation, True, None), policy.act(observation, True, None)
    torch.testing.assert_close(first.token, second.token, rtol=0, atol=0)


def test_sampling_without_a_generator_is_refused() -> None:
    with pytest.raises(ValueError, match="generator"):
        make().act(states(), False, None)


def test_running_statistics_equal_those_of_all_valid_observations_together() -> None:
    policy = make()
    seen = torch.randn(4, 7, 5, dtype=torch.float64).float() * 2 + 3
    valid = torch.rand(4, 7) < 0.7
    seen[~valid] = float("nan")
    for step in range(4):
        policy.observe({"state": seen[step]}, valid[step])
    kept = seen[valid].double()
    torch.testing.assert_close(policy.statistics.mean, kept.mean(0))
    torch.testing.assert_close(policy.statistics.var, kept.var(0, unbiased=False))
    assert policy.statistics.count == valid.sum()


def test_observations_are_normalised_and_clipped() -> None:
    policy = make(observation_clip=2.0)
    policy.observe({"state": torch.randn(1000, 5) * 10}, torch.ones(1000, dtype=torch.bool))
    features = policy._features({"state": torch.full((1, 5), 1e6)})
    assert features.tolist() == [[2.0] * 5]


def test_parameters_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = make().state_dict()
    torch.manual_seed(2)
    second = make().state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_an_env_without_state_is_refused() -> None:
    with pytest.raises(ValueError, match="state"):
        make(state_size=None)
