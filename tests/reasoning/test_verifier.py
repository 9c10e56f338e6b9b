"""Verification of answers: the public cases, hostile ones, and the life of the pool."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from answer_cases import (
    CASES,
    EQUATED,
    GOLD,
    HOSTILE,
    LAZY,
    LISTS,
    MIXED,
    NOTATION,
    ODD,
    RELATIONS,
    REST,
    SIZES,
    SPELLINGS,
    UNITS,
)
from completion_cases import (
    CHOICES,
    DENIED,
    FRAGMENTS,
    LATEST,
    LINKED,
    NO_CHOICES,
    SAID,
    SENTENCES,
    SIGNS,
    WRITTEN,
)

from reasoning.extraction import answer_of
from reasoning.verifier import Verifier

TABLES = [
    *[CASES, NOTATION, SIZES, MIXED, UNITS, RELATIONS, SPELLINGS, REST, EQUATED, LISTS],
    *[WRITTEN, LATEST, SENTENCES, FRAGMENTS, SAID, DENIED, LINKED, SIGNS],
]


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    with Verifier(timeout_s=20.0) as verifier:
        yield verifier


@pytest.mark.parametrize(
    ("prediction", "gold", "verdict"),
    [case for cases in TABLES for case in cases],
)
def test_reported_cases(verifier: Verifier, prediction: str, gold: str, verdict: bool | None) -> None:
    assert verifier.verify(prediction, gold) is verdict


@pytest.mark.parametrize("text", CHOICES)
def test_a_choice_is_read_however_it_is_named(verifier: Verifier, text: str) -> None:
    assert verifier.verify_all([(text, "C"), (text, "D")]) == [True, False]


@pytest.mark.parametrize("text", NO_CHOICES)
def test_what_is_not_chosen_is_no_choice(verifier: Verifier, text: str) -> None:
    assert verifier.verify_all([(text, letter) for letter in "ACD"]) == [False] * 3


def test_the_order_of_equal_answers_makes_no_difference(verifier: Verifier) -> None:
    answers = [(p, g) for p, g, verdict in CASES if verdict and answer_of(p) == p]
    assert verifier.verify_all([(gold, prediction) for prediction, gold in answers]) == [True] * len(answers)


@pytest.mark.parametrize(
    "gold", [*GOLD, *ODD, *(gold for _, gold, verdict in [*CASES, *WRITTEN, *NOTATION] if verdict is not None)]
)
def test_an_answer_equals_itself(verifier: Verifier, gold: str) -> None:
    assert verifier.verify(gold, gold) is True


def test_a_completion_that_was_cut_off_has_no_answer(verifier: Verifier) -> None:
    assert verifier.verify(None, "4") is False
    assert verifier.verify(r"so we get \boxed{4", "7") is False


def test_an_endless_comparison_is_stopped_and_reported_and_the_pool_lives() -> None:
    with Verifier(timeout_s=2.0) as verifier:
        assert verifier.verify_all([(LAZY, "x+1"), ("1+x", "x+1"), ("2+x", "x+1")]) == [None, True, False]
        assert (verifier.counts.timeouts, verifier.counts.undecided) == (1, 1)
        assert (verifier.counts.right, verifier.counts.wrong) == (1, 1)


def test_hostile_strings_are_never_right_and_leave_the_pool_alive() -> None:
    with Verifier(processes=2, timeout_s=0.5) as verifier:
        predicted = verifier.verify_all([(text, r"\frac{1}{7}") for text in HOSTILE])
        as_gold = verifier.verify_all([("4", text) for text in HOSTILE])
        assert len(predicted) == len(as_gold) == len(HOSTILE)
        assert set(predicted) | set(as_gold) <= {False, None}
        assert (verifier.counts.right, verifier.counts.wrong + verifier.counts.undecided) == (0, 2 * len(HOSTILE))
        verifier.timeout_s = 20.0
        assert verifier.verify("1/7", r"\frac{1}{7}") is True


def test_random_hostile_strings_leave_the_pool_alive_and_its_memory_bounded() -> None:
    draw = random.Random(0)
    pieces = [
        r"\frac{",
        "}{",
        "}",
        r"\sqrt{",
        r"\boxed{",
        "(",
        ")",
        "^",
        "x",
        "1",
        "9",
        "+",
        "=",
        r"\pm",
        "!",
        ",",
        "%",
        "∞",
    ]
    pairs = [("".join(draw.choices(pieces, k=draw.choice([3, 10, 40, 400]))), draw.choice(GOLD)) for _ in range(200)]
    others = psutil.Process().children()
    with Verifier(timeout_s=0.5) as verifier:
        assert verifier.verify_all(pairs).count(True) <= 2  # a gold answer may come up by chance
        pool = [child for child in psutil.Process().children() if child not in others]
        memory = sum(child.memory_info().rss for child in pool)
        verifier.timeout_s = 20.0
        assert verifier.verify("2/14", r"\frac{1}{7}") is True and memory < 1e9


def test_a_module_of_the_same_name_in_the_working_directory_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reasoning.py").write_text("raise SystemExit")
    monkeypatch.chdir(tmp_path)
    with Verifier() as verifier:
        assert verifier.verify("1/2", r"\frac{2}{4}") is True


@pytest.mark.parametrize(
    ("does", "start_s", "told"),
    [("exec sleep 600", 0.0, "has not started within 0 s: is it too busy"), ("exit 1", 600.0, "pip install")],
)
def test_a_process_that_is_slow_is_told_from_one_that_cannot_start(
    does: str, start_s: float, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{does}\n")
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    monkeypatch.setattr("reasoning.verifier.START_S", start_s)
    with Verifier() as verifier, pytest.raises(RuntimeError, match=told):
        verifier.verify("1/2", r"\frac{2}{4}")


def test_works_in_a_thread() -> None:
    found = []

    def work() -> None:
        with Verifier() as verifier:
            found.append(verifier.verify("1/2", r"\frac{2}{4}"))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [True]
