"""Random disturbances of an env server on one host: whatever is killed or stopped, each chunk says what became of it.

python tests/envs/test_disturbed.py FIRST LAST [ROUNDS]       (many seeds; the test does a few)
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy import Toy

from envs import client
from envs.base import ChunkResult, EnvSettings, episode_seed
from envs.client import RemotePool, RemoteVectorEnv

SERVER = """
import sys
from envs import session
from envs.server import main
session.CLIENT_OPTIONS["toy:SlowToy"] = ("faults",)
main()
"""
STEP_S = 30.0


class Served:
    """A server process that can be started again where it was."""

    def __init__(self, folder: Path, step_timeout_s: float) -> None:
        self.address = f"ipc://{folder}/server"
        self.options = ["--processes", "2", "--step-timeout", str(step_timeout_s)]
        self.lock = threading.Lock()
        self.start()

    def start(self) -> None:
        arguments = ["toy:SlowToy", "SlowToy", "--bind", self.address, *self.options]
        path = os.pathsep.join([str(Path(__file__).parent.parent.parent), str(Path(__file__).parent)])
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
    """A set of envs, and what has to be true of it: a Toy for each row goes along with what is told."""

    def __init__(self, env: RemoteVectorEnv) -> None:
        self.env, self.told = env, 0
        count = env.num_envs
        self.running = np.zeros(count, bool)
        self.twins = [Toy(EnvSettings("toy:Toy", "Toy")) for _ in range(count)]
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


class Interrupted(KeyboardInterrupt):
    pass


def _interrupt(*_: object) -> None:
    raise Interrupted


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
        (faults / "step").write_text(f"once {kind}")
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
    faults.mkdir()
    served = Served(folder, step_timeout_s=1.0)
    pool = RemotePool(served.address, "toy:SlowToy", "SlowToy", timeout_s=25.0)
    settings = EnvSettings("toy:SlowToy", "SlowToy", simulator={"faults": str(faults)})
    told = 0

    def make(count: int) -> Watched:
        options = {"chunk": int(rng.integers(1, 5)), "auto_reset": bool(rng.random() < 0.5)}
        return Watched(pool.vector_env(settings, range(count), seed=seed, record_actions=True, **options))

    sets = [make(int(rng.integers(1, 5))) for _ in range(int(rng.integers(2, 4)))]
    kinds = ["raise", "kill", "sigkill", "sigkill", "pause", "pause server", "restart"]
    kinds += ["stop", "hang"] if rng.random() < 0.3 else []
    kinds += [] if is_strict else ["all"]
    signal.signal(signal.SIGALRM, _interrupt)
    timers: list[threading.Timer] = []

    def settle() -> None:
        while timers:
            timers.pop().join()
        (faults / "step").unlink(missing_ok=True)

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
                interrupts = 0 if is_strict else int(rng.random() < 0.2)
                while True:
                    result = None
                    try:
                        if interrupts:
                            interrupts -= 1
                            signal.setitimer(signal.ITIMER_REAL, float(rng.uniform(1e-4, 0.02)))
                        result = one.env.chunk_step_wait()
                        signal.setitimer(signal.ITIMER_REAL, 0)
                    except Interrupted:
                        if result is None and (one.env._rung or one.env._step is not None):
                            continue
                        if result is None:  # the result was lost in the interrupt
                            one.reset()
                            break
                    assert result is not None
                    one.check(result)
                    break
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
        counted = pool.lost_episodes
        pool.ask("state", set=sets[0].env.key)
        assert told <= pool.lost_episodes and (not is_strict or told == pool.lost_episodes), (told, counted)
        return {"told": told, "counted": pool.lost_episodes, "replaced": pool.replaced}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        settle()
        pool.close()
        served.kill()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(client, "RUNG_S", 0.05)
    monkeypatch.setattr(client, "ASK_AGAIN_S", 0.2)
    monkeypatch.setattr(client, "MAX_LOSSES", 20)
    yield


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("seed", "is_strict"), [(0, True), (1, False)])
def test_whatever_is_killed_or_stopped_each_chunk_tells_what_became_of_it(
    tmp_path: Path, seed: int, is_strict: bool
) -> None:
    run(seed, 16, is_strict, tmp_path)


if __name__ == "__main__":
    client.ASK_AGAIN_S, client.MAX_LOSSES = 0.2, 20
    for number in range(int(sys.argv[1]), int(sys.argv[2])):
        client.RUNG_S = (0.0, 0.004, 0.05, 1.0)[number % 4]
        for strict in (True, False):
            with tempfile.TemporaryDirectory() as place:
                before = time.monotonic()
                try:
                    outcome: Any = run(number, int(sys.argv[3]) if len(sys.argv) > 3 else 40, strict, Path(place))
                except Exception as error:
                    import traceback

                    traceback.print_exc()
                    outcome = repr(error)[:200]
                print(number, "strict" if strict else "free", f"{time.monotonic() - before:.1f} s", outcome, flush=True)
