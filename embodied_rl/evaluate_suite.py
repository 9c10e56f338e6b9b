"""Success rates on LIBERO's suites under a named protocol: each (task, trial) once, however often it is interrupted.

An evaluation is a directory: `fingerprint.json` says exactly what is measured, `episodes.jsonl` grows by each finished
episode, `actions/` has what was done in it. The tables, pages and videos made from these are in `suite_report`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from embodied_rl.episode_queue import EpisodeQueue, Key
from embodied_rl.faults import Fault, any_of
from embodied_rl.progress import TrainProgress
from embodied_rl.protocols import PROTOCOLS, Protocol
from embodied_rl.result_folder import removed_if_empty, result_folder
from embodied_rl.runs import numbered
from embodied_rl.suite_policies import SCRIPTED, SuitePolicy, make_policy
from embodied_rl.tracking import Tracker, WandbMode
from envs import libero_rendering, libero_suites
from envs.base import EnvError, EnvSettings, Episode, Observation
from envs.experts.libero import is_scripted
from envs.libero_suites import init_state_id
from envs.pool import EnvPool

FINGERPRINT, EPISODES = "fingerprint.json", "episodes.jsonl"
STEP_TIMEOUT_S = 300.0
IMAGE_SIZE = 256
Outcome = Literal["success", "failure", "error"]


@dataclass(frozen=True)
class SuiteRun:
    """What the user asks for. `tasks` None: all of a suite; `trials` and `stochastic` None: the protocol's."""

    policy: str
    suites: tuple[str, ...]
    protocol: str = "openvla-oft"
    tasks: tuple[int, ...] | None = None
    trials: int | None = None
    envs: int = 1
    seed: int = 0
    stochastic: bool | None = None
    videos: int = 2
    resume: bool = False
    wandb: WandbMode = "auto"

    def tasks_of(self, suite: str) -> tuple[int, ...]:
        return libero_suites.parse_id(suite)[1] if self.tasks is None else tuple(dict.fromkeys(self.tasks))

    @property
    def rules(self) -> Protocol:
        """The protocol, with what was asked for in place of its own."""
        protocol = PROTOCOLS[self.protocol]
        changed: dict[str, Any] = {} if self.trials is None else {"trials": self.trials}
        if self.stochastic and protocol.temperature is None:
            changed["temperature"] = 1.0
        if self.stochastic is False:
            changed["temperature"] = None
        return dataclasses.replace(protocol, **changed)


@dataclass(frozen=True)
class SuiteEpisode:
    """A finished episode, a line of `episodes.jsonl`. `error`: what happened, where the outcome is "error"."""

    suite: str
    task: int
    trial: int
    outcome: Outcome
    length: int
    attempts: int
    seconds: float
    error: str = ""

    @property
    def key(self) -> Key:
        return self.task, self.trial

    @property
    def stem(self) -> str:
        return f"{self.suite}_{self.task}_{self.trial}"


def suite_faults(run: SuiteRun) -> list[Fault]:
    """Everything that keeps the evaluation from starting, wherever its result goes."""
    faults = []
    if run.protocol not in PROTOCOLS:
        nearest = libero_suites.near(run.protocol, PROTOCOLS)
        return [Fault("--protocol", run.protocol, "no such protocol", f"nearest: {nearest}")]
    for suite in run.suites:
        try:
            known = libero_suites.parse_id(suite)[1]
        except EnvError as error:
            problem, _, hint = str(error).partition("; ")
            faults.append(Fault("--suite", suite, problem, hint))
            continue
        tasks = [task for task in run.tasks_of(suite) if task in known]
        for task in set(run.tasks_of(suite)) - set(known):
            faults.append(Fault("--tasks", task, f"{suite} has tasks 0 to {len(known) - 1}"))
        if run.policy == "expert" and (beyond := [task for task in tasks if not is_scripted(suite, task)]):
            scripted = ",".join(str(task) for task in tasks if task not in beyond)
            problem = f"the expert only picks and places, and {suite} {beyond} is something else"
            faults.append(Fault("--tasks", run.tasks, problem, f"--tasks {scripted}" if scripted else ""))
        stored = min((len(libero_suites.init_states(suite, task)) for task in tasks), default=0)
        if tasks and run.rules.trials > stored:
            problem = f"{suite} has {stored} stored init states for each task, and no trial is run twice"
            faults.append(Fault("--trials", run.rules.trials, problem, f"nearest valid: {stored}"))
    needs_images = run.policy not in SCRIPTED
    if needs_images and libero_rendering.choose() is None:
        faults.append(Fault("policy", run.policy, libero_rendering.NO_RENDERER))
    if needs_images:
        faults += _policy_faults(run.policy)
    return faults


