"""ManiSkill on the CPU: without a Vulkan device, from explicit seeds, exactly repeatable."""

from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("mani_skill", reason="ManiSkill is not installed")

from envs.base import Env, EnvError, EnvSettings, VectorEnv, make
from envs.episodes import EpisodicVectorEnv
from envs.maniskill import uses_gpu
from envs.maniskill_gpu import ManiSkillBatch
from envs.pool import EnvPool
from envs.slots import VectorArgs

FAST = {"sim_freq": 50, "control_freq": 5}


def maniskill(env_id: str = "PushCube-v1", horizon: int | None = 6, **simulator: object) -> EnvSettings:
    return EnvSettings(
        "maniskill", env_id, horizon, simulator={**FAST, "control_mode": "pd_ee_delta_pose", **simulator}
    )


@pytest.fixture(scope="module")
def no_vulkan_pool() -> Iterator[EnvPool]:
    """Two processes that find no Vulkan device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VK_DRIVER_FILES", "/nonexistent")
        patch.setenv("VK_ICD_FILENAMES", "/nonexistent")
        pool = EnvPool(2)
        yield pool  # a process that is replaced must not find one either
        pool.close()


def random_actions(env: VectorEnv, chunks: int, chunk: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.uniform(-1, 1, (chunks, env.num_envs, chunk, env.spec.action.size)).astype(np.float32)


def trajectory(env: Env, seed: int, steps: int = 8) -> list[np.ndarray]:
    """Observations and rewards of one episode of random actions, all of them built."""
    rng = np.random.default_rng(seed)
    env.reset(seed, None)
    shown = [env.observe()["state"]]
    for _ in range(steps):
        step = env.step(rng.uniform(-1, 1, env.action.size).astype(np.float32), observed=True)
        shown += [env.observe()["state"], np.array([step.reward, step.terminated, step.success])]
    return shown


def assert_same(one: list[np.ndarray], other: list[np.ndarray]) -> None:
    for left, right in zip(one, other, strict=True):
        np.testing.assert_array_equal(left, right)


def test_states_need_no_vulkan_device_and_are_the_same_without_one(no_vulkan_pool: EnvPool) -> None:
    env = no_vulkan_pool.vector_env(maniskill(), range(4), chunk=4, seed=1)
    here = EpisodicVectorEnv(VectorArgs(maniskill(), range(4), chunk=4, seed=1))
    assert env.spec == here.spec and env.spec.has_success and env.spec.state_size == 35
    np.testing.assert_array_equal(env.reset()["state"], here.reset()["state"])
    for actions in random_actions(env, 4, 4):
        one, other = env.chunk_step(actions), here.chunk_step(actions)
        np.testing.assert_array_equal(one.observation["state"], other.observation["state"])
        np.testing.assert_array_equal(one.reward, other.reward)
        assert one.episodes == other.episodes
    assert no_vulkan_pool.replaced == 0
    env.close()


def test_geometry_is_rebuilt_at_a_reset_without_a_vulkan_device(no_vulkan_pool: EnvPool) -> None:
    env = no_vulkan_pool.vector_env(maniskill("PegInsertionSide-v1"), [0])
    states = [env.reset(seeds=[seed])["state"] for seed in (1, 2, 1)]
    assert (states[0] == states[2]).all() and (states[0] != states[1]).any()
    assert no_vulkan_pool.replaced == 0
    env.close()


def test_initial_states_do_not_depend_on_processes_or_sets(no_vulkan_pool: EnvPool) -> None:
    settings = maniskill("PickCube-v1")
    whole = no_vulkan_pool.vector_env(settings, range(4), seed=2)
    halves = [no_vulkan_pool.vector_env(settings, ids, seed=2) for ids in ([0, 1], [2, 3])]
    here = EpisodicVectorEnv(VectorArgs(settings, range(4), seed=2))
    for _ in range(2):
        states = whole.reset()["state"]
        np.testing.assert_array_equal(np.concatenate([half.reset()["state"] for half in halves]), states)
        np.testing.assert_array_equal(here.reset()["state"], states)
        assert len({tuple(state) for state in states}) == 4
    for env in (whole, *halves):
        env.close()


def test_episodes_neither_read_nor_disturb_the_global_generators() -> None:
    import torch

    env = make(maniskill("PickCube-v1"))
    runs, left_behind = [], []
    for global_seed in (1, 2):
        torch.manual_seed(global_seed)
        np.random.seed(global_seed)
        runs.append(trajectory(env, seed=5))
        left_behind.append((torch.rand(1).item(), np.random.rand()))
    assert_same(*runs)
    for global_seed, left in zip((1, 2), left_behind, strict=True):
        torch.manual_seed(global_seed)
        np.random.seed(global_seed)
        assert left == (torch.rand(1).item(), np.random.rand())


@pytest.mark.parametrize(
    ("env_id", "control_mode"),
    [
        ("PushCube-v1", "pd_ee_delta_pose"),
        ("PickCube-v1", "pd_ee_delta_pose"),
        ("PushCube-v1", "pd_ee_target_delta_pose"),
        ("PickCube-v1", "pd_joint_target_delta_pos"),
        ("StackCube-v1", "pd_joint_delta_pos"),
    ],
)
def test_episode_is_the_same_in_a_fresh_env_and_after_others(env_id: str, control_mode: str) -> None:
    settings = maniskill(env_id, control_mode=control_mode)
    used, fresh = make(settings), make(settings)
    for seed in (3, 4):
        trajectory(used, seed)
    assert_same(trajectory(used, seed=7), trajectory(fresh, seed=7))
    assert_same(trajectory(used, seed=8), trajectory(fresh, seed=8))


@pytest.mark.parametrize("control_mode", ["pd_ee_delta_pose", "pd_ee_target_delta_pose"])
def test_env_restored_in_mid_episode_goes_on_bit_for_bit(no_vulkan_pool: EnvPool, control_mode: str) -> None:
    settings = maniskill(control_mode=control_mode, horizon=7)
    env, fresh = (no_vulkan_pool.vector_env(settings, range(2), chunk=2, seed=3) for _ in range(2))
    env.reset()
    before, after = np.split(random_actions(env, 8, 2), 2)
    for actions in before[:-1]:
        env.chunk_step(actions)
    saved, shown = env.state(), env.observation()
    assert [len(slot["actions"]) for slot in saved] == [6, 6]
    np.testing.assert_array_equal(fresh.restore(saved)["state"], shown["state"])
    for actions in after:
        one, other = env.chunk_step(actions), fresh.chunk_step(actions)
        np.testing.assert_array_equal(one.observation["state"], other.observation["state"])
        np.testing.assert_array_equal(one.reward, other.reward)
        assert one.episodes == other.episodes
    env.close()
    fresh.close()


def test_killed_process_costs_its_envs_one_chunk(no_vulkan_pool: EnvPool) -> None:
    import os
    import signal

    env, twin = (no_vulkan_pool.vector_env(maniskill(), range(4), seed=6) for _ in range(2))
    replaced = no_vulkan_pool.replaced
    for each in (env, twin):
        each.reset()
    actions = random_actions(env, 3, 1)
    os.kill(no_vulkan_pool.pids[0], signal.SIGSTOP)  # else it may be done before it is killed
    env.chunk_step_async(actions[0])
    os.kill(no_vulkan_pool.pids[0], signal.SIGKILL)
    result = env.chunk_step_wait()
    right = twin.chunk_step(actions[0])
    assert result.lost.tolist() == right.lost.tolist() == [True, True, False, False]
    np.testing.assert_array_equal(result.reward[2:], right.reward[2:])
    np.testing.assert_array_equal(result.observation["state"], right.observation["state"])
    assert env.chunk_step(actions[1]).valid.all()
    assert no_vulkan_pool.replaced == replaced + 1
    env.close()
    twin.close()


# --- what cannot be made ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def no_assets_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvPool]:
    """A process that finds no downloaded assets, with the variable set that has ManiSkill download unasked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MS_ASSET_DIR", str(tmp_path_factory.mktemp("assets")))
        patch.setenv("MS_SKIP_ASSET_DOWNLOAD_PROMPT", "1")
        pool = EnvPool(1)
        yield pool
        pool.close()


