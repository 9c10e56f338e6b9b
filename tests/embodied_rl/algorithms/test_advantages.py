"""Advantages against numbers worked out by hand and against slow sums over single episodes."""

import math
import statistics
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from embodied_rl.algorithms import (
    chunk_gae,
    gae,
    group_advantages,
    groups_within,
    masked_moments,
    mean_and_std,
    normalise,
    zero_std_fraction,
)

NAN = float("nan")
KINDS = ["grpo", "dr_grpo", "rloo", "reinforce_baseline"]


def column(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32).unsqueeze(1)


def flags(*bits: int) -> Tensor:
    return torch.tensor(bits, dtype=torch.bool).unsqueeze(1)


# GAE


def three_steps(terminated: int, truncated: int) -> tuple[Tensor, Tensor]:
    return gae(
        column(1, 1, 1),
        column(0.5, 0.5, 0.5),
        column(0.5, 0.5, 2.0),
        flags(0, 0, terminated),
        flags(0, 0, truncated),
        gamma=0.9,
        lam=0.8,
    )


@pytest.mark.parametrize(
    ("terminated", "truncated", "last_delta"), [(1, 0, 0.5), (0, 1, 2.3), (1, 1, 0.5), (0, 0, 2.3)]
)
def test_gae_bootstraps_at_a_truncation_and_not_at_a_termination(
    terminated: int, truncated: int, last_delta: float
) -> None:
    advantage, returns = three_steps(terminated, truncated)
    middle = 0.95 + 0.72 * last_delta
    expected = column(0.95 + 0.72 * middle, middle, last_delta)
    torch.testing.assert_close(advantage, expected)
    torch.testing.assert_close(returns, expected + 0.5)


@pytest.mark.parametrize("ending", ["terminated", "truncated"])
def test_gae_trace_does_not_cross_the_end_of_an_episode(ending: str) -> None:
    end, none = flags(0, 1, 0, 0), flags(0, 0, 0, 0)
    masks = {"terminated": none, "truncated": none} | {ending: end}
    value, next_value = column(1, 2, 3, 4), column(2, 5, 4, 6)
    short = {name: mask[:2] for name, mask in masks.items()}
    both, _ = gae(column(1, 1, 9, 9), value, next_value, **masks, gamma=0.9, lam=0.8)
    alone, _ = gae(column(1, 1), value[:2], next_value[:2], **short, gamma=0.9, lam=0.8)
    torch.testing.assert_close(both[:2], alone, rtol=0, atol=0)


def test_gae_uses_no_value_of_the_observation_after_a_reset() -> None:
    def first_episode(reset_value: float) -> Tensor:
        advantage, _ = gae(
            column(1, 1, 1),
            column(0.5, 0.5, reset_value),
            column(0.5, 2.0, 0.0),
            flags(0, 0, 0),
            flags(0, 1, 0),
            gamma=0.9,
            lam=0.8,
        )
        return advantage[:2]

    torch.testing.assert_close(first_episode(0.5), first_episode(1e6), rtol=0, atol=0)


def test_gae_of_a_termination_ignores_a_nan_final_value() -> None:
    advantage, _ = gae(column(1), column(0.5), column(NAN), flags(1), flags(0), gamma=0.9, lam=0.8)
    torch.testing.assert_close(advantage, column(0.5))


def test_gae_lets_a_nan_of_a_frozen_env_reach_nothing() -> None:
    valid = flags(1, 1, 0, 0)
    advantage, returns = gae(
        column(1, 1, NAN, NAN),
        column(0.5, 0.5, NAN, NAN),
        column(0.5, 2.0, NAN, NAN),
        flags(0, 0, 0, 0),
        flags(0, 1, 0, 0),
        gamma=0.9,
        lam=0.8,
        valid=valid,
    )
    torch.testing.assert_close(advantage, column(0.95 + 0.72 * 2.3, 2.3, 0, 0))
    torch.testing.assert_close(returns, column(1.45 + 0.72 * 2.3, 2.8, 0, 0))


def test_gae_trace_does_not_pass_through_an_invalid_step() -> None:
    advantage, _ = gae(
        column(1, 7, 1),
        column(0, 0, 0),
        column(0, 0, 0),
        flags(0, 0, 0),
        flags(0, 0, 0),
        gamma=1.0,
        lam=1.0,
        valid=flags(1, 0, 1),
    )
    torch.testing.assert_close(advantage, column(1, 0, 1))


