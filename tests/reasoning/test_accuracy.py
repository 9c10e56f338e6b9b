"""pass@1, avg@k, maj@k and pass@k."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from embodied_rl.report_data import wilson_interval
from reasoning.evaluate import Judged, accuracy, majority, pass_at, table, write


def judged(answers: list[str | None], reference: str = "4") -> Judged:
    verdicts: list[bool | None] = [answer == reference for answer in answers]
    texts = [f"It is {answer}" for answer in answers]
    count = len(answers)
    return Judged("p#1", "2+2?", reference, texts, answers, verdicts, [True] * count, [3] * count)


def test_pass_at_k_is_the_share_of_choices_that_hold_a_right_one() -> None:
    assert pass_at(1, 4, 1) == pytest.approx(0.25)
    assert pass_at(2, 4, 1) == pytest.approx(0.5)
    assert pass_at(2, 4, 2) == pytest.approx(1 - 1 / 6)
    assert pass_at(4, 4, 1) == 1.0 and pass_at(4, 4, 0) == 0.0


def test_more_completions_than_there_are_cannot_be_asked_for() -> None:
    with pytest.raises(ValueError, match="pass@4 of 2 completions"):
        pass_at(4, 2, 1)


def test_one_problem_says_nothing_of_others() -> None:
    estimate = accuracy([judged(["4", "5"])])["avg@2"]
    assert (estimate.low, estimate.value, estimate.high) == (0.0, 0.5, 1.0)


def test_the_majority_counts_right_answers_together_and_no_answer_not_at_all() -> None:
    assert majority(judged(["4", "4", "5", "6"]), 4)
    assert not majority(judged(["5", "5", "4", None]), 4)
    assert majority(judged([None, None, "4"]), 3)
    assert not majority(judged([None, None]), 2)
    written_otherwise = judged(["4", "5", "5", "8/2", "4.0"])
    written_otherwise.verdicts[3:] = [True, True]
    assert majority(written_otherwise, 5)


def test_wrong_answers_that_are_written_almost_alike_are_counted_together() -> None:
    assert not majority(judged(["4", "4", "5", "5.0", "x=5"]), 5)
    assert not majority(judged(["4", "4", r"\dfrac{1}{2}", r"\frac12", r"\frac{1}{2}"]), 5)
    assert not majority(judged(["4", "1/2", "0.5"]), 3)
    assert not majority(judged(["4", "1e3", "1,000"]), 3)
    assert not majority(judged(["4", "0", "-0"]), 3)
    assert majority(judged(["4", "1/0", "2/0", "4"]), 4)


def test_estimates_of_several_completions() -> None:
    found = accuracy([judged(["4", "5", "4", "4"]), judged(["5", "5", "5", "4"])])
    assert list(found) == ["pass@1", "avg@4", "maj@4", "pass@2", "pass@4"]
    assert found["pass@1"].value == 0.5 and found["avg@4"].value == 0.5 and found["maj@4"].value == 0.5
    assert found["pass@2"].value == pytest.approx((1.0 + 0.5) / 2) and found["pass@4"].value == 1.0


def test_intervals_are_score_intervals_for_shares_and_hold_the_mean() -> None:
    problems = [judged(["4"])] * 30 + [judged(["5"])] * 10
    estimate = accuracy(problems)["pass@1"]
    assert (estimate.low, estimate.high) == wilson_interval(30, 40)
    mean = accuracy([judged(["4", "5"])] * 5 + [judged(["4", "4"])] * 5)["avg@2"]
    assert mean.low < mean.value == 0.75 < mean.high


def test_an_undecided_verdict_is_not_right() -> None:
    problem = judged(["4"])
    problem.verdicts[0] = None
    assert accuracy([problem])["pass@1"].value == 0.0


def test_every_problem_is_written_with_what_was_extracted(tmp_path: Path) -> None:
    write([judged(["4", None])], tmp_path / "new" / "problems.jsonl")
    [line] = (tmp_path / "new" / "problems.jsonl").read_text().splitlines()
    assert json.loads(line)["answers"] == ["4", None]
    assert table([judged(["5"])], 3)[1] == [["2+2?", "It is 5", "5", "4", "wrong"]]
