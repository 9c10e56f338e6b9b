"""Scripted experts: how often they succeed, and what they ask for. Full rates: docs/results.md."""

import numpy as np
import pytest

pytest.importorskip("mani_skill", reason="ManiSkill is not installed")

from envs.base import EnvError, EnvSettings, make
from envs.experts import EXPERTS, make_expert

SHORT = {"sim_freq": 50, "control_freq": 5}  # with 12 steps


def settings(env_id: str, control_mode: str = "pd_ee_delta_pose", **simulator: object) -> EnvSettings:
    return EnvSettings("maniskill", env_id, simulator={"control_mode": control_mode, **simulator})


def lengths(chosen: EnvSettings, episodes: int, horizon: int, noise: float = 0.0) -> list[int]:
    """Steps until success in each episode; those without success are left out."""
    env, expert = make(chosen), make_expert(chosen)
    found = []
    for seed in range(episodes):
        generator = np.random.default_rng(seed)
        env.reset(seed, None)
        for step in range(1, horizon + 1):
            action = expert.act(env.observe()["state"])
            assert action.dtype == np.float32 and action.shape == (env.action.size,) and np.abs(action).max() <= 1
            disturbance = generator.normal(0, noise, action.shape)
            disturbance[expert.gripper] = 0
            if env.step(np.clip(action + disturbance, -1, 1).astype(np.float32), observed=True).success:
                found.append(step)
                break
    env.close()
    return found


@pytest.mark.parametrize("control_mode", ["pd_ee_delta_pose", "pd_ee_delta_pos"])
@pytest.mark.parametrize("env_id", EXPERTS)
def test_expert_succeeds_within_the_env_s_own_horizon(env_id: str, control_mode: str) -> None:
    assert len(lengths(settings(env_id, control_mode), episodes=10, horizon=50)) >= 9


@pytest.mark.parametrize("env_id", ["PushCube-v1", "PullCube-v1"])
def test_expert_succeeds_in_twelve_steps_at_5_hz(env_id: str) -> None:
    assert len(lengths(settings(env_id, **SHORT), episodes=20, horizon=12)) >= 19


def test_expert_recovers_from_disturbances() -> None:
    quiet = lengths(settings("PickCube-v1"), episodes=10, horizon=50)
    disturbed = lengths(settings("PickCube-v1"), episodes=10, horizon=50, noise=0.1)
    assert len(disturbed) >= 9 and np.mean(disturbed) > np.mean(quiet)


def test_expert_regrasps_a_cube_that_it_lost() -> None:
    chosen = settings("PickCube-v1")
    env, expert = make(chosen), make_expert(chosen)
    env.reset(0, None)
    open_hand = np.array([0, 0, 0, 0, 0, 0, 1], np.float32)
    while not (env.observe()["state"][18] and env.observe()["state"][31] > 0.04):  # grasped, and the cube's height
        env.step(expert.act(env.observe()["state"]), observed=True)
    for _ in range(5):
        env.step(open_hand, observed=True)
    assert not env.observe()["state"][18]
    assert any(env.step(expert.act(env.observe()["state"]), observed=True).success for _ in range(50))
    env.close()


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        (settings("PlaceSphere-v1"), "no scripted expert for PlaceSphere-v1; there is one for PushCube-v1"),
        (EnvSettings("gymnasium", "CartPole-v1"), "no scripted expert for CartPole-v1"),
        (settings("PushCube-v1", "pd_joint_delta_pos"), "drives pd_ee_delta_pose or pd_ee_delta_pos, not pd_joint"),
        (EnvSettings("maniskill", "PushCube-v1"), "not None"),
    ],
)
def test_settings_without_an_expert_are_refused(chosen: EnvSettings, said: str) -> None:
    with pytest.raises(EnvError, match=said):
        make_expert(chosen)