def suite_folder(out: Path | None, default: Path, resume: bool, faults: list[Fault]) -> tuple[Path, list[Fault]]:
    """The folder of the evaluation, and all faults: a new one as `result_folder` makes it, or the one to go on with,
    which without `out` is the newest of those called like `default`."""
    if resume:
        known = [folder for folder in numbered(default) if (folder / FINGERPRINT).exists()]
        folder = out or (known[-1] if known else default)
        if not (folder / FINGERPRINT).exists():
            faults = [*faults, Fault("--resume", None, f"nothing to resume: {folder} holds no evaluation")]
        return folder, faults
    if out is not None and (out / FINGERPRINT).exists():
        return out, [*faults, Fault("--out", str(out), "already holds an evaluation", "add --resume to go on with it")]
    return result_folder(out, default, faults)


def _policy_faults(policy: str) -> list[Fault]:
    from policies import openvla, openvla_oft
    from policies.openvla.presets import PRESETS, missing_weights

    presets = [name for name in (*PRESETS, *openvla_oft.PRESETS) if not missing_weights(name)]
    if Path(policy, "checkpoints").is_dir():
        lacking = "the run has written no `pretrained`, as a run of an OpenVLA policy does at its end"
        other = f"without --suite its checkpoints are evaluated in its own env: embodied-rl eval {policy}"
        return [Fault("policy", policy, lacking, other)]
    try:
        problem = missing_weights(policy)
        (openvla_oft if policy in openvla_oft.PRESETS else openvla).read_config(policy)
    except (FileNotFoundError, ValueError, ImportError) as error:
        problem = str(error)
    hint = f"known: {any_of([*SCRIPTED, *presets])}, or a checkpoint directory"
    return [Fault("policy", policy, problem, hint)] if problem else []


def evaluate_suites(run: SuiteRun, out: Path, command: str) -> int:
    """Run what is left of the evaluation in `out`, print and write its results; returns an exit code.

    Args:
        command: goes on with it, if it is given again.
    """
    from embodied_rl.suite_report import print_result, record_suite_videos, write_report

    out.mkdir(parents=True, exist_ok=True)
    done = read_episodes(out)
    try:
        fingerprints = {}
        for suite in run.suites:
            policy = make_policy(run.policy, run.rules, suite, run.seed, IMAGE_SIZE)
            fingerprints[suite] = fingerprint(run, suite, policy)
            keep_fingerprint(out, fingerprints, run.resume)
            _evaluate(run, suite, policy, out, done)
        with Tracker(
            out,
            fingerprints,
            name=out.name,
            wandb_mode=run.wandb,
            resume_step=-1 if (out / "metrics.jsonl").exists() else None,
        ) as tracker:
            videos = record_suite_videos(out, run, done)
            print_result(write_report(out, done, fingerprints, videos, tracker), out)
    except KeyboardInterrupt:
        print(f"\n{len(done)} episodes are in {out}. Go on with: {command}", file=sys.stderr)
        raise
    except ValueError as error:  # of what was asked for: going on would not help
        print(f"\n{error}", file=sys.stderr)
        return 1
    except (EnvError, OSError) as error:
        print(f"\n{error}\nGo on with: {command}", file=sys.stderr)
        return 1
    return 0


def evaluate_from_options(policy: str, suites: str, out: Path | None, command: str, options: dict[str, Any]) -> int:
    """Evaluate as the command line asks, with `options` as it gives them; returns an exit code."""
    from embodied_rl.faults import print_faults

    chosen = libero_suites.SUITES if suites == "all" else tuple(suites.split(","))
    given = {key: value for key, value in options.items() if value is not None}
    given["envs"] = given.get("envs") or len(os.sched_getaffinity(0))
    faults = []
    if given["wandb"] not in get_args(WandbMode):
        faults.append(Fault("--wandb", given["wandb"], f"expected {any_of(get_args(WandbMode))}"))
    try:
        if "tasks" in given:
            given["tasks"] = tuple(int(word) for word in given["tasks"].split(","))
    except ValueError:
        faults.append(Fault("--tasks", given.pop("tasks"), "expected numbers separated by commas", "such as 0,3"))
    exported = Path(policy, "pretrained")  # what a run that trains OpenVLA leaves
    run = SuiteRun(str(exported) if exported.is_dir() else policy, chosen, **given)
    default = Path("evaluations", "_".join([Path(policy).name, *suites.split(","), run.protocol]))
    folder, faults = suite_folder(out, default, run.resume, [*faults, *suite_faults(run)])
    if faults:
        print_faults(faults, "the evaluation")
        return 2
    with removed_if_empty(folder):
        return evaluate_suites(run, folder, command if out else f"{command} {shlex.join(['--out', str(folder)])}")


