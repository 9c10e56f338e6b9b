"""Env servers whose processes are killed, stopped and started again at random: each chunk has to say what became of it.

    python benchmarks/env_server_chaos.py --seeds 10

Several sets of envs on one server of two processes are stepped by doorbell, side by side, with and without auto-reset.
A twin of each env goes along with what is told: rewards, terminations and final observations have to be those of the
twin, a row that was running has to be stepped or told to be lost, and a record has to have its episode's seed, length
and actions. In the strict half of the runs, one disturbance at a time, as many episodes have to be told to be lost as
are counted; in the other half several come together, sets are dropped in the middle, and a row that is lost twice
before its trainer looks is told once. No step may take longer than 30 s. The exit code is 1 if something was wrong.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from envs import client, remote  # noqa: E402
from envs.base import ActionSpec, ChunkResult, Env, EnvSettings, Step, episode_seed  # noqa: E402
from envs.client import RemotePool  # noqa: E402
from envs.remote import RemoteVectorEnv  # noqa: E402

POINT = "env_server_chaos:Point"
SERVER = f"""
from envs import session
from envs.server import main
session.CLIENT_OPTIONS["{POINT}"] = ("faults",)
main()
"""
STEP_S = 30.0
KINDS = ["raise", "kill", "sigkill", "sigkill", "pause", "pause server", "restart"]


class Point(Env):
    """A point in the plane, pushed by actions and by noise of the episode's seed, with faults on demand.

    The option `faults` names a file; whoever takes it away in a step does what it says.
    """

    action = ActionSpec((-1.0, -1.0), (1.0, 1.0))
    has_success = True
    horizon = 30
    instruction = "go right"

    def __init__(self, settings: EnvSettings) -> None:
        self._faults = Path(settings.simulator.get("faults", "/nonexistent"))

    def reset(self, seed: int, init_state_id: int | None) -> None:
        self._random = np.random.default_rng(seed)
        self._point = self._random.uniform(-0.3, 0.3, 2)

    def step(self, action: np.ndarray, observed: bool) -> Step:
        with contextlib.suppress(FileNotFoundError):
            kind = self._faults.read_text()
            self._faults.unlink()
            self._fail(kind)
        time.sleep(0.002)
        self._point = self._point + 0.15 * action + self._random.normal(0, 0.1, 2)
        success = bool(self._point[0] > 0.6)
        return Step(-float(np.abs(self._point).sum()), success or bool(self._point[0] < -0.6), False, success)

    def observe(self) -> dict[str, np.ndarray]:
        return {"state": self._point.astype(np.float32)}

    def _fail(self, kind: str) -> None:
        if kind == "raise":
            raise ZeroDivisionError("as asked")
        if kind == "hang":
            time.sleep(1000)
        os.kill(os.getpid(), signal.SIGSTOP if kind == "stop" else signal.SIGKILL)


class Served:
    """A server process that can be started again where it was."""

    def __init__(self, folder: Path, step_timeout_s: float) -> None:
        self.address = f"ipc://{folder}/server"
        self.options = ["--processes", "2", "--step-timeout", str(step_timeout_s)]
        self.lock = threading.Lock()
        self.start()

    def start(self) -> None:
        arguments = [POINT, "Point", "--bind", self.address, *self.options]
        path = os.pathsep.join([str(HERE.parent), str(HERE)])
        self.popen = subprocess.Popen(
            [sys.executable, "-c", SERVER, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert self.popen.stdout is not None
        assert self.popen.stdout.readline().startswith(b"serving")

    @property
    def processes(self) -> list[int]:
        with contextlib.suppress(OSError):
            tasks = Path(f"/proc/{self.popen.pid}/task").iterdir()
            return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
        return []

    def restart(self) -> None:
        with self.lock:
            self.kill()
            self.start()

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()
        assert self.popen.stdout is not None
        self.popen.stdout.close()


class Watched:
    """A set of envs, and what has to be true of it: a twin of each row goes along with what is told."""

    def __init__(self, env: RemoteVectorEnv) -> None:
        self.env, self.told = env, 0
        count = env.num_envs
        self.running = np.zeros(count, bool)
        self.twins = [Point(EnvSettings(POINT, "Point")) for _ in range(count)]
        self.lengths = [0] * count
        self.numbers = np.zeros(count, int)
        self.reset()

    def reset(self, rows: list[int] | None = None) -> None:
        self.env.reset(rows)
        for row in range(self.env.num_envs) if rows is None else rows:
            self.begin(row)

    def begin(self, row: int) -> None:
        self.running[row], self.lengths[row] = True, 0
        self.numbers[row] = self.env.buffers.episode_number[row]
        self.twins[row].reset(int(self.env.buffers.episode_seed[row]), None)

    def act(self, rng: np.random.Generator) -> None:
        self.actions = rng.uniform(-1, 1, (self.env.num_envs, self.env.args.chunk, 2)).astype(np.float32)
        self.env.chunk_step_async(self.actions)

    def check(self, result: ChunkResult) -> None:
        auto_reset = self.env.args.auto_reset
        assert sorted(episode.env_id for episode in result.episodes) == [
            self.env.args.env_ids[row] for row in np.flatnonzero(result.ended)
        ]
        episodes = {episode.env_id: episode for episode in result.episodes}
        for row, env_id in enumerate(self.env.args.env_ids):
            if result.lost[row]:
                self.told += 1
                assert self.running[row], f"row {row} was not running and is told to be lost"
                assert not result.valid[row].any() and not result.ended[row] and not result.reward[row].any()
                self.running[row] = False
            elif not self.running[row]:
                assert not result.valid[row].any() and not result.ended[row] and not result.reward[row].any()
                continue
            else:
                assert result.valid[row, 0], f"row {row} was running and neither stepped nor told to be lost"
                self.follow(row, result)
            if result.ended[row]:
                self.running[row] = False
                episode = episodes[env_id]
                number = self.numbers[row]
                assert episode.seed == episode_seed(self.env.args.seed, env_id, number - 1)
                assert episode.length == self.lengths[row] and episode.actions is not None
                assert len(episode.actions) == episode.length
            if auto_reset and not self.running[row]:
                self.begin(row)

    def follow(self, row: int, result: ChunkResult) -> None:
        twin = self.twins[row]
        for column, action in enumerate(self.actions[row]):
            step = twin.step(action, True)
            self.lengths[row] += 1
            assert result.valid[row, column]
            np.testing.assert_allclose(result.reward[row, column], step.reward, rtol=1e-5)
            assert result.terminated[row, column] == step.terminated
            truncated = self.lengths[row] >= twin.horizon and not step.terminated
            assert result.truncated[row, column] == truncated
            if step.terminated or truncated:
                assert result.ended[row] and not result.valid[row, column + 1 :].any()
                np.testing.assert_array_equal(result.final_observation["state"][row], twin.observe()["state"])
                return
        assert not result.ended[row]


def disturb(served: Served, faults: Path, rng: np.random.Generator, kinds: list[str]) -> list[threading.Timer]:
    """One disturbance, now or in a moment."""
    kind = str(rng.choice(kinds))
    delay = float(rng.choice([0.0, rng.uniform(0, 0.02)]))

    def send(pid: int, number: int) -> None:
        with contextlib.suppress(OSError):
            os.kill(pid, number)

    def at(seconds: float, function: Any, *args: Any) -> None:
        timers.append(threading.Timer(seconds, function, args))
        timers[-1].start()

    timers: list[threading.Timer] = []
    processes = served.processes
    victim = int(rng.choice(processes)) if processes else 2**22 + 1  # none, while the server starts
    if kind in ("raise", "kill", "stop", "hang"):
        faults.write_text(kind)
    elif kind == "sigkill":
        at(delay, send, victim, signal.SIGKILL)
    elif kind == "all":  # as where a machine's memory is over
        for pid in rng.permutation(processes).tolist():
            at(delay, send, pid, signal.SIGKILL)
        at(delay + float(rng.uniform(0, 0.3)), served.restart)
    elif kind == "pause":
        send(victim, signal.SIGSTOP)
        at(float(rng.uniform(0.01, 0.3)), send, victim, signal.SIGCONT)
    elif kind == "pause server":
        pid = served.popen.pid
        send(pid, signal.SIGSTOP)
        at(float(rng.uniform(0.01, 1.0)), send, pid, signal.SIGCONT)
    elif kind == "restart":
        at(delay, served.restart)
    return timers


def run(seed: int, rounds: int, is_strict: bool, folder: Path) -> dict[str, int]:
    """`is_strict`: one disturbance at a time and nothing dropped, so that what is told has to be what is counted."""
    rng = np.random.default_rng(seed)
    faults = folder / "faults"
    served = Served(folder, step_timeout_s=1.0)
    pool = RemotePool(served.address, POINT, "Point", timeout_s=25.0)
    settings = EnvSettings(POINT, "Point", simulator={"faults": str(faults)})
    told = 0

    def make(count: int) -> Watched:
        options = {"chunk": int(rng.integers(1, 5)), "auto_reset": bool(rng.random() < 0.5)}
        return Watched(pool.vector_env(settings, range(count), seed=seed, record_actions=True, **options))

    sets = [make(int(rng.integers(1, 5))) for _ in range(int(rng.integers(2, 4)))]
    kinds = KINDS + (["stop", "hang"] if rng.random() < 0.3 else []) + ([] if is_strict else ["all"])
    timers: list[threading.Timer] = []

    def settle() -> None:
        while timers:
            timers.pop().join()
        faults.unlink(missing_ok=True)

    try:
        for number in range(rounds):
            began = time.monotonic()
            chosen = [one for one in sets if is_strict or rng.random() < 0.8]
            is_disturbed = number % 4 == 1 if is_strict else rng.random() < 0.4
            if is_disturbed and rng.random() < 0.5:
                timers += disturb(served, faults, rng, kinds)
            for one in rng.permutation(np.array(chosen, object)):
                one.act(rng)
                if rng.random() < 0.2:
                    time.sleep(float(rng.uniform(0, 0.02)))
            if is_disturbed and not timers:
                timers += disturb(served, faults, rng, kinds)
            for one in rng.permutation(np.array(chosen, object)):
                one.check(one.env.chunk_step_wait())
            assert time.monotonic() - began < STEP_S
            if is_strict or rng.random() < 0.5:
                settle()
            for one in sets:
                if one.env.args.auto_reset:
                    continue
                rows = [row for row in np.flatnonzero(~one.running).tolist() if rng.random() < 0.4]
                if rows:
                    one.reset(rows)
            if not is_strict and rng.random() < 0.05:
                gone = sets.pop(int(rng.integers(len(sets))))
                if rng.random() < 0.5:
                    gone.act(rng)
                told += gone.told
                gone.env.close()
                sets.append(make(int(rng.integers(1, 5))))
        settle()
        for _ in range(3):
            for one in sets:
                one.act(rng)
            for one in sets:
                one.check(one.env.chunk_step_wait())
        told += sum(one.told for one in sets)
        pool.ask("state", set=sets[0].env.key)  # whose answer has the latest counts
        assert told <= pool.lost_episodes and (not is_strict or told == pool.lost_episodes), (told, pool.lost_episodes)
        return {"lost and told": told, "lost": pool.lost_episodes, "processes replaced": pool.replaced}
    finally:
        settle()
        pool.close()
        served.kill()


def main(
    seeds: Annotated[int, typer.Option(help="how many, a strict and a free run of each")] = 5,
    first: Annotated[int, typer.Option(help="the first of them")] = 0,
    rounds: Annotated[int, typer.Option(help="chunk steps of each set in a run")] = 40,
) -> None:
    """Disturb env servers, and see that nothing is lost without a word."""
    client.ASK_AGAIN_S, client.MAX_LOSSES = 0.2, 20
    failed = 0
    for seed in range(first, first + seeds):
        remote.RUNG_S = (0.0, 0.004, 0.05, 1.0)[seed % 4]
        for is_strict in (True, False):
            start = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                try:
                    found = ", ".join(f"{n} {name}" for name, n in run(seed, rounds, is_strict, Path(folder)).items())
                except Exception:
                    failed, found = failed + 1, traceback.format_exc()
            print(
                f"seed {seed}, {'strict' if is_strict else 'free'}, {time.monotonic() - start:.1f} s: {found}",
                flush=True,
            )
    sys.exit(f"{failed} of {2 * seeds} runs failed" if failed else 0)


if __name__ == "__main__":
    typer.run(main)
