"""Episodes that touch objects repeat bit for bit, whatever the simulation has been through before."""

from __future__ import annotations

import numpy as np
import pytest

from envs.base import Env, EnvSettings, make

TCP, CUBE = slice(18, 21), slice(28, 31)  # in PushCube's state


@pytest.fixture(scope="module")
def settings() -> EnvSettings:
    pytest.importorskip("mani_skill", exc_type=ImportError)
    rates = {"control_mode": "pd_ee_delta_pose", "sim_freq": 50, "control_freq": 5}
    return EnvSettings("maniskill", "PushCube-v1", simulator=rates)


def chase(env: Env, seed: int) -> np.ndarray:
    """States of an episode in which the closed gripper is set behind the cube and driven through it."""
    env.reset(seed, None)
    states = [env.observe()["state"]]
    for step in range(12):
        action = np.full(7, -1, np.float32) * [0, 0, 0, 0, 0, 0, 1]
        target = states[-1][CUBE] + [-0.1 if step < 6 else 0.1, 0.01, 0.0]
        action[:3] = np.clip(10 * (target - states[-1][TCP]), -1, 1)
        env.step(action, True)
        states.append(env.observe()["state"])
    return np.array(states)


def test_an_episode_with_contact_is_the_same_in_a_fresh_env_and_after_others(settings: EnvSettings) -> None:
    used, fresh = make(settings), make(settings)
    first = chase(used, 1)
    assert np.abs(first[-1][CUBE] - first[0][CUBE]).max() > 0.01, "the cube was not moved"
    for seed in (2, 3, 4):
        chase(used, seed)
    np.testing.assert_array_equal(chase(used, 1), first)
    np.testing.assert_array_equal(chase(fresh, 1), first)


def test_without_a_new_physics_scene_the_last_episode_reaches_into_the_next(
    settings: EnvSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this fails, PhysX or ManiSkill has been mended and `physx_history` can go."""
    monkeypatch.setattr("envs.physx_history.forget", lambda scene: None)
    env = make(settings)
    first = chase(env, 1)
    assert any(not np.array_equal(chase(env, 1), first) for _ in range(3))
