"""The policy contract on OpenVLA-OFT: chunks, batches, log-probs, values, regression, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from openvla_golden import rows, tensors
from openvla_oft_golden import LIBERO, full_observation, golden, golden_oft, regression

import policies
from policies import Policy, PolicySettings, SlotNoise, openvla_oft

TEMPERATURES = pytest.mark.parametrize("temperature", [0.6, 1.0, 1.6])
LAYOUTS = pytest.mark.parametrize("layout", ["official", "simplevla", "rlinf"])
EVERYTHING = {"more_views": (1,), "proprioception": True, "film": True}


def settings(action_size: int = 7, chunk: int = 8, state_size: int | None = 5, **options: Any) -> PolicySettings:
    options = {"checkpoint": "openvla-oft-tiny", **options}
    low, high = (-1.0,) * action_size, (1.0,) * action_size
    return PolicySettings("openvla_oft", state_size, low, high, options.pop("num_choices", None), chunk, options)


def recorded(views: int) -> dict[str, Any]:
    """The stored main and wrist image, the state, and an instruction that has to be lower-cased."""
    images = [tensors("tf_image.npz")[f"jpeg_lanczos_crop_{size}"] for size in ("256x256", "128x96")[:views]]
    state = tensors("e2e.safetensors")["proprio_raw"][None]
    return {"image": torch.stack(images)[None], "instruction": ["Pick up the BLACK bowl"], "state": state}


def test_from_an_image_to_a_chunk_of_actions_by_tokens() -> None:
    output = golden_oft().act(recorded(1), True, None)
    expected = tensors("e2e.safetensors")[f"oft_bidir.discrete.actions.{LIBERO}"]
    assert (output.action.shape, output.action.dtype) == ((1, 8, 7), torch.float32)
    assert torch.equal(output.action[0], expected.float())


def test_from_two_images_and_a_state_to_a_chunk_of_actions_by_regression() -> None:
    output = regression().act(recorded(2), True, None)
    expected = tensors("e2e.safetensors")[f"oft_bidir.l1.actions.{LIBERO}"]
    torch.testing.assert_close(output.action[0].double(), expected, rtol=0, atol=1e-6)
    assert output.token.shape == output.logprob.shape == (1, 8, 7)
    torch.testing.assert_close(regression()._command(output.token), output.action)
    assert not output.logprob.any()


def test_states_are_normalised_by_the_statistics_of_their_data_set() -> None:
    raw, expected = golden("proprio_raw"), golden("proprio_normalized")
    torch.testing.assert_close(regression()._state(raw).double(), expected, rtol=0, atol=1e-6)
    far = torch.full((1, 8), 100.0)
    assert torch.equal(regression()._state(far), torch.ones(1, 8))


def test_statistics_can_be_the_extremes() -> None:
    policy = golden_oft(bounds="extremes")
    stored = policy.config.norm_stats[LIBERO]["action"]
    assert policy.statistics.low.tolist() == stored["min"]
    assert policy.statistics.high.tolist() == stored["max"]


@pytest.mark.parametrize(("value_of", "shape"), [("chunk", (8,)), ("action", (8, 8))])
def test_shapes_and_types(value_of: str, shape: tuple[int, ...]) -> None:
    policy, seen = golden_oft(value_of=value_of), full_observation()
    output = policy.act(seen, False, SlotNoise(0, range(8)))
    assert output.action.shape == output.token.shape == output.logprob.shape == (8, 8, 7)
    assert (output.token.dtype, output.logprob.dtype) == (torch.int64, torch.float32)
    assert output.value.shape == policy.value(seen).shape == shape
    torch.testing.assert_close(output.value, policy.value(seen), rtol=0, atol=1e-6)
    assert output.token.min() >= 31744
    assert output.token.max() < 32000
    assert not output.logprob.requires_grad


@pytest.mark.parametrize(("chunk", "size"), [(1, 2), (5, 7), (25, 3)])
def test_chunks_and_actions_of_other_sizes(chunk: int, size: int) -> None:
    policy, seen = policies.make(settings(size, chunk), seed=0), full_observation(2)
    output = policy.act(seen, False, SlotNoise(0, range(2)))
    assert output.action.shape == (2, chunk, size)
    logprob, entropy, value = policy.evaluate(seen, output.token)
    assert logprob.shape == entropy.shape == (2, chunk, size)
    assert value.shape == (2,)


@LAYOUTS
@pytest.mark.parametrize("options", [{}, EVERYTHING])
def test_a_batch_of_unequal_prompts_is_eight_single_runs(layout: str, options: dict[str, Any]) -> None:
    policy, seen = golden_oft(layout=layout, **options), full_observation()
    assert (policy.prepare(seen)["prompt"] == 32000).any()
    together = policy.act(seen, False, SlotNoise(0, range(8)))
    for env in range(8):
        alone = policy.act(rows(seen, slice(env, env + 1)), False, SlotNoise(0, [env]))
        assert torch.equal(alone.token[0], together.token[env])
        assert torch.equal(alone.action[0], together.action[env])
        torch.testing.assert_close(alone.logprob[0], together.logprob[env], rtol=0, atol=5e-5)
        torch.testing.assert_close(alone.value[0], together.value[env], rtol=0, atol=5e-5)


def test_a_batch_of_regressions_is_eight_single_runs() -> None:
    policy, seen = regression(film=True), full_observation()
    together = policy.act(seen, True, None)
    for env in range(8):
        alone = policy.act(rows(seen, slice(env, env + 1)), True, None)
        torch.testing.assert_close(alone.action[0], together.action[env], rtol=0, atol=5e-5)


@TEMPERATURES
@LAYOUTS
def test_log_probs_of_generation_are_those_of_evaluation(temperature: float, layout: str) -> None:
    policy, seen = golden_oft(temperature=temperature, layout=layout), full_observation()
    with torch.no_grad():
        tokens, logits = policy.generate(policy._read(seen), False, SlotNoise(0, range(8)))
    chosen = (logits / temperature).log_softmax(-1).gather(-1, tokens[..., None] - policy.tokens.ids.start)[..., 0]
    logprob, entropy, _ = policy.evaluate(seen, tokens.unflatten(1, (8, 7)))
    torch.testing.assert_close(logprob.flatten(1), chosen, rtol=0, atol=1e-5)
    expected = torch.distributions.Categorical(logits=logits / temperature).entropy()
    torch.testing.assert_close(entropy.flatten(1), expected, rtol=0, atol=1e-5)


@TEMPERATURES
@LAYOUTS
@pytest.mark.parametrize("options", [{}, EVERYTHING | {"gradient_checkpointing": True}, {"dtype": "bfloat16"}])
def test_the_ratio_is_exactly_one_before_the_first_update(
    temperature: float, layout: str, options: dict[str, Any]
) -> None:
    policy, seen = golden_oft(temperature=temperature, layout=layout, **options), full_observation()
    policy.train()
    output = policy.act(seen, False, SlotNoise(0, range(8)))
    logprob, _, value = policy.evaluate(policy.prepare(seen), output.token)
    policy.eval()
    assert logprob.requires_grad
    assert torch.equal((logprob - output.logprob).exp(), torch.ones(8, 8, 7))
    assert torch.equal(value, output.value)


def test_random_numbers_belong_to_the_env_slot() -> None:
    policy, seen = golden_oft(), full_observation()
    output = policy.act(seen, False, SlotNoise(0, range(8)))
    order = [5, 2, 7]
    some = {"image": seen["image"][order], "instruction": [seen["instruction"][i] for i in order]}
    assert torch.equal(policy.act(some, False, SlotNoise(0, order)).token, output.token[order])
    assert not torch.equal(policy.act(seen, False, SlotNoise(1, range(8))).token, output.token)


def test_cameras_are_shown_in_their_order() -> None:
    seen = full_observation(2)
    swapped = {**seen, "image": seen["image"].flip(1)}
    expected = golden_oft(more_views=(1,)).act(seen, True, None)
    assert torch.equal(golden_oft(view=1, more_views=(0,)).act(swapped, True, None).token, expected.token)
    assert not torch.equal(golden_oft(more_views=(1,)).act(swapped, True, None).logprob, expected.logprob)


def test_compiled_layers_agree_and_take_prompts_of_one_length() -> None:
    plain, compiled = golden_oft(), golden_oft.__wrapped__(compile="aot_eager", prompt_length=40)
    seen = full_observation(2)
    expected, output = (policy.act(seen, True, None) for policy in (plain, compiled))
    assert compiled._prompt(compiled.prepare(seen))[0].shape == (2, 40)
    assert torch.equal(output.token, expected.token)
    torch.testing.assert_close(output.logprob, expected.logprob, rtol=0, atol=5e-5)


@pytest.mark.parametrize("position", ["first", "last", "mean"])
def test_no_sampled_token_has_a_part_in_the_value(position: str) -> None:
    policy, seen = golden_oft(value_position=position), full_observation()
    first, second = (policy.act(seen, False, SlotNoise(seed, range(8))) for seed in range(2))
    assert torch.equal(first.value, second.value)


def test_prepared_observations_can_be_stored_and_used_instead() -> None:
    policy, seen = golden_oft(**EVERYTHING, prompt_length=64), full_observation(3)
    prepared = policy.prepare(seen)
    assert {key: (value.dtype, tuple(value.shape)) for key, value in prepared.items()} == {
        "pixels": (torch.uint8, (3, 2, 3, 56, 56)),
        "prompt": (torch.int64, (3, 64)),
        "state": (torch.float32, (3, 8)),
    }
    raw, output = (policy.act(x, False, SlotNoise(0, range(3))) for x in (seen, prepared))
    assert torch.equal(raw.token, output.token)
    assert torch.equal(raw.logprob, output.logprob)


def test_features_take_the_place_of_pictures() -> None:
    """Of two cameras, scaled and shifted by the instruction, whose words no adapter changes."""
    policy, seen = golden_oft.__wrapped__(**EVERYTHING, lora={"rank": 2}, reuse_features=True), full_observation()
    encoded = policy.encode(policy.prepare(seen))
    assert encoded.keys() == {"prompt", "state", "features"} and encoded["features"].shape == (8, 2 * 16, 80)
    from_picture, from_features = (policy.act(x, False, SlotNoise(0, range(8))) for x in (seen, encoded))
    for name, expected in vars(from_picture).items():
        assert torch.equal(getattr(from_features, name), expected), name
    with pytest.raises(ValueError, match="reuse_features keeps .*language_model.model.embed_tokens.* is trained"):
        openvla_oft.load("openvla-oft-tiny", film=True, frozen=("vision_backbone",), reuse_features=True)


def test_demonstrated_actions_become_tokens_that_decode_to_them() -> None:
    policy, seen = golden_oft(gripper="libero"), full_observation(2)
    output = policy.act(seen, False, SlotNoise(0, range(2)))
    tokens = policy.tokenise(output.action)
    assert torch.equal(tokens[..., :-1], output.token[..., :-1].clamp(min=31745))  # the lowest two ids mean the same
    with torch.no_grad():
        assert policy.evaluate(seen, tokens)[0].isfinite().all()


def test_all_that_is_trained_gets_a_gradient_and_the_rest_none() -> None:
    policy, seen = openvla_oft.load("openvla-oft-tiny", **EVERYTHING, frozen=("projector",)), full_observation(2)
    logprob, entropy, value = policy.evaluate(seen, policy.act(seen, True, None).token)
    (logprob.sum() + entropy.sum() + value.sum()).backward()
    for name, parameter in policy.named_parameters():
        unused = any(part in name for part in ("featurizer.blocks.2", "featurizer.norm", "attn_pool"))
        assert parameter.requires_grad == (not unused and ".projector" not in name), name
        assert (parameter.grad is not None) == parameter.requires_grad, name


def test_an_action_is_learned_by_policy_gradients() -> None:
    """Each action of the chunk is rewarded for its nearness to 0.5 where the image is bright, to -0.5 where dark."""
    torch.manual_seed(0)
    policy, noise = openvla_oft.load("openvla-oft-tiny", chunk=2, value_of="action"), SlotNoise(0, range(32))
    optimizer, generator = torch.optim.Adam(policy.parameters(), lr=3e-3), torch.Generator().manual_seed(0)
    rewards = []
    for _ in range(40):
        bright = torch.randint(2, (32,), generator=generator)
        image = (200 * bright).to(torch.uint8)[:, None, None, None, None].expand(-1, 1, 56, 56, 3)
        seen = policy.prepare({"image": image, "instruction": ["push the cube"] * 32})
        output = policy.act(seen, False, noise)
        reward = -(output.action[..., 0] - (bright - 0.5)[:, None]).abs()
        advantage = (reward - reward.mean()) / reward.std()
        loss = -(policy.evaluate(seen, output.token)[0][..., 0] * advantage).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        rewards.append(float(reward.mean()))
    assert sum(rewards[:5]) / 5 < -0.5
    assert sum(rewards[-5:]) / 5 > -0.25


def test_adapters_reach_what_is_oft_s_own() -> None:
    lora = {"rank": 2, "targets": ("q_proj", "proprio_projector.fc1", "scale")}
    policy = openvla_oft.load("openvla-oft-tiny", **EVERYTHING, lora=lora)
    assert "proprio_projector.fc1" in policy.adapted
    assert sum(name.endswith(".scale") for name in policy.adapted) == 2 + 2  # the last block is not computed
    assert policy.adapted == openvla_oft.adapted_modules(policy.config, policy.settings)


# ---------------------------------------------------------------------------------------------- through the registry


def test_the_registry_builds_it_from_a_seed() -> None:
    first, same, other = (policies.make(settings(4, proprioception=True), seed=seed) for seed in (0, 0, 1))
    seen = {**full_observation(2), "state": torch.rand(2, 5)}
    outputs = [policy.act(seen, True, None) for policy in (first, same, other)]
    assert outputs[0].action.shape == (2, 8, 4)
    assert torch.equal(outputs[0].value, outputs[1].value)
    assert not torch.equal(outputs[0].value, outputs[2].value)
    assert isinstance(first, Policy)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (settings(num_choices=2), "decides on continuous actions"),
        (settings(unnorm_key="bridge"), "no action statistics of 'bridge' in the checkpoint; known: openvla-oft-tiny"),
        (settings(state_size=None, proprioception=True), "reads `state`, which this env does not provide"),
        (settings(layout="rl"), "layout is 'rl'; expected one of 'official', 'simplevla', 'rlinf'"),
        (settings(head="diffusion"), "head is 'diffusion'; expected one of 'tokens', 'l1'"),
        (settings(value_of="token"), "value_of is 'token'; expected one of 'chunk', 'action'"),
        (settings(bounds="q99"), "bounds is 'q99'; expected one of 'quantiles', 'extremes'"),
        (settings(chunk=0), "chunk is 0; expected a whole number, at least 1"),
        (settings(views=(0, 1)), r"unknown options \['views'\] of OpenVLAOFTSettings; known: unnorm_key"),
    ],
)
def test_options_and_envs_that_do_not_fit_are_refused(wrong: PolicySettings, message: str) -> None:
    with pytest.raises((ValueError, KeyError), match=message):
        policies.make(wrong, seed=0)


# ---------------------------------------------------------------------------------------------- bad observations


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"image": torch.zeros(2, 2, 8, 8, 3)}, TypeError, "`image` is torch.float32; expected torch.uint8"),
        ({"image": np.zeros((2, 8, 8, 3), np.uint8)}, ValueError, r"`image` is \[2, 8, 8, 3\]; expected \[N"),
        ({"image": np.zeros((2, 1, 8, 8, 3), np.uint8)}, ValueError, "expected .N, more than 1 views, H, W, 3"),
        ({"instruction": ["push"]}, ValueError, "1 instructions for 2 images"),
        ({"instruction": "push"}, ValueError, "one string for 2 images"),
        ({"state": torch.zeros(2, 7)}, ValueError, r"`state` is \[2, 7\]; expected \[N, 8\]"),
        ({"state": torch.zeros(3, 8)}, ValueError, r"`state` is \[3, 8\] of torch.float32; expected \[2, S\]"),
        ({"state": torch.zeros(2, 8).long()}, ValueError, "torch.int64; expected .* of floating point numbers"),
    ],
)
def test_an_observation_of_the_wrong_kind_is_refused(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        regression().act({**full_observation(2), **change}, True, None)


def test_what_an_observation_lacks_is_named() -> None:
    seen = full_observation(2)
    del seen["state"]
    assert golden_oft().act(seen, True, None).action.shape == (2, 8, 7)
    with pytest.raises(KeyError, match="OpenVLA reads `state`; the observation has image, instruction"):
        regression().act(seen, True, None)


def test_tokens_that_are_no_action_are_refused() -> None:
    policy, seen = golden_oft(), full_observation(2)
    token = policy.act(seen, True, None).token
    for wrong in (token[..., :6], token[:, :7], token[:, 0], token - 31744):
        with pytest.raises(ValueError, match=r"expected action ids of the shape \[N, 8, 7\]"):
            policy.evaluate(seen, wrong)


def test_sampling_needs_a_generator_and_a_distribution() -> None:
    seen = full_observation(2)
    with pytest.raises(ValueError, match="sampling needs a generator"):
        golden_oft().act(seen, False, None)
    with pytest.raises(ValueError, match="the generator has 1 slots for 2 envs"):
        golden_oft().act(seen, False, SlotNoise(0, range(1)))
    with pytest.raises(ValueError, match="the l1 head has no distribution to sample from"):
        regression().act(seen, False, SlotNoise(0, range(2)))
    with pytest.raises(ValueError, match="the l1 head has no action tokens"):
        regression().evaluate(seen, torch.zeros(2, 8, 7))
    with pytest.raises(ValueError, match="the l1 head has no action tokens"):
        regression().tokenise(torch.zeros(2, 8, 7))
