"""`EpisodicVectorEnv`: single envs run one after another, each through its whole chunk, in the calling process.

`pool` runs several of these side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from envs import base
from envs.base import EnvSpec, Episode, Observation
from envs.slots import SlotVectorEnv, VectorArgs


class EpisodicVectorEnv(SlotVectorEnv):
    """Several single envs in this process. Raises EnvError where they cannot be made."""

    def __init__(self, args: VectorArgs) -> None:
        self.envs = [base.make(args.settings) for _ in args.env_ids]
        super().__init__(args, describe(self.envs[0]))

    def run_chunk(self, actions: np.ndarray) -> list[Episode]:
        out, episodes = self.buffers, []
        out.clear()
        full = self._full_action(actions)
        for row in range(self.num_envs):
            if not self.slots[row].running or out.skip[row]:
                continue
            out.busy[row] = True
            self._run_row(row, actions[row], full[row])
            if self.slots[row].running:
                self._observe([row])
            else:
                self._observe([row], final=True)
                episodes.append(self._record(row))
                self._go_on(row)
            out.busy[row] = False
        return episodes

    def restore(self, state: list[dict[str, Any]]) -> Observation:
        """Exact for simulators that repeat themselves; an episode that does not replay is followed by its next one."""
        self._refuse_in_flight("restore")
        for row, saved in enumerate(state):
            if int(saved["number"]) > 0:
                self._replay(row, saved)
            self.slots[row].running &= bool(saved["running"])
            self.slots[row].number = self.buffers.episode_number[row] = int(saved["number"])
            self.buffers.running[row] = self.slots[row].running
            if saved["running"] and not self.slots[row].running:
                self._go_on(row)
        return self.observation()

    def _replay(self, row: int, saved: dict[str, Any]) -> None:
        self._begin(row, int(saved["seed"]), saved["init_state_id"])
        self._reset_envs([row])
        actions = np.asarray(saved["actions"], np.float32)
        self._run_row(row, actions, self._full_action(actions), write=False)
        self._observe([row])

    def close(self) -> None:
        for env in self.envs:
            env.close()

    def _run_row(self, row: int, actions: np.ndarray, full: np.ndarray, write: bool = True) -> None:
        """Run actions in one env until its episode ends; `write`: into the chunk's columns, else only in the books."""
        slot, env, out = self.slots[row], self.envs[row], self.buffers
        for column, action in enumerate(actions):
            raw = env.step(full[column], observed=column == len(actions) - 1)
            if write:
                self._advance(row, column, raw, action)
            else:
                slot.advance(raw, action, self.settings, self.spec.horizon)
                out.episode_step[row], out.running[row] = slot.length, slot.running
            if not slot.running:
                return

    def _go_on(self, row: int) -> None:
        """After the end of an episode."""
        if self.args.auto_reset:
            self._begin(row, None, None)
            self._reset_envs([row])
            self._observe([row])
        else:
            self._keep_final([row])

    def _reset_envs(self, rows: Sequence[int]) -> None:
        for row in rows:
            was_busy, self.buffers.busy[row] = bool(self.buffers.busy[row]), True
            self.envs[row].reset(self.slots[row].seed, self.slots[row].init_state_id)
            self.buffers.busy[row] = was_busy

    def _observe(self, rows: Sequence[int], final: bool = False) -> None:
        out = self.buffers
        for row in rows:
            observation = self.envs[row].observe()
            (out.final_task if final else out.task)[row] = self.envs[row].task
            if "state" in observation:
                (out.final_state if final else out.state)[row] = observation["state"]
            if "image" in observation:
                (out.final_image if final else out.image)[row] = observation["image"]


def describe(env: base.Env) -> EnvSpec:
    """What an env offers, found by resetting it once."""
    env.reset(0, None)
    observation = env.observe()
    image = observation.get("image")
    return EnvSpec(
        action=env.action,
        state_size=len(observation["state"]) if "state" in observation else None,
        image_shape=None if image is None else (image.shape[0], image.shape[1], image.shape[2], image.shape[3]),
        horizon=env.horizon,
        instruction=env.instruction,
        has_success=env.has_success,
        tasks=env.tasks,
    )
