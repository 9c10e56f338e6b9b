"""A tiny env of the contract for tests, with faults on demand; `kind` is "toy:Toy"."""

import os
import signal
import sys
import time
from pathlib import Path

import gymnasium
import numpy as np

from envs.base import ActionSpec, Env, EnvSettings, Step


class Toy(Env):
    """A point in the plane, pushed about by the action and by noise from the episode's seed.

    Right of 0.6 is success, left of -0.6 failure; both terminate. `settings.simulator["faults"]` is a directory: a
    file there named "make", "reset" or "step" says what goes wrong then: "[once] raise|hang|stop|kill [SEED]".
    """

    action = ActionSpec((-1.0, -1.0), (1.0, 1.0))
    has_success = True
    horizon = 30
    instruction = "go right"

    def __init__(self, settings: EnvSettings) -> None:
        self.horizon = int(os.environ.get("TOY_HORIZON", self.horizon))
        self._images = "image" in settings.observation
        self._faults = settings.simulator.get("faults")
        self._fault("make")

    def reset(self, seed: int, init_state_id: int | None) -> None:
        self._fault("reset", seed)
        self._rng = np.random.default_rng([seed, init_state_id or 0])
        self._point = self._rng.uniform(-0.3, 0.3, 2)
        self._seed, self._steps = seed, 0

    def step(self, action: np.ndarray, observed: bool) -> Step:
        self._fault("step", self._seed)
        self._steps += 1
        self._point = self._point + 0.15 * action + self._rng.normal(0, 0.1, 2)
        success = bool(self._point[0] > 0.6)
        return Step(-float(np.abs(self._point).sum()), success or self._point[0] < -0.6, False, success)

    def observe(self) -> dict[str, np.ndarray]:
        observation = {"state": np.array([*self._point, self._steps], np.float32)}
        if self._images:
            observation["image"] = self.render()[None]
        return observation

    def render(self) -> np.ndarray:
        return np.full((4, 4, 3), np.uint8(self._steps))

    def _fault(self, moment: str, seed: int | None = None) -> None:
        file = Path(self._faults or "/nonexistent") / moment
        try:
            words = file.read_text().split()
            once = words[0] == "once"
            words = words[once:]
            if len(words) > 1 and int(words[1]) != seed:
                return
            if once:
                file.unlink()
        except FileNotFoundError:  # no fault, or another process took it
            return
        print(f"fault on demand: {words[0]}", file=sys.stderr, flush=True)
        match words[0]:
            case "raise":
                raise ZeroDivisionError("as asked")
            case "hang":
                time.sleep(1000)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)


class OtherToy(Toy):
    """The same by another name."""


class ToyGymnasium(gymnasium.Env):
    """The same point as a gymnasium env."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self._toy = Toy(EnvSettings("toy:Toy", "Toy"))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._toy.reset(int(self.np_random.integers(2**31)) if seed is None else seed, None)
        return self._toy.observe()["state"], {}

    def step(self, action):
        step = self._toy.step(action, True)
        return self._toy.observe()["state"], step.reward, step.terminated, step.truncated, {"success": step.success}

    def render(self):
        return self._toy.render()
