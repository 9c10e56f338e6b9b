"""The pool of processes that compare answers, when some of them are killed from outside."""

from __future__ import annotations

import itertools

import pytest

from reasoning.verifier import Verifier, _Process

EQUAL = (r"\boxed{\sqrt{8}}", r"2\sqrt{2}")
ENDLESS = ("9^{9^{9^{9^{9}}}}", "x+1")


def killed(process: _Process) -> None:
    process._process.kill()
    process._process.wait()


@pytest.mark.parametrize("has_answered", [False, True])
def test_idle_processes_that_were_killed_are_replaced(has_answered: bool) -> None:
    with Verifier(processes=2) as verifier:
        verifier.start()
        if has_answered:
            assert verifier.verify_all([EQUAL, (r"\boxed{\sqrt{12}}", r"2\sqrt{3}")]) == [True, True]
        for process in verifier._pool:
            killed(process)
        assert verifier.verify_all([EQUAL, (r"\boxed{\sqrt{18}}", r"3\sqrt{2}")]) == [True, True]


@pytest.mark.parametrize(("deaths", "verdict", "asked"), [(1, True, 2), (9, None, 2)])
def test_a_pair_whose_process_dies_is_tried_once_more(
    monkeypatch: pytest.MonkeyPatch, deaths: int, verdict: bool | None, asked: int
) -> None:
    ask, calls = _Process.ask, itertools.count()

    def dying(process: _Process, pair: tuple[str, str]) -> None:
        number = next(calls)
        ask(process, ENDLESS if number < deaths else pair)
        if number < deaths:
            killed(process)

    monkeypatch.setattr(_Process, "ask", dying)
    with Verifier() as verifier:
        assert verifier.verify(*EQUAL) is verdict
        assert next(calls) == asked
        assert (verifier.counts.undecided, verifier.counts.timeouts) == (int(verdict is None), 0)


def test_a_process_that_was_killed_before_it_read_its_pair_ends_no_run() -> None:
    process = _Process()
    process.ask(ENDLESS)
    killed(process)
    process.ask(ENDLESS)
    process.kill()
