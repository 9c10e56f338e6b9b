"""Checks against the machine: simulator, env, assets, rendering, run directory, resuming."""

import shutil
import sys
from pathlib import Path

import pytest
import torch

from embodied_rl import run_faults
from embodied_rl.checkpoint import save_checkpoint
from embodied_rl.config import Config
from embodied_rl.faults import Fault
from embodied_rl.preflight import preflight
from embodied_rl.recipe import load_recipe

PUSH_CUBE = "maniskill_pushcube_ppo"


@pytest.fixture(autouse=True)
def no_gpu_and_no_assets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("MS_ASSET_DIR", str(tmp_path / "assets"))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "runs/foo"


def config(*overrides: str, recipe: str = PUSH_CUBE) -> Config:
    loaded, faults = load_recipe(recipe, overrides)
    assert faults == []
    return loaded


def check(loaded: Config, run_dir: Path, resume: bool = False, dry_run: bool = False) -> dict[str, Fault]:
    return {fault.key: fault for fault in preflight(loaded, run_dir, resume, dry_run)}


def save(run_dir: Path, loaded: Config, step: int = 10) -> Path:
    policy = {"w": torch.ones(2)}
    return save_checkpoint(run_dir, step, {"policy": policy}, {}, loaded.model_dump(mode="json"), keep=3)


@pytest.mark.parametrize("recipe", [PUSH_CUBE, "cartpole_ppo"])
def test_a_run_that_can_start_has_no_faults_and_leaves_no_trace(recipe: str, run_dir: Path) -> None:
    assert check(config(recipe=recipe), run_dir) == {}
    assert not run_dir.parent.exists()


@pytest.mark.parametrize(
    ("env_id", "near"),
    [
        ("PushCub-v1", "PushCube-v1"),
        ("pushcube", "PushCube-v1"),
        ("StackCubes-v1", "StackCube-v1"),
        ("CartPole-v1", "it is an env of env.kind gymnasium"),
    ],
)
def test_an_unknown_env_is_answered_with_near_ones(env_id: str, near: str, run_dir: Path) -> None:
    fault = check(config(f"env.id={env_id}"), run_dir)["env.id"]
    assert (fault.value, fault.problem) == (env_id, "no such ManiSkill env")
    assert near in fault.hint


def test_an_unknown_gymnasium_env_is_answered_with_near_ones(run_dir: Path) -> None:
    assert "CartPole-v1" in check(config("env.id=CartPol-v1", recipe="cartpole_ppo"), run_dir)["env.id"].hint
    other = check(config("env.id=PushCube-v1", recipe="cartpole_ppo"), run_dir)["env.id"]
    assert other.hint == "it is an env of env.kind maniskill"


