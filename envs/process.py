"""The program of one env process: it makes envs, steps whole chunks and writes into shared memory.

Started by `handle.ProcessHandle` with a descriptor. It lives for the whole run, ends when its parent does (the pipe
closes), and answers commands in the order they come. Chunks begin by the set's doorbell too; a command with the number
of the last one that began so has its outcome for an answer:

    ("make", set, VectorArgs)       -> EnvSpec
    ("attach", set, path, spec, num_envs, chunk, first, last)   -> where the set's doorbell is
    ("reset", set, rows, seeds, init_state_ids, numbers)   numbers: of episodes begun before, to be able to repeat it
    ("chunk", set, number)          -> (episodes, start, end, cpu seconds)
    ("state", set), ("restore", set, state), ("close", set)
    ("render", settings, episodes)
"""

from __future__ import annotations

import mmap
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from envs.base import EnvError, EnvSettings, EnvSpec, Episode
from envs.buffers import ChunkBuffers
from envs.doorbell import Doorbell
from envs.episodes import EpisodicVectorEnv
from envs.slots import VectorArgs


class EnvProcess:
    """The sets of envs of one process, and the commands on them."""

    def __init__(self) -> None:
        self.sets: dict[int, EpisodicVectorEnv] = {}
        self.bells: dict[int, Doorbell] = {}
        self.rung: dict[int, tuple[int, bool, Any]] = {}  # of each set: the last number rung, and the chunk's outcome
        self.poller = select.poll()
        self.cpu_s = 0.0  # processor seconds when the last command was done

    def make(self, key: int, args: VectorArgs) -> EnvSpec:
        self.sets[key] = EpisodicVectorEnv(args)
        return self.sets[key].spec

    def attach(self, key: int, path: str, spec: EnvSpec, num_envs: int, chunk: int, first: int, last: int) -> list[Any]:
        descriptor = os.open(path, os.O_RDWR)
        memory = mmap.mmap(descriptor, 0)
        os.close(descriptor)
        self.sets[key].buffers = ChunkBuffers.over(memory, spec, num_envs, chunk).rows(first, last)
        bell = self.bells[key] = Doorbell()
        self.poller.register(bell.descriptor, select.POLLIN)
        return bell.place

    def reset(
        self,
        key: int,
        rows: Sequence[int],
        seeds: Sequence[int] | None,
        init_state_ids: Sequence[int] | None,
        numbers: Sequence[int],
    ) -> None:
        self.sets[key].buffers.episode_number[rows] = numbers
        self.sets[key].reset(rows, seeds, init_state_ids)

    def chunk(self, key: int) -> tuple[list[Episode], float, float, float]:
        """The processor seconds include those that went into the last answer and this command."""
        start, env = time.monotonic(), self.sets[key]
        episodes = env.run_chunk(env.buffers.action)
        env.buffers.chunks += 1
        env.buffers.steps += env.buffers.valid.sum(axis=1)
        return episodes, start, time.monotonic(), time.process_time() - self.cpu_s

    def state(self, key: int) -> list[dict[str, Any]]:
        return self.sets[key].state()

    def restore(self, key: int, state: list[dict[str, Any]]) -> None:
        self.sets[key].restore(state)

    def close(self, key: int) -> None:
        self.rung.pop(key, None)
        if (bell := self.bells.pop(key, None)) is not None:
            self.poller.unregister(bell.descriptor)
            bell.close()
        if key in self.sets:
            self.sets.pop(key).close()

    def render(self, settings: EnvSettings, episodes: Sequence[Episode]) -> list[np.ndarray]:
        """Pictures [T+1, H, W, 3] of recorded episodes, by running them again."""
        vector = EpisodicVectorEnv(VectorArgs(settings, [0], auto_reset=False))
        env = vector.envs[0]
        films = []
        for episode in episodes:
            vector.reset([0], [episode.seed], None if episode.init_state_id is None else [episode.init_state_id])
            frames = [env.render()]
            for action in episode.actions if episode.actions is not None else ():
                vector.chunk_step(action[None, None])
                frames.append(env.render())
            films.append(np.stack(frames))
        return films

    def ring(self, key: int) -> None:
        """Run the chunk that a set's doorbell was rung for, if it was."""
        with suppress(BlockingIOError):
            number = self.bells[key].number()
            ok, outcome = self.perform("chunk", key)
            self.rung[key] = number, ok, outcome
            episodes, *times = outcome if ok else ([None], 0.0, 0.0, 0.0)
            self.bells[key].answer(number, not episodes, *times)

    def answer(self, command: str, *args: Any) -> tuple[int, bool, Any]:
        """Whose answer it is, whether the command succeeded, and with what."""
        key = args[0] if isinstance(args[0], int) else -1
        if command != "chunk":
            return (key, *self.perform(command, *args))
        if number := args[1]:
            self.ring(key)  # perhaps it was not heard yet
        last, *outcome = self.rung.get(key, (0,))
        return (key, *(outcome if last == number != 0 else self.perform("chunk", key)))

    def perform(self, command: str, *args: Any) -> tuple[bool, Any]:
        """Whether a command succeeded, and with what, or what went wrong."""
        try:
            return True, getattr(self, command)(*args)
        except EnvError as error:
            return False, str(error)
        except (Exception, SystemExit):
            return False, traceback.format_exc()
        finally:
            self.cpu_s = time.process_time()


def serve(connection: Connection) -> None:
    """Answer commands until the parent closes the pipe, and doorbells."""
    process = EnvProcess()
    process.poller.register(connection.fileno(), select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in process.poller.poll()}
        for key, bell in list(process.bells.items()):
            if bell.descriptor in ready:
                process.ring(key)
        if connection.fileno() not in ready:
            continue
        try:
            connection.send(process.answer(*connection.recv()))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides what ends
    serve(Connection(int(sys.argv[1])))
    os._exit(0)  # simulators may hang or crash in their destructors; everything of value has been sent
