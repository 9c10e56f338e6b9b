"""gymnasium envs: single ones under the pool, and an adapter for any `gymnasium.vector.VectorEnv`.

Success is what `info["success"]` or `info["is_success"]` says, for envs that report one in the info of a reset or of
the first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from envs.base import ActionSpec, Env, EnvError, EnvSettings, EnvSpec, Observation, Step
from envs.batch import BatchStep, BatchVectorEnv
from envs.slots import VectorArgs

SUCCESS_KEYS = ("success", "is_success")
UNLIMITED = 2**31 - 1


class GymnasiumEnv(Env):
    """One env made by `gymnasium.make`; observations in a Box become `state`, `render()` becomes `image`.

    `settings.simulator` goes to `gymnasium.make`, except `render` (true: pictures for people can be taken).
    """

    def __init__(self, settings: EnvSettings) -> None:
        self._images = "image" in settings.observation
        self._states = "state" in settings.observation
        options = dict(settings.simulator)
        if options.pop("render", False) or self._images:
            options["render_mode"] = "rgb_array"
        if settings.horizon is not None:  # otherwise the env's own limit would come first
            options["max_episode_steps"] = settings.horizon
        try:
            self._env = gymnasium.make(settings.id, **options)
        except gymnasium.error.DependencyNotInstalled as error:
            raise EnvError(f"{settings.id} needs a package that is not installed: {error}") from None
        except gymnasium.error.Error as error:
            raise EnvError(f"gymnasium cannot make {settings.id}: {error}") from None
        self.action = action_spec(self._env.action_space, settings.id)
        if self._states:
            check_box(self._env.observation_space, settings.id)
        self.horizon = (self._env.spec.max_episode_steps if self._env.spec else None) or UNLIMITED
        self.instruction = settings.id
        self.has_success = self._reports_success()
        self._observation: np.ndarray = np.zeros(0)

    def _reports_success(self) -> bool:
        _, at_reset = self._env.reset(seed=0)
        middle = np.clip(np.zeros(self.action.size, np.float32), self.action.low, self.action.high)
        *_, at_step = self._env.step(native_actions(self._env.action_space, middle.astype(np.float32)))
        return any(key in info for key in SUCCESS_KEYS for info in (at_reset, at_step))

    def reset(self, seed: int, init_state_id: int | None) -> None:
        if init_state_id is not None:
            raise EnvError("gymnasium envs begin from seeds, not from numbered init states")
        self._observation, _ = self._env.reset(seed=seed)

    def step(self, action: np.ndarray, observed: bool) -> Step:
        given = native_actions(self._env.action_space, action)
        self._observation, reward, terminated, truncated, info = self._env.step(given)
        success = any(bool(info.get(key, False)) for key in SUCCESS_KEYS)
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


class GymnasiumVectorEnv(BatchVectorEnv):
    """Adapts a `gymnasium.vector.VectorEnv` made with SAME_STEP auto-reset and states in a Box.

    Each episode begins by a reset of its own, from an explicit seed: the vector env has to take
    `reset(seed=[...], options={"reset_mask": ...})` as gymnasium's own do.

    Args:
        env: for example `gymnasium.make_vec(id, n, vectorization_mode="async", vector_kwargs={"autoreset_mode":
            gymnasium.vector.AutoresetMode.SAME_STEP})`.
        args: see `VectorArgs`; `settings.kind` and `settings.simulator` are not read, as the env is given.
    """

    def __init__(self, env: gymnasium.vector.VectorEnv, args: VectorArgs) -> None:
        mode = env.metadata.get("autoreset_mode")
        if mode != AutoresetMode.SAME_STEP:
            raise EnvError(
                f"the vector env's autoreset_mode is {getattr(mode, 'name', mode)}, SAME_STEP is needed; make it with "
                "vector_kwargs={'autoreset_mode': gymnasium.vector.AutoresetMode.SAME_STEP}"
            )
        name = args.settings.id
        if args.settings.ignore_terminations:
            raise EnvError(f"{name} resets itself when an episode terminates: ignore_terminations is not possible")
        if args.settings.observation != ("state",):
            raise EnvError(
                f"vector envs of gymnasium offer the observation ('state',), not {args.settings.observation}"
            )
        if env.num_envs != len(args.env_ids):
            raise EnvError(f"the vector env has {env.num_envs} envs, but {len(args.env_ids)} env ids were given")
        check_box(env.single_observation_space, name)
        self._env = env
        self._observations, at_reset = env.reset(seed=[0] * env.num_envs)  # type: ignore[arg-type]
        self._final: np.ndarray = np.zeros((env.num_envs, 0))
        limit = (env.spec.max_episode_steps if env.spec else None) or UNLIMITED
        action = action_spec(env.single_action_space, name)
        middle = np.clip(np.zeros((env.num_envs, action.size)), action.low, action.high).astype(np.float32)
        *_, at_step = env.step(native_actions(env.single_action_space, middle))
        reported = any(key in info for key in SUCCESS_KEYS for info in (at_reset, at_step))
        size = int(np.prod(env.single_observation_space.shape or (1,)))
        super().__init__(args, EnvSpec(action, size, None, limit, name, reported))

    def restore(self, state: list[dict[str, Any]]) -> Observation:
        """Replays the episodes side by side, each beginning so late that all arrive together.

        Exact for envs that repeat themselves; an episode that does not replay is followed by its next one.
        """
        self._refuse_in_flight("restore")
        histories = [np.asarray(saved["actions"], np.float32) for saved in state]
        lengths = [len(history) if saved["number"] else -1 for history, saved in zip(histories, state, strict=True)]
        for to_go in range(max(lengths), -1, -1):
            beginning = [row for row, length in enumerate(lengths) if length == to_go]
            for row in beginning:
                self._begin(row, int(state[row]["seed"]), None)
            self._reset_envs(beginning)
            if to_go > 0:
                self._replay({row: histories[row][-to_go] for row, length in enumerate(lengths) if length >= to_go})
        out = self.buffers
        for row, saved in enumerate(state):
            out.running[row] = self.slots[row].running = self.slots[row].running and bool(saved["running"])
            out.episode_number[row] = self.slots[row].number = int(saved["number"])
        self._observe(np.flatnonzero(out.running).tolist())
        strayed = [row for row, saved in enumerate(state) if saved["running"] and not out.running[row]]
        return self.reset(strayed) if strayed else self.observation()

    def _replay(self, actions: dict[int, np.ndarray]) -> None:
        given = np.tile(self._idle, (self.num_envs, 1))
        for row, action in actions.items():
            given[row] = self._full_action(action)
        step = self._step_envs(given, observed=True)
        for row, action in actions.items():
            self.slots[row].advance(step.of(row), action, self.settings, self.spec.horizon)
            self.buffers.episode_step[row] = self.slots[row].length
        ended = [row for row in actions if not self.slots[row].running]
        self._observe(ended, final=True)
        self._keep_final(ended)

    def close(self) -> None:
        self._env.close()

    def _reset_envs(self, rows: Sequence[int]) -> None:
        if not len(rows):
            return
        mask = np.zeros(self.num_envs, bool)
        mask[rows] = True
        seeds = [self.slots[row].seed if mask[row] else None for row in range(self.num_envs)]
        observations, _ = self._env.reset(seed=seeds, options={"reset_mask": mask})  # type: ignore[arg-type]
        self._observations = np.where(_column(mask, observations), observations, self._observations)

    def _step_envs(self, actions: np.ndarray, observed: bool) -> BatchStep:
        given = native_actions(self._env.single_action_space, actions)
        observations, reward, terminated, truncated, info = self._env.step(given)
        self._observations, self._final = np.array(observations), np.array(observations)
        success = _success(info, self.num_envs)
        over = np.flatnonzero(terminated | truncated).tolist()
        if over:
            success[over] = _success(info.get("final_info", {}), self.num_envs)[over]
        for row in over:
            self._final[row] = info["final_obs"][row]
        return BatchStep(np.asarray(reward, np.float64), terminated, truncated, success)

    def _observe(self, rows: Sequence[int], final: bool = False) -> None:
        shown = self._final if final else self._observations
        flat = np.asarray(shown, np.float32).reshape(self.num_envs, -1)
        (self.buffers.final_state if final else self.buffers.state)[rows] = flat[rows]


def action_spec(space: spaces.Space, name: str) -> ActionSpec:
    """The contract's description of a gymnasium action space. Raises EnvError for one that is not supported."""
    if isinstance(space, spaces.Discrete):
        return ActionSpec((0.0,), (float(space.n - 1),), int(space.n))
    if isinstance(space, spaces.Box) and space.is_bounded() and len(space.shape) == 1:
        return ActionSpec(tuple(map(float, space.low)), tuple(map(float, space.high)))
    raise EnvError(f"{name} has actions {space}; supported are Discrete and bounded one-dimensional Box")


def native_actions(space: spaces.Space, actions: np.ndarray) -> Any:
    """Actions [A] or [N, A] as the gymnasium env takes them."""
    if not isinstance(space, spaces.Discrete):
        return actions
    indices = actions[..., 0].astype(np.int64) + int(space.start)
    return indices if indices.ndim else int(indices)


def check_box(space: spaces.Space, name: str) -> None:
    if not isinstance(space, spaces.Box):
        raise EnvError(f"{name} observes {space}; only Box observations are supported")


def _success(info: dict[str, Any], num_envs: int) -> np.ndarray:
    found = np.zeros(num_envs, bool)
    for key in SUCCESS_KEYS:
        if key in info:
            found |= np.asarray(info[key], bool) & np.asarray(info.get(f"_{key}", True), bool)
    return found


def _column(mask: np.ndarray, like: np.ndarray) -> np.ndarray:
    return mask.reshape(-1, *[1] * (like.ndim - 1))
