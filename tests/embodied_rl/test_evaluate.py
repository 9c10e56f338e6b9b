"""What is recorded of an evaluation: the success that counts is the one that the env's configuration names."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from embodied_rl import video
from embodied_rl.config import Config
from embodied_rl.evaluate import describe, evaluation_metrics, record_videos, write_record
from embodied_rl.team import Team
from embodied_rl.tracking import NullTracker
from envs.base import Episode

# Of four episodes three succeed, and one of these is a success at its end too.
OUTCOMES = [(False, False), (True, False), (True, True), (True, False)]
EPISODES = [Episode(i, 10 + i, None, "t", 5, float(i), once, at_end) for i, (once, at_end) in enumerate(OUTCOMES)]


class FakeTeam:
    score = Team.score

    def __init__(self, success: str, has_success: bool = True) -> None:
        self.config = Config(env={"success": success})
        self.spec: Any = SimpleNamespace(has_success=has_success)
        self.server_versions: dict[str, Any] = {}

    def render(self, episodes: list[Episode]) -> list[np.ndarray]:
        return [np.zeros((2, 4, 4, 3), np.uint8) for _ in episodes]


@pytest.mark.parametrize(
    ("success", "successes", "says"),
    [("once", 3, "success 0.750 (3/4"), ("at_end", 1, "success at the end 0.250 (1/4")],
)
def test_the_success_that_counts_is_recorded(tmp_path: Path, success: str, successes: int, says: str) -> None:
    record = write_record(tmp_path, FakeTeam(success), EPISODES, 0, True, "")
    assert record == json.loads((tmp_path / "evaluation.json").read_text()) | {"interval_95": record["interval_95"]}
    assert (record["n"], record["successes"], record["score"]) == (4, successes, f"success_{success}")
    assert (record["success_once"], record["success_at_end"]) == (0.75, 0.25)
    assert describe(record).startswith(says)


def test_an_env_without_success_is_judged_by_its_return(tmp_path: Path) -> None:
    record = write_record(tmp_path, FakeTeam("once", has_success=False), EPISODES, 0, True, "")
    assert (record["successes"], record["score"], record["return"]) == (None, "return", 1.5)
    assert describe(record).startswith("return 1.5 over 4 episodes")


def test_of_each_env_of_a_mix_that_success_is_told() -> None:
    metrics = evaluation_metrics(EPISODES, "success_at_end", by_env=True)
    assert metrics["eval/success_at_end/"] == 0.25 and "eval/success_once/" not in metrics


@pytest.mark.parametrize(
    ("success", "films"), [("once", ["10_failure", "11_success"]), ("at_end", ["10_failure", "12_success"])]
)
def test_films_show_a_failure_and_a_success_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, success: str, films: list[str]
) -> None:
    monkeypatch.setattr(video, "write_mp4", lambda *_: None)
    paths, why_none = record_videos(FakeTeam(success), EPISODES, 2, tmp_path, NullTracker(), 1)
    assert [path.stem.removeprefix("seed_") for path in paths] == films and not why_none
