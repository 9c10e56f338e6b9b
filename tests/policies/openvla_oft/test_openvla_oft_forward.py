"""The network against the reference implementation, in every layout and with everything that may stand beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from openvla_golden import ACTION_IDS
from openvla_oft_golden import LIBERO, golden, golden_oft, regression
from torch import Tensor

from policies.openvla.model import Context
from policies.openvla_oft import OpenVLAOFTPolicy
from policies.sampling import Sampling

LOGITS = {"rtol": 0, "atol": 5e-5}
SAMPLES = pytest.mark.parametrize("index", [0, 1])
SPACE = 29871
SLOTS = 56


def read(policy: OpenVLAOFTPolicy, index: int, views: int = 1, state: bool = False) -> Context:
    """One of the two samples, read as it was stored."""
    ids = torch.cat([golden(f"s{index}.input_ids_no_29871"), torch.tensor([[SPACE]])], dim=1)
    pixels = golden(f"s{index}.pixel_values_{views}img").unflatten(1, (views, 6)).to(policy._dtype)
    proprio = golden("proprio_normalized")[index : index + 1].float() if state else None
    return policy.network.read(ids, torch.ones_like(ids).bool(), pixels, SLOTS, proprio)


def read_batch(policy: OpenVLAOFTPolicy) -> Context:
    """Both samples at once."""
    pixels = torch.cat([golden(f"s{index}.pixel_values_1img") for index in range(2)])[:, None]
    return policy.network.read(golden("rlinf.input_ids"), golden("rlinf.attention_mask").bool(), pixels, SLOTS)


def logits(policy: OpenVLAOFTPolicy, context: Context) -> Tensor:
    return policy.network.language_model.logits(context.hidden)


def assert_logits(found: Tensor, name: str) -> None:
    torch.testing.assert_close(found[..., ACTION_IDS:], golden(f"{name}.logits_31744_32064"), **LOGITS)
    torch.testing.assert_close(found.logsumexp(-1), golden(f"{name}.logsumexp_full"), **LOGITS)
    assert torch.equal(found.argmax(-1), golden(f"{name}.argmax_full"))


def assert_scores(found: Tensor, name: str, row: slice) -> None:
    """Log-probs of stored random tokens, entropies, and the greedy tokens, among action ids."""
    tokens = golden("random_tokens")[row]
    for temperature in (1.0, 1.6):
        log_p = Sampling(temperature).log_probabilities(found[..., ACTION_IDS : ACTION_IDS + 256])
        logprob = log_p.gather(-1, tokens[..., None] - ACTION_IDS)[..., 0]
        torch.testing.assert_close(logprob, golden(f"{name}.logprob_256_T{temperature}.random_tokens"), **LOGITS)
        torch.testing.assert_close(
            -(log_p.exp() * log_p).sum(-1), golden(f"{name}.entropy_256_T{temperature}"), **LOGITS
        )
    greedy = found[..., ACTION_IDS : ACTION_IDS + 256].argmax(-1) + ACTION_IDS
    assert torch.equal(greedy, golden(f"{name}.tokens_restricted_argmax"))


@SAMPLES
@torch.no_grad()
def test_one_image_and_action_tokens(index: int) -> None:
    policy, name = golden_oft(), f"s{index}.discrete"
    context = read(policy, index)
    torch.testing.assert_close(context.hidden, golden(f"{name}.action_hidden_states"), **LOGITS)
    found = logits(policy, context)
    assert_logits(found, name)
    assert_scores(found, name, slice(index, index + 1))


@SAMPLES
@torch.no_grad()
def test_tokens_become_chunks_of_actions_of_each_data_set(index: int) -> None:
    for dataset in (LIBERO, "bridge_golden"):
        policy = golden_oft(unnorm_key=dataset)
        tokens, _ = policy.generate(read(policy, index), True, None)
        normalised = policy.tokens.decode(policy._chunked(tokens))
        torch.testing.assert_close(normalised[0], golden(f"s{index}.discrete.normalized_actions"), rtol=0, atol=1e-12)
        action = policy.statistics.unnormalise(normalised[0], policy.settings.epsilon)
        torch.testing.assert_close(action, golden(f"s{index}.discrete.actions.{dataset}"), rtol=0, atol=1e-12)


@SAMPLES
@torch.no_grad()
def test_two_images(index: int) -> None:
    policy = golden_oft()
    assert_logits(logits(policy, read(policy, index, views=2)), f"s{index}.discrete2img")


@torch.no_grad()
def test_bfloat16_equals_the_reference_bit_for_bit() -> None:
    policy = golden_oft(dtype="bfloat16")
    found = logits(policy, read(policy, 0))
    assert torch.equal(found[..., ACTION_IDS:], golden("s0.discrete_bf16.logits_31744_32064"))
    assert torch.equal(found.argmax(-1), golden("s0.discrete_bf16.argmax_full"))


@SAMPLES
@torch.no_grad()
def test_regression_from_two_images_and_the_state(index: int) -> None:
    policy, name = regression(), f"s{index}.l1"
    context = read(policy, index, views=2, state=True)
    torch.testing.assert_close(context.hidden, golden(f"{name}.action_hidden_states"), **LOGITS)
    action = policy.network.action_head(context.hidden)
    torch.testing.assert_close(action, golden(f"{name}.normalized_actions"), **LOGITS)
    for dataset in (LIBERO, "bridge_golden"):
        statistics = golden_oft(unnorm_key=dataset).statistics
        expected = golden(f"{name}.actions.{dataset}")
        torch.testing.assert_close(statistics.unnormalise(action[0], 1e-8), expected, rtol=0, atol=1e-6)


@SAMPLES
@torch.no_grad()
def test_language_modulates_the_vision_towers(index: int) -> None:
    policy, name = regression(film=True), f"s{index}.film"
    context = read(policy, index, views=2, state=True)
    torch.testing.assert_close(context.hidden, golden(f"{name}.action_hidden_states"), **LOGITS)
    action = policy._command(policy.network.action_head(context.hidden))
    torch.testing.assert_close(action[0].double(), golden(f"{name}.actions.{LIBERO}"), rtol=0, atol=1e-6)


@torch.no_grad()
def test_the_layout_of_simplevla() -> None:
    policy = golden_oft(layout="simplevla")
    found = logits(policy, read_batch(policy))
    assert_logits(found, "simplevla")
    assert_scores(found, "simplevla", slice(None))


@torch.no_grad()
def test_the_layout_of_rlinf() -> None:
    policy = golden_oft(layout="rlinf")
    context = read_batch(policy)
    torch.testing.assert_close(context.hidden[:, 0], golden("rlinf.hidden_last_prompt_token"), **LOGITS)
    found = logits(policy, context)
    assert_logits(found, "rlinf")
    assert_scores(found, "rlinf", slice(None))


@SAMPLES
@torch.no_grad()
def test_a_checkpoint_of_one_layout_is_not_one_of_the_other(index: int) -> None:
    policy = golden_oft(layout="rlinf")
    official = golden(f"s{index}.discrete.logits_31744_32064")
    assert (logits(policy, read(policy, index))[..., ACTION_IDS:] - official).abs().max() > 1


@SAMPLES
@torch.no_grad()
def test_what_causal_attention_computes_is_far_away(index: int) -> None:
    policy = golden_oft()
    causal = golden(f"s{index}.discrete.logits_31744_32064", "causal")
    assert (logits(policy, read(policy, index))[..., ACTION_IDS:] - causal).abs().max() > 5
    context = read(regression(), index, views=2, state=True)
    causal = golden(f"s{index}.l1.normalized_actions", "causal")
    assert (regression().network.action_head(context.hidden) - causal).abs().max() > 0.1


@torch.no_grad()
def test_eager_attention_agrees() -> None:
    policy = golden_oft(attention="eager")
    assert_logits(logits(policy, read(policy, 0)), "s0.discrete")


@torch.no_grad()
def test_a_future_slot_changes_an_earlier_output() -> None:
    policy = golden_oft()
    seen: list[tuple[Any, ...]] = []
    decoder = policy.network.language_model.model
    hook = decoder.register_forward_pre_hook(lambda _, inputs: seen.append(inputs))
    before = read(policy, 0).hidden
    hook.remove()
    x, positions, mask = seen[0]
    changed = x.clone()
    changed[:, -1] += 1
    after = decoder(changed, positions, mask, keep=False)[0]
    assert (after[:, -2 - SLOTS : -2] - before).abs().amax(dim=(0, 2)).min() > 1e-3


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_that_ignores_its_mask_is_refused(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fused = F.scaled_dot_product_attention

    def causal(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        return fused(q, k, v, is_causal=True)

    monkeypatch.setattr("policies.openvla.llama.F.scaled_dot_product_attention", causal)
    monkeypatch.setattr("policies.openvla.llama._eager_attention", causal)
    with pytest.raises(RuntimeError, match=f"attention is causal under attention='{attention}'; it must look ahead"):
        golden_oft.__wrapped__(attention=attention)


@torch.no_grad()
def test_the_logits_of_supervised_learning() -> None:
    """They do not depend on the demonstrated tokens, which the slots hide."""
    policy = golden_oft()
    ids = golden("train.input_ids")[:, : -SLOTS - 1]
    context = policy.network.read(ids, torch.ones_like(ids).bool(), golden("s0.pixel_values_1img")[:, None], SLOTS)
    assert_logits(logits(policy, context), "train")
