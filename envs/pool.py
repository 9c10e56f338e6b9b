"""Many envs in a few processes that live for the whole run, with shared memory both ways.

One `EnvPool` owns the processes; `vector_env` spreads a set of envs over them. Several sets (pipeline stages,
evaluation) share the processes: while the policy looks at one set, the processes step another. A process that
dies or hangs is replaced; its episodes are lost, counted, and restarted with the next seeds.
"""

from __future__ import annotations

import logging
import mmap
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from socket import socketpair
from typing import Any

import numpy as np

from envs.base import ChunkResult, EnvError, EnvSettings, Episode, Integers, Observation, VectorEnv
from envs.buffers import ChunkBuffers
from envs.process import VectorArgs

logger = logging.getLogger(__name__)
START_TIMEOUT_S = 300.0  # importing a simulator and compiling its shaders on a loaded machine
MAX_REPLACEMENTS = 5  # in a row, without one finished chunk in between


class _Lost(Exception):
    """The process is gone; the message says how."""


class _Process:
    """One env process: its pipe, and the answers that came while another set's was awaited."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.answers: dict[int, deque[Any]] = {}
        ours, theirs = socketpair()
        root = str(Path(__file__).resolve().parent.parent)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
        }
        environment.setdefault("OMP_NUM_THREADS", "1")
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "envs.process", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
        )
        assert self.popen.stderr is not None
        os.set_blocking(self.popen.stderr.fileno(), False)
        self.errors = b""
        theirs.close()
        self.connection = Connection(ours.detach())

    def send(self, *command: Any) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # it died: the wait for the answer finds out why
            self.connection.send(command)

    def receive(self, key: int, timeout: float) -> Any:
        """The next answer for one set. Raises _Lost, or EnvError with the process's own error."""
        queue = self.answers.setdefault(key, deque())
        deadline = time.monotonic() + timeout
        while not queue:
            self._drain_errors()
            if not wait([self.connection], max(0.0, min(1.0, deadline - time.monotonic()))):
                if time.monotonic() < deadline:
                    continue
                self.kill()
                raise _Lost(f"did not answer for {timeout:g} s and was killed")
            try:
                answered, ok, payload = self.connection.recv()
            except (EOFError, ConnectionResetError, OSError):
                raise _Lost(self._how_it_died()) from None
            self.answers.setdefault(answered, deque()).append((ok, payload))
        ok, payload = queue.popleft()
        if not ok:
            raise EnvError(payload)
        return payload

    def _drain_errors(self) -> None:
        assert self.popen.stderr is not None
        self.errors = (self.errors + (self.popen.stderr.read() or b""))[-4000:]

    def _how_it_died(self) -> str:
        try:
            code = self.popen.wait(5)
        except subprocess.TimeoutExpired:
            self.kill()
            return "closed its pipe"
        self._drain_errors()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        said = self.errors.decode(errors="replace").strip()
        return how + (f"; it said:\n{said}" if said else "")

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()
        self.connection.close()
        assert self.popen.stderr is not None
        self.popen.stderr.close()


