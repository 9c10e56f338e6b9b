"""What is on disk of a run, read for its report. Every part but the config and the metrics may be missing."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from embodied_rl.tracking import METRICS_FILE, read_metrics


@dataclass(frozen=True)
class Run:
    """A run's directory, read once. `problems`: parts that are there but cannot be read, in words."""

    path: Path
    config: dict[str, Any]
    config_text: str
    metrics: list[dict[str, Any]]
    evaluation: dict[str, Any] | None
    before: dict[str, Any] | None
    trace: dict[str, Any] | None
    videos: list[Path]
    written_at: float
    problems: list[str]

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def command(self) -> str:
        """What trains by this configuration: train, or sft where it names demonstrations."""
        sft = self.config.get("sft")
        return "sft" if isinstance(sft, dict) and sft.get("data") else "train"

    @property
    def last(self) -> dict[str, Any]:
        return self.metrics[-1] if self.metrics else {}

    @property
    def x_key(self) -> str:
        """What curves are drawn over: env steps, or steps where the run has none."""
        return "env_steps" if any(finite(row.get("env_steps")) for row in self.metrics) else "step"

    def values(self, key: str) -> tuple[list[float], list[float]]:
        """x and y of a metric, where both are finite, x ascending."""
        x_key = self.x_key
        pairs = [(row[x_key], row[key]) for row in self.metrics if finite(row.get(x_key)) and finite(row.get(key))]
        pairs.sort(key=lambda pair: pair[0])
        return [float(x) for x, _ in pairs], [float(y) for _, y in pairs]

    def latest(self, key: str) -> float | None:
        ys = self.values(key)[1]
        return ys[-1] if ys else None

    def mean(self, key: str) -> float | None:
        """Mean over the iterations, each weighted by its duration where that is known."""
        rows = [row for row in self.metrics if finite(row.get(key))]
        weights = [row["time/iteration_s"] if finite(row.get("time/iteration_s")) else 0.0 for row in rows]
        if not sum(weights):
            weights = [1.0] * len(rows)
        return (
            sum(row[key] * weight for row, weight in zip(rows, weights, strict=True)) / sum(weights) if rows else None
        )

    @property
    def wall_s(self) -> float | None:
        """Seconds of training; where `time/wall_s` falls the run was resumed, and its parts are added up."""
        total = previous = 0.0
        ys = [row["time/wall_s"] for row in self.metrics if finite(row.get("time/wall_s"))]
        for value in ys:
            if value < previous:
                total += previous
            previous = value
        return total + previous if ys else None

    @property
    def planned_iterations(self) -> int | None:
        return self._count("train", "iterations")

    @property
    def evaluation_episodes(self) -> int | None:
        """Episodes of each evaluation during training."""
        return self._count("evaluation", "episodes")

    def _count(self, section: str, key: str) -> int | None:
        values = self.config.get(section)
        value = values.get(key) if isinstance(values, dict) else None
        return value if isinstance(value, int) and value > 0 else None

    @property
    def episodes(self) -> list[dict[str, Any]]:
        """Episodes of the final evaluation."""
        listed = (self.evaluation or {}).get("episodes")
        return [episode for episode in listed if isinstance(episode, dict)] if isinstance(listed, list) else []

    @property
    def success(self) -> str:
        """Name of the success that counts."""
        env = self.config.get("env")
        at_end = isinstance(env, dict) and env.get("success") == "at_end"
        return "success_at_end" if at_end else "success_once"

    @property
    def success_count(self) -> tuple[int, int] | None:
        """Successes and episodes of the final evaluation; None for an env that knows no success."""
        if any(self.success in episode for episode in self.episodes):
            return sum(bool(episode.get(self.success)) for episode in self.episodes), len(self.episodes)
        evaluation = self.evaluation or {}
        if finite(evaluation.get(self.success)) and finite(evaluation.get("n")) and evaluation["n"] > 0:
            return round(evaluation[self.success] * evaluation["n"]), int(evaluation["n"])
        return None


def load_run(run_dir: Path) -> Run:
    """Read a run's directory.

    Raises:
        ValueError: it is not a run's directory; the message names what is missing or damaged.
    """
    path = Path(run_dir).resolve()
    if not path.is_dir():
        raise ValueError(f"{run_dir} is not a run: there is no such directory")
    missing = [name for name in ("config.yaml", METRICS_FILE) if not (path / name).is_file()]
    if missing:
        raise ValueError(f"{run_dir} is not the directory of a run: it has no {' and no '.join(missing)}")
    problems: list[str] = []
    config_text = (path / "config.yaml").read_text(encoding="utf-8", errors="replace")
    try:
        config = yaml.safe_load(config_text)
    except yaml.YAMLError as error:
        raise ValueError(f"{path / 'config.yaml'} is not YAML: {error}") from error
    return Run(
        path=path,
        config=config if isinstance(config, dict) else {},
        config_text=config_text,
        metrics=read_metrics(path),
        evaluation=_read_object(path / "evaluation.json", problems),
        before=_read_object(path / "evaluation_before.json", problems),
        trace=_read_object(path / "trace.json", problems),
        videos=sorted((path / "videos").glob("*.mp4")),
        written_at=(path / METRICS_FILE).stat().st_mtime,
        problems=problems,
    )


def wilson_interval(successes: int, n: int, z: float = 1.959964) -> tuple[float, float]:
    """The 95 % score interval of a rate (Wilson 1927, doi:10.1080/01621459.1927.10502953)."""
    rate = successes / n
    centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _read_object(path: Path, problems: list[str]) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            return content
        problems.append(f"{path.name} is not a JSON object.")
    except ValueError as error:
        problems.append(f"{path.name} cannot be read ({error}).")
    return None