def test_a_missing_simulator_is_answered_with_the_command(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mani_skill", None)
    faults = check(config("env.id=Nonsense-v1"), run_dir)
    assert set(faults) == {"env.kind"}, "without the simulator nothing is known of its envs"
    assert "ManiSkill is not installed" in faults["env.kind"].problem
    assert faults["env.kind"].hint == "run: pip install -e '.[maniskill]'"


def test_a_module_that_a_gymnasium_env_needs_is_named(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mujoco", None)
    fault = check(config("env.id=Ant-v5", recipe="cartpole_ppo"), run_dir)["env.id"]
    assert "mujoco" in fault.problem
    assert fault.hint == "run: pip install 'gymnasium[mujoco]'"


def test_missing_assets_are_answered_with_the_download_command(run_dir: Path, tmp_path: Path) -> None:
    fault = check(config("env.id=PickSingleYCB-v1"), run_dir)["env.id"]
    assert fault.problem == "its assets are not downloaded: ycb"
    assert fault.hint == "run: python -m mani_skill.utils.download_asset -y ycb"
    (tmp_path / "assets/data/assets/mani_skill2_ycb").mkdir(parents=True)
    assert check(config("env.id=PickSingleYCB-v1"), run_dir) == {}


def test_a_put_on_plate_scene_names_what_it_lacks_and_how_it_can_be_seen(run_dir: Path) -> None:
    scene = "env.id=PutOnPlateInScene25Main-v3"
    faults = check(config(scene), run_dir, dry_run=True)
    assert set(faults) == {"env.id", "env.observation", "env.reward_mode"}
    assert "bridge_v2_real2sim" in faults["env.id"].problem and "CC BY-NC 4.0" in faults["env.id"].problem
    assert faults["env.id"].hint.startswith("run: python -m mani_skill.utils.download_asset -y bridge_v2_real2sim")
    way = ("env.observation=[image]", "env.reward_mode=none", "policy.kind=cnn")
    assert set(check(config(scene, *way), run_dir, dry_run=True)) == {"env.id"}
    own = check(config("env.id=PutCarrotOnPlateInScene-v1", *way), run_dir, dry_run=True)["env.id"]
    assert "licensed for non-commercial use" in own.problem


def test_an_env_of_another_package_needs_its_module(run_dir: Path) -> None:
    fault = check(config("env.id=no_such_package.envs:Foo-v1"), run_dir)["env.id"]
    assert fault.problem == "no module no_such_package.envs"
    assert check(config("env.id=gymnasium:Foo-v1"), run_dir) == {}


def test_an_env_of_one_s_own_may_lie_in_the_working_directory(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = config("env.kind=own_envs:Reach", "env.id=Reach", recipe="cartpole_ppo")
    assert "start where it lies" in check(own, run_dir)["env.kind"].hint
    (tmp_path / "own_envs.py").touch()
    monkeypatch.chdir(tmp_path)
    assert check(own, run_dir) == {}
    assert check(config("env.id=own_envs:Foo-v1"), run_dir) == {}


def test_images_without_a_vulkan_device_point_to_the_doctor(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VK_DRIVER_FILES", "/nonexistent")
    monkeypatch.setenv("VK_ICD_FILENAMES", "/nonexistent")
    images = config("env.observation=[state, image]")
    fault = check(images, run_dir)["env.observation"]
    assert "Vulkan" in fault.problem
    assert "embodied-rl doctor" in fault.hint
    assert check(images, run_dir, dry_run=True) == {}, "a dry run starts no process to ask"
    assert check(config(), run_dir) == {}, "state needs no rendering"


def test_a_gpu_simulation_needs_a_gpu(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu = config("env.sim_backend=gpu")
    assert check(on_gpu, run_dir)["env.sim_backend"].hint == "nearest valid: auto"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert check(on_gpu, run_dir) == {}
    away = config("env.sim_backend=gpu", "env.server=tcp://127.0.0.1:5005")
    assert "simulated on CPUs" in check(away, run_dir)["env.sim_backend"].problem


def test_a_token_that_no_server_asks_for_is_a_fault(run_dir: Path, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a token that is long enough")
    given, server = f"env.server_token_file={token}", "env.server=tcp://127.0.0.1:5005"
    for without in ([], [f"env.python={sys.executable}"], ["env.mix=[{}]"]):
        assert "needs env.server" in check(config(given, *without), run_dir)["env.server_token_file"].problem
    assert check(config(given, server), run_dir) == {}
    assert check(config(given, "env.mix=[{}, {server: 'tcp://127.0.0.1:5005'}]"), run_dir) == {}


def test_grpo_needs_whole_episodes_of_the_envs_own_length(run_dir: Path) -> None:
    fault = check(config("env.horizon=null", recipe="maniskill_pushcube_grpo"), run_dir)["rollout.steps"]
    assert "the env's own 50" in fault.problem
    assert fault.hint == "nearest valid: 50"


def test_a_run_directory_below_a_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for run_dir in (tmp_path / "file", tmp_path / "file/runs/foo"):
        fault = check(config(), run_dir)["run directory"]
        assert f"{tmp_path}/file is a file" in fault.problem


@pytest.mark.parametrize("root", ["/proc/runs", "/sys/runs"])
def test_a_run_directory_on_a_file_system_that_takes_no_files_cannot_be_written(root: str) -> None:
    fault = check(config(), Path(root) / "foo")["run directory"]
    assert "cannot be written" in fault.problem
    assert "run_root" in fault.hint


def test_nothing_to_resume_names_the_runs_that_can_be(run_dir: Path) -> None:
    assert check(config(), run_dir, resume=True)["--resume"].hint == "to start anew, leave --resume out"
    save(run_dir.parent / "other", config())
    fault = check(config(), run_dir, resume=True)["--resume"]
    assert "does not exist" in fault.problem
    assert str(run_dir.parent / "other") in fault.hint
    run_dir.mkdir()
    assert "holds no run" in check(config(), run_dir, resume=True)["--resume"].problem


def test_a_run_that_died_before_its_first_checkpoint_can_be_resumed(run_dir: Path) -> None:
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").touch()
    assert check(config(), run_dir, resume=True) == {}


def test_a_checkpoint_that_a_going_run_removes_meanwhile_is_a_fault(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(run_dir, config())
    find = run_faults.latest_checkpoint

    def find_as_it_goes(run_dir: Path) -> tuple[Path | None, list[str]]:
        path, warnings = find(run_dir)
        assert path is not None
        shutil.rmtree(path)
        return path, warnings

    monkeypatch.setattr(run_faults, "latest_checkpoint", find_as_it_goes)
    fault = check(config(), run_dir, resume=True)["--resume"]
    assert (fault.problem, fault.hint) == ("no such directory", "is the run still going on?")


def test_damaged_and_foreign_checkpoints_are_named(run_dir: Path) -> None:
    for step in (10, 20):
        (save(run_dir, config(), step) / "policy.safetensors").write_bytes(b"garbage")
    (run_dir / "checkpoints/step_000030").mkdir()
    problem = check(config(), run_dir, resume=True)["--resume"].problem
    expected = (
        "step_000010: policy.safetensors",
        "step_000020: policy.safetensors",
        "step_000030: no manifest",
    )
    assert all(text in problem for text in expected)


def test_a_sound_checkpoint_before_a_damaged_one_can_be_resumed(run_dir: Path) -> None:
    save(run_dir, config(), 10)
    (save(run_dir, config(), 20) / "state.json").unlink()
    assert check(config(), run_dir, resume=True) == {}


def test_a_resumed_run_keeps_network_env_and_algorithm(run_dir: Path) -> None:
    save(run_dir, config())
    changed = config("policy.hidden=[64]", "env.id=PullCube-v1", "algorithm.lr=1e-2", "policy.log_std=0.5")
    faults = check(changed, run_dir, resume=True)
    assert set(faults) == {"policy.hidden", "policy.log_std", "env.id", "algorithm.lr"}
    assert faults["policy.hidden"].problem == "a resumed run keeps its network; it was [128, 128] in step_000010"
    assert "keeps its env; it was PushCube-v1" in faults["env.id"].problem
    assert faults["env.id"].hint == f"to go on as it was: embodied-rl train {run_dir} --resume"


def test_a_resumed_run_keeps_the_number_of_workers_whose_state_is_stored(run_dir: Path) -> None:
    slots = "cluster.cpu_slots=2"
    save(run_dir, config(slots))
    changed = config(slots, "placement=actor: all/1; rollout: 0; env: all")
    problem = check(changed, run_dir, resume=True)["placement"].problem
    assert problem == "gives 2 actor workers, and step_000010 holds the state of 1"
    assert check(config(slots, "placement=actor: 0; rollout: all/1; env: 1"), run_dir, resume=True) == {}


def test_a_resumed_run_may_go_on_longer_and_elsewhere(run_dir: Path) -> None:
    save(run_dir, config())
    changed = config(
        "train.iterations=500", "evaluation.every=5", "tracking.wandb=disabled", "cluster.timeout_s=10",
        "run_root=elsewhere", "env.processes=1", "placement=env, rollout, actor: 0",
    )  # fmt: skip
    assert check(changed, run_dir, resume=True) == {}


def test_a_resumed_mix_may_have_its_servers_elsewhere_and_nothing_else(run_dir: Path) -> None:
    mix = "env.mix=[{{id: PushCube-v1, weight: {}}}, {{id: PullCube-v1, server: 'tcp://{}:5005'}}]"
    save(run_dir, config(mix.format(1, "yesterday")))
    assert check(config(mix.format(1, "today")), run_dir, resume=True) == {}
    assert set(check(config(mix.format(2, "today")), run_dir, resume=True)) == {"env.mix"}


def test_checks_of_keys_that_were_not_understood_are_left_out(run_dir: Path) -> None:
    loaded, faults = load_recipe(PUSH_CUBE, ["env.kind=gazebo", "env.id=libero_10"])
    assert [fault.key for fault in faults] == ["env.kind"]
    assert preflight(loaded, run_dir, resume=False, dry_run=False, defaulted=["env.kind"]) == []


def test_faults_of_all_kinds_come_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VK_DRIVER_FILES", "/nonexistent")
    monkeypatch.setenv("VK_ICD_FILENAMES", "/nonexistent")
    loaded = config("env.id=PickSingleYCB-v1", "env.observation=[state, image]", "env.sim_backend=gpu")
    assert set(check(loaded, Path("/proc/foo"))) == {
        "env.id", "env.observation", "env.sim_backend", "run directory"
    }  # fmt: skip
