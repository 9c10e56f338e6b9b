"""gymnasium envs: single ones under the pool, and an adapter for any `gymnasium.vector.VectorEnv`."""

from __future__ import annotations

import inspect
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from envs.base import ActionSpec, Env, EnvError, EnvSettings, Step


class GymnasiumEnv(Env):
    """One env made by `gymnasium.make`; observations in a Box become `state`, `render()` becomes `image`.

    Success is `info["success"]` or `info["is_success"]` where the env reports one.
    """

    def __init__(self, settings: EnvSettings) -> None:
        self._images = "image" in settings.observation
        self._states = "state" in settings.observation
        options = dict(settings.simulator)
        if self._images or options.pop("render", False):
            options["render_mode"] = "rgb_array"
        try:
            self._env = gymnasium.make(settings.id, **options)
        except gymnasium.error.DependencyNotInstalled as error:
            raise EnvError(f"{settings.id} needs a package that is not installed: {error}") from None
        except gymnasium.error.Error as error:
            raise EnvError(f"gymnasium cannot make {settings.id}: {error}") from None
        if self._states and not isinstance(self._env.observation_space, spaces.Box):
            raise EnvError(f"{settings.id} observes {self._env.observation_space}; only Box observations are supported")
        self.action = action_spec(self._env.action_space, settings.id)
        self._discrete = self.action.num_choices is not None
        spec = self._env.spec
        self.horizon = (spec.max_episode_steps if spec else None) or 2**31 - 1
        self.instruction = settings.id
        self.has_success = "success" in inspect.getsource(type(self._env.unwrapped))
        self._observation: np.ndarray = np.zeros(0)

    def reset(self, seed: int, init_state_id: int | None) -> None:
        self._observation, _ = self._env.reset(seed=seed)

    def step(self, action: np.ndarray, observed: bool) -> Step:
        given: Any = int(action[0]) if self._discrete else action
        self._observation, reward, terminated, truncated, info = self._env.step(given)
        success = bool(info.get("success", info.get("is_success", False)))
        return Step(float(reward), bool(terminated), bool(truncated), success)

    def observe(self) -> dict[str, np.ndarray]:
        observation = {}
        if self._states:
            observation["state"] = np.asarray(self._observation, np.float32).reshape(-1)
        if self._images:
            observation["image"] = self.render()[None]
        return observation

    def render(self) -> np.ndarray:
        frame = self._env.render()
        if not isinstance(frame, np.ndarray):
            raise EnvError(f"{self._env.spec.id if self._env.spec else 'this env'} renders no picture")
        return frame

    def close(self) -> None:
        self._env.close()


def action_spec(space: spaces.Space, name: str) -> ActionSpec:
    """The contract's description of a gymnasium action space. Raises EnvError for one that is not supported."""
    if isinstance(space, spaces.Discrete):
        return ActionSpec((0.0,), (float(space.n - 1),), int(space.n))
    if isinstance(space, spaces.Box) and space.is_bounded() and len(space.shape) == 1:
        return ActionSpec(tuple(map(float, space.low)), tuple(map(float, space.high)))
    raise EnvError(f"{name} has actions {space}; supported are Discrete and bounded one-dimensional Box")
