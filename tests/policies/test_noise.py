"""Random numbers of env slots: independent of the batch, of each other, and of the right distribution."""

from __future__ import annotations

import numpy as np
import pytest

from policies import SlotNoise


def test_a_slot_draws_the_same_numbers_in_any_batch() -> None:
    together = SlotNoise(3, range(5)).normal(7)
    alone = np.concatenate([SlotNoise(3, [slot]).normal(7) for slot in range(5)])
    np.testing.assert_array_equal(together, alone)


def test_draws_go_on_from_a_stored_counter() -> None:
    whole = SlotNoise(0, [4, 9])
    first, second = whole.normal(3), whole.normal(3)
    np.testing.assert_array_equal(SlotNoise(0, [4, 9], [1, 1]).normal(3), second)
    assert not np.array_equal(first, second)


def test_slots_may_have_drawn_a_different_number_of_times() -> None:
    mixed = SlotNoise(0, [4, 9], [2, 0]).uniform(3)
    np.testing.assert_array_equal(mixed[0], SlotNoise(0, [4], [2]).uniform(3)[0])
    np.testing.assert_array_equal(mixed[1], SlotNoise(0, [9]).uniform(3)[0])


@pytest.mark.parametrize("change", ["seed", "slot", "draw"])
def test_another_seed_slot_or_draw_gives_other_numbers(change: str) -> None:
    other = {"seed": SlotNoise(1, [0]), "slot": SlotNoise(0, [1]), "draw": SlotNoise(0, [0], [1])}[change]
    assert abs(np.corrcoef(SlotNoise(0, [0]).normal(4000)[0], other.normal(4000)[0])[0, 1]) < 0.06


def test_normal_numbers_have_the_moments_and_tails_of_the_distribution() -> None:
    sample = SlotNoise(0, range(1000)).normal(200).ravel()
    assert abs(sample.mean()) < 0.01 and abs(sample.var() - 1) < 0.01
    assert abs((np.abs(sample) > 1.96).mean() - 0.05) < 0.002
    assert abs((sample**4).mean() - 3) < 0.05


def test_uniform_numbers_lie_strictly_inside_the_unit_interval_and_fill_it() -> None:
    sample = SlotNoise(0, range(1000)).uniform(100)
    assert 0 < sample.min() < 1e-4 and 1 - 1e-4 < sample.max() < 1
    counts, _ = np.histogram(sample, bins=20, range=(0, 1))
    assert np.abs(counts / sample.size - 0.05).max() < 0.003