def env_settings(run: SuiteRun, suite: str, policy: SuitePolicy | None = None) -> EnvSettings:
    """The envs under the protocol; without a policy, those that recorded actions are replayed in."""
    protocol = run.rules
    return EnvSettings(
        kind="libero",
        id=f"{suite}/{','.join(map(str, run.tasks_of(suite)))}",
        horizon=protocol.horizons[suite],
        observation=policy.observation if policy else ("state",),
        simulator={
            "init_states": "stored",
            "settle_steps": protocol.settle_steps,
            "settle_action": protocol.settle_action,
            **(policy.simulator if policy else {}),
        },
    )


def fingerprint(run: SuiteRun, suite: str, policy: SuitePolicy) -> dict[str, Any]:
    """Everything that decides the result on a suite."""
    protocol = dataclasses.asdict(run.rules)
    protocol["horizon"] = protocol.pop("horizons")[suite]
    protocol["chunk"] = policy.chunk
    states = hashlib.sha256()
    for task in run.tasks_of(suite):
        states.update(np.ascontiguousarray(libero_suites.init_states(suite, task)[: run.rules.trials]).tobytes())
    content = {
        "suite": suite,
        "tasks": run.tasks_of(suite),
        "protocol": protocol,
        "init_states": f"stored, 0 to {run.rules.trials - 1} of each task; training uses none of them by default",
        "init_states_sha256": states.hexdigest(),
        "seed": run.seed,
        "policy": policy.fingerprint,
        "image_size": IMAGE_SIZE,
        "renderer": libero_rendering.choose() if "image" in policy.observation else None,
        "versions": {**_own_versions(policy), **libero_suites.versions()},
    }
    return json.loads(json.dumps(content))


def _own_versions(policy: SuitePolicy) -> dict[str, str]:
    from importlib.metadata import version

    names = ["embodied-rl", *(["torch", "timm", "tokenizers"] if "image" in policy.observation else [])]
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def keep_fingerprint(out: Path, fingerprints: dict[str, Any], resume: bool) -> None:
    """Store what is measured. Raises ValueError where the directory holds episodes of something else."""
    path = out / FINGERPRINT
    stored = json.loads(path.read_text()) if resume and path.exists() else {}
    for suite, own in fingerprints.items():
        if differing := _differences(stored.get(suite, own), own):
            raise ValueError(f"{out} is an evaluation with {', '.join(differing)}; choose another --out")
    _write(path, json.dumps({**stored, **fingerprints}, indent=1))


def _differences(stored: dict[str, Any], own: dict[str, Any]) -> list[str]:
    """In which options a fingerprint is another one, or where they are the same, in which of its keys."""
    shown: list[Callable[[dict[str, Any]], str]] = [
        lambda one: f"the policy {one['policy']['name']}",
        lambda one: f"--protocol {one['protocol']['name']}",
        lambda one: f"--trials {one['protocol']['trials']}",
        lambda one: "--deterministic" if one["protocol"]["temperature"] is None else "--stochastic",
        lambda one: f"--tasks {','.join(map(str, one['tasks']))}",
        lambda one: f"--seed {one['seed']}",
    ]
    options = [f"{show(stored)}, not {show(own)}" for show in shown if show(stored) != show(own)]
    return options or [f"another {key}" for key in own if own[key] != stored[key]]


def read_episodes(out: Path) -> list[SuiteEpisode]:
    """The finished episodes of an evaluation; a last line torn by a kill counts as not written, and is removed."""
    path = out / EPISODES
    if not path.exists():
        return []
    whole = path.read_bytes()
    sound = whole[: whole.rfind(b"\n") + 1]
    if sound != whole:
        os.truncate(path, len(sound))
    return [SuiteEpisode(**json.loads(line)) for line in sound.splitlines()]


def _evaluate(run: SuiteRun, suite: str, policy: SuitePolicy, out: Path, done: list[SuiteEpisode]) -> None:
    """Run the episodes of a suite that are not in `done`, and add them to it."""
    own = [episode for episode in done if episode.suite == suite]
    tasks, trials = run.tasks_of(suite), run.rules.trials
    total = len(tasks) * trials
    if len(own) == total:
        return
    print(f"{suite}: {total - len(own)} of {total} episodes to run, {min(run.envs, total - len(own))} envs", flush=True)
    queue = EpisodeQueue(tasks, trials, {episode.key for episode in own})
    with TrainProgress(total, start_iteration=len(own), what="eval", unit="episode") as progress:
        env_steps = sum(episode.length for episode in own)
        for episode in _Runner(run, suite, policy, queue, out).run(min(run.envs, total - len(own))):
            done.append(episode)
            own.append(episode)
            env_steps += episode.length
            counted = [one.outcome == "success" for one in own if one.outcome != "error"]
            rate = sum(counted) / len(counted) if counted else 0.0
            progress.update(len(own), env_steps, {"rollout/success_once": rate})


