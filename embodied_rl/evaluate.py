"""Success rates on seeds that training never uses, with their interval, record and videos."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from embodied_rl.config import Config
from embodied_rl.report_data import wilson_interval
from embodied_rl.tracking import Tracker
from envs.base import EnvError, Episode, evaluation_seed

VALIDATION_SEED = 0  # evaluations during training
TEST_SEED = 1_000_000  # the final evaluation: seeds that no decision of the run has seen
FINAL, BEFORE = "evaluation.json", "evaluation_before.json"  # the files of a run's evaluations at its end and its start
VIDEO_FPS = 10  # where the env does not say how fast its time runs
HOLD_S = 1.5  # how long a video stays on its last frame


def evaluation_metrics(
    episodes: Sequence[Episode], score: str, prefix: str = "eval", by_env: bool = False
) -> dict[str, float]:
    """Means over episodes under the names of the metrics files; empty without episodes.

    Args:
        score: which of them counts, `success_once`, `success_at_end` or `return`, of an env that knows no success.
        by_env: it, of each env too.
    """
    if not episodes:
        return {}
    mean = lambda name: sum(float(getattr(episode, name)) for episode in episodes) / len(episodes)  # noqa: E731
    metrics = {f"{prefix}/return": mean("episode_return"), f"{prefix}/episode_length": mean("length")}
    if score != "return":
        metrics |= {
            f"{prefix}/success_once": mean("success_once"),
            f"{prefix}/success_at_end": mean("success_at_end"),
        }
    for env in sorted({episode.env for episode in episodes}) if by_env else ():
        own = evaluation_metrics([episode for episode in episodes if episode.env == env], score, prefix)
        metrics[f"{prefix}/{score}/{env}"] = own[f"{prefix}/{score}"]
    return metrics


def write_record(
    run_dir: Path,
    team: Any,
    episodes: Sequence[Episode],
    base_seed: int,
    deterministic: bool,
    checkpoint: str,
    file: str = FINAL,
) -> dict[str, Any]:
    """Write `record_of` to a file such as `evaluation.json`, and return it."""
    record = record_of(team, episodes, base_seed, deterministic, checkpoint)
    write(record, run_dir / file)
    return record


def record_of(
    team: Any, episodes: Sequence[Episode], base_seed: int, deterministic: bool, checkpoint: str
) -> dict[str, Any]:
    """Every episode, the rates, and the fingerprint of what was evaluated.

    Args:
        team: whose episodes these are.
        base_seed, deterministic: as `evaluate` of it was given.
    """
    config, has_success, score = team.config, team.spec.has_success, team.score
    successes = sum(getattr(episode, score) for episode in episodes) if has_success else 0
    record: dict[str, Any] = {
        "n": len(episodes),
        "score": score,
        "successes": successes if has_success else None,
        "interval_95": wilson_interval(successes, len(episodes)) if has_success else None,
        "seeds": {"first": evaluation_seed(base_seed, 0), "count": len(episodes), "base": base_seed},
        "fingerprint": {
            "env": config.env.model_dump(mode="json"),
            "deterministic": deterministic,
            "checkpoint": checkpoint,
            "versions": {
                name: _version(name) for name in ("embodied-rl", "mani_skill", "sapien", "gymnasium", "torch")
            },
            "servers": team.server_versions,
        },
        "episodes": [_episode_record(episode, has_success, bool(config.env.mix)) for episode in episodes],
    }
    for key, value in evaluation_metrics(episodes, score, "", bool(config.env.mix)).items():
        record[key.removeprefix("/")] = value
    return record


def write(record: dict[str, Any], path: Path) -> None:
    """Write a record whole or not at all."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(json.dumps(record, indent=1))
    os.replace(temporary, path)


def _episode_record(episode: Episode, has_success: bool, of_mix: bool) -> dict[str, Any]:
    success = {"success_once": episode.success_once, "success_at_end": episode.success_at_end} if has_success else {}
    about = {"seed": episode.seed, **({"env": episode.env} if of_mix else {})}
    return {**about, **success, "return": episode.episode_return, "length": episode.length}


def describe(record: dict[str, Any]) -> str:
    """One line for the console."""
    if record["successes"] is None:
        return f"return {record['return']:.1f} over {record['n']} episodes on seeds that training never used"
    low, high = record["interval_95"]
    counts = f"{record['successes']}/{record['n']}, 95% interval {low:.3f} to {high:.3f}"
    when = " at the end" if record["score"] == "success_at_end" else ""
    return f"success{when} {record[record['score']]:.3f} ({counts}) on seeds that training never used"


