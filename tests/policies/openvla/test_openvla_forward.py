"""The network against the reference implementation: features, hidden states, logits, in every layout."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from openvla_golden import ACTION_IDS, golden_policy, sample, tensors
from torch import Tensor

from policies.openvla.model import Context, OpenVLA
from policies.sampling import Sampling

LOGITS = {"rtol": 0, "atol": 5e-5}
SAMPLES = pytest.mark.parametrize("index", [0, 1])


def read(network: OpenVLA, data: dict[str, Tensor]) -> Context:
    pixels = data["pixel_values"].to(network.projector.fc1.weight.dtype)
    return network.read(data["input_ids"], data["attention_mask"].bool(), pixels)


def assert_logits(logits: Tensor, data: dict[str, Tensor], name: str) -> None:
    """Full logits against the action ids and paddings, the log-sum-exp and the argmax that are stored of them."""
    torch.testing.assert_close(logits[..., ACTION_IDS:], data[f"{name}.logits_31744_32064"], **LOGITS)
    torch.testing.assert_close(logits.logsumexp(-1), data[f"{name}.logsumexp_full"], **LOGITS)
    assert torch.equal(logits.argmax(-1), data[f"{name}.argmax_full"])


@SAMPLES
@torch.no_grad()
def test_vision_features_and_projection(index: int) -> None:
    network, data = golden_policy().network, sample(index)
    features = network.vision_backbone(data["pixel_values"])
    torch.testing.assert_close(features[..., :32], data["vision_features_dino"], rtol=0, atol=1e-5)
    torch.testing.assert_close(features[..., 32:], data["vision_features_siglip"], rtol=0, atol=1e-5)
    torch.testing.assert_close(features, data["vision_features"], rtol=0, atol=1e-5)
    torch.testing.assert_close(network.projector(features), data["projected"], rtol=0, atol=1e-5)


@SAMPLES
@torch.no_grad()
def test_hidden_states_and_logits_of_one_forward(index: int) -> None:
    network, data = golden_policy().network, sample(index)
    layers: list[Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda _, inputs, output: layers.extend([inputs[0], output[0]]))
        for layer in network.language_model.model.layers
    ]
    context = read(network, data)
    for hook in hooks:
        hook.remove()
    for hidden, name in ((layers[0], "hidden_0"), (layers[1], "hidden_1"), (context.hidden, "hidden_2")):
        torch.testing.assert_close(hidden, data[f"full.{name}"], **LOGITS)
    assert_logits(network.language_model.logits(context.hidden), data, "full")


@SAMPLES
@torch.no_grad()
def test_cached_generation(index: int) -> None:
    policy, data = golden_policy(), sample(index)
    tokens, logits = policy.generate(read(policy.network, data), deterministic=True, generator=None)
    assert torch.equal(tokens, data["gen.tokens"])
    torch.testing.assert_close(logits, data["gen.logits_31744_32064"][..., :256], **LOGITS)
    for temperature in (1.0, 1.6):
        log_p = Sampling(temperature).log_probabilities(logits)
        chosen = log_p.gather(-1, tokens[..., None] - ACTION_IDS)[..., 0]
        torch.testing.assert_close(chosen, data[f"gen.logprob_256_T{temperature}"], **LOGITS)
        entropy = -(log_p.exp() * log_p).sum(-1)
        torch.testing.assert_close(entropy, data[f"gen.entropy_256_T{temperature}"], **LOGITS)


@SAMPLES
@torch.no_grad()
def test_step_by_step_and_all_tokens_at_once_give_the_logits_of_the_full_vocabulary(index: int) -> None:
    network, data = golden_policy().network, sample(index)
    prompt, tokens = read(network, data), data["gen.tokens"]
    context, hidden = prompt, [prompt.hidden[:, -1:]]
    for step in range(tokens.shape[1] - 1):
        context = network.extend(context, tokens[:, step : step + 1])
        hidden.append(context.hidden)
    logits = network.language_model.logits(torch.cat(hidden, dim=1))
    assert_logits(logits, data, "gen")
    full = logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    torch.testing.assert_close(full, data["gen.logprob_full_vocab"], **LOGITS)

    at_once = network.extend(prompt, tokens[:, :-1]).hidden
    logits = network.language_model.logits(torch.cat([prompt.hidden[:, -1:], at_once], dim=1))
    assert_logits(logits, data, "teacher")


@SAMPLES
@torch.no_grad()
def test_tokens_become_the_actions_of_each_data_set(index: int) -> None:
    data = sample(index)
    for name in ("libero_golden_no_noops", "bridge_golden"):
        policy = golden_policy(unnorm_key=name)
        normalised = policy.tokens.decode(data["gen.tokens"][0])
        torch.testing.assert_close(normalised, data["normalized_actions"], rtol=0, atol=1e-12)
        action = policy.statistics.unnormalise(normalised)
        torch.testing.assert_close(action, data[f"actions.{name}"], rtol=0, atol=1e-12)


@torch.no_grad()
def test_bfloat16_equals_the_reference_bit_for_bit() -> None:
    policy, data = golden_policy(dtype="bfloat16"), sample(0)
    context = read(policy.network, data)
    logits = policy.network.language_model.logits(context.hidden)
    assert torch.equal(logits[..., ACTION_IDS:], data["full_bf16.logits_31744_32064"])
    assert torch.equal(logits.argmax(-1), data["full_bf16.argmax_full"])
    torch.testing.assert_close(logits.logsumexp(-1), data["full_bf16.logsumexp_full"], rtol=0, atol=1e-5)
    tokens, _ = policy.generate(context, deterministic=True, generator=None)
    assert torch.equal(tokens, data["full_bf16.tokens"])


@torch.no_grad()
def test_rounding_a_module_later_leaves_rotary_frequencies_in_float32() -> None:
    rounded = golden_policy.__wrapped__().network.to(torch.bfloat16)
    logits = rounded.language_model.logits(read(rounded, sample(0)).hidden)
    assert torch.equal(logits[..., ACTION_IDS:], sample(0)["full_bf16.logits_31744_32064"])


def pair() -> dict[str, Tensor]:
    return {"pixel_values": torch.cat([sample(0)["pixel_values"], sample(1)["pixel_values"]])}


@torch.no_grad()
def test_a_right_padded_batch() -> None:
    network, data = golden_policy().network, tensors("openvla_forward.safetensors")
    inputs = {key: data[f"rightpad.{key}"] for key in ("input_ids", "attention_mask")} | pair()
    context = read(network, inputs)
    logits, mask = network.language_model.logits(context.hidden), context.mask
    torch.testing.assert_close(logits[mask][:, ACTION_IDS:], data["rightpad.logits_31744_32064"][mask], **LOGITS)
    torch.testing.assert_close(logits.logsumexp(-1)[mask], data["rightpad.logsumexp_full"][mask], **LOGITS)
    assert torch.equal(logits.argmax(-1)[mask], data["rightpad.argmax_full"][mask])


@torch.no_grad()
def test_the_layout_of_reinforcement_learning() -> None:
    policy, data = golden_policy(), tensors("openvla_forward.safetensors")
    inputs = {key: data[f"rl.{key}"] for key in ("input_ids", "attention_mask")} | pair()
    context, tokens = read(policy.network, inputs), data["rl.action_tokens"]
    hidden = torch.cat([context.hidden[:, -1:], policy.network.extend(context, tokens[:, :-1]).hidden], dim=1)
    torch.testing.assert_close(hidden[:, 0], data["rl.hidden_last_prompt_token"], **LOGITS)
    logits = policy.network.language_model.logits(hidden)
    assert_logits(logits, data, "rl")
    for temperature in (1.0, 1.6):
        log_p = Sampling(temperature).log_probabilities(logits[..., policy.tokens.ids])
        chosen = log_p.gather(-1, tokens[..., None] - ACTION_IDS)[..., 0]
        torch.testing.assert_close(chosen, data[f"rl.logprob_256_T{temperature}"], **LOGITS)
        entropy = -(log_p.exp() * log_p).sum(-1)
        torch.testing.assert_close(entropy, data[f"rl.entropy_256_T{temperature}"], **LOGITS)


@torch.no_grad()
def test_positions_do_not_count_pads() -> None:
    data = tensors("openvla_forward.safetensors")
    mask = torch.cat([data["rl.attention_mask"], torch.ones(2, 7, dtype=torch.long)], dim=1)
    seen: list[Tensor] = []
    decoder = golden_policy().network.language_model.model
    hook = decoder.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1]))
    inputs = {"input_ids": torch.cat([data["rl.input_ids"], data["rl.action_tokens"]], dim=1), "attention_mask": mask}
    read(golden_policy().network, inputs | pair())
    hook.remove()
    assert torch.equal(seen[0], data["rl.position_ids"])


@torch.no_grad()
def test_the_loss_of_supervised_learning() -> None:
    network, data = golden_policy().network, tensors("openvla_forward.safetensors")
    ids, labels = data["train.input_ids"], data["train.labels"]
    context = network.read(ids, torch.ones_like(ids).bool(), sample(0)["pixel_values"])
    logits = network.language_model.logits(context.hidden)[:, network.vision_backbone.num_patches :]
    loss = F.cross_entropy(logits[0, :-1], labels[0, 1:], ignore_index=-100)
    torch.testing.assert_close(loss, data["train.loss"], rtol=0, atol=1e-5)


@torch.no_grad()
def test_eager_attention_agrees() -> None:
    network, data = golden_policy(attention="eager").network, sample(0)
    assert_logits(network.language_model.logits(read(network, data).hidden), data, "full")


@pytest.mark.parametrize(("attention", "calls"), [("sdpa", 3 + 2 + 2), ("eager", 0)])
@torch.no_grad()
def test_the_chosen_attention_is_the_one_that_runs(attention: str, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are read: 3 of 4 of DINOv2, 2 of 3 of SigLIP, 2 layers of the language model."""
    fused, count = F.scaled_dot_product_attention, []

    def counted(*args: Tensor, **kwargs: Tensor) -> Tensor:
        count.append(1)
        return fused(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    read(golden_policy(attention=attention).network, sample(0))
    assert len(count) == calls
