"""Many envs in a few processes that live for the whole run, with shared memory both ways.

One `EnvPool` owns the processes; `vector_env` spreads a set of envs over them. Several sets (pipeline stages,
evaluation) share the processes: while the policy looks at one set, the processes step another. A process that dies
or hangs is replaced. Its episodes are lost and counted; with auto-reset the next ones begin, without it the envs
stay frozen until they are reset.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import mmap
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from envs.base import ChunkResult, EnvError, EnvSettings, EnvSpec, Episode, Integers, Observation, VectorEnv
from envs.buffers import ChunkBuffers
from envs.handle import ProcessHandle, ProcessLost
from envs.slots import VectorArgs, check_actions, check_rows

logger = logging.getLogger(__name__)
START_TIMEOUT_S = 300.0  # importing a simulator and compiling its shaders on a loaded machine
MAX_REPLACEMENTS = 3  # of a process for one set of envs, without a finished chunk of that set in between


class EnvPool:
    """Env processes. `replaced` and `lost_episodes` count what was replaced so far.

    Args:
        processes: how many; one for each core is best.
        timeout_s: a process silent for longer while stepping is taken for hung and replaced.
    """

    def __init__(self, processes: int, timeout_s: float = 120.0) -> None:
        self.timeout_s = timeout_s
        self.processes = [ProcessHandle(number, timeout_s) for number in range(processes)]
        self.sets: dict[int, PooledVectorEnv] = {}
        self.replaced = 0
        self.lost_episodes = 0
        self._sets_made = 0
        self._given_up = False

    @property
    def num_processes(self) -> int:
        return len(self.processes)

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
        """A vector env over the pool's processes; see `VectorArgs` for the arguments. Raises EnvError."""
        args = VectorArgs(settings, tuple(env_ids), chunk, seed, group_size, auto_reset, record_actions)
        self._sets_made += 1
        env = self.sets[self._sets_made] = PooledVectorEnv(self, self._sets_made, args)
        try:
            env.start()
        except BaseException:
            env.abandon()
            raise
        return env

    def render(self, settings: EnvSettings, episodes: Sequence[Episode]) -> list[np.ndarray]:
        """Films of recorded episodes [T+1, H, W, 3], from a process of its own that can render."""
        process = ProcessHandle(-1, START_TIMEOUT_S)
        try:
            process.send("render", settings, list(episodes))
            return process.receive(-1, START_TIMEOUT_S)
        except ProcessLost as lost:
            raise EnvError(f"the rendering process {lost}") from None
        finally:
            process.kill()

    def take_in(self) -> None:
        """Read what the processes have answered, without waiting."""
        for process in self.processes:
            process.take_in()

    def replace(self, number: int, why: str) -> None:
        """Start a process anew, with its envs. Raises EnvError when it keeps dying."""
        for attempt in itertools.count(1):
            process = self.processes[number]
            culprits = "; ".join(filter(None, (env.describe_busy(number) for env in self.sets.values())))
            message = f"env process {number} (pid {process.popen.pid}) {why}"
            message = f"while running {culprits}: {message}" if culprits else message
            process.kill()  # first: after an error it lives, and may be writing another set's chunk
            lost = sum(env.lose(number) for env in self.sets.values())
            self.lost_episodes += lost
            if self._given_up:
                raise EnvError(f"{message}\nIt was given up")
            if max([attempt, *(env.failures[number] for env in self.sets.values())]) > MAX_REPLACEMENTS:
                raise EnvError(f"{message}\nIt was replaced {MAX_REPLACEMENTS} times in a row without success")
            logger.warning("%s\nReplacing it; %d episodes are lost", message, lost)
            self.replaced += 1
            self.processes[number] = ProcessHandle(number, self.timeout_s)
            try:
                for env in self.sets.values():
                    env.start_process(number)
                return
            except ProcessLost as again:
                why = str(again)

    def give_up(self) -> None:
        """End what another thread waits for: the processes, of which none is replaced any more. `close` follows."""
        self._given_up = True
        for process in self.processes:
            process.popen.kill()

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
        for env in list(self.sets.values()):
            env.abandon()