def compare(before: dict[str, Any], after: dict[str, Any]) -> str:
    """One line for the console: by how many points success has risen, with Newcombe's interval (1998, method 10)."""
    (low_0, high_0), (low_1, high_1) = before["interval_95"], after["interval_95"]
    first, last = before["successes"] / before["n"], after["successes"] / after["n"]
    low = last - first - math.hypot(last - low_1, high_0 - first)
    high = last - first + math.hypot(high_1 - last, first - low_0)
    counts = f"from {before['successes']}/{before['n']} to {after['successes']}/{after['n']}"
    return (
        f"change      {100 * (last - first):+.0f} points, {counts} (95% interval {100 * low:+.0f} to {100 * high:+.0f})"
    )


def record_videos(
    team: Any, episodes: Sequence[Episode], count: int, run_dir: Path, tracker: Tracker, step: int, prefix: str = ""
) -> tuple[list[Path], str]:
    """Write videos of episodes, failures (or low returns) first; returns their paths, and why there are none if so."""
    from embodied_rl.video import write_mp4
    from scheduler.worker import WorkerFailed

    has_success = team.spec.has_success
    succeeded = lambda episode: has_success and getattr(episode, team.score)  # noqa: E731
    chosen = sorted(episodes, key=lambda e: (succeeded(e) if has_success else e.episode_return, e.seed))
    if len(chosen) > count > 1 and not succeeded(chosen[count - 1]):
        chosen = [*chosen[: count - 1], chosen[-1]]  # a success too, where there is one
    chosen = chosen[:count]
    if not chosen:
        return [], ""
    try:
        films = team.render(chosen)
    except (WorkerFailed, EnvError) as error:
        return [], str(error).strip().split("\n")[-1]  # the last line of a traceback is its message
    paths = []
    for episode, film in zip(chosen, films, strict=True):
        outcome = "success" if succeeded(episode) else "failure"
        outcome = outcome if has_success else f"return_{episode.episode_return:.0f}"
        path = run_dir / "videos" / f"{prefix}seed_{episode.seed}_{outcome}.mp4"
        path.parent.mkdir(parents=True, exist_ok=True)
        fps = team.config.env.control_freq or VIDEO_FPS
        write_mp4(path, [*film, *[film[-1]] * round(HOLD_S * fps)], fps)
        tracker.video(step, f"videos/{prefix}{outcome}_{episode.seed}", path)
        paths.append(path)
    return paths, ""


def evaluate_checkpoint(
    checkpoint: Path,
    config: Config,
    folder: Path,
    episodes: int,
    seed: int | None,
    videos: int,
    deterministic: bool,
) -> int:
    """Evaluate a checkpoint and print the result; returns an exit code.

    Args:
        config: the checkpoint's, but for where its envs are simulated.
        folder: where the record and the videos go.
        seed: first evaluation seed, as an offset; None: the final evaluation's own.
    """
    from embodied_rl.checkpoint import read_manifest
    from embodied_rl.console import reported
    from embodied_rl.team import Team
    from embodied_rl.tracking import NullTracker
    from scheduler.cluster import Cluster

    manifest = read_manifest(checkpoint)
    base_seed = TEST_SEED if seed is None else seed
    print(f"evaluating {checkpoint} on {config.env.id}: {episodes} episodes", flush=True)
    with (
        reported(None),
        Cluster(config.cluster.address, config.cluster.cpu_slots, config.cluster.timeout_s) as cluster,
    ):
        team = Team(config, cluster, ("rollout", "env"))
        team.rollout.load_checkpoint(checkpoint.absolute()).wait(config.cluster.timeout_s)
        found = team.evaluate(episodes, base_seed, deterministic)
        record = record_of(team, found, base_seed, deterministic, str(checkpoint))
        print(describe(record), flush=True)
        write(record, folder / FINAL)
        print(f"record      {folder / FINAL}", flush=True)
        paths, why_none = record_videos(team, found, videos, folder, NullTracker(), manifest.step)
        for path in paths:
            print(f"video       {path}")
        if why_none:
            print(f"no videos: {why_none}")
        team.close()
        return 0
    return 1


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