class EnvPool:
    """Env processes. `replaced` and `lost_episodes` count what was replaced so far.

    Args:
        processes: how many; one for each core is best.
        timeout_s: a process silent for longer while stepping is taken for hung and replaced.
    """

    def __init__(self, processes: int, timeout_s: float = 120.0) -> None:
        self.timeout_s = timeout_s
        self.processes = [_Process(number) for number in range(processes)]
        self.sets: list[PooledVectorEnv] = []
        self.replaced = 0
        self.lost_episodes = 0
        self._replaced_in_a_row = 0

    @property
    def pids(self) -> list[int]:
        return [process.popen.pid for process in self.processes]

    def vector_env(
        self,
        settings: EnvSettings,
        env_ids: Sequence[int],
        chunk: int = 1,
        seed: int = 0,
        group_size: int = 1,
        auto_reset: bool = True,
        record_actions: bool = False,
    ) -> PooledVectorEnv:
        """A vector env over the pool's processes; see `EpisodicVectorEnv` for the arguments. Raises EnvError."""
        args = VectorArgs(settings, tuple(env_ids), seed, group_size, auto_reset, record_actions, chunk)
        env = PooledVectorEnv(self, len(self.sets), args)
        self.sets.append(env)
        return env

    def render(self, settings: EnvSettings, episodes: Sequence[Episode]) -> list[np.ndarray]:
        """Films of recorded episodes [T+1, H, W, 3], from a process of its own that can render."""
        process = _Process(-1)
        try:
            process.send("render", settings, list(episodes))
            return process.receive(-1, START_TIMEOUT_S)
        except _Lost as lost:
            raise EnvError(f"the rendering process {lost}") from None
        finally:
            process.kill()

    def replace(self, process: _Process, why: str) -> None:
        """Start a process anew and restart its envs. Raises EnvError when it keeps dying."""
        number = process.number
        running = [env.describe_running(number) for env in self.sets if env.in_flight[number]]
        lost = sum(env.running_episodes(number) for env in self.sets)
        message = f"env process {number} (pid {process.popen.pid}) {why}"
        message += f"; it was stepping {'; '.join(running)}" if running else ""
        self._replaced_in_a_row += 1
        if self._replaced_in_a_row > MAX_REPLACEMENTS:
            raise EnvError(f"{message}. Replaced {MAX_REPLACEMENTS} times in a row without success")
        logger.warning("%s. Replacing it; %d episodes are lost and restarted", message, lost)
        if process.popen.poll() is None:
            process.kill()
        self.replaced += 1
        self.lost_episodes += lost
        self.processes[number] = _Process(number)
        for env in self.sets:
            env.start_process(number)
            env.mark_lost(number)

    def finished_chunk(self) -> None:
        self._replaced_in_a_row = 0

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()


