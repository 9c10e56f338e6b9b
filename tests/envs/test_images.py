"""Images from ManiSkill: rendered, and only where they are looked at. Needs a Vulkan device (lavapipe will do)."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

pytest.importorskip("mani_skill", reason="ManiSkill is not installed")

from envs.base import EnvError, EnvSettings
from envs.episodes import EpisodicVectorEnv
from envs.maniskill import ManiSkillEnv
from envs.maniskill_gpu import ManiSkillBatch
from envs.pool import EnvPool
from envs.slots import VectorArgs

SIMULATOR = {"control_mode": "pd_joint_delta_pos", "sim_freq": 50, "control_freq": 5, "image_size": 64}
PUSH_CUBE = EnvSettings("maniskill", "PushCube-v1", 6, observation=("state", "image"), simulator=SIMULATOR)


def vector_env(args: VectorArgs) -> EpisodicVectorEnv:
    try:
        return EpisodicVectorEnv(args)
    except EnvError as error:
        if "needs a Vulkan device" in str(error):
            pytest.skip("no Vulkan device that can render")
        raise


@pytest.fixture(scope="module")
def push_cube() -> Iterator[EpisodicVectorEnv]:
    env = vector_env(VectorArgs(PUSH_CUBE, [0], chunk=4, record_actions=True))
    yield env
    env.close()


@pytest.fixture
def captures(push_cube: EpisodicVectorEnv, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each rendering of the cameras."""
    assert isinstance(push_cube.envs[0], ManiSkillEnv)
    simulator = push_cube.envs[0]._simulation._env
    capture, counted = simulator.capture_sensor_data, []
    monkeypatch.setattr(simulator, "capture_sensor_data", lambda: counted.append(1) or capture())
    return counted


def actions_for(env: EpisodicVectorEnv, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, (1, 4, env.spec.action.size)).astype(np.float32)


def test_image_and_state_come_together_and_show_what_happens(push_cube: EpisodicVectorEnv) -> None:
    assert push_cube.spec.image_shape == (1, 64, 64, 3) and push_cube.spec.state_size == 35
    first = push_cube.reset(seeds=[3])
    image = first["image"]
    assert image.shape == (1, 1, 64, 64, 3) and image.dtype == np.uint8
    assert image.std() > 10  # neither blank nor noise of one colour
    moved = push_cube.chunk_step(actions_for(push_cube)).observation
    assert (moved["image"] != image).any(-1).mean() > 0.01
    assert (moved["state"] != first["state"]).any()
    other = push_cube.reset(seeds=[4])["image"]
    assert (other != image).any()
    np.testing.assert_array_equal(push_cube.reset(seeds=[3])["image"], image)


def test_cameras_render_once_for_a_chunk(push_cube: EpisodicVectorEnv, captures: list[int]) -> None:
    push_cube.reset()
    assert len(captures) == 1
    assert push_cube.chunk_step(actions_for(push_cube)).valid.all()
    assert len(captures) == 2


def test_cameras_render_the_end_of_an_episode_and_the_start_of_the_next(
    push_cube: EpisodicVectorEnv, captures: list[int]
) -> None:
    push_cube.reset()
    push_cube.chunk_step(actions_for(push_cube))
    captures.clear()
    result = push_cube.chunk_step(actions_for(push_cube))
    assert result.valid[0].tolist() == [True, True, False, False] and result.ended.all()
    assert len(captures) == 2
    assert (result.final_observation["image"] != result.observation["image"]).any()


def test_restoring_renders_only_the_last_step(push_cube: EpisodicVectorEnv, captures: list[int]) -> None:
    push_cube.reset(seeds=[5])
    shown = push_cube.chunk_step(actions_for(push_cube)).observation
    saved = push_cube.state()
    captures.clear()
    restored = push_cube.restore(saved)
    assert len(captures) == 1
    np.testing.assert_array_equal(restored["image"], shown["image"])


def test_batch_of_one_sees_what_the_single_env_sees(push_cube: EpisodicVectorEnv) -> None:
    batch = ManiSkillBatch(push_cube.args, "physx_cpu")
    assert batch.spec == push_cube.spec
    np.testing.assert_array_equal(batch.reset(seeds=[6])["image"], push_cube.reset(seeds=[6])["image"])
    for seed in range(2):  # the second chunk ends the episode
        one, other = (env.chunk_step(actions_for(push_cube, seed)) for env in (batch, push_cube))
    np.testing.assert_array_equal(one.final_observation["image"], other.final_observation["image"])
    batch.close()


@pytest.mark.parametrize("env_id", ["PushT-v1", "DrawTriangle-v1"])
def test_tasks_that_draw_while_they_build_their_scene_work_in_state_mode(push_cube: object, env_id: str) -> None:
    simulator = {"reward_mode": "sparse"} if env_id == "DrawTriangle-v1" else {}
    env = EpisodicVectorEnv(VectorArgs(EnvSettings("maniskill", env_id, simulator=simulator), [0]))
    env.reset()
    result = env.chunk_step(np.zeros((1, 1, env.spec.action.size), np.float32))
    assert result.valid.all() and "image" not in result.observation
    env.close()


def test_recorded_episode_is_filmed(push_cube: EpisodicVectorEnv, make_pool: Callable[..., EnvPool]) -> None:
    push_cube.reset()
    chunks = [push_cube.chunk_step(actions_for(push_cube, seed)) for seed in range(2)]
    (episode,) = chunks[1].episodes
    settings = EnvSettings("maniskill", "PushCube-v1", 6, simulator={**SIMULATOR, "render": True})
    (film,) = make_pool(processes=1).render(settings, [episode])
    assert film.shape == (7, 512, 512, 3) and film.dtype == np.uint8
    assert all((film[t] != film[t + 1]).any() for t in range(6))