@pytest.mark.parametrize(
    ("env_id", "asset"),
    [
        ("PickSingleYCB-v1", "ycb"),  # it would ask
        ("PickCubeWidowXAI-v1", "widowxai"),  # its robot would ask
        ("OpenCabinetDrawer-v1", "partnet_mobility_cabinet"),
        ("ReplicaCAD_SceneManipulation-v1", "ReplicaCAD"),  # a file is not found
        ("RoboCasaKitchen-v1", "RoboCasa"),
    ],
)
def test_env_without_its_assets_is_refused_with_the_download_command(
    no_assets_pool: EnvPool, env_id: str, asset: str
) -> None:
    with pytest.raises(EnvError, match=rf"(?s)run: .*python -m mani_skill.utils.download_asset -y {asset}\b"):
        no_assets_pool.vector_env(EnvSettings("maniskill", env_id), [0])
    assert no_assets_pool.replaced == 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (maniskill("NoSuchEnv-v1"), "cannot make NoSuchEnv-v1"),
        (maniskill("TwoRobotPickCube-v1", control_mode=None), "several robots"),
        (maniskill(contrl_mode="x"), "no option 'contrl_mode'; known: control_mode"),
        (
            maniskill("PlugCharger-v1", reward_mode="dense"),
            "cannot make PlugCharger-v1: Unsupported reward mode: dense",
        ),
        (maniskill(control_mode="pd_magic"), "cannot make PushCube-v1.*pd_magic"),
    ],
)
def test_settings_that_make_no_env_are_refused_with_the_reason(settings: EnvSettings, said: str) -> None:
    with pytest.raises(EnvError, match=said):
        make(settings)


