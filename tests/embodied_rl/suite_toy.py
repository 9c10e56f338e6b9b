"""A stand-in for LIBERO with 7 actions: an episode succeeds where its trial is even, at its third step."""

import os
from pathlib import Path

import numpy as np

from envs.base import ActionSpec, Env, EnvSettings, Step
from envs.libero_suites import STRIDE


class SuiteToy(Env):
    """`settings.simulator["crashes"]`: a folder; a file `TASK_TRIAL` there kills the process, and loses a letter."""

    action = ActionSpec((-1.0,) * 7, (1.0,) * 7)
    has_success, horizon, instruction = True, 5, "do"

    def __init__(self, settings: EnvSettings) -> None:
        self._images = "image" in settings.observation
        self._crashes = Path(settings.simulator["crashes"])
        self._key, self._steps = (0, 0), 0

    def reset(self, seed: int, init_state_id: int | None) -> None:
        self._key, self._steps = divmod(init_state_id or 0, STRIDE), 0

    def step(self, action: np.ndarray, observed: bool) -> Step:
        self._steps += 1
        crash = self._crashes / f"{self._key[0]}_{self._key[1]}"
        if self._steps == 2 and crash.exists() and (left := crash.read_text()):
            crash.write_text(left[1:])
            os.kill(os.getpid(), 9)
        success = self._steps == 3 and self._key[1] % 2 == 0
        return Step(float(success), success, False, success)

    def observe(self) -> dict[str, np.ndarray]:
        image = np.full((1, 64, 64, 3), 40 * self._steps, np.uint8)
        return {"image": image} if self._images else {"state": np.array([*self._key, self._steps], np.float32)}