def test_gae_carries_no_gradient() -> None:
    value = column(0.5, 0.5).requires_grad_()
    advantage, returns = gae(column(1, 1), value, value, flags(0, 1), flags(0, 0), gamma=0.9, lam=0.8)
    assert not advantage.requires_grad
    assert not returns.requires_grad


@pytest.mark.parametrize("name", ["reward", "value", "next_value", "terminated", "truncated", "valid"])
def test_gae_refuses_shapes_that_would_broadcast(name: str) -> None:
    numbers = dict.fromkeys(["reward", "value", "next_value"], torch.zeros(3, 4))
    masks = dict.fromkeys(["terminated", "truncated", "valid"], torch.ones(3, 4, dtype=torch.bool))
    tensors = numbers | masks
    tensors[name] = tensors[name][:, :1]
    with pytest.raises(ValueError, match="one shape"):
        gae(**tensors, gamma=0.9, lam=0.8)


def test_gae_refuses_flags_that_are_not_bool() -> None:
    with pytest.raises(ValueError, match="truncated must be a bool"):
        gae(column(1), column(1), column(1), flags(0), column(0), 0.9, 0.8)


@st.composite
def rollouts(draw: st.DrawFn) -> dict[str, Tensor]:
    steps, envs = draw(st.integers(1, 8)), draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    end_probability = draw(st.sampled_from([0.1, 0.4, 0.8]))
    numbers = torch.randn(3, steps, envs, generator=generator)
    ends = torch.rand(2, steps, envs, generator=generator) < end_probability
    names = ["reward", "value", "next_value", "terminated", "truncated"]
    return dict(zip(names, [*numbers, *ends], strict=True))


def episode_end(rollout: dict[str, Tensor], t: int, n: int) -> int:
    done = rollout["terminated"] | rollout["truncated"]
    return next((k for k in range(t, len(done)) if done[k, n]), len(done) - 1)


def bootstrap_value(rollout: dict[str, Tensor], t: int, n: int) -> float:
    return 0.0 if rollout["terminated"][t, n] else float(rollout["next_value"][t, n])


@settings(max_examples=40, deadline=None)
@given(rollouts(), st.floats(0, 1), st.floats(0, 1))
def test_gae_is_the_sum_of_discounted_deltas_of_each_episode(
    rollout: dict[str, Tensor], gamma: float, lam: float
) -> None:
    advantage, _ = gae(**rollout, gamma=gamma, lam=lam)
    steps, envs = advantage.shape
    for n in range(envs):
        for t in range(steps):
            expected = sum(
                (gamma * lam) ** (k - t)
                * (
                    float(rollout["reward"][k, n])
                    + gamma * bootstrap_value(rollout, k, n)
                    - float(rollout["value"][k, n])
                )
                for k in range(t, episode_end(rollout, t, n) + 1)
            )
            assert float(advantage[t, n]) == pytest.approx(expected, rel=1e-4, abs=1e-4)


@settings(max_examples=40, deadline=None)
@given(rollouts(), st.floats(0, 1))
def test_gae_return_with_lambda_one_is_the_discounted_sum_of_rewards(rollout: dict[str, Tensor], gamma: float) -> None:
    # Within an episode the next observation's value is the next step's value, as in a real rollout.
    done = rollout["terminated"] | rollout["truncated"]
    following = torch.cat([rollout["value"][1:], rollout["next_value"][-1:]])
    rollout = rollout | {"next_value": torch.where(done, rollout["next_value"], following)}
    _, returns = gae(**rollout, gamma=gamma, lam=1.0)
    steps, envs = returns.shape
    for n in range(envs):
        for t in range(steps):
            end = episode_end(rollout, t, n)
            expected = sum(gamma ** (k - t) * float(rollout["reward"][k, n]) for k in range(t, end + 1))
            expected += gamma ** (end + 1 - t) * bootstrap_value(rollout, end, n)
            assert float(returns[t, n]) == pytest.approx(expected, rel=1e-4, abs=1e-4)


# Groups


def one_group(scores: list[float], kind: str) -> Tensor:
    return group_advantages(torch.tensor(scores), torch.zeros(len(scores), dtype=torch.long), kind)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("grpo", [1.5, -0.5, -0.5, -0.5]),
        ("dr_grpo", [0.75, -0.25, -0.25, -0.25]),
        ("rloo", [1.0, -1 / 3, -1 / 3, -1 / 3]),
        ("reinforce_baseline", [1.5, -0.5, -0.5, -0.5]),
    ],
)
def test_one_success_in_four_gives_the_advantages_worked_out_by_hand(kind: str, expected: list[float]) -> None:
    torch.testing.assert_close(one_group([1, 0, 0, 0], kind), torch.tensor(expected), rtol=0, atol=4e-6)


