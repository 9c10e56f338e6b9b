"""ManiSkill 3: one simulated env on the CPU (`ManiSkillEnv`), and the simulation that `maniskill_gpu` shares with it.

State observations need no rendering and no Vulkan device; images are rendered only where `observe` is called.
Simulator assets are licensed for non-commercial use (CC BY-NC 4.0).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np

from envs import mesh_detail, physx_history
from envs.base import ActionSpec, Env, EnvError, EnvSettings, Step, Task
from envs.catalog import download_command, maniskill_envs, missing_assets
from envs.put_on_plate import assets as bridge

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


SIMULATOR_KEYS = (
    "control_mode",
    "reward_mode",
    "sim_freq",
    "control_freq",
    "image_size",
    "shader",
    "object_set",
    "mesh_detail",
    "render",
    "sim_backend",
)


class ManiSkillEnv(Env):
    """One ManiSkill env on `physx_cpu`.

    `settings.simulator` keys: control_mode, reward_mode, sim_freq, control_freq, image_size, shader, mesh_detail
    (metres; see `mesh_detail.simplify`), `render` (true: pictures for people can be taken, in full detail) and
    sim_backend (`uses_gpu` reads it).
    """

    def __init__(self, settings: EnvSettings) -> None:
        self._simulation = simulation = Simulation(settings, num_envs=1, backend="physx_cpu")
        self.action, self.horizon = simulation.action, simulation.horizon
        self.instruction, self.has_success = simulation.instruction, simulation.has_success
        self.tasks = simulation.tasks

    def reset(self, seed: int, init_state_id: int | None) -> None:
        self._simulation.reset(0, seed, init_state_id)
        self._simulation.evaluate()
        self.task = self._simulation.task

    def step(self, action: np.ndarray, observed: bool) -> Step:
        reward, terminated, success = self._simulation.step(action[None], observed)[:, 0]
        return Step(float(reward), bool(terminated), False, bool(success))

    def observe(self) -> dict[str, np.ndarray]:
        return {key: array[0] for key, array in self._simulation.observe().items()}

    def render(self) -> np.ndarray:
        return self._simulation.render()[0]

    def close(self) -> None:
        self._simulation.close()


def uses_gpu(settings: EnvSettings, device_kind: str) -> bool:
    """Whether to simulate as one batch on the GPU (`maniskill_gpu.ManiSkillBatch`) rather than in a pool's processes.

    `settings.simulator["sim_backend"]` decides: "cpu", "gpu", or "auto" (default): where the devices are "gpu".
    """
    wanted = settings.simulator.get("sim_backend") or "auto"
    return settings.kind == "maniskill" and (wanted == "gpu" or (wanted == "auto" and device_kind == "gpu"))


class Simulation:
    """A ManiSkill env object of N parallel envs, reset one by one from explicit seeds.

    ManiSkill draws the initial states of all envs of a reset from one generator, seeded with the first env's seed:
    an env's draw would depend on which others are reset with it. Here each reset is of one env, so that its seed
    alone decides. That is dearer for large batches, hence resets build no observations and no info; `evaluate`
    follows once after a round of them.
    """

    def __init__(self, settings: EnvSettings, num_envs: int, backend: str) -> None:
        unknown = sorted(set(settings.simulator) - set(SIMULATOR_KEYS))
        if unknown:
            raise EnvError(f"ManiSkill envs have no option '{unknown[0]}'; known: {', '.join(SIMULATOR_KEYS)}")
        self._states, self._images = ("state" in settings.observation), ("image" in settings.observation)
        self.num_envs = num_envs
        env, self._has_renderer = _make(settings, num_envs, backend)
        self._env = env.unwrapped
        if self._images and settings.simulator.get("mesh_detail") and not settings.simulator.get("render"):
            mesh_detail.simplify(self._env.scene, settings.simulator["mesh_detail"])
        self._info: Any = None
        self._obs: Any = None
        space = self._env.single_action_space
        if not hasattr(space, "low"):
            raise EnvError(f"{settings.id} has several robots (actions {space}); only single-robot envs are supported")
        self.action = ActionSpec(tuple(map(float, space.low)), tuple(map(float, space.high)))
        from mani_skill.utils.registration import REGISTERED_ENVS

        name = settings.id.rpartition(":")[2]
        self.horizon = REGISTERED_ENVS[name].max_episode_steps or 2**31 - 1  # env.spec does not say
        self._bridge: Any = None
        if bridge.is_bridge(settings.id):
            from envs.put_on_plate.task import BridgeTask

            self._bridge = BridgeTask(self._env, name, settings.simulator.get("object_set") or "train")
        self.tasks: tuple[Task, ...] = self._bridge.tasks if self._bridge else ()
        self.instruction = self.tasks[0].instruction if self.tasks else self._instruction(name)
        self.has_success = "success" in self._env.get_info()

    def _instruction(self, env_id: str) -> str:
        if hasattr(self._env, "get_language_instruction"):
            return str(self._env.get_language_instruction()[0])
        return INSTRUCTIONS.get(env_id, _words(env_id))

    @property
    def task(self) -> int:
        """The number, in `tasks`, of the current episode's; of envs that are simulated alone."""
        return self._bridge.task if self._bridge else 0

    def reset(self, row: int, seed: int, episode_id: int | None = None) -> None:
        """Begin the episode that the seed determines in one env. `evaluate` before the next look at any.

        `episode_id`: of scenes of the Bridge table, which number their episodes.
        """
        import torch

        if episode_id is not None and not self._bridge:
            raise EnvError("ManiSkill envs begin from seeds, not from numbered init states")

        mask = torch.zeros(self.num_envs, dtype=torch.bool, device=self._env.device)
        mask[row] = True
        options = {"env_idx": mask.nonzero()[:, 0]}
        if self._bridge:
            options |= self._bridge.begin(seed, episode_id)
        with ExitStack() as stack:
            stack.enter_context(self._blind())
            stack.enter_context(patch.object(self._env, "get_info", dict))
            stack.enter_context(self._other_controllers_kept(mask))
            if self._env.reconfiguration_freq and not self._has_renderer:
                stack.enter_context(inert_materials())
            if not self._env.gpu_sim_enabled and not self._env.reconfiguration_freq:
                physx_history.forget(self._env.scene)
            # the seed for every env, as generators are chosen by an env's place in the batch
            self._env.reset(seed=[seed] * self.num_envs, options=options)
        self._obs = None

    def evaluate(self) -> None:
        """Look at the envs after resets: success and whatever else observations are built from."""
        self._info, self._obs = self._env.get_info(), None

    def step(self, actions: np.ndarray, observed: bool) -> np.ndarray:
        """Step all envs with actions [N, A]; rewards, terminations and successes as float32 [3, N].

        Unless `observed`, no observation is built and, with cameras, none is rendered, before `observe` asks for it.
        """
        import torch

        with nullcontext() if observed else self._blind():
            obs, reward, terminated, _, self._info = self._env.step(actions)
        self._obs = obs if observed else None
        if self._bridge:
            reward = self._bridge.reward(self._info)
        success = self._info["success"] if "success" in self._info else torch.zeros_like(terminated)
        return torch.stack([reward.float(), terminated.float(), success.float()]).cpu().numpy()

    def observe(self) -> dict[str, np.ndarray]:
        """The envs' current observations: `state` [N, S], `image` [N, V, H, W, 3] (cameras by name)."""
        if self._obs is None:
            self._obs = self._env.get_obs(self._info)
        arrays = {}
        if self._states:
            state = self._obs["state"] if isinstance(self._obs, dict) else self._obs
            arrays["state"] = state.float().cpu().numpy()
        if self._images:
            views = [camera["rgb"].cpu().numpy() for _, camera in sorted(self._obs["sensor_data"].items())]
            arrays["image"] = np.stack(views, axis=1)
        return arrays

    def render(self) -> np.ndarray:
        """Pictures for people, uint8 [N, H, W, 3]."""
        return self._env.render_rgb_array().cpu().numpy()

    def dynamics(self) -> Any:
        """Poses and velocities of everything, for `set_dynamics`; controllers and episode data are not in it."""
        return self._env.get_state().clone()

    def set_dynamics(self, state: Any) -> None:
        self._env.set_state(state)
        self._env.agent.controller.reset()  # targets that are not part of the state begin at the pose set
        self.evaluate()

    def close(self) -> None:
        self._env.close()

    @contextmanager
    def _blind(self) -> Iterator[None]:
        """Steps and resets in here build no observations."""
        from mani_skill.envs.utils.observations import parse_obs_mode_to_struct

        env = self._env
        kept = env._obs_mode, env.obs_mode_struct
        env._obs_mode, env.obs_mode_struct = "none", parse_obs_mode_to_struct("none")
        try:
            yield
        finally:
            env._obs_mode, env.obs_mode_struct = kept

    @contextmanager
    def _other_controllers_kept(self, mask: Any) -> Iterator[None]:
        """In here a reset leaves the targets of other envs' controllers alone, which ManiSkill's would overwrite."""
        scene, controller = self._env.scene, self._env.agent.controller
        reset = controller.reset

        def reset_masked() -> None:
            everything, scene._reset_mask = scene._reset_mask, mask
            reset()
            scene._reset_mask = everything

        with patch.object(controller, "reset", reset_masked):
            yield


