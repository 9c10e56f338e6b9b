"""Episodes and chunks over single envs: auto-reset, validity, success, seeds and exact restoring.

`EpisodicVectorEnv` runs its envs one after another in the calling process; `pool` runs several of them side by side.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from envs import base
from envs.base import (
    ActionSpec,
    ChunkResult,
    Env,
    EnvError,
    EnvSettings,
    EnvSpec,
    Episode,
    Integers,
    Observation,
    Step,
    VectorEnv,
)
from envs.buffers import ChunkBuffers


@dataclass
class _Slot:
    """One env and the episode it is in. `number` counts the episodes begun."""

    env: Env
    env_id: int
    stream: int
    number: int = 0
    seed: int = 0
    init_state_id: int | None = None
    ended: bool = True
    length: int = 0
    episode_return: float = 0.0
    success_once: bool = False
    success_now: bool = False
    actions: list[np.ndarray] = field(default_factory=list)


class EpisodicVectorEnv(VectorEnv):
    """Several single envs in this process.

    Args:
        settings: how to make each env.
        env_ids: number of each env in the whole run; decides its random stream and stands in its records.
        seed: base of the episode seeds.
        group_size: consecutive env ids that share their seeds (GRPO); 1 for none.
        auto_reset: begin a new episode at the end of the chunk in which one ended.
        record_actions: keep each episode's actions in its record.
        buffers: where results are written; the pool passes shared memory.
    """

    def __init__(
        self,
        settings: EnvSettings,
        env_ids: Sequence[int],
        seed: int = 0,
        group_size: int = 1,
        auto_reset: bool = True,
        record_actions: bool = False,
        buffers: ChunkBuffers | None = None,
        chunk: int = 1,
    ) -> None:
        self.settings, self.seed, self.auto_reset, self.record_actions = (
            settings,
            seed,
            auto_reset,
            record_actions,
        )
        self.slots = [_Slot(base.make(settings), env_id, env_id // group_size) for env_id in env_ids]
        self.num_envs, self.chunk = len(self.slots), chunk
        self.spec = self._make_spec(self.slots[0].env)
        self.free_dims = [d for d in range(self.slots[0].env.action.size) if d not in settings.fixed_actions]
        self._buffers = buffers
        self._actions: np.ndarray | None = None

    @property
    def buffers(self) -> ChunkBuffers:
        if self._buffers is None:
            self._buffers = ChunkBuffers.allocate(self.spec, self.num_envs, self.chunk)
        return self._buffers

    @buffers.setter
    def buffers(self, buffers: ChunkBuffers) -> None:
        self._buffers = buffers

    def _make_spec(self, env: Env) -> EnvSpec:
        full = env.action
        beyond = [d for d in self.settings.fixed_actions if not 0 <= d < full.size]
        if beyond:
            raise EnvError(
                f"fixed_actions names dimension {beyond[0]}, but {self.settings.id} has 0 to {full.size - 1}"
            )
        free = [d for d in range(full.size) if d not in self.settings.fixed_actions]
        action = ActionSpec(tuple(full.low[d] for d in free), tuple(full.high[d] for d in free), full.num_choices)
        env.reset(0, None)
        observation = env.observe()
        return EnvSpec(
            action=action,
            state_size=len(observation["state"]) if "state" in observation else None,
            image_shape=tuple(observation["image"].shape) if "image" in observation else None,
            horizon=self.settings.horizon or env.horizon,
            instruction=self.settings.instruction or env.instruction,
            has_success=env.has_success,
        )

    # ------------------------------------------------------------------------------------------ contract

    def reset(
        self,
        env_ids: Integers | None = None,
        seeds: Integers | None = None,
        init_state_ids: Integers | None = None,
    ) -> Observation:
        rows = range(self.num_envs) if env_ids is None else env_ids
        for i, row in enumerate(rows):
            self._begin(
                row,
                None if seeds is None else int(seeds[i]),
                None if init_state_ids is None else int(init_state_ids[i]),
            )
            self._write_observation(row, final=False)
        return self.observation()

    def observation(self) -> Observation:
        return self.buffers.observation(self.spec.instruction)

    def chunk_step_async(self, actions: np.ndarray) -> None:
        expected = (self.num_envs, self.chunk, self.spec.action.size)
        if actions.shape != expected:
            raise ValueError(
                f"actions have shape {actions.shape}, expected {expected} (envs, chunk, action dimensions)"
            )
        self._actions = actions

    def chunk_step_wait(self) -> ChunkResult:
        if self._actions is None:
            raise RuntimeError("no chunk step in flight")
        actions, self._actions = self._actions, None
        start = time.monotonic()
        episodes = self.run_chunk(actions)
        result = self.buffers.result(self.spec.instruction, episodes)
        result.spans = [(0, start, time.monotonic())]
        return result

    def run_chunk(self, actions: np.ndarray) -> list[Episode]:
        """Execute a chunk in every env and leave the outcome in the buffers; returns the episodes that ended."""
        episodes: list[Episode] = []
        self.buffers.clear()
        for row, slot in enumerate(self.slots):
            if slot.ended:
                continue
            self._run_slot(row, slot, actions[row])
            if slot.ended:
                self.buffers.running[row] = False
                self._write_observation(row, final=True)
                episodes.append(self._record(slot))
                if self.auto_reset:
                    self._begin(row, None, None)
            self._write_observation(row, final=False)
        return episodes

    def state(self) -> list[dict[str, Any]]:
        return [
            {
                "number": slot.number,
                "seed": slot.seed,
                "init_state_id": slot.init_state_id,
                "actions": np.stack(slot.actions) if slot.actions else np.zeros((0, self.spec.action.size), np.float32),
            }
            for slot in self.slots
        ]

    def restore(self, state: list[dict[str, Any]]) -> Observation:
        for row, (slot, saved) in enumerate(zip(self.slots, state, strict=True)):
            self._begin(row, int(saved["seed"]), saved["init_state_id"])
            for action in np.asarray(saved["actions"], np.float32):
                self._step_slot(slot, action, observed=False)
            slot.number = self.buffers.episode_number[row] = int(saved["number"])
            self._write_observation(row, final=False)
        return self.observation()

    def close(self) -> None:
        for slot in self.slots:
            slot.env.close()

    # ------------------------------------------------------------------------------------------ one slot

    def _begin(self, row: int, seed: int | None, init_state_id: int | None) -> None:
        slot = self.slots[row]
        number = int(self.buffers.episode_number[row])
        slot.seed = base.episode_seed(self.seed, slot.stream, number) if seed is None else seed
        slot.number = number + 1
        self.buffers.episode_number[row] = slot.number
        self.buffers.episode_seed[row] = slot.seed
        self.buffers.episode_step[row] = 0
        self.buffers.running[row] = True
        slot.init_state_id = init_state_id
        slot.env.reset(slot.seed, init_state_id)
        slot.ended, slot.length, slot.episode_return = False, 0, 0.0
        slot.success_once, slot.success_now, slot.actions = False, False, []

    def _run_slot(self, row: int, slot: _Slot, actions: np.ndarray) -> None:
        out = self.buffers
        for c, action in enumerate(actions):
            step = self._step_slot(slot, action, observed=c == len(actions) - 1)
            out.episode_step[row] = slot.length
            out.reward[row, c], out.valid[row, c] = step.reward, True
            out.terminated[row, c], out.truncated[row, c] = step.terminated, step.truncated
            if slot.ended:
                return

    def _step_slot(self, slot: _Slot, action: np.ndarray, observed: bool) -> Step:
        full = np.empty(slot.env.action.size, np.float32)
        full[self.free_dims] = action
        for dim, value in self.settings.fixed_actions.items():
            full[dim] = value
        raw = slot.env.step(full, observed)
        slot.length += 1
        slot.actions.append(np.array(action, np.float32))
        slot.success_now = raw.success
        slot.success_once |= raw.success
        terminated = raw.terminated and not self.settings.ignore_terminations
        truncated = (raw.truncated or slot.length >= self.spec.horizon) and not terminated
        slot.ended = terminated or truncated
        reward = raw.reward
        if raw.success and terminated:
            reward += self.settings.success_bonus
        reward *= self.settings.reward_scale
        slot.episode_return += reward
        return Step(reward, terminated, truncated, raw.success)

    def _record(self, slot: _Slot) -> Episode:
        actions = np.stack(slot.actions) if self.record_actions else None
        return Episode(
            slot.env_id,
            slot.seed,
            slot.init_state_id,
            self.settings.id,
            slot.length,
            slot.episode_return,
            slot.success_once,
            slot.success_now,
            actions,
        )

    def _write_observation(self, row: int, final: bool) -> None:
        observation = self.slots[row].env.observe()
        out = self.buffers
        if "state" in observation:
            (out.final_state if final else out.state)[row] = observation["state"]
        if "image" in observation:
            (out.final_image if final else out.image)[row] = observation["image"]
