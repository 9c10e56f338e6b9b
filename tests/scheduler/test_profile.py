"""Cost models: exact where measured, monotone everywhere, robust to noise; profiles on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.profile import CostModel, Profile, ProfileError, Sample, isotonic


def fit(*points: tuple[int, int, float], memory: tuple[int, ...] = ()) -> CostModel:
    sizes = memory or (0,) * len(points)
    return CostModel.fit([Sample("s", i, d, t, m) for (i, d, t), m in zip(points, sizes, strict=True)])


def test_measured_points_are_predicted_exactly() -> None:
    model = fit((10, 1, 0.8), (40, 1, 0.85), (40, 4, 0.5), (160, 4, 1.0))
    assert model.seconds([10, 40, 40, 160], [1, 1, 4, 4]).tolist() == [0.8, 0.85, 0.5, 1.0]


def test_a_fixed_and_a_per_item_cost_are_found() -> None:
    model = fit((10, 1, 3.0), (20, 1, 4.0))  # 2 s and 0.1 s an item
    assert model.seconds([1, 15, 40], 1) == pytest.approx([2.1, 3.5, 6.0])


def test_a_lone_point_is_fixed_cost_below_and_proportional_above() -> None:
    model = fit((10, 1, 3.0))
    assert model.seconds([1, 10, 20], 1) == pytest.approx([3.0, 3.0, 6.0])


def test_below_the_first_point_time_never_gets_negative() -> None:
    model = fit((10, 1, 1.0), (20, 1, 4.0))  # the line through them is negative at 1
    assert model.seconds(1, 1) == pytest.approx(0.1)


def test_more_devices_share_the_items_of_the_busiest() -> None:
    model = fit((10, 1, 3.0), (20, 1, 4.0))
    assert model.seconds(40, [2, 3, 4]) == pytest.approx([4.0, 3.4, 3.0])  # 20, 14 and 10 items


def test_between_device_counts_the_measured_efficiency_holds() -> None:
    model = fit((8, 1, 8.0), (8, 4, 4.0))  # twice as fast on four
    assert model.seconds(8, 2) == pytest.approx(np.sqrt(8 * 4))
    assert model.seconds(8, 8) == pytest.approx(4.0)  # a lone point at load 2: all fixed cost below it


def test_outliers_do_not_move_a_point() -> None:
    model = fit(*[(8, 1, t) for t in (1.0, 1.01, 0.99, 1.0, 30.0)])
    assert model.seconds(8, 1) == pytest.approx(1.0)


def test_isotonic_regression_pools_violators() -> None:
    fitted = isotonic(np.array([1.0, 3.0, 2.0, 4.0, 3.0, 8.0]), np.array([1.0, 1.0, 1.0, 1.0, 3.0, 1.0]))
    assert fitted == pytest.approx([1.0, 2.5, 2.5, 3.25, 3.25, 8.0])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 64), st.sampled_from([1, 2, 4, 8]), st.floats(0.01, 10.0)), min_size=1, max_size=12
    )
)
def test_time_and_memory_never_fall_with_more_items(points: list[tuple[int, int, float]]) -> None:
    model = fit(*points, memory=tuple(int(1e6 * t) for _, _, t in points))
    items, devices = np.arange(1, 130)[:, None], np.arange(1, 17)
    for table in (model.seconds(items, devices), model.memory_bytes(items, devices)):
        assert table.shape == (129, 16)
        assert np.isfinite(table).all()
        assert (np.diff(table, axis=0) >= -1e-9 * table[1:]).all()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 64), st.floats(0.01, 10.0)), min_size=1, max_size=8), st.sampled_from([1, 2, 4])
)
def test_time_never_rises_with_devices_measured_at_one_count(points: list[tuple[int, float]], count: int) -> None:
    model = fit(*[(items, count, t) for items, t in points])
    table = model.seconds(np.arange(1, 100)[:, None], np.arange(1, 33))
    assert (np.diff(table, axis=1) <= 1e-9 * table[:, 1:]).all()


def test_memory_is_the_largest_seen_and_sharded_below_the_smallest_count() -> None:
    model = fit((8, 4, 1.0), (8, 4, 1.0), (16, 4, 1.0), memory=(100, 120, 110))
    assert model.memory_bytes([8, 16], 4).tolist() == [120, 120]
    assert model.memory_bytes(16, 2) == pytest.approx(240)  # as if all of it were sharded over the 4


def test_duration_quantiles_have_mean_one_and_small_calls_vary_more() -> None:
    rng = np.random.default_rng(0)
    tail = tuple(np.exp(rng.normal(0, 1, 4000)).tolist())
    model = CostModel.fit([Sample("s", 64, 1, 10.0, durations=tail)])
    few = np.array([model.sample_factor(2, rng) for _ in range(2000)])
    many = np.array([model.sample_factor(64, rng) for _ in range(2000)])
    assert few.mean() == pytest.approx(1.0, abs=0.1)
    assert many.mean() == pytest.approx(1.0, abs=0.05)
    assert few.std() > 3 * many.std()


def test_older_samples_of_a_point_fade() -> None:
    profile = Profile().add(*[Sample("s", 8, 1, 9.0)] * 4, Sample("s", 16, 1, 20.0))
    assert profile.model("s").seconds(8, 1) == 9.0
    profile.add(*[Sample("s", 8, 1, 2.0)] * 3)
    assert profile.model("s").seconds(8, 1) == 2.0  # the last five: two of 9.0, three of 2.0
    assert len(profile.samples["s"]) == 6


def test_profiles_of_several_recipes_live_in_one_file(tmp_path: Path) -> None:
    path = tmp_path / "profiles.yaml"
    first = Profile("node-a", "maniskill").add(Sample("env.step", 8, 1, 0.5, 7, (0.1, 0.2)))
    first.add_group("actor", resident_bytes=10, offload_s=1.0, onload_s=2.0)
    second = Profile("node-a", "libero").add(Sample("env.step", 8, 1, 0.25))
    for profile in (first, second, first):
        profile.save(path)
    assert Profile.load(path, "node-a", "maniskill") == first
    assert Profile.load(path, "node-a", "libero") == second
    with pytest.raises(ProfileError, match="no profile of grpo on node-a; it has 2 of others"):
        Profile.load(path, "node-a", "grpo")
    with pytest.raises(ProfileError, match="no profile of libero on node-b; it has one of it on node-a"):
        Profile.load(path, "node-b", "libero")


def test_an_unmeasured_stage_is_named() -> None:
    with pytest.raises(ProfileError, match="no measurement of 'a.run'; measured for default on here: b.run"):
        Profile().add(Sample("b.run", 1, 1, 1.0)).model("a.run")


@pytest.mark.parametrize("wrong", [(0, 1, 1.0), (1, 0, 1.0), (1, 1, -1.0), (1, 1, float("nan"))])
def test_impossible_measurements_are_refused(wrong: tuple[int, int, float]) -> None:
    with pytest.raises(ProfileError, match="is no measurement"):
        Sample("s", *wrong)