def _make(settings: EnvSettings, num_envs: int, backend: str) -> tuple[Any, bool]:
    """The env, and whether it has a renderer. Raises EnvError."""
    try:
        import mani_skill.envs  # noqa: F401  (registers the envs)
    except ImportError as error:
        raise EnvError(f"ManiSkill cannot be imported ({error}); pip install -e '.[maniskill]'") from None
    simulator = settings.simulator
    options: dict[str, Any] = {"num_envs": num_envs, "sim_backend": backend}
    modes: dict[tuple[str, ...], str] = {("state",): "state", ("image",): "rgb"}
    options["obs_mode"] = modes.get(settings.observation, "rgb+state")
    options["reward_mode"] = simulator.get("reward_mode") or "normalized_dense"
    of_bridge = bridge.is_bridge(settings.id)
    if of_bridge:
        options |= {"obs_mode": "rgb+segmentation", "reward_mode": "none"}
    if simulator.get("control_mode"):
        options["control_mode"] = simulator["control_mode"]
    rates = {key: simulator[key] for key in ("sim_freq", "control_freq") if simulator.get(key)}
    if rates:
        options["sim_config"] = rates
    if num_envs > 1:
        options["reconfiguration_freq"] = 0  # geometry cannot be rebuilt for some of the envs
    renderer = "cpu" if backend == "physx_cpu" else "gpu"
    if "image" in settings.observation or simulator.get("render"):
        size = simulator.get("image_size") or 128
        options["sensor_configs"] = {"shader_pack": simulator.get("shader") or "minimal", "width": size, "height": size}
        if of_bridge:  # the background is laid over the pixels of its own camera
            del options["sensor_configs"]["width"], options["sensor_configs"]["height"]
        return _gym_make(settings.id, {**options, "render_backend": renderer, "render_mode": "rgb_array"}), True
    try:
        with inert_materials():
            return _gym_make(settings.id, {**options, "render_backend": "none"}), False
    except (IndexError, AttributeError):  # a few tasks draw while they build their scene
        return _gym_make(settings.id, {**options, "render_backend": renderer}), True