def test_reinforce_baseline_whitens_over_the_batch_and_not_over_the_group() -> None:
    score, group = torch.tensor([0.0, 2.0, 0.0, 4.0]), torch.tensor([0, 0, 1, 1])
    std = math.sqrt((1 + 1 + 4 + 4) / 3)
    torch.testing.assert_close(
        group_advantages(score, group, "reinforce_baseline"),
        torch.tensor([-1.0, 1.0, -2.0, 2.0]) / std,
        rtol=1e-5,
        atol=0,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("score", [1.0, 0.1, 1e6 + 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_group_of_equal_scores_gets_exactly_zero(kind: str, score: float, dtype: torch.dtype) -> None:
    # Beside a group with signal, and of a size whose mean is not exact in binary.
    scores = torch.tensor([score] * 7 + [0.0, 1.0], dtype=dtype)
    advantage = group_advantages(scores, torch.tensor([3] * 7 + [4, 4]), kind)
    assert advantage[:7].eq(0).all()
    assert advantage[7:].ne(0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_of_one_gets_zero(kind: str) -> None:
    advantage = group_advantages(torch.tensor([5.0, 0.0, 1.0]), torch.tensor([9, 2, 2]), kind)
    assert advantage[0] == 0
    assert advantage[1:].ne(0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_advantages_of_nearly_equal_scores_stay_finite_and_small(kind: str) -> None:
    scores = torch.full((8,), 0.1)
    scores[3] = torch.nextafter(scores[3], torch.tensor(1.0))
    advantage = one_group(scores.tolist(), kind)
    assert advantage.isfinite().all()
    assert advantage.abs().max() < math.sqrt(8)


def test_an_element_equal_to_the_group_mean_still_counts() -> None:
    # Dropping the 0.5 would leave (0, 1) with std 0.7071 instead of 0.5.
    torch.testing.assert_close(one_group([0, 0.5, 1], "grpo"), torch.tensor([-1.0, 0, 1]), rtol=0, atol=4e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_an_invalid_nan_enters_no_group_statistic(kind: str) -> None:
    group = torch.tensor([0, 0, 0, 1, 1])
    valid = torch.tensor([True, False, True, True, True])
    with_nan = group_advantages(torch.tensor([1.0, NAN, 0.0, 2.0, 5.0]), group, kind, valid=valid)
    without = group_advantages(torch.tensor([1.0, 0.0, 2.0, 5.0]), group[valid], kind)
    torch.testing.assert_close(with_nan[valid], without, rtol=0, atol=0)
    assert with_nan[1] == 0


grouped_scores = st.lists(st.tuples(st.integers(-3, 3), st.floats(-10, 10, width=32)), min_size=1, max_size=16)


@settings(max_examples=60, deadline=None)
@given(grouped_scores, st.sampled_from(KINDS), st.randoms(use_true_random=False))
def test_group_advantages_follow_a_permutation_of_the_batch(
    pairs: list[tuple[int, float]], kind: str, random: Random
) -> None:
    group, score = torch.tensor([g for g, _ in pairs]), torch.tensor([s for _, s in pairs])
    order = list(range(len(pairs)))
    random.shuffle(order)
    straight = group_advantages(score, group, kind)[order]
    torch.testing.assert_close(group_advantages(score[order], group[order], kind), straight, rtol=1e-4, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(grouped_scores)
def test_group_advantages_agree_with_a_loop_over_the_groups(pairs: list[tuple[int, float]]) -> None:
    group, score = torch.tensor([g for g, _ in pairs]), torch.tensor([s for _, s in pairs])
    results = {kind: group_advantages(score, group, kind) for kind in ("grpo", "dr_grpo", "rloo")}
    for i, (name, own) in enumerate(pairs):
        members = [s for g, s in pairs if g == name]
        others = [s for j, (g, s) in enumerate(pairs) if g == name and j != i]
        centred = own - statistics.fmean(members) if others else 0.0
        std = statistics.stdev(members) if others else 0.0
        approx = {"rel": 1e-3, "abs": 1e-5}
        assert float(results["dr_grpo"][i]) == pytest.approx(centred, **approx)
        assert float(results["grpo"][i]) == pytest.approx(centred / (std + 1e-6), **approx)
        assert float(results["rloo"][i]) == pytest.approx(own - statistics.fmean(others or [own]), **approx)


def test_group_advantages_refuse_a_two_dimensional_score() -> None:
    with pytest.raises(ValueError, match=r"\[B\]"):
        group_advantages(torch.zeros(2, 4), torch.zeros(2, 4, dtype=torch.long), "grpo")


def test_group_advantages_name_the_kinds_they_know() -> None:
    with pytest.raises(ValueError, match="'ppo'.*grpo, dr_grpo, rloo"):
        one_group([0, 1], "ppo")


def test_zero_std_fraction_counts_groups_and_not_entries() -> None:
    score = torch.tensor([0.1, 0.1, 0.1, 0.0, 1.0, 0.3])
    assert zero_std_fraction(score, torch.tensor([7, 7, 7, 2, 2, 5])) == pytest.approx(2 / 3)


def test_zero_std_fraction_leaves_out_invalid_entries_and_empty_groups() -> None:
    score, group = torch.tensor([1.0, NAN, 0.0, 1.0, NAN]), torch.tensor([0, 0, 1, 1, 2])
    assert zero_std_fraction(score, group, torch.tensor([True, False, True, True, False])) == 0.5
    assert zero_std_fraction(score, group, torch.zeros(5, dtype=torch.bool)) == 0.0
    for equal in (-1.0, 1.0):
        score = torch.tensor([equal, NAN, equal])
        assert zero_std_fraction(score, torch.zeros(3), torch.tensor([True, False, True])) == 1.0


def test_groups_within_keeps_the_groups_on_and_between_the_bounds() -> None:
    tenth = [True] + [False] * 9
    success = torch.tensor(tenth + [False] * 4 + [True] * 4 + [True, False])
    group = torch.tensor([3] * 10 + [1] * 4 + [2] * 4 + [0] * 2)
    assert groups_within(success, group, 0.1, 0.9).tolist() == [True] * 10 + [False] * 8 + [True] * 2


def test_groups_within_keeps_a_group_on_the_upper_bound() -> None:
    success = torch.tensor([1.0] * 9 + [0.0])
    assert groups_within(success, torch.zeros(10, dtype=torch.long), 0.1, 0.9).all()


def test_groups_within_drops_invalid_entries() -> None:
    success, valid = torch.tensor([1.0, NAN, 0.0]), torch.tensor([True, False, True])
    kept = groups_within(success, torch.zeros(3, dtype=torch.long), 0.4, 0.6, valid)
    assert kept.tolist() == [True, False, True]


# Normalisation


def test_normalise_uses_valid_entries_only_and_clears_the_rest() -> None:
    x = torch.tensor([[1.0, 3.0], [NAN, 5.0]])
    mask = torch.tensor([[True, True], [False, True]])
    torch.testing.assert_close(normalise(x, mask), torch.tensor([[-1.0, 0.0], [0.0, 1.0]]))


def test_normalise_counts_an_entry_whose_value_is_zero() -> None:
    normal = normalise(torch.tensor([0.0, 2.0, 4.0]), torch.ones(3, dtype=torch.bool))
    torch.testing.assert_close(normal, torch.tensor([-1.0, 0.0, 1.0]))


def test_normalise_of_one_valid_entry_is_zero() -> None:
    assert normalise(torch.tensor([0.1, NAN]), torch.tensor([True, False])).tolist() == [0.0, 0.0]


def test_normalise_of_no_valid_entry_is_zero() -> None:
    assert normalise(torch.full((2,), NAN), torch.zeros(2, dtype=torch.bool)).tolist() == [0.0, 0.0]


def test_normalise_of_equal_entries_is_finite_and_tiny() -> None:
    # The sum of squares minus the mean part rounds to -9e-16 here.
    x = torch.full((3,), 1.3947678876998482, dtype=torch.float64)
    assert normalise(x, torch.ones(3, dtype=torch.bool)).abs().max() < 1e-6


def test_normalise_keeps_a_small_spread_of_large_values() -> None:
    x = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(normalise(1e8 + x, torch.ones(3, dtype=torch.bool)), x.float())


def test_mean_and_std_of_no_entry_are_zero() -> None:
    nothing = masked_moments(torch.full((2,), NAN), torch.zeros(2, dtype=torch.bool))
    assert mean_and_std(*nothing) == (0, 0)


def test_normalise_returns_float32_for_bfloat16_advantages() -> None:
    x = torch.tensor([1.0, 3.0, 5.0], dtype=torch.bfloat16)
    normal = normalise(x, torch.ones(3, dtype=torch.bool))
    assert normal.dtype == torch.float32
    torch.testing.assert_close(normal, torch.tensor([-1.0, 0.0, 1.0]))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(-100, 100), st.booleans()), min_size=2, max_size=12), st.data())
def test_normalise_with_summed_moments_does_not_depend_on_the_ranks(
    pairs: list[tuple[int, bool]], data: st.DataObject
) -> None:
    x = torch.tensor([float(number) if valid else NAN for number, valid in pairs])
    mask = torch.tensor([valid for _, valid in pairs])
    cut = data.draw(st.integers(0, len(pairs)))
    ranks = [slice(0, cut), slice(cut, None)]
    moments = [torch.stack(masked_moments(x[rank], mask[rank])) for rank in ranks]
    mean, std = mean_and_std(*(moments[0] + moments[1]))
    parts = torch.cat([normalise(x[rank], mask[rank], mean, std) for rank in ranks])
    torch.testing.assert_close(parts, normalise(x, mask), rtol=1e-4, atol=1e-4)


def test_normalise_refuses_a_mean_without_a_std() -> None:
    with pytest.raises(ValueError, match="both"):
        normalise(torch.zeros(2), torch.ones(2, dtype=torch.bool), mean=0.0)


def test_normalise_refuses_a_mask_that_would_broadcast() -> None:
    with pytest.raises(ValueError, match="one shape"):
        normalise(torch.zeros(2, 3), torch.ones(2, 1, dtype=torch.bool), mean=0.0, std=1.0)


def test_masked_moments_of_three_and_four_are_two_seven_and_twenty_five() -> None:
    count, total, squared = masked_moments(torch.tensor([3.0, NAN, 4.0]), torch.tensor([True, False, True]))
    assert (count, total, squared) == (2, 7, 25)


class TestChunks:
    """Two chunks of two actions; the episode ends at the first action of the second chunk."""

    REWARD = torch.tensor([[[1.0, 2.0]], [[4.0, torch.nan]]])  # [T, N, C]
    VALID = torch.tensor([[[True, True]], [[True, False]]])
    END = torch.tensor([[[False, False]], [[True, False]]])
    NONE = torch.zeros(2, 1, 2, dtype=torch.bool)
    NEXT = torch.tensor([[0.5], [3.0]])  # V(second observation), V(final observation)

    def test_a_value_for_each_chunk(self) -> None:
        value = torch.tensor([[0.25], [0.5]])
        advantage, returns = chunk_gae(
            self.REWARD, value, self.NEXT, self.END, self.NONE, self.VALID, gamma=0.9, lam=0.8
        )
        last = 4.0 - 0.5
        assert advantage.flatten().tolist() == pytest.approx([3.0 + 0.9 * 0.5 - 0.25 + 0.72 * last, last])
        assert torch.equal(returns, advantage + value)

    @pytest.mark.parametrize(("truncated", "last"), [(False, 4.0 - 0.5), (True, 4.0 + 0.9 * 3.0 - 0.5)])
    def test_a_value_for_each_action(self, truncated: bool, last: float) -> None:
        value = torch.tensor([[[0.25, 0.75]], [[0.5, torch.nan]]])
        flags = (self.NONE, self.END) if truncated else (self.END, self.NONE)
        advantage, _ = chunk_gae(self.REWARD, value, self.NEXT, *flags, self.VALID, gamma=0.9, lam=0.8)
        second = 2.0 + 0.9 * 0.5 - 0.75 + 0.72 * last
        first = 1.0 + 0.9 * 0.75 - 0.25 + 0.72 * second
        assert advantage.flatten().tolist() == pytest.approx([first, second, last, 0.0])

    def test_one_action_is_the_same_either_way(self) -> None:
        reward, value = torch.rand(5, 3, 1), torch.rand(5, 3)
        end, none, valid = torch.rand(5, 3, 1) < 0.3, torch.zeros(5, 3, 1, dtype=torch.bool), torch.ones(5, 3, 1) > 0
        arguments = (torch.rand(5, 3), end, none, valid, 0.9, 0.8)
        whole, single = (chunk_gae(reward, v, *arguments)[0] for v in (value, value[..., None]))
        torch.testing.assert_close(whole, single[..., 0])

    def test_shapes_that_do_not_fit_are_refused(self) -> None:
        with pytest.raises(ValueError, match="one shape"):
            chunk_gae(self.REWARD, torch.zeros(2, 1, 3), self.NEXT, self.END, self.NONE, self.VALID, 0.9, 0.8)
