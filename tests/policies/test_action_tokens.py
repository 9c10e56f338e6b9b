"""Actions as tokens: against the reference implementation, and what is not a silent answer."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from policies.action_tokens import OFT_EPSILON, ActionTokens, UnknownStatistics, action_statistics, gripper_command

DATA = Path(__file__).resolve().parents[1] / "data" / "golden" / "openvla"
GOLDEN = {key: torch.from_numpy(value) for key, value in np.load(DATA / "action_tokens.npz").items()}
NORM_STATS = json.loads((DATA / "tiny" / "dataset_statistics.json").read_text())


def test_bins_ids_and_values_are_those_of_the_reference() -> None:
    tokens = ActionTokens()
    assert torch.equal(tokens.edges, GOLDEN["bins"])
    assert torch.equal(tokens.centres, GOLDEN["bin_centers"])
    assert torch.equal(tokens.encode(GOLDEN["values"]), GOLDEN["token_ids"])
    assert torch.equal(tokens.encode(GOLDEN["values_f32"]), GOLDEN["token_ids_f32"])
    assert torch.equal(tokens.decode(GOLDEN["token_ids"]), GOLDEN["decoded"])


def test_the_ends_and_the_middle() -> None:
    """31744 and 31745 share the last of 255 bins; beyond the range counts as its end."""
    tokens = ActionTokens()
    assert tokens.encode(torch.tensor([-1.0, -7.0, 0.0, 1.0, 7.0])).tolist() == [31999, 31999, 31872, 31744, 31744]
    assert tokens.decode(torch.tensor([31744, 31745, 31999])).tolist() == pytest.approx(
        [254 / 255, 254 / 255, -254 / 255]
    )


def test_a_smaller_vocabulary_and_other_bins() -> None:
    tokens = ActionTokens(vocab_size=100, num_bins=5)  # edges -1, -0.5, 0, 0.5, 1
    ids = tokens.encode(torch.tensor([-0.9, -0.1, 0.0, 0.9]))
    assert ids.tolist() == [99, 98, 97, 96]
    assert tokens.decode(ids).tolist() == [-0.75, -0.25, 0.25, 0.75]


def test_tokens_that_are_no_action_tokens_are_counted_in_a_warning() -> None:
    tokens = ActionTokens()
    with pytest.warns(RuntimeWarning, match=r"108 of 364 tokens are no action tokens \(31744 to 31999\)"):
        values = tokens.decode(GOLDEN["map_ids"])
    assert torch.equal(values, GOLDEN["map_values"])
    with pytest.warns(RuntimeWarning, match="10 of 13 tokens"):
        assert torch.equal(tokens.decode(GOLDEN["weird_ids"]), GOLDEN["weird_values"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokens.decode(torch.arange(31744, 32000))


@pytest.mark.parametrize("key", ["libero_golden_no_noops", "bridge_golden"])
def test_both_conventions_of_unnormalisation(key: str) -> None:
    statistics = action_statistics(NORM_STATS, key)
    action = statistics.unnormalise(GOLDEN["unnorm_in"])
    torch.testing.assert_close(action, GOLDEN[f"unnorm_openvla.{key}"], rtol=0, atol=1e-12)
    action = statistics.unnormalise(GOLDEN["unnorm_in"], OFT_EPSILON)
    torch.testing.assert_close(action, GOLDEN[f"unnorm_oft.{key}"], rtol=0, atol=1e-12)


def test_a_dimension_that_is_not_masked_is_left_as_it_is() -> None:
    norm_stats: dict[str, Any] = {"a": {"action": {"q01": [0.0, 0.0], "q99": [4.0, 4.0], "mask": [True, False]}}}
    assert action_statistics(norm_stats, None).unnormalise(torch.tensor([0.5, 0.5])).tolist() == [3.0, 0.5]
    del norm_stats["a"]["action"]["mask"]
    assert action_statistics(norm_stats, "a").unnormalise(torch.tensor([0.5, 0.5])).tolist() == [3.0, 3.0]
    norm_stats["a"]["action"]["mask"] = None
    assert action_statistics(norm_stats, "a").unnormalise(torch.tensor([0.5, 0.5])).tolist() == [3.0, 3.0]


def test_statistics_are_found_with_and_without_no_noops() -> None:
    assert torch.equal(
        action_statistics(NORM_STATS, "libero_golden").low, action_statistics(NORM_STATS, "libero_golden_no_noops").low
    )


def test_unknown_statistics_list_the_known_ones() -> None:
    with pytest.raises(
        UnknownStatistics, match="no action statistics of 'libero'.*bridge_golden, libero_golden_no_noops"
    ):
        action_statistics(NORM_STATS, "libero")
    with pytest.raises(UnknownStatistics, match="name the data set.*bridge_golden, libero_golden_no_noops"):
        action_statistics(NORM_STATS, None)
    with pytest.raises(UnknownStatistics, match="known: none"):
        action_statistics({}, None)


def test_statistics_of_unequal_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="q01, q99 and mask have 2, 3 and 2 entries"):
        action_statistics({"a": {"action": {"q01": [0, 0], "q99": [1, 1, 1]}}}, "a")


@pytest.mark.parametrize(
    ("action", "told"),
    [
        ({"q01": None, "q99": [1]}, "the action statistics of 'a': q01 is None; expected a list of numbers"),
        ({"q01": [0], "q99": 1}, "q99 is 1; expected a list of numbers"),
        ({"q01": [0], "q99": [None]}, r"q99 is \[None\]; expected a list of numbers"),
        ({"q01": [0], "q99": [float("nan")]}, r"q99 is \[nan\]; expected a list of numbers"),
        ({"q01": [[0]], "q99": [[1]]}, r"q01 is \[\[0\]\]; expected a list of numbers"),
        ({"q01": [0], "q99": [1], "mask": 5}, "mask is 5; expected a list of true and false"),
        ({"q01": [0], "q99": [1], "mask": ["x"]}, r"mask is \['x'\]; expected a list of true and false"),
        (None, "the action statistics of 'a' are None; expected a JSON object"),
    ],
)
def test_statistics_that_are_no_numbers_are_refused(action: object, told: str) -> None:
    with pytest.raises(ValueError, match=told + ".*dataset_statistics.json"):
        action_statistics({"a": {"action": action}}, "a")


def test_statistics_of_a_data_set_that_are_null_are_refused() -> None:
    with pytest.raises(ValueError, match="the statistics of 'a' are None; expected a JSON object"):
        action_statistics({"a": None}, "a")


def test_gripper_commands_of_the_simulators() -> None:
    torch.testing.assert_close(gripper_command(GOLDEN["gripper_in"], "libero"), GOLDEN["gripper_out"], rtol=0, atol=0)
    assert gripper_command(GOLDEN["gripper_in"], "maniskill")[:, -1].tolist() == [-1, -1, -1, 1, 1, 1]
    assert torch.equal(gripper_command(GOLDEN["gripper_in"], "as_trained"), GOLDEN["gripper_in"])