class PooledVectorEnv(VectorEnv):
    """A set of envs spread over a pool's processes in contiguous shares."""

    def __init__(self, pool: EnvPool, key: int, args: VectorArgs) -> None:
        self.pool, self.key, self.args = pool, key, args
        self.num_envs = len(args.env_ids)
        count = len(pool.processes)
        edges = [round(i * self.num_envs / count) for i in range(count + 1)]
        self.shares = list(zip(edges[:-1], edges[1:], strict=True))
        self.in_flight = [False] * count
        self._asked: list[tuple[Any, ...]] = [()] * count
        self._lost = [False] * count
        for number in self._used():
            pool.processes[number].send("make", key, self._args_of(number))
        specs = [self._receive_start(number) for number in self._used()]
        self.spec = specs[0]
        size = ChunkBuffers.size(self.spec, self.num_envs, args.chunk)
        self._descriptor = os.memfd_create(f"envs-{key}")
        os.ftruncate(self._descriptor, size)
        self.buffers = ChunkBuffers.over(mmap.mmap(self._descriptor, size), self.spec, self.num_envs, args.chunk)
        for number in self._used():
            self._attach(number)

    # ------------------------------------------------------------------------------------------ contract

    def reset(
        self,
        env_ids: Integers | None = None,
        seeds: Integers | None = None,
        init_state_ids: Integers | None = None,
    ) -> Observation:
        wanted = list(range(self.num_envs)) if env_ids is None else [int(i) for i in env_ids]
        for number in self._used():
            first, last = self.shares[number]
            chosen = [i for i, row in enumerate(wanted) if first <= row < last]
            rows = [wanted[i] - first for i in chosen]
            if rows:
                own_seeds = None if seeds is None else [int(seeds[i]) for i in chosen]
                own_init_states = None if init_state_ids is None else [int(init_state_ids[i]) for i in chosen]
                self._ask(number, "reset", rows, own_seeds, own_init_states)
        self._collect()
        for number in self._used():  # whoever was reset as a whole has nothing left to lose
            self._lost[number] &= not set(range(*self.shares[number])) <= set(wanted)
        return self.observation()

    def observation(self) -> Observation:
        return self.buffers.observation(self.spec.instruction)

    def chunk_step_async(self, actions: np.ndarray) -> None:
        if actions.shape != self.buffers.action.shape:
            raise ValueError(
                f"actions have shape {actions.shape}, expected {self.buffers.action.shape} (envs, chunk, dimensions)"
            )
        self.buffers.action[:] = actions
        for number in self._used():
            if not self._lost[number]:
                self._ask(number, "chunk")

    def chunk_step_wait(self) -> ChunkResult:
        answers = self._collect()
        lost = np.zeros(self.num_envs, bool)
        for number in self._used():
            if self._lost[number]:
                first, last = self.shares[number]
                lost[first:last] = True
                self.buffers.rows(first, last).clear()
                self._lost[number] = False
        episodes = [episode for _, (found, _, _) in sorted(answers.items()) for episode in found]
        result = self.buffers.result(self.spec.instruction, episodes, lost)
        result.spans = [(number, start, end) for number, (_, start, end) in answers.items()]
        if answers:
            self.pool.finished_chunk()
        return result

    def state(self) -> list[dict[str, Any]]:
        for number in self._used():
            self._ask(number, "state")
        return [slot for _, slots in sorted(self._collect().items()) for slot in slots]

    def restore(self, state: list[dict[str, Any]]) -> Observation:
        for number in self._used():
            first, last = self.shares[number]
            self._ask(number, "restore", state[first:last])
        self._collect()
        return self.observation()

    def close(self) -> None:
        for number in self._used():
            self._ask(number, "close")
        self._collect()
        os.close(self._descriptor)

    # ------------------------------------------------------------------------------------------ processes

    def running_episodes(self, number: int) -> int:
        first, last = self.shares[number]
        return int(self.buffers.running[first:last].sum())

    def describe_running(self, number: int) -> str:
        """The envs of a process, with task, seed and step, as the shared memory last told."""
        first, last = self.shares[number]
        seeds, steps = self.buffers.episode_seed, self.buffers.episode_step
        envs = ", ".join(f"env {self.args.env_ids[r]} (seed {seeds[r]}, step {steps[r]})" for r in range(first, last))
        return f"{self.args.settings.id}: {envs}"

    def start_process(self, number: int) -> None:
        """Make this set's envs in a new process and begin their next episodes."""
        if self.shares[number][0] == self.shares[number][1]:
            return
        self.pool.processes[number].send("make", self.key, self._args_of(number))
        self._receive_start(number)
        self._attach(number)
        self.pool.processes[number].send("reset", self.key, list(range(len(self._args_of(number).env_ids))), None, None)
        self._receive_start(number)

    def mark_lost(self, number: int) -> None:
        """Nothing of the chunk that is in flight, or of the next one, happens in this process's envs."""
        self._lost[number] = self.shares[number][0] < self.shares[number][1]
        self.in_flight[number] = False

    def _used(self) -> list[int]:
        return [number for number, (first, last) in enumerate(self.shares) if first < last]

    def _args_of(self, number: int) -> VectorArgs:
        first, last = self.shares[number]
        return VectorArgs(**{**self.args.__dict__, "env_ids": self.args.env_ids[first:last]})

    def _attach(self, number: int) -> None:
        path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        first, last = self.shares[number]
        self.pool.processes[number].send(
            "attach", self.key, path, self.spec, self.num_envs, self.args.chunk, first, last
        )
        self._receive_start(number)

    def _receive_start(self, number: int) -> Any:
        try:
            return self.pool.processes[number].receive(self.key, START_TIMEOUT_S)
        except _Lost as lost:
            raise EnvError(f"env process {number} {lost} while making {self.args.settings.id}") from None

    def _ask(self, number: int, command: str, *args: Any) -> None:
        self.pool.processes[number].send(command, self.key, *args)
        self._asked[number] = (command, *args)
        self.in_flight[number] = True

    def _collect(self) -> dict[int, Any]:
        """The answers of all processes asked. One that died is replaced: its chunk is lost, others are repeated."""
        answers = {}
        for number in self._used():
            while self.in_flight[number]:
                process = self.pool.processes[number]
                try:
                    answers[number] = process.receive(self.key, self.pool.timeout_s)
                    self.in_flight[number] = False
                    continue
                except _Lost as lost:
                    self.pool.replace(process, str(lost))
                except EnvError as error:
                    if self._asked[number][0] != "chunk":  # it would fail again
                        raise
                    self.pool.replace(process, f"failed:\n{error}")
                if self._asked[number][0] != "chunk":
                    self._ask(number, *self._asked[number])
        return answers
