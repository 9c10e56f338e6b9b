"""What a user sees while training, on a terminal and in a log file."""

from __future__ import annotations

import pytest

from embodied_rl.progress import TrainProgress, duration


def test_without_a_terminal_few_lines_are_printed_and_always_the_last(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with TrainProgress(100, line_every_s=3600) as progress:
        for iteration in range(1, 101):
            metrics = {"rollout/success_once": 0.5, "rollout/return": 1.25, "perf/env_steps_per_s": 1234.4}
            progress.update(iteration, iteration * 288, metrics)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "iteration   1/100  288 env steps  1,234/s  success 50%  return 1.25"
    assert lines[1].startswith("iteration 100/100  28,800 env steps  1,234/s  success 50%  return 1.25")
    assert len(lines) == 2


def test_a_run_that_stops_early_still_prints_its_last_state(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), TrainProgress(100, line_every_s=3600) as progress:
        progress.update(1, 10, {})
        progress.update(2, 20, {"rollout/return": float("nan")})
        raise KeyboardInterrupt
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("iteration   2/100  20 env steps") and "return" not in last


def test_fine_tuning_shows_what_it_measures_and_no_env_steps(capsys: pytest.CaptureFixture[str]) -> None:
    with TrainProgress(9) as progress:
        metrics = {"losses/imitation": 1.234, "held_out/token_accuracy": 0.5, "held_out/action_l1": 0.125}
        progress.update(1, 0, metrics)
    assert capsys.readouterr().out == "iteration 1/9  loss 1.23  tokens right 50%  distance 0.125\n"


def test_on_a_terminal_a_bar_shows_the_count(capsys: pytest.CaptureFixture[str]) -> None:
    with TrainProgress(4, start_iteration=1, terminal=True) as progress:
        progress.update(2, 576, {"rollout/success_once": 0.25})
        progress.update(3, 864, {"rollout/success_once": 0.75})
    shown = capsys.readouterr().out
    assert "3/4" in shown and "864 env steps" in shown and "success 75%" in shown


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "0.4 s"), (59.6, "1 min 00 s"), (185, "3 min 05 s"), (7620, "2 h 07 min")]
)
def test_durations_read_like_speech(seconds: float, words: str) -> None:
    assert duration(seconds) == words
