"""Reductions: the three means by hand, and independence of how the batch is cut."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from embodied_rl.algorithms import log_ratio, normaliser, policy_loss, reduce, value_loss

NAN = float("nan")
MODES = ["token-mean", "sequence-mean", "sequence-sum-constant"]


def ragged() -> tuple[Tensor, Tensor]:
    """Losses 1 and 3 per token, sequences of 1 and 7 tokens, NaN in the padding."""
    mask = torch.arange(7) < torch.tensor([[1], [7]])
    return torch.where(mask, torch.tensor([[1.0], [3.0]]), NAN), mask


def in_one_batch(x: Tensor, mask: Tensor, mode: str, max_length: int = 8) -> Tensor:
    return reduce(x, mask, mode, normaliser(mask, mode, max_length))


@pytest.mark.parametrize(
    ("mode", "expected"), [("token-mean", 2.75), ("sequence-mean", 2.0), ("sequence-sum-constant", 1.375)]
)
def test_ragged_sequences_reduce_to_the_numbers_worked_out_by_hand(mode: str, expected: float) -> None:
    assert in_one_batch(*ragged(), mode) == pytest.approx(expected)


@pytest.mark.parametrize("mode", MODES)
def test_a_nan_behind_the_mask_reaches_no_gradient(mode: str) -> None:
    x, mask = ragged()
    x.requires_grad_()
    in_one_batch(x, mask, mode).backward()
    assert x.grad is not None
    assert x.grad[mask].gt(0).all()
    assert x.grad[~mask].eq(0).all()


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_mask_gives_zero_and_zero_gradients(mode: str) -> None:
    x = torch.full((2, 3), NAN, requires_grad=True)
    loss = in_one_batch(x, torch.zeros(2, 3, dtype=torch.bool), mode)
    loss.backward()
    assert loss == 0
    assert x.grad is not None
    assert x.grad.eq(0).all()


@pytest.mark.parametrize("mode", MODES)
def test_a_micro_batch_without_sequences_adds_nothing(mode: str) -> None:
    mask = torch.zeros(0, 3, dtype=torch.bool)
    assert normaliser(mask, mode, 8) == 0
    assert reduce(torch.zeros(0, 3), mask, mode, torch.tensor(5.0)) == 0


@pytest.mark.parametrize("mode", MODES)
def test_a_sequence_without_a_valid_token_counts_nowhere(mode: str) -> None:
    x, mask = ragged()
    longer = torch.cat([x, torch.full((1, 7), NAN)]), torch.cat([mask, torch.zeros(1, 7, dtype=torch.bool)])
    assert in_one_batch(*longer, mode) == in_one_batch(x, mask, mode)


@pytest.mark.parametrize("mode", ["token-mean", "sequence-mean"])
def test_a_flat_tensor_holds_sequences_of_one_token(mode: str) -> None:
    x, mask = torch.tensor([1.0, NAN, 4.0]), torch.tensor([True, False, True])
    assert in_one_batch(x, mask, mode) == 2.5


def test_all_trailing_dimensions_are_tokens_of_their_sequence() -> None:
    x = torch.tensor([[[1.0, 2.0], [3.0, 9.0]], [[7.0, 9.0], [9.0, 9.0]]])
    mask = torch.tensor([[[True, True], [True, False]], [[True, False], [False, False]]])
    assert in_one_batch(x, mask, "token-mean") == 13 / 4
    assert in_one_batch(x, mask, "sequence-mean") == (2 + 7) / 2
    assert in_one_batch(x, mask, "sequence-sum-constant", max_length=4) == 13 / 8


def test_an_element_of_value_zero_stays_in_the_denominator() -> None:
    assert in_one_batch(torch.tensor([0.0, 3.0]), torch.ones(2, dtype=torch.bool), "token-mean") == 1.5


def test_a_total_below_one_is_divided_by_as_it_is() -> None:
    # With gradients averaged over four ranks the total is a quarter of the count.
    assert reduce(torch.tensor([3.0]), torch.tensor([True]), "token-mean", torch.tensor(0.25)) == 12.0


def test_flags_reduce_to_their_share() -> None:
    flags, mask = torch.tensor([True, False, True]), torch.tensor([True, True, False])
    assert in_one_batch(flags, mask, "token-mean") == 0.5


@st.composite
def cut_batches(draw: st.DrawFn) -> tuple[Tensor, list[int]]:
    """A `[S, C]` mask and the sizes of the micro-batches, some of them empty."""
    sizes = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    rows = [[draw(st.booleans()) for _ in range(3)] for _ in range(sum(sizes))]
    return torch.tensor(rows, dtype=torch.bool).view(-1, 3), sizes


@settings(max_examples=60, deadline=None)
@given(cut_batches(), st.sampled_from(MODES), st.integers(0, 1000))
def test_loss_and_gradient_do_not_depend_on_the_cut_into_micro_batches(
    batch: tuple[Tensor, list[int]], mode: str, seed: int
) -> None:
    mask, sizes = batch
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn(len(mask), 3, 2, generator=generator)
    noise, target = torch.randn(2, len(mask), 3, generator=generator)
    advantage = torch.randn(len(mask), generator=generator)

    def update(sizes: list[int]) -> tuple[float, Tensor]:
        """Policy and value loss of a linear model, in micro-batches: the summed loss and its gradient."""
        weight = torch.tensor([0.3, -0.2], requires_grad=True)
        parts = range(len(sizes))
        masks, inputs, noises, targets, advantages = (x.split(sizes) for x in (mask, data, noise, target, advantage))
        total = torch.stack([normaliser(masks[i], mode, 3) for i in parts]).sum()
        loss = 0.0
        for i in parts:
            output = inputs[i] @ weight
            ratio, ratio_mask = log_ratio((0.1 * output)[..., None], (0.1 * noises[i])[..., None], masks[i], "action")
            policy = policy_loss(ratio, advantages[i], ratio_mask, 0.2, 0.28).loss
            critic, _ = value_loss(output, noises[i], targets[i], 0.2, "huber", mask=masks[i])
            part = reduce(policy + 0.5 * critic, masks[i], mode, total)
            part.backward()
            loss += float(part.detach())
        assert weight.grad is not None
        return loss, weight.grad

    loss, gradient = update([len(mask)])
    cut_loss, cut_gradient = update(sizes)
    assert cut_loss == pytest.approx(loss, rel=1e-4, abs=1e-5)
    torch.testing.assert_close(cut_gradient, gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("max_length", [None, 0])
def test_the_constant_mode_asks_for_a_max_length(max_length: int | None) -> None:
    with pytest.raises(ValueError, match="max_length"):
        normaliser(torch.ones(2, 3, dtype=torch.bool), "sequence-sum-constant", max_length)


def test_unknown_modes_are_refused_with_the_known_ones() -> None:
    mask = torch.ones(2, dtype=torch.bool)
    with pytest.raises(ValueError, match="'mean'.*token-mean"):
        normaliser(mask, "mean")
    with pytest.raises(ValueError, match="'mean'.*token-mean"):
        reduce(torch.zeros(2), mask, "mean", torch.tensor(2.0))


def test_reduce_refuses_a_mask_that_would_broadcast() -> None:
    with pytest.raises(ValueError, match="one shape"):
        reduce(torch.zeros(2, 3, 7), torch.ones(2, 3, 1, dtype=torch.bool), "token-mean", torch.tensor(6.0))


def test_a_mask_without_a_sequence_dimension_is_refused() -> None:
    with pytest.raises(ValueError, match="sequence dimension"):
        normaliser(torch.tensor(True), "token-mean")


def test_a_mask_that_is_not_bool_is_refused() -> None:
    with pytest.raises(ValueError, match="bool"):
        normaliser(torch.ones(2), "token-mean")