class PooledVectorEnv(VectorEnv):
    """A set of envs spread over a pool's processes in contiguous shares. Made by `EnvPool.vector_env`."""

    buffers: ChunkBuffers

    def __init__(self, pool: EnvPool, key: int, args: VectorArgs) -> None:
        self.pool, self.key, self.args = pool, key, args
        self.num_envs = len(args.env_ids)
        count = len(pool.processes)
        edges = [round(i * self.num_envs / count) for i in range(count + 1)]
        self.shares = [slice(first, last) for first, last in zip(edges[:-1], edges[1:], strict=True)]
        self.used = [number for number, share in enumerate(self.shares) if share.start < share.stop]
        self._asked: list[tuple[Any, ...] | None] = [None] * count  # the command in flight in each process
        self.failures = [0] * count  # deaths of each process over this set's commands since it last finished a chunk
        self._chunks = [0] * count  # that each process had finished when it died
        self._stepping = False
        self._bells: dict[int, list[Any]] = {}  # where each process has its doorbell
        self._lost = np.zeros(self.num_envs, bool)  # since the last chunk's outcome was given out
        self._descriptor = -1

    # ------------------------------------------------------------------------------------------ contract

    def reset(
        self,
        env_ids: Integers | None = None,
        seeds: Integers | None = None,
        init_state_ids: Integers | None = None,
        numbers: Integers | None = None,
    ) -> Observation:
        """`numbers`: of episodes that each of them had begun, where this is not the first try."""
        self._refuse_in_flight("reset")
        wanted = check_rows(self.num_envs, env_ids, seeds, init_state_ids)
        before = self.buffers.episode_number.copy()
        if numbers is not None:
            before[wanted] = numbers
        given = [None if ids is None else [int(one) for one in ids] for ids in (seeds, init_state_ids)]
        for number in self.used:
            share = self.shares[number]
            chosen = [i for i, row in enumerate(wanted) if share.start <= row < share.stop]
            rows = [wanted[i] - share.start for i in chosen]
            if rows:
                own = [None if ids is None else [ids[i] for i in chosen] for ids in given]
                self._ask(number, "reset", rows, *own, before[share][rows].tolist())
        self._collect()
        self._lost[wanted] = False
        return self.observation()

    def observation(self) -> Observation:
        return self.buffers.observation(self.spec.instructions)

    def chunk_step_async(self, actions: np.ndarray) -> None:
        self._refuse_in_flight("chunk_step_async")
        check_actions(actions, self.buffers.action.shape, self.args.env_ids)
        self.buffers.action[:] = actions
        self.begin_chunk()

    def begin_chunk(self, rung: int = 0) -> None:
        """Begin a chunk step with the actions in the buffers, or take over the one that doorbells were rung for."""
        self._refuse_in_flight("begin_chunk")
        self.buffers.skip[:] = self._lost
        if not rung:
            self.buffers.began[:] = self.buffers.running
        self._stepping = True
        for number in self.used:
            self._ask(number, "chunk", rung)

    def chunk_step_wait(self) -> ChunkResult:
        episodes, lost, spans = self.finish_chunk()
        result = self.buffers.result(self.spec.instructions, episodes, lost)
        result.spans = spans
        return result

    def finish_chunk(self) -> tuple[list[Episode], np.ndarray, list[tuple[int, float, float, float]]]:
        """Wait for the chunk step in flight; its episodes, lost envs and spans. The rest is in the buffers."""
        if not self._stepping:
            raise RuntimeError("chunk_step_wait without a chunk step in flight")
        answers = self._collect()
        self._stepping = False
        self.buffers.began[:] = False
        episodes = [episode for _, (found, *_) in sorted(answers.items()) for episode in found]
        spans = [(number, *times) for number, (_, *times) in answers.items()]
        lost = self._lost.copy()
        self._lost[:] = False
        return episodes, lost, spans

    def awaited(self) -> ProcessHandle | None:
        """The first process whose answer to the chunk step in flight was not taken in yet."""
        return next((process for process in self._asked_processes() if process.peek(self.key) is None), None)

    def has_failed(self) -> bool:
        """Whether finishing the chunk step in flight, as far as it was taken in, takes the replacement of a process."""
        return any(process.is_lost or process.peek(self.key) is False for process in self._asked_processes())

    def go_on(self, numbers: np.ndarray, lost: np.ndarray) -> None:
        """Take the place of a set that was lost as a whole, before any other call.

        Args:
            numbers: [N] episodes that each env had begun; with auto-reset the next ones begin now.
            lost: [N] what the next chunk's outcome has to report.
        """
        self.buffers.episode_number[:] = numbers
        if self.args.auto_reset and (begun := np.flatnonzero(numbers).tolist()):
            self.reset(begun)
        self._lost[:] = lost

    @property
    def doorbells(self) -> list[list[Any]]:
        """For `doorbell.Doorbells`: number of each process, and the place of its doorbell."""
        return [[number, *self._bells[number]] for number in self.used]

    @property
    def memory(self) -> tuple[int, str]:
        """Descriptor and name of the shared memory, for other processes of this user (`/proc/PID/fd/DESCRIPTOR`)."""
        return self._descriptor, os.readlink(f"/proc/self/fd/{self._descriptor}")

    def state(self) -> list[dict[str, Any]]:
        self._refuse_in_flight("state")
        for number in self.used:
            self._ask(number, "state")
        return [slot for _, slots in sorted(self._collect().items()) for slot in slots]

    def restore(self, state: list[dict[str, Any]]) -> Observation:
        self._refuse_in_flight("restore")
        for number in self.used:
            self._ask(number, "restore", state[self.shares[number]])
        self._collect()
        self._lost[:] = False
        return self.observation()

    def close(self) -> None:
        self.abandon()

    # ------------------------------------------------------------------------------------------ life

    def start(self) -> None:
        """Make the envs, in all processes at once."""
        for number in self.used:
            self.pool.processes[number].send("make", self.key, self._args_of(number))
        for number in self.used:
            try:
                self._finish_start(number)
            except ProcessLost as lost:
                self.pool.replace(number, f"{lost}\nwhile making {self.args.settings.id}")

    def start_process(self, number: int) -> None:
        """Make this set's envs in a new process and, with auto-reset, begin their next episodes."""
        if number in self.used:
            self.pool.processes[number].send("make", self.key, self._args_of(number))
            self._finish_start(number)

    def lose(self, number: int) -> int:
        """Take note that a process is gone: nothing of the chunk in flight happened; the number of episodes lost."""
        if self._descriptor < 0:
            return 0
        share = self.shares[number]
        rows = self.buffers.rows(share.start, share.stop)
        before, self._chunks[number] = self._chunks[number], int(rows.chunks.max(initial=0))
        if self._chunks[number] > before:  # whoever began them
            self.failures[number] = 0
        asked, self._asked[number] = self._asked[number], None
        self.failures[number] += asked is not None
        running = rows.began | rows.running
        if asked is not None and asked[0] == "reset":
            running[asked[1]] = False  # they are to begin others, and it is repeated
        in_flight = asked is not None or rows.began.any()
        rows.began[:] = False  # first, so that who finds it as it was has read nothing of what follows
        if in_flight:  # else the trainer may not have read the last chunk's outcome yet
            rows.clear()
        rows.running[:] = rows.busy[:] = False
        self._lost[share] |= running
        return int(running.sum())

    def describe_busy(self, number: int) -> str:
        """The env that a process was running, with task, seed and step, as the shared memory last told."""
        if self._descriptor < 0:
            return ""
        share, out = self.shares[number], self.buffers
        rows = [row for row in range(share.start, share.stop) if out.busy[row]]
        return ", ".join(
            f"env {self.args.env_ids[row]} ({self.args.settings.id}, seed {out.episode_seed[row]}, "
            f"step {out.episode_step[row]})"
            for row in rows
        )

    def abandon(self) -> None:
        """Free this set's envs and memory, without waiting for them."""
        if self.pool.sets.pop(self.key, None) is None:
            return
        for number in self.used:
            with suppress(OSError):  # the pool is closed
                self.pool.processes[number].send("close", self.key)
        if self._descriptor >= 0:
            os.close(self._descriptor)

    # ------------------------------------------------------------------------------------------ processes

    def _finish_start(self, number: int) -> None:
        """Take the answer to "make", share the memory, begin what is to be begun. Raises ProcessLost, EnvError."""
        process, share = self.pool.processes[number], self.shares[number]
        spec = process.receive(self.key, START_TIMEOUT_S)
        if self._descriptor < 0:
            self._allocate(spec)
        path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        process.send("attach", self.key, path, spec, self.num_envs, self.args.chunk, share.start, share.stop)
        self._bells[number] = process.receive(self.key, START_TIMEOUT_S)
        numbers = self.buffers.episode_number[share]
        begun = np.flatnonzero(numbers).tolist()
        if begun and self.args.auto_reset:
            process.send("reset", self.key, begun, None, None, numbers[begun].tolist())
            process.receive(self.key, START_TIMEOUT_S)

    def _allocate(self, spec: EnvSpec) -> None:
        self.spec = spec
        size = ChunkBuffers.size(spec, self.num_envs, self.args.chunk)
        name = f"envs-{secrets.token_hex(8)}"  # one of its kind, so that who finds it has found this one
        self._descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._descriptor, size)
        fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self.buffers = ChunkBuffers.over(mmap.mmap(self._descriptor, size), spec, self.num_envs, self.args.chunk)

    def _args_of(self, number: int) -> VectorArgs:
        return replace(self.args, env_ids=self.args.env_ids[self.shares[number]])

    def _asked_processes(self) -> list[ProcessHandle]:
        """Those that owe an answer; one that another set's call has replaced owes none."""
        return [self.pool.processes[number] for number in self.used if self._asked[number] is not None]

    def _ask(self, number: int, command: str, *args: Any) -> None:
        self._asked[number] = (command, *args)
        self.pool.processes[number].send(command, self.key, *args)

    def _collect(self) -> dict[int, Any]:
        """The answers of all processes asked. One that died is replaced: its chunk is lost, others are repeated."""
        answers: dict[int, Any] = {}
        failure: EnvError | None = None
        for number in self.used:
            while (asked := self._asked[number]) is not None:
                try:
                    answers[number] = self.pool.processes[number].receive(self.key, self.pool.timeout_s)
                    self._asked[number] = None
                    continue
                except ProcessLost as lost:
                    why = str(lost)
                except EnvError as error:
                    why = f"failed:\n{error}"
                    if asked[0] != "chunk":  # it would fail again
                        failure = failure or EnvError(f"{self.describe_busy(number)} {why}".strip())
                        self._asked[number] = None
                        self.buffers.busy[self.shares[number]] = False
                        continue
                self.pool.replace(number, why)
                if asked[0] != "chunk":
                    self._ask(number, *asked)
        if failure is not None:
            raise failure
        return answers

    def _refuse_in_flight(self, call: str) -> None:
        if self._stepping:
            raise RuntimeError(f"{call} while a chunk step is in flight; call chunk_step_wait first")
