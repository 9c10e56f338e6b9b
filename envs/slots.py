"""Episode bookkeeping that all vector envs of this package share: seeds, lengths, returns, success, records.

How the simulators behind it are stepped is decided by subclasses: `episodes` (one env after another) and `batch`
(all envs by one call).
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from envs import base
from envs.base import (
    ActionSpec,
    ChunkResult,
    EnvError,
    EnvSettings,
    EnvSpec,
    Episode,
    Integers,
    Observation,
    Step,
    Task,
)
from envs.buffers import ChunkBuffers


@dataclass(frozen=True)
class VectorArgs:
    """How to make a vector env.

    Attributes:
        settings: how to make each env.
        env_ids: number of each env in the whole run; decides its random stream and stands in its records.
        chunk: C, actions in a chunk.
        seed: base of the episode seeds.
        group_size: consecutive env ids that share their seeds (GRPO); 1 for none.
        auto_reset: begin a new episode at the end of the chunk in which one ended.
        record_actions: keep each episode's actions in its record.
    """

    settings: EnvSettings
    env_ids: Sequence[int]
    chunk: int = 1
    seed: int = 0
    group_size: int = 1
    auto_reset: bool = True
    record_actions: bool = False


@dataclass
class Slot:
    """One env's place and the episode in it. `number` counts the episodes begun."""

    env_id: int
    stream: int
    number: int = 0
    seed: int = 0
    init_state_id: int | None = None
    running: bool = False
    length: int = 0
    episode_return: float = 0.0
    success_once: bool = False
    success_now: bool = False
    actions: list[np.ndarray] = field(default_factory=list)

    def advance(self, raw: Step, action: np.ndarray, settings: EnvSettings, horizon: int) -> Step:
        """Count one env step; returns what the agent is told of it."""
        self.length += 1
        self.actions.append(np.array(action, np.float32))
        self.success_now = raw.success
        self.success_once |= raw.success
        terminated = raw.terminated and not settings.ignore_terminations
        truncated = (raw.truncated or self.length >= horizon) and not terminated
        self.running = not (terminated or truncated)
        bonus = settings.success_bonus if raw.success and terminated else 0.0
        reward = (raw.reward + bonus) * settings.reward_scale
        self.episode_return += reward
        return Step(reward, terminated, truncated, raw.success)

    def record(self, env: str, task: str, with_actions: bool) -> Episode:
        return Episode(
            env_id=self.env_id,
            seed=self.seed,
            init_state_id=self.init_state_id,
            task=task,
            length=self.length,
            episode_return=self.episode_return,
            success_once=self.success_once,
            success_at_end=self.success_now,
            actions=np.stack(self.actions) if with_actions else None,
            env=env,
        )