def test_images_without_a_vulkan_device_are_refused_with_the_reason(no_vulkan_pool: EnvPool) -> None:
    with pytest.raises(EnvError, match="needs a Vulkan device"):
        no_vulkan_pool.vector_env(EnvSettings("maniskill", "PushCube-v1", observation=("image",)), [0])


@pytest.mark.parametrize(("env_id", "steps"), [("PushCube-v1", 50), ("MS-CartpoleBalance-v1", 1000)])
def test_horizon_is_the_env_s_own_unless_given(env_id: str, steps: int) -> None:
    settings = EnvSettings("maniskill", env_id)
    assert make(settings).horizon == steps
    assert EpisodicVectorEnv(VectorArgs(settings, [0])).spec.horizon == steps


def test_env_without_a_success_test_is_said_to_have_none() -> None:
    assert not make(maniskill("Empty-v1", control_mode=None, reward_mode="none")).has_success


# --- one batch, as on a GPU -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env_id", "control_mode", "auto_reset", "ignore_terminations"),
    [
        ("PushCube-v1", "pd_ee_delta_pose", True, False),
        ("PushCube-v1", "pd_ee_target_delta_pose", True, True),
        ("PickCube-v1", "pd_joint_delta_pos", False, False),
        ("PegInsertionSide-v1", "pd_joint_delta_pos", True, False),
    ],
)
def test_batch_of_one_on_the_cpu_equals_the_single_env(
    env_id: str, control_mode: str, auto_reset: bool, ignore_terminations: bool
) -> None:
    settings = EnvSettings(
        "maniskill",
        env_id,
        horizon=7,
        success_bonus=3.0,
        reward_scale=0.5,
        ignore_terminations=ignore_terminations,
        fixed_actions={6: -1.0},
        simulator={**FAST, "control_mode": control_mode},
    )
    args = VectorArgs(settings, [3], 4, seed=2, auto_reset=auto_reset, record_actions=True)
    single, batch = EpisodicVectorEnv(args), ManiSkillBatch(args, "physx_cpu")
    assert single.spec == batch.spec
    np.testing.assert_array_equal(single.reset()["state"], batch.reset()["state"])
    actions = random_actions(single, 5, 4)
    if env_id == "PushCube-v1" and not ignore_terminations:
        actions[:, :, :, 0], actions[:, :, :, 1:] = 1.0, 0.0  # pushes forwards
    for chunk in actions:
        one, other = single.chunk_step(chunk), batch.chunk_step(chunk)
        for name in ("reward", "terminated", "truncated", "valid", "ended", "lost"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
        np.testing.assert_array_equal(one.observation["state"], other.observation["state"])
        if one.ended.any():
            np.testing.assert_array_equal(one.final_observation["state"], other.final_observation["state"])
        for left, right in zip(one.episodes, other.episodes, strict=True):
            np.testing.assert_array_equal(left.actions, right.actions)
            assert {**left.__dict__, "actions": None} == {**right.__dict__, "actions": None}
    assert [slot["number"] for slot in single.state()] == [slot["number"] for slot in batch.state()]
    batch.close()


def test_batch_goes_on_where_it_was_after_its_memory_was_freed() -> None:
    args = VectorArgs(maniskill("PickCube-v1", horizon=20), [0], seed=1)
    batch, untouched = ManiSkillBatch(args, "physx_cpu"), ManiSkillBatch(args, "physx_cpu")
    actions = random_actions(batch, 10, 1)
    for env in (batch, untouched):
        env.reset()
        for chunk in actions[:4]:
            env.chunk_step(chunk)
    batch.offload()
    batch.offload()
    with pytest.raises(RuntimeError, match="offloaded"):
        batch.chunk_step(actions[4])
    shown = batch.observation()["state"]
    batch.onload()
    for chunk in actions[4:]:
        one, other = batch.chunk_step(chunk), untouched.chunk_step(chunk)
        np.testing.assert_allclose(
            one.observation["state"], other.observation["state"], atol=0.02
        )  # velocities of fingers
        assert abs(one.observation["state"] - shown).max() > 0
        assert batch.slots[0].length == untouched.slots[0].length
    batch.close()
    untouched.close()


def test_resets_look_at_the_envs_once_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task may count something each time it is looked at."""
    batch = ManiSkillBatch(VectorArgs(maniskill(), [4]), "physx_cpu")
    looks: list[int] = []
    monkeypatch.setattr(batch.simulation._env, "evaluate", lambda: looks.append(1) or {})
    batch.simulation.reset(0, 1)
    batch.simulation.reset(0, 2)
    assert not looks
    batch.reset()
    assert len(looks) == 1
    batch.close()


def test_batch_restored_begins_the_next_episode_of_each_env() -> None:
    args = VectorArgs(maniskill(), [4], seed=1)
    batch, fresh = ManiSkillBatch(args, "physx_cpu"), ManiSkillBatch(args, "physx_cpu")
    batch.reset()
    batch.chunk_step(random_actions(batch, 1, 1)[0])
    saved = batch.state()
    np.testing.assert_array_equal(fresh.restore(saved)["state"], batch.reset()["state"])
    assert fresh.state()[0]["number"] == 2
    batch.close()
    fresh.close()


def test_batch_names_the_task_when_the_simulator_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = ManiSkillBatch(VectorArgs(maniskill(), [4]), "physx_cpu")
    batch.reset()
    monkeypatch.setattr(batch.simulation, "step", lambda *_: 1 / 0)
    with pytest.raises(EnvError, match="PushCube-v1 failed on physx_cpu, envs 4 to 4, steps 0 to 0: division by zero"):
        batch.chunk_step(random_actions(batch, 1, 1)[0])
    batch.close()


@pytest.mark.parametrize(
    ("kind", "backend", "devices", "expected"),
    [
        ("maniskill", "auto", "gpu", True),
        ("maniskill", "auto", "cpu", False),
        ("maniskill", "gpu", "cpu", True),
        ("maniskill", "cpu", "gpu", False),
        ("maniskill", None, "gpu", True),
        ("gymnasium", None, "gpu", False),
    ],
)
def test_simulator_backend_follows_the_devices_unless_told(
    kind: str, backend: str | None, devices: str, expected: bool
) -> None:
    settings = EnvSettings(kind, "x", simulator={"sim_backend": backend} if backend else {})
    assert uses_gpu(settings, devices) is expected
