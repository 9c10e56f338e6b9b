"""The policy contract on OpenVLA: batches, caches, log-probs, values, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from openvla_golden import TINY, golden_policy, observation, rows, tensors

import policies
from policies import Policy, PolicySettings, SlotNoise, openvla
from policies.openvla import images
from policies.openvla.prompts import PromptTokenizer
from policies.sampling import Sampling

TEMPERATURES = pytest.mark.parametrize("temperature", [0.6, 1.0, 1.6])


def settings(action_size: int = 7, chunk: int = 1, num_choices: int | None = None, **options: Any) -> PolicySettings:
    options = {"checkpoint": "openvla-tiny", **options}
    return PolicySettings("openvla", None, (-1.0,) * action_size, (1.0,) * action_size, num_choices, chunk, options)


@pytest.mark.parametrize("dataset", ["libero_golden_no_noops", "bridge_golden"])
def test_from_an_image_to_an_action(dataset: str) -> None:
    policy, golden = golden_policy(unnorm_key=dataset), tensors("e2e.safetensors")
    image = tensors("tf_image.npz")["jpeg_lanczos_crop_256x256"][None, None]
    seen = {"image": image, "instruction": ["Pick up the BLACK bowl"]}
    prepared = policy.prepare(seen)
    assert prepared["prompt"][0, :-1].tolist() == golden["input_ids"][0].tolist()
    assert torch.equal(policy.processor.normalise(prepared["pixels"]), golden["pixel_values_main"])
    output = policy.act(seen, deterministic=True, generator=None)
    expected = golden[f"openvla.actions.{dataset}"]
    assert (output.action.shape, output.action.dtype) == ((1, 1, 7), torch.float32)
    torch.testing.assert_close(output.action[0, 0], expected.float(), rtol=0, atol=0)


def test_the_options_of_actions_and_cameras_are_used() -> None:
    seen = observation(2)
    token = golden_policy().act(seen, True, None).token
    statistics = golden_policy().statistics
    normalised = golden_policy().tokens.decode(token)
    policy = golden_policy(epsilon=0.5, gripper="libero")
    expected = statistics.unnormalise(normalised, epsilon=0.5)
    expected[..., -1] = -torch.sign(2 * normalised[..., -1] - 1)
    assert torch.equal(policy.act(seen, True, None).action, expected.float())
    two_cameras = {**seen, "image": torch.cat([255 - seen["image"], seen["image"]], dim=1)}
    assert torch.equal(golden_policy(view=1).act(two_cameras, True, None).token, token)
    assert torch.equal(
        golden_policy(prompt="openvla-v01").prepare(seen)["prompt"],
        PromptTokenizer(PromptTokenizer.read(TINY), 32000, 32000, style="openvla-v01")(seen["instruction"]),
    )


def test_the_stored_preprocessing_is_used(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(TINY, tmp_path / "tiny"))
    written = json.loads((TINY / "preprocessor_config.json").read_text())
    written |= {"image_resize_strategy": "letterbox", "means": [[0.1] * 3, [0.2] * 3], "stds": [[0.5] * 3, [1.0] * 3]}
    (directory / "preprocessor_config.json").write_text(json.dumps(written))
    processor = openvla.load(directory).processor
    image = observation(1)["image"][:, 0, :, :48].permute(0, 3, 1, 2)
    pixels = processor.resize(image)
    assert torch.equal(pixels, images.resize(image, 56, "letterbox", [51] * 3))
    torch.testing.assert_close(processor.normalise(pixels)[:, 0], (pixels[:, 0] / 255 - 0.1) / 0.5)
    torch.testing.assert_close(processor.normalise(pixels)[:, 3], pixels[:, 0] / 255 - 0.2)
    (directory / "preprocessor_config.json").write_text(json.dumps({**written, "image_resize_strategy": "stretch"}))
    with pytest.raises(ValueError, match="image_resize_strategy is 'stretch'; known: resize-naive"):
        openvla.load(directory)


def test_the_centre_crop_is_taken_before_resizing() -> None:
    raw, data = tensors("tf_image.npz")["jpeg_lanczos_256x256"], tensors("e2e.safetensors")
    policy = golden_policy(center_crop=True)
    prepared = policy.prepare({"image": raw[None, None], "instruction": ["push"]})
    assert torch.equal(policy.processor.normalise(prepared["pixels"]), data["pixel_values_main"])


def test_lanczos_comes_before_the_centre_crop() -> None:
    raw = tensors("preprocess.npz")["raw_256x256"]
    seen = {"image": raw[None, None], "instruction": ["push"]}
    prepared = golden_policy(lanczos=True, center_crop=True).prepare(seen)
    image = images.center_crop(images.lanczos(raw.permute(2, 0, 1)[None]))
    assert torch.equal(prepared["pixels"], images.resize(image, 56, "resize-naive", [127] * 3))


def test_compiled_layers_agree() -> None:
    plain, compiled = golden_policy(), golden_policy.__wrapped__(compile="eager")
    seen = observation(2)
    expected, output = (policy.act(seen, True, None) for policy in (plain, compiled))
    assert torch.equal(output.token, expected.token)
    torch.testing.assert_close(output.logprob, expected.logprob, rtol=0, atol=5e-5)
    assert compiled.state_dict().keys() == plain.state_dict().keys()


def test_shapes_and_types() -> None:
    policy, seen = golden_policy(), observation()
    output = policy.act(seen, False, SlotNoise(0, range(8)))
    assert output.action.shape == output.token.shape == output.logprob.shape == (8, 1, 7)
    assert (output.token.dtype, output.logprob.dtype) == (torch.int64, torch.float32)
    assert output.value.shape == policy.value(seen).shape == (8,)
    assert output.token.min() >= 31744
    assert output.token.max() < 32000
    assert not output.logprob.requires_grad


def test_a_batch_of_unequal_prompts_is_eight_single_runs() -> None:
    policy, seen = golden_policy(), observation()
    assert (policy.prepare(seen)["prompt"] == 32000).any()
    together = policy.act(seen, False, SlotNoise(3, range(8)))
    for env in range(8):
        alone = policy.act(rows(seen, slice(env, env + 1)), False, SlotNoise(3, [env]))
        assert torch.equal(alone.token[0], together.token[env])
        assert torch.equal(alone.action[0], together.action[env])
        torch.testing.assert_close(alone.logprob[0], together.logprob[env], rtol=0, atol=5e-5)
        torch.testing.assert_close(alone.value[0], together.value[env], rtol=0, atol=5e-5)


@torch.no_grad()
def test_cached_generation_equals_reading_everything_again() -> None:
    policy, seen = golden_policy(), observation()
    context = policy._read(seen)
    tokens, logits = policy.generate(context, False, SlotNoise(0, range(8)))
    prepared = policy.prepare(seen)
    pixels = policy.processor.normalise(prepared["pixels"])
    for step in range(7):
        ids = torch.cat([prepared["prompt"], tokens[:, :step]], dim=1)
        again = policy.network.read(ids, ids != 32000, pixels)
        uncached = policy.network.language_model.logits(again.hidden[:, -1], policy.tokens.ids)
        torch.testing.assert_close(uncached, logits[:, step], rtol=0, atol=5e-5)


@TEMPERATURES
@torch.no_grad()
def test_logprobs_of_generation_are_those_of_evaluation(temperature: float) -> None:
    policy, seen = openvla.load("openvla-tiny", temperature=temperature), observation()
    tokens, logits = policy.generate(policy._read(seen), False, SlotNoise(0, range(8)))
    while_generating = (logits / temperature).log_softmax(-1)
    logprob, entropy, _ = policy.evaluate(seen, tokens[:, None])
    chosen = while_generating.gather(-1, tokens[..., None] - policy.tokens.ids.start)[..., 0]
    torch.testing.assert_close(logprob[:, 0], chosen, rtol=0, atol=1e-5)
    expected = torch.distributions.Categorical(logits=logits / temperature).entropy()
    torch.testing.assert_close(entropy[:, 0], expected, rtol=0, atol=1e-5)


@TEMPERATURES
@pytest.mark.parametrize(
    "options", [{}, {"gradient_checkpointing": True}, {"dtype": "bfloat16"}, {"value_position": "mean"}]
)
def test_the_ratio_is_exactly_one_before_the_first_update(temperature: float, options: dict[str, Any]) -> None:
    policy, seen = golden_policy(temperature=temperature, **options), observation()
    policy.train()
    output = policy.act(seen, False, SlotNoise(0, range(8)))
    logprob, _, value = policy.evaluate(policy.prepare(seen), output.token)
    policy.eval()
    assert logprob.requires_grad
    assert torch.equal((logprob - output.logprob).exp(), torch.ones(8, 1, 7))
    assert torch.equal(value, output.value)


@TEMPERATURES
def test_the_golden_model_agrees_with_itself_at_every_temperature(temperature: float) -> None:
    policy, data = golden_policy(temperature=temperature), tensors("openvla_forward.safetensors")
    image = torch.stack([data["image_0"], data["image_1"]])[:, None]
    seen = {"image": image, "instruction": ["pick up the black bowl", "push"]}
    output = policy.act(seen, True, None)
    assert torch.equal(output.token, policy.act(seen, True, SlotNoise(0, range(2))).token)
    assert torch.equal(output.logprob, policy.evaluate(seen, output.token)[0])


def test_random_numbers_belong_to_the_env_slot() -> None:
    policy, seen = golden_policy(), observation()
    output = policy.act(seen, False, SlotNoise(0, range(8)))
    order = [5, 2, 7]
    some = {"image": seen["image"][order], "instruction": [seen["instruction"][i] for i in order]}
    assert torch.equal(policy.act(some, False, SlotNoise(0, order)).token, output.token[order])
    noise = SlotNoise(0, range(8))
    first, second = (policy.act(seen, False, noise).token for _ in range(2))
    assert torch.equal(first, output.token)
    assert not torch.equal(first, second)


def test_top_k_of_one_is_greedy() -> None:
    policy, seen = golden_policy(top_k=1), observation()
    assert torch.equal(policy.act(seen, False, SlotNoise(0, range(8))).token, policy.act(seen, True, None).token)


def test_another_temperature_can_be_set_for_an_evaluation() -> None:
    policy, seen = openvla.load("openvla-tiny"), observation()
    policy.sampling = Sampling(temperature=1e-6)
    assert torch.equal(policy.act(seen, False, SlotNoise(0, range(8))).token, policy.act(seen, True, None).token)


def test_prepared_observations_can_be_stacked_and_used_instead() -> None:
    policy = openvla.load("openvla-tiny", prompt_length=64)
    first, second = observation(3, seed=1), {**observation(3, seed=2), "instruction": ["push"] * 3}
    stacked = {
        key: torch.stack([policy.prepare(seen)[key] for seen in (first, second)]) for key in ("pixels", "prompt")
    }
    assert (stacked["pixels"].dtype, stacked["prompt"].shape) == (torch.uint8, (2, 3, 64))
    for index, seen in enumerate((first, second)):
        prepared = {key: value[index] for key, value in stacked.items()}
        raw, output = (policy.act(x, False, SlotNoise(0, range(3))) for x in (seen, prepared))
        assert torch.equal(raw.token, output.token)
        assert torch.equal(raw.logprob, output.logprob)


def test_features_take_the_place_of_a_picture() -> None:
    """One for each of 16 patches and of the widths 32 and 48, as the towers of the golden model are."""
    policy, seen = golden_policy(frozen=("vision_backbone",), reuse_features=True), observation()
    encoded = policy.encode(policy.prepare(seen))
    assert {key: tuple(value.shape) for key, value in encoded.items()} == {"prompt": (8, 29), "features": (8, 16, 80)}
    assert not encoded["features"].requires_grad
    from_picture, from_features = (policy.act(x, False, SlotNoise(0, range(8))) for x in (seen, encoded))
    for name, expected in vars(from_picture).items():
        assert torch.equal(getattr(from_features, name), expected), name
    assert torch.equal(policy.value(encoded), policy.value(seen))
    pictures, features = (policy.evaluate(x, from_picture.token) for x in (seen, encoded))
    assert all(torch.equal(*pair) for pair in zip(pictures, features, strict=True)) and features[0].requires_grad
    assert policy.encode(encoded).keys() == encoded.keys() and "pixels" in golden_policy().encode(seen)


@pytest.mark.parametrize(
    ("options", "trained"),
    [
        ({}, "vision_backbone.featurizer.cls_token"),
        ({"frozen": ("projector",)}, "vision_backbone.featurizer.cls_token"),
        ({"lora": {"rank": 2, "targets": ("q_proj", "qkv")}}, "blocks.0.attn.qkv.lora_A"),
    ],
)
def test_features_that_learning_changes_are_not_reused(options: dict[str, Any], trained: str) -> None:
    with pytest.raises(ValueError, match=f"reuse_features keeps .*{trained}.* is trained .and [0-9]+ more"):
        openvla.load("openvla-tiny", reuse_features=True, **options)


@pytest.mark.parametrize("position", ["first", "last", "mean"])
def test_the_value_of_an_observation(position: str) -> None:
    """Under `first` no action has a part in it; else it is the value of the greedy action."""
    policy, seen = openvla.load("openvla-tiny", value_position=position), observation()
    value = policy.value(seen)
    torch.testing.assert_close(value, policy.act(seen, True, None).value, rtol=0, atol=1e-6)
    sampled = policy.act(seen, False, SlotNoise(0, range(8))).value
    assert torch.allclose(value, sampled, rtol=0, atol=1e-6) == (position == "first")


def test_all_that_is_trained_gets_a_gradient_and_the_rest_none() -> None:
    policy, seen = openvla.load("openvla-tiny", frozen=("projector",)), observation(2)
    logprob, entropy, value = policy.evaluate(seen, policy.act(seen, True, None).token)
    (logprob.sum() + entropy.sum() + value.sum()).backward()
    for name, parameter in policy.named_parameters():
        unused = any(part in name for part in ("featurizer.blocks.2", "featurizer.norm", "attn_pool"))
        assert parameter.requires_grad == (not unused and "projector" not in name), name
        assert (parameter.grad is not None) == parameter.requires_grad, name


def test_gradient_checkpointing_changes_no_gradient() -> None:
    gradients = []
    for checkpointing in (False, True):
        policy, seen = golden_policy.__wrapped__(gradient_checkpointing=checkpointing), observation(2)
        logprob, _, _ = policy.evaluate(seen, policy.act(seen, True, None).token)
        logprob.sum().backward()
        gradients.append([p.grad for p in policy.network.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) > 100
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed, rtol=0, atol=1e-6)


def test_an_update_towards_an_action_makes_it_more_likely() -> None:
    policy, seen = openvla.load("openvla-tiny"), observation(4)
    token = policy.act(seen, False, SlotNoise(0, range(4))).token
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    before = policy.evaluate(seen, token)[0].mean()
    for _ in range(5):
        optimizer.zero_grad()
        (-policy.evaluate(seen, token)[0].mean()).backward()
        optimizer.step()
    assert policy.evaluate(seen, token)[0].mean() > before + 0.5


def test_an_action_is_learned_from_pixels_by_policy_gradients() -> None:
    """The first dimension is rewarded for the nearness to 0.5 where the image is bright, to -0.5 where it is dark."""
    torch.manual_seed(0)
    policy, noise = openvla.load("openvla-tiny"), SlotNoise(0, range(32))
    optimizer, generator = torch.optim.Adam(policy.parameters(), lr=1e-3), torch.Generator().manual_seed(0)
    rewards = []
    for _ in range(50):
        bright = torch.randint(2, (32,), generator=generator)
        image = (200 * bright).to(torch.uint8)[:, None, None, None, None].expand(-1, 1, 56, 56, 3)
        seen = policy.prepare({"image": image, "instruction": ["push the cube"] * 32})
        output = policy.act(seen, False, noise)
        reward = -(output.action[:, 0, 0] - (bright - 0.5)).abs()
        advantage = (reward - reward.mean()) / reward.std()
        loss = -(policy.evaluate(seen, output.token)[0][:, 0, 0] * advantage).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        rewards.append(float(reward.mean()))
    assert rewards[0] < -0.5
    assert sum(rewards[-10:]) / 10 > -0.25


# ---------------------------------------------------------------------------------------------- through the registry


def test_the_registry_builds_it_from_a_seed() -> None:
    first, same, other = (policies.make(settings(action_size=4), seed=seed) for seed in (0, 0, 1))
    seen = observation(2)
    outputs = [policy.act(seen, True, None) for policy in (first, same, other)]
    assert outputs[0].action.shape == (2, 1, 4)
    assert torch.equal(outputs[0].value, outputs[1].value)
    assert not torch.equal(outputs[0].value, outputs[2].value)
    assert isinstance(first, Policy)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (settings(chunk=4), "chunk must be 1"),
        (settings(num_choices=2), "one continuous action at a time"),
        (settings(unnorm_key="bridge"), "no action statistics of 'bridge' in the checkpoint; known: openvla-tiny"),
    ],
)
def test_an_env_that_does_not_fit_is_refused(wrong: PolicySettings, message: str) -> None:
    with pytest.raises((ValueError, KeyError), match=message):
        policies.make(wrong, seed=0)


def test_statistics_must_be_named_where_there_are_several() -> None:
    with pytest.raises(KeyError, match="name the data set.*bridge_golden, libero_golden_no_noops"):
        golden_policy(unnorm_key=None).act(observation(1), True, None)


# ---------------------------------------------------------------------------------------------- bad observations


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"image": torch.zeros(2, 1, 8, 8, 3)}, TypeError, "`image` is torch.float32; expected torch.uint8"),
        ({"image": np.zeros((2, 8, 8, 3), np.uint8)}, ValueError, r"`image` is \[2, 8, 8, 3\]; expected \[N"),
        ({"image": np.zeros((2, 1, 3, 8, 8), np.uint8)}, ValueError, r"`image` is \[2, 1, 3, 8, 8\]; expected"),
        ({"instruction": ["push"]}, ValueError, "1 instructions for 2 images"),
        ({"instruction": "push"}, ValueError, "one string for 2 images"),
    ],
)
def test_an_observation_of_the_wrong_kind_is_refused(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        golden_policy().act({**observation(2), **change}, True, None)


def test_what_an_observation_lacks_is_named() -> None:
    with pytest.raises(KeyError, match="OpenVLA reads `image`; the observation has instruction, state"):
        golden_policy().prepare({"state": torch.zeros(2, 3), "instruction": ["a", "b"]})
    with pytest.raises(KeyError, match="OpenVLA reads `instruction`; the observation has image"):
        golden_policy().prepare({"image": torch.zeros(2, 1, 8, 8, 3, dtype=torch.uint8)})


def test_tokens_that_are_no_action_are_refused() -> None:
    policy, seen = golden_policy(), observation(2)
    token = policy.act(seen, True, None).token
    for wrong in (token[..., :6], token[:, 0], token - 31744):
        with pytest.raises(ValueError, match=r"expected action ids of the shape \[N, 1, 7\]"):
            policy.evaluate(seen, wrong)


def test_sampling_needs_a_generator() -> None:
    with pytest.raises(ValueError, match="sampling needs a generator"):
        golden_policy().act(observation(1), False, None)
    with pytest.raises(ValueError, match="the generator has 1 slots for 2 envs"):
        golden_policy().act(observation(2), False, SlotNoise(0, range(1)))


def test_settings_are_not_changed_by_use() -> None:
    policy = golden_policy()
    before = dataclasses.asdict(policy.settings)
    policy.act(observation(1), True, None)
    assert dataclasses.asdict(policy.settings) == before
