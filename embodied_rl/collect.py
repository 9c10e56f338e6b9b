"""Collects demonstrations: scripted experts run in env processes, and a dataset grows by what they achieve."""

from __future__ import annotations

import itertools
import re
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from embodied_rl.build import env_settings
from embodied_rl.config import Config
from embodied_rl.consistency import visible_devices
from embodied_rl.demonstrations import DatasetError, DemonstrationWriter, EpisodeInfo, Trajectory
from embodied_rl.faults import Fault
from embodied_rl.progress import TrainProgress
from embodied_rl.report_data import wilson_interval
from envs.base import EnvError, EnvSettings, Episode, Observation, episode_seed
from envs.experts import EXPERTS, expert_env, make_expert
from envs.libero_suites import SUITES
from envs.pool import EnvPool

CONTROL_MODE = "pd_ee_delta_pose"
LEAST_SUCCESS = 0.1  # below it, over PATIENCE episodes, a collection gives up
PATIENCE = 50


def recipe_for(word: str) -> str | dict[str, Any]:
    """The recipe that the user named; for an env id, one with images and end-effector actions."""
    if word.partition("/")[0] in SUITES:
        return {"env": {"kind": "libero", "id": word, "observation": ["state", "image"]}}
    if not re.search(r"-v\d+$", word):
        return word
    return {"env": {"id": word, "control_mode": CONTROL_MODE, "observation": ["state", "image"]}}


def dataset_settings(config: Config, image_format: str, keep_failures: bool) -> dict[str, Any]:
    """What decides the content of a dataset, for its `dataset.json`. Raises EnvError where there is no expert."""
    env = env_settings(config.env)
    gripper = make_expert(expert_env(env)).gripper
    shown = _free(env, gripper + 1)
    return {
        "env": asdict(env),
        "seed": config.seed,
        "noise": config.sft.noise,
        "speed": config.sft.speed,
        "image_format": image_format if "image" in env.observation else None,
        "keep_failures": keep_failures,
        "gripper": shown.index(gripper) if gripper in shown else None,
    }


def collect_faults(config: Config, out: Path, resume: bool) -> list[Fault]:
    """What keeps a collection from starting, besides what keeps the env from being made."""
    faults = []
    try:
        make_expert(expert_env(env_settings(config.env)))
    except EnvError as error:
        key = "control_mode" if config.env.id in EXPERTS else "id"
        hint = f"nearest valid: {CONTROL_MODE}" if key == "control_mode" else ""
        faults.append(Fault(f"env.{key}", getattr(config.env, key), str(error), hint))
    for key in ("server", "python", "mix"):
        if given := getattr(config.env, key):
            problem = "demonstrations are collected here, of one kind of env"
            faults.append(Fault(f"env.{key}", given, problem, "leave it out"))
    if config.env.sim_backend == "gpu":
        faults.append(Fault("env.sim_backend", "gpu", "experts run on the CPU simulator", "nearest valid: auto"))
    if out.exists() and not out.is_dir():
        faults.append(Fault("--out", str(out), "is a file, not a directory"))
    elif (out / "dataset.json").exists() and not resume:
        hint = "add --resume to go on with it, or choose another directory"
        faults.append(Fault("--out", str(out), "already holds demonstrations", hint))
    return faults


