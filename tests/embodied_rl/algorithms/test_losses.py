"""Losses per element: hand-made numbers, exact divergences, gradients, and NaN behind every mask."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from embodied_rl.algorithms import (
    MAX_LOG_RATIO,
    KlKind,
    PolicyLoss,
    cispo_loss,
    importance_weight,
    kl_penalty,
    log_ratio,
    policy_loss,
    value_loss,
)

NAN = float("nan")
LEVELS = ["token", "action", "chunk", "sequence"]
P, Q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.4, 0.2])
KL_P_Q = 0.025267


def all_of(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bool)


# Log ratio


def small_chunk() -> tuple[Tensor, Tensor]:
    """One chunk of two actions with three dimensions each, and a mask that keeps both."""
    return torch.tensor([[[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]]]), all_of(1, 2)


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [[[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]]]),
        ("action", [[0.6, 1.5]]),
        ("chunk", [2.1]),
        ("sequence", [0.35]),
    ],
)
def test_log_ratio_sums_to_the_level_and_averages_over_a_sequence(level: str, expected: list[float]) -> None:
    logprob, mask = small_chunk()
    ratio, level_mask = log_ratio(logprob - 3, torch.full_like(logprob, -3), mask, level)
    torch.testing.assert_close(ratio, torch.tensor(expected))
    assert level_mask.shape == ratio.shape
    assert level_mask.all()


@pytest.mark.parametrize(("level", "expected"), [("action", [[0.6, 0.0]]), ("chunk", [0.6]), ("sequence", [0.2])])
def test_log_ratio_leaves_out_masked_sub_steps(level: str, expected: list[float]) -> None:
    logprob, _ = small_chunk()
    ratio, _ = log_ratio(logprob, torch.zeros_like(logprob), torch.tensor([[True, False]]), level)
    torch.testing.assert_close(ratio, torch.tensor(expected))


def test_log_ratio_expands_the_mask_over_all_dimensions_of_an_action() -> None:
    logprob, _ = small_chunk()
    _, mask = log_ratio(logprob, logprob, torch.tensor([[True, False]]), "token")
    assert mask.tolist() == [[[True] * 3, [False] * 3]]


@pytest.mark.parametrize(("level", "expected"), [("chunk", [True, False]), ("sequence", [True, False])])
def test_a_chunk_is_valid_when_any_of_its_sub_steps_is(level: str, expected: list[bool]) -> None:
    logprob, mask = torch.zeros(2, 2, 3), torch.tensor([[True, False], [False, False]])
    ratio, level_mask = log_ratio(logprob, logprob, mask, level)
    assert level_mask.tolist() == expected
    assert ratio.tolist() == [0.0, 0.0]


def test_log_ratio_refuses_a_summed_logprob_beside_one_per_dimension() -> None:
    with pytest.raises(ValueError, match=r"logprob \[4, 7\], old_logprob \[4, 1\]"):
        log_ratio(torch.zeros(4, 7), torch.zeros(4, 1), all_of(4), "action")


@pytest.mark.parametrize("mask_shape", [(2, 3, 1), (2, 3, 7), (2, 1), (2,), (3, 2)])
def test_log_ratio_refuses_a_mask_that_does_not_name_each_sub_step(mask_shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"mask \[\.\.\., C\]"):
        log_ratio(torch.zeros(2, 3, 7), torch.zeros(2, 3, 7), all_of(*mask_shape), "token")


def test_log_ratio_refuses_a_mask_that_is_not_bool() -> None:
    with pytest.raises(ValueError, match="bool"):
        log_ratio(torch.zeros(2, 3, 7), torch.zeros(2, 3, 7), torch.ones(2, 3), "token")


def test_log_ratio_names_the_levels_it_knows() -> None:
    with pytest.raises(ValueError, match="'step'.*token, action, chunk or sequence"):
        log_ratio(torch.zeros(2, 3, 7), torch.zeros(2, 3, 7), all_of(2, 3), "step")


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("level", LEVELS)
def test_log_ratio_of_a_long_answer_never_overflows(level: str, sign: int) -> None:
    old = torch.full((1, 4000, 1), -50.0)
    ratio, mask = log_ratio(old + sign * 30.0, old, all_of(1, 4000), level)
    assert ratio.eq(sign * MAX_LOG_RATIO).all()
    for advantage in (1.0, -1.0):
        result = policy_loss(ratio, torch.tensor([advantage]), mask, 0.2, 0.2)
        assert result.loss.isfinite().all()
        assert result.approx_kl.isfinite().all()


@pytest.mark.parametrize("level", LEVELS)
def test_what_both_policies_give_probability_0_has_a_log_ratio_of_0_and_no_gradient(level: str) -> None:
    new = torch.tensor([[[-math.inf, -1.0]]], requires_grad=True)
    ratio, mask = log_ratio(new, torch.tensor([[[-math.inf, -1.5]]]), all_of(1, 1), level)
    assert ratio.sum().item() == pytest.approx(0.25 if level == "sequence" else 0.5)
    policy_loss(ratio, torch.ones(1), mask, 2.0, 2.0).loss.sum().backward()
    assert new.grad is not None and new.grad[0, 0, 0] == 0 and new.grad.isfinite().all()


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_what_both_policies_give_probability_0_has_no_divergence_and_no_gradient(kind: KlKind) -> None:
    new = torch.tensor([-math.inf, -1.0], requires_grad=True)
    divergence = kl_penalty(new, torch.tensor([-math.inf, -1.5]), kind)
    divergence.sum().backward()
    assert divergence[0] == 0 and divergence.isfinite().all()
    assert new.grad is not None and new.grad[0] == 0 and new.grad.isfinite().all()


def test_what_both_policies_give_probability_0_has_an_importance_weight_of_1() -> None:
    assert importance_weight(torch.tensor([-math.inf]), torch.tensor([-math.inf]), 2.0).tolist() == [1.0]


def test_sequence_ratio_does_not_grow_with_the_length_of_the_answer() -> None:
    for length in (1, 10, 4000):
        old = torch.zeros(1, length, 1)
        ratio, _ = log_ratio(old + 0.05, old, all_of(1, length), "sequence")
        torch.testing.assert_close(ratio, torch.tensor([0.05]))


@pytest.mark.parametrize("level", LEVELS)
def test_log_ratio_moves_the_new_policy_and_not_the_old(level: str) -> None:
    new, old = torch.zeros(2, 2, 3, requires_grad=True), torch.zeros(2, 2, 3, requires_grad=True)
    ratio, _ = log_ratio(new, old, all_of(2, 2), level)
    ratio.sum().backward()
    expected = 1 / 6 if level == "sequence" else 1.0
    torch.testing.assert_close(new.grad, torch.full_like(new, expected))
    assert old.grad is None


# Policy loss


def loss_of(ratio: float, advantage: float, dual_clip: float | None = None) -> PolicyLoss:
    log = torch.tensor([math.log(ratio)])
    return policy_loss(log, torch.tensor([advantage]), all_of(1), 0.2, 0.28, dual_clip)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, -2.0, False),
        (1.25, 2.0, -2.5, False),
        (1.5, 2.0, -2.56, True),
        (1.5, -2.0, 3.0, True),
        (0.5, 2.0, -1.0, True),
        (0.5, -2.0, 1.6, True),
        (0.85, -2.0, 1.7, False),
    ],
)
def test_policy_loss_takes_the_worse_of_the_plain_and_the_clipped_ratio(
    ratio: float, advantage: float, loss: float, clipped: bool
) -> None:
    result = loss_of(ratio, advantage)
    torch.testing.assert_close(result.loss, torch.tensor([loss]))
    assert result.clipped.tolist() == [clipped]


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss"),
    [(10.0, -2.0, 6.0), (2.0, -2.0, 4.0), (0.1, -2.0, 1.6), (10.0, 2.0, -2.56)],
)
def test_dual_clip_bounds_the_loss_of_a_negative_advantage_only(ratio: float, advantage: float, loss: float) -> None:
    torch.testing.assert_close(loss_of(ratio, advantage, dual_clip=3.0).loss, torch.tensor([loss]))


def test_dual_clip_must_be_above_one() -> None:
    with pytest.raises(ValueError, match="above 1, got 1"):
        loss_of(1.0, 1.0, dual_clip=1.0)


@pytest.mark.parametrize("ratio", [0.5, 1.0, 1.1, 3.0])
def test_approx_kl_is_ratio_minus_one_minus_log_ratio(ratio: float) -> None:
    torch.testing.assert_close(loss_of(ratio, 1.0).approx_kl, torch.tensor([ratio - 1 - math.log(ratio)]))


@pytest.mark.parametrize("kind", ["ppo", "cispo"])
@pytest.mark.parametrize("level", LEVELS)
def test_gradient_at_ratio_one_is_the_reinforce_gradient(level: str, kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 2, 3, 4, generator=generator, requires_grad=True)
    token = torch.randint(4, (5, 2, 3, 1), generator=generator)
    advantage = torch.randn(5, generator=generator)
    mask = torch.tensor([[True, True], [True, False], [True, True], [False, True], [True, True]])

    logprob = logits.log_softmax(-1).gather(-1, token).squeeze(-1)
    ratio, level_mask = log_ratio(logprob, logprob.detach(), mask, level)
    if kind == "ppo":
        result = policy_loss(ratio, advantage, level_mask, 0.2, 0.2)
    else:
        at_level, _ = log_ratio(logprob, torch.zeros_like(logprob), mask, level)
        result = cispo_loss(ratio, at_level, advantage, level_mask, 0.2, 0.2)
    (gradient,) = torch.autograd.grad(result.loss.sum(), logits, retain_graph=True)

    tokens = mask.sum(1) * 3
    weight = advantage / tokens if level == "sequence" else advantage
    reinforce = -(weight[:, None, None] * logprob)[mask].sum()
    torch.testing.assert_close(gradient, torch.autograd.grad(reinforce, logits)[0])


@pytest.mark.parametrize(("ratio", "advantage"), [(1.5, 2.0), (0.5, -2.0)])
def test_a_clipped_element_has_no_gradient(ratio: float, advantage: float) -> None:
    log = torch.tensor([math.log(ratio)], requires_grad=True)
    policy_loss(log, torch.tensor([advantage]), all_of(1), 0.2, 0.28).loss.sum().backward()
    assert log.grad is not None
    assert log.grad.tolist() == [0.0]


def test_advantage_of_the_leading_dimensions_holds_for_all_that_follows() -> None:
    advantage = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    result = policy_loss(torch.zeros(2, 3, 4, 7), advantage, all_of(2, 3, 4, 7), 0.2, 0.2)
    torch.testing.assert_close(result.loss, -advantage[..., None, None].expand(2, 3, 4, 7))


def test_advantage_of_the_same_shape_is_taken_element_by_element() -> None:
    advantage = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    torch.testing.assert_close(policy_loss(torch.zeros(2, 2), advantage, all_of(2, 2), 0.2, 0.2).loss, -advantage)


@pytest.mark.parametrize("shape", [(2, 1), (3,), (1, 3), (2, 3, 1), ()])
def test_policy_loss_refuses_an_advantage_that_would_broadcast(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="leading dimensions"):
        policy_loss(torch.zeros(2, 3), torch.zeros(shape), all_of(2, 3), 0.2, 0.2)


def test_policy_loss_refuses_a_mask_of_another_level() -> None:
    with pytest.raises(ValueError, match="one shape"):
        policy_loss(torch.zeros(2, 3, 7), torch.zeros(2), all_of(2, 3, 1), 0.2, 0.2)


@pytest.mark.parametrize("level", LEVELS)
def test_clip_fraction_over_the_level_mask_is_never_above_one(level: str) -> None:
    mask = torch.tensor([[True, False], [True, True]])
    ratio, level_mask = log_ratio(torch.full((2, 2, 7), 5.0), torch.zeros(2, 2, 7), mask, level)
    clipped = policy_loss(ratio, torch.ones(2), level_mask, 0.2, 0.2).clipped
    assert clipped.sum() / level_mask.sum() == 1.0


def test_masked_positions_count_in_no_metric() -> None:
    result = policy_loss(torch.tensor([3.0, 0.0]), torch.ones(2), torch.tensor([False, True]), 0.2, 0.2)
    assert result.loss.tolist() == [0.0, -1.0]
    assert result.clipped.tolist() == [False, False]
    assert result.approx_kl.tolist() == [0.0, 0.0]


def test_an_element_of_zero_advantage_still_counts_in_the_metrics() -> None:
    result = policy_loss(torch.tensor([1.0]), torch.zeros(1), all_of(1), 0.2, 0.2)
    assert result.clipped.tolist() == [True]
    assert result.approx_kl.item() == pytest.approx(math.e - 2)


def nan_behind(mask: Tensor, x: Tensor) -> Tensor:
    return torch.where(mask, x, NAN).requires_grad_()


@pytest.mark.parametrize("kind", ["ppo", "dual_clip", "cispo"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_nan_behind_the_mask_reaches_no_policy_loss_and_no_gradient(level: str, kind: str) -> None:
    mask = torch.tensor([[True, False], [False, False]])
    token_mask = mask.unsqueeze(-1).expand(2, 2, 3)
    logprob = nan_behind(token_mask, torch.full((2, 2, 3), -0.5))
    old = nan_behind(token_mask, torch.full((2, 2, 3), -0.55)).detach()
    advantage = torch.tensor([1.0, NAN])
    ratio, level_mask = log_ratio(logprob, old, mask, level)
    if kind == "cispo":
        at_level, _ = log_ratio(logprob, torch.zeros_like(old), mask, level)
        result = cispo_loss(ratio, at_level, advantage, level_mask, 0.2, 0.2)
    else:
        result = policy_loss(ratio, advantage, level_mask, 0.2, 0.2, 3.0 if kind == "dual_clip" else None)
    result.loss.sum().backward()
    assert logprob.grad is not None
    assert result.loss.isfinite().all()
    assert result.approx_kl.isfinite().all()
    assert logprob.grad[token_mask].ne(0).all()
    assert logprob.grad[~token_mask].eq(0).all()


@pytest.mark.parametrize("kind", ["ppo", "cispo"])
def test_policy_loss_masks_a_nan_log_ratio_by_itself(kind: str) -> None:
    mask = torch.tensor([True, False])
    log = nan_behind(mask, torch.zeros(2))
    if kind == "ppo":
        result = policy_loss(log, torch.ones(2), mask, 0.2, 0.2)
    else:
        result = cispo_loss(torch.tensor([0.0, NAN]), log, torch.ones(2), mask, 0.2, 0.2)
    # A caller may multiply a NaN weight in at the masked place.
    (result.loss * torch.tensor([1.0, NAN]))[0].backward()
    assert log.grad is not None
    assert log.grad.tolist() == [-1.0, 0.0]
    assert result.loss[1] == 0


# CISPO


@pytest.mark.parametrize(("ratio", "weight", "clipped"), [(1.1, 1.1, False), (9.0, 1.28, True), (0.2, 0.8, True)])
def test_cispo_clips_the_weight_and_keeps_the_gradient(ratio: float, weight: float, clipped: bool) -> None:
    logprob = torch.tensor([-1.5], requires_grad=True)
    log = logprob - logprob.detach() + math.log(ratio)
    result = cispo_loss(log, logprob, torch.tensor([2.0]), all_of(1), 0.2, 0.28)
    result.loss.sum().backward()
    torch.testing.assert_close(result.loss.detach(), torch.tensor([weight * 2.0 * 1.5]))
    torch.testing.assert_close(logprob.grad, torch.tensor([-weight * 2.0]))
    assert result.clipped.tolist() == [clipped]


@pytest.mark.parametrize("kind", ["ppo", "cispo"])
def test_only_the_loss_carries_a_gradient_and_only_to_the_policy(kind: str) -> None:
    advantage, log = torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    if kind == "ppo":
        result = policy_loss(log, advantage, all_of(2), 0.2, 0.2)
    else:
        result = cispo_loss(log, log, advantage, all_of(2), 0.2, 0.2)
    result.loss.sum().backward()
    assert log.grad is not None
    assert advantage.grad is None
    assert not result.approx_kl.requires_grad


def test_cispo_refuses_a_logprob_of_another_level() -> None:
    with pytest.raises(ValueError, match="one shape"):
        cispo_loss(torch.zeros(2, 3), torch.zeros(2, 3, 7), torch.zeros(2), all_of(2, 3), 0.2, 0.2)


# Importance weight


def test_importance_weight_is_the_ratio_up_to_the_cap_without_gradient() -> None:
    old = torch.tensor([0.0, math.log(1.5), 5.0, 1000.0], requires_grad=True)
    weight = importance_weight(old, torch.zeros(4), cap=2.0)
    torch.testing.assert_close(weight, torch.tensor([1.0, 1.5, 2.0, 2.0]))
    assert not weight.requires_grad


def test_importance_weight_without_a_binding_cap_stays_finite() -> None:
    assert importance_weight(torch.tensor([1000.0]), torch.zeros(1), cap=math.inf).isfinite().all()


def test_importance_weight_is_zero_behind_the_mask() -> None:
    weight = importance_weight(torch.tensor([0.0, NAN]), torch.zeros(2), 2.0, torch.tensor([True, False]))
    assert weight.tolist() == [1.0, 0.0]


def test_importance_weight_refuses_shapes_that_would_broadcast() -> None:
    with pytest.raises(ValueError, match="one shape"):
        importance_weight(torch.zeros(4, 7), torch.zeros(4, 1), 2.0)


def test_importance_weight_refuses_a_cap_of_zero() -> None:
    with pytest.raises(ValueError, match="cap must be above 0"):
        importance_weight(torch.zeros(1), torch.zeros(1), 0.0)


# Value loss


@pytest.mark.parametrize(
    ("kind", "error", "loss"),
    [("mse", 3.0, 4.5), ("mse", 20.0, 200.0), ("huber", 3.0, 4.5), ("huber", 20.0, 150.0)],
)
def test_value_loss_is_half_the_square_and_huber_is_linear_beyond_ten(kind: str, error: float, loss: float) -> None:
    for sign in (1, -1):
        got, clipped = value_loss(torch.zeros(1), torch.zeros(1), torch.tensor([sign * error]), None, kind)
        torch.testing.assert_close(got, torch.tensor([loss]))
        assert not clipped.any()


@pytest.mark.parametrize(
    ("value", "returns", "loss", "gradient"),
    [
        (0.1, 1.0, 0.405, -0.9),  # within the clip: the plain loss
        (0.5, 1.0, 0.32, 0.0),  # moved too far towards the return: no pull left
        (0.5, -1.0, 1.125, 1.5),  # moved too far away: pulled back by the plain loss
    ],
)
def test_clipped_value_loss_is_the_larger_of_the_two(
    value: float, returns: float, loss: float, gradient: float
) -> None:
    new = torch.tensor([value], requires_grad=True)
    got, _ = value_loss(new, torch.zeros(1), torch.tensor([returns]), 0.2, "mse")
    got.sum().backward()
    torch.testing.assert_close(got.detach(), torch.tensor([loss]))
    torch.testing.assert_close(new.grad, torch.tensor([gradient]))


def test_value_clip_flags_tell_how_far_the_value_moved_before_clamping() -> None:
    value = torch.tensor([0.1, 0.5, -0.5, 0.0])
    _, clipped = value_loss(value, torch.zeros(4), torch.ones(4), 0.2, "mse")
    assert clipped.tolist() == [False, True, True, False]


@pytest.mark.parametrize("kind", ["mse", "huber"])
@pytest.mark.parametrize("clip", [None, 0.2])
def test_a_nan_behind_the_mask_reaches_no_value_loss_and_no_gradient(kind: str, clip: float | None) -> None:
    mask = torch.tensor([True, False])
    value = nan_behind(mask, torch.zeros(2))
    loss, clipped = value_loss(value, torch.tensor([0.0, NAN]), torch.tensor([2.0, NAN]), clip, kind, mask=mask)
    loss.sum().backward()
    assert loss.tolist() == [2.0, 0.0]
    assert clipped.tolist() == [False, False]
    assert value.grad is not None
    assert value.grad.tolist() == [-2.0, 0.0]


def test_value_loss_moves_the_value_only() -> None:
    value, old, returns = (torch.tensor([x], requires_grad=True) for x in (0.1, 0.0, 1.0))
    value_loss(value, old, returns, 0.2, "mse")[0].sum().backward()
    assert value.grad is not None
    assert old.grad is None
    assert returns.grad is None


def test_value_loss_refuses_shapes_that_would_broadcast() -> None:
    with pytest.raises(ValueError, match="one shape"):
        value_loss(torch.zeros(4, 1), torch.zeros(4), torch.zeros(4), None, "mse")


def test_value_loss_names_the_kinds_it_knows() -> None:
    with pytest.raises(ValueError, match="'l1'.*mse or huber"):
        value_loss(torch.zeros(1), torch.zeros(1), torch.zeros(1), None, "l1")


# KL


@pytest.mark.parametrize(("kind", "tolerance"), [("k1", 1e-6), ("k3", 1e-6), ("k2", 1e-3)])
def test_expected_kl_estimate_is_the_exact_divergence_with_its_sign(kind: str, tolerance: float) -> None:
    expected = float((P * kl_penalty(P.log(), Q.log(), kind)).sum())
    assert expected == pytest.approx(KL_P_Q, abs=tolerance)


def test_k2_is_half_the_squared_log_ratio() -> None:
    torch.testing.assert_close(kl_penalty(torch.tensor([-1.0]), torch.tensor([-4.0]), "k2"), torch.tensor([4.5]))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-3, 3, width=32), min_size=6, max_size=6))
def test_k3_expectation_equals_the_exact_kl_of_any_categorical(logits: list[float]) -> None:
    p, q = torch.tensor(logits).view(2, 3).log_softmax(-1)
    exact = float(torch.distributions.kl_divergence(*(torch.distributions.Categorical(logits=x) for x in (p, q))))
    assert float((p.exp() * kl_penalty(p, q, "k3")).sum()) == pytest.approx(exact, abs=1e-5, rel=1e-5)


def test_k3_is_never_negative_however_small_the_difference() -> None:
    d = torch.logspace(-12, 1.3, 20_000)
    for sign in (1, -1):
        assert kl_penalty(torch.zeros_like(d), sign * d, "k3").ge(0).all()


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("difference", [1e4, -1e4])
def test_kl_of_a_huge_difference_is_that_at_the_clamp(kind: str, difference: float) -> None:
    far = kl_penalty(torch.zeros(1), torch.tensor([difference]), kind)
    at_clamp = kl_penalty(torch.zeros(1), torch.tensor([math.copysign(20.0, difference)]), kind)
    assert far.isfinite().all()
    torch.testing.assert_close(far, at_clamp, rtol=0, atol=0)


def test_kl_moves_the_policy_and_not_the_reference() -> None:
    logprob, ref = torch.tensor([-1.0], requires_grad=True), torch.tensor([-0.5], requires_grad=True)
    kl_penalty(logprob, ref, "k3").sum().backward()
    torch.testing.assert_close(logprob.grad, torch.tensor([1 - math.exp(0.5)]))
    assert ref.grad is None


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_a_nan_behind_the_mask_reaches_no_kl_and_no_gradient(kind: str) -> None:
    mask = torch.tensor([True, False])
    logprob = nan_behind(mask, torch.tensor([-1.0, -1.0]))
    penalty = kl_penalty(logprob, torch.tensor([-2.0, NAN]), kind, mask)
    penalty.sum().backward()
    assert penalty[0] > 0
    assert penalty[1] == 0
    assert logprob.grad is not None
    assert logprob.grad[0] > 0
    assert logprob.grad[1] == 0


def test_kl_refuses_shapes_that_would_broadcast() -> None:
    with pytest.raises(ValueError, match="one shape"):
        kl_penalty(torch.zeros(4, 1), torch.zeros(4, 7), "k3")


def test_kl_names_the_kinds_it_knows() -> None:
    with pytest.raises(ValueError, match="'k4'.*k1, k2 or k3"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k4")


# Explained variance


@pytest.mark.parametrize("level", LEVELS)
def test_results_are_float32_for_bfloat16_inputs(level: str) -> None:
    logprob = torch.zeros(2, 2, 3, dtype=torch.bfloat16)
    ratio, mask = log_ratio(logprob, logprob, all_of(2, 2), level)
    result = policy_loss(ratio, torch.ones(2, dtype=torch.bfloat16), mask, 0.2, 0.2)
    flat = logprob.flatten()
    loss, _ = value_loss(flat, flat, flat, 0.2, "huber")
    for tensor in (ratio, result.loss, result.approx_kl, loss, kl_penalty(flat, flat, "k3")):
        assert tensor.dtype == torch.float32
