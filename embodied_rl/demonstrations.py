"""Datasets of demonstrations on disk: written episode by episode, read at random. Imports no torch and no simulator.

    dataset.json             format, version and settings: the env, seed, noise, image format, gripper dimension
    episodes.jsonl           a line for each finished episode, failures too; `kept` ones have a file
    episodes/000123.npz      episode number 123: float32 `action` [T, A] (what the expert would do), `executed_action`
                             [T, A] (what was done), `state` [T+1, S]; encoded images end to end in uint8 `frames`,
                             each ending before `frame_ends` [T+1, V]
    dataset_statistics.json  OpenVLA's form, under the env's id; there once the collection is complete

A file appears whole or not at all, and its line after it: what is lost with a killed process are the episodes that were
running.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from envs.base import Observation

FORMAT = "embodied-rl demonstrations"
VERSION = 1
ENCODINGS: dict[str, dict[str, Any]] = {
    "png": {"format": "png", "compress_level": 1},  # 8 times as fast as the default level, 1.1 times the size
    "jpeg": {"format": "jpeg", "quality": 95},
}


class DatasetError(ValueError):
    """A directory is not the dataset that was asked for; the message says why."""


@dataclass(frozen=True)
class EpisodeInfo:
    """A line of `episodes.jsonl`. `number` orders the episodes of a collection; `seed` reproduces the start."""

    number: int
    seed: int
    length: int
    success: bool
    episode_return: float
    instruction: str
    kept: bool


@dataclass(frozen=True)
class Trajectory:
    """One episode. T actions and T+1 observations; what was not recorded is None."""

    action: np.ndarray  # float32 [T, A]
    executed_action: np.ndarray  # float32 [T, A]
    state: np.ndarray | None  # float32 [T+1, S]
    image: np.ndarray | None  # uint8 [T+1, V, H, W, 3]


class DemonstrationWriter:
    """Adds episodes to a dataset, new or begun before. Use as a context manager.

    `episodes` are the finished ones, kept or not, by number; `settings` is what `dataset.json` says.

    Args:
        path: the directory, created if need be.
        settings: what `dataset.json` shall say; must hold `env` (with `id`), `image_format` and `gripper` (an action
            dimension or None). A dataset begun before must have the same.

    Raises:
        DatasetError: another dataset or something else is there, or another process is writing to it.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path, self.settings = path, json.loads(json.dumps(settings))
        if (path / "dataset.json").exists():
            if different := differences(read_settings(path), self.settings):
                raise DatasetError(f"{path} was collected with other settings: {'; '.join(different)}")
        elif path.is_dir() and any(path.iterdir()):
            raise DatasetError(f"{path} holds something else than demonstrations")
        else:
            (path / "episodes").mkdir(parents=True, exist_ok=True)
            _write(path / "dataset.json", _json({"format": FORMAT, "version": VERSION, **self.settings}))
        self._index = (path / "episodes.jsonl").open("a+b")
        try:
            fcntl.flock(self._index, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DatasetError(f"another process is writing to {path}") from None
        infos, size = _read_index(path)
        self._index.truncate(size)  # a line that a killed process did not finish
        self.episodes = {info.number: info for info in infos}

    @property
    def kept(self) -> int:
        """How many of the finished episodes are in the dataset."""
        return sum(info.kept for info in self.episodes.values())

    def write(self, number: int, trajectory: Trajectory) -> None:
        """Write the file of an episode; may run in several threads. The episode counts once it is in the index."""
        arrays = {"action": trajectory.action, "executed_action": trajectory.executed_action}
        if trajectory.state is not None:
            arrays["state"] = trajectory.state
        if trajectory.image is not None:
            shape = trajectory.image.shape
            frames = [
                _encode(image, self.settings["image_format"]) for image in trajectory.image.reshape(-1, *shape[2:])
            ]
            arrays["frames"] = np.frombuffer(b"".join(frames), np.uint8)
            arrays["frame_ends"] = np.cumsum([len(frame) for frame in frames]).reshape(shape[:2])
        content = io.BytesIO()
        np.savez(content, **arrays)  # type: ignore[arg-type]
        _write(_episode_file(self.path, number), content.getvalue())

    def index(self, info: EpisodeInfo) -> None:
        """Count an episode as finished."""
        (self.path / "dataset_statistics.json").unlink(missing_ok=True)  # they would no longer be right
        self._index.write(json.dumps(asdict(info)).encode() + b"\n")
        self._index.flush()
        os.fsync(self._index.fileno())
        self.episodes[info.number] = info

    def complete(self) -> None:
        """Write the statistics of the kept episodes, without which the dataset is not read."""
        kept = [number for number, info in sorted(self.episodes.items()) if info.kept]
        actions, states = [], []
        for number in kept:
            with _load(_episode_file(self.path, number)) as arrays:
                actions.append(arrays["action"])
                if "state" in arrays:
                    states.append(arrays["state"][:-1])
        action = np.concatenate(actions)
        found: dict[str, Any] = {
            "action": {
                **statistics(action),
                "mask": [dim != self.settings["gripper"] for dim in range(action.shape[1])],
            },
            **({"proprio": statistics(np.concatenate(states))} if states else {}),
            "num_transitions": len(action),
            "num_trajectories": len(kept),
        }
        _write(self.path / "dataset_statistics.json", _json({self.settings["env"]["id"]: found}))

    def __enter__(self) -> DemonstrationWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._index.close()


class Demonstrations:
    """A complete dataset, by episode (0 to `len` - 1) and by step (0 to `num_steps` - 1, over all episodes).

    `settings` is what `dataset.json` says, `statistics` what `dataset_statistics.json` says of the env, `episodes` the
    infos of the episodes.

    Raises:
        DatasetError: there is no complete dataset that this version reads.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.settings = path, read_settings(path)
        self.episodes = sorted((info for info in _read_index(path)[0] if info.kept), key=lambda info: info.number)
        try:
            by_env = json.loads((path / "dataset_statistics.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            problem = f"the collection of {path} was not completed ({len(self.episodes)} episodes so far)"
            raise DatasetError(f"{problem}; go on with embodied-rl collect ... --resume") from None
        self.statistics: dict[str, Any] = by_env[self.settings["env"]["id"]]
        self._ends = np.cumsum([info.length for info in self.episodes])
        self.num_steps = int(self._ends[-1])

    def __len__(self) -> int:
        return len(self.episodes)

    def trajectory(self, episode: int) -> Trajectory:
        """A whole episode. Raises DatasetError if its file is damaged."""
        with _load(_episode_file(self.path, self.episodes[episode].number)) as arrays:
            image = None
            if "frames" in arrays:
                image = np.stack([_images(arrays, t) for t in range(self.episodes[episode].length + 1)])
            return Trajectory(arrays["action"], arrays["executed_action"], arrays.get("state"), image)

    def actions_left(self, steps: np.ndarray) -> np.ndarray:
        """Actions of an episode from each of its steps on, int64 [N]."""
        return self._ends[np.searchsorted(self._ends, steps, side="right")] - steps

    def batch(self, steps: Sequence[int] | np.ndarray, chunk: int = 1) -> tuple[Observation, np.ndarray, np.ndarray]:
        """What an expert saw and would do from there, for any N steps.

        Returns:
            Observations; actions, float32 [N, C, A]; and bool [N, C]: False, and the action 0, beyond an episode's end.

        Raises:
            IndexError: there is no such step.
            DatasetError: a file is damaged.
        """
        observation: dict[str, list[Any]] = {"instruction": []}
        actions = np.zeros((len(steps), chunk, len(self.statistics["action"]["mask"])), np.float32)
        valid = np.zeros((len(steps), chunk), bool)
        for row, step in enumerate(steps):
            if not 0 <= step < self.num_steps:
                raise IndexError(f"there is no step {step}; the dataset has {self.num_steps}")
            episode = int(np.searchsorted(self._ends, step, side="right"))
            info = self.episodes[episode]
            t = int(step - self._ends[episode]) + info.length
            with _load(_episode_file(self.path, info.number)) as arrays:
                following = arrays["action"][t : t + chunk]
                actions[row, : len(following)], valid[row, : len(following)] = following, True
                observation["instruction"].append(info.instruction)
                if "state" in arrays:
                    observation.setdefault("state", []).append(arrays["state"][t])
                if "frames" in arrays:
                    observation.setdefault("image", []).append(_images(arrays, t))
        stacked = {key: value if key == "instruction" else np.stack(value) for key, value in observation.items()}
        return stacked, actions, valid  # type: ignore[return-value]


def read_settings(path: Path) -> dict[str, Any]:
    """The settings in `dataset.json`. Raises DatasetError."""
    try:
        settings = json.loads((path / "dataset.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DatasetError(f"{path} holds no demonstrations: no dataset.json") from None
    except ValueError as error:
        raise DatasetError(f"{path / 'dataset.json'} is damaged: {error}") from None
    if settings.pop("format", None) != FORMAT or (version := settings.pop("version")) != VERSION:
        found = "another format" if "version" in settings else f"version {version}"
        raise DatasetError(f"{path / 'dataset.json'} is of {found}; this version reads {FORMAT} {VERSION}")
    return settings


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Where settings differ: "env.horizon was 12, not 50"."""
    found = []
    for key in dict.fromkeys((*old, *new)):
        before, now = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(now, dict):
            found += differences(before, now, f"{prefix}{key}.")
        elif before != now:
            found.append(f"{prefix}{key} was {json.dumps(before)}, not {json.dumps(now)}")
    return found


def statistics(values: np.ndarray) -> dict[str, list[float]]:
    """Of each dimension of [n, D]: mean, std, min, max, q01 and q99 (quantiles), as OpenVLA normalises by."""
    values = values.astype(np.float64)
    low, high = np.quantile(values, (0.01, 0.99), axis=0)
    rows = {"mean": values.mean(0), "std": values.std(0), "min": values.min(0), "max": values.max(0)}
    return {name: row.tolist() for name, row in {**rows, "q01": low, "q99": high}.items()}


# --- files ---------------------------------------------------------------------------------------------------


def _episode_file(path: Path, number: int) -> Path:
    return path / "episodes" / f"{number:06d}.npz"


@contextmanager
def _load(file: Path) -> Iterator[Mapping[str, np.ndarray]]:
    """The arrays of an episode's file, each read when it is asked for."""
    try:
        with np.load(file) as arrays:
            yield arrays
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise DatasetError(f"{file} cannot be read: {error}") from error


def _read_index(path: Path) -> tuple[list[EpisodeInfo], int]:
    """The infos, and the bytes that they take: a last line may be unfinished."""
    text = (path / "episodes.jsonl").read_bytes() if (path / "episodes.jsonl").exists() else b""
    size = text.rfind(b"\n") + 1
    try:
        return [EpisodeInfo(**json.loads(line)) for line in text[:size].splitlines()], size
    except (ValueError, TypeError) as error:
        raise DatasetError(f"{path / 'episodes.jsonl'} is damaged: {error}") from None


def _encode(image: np.ndarray, encoding: str) -> bytes:
    from PIL import Image

    content = io.BytesIO()
    Image.fromarray(image).save(content, **ENCODINGS[encoding])
    return content.getvalue()


def _images(arrays: Mapping[str, np.ndarray], t: int) -> np.ndarray:
    """The images [V, H, W, 3] of observation t."""
    from PIL import Image

    ends, frames = arrays["frame_ends"], arrays["frames"]
    starts = np.concatenate([[0], ends.reshape(-1)[:-1]]).reshape(ends.shape)
    views = [frames[start:end].tobytes() for start, end in zip(starts[t], ends[t], strict=True)]
    return np.stack([np.asarray(Image.open(io.BytesIO(view))) for view in views])


def _json(data: Any) -> bytes:
    return (json.dumps(data, indent=1) + "\n").encode()


def _write(path: Path, content: bytes) -> None:
    """Write a file that appears whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
