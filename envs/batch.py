"""`BatchVectorEnv`: envs that a simulator steps all at once, so that a chunk runs column by column."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np

from envs.base import EnvError, EnvSpec, Episode, Integers, Observation, Step
from envs.slots import SlotVectorEnv, VectorArgs


@dataclass(frozen=True)
class BatchStep:
    """Outcome of one step of all envs: arrays [N]."""

    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    success: np.ndarray

    def of(self, row: int) -> Step:
        """One env's outcome."""
        return Step(
            reward=float(self.reward[row]),
            terminated=bool(self.terminated[row]),
            truncated=bool(self.truncated[row]),
            success=bool(self.success[row]),
        )


class BatchVectorEnv(SlotVectorEnv):
    """Envs stepped by one call. Those that have no episode running get an idle action, and nobody looks at them."""

    def __init__(self, args: VectorArgs, spec: EnvSpec) -> None:
        super().__init__(args, spec)
        self._idle = np.clip(np.zeros(spec.action.size), spec.action.low, spec.action.high).astype(np.float32)

    def reset(
        self,
        env_ids: Integers | None = None,
        seeds: Integers | None = None,
        init_state_ids: Integers | None = None,
    ) -> Observation:
        if init_state_ids is not None:
            raise EnvError(f"{self.settings.id} begins from seeds, not from numbered init states")
        return super().reset(env_ids, seeds)

    def run_chunk(self, actions: np.ndarray) -> list[Episode]:
        out, episodes = self.buffers, []
        out.clear()
        full = self._full_action(actions)
        began = np.array([slot.running for slot in self.slots])
        live = began.copy()
        for column in range(self.args.chunk):
            if not live.any():
                break
            given = np.where(live[:, None], full[:, column], self._idle)
            step = self._step_envs(given, observed=column == self.args.chunk - 1)
            for row in np.flatnonzero(live).tolist():
                self._advance(row, column, step.of(row), actions[row, column])
            ended = np.flatnonzero(live & ~out.running).tolist()
            if ended:
                self._observe(ended, final=True)
                episodes += [self._record(row) for row in ended]
                live[ended] = False
        over = np.flatnonzero(began & ~live).tolist()
        if self.args.auto_reset and over:
            for row in over:
                self._begin(row, None, None)
            self._reset_envs(over)
            live = began
        else:
            self._keep_final(over)
        if live.any():
            self._observe(np.flatnonzero(live).tolist())
        return episodes

    @abstractmethod
    def _step_envs(self, actions: np.ndarray, observed: bool) -> BatchStep:
        """Step all envs with actions [N, A]. `observed` tells whether `_observe` is likely to follow."""