def _gym_make(env_id: str, options: dict[str, Any]) -> Any:
    import gymnasium
    from mani_skill.utils import download_asset

    if lacking := bridge.lacking(env_id):
        raise EnvError(f"{env_id} needs what is not on this machine: {lacking}; run: {lacking.command}")
    try:
        with patch.object(download_asset, "prompt_yes_no", _refuse_to_ask):
            return gymnasium.make(env_id, **options)
    except (gymnasium.error.Error, NotImplementedError, ImportError, AssertionError) as error:
        raise EnvError(f"ManiSkill cannot make {env_id}: {error}") from None
    except Exception as error:
        missing = missing_assets(env_id) if env_id in maniskill_envs() else []
        if missing or isinstance(error, _AssetsMissing):
            command = download_command(missing) or f"python -m mani_skill.utils.download_asset -y {env_id}"
            raise EnvError(f"{env_id} needs assets that are not on this machine; run: {command}") from error
        if isinstance(error, RuntimeError) and ("render" in str(error) or "vk::" in str(error)):
            raise EnvError(f"{env_id} needs a Vulkan device ({error}); see embodied-rl doctor") from error
        raise


class _AssetsMissing(Exception):
    """ManiSkill wanted to ask whether to download."""


def _refuse_to_ask(message: str) -> bool:
    raise _AssetsMissing(message)


@contextmanager
def inert_materials() -> Iterator[None]:
    """In here scenes are built without a Vulkan device: materials, which only a renderer reads, do nothing."""
    import sapien

    real = {name: getattr(sapien.render, name) for name in ("RenderMaterial", "RenderTexture2D")}
    with ExitStack() as stack:
        for module in list(sys.modules.values()):  # many import the classes by name
            for name, original in real.items():
                if getattr(module, "__dict__", {}).get(name) is original:
                    stack.enter_context(patch.object(module, name, _Inert))
        yield


class _Inert:
    """Takes any arguments, attributes and `set_*` calls, and does nothing with them."""

    def __init__(self, *args: Any, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> Any:
        return (lambda *args, **kwargs: None) if name.startswith("set_") else None


def _words(env_id: str) -> str:
    name = re.sub(r"-v\d+$", "", env_id)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name).lower()