class _Runner:
    """Runs a queue's episodes in env processes, one env in each, the policy looking at all of them at once."""

    def __init__(self, run: SuiteRun, suite: str, policy: SuitePolicy, queue: EpisodeQueue, out: Path) -> None:
        self._policy, self._queue, self._out, self._suite, self._seed = policy, queue, out, suite, run.seed
        self._settings = env_settings(run, suite, policy)
        self._observation: Observation = {}

    def run(self, envs: int) -> Iterator[SuiteEpisode]:
        """Yields each episode once it is stored."""
        pool = EnvPool(envs, STEP_TIMEOUT_S)
        try:
            self._env = pool.vector_env(
                self._settings, range(envs), self._policy.chunk, auto_reset=False, record_actions=True
            )
            self._keys: list[Key | None] = [None] * envs
            self._calls, self._begun = [0] * envs, [0.0] * envs
            yield from self._begin([(row, None) for row in range(envs)])
            while any(self._keys):
                yield from self._chunk_step()
        finally:
            pool.close()

    def _chunk_step(self) -> Iterator[SuiteEpisode]:
        rows = [row for row, key in enumerate(self._keys) if key is not None]
        keys = [key for key in self._keys if key is not None]
        actions = np.zeros((self._env.num_envs, self._policy.chunk, self._env.spec.action.size), np.float32)
        actions[rows] = self._policy.act(_rows(self._observation, rows), keys, [self._calls[row] for row in rows])
        result = self._env.chunk_step(actions)
        self._observation = result.observation
        for row in rows:
            self._calls[row] += 1
        free = []
        for episode in result.episodes:
            yield self._finish(episode.env_id, "success" if episode.success_once else "failure", episode)
            free.append(episode.env_id)
        for row in np.flatnonzero(result.lost).tolist():
            yield from self._crashed(row, "its env process died or hung")
            free.append(row)
        yield from self._begin([(row, self._free(row)) for row in free])

    def _begin(self, free: list[tuple[int, int | None]]) -> Iterator[SuiteEpisode]:
        """Give free envs, each with the task that it ran last, their next episodes."""
        while given := [(row, key) for row, task in free if (key := self._queue.next(task))]:
            for row, key in given:
                self._keys[row], self._calls[row], self._begun[row] = key, 0, time.monotonic()
            failed = self._reset(given)
            for row, why in failed.items():
                yield from self._crashed(row, why)
            free = [(row, self._free(row)) for row in failed]

    def _reset(self, given: Sequence[tuple[int, Key]]) -> dict[int, str]:
        """Begin episodes in envs; what went wrong, by env."""
        rows, states = [row for row, _ in given], [init_state_id(*key) for _, key in given]
        try:
            self._observation = self._env.reset(rows, [self._seed] * len(rows), states)
            return {}
        except EnvError as error:
            if len(given) == 1:
                return {rows[0]: str(error)}
        return {row: why for one in given for row, why in self._reset([one]).items()}

    def _free(self, row: int) -> int | None:
        """Take an env off its episode; the task of that."""
        key, self._keys[row] = self._keys[row], None
        return key[0] if key else None

    def _crashed(self, row: int, why: str) -> Iterator[SuiteEpisode]:
        """Try the episode again, or record an error."""
        key = self._keys[row]
        assert key is not None
        if not self._queue.retry(key):
            yield self._finish(row, "error", None, why)

    def _finish(self, row: int, outcome: Outcome, episode: Episode | None, error: str = "") -> SuiteEpisode:
        """Store an episode."""
        key = self._keys[row]
        assert key is not None
        length = episode.length if episode else 0
        seconds = round(time.monotonic() - self._begun[row], 3)
        record = SuiteEpisode(self._suite, *key, outcome, length, self._queue.attempts(key), seconds, error)
        if episode is not None and episode.actions is not None:
            (self._out / "actions").mkdir(exist_ok=True)
            np.save(self._out / "actions" / f"{record.stem}.npy", episode.actions)
        with (self._out / EPISODES).open("a", encoding="utf-8") as file:
            file.write(json.dumps(dataclasses.asdict(record)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        return record


def _rows(observation: Observation, rows: Sequence[int]) -> Observation:
    chosen: dict[str, Any] = {}
    for key, value in observation.items():
        chosen[key] = [value[row] for row in rows] if isinstance(value, list) else value[list(rows)]  # type: ignore[index]
    return chosen  # type: ignore[return-value]


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
