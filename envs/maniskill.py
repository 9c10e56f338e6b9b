"""ManiSkill 3 envs on the CPU: one simulation each, several in a process of the pool. See `maniskill_gpu` for batches.

State observations need no rendering and no Vulkan device; images are rendered only where `observe` is called.
Simulator assets are licensed for non-commercial use (CC BY-NC 4.0).
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import numpy as np

from envs.base import ActionSpec, Env, EnvError, EnvSettings, Step

INSTRUCTIONS = {
    "PushCube-v1": "push the cube to the target",
    "PullCube-v1": "pull the cube to the target",
    "PickCube-v1": "pick up the cube and move it to the goal",
    "StackCube-v1": "stack the red cube on the green cube",
    "PegInsertionSide-v1": "insert the peg into the hole of the box",
    "PlaceSphere-v1": "place the sphere into the bin",
    "LiftPegUpright-v1": "lift the peg and set it upright",
    "PokeCube-v1": "poke the cube with the peg",
    "RollBall-v1": "roll the ball to the goal",
}


class ManiSkillEnv(Env):
    """One ManiSkill env on `physx_cpu`.

    `settings.simulator` keys: control_mode, reward_mode, sim_freq, control_freq, image_size, shader, and `render`
    (true: pictures for people can be taken).
    """

    def __init__(self, settings: EnvSettings) -> None:
        import torch

        torch.set_num_threads(1)
        self._images = "image" in settings.observation
        self._states = "state" in settings.observation
        self._renders = self._images or bool(settings.simulator.get("render"))
        self._env = _make(settings, self._renders, num_envs=1, sim_backend="physx_cpu").unwrapped
        self._watching = (self._env._obs_mode, self._env.obs_mode_struct)
        space = self._env.single_action_space
        if not hasattr(space, "low"):
            raise EnvError(f"{settings.id} has several robots (actions {space}); only single-robot envs are supported")
        self.action = ActionSpec(tuple(map(float, space.low)), tuple(map(float, space.high)))
        self.horizon = default_horizon(settings.id)
        self.instruction = INSTRUCTIONS.get(settings.id, _words(settings.id))
        self.has_success = True
        self._info: dict[str, Any] = {}
        self._obs: Any = None

    def reset(self, seed: int, init_state_id: int | None) -> None:
        # an explicit seed at every reset: otherwise the initial state comes from the global generator
        self._obs, self._info = self._env.reset(seed=seed)

    def step(self, action: np.ndarray, observed: bool) -> Step:
        # observations that nobody reads are neither built nor, with cameras, rendered
        if not observed:
            self._env._obs_mode, self._env.obs_mode_struct = "none", _blind_mode()
        self._obs, reward, terminated, _, self._info = self._env.step(action)
        if not observed:
            self._env._obs_mode, self._env.obs_mode_struct = self._watching
            self._obs = None
        success = bool(self._info["success"]) if "success" in self._info else False
        return Step(float(reward), bool(terminated), False, success)

    def observe(self) -> dict[str, np.ndarray]:
        if self._obs is None:
            self._obs = self._env.get_obs(self._info)
        return to_arrays(self._obs, self._states, self._images, row=0)

    def render(self) -> np.ndarray:
        return self._env.render_rgb_array()[0].cpu().numpy()

    def close(self) -> None:
        self._env.close()


def to_arrays(obs: Any, states: bool, images: bool, row: int | slice) -> dict[str, np.ndarray]:
    """ManiSkill's observation as the contract's arrays: one env's (`row` a number) or a batch's (a slice)."""
    arrays = {}
    if states:
        state = obs["state"] if isinstance(obs, dict) else obs
        arrays["state"] = state[row].float().cpu().numpy()
    if images:
        views = [camera["rgb"][row] for _, camera in sorted(obs["sensor_data"].items())]
        axis = 0 if isinstance(row, int) else 1
        arrays["image"] = np.stack([view.cpu().numpy() for view in views], axis)
    return arrays


def default_horizon(env_id: str) -> int:
    """The env's own step limit."""
    import gymnasium

    return gymnasium.spec(env_id).max_episode_steps or 2**31 - 1


def _make(settings: EnvSettings, renders: bool, num_envs: int, sim_backend: str) -> Any:
    simulator = settings.simulator
    options: dict[str, Any] = {"num_envs": num_envs, "sim_backend": sim_backend}
    modes: dict[tuple[str, ...], str] = {("state",): "state", ("image",): "rgb"}
    options["obs_mode"] = modes.get(settings.observation, "rgb+state")
    options["reward_mode"] = simulator.get("reward_mode", "normalized_dense")
    if simulator.get("control_mode"):
        options["control_mode"] = simulator["control_mode"]
    rates = {key: simulator[key] for key in ("sim_freq", "control_freq") if simulator.get(key)}
    if rates:
        options["sim_config"] = rates
    if renders:
        size = simulator.get("image_size", 128)
        options["sensor_configs"] = {
            "shader_pack": simulator.get("shader", "minimal"),
            "width": size,
            "height": size,
        }
        options["render_backend"] = "cpu" if sim_backend == "physx_cpu" else "gpu"
        options["render_mode"] = "rgb_array"
        return _gym_make(settings.id, options)
    undo = _without_renderer()
    try:
        return _gym_make(settings.id, {**options, "render_backend": "none"})
    except (IndexError, AttributeError):  # a few tasks draw while they build their scene
        undo()
        return _gym_make(settings.id, {**options, "render_backend": "cpu"})


def _gym_make(env_id: str, options: dict[str, Any]) -> Any:
    import gymnasium

    try:
        import mani_skill.envs  # noqa: F401  (registers the envs)
    except ImportError as error:
        raise EnvError(f"ManiSkill cannot be imported ({error}); pip install 'embodied-rl[maniskill]'") from None
    try:
        return gymnasium.make(env_id, **options)
    except gymnasium.error.Error as error:
        raise EnvError(f"ManiSkill cannot make {env_id}: {error}") from None
    except (SystemExit, EOFError):  # it asked on stdin whether to download assets
        raise EnvError(
            f"{env_id} needs assets that are not there; python -m mani_skill.utils.download_asset {env_id} -y"
        ) from None
    except RuntimeError as error:
        if "render" in str(error) or "vk::" in str(error):
            raise EnvError(f"{env_id} needs a Vulkan device ({error}); see embodied-rl doctor") from None
        raise


def _without_renderer() -> Any:
    """Let scenes be built without a Vulkan device: materials, which only a renderer reads, become inert.

    Returns a function that puts SAPIEN's own classes back.
    """
    import sapien

    modules = (sapien.render, sapien.pysapien.render)
    kept = [
        (module, name, getattr(module, name)) for module in modules for name in ("RenderMaterial", "RenderTexture2D")
    ]
    for module, name, _ in kept:
        setattr(module, name, _Inert)

    def undo() -> None:
        for module, name, original in kept:
            setattr(module, name, original)

    return undo


class _Inert:
    """Takes any arguments, attributes and `set_*` calls, and does nothing with them."""

    def __init__(self, *args: Any, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> Any:
        return (lambda *args, **kwargs: None) if name.startswith("set_") else None


@lru_cache(maxsize=1)
def _blind_mode() -> Any:
    from mani_skill.envs.utils.observations import parse_obs_mode_to_struct

    return parse_obs_mode_to_struct("none")


def _words(env_id: str) -> str:
    name = re.sub(r"-v\d+$", "", env_id)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name).lower()
