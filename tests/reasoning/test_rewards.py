"""Reward functions, their sum, and the overlong penalty."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from reasoning.config import RewardConfig
from reasoning.data import Problem
from reasoning.rewards import Rewarder, RewardError, overlong_penalty
from reasoning.samples import EVALUATION, Completion, Group, Prompt

SEEN: list[dict[str, Any]] = []


def length_reward(prompts: list, completions: list[str], completion_ids: list, **columns: Any) -> list[float | None]:
    SEEN.append({"prompts": prompts, "completions": completions, "completion_ids": completion_ids, **columns})
    return [float(len(ids)) for ids in completion_ids]


async def slow_reward(completions: list[str], **_: Any) -> list[float | None]:
    await asyncio.sleep(0)
    return [None if "?" in text else 0.5 for text in completions]


def endless_reward(completions: list[str], **_: Any) -> list[float]:
    return [float("nan")] * len(completions)


def short_reward(**_: Any) -> list[float]:
    return [1.0]


def group() -> Group:
    texts = [("12", True), ("13", True), ("The answer is 12.", True), ("12", False)]
    completions = [Completion([1, 2, 3], [0.0] * 3, finished, text) for text, finished in texts]
    return Group(Prompt(Problem("p", "6+6?", "12", {"level": 3}), 0), [1], completions)


def rewarded(functions: dict[str, float], group: Group, **options: Any) -> list[float | None]:
    rewarder = Rewarder(RewardConfig(functions=functions, **options), max_new_tokens=4)
    with rewarder.verifier:
        return [completion.reward for completion in rewarder.reward(group).completions]


def test_accuracy_pays_right_answers_of_completions_that_ended() -> None:
    assert rewarded({"accuracy": 2.0}, group()) == [2.0, 0.0, 2.0, 0.0]


@pytest.mark.parametrize(
    ("problem", "text", "answer", "reward"),
    [
        ("What is 3 + 4?", "3 + 4", "7", 0.0),
        ("12+34=", "12+34", "46", 0.0),
        ("What is 3 + 4?", "3 + 4 = 7", "7", 1.0),
        ("Expand $(x+1)^2$.", r"\boxed{(x + 1)^2}", "x^2+2x+1", 0.0),
        ("Expand $(x+1)^2$.", r"\boxed{x^2+2x+1}", "x^2+2x+1", 1.0),
        (r"Simplify $\sqrt{12}$.", r"It is $\sqrt{12}$.", r"2\sqrt{3}", 0.0),
        ("Which is larger, $2^{10}$ or $3^5$?", "$2^{10}$", "2^{10}", 1.0),
        ("Of 50% of 8, and 4: what is 50% of 100%?", "50%", r"50\%", 1.0),
        ("Is it (A) 5 or (B) 6?", "B", "B", 1.0),
        ("Which is larger, 1/2 or 1/3?", "The answer is 1/2.", r"\frac{1}{2}", 1.0),
        (r"Which is larger, $2\sqrt{3}$ or $3\sqrt2$?", r"\boxed{3\sqrt2}", r"3\sqrt{2}", 1.0),
        ("What is 12/4?", "12/4", "3", 0.0),
        ("Reduce 4/8.", "4/8", r"\frac{1}{2}", 0.0),
        ([{"role": "user", "content": "What is 3 + 4?"}], "3 + 4", "7", 0.0),
    ],
)
def test_who_repeats_an_expression_of_the_problem_has_not_solved_it(
    problem: Any, text: str, answer: str, reward: float
) -> None:
    asked = Group(Prompt(Problem("p", problem, answer, {}), 0), [1], [Completion([1], [0.0], True, text)])
    assert rewarded({"accuracy": 1.0}, asked) == [reward]


def test_format_pays_an_answer_that_stands_alone_or_in_a_box() -> None:
    boxed = group()
    boxed.completions[1].text = r"It is \boxed{13}"
    assert rewarded({"format": 1.0}, boxed) == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("text", [r"\boxed{", r"\boxed{12", r"\boxed{}", r"The number 12 goes into \boxed"])
def test_format_does_not_pay_a_box_that_holds_nothing(text: str) -> None:
    empty = group()
    empty.completions[0].text = f"I say {text}"
    assert rewarded({"format": 1.0}, empty)[0] == 0.0


def test_accuracy_is_judged_for_evaluations_where_it_is_not_paid() -> None:
    judged, trained = group(), group()
    judged.prompt = Prompt(judged.prompt.problem, EVALUATION)
    for one in (judged, trained):
        assert rewarded({f"{__name__}:length_reward": 1.0}, one) == [3.0] * 4
    assert [completion.rewards["accuracy"] for completion in judged.completions] == [1.0, 0.0, 1.0, 0.0]
    assert all("accuracy" not in completion.rewards for completion in trained.completions)


def test_columns_do_not_replace_what_every_function_is_given() -> None:
    named = group()
    named.prompt = Prompt(Problem("p", "6+6?", "12", {"completions": "none", "prompts": "none"}), 0)
    rewarded({f"{__name__}:length_reward": 1.0}, named)
    assert SEEN[-1]["completions"][1] == "13" and SEEN[-1]["prompts"] == ["6+6?"] * 4


def test_user_functions_see_prompts_completions_ids_and_columns_and_are_weighted() -> None:
    name = f"{__name__}:length_reward"
    assert rewarded({"accuracy": 1.0, name: 0.1}, group()) == pytest.approx([1.3, 0.3, 1.3, 0.3])
    seen = SEEN[-1]
    assert seen["prompts"] == ["6+6?"] * 4 and seen["answer"] == ["12"] * 4 and seen["level"] == [3] * 4
    assert seen["completions"][1] == "13" and seen["completion_ids"] == [[1, 2, 3]] * 4


def test_asynchronous_functions_may_leave_a_completion_undecided() -> None:
    unsure = group()
    unsure.completions[0].text = "12?"
    assert rewarded({f"{__name__}:slow_reward": 1.0}, unsure) == [None, 0.5, 0.5, 0.5]


def test_a_reference_that_is_no_answer_is_never_paid() -> None:
    odd = group()
    odd.prompt = Prompt(Problem("p", "6+6?", "no idea"), 0)
    assert rewarded({"accuracy": 1.0}, odd) == [None] * 4


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("precision", "no reward function"),
        ("nowhere:reward", "cannot be imported"),
        (f"{__name__}:missing", "cannot be imported"),
        (f"{__name__}:SEEN", "not a function"),
        (f"{__name__}:short_reward", "for 4 completions"),
        (f"{__name__}:endless_reward", "reward nan; expected finite numbers"),
    ],
)
def test_functions_that_cannot_be_used_are_named(name: str, told: str) -> None:
    with pytest.raises(RewardError, match=told):
        rewarded({name: 1.0}, group())


@pytest.mark.parametrize(("length", "penalty"), [(60, 0.0), (80, 0.0), (90, 0.25), (100, 0.5)])
def test_the_overlong_penalty_grows_over_the_buffer(length: int, penalty: float) -> None:
    config = RewardConfig(overlong_buffer=20, overlong_penalty=0.5)
    assert overlong_penalty(length, 100, config) == pytest.approx(penalty)
    assert overlong_penalty(length, 100, RewardConfig()) == 0.0
