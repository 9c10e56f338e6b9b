"""The vector envs of an env server, in the trainer's process. Made by `client.RemotePool`, which does the talking.

On one host chunks travel in shared memory, and once the first has told where the env processes' doorbells are, without
the server, which is asked when one is out of the ordinary.
"""

from __future__ import annotations

import itertools
import mmap
import os
import re
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from envs import wire
from envs.base import ChunkResult, EnvError, Episode, Integers, Observation, VectorEnv
from envs.buffers import ChunkBuffers
from envs.doorbell import Doorbells
from envs.slots import VectorArgs, check_actions, check_rows

if TYPE_CHECKING:
    from envs.client import RemotePool, Request

RUNG_S = 1.0  # without an answer to a doorbell, whether the server knows of the chunk


class RemoteVectorEnv(VectorEnv):
    """A set of envs on a server. Made by `RemotePool.vector_env`.

    `buffers` is the server's memory, mapped, where both are on one host, else a copy of what it sends.
    """

    buffers: ChunkBuffers

    def __init__(self, pool: RemotePool, key: int, args: VectorArgs) -> None:
        self.pool, self.key, self.args = pool, key, args
        self.num_envs = len(args.env_ids)
        self.is_shared = False
        self._numbers = np.zeros(self.num_envs, np.int64)  # episodes begun
        self._lost = np.zeros(self.num_envs, bool)  # since the last chunk's outcome was given out
        self._step: Request | None = None
        self._bells: Doorbells | None = None
        self._chunks = itertools.count(1)  # numbers for the doorbells
        self._running = np.zeros(self.num_envs, bool)  # episodes that the trainer has not been told to be over
        self._rung = 0  # of the chunk in flight, if they were rung for it
        self._resetting: list[int] = []  # rows whose reset is in flight
        self._kept: ChunkResult | None = None  # of the chunk in flight, where its session was lost since its answer
        self.take_place(pool.ask("make", **self.description()))

    # ------------------------------------------------------------------------------------------ contract

    def reset(
        self,
        env_ids: Integers | None = None,
        seeds: Integers | None = None,
        init_state_ids: Integers | None = None,
    ) -> Observation:
        self._refuse_in_flight("reset")
        rows = check_rows(self.num_envs, env_ids, seeds, init_state_ids)
        given = [None if ids is None else [int(one) for one in ids] for ids in (seeds, init_state_ids)]
        numbers = self.buffers.episode_number[rows].tolist()  # so that it can be repeated
        self._resetting = rows
        try:
            self._ask("reset", rows=rows, seeds=given[0], init_state_ids=given[1], numbers=numbers)
        finally:
            self._resetting = []
        self._lost[rows] = False
        self._running |= self.buffers.running
        return self.observation()

    def observation(self) -> Observation:
        return self.buffers.observation(self.spec.instructions)

    def chunk_step_async(self, actions: np.ndarray) -> None:
        self._refuse_in_flight("chunk_step_async")
        check_actions(actions, self.buffers.action.shape, self.args.env_ids)
        self._running |= self.buffers.running
        self.buffers.began[:] = self.buffers.running
        self.buffers.action[:] = actions
        if self._bells is None:
            self._ask_for_chunk()
            return
        self._rung = next(self._chunks)
        self.buffers.skip[:] = False
        with suppress(OSError):  # a process is gone, which the wait finds out
            self._bells.ring(self._rung)

    def chunk_step_wait(self) -> ChunkResult:
        if not self._rung and self._step is None:
            raise RuntimeError("chunk_step_wait without a chunk step in flight")
        result = self._kept or self._finish_rung() or self._finish_asked()
        if self._kept is None:  # else what was lost since is the next chunk's to tell
            self.buffers.began[:] = self._lost[:] = False
            self._take_note(result)
            if not result.lost.any():
                self.pool.chunk_was_finished()
        self._step, self._rung, self._kept = None, 0, None
        return result

    def state(self) -> list[dict[str, Any]]:
        self._refuse_in_flight("state")
        return [{**slot, "actions": np.array(slot["actions"])} for slot in self._ask("state")["value"]]

    def restore(self, state: list[dict[str, Any]]) -> Observation:
        self._refuse_in_flight("restore")
        self._ask("restore", state=state)
        self._lost[:] = False
        self._running[:] = self.buffers.running
        return self.observation()

    def close(self) -> None:
        if self.pool.sets.pop(self.key, None) is not None:
            self.listen([])
            self.pool.ask("drop", set=self.key)

    # ------------------------------------------------------------------------------------------ the session's life

    def description(self) -> dict[str, Any]:
        """What the server has to know to make the set, and to go on with it where an earlier session was lost."""
        args = {**vars(self.args), "settings": wire.plain_settings(self.args.settings)}
        env_ids = np.array(self.args.env_ids, np.int64)  # a list may be too long to be told so
        return {**args, "env_ids": env_ids, "set": self.key, "numbers": self._numbers, "lost": self._lost}

    def lose(self) -> int:
        """Take note that the session is gone: nothing of a chunk in flight happened; the number of episodes lost."""
        in_flight = self._step is not None and self._step.reply is None
        if self._step is not None and "value" in (self._step.reply or {}) and self._kept is None:
            self._kept = self._finish_asked()  # while there is the memory that the answer is about
            self._take_note(self._kept)
        running = self._running | self.buffers.running  # the session may itself have lost some before, and not told
        running[self._resetting] = False  # they are to begin others, and it is repeated
        self.listen([])
        self._numbers = self.buffers.episode_number.copy()
        self._lost |= running
        if in_flight and self._step is not None:
            self._step.reply = {
                "value": {"episodes": [], "lost": np.flatnonzero(self._lost), "spans": [], "doorbells": []},
                "now": time.monotonic(),
            }
            self._lost[:] = False
        return int(running.sum())

    def take_place(self, made: dict[str, Any]) -> None:
        """Go on with what the server has made. Raises EnvError if it is something else than before."""
        spec = wire.spec_of(made["value"]["spec"])
        if (before := getattr(self, "spec", spec)) != spec:
            names = [name for name, value in vars(spec).items() if value != getattr(before, name)]
            changes = "; ".join(f"{name} was {getattr(before, name)} and is {getattr(spec, name)}" for name in names)
            raise EnvError(f"the env server at {self.pool.address} came back with other envs: {changes}")
        self.spec = spec
        memory = map_shared(made["value"]["memory"], ChunkBuffers.size(spec, self.num_envs, self.args.chunk))
        self.is_shared = memory is not None
        if memory is not None:
            self.buffers = ChunkBuffers.over(memory, spec, self.num_envs, self.args.chunk)
        else:
            self.buffers = ChunkBuffers.allocate(spec, self.num_envs, self.args.chunk)
            self._adopt(made)
        self._running[:] = self.buffers.running

    def listen(self, places: list[list[Any]]) -> None:
        """Use these doorbells from now on, or none."""
        if self._bells is not None and self._bells.places != places:
            self._bells.close()
            self._bells = None
        if places and self._bells is None:
            with suppress(OSError, TypeError, ValueError):  # a process is gone again; or they are no such places
                self._bells = Doorbells(places)

    def _ask_for_chunk(self) -> None:
        fields = {"shared": True, "rung": self._rung} if self.is_shared else {"actions": self.buffers.action}
        self._step = self.pool.send("step", set=self.key, **fields)

    def _finish_rung(self) -> ChunkResult | None:
        """The chunk that the doorbells were rung for; None if the server has to be asked for it."""
        if self._step is not None or self._bells is None:
            return None
        if (spans := self._bells.wait(self._rung, RUNG_S)) is None:
            return None
        result = self.buffers.result(self.spec.instructions, [])
        result.spans = spans
        was_replaced = not np.array_equal(self.buffers.began, self._running)  # a process, for the sake of another set
        return None if was_replaced else result

    def _finish_asked(self) -> ChunkResult:
        """The server's answer to the chunk in flight."""
        if self._step is None:
            self._ask_for_chunk()
        assert self._step is not None
        reply = self.pool.wait(self._step)
        self._adopt(reply)
        value, lost = reply["value"], np.zeros(self.num_envs, bool)
        lost[value["lost"]] = True
        if self.is_shared:
            self.listen(value["doorbells"])
        episodes = [Episode(**episode) for episode in value["episodes"]]
        result = self.buffers.result(self.spec.instructions, episodes, lost)
        shift = 0.0 if self.is_shared else time.monotonic() - reply["now"]  # another machine's clock
        result.spans = [(number, start + shift, end + shift, cpu) for number, start, end, cpu in value["spans"]]
        return result

    def _take_note(self, result: ChunkResult) -> None:
        """Of what the trainer knows now, not of what was lost since the chunk was done."""
        self._running = self.buffers.running | (self._running & ~result.ended & ~result.lost)

    def _ask(self, op: str, **fields: Any) -> dict[str, Any]:
        reply = self.pool.ask(op, set=self.key, shared=self.is_shared, **fields)
        self._adopt(reply)
        return reply

    def _adopt(self, reply: dict[str, Any]) -> None:
        """Take the arrays of an answer for those of the buffers."""
        arrays, own = reply.get("arrays", {}), self.buffers.arrays
        for name, array in arrays.items():
            if name not in own or (array.shape, array.dtype) != (own[name].shape, own[name].dtype):
                raise EnvError(f"the env server at {self.pool.address} sent {name} {array.shape} {array.dtype}")
        if arrays and not self.is_shared:
            self.buffers = ChunkBuffers({**own, **arrays})

    def _refuse_in_flight(self, call: str) -> None:
        if self._step is not None or self._rung:
            raise RuntimeError(f"{call} while a chunk step is in flight; call chunk_step_wait first")


def map_shared(place: dict[str, Any], size: int) -> mmap.mmap | None:
    """The server's memory of a set, if it is on this host, and this user's."""
    path = f"/proc/{int(place['pid'])}/fd/{int(place['descriptor'])}"
    if not re.fullmatch(r"/memfd:envs-[0-9a-f]{16} \(deleted\)", place["name"]):
        return None
    try:
        if os.readlink(path) != place["name"]:
            return None
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        return mmap.mmap(descriptor, size) if os.fstat(descriptor).st_size == size else None
    finally:
        os.close(descriptor)