class SlotVectorEnv(base.VectorEnv):
    """A vector env in this process. `buffers` is where results are written; the pool puts shared memory there."""

    def __init__(self, args: VectorArgs, spec: EnvSpec) -> None:
        """`spec` describes the simulator's own action space; `self.spec` the part that the policy sees."""
        fixed = args.settings.fixed_actions
        beyond = [dim for dim in fixed if not 0 <= dim < spec.action.size]
        if beyond:
            raise EnvError(
                f"fixed_actions names dimension {beyond[0]}, but {args.settings.id} has 0 to {spec.action.size - 1}"
            )
        self.args, self.settings, self.num_envs = args, args.settings, len(args.env_ids)
        self.spec = restrict(spec, args.settings)
        self.slots = [Slot(env_id, env_id // args.group_size) for env_id in args.env_ids]
        self._free_dims = [dim for dim in range(spec.action.size) if dim not in fixed]
        self._template = np.zeros(spec.action.size, np.float32)
        self._template[list(fixed)] = list(fixed.values())
        self._buffers: ChunkBuffers | None = None
        self._pending: Callable[[], list[Episode]] | None = None

    @property
    def buffers(self) -> ChunkBuffers:
        if self._buffers is None:
            self._buffers = ChunkBuffers.allocate(self.spec, self.num_envs, self.args.chunk)
        return self._buffers

    @buffers.setter
    def buffers(self, buffers: ChunkBuffers) -> None:
        self._buffers = buffers

    # ------------------------------------------------------------------------------------------ contract

    def reset(
        self,
        env_ids: Integers | None = None,
        seeds: Integers | None = None,
        init_state_ids: Integers | None = None,
    ) -> Observation:
        self._refuse_in_flight("reset")
        rows = check_rows(self.num_envs, env_ids, seeds, init_state_ids)
        for i, row in enumerate(rows):
            self._begin(
                row,
                None if seeds is None else int(seeds[i]),
                None if init_state_ids is None else int(init_state_ids[i]),
            )
        self._reset_envs(rows)
        self._observe(rows)
        return self.observation()

    def observation(self) -> Observation:
        return self.buffers.observation(self.spec.instructions)

    def chunk_step_async(self, actions: np.ndarray) -> None:
        self._refuse_in_flight("chunk_step_async")
        check_actions(actions, (self.num_envs, self.args.chunk, self.spec.action.size), self.args.env_ids)
        self._pending = self._launch(actions)

    def chunk_step_wait(self) -> ChunkResult:
        if self._pending is None:
            raise RuntimeError("chunk_step_wait without a chunk step in flight")
        finish, self._pending = self._pending, None
        start, cpu = time.monotonic(), time.process_time()
        episodes = finish()
        result = self.buffers.result(self.spec.instructions, episodes)
        result.spans = [(0, start, time.monotonic(), time.process_time() - cpu)]
        return result

    def state(self) -> list[dict[str, Any]]:
        empty = np.zeros((0, self.spec.action.size), np.float32)
        return [
            {
                "number": int(self.buffers.episode_number[row]),
                "seed": slot.seed,
                "init_state_id": slot.init_state_id,
                "running": slot.running,
                "actions": np.stack(slot.actions) if slot.actions else empty,
            }
            for row, slot in enumerate(self.slots)
        ]

    # ------------------------------------------------------------------------------------------ for subclasses

    @abstractmethod
    def run_chunk(self, actions: np.ndarray) -> list[Episode]:
        """Execute a chunk in every running env and leave the outcome in the buffers; the episodes that ended."""

    @abstractmethod
    def _reset_envs(self, rows: Sequence[int]) -> None:
        """Begin, in the simulator, the episodes that the slots of these rows are at the start of."""

    @abstractmethod
    def _observe(self, rows: Sequence[int], final: bool = False) -> None:
        """Write these rows' current observation to the buffers, as the final one of their episodes or as the next."""

    def _launch(self, actions: np.ndarray) -> Callable[[], list[Episode]]:
        """Begin a chunk; the function returned waits for it."""
        return partial(self.run_chunk, actions)

    def _begin(self, row: int, seed: int | None, init_state_id: int | None) -> None:
        """A new episode in the books; without a seed, the next one of the env's stream."""
        slot, out = self.slots[row], self.buffers
        number = int(out.episode_number[row])  # counted there, so that a process that replaces another goes on
        self.slots[row] = Slot(
            env_id=slot.env_id,
            stream=slot.stream,
            number=number + 1,
            seed=base.episode_seed(self.args.seed, slot.stream, number) if seed is None else seed,
            init_state_id=init_state_id,
            running=True,
        )
        out.episode_number[row], out.episode_seed[row] = number + 1, self.slots[row].seed
        out.episode_step[row], out.running[row] = 0, True

    def _advance(self, row: int, column: int, raw: Step, action: np.ndarray) -> None:
        """One step of an env in the books and in the buffers."""
        slot, out = self.slots[row], self.buffers
        step = slot.advance(raw, action, self.settings, self.spec.horizon)
        out.episode_step[row], out.running[row] = slot.length, slot.running
        out.reward[row, column], out.valid[row, column] = step.reward, True
        out.terminated[row, column], out.truncated[row, column] = step.terminated, step.truncated

    def _record(self, row: int) -> Episode:
        tasks = self.spec.tasks
        name = tasks[self.buffers.task[row]].name if tasks else self.settings.id
        return self.slots[row].record(self.settings.id, name, self.args.record_actions)

    def _full_action(self, action: np.ndarray) -> np.ndarray:
        """The policy's action(s) [..., A] with the fixed dimensions put in."""
        full = np.empty((*action.shape[:-1], len(self._template)), np.float32)
        full[...] = self._template
        full[..., self._free_dims] = action
        return full

    def _keep_final(self, rows: Sequence[int]) -> None:
        """Envs that stay frozen go on showing the last observation of their episode."""
        out = self.buffers
        out.state[rows], out.image[rows] = out.final_state[rows], out.final_image[rows]
        out.task[rows] = out.final_task[rows]

    def _refuse_in_flight(self, call: str) -> None:
        if self._pending is not None:
            raise RuntimeError(f"{call} while a chunk step is in flight; call chunk_step_wait first")


def restrict(spec: EnvSpec, settings: EnvSettings) -> EnvSpec:
    """The spec that the policy sees: without fixed actions, and with what the settings override."""
    free = [dim for dim in range(spec.action.size) if dim not in settings.fixed_actions]
    low, high = (tuple(bounds[dim] for dim in free) for bounds in (spec.action.low, spec.action.high))
    return EnvSpec(
        action=ActionSpec(low, high, spec.action.num_choices),
        state_size=spec.state_size,
        image_shape=spec.image_shape,
        horizon=settings.horizon or spec.horizon,
        instruction=settings.instruction or spec.instruction,
        has_success=spec.has_success,
        tasks=tuple(Task(task.name, settings.instruction or task.instruction) for task in spec.tasks),
    )


def check_rows(
    num_envs: int, env_ids: Integers | None, seeds: Integers | None, init_state_ids: Integers | None
) -> list[int]:
    """The rows that a reset names. Raises ValueError for rows that do not exist and for lists of unequal length."""
    rows = list(range(num_envs)) if env_ids is None else [int(row) for row in env_ids]
    wrong = [row for row in rows if not 0 <= row < num_envs]
    if wrong:
        raise ValueError(f"env_ids names env {wrong[0]}, but there are {num_envs} (0 to {num_envs - 1})")
    for name, given in (("seeds", seeds), ("init_state_ids", init_state_ids)):
        if given is not None and len(given) != len(rows):
            raise ValueError(f"{len(given)} {name} were given for {len(rows)} envs")
    return rows


def check_actions(actions: np.ndarray, expected: tuple[int, ...], env_ids: Sequence[int]) -> None:
    """Raises ValueError for actions of another shape or that are not finite: here the policy is the cause."""
    if actions.shape != expected:
        raise ValueError(f"actions have shape {actions.shape}, expected {expected} (envs, chunk, action dimensions)")
    with np.errstate(over="ignore"):  # told here
        is_finite = np.isfinite(actions.astype(np.float32, copy=False))  # as the env gets them
    if not is_finite.all():
        bad = sorted(set(np.argwhere(~is_finite)[:, 0]))
        raise ValueError(f"the actions for env {', '.join(str(env_ids[row]) for row in bad)} are not finite")