def collect(config: Config, episodes: int, writer: DemonstrationWriter, command: str) -> int:
    """Collect until the dataset holds `episodes` episodes; prints progress and returns an exit code.

    Which episodes these are depends on the dataset's settings alone: they are tried in the order of their numbers until
    enough are kept, however many run at once and however often the collection was interrupted.

    Args:
        writer: of a dataset with `dataset_settings`; closed at the end.
        command: goes on with the collection, if it is given again.
    """
    with writer:
        try:
            if writer.kept < episodes:
                _collect(config, episodes, writer)
            writer.complete()
        except (EnvError, DatasetError, OSError) as error:
            print(f"\n{error}\nGo on with: {command}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print(f"\n{writer.kept} episodes are in {writer.path}. Go on with: {command}", file=sys.stderr)
            raise
        _summarise(writer)
    return 0


def _collect(config: Config, episodes: int, writer: DemonstrationWriter) -> None:
    devices = visible_devices(config)
    processes = min(config.env.processes or (devices[0] if devices else 1), episodes - writer.kept)
    tasks: SimpleQueue[int | None] = SimpleQueue()
    results: SimpleQueue[EpisodeInfo | BaseException] = SimpleQueue()
    threads = [
        threading.Thread(target=_work, args=(config, writer, tasks, results), daemon=True) for _ in range(processes)
    ]
    numbers = (number for number in itertools.count() if number not in writer.episodes)
    can_fail = not writer.settings["keep_failures"]
    env_steps, running = 0, 0
    try:
        for thread in threads:
            thread.start()
        with TrainProgress(episodes, start_iteration=writer.kept, what="collect", unit="episode") as progress:
            while writer.kept < episodes:
                for _ in range(min(processes, episodes - writer.kept) - running):
                    tasks.put(next(numbers))
                    running += 1
                result = results.get()
                if isinstance(result, BaseException):
                    raise result
                running -= 1
                writer.index(result)
                env_steps += result.length
                success = np.mean([info.success for info in writer.episodes.values()])
                progress.update(writer.kept, env_steps, {"rollout/success_once": float(success)})
                if can_fail and len(writer.episodes) >= PATIENCE and success < LEAST_SUCCESS:
                    raise EnvError(
                        f"the expert succeeded in {success:.0%} of {len(writer.episodes)} episodes; does this horizon "
                        "leave it the time, or is there too much noise?"
                    )
    finally:
        for _ in threads:
            tasks.put(None)
    for thread in threads:
        thread.join()


def _work(config: Config, writer: DemonstrationWriter, tasks: SimpleQueue, results: SimpleQueue) -> None:
    """A thread with an env process of its own: runs the episodes that it is told to."""
    try:
        demonstrator = _Demonstrator(config)
        try:
            for number in iter(tasks.get, None):
                info, trajectory = demonstrator.run(number, writer.settings["keep_failures"])
                if info.kept:
                    writer.write(number, trajectory)
                results.put(info)
        finally:
            demonstrator.close()
    except BaseException as error:
        results.put(error)


class _Demonstrator:
    """An env process and the expert that drives it."""

    def __init__(self, config: Config) -> None:
        recorded = env_settings(config.env)
        self._settings, self._seed, self._recorded = config.sft, config.seed, recorded.observation
        observed = tuple(dict.fromkeys(("state", *recorded.observation)))  # experts act from states
        settings = expert_env(replace(recorded, observation=observed))
        self._expert = make_expert(settings)
        self._pool = EnvPool(1, config.env.step_timeout_s)
        try:
            self._env = self._pool.vector_env(settings, [0], auto_reset=False, record_actions=True)
        except BaseException:
            self.close()
            raise
        self._free = _free(recorded, self._expert.gripper + 1)

    def run(self, number: int, keep_failure: bool) -> tuple[EpisodeInfo, Trajectory]:
        """Run episode `number`; again from its start if the process was lost over it."""
        outcome = None
        while outcome is None:
            outcome = self._attempt(number)
        episode, labels, shown = outcome
        assert episode.actions is not None  # they are recorded
        info = EpisodeInfo(
            number=number,
            seed=episode.seed,
            length=episode.length,
            success=episode.success_at_end,
            episode_return=episode.episode_return,
            instruction=shown[0]["instruction"][0],
            kept=episode.success_at_end or keep_failure,
        )
        trajectory = Trajectory(
            action=np.stack(labels),
            executed_action=episode.actions,
            state=self._state(shown),
            image=self._recording(shown, "image"),
        )
        return info, trajectory

    def _attempt(self, number: int) -> tuple[Episode, list[np.ndarray], list[Observation]] | None:
        """The episode with T expert's actions and T+1 observations; None if the process was lost."""
        generator = np.random.default_rng([self._seed, number])
        shown = [self._env.reset(seeds=[episode_seed(self._seed, 0, number)])]
        labels = []
        while True:
            label, executed = self._act(shown[-1]["state"][0], generator)
            result = self._env.chunk_step(executed[None, None])
            if result.lost[0]:
                return None
            labels.append(label)
            shown.append(result.observation)  # the last one of the episode stays, without auto-reset
            if result.episodes:
                return result.episodes[0], labels, shown

    def _act(self, state: np.ndarray, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """The expert's action, and the one to execute: disturbed, except for the gripper."""
        action = self._expert.act(state)
        moves = np.arange(len(action)) != self._expert.gripper
        action = np.where(moves, self._settings.speed * action, action).astype(np.float32)
        noise = np.where(moves, generator.normal(0.0, self._settings.noise, action.shape), 0.0)
        executed = np.clip(action + noise, -1, 1).astype(np.float32)
        return action[self._free], executed[self._free]

    def _recording(self, shown: list[Observation], key: str) -> np.ndarray | None:
        return np.stack([observation[key][0] for observation in shown]) if key in self._recorded else None  # type: ignore[literal-required]

    def _state(self, shown: list[Observation]) -> np.ndarray | None:
        states = self._recording(shown, "state")
        return states if states is None else states[:, : states.shape[1] - self._expert.advice]

    def close(self) -> None:
        self._pool.close()


def _free(settings: EnvSettings, size: int) -> list[int]:
    """The action dimensions that are not fixed: those that a policy decides."""
    return [dim for dim in range(size) if dim not in settings.fixed_actions]


def _summarise(writer: DemonstrationWriter) -> None:
    infos = list(writer.episodes.values())
    successes = sum(info.success for info in infos)
    low, high = wilson_interval(successes, len(infos))
    steps = sum(info.length for info in infos if info.kept)
    size = sum(file.stat().st_size for file in writer.path.rglob("*") if file.is_file())
    print(f"success     {successes}/{len(infos)}, 95% interval {low:.3f} to {high:.3f}")
    failures = len(infos) - successes
    if failures:
        print(f"failures    {failures}, {'kept' if writer.kept == len(infos) else 'left out'}")
    print(f"dataset     {writer.path}: {writer.kept} episodes, {steps:,} steps, {size / 1e6:.3g} MB")
